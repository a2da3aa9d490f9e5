"""Draw ladder-NAME.png for every ladder that stands in results/: bars of speed-ups, a panel a machine.

Run it with the course's environment; tools/readme.py calls it where results/ has changed.
"""

import hashlib
import json
import sys
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from benchmarks.results import recorded  # noqa: E402
from speedlab import plots  # noqa: E402

TASKS = {
    "vit": "Fine-tuning ViT-B/16 at 224 pixels",
    "distilbert": "Fine-tuning DistilBERT on long reviews",
    "to-accuracy": "A small network to a fixed accuracy",
}


def measured(name: str) -> dict[str, list[dict]]:
    """The measured rungs of a ladder by machine, as results/ holds them; empty where no machine has climbed it."""
    found = {}
    for section in recorded(f"ladder-{name}").values():
        stamp = section["stamp"]
        where = f"{stamp['machine']}, {stamp['cores']} cores" + (", noisy" if section["noisy"] else "")
        found[where] = [row for row in section["rows"] if "skipped" not in row]
    return found


def picture(name: str) -> Path:
    return HERE / f"ladder-{name}.png"


def fingerprint(name: str) -> str:
    """What the picture is drawn from, as a hash: the picture carries it, so that a stale one is found."""
    return hashlib.sha256(json.dumps(measured(name), sort_keys=True).encode()).hexdigest()


def stale(name: str) -> bool:
    """Whether the ladder has results that its picture does not show."""
    if not measured(name):
        return False
    return not picture(name).exists() or Image.open(picture(name)).text.get("Fingerprint") != fingerprint(name)


def alt(name: str) -> str:
    """The picture in words: each machine's best speed-up at a rung that trains, at the same task as the start."""
    tops = {where: max(map(_counts, rows)) for where, rows in measured(name).items()}
    said = "; ".join(f"{speedup:.2f} times as fast on {where}" for where, speedup in tops.items())
    return f"Bar chart of a ladder. {TASKS[name]}: at best {said}."


def _counts(row: dict) -> float:
    return row["speedup"] if row["trains"] and not row["apart"] else 0.0


def draw(name: str) -> None:
    shown, _ = plots.ladder(measured(name), TASKS[name])
    picture(name).write_bytes(plots.png(shown))
    mark = PngInfo()
    mark.add_text("Fingerprint", fingerprint(name))
    Image.open(picture(name)).save(picture(name), pnginfo=mark)


if __name__ == "__main__":
    for ladder in filter(measured, TASKS):
        draw(ladder)
