"""What torch.compile costs and saves on a GELU written out by hand: cold and warm start, step times.

The step is that of unit 9.4, in processes of their own: one with an empty cache, then one with the cache which the
first one left. Usage: python -m benchmarks.compile [--seconds 10] [--out FILE]
"""

import argparse
import runpy
import sys
import tempfile
from pathlib import Path

import psutil

from speedlab import compat, machine
from speedlab.display import seconds_text
from speedlab.results import FOLDER, record

SCRIPT = FOLDER.parent / "code-units" / "9.4-compile" / "cold_start.py"


def row(seconds: float) -> dict:
    """The bill of this machine: seconds of a cold and of a warm start, of a step, and the steps that pay for them."""
    lesson = runpy.run_path(str(SCRIPT))
    with tempfile.TemporaryDirectory(prefix="speedlab-", ignore_cleanup_errors=True) as cache:
        cold, warm = (lesson["run"](cache, seconds, timeout=110 + 10 * seconds) for _ in range(2))
    saved = warm["eager_s"] - warm["compiled_s"]
    return {
        "workload": "GELU written out by hand, forward and backward",
        "elements": lesson["elements"](),
        "compiler": compat.compiler(),
        "cold_s": cold["first_s"],
        "warm_s": warm["first_s"],
        "eager_s": warm["eager_s"],
        "compiled_s": warm["compiled_s"],
        "break_even_steps": cold["first_s"] / saved if saved > 0 else None,
        "break_even_steps_warm": warm["first_s"] / saved if saved > 0 else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="budget for the step times of a process")
    parser.add_argument("--out", type=Path, help="the results file (default: results/<machine>.json)")
    options = parser.parse_args()
    if compat.compiler() is None:
        print(f"There is nothing to measure: torch.compile finds {compat.NO_COMPILER}.", file=sys.stderr)
        return 2
    load = psutil.getloadavg()[0]
    print(machine.describe())
    found = row(options.seconds)
    for key in ("cold_s", "warm_s", "eager_s", "compiled_s"):
        print(f"{key.removesuffix('_s')}: {seconds_text(found[key])}")
    print("written to", record("compile", [found], options.out, load))
    return 0


if __name__ == "__main__":
    sys.exit(main())
