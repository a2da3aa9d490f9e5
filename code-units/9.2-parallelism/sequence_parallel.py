"""The sequence cut over all ranks: LayerNorm and dropout on slices, then ring attention with an online softmax."""

import json

import torch
import torch.distributed as dist
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
B, HEADS, T, D = 2, 2, 48, 8
C = HEADS * D
sent = []


class Pass(torch.autograd.Function):
    """Hand a tensor to the right-hand neighbour; in backward its gradient comes back the same way."""

    @staticmethod
    def forward(ctx, tensor):
        return exchange(tensor, +1)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, -1)


def exchange(tensor, way):
    arrived = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    request = dist.isend(tensor.contiguous(), (rank + way) % world_size)
    dist.recv(arrived, (rank - way) % world_size)
    request.wait()
    sent.append(tensor.nbytes)
    return arrived


def ring_attention(q, k, v, positions, causal):
    """q, k, v (B, H, T/N, D) are this rank's tokens, `positions` (N, T/N) says which tokens each rank has."""
    out = torch.zeros_like(q)
    total = torch.zeros(*q.shape[:-1], 1)  # the softmax's denominator so far
    highest = torch.full_like(total, -torch.inf)  # the largest score so far
    largest = 0
    for step in range(world_size):
        source = (rank - step) % world_size  # whose keys and values are here now
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # (B, H, T/N, T/N)
        largest = max(largest, scores.numel())
        if causal:
            scores = scores.masked_fill(positions[rank][:, None] < positions[source], -torch.inf)
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True)).detach()
        safe = higher.nan_to_num(neginf=0.0)  # a row that may look at nothing here
        weights, keep = torch.exp(scores - safe), torch.exp(highest - safe)
        out, total, highest = out * keep + weights @ v, total * keep + weights.sum(-1, keepdim=True), higher
        if step < world_size - 1:
            k, v = Pass.apply(torch.stack([k, v]))
    return out / total, largest


report = {}
torch.manual_seed(0)  # every rank draws the whole, and keeps its slice
mine = slice(rank * T // world_size, (rank + 1) * T // world_size)
x, gain, bias, mask = torch.randn(B, T, C), torch.randn(C), torch.randn(C), torch.rand(B, T, C) > 0.1
weights = [gain.requires_grad_(), bias.requires_grad_()]
y = F.layer_norm(x[:, mine], (C,), *weights) * mask[:, mine] / 0.9  # dropout, with the mask's slice
y.square().sum().backward()
for weight in weights:
    dist.all_reduce(weight.grad)  # each rank saw some of the tokens
report["norm"] = {"y": y.tolist(), "gradients": [weight.grad.tolist() for weight in weights]}

torch.manual_seed(1)
qkv = torch.randn(3, B, HEADS, T, D)
pieces = torch.arange(T).chunk(2 * world_size)
layouts = {
    "contiguous": torch.arange(T).view(world_size, -1),
    "zigzag": torch.stack([torch.cat([pieces[r], pieces[2 * world_size - 1 - r]]) for r in range(world_size)]),
}
for name, positions in layouts.items():
    for causal in (False, True):
        shares = qkv[:, :, :, positions[rank]].clone().requires_grad_()
        sent.clear()
        out, largest = ring_attention(*shares, positions, causal)
        forward = sum(sent)
        out.square().sum().backward()
        report[f"{name}, {'causal' if causal else 'full'}"] = {
            "out": out.tolist(),
            "gradient": shares.grad.tolist(),
            "sent": forward,
            "largest": largest,
        }
print(json.dumps(report))
dist.destroy_process_group()
