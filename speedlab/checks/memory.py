"""The checks of exercise 6: optimizer steps, a ragged accumulation loop, kept bytes, checkpoints under a budget."""

import copy
import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from speedlab import count
from speedlab.checks.core import ask, check, close, diagnose, distance, expect, fail, sequence, where, whole, without

IGNORED = -100
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

_RUNS = ((64, 8, 4, 1), (640, 16, 1, 2), (100, 8, 4, 3), (10, 3, 2, 5), (5, 8, 4, 2), (97, 4, 8, 2))


@check("Task 1, what the scheduler counts")
def optimizer_steps(answer: Callable[[int, int, int, int], int]) -> None:
    for samples, micro_batch, accumulate_steps, epochs in _RUNS:
        got = whole(ask(answer, samples, micro_batch, accumulate_steps, epochs), "The number of steps")
        down, up = samples // micro_batch, math.ceil(samples / micro_batch)
        an_epoch = math.ceil(up / accumulate_steps)
        if got == epochs * an_epoch:
            continue
        at_once = math.ceil(epochs * up / accumulate_steps)
        rounded_down = {epochs * n for n in (up // accumulate_steps, down // accumulate_steps)}
        rounded_down |= {epochs * math.ceil(down / accumulate_steps)}
        rounded_down |= {epochs * samples // (micro_batch * accumulate_steps)}
        hints = {
            "That is the number of micro-batches; an optimizer step comes after several of them.": epochs * up,
            "That is for one epoch only.": an_epoch,
            "Every epoch has its own tail and its own last step: round up in each epoch, then multiply.": at_once,
            "Round up both times: a smaller micro-batch counts, and so does a smaller group.": got in rounded_down,
        }
        why = diagnose(got, hints, "Round up the micro-batches of an epoch, then their groups; then multiply.")
        case = f"{samples} samples, micro-batches of {micro_batch} in groups of {accumulate_steps}, {epochs} epochs"
        fail(f"{case}: there are {epochs * an_epoch} steps; you return {got}. {why}")


# --- Task 2 ---------------------------------------------------------------------------------------------------------

_VOCABULARY, _WIDTH, _RATE = 12, 6, 0.5
_RAGGED = [[3, 9], [20, 14], [2, 5], [11, 16], [4, 4], [30, 2], [7, 1], [12, 19], [6, 25], [2, 3]]
_NONE = [0, 0]  # two texts without a target


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


@check("Task 2, accumulation over ragged lengths")
def train_epoch(answer: Callable[[nn.Module, torch.optim.Optimizer, list[MicroBatch], int], int]) -> None:
    for lengths, accumulate_steps in (
        (_RAGGED[:8], 4),
        (_RAGGED, 4),
        (_RAGGED[:3], 4),
        (_RAGGED[:5], 1),
        ([[5, 2], _NONE, [8, 3]], 3),
        ([[5, 2], [4, 1], _NONE, _NONE, [8, 3]], 2),  # a group without any target, in the middle
        ([_NONE, _NONE, [5, 2], [4, 1], [8, 3], _NONE, [6, 2], [7, 1], _NONE], 2),  # first, within, and last
        ([[9, 9]] * 8, 8),
    ):
        micro_batches = ragged(lengths)
        cut = [micro_batches[i : i + accumulate_steps] for i in range(0, len(lengths), accumulate_steps)]
        groups = [group for group in cut if _targets(group)]
        with where(f"With {len(micro_batches)} micro-batches by {accumulate_steps}"):
            start, run = _recorded(answer, micro_batches, accumulate_steps)
            _examine_steps(run.steps, groups, cut, start)
            ended = nn.utils.parameters_to_vector(start.parameters())
            expect(_same(run.trained, ended), "the weights at the end are not those that the steps produced.")
            alone, own = (
                max(_recorded(loop, [batch], 1)[1].kept for batch in micro_batches) for loop in (_one_by_one, answer)
            )
            expect(
                run.kept <= min(4 * alone, 1.5 * own),
                "the graphs of several micro-batches are alive at the same time, so no memory is saved: "
                f"{run.kept} bytes kept, where one by one needs {min(alone, own)}. Run the model on one micro-batch, "
                "call backward on its loss, then take the next.",
            )
            told = whole(run.returned, "The number of optimizer steps")
            expect(told == len(groups), f"return the number of optimizer steps, {len(groups)}, not {told}.")


@dataclass
class _Run:
    """What an answer did: (forwards, gradient) at every step, the most bytes kept at once, and what it returned."""

    steps: list[tuple[int, torch.Tensor]]
    kept: int = 0
    returned: object = None
    trained: torch.Tensor | None = None


def _recorded(answer: Callable, micro_batches: list[MicroBatch], accumulate_steps: int) -> tuple[Reader, _Run]:
    torch.manual_seed(0)
    model = Reader()
    start, run, alive, forwards = copy.deepcopy(model), _Run([]), [0], [0]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # what an earlier epoch may leave behind

    def forward(*_) -> None:
        forwards[0] += 1

    def step(*_) -> None:
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        run.steps.append((forwards[0], torch.cat([gradient.flatten() for gradient in found])))
        forwards[0] = 0

    def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        tensor = tensor.detach()  # an output with its graph would hold the box that holds it, until backward

        def box() -> torch.Tensor:
            return tensor

        alive[0] += tensor.nbytes
        run.kept = max(run.kept, alive[0])
        weakref.finalize(box, died, tensor.nbytes).atexit = False
        return box

    def died(size: int) -> None:
        alive[0] -= size

    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    model.register_forward_hook(forward)
    optimizer.register_step_post_hook(step)  # after the closure, if there is one
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box()):
        run.returned = answer(model, optimizer, copy.deepcopy(micro_batches), accumulate_steps)
    run.trained = nn.utils.parameters_to_vector(model.parameters()).detach()
    return start, run


def _one_by_one(model: Reader, optimizer: torch.optim.Optimizer, micro_batches: list[MicroBatch], _: int) -> None:
    for tokens, targets in micro_batches:
        _summed_loss(model, tokens, targets).backward()


def _summed_loss(model: Reader, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).transpose(1, 2), targets, ignore_index=IGNORED, reduction="sum")


def _examine_steps(
    steps: list[tuple[int, torch.Tensor]], groups: list[list[MicroBatch]], cut: list[list[MicroBatch]], model: Reader
) -> None:
    """Compare each step with its group's; `cut` holds the groups without targets too. Trains `model` correctly."""
    expect(steps, "there is no optimizer step at all. Call optimizer.step() once per group.")
    early = steps[0][0] == 1 < max(forwards for forwards, _ in steps)
    expect(not early, "the first optimizer step comes after one micro-batch. Step when i + 1, not i, is a multiple.")
    for _, gradient in steps:
        expect(
            gradient.isfinite().all(),
            "a gradient holds a nan. Sum the losses, divide by the number of targets in the group, and leave out "
            "a group that has none.",
        )
    fewer = "Each group ends in a step, even the last: step when i + 1 is a multiple, and return after the loop."
    if not all(_targets([batch]) for group in cut for batch in group):
        fewer = "A micro-batch without targets counts as a member of its group, and may be its last. Go on after it."
    elif len(cut[-1]) < len(cut[0]):
        fewer = "What is left at the end needs a step of its own."
    more = "Step once per group; a group without any target makes no step."
    due = f"your optimizer steps: {len(steps)}; due: {len(groups)}. "
    expect(len(steps) == len(groups), due + (fewer if len(steps) < len(groups) else more))
    before, most = torch.ones_like(steps[0][1]), max(map(len, groups))
    for number, ((_, gradient), group) in enumerate(zip(steps, groups, strict=True), start=1):
        wanted = _gradient(model, group, [1 / _targets(group)] * len(group))
        if not _same(gradient, wanted):
            otherwise = "Sum the losses of the whole group, and divide by its number of targets."
            if number == 1 and cut[0] is group and steps[0][0] > len(group):
                otherwise = f"The step comes after {steps[0][0]} micro-batches, but its group has {len(group)}."
            if _same(gradient, _of_those_with_targets(model, cut, number)):
                otherwise = "A micro-batch without targets counts as a member of its group: form the groups first."
            why = _why_gradient(gradient, wanted, before, model, group, most, otherwise)
            fail(f"step {number} has a wrong gradient. {why}")
        before = gradient
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector - _RATE * wanted, model.parameters())


