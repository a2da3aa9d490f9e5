"""The trace of one training step of a small vision transformer: its events, for the capstone's lesson on traces."""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import profile

from benchmarks import day
from benchmarks.day import Item, Session
from benchmarks.memory import tiny_model

_KEPT = ("cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "gpu_memset")


def recorded(session: Session) -> list[dict]:
    """One row: the third step's events, those of the GPU if there is one, otherwise PyTorch's operators."""
    model = tiny_model(10).to(session.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    images, labels = torch.randn(8, 3, 32, 32, device=session.device), torch.arange(8, device=session.device)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if session.on_gpu:
            torch.cuda.synchronize()

    step()
    step()
    with profile() as recording:
        step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        recording.export_chrome_trace(str(file))
        found = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    kept = [e for e in found if e["ph"] == "X" and e["cat"] in (_KEPT if session.on_gpu else ("cpu_op",))]
    first = min(e["ts"] for e in kept)
    events = [{"ph": "X", "cat": e["cat"], "name": e["name"][:40], "tid": e["tid"], "ts": round(e["ts"] - first, 3),
               "dur": e["dur"], "args": {"correlation": e["args"].get("correlation")}} for e in kept]  # fmt: skip
    kernels = sum(e["cat"] == "kernel" for e in events)
    text = f"{len(events)} events" + (f", {kernels} of them kernels" if session.on_gpu else ", of the CPU")
    return [{"task": "the trace of a training step of a small vision transformer", "found": text, "events": events}]


def items(session: Session) -> Iterator[Item]:
    yield Item("one step", 20, lambda rows: recorded(session))


if __name__ == "__main__":
    sys.exit(day.main({"trace": items}, __doc__))
