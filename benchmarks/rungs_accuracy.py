"""The ladder to a fixed accuracy: what counts is the time until a small network reaches it.

That time is steps × seconds a step. The steps are counted by training to the target, for several seeds; a rung that
changes the system only (the layout, where the data is) inherits the count of the rung before. The seconds of a step
are timed in turns with the start's. Validation stays outside both.
"""

import functools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from types import ModuleType

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks import racing
from benchmarks import training as loops
from benchmarks.pictures import CLASSES, SIZE, pictures
from benchmarks.training import (
    AUTOCAST,
    FUSED,
    MEMORY_KEPT,
    NO_HOST_SYNCS,
    TF32,
    Batch,
    Rung,
    Settings,
    Training,
    endless,
)
from speedlab import machine

UNIT = "images"
TARGET = 0.92
TRAIN, VALIDATION = 4096, 1024
SEEDS = 3
# These fields leave the mathematics of a step as it is: the number of steps to the target stays the same.
SYSTEM = {"tf32", "host_metric", "resident", "channels_last", "fused", "compiled", "keep_memory", "pool_first"}


@dataclass(frozen=True)
class Recipe(Settings):
    """What this ladder can change besides the system: how the network learns."""

    lr: float = 1e-3
    one_cycle: bool = False
    nesterov: bool = False
    weight_decay: float = 0.0
    smoothing: float = 0.0
    epochs: int = 60
    pool_first: bool = False
    size: int = SIZE


def start(device: torch.device, scale: str) -> Recipe:
    """As PyTorch's tutorial on training a classifier (CIFAR-10) has it, but for its batch of 4: SGD, one rate."""
    return Recipe(batch=16, epochs=2 if scale == "tiny" else 60)


def rungs(device: torch.device, scale: str) -> tuple[Rung, ...]:
    eight, six, five = (1, 1, 1) if scale == "tiny" else (8, 6, 5)
    return (
        Rung("strict fp32", "batch 16, SGD at 0.001 with momentum, a metric read every batch, one image at a time"),
        TF32,
        NO_HOST_SYNCS,
        Rung("data on the device", "the images stay there as bytes and are augmented a batch at a time",
             {"resident": True}),
        FUSED,
        Rung("channels-last", "convolutions in the layout that their kernels use", {"channels_last": True}),
        Rung("one-cycle schedule", f"up to a learning rate of 0.1 and down to nothing, within {eight} epochs",
             {"one_cycle": True, "lr": 0.1, "epochs": eight}),
        Rung("Nesterov, weight decay", f"the usual companions of momentum: {six} epochs are enough",
             {"nesterov": True, "weight_decay": 5e-4, "epochs": six}),
        Rung("label smoothing", f"a tenth of the label goes to the other classes: {five} epochs are enough",
             {"smoothing": 0.1, "epochs": five}),
        Rung("larger batch", "batch 32, and the learning rate grown with it", {"batch": 32, "lr": 0.2}),
        AUTOCAST,
        MEMORY_KEPT,
        Rung("pool before ReLU", "the same function on a quarter of the numbers: the largest ReLU is the ReLU of the "
             "largest", {"pool_first": True}),
        Rung("compile", "pointwise operations are fused into one pass; the seconds of compiling are listed apart",
             {"compiled": True}, ("cuda", "compiler")),
    )  # fmt: skip


class Block(nn.Module):
    """Two convolutions, halving the image and adding what went in to what came out."""

    def __init__(self, before: int, after: int, pool_first: bool):
        super().__init__()
        self.first, self.second, self.pool_first = unit(before, after), unit(after, after), pool_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        convolution, norm, relu = self.first
        x = norm(convolution(x))
        x = relu(F.max_pool2d(x, 2)) if self.pool_first else F.max_pool2d(relu(x), 2)
        return x + self.second(x)


def unit(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


class Network(nn.Module):
    """A small residual network for images (B, 3, 32, 32)."""

    def __init__(self, width: int, pool_first: bool = False):
        super().__init__()
        blocks = (Block(wide, 2 * wide, pool_first) for wide in (width, 2 * width))
        self.body = nn.Sequential(unit(3, width), *blocks)
        self.head = nn.Linear(4 * width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).mean((2, 3)))


