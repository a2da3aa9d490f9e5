"""What this machine can do: device, cores, instruction sets, dtypes that are fast here, measured peaks.

The machine description is the package's only global state. It is found by looking and by small probes, never
by name alone: a dtype that the hardware lacks is not slow, it takes a hundred times as long.
"""

import atexit
import contextlib
import errno
import functools
import getpass
import importlib.metadata
import os
import platform
import random
import re
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from speedlab.display import Table, table

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
# A dtype is fast here if a small product in it takes at most this many times the fp32 one.
FAST = 3.0
_PROBE_SIZE = 256
# Room that torch.compile's cache needs: kernels are small, but the precompiled header of one compiler takes 160 MB.
_CACHE_ROOM = 2**28
NO_COMPILER = (
    "none that works (a CPU needs g++ or clang++, on Windows cl; a GPU needs Triton), so graphs are built, counted "
    "and run without compiled kernels, and recorded times stand in for measured ones"
)
_PACKAGES = ("torch", "torchvision", "lightning", "transformers")
# Instruction sets that decide which dtypes are fast on a CPU, by the names the kernel gives them.
_ISA = {
    "amx_bf16": "AMX-BF16",
    "amx_fp16": "AMX-FP16",
    "avx512_bf16": "AVX512-BF16",
    "avx512_fp16": "AVX512-FP16",
    "avx512f": "AVX512",
    "avx2": "AVX2",
    "bf16": "BF16",
    "asimdhp": "FP16",
    "asimd": "NEON",
}


@dataclass(frozen=True)
class Machine:
    """What `describe` found. `fast` holds the dtypes whose product was at most `FAST` times slower than fp32's."""

    device: str
    name: str
    cores: int
    memory_gib: float
    instructions: tuple[str, ...]
    fast: tuple[str, ...]
    slow: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    scale: str
    load: float

    def table(self) -> Table:
        slow = f"; slow here: {', '.join(self.slow)}" if self.slow else ""
        rows = [
            ("device", f"{self.device} ({self.name})"),
            ("cores", f"{self.cores}, load {self.load:.2f}"),
            ("memory", f"{self.memory_gib:.1f} GiB"),
            ("hardware for dtypes", ", ".join(self.instructions) or "none known"),
            ("fast dtypes", ", ".join(self.fast) + slow),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions)),
            ("scale", self.scale),
        ]
        return table(["this machine", "found"], rows, measured=True)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def describe() -> Machine:
    """Describe this machine in one small table; takes under two seconds."""
    where = device()
    on_gpu = where.type == "cuda"
    memory = torch.cuda.get_device_properties(where).total_memory if on_gpu else psutil.virtual_memory().total
    ratios = probe()
    return Machine(
        device=where.type,
        name=torch.cuda.get_device_name(where) if on_gpu else _cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=memory / 1024**3,
        instructions=_instructions(where),
        fast=tuple(name for name, ratio in ratios.items() if ratio <= FAST),
        slow=tuple(name for name, ratio in ratios.items() if ratio > FAST),
        versions=(("Python", platform.python_version()), *_versions()),
        scale=scale(),
        load=psutil.getloadavg()[0],
    )


def device() -> torch.device:
    """The device that lessons train on: the first CUDA GPU where there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def scale() -> str:
    """`quick` (small models, embedded data, no network) or `full`, from the environment variable SPEEDLAB_SCALE."""
    chosen = os.environ.get("SPEEDLAB_SCALE", "quick").strip().lower() or "quick"
    if chosen not in ("quick", "full"):
        raise ValueError(f"SPEEDLAB_SCALE is {chosen!r}; it must be 'quick' or 'full'. Unset it to run at 'quick'.")
    return chosen


def seed_everything(seed: int) -> torch.Generator:
    """Seed Python, NumPy and PyTorch, and return a fresh CPU generator with the same seed for loaders."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


