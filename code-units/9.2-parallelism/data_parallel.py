"""One training run shared by all ranks: the weights are broadcast, the batch is split, the gradients are summed."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
right, left = (rank + 1) % world_size, (rank - 1) % world_size
sent_bytes = 0


def send(tensor, to):
    global sent_bytes
    sent_bytes += tensor.nbytes
    return dist.isend(tensor, to)  # does not wait, so all ranks can send first and receive afterwards


def receive_like(tensor, source):
    buffer = torch.empty_like(tensor)
    dist.recv(buffer, source)
    return buffer


def broadcast(tensor):
    """Pass rank 0's numbers from neighbour to neighbour until every rank has them."""
    if rank > 0:
        tensor.copy_(receive_like(tensor, left))
    if rank < world_size - 1:
        send(tensor, right).wait()


def ring_all_reduce(tensor):
    """Sum `tensor` over all ranks, in place. Each chunk goes round the ring twice, to be summed and to be shared."""
    chunks = list(tensor.view(-1).tensor_split(world_size))
    for step in range(2 * (world_size - 1)):
        leaving = chunks[(rank - step) % world_size]
        arriving = chunks[(rank - step - 1) % world_size]
        request = send(leaving.clone(), right)
        received = receive_like(arriving, left)
        if step < world_size - 1:
            arriving.add_(received)  # reduce-scatter: each sum grows as it travels
        else:
            arriving.copy_(received)  # all-gather: finished sums are passed on
        request.wait()


torch.manual_seed(rank)  # a different model on every rank, on purpose
model = nn.Sequential(nn.Linear(11, 93), nn.GELU(), nn.Linear(93, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for parameter in model.parameters():
    broadcast(parameter.data)

generator = torch.Generator().manual_seed(7)
inputs, targets = torch.randn(24, 11, generator=generator), torch.randn(24, 6, generator=generator)
shard = slice(rank * 24 // world_size, (rank + 1) * 24 // world_size)  # on 5 ranks: 4, 5, 5, 5 and 5 rows
sent_bytes = 0
for _ in range(5):
    optimizer.zero_grad()
    # the shard's sum divided by the whole batch's size: right for any shard, even an empty one
    loss = F.mse_loss(model(inputs[shard]), targets[shard], reduction="sum") / targets.numel()
    loss.backward()
    gradient = torch.cat([p.grad.view(-1) for p in model.parameters()])
    ring_all_reduce(gradient)
    nn.utils.vector_to_parameters(gradient, [p.grad for p in model.parameters()])
    optimizer.step()

weights = nn.utils.parameters_to_vector(model.parameters()).tolist()
print(json.dumps({"weights": weights, "sent_bytes": sent_bytes, "gradient_bytes": gradient.nbytes, "steps": 5}))
dist.destroy_process_group()
