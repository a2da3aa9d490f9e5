"""The checks of exercise 3, multi-GPU: a loop turned into DDP, five mistakes mended, a checkpoint in parts.

Answers run on three real processes, those of tasks 1 and 2 on two of them as well. They record what the model
reads and what they send. This is judged against training on one process, and against simulated faults.
"""

import atexit
import contextlib
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from speedlab.checks.core import (
    check,
    close,
    diagnose,
    distance,
    expect,
    fail,
    number,
    on_ranks,
    sequence,
    where,
    whole,
)

RANKS = 3
_near = functools.partial(close, relative=1e-4)


class Rows(Dataset):
    """A given number of rows, each with 6 features and a label."""

    def __init__(self, count: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, 6, generator=generator)
        self.labels = (self.inputs.sum(dim=1) > 0).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.labels[index]


def make_model(seed: int, width: int = 8) -> nn.Module:
    """A small classifier: rows (B, 6) in, logits (B, 2) out."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))


def train(model: nn.Module, rows: Dataset, epochs: int, batch: int, accumulate_steps: int, lr: float) -> nn.Module:
    """The training on one process that task 1 starts from: a batch of `batch` rows a step, in micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    order = torch.Generator()
    loader = DataLoader(rows, batch // accumulate_steps, sampler=RandomSampler(rows, generator=order), drop_last=True)
    for epoch in range(epochs):
        order.manual_seed(epoch)
        for micro, (inputs, labels) in enumerate(loader, start=1):
            loss = F.cross_entropy(model(inputs), labels)
            (loss / accumulate_steps).backward()
            if micro % accumulate_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


# --- What the ranks write down --------------------------------------------------------------------------------------


class _Traffic(TorchDispatchMode):
    """Bytes that this rank sends, if rings carry its collectives, and those that are broadcast; small messages aside.

    Counts floating-point numbers, and byte strings of `long` bytes or more: objects travel as byte strings.
    """

    def __init__(self, long: int):
        super().__init__()
        self.sent = self.broadcast = 0.0
        self.long = long

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[-1]
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in name:
            tensors = [[t for t in tree_leaves(a) if isinstance(t, torch.Tensor)] for a in args]
            largest = max((sum(t.nbytes for t in each if self._counts(t)) for each in tensors), default=0)
            if "broadcast" in name:
                self.broadcast += largest
            if "broadcast" in name or "recv" in name:
                largest = 0
            gathers = func.namespace == "_c10d_functional" and "all_gather" in name  # this one is given a part only
            ranks = dist.get_world_size()
            rounds = 2 if "reduce" in name and "scatter" not in name else ranks if gathers else 1
            self.sent += largest if name == "send" else rounds * largest * (ranks - 1) / ranks
        return func(*args, **(kwargs or {}))

    def _counts(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() or (tensor.dtype == torch.uint8 and tensor.nbytes >= self.long)


def _watched(model: nn.Module, rows: Rows) -> list[list[int]]:
    """The rows that pass through a model's first layer from now on, a list per batch. Other inputs are left out."""
    read: list[list[int]] = []

    def note(_, inputs: tuple[torch.Tensor]) -> None:
        if not torch.is_grad_enabled():  # this pass trains nothing
            return
        same = (inputs[0].detach()[:, None] == rows.inputs).all(dim=2)
        if same.any(dim=1).all() and len(same):
            read.append(same.int().argmax(dim=1).tolist())

    model[0].register_forward_pre_hook(note)
    return read


def _weights(model: object) -> torch.Tensor:
    """All parameters as one vector, gathered if they are sharded."""
    parts = [p.detach() for p in model.parameters()]
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).flatten() for p in parts])


# --- Task 1 ---------------------------------------------------------------------------------------------------------

# ranks, rows, epochs, batch, accumulate_steps, lr: ranks get equal shares, and the last rows fill no micro-batch
_TRAININGS = ((RANKS, 39, 2, 12, 2, 0.1), (RANKS, 30, 3, 9, 1, 0.05), (2, 26, 2, 12, 2, 0.1))


