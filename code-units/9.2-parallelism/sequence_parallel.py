"""An MLP with LayerNorm and dropout, cut across all ranks: by tensor parallelism, then also along the sequence."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # read before any rank connects
T, B, C = 48, 2, 24  # the sequence comes first, since collectives gather and scatter along the first dimension
if T % world_size:
    sys.exit(f"This script has {T} tokens: start it on a number of processes that divides {T}, not on {world_size}.")
dist.init_process_group("gloo")
sent, kept = [], {}


def all_gather(piece):
    """Gather each rank's (T/N, B, C) into (T, B, C) on every rank."""
    whole = piece.new_empty(T, *piece.shape[1:])
    dist.all_gather_into_tensor(whole, piece.contiguous())
    sent.append(whole.nbytes)  # of which a rank sends (N-1)/N
    return whole


def reduce_scatter(parts):
    """Sum (T, B, C) over the ranks, and return this rank's (T/N, B, C) of the sum."""
    piece = parts.new_empty(T // world_size, *parts.shape[1:])
    dist.reduce_scatter_tensor(piece, parts.contiguous())
    sent.append(parts.nbytes)
    return piece


def all_reduce(parts):
    total = parts.contiguous().clone()
    dist.all_reduce(total)
    sent.extend([total.nbytes, total.nbytes])  # a reduce-scatter and an all-gather
    return total


class Communicate(torch.autograd.Function):
    """`there(x)` in forward, and `back(gradient)` in backward."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


class GatherLinear(torch.autograd.Function):
    """Gather, then apply the first layer. Keep only this rank's slice of the input, and gather again in backward."""

    @staticmethod
    def forward(ctx, piece, weight):
        ctx.save_for_backward(piece, weight)
        return F.linear(all_gather(piece), weight)

    @staticmethod
    def backward(ctx, gradient):
        piece, weight = ctx.saved_tensors
        whole = all_gather(piece)
        return reduce_scatter(gradient @ weight), gradient.flatten(0, 1).T @ whole.flatten(0, 1)


def tensor_alone(normed, up, down):
    entered = Communicate.apply(normed, torch.clone, all_reduce)
    return Communicate.apply(F.linear(F.gelu(F.linear(entered, up)), down), all_reduce, torch.clone)


def keeps_the_whole(normed, up, down):
    whole = Communicate.apply(normed, all_gather, reduce_scatter)
    return Communicate.apply(F.linear(F.gelu(F.linear(whole, up)), down), reduce_scatter, all_gather)


def gathers_again(normed, up, down):
    hidden = GatherLinear.apply(normed, up)
    return Communicate.apply(F.linear(F.gelu(hidden), down), reduce_scatter, all_gather)


def keep(tensor):
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor  # a DTensor's part on this rank
    local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local  # it may not have arrived yet
    if local.untyped_storage().data_ptr() not in own:
        kept[local.untyped_storage().data_ptr()] = local
    return tensor


def count(of):
    total, number = sum(of), len(of)
    of.clear()
    return {"bytes": total, "halves": number}  # an all-reduce counts as two


torch.manual_seed(0)  # every rank draws the whole tensors, and keeps its share
x, mask = torch.randn(T, B, C), torch.rand(T, B, C) > 0.1
gain, bias, up, down = torch.randn(C), torch.randn(C), torch.randn(4 * C, C) / 5, torch.randn(C, 4 * C) / 10
mine, report = slice(rank * T // world_size, (rank + 1) * T // world_size), {}
for mlp in (tensor_alone, keeps_the_whole, gathers_again):
    rows = slice(0, T) if mlp is tensor_alone else mine
    tensors = [x[rows], gain, bias, up.chunk(world_size, 0)[rank], down.chunk(world_size, 1)[rank]]
    piece, *weights = [t.clone().requires_grad_() for t in tensors]
    own, dropped = {w.data_ptr() for w in weights}, mask[rows].clone()
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        normed = F.layer_norm(piece, (C,), *weights[:2])
        y = piece + mlp(normed, *weights[2:]) * dropped / 0.9
    forward, held = count(sent), sum(t.untyped_storage().nbytes() for t in kept.values())
    y.square().sum().backward()
    backward = count(sent)
    if mlp is not tensor_alone:
        for weight in weights[:2]:
            dist.all_reduce(weight.grad)  # each rank saw only some of the tokens
    gradients = [w.grad.tolist() for w in weights]
    shares = {"y": y.tolist(), "x_grad": piece.grad.tolist(), "gradients": gradients}
    report[mlp.__name__] = {**shares, "forward": forward, "backward": backward, "kept": held}

model = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, 4 * C, bias=False), nn.GELU(), nn.Linear(4 * C, C, bias=False))
for parameter, value in zip(model.parameters(), (gain, bias, up, down), strict=True):
    parameter.data = value.clone()
layouts = {"0": SequenceParallel(sequence_dim=0), "1": ColwiseParallel(input_layouts=Shard(0))}
layouts |= {"3": RowwiseParallel(output_layouts=Shard(0))}
parallelize_module(model, init_device_mesh("cpu", (world_size,)), layouts)
piece, dropped = x[mine].clone(), mask[mine].clone()
own = {parameter.to_local().untyped_storage().data_ptr() for parameter in model.parameters()}
kept.clear()
with CommDebugMode() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
    y = piece + model(piece) * dropped / 0.9
held = sum(t.untyped_storage().nbytes() for t in kept.values())
with CommDebugMode() as backward:
    y.square().sum().backward()
counts = [{str(name).split(".")[-1]: n for name, n in mode.get_comm_counts().items()} for mode in (forward, backward)]
dtensor = {"y": y.tolist(), "up_grad": model[1].weight.grad.full_tensor().tolist(), "counts": counts, "kept": held}
print(json.dumps({**report, "dtensor": dtensor}))
dist.destroy_process_group()
