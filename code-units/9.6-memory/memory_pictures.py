"""How notebook 1 of this unit draws what it counts. Nothing here is needed to follow the lesson."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from meter import KINDS

from speedlab import plots


def _look(i: int, fill: str = "color") -> dict[str, str | float]:
    return {"linewidth": 0, fill: plots.COLOURS[i], "hatch": plots.HATCHES[i], "edgecolor": "white"}


def film_figure(alive: np.ndarray, marks: Sequence[tuple[int, str]]) -> Figure:
    """Live MB after each operation as stacked areas, one row of `alive` per kind; `marks` say where phases begin."""
    total, base = alive.sum(0), np.zeros(alive.shape[1])
    figure, ax = plots.figure(8.0, 4.2)
    for i, kind in enumerate(KINDS):
        top = base + alive[i] / 1e6
        ax.fill_between(range(len(total)), base, top, step="post", label=kind, **_look(i, "facecolor"))
        base = top
    for at, phase in marks:
        ax.axvline(at, color="black", linestyle=":")
        ax.annotate(phase, (at, 1.01), xycoords=("data", "axes fraction"), rotation=20, fontsize=9)
    summit = (int(total.argmax()), total.max() / 1e6)
    ax.annotate("peak", summit, xytext=(-70, -4), textcoords="offset points", arrowprops={"arrowstyle": "->"})
    ax.set(xlabel="operations", ylabel="MB alive", ylim=(0, 1.08 * summit[1]), xlim=(0, len(total)))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    return figure


def plan_figure(moments: Mapping[str, Mapping[str, float]], cards: Sequence[int], title: str) -> Figure:
    """One stacked bar per moment, in GiB, with lines at card sizes up to the first that the longest bar fits."""
    figure, ax = plots.figure(8.5, 3.4)
    left = [0.0] * len(moments)
    for i, kind in enumerate(next(iter(moments.values()))):
        sizes = [kinds[kind] / 2**30 for kinds in moments.values()]
        ax.barh(list(moments), sizes, 0.6, left, label=kind, **_look(i))
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    end = 1.08 * max(max(left), min((card for card in cards if card > max(left)), default=0))
    ax.set(xlim=(0, end), xlabel="GiB")
    for card in (card for card in cards if card < end):
        ax.axvline(card, color="black", linestyle="--")
        ax.annotate(f"{card}", (card, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=9)
    ax.invert_yaxis()
    ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=5, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure
