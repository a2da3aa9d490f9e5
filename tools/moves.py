"""Move every control of every widget that a notebook shows. The test runs this file in the notebook's kernel."""

import base64
import io
from collections.abc import Iterator

import ipywidgets
import numpy as np
from PIL import Image

from speedlab.widgets import SHOWN


def move_all() -> list[str]:
    """Move each control of each widget to its ends and through its choices; return what then fails, and why.

    Each control is moved alone, with the others at their defaults, and then put back. The test does this after a
    notebook's last cell; otherwise, only a reader who moves that control would see an exception in its callback.
    """
    wrong = []
    for explorer in sorted(SHOWN, key=id):
        for name, control in explorer.controls.items():
            default = control.value
            for value in _places(control):
                try:
                    control.value = value
                    view = explorer.children[1].value
                    if not view.strip() or not repr(explorer).strip():
                        wrong.append(f"{name}={value!r}: nothing is shown")
                    elif _is_cut(view):
                        wrong.append(f"{name}={value!r}: the picture is cut off at its side, probably its title")
                except Exception as error:
                    wrong.append(f"{name}={value!r}: {type(error).__name__}: {error}")
            control.value = default
    return wrong


def _is_cut(view: str) -> bool:
    """Whether something in the picture touches its left or right edge, as a title that is too wide does."""
    _, _, encoded = view.partition("base64,")
    if not encoded:
        return False
    shades = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded.partition('"')[0]))).convert("L"))
    return bool((shades[:, [0, 1, 2, -3, -2, -1]] < 200).any())  # the layout leaves four pixels free


def _places(control: ipywidgets.Widget) -> Iterator[object]:
    """The values worth trying: the ends of a range, each choice, both states of a checkbox, some free input."""
    if hasattr(control, "options"):
        choices = [value for _, value in control._options_full]
        many = isinstance(control.value, tuple)
        return iter([(), *((choice,) for choice in choices), tuple(choices)] if many else choices)
    if isinstance(control, ipywidgets.FloatLogSlider):
        return iter([control.base**control.min, control.base**control.max])
    if isinstance(control.value, bool):
        return iter([True, False])
    if isinstance(control.value, tuple) and hasattr(control, "min"):
        return iter([(control.min, control.max), (control.min, control.min), (control.max, control.max)])
    if hasattr(control, "min") and hasattr(control, "max"):
        return iter([control.min, control.max])
    # a free field: values that a reader may type
    return iter(["", "x"] if isinstance(control.value, str) else [0, -1, 1, 1e9])
