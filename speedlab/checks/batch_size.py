"""The checks of exercise 5: a training put back, a finder on simulated devices, a scaled rate, three curves."""

import copy
import itertools
import math
import operator
import random
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from speedlab.checks.core import apart, ask, check, close, diagnose, expect, fail, number, sequence, where, whole

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
    """What one step showed: samples per second, and the share of the device's memory at its peak (0 to 1)."""

    batch_size: int
    throughput: float
    memory: float


def training(steps: int = 3) -> Training:
    """A small training run under way, after `steps` steps."""
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
    """How a step that runs out of memory in its optimizer leaves things: gradients there, some weights moved."""
    _backward(training)
    with torch.no_grad():
        next(training.model.parameters()).add_(1)


_LAWS = weakref.WeakKeyDictionary()  # not on the device, where a search could read them


class Device:
    """A simulated device: the steps are real, on four rows; memory and throughput follow laws of the batch size.

    `memory` gives the share of the memory that a size needs, `throughput` its samples per second, `broken` whether a
    size fails for no visible reason (as fragmented memory does).
    """

    def __init__(
        self,
        memory: Callable[[int], float],
        throughput: Callable[[int], float],
        broken: Callable[[int], bool] = lambda size: False,
    ):
        _LAWS[self] = memory, throughput, broken
        self.training = training()
        self.tried: list[int] = []
        self.ran: dict[int, Trial] = {}

    def train(self, batch_size: int) -> Trial:
        """Train one step with this batch size. Raises OutOfMemory, in the middle of a step, where it does not fit."""
        if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__") or batch_size < 1:
            raise ValueError(f"A batch size is a whole number of at least 1, not {batch_size!r}.")
        batch_size = operator.index(batch_size)
        # not an Exception, so that a search which catches everything ends here, too
        expect(len(self.tried) < _PATIENCE, f"You make more than {_PATIENCE} trials on one device. "
               "Does your search end? Double the size, then halve the gap.")  # fmt: skip
        self.tried.append(batch_size)
        expect(self in _LAWS, "A copy of the device has no memory to fill. Search on the device that you are given.")
        memory, throughput, broken = _LAWS[self]
        used = memory(batch_size)
        if used > 1 or broken(batch_size):
            _half_a_step(self.training)
            raise OutOfMemory(f"A batch of {batch_size} does not fit.")
        step(self.training)
        self.ran[batch_size] = Trial(batch_size, throughput(batch_size), used)
        return self.ran[batch_size]


def _speed(device: Device, batch_size: int) -> float:
    """Samples per second at this size, without a trial, or 0 where it does not run within the margin."""
    memory, throughput, broken = _LAWS[device]
    return throughput(batch_size) if memory(batch_size) <= MARGIN and not broken(batch_size) else 0.0


# --- Task 1 ---------------------------------------------------------------------------------------------------------

_PARTS = {
    "weights": "Copy while remember runs, and deeply: state_dict() hands out the tensors themselves, which training "
    "goes on changing. And keep the copies in the function: a second call must not change those of the first.",
    "running statistics": "BatchNorm keeps them in buffers: take model.state_dict(), not the parameters alone.",
    "train and eval flags": "Leave model.train() and model.eval() alone, or put every module's `training` back.",
    "optimizer": "It has a state_dict() too, with Adam's moments in it: deep-copy it, and load a copy of your copy.",
    "scheduler": "It counts its steps: use scheduler.state_dict() and load_state_dict().",
    "random state": "Dropout draws from it: use torch.get_rng_state() and torch.set_rng_state().",
    "gradients": "There were none before; the next backward would add to them: call optimizer.zero_grad().",
}


