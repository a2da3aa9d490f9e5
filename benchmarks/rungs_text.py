"""The ladder of DistilBERT on reviews as long as IMDb's: from padding everything to bucketed, compiled bf16."""

import functools
import math
from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.training import (
    AUTOCAST,
    BF16_WEIGHTS,
    FUSED,
    MEMORY_KEPT,
    NO_HOST_SYNCS,
    PLAIN_ATTENTION,
    TF32,
    Batch,
    Rung,
    Settings,
    Training,
    counted,
    endless,
    larger_batch,
    step_flops,
)
from speedlab import machine
from speedlab.data import models

UNIT = "real tokens"
# IMDb's reviews in WordPiece tokens: a mean of 292, and 12.69% of them longer than 512 (Sun, Qiu, Xu and Huang, How
# to Fine-Tune BERT for Text Classification, 2019, table 1). A log-normal distribution with this median and spread has
# both.
MEDIAN, SPREAD = 226.0, 0.715
LONGEST, SHORTEST = 512, 10
VOCABULARY = 30_000
# Lengths are sorted within this many batches, then the batches are shuffled: an epoch is still nearly random.
SORTED_TOGETHER = 16


def start(device: torch.device, scale: str) -> Settings:
    """As a first script has it: everything padded to the longest, fp32 with TF32 off, batch 12, Adam."""
    return Settings(batch=4 if scale == "tiny" else 12)


def rungs(device: torch.device, scale: str) -> tuple[Rung, ...]:
    larger = 8 if scale == "tiny" else 192
    return (
        Rung("strict fp32", "all reviews padded to 512 tokens, batch 12, Adam, a metric read every batch"),
        TF32,
        NO_HOST_SYNCS,
        Rung("dynamic padding", "each batch is padded to its own longest review", {"padding": "batch"}),
        Rung("length bucketing", "a batch holds reviews of about the same length", {"padding": "buckets"}),
        AUTOCAST,
        PLAIN_ATTENTION,
        FUSED,
        MEMORY_KEPT,
        larger_batch(larger),
        Rung(
            "compile, bucketed shapes",
            "pointwise operations and dropout are fused into one pass; lengths are rounded up to few shapes",
            {"compiled": True},
            ("compiler",),
        ),
        BF16_WEIGHTS,
    )


@functools.cache
def lengths(scale: str) -> tuple[int, ...]:
    """The tokens of each review, cut at 512: drawn from a seed, or IMDb's own at `full` (1.3 tokens a word)."""
    if scale == "full":
        from speedlab import data

        words = [len(text.split()) for text in data.reviews("imdb").train_texts]
        drawn = 1.3 * torch.tensor(words, dtype=torch.float)
    else:
        generator = torch.Generator().manual_seed(0)
        count = 64 if scale == "tiny" else 3072
        drawn = MEDIAN * torch.exp(SPREAD * torch.randn(count, generator=generator))
        drawn = drawn / 8 if scale == "tiny" else drawn
    return tuple(drawn.round().clamp(SHORTEST, longest(scale)).int().tolist())


def longest(scale: str) -> int:
    return LONGEST // 8 if scale == "tiny" else LONGEST


def plan(settings: Settings, scale: str, seed: int) -> list[tuple[list[int], int]]:
    """One epoch: the reviews of each batch, and the width that they are padded to."""
    known, generator = lengths(scale), torch.Generator().manual_seed(seed)
    order = torch.randperm(len(known), generator=generator).tolist()
    if settings.padding == "buckets":
        span = SORTED_TOGETHER * settings.batch
        pieces = [sorted(order[i : i + span], key=known.__getitem__) for i in range(0, len(order), span)]
        order = [row for piece in pieces for row in piece]
    whole = range(0, len(order) - settings.batch + 1, settings.batch)
    groups = [order[i : i + settings.batch] for i in whole]
    if settings.padding == "buckets":
        groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
    return [(rows, width(settings, scale, [known[row] for row in rows])) for rows in groups]


def width(settings: Settings, scale: str, sizes: list[int]) -> int:
    """What a batch of reviews of these lengths is padded to; compiled code gets a multiple of 32, so few shapes."""
    if settings.padding == "longest":
        return longest(scale)
    multiple = 32 if settings.compiled else 1
    return min(longest(scale), multiple * math.ceil(max(sizes) / multiple))