_same = functools.partial(close, relative=1e-4, absolute=1e-6)


def _why_gradient(
    got: torch.Tensor,
    wanted: torch.Tensor,
    before: torch.Tensor,
    model: Reader,
    group: list[MicroBatch],
    most: int,
    otherwise: str,
) -> str:
    size, own = len(group), [max(1, _targets([batch])) for batch in group]
    every, padded = _targets(group), sum(targets.numel() for _, targets in group)
    means = "It is a mean of means, in which tokens of short micro-batches weigh more. Sum the losses of the tokens, "
    hints = {
        "Every number in it is zero, or None: does zero_grad come between backward and the step? Or do you train "
        "another model instead of the one that you are given?": not bool(got.any()),
        "Nothing is new in it: backward on the whole group comes before its step, on the model that you are given, "
        "and not under no_grad.": _same(got, before),
        "The previous gradient is in it: zero_grad before the first backward, and after each step.": wanted + before,
        means + "and divide by the number of targets in the whole group.": [1 / (size * n) for n in own],
        "It is a mean of means, and this group is smaller than accumulate_steps.": [1 / (most * n) for n in own],
        "It is a sum of means. Divide by the number of targets in the whole group.": [1 / n for n in own],
        "It is a sum over tokens that nobody has divided by their number.": [1.0] * size,
        "You divide by all positions. Those with a target of -100 do not count.": [1 / padded] * size,
        "Only the last micro-batch is in it: zero_grad once per group, not before each backward.": [0] * (size - 1)
        + [1 / every],
        "Only the first micro-batch is in it.": [1 / every] + [0] * (size - 1),
    }
    found = {hint: _gradient(model, group, w) if isinstance(w, list) else w for hint, w in hints.items()}
    return diagnose(got, found, otherwise, _same)


