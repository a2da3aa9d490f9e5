"""What the notebook tests and the maintainers' tools share: finding notebooks, executing them, comparing outputs.

Two outputs are equal if they differ only in measured values (blanked, if they are values), or by one unit in the last
printed place of decimal numbers with at least three significant digits. Integers, signs and words must be the same.
"""

import ast
import contextlib
import functools
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient

from speedlab.display import CLAIM, MEASURED, QUOTED, unmeasured_word

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("code-units", "exercises", "solutions")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
NOT_COMPARED = ("image/png", "image/jpeg", WIDGET_VIEW)
# The environment variables that a run needs if its outputs are to be compared.
QUIET = {
    # a progress bar shows up only on a slow machine, and would differ from run to run
    "TQDM_DISABLE": "1",
    # threads that wait for each other spin by default: next to one busy process, a run takes ten times as long
    "OMP_WAIT_POLICY": "passive",
    # stored outputs come from a CPU; `python -m benchmarks notebooks` runs every lesson with its claims on a GPU
    "CUDA_VISIBLE_DEVICES": "",
}
# If no times are stored, a timing comparison samples only as long as it must, and a cold start skips Inductor's test
# of the processor's instructions: four seconds that only confirm what the processor reports.
BRIEF = {"SPEEDLAB_SECONDS": "0.2", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
# This silences the warning that a kernel communicates over TCP, which here stays within this machine.
KERNEL = {"kernel_name": "python3", "extra_arguments": ["--IPKernelApp.log_level=ERROR"]}
# In a code cell's metadata: a hash of the code that made the stored output, from the first cell to this one.
MADE_BY = "made_by"
# In a notebook's metadata: how busy the machine was when the stored outputs were made, and whether it was quiet.
RECORDED = "recorded"

_MEASURED_LINE = re.compile(r"(?m)^(\[measured\] [^:\n]*): ?(.*)$")
_QUOTED_LINE = re.compile(r"(?s)^(\[quoted\] [^:\n]*): (.*)$")
_CELL = re.compile(r"(?s)<td>(.*?)</td>")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}\b")
_CELL_FILE = re.compile(r"(?<!\S)\S*ipykernel_\d+[/\\]\d+\.py")
# a decimal number, alone or as a factor, such as 1.52x
_DECIMAL = re.compile(r"(?<![\w.])([-+]?)(\d+)\.(\d+)(?:e([-+]?\d+))?(?=x\b|(?![\w.]))")
# With at least this many significant digits, a difference of one unit in the last place may depend on the machine.
_FORGIVEN_FROM = 3


def blank(text: str) -> str:
    """Return the text without what is never compared: memory addresses, and names of a kernel's temporary files."""
    return _CELL_FILE.sub("<cell>", _ADDRESS.sub("0x…", text))


class Printed(str):
    """Text that equals another if only the last digits of decimals with three or more digits differ, by one unit."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if str.__eq__(self, other):
            return True
        if not isinstance(other, str):
            return NotImplemented
        if _DECIMAL.sub("#", self) != _DECIMAL.sub("#", other):
            return False
        pairs = zip(_DECIMAL.finditer(self), _DECIMAL.finditer(other), strict=True)
        return all(a[0] == b[0] or _forgiven(a, b) for a, b in pairs)

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal


def _forgiven(a: re.Match, b: re.Match) -> bool:
    if a[1] != b[1] or len(a[3]) != len(b[3]):
        return False
    if min(len((found[2] + found[3]).lstrip("0")) for found in (a, b)) < _FORGIVEN_FROM:
        return False
    return abs(float(a[0]) - float(b[0])) <= 1.001 * 10.0 ** (int(a[4] or 0) - len(a[3]))


def comparable(outputs: list) -> list[nbformat.NotebookNode]:
    """The outputs as they are compared: measured values blanked, if they are values; alt texts next to pictures.

    What goes to stderr is left out: a library's warnings are neither evidence nor a failure.
    """
    kept = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        output = nbformat.from_dict(json.loads(json.dumps(output)))
        data = output.get("data", {})
        for kind in ("text/plain", "text/html"):
            if MEASURED in data and kind in data:
                data[kind] = _without_values(data[kind], free=data[MEASURED].get("stamp", False))
        if QUOTED in data:
            data["text/plain"] = _without_quotation(data["text/plain"], data[QUOTED]["always"])
        if "image/png" in data:
            about = output.get("metadata", {})
            alt = about.get("image/png", {}).get("alt", "none")
            data["alt text"] = (
                "measured" if about.get("measured") or about.get("image/png", {}).get("measured") else alt
            )
        for key, value in data.items():
            data[key] = blank(value) if isinstance(value, str) else value
        kept.append(output)
    return kept


def _without_values(text: str, free: bool) -> str:
    text = _MEASURED_LINE.sub(lambda found: f"{found[1]}: {_value(found[2], free)}", text)
    return _CELL.sub(lambda found: f"<td>{_value(found[1], free)}</td>", text)


def _without_quotation(text: str, always: str) -> str:
    return _QUOTED_LINE.sub(lambda found: f"{found[1]}: {'*' if always in found[2] else found[2]}", text)


def _value(text: str, free: bool) -> str:
    """A star for what a measured display may hold; otherwise the text itself, which then has to be the same."""
    cells = [part.split(" (your guess: ")[0] for part in text.split(" | ")]
    return "*" if free or not any(map(unmeasured_word, cells)) else text


def same_outputs(old: list, new: list) -> bool:
    """Whether two lists of a cell's outputs are equal by the rules of the test."""
    return _flat(old) == _flat(new)


