"""One style for every figure: bars with spread, curves, timelines. Each is shown as a PNG with alt text.

Colour is never the only carrier: bars also differ by hatch, curves by marker and line style.
"""

import io
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from speedlab.measure import Comparison

# Okabe and Ito's palette, whose colours readers with any kind of colour vision can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":")

_STYLE = {
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
    "axes.titlesize": 12, "axes.titleweight": "bold", "axes.grid": False, "legend.frameon": False,
    "hatch.linewidth": 0.6,
}  # fmt: skip


def figure(width: float = 7.0, height: float = 3.2, columns: int = 1, rows: int = 1, **layout) -> tuple[Figure, Axes]:
    """An empty figure in the house style, its size in inches; with several `columns` or `rows`, an array of axes."""
    with matplotlib.rc_context(_STYLE):
        shown = Figure(figsize=(width, height), layout="constrained")
        return shown, shown.subplots(rows, columns, **layout)


def show(shown: Figure, alt: str, *, measured: bool = False) -> None:
    """Display a figure as a PNG; `alt` says in a sentence what a reader who does not see it should know.

    The test compares that sentence, so that its numbers stay true. With `measured=True` the figure shows what a clock
    said, and neither is compared.
    """
    from IPython.display import Image, display

    if len(alt.split()) < 4:
        raise ValueError(f"The alt text {alt!r} is too short: say in a sentence what the figure shows.")
    clocked = {"measured": True} if measured else {}
    display(Image(png(shown), alt=alt, width=int(shown.get_size_inches()[0] * 96), metadata=clocked))


def png(shown: Figure, dpi: int = 120) -> bytes:
    """The figure as PNG bytes, without a date, so that equal figures are equal bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        shown.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def bars(
    ax: Axes,
    values: Mapping[str, float],
    *,
    spread: Mapping[str, tuple[float, float]] | None = None,
    title: str = "",
    label: str = "",
    form: str = "{:.3g}",
) -> None:
    """Horizontal bars, one per name, the first on top, each with its value; `spread` draws (low, high) whiskers."""
    names = list(values)
    for i, name in enumerate(names):
        error = None
        if spread and name in spread:
            low, high = spread[name]
            error = [[max(0.0, values[name] - low)], [max(0.0, high - values[name])]]
        hatch, colour = HATCHES[i % len(HATCHES)], COLOURS[i % len(COLOURS)]
        ax.barh(i, values[name], xerr=error, capsize=3, color=colour, hatch=hatch, edgecolor="white", height=0.65)
        end = spread[name][1] if error else values[name]
        ax.annotate(form.format(values[name]), (max(end, values[name]), i), xytext=(6, 0),
                    textcoords="offset points", va="center")  # fmt: skip
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.margins(x=0.18)
    ax.set_xlim(left=0)
    ax.set(title=title, xlabel=label)


def comparison(result: Comparison, title: str) -> None:
    """Show a comparison's median times as bars with their middle halves; the verdicts are in the labels."""
    scale, unit = (1e3, "ms") if max(t.median for t in result.timings.values()) < 1 else (1.0, "s")
    named = {
        name if name == result.baseline else f"{name}\n{result.ratios[name]}": timing
        for name, timing in result.timings.items()
    }
    shown, ax = figure(height=0.8 + 0.6 * len(named))
    bars(
        ax,
        {name: t.median * scale for name, t in named.items()},
        spread={name: (t.low * scale, t.high * scale) for name, t in named.items()},
        title=title,
        label=f"{unit} per {result.unit}, median and middle half (shorter is better)",
    )
    medians = "; ".join(f"{name}: {t!r}" for name, t in result.timings.items())
    show(shown, f"Bar chart of median times. {title}. {medians}.", measured=True)


def curves(
    ax: Axes,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str = "",
    x: str = "",
    y: str = "",
    log: str = "",
    points: bool = True,
) -> None:
    """Lines {name: (xs, ys)} with their own marker and line style; `log` holds 'x', 'y' or both."""
    for i, (name, (xs, ys)) in enumerate(lines.items()):
        marker = MARKERS[i % len(MARKERS)] if points else None
        ax.plot(xs, ys, LINES[i % len(LINES)], marker=marker, markersize=5,
                color=COLOURS[i % len(COLOURS)], label=name)  # fmt: skip
    if "x" in log:
        ax.set_xscale("log", base=2)
    if "y" in log:
        ax.set_yscale("log")
    if len(lines) > 1:
        ax.legend()
    ax.set(title=title, xlabel=x, ylabel=y)


def timeline(
    ax: Axes, lanes: Mapping[str, Sequence[tuple[float, float, str]]], *, title: str = "", unit: str = "ms"
) -> None:
    """Lanes {name: [(start, end, kind), ...]}, first on top; each kind of work has its own colour and hatch."""
    kinds: list[str] = []
    for row, spans in enumerate(lanes.values()):
        for start, end, kind in spans:
            label = None if kind in kinds else kind  # once in the legend
            kinds += [label] if label else []
            i = kinds.index(kind)
            ax.barh(row, end - start, left=start, height=0.6, color=COLOURS[i % len(COLOURS)],
                    hatch=HATCHES[i % len(HATCHES)], edgecolor="white", label=label)  # fmt: skip
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=min(len(kinds), 4))
    ax.set_yticks(range(len(lanes)), list(lanes))
    ax.invert_yaxis()
    ax.set(title=title, xlabel=unit)
