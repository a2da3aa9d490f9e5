"""The checks of exercise 2 accept the solution and other right answers, see a stub, and explain planted mistakes."""

import math

import psutil
import pytest
import torch
from notebook_answers import defined

from speedlab.checks import parallelism as checks

NAME = "exercise-2-parallelism.ipynb"


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


def changed(source: str, *changes: tuple[str, str]) -> object:
    """The function of a source with some of its lines replaced."""
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names = defined(source, f"<changed {hash(source)}>", torch=torch, math=math)
    return names.get("ring_all_reduce") or names["column_linear"]


def test_ring_accepts_a_ring_that_turns_the_other_way(verdict):
    assert verdict("ring_all_reduce", changed(LEFTWARD)) == "correct"


ADD = "            arriving.add_(received)\n"
RING_MISTAKES = {
    "sends everything to everybody": ([EVERYBODY], ["everybody", "one chunk in each"]),
    "rank 0 does it all": ([CENTRAL], ["a rank sends", "2 (world_size - 1) steps"]),
    "passes whole tensors round": ([SHIFTED], ["a rank sends", "chunks"]),
    "adds in both phases": ([RING, ("arriving.copy_(received)", "arriving.add_(received)")], ["copied, not added"]),
    "stops after the first phase": ([RING, ("range(2 * (world_size - 1))", "range(world_size - 1)")], ["finished"]),
    "one step too few": ([RING, ("range(2 * (world_size - 1))", "range(2 * world_size - 3)")], ["sum"]),
    "forgets to write": ([RING, (ADD, "            arriving = arriving + received\n")], ["no rank", "view"]),
    "sends to nobody": ([RING, ("(rank + 1) % world_size, (rank - 1)", "rank + 1, (rank - 1)")], ["modulo"]),
    "receives before it sends": (
        [RING, ("        send(leaving, right)\n", ""), (ADD, ADD + "            send(leaving, right)\n")],
        ["waits", "before it receives"],
    ),
    "the wrong chunk arrives": ([RING, ("rank - step - 1", "rank - step + 1")], []),
}


@pytest.mark.parametrize("mistake", RING_MISTAKES)
def test_ring_rejects(mistake, rejects):
    (source, *changes), words = RING_MISTAKES[mistake]
    rejects("ring_all_reduce", changed(source, *changes), *words)


def test_ring_tells_a_mean_from_a_sum(rejects):
    ring = changed(RING)

    def mean(tensor, rank, world_size, send, receive):
        ring(tensor, rank, world_size, send, receive)
        tensor /= world_size

    rejects("ring_all_reduce", mean, "mean", "sums")


def test_an_error_on_one_rank_is_told_and_not_that_the_others_waited(verdict):
    ring = changed(RING)

    def broken(tensor, rank, world_size, send, receive):
        if rank == 1:
            raise KeyError("planted")
        ring(tensor, rank, world_size, send, receive)

    said = verdict("ring_all_reduce", broken)
    assert "raised KeyError" in said and "planted" in said and "waits" not in said


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
GRADIENTS = "all_reduce(grad @ share), grad.T @ x"


def test_column_accepts_a_plain_linear_behind_a_function_that_reduces(verdict):
    assert verdict("column_linear", changed(ENTER)) == "correct"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([("return Column.apply(x, share)", "return x @ share.T")], ["part only", "all_reduce"]),
        ([(GRADIENTS, "grad @ share, grad.T @ x")], ["part only", "all_reduce"]),
        ([(GRADIENTS, "all_reduce(grad @ share), all_reduce(grad.T @ x)")], ["share", "alone"]),
        ([("return x @ share.T", "return all_reduce(x @ share.T)")], ["forward", "finished"]),
        ([(GRADIENTS, "all_reduce(all_reduce(grad @ share) * 0 + grad @ share), grad.T @ x")], ["2 times", "one"]),
        ([(GRADIENTS, "all_reduce(grad @ share) / (2 if len(grad) == 5 else 3), grad.T @ x")], ["mean", "one loss"]),
        ([(GRADIENTS, "all_reduce(grad @ share), None")], ["share", "no gradient"]),
        ([(GRADIENTS, "None, grad.T @ x")], ["x gets no gradient"]),
        ([(GRADIENTS, "grad.T @ x, all_reduce(grad @ share)")], ["gradient"]),
        ([("return Column.apply(x, share)", "return Column.apply(x, share).detach()")], ["apply"]),
        ([("return Column.apply(x, share)", "return Column.apply(x, share).T")], ["shape"]),
        ([("return Column.apply(x, share)", "pass")], ["NoneType"]),
    ],
)
def test_column_rejects(changes, words, verdict):
    said = verdict("column_linear", changed(COLUMN, *changes))
    assert said.startswith("not yet right.") and all(word in said for word in words), said


# --- On real processes ----------------------------------------------------------------------------------------------


def test_the_solution_passes_on_real_processes(solution, verdict):
    assert verdict("processes", solution["ring_all_reduce"], solution["column_linear"]) == "correct"


def test_what_only_the_notebook_knows_is_named(rejects):
    lost = changed(RING, ("list(tensor.tensor_split(world_size))", "my_helper(tensor)"))
    rejects("processes", (lost, changed(COLUMN)), "my_helper", "import what else")


# --- Tasks 3 and 4 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, m: m / (m + p - 1), ("share in which they work",)),
        (lambda p, m: (p - 1) / m, ("whole step",)),
        (lambda p, m: p / (m + p - 1), ("never waits",)),
        (lambda p, m: (p - 1) / (m + p), ("slots",)),
        (lambda p, m: 0.5, ("Count slots",)),
        (lambda p, m: None, ("return",)),
        (lambda p, m: "half", ("number",)),
    ],
)
def test_bubble_rejects(answer, words, rejects):
    rejects("bubble", answer, *words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, limit: math.ceil(p * (1 - limit) / limit), ("more than you need",)),
        (lambda p, limit: math.floor((p - 1) * (1 - limit) / limit), ("too few",)),
        (lambda p, limit: 1, ("too few", "4 stages")),
        (lambda p, limit: (p - 1) * (1 - limit) / limit + 0.5, ("whole number",)),
        (lambda p, limit: 0, ("at least 1",)),
    ],
)
def test_enough_rejects(answer, words, rejects):
    rejects("enough", answer, *words)


# --- Task 5 ---------------------------------------------------------------------------------------------------------

RIGHT = {"hungry": "mend first", "full": "ZeRO-3", "long": "sequence", "thin cable": "pipeline", "spare": "one GPU"}


@pytest.mark.parametrize("name", RIGHT)
def test_overrule_gives_a_reason_for_every_wrong_plan(name, verdict):
    for wrong in set(checks.OPTIONS) - {RIGHT[name]}:
        said = verdict("overrule", lambda wrong=wrong: {**RIGHT, name: wrong})
        assert said.startswith(f"not yet right. {name}: not {wrong}.") and len(said.split()) > 12, said


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"hungry": "mend first"}, ("full",)),
        ({**RIGHT, "long": "context"}, ("none of the options",)),
        (list(RIGHT.values()), ("dictionary",)),
    ],
)
def test_overrule_rejects(chosen, words, rejects):
    rejects("overrule", lambda: chosen, *words)
