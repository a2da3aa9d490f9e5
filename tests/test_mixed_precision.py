"""Unit 9.1's scripts: the bits of number formats, against torch's own conversions; the gradients of products."""

import math

import formats
import pytest
import torch
from product_gradients import product_gradients
from torch import nn

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


def test_product_gradients_are_those_of_cross_entropy():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    x, labels = torch.randn(3, 6), torch.tensor([0, 3, 1])
    logits = model(x)
    last, first = product_gradients(nn.functional.cross_entropy(logits, labels))
    expected = (logits.softmax(dim=1) - nn.functional.one_hot(labels, 4)) / 3
    assert torch.allclose(last, expected, atol=1e-6)
    assert torch.allclose(first, expected @ model[2].weight * (model[0](x) > 0), atol=1e-6)
    assert model[0].weight.grad is not None


def test_product_gradients_see_inside_attention():
    """Projections to Q, K, V and back are parameters there, not modules: two of a block's four products."""
    from torchvision.models.vision_transformer import EncoderBlock

    block = EncoderBlock(2, 8, 16, dropout=0.0, attention_dropout=0.0)
    x = torch.randn(3, 5, 8)
    shapes = sorted(tuple(g.shape) for g in product_gradients(block(x).sum()) if g.dim() == 2)
    assert shapes == sorted([(15, 24), (15, 8), (15, 16), (15, 8)])
    hooked = []
    for module in block.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: hooked.append(1))
    block(x)
    assert len(hooked) == 2
