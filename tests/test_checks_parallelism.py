"""The checks of exercise 2 accept what is right in any style, see a stub, and name the fault of what is wrong."""

import bisect
import itertools
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import psutil
import pytest
import torch
from notebook_answers import defined, named
from torch import nn
from torch.nn import functional as F

from speedlab.checks import parallelism as checks

NAME = "exercise-2-parallelism.ipynb"


def changed(source: str, *changes: tuple[str, str]) -> object:
    """The last function of a source with some of its lines replaced."""
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names = dict(torch=torch, nn=nn, F=F, math=math, np=np, __name__="made")
    made = defined(source, f"<changed {hash(source)}>", **names)
    return next(value for name, value in reversed(made.items()) if getattr(value, "__module__", "") == "made")


@pytest.mark.parametrize(
    "task", ["ring_all_reduce", "column_linear", "bubble", "enough", "ring_attention", "overrule"]
)
def test_the_solution_is_correct_and_the_stub_not_attempted(task, solution, stub, verdict):
    assert verdict(task, solution[task]) == "correct"
    assert verdict(task, stub[task]) == "not attempted yet"


def test_the_stubs_start_no_process(stub, verdict):
    children = psutil.Process().children()
    assert verdict("processes", stub["ring_all_reduce"], stub["column_linear"]) == "not attempted yet"
    assert psutil.Process().children() == children


# --- Task 1 ---------------------------------------------------------------------------------------------------------