@functools.cache
def probe() -> dict[str, float]:
    """How many times longer than fp32's a small square product takes in each dtype, on `device()`.

    The probe is tiny on purpose: where the hardware lacks a dtype, a large product would not return. On a CPU it
    counts the processor time of one thread, so that the answer is the same on a busy machine.
    """
    where = device()
    threads = torch.get_num_threads()
    if where.type == "cuda":
        # a GPU needs a larger product before its matrix units, not its launches, decide
        size, clock = 2048, synchronised_clock(where)
    else:
        fine = time.get_clock_info("thread_time").resolution < 1e-6
        size, clock = _PROBE_SIZE, time.thread_time if fine else time.perf_counter
        torch.set_num_threads(1)
    try:
        seconds = {name: _product_seconds(dtype, size, where, clock) for name, dtype in DTYPES.items()}
    finally:
        torch.set_num_threads(threads)
    return {name: spent / seconds["fp32"] for name, spent in seconds.items()}


def is_fast(dtype: str) -> bool:
    """Whether a product in `dtype` ('fp32', 'bf16', 'fp16', 'fp64') is at most a few times slower than fp32 here."""
    if dtype not in DTYPES:
        raise ValueError(f"Unknown dtype {dtype!r}; expected one of {', '.join(DTYPES)}.")
    return probe()[dtype] <= FAST


@functools.cache
def peak_flops(dtype: str = "fp32") -> float:
    """The best rate of a large square matrix product in `dtype` on `device()`, in FLOP/s, measured once a session.

    A product of two (n, n) matrices counts 2·n³ operations. Where the dtype is slow, the small probe's rate is given.
    """
    where = device()
    size = (8192 if where.type == "cuda" else 1024) if is_fast(dtype) else _PROBE_SIZE
    return 2 * size**3 / _product_seconds(DTYPES[dtype], size, where, synchronised_clock(where), patience=0.5)


@functools.cache
def copy_bandwidth() -> float:
    """The best rate of a large copy on `device()`, in bytes/s, counting bytes read and bytes written."""
    where = device()
    source = torch.ones((2**30 if where.type == "cuda" else 2**26) // 4, device=where)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), synchronised_clock(where), patience=0.5)


@functools.cache
def compiler(kind: str | None = None) -> str | None:
    """The compiler of torch.compile's own backend that works here: 'g++', 'clang++', 'cl', 'Triton'; None: none does.

    `kind` is 'cpu' or 'cuda'; by default `device()` decides. The compiler is tried on a function of one line, because
    one that is found may still lack a header or a linker: seconds the first time, a moment once that kernel is in the
    cache, whose folder is checked first (see `compile_cache`). `NO_COMPILER` is the sentence for None.
    """
    compile_cache()
    kind = kind or device().type
    try:
        from torch._inductor import config
        from torch._inductor.cpp_builder import get_cpp_compiler

        # looked for before the trial, which would succeed without one where the cache has its kernel
        name = "Triton" if kind == "cuda" else Path(get_cpp_compiler()).stem
        # a pool of compiling workers would stay behind; on a GPU, the first compilation warns that TF32 is off
        with config.patch(compile_threads=1), warnings.catch_warnings(action="ignore"):
            torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=kind))
    except Exception:  # whatever a missing compiler, header or linker makes of it
        return None
    return name


@functools.cache
def compile_cache() -> str:
    """Make sure that torch.compile can write its cache, and say where that is, in words that name no path.

    Call it before anything imports torch._dynamo, which fails without that folder. One that cannot be written, or
    whose disk is full, is replaced by a temporary folder until this process ends; child processes inherit it.
    """
    # torch's own default, without importing the part of torch that fails to import where it cannot make this folder
    usual = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir(), f"torchinductor_{_user()}")
    try:
        Path(usual).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=usual) as probe:
            probe.write(bytes(2**20))
        if shutil.disk_usage(usual).free < _CACHE_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        folder = tempfile.mkdtemp(prefix="speedlab-compile-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        return (
            f"a temporary one, because the usual one cannot be written ({error.strerror}); what is compiled is gone "
            "when this process ends. Free its disk, or set TORCHINDUCTOR_CACHE_DIR to a folder that you may write"
        )
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(usual)
    return "the usual one (TORCHINDUCTOR_CACHE_DIR names another)"


def _user() -> str:
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, ImportError, OSError):  # a container may run as a number without a name
        return f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"


