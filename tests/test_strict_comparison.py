"""Negative controls: each way in which a notebook can lie makes the test run fail; changed timings do not."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from notebooks import ROOT

CLAIM = "from speedlab.claims import claim\nclaim('it holds', 1 + 1 == 2)"
CLAIMED = new_output(
    "display_data",
    data={"text/plain": "ok: it holds", "application/vnd.speedlab.claim+json": {"claim": "it holds"}},
)


def stdout(text):
    return new_output("stream", name="stdout", text=text)


def cell(source, *outputs, count=1, **metadata):
    return new_code_cell(source, outputs=list(outputs), execution_count=count, metadata=metadata)


SHOW = "import random\nfrom speedlab.display import measured, quoted, table\n"
TIMING = SHOW + "measured('step', f'{random.random():.2f} s')"
TABLE = SHOW + "table(['dtype', 'time'], [('fp32', f'{random.random():.2f} s')], measured=True)"
QUOTE = SHOW + "quoted('the library', f'connection {random.random()} closed', always='closed')"
FIGURE = (
    "from IPython.display import Image, display\nimport base64\n"
    "png = base64.b64decode('iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwC'\n"
    "    'AAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII=')\n"
)
EXPLORE = (
    "import ipywidgets\nfrom speedlab.widgets import explore\nlong = 'a view of many words, ' * 8\n"
    "explore(lambda n: (f'<p>{n}</p>', f'{long}{n}'), n=ipywidgets.IntSlider(3, 0, 5))"
)


def measured_output(line, label="step"):
    kind = "application/vnd.speedlab.measured+json"
    return new_output("display_data", data={"text/plain": line, kind: {"labels": [label]}})


def table_output(row, value="0.5 s"):
    data = {
        "text/plain": f"(time)\n[measured] {row}: {value}",
        "text/html": '<table class="measured"><thead><tr>'
        "<th scope='col'>dtype</th><th scope='col'>time</th></tr></thead>"
        f"<tbody><tr><th scope='row'>{row}</th><td>{value}</td></tr></tbody></table>",
        "application/vnd.speedlab.measured+json": {"labels": [row]},
    }
    return new_output("execute_result", data=data, execution_count=1)


def quote_output(text, always="closed"):
    kind, content = "application/vnd.speedlab.quoted+json", {"label": "the library", "always": always}
    return new_output("display_data", data={"text/plain": f"[quoted] the library: {text}", kind: content})


def figure_output(alt, **metadata):
    return new_output(
        "display_data",
        data={"image/png": "iVBORw0K", "text/plain": "<IPython.core.display.Image object>"},
        metadata={"image/png": {"alt": alt, **metadata}},
    )


def widget_output(last):
    text = "a view of many words, " * 8
    return new_output(
        "execute_result", data={"text/html": "<p>3</p>", "text/plain": f"{text}{last}"}, execution_count=1
    )


# Each is one cell of a notebook: the cell, and whether it passes.
CONTROLS = {
    "changed timing": (cell(TIMING, measured_output("[measured] step: 9 s")), True),
    "changed measured table": (cell(TABLE, table_output("fp32")), True),
    "changed words of a library": (cell(QUOTE, quote_output("connection 5 closed")), True),
    "last printed place": (cell("print(0.1234)", stdout("0.1235\n")), True),
    "last printed place of a factor": (cell('print("1.515x to 2x")', stdout("1.514x to 2x\n")), True),
    "output of a child process": (cell('import os\nos.system("echo from a child");', stdout("from a child\n")), True),
    "a library's warning": (cell('import sys\nprint(1)\nprint("careful", file=sys.stderr)', stdout("1\n")), True),
    "alt text": (cell(FIGURE + "Image(png, alt='two bars')", figure_output("two bars")), True),
    "alt text of a measured figure": (
        cell(
            FIGURE + "display(Image(png, alt='2 s', metadata={'measured': True}))",
            figure_output("9 s", measured=True),
        ),
        True,
    ),
    "widget": (cell(EXPLORE, widget_output(3)), True),
    "changed digit": (cell("print(0.1234)", stdout("0.1254\n")), False),
    "changed factor": (cell('print("1.515x")', stdout("1.535x\n")), False),
    "changed integer": (cell("print(41)", stdout("42\n")), False),
    "changed word": (cell('print("true")', stdout("false\n")), False),
    "two digits are exact": (cell('print("accuracy 1.0")', stdout("accuracy 0.9\n")), False),
    "a sign is exact": (cell('print("-0.1")', stdout("0.0\n")), False),
    "a sign is exact at three digits": (cell('print("-0.001")', stdout("0.001\n")), False),
    "changed label": (cell(TIMING, measured_output("[measured] epoch: 9 s", "epoch")), False),
    "changed row": (cell(TABLE, table_output("bf16")), False),
    "conclusion for a measured value": (
        cell(
            SHOW + "measured('verdict', 'bf16 is slower')",
            measured_output("[measured] verdict: bf16 is 5x faster", "verdict"),
        ),
        False,
    ),
    "stored conclusion": (cell(TIMING, measured_output("[measured] step: bf16 is 5x faster")), False),
    "stored conclusion in a table": (cell(TABLE, table_output("fp32", "bf16 wins")), False),
    "printed measured value": (
        cell("print('[measured] verdict: bf16 is slower')", stdout("[measured] verdict: bf16 is 5x faster\n")),
        False,
    ),
    "words that nobody wrote": (cell(QUOTE, quote_output("bf16 is 5x faster")), False),
    "printed claim": (cell("print('ok: it holds')", CLAIMED), False),
    "wrong alt text": (cell(FIGURE + "Image(png, alt='2 bars')", figure_output("5 bars")), False),
    "alt text said to be measured": (
        cell(FIGURE + "Image(png, alt='2 bars')", figure_output("5 bars", measured=True)),
        False,
    ),
    "widget that differs at its end": (cell(EXPLORE, widget_output(4)), False),
    "failed claim": (cell('raise AssertionError("not true here")'), False),
    "missing output": (cell("pass", stdout("41\n")), False),
    "unexpected output": (cell("print(41)"), False),
    "stripped": (cell("print(41)", count=None), False),
}
BROKEN_WIDGET = (
    "import ipywidgets\nfrom speedlab.widgets import explore\n"
    "explore(lambda n: (f'<p>{6 // n}</p>', f'{6 // n}'), n=ipywidgets.IntSlider(3, 0, 5))"
)
# Each is a notebook of its own that fails, with the words that say why.
NOTEBOOKS = {
    "dead-kernel": ([cell(CLAIM, CLAIMED), cell("import os\nos._exit(1)")], "the kernel died"),
    "skipped-by-tag": ([cell(CLAIM, CLAIMED), cell("print(41)", tags=["nbval-skip"])], "without a listed reason"),
    "ignored-by-tag": (
        [cell(CLAIM, CLAIMED), cell("print(41)", stdout("42\n"), tags=["nbval-ignore-output"])],
        "without a listed reason",
    ),
    "ignored-by-comment": (
        [cell(CLAIM, CLAIMED), cell("# NBVAL_IGNORE_OUTPUT\nprint('truth')", stdout("a lie\n"))],
        "without a listed reason",
    ),
    "no-claim": ([cell("print(1)", stdout("1\n"))], "no claim was made"),
    "claim-only-printed": (
        [cell('print("ok: all is proven")', stdout("ok: all is proven\n"))],
        "no claim was made",
    ),
    "no-cell": ([new_markdown_cell("# Prose")], "no code cell to compare"),
    "broken-widget": (
        [
            cell(CLAIM, CLAIMED),
            cell(
                BROKEN_WIDGET,
                new_output("execute_result", data={"text/html": "<p>2</p>", "text/plain": "2"}, execution_count=1),
            ),
        ],
        "n=0: ZeroDivisionError",
    ),
}


def small_house(house):
    """A copy of what a run of notebooks needs, with a folder for units."""
    for name in ("conftest.py", "tools/moves.py", "tools/notebooks.py", "tools/shard.py", "tools/warm_kernels.py"):
        (house / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, house / name)
    (house / "pytest.ini").write_text("[pytest]\npythonpath = tools\n")
    units = house / "code-units"
    units.mkdir()
    return units


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """One run over all controls in a small copy of the house: {(notebook, test): failure}, its print, its row."""
    house = tmp_path_factory.mktemp("house")
    units = small_house(house)
    controls = [cell(CLAIM, CLAIMED), *(control for control, _ in CONTROLS.values())]
    for name, cells in {"controls": controls, **{name: cells for name, (cells, _) in NOTEBOOKS.items()}}.items():
        nbformat.write(new_notebook(cells=cells), units / f"{name}.ipynb")
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--nbval",
            "--nbval-cell-timeout=60",
            "-q",
            "--junitxml=report.xml",
            "-p",
            "no:xdist",
        ],
        cwd=house,
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"TEST_CONDITION": "in a small house"},
    )
    found = {}
    for case in ET.parse(house / "report.xml").iter("testcase"):
        failures = [child.text for child in case if child.tag in ("failure", "error")]
        found[case.get("classname").split(".")[-2], case.get("name")] = "\n".join(failures)
    return found, run.stdout, json.loads((house / "results/tests/runs.json").read_text("utf-8"))


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
    assert "controls.ipynb" in outcomes[1]


def test_a_run_whose_condition_is_named_adds_its_row(outcomes):
    failures = [text for text in outcomes[0].values() if text]
    [row] = outcomes[2]
    assert row["condition"] == "in a small house" and row["versions"]["torch"] == importlib.metadata.version("torch")
    assert row["found"]["failed"] == len(failures) and sum(row["found"].values()) == len(outcomes[0])


DIES_FIRST = """
import nbval.plugin

