"""Three ladders from a naive start to everything that this course teaches, one change a rung.

Each rung is timed in turns with the strict-fp32 start (A B A B), and shows its throughput, its speed-up, its memory,
its share of the hardware's peak, where its time goes, and that it still trains. Results go to results/<machine>.json
after every rung: an interrupt loses nothing, and a second call goes on where the first one stopped. Usage:
python -m benchmarks.ladder [--ladder vit] [--rungs 0,5,9] [--device cpu] [--scale quick] [--seconds 20] [--out FILE]
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import torch

from benchmarks import rungs_accuracy, rungs_text, rungs_vit
from benchmarks.racing import Ladder, Session
from benchmarks.training import Rung, Settings, climb, lacking
from speedlab import machine, results

LADDERS = {"vit": rungs_vit, "distilbert": rungs_text, "to-accuracy": rungs_accuracy}
SCALES = ("tiny", "quick", "full")


# --- the file ---------------------------------------------------------------------------------------------


def finished(section: str, out: Path, scale: str) -> list[dict]:
    """The rows of `section` that a call on this machine, with these versions and this commit, has finished before.

    A rung that was skipped is tried again. Rows of other code or other versions would not be comparable: they are
    not used.
    """
    known = results.load(out).get(section)
    if not known:
        return []
    stamp, now = known["stamp"], results.stamp()
    same = all(stamp[key] == now[key] for key in ("machine", "threads", "versions"))
    if not same or _clean(stamp["commit"]) != _clean(now["commit"]):
        return []
    return [row for row in known["rows"] if row["scale"] == scale and "skipped" not in row]


def _clean(commit: str) -> str:
    # writing the results makes the work tree differ from its commit
    return commit.removesuffix("-dirty")


class OtherWork:
    """Counts the work of other processes: the load average cannot, once this process works itself."""

    def __init__(self) -> None:
        self.before = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        whole, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = whole.idle + getattr(whole, "iowait", 0.0)
        # time spent in a virtual machine is in `user` already
        busy = sum(whole) - idle - getattr(whole, "guest", 0.0) - getattr(whole, "guest_nice", 0.0)
        return time.perf_counter(), busy, own.user + own.system + own.children_user + own.children_system

    def cores(self) -> float:
        """Cores that others kept busy since this was made."""
        wall, busy, own = (now - before for now, before in zip(self._now(), self.before, strict=True))
        return max(0.0, (busy - own) / max(wall, 1e-9))


# --- what is shown ----------------------------------------------------------------------------------------

COLUMNS = ("rung", "rate", "against fp32", "against TF32", "memory", "MFU", "data/fb/opt/host", "proof")
WIDTHS = (28, 12, 21, 12, 15, 9, 16, 13)


def line(cells: tuple[str, ...]) -> str:
    """One line of the live table."""
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def cells(row: dict) -> tuple[str, ...]:
    """A measured row as people read it: memory predicted/measured in GB, MFU against the specification/a product."""
    if row["speedup"] == 1 and row["speedup_low"] == row["speedup_high"]:
        against = "the start"
    else:
        against = f"{row['speedup']:.2f}x ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})"
    tf32 = row.get("speedup_tf32")
    memory = [row["memory_predicted"], row["memory_measured"]]
    mfu = [row["mfu_specified"], row["mfu_product"]]
    return (
        f"{row['rung']}{' *' if row['apart'] else ''}",
        f"{row['rate']:.4g}/s",
        against,
        f"{tf32:.2f}x" if tf32 else "-",
        "/".join("-" if m is None else f"{m / 1e9:.2f}" for m in memory),
        "/".join("-" if m is None else f"{m:.0%}" for m in mfu),
        "/".join(f"{share:.0%}"[:-1] for share in row["split"].values()),
        proof(row),
    )


def proof(row: dict) -> str:
    """The loss beside the start's, or the steps to the target beside the time that they take."""
    if "steps" in row:
        return f"{statistics.median(row['steps']):.0f} steps, {row['seconds_to_target']:.3g} s"
    return f"{row['loss']:.2f} ({row['loss_start']:.2f})" + ("" if row["trains"] else " does not train")


# --- the command ------------------------------------------------------------------------------------------


def climb_ladder(name: str, session: Session, chosen: list[str], out: Path, fresh: bool, load: float) -> None:
    """Measure the chosen rungs of one ladder that the file lacks, and write the file after each."""
    module, section = LADDERS[name], f"ladder-{name}"
    ladder = getattr(module, "Ladder", Ladder)(module, session)
    rows = [] if fresh else finished(section, out, session.scale)
    print(f"\n{name}: {module.UNIT} a second; loads: {load:.2f} before the call")
    print(line(COLUMNS), flush=True)
    why_not = lambda rung: lacking(rung, session.device)  # noqa: E731
    for rung, settings in climb(ladder.settings, module.rungs(session.device, session.scale), why_not):
        if rung.name not in chosen:
            continue
        row = next((r for r in rows if r["rung"] == rung.name and r["settings"] == asdict(settings)), None)
        if row is None:
            row = measured_row(ladder, rung, settings, rows, session, why_not(rung))
            rows = [r for r in rows if r["rung"] != rung.name] + [row]
            others = max([load, *(r["other_cores"] for r in rows)])
            results.record(section, in_order(rows, name, session), out, others)
        skipped = row.get("skipped")
        print(f"{rung.name.ljust(WIDTHS[0])}  skipped: {skipped}" if skipped else line(cells(row)), flush=True)