RING = """
def ring_all_reduce(tensor, rank, world_size, send, receive):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = list(tensor.tensor_split(world_size))
    for step in range(2 * (world_size - 1)):
        leaving = chunks[(rank - step) % world_size]
        arriving = chunks[(rank - step - 1) % world_size]
        send(leaving, right)
        received = receive(arriving, left)
        if step < world_size - 1:
            arriving.add_(received)
        else:
            arriving.copy_(received)
"""
PHASES = """
def ring_all_reduce(tensor, rank, world_size, send, receive):
    chunks = tensor.tensor_split(world_size)
    for phase in ("add_", "copy_"):
        for step in range(world_size - 1):
            send(chunks[(rank - step) % world_size], (rank + 1) % world_size)
            arriving = chunks[(rank - step - 1) % world_size]
            getattr(arriving, phase)(receive(arriving, (rank - 1) % world_size))
"""
LEFTWARD = """
def ring_all_reduce(tensor, rank, world_size, send, receive):
    chunks = list(tensor.tensor_split(world_size))
    for phase in ("add_", "copy_"):
        for step in range(world_size - 1):
            first = rank + (phase == "copy_") * (world_size - 1)
            leaving, arriving = (chunks[(first + step + k) % world_size] for k in (0, 1))
            send(leaving, (rank - 1) % world_size)
            getattr(arriving, phase)(receive(arriving, (rank + 1) % world_size))
"""
BOUNDS = """
def ring_all_reduce(tensor, rank, world_size, send, receive):
    def part(index):
        edges = np.linspace(0, len(tensor), world_size + 1).round().astype(int)
        return slice(edges[index % world_size], edges[index % world_size + 1])
    neighbours = np.int64(rank + 1) % world_size, torch.tensor(rank - 1) % world_size
    step = 0
    while step < 2 * world_size - 2:
        send(chunk=tensor[part(rank - step)], to=neighbours[0])
        like = torch.empty(len(tensor[part(rank - step - 1)]))
        got = receive(like, source=neighbours[1])
        now = tensor[part(rank - step - 1)]
        tensor[part(rank - step - 1)] = now + got if step < world_size - 1 else got
        step += 1
    return tensor
"""
EVERYBODY = """
def ring_all_reduce(tensor, rank, world_size, send, receive):
    others = [r for r in range(world_size) if r != rank]
    for other in others:
        send(tensor, other)
    for received in [receive(tensor, other) for other in others]:
        tensor.add_(received)
"""
CENTRAL = """
def ring_all_reduce(tensor, rank, world_size, send, receive):
    if rank > 0:
        send(tensor, 0)
        tensor.copy_(receive(tensor, 0))
        return
    for other in range(1, world_size):
        tensor.add_(receive(tensor, other))
    for other in range(1, world_size):
        send(tensor, other)
"""
SHIFTED = """
def ring_all_reduce(tensor, rank, world_size, send, receive):
    passed = tensor.clone()
    for _ in range(world_size - 1):
        send(passed, (rank + 1) % world_size)
        passed = receive(passed, (rank - 1) % world_size)
        tensor.add_(passed)
"""
DIRECT = """
def ring_all_reduce(tensor, rank, world_size, send, receive):
    chunks = tensor.tensor_split(world_size)
    others = [r for r in range(world_size) if r != rank]
    for other in others:
        send(chunks[other], other)
    for other in others:
        chunks[rank].add_(receive(chunks[rank], other))
    for other in others:
        send(chunks[rank], other)
    for other in others:
        chunks[other].copy_(receive(chunks[other], other))
"""
CHAIN = """
def ring_all_reduce(tensor, rank, world_size, send, receive):
    # chunk i grows along the chain that begins at rank i, and is then copied along the one that begins at its end
    for first, write in ((0, "add_"), (-1, "copy_")):
        for i, chunk in enumerate(tensor.tensor_split(world_size)):
            place = (rank - i - first) % world_size
            if place > 0:
                getattr(chunk, write)(receive(chunk, (rank - 1) % world_size))
            if place < world_size - 1:
                send(chunk, (rank + 1) % world_size)
"""
PADDED = """
def ring_all_reduce(tensor, rank, world_size, send, receive):
    size = -(-len(tensor) // world_size)
    rows = np.zeros((world_size, size), dtype=np.float32)
    rows.ravel()[: len(tensor)] = tensor
    for step in range(2 * world_size - 2):
        send(torch.from_numpy(rows[(rank - step) % world_size]), (rank + 1) % world_size)
        got = receive(torch.empty(size), (rank - 1) % world_size).numpy()
        rows[(rank - step - 1) % world_size] = got + rows[(rank - step - 1) % world_size] * (step < world_size - 1)
    tensor[:] = torch.from_numpy(rows.ravel()[: len(tensor)])
"""
SHIFTED_CHUNKS = """
def ring_all_reduce(tensor, rank, world_size, send, receive):
    for chunk in tensor.tensor_split(world_size):
        passed = chunk.clone()
        for _ in range(world_size - 1):
            send(passed, (rank + 1) % world_size)
            passed = receive(passed, (rank - 1) % world_size)
            chunk.add_(passed)
"""
SPLIT = "list(tensor.tensor_split(world_size))"
SEND, ADD = "        send(leaving, right)\n", "            arriving.add_(received)\n"
RECEIVE = "        received = receive(arriving, left)\n"
RECEIVE_INTO = "        received = torch.empty_like(arriving)\n        receive(received, left)\n"
RINGS = {
    "to the left": [LEFTWARD],
    "slices, a buffer, numpy's and torch's ranks": [BOUNDS],
    "chunk after chunk along a chain": [CHAIN],
    "numpy, padded": [PADDED],
    "a shorter chunk at the end": [RING, (SPLIT, "[tensor[i * s : i * s + s] for i in range(world_size)]"),
                                   ("    right,", "    s = -(-len(tensor) // world_size)\n    right,")],
    "a longer chunk at the end": [RING, (SPLIT, "torch.split(tensor, [s] * (world_size - 1) + [s + rest])"),
                                  ("    right,", "    s, rest = divmod(len(tensor), world_size)\n    right,")],
    "summed in double precision": [RING, ("arriving.add_(received)", "arriving.copy_(arriving.double() + received)")],
    "a leftover comment": [RING, (SPLIT, SPLIT + "\n    # raise NotImplementedError")],
    "a raise after the return": [RING + "    return\n    raise NotImplementedError\n"],
    "a helper outside": [
        "def add(a, b):\n    a += b\n" + RING,
        ("arriving.add_(received)", "add(arriving, received)"),
    ],
    "it sends copies": [RING, ("send(leaving, right)", "send(leaving.clone(), right)")],
    "array_split's sizes": [RING, (SPLIT, "torch.split(tensor, [len(c) for c in tensor.tensor_split(world_size)])")],
    "one rank apart": [RING, ("    right, left", "    if world_size == 1:\n        return\n    right, left")],
}  # fmt: skip
RING_MISTAKES = {
    "sends everything to everybody": ([EVERYBODY], "whole vectors", "one chunk in each"),
    "rank 0 does it all": ([CENTRAL], "a rank sends", "2 (world_size - 1) steps"),
    "passes whole tensors round": ([SHIFTED], "a rank sends", "whole vectors", "chunks"),
    "passes chunks all the way round": ([SHIFTED_CHUNKS], "That is as much as", "whole vectors", "one chunk in each"),
    "a third phase": ([RING, ("range(2 * ", "range(3 * ")], "48 bytes", "2 (world_size - 1) steps"),
    "double precision": ([RING, ("send(leaving, right)", "send(leaving.double(), right)"),
                          ("receive(arriving, left)", "receive(arriving.double(), left)")], "float64", "cost more"),
    "no ring, with as many bytes": ([DIRECT], "no ring", "one neighbour only"),
    "adds in both phases": ([RING, ("arriving.copy_(received)", "arriving.add_(received)")], "copied, not added"),
    "stops after the first phase": ([RING, ("range(2 * (world_size - 1))", "range(world_size - 1)")], "finished"),
    "one step too few": ([RING, ("range(2 * (world_size - 1))", "range(2 * world_size - 3)")], "the sum at"),
    "one step too many": ([RING, ("range(2 * (world_size - 1))", "range(2 * world_size - 1)")], "bytes"),
    "forgets to write": ([RING, (ADD, "            arriving = arriving + received\n")], "no rank", "view"),
    "receives into a buffer": ([RING, (RECEIVE, RECEIVE_INTO)], "does not fill its argument"),
    "returns the sum": ([RING, ("    right,", "    given, tensor = tensor, tensor.clone()\n    right,"),
                         ("            arriving.copy_(received)\n", "            arriving.copy_(received)\n    "
                          "return tensor\n")], "you return the sum", "copy_"),
    "the mean": ([RING + "    tensor /= world_size\n"], "mean", "sums"),
    "other numbers for the tensor": ([RING, ("    right,", "    given, tensor = tensor, tensor.clone()\n    right,"),
                                      ("            arriving.copy_(received)\n",
                                       "            arriving.copy_(received)\n    given.data = tensor\n")], ""),
    "sends to nobody": ([RING, ("(rank + 1) % world_size, (rank - 1)", "rank + 1, (rank - 1)")], "modulo"),
    "receives before it sends": ([RING, (SEND, ""), (ADD, ADD + "    " + SEND)], "waits", "before it receives"),
    "without the rest": ([RING, (SPLIT, "tensor.unfold(0, s, s)"), ("    right,", "    s = len(tensor) // world_size"
                         " or 1\n    right,")], "with 7 numbers", "the end is left out"),
    "the wrong chunk arrives": ([RING, ("rank - step - 1", "rank - step + 1")], ""),
    "chunk instead of tensor_split": ([RING, (SPLIT, "tensor.chunk(world_size)")], "numbers on", "tensor_split"),
    "half precision": ([RING, ("send(leaving, right)", "send(leaving.half(), right)"),
                        ("receive(arriving, left)", "receive(arriving.half(), left)")], "torch.float16", "rounded"),
    "sends a list": ([RING, ("send(leaving, right)", "send(leaving.tolist(), right)")], "list, not a tensor"),
    "only the last chunks": ([RING, (SPLIT, "tensor[: len(tensor) // world_size * world_size].chunk(world_size)")],
                             "numbers"),
    "one rank leaves early": ([RING, ("    right,", "    if rank == 1:\n        return\n    right,")], "waits"),
    "copies in the first phase": ([RING, ("arriving.add_(", "arriving.copy_(")], "is added in the first"),
    "a second phase that counts from zero": ([PHASES], "in the second phase, s counts on"),
    "nothing": (["def ring_all_reduce(*_):\n    pass"], "no rank holds"),
    "zeros": (["def ring_all_reduce(tensor, *_):\n    tensor.zero_()"], "no rank holds"),
    "nan": (["def ring_all_reduce(tensor, *_):\n    tensor.fill_(math.nan)"], "no rank holds"),
}  # fmt: skip


