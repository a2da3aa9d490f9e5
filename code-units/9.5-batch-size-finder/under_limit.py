"""Run a function in a separate process with little memory, so that running out is real and does no harm.

Notebook 2 calls `run`, which runs this file and sends it the function's source (python under_limit.py < order.json).
"""

import contextlib
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch

from speedlab import machine
from speedlab.data import models

# Small blocks (above all Python's own objects) come from one heap with room to spare; large blocks are taken from
# the system and returned at once. So it is tensors that hit the limit, and torch reports that in its own words.
ENVIRONMENT = {
    "PYTHONMALLOC": "malloc",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}
ROOM = 32 * 2**20


@dataclass(frozen=True)
class Outcome:
    """What a function under a limit did: the batch sizes that it began and those whose step ran to the end, both
    in order of first appearance; what it returned (None if it did not return); and how it ended, in words.
    """

    begun: tuple[int, ...]
    ran: tuple[int, ...]
    returned: object
    ended: str


def run(spare_mib: float, function: Callable, *arguments, needs=(), pretend: bool = False, timeout=100.0) -> Outcome:
    """Call `function(note, *arguments)` in a new process that may take `spare_mib` MiB more than it holds by then.

    The function reports each step with `note("begins", size)` and `note("ran", size)`. `needs` lists what it calls
    from the same notebook. The limit applies to a GPU's memory if there is one, otherwise on Linux to address space;
    elsewhere, or if `pretend` is set, it is simulated. An error, signal or timeout there goes into `ended`.
    """
    if spare_mib <= 0:
        raise ValueError(f"spare_mib={spare_mib} must be positive: the process needs some memory to work with.")
    order = {
        "source": source_of(function, *needs),
        "name": function.__name__,
        "arguments": arguments,
        "spare": int(spare_mib * 2**20),
        "pretend": pretend,
    }
    command, environment = [sys.executable, __file__], {**os.environ, **ENVIRONMENT}
    try:
        child = subprocess.run(
            command, input=json.dumps(order), env=environment, capture_output=True, text=True, timeout=timeout
        )
        said, code = child.stdout, child.returncode
    except subprocess.TimeoutExpired as late:
        said, code = late.stdout or "", None
        said = said if isinstance(said, str) else said.decode()  # str on Windows, bytes elsewhere
    notes = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    begun, ran = (tuple(dict.fromkeys(n[word] for n in notes if word in n)) for word in ("begins", "ran"))
    last = {name: value for note in notes for name, value in note.items()}
    at = f" at a batch of {begun[-1]}" if begun else " before its first batch"
    if code is None:
        ended = f"stopped after {timeout:g} s{at}"
    elif code < 0:
        ended = f"killed by {signal.Signals(-code).name}{at}"
    elif code:
        words = last.get("raised") or "".join(child.stderr.strip().splitlines()[-1:])
        ended = f"raised {words}{at}" if words else f"ended with code {code}{at}"
    else:
        ended = "returned"
    return Outcome(begun, ran, last.get("returned"), ended)


def source_of(*functions: Callable) -> str:
    """The functions' source, preceded by imports of the modules, classes and functions that they use by name."""
    imports = set()
    for function in functions:
        for name in _names(function.__code__):
            value = function.__globals__.get(name)
            home = getattr(value, "__module__", None)
            if isinstance(value, types.ModuleType):
                imports.add(f"import {value.__name__} as {name}")
            elif isinstance(value, type | types.FunctionType) and home not in (None, "__main__", "builtins"):
                imports.add(f"from {home} import {value.__qualname__} as {name}")
    # annotations that stay strings are not looked up
    return "\n".join(["from __future__ import annotations", *sorted(imports), *map(inspect.getsource, functions)])


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def pretended(spare: int) -> contextlib.AbstractContextManager:
    """A simulated limit: what forward keeps for backward counts, and anything beyond `spare` bytes is refused.

    The refusal is a RuntimeError in the words of torch's own allocator, so that searches take it for the real thing.
    """
    kept = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes
        if kept > spare:
            wanted, kept = kept, 0
            raise RuntimeError(f"(pretended) DefaultCPUAllocator: can't allocate memory: {wanted} bytes")
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept = 0  # backward has begun, so the next tensor that is kept belongs to a new step
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def limited(spare: int, pretend: bool) -> contextlib.AbstractContextManager:
    """Let this process take `spare` bytes more: inside the returned context if simulated, otherwise for good."""
    if not pretend and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + spare) / total))
        return contextlib.nullcontext()
    if not pretend and sys.platform == "linux":
        import resource

        taken = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (taken + spare, resource.getrlimit(resource.RLIMIT_AS)[1]))
        return contextlib.nullcontext()
    return pretended(spare)


def obey(order: dict) -> int:
    """Carry out the notebook's order, print each note as a line of JSON, and return the exit code."""

    def note(word: str, value: object) -> None:
        print(json.dumps({word: value}), flush=True)

    # when memory is short, oneDNN "could not create a primitive", which Lightning takes for a different error
    torch.backends.mkldnn.set_flags(False)
    names: dict = {}
    exec(compile(order["source"], "<notebook>", "exec"), names)
    gc.freeze()  # otherwise each trial's collection scans everything imported, which takes half a second
    # libraries, threads and room on the heap must not count against the function's limit
    model, device = models.vit("small", pretrained=False), machine.device()
    optimizer = torch.optim.AdamW(model.to(device).parameters(), foreach=True)
    model(torch.randn(64, 3, 32, 32, device=device)).sum().backward()
    optimizer.step()
    small = [bytes(60_000) for _ in range(ROOM // 60_000)]
    del model, optimizer, small
    if device.type == "cuda":
        torch.cuda.empty_cache()  # only the libraries' workspaces stay
    try:
        with limited(order["spare"], order["pretend"]):
            note("returned", names[order["name"]](note, *order["arguments"]))
    except Exception as error:
        said = [str(error).splitlines()[0] if str(error) else "", *getattr(error, "__notes__", [])]
        note("raised", f"{type(error).__name__}: {' '.join(said)}")
        return 1
    return 0


if __name__ == "__main__":
    code = obey(json.load(sys.stdin))
    sys.stdout.flush()
    os._exit(code)  # when memory is short, a normal exit may fail even though the search did not
