"""The checks of exercise 4 accept the solution and other right answers, see a stub, and explain planted mistakes."""

import math

import pytest
import torch
from notebook_answers import defined
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
    *, size=4, spread=False, one_operand=False, twice=False, unused=False, all_written=False, last_only=False
):
    """The right answer, with one of the well-known mistakes."""

    def moved(chain, elements, kept):
        full = max(elements.values())
        sizes = dict.fromkeys(elements, full) if spread else dict(elements)
        eager = 0
        for result, _, operands in chain:
            sizes[result] = max(sizes[name] for name in operands)
            read = operands[:1] if one_operand else operands
            eager += sum(sizes[name] for name in read) + sizes[result]
        made = [result for result, _, _ in chain]
        uses = [name for _, _, operands in chain for name in operands if name not in made]
        read = uses if twice else list(elements) if unused else list(set(uses))
        written = made if all_written else made[-1:] if last_only else list(kept)
        return size * eager, size * sum(elements.get(name, full) for name in read + written)

    return moved


def test_moved_accepts_another_way(verdict):
    assert verdict("moved", bytes_of()) == "correct"


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ({"size": 1}, ("4 bytes",)),
        ({"spread": True}, ("as a vector",)),
        ({"one_operand": True}, ("reads both",)),
        ({"twice": True}, ("read once", "register")),
        ({"unused": True}, ("no operation uses",)),
        ({"all_written": True}, ("never leaves",)),
        ({"last_only": True}, ("Every result in `kept`",)),
    ],
)
def test_moved_rejects(mistake, words, rejects):
    rejects("moved", bytes_of(**mistake), *words)


def test_moved_wants_two_numbers(rejects):
    rejects("moved", lambda *_: 12, "two numbers")


# --- Task 2 ---------------------------------------------------------------------------------------------------------


def steps(
    first, eager, compiled, *, numerator=lambda first, compiled: first - compiled, rounded=math.ceil, never=None
):
    if first <= eager:
        return 1
    return never if compiled >= eager else rounded(numerator(first, compiled) / (eager - compiled))


def test_break_even_accepts_another_way(verdict):
    def by_trying(first, eager, compiled):
        n = 1
        while first + (n - 1) * compiled > n * eager:
            n += 1
            if n > 10_000:
                return None
        return n

    assert verdict("break_even", by_trying) == "correct"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda *t: steps(*t, numerator=lambda first, compiled: first), ("a step's work too",)),
        (lambda *t: steps(*t, rounded=math.floor), ("after your",)),
        (lambda *t: steps(*t, rounded=lambda n: math.floor(n) + 1), ("steps are enough",)),
        (lambda *t: steps(*t, rounded=float), ("whole number",)),
        (lambda *t: steps(*t, never=math.inf), ("None",)),
        (lambda first, eager, compiled: 0 if first <= eager else steps(first, eager, compiled), ("one step",)),
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
    return defined(source, f"<mended {len(source)}>", torch=torch, F=F)["mended"]


BRANCH = "torch.where(hidden.mean() > 0, F.relu(hidden), torch.tanh(hidden))"
CENTRE = "(hidden * active).sum(dim=0) / active.sum().clamp(min=1)"


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [("hidden.detach().abs().max()", "hidden.abs().amax().detach()")],
        [(".clamp(min=1.0)", ".maximum(torch.ones(()))")],
        [(CENTRE, "torch.einsum('bc,bo->c', hidden, active) / torch.clamp(active.sum(), 1)")],
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([(".detach()", "")], ("gradient", ".detach()")),
        ([(".clamp(min=1.0)", "")], ("max(largest, 1.0)",)),
        ([(BRANCH, "F.relu(hidden)")], ("negative mean", "relu branch")),
        ([(BRANCH, "torch.tanh(hidden)")], ("tanh branch",)),
        ([("hidden.mean() > 0", "hidden > 0")], ("one number",)),
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


def padded(*, fill=True, least=2, to=lambda longest: longest, ones=False, cut=64, mark=(), keep=64, back=False):
    """A function that pads, with each of its decisions open."""

    def prepare(rows, batch_size):
        rows = [row[:cut] for row in rows[:keep]]
        height = batch_size if fill else len(rows)
        width = to(max(least, *map(len, rows)) if len(rows) > 1 else max(least, len(rows[0])))
        tokens, mask = torch.zeros(height, width, dtype=torch.long), torch.zeros(height, width)
        for i, row in enumerate(reversed(rows) if back else rows):
            tokens[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = 1
        for tensor in (tokens, mask):
            for dim in mark:
                torch._dynamo.mark_dynamic(tensor, dim)
        return tokens, torch.ones_like(mask) if ones else mask

    return prepare


@pytest.mark.parametrize(
    "decisions",
    [{}, {"mark": (1,)}, {"to": lambda longest: 24 if longest <= 24 else 64}, {"to": lambda n: 8 * math.ceil(n / 8)}],
)
def test_prepare_accepts_other_ways(decisions, verdict):
    assert verdict("prepare", padded(**decisions)) == "correct"


@pytest.mark.parametrize(
    ("decisions", "words"),
    [
        ({"fill": False}, ("third", "rows of padding")),
        ({"least": 1}, ("third", "0 and 1")),
        ({"to": lambda longest: 64}, ("positions", "short batches")),
        ({"ones": True}, ("mask must be 1",)),
        ({"cut": 32}, ("cut off",)),
        ({"keep": 7, "fill": False}, ("dropped",)),
        ({"back": True}, ("mask must be 1",)),
        ({"mark": (0,), "fill": False}, ("third", "rows of padding")),
    ],
)
def test_prepare_rejects(decisions, words, rejects):
    rejects("prepare", padded(**decisions), *words)


def test_prepare_wants_long_tokens_and_two_tensors(rejects):
    rejects("prepare", lambda rows, n: tuple(t.float() for t in padded()(rows, n)), "torch.long")
    rejects("prepare", lambda rows, n: padded()(rows, n)[0], "two tensors")


# --- Task 5 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda state: {k.removeprefix("_orig_mod."): v for k, v in state.items()}, ("anywhere in a name",)),
        (lambda state: {k.replace("_orig_mod.", "", 1): v for k, v in state.items()}, ("also twice",)),
        (lambda state: {k.split(".")[-1]: v for k, v in state.items()}, ("nothing else",)),
        (lambda state: {k.replace("_orig_mod.", ""): v.clone() for k, v in state.items()}, ("copies",)),
        (lambda state: {k.replace("_orig_mod", ""): v for k, v in state.items()}, ("nothing else",)),
        (lambda state: list(state), ("dict",)),
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


# --- Task 6 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "right"), checks._RIGHT.items())
def test_jobs_gives_a_reason_for_every_wrong_choice(name, right, verdict):
    for wrong in set(checks.CHOICES) - {right}:
        said = verdict("jobs", lambda wrong=wrong: {**checks._RIGHT, name: wrong})
        assert said.startswith(f"not yet right. {name}: not {wrong!r}:") and len(said.split()) > 12, said


@pytest.mark.parametrize(
    ("chosen", "word"),
    [({"sweep": "leave it"}, "missing"), ({**checks._RIGHT, "deep": "blocks"}, "choose one"), ([], "dict")],
)
def test_jobs_rejects(chosen, word, rejects):
    rejects("jobs", lambda: chosen, word)
