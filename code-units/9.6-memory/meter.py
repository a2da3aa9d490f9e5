"""Count the bytes alive after each operation, and the bytes that operations move, for notebooks 1 and 3.

A dispatch mode sees every operation that PyTorch runs. `Meter` keeps a ledger of storages from birth to
death; `traffic` adds up what operations read and write. Both work on real and on fake tensors.
"""

import weakref
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("parameters", "optimizer state", "gradients", "activations", "temporaries")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "scaled_dot_product")


class Meter(TorchDispatchMode):
    """A ledger of storages alive while operations run inside `with meter:`, each counted once, under one of KINDS."""

    def __init__(self, known: Iterable[torch.Tensor] = ()):
        super().__init__()
        self._alive: dict[int, dict] = {}
        self.entries: list[dict] = []  # per storage: bytes, kind, and the operations after which it was born and died
        self.marks: list[tuple[int, str]] = []  # (operation, phase that began after it)
        self.operations, self._kind = 0, "activations"
        self.see_all("parameters", list(known))

    def see(self, tensor: torch.Tensor, kind: str = "") -> None:
        """Record a tensor's storage. Without `kind`, a new one gets the phase's, and a known one keeps its own."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # the address of the storage object itself: views share it
        if key not in self._alive:
            self._alive[key] = {"bytes": storage.nbytes(), "kind": self._kind, "born": self.operations, "died": None}
            self.entries.append(self._alive[key])
            weakref.finalize(storage, self._died, key).atexit = False
        self._alive[key]["kind"] = kind or self._alive[key]["kind"]

    def see_all(self, kind: str, tensors: object) -> None:
        """Call `see` for every tensor in a list, a dictionary or any nesting of them."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor, kind)

    def _died(self, key: int) -> None:
        self._alive.pop(key)["died"] = self.operations

    def begin(self, phase: str, kind: str) -> None:
        """Begin a phase: from here on, new storages are of this kind, unless `see` says otherwise."""
        self.marks.append((self.operations, phase))
        self._kind = kind

    def film(self) -> np.ndarray:
        """Bytes alive at the start and after each operation, (kinds, operations + 1), one row per kind in KINDS."""
        change = np.zeros((len(KINDS), self.operations + 2), dtype=np.int64)
        for entry in self.entries:
            row, died = KINDS.index(entry["kind"]), entry["died"]
            change[row, entry["born"]] += entry["bytes"]
            change[row, (self.operations if died is None else died) + 1] -= entry["bytes"]
        return change.cumsum(1)[:, :-1]

    def peak(self) -> int:
        """The largest number of bytes alive at once."""
        return int(self.film().sum(0).max())

    def history(self) -> np.ndarray:
        """Bytes alive at the start and after each operation, (operations + 1,), without `known` or parameters."""
        return self.film()[1:].sum(0)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        self.operations += operation.namespace == "aten"  # fake tensors also query devices, which is not work
        self.see_all("", out)
        return out


class _Traffic(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.bytes = {"products": 0, "the rest": 0}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        name = operation._schema.name.removeprefix("aten::").lstrip("_")
        moves = operation.namespace == "aten" and not operation.is_view
        if moves and not name.startswith(("empty", "new_empty", "unsafe_view")):
            written = args[0] if out is None else out  # optimizers change lists in place and return nothing
            touched = (t for t in tree_leaves((args, kwargs, written)) if isinstance(t, torch.Tensor))
            self.bytes["products" if name.startswith(_PRODUCTS) else "the rest"] += sum(t.nbytes for t in touched)
        return out


def traffic(work: Callable[[], object]) -> dict[str, int]:
    """Bytes that the operations in `work()` read and write, by "products" (with attention) and "the rest".

    `count.flops` counts the former only. Each operation pays for all its inputs and outputs; views move nothing.
    """
    with _Traffic() as mode:
        work()
    return mode.bytes
