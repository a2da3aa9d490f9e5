"""Every technique of the course as a row: what it saves and costs, where it loses, and how to apply it to a step.

All steps train one small text classifier. Each technique changes the slow step that `slow()` returns.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from speedlab.diagnose import Job

WIDTH, HEADS, LENGTH, LAYERS, BATCH, RANKS = 64, 4, 32, 3, 16, 4


class Block(nn.Module):
    """Attention and an MLP; `hidden` is the MLP's width."""

    def __init__(self, width: int, hidden: int, fused: bool):
        super().__init__()
        self.fused, self.norm1, self.norm2 = fused, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, heads, T, width of a head)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    """Tokens (B, T) to logits (B, 4)."""

    def __init__(self, width: int = WIDTH, hidden: int = 4 * WIDTH, fused: bool = False, checkpointing: bool = False):
        super().__init__()
        self.checkpointing, self.embed = checkpointing, nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width, hidden, fused) for _ in range(LAYERS))
        self.head = nn.Linear(width, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(x.mean(1))


class Adapted(nn.Module):
    """A frozen layer with a trainable update of rank `rank`, as in LoRA."""

    def __init__(self, layer: nn.Linear, rank: int = 4):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


class Distilled(nn.Module):
    """A student of half the width, along with the frozen teacher whose answers it learns."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = Classifier().requires_grad_(False), Classifier(WIDTH // 2, 2 * WIDTH)


def padded(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of texts of 6 to 32 tokens, padded to 32, and labels."""
    lengths = torch.linspace(6, LENGTH, size).long()[:, None]
    tokens = torch.randint(1, 1000, (size, LENGTH)).where(torch.arange(LENGTH) < lengths, 0)
    return tokens, torch.arange(size) % 4


def similar(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The average batch when texts of similar length share one: as long as the mean of shortest and longest text."""
    return torch.randint(1, 1000, (size, (6 + LENGTH) // 2)), torch.arange(size) % 4


def loss_fn(model: nn.Module, batch: tuple) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def autocast_loss(model: nn.Module, batch: tuple) -> torch.Tensor:
    with torch.autocast(batch[0].device.type, dtype=torch.bfloat16):
        return loss_fn(model, batch)


def distilling_loss(model: Distilled, batch: tuple) -> torch.Tensor:
    with torch.no_grad():
        wanted = model.teacher(batch[0]).softmax(-1)
    return F.cross_entropy(model.student(batch[0]), wanted)


def usual(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple, loss=loss_fn) -> torch.Tensor:
    optimizer.zero_grad()
    found = loss(model, batch)
    found.backward()
    optimizer.step()
    return found


def logging(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple, loss=loss_fn) -> torch.Tensor:
    found = usual(model, optimizer, batch, loss)
    found.item()  # for the progress bar
    return found


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple) -> torch.Tensor:
    optimizer.zero_grad()
    for tokens, labels in zip(*(part.chunk(4) for part in batch), strict=True):
        found = loss_fn(model, (tokens, labels)) / 4
        found.backward()
    optimizer.step()
    found.item()
    return found


def exchanging(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple) -> torch.Tensor:
    """One rank's part: a quarter of the batch, and an all-reduce of every gradient (a sum, as only counts matter)."""
    optimizer.zero_grad()
    found = loss_fn(model, tuple(part.chunk(RANKS)[0] for part in batch))
    found.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    found.item()
    return found


def choosing(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple) -> torch.Tensor:
    """Selective backprop: a forward pass on all samples, then a step on the half with the largest losses."""
    tokens, labels = batch
    with torch.no_grad():
        losses = F.cross_entropy(model(tokens), labels, reduction="none")
    hard = losses.topk(len(labels) // 2).indices
    return logging(model, optimizer, (tokens[hard], labels[hard]))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)


def fused_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)


def adapted() -> nn.Module:
    model = Classifier().requires_grad_(False)
    for block in model.blocks:
        block.qkv = Adapted(block.qkv)
    model.head.requires_grad_(True)
    return model


def head_only() -> nn.Module:
    model = Classifier().requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def slow(**changed) -> Job:
    """The step to compare with: fp32, padding, plain attention, AdamW tensor by tensor, the loss read every step."""
    given = dict(make_model=Classifier, make_batch=padded, loss_fn=loss_fn, make_optimizer=adam, batch_size=BATCH)
    return Job(**{**given, "step": logging, **changed})


def changed(job: Job, **fields) -> Job:
    return dataclasses.replace(job, **fields)


class Parsed(Dataset):
    """Texts as comma-separated numbers, parsed each time a sample is requested."""

    def __len__(self) -> int:
        return 2**15

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        text = ",".join(str((i * 31 + k) % 999 + 1) for k in range(LENGTH))
        return torch.tensor([int(number) for number in text.split(",")]), i % 4


def parsed(size: int) -> DataLoader:
    return DataLoader(Parsed(), batch_size=size)


@dataclass(frozen=True)
class Technique:
    """A row of the table. `loses`: with what it loses; `apply` changes a job; `rungs` are its names in ladders."""

    name: str
    unit: str
    saves: str
    price: str
    loses: str
    apply: Callable[[Job], Job] | None = None
    rungs: tuple[str, ...] = ()


def _model(**options) -> Callable[[Job], Job]:
    return lambda job: changed(job, make_model=lambda: Classifier(**options))


def _loss(loss: Callable, **fields) -> Callable[[Job], Job]:
    return lambda job: changed(job, loss_fn=loss, step=lambda m, o, b: job.step(m, o, b, loss), **fields)


TECHNIQUES = (
    Technique("read metrics later", "9.0", "time", "the numbers come later", "a CPU, which waits for nothing",
              lambda job: changed(job, step=usual), ("no host syncs",)),
    Technique("fused optimizer", "9.4, 9.5", "time", "Lightning refuses to clip in mixed precision",
              "steps that are mostly products",
              lambda job: changed(job, make_optimizer=fused_adam), ("fused optimizer",)),
    Technique("bf16 autocast", "9.1", "both", "under 3 digits of precision", "hardware without bf16; small batches",
              _loss(autocast_loss),
              ("bf16 autocast",)),
    Technique("bf16 weights", "9.1", "memory", "small updates vanish", "no fp32 master weights",
              lambda job: changed(job, make_model=lambda: Classifier().to(torch.bfloat16)),
              ("bf16 weights, fp32 master",)),
    Technique("data parallelism, 4 ranks", "9.2, 9.3", "time", "4 devices; gradients travel",
              "slow networks, small batches", lambda job: changed(job, step=exchanging)),
    Technique("FSDP", "9.3", "memory", "weights travel too", "models that fit", None),
    Technique("tensor, pipeline, sequence parallelism", "9.2", "memory", "more code; activations travel",
              "models that fit", None),
    Technique("scaled_dot_product_attention", "9.6", "both", "no attention weights", "short sequences; some CPUs",
              _model(fused=True)),
    Technique("torch.compile", "9.4", "time", "compiling, again at new shapes", "short runs, changing shapes", None,
              ("compile", "compile, bucketed shapes")),
    Technique("4 times the batch", "9.5", "time", "fewer updates; retuning", "steps that are mostly products",
              lambda job: changed(job, batch_size=4 * job.batch_size), ("larger batch",)),
    Technique("gradient accumulation", "9.6", "memory", "more, smaller operations", "BatchNorm; small batches",
              lambda job: changed(job, step=accumulating)),
    Technique("checkpointing", "9.6", "memory", "most of the forward pass twice", "memory full of state",
              _model(checkpointing=True)),
    Technique("batches of similar length", "9.7", "both", "a slightly less random order", "texts of one length",
              lambda job: changed(job, make_batch=similar), ("length bucketing",)),
    Technique("loader workers", "9.7", "time", "memory per worker", "data that is cheap to load", None),
    Technique("head only, body frozen", "9.8, 9.9", "both", "accuracy", "tasks far from the pretraining",
              lambda job: changed(job, make_model=head_only)),
    Technique("a schedule", "9.9", "time", "most must know their length", "a small learning rate", None,
              ("one-cycle schedule",)),
    Technique("selective backprop, half", "9.9", "both", "one more forward pass", "noisy labels; keeping > 2/3",
              lambda job: changed(job, step=choosing)),
    Technique("quantization after training", "9.9", "memory", "accuracy below 8 bits", "training (no faster)",
              None),
    Technique("pruning: half of each MLP", "9.9", "both", "accuracy; retraining", "single zeros, which save nothing",
              _model(hidden=2 * WIDTH)),
    Technique("distillation: half the width", "9.9", "both", "a teacher", "a label for every sample",
              _loss(distilling_loss, make_model=Distilled)),
    Technique("LoRA, rank 4", "9.9", "both", "may learn less", "memory full of activations",
              lambda job: changed(job, make_model=adapted)),
)  # fmt: skip
