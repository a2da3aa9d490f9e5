"""Reading and writing results/<machine>.json: one file per machine, one stamped section per benchmark."""

import json
import re
import subprocess
import time
from pathlib import Path

import psutil
import torch

from speedlab import machine

FOLDER = Path(__file__).resolve().parent.parent / "results"
# With more than this much other work per core, a run is marked noisy.
_QUIET_LOAD = 0.5


def slug() -> str:
    """A file name for this machine's results: `amd-epyc-2-cores-avx2`, `nvidia-h200`."""
    found = machine.describe()
    cpu = f"{found.cores} cores {' '.join(found.instructions[:1])}" if found.device == "cpu" else ""
    return re.sub(r"[^a-z0-9]+", "-", f"{found.name} {cpu}".lower()).strip("-")


def stamp() -> dict[str, object]:
    """The full stamp of a result: machine, instruction sets, versions, load, date and git commit, as plain values."""
    found = machine.describe()
    return {
        "machine": found.name,
        "processor": machine.processor(),
        "device": found.device,
        "cores": found.cores,
        "threads": torch.get_num_threads(),
        "memory_gib": round(found.memory_gib, 1),
        "instructions": list(found.instructions),
        "fast_dtypes": list(found.fast),
        "versions": dict(found.versions),
        "load": round(psutil.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
    }


def _commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"


def record(section: str, rows: list[dict], out: Path | None = None, load_before: float = 0.0) -> Path:
    """Put `rows` into the section of this machine's file, with a stamp, and return the file's path.

    The file is replaced in one move, so that an interrupt leaves the old one. `load_before` is the load average when
    the benchmark began; above half a process per core, the section is marked noisy.
    """
    path = out or default_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    known = load(path)
    made = {**stamp(), "load": round(load_before, 2)}
    known[section] = {"stamp": made, "noisy": load_before > _QUIET_LOAD * made["cores"], "rows": rows}
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def default_path() -> Path:
    """Where this machine's results belong."""
    return FOLDER / f"{slug()}.json"


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


def recorded(section: str) -> dict[str, dict]:
    """The section of every results file that has it: {file name without ending: {"stamp", "noisy", "rows"}}."""
    files = {path.stem: load(path) for path in sorted(FOLDER.glob("*.json"))}
    return {name: content[section] for name, content in files.items() if section in content}
