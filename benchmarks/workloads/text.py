"""DistilBERT on reviews as long as IMDb's: from padding everything to bucketed, compiled bf16."""

import functools
import math
from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.loop import (
    AUTOCAST,
    BF16_WEIGHTS,
    BYTE_DROPOUT,
    FUSED,
    MEMORY_KEPT,
    NO_HOST_SYNCS,
    PLAIN_ATTENTION,
    TF32,
    Batch,
    Rung,
    Settings,
    Training,
    endless,
    larger_batch,
)
from benchmarks.workloads import CPU, Workload
from speedlab import machine
from speedlab.data import models

# IMDb's reviews in WordPiece tokens: a mean of 292, and 12.69% of them longer than 512 (Sun, Qiu, Xu and Huang, How
# to Fine-Tune BERT for Text Classification, 2019, table 1). A log-normal distribution with this median and spread
# reproduces both.
MEDIAN, SPREAD = 226.0, 0.715
LONGEST, SHORTEST = 512, 10
VOCABULARY = 30_000
# Reviews are sorted by length within this many batches, and then the batches shuffled, so epochs stay nearly random.
SORTED_TOGETHER = 16


class Text(Workload):
    """Fine-tuning DistilBERT; what counts is real tokens per second, without padding."""

    unit = "real tokens"
    task = "Fine-tuning DistilBERT on long reviews"
    target = 0.60

    def __init__(self, device: torch.device, scale: str):
        super().__init__(device, scale)
        self.longest = LONGEST // 8 if self.tiny else LONGEST

    def start(self) -> Settings:
        """As in a first script: everything padded to the longest, fp32 with TF32 off, batch 12, Adam."""
        return Settings(batch=4 if self.tiny else 12)

    def rungs(self) -> tuple[Rung, ...]:
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
            BYTE_DROPOUT,
            larger_batch(8 if self.tiny else 192),
            Rung(
                "compile, bucketed shapes",
                "pointwise operations and dropout are fused into one pass; lengths are rounded up to a few shapes",
                {"compiled": True},
                ("compiler",),
            ),
            BF16_WEIGHTS,
        )

    def network(self) -> nn.Module:
        """DistilBERT-base with random weights, or a tiny one for trying things out."""
        machine.seed_everything(0)
        if not self.tiny:
            return models.distilbert("base", pretrained=False)
        from transformers import DistilBertConfig, DistilBertForSequenceClassification

        small = {"vocab_size": 1000, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2}
        return DistilBertForSequenceClassification(DistilBertConfig(**small))

    def training(
        self, settings: Settings, stream: Iterator[Batch] | None = None, device: torch.device | None = None
    ) -> Training:
        device, body = device or self.device, self.network()
        regional = list(body.distilbert.transformer.layer) if device.type == "cpu" else None
        return Training(settings, device, Logits(body), stream, lr=5e-5, regional=regional, dynamic=True)

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Each review's number of tokens, cut at 512: drawn from a seed or, at `full`, IMDb's words times 1.3."""
        if self.scale == "full":
            from speedlab import data

            words = [len(text.split()) for text in data.reviews("imdb").train_texts]
            drawn = 1.3 * torch.tensor(words, dtype=torch.float)
        else:
            generator = torch.Generator().manual_seed(0)
            drawn = MEDIAN * torch.exp(SPREAD * torch.randn(64 if self.tiny else 3072, generator=generator))
            drawn = drawn / 8 if self.tiny else drawn
        return tuple(drawn.round().clamp(SHORTEST, self.longest).int().tolist())

    def plan(self, settings: Settings, seed: int) -> list[tuple[list[int], int]]:
        """One epoch: the reviews of each batch, and the width that they are padded to."""
        known, generator = self.lengths, torch.Generator().manual_seed(seed)
        order = torch.randperm(len(known), generator=generator).tolist()
        if settings.padding == "buckets":
            span = SORTED_TOGETHER * settings.batch
            pieces = [sorted(order[i : i + span], key=known.__getitem__) for i in range(0, len(order), span)]
            order = [row for piece in pieces for row in piece]
        whole = range(0, len(order) - settings.batch + 1, settings.batch)
        groups = [order[i : i + settings.batch] for i in whole]
        if settings.padding == "buckets":
            groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
        return [(rows, self.width(settings, rows)) for rows in groups]

    def width(self, settings: Settings, rows: list[int]) -> int:
        """The width that a batch of these reviews is padded to; compiled code gets multiples of 32: few shapes."""
        if settings.padding == "longest":
            return self.longest
        multiple = 32 if settings.compiled else 1
        return min(self.longest, multiple * math.ceil(max(self.lengths[row] for row in rows) / multiple))

    def share_of_real(self, settings: Settings) -> float:
        """The share of the computed tokens that is real, counted exactly over one epoch."""
        batches = self.plan(settings, 0)
        real = sum(self.lengths[row] for rows, _ in batches for row in rows)
        return real / sum(len(rows) * wide for rows, wide in batches)

    @functools.cache  # noqa: B019 (a workload lives as long as the process)
    def representative(self, settings: Settings) -> tuple[Batch, ...]:
        """The middle batch of each quarter of an epoch, sorted by width; a single batch if all are equally wide."""
        batches = sorted(self.plan(settings, 0), key=lambda batch: batch[1])
        parts = 1 if settings.padding == "longest" else 4
        middles = [batches[(2 * part + 1) * len(batches) // (2 * parts)] for part in range(parts)]
        return tuple(self.padded(rows, wide) for rows, wide in middles)

    def flops(self, settings: Settings) -> tuple[float, float]:
        """Operations of a training step per computed token, padding included, and per real token, without padding.

        A review's operations are a quadratic polynomial in its width T: Linear layers give terms in T, attention T².
        Three counts on fake tensors determine it.
        """
        at = [self.longest // 4, self.longest // 2, self.longest]
        counted = [self.sample_flops(settings.size, wide) for wide in at]
        powers = torch.tensor([[1, t, t * t] for t in at], dtype=torch.double)
        c, a, b = torch.linalg.solve(powers, torch.tensor(counted, dtype=torch.double)).tolist()
        batches = self.plan(settings, 0)
        done = sum(len(rows) * (c + a * wide + b * wide**2) for rows, wide in batches)
        useful = sum(c + a * length + b * length**2 for length in self.lengths)
        return done / sum(len(rows) * wide for rows, wide in batches), useful / sum(self.lengths)

    def batches(self, settings: Settings) -> Iterator[Batch]:
        seeds = iter(range(1, 1_000_000))
        return endless(lambda: (self.padded(rows, wide) for rows, wide in self.plan(settings, next(seeds))))

    def padded(self, rows: list[int], wide: int) -> Batch:
        """These reviews, each cut or padded to `wide` tokens."""
        tokens = torch.zeros(len(rows), wide, dtype=torch.long)
        mask = torch.zeros(len(rows), wide, dtype=torch.long)
        for i, row in enumerate(rows):
            length = min(self.lengths[row], wide)
            tokens[i, :length] = self.review(row)[:length]
            mask[i, :length] = 1
        labels = torch.tensor([row % 2 for row in rows]).to(self.device)
        return {"input_ids": tokens.to(self.device), "attention_mask": mask.to(self.device)}, labels

    @functools.cache  # noqa: B019 (a workload lives as long as the process)
    def review(self, row: int) -> torch.Tensor:
        """The tokens of one review, the same each time; about a tenth are from words that only its label uses."""
        generator, length = torch.Generator().manual_seed(row), self.lengths[row]
        tokens = torch.randint(200, 1000 if self.tiny else VOCABULARY, (length,), generator=generator)
        telling = torch.rand(length, generator=generator) < 0.1
        tokens[telling] = 100 + 50 * (row % 2) + tokens[telling] % 50
        return tokens

    def fixed(self, settings: Settings, rows: int, width: int = 0) -> Batch:
        first = [row % len(self.lengths) for row in range(rows)]
        return self.padded(first, width or self.width(settings, first))

    def blank(self, settings: Settings, rows: int, width: int = 0) -> Batch:
        tokens = torch.ones(rows, width or self.longest, dtype=torch.long, device=CPU)
        return {"input_ids": tokens, "attention_mask": tokens}, torch.zeros(rows, dtype=torch.long, device=CPU)


class Logits(nn.Module):
    """Returns the logits alone, as every workload's model does."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.body(input_ids=input_ids, attention_mask=attention_mask).logits
