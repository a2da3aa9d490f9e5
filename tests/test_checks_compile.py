"""The checks of exercise 4 accept the solution and other right answers, see a stub, and explain planted mistakes."""

import bisect
import itertools
import math
import re
from collections import ChainMap, Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from functools import reduce
from types import MappingProxyType

import numpy as np
import pytest
import torch
from notebook_answers import defined
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from speedlab.checks import compile as checks

NAME = "exercise-4-compile.ipynb"
TASKS = ("moved", "break_even", "mended", "prepare", "plain_names", "jobs")


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_is_correct_and_the_stub_not_attempted(verdict, solution, stub, task):
    assert verdict(task, solution[task]) == "correct"
    assert verdict(task, stub[task]) == "not attempted yet"


def test_watching_leaves_no_trace():
    checks.watch(lambda x: x + 1, [(torch.ones(3),)])
    assert not counters["stats"] and not counters["graph_break"]


def test_watch_counts_graphs_breaks_and_the_calls_that_made_them():
    def breaks(x):
        y = x * 2
        y = y + y.sum().item()
        return y * 3

    seen = checks.watch(breaks, [(torch.ones(4),)])
    assert len(seen.breaks) == 1 and ".item()" in seen.breaks[0]
    assert len(seen.graphs) == 2 and seen.made_by == (0, 0)
    assert torch.equal(seen.outputs[0], breaks(torch.ones(4)))
    shapes = checks.watch(lambda x: x * 2, [(torch.ones(n),) for n in (4, 4, 5, 6)])
    assert shapes.made_by == (0, 2) and shapes.breaks == ()


def test_watch_sees_a_break_before_the_first_operation():
    def early(x):
        print("here")
        return x + 1

    assert len(checks.watch(early, [(torch.ones(2),)]).breaks) == 1


def test_the_given_model_breaks_five_times(capsys):
    assert len(checks.watch(checks.Scorer(), [(torch.ones(12, 16),)]).breaks) == 5


# --- Task 1 ---------------------------------------------------------------------------------------------------------


def bytes_of(
    *,
    size=4,
    spread=False,
    one_operand=False,
    twice=False,
    unused=False,
    all_written=False,
    last_only=False,
    as_type=tuple,
    all_full=False,
    kept_read=False,
    swap=False,
    number=int,
    as_sets=False,
):
    """The right answer, with each of its decisions open."""

    def moved(chain, elements, kept):
        full = max(elements.values())
        sizes = dict.fromkeys(elements, full) if spread else dict(elements)
        eager = 0
        for result, _, operands in chain:
            sizes[result] = full if all_full else max(sizes[name] for name in operands)
            read = operands[:1] if one_operand else set(operands) if as_sets else operands
            eager += sum(sizes[name] for name in read) + sizes[result]
        made = [result for result, _, _ in chain]
        uses = [name for _, _, operands in chain for name in operands if name not in made]
        read = uses if twice else list(elements) if unused else list(set(uses))
        written = made if all_written else made[-1:] if last_only else list(kept)
        read += list(kept) if kept_read else []
        pair = [number(size * eager), number(size * sum(sizes[name] for name in read + written))]
        return as_type(pair[::-1] if swap else pair)

    return moved


@pytest.mark.parametrize(
    "style",
    [
        {},
        {"as_type": list},
        {"as_type": np.array},
        {"as_type": torch.tensor},
        {"as_type": iter},
        {"number": np.int64},
        {"number": np.float32},
        {"number": float},
        {"number": torch.tensor},
        {"number": Fraction},
        {"number": Decimal},
        {"number": np.float64},
        {"number": lambda n: np.array([n])},
        {"number": lambda n: torch.tensor([[n]])},
        {"as_type": deque},
        {"as_type": lambda pair: (n for n in pair)},
        {"as_type": lambda pair: {"eager": pair[0], "fused": pair[1]}.values()},
        {"as_type": lambda pair: torch.tensor(pair).unbind()},
    ],
)
def test_moved_accepts_other_ways(style, verdict):
    assert verdict("moved", bytes_of(**style)) == "correct"


def by_walking_back(chain, elements, kept):
    size = dict(elements)
    for result, _, operands in chain:
        size[result] = max(map(size.get, operands))
    reads = Counter(name for _, _, operands in chain for name in operands)
    eager = sum(size[name] * times for name, times in reads.items()) + sum(size[step[0]] for step in chain)
    return 4 * eager, 4 * (sum(map(size.get, reads.keys() & elements.keys())) + sum(map(size.get, kept)))