def _flat(outputs: list) -> list[dict]:
    return [
        {
            key: Printed(value) if isinstance(value, str) else json.dumps(value, sort_keys=True)
            for key, value in {**output, **output.get("data", {})}.items()
            if key not in ("data", "metadata", "execution_count", "traceback", *NOT_COMPARED)
        }
        for output in comparable(outputs)
    ]


def claims_in(outputs: list) -> int:
    """The number of claims among a cell's outputs; a line that was only printed does not count."""
    return sum(CLAIM in output.get("data", {}) for output in outputs)


def keep_outputs(old: nbformat.NotebookNode, new: nbformat.NotebookNode, quiet: bool = True) -> int:
    """Put back each old output that equals the new one and need not be recorded again; return how many.

    It need not if the same code made it, and on a quiet machine if it is measured. Measured outputs also stay if the
    machine is busy now.
    A page's measured values belong together, since some are computed from others: if one is stored anew, all are.
    """
    before = {cell.id: cell for cell in old.cells if cell.cell_type == "code"}
    was_quiet = old.metadata.get(RECORDED, {}).get("quiet", False)
    known = [(before[cell.id], cell) for cell in new.cells if cell.id in before]
    same_code = [was.metadata.get(MADE_BY) == cell.metadata[MADE_BY] for was, cell in known]
    shows_clock = [clocked(cell.outputs) for _, cell in known]
    anew = any(timed and not same for timed, same in zip(shows_clock, same_code, strict=True))
    trusted = was_quiet and not anew
    kept = 0
    for (was, cell), same, timed in zip(known, same_code, shows_clock, strict=True):
        # equal outputs may still differ in what is not compared: an output that gained a picture is stored anew
        same_kinds = [set(o.get("data", ())) for o in was.outputs] == [set(o.get("data", ())) for o in cell.outputs]
        valid = same and (trusted or not timed)
        if (valid or (timed and not quiet)) and same_kinds and same_outputs(was.outputs, cell.outputs):
            cell.outputs = was.outputs
            cell.metadata[MADE_BY] = was.metadata.get(MADE_BY, "")
            kept += 1
    return kept


def clocked(outputs: list) -> bool:
    """Whether a cell shows measured values: its display, or its picture, is marked as measured."""
    return any(MEASURED in o.get("data", {}) or "measured" in json.dumps(o.get("metadata", {})) for o in outputs)


def _in_order(path: Path) -> list[int | str]:
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", str(path))]


def find(names: list[str] = ()) -> list[Path]:
    """The course's notebooks in order, 10 after 9; or those of files, folders, and numbers such as 9.1 or 9.1.1."""
    units = [path for path in (ROOT / "code-units").iterdir() if path.is_dir()]
    numbered = {unit.name.split("-")[0]: unit for unit in units}
    numbered |= {number(lesson): lesson for unit in units for lesson in unit.glob("*.ipynb")}
    places = [numbered.get(name) or Path(name).resolve() for name in names] or [ROOT / folder for folder in FOLDERS]
    missing = [name for name, place in zip(names, places, strict=False) if not place.exists()]
    if missing:
        raise SystemExit(f"There is no {missing[0]}. Give notebooks, folders or numbers of lessons, such as 9.1.1.")
    inside = lambda place: sorted(place.rglob("*.ipynb"), key=_in_order)  # noqa: E731
    found = [p for place in places for p in ([place] if place.is_file() else inside(place))]
    return [p for p in found if ".ipynb_checkpoints" not in p.parts]


def number(lesson: Path) -> str:
    """A lesson's number, such as 9.1.1 or capstone.1: its unit's and its own."""
    return f"{lesson.parent.name.split('-')[0]}.{lesson.stem.split('-')[0]}"


