"""Number formats, bit by bit: what fp32, tf32, fp16, bf16 and the two kinds of fp8 make of a number.

tf32 is not a dtype: matrix units round fp32 numbers to it on the way in. Here that is by hand, stored as fp32.
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
# Bytes of a number: the integer dtype that holds the same bits.
PATTERN = {4: torch.int32, 2: torch.int16, 1: torch.int8}
_TF32_CUT = 13  # of fp32's 23 fraction bits, tf32 keeps ten


def bits(number: torch.Tensor, name: str) -> str:
    """The bits of one number as text, its fields apart: `0 01111111 0000000` is 1 in bf16."""
    dtype, exponent, fraction = FORMATS[name]
    width = 8 * dtype.itemsize
    pattern = number.view(PATTERN[dtype.itemsize]).item() % 2**width  # % makes it unsigned
    text = f"{pattern:0{width}b}"
    return f"{text[0]} {text[1 : 1 + exponent]} {text[1 + exponent : 1 + exponent + fraction]}"


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """fp32 numbers rounded to tf32's 10 fraction bits, ties to even, still stored as fp32."""
    pattern = x.view(torch.int32)
    last_kept = (pattern >> _TF32_CUT) & 1
    # just under half a step, or exactly half where the last kept bit is odd; then cut; a carry raises the exponent
    rounded = (pattern + 2 ** (_TF32_CUT - 1) - 1 + last_kept) & -(2**_TF32_CUT)
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x)


def round_to(x: float, name: str) -> torch.Tensor:
    """The number of a format that is nearest to x in fp32, as a tensor of the dtype that stores it; ties go to even.

    Beyond the largest number comes infinity; e4m3 has none, so its conversion stops at 448.
    """
    number = torch.tensor(x, dtype=torch.float64).float()
    if name == "tf32":
        return to_tf32(number)
    if name == "fp8 e4m3":  # torch made NaN of larger numbers up to 2.11, and stops at 448 since
        number = number.clamp(-448, 448)
    return number.to(FORMATS[name][0])


def neighbours(number: torch.Tensor, name: str) -> tuple[float, float]:
    """The next numbers of a format toward zero and away from it; NaN where there is none.

    Patterns stand in the order of their numbers' sizes, so a neighbour is one integer away.
    """
    if number.isnan():
        return math.nan, math.nan
    pattern, step = number.view(PATTERN[number.dtype.itemsize]), 2**_TF32_CUT if name == "tf32" else 1
    return tuple((pattern + d).view(number.dtype).double().item() for d in (-step, step))


def shown(x: float, name: str) -> tuple[str, ...]:
    """What a format makes of x, as text: bits, value, rounding error as a share of x, neighbours (see above)."""
    kept = round_to(x, name)
    value = kept.double().item()
    error = "exact" if value == x else f"{abs(value / x - 1):.1e}"
    near = ("none" if math.isnan(v) else f"{v:.9g}" for v in neighbours(kept, name))
    return bits(kept, name), f"{value:.9g}", error, *near


def boxed(text: str) -> str:
    """The fields of `bits` as HTML boxes: sign, exponent, fraction."""
    style = "padding:1px 3px;border:1px solid #888;color:#000;background:"
    fields = zip(text.split(), ("#ddd", "#f6d28b", "#bfe0f5"), strict=True)
    return " ".join(f'<code style="{style}{colour}">{field}</code>' for field, colour in fields)