def _of_those_with_targets(model: Reader, cut: list[list[MicroBatch]], number: int) -> torch.Tensor:
    """The gradient of a step if micro-batches without targets are dropped before the groups are cut."""
    left = [batch for group in cut for batch in group if _targets([batch])]
    group = left[(number - 1) * len(cut[0]) : number * len(cut[0])]
    return _gradient(model, group, [1 / _targets(group)] * len(group)) if group else torch.full((1,), math.nan)


def _targets(group: list[MicroBatch]) -> int:
    return sum(int((targets != IGNORED).sum()) for _, targets in group)


def _gradient(model: Reader, group: list[MicroBatch], weights: Sequence[float]) -> torch.Tensor:
    """The gradient of the summed losses, each micro-batch with its weight."""
    loss = sum(w * _summed_loss(model, *batch) for batch, w in zip(group, weights, strict=True))
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(model.parameters()))])


# --- Task 3 ---------------------------------------------------------------------------------------------------------

_NAMES = ("blocks", "batch", "tokens", "width", "accumulate_steps", "checkpointing")
CONFIGURATIONS = tuple(
    dict(zip(_NAMES, setup, strict=True))
    for setup in (
        (5, 8, 16, 32, 1, False),
        (5, 8, 16, 32, 4, False),
        (6, 8, 16, 32, 1, True),
        (6, 12, 10, 48, 3, True),
    )
)
# setups that a formula must also get right, and that a table of the four above does not cover
_MORE = tuple(dict(zip(_NAMES, setup, strict=True)) for setup in ((3, 6, 7, 24, 2, False), (2, 9, 5, 40, 3, True)))