def state(training: Training) -> dict[str, object]:
    """A copy of all that a training step changes, by part."""
    found = (
        dict(training.model.named_parameters()),
        dict(training.model.named_buffers()),
        [module.training for module in training.model.modules()],
        training.optimizer.state_dict(),
        training.scheduler.state_dict(),
        torch.get_rng_state(),
        [None if p.grad is None or not p.grad.any() else p.grad for p in training.model.parameters()],
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


def _trained_on(made: Training) -> dict[str, object]:
    for _ in range(3):
        step(made)
    return state(made)


@check("Task 1, put everything back")
def remember(answer: Callable[[Training], Callable[[], None]]) -> None:
    for steps, frozen in ((3, False), (0, False), (2, True)):
        wanted, made = _trained_on(_under_way(steps, frozen)), _under_way(steps, frozen)
        before, parts = state(made), dict(vars(made))
        put_back = answer(made)
        expect(callable(put_back), "Return a function that puts everything back; "
               f"you return an object of type {type(put_back).__name__}.")  # fmt: skip
        part = changed(before, made)
        expect(part is None, f"remember itself changes the {part}. It should only copy.")
        with torch.random.fork_rng([]):
            answer(training(1))  # of which the first copies must know nothing
        # where no step has been made, put_back first meets half a step, without an optimizer's state
        expect(not steps or _same(_trained_on(made), wanted), "After remember, training does not go on as it would "
               "have. It should only copy.")  # fmt: skip
        for time in ("", " when put back a second time", *[" when put back many times"] * 3):
            _half_a_step(made)
            put_back()
            part = changed(before, made)
            expect(part is None, f"With {steps} steps behind it and some more since, the training run "
                   f"differs from before in its {part}{time}. {_why_changed(part, before, made)}")  # fmt: skip
            new = next((name for name, part in parts.items() if getattr(made, name) is not part), None)
            expect(new is None, f"After put_back, the {new} is another object. A loop that holds the old one goes on "
                   "with it: load into the object that was there.")  # fmt: skip
            own = {id(p) for group in made.optimizer.param_groups for p in group["params"]}
            expect(own == set(map(id, made.model.parameters())), "After put_back, the optimizer updates tensors "
                   "other than the model's. Write into the model's own: load without `assign=True`.")  # fmt: skip
            expect(_same(_trained_on(made), wanted), "After put_back, training does not go on as it did before. "
                   "Does put_back replace something that the steps still refer to?")  # fmt: skip


def _under_way(steps: int, frozen: bool) -> Training:
    torch.manual_seed(steps)
    made = training(steps)
    made.model[1].train(not frozen)
    return made


def _why_changed(part: str | None, before: Mapping[str, object], made: Training) -> str | None:
    now = state(made)
    if part == "optimizer" and _same(before[part]["state"], now[part]["state"]):
        return (
            "Its moments are back, but its param_groups are not: the scheduler changes the learning rate in them, "
            "and scheduler.load_state_dict does not put that back."
        )
    return _PARTS.get(part)


# --- Task 2 ---------------------------------------------------------------------------------------------------------


def _rising(overhead: float) -> Callable[[int], float]:
    """Samples per second where a step costs as much as `overhead` samples more than its batch."""
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
            # from 128 to 256 it gains 5.2%, which is enough
            lambda b: 0.1 + b / 9000,
            lambda b: _rising(14)(b) * min(1, 300 / b),
            4096,
        ),
        "where 128 runs, with 95% of the memory": case(lambda b: 0.3 + 0.65 * b / 128, _rising(2000), 2048),
        # just under the margin; at 90% itself, 1 - memory < 0.1 and memory > 0.9 round differently
        "where 64 takes 89.9% of the memory": case(lambda b: 0.899 * b / 64, _rising(2000), 2048),
        # 15 fit: the gap below 16 counts, too
        "where 16 runs, with 95% of the memory": case(lambda b: 0.3 + 0.65 * b / 16, _rising(2000), 2048),
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


@check("Task 2, the finder")
def find_batch_size(answer: Callable[[Device, int], int | None]) -> None:
    for name, case in devices().items():
        device = case.make()
        mine = device.training
        before = state(mine)
        with where(f"On the device {name}"):
            found = answer(device, case.largest)
            if _speed(device, 1) == 0:
                expect(found is None, f"you return {found!r}. Return None.")
            else:
                expect(found is not None, "you return None, but a batch of 1 runs.")
                found = whole(found, "the batch size")
            _expect_trials(found, device, case.largest)
            if found is not None:
                _expect_it_ran(found, device)
                _expect_good(found, device, case)
            expect(device.training is mine, "you put another training into device.training: keep the original one.")
            part = changed(before, mine)
            expect(part is None, f"you leave the training's {part} changed. Put it back.")
    errors = FileNotFoundError("no such image"), RuntimeError("DataLoader worker (pid 4711) exited unexpectedly")
    errors += RuntimeError("the crop does not fit"), ValueError("no image"), TypeError("no text")
    errors += KeyError("label"), AttributeError("shape")
    for error, fails in itertools.product(errors, _FAILURES):
        _expect_to_pass(error, fails, answer)


