"""Counters: evidence about cost that is exact and repeats, whatever the clock says.

Each counter is itself tested against a closed formula.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from speedlab import machine
from speedlab.display import Table, Tabular, bytes_text, table

_DTYPE_NAMES = {dtype: name for name, dtype in machine.DTYPES.items()}
# PyTorch operations whose names begin like this launch nothing.
ALLOCATIONS = ("_unsafe_view", "empty", "new_empty")


def dtype_name(dtype: torch.dtype) -> str:
    """`fp32` for torch.float32, `bf16` for torch.bfloat16 and so on."""
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def flops(work: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products, convolutions, attention and recurrent layers in `work()`.

    Forward and backward; a multiplication and an addition count as two. Pointwise operations are not counted.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports sympy, a third of a second

    with FlopCounterMode(display=False) as counter:
        counter.flop_registry = formulas()
        work()
    return counter.get_total_flops()


@functools.cache
def formulas() -> dict[object, Callable[..., int]]:
    """FLOPs of an operation from its arguments and `out_val`: torch's formulas, and those that some versions lack.

    These are a CPU's fused attention (2.11), the groups of a convolution's weight gradient, and recurrent layers.
    """
    from torch.utils.flop_counter import flop_registry as given

    aten, whole = torch.ops.aten, given[torch.ops.aten.convolution_backward]
    backward_on_cpu = aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_weight = lambda a, out: whole(*a[:10], [False, a[10][1], False], out_val=out)  # noqa: E731
    # each weight once per token; on a CPU, biases follow the two weights, and may be zeros of the same size
    recurrent = lambda x, weights: x.numel() // x.shape[-1] * sum(w.numel() for w in weights if w.dim() == 2)  # noqa: E731
    return {
        **given,
        aten._scaled_dot_product_flash_attention_for_cpu: given[aten._scaled_dot_product_flash_attention],
        backward_on_cpu: given[aten._scaled_dot_product_flash_attention_backward],
        aten.convolution_backward: (
            lambda *a, out_val: whole(*a, out_val=out_val) - of_weight(a, out_val) + of_weight(a, out_val) // a[9]
        ),
        aten.mkldnn_rnn_layer: lambda x, *w, **_: 2 * recurrent(x, w[:2]),
        aten.mkldnn_rnn_layer_backward: lambda x, *w, **_: 4 * recurrent(x, w[:2]),
        aten._cudnn_rnn: lambda x, w, *_, **__: 2 * recurrent(x, w),
        aten._cudnn_rnn_backward: lambda x, w, *_, **__: 4 * recurrent(x, w),
    }


def operations(work: Callable[[], object]) -> Counter[tuple[str, str, str]]:
    """Count the operations that `work()` runs, forward and backward: {(name, dtypes taken, dtype given): times}.

    Names are PyTorch's own, without `aten::`; a cast is `_to_copy`. On a GPU, each launches one kernel or a few.
    Views (a transpose, a slice) and allocations launch nothing and are left out. Lists show no input dtype.
    """
    with _Operations() as seen:
        work()
    return seen.counter


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counter: Counter[tuple[str, str, str]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func.namespace == "aten" and not func.is_view and not name.startswith(ALLOCATIONS):
            takes = {dtype_name(t.dtype) for t in args if isinstance(t, torch.Tensor)}
            given = next((t for t in (out if isinstance(out, tuple | list) else [out]) if torch.is_tensor(t)), None)
            gives = dtype_name(given.dtype) if given is not None else ""
            self.counter[name, " + ".join(sorted(takes)), gives] += 1
        return out


@dataclass(frozen=True)
class SavedTensor:
    """One storage that autograd keeps for backward: in which module, its shape, its dtype, its size in bytes."""

    where: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, repr=False)
class Saved(Tabular):
    """What a forward pass keeps for backward. `bytes` leaves out the parameters, which are there anyway."""

    bytes: int
    tensors: tuple[SavedTensor, ...]

    def table(self) -> Table:
        rows = [(t.where, t.shape, t.dtype, bytes_text(t.bytes)) for t in self.tensors]
        return table(["saved in", "shape", "dtype", "size"], [*rows, ("total", "", "", bytes_text(self.bytes))])


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> Saved:
    """Count what autograd keeps for backward while `forward()` runs, each storage once.

    The storages of `model`'s own parameters and buffers are left out, even where a transposed view of one is kept.
    The cast copies that autocast makes of the weights are counted: they are new memory. Saved inputs count too.
    """
    own = _storages((*model.parameters(), *model.buffers()))
    held: dict[int, tuple[torch.Tensor, str, int]] = {}
    path: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for storage, size in _storages([part]).items():
            if size and storage not in own:
                # holding the tensor keeps its storage's address from being used again while we count
                held.setdefault(storage, (part, path[-1] if path else "outside the model", size))
        return tensor

    with _module_path(model, path), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _result = forward()  # whose graph lives on until all is counted
    tensors = tuple(SavedTensor(where, tuple(t.shape), dtype_name(t.dtype), size) for t, where, size in held.values())
    return Saved(sum(t.bytes for t in tensors), tensors)


@dataclass(frozen=True)
class StateBytes:
    """Bytes that stay from step to step, by kind."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> StateBytes:
    """Bytes of parameters, gradients, optimizer state and buffers, as they are now (after a step, all are there).

    Of sharded tensors (FSDP, DTensor), only this process's part is counted; lists in optimizer state (LBFGS) are not.
    """
    parameters = list(model.parameters())
    states = [] if optimizer is None else optimizer.state.values()
    gradients = (p.grad for p in parameters if p.grad is not None)
    kept = (t for s in states for t in s.values() if isinstance(t, torch.Tensor))
    return StateBytes(*(sum(_storages(of).values()) for of in (parameters, gradients, kept, model.buffers())))


