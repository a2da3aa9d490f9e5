"""Interactive views: a picture or a table that follows its controls, and still reads well where nothing can move."""

import base64
import html
import weakref
from collections.abc import Callable

import ipywidgets
from matplotlib.figure import Figure

from speedlab.plots import png

# Every explorer that still exists: tools/moves.py moves their controls after a notebook's last cell.
SHOWN: "weakref.WeakSet[Explorer]" = weakref.WeakSet()


class Explorer(ipywidgets.VBox):
    """Controls above a view. Without a kernel, and in print, the view stays as it was with the default values."""

    def __init__(self, render: Callable[..., tuple[str | Figure, str]], controls: dict[str, ipywidgets.Widget]):
        self._render, self.controls = render, controls
        self._view = ipywidgets.HTML()
        super().__init__([ipywidgets.HBox(list(controls.values())), self._view])
        for control in controls.values():
            control.observe(lambda _: self._update(), names="value")
        self._update()
        SHOWN.add(self)

    def _update(self) -> None:
        # an error in a callback would vanish into the log; a reader needs it in the view
        try:
            shown, self._text = self._render(**{name: control.value for name, control in self.controls.items()})
        except ValueError as error:
            shown, self._text = f"<p>{html.escape(str(error))}</p>", str(error)
        self._picture = base64.b64encode(png(shown, dpi=96)).decode() if isinstance(shown, Figure) else None
        if self._picture:
            shown = f'<img alt="{html.escape(self._text, quote=True)}" src="data:image/png;base64,{self._picture}">'
        self._view.value = shown

    def __repr__(self) -> str:
        return self._text

    def _repr_mimebundle_(self, **kwargs):
        # ipywidgets cuts a long repr short: the test would compare its beginning only
        bundle = {**(super()._repr_mimebundle_(**kwargs) or {}), "text/plain": self._text}
        # a figure inside text/html would be compared byte by byte; as a picture of its own it is not
        if self._picture:
            return {**bundle, "image/png": self._picture}, {"image/png": {"alt": self._text}}
        return {**bundle, "text/html": self._view.value}


def explore(render: Callable[..., tuple[str | Figure, str]], **controls: ipywidgets.Widget) -> Explorer:
    """Show `render(**values)` under the given controls, and update it whenever one of them moves.

    `render` gets the controls' values by name and returns a pair: HTML or a matplotlib Figure, and the same as plain
    text (for the figure: its alt text). A ValueError that it raises is shown as a sentence in the view.
    """
    return Explorer(render, controls)
