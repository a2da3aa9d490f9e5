"""Launching a script on several processes: their output, how a failure is told, and that nothing stays behind."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import psutil
import pytest
import torch

from speedlab import launch

# Each script first leaves its process ids in the folder that is its first argument: its own and its launcher's.
BEGINNING = """
import os, sys, time
from pathlib import Path

rank = int(os.environ["RANK"])
Path(sys.argv[1], f"started-{rank}").write_text(f"{os.getpid()} {os.getppid()}")
print("rank", rank, "begins")
"""
REPORT = """
time.sleep(0.3 * (1 - rank))  # the first rank is the last to print
print(os.environ["MASTER_PORT"], os.environ.get("CUDA_VISIBLE_DEVICES"), sys.argv[2:])
print("to the other stream", file=sys.stderr)
"""
FAIL = """
if rank == 1:
    while not Path(sys.argv[1], "started-0").exists():
        time.sleep(0.01)
    raise ValueError("planted")
time.sleep(600)
"""
HANG = "time.sleep(600)"
CALLER = """
import sys
from speedlab import launch
launch.run(sys.argv[1], 2, sys.argv[2], timeout=300, environment={"CUDA_VISIBLE_DEVICES": sys.argv[3]})
"""
# Ranks that may see a GPU are no copies of torchrun, but begin and end alike.
either_way = pytest.mark.parametrize("visible", ["", "0"])


@pytest.fixture
def script(tmp_path):
    def write(rest: str) -> Path:
        path = tmp_path / "a folder" / "task.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(BEGINNING + rest, encoding="utf-8")
        return path

    return write


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """An empty folder for temporary files, of this process and of those that it starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("TEMP", str(folder))
    return folder


def started(folder: Path) -> list[int]:
    """The ids of the processes that reported to `folder`."""
    return [int(word) for path in folder.glob("started-*") for word in path.read_text().split()]


def left_in(folder: Path) -> list[Path]:
    """What lies there, but for the cache of kernels: torch makes that folder when a launcher tells of a failure."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def wait_for(condition, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_launch_after_launch_leaves_no_process_socket_folder_or_descriptor(script, tmp_path, temporary):
    task, pids, ports = script(REPORT), [], []
    children, descriptors = psutil.Process().children(), None
    for number in range(4):
        got = launch.run(task, 2, tmp_path, "--number", number)
        for rank, text in enumerate(got.outputs):
            begins, report = text.splitlines()
            assert begins == f"rank {rank} begins"
            port, gpus, arguments = report.split(" ", 2)
            assert arguments == f"['--number', '{number}']"
            assert torch.cuda.device_count() >= 2 or gpus == "", "without a GPU for each, the ranks see none"
            ports.append(int(port))
        assert got.errors == ("to the other stream\n",) * 2
        pids += started(tmp_path)
        descriptors = descriptors or psutil.Process().num_fds() if os.name == "posix" else None
    assert len(set(pids)) >= 12, "two ranks and a launcher, each time"
    assert alive(pids) == []
    assert set(psutil.Process().children()) <= set(children)  # an older child may have ended meanwhile
    assert left_in(temporary) == []
    # another thread of the tests may have a file open for a moment
    assert os.name != "posix" or wait_for(lambda: psutil.Process().num_fds() <= descriptors, seconds=5)
    for port in set(ports):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


def test_the_failing_rank_speaks_first_and_the_others_are_stopped(script, tmp_path, temporary):
    with pytest.raises(launch.LaunchError) as caught:
        launch.run(script(FAIL), 2, tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == "Rank 1 of 2 ended with exit code 1 in task.py, and the others were stopped."
    assert lines[1] == "[rank 1] Traceback (most recent call last):"
    assert '[rank 1]   File "task.py", line' in lines[2], "no path of this machine"
    assert lines.index("[rank 1] ValueError: planted") < lines.index("[rank 0] rank 0 begins")
    assert caught.value.rank == 1 and caught.value.launched.outputs[0] == "rank 0 begins\n"
    assert len(started(tmp_path)) == 4 and alive(started(tmp_path)) == []
    assert left_in(temporary) == []


ENDING = """
import atexit, os, sys
class Thread:
    def __del__(self, abort=os.abort):
        abort()  # as a thread of gloo does that lets go of a tensor too late
