"""Number formats, bit by bit: how fp32, tf32, fp16, bf16 and two kinds of fp8 represent a number.

tf32 is not a dtype: matrix units round fp32 inputs to it. Here we round by hand, and store the result as fp32.
"""

import math

import torch

# name: (the dtype that stores it, exponent bits, fraction bits)
FORMATS = {
    "fp32": (torch.float32, 8, 23),
    "tf32": (torch.float32, 8, 10),
    "fp16": (torch.float16, 5, 10),
    "bf16": (torch.bfloat16, 8, 7),
    "fp8 e4m3": (torch.float8_e4m3fn, 4, 3),
    "fp8 e5m2": (torch.float8_e5m2, 5, 2),
}
# Bytes per number: the integer dtype of the same size.
PATTERN = {4: torch.int32, 2: torch.int16, 1: torch.int8}
_TF32_CUT = 13  # tf32 drops 13 of fp32's 23 fraction bits


def bits(number: torch.Tensor, name: str) -> str:
    """The bits of one number as text, with a space between fields: `0 01111111 0000000` is 1 in bf16."""
    dtype, exponent, fraction = FORMATS[name]
    width = 8 * dtype.itemsize
    pattern = number.view(PATTERN[dtype.itemsize]).item() % 2**width  # % makes it unsigned
    text = f"{pattern:0{width}b}"
    return f"{text[0]} {text[1 : 1 + exponent]} {text[1 + exponent : 1 + exponent + fraction]}"


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """fp32 numbers rounded to tf32's 10 fraction bits, ties to even, still stored as fp32."""
    pattern = x.view(torch.int32)
    last_kept = (pattern >> _TF32_CUT) & 1
    # add just under half a step, or exactly half where the last kept bit is 1, then cut; a carry raises the exponent
    rounded = (pattern + 2 ** (_TF32_CUT - 1) - 1 + last_kept) & -(2**_TF32_CUT)
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x)


def round_to(x: float, name: str) -> torch.Tensor:
    """Round x to fp32, then to a format, ties to even. Returns a 0-d tensor of the dtype that stores the format.

    Numbers that are too large become infinite; e4m3 has no infinity, so it saturates at ±448.
    """
    number = torch.tensor(x, dtype=torch.float64).float()
    if name == "tf32":
        return to_tf32(number)
    if name == "fp8 e4m3":  # up to 2.11, torch turned larger numbers into NaN; since then it saturates
        number = number.clamp(-448, 448)
    return number.to(FORMATS[name][0])


def neighbours(number: torch.Tensor, name: str) -> tuple[float, float]:
    """A number's two neighbours in a format, toward zero and away from zero; NaN where there is none.

    Read as integers, bit patterns are ordered by magnitude, so a neighbour is one step away.
    """
    if number.isnan():
        return math.nan, math.nan
    pattern, step = number.view(PATTERN[number.dtype.itemsize]), 2**_TF32_CUT if name == "tf32" else 1
    return tuple((pattern + d).view(number.dtype).double().item() for d in (-step, step))


def shown(x: float, name: str) -> tuple[str, ...]:
    """x in a format, as text: bits, value, rounding error relative to x, and the two `neighbours`."""
    kept = round_to(x, name)
    value = kept.double().item()
    error = "exact" if value == x else f"{abs(value / x - 1):.1e}"
    near = ("none" if math.isnan(v) else f"{v:.9g}" for v in neighbours(kept, name))
    return bits(kept, name), f"{value:.9g}", error, *near


def boxed(text: str) -> str:
    """The fields in the text from `bits`, as HTML boxes: sign, exponent, fraction."""
    style = "padding:1px 3px;border:1px solid #888;color:#000;background:"
    fields = zip(text.split(), ("#ddd", "#f6d28b", "#bfe0f5"), strict=True)
    return " ".join(f'<code style="{style}{colour}">{field}</code>' for field, colour in fields)