def counted(blocks: int, batch: int, tokens: int, width: int, accumulate_steps: int, checkpointing: bool) -> int:
    """What autograd keeps when the forward of one micro-batch through that many blocks ends, counted."""
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    x = torch.randn(batch // accumulate_steps, tokens, width)
    return count.saved_bytes(lambda: _run(model, x, range(blocks) if checkpointing else ()), model).bytes


@check("Task 3, predict, then count")
def kept_bytes(answer: Callable[..., int]) -> None:
    for setup in (*CONFIGURATIONS, *_MORE):
        wanted = counted(**setup)
        with without("You run the blocks. Predict with arithmetic, and compare with the counter afterwards.", "mm"):
            got = whole(ask(answer, **setup), "The number of bytes")
        words = "{blocks} blocks, batch {batch}, {tokens} tokens, width {width}, accumulate_steps {accumulate_steps}"
        with where(words.format(**setup) + ", checkpointing" * setup["checkpointing"]):
            if got != wanted:
                fail(f"the counter finds {wanted} bytes; you predict {got}. {_why_kept(got, **setup)}")


def _why_kept(
    got: int, blocks: int, batch: int, tokens: int, width: int, accumulate_steps: int, checkpointing: bool
) -> str:
    positions = batch // accumulate_steps * tokens
    border, statistics = 4 * blocks * positions * width, 8 * blocks * positions
    plain = 10 * border + statistics
    wanted = border if checkpointing else plain
    hints = {
        "One micro-batch is alive at a time: batch // accumulate_steps samples.": wanted * accumulate_steps,
        "You count numbers; in fp32 each has 4 bytes.": wanted / 4,
        "That is for one block; all of them keep something until backward.": wanted / blocks,
    }
    if checkpointing:
        hints |= {
            "That is without checkpoints: with them, a block keeps its input and nothing else.": plain,
            "The LayerNorm's mean and scale are inside the block: they come back in backward.": border + statistics,
            "The inside of a block comes back in backward only; count what is kept when forward ends.": border
            + plain / blocks,
        }
    else:
        hints["The LayerNorm also keeps a mean and a scale for each token, 4 bytes each."] = 10 * border
        hints["The LayerNorm keeps a mean and a scale, so two numbers per token."] = 10 * border + statistics / 2
    otherwise = "Go through the block: what does each operation need for its derivative, and how wide is that?"
    if checkpointing:
        otherwise = "With checkpoints a block keeps its input and nothing else; the first block's input counts too."
    return diagnose(got, hints, otherwise, same=operator.eq)


# --- Task 4 ---------------------------------------------------------------------------------------------------------


def _run(blocks: Sequence[nn.Module], x: torch.Tensor, chosen: Collection[int], **options) -> torch.Tensor:
    for i, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False, **options) if i in chosen else block(x)
    return x


def _bound_late(blocks: Sequence[nn.Module], x: torch.Tensor, chosen: Collection[int]) -> torch.Tensor:
    for i, block in enumerate(blocks):
        x = checkpoint(lambda h: block(h), x, use_reentrant=False) if i in chosen else block(x)  # noqa: B023
    return x


