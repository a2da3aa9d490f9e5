"""The checks of exercise 4, compile: bytes of a fused chain, break-even, graph breaks, shapes, names, four jobs.

No compiler is needed: graphs, breaks and recompilations are counted with a backend that compiles nothing.
"""

import contextlib
import io
import itertools
import logging
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from speedlab.checks import NotYetError, check, expect

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
CHOICES = ("leave it", "whole model", "block by block", "dynamic shapes")


# --- What all tasks use: counting without a compiler ----------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What `watch` saw: the graphs in order, the call that made each of them, the lines that broke, the results."""

    graphs: tuple[torch.fx.GraphModule, ...]
    made_by: tuple[int, ...]
    breaks: tuple[str, ...]
    outputs: tuple[object, ...]


def watch(function: Callable, calls: list[tuple]) -> Seen:
    """Call `function` under torch.compile with each of the arguments in `calls`, with a backend that only counts.

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
    log = logging.getLogger("torch._dynamo")
    level = log.level
    log.setLevel(logging.ERROR)  # a break is counted here, and need not be warned of
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
        log.setLevel(level)
        torch._dynamo.reset()
        counters.clear()


def _is_break(graph: torch.fx.GraphModule) -> bool:
    reason = getattr(graph, "compile_subgraph_reason", None)
    return reason is not None and reason.graph_break


def _said(reason: object) -> str:
    lines = [frame.line for frame in reason.user_stack if frame.line and "site-packages" not in frame.filename]
    return f"`{lines[-1].strip()}`" if lines else str(reason.reason).splitlines()[0]


# --- Task 1 ---------------------------------------------------------------------------------------------------------


def function_of(chain: list[Step], kept: set[str]) -> Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, ...]]:
    """The chain as a function: from its inputs by name to the results in `kept`, in order of their names."""

    def run(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        values = dict(inputs)
        for result, operation, operands in chain:
            values[result] = OPERATIONS[operation](*(values[name] for name in operands))
        return tuple(values[name] for name in sorted(kept))

    return run


class _Traffic(TorchDispatchMode):
    """Bytes that eager operators read from their operands and write to their results."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.bytes += sum(value.nbytes for value in (*args, result) if isinstance(value, torch.Tensor))
        return result


def counted_bytes(chain: list[Step], shapes: dict[str, tuple[int, ...]], kept: set[str]) -> tuple[int, int]:
    """Bytes that the chain moves: counted from eager operators, and from the inputs and outputs of its one graph."""
    inputs = {name: torch.ones(shape) for name, shape in shapes.items()}
    run = function_of(chain, kept)
    with _Traffic() as traffic:
        run(inputs)
    seen = watch(run, [(inputs,)])
    (graph,) = seen.graphs
    read = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    return traffic.bytes, sum(tensor.nbytes for tensor in (*read, *seen.outputs[0]))


