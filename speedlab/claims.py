"""Claims: sentences of a lesson that the test run proves.

A claim can fail: it compares what was run, counted or read here with something from elsewhere (a closed formula,
another implementation, a library, a published figure). And it is deterministic: it holds on any machine, under load,
on a CPU or a GPU. A clock decides one only where the difference is many times the noise.
"""

import torch

from speedlab import machine
from speedlab.display import CLAIM, emit


class ClaimError(AssertionError):
    """A sentence of the lesson that is not true on this machine."""


def claim(
    text: str, ok: bool, *, expected: object = "the statement to hold", observed: object = "it does not"
) -> None:
    """Show `ok: text` if `ok`, else raise with what was expected, what was observed, and on which machine."""
    numbers = isinstance(ok, torch.Tensor) and ok.dtype != torch.bool
    if numbers or type(ok).__name__ not in ("bool", "bool_", "Tensor"):
        raise TypeError(f"The claim {text!r} needs True or False, but got {ok!r}. Write a comparison.")
    if ok:
        emit(f"ok: {text}", CLAIM, {"claim": text})
        return
    where = machine.describe()
    raise ClaimError(
        f"not true here: {text}\n  expected: {expected}\n  observed: {observed}\n"
        f"  machine:  {where.device}, {where.name}, {where.cores} cores, "
        + ", ".join(f"{name} {version}" for name, version in where.versions)
    )


def claim_equal(text: str, observed: object, expected: object) -> None:
    """Claim that two values, or two tensors element by element, are exactly equal."""
    if isinstance(observed, torch.Tensor) and isinstance(expected, torch.Tensor):
        same = observed.shape == expected.shape and torch.equal(observed, expected)
        claim(text, same, expected="equal tensors", observed=_difference(observed, expected))
    else:
        claim(text, bool(observed == expected), expected=expected, observed=observed)


def claim_close(text: str, observed: object, expected: object, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Claim that numbers or tensors agree: |observed - expected| <= atol + rtol·|expected|, everywhere."""
    if rtol == atol == 0.0:
        raise ValueError(f"The claim {text!r} states no tolerance: give rtol or atol, or use claim_equal.")
    if isinstance(observed, torch.Tensor):
        a, b = observed.double(), expected.double()
        ok = a.shape == b.shape and torch.allclose(a, b, rtol=rtol, atol=atol)
        seen = _difference(observed, expected)
    else:
        ok, seen = abs(observed - expected) <= atol + rtol * abs(expected), observed
    wanted = "agreement" if isinstance(observed, torch.Tensor) else expected
    claim(text, bool(ok), expected=f"{wanted} within rtol={rtol:g}, atol={atol:g}", observed=seen)


def claim_between(text: str, observed: float, low: float, high: float) -> None:
    """Claim that low <= observed <= high; a margin for figures whose last digits differ between machines."""
    claim(text, bool(low <= observed <= high), expected=f"between {low:g} and {high:g}", observed=observed)


def claim_at_least(text: str, observed: float, low: float) -> None:
    """Claim that observed >= low."""
    claim(text, bool(observed >= low), expected=f"at least {low:g}", observed=observed)


def claim_at_most(text: str, observed: float, high: float) -> None:
    """Claim that observed <= high."""
    claim(text, bool(observed <= high), expected=f"at most {high:g}", observed=observed)


def _difference(observed: torch.Tensor, expected: torch.Tensor) -> str:
    if observed.shape != expected.shape:
        return f"shapes {tuple(observed.shape)} and {tuple(expected.shape)}"
    gap = (observed.double() - expected.double()).abs()
    largest = gap.max().item() if gap.numel() else 0.0
    return f"largest difference {largest:.3g}, at {int((observed != expected).sum())} of {gap.numel()} elements"
