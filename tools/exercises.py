"""Make exercises/ from solutions/: each solution is turned into a stub, run, and written under the same name.

Lines between `# BEGIN SOLUTION` and `# END SOLUTION` become a stub; cells tagged `solution` are left out.
Usage: python tools/exercises.py [--check | solution ...]   (--check writes nothing and fails if exercises/ is stale)
"""

import copy
import re
import sys
from pathlib import Path

import nbformat
from notebooks import RECORDED, ROOT, execute, find, keep_outputs, write

BLOCK = re.compile(r"^([ \t]*)# BEGIN SOLUTION[^\n]*\n.*?^[ \t]*# END SOLUTION[^\n]*$", re.M | re.S)
STUB = r"\1# Your code here.\n\1raise NotImplementedError"


def stub(solution: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The exercise that belongs to a solution, not run yet. ValueError if the solution has no marked block."""
    exercise = copy.deepcopy(solution)
    exercise.metadata.pop(RECORDED, None)
    exercise.cells = [cell for cell in exercise.cells if "solution" not in cell.metadata.get("tags", [])]
    blocks = 0
    for cell in exercise.cells:
        if cell.cell_type == "code":
            cell.source, found = BLOCK.subn(STUB, cell.source)
            blocks += found
            cell.outputs, cell.execution_count = [], None
    if not blocks:
        raise ValueError("The solution has no block from '# BEGIN SOLUTION' to '# END SOLUTION': mark what to write.")
    return exercise


def content(notebook: nbformat.NotebookNode) -> list[tuple]:
    """What must be the same in an exercise and its solution's stub: the cells' ids, types, sources and tags."""
    return [(c.id, c.cell_type, c.source, tuple(c.metadata.get("tags", []))) for c in notebook.cells]


def stale() -> list[str]:
    """The names of exercises that are missing, have no solution, or differ from the stub of their solution."""
    solutions = {path.name: path for path in sorted((ROOT / "solutions").glob("*.ipynb"))}
    exercises = {path.name: path for path in sorted((ROOT / "exercises").glob("*.ipynb"))}
    wrong = sorted(solutions.keys() ^ exercises.keys())
    for name in sorted(solutions.keys() & exercises.keys()):
        wanted = content(stub(nbformat.read(solutions[name], as_version=4)))
        if content(nbformat.read(exercises[name], as_version=4)) != wanted:
            wrong.append(name)
    return wrong


def make(paths: list[Path]) -> None:
    """Make, run and write the exercises of these solutions; old outputs stay where only measured values changed."""
    for path in paths:
        target = ROOT / "exercises" / path.name
        new = execute(stub(nbformat.read(path, as_version=4)), target.parent)
        if target.exists():
            old = nbformat.read(target, as_version=4)
            keep_outputs(old, new, quiet=False)
            new.metadata.update({RECORDED: old.metadata[RECORDED]} if RECORDED in old.metadata else {})
        print("changed" if write(new, target) else "same   ", target.relative_to(ROOT))


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        if names := stale():
            raise SystemExit(f"Stale in exercises/: {', '.join(names)}. Run `make exercises`.")
    else:
        make(find(sys.argv[1:] or ["solutions"]))


if __name__ == "__main__":
    main()
