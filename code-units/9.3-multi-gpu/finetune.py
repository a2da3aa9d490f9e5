"""Fine-tune DistilBERT on movie reviews, on one process."""

import json
import sys
from pathlib import Path

import torch
from finetune_common import parse, reviews
from safetensors.torch import save_file
from torch.utils.data import DataLoader, RandomSampler

from speedlab import machine
from speedlab.data import models


def main(argv: list[str]) -> dict:
    args = parse(argv, __doc__)
    device = machine.device()
    train_rows, test_rows, collate = reviews(args)
    machine.seed_everything(args.seed)
    model = models.distilbert(pretrained=not args.random_init).to(device)
    order = torch.Generator()
    sampler = RandomSampler(train_rows, generator=order)
    train_loader = DataLoader(train_rows, args.batch, sampler=sampler, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    losses, seen = [], 0
    model.train(args.dropout)
    for epoch in range(args.epochs):
        order.manual_seed(args.seed + epoch)
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
        for batch in DataLoader(test_rows, 100, collate_fn=collate):
            batch = {name: value.to(device) for name, value in batch.items()}
            found = model(**batch).logits.argmax(dim=-1) == batch["labels"]
            right += torch.tensor([found.sum(), found.numel()], device=device)
    if args.save:
        save_file(model.state_dict(), Path(args.save, "rank-0.safetensors"))
    losses = torch.stack(losses)
    return {"losses": losses.tolist(), "seen": seen, "right": right.tolist()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
