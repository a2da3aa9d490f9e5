"""Hundreds of small training runs side by side, for notebooks 1 and 2: one batched product per layer for all."""

import copy
import functools
import math
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from speedlab import data

SAMPLES = 1024
Weights = list[torch.Tensor]


@functools.cache
def digits() -> tuple[torch.Tensor, ...]:
    """Handwritten digits of 8 × 8 pixels as rows of 64 numbers, with labels: 1,024 to train on, 773 held out."""
    found = data.images("digits")
    images, labels = (torch.cat(pair) for pair in zip(found.train.tensors, found.val.tensors, strict=True))
    images = F.avg_pool2d(images[:, :1], 4).flatten(1)
    images = (images - images[:SAMPLES].mean()) / images[:SAMPLES].std()
    return images[:SAMPLES], labels[:SAMPLES], images[SAMPLES:], labels[SAMPLES:]


def network(seed: int) -> nn.Module:
    """The network that all runs train; the seed decides its initial weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))


def batches(seed: int, steps: int, batch: int) -> torch.Tensor:
    """Indices of each step's samples, (steps, batch), reshuffled every epoch; more steps only extend the sequence."""
    generator, per_epoch = torch.Generator().manual_seed(seed), SAMPLES // batch
    epochs = [torch.randperm(SAMPLES, generator=generator) for _ in range(-(-steps // per_epoch))]
    return torch.cat([order[: per_epoch * batch].view(per_epoch, batch) for order in epochs])[:steps]


def plain(shape: Callable, steps: int, peak: float, begin: tuple | None = None) -> dict[int, tuple]:
    """A plain loop with PyTorch's SGD; returns, by step, the checkpoint (step, model, optimizer) after it.

    The rate of step t is `peak * shape(t, steps)`. The loop starts at step 0, or where checkpoint `begin` stopped.
    """
    images, labels, *_ = digits()
    model, history, order = network(seed=0), {}, batches(0, steps, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9)
    first = 0
    if begin:
        first, weights, state = begin
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    for t in range(first, steps):
        optimizer.param_groups[0]["lr"] = peak * shape(t, steps)
        F.cross_entropy(model(images[order[t]]), labels[order[t]]).backward()
        optimizer.step()
        optimizer.zero_grad()
        history[t + 1] = copy.deepcopy((t + 1, model.state_dict(), optimizer.state_dict()))
    return history


def logits(weights: Weights, images: torch.Tensor) -> torch.Tensor:
    """Logits (R, N, 10) of R networks for their own images (R, N, 64)."""
    first, first_bias, last, last_bias = weights
    hidden = F.gelu(torch.baddbmm(first_bias[:, None], images, first.mT))
    return torch.baddbmm(last_bias[:, None], hidden, last.mT)


def losses(weights: Weights, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each network on each of its samples, (R, N)."""
    return F.cross_entropy(logits(weights, images).transpose(1, 2), labels, reduction="none")


@torch.no_grad()
def accuracy(weights: Weights, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The percentage of the images (N, 64) that each of R networks gets right: (R,)."""
    answers = logits(weights, images.expand(len(weights[0]), -1, -1)).argmax(-1)
    return 100 * (answers == labels).float().mean(1)


def train(
    rates: torch.Tensor,
    seeds: Sequence[int],
    update: Callable,
    looks: Sequence[int],
    batch: int = 16,
    labels: torch.Tensor | None = None,
    choose: Callable | None = None,
) -> dict[int, tuple[Weights, list[dict]]]:
    """Train R networks: network r has learning rates `rates[:, r]`, and initial weights and batches from `seeds[r]`.

    `update(weight, gradient, rate, state)` changes a weight in place; `labels` (R, 1024) replace the true ones.
    `choose(losses, step)`, if given, gets the losses (R, batch) of a pass without gradients and returns the positions
    (R, kept) that each network trains on. Returns the weights and states after each number of steps in `looks`.
    """
    images, true_labels, *_ = digits()
    labels = true_labels.expand(len(seeds), -1) if labels is None else labels
    known = {seed: [w.detach() for w in network(seed).parameters()] for seed in set(seeds)}
    weights = [torch.stack(parts).requires_grad_() for parts in zip(*(known[seed] for seed in seeds), strict=True)]
    order = {seed: batches(seed, len(rates), batch) for seed in set(seeds)}
    order = torch.stack([order[seed] for seed in seeds], dim=1)  # (steps, R, batch)
    states, found = [{} for _ in weights], {}
    for step, (rows, rate) in enumerate(zip(order, rates, strict=True)):
        if choose is not None:
            with torch.no_grad():
                passed = losses(weights, images[rows], labels.gather(1, rows))
            rows = rows.gather(1, choose(passed, step))
        loss = losses(weights, images[rows], labels.gather(1, rows)).mean(1).sum()
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient, state in zip(weights, gradients, states, strict=True):
                update(weight, gradient, rate.view(-1, *[1] * (weight.dim() - 1)), state)
        if step + 1 in looks:
            found[step + 1] = [w.detach().clone() for w in weights], [dict(state) for state in states]
    return found


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of eight values and the ends of its 95% interval (Student's t with 7 degrees of freedom: 2.365)."""
    if len(values) != 8:
        raise ValueError(f"The interval needs eight values, one per seed; there are {len(values)}.")
    half = 2.365 * statistics.stdev(values) / math.sqrt(8)
    return tuple(statistics.mean(values) + side * half for side in (0, -1, 1))


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of eight ratios and the ends of its 95% interval."""
    return tuple(map(math.exp, interval([math.log(ratio) for ratio in ratios])))
