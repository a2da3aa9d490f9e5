"""What `measure.compare` itself adds to a step of one millisecond. Usage: python -m benchmarks.overhead [--out FILE]

The step spins until a millisecond of the clock has passed, so its true cost is known; what the comparison reports
beyond the same loop without it is its own cost.
"""

import argparse
import statistics
import time
from pathlib import Path

import psutil

from speedlab import measure
from speedlab.results import record

STEP_SECONDS = 1e-3


def spin() -> None:
    end = time.perf_counter() + STEP_SECONDS
    while time.perf_counter() < end:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the results file (default: results/<machine>.json)")
    options = parser.parse_args()
    load = psutil.getloadavg()[0]
    reported, plain = [], []
    for _ in range(20):
        reported.append(measure.time_step(spin, seconds=0.5).median)
        start = time.perf_counter()
        for _ in range(100):
            spin()
        plain.append((time.perf_counter() - start) / 100)
    shares = [(r - p) / STEP_SECONDS for r, p in zip(reported, plain, strict=True)]
    share = statistics.median(shares)
    spread = f"from {min(shares):.3%} to {max(shares):.3%}"
    print(f"measuring a step of 1 ms costs {share:.3%} of it ({spread})")
    row = {"step_s": STEP_SECONDS, "share": share, "low": min(shares), "high": max(shares)}
    print("written to", record("overhead", [row], options.out, load))


if __name__ == "__main__":
    main()
