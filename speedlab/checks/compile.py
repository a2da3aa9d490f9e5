"""The checks of exercise 4, compile: bytes of a fused chain, break-even, graph breaks, shapes, names, four jobs.

No compiler is needed: graphs, breaks and recompilations are counted with a backend that compiles nothing.
"""

import contextlib
import copy
import functools
import io
import itertools
import logging
import math
import random
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from speedlab.checks.core import ask, check, choices, close, diagnose, expect, fail, sequence, where, whole

# torch 2.11, built for CUDA, keeps a stand-in for the missing GPU with the thread that first enters this mode, and
# reads it after that thread has ended: a segmentation fault. Checks compile in threads, so the main one goes first.
with FakeTensorMode():
    pass

# (result, operation, operands): a chain is a list of these
Step = tuple[str, str, list[str]]
OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
}


# --- What all tasks use: counting without a compiler ----------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What `watch` saw: the graphs in order, the call that made each of them, the lines that broke, the results."""

    graphs: tuple[torch.fx.GraphModule, ...]
    made_by: tuple[int, ...]
    breaks: tuple[str, ...]
    outputs: tuple[object, ...]


def watch(function: Callable, calls: list[tuple]) -> Seen:
    """Call `function` under torch.compile with each tuple of arguments in `calls`, with a backend that only counts.

    What PyTorch has compiled so far is thrown away before and after; what the function prints is swallowed.
    """
    graphs: list[torch.fx.GraphModule] = []
    made_by: list[int] = []
    outputs: list[object] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable:
        graphs.append(graph)
        made_by.append(len(outputs))
        return graph.forward

    torch._dynamo.reset()
    counters.clear()
    # no warnings about what is counted here
    logs = {"torch._dynamo": logging.ERROR, "torch._guards": logging.CRITICAL}
    levels = {name: logging.getLogger(name).level for name in logs}
    for name, level in logs.items():
        logging.getLogger(name).setLevel(level)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            compiled = torch.compile(function, backend=keep)
            for arguments in calls:
                outputs.append(compiled(*arguments))
        breaks = [_said(graph.compile_subgraph_reason) for graph in graphs if _is_break(graph)]
        # a break before the first operation leaves no graph behind, but is counted all the same
        uncounted = sum(counters["graph_break"].values()) - len(breaks)
        breaks += ["before the first tensor operation"] * max(0, uncounted)
        return Seen(tuple(graphs), tuple(made_by), tuple(breaks), tuple(outputs))
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        torch._dynamo.reset()
        counters.clear()


def _is_break(graph: torch.fx.GraphModule) -> bool:
    reason = getattr(graph, "compile_subgraph_reason", None)
    return reason is not None and reason.graph_break


def _said(reason: object) -> str:
    lines = [frame.line for frame in reason.user_stack if frame.line and "site-packages" not in frame.filename]
    return f"`{lines[-1].strip()}`" if lines else str(reason.reason).splitlines()[0]


# --- Task 1 ---------------------------------------------------------------------------------------------------------

