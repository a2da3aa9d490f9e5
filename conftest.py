"""How `pytest --nbval` compares notebooks here: every code cell, strictly, but for what the clock decides.

nbval compares stored outputs with fresh ones, exactly. This adds what it lacks: measured values are blanked and their
labels compared, alt texts are compared, decimals may differ in the last printed place, a cell that was never run
fails, and each notebook ends with an item that counts what was really compared and claimed, and moves every widget.
It touches nbval's internals, so nbval is pinned.
"""

import ast
import importlib.metadata
import json
import os
import platform
import signal
import time
from pathlib import Path
from queue import Empty

import psutil
import pytest
import shard
import warm_kernels
from nbval.plugin import IPyNbCell, IPyNbFile, comment_markers, metadata_tags
from notebooks import BRIEF, FOLDERS, NOT_COMPARED, QUIET, ROOT, Printed, Watch, blank, claims_in, comparable

# before anything imports torch, which reads this once; kernels and other child processes inherit it
os.environ.update(QUIET)

# A job in the background of a shell ignores Ctrl-C, and so would every child: tests that send it would wait in vain.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# For a few notebooks, it costs more to import every library once than to import what they need.
_WARM_FROM = 6
WATCH = pytest.StashKey[Watch]()

# Exceptions to strict comparison need a line here: (notebook, tag or comment) -> reason. There are none.
LISTED_EXCEPTIONS: dict[tuple[str, str], str] = {}
_UNCOMPARED = {*metadata_tags, *comment_markers, "skip-execution"}
_MOVE = (
    f"__import__('runpy').run_path({str(ROOT / 'tools' / 'moves.py')!r})['move_all']()"
    " if 'speedlab.widgets' in __import__('sys').modules else []"
)


class KernelDiedError(Exception):
    """The notebook's kernel is gone."""


class Cell(IPyNbCell):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # after an error, a busy kernel may take this long to come to rest; nbval's 5 s end in an error of its own
        self.output_timeout = 60

    def sanitize(self, text):
        text = super().sanitize(text)
        return Printed(blank(text)) if isinstance(text, str) else text

    def compare_outputs(self, test, ref, skip_compare=None):
        return super().compare_outputs(comparable(test), comparable(ref), skip_compare)

    def runtest(self):
        if self.cell.source.strip() and self.cell.execution_count is None:
            self.raise_cell_error("this cell has never been run: refresh the notebook (make refresh)")
        try:
            super().runtest()
        except KernelDiedError:
            self.parent.timed_out = True  # nbval then expects the cells below to fail
            self.raise_cell_error("the kernel died while executing this cell; was there too little memory?")
        if self.cell.source.strip():
            self.parent.cells_compared += 1
            self.parent.claims_made += claims_in(self.test_outputs)


class Evidence(pytest.Item):
    """The last item of a notebook: it was really compared, it really claimed something, and its widgets move."""

    def __init__(self, *, wanted_cells: int, wants_claims: bool, left_out: set[str], **kwargs):
        super().__init__(**kwargs)
        self.wanted_cells, self.wants_claims, self.left_out = wanted_cells, wants_claims, left_out

    def runtest(self):
        name = str(self.path.relative_to(ROOT))
        unlisted = [mark for mark in self.left_out if (name, mark) not in LISTED_EXCEPTIONS]
        assert not unlisted, f"{name}: cells marked {unlisted} leave the comparison without a listed reason"
        assert self.wanted_cells, f"{name}: there is no code cell to compare"
        compared, claims = self.parent.cells_compared, self.parent.claims_made
        assert compared == self.wanted_cells, f"{name}: {compared} of {self.wanted_cells} code cells were compared"
        assert claims or not self.wants_claims, f"{name}: no claim was made; say what the notebook proves"
        stuck = self.parent.evaluate(_MOVE)
        assert not stuck, f"{name}: a widget breaks when it is moved:\n" + "\n".join(stuck)
        self.user_properties.append(("evidence", f"{name}: {compared} cells compared, {claims} claims"))

    def repr_failure(self, excinfo):
        return str(excinfo.value)

    def reportinfo(self):
        return self.path, 0, "evidence"


def _left_out(cell) -> set[str]:
    """The tags and comments by which nbval would leave a cell out, or forgive it an exception."""
    comments = {line.strip().lstrip("#").strip() for line in cell.source.splitlines() if line.strip().startswith("#")}
    return _UNCOMPARED & {*comments, *cell.metadata.get("tags", [])}


