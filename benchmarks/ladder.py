"""Three ladders from a naive start through all that speeds up training on one device, one idea per rung.

Each rung is timed alternately with the strict-fp32 start (A B B A). Its row has throughput, speed-up, memory, the
share of the hardware's peak, where the time goes, and whether it still trains. Usage:
python -m benchmarks.ladder [vit] [--items 0,5,9] [--scale quick] [--seconds 20] (--help lists the rest)
"""

import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

from benchmarks import day
from benchmarks.day import Item, Session
from benchmarks.loop import Rung, Settings, lacking
from benchmarks.race import Race
from benchmarks.workloads import Workload
from benchmarks.workloads.accuracy import Accuracy
from benchmarks.workloads.text import Text
from benchmarks.workloads.vit import Vit

WORKLOADS = {"vit": Vit, "distilbert": Text, "to-accuracy": Accuracy}


def climb(start: Settings, rungs: tuple[Rung, ...], lacks: Callable[[Rung], str]) -> Iterator[tuple[Rung, Settings]]:
    """Yield (rung, settings), cumulatively: a rung for which this machine lacks something changes nothing further up.

    `lacks(rung)` is the reason to leave the rung out, or "". No rung builds on one that stands `apart`.
    """
    settings = start
    for rung in rungs:
        tried = replace(settings, **rung.changes)
        yield rung, tried
        if not rung.apart and not lacks(rung):
            settings = tried


def items(kind: type[Workload], session: Session) -> Iterator[Item]:
    """An item per rung."""
    workload = kind(session.device, session.scale)
    race = Race(workload, session.seconds)
    for rung, settings in climb(workload.start(), workload.rungs(), lambda rung: lacking(rung, session.device)):
        seconds = 10 if session.tiny else 300
        if session.on_gpu and not session.tiny:
            seconds = workload.start_seconds if settings == workload.start() else 120 if settings.compiled else 40
        yield Item(rung.name, seconds, functools.partial(measured, race, rung, settings))


def measured(race: Race, rung: Rung, settings: Settings, rows: list[dict]) -> list[dict]:
    """The row of a rung: its name and settings, and its measurement or the reason why there is none."""
    work = race.workload
    row = {"task": work.task_of(rung), "rung": rung.name, "why": rung.why, "apart": rung.apart,
           "settings": asdict(settings)}  # fmt: skip
    start = next((r for r in rows if "not_run" not in r and r["settings"] == asdict(work.start())), None)
    reason = lacking(rung, race.device)
    if settings != work.start() and not start:
        reason = reason or "the start could not be measured, and without it there is nothing to compare with"
    row |= {"not_run": reason} if reason else race.rung(rung, settings, start)
    if "not_run" in row:
        return [row]
    of_tf32 = next((r["speedup"] for r in [*rows, row] if "speedup" in r and r["rung"] == "TF32"), None)
    row["speedup_tf32"] = row["speedup"] / of_tf32 if of_tf32 else None
    return [{**row, "found": words(row)}]


def words(row: dict) -> str:
    """A measured row in words."""
    against = f"{row['speedup']:.2f}x ({row['speedup_low']:.2f} to {row['speedup_high']:.2f}) strict fp32"
    tf32 = f", {row['speedup_tf32']:.2f}x TF32" if row["speedup_tf32"] else ""
    memory = " of ".join(f"{m / 1e9:.1f} GB" for m in (row["memory_measured"], row["memory_predicted"]) if m)
    used = f"{row['mfu_product']:.0%} of the measured product"
    return f"{row['rate']:.4g} {row['unit']}/s, {against}{tf32}, {memory}, {used}, {proof(row)}"


def proof(row: dict) -> str:
    """The loss and the start's, or the time to the target accuracy."""
    if "steps" in row:
        seconds = statistics.median(row["steps"]) * row["settings"]["batch"] / row["rate"]
        return f"{row['aim']:.0%} in {seconds:.3g} s"
    fails = "" if row["trains"] else ", it does not train"
    return f"loss {row['loss']:.2f}, the start's {row['loss_start']:.2f}{fails}"


PARTS = {f"ladder-{name}": functools.partial(items, kind) for name, kind in WORKLOADS.items()}

if __name__ == "__main__":
    arguments = [f"ladder-{word}" if word in WORKLOADS else word for word in sys.argv[1:]]
    sys.exit(day.main(PARTS, __doc__, arguments))
