"""Hosted places: links only where the repository has an address, a set-up that keeps their PyTorch, parts of CI."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hosted
import hosted_setup
import nbformat
import pytest
import readme
import shard
from notebooks import ROOT, find

REPO = "someone/faster"
LESSON = ROOT / "code-units" / "9.1-mixed-precision" / "2-autocast.ipynb"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
REQUIREMENTS = (ROOT / "requirements.txt").read_text(encoding="utf-8")


def test_without_an_address_there_is_no_link(monkeypatch):
    monkeypatch.setattr(hosted, "repository", lambda: "")
    assert hosted.links(LESSON, "") == {} and readme.places() == ""


def test_links_name_the_notebook_and_the_repository(monkeypatch):
    found = hosted.links(LESSON, REPO)
    assert {"Colab", "Kaggle", "Codespaces", "Lightning Studio"} <= set(found)
    name = "code-units/9.1-mixed-precision/2-autocast.ipynb"
    assert found["Colab"] == f"https://colab.research.google.com/github/{REPO}/blob/hosted/{name}"
    assert found["Kaggle"].endswith("github.com%2Fsomeone%2Ffaster%2Fblob%2Fhosted%2F" + name.replace("/", "%2F"))
    monkeypatch.setattr(hosted, "repository", lambda: REPO)
    assert "colab.research.google.com" in readme.places() and "codespaces.new/someone/faster" in readme.places()


@pytest.mark.parametrize(("peak", "offered"), [(None, False), (1.2e9, True), (2.5e9, False)])
def test_binder_is_offered_only_where_its_memory_is_known_to_be_enough(monkeypatch, peak, offered):
    monkeypatch.setattr(hosted, "peak_bytes", lambda path: peak)
    assert ("Binder" in hosted.links(LESSON, REPO)) == offered


def test_a_hosted_notebook_is_the_lesson_with_one_cell_more():
    lesson = nbformat.read(LESSON, as_version=4)
    made = hosted.with_set_up(lesson, "code-units/9.1-mixed-precision", REPO)
    nbformat.validate(made)
    number = next(i for i, cell in enumerate(made.cells) if cell.cell_type == "code")
    source = made.cells.pop(number).source
    assert made.cells == lesson.cells
    assert f"https://github.com/{REPO}" in source and source.endswith(
        "hosted_setup.py code-units/9.1-mixed-precision"
    )


def test_what_is_no_repository_is_refused(tmp_path):
    command = [sys.executable, "tools/hosted.py", "--repo", "https://github.com/x/y"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1 and "give owner/name" in run.stderr


def test_the_set_up_never_replaces_the_pytorch_that_stands_there():
    present = {"torch": "2.12.1+cu130", "torchvision": "0.27.0", "numpy": "2.0.2", "ipywidgets": "7.7.1"}
    wanted, held = hosted_setup.plan(REQUIREMENTS, present)
    names = {re.match(r"[\w.-]+", line)[0] for line in wanted}
    assert not names & {"torch", "torchvision", "numpy", "ipywidgets", "jupyterlab", "pytest", "ruff"}
    assert {"lightning", "transformers", "peft", "ray"} <= names
    assert set(held) == {f"{name}=={version}" for name, version in present.items()}
    assert "torch" in {re.match(r"[\w.-]+", line)[0] for line in hosted_setup.plan(REQUIREMENTS, {})[0]}


def test_every_library_that_lessons_import_is_installed_by_the_set_up():
    needed = set()
    for path in find(["code-units"]):
        code = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code")
        needed |= set(re.findall(r"(?m)^\s*(?:import|from) (\w+)", code))
    packages = importlib.metadata.packages_distributions()
    owners = {owner.lower() for name in needed for owner in packages.get(name, [])}
    direct = {re.match(r"[\w.-]+", x)[0] for x in REQUIREMENTS.splitlines() if x and not x.startswith("#")}
    wanted = {re.match(r"[\w.-]+", line)[0] for line in hosted_setup.plan(REQUIREMENTS, {})[0]}
    assert owners & direct <= wanted | {"pip"}


@pytest.mark.parametrize(
    ("present", "said"),
    [({"torch": "2.14.1+cu126"}, ["torch 2.14.1+cu126 (tested from 2.15)"]), ({"torch": "2.15.0+cpu"}, [])],
)
def test_an_older_pytorch_is_named(present, said):
    assert hosted_setup.too_old(REQUIREMENTS, present) == said


def test_the_set_up_makes_the_package_importable_from_a_read_only_checkout(tmp_path):
    """With everything installed there is nothing to do but to find the package and the unit's folder."""
    code = (
        "import subprocess, sys; subprocess.run = lambda *a, **k: subprocess.CompletedProcess(a, 0, '', '');"
        f"sys.path = [p for p in sys.path if p and not p.startswith({str(ROOT)!r}) or 'site-packages' in p];"
        "sys.argv = ['hosted_setup.py', 'code-units/9.1-mixed-precision'];"
        f"import runpy; runpy.run_path({str(ROOT / 'tools' / 'hosted_setup.py')!r}, run_name='__main__');"
        "import os, speedlab; print(os.getcwd(), speedlab.__file__, os.environ['PYTHONPATH'], sep='\\n')"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    folder, package, path = run.stdout.splitlines()[-3:]
    assert Path(folder) == LESSON.parent and Path(package).parent == ROOT / "speedlab" and path == str(ROOT)


@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_the_union_of_the_parts_is_everything(parts):
    shares = [shard.shard(number, parts) for number in range(1, parts + 1)]
    files = [name for share in shares for name in share]
    everything = {p.relative_to(ROOT).as_posix() for p in [*find(), *(ROOT / "tests").rglob("test_*.py")]}
    assert set(files) == everything and len(files) == len(everything)
    loads = [sum(shard.files()[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(shard.files().values())


def test_actions_are_pinned_and_run_what_make_runs():
    assert {path.stem for path in WORKFLOWS} >= {"tests", "weekly", "hosted"}
    for path in WORKFLOWS:
        for used, comment in re.findall(r"uses: (\S+)(.*)", path.read_text(encoding="utf-8")):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used) and " # v" in comment, f"{path.name}: pin {used}"
    tests = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    assert "python tools/course.py test $(python tools/shard.py" in tests
    parts = re.search(r"part: \[(.+)\]", tests)[1].split(", ")
    assert parts == [f"{n}/{len(parts)}" for n in range(1, len(parts) + 1)]
    for system in ("macos", "windows"):
        listed = re.findall(rf"os: {system}.*part: (\d)/(\d)", tests)
        assert [int(n) for n, _ in listed] == list(range(1, int(listed[0][1]) + 1))


def test_binder_and_the_container_use_the_usual_set_up():
    assert "tools/course.py run" in (ROOT / ".binder" / "postBuild").read_text(encoding="utf-8")
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert "tools/course.py run" in container["postCreateCommand"]
    assert container["containerEnv"] == {"TORCH_BACKEND": "cpu"}
