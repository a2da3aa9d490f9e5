"""Context parallelism: attention over a sequence cut across all ranks, with a ring and an online softmax."""

import json
import os
import sys

import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # read before any rank connects
B, HEADS, T, D = 2, 2, 48, 8
if T % (2 * world_size):
    sys.exit(
        f"This script cuts {T} tokens into 2 pieces per rank: start it on 1, 2, 3, 4, 6, 8, 12 or 24 processes, "
        f"not on {world_size}."
    )
dist.init_process_group("gloo")
sent, kept, largest = [], [], 0


def pass_on(tensor):
    """Send a tensor to the right-hand neighbour, and return the one that arrives from the left."""
    if world_size == 1:
        return tensor
    arrived = torch.empty_like(tensor)
    request = dist.isend(tensor, (rank + 1) % world_size)
    dist.recv(arrived, (rank - 1) % world_size)
    request.wait()
    sent.append(tensor.nbytes)
    return arrived


def scores_of(q, k, seen):
    """The scores (B, H, T/N, T/N) of this rank's queries and the keys at hand; -inf where `seen` is False."""
    global largest
    scores = q @ k.transpose(-2, -1) / D**0.5
    largest = max(largest, scores.numel())
    return scores.masked_fill(~seen, -torch.inf)


class RingAttention(torch.autograd.Function):
    """q, k, v (B, H, T/N, D): this rank's tokens; `seen` (N, T/N, T/N) or (N, 1, 1): the keys they see, by rank."""

    @staticmethod
    def forward(ctx, q, k, v, seen):
        out, total = torch.zeros_like(q), q.new_zeros(*q.shape[:-1], 1)
        highest, pair = torch.full_like(total, -torch.inf), torch.stack([k, v])
        for step in range(world_size):
            scores = scores_of(q, pair[0], seen[(rank - step) % world_size])
            higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights, shrink = torch.exp(scores - higher), torch.exp(highest - higher)
            out, total = out * shrink + weights @ pair[1], total * shrink + weights.sum(-1, keepdim=True)
            highest = higher
            if step < world_size - 1:
                pair = pass_on(pair)
        out = out / total
        ctx.save_for_backward(q, k, v, out, highest + total.log(), seen)
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, log_total, seen = ctx.saved_tensors
        q_grad, shift = torch.zeros_like(q), (gradient * out).sum(-1, keepdim=True)
        pair, gradients = torch.stack([k, v]), torch.zeros(2, *k.shape)
        for step in range(world_size):
            weights = torch.exp(scores_of(q, pair[0], seen[(rank - step) % world_size]) - log_total)  # softmax, again
            score_grad = weights * (gradient @ pair[1].transpose(-2, -1) - shift) / D**0.5
            q_grad += score_grad @ pair[0]
            gradients += torch.stack([score_grad.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ gradient])
            gradients = pass_on(gradients)  # one more hop than the keys: the last one brings them home
            if step < world_size - 1:
                pair = pass_on(pair)
        return q_grad, *gradients, None


def keep(tensor):
    if tensor.is_floating_point():  # the mask could be rebuilt, so it does not count
        kept.append(tensor.nbytes)
    return tensor


torch.manual_seed(1)  # every rank draws the whole tensor, and keeps its slice
qkv, report = torch.randn(3, B, HEADS, T, D), {}
pieces = torch.arange(T).chunk(2 * world_size)
layouts = {
    "contiguous": torch.arange(T).view(world_size, -1),
    "zigzag": torch.stack([torch.cat([pieces[r], pieces[2 * world_size - 1 - r]]) for r in range(world_size)]),
}
for name, positions in layouts.items():
    for causal in (False, True):
        mine = qkv[:, :, :, positions[rank]].clone().requires_grad_()
        seen = positions[rank][:, None] >= positions[:, None] if causal else torch.ones(world_size, 1, 1).bool()
        kept.clear()
        sent.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = RingAttention.apply(*mine, seen)
        forward = sum(sent)
        out.square().sum().backward()
        found = {"out": out.tolist(), "gradient": mine.grad.tolist(), "largest": largest, "kept": sum(kept)}
        found |= {"forward": forward, "backward": sum(sent) - forward}
        report[f"{name}, {'causal' if causal else 'full'}"] = found
print(json.dumps(report))
dist.destroy_process_group()
