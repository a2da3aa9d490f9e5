"""Fine-tune DistilBERT on movie reviews, on as many processes as torchrun starts."""

import contextlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from finetuning import connect, leave, parse, reviews
from safetensors.torch import save_file
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from speedlab import machine, models


def count_and_average(sent: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    sent.append(bucket.buffer().nbytes)
    return allreduce_hook(None, bucket)  # what DDP does without a hook


def main(argv: list[str]) -> dict:
    args = parse(argv, __doc__)
    rank, world_size, device = connect()
    train_rows, test_rows, collate = reviews(args.rows)
    machine.seed_everything(args.seed)
    model = models.distilbert(pretrained=not args.random_init).to(device)
    model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    sent = []  # the bytes of every all-reduce of gradients
    model.register_comm_hook(sent, count_and_average)
    machine.seed_everything(args.seed + rank)  # from here on, every rank its own dropout
    sampler = DistributedSampler(train_rows, seed=args.seed)
    own_batch = args.batch // args.accumulate // world_size
    train_loader = DataLoader(train_rows, own_batch, sampler=sampler, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    losses, seen = [], 0
    model.train(args.dropout)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for micro, batch in enumerate(train_loader, start=1):
            complete = micro % args.accumulate == 0
            with contextlib.nullcontext() if complete else model.no_sync():
                loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
                (loss / args.accumulate).backward()
            if complete:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            seen += len(batch["labels"])

    model.eval()
    right = torch.zeros(2, device=device)  # reviews that were read rightly, reviews that were read
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
    own = {"own_losses": own_losses, "own_right": own_right, "sent": sent}
    return {"losses": losses.tolist(), "seen": seen, "right": right.tolist(), **own}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
    leave()
