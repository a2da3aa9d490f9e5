"""How `pytest --nbval` compares notebooks here: every code cell, strictly, but for what the clock decides.

nbval compares stored outputs with fresh ones, exactly. This adds what it lacks: measured values are blanked and their
labels compared, decimals may differ in the last printed place, a cell that was never run fails, and each notebook
ends with an item that counts what was really compared and claimed. It touches nbval's internals, so nbval is pinned.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
from nbval.plugin import IPyNbCell, IPyNbFile

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from notebooks import CLAIM, FOLDERS, NOT_COMPARED, QUIET, ROOT, Printed, blank

# before anything imports torch, which reads this once; kernels and other child processes inherit it
os.environ.update(QUIET)

# A job in the background of a shell ignores Ctrl-C, and so would every child: tests that send it would wait in vain.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Exceptions to strict comparison need a line here: (notebook, tag) -> reason. There are none.
LISTED_EXCEPTIONS: dict[tuple[str, str], str] = {}
_UNCOMPARED_TAGS = {"nbval-skip", "nbval-ignore-output", "skip-execution", "raises-exception"}


class Cell(IPyNbCell):
    def sanitize(self, text):
        text = super().sanitize(text)
        return Printed(blank(text)) if isinstance(text, str) else text

    def runtest(self):
        if self.cell.source.strip() and self.cell.execution_count is None:
            self.raise_cell_error("this cell has never been run: refresh the notebook (make refresh)")
        super().runtest()
        if self.cell.source.strip():
            self.parent.cells_compared += 1
            texts = (o.get("text", "") for o in self.test_outputs if o.get("output_type") == "stream")
            self.parent.claims_made += sum(len(CLAIM.findall(text)) for text in texts)


class Evidence(pytest.Item):
    """The last item of a notebook: it was really compared, and it really claimed something."""

    def __init__(self, *, wanted_cells: int, wants_claims: bool, tags: set[str], **kwargs):
        super().__init__(**kwargs)
        self.wanted_cells, self.wants_claims, self.tags = wanted_cells, wants_claims, tags

    def runtest(self):
        name = str(self.path.relative_to(ROOT))
        unlisted = [tag for tag in self.tags if (name, tag) not in LISTED_EXCEPTIONS]
        assert not unlisted, f"{name}: cells tagged {unlisted} leave the comparison without a listed reason"
        assert self.wanted_cells, f"{name}: there is no code cell to compare"
        compared, claims = self.parent.cells_compared, self.parent.claims_made
        assert compared == self.wanted_cells, f"{name}: {compared} of {self.wanted_cells} code cells were compared"
        assert claims or not self.wants_claims, f"{name}: no claim was made; say what the notebook proves"
        self.user_properties.append(("evidence", f"{name}: {compared} cells compared, {claims} claims"))

    def repr_failure(self, excinfo):
        return str(excinfo.value)

    def reportinfo(self):
        return self.path, 0, "evidence"


class Notebook(IPyNbFile):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.skip_compare = (*self.skip_compare, *NOT_COMPARED)
        self.cells_compared = self.claims_made = 0

    def collect(self):
        cells, tags = 0, set()
        for cell in super().collect():
            cells += bool(cell.cell.source.strip())
            tags |= _UNCOMPARED_TAGS & set(cell.cell.metadata.get("tags", []))
            yield Cell.from_parent(self, name=cell.name, cell_num=cell.cell_num, cell=cell.cell, options=cell.options)
        # an exercise is a stub: its checks say "not attempted yet" and claim nothing
        claims = self.path.relative_to(ROOT).parts[0] == "code-units"
        yield Evidence.from_parent(self, name="evidence", wanted_cells=cells, wants_claims=claims, tags=tags)

    def setup(self):
        # ipykernel drops the output of child processes while it sees this variable
        held = os.environ.pop("PYTEST_CURRENT_TEST", None)
        try:
            super().setup()
        finally:
            if held is not None:
                os.environ["PYTEST_CURRENT_TEST"] = held
        execute = self.kernel.kc.execute
        # with store_history=False a trailing semicolon does not hide a value
        self.kernel.kc.execute = lambda code, **options: execute(code, **{**options, "store_history": True})


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    found = yield
    return [Notebook.from_parent(parent, path=n.path) if type(n) is IPyNbFile else n for n in found or []]


def pytest_terminal_summary(terminalreporter):
    """Print each notebook's seconds and evidence, the slowest first: in a list of cells nobody would see them."""
    seconds: dict[str, float] = {}
    evidence: dict[str, str] = {}
    for report in (r for reports in terminalreporter.stats.values() for r in reports if hasattr(r, "duration")):
        path = report.nodeid.split("::")[0]
        if path.startswith(FOLDERS):
            seconds[path] = seconds.get(path, 0.0) + report.duration
            evidence[path] = dict(report.user_properties).get("evidence", evidence.get(path, f"{path}: no evidence"))
    if seconds:
        terminalreporter.section("slowest notebooks, and what was compared")
        for path, spent in sorted(seconds.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(f"{spent:7.1f} s  {evidence[path]}")
        terminalreporter.write_line(f"{sum(seconds.values()):7.1f} s  all {len(seconds)} notebooks")
