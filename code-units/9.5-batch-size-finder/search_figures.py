"""For notebook 2: a figure of a search, a fingerprint that detects its traces, and the size that it should find."""

import hashlib
import math
import random

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.utils._pytree import tree_leaves

from speedlab import plots


def counting(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with a new buffer, which its state_dict leaves out and which counts its forward passes."""
    model.register_buffer("passes", torch.zeros((), device=next(model.parameters()).device), persistent=False)
    model.register_forward_pre_hook(lambda module, _: module.passes.add_(1) and None)
    return model


def digest(model: torch.nn.Module, *others) -> str:
    """A hash of the states of all arguments, the model's buffers, gradients and flags, and all random generators."""
    modes = [module.training for module in model.modules()], [p.requires_grad for p in model.parameters()]
    states = [part.state_dict() for part in (model, *others)], [*model.buffers()]
    tree = states, [p.grad for p in model.parameters()], modes
    numbers = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.cuda.get_rng_state_all()
    leaves = [leaf.cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves((tree, numbers))]
    raw = [leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode() for leaf in leaves]
    return hashlib.sha256(b"|".join(raw)).hexdigest()


def by_hand(memory_mib: float, half: int) -> int:
    """The size that a search should find if a sample takes 25 MiB and a batch of `half` reaches half the top speed.

    It is the smallest power of two within a tenth of the best that fits, halved until 1.1 times it fits or it is 1.
    """
    rates = {2**i: 2**i / (half + 2**i) for i in range(14) if 25 * 2**i <= memory_mib}
    size = min(size for size, rate in rates.items() if 1.1 * rate >= max(rates.values()))
    return next(n for n in (size >> i for i in range(14)) if n == 1 or 25 * math.ceil(1.1 * n) <= memory_mib)


def trials_figure(seen: dict, chosen: int, rates: dict[int, float], wall: float, title: str) -> Figure:
    """A figure of what a search saw and the curve `rates` in samples per second; sizes above `wall` do not fit."""
    fig, ax = plots.figure(7, 3)
    ax.plot(list(rates), list(rates.values()), color=plots.COLOURS[0], linewidth=1)
    for size, (rate, _) in seen.items():
        _mark(ax, size, rate, rate > 0)
    ax.axvline(chosen, color="black", linewidth=1)
    if wall < max(rates):
        ax.axvspan(wall, max(rates), color="0.9")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:.0f}")
    ax.set(xlim=(0.9, max(rates)), xlabel="batch (X: out of memory; grey: does not fit; line: chosen)",
           ylabel="samples per second", title=title)  # fmt: skip
    return fig


def _mark(ax, x: float, y: float, works: bool) -> None:
    ax.plot(x, y, "o" if works else "X", color=plots.COLOURS[2 if works else 5], markersize=8)
