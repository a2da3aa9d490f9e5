#!/usr/bin/env python3
# An old Python must still be able to read this file, so that it can say in one sentence what is missing:
# no f-strings, no unpacking in displays, no "raise ... from", which is what these rules would ask for.
# ruff: noqa: UP010, UP024, UP031, RUF005, B904
"""The course's commands: set up the environment, open JupyterLab, run the tests, maintain the notebooks.

Standard library only, because nothing else exists before the set-up. `make NAME` is short for
`python3 tools/course.py NAME`.
"""

from __future__ import print_function

import contextlib
import errno
import glob
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
VENV = os.path.join(ROOT, ".venv")
BIN = os.path.join(VENV, "Scripts" if os.name == "nt" else "bin")
VENV_PYTHON = os.path.join(BIN, "python.exe" if os.name == "nt" else "python")
KERNEL = os.path.join(VENV, "share", "jupyter", "kernels", "python3", "kernel.json")
STAMP = os.path.join(VENV, "set-up.json")
LOG = os.path.join(VENV, "set-up.log")
LOCK = os.path.join(VENV, "set-up.lock")
# Jupyter writes the port that it really got into this folder.
RUNTIME = os.path.join(VENV, "share", "jupyter", "runtime")

OLDEST = (3, 11)
TESTED = ("3.13", "3.12", "3.11")
UV = "uv>=0.9,<1"

HELP = """\
make lab          set up .venv, then open the course in JupyterLab
make test         set up .venv, then run every test and notebook (pytest --nbval)
make refresh      run changed notebooks again, or those named in ARGS="...", and store their outputs
make exercises    generate the exercises from the solutions
make bench        climb the ladders on this machine (up to 15 minutes each) and store what they measured
make checkpoints  train the small shipped checkpoints again
make lint         check the style of code and notebooks
make clean        remove .venv, caches and build leftovers

Without make: python3 tools/course.py lab (or test, refresh, ...).
More arguments: make test ARGS="tests -q". Another Python: make lab PYTHON=python3.12."""

AGAIN = "then run the same command again, which repairs .venv."

# What a failed child process said, and the sentence that it becomes.
EXPLANATIONS = (
    (
        ("no space left", "os error 28", "os error 112", "quota exceeded", "not enough space"),
        "The disk is full: free about 8 GB (`uv cache clean` gives back what earlier downloads hold), " + AGAIN,
    ),
    (
        ("certificate",),
        "The package registry's certificate was not accepted: point SSL_CERT_FILE and PIP_CERT at your "
        "organisation's certificate file, " + AGAIN,
    ),
    (
        (
            "connection",
            "could not connect",
            "client error (connect)",
            "dns error",
            "name resolution",
            "timed out",
            "timeout",
            "proxy",
            "no matching distribution found for uv",
        ),
        "The package registry could not be reached: connect to the network (a proxy goes into HTTPS_PROXY, "
        "a mirror into PIP_INDEX_URL), " + AGAIN,
    ),
    (
        ("ensurepip", "no module named venv"),
        "This Python cannot create virtual environments: install its venv package (on Debian and Ubuntu: "
        "sudo apt install python3-venv), " + AGAIN,
    ),
)


class Problem(Exception):
    """Something that one sentence explains."""

    def __init__(self, sentence, code=1):
        Exception.__init__(self, sentence)
        self.code = code


# --- which Python -----------------------------------------------------------------------------------------


def newer_python(tested=TESTED):
    """Return the command of a Python that is new enough, or None; the one .venv was made with comes first."""
    made_with = read_stamp().get("python")
    versions = [v for v in tested if v == made_with] + [v for v in tested if v != made_with]
    check = "import sys; sys.exit(0 if sys.version_info >= %r else 1)" % (OLDEST,)
    for version in versions:
        for command in (["python" + version], ["py", "-" + version]):
            # A name on PATH is not enough: pyenv puts names there that only print an error.
            if succeeds(command + ["-c", check]):
                return command
    return None


def succeeds(command, seconds=20):
    """Tell whether a command exists and ends well in time (without `timeout=`, which old Pythons lack)."""
    with open(os.devnull, "r+") as nothing:
        try:
            child = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)
        except OSError:
            return False
        timer = threading.Timer(seconds, child.kill)
        timer.start()
        try:
            return child.wait() == 0
        finally:
            timer.cancel()


