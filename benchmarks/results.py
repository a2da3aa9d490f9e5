"""Writing and reading results/<machine>.json: one file a machine, one section a benchmark, each with its stamp."""

import json
import os
import tempfile
from pathlib import Path

from speedlab import machine

FOLDER = Path(__file__).resolve().parent.parent / "results"
# With more than this much other work a core, a run is marked noisy.
_QUIET_LOAD = 0.5


def record(section: str, rows: list[dict], out: Path | None = None, load_before: float = 0.0) -> Path:
    """Put `rows` into the section of this machine's file, with a stamp, and return the file's path.

    The file is replaced in one move, so that an interrupt leaves the old one. `load_before` is the load average when
    the benchmark began; above half a process a core the section is marked noisy.
    """
    path = out or default_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    known = load(path)
    stamp = {**machine.stamp(), "load": round(load_before, 2)}
    known[section] = {"stamp": stamp, "noisy": load_before > _QUIET_LOAD * stamp["cores"], "rows": rows}
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(known, file, indent=1)
            file.write("\n")
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def default_path() -> Path:
    """Where this machine's results belong."""
    return FOLDER / f"{machine.slug()}.json"


def load(path: Path) -> dict[str, dict]:
    """All sections of a results file, none where there is no file; OSError with a sentence where it is damaged."""
    if not path.exists():
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OSError(f"{path} is not a results file ({error}): move it away or name another with --out.") from error
    if not isinstance(known, dict):
        raise OSError(f"{path} is not a results file: move it away or name another with --out.")
    return known


def recorded(section: str) -> dict[str, dict]:
    """The section of every results file that has it: {file name without ending: {"stamp", "noisy", "rows"}}."""
    files = {path.stem: load(path) for path in sorted(FOLDER.glob("*.json"))}
    return {name: content[section] for name, content in files.items() if section in content}
