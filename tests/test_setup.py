"""The set-up: made once, repaired when damaged, never half made, and a sentence for what is missing.

A made-up uv stands on PATH, so that nothing is downloaded: it makes a real environment with one empty package, and
writes down how it was called. UV_FAILS says at which calls it fails, UV_SAYS with what words.
"""

import ast
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from notebooks import ROOT

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the made-up uv is a script with a first line for Unix")

BASE = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
UV = f"""#!/bin/sh
case "$*" in *--help*) exit 0 ;; esac
echo "$*" >> "$UV_LOG"
echo "the cache is ${{UV_CACHE_DIR:-uv\'s own}}" >> "$UV_LOG"
for last; do
  case "$previous" in --python) venv=$last ;; -c) lock=$last ;; esac
  previous=$last
done
case "$*" in *" -r "*) sleep ${{UV_SLEEP:-0}} ;; esac
if echo "$*" | grep -Eq -e "${{UV_FAILS:-^$}}"; then echo "$UV_SAYS"; exit 2; fi
library=lib/python3.{sys.version_info.minor}/site-packages
case "$*" in
venv*)
  mkdir -p "$last/bin" "$last/$library"
  ln -s "{BASE}" "$last/bin/python"
  echo "home = {BASE.parent}" > "$last/pyvenv.cfg" ;;
*" -r "*)
  cd "$venv/$library" || exit 3
  mkdir -p torch/lib
  touch torch/lib/big torch/version.py torch/nn.py
  if grep -q nvidia-cublas== "$lock"; then echo with CUDA; else echo without CUDA; fi >> "$UV_LOG" ;;
esac
"""

