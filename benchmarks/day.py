"""Measures items of work one by one, writes results/<machine>.json after each, and resumes where it stopped.

A part of the benchmarks is a function that takes a `Session` and yields items. Each item's rows go into the section
named after the part. An item that fails says why in its row, and the next one begins.
"""

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from benchmarks import record
from speedlab import machine
from speedlab.results import FOLDER, load

SCALES = ("tiny", "quick", "full")
# The exit code of a call that ran out of time; the same command goes on from there.
UNFINISHED = 75
# An item that has taken the whole call down this many times is given up.
_TRIES = 2
# Seconds for which measured rates of the products are reused.
_RATES_HOLD = 60


@dataclass(frozen=True)
class Session:
    """What all parts of a call share: the device, the scale, and for how many seconds to time one thing."""

    device: torch.device
    scale: str
    seconds: float

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def tiny(self) -> bool:
        return self.scale == "tiny"


@dataclass(frozen=True)
class Item:
    """One thing to measure: its name within the part, a rough upper limit on its seconds, and the measurement.

    `measure(rows)` gets the section's rows so far and returns the item's own, each with its `task` and either
    `found`, the result in words, or `not_run`, a sentence that says why there is none.
    """

    name: str
    seconds: float
    measure: Callable[[list[dict]], list[dict]]


Part = Callable[[Session], Iterable[Item]]


class OtherWork:
    """Measures the work of other processes, which the load average cannot tell from this process's own."""

    def __init__(self) -> None:
        self.before = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        whole, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = whole.idle + getattr(whole, "iowait", 0.0)
        # time spent running virtual machines is already part of `user`
        busy = sum(whole) - idle - getattr(whole, "guest", 0.0) - getattr(whole, "guest_nice", 0.0)
        return time.perf_counter(), busy, own.user + own.system + own.children_user + own.children_system

    def cores(self) -> float:
        """Cores that other processes have kept busy, on average, since this object was made."""
        wall, busy, own = (now - before for now, before in zip(self._now(), self.before, strict=True))
        return max(0.0, (busy - own) / max(wall, 1e-9))


class Day:
    """One call: the file, the time left, and the items that an earlier call left unfinished."""

    def __init__(self, session: Session, out: Path, options: argparse.Namespace, others: float):
        self.session, self.path, self.options = session, out / f"{record.slug()}.json", options
        self.tried = self.path.with_suffix(".tried")
        self.end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
        self.others, self.done = others, 0
        self.rates, self.rates_until = {}, 0.0

    def known(self, section: str) -> tuple[list[dict], dict[str, float] | None]:
        """The rows of a section that count as measured, and the products' rates from before the first of them.

        Those are rows of this machine, these versions and this scale; rows of other commits count only with --keep,
        since other code may measure something else. With --again, items that were not run are tried once more.
        """
        found = {} if self.options.fresh else load(self.path).get(section, {})
        stamp, now = found.get("stamp"), record.stamp()
        keys = ("machine", "threads", "versions") + (() if self.options.keep else ("commit",))
        # writing the results makes the working tree differ from its commit
        if not stamp or any(_clean(stamp[key]) != _clean(now[key]) for key in keys):
            return [], None
        rows = [row for row in found["rows"] if "item" in row and row["scale"] == self.session.scale]
        measured = {row["item"] for row in rows if "not_run" not in row or not self.options.again}
        return [row for row in rows if row["item"] in measured], stamp.get("products", {}).get("before")

    def part(self, section: str, items: list[Item], order: list[str]) -> bool:
        """Measure the items that the file lacks and that there is time for; return whether there was time for all."""
        rows, before = self.known(section)
        rows = [row for row in rows if row["item"] in order]  # not those of an older list of items
        before, whole = before or self.products(), True
        print(f"\n{section}", flush=True)
        for item in items:
            mine = [row for row in rows if row["item"] == item.name]
            if not mine and self.done and time.monotonic() + item.seconds > self.end:
                whole = False
                continue
            if not mine:
                mine = self.measured(section, item, rows)
                rows = sorted([*rows, *mine], key=lambda row: order.index(row["item"]))
                others = max([self.others, *(row["other_cores"] for row in rows)])
                record.record(section, rows, self.path, before, self.products(), others)
                self.done += 1
                self.tried.unlink(missing_ok=True)
            for row in mine:
                print(f"  {item.name}: {row.get('found') or 'not run, ' + row['not_run']}", flush=True)
        return whole

    def products(self) -> dict[str, float]:
        """The products' rates in FLOP/s, measured within the last minute."""
        if time.monotonic() > self.rates_until:
            self.rates, self.rates_until = record.products(), time.monotonic() + _RATES_HOLD
        return self.rates

    def measured(self, section: str, item: Item, rows: list[dict]) -> list[dict]:
        """The rows of an item; an error becomes a row that says so, and its traceback goes to stderr."""
        name, begin, others = f"{section}/{item.name}", time.perf_counter(), OtherWork()
        tries = self.begun(name)
        failed = lambda why: [{"task": item.name, "not_run": why}]  # noqa: E731
        try:
            found = item.measure(rows) if tries < _TRIES else failed(f"it ended {tries} calls, so it is left out")
        except (torch.OutOfMemoryError, MemoryError) as error:
            found = failed(f"too little memory ({first_line(error)})")
        except Exception as error:
            traceback.print_exc()
            found = failed(f"it failed with {type(error).__name__}: {first_line(error)}")
        torch.compiler.reset()
        gc.collect()
        if self.session.on_gpu:
            torch.cuda.synchronize()  # a GPU that a faulty kernel has broken no longer answers: this call ends here
            torch.cuda.empty_cache()
        spent = {"item": item.name, "scale": self.session.scale, "spent_s": round(time.perf_counter() - begin, 1),
                 "other_cores": round(others.cores(), 2)}  # fmt: skip
        return [{**row, **spent} for row in found]

    def begun(self, name: str) -> int:
        """Note down that this item begins; return how many earlier calls began it and never came back."""
        tries = json.loads(self.tried.read_text()).get(name, 0) if self.tried.exists() else 0
        self.tried.parent.mkdir(parents=True, exist_ok=True)
        self.tried.write_text(json.dumps({name: tries + 1}))
        return tries


