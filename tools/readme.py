"""Write the generated parts of README and CONTRIBUTING, the results page and the pictures of the ladders.

Usage: python tools/readme.py [--check]   (--check writes nothing and fails if one of them is stale)
"""

import json
import re
import statistics
import sys
from pathlib import Path

import doubt
import hosted
import ladder_pictures
from notebooks import ROOT, claims_in, find

from speedlab.results import FOLDER, load, recorded

README, PAGE = ROOT / "README.md", FOLDER / "README.md"
CONTRIBUTING, RUNS = ROOT / "CONTRIBUTING.md", FOLDER / "tests" / "runs.json"
LADDERS = ("vit", "distilbert", "to-accuracy")
# For reading, thinking and running: words per minute of technical text, and minutes per code cell.
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
    """The table of units, one row per notebook, followed by the exercises."""
    units: dict[str, list[Path]] = {}
    for path in find([str(ROOT / "code-units")]):
        units.setdefault(path.parent.name, []).append(path)
    rows = ["| unit | notebook | minutes | claims proven | planted faults caught |", "|---|---|---:|---:|---:|"]
    doubted, planted, excused, changed = doubt.known_results(), 0, 0, 0
    for unit, paths in sorted(units.items()):
        for path in sorted(paths):
            found = summary(path)
            notebook = f"[{found['title']}]({found['path']}): {found['sentence']}"
            entry = doubted.get(found["path"], {"faults": [], "made_by": ""})
            counted, caught, _ = doubt.shares(entry, found["path"])
            planted, excused = planted + len(entry["faults"]), excused + len(entry["faults"]) - counted
            changed += entry["made_by"] != doubt.mark_of(path)
            share = f"{caught} of {counted}" if counted else ""
            rows.append(f"| {unit} | {notebook} | {found['minutes']} | {found['claims']} | {share} |")
    for path in find([str(ROOT / "exercises")]):
        found = summary(path)
        links = f"[{found['title']}]({found['path']}) · [solution](solutions/{path.name})"
        rows.append(f"| exercise | {links} | {found['minutes']} | | |")
    since = f" The code of {changed} lessons has changed since faults were last planted in it." if changed else ""
    left = (
        f"The last column omits {excused} of {planted} planted faults: nothing caught them, and they change nothing "
    )
    rows += ["", left + f"that a reader could notice ([why](tools/equivalent_faults.json)).{since}"]
    return "\n".join(rows)


def places() -> str:
    """Links to platforms that open the course without a clone; empty if the repository has no address."""
    repo = hosted.repository()
    if not repo:
        return ""
    whole = hosted.whole_course(repo)
    first = {k: v for k, v in hosted.links(min(find(["code-units"])), repo).items() if k not in whole}
    row = lambda links: " · ".join(f"[{place}]({link})" for place, link in links.items())  # noqa: E731
    return f"Without a clone, open the first lesson in {row(first)}, or the whole course in {row(whole)}."


def precision() -> str:
    """The headline: for each machine and model, what bf16 and TF32 are worth in a training step, GPUs first."""
    steps: dict[tuple[str, str], dict[str, str]] = {}
    for row in recorded("precision"):
        if "speedup" in row:
            run = row["task"].removeprefix("a training step of "), row["where"]
            steps.setdefault(run, {})[row["dtype"]] = row["verdict"].replace(" faster", "")
    rows = ["| training step of | bf16 against strict fp32 | TF32 against strict fp32 | on |", "|---|---:|---:|---|"]
    for (task, where), said in steps.items():
        rows.append(f"| {task} | {said.get('bf16', 'not run')} | {said.get('tf32', '')} | {where} |")
    return "\n".join(rows)


def ladder(name: str) -> str:
    """The picture and the sentence of one ladder, from every results file that has it; empty if none has."""
    said = ladder_pictures.sentence(name)
    if not said:
        return ""
    return f"![{ladder_pictures.alt(name)}](images/{ladder_pictures.picture(name).name})\n\n{said}"


