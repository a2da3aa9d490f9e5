"""Run a script on several processes from a notebook or a test, and leave nothing behind.

`python -m torch.distributed.run --standalone` starts them, each as this file, which runs the given script. They hold
one end of a pipe: the other closes when the caller dies, and each then ends itself and what it started. On Linux they
are forked copies of torchrun, which has imported torch by then, unless they may see a GPU, which a copy cannot use.
"""

import atexit
import contextlib
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_COPY = multiprocessing.parent_process() is not None
_PIPE = "SPEEDLAB_LAUNCH_PIPE"


@dataclass(frozen=True)
class Launched:
    """What the ranks of one launch printed, by rank, and the seconds it took, including the start of Python."""

    outputs: tuple[str, ...]
    errors: tuple[str, ...]
    seconds: float


class LaunchError(RuntimeError):
    """A rank failed, or time ran out. `rank` is the one that failed first (None: no rank); see also `launched`."""

    def __init__(self, message: str, rank: int | None, launched: Launched):
        super().__init__(message)
        self.rank, self.launched = rank, launched


def run(
    script: str | Path,
    processes: int,
    *arguments: object,
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Launched:
    """Run `script` on that many processes, as torchrun does, and return what each of them printed.

    The processes see the machine's GPUs where there is one for each, and none otherwise: the script takes NCCL if
    `torch.cuda.is_available()`, else gloo, where torchrun hangs after `os._exit(0)`. `environment` is added to
    theirs, `options` go to torchrun. After `timeout` seconds, or at an interrupt, all are ended. Raises LaunchError,
    the traceback of the rank that failed first on top, and ValueError for a missing script or a number not above 0.
    """
    script = Path(script).resolve()
    if not script.is_file():
        raise ValueError(f"There is no script {script.name!r} in {script.parent.name!r}. Give the path of a file.")
    if processes < 1 or timeout <= 0:
        raise ValueError(f"processes={processes} and timeout={timeout} must both be positive.")
    environment = _environment(processes) | dict(environment or {})
    copied = sys.platform == "linux" and environment.get("CUDA_VISIBLE_DEVICES") == ""
    with tempfile.TemporaryDirectory(prefix="speedlab-", ignore_cleanup_errors=True) as folder:
        # torch's Windows builds have no libuv, which torchrun's own meeting point needs: there, a file replaces it
        in_a_file = ["--rdzv-conf=store_type=file", f"--rdzv-endpoint={folder}/met", "--rdzv-id=here"]
        meeting = ["--rdzv-backend=c10d", *in_a_file] if sys.platform == "win32" else ["--standalone"]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--local-addr=127.0.0.1", *meeting),
            *(f"--nproc-per-node={processes}", "--redirects=3", f"--log-dir={folder}", *options),
            *(*["--run-path", "--start-method=fork"] * copied, __file__, str(script), *map(str, arguments)),
        ]
        start = time.perf_counter()
        with (report := Path(folder, "launcher.txt")).open("wb") as sink:
            code = _finish(command, environment, sink, start + timeout)
        seconds = time.perf_counter() - start
        outputs, errors = (_read(Path(folder), processes, stream, script) for stream in ("stdout", "stderr"))
        said = report.read_text(encoding="utf-8", errors="replace")
    launched = Launched(outputs, errors, seconds)
    if code == 0:
        return launched
    rank, root = None, re.search(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", said, re.S)
    if code is None:
        head = f"{script.name} on {processes} processes had not ended after {timeout:g} s; all of them were stopped."
    elif root is None and (code < 0 or "SignalException" in said):
        head = f"The launcher of {script.name} was ended by a signal ({code}), and so was all it had started."
    elif root is None:
        raise LaunchError(f"{script.name} was not started. The launcher says:\n{said.strip()}", None, launched)
    else:
        rank, code = int(root[1]), int(root[2])
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        head = f"Rank {rank} of {processes} {how} in {script.name}, and the others were stopped."
    raise LaunchError("\n".join([head, *_accounts(launched, rank or 0)]), rank, launched)


def _environment(processes: int) -> dict[str, str]:
    import torch

    from speedlab import machine

    environment = {
        # all ranks are on this machine: they find each other through its loopback, whatever its name resolves to
        "GLOO_SOCKET_IFNAME": {"linux": "lo", "darwin": "lo0"}.get(sys.platform, ""),
        "TORCH_DIST_INIT_BARRIER": "1",  # a rank that is done at once waits until the others have connected to it
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if sys.platform == "win32" else "",
        "OMP_NUM_THREADS": str(max(1, machine.cores() // processes)),
        **os.environ,
        "PYTHONUNBUFFERED": "1",  # what a rank printed before it was killed is worth reading
        "PYTHONUTF8": "1",
        **({"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.device_count() < processes else {}),
    }
    return {name: value for name, value in environment.items() if value or name == "CUDA_VISIBLE_DEVICES"}


def _finish(command: list[str], environment: dict[str, str], sink: object, deadline: float) -> int | None:
    """Run torchrun and return its exit code, None if time ran out. However this ends, it ends all that it started."""
    theirs, ours = os.pipe()
    launcher = subprocess.Popen(
        command,
        env={**environment, _PIPE: str(theirs)},
        stdin=theirs,
        pass_fds=[theirs] if sys.platform == "linux" else (),  # for copies, whose standard input is empty
        stdout=sink,
        stderr=subprocess.STDOUT,
        # Ctrl-C in a terminal reaches every process of a group: here it is for the caller alone
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )
    os.close(theirs)
    try:
        # not wait(): on Windows an interrupt would come through only after it
        while launcher.poll() is None and time.perf_counter() < deadline:
            time.sleep(0.02)
        return launcher.returncode
    finally:
        if launcher.returncode is None:
            _end_family(launcher.pid)
        os.close(ours)
        launcher.wait()


def _read(folder: Path, processes: int, stream: str, script: Path) -> tuple[str, ...]:
    """What each rank wrote to a stream, over all its attempts, without the name of the script's folder."""
    files = [sorted(folder.glob(f"*/attempt_*/{rank}/{stream}.log")) for rank in range(processes)]
    texts = ("".join(file.read_text(encoding="utf-8", errors="replace") for file in parts) for parts in files)
    return tuple(text.replace(f"{script.parent}{os.sep}", "") for text in texts)


def _accounts(launched: Launched, first: int) -> list[str]:
    """What the ranks have to say, the first one on top: the end of its stderr, then what it printed."""
    order = sorted(range(len(launched.outputs)), key=lambda rank: (rank != first, rank))
    texts = [(rank, text) for rank in order for text in (launched.errors[rank], launched.outputs[rank])]
    return [f"[rank {rank}] {line}" for rank, text in texts for line in text.strip().splitlines()[-40:]]


def _end_family(pid: int) -> None:
    """Kill a process and its descendants. Each is stopped before its children are listed, so that none is missed."""
    family, waiting = [], [pid]
    while waiting:
        with contextlib.suppress(psutil.NoSuchProcess):
            member = psutil.Process(waiting.pop())
            member.suspend()
            family.append(member)
            waiting.extend(child.pid for child in member.children())
    for member in reversed(family):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=10)


def _end_with_the_caller(pipe: int) -> None:
    """Wait until nobody holds the other end of the pipe, then end this process and what it started."""
    os.read(pipe, 1)  # nothing is ever written: it returns when the other end closes
    for child in psutil.Process().children():
        _end_family(child.pid)
    os._exit(1)


def _rank(script: str, arguments: list[str]) -> int:
    """Be one rank: run the script as Python would, and return the code to exit with."""
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGINT") if _COPY else ():  # a copy has the launcher's handlers
        signal.signal(getattr(signal, name), signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
    pipe = int(os.environ[_PIPE]) if _COPY else os.dup(0)
    threading.Thread(target=_end_with_the_caller, args=[pipe], daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the script's own standard input is empty
    sys.path[0], sys.argv = str(Path(script).parent), [script, *arguments]
    code: object = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != script:
            trace = trace.tb_next
        traceback.print_exception(error.with_traceback(trace))
        code = 1
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    return code or 0


if __name__ == "__main__":
    ended = _rank(sys.argv[1], sys.argv[2:])
    # Python's own shutdown is skipped, and a copy is spared it: DDP keeps the group's threads alive, and one
    # that lets go of a tensor meanwhile aborts the process (pytorch 190489). torchrun waits for a copy's return.
    sys.exit(ended) if _COPY else os._exit(ended)
