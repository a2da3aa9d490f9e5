"""Helpers kept out of the notebooks on distillation: fine-tuning a model, and training many students at once."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from speedlab import data, machine
from speedlab.data import models
from speedlab.display import Table, table


def fine_tune(build, inputs: torch.Tensor, targets: torch.Tensor, steps: int, rate: float, seed: int = 0,
              batch: int = 25, loss_fn=F.cross_entropy, dropout: bool = True) -> nn.Module:  # fmt: skip
    """Fine-tune `build()` on inputs (N, ...) and targets with AdamW, one-cycle and batches shuffled by the seed."""
    generator = machine.seed_everything(seed)
    model = build().train(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    epochs = steps * batch // len(inputs) + 1
    order = torch.cat([torch.randperm(len(inputs), generator=generator) for _ in range(epochs)])
    for rows in order.split(batch)[:steps]:
        loss_fn(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


@torch.no_grad()
def predict(model: nn.Module, inputs: torch.Tensor, batch: int = 200) -> torch.Tensor:
    """The logits (N, K) of a model for (N, ...) inputs."""
    return torch.cat([model(part) for part in inputs.split(batch)])


@cache
def short_reviews(longest: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reviews of at most `longest` tokens: tokens (N, T) and labels (N,) to train on, tokens (M, T) to test on."""
    reviews, tokenizer = data.reviews("generated"), models.tokenizer("small")
    train, test = (
        tokenizer(texts, padding="max_length", max_length=64, return_tensors="pt")["input_ids"]
        for texts in (reviews.train_texts, reviews.test_texts)
    )
    short, short_test = train[:, longest] == 0, test[:, longest] == 0  # padding is token 0
    return train[short, :longest], reviews.train_labels[short], test[short_test, :longest]


class Reader(nn.Module):
    """The small DistilBERT for two labels: tokens (B, T) in, logits (B, 2) out."""

    def __init__(self, pretrained: bool = True):
        super().__init__()
        self.bert = models.distilbert("small", pretrained=pretrained)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=tokens, attention_mask=tokens != 0).logits


