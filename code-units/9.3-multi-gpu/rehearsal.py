"""One rank of many, rehearsed: the others do not exist, so collectives move nothing; most tensors take no memory."""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from finetune_fsdp import shard
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from traffic import Message, listen, peak_bytes

from speedlab import count
from speedlab.data import models

PROBE = {"input_ids": torch.ones(8, 32, dtype=torch.long), "labels": torch.zeros(8, dtype=torch.long)}


@contextlib.contextmanager
def rehearse(*ranks: int) -> Iterator[DeviceMesh]:
    """Act as rank 0 of a mesh of shape `ranks`, whose other ranks do not exist: collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=math.prod(ranks), store=FakeStore())
    try:
        yield init_device_mesh("cpu", ranks, mesh_dim_names=("replicate", "shard")[-len(ranks) :])
    finally:
        dist.destroy_process_group()


def stepper(model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """AdamW for the model, and a function that takes one training step with it."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(**PROBE).loss.backward()
        optimizer.step()

    return optimizer, step


def one_step(*ranks: int, size: str | None = None, groups: str = "layers") -> tuple[list[Message], dict[str, int]]:
    """The messages of one step of a sharded DistilBERT, and the bytes a rank holds at its worst moment, by kind."""
    with rehearse(*ranks) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model = models.distilbert(size, pretrained=False).eval()  # no dropout, as in the script
        if groups == "layers and embeddings":
            fully_shard(model.distilbert.embeddings, mesh=mesh)
        model = fully_shard(model, mesh=mesh) if groups == "one" else shard(model, mesh)
        optimizer, step = stepper(model)
        step()  # from here on, the optimizer has its state
        with listen() as messages:
            step()
        return messages, peak_bytes(model, optimizer, step)


def alone(size: str | None = None) -> dict[str, int]:
    """The bytes that one process with the whole model holds at its worst moment, by kind."""

    def build():
        model = models.distilbert(size, pretrained=False).eval()
        optimizer, step = stepper(model)
        return model, optimizer, step

    kinds = count.predict_peak_memory(build)
    found = {name: kinds.by_kind.get(name, 0) for name in ("parameter", "optstate", "gradient")}
    names = dict(zip(found, ("own parameters", "optimizer", "gradients"), strict=True))
    rest = {"activations and the rest": kinds.total - sum(found.values())}
    return {names[name]: size for name, size in found.items()} | rest


def on_meta(ranks: int) -> dict:
    """The parameters' devices before memory is allocated, their bytes afterwards, and the buffers nobody fills."""
    with rehearse(ranks) as mesh:
        with torch.device("meta"):
            model = shard(models.distilbert(pretrained=False), mesh)
        before = {p.device.type for p in model.parameters()}
        model.to_empty(device="cpu")
        unfilled = [name for name, _ in model.named_buffers() if name not in model.state_dict()]
        return {"before": before, "bytes": count.state_bytes(model).parameters, "unfilled": unfilled}


def order(prefetch: bool) -> list[str]:
    """Gathers and computations of a forward pass through four groups, in the order they are issued."""
    with rehearse(8) as mesh:
        stack = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        for i, layer in enumerate(stack):
            fully_shard(layer, mesh=mesh)
            if prefetch and i:
                stack[i - 1].set_modules_to_forward_prefetch([layer])
        fully_shard(stack, mesh=mesh)
        with listen() as events:
            for i, layer in enumerate(stack):
                layer.register_forward_pre_hook(lambda *_, i=i: events.append(Message(f"compute {i}", 0, "", 0)))
            stack(torch.ones(2, 64))
    return [event.kind for event in events]


def accumulated(sync: bool, keep: bool) -> list[Message]:
    """The messages of a step with four micro-batches, on one of eight ranks."""
    with rehearse(8) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model = shard(models.distilbert(pretrained=False), mesh)
        if keep:
            model.set_reshard_after_forward(False)
        with listen() as messages:
            for last in (False, False, False, True):
                model.set_requires_gradient_sync(sync or last)
                model.set_reshard_after_backward(last or not keep)
                model(**PROBE).loss.backward()
    return messages