def measured_row(
    ladder: Ladder, rung: Rung, settings: Settings, rows: list[dict], session: Session, reason: str
) -> dict:
    """The whole row of a rung: its place and settings, and its measurement or the reason why there is none."""
    row = {"rung": rung.name, "why": rung.why, "apart": rung.apart, "scale": session.scale,
           "settings": asdict(settings), "other_cores": 0.0}  # fmt: skip
    start_row = next((r for r in rows if r["settings"] == asdict(ladder.settings) and "skipped" not in r), None)
    if settings != ladder.settings and not start_row:
        reason = reason or "the start could not be measured, and without it there is nothing to compare with"
    if reason:
        return {**row, "skipped": reason}
    others, begin = OtherWork(), time.perf_counter()
    try:
        found = ladder.rung(rung, settings, start_row)
    except (torch.OutOfMemoryError, MemoryError) as error:
        found = {"skipped": f"too little memory ({str(error).splitlines()[0][:120]})"}
    finally:
        torch.compiler.reset()
    if "skipped" in found:
        return {**row, **found}
    tf32 = next((r["speedup"] for r in rows if r["rung"] == "TF32" and "speedup" in r), None)
    tf32 = found["speedup"] if rung.name == "TF32" else tf32
    versus = found["speedup"] / tf32 if tf32 else None
    row |= {"spent_s": round(time.perf_counter() - begin, 1), "other_cores": round(others.cores(), 2)}
    return {**row, **found, "speedup_tf32": versus}


def in_order(rows: list[dict], name: str, session: Session) -> list[dict]:
    """The rows in the order of the ladder, whatever was measured first."""
    names = [rung.name for rung in LADDERS[name].rungs(session.device, session.scale)]
    return sorted(rows, key=lambda row: names.index(row["rung"]))


def chosen_rungs(text: str, name: str, device: torch.device, scale: str) -> list[str]:
    """The names of the rungs that `--rungs` asks for, by number or by name; the start is always among them."""
    names = [rung.name for rung in LADDERS[name].rungs(device, scale)]
    if not text:
        return names
    asked = [part.strip() for part in text.split(",")]
    unknown = [part for part in asked if part not in names and not (part.isdigit() and int(part) < len(names))]
    if unknown:
        listed = ", ".join(f"{i} {n}" for i, n in enumerate(names))
        raise ValueError(f"The ladder {name} has no rung {unknown[0]!r}; it has: {listed}.")
    wanted = {names[int(part)] if part.isdigit() else part for part in asked}
    return [n for n in names if n in wanted | {names[0]}]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, checked; what is wrong with them ends the command with a sentence."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder", description=__doc__.splitlines()[0])
    parser.add_argument("--ladder", default="all", help=f"{', '.join(LADDERS)}, or all (the default)")
    parser.add_argument("--rungs", default="", help="numbers or names, with commas between; the default is all")
    parser.add_argument("--device", default="", help="cpu or cuda; the default is the GPU where there is one")
    parser.add_argument("--scale", default=machine.scale(), help="quick, full (real data), or tiny to try it out")
    parser.add_argument("--seconds", type=float, default=None, help="timing a rung; default 20 on a CPU, 15 on a GPU")
    parser.add_argument("--out", type=Path, default=None, help="the results file (default: results/<machine>.json)")
    parser.add_argument("--fresh", action="store_true", help="measure anew what the file has already")
    options = parser.parse_args(arguments)
    if options.ladder not in (*LADDERS, "all"):
        parser.error(f"There is no ladder {options.ladder!r}; choose one of {', '.join(LADDERS)}, or all.")
    if options.scale not in SCALES:
        parser.error(f"There is no scale {options.scale!r}; choose one of {', '.join(SCALES)}.")
    if options.device not in ("", "cpu", "cuda"):
        parser.error(f"There is no device {options.device!r}; choose cpu or cuda.")
    if options.seconds is not None and not 0 < options.seconds <= 3600:
        parser.error(f"--seconds {options.seconds:g} makes no sense; give more than 0 and at most 3600.")
    if options.scale == "tiny" and options.out is None:
        parser.error("The scale tiny is for trying the script out: name a file of your own with --out.")
    if options.rungs and options.ladder == "all":
        parser.error("--rungs needs one ladder: name it with --ladder.")
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before CUDA is looked for, so that all of speedlab sees the CPU
    device = machine.device()
    if options.device == "cuda" and device.type != "cuda":
        parser.error("There is no CUDA GPU here; leave --device out to measure the CPU.")
    try:
        for name in ladders(options):
            chosen_rungs(options.rungs, name, device, options.scale)
    except ValueError as error:
        parser.error(str(error))
    if options.seconds is None:
        options.seconds = 20.0 if device.type == "cpu" else 15.0
    return options


def ladders(options: argparse.Namespace) -> list[str]:
    return list(LADDERS) if options.ladder == "all" else [options.ladder]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    load = psutil.getloadavg()[0]
    print(machine.describe())
    device = machine.device()
    product = machine.peak_flops("bf16" if machine.is_fast("bf16") else "fp32")
    session = Session(device, options.scale, options.seconds, product)
    out = options.out or results.default_path()
    try:
        for name in ladders(options):
            chosen = chosen_rungs(options.rungs, name, device, options.scale)
            climb_ladder(name, session, chosen, out, options.fresh, load)
    except KeyboardInterrupt:
        print("\nStopped; what was measured is kept, and the same command goes on from here.", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"The results could not be kept: {error}", file=sys.stderr)
        return 1
    print("\n* another task, not the same work done faster. Written to", out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
