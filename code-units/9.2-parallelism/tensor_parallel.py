"""A transformer block's two halves and the loss, cut across all ranks: by hand, and in part with DTensor."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # read before any rank connects
B, T, C, HEADS, VOCABULARY = 2, 10, 24, 4, 40
if HEADS % world_size:
    sys.exit(f"This script splits {HEADS} attention heads: start it on 1, 2 or 4 processes, not on {world_size}.")


dist.init_process_group("gloo")


class Enter(torch.autograd.Function):
    """Into the cut layers: forward does nothing; backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce(gradient)


class Leave(torch.autograd.Function):
    """Out of the cut layers: forward sums the ranks' outputs; backward does nothing."""

    @staticmethod
    def forward(ctx, x):
        return all_reduce(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


calls = []


def all_reduce(tensor, operation=dist.ReduceOp.SUM):
    total = tensor.contiguous().clone()
    dist.all_reduce(total, operation)
    calls.append(total.nbytes)
    return total


def mlp(x, up, down):
    """up (4C/N, C): the weights for this rank's hidden features; down (C, 4C/N): the weights back to x's features."""
    return Leave.apply(F.linear(F.gelu(F.linear(Enter.apply(x), up)), down))


def attention(x, qkv, out):
    """qkv (3, C/N, C): the projections to this rank's heads; out (C, C/N): the projection back to x's features."""
    entered = Enter.apply(x)
    q, k, v = (F.linear(entered, w).unflatten(-1, (HEADS // world_size, -1)).transpose(1, 2) for w in qkv)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads of this rank, T, C / HEADS)
    return Leave.apply(F.linear(heads.transpose(1, 2).flatten(2), out))


def vocabulary_loss(x, table):
    """The mean cross-entropy of `targets`; table (V/N, C): the output layer's rows for this rank's words."""
    logits = F.linear(Enter.apply(x), table)  # (B, T, V/N), never gathered
    highest = all_reduce(logits.detach().amax(-1), dist.ReduceOp.MAX)
    total = Leave.apply((logits - highest.unsqueeze(-1)).exp().sum(-1))
    place = targets - rank * len(table)  # each target's row in this rank's table, if it is there
    here = (place >= 0) & (place < len(table))
    score = logits.gather(-1, place.clamp(0, len(table) - 1).unsqueeze(-1)).squeeze(-1)
    return (highest + total.log() - Leave.apply(score.where(here, 0.0))).mean()


def run(block, x, *weights):
    """Forward and backward with this rank's shares: the output, the gradients, and the bytes of each all-reduce."""
    x, weights = x.clone().requires_grad_(), [w.clone().requires_grad_() for w in weights]
    calls.clear()
    y = block(x, *weights)
    forward = list(calls)
    y.square().sum().backward()
    gradients = [w.grad.tolist() for w in weights]
    sent = {"forward": forward, "backward": calls[len(forward) :]}
    return {"y": y.tolist(), "x_grad": x.grad.tolist(), "gradients": gradients, **sent}


torch.manual_seed(0)
x, up, down = torch.randn(B, T, C), torch.randn(4 * C, C) / 5, torch.randn(C, 4 * C) / 10
qkv, out, table = torch.randn(3, C, C) / 5, torch.randn(C, C) / 5, torch.randn(VOCABULARY, C) / 5
targets = torch.randint(VOCABULARY, (B, T))


def share(tensor, dim):
    return tensor.chunk(world_size, dim)[rank]


report = {
    "mlp": run(mlp, x, share(up, 0), share(down, 1)),
    "attention": run(attention, x, share(qkv, 1), share(out, 1)),
    "loss": run(vocabulary_loss, x, share(table, 0)),
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

layer = nn.Linear(C, VOCABULARY, bias=False)
layer.weight.data = table.clone()
parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
with loss_parallel():  # the logits stay cut by vocabulary, as in `vocabulary_loss`
    loss = F.cross_entropy(layer(x.detach()).flatten(0, 1), targets.flatten())
    loss.backward()
report["dtensor"] |= {"loss": loss.full_tensor().item(), "table_grad": layer.weight.grad.full_tensor().tolist()}
print(json.dumps(report))
dist.destroy_process_group()
