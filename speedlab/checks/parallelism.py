"""The checks of exercise 2, parallelism: a ring, a column-parallel layer, the bubble, attention over a ring, plans.

An answer meets threads that play the ranks, which is quick and finds most mistakes; `processes` then sends the first
two to real processes.
"""

import collections
import functools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from speedlab.checks.core import (
    apart,
    ask,
    check,
    choices,
    close,
    diagnose,
    expect,
    fail,
    number,
    on_ranks,
    side_by_side,
    whole,
)


class _Ranks:
    """Threads that play ranks. Counts what each sends, to whom, and keeps; detects a deadlock without a clock."""

    seconds = 20.0

    def __init__(self, count: int, rule: str = ""):
        self.rule = rule  # the hint where a tensor of a different shape arrives
        self.count, self.sent, self.reduced = count, [0] * count, [[] for _ in range(count)]
        self.neighbours: list[set[int]] = [set() for _ in range(count)]
        self.alive, self.most_alive = [0] * count, [0] * count
        self._boxes = collections.defaultdict(collections.deque)
        self._rounds: list[dict[int, torch.Tensor]] = []
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._ended, self._turn = 0, threading.Condition(threading.RLock())

    def run(self, work: Callable[[int], object]) -> list:
        """What `work(rank)` returns on each rank. The first error of a rank ends the others."""

        def play(rank: int) -> object:
            result = work(rank)
            with self._turn:
                self._ended += 1
                self._turn.notify_all()
            return result

        return side_by_side(*(functools.partial(play, rank) for rank in range(self.count)), seconds=self.seconds)

    def send(self, rank: int, chunk: torch.Tensor, to: int) -> None:
        to = self._other(rank, chunk, to, "sends to")
        here = f"On {self.count} ranks, rank {rank} sends numbers of type {chunk.dtype}"
        why = "Narrower numbers are rounded, and wider ones cost more bytes."
        expect(chunk.dtype == torch.float32, f"{here}; those in the tensor are torch.float32. {why}")
        with self._turn:
            self.sent[rank] += chunk.nbytes
            self.neighbours[rank].add(to)
            self._boxes[rank, to].append(chunk.detach().clone())
            self._turn.notify_all()

    def receive(self, rank: int, like: torch.Tensor, source: int) -> torch.Tensor:
        source = self._other(rank, like, source, "receives from")
        box, here = self._boxes[source, rank], f"On {self.count} ranks, rank {rank}"
        why = "Who sends to it, and does everybody send before it receives?"
        self._wait(rank, lambda: len(box) > 0, f"{here} waits for rank {source}, and nothing comes. {why}")
        arrived = box.popleft()
        expect(
            arrived.shape == like.shape,
            f"{here} expects the shape {tuple(like.shape)} from rank {source} and gets {tuple(arrived.shape)}."
            f"{self.rule}",
        )
        self._keep(rank, arrived.numel())
        weakref.finalize(arrived, self._keep, rank, -arrived.numel()).atexit = False
        return arrived

    def _other(self, rank: int, tensor: object, other: object, verb: str) -> int:
        here = f"On {self.count} ranks, rank {rank} {verb}"
        expect(isinstance(tensor, torch.Tensor), f"{here} a rank, but gives a {type(tensor).__name__}, not a tensor.")
        other = whole(other, f"{here} a rank that")
        alone = "One rank alone has nobody to talk to." * (self.count == 1)
        why = alone or "Take neighbours modulo world_size."
        expect(0 <= other < self.count and other != rank, f"{here} rank {other}. {why}")
        return other

    def all_reduce(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        with self._turn:
            number = len(self.reduced[rank])
            self.reduced[rank].append(tensor.nbytes)
            self._rounds += [{} for _ in range(number + 1 - len(self._rounds))]
            given = self._rounds[number]
            given[rank] = tensor.detach().clone()
        hint = "One rank waits in all_reduce for others that do not call it."
        self._wait(rank, lambda: len(given) == self.count, hint)
        expect(len({t.shape for t in given.values()}) == 1, "The ranks all_reduce tensors of different shapes.")
        return sum(given[r] for r in range(self.count))

    def _keep(self, rank: int, numbers: int) -> None:
        self.alive[rank] += numbers
        self.most_alive[rank] = max(self.most_alive[rank], self.alive[rank])

    def _wait(self, rank: int, ready: Callable[[], bool], hint: str) -> None:
        """Wait until `ready()`; fail with the hint once nobody is left who could change that."""
        with self._turn:
            self._waiting[rank] = ready
            self._turn.notify_all()
            while not ready():
                everybody = len(self._waiting) + self._ended == self.count
                expect(not everybody or any(other() for other in self._waiting.values()), hint)
                self._turn.wait(0.05)
            del self._waiting[rank]


def _expect_one_neighbour(world: _Ranks) -> None:
    for rank, to in enumerate(world.neighbours):
        here = f"The results are right, but this is no ring: of {world.count} ranks, rank {rank} sends to ranks"
        expect(len(to) <= 1, f"{here} {' and '.join(map(str, sorted(to)))}. Each should send to one neighbour only.")


# --- Task 1 ---------------------------------------------------------------------------------------------------------


_CHUNKS = " In step s a rank sends chunk rank - s and receives chunk rank - s - 1, both modulo world_size."


@check("Task 1, a ring all-reduce")
def ring_all_reduce(answer: Callable) -> None:
    for ranks, size in ((2, 8), (3, 12), (5, 40), (2, 7), (3, 10), (1, 4), (4, 6), (4, 3)):
        torch.manual_seed(ranks + size)
        inputs = torch.randint(-(2**16), 2**16, (ranks, size)).float()  # whole numbers: sums without rounding
        tensors, world = list(inputs.clone()), _Ranks(ranks, _CHUNKS)
        numbers = [tensor.view(-1) for tensor in tensors]  # also where an answer gives a tensor other numbers

        def work(rank: int, world=world, tensors=tensors) -> object:
            talk = (functools.partial(world.send, rank), functools.partial(world.receive, rank))
            return answer(tensors[rank], rank, world.count, *talk)

        try:
            returned = world.run(work)
        except IndexError:
            expect(
                size >= 2 * ranks,
                f"{size} numbers on {ranks} ranks end in an IndexError. `tensor_split({ranks})` always gives {ranks} "
                "chunks, some of them empty if need be; `chunk` and `split` may give fewer.",
            )
            raise
        _judge_sum(numbers, inputs, returned)
        _judge_bytes(world.sent, ranks, size)
        _expect_one_neighbour(world)


def _judge_sum(tensors: Sequence[torch.Tensor], inputs: torch.Tensor, returned: Sequence[object] = ()) -> None:
    ranks, size = inputs.shape
    total = inputs.sum(0)
    if all(torch.equal(tensor, total) for tensor in tensors):
        return
    complete = [int((tensor == total).sum()) for tensor in tensors]
    least = complete.index(min(complete))
    handed_back = all(isinstance(r, torch.Tensor) and torch.equal(r, total) for r in returned or [None])
    hints = {
        "you return the sum: write it into the tensor that you are given, with `copy_` or `+=`.": handed_back,
        "you compute the mean. An all-reduce sums; a caller who wants the mean divides afterwards.": close(
            [tensor * ranks for tensor in tensors], [total] * ranks
        ),
        _NOWHERE: max(complete) == 0,
        "the end is left out: some chunks must be longer than others, as `tensor_split` makes them.": (
            size % ranks > 0 and all(torch.equal(t[: -(size % ranks)], total[: -(size % ranks)]) for t in tensors)
        ),
    }
    finished = (
        f"rank {least} holds the sum at {complete[least]} of {size} places. After world_size - 1 steps each rank has "
        "one finished chunk; in the steps after that, finished chunks are copied, not added."
    )
    fail(f"On {ranks} ranks with {size} numbers, {diagnose(tensors, hints, otherwise=finished)}")


_NOWHERE = (
    "no rank holds a finished sum. Is what `receive` returns written into the tensor? It does not fill its argument. "
    "A part from `tensor_split` is a view: `chunk.add_(..)` changes the tensor, `chunk = chunk + ..` does not. "
    "If so, check the numbers: to the right, step s sends chunk rank - s and receives chunk rank - s - 1, both "
    "modulo world_size. What arrives is added in the first world_size - 1 steps; in the second phase, s counts on."
)


def _judge_bytes(sent: Sequence[int], ranks: int, size: int) -> None:
    full, most = 4 * size, max(sent)
    whole = "That is as much as world_size - 1 whole vectors. " * (most == (ranks - 1) * full)
    expect(
        most <= 2 * (ranks - 1) * 4 * math.ceil(size / ranks),
        f"On {ranks} ranks the sums are right, but a rank sends {most} bytes for a tensor of {full}. {whole}Cut "
        "the tensor into world_size chunks and send one chunk in each of 2 (world_size - 1) steps.",
    )


# --- Task 2 ---------------------------------------------------------------------------------------------------------

_ELSEWHERE = 100.0  # the gradient that another use of x gives it


@check("Task 2, a column-parallel layer with its backward")
def column_linear(answer: Callable) -> None:
    for ranks, (rows, width, features) in ((2, (5, 6, 8)), (3, (4, 5, 9)), (4, (2, 3, 4)), (3, (6, 6, 18))):
        torch.manual_seed(ranks)
        x, weight, gradient = torch.randn(rows, width), torch.randn(features, width), torch.randn(rows, features)
        world = _Ranks(ranks)
        found = world.run(functools.partial(_use_column, answer, world, x, weight, gradient))
        for rank, (x_grad, share_grad) in enumerate(found):
            _judge_gradients(x_grad, share_grad, rank, ranks, x, weight, gradient, reduced=bool(world.reduced[rank]))
            calls = world.reduced[rank]
            expect(
                calls == [x.nbytes],
                f"The gradients are right, but backward reduces {len(calls)} times, {sum(calls)} bytes in all. Only "
                f"the gradient of x is a sum over ranks: use one all_reduce of {x.nbytes} bytes.",
            )


def _use_column(answer: Callable, world: _Ranks, x, weight, gradient, rank: int) -> tuple:
    """Forward and backward on one rank, where x is used elsewhere too: the gradients of x and share."""
    own_x, own = x.clone().requires_grad_(), weight.chunk(world.count)[rank].clone().requires_grad_()
    out = answer(own_x, own, functools.partial(world.all_reduce, rank))
    calls, wanted = len(world.reduced[rank]), x @ own.detach().T
    expect(isinstance(out, torch.Tensor), f"Return this rank's share of the output, not {type(out).__name__}.")
    unchanged = torch.equal(own_x, x) and torch.equal(own, weight.chunk(world.count)[rank])
    expect(unchanged, "Your function changes the numbers in x or in share. Others need them: leave them as they are.")
    expect(
        out.shape == wanted.shape,
        f"On {world.count} ranks the output has shape {tuple(out.shape)}; a share of shape {tuple(own.shape)} gives "
        f"{tuple(wanted.shape)}: all rows, this rank's features.",
    )
    expect(
        not calls, f"You call all_reduce {calls} time(s) in forward. Each rank's columns are finished as they are."
    )
    expect(close(out, wanted), "The output is not x @ share.T.")
    expect(out.requires_grad, "The output has no gradient: return what your autograd function's apply gives.")
    mine = gradient.chunk(world.count, dim=1)[rank].to(out, copy=True)
    before = mine.clone()
    try:
        torch.autograd.backward([out, own_x], [mine, _ELSEWHERE + 0 * x])
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        order = "Backward must return one gradient for each input of forward, in the same order. PyTorch says:"
        expect("gradient" not in said, f"{order} {said}")
        raise
    kept = "Your backward changes the gradient that it is given. Others may need it: leave it as it is."
    expect(torch.equal(mine, before), kept)
    return own_x.grad - _ELSEWHERE, own.grad


def _judge_gradients(x_grad, share_grad, rank, ranks, x, weight, gradient, reduced=False) -> None:
    parts = [g @ w for g, w in zip(gradient.chunk(ranks, dim=1), weight.chunk(ranks), strict=True)]
    own, total = gradient.chunk(ranks, dim=1)[rank].T @ x, sum(parts)
    near = functools.partial(close, relative=1e-4)
    if not near(x_grad, total):
        unused = "is this rank's part only. all_reduce returns the sum; it does not write into its argument."
        hints = {
            "is missing: backward must return one for each input of forward, in order.": 0 * x,
            unused if reduced else _OWN_PART: parts[rank],
            "is the mean over ranks. They share one batch and one loss: sum, do not average.": total / ranks,
            "is summed with what x got elsewhere. A hook on x sees all its uses: reduce this layer's part only.": (
                total + _ELSEWHERE * (ranks - 1)
            ),
            "is that of share. Backward returns the gradients in the order of forward's inputs.": own,
        }
        why = diagnose(x_grad, hints, "is wrong. Each rank's part is grad @ share.", same=near)
        fail(f"On {ranks} ranks, the gradient of x {why}")
    expect(share_grad is not None, "The share of the weight gets no gradient: return it as the second one.")
    expect(
        near(share_grad, own),
        "The gradient of the share is wrong: it should be grad.T @ x, of the share's shape. It belongs to this rank "
        "alone and is not summed over ranks.",
    )


_OWN_PART = (
    "is this rank's part only. Every rank used the whole x, so its gradient is the sum of what all ranks find: "
    "all_reduce it."
)


# --- Tasks 1 and 2 on real processes --------------------------------------------------------------------------------


@check("Tasks 1 and 2, on real processes", seconds=300)
def processes(ring: Callable, column: Callable) -> None:
    """Run the two answers on two and on three processes, and compare sums, gradients and bytes."""
    reports = on_ranks(_on_a_rank, 3, ring, column)
    for ranks in (2, 3):
        found = [report[str(ranks)] for report in reports[:ranks]]
        inputs, x, weight, gradient = _drawn(ranks)
        _judge_sum([torch.tensor(report["sum"]) for report in found], inputs)
        _judge_bytes([report["sent"] for report in found], ranks, inputs.shape[1])
        for rank, report in enumerate(found):
            grads = [torch.tensor(report[name] or 0.0) for name in ("x_grad", "share_grad")]
            _judge_gradients(*grads, rank, ranks, x, weight, gradient)
            expect(close(report["out"], (x @ weight.chunk(ranks)[rank].T).tolist()), "The output is not x @ share.T.")


def _drawn(ranks: int) -> tuple[torch.Tensor, ...]:
    """The ring's vectors, then the layer's x, weight and gradient of its output."""
    torch.manual_seed(ranks)
    return torch.randint(-9, 10, (ranks, 12)).float(), torch.randn(4, 6), torch.randn(6, 6), torch.randn(4, 6)


def _on_a_rank(rank: int, ring: Callable, column: Callable) -> dict[int, dict]:
    """What each process does, first in a group of two, then of three: the results and the bytes sent, by size."""
    groups, report = {2: dist.new_group([0, 1]), 3: None}, {}
    for ranks in (2, 3) if rank < 2 else (3,):
        requests, sent = [], []

        def send(chunk, to, requests=requests, sent=sent):
            sent.append(chunk.nbytes)
            message = chunk.detach().clone()
            requests.append((dist.isend(message, to), message))  # the message must live until it has left

        def receive(like, source):
            buffer = torch.empty_like(like, memory_format=torch.contiguous_format)
            dist.recv(buffer, source)
            return buffer

        def all_reduce(tensor, group=groups[ranks]):
            total = tensor.detach().clone()
            dist.all_reduce(total, group=group)
            return total

        inputs, x, weight, gradient = _drawn(ranks)
        tensor, share = inputs[rank].clone(), weight.chunk(ranks)[rank].clone().requires_grad_()
        ring(tensor, rank, ranks, send, receive)
        for request, _ in requests:
            request.wait()
        out = column(x.requires_grad_(), share, all_reduce)
        out.backward(gradient.chunk(ranks, dim=1)[rank])
        report[ranks] = {"sum": tensor, "sent": sum(sent), "out": out, "x_grad": x.grad, "share_grad": share.grad}
    return report


# --- Tasks 3 and 4 --------------------------------------------------------------------------------------------------


@functools.cache
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


@check("Task 3, the bubble")
def bubble(answer: Callable[[int, int], float]) -> None:
    cases = [
        (1, 4),
        (2, 1),
        (4, 4),
        (3, 8),
        (8, 5),
        (16, 64),
        *((p, m) for p in range(1, 8) for m in range(1, 12, 2)),
    ]
    for p, m in cases:
        got, wanted = number(ask(answer, p, m), "The bubble"), _idle_share(p, m)
        if not close(got, wanted):
            said, played = apart(got, wanted, style="f")
            hints = {
                "That is in percent: return a share from 0 to 1.": 100 * wanted,
                "That is the share in which they work.": 1 - wanted,
                "That compares the waiting with the work. Compare it with the whole step.": (p - 1) / m,
                "A single stage never waits: how many must a micro-batch pass before the last one?": p / (m + p - 1),
                "A stage works in m slots and waits in p - 1: how many are there in all?": (p - 1) / (m + p),
                "That is rounded: return the number as it comes.": abs(got - wanted) < 5e-3,
            }
            slots = "Count slots: a stage works in m of them and waits while the first micro-batch is in the others."
            why = diagnose(got, hints, otherwise=slots)
            fail(
                f"{p} stages, {m} micro-batches, in a simulated run: {played} of the time is idle, not {said}. {why}"
            )


@check("Task 4, how many micro-batches")
def enough(answer: Callable[[int, float], int]) -> None:
    # where a formula in floating point goes wrong, and where rounding to the nearest does; then all sorts
    cases = [(4, 0.1), (4, 0.2), (7, 0.2), (10, 0.9), (3, 0.45), (3, 0.3), (2, 0.5), (1, 0.1), (8, 0.05), (16, 0.2)]
    cases += [(2, 0.3333), (9, 0.125), (4, 1.0), (5, 1.5), (64, 0.01)]
    cases += [(p, limit) for p in (2, 3, 5, 6, 9, 13) for limit in (0.04, 0.15, 0.25, 0.35, 0.6, 0.8)]
    for p, limit in cases:
        exact = Fraction(str(limit))
        solved = (p - 1) * (1 - exact) / exact
        wanted, here = max(1, math.ceil(solved)), f"For {p} stages and a bubble of at most {limit:g}"
        got = whole(ask(answer, p, limit), f"{here}: the number of micro-batches", least=1, most=10_000)
        if got < wanted:
            idle = apart(_idle_share(p, got), limit, style="f")[0]
            fail(f"{here}, {got} micro-batches are too few: the bubble is {idle}.")
        if got > wanted:
            rounding = (
                "By hand, (p - 1) (1 - limit) / limit is a whole number here, and is enough: at most, not below. Or "
                "did floating point come out a hair above it, so that you rounded up?"
            )
            hints = {
                rounding: got == solved + 1,
                "How many stages must a micro-batch pass before the last one: p, or fewer?": math.ceil(
                    p * (1 - exact) / exact
                ),
                "There may be fewer micro-batches than stages.": got == p,
                "(p - 1) / limit is the whole step, m + p - 1 slots: take away p - 1.": math.ceil((p - 1) / exact),
            }
            few = f"{wanted} give a bubble of {_idle_share(p, wanted):.4f}"
            fail(f"{here}, {got} micro-batches are more than you need: {few}. {diagnose(got, hints)}")


# --- Task 5 ---------------------------------------------------------------------------------------------------------


class _Made(TorchDispatchMode):
    """Numbers in the tensors that a rank makes: the most in one of them, and the most in all alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.alive = self.most_alive = 0
        self.sending, self._known = False, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, torch.Tensor):
                self.largest = max(self.largest, made.numel())
                self._count(made)
        return out

    def _count(self, made: torch.Tensor) -> None:
        if not (self.sending or made._is_view() or id(made) in self._known):
            self._known.add(id(made))
            self.alive += made.numel()
            self.most_alive = max(self.most_alive, self.alive)
            weakref.finalize(made, self._died, id(made), made.numel()).atexit = False

    def _died(self, key: int, numbers: int) -> None:
        self._known.discard(key)
        self.alive -= numbers


@check("Task 5, attention over a ring")
def ring_attention(answer: Callable) -> None:
    # ranks, tokens, width, how large the scores are, what pushes them all below zero
    cases = ((1, 5, 4, 1, 0), (3, 4, 8, 1, 0), (5, 8, 8, 1, 0), (4, 6, 4, 160, 0), (2, 7, 3, 1, 0), (16, 4, 4, 1, 0))
    for ranks, tokens, width, sharpness, below in (*cases, (3, 4, 8, 1, 24)):
        torch.manual_seed(ranks)
        q, k, v = torch.randn(3, ranks, tokens, width)
        q, k = sharpness * q, k * torch.linspace(0.5, 2, ranks)[:, None, None]
        if below:
            q[..., 0], k[..., 0] = below, -below
        world, made = _Ranks(ranks), [_Made() for _ in range(ranks)]

        def work(rank: int, world=world, q=q, k=k, v=v, made=made) -> torch.Tensor:
            given = [tensor[rank].clone() for tensor in (q, k, v)]

            def send(chunk: torch.Tensor, to: int) -> None:
                made[rank].sending = True  # the copy in transit belongs to no rank
                world.send(rank, chunk, to)
                made[rank].sending = False

            with made[rank]:
                out = answer(*given, rank, world.count, send, functools.partial(world.receive, rank))
            same = all(torch.equal(now, was[rank]) for now, was in zip(given, (q, k, v), strict=True))
            expect(same, "Your function changes q, k or v in place. They are needed in backward: leave them alone.")
            return out

        for rank, out in enumerate(world.run(work)):
            _judge_attention(out, rank, q, k, v)
        here, block, table = f"On {ranks} ranks the output is right, but", 4 * tokens * width, 4 * tokens * tokens
        most, kept, sent = 4 * max(each.largest for each in made), 4 * max(world.most_alive), max(world.sent)
        sizes = f"A block of keys takes {block}, its scores take {table}"
        expect(
            most <= 2 * max(block, table) or ranks < 3,
            f"{here} a rank makes a tensor of {most} bytes. {sizes}: take one block at a time, with a matrix "
            "product, and join no blocks.",
        )
        held = 4 * max(each.most_alive for each in made)
        expect(
            held <= 24 * max(block, table) or ranks < 16,
            f"{here} a rank has {held} bytes of tensors at once. {sizes}: keep no copies of the blocks that "
            "came, and no scores or outputs for each; three running values are enough.",
        )
        expect(
            kept <= 4 * block,
            f"{here} a rank holds {kept} bytes of other ranks' keys and values at once. {sizes}: let go of a "
            "block when you have used it and passed it on.",
        )
        enough = 2 * block * (ranks - 1)
        expect(
            sent <= enough,
            f"{here} a rank sends {sent} bytes; {enough} are enough: keys and values, world_size - 1 times. When the "
            "last block has come, nobody waits for another.",
        )
        _expect_one_neighbour(world)


def _judge_attention(out: object, rank: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    ranks, tokens, width = q.shape
    here = f"On {ranks} ranks, rank {rank}"
    expect(isinstance(out, torch.Tensor), f"{here}: return this rank's rows of the output, not {type(out).__name__}.")
    expect(out.shape == (tokens, width), f"{here}: {tuple(out.shape)} is not the shape of its queries' outputs.")
    orders = [[(rank + turn * step) % ranks for step in range(ranks)] for turn in (-1, 1)]

    def gives(*faults: str) -> bool:
        return any(close(out, _attention(q[rank], k[o], v[o], f), relative=1e-4) for o in orders for f in faults)

    if gives(""):
        return
    hints = {
        "it holds inf or nan: did exp overflow (subtract the largest score so far, rescale by exp(old - new)), or "
        "is it 0/0 or inf - inf (the largest score starts at -inf)?": bool((~out.isfinite()).any()),
        "it is all zeros: did every exp underflow? The largest score starts at -inf.": bool((out == 0).all()),
        "it sees this rank's keys only. Without a mask, all others come round the ring, in world_size - 1 steps.": (
            gives("own")
        ),
        "one block of keys is missing: with your own there are world_size of them.": gives("one missing"),
        "the scores are not divided by the root of the width.": gives("unscaled"),
        "each block subtracts its own largest score: bring all to one, the largest so far.": gives("alone"),
        "you divide in every round: divide once, at the end.": gives("every round", "and again"),
        "it is the mean of a softmax for each block. Add up the denominators too, and divide once.": gives("mean"),
        "it sees a neighbour's block again and again: pass on what came, not your own block.": any(
            close(out, _attention(q[rank], k[o], v[o]), relative=1e-4)
            for o in ([rank, *[(rank + turn) % ranks] * (ranks - 1)] for turn in (-1, 1))
        ),
        "it is a sum that nobody has divided by the denominator, the sum of all weights.": gives("undivided"),
        "when a larger score comes, rescale output and denominator by exp(old - new).": gives("kept", "out", "total"),
    }
    compare = "Compare it with softmax(q @ all_keys.T / width ** 0.5) @ all_values."
    fail(f"{here} has a wrong output: {diagnose(out, hints, otherwise=compare)}")


def _attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, fault: str = "") -> torch.Tensor:
    """Attention of q (T, D) over blocks (N, T, D) in the order they come, or the same with a well-known fault."""
    q, keys, values = (t.double() for t in (q, keys, values))
    blocks = {"own": 1, "one missing": len(keys) - 1}.get(fault, len(keys))
    out, total = torch.zeros_like(q), torch.zeros(len(q), 1).double()
    highest, softmaxes = torch.full_like(total, -math.inf), []
    for k, v in zip(keys[:blocks], values[:blocks], strict=True):
        scores = q @ k.T / (1 if fault == "unscaled" else q.shape[-1] ** 0.5)
        softmaxes.append(scores.softmax(-1) @ v)
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        higher = scores.amax(-1, keepdim=True) if fault == "alone" else higher
        weights, keep = (scores - higher).exp(), (highest - higher).exp()
        out = out * (1 if fault in ("kept", "out", "alone") else keep) + weights @ v
        total = total * (1 if fault in ("kept", "total", "alone") else keep) + weights.sum(1, True)
        highest = higher
        out = out / total if fault in ("every round", "and again") else out
    if fault == "mean":
        return sum(softmaxes) / len(keys)
    return out if fault in ("undivided", "every round") else out / total


# --- Task 6 ---------------------------------------------------------------------------------------------------------

overrule = choices(
    "Task 6, overrule the chooser",
    {"starved": "fix first", "full": "ZeRO-3", "long": "sequence", "slow network": "pipeline", "spare": "one GPU"},
    ("one GPU", "data", "ZeRO-3", "tensor", "pipeline", "sequence", "fix first"),
    {
        "starved": "One GPU waits for the data loader; eight could use eight times the data, however you split.",
        "full": "State that is the same on eight ranks does not fit. Divide it among the data-parallel ranks: the "
        "network inside a machine can take it, and the layers stay whole.",
        "long": "There is no batch to split, and one sequence's activations do not fit. Which plan splits tokens?",
        "slow network": "Count bytes at 1 GB/s. Gathering 13 B weights in 16 bits takes 24 s, again and again, since "
        "only one sequence fits at a time; the all-reduces in the layers take 3 s for each of 1,024 sequences. What "
        "travels between two stages is one layer's output.",
        "spare": "The measurement has decided: two GPUs over this network are slower than one.",
    },
)