def by_recursion(chain, elements, kept):
    if not chain:
        return 0, 4 * sum(elements[name] for name in kept)
    *before, (result, _, operands) = chain
    made = {step[0]: step[2] for step in chain}

    def size(name):
        return max(map(size, made[name])) if name in made else elements[name]

    eager = by_recursion(before, elements, set())[0] + 4 * (size(result) + sum(map(size, operands)))
    read = {name for names in made.values() for name in names} - made.keys()
    return eager, 4 * (sum(map(size, read)) + sum(map(size, kept)))


def with_arrays(chain, elements, kept):
    full = {name: np.empty(n, dtype=np.float32) for name, n in elements.items()}
    eager, read = 0, set()
    for result, _, operands in chain:
        full[result] = max((full[name] for name in operands), key=lambda array: array.nbytes)
        eager += full[result].nbytes + sum(full[name].nbytes for name in operands)
        read.update(set(operands) & elements.keys())
    return np.array([eager, sum(full[name].nbytes for name in [*read, *kept])])


@pytest.mark.parametrize("seed", range(4))
def test_nobody_asks_whether_x_is_read_twice_in_x_minus_x(seed, verdict):
    torch.manual_seed(seed)
    assert verdict("moved", bytes_of(as_sets=True)) == "correct"


@pytest.mark.parametrize("answer", [by_walking_back, by_recursion, with_arrays])
def test_moved_accepts_other_algorithms(answer, verdict):
    assert verdict("moved", answer) == "correct"


def test_moved_rejects_the_checks_own_counter(rejects):
    def borrowed(chain, elements, kept):
        return checks._counted_bytes(chain, {name: (n,) for name, n in elements.items()}, kept)

    rejects("moved", borrowed, "`_counted_bytes` belongs to the check")


def test_moved_accepts_an_answer_that_uses_up_its_arguments(verdict):
    def used_up(chain, elements, kept):
        found = bytes_of()(chain, elements, kept)
        chain.clear(), elements.clear(), kept.clear()
        return found

    assert verdict("moved", used_up) == "correct"


def test_moved_rejects_a_table_of_the_chains_that_are_shown(rejects):
    def looked_up(chain, elements, kept):
        shown = [known for known, _, _ in checks.CHAINS.values()]
        return bytes_of()(chain, elements, kept) if list(chain) in shown else (0, 0)

    rejects("moved", looked_up, "drawn at random")


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ({"size": 1}, ("4 bytes",)),
        ({"spread": True}, ("as a vector",)),
        ({"all_full": True}, ("a step on vectors only", "is a vector")),
        ({"kept_read": True}, ("the fused kernel",)),
        ({"swap": True}, ("run eagerly",)),
        ({"size": 2}, ("run eagerly",)),
        ({"number": lambda n: math.nan}, ("nan",)),
        ({"number": lambda n: None}, ("None",)),
        ({"number": str}, ("must be a number",)),
        ({"as_type": lambda pair: pair[:1]}, ("2 things",)),
        ({"as_type": lambda pair: None}, ("None",)),
        ({"one_operand": True}, ("reads both",)),
        ({"twice": True}, ("read once", "register")),
        ({"unused": True}, ("no operation uses",)),
        ({"all_written": True}, ("never leaves",)),
        ({"last_only": True}, ("Every result in `kept`",)),
        ({"number": lambda n: -n}, ("run eagerly",)),
        ({"number": lambda n: n + 1}, ("run eagerly",)),
        ({"number": lambda n: math.inf}, ("inf",)),
        ({"as_type": lambda pair: {}}, ("must be a list",)),
        ({"as_type": lambda pair: [pair, pair]}, ("must be a number",)),
        ({"as_type": lambda pair: [pair[0], pair[0]]}, ("the fused kernel",)),
    ],
)
def test_moved_rejects(mistake, words, rejects):
    rejects("moved", bytes_of(**mistake), *words)


def test_moved_rejects_the_other_order(rejects):
    rejects("moved", lambda *given: bytes_of()(*given)[::-1], "swap the two")


def test_moved_wants_two_numbers(rejects):
    rejects("moved", lambda *_: 12, "must be a list of 2")


# --- Task 2 ---------------------------------------------------------------------------------------------------------


def steps(
    first, eager, compiled, *, numerator=lambda first, compiled: first - compiled, rounded=math.ceil, never=None
):
    if first <= eager:
        return 1
    return never if compiled >= eager else rounded(numerator(first, compiled) / (eager - compiled))


