"""How long a message between two ranks on this machine takes, by size: half the time there and back."""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # read before any rank connects
if world_size != 2:
    sys.exit(f"This script sends messages between two ranks: start it on 2 processes, not on {world_size}.")
dist.init_process_group("gloo")
report = {}
for size in (8, 2**12, 2**16, 2**18, 2**20, 2**22, 2**24):
    message, seconds = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(30 if size < 2**20 else 8):
        start = time.perf_counter()
        for sender in range(2):
            if rank == sender:
                dist.send(message, 1 - sender)
            else:
                dist.recv(message, sender)
                message += 1  # the receiver marks the message
        seconds.append((time.perf_counter() - start) / 2)
    report[size] = {"one_way": statistics.median(seconds), "mark": message.unique().tolist()}
print(json.dumps(report))
dist.destroy_process_group()
