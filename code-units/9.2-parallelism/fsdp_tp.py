"""What a message costs between two ranks here; then FSDP and tensor parallelism together on a 2 x 2 grid of ranks."""

import json
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

dist.init_process_group("gloo")
rank = dist.get_rank()


def one_way_seconds(size, repeats):
    """Half of the median time that `size` bytes take from rank 0 to rank 1 and back."""
    message, seconds = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(repeats):
        start = time.perf_counter()
        for step in range(2):
            if rank == step:
                dist.send(message, 1 - step)
            else:
                dist.recv(message, step)
        seconds.append((time.perf_counter() - start) / 2)
    return statistics.median(seconds)


report = {}
sizes = (8, 2**12, 2**16, 2**20, 2**23)
if rank < 2:
    report["one_way"] = {size: one_way_seconds(size, 5 if size > 2**20 else 30) for size in sizes}
dist.barrier()

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)  # every rank builds the whole model, then keeps its quarter
model = nn.Sequential(nn.Linear(16, 64, bias=False), nn.GELU(), nn.Linear(64, 16, bias=False))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

inputs, targets = torch.randn(2, 24, 16)
replica = mesh["data"].get_local_rank()  # both ranks of a tensor group see the same rows
rows = slice(12 * replica, 12 * replica + 12)
with CommDebugMode() as counter:
    F.mse_loss(model(inputs[rows]), targets[rows]).backward()
report["collectives"] = {str(name): n for name, n in counter.get_comm_counts().items()}
report["gradients"] = [p.grad.full_tensor().tolist() for p in model.parameters()]
optimizer.step()
report["weights"] = [p.full_tensor().tolist() for p in model.parameters()]
report["numel"] = sum(p.to_local().numel() for p in model.parameters())
report["state"] = sum(s["exp_avg"].to_local().numel() for s in optimizer.state.values())
report["place"] = mesh.get_coordinate()
report["layout"] = [str(p.placements) for p in model.parameters()]
print(json.dumps(report))
dist.destroy_process_group()
