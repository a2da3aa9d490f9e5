"""Draw images/ladder-NAME.png for every ladder recorded in results/: bars of speed-ups, one panel per machine.

tools/readme.py draws the pictures whose results have changed; run as a script, this file draws all of them.
"""

import hashlib
import json
from pathlib import Path

from matplotlib.figure import Figure
from notebooks import ROOT
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from speedlab import plots
from speedlab.results import recorded

FOLDER = ROOT / "images"

TASKS = {
    "vit": "Fine-tuning ViT-B/16 at 224 pixels",
    "distilbert": "Fine-tuning DistilBERT on long reviews",
    "to-accuracy": "A small network to a fixed accuracy",
}


def measured(name: str) -> dict[str, list[dict]]:
    """The measured rungs of each machine that has the ladder in results/, GPUs first."""
    found: dict[str, list[dict]] = {}
    for row in recorded(f"ladder-{name}"):
        if "not_run" not in row:
            found.setdefault(row["where"], []).append(row)
    return found


def picture(name: str) -> Path:
    return FOLDER / f"ladder-{name}.png"


def fingerprint(name: str) -> str:
    """A hash of what the picture is drawn from; the picture carries it, so that a stale picture can be found."""
    return hashlib.sha256(json.dumps(measured(name), sort_keys=True).encode()).hexdigest()


def stale(name: str) -> bool:
    """Whether the ladder has results that its picture does not show."""
    if not measured(name):
        return False
    return not picture(name).exists() or Image.open(picture(name)).text.get("Fingerprint") != fingerprint(name)


def best(name: str) -> dict[str, dict]:
    """Each machine's fastest rung that trains and has the same task as the start."""
    counts = lambda row: row["speedup"] if row["trains"] and not row["apart"] else 0.0  # noqa: E731
    return {where: max(rows, key=counts) for where, rows in measured(name).items()}


def alt(name: str) -> str:
    """The picture's alt text."""
    said = "; ".join(f"{row['speedup']:.2f} times as fast on {row['machine']}" for row in best(name).values())
    return f"Bar chart of a ladder. {TASKS[name]}: at best {said}."


def sentence(name: str) -> str:
    """What the ladder found, in a sentence (on a CPU, with the share of a matrix product's FLOP/s), or nothing."""
    said = []
    for where, row in best(name).items():
        used = ""
        if row["device"] == "cpu":
            aim = f" (aim: {row['target']:.0%})" if "target" in row and not row["noisy"] else ""
            used = f", at {row['mfu_product']:.0%} of a matrix product's FLOP/s{aim}"
        said.append(
            f"{row['speedup']:.1f} times ({row['speedup_low']:.1f} to {row['speedup_high']:.1f}{_by_seed(row)}) as "
            f"fast as strict fp32 with the rung *{row['rung']}*{used} ({where})"
        )
    return f"{TASKS[name]}, the fastest version that still trains: {'; '.join(said)}." if said else ""


def figure(name: str) -> Figure:
    """The ladder's speed-ups as bars, one panel per machine."""
    machines = measured(name)
    heights = [1.3 + 0.42 * len(rows) for rows in machines.values()]
    shown, axes = plots.figure(
        8.5, sum(heights), rows=len(heights), squeeze=False, sharex=True, height_ratios=heights
    )
    for ax, (where, rows) in zip(axes[:, 0], machines.items(), strict=True):
        named = {_label(row): row for row in rows}
        plots.bars(
            ax,
            {label: row["speedup"] for label, row in named.items()},
            spread={label: (row["speedup_low"], row["speedup_high"]) for label, row in named.items()},
            title=f"{TASKS[name]}\n" + where.replace(", torch", "\ntorch"),  # or a long name would be cut off
            label=f"times as fast as the strict-fp32 start, with its spread{_by_seed(rows[0])} (longer is better)",
            form="{:.2f}x",
        )
        ax.tick_params(labelbottom=True)  # the shared axis hides the labels
    farthest = max(row["speedup_high"] for rows in machines.values() for row in rows)
    axes[0, 0].set_xlim(right=1.18 * farthest)  # for all panels: they share the axis
    return shown


def _by_seed(row: dict) -> str:
    """If the interval shows how seeds vary, not how the clock does, words that say so; otherwise nothing."""
    return ", by seed" if "steps" in row else ""


def _label(row: dict) -> str:
    if not row["trains"]:
        return f"{row['rung']}\n(does not train)"
    return f"{row['rung']}\n(another task)" if row["apart"] else row["rung"]


def draw(name: str) -> None:
    picture(name).write_bytes(plots.png(figure(name)))
    mark = PngInfo()
    mark.add_text("Fingerprint", fingerprint(name))
    Image.open(picture(name)).save(picture(name), pnginfo=mark)


if __name__ == "__main__":
    for ladder in filter(measured, TASKS):
        draw(ladder)
