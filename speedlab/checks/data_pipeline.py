"""The checks of exercise 7, the data pipeline: a forecast, a diagnosis, batches by length, a loop that overlaps."""

import itertools
import math
import random
import statistics
import threading
import time
from collections.abc import Callable

import torch

from speedlab.checks import check, expect

# one step: when it asked for its batch, when it had it, when it was done with it; an epoch is a list of steps
Step = tuple[float, float, float]
Trace = list[list[Step]]
KINDS = ("model", "start", "hiccups", "loader")
REMEDIES = ("persistent_workers=True", "more workers", "a larger prefetch_factor", "a faster model")
_PATIENCE = 3.0
_LIMIT = 30.0


# --- Task 1 ---------------------------------------------------------------------------------------------------------


@check("Task 1, a forecast from two measurements", seconds=300)
def forecast(answer: Callable[[float, float, int], tuple[float, float]]) -> None:
    for load, step, workers in itertools.product((0.01, 0.06, 0.5), (0.02, 0.1), (0, 1, 2, 4, 8)):
        got = answer(load, step, workers)
        case = f"With load={load:g}, step={step:g} and workers={workers}"
        expect(
            isinstance(got, tuple | list) and len(got) == 2 and all(isinstance(x, int | float) for x in got),
            f"{case}, return two numbers: seconds a step, and the share of them that is waiting.",
        )
        seconds = load + step if workers == 0 else max(load / workers, step)
        waiting = 1 - step / seconds
        if not math.isclose(got[0], seconds, rel_tol=1e-6):
            expect(workers > 0, f"{case}, nothing overlaps: loading and training take turns. You say {got[0]:g} s.")
            expect(
                not math.isclose(got[0], load / workers + step, rel_tol=1e-6),
                f"{case}, loading and training happen at the same time, so their times do not add up.",
            )
            expect(
                not math.isclose(got[0], min(load / workers, step), rel_tol=1e-6),
                f"{case}, the slower of the two sets the pace, not the faster one.",
            )
            expect(False, f"{case}, a step takes {seconds:g} s in the long run; you say {got[0]:g} s.")
        expect(
            math.isclose(got[1], waiting, rel_tol=1e-6, abs_tol=1e-9),
            f"{case}, the model works {step:g} of {seconds:g} s, so it waits {waiting:.1%}; you say {got[1]:.1%}. "
            + ("Waiting is never negative." if got[1] < 0 else "Divide by the whole step."),
        )


# --- Task 2 ---------------------------------------------------------------------------------------------------------


