"""The checks of exercise 3 accept the solution, see a stub, and explain planted mistakes; two processes run them."""

import ast
import json
from pathlib import Path

import pytest

from speedlab.checks import multi_gpu as checks

ROOT = Path(__file__).resolve().parent.parent
NAME = "exercise-3-multi-gpu.ipynb"


def sources(folder: str) -> dict[str, str]:
    """The source of each function that a notebook defines."""
    cells = json.loads((ROOT / folder / NAME).read_text(encoding="utf-8"))["cells"]
    code = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    return {n.name: ast.unparse(n) for n in ast.parse(code).body if isinstance(n, ast.FunctionDef)}


SOLUTION = sources("solutions")
# planted mistakes: the task, what to replace in the solution, by what, and words of the hint that is expected
PLANTED = {
    "past the wrapper": ("train_ddp", ("model(inputs)", "model.module(inputs)"), "different weights"),
    "no sampler": ("train_ddp", ("DistributedSampler(rows, seed=0)", "DistributedSampler(rows, 1, 0)"), "same rows"),
    "no epoch": ("train_ddp", ("sampler.set_epoch(epoch)", "pass"), "set_epoch"),
    "whole batch": ("train_ddp", ("// world_size", "// 1"), "its share"),
    "never silent": ("train_ddp", ("model.no_sync()", "torch.enable_grad()"), "no_sync"),
    "order": ("mended", ("sampler.set_epoch(epoch)", "pass"), "same order"),
    "rate": ("mended", ("lr=lr * world_size", "lr=lr"), "linear rule"),
    "metric": ("mended", ("dist.all_reduce(right)", "pass"), "Sum the counts"),
    "mean of means": ("mended", ("/ len(held_out)", "/ world_size / len(labels)"), "Sum the counts"),
    "files": ("mended", ("if rank == 0:", "if True:"), "saved 1 and 1 times"),
    "an error": ("mended", ("losses = []", "losses = nothing"), "NameError"),
    # the last one: after it the ranks no longer talk to each other
    "branch": ("mended", ("dist.all_reduce((loss", "rank or dist.all_reduce((loss"), "branch"),
}


def planted(name: str) -> tuple[str, str]:
    task, (old, new), _ = PLANTED[name]
    assert old in SOLUTION[task], f"the solution no longer has {old!r}"
    return task, SOLUTION[task].replace(old, new)


@pytest.fixture(scope="module")
def reports() -> dict[str, list[dict]]:
    """What all answers did on two processes, in one launch, by source."""
    answers = [(task, SOLUTION[task], task) for task in ("train_ddp", "mended")]
    answers += [(task, source, task) for task, source in map(planted, PLANTED)]
    found = checks.on_ranks(answers)
    assert len(found) == len(answers)
    return {source: report for (_, source, _), report in zip(answers, found, strict=True)}


@pytest.fixture
def verdict(reports, monkeypatch, capsys):
    """A function that checks a source and returns what is said after the title; the launch was made before."""

    def run(task: str, source: str) -> str:
        names: dict[str, object] = {}
        exec(source, names)
        monkeypatch.setattr(checks.inspect, "getsource", lambda _: source)
        monkeypatch.setattr(checks, "on_ranks", lambda answers: [reports[answers[0][1]]])
        capsys.readouterr()
        getattr(checks, task)(names[task])
        return capsys.readouterr().out.split(": ", 1)[1].strip()

    return run


@pytest.mark.parametrize("task", ["train_ddp", "mended"])
def test_the_solution_is_correct(task, verdict):
    assert verdict(task, SOLUTION[task]) == "correct"


@pytest.mark.parametrize("task", ["train_ddp", "mended"])
def test_a_stub_is_not_attempted_and_starts_no_process(task, verdict, monkeypatch):
    assert verdict(task, sources("exercises")[task]) == "not attempted yet"


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_explained(name, verdict):
    said = verdict(*planted(name))
    assert said.startswith("not yet right") and PLANTED[name][2] in said


def test_processes_that_do_not_end_are_stopped_and_told():
    with pytest.raises(checks.NotYetError, match="had not ended after 1 s"):
        checks.on_ranks([("train_ddp", "import time\ntime.sleep(600)", "train_ddp")], timeout=1)
