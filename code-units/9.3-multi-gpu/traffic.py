"""Record the messages of a rank, and count the bytes that it holds at its worst moment."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "broadcast_": "broadcast",
}


class Message(NamedTuple):
    """One collective as a rank sees it: its kind, the whole tensor's bytes and dtype, and how many ranks join."""

    kind: str
    bytes: int
    dtype: str
    ranks: int


def sent(messages: Iterable[Message]) -> float:
    """The bytes that a rank sends for these messages if they go round a ring, as counted in unit 9.2.

    An all-gather or reduce-scatter of S bytes on N ranks sends S·(N-1)/N, an all-reduce twice that; the rest is 0.
    """
    rounds = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
    return sum(rounds.get(m.kind, 0) * m.bytes * (m.ranks - 1) / m.ranks for m in messages)


@contextlib.contextmanager
def listen() -> Iterator[list[Message]]:
    """Collect the messages that this rank takes part in, including those of DDP and FSDP."""
    with _Listener() as listener:
        yield listener.messages


class _Listener(TorchDispatchMode):
    """Every c10d collective is an operator, so it passes through here, whichever library calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d" and (kind := _KINDS.get(function._schema.name.removeprefix("c10d::"))):
            leaves = tree_leaves(args)
            group = next(leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject))
            # a gather's output is the whole tensor, as is a scatter's input
            whole = max((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), key=lambda t: t.nbytes)
            dtype = str(whole.dtype).removeprefix("torch.")
            self.messages.append(Message(kind, whole.nbytes, dtype, dist.ProcessGroup.unbox(group).size()))
        return function(*args, **(kwargs or {}))


def peak_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> dict[str, int]:
    """What this rank holds at the worst moment of `step()`, in bytes by kind; `model` is sharded by `fully_shard`.

    Uses torch's FSDPMemTracker, which counts the storages of tensors, not what an allocator reserves.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs(())
    with tracker:
        step()
    # only on this device: Adam's step counters are on the CPU
    found = tracker.get_tracker_snapshot("peak")[next(model.parameters()).device]
    sizes = {str(getattr(kind, "value", kind)).lower(): size for kind, size in found.items()}
    gathered = sizes["unsharded param"] + sizes["all gather"]
    gradients = sizes["sharded grad"] + sizes["unsharded grad"] + sizes["reduce scatter"]
    state = {"own parameters": sizes["sharded param"], "optimizer": sizes["optstate"], "gradients": gradients}
    made = {"gathered parameters": gathered, "temporaries of backward": sizes["temp"]}  # includes new gradients
    rest = sizes["total"] - sum(state.values()) - sum(made.values())
    return {**state, **made, "activations and the rest": rest}
