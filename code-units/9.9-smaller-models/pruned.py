"""Helpers for the notebook on pruning: a batched cut, a paired comparison, a GPU's sparse product, and figures."""

import warnings
from collections.abc import Callable, Sequence

import runs
import torch

from speedlab import plots

warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


def cut_all(parameters: Sequence[torch.Tensor], width: int) -> list[torch.Tensor]:
    """Networks of `seeded_nets` cut to `width` neurons per hidden layer. Each seed keeps the neurons with the largest
    product of two norms: that of the weights that lead to a neuron, and that of those that lead away from it.
    """
    parameters = [p.detach() for p in parameters]

    def kept(t: torch.Tensor, neurons: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.stack([one.index_select(dim, chosen) for one, chosen in zip(t, neurons, strict=True)])

    for i in range(0, len(parameters) - 2, 2):
        score = parameters[i].norm(dim=2) * parameters[i + 2].norm(dim=1)  # (seeds, neurons)
        neurons = score.topk(width, dim=1).indices.sort(1).values
        for place, dim in ((i, 0), (i + 1, 1), (i + 2, 1)):  # weights in, bias, weights out
            parameters[place] = kept(parameters[place], neurons, dim)
    return parameters


def ahead(right: torch.Tensor, others: torch.Tensor) -> str:
    """How many points `right` (seeds,) is ahead of `others`, paired by seed: mean and 95% interval, as text."""
    return "{:+.1f} points ({:+.1f} to {:+.1f})".format(*runs.interval((right - others).tolist()))


def operands(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A square weight and a batch of inputs, large enough to keep the device busy; fp16 on a GPU, fp32 on a CPU."""
    size, dtype = (4096, torch.float16) if device.type == "cuda" else (512, torch.float32)
    return torch.randn(size, size, device=device).to(dtype), torch.randn(size, size, device=device).to(dtype)


def sparse_product(weight: torch.Tensor, x: torch.Tensor) -> Callable[[], torch.Tensor] | str:
    """A function that multiplies x (B, in) by a 2:4 sparse weight (out, in) on Tensor Cores, or why there is none."""
    if x.device.type != "cuda" or torch.cuda.get_device_capability() < (8, 0):
        return "no GPU with sparse Tensor Cores"
    from torch.sparse import to_sparse_semi_structured

    sparse = to_sparse_semi_structured(weight)
    return lambda: torch.nn.functional.linear(x, sparse)


def size_figure(sparsity: Sequence[float], shares: dict[str, Sequence[float]]):
    """A plot of a sparse fp32 matrix's bytes, as shares of the dense matrix's bytes, against its sparsity."""
    figure, ax = plots.figure(7.0, 3.4)
    lines = {name: ([100 * s for s in sparsity], values) for name, values in shares.items()}
    plots.curves(ax, lines, title="Bytes of a pruned matrix", x="zeros, %", y="share of dense bytes")
    return figure


def block_figure(left: float, keep: float, mlp: int):
    """Bars of a block's operations before and after a cut that leaves the share `left`, and the result in words."""
    figure, ax = plots.figure(6.0, 2.0)
    plots.bars(ax, {"full": 100, "cut": 100 * left}, title="Operations of a block", label="%", form="{:.0f}")
    return figure, f"MLP of {mlp} neurons, {keep:.0%} kept: {left:.0%} of a block's operations are left"


def accuracy_figure(right: dict[str, torch.Tensor]):
    """Bars of each kind of network's mean accuracy, with the lowest and highest accuracy among its seeds."""
    figure, ax = plots.figure(7, 3.6)
    means = {name: a.mean().item() for name, a in right.items()}
    spread = {name: (a.min().item(), a.max().item()) for name, a in right.items()}
    plots.bars(ax, means, spread=spread, title="Held-out accuracy, eight seeds", form="{:.1f}", label="%")
    return figure
