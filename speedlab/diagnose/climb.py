"""Apply one technique at a time to a copy, prove that it computes the same, time it, and keep what helps.

Apart from what measures a device, only this module reads a clock. The times of a step never change the table of
advice: they may change the report's first sentence, and they decide which changes a climb keeps.
"""

import contextlib
import copy
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from speedlab import compat, machine
from speedlab.diagnose.counting import WRAPPED, Counts, counts
from speedlab.diagnose.jobs import (
    DiagnoseError,
    Job,
    chosen,
    mapped,
    one_sentence,
    real_tokens,
    size_of,
    tensors,
    untouched,
)
from speedlab.diagnose.rules import LARGER, Device, advise, rounding
from speedlab.measure import Comparison, compare

# What a probe times besides the step with the loader: batches from the loader and one from make_batch, in memory.
HELD, SAME = "the loader's batches, held in memory", "the same batch again"
# How far outputs and gradients may be off, relative to their norm: rounding in fp32, and in bf16's 8 bits.
_EXACT, _HALF = 1e-3, 0.1


@dataclass(frozen=True)
class Rung:
    """One technique that was tried: whether it was kept, why, how far off it is, and the counts of a step with it."""

    technique: str
    kept: bool
    why: str
    off: float | None = None
    operations: int | None = None
    flops: int | None = None
    bytes: int | None = None


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
        return "The step is on the CPU; on a machine with a GPU, the speed of bf16 on the CPU is not measured."
    if not machine.is_fast("bf16"):
        return "This machine has no fast bf16."
    under = torch.autocast(where, dtype=torch.bfloat16)
    return replace(job, loss_fn=under(job.loss_fn), step=job.step and under(job.step))


def compiled(job: Job) -> Job | str:
    """The model's repeated blocks compiled; the whole model where it has none, or more kinds than Dynamo keeps."""
    if not compat.compiler(next((p.device.type for p in job.make_model().parameters()), "cpu")):
        return "torch.compile has no working compiler here: a CPU needs a C++ compiler, a GPU needs Triton."
    kinds = {(type(block), *(p.shape for p in block.parameters())) for block in blocks(job.make_model())}
    # all share Dynamo's limit of eight versions of one function; a kind needs one to train and one for the proof
    return _on(job, lambda model: blocks(model) if 0 < len(kinds) < 4 else [model], lambda part: part.compile())


def checkpointed(job: Job) -> Job | str:
    """Each repeated block computed again in backward instead of kept."""
    model, _ = job.built()
    parts = [part for block in blocks(model) for part in block.modules()]
    if not parts:
        return "The model has no list of blocks of one kind that could be computed again."
    batch, states = job.batch(), []
    for _ in range(2):  # what the second forward only writes again, such as scores to look at, may be written twice
        machine.seed_everything(0)
        job.loss(model, copy.deepcopy(batch))
        states.append([_state_of(part) for part in parts])
    names = [type(part).__name__.strip("_") for part in parts]
    twice = {name for name, a, b in zip(names, *states, strict=True) if not _same(a, b)}
    if twice:
        return f"A checkpoint would run {', '.join(sorted(twice))} twice in a step, and each run changes its state."

    def change(block: nn.Module) -> None:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def switched() -> nn.Module:
        model = job.make_model()
        getattr(model, own[0])()
        return model

    # transformers' own switch, by its new and its old name, turns the cache of keys off as well
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    own = [name for name in names if hasattr(job.make_model(), name)]
    made = replace(job, make_model=switched) if own else _on(job, blocks, change)
    # the proof is in evaluation mode; a checkpoint repeats what torch's own generators draw, and no other's
    first, again = map(_training_gradients, (job, made))
    if _off(first, again, 0.0) > 0.01:
        return "In training mode, the gradients differ: a block draws random numbers from a generator of its own."
    return made


def _training_gradients(job: Job) -> torch.Tensor:
    machine.seed_everything(0)
    model, _ = job.built()
    job.loss(model, job.batch()).backward()
    return _flat(p.grad for p in model.parameters())


def _state_of(module: nn.Module) -> dict[str, object]:
    """A copy of a module's own buffers, and of its plain numbers and tensors."""
    held = {**vars(module), **dict(module.named_buffers(recurse=False))}
    tensors_ = {name: value.detach().clone() for name, value in held.items() if isinstance(value, torch.Tensor)}
    return {name: value for name, value in held.items() if isinstance(value, int | float | str)} | tensors_


