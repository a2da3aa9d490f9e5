"""What the scripts of this unit share: their options, the reviews, and the way into the group of processes."""

import argparse
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from speedlab import data, machine, models

Row = tuple[str, torch.Tensor]


def parse(argv: list[str], description: str) -> argparse.Namespace:
    full = machine.scale() == "full"
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--batch", type=int, default=32 if full else 16, help="reviews a step, over all processes")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=10**6 if full else 160, help="train on the first so many reviews")
    parser.add_argument("--lr", type=float, default=3e-5 if full else 5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", action="store_true", help="off by default, so that runs can be compared")
    parser.add_argument("--random-init", action="store_true", help="random weights, which need no download")
    parser.add_argument("--save", default="", help="a folder for the trained weights")
    args = parser.parse_args(argv)
    if min(args.batch, args.accumulate, args.epochs, args.rows) < 1:
        parser.error("batch, accumulate, epochs and rows must be 1 or more")
    shares = int(os.environ.get("WORLD_SIZE", 1)) * args.accumulate
    if args.batch % shares:
        parser.error(f"a batch of {args.batch} has no {shares} equal shares; take a multiple of {shares}")
    if args.rows < shares:
        parser.error(f"{args.rows} reviews are too few for {shares} shares; take fewer processes, or more reviews")
    return args


def reviews(rows: int) -> tuple[list[Row], list[Row], Callable]:
    """The first so many reviews to train on, a few hundred held out, and the function that makes a batch of them."""
    found, tokenizer = data.reviews(), models.tokenizer()

    def collate(chosen: list[Row]) -> dict[str, torch.Tensor]:
        texts, labels = zip(*chosen, strict=True)
        batch = tokenizer(list(texts), padding=True, truncation=True, max_length=256, return_tensors="pt")
        return {**batch, "labels": torch.stack(labels)}  # (B, T), (B, T), (B,)

    train = list(zip(found.train_texts, found.train_labels, strict=True))[:rows]
    return train, list(zip(found.test_texts, found.test_labels, strict=True))[:301], collate


def connect(timeout: float = 300.0) -> tuple[int, int, torch.device]:
    """Join the group of processes: this one's rank, how many there are, and the device that is its own."""
    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    if not getattr(dist, f"is_{backend}_available", lambda: False)():
        raise SystemExit(f"This PyTorch was built without {backend}. Install a build with it from pytorch.org.")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    return dist.get_rank(), dist.get_world_size(), device


def leave() -> NoReturn:
    """Leave the group and end this process, at once: nothing after this call runs.

    DDP keeps the group's threads alive, and one that lets go of a tensor while Python shuts down aborts the process
    (torch 2.15, pytorch issue 190489). So Python's own shutting down is left out.
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