@dataclass(frozen=True)
class PeakMemory:
    """Predicted peak of allocated memory over a training step, in bytes, and what it consists of at that moment."""

    total: int
    by_kind: dict[str, int]


def predict_peak_memory(
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]], steps: int = 2
) -> PeakMemory:
    """Predict the peak memory of training without the device, and without the memory: nothing is allocated.

    `build()` returns a model, its optimizer and a function that does one training step; it is called under fake
    tensors, so it must create everything itself and must not look at values (`.item()`, data-dependent branches).
    Two steps are needed: the optimizer's state exists only once the first one has ended. A step may call the model
    several times (gradient accumulation). torch's MemTracker counts tensors; a GPU's allocator reserves more.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True), without_initialisation():
        model, optimizer, step = build()
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        tracker.memory_tracking.values = tuple  # else each operation looks through the peaks of all modules
        # a step may call the model several times; the hooks that are registered first run first
        fresh = lambda module, _: tracker.reset_mod_stats() if module is model else None  # noqa: E731
        with nn.modules.module.register_module_forward_pre_hook(fresh), tracker:
            for _ in range(steps):
                step()
        peak = tracker.get_tracker_snapshot("peak")
    kinds: Counter[str] = Counter()
    for kind, size in (pair for snapshot in peak.values() for pair in snapshot.items()):
        kinds[str(getattr(kind, "value", kind)).rsplit(".", 1)[-1].lower()] += int(size)
    return PeakMemory(kinds.pop("total"), {name: size for name, size in kinds.items() if size})


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in local)}


@contextlib.contextmanager
def _module_path(model: nn.Module, path: list[str]) -> Iterator[None]:
    """Keep in `path` the names of the modules of `model` that are running, the innermost last."""
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            label = f"{name} ({type(module).__name__})".strip()
            hooks.enter_context(module.register_forward_pre_hook(lambda *_, label=label: path.append(label)))
            hooks.enter_context(module.register_forward_hook(lambda *_: path.pop() and None, always_call=True))
        yield


def without_initialisation() -> contextlib.AbstractContextManager:
    """Skip `trunc_normal_`, which looks at values and so fails under fake tensors; no value is needed there."""
    from unittest.mock import patch

    return patch.object(nn.init, "trunc_normal_", lambda tensor, *_, **__: tensor)
