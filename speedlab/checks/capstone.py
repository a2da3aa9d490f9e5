"""Checks of exercise 10: three slow patients, a report to contradict, a plan under a memory limit."""

import contextlib
import copy
import functools
import gc
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from speedlab import count
from speedlab.checks.core import apart, ask, check, choices, close, diagnose, expect, number, sequence, where, whole
from speedlab.diagnose import Counts, Job, counts
from speedlab.diagnose.jobs import tensors

# --- Tasks 1 to 3: the patients as they came ------------------------------------------------------------------------


def slow_clip(model: nn.Module, limit: float) -> float:
    """Patient A. Shrink all gradients by one factor so that their norm, taken together, is at most `limit`."""
    total = 0.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            total += parameter.grad.norm().item() ** 2
    if total**0.5 > limit:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(limit / total**0.5)
    return total**0.5


def slow_step(body: nn.Module, head: nn.Module, optimizer: torch.optim.Optimizer, inputs, labels) -> tuple:
    """Patient B. Train `head` on a body that stays as it is; the optimizer holds the head's parameters only."""
    optimizer.zero_grad()
    loss = F.cross_entropy(head(body(inputs)), labels)
    accuracy = (head(body(inputs)).argmax(1) == labels).float().mean()
    loss.backward()
    optimizer.step()
    return loss.detach(), accuracy


def slow_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Patient C. Causal attention, head by head; all of shape (B, heads, T, D)."""
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    heads = []
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h].mT / q.shape[3] ** 0.5
        heads.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ v[:, h])
    return torch.stack(heads, 1)


SEEN = ("the host waits", "work that nobody uses", "bytes kept for backward", "padding", "data that come late")

diagnoses = choices(
    "Task 1, three diagnoses",
    {"A": "the host waits", "B": "work that nobody uses", "C": "bytes kept for backward"},
    SEEN,
    {
        "padding": "All rows of its inputs have the same length: nothing is padded.",
        "data that come late": "Its inputs are in memory before it begins.",
        "A": "Look at the host's reads: what does it need in the middle of the step?",
        "B": "Compare its FLOPs with those of one forward pass and the head's gradient.",
        "C": "Which of its counters grows with the square of T?",
    },
)


def small(width: int = 12, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(layers)
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())])


def clipping(clip: Callable, layers: int = 3) -> Job:
    """A training step that clips with the given function, for counting."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        clip(model, 1e-3)
        optimizer.step()
        return loss

    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.1, fused=True)  # noqa: E731
    return Job(
        lambda: small(layers=layers), lambda size: torch.ones(size, 12), lambda m, b: m(b).mean(), sgd, step=step
    )


def _counted(clip: Callable, layers: int) -> Counts:
    try:
        return counts(clipping(clip, layers), breaks=False)
    except Exception as error:
        raise error.__cause__ or error from None  # the answer's own error, not its translation


@functools.cache
def _without_clipping(layers: int) -> Counts:
    return _counted(lambda model, limit: None, layers)


# 0.4: below one of the limits, and above another; the others: the ends of what the task promises
_NORMS = {"nearly small": 0.4, "small": 0.02, "huge": 5e17}


def _graded(kind: str) -> nn.Module:
    model = small()
    (1e3 * model(torch.ones(2, 12)).square().sum()).backward()
    for parameter in model.parameters():
        if kind in ("zero", "tiny"):
            parameter.grad.mul_(0 if kind == "zero" else 1e-5)
    if kind in _NORMS:
        norm = nn.utils.get_total_norm(_gradients(model))
        torch._foreach_mul_(_gradients(model), _NORMS[kind] / norm)
    if kind == "partly frozen":
        model[0].weight.grad = None
    return model


@check("Task 2, clip without waiting")
def clip(answer: Callable[[nn.Module, float], object]) -> None:
    said, kinds = [], ("large", "tiny", "zero", "partly frozen", "nearly small")
    for kind, limit in (*itertools.product(kinds, (0.3, 0.5, 2.0)), ("small", 0.01), ("huge", 2.0)):
        with where(f"With {kind} gradients and limit={limit}"):
            said.append(_examine_clipping(answer, kind, limit))
    for layers in (3, 9):
        seen, without = _counted(answer, layers), _without_clipping(layers)
        waits, line = sum(seen.syncs.values()), next(iter(seen.syncs), "")
        also = "`.item()`, `float(norm)` and `if norm > limit` each wait: clamp a factor, and return a tensor."
        often = "once" if waits == 1 else f"{waits} times"
        expect(not waits, f"The host still waits {often} per step, at {line}. {also}")
        made, tensors = len(seen.operations) - len(without.operations), 2 * layers
        expect(made <= 8 * tensors + 8, f"{made} operations for {tensors} tensors; patient A makes fewer.")
    held = "Return the norm as a tensor, as it is: the host has to wait to turn it into a number or an array."
    expect(all(isinstance(norm, torch.Tensor) for norm in said), held)


