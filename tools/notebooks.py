"""What the notebook tests and the maintainers' tools share: finding notebooks, executing them, comparing outputs.

Two outputs are equal when they differ only in measured values (blanked) or by one unit in the last printed place of
a decimal number. Integers and words must be the same.
"""

import hashlib
import json
import os
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("code-units", "exercises", "solutions")
NOT_COMPARED = ("image/png", "image/jpeg", "application/vnd.jupyter.widget-view+json")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# What a run that is compared needs from its environment.
QUIET = {
    # a progress bar shows up only on a slow machine, and would differ from run to run
    "TQDM_DISABLE": "1",
    # threads that wait for each other spin by default: beside one busy process, that takes ten times as long
    "OMP_WAIT_POLICY": "passive",
}
CLAIM = re.compile(r"(?m)^ok: ")
# In a code cell's metadata: a hash of the code, from the first cell to this one, that made the stored output.
MADE_BY = "made_by"

_MEASURED_LINE = re.compile(r"(?m)^(\[measured\] [^:\n]*):.*$")
_MEASURED_TABLE = re.compile(r'(?s)<table class="measured">.*?</table>')
_CELL = re.compile(r"(?s)<td>.*?</td>")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}\b")
_CELL_FILE = re.compile(r"\S*ipykernel_\d+[/\\]\d+\.py")
_DECIMAL = re.compile(r"(?<![\w.])[-+]?\d+\.(\d+)(?:e([-+]?\d+))?(?![\w.])")


def blank(text: str) -> str:
    """Blank what is never compared: measured values (their labels stay), addresses, names of temporary files."""
    text = _MEASURED_LINE.sub(r"\1: *", text)
    text = _MEASURED_TABLE.sub(lambda found: _CELL.sub("<td>*</td>", found[0]), text)
    return _CELL_FILE.sub("<cell>", _ADDRESS.sub("0x…", text))


class Printed(str):
    """Text that equals another when words match and decimals differ by at most one unit in the last printed place."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if str.__eq__(self, other):
            return True
        if not isinstance(other, str):
            return NotImplemented
        if _DECIMAL.sub("#", self) != _DECIMAL.sub("#", other):
            return False
        return all(
            len(a[1]) == len(b[1]) and abs(float(a[0]) - float(b[0])) <= 1.001 * _last_place(a)
            for a, b in zip(_DECIMAL.finditer(self), _DECIMAL.finditer(other), strict=True)
        )

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal


def _last_place(decimal: re.Match) -> float:
    return 10.0 ** (int(decimal[2] or 0) - len(decimal[1]))


def same_outputs(old: list, new: list) -> bool:
    """Whether two lists of a cell's outputs are equal as the test compares them."""
    return _comparable(old) == _comparable(new)


def keep_outputs(old: nbformat.NotebookNode, new: nbformat.NotebookNode) -> int:
    """Put back each old output that equals the new one and was made by the same code; return how many."""
    before = {cell.id: cell for cell in old.cells if cell.cell_type == "code"}
    kept = 0
    for cell in (c for c in new.cells if c.id in before):
        known = before[cell.id]
        same_code = known.metadata.get(MADE_BY) == cell.metadata[MADE_BY]
        # equal outputs may still differ in what is not compared: an output that gained a picture is stored anew
        same_kinds = [set(o.get("data", ())) for o in known.outputs] == [set(o.get("data", ())) for o in cell.outputs]
        if same_code and same_kinds and same_outputs(known.outputs, cell.outputs):
            cell.outputs = known.outputs
            kept += 1
    return kept


def _comparable(outputs: list) -> list[dict]:
    return [
        {
            key: Printed(blank(value)) if isinstance(value, str) else json.dumps(value, sort_keys=True)
            for key, value in {**output, **output.get("data", {})}.items()
            if key not in ("data", "metadata", "execution_count", "traceback", *NOT_COMPARED)
        }
        for output in outputs
    ]


def find(names: list[str] = ()) -> list[Path]:
    """The course's notebooks in order, or those of the given files and folders."""
    places = [Path(name).resolve() for name in names] or [ROOT / folder for folder in FOLDERS]
    missing = [str(place) for place in places if names and not place.exists()]
    if missing:
        raise SystemExit(f"There is no {missing[0]}. Give notebooks or folders that exist.")
    found = [p for place in places for p in ([place] if place.is_file() else sorted(place.rglob("*.ipynb")))]
    return [p for p in found if ".ipynb_checkpoints" not in p.parts]


def execute(notebook: nbformat.NotebookNode, folder: Path, timeout: int = 600) -> nbformat.NotebookNode:
    """Run all cells in a fresh kernel, in `folder`; normalise what is stored, and note the code that made it."""
    os.environ.update(QUIET)
    NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    so_far = hashlib.sha256()
    for cell in (c for c in notebook.cells if c.cell_type == "code"):
        so_far.update(cell.source.encode())
        cell.metadata[MADE_BY] = so_far.hexdigest()[:12]
    return normalise(notebook)


def normalise(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Keep only the metadata that readers need, and the static form of widgets.

    A stored widget view refers to a model that no longer exists: an opened notebook would show an error in its place
    until the cell is run. Without the view, Jupyter shows the stored HTML, and running the cell brings the widget.
    """
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if WIDGET_VIEW in data and len(data) > 1:
                del data[WIDGET_VIEW]
    return notebook


def write(notebook: nbformat.NotebookNode, path: Path) -> bool:
    """Write the notebook if it differs from what is there; say whether it did."""
    text = nbformat.writes(notebook) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8", newline="\n")
    return True