# name -> the chain, the shapes of its inputs, the results that are needed afterwards
_ROWS, _WIDTH = 64, 48
_FULL, _VECTOR = (_ROWS, _WIDTH), (_WIDTH,)
Case = tuple[list[Step], dict[str, tuple[int, ...]], set[str]]
CHAINS: dict[str, Case] = {
    "three in a row": ([("a", "exp", ["x"]), ("b", "tanh", ["a"]), ("c", "sigmoid", ["b"])], {"x": _FULL}, {"c"}),
    "bias, GELU, residual": (
        [("a", "add", ["x", "bias"]), ("b", "gelu", ["a"]), ("c", "add", ["b", "residual"])],
        {"x": _FULL, "bias": _VECTOR, "residual": _FULL},
        {"c"},
    ),
    "a gate less its input, which is read three times": (
        [("a", "sigmoid", ["x"]), ("b", "mul", ["x", "a"]), ("c", "sub", ["b", "x"])],
        {"x": _FULL},
        {"c"},
    ),
    "a result that backward needs": (
        [("a", "mul", ["x", "scale"]), ("b", "tanh", ["a"]), ("c", "mul", ["b", "x"])],
        {"x": _FULL, "scale": _VECTOR},
        {"b", "c"},
    ),
    "an input that nobody reads": (
        [("a", "sub", ["x", "mean"]), ("b", "exp", ["a"])],
        {"x": _FULL, "mean": (_ROWS, 1), "mask": _FULL},
        {"b"},
    ),
    "a step on vectors only": (
        [("s", "exp", ["scale"]), ("a", "mul", ["x", "s"]), ("b", "add", ["a", "s"])],
        {"x": _FULL, "scale": _VECTOR},
        {"s", "b"},
    ),
    "a step on vectors after a full one": (
        [("a", "exp", ["x"]), ("s", "add", ["bias", "scale"]), ("b", "mul", ["s", "a"])],
        {"x": _FULL, "bias": _VECTOR, "scale": _VECTOR},
        {"b"},
    ),
}


def _drawn_chains() -> Iterator[tuple[str, Case]]:
    """Chains that are written down nowhere, with different sizes."""
    draw = random.Random(torch.randint(10**6, ()).item())
    for turn in range(4):
        rows, width, inputs = draw.randint(2, 50), draw.randint(2, 50), ["x", "u", "v"]
        shapes, chain = {"x": (rows, width), "u": (width,), "v": (width,)}, []
        for i in range(draw.randint(2, 6)):
            before = f"r{i - 1}" if i else draw.choice(inputs)
            other = draw.choice([name for name in inputs if name != before])  # is x read twice in x - x? Nobody asks
            chain.append((f"r{i}", draw.choice(["add", "sub", "mul"]), [before, other]))
        yield f"A chain drawn at random, {chain}", (chain, shapes, {f"r{i}", f"r{turn % (i + 1)}"})


