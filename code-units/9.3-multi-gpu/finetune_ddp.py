"""Fine-tune DistilBERT on movie reviews, on as many processes as torchrun starts."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from finetune_common import connect, leave, parse, reviews
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from traffic import listen

from speedlab import machine
from speedlab.data import models


def main(argv: list[str]) -> dict:
    args = parse(argv, __doc__)
    rank, world_size, device = connect()
    train_rows, test_rows, collate = reviews(args)
    machine.seed_everything(args.seed)
    model = models.distilbert(pretrained=not args.random_init).to(device)
    model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    machine.seed_everything(args.seed + rank)  # from here on, every rank draws its own dropout
    sampler = DistributedSampler(train_rows, seed=args.seed)
    train_loader = DataLoader(train_rows, args.batch // world_size, sampler=sampler, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    losses, seen = [], 0
    model.train(args.dropout)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in train_loader:
            batch = {name: value.to(device) for name, value in batch.items()}
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            seen += len(batch["labels"])

    model.eval()
    right = torch.zeros(2, device=device)  # reviews classified correctly, reviews classified
    with torch.no_grad():
        for batch in DataLoader(test_rows[rank::world_size], 100, collate_fn=collate):
            batch = {name: value.to(device) for name, value in batch.items()}
            found = model.module(**batch).logits.argmax(dim=-1) == batch["labels"]
            right += torch.tensor([found.sum(), found.numel()], device=device)
    own_right = right.tolist()
    dist.all_reduce(right)
    if args.save and rank == 0:
        save_file(model.module.state_dict(), Path(args.save, f"rank-{rank}.safetensors"))
    losses = torch.stack(losses)
    own_losses = losses.tolist()
    dist.all_reduce(losses)
    losses /= world_size
    own = {"own_losses": own_losses, "own_right": own_right}
    return {"losses": losses.tolist(), "seen": seen, "right": right.tolist(), **own}


if __name__ == "__main__":
    with listen() as messages:
        report = main(sys.argv[1:])
    print(json.dumps({**report, "messages": messages}))
    leave()
