"""What this machine can do: device, cores, instruction sets, dtypes that are fast here, measured peaks.

The machine description is the package's only global state. It is found by looking and by small probes, never
by name alone: a dtype that the hardware lacks is not merely slow but takes a hundred times as long.
"""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from speedlab.display import Table, Tabular

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
# A dtype is fast here if a small matrix product in it takes at most this many times as long as in fp32.
FAST = 3.0
_PROBE_SIZE = 256
_PACKAGES = ("torch", "torchvision", "lightning", "transformers")
# What decides which dtypes are fast on a CPU, as torch.cpu.get_capabilities names it.
_ISA = ("amx_bf16", "amx_fp16", "avx512_bf16", "avx512_fp16", "avx512_f", "avx2", "bf16", "fp16_arith", "neon")


@dataclass(frozen=True, repr=False)
class Machine(Tabular):
    """What `describe` found. `fast` holds the dtypes whose product was at most `FAST` times slower than fp32's.

    `busy` is the share of all cores' time that went to other work while `describe` ran.
    """

    device: str
    name: str
    cores: int
    memory_gib: float
    instructions: tuple[str, ...]
    fast: tuple[str, ...]
    slow: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    scale: str
    busy: float

    def table(self) -> Table:
        slow = f"; slow here: {', '.join(self.slow)}" if self.slow else ""
        rows = [
            ("device", f"{self.device} ({self.name})"),
            ("cores", f"{self.cores}, {self.busy:.0%} busy with other work"),
            ("memory", f"{self.memory_gib:.1f} GiB"),
            ("hardware for dtypes", ", ".join(self.instructions) or "none known"),
            ("fast dtypes", ", ".join(self.fast) + slow),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions)),
            ("scale", self.scale),
        ]
        return Table(("this machine", "found"), tuple(rows), stamp=True)


def describe() -> Machine:
    """Describe this machine in one small table; takes under two seconds."""
    where = device()
    on_gpu = where.type == "cuda"
    memory = torch.cuda.get_device_properties(where).total_memory if on_gpu else psutil.virtual_memory().total
    ratios, known = probe(), [name for name in _PACKAGES if importlib.util.find_spec(name)]
    return Machine(
        device=where.type,
        name=torch.cuda.get_device_name(where) if on_gpu else _cpu_name(),
        cores=cores(),
        memory_gib=memory / 1024**3,
        instructions=_instructions(where),
        fast=tuple(name for name, ratio in ratios.items() if ratio <= FAST),
        slow=tuple(name for name, ratio in ratios.items() if ratio > FAST),
        versions=(("Python", platform.python_version()), *((n, importlib.metadata.version(n)) for n in known)),
        scale=scale(),
        busy=psutil.cpu_percent(interval=0.2) / 100,
    )


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    """The time of a small square matrix product in each dtype on `device()`, as a multiple of the time in fp32.

    The probe is tiny on purpose: where the hardware lacks a dtype, a large product would not return. On a CPU it
    counts the processor time of one thread, so that the answer is the same on a busy machine.
    """
    where = device()
    threads = torch.get_num_threads()
    if where.type == "cuda":
        # on a GPU, the product must be larger for its matrix units, not its launches, to set the time
        size, clock = 2048, synchronised_clock(where)
    else:
        fine = time.get_clock_info("thread_time").resolution < 1e-6
        size, clock = _PROBE_SIZE, time.thread_time if fine else time.perf_counter
        torch.set_num_threads(1)
    try:
        seconds = {name: _best(_product(name, size), clock) for name in DTYPES}
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
    """The best rate of a large square matrix product in `dtype` on `device()`, in FLOP/s, measured once per session.

    A product of two (n, n) matrices counts 2·n³ operations. Where the dtype is slow, a small product's rate is given.
    """
    where = device()
    size = (8192 if where.type == "cuda" else 1024) if is_fast(dtype) else _PROBE_SIZE
    return 2 * size**3 / _best(_product(dtype, size), synchronised_clock(where), patience=0.5)


@functools.cache
def copy_bandwidth() -> float:
    """The best rate of a large copy on `device()`, in bytes/s, counting bytes read and bytes written."""
    where = device()
    source = torch.ones((2**30 if where.type == "cuda" else 2**26) // 4, device=where)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), synchronised_clock(where), patience=0.5)


def _product(dtype: str, size: int) -> Callable[[], torch.Tensor]:
    # random, as zeros and ones draw less power and can run faster than real data; the caller's random state is kept
    a = torch.randn(size, size, device=device(), generator=torch.Generator(device())).to(DTYPES[dtype])
    return lambda: a @ a


def _best(work: Callable[[], object], clock: Callable[[], float], patience: float = 0.0) -> float:
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


@functools.cache
def processor() -> dict[str, str]:
    """What Linux says of the processor: 'model name', 'cpu family', 'model', 'stepping'. Elsewhere, nothing."""
    first = place.read_text().split("\n\n")[0] if (place := Path("/proc/cpuinfo")).exists() else ""
    return dict(re.findall(r"(?m)^(model name|cpu family|model|stepping)\s*: (.+)$", first))


def _cpu_name() -> str:
    named = processor().get("model name") or torch.cpu.get_capabilities().get("cpu_name")
    return named or platform.processor() or platform.machine()


def _instructions(where: torch.device) -> tuple[str, ...]:
    if where.type == "cuda":
        return ("compute capability {}.{}".format(*torch.cuda.get_device_capability(where)),)
    known, held = torch.cpu.get_capabilities(), os.environ.get("ONEDNN_MAX_CPU_ISA")
    names = [name.upper().replace("_", "-") for name in _ISA if known.get(name)]
    return (*names, *[f"oneDNN held to {held}"] * bool(held))
