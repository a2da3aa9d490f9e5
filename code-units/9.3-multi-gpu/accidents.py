"""Deliberate accidents on two ranks: rank 1 dies, lags and then stays away, or calls a different collective."""

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from finetune_common import connect

PATIENCE = 2.0  # seconds, for two groups at the end of `lags`; a third waits 60, all others 30 (see `connect` below)


def all_reduce(group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(torch.ones(1000), group=group)


def dies(rank: int) -> None:
    told_to_stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_stop.set())  # lets the survivor report before it ends
    for step in range(1, 9):
        if rank == 1 and step == 3:
            os._exit(7)  # no message, no traceback: as if killed for using too much memory
        start = time.perf_counter()
        try:
            all_reduce()
        except RuntimeError as error:
            waited = time.perf_counter() - start
            print(json.dumps({"step": step, "seconds": waited, "says": str(error).splitlines()[0]}))
            told_to_stop.wait(60)  # until the launcher stops the remaining processes
            raise


def lags(rank: int) -> None:
    waited = 0.0
    for _ in range(6):
        time.sleep(0.3 * rank)  # rank 1 has the long reviews, or the slow disk
        start = time.perf_counter()
        all_reduce()
        waited += time.perf_counter() - start
    report = {"waited": waited}
    barrier = partial(dist.monitored_barrier, timeout=timedelta(seconds=PATIENCE))  # on rank 0, this timeout counts
    tries = {"all_reduce": (all_reduce, PATIENCE), "monitored_barrier": (barrier, PATIENCE)}
    for name, (collective, seconds) in {**tries, "patient": (all_reduce, 60.0)}.items():
        dist.barrier()  # rank 1 may still be writing, and new_group waits for it no longer than the group's timeout
        group = dist.new_group(timeout=timedelta(seconds=seconds))
        time.sleep(2 * PATIENCE * rank)  # rank 1 is alive and well, but writing a checkpoint
        start, says = time.perf_counter(), ""
        try:
            collective(group)
        except RuntimeError as error:
            says = str(error)
        report[name] = {"seconds": time.perf_counter() - start, "says": says}
    print(json.dumps(report))


def differs(rank: int) -> None:
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(3))  # "average the losses for the log", in one branch only
        dist.broadcast(torch.ones(1000), src=0)
        print("went on")
    except RuntimeError as error:
        print(error)


if __name__ == "__main__":
    accident = {"dies": dies, "lags": lags, "differs": differs}[sys.argv[1]]
    own_rank, world_size, _ = connect(timeout=30)
    if world_size != 2:
        raise SystemExit(f"The accidents are staged for 2 processes, not for {world_size}.")
    accident(own_rank)
    time.sleep(1)  # leave together: a process that leaves first looks like one that died
    dist.destroy_process_group()
