"""The checks of exercise 6: optimizer steps, a ragged accumulation loop, kept bytes, checkpoints under a budget."""

import contextlib
import copy
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from speedlab import count
from speedlab.checks import check, expect

IGNORED = -100
_VOCABULARY, _WIDTH = 12, 6
MicroBatch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """x + MLP(LayerNorm(x)), with a hidden layer `wide` times as wide as the input; in fp32."""

    def __init__(self, width: int, wide: int = 4, dropout: float = 0.0):
        super().__init__()
        self.norm, self.first = nn.LayerNorm(width), nn.Linear(width, wide * width)
        self.second, self.dropout = nn.Linear(wide * width, width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.second(F.gelu(self.first(self.norm(x)))))


# --- Task 1 ---------------------------------------------------------------------------------------------------------


@check("Task 1, what the scheduler counts", seconds=300)
def optimizer_steps(answer: Callable[[int, int, int, int], int]) -> None:
    for samples, micro_batch, accumulate_steps, epochs in (
        (64, 8, 4, 1),
        (640, 16, 1, 2),
        (100, 8, 4, 3),
        (10, 3, 2, 5),
        (5, 8, 4, 2),
    ):
        got = answer(samples, micro_batch, accumulate_steps, epochs)
        micro_batches = math.ceil(samples / micro_batch)
        wanted = epochs * math.ceil(micro_batches / accumulate_steps)
        if got != wanted:
            case = f"{samples} samples, micro-batches of {micro_batch} by {accumulate_steps}, {epochs} epochs"
            expect(False, f"For {case} you return {got!r}, and there are {wanted} steps. " + _why_steps(
                got, samples, micro_batch, accumulate_steps, epochs))  # fmt: skip


