"""A model cut into stages: four of torch's schedules train it as one process does, three also with stages that sleep.

The lesson shows the part between the dashed lines.
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional as F

ROWS, WIDTH = 24, 16
SCHEDULES = {  # torch's class, stages per rank, whether it takes a list of stages
    "GPipe": (pipelining.ScheduleGPipe, 1, False),
    "1F1B": (pipelining.Schedule1F1B, 1, False),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2, True),
    "zero bubble": (pipelining.ScheduleInterleavedZeroBubble, 1, True),
}
micro_batches, nap = int(sys.argv[1]), float(sys.argv[2])
if ROWS % micro_batches:
    sys.exit(f"There are {ROWS} rows: choose a number of micro-batches that divides {ROWS}, not {micro_batches}.")
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
events, held, most_held = [], 0, 0


class Watched(torch.autograd.Function):
    """Changes nothing. Records each forward and backward, counts the micro-batches between the two, and may sleep."""

    @staticmethod
    def forward(ctx, x, piece, seconds):
        global held, most_held
        held, ctx.piece, ctx.seconds = held + 1, piece, seconds
        most_held = max(most_held, held)
        note("F", piece, seconds)
        return x.clone()  # the zero-bubble schedule detaches a stage's output in place, which a view would not allow

    @staticmethod
    def backward(ctx, gradient):
        global held
        held -= 1
        note("B", ctx.piece, 2 * ctx.seconds)
        return gradient, None, None


def note(what, piece, seconds):
    begin = time.perf_counter()
    time.sleep(seconds)
    events.append((what, *piece, begin, time.perf_counter()))


class Stage(nn.Module):
    def __init__(self, layers, number, seconds):
        super().__init__()
        self.layers, self.number, self.seconds, self.seen = nn.Sequential(*layers), number, seconds, 0

    def forward(self, x):
        piece, self.seen = (self.seen % micro_batches, self.number), self.seen + 1
        return Watched.apply(self.layers(x), piece, self.seconds)


# ---
def run(name, seconds):
    """A schedule's second step: losses, this rank's gradient, events and plan, most micro-batches held at once."""
    global most_held
    kind, per_rank, several = SCHEDULES[name]
    torch.manual_seed(0)  # every rank draws the whole model, in order, and keeps its own layers
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2 * world_size)]
    inputs, targets = torch.randn(2, ROWS, WIDTH)
    one = torch.empty(ROWS // micro_batches, WIDTH, requires_grad=True)  # an example of a micro-batch between stages
    stages, size, count = [], 2 // per_rank, per_rank * world_size
    for number in range(rank, count, world_size):
        mine = Stage(layers[number * size : (number + 1) * size], number, seconds / per_rank)
        like = {"input_args": one, "output_args": one}
        stages.append(pipelining.PipelineStage(mine, number, count, torch.device("cpu"), **like))
    schedule = kind(stages if several else stages[0], micro_batches, loss_fn=F.mse_loss)
    for _ in range(2):  # the first step also opens the connections
        dist.barrier()
        for stage in stages:
            stage.submod.zero_grad()
        events.clear()
        most_held, losses = 0, []
        last = {"target": targets, "losses": losses} if rank == world_size - 1 else {}
        schedule.step(*[inputs] * (rank == 0), **last)
    gradient = torch.cat([p.grad.flatten() for stage in stages for p in stage.submod.parameters()]).tolist()
    order = schedule.pipeline_order[rank] if several else []  # what torch plans to do; None is an idle slot
    plan = [(a.computation_type.value, a.microbatch_index, a.stage_index) for a in order if a]
    losses = [loss.item() for loss in losses]
    return {"gradient": gradient, "losses": losses, "events": list(events), "most_held": most_held, "plan": plan}


# ---
report = {name: {"awake": run(name, 0.0)} for name in SCHEDULES}
for name in ("GPipe", "1F1B", "interleaved"):  # their backward is in one piece, so `Watched` can slow it down
    report[name]["asleep"] = run(name, nap)
print(json.dumps(report))
dist.destroy_process_group()
