"""The capstone's scripts: both run, write down the same losses, and the slow one can be diagnosed from a terminal."""

import subprocess
import sys
from pathlib import Path

import first_project
import pytest
import second_version
import torch

from speedlab import count
from speedlab.diagnose import counting, counts, load
from speedlab.diagnose.climb import apart

SCRIPTS = Path(first_project.__file__).parent


@pytest.mark.parametrize("script", ["first_project.py", "second_version.py"])
def test_the_script_runs(script):
    command = [sys.executable, str(SCRIPTS / script), "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["step 1", "step 2"]


def test_slow_and_fast_give_equal_losses():
    slow = [entry["loss"] for entry in first_project.train(24)]  # an epoch has 20 steps
    assert second_version.train(24) == pytest.approx(slow, abs=1e-4)
    assert sum(slow[-5:]) < sum(slow[:5])


def test_attention_in_one_call_is_attention_head_by_head():
    torch.manual_seed(0)
    slow, fast = first_project.Attention(), second_version.OneCall()
    fast.load_state_dict(slow.state_dict())
    x, real = torch.randn(3, 9, first_project.WIDTH), torch.arange(9) < torch.tensor([[9], [4], [1]])
    torch.testing.assert_close(fast(x, real), slow(x, real))


def test_the_slow_step_has_the_faults_that_the_notebook_mends(monkeypatch):
    monkeypatch.setattr(counting, "PATIENCE", 600.0)  # a busy machine is no reason to give its loader up
    job = load(f"{SCRIPTS / 'first_project.py'}:build")
    found = counts(job, breaks=False)
    assert sum(found.syncs.values()) == 2 and found.padded > 0.5
    assert found.by("dtype").keys() >= {"fp32"} and not found.by("dtype").keys() & {"bf16", "fp16"}
    model, optimizer = job.built()
    assert found.flops == count.flops(lambda: job.train(model, optimizer, job.batch()))
    assert apart(job, job) == 0


def test_what_practice_recommends_exists(tmp_path):
    """The arguments that the notebook names for Hugging Face and Lightning."""
    import lightning
    import transformers

    arguments = transformers.TrainingArguments(
        tmp_path, train_sampling_strategy="group_by_length", bf16=True, logging_steps=50, use_cpu=True
    )
    assert arguments.train_sampling_strategy == "group_by_length" and arguments.optim == "adamw_torch_fused"
    assert callable(transformers.DataCollatorWithPadding)
    trainer = lightning.Trainer(precision="bf16-mixed", accelerator="cpu", logger=False, enable_checkpointing=False)
    assert trainer.precision == "bf16-mixed"
