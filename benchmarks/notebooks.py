"""Runs every notebook and its claims where there is no Jupyter, each in a process of its own, cell by cell.

IPython's shell runs the cells without a kernel; it needs the packages ipython and ipywidgets, which can be brought as
wheels. A claim that fails, or any other error, ends the notebook and is reported; outputs are not compared. Nothing
is timed here, so several notebooks run side by side where there are enough cores.
"""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import day
from benchmarks.day import Item, Session, first_line
from speedlab import machine
from speedlab.display import CLAIM

ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT = 300
# What every lesson needs besides what the benchmarks need.
_NEEDED = ("IPython", "ipywidgets")


def measured(path: Path, session: Session, rows: list[dict]) -> list[dict]:
    """One row: how many cells ran and how many claims held, and what ended the notebook, if anything did."""
    task = f"notebook {path.parent.name}/{path.stem} on {session.device.type}"
    code = "\n".join("".join(cell["source"]) for cell in code_cells(path))
    wanted = {
        *_NEEDED,
        *re.findall(r"(?m)^\s*(?:import|from) (lightning|ray|sklearn|transformers|matplotlib)\b", code),
    }
    missing = [name for name in sorted(wanted) if importlib.util.find_spec(name) is None]
    if missing:
        return [{"task": task, "not_run": f"{' and '.join(missing)} cannot be imported here"}]
    asked = [sys.executable, "-m", "benchmarks.notebooks", "--child", str(path)]
    # two threads each, as when the pages were recorded
    quiet = {"TQDM_DISABLE": "1", "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2", "MPLBACKEND": "agg"}
    try:
        ended = subprocess.run(asked, cwd=path.parent, env={**os.environ, **quiet}, capture_output=True, text=True,
                               timeout=_TIMEOUT)  # fmt: skip
    except subprocess.TimeoutExpired:
        return [{"task": task, "not_run": f"it had not ended after {_TIMEOUT} s, and was stopped"}]
    answers = [line for line in ended.stdout.splitlines() if line.startswith('{"cells": ')]
    if not answers:
        raise RuntimeError((ended.stderr.strip().splitlines() or ["the process ended without a word"])[-1])
    row = {"task": task, "notebook": path.relative_to(ROOT).as_posix(), **json.loads(answers[-1])}
    fails = f"; cell {row['cells'] + 1} failed with {row['error']}" if row["error"] else ""
    return [{**row, "found": f"{row['cells']} of {row['of']} cells ran, {row['claims']} claims held{fails}"}]


def code_cells(path: Path) -> list[dict]:
    """The code cells of a notebook that are not empty."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]


def execute(path: Path) -> dict:
    """In a process of its own: run the cells in order until one fails; count those that ran and claims that held."""
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell

    claims = []

    class Publisher(DisplayPublisher):
        def publish(self, data, *arguments, **named):
            if CLAIM in data:
                claims.append(data[CLAIM])
            print(data.get("text/plain", ""))

    InteractiveShell.display_pub_class.default_value = InteractiveShell.display_pub_class.klass = Publisher
    shell = InteractiveShell.instance()
    cells = code_cells(path)
    found = {"cells": 0, "of": len(cells), "claims": 0, "error": ""}
    for cell in cells:
        answer = shell.run_cell("".join(cell["source"]), store_history=True)
        error = answer.error_before_exec or answer.error_in_exec
        found["claims"] = len(claims)
        if error:
            return {**found, "error": f"{type(error).__name__}: {first_line(error)}"}
        found["cells"] += 1
    return found


def together(paths: list[Path], session: Session, rows: list[dict]) -> list[dict]:
    """The rows of notebooks that run at the same time; one that breaks does not affect the others."""

    def row(path: Path) -> list[dict]:
        try:
            return measured(path, session, rows)
        except RuntimeError as error:
            task = f"notebook {path.parent.name}/{path.stem} on {session.device.type}"
            return [{"task": task, "not_run": f"it failed with {first_line(error)}"}]

    with ThreadPoolExecutor(len(paths)) as pool:
        return [found for one in pool.map(row, paths) for found in one]


def find_all() -> list[Path]:
    """The paths of the lessons in order, then those of the solutions."""
    found = [path for folder in ("code-units", "solutions") for path in sorted((ROOT / folder).rglob("*.ipynb"))]
    return [path for path in found if ".ipynb_checkpoints" not in path.parts]


def recorded_seconds(path: Path) -> float:
    """Seconds that the notebook took when its page was recorded (60 if unknown), raised to 20 if it took less."""
    stored = json.loads(path.read_text(encoding="utf-8"))["metadata"].get("recorded", {})
    return max(20, stored.get("seconds", 60))


def items(session: Session) -> Iterator[Item]:
    """An item per group of notebooks that run side by side, or with few cores one by one, in the lessons' order."""
    seconds = {path: recorded_seconds(path) for path in find_all()}
    beside = max(1, machine.cores() - 2)
    order = sorted(seconds, key=seconds.get, reverse=True) if beside > 1 else list(seconds)
    for at in range(0, len(order), beside):
        first, *others = group = order[at : at + beside]
        name = first.relative_to(ROOT).as_posix() + (f" and {len(others)} more" if others else "")
        # side by side, some run until their timeout
        yield Item(name, seconds[first] if beside == 1 else _TIMEOUT, functools.partial(together, group, session))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        answer = execute(Path(sys.argv[2]))
        print(json.dumps(answer), flush=True)
        os._exit(0)  # a lesson may have left threads behind
    sys.exit(day.main({"notebooks": items}, __doc__))
