"""What DDP does in a step out of the ordinary: four experiments with small models, on any number of processes."""

import contextlib
import json
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from finetune_common import connect, leave
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from traffic import listen

MICRO_BATCHES = 4


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def inputs_of(rank: int) -> torch.Tensor:
    """A rank's inputs for one step, of shape (micro-batches, batch, features)."""
    return torch.randn(MICRO_BATCHES, 8, 16, generator=torch.Generator().manual_seed(rank))


def accumulate(rank: int, silent: bool, compress: bool = False) -> dict:
    """One step of several micro-batches: its gradient, and the messages that it needed."""
    model = DistributedDataParallel(small_model())
    if compress:
        model.register_comm_hook(None, fp16_compress_hook)
    with listen() as messages:
        for i, micro_batch in enumerate(inputs_of(rank), start=1):
            with model.no_sync() if silent and i < MICRO_BATCHES else contextlib.nullcontext():
                (model(micro_batch).square().mean() / MICRO_BATCHES).backward()
    gradient = torch.nn.utils.parameters_to_vector(p.grad for p in model.parameters())
    return {"gradient": gradient.tolist(), "messages": messages}


class TwoHeads(nn.Module):
    """A body and two heads; each forward uses one of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(16, 16), nn.ModuleList([nn.Linear(16, 2), nn.Linear(16, 2)])

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.body(x))


def one_head_idle(**options) -> str:
    """Two forward and backward passes with only the first head: DDP's error message, or 'two steps done'."""
    model = DistributedDataParallel(TwoHeads(), **options)
    try:
        for _ in range(2):
            model(torch.ones(8, 16), head=0).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "two steps done"


def uneven(rank: int, join: bool) -> dict:
    """Rank 0 has five batches, the others three: the steps of this rank, its error if any, and its weights."""
    torch.manual_seed(0)
    own_group = dist.new_group(timeout=timedelta(seconds=2))
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False), process_group=own_group)
    optimizer, steps, says = torch.optim.SGD(model.parameters(), lr=0.1), 0, ""
    try:
        with model.join() if join else contextlib.nullcontext():
            for step in range(5 if rank == 0 else 3):
                optimizer.zero_grad()
                model(torch.full((8, 4), step + 1.0)).mean().backward()
                optimizer.step()
                steps += 1
    except RuntimeError as error:
        says = str(error)
    time.sleep(0 if join or rank == 0 else 3)  # stay alive, so that rank 0 waits in vain, but not for a dead rank
    return {"steps": steps, "says": says, "weights": model.module.weight.tolist()}


def main() -> dict:
    rank, _, _ = connect()
    every = accumulate(rank, silent=False)
    report = {"every": every, "silent": accumulate(rank, silent=True)}
    report["compressed"] = accumulate(rank, silent=True, compress=True)
    report["idle"] = {"plain": one_head_idle(), "told": one_head_idle(find_unused_parameters=True)}
    report["uneven"] = {"joined": uneven(rank, join=True), "plain": uneven(rank, join=False)}
    return report


if __name__ == "__main__":
    print(json.dumps(main()))
    leave()