def results_page() -> str:
    """The text of results/README.md: everything recorded, machine by machine, each section folded."""
    parts = [
        "# What was measured",
        "",
        "Made by `python tools/readme.py` from the files in this folder, which `python -m benchmarks` writes.",
        "",
        "The brackets after a time hold the middle half of its samples; those after a factor, an interval for the "
        "median of the paired speed-ups; those after the cost of measuring, its smallest and largest repeat. "
        "Compare the rungs of a ladder by their factors, which come from pairs timed alternately; rates per second "
        "and shares were measured rung by rung. The share is of a matrix product's FLOP/s, in bf16 "
        "if bf16 is fast, even for fp32 rungs; on a ladder, padding does not count as work; the product is measured "
        "just before and after the rung. If there are two shares, the first is of the data sheet's peak. The loss is "
        "that after a few steps on the same few samples. A single figure for memory is the prediction: on a CPU, "
        "memory is not measured.",
        "",
        "On the ladder to an accuracy, the seconds are computed: the median number of steps that three seeds took, "
        "times the seconds per step of that rung, without validation. Compare the rungs by their factors. The "
        "brackets show how the seeds vary, not how the clock does; the first rungs change only the system and reuse "
        "the start's numbers of steps, so their intervals have almost no width.",
        "",
        "A run is marked noisy if other work took more than half the cores, if the rates of a matrix product before "
        "and after the run differed by a factor of more than 1.15, or if several notebooks ran at the same "
        "time, as on the H200. (An earlier script with a shorter time limit ran those. It went on after a "
        "cell that failed, and named only some failures.) A product that was measured only once, for a short run, "
        "cannot show drift. On the H200's ladder, batches that workers had prepared during the other rung's turn "
        "were used inside the timed part, which can make the first two rungs look faster than they are.",
    ]
    files = {path.stem: load(path) for path in FOLDER.glob("*.json")}
    order = lambda file: (next(iter(files[file].values()))["stamp"]["device"] != "cuda", file)  # noqa: E731
    for file in sorted(files, key=order):
        parts += ["", f"## {file}", "", f"[{file}.json]({file}.json)"]
        for section, content in files[file].items():
            stamp, noisy = content["stamp"], ", noisy" if content["noisy"] else ""
            versions = ", ".join(f"{name} {version}" for name, version in stamp["versions"].items())
            head = f"{section}, {stamp['date']}{noisy}"
            parts += [
                "",
                f"<details><summary>{head}</summary>",
                "",
                f"{_where(stamp)}; {versions}{_products(stamp)}.{_told(content['rows'])}",
                "",
            ]
            made = (_ladder_table if section.startswith("ladder-") else _table)(content["rows"])
            parts += [*made, "", "</details>"]
    return "\n".join(parts) + "\n"


def _where(stamp: dict) -> str:
    """The machine and its CPU cores, if the file has them: they load the data, even for a GPU."""
    cores, processor = stamp.get("cores"), stamp.get("processor", {}).get("model name", "")
    host = f"{cores} cores of {processor}" if stamp["device"] == "cuda" and processor else f"{cores} cores"
    return stamp["machine"] + (f", {host}" if cores else "")


def _told(rows: list[dict]) -> str:
    """What a ladder trains, and what the figures in brackets mean, as sentences; empty if the rows do not say."""
    first, said = rows[0], ""
    if "settings" in first:
        data = "data generated from a seed" if first["scale"] == "quick" else "the real data"
        said += f" {first['task']}, batch {first['settings']['batch']}, {data}."
    kinds = sorted({row["spread"] for row in rows if "spread" in row})
    return said + (f" In brackets: {' or '.join(kinds)}." if kinds else "")


def _products(stamp: dict) -> str:
    """The rates of the matrix products before and after, in TFLOP/s, if the file has them."""
    known = stamp.get("products", {"before": {}, "after": {}})
    before, after = ({name: f"{rate / 1e12:.3g}" for name, rate in known[when].items()} for when in known)
    if known["before"] == known["after"]:
        when, rates = "measured once", [f"{name} {rate}" for name, rate in after.items()]
    else:
        when, rates = "before and after", [f"{name} {before[name]} and {after[name]}" for name in after]
    return f"; a matrix product {when}, in TFLOP/s: {', '.join(rates)}" if rates else ""


def _table(rows: list[dict]) -> list[str]:
    lines = ["| task | result |", "|---|---|"]
    for row in rows:
        found = row.get("found") or f"no result: {row['not_run']}"
        lines.append(f"| {row['task']}{_dtype(row)} | {found} |")
    return lines


def _dtype(row: dict) -> str:
    return f", {row['dtype']}" if "dtype" in row else ""


