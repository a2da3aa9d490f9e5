"""Run on each process by the tests of exercise 3: many tasks of `core.on_ranks` in turn, in one launch.

Argument: a folder of folders, each with a task.json. Every task gets a process group of its own, so that one that
ends badly leaves nothing to the next.
"""

import contextlib
import sys
from datetime import timedelta
from pathlib import Path

import torch._dynamo  # noqa: F401 - the first DDP imports it, which on a busy machine takes as long as a task may
import torch.distributed as dist

from speedlab.checks import ranks

store, rank, world_size = next(dist.rendezvous("env://"))
for folder in sorted(Path(sys.argv[1]).iterdir()):
    turn = dist.PrefixStore(folder.name, store)
    turn.set(f"{rank} is here", "")
    turn.wait([f"{other} is here" for other in range(world_size)], timedelta(seconds=120))
    with contextlib.suppress(SystemExit):
        ranks.play(folder, store=turn, rank=rank, world_size=world_size)
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
