"""What the scripts of this unit share: their options, the reviews, and how to join and leave the process group."""

import argparse
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist

from speedlab import data, machine

Row = tuple[str, torch.Tensor]


def parse(argv: list[str], description: str) -> argparse.Namespace:
    """The options of a script. The batch must be a multiple of the number of processes."""
    full = machine.scale() == "full"
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--batch", type=int, default=32 if full else 16, help="reviews per step, over all processes")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=10**6 if full else 160, help="train on the first ROWS reviews")
    parser.add_argument("--lr", type=float, default=3e-5 if full else 5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", action="store_true", help="use dropout; off by default, so runs can be compared")
    parser.add_argument("--random-init", action="store_true", help="start from random weights, without a download")
    parser.add_argument("--save", default="", help="a folder for the trained weights")
    args = parser.parse_args(argv)
    if min(args.batch, args.epochs, args.rows) < 1:
        parser.error("batch, epochs and rows must be 1 or more")
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch % processes:
        parser.error(f"a batch of {args.batch} is not divisible by {processes}; take a multiple of {processes}")
    if args.rows < args.batch:
        parser.error(f"{args.rows} reviews do not fill a batch of {args.batch}; take a smaller batch")
    if args.save:
        os.makedirs(args.save, exist_ok=True)
    return args


def reviews(args: argparse.Namespace) -> tuple[list[Row], list[Row], Callable]:
    """Reviews to train on, a few hundred held out, and the function that makes a batch from a list of reviews.

    An incomplete last batch is left out, so that every step has a whole one on any number of processes.
    """
    from speedlab.data import models  # imports transformers, which scripts that only join the group do not need

    found, tokenizer = data.reviews(), models.tokenizer()

    def collate(chosen: list[Row]) -> dict[str, torch.Tensor]:
        texts, labels = zip(*chosen, strict=True)
        batch = tokenizer(list(texts), padding=True, truncation=True, max_length=256, return_tensors="pt")
        return {**batch, "labels": torch.stack(labels)}  # (B, T), (B, T), (B,)

    train = list(zip(found.train_texts, found.train_labels, strict=True))[: args.rows]
    held_out = list(zip(found.test_texts, found.test_labels, strict=True))[:301]
    return train[: len(train) // args.batch * args.batch], held_out, collate


@contextlib.contextmanager
def where_ranks_compute(ranks: int) -> Iterator[None]:
    """Inside, this process trains where `ranks` ranks would train here: on a GPU only if there is one for each."""
    where = machine.device() if torch.cuda.device_count() >= ranks else torch.device("cpu")
    with patch.object(machine, "device", return_value=where):
        yield


def connect(timeout: float = 300.0) -> tuple[int, int, torch.device]:
    """Join the process group. Returns this process's rank, the number of processes, and this process's device."""
    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    if not getattr(dist, f"is_{backend}_available", lambda: False)():
        raise SystemExit(f"This PyTorch was built without {backend}. Install a build with it from pytorch.org.")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    own_gpu = device if cuda else None  # NCCL then connects here, not in the first collective
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), device_id=own_gpu)
    return dist.get_rank(), dist.get_world_size(), device


def leave() -> NoReturn:
    """Leave the group and end this process at once: nothing after this call runs.

    DDP keeps the group's threads alive, and one that frees a tensor while Python shuts down aborts the process
    (torch 2.15, pytorch issue 190489). So Python's own shutdown is skipped, as `multiprocessing` does for the
    processes that it starts. `torchrun --run-path` starts ranks that way, and waits for them to return.
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    if multiprocessing.parent_process() is None:
        os._exit(0)
    raise SystemExit
