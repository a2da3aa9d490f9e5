"""Timing a step, and comparing several variants of it, without fooling yourself.

Times are shown with their spread and stamped with the machine; they never decide whether a test passes.
`torch.utils.benchmark.Timer` times one statement well, but it runs each variant to its end before the next begins
and sets the number of threads to one; so the interleaving here is our own.
"""

import gc
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tqdm.auto import tqdm

from speedlab import machine
from speedlab.display import Table, Tabular, seconds_text, table

# A sample lasts at least this long, so that reading the clock (under a microsecond) is lost in it.
_SAMPLE_SECONDS = 5e-3
_PATIENCE_SECONDS = 5.0
_CONFIDENCE, _LEAST_CONFIDENCE = 0.95, 0.9
# With five pairs even the widest interval, from the smallest to the largest, has a confidence of only 94%.
_FEWEST = 6
# Two variants whose interval lies this close to 1 are the same for every purpose of this course.
_SAME = 0.05


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median of the samples, the quartiles, and the samples in the order they were taken."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]

    def __repr__(self) -> str:
        return f"{seconds_text(self.median)} ({seconds_text(self.low)} to {seconds_text(self.high)})"


@dataclass(frozen=True)
class Ratio:
    """Baseline time / variant time: the median over pairs, and an interval that holds the true median.

    `confidence` is the probability that it does, over all the looks that `compare` took.
    """

    median: float
    low: float
    high: float
    confidence: float

    @property
    def verdict(self) -> str:
        """`same` if the interval is within 5% of 1, else `faster` or `slower` if it excludes 1, else `noisy`."""
        sure = self.confidence >= _LEAST_CONFIDENCE
        if sure and self.low >= 1 / (1 + _SAME) and self.high <= 1 + _SAME:
            return "same"
        return "faster" if sure and self.low > 1 else "slower" if sure and self.high < 1 else "noisy"

    def __str__(self) -> str:
        """`2.1x faster (1.92x to 2.3x)`, `1.32x slower (…)`, `the same within 5%` or `too noisy to tell (…)`."""
        if self.verdict == "same":
            return f"the same within {_SAME:.0%}"
        if self.verdict == "noisy":
            return f"too noisy to tell ({_factor(self.low)} to {_factor(self.high)})"
        values = (self.median, self.low, self.high)
        median, low, high = values if self.verdict == "faster" else (1 / self.median, 1 / self.high, 1 / self.low)
        return f"{_factor(median)} {self.verdict} ({_factor(low)} to {_factor(high)})"


@dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """What `compare` measured: one timing per variant, and its ratio to the baseline, pair by pair.

    `names` holds all variants in the order they were given, including those in `not_run`, which gives the reasons.
    """

    names: tuple[str, ...]
    baseline: str
    timings: dict[str, Timing]
    ratios: dict[str, Ratio]
    not_run: dict[str, str]
    unit: str = "step"

    def table(self) -> Table:
        rows = []
        for name in self.names:
            if name in self.not_run:
                rows.append((name, f"not run here: {self.not_run[name]}", "", ""))
                continue
            timing = self.timings[name]
            spread = f"{seconds_text(timing.low)} to {seconds_text(timing.high)}"
            rows.append((name, seconds_text(timing.median), spread, self.ratios.get(name, "baseline")))
        columns = ["variant", f"median time per {self.unit}", "middle half", f"against {self.baseline}"]
        return table(columns, rows, measured=True)


def time_step(step: Callable[[], object], seconds: float = 2.0, min_samples: int = 5) -> Timing:
    """Time one step, warmed up, for `seconds` or 200 samples, and `min_samples` at least: median and quartiles."""
    rounds = {"min_rounds": min_samples, "max_rounds": max(200, min_samples)}
    return compare({"step": step}, seconds=seconds, **rounds).timings["step"]


