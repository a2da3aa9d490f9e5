"""The five scripts from plain PyTorch to FSDP: run as a user runs them, and each a small step from the one before."""

import difflib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "code-units" / "9.8-fabric"
SCRATCH, PYTORCH, FABRIC, MIXED, FSDP = (path.name for path in sorted(FOLDER.glob("0*.py")))
STEPS = 4


def result(name: str, *extra: str) -> dict:
    """Run a script for four steps as from a command line, and read the JSON that it prints last."""
    command = [sys.executable, name, "--scale=quick", "--epochs=1", "--images=100", "--batch=24", *extra]
    # on the CPU everywhere: a GPU's attention adds up gradients in no fixed order, and two processes need two GPUs
    options = {"cwd": FOLDER, "env": {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, "stdin": subprocess.DEVNULL}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **options, **pipes, text=True) as child:
        try:
            said, errors = child.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            for process in [*psutil.Process(child.pid).children(recursive=True), child]:
                process.kill()
            raise
    assert child.returncode == 0, errors
    *progress, last = said.splitlines()
    assert any(re.search(r"step 4 of 4: [\d,]+ images/s", line) for line in progress), said
    found = json.loads(last)
    assert len(found["losses"]) == STEPS and len(found["seconds"]) == 1 and 0 <= found["accuracies"][0] <= 1
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    return {name: result(name) for name in (SCRATCH, PYTORCH, FABRIC, MIXED)} | {FSDP: result(FSDP, "--devices=2")}


def test_fabric_changes_no_bit(results):
    assert results[FABRIC]["losses"] == results[PYTORCH]["losses"]
    assert results[FABRIC]["accuracies"] == results[PYTORCH]["accuracies"]
    assert results[FABRIC]["state_bytes"] == results[PYTORCH]["state_bytes"]


def test_pretrained_weights_and_bf16_change_the_losses(results):
    assert results[SCRATCH]["losses"] != results[PYTORCH]["losses"]
    assert results[MIXED]["losses"] != results[FABRIC]["losses"]
    assert results[MIXED]["losses"] == pytest.approx(results[FABRIC]["losses"], abs=0.05)


def test_two_processes_learn_as_one_and_hold_half_the_state_each(results):
    first, second = results[FSDP]["state_bytes"]
    whole = results[MIXED]["state_bytes"][0]
    assert first == pytest.approx(whole / 2, rel=0.02) and second == pytest.approx(whole / 2, rel=0.02)
    # Fabric gives several processes batches of its own order, so the losses agree in the mean only
    mean = [sum(results[name]["losses"]) / STEPS for name in (FSDP, MIXED)]
    assert mean[0] == pytest.approx(mean[1], abs=0.3)


@pytest.mark.parametrize("name", [SCRATCH, PYTORCH, FABRIC, MIXED, FSDP])
def test_a_script_is_short_and_whole(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    assert {"parse", "accuracy", "main"} <= set(re.findall(r"^def (\w+)", text, re.M)), "it imports no other script"


def changed(before: str, after: str) -> tuple[list[str], list[str]]:
    """The lines of the code that go and that come, the title aside."""
    texts = ((FOLDER / name).read_text(encoding="utf-8").splitlines()[1:] for name in (before, after))
    lines = list(difflib.ndiff(*texts))
    return tuple([line[2:].strip() for line in lines if line.startswith(sign) and line[2:].strip()] for sign in "-+")


def test_each_script_changes_what_its_title_names():
    assert changed(SCRATCH, PYTORCH)[1] == ['model = models.vit("base" if full else "small", pretrained=True)']
    gone, come = changed(FABRIC, MIXED)
    assert len(gone) == 1 and come == [gone[0].replace(")", ', precision="bf16-mixed")')]
    gone, come = changed(MIXED, FSDP)
    assert len(gone) == 1 and gone[0].replace(")", ", strategy=strategy)") in come
    gone, come = changed(PYTORCH, FABRIC)
    others = [line for line in come if "fabric" not in line.lower()]
    assert [re.sub(r"\W.*", "", line) for line in others] == ["if", "parser"], "the batch is shared out"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (PYTORCH, ["--devices", "2"], "from 02 on"),
        (FABRIC, ["--devices", "2", "--batch", "33"], "multiple of devices"),
        (MIXED, ["--images", "8"], "fill a batch"),
        (FSDP, ["--epochs", "0"], "1 or more"),
    ],
)
def test_options_that_cannot_be_meant_get_a_sentence(name, options, words, capsys):
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(FOLDER / name))["main"](options)
    assert caught.value.code == 2 and words in capsys.readouterr().err
