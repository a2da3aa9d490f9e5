"""Prepare a lesson for a class, and open it: a rehearsal, a live copy without outputs, and slides.

Usage: python tools/present.py 9.1.1 [--prepare | --restore]
--prepare opens nothing; --restore only puts the live copy back, between two demos. Everything goes to build/present:
no original file changes.
"""

import argparse
import contextlib
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import webbrowser
from datetime import datetime
from pathlib import Path

import extras
import nbformat
import slides
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from notebooks import KERNEL, QUIET, ROOT, find, number

PRESENT = ROOT / "build" / "present"


def lesson(named: str) -> Path:
    """The path of the notebook with a number such as 9.1.1 or capstone.1."""
    for path in find([str(ROOT / "code-units")]):
        if named == number(path):
            return path
    sys.exit(f"There is no lesson {named!r}: give a unit's and a notebook's number, as in make present UNIT=9.1.1.")


def copied(path: Path, home: Path, anew: bool = True) -> Path:
    """Copy what the lesson reads and links to into `home`; return the folder for its live copy.

    Unless it is made `anew`, only files are overwritten: a kernel may be running in the folder.
    """
    for name in ("code-units", "images", "results", "exercises") if anew else ():
        shutil.rmtree(home / name, ignore_errors=True)
    left_out = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "*.ipynb")
    copy = functools.partial(shutil.copytree, dirs_exist_ok=True)
    for name in ("images", "results"):
        copy(ROOT / name, home / name)
    copy(ROOT / "exercises", home / "exercises", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    unit = home / path.parent.relative_to(ROOT)
    copy(path.parent, unit, ignore=left_out)
    return unit


def rehearse(path: Path, folder: Path) -> list[dict]:
    """Run the lesson once to fill the caches; return the number, id and seconds of each code cell that ran.

    What fails is told: better now than before the class.
    """
    os.environ.update(QUIET)
    notebook = nbformat.read(path, as_version=4)
    try:
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}, **KERNEL).execute()
    except CellExecutionError as error:
        failed = next(c for c in notebook.cells if any(o.output_type == "error" for o in c.get("outputs", ())))
        print(f"The rehearsal stops at cell {failed.execution_count}: {error.ename}: {error.evalue}")
    seconds = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and "shell.execute_reply" in cell.metadata.get("execution", {}):
            clock = {key: datetime.fromisoformat(value) for key, value in cell.metadata.execution.items()}
            took = clock["shell.execute_reply"] - clock["iopub.status.busy"]
            seconds.append({"cell": cell.execution_count, "id": cell.id, "seconds": round(took.total_seconds(), 2)})
    return seconds


def live(path: Path, folder: Path) -> Path:
    """Write the live copy without outputs, with conclusions and revealing claims folded; return its path."""
    notebook = nbformat.read(path, as_version=4)
    cells, asked = [], False
    for kind, source, _ in slides.pieces(notebook):
        heading, _, body = source.partition("\n")
        asked = slides.is_asked(asked, kind, source)
        if kind == "code":
            hidden = {"jupyter": {"source_hidden": True}} if asked and slides.without_answers(source)[1] else {}
            cells.append(nbformat.v4.new_code_cell(source, metadata=hidden))
        elif kind == "answer":
            cells.append(nbformat.v4.new_markdown_cell(folded("What came out", source)))
        elif kind == "closing" and heading.startswith("## "):
            cells.append(nbformat.v4.new_markdown_cell(f"{heading}\n\n{folded('Show', body.strip())}"))
        else:
            cells.append(nbformat.v4.new_markdown_cell(source))
    target = folder / path.name
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": notebook.metadata.kernelspec}), target
    )
    return target


def folded(summary: str, text: str) -> str:
    """Markdown that is folded until a click."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def serve(folder: Path) -> str:
    """Serve a folder to this machine only, as long as this process runs; return its URL."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare a lesson for a class, and open it.")
    parser.add_argument("number", nargs="?", default="", help="the lesson's number, such as 9.1.1")
    parser.add_argument("--prepare", action="store_true", help="open nothing")
    parser.add_argument("--restore", action="store_true", help="only restore the live copy")
    given = parser.parse_args()
    path = lesson(given.number)
    home = PRESENT / given.number
    folder = copied(path, home, anew=not given.restore)
    if not given.restore:
        extras.need()
        print("Rehearsing: the lesson runs once, so that the class waits less.", flush=True)
        seconds = rehearse(path, folder)
        (home / "seconds.json").write_text(json.dumps({"lesson": given.number, "cells": seconds}, indent=1))
        slides.write(path, home / "slides", {row["id"]: row["seconds"] for row in seconds})
        print(f"{sum(row['seconds'] for row in seconds):.0f} s for {len(seconds)} cells; the slowest:")
        for row in sorted(seconds, key=lambda row: -row["seconds"])[:3]:
            print(f"  cell {row['cell']}: {row['seconds']:.1f} s")
    copy = Path(os.path.relpath(live(path, folder), ROOT)).as_posix()
    print(f"The live copy is {copy}; your own files are unchanged.")
    if given.restore:
        print("If it is open, reload it (File, Reload Notebook from Disk) and restart its kernel.")
    if given.prepare or given.restore:
        return
    address = serve(home / "slides")
    print(f"The slides are at {address} while this runs; press S for the speaker view.", flush=True)
    webbrowser.open(address)
    lab = [sys.executable, "-m", "jupyterlab", "--config=tools/lab/config.py"]
    with subprocess.Popen([*lab, f"--LabApp.default_url=/lab/tree/{copy}"], cwd=ROOT) as running:
        while running.poll() is None:
            with contextlib.suppress(KeyboardInterrupt):  # JupyterLab gets it, too, and asks before it ends
                running.wait()
    sys.exit(running.returncode)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped.")