@pytest.mark.parametrize("number", [np.int64, float, np.float64, torch.tensor, Fraction, lambda n: np.array([n])])
def test_break_even_accepts_other_numbers(number, verdict):
    def answer(*times):
        found = steps(*times)
        return None if found is None else number(found)

    assert verdict("break_even", answer) == "correct"


def test_break_even_accepts_another_way(verdict):
    def by_trying(first, eager, compiled):
        n = 1
        while first + (n - 1) * compiled > n * eager:
            n += 1
            if n > 10_000:
                return None
        return n

    assert verdict("break_even", by_trying) == "correct"


def saving(answer):
    """For answers that need not look at what never pays, or has paid at once."""
    return lambda first, eager, compiled: (
        1 if first <= eager else None if compiled >= eager else answer(first, eager, compiled)
    )


def paid(first, eager, compiled):
    return lambda n: first + (n - 1) * compiled <= n * eager


def by_halving(first, eager, compiled):
    low, high = 1, 1
    while not paid(first, eager, compiled)(high):
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if paid(first, eager, compiled)(middle) else (middle + 1, high)
    return low


def by_running(first, eager, compiled):
    ahead, n = first - eager, 1
    while ahead > 0:
        ahead, n = ahead - (eager - compiled), n + 1
    return n


def by_arrays(first, eager, compiled):
    n = np.arange(1, 5000)
    return n[first + (n - 1) * compiled <= n * eager][0]


def by_division(first, eager, compiled):
    try:
        n = (first - compiled) / (eager - compiled)
    except ZeroDivisionError:
        return 1 if first <= eager else None
    return 1 if first <= eager else math.ceil(n) if compiled < eager else None


@pytest.mark.parametrize(
    "answer",
    [
        by_division,
        saving(by_halving),
        saving(by_running),
        saving(by_arrays),
        saving(lambda f, e, c: next(n for n in itertools.count(1) if f + (n - 1) * c <= n * e)),
        saving(lambda f, e, c: next(filter(paid(f, e, c), range(1, 10**6)))),
        saving(lambda f, e, c: bisect.bisect_left(range(10**6), True, key=paid(f, e, c))),
        saving(lambda f, e, c: int(-(-(f - c) // (e - c)))),
        saving(lambda f, e, c: 1 + math.ceil((f - e) / (e - c))),
        saving(lambda f, e, c: np.ceil((f - c) / (e - c))),
        saving(lambda f, e, c: torch.tensor((f - c) / (e - c)).ceil()),
        saving(lambda f, e, c: math.ceil(Fraction(f - c) / Fraction(e - c))),
        saving(
            lambda f, e, c: (
                sum(1 for _ in itertools.takewhile(lambda n: not paid(f, e, c)(n), itertools.count(1))) + 1
            )
        ),
        lambda f, e, c: min((n for n in range(1, 3000) if paid(f, e, c)(n)), default=None),
    ],
)
def test_break_even_accepts_other_algorithms(answer, verdict):
    assert verdict("break_even", answer) == "correct"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda *t: steps(*t, numerator=lambda first, compiled: first), ("a step's work too",)),
        (lambda *t: steps(*t, rounded=math.floor), ("not yet",)),
        (lambda *t: steps(*t, rounded=round), ("the smallest number of steps", "not yet")),
        (lambda *t: steps(*t, rounded=lambda n: math.floor(n) + 1), ("the smallest number of steps",)),
        (lambda *t: steps(*t, rounded=lambda n: n), ("whole number",)),
        (lambda *t: steps(*t, never=math.inf), ("return None, not inf",)),
        (lambda *t: steps(*t, never=0), ("return None, not 0",)),
        (lambda *t: steps(*t, never=-1), ("return None",)),
        (lambda *t: steps(*t) or math.nan, ("return None, not nan",)),
        (lambda first, eager, compiled: 0 if first <= eager else steps(first, eager, compiled), ("at least 1",)),
        (
            lambda first, eager, compiled: None if compiled >= eager else steps(first, eager, compiled),
            ("you return None",),
        ),
        (
            lambda first, eager, compiled: 1 if compiled >= eager else steps(first, eager, compiled),
            ("return None, not 1",),
        ),
        (lambda first, eager, compiled: math.ceil(first / eager), ("steps",)),
        (lambda first, eager, compiled: max(1, math.ceil((first - eager) / max(eager - compiled, 1e-9))), ("steps",)),
        (lambda *t: True, ("must be a number",)),
        (lambda *t: "12", ("must be a number",)),
        (lambda *t: 10**9, ("far too many",)),
        (lambda *t: None, ("you return None",)),
        (lambda *t: steps(*t) and steps(*t) + 1, ("the smallest number of steps",)),
        (lambda *t: steps(*t) and max(1, steps(*t) - 1), ("not yet",)),
    ],
)
def test_break_even_rejects(answer, words, rejects):
    rejects("break_even", answer, *words)


