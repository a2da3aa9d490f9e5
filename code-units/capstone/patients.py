"""Twelve training steps for the notebooks here: eleven with one fault each, and a healthy one.

Each function without parameters returns a fresh Job. ILLS holds its remedy, under the function's name.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from speedlab import plots
from speedlab.diagnose import Device, Job
from speedlab.diagnose.rules import Estimate

WIDTH, CLASSES = 512, 10


def mlp(width: int = WIDTH, layers: int = 3) -> nn.Module:
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def rows(width: int = WIDTH):
    return lambda size: (torch.randn(size, width), torch.randint(CLASSES, (size,)))


def loss_fn(model: nn.Module, batch: tuple) -> torch.Tensor:
    inputs, labels = batch
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
        logits = model(inputs)
    return F.cross_entropy(logits.float(), labels)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)


def usual(**changed) -> Job:
    """A step without a fault: bf16 products on a large batch, a fused optimizer."""
    given = dict(make_model=mlp, make_batch=rows(), loss_fn=loss_fn, make_optimizer=sgd, batch_size=2048)
    return Job(**{**given, **changed})


class Letters(Dataset):
    """Samples that are decoded in Python, number by number."""

    def __len__(self) -> int:
        return 2048 * 8

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        text = ",".join(str((i * 31 + k) % 97) for k in range(64))
        return torch.tensor(list(map(float, text.split(",")))).repeat(WIDTH // 64), i % CLASSES


def data() -> Job:
    return usual(loader=DataLoader(Letters(), batch_size=2048))


def host_waits() -> Job:
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        largest = 0.0
        for p in model.parameters():
            largest = max(largest, p.grad.norm().item())
        if largest < 1e3 and loss.item() < 1e3:
            optimizer.step()
        return loss

    return usual(step=step)


def many_small_operations() -> Job:
    thin = lambda: mlp(16, layers=80)  # noqa: E731
    return usual(make_model=thin, make_batch=rows(16), batch_size=32)


class Chain(nn.Module):
    """Fifty pointwise operations, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = torch.tanh(x * 1.1 + 0.1).exp() - 1
        return self.layer(x)


def memory_bound_chain() -> Job:
    return usual(make_model=Chain, batch_size=4096)


def compute_bound() -> Job:
    exact = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    return usual(loss_fn=exact)


def optimizer_bound() -> Job:
    return usual(make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), foreach=False), batch_size=64)


class Tagger(nn.Module):
    """An embedding and an MLP for each token; padding is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(1000, WIDTH), mlp()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.embed(tokens))


def similar_lengths(size: int, longest: int = 20) -> tuple:
    """Tokens (size, longest) and labels; the first row has `longest` tokens, every other row 6 to 19."""
    lengths = torch.randint(6, 20, (size, 1))
    lengths[0] = longest
    tokens = torch.randint(1, 1000, (size, longest))
    return tokens.where(torch.arange(longest) < lengths, 0), torch.randint(CLASSES, (size, longest))


def padding() -> Job:
    def loss(model: nn.Module, batch: tuple) -> torch.Tensor:
        tokens, labels = batch
        return loss_fn(lambda x: model(x).flatten(0, 1), (tokens, labels.flatten()))

    # one row of 64 tokens makes all others be padded to its length
    return usual(make_model=Tagger, make_batch=lambda n: similar_lengths(n, 64), loss_fn=loss, batch_size=64)


class Flat(nn.Module):
    """Compiled without dynamic shapes, so every new batch size is compiled again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.forward = torch.compile(self.body.forward, backend="eager", dynamic=False)


def recompiling() -> Job:
    lengths = iter(range(1500, 4000, 7))

    def batch(size: int) -> tuple:
        return rows()(next(lengths))

    return usual(make_model=Flat, make_batch=batch)


def leak() -> Job:
    history = []

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        history.append(loss)
        return loss

    return usual(step=step)


def peak_too_high() -> Job:
    return usual(make_model=lambda: mlp(layers=24))


class Averaged(torch.autograd.Function):
    """Passes a tensor on unchanged, and averages its gradient over all processes."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()


class Exchanging(nn.Module):
    """Averages gradients of activations over the processes, where data parallelism averages those of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.body:
            x = Averaged.apply(part(x))
        return x


def communication() -> Job:
    return usual(make_model=Exchanging)


def healthy() -> Job:
    return usual()


def show_waits(estimates: dict[str, Estimate]) -> None:
    """Stacked bars of what each step waits for, as shares of the time of the step and its data."""
    figure, ax = plots.figure(8, 4)
    for place, (letter, e) in enumerate(estimates.items()):
        parts, left = {**e.by_bound, "data": e.data}, 0.0
        for i, (wait, spent) in enumerate(parts.items()):
            share = spent / sum(parts.values())
            ax.barh(letter, share, left=left, color=plots.COLOURS[i], hatch=plots.HATCHES[i], edgecolor="white",
                    label=wait if place == 0 else None)  # fmt: skip
            left += share
    ax.invert_yaxis()
    ax.set(title="What each step waits for, as estimated", xlabel="share of the step")
    figure.legend(loc="outside lower center", ncols=5)
    alt = "; ".join(f"{letter} {e.regime}" for letter, e in estimates.items())
    plots.show(figure, f"Stacked bars of what each of twelve steps waits for. The largest part: {alt}.")


# Round figures for a small accelerator, so that the rules say the same on every machine: seconds per launch,
# bytes per second, FLOPs per second, bytes per second between processes.
DEVICE = Device("a small accelerator", 5e-6, 20e9, {"fp32": 0.3e12, "bf16": 1.2e12}, link=1e9)
# the memory limit in bytes, which only peak_too_high exceeds
MEMORY = 64 * 2**20
ILLS = {
    "data": "load in other processes",
    "host_waits": "do not wait for the device in every step",
    "many_small_operations": "a larger batch",
    "memory_bound_chain": "torch.compile",
    "compute_bound": "bf16 autocast",
    "optimizer_bound": "a fused optimizer",
    "padding": "batches of similar length",
    "recompiling": "keep the shapes that are compiled",
    "leak": "stop keeping what a step made",
    "peak_too_high": "checkpointing, or micro-batches",
    "communication": "overlap communication with backward",
    "healthy": None,
}