def _why_steps(got: object, samples: int, micro_batch: int, accumulate_steps: int, epochs: int) -> str:
    micro_batches = math.ceil(samples / micro_batch)
    if got == epochs * micro_batches:
        return "That is the number of micro-batches; an optimizer step comes after several of them."
    if got == math.ceil(epochs * micro_batches / accumulate_steps):
        return "Every epoch ends with its own tail and its own last step: round up in each epoch, then multiply."
    down, up = samples // micro_batch, micro_batches
    if got in [
        epochs * n for n in (up // accumulate_steps, down // accumulate_steps, math.ceil(down / accumulate_steps))
    ]:
        return (
            "Round up both times: a smaller micro-batch is one, and what is left at the end of an epoch makes a step."
        )
    return "First the micro-batches of one epoch, rounded up; then the groups of them, rounded up; then the epochs."


# --- Task 2 ---------------------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """A small language model: tokens (B, T) in, logits (B, T, V) out."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(_VOCABULARY, _WIDTH), nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))


def ragged(lengths: Sequence[Sequence[int]], seed: int = 0) -> list[MicroBatch]:
    """Micro-batches of (tokens, targets), both (B, T); a length for each text, and -100 where there is no target."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for group in lengths:
        tokens = torch.randint(_VOCABULARY, (len(group), max(*group, 1)), generator=generator)
        targets = torch.randint(_VOCABULARY, tokens.shape, generator=generator)
        for row, length in enumerate(group):
            targets[row, length:] = IGNORED
        made.append((tokens, targets))
    return made


_RAGGED = [[3, 9], [20, 14], [2, 5], [11, 16], [4, 4], [30, 2], [7, 1], [12, 19], [6, 25], [2, 3]]


@dataclass(frozen=True)
class _Step:
    """What one optimizer step saw: the micro-batches run since the last one, and the gradient."""

    forwards: int
    gradient: torch.Tensor


class _Recorder(torch.optim.SGD):
    """An optimizer that writes down every step."""

    def __init__(self, model: Reader):
        super().__init__(model.parameters(), lr=0.5)
        self.steps: list[_Step] = []
        self.forwards = 0
        model.register_forward_hook(self._ran)

    def _ran(self, *_) -> None:
        self.forwards += 1

    def step(self, closure=None):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.param_groups[0]["params"]]
        self.steps.append(_Step(self.forwards, torch.cat([g.flatten() for g in grads])))
        self.forwards = 0
        return super().step(closure)


@check("Task 2, accumulation over ragged lengths", seconds=300)
def train_epoch(answer: Callable[[nn.Module, torch.optim.Optimizer, list[MicroBatch], int], int]) -> None:
    empty = ragged([[5, 2], [0, 0], [8, 3]], seed=1)
    cases = [
        (ragged(_RAGGED[:8]), 4),
        (ragged(_RAGGED), 4),
        (ragged(_RAGGED[:3]), 4),
        (ragged(_RAGGED[:5]), 1),
        (empty, 3),
    ]
    for micro_batches, accumulate_steps in cases:
        torch.manual_seed(0)
        model = Reader()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)  # what an earlier epoch may leave behind
        start, optimizer = copy.deepcopy(model), _Recorder(model)
        with _kept_at_once() as kept:
            returned = answer(model, optimizer, micro_batches, accumulate_steps)
        case = f"With {len(micro_batches)} micro-batches by {accumulate_steps}, "
        groups = [micro_batches[i : i + accumulate_steps] for i in range(0, len(micro_batches), accumulate_steps)]
        _examine_steps(case, optimizer.steps, groups, start)
        largest = max(_kept_by(start, batch) for batch in micro_batches)
        expect(
            kept.peak <= 1.5 * largest,
            case + "the graphs of several micro-batches are alive at the same time, so nothing is saved: "
            f"{kept.peak} bytes kept, and the largest micro-batch alone needs {largest}. Call backward on each loss.",
        )
        expect(
            returned == len(groups), case + f"return the number of optimizer steps, {len(groups)}, not {returned!r}."
        )


def _examine_steps(case: str, steps: list[_Step], groups: list[list[MicroBatch]], model: Reader) -> None:
    model = copy.deepcopy(model)
    if steps and len(groups[0]) > 1:
        expect(
            steps[0].forwards != 1,
            case + "the first optimizer step comes after one micro-batch. Step when i + 1, not i, is a multiple.",
        )
    expect(
        len(steps) == len(groups),
        case + f"there are {len(steps)} optimizer steps, and {len(groups)} are due. "
        + ("What is left at the end needs a step of its own." if len(steps) < len(groups) else "Step once a group."),
    )  # fmt: skip
    before = torch.cat([torch.ones_like(p).flatten() for p in model.parameters()])
    for number, (step, group) in enumerate(zip(steps, groups, strict=True), start=1):
        expect(
            step.forwards == len(group),
            case + f"step {number} is made of {step.forwards} micro-batches, and it should be of {len(group)}.",
        )
        wanted = _gradient(model, group, lambda group: [1 / _tokens(group)] * len(group))
        if not torch.allclose(step.gradient, wanted, rtol=1e-4, atol=1e-6):
            expect(
                False,
                case
                + f"step {number} has a wrong gradient. "
                + _why_gradient(step.gradient, wanted, model, group, before, steps),
            )
        before = step.gradient
        offset = 0
        for parameter in model.parameters():
            parameter.data -= 0.5 * wanted[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()


def _why_gradient(
    got: torch.Tensor, wanted: torch.Tensor, model: Reader, group: list, before: torch.Tensor, steps: list
) -> str:
    size, most = len(group), max(step.forwards for step in steps)
    own = [max(1, _tokens([batch])) for batch in group]
    if not torch.isfinite(got).all():
        return "It holds a nan: a micro-batch without any target has a mean of 0 / 0. Take sums, not means."
    if torch.allclose(got, wanted + before, rtol=1e-4, atol=1e-6):
        return "The gradient of before is still in it: call zero_grad before the first backward, and after each step."
    for weights, hint in (
        ([1 / (size * n) for n in own], "It is a mean of means, in which tokens of short micro-batches weigh more. "
         "Sum the losses of the tokens, and divide by the number of targets in the whole group."),
        ([1 / (most * n) for n in own], "It is a mean of means, and this group is smaller than accumulate_steps."),
        ([1 / n for n in own], "It is a sum of means. Divide by the number of targets in the whole group."),
        ([1.0] * size, "It is a sum over tokens that nobody has divided by their number."),
    ):  # fmt: skip
        if torch.allclose(got, _gradient(model, group, lambda _, w=weights: w), rtol=1e-4, atol=1e-6):
            return hint
    padded = sum(targets.numel() for _, targets in group)
    if torch.allclose(got, wanted * _tokens(group) / padded, rtol=1e-4, atol=1e-6):
        return "You divide by all positions. Those with a target of -100 do not count."
    return (
        "Compare it with cross_entropy(..., reduction='sum') over all of the group, divided by its number of targets."
    )


def _tokens(group: list[MicroBatch]) -> int:
    return sum(int((targets != IGNORED).sum()) for _, targets in group)


def _gradient(
    model: Reader, group: list[MicroBatch], weights: Callable[[list[MicroBatch]], list[float]]
) -> torch.Tensor:
    """The gradient of the summed losses, each micro-batch with its weight."""
    model = copy.deepcopy(model)
    model.zero_grad()
    for (tokens, targets), weight in zip(group, weights(group), strict=True):
        logits = model(tokens).transpose(1, 2)
        (weight * F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


class _Kept:
    """Bytes that autograd keeps at the same time, over a run that calls backward in between."""

    def __init__(self):
        self.now = self.peak = 0

    def pack(self, tensor: torch.Tensor) -> "_Box":
        box, size = _Box(tensor), tensor.nbytes
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(box, self._died, size).atexit = False
        return box

    def _died(self, size: int) -> None:
        self.now -= size


class _Box:
    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


@contextlib.contextmanager
def _kept_at_once() -> Iterator[_Kept]:
    kept = _Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda box: box.tensor):
        yield kept


def _kept_by(model: Reader, batch: MicroBatch) -> int:
    with _kept_at_once() as kept:
        loss = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], ignore_index=IGNORED, reduction="sum")
    peak = kept.peak
    del loss
    return peak


# --- Task 3 ---------------------------------------------------------------------------------------------------------

CONFIGURATIONS = (
    {"blocks": 5, "batch": 8, "tokens": 16, "width": 32, "accumulate_steps": 1, "checkpointing": False},
    {"blocks": 5, "batch": 8, "tokens": 16, "width": 32, "accumulate_steps": 4, "checkpointing": False},
    {"blocks": 6, "batch": 8, "tokens": 16, "width": 32, "accumulate_steps": 1, "checkpointing": True},
    {"blocks": 6, "batch": 12, "tokens": 10, "width": 48, "accumulate_steps": 3, "checkpointing": True},
)


def counted(blocks: int, batch: int, tokens: int, width: int, accumulate_steps: int, checkpointing: bool) -> int:
    """What autograd keeps when the forward of one micro-batch through so many blocks ends, counted."""
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    x = torch.randn(batch // accumulate_steps, tokens, width)
    return count.saved_bytes(lambda: _run(model, x, range(blocks) if checkpointing else ()), model).bytes


@check("Task 3, four configurations", seconds=300)
def kept_bytes(answer: Callable[..., int]) -> None:
    for setup in CONFIGURATIONS:
        got, wanted = answer(**setup), counted(**setup)
        if got != wanted:
            words = (
                f"{setup['blocks']} blocks, batch {setup['batch']}, {setup['tokens']} tokens, width {setup['width']}"
            )
            words += f", accumulate_steps {setup['accumulate_steps']}" + ", checkpointing" * setup["checkpointing"]
            expect(
                False,
                f"For {words} the counter finds {wanted} bytes; you predict {got!r}. " + _why_kept(got, **setup),
            )


def _why_kept(
    got: object, blocks: int, batch: int, tokens: int, width: int, accumulate_steps: int, checkpointing: bool
) -> str:
    if not isinstance(got, int | float):
        return "Return a number of bytes."
    positions = batch // accumulate_steps * tokens
    plain, border = 4 * blocks * positions * (10 * width + 2), 4 * blocks * positions * width
    wanted = border if checkpointing else plain
    if got == wanted * accumulate_steps:
        return "One micro-batch is alive at a time: batch // accumulate_steps samples."
    if got * 4 == wanted:
        return "You count numbers; in fp32 each has 4 bytes."
    if got == wanted / blocks:
        return "That is one block; all of them keep something until backward comes."
    if not checkpointing and got == 40 * blocks * positions * width:
        return "The LayerNorm also keeps a mean and a scale for each token, 4 bytes each."
    if checkpointing and got == plain:
        return "That is without checkpoints: with them, a block keeps its input and nothing else."
    if checkpointing and got == border + 4 * positions * (10 * width + 2):
        return "The inside of one block comes back in backward only; the question is what is kept when forward ends."
    return "Go through the block: what does each operation need for its derivative, and how wide is that?"


# --- Task 4 ---------------------------------------------------------------------------------------------------------


def _run(blocks: Sequence[nn.Module], x: torch.Tensor, chosen: Collection[int]) -> torch.Tensor:
    for i, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False) if i in chosen else block(x)
    return x


@check("Task 4, checkpoints where you want them", seconds=300)
def run_blocks(answer: Callable[[nn.Sequential, torch.Tensor, Collection[int]], torch.Tensor]) -> None:
    for chosen, training in (((), True), ((0, 1, 2, 3), True), ((1, 3), True), ((2,), True), ((0, 1, 2, 3), False)):
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Block(16, dropout=0.3) for _ in range(4))).train(training)
        x = torch.randn(5, 16)  # as images: the input itself needs no gradient
        case = f"With the blocks {list(chosen)} chosen, " + "in eval mode, " * (not training)
        out, wanted = (_outcome(blocks, functools.partial(run, blocks, x, set(chosen))) for run in (answer, _run))
        expect(isinstance(out.value, torch.Tensor), case + "the function must return the output, a tensor.")
        same = out.value.shape == wanted.value.shape and torch.allclose(out.value, wanted.value, atol=1e-5)
        expect(same, case + "the output differs from that of the blocks, each run on the output of the one before.")
        expect(
            out.gradients is not None,
            case + "some parameters get no gradient. The old variant loses them where the input needs none: "
            "write use_reentrant=False.",
        )
        expect(
            torch.allclose(out.gradients, wanted.gradients, rtol=1e-4, atol=1e-5),
            case
            + "the gradients are wrong. Dropout must draw the same mask in the second run: keep preserve_rng_state.",
        )
        if out.kept != wanted.kept:
            where = "checkpoint these blocks one by one, and no others" if out.kept < wanted.kept else (
                "some of them are not checkpointed")  # fmt: skip
            expect(False, case + f"{out.kept} bytes are kept, and {wanted.kept} should be: {where}.")


@dataclass(frozen=True)
class _Outcome:
    value: object
    gradients: torch.Tensor | None
    kept: int


def _outcome(blocks: nn.Module, forward: Callable[[], torch.Tensor]) -> _Outcome:
    blocks.zero_grad()
    torch.manual_seed(1)
    value = forward()
    if not isinstance(value, torch.Tensor):
        return _Outcome(value, None, 0)
    if value.requires_grad:
        value.square().sum().backward()
    gradients = [p.grad for p in blocks.parameters()]
    found = None if any(g is None for g in gradients) else torch.cat([g.flatten() for g in gradients])
    return _Outcome(value.detach(), found, count.saved_bytes(forward, blocks).bytes)


# --- Task 5 ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """For each block: bytes kept without a checkpoint, bytes kept with one, FLOPs of its second run."""

    kept: tuple[int, ...]
    border: tuple[int, ...]
    again: tuple[int, ...]


def network(wides: Sequence[int], width: int = 16) -> nn.Sequential:
    """Blocks of the same width, whose hidden layers are `wides` times as wide."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, wide) for wide in wides))


def costs(blocks: nn.Sequential, x: torch.Tensor) -> Costs:
    """Count what a checkpoint would save and cost, block by block."""
    kept = [count.saved_bytes(lambda b=b: b(x), b).bytes for b in blocks]
    border = [count.saved_bytes(lambda b=b: checkpoint(b, x, use_reentrant=False), b).bytes for b in blocks]
    again = [_step_flops(b, x, {0}) - _step_flops(b, x, ()) for b in blocks]
    return Costs(tuple(kept), tuple(border), tuple(again))


def _step_flops(block: nn.Module, x: torch.Tensor, chosen: Collection[int]) -> int:
    return step_flops(nn.Sequential(block), x, chosen)


def step_flops(blocks: nn.Sequential, x: torch.Tensor, chosen: Collection[int]) -> int:
    """FLOPs of a forward and a backward with checkpoints on the chosen blocks; the input gets its gradient too."""
    return count.flops(lambda: _run(blocks, x.detach().requires_grad_(), chosen).sum().backward())


def kept_with(blocks: nn.Sequential, x: torch.Tensor, chosen: Collection[int]) -> int:
    """Bytes that autograd keeps when forward ends, with checkpoints on the chosen blocks."""
    return count.saved_bytes(lambda: _run(blocks, x, chosen), blocks).bytes


@check("Task 5, the fewest FLOPs under a budget", seconds=300)
def choose(answer: Callable[[Costs, int], Collection[int] | None]) -> None:
    for wides, shares in (
        ((4, 4, 4, 4), (1.0, 0.7, 0.4)),
        ((1, 2, 8, 3, 6), (0.8, 0.6, 0.35)),
        ((7, 5, 5, 2, 1, 3), (0.62, 0.5)),
    ):
        found = _place(wides).costs
        for share in shares:
            _examine_choice(answer, wides, int(share * sum(found.kept)))
    found = _place((2, 3)).costs
    got = answer(found, sum(found.border) - 1)
    expect(got is None, f"Where even checkpoints on all blocks keep too much, return None, not {got!r}.")


@dataclass(frozen=True)
class _Place:
    """A network to spend FLOPs in, its input, its costs, and the FLOPs of a step without checkpoints."""

    blocks: nn.Sequential
    x: torch.Tensor
    costs: Costs
    plain: int


@functools.cache
def _place(wides: tuple[int, ...]) -> _Place:
    blocks, x = network(wides), torch.randn(6, 16)
    return _Place(blocks, x, costs(blocks, x), step_flops(blocks, x, ()))


def _examine_choice(answer: Callable, wides: tuple[int, ...], budget: int) -> None:
    place = _place(wides)
    blocks, x, found = place.blocks, place.x, place.costs
    got = answer(found, budget)
    case = f"With {len(blocks)} blocks that keep {list(found.kept)} bytes and a budget of {budget}, "
    expect(got is not None, case + "there is a choice that fits; you return None.")
    expect(
        isinstance(got, Collection) and all(isinstance(i, int) and 0 <= i < len(blocks) for i in got),
        case + f"return the numbers of the blocks to checkpoint, counted from 0; you return {got!r}.",
    )
    chosen = set(got)
    kept = kept_with(blocks, x, chosen)
    expect(
        kept <= budget,
        case + f"your choice {sorted(chosen)} keeps {kept} bytes by the counter. "
        "A checkpointed block still keeps its border, and all other blocks keep everything.",
    )
    extra, least = step_flops(blocks, x, chosen) - place.plain, min_extra(found, budget)
    expect(
        extra <= least,
        case + f"your choice {sorted(chosen)} fits and costs {extra} FLOPs more; {least} would do. "
        + _why_choice(chosen, found, budget),
    )  # fmt: skip


def _why_choice(chosen: set[int], found: Costs, budget: int) -> str:
    if len(chosen) == len(found.kept):
        return "You checkpoint every block; the budget does not ask for all of them."
    for i in sorted(chosen):
        if _total(found, chosen - {i}) <= budget:
            return f"Block {i} need not be checkpointed at all."
    return "Taking the best-looking block first is not enough; with so few blocks you can try every set of them."


def _total(found: Costs, chosen: Collection[int]) -> int:
    return sum(b if i in chosen else k for i, (k, b) in enumerate(zip(found.kept, found.border, strict=True)))


def _subsets(number: int) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(range(number), size) for size in range(number + 1))


def min_extra(found: Costs, budget: int) -> int:
    """The fewest extra FLOPs with which the blocks keep at most `budget` bytes."""
    fitting = [chosen for chosen in _subsets(len(found.kept)) if _total(found, chosen) <= budget]
    return min(sum(found.again[i] for i in chosen) for chosen in fitting)
