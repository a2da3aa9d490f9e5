"""Fine-tune DistilBERT with its state sharded across all processes, in fp32 and in bf16; export the whole model."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from finetune_common import connect, leave, parse, reviews
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader, DistributedSampler
from traffic import listen, peak_bytes

from speedlab import compat, count, machine
from speedlab.data import models

FP32 = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy = FP32) -> nn.Module:
    """Shard each layer as its own group, whole only while computing; embeddings and head are the outermost group."""
    for layer in model.distilbert.transformer.layer:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def build(args, mesh: DeviceMesh, policy: MixedPrecisionPolicy, device: torch.device) -> nn.Module:
    """The sharded model with its pretrained weights, which rank 0 alone reads."""
    with torch.device("meta"):
        model = models.distilbert(pretrained=False)  # shapes and dtypes, no memory
    shard(model, mesh, policy)
    model.to_empty(device=device)  # memory for this rank's shards, not yet initialized
    machine.seed_everything(args.seed)
    whole = models.distilbert(pretrained=not args.random_init).state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    places = model.distilbert.embeddings.position_ids  # a buffer that no state dict holds
    places.copy_(torch.arange(places.numel()).view_as(places))
    machine.seed_everything(args.seed + dist.get_rank())  # from here on, every rank draws its own dropout
    return model


def train(args, model: nn.Module, device: torch.device, max_steps: int) -> dict:
    """Train as `finetune_ddp.py` does; also report the messages of one step, and what this rank holds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # after sharding, so that its state is sharded too
    train_rows, _, collate = reviews(args)
    sampler = DistributedSampler(train_rows, seed=args.seed)
    train_loader = DataLoader(train_rows, args.batch // dist.get_world_size(), sampler=sampler, collate_fn=collate)

    def step(batch: dict) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    model.train(args.dropout)
    with torch.no_grad():
        first = collate(train_rows[:8])  # the same reviews on every rank
        untrained = model(**{name: value.to(device) for name, value in first.items()}).logits
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch, _ in zip(train_loader, range(max_steps - len(losses)), strict=False):
            losses.append(step(batch))
            if len(losses) == 1:  # AdamW would hide a factor in the gradient, so its norm is reported as well
                norm = get_total_norm([p.grad for p in model.parameters()])
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    report = {"losses": (losses / dist.get_world_size()).tolist(), "untrained": untrained.tolist()}
    report["norm"] = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
    if args.save:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(model, options=options)  # on rank 0; the others get nothing
        if dist.get_rank() == 0:
            save_file(whole, Path(args.save, "whole.safetensors"))
    probe = {"input_ids": torch.ones(8, 32, dtype=torch.long), "labels": torch.zeros(8, dtype=torch.long)}
    with listen() as report["messages"]:
        step(probe)
    state = count.state_bytes(model, optimizer)
    report["state"] = {"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}
    report["dtypes"] = sorted({count.dtype_name(p.dtype) for p in model.parameters()})
    if not isinstance(model, DistributedDataParallel):
        # the lowest of five steps: now and then, gloo's thread frees a delivered message a little late
        peaks = [peak_bytes(model, optimizer, lambda: step(probe)) for _ in range(5)]
        report["peak"] = min(peaks, key=lambda kinds: sum(kinds.values()))
    return report


def main(argv: list[str]) -> dict:
    args = parse(argv, __doc__)
    _, world_size, device = connect()
    mesh = init_device_mesh(device.type, (world_size,))
    report = {"fp32": train(args, build(args, mesh, FP32, device), device, 10**6)}
    args.save = ""
    with compat.half_products(device):
        report["bf16"] = train(args, build(args, mesh, BF16, device), device, 5)
    machine.seed_everything(args.seed)
    plain = models.distilbert(pretrained=not args.random_init).to(device)
    ddp = DistributedDataParallel(plain, device_ids=[device] if device.type == "cuda" else None)
    report["ddp"] = train(args, ddp, device, 2)
    return report


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
    leave()