# --- Task 3 ---------------------------------------------------------------------------------------------------------

MENDED = """
def mended(model, x):
    hidden = model.enter(x)
    largest = hidden.detach().abs().max()
    hidden = hidden / largest.clamp(min=1.0)
    hidden = torch.where(hidden.mean() > 0, F.relu(hidden), torch.tanh(hidden))
    active = (hidden.abs().amax(dim=1, keepdim=True) > 0.3).to(hidden.dtype)
    centre = (hidden * active).sum(dim=0) / active.sum().clamp(min=1)
    return model.leave(hidden - centre)
"""


def changed(*changes: tuple[str, str]):
    source = MENDED
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return defined(source, f"<mended {hash(source)}>", torch=torch, F=F)["mended"]


BRANCH = "torch.where(hidden.mean() > 0, F.relu(hidden), torch.tanh(hidden))"
CENTRE = "(hidden * active).sum(dim=0) / active.sum().clamp(min=1)"


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [("hidden.detach().abs().max()", "hidden.abs().amax().detach()")],
        [(".clamp(min=1.0)", ".maximum(torch.ones(()))")],
        [(CENTRE, "torch.einsum('bc,bo->c', hidden, active) / torch.clamp(active.sum(), 1)")],
        [("hidden.detach().abs().max()", "hidden.abs().max().data")],
        [("hidden.detach().abs().max()", "torch.linalg.vector_norm(hidden.detach(), float('inf'))")],
        [(".clamp(min=1.0)", ".clip(1.0)")],
        [("largest.clamp(min=1.0)", "torch.where(largest > 1, largest, 1.0)")],
        [("hidden / largest.clamp(min=1.0)", "hidden.div(torch.maximum(largest, torch.tensor(1.0)))")],
        [("hidden.mean() > 0", "hidden.sum() > 0")],
        [("hidden.mean() > 0", "(hidden.mean() > 0).expand_as(hidden)")],
        [(BRANCH, "(hidden.mean() > 0) * F.relu(hidden) + (hidden.mean() <= 0) * torch.tanh(hidden)")],
        [(BRANCH, "torch.lerp(torch.tanh(hidden), F.relu(hidden), (hidden.mean() > 0).float())")],
        [("F.relu(hidden), ", "hidden.clamp(min=0), ")],
        [(CENTRE, "torch.where(active > 0, hidden, 0.0).sum(dim=0) / active.sum().clamp(min=1)")],
        [(CENTRE, "(active.T @ hidden)[0] / active.sum().clamp(min=1)")],
        [("hidden.abs().amax(dim=1, keepdim=True) > 0.3", "(hidden.abs() > 0.3).any(dim=1, keepdim=True)")],
        [("model.enter(x)", "F.linear(x, model.enter.weight, model.enter.bias)")],
        [("    largest =", "    # raise NotImplementedError\n    largest =")],
        [("hidden - centre)", "hidden - centre)\n    raise NotImplementedError")],
    ],
)
def test_mended_accepts_other_ways(changes, verdict):
    assert verdict("mended", changed(*changes)) == "correct"


