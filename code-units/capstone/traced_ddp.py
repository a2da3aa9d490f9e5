"""One training step of DistributedDataParallel, profiled on every rank; rank 0 writes one trace with all ranks.

Usage, through speedlab.launch: traced_ddp.py FILE BUCKET_MIB SLEEP, where rank 1 sleeps SLEEP seconds in forward.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

LAYERS, WIDTH, ROWS = 6, 256, 512
file, bucket, sleep = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)])
ddp = DistributedDataParallel(model, bucket_cap_mb=bucket)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, fused=True)
inputs, targets = torch.randn(2, ROWS, WIDTH)


def step() -> None:
    optimizer.zero_grad()
    with record_function("forward"):
        loss = nn.functional.mse_loss(ddp(inputs), targets)
        time.sleep(sleep * rank)
    with record_function("backward"):
        loss.backward()
    optimizer.step()


for _ in range(3):  # DDP rebuilds its buckets after the first step
    step()
dist.barrier()
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recording:
    step()
raw = file.with_suffix(f".{rank}")
recording.export_chrome_trace(str(raw))
events = [e for e in json.loads(raw.read_text(encoding="utf-8"))["traceEvents"] if e["ph"] == "X"]
raw.unlink()
gathered: list = [None] * dist.get_world_size()
dist.all_gather_object(gathered, events)
if rank == 0:
    first = min(e["ts"] for part in gathered for e in part)
    slim = []
    for number, part in enumerate(gathered):
        # the system's thread ids mean nothing elsewhere, so 0 is the thread with the most events, which is Python's
        threads = [thread for thread, _ in Counter(e["tid"] for e in part).most_common()]
        for e in part:
            if e["cat"] in ("cpu_op", "user_annotation"):
                place = {"pid": number, "tid": threads.index(e["tid"]), "ts": round(e["ts"] - first, 3)}
                sizes = {"args": {"Input Dims": e["args"].get("Input Dims")}} if "c10d" in e["name"] else {}
                slim.append({"ph": "X", "cat": e["cat"], "name": e["name"], **place, "dur": e["dur"], **sizes})
    made = {"torch": torch.__version__, "device": "CPU", "processes": len(gathered), "sleep of rank 1": sleep}
    file.write_text(json.dumps({"recorded": made, "traceEvents": slim}, separators=(",", ":")), encoding="utf-8")
dist.destroy_process_group()