@pytest.mark.parametrize("made", named({name: (made,) for name, made in RINGS.items()}))
def test_ring_accepts(made, verdict):
    assert verdict("ring_all_reduce", changed(*made)) == "correct"


@pytest.mark.parametrize(("made", "words"), named({name: (m, words) for name, (m, *words) in RING_MISTAKES.items()}))
def test_ring_rejects(made, words, rejects):
    rejects("ring_all_reduce", changed(*made), *words)


def test_an_error_on_one_rank_is_told_and_not_that_the_others_waited(verdict):
    broken = changed(RING, ("    right,", "    if rank == 1:\n        raise KeyError('planted')\n    right,"))
    said = verdict("ring_all_reduce", broken)
    assert "raised KeyError at the line `raise KeyError" in said and "waits" not in said


# --- Task 2 ---------------------------------------------------------------------------------------------------------

COLUMN = """
def column_linear(x, share, all_reduce):
    class Column(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, share):
            ctx.save_for_backward(x, share)
            return x @ share.T

        @staticmethod
        def backward(ctx, grad):
            x, share = ctx.saved_tensors
            return all_reduce(grad @ share), grad.T @ x

    return Column.apply(x, share)
"""
ENTER = """
def column_linear(x, share, all_reduce):
    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return all_reduce(grad)

    return torch.nn.functional.linear(Enter.apply(x), share)
"""
OUTSIDE = """
class Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, share, all_reduce):
        ctx.save_for_backward(x, share)
        ctx.all_reduce = all_reduce
        return F.linear(x, share)

    @staticmethod
    def backward(ctx, grad):
        x, share = ctx.saved_tensors
        return ctx.all_reduce(grad.mm(share)), torch.einsum("rf,ri->fi", grad, x), None


def column_linear(x, share, all_reduce):
    # raise NotImplementedError
    return Column.apply(x, share, all_reduce)
"""
HOOK_ON_X = """
def column_linear(x, share, all_reduce):
    x.register_hook(all_reduce)
    return x @ share.T
"""
GRADIENTS = "all_reduce(grad @ share), grad.T @ x"
APPLY, PRODUCT = "return Column.apply(x, share)", "return x @ share.T"
COLUMNS = {
    "a plain Linear behind a function that reduces": [ENTER],
    "a class outside, other products": [OUTSIDE],
    "a hook on a view of x": [HOOK_ON_X, ("x.register_hook", "x = x.view_as(x)\n    x.register_hook")],
    "in double precision": [COLUMN, (PRODUCT, "return (x.double() @ share.double().T).float()")],
}
COLUMN_MISTAKES = {
    "no function at all": ([COLUMN, (APPLY, PRODUCT)], "part only", "all_reduce"),
    "not reduced": ([COLUMN, (GRADIENTS, "grad @ share, grad.T @ x")], "part only", "all_reduce it"),
    "reduced, but not used": (
        [COLUMN, ("return all_reduce(grad @ share)", "g = grad @ share; all_reduce(g); return g")],
        "all_reduce returns the sum", "does not write"),
    "both reduced": ([COLUMN, (GRADIENTS, "all_reduce(grad @ share), all_reduce(grad.T @ x)")], "share", "alone"),
    "reduced in forward": ([COLUMN, (PRODUCT, "return all_reduce(x @ share.T)")], "forward", "finished"),
    "reduced twice": ([COLUMN, (GRADIENTS, "all_reduce(all_reduce(grad @ share) * 0 + grad @ share), grad.T @ x")],
                      "2 times", "one"),
    "the mean": ([COLUMN, (GRADIENTS, "all_reduce(grad @ share) / (2 if len(grad) == 5 else 3), grad.T @ x")],
                 "mean", "one loss"),
    "no gradient of share": ([COLUMN, (GRADIENTS, "all_reduce(grad @ share), None")], "share", "no gradient"),
    "no gradient of x": ([COLUMN, (GRADIENTS, "None, grad.T @ x")], "gradient of x is missing"),
    "swapped": ([COLUMN, (GRADIENTS, "grad.T @ x, all_reduce(grad @ share)")], "in the same order", "invalid"),
    "one gradient": ([COLUMN, (GRADIENTS, "all_reduce(grad @ share)")], "one gradient for each input"),
    "detached": ([COLUMN, (APPLY, APPLY + ".detach()")], "apply"),
    "transposed": ([COLUMN, (APPLY, APPLY + ".T")], "shape"),
    "nothing": ([COLUMN, (APPLY, "pass")], "NoneType"),
    "a hook on x itself": ([HOOK_ON_X], "what x got elsewhere", "hook on x"),
    "zeros x in forward": ([COLUMN, (PRODUCT, "out = x @ share.T; x.data.zero_(); return out")],
                           "changes the numbers in x"),
    "spends the gradient": (
        [COLUMN, ("return all_reduce(grad @ share), grad.T @ x",
                  "both = all_reduce(grad @ share), grad.T @ x; grad.zero_(); return both")],
        "changes the gradient that it is given"),
    "scales share in place": ([COLUMN, (APPLY, "share.data.mul_(2); return Column.apply(x, share) / 2")], "share"),
    "nan": ([COLUMN, (GRADIENTS, "all_reduce(grad @ share) * math.nan, grad.T @ x")], "gradient of x is wrong"),
    "scaled": ([COLUMN, (GRADIENTS, "2 * all_reduce(grad @ share), grad.T @ x")], "Each rank's part is grad @ share"),
    "not on every rank": ([COLUMN, (GRADIENTS, "all_reduce(grad @ share) if share[0, 0] > 0 else grad @ share, "
                                    "grad.T @ x")], "One rank waits in all_reduce"),
}  # fmt: skip


