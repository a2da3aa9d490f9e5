"""The memory benchmark without a GPU: its prediction by formula, its answers, and its refusal."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import memory
from benchmarks.day import Session
from speedlab import count

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


def test_attention_with_dropout_is_predicted_without_the_scores_which_a_gpu_does_not_keep():
    q = torch.randn(2, 3, 64, 8, requires_grad=True)
    attention = lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)  # noqa: E731
    scores = 2 * 3 * 64 * 64 * 4
    assert count.saved_bytes(attention, nn.Module()).bytes > 2 * scores
    with memory.as_a_gpu_keeps_it():
        assert count.saved_bytes(attention, nn.Module()).bytes < scores


def test_the_default_dtype_is_put_back():
    predicted(precision="bf16-true")
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ZeroDivisionError), memory.default_dtype(torch.bfloat16):
        1 / 0  # noqa: B018
    assert torch.get_default_dtype() == torch.float32


def test_every_configuration_differs_from_an_earlier_one():
    assert len(set(memory.CONFIGURATIONS)) == len(memory.CONFIGURATIONS) >= 8
    assert {c.model for c in memory.CONFIGURATIONS} == set(memory.MODELS)


def test_a_configuration_that_does_not_fit_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 2000))
    [row] = memory.run(PLAIN, Session(torch.device("cuda"), "tiny", 1.0))
    assert "is free" in row["not_run"] and row["predicted"] > 1000


def test_a_measured_row_reads_well_and_states_the_error():
    row = {"predicted": 2_000_000_000, "allocated": 2_500_000_000, "reserved": 3_000_000_000}
    said = "predicted 2.00 GB, allocated 2.50, reserved 3.00; the prediction is off by -20.0%"
    assert memory.words(row) == said


def test_without_a_gpu_it_predicts_and_says_what_it_could_not_read():
    [row] = memory.run(PLAIN, Session(torch.device("cpu"), "tiny", 1.0))
    assert row["not_run"].startswith("a CPU's allocator keeps no peak; the prediction is ")