class Run(Training):
    """A training by SGD whose learning rate may follow a schedule, and whose labels may be smoothed."""

    def __init__(self, recipe: Recipe, device: torch.device, scale: str, stream: Iterator[Batch]):
        width = 4 if scale == "tiny" else 32
        super().__init__(recipe, device, Network(width, recipe.pool_first), stream, lr=recipe.lr)
        self.steps_an_epoch = count_of(scale) // recipe.batch
        self.steps = recipe.epochs * self.steps_an_epoch
        self.schedule = None
        if recipe.one_cycle:
            self.schedule = torch.optim.lr_scheduler.OneCycleLR(
                self.optimizer, recipe.lr, total_steps=self.steps, cycle_momentum=False
            )
        self.taken = 0

    def make_optimizer(self, weights: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        recipe = self.settings
        return torch.optim.SGD(weights, lr=lr, momentum=0.9, nesterov=recipe.nesterov,
                               weight_decay=recipe.weight_decay, fused=recipe.fused or None)  # fmt: skip

    def criterion(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels, label_smoothing=self.settings.smoothing)

    def step(self, *arguments, **named) -> int:
        done = super().step(*arguments, **named)
        self.taken += 1
        if self.schedule is not None and self.taken < self.steps:
            self.schedule.step()
        return done

    def accuracy(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """The share of right answers, by the network without dropout and with its running statistics."""
        self.model.eval()
        with torch.no_grad(), self.numerics():
            right = sum((self.model(x).argmax(1) == y).sum() for x, y in zip(images.split(256), labels.split(256),
                                                                             strict=True))  # fmt: skip
        self.model.train()
        return right.item() / len(labels)


class Augmented(Dataset):
    """Bytes (3, 32, 32), mirrored half the time and normalised, one image at a time."""

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor):
        self.pixels, self.labels = pixels, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = normalised(self.pixels[index])
        return (image.flip(2) if torch.rand(()) < 0.5 else image), self.labels[index]


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    return (pixels.float() - 128) / 64


def count_of(scale: str) -> int:
    return 128 if scale == "tiny" else TRAIN


def batches(recipe: Recipe, device: torch.device, scale: str) -> Iterator[Batch]:
    """Endless shuffled, augmented batches: by a DataLoader, or gathered and mirrored on the device."""
    pixels, labels = pictures(count_of(scale), seed=1)
    if not recipe.resident:
        loader = DataLoader(Augmented(pixels, labels), recipe.batch, shuffle=True, drop_last=True)
        return endless(lambda: (_finished(x.to(device), y.to(device), recipe) for x, y in loader))
    pixels, labels = pixels.to(device), labels.to(device)

    def epoch() -> Iterator[Batch]:
        for rows in torch.randperm(len(labels), device=device).split(recipe.batch):
            if len(rows) == recipe.batch:
                images = normalised(pixels[rows])
                mirrored = torch.rand(len(rows), 1, 1, 1, device=device) < 0.5
                yield _finished(torch.where(mirrored, images.flip(3), images), labels[rows], recipe)

    return endless(epoch)


def _finished(images: torch.Tensor, labels: torch.Tensor, recipe: Recipe) -> Batch:
    if recipe.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    return {"images": images}, labels


def changed(recipe: Recipe, other: Recipe) -> set[str]:
    """The names of the fields in which two recipes differ."""
    return {f.name for f in fields(recipe) if getattr(recipe, f.name) != getattr(other, f.name)}


def steps_to_target(recipe: Recipe, device: torch.device, scale: str, seed: int) -> tuple[int | None, float]:
    """Steps until the validation accuracy is `TARGET`, looked at four times an epoch, and the accuracy reached.

    None where the recipe's epochs end before that. The system is the fastest that leaves the mathematics alone, so
    that a minute of counting does not become five.
    """
    machine.seed_everything(seed)
    recipe = replace(recipe, host_metric=False, resident=True, fused=True, channels_last=True, compiled=False)
    run = training(recipe, device, scale, batches(recipe, device, scale))
    # the recipe was chosen on the pictures of seed 2
    pixels, labels = (part.to(device) for part in pictures(128 if scale == "tiny" else VALIDATION, seed=3))
    images, reached = normalised(pixels), 0.0
    look = max(1, run.steps_an_epoch // 4)
    while run.taken < run.steps:
        with run.numerics():
            for _ in range(min(look, run.steps - run.taken)):
                run.step()
        reached = run.accuracy(images, labels)
        if reached >= target(scale):
            return run.taken, reached
    return None, reached


def target(scale: str) -> float:
    return 0.0 if scale == "tiny" else TARGET


def training(recipe: Recipe, device: torch.device, scale: str, stream: Iterator[Batch]) -> "Run":
    """The loop of this recipe on `device`, fed from `stream`; its own batches need `batches`."""
    return Run(recipe, device, scale, stream)


def flops(recipe: Recipe, scale: str) -> tuple[float, float]:
    """Operations of a training step for each image, computed and useful: the same, since nothing is padded."""
    each = float(_count(scale))
    return each, each


@functools.cache
def _count(scale: str) -> int:
    return loops.step_flops(lambda device: training(Recipe(batch=1), device, scale, iter(())), blank)


def share_of_real(recipe: Recipe, scale: str) -> float:
    """The part of the computed images that are real: all of them."""
    return 1.0


def widest(scale: str) -> int:
    """Images have no width of their own."""
    return 0


def blank(recipe: Recipe, device: torch.device, rows: int, width: int = 0) -> Batch:
    """A batch of no content, made where it is used: for counting under fake tensors."""
    images = torch.zeros(rows, 3, SIZE, SIZE, device=device)
    return {"images": images}, torch.zeros(rows, dtype=torch.long, device=device)


class Ladder(racing.Ladder):
    """Time to the target: steps counted for each seed, seconds a step raced against the start's."""

    def __init__(self, module: ModuleType, session: racing.Session):
        super().__init__(module, session)
        self.counted: tuple[Recipe, list[int | None], float] | None = None

    def rung(self, rung: Rung, settings: Recipe, start_row: dict | None) -> dict:
        predicted = self.predict(settings)
        if short := self.too_little_memory(predicted):
            return {"skipped": short}
        steps, reached = self.steps(settings, start_row)
        if start_row and self._start is None:  # the start's row is from an earlier call
            self._start = self.build(self.settings)
            self._start_seconds = self.warm_up(self._start)
        held = self.reset_memory()
        run = self.build(settings)
        begin = self.clock()
        with run.numerics():
            run.step()
        first = self.clock() - begin
        seconds = self.warm_up(run)
        if not start_row:
            self._start, self._start_seconds = run, seconds
        pairs = self.race(run, seconds)
        memory = self.memory_since(held)
        if None in steps:
            return {"skipped": f"it did not reach {target(self.session.scale):.0%} in {settings.epochs} epochs: "
                               f"{reached:.1%}"}  # fmt: skip
        row = self.speeds(settings, pairs)
        start_steps = start_row["steps"] if start_row else steps
        low, speedup, high = racing.quartiles(
            to_target(start_steps, steps, [(a / self.settings.batch, b / settings.batch) for a, b in pairs])
        )
        return {
            **row,
            "speedup": speedup,
            "speedup_low": low,
            "speedup_high": high,
            "speedup_rate": row["speedup"],
            "steps": steps,
            "seconds_to_target": statistics.median(steps) * settings.batch / row["rate"],
            "target": target(self.session.scale),
            "accuracy": reached,
            "compile_s": max(0.0, first - seconds) if settings.compiled else 0.0,
            "memory_predicted": predicted,
            "memory_measured": memory,
            "memory_note": "" if memory else racing.NO_CPU_PEAK,
            "split": self.split(run),
            "trains": True,
        }

    def steps(self, settings: Recipe, start_row: dict | None) -> tuple[list[int | None], float]:
        """Steps to the target for each seed, and the least accuracy; taken over where only the system changed."""
        if self.counted and not changed(settings, self.counted[0]) - SYSTEM:
            return self.counted[1:]
        if start_row and not changed(settings, self.settings) - SYSTEM:
            return start_row["steps"], start_row["accuracy"]
        device, scale = self.session.device, self.session.scale
        found = [steps_to_target(settings, device, scale, seed) for seed in range(1 if scale == "tiny" else SEEDS)]
        self.counted = settings, [steps for steps, _ in found], min(reached for _, reached in found)
        return self.counted[1:]


def to_target(start: list[int], steps: list[int], pairs: list[tuple[float, float]]) -> list[float]:
    """Speed-ups in time to the target, one a seed: the ratio of the steps, times that of the seconds of a step.

    `start` and `steps` hold the steps of the start and of the rung for the same seeds; `pairs` the rates in steps a
    second of (start, rung), timed in turns.
    """
    faster = statistics.median(rung / first for first, rung in pairs)
    return [first / own * faster for first, own in zip(start, steps, strict=True)]
