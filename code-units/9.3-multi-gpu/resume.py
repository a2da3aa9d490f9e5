"""A training run that can be stopped at any moment and resumed, on 1, 2, 3, 4, 6, 8, 12 or 24 processes."""

import argparse
import itertools
import json
import os
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from finetune_common import connect, leave
from resume_alone import BATCH, build, rows_to_learn
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler


def everything(model: nn.Module, optimizer, schedule, generator: torch.Generator, step: int) -> dict:
    """All that changes during training, with this rank's part of sharded tensors and its own random state."""
    weights, moments = get_state_dict(model, optimizer)
    own = {str(dist.get_rank()): generator.get_state()}
    return {
        "model": weights,
        "optimizer": moments,
        "schedule": schedule.state_dict(),
        "random": own,
        "step": torch.tensor(step),  # and with it the place in the data
    }


def newest_complete(folder: Path) -> Path | None:
    """The newest checkpoint that was written completely, or None: DCP renames `.metadata` into place last."""
    found = sorted(folder.glob("step-*"), key=lambda path: (len(path.name), path.name), reverse=True)
    newest = next((path for path in found if (path / ".metadata").exists()), None)
    skipped = [path.name for path in itertools.takewhile(lambda path: path != newest, found)]
    print(json.dumps({"skipped": skipped, "resumed": newest and newest.name}), flush=True)
    return newest


def restore(folder: Path, model: nn.Module, optimizer, schedule, generator: torch.Generator, device) -> int:
    """Load the newest complete checkpoint into this rank's part of everything; return its step, or 0 if none."""
    choice = [newest_complete(folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(choice, device=device)  # one rank decides for all; only the name travels
    if choice[0] is None:
        return 0
    state, own = everything(model, optimizer, schedule, generator, 0), str(dist.get_rank())
    if f"random.{own}" not in dcp.FileSystemReader(choice[0]).read_metadata().state_dict_metadata:
        state["random"] = {}  # fewer ranks wrote it: this one keeps its fresh random state
    dcp.load(state, checkpoint_id=choice[0])  # reads into these tensors, wherever they live
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    for saved in state["random"].values():
        generator.set_state(saved)
    return int(state["step"])


class DiesWriting(dcp.FileSystemWriter):
    """Leaves half of this rank's file, as a full disk or a killed process might, and dies."""

    def write_data(self, plan, planner):
        super().write_data(plan, planner).wait()
        for file in Path(self.path).glob(f"__{dist.get_rank()}_*"):
            os.truncate(file, file.stat().st_size // 2)
        os._exit(9)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--every", type=int, default=4, help="save every EVERY steps")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--dies-saving", type=int, help="in the first attempt, rank 1 dies while saving this step")
    parser.add_argument("--machine-dies", type=int, help="in attempt 0, kill this rank and launcher after this step")
    args = parser.parse_args(argv)
    rank, world_size, device = connect(timeout=60)
    if BATCH % world_size:
        parser.error(f"a batch of {BATCH} is not divisible by {world_size}; take 1, 2, 3, 4, 6, 8, 12 or 24 ranks")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    mesh = init_device_mesh(device.type, (world_size,))  # otherwise a Mac's GPU would be used
    model, rows = fully_shard(build(args.dropout).to(device), mesh=mesh), rows_to_learn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
    sampler = DistributedSampler(rows, seed=0)
    # each new iterator draws a seed, here from its own generator, or a restart would shift dropout's numbers
    loader = DataLoader(rows, BATCH // world_size, sampler=sampler, generator=torch.Generator())
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    generator.manual_seed(rank)  # every rank draws its own dropout

    step, stop = restore(args.folder, model, optimizer, schedule, generator, device), False
    while step < args.steps and not stop:
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for inputs, labels in itertools.islice(loader, done, None):  # skips the batches already seen
            loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            asked = float(rank == 0 and (args.folder / "stop").exists())
            total = torch.stack([loss.detach(), loss.new_tensor(asked)])
            dist.all_reduce(total)  # the loss, and whether somebody asked us to stop: all ranks must agree
            stop = total[1].item() > 0
            if rank == 0:
                loss = total[0].item() / world_size
                print(json.dumps({"attempt": attempt, "ranks": world_size, "step": step, "loss": loss}), flush=True)
            if step == args.machine_dies and attempt == 0:
                # on Windows, a virtual environment's own python.exe stands between this rank and its launcher
                next(p for p in psutil.Process().parents() if "torch.distributed.run" in p.cmdline()).kill()
                os._exit(9)
            if step % args.every == 0 or stop or step == args.steps:
                place = args.folder / f"step-{step:04}"
                dies = step == args.dies_saving and rank == 1 and attempt == 0
                writer = DiesWriting(place) if dies else dcp.FileSystemWriter(place)
                dcp.save(everything(model, optimizer, schedule, generator, step), storage_writer=writer)
            if stop or step == args.steps:
                break


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
