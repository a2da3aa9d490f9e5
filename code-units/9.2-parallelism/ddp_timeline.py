"""The same with DistributedDataParallel: what it sends in each bucket, and when, while backward still runs."""

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [layer for _ in range(8) for layer in (nn.Linear(384, 384), nn.GELU())]
model = nn.Sequential(*layers)
inputs, targets = torch.randn(2, 512, 384)
mine = slice(rank * 512 // world_size, (rank + 1) * 512 // world_size)


def train(bucket_mib):
    """Three steps with buckets of at most so many MiB; what happened in the last one."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mib)
    events = []

    def all_reduce(_, bucket):
        event = {"bytes": bucket.buffer().nbytes, "start": time.perf_counter() - start}
        events.append(event)
        work = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)

        def finished(future):
            event["end"] = time.perf_counter() - start
            return future.value()[0]

        return work.get_future().then(finished)

    ddp.register_comm_hook(None, all_reduce)
    for _ in range(3):  # the buckets get their final order after the first step
        model.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs[mine]), targets[mine])
        events.clear()
        start = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - start
    return {"events": events, "backward_s": seconds}


report = {str(mib): train(mib) for mib in (0.1, 1.2, 100)}
report["gradient"] = model[-2].weight.grad[0].tolist()
report["parameter_bytes"] = sum(p.nbytes for p in model.parameters())
print(json.dumps(report))
dist.destroy_process_group()
