"""`make refresh`: a re-run without a change is an empty diff; no measured value outlives the code that made it."""

import nbformat
import refresh as tool
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

CELLS = [
    "import time\nfactor = 2",
    "print('[measured] time:', factor * time.perf_counter())",
    "print('exact:', 21 * 2)",
]


def written(path, cells):
    """A notebook of these code cells; the cells that stood there before keep their outputs, as in JupyterLab."""
    if path.exists():
        notebook = nbformat.read(path, as_version=4)
        for cell, source in zip(notebook.cells[1:], cells, strict=True):
            cell.source = source
    else:
        notebook = new_notebook(cells=[new_markdown_cell("# Trial"), *map(new_code_cell, cells)])
    nbformat.write(notebook, path)
    return path


def measured(path):
    return nbformat.read(path, as_version=4).cells[2].outputs[0].text


def test_a_second_refresh_changes_nothing(tmp_path):
    path = written(tmp_path / "trial.ipynb", CELLS)
    assert tool.refresh(path) == (True, 0)
    first = path.read_bytes()
    assert tool.refresh(path) == (False, 3)
    assert path.read_bytes() == first


def test_a_changed_cell_renews_the_measured_values_below_it(tmp_path):
    path = written(tmp_path / "trial.ipynb", CELLS)
    tool.refresh(path)
    old = measured(path)
    tool.refresh(written(path, [CELLS[0].replace("2", "3"), *CELLS[1:]]))
    assert measured(path) != old
    new = measured(path)
    assert tool.refresh(path) == (False, 3) and measured(path) == new


def test_a_change_below_leaves_the_measured_values_above_it(tmp_path):
    path = written(tmp_path / "trial.ipynb", CELLS)
    tool.refresh(path)
    old = measured(path)
    assert tool.refresh(written(path, [*CELLS[:2], "print('exact:', 21 * 3)"])) == (True, 2)
    assert measured(path) == old
