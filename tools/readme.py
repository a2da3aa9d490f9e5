"""Write the README's syllabus and tables of figures from the notebooks and from results/; nothing in them is typed.

Usage: python tools/readme.py [--check]   (--check writes nothing and fails where the README is stale)
"""

import json
import re
import sys
from pathlib import Path

import ladder_pictures
from notebooks import ROOT, claims_in, find

from speedlab.display import seconds_text
from speedlab.results import recorded

README = ROOT / "README.md"
# Units that are not written yet, in their place of the numbering: folder name -> what it will show.
PLANNED = {
    "9.9-smaller-models": "schedules, selective backprop, quantization, pruning, distillation",
    "capstone": "all of it together, and on your own model",
}
LADDERS = ("vit", "distilbert", "to-accuracy")
# Reading, thinking and running: words a minute of a technical text, and minutes a code cell.
_WORDS_A_MINUTE, _MINUTES_A_CELL = 150, 0.7


# An exercise states each task's minutes in the line under its heading.
_TASK_MINUTES = re.compile(r"(?m)^.*[Dd]ifficulty.*?(\d+) min")


def summary(path: Path) -> dict[str, object]:
    """Title, first sentence, minutes and claims of a notebook, from what is stored in it."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    prose = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    code = [c for c in cells if c["cell_type"] == "code"]
    title, sentence = re.match(r"# (.+)\n+(?:\*\*)?([^\n]+(?:\n[^\n]+)*)", prose[0]).groups()
    sentence = re.split(r"(?<=[.?!])\s", " ".join(sentence.split()))[0].rstrip(".")
    words = sum(len(text.split()) for text in prose)
    stated = [int(found) for found in _TASK_MINUTES.findall("\n".join(prose))]
    minutes = sum(stated) or words / _WORDS_A_MINUTE + _MINUTES_A_CELL * len(code)
    return {
        "title": title.strip(),
        "sentence": sentence,
        "minutes": 5 * max(1, round(minutes / 5)),
        "claims": sum(claims_in(c["outputs"]) for c in code),
        "path": path.relative_to(ROOT).as_posix(),
    }


def syllabus() -> str:
    """The table of units, one row a notebook, planned units marked as such, then the exercises."""
    units: dict[str, list[Path]] = {name: [] for name in PLANNED}
    for path in find(["code-units"] if (ROOT / "code-units").exists() else []):
        units.setdefault(path.parent.name, []).append(path)
    rows = ["| unit | notebook | minutes | claims proven |", "|---|---|---:|---:|"]
    for unit, paths in sorted(units.items()):
        if not paths:
            rows.append(f"| {unit} | *planned*: {PLANNED[unit]} | | |")
        for path in sorted(paths):
            found = summary(path)
            notebook = f"[{found['title']}]({found['path']}): {found['sentence']}"
            rows.append(f"| {unit} | {notebook} | {found['minutes']} | {found['claims']} |")
    for path in sorted((ROOT / "exercises").glob("*.ipynb")):
        found = summary(path)
        links = f"[{found['title']}]({found['path']}) · [solution](solutions/{path.name})"
        rows.append(f"| exercise | {links} | {found['minutes']} | |")
    return "\n".join(rows)


def precision() -> str:
    """The table of step times by precision, from every results file that has them."""
    rows = ["| machine | model, batch | precision | a step | against strict fp32 |", "|---|---|---|---:|---|"]
    for name, section in recorded("precision").items():
        stamp = section["stamp"]
        noisy = ", noisy" if section["noisy"] else ""
        where = f"[{stamp['machine']}, {stamp['cores']} cores](results/{name}.json), {stamp['date']}{noisy}"
        for row in section["rows"]:
            model = f"{row['model']}, {row['batch']}"
            if "not_run" in row:
                rows.append(f"| {where} | {model} | {row['dtype']} | not run | {row['not_run']} |")
            else:
                time = seconds_text(row["median_s"])
                rows.append(f"| {where} | {model} | {row['dtype']} | {time} | {row['verdict']} |")
    return "\n".join(rows)


def ladder(name: str) -> str:
    """The picture and the table of one ladder, a row a rung, from every results file that has it; or nothing."""
    head = (
        "| machine | rung | a second | against strict fp32 | against TF32 | peak memory, predicted / measured "
        "| MFU, data sheet / measured product | still trains |"
    )
    rows = [head, "|---|---|---:|---:|---:|---:|---:|---|"]
    for file, section in recorded(f"ladder-{name}").items():
        stamp = section["stamp"]
        noisy = ", noisy" if section["noisy"] else ""
        where = f"[{stamp['machine']}, {stamp['cores']} cores](results/{file}.json), {stamp['date']}{noisy}"
        rows += [f"| {'' if i else where} | {_rung(row)} |" for i, row in enumerate(section["rows"])]
    if len(rows) == 2:
        return ""
    return "\n".join([f"![{ladder_pictures.alt(name)}](images/{ladder_pictures.picture(name).name})", "", *rows])


def _rung(row: dict) -> str:
    name = row["rung"] + (" (another task)" if row["apart"] else "")
    if "skipped" in row:
        return f"{name} | not run | {row['skipped']} | | | | "
    memory = " / ".join(f"{m / 1e9:.1f} GB" for m in (row["memory_predicted"], row["memory_measured"]) if m)
    used = " / ".join(f"{m:.0%}" for m in (row["mfu_specified"], row["mfu_product"]) if m is not None)
    tf32 = f"{row['speedup_tf32']:.2f}x" if row["speedup_tf32"] else ""
    against = f"{row['speedup']:.2f}x ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})"
    if "steps" in row:
        proof = f"{row['target']:.0%} in {row['seconds_to_target']:.3g} s"
    else:
        proof = f"loss {row['loss']:.2f}, the start's {row['loss_start']:.2f}" + ("" if row["trains"] else ": no")
    return f"{name} | {row['rate']:.3g} {row['unit']} | {against} | {tf32} | {memory} | {used} | {proof}"


def render(text: str) -> str:
    """The README with each generated part between its marks made anew; a ladder without results needs no marks."""
    ladders = {f"ladder-{name}": ladder(name) for name in LADDERS}
    parts = {"syllabus": syllabus(), "precision": precision()} | {
        name: made for name, made in ladders.items() if made
    }
    for name, made in parts.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not end:
            raise SystemExit(f"README.md has no marks <!-- {name} --> and <!-- /{name} -->: put them back.")
        text = before + begin + made + "\n" + end + after
    return text


def update() -> None:
    """Write the README's generated parts if they changed."""
    before = README.read_text(encoding="utf-8")
    after = render(before)
    for name in filter(ladder_pictures.stale, LADDERS):
        ladder_pictures.draw(name)
        print(f"changed images/{ladder_pictures.picture(name).name}")
    if before != after:
        README.write_text(after, encoding="utf-8", newline="\n")
        print("changed README.md")


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        text = README.read_text(encoding="utf-8")
        stale = render(text) != text
        if stale or any(map(ladder_pictures.stale, LADDERS)):
            raise SystemExit("The README's tables are stale: run `python tools/readme.py`.")
    else:
        update()


if __name__ == "__main__":
    main()