def _counted_bytes(chain: list[Step], shapes: dict[str, tuple[int, ...]], kept: set[str]) -> tuple[int, int]:
    """Bytes that the chain moves: counted from eager operators, and from the inputs and outputs of its one graph."""

    def run(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        values = dict(inputs)
        for result, operation, operands in chain:
            values[result] = OPERATIONS[operation](*(values[name] for name in operands))
        return tuple(values[name] for name in sorted(kept))

    inputs = {name: torch.ones(shape) for name, shape in shapes.items()}
    with _Traffic() as traffic:
        run(inputs)
    seen = watch(run, [(inputs,)])
    (graph,) = seen.graphs
    read = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    return traffic.bytes, sum(tensor.nbytes for tensor in (*read, *seen.outputs[0]))


class _Traffic(TorchDispatchMode):
    """Bytes that eager operators read from their operands and write to their results."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.bytes += sum(value.nbytes for value in (*args, result) if isinstance(value, torch.Tensor))
        return result


def _bytes(chain: list[Step], elements: dict[str, int], kept: set[str], fault: str) -> tuple[int, int]:
    """What an answer with a well-known fault gives."""
    sizes, eager, full = dict(elements), 0, max(elements.values())
    sizes = dict.fromkeys(sizes, full) if fault == "spread" else sizes
    for result, _, operands in chain:
        largest = max(sizes[name] for name in operands)
        sizes[result] = {"all full": full, "first": sizes[operands[0]], "last": sizes[operands[-1]]}.get(
            fault, largest
        )
        eager += sum(sizes[name] for name in (operands[:1] if fault == "one operand" else operands)) + sizes[result]
    made = [result for result, _, _ in chain]
    uses = [name for _, _, names in chain for name in names if name not in made]
    read = uses if fault == "twice" else elements if fault == "unused" else set(uses)
    written = made if fault == "all written" else made[-1:] if fault == "last only" else kept
    fused = sum(sizes[name] for name in read) + sum(sizes[name] for name in written)
    return (eager, fused) if fault == "numbers" else (4 * eager, 4 * fused)


_CHAIN_FAULTS = {
    "numbers": "An fp32 number has 4 bytes.",
    "one operand": "An operation with two operands reads both.",
    "spread": "A vector is read as a vector, however often its numbers are used: count its own elements.",
    "all full": "The result of a step on vectors is a vector: as large as the largest of its *own* operands.",
    "first": "A result is as large as the largest of its operands, which need not be the first.",
    "last": "A result is as large as the largest of its operands, which need not be the last.",
    "twice": "The kernel keeps in a register what it has read: an input that is used twice is read once.",
    "unused": "An input that no operation uses is not read.",
    "last only": "Every result in `kept` must be written, not only the last one.",
    "all written": "A result that nobody needs afterwards never leaves the register: write only those in `kept`.",
}


@check("Task 1, bytes of a fused chain")
def moved(answer: Callable[[list[Step], dict[str, int], set[str]], tuple[int, int]]) -> None:
    for name, (chain, shapes, kept) in (*CHAINS.items(), *_drawn_chains()):
        elements = {key: math.prod(shape) for key, shape in shapes.items()}
        pair = "The bytes moved by the eager operations, and those of one fused kernel:"
        found = sequence(ask(answer, chain, elements, kept), f"{pair} what you return", length=2)
        wanted = _counted_bytes(chain, shapes, kept)
        found = [whole(each, "A number of bytes") for each in found]
        swapped = wanted[0] != wanted[1] and found == [*wanted[::-1]]
        expect(not swapped, f"{name}: the bytes if run eagerly come first, then the fused kernel's: swap the two.")
        last = (
            "Each operation reads every operand and writes its result, even when the next one reads it right back.",
            "It reads each input that is used once, and writes each result in `kept` once.",
        )
        for which, how in enumerate(("run eagerly, the operations move", "the fused kernel moves")):
            got = found[which]
            faults = {why: float(_bytes(chain, elements, kept, f)[which]) for f, why in _CHAIN_FAULTS.items()}
            expect(
                got == wanted[which],
                f"{name}: {how} {wanted[which]:,} bytes; you say {got:,.0f}. {diagnose(got, faults, last[which])}",
            )


# --- Task 2 ---------------------------------------------------------------------------------------------------------


@check("Task 2, break-even")
def break_even(answer: Callable[[float, float, float], int | None]) -> None:
    # binary fractions: every sum below is exact
    cases = list(itertools.product((48.0, 7.5, 0.25), (0.5, 0.125), (0.375, 0.0625)))
    cases += [(40.5, 0.5, 0.5), (10.0, 0.25, 0.5), (0.25, 0.5, 0.25), (8.0, 1.0, 0.0), (0.25, 0.5, 0.75)]
    cases += [(0.5, 0.5, 0.5), (1.3125, 0.5, 0.25), (6.625, 1.0, 0.5), (3.75, 1.0, 0.5)]
    for first, eager, compiled in cases:
        case = f"With a first call of {first:g} s, eager steps of {eager:g} s and compiled steps of {compiled:g} s"
        # by trying one number after the other, rather than by the formula
        wanted = next((n for n in range(1, 5000) if first + (n - 1) * compiled <= n * eager), None)
        got = ask(answer, first, eager, compiled)
        if wanted is None:
            expect(got is None, f"{case}, compiling never pays, so return None, not {got!r}.")
            continue
        expect(got is not None, f"{case}: compiling has paid off after {wanted} steps; you return None.")
        got = whole(got, f"{case}: the number of steps", least=1, most=10**6)
        saved = eager - compiled
        total = first + (got - 1) * compiled
        hints = {
            "The first call has done a step's work too. Compare the totals: first + (n - 1) * compiled with n * "
            "eager.": got > wanted and saved > 0 and got == max(1, math.ceil(first / saved)),
            f"After these, compiled has taken {total:g} s and eager {got * eager:g} s: not yet.": total > got * eager,
        }
        expect(
            got == wanted,
            lambda case=case, got=got, wanted=wanted, hints=hints: (
                f"{case}: the smallest number of steps is {wanted}, not {got}. {diagnose(got, hints)}"
            ),
        )


# --- Task 3 ---------------------------------------------------------------------------------------------------------


class Scorer(nn.Module):
    """Scores for four classes from features (B, C). It works, and it breaks five times."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x)  # (B, 32)
        print("scoring", hidden.shape)
        largest = hidden.abs().max().item()
        hidden = hidden / max(largest, 1.0)
        if hidden.mean() > 0:
            hidden = F.relu(hidden)
        else:
            hidden = torch.tanh(hidden)
        active = hidden[hidden.abs().amax(dim=1) > 0.3]  # the rows that say something, however many there are
        centre = active.sum(dim=0) / max(len(active), 1)
        self.scored_at = time.monotonic()
        return self.leave(hidden - centre)


def _reference(model: Scorer, x: torch.Tensor, fault: str = "") -> torch.Tensor:
    """What `Scorer.forward` computes, in one graph, or the same with a well-known fault."""
    hidden = model.enter(x)
    largest = hidden.abs().max()
    largest = largest if fault == "leak" else largest.detach()
    hidden = hidden / (largest if fault == "no lower bound" else largest.clamp(min=1.0))
    condition = {
        "always relu": torch.tensor(True),
        "always tanh": torch.tensor(False),
        "branch by element": hidden > 0,
        "branch by row": hidden.mean(dim=1, keepdim=True) > 0,
    }.get(fault, hidden.mean() > 0)
    chosen = torch.where(condition, F.relu(hidden), torch.tanh(hidden))
    judged = hidden if fault == "active before the branch" else chosen
    hidden, active = chosen, (judged.abs().amax(dim=1, keepdim=True) > 0.3).to(hidden.dtype)  # (B, 1)
    active = torch.ones_like(active) if fault == "all rows" else active
    count = active.sum() if fault == "division by zero" else active.sum().clamp(min=1)
    count = torch.tensor(float(len(x))) if fault == "mean over the batch" else count
    return model.leave(hidden - (hidden * active).sum(dim=0) / count)


_SCORER_FAULTS = {
    "no lower bound": "The largest value is used as a divisor even where it is below 1; the original takes "
    "`max(largest, 1.0)`. For a tensor that is `.clamp(min=1.0)`.",
    "always relu": "You take the relu branch, and the original tanh, since the mean of `hidden` is not above 0. "
    "Compute both and choose: `torch.where(hidden.mean() > 0, relu, tanh)`.",
    "always tanh": "You take the tanh branch, and the original relu, since the mean of `hidden` is above 0. Compute "
    "both and choose: `torch.where(hidden.mean() > 0, relu, tanh)`.",
    "branch by element": "The condition is one number, the mean of all of `hidden`, not one for each element.",
    "branch by row": "The condition is one number, the mean of all of `hidden`, not one for each row.",
    "active before the branch": "Which rows are active is asked after the branch, about its result.",
    "all rows": "The centre is the mean of the active rows only. Multiply by a mask (B, 1) instead of selecting.",
    "mean over the batch": "Divide the sum of the active rows by how many are active, not by the size of the batch.",
    "division by zero": "Where no row is active you divide by zero: the original takes `max(len(active), 1)`.",
}


def _scorer_cases() -> Iterator[tuple[str, Scorer, torch.Tensor]]:
    """A model and features (B, C) for each way through its code; rows differ in the sign of their means."""
    settings = {
        "hidden has a positive mean": (0.4, 2.0, 12),
        "hidden has a negative mean": (-0.4, 2.0, 12),
        "no value of hidden exceeds 1": (-0.2, 0.4, 12),
        "no row is active": (0.05, 0.05, 12),
        "rows differ in the sign of their means": (0.02, 2.0, 9),
    }
    for seed, (name, (bias, spread, rows)) in enumerate(settings.items()):
        torch.manual_seed(seed)
        model, x = Scorer(), spread * torch.randn(rows, 16)
        x[::3] *= 0.1  # some rows are quiet
        nn.init.constant_(model.enter.bias, bias)
        yield name, model, x
    uneven = {  # the bias of most columns, of the first few, and how many these are: mean and median differ in sign
        "few values carry the mean": (-0.15, 3.0, 3),
        "the largest value is negative": (0.35, -2.0, 1),
        "few values carry the mean down": (0.15, -3.0, 3),
    }
    for seed, (name, (most, few, columns)) in enumerate(uneven.items()):
        torch.manual_seed(seed)
        model, x = Scorer(), 0.6 * torch.randn(12, 16) * torch.linspace(0.1, 2, 12)[:, None]
        nn.init.constant_(model.enter.bias, most)
        model.enter.bias.data[:columns] = few
        yield name, model, x


@check("Task 3, five graph breaks")
def mended(answer: Callable[[Scorer, torch.Tensor], torch.Tensor]) -> None:
    for name, model, x in _scorer_cases():
        with where(f"Where {name}"):
            _judge_scores(answer, model, x)
    cases = list(_scorer_cases())
    _, model, x = cases[0]
    once = watch(answer, [(model, x)])
    first = (*once.breaks, "")[0]
    why = "What does that line need to know that only the data can tell?"
    if "print(" in first or "time." in first:
        why = "A message or the time is no score: leave it out."
    elif not first.startswith("`"):
        why = "Is a message or the time still there, or a call that Dynamo may not look into?"
    left = f"The scores are right, and there are {len(once.breaks)} graph breaks left, the first at {first}. {why}"
    expect(not once.breaks, left)
    inputs = [given.clone().requires_grad_() for given in (x, -x, 0.01 * x, cases[1][2], cases[3][2])]
    seen = watch(answer, [(model, given) for given in inputs])
    expect(
        len(seen.graphs) == 1 and not seen.breaks,
        lambda: (
            f"No breaks at first, but five batches of one shape made {len(seen.graphs)} graphs: something that "
            "depends on the data became a Python number, and Dynamo guards its value."
        ),
    )
    for given, got in zip(inputs, seen.outputs, strict=True):
        same = close(got, _reference(model, given), relative=1e-4)
        expect(same, "Under torch.compile your function gives different scores. It must do the same work.")
        same = got.requires_grad and close(
            _gradients(got, model, given), _slopes(_reference, model, given.detach()), relative=1e-3
        )
        expect(same, "Under torch.compile the scores have other gradients than without. It must do the same work.")


def _judge_scores(answer: Callable, model: Scorer, x: torch.Tensor) -> None:
    near, own, leaf = functools.partial(close, relative=1e-4), copy.deepcopy(model), x.clone().requires_grad_()
    with contextlib.redirect_stdout(io.StringIO()):
        got = answer(own, leaf)
    wanted = _reference(model, x)
    expect(isinstance(got, torch.Tensor), f"return the scores, a tensor (B, 4), not {type(got).__name__}.")
    right = f"the scores have shape {tuple(got.shape)}, but should be {tuple(wanted.shape)}."
    expect(got.shape == wanted.shape, right)
    expect(close(own, model) and torch.equal(leaf, x), "your function changes the model's weights, or x.")
    if not near(got, wanted):
        got = got.detach().nan_to_num(77.0)  # a division by zero is a fault that must be recognised
        hints = {why: _reference(model, x, fault).nan_to_num(77.0) for fault, why in _SCORER_FAULTS.items()}
        fail(diagnose(got, hints, "your scores are not those of Scorer.forward. Compare line by line.", near))
    expect(got.requires_grad, "the scores have no gradient. Do not compute under no_grad: this is a training step.")
    found = _gradients(got, own, leaf)
    if not close(found[0], _slopes(_reference, model, x)[0], relative=1e-3):
        leaked = (
            "The original's `.item()` also cut the gradient through the largest value. A tensor keeps it, unless "
            "you write `.detach()`."
        )
        leak = _slopes(functools.partial(_reference, fault="leak"), model, x)[0]
        why = diagnose(found[0], {leaked: leak}, same=functools.partial(close, relative=1e-3))
        fail(f"the scores are right but the gradient with respect to x is not. {why}")
    expect(
        close(found, _slopes(_reference, model, x), relative=1e-3),
        "the scores are right, but the gradients of the model's weights are not. Is a layer detached?",
    )


def _slopes(function: Callable, model: Scorer, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    return _gradients(function(model, leaf), model, leaf)


def _gradients(scores: torch.Tensor, model: Scorer, x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of x and of the weights; zeros where there is none."""
    weights, leaves = torch.linspace(-1, 1, scores.numel()).view_as(scores), [x, *model.parameters()]
    found = torch.autograd.grad((weights * scores).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


# --- Task 4 ---------------------------------------------------------------------------------------------------------


class Reviewer(nn.Module):
    """A score for each review: tokens (B, T) and their mask (B, T), 1 for a token and 0 for padding, to (B,)."""

    def __init__(self, vocabulary: int = 100, width: int = 16):
        super().__init__()
        self.embed, self.mix, self.head = (
            nn.Embedding(vocabulary, width),
            nn.Linear(width, width),
            nn.Linear(width, 1),
        )

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        real = mask.unsqueeze(-1).to(torch.float32)  # (B, T, 1)
        mean = (self.embed(tokens) * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)  # (B, C)
        return self.head(torch.tanh(self.mix(mean))).squeeze(-1)


def stream(seed: int, batch_size: int = 8) -> list[list[list[int]]]:
    """Batches of reviews as they come: lists of 1 to 64 tokens (1 to 99), most of them short; the last is partial."""
    draw = random.Random(seed)
    longest = [12, 21, 9, 16, 60, 14, 11, 18, 13, 57]
    draw.shuffle(longest)
    if seed % 2:
        longest[4] = 1  # every review of this batch is a single word
    sizes = [batch_size] * len(longest) + [1 + 2 * (seed % 2)]
    return [
        [[draw.randint(1, 99) for _ in range(top if i == 0 else draw.randint(1, top))] for i in range(rows)]
        for rows, top in zip(sizes, [*longest, 17], strict=True)
    ]


# a batch may be padded to this many times what its own longest review needs, on average
_ROOM = 1.7


@check("Task 4, one stream, two compilations")
def prepare(answer: Callable[[list[list[int]], int], tuple[torch.Tensor, torch.Tensor]]) -> None:
    for seed, batch_size in ((0, 8), (1, 8), (2, 5), (3, 12)):
        batches = stream(seed, batch_size)
        # marks must stay: hand over what the function made, not copies
        prepared, copies = [], []
        for rows in batches:
            prepared.append(_prepared(answer, rows, batch_size))
            copies.append([tensor.clone() for tensor in prepared[-1]])
        kept = all(
            torch.equal(*pair) for pairs in zip(prepared, copies, strict=True) for pair in zip(*pairs, strict=True)
        )
        expect(kept, "A batch that was right changes when later ones are made: give each batch tensors of its own.")
        needed = sum(len(rows) * max(map(len, rows)) for rows in batches)
        spent = sum(tokens.numel() for tokens, _ in prepared)
        expect(
            spent <= _ROOM * needed,
            f"The model computes on {spent:,} positions; with each batch padded to its longest, it would be "
            f"{needed:,}. At most {_ROOM:g} times that is allowed: a shared length makes short batches pay for "
            "long ones.",
        )
        _judge_graphs(batches, prepared)
    for longest in (22, 33, 64):
        with where(f"With a review of {longest} tokens"):
            _prepared(answer, [[1 + i % 99 for i in range(longest)], [5]], 8)


def _prepared(answer: Callable, rows: list[list[int]], batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    got = ask(answer, rows, batch_size)
    both = isinstance(got, tuple | list) and len(got) == 2 and all(isinstance(t, torch.Tensor) for t in got)
    expect(both, "Return two tensors: tokens and mask.")
    tokens, mask = got
    expect(
        tokens.dim() == 2 and tokens.shape == mask.shape,
        f"Tokens and mask must both have the shape (B, T); yours are {tuple(tokens.shape)} and {tuple(mask.shape)}.",
    )
    expect(tokens.dtype == torch.int64, f"Tokens are whole numbers, torch.long; yours are {tokens.dtype}.")
    expect(
        len(rows) <= len(tokens) <= batch_size,
        f"A batch of {len(rows)} reviews came back with {len(tokens)} rows. No review may be dropped, and "
        f"there may be at most {batch_size} rows, the batch_size that is given.",
    )
    expect(bool(((mask == 0) | (mask == 1)).all()), "The mask holds other numbers than 0 and 1.")
    real = mask.bool()
    for i, row in enumerate([*rows, *[[]] * (len(tokens) - len(rows))]):
        expect(
            int(real[i].sum()) == len(row),
            f"The mask must be 1 for each token of a review and 0 for padding; a row of {len(row)} tokens has "
            f"{int(real[i].sum())} ones. Was a long review cut off, or did padding get a 1?",
        )
        expect(
            tokens[i][real[i]].tolist() == row,
            "A review's tokens must be in their row, in their order, where the mask is 1, and the reviews must be "
            "in the order in which they came.",
        )
    expect(not tokens[~real].any(), "Padding must have token 0.")
    return tokens, mask


def _judge_graphs(batches: list, prepared: list) -> None:
    torch.manual_seed(0)
    try:
        seen = watch(Reviewer(), prepared)
    except (torch._dynamo.exc.TorchDynamoException, ConstraintViolationError) as error:
        said = next((line for line in str(error).splitlines() if line.strip()), "")
        fail(
            "Dynamo refused a batch. A size that is marked dynamic must be free to vary: mark it in both tensors or "
            f"in neither. PyTorch says: {said.strip()}"
        )
    if len(seen.graphs) <= 2:
        return
    third = seen.made_by[2]
    shape, rows = tuple(prepared[third][0].shape), len(batches[third])
    why = diagnose(
        shape,
        {
            "It has a different number of rows from the others: fill it up with rows of padding.": (
                shape[0] != prepared[0][0].shape[0]
            ),
            "By default, 0 and 1 are built into a graph: pad to at least two.": 1 in shape,
        },
        "Shapes that differ each get a graph until Dynamo makes a dimension dynamic: let one dimension vary, or use "
        "at most two shapes.",
    )
    fail(
        f"The stream made {len(seen.graphs)} graphs, and two are allowed. Batch {third + 1} made the third: {rows} "
        f"reviews, which you turned into the shape {shape}. {why}"
    )


# --- Task 5 ---------------------------------------------------------------------------------------------------------


def _small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Linear(8, 2))


def _deep_net() -> nn.Sequential:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(12)]
    return nn.Sequential(OrderedDict(model=nn.Linear(2, 3), blocks=nn.Sequential(*blocks)))


def wrapped_nets() -> dict[str, nn.Module]:
    """One small network, compiled in several places. Nothing is traced, as nothing is called."""
    plain, part, both = _small_net(), _small_net(), _small_net()
    for net in (part, both):
        net[1] = torch.compile(net[1], backend="eager")
    return {
        "the whole model is compiled": torch.compile(_small_net(), backend="eager"),
        "a part inside is compiled": part,
        "the whole and a part are compiled": torch.compile(both, backend="eager"),
        "nothing is compiled": plain,
    }


def _wrapped_blocks() -> nn.Module:
    net = _deep_net()
    for i in (2, 11):
        net.blocks[i][0] = torch.compile(net.blocks[i][0], backend="eager")
        net.blocks[i] = torch.compile(net.blocks[i], backend="eager")
    return torch.compile(net, backend="eager")


@check("Task 5, names that last")
def plain_names(answer: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    cases = [(name, net, _small_net()) for name, net in wrapped_nets().items()]
    cases.append(("some blocks of another model are compiled, with a layer inside", _wrapped_blocks(), _deep_net()))
    for name, net, plain in cases:
        given, before, wanted = net.state_dict(), list(net.state_dict()), plain.state_dict()
        state = copy.deepcopy(given)
        got = answer(state)
        expect(isinstance(got, Mapping), f"Return a dict of weights by name, not {type(got).__name__}.")
        expect(got is not state, "Leave the dict that you are given as it is, and return a new one.")
        unchanged = list(state) == before and close(state, given)
        expect(unchanged, "Leave the dict that you are given as it is, its weights too, and return a new one.")
        left = [key for key in got if "_orig_mod" in key]
        hint = f"{left[:1]} still holds the prefix. It can be anywhere in a name, also twice."
        expect(not left, f"Where {name}, {hint}")
        missing = [key for key in wanted if key not in got]
        expect(
            not missing and len(got) == len(wanted),
            f"Where {name}, the plain model looks for {missing[:1]}, but you have {list(got)[:2]}. Take out "
            "`_orig_mod.` and nothing else.",
        )
        wrong = [key for key in wanted if not close(got[key], wanted[key])]
        expect(not wrong, f"Where {name}, {wrong[:1]} has other weights now. Change the names only.")
        kinds = [key for key in wanted if not isinstance(got[key], torch.Tensor)]
        expect(not kinds, f"Where {name}, {kinds[:1]} is no tensor any more. Change the names only.")


# --- Task 6 ---------------------------------------------------------------------------------------------------------

CHOICES = ("leave it", "whole model", "block by block", "dynamic shapes")
_RIGHT = {"sweep": "leave it", "vision": "whole model", "deep": "block by block", "service": "dynamic shapes"}
_REASONS = {
    ("sweep", "whole model"): "Each trial saves 300 times 10 ms, which is 3 s, and pays 45 s for the cold start.",
    ("sweep", "block by block"): "A shorter cold start helps, but each trial saves no more than 3 s in all.",
    ("sweep", "dynamic shapes"): "The shapes do not change, and no graph pays for itself with savings of 3 s.",
    ("vision", "leave it"): "It is a minute of cold start against about half a day saved.",
    ("vision", "block by block"): "It would work, but a minute in three days is little: take the larger gain.",
    ("vision", "dynamic shapes"): "One shape, drop_last: a graph for fixed sizes is the faster one.",
    ("deep", "leave it"): "A gain of 22% on runs of two hours pays for two minutes of compiling.",
    ("deep", "whole model"): "Forty minutes of every two hours would be spent compiling: a third, to gain a quarter.",
    ("deep", "dynamic shapes"): "The shapes are fixed; the cold start is what costs.",
    ("service", "leave it"): "It runs for months. Only the number of lengths is an argument against compiling.",
    ("service", "whole model"): "With fixed shapes each of 2,000 lengths costs 20 s, and Dynamo stops after eight.",
    ("service", "block by block"): "With fixed shapes, a block, too, is compiled anew for every length.",
}

jobs = choices("Task 6, four jobs", _RIGHT, CHOICES, _REASONS)
