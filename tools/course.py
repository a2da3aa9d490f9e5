#!/usr/bin/env python3
"""Set up .venv with uv if needed, then run a command in it. `make` calls this script; without make:

python tools/course.py lab [OPTIONS]     open the course in JupyterLab
python tools/course.py test [OPTIONS]    run every test and notebook (pytest --nbval)
python tools/course.py run ARGUMENTS     run a script, or a module with -m, in .venv's Python

TORCH_BACKEND selects where PyTorch comes from: cpu, cu130 and the like (PyTorch's own index), or registry.
"""
# Standard library only, and syntax that Python 3.6 can parse, so that an old Python can still say what is missing.

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMMANDS = {"lab": "-m jupyterlab --config=tools/lab/config.py", "test": "-m pytest --nbval", "run": ""}
ROOT, VERSION = Path(__file__).resolve().parents[1], sys.version_info
VENV, BIN = ROOT / ".venv", "Scripts" if os.name == "nt" else "bin"
PYTHON = str(VENV / BIN / "python") + (".exe" if os.name == "nt" else "")
LIBRARY = "Lib/site-packages" if os.name == "nt" else "lib/python3.*/site-packages"
LOCK = ROOT / "requirements.lock"
DIGEST = hashlib.sha256((ROOT / "requirements.txt").read_bytes() + LOCK.read_bytes()).hexdigest()
ASKED = os.environ.get("TORCH_BACKEND", "")
SENTENCES = {  # by a pattern in the output of a failed step
    "no space left|os error (28|112)|quota exceeded": "The disk is full: free 8 GB (`uv cache clean` frees some)",
    "certificate": "A certificate was not accepted: point SSL_CERT_FILE and PIP_CERT at your organisation's CA file",
    "no interpreter|python-build": "The course needs Python 3.11 to 3.14, but none was found: install Python 3.12",
    "download.pytorch.org": "PyTorch's own index cannot be reached: go online, or set TORCH_BACKEND=registry",
    "connect|dns error|sending request|timed out|proxy|distribution found for uv": "The package registry cannot be "
    "reached: go online (a proxy goes into HTTPS_PROXY, a mirror into PIP_INDEX_URL and UV_DEFAULT_INDEX)",
    "ensurepip|no module named venv": "This Python cannot create virtual environments: install uv or python3-venv",
    "": "The set-up failed: fix the problem shown above",
}


def need(problem):
    """Exit with a sentence that explains a problem (a failed step's output); do nothing if there is none."""
    if problem:
        words = next(words for words in SENTENCES if re.search(words, problem, re.IGNORECASE))
        sys.exit(("" if words else problem + "\n") + SENTENCES[words] + ", then run the same command again.")