def _ladder_table(rows: list[dict]) -> list[str]:
    lines = [
        "| rung | per second | against strict fp32 | against TF32 | peak memory, predicted / measured "
        "| share of the data sheet / of the measured product | still trains |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    batch = rows[0].get("settings", {}).get("batch")
    for row in rows:
        name = row["rung"] + (" (another task)" if row["apart"] else "")
        size = row.get("settings", {}).get("batch", batch)
        name += f" (batch {size})" if size != batch else ""
        if "not_run" in row:
            lines.append(f"| {name} | not run | {row['not_run']} | | | | |")
            continue
        memory = " / ".join(_memory(m) for m in (row["memory_predicted"], row["memory_measured"]) if m)
        used = " / ".join(f"{m:.0%}" for m in (row["mfu_specified"], row["mfu_product"]) if m is not None)
        tf32 = f"{row['speedup_tf32']:.2f}x" if row["speedup_tf32"] else ""
        against = f"{row['speedup']:.2f}x ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})"
        if "steps" in row:
            seconds = statistics.median(row["steps"]) * row["settings"]["batch"] / row["rate"]
            proof = f"{row['aim']:.0%} in about {seconds:.3g} s"
        else:
            proof = f"loss {row['loss']:.2f}, the start's {row['loss_start']:.2f}" + ("" if row["trains"] else ": no")
        rate = float(f"{row['rate']:.3g}")
        lines.append(f"| {name} | {rate:,g} {row['unit']} | {against} | {tf32} | {memory} | {used} | {proof} |")
    return lines


def _memory(count: float) -> str:
    """Bytes as GB (or MB, if there are few) in powers of ten, as in the files' own texts."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"


def render(text: str) -> str:
    """README's text with each generated part rewritten between its marks; a ladder without results needs no marks."""
    ladders = {f"ladder-{name}": ladder(name) for name in LADDERS}
    parts = {"places": places(), "syllabus": syllabus(), "precision": precision()} | {
        name: made for name, made in ladders.items() if made
    }
    for name, made in parts.items():
        text = _between_marks(text, name, made, "README.md")
    return text


def runs() -> str:
    """The table of complete test runs, from what conftest.py wrote to results/tests."""
    rows = ["| what was different | Python | torch | lightning | transformers | result | minutes | memory |"]
    rows.append("|---|---|---|---|---|---|---:|---:|")
    for row in json.loads(RUNS.read_text(encoding="utf-8")) if RUNS.exists() else []:
        found = ", ".join(f"{count} {what}" for what, count in row["found"].items())
        versions = " | ".join(row["versions"].values())
        rows.append(
            f"| {row['condition']} | {versions} | {found} | {row['minutes']:.1f} | {row['bytes'] / 1e9:.1f} GB |"
        )
    return "\n".join(rows)


def render_contributing(text: str) -> str:
    """CONTRIBUTING's text with its table of test runs rewritten."""
    return _between_marks(text, "runs", runs(), "CONTRIBUTING.md")


def _between_marks(text: str, name: str, made: str, file: str) -> str:
    before, begin, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not end:
        raise SystemExit(f"{file} lacks the marks <!-- {name} --> and <!-- /{name} -->: put them back.")
    return before + begin + made + "\n" * bool(made) + end + after


RENDERED = {README: render, CONTRIBUTING: render_contributing}


def stale() -> list[str]:
    """The names of generated files that do not show what notebooks and results hold now."""
    pages = {}
    for path, make in RENDERED.items():
        text = path.read_text(encoding="utf-8")
        pages[path.name] = make(text) != text
    pages["results/README.md"] = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != results_page()
    pictures = {f"images/{ladder_pictures.picture(name).name}": ladder_pictures.stale(name) for name in LADDERS}
    return [name for name, old in {**pages, **pictures}.items() if old]


def update() -> None:
    """Write the generated files that are stale."""
    for name in stale():
        if ROOT / name in RENDERED:
            path = ROOT / name
            text = RENDERED[path](path.read_text(encoding="utf-8"))
            path.write_text(text, encoding="utf-8", newline="\n")
        elif name == "results/README.md":
            PAGE.write_text(results_page(), encoding="utf-8", newline="\n")
        else:
            ladder_pictures.draw(Path(name).stem.removeprefix("ladder-"))
        print(f"changed {name}")


def main() -> None:
    if sys.argv[1:] != ["--check"]:
        update()
    elif old := stale():
        raise SystemExit(f"Stale: {', '.join(old)}. Run `python tools/readme.py`.")


if __name__ == "__main__":
    main()