class Notebook(IPyNbFile):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.skip_compare = (*self.skip_compare, *NOT_COMPARED)
        self.cells_compared = self.claims_made = 0

    def collect(self):
        cells, left_out = 0, set()
        for cell in super().collect():
            cells += bool(cell.cell.source.strip())
            left_out |= _left_out(cell.cell)
            yield Cell.from_parent(self, name=cell.name, cell_num=cell.cell_num, cell=cell.cell, options=cell.options)
        # an exercise is a stub: its checks say "not attempted yet" and claim nothing
        claims = self.path.relative_to(ROOT).parts[0] == "code-units"
        yield Evidence.from_parent(self, name="evidence", wanted_cells=cells, wants_claims=claims, left_out=left_out)

    def setup(self):
        held = dict(os.environ)
        # ipykernel drops the output of child processes while it sees this variable
        os.environ.pop("PYTEST_CURRENT_TEST", None)
        os.environ.update(BRIEF)
        try:
            self._start()
        finally:
            os.environ.clear()
            os.environ.update(held)
        self.kernel.get_message = self._message
        execute = self.kernel.kc.execute
        # with store_history=False a trailing semicolon does not hide a value
        self.kernel.kc.execute = lambda code, **options: execute(code, **{**options, "store_history": True})

    def _start(self, trials: int = 3) -> None:
        """Start the kernel, and again where it dies at once: another process may take a port chosen for it."""
        try:
            super().setup()
        except RuntimeError:
            if trials == 1:
                raise
            self._start(trials - 1)

    def _message(self, stream: str, timeout: float | None = None) -> dict:
        """The next message of a kernel that lives: nbval itself would wait for a dead one until time is up."""
        client = self.kernel.kc
        read = client.get_iopub_msg if stream == "iopub" else client.get_shell_msg
        end = time.monotonic() + (timeout or 1e9)
        while True:
            alive = self.kernel.is_alive()
            try:
                return read(timeout=max(0.01, min(1.0, end - time.monotonic())))
            except Empty:
                if not alive:
                    raise KernelDiedError from None
                if time.monotonic() >= end:
                    raise

    def evaluate(self, expression: str) -> object:
        """The value of a literal that an expression gives in the notebook's kernel."""
        asked = self.kernel.kc.execute("", silent=True, user_expressions={"value": expression})
        end = time.monotonic() + self.config.option.nbval_cell_timeout
        while time.monotonic() < end:
            reply = self.kernel.kc.get_shell_msg(timeout=max(1, end - time.monotonic()))
            if reply["parent_header"].get("msg_id") == asked:
                value = reply["content"]["user_expressions"]["value"]
                assert value["status"] == "ok", f"{value.get('ename')}: {value.get('evalue')}"
                return ast.literal_eval(value["data"]["text/plain"])
        raise TimeoutError(f"The kernel of {self.path.name} did not answer in time.")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    found = yield
    return [Notebook.from_parent(parent, path=n.path) if type(n) is IPyNbFile else n for n in found or []]


@pytest.hookimpl(optionalhook=True)  # the course also runs without pytest-xdist
def pytest_xdist_auto_num_workers(config):
    """As many as there are cores, as one more was no faster; fewer where there are not 4 GB of memory for each."""
    return max(1, min(_cores(), int(psutil.virtual_memory().total / 4e9)))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Put the slowest files first, so that none of them is left for the end, when the other workers are idle."""
    seconds = {path: shard.seconds(path) for path in {item.path for item in items}}
    if sum(path.suffix == ".ipynb" for path in seconds) >= _WARM_FROM:
        warm_kernels.use()
    items.sort(key=lambda item: (-seconds[item.path], str(item.path)))


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        # Each worker gets its share of the cores: threads of one that wait for threads of another waste both.
        share = _cores() // config.workerinput["workercount"]
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
    else:
        config.stash[WATCH] = Watch(with_self=True)
        config.stash[WATCH].start()


def pytest_terminal_summary(terminalreporter, config):
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
    if watch := config.stash.get(WATCH, None):
        minutes = (time.monotonic() - watch.start_time) / 60
        if "TEST_CONDITION" in os.environ:
            _record(config.rootpath, terminalreporter.stats, minutes, watch.peak)
        terminalreporter.write_line(
            f"{minutes:.1f} minutes, at most {watch.peak / 1e9:.1f} GB of resident memory, shared pages counted once"
        )


def _record(root: Path, stats: dict, minutes: float, peak: int) -> None:
    """Add what this run found to the file from which CONTRIBUTING's table is made."""
    names = {"passed": "passed", "failed": "failed", "error": "errors", "skipped": "skipped"}
    row = {
        "condition": os.environ["TEST_CONDITION"],
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("torch", "lightning", "transformers")},
        "found": {said: len(stats[name]) for name, said in names.items() if stats.get(name)},
        "minutes": round(minutes, 1),
        "bytes": peak,
    }
    file = root / "results" / "tests" / "runs.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    file.write_text(json.dumps([*rows, row], indent=1) + "\n", encoding="utf-8")
