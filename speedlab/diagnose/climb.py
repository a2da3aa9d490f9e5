"""Apply one technique at a time to a copy, prove that it computes the same, time it, and keep what helps."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from speedlab import compat, machine
from speedlab.diagnose.counting import Counts, counts
from speedlab.diagnose.jobs import DiagnoseError, Job, tensors, untouched
from speedlab.diagnose.rules import Device, advise
from speedlab.measure import Comparison, compare

# How far gradients may be from the baseline's, relative to their norm: rounding in fp32, and in bf16's 8 bits.
_EXACT, _HALF = 1e-3, 0.1


@dataclass(frozen=True)
class Rung:
    """One technique that was tried: whether it was kept, how far its gradients are off, what it counts, its time."""

    technique: str
    kept: bool
    why: str
    off: float | None = None
    operations: int | None = None
    saved: int | None = None
    timing: Comparison | None = None


def fused(job: Job) -> Job | str:
    """The optimizer in one operation per group of parameters."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        plain = job.make_optimizer(model)
        options = {**plain.defaults, "fused": True, "foreach": False}
        groups = [{**group, "fused": True, "foreach": False} for group in plain.param_groups]
        return type(plain)(groups, **{k: v for k, v in options.items() if k in _parameters(type(plain))})

    _, optimizer = job.built()
    if "fused" not in optimizer.defaults:
        return f"{type(optimizer).__name__} has no fused version."
    return "It is fused already." if optimizer.defaults["fused"] else replace(job, make_optimizer=make)


def autocast(job: Job) -> Job | str:
    """The loss under bf16 autocast."""
    where = machine.device().type
    if not machine.is_fast("bf16"):
        return "This machine has no fast bf16."

    def loss_fn(model: nn.Module, batch: object) -> torch.Tensor:
        with torch.autocast(where, dtype=torch.bfloat16):
            return job.loss_fn(model, batch)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: object) -> torch.Tensor:
        with torch.autocast(where, dtype=torch.bfloat16):
            return job.step(model, optimizer, batch)

    return replace(job, loss_fn=loss_fn, step=step if job.step else None)


def compiled(job: Job) -> Job | str:
    """The model's repeated blocks compiled once, or the whole model where it has none."""
    if not compat.compiler():
        return "There is no C++ compiler for torch.compile."

    def make() -> nn.Module:
        model = job.make_model()
        for block in blocks(model) or [model]:
            block.compile()
        return model

    return replace(job, make_model=make)


def channels_last(job: Job) -> Job | str:
    """Images and convolutions with the channels innermost."""
    if not any(isinstance(m, nn.Conv2d) for m in job.make_model().modules()):
        return "The model has no convolution."

    def batch(size: int) -> object:
        made = job.make_batch(size)
        for tensor in tensors(made):
            if tensor.dim() == 4:
                tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
        return made

    return replace(job, make_model=lambda: job.make_model().to(memory_format=torch.channels_last), make_batch=batch)


def checkpointed(job: Job) -> Job | str:
    """Each repeated block computed again in backward instead of kept."""
    if not blocks(job.make_model()):
        return "The model has no repeated blocks to compute again."

    def make() -> nn.Module:
        model = job.make_model()
        for block in blocks(model):
            forward = block.forward
            block.forward = lambda *args, forward=forward, **options: checkpoint(
                forward, *args, use_reentrant=False, **options
            )
        return model

    return replace(job, make_model=make)


def larger_batch(job: Job) -> Job | str:
    """Twice the batch."""
    return replace(job, batch_size=2 * job.batch_size)


def workers(job: Job) -> Job | str:
    """The loader's work in other processes."""
    loader = job.loader
    if not isinstance(loader, DataLoader) or loader.num_workers:
        return "The loader is no DataLoader of torch, or has workers already."
    options = {"batch_sampler": loader.batch_sampler, "collate_fn": loader.collate_fn, "persistent_workers": True}
    return replace(job, loader=DataLoader(loader.dataset, num_workers=max(1, machine.cores() - 1), **options))


RUNGS: dict[str, tuple[Callable[[Job], Job | str], float]] = {
    "load in other processes": (workers, _EXACT),
    "a fused optimizer": (fused, _EXACT),
    "bf16 autocast": (autocast, _HALF),
    "torch.compile": (compiled, _EXACT),
    "channels last": (channels_last, _EXACT),
    "checkpointing, or micro-batches": (checkpointed, _EXACT),
    "a larger batch": (larger_batch, _EXACT),
}


