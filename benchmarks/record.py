"""Writes results/<machine>.json: sections of rows, each with a stamp of the machine and of how quiet it was."""

import functools
import json
import re
import subprocess
import time
from pathlib import Path

import torch

from speedlab import machine
from speedlab.results import load

# A run is noisy if other work per core exceeds the first, or if a product's rate changes by more than the second.
_QUIET_LOAD = 0.5
_STEADY = 1.15


def slug() -> str:
    """A file name for this machine's results: `nvidia-h200`, `amd-epyc-25-17-1-2-cores-avx512-bf16`.

    A processor's name says little, so its family, model and stepping tell similar ones apart.
    """
    found = machine.describe()
    kind = " ".join(machine.processor().get(key, "") for key in ("cpu family", "model", "stepping"))
    cpu = f"{kind} {found.cores} cores {' '.join(found.instructions[:1])}" if found.device == "cpu" else ""
    return re.sub(r"[^a-z0-9]+", "-", f"{found.name} {cpu}".lower()).strip("-")


def products() -> dict[str, float]:
    """The current rate of a large matrix product, in FLOP/s, in each of fp32, bf16 and fp16 that is fast here."""
    machine.peak_flops.cache_clear()
    return {name: machine.peak_flops(name) for name in ("fp32", "bf16", "fp16") if machine.is_fast(name)}


def moved(before: dict[str, float], after: dict[str, float]) -> bool:
    """Whether any product's rate differs by more than a factor of 1.15 between the two measurements."""
    factors = [after[name] / before[name] for name in before.keys() & after.keys()]
    return any(max(factor, 1 / factor) > _STEADY for factor in factors)


@functools.cache
def stamp() -> dict[str, object]:
    """What results were made with: machine, processor, memory, instruction sets, versions, date, commit."""
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


def record(
    section: str,
    rows: list[dict],
    path: Path,
    before: dict[str, float],
    after: dict[str, float],
    other_cores: float = 0.0,
) -> dict[str, object]:
    """Put `rows` into a section of the file `path`, with a stamp, and return the section.

    `before` and `after` hold the products' rates when the run began and now. The section is marked noisy if they
    differ by more than a factor of 1.15, if the rates measured along with the rows do, or if `other_cores`, the cores
    that other work kept busy, are more than half of all cores.
    The file is replaced in one move, so an interrupt leaves the old one intact.
    """
    known = load(path)
    made = {**stamp(), "load": round(other_cores, 2), "products": {"before": before, "after": after}}
    between = [row["product_flops"] for row in rows if "product_flops" in row]
    drifted = bool(between) and max(between) > _STEADY * min(between)
    noisy = other_cores > _QUIET_LOAD * made["cores"] or moved(before, after) or drifted
    known[section] = {"stamp": made, "noisy": noisy, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return known[section]
