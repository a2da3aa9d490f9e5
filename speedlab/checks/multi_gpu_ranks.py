"""Run on each process by `multi_gpu.on_ranks`: the learner's functions, watched, and what they did as JSON."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from speedlab.checks.multi_gpu import Rows, make_model

sent: list[int] = []


def count(sent: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    sent.append(bucket.buffer().nbytes)
    return allreduce_hook(None, bucket)


class Watched(DistributedDataParallel):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_comm_hook(sent, count)


def parameters(model: nn.Module) -> list[float]:
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
# a rank that waits for one that does not come gives up after some seconds
dist.init_process_group("gloo", timeout=timedelta(seconds=given["patience"]))
rank, world_size = dist.get_rank(), dist.get_world_size()
reports = []
for task, source, name in given["answers"]:
    names = {"torch": torch, "nn": nn, "F": nn.functional, "dist": dist, "DataLoader": DataLoader}
    names |= {"DistributedSampler": DistributedSampler, "DistributedDataParallel": Watched}
    report = {"error": ""}
    try:
        exec(source, names)
        rows, sent[:] = Rows(26, seed=1), []
        if task == "train_ddp":
            reached = names[name](make_model(seed=rank), rows, 2, 12, 3, 0.1, rank, world_size)
            report |= {"weights": parameters(reached), "sent": sum(sent), "read": rows.read}
        else:
            saved: list[nn.Module] = []
            model, sampler = Watched(make_model(seed=rank)), DistributedSampler(rows, seed=0)
            loader, held_out = DataLoader(rows, 6, sampler=sampler, drop_last=True), Rows(13, seed=2)
            reached = names[name](model, sampler, loader, held_out, 2, 0.05, rank, world_size, saved.append)
            report |= {"weights": parameters(model), "read": rows.read, "saves": len(saved)}
            report |= {"accuracy": float(reached["accuracy"]), "losses": [float(loss) for loss in reached["losses"]]}
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    reports.append(report)
    try:
        dist.barrier()
    except RuntimeError:
        break  # a collective was missed: the group is of no more use
print(json.dumps(reports))
