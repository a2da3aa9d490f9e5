"""`make refresh`: a re-run without a change is an empty diff; no measured value outlives the code that made it."""

import os
import subprocess
import sys
import threading

import nbclient
import nbformat
import pytest
import refresh as tool
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook


def test_a_kernel_that_dies_ends_one_notebook_and_not_all(tmp_path, monkeypatch, capsys):
    paths = [written(tmp_path / f"{name}.ipynb", ["1 + 1"]) for name in "ab"]
    dying = nbclient.exceptions.DeadKernelError("the kernel died")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "find", lambda names=(): paths)
    monkeypatch.setattr(tool.readme, "update", lambda: print("README renewed"))
    monkeypatch.setattr(tool, "execute", lambda *_: (_ for _ in ()).throw(dying))
    monkeypatch.setattr(sys, "argv", ["refresh.py", "a", "b"])
    before = set(threading.enumerate())  # the tests' own watch among them
    with pytest.raises(SystemExit, match="2 of 2 notebooks"):
        tool.main()
    assert "README renewed" in capsys.readouterr().out
    watches = [thread for thread in threading.enumerate() if isinstance(thread, tool.Watch) and thread not in before]
    for watch in watches:
        watch.join(5)
    assert not any(watch.is_alive() for watch in watches)


CELLS = [
    "import time\nfactor = 2",
    "from speedlab.display import measured\nmeasured('time', factor * time.perf_counter())",
    "print('exact:', 21 * 2)",
]


@pytest.fixture(autouse=True)
def others(monkeypatch):
    """What other processes do while a notebook runs, in cores; a quiet machine unless a test says otherwise."""
    busy = [0.0]
    monkeypatch.setattr(tool, "wait_until_quiet", lambda patience: busy[0] <= 0.15)
    monkeypatch.setattr(tool.Moment, "others_since", lambda self, earlier: busy[0])
    monkeypatch.setattr(tool.machine, "peak_flops", Product())
    return busy


class Product:
    """A reference product of constant speed, or one that slows down."""

    rates = (1e9,)

    def __call__(self):
        self.rates = (*self.rates[1:], self.rates[0])
        return self.rates[0]

    def cache_clear(self):
        pass


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
    return nbformat.read(path, as_version=4).cells[2].outputs[0].data["text/plain"]


@pytest.mark.parametrize(
    "here, there",
    [("device: cpu (B)", "device: cpu (A)"), ("hardware for dtypes: AVX2", "hardware for dtypes: AVX512-BF16, AVX2")],
)
def test_a_page_names_one_machine(tmp_path, here, there):
    clock = "measured('time', time.perf_counter())"
    stamp = f"Table(('this machine', 'found'), ({tuple(here.split(': '))!r},), stamp=True)"
    cells = [f"import time\nfrom speedlab.display import Table, measured\n{stamp}", clock, clock]
    path = written(tmp_path / "trial.ipynb", cells)
    tool.refresh(path)
    page = nbformat.read(path, as_version=4)
    for output in page.cells[1].outputs:
        output.data["text/plain"] = output.data["text/plain"].replace(here, there)
    nbformat.write(page, path)
    first = measured(path)
    tool.refresh(path)
    assert measured(path) == first, "no code has changed: another machine's page stays as it is"
    tool.refresh(written(path, [*cells[:2], clock + "  # changed"]))
    assert measured(path) != first, "its last clock is this machine's now, and so must be the others"
    assert nbformat.read(path, as_version=4).cells[1].outputs[0].data["text/plain"].endswith(here)


def test_measured_values_of_a_page_are_of_one_run(tmp_path):
    clock = "measured('time', time.perf_counter())"
    cells = ["import time\nfrom speedlab.display import measured", clock, clock, clock]
    path = written(tmp_path / "trial.ipynb", cells)
    tool.refresh(path)
    first = measured(path)
    tool.refresh(written(path, [*cells[:3], clock + "  # changed"]))
    assert measured(path) != first, "the last clock is of another run now, and so must be the others"


def test_a_second_refresh_changes_nothing(tmp_path):
    path = written(tmp_path / "trial.ipynb", CELLS)
    assert tool.refresh(path) == (True, 0, True)
    first = path.read_bytes()
    assert tool.refresh(path) == (False, 3, True)
    assert path.read_bytes() == first


def test_a_changed_cell_renews_the_measured_values_below_it(tmp_path):
    path = written(tmp_path / "trial.ipynb", CELLS)
    tool.refresh(path)
    old = measured(path)
    tool.refresh(written(path, [CELLS[0].replace("2", "3"), *CELLS[1:]]))
    assert measured(path) != old
    new = measured(path)
    assert tool.refresh(path) == (False, 3, True) and measured(path) == new


def test_a_change_below_leaves_the_measured_values_above_it(tmp_path):
    path = written(tmp_path / "trial.ipynb", CELLS)
    tool.refresh(path)
    old = measured(path)
    assert tool.refresh(written(path, [*CELLS[:2], "print('exact:', 21 * 3)"])) == (True, 2, True)
    assert measured(path) == old


def test_a_busy_machine_stores_no_clock_over_an_old_one(tmp_path, others):
    path = written(tmp_path / "trial.ipynb", CELLS)
    tool.refresh(path)
    old = path.read_bytes()
    others[0] = 1.3
    assert tool.refresh(path) == (False, 3, False) and path.read_bytes() == old
    written(path, [CELLS[0].replace("2", "3"), *CELLS[1:]])
    assert tool.refresh(path) == (True, 1, False), "what no clock said is stored"
    assert nbformat.read(path, as_version=4).metadata == nbformat.reads(old.decode(), 4).metadata
    assert nbformat.read(path, as_version=4).cells[2].outputs == nbformat.reads(old.decode(), 4).cells[2].outputs
    others[0] = 0.0
    assert tool.refresh(path)[1:] == (2, True), "the changed code's clock is stored once the machine is quiet"


