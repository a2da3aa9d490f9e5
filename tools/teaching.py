"""What the site's own pages take from the course: links by number, minutes, seconds. Nothing is listed by hand."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = ROOT / "build" / "present"  # where rehearsals of demos store the seconds of each cell
SLOW = 5.0  # seconds after which a class notices that it is waiting


def fill(text: str, lessons: dict[str, dict]) -> str:
    """A page with `{9.1.1}` turned into a link, `{path 9.0 9.1.1 rest}` and `{slow}` into tables."""
    named = re.findall(r"\{path ([^}]*)\}", text)
    text = re.sub(r"\{path ([^}]*)\}", lambda found: path(found[1].split(), lessons, named), text)
    text = text.replace("{slow}", slow(lessons))
    return re.sub(r"\{([\w.-]+\.\d+)\}", lambda found: f"[{found[1]}]({lessons[found[1]]['path']})", text)


def chosen(words: list[str], lessons: dict[str, dict]) -> list[str]:
    """The lesson numbers that words stand for: a unit's number means all its lessons."""
    return [number for word in words for number in lessons if number == word or number.rsplit(".", 1)[0] == word]


def path(words: list[str], lessons: dict[str, dict], named: list[str]) -> str:
    """A table of lessons with their minutes; `rest` stands for all that no path on the page names."""
    if "rest" in words:
        known = {number for others in named for number in chosen(others.split(), lessons)}
        words = [word for word in words if word != "rest"] + [number for number in lessons if number not in known]
    rows = [lessons[number] | {"number": number} for number in chosen(words, lessons)]
    lines = ["| lesson | what it shows | minutes |", "|---|---|---:|"]
    lines += [f"| {{{row['number']}}} | {row['title']} | {row['minutes']} |" for row in rows]
    return "\n".join([*lines, f"| total | | {sum(row['minutes'] for row in rows)} |"])


def slow(lessons: dict[str, dict]) -> str:
    """A table of how long each lesson runs, and of its slow cells if a demo of it was rehearsed on this machine."""
    rehearsed = [json.loads(found.read_text()) for found in sorted(SECONDS.glob("*/seconds.json"))]
    cells = {record["lesson"]: record["cells"] for record in rehearsed}
    lines = [
        "| lesson | seconds when recorded | cells that took long in a rehearsal here |",
        "|---|---:|---|",
    ]
    for number, lesson in lessons.items():
        waits = [c for c in cells.get(number, []) if c["seconds"] >= SLOW]
        said = "; ".join(f"cell {c['cell']}: {c['seconds']:.0f} s" for c in waits)
        known = said or ("none" if number in cells else "not rehearsed")
        lines.append(f"| {{{number}}} {lesson['title']} | {lesson['seconds'] or ''} | {known} |")
    return "\n".join(lines)
