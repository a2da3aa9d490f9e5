"""Run notebooks again and store their outputs, keeping an old output where only measured values changed.

A refresh without a change of code is an empty diff. From the first code cell that has changed on, outputs are
stored anew: a measured value below it may be what the old code measured.
Usage: python tools/refresh.py [--all | notebook or folder ...]
Without arguments, the notebooks that git sees as changed, and those with a cell that was never run, are refreshed.
"""

import copy
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import readme
from notebooks import ROOT, execute, find, keep_outputs, write
from tqdm import tqdm


def refresh(path: Path) -> tuple[bool, int]:
    """Re-execute one notebook in place; return whether its file changed, and how many outputs were kept."""
    old = nbformat.read(path, as_version=4)
    new = execute(copy.deepcopy(old), path.parent)
    kept = keep_outputs(old, new)
    return write(new, path), kept


def changed() -> list[Path]:
    """Notebooks that differ from the last commit, or that hold a code cell without a count."""
    asked = subprocess.run(
        ["git", "-c", "core.quotepath=off", "status", "--porcelain", "--untracked-files=all", "--", "*.ipynb"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    names = {line[3:].split(" -> ")[-1].strip('"') for line in asked.stdout.splitlines()}
    return [p for p in find() if p.relative_to(ROOT).as_posix() in names or _has_unrun_cells(p)]


def _has_unrun_cells(path: Path) -> bool:
    cells = nbformat.read(path, as_version=4).cells
    return any(c.cell_type == "code" and c.source.strip() and c.execution_count is None for c in cells)


def main() -> None:
    names = sys.argv[1:]
    paths = find() if names == ["--all"] else find(names) if names else changed()
    if not paths:
        print("No notebook has changed. Name one, or give --all.")
    with tqdm(paths, unit="notebook", disable=False) as bar:
        for path in bar:
            bar.set_postfix_str(path.stem)
            start = time.perf_counter()
            differs, kept = refresh(path)
            seconds = time.perf_counter() - start
            state = "changed" if differs else "same   "
            bar.write(f"{state} {seconds:5.0f} s  {kept:3d} outputs kept  {path.relative_to(ROOT)}")
    readme.update()


if __name__ == "__main__":
    main()