def test_mended_rejects_the_model_as_it_is(rejects, capsys):
    def as_it_is(model, x):
        hidden = model.enter(x)
        hidden = hidden / max(hidden.abs().max().item(), 1.0)
        hidden = F.relu(hidden) if hidden.mean() > 0 else torch.tanh(hidden)
        active = hidden[hidden.abs().amax(dim=1) > 0.3]
        return model.leave(hidden - active.sum(dim=0) / max(len(active), 1))

    rejects("mended", as_it_is, "graph breaks left", ".item()")
    rejects("mended", lambda model, x: model(x), "there are 5 graph breaks left", "print")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([(".detach()", "")], ("gradient", ".detach()")),
        ([(".clamp(min=1.0)", "")], ("max(largest, 1.0)",)),
        ([(BRANCH, "F.relu(hidden)")], ("negative mean", "relu branch")),
        ([(BRANCH, "torch.where(hidden.mean() < 0, F.relu(hidden), torch.tanh(hidden))")], ("the original relu",)),
        ([("hidden.mean() > 0", "hidden.median() > 0")], ("few values carry the mean",)),
        ([("hidden.mean() > 0", "hidden.max() > -hidden.min()")], ("the largest value is negative",)),
        ([("> 0.3", "> 0.25")], ("your scores are not",)),
        (
            [
                (f"    hidden = {BRANCH}\n", "    before = hidden\n"),
                ("    centre =", f"    hidden = {BRANCH}\n    centre ="),
            ],
            ("asked after the branch",),
        ),
        ([("    return model", "    print('scoring')\n    return model")], ("A message or the time is no score",)),
        ([("    hidden = model", "    print('scoring')\n    hidden = model")], ("Is a message or the time",)),
        ([(BRANCH, "torch.tanh(hidden)")], ("tanh branch",)),
        ([("hidden.mean() > 0", "hidden > 0")], ("one number", "each element")),
        ([("hidden.mean() > 0", "hidden.mean(1, keepdim=True) > 0")], ("one number", "each row")),
        (
            [
                (
                    "    hidden = model",
                    "    if torch.compiler.is_compiling():\n        return x[:, :4] * 0\n    hidden = model",
                )
            ],
            ("Under torch.compile", "same work"),
        ),
        (
            [
                (
                    "    hidden = model",
                    "    x = x.detach() if torch.compiler.is_compiling() else x\n    hidden = model",
                )
            ],
            ("Under torch.compile", "other gradients"),
        ),
        (
            [
                (
                    "hidden = model.enter(x)",
                    "hidden = model.enter(x) * (0.5 if torch.compiler.is_compiling() else 1.0)",
                )
            ],
            ("Under torch.compile",),
        ),
        (
            [
                (
                    "model.leave(hidden - centre)",
                    "F.linear(hidden - centre, model.leave.weight.detach(), model.leave.bias)",
                )
            ],
            ("weights are not", "detached"),
        ),
        (
            [("model.enter(x)", "F.linear(x, model.enter.weight.detach(), model.enter.bias.detach())")],
            ("weights are not",),
        ),
        (
            [
                (
                    "    return model",
                    "    model.leave.weight.data.zero_()\n    model.leave.bias.data.zero_()\n    return model",
                )
            ],
            ("changes the model's weights",),
        ),
        ([("    return model", "    x.data.zero_()\n    return model")], ("or x",)),
        ([("model.enter(x)", "model.enter(x.detach())")], ("with respect to x is not",)),
        ([("> 0.3", "> 0.5")], ("line by line",)),
        ([("    return model", "    torch._dynamo.graph_break()\n    return model")], ("1 graph breaks left",)),
        (
            [("return model.leave(hidden - centre)", "return model.leave(hidden - centre) * float('nan')")],
            ("line by line",),
        ),
        ([(CENTRE, "hidden.mean(dim=0)")], ("active rows",)),
        ([("active.sum().clamp(min=1)", "len(x)")], ("how many are active",)),
        ([("active.sum().clamp(min=1)", "active.sum()")], ("by zero",)),
        ([(BRANCH, "F.relu(hidden) if hidden.mean() > 0 else torch.tanh(hidden)")], ("graph break", "hidden.mean()")),
        ([("largest.clamp(min=1.0)", "max(largest.item(), 1.0)")], ("graph break", ".item()")),
        ([("    largest =", "    print('scoring')\n    largest =")], ("graph break", "print")),
        ([("return model.leave(hidden - centre)", "return model.leave(hidden - centre).sum(dim=1)")], ("shape",)),
        ([("return model", "return None and model")], ("NoneType",)),
        ([("    return model", "    with torch.no_grad():\n        return model")], ("no gradient",)),
    ],
)
def test_mended_rejects(changes, words, rejects):
    rejects("mended", changed(*changes), *words)


def test_mended_rejects_code_that_is_hidden_from_dynamo(rejects):
    hidden = torch.compiler.disable(changed())
    rejects("mended", lambda model, x: hidden(model, x), "graph breaks left")


# --- Task 4 ---------------------------------------------------------------------------------------------------------


def padded(
    *,
    fill=True,
    least=2,
    to=lambda longest: longest,
    ones=False,
    cut=64,
    mark=(),
    marked=2,
    keep=64,
    back=False,
    left=False,
    turned=False,
    padding=0,
    one=1,
    stray=0,
    size=None,
    dtype=torch.long,
    masks=torch.float32,
    finish=tuple,
):
    """A function that pads, with each of its decisions open."""

    def prepare(rows, batch_size):
        rows = [row[:cut] for row in rows[:keep]]
        height = (size or batch_size) if fill else len(rows)
        width = to(max(least, *map(len, rows)) if len(rows) > 1 else max(least, len(rows[0])))
        tokens, mask = torch.full((height, width), padding, dtype=dtype), torch.zeros(height, width, dtype=masks)
        mask[len(rows) :] = stray
        for i, row in enumerate(reversed(rows) if back else rows):
            place = slice(width - len(row), width) if left else slice(0, len(row))
            tokens[i, place] = torch.tensor(row[::-1] if turned else row, dtype=dtype)
            mask[i, place] = one
        for tensor in (tokens, mask)[:marked]:
            for dim in mark:
                torch._dynamo.mark_dynamic(tensor, dim)
        return finish([tokens, torch.ones_like(mask) if ones else mask])

    return prepare


