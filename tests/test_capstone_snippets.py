"""What the capstone shows under "In practice" works; the techniques of its table are of every unit."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from notebooks import ROOT
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from transformers import PreTrainedModel, TrainingArguments


def test_a_schedule_records_the_steps_that_it_names(tmp_path):
    few = schedule(wait=10, warmup=2, active=3)
    handler = tensorboard_trace_handler(str(tmp_path))
    with profile(activities=[ProfilerActivity.CPU], schedule=few, on_trace_ready=handler) as recording:
        for number in range(16):
            torch.full((number + 1,), 1.0)
            recording.step()
    [file] = tmp_path.iterdir()
    text = file.read_text(encoding="utf-8")
    assert [f'"ProfilerStep#{i}"' in text for i in (11, 12, 13, 14, 15)] == [False, True, True, True, False]


def test_lightning_takes_the_profiler_and_the_settings(tmp_path):
    few = schedule(wait=10, warmup=2, active=3)
    watch = PyTorchProfiler(dirpath=str(tmp_path), filename="trace", schedule=few)
    made = Trainer(profiler=watch, precision="bf16-mixed", accumulate_grad_batches=4, logger=False, accelerator="cpu",
                   enable_checkpointing=False)  # fmt: skip
    assert made.profiler is watch


@pytest.mark.skipif(
    not hasattr(PreTrainedModel, "activation_checkpointing_enable"), reason="transformers 5.17 has another name"
)
def test_transformers_takes_the_settings(tmp_path):
    given = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, bf16=True, optim="adamw_torch_fused", activation_checkpointing=True,
        train_sampling_strategy="group_by_length", dataloader_num_workers=4, torch_compile=True,
        lr_scheduler_type="cosine",
    )  # fmt: skip
    assert given.optim == "adamw_torch_fused" and given.torch_compile


def test_every_unit_has_a_technique():
    from techniques import TECHNIQUES

    units = {path.name.split("-")[0] for path in (ROOT / "code-units").glob("9.*")} | {"9.9"}
    assert {unit for technique in TECHNIQUES for unit in technique.unit.split(", ")} == units


@pytest.mark.parametrize("bucket", [0.5])
def test_traces_of_two_ranks_are_merged(bucket):
    from traced_steps import two_ranks

    events = two_ranks(bucket, 0.0)
    assert {e["pid"] for e in events} == {0, 1}
    assert sum(e["name"] == "gloo:all_reduce" for e in events) == 6