# name -> the chain, the shapes of its inputs, the results that are needed afterwards
_ROWS, _WIDTH = 64, 48
_FULL, _VECTOR = (_ROWS, _WIDTH), (_WIDTH,)
CHAINS: dict[str, tuple[list[Step], dict[str, tuple[int, ...]], set[str]]] = {
    "three in a row": (
        [("a", "exp", ["x"]), ("b", "tanh", ["a"]), ("c", "sigmoid", ["b"])],
        {"x": _FULL},
        {"c"},
    ),
    "bias, GELU, residual": (
        [("a", "add", ["x", "bias"]), ("b", "gelu", ["a"]), ("c", "add", ["b", "residual"])],
        {"x": _FULL, "bias": _VECTOR, "residual": _FULL},
        {"c"},
    ),
    "a gate that uses its input twice": (
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
}


@check("Task 1, bytes of a fused chain", seconds=300)
def moved(answer: Callable[[list[Step], dict[str, int], set[str]], tuple[int, int]]) -> None:
    for name, (chain, shapes, kept) in CHAINS.items():
        elements = {key: math.prod(shape) for key, shape in shapes.items()}
        got = answer([(r, o, list(names)) for r, o, names in chain], dict(elements), set(kept))
        expect(
            isinstance(got, tuple | list) and len(got) == 2 and all(isinstance(n, int | float) for n in got),
            "Return two numbers: the bytes moved by the eager operations, and those of one fused kernel.",
        )
        eager, fused = counted_bytes(chain, shapes, kept)
        expect(
            got[0] == eager,
            f"{name}: run eagerly, the operations move {eager:,} bytes; you say {got[0]:,}. "
            + _why_not_eager(got[0], eager, chain, elements),
        )
        expect(
            got[1] == fused,
            f"{name}: the fused kernel moves {fused:,} bytes; you say {got[1]:,}. "
            + _why_not_fused(got[1], fused, chain, elements, kept),
        )


def _why_not_eager(got: float, wanted: int, chain: list[Step], elements: dict[str, int]) -> str:
    if got * 4 == wanted:
        return "An fp32 number has 4 bytes."
    if got == 4 * (max(elements.values()) * 2 * len(chain)):
        return "An operation with two operands reads both."
    if got == 4 * sum(max(elements.values()) * (len(names) + 1) for _, _, names in chain):
        return "A vector is read as a vector, however often its numbers are used: count its own elements."
    return "Each operation reads every operand and writes its result, also when the next one reads that right back."


def _why_not_fused(got: float, wanted: int, chain: list[Step], elements: dict[str, int], kept: set[str]) -> str:
    made = {result for result, _, _ in chain}
    uses = [name for _, _, names in chain for name in names if name not in made]
    full = max(elements.values())
    out = full * len(kept)
    if got * 4 == wanted:
        return "An fp32 number has 4 bytes."
    if got == 4 * (sum(elements[name] for name in uses) + out):
        return "What the kernel has read once it keeps in a register: an input that is used twice is read once."
    if got == 4 * (sum(elements.values()) + out):
        return "An input that no operation uses is not read."
    if got == 4 * (sum(elements[name] for name in set(uses)) + full):
        return "Every result in `kept` must be written, not only the last one."
    if got == 4 * (sum(elements[name] for name in set(uses)) + full * len(made)):
        return "A result that nobody needs afterwards never leaves the register: only those in `kept` are written."
    return "It reads each input that is used once, and writes each result in `kept` once."


# --- Task 2 ---------------------------------------------------------------------------------------------------------


@check("Task 2, break-even", seconds=300)
def break_even(answer: Callable[[float, float, float], int | None]) -> None:
    # binary fractions: every sum below is exact
    cases = list(itertools.product((48.0, 7.5, 0.25), (0.5, 0.125), (0.375, 0.0625)))
    cases += [(40.5, 0.5, 0.5), (10.0, 0.25, 0.5), (0.25, 0.5, 0.25), (8.0, 1.0, 0.0)]
    for first, eager, compiled in cases:
        case = f"With a first call of {first:g} s, eager steps of {eager:g} s and compiled steps of {compiled:g} s"
        wanted = _break_even(first, eager, compiled)
        got = answer(first, eager, compiled)
        if wanted is None:
            expect(got is None, f"{case} compiling never pays, so return None; you return {got!r}.")
            continue
        expect(
            isinstance(got, int) and not isinstance(got, bool),
            f"{case}, return a whole number of steps, as an int; you return {got!r}.",
        )
        if got == wanted:
            continue
        expect(got >= 1, f"{case}: the smallest answer is one step; you say {got}.")
        expect(
            got != max(1, math.ceil(first / (eager - compiled))) or got == wanted,
            f"{case}: the first call has done a step's work too. Compare the totals: first + (n - 1) * compiled "
            f"with n * eager. That gives {wanted} steps, not {got}.",
        )
        total = first + (got - 1) * compiled
        expect(
            total <= got * eager,
            f"{case}: after your {got} steps compiled has taken {total:g} s, eager {got * eager:g} s.",
        )
        raise NotYetError(f"{case}: {wanted} steps are enough; you say {got}. Which is the smallest number?")


def _break_even(first: float, eager: float, compiled: float) -> int | None:
    """By trying one number after the other, rather than by the formula."""
    return next((n for n in range(1, 5000) if first + (n - 1) * compiled <= n * eager), None)


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
    largest = largest if fault == "gradient through the largest" else largest.detach()
    hidden = hidden / (largest if fault == "no lower bound" else largest.clamp(min=1.0))
    if fault == "always relu":
        hidden = F.relu(hidden)
    elif fault == "always tanh":
        hidden = torch.tanh(hidden)
    elif fault == "branch by element":
        hidden = torch.where(hidden > 0, F.relu(hidden), torch.tanh(hidden))
    else:
        hidden = torch.where(hidden.mean() > 0, F.relu(hidden), torch.tanh(hidden))
    active = (hidden.abs().amax(dim=1, keepdim=True) > 0.3).to(hidden.dtype)  # (B, 1)
    active = torch.ones_like(active) if fault == "all rows" else active
    count = active.sum() if fault == "division by zero" else active.sum().clamp(min=1)
    count = torch.tensor(float(len(x))) if fault == "mean over the batch" else count
    return model.leave(hidden - (hidden * active).sum(dim=0) / count)


_SCORER_FAULTS = {
    "no lower bound": "the largest value is used as a divisor also where it is below 1; the original takes "
    "`max(largest, 1.0)`. For a tensor that is `.clamp(min=1.0)`.",
    "always relu": "you always take the relu branch. Compute both and choose: `torch.where(condition, a, b)`.",
    "always tanh": "you always take the tanh branch. Compute both and choose: `torch.where(condition, a, b)`.",
    "branch by element": "the condition is one number, the mean of all of `hidden`, not one for each element.",
    "all rows": "the centre is the mean of the active rows only. Multiply by a mask (B, 1) instead of selecting.",
    "mean over the batch": "divide the sum of the active rows by how many are active, not by the size of the batch.",
    "division by zero": "where no row is active you divide by zero: the original takes `max(len(active), 1)`.",
}


def _scorer_cases() -> Iterator[tuple[str, Scorer, torch.Tensor]]:
    """A model and features (B, C) for each way through its code."""
    settings = {
        "hidden has a positive mean": (0.4, 2.0),
        "hidden has a negative mean": (-0.4, 2.0),
        "no value of hidden exceeds 1": (-0.2, 0.4),
        "no row is active": (0.05, 0.05),
    }
    for seed, (name, (bias, spread)) in enumerate(settings.items()):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, x = Scorer(), spread * torch.randn(12, 16)
            x[::3] *= 0.1  # some rows are quiet
        nn.init.constant_(model.enter.bias, bias)
        yield name, model, x


@check("Task 3, five graph breaks", seconds=300)
def mended(answer: Callable[[Scorer, torch.Tensor], torch.Tensor]) -> None:
    for name, model, x in _scorer_cases():
        with contextlib.redirect_stdout(io.StringIO()):
            got, wanted = answer(model, x), _reference(model, x)
        expect(isinstance(got, torch.Tensor), f"Return the scores, a tensor (B, 4), not {type(got).__name__}.")
        expect(
            got.shape == wanted.shape,
            f"The scores have shape {tuple(got.shape)}, but should be {tuple(wanted.shape)}.",
        )
        if not torch.allclose(got, wanted, rtol=1e-4, atol=1e-5):
            for fault, why in _SCORER_FAULTS.items():
                expect(
                    not torch.allclose(got, _reference(model, x, fault), rtol=1e-4, atol=1e-5, equal_nan=True),
                    f"Where {name}: {why}",
                )
            raise NotYetError(f"Where {name}, your scores are not those of Scorer.forward. Compare line by line.")
        found, right, leaked = (_gradient(f, model, x) for f in (answer, _reference, _with_leak))
        if not torch.allclose(found, right, rtol=1e-3, atol=1e-5):
            expect(
                not torch.allclose(found, leaked, rtol=1e-3, atol=1e-5),
                f"Where {name}, the scores are right but the gradient is not: `.item()` also cut the gradient "
                "through the largest value. A tensor keeps it, unless you write `.detach()`.",
            )
            raise NotYetError(f"Where {name}, the scores are right but the gradient with respect to x is not.")
    _examine_breaks(answer)


def _examine_breaks(answer: Callable) -> None:
    _, model, x = next(_scorer_cases())
    calls = [(model, x), (model, -x), (model, 0.01 * x)]
    seen = watch(answer, calls)
    expect(
        not seen.breaks,
        f"The scores are right, and there are {len(seen.breaks)} graph breaks left, the first at "
        f"{(*seen.breaks, '')[0]}. What does that line need to know that only the data can tell?",
    )
    expect(
        len(seen.graphs) == 1,
        f"No breaks, but three batches of one shape made {len(seen.graphs)} graphs: something that depends on the "
        "data became a Python number, and Dynamo guards its value.",
    )


def _with_leak(model: Scorer, x: torch.Tensor) -> torch.Tensor:
    return _reference(model, x, "gradient through the largest")


def _gradient(function: Callable, model: Scorer, x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    with contextlib.redirect_stdout(io.StringIO()):
        scores = function(model, leaf)
    expect(
        scores.requires_grad, "The scores have no gradient. Do not compute under no_grad: this is a training step."
    )
    weights = torch.linspace(-1, 1, scores.numel()).view_as(scores)
    return torch.autograd.grad((weights * scores).sum(), leaf)[0]


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


@check("Task 4, one stream, two compilations", seconds=300)
def prepare(answer: Callable[[list[list[int]], int], tuple[torch.Tensor, torch.Tensor]]) -> None:
    for seed in range(4):
        batches = stream(seed)
        prepared = [_prepared(answer, rows) for rows in batches]
        _examine_scores(batches, prepared)
        _examine_room(batches, prepared)
        _examine_graphs(batches, prepared)


def _prepared(answer: Callable, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    got = answer([list(row) for row in rows], 8)
    expect(
        isinstance(got, tuple | list) and len(got) == 2 and all(isinstance(t, torch.Tensor) for t in got),
        "Return two tensors: tokens and mask.",
    )
    tokens, mask = got
    expect(
        tokens.dim() == 2 and tokens.shape == mask.shape,
        f"Tokens and mask must both have the shape (B, T); yours are {tuple(tokens.shape)} and {tuple(mask.shape)}.",
    )
    expect(tokens.dtype == torch.int64, f"Tokens are whole numbers, torch.long; yours are {tokens.dtype}.")
    expect(
        len(tokens) >= len(rows),
        f"A batch of {len(rows)} reviews came back with {len(tokens)} rows: no review may be dropped.",
    )
    return tokens, mask


def _examine_scores(batches: list, prepared: list) -> None:
    model = _reviewer()
    for rows, (tokens, mask) in zip(batches, prepared, strict=True):
        with torch.no_grad():
            wanted = torch.stack([model(torch.tensor([row]), torch.ones(1, len(row)))[0] for row in rows])
            got = model(tokens, mask)[: len(rows)]
        if torch.allclose(got, wanted, rtol=1e-4, atol=1e-5):
            continue
        expect(
            [int(n) for n in mask[: len(rows)].sum(dim=1)] == [len(row) for row in rows],
            "The mask must be 1 for each token of a review and 0 for padding; one of your rows has another number of "
            "ones. Was a long review cut off, or did padding get a 1?",
        )
        raise NotYetError(
            "A review's score changed: its tokens must stand in their row, in the positions where the mask is 1, and "
            "the reviews in the order in which they came."
        )


def _examine_room(batches: list, prepared: list) -> None:
    needed = sum(len(rows) * max(map(len, rows)) for rows in batches)
    spent = sum(tokens.numel() for tokens, _ in prepared)
    expect(
        spent <= _ROOM * needed,
        f"The model computes on {spent:,} positions; padded to the longest of each batch it would be {needed:,}. "
        f"At most {_ROOM:g} times that: one length for all makes the short batches pay for the long ones.",
    )


def _examine_graphs(batches: list, prepared: list) -> None:
    try:
        seen = watch(_reviewer(), prepared)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise NotYetError(
            "Dynamo refused a batch. A size that is marked dynamic must be free to vary: mark it in both tensors or "
            f"in none. (PyTorch says: {str(error).splitlines()[0]})"
        ) from error
    if len(seen.graphs) <= 2:
        return
    third = seen.made_by[2]
    shape, rows = tuple(prepared[third][0].shape), len(batches[third])
    why = (
        "It has another number of rows than the others: fill it up with rows of padding."
        if shape[0] != prepared[0][0].shape[0]
        else "Sizes 0 and 1 are always built into a graph: pad to at least two."
        if 1 in shape
        else "Shapes that differ each get a graph until Dynamo makes a dimension dynamic: let one dimension vary, or "
        "use at most two shapes."
    )
    raise NotYetError(
        f"The stream made {len(seen.graphs)} graphs, and two are allowed. Batch {third + 1} made the third: {rows} "
        f"reviews, which you turned into the shape {shape}. {why}"
    )


def _reviewer() -> Reviewer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Reviewer()


# --- Task 5 ---------------------------------------------------------------------------------------------------------


def _small_net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Linear(8, 2))


def wrapped_nets() -> dict[str, nn.Module]:
    """One small network, compiled in several places. Nothing is traced, as nothing is called."""

    def inside(net: nn.Sequential) -> nn.Sequential:
        net[1] = torch.compile(net[1], backend="eager")
        return net

    return {
        "the whole model is compiled": torch.compile(_small_net(), backend="eager"),
        "a part inside is compiled": inside(_small_net()),
        "the whole and a part are compiled": torch.compile(inside(_small_net()), backend="eager"),
        "nothing is compiled": _small_net(),
    }


@check("Task 5, names that last", seconds=300)
def plain_names(answer: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    for name, net in wrapped_nets().items():
        state = net.state_dict()
        before = dict(state)
        got = answer(state)
        expect(isinstance(got, dict), f"Return a dict of weights by name, not {type(got).__name__}.")
        expect(list(state) == list(before), "Leave the dict that you are given as it is, and return a new one.")
        left = [key for key in got if "_orig_mod" in key]
        expect(
            not left, f"Where {name}, {left[:1]} still holds the prefix. It can stand anywhere in a name, also twice."
        )
        missing = [key for key in _small_net().state_dict() if key not in got]
        expect(
            not missing and len(got) == len(before),
            f"Where {name}, the plain model looks for {missing[:1]} and you have {list(got)[:2]}. Take out "
            "`_orig_mod.` and nothing else.",
        )
        same = all(a is b for a, b in zip(got.values(), before.values(), strict=True))
        expect(same, f"Where {name}, the weights are copies or have changed places. Change the names only.")


# --- Task 6 ---------------------------------------------------------------------------------------------------------

_RIGHT = {"sweep": "leave it", "vision": "whole model", "deep": "block by block", "service": "dynamic shapes"}
_REASONS = {
    ("sweep", "whole model"): "each trial saves 300 times 10 ms, which is 3 s, and pays 45 s for the cold start.",
    ("sweep", "block by block"): "a shorter cold start helps, but each trial saves no more than 3 s in all.",
    ("sweep", "dynamic shapes"): "the shapes do not change, and no graph pays for itself within 3 s of savings.",
    ("vision", "leave it"): "a minute of cold start stands against a fifth of three days.",
    (
        "vision",
        "block by block",
    ): "it would work, but the cold start is a minute in three days: take the larger gain.",
    ("vision", "dynamic shapes"): "one shape, drop_last: a graph for fixed sizes is the faster one.",
    ("deep", "leave it"): "a gain of 22% on runs of two hours pays for two minutes of compiling.",
    (
        "deep",
        "whole model",
    ): "of each two hours between restarts, forty minutes would be spent compiling: a third, to "
    "gain a quarter on the rest.",
    ("deep", "dynamic shapes"): "the shapes are fixed; the cold start is what costs.",
    (
        "service",
        "leave it",
    ): "a service runs for months; what speaks against compiling is only the number of lengths.",
    (
        "service",
        "whole model",
    ): "a graph for each of 2,000 lengths would take 20 s each, and Dynamo gives up after eight.",
    ("service", "block by block"): "a block too is compiled anew for every length.",
}


@check("Task 6, four jobs", seconds=300)
def jobs(answer: Callable[[], dict[str, str]]) -> None:
    got = answer()
    expect(isinstance(got, dict), f"Return a dictionary, not {type(got).__name__}.")
    for name, wanted in _RIGHT.items():
        expect(name in got, f"The job {name!r} is missing.")
        chosen = got[name]
        expect(chosen in CHOICES, f"{name}: choose one of {', '.join(map(repr, CHOICES))}; you say {chosen!r}.")
        if chosen != wanted:
            raise NotYetError(f"{name}: not {chosen!r}: {_REASONS[name, chosen]}")
