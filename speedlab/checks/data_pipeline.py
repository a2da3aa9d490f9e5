"""The checks of exercise 7, the data pipeline: a forecast, a diagnosis, batches by length, a loop that overlaps."""

import itertools
import math
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import torch

from speedlab.checks import core
from speedlab.checks.core import apart, ask, check, choices, close, expect, number, sequence, where, whole

# one step: when it asked for its batch, when it had it, when it was done with it; an epoch is a list of steps
Step = tuple[float, float, float]
Trace = list[list[Step]]
KINDS = ("model", "start", "hiccups", "loader")
REMEDIES = ("persistent_workers=True", "more workers", "a larger prefetch_factor", "a faster model")
# How long task 4's loader and model wait for each other, and how long a loop may take.
_PATIENCE = 3.0
_LIMIT = 20.0


# --- Task 1 ---------------------------------------------------------------------------------------------------------


@check("Task 1, a forecast from two measurements")
def forecast(answer: Callable[[float, float, int], tuple[float, float]]) -> None:
    for load, step, workers in itertools.product((0.01, 0.06, 0.5), (0.02, 0.1), (0, 1, 2, 3, 5, 8)):
        with where(f"With load={load:g}, step={step:g} and workers={workers}"):
            got = sequence(ask(answer, load, step, workers), "Your forecast (seconds and share)", length=2)
            seconds, share = number(got[0], "The time of a step"), number(got[1], "The share of waiting")
            plain, paced = load + step, load / max(workers, 1)
            wanted = plain if workers == 0 else max(paced, step)
            waits = 1 - step / wanted
            added = workers > 0 and (close(seconds, paced + step) or close(seconds, plain))
            hints = {
                "That is in milliseconds; return seconds.": 1000 * wanted,
                "That is steps per second; return seconds per step.": 1 / wanted,
                "The seconds come first, then the share.": close(seconds, waits) and close(share, wanted),
                "Do not round it.": any(close(seconds, round(wanted, digits)) for digits in range(2, 6)),
                "Without workers nothing overlaps: loading and training take turns.": workers == 0,
                "With workers, loading and training happen at the same time: do not add their times.": added,
                "The slower of the two sets the pace, not the faster one.": min(paced, step),
                "Each of the workers makes a batch in `load` seconds; together they make more.": max(load, step),
            }
            slower = "Which takes longer: a batch from all the workers together, or a step?"
            _agree("the seconds per step, in the long run,", seconds, wanted, hints, slower)
            hints = {
                "That is the share of the time in which it works.": 1 - waits,
                "Return a share from 0 to 1, not percent.": 100 * waits,
                "Waiting is never negative.": share < -1e-6,
                "Do not round it.": abs(share - waits) < 0.01,
            }
            text = f"the model works {step:g} of {wanted:g} s; the share of the time in which it waits"
            _agree(text, share, waits, hints, "Divide the waiting by the whole step.", absolute=1e-6)  # fp32 will do


def _agree(what: str, got: float, wanted: float, faults: dict, otherwise: str, absolute: float = 1e-9) -> None:
    right, said = apart(wanted, got)
    same = close(got, wanted, absolute=absolute)
    expect(same, lambda: f"{what} is {right}; you say {said}. {core.diagnose(got, faults, otherwise)}")


# --- Task 2 ---------------------------------------------------------------------------------------------------------


def recording(
    waits: Sequence[Sequence[float]], train: float | Sequence[float] = 0.25, pause: float = 0.0, gap: float = 0.0
) -> Trace:
    """A recording with these waits, a list per epoch, in seconds; `train` may be a list of each step's seconds.

    Between epochs the loop pauses, to validate; after each step there is a gap, to log, before it asks again.
    """
    now, recorded = 48.0, []
    for epoch in waits:
        steps = []
        for place, wait in enumerate(epoch):
            done = now + wait + (train if isinstance(train, float) else train[place])
            steps.append((now, now + wait, done))
            now = done + gap
        recorded.append(steps)
        now += pause
    return recorded