def step(*command, **variables):
    """Run a step of the set-up; return an empty string if it succeeded, and otherwise its output."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    said, variables = "", {**os.environ, **variables}
    with subprocess.Popen(command, cwd=ROOT, env=variables, text=True, errors="replace", **pipes) as child:
        for line in child.stdout:
            said += line
            if re.match(r"\s*(Downloading .*\d{3}\.|Downloaded |Prepared |Installed )", line):
                print("  " + line.strip(), flush=True)
    return said + f"{command[0]} ended with status {child.returncode}" if child.returncode else ""


def entries(venv):
    """Count the entries in all package folders: this is cheap, and reveals a deletion that stopped halfway."""
    return sum(1 for _ in venv.glob(LIBRARY + "/*/[!_]*"))


def ready():
    """Tell whether .venv is complete and up to date, with PyTorch from the source that TORCH_BACKEND asks for."""
    with contextlib.suppress(OSError, ValueError):
        digest, count, backend = (VENV / "set-up").read_text().split()
        return digest == DIGEST and ASKED in ("", backend) and shutil.which(PYTHON) and entries(VENV) >= int(count)
    return False


def install(pip, work):
    """Install the packages, by default without CUDA if there is no NVIDIA GPU; return the PyTorch backend."""
    gpu = Path("/proc/driver/nvidia/gpus").exists() or (shutil.which("nvidia-smi") and not step("nvidia-smi", "-L"))
    usual = {"linux": "registry" if gpu else "cpu", "win32": "auto" if gpu else "registry"}
    backend = ASKED or usual.get(sys.platform, "registry")
    # The lock's CUDA packages belong to the registry's PyTorch; other wheels bring their own, or none.
    (work / "lock").write_text(re.sub(r"(?m)^(nvidia-|cuda-|triton).*$", "", LOCK.read_text()))
    command = [*pip, "-r", "requirements.txt", "-c", work / "lock", "--torch-backend", backend]
    # Offline first: earlier downloads may be enough. The probe must not hang where a firewall blocks PyTorch's index.
    probe = [*pip, "--dry-run", "--no-deps", "torch", *command[-4:]]
    if backend != "registry" and not ASKED and step(*command, "--offline"):
        if step(*probe, UV_HTTP_RETRIES="0", UV_HTTP_TIMEOUT="5", UV_HTTP_CONNECT_TIMEOUT="5"):
            print("  PyTorch's own index cannot be reached: using registry wheels (on Linux, with CUDA).", flush=True)
            backend = "registry"
    if backend == "registry":
        command = [*pip, "-r", "requirements.txt", "-c", LOCK]
    need(step(*command, "--offline") and step(*command))
    return backend


def make(venv, work):
    """Make an environment that holds everything and still works after it is moved."""
    if not os.access(os.path.expanduser("~"), os.W_OK):
        os.environ.setdefault("UV_CACHE_DIR", str(work / "cache"))
    uv = "uv"
    if not shutil.which(uv) or step(uv, "pip", "install", "--torch-backend", "cpu", "--help"):  # missing, or too old
        need(step(sys.executable, "-m", "venv", work / "uv"))
        need(step(work / "uv" / BIN / "python", "-m", "pip", "install", "--retries", "1", "-c", LOCK, "uv"))
        uv = work / "uv" / BIN / "uv"
    # This Python, or in a .venv the one that it is based on; if that is too old or too new, uv finds a different one.
    python = getattr(sys, "_base_executable", sys.executable) if (3, 11) <= VERSION < (3, 15) else ">=3.11,<3.14"
    need(step(uv, "venv", "--relocatable", "--no-project", "--prompt", "speedlab", "--python", python, venv))
    backend = install([uv, "pip", "install", "--python", venv], work)
    [library] = venv.glob(LIBRARY)
    (library / "speedlab.pth").write_text(os.path.relpath(ROOT, VENV / library.relative_to(venv)))
    (venv / "set-up").write_text(f"{DIGEST} {entries(venv)} {backend}")


def set_up():
    """Make a new .venv next to the old one, under a lock, and rename it once it is complete."""
    with LOCK.open("r+") as lock:
        with contextlib.suppress(ImportError):  # Windows has no fcntl: there, two set-ups at once both do the work
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in ROOT.glob(".venv-*"):
                shutil.rmtree(left, ignore_errors=True)
        if not ready():
            print("Setting up .venv; earlier downloads are reused.", flush=True)
            with tempfile.TemporaryDirectory(prefix=".venv-", dir=ROOT) as work:
                make(Path(work, "new"), Path(work))
                if os.path.lexists(VENV):
                    VENV.rename(Path(work, "old"))
                Path(work, "new").rename(VENV)


def main(command, *arguments):
    """Set up what is missing, then run the command; any failure ends in one clear sentence."""
    for name in ("PYTHONHOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "UV_TORCH_BACKEND"):
        os.environ.pop(name, None)
    os.environ.update(VIRTUAL_ENV=str(VENV), PATH=str(VENV / BIN) + os.pathsep + os.environ.get("PATH", os.defpath))
    os.environ["JUPYTER_RUNTIME_DIR"] = str(VENV / "runtime")  # the default is in the home folder
    python = [PYTHON, *COMMANDS[command].split(), *arguments]
    try:
        if not ready():
            need("no interpreter" if sys.version_info < (3, 8) else "")
            set_up()
        os.chdir(ROOT)
        sys.exit(subprocess.call(python)) if os.name == "nt" else os.execv(python[0], python)
    except OSError as error:
        need(str(error))
    except KeyboardInterrupt:
        sys.exit("Stopped: run the same command to start over.")


if __name__ == "__main__":
    main(*sys.argv[1:]) if sys.argv[1:2] and sys.argv[1] in COMMANDS else sys.exit(__doc__)
