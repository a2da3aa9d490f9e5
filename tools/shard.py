"""Print the test files of one of several parts, which take about equally long, for machines that share the work.

Usage: python tools/shard.py 1/4     (prints paths, as in python tools/course.py test $(python tools/shard.py 1/4))
"""

import functools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Assumed seconds of a test file, and of a notebook whose time was not recorded.
_USUAL = 30


@functools.cache
def files() -> dict[str, int]:
    """The path of every test file and every notebook, with the seconds that it takes."""
    found = list((ROOT / "tests").rglob("test_*.py"))
    for folder in ("code-units", "exercises", "solutions"):
        found += [path for path in (ROOT / folder).rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts]
    return {path.relative_to(ROOT).as_posix(): seconds(path) for path in found}


def seconds(path: Path) -> int:
    """The seconds a notebook took when it was recorded; for a test file, a guess, since few of them take long."""
    if path.suffix != ".ipynb":
        return _USUAL
    return json.loads(path.read_text(encoding="utf-8"))["metadata"].get("recorded", {}).get("seconds", _USUAL)


def shard(number: int, parts: int) -> list[str]:
    """The files of part `number` (from 1): the longest are assigned first, each to the part with the least to do."""
    loads, shares = [0] * parts, [[] for _ in range(parts)]
    for name, time in sorted(files().items(), key=lambda item: (-item[1], item[0])):
        least = loads.index(min(loads))
        loads[least] += time
        shares[least].append(name)
    return sorted(shares[number - 1])


if __name__ == "__main__":
    try:
        number, parts = (int(part) for part in sys.argv[1].split("/"))
        assert 1 <= number <= parts
    except (AssertionError, IndexError, ValueError):
        sys.exit(__doc__)
    print("\n".join(shard(number, parts)))
