"""Run every code cell of lessons twice, as a reader does who types another guess; name the cells that mind.

The second run may not fail, and by the rules of the test it shows what the first showed. With --from-the-top, all
cells run again after the last one, in the same kernel, instead of each cell right after itself.
Usage: python tools/again.py [--from-the-top] [notebook, folder, 9.1 or 9.1.1 ...]
"""

import argparse
import os
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell
from notebooks import BRIEF, ROOT, execute, find, same_outputs
from tqdm import tqdm


def run_twice(notebook: nbformat.NotebookNode, folder: Path, *, from_the_top: bool = False) -> list[str]:
    """Run a notebook's code cells twice in one kernel; return a line for each whose second run is not like its first.

    Cells are numbered from 1, code cells only. `folder` is where the kernel runs.
    """
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    first, second = ([new_code_cell(source) for source in sources] for _ in range(2))
    paired = [cell for pair in zip(first, second, strict=True) for cell in pair]
    doubled = nbformat.v4.new_notebook(cells=[*first, *second] if from_the_top else paired)
    execute(doubled, folder, allow_errors=True)
    lines = []
    for number, (one, two) in enumerate(zip(first, second, strict=True), start=1):
        failed = [output for output in (*one.outputs, *two.outputs) if output.output_type == "error"]
        if failed:
            lines.append(f"cell {number}: {failed[0].ename}: {failed[0].evalue}")
        elif not same_outputs(one.outputs, two.outputs):
            lines.append(f"cell {number}: the second run shows something else")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Run every code cell of lessons twice.")
    parser.add_argument(
        "names",
        nargs="*",
        default=["code-units"],
        help="notebooks, folders or numbers such as 9.1.1 (default: code-units)",
    )
    parser.add_argument("--from-the-top", action="store_true", help="all cells, then all cells again")
    args = parser.parse_args()
    os.environ.update(BRIEF)
    paths, found = find(args.names), 0
    for path in (bar := tqdm(paths, unit="notebook")):
        bar.set_postfix_str(path.stem)
        for line in run_twice(nbformat.read(path, as_version=4), path.parent, from_the_top=args.from_the_top):
            found += 1
            tqdm.write(f"{path.relative_to(ROOT).as_posix()}, {line}")
    if found:
        raise SystemExit(f"{found} cells cannot be run again.")
    print(f"Every code cell of {len(paths)} notebooks can be run again.")


if __name__ == "__main__":
    main()
