"""The memory benchmark without a GPU: its prediction by formula, its answers, and its refusal."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import memory

ROOT = Path(__file__).parents[1]
PLAIN = memory.Configuration("vit_b_16", 8)
PARAMETERS = sum(p.numel() for p in memory.tiny_model(10).parameters())


def predicted(**changes) -> int:
    return memory.predict(replace(PLAIN, **changes), tiny=True)


def test_sgd_saves_the_two_moments():
    """Where activations make the peak, dropping AdamW's moments saves 8 bytes a parameter, and its counters."""
    counters = 4 * len(list(memory.tiny_model(10).parameters()))
    saved = predicted(batch=256) - predicted(batch=256, optimizer="SGD")
    assert saved == 8 * PARAMETERS + counters


def test_memory_is_affine_in_the_batch():
    first, second, third = (predicted(batch=b) for b in (128, 256, 384))
    assert third - second == second - first > 0


def test_sixteen_bits_and_checkpointing_save():
    whole = predicted(batch=256)
    assert predicted(batch=256, precision="bf16-true") < 0.6 * whole
    assert predicted(batch=256, precision="bf16-mixed") < 0.8 * whole
    assert predicted(batch=256, checkpointing=True) < 0.8 * whole


def test_the_default_dtype_is_put_back():
    predicted(precision="bf16-true")
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ZeroDivisionError), memory.default_dtype(torch.bfloat16):
        1 / 0  # noqa: B018
    assert torch.get_default_dtype() == torch.float32


def test_every_configuration_differs_from_an_earlier_one():
    assert len(set(memory.CONFIGURATIONS)) == len(memory.CONFIGURATIONS) == 6
    assert {c.model for c in memory.CONFIGURATIONS} == set(memory.MODELS)


def test_a_configuration_that_does_not_fit_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 2000))
    row = memory.run(PLAIN, steps=2, tiny=True)
    assert "is free" in row["not_run"] and "not run, needs about" in memory.line(row)


def test_a_measured_row_reads_well():
    row = {**memory.asdict(PLAIN), "predicted": 2_000_000_000, "allocated": 2_500_000_000, "reserved": 3_000_000_000}
    assert memory.line(row) == (
        "vit_b_16, batch 8, fp32, AdamW: predicted 2.00 GB, allocated 2.50 (predicted/allocated 0.800), reserved 3.00"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so the benchmark runs")
def test_without_a_gpu_it_says_so_in_one_sentence():
    asked = [sys.executable, "-m", "benchmarks.memory"]
    answer = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 2
    assert answer.stderr.strip() == "This benchmark reads a GPU's allocator, and there is no CUDA GPU here."