PRETEND = """
import runpy, sys
sys.version_info = tuple(int(part) for part in sys.argv[1].split("."))
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Course:
    """A copy of what the set-up reads, in a folder with spaces and an umlaut, and a way to call it."""

    def __init__(self, folder: Path):
        self.folder, self.tools = folder / "a früh folder", folder / "bin"
        for name in ("tools/course.py", "requirements.txt", "requirements.lock", "Makefile"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        (self.folder / "speedlab").mkdir()
        (self.folder / "speedlab" / "__init__.py").touch()
        self.tools.mkdir()
        self.program("uv", UV)
        self.variables = {"PATH": f"{self.tools}:/usr/bin:/bin", "HOME": str(folder), "UV_LOG": str(folder / "log")}

    def program(self, name: str, text: str) -> None:
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def start(self, *arguments: str, python: str = "", **variables: str) -> subprocess.Popen:
        """Call the set-up; `python` makes it believe that it runs under that version."""
        (self.folder.parent / "log").write_text("")
        command = [BASE, *(["-c", PRETEND, python] if python else []), self.folder / "tools" / "course.py"]
        return subprocess.Popen(
            [*command, *(arguments or ("run", "-P", "-c", "import speedlab; print('runs')"))],
            env={**self.variables, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def call(self, *arguments: str, **options: str) -> tuple[int, str, str]:
        """Call it to its end; return the status, and the last lines of what it said and of what went wrong."""
        child = self.start(*arguments, **options)
        said, wrong = child.communicate(timeout=60)
        return child.returncode, said.strip().split("\n")[-1], wrong.strip().split("\n")[-1]

    def log(self) -> str:
        """How uv was called since the last start."""
        return (self.folder.parent / "log").read_text()

    def set_ups(self) -> int:
        """How many environments were made."""
        return len(re.findall("(?m)^venv ", self.log()))

    def wheels(self) -> list[str]:
        """Where PyTorch came from: what --torch-backend said, and which lock held."""
        last = [line for line in self.log().splitlines() if " -r " in line][-1]
        return re.findall(r"--torch-backend (\w+)", last) + re.findall("with(?:out)? CUDA", self.log())[-1:]

    def whole(self) -> bool:
        """Call it again, and tell whether it ran without a call of uv, and nothing is left beside .venv."""
        return self.call() == (0, "runs", "") and not self.log() and not list(self.folder.glob(".venv-*"))


@pytest.fixture
def course(tmp_path) -> Course:
    return Course(tmp_path)


def test_the_first_call_sets_up_and_the_next_runs_at_once(course):
    assert course.call() == (0, "runs", "")
    assert course.set_ups() == 1
    assert course.whole()


def test_the_status_and_the_arguments_are_passed_on(course):
    assert course.call("run", "-c", "import sys; print(sys.argv[1:]); sys.exit(3)", "a b", "c")[:2] == (
        3, "['a b', 'c']",
    )  # fmt: skip


def test_a_moved_folder_needs_no_repair(course):
    course.call()
    course.folder = course.folder.rename(course.folder.with_name("elsewhere"))
    assert course.whole()


DAMAGES = {
    "a package": lambda venv, library: shutil.rmtree(library / "torch"),
    "a file of a package": lambda venv, library: (library / "torch" / "version.py").unlink(),
    "the record": lambda venv, library: (venv / "set-up").unlink(),
    "half the record": lambda venv, library: (venv / "set-up").write_text("0123"),
    "its programs": lambda venv, library: shutil.rmtree(venv / "bin"),
    "the Python that it was made from": lambda venv, library: (
        (venv / "bin" / "python").unlink(),
        (venv / "bin" / "python").symlink_to("/nowhere/python"),
    ),
    "all but a file": lambda venv, library: (shutil.rmtree(venv), venv.write_text("")),
    "all but a dead link": lambda venv, library: (shutil.rmtree(venv), venv.symlink_to("/nowhere")),
    "the lock's old state": lambda venv, library: (venv.parent / "requirements.lock").open("a").write("another==1\n"),
}


@pytest.mark.parametrize("lost", DAMAGES)
def test_damage_is_repaired(course, lost):
    course.call()
    [library] = course.folder.glob(".venv/lib/python*/site-packages")
    DAMAGES[lost](course.folder / ".venv", library)
    assert course.call() == (0, "runs", "")
    assert course.set_ups() == 1
    assert course.whole()


def test_a_failed_update_leaves_the_old_environment(course):
    course.call()
    lock = course.folder / "requirements.lock"
    before = lock.read_text()
    lock.write_text(before + "another==1\n")
    assert course.call(UV_FAILS=" -r ", UV_SAYS="dns error")[0] == 1
    lock.write_text(before)
    assert course.whole()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_set_up_begins_again(course, number):
    child = course.start(UV_SLEEP="1")
    while " -r " not in course.log():
        time.sleep(0.02)
    if number == signal.SIGINT:  # Ctrl-C reaches all
        os.killpg(child.pid, number)
    else:
        child.send_signal(number)
    _, wrong = child.communicate(timeout=20)
    assert child.returncode != 0 and "Traceback" not in wrong
    assert not (course.folder / ".venv").exists()
    assert course.call() == (0, "runs", "")
    assert course.whole()


def test_two_at_once_wait_for_each_other(course):
    children = [course.start(UV_SLEEP="0.5") for _ in range(2)]
    for child in children:
        said, wrong = child.communicate(timeout=30)
        assert (child.returncode, wrong) == (0, "") and said.endswith("runs\n")
    assert course.set_ups() == 1


# --- where PyTorch comes from ---


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the registry's wheels have no CUDA")
def test_without_a_gpu_no_cuda_is_downloaded(course):
    if Path("/proc/driver/nvidia/gpus").exists():
        pytest.skip("there is a GPU here")
    assert course.call()[0] == 0
    assert course.wheels() == ["cpu", "without CUDA"]


def test_with_a_gpu_the_registrys_wheels_are_taken(course):
    course.program("nvidia-smi", "#!/bin/sh\necho GPU 0: NVIDIA H200\n")
    assert course.call()[0] == 0
    assert course.wheels() == ["with CUDA"]


def test_a_driver_without_a_gpu_counts_for_nothing(course):
    course.program("nvidia-smi", "#!/bin/sh\necho No devices were found\nexit 6\n")
    if sys.platform == "linux" and not Path("/proc/driver/nvidia/gpus").exists():
        assert course.call()[0] == 0
        assert course.wheels() == ["cpu", "without CUDA"]


@pytest.mark.parametrize(
    "choice, wheels",
    [
        ("cpu", ["cpu", "without CUDA"]),
        ("cu130", ["cu130", "without CUDA"]),  # that index's PyTorch names other CUDA packages than the lock
        ("registry", ["with CUDA"]),
    ],
)
def test_torch_backend_overrides(course, choice, wheels):
    course.call(TORCH_BACKEND="cu126")
    assert course.call(TORCH_BACKEND=choice)[0] == 0
    assert course.wheels() == wheels
    assert course.whole(), "without the variable, what was once chosen stays"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the registry's wheels are the usual ones")
def test_an_unreachable_index_falls_back_to_the_registry_and_says_so(course):
    unreachable = {"UV_FAILS": "--torch-backend cpu", "UV_SAYS": "failed to fetch: https://download.pytorch.org"}
    child = course.start(**unreachable)
    said, wrong = child.communicate(timeout=30)
    assert child.returncode == 0
    assert "PyTorch's own index cannot be reached" in said and "registry" in said
    assert course.wheels() == ["with CUDA"]
    status, _, wrong = course.call(TORCH_BACKEND="cpu", **unreachable)
    assert status == 1 and "TORCH_BACKEND=registry" in wrong, "what was asked for is not replaced"


# --- bad days ---


@pytest.mark.parametrize(
    "says, words",
    [
        ("error: failed to write: No space left on device (os error 28)", "The disk is full: free"),
        ("[Errno 28] No space left on device", "The disk is full: free"),
        ("cause: dns error: failed to lookup address information", "HTTPS_PROXY"),
        ("cause: client error (Connect): tcp connect error: Connection refused", "HTTPS_PROXY"),
        ("cause: invalid peer certificate: UnknownIssuer", "A certificate was not accepted: point SSL_CERT_FILE"),
        ("error: No interpreter found for Python >=3.11 in search path", "install Python 3.12"),
        ("cause: Failed to download `https://github.com/astral-sh/python-build-standalone/x`", "install Python 3.12"),
        ("error: something else broke", "The set-up failed: fix the problem shown above"),
    ],
)
def test_a_failure_becomes_a_sentence(course, says, words):
    status, _, wrong = course.call(TORCH_BACKEND="registry", UV_FAILS=" -r ", UV_SAYS=says)
    assert status == 1
    assert words in wrong and wrong.endswith("then run the same command again.")
    assert not list(course.folder.glob(".venv*"))


def test_an_unexplained_failure_shows_what_was_said(course):
    child = course.start(TORCH_BACKEND="registry", UV_FAILS=" -r ", UV_SAYS="something else broke")
    assert "something else broke" in child.communicate(timeout=30)[1]


def test_earlier_downloads_are_enough_without_a_network(course):
    online = "(lock|cpu)$"  # the last word of an install that is not held to what was downloaded before
    assert course.call(UV_FAILS=online, UV_SAYS="dns error") == (0, "runs", "")


@pytest.mark.parametrize("version", ["3.6.15", "3.7.9"])
def test_an_old_python_gives_one_sentence(course, version):
    (course.tools / "uv").unlink()
    status, _, wrong = course.call(python=version)
    assert status == 1 and wrong.startswith("The course needs Python 3.11 to 3.14")
    assert ast.parse((ROOT / "tools" / "course.py").read_text(), feature_version=(3, 6)), "it must get that far"


def test_beside_an_old_python_uv_looks_for_a_newer_one(course):
    course.call(python="3.10.4")
    assert "--python >=3.11,<3.14" in course.log()


def test_a_read_only_home_does_not_matter(course):
    """uv keeps its downloads in the home folder; where that cannot be, they stay in this folder, and only for now."""
    assert course.call(HOME="/nowhere") == (0, "runs", "")
    assert f"the cache is {course.folder}/.venv-" in course.log()
    said = course.call("run", "-c", "import os; print(os.environ['JUPYTER_RUNTIME_DIR'])", HOME="/nowhere")[1]
    assert said == f"{course.folder}/.venv/runtime"
    assert course.whole()


def test_an_unknown_command_shows_what_there_is(course):
    status, _, wrong = course.call("labb")
    assert status == 1 and "TORCH_BACKEND" in wrong


# --- JupyterLab, make ---


def _answer(opener: urllib.request.OpenerDirector, address: str):
    """What an address answers; JupyterLab prints it a moment before it listens."""
    for _ in range(100):
        with contextlib.suppress(urllib.error.URLError):
            return opener.open(address, timeout=20)
        time.sleep(0.2)
    raise AssertionError(f"{address} does not answer")


def test_lab_prints_an_address_that_answers(tmp_path):
    """Started in a terminal, as `lab` starts it; Markdown opens beside its contents, and one Ctrl-C ends it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--config=tools/lab/config.py", "--no-browser", f"--port={port}"]
    variables = {**os.environ, **{f"JUPYTER_{kind}_DIR": str(tmp_path / kind) for kind in ("CONFIG", "RUNTIME")}}
    variables.pop("JUPYTER_TOKEN", None)
    # Without a terminal, Ctrl-C is an exception wherever the server is; raised in a destructor, it would be lost.
    keyboard, terminal = os.openpty()
    pipes = {"stdin": terminal, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=variables, **pipes, text=True) as lab:
        too_late = threading.Timer(180, lab.kill)  # reading what it says knows no timeout
        too_late.start()
        try:
            address = next(line.strip() for line in lab.stderr if line.strip().startswith("http://127.0.0.1"))
            assert "/lab/tree/README.md?token=" in address
            proxy_free = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            assert _answer(proxy_free, address).status == 200
            viewers = address.replace("tree/README.md", "api/settings/@jupyterlab/docmanager-extension:plugin")
            assert "Markdown Preview" in proxy_free.open(viewers, timeout=20).read().decode()
            layout = address.replace("lab/tree/README.md", "lab/api/workspaces/default")
            assert "@jupyterlab/toc:plugin" in proxy_free.open(layout, timeout=20).read().decode()
            lab.send_signal(signal.SIGINT)
            assert "Shutting down" in lab.stderr.read()
            assert lab.wait(20) == 0
        finally:
            too_late.cancel()
            lab.kill()
            os.close(keyboard)
            os.close(terminal)


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_make_says_what_there_is():
    commands = re.search(r"(?m)^COMMANDS := (.+)$", (ROOT / "Makefile").read_text())[1].split()
    variables = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    made = subprocess.run(["make"], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=20)
    assert re.findall(r"(?m)^make (\w+)  ", made.stdout) == [name for name in commands if name != "help"]


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_clean_removes_what_can_be_made_again_and_nothing_else(course):
    course.call()
    gone = ["speedlab/__pycache__/a.pyc", ".pytest_cache/a", "speedlab.egg-info/a", "build/a", ".venv-1/a"]
    kept = ["results/build/a", "lightning_logs/a", "speedlab/build/a", "images/a.png"]
    for name in gone + kept:
        (course.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (course.folder / name).touch()
    subprocess.run(["make", "clean"], cwd=course.folder, env=course.variables, check=True, timeout=20)
    assert all((course.folder / name).exists() for name in kept)
    assert not any((course.folder / name).parent.exists() for name in [*gone, ".venv/set-up"])
