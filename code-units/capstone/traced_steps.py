"""A training step with habits that a trace shows, in a file so that stacks name its lines, and how to trace it."""

import contextlib
import functools
import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from speedlab import launch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages would stand in the page


def network(layers: int, width: int = 64) -> nn.Sequential:
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, log: list | None = None) -> None:
    """One step. With a `log` it also reads the loss and the largest weight, as people do when they look for a bug."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), inputs)
    if log is not None:
        log.append(loss.item())
    loss.backward()
    optimizer.step()
    if log is not None:
        log.append(largest(model))


def largest(model: nn.Module) -> float:
    found = 0.0
    for parameter in model.parameters():
        found = max(found, parameter.abs().max().item())
    return found


def nodes(loss: torch.Tensor) -> int:
    """The number of nodes in the loss's autograd graph, without those that accumulate a parameter's gradient."""
    todo, seen = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen and "AccumulateGrad" not in node.name():
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return len(seen)


def traced(work: Callable[[], object], **options) -> tuple[list[dict], profile]:
    """Run `work()` twice, the second time under the profiler; returns that run's trace events and the profiler."""
    work()
    with profile(activities=[ProfilerActivity.CPU], **options) as recording:
        work()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        recording.export_chrome_trace(str(file))
        return json.loads(file.read_text(encoding="utf-8"))["traceEvents"], recording


def operators(events: list[dict]) -> list[dict]:
    """The events that are PyTorch's operators."""
    return [e for e in events if e["ph"] == "X" and e["cat"] == "cpu_op"]


def timed(events: list[dict]) -> list[dict]:
    """The events in the profiler's table: operators, annotations and, with a GPU, calls to its runtime and driver."""
    kinds = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
    return [e for e in events if e["ph"] == "X" and e["cat"] in kinds]


def job(layers: int = 3, optimizer: type = torch.optim.SGD, **options) -> tuple:
    """A model, its optimizer and a batch of inputs (32, 64)."""
    torch.manual_seed(0)
    model = network(layers)
    return model, optimizer(model.parameters(), lr=1e-3, **options), torch.randn(32, 64)


made_once = functools.cache(job)


def five(options: dict | None = None) -> None:
    """Five steps of the same job; if there are `options`, under a profiler that takes them."""
    model, optimizer, inputs = made_once()
    watch = contextlib.nullcontext() if options is None else profile(activities=[ProfilerActivity.CPU], **options)
    with watch:
        for _ in range(5):
            train(model, optimizer, inputs)


def in_two_threads() -> None:
    """Compute an exp in this thread and a tanh in a second one."""
    inputs = torch.ones(8)
    other = threading.Thread(target=lambda: torch.tanh(inputs))
    other.start()
    torch.exp(inputs)
    other.join()


def two_ranks(bucket_mib: float, sleep: float) -> list[dict]:
    """The events of one step of DDP on two processes: see traced_ddp.py."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "two.json")
        launch.run(Path(__file__).with_name("traced_ddp.py"), 2, file, bucket_mib, sleep)
        return json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
