"""The checks of exercise 5: a training put back, a finder on simulated devices, a scaled rate, three curves."""

import copy
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from speedlab.checks import check, expect

MARGIN = 0.9
_PATIENCE = 100
RULES = ("linear", "square root")
CAUSES = ("overhead", "busy", "swapping")


class OutOfMemory(RuntimeError):
    """What a simulated device raises where a GPU raises torch.OutOfMemoryError."""


@dataclass(frozen=True)
class Training:
    """What a search must leave as it was. The model has dropout and BatchNorm, so it also draws random numbers."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


@dataclass(frozen=True)
class Trial:
    """What one training step showed: samples a second, and the share of the device's memory at its peak (0 to 1)."""

    batch_size: int
    throughput: float
    memory: float


def training(steps: int = 3) -> Training:
    """A small training under way, after so many steps."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = Training(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5))
    for _ in range(steps):
        step(made)
    return made


def step(training: Training) -> None:
    """One real training step; it leaves no gradient behind."""
    _backward(training)
    training.optimizer.step()
    training.scheduler.step()
    training.optimizer.zero_grad()


def _backward(training: Training) -> None:
    training.model(torch.randn(4, 6)).logsumexp(1).mean().backward()


def _half_a_step(training: Training) -> None:
    """Where a step that runs out of memory in its optimizer leaves things: gradients there, some weights moved."""
    _backward(training)
    with torch.no_grad():
        next(training.model.parameters()).add_(1)


class Device:
    """A simulated device: the steps are real, on four rows; memory and throughput follow laws of the batch size.

    `memory` gives the share of the memory that a size needs, `throughput` its samples a second, `broken` whether a
    size fails for no visible reason (as fragmented memory does).
    """

    def __init__(
        self,
        memory: Callable[[int], float],
        throughput: Callable[[int], float],
        broken: Callable[[int], bool] = lambda size: False,
    ):
        self._memory, self._throughput, self._broken = memory, throughput, broken
        self.training = training()
        self.tried: list[int] = []
        self.ran: dict[int, Trial] = {}

    def train(self, batch_size: int) -> Trial:
        """Train one step with this batch size. Raises OutOfMemory, in the middle of a step, where it does not fit."""
        if type(batch_size) is not int or batch_size < 1:
            raise ValueError(f"A batch size is a whole number from 1 on, not {batch_size!r}.")
        expect(len(self.tried) < _PATIENCE, f"You make more than {_PATIENCE} trials on one device. "
               "Does your search end? Double the size, then halve the gap.")  # fmt: skip
        self.tried.append(batch_size)
        used = self._memory(batch_size)
        if used > 1 or self._broken(batch_size):
            _half_a_step(self.training)
            raise OutOfMemory(f"A batch of {batch_size} does not fit.")
        step(self.training)
        self.ran[batch_size] = Trial(batch_size, self._throughput(batch_size), used)
        return self.ran[batch_size]

    def speed(self, batch_size: int) -> float:
        """Samples a second at this size, or 0 where it does not run within the margin."""
        fits = self._memory(batch_size) <= MARGIN and not self._broken(batch_size)
        return self._throughput(batch_size) if fits else 0.0


# --- Task 1 ---------------------------------------------------------------------------------------------------------

_PARTS = {
    "model": "state_dict() hands out the tensors themselves, which training goes on changing: copy.deepcopy it.",
    "optimizer": "It has a state_dict() too, with Adam's moments in it: deep-copy it, and load a copy of your copy.",
    "scheduler": "It counts its steps: scheduler.state_dict() and load_state_dict().",
    "random state": "Dropout draws from it: torch.get_rng_state() and torch.set_rng_state().",
    "gradients": "There were none before; the next backward would add to them: optimizer.zero_grad().",
}


def state(training: Training) -> dict[str, object]:
    """A copy of all that a training step changes, by part."""
    found = (
        training.model.state_dict(),
        training.optimizer.state_dict(),
        training.scheduler.state_dict(),
        torch.get_rng_state(),
        [p.grad for p in training.model.parameters()],
    )
    return dict(zip(_PARTS, copy.deepcopy(found), strict=True))


def changed(before: Mapping[str, object], training: Training) -> str | None:
    """The first part of a training that is not bit for bit what it was, or None."""
    now = state(training)
    return next((part for part in _PARTS if not _same(before[part], now[part])), None)


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b


@check("Task 1, put everything back", seconds=300)
def remember(answer: Callable[[Training], Callable[[], None]]) -> None:
    with torch.random.fork_rng(devices=[]):
        for steps in (3, 0):
            made = training(steps)
            before = state(made)
            put_back = answer(made)
            expect(callable(put_back), f"Return a function that puts everything back; you return {put_back!r}.")
            part = changed(before, made)
            expect(part is None, f"remember itself changes the {part}. It should only copy.")
            for time in ("", " when it is put back a second time"):
                for _ in range(3):
                    step(made)
                _half_a_step(made)
                put_back()
                part = changed(before, made)
                expect(part is None, f"With {steps} steps behind it and 3 more since, the training's {part} "
                       f"differs from before{time}. {_PARTS.get(part)}")  # fmt: skip


# --- Task 2 ---------------------------------------------------------------------------------------------------------


def _rising(overhead: float) -> Callable[[int], float]:
    """Samples a second where a step costs as much as `overhead` samples more than its batch."""
    return lambda size: 1000 * size / (overhead + size)


def _unlucky(seed: int) -> Callable[[int], bool]:
    return lambda size: size > 8 and random.Random(100_003 * seed + size).random() < 0.25


@dataclass(frozen=True)
class Case:
    """A simulated device, to be made anew for every search, and the largest size that a search on it may try.

    On an irregular one, what fits says nothing about what else fits: no answer is best.
    """

    make: Callable[[], Device]
    largest: int
    regular: bool = True


def devices() -> dict[str, Case]:
    """The devices of task 2 by name."""

    def case(memory, speed, largest, broken=None) -> Case:
        laws = (memory, speed) if broken is None else (memory, speed, broken)
        return Case(lambda: Device(*laws), largest, regular=broken is None)

    def in_blocks(size: int) -> float:
        return 0.25 + math.ceil(size / 16) / 24 + (0.3 if size > 100 else 0)

    return {
        "whose memory ends early": case(lambda b: 0.2 + b / 500, _rising(4096), 4096),
        "that is busy long before its memory ends": case(lambda b: 0.1 + b / 8000, _rising(24), 4096),
        "whose memory goes in blocks": case(in_blocks, _rising(1000), 1024),
        "whose throughput falls past a point": case(
            lambda b: 0.1 + b / 9000, lambda b: _rising(20)(b) * min(1, 160 / b), 4096
        ),
        "where 128 runs, with 95% of the memory": case(lambda b: 0.3 + 0.65 * b / 128, _rising(2000), 2048),
        "that nothing fills": case(lambda b: 0.1 + b / 9000, _rising(9000), 512),
        "where one sample is all that fits": case(lambda b: 0.5 * b, _rising(100), 256),
        "where not even one sample fits": case(lambda b: 1.1 + b / 10, _rising(100), 256),
        **{
            f"that fails at random sizes, number {number}": case(
                lambda b: 0.05 + b / 2000, _rising(500), 4096, _unlucky(seed)
            )
            for number, seed in enumerate((6, 13, 1, 2), start=1)
        },
    }


@check("Task 2, the finder", seconds=300)
def find_batch_size(answer: Callable[[Device, int], int | None]) -> None:
    with torch.random.fork_rng(devices=[]):
        for name, case in devices().items():
            device = case.make()
            before = state(device.training)
            found = answer(device, case.largest)
            where = f"On the device {name}"
            _expect_it_ran(found, device, case.largest, where)
            if found is not None and case.regular:
                _expect_fast(found, device, case.largest, where)
            part = changed(before, device.training)
            expect(part is None, f"On the device {name}, you leave the training's {part} changed. Put it back.")
        _expect_other_errors_pass(answer)


def _expect_it_ran(found: object, device: Device, largest: int, where: str) -> None:
    tried, ran = device.tried, device.ran
    expect(max(tried, default=0) <= largest, f"{where}, you try {max(tried, default=0)}; the largest is {largest}.")
    allowed = int(math.log2(largest)) + 5
    expect(len(tried) <= allowed, f"{where}, you make {len(tried)} trials; {allowed} are allowed. "
           "Double the size, then halve the gap; try no size twice.")  # fmt: skip
    if device.speed(1) == 0:
        expect(found is None, f"{where}, you return {found!r}. Return None.")
        return
    expect(type(found) is int, f"{where}, you return {found!r}, but a batch of 1 runs. Return a whole number.")
    expect(found in tried, f"{where}, you return {found}, a size that you never tried.")
    expect(found in ran, f"{where}, you return {found}, which ran out of memory.")
    expect(ran[found].memory <= MARGIN, f"{where}, {found} runs, but with {ran[found].memory:.0%} of the memory. "
           "Treat what needs more than 90% as too large.")  # fmt: skip
    best = max(ran.values(), key=lambda trial: trial.throughput if trial.memory <= MARGIN else 0)
    expect(ran[found].throughput >= 0.95 * best.throughput, f"{where}, you return {found} with "
           f"{ran[found].throughput:.0f} samples a second, but {best.batch_size} ran with {best.throughput:.0f}. "
           "Keep the best trial, not the last one.")  # fmt: skip


def _expect_fast(found: int, device: Device, largest: int, where: str) -> None:
    speeds = {size: device.speed(size) for size in range(1, largest + 1)}
    most = max(speeds.values())
    expect(speeds[found] >= 0.85 * most, f"{where}, {found} has {speeds[found] / most:.0%} of the samples a second "
           f"that {max(speeds, key=speeds.get)} has. {_why_slow(found, device)}")  # fmt: skip
    enough = min(size for size, speed in speeds.items() if speed >= 0.9 * most)
    expect(found <= 4 * enough, f"{where}, you return {found}, but {enough} has 90% of the samples a second. "
           "Stop when doubling gains less than 5%, and keep the smaller size.")  # fmt: skip


def _why_slow(found: int, device: Device) -> str:
    if any(size > found and size not in device.ran for size in device.tried):
        return "Look between the largest size that ran and the smallest that did not."
    if any(size > found for size in device.tried):
        return "Look between the size that you keep and the one that was too large."
    return "Go on while doubling gains 5% or more."


def _expect_other_errors_pass(answer: Callable[[Device, int], int | None]) -> None:
    def torn(size: int) -> bool:
        if size > 2:
            raise OSError("the loader cannot read a file")
        return False

    device = Device(lambda b: 0.1, _rising(1000), torn)
    before = state(device.training)
    try:
        answer(device, 256)
    except OSError:
        part = changed(before, device.training)
        expect(part is None, f"When the loader raises during a search, the training's {part} stays changed. "
               "Put it back in a `finally`.")  # fmt: skip
        return
    expect(False, "A loader that cannot read a file is not out of memory, and you swallow its error. "
           "Catch checks.OutOfMemory alone.")  # fmt: skip


# --- Task 3 ---------------------------------------------------------------------------------------------------------

Rate = Callable[[int, float, int, int, int, str, int], float]


def _rate(
    update: int, base_rate: float, base_batch: int, per_device: int, devices: int, rule: str, warmup: int
) -> float:
    k = per_device * devices / base_batch
    full = base_rate * (k if rule == "linear" else math.sqrt(k))
    return full if update >= warmup else base_rate + (full - base_rate) * update / warmup


@check("Task 3, the learning rate that goes with it", seconds=300)
def learning_rate(answer: Rate) -> None:
    for rule in RULES:
        for base_rate, base_batch, per_device, devices in ((0.1, 32, 128, 1), (0.1, 256, 32, 64), (3e-4, 64, 16, 1)):
            for update, warmup in ((7, 0), (40, 10), (10, 10), (0, 10), (5, 10)):
                setup = (update, base_rate, base_batch, per_device, devices, rule, warmup)
                got, wanted = answer(*setup), _rate(*setup)
                good = isinstance(got, int | float) and math.isclose(got, wanted, rel_tol=1e-6)
                expect(good, f"Update {update} of a run with base rate {base_rate:g} at batch {base_batch}, now "
                       f"{per_device} on each of {devices} devices, {rule} rule, {warmup} updates of warm-up: "
                       f"you return {_number(got)}, and it is {wanted:.4g}. {_why_rate(got, *setup)}")  # fmt: skip


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else repr(value)


def _why_rate(got: object, update, base_rate, base_batch, per_device, devices, rule, warmup) -> str:
    def like(*setup) -> bool:
        return isinstance(got, int | float) and math.isclose(got, _rate(*setup), rel_tol=1e-6)

    other = RULES[1 - RULES.index(rule)]
    if like(update, base_rate, base_batch, per_device, 1, rule, warmup):
        return "An update averages over the batches of all devices: multiply by their number."
    if like(update, base_rate, base_batch, per_device, devices, other, warmup):
        return f"That is the {other} rule."
    if update < warmup:
        return "The rate rises in a straight line from the base rate at update 0 to the full rate at update `warmup`."
    return "Take k = global batch / base batch; the rate is k times, or the root of k times, the base rate."


# --- Task 4 ---------------------------------------------------------------------------------------------------------

SIZES = tuple(8 * 2**i for i in range(8))
# updates to the target by batch size: in proportion at first, then hardly fewer (McCandlish and others, 2018)
UPDATES = {size: round(80 * (1 + 160 / size)) for size in SIZES}
CURVES = {
    "A": {size: round(40 * size / (1 + size / 20_000)) for size in SIZES},
    "B": {size: round(4000 * size / (size + 6)) for size in SIZES},
    "C": {size: round(9000 * size / (size + 40) * (1 if size <= 128 else (128 / size) ** 0.8)) for size in SIZES},
}
_CAUSE = dict(zip(CURVES, CAUSES, strict=True))


@check("Task 4, three curves", seconds=300)
def read_curves(answer: Callable[[], dict[str, tuple[int, int, str]]]) -> None:
    given = answer()
    expect(isinstance(given, dict) and given.keys() == CURVES.keys(), "Return a dict with the keys A, B and C.")
    for name, curve in CURVES.items():
        reading = given[name]
        expect(
            isinstance(reading, tuple) and len(reading) == 3,
            f"Curve {name}: give three things, (enough, first, cause).",
        )
        enough, first, cause = reading
        wanted = min(size for size in SIZES if curve[size] >= 0.9 * max(curve.values()))
        expect(enough == wanted, f"Curve {name}: {enough!r} is not the smallest size with 90% of the most samples "
               "a second. Find the highest point of this curve, take 90% of it, and read from the left.")  # fmt: skip
        seconds = {size: UPDATES[size] * size / curve[size] for size in SIZES}
        soonest = min(seconds, key=seconds.get)
        expect(
            first == soonest, f"Curve {name}: {first!r} is not the first at the target. {_why_first(first, seconds)}"
        )
        expect(cause == _CAUSE[name], f"Curve {name}: {cause!r} is not its cause. How long does one step take, "
               "samples / (samples a second), at 8, at 128 and at 1024?")  # fmt: skip


def _why_first(first: object, seconds: dict[int, float]) -> str:
    times = "Time = updates × samples an update / samples a second"
    if first not in seconds:
        return f"{times}; give one of the sizes."
    return f"{times}, which is {seconds[first]:.0f} s there, and less at another size."