sys.kept = Thread()
atexit.register(print, "registered")
print(sys.argv[1:], os.path.basename(sys.path[0]) == os.path.basename(os.path.dirname(__file__)), end="; ")
"""


@either_way
def test_a_rank_runs_what_was_registered_for_its_end_and_is_spared_pythons_shutting_down(visible, tmp_path):
    (tmp_path / "task.py").write_text(ENDING, encoding="utf-8")
    done = launch.run(tmp_path / "task.py", 1, "a b", environment={"CUDA_VISIBLE_DEVICES": visible})
    assert done.outputs == ("['a b'] True; registered\n",)


STATE = """
import multiprocessing, os, signal
own = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
print([signal.getsignal(number) == handler for number, handler in own.items()], end=" ")
print(multiprocessing.current_process().daemon, end=" ", flush=True)
os.write(1, b"past Python\\n")
"""


@either_way
def test_a_rank_begins_as_a_python_of_its_own_does(visible, tmp_path):
    (tmp_path / "task.py").write_text(STATE, encoding="utf-8")
    done = launch.run(tmp_path / "task.py", 2, environment={"CUDA_VISIBLE_DEVICES": visible})
    assert done.outputs == ("[True, True] False past Python\n",) * 2


@either_way
def test_a_ranks_standard_input_is_empty(visible, tmp_path):
    (tmp_path / "task.py").write_text("import sys\nprint(repr(sys.stdin.read()), end='')", encoding="utf-8")
    done = launch.run(tmp_path / "task.py", 1, environment={"CUDA_VISIBLE_DEVICES": visible}, timeout=60)
    assert done.outputs == ("''",)


def test_a_rank_that_may_see_a_gpu_is_no_copy_of_torchrun(tmp_path):
    """torchrun looks for a GPU before it copies itself, and CUDA cannot be used in a copy of a process that has."""
    (tmp_path / "task.py").write_text("import torch\nprint(torch.cuda._is_in_bad_fork(), end='')", encoding="utf-8")
    assert launch.run(tmp_path / "task.py", 1, environment={"CUDA_VISIBLE_DEVICES": "0"}).outputs == ("False",)


def test_a_launcher_that_is_killed_is_no_launcher_that_never_started(script, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "_finish", lambda *_: -9)
    with pytest.raises(launch.LaunchError, match=r"The launcher of task\.py was ended by a signal \(-9\)"):
        launch.run(script(""), 2, tmp_path)


def test_ranks_share_the_cores_that_this_process_may_use(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("speedlab.machine.cores", lambda: 6)
    assert launch._environment(2)["OMP_NUM_THREADS"] == "3"


WITHOUT_LIBUV = """
import importlib.abc, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch.distributed.elastic":
            sys.meta_path.remove(self)
            import torch.distributed, torch.distributed.rendezvous

            class TCPStore(torch.distributed.TCPStore):
                def __init__(self, *args, use_libuv=True, **named):
                    if use_libuv:
                        raise RuntimeError("use_libuv was requested but PyTorch was built without libuv support")
                    super().__init__(*args, use_libuv=False, **named)

            torch.distributed.TCPStore = torch.distributed.rendezvous.TCPStore = TCPStore

sys.meta_path.insert(0, Finder())
"""
SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(total := torch.ones(1))
print(total.item())
"""


def test_ranks_meet_where_torch_is_built_without_libuv(tmp_path, monkeypatch):
    """As on Windows, where init_process_group does without it, but torchrun's meeting point does not."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LIBUV, encoding="utf-8")
    (tmp_path / "task.py").write_text(SUM, encoding="utf-8")
    given = {"PYTHONPATH": str(tmp_path), "USE_LIBUV": "0"}
    with pytest.raises(launch.LaunchError, match="The connection to the C10d store has failed"):
        launch.run(tmp_path / "task.py", 2, environment=given, timeout=60)
    monkeypatch.setattr(launch, "sys", types.SimpleNamespace(**{**vars(sys), "platform": "win32"}))
    assert launch.run(tmp_path / "task.py", 2, environment=given, timeout=60).outputs == ("2.0\n",) * 2


@pytest.mark.parametrize(("end", "code", "said"), [("3", 3, ""), ("'no such thing'", 1, "no such thing")])
def test_the_code_that_a_script_ends_with_is_the_ranks(end, code, said, tmp_path):
    (tmp_path / "task.py").write_text(f"raise SystemExit({end})", encoding="utf-8")
    with pytest.raises(launch.LaunchError, match=f"ended with exit code {code}") as caught:
        launch.run(tmp_path / "task.py", 1)
    assert said in caught.value.launched.errors[0]


def test_ranks_that_hang_are_ended_when_time_runs_out(script, tmp_path, temporary):
    for timeout in (5, 10, 20, 40, 80):  # a busy machine may need longer to start them
        with pytest.raises(launch.LaunchError, match=f"had not ended after {timeout} s") as caught:
            launch.run(script(HANG), 2, tmp_path, timeout=timeout)
        assert alive(started(tmp_path)) == [] and left_in(temporary) == []
        if len(started(tmp_path)) == 4:
            break
    assert caught.value.rank is None and "[rank 1] rank 1 begins" in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
@pytest.mark.parametrize("way", ["SIGINT", "SIGKILL"])
@either_way
def test_ranks_do_not_outlive_an_interrupted_or_killed_caller(visible, way, script, tmp_path, temporary):
    command = [sys.executable, "-c", CALLER, str(script(HANG)), str(tmp_path), visible]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as caller:
        assert wait_for(lambda: len(started(tmp_path)) == 4), "the ranks did not start"
        caller.send_signal(getattr(signal, way))
        said = caller.communicate(timeout=60)[1]
    assert wait_for(lambda: alive(started(tmp_path)) == [])
    if way == "SIGINT":
        assert "KeyboardInterrupt" in said
        assert left_in(temporary) == []


def test_calls_that_cannot_be_meant_get_a_sentence(script, tmp_path):
    with pytest.raises(ValueError, match=r"no script 'missing.py'"):
        launch.run(tmp_path / "missing.py", 2)
    with pytest.raises(ValueError, match="must both be positive"):
        launch.run(script(HANG), 0)


def test_a_launcher_that_refuses_is_quoted(script, tmp_path):
    with pytest.raises(launch.LaunchError, match=r"was not started(.|\n)*no-such-option"):
        launch.run(script(HANG), 1, options=["--no-such-option"])