def compare(
    variants: dict[str, Callable[[], object] | str],
    *,
    seconds: float = 5.0,
    min_rounds: int = 6,
    max_rounds: int = 200,
    unit: str = "step",
) -> Comparison:
    """Time several variants of one step, interleaved (A B B A), and compare each with the first, pair by pair.

    A machine's speed drifts; variants that take turns drift together, so a ratio within one round is worth more than
    the ratio of two medians. Every other round runs in reverse order: on a machine that slows down, what always came
    later would look slower than it is. Each variant is called twice to warm up. After `min_rounds` rounds, and each
    time their number has doubled, the ratios are looked at: sampling ends once each is clearly faster, slower or the
    same within 5%, or when `seconds`, the budget over all variants, is spent (SPEEDLAB_SECONDS in the environment
    lowers it, and lets any round be the last). A sentence in place of a function says why a variant is not run here.
    """
    names = tuple(variants)
    not_run = {name: step for name, step in variants.items() if isinstance(step, str)}
    variants = {name: step for name, step in variants.items() if name not in not_run}
    if not variants:
        raise ValueError("There is nothing to compare: give at least one variant, as {'name': function}.")
    if min(min_rounds, max_rounds) < 1 or seconds <= 0:
        raise ValueError(f"{min_rounds} and {max_rounds} rounds and seconds={seconds} must all be positive.")
    if len(names) > 1 and min(min_rounds, max_rounds) < _FEWEST:
        raise ValueError(f"A 95% interval needs {_FEWEST} rounds at least; raise min_rounds and max_rounds to that.")
    brief = os.environ.get("SPEEDLAB_SECONDS")
    seconds, fewest = min(seconds, float(brief or "inf")), 1 if brief else min_rounds
    clock = machine.synchronised_clock(machine.device())
    repeats = {name: _repeats(step, clock) for name, step in variants.items()}
    samples: dict[str, list[float]] = {name: [] for name in variants}
    ratios: dict[str, Ratio] = {}
    begin, looks, next_look = clock(), 0, min_rounds
    # in a notebook, tqdm does not look at this variable by itself
    quiet = os.environ.get("TQDM_DISABLE") == "1"
    shown = {"delay": _PATIENCE_SECONDS, "desc": "measuring", "leave": False, "unit": "round", "disable": quiet}
    with tqdm(total=max_rounds, **shown) as bar:
        for done in range(1, max_rounds + 1):
            for name, step in list(variants.items())[:: 1 if done % 2 else -1]:
                samples[name].append(sample(step, repeats[name], clock))
            bar.update()
            spent = done == max_rounds or (done >= fewest and clock() - begin > seconds)
            if done == next_look or spent:
                ratios, looks, next_look = _look(samples, looks), looks + 1, 2 * next_look
                if spent or (ratios and all(ratio.verdict != "noisy" for ratio in ratios.values())):
                    break
        bar.total = bar.n  # in a notebook, a bar that ends early stays, in red
    timings = {name: _timing(values) for name, values in samples.items()}
    return Comparison(names, next(iter(variants)), timings, ratios, not_run, unit)


def ratio(pairs: Sequence[float], confidence: float = _CONFIDENCE) -> Ratio:
    """The median of paired ratios, with the narrowest symmetric order-statistic interval of this confidence.

    The interval from the k-th smallest to the k-th largest of n values holds the true median with probability
    1 - 2·P(Binomial(n, 1/2) < k), whatever their distribution (David and Nagaraja, Order Statistics, section 7.1).
    With few pairs the widest interval may have less confidence; `Ratio.confidence` is what it really has.
    """
    values, n = sorted(pairs), len(pairs)

    def coverage(k: int) -> float:
        return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n

    k = max((k for k in range(1, n // 2 + 1) if coverage(k) >= confidence), default=1)
    return Ratio(statistics.median(values), values[k - 1], values[n - k], coverage(k))


def _look(samples: dict[str, list[float]], looks: int) -> dict[str, Ratio]:
    """The ratios to the first variant, after `looks` earlier looks.

    Looking again and again finds a difference sooner or later where there is none, so the looks share the 5%: the
    first takes what six pairs cost (2/2⁶), each later one half of what is left (alpha spending, Lan and DeMets 1983).
    """
    first = 2 / 2**_FEWEST
    left = 1 - _CONFIDENCE - first
    error = left / 2**looks if looks else first
    spent = first + left * (1 - 1 / 2**looks) if looks else first
    baseline, *others = samples
    pairs = {name: [a / b for a, b in zip(samples[baseline], samples[name], strict=True)] for name in others}
    found = {name: ratio(values, 1 - error) for name, values in pairs.items()}
    return {name: replace(one, confidence=min(one.confidence, 1 - spent)) for name, one in found.items()}


def _factor(value: float) -> str:
    # near 1, two digits would hide what the verdict says
    return f"{value:.2f}x" if value < 1.995 else f"{value:.2g}x" if value < 9.95 else f"{value:.0f}x"


def sample(step: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    """Seconds per call, averaged over `repeats` calls, by a clock that waits for the device."""
    # a collection in the middle of one sample would be charged to that variant alone
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = clock()
        for _ in range(repeats):
            step()
        return (clock() - start) / repeats
    finally:
        if collecting:
            gc.enable()


def _repeats(step: Callable[[], object], clock: Callable[[], float]) -> int:
    step()
    return max(1, math.ceil(_SAMPLE_SECONDS / max(sample(step, 1, clock), 1e-7)))


def _timing(samples: list[float]) -> Timing:
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    return Timing(median, low, high, tuple(samples))