@pytest.mark.parametrize("made", named({name: (made,) for name, made in COLUMNS.items()}))
def test_column_accepts(made, verdict):
    assert verdict("column_linear", changed(*made)) == "correct"


@pytest.mark.parametrize(
    ("made", "words"), named({name: (m, words) for name, (m, *words) in COLUMN_MISTAKES.items()})
)
def test_column_rejects(made, words, rejects):
    rejects("column_linear", changed(*made), *words)


# --- On real processes ----------------------------------------------------------------------------------------------


def test_helpers_classes_and_leftover_comments_travel_to_real_processes(verdict):
    made = [
        "def parts(t, n):\n    # cuts\n    return t.tensor_split(n)\n" + RING,
        (SPLIT, "parts(tensor, world_size)"),
    ]
    assert verdict("processes", changed(*made), changed(OUTSIDE)) == "correct"


def test_what_only_the_notebook_knows_is_named(verdict):
    lost = changed(RING, (SPLIT, "my_helper(tensor)"))
    said = verdict("processes", lost, changed(COLUMN))
    assert "my_helper" in said and "define or import what it needs inside it" in said, said


# --- Tasks 3 and 4 --------------------------------------------------------------------------------------------------

BUBBLES = {
    "plain": lambda p, m: (p - 1) / (m + p - 1),
    "a complement": lambda p, m: 1 - m / (m + p - 1),
    "fp32": lambda p, m: torch.tensor(p - 1) / (m + p - 1),
    "numpy": lambda p, m: np.float32(p - 1) / np.float32(m + p - 1),
    "an array": lambda p, m: np.array([(p - 1) / (m + p - 1)]),
    "a fraction": lambda p, m: Fraction(p - 1, m + p - 1),
    "with lengths": lambda p, m: 1 - 3 * m / (3 * (m + p - 1)),
}
VISIBLE = {(1, 4): 0, (2, 1): 0.5, (4, 4): 3 / 7, (3, 8): 0.2, (8, 5): 7 / 12, (16, 64): 15 / 79}
WRONG_BUBBLES = {
    "the working share": (lambda p, m: m / (m + p - 1), "share in which they work"),
    "against the work": (lambda p, m: (p - 1) / m, "whole step"),
    "p instead of p - 1": (lambda p, m: p / (m + p - 1), "never waits"),
    "m + p slots": (lambda p, m: (p - 1) / (m + p), "slots"),
    "percent": (lambda p, m: 100 * (p - 1) / (m + p - 1), "in percent"),
    "a constant": (lambda p, m: 0.5, "Count slots"),
    "a lookup": (lambda p, m: VISIBLE.get((p, m), 0.3), "Count slots"),
    "rounded": (lambda p, m: round((p - 1) / (m + p - 1), 3), "0.4286", "0.4290", "rounded"),
    "rounded to six digits": (lambda p, m: round((p - 1) / (m + p - 1), 4), "0.42857", "0.42860"),
    "nothing": (lambda p, m: None, "return"),
    "text": (lambda p, m: "half", "number"),
    "nan": (lambda p, m: math.nan, "nan"),
    "a list": (lambda p, m: [0.5], "number"),
    "negative": (lambda p, m: -(p - 1) / (m + p - 1), "Count slots"),
}


