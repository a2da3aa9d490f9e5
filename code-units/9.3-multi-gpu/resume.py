"""A training that survives: it saves every four steps, and takes up the newest checkpoint that is whole."""

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.distributed as dist
from finetuning import connect, leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save(folder: Path, step: int, state: dict) -> None:
    """Write under another name first: a rename happens wholly or not at all."""
    part = folder / f"step-{step:04}.part"
    torch.save(state, part)
    part.replace(folder / f"step-{step:04}.pt")


def newest_whole(folder: Path) -> dict | None:
    """The newest checkpoint that can be read; those that cannot are named."""
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        try:
            state = torch.load(path, weights_only=True)
        except (RuntimeError, EOFError, OSError, UnpicklingError):  # cut off here or there
            print(f"{path.name} is not whole, looking for an older one")
            continue
        print(f"going on from {path.name}")
        return state
    return None


def main(argv: list[str]) -> dict:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--die-writing", type=int, help="in the first attempt, die while writing at this step")
    args = parser.parse_args(argv)
    rank, world_size, device = connect()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    found = [newest_whole(args.folder) if rank == 0 else None]  # one rank decides, for all
    dist.broadcast_object_list(found, device=device)
    state = found[0] or {"step": 0, "losses": []}
    if found[0]:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    ddp, losses = DistributedDataParallel(model), state["losses"]
    for step in range(state["step"] + 1, args.steps + 1):
        # the step decides about the batch, so that a resumed run reads what the first one would have
        generator = torch.Generator().manual_seed(step)
        inputs, labels = torch.randn(12, 16, generator=generator), torch.randint(4, (12,), generator=generator)
        own = slice(rank * 12 // world_size, (rank + 1) * 12 // world_size)
        loss = nn.functional.cross_entropy(ddp(inputs[own].to(device)), labels[own].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / world_size)
        if step % 4 == 0 and rank == 0:
            state = {"step": step, "losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(args.folder, step, state)
            if step == args.die_writing and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                tear(args.folder / f"step-{step:04}.pt")
    node, attempt = (int(os.environ[name]) for name in ("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"))
    return {"rank": rank, "node": node, "attempt": attempt, "losses": losses}


def tear(path: Path) -> None:
    """Leave half of a checkpoint, as a full disk or a plain `torch.save` would, and die."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    os.kill(os.getpid(), signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1:])) + "\n")  # one write: the ranks of a node share their output
    leave()
