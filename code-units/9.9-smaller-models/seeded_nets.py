"""Small networks on handwritten digits, one per seed, trained side by side with one batched product per layer.

A network is a list of parameters: a weight (S, out, in) and a bias (S, 1, out) per layer, for S seeds.
Weights start as in `nn.Linear`, each network draws its own batches, and the learning rate falls to zero on a cosine.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from speedlab import count

TRAIN = 1200  # of scikit-learn's 1,797 images; the rest are held out


@functools.cache  # loading the digits takes as long as a dozen steps
def digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Images (N, 64) with values between 0 and 1, and labels (N,): first those to train on, then those held out."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(bunch.data / 16, dtype=torch.float32)[order], torch.tensor(bunch.target)[order]
    return (images[:TRAIN], labels[:TRAIN]), (images[TRAIN:], labels[TRAIN:])


def init(widths: Sequence[int], seeds: Sequence[int]) -> list[torch.Tensor]:
    """Fresh parameters of one network per seed with these widths, from the images' 64 to the classes' 10."""
    chances = [torch.Generator().manual_seed(seed) for seed in seeds]
    parameters = []
    for inputs, outputs in itertools.pairwise(widths):
        for shape in ((outputs, inputs), (1, outputs)):
            drawn = torch.stack([torch.rand(shape, generator=chance) for chance in chances])
            parameters.append(((2 * drawn - 1) / inputs**0.5).requires_grad_())
    return parameters


def copy(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [p.detach().clone().requires_grad_() for p in parameters]


def forward(parameters: Sequence[torch.Tensor], x: torch.Tensor, weight: Callable = lambda w: w) -> torch.Tensor:
    """Logits (S, B, 10) of images (S, B, 64); `weight` maps a layer's weight to the one it uses."""
    for i in range(0, len(parameters), 2):
        x = torch.baddbmm(parameters[i + 1], x, weight(parameters[i]).mT)
        x = F.relu(x) if i + 2 < len(parameters) else x
    return x


def train(
    parameters: Sequence[torch.Tensor],
    steps: int,
    seed: int,
    *,
    lr: float = 3e-3,
    weight: Callable = lambda w: w,
    optimizer: Callable = torch.optim.AdamW,
) -> list[torch.Tensor]:
    """Copies of the parameters after `steps` training steps on batches of 64."""
    (images, labels), _ = digits()
    parameters, chance = copy(parameters), torch.Generator().manual_seed(seed)
    seeds = len(parameters[0])
    stepper = optimizer(parameters, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(stepper, steps)
    for _ in range(steps):
        chosen = torch.randint(TRAIN, (seeds, 64), generator=chance)
        logits = forward(parameters, images[chosen], weight)
        # the sum, over the seeds, of each network's mean loss over its batch
        loss = seeds * F.cross_entropy(logits.flatten(0, 1), labels[chosen].flatten())
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        schedule.step()
    return [p.detach() for p in parameters]


@torch.no_grad()
def accuracy(
    parameters: Sequence[torch.Tensor], weight: Callable = lambda w: w, rows: slice = slice(None)
) -> torch.Tensor:
    """The percentage of the held-out images in `rows` that each seed's network gets right: (S,)."""
    images, labels = (part[rows] for part in digits()[1])
    logits = forward(parameters, images.expand(len(parameters[0]), -1, -1), weight)
    return 100 * (logits.argmax(-1) == labels).double().mean(1)


def state_bytes(parameters: Sequence[torch.Tensor], optimizer: Callable) -> int:
    """Bytes of state that this optimizer keeps for these parameters after one step."""
    held = copy(parameters)
    stepper = optimizer(held, lr=1e-3)
    forward(held, torch.rand(len(held[0]), 8, 64)).square().mean().backward()
    stepper.step()
    return count.state_bytes(torch.nn.ParameterList(held), stepper).optimizer


def second_moments(parameters: Sequence[torch.Tensor], steps: int) -> list[torch.Tensor]:
    """AdamW's averages of squared gradients after `steps` training steps, one tensor per parameter."""
    held = []
    train(parameters, steps, seed=0, optimizer=lambda p, lr: held.append(torch.optim.AdamW(p, lr=lr)) or held[0])
    return [state["exp_avg_sq"] for state in held[0].state.values()]
