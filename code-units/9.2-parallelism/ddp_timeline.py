"""DistributedDataParallel on eight layers: which bucket leaves when, on a network slowed down with `time.sleep`."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
nap, latency, bandwidth = map(float, sys.argv[1:4])  # seconds per layer, seconds per message, bytes per second
limits = [None if text == "default" else float(text) for text in sys.argv[4:]]
network = ThreadPoolExecutor(1)  # one message at a time
layers_done = 0


class Slow(torch.autograd.Function):
    """Changes nothing, but sleeps in backward. Sleeping needs no core, so the ranks do not compete for cores."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        global layers_done
        time.sleep(nap)
        layers_done += 1
        return gradient


class Layer(nn.Linear):
    def forward(self, x):
        return nn.functional.gelu(Slow.apply(super().forward(x)))


torch.manual_seed(0)
model = nn.Sequential(*[Layer(384, 384) for _ in range(8)])
inputs, targets = torch.randn(2, 512, 384)
mine = slice(rank * 512 // world_size, (rank + 1) * 512 // world_size)


def train(limit):
    """Two steps with one bucket limit, in MiB: the events of the second, and the seconds that its backward took."""
    global layers_done
    ddp, events = DistributedDataParallel(model, bucket_cap_mb=limit), []

    def all_reduce(_, bucket):
        event, done = {"bytes": bucket.buffer().nbytes, "layers": layers_done}, torch.futures.Future()
        event["left"] = time.perf_counter() - start
        events.append(event)

        def carry():
            event["start"] = time.perf_counter() - start
            dist.all_reduce(bucket.buffer())  # a sum: the loss below is already divided by the whole batch's size
            time.sleep(latency + bucket.buffer().nbytes / bandwidth)
            event["end"] = time.perf_counter() - start
            done.set_result(bucket.buffer())

        network.submit(carry)
        return done

    ddp.register_comm_hook(None, all_reduce)
    for _ in range(2):  # DDP rebuilds its buckets after the first step
        model.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs[mine]), targets[mine], reduction="sum") / targets.numel()
        events.clear()
        layers_done, start = 0, time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - start
    return {"events": events, "seconds": seconds}


report = {"limits": [train(limit) for limit in limits]}
report["gradient"] = model[-1].weight.grad[0].tolist()
report["parameter_bytes"] = sum(p.nbytes for p in model.parameters())
print(json.dumps(report))
dist.destroy_process_group()