def _examine_clipping(answer: Callable, kind: str, limit: float) -> object:
    model, wanted, before = (_graded(kind) for _ in range(3))
    norm, given = slow_clip(wanted, limit), [(grad, grad.data_ptr()) for grad in _gradients(model)]
    said = answer(model, limit)
    expect(close(model, before), "you changed the weights; only the gradients may change.")
    got, right, old = (_gradients(m) for m in (model, wanted, before))
    expect(len(got) == len(right), "some gradients were added or removed: leave those that are None alone.")
    faults = {
        "Gradients below the limit must stay as they are.": norm <= limit,
        "They are unchanged. Change p.grad in place.": old,
        "You clip each tensor by itself: one factor for all.": [g * min(1, limit / (g.norm() + 1e-12)) for g in old],
    }
    other = "Use one factor for all: limit / norm, where the norm is larger."
    if said is not None and not close(said, norm, relative=1e-4):
        other = f"The norm of all is {norm:.4g}, the root of the sum of all squares; you return {number(said):.4g}."
    hint = diagnose(got, faults, other)
    expect(close(got, right, relative=1e-4), f"the gradients are not those of patient A. {hint}")
    told = number(said, "The norm that you return")
    right = close(told, norm, relative=1e-4, absolute=1e-12 if norm else 1e-3)  # zeros, with an epsilon of the answer
    expect(right, f"return the norm before clipping, {norm:.4g}, not {told:.4g}.")
    new = "these are new gradients, which cost memory: change the old ones in place, for example with `mul_`."
    kept = (a is b and a.data_ptr() == place for a, (b, place) in zip(_gradients(model), given, strict=True))
    expect(all(kept), new)
    return said


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


# --- Patient B ------------------------------------------------------------------------------------------------------


def frozen(rows: int = 32, width: int = 24) -> tuple:
    """Patient B's body, head, optimizer and a batch."""
    torch.manual_seed(rows)
    body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.LayerNorm(width))
    head = nn.Linear(width, 5)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5, momentum=0.9)
    return body, head, optimizer, torch.randn(rows, width), torch.arange(rows) % 5


@check("Task 3, no unused work")
def step(answer: Callable[..., tuple]) -> None:
    for rows in (32, 7):
        with where(f"With {rows} rows"):
            _examine_training(answer, rows)
            body, head, _, inputs, _ = frozen(rows)
            forward = count.flops(lambda: head(body(inputs)))  # noqa: B023
            least = forward + count.flops(lambda: head(inputs))  # noqa: B023, and the gradient of the head's weight
            given, graded = frozen(rows), []
            for parameter in given[0].parameters():
                parameter.register_hook(graded.append)
            flops = count.flops(lambda: sequence(answer(*given), "What you return", 2))  # noqa: B023
            useless = "The body still gets gradients: compute its features under no_grad()."
            twice = "You compute the body, or the logits, more than once, or a gradient of the features."
            hint = useless if graded else twice
            expect(flops <= least, f"a step takes {flops:,} FLOPs; {least:,} are enough. {hint}")


def _examine_training(answer: Callable, rows: int) -> None:
    mine, theirs = frozen(rows), frozen(rows)
    before = copy.deepcopy(mine[0].state_dict())
    for turn in (1, 2, 3):
        batch = mine[3].roll(turn, 1), (mine[4] + turn) % 5
        given = [part.clone() for part in batch]
        got = sequence(answer(*mine[:3], *given), "What you return", 2)
        expect(close(given, list(batch)), "the batch has changed; it must stay as it is.")
        expect(close(mine[0].state_dict(), before), "the body has changed; it must stay as it is.")
        loss, accuracy = slow_step(*theirs[:3], *batch)
        found = [number(value, name) for value, name in zip(got, ("The loss", "The accuracy"), strict=True)]
        this = " Is yours the loss of this batch, which is another one in each step?" if turn > 1 else ""
        expect(close(found[0], loss), f"step {turn}: the loss is {loss.item():.5g}, not {found[0]:.5g}.{this}")
        right = f"step {turn}: the accuracy is {accuracy.item():.4g}, not {found[1]:.4g}"
        expect(close(found[1], accuracy), f"{right}. Return that of this batch, as a share, before the update.")
        every = (
            "Does every step begin with zero_grad() and end with step(), of the optimizer that you are given, on "
            "gradients of the mean loss?"
        )
        expect(close(mine[1], theirs[1]), f"after step {turn}, the head is not as patient B trains it. {every}")


