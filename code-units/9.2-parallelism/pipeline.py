"""A model cut into stages, one a rank: GPipe and 1F1B train it as one process does; then stages that sleep."""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
last = world_size - 1
micro_batches, naps = int(sys.argv[1]), float(sys.argv[2])
events, held, most_held = [], 0, 0


class Watched(torch.autograd.Function):
    """Changes nothing. Counts the micro-batches between their forward and their backward, and may take naps."""

    @staticmethod
    def forward(ctx, x, seconds):
        global held, most_held
        held, ctx.seconds = held + 1, seconds
        most_held = max(most_held, held)
        note("forward", seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        global held
        held -= 1
        note("backward", 2 * ctx.seconds)
        return gradient, None


def note(what, seconds):
    begin = time.monotonic()
    time.sleep(seconds)
    events.append((what, begin, time.monotonic()))


class Stage(nn.Module):
    def __init__(self, layers, seconds=0.0):
        super().__init__()
        self.layers, self.seconds = layers, seconds

    def forward(self, x):
        return Watched.apply(self.layers(x), self.seconds)


def run(kind, seconds):
    """One step of a schedule: losses, this stage's gradients, what it did and when, what it held at most."""
    global most_held
    torch.manual_seed(0)  # every rank draws the whole model, in order, and keeps its own layer
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(world_size)]
    inputs, targets = torch.randn(2, 24, 16)
    one = torch.empty(24 // micro_batches, 16, requires_grad=True)  # what a micro-batch is like between stages
    stage = PipelineStage(
        Stage(layers[rank], seconds), rank, world_size, torch.device("cpu"), input_args=one, output_args=one
    )
    schedule = kind(stage, micro_batches, loss_fn=F.mse_loss)
    for _ in range(2):  # the first step also opens the connections
        dist.barrier()
        stage.submod.zero_grad()
        events.clear()
        most_held, losses = 0, []
        schedule.step(*[inputs] * (rank == 0), **({"target": targets, "losses": losses} if rank == last else {}))
    gradient = torch.cat([p.grad.flatten() for p in stage.submod.parameters()]).tolist()
    losses = [loss.item() for loss in losses]
    return {"gradient": gradient, "losses": losses, "events": list(events), "most_held": most_held}


schedules = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
report = {name: {"awake": run(kind, 0.0), "asleep": run(kind, naps)} for name, kind in schedules.items()}
print(json.dumps(report))
dist.destroy_process_group()