class Students(nn.Module):
    """S networks of one hidden layer, side by side: pixels (S, B, P) in, logits (S, B, K) out.

    Nothing connects them, so the gradient of the sum of their losses gives each one its own gradient.
    """

    def __init__(self, seeds: int, pixels: int, width: int, labels: int, generator: torch.Generator):
        super().__init__()

        def uniform(*shape: int) -> nn.Parameter:
            return nn.Parameter((2 * torch.rand(*shape, generator=generator) - 1) / shape[1] ** 0.5)

        self.hidden, self.head = uniform(seeds, pixels, width), uniform(seeds, width, labels)
        self.hidden_bias = nn.Parameter(torch.zeros(seeds, 1, width))
        self.head_bias = nn.Parameter(torch.zeros(seeds, 1, labels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.hidden + self.hidden_bias) @ self.head + self.head_bias


def train(loss_fn, pixels: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, rates: Sequence[float],
          steps: int, width: int = 32, batch: int = 50, seed: int = 0) -> Students:  # fmt: skip
    """Train S students at each of R rates, all at once: student s on pixels[rows[s]] (n, P) and targets[s] (n, ...).

    Adam is written out, since each student has a rate of its own, constant for the first half of the steps and then
    falling linearly to zero. The S students of the first rate come first; those of the other rates start the same.
    """
    generator = torch.Generator().manual_seed(seed)
    (seeds, number), copies = rows.shape, len(rates)
    students = Students(seeds, pixels.shape[1], width, 10, generator)
    for p in students.parameters():
        p.data = p.data.repeat(copies, 1, 1)
    own = torch.tensor(rates).repeat_interleave(seeds)[:, None, None]
    moments = [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in students.parameters()]
    each, whole = torch.arange(seeds)[:, None], torch.arange(number).expand(seeds, -1)
    for step in range(steps):
        drawn = whole if number <= batch else torch.randint(number, (seeds, batch), generator=generator)  # (S, B)
        due = targets[each, drawn]  # (S, B, ...)
        logits = students(pixels[rows[each, drawn]].repeat(copies, 1, 1))
        loss = loss_fn(logits.flatten(0, 1), due.flatten(0, 1).repeat(copies, *[1] * (due.ndim - 2)))
        # the gradient of each student's own mean loss over its batch
        gradients = torch.autograd.grad(copies * seeds * loss, list(students.parameters()))
        rate = own * min(1.0, 2 * (1 - step / steps))
        with torch.no_grad():
            for (p, mean, square), gradient in zip(moments, gradients, strict=True):
                mean.lerp_(gradient, 0.1)
                square.lerp_(gradient**2, 0.001)
                p -= rate / (1 - 0.9 ** (step + 1)) * mean / ((square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
    return students


@torch.no_grad()
def answers(
    loss_fns: dict[float | None, Callable],
    rows: torch.Tensor,
    targets: torch.Tensor,
    *,
    pixels: torch.Tensor,
    test_pixels: torch.Tensor,
    test_labels: torch.Tensor,
    rates=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    steps: int = 400,
) -> tuple[torch.Tensor, float | None, float]:
    """Train with each loss at each rate, as `train` does, and keep the pair that is best on every other test image.

    Returns the labels (S, M) that its students give to the other half, the loss's temperature, and the rate.
    """
    found = {}
    for temperature, loss_fn in loss_fns.items():
        with torch.enable_grad():
            students = train(loss_fn, pixels, rows, targets, rates, steps)
        said_at = students(test_pixels).argmax(-1).split(len(rows))  # one (S, test images) per rate
        for said, rate in zip(said_at, rates, strict=True):
            right = (said == test_labels)[:, ::2].float().mean().item()
            found[right] = (said[:, 1::2], temperature, rate)
    return found[max(found)]


def share(said: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The percentage of each student's labels (S, M) that are the expected ones: (S,)."""
    return 100.0 * (said == expected).float().mean(-1)


def repeated(said: torch.Tensor, truth: torch.Tensor, taught: torch.Tensor) -> float:
    """The percentage of their teachers' mistakes that the students repeat; `said` is (S, M)."""
    return 100 * (said == taught)[(taught != truth).expand_as(said)].float().mean().item()


def show(learned: dict[str, tuple], truth: torch.Tensor, taught: torch.Tensor, caption: str) -> Table:
    """A table: what each variant's students got right, how often they agree with the teacher, what was chosen."""
    rows = []
    for name, (said, temperature, rate) in learned.items():
        right = share(said, truth)
        alike = f"{share(said, taught).mean():.1f}%", f"{repeated(said, truth, taught):.0f}%"
        spread = f"{right.min():.1f} to {right.max():.1f}%"
        rows.append((name, f"{right.mean():.1f}%", spread, *alike, str(temperature or "none"), f"{rate:g}"))
    columns = ["targets", "right", f"{len(right)} runs", "as the teacher", "same mistake", "temperature", "rate"]
    return table(columns, rows, caption, measured=True)


def agreement(build, inputs: torch.Tensor, says: torch.Tensor, unseen: torch.Tensor, expected: torch.Tensor,
              loss_fn) -> tuple[torch.Tensor, float]:  # fmt: skip
    """Train `build()` on the teacher's logits `says` with three seeds, for 60 steps each.

    Returns how often, in %, each student gives the teacher's answer on one half of the unseen inputs (3,), and the
    rate, which is the best of four for the first seed on the other half.
    """

    def same(rate: float, seed: int) -> torch.Tensor:
        student = fine_tune(build, inputs, says, 60, rate, seed, batch=32, loss_fn=loss_fn, dropout=False)
        return 100.0 * (predict(student, unseen).argmax(-1) == expected)

    first = {rate: same(rate, 0) for rate in (5e-4, 1e-3, 2e-3, 4e-3)}
    best = max(first, key=lambda rate: first[rate][::2].mean())
    return torch.stack([x[1::2].mean() for x in (first[best], same(best, 1), same(best, 2))]), best