def stepped(p, limit):
    m = 1
    while (p - 1) / (m + p - 1) > limit:
        m += 1
    return m


def ceiling(p, limit, hair=1e-9):
    return max(1, math.ceil((p - 1) * (1 - limit) / limit - hair))


def bisected(p, limit):
    return bisect.bisect_left(range(1, 10_000), -Fraction(str(limit)), key=lambda m: -Fraction(p - 1, m + p - 1)) + 1


COUNTS = {
    "bisected": bisected,
    "a Decimal": lambda p, limit: max(1, math.ceil((p - 1) * (1 - Decimal(str(limit))) / Decimal(str(limit)))),
    "whole numbers": lambda p, limit: max(1, -(-(p - 1) * (10_000 - round(limit * 1e4)) // round(limit * 1e4))),
    "rounded first": lambda p, limit: max(1, math.ceil(round((p - 1) * (1 - limit) / limit, 9))),
    "all slots, less p - 1": lambda p, limit: max(1, math.ceil(round((p - 1) / limit, 6)) - (p - 1)),
    "an arange": lambda p, limit: int(np.argmax((p - 1) / (np.arange(1, 9999) + p - 1) <= limit + 1e-12)) + 1,
    "one after the other": stepped,
    "with a margin": ceiling,
    "a fraction": lambda p, limit: max(1, math.ceil((p - 1) / Fraction(str(limit)) - (p - 1))),
    "numpy": lambda p, limit: np.int64(ceiling(p, limit)),
    "a float": lambda p, limit: float(ceiling(p, limit)),
    "a tensor": lambda p, limit: torch.tensor(ceiling(p, limit)),
    "next": lambda p, limit: next(m for m in itertools.count(1) if p - 1 <= (limit + 1e-12) * (m + p - 1)),
}
WRONG_COUNTS = {
    "ceil of (p-1)(1-l)/l": (lambda p, limit: ceiling(p, limit, 0.0), "For 4 stages", "12 give", "a hair above"),
    "ceil of (p-1)(1/l-1)": (lambda p, limit: max(1, math.ceil((p - 1) * (1 / limit - 1))), "a hair above"),
    "ceil of (p-1-(p-1)l)/l": (lambda p, limit: max(1, math.ceil((p - 1 - (p - 1) * limit) / limit)), "a hair above"),
    "rounded": (lambda p, limit: max(1, round((p - 1) * (1 - limit) / limit)), "For 3 stages", "too few"),
    "none where all may wait": (
        lambda p, limit: math.ceil((p - 1) * (1 - Fraction(str(limit))) / Fraction(str(limit))) if p > 1 else 1,
        "1",
    ),
    "a search to 400": (
        lambda p, limit: next((m for m in range(1, 400) if (p - 1) / (m + p - 1) <= limit + 1e-12), 400),
        "too few",
    ),
    "rounded down": (lambda p, limit: max(1, math.floor((p - 1) * (1 - limit) / limit + 1e-9)), "too few"),
    "a fixed margin": (lambda p, limit: max(1, int((p - 1) * (1 - limit) / limit + 0.999)), "too few"),
    "rounded down, plus one": (lambda p, limit: math.floor((p - 1) * (1 - limit) / limit + 1e-9) + 1, "more than"),
    "all p stages": (lambda p, limit: math.ceil(p * (1 - limit) / limit), "p, or fewer"),
    "strictly below": (lambda p, limit: next(m for m in itertools.count(1) if (p - 1) / (m + p - 1) < limit), "more"),
    "in hundredths": (
        lambda p, limit: max(1, -(-(p - 1) * (100 - round(100 * limit)) // round(100 * limit))),
        "0.125, 59",
    ),
    "a simpler fraction": (
        lambda p, limit: max(1, math.ceil((p - 1) * (1 / Fraction(limit).limit_denominator(99) - 1))),
        "at most 0.3333",
        "the bubble is 0.33333.",
    ),
    "all slots": (lambda p, limit: max(1, math.ceil(round((p - 1) / limit, 6))), "30", "take away p - 1"),
    "at least p": (lambda p, limit: max(p, ceiling(p, limit)), "10 micro-batches", "fewer micro-batches than stages"),
    "one": (lambda p, limit: 1, "too few", "4 stages"),
    "a million": (lambda p, limit: 10**6, "far too many"),
    "not whole": (lambda p, limit: (p - 1) * (1 - limit) / limit + 0.5, "whole number"),
    "none at all": (lambda p, limit: 0, "at least 1"),
    "infinite": (lambda p, limit: math.inf, "inf"),
    "nothing": (lambda p, limit: None, "return"),
    "a lookup": (lambda p, limit: {(4, 0.1): 27, (4, 0.2): 12, (7, 0.2): 24}.get((p, limit), 1), "too few"),
}


@pytest.mark.parametrize("answer", named(BUBBLES))
def test_bubble_accepts(answer, verdict):
    assert verdict("bubble", answer) == "correct"


@pytest.mark.parametrize(
    ("answer", "words"), named({name: (f, words) for name, (f, *words) in WRONG_BUBBLES.items()})
)
def test_bubble_rejects(answer, words, rejects):
    rejects("bubble", answer, *words)


@pytest.mark.parametrize("answer", named(COUNTS))
def test_enough_accepts(answer, verdict):
    assert verdict("enough", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), named({name: (f, words) for name, (f, *words) in WRONG_COUNTS.items()}))
def test_enough_rejects(answer, words, rejects):
    rejects("enough", answer, *words)


def test_an_excess_of_more_than_one_is_not_blamed_on_floating_point(verdict):
    assert "hair" not in verdict("enough", lambda p, limit: ceiling(p, limit) + 5)


def test_one_stage_is_not_told_that_no_micro_batch_is_enough(verdict):
    said = verdict("enough", lambda p, limit: ceiling(p, limit) + (p == 1))
    assert "For 1 stages" in said and "is enough" not in said, said


def test_one_rank_is_not_told_to_count_modulo_one(rejects):
    alone = ("    right,", "    send(tensor, 0) if world_size == 1 else None\n    right,")
    rejects("ring_all_reduce", changed(RING, alone), "sends to rank 0", "nobody to talk to")


# --- Task 5 ---------------------------------------------------------------------------------------------------------

ATTENTION = """
def ring_attention(q, k, v, rank, world_size, send, receive):
    out, total = torch.zeros_like(q), torch.zeros(len(q), 1)
    highest = torch.full_like(total, -torch.inf)
    for step in range(world_size):
        scores = q @ k.T / q.shape[-1] ** 0.5
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights, keep = torch.exp(scores - higher), torch.exp(highest - higher)
        out = out * keep + weights @ v
        total = total * keep + weights.sum(-1, keepdim=True)
        highest = higher
        if step < world_size - 1:
            send(k, (rank + 1) % world_size)
            send(v, (rank + 1) % world_size)
            k, v = receive(k, (rank - 1) % world_size), receive(v, (rank - 1) % world_size)
    return out / total
"""
LOGSUMEXP = """
def ring_attention(q, k, v, rank, world_size, send, receive):
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    pair = torch.stack([k, v])
    out = lse = None
    for step in range(world_size):
        if step:
            send(pair, left)
            pair = receive(pair, right)
        scores = torch.einsum("td,sd->ts", q, pair[0]) / math.sqrt(q.size(1))
        new, part = scores.logsumexp(1, keepdim=True), scores.softmax(1) @ pair[1]
        if out is None:
            out, lse = part, new
        else:
            both = torch.logaddexp(lse, new)
            out, lse = out * (lse - both).exp() + part * (new - both).exp(), both
    return out
"""
COLLECT = """
def ring_attention(q, k, v, rank, world_size, send, receive):
    keys, values = [k], [v]
    for step in range(world_size - 1):
        send(keys[-1], (rank + 1) % world_size)
        send(values[-1], (rank + 1) % world_size)
        keys.append(receive(k, (rank - 1) % world_size))
        values.append(receive(v, (rank - 1) % world_size))
    return F.scaled_dot_product_attention(q, torch.cat(keys), torch.cat(values))
"""
TWO_PASSES = COLLECT.replace(
    "    return F.scaled_dot_product_attention(q, torch.cat(keys), torch.cat(values))\n",
    """\
    tables = [q @ key.T / q.shape[1] ** 0.5 for key in keys]
    top = torch.stack([t.amax(1) for t in tables]).amax(0)[:, None]
    total = sum((t - top).exp().sum(1, keepdim=True) for t in tables)
    return sum((t - top).exp() @ value for t, value in zip(tables, values)) / total
""",
)
HOARDED = """
def ring_attention(q, k, v, rank, world_size, send, receive):
    keys, values = [k.clone()], [v.clone()]
    for step in range(world_size - 1):
        send(keys[-1], (rank + 1) % world_size)
        send(values[-1], (rank + 1) % world_size)
        keys.append(receive(k, (rank - 1) % world_size).clone())
        values.append(receive(v, (rank - 1) % world_size).clone())
    tables = [q @ key.T / q.shape[1] ** 0.5 for key in keys]
    top = tables[0].amax(1, keepdim=True)
    for table in tables:
        top = torch.maximum(top, table.amax(1, keepdim=True))
    total = sum((t - top).exp().sum(1, keepdim=True) for t in tables)
    return sum((t - top).exp() @ value for t, value in zip(tables, values)) / total
"""
HIGHER = "torch.maximum(highest, scores.amax(-1, keepdim=True))"
KEEP_OUT, KEEP_TOTAL = "out * keep + weights @ v", "total * keep + weights.sum"
LAST = "        if step < world_size - 1:\n"
SENT_V = "            send(v, (rank + 1) % world_size)\n"
ATTENTIONS = {
    "three running numbers": [ATTENTION],
    "log-sum-exp, packed pairs, to the left": [LOGSUMEXP],
    "in double precision": [ATTENTION, ("    out, total", "    q = q.double()\n    out, total"),
                            ("q @ k.T", "q @ k.double().T"), ("weights @ v", "weights @ v.double()")],
    "a running sum that starts late": [ATTENTION, ("    for step", "    assert not total.any()\n    for step")],
}  # fmt: skip
WRONG_ATTENTIONS = {
    "own keys only": ([ATTENTION, ("in range(world_size)", "in [world_size - 1]")], "this rank's keys only"),
    "one block missing": ([ATTENTION, ("in range(world_size)", "in range(max(1, world_size - 1))")], "missing"),
    "a maximum from zero on": ([ATTENTION, ("-torch.inf", "0.0")], "nan"),
    "a maximum for each block": ([ATTENTION, (HIGHER, "scores.amax(-1, True)"), (KEEP_OUT, "out + weights @ v"),
                                  (KEEP_TOTAL, "total + weights.sum")], "bring all to one"),
    "divided in every round": ([ATTENTION, ("        highest = higher", "        highest, out = higher, out / total"),
                                ("return out / total", "return out")], "in every round"),
    "a maximum from -100 on": ([ATTENTION, ("-torch.inf", "-100.0")], "Compare it"),
    "a maximum from zero on, and a guard": ([ATTENTION, ("-torch.inf", "0.0"), ("/ total", "/ (total + 1e-9)")],
                                            "starts at -inf"),
    "no maximum, in fp64": ([*ATTENTIONS["in double precision"], (HIGHER, "total * 0")], "overflow"),
    "divided in every round and at the end": ([ATTENTION, ("highest = higher", "highest, out = higher, out / total")],
                                              "in every round"),
    "its own block again": ([ATTENTION, ("    for step", "    mine = k, v\n    for step"),
                             ("send(k, ", "send(mine[0], "), ("send(v, ", "send(mine[1], ")], "pass on what came"),
    "no maximum": ([ATTENTION, (HIGHER, "total * 0")], "overflow"),
    "no rescaling": ([ATTENTION, (KEEP_OUT, "out + weights @ v"), (KEEP_TOTAL, "total + weights.sum")], "rescale"),
    "the output not rescaled": ([ATTENTION, (KEEP_OUT, "out + weights @ v")], "exp(old - new)"),
    "the denominator not rescaled": ([ATTENTION, (KEEP_TOTAL, "total + weights.sum")], "exp(old - new)"),
    "not divided": ([ATTENTION, ("return out / total", "return out")], "denominator"),
    "not scaled": ([ATTENTION, (" / q.shape[-1] ** 0.5", "")], "root of the width"),
    "scaled by the width": ([ATTENTION, (" ** 0.5", "")], "Compare it with softmax"),
    "a mean of softmaxes": ([ATTENTION, (KEEP_OUT, "out + scores.softmax(-1) @ v"), 
                             ("out / total", "out / world_size")], "mean of a softmax"),
    "copies of all blocks": ([HOARDED], "bytes of tensors at once", "keep no copies"),
    "collected and joined": ([COLLECT], "makes a tensor of", "join no blocks"),
    "collected in lists": ([TWO_PASSES], "holds", "let go"),
    "one round too many": ([ATTENTION, (LAST, "        if world_size > 1:\n")], "are enough", "nobody waits"),
    "keys and values swapped": ([ATTENTION, ("k, v = receive(k", "v, k = receive(k")], "Compare it"),
    "old values": ([ATTENTION, (SENT_V, "            send(v * 0, (rank + 1) % world_size)\n")], "Compare it"),
    "values never sent": ([ATTENTION, (SENT_V, "")], "waits for rank"),
    "scales q in place": ([ATTENTION, ("    out, total", "    q /= q.shape[-1] ** 0.5\n    out, total"),
                           (" / q.shape[-1] ** 0.5\n        h", "\n        h")], "in place"),
    "sends to itself": ([ATTENTION, ("send(k, (rank + 1) % world_size)", "send(k, rank)")], "modulo"),
    "nothing": (["def ring_attention(*_):\n    pass"], "NoneType"),
    "v itself": (["def ring_attention(q, k, v, *_):\n    return v"], "Compare it"),
    "nan": (["def ring_attention(q, *_):\n    return q * math.nan"], "inf or nan"),
    "a row too few": ([ATTENTION, ("return out / total", "return (out / total)[1:]")], "shape"),
}  # fmt: skip


@pytest.mark.parametrize("made", named({name: (made,) for name, made in ATTENTIONS.items()}))
def test_attention_accepts(made, verdict):
    assert verdict("ring_attention", changed(*made)) == "correct"


@pytest.mark.parametrize(
    ("made", "words"), named({name: (m, words) for name, (m, *words) in WRONG_ATTENTIONS.items()})
)
def test_attention_rejects(made, words, rejects):
    rejects("ring_attention", changed(*made), *words)


ENDLESS = {
    "ring_all_reduce": [RING, ("range(2 * (world_size - 1))", "iter(int, 1)")],
    "column_linear": [COLUMN, (PRODUCT, "while True:\n                pass")],
    "ring_attention": [ATTENTION, ("in range(world_size)", "in iter(int, 1)")],
    "bubble": ["def bubble(p, m):\n    while m:\n        p += 1"],
}


@pytest.mark.parametrize("task", ENDLESS)
def test_an_endless_answer_is_stopped(task, verdict, monkeypatch):
    monkeypatch.setattr(checks._Ranks, "seconds", 0.5)
    monkeypatch.setattr(checks.bubble, "seconds", 0.5)
    said = verdict(task, changed(*ENDLESS[task]))
    assert "had not ended after 0.5 s at the line `" in said, said


# --- Task 6 ---------------------------------------------------------------------------------------------------------

RIGHT = {"starved": "fix first", "full": "ZeRO-3", "long": "sequence", "slow network": "pipeline", "spare": "one GPU"}


@pytest.mark.parametrize("name", RIGHT)
def test_overrule_gives_a_reason_for_every_wrong_plan(name, verdict):
    for wrong in set(RIGHT.values()) | {"data", "tensor"}:
        said = verdict("overrule", lambda wrong=wrong: {**RIGHT, name: wrong})
        right = wrong == RIGHT[name]
        assert said == "correct" if right else said.startswith(f"not yet right. {name}: not {wrong!r}. "), said
        assert right or len(said.split()) > 12, said


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"starved": "fix first"}, ("full",)),
        ({**RIGHT, "long": "context"}, ("none of the options",)),
        ({**RIGHT, "long": ["sequence"]}, ("none of the options",)),
        (list(RIGHT.values()), ("dictionary",)),
        (None, ("dictionary",)),
    ],
)
def test_overrule_rejects(chosen, words, rejects):
    rejects("overrule", lambda: chosen, *words)
