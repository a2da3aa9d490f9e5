"""What would distract in the notebook on distillation: fine-tuning a teacher, and many students trained at once."""

import torch
from torch import nn
from torch.nn import functional as F

from speedlab import data, machine
from speedlab.data import models
from speedlab.display import Table, table


def fine_tune(build, inputs: torch.Tensor, targets: torch.Tensor, steps: int, rate: float, seed: int = 0,
              batch: int = 25, loss_fn=F.cross_entropy, dropout: bool = True) -> nn.Module:  # fmt: skip
    """Fine-tune `build()` on (N, ...) inputs and their targets: AdamW, one-cycle, batches in the seed's order."""
    generator = machine.seed_everything(seed)
    model = build().train(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
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


def short_reviews(longest: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Generated reviews of at most so many tokens: tokens (N, T) and labels (N,) to train on, tokens to test on."""
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

    Nothing connects them, so that the gradient of the sum of their losses is each one's own gradient.
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


def train(loss_fn, pixels: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, rate: float, steps: int,
          width: int = 32, batch: int = 50, seed: int = 0) -> Students:  # fmt: skip
    """Train S students at once: student s on pixels[rows[s]] (n, P) and targets[s] (n, ...).

    AdamW; the rate is constant for the first half of the steps, then falls linearly to nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    seeds, number = rows.shape
    students = Students(seeds, pixels.shape[1], width, 10, generator)
    optimizer = torch.optim.AdamW(students.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / steps)))
    each = torch.arange(seeds)[:, None]
    for _ in range(steps):
        drawn = torch.rand(seeds, number, generator=generator).argsort(dim=1)[:, :batch]  # (S, B)
        logits = students(pixels[rows[each, drawn]])
        sum(map(loss_fn, logits, targets[each, drawn])).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return students


@torch.no_grad()
def score(loss_fn, pixels, rows, targets, test_pixels, test_labels, steps: int = 400) -> torch.Tensor:
    """Train as `train` does, at three rates; the accuracy of each of the S students in %, at the best rate.

    The rate is chosen on every other test image, and the accuracy is that on the rest.
    """
    found = {}
    for rate in (3e-3, 1e-2, 3e-2):
        with torch.enable_grad():
            students = train(loss_fn, pixels, rows, targets, rate, steps)
        right = 100.0 * (students(test_pixels).argmax(-1) == test_labels)  # (S, test images)
        found[right[:, ::2].mean().item()] = right[:, 1::2].mean(1)
    return found[max(found)]


def show(scores: dict[str, torch.Tensor], caption: str) -> Table:
    """The mean and the range of the accuracies of each variant."""
    rows = [(name, f"{x.mean():.1f}%", f"{x.min():.1f} to {x.max():.1f}%") for name, x in scores.items()]
    return table(["variant", "mean", f"{len(next(iter(scores.values())))} runs"], rows, caption, measured=True)