def trace(kind: str, seed: int = 0, epochs: int = 3, steps: int = 30) -> Trace:
    """A made-up recording of a loop whose time goes where `kind` says, in seconds, deterministic from the seed."""
    if kind not in KINDS:
        raise ValueError(f"Unknown kind {kind!r}; expected one of {', '.join(KINDS)}.")
    draw, now, recorded = random.Random(f"{kind} {seed}"), 100.0 * seed, []
    train = draw.uniform(0.02, 0.2)
    for _ in range(epochs):
        epoch = []
        late = set(draw.sample(range(1, steps), max(1, steps // 15)))
        for i in range(steps):
            wait = {
                "model": train * draw.uniform(0.0, 0.03),
                "start": train * (draw.uniform(25, 60) if i == 0 else draw.uniform(0.0, 0.2)),
                "hiccups": train * (draw.uniform(8, 20) if i in late else draw.uniform(0.0, 0.1)),
                "loader": train * draw.uniform(0.5, 3.0),
            }[kind]
            took = train * draw.uniform(0.95, 1.05)
            epoch.append((now, now + wait, now + wait + took))
            now = epoch[-1][2]
        recorded.append(epoch)
    return recorded


def planted_loops() -> dict[str, Trace]:
    """The three slow loops of task 2."""
    return {"A": trace("hiccups", 7), "B": trace("loader", 11), "C": trace("start", 5)}


@check("Task 2, what a recording says", seconds=300)
def diagnose(answer: Callable[[Trace], str]) -> None:
    reasons = {
        "model": "less than a tenth of the time is waiting",
        "start": "at least half of the waiting happens in the first steps of the epochs",
        "hiccups": "the tenth of the steps that waits longest has at least half of the waiting",
        "loader": "the waiting is spread over all steps",
    }
    for seed, kind in itertools.product(range(8), KINDS):
        got = answer(trace(kind, seed, epochs=1 + seed % 4))
        expect(isinstance(got, str) and got in KINDS, f"Return one of {', '.join(KINDS)}; you return {got!r}.")
        expect(got == kind, f"In one of the recordings {reasons[kind]}, so it is {kind!r}; you say {got!r}.")


@check("Task 2, three slow loops and their remedies", seconds=300)
def remedies(answer: Callable[[], dict[str, str]]) -> None:
    wanted = {"A": "a larger prefetch_factor", "B": "more workers", "C": "persistent_workers=True"}
    why = {
        "A": "it waits rarely, but then long. What evens out a slow batch now and then?",
        "B": "it waits at every step. A queue evens out, it does not speed up. What adds speed?",
        "C": "it waits at the first step of every epoch. What happens there, again and again?",
    }
    got = answer()
    expect(isinstance(got, dict) and set(got) == set(wanted), "Return a dict with the keys 'A', 'B' and 'C'.")
    for loop, remedy in wanted.items():
        expect(got[loop] in REMEDIES, f"Loop {loop}: choose one of {', '.join(REMEDIES)}.")
        expect(got[loop] == remedy, f"Loop {loop}: {why[loop]}")


# --- Task 3 ---------------------------------------------------------------------------------------------------------


def _lengths(kind: str, count: int) -> list[int]:
    draw = random.Random(f"{kind} {count}")
    if kind == "long tail":
        return [min(400, max(3, int(draw.lognormvariate(3.5, 0.8)))) for _ in range(count)]
    if kind == "even":
        return [draw.randint(1, 400) for _ in range(count)]
    return [draw.choice((8, 10, 395, 400)) for _ in range(count)]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def positions(batches: list[list[int]], lengths: list[int]) -> int:
    """What a model computes on: the size of each batch times its longest text, added up."""
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)


@check("Task 3, batches of similar length", seconds=300)
def bucket_batches(answer: Callable[[list[int], int, torch.Generator], list[list[int]]]) -> None:
    expect(answer([], 1000, _generator(0)) == [], "No texts, no batches: return an empty list for an empty shard.")
    for kind, count, budget in (("long tail", 3000, 4000), ("even", 1501, 4000), ("two lengths", 1000, 2000)):
        lengths = _lengths(kind, count)
        batches = answer(lengths, budget, _generator(1))
        _examine_coverage(batches, lengths, budget)
        _examine_padding(batches, lengths, budget)
        _examine_chance(answer, batches, lengths, budget)


def _examine_coverage(batches: list[list[int]], lengths: list[int], budget: int) -> None:
    expect(
        isinstance(batches, list) and all(isinstance(batch, list) and batch for batch in batches),
        "Return a list of batches, each a list of at least one index.",
    )
    used = [i for batch in batches for i in batch]
    expect(all(type(i) is int for i in used), "The indices must be plain integers: `.tolist()` makes them.")
    missing, twice = len(set(range(len(lengths))) - set(used)), len(used) - len(set(used))
    expect(not missing, f"{missing} of {len(lengths)} texts are in no batch. What happens to the last, smaller one?")
    expect(not twice, f"{twice} texts come more than once in an epoch.")
    for batch in batches:
        longest = max(lengths[i] for i in batch)
        expect(
            len(batch) * longest <= budget,
            f"A batch of {len(batch)} texts, the longest of {longest}, has {len(batch) * longest} positions; "
            f"only {budget} fit. Padding counts: it is the longest that decides, times the number of texts.",
        )


def _examine_padding(batches: list[list[int]], lengths: list[int], budget: int) -> None:
    padding = 1 - sum(lengths) / positions(batches, lengths)
    expect(
        padding <= 0.2,
        f"{padding:.0%} of your positions are padding; 20% is allowed. Do texts of similar length share a batch?",
    )
    fewest = math.ceil(sum(lengths) / budget)
    expect(
        len(batches) <= 1.35 * fewest + 5,
        f"You make {len(batches)} batches, where about {fewest} would do: fill each up to the budget.",
    )


def _examine_chance(answer: Callable, batches: list[list[int]], lengths: list[int], budget: int) -> None:
    expect(
        answer(lengths, budget, _generator(1)) == batches,
        "Two generators with the same seed gave different batches: draw from the generator that you are given only.",
    )
    other = answer(lengths, budget, _generator(2))
    expect(
        {frozenset(batch) for batch in batches} != {frozenset(batch) for batch in other},
        "Another seed gives the same batches: every epoch brings the same texts together. Shuffle before you sort.",
    )
    first, second = (
        {pair for batch in plan for pair in itertools.combinations(sorted(batch), 2)} for plan in (batches, other)
    )
    again = len(first & second) / max(1, len(first))
    expect(
        again <= 0.3,
        f"{again:.0%} of the pairs in a batch meet again in the next epoch; 30% is allowed. "
        "Sort inside chunks of the shuffled texts, not all of them at once.",
    )
    means = [statistics.fmean(lengths[i] for i in batch) for batch in batches]
    neighbours = _correlation(means[:-1], means[1:])
    trend = _correlation(list(range(len(means))), means)
    expect(
        max(abs(neighbours), abs(trend)) <= 0.45,
        "Short batches follow short ones and long ones long ones: shuffle the batches too, at the end.",
    )


def _correlation(x: list[float], y: list[float]) -> float:
    if len(x) < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        return 0.0
    return statistics.correlation(x, y)


# --- Task 4 ---------------------------------------------------------------------------------------------------------


class _Stage:
    """A loader and a model that watch each other: what was begun when, without a clock that decides."""

    def __init__(self, count: int, depth: int, break_load: int = -1, break_step: int = -1):
        self.count, self.depth, self.break_load, self.break_step = count, depth, break_load, break_step
        self.begun = [threading.Event() for _ in range(count)]
        self.loaded: list[int] = []
        self.trained: list[int] = []
        self.overlaps = 0
        self.most_ahead = 0
        self.patient = True

    def load(self, index: int) -> dict[str, int]:
        self.begun[index].set()
        self.loaded.append(index)
        if index == self.break_load:
            raise ValueError(f"{index:05}.jpg cannot be decoded")
        return {"index": index}

    def step(self, batch: dict[str, int]) -> None:
        index = batch["index"]
        if index == self.break_step:
            raise KeyboardInterrupt
        if index + 1 < self.count:
            # a loop that overlaps begins the next batch by itself; one that does not would keep us waiting
            self.patient = self.begun[index + 1].wait(_PATIENCE if self.patient else 0.01)
            self.overlaps += self.patient
        if index == 0:
            time.sleep(0.3)  # time enough to run ahead too far
        self.most_ahead = max(self.most_ahead, len(self.loaded) - index - 1)
        self.trained.append(index)


def _run(answer: Callable, stage: _Stage) -> BaseException | None:
    """Run the learner's loop in a thread, so that a loop that hangs is told and not waited for."""
    before, raised = set(threading.enumerate()), []

    def call() -> None:
        try:
            answer(stage.load, stage.step, stage.count, stage.depth)
        except BaseException as error:
            raised.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(_LIMIT)
    expect(
        not caller.is_alive(),
        f"Your loop did not come back within {_LIMIT:.0f} s. Does someone wait for a batch that nobody makes, or for "
        "room that nobody gives back?",
    )
    if raised and isinstance(raised[0], NotImplementedError):
        raise raised[0]
    deadline = time.monotonic() + _PATIENCE
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    expect(
        not left,
        "A thread of yours still runs after the loop has ended. Tell it to stop, in a `finally`, also when the step "
        "raises: it may be waiting for room.",
    )
    return raised[0] if raised else None


@check("Task 4, a loop that overlaps", seconds=300)
def train_overlapped(answer: Callable) -> None:
    for count, depth in ((8, 1), (12, 3), (1, 2), (0, 2)):
        stage = _Stage(count, depth)
        error = _run(answer, stage)
        if error is not None:
            raise error
        everything = list(range(count))
        expect(sorted(stage.loaded) == everything, f"Of {count} batches, these were loaded: {stage.loaded}.")
        expect(stage.trained == everything, f"The steps came in the order {stage.trained}; keep that of the batches.")
        expect(
            stage.overlaps >= max(0, count - 1),
            f"Only {stage.overlaps} of {max(0, count - 1)} steps ran while the next batch was being loaded. "
            "Begin to load before the step, in another thread.",
        )
        expect(
            stage.most_ahead <= depth,
            f"The loader ran {stage.most_ahead} batches ahead; depth={depth} allows {depth}. Take a slot before you "
            "load, and give it back when the trainer takes the batch.",
        )
    stage = _Stage(8, 2, break_load=3)
    error = _run(answer, stage)
    expect(
        isinstance(error, ValueError) and "00003.jpg" in str(error),
        "We let batch 3 fail with a ValueError that names the file, and "
        + (f"your loop raised {error!r}" if error else "your loop ended as if nothing had happened")
        + ". Catch the error in the thread, hand it over, and raise it in the loop.",
    )
    expect(stage.trained == [0, 1, 2], f"Batches 0, 1 and 2 are good; trained: {stage.trained}.")
    stage = _Stage(8, 2, break_step=2)
    error = _run(answer, stage)
    expect(isinstance(error, KeyboardInterrupt), "Ctrl-C during a step must end your loop; do not swallow it.")
