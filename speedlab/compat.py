"""What a machine may lack, found or replaced: torch.compile's compiler, its cache folder, 16-bit matrix products."""

import atexit
import contextlib
import errno
import functools
import getpass
import os
import re
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from speedlab import machine

# torch's cache key of a compiled graph omits the instruction set that its code is for. On a different one (after
# ATEN_CPU_CAPABILITY=avx2, or on a different processor), that code, when recompiled, writes beyond its arrays.
torch.compiler.config.cache_key_tag += torch.backends.cpu.get_cpu_capability()
# Room that torch.compile's cache needs: kernels are small, but the precompiled header of one compiler takes 160 MB.
_CACHE_ROOM = 2**28
NO_COMPILER = (
    "none that works (a CPU needs g++ or clang++, on Windows cl; a GPU needs Triton), so graphs are built, counted "
    "and run without compiled kernels, and recorded times stand in for measured ones"
)


@functools.cache
def compiler(kind: str | None = None) -> str | None:
    """The compiler that torch.compile's own backend can use here: 'g++', 'clang++', 'cl', 'Triton', or None.

    `kind` is 'cpu' or 'cuda'; by default `machine.device()` decides. The compiler is tried on a one-line function,
    because one that exists may still lack a header or a linker. The trial takes seconds, or a moment once the kernel
    is in the cache, whose folder is checked first (see `compile_cache`). `NO_COMPILER` is the sentence for None.
    """
    compile_cache()
    kind = kind or machine.device().type
    try:
        from torch._inductor import config
        from torch._inductor.cpp_builder import get_cpp_compiler

        # looked for before the trial, which would succeed without a compiler if its kernel is in the cache
        name = "Triton" if kind == "cuda" else Path(get_cpp_compiler()).stem
        # a pool of compile workers would be left running; on a GPU, the first compilation warns that TF32 is off
        with config.patch(compile_threads=1), warnings.catch_warnings(action="ignore"):
            torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=kind))
    except Exception:  # whatever a missing compiler, header or linker makes of it
        return None
    return name


@functools.cache
def compile_cache() -> str:
    """Make sure that torch.compile can write its cache, and say where that is, in words that name no path.

    Call it before anything imports torch._dynamo, which fails without that folder. A folder that is not writable, or
    whose disk is full, is replaced by a temporary folder until this process ends; child processes inherit it.
    """
    # torch's own default, without importing the part of torch whose import fails if it cannot make this folder
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
            f"a temporary one, because the usual one cannot be written ({error.strerror}); compiled code is lost "
            "when this process ends. Free space on its disk, or set TORCHINDUCTOR_CACHE_DIR to a writable folder"
        )
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(usual)
    return "the usual one (TORCHINDUCTOR_CACHE_DIR names another)"


def _user() -> str:
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, ImportError, OSError):  # a container may run under a user id without a name
        return f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"


def half_products(where: torch.device | str = "cpu") -> contextlib.AbstractContextManager:
    """Make 16-bit training affordable on a CPU that has no hardware for it; `where` is the training device.

    Inside it, matrix products, convolutions and attention on bf16 or fp16 CPU tensors are computed in fp32, rounded
    once to the 16-bit type, as matrix hardware does (exact products, fp32 sums). Numbers, dtypes and what autograd
    keeps are those of 16-bit training; the time is not. On a GPU, and with a type that is fast here, it does nothing.
    """
    unknown = machine.device().type != "cpu"  # where there is a GPU, the probe says nothing about the CPU
    slow = [machine.DTYPES[name] for name in ("bf16", "fp16") if unknown or not machine.is_fast(name)]
    return _ProductsInFp32(slow) if slow and torch.device(where).type == "cpu" else contextlib.nullcontext()


class _ProductsInFp32(TorchDispatchMode):
    _PRODUCTS = re.compile(r"::((add|b|baddb)?mm|(add)?mv|dot|inner|tensordot|einsum|lin|matmul|_?conv|_?scaled_dot)")

    def __init__(self, slow: list[torch.dtype]):
        super().__init__()
        self.slow = slow

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile does nothing inside this context

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        halves = [a.dtype for a in tree_leaves((args, kwargs)) if self._is_slow(a)]
        if not halves or not self._PRODUCTS.search(func._schema.name):
            return func(*args, **(kwargs or {}))
        written = (kwargs or {}).get("out", args[0]) if func._schema.is_mutable else None
        args, kwargs = tree_map(lambda a: a.float() if self._is_slow(a) else a, (args, kwargs or {}))
        out = func(*args, **kwargs) if written is None else written.copy_(func(*args, **kwargs))
        # attention also returns its log-sum-exp, which stays in fp32 on every kind of hardware
        if "::_scaled_dot_product" in func._schema.name and "backward" not in func._schema.name:
            return out[0].to(halves[0]), *out[1:]
        return tree_map_only(torch.Tensor, lambda o: o.to(halves[0]) if o.dtype == torch.float32 else o, out)

    def _is_slow(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.is_cpu and value.dtype in self.slow
