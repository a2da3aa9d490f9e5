"""A training step's throughput and memory by batch size: where the device is full, and how much memory that takes."""

import functools
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks import day
from benchmarks.day import Item, Session
from benchmarks.precision import MODELS, settings_in, step_of
from benchmarks.race import product_flops
from speedlab import machine, measure


def measured(name: str, batch: int, session: Session, rows: list[dict]) -> list[dict]:
    """One row: samples per second, FLOP/s as a share of a matrix product's, and the allocator's peaks on a GPU."""
    work = MODELS[name](session.device, session.scale)
    half = "bf16" if machine.is_fast("bf16") else "fp32"
    settings = replace(settings_in(work, half, batch), fused=True)
    row = {"task": f"a training step of {name} in {half}", "model": name, "batch": batch}
    product = product_flops()
    if session.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run, data = work.training(settings), work.fixed(settings, batch)
    timing = measure.time_step(step_of(run, data), seconds=session.seconds / 2)
    wide = data[0]["input_ids"].shape[1] if "input_ids" in data[0] else 0
    rate = batch / timing.median
    row |= {"median_s": timing.median, "low_s": timing.low, "high_s": timing.high, "rate": rate,
            "share": rate * work.sample_flops(settings.size, wide) / product}  # fmt: skip
    memory = ""
    if session.on_gpu:
        row |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        memory = f", {row['allocated'] / 1e9:.2f} GB allocated, {row['reserved'] / 1e9:.2f} reserved"
    return [{**row, "found": f"batch {batch}: {rate:.4g}/s, {row['share']:.0%} of the measured product{memory}"}]


def items(session: Session) -> Iterator[Item]:
    """An item per model and batch size; the sizes double."""
    largest = {"ViT-B/16": 11, "DistilBERT": 9} if session.on_gpu else {"ViT-B/16": 5, "DistilBERT": 3}
    for name, powers in largest.items():
        for power in range(0, 3 if session.tiny else powers):
            work = functools.partial(measured, name, 2**power, session)
            yield Item(f"{name}, batch {2**power}", session.seconds + 15, work)


if __name__ == "__main__":
    sys.exit(day.main({"batch": items}, __doc__))
