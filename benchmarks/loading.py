"""What workers and pinned memory are worth: a ViT fed by a DataLoader, and one large copy to the GPU."""

import functools
import itertools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks import day
from benchmarks.day import Item, Session
from benchmarks.precision import settings_in
from benchmarks.workloads.vit import Vit
from speedlab import machine, measure

NO_GPU = "pinned memory speeds up copies to a GPU, and there is none here"


def training(workers: int, pinned: bool, session: Session, rows: list[dict]) -> list[dict]:
    """One row: images per second in training from a DataLoader with `workers` workers."""
    task = f"training ViT-B/16 from a DataLoader, {workers} workers" + (", pinned" if pinned else "")
    if pinned and not session.on_gpu:
        return [{"task": task, "not_run": NO_GPU}]
    work = Vit(session.device, session.scale)
    batch = 4 if session.tiny else 64 if session.on_gpu else 8
    half = "bf16" if machine.is_fast("bf16") else "fp32"
    settings = replace(settings_in(work, half, batch), fused=True, workers=workers, pinned=pinned)
    run = work.build(settings)
    with run.numerics():
        timing = measure.time_step(run.step, seconds=session.seconds)
    # the mean, since batches of several workers come in bursts, and a median would see only the fast ones
    rate = batch / statistics.fmean(timing.samples)
    row = {
        "task": task,
        "workers": workers,
        "pinned": pinned,
        "batch": batch,
        "rate": rate,
        "median_s": timing.median,
    }
    return [{**row, "low_s": timing.low, "high_s": timing.high, "found": f"{rate:.4g} images/s"}]


def copying(session: Session, rows: list[dict]) -> list[dict]:
    """Two rows: bytes per second of a copy to the GPU, from pageable and from pinned memory."""
    task = "copying 256 MiB to the GPU"
    if not session.on_gpu:
        return [{"task": task, "not_run": NO_GPU}]
    source = torch.ones(2**26)
    steps = {"pageable": source, "pinned": source.pin_memory()}
    result = measure.compare({name: functools.partial(tensor.to, session.device) for name, tensor in steps.items()})
    return [
        {"task": f"{task}, {name}", "rate": source.nbytes / timing.median, "median_s": timing.median,
         "found": f"{source.nbytes / timing.median / 1e9:.3g} GB/s"}
        for name, timing in result.timings.items()
    ]  # fmt: skip


def items(session: Session) -> Iterator[Item]:
    """An item per number of workers, with and without pinned memory, and one for the copy alone."""
    cores = machine.cores()
    counts = [0, 1] if session.tiny else [n for n in (0, 1, 2, 4, 8, 16) if n <= cores]
    for workers, pinned in itertools.product(counts, (False, True)):
        name = f"{workers} workers" + (", pinned" if pinned else "")
        yield Item(name, 2 * session.seconds + 10, functools.partial(training, workers, pinned, session))
    yield Item("copy", 20, functools.partial(copying, session))


if __name__ == "__main__":
    sys.exit(day.main({"loading": items}, __doc__))
