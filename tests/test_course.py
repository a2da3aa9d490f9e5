"""The commands of tools/course.py: they set up once, repair what is broken, and say in a sentence what is missing."""

import ast
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
NAMES = ["lab", "test", "refresh", "exercises", "bench", "checkpoints", "lint", "clean"]

# Runs a command of a copied course.py with this interpreter in place of .venv's, so that nothing is installed.
DRIVER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("course", sys.argv[1])
course = importlib.util.module_from_spec(spec)
spec.loader.exec_module(course)
course.set_up = lambda: None
course.VENV_PYTHON = sys.executable
sys.exit(course.main(sys.argv[2:]))
"""

OLD_PYTHON = """
import runpy, sys
sys.version_info = (3, 8, 18)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def load(path):
    spec = importlib.util.spec_from_file_location("course", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path):
    """A copy of what set-up reads, in a folder with spaces."""
    copy = tmp_path / "a folder with spaces"
    (copy / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "course.py", copy / "tools")
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    (copy / "README.md").write_text("# A copy\n")
    return copy


@pytest.fixture
def course(folder):
    return load(folder / "tools" / "course.py")


def pretend_environment(course):
    """Lay out the files that a finished set-up leaves, without installing anything."""
    library = "Lib" if os.name == "nt" else f"lib/python3.{sys.version_info.minor}"
    package = Path(course.VENV, library, "site-packages", "torch")
    for path in (course.VENV_PYTHON, course.KERNEL, Path(course.VENV, "pyvenv.cfg"), package / "a", package / "b"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
    return package


def finished(course):
    package = pretend_environment(course)
    course.write_json(course.STAMP, dict(course.wanted(), installed=course.installed()))
    assert course.fault() == ("nothing", "")
    return package


# --- an old Python ---


@pytest.mark.parametrize("name", NAMES)
def test_an_old_python_gives_one_sentence(folder, name):
    child = subprocess.run(
        [sys.executable, "-c", OLD_PYTHON, str(folder / "tools" / "course.py"), name],
        env={"PATH": str(folder), "SYSTEMROOT": os.environ.get("SYSTEMROOT", "")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == 2
    assert child.stdout == ""
    assert re.fullmatch(r"This course needs Python 3\.11 or newer, .* run the same command again\.\n", child.stderr)
    assert not (folder / ".venv").exists()


def test_an_old_python_can_read_the_file():
    source = (ROOT / "tools" / "course.py").read_text(encoding="ascii")
    tree = ast.parse(source, feature_version=(3, 4))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.AnnAssign | ast.NamedExpr)]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.cause]


def test_a_newer_python_on_the_path_takes_over(course, monkeypatch):
    calls = []
    monkeypatch.setattr(course.sys, "version_info", (3, 8, 18))
    monkeypatch.setattr(course, "succeeds", lambda command: command[0] == "python3.12")
    monkeypatch.setattr(course.os, "execvp", lambda name, command: calls.append(command))
    monkeypatch.setattr(course.subprocess, "call", lambda command: calls.append(command))
    course.main(["test", "-q"])
    assert calls == [["python3.12", os.path.realpath(course.__file__), "test", "-q"]]