def trace(kind: str, seed: int = 0, epochs: int = 3, steps: int = 30) -> Trace:
    """A made-up recording of a loop whose time goes where `kind` says, in seconds, deterministic from the seed."""
    if kind not in KINDS:
        raise ValueError(f"Unknown kind {kind!r}; expected one of {', '.join(KINDS)}.")
    draw = random.Random(f"{kind} {seed}")
    train = draw.uniform(0.02, 0.2)
    lowest, highest = {"model": (0, 0.03), "start": (0, 0.2), "hiccups": (0, 0.1), "loader": (0.5, 3)}[kind]
    waits = [[train * draw.uniform(lowest, highest) for _ in range(steps)] for _ in range(epochs)]
    for epoch in waits:
        if kind == "start":
            epoch[0] = train * draw.uniform(25, 60)
        if kind == "hiccups":
            for late in draw.sample(range(1, steps), max(1, steps // 15)):
                epoch[late] = train * draw.uniform(3, 8)
    return recording(waits, train)


def planted_loops() -> dict[str, Trace]:
    """The three slow loops of task 2."""
    return {"A": trace("hiccups", 7), "B": trace("loader", 11), "C": trace("start", 5)}


def _shares(epochs: Trace) -> tuple[float, float, float]:
    """The share of the time that is waiting; of the waiting, the shares of first steps and of the longest tenth."""
    waits = [got - asked for epoch in epochs for asked, got, _ in epoch]
    total = sum(waits) or 1.0
    first = sum(epoch[0][1] - epoch[0][0] for epoch in epochs)
    longest = sum(sorted(waits)[-max(1, len(waits) // 10) :])
    return sum(waits) / (epochs[-1][-1][2] - epochs[0][0][0]), first / total, longest / total


def _where_time_goes(epochs: Trace) -> str:
    waiting, first, longest = _shares(epochs)
    return "model" if waiting < 0.1 else "start" if first >= 0.5 else "hiccups" if longest >= 0.5 else "loader"


def _spread(share: float, large: int, places: Sequence[int], steps: int, total: float = 40.0) -> list[float]:
    """Waits of one epoch, `total` seconds in all: the `large` ones at these places share `share` of it."""
    few = share * total / large
    return [few if i in places[:large] else (1 - share) * total / (steps - large) for i in range(steps)]


def recordings() -> Iterator[tuple[str, Trace]]:
    """Loops with their stories; in most of them one share lies just below or above where the answer changes."""
    for seed, kind in itertools.product(range(3), KINDS):
        yield "a usual loop", trace(kind, seed, epochs=1 + seed)
    for waiting in (0.0, 0.09, 0.11):
        wait = 0.25 * waiting / (1 - waiting)
        yield f"a loop that waits {waiting:.0%} of the time", recording([[wait] * 20, [wait] * 20])
    yield "a loop whose first epoch has no wait", recording([[0.0] * 8, [0.5] * 30])
    # a span that begins at the first `got`, or ends at the last `asked` or `got`, is too short by enough to matter
    yield "a loop of four steps that waits 9.5% of the time", recording([[0.095 / 0.905, 0.0, 0.0, 0.0]])
    yield "a loop that pauses between two epochs", recording([[0.028] * 20, [0.028] * 20], pause=1.0)
    for share in (0.45, 0.48, 0.52):
        epochs = [_spread(share, 1, (0,), 20)] * 3
        yield f"a loop with {share:.0%} of the waiting in the first steps", recording(epochs)
    yield "a loop with exactly half of its waiting in the first step", recording([[1.0, *[0.125] * 8]], train=1.0)
    for lengths in ((5, 30, 12), (12, 20, 9)):
        yield "a loop of epochs of different lengths", recording([_spread(0.6, 1, (0,), n) for n in lengths])
    for heavy, light in ((0.9, 0.05), (0.2, 0.9)):  # all epochs together, not each one, nor their mean
        uneven = [_spread(heavy, 1, (0,), 20), _spread(light, 1, (0,), 20, total=8.0)]
        yield "a loop that waits most in its first epoch", recording(uneven)
        yield "a loop that waits most in its last epoch", recording(uneven[::-1])
    yield "a loop with exactly half of it in one late step", recording([[*[0.125] * 4, 1.0, *[0.125] * 4]], train=1.0)
    for share in (0.47, 0.53):
        late = _spread(share, 5, (5, 11, 20, 33, 41), 50)
        yield f"a loop with {share:.0%} of the waiting in the longest tenth", recording([late[:25], late[25:]])
    rounded = _spread(0.485, 5, (5, 11, 20, 33, 41), 59)
    rounded[50] += 0.5
    yield "a loop of 59 steps", recording([rounded])
    yield "a loop that logs after each step", recording([[0.02] * 20], gap=0.3)
    uneven = [50.0, *[0.1] * 9, 50.0, *[0.1] * 9]
    yield "a loop whose longest steps wait little", recording([_spread(0.53, 2, (5, 15), 20)], train=uneven)
    for share in (0.3, 0.6):
        yield "a loop of seven steps", recording([_spread(share, 1, (4,), 7)])


@check("Task 2, what a recording says")
def diagnose(answer: Callable[[Trace], str]) -> None:
    for story, epochs in recordings():
        with where(f"For {story}"):
            got, wanted = ask(answer, epochs), _where_time_goes(epochs)
            expect(isinstance(got, str) and got in KINDS, f"return one of {', '.join(KINDS)}, not {got!r}.")
            waiting, first, longest = _shares(epochs)
            steps = sum(map(len, epochs))
            expect(
                got == wanted,
                f"of the whole time, {waiting:.1%} is waiting; of the waiting, {first:.1%} is in the first steps of "
                f"epochs (here {len(epochs)}), and {longest:.1%} in the longest tenth of the {steps} steps. "
                f"So it is {wanted!r}, but you say {got!r}.",
            )


remedies = choices(
    "Task 2, three slow loops and their remedies",
    {"A": "a larger prefetch_factor", "B": "more workers", "C": "persistent_workers=True"},
    REMEDIES,
    {
        "a faster model": "The loop waits for its data: a faster model would only wait longer.",
        ("A", "more workers"): "That helps too: four workers hold more batches in reserve. But one is fast enough on "
        "average here. What deepens its reserve without another process?",
        "A": "It waits rarely, but then for a long time. What evens out an occasional slow batch?",
        ("B", "a larger prefetch_factor"): "It waits at every step. A queue evens out, it adds no speed. What does?",
        "B": "It waits at every step, not only at the first. What makes batches faster?",
        "C": "It waits at the first step of every epoch. What happens there, again and again?",
    },
)


# --- Task 3 ---------------------------------------------------------------------------------------------------------

Plan = list[list[int]]


def lengths_of(kind: str, count: int) -> list[int]:
    """Made-up lengths of texts, the same ones each time."""
    draw = random.Random(f"{kind} {count}")
    if kind == "long tail":
        return [min(400, max(3, int(draw.lognormvariate(3.5, 0.8)))) for _ in range(count)]
    if kind == "even":
        return [draw.randint(1, 400) for _ in range(count)]
    return [draw.choice((8, 10, 395, 400)) for _ in range(count)]


def positions(batches: Plan, lengths: list[int]) -> int:
    """What a model computes on: the size of each batch times its longest text, added up."""
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)


def meet_again(first: Plan, second: Plan) -> float:
    """Of all pairs that share a batch in the first epoch, the share that does so in the second one too."""
    batch_of = {i: number for number, batch in enumerate(second) for i in batch}
    together = Counter((number, batch_of[i]) for number, batch in enumerate(first) for i in batch)
    pairs = sum(math.comb(len(batch), 2) for batch in first)
    return sum(math.comb(size, 2) for size in together.values()) / max(1, pairs)


@check("Task 3, batches of similar length")
def bucket_batches(answer: Callable[[list[int], int, torch.Generator], Plan]) -> None:
    small = ([], [7], [3, 3], [7, 7, 7], [20, 20, 1])
    large = ((lengths_of("long tail", 12000), 4000), (lengths_of("even", 6001), 4000), ([10] * 4001, 20))
    for lengths, budget in (*((few, 20) for few in small), *large, (lengths_of("two lengths", 4000), 2000)):
        few = f"lengths {lengths} and a budget of {budget}"
        with where(f"For {few if len(lengths) < 9 else f'{len(lengths):,} lengths and a budget of {budget:,}'}"):
            generator, fresh, later = (torch.Generator().manual_seed(1) for _ in range(3))
            plans = [_plan(answer, lengths, budget, generator)]
            if len(lengths) < 9:
                continue
            later.set_state(generator.get_state())
            plans.append(_plan(answer, lengths, budget, generator))
            same = _plan(answer, lengths, budget, fresh) == plans[0]
            expect(same, "two generators with the same seed gave different batches: draw from `generator` only.")
            _examine_padding(plans[0], lengths, budget)
            _examine_chance(plans, lengths)
            follows = _plan(answer, lengths, budget, later) == plans[1]
            expect(follows, "the next epoch does not follow from the state of `generator`: draw from it only.")
    generator = torch.Generator().manual_seed(2)
    _examine_order([_plan(answer, large[1][0], 4000, generator) for _ in range(8)], large[1][0])


def _plan(answer: Callable, lengths: list[int], budget: int, generator: torch.Generator) -> Plan:
    """One epoch's batches: each text in one of them, none over the budget. The generator goes on."""
    what, given = "the plan of an epoch", list(lengths)
    batches = [sequence(b, "a batch") for b in sequence(answer(given, budget, generator), what)]
    expect(given == lengths, "your function changed `lengths`: the next epoch needs it. Work on a copy.")
    batches = [[i if type(i) is int else whole(i, "an index") for i in batch] for batch in batches]
    expect(all(batches), "one of your batches is empty.")
    used = Counter(i for batch in batches for i in batch)
    strange = [i for i in used if not 0 <= i < len(lengths)]
    expect(not strange, lambda: f"there is no text with index {strange[0]}.")
    missing, twice = len(lengths) - len(used), sum(used.values()) - len(used)
    expect(not missing, f"{missing} of {len(lengths)} texts are in no batch. What happens to the smaller last batch?")
    expect(not twice, f"{twice} texts come more than once in an epoch.")
    for batch in batches:
        longest = max(lengths[i] for i in batch)
        size, rule = len(batch) * longest, "It is the longest that decides, times the number of texts."
        what = f"a batch of {len(batch)} texts, the longest of length {longest}, has {size:,} positions with padding"
        expect(size <= budget, f"{what}; only {budget} fit. {rule}")
    return batches


def _examine_padding(batches: Plan, lengths: list[int], budget: int) -> None:
    padding = 1 - sum(lengths) / positions(batches, lengths)
    how = "Do texts of similar length share a batch? If they are sorted by length, make the chunks larger."
    expect(padding <= 0.2, f"{padding:.1%} of your positions are padding; 20% is allowed. {how}")
    most = math.ceil(1.35 * sum(lengths) / budget) + 5
    full = f"{most} are allowed: fill each up to the budget, which may be reached exactly."
    expect(len(batches) <= most, f"you make {len(batches)} batches; {full}")


def _examine_chance(plans: list[Plan], lengths: list[int]) -> None:
    again = meet_again(*plans)
    same = {frozenset(batch) for batch in plans[0]} == {frozenset(batch) for batch in plans[1]}
    how = "Shuffle before you sort, and never reseed."
    expect(not same, f"the next epoch, from the same generator, has the same batches. {how}")
    how = "Cut shuffled texts into chunks, and sort inside each; smaller chunks mix more."
    expect(again <= 0.3, f"{again:.1%} of the pairs in a batch meet again in the next epoch; 30% is allowed. {how}")
    means = [statistics.fmean(lengths[i] for i in batch) for batch in plans[0]]
    alike = [_correlation(means[:-lag], means[lag:]) for lag in range(1, len(means) // 2)]
    waves = "the lengths of your batches rise and fall in a pattern: shuffle the batches too, at the end."
    expect(max(alike, default=0.0) <= 0.5, waves)
    # and no part of the epoch is left sorted: by chance, 30 batches in a row do that once in 10^8 times
    parts = [abs(_correlation(range(30), means[begin : begin + 30])) for begin in range(len(means) - 29)]
    expect(max(parts, default=0.0) <= 0.85, waves)


def _examine_order(plans: list[Plan], lengths: list[int]) -> None:
    """The order of the batches is drawn anew in each epoch; seen where two epochs have the same number of them."""
    means = [[statistics.fmean(lengths[i] for i in batch) for batch in plan] for plan in plans]
    pairs = [(a, b) for a, b in itertools.combinations(means, 2) if len(a) == len(b)]
    same = any(_correlation(a, b) > 0.9 for a, b in pairs)
    expect(not same, "Short and long batches come in the same order in two epochs: shuffle with `generator`.")


def _correlation(x: Sequence[float], y: Sequence[float]) -> float:
    if len(x) < 30 or len(set(x)) < 2 or len(set(y)) < 2:
        return 0.0
    return statistics.correlation(x, y)


# --- Task 4 ---------------------------------------------------------------------------------------------------------


class _Stage:
    """A loader and a model that watch each other: what began when, without relying on a clock."""

    def __init__(
        self, count: int, depth: int, meet: bool = True, broken: tuple = (), interrupt: tuple = (), busy: bool = False
    ):
        self.count, self.depth, self.meet, self.patience = count, depth, meet, _PATIENCE
        self.broken, self.interrupt, self.busy = broken, interrupt, busy
        self.begun, self.stepped = ([threading.Event() for _ in range(count)] for _ in range(2))
        self.loaded, self.loading, self.trained = [], set(), []
        self.seen, self.ahead, self.loader = set(), [], None
        self.caller, self.step_threads, self.error, self.left = None, set(), None, []
        # None is a batch like any other, and so is an exception
        self.batches = [{1: ValueError("a batch"), 2: None}.get(i, object()) for i in range(count)]

    def _wait(self, event: threading.Event) -> bool:
        met = event.wait(self.patience)
        self.patience = self.patience if met else 0.05  # one that does not come need not be waited for again
        return met

    def load(self, index: int) -> object:
        self.loading.add(index)
        try:
            return self._load(index)
        finally:
            self.loading.discard(index)

    def _load(self, index: int) -> object:
        if not 0 <= index < self.count:
            raise IndexError(f"`load` was called with {index}; there are batches 0 to {self.count - 1}")
        self.loaded.append(index)
        self.loader = threading.get_ident()
        self.begun[index].set()
        if self.broken and index == self.broken[0]:
            raise self.broken[1]
        if self.meet and index and self._wait(self.stepped[index - 1]):
            self.seen.add(("load", index))
        if self.busy and index == self.interrupt[0] + self.depth:
            time.sleep(0.3)  # so that a thread that is not joined, or not for long, is still running
        return self.batches[index]

    def step(self, batch: object) -> None:
        index = len(self.trained)
        self.trained.append(self.batches.index(batch) if batch in self.batches else batch)
        self.step_threads.add(threading.get_ident())
        if index >= self.count or (self.interrupt and index > self.interrupt[0]):
            return
        self.stepped[index].set()
        if self.meet:
            if index + 1 < self.count and self._wait(self.begun[index + 1]):
                self.seen.add(("step", index))
            return
        self._wait(self.begun[min([index + self.depth, self.count - 1, *self.broken[:1]])])
        if self.interrupt and index == self.interrupt[0]:
            time.sleep(0.0 if self.busy else 0.1)  # the thread still loads, or waits for room by now
            raise self.interrupt[1]
        if not self.interrupt:
            time.sleep(0.05)  # time enough to run ahead too far, or for a later load to fail
        self.ahead.append(len(self.loaded) - index - 1)

    def overlaps(self) -> int:
        return sum({("step", i), ("load", i + 1)} <= self.seen for i in range(self.count - 1))


def _play(answer: Callable, stage: _Stage, story: str = "") -> _Stage:
    """Run the learner's loop; whatever it raises is kept, and so are the threads that it leaves behind."""
    before, loading = set(threading.enumerate()), []

    def call() -> None:
        stage.caller = threading.get_ident()
        try:
            answer(stage.load, stage.step, stage.count, stage.depth)
        except BaseException as error:
            stage.error = error
        loading.extend(stage.loading)  # by a thread that was there before, too
        me = threading.current_thread()
        stage.left = [t for t in threading.enumerate() if t not in before and t is not me and t.is_alive()]

    with where(f"With count={stage.count} and depth={stage.depth}{story}"):
        core.side_by_side(call, seconds=_LIMIT)
        end = "In a `finally`, tell it to stop, give it room in case it is waiting for some, and join it."
        expect(not (stage.left or loading), f"a thread of yours still runs after your loop has ended. {end}")
        expect(
            stage.step_threads <= {stage.caller},
            "`step` must run in the thread that called your function, and `load` in a different one.",
        )
    return stage


@check("Task 4, a loop that overlaps", seconds=120)
def train_overlapped(answer: Callable) -> None:
    for (count, depth), meet in itertools.product(((8, 1), (12, 3), (1, 2), (0, 2)), (True, False)):
        stage = _play(answer, _Stage(count, depth, meet))
        with where(f"With count={count} and depth={depth}"):
            if stage.error is not None:
                by_type = any(stage.error is batch for batch in stage.batches)
                how = "A batch may be any object: along with it, hand over whether loading has failed."
                expect(not by_type, f"your loop raised batch 1, which is an exception. {how}")
                raise stage.error
            _examine_loop(stage)
    errors = (("Ctrl-C", KeyboardInterrupt()), ("a ValueError", ValueError("the loss is nan")))
    for (story, error), busy in itertools.product(errors, (False, True)):
        stage = _Stage(8, 2, meet=False, interrupt=(2, error), busy=busy)
        _play(answer, stage, f", when step 2 raises {story}")
        rule = f"{story} during a step must end your loop with that error, but {_ended(stage)}"
        expect(stage.error is error, f"{rule}; do not {'replace' if stage.error else 'swallow'} it.")
        expect(len(stage.trained) == 3, f"step 2 raised {story}, and you called `step` again: stop at once.")
        last = max(stage.loaded)
        on = f"after {story} in step 2 your thread went on loading, up to batch {last}"
        # one more may begin while the loop ends
        expect(last <= 3 + stage.depth, f"{on}: tell it to stop before you give it room.")
    errors = (
        ("a ValueError", 3, ValueError("00003.jpg cannot be decoded")),
        ("an OSError", 7, OSError("00007.jpg is gone")),
    )
    for story, place, broken in errors:
        stage = _Stage(8, 4, meet=False, broken=(place, broken))
        _play(answer, stage, f", when loading batch {place} raises {story}")
        rule = f"Loading batch {place} raises {story} that names its file, but {_ended(stage)}"
        hand = "ready.get().result() raises the loader's error in your loop: let it propagate."
        expect(stage.error is broken, f"{rule}. {hand}")
        good = f"Batches 0 to {place - 1} are good: train on them before you raise the error of batch {place}"
        expect(stage.trained == [*range(place)], f"{good}; trained: {stage.trained}.")


def _ended(stage: _Stage) -> str:
    error = stage.error
    return "your loop ended as if nothing had happened" if error is None else f"your loop raised {error!r}"


def _examine_loop(stage: _Stage) -> None:
    everything, overlaps = list(range(stage.count)), stage.overlaps()
    other = "`None` is a batch like any other." if stage.loaded == [0, 1, 2] else ""
    some = f"of {stage.count} batches, these were loaded: {stage.loaded}. {other}"
    expect(sorted(stage.loaded) == everything, some)
    calls = len(stage.trained)
    expect(calls <= stage.count, f"`step` was called {calls} times for {stage.count} batches.")
    how = "Keep their order; batch 2 was None."
    if any(isinstance(getattr(batch, "__self__", batch), Future) for batch in stage.trained):
        how = "These are not batches yet: call `result()`."
    expect(stage.trained == everything, f"the steps had the batches {stage.trained}. {how}")
    if stage.meet:
        alone = stage.loader in (None, stage.caller)
        begin = "Begin load i + 1 before step i, and wait for it only after that step."
        slot = f"{begin} Give the slot back before the step, if you have slots."
        how = "Begin to load before the step, in another thread." if alone else slot
        few = f"only {overlaps} of {stage.count - 1} steps ran while the next batch was being loaded. {how}"
        expect(overlaps >= stage.count - 1, few)
        return
    room = "Take a slot before you load, and give it back when the trainer takes the batch."
    for index, ahead in enumerate(stage.ahead):
        expect(ahead <= stage.depth, f"the loader ran {ahead} batches ahead; {stage.depth} are allowed. {room}")
        wanted = min(stage.depth, stage.count - 1 - index)
        few = f"by the end of step {index} only {ahead} of {wanted} batches were begun ahead"
        expect(ahead == wanted, f"{few}. Make use of `depth`.")
