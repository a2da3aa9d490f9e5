"""Claims: they print what holds, and say what does not, with expected, observed and the machine."""

import numpy as np
import pytest
import torch

from speedlab import claims


def test_a_claim_that_holds_prints_its_text(capsys):
    claims.claim("two and two make four", 2 + 2 == 4)
    claims.claim("NumPy's truth is welcome", np.bool_(True))
    claims.claim("a tensor's too", torch.tensor(True))
    assert capsys.readouterr().out.splitlines()[0] == "ok: two and two make four"


def test_a_claim_that_fails_says_what_and_where(capsys):
    with pytest.raises(claims.ClaimError) as failure:
        claims.claim_equal("three layers", 4, 3)
    message = str(failure.value)
    assert "not true here: three layers" in message
    assert "expected: 3" in message and "observed: 4" in message and "machine:" in message
    assert "torch " in message
    assert "ok:" not in capsys.readouterr().out


@pytest.mark.parametrize("value", [None, "yes", 1, [True], torch.tensor([1])])
def test_a_claim_needs_true_or_false(value):
    """`claim("...", result)` with a list or a number would always hold: it is a mistake, not a claim."""
    with pytest.raises(TypeError, match="needs True or False"):
        claims.claim("something", value)


@pytest.mark.parametrize(
    ("claimed", "holds"),
    [
        (lambda: claims.claim_close("x", 1.0001, 1.0, rtol=1e-3), True),
        (lambda: claims.claim_close("x", 1.01, 1.0, rtol=1e-3), False),
        (lambda: claims.claim_close("x", torch.ones(3), torch.ones(3) + 1e-7, atol=1e-6), True),
        (lambda: claims.claim_close("x", torch.ones(3), torch.tensor([1, 1, 2.0]), atol=1e-6), False),
        (lambda: claims.claim_close("x", torch.ones(3), torch.ones(2), atol=1), False),
        (lambda: claims.claim_close("x", torch.tensor([float("nan")]), torch.ones(1), atol=1), False),
        (lambda: claims.claim_equal("x", torch.ones(2), torch.ones(2)), True),
        (lambda: claims.claim_equal("x", torch.ones(2), torch.ones(3)), False),
        (lambda: claims.claim_equal("x", torch.ones(2), torch.tensor([1.0, 1.0001])), False),
        (lambda: claims.claim_between("x", 2, 1, 3), True),
        (lambda: claims.claim_between("x", 4, 1, 3), False),
        (lambda: claims.claim_between("x", float("nan"), 1, 3), False),
        (lambda: claims.claim_at_least("x", 0.5, 0.6), False),
        (lambda: claims.claim_at_most("x", 0.5, 0.6), True),
    ],
)
def test_variants_hold_and_fail(claimed, holds, capsys):
    if holds:
        claimed()
        assert capsys.readouterr().out == "ok: x\n"
    else:
        with pytest.raises(claims.ClaimError):
            claimed()


def test_a_tensor_that_differs_is_described():
    with pytest.raises(claims.ClaimError, match=r"largest difference 0\.5, at 1 of 3 elements"):
        claims.claim_equal("x", torch.tensor([1.0, 2.0, 3.5]), torch.tensor([1.0, 2.0, 3.0]))


def test_closeness_needs_a_tolerance():
    with pytest.raises(ValueError, match="states no tolerance"):
        claims.claim_close("x", 1.0, 1.0)
