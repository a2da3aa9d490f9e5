"""Four ranks on a 2 x 2 grid, used twice: FSDP with tensor parallelism, and hybrid sharding (HSDP).

The lesson shows the part between the dashed lines.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

world_size = int(os.environ["WORLD_SIZE"])  # read before any rank connects
if world_size != 4:
    sys.exit(f"This script arranges its ranks in a 2 x 2 grid: start it on 4 processes, not on {world_size}.")
dist.init_process_group("gloo")


def build():
    torch.manual_seed(0)  # every rank builds the whole model, then keeps its share
    return nn.Sequential(nn.Linear(16, 64, bias=False), nn.GELU(), nn.Linear(64, 16, bias=False))


def one_process():
    """The gradients of the whole batch on one process, which every grid must reproduce."""
    model = build()
    return torch.autograd.grad(F.mse_loss(model(inputs), targets), list(model.parameters()))


def train(model, group, groups):
    """One step on this group's rows: calls per collective, the gradients' largest error, and what this rank keeps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with CommDebugMode() as counter:
        F.mse_loss(model(inputs.chunk(groups)[group]), targets.chunk(groups)[group]).backward()
    sent = {}
    for name, n in counter.get_comm_counts().items():
        sent[str(name).split(".")[-1].replace("_", "").removesuffix("base")] = n
    gradients = [p.grad.full_tensor() for p in model.parameters()]
    off = torch.stack([(ours - exact).abs().max() for ours, exact in zip(gradients, one_process(), strict=True)])
    optimizer.step()
    return {
        "collectives": sent,
        "off": off.max().item(),
        "numel": sum(p.to_local().numel() for p in model.parameters()),
        "state": sum(s["exp_avg"].to_local().numel() for s in optimizer.state.values()),
    }


torch.manual_seed(1)
inputs, targets = torch.randn(2, 24, 16)

# ---
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
model = parallelize_module(build(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["data"])
report = {"FSDP x tensor": train(model, mesh["data"].get_local_rank(), 2)}  # a tensor group gets the same rows

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
model = build()
fully_shard(model, mesh=mesh)  # two dimensions: copies of the model along the first, shards along the second
report["HSDP"] = train(model, dist.get_rank(), 4)  # every rank has its own rows
# ---
print(json.dumps(report))
dist.destroy_process_group()
