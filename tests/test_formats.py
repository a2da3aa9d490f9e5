"""The bits of number formats, against torch's own conversions and against IEEE 754 as text."""

import math

import pytest
import torch

from speedlab import formats

STORED = ("fp16", "bf16", "fp8 e4m3", "fp8 e5m2")


@pytest.mark.parametrize(
    ("x", "name", "text"),
    [
        (1.0, "fp32", "0 01111111 " + "0" * 23),
        (-2.0, "bf16", "1 10000000 0000000"),
        (1.0, "fp16", "0 01111 0000000000"),
        (1.0, "tf32", "0 01111111 0000000000"),
        (448.0, "fp8 e4m3", "0 1111 110"),
        (57344.0, "fp8 e5m2", "0 11110 11"),
    ],
)
def test_bits_show_the_fields(x, name, text):
    assert formats.bits(formats.round_to(x, name), name) == text


def test_tf32_rounds_as_fp16_does_where_fp16_is_normal():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    x = x[x.abs() > 2.0**-14]
    assert torch.equal(formats.to_tf32(x), x.half().float())


def test_tf32_breaks_ties_to_even_carries_and_leaves_infinity_and_nan():
    step = 2.0**-10
    x = torch.tensor([1 + step / 2, 1 + 3 * step / 2, 2 - step / 4, math.inf, -math.inf])
    assert formats.to_tf32(x).tolist() == [1.0, 1 + 2 * step, 2.0, math.inf, -math.inf]
    assert formats.to_tf32(torch.tensor(math.nan)).isnan()


def test_e4m3_stops_at_its_largest_number_and_the_others_overflow():
    assert formats.round_to(1e6, "fp8 e4m3").item() == 448
    assert all(formats.round_to(1e39, name).item() == math.inf for name in ("fp16", "bf16", "fp8 e5m2"))


@pytest.mark.parametrize("name", STORED)
def test_neighbours_are_the_next_numbers(name):
    dtype, exponent, fraction = formats.FORMATS[name]
    positive = torch.arange(2 ** (exponent + fraction)).to(formats.PATTERN[dtype.itemsize]).view(dtype).double()
    numbers = positive[positive.isfinite()].unique().tolist()
    for below, x, above in zip(numbers[0:-2:7], numbers[1:-1:7], numbers[2::7], strict=False):
        assert formats.neighbours(formats.round_to(x, name), name) == (below, above)


def test_neighbours_in_tf32_are_ten_bits_apart():
    assert formats.neighbours(torch.tensor(1.0), "tf32") == (1 - 2.0**-11, 1 + 2.0**-10)


def test_what_is_shown_of_a_number():
    assert formats.shown(257.0, "bf16") == ("0 10000111 0000000", "256", "3.9e-03", "255", "258")
    assert formats.shown(math.nan, "fp16")[3:] == ("none", "none")
    assert formats.boxed("0 11 1").count("<code") == 3
