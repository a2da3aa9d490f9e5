"""Negative controls: each way in which a notebook can lie makes the test run fail; changed timings do not."""

import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from notebooks import ROOT

CLAIM = 'print("ok: it holds")'
CLAIMED = new_output("stream", name="stdout", text="ok: it holds\n")


def stdout(text):
    return new_output("stream", name="stdout", text=text)


def cell(source, *outputs, count=1, **metadata):
    return new_code_cell(source, outputs=list(outputs), execution_count=count, metadata=metadata)


TIMING = 'import random\nprint(f"[measured] step: {random.random()} s")'
TABLE = (
    "from IPython.display import HTML\nimport random\n"
    "HTML(f'<table class=\"measured\"><tr><th>fp32</th><td>{random.random()}</td></tr></table>')"
)


def table_output(label):
    html = f'<table class="measured"><tr><th>{label}</th><td>0.5</td></tr></table>'
    data = {"text/html": html, "text/plain": "<IPython.core.display.HTML object>"}
    return new_output("execute_result", data=data, execution_count=1)


# Each is one cell of a notebook: the cell, and whether it passes.
CONTROLS = {
    "changed timing": (cell(TIMING, stdout("[measured] step: 9 s\n")), True),
    "changed measured table": (cell(TABLE, table_output("fp32")), True),
    "last printed place": (cell("print(0.1234)", stdout("0.1235\n")), True),
    "output of a child process": (cell('import os\nos.system("echo from a child");', stdout("from a child\n")), True),
    "changed digit": (cell("print(0.1234)", stdout("0.1254\n")), False),
    "changed integer": (cell("print(41)", stdout("42\n")), False),
    "changed word": (cell('print("true")', stdout("false\n")), False),
    "changed label": (cell(TIMING, stdout("[measured] epoch: 9 s\n")), False),
    "changed row": (cell(TABLE, table_output("bf16")), False),
    "failed claim": (cell('raise AssertionError("not true here")'), False),
    "missing output": (cell("pass", stdout("41\n")), False),
    "unexpected output": (cell("print(41)"), False),
    "stripped": (cell("print(41)", count=None), False),
}
# Each is a notebook of its own that fails, with the words that say why.
NOTEBOOKS = {
    "dead-kernel": ([cell(CLAIM, CLAIMED), cell("import os\nos._exit(1)")], "exceeded while executing cell"),
    "skipped-by-tag": ([cell(CLAIM, CLAIMED), cell("print(41)", tags=["nbval-skip"])], "without a listed reason"),
    "ignored-by-tag": (
        [cell(CLAIM, CLAIMED), cell("print(41)", stdout("42\n"), tags=["nbval-ignore-output"])],
        "without a listed reason",
    ),
    "no-claim": ([cell("print(1)", stdout("1\n"))], "no claim was made"),
    "no-cell": ([new_markdown_cell("# Prose")], "no code cell to compare"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """One run over all controls in a small copy of the house: {(notebook, test): failure}, and what it printed."""
    house = tmp_path_factory.mktemp("house")
    for name in ("conftest.py", "tools/notebooks.py"):
        (house / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, house / name)
    (house / "pytest.ini").write_text("[pytest]\n")
    units = house / "code-units"
    units.mkdir()
    controls = [cell(CLAIM, CLAIMED), *(control for control, _ in CONTROLS.values())]
    for name, cells in {"controls": controls, **{name: cells for name, (cells, _) in NOTEBOOKS.items()}}.items():
        nbformat.write(new_notebook(cells=cells), units / f"{name}.ipynb")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", "--nbval-cell-timeout=6", "-q", "--junitxml=report.xml"],
        cwd=house,
        capture_output=True,
        text=True,
        timeout=400,
    )
    found = {}
    for case in ET.parse(house / "report.xml").iter("testcase"):
        failures = [child.text for child in case if child.tag in ("failure", "error")]
        found[case.get("classname").split(".")[-2], case.get("name")] = "\n".join(failures)
    return found, run.stdout


@pytest.mark.parametrize("name", CONTROLS)
def test_control(outcomes, name):
    failure = outcomes[0]["controls", f"Cell {1 + list(CONTROLS).index(name)}"]
    assert (failure == "") is CONTROLS[name][1], failure or f"{name}: the run did not notice"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_that_fails(outcomes, name):
    failures = [text for (notebook, _), text in outcomes[0].items() if notebook == name and text]
    assert any(NOTEBOOKS[name][1] in text for text in failures), failures


def test_a_stripped_cell_is_told_what_to_do(outcomes):
    failure = outcomes[0]["controls", f"Cell {1 + list(CONTROLS).index('stripped')}"]
    assert "never been run" in failure and "make refresh" in failure


def test_the_slowest_notebooks_and_the_evidence_are_printed(outcomes):
    assert "slowest notebooks" in outcomes[1]
    assert "no-claim.ipynb: 1 cells compared, 0 claims" not in outcomes[1]
    assert "controls.ipynb" in outcomes[1]
