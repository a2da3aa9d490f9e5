"""Timing a step, and comparing several variants of it, without fooling yourself.

Times are shown with their spread and stamped with the machine; they never decide whether a test passes.
`torch.utils.benchmark.Timer` times one statement well, but it runs each variant to its end before the next begins,
adds warm-up calls to every sample and sets the threads to one; so the interleaving here is our own.
"""

import gc
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from tqdm.auto import tqdm

from speedlab import machine
from speedlab.display import Table, measured, seconds_text, table

__all__ = ["Comparison", "Ratio", "Timing", "compare", "measured", "time_step"]

# A sample lasts at least this long, so that reading the clock (under a microsecond) is lost in it.
_SAMPLE_SECONDS = 5e-3
_PATIENCE_SECONDS = 5.0
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the median of the samples, the quartiles, and the samples in the order they were taken."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]

    def __repr__(self) -> str:
        return f"{seconds_text(self.median)} ({seconds_text(self.low)} to {seconds_text(self.high)})"


@dataclass(frozen=True)
class Ratio:
    """Baseline time / variant time: the median over pairs, and a confidence interval for that median.

    `confidence` is what the interval really has: with n pairs it rests on order statistics, so few pairs give less.
    """

    median: float
    low: float
    high: float
    confidence: float

    @property
    def differs(self) -> bool:
        return not self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        """`2.1x faster`, `1.3x slower`, or `no difference measured` where the interval holds 1."""
        if not self.differs:
            return "no difference measured"
        factor, word = (self.median, "faster") if self.median > 1 else (1 / self.median, "slower")
        return f"{factor:.2g}x {word}" if factor < 9.95 else f"{factor:.0f}x {word}"


@dataclass(frozen=True)
class Comparison:
    """What `compare` measured: a timing a variant, and its ratio to the baseline, pair by pair.

    `names` holds all variants in the order they were given, also those in `not_run`, with the reason.
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
                rows.append((name, "not run here", "", self.not_run[name]))
                continue
            timing, ratio = self.timings[name], self.ratios.get(name)
            if ratio is None:
                verdict = "baseline"
            else:
                verdict = f"{ratio} ({ratio.low:.2f} to {ratio.high:.2f})"
            spread = f"{seconds_text(timing.low)} to {seconds_text(timing.high)}"
            rows.append((name, seconds_text(timing.median), spread, verdict))
        return table(
            ["variant", f"median time a {self.unit}", "middle half", f"against {self.baseline}"],
            rows,
            measured=True,
        )

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def time_step(step: Callable[[], object], seconds: float = 2.0, min_samples: int = 5) -> Timing:
    """Time one step on its own: warm-up, device synchronisation, median and quartiles.

    `seconds` is the budget; at least `min_samples` samples are taken whatever they cost.
    """
    return compare({"step": step}, seconds=seconds, min_rounds=min_samples).timings["step"]


def compare(
    variants: dict[str, Callable[[], object] | str],
    *,
    seconds: float = 5.0,
    min_rounds: int = 6,
    max_rounds: int = 200,
    unit: str = "step",
) -> Comparison:
    """Time several variants of one step, interleaved (A B A B), and compare each with the first, pair by pair.

    A machine's speed drifts; variants that take turns drift together, so a ratio within one round is worth more than
    the ratio of two medians. Each variant is called once to warm up. `seconds` is the budget over all variants; at
    least `min_rounds` rounds are taken (six pairs are what a 95% interval needs). A sentence in place of a function
    is the reason why this machine leaves that variant out: the table has the same rows everywhere.
    """
    names = tuple(variants)
    not_run = {name: step for name, step in variants.items() if isinstance(step, str)}
    variants = {name: step for name, step in variants.items() if name not in not_run}
    if not variants:
        raise ValueError("There is nothing to compare: give at least one variant, as {'name': function}.")
    if min_rounds < 1 or seconds <= 0:
        raise ValueError(f"min_rounds={min_rounds} and seconds={seconds} must both be positive.")
    clock = machine.synchronised_clock(machine.device())
    repeats = {name: _repeats(step, clock) for name, step in variants.items()}
    samples: dict[str, list[float]] = {name: [] for name in variants}
    begin = clock()
    # in a notebook, tqdm does not look at this variable of its own
    quiet = os.environ.get("TQDM_DISABLE") == "1"
    with tqdm(
        total=max_rounds, delay=_PATIENCE_SECONDS, desc="measuring", leave=False, unit="round", disable=quiet
    ) as bar:
        for done in range(max_rounds):
            if done >= min_rounds and clock() - begin > seconds:
                break
            for name, step in variants.items():
                samples[name].append(_sample(step, repeats[name], clock))
            bar.update()
        bar.total = bar.n  # in a notebook, a bar that ends early stays, in red
    timings = {name: _timing(values) for name, values in samples.items()}
    baseline, *others = variants
    ratios = {name: _ratio([a / b for a, b in zip(samples[baseline], samples[name], strict=True)]) for name in others}
    return Comparison(names, baseline, timings, ratios, not_run, unit)


def _sample(step: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
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
    return max(1, math.ceil(_SAMPLE_SECONDS / max(_sample(step, 1, clock), 1e-7)))


def _timing(samples: list[float]) -> Timing:
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    return Timing(median, low, high, tuple(samples))


def _ratio(pairs: list[float]) -> Ratio:
    """The median of the pairs, with the narrowest symmetric order-statistic interval of at least 95% if there is one.

    The interval from the k-th smallest to the k-th largest of n values holds the true median with probability
    1 - 2·P(Binomial(n, 1/2) < k), whatever their distribution (David and Nagaraja, Order Statistics, section 7.1).
    """
    values, n = sorted(pairs), len(pairs)

    def coverage(k: int) -> float:
        return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n

    k = max((k for k in range(1, n // 2 + 1) if coverage(k) >= _CONFIDENCE), default=1)
    return Ratio(statistics.median(values), values[k - 1], values[n - k], coverage(k))
