"""Fine-tune DistilBERT with its state sharded over all processes, in fp32 and in bf16; write a sharded checkpoint."""

import contextlib
import itertools
import json
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from finetuning import connect, leave, parse, reviews
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader, DistributedSampler

from speedlab import count, machine, models

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(model: torch.nn.Module, policy: MixedPrecisionPolicy, device: torch.device) -> torch.nn.Module:
    """Each layer on its own, so that only one at a time is whole; then what is left: embeddings and head."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.distilbert.transformer.layer:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train(args, device: torch.device, policy: MixedPrecisionPolicy, steps: int | None) -> dict:
    machine.seed_everything(args.seed)
    model = models.distilbert(pretrained=not args.random_init).to(device)
    shard(model, policy, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # after sharding: its state is sharded as well
    train_rows, _, collate = reviews(args.rows)
    sampler = DistributedSampler(train_rows, seed=args.seed)
    train_loader = DataLoader(train_rows, args.batch // dist.get_world_size(), sampler=sampler, collate_fn=collate)

    def batches():
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            yield from train_loader

    losses, collectives = [], {}
    model.train(args.dropout)
    for step, batch in enumerate(itertools.islice(batches(), steps)):
        optimizer.zero_grad()
        with CommDebugMode() if step == 1 else contextlib.nullcontext() as counter:
            loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
            loss.backward()
        if counter:
            collectives = {str(name).split(".")[-1]: n for name, n in counter.get_comm_counts().items()}
        optimizer.step()
        losses.append(loss.detach())
    state = count.state_bytes(model, optimizer)
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    norm = torch.nn.utils.get_total_norm(model.parameters()).full_tensor().item()
    if args.save and policy is not BF16:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=args.save)
    return {
        "losses": (losses / dist.get_world_size()).tolist(),
        "collectives": collectives,
        "state": {"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer},
        "dtypes": sorted({count.dtype_name(p.dtype) for p in model.parameters()}),
        "norm": norm,
    }


def main(argv: list[str]) -> dict:
    args = parse(argv, __doc__)
    _, _, device = connect()
    report = {"fp32": train(args, device, MixedPrecisionPolicy(), None)}
    with machine.half_products(device):
        report["bf16"] = train(args, device, BF16, 5)
    return report


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
    leave()