def _expect_trials(found: int | None, device: Device, largest: int) -> None:
    tried, allowed = device.tried, int(math.log2(largest)) + 5
    expect(max(tried, default=0) <= largest, f"you try {max(tried, default=0)}; the largest is {largest}.")
    twice = next((size for size in tried if tried.count(size) > 1), None)
    why = "Double the size, then halve the gap, until it is at most an eighth of the largest that ran, or 1."
    why = f"You try {twice} more than once." if twice else why
    expect(len(tried) <= allowed, f"you make {len(tried)} trials; {allowed} are allowed. {why}")


def _expect_it_ran(found: int, device: Device) -> None:
    expect(found in device.tried, f"you return {found}, a size that you never tried.")
    expect(found in device.ran, f"you return {found}, which ran out of memory.")
    used = device.ran[found].memory
    expect(used <= MARGIN, f"{found} runs, but with {used:.1%} of the memory. "
           "Treat what needs more than 90% as too large.")  # fmt: skip


def _expect_good(found: int, device: Device, case: "Case") -> None:
    ran, tried, rate = device.ran, device.tried, device.ran[found].throughput
    fits = {size: trial for size, trial in ran.items() if trial.memory <= MARGIN}
    best = max(fits.values(), key=lambda trial: trial.throughput)
    gain = best.throughput / rate - 1
    refused = [size for size in tried if size not in fits]
    # a search that goes on below the best size has taken it for too large
    margin = refused or any(size < best.batch_size for size in tried[tried.index(best.batch_size) + 1 :])
    if gain > 0.05 and best.batch_size > found:
        fail(
            f"you return {found}, but {best.batch_size} ran with {best.memory:.1%} of the memory and {gain:.1%} more "
            "samples per second. " + ("Take what needs 90% or less. " if margin else "")
            + "Go on while doubling gains 5% or more, and keep the best trial."
        )  # fmt: skip
    expect(gain <= 0.05, f"you return {found} with {rate:.0f} samples per second, but {best.batch_size} ran with "
           f"{best.throughput:.0f}. Keep the best trial, not the last one.")  # fmt: skip
    if not case.regular:
        return
    half = ran.get(found // 2) if found % 2 == 0 else None
    if half and rate < 1.05 * half.throughput:
        fail(f"{found} has {rate / half.throughput - 1:.1%} more samples per second than {found // 2}, less than 5%. "
             "Stop there, and keep the smaller size.")  # fmt: skip
    speeds = {size: _speed(device, size) for size in range(1, case.largest + 1)}
    most = max(speeds.values())
    enough = min(size for size, speed in speeds.items() if speed >= 0.9 * most)
    expect(found <= 4 * enough, f"you return {found}, but {enough} has 90% of the samples per second. "
           "Stop when doubling gains less than 5%, and keep the smaller size.")  # fmt: skip
    gap = min(refused, default=case.largest + 1) - found
    tried_above = any(size > found for size in fits)
    between = "Look between the largest size that ran and the smallest that was too large, until the gap is at most "
    expect(tried_above or not refused or gap <= max(1, found / 8), f"you stop at {found}, and {found + gap} was too "
           f"large: a gap of {gap}. {between}an eighth of the best, or 1.")  # fmt: skip
    expect(speeds[found] >= 0.85 * most, f"{found} has {speeds[found] / most:.0%} of the samples per second that "
           f"{max(speeds, key=speeds.get)} has. Go on while doubling gains 5% or more.")  # fmt: skip


_FAILURES = (  # the sizes that meet an error other than a lack of memory
    lambda size: True,
    lambda size: size > 2,
    lambda size: size & (size - 1),  # no power of two: the first such size comes after a lack of memory
)


def _expect_to_pass(
    error: Exception, fails: Callable[[int], object], answer: Callable[[Device, int], int | None]
) -> None:
    """An error other than a lack of memory comes out of the search, and leaves no trace."""

    def broken(size: int) -> bool:
        if fails(size):
            raise error
        return False

    device = Device(lambda b: b / 40, _rising(1000), broken)
    before = state(device.training)
    try:
        answer(device, 256)
    except type(error) as raised:
        if raised is not error:
            raise
        part = changed(before, device.training)
        expect(part is None, f"When the loader raises during a search, this stays changed: {part}. "
               "Put it back in a `finally`.")  # fmt: skip
        return
    fail(f"A loader that fails ({type(error).__name__}: {error}) is not out of memory, but you swallow its error. "
         "Catch checks.OutOfMemory alone, and do not return in a `finally`.")  # fmt: skip


# --- Task 3 ---------------------------------------------------------------------------------------------------------

Rate = Callable[[int, float, int, int, int, str, int], float]
_RECIPES = ((0.1, 32, 128, 2), (0.1, 256, 32, 64), (3e-4, 64, 16, 1))  # base rate and batch, per device, devices


def _rates(base_rate: float, base_batch: int, per_device: int, devices: int, rule: str) -> tuple[float, float]:
    """The first and the full rate."""
    k = per_device * devices / base_batch
    return base_rate, base_rate * (k if rule == "linear" else math.sqrt(k))


@check("Task 3, the learning rate that goes with it")
def learning_rate(answer: Rate) -> None:
    for rule in RULES:
        for base_rate, base_batch, per_device, devices in _RECIPES:
            for update, warmup in ((40, 10), (7, 0), (0, 0), (10, 10), (0, 10), (3, 10), (5, 10), (7, 8)):
                setup = (base_rate, base_batch, per_device, devices, rule)
                first, full = _rates(*setup)
                risen = min(1.0, update / warmup) if warmup else 1.0
                wanted = first + risen * (full - first)
                got = number(ask(answer, update, *setup, warmup), "The learning rate")
                if not close(got, wanted):
                    run = (
                        f"base rate {base_rate:g} at batch {base_batch}, now {devices} devices with {per_device} each"
                    )
                    texts = apart(got, wanted)
                    fail(f"Update {update} of a run with {run}, {rule} rule, {warmup} updates of warm-up: you return "
                         f"{texts[0]} instead of {texts[1]}. {_why_rate(got, update, warmup, *setup)}")  # fmt: skip


def _why_rate(got: float, update: int, warmup: int, base_rate, base_batch, per_device, devices, rule) -> str:
    risen = update / warmup if warmup else 1.0
    first, full = _rates(base_rate, base_batch, per_device, devices, rule)
    alone = _rates(base_rate, base_batch, per_device, 1, rule)[1]
    other = _rates(base_rate, base_batch, per_device, devices, RULES[1 - RULES.index(rule)])[1]
    share = min(1.0, risen)
    faults = {
        "An update averages over the batches of all devices: multiply by their number.": first
        + share * (alone - first),
        f"That is the {RULES[1 - RULES.index(rule)]} rule.": first + share * (other - first),
        "After the warm-up the rate stays at the full rate: min(1, update / warmup).": first + risen * (full - first),
        "This batch is smaller than the recipe's, so its full rate is below the base rate.": full < first
        and close(got, first),
        "Without a warm-up, the rate is the full rate from update 0 on.": first if not warmup else math.nan,
        "Update number `warmup` has the full rate already: divide by warmup, not by warmup + 1.": first
        + min(1.0, update / (warmup + 1)) * (full - first),
    }
    line = "The rate goes in a straight line from the base rate at update 0 to the full rate at update `warmup`."
    k = "Take k = global batch / base batch; the rate is the base rate times k, or times the square root of k."
    return diagnose(got, faults, line if update < warmup else k)


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
_GIVEN = copy.deepcopy((CURVES, UPDATES))  # used for judging: an answer may write into the originals


@check("Task 4, three curves")
def read_curves(answer: Callable[[], dict[str, tuple[int, int, str]]]) -> None:
    given, (curves, updates) = ask(answer), _GIVEN
    expect(isinstance(given, Mapping) and given.keys() == curves.keys(), "Return a dict with the keys A, B and C.")
    for name, curve in curves.items():
        with where(f"Curve {name}"):
            enough, first, cause = sequence(given[name], "(enough, first, cause)", length=3)
            enough, first = whole(enough, "The first of the three"), whole(first, "The second of the three")
            wanted = min(size for size in SIZES if curve[size] >= 0.9 * max(curve.values()))
            expect(enough == wanted, f"{enough} is not the smallest size with 90% of the highest throughput. "
                   "Find the highest point of this curve, take 90% of it, and read from the left.")  # fmt: skip
            seconds = {size: updates[size] * size / curve[size] for size in SIZES}
            there = f"which is {seconds[first]:.0f} s there, and less at another size" if first in SIZES else (
                "and the answer must be one of the sizes")  # fmt: skip
            expect(first == min(seconds, key=seconds.get), f"{first} is not the first at the target. "
                   f"Time = updates × samples per update / samples per second, {there}.")  # fmt: skip
            expect(cause in CAUSES, f"write one of {', '.join(map(repr, CAUSES))}, not {cause!r}.")
            expect(cause == _CAUSE[name], f"{cause!r} is not its cause. How long does one step take, "
                   "samples / (samples per second), at 8, at 128 and at 1024?")  # fmt: skip
