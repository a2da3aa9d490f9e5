"""The scripts of unit 9.3 on bad days: too many processes, a torn checkpoint, no gloo; the script for a cluster."""

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speedlab import launch

UNIT = Path(__file__).resolve().parent.parent / "code-units" / "9.3-multi-gpu"


def module(name: str, monkeypatch):
    """A script of the unit as a module, which finds its neighbours."""
    monkeypatch.syspath_prepend(str(UNIT))
    spec = importlib.util.spec_from_file_location(name, UNIT / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, loaded)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize(
    ("arguments", "world_size", "sentence"),
    [
        (["--rows=3", "--batch=8"], 4, "3 reviews are too few for 4 shares; take fewer processes, or more reviews"),
        (["--batch=6"], 4, "a batch of 6 has no 4 equal shares; take a multiple of 4"),
        (["--batch=8", "--accumulate=3"], 2, "a batch of 8 has no 6 equal shares; take a multiple of 6"),
        (["--epochs=0"], 1, "must be 1 or more"),
    ],
)
def test_more_processes_than_data_get_a_sentence(arguments, world_size, sentence, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(SystemExit):
        module("finetuning", monkeypatch).parse(arguments, "")
    assert sentence in capsys.readouterr().err


def test_a_pytorch_without_gloo_gets_a_sentence(monkeypatch):
    finetuning = module("finetuning", monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(finetuning.dist, "is_gloo_available", lambda: False)
    with pytest.raises(SystemExit, match="built without gloo"):
        finetuning.connect()


def checkpoint(folder: Path, step: int, resume) -> Path:
    resume.save(folder, step, {"step": step, "weights": torch.arange(5000.0)})
    return folder / f"step-{step:04}.pt"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_half_written_checkpoint_is_named_and_the_older_one_used(share, tmp_path, monkeypatch, capsys):
    resume = module("resume", monkeypatch)
    checkpoint(tmp_path, 4, resume)
    newest = checkpoint(tmp_path, 8, resume)
    assert resume.newest_whole(tmp_path)["step"] == 8
    capsys.readouterr()
    content = newest.read_bytes()
    newest.write_bytes(content[: int(share * len(content))])
    assert resume.newest_whole(tmp_path)["step"] == 4
    said = capsys.readouterr().out
    assert "step-0008.pt is not whole" in said and "going on from step-0004.pt" in said


def test_without_a_whole_checkpoint_training_starts_anew(tmp_path, monkeypatch):
    resume = module("resume", monkeypatch)
    assert resume.newest_whole(tmp_path) is None
    checkpoint(tmp_path, 4, resume).write_bytes(b"")
    assert resume.newest_whole(tmp_path) is None


def test_an_interrupted_save_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    resume = module("resume", monkeypatch)
    checkpoint(tmp_path, 4, resume)

    def full_disk(state, place):
        Path(place).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(resume.torch, "save", full_disk)
    with pytest.raises(OSError, match="No space"):
        checkpoint(tmp_path, 8, resume)
    assert resume.newest_whole(tmp_path)["step"] == 4


def test_the_slurm_script_is_a_shell_script_and_runs_what_torchrun_gets(monkeypatch):
    job = module("cluster", monkeypatch).Job("train.py", 3, 8, "head:29500", ("--batch=96",), max_restarts=2)
    script = job.slurm(hours=5, cores=32)
    assert job.world_size == 24
    lines = script[script.index("srun") :].strip().splitlines()
    assert all(line.endswith(" \\") for line in lines[:-1]), "the shell would take this for several commands"
    command = shlex.split("".join(line.removesuffix("\\") for line in lines))
    assert "--rdzv-endpoint=$head:29500" in command
    expected = ["srun", "torchrun", *(part.replace("head:", "$head:") for part in job.torchrun())]
    assert command == expected
    if Path("/bin/bash").exists():
        assert subprocess.run(["/bin/bash", "-n"], input=script, text=True, timeout=30).returncode == 0


def test_four_ranks_train_save_once_and_agree(tmp_path):
    launched = launch.run(
        UNIT / "resume.py", 4, tmp_path, "--steps=4", timeout=240, environment={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert len({output.split('"losses"')[1] for output in launched.outputs}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-0004.pt"]
