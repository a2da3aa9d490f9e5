"""The step time of ViT-B/16 and DistilBERT-base in each precision, interleaved with strict fp32.

Weights are random, so nothing is downloaded; a step is forward, backward and Adam, always on the same batch.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks import day
from benchmarks.day import Item, Session
from benchmarks.loop import Batch, Training
from benchmarks.workloads import Workload
from benchmarks.workloads.text import Text
from benchmarks.workloads.vit import Vit
from speedlab import count, machine, measure

MODELS = {"ViT-B/16": Vit, "DistilBERT": Text}
TOKENS = 128


def settings_in(work: Workload, precision: str, batch: int):
    """A workload's start with this batch and no metric, in 'fp32' (strict), 'tf32', or 'bf16' or 'fp16' autocast."""
    half = precision if precision in ("bf16", "fp16") else ""
    return replace(work.start(), batch=batch, tf32=precision == "tf32", autocast=half, host_metric=False)


def step_of(run: Training, batch: Batch) -> Callable[[], None]:
    """A function that does one training step under the run's own switches."""

    def step() -> None:
        with run.numerics():
            run.step(batch)

    return step


def steps_in_each(work: Workload, batch: int) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
    """A training step in each precision that is fast here, and for each of the others why it is not run."""
    wanted = {"fp32": "", "tf32": "TF32 is a format of CUDA GPUs" if work.device.type != "cuda" else ""}
    for name in ("bf16", "fp16"):
        slow = f"a small product takes {machine.probe()[name]:.0f} times as long as in fp32"
        wanted[name] = "" if machine.is_fast(name) else slow
    data = work.fixed(work.start(), batch, TOKENS)
    runs = {name: work.training(settings_in(work, name, batch)) for name, why in wanted.items() if not why}
    return {name: step_of(run, data) for name, run in runs.items()}, {n: why for n, why in wanted.items() if why}


def measured(name: str, session: Session, rows: list[dict]) -> list[dict]:
    """A row per precision of one model."""
    batch = 4 if session.tiny else 64 if session.on_gpu else 8
    steps, lacking = steps_in_each(MODELS[name](session.device, session.scale), batch)
    result = measure.compare(steps, seconds=session.seconds)
    flops, task = count.flops(steps["fp32"]), f"a training step of {name}, batch {batch}"
    task += f", {TOKENS} tokens" if name == "DistilBERT" else ""
    made = []
    for precision, timing in result.timings.items():
        against = result.ratios.get(precision, "baseline")
        made.append(
            {
                "task": task,
                "dtype": precision,
                "found": f"{timing}: {against}",
                "median_s": timing.median,
                "low_s": timing.low,
                "high_s": timing.high,
                "rounds": len(timing.samples),
                "flops": flops,
                "speedup": 1.0 if against == "baseline" else against.median,
                "verdict": str(against),
            }
        )
    return made + [{"task": task, "dtype": precision, "not_run": why} for precision, why in lacking.items()]


def items(session: Session) -> Iterator[Item]:
    """An item per model."""
    for name in MODELS:
        yield Item(name, 5 * session.seconds + 30, functools.partial(measured, name, session))


if __name__ == "__main__":
    sys.exit(day.main({"precision": items}, __doc__))