def _same(a: dict[str, object], b: dict[str, object]) -> bool:
    pairs = [(value, b.get(name)) for name, value in a.items()]
    both = lambda x, y: isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)  # noqa: E731
    alike = (torch.equal(x, y) if both(x, y) else type(x) is type(y) and x == y for x, y in pairs)
    return a.keys() == b.keys() and all(alike)


def _on(job: Job, parts: Callable[[nn.Module], list[nn.Module]], change: Callable[[nn.Module], None]) -> Job:
    def make() -> nn.Module:
        model = job.make_model()
        for part in parts(model):
            change(part)
        return model

    return replace(job, make_model=make)


def channels_last(job: Job) -> Job | str:
    """Images and convolutions with the channels innermost."""
    if not any(isinstance(m, nn.Conv2d) for m in job.make_model().modules()):
        return "The model has no Conv2d."

    def innermost(part: torch.Tensor) -> torch.Tensor:
        return part.contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part

    model = lambda: job.make_model().to(memory_format=torch.channels_last)  # noqa: E731
    return replace(job, make_model=model, prepare=lambda batch: mapped(innermost, job.prepare(batch)))


def bucketed(job: Job) -> Job | str:
    """Batches cut to their longest text; without a loader to set the order, also of texts of similar length.

    A batch is then one of eight that are drawn together and sorted by length: the one whose width is
    nearest to their average, so that its counts and its time stand for all of them.
    """
    real = real_tokens(job.batch())
    if real is None or real.dim() != 2:
        return (
            "The batch has no attention mask (B, T) of whole numbers, nor rows of token ids that may end in padding."
        )
    if real.all():
        return "No token of the batch is padding."
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in job.make_model().modules()):
        return (
            "Its batch norm may take the padding into its statistics; with less padding, it would train differently."
        )
    if any(_cuts_values(job.batch()) for _ in range(8)):
        return "Something in the batch, such as its labels, is longer than the texts: cut each to its own length."
    short = replace(job, prepare=lambda batch: trimmed(job.prepare(batch)))
    if job.loader is not None:
        full = "One text fills the batch's width, and which texts share a batch is for your loader to say."
        return full if real[:, _columns(real)].shape == real.shape else short

    def similar(size: int) -> object:
        pool = job.make_batch(8 * size)
        if size_of(pool) != 8 * size:
            return pool  # it gives what it has: sorted into smaller batches, a step would only do less
        real = real_tokens(pool)
        buckets = real.sum(1).argsort().split(size)
        widths = [real[rows][:, _columns(real[rows])].shape[1] for rows in buckets]
        mean = sum(widths) / len(widths)
        return chosen(pool, buckets[min(range(len(widths)), key=lambda i: (abs(widths[i] - mean), -widths[i]))])

    return replace(short, make_batch=similar)


def trimmed(batch: object) -> object:
    """The batch without the columns that are padding in all its rows; what is as wide as the tokens is cut too."""
    real = real_tokens(batch)
    kept = _columns(real)
    return mapped(lambda part: part[:, kept].contiguous() if part.shape[:2] == real.shape else part, batch)


def _cuts_values(batch: object) -> bool:
    """Whether whole numbers as wide as the tokens go on after a text ends; positions, equal in all rows, may."""
    real = real_tokens(batch)
    wide = [t for t in tensors(batch) if t.shape[:2] == real.shape and not t.is_floating_point()]
    rests = [row[~here] for t in wide if not (t == t[:1]).all() for row, here in zip(t, real, strict=True)]
    return any(bool((rest != rest[:1]).any()) for rest in rests)


def _columns(real: torch.Tensor) -> slice:
    """From the first column that has a real token to the last."""
    columns = real.any(0).nonzero().flatten().tolist() or [0]
    return slice(columns[0], columns[-1] + 1)


def larger_batch(job: Job) -> Job | str:
    """Twice the batch."""
    if job.loader is not None:
        return "Your loader makes the batches: double its batch_size, and climb again."
    one, two = (size_of(job.batch(times * job.batch_size)) for times in (1, 2))
    if two != 2 * one:
        return f"The first tensor of make_batch({2 * job.batch_size}) has {two} rows, not twice {one}."
    return replace(job, batch_size=2 * job.batch_size)


