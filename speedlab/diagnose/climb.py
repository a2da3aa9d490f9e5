"""Apply one technique at a time to a copy, prove that it computes the same, time it, and keep what helps.

Here alone a clock is read. It never decides what the diagnosis says, only which changes a climb keeps.
"""

import copy
import functools
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
        optimizer = job.make_optimizer(model)
        for group in optimizer.param_groups:
            group.update(fused=True, foreach=False)
        return optimizer

    _, optimizer = job.built()
    if "fused" not in optimizer.defaults:
        return f"{type(optimizer).__name__} has no fused version."
    return "It is fused already." if optimizer.defaults["fused"] else replace(job, make_optimizer=make)


def autocast(job: Job) -> Job | str:
    """The loss under bf16 autocast."""
    where = next((p.device.type for p in job.make_model().parameters()), "cpu")
    if where != machine.device().type:
        return "The step is on the CPU; beside a GPU nobody measured whether bf16 is fast there."
    if not machine.is_fast("bf16"):
        return "This machine has no fast bf16."
    under = torch.autocast(where, dtype=torch.bfloat16)
    return replace(job, loss_fn=under(job.loss_fn), step=job.step and under(job.step))


def compiled(job: Job) -> Job | str:
    """The model's repeated blocks compiled once, or the whole model where it has none."""
    if not compat.compiler():
        return "There is no C++ compiler for torch.compile."
    return _on_blocks(job, lambda block: block.compile())


def checkpointed(job: Job) -> Job | str:
    """Each repeated block computed again in backward instead of kept."""
    if not blocks(job.make_model()):
        return "The model has no repeated blocks to compute again."

    def change(block: nn.Module) -> None:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    return _on_blocks(job, change)


def _on_blocks(job: Job, change: Callable[[nn.Module], None]) -> Job:
    def make() -> nn.Module:
        model = job.make_model()
        for block in blocks(model) or [model]:
            change(block)
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
            return None, Rung(name, False, "its gradients or updates are not the baseline's", difference), None
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


def apart(job: Job, changed: Job) -> float:
    """How far a changed job is from the job, |a - b| / |a|, at equal weights on an equal batch, without dropout.

    The worst of two: all gradients; and the weights' change in one optimizer step on equal gradients, where what a
    thousandth of the weights rounds to is no difference.
    """
    torch.manual_seed(0)
    (model, optimizer), (other, its) = job.built(), changed.built()
    other.load_state_dict(model.state_dict())
    batch = job.batch()
    for which, made, given in ((job, model, batch), (changed, other, copy.deepcopy(batch))):
        made.eval()
        which.loss(made, given).backward()
    a, b = ([p.grad for p in made.parameters()] for made in (model, other))
    if [g is None for g in a] != [g is None for g in b]:
        return float("inf")
    off = _off(_flat(a), _flat(b), 0.0)
    before = _flat(model.parameters())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    optimizer.step()
    its.step()
    a, b = _flat(model.parameters()) - before, _flat(other.parameters()) - before
    return max(off, _off(a, b, 1e-3 * before.norm().item()))


def _flat(parts: Iterable[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([part.detach().flatten().float() for part in parts if part is not None])


def _off(a: torch.Tensor, b: torch.Tensor, least: float) -> float:
    off = ((a - b).norm() / a.norm().clamp_min(max(least, 1e-30))).item()
    return off if off == off else float("inf")


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


def probe(job: Job, seconds: float = 20.0) -> Comparison:
    """Time a step in turns with variants of it, on a fresh model: each ratio says what the missing part costs."""
    with untouched():
        model, optimizer = job.built()
        batch, double = job.batch(), job.batch(2 * job.batch_size)

        def without_optimizer() -> None:
            model.zero_grad()
            job.loss(model, batch).backward()

        feed = again(job.loader) if job.loader is not None else None
        variants = {"with your loader": lambda: job.train(model, optimizer, next(feed))} if feed else {}
        variants["the same batch again"] = lambda: job.train(model, optimizer, batch)
        variants["without the optimizer"] = without_optimizer
        variants["twice the batch"] = lambda: job.train(model, optimizer, double)
        return compare(variants, seconds=seconds, max_rounds=30)