def test_a_page_recorded_on_a_busy_machine_is_marked_and_recorded_again(tmp_path, others):
    others[0] = 0.8
    path = written(tmp_path / "trial.ipynb", CELLS)
    tool.refresh(path, noisy=True)
    recorded = nbformat.read(path, as_version=4).metadata["recorded"]
    assert (recorded["busy"], recorded["products"], recorded["quiet"]) == (0.8, [1, 1], False)
    assert 2e7 < recorded["peak_bytes"] < 4e9  # a kernel's, by orders of magnitude
    old = measured(path)
    others[0] = 0.0
    assert tool.refresh(path)[1:] == (2, True) and measured(path) != old
    assert nbformat.read(path, as_version=4).metadata["recorded"]["quiet"]


def test_a_machine_that_lacks_what_a_page_shows_stores_what_is_compared_and_keeps_the_clocks(tmp_path):
    path = written(tmp_path / "trial.ipynb", CELLS)
    tool.refresh(path)
    old, recorded = measured(path), nbformat.read(path, as_version=4).metadata["recorded"]
    tool.refresh(written(path, [CELLS[0].replace("2", "3"), CELLS[1], "print('exact:', 21 * 3)"]), keep=True)
    page = nbformat.read(path, as_version=4)
    assert measured(path) == old and page.cells[3].outputs[0].text == "exact: 63\n"
    assert page.metadata["recorded"] == recorded
    tool.refresh(written(path, [CELLS[0], CELLS[1].replace("'time'", "'seconds'"), CELLS[2]]), keep=True)
    assert "[measured] seconds" in measured(path), "a new label needs a new value"
    assert not nbformat.read(path, as_version=4).metadata["recorded"]["quiet"], "which stands beside older ones"


def test_a_product_that_slows_down_tells_a_noisy_host(tmp_path):
    tool.machine.peak_flops.rates = (1e9, 1.3e9)
    path = written(tmp_path / "trial.ipynb", CELLS)
    assert tool.refresh(path)[2] is False


def test_a_changed_file_that_the_notebook_uses_renews_its_measured_values(tmp_path, monkeypatch):
    monkeypatch.setattr("notebooks.ROOT", tmp_path)
    (tmp_path / "script.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("x = 1\n")
    path = written(tmp_path / "trial.ipynb", [CELLS[0] + "\nname = 'script.py'", *CELLS[1:]])
    tool.refresh(path)
    old = measured(path)
    (tmp_path / "helper.py").write_text('"""A remark."""\n# and a comment\nx = 1\n')
    tool.refresh(path)
    assert measured(path) == old, "prose changes no output"
    (tmp_path / "helper.py").write_text("x = 2\n")
    tool.refresh(path)
    assert measured(path) != old


# Spends a second of CPU in a process that nobody waits for, in a session of its own; then ends, or stays for a while.
DETACHED = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while time.process_time() < 1: pass
        open(sys.argv[1], "w").close()
        time.sleep(60 * (sys.argv[2] == "stays"))
    os._exit(0)
os.wait()
"""
# Adopts orphans as a refresh does, runs what is above, and counts what others spent: by a stranger and by us.
ACCOUNTS = """
import pathlib, subprocess, sys, time
import psutil, refresh
refresh.adopt_orphans()
roots, detached, folder = (psutil.Process(int(sys.argv[1])), psutil.Process()), sys.argv[2], sys.argv[3]
before = [refresh.spent_by_others(root) for root in roots]
done = {what: pathlib.Path(folder, what) for what in ("ends", "stays")}
for what, file in done.items():
    subprocess.run([sys.executable, "-c", detached, file, what], check=True)
while not all(file.exists() for file in done.values()):
    time.sleep(0.05)
theirs, own = (refresh.spent_by_others(root) - was for root, was in zip(roots, before))
print(theirs - own)
for orphan in psutil.Process().children():
    orphan.kill()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere an orphan belongs to init")
def test_detached_processes_of_a_notebook_are_not_others(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        asked = subprocess.run(
            [sys.executable, "-c", ACCOUNTS, str(stranger.pid), DETACHED, str(tmp_path)],
            capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        stranger.communicate(b"\n")
    assert asked.returncode == 0, asked.stderr
    assert float(asked.stdout) > 1.9, "what they spent is another's to a stranger, and ours to us"


# Two forks of a process with 200 MB that only read them. A process of its own watches, which has no other children.
WATCHES = """
import os, subprocess, sys, time
if "forks" in sys.argv:
    pages = bytearray(b"1" * 200_000_000)
    for _ in range(2):
        if os.fork() == 0:
            sum(pages[::4096]), os.write(1, b"ready\\n"), time.sleep(60), os._exit(0)
    sys.stdin.read()
    sys.exit()
import notebooks  # after the forks: a process with threads must not fork
with subprocess.Popen([sys.executable, __file__, "forks"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
    assert [parent.stdout.readline() for _ in range(2)] == [b"ready\\n"] * 2
    watch = notebooks.Watch()
    watch.start()
    while not watch.peak:
        time.sleep(0.1)
    print(watch.peak)
    for process in [*notebooks.psutil.Process(parent.pid).children(), parent]:
        process.kill()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not tell shared pages")
def test_memory_that_processes_share_counts_once(tmp_path):
    script = tmp_path / "watches.py"
    script.write_text(WATCHES)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    asked = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=environment)
    assert asked.returncode == 0, asked.stderr
    assert 200e6 < int(asked.stdout) < 350e6