def workers(job: Job) -> Job | str:
    """The loader's work in other processes."""
    loader = job.loader
    if type(loader) is not DataLoader or loader.num_workers:
        return "The loader is no plain DataLoader of torch, or has workers already."
    if isinstance(loader.dataset, IterableDataset):
        return "It streams: unless the dataset shares its samples out, each worker repeats all of them."
    kept = ("collate_fn", "pin_memory", "worker_init_fn", "generator", "timeout")
    options = {name: getattr(loader, name) for name in kept} | {"persistent_workers": True}
    own = {"batch_size": None, "sampler": loader.sampler}  # where the dataset makes batches
    options |= {"batch_sampler": loader.batch_sampler} if loader.batch_sampler is not None else own
    made = DataLoader(loader.dataset, num_workers=max(1, machine.cores() - 1), **options)
    if made.num_workers < 2:
        return replace(job, loader=made)
    # the first two batches come from two workers
    numbers = lambda batch: _flat([torch.ones(1), *tensors(batch)])  # noqa: E731
    plain, theirs = ([numbers(batch) for batch in itertools.islice(one, 2)] for one in (loader, made))
    if torch.equal(theirs[0], theirs[-1]) and not torch.equal(plain[0], plain[-1]):
        return "Its workers draw the same random numbers: seed the dataset's own generator in each (worker_init_fn)."
    return replace(job, loader=made)


RUNGS: dict[str, tuple[Callable[[Job], Job | str], float]] = {
    "load in other processes": (workers, _EXACT),
    "batches of similar length": (bucketed, _EXACT),
    "a fused optimizer": (fused, _EXACT),
    "bf16 autocast": (autocast, _HALF),
    "torch.compile": (compiled, _EXACT),
    "channels last": (channels_last, _EXACT),
    "checkpointing, or micro-batches": (checkpointed, _EXACT),
    LARGER: (larger_batch, _EXACT),
}


def climb(
    job: Job, device: Device, *, memory: int | None = None, seconds: float = 60.0, told: Callable[[str], None] = print
) -> tuple[Job, tuple[Rung, ...]]:
    """Try what the diagnosis advises, in order; keep what is proved equal and is faster; diagnose again.

    It ends when nothing advised is left, or after `seconds` and at least one try. Nothing is kept that takes the
    peak over the limit. Returns the job with everything that was kept, and all rungs. `told` gets a line for each.
    """
    end, tried = time.monotonic() + seconds, []
    limit = memory or device.memory
    with untouched(job.loader):
        now = counts(job)
        # weights of 16 bits are rounded in every step
        off = _HALF if any(p.dtype.itemsize < 4 for p in job.make_model().parameters()) else 0.0
        while time.monotonic() < end or not tried:  # counting alone may have taken all the time
            names = [a.technique for a in advise(now, device, memory) if (a.helps or a.may) and a.technique in RUNGS]
            name = next((n for n in names if n not in [rung.technique for rung in tried]), None)
            if name is None:
                break
            told(f"trying {name}")
            # a rounding that was accepted once stays accepted
            off = max(off, RUNGS[name][1])
            job, now, rung = _try(name, job, now, off, max(1.0, (end - time.monotonic()) / 4), limit)
            tried.append(rung)
    return job, tuple(tried)