# --- Patient C ------------------------------------------------------------------------------------------------------


@check("Task 4, attention without its matrix")
def attention(answer: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    for shape in ((2, 4, 64, 8), (1, 2, 48, 16), (3, 1, 5, 4)):
        with where(f"With inputs of shape {shape}"):
            _examine_attention(answer, shape)
    made = {}
    for heads in (2, 8):
        qkv = [torch.randn(1, heads, 256, 8, requires_grad=True) for _ in range(3)]
        made[heads] = _operations(lambda: answer(*qkv).sum().backward())  # noqa: B023
        most = 16 * qkv[0].nbytes  # a matrix has 32 times that
        kept = count.saved_bytes(lambda: answer(*qkv), nn.Identity()).bytes  # noqa: B023
        with _Calls() as calls:  # hooks keep some out of autograd's sight
            out = answer(*qkv)
        if calls.held() > most:
            gc.collect()  # what is in a reference cycle is not kept
        kept = max(kept, calls.held())
        del out
        what = (
            "A T × T matrix is still kept for backward. scaled_dot_product_attention makes the scores piece by "
            "piece; a mask that you pass is such a matrix too, but is_causal=True is not."
        )
        expect(kept <= most, f"{kept:,} bytes are kept with {heads} heads; {most:,} are enough. {what}")
    grows = f"{made[2]} operations with 2 heads, {made[8]} with 8. Process all heads in one call."
    expect(made[8] <= made[2], grows)


class _Calls(TorchFunctionMode):
    """PyTorch's functions as Python calls them: how many, and which of their results are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.results, self.given = 0, {}, set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.made += 1
        self.given |= {storage.data_ptr() for storage in _storages((args, kwargs))} - self.results.keys()
        out = func(*args, **(kwargs or {}))
        self.results |= {storage.data_ptr(): weakref.ref(storage) for storage in _storages(out)}
        return out

    def held(self) -> int:
        """The bytes of results that are still alive, except views of what was there before."""
        live = {place: storage for place, ref in self.results.items() if (storage := ref())}
        return sum(storage.nbytes() for place, storage in live.items() if place not in self.given)


def _storages(value: object) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors(value):
        with contextlib.suppress(NotImplementedError, RuntimeError):  # inside vmap a tensor has none
            yield tensor.untyped_storage()


def _operations(work: Callable[[], object]) -> int:
    """The operations of work, once it is warm; the calls, where it makes tensors of a kind that cannot be counted."""
    work()
    try:
        return count.operations(work).total()
    except RuntimeError:  # torch.nn.attention.bias makes such tensors
        with _Calls() as calls:
            work()
        return calls.made


def _examine_attention(answer: Callable, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mine = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    theirs = [t.detach().clone().requires_grad_() for t in mine]
    got, wanted = answer(*mine), slow_attention(*theirs)
    expect(isinstance(got, torch.Tensor), f"return a tensor, not {type(got).__name__}.")
    expect(got.shape == wanted.shape, f"return shape {tuple(wanted.shape)}, not {tuple(got.shape)}.")
    sdpa = F.scaled_dot_product_attention
    swapped = [t.transpose(1, 2) for t in theirs]
    faults = {
        "A token must not see later ones: it is causal.": lambda: sdpa(*theirs),
        "Did you divide by the root of D?": lambda: sdpa(*theirs, is_causal=True, scale=1.0),
        "Heads and tokens are mixed up.": lambda: sdpa(*swapped, is_causal=True).transpose(1, 2),
    }
    hint = diagnose(got, faults, otherwise="Compare it with patient C on two tokens.")
    expect(close(got, wanted, relative=1e-4), f"the result is not patient C's. {hint}")
    expect(got.requires_grad, "the result has no gradient: something detached it.")
    for out in (got, wanted):
        out.square().sum().backward()
    slopes = [[given.grad for given in tensors] for tensors in (mine, theirs)]
    expect(None not in slopes[0], "one of q, k and v gets no gradient: something detached it.")
    expect(close(*slopes, relative=1e-3), "the gradients differ from patient C's.")


# --- Task 5 ---------------------------------------------------------------------------------------------------------

REPORT = {
    "fused": "The optimizer makes 86% of the operator calls. Fused, the step is 7 times as fast.",
    "zeros": "Set the smallest 90% of weights to zero: training takes a tenth of the FLOPs.",
    "checkpoint": "Checkpoint all blocks: the step gets faster, since it keeps less.",
    "batch": "With 4 times the batch, there are a quarter as many operator calls per sample.",
}
REFUTED = ("FLOPs unchanged", "FLOPs higher", "most of the time is in the products", "it is right")

contradicted = choices(
    "Task 5, what the report gets wrong",
    {"fused": REFUTED[2], "zeros": REFUTED[0], "checkpoint": REFUTED[1], "batch": REFUTED[3]},
    REFUTED,
    {
        ("fused", "it is right"): "Of the calls, yes. Where does the report say what they cost?",
        "fused": "Operations are not time: look at the seconds by part.",
        "zeros": "A product with zeros costs as much as one without. Which counter says so?",
        "checkpoint": "It keeps less. What does it do twice?",
        "batch": "The number of operator calls does not depend on the batch. Divide it by the samples.",
    },
)


@check("Task 5, the most that a change can give")
def at_most(answer: Callable[[dict[str, float], dict[str, float]], float]) -> None:
    cases = (
        ({"products": 30.0, "pointwise": 10.0, "optimizer": 5.0, "data": 5.0}, {"products": 2.0, "pointwise": 4.0}),
        ({"products": 8.0, "optimizer": 2.0}, {"optimizer": 7.0}),
        ({"products": 1.0}, {"products": 3.0}),
        ({"products": 6.0, "data": 6.0}, {}),
        ({"products": 2.0, "pointwise": 3.0}, {"products": math.inf}),
        ({"products": 4.0, "pointwise": 1.0}, {"products": 0.5, "pointwise": 2.0}),
    )
    for spent, faster in cases:
        with where(f"For {spent} and {faster}"):
            got = number(ask(answer, spent, faster), "The speed-up")
            after = {part: seconds / faster.get(part, 1.0) for part, seconds in spent.items()}
            wanted = sum(spent.values()) / sum(after.values())
            touched = sum(after[part] for part in faster)
            faults = {
                "You multiply the factors, as if each part were the whole step.": math.prod(faster.values()),
                "That is the share of the time that is left: return before over after.": 1 / wanted,
                "That is the time that is left, in seconds.": sum(after.values()),
                "You leave out the parts that are not faster.": sum(map(spent.get, faster)) / (touched or math.inf),
            }
            hint = diagnose(got, faults, otherwise="Add up the seconds before and after.")
            shown = apart(wanted, got)
            expect(close(got, wanted), f"at most {shown[0]}, not {shown[1]}. {hint}")


# --- Task 6 ---------------------------------------------------------------------------------------------------------

Layer = tuple[int, int, int]


def kept_by(layers: list[Layer], micro: int, again: Iterable[int]) -> int:
    """Bytes that a micro-batch keeps for backward: what layers save, but only the inputs of those computed again."""
    again = set(again)
    return micro * sum(given if i in again else saved for i, (saved, given, _) in enumerate(layers))


def peak_of(layers: list[Layer], micro: int, again: Iterable[int]) -> int:
    """Bytes of a micro-batch: what is kept, and the largest of the layers that are computed again."""
    again = set(again)
    return kept_by(layers, micro, again) + micro * max((layers[i][0] for i in again), default=0)


def cost_of(layers: list[Layer], batch: int, overhead: int, micro: int, again: Iterable[int]) -> int:
    """FLOPs of a step: three forward passes' worth, one more for layers computed again, and the overheads."""
    flops = 3 * sum(flops for *_, flops in layers) + sum(layers[i][2] for i in set(again))
    return batch // micro * overhead + batch * flops


def _plans(layers: list[Layer], batch: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    for micro in (m for m in range(1, batch + 1) if batch % m == 0):
        for size in range(len(layers) + 1):
            yield from ((micro, again) for again in itertools.combinations(range(len(layers)), size))


SMALL = [(40, 8, 6), (16, 8, 10), (40, 8, 12), (24, 8, 2)]
SITUATIONS = (
    (SMALL, 8, 960, 50),
    (SMALL, 8, 400, 5),
    (SMALL, 8, 400, 500),
    (SMALL, 12, 220, 1000),
    (SMALL, 8, 60, 10),
    ([(30, 10, 5), (30, 10, 5), (30, 10, 5), (90, 10, 1), (12, 10, 40)], 6, 420, 60),
    ([(100, 4, 50), (10, 4, 1), (10, 4, 1), (10, 4, 1)], 4, 300, 30),
    ([(9, 3, 2)], 1, 9, 1),
    ([(100, 4, 1), (60, 8, 1), (100, 8, 2)], 4, 480, 5),
    ([(50, 2, 7), (25, 2, 8), (80, 4, 12), (50, 2, 7), (50, 2, 7)], 6, 160, 3),
    ([(35, 4, 3), (25, 8, 7), (95, 6, 9), (35, 4, 3), (35, 4, 3)], 6, 500, 60),
    ([(35, 3, 8), (90, 4, 2), (35, 3, 8), (35, 3, 8)], 6, 360, 60),
)


@check("Task 6, a plan under a memory limit")
def plan(answer: Callable[[list[Layer], int, int, int], object]) -> None:
    for layers, batch, limit, overhead in SITUATIONS:
        with where(f"For layers {layers}, batch={batch}, limit={limit}, overhead={overhead}"):
            _examine_plan(ask(answer, layers, batch, limit, overhead), layers, batch, limit, overhead)


def _examine_plan(got: object, layers: list[Layer], batch: int, limit: int, overhead: int) -> None:
    costs = {p: cost_of(layers, batch, overhead, *p) for p in _plans(layers, batch) if peak_of(layers, *p) <= limit}
    if not costs:
        expect(got is None, "nothing fits, not even one sample with any layers computed again: return None.")
        return
    fit = "one plan fits" if len(costs) == 1 else f"{len(costs)} plans fit"
    expect(got is not None, f"you return None, but {fit}.")
    micro, again = sequence(got, "The plan", 2)
    micro = whole(micro, "The micro-batch", 1, batch)
    again = {whole(i, "A layer's number", 0, len(layers) - 1) for i in sequence(again, "The layers")}
    expect(batch % micro == 0, f"micro-batches of {micro} do not divide a batch of {batch}.")
    peak, cost = peak_of(layers, micro, again), cost_of(layers, batch, overhead, micro, again)
    light = [p for p in _plans(layers, batch) if kept_by(layers, *p) <= limit]
    forgot = min(cost_of(layers, batch, overhead, *p) for p in light)
    hint = "While a layer is computed again, all that it saves is in memory: add the largest, times micro."
    hint = hint if cost == forgot else ""
    expect(peak <= limit, f"your plan {micro, sorted(again)} needs {peak} bytes, but the limit is {limit}. {hint}")
    least = min(costs.values())
    best = [p for p in costs if costs[p] == least]
    hint = _cheaper(micro, len(again), best)
    without = {  # what an answer costs that leaves out some plans
        f"It computes all layers again, in micro-batches of {best[0][0]}: do you try that set, too?": [
            p for p in costs if len(p[1]) < len(layers)
        ],
        f"It takes all {limit} bytes, which is allowed; and where no layer is computed again, nothing is added.": [
            p for p in costs if peak_of(layers, *p) < limit
        ],
    }
    left_out = {told: min(map(costs.get, plans), default=0) for told, plans in without.items()}
    hint = " ".join(filter(None, (diagnose(cost, left_out), hint)))
    said = f"your plan {micro, sorted(again)} fits and costs {cost}; the cheapest that fits costs {least}. {hint}"
    expect(cost == least, said)


def _cheaper(micro: int, again: int, best: list[tuple]) -> str:
    if all(m > micro for m, _ in best):
        return "It has larger micro-batches: every micro-batch costs an overhead."
    if all(m < micro for m, _ in best):
        return "It has smaller micro-batches: it computes less again."
    fewer = all(len(set(a)) < again for _, a in best)
    return (
        "It computes fewer layers again."
        if fewer
        else "It computes different layers again: bytes count, and so do FLOPs."
    )