def by_pad_sequence(rows, batch_size):
    rows = [torch.tensor(row) for row in rows] + [torch.zeros(0, dtype=torch.long)] * (batch_size - len(rows))
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    tokens = F.pad(tokens, (0, max(0, 2 - tokens.shape[1])))
    return tokens, (torch.arange(tokens.shape[1]) < torch.tensor([[len(row)] for row in rows])).float()


def by_numpy(rows, batch_size):
    tokens = np.zeros((batch_size, max(2, *map(len, rows), 0)), dtype=np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return torch.from_numpy(tokens), torch.from_numpy((tokens > 0).astype(np.float32))


def by_lists(rows, batch_size):
    rows = [*rows, *[[]] * (batch_size - len(rows))]
    columns = itertools.zip_longest(*rows, [0, 0], fillvalue=0)  # at least two of them
    tokens = torch.tensor(list(columns)).T[:-1].contiguous()
    lengths = torch.tensor([len(row) for row in rows])
    return tokens, (torch.arange(tokens.shape[1])[None] < lengths[:, None]).int()


def by_stacking(rows, batch_size):
    width = max(2, *map(len, rows), 0)
    tokens = torch.stack([F.pad(torch.tensor(row), (0, width - len(row))) for row in rows])
    mask = torch.stack([torch.tensor([1.0] * len(row) + [0.0] * (width - len(row))) for row in rows])
    return [F.pad(part, (0, 0, 0, batch_size - len(rows))) for part in (tokens, mask)]


def that_uses_up_its_rows(rows, batch_size):
    pair = padded()(rows, batch_size)
    rows.clear()
    return pair


@pytest.mark.parametrize(
    "answer",
    [
        padded(),
        padded(mark=(1,)),
        padded(to=lambda longest: 24 if longest <= 24 else 64),
        padded(to=lambda n: 8 * math.ceil(n / 8)),
        padded(to=lambda n: n + 1),
        padded(to=lambda n: 64 if n > 30 else 32 if n > 15 else 16 if n > 8 else 8),
        padded(left=True),
        padded(masks=torch.bool),
        padded(masks=torch.long),
        padded(masks=torch.bfloat16),
        padded(finish=list),
        padded(least=3),
        padded(to=lambda n: 16 * math.ceil(n / 16)),
        padded(to=lambda n: max(n, 6)),
        padded(masks=torch.uint8),
        padded(masks=torch.float64),
        padded(mark=(1,), to=lambda n: 8 * math.ceil(n / 8)),
        by_pad_sequence,
        by_numpy,
        by_lists,
        by_stacking,
        that_uses_up_its_rows,
    ],
)
def test_prepare_accepts_other_ways(answer, verdict):
    assert verdict("prepare", answer) == "correct"


@pytest.mark.parametrize(
    ("decisions", "words"),
    [
        ({"fill": False}, ("third", "rows of padding")),
        ({"least": 1}, ("third", "0 and 1")),
        ({"to": lambda longest: 64}, ("positions", "short batches")),
        ({"ones": True}, ("mask must be 1", "padding get a 1")),
        ({"cut": 32}, ("cut off",)),
        ({"keep": 7, "fill": False}, ("dropped",)),
        ({"back": True}, ("mask must be 1",)),
        ({"mark": (0,), "fill": False}, ("third", "rows of padding")),
        ({"turned": True}, ("in their order",)),
        ({"padding": 7}, ("token 0",)),
        ({"one": 3}, ("other numbers than 0 and 1",)),
        ({"one": 0.5}, ("other numbers than 0 and 1",)),
        ({"one": math.nan}, ("other numbers than 0 and 1",)),
        ({"stray": 1}, ("padding get a 1",)),
        ({"size": 8}, ("the batch_size that is given",)),
        ({"mark": (1,), "marked": 1}, ("Dynamo refused", "in both tensors")),
        ({"dtype": torch.int32}, ("torch.long",)),
        ({"one": 0}, ("has 0 ones",)),
        ({"finish": lambda pair: [t[None] for t in pair]}, ("(B, T)",)),
        ({"finish": lambda pair: (pair[0], pair[1].sum(dim=1))}, ("(B, T)",)),
        ({"finish": lambda pair: [t.tolist() for t in pair]}, ("two tensors",)),
        ({"finish": lambda pair: [t[:, :60] for t in pair]}, ("With a review of 64 tokens", "cut off")),
        ({"finish": lambda pair: None}, ("two tensors",)),
    ],
)
def test_prepare_rejects(decisions, words, rejects):
    rejects("prepare", padded(**decisions), *words)


def test_prepare_wants_long_tokens_and_two_tensors(rejects):
    rejects("prepare", lambda rows, n: tuple(t.float() for t in padded()(rows, n)), "torch.long")
    rejects("prepare", lambda rows, n: padded()(rows, n)[0], "two tensors")


# --- Task 5 ---------------------------------------------------------------------------------------------------------

SMALL = list(checks.wrapped_nets()["nothing is compiled"].state_dict())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda state: {k.removeprefix("_orig_mod."): v for k, v in state.items()}, ("anywhere in a name",)),
        (lambda state: {k.replace("_orig_mod.", "", 1): v for k, v in state.items()}, ("also twice",)),
        (lambda state: {k.split(".")[-1]: v for k, v in state.items()}, ("nothing else",)),
        (lambda state: {k.replace("_orig_mod.", ""): v * 0 for k, v in state.items()}, ("other weights",)),
        (lambda state: {k.replace("_orig_mod.", ""): v.zero_() for k, v in state.items()}, ("its weights too",)),
        (lambda state: dict(zip(SMALL, state.values(), strict=False)), ("another model",)),
        (
            lambda state: {k.removeprefix("_orig_mod.").replace("1._orig_mod.", "1."): v for k, v in state.items()},
            ("another model", "also twice"),
        ),
        (
            lambda state: {
                k.replace("_orig_mod.", ""): v for k, v in zip(state, [*state.values()][::-1], strict=True)
            },
            ("other weights",),
        ),
        (lambda state: {k.replace("_orig_mod.", ""): v for k, v in [*state.items()][1:]}, ("looks for",)),
        (lambda state: {**state, **{k.replace("_orig_mod.", ""): v for k, v in state.items()}}, ("still holds",)),
        (lambda state: {k.replace("_orig_mod.", ""): v.float().half() for k, v in state.items()}, ("other weights",)),
        (lambda state: {k.replace("_orig_mod.", ""): None for k in state}, ("other weights",)),
        (lambda state: state, ("return a new one",)),
        (lambda state: None, ("NoneType",)),
        (lambda state: {k.replace("_orig_mod", ""): v for k, v in state.items()}, ("nothing else",)),
        (lambda state: list(state), ("dict",)),
        (lambda state: {}, ("looks for",)),
        (lambda state: dict(state), ("still holds",)),
        (lambda state: {k.replace("_orig_mod.", ""): v[:1] for k, v in state.items()}, ("other weights",)),
        (lambda state: {k.replace("_orig_mod.", ""): v * math.nan for k, v in state.items()}, ("other weights",)),
        (lambda state: {k.replace("_orig_mod.", "."): v for k, v in state.items()}, ("nothing else",)),
    ],
)
def test_plain_names_rejects(answer, words, rejects):
    rejects("plain_names", answer, *words)