def _try(
    name: str, job: Job, before: Counts, tolerance: float, seconds: float, limit: int | None
) -> tuple[Job, Counts, Rung]:
    """The job and its counts, with the technique if it is kept, as they were if it is not; and the rung."""
    difference = None
    try:
        with one_sentence(name):
            changed = RUNGS[name][0](job)
            if isinstance(changed, str):
                raise DiagnoseError(changed)
            difference = apart(job, changed)
            if difference > tolerance:
                raise DiagnoseError("its outputs, gradients or updates are not the baseline's")
            if not trains(changed) and trains(job):
                raise DiagnoseError("the loss does not fall in five steps on one batch; without this change it does")
            after = counts(changed, breaks=False)
            if limit is not None and after.peak > max(limit, before.peak):
                raise DiagnoseError(f"its peak of {after.peak:,} bytes is over the limit of {limit:,}")
            timing = timed(job, changed, name, seconds)
    except DiagnoseError as error:
        return job, before, Rung(name, False, str(error), difference)
    memory = name.startswith("checkpointing")
    kept = after.peak < before.peak if memory else timing.ratios[name].verdict == "faster"
    why = f"{'kept' if kept else 'not kept'}: {timing.ratios[name]}"
    rung = Rung(name, kept, why, difference, len(after.operations), after.flops, after.bytes)
    return (changed, after, rung) if kept else (job, before, rung)


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Without TF32 in cuDNN: with it, equal networks differ by more than what counts as equal."""
    cudnn = torch.backends.cudnn
    try:
        before, cudnn.allow_tf32 = cudnn.allow_tf32, False
    except RuntimeError:  # a script has set one of the newer flags
        with rounding(cudnn.conv, "ieee"), rounding(cudnn.rnn, "ieee"):
            yield
        return
    try:
        yield
    finally:
        cudnn.allow_tf32 = before


@untouched()
def apart(job: Job, changed: Job) -> float:
    """How far a changed job is from the original, |a - b| / |a|, at equal weights on an equal batch, without dropout.

    The worst of three: the loss and what the model returns, of real tokens where there is padding; all gradients; and
    the weights' change in two optimizer steps on equal gradients, where what a thousandth of the weights rounds to
    is no difference.
    """
    made = []
    for one in (job, changed):
        machine.seed_everything(0)  # also for what a model draws and keeps outside of its state
        made.append(one.built())
    (model, optimizer), (other, its) = made
    with one_sentence("load_state_dict of the model's own state_dict"):
        other.load_state_dict(model.state_dict())
    with one_sentence("The proof, on the changed batch in evaluation mode,"), strict():
        batch = changed.make_batch(job.batch_size)
        seen, its_own = _outputs(job, model, batch), _outputs(changed, other, batch)
    if len(seen) != len(its_own):
        return float("inf")
    # what is still as wide as the padding differs in shape
    pairs = [pair for pair in zip(seen, its_own, strict=True) if pair[0].shape == pair[1].shape]
    off = _off(*map(_flat, zip(*pairs, strict=True)), 0.0)
    a, b = ([p.grad for p in made.parameters()] for made in (model, other))
    if [g is None for g in a] != [g is None for g in b]:
        return float("inf")
    off = max(off, _off(_flat(a), _flat(b), 0.0))
    before = _flat(model.parameters())
    for share in (1.0, -0.5):  # of the gradients: a second step shows momentum, and how fast moments move
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = None if p.grad is None else p.grad * share
            q.grad = None if p.grad is None else p.grad.clone()
        with one_sentence("The optimizer's step", "The proof calls step() without a closure."):
            optimizer.step()
            its.step()
    a, b = _flat(model.parameters()) - before, _flat(other.parameters()) - before
    return max(off, _off(a, b, 1e-3 * before.norm().item()))


def _outputs(job: Job, model: nn.Module, batch: object) -> list[torch.Tensor]:
    """The loss of a batch and what the model returned, of the real tokens; the gradients are in the model."""
    try:
        model.eval()
        return _seen(job, model, copy.deepcopy(batch))
    except Exception:
        # torchvision's detectors return a loss in training mode only: then the layers alone, their dropout and their
        # running statistics, are in evaluation mode
        model.train()
        for module in model.modules():
            module.training = any(True for _ in module.children())
        model.zero_grad()
        return _seen(job, model, copy.deepcopy(batch))


def _seen(job: Job, model: nn.Module, batch: object) -> list[torch.Tensor]:
    from torch._inductor import config as inductor  # takes more than a second

    machine.seed_everything(0)  # prepare, the model and the loss may draw: the same for both
    batch, found = job.prepare(batch), []
    real = real_tokens(batch)
    for module in model.modules():
        # transformers' layers checkpoint in training mode only
        if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__):
            module.training = True
    watched = model.register_forward_hook(lambda module, given, out: found.extend(tensors(_uncached(out))))
    # evaluation mode switches off dropout layers; this, the dropout that a module in training mode calls itself
    undropped = patch.object(nn.functional, "dropout", lambda input, *_, **__: input)
    with watched, undropped, inductor.patch(fallback_random=True):  # compiled code then draws eager mode's noise
        loss = job.loss(model, batch)
        loss.backward()
    found = [part for part in found if not WRAPPED(part)]
    return [loss, *(part[real] if real is not None and part.shape[:2] == real.shape else part for part in found)]


def _uncached(out: object) -> object:
    """What a model returned, but for the keys that transformers keep to generate with: a checkpoint keeps none."""
    named = isinstance(out, Mapping)
    return {name: part for name, part in out.items() if name != "past_key_values"} if named else out


def _flat(parts: Iterable[torch.Tensor | None]) -> torch.Tensor:
    real = (torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for p in parts if p is not None)
    return torch.cat([part.flatten().float() for part in real])


def _off(a: torch.Tensor, b: torch.Tensor, least: float) -> float:
    off = ((a - b).norm() / a.norm().clamp_min(max(least, 1e-30))).item()
    return off if off == off else float("inf")


@untouched()
def trains(job: Job) -> bool:
    """Whether five steps on one batch lower its loss, each with the same dropout and noise."""
    machine.seed_everything(0)
    model, optimizer = job.built()
    batch, losses = job.batch(), []
    for _ in range(6):
        machine.seed_everything(0)
        loss = job.train(model, optimizer, copy.deepcopy(batch))
        if not isinstance(loss, torch.Tensor | float):
            raise DiagnoseError(f"step() returned a {type(loss).__name__}; it must return the loss.")
        losses.append(torch.as_tensor(loss).detach().item())
    return all(loss == loss for loss in losses) and min(losses[1:]) < losses[0]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The members of each ModuleList or Sequential of one type that is in no other such: a transformer's layers."""
    found, inside = [], set()
    for module in model.modules():
        parts = list(module) if isinstance(module, nn.ModuleList | nn.Sequential) and module not in inside else []
        kinds = {type(part) for part in parts}
        if len(parts) < 2 or len(kinds) > 1 or kinds <= {nn.ModuleList, nn.ModuleDict}:
            continue  # a list of lists is never called itself
        if any(True for _ in parts[0].parameters()):
            found += parts
            inside.update(within for part in parts for within in part.modules())
    return list(dict.fromkeys(found))