def continue_with_newer_python(arguments):
    """Run the same command under a newer Python; a Problem where there is none."""
    command = newer_python()
    if command is None:
        raise Problem(
            "This course needs Python %d.%d or newer, and only Python %d.%d was found: install Python 3.12 from "
            "python.org or with your package manager, then run the same command again."
            % (OLDEST + tuple(sys.version_info[:2])),
            code=2,
        )
    command = command + [os.path.realpath(__file__)] + arguments
    if os.name == "nt":
        return subprocess.call(command)  # exec would return to the prompt before the command has ended
    return os.execvp(command[0], command)


# --- the state of .venv -----------------------------------------------------------------------------------


def read_stamp():
    """Return what the last complete set-up recorded; empty where there was none."""
    try:
        with open(STAMP) as file:
            stamp = json.load(file)
    except (OSError, IOError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def wanted():
    """Return what .venv depends on: a stamp with other values is out of date."""
    import tomllib

    with open(os.path.join(ROOT, "requirements.lock"), "rb") as file:
        packages = file.read().replace(b"\r\n", b"\n")
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        settings = tomllib.load(file)
    helper = [settings.get("build-system"), settings.get("project"), settings.get("tool", {}).get("setuptools")]
    return {
        "path": os.path.normcase(VENV),
        "python": "%d.%d" % sys.version_info[:2],
        "packages": hashlib.sha256(packages).hexdigest(),
        "helper": hashlib.sha256(json.dumps(helper, sort_keys=True).encode()).hexdigest(),
    }


def installed():
    """Count the entries of each installed folder: cheap, and shows a deletion that stopped half-way."""
    libraries = os.path.join("Lib" if os.name == "nt" else os.path.join("lib", "python*"), "site-packages")
    counts = {}
    for parent in [VENV] + glob.glob(os.path.join(glob.escape(VENV), libraries)):
        for entry in os.scandir(parent):
            if entry.is_dir() and entry.name != "__pycache__":
                inside = [name for name in os.listdir(entry.path) if name != "__pycache__"]
                counts[os.path.relpath(entry.path, VENV)] = len(inside)
    return counts


def fault():
    """Return (what to do, why): "nothing", "update" the packages, or "rebuild" .venv from nothing."""
    configuration = os.path.join(VENV, "pyvenv.cfg")
    if not os.path.exists(STAMP) and not os.path.exists(configuration):
        return "rebuild", "there is none yet"
    stamp, now = read_stamp(), wanted()
    if not stamp:
        return "rebuild", "the last set-up did not finish"
    if stamp.get("path") != now["path"]:
        return "rebuild", "the folder was moved or copied"
    if stamp.get("python") != now["python"]:
        return "rebuild", "the present one was made with Python %s" % stamp.get("python")
    needed = (VENV_PYTHON, configuration, KERNEL)
    present = installed()
    recorded = stamp.get("installed", {})
    if not all(os.path.exists(path) for path in needed) or any(
        present.get(name, -1) < count for name, count in recorded.items()
    ):
        return "rebuild", "files are missing from it"
    if stamp.get("packages") != now["packages"] or stamp.get("helper") != now["helper"]:
        return "update", "requirements.lock or pyproject.toml has changed"
    return "nothing", ""


# --- set-up -----------------------------------------------------------------------------------------------


def set_up():
    """Make .venv what requirements.lock says; where it already is, return at once."""
    if fault()[0] == "nothing":
        return
    started = time.time()
    if os.path.isfile(VENV) or (os.path.islink(VENV) and not os.path.exists(VENV)):
        os.remove(VENV)
    with locked() as lock:
        task, why = fault()  # once more: another process may have finished the work meanwhile
        if task == "nothing":
            return
        print("Setting up .venv with Python %d.%d: %s." % (sys.version_info[:2] + (why,)), flush=True)
        if os.path.exists(STAMP):
            os.remove(STAMP)  # first, so that an interruption from here on is noticed
        if task == "rebuild":
            create(lock)
        install(lock)
        write_json(STAMP, dict(wanted(), installed=installed()))  # last: it stands only beside a whole .venv
    print("Set up in %.0f s." % (time.time() - started), flush=True)


@contextlib.contextmanager
def locked():
    """Hold the set-up lock of this folder."""
    while True:
        os.makedirs(VENV, exist_ok=True)
        with open(LOCK, "a") as lock:
            wait_for(lock)
            # `clean` may have removed the file while we waited, and a lock on a removed file holds nobody off.
            if os.path.exists(LOCK) and os.path.samestat(os.fstat(lock.fileno()), os.stat(LOCK)):
                yield lock
                return


def wait_for(lock, minutes=30):
    """Wait for the lock; the system gives it back when its holder ends, however that ends."""
    for attempt in range(minutes * 60):
        if try_lock(lock):
            return
        if attempt == 0:
            print("Another set-up of this folder is running; waiting for it to end.", flush=True)
        time.sleep(1)
    raise Problem("Another set-up of this folder has run for %d minutes: end it, %s" % (minutes, AGAIN))


def try_lock(lock):
    """Take the lock if it is free, and tell whether it was."""
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            raise
        return False
    return True


def create(lock):
    """Make an empty virtual environment with uv in it."""
    empty_venv()
    # The base interpreter: the one that runs this file may itself stand in the .venv that is made anew.
    python = getattr(sys, "_base_executable", None) or sys.executable
    step("making the environment", [python, "-m", "venv", VENV], 10, lock)
    # "--no-input" and few retries: fail with a sentence, soon, where the registry does not answer.
    pip = [VENV_PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--retries", "2"]
    step("installing uv", pip + [UV], 20, lock)


def empty_venv():
    """Remove everything from .venv but the lock that is being held."""
    for name in os.listdir(VENV):
        if name != os.path.basename(LOCK):
            remove(os.path.join(VENV, name))


def install(lock):
    """Install the locked packages and the helper package, and register the kernel."""
    uv = [VENV_PYTHON, "-m", "uv", "pip"]
    # sync removes what the lock does not name, but leaves pip and uv alone in an environment that venv made.
    packages = uv + ["sync", "--python", VENV_PYTHON, "requirements.lock"]
    step("installing the packages (several GB to download the first time)", packages, 180, lock)
    # setuptools is in the lock, so that the helper package is built without another download.
    helper = uv + ["install", "--python", VENV_PYTHON, "--no-deps", "--no-build-isolation", "-e", "."]
    step("installing the helper package", helper, 10, lock)
    kernel = [VENV_PYTHON, "-m", "ipykernel", "install", "--sys-prefix", "--name", "python3"]
    step("registering the kernel", kernel, 10, lock)
    settings = os.path.join(VENV, "share", "jupyter", "lab", "settings")
    os.makedirs(settings, exist_ok=True)
    write_json(os.path.join(settings, "overrides.json"), lab_settings())


def lab_settings():
    """Return JupyterLab's settings here: ask nobody for news or updates, and show Markdown as a page."""
    return {
        "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
        "@jupyterlab/docmanager-extension:plugin": {"defaultViewers": {"markdown": "Markdown Preview"}},
    }


def step(what, command, minutes, lock):
    """Run one step of the set-up; its output goes to the log, and its failure becomes a sentence."""
    print("  " + what, flush=True)
    # The child keeps the lock too: if this process is killed, the next set-up waits until the child has ended.
    options = {} if os.name == "nt" else {"pass_fds": (lock.fileno(),)}
    options.update(cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    with open(LOG, "ab") as log:
        start = log.tell()
        child = subprocess.Popen(command, stdout=log, **options)
        try:
            status = watch(child, minutes * 60)
        finally:
            stop(child)
    if status is None:
        raise Problem("Set-up stopped after %d minutes of %s: check the network, %s" % (minutes, what, AGAIN))
    if status != 0:
        with open(LOG, "rb") as log:
            log.seek(start)
            raise Problem(explain(log.read().decode("utf-8", "replace"), what))


def watch(child, seconds, every=15):
    """Wait for a child and say now and then how far it is; return its status, or None when time is up."""
    started, free = time.time(), shutil.disk_usage(VENV).free
    while time.time() - started < seconds:
        try:
            return child.wait(every)
        except subprocess.TimeoutExpired:
            written = max(0, free - shutil.disk_usage(VENV).free)
            print("    %.0f s, %.1f GB written" % (time.time() - started, written / 1e9), flush=True)
    return None


def explain(output, what):
    """Turn the output of a failed step into the sentence that says what to do."""
    for words, sentence in EXPLANATIONS:
        if any(word in output.lower() for word in words):
            return sentence
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = " (%s)" % lines[-1] if lines else ""
    return "This failed: %s%s; read .venv/set-up.log if it is there, %s" % (what, last, AGAIN)


def environment():
    """Return the variables for a command inside .venv, as its activation would set them."""
    values = dict(os.environ)
    # Modules of another installation would shadow the locked ones; make's variables belong to this make alone;
    # without bytecode beside it, torch takes seconds to import, in every kernel and in every process of a launch.
    for name in ("PYTHONHOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        values.pop(name, None)
    values["VIRTUAL_ENV"] = VENV
    values["PATH"] = BIN + os.pathsep + values.get("PATH", os.defpath)
    values["JUPYTER_PREFER_ENV_PATH"] = "1"  # this kernel, not a "python3" kernel of the user's own
    if "PIP_INDEX_URL" in values:
        values.setdefault("UV_DEFAULT_INDEX", values["PIP_INDEX_URL"])  # uv does not read pip's variable
    return values


def write_json(path, content):
    """Write a file under a temporary name, then rename it: it is there whole or not at all."""
    with open(path + ".part", "w") as file:
        json.dump(content, file, indent=1, sort_keys=True)
    os.replace(path + ".part", path)


def remove(path):
    """Remove a file, a link or a folder."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


# --- running commands in .venv ----------------------------------------------------------------------------


def run(command, minutes):
    """Run a command in .venv, in the foreground, and return its exit status."""
    child = subprocess.Popen([VENV_PYTHON] + command, cwd=ROOT, env=environment())
    try:
        status = child.wait(minutes * 60)
    except subprocess.TimeoutExpired:
        raise Problem("`%s` was stopped after %d minutes." % (" ".join(command), minutes))
    except KeyboardInterrupt:
        wait(child, 20)  # Ctrl-C went to the child as well: let it write its summary
        raise
    finally:
        stop(child)
    return status if status >= 0 else 128 - status


def stop(child):
    """End a child that still runs: ask first, then insist."""
    if child.poll() is None:
        child.terminate()
        if wait(child, 10) is None:
            child.kill()
            child.wait()


def wait(child, seconds):
    """Return the child's exit status, or None if it still runs after so many seconds."""
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def test(arguments):
    set_up()
    return run(["-m", "pytest", "--nbval"] + arguments, 180)


def refresh(arguments):
    set_up()
    return run([os.path.join("tools", "refresh.py")] + arguments, 180)


def exercises(arguments):
    set_up()
    return run([os.path.join("tools", "exercises.py")] + arguments, 180)


def checkpoints(arguments):
    set_up()
    status = run([os.path.join("tools", "pretrain_vit.py")] + arguments, 90)
    return status or run([os.path.join("tools", "pretrain_distilbert.py")] + arguments, 90)


def bench(arguments):
    set_up()
    return run(["-m", "benchmarks.ladder"] + arguments, 90)


def lint(arguments):
    set_up()
    checked = run(["-m", "ruff", "check", "."] + arguments, 10)
    formatted = run(["-m", "ruff", "format", "--check", "."] + arguments, 10)
    return checked or formatted


# --- JupyterLab -------------------------------------------------------------------------------------------


def lab(arguments):
    """Start JupyterLab on the start page, print its address once it answers, and stay until it ends."""
    set_up()
    page = "/lab/tree/" + ("index.ipynb" if os.path.exists(os.path.join(ROOT, "index.ipynb")) else "README.md")
    child = start_server(page, arguments)
    try:
        address = wait_for_address(child, page)
        print("\nJupyterLab runs here until you press Ctrl-C:\n%s\n" % address, flush=True)
        if "--no-browser" not in arguments and has_browser():
            import webbrowser

            webbrowser.open(address)
        status = child.wait()
    except KeyboardInterrupt:
        status = 0  # the usual way to end it
    finally:
        ignore_signals()
        child.stdin.close()  # tells the server to shut its kernels down and to end
        wait(child, 20)
        stop(child)
    print("JupyterLab has stopped.", flush=True)
    return status if status >= 0 else 128 - status


def start_server(page, arguments):
    """Start the server as a child that hears of Ctrl-C, and of our own end, only through its input."""
    import secrets

    os.makedirs(RUNTIME, exist_ok=True)
    values = dict(environment(), JUPYTER_RUNTIME_DIR=RUNTIME)
    # In the environment, because every user of the machine can read a command line.
    values.setdefault("JUPYTER_TOKEN", secrets.token_hex(24))
    command = [
        VENV_PYTHON,
        "-P",  # the scripts beside this file are no modules for JupyterLab
        os.path.realpath(__file__),
        "server",
        "--no-browser",
        "--ip=127.0.0.1",
        "--log-level=WARN",
        "--LabApp.log_level=WARN",
        "--ServerApp.root_dir=" + ROOT,
        "--LabApp.default_url=" + page,
        "--LabApp.extension_manager=readonly",  # the other one asks the registry for extensions
    ]
    if os.name != "nt" and os.geteuid() == 0:
        command.append("--allow-root")  # containers run as root, and Jupyter refuses to without it
    # A group of its own: Jupyter answers Ctrl-C with a question, and we answer it by stopping.
    group = {"creationflags": 0x200} if os.name == "nt" else {"start_new_session": True}
    return subprocess.Popen(command + arguments, cwd=ROOT, env=values, stdin=subprocess.PIPE, **group)


def wait_for_address(child, page, seconds=180):
    """Return the address of the start page once the server answers there."""
    from urllib.request import ProxyHandler, build_opener

    open_here = build_opener(ProxyHandler({})).open  # a proxy knows nothing of 127.0.0.1
    record = os.path.join(RUNTIME, "jpserver-%d.json" % child.pid)
    deadline = time.time() + seconds
    while time.time() < deadline:
        if child.poll() is not None:
            raise Problem("JupyterLab ended before it answered: its messages above say why.")
        try:
            with open(record) as file:
                server = json.load(file)
            address = server["url"].rstrip("/") + page + "?token=" + server["token"]
            open_here(address, timeout=10).close()
            return address
        except (OSError, ValueError, KeyError):  # not written yet, half written, or not listening yet
            time.sleep(0.2)
    raise Problem("JupyterLab did not answer within %d s: run the same command again." % seconds)


def has_browser():
    """Tell whether opening a browser can work here, and whether somebody would see it."""
    if os.environ.get("CI"):
        return False
    if os.name == "nt" or sys.platform == "darwin":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def server(arguments):
    """Be the JupyterLab server; lab starts this inside .venv."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    from jupyterlab.labapp import LabApp

    return LabApp.launch_instance(arguments) or 0


def end_with_parent():
    """End this process when the parent closes our input, which happens even if the parent is killed."""
    while os.read(0, 1024):
        pass
    from jupyter_server.serverapp import ServerApp

    loop = getattr(ServerApp.instance(), "io_loop", None) if ServerApp.initialized() else None
    if loop is not None:
        loop.add_callback(ServerApp.instance().stop)  # shuts the kernels down, then ends the main thread
        time.sleep(15)
    os._exit(1)


# --- cleaning up ------------------------------------------------------------------------------------------


def clean(arguments):
    """Remove .venv, caches and build leftovers; data, results and logs of training runs stay."""
    removed, caches = [], 0
    for folder, names, _ in os.walk(ROOT):
        for name in list(names):
            path = os.path.join(folder, name)
            if is_leftover(path):
                names.remove(name)
                remove_venv() if path == VENV else remove(path)
                if name in ("__pycache__", ".ipynb_checkpoints"):
                    caches += 1
                else:
                    removed.append(os.path.relpath(path, ROOT))
            elif name in (".git", "data", "results", "lightning_logs"):
                names.remove(name)
    if caches:
        removed.append("%d cache folders of Python and Jupyter" % caches)
    print("Removed: " + ", ".join(removed) + "." if removed else "There was nothing to remove.")
    return 0


def remove_venv():
    """Remove .venv, its stamp first: a removal that stops half-way leaves a .venv that is noticed."""
    with locked():
        if os.path.exists(STAMP):
            os.remove(STAMP)
        empty_venv()
    remove(VENV)


def is_leftover(path):
    """Tell whether a folder can be made again from the rest of the repository."""
    name = os.path.basename(path)
    if name in ("__pycache__", ".ipynb_checkpoints", ".pytest_cache", ".ruff_cache"):
        return True
    at_root = os.path.dirname(path) == ROOT
    return at_root and (name in (".venv", "build", "dist") or name.endswith(".egg-info"))


# --- the command line -------------------------------------------------------------------------------------


def show_help(arguments):
    print(HELP)
    return 0


COMMANDS = {
    "help": show_help,
    "lab": lab,
    "test": test,
    "refresh": refresh,
    "exercises": exercises,
    "bench": bench,
    "checkpoints": checkpoints,
    "lint": lint,
    "clean": clean,
    "server": server,
}


def main(arguments):
    """Run one command; whatever goes wrong ends in a sentence and a status, never in a traceback."""
    name = arguments[0] if arguments else "help"
    try:
        if name not in COMMANDS:
            raise Problem("There is no command %r: `python3 tools/course.py help` lists them." % name, code=2)
        if name != "help" and sys.version_info < OLDEST:
            return continue_with_newer_python(arguments)
        if name != "server":
            end_on_signals()
        return COMMANDS[name](arguments[1:])
    except Problem as problem:
        print(problem, file=sys.stderr)
        return problem.code
    except KeyboardInterrupt:
        ignore_signals()
        print("\nStopped; the same command starts again and repairs what was half done.", file=sys.stderr)
        return 130
    except (OSError, IOError) as error:
        if error.errno == errno.EPIPE:  # the reader of our output has gone, as in `make | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print(explain(str(error), "using the files of this folder"), file=sys.stderr)
        return 1


def end_on_signals():
    """Let a request to end (a closed terminal, a job's end) take the same way out as Ctrl-C, past every finally."""

    def end(number, frame):
        raise SystemExit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), end)


def ignore_signals():
    """Finish what is being ended, even when Ctrl-C is pressed once more."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
