"""Run only what a change may have touched: notebooks whose code or local files are not those that made their outputs,
notebooks and tests that git sees as changed, and tests of changed modules.

`make test` is the proof; this is for use between edits. Usage: python tools/check.py [--since REF] [pytest arguments]
"""

import argparse
import subprocess
import sys
from pathlib import Path

from notebooks import ROOT, find, is_stale, used_by

# These tests read every text and notebook, and take only seconds.
_ALWAYS = ("tests/test_documents.py", "tests/test_claims_can_fail.py")


def changed_files(since: str) -> set[Path]:
    """The paths of the files that differ from a commit, untracked files included."""
    asked = (["git", "diff", "--name-only", since], ["git", "ls-files", "--others", "--exclude-standard"])
    lines: list[str] = []
    for command in asked:
        told = ["git", "-c", "core.quotepath=off", *command[1:]]
        lines += subprocess.check_output(told, cwd=ROOT, text=True, timeout=60).splitlines()
    return {ROOT / line for line in lines}


def touched(since: str) -> list[str]:
    """The paths, relative to the project's root, of the notebooks and test files to run."""
    changed = changed_files(since)
    notebooks = [path for path in find() if path in changed or is_stale(path)]
    tests = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if {path, *used_by([path.read_text(encoding="utf-8")], path.parent)} & changed
    ]
    names = [path.relative_to(ROOT).as_posix() for path in (*notebooks, *tests)]
    return [*names, *(name for name in _ALWAYS if name not in names)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run only the notebooks and tests that a change may affect.")
    parser.add_argument("--since", default="HEAD", help="the commit to compare with (HEAD)")
    given, rest = parser.parse_known_args()
    names = touched(given.since)
    print(f"{len(names)} files to run:", *names, sep="\n  ", flush=True)
    raise SystemExit(subprocess.run([sys.executable, "-m", "pytest", "--nbval", *rest, *names], cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