def test_a_name_on_the_path_that_does_not_work_is_passed_over(course):
    assert course.succeeds([sys.executable, "-c", ""])
    assert not course.succeeds([sys.executable, "-c", "raise SystemExit(127)"])
    assert not course.succeeds(["no-such-python"])
    assert not course.succeeds([sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.5)


# --- the state of .venv ---


def test_a_finished_environment_is_used_at_once(course, monkeypatch):
    finished(course)
    monkeypatch.setattr(course, "step", lambda *_: pytest.fail("nothing is to be installed"))
    started = time.perf_counter()
    course.set_up()
    assert time.perf_counter() - started < 0.5


def remove_stamp(course, package):
    os.remove(course.STAMP)


def cut_stamp(course, package):
    Path(course.STAMP).write_text('{"path": "')


def remove_python(course, package):
    os.remove(course.VENV_PYTHON)


def remove_kernel(course, package):
    os.remove(course.KERNEL)


def remove_file(course, package):
    (package / "b").unlink()


def remove_package(course, package):
    shutil.rmtree(package)


def remove_scripts(course, package):
    shutil.rmtree(course.BIN)


def other_python(course, package):
    stamp = course.read_stamp()
    course.write_json(course.STAMP, dict(stamp, python="3.9"))


def change_lock(course, package):
    with open(Path(course.ROOT, "requirements.lock"), "a") as file:
        file.write("another==1.0\n")


def change_dependencies(course, package):
    path = Path(course.ROOT, "pyproject.toml")
    path.write_text(path.read_text().replace('"numpy"', '"numpy>=1"'))


@pytest.mark.parametrize(
    "damage, task",
    [
        (remove_stamp, "rebuild"),
        (cut_stamp, "rebuild"),
        (remove_python, "rebuild"),
        (remove_kernel, "rebuild"),
        (remove_file, "rebuild"),
        (remove_package, "rebuild"),
        (remove_scripts, "rebuild"),
        (other_python, "rebuild"),
        (change_lock, "update"),
        (change_dependencies, "update"),
    ],
)
def test_damage_is_noticed(course, damage, task):
    damage(course, finished(course))
    assert course.fault()[0] == task


def test_a_moved_folder_is_noticed(course, folder, tmp_path):
    finished(course)
    moved = shutil.move(folder, tmp_path / "moved")
    assert load(moved / "tools" / "course.py").fault() == ("rebuild", "the folder was moved or copied")


def test_settings_of_the_linter_do_not_matter(course):
    finished(course)
    path = Path(course.ROOT, "pyproject.toml")
    path.write_text(path.read_text() + "\n[tool.other]\nkey = 1\n")
    assert course.fault() == ("nothing", "")


def test_a_set_up_that_stops_at_any_step_is_made_anew(course, monkeypatch):
    done, plan = [], {}

    def step(what, command, minutes, lock):
        assert not os.path.exists(course.STAMP)
        done.append(what)
        if len(done) == plan["fails at"]:
            raise course.Problem("stopped")
        pretend_environment(course)

    monkeypatch.setattr(course, "step", step)
    for number in (1, 2, 3, 4, 5):
        plan["fails at"] = number
        done.clear()
        with pytest.raises(course.Problem):
            course.set_up()
        assert course.fault()[0] == "rebuild"
    plan["fails at"] = None
    done.clear()
    course.set_up()
    assert len(done) == 5
    assert course.fault() == ("nothing", "")


def test_only_one_set_up_at_a_time(course):
    with course.locked(), open(course.LOCK, "a") as other:
        assert not course.try_lock(other)
    with open(course.LOCK, "a") as other:
        assert course.try_lock(other)


# --- bad days ---


def test_without_a_network_one_sentence_says_what_to_do(folder):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but nobody listens
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
        settings = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": nowhere,
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "",
            "UV_INDEX_URL": nowhere,
            "UV_DEFAULT_INDEX": nowhere,
        }
        child = subprocess.run(
            [sys.executable, str(folder / "tools" / "course.py"), "test"],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert child.returncode == 1
    assert re.fullmatch(r"The package registry could not be reached: .* repairs \.venv\.\n", child.stderr)
    assert load(folder / "tools" / "course.py").fault() == ("rebuild", "the last set-up did not finish")


@pytest.mark.parametrize(
    "output, sentence",
    [
        ("error: failed to write: No space left on device (os error 28)", "The disk is full"),
        ("Caused by: dns error: failed to lookup address information", "could not be reached"),
        ("Caused by: invalid peer certificate: UnknownIssuer", "certificate was not accepted"),
        ("The virtual environment was not created because ensurepip is not available.", "venv package"),
        ("first\nsomething else broke\n", "(something else broke)"),
    ],
)
def test_a_failure_becomes_a_sentence(course, output, sentence):
    explained = course.explain(output, "installing the packages")
    assert sentence in explained
    assert "\n" not in explained
    assert explained.endswith(course.AGAIN)


def test_an_unknown_command_gives_one_sentence(course, capsys):
    assert course.main(["labb"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_status_of_a_command_is_passed_on(folder):
    (folder / "tools" / "exercises.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(3)\n")
    child = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder / "tools" / "course.py"), "exercises", "a b", "c"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (child.returncode, child.stdout) == (3, "['a b', 'c']\n")


# --- JupyterLab ---


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_lab_prints_an_address_that_answers_and_leaves_nothing_behind(folder, tmp_path, end):
    (folder / "index.ipynb").write_text(json.dumps({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    quiet = {"CI": "1", "JUPYTER_CONFIG_DIR": str(tmp_path / "c"), "JUPYTER_DATA_DIR": str(tmp_path / "d")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER_")}
    command = [sys.executable, "-c", DRIVER, str(folder / "tools" / "course.py"), "lab", "--no-browser"]
    log = tmp_path / "output"
    with socket.socket() as busy, open(log, "w") as output:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        lab = subprocess.Popen(
            [*command, f"--port={port}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, **quiet},
        )
        processes = [psutil.Process(lab.pid)]
        try:
            address = wait_for_address(lab, log)
            processes += processes[0].children(recursive=True)
            used = int(re.match(r"http://127\.0\.0\.1:(\d+)/lab/tree/index\.ipynb\?token=\w+$", address).group(1))
            assert used != port
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=20) as answer:
                assert answer.status == 200
            assert len(processes) > 1
            getattr(lab, end)()
            assert psutil.wait_procs(processes, timeout=40)[1] == []
        finally:
            for process in processes:
                if process.is_running():
                    process.kill()
            lab.wait(20)
    assert "Traceback" not in log.read_text()


def wait_for_address(lab, log, seconds=90):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and lab.poll() is None:
        lines = [line for line in log.read_text().splitlines(keepends=True) if line.startswith("http")]
        if lines and lines[0].endswith("\n"):
            return lines[0].strip()
        time.sleep(0.1)
    pytest.fail("no address within the time: " + log.read_text())


def test_lab_says_so_when_the_server_does_not_start(folder):
    script = folder / "tools" / "course.py"
    script.write_text(script.read_text().replace("from jupyterlab.labapp import LabApp", "sys.exit('no such port')"))
    child = subprocess.run(
        [sys.executable, "-c", DRIVER, str(script), "lab"],
        env={**os.environ, "CI": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert child.returncode == 1
    assert child.stderr == "no such port\nJupyterLab ended before it answered: its messages above say why.\n"


# --- cleaning up, and the thin files around ---


def test_clean_removes_what_can_be_made_again_and_nothing_else(course, folder, capsys):
    finished(course)
    gone = ["speedlab/__pycache__/a.pyc", ".pytest_cache/a", "speedlab.egg-info/a", "build/a", ".venv/pyvenv.cfg"]
    kept = ["data/__pycache__/a", "results/build/a", "lightning_logs/a", "speedlab/build/a", "images/a.png"]
    for name in gone + kept:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert course.main(["clean"]) == 0
    said = capsys.readouterr().out
    assert all((folder / name).exists() for name in kept)
    assert not any((folder / name).parent.exists() for name in gone)
    assert all(name in said for name in (".venv", ".pytest_cache", "build", "cache folders"))
    assert course.main(["clean"]) == 0
    assert capsys.readouterr().out == "There was nothing to remove.\n"


def test_help_lists_every_command(course, folder):
    texts = [course.HELP]
    if shutil.which("make"):
        for target in ([], ["help"]):
            command = ["make", *target, f'PYTHON="{sys.executable}"']
            environment = {
                name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")
            }
            made = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
            assert made.returncode == 0, made.stderr
            texts.append(made.stdout)
    for text in texts:
        assert re.findall(r"^make (\w+) ", text, re.MULTILINE) == NAMES
        assert "python3 tools/course.py lab" in text
    assert set(NAMES) < set(course.COMMANDS)


def test_ci_only_runs_make_test():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[:2] == ["#!/usr/bin/env bash", "set -euo pipefail"]
    assert lines[2].startswith("cd ")
    assert lines[3:] == ["make test"]
    assert os.name == "nt" or os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_direct_dependencies_are_locked_and_stand_in_one_place():
    def name(line):
        return re.match(r"[\w.-]+", line).group().lower().replace("_", "-")

    direct = {name(line) for line in (ROOT / "requirements.txt").read_text().splitlines() if line[:1].isalpha()}
    locked = {name(line) for line in (ROOT / "requirements.lock").read_text().splitlines() if line[:1].isalnum()}
    assert direct <= locked
    assert "setuptools" in locked  # builds the helper package without a download
    environment = (ROOT / "environment.yml").read_text()
    assert re.findall(r"^\s+- (-.*)$", environment, re.MULTILINE) == ["-r requirements.txt", "-e ."]