real, started = nbval.plugin.RunningKernel, []

def kernel(*args, **options):
    started.append(args)
    if len(started) == 1:
        raise RuntimeError("Kernel died before replying to kernel_info")
    return real(*args, **options)

nbval.plugin.RunningKernel = kernel
"""


def test_a_kernel_that_dies_at_once_is_started_again(tmp_path):
    cells = [cell(CLAIM, CLAIMED)]
    nbformat.write(new_notebook(cells=cells), small_house(tmp_path) / "one.ipynb")
    (tmp_path / "dies_first.py").write_text(DIES_FIRST, encoding="utf-8")
    asked = [sys.executable, "-m", "pytest", "--nbval", "-p", "dies_first", "-p", "no:xdist"]
    run = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=200,
                         env=os.environ | {"PYTHONPATH": str(tmp_path)})  # fmt: skip
    assert run.returncode == 0 and "2 passed" in run.stdout, run.stdout


def test_a_cell_that_ran_out_of_time_is_named_even_if_its_kernel_is_slow_to_come_to_rest(tmp_path):
    source = "import time\nget_ipython().events.register('post_execute', lambda: time.sleep(8))\ntime.sleep(600)"
    nbformat.write(new_notebook(cells=[cell(source)]), small_house(tmp_path) / "one.ipynb")
    asked = [sys.executable, "-m", "pytest", "--nbval", "--nbval-cell-timeout=3", "-p", "no:xdist"]
    run = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert "Timeout of 3 seconds exceeded executing cell" in run.stdout, run.stdout


HANGS = """
import threading

def test_waits_for_ever():
    threading.Event().wait()

def test_comes_next():
    assert True
"""


def test_a_test_that_hangs_fails_by_name_and_the_others_go_on(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_hangs.py").write_text(HANGS, encoding="utf-8")
    asked = [sys.executable, "-m", "pytest", "-p", "no:nbval", "-n1"]
    asked += ["-o", "addopts=", "-o", "faulthandler_timeout=2"]
    run = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "crashed while running 'test_hangs.py::test_waits_for_ever'" in run.stdout
    assert "1 failed, 1 passed" in run.stdout and "in test_waits_for_ever" in run.stderr