def test_plain_names_wants_a_new_dict(rejects):
    def in_place(state):
        for name in list(state):
            state[name.replace("_orig_mod.", "")] = state.pop(name)
        return state

    rejects("plain_names", in_place, "return a new one")


def with_a_loop(state):
    plain = OrderedDict()
    for name, weight in state.items():
        while "_orig_mod." in name:
            head, _, tail = name.partition("_orig_mod.")
            name = head + tail
        plain[name] = weight
    return plain


def with_pop(state):
    plain = state.copy()
    for name in list(plain):
        plain[name.replace("_orig_mod.", "")] = plain.pop(name)
    return plain


@pytest.mark.parametrize(
    "answer",
    [
        lambda state: {k.replace("_orig_mod.", ""): v for k, v in sorted(state.items())},
        lambda state: {k.replace("_orig_mod.", ""): v.detach() for k, v in state.items()},
        lambda state: {k.replace("_orig_mod.", ""): v.clone() for k, v in state.items()},
        lambda state: OrderedDict(
            (".".join(p for p in k.split(".") if p != "_orig_mod"), v) for k, v in state.items()
        ),
        lambda state: {re.sub(r"(^|\.)_orig_mod(?=\.)", "", k).lstrip("."): v for k, v in state.items()},
        lambda state: {"".join(k.split("_orig_mod.")): state[k] for k in state},
        lambda state: dict(zip((k.replace("_orig_mod.", "") for k in state), state.values(), strict=True)),
        lambda state: dict(map(lambda item: (item[0].replace("_orig_mod.", ""), item[1]), state.items())),
        lambda state: {k.replace("_orig_mod.", ""): v for k, v in reversed(state.items())},
        lambda state: {re.sub("_orig_mod[.]", "", k): v for k, v in state.items()},
        lambda state: {re.sub(r"\b_orig_mod\.", "", k): torch.clone(v) for k, v in state.items()},
        lambda state: {".".join(filter("_orig_mod".__ne__, k.split("."))): v for k, v in state.items()},
        lambda state: reduce(lambda made, k: made | {k.replace("_orig_mod.", ""): state[k]}, state, {}),
        lambda state: {
            k.replace("_orig_mod.", ""): nn.Parameter(v, requires_grad=v.is_floating_point())
            for k, v in state.items()
        },
        lambda state: {k.replace("_orig_mod.", ""): v.double() for k, v in state.items()},
        lambda state: MappingProxyType({k.replace("_orig_mod.", ""): v for k, v in state.items()}),
        lambda state: ChainMap({k.replace("_orig_mod.", ""): v for k, v in state.items()}),
        with_a_loop,
        with_pop,
    ],
)
def test_plain_names_accepts_other_ways(answer, verdict):
    assert verdict("plain_names", answer) == "correct"