@contextlib.contextmanager
def _among(ranks: int) -> Iterator[None]:
    """Inside, the first ranks are all there are: the default group is theirs."""
    everybody = dist.group.WORLD
    group = everybody if ranks == RANKS else dist.new_group(range(ranks), timeout=timedelta(seconds=20))
    if dist.get_rank() < ranks:
        dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = everybody


def _train_on_a_rank(rank: int, answer: Callable) -> list[dict]:
    reports = []
    for ranks, count, *settings in _TRAININGS:
        model, rows = make_model(seed=rank), Rows(count, seed=1)
        read = _watched(model, rows)
        with _among(ranks), _Traffic(long=1024) as traffic:
            reached = answer(model, rows, *settings, rank, ranks) if rank < ranks else model
        expect(isinstance(reached, nn.Module), f"Return the model, not {type(reached).__name__}.")
        reports.append({"weights": _weights(reached), "read": read, "sent": traffic.sent})
        reports[-1]["broadcast"] = traffic.broadcast
    return reports


def _trained(
    ranks: int, count: int, epochs: int, batch: int, accumulate_steps: int, lr: float, fault: str = ""
) -> torch.Tensor:
    """The weights that a right answer reaches, its ranks played in turn; or those of one with a well-known fault."""
    model, rows = make_model(0), Rows(count, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * (ranks if fault == "rate" else 1))
    parts = {"share": 1, "fixed": RANKS}.get(fault, ranks)
    share = batch // (1 if fault == "accumulation" else accumulate_steps) // parts
    scale = {"loss": 1, "twice": accumulate_steps * ranks}.get(fault, accumulate_steps)
    for epoch in range(epochs):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch + (fault == "seed")))
        order = torch.arange(count) if fault == "order" else order
        hands = [order[rank::ranks] for rank in range(ranks)]
        batches = [torch.cat(parts) for parts in zip(*(hand.split(share) for hand in hands), strict=True)]
        batches = [b for b in batches if len(b) == share * ranks or fault == "short"]
        for micro, chosen in enumerate(batches, start=1):
            loss = F.cross_entropy(model(rows.inputs[chosen]), rows.labels[chosen])
            (loss / scale).backward()
            if micro % accumulate_steps == 0 or fault == "alone":
                optimizer.step()
            if (micro % accumulate_steps == 0 and fault != "zero_grad") or fault == "alone":
                optimizer.zero_grad()
    return _weights(model)


_TRAINING_FAULTS = {
    "Each rank takes the whole batch. `batch` counts the rows of all ranks together: a rank's micro-batch has "
    "batch // accumulate_steps // world_size rows.": "share",
    "A micro-batch is one of accumulate_steps parts of the batch: batch // accumulate_steps // world_size rows.": (
        "accumulation"
    ),
    f"There are not always {RANKS} ranks: divide by world_size.": "fixed",
    "The loss of each micro-batch must be divided by accumulate_steps: the gradients are added up.": "loss",
    "The optimizer steps after every micro-batch. It should step once per accumulate_steps micro-batches.": "alone",
    "DDP averages over the ranks already: do not divide by world_size as well.": "twice",
    "Gradients are never set to zero. `optimizer.zero_grad()` belongs after every step.": "zero_grad",
    "Each step is world_size times as long. The batch is that of one process, so its rate is `lr`; and gradients are "
    "averaged over the ranks, not summed.": "rate",
    "The last rows of an epoch do not fill a micro-batch: leave them out with `drop_last=True`.": "short",
    "The rows come in the order of the data set: let the sampler shuffle, with seed 0.": "order",
    "Epoch e is shuffled as epoch e + 1 should be: `set_epoch(epoch)` counts from 0, and the sampler's seed is 0.": (
        "seed"
    ),
}