def execute(
    notebook: nbformat.NotebookNode, folder: Path, timeout: int = 600, *, allow_errors: bool = False
) -> nbformat.NotebookNode:
    """Run all cells in a fresh kernel in `folder`; return the notebook, normalised, with the hashes of its code.

    A cell may take `timeout` seconds. With `allow_errors` the cells after one that fails run, too.
    """
    os.environ.update(QUIET)
    NotebookClient(
        notebook,
        timeout=timeout,
        allow_errors=allow_errors,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
        **KERNEL,
    ).execute()
    for cell, made_by in zip(_code_cells(notebook), code_hashes(notebook, folder), strict=True):
        cell.metadata[MADE_BY] = made_by
    return normalise(notebook)


def code_hashes(notebook: nbformat.NotebookNode, folder: Path) -> list[str]:
    """For each code cell, a hash of all that makes its output: all code up to its end, and the local files used."""
    so_far, hashes = hashlib.sha256(local_code(notebook, folder).encode()), []
    for cell in _code_cells(notebook):
        so_far.update(cell.source.encode())
        hashes.append(so_far.hexdigest()[:12])
    return hashes


def is_stale(path: Path) -> bool:
    """Whether a notebook's stored outputs were made by code that has changed since."""
    notebook = nbformat.read(path, as_version=4)
    return [c.metadata.get(MADE_BY) for c in _code_cells(notebook)] != code_hashes(notebook, path.parent)


def _code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def local_files(notebook: nbformat.NotebookNode, folder: Path) -> list[Path]:
    """The project's own Python files that a notebook imports or launches, directly or indirectly."""
    return used_by([cell.source for cell in _code_cells(notebook)], folder)


def used_by(sources: list[str], folder: Path) -> list[Path]:
    """The project's own Python files that pieces of code in a folder import or launch, directly or indirectly."""
    found: set[Path] = set()
    waiting = [path for source in sources for path in _named(source, folder)]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _named(path.read_text(encoding="utf-8"), path.parent)
    return sorted(found)


def local_code(notebook: nbformat.NotebookNode, folder: Path) -> str:
    """The text of a notebook's local files, without comments and docstrings, which change no output."""
    return "\n".join(
        f"{path.name}\n{_without_prose(path.read_text(encoding='utf-8'))}" for path in local_files(notebook, folder)
    )


@functools.cache
def _named(source: str, folder: Path) -> list[Path]:
    """The project's files that a piece of code imports, or names in a string, for example to launch a script."""
    try:
        tree = ast.parse("\n".join("" if line.startswith(("%", "!")) else line for line in source.splitlines()))
    except SyntaxError:
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [f"{alias.name.replace('.', '/')}.py" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = node.module.replace(".", "/")
            names += [f"{module}.py", *(f"{module}/{alias.name}.py" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".py"):
            names.append(node.value)
    places = [base / name for name in names for base in (folder, ROOT) if len(name) < 200]
    packages = [place.with_suffix("") / "__init__.py" for place in places]
    return [p.resolve() for p in (*places, *packages) if p.is_file() and p.resolve().is_relative_to(ROOT)]


@functools.cache
def _without_prose(text: str) -> str:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                lines[first.lineno - 1 : first.end_lineno] = [""] * (first.end_lineno - first.lineno + 1)
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


class Watch(threading.Thread):
    """Notes the peak resident memory in bytes of all child processes, and of this one if asked, twice per second.

    Pages that several processes share, such as torch's libraries, count once if the system can tell (PSS on Linux).
    PSS is slow to read, so it is read only if the plain sum, which counts them each time, reaches a new peak.
    """

    def __init__(self, with_self: bool = False):
        super().__init__(daemon=True)
        self.with_self, self.peak, self.start_time, self.done = with_self, 0, time.monotonic(), threading.Event()

    def run(self):
        own, record = psutil.Process(), 0
        while not self.done.wait(0.5):
            processes = [own] * self.with_self + own.children(recursive=True)
            plain = _resident(processes, lambda process: process.memory_info().rss)
            if plain > 1.02 * record:
                record = plain
                self.peak = max(self.peak, _resident(processes, _fair_share))


def _resident(processes: list[psutil.Process], memory: Callable[[psutil.Process], int]) -> int:
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it may have ended meanwhile
            total += memory(process)
    return total


def _fair_share(process: psutil.Process) -> int:
    found = process.memory_full_info()
    return getattr(found, "pss", found.rss)


def normalise(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Keep only the metadata that readers need, and the static form of widgets.

    A stored widget view refers to a model that no longer exists: an opened notebook would show an error in its place
    until the cell is run. Without the view, Jupyter shows the stored HTML, and running the cell shows the widget.
    """
    recorded = notebook.metadata.get(RECORDED)
    notebook.metadata = {
        **({RECORDED: recorded} if recorded else {}),
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if WIDGET_VIEW in data and len(data) > 1:
                del data[WIDGET_VIEW]
    return notebook


def write(notebook: nbformat.NotebookNode, path: Path) -> bool:
    """Write the notebook if it differs from what is there; return whether it did."""
    text = nbformat.writes(notebook) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8", newline="\n")
    return True