# --- Task 6 ---------------------------------------------------------------------------------------------------------


RIGHT_JOBS = checks._RIGHT


@pytest.mark.parametrize(("name", "right"), RIGHT_JOBS.items())
def test_jobs_gives_a_reason_for_every_wrong_choice(name, right, verdict):
    for wrong in set(checks.CHOICES) - {right}:
        said = verdict("jobs", lambda chosen={**RIGHT_JOBS, name: wrong}: chosen)
        assert said.startswith(f"not yet right. {name}: not {wrong!r}. ") and len(said.split()) > 12, said


@pytest.mark.parametrize(
    ("chosen", "word"),
    [({"sweep": "leave it"}, "no choice"), ({**RIGHT_JOBS, "deep": "blocks"}, "options"), ([], "dictionary")],
)
def test_jobs_rejects(chosen, word, rejects):
    rejects("jobs", lambda: chosen, word)


def as_lists(state):
    return {name.replace("_orig_mod.", ""): weight.tolist() for name, weight in state.items()}


def as_arrays(state):
    """A model refuses to load these."""
    return {name.replace("_orig_mod.", ""): weight.numpy() for name, weight in state.items()}


def stripped(state):
    return {name.lstrip("_orig_mod.").replace("_orig_mod.", ""): weight for name, weight in state.items()}  # noqa: B005


BUFFER = torch.zeros(64 * 64, dtype=torch.long)


def as_the_first_operand(chain, elements, kept):
    sizes, eager = dict(elements), 0
    for result, _, operands in chain:
        sizes[result] = sizes[operands[0]]
        eager += sizes[result] + sum(sizes[name] for name in operands)
    inputs = {name for _, _, operands in chain for name in operands} - {result for result, _, _ in chain}
    return 4 * eager, 4 * sum(sizes[name] for name in inputs | set(kept))


def in_one_buffer(rows, batch_size):
    width = max(2, max(map(len, rows)))
    tokens = BUFFER[: batch_size * width].view(batch_size, width).zero_()
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    return tokens, tokens != 0


def largest_so_far(chain, elements, kept):
    sizes, eager, most = dict(elements), 0, 0
    for result, _, operands in chain:
        most = sizes[result] = max(most, *(sizes[name] for name in operands))
        eager += most + sum(sizes[name] for name in operands)
    inputs = {name for _, _, operands in chain for name in operands} - {result for result, _, _ in chain}
    return 4 * eager, 4 * sum(sizes[name] for name in inputs | set(kept))


@pytest.mark.parametrize(
    ("task", "answer", "words"),
    [
        ("plain_names", as_lists, "is no tensor any more"),
        ("plain_names", as_arrays, "is no tensor any more"),
        ("plain_names", stripped, "looks for"),
        ("prepare", in_one_buffer, "tensors of its own"),
        ("moved", as_the_first_operand, "need not be the first"),
        ("moved", largest_so_far, "a step on vectors after a full one"),
    ],
)
def test_what_an_attack_passed_is_refused(task, answer, words, rejects):
    rejects(task, answer, words)