@check("Task 4, checkpoints where you want them")
def run_blocks(answer: Callable[[nn.Sequential, torch.Tensor, Collection[int]], torch.Tensor]) -> None:
    for chosen, training in (((), True), ((0, 1, 2, 3), True), ((1, 3), True), ((2,), True), ((0, 1, 2, 3), False)):
        outcome = functools.partial(_outcome, chosen=chosen, training=training)
        with where(f"With the blocks {list(chosen)} chosen" + ", in eval mode" * (not training)):
            out, wanted = outcome(answer), outcome(_run)
            expect(
                out.same_inputs,
                "your function changes its inputs: the blocks' mode, dropout or forward, x, or its requires_grad.",
            )
            order = f"in forward the blocks run as {out.ran}: run each once, in order."
            expect(out.ran == wanted.ran, order)
            alike = out.value.shape == wanted.value.shape and close(out.value, wanted.value, absolute=1e-5)
            expect(alike, "the output differs from that of the blocks, each run on the output of the one before.")
            lost = [name for name, gradient in out.gradients.items() if gradient is None]
            old = (
                "Write use_reentrant=False: True loses gradients where the input needs none. So does no_grad, "
                "and a detach cuts off all blocks before it."
            )
            cause = old if chosen else "Does a no_grad or a detach cut them off?"
            expect(not lost, f"{len(lost)} of {len(out.gradients)} parameters get no gradient. {cause}")
            if not _same(out.gradients, wanted.gradients):
                masks = functools.partial(_run, preserve_rng_state=False)
                hints = {
                    "Dropout must draw the same mask in the second run: keep preserve_rng_state.": masks,
                    "Each rerun uses the last block: a lambda looks a name up when it is called.": _bound_late,
                }
                found = {hint: outcome(fault).gradients for hint, fault in hints.items()}
                fail(f"the gradients are wrong. {diagnose(out.gradients, found, 'Compare with blocks(x).', _same)}")
            again, due = out.again, sorted(chosen, reverse=True)
            missing, extra = ([i for i in a if i not in b] for a, b in ((due, again), (again, due)))
            expect(not missing, f"the blocks {missing} are not checkpointed: in backward they do not run again.")
            expect(not extra, f"the blocks {extra} are checkpointed: checkpoint the chosen ones, and no others.")
            expect(
                again == due, f"in backward the blocks run again as {again}: checkpoint these one by one, once each."
            )
            # checkpoint keeps an input that is given by name where no hook of saved tensors sees it
            expect(
                out.kept <= wanted.kept + 64,
                f"{out.kept} bytes are kept, but {wanted.kept} should be: the chosen blocks run again, yet "
                "something inside them is kept.",
            )


@dataclass(frozen=True)
class _Outcome:
    value: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    kept: int
    same_inputs: bool
    ran: list[int]  # the blocks that ran in forward, one after the other
    again: list[int]  # those that ran in backward


