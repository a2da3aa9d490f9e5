"""A transformer block's two halves, each cut over all ranks: by hand with two small functions, then with DTensor."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
B, T, C, HEADS = 2, 10, 24, 4


class Enter(torch.autograd.Function):
    """Into the cut layers: nothing to do in forward; in backward every rank adds its part of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce(gradient)


class Leave(torch.autograd.Function):
    """Out of the cut layers: in forward every rank adds its part of the output; in backward nothing to do."""

    @staticmethod
    def forward(ctx, x):
        return all_reduce(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


calls = []


def all_reduce(tensor):
    total = tensor.contiguous().clone()
    dist.all_reduce(total)
    calls.append(total.nbytes)
    return total


def mlp(x, up, down):
    """up (4C/N, C) is a column's share of the first layer, down (C, 4C/N) a row's share of the second."""
    return Leave.apply(F.linear(F.gelu(F.linear(Enter.apply(x), up)), down))


def attention(x, qkv, out):
    """qkv (3, C/N, C) makes this rank's heads, out (C, C/N) takes them back."""
    entered = Enter.apply(x)
    q, k, v = (F.linear(entered, w).unflatten(-1, (HEADS // world_size, -1)).transpose(1, 2) for w in qkv)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads of this rank, T, C / HEADS)
    return Leave.apply(F.linear(heads.transpose(1, 2).flatten(2), out))


def run(block, x, *weights):
    """Forward and backward with this rank's shares; what was communicated and what came out."""
    x, weights = x.clone().requires_grad_(), [w.clone().requires_grad_() for w in weights]
    calls.clear()
    y = block(x, *weights)
    forward = list(calls)
    y.square().sum().backward()
    tensors = {"y": y, "x_grad": x.grad, "first_grad": weights[0].grad, "second_grad": weights[1].grad}
    shares = {name: tensor.tolist() for name, tensor in tensors.items()}
    return {**shares, "forward": forward, "backward": calls[len(forward) :], "numel": sum(w.numel() for w in weights)}


torch.manual_seed(0)
x, up, down = torch.randn(B, T, C), torch.randn(4 * C, C) / 5, torch.randn(C, 4 * C) / 10
qkv, out = torch.randn(3, C, C) / 5, torch.randn(C, C) / 5
report = {
    "mlp": run(mlp, x, up.chunk(world_size, dim=0)[rank], down.chunk(world_size, dim=1)[rank]),
    "attention": run(attention, x, qkv.chunk(world_size, dim=1)[rank], out.chunk(world_size, dim=1)[rank]),
}

model = nn.Sequential(nn.Linear(C, 4 * C, bias=False), nn.GELU(), nn.Linear(4 * C, C, bias=False))
model[0].weight.data, model[2].weight.data = up.clone(), down.clone()
mesh = init_device_mesh("cpu", (world_size,))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
x = x.requires_grad_()
with CommDebugMode() as forward:
    y = model(x)
with CommDebugMode() as backward:
    y.square().sum().backward()
counts = [{str(name): n for name, n in mode.get_comm_counts().items()} for mode in (forward, backward)]
local = sum(p.to_local().numel() for p in model.parameters())
report["dtensor"] = {"y": y.tolist(), "x_grad": x.grad.tolist(), "counts": counts, "numel": local}
print(json.dumps(report))
dist.destroy_process_group()
