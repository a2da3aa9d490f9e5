"""Run notebooks again and store their outputs, keeping an old output where only measured values changed.

Without a change of code, a refresh leaves an empty diff. From the first changed code cell on, or everywhere if a file
that the notebook uses has changed, outputs are stored anew: an old measured value would be that of the old code.
Measured values are stored from a quiet machine only. On a busy one, old values stay; if there are none, new ones are
stored and the page is marked as noisy, and a later refresh on a quiet machine replaces them.
Usage: python tools/refresh.py [--noisy | --keep] [--wait SECONDS] [--all | notebook, folder, 9.1 or 9.1.1 ...]
Without names, the notebooks that git sees as changed, and those with a cell that was never run, are refreshed.
--noisy stores measured values whatever else the machine does, and marks the page. --keep stores none where old ones
exist: for a machine that lacks what the page shows, such as hardware for bf16, or to update only results/ figures.
"""

import argparse
import contextlib
import copy
import ctypes
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
import readme
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from notebooks import RECORDED, ROOT, Watch, clocked, execute, find, keep_outputs, write
from tqdm import tqdm

from speedlab import machine

# Cores that other processes may keep busy, on average, and the factor by which two reference products may differ.
_OTHERS, _DRIFT = 0.15, 1.15


@dataclass(frozen=True)
class Moment:
    """A moment's clock in seconds, CPU seconds that other processes have spent, and a product's FLOP/s."""

    time: float
    others: float
    product: float = 0.0

    def others_since(self, earlier: "Moment") -> float:
        """Cores that other processes kept busy, on average, since an earlier moment."""
        return max(0.0, self.others - earlier.others) / (self.time - earlier.time)


def moment(product: bool = False) -> Moment:
    """Read the clocks; with `product`, also time a short reference product."""
    if product:
        machine.peak_flops.cache_clear()
    rate = machine.peak_flops() if product else 0.0
    return Moment(time.perf_counter(), spent_by_others(psutil.Process()), rate)


def spent_by_others(root: psutil.Process) -> float:
    """CPU seconds spent so far by all processes but `root` and its descendants, by interrupts, and by other guests.

    The others' times are added up, rather than ours subtracted from the total: a notebook's workers may end without
    being waited for, and Ray's are never waited for, so that no process's account shows what they have spent.
    """
    ours, machines = {root, *root.children(recursive=True)}, psutil.cpu_times()
    spent = sum(getattr(machines, name, 0.0) for name in ("irq", "softirq", "steal"))
    for process in psutil.process_iter():
        if process not in ours:
            with contextlib.suppress(psutil.Error):
                spent += sum(process.cpu_times()[:4])  # its own, and its ended children's, in user and system mode
    return spent


def adopt_orphans() -> None:
    """Let this process, not init, adopt descendants whose parent ends, where the system can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def wait_until_quiet(patience: float) -> bool:
    """Wait for two quiet seconds and return True; give up after `patience` seconds and return False."""
    end, told = time.monotonic() + patience, False
    while True:
        before = moment()
        time.sleep(2.0)
        others = moment().others_since(before)
        if others <= _OTHERS:
            return True
        if time.monotonic() > end:
            print(f"Other processes keep {others:.2f} cores busy: old measured values are kept.")
            return False
        if not told:
            print(
                f"Other processes keep {others:.2f} cores busy; waiting up to {patience:.0f} s for a quiet machine."
            )
            told = True


def refresh(path: Path, noisy: bool = False, patience: float = 60.0, keep: bool = False) -> tuple[bool, int, bool]:
    """Re-run a notebook in place; return (whether its file changed, outputs kept, whether the machine was quiet)."""
    old = nbformat.read(path, as_version=4)
    calm = noisy or (not keep and wait_until_quiet(patience))
    before = moment(product=True)
    watch = Watch()
    watch.start()
    try:
        new = execute(copy.deepcopy(old), path.parent)
    finally:
        watch.done.set()
    after = moment()
    others, product = after.others_since(before), moment(product=True).product
    drift = max(product, before.product) / min(product, before.product)
    quiet = calm and not noisy and others <= _OTHERS and drift <= _DRIFT
    kept = keep_outputs(old, new, quiet=quiet or noisy)
    stood, stand = ([o for c in page.cells for o in c.get("outputs", ()) if clocked([o])] for page in (old, new))
    clocks_anew = any(clock not in stood for clock in stand)
    if RECORDED in old.metadata and (keep or not (quiet or noisy or clocks_anew)):
        # A clock value that had to be stored is now next to those of another day or machine: record them all again.
        new.metadata[RECORDED] = {**old.metadata[RECORDED], **({"quiet": False} if clocks_anew else {})}
    elif kept < sum(c.cell_type == "code" for c in new.cells) or RECORDED not in old.metadata:
        new.metadata[RECORDED] = {
            "busy": round(others, 2),
            "peak_bytes": round(watch.peak, -7),
            "products": [round(rate / 1e9) for rate in (before.product, product)],
            "quiet": quiet,
            "seconds": round(after.time - before.time),
        }
    return write(new, path), kept, quiet


def changed() -> list[Path]:
    """Notebooks that differ from the last commit, or that hold a code cell without an execution count."""
    asked = subprocess.run(
        ["git", "-c", "core.quotepath=off", "status", "--porcelain", "--untracked-files=all", "--", "*.ipynb"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    names = {line[3:].split(" -> ")[-1].strip('"') for line in asked.stdout.splitlines()}
    return [p for p in find() if p.relative_to(ROOT).as_posix() in names or _has_unrun_cells(p)]


def _has_unrun_cells(path: Path) -> bool:
    cells = nbformat.read(path, as_version=4).cells
    return any(c.cell_type == "code" and c.source.strip() and c.execution_count is None for c in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run notebooks again and store their outputs.")
    parser.add_argument(
        "names", nargs="*", help="notebooks, folders or numbers such as 9.1.1 (default: the changed ones)"
    )
    parser.add_argument("--all", action="store_true", help="every notebook of the course")
    clocks = parser.add_mutually_exclusive_group()
    clocks.add_argument("--noisy", action="store_true", help="store measured values of a busy machine, mark the page")
    clocks.add_argument("--keep", action="store_true", help="keep every old measured value")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for a quiet machine (60)")
    given = parser.parse_args()
    paths = find() if given.all else find(given.names) if given.names else changed()
    if not paths:
        print("No notebook has changed. Name one, or give --all.")
    adopt_orphans()
    failed: list[Path] = []
    with tqdm(paths, unit="notebook", disable=False) as bar:
        for path in bar:
            bar.set_postfix_str(path.stem)
            start = time.perf_counter()
            try:
                differs, kept, quiet = refresh(path, given.noisy, given.wait, given.keep)
            except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
                failed.append(path)
                bar.write(f"failed, left unchanged: {path.relative_to(ROOT)}\n{error}")
                continue
            state = ("changed" if differs else "same   ") + (" quiet" if quiet else " noisy")
            seconds = time.perf_counter() - start
            bar.write(f"{state} {seconds:5.0f} s  {kept:3d} outputs kept  {path.relative_to(ROOT)}")
    readme.update()
    if failed:
        raise SystemExit(f"{len(failed)} of {len(paths)} notebooks raised an error: see above.")


if __name__ == "__main__":
    main()