def _outcome(run: Callable, chosen: Collection[int], training: bool) -> _Outcome:
    """What a run gives on blocks and an input of its own, which are the same every time."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(16, dropout=0.3) for _ in range(4))).train(training)
    x = torch.randn(5, 16)  # as images: the input itself needs no gradient
    before, made, ran = (copy.deepcopy(blocks), x.clone()), [], []
    for i, block in enumerate(blocks):
        block.first.register_forward_hook(lambda *_, i=i: ran.append(i))
    torch.manual_seed(1)
    kept = count.saved_bytes(lambda: made.append(run(blocks, x, set(chosen))), blocks).bytes
    value = made[0]
    expect(isinstance(value, torch.Tensor), "the function must return the output, a tensor.")
    same = not x.requires_grad and distance(x, before[1]) == distance(blocks, before[0]) == 0
    pairs = zip(blocks.modules(), before[0].modules(), strict=True)
    same &= all(a.training == b.training and getattr(a, "p", 0) == getattr(b, "p", 0) for a, b in pairs)
    same &= not any("forward" in vars(module) for module in blocks.modules())
    forward = len(ran)
    if value.requires_grad:
        value.square().sum().backward()
    gradients = {name: p.grad for name, p in blocks.named_parameters()}
    return _Outcome(value, gradients, kept, same, ran[:forward], ran[forward:])


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
    alone = [nn.Sequential(block) for block in blocks]
    kept, border = ([kept_with(block, x, chosen) for block in alone] for chosen in ((), {0}))
    again = [step_flops(block, x, {0}) - step_flops(block, x, ()) for block in alone]
    return Costs(tuple(kept), tuple(border), tuple(again))


def step_flops(blocks: nn.Sequential, x: torch.Tensor, chosen: Collection[int]) -> int:
    """FLOPs of a forward and a backward with checkpoints on the chosen blocks; the input gets its gradient too."""
    return count.flops(lambda: _run(blocks, x.detach().requires_grad_(), chosen).sum().backward())


def kept_with(blocks: nn.Sequential, x: torch.Tensor, chosen: Collection[int]) -> int:
    """Bytes that autograd keeps when forward ends, with checkpoints on the chosen blocks."""
    return count.saved_bytes(lambda: _run(blocks, x, chosen), blocks).bytes


_NETWORKS = {  # hidden widths: budgets, as shares of what the plain network keeps
    (4, 4, 4, 4): (1.0, 0.7, 0.4),
    (1, 2, 8, 3, 6): (0.8, 0.6, 0.35),
    (7, 5, 5, 2, 1, 3): (0.62, 0.5),
    (1, 7, 1, 2, 7, 9): (0.55,),  # here taking the best-looking block first is wrong, by four measures of looks
}


@check("Task 5, the fewest FLOPs under a budget")
def choose(answer: Callable[[Costs, int], Collection[int] | None]) -> None:
    for wides, shares in _NETWORKS.items():
        found = _costs(wides)
        for share in shares:
            _examine_choice(answer, found, int(share * sum(found.kept)))
    _examine_choice(answer, found, sum(found.border))  # all blocks, and exactly
    with where("Where even checkpoints on all blocks keep too much"):
        got = ask(answer, found, sum(found.border) - 1)
        expect(got is None, lambda: f"return None, not {got!r}.")


@functools.cache
def _costs(wides: tuple[int, ...]) -> Costs:
    return costs(network(wides), torch.randn(6, 16))


def _examine_choice(answer: Callable, found: Costs, budget: int) -> None:
    blocks = len(found.kept)
    got = ask(answer, found, budget)
    with where(f"With {blocks} blocks that keep {list(found.kept)} bytes and a budget of {budget}"):
        expect(got is not None, "there is a choice that fits; you return None.")
        items, numbers = sequence(got), "return the block numbers, not a mark for each."
        expect(len(items) < blocks or not all(type(i).__name__ in ("bool", "bool_") for i in items), numbers)
        given = [whole(i, "The number of a block to checkpoint", 0, blocks - 1) for i in items]
        marks = len(given) == blocks > len(set(given)) and {0, 1}.issuperset(given)
        expect(not marks, numbers)
        chosen = set(given)
        kept, extra = _total(found, chosen), sum(found.again[i] for i in chosen)
        least, best = _fewest(found, budget)
        earlier = {i - 1 for i in chosen}
        shifted = chosen and 0 not in chosen and _total(found, earlier) <= budget
        if (kept > budget or extra > least) and shifted and sum(found.again[i] for i in earlier) == least:
            fail(f"your choice {sorted(chosen)} is right if the first block has number 1: count from 0.")
        expect(
            kept <= budget,
            f"your choice {sorted(chosen)} keeps {kept} bytes. A checkpointed block still keeps its border, and all "
            "other blocks keep everything.",
        )
        if extra > least:
            spare = next((i for i in sorted(chosen) if _total(found, chosen - {i}) <= budget), None)
            hints = {
                "You checkpoint every block; the budget does not ask for all of them.": len(chosen) == blocks,
                "No checkpoint at all is a choice, too, and what is kept may reach the budget.": not best,
                "What is kept may reach the budget.": _total(found, best) == budget,
                f"Block {spare} need not be checkpointed at all.": spare is not None,
            }
            tried = "Neither the fewest blocks nor the best-looking block first is sure to cost least: try every set."
            more = f"your choice {sorted(chosen)} fits and costs {extra} FLOPs more; {least} would do."
            fail(f"{more} {diagnose(chosen, hints, tried)}")


def _total(found: Costs, chosen: Collection[int]) -> int:
    return sum(b if i in chosen else k for i, (k, b) in enumerate(zip(found.kept, found.border, strict=True)))


def _subsets(number: int) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(range(number), size) for size in range(number + 1))


def _fewest(found: Costs, budget: int) -> tuple[int, tuple[int, ...]]:
    """The fewest extra FLOPs with which the blocks keep at most `budget` bytes, and the blocks to checkpoint."""
    fitting = [chosen for chosen in _subsets(len(found.kept)) if _total(found, chosen) <= budget]
    return min((sum(found.again[i] for i in chosen), chosen) for chosen in fitting)
