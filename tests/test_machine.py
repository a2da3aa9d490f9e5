"""What a reader relies on in speedlab.machine: a true description, a probe that returns, right 16-bit numbers."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from benchmarks import record
from speedlab import compat, count, machine


def test_describe_names_every_row_and_blanks_as_measured():
    shown = repr(machine.describe())
    for row in ("device", "cores", "memory", "hardware for dtypes", "fast dtypes", "versions", "scale"):
        assert f"[measured] {row}: " in shown
    assert torch.__version__.split("+")[0] in shown
    assert 'class="measured"' in machine.describe()._repr_html_()


def test_fp32_is_fast_everywhere_and_slow_dtypes_are_named():
    found = machine.describe()
    assert "fp32" in found.fast
    assert set(found.fast) | set(found.slow) == set(machine.DTYPES)
    assert machine.probe()["fp32"] == 1.0


def test_unknown_dtype_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match="Unknown dtype 'bfloat16'; expected one of fp32"):
        machine.is_fast("bfloat16")


def test_scale_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("SPEEDLAB_SCALE", raising=False)
    assert machine.scale() == "quick"
    monkeypatch.setenv("SPEEDLAB_SCALE", "FULL")
    assert machine.scale() == "full"
    monkeypatch.setenv("SPEEDLAB_SCALE", "huge")
    with pytest.raises(ValueError, match="must be 'quick' or 'full'"):
        machine.scale()


def test_seeding_repeats_every_source_of_randomness():
    import random

    import numpy as np

    def draw():
        generator = machine.seed_everything(7)
        return random.random(), np.random.rand(), torch.rand(1).item(), torch.rand(1, generator=generator).item()

    assert draw() == draw()
    machine.seed_everything(8)
    assert torch.rand(1).item() != draw()[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_products_give_the_numbers_of_native_half_precision(dtype, monkeypatch):
    """A linear layer, a convolution and attention: forward and gradients agree with native 16-bit to its rounding."""
    monkeypatch.setattr(machine, "is_fast", lambda name: False)
    torch.manual_seed(0)
    linear, convolution = nn.Linear(24, 24), nn.Conv2d(3, 24, 4, 4)
    images = torch.randn(2, 3, 16, 16)

    def forward_backward():
        for module in (linear, convolution):
            module.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            tokens = linear(convolution(images).flatten(2).transpose(1, 2)).view(2, 16, 2, 12).transpose(1, 2)
            out = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
        out.float().square().sum().backward()
        return [out.dtype, out.detach().float(), linear.weight.grad.clone(), convolution.weight.grad.clone()]

    native = forward_backward()
    with compat.half_products():
        widened = forward_backward()
    assert native[0] == widened[0] == dtype
    for a, b in zip(native[1:], widened[1:], strict=True):
        assert (a - b).norm() <= 4 * torch.finfo(dtype).eps * a.norm()
    assert not torch.equal(native[1], torch.zeros_like(native[1]))


def test_half_products_really_compute_in_fp32(monkeypatch):
    """Sums of 16-bit products must not be rounded on the way: 4096 ones would stall at 256 in a bf16 accumulator."""
    monkeypatch.setattr(machine, "is_fast", lambda name: False)
    ones = torch.ones(1, 4096, dtype=torch.bfloat16)
    with compat.half_products():
        product = ones @ ones.T
    assert product.dtype == torch.bfloat16 and product.item() == 4096.0


def test_half_products_compute_in_fp32_also_in_inference_mode(monkeypatch):
    """There products arrive whole, as `linear` or `matmul`, at whoever looks at operations."""
    monkeypatch.setattr(machine, "is_fast", lambda name: False)
    a, images, filters = torch.ones(4, 4).half(), torch.ones(1, 2, 4, 4).half(), torch.ones(2, 2, 3, 3).half()
    products = (
        lambda: a @ a,
        lambda: nn.functional.linear(a, a),
        lambda: nn.functional.conv2d(images, filters),
        lambda: nn.functional.scaled_dot_product_attention(images, images, images),
    )
    for product in products:
        given = []

        def work(product=product, given=given):
            with compat.half_products(), torch.inference_mode():
                given.append(product().dtype)

        taken = {takes for name, takes, _ in count.operations(work) if name != "_to_copy"}
        assert given == [torch.float16] and not any("fp16" in takes for takes in taken)


def test_looking_at_the_machine_draws_no_random_numbers_of_the_callers():
    machine.probe.cache_clear(), machine.peak_flops.cache_clear()
    before = torch.get_rng_state()
    machine.probe(), machine.peak_flops()
    assert torch.equal(torch.get_rng_state(), before)


def test_half_products_write_where_they_are_told_to(monkeypatch):
    monkeypatch.setattr(machine, "is_fast", lambda name: False)
    a, b = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4, 3, dtype=torch.bfloat16)
    added, given = torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.bfloat16)
    with compat.half_products():
        assert added.addmm_(a, b) is added and torch.mm(a, b, out=given) is given
    assert (added == 5).all() and (given == 4).all()


def test_half_products_do_nothing_on_a_gpu(monkeypatch):
    """On a machine with a GPU, a timed 16-bit step must not pay for the CPU's emulation."""
    monkeypatch.setattr(machine, "is_fast", lambda name: False)
    with compat.half_products("cuda:0") as on_a_gpu, compat.half_products("cpu") as on_the_cpu:
        assert on_a_gpu is None and on_the_cpu is not None


def test_half_products_leave_fp32_alone(monkeypatch):
    monkeypatch.setattr(machine, "is_fast", lambda name: False)
    a = torch.randn(8, 8)
    with compat.half_products():
        assert torch.equal(a @ a, torch.mm(a, a))


def test_peaks_are_positive_and_plausible():
    assert 1e8 < machine.peak_flops("fp32") < 1e16
    assert 1e8 < machine.copy_bandwidth() < 1e14


def test_stamp_holds_what_a_result_needs():
    stamp = record.stamp()
    assert {"machine", "processor", "device", "cores", "instructions", "versions", "date", "commit"} <= stamp.keys()
    assert record.slug() == record.slug().lower() and " " not in record.slug()


def test_imports_stay_cheap():
    """lightning, transformers, scikit-learn and matplotlib are imported where they are used, not with the helpers."""
    code = """
import sys
import torch
before = set(sys.modules)
from speedlab import checks, claims, compat, count, data, launch, machine, measure
from speedlab.data import glyphs, grammar, models
heavy = {"lightning", "transformers", "sklearn", "matplotlib", "sympy", "torchvision"}
print(sorted(heavy & (set(sys.modules) - before)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr


def test_describe_returns_under_oneDNN_held_to_avx2():
    """Where a dtype has no hardware, the probe still answers: it never runs a product that would not return."""
    run = subprocess.run(
        [sys.executable, "-c", "from speedlab import machine; print(machine.describe())"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
    )
    assert run.returncode == 0, run.stderr
    assert "oneDNN held to AVX2" in run.stdout or "cuda" in run.stdout