def share_of_real(settings: Settings, scale: str) -> float:
    """The part of the computed tokens that are real, counted exactly over one epoch."""
    known, batches = lengths(scale), plan(settings, scale, 0)
    real = sum(known[row] for rows, _ in batches for row in rows)
    return real / sum(len(rows) * wide for rows, wide in batches)


def flops(settings: Settings, scale: str) -> tuple[float, float]:
    """Operations of a training step for each computed token, padding included, and for each real token without it.

    The operations of a review are a quadratic polynomial of its width T: the layers give T, attention T². Three
    counts on fake tensors determine it.
    """
    at = [longest(scale) // 4, longest(scale) // 2, longest(scale)]
    measured = [_count(scale, wide) for wide in at]
    powers = torch.tensor([[1, t, t * t] for t in at], dtype=torch.double)
    c, a, b = torch.linalg.solve(powers, torch.tensor(measured, dtype=torch.double)).tolist()
    known, batches = lengths(scale), plan(settings, scale, 0)
    done = sum(len(rows) * (c + a * wide + b * wide**2) for rows, wide in batches)
    useful = sum(c + a * length + b * length**2 for length in known)
    return done / sum(len(rows) * wide for rows, wide in batches), useful / sum(known)


@functools.cache
def _count(scale: str, wide: int) -> int:
    plain = counted(start(torch.device("cpu"), scale))
    return step_flops(lambda device: training(plain, device, scale, iter(())), blank, wide)


def batches(settings: Settings, device: torch.device, scale: str) -> Iterator[Batch]:
    """Endless batches, padded as the settings say."""
    seeds = iter(range(1, 1_000_000))
    return endless(lambda: (_padded(rows, wide, scale, device) for rows, wide in plan(settings, scale, next(seeds))))


def _padded(rows: list[int], wide: int, scale: str, device: torch.device) -> Batch:
    known = lengths(scale)
    tokens = torch.zeros(len(rows), wide, dtype=torch.long)
    mask = torch.zeros(len(rows), wide, dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, : known[row]] = review(row, known[row], scale)
        mask[i, : known[row]] = 1
    labels = torch.tensor([row % 2 for row in rows])
    return {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}, labels.to(device)


def review(row: int, length: int, scale: str) -> torch.Tensor:
    """The tokens of one review, the same each time: a tenth of them come from words that only its label uses."""
    size = 1000 if scale == "tiny" else VOCABULARY
    generator = torch.Generator().manual_seed(row)
    tokens = torch.randint(200, size, (length,), generator=generator)
    telling = torch.rand(length, generator=generator) < 0.1
    tokens[telling] = 100 + 50 * (row % 2) + tokens[telling] % 50
    return tokens


def proof_batch(settings: Settings, device: torch.device, scale: str, count: int) -> Batch:
    """The first `count` reviews, the same for every rung, padded as the settings say."""
    sizes = list(lengths(scale)[:count])
    return _padded(list(range(count)), width(settings, scale, sizes), scale, device)


def blank(settings: Settings, device: torch.device, rows: int, width: int = 0) -> Batch:
    """A batch of no content, made where it is used: for counting under fake tensors."""
    tokens = torch.ones(rows, width or LONGEST, dtype=torch.long, device=device)
    return {"input_ids": tokens, "attention_mask": tokens}, torch.zeros(rows, dtype=torch.long, device=device)


class _Logits(nn.Module):
    """Returns the logits alone, as every ladder's model does."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.body(input_ids=input_ids, attention_mask=attention_mask).logits


def network(scale: str) -> nn.Module:
    """DistilBERT-base with random weights, or the same class at a size for trying out."""
    machine.seed_everything(0)
    if scale != "tiny":
        return models.distilbert("base", pretrained=False)
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    small = {"vocab_size": 1000, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2}
    return DistilBertForSequenceClassification(DistilBertConfig(**small))


def training(settings: Settings, device: torch.device, scale: str, stream: Iterator[Batch]) -> Training:
    """The loop of these settings on `device`, fed from `stream`."""
    body = network(scale)
    regional = list(body.distilbert.transformer.layer) if device.type == "cpu" else None
    return Training(settings, device, _Logits(body), stream, lr=5e-5, regional=regional, dynamic=True)


def widest(scale: str) -> int:
    """The widest batch that comes."""
    return longest(scale)
