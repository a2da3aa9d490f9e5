"""Data parallelism and the three stages of ZeRO, all with torch's own wrappers: the bytes of every collective.

The lesson shows the part between the dashed lines.
"""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

MICRO_BATCHES, ROWS, WIDTH = 3, 8, 32
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world_size,))  # otherwise fully_shard uses any GPU that it sees


class Wire(TorchDispatchMode):
    """Records the collectives that torch calls: by kind, the bytes of the whole tensor in each call."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if torch.is_tensor(t)]
            kind = function.__name__.split(".")[0].strip("_").removesuffix("_base")
            self.bytes.setdefault(kind, []).append(max(t.nbytes for t in tensors))
        return function(*args, **(kwargs or {}))


def build():
    torch.manual_seed(0)  # four layers, the same on every rank
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(4)])


def one_process():
    """The gradient (4, WIDTH, WIDTH) of the whole batch, without any wrapper: every stage must reproduce it."""
    model = build()
    loss = F.mse_loss(model(inputs.flatten(0, 2)), targets.flatten(0, 2))
    return torch.stack(torch.autograd.grad(loss, list(model.parameters())))


# ---
def wrap(model, stage):
    """The wrapped model. Stage 0 is DDP; stage 3 computes in bf16 and sums gradients in fp32."""
    if stage == 0:
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if stage == 3 else MixedPrecisionPolicy()
    for part in (*model, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=stage == 3, mp_policy=policy)
    return model


def train(stage):
    """One step of micro-batches: relative gradient error, calls and bytes per collective, entries per moment."""
    model = wrap(build(), stage)
    optimizer = torch.optim.AdamW(model.parameters())
    with Wire() as wire:
        for i in range(MICRO_BATCHES):
            last = i == MICRO_BATCHES - 1
            if stage in (1, 2):
                model.set_reshard_after_backward(last)  # the gathered weights stay until the last backward
            if stage == 1:
                model.set_requires_gradient_sync(last)  # and so do the unsharded gradients
            if stage == 0:
                model.require_backward_grad_sync = last  # what DDP's no_sync() sets
            loss = F.mse_loss(model(inputs[i, rank]), targets[i, rank])  # the same number of rows on every rank
            (loss / MICRO_BATCHES).backward()
    gradients = torch.stack([p.grad.full_tensor() if stage else p.grad for p in model.parameters()])
    off = (gradients - one_process()).norm() / one_process().norm()
    optimizer.step()
    moments = [s["exp_avg"].to_local() if stage else s["exp_avg"] for s in optimizer.state.values()]
    sent = {kind: [len(sizes), sum(sizes)] for kind, sizes in wire.bytes.items() if kind != "broadcast"}
    return {"off": off.item(), "sent": sent, "moment": sum(m.numel() for m in moments)}


# ---
torch.manual_seed(1)
inputs, targets = torch.randn(2, MICRO_BATCHES, world_size, ROWS, WIDTH)
print(json.dumps([train(stage) for stage in range(4)]))
dist.destroy_process_group()
