"""What `measure.compare` itself adds to a step of one millisecond.

The step spins until a millisecond of the clock has passed, so its true cost is known; what the comparison reports
beyond a plain loop over the same step is its own cost.
"""

import statistics
import sys
import time
from collections.abc import Iterator

from benchmarks import day
from benchmarks.day import Item, Session
from speedlab import measure

STEP_SECONDS = 1e-3


def spin() -> None:
    end = time.perf_counter() + STEP_SECONDS
    while time.perf_counter() < end:
        pass


def measured(session: Session) -> list[dict]:
    """One row: the share of the step that measuring costs, and its range over repeats."""
    shares = []
    for _ in range(2 if session.tiny else 20):
        reported = measure.time_step(spin, seconds=0.01 if session.tiny else 0.5).median
        start = time.perf_counter()
        for _ in range(100):
            spin()
        shares.append((reported - (time.perf_counter() - start) / 100) / STEP_SECONDS)
    share, low, high = statistics.median(shares), min(shares), max(shares)
    found = f"measuring costs {share:.3%} of the step (from {low:.3%} to {high:.3%})"
    return [{"task": "timing a step of 1 ms", "found": found, "step_s": STEP_SECONDS, "share": share, "low": low,
             "high": high}]  # fmt: skip


def items(session: Session) -> Iterator[Item]:
    yield Item("a step of 1 ms", 15, lambda rows: measured(session))


if __name__ == "__main__":
    sys.exit(day.main({"overhead": items}, __doc__))
