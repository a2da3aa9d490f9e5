"""The checks of exercise 2, parallelism: a ring all-reduce, a column-parallel layer, the bubble, a choice of plans.

An answer first meets threads that play the ranks, which is quick and finds most mistakes; then, in `processes`, real
ones: its source is run on two and on three processes by `ranks.py`.
"""

import inspect
import json
import math
import queue
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from speedlab import launch
from speedlab.checks import NotYetError, check, expect

_PATIENCE = 5.0
_RANKS = Path(__file__).with_name("ranks.py")


class _Ranks:
    """So many threads that play ranks: they send, receive and all-reduce, and every byte is counted by rank."""

    def __init__(self, count: int):
        self.count = count
        self.sent = [0] * count
        self.reduced: list[list[int]] = [[] for _ in range(count)]
        self._mail: dict[tuple[int, int], queue.Queue] = {}
        self._given: dict[int, torch.Tensor] = {}
        self._barrier = threading.Barrier(count, timeout=_PATIENCE)
        self._failed = threading.Event()

    def run(self, work: Callable[[int], object]) -> list:
        """What `work(rank)` returns on each rank. Raises the first error of a rank, and ends the others."""
        results: list = [None] * self.count
        errors: list[Exception] = []

        def play(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except Exception as error:
                errors.append(error)
                self._failed.set()
                self._barrier.abort()

        threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 4 * _PATIENCE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        expect(
            not any(t.is_alive() for t in threads), f"Your code has not ended on {self.count} ranks. Does it loop?"
        )
        if errors:
            raise errors[0]  # the others, if any, waited in vain for the rank that failed
        return results

    def send(self, rank: int, tensor: torch.Tensor, to: int) -> None:
        expect(
            isinstance(to, int) and 0 <= to < self.count and to != rank,
            f"On {self.count} ranks, rank {rank} sends to rank {to}. Take neighbours modulo world_size.",
        )
        self.sent[rank] += tensor.nbytes
        self._box(rank, to).put(tensor.detach().clone())

    def receive(self, rank: int, like: torch.Tensor, source: int) -> torch.Tensor:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                arrived = self._box(source, rank).get(timeout=0.02)
                break
            except queue.Empty:
                if self._failed.is_set() or time.monotonic() > deadline:
                    raise NotYetError(
                        f"On {self.count} ranks, rank {rank} waits for rank {source}, and nothing comes. "
                        "Who sends to it, and does everybody send before it receives?"
                    ) from None
        expect(
            arrived.shape == like.shape,
            f"On {self.count} ranks, rank {rank} expects {like.numel()} numbers from rank {source} and gets "
            f"{arrived.numel()}. In step s the chunk that leaves is rank - s, the one that arrives rank - s - 1, "
            "both modulo world_size.",
        )
        return arrived

    def all_reduce(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self.reduced[rank].append(tensor.nbytes)
        self._given[rank] = tensor.detach().clone()
        try:
            self._barrier.wait()
            total = sum(self._given[r] for r in range(self.count))
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise NotYetError("One rank waits in all_reduce for others that do not call it.") from None
        return total

    def _box(self, source: int, to: int) -> queue.Queue:
        return self._mail.setdefault((source, to), queue.Queue())


# --- Task 1 ---------------------------------------------------------------------------------------------------------


@check("Task 1, a ring all-reduce")
def ring_all_reduce(answer: Callable) -> None:
    for ranks, size in ((2, 8), (3, 12), (5, 40), (2, 7), (3, 10), (1, 4)):
        torch.manual_seed(ranks + size)
        inputs = torch.randint(-9, 10, (ranks, size)).float()  # small whole numbers: sums without rounding
        tensors = list(inputs.clone())
        world = _Ranks(ranks)

        def work(rank: int, world=world, tensors=tensors) -> object:
            def send(tensor, to):
                world.send(rank, tensor, to)

            def receive(like, source):
                return world.receive(rank, like, source)

            return answer(tensors[rank], rank, world.count, send, receive)

        world.run(work)
        _judge_sum(tensors, inputs)
        _judge_bytes(world.sent, ranks, size)


def _judge_sum(tensors: list[torch.Tensor], inputs: torch.Tensor) -> None:
    ranks, size = inputs.shape
    total, here = inputs.sum(0), f"On {ranks} ranks with {size} numbers"
    if all(torch.equal(tensor, total) for tensor in tensors):
        return
    if all(torch.equal(tensor * ranks, total) for tensor in tensors):
        raise NotYetError(f"{here}, you return the mean. An all-reduce sums; who wants the mean divides afterwards.")
    complete = [int((tensor == total).sum()) for tensor in tensors]
    expect(
        max(complete) > 0,
        f"{here}, no rank holds a finished sum. Do you write into the tensor? A part from `tensor_split` is a "
        "view, so `chunk.add_(..)` changes the tensor, and `chunk = chunk + ..` does not.",
    )
    least = complete.index(min(complete))
    raise NotYetError(
        f"{here}, rank {least} holds the sum at {complete[least]} of {size} places. After world_size - 1 steps each "
        "rank has one finished chunk; in the steps after that, finished chunks are copied, not added."
    )


def _judge_bytes(sent: list[int], ranks: int, size: int) -> None:
    whole, chunk = 4 * size, 4 * math.ceil(size / ranks)
    allowed = 2 * (ranks - 1) * chunk
    here = f"On {ranks} ranks the sums are right, but a rank sends {max(sent)} bytes for a tensor of {whole}"
    hint = "Cut the tensor into world_size chunks and send one chunk in each of 2 (world_size - 1) steps."
    if max(sent) > allowed:
        every = max(sent) == (ranks - 1) * whole
        raise NotYetError(f"{here}. {'Everybody sends everything to everybody. ' if every else ''}{hint}")
    expect(
        size % ranks or min(sent) == allowed,
        f"{here} and another one {min(sent)}: no rank may do more than its share, 2 (N-1)/N of the tensor. {hint}",
    )


# --- Task 2 ---------------------------------------------------------------------------------------------------------


@check("Task 2, a column-parallel layer with its backward")
def column_linear(answer: Callable) -> None:
    for ranks, (rows, width, features) in ((2, (5, 6, 8)), (3, (4, 5, 9)), (4, (2, 3, 4))):
        torch.manual_seed(ranks)
        x, weight = torch.randn(rows, width), torch.randn(features, width)
        gradient = torch.randn(rows, features)  # of the loss, with respect to the layer's whole output
        world = _Ranks(ranks)

        def work(rank: int, world=world, x=x, weight=weight, gradient=gradient) -> tuple:
            ranks = world.count
            own_x = x.clone().requires_grad_()
            share = weight.chunk(ranks, dim=0)[rank].clone().requires_grad_()
            out = answer(own_x, share, lambda tensor: world.all_reduce(rank, tensor))
            forward = len(world.reduced[rank])
            expect(
                isinstance(out, torch.Tensor), f"Return this rank's share of the output, not {type(out).__name__}."
            )
            wanted = x @ weight.chunk(ranks, dim=0)[rank].T
            expect(
                out.shape == wanted.shape,
                f"On {ranks} ranks the output has shape {tuple(out.shape)}; a share of {tuple(share.shape)} makes "
                f"{tuple(wanted.shape)}: all rows, this rank's features.",
            )
            expect(
                forward == 0,
                f"You call all_reduce {forward} time(s) in forward. Each rank's columns are finished as they are.",
            )
            expect(torch.allclose(out, wanted, atol=1e-5), "The output is not x @ share.T.")
            expect(out.requires_grad, "The output has no gradient: return what your autograd function's apply gives.")
            out.backward(gradient.chunk(ranks, dim=1)[rank])
            return own_x.grad, share.grad

        for rank, (x_grad, share_grad) in enumerate(world.run(work)):
            _judge_gradients(x_grad, share_grad, rank, ranks, x, weight, gradient)
            calls = world.reduced[rank]
            expect(
                calls == [x.nbytes],
                f"The gradients are right, but backward reduces {len(calls)} times, {sum(calls)} bytes in all. Only "
                f"the gradient of x is a sum over ranks: one all_reduce of {x.nbytes} bytes.",
            )


def _judge_gradients(x_grad, share_grad, rank, ranks, x, weight, gradient) -> None:
    parts = [g @ w for g, w in zip(gradient.chunk(ranks, dim=1), weight.chunk(ranks, dim=0), strict=True)]
    here = f"On {ranks} ranks, the gradient of x"
    expect(x_grad is not None, "x gets no gradient: backward must return one for each input of forward, in order.")
    if not torch.allclose(x_grad, sum(parts), atol=1e-4):
        if torch.allclose(x_grad, parts[rank], atol=1e-4):
            raise NotYetError(
                f"{here} is this rank's part only. Every rank used the whole x, so its gradient is the sum of what "
                "all ranks find: all_reduce it."
            )
        if torch.allclose(x_grad * ranks, sum(parts), atol=1e-4):
            raise NotYetError(
                f"{here} is the mean over ranks. They share one batch and one loss: sum, do not average."
            )
        raise NotYetError(f"{here} is wrong. Each rank's part is grad_output @ share.")
    expect(share_grad is not None, "The share of the weight gets no gradient: return it as the second one.")
    wanted = gradient.chunk(ranks, dim=1)[rank].T @ x
    if not torch.allclose(share_grad, wanted, atol=1e-4):
        raise NotYetError(
            "The gradient of the share is wrong: it is grad_output.T @ x, of the share's shape, and belongs to this "
            "rank alone: it is not summed over ranks."
        )


# --- Tasks 1 and 2 on real processes --------------------------------------------------------------------------------


@check("Tasks 1 and 2, on real processes")
def processes(ring: Callable, column: Callable) -> None:
    """Run the two answers on two and on three processes, and compare sums, gradients and bytes."""
    sources = {name: textwrap.dedent(inspect.getsource(f)) for name, f in (("ring", ring), ("column", column))}
    if any("raise NotImplementedError" in source for source in sources.values()):
        raise NotImplementedError
    names = {"ring": ring.__name__, "column": column.__name__}
    with tempfile.TemporaryDirectory(prefix="speedlab-") as folder:
        path = Path(folder, "answers.json")
        path.write_text(json.dumps({"sources": sources, "names": names}), encoding="utf-8")
        try:
            launched = launch.run(_RANKS, 3, path, timeout=100)
        except launch.LaunchError as error:
            lines = [line for line in str(error).splitlines() if "Error" in line and "LaunchError" not in line]
            raise NotYetError(
                f"It fails there: {lines[0] if lines else str(error).splitlines()[0]}. Your functions run "
                "there by themselves, with `torch` only: import what else they need inside them."
            ) from None
    for ranks in (2, 3):
        reports = [json.loads(text)[str(ranks)] for text in launched.outputs[:ranks]]
        torch.manual_seed(ranks)
        inputs = torch.randint(-9, 10, (ranks, 12)).float()
        _judge_sum([torch.tensor(report["sum"]) for report in reports], inputs)
        _judge_bytes([report["sent"] for report in reports], ranks, 12)
        x, weight, gradient = torch.randn(4, 6), torch.randn(6, 6), torch.randn(4, 6)
        for rank, report in enumerate(reports):
            grads = torch.tensor(report["x_grad"]), torch.tensor(report["share_grad"])
            _judge_gradients(*grads, rank, ranks, x, weight, gradient)
            wanted = F.linear(x, weight.chunk(ranks, dim=0)[rank])
            expect(torch.allclose(torch.tensor(report["out"]), wanted, atol=1e-5), "The output is not x @ share.T.")


# --- Tasks 3 and 4 --------------------------------------------------------------------------------------------------


def _idle_share(stages: int, micro_batches: int) -> float:
    """The bubble of GPipe, found by playing the schedule: forwards take 1, backwards 2."""
    done: dict[tuple[str, int, int], int] = {}
    free = [0] * stages
    for what, length in (("F", 1), ("B", 2)):
        order = range(stages) if what == "F" else reversed(range(stages))
        for stage in order:
            before = stage - 1 if what == "F" else stage + 1
            for i in range(micro_batches):
                start = max(free[stage], done.get((what, before, i), 0))
                done[what, stage, i] = free[stage] = start + length
    return 1 - 3 * micro_batches / max(free)


def _as_number(value: object, what: str) -> float:
    expect(value is not None, f"{what} came back as None. Does your function return its result?")
    number = isinstance(value, int | float) or hasattr(value, "__float__")
    expect(number and not isinstance(value, bool), f"{what} must be a number, not {type(value).__name__}.")
    return float(value)


@check("Task 3, the bubble")
def bubble(answer: Callable[[int, int], float]) -> None:
    for p, m in ((1, 4), (2, 1), (4, 4), (3, 8), (8, 5), (16, 64)):
        got, wanted = _as_number(answer(p, m), "The bubble"), _idle_share(p, m)
        if not math.isclose(got, wanted, abs_tol=1e-9):
            raise NotYetError(
                f"{p} stages and {m} micro-batches, played step by step: {wanted:.4f} of the time is idle; you say "
                f"{got:.4f}. {_why_not_the_bubble(got, wanted, p, m)}"
            )


def _why_not_the_bubble(got: float, wanted: float, p: int, m: int) -> str:
    if math.isclose(got, 1 - wanted, abs_tol=1e-9):
        return "That is the share in which they work."
    if math.isclose(got, (p - 1) / m, abs_tol=1e-9):
        return "That compares the waiting with the work. Compare it with the whole step, work and waiting."
    if math.isclose(got, p / (m + p - 1), abs_tol=1e-9):
        return "A single stage never waits: how many stages must a micro-batch pass before the last one can begin?"
    if math.isclose(got, (p - 1) / (m + p), abs_tol=1e-9):
        return "A stage works in m slots and waits in p - 1: how many are there in all?"
    return "Count slots: a stage works in m of them, and waits while the first micro-batch comes through the others."


@check("Task 4, how many micro-batches")
def enough(answer: Callable[[int, float], int]) -> None:
    for p, limit in ((4, 0.1), (2, 0.5), (8, 0.05), (1, 0.1), (3, 0.3), (16, 0.2)):
        got = _as_number(answer(p, limit), "The number of micro-batches")
        here = f"For {p} stages and a bubble of at most {limit:g}"
        expect(
            got == int(got) and got >= 1, f"{here} you return {got:g}: a whole number of micro-batches, at least 1."
        )
        found = _idle_share(p, int(got))
        expect(found <= limit + 1e-9, f"{here}, {got:g} micro-batches are too few: the bubble is {found:.4f}.")
        fewer = _idle_share(p, int(got) - 1) if got > 1 else 1.0
        expect(
            fewer > limit + 1e-9,
            f"{here}, {got:g} micro-batches are more than you need: {got - 1:g} give {fewer:.4f}. Mind "
            "floating-point numbers: (p - 1) (1 - limit) / limit may come out a hair above a whole number.",
        )


# --- Task 5 ---------------------------------------------------------------------------------------------------------

OPTIONS = ("one GPU", "data", "ZeRO-3", "tensor", "pipeline", "sequence", "mend first")
_RIGHT = {
    "hungry": "mend first",
    "full": "ZeRO-3",
    "long": "sequence",
    "thin cable": "pipeline",
    "spare": "one GPU",
}
_REASONS = {
    "hungry": "The GPUs wait for the data loader; eight of them would wait eight times as hard. No split mends that.",
    "full": "State that is the same on eight ranks is what ran out of room. Cut it over the data-parallel ranks: the "
    "network inside a machine can take it, and the layers stay whole.",
    "long": "There is one sequence, so there is no batch to cut, and its activations are what does not fit. Only one "
    "kind cuts the tokens.",
    "thin cable": "Count bytes at 1 GB/s. Gathering 13 B weights in 16 bits takes 26 s, each time; an all-reduce in "
    "every layer is worse. What crosses the border between two stages is one layer's output.",
    "spare": "The measurement has decided: two GPUs over this cable are slower than one.",
}


@check("Task 5, overrule the chooser")
def overrule(answer: Callable[[], dict[str, str]]) -> None:
    chosen = answer()
    expect(isinstance(chosen, dict), f"Return a dictionary from case to plan, not {type(chosen).__name__}.")
    for name, right in _RIGHT.items():
        expect(name in chosen, f"There is no plan for {name!r} yet. Give one for each of {', '.join(_RIGHT)}.")
        got = chosen[name]
        expect(got in OPTIONS, f"{got!r} is none of the options: {', '.join(OPTIONS)}.")
        expect(got == right, f"{name}: not {got}. {_REASONS[name]}")