def _clean(value: object) -> object:
    return value.removesuffix("-dirty") if isinstance(value, str) else value


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut to 160 characters."""
    return (str(error).strip().splitlines() or ["no message"])[0][:160]


def chosen(asked: str, part: str, names: list[str]) -> list[str]:
    """The items that `--items` asks for, by number or name, always with the first one, which the others need."""
    parts = [text.strip() for text in asked.split(",") if text.strip()]
    unknown = [text for text in parts if text not in names and not (text.isdigit() and int(text) < len(names))]
    if unknown:
        listed = ", ".join(f"{i} {name}" for i, name in enumerate(names))
        raise ValueError(f"The part {part} has no item {unknown[0]!r}; it has: {listed}.")
    wanted = {names[int(text)] if text.isdigit() else text for text in parts} or set(names)
    return [name for name in names if name in wanted | {names[0]}]


def parse(parts: dict[str, Part], about: str, arguments: list[str] | None) -> argparse.Namespace:
    """The options, checked; if one is wrong, the command ends with a sentence that says so."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    usual = os.environ.get("SPEEDLAB_SCALE", "").strip().lower() or "quick"
    parser.add_argument("parts", nargs="*", help=f"{', '.join(parts)}; the default is all, in this order")
    parser.add_argument("--items", default="", help="items of one part, by number or name, separated by commas")
    parser.add_argument("--minutes", type=float, help="begin nothing that would end later; rerun to continue")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of the results file (default: results/)")
    parser.add_argument("--device", default="", help="cpu or cuda; the default is the GPU if there is one")
    parser.add_argument("--scale", default=usual, help="quick, full (real data), or tiny to try it out")
    parser.add_argument("--seconds", type=float, help="seconds per thing timed (default: 20 on a CPU, 6 on a GPU)")
    parser.add_argument("--fresh", action="store_true", help="measure again what the file already has")
    parser.add_argument("--again", action="store_true", help="retry the items that were not run")
    parser.add_argument("--keep", action="store_true", help="keep what a different commit's code has measured")
    options = parser.parse_args(arguments)
    for part in options.parts:
        if part not in parts:
            parser.error(f"There is no part {part!r}; choose from {', '.join(parts)}.")
    if options.scale not in SCALES:
        parser.error(f"There is no scale {options.scale!r}; choose one of {', '.join(SCALES)}.")
    if options.device not in ("", "cpu", "cuda"):
        parser.error(f"There is no device {options.device!r}; choose cpu or cuda.")
    for name in ("seconds", "minutes"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= 3600:
            parser.error(f"--{name} {value:g} makes no sense; give more than 0 and at most 3600.")
    if options.scale == "tiny" and options.out == FOLDER:
        parser.error("The scale tiny is for trying the scripts out: name a folder of your own with --out.")
    if options.items and len(options.parts) != 1:
        parser.error("--items needs one part: name it.")
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before CUDA is looked for, so all of speedlab sees only the CPU
    if options.device == "cuda" and machine.device().type != "cuda":
        parser.error("There is no CUDA GPU here; leave --device out to measure the CPU.")
    return options


def main(parts: dict[str, Part], about: str, arguments: list[str] | None = None) -> int:
    """Run these parts as the command line says; returns the exit code: 0, `UNFINISHED`, or another for an error."""
    options = parse(parts, about, arguments)
    # so that processes started from here find the helpers even if these are not installed
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    device = machine.device()
    seconds = options.seconds or (6.0 if device.type == "cuda" else 20.0)
    session = Session(device, options.scale, seconds)
    others = OtherWork()
    print(machine.describe())  # this call sleeps for a moment
    day = Day(session, options.out, options, others.cores())
    gc.freeze()  # otherwise each garbage collection between samples scans all that was imported, a third of a second
    try:
        whole = True
        for name in options.parts or parts:
            items = list(parts[name](session))
            order = [item.name for item in items]
            wanted = chosen(options.items, name, order)
            whole &= day.part(name, [item for item in items if item.name in wanted], order)
    except KeyboardInterrupt:
        day.tried.unlink(missing_ok=True)
        print("\nStopped; what was measured is kept, and the same command goes on from here.", file=sys.stderr)
        return 130
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"The results could not be saved: {error}", file=sys.stderr)
        return 1
    print("\nAll done." if whole else "\nThe time is up; the same command goes on from here.", "Written to", day.path)
    return 0 if whole else UNFINISHED