def climb(
    job: Job, device: Device, *, memory: int | None = None, seconds: float = 60.0, told: Callable[[str], None] = print
) -> tuple[Job, tuple[Rung, ...]]:
    """Try what the diagnosis advises, the first first; keep what is proved equal and is faster; diagnose again.

    It ends when nothing advised is left, when a kept gain lies inside the noise, or after `seconds`. Returns the job
    with everything that was kept, and all rungs. `told` is called with a line for each.
    """
    end, tried, off = time.monotonic() + seconds, [], 0.0
    with untouched():
        now = counts(job)
        while time.monotonic() < end:
            names = [a.technique for a in advise(now, device, memory) if (a.helps or a.may) and a.technique in RUNGS]
            name = next((n for n in names if n not in [rung.technique for rung in tried]), None)
            if name is None:
                break
            told(f"trying {name}")
            change, tolerance = RUNGS[name]
            # a rounding that was accepted once stays accepted
            off = max(off, tolerance)
            changed, rung, after = _try(name, job, change, off, now, max(1.0, (end - time.monotonic()) / 4))
            tried.append(rung)
            if rung.kept:
                job, now = changed, after
    return job, tuple(tried)


def _try(
    name: str, job: Job, change: Callable, tolerance: float, before: Counts, seconds: float
) -> tuple[Job | None, Rung, Counts | None]:
    try:
        changed = change(job)
        if isinstance(changed, str):
            return None, Rung(name, False, changed), None
        difference = apart(job, changed)
        if difference > tolerance:
            return None, Rung(name, False, "its gradients are not the baseline's", difference), None
        if not trains(changed):
            return None, Rung(name, False, "the loss does not fall in five steps on one batch", difference), None
        after = counts(changed, breaks=False)
    except DiagnoseError as error:
        return None, Rung(name, False, str(error)), None
    timing = timed(job, changed, name, seconds)
    memory = name.startswith("checkpointing")
    kept = after.peak < before.peak if memory else timing.ratios[name].verdict == "faster"
    why = f"{'kept' if kept else 'not kept'}: {timing.ratios[name]}"
    return changed, Rung(name, kept, why, difference, len(after.operations), after.saved, timing), after


def gradients(job: Job, model: nn.Module, batch: object) -> torch.Tensor:
    """All gradients of the loss on a batch, as one vector, without dropout."""
    model.eval()
    model.zero_grad()
    job.loss(model, batch).backward()
    return torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


def apart(job: Job, changed: Job) -> float:
    """How far a changed job's gradients are from the job's, |a - b| / |a|, at equal weights on an equal batch."""
    torch.manual_seed(0)
    model, batch = job.make_model(), job.batch()
    other = changed.make_model()
    other.load_state_dict(model.state_dict())
    a = gradients(job, model, batch)
    b = gradients(changed, other, copy.deepcopy(batch))
    if a.shape != b.shape or not b.isfinite().all():
        return float("inf")
    return ((a - b).norm() / a.norm().clamp_min(1e-30)).item()


def trains(job: Job) -> bool:
    """Whether five steps on one batch lower its loss."""
    torch.manual_seed(0)
    model, optimizer = job.built()
    batch = job.batch()
    losses = [job.train(model, optimizer, copy.deepcopy(batch)).detach().item() for _ in range(6)]
    return all(loss == loss for loss in losses) and min(losses[1:]) < losses[0]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the longest ModuleList or Sequential whose members are of one type: a transformer's layers."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    alike = [list(m) for m in lists if len(m) > 1 and len({type(part) for part in m}) == 1]
    alike = [group for group in alike if any(True for _ in group[0].parameters())]
    return max(alike, key=len, default=[])


def timed(job: Job, changed: Job, name: str, seconds: float) -> Comparison:
    """Time both in turns, on as many samples: of a doubled batch one step, of the other two."""
    turns = changed.batch_size // job.batch_size

    def steps(job: Job, times: int) -> Callable[[], None]:
        model, optimizer = job.built()
        fixed, feed = job.batch(), again(job.loader) if job.loader is not None else None

        def work() -> None:
            for _ in range(times):
                job.train(model, optimizer, fixed if feed is None else next(feed))

        return work

    variants = {"before": steps(job, turns), name: steps(changed, 1)}
    return compare(variants, seconds=seconds, max_rounds=50)


def again(loader: Iterable) -> Iterator:
    """The batches of a loader, epoch after epoch."""
    while True:
        yield from loader


def _parameters(kind: type) -> set[str]:
    import inspect

    return set(inspect.signature(kind).parameters)
