"""The command line: python -m speedlab.diagnose my_training.py:build; --help lists its options."""

import argparse
import re
import sys
from pathlib import Path

from speedlab.diagnose import DiagnoseError, diagnose, load


def size(said: str) -> int:
    """Bytes in `16GiB`, `800MB` or `1e9`."""
    found = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([KMGT]?)(i?)B?", said.strip(), re.I)
    if not found:
        raise argparse.ArgumentTypeError(f"{said!r} is not a size; write one like 16GiB or 800MB")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" KMGT".index(prefix.upper() or " ")))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m speedlab.diagnose", description="Say what bounds a training step."
    )
    parser.add_argument("place", metavar="file.py:function", help="a function without arguments that returns a Job")
    parser.add_argument("--minutes", type=float, default=3.0, help="minutes for timing, in total (default: 3)")
    parser.add_argument("--memory", type=size, help="the memory limit for the peak, such as 16GiB")
    parser.add_argument("--steps", type=int, help="the number of steps you plan, to say how long they take")
    parser.add_argument("--climb", action="store_true", help="apply the advice to copies, prove and time each change")
    parser.add_argument("--out", type=Path, help="write a report to this file: .html or .json")
    given = parser.parse_args(arguments)
    if not 0 <= given.minutes < float("inf") or (given.steps is not None and given.steps < 1):
        parser.error("--minutes must be 0 or more, and finite; --steps must be 1 or more")
    if given.out and given.out.is_dir():
        parser.error(f"{given.out} is a folder; name a file in it, .html or .json")
    if given.out and not given.out.parent.is_dir():
        parser.error(f"there is no folder {given.out.parent} to write {given.out.name} into")
    try:
        job, seconds = load(given.place), 60 * given.minutes
        found = diagnose(job, memory=given.memory, seconds=seconds, climbing=given.climb, steps=given.steps)
    except DiagnoseError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped; nothing of yours was changed.", file=sys.stderr)
        return 130
    print(found.text())
    if given.out:
        given.out.write_text(found.json() if given.out.suffix == ".json" else found.html(), encoding="utf-8")
        print(f"Written to {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
