"""Lightning's batch-size finder against a real out-of-memory error: what it returned and tried, what was predicted.

It runs in a process of its own whose memory is limited: on a GPU what the allocator may take, on a CPU the process's
address space.
"""

import functools
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from benchmarks import day
from benchmarks.day import Item, Session
from benchmarks.precision import settings_in
from benchmarks.workloads.vit import Vit
from speedlab import machine

ROOT = Path(__file__).resolve().parent.parent
MODES = ("power", "binsearch")
_TIMEOUT = 150


def measured(mode: str, session: Session, rows: list[dict]) -> list[dict]:
    """One row: the size found, every size tried and whether it ran, and the largest that was predicted to fit."""
    limit = 2**29 if session.tiny else 8 * 2**30 if session.on_gpu else 6 * 2**30
    if not session.on_gpu and sys.platform != "linux":
        return [{"task": TASK.format(mode), "not_run": "only Linux can limit the memory of a process (RLIMIT_AS)"}]
    asked = [sys.executable, "-m", "benchmarks.finder", "--child", mode, session.scale, str(limit)]
    try:
        ended = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        return [{"task": TASK.format(mode), "not_run": f"it had not ended after {_TIMEOUT} s, and was stopped"}]
    if ended.returncode:
        raise RuntimeError((ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1])
    row = json.loads(ended.stdout.splitlines()[-1])
    failed = [size for size, ran in row["tried"] if not ran]
    said = f"failed at {', '.join(map(str, failed))}" if failed else "it never hit the limit"
    found = f"found {row['size']} within {limit / 2**30:.3g} GiB; {said}; predicted to fit: {row['predicted_size']}"
    return [{"task": TASK.format(mode), "mode": mode, "limit": limit, **row, "found": found}]


TASK = "Lightning's finder, mode {}, on ViT-B/16"


def find(mode: str, scale: str, limit: int) -> dict:
    """In a process of its own: run the finder within `limit` bytes, and return what it finds and tries."""
    import lightning
    from lightning.pytorch.tuner import Tuner
    from torch.utils.data import DataLoader, TensorDataset

    device = machine.device()
    work = Vit(device, scale)
    settings = replace(settings_in(work, "fp32", 1), fused=True)
    predicted_size = largest_predicted(work, settings, limit)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))
    else:
        import resource

        allowed = psutil.Process().memory_info().vms + limit
        resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    tried: list[list] = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.run, self.batch_size = work.training(settings), 2
            self.model = self.run.model

        def train_dataloader(self):
            images = torch.zeros(1, 3, settings.size, settings.size).expand(4 * self.batch_size, -1, -1, -1)
            labels = torch.zeros(len(images), dtype=torch.long)
            return DataLoader(TensorDataset(images, labels), self.batch_size)

        def training_step(self, batch):
            tried.append([self.batch_size, False])
            return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def on_train_batch_end(self, *_):
            tried[-1][1] = True

        def configure_optimizers(self):
            return self.run.optimizer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    trainer = lightning.Trainer(max_epochs=1, accelerator=device.type, devices=1, logger=False, barebones=True)
    found = functools.partial(Tuner(trainer).scale_batch_size, Module(), init_val=2, max_trials=12, steps_per_trial=2)
    size = found(mode=mode, margin=0.0)  # the default margin takes 5% off, which gives a size that was never tried
    whole = {each: all(ran for other, ran in tried if other == each) for each, _ in tried}
    return {"size": size, "tried": [list(pair) for pair in whole.items()], "predicted_size": predicted_size}


def largest_predicted(work: Vit, settings, limit: int) -> int:
    """The largest batch size whose predicted peak is within the limit, as the peak is affine in the batch size."""
    at = [work.peak_memory(replace(settings, batch=batch)) for batch in (64, 128)]
    slope = (at[1] - at[0]) / 64
    return max(0, int((limit - at[0]) / slope) + 64)


def items(session: Session) -> Iterator[Item]:
    """An item per mode of the finder."""
    for mode in MODES:
        yield Item(mode, 10 if session.tiny else 90, functools.partial(measured, mode, session))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(find(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
    else:
        sys.exit(day.main({"finder": items}, __doc__))