def half_products(where: torch.device | str = "cpu") -> contextlib.AbstractContextManager:
    """Make 16-bit training affordable on a CPU that has no hardware for it; `where` is the device that trains.

    Inside this context, matrix products, convolutions and attention on bf16 or fp16 CPU tensors are computed in fp32
    and rounded once to the 16-bit type, which is what matrix hardware does (exact products, fp32 sums). The numbers,
    the dtypes and what autograd keeps are those of 16-bit training; the time is not, and is never shown as such.
    On a GPU, and where bf16 and fp16 are fast, the context does nothing.
    """
    if torch.device(where).type != "cpu":
        return contextlib.nullcontext()
    # on a machine with a GPU, the probe says nothing about the CPU
    if device().type == "cpu" and is_fast("bf16") and is_fast("fp16"):
        return contextlib.nullcontext()
    return _ProductsInFp32()


class _ProductsInFp32(TorchDispatchMode):
    _PRODUCTS = re.compile(r"::(mm|addmm|bmm|baddbmm|addmv|mv|dot|linear|_?convolution|_scaled_dot_product)")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        halves = [a.dtype for a in (*args, *kwargs.values()) if _is_half(a)]
        if not halves or not self._PRODUCTS.search(func._schema.name):
            return func(*args, **kwargs)
        out = func(*map(_widen, args), **{key: _widen(value) for key, value in kwargs.items()})
        if not isinstance(out, tuple | list):
            return out.to(halves[0])
        # attention also returns its log-sum-exp, which stays in fp32 on every kind of hardware
        keep = 1 if "scaled_dot_product" in func._schema.name and "backward" not in func._schema.name else len(out)
        return type(out)(
            o.to(halves[0]) if i < keep and isinstance(o, torch.Tensor) and o.dtype == torch.float32 else o
            for i, o in enumerate(out)
        )


def slug() -> str:
    """A file name for this machine's results: `amd-epyc-2-cores-avx2`, `nvidia-h200`."""
    if device().type == "cuda":
        text = torch.cuda.get_device_name()
    else:
        sets = _instructions(torch.device("cpu"))
        text = f"{_cpu_name()} {describe().cores} cores {sets[0] if sets else ''}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def stamp() -> dict[str, object]:
    """The full stamp of a result: machine, instruction sets, versions, load, date and git commit, as plain values."""
    found = describe()
    return {
        "machine": found.name,
        "device": found.device,
        "cores": found.cores,
        "threads": torch.get_num_threads(),
        "memory_gib": round(found.memory_gib, 1),
        "instructions": list(found.instructions),
        "fast_dtypes": list(found.fast),
        "versions": dict(found.versions),
        "load": round(found.load, 2),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
    }


def _commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"


def _is_half(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16) and value.is_cpu


def _widen(value: object) -> object:
    return value.float() if _is_half(value) else value


def _product_seconds(
    dtype: torch.dtype, size: int, where: torch.device, clock: Callable[[], float], patience: float = 0.0
) -> float:
    # random numbers: zeros and ones draw less power and can run faster than real data
    a = torch.randn(size, size, device=where).to(dtype)
    return _best(lambda: a @ a, clock, patience)


def _best(work: Callable[[], object], clock: Callable[[], float], patience: float) -> float:
    """The shortest of seven runs, or of as many as fit into `patience` seconds: a busy moment should not decide."""
    work()
    best, begin, runs = float("inf"), clock(), 0
    while runs < 7 or clock() - begin < patience:
        runs += 1
        start = clock()
        work()
        best = min(best, clock() - start)
        # far from fast: one sample has said enough
        if best > 0.1:
            break
    return best


def synchronised_clock(where: torch.device) -> Callable[[], float]:
    """A clock in seconds that waits for the device's queue first: without that, a GPU's clock times the launches."""
    if where.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(where)
        return time.perf_counter()

    return clock


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


@functools.cache
def _cpu_name() -> str:
    if platform.system() == "Linux":
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        if found:
            return found[1].strip()
    if platform.system() == "Darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=10
        )
        if asked.returncode == 0:
            return asked.stdout.strip()
    return platform.processor() or platform.machine()


@functools.cache
def _instructions(where: torch.device) -> tuple[str, ...]:
    if where.type == "cuda":
        major, minor = torch.cuda.get_device_capability(where)
        return (f"compute capability {major}.{minor}",)
    if platform.system() == "Linux":
        found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        flags = set(found[1].split()) if found else set()
        names = [name for flag, name in _ISA.items() if flag in flags]
    else:
        names = [torch.backends.cpu.get_cpu_capability()]
    held = os.environ.get("ONEDNN_MAX_CPU_ISA")
    return (*names, f"oneDNN held to {held}") if held else tuple(names)
