"""Counters: evidence about cost that is exact and repeats, whatever the clock says.

Each counter is itself tested against a closed formula.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from speedlab.display import Table, bytes_text, table

_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def dtype_name(dtype: torch.dtype) -> str:
    """`fp32` for torch.float32, `bf16` for torch.bfloat16 and so on."""
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def flops(work: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products, convolutions and attention in `work()`, forward and backward.

    A multiplication and an addition count as two. Pointwise operations are not counted, as is usual.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports sympy, a third of a second

    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@dataclass(frozen=True)
class SavedTensor:
    """One storage that autograd keeps for backward: in which module, its shape, its dtype, its size in bytes."""

    where: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Saved:
    """What a forward pass keeps for backward. `bytes` leaves out the parameters, which are there anyway."""

    bytes: int
    tensors: tuple[SavedTensor, ...]

    def table(self) -> Table:
        rows = [(t.where, t.shape, t.dtype, bytes_text(t.bytes)) for t in self.tensors]
        return table(["saved in", "shape", "dtype", "size"], [*rows, ("total", "", "", bytes_text(self.bytes))])

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> Saved:
    """Count what autograd keeps for backward while `forward()` runs, each storage once.

    The storages of `model`'s own parameters and buffers are left out, also where a transposed view of one is kept.
    The cast copies that autocast makes of the weights are counted: they are new memory. Inputs that are kept count.
    """
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    held: dict[int, tuple[torch.Tensor, str]] = {}
    path: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer and pointer not in own:
            # holding the tensor keeps its address from being used again while we count
            held.setdefault(pointer, (tensor, path[-1] if path else "outside the model"))
        return tensor

    with _module_path(model, path), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    tensors = tuple(
        SavedTensor(where, tuple(t.shape), dtype_name(t.dtype), t.untyped_storage().nbytes())
        for t, where in held.values()
    )
    del result
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

    Of what is sharded over processes (FSDP, DTensor), this process's part is counted.
    """
    parameters = list(model.parameters())
    state = [] if optimizer is None else [t for s in optimizer.state.values() for t in s.values()]
    return StateBytes(
        _storage_bytes(parameters),
        _storage_bytes(p.grad for p in parameters if p.grad is not None),
        _storage_bytes(t for t in state if isinstance(t, torch.Tensor)),
        _storage_bytes(model.buffers()),
    )


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
    Two steps are needed: the optimizer's state exists from the end of the first one on. A step may call the model
    several times (gradient accumulation). The figure is what tensors occupy; a GPU's allocator reserves more.
    Uses torch's FakeTensorMode and MemTracker.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True), _without_initialisation():
        model, optimizer, step = build()
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with _before_each_forward(model, tracker.reset_mod_stats), tracker:
            for _ in range(steps):
                step()
        peak = tracker.get_tracker_snapshot("peak")
    kinds: dict[str, int] = {}
    for snapshot in peak.values():
        for kind, size in snapshot.items():
            name = str(getattr(kind, "value", kind)).rsplit(".", 1)[-1].lower()
            kinds[name] = kinds.get(name, 0) + int(size)
    return PeakMemory(kinds.pop("total"), {name: size for name, size in kinds.items() if size})


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    # of a tensor that is spread over processes (DTensor), only this process's part is here
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local)}.values())


@contextlib.contextmanager
def _module_path(model: nn.Module, path: list[str]) -> Iterator[None]:
    """Keep in `path` the names of the modules of `model` that are running, the innermost last."""
    handles = []
    for name, module in model.named_modules():
        label = f"{name} ({type(module).__name__})".strip()
        handles.append(module.register_forward_pre_hook(lambda *_, label=label: path.append(label)))
        handles.append(module.register_forward_hook(lambda *_: path.pop() and None, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _before_each_forward(model: nn.Module, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` before each forward of `model`, ahead of the hooks that are registered later."""

    def act(module: nn.Module, _) -> None:
        if module is model:
            action()

    handle = nn.modules.module.register_module_forward_pre_hook(act)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _without_initialisation() -> Iterator[None]:
    """Skip `trunc_normal_`, which looks at values and so fails under fake tensors; no value is needed there."""
    original = nn.init.trunc_normal_
    nn.init.trunc_normal_ = lambda tensor, *_, **__: tensor
    try:
        yield
    finally:
        nn.init.trunc_normal_ = original
