"""What benchmarks/ recorded: results/ holds a JSON file per machine, with a stamped section per benchmark."""

import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "results"


def recorded(section: str) -> list[dict]:
    """Every row of `section` in results/, GPUs first: what the benchmark wrote, and where and when it did.

    Besides its own entries, such as `task` (what was done, in words), a row has `machine` (words that tell the files
    apart), `device` ('cuda' or 'cpu'), `date`, `noisy`, `file` (its name without ending), `where`: machine, torch's
    version, date and, if true, noisy, in one line. A row without a measurement says in `not_run` why there is none.
    """
    known = {path.stem: found[section] for path in FOLDER.glob("*.json") if section in (found := load(path))}
    names = {file: _name(found["stamp"]) for file, found in known.items()}
    made = []
    for file in sorted(known, key=lambda file: (known[file]["stamp"]["device"] != "cuda", file)):
        stamp, noisy, name = known[file]["stamp"], known[file]["noisy"], names[file]
        if list(names.values()).count(name) > 1:
            name += f" ({file})"
        place = {"file": file, "machine": name, "device": stamp["device"], "date": stamp["date"], "noisy": noisy,
            "where": f"{name}, torch {stamp['versions']['torch']}, {stamp['date']}{', noisy' * noisy}"}  # fmt: skip
        made += [{**row, **place} for row in known[file]["rows"]]
    return made


def _name(stamp: dict) -> str:
    """A GPU's name; for a processor, also its cores and support for short formats, since names are often vague."""
    kinds = stamp["instructions"][:1]
    return ", ".join([stamp["machine"], *([f"{stamp['cores']} cores", *kinds] if stamp["device"] == "cpu" else [])])


def load(path: Path) -> dict[str, dict]:
    """All sections of a results file, none where there is no file; OSError with a sentence where it is damaged."""
    if not path.exists():
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(known, dict):
            raise ValueError("it holds no sections")
    except ValueError as error:
        raise OSError(f"{path} is not a results file ({error}): move it away or name another with --out.") from error
    return known