@check("Task 1, from one process to many")
def train_ddp(answer: Callable[..., nn.Module]) -> None:
    """Equal to one process on the whole batch, each rank on its own rows, one gradient sent per step."""
    for case, found in zip(_TRAININGS, zip(*on_ranks(_train_on_a_rank, RANKS, answer), strict=True), strict=True):
        ranks, count, epochs, batch, accumulate_steps, _ = case
        found = found[:ranks]
        with where(f"With {count} rows, a batch of {batch} and accumulate_steps={accumulate_steps} on {ranks} ranks"):
            reads = [[row for micro in report["read"] for row in micro] for report in found]
            expect(all(reads), "a rank sends no row through the model that it was given. Train that one.")
            _judge_hands(reads, epochs)
            weights, wanted = [report["weights"] for report in found], _trained(*case)
            if not _near(weights[0], wanted):
                hints = {hint: functools.partial(_trained, *case, fault) for hint, fault in _TRAINING_FAULTS.items()}
                compare = f"They are {distance(weights[0], wanted):.1e} away. Compare your loop with the one above."
                why = diagnose(weights[0], hints, compare, _near)
                _judge_copies(weights)
                fail(f"the weights are not those of one process. {why}")
            _judge_copies(weights)
            steps, gradient = epochs * (count // batch), 4 * len(wanted)
            sent, enough = max(report["sent"] for report in found), steps * 2 * gradient * (ranks - 1) / ranks
            expect(
                sent <= enough + 64 * steps,
                f"the weights are right, but a rank sends {sent:,.0f} bytes of gradients in {steps} steps; "
                f"{enough:,.0f} are enough. With DDP, use no_sync() around forward and backward of every micro-batch "
                "but the last of a step; by hand, all_reduce each gradient once a step, as it is.",
            )
            told = max(report["broadcast"] for report in found)
            expect(
                told <= (steps + 2) * gradient + 64 * steps + 4096,  # one object with the weights in it
                f"the weights are right, but {told:,.0f} bytes are broadcast in {steps} steps. Broadcast the weights "
                "at the beginning, and send each gradient once a step, with all_reduce.",
            )


def _judge_copies(weights: Sequence[Sequence[float]]) -> None:
    expect(
        all(_near(w, weights[0]) for w in weights),
        "the ranks end with different weights. Only a call of the DistributedDataParallel wrapper, not of its "
        ".module, and outside no_sync(), gets averaged gradients; all ranks must begin with the weights of rank 0.",
    )


def _judge_hands(reads: Sequence[Sequence[int]], epochs: int) -> None:
    """Whether the ranks read different rows, and each epoch in a different order."""
    overlap = set(reads[0][: len(reads[0]) // epochs]) & set(reads[1][: len(reads[1]) // epochs])
    expect(not overlap, "in one epoch, two ranks read the same rows. Give the loader a DistributedSampler.")
    for read in reads:
        length = len(read) // epochs
        orders = [read[start : start + length] for start in range(0, epochs * length, max(1, length))]
        again = any(one == other != sorted(one) for one, other in itertools.pairwise(orders))
        expect(not again, "an epoch repeats the order of the one before: call set_epoch(epoch) at the start of each.")


# --- Task 2 ---------------------------------------------------------------------------------------------------------

# ranks, rows, held-out rows, epochs, batch of a rank, lr
_MENDINGS = ((RANKS, 39, 13, 2, 4, 0.05), (RANKS, 24, 4, 3, 4, 0.02), (2, 26, 9, 2, 4, 0.05))


def _mend_on_a_rank(rank: int, fit: Callable, finish: Callable) -> list[dict]:
    reports = []
    for ranks, count, held, epochs, batch, lr in _MENDINGS:
        rows, plain, saved = Rows(count, seed=1), make_model(seed=rank), []
        read = _watched(plain, rows)

        def save(given: object, saved: list = saved) -> None:
            saved.append(_unfit(given) or _weights(given))

        with _among(ranks), torch.enable_grad():  # also where an answer has turned it off before
            if rank >= ranks:
                continue
            model, sampler = DistributedDataParallel(plain), DistributedSampler(rows, seed=0)
            loader = DataLoader(rows, batch, sampler=sampler, drop_last=True)
            losses = fit(model, sampler, loader, epochs, lr, rank, ranks)
            losses = [number(loss, "A loss") for loss in sequence(losses, "What fit returns")]
            accuracy = number(finish(model, Rows(held, seed=2), rank, ranks, save), "The accuracy")
        report = {"losses": losses, "accuracy": accuracy, "weights": _weights(plain), "read": read, "saved": saved}
        reports.append(report)
    return reports


def _unfit(given: object) -> str:
    """Why this should not be saved. It is noted and not raised: the other ranks would wait in vain for this one."""
    if isinstance(given, DistributedDataParallel):
        return "save(model) writes names that begin with `module.`. Save model.module."
    module = isinstance(given, nn.Module)
    return "" if module else f"save(..) is given {type(given).__name__}. Give it model.module."


def _mended(count: int, reads: Sequence, lr: float, fault: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """The weights, and the losses (steps, ranks), of training on the rows that the ranks read, in their order."""
    model, rows, losses = make_model(0), Rows(count, seed=1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for batches in zip(*reads, strict=True):
        each = [F.cross_entropy(model(rows.inputs[b]), rows.labels[b]) for b in batches]
        if fault != "zero_grad":
            optimizer.zero_grad()
        torch.stack(each).mean().backward()
        optimizer.step()
        losses.append(torch.stack(each).detach())
    return _weights(model), torch.stack(losses)


_FIXED = f"There are not always {RANKS} ranks: use world_size."
_MENDING_FAULTS = {  # hint -> the rate, in rates and ranks, and what else is wrong
    "`lr` is meant for the batch of one rank. By the linear rule the rate grows with world_size.": (0, ""),
    "The rate is divided by world_size; by the linear rule it is multiplied.": (-1, ""),
    "Gradients are no longer set to zero in each step.": (1, "zero_grad"),
}


@check("Task 2, five mistakes")
def mended(fit: Callable, finish: Callable) -> None:
    """One hint per mistake, each with what it does to the numbers."""
    reports = on_ranks(_mend_on_a_rank, RANKS, fit, finish)
    for place, (ranks, count, held, epochs, batch, lr) in enumerate(_MENDINGS):
        found = [report[place] for report in reports[:ranks]]
        reads, weights = [report["read"] for report in found], [report["weights"] for report in found]
        steps = epochs * (count // ranks // batch)
        for rank, read in enumerate(reads):
            here = f"rank {rank} trains on {len(read)} batches. In {epochs} epochs its loader has {steps}."
            expect([len(b) for b in read] == [batch] * steps, here)
        with where("One remaining mistake" + f", on {ranks} ranks" * (ranks != RANKS)):
            _judge_hands([[row for b in read for row in b] for read in reads], epochs)
            wanted, losses = _mended(count, reads, lr * ranks)
            _judge_copies(weights)
            if not _near(weights[0], wanted):
                faults = {hint: (lr * ranks**power, fault) for hint, (power, fault) in _MENDING_FAULTS.items()}
                hints = {hint: _mended(count, reads, *fault)[0] for hint, fault in faults.items()}
                hints[_FIXED] = _mended(count, reads, lr * RANKS)[0]
                larger = "They are not those that the larger batch reaches at lr * world_size."
                fail(f"the weights. {diagnose(weights[0], hints, larger, _near)}")
            for rank in reversed(range(ranks)):  # on rank 0, its own losses and those of rank 0 are the same
                _judge_losses(rank, found[rank]["losses"], losses)
            _judge_accuracy([report["accuracy"] for report in found], wanted, Rows(held, seed=2))
            _judge_saves([report["saved"] for report in found], wanted)


def _judge_losses(rank: int, got: Sequence[float], losses: torch.Tensor) -> None:
    steps, mean = len(losses), losses.mean(dim=1)
    if len(got) == steps and _near(got, mean):
        return
    expect(
        len(got) == steps,
        f"rank {rank} returns {len(got)} losses after {steps} steps. Every rank must return one for each step, so "
        "every rank must call all_reduce.",
    )
    hints = {
        "They are summed over the ranks: divide by world_size.": losses.sum(dim=1),
        "They are its own. Average them over the ranks.": losses[:, rank],
        "They are those of rank 0. Average over the ranks.": losses[:, 0],
        "They are the largest of the ranks. Average them.": losses.amax(dim=1),
        "They are divided by world_size twice.": mean / losses.shape[1],
        _FIXED: losses.sum(dim=1) / RANKS,
    }
    fail(f"the losses on rank {rank}. {diagnose(got, hints, 'They are not the mean over the ranks.', _near)}")


def _judge_accuracy(got: Sequence[float], wanted: torch.Tensor, rows: Rows) -> None:
    model = make_model(0)
    nn.utils.vector_to_parameters(wanted, model.parameters())
    right = (model(rows.inputs).argmax(dim=1) == rows.labels).float()
    ranks = len(got)
    means = [right[rank::ranks].mean().item() for rank in range(ranks)]
    padded = torch.cat(
        [torch.tensor(list(DistributedSampler(rows, ranks, rank, shuffle=False))) for rank in range(ranks)]
    )

    def hints_of(rank: int) -> dict[str, float]:
        return {
            "What it says is the accuracy on its own share: sum the counts over the ranks, then divide.": means[rank],
            "That is the mean of the ranks' accuracies, but shares differ in size. Sum the counts, then divide.": (
                sum(means) / ranks
            ),
            "That is in percent.": 100 * right.mean(),
            "You divide the rank's own count by all rows: sum it over the ranks first.": (
                right[rank::ranks].sum() / len(rows)
            ),
            "The sum of the counts is divided by this rank's rows.": right.sum() / len(right[rank::ranks]),
            _FIXED: torch.cat([right[rank::RANKS] for rank in range(ranks)]).sum() / len(rows),
            "A DistributedSampler repeats rows until all ranks have equally many: deal the rows out by hand.": (
                right[padded].mean()
            ),
            "The last rows, which do not fill a share for each rank, are left out.": (
                right[: len(rows) // ranks * ranks].sum() / len(rows)
            ),
        }

    for rank, accuracy in enumerate(got):
        if not _near(accuracy, right.mean()):
            hints = hints_of(rank)
            together = {hint: [float(hints_of(each)[hint]) for each in range(ranks)] for hint in hints}
            alone = diagnose(accuracy, hints, "Sum the counts over the ranks, then divide.", _near)
            why = diagnose(got, together, alone, _near)
            here = f"rank {rank} says {accuracy:.3f}, but over all {len(rows)} held-out rows the accuracy is"
            fail(f"{here} {right.mean():.3f}. {why}")


def _judge_saves(saved: Sequence[Sequence], wanted: torch.Tensor) -> None:
    counts = [len(each) for each in saved]
    expect(
        sum(counts) == 1,
        f"the ranks save {', '.join(map(str, counts))} times. Rank 0 should, once, and nobody else.",
    )
    [reached] = itertools.chain.from_iterable(saved)
    expect(not isinstance(reached, str), reached)
    expect(_near(reached, wanted), "the saved weights are not the weights at the end. Save after the training.")


# --- Task 3 ---------------------------------------------------------------------------------------------------------

_STEP, _RATE, _MORE = 3, 0.02, 2
_EARLIER = 100  # steps of another optimizer: what AdamW counts is not the number that is saved
_INTO = {
    "layers": "Resumed into a model that is sharded like the first one",
    "whole": "Resumed into a model that is sharded as one piece",
    "plain": "Resumed into a model that is not sharded",
}


def _parts(seed: int, sharding: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer: each layer sharded, the whole as one, or plain."""
    model = make_model(seed, width=12288)  # large enough for the lists of a checkpoint not to count
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # otherwise a GPU is used where there is one
    for layer in (model[0], model[2]) if sharding == "layers" else ():
        fully_shard(layer, mesh=mesh)
    model = model if sharding == "plain" else fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _go_on(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> torch.Tensor:
    """Train on the same rows on each rank, so that it does not matter how many there are; return the weights."""
    rows = Rows(24 * (_STEP + _MORE), seed=3)
    for step in range(first, first + steps):
        part = slice(24 * step, 24 * step + 24)
        F.cross_entropy(model(rows.inputs[part]), rows.labels[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _weights(model)


def _checkpoint_on_a_rank(rank: int, save: Callable, resume: Callable) -> None:
    """Save, go on, resume into three other models; compare with uninterrupted training on one process."""
    ends = []
    for sharding in ("plain", "layers"):
        model, optimizer = _parts(0, sharding)
        at = _go_on(model, optimizer, 0, _STEP)
        optimizer.param_groups[0]["lr"] = _RATE
        if sharding == "layers":
            place = _saved(model, optimizer, _EARLIER + _STEP, save)
            expect(_near(_weights(model), at), "Your save changes the weights. It should only read them.")
        ends.append(_go_on(model, optimizer, _STEP, _MORE))
    later = _saved(model, optimizer, _EARLIER + _STEP + _MORE, save)
    expect(_near(*ends), "After your save, training goes on differently. A save should only read.")
    for seed, (sharding, here) in enumerate(_INTO.items(), start=7):
        model, optimizer = _parts(seed, sharding)
        with where(here):
            try:
                with _Traffic(long=2**16) as traffic:
                    step = resume(place, model, optimizer)
            except (RuntimeError, KeyError, ValueError) as error:
                if sharding != "plain":
                    raise
                said = (str(error).splitlines() or [""])[0]
                fail(f"it raises {type(error).__name__}: {said} Save full names and shapes, as DCP does.")
            _judge_resumed(step, model, optimizer, at, ends[0])
        _judge_traffic(traffic, "load", at)
    step = whole(resume(later, model, optimizer), "The step that resume returns")
    last = _EARLIER + _STEP + _MORE
    expect(step == last, f"From a checkpoint of step {last}, resume returns step {step}.")
    dist.barrier()  # nobody removes the folder while others read


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, save: Callable) -> Path:
    """The folder that an answer saved to, once it is clear that it wrote and sent no more than it should."""
    own = tempfile.TemporaryDirectory(prefix="speedlab-", ignore_cleanup_errors=True)
    folder = [own.name]
    dist.broadcast_object_list(folder)
    atexit.register(own.cleanup)  # after the last barrier
    place = Path(folder[0], "checkpoint")
    with _Traffic(long=2**16) as traffic:
        save(place, model, optimizer, step)
    dist.barrier()
    files = [path.stat().st_size for path in place.rglob("*") if path.is_file()]
    expect(files, "After your save there is no file in the folder that it was given.")
    weights = _weights(model)
    _judge_traffic(traffic, "save", weights)
    least = f"The weights and two moments have {3 * weights.nbytes:,} bytes,"
    expect(sum(files) <= 3.7 * weights.nbytes, f"{least} and your files {sum(files):,}. What is written twice?")
    expect(
        max(files) <= 1.6 * weights.nbytes,
        f"{least} and one of your files has {max(files):,}. Each of {RANKS} ranks should write its own part.",
    )
    return place


def _judge_traffic(traffic: _Traffic, verb: str, weights: torch.Tensor) -> None:
    expect(
        (sent := traffic.sent + traffic.broadcast) <= weights.nbytes / 8,
        f"To {verb}, this rank sends {sent:,.0f} bytes of weights or moments. None has to travel: each rank "
        "writes and reads its own part. Do not gather the full state.",
    )


def _judge_resumed(
    step: object, model: nn.Module, optimizer: torch.optim.Optimizer, at: torch.Tensor, end: torch.Tensor
) -> None:
    step, rate = whole(step, "the step that resume returns"), number(optimizer.param_groups[0]["lr"], "the rate")
    expect(step == _EARLIER + _STEP, f"resume returns step {step}; the saved step is {_EARLIER + _STEP}.")
    expect(
        _near(_weights(model), at),
        "the weights are not those that were saved. `dcp.load` reads into the tensors of a state dictionary; "
        "`set_state_dict` (or load_state_dict) puts them into the model.",
    )
    expect(
        close(rate, _RATE),
        f"the learning rate is {rate:g}; the saved one was {_RATE:g}. It belongs to the optimizer's state.",
    )
    expect(
        _near(_go_on(model, optimizer, _STEP, _MORE), end),
        "the weights are right, but not after another step. The moments of AdamW, and its count of steps, are "
        "the optimizer's state: save and load them as well.",
    )


@check("Task 3, a checkpoint in parts")
def checkpoint(save: Callable, resume: Callable) -> None:
    """Graded by bytes, sent and written, and by equality with uninterrupted training."""
    on_ranks(_checkpoint_on_a_rank, RANKS, save, resume)