def timed(job: Job, changed: Job, name: str, seconds: float) -> Comparison:
    """Time both in turns, on equally many samples: one step with a doubled batch, two with the other."""
    turns = changed.batch_size // job.batch_size

    def steps(job: Job, times: int) -> Callable[[], None]:
        train, batches = steady(job, [*job.built()]), job.batches() or itertools.repeat(job.batch())
        return lambda: [train(next(batches)) for _ in range(times)]

    variants = {"before": steps(job, turns), name: steps(changed, 1)}
    return compare(variants, seconds=seconds, max_rounds=50)


def steady(job: Job, made: list) -> Callable[[object], torch.Tensor]:
    """A step on a model and its optimizer, and on new ones where these can go no further: a schedule may end."""

    def train(batch: object) -> torch.Tensor:
        try:
            return job.train(*made, batch)
        except DiagnoseError:
            made[:] = job.built()
            return job.train(*made, batch)

    return train


class _Inside(TorchDispatchMode):
    """Adds up the seconds of PyTorch's operations, as the host sees them."""

    seconds = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        start = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - start
        return out


@untouched()
def outside(job: Job, seconds: float = 20.0) -> float:
    """Seconds that the host spends in a step outside PyTorch's operations: in Python, in other libraries, asleep.

    The fastest of up to five steps, minus the operations in the fastest of as many watched ones; watching takes
    time of its own. One of each warms up; after `seconds`, no new one begins.
    """
    with one_sentence("Timing a step"):
        train, clock, pairs = steady(job, [*job.built()]), machine.synchronised_clock(machine.device()), []

        def host(around: contextlib.AbstractContextManager) -> float:
            batch, start = job.batch(), clock()
            with around:
                train(batch)
            return time.perf_counter() - start

        end = time.perf_counter() + seconds
        while len(pairs) < 2 or (len(pairs) < 6 and time.perf_counter() < end):
            watched = _Inside()
            pairs.append((host(contextlib.nullcontext()), host(watched) and watched.seconds))
        whole, inside = map(min, zip(*pairs[1:], strict=True))
    return max(0.0, whole - inside)


def probe(job: Job, seconds: float = 20.0) -> Comparison:
    """Time a step in turns with variants of it, on a fresh model: each ratio says what the missing part costs."""
    with untouched(job.loader), one_sentence("Timing a step"):
        made, batch, feed = [*job.built()], job.batch(), job.batches()
        train = steady(job, made)

        def without_optimizer() -> None:
            made[0].zero_grad()
            job.loss(made[0], batch).backward()

        variants = {}
        if feed:
            # as large as the loader's are, which make_batch's need not be
            held = itertools.cycle([next(feed) for _ in range(4)])
            variants = {"with your loader": lambda: train(next(feed)), HELD: lambda: train(next(held))}
        variants[SAME] = lambda: train(batch)
        variants["without the optimizer"] = without_optimizer
        try:
            double = job.batch(2 * job.batch_size)
            if size_of(double) == 2 * size_of(batch):
                train(double)
                variants["twice the batch"] = lambda: train(double)
            else:
                variants["twice the batch"] = "make_batch gives no batch of twice the size"
        except DiagnoseError:
            variants["twice the batch"] = "the step takes no other batch"
        return compare(variants, seconds=seconds, max_rounds=30)
