"""Accidents on purpose: a rank that dies, one that lags and then does not come, one that calls something else."""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from finetuning import connect

PATIENCE = 2.0  # seconds that a collective waits for a rank; the default is ten minutes or more


def dies(rank: int) -> None:
    for step in range(1, 9):
        if rank == 1 and step == 3:
            os._exit(7)  # no farewell: as if it had been killed for its memory
        try:
            dist.all_reduce(torch.ones(1000))
        except RuntimeError as error:
            print(f"step {step}: {str(error).splitlines()[0]}")
            time.sleep(60)  # the launcher ends what is left


def lags(rank: int) -> None:
    waited = 0.0
    for _ in range(6):
        time.sleep(0.3 * rank)  # rank 1 has the long reviews, or the slow disk
        start = time.perf_counter()
        dist.all_reduce(torch.ones(1000))
        waited += time.perf_counter() - start
    report = {"waited": waited}
    short = timedelta(seconds=PATIENCE)
    plain, monitored = dist.new_group(timeout=short), dist.new_group(timeout=short)
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1000), group=plain),
        "monitored_barrier": lambda: dist.monitored_barrier(monitored, timeout=short),
    }
    for name, call in calls.items():
        if rank == 0:
            start = time.perf_counter()
            try:
                call()
            except RuntimeError as error:
                report[name] = {"seconds": time.perf_counter() - start, "says": str(error)}
    if rank == 1:
        time.sleep(3 * PATIENCE)  # it never gets to either
    print(json.dumps(report))


def differs(rank: int) -> None:
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(3))  # "log the loss", in one branch only
        dist.broadcast(torch.ones(1000), src=0)
        print("went on")
    except RuntimeError as error:
        print(error)


if __name__ == "__main__":
    accident = {"dies": dies, "lags": lags, "differs": differs}[sys.argv[1]]
    own_rank, _, _ = connect(timeout=30)
    accident(own_rank)
    time.sleep(1)  # leave together: a process that leaves first looks like one that died
    dist.destroy_process_group()
