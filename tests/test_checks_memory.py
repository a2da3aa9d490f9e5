"""The checks of exercise 6 accept the solution and other right answers, see a stub, and explain planted mistakes."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from speedlab import count
from speedlab.checks import memory as checks

NAME = "exercise-6-memory.ipynb"


# --- Task 1 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (lambda n, b, k, e: e * math.ceil(n / b), "number of micro-batches"),
        (lambda n, b, k, e: e * n // (b * k), "Round up both"),
        (lambda n, b, k, e: math.ceil(e * math.ceil(n / b) / k), "in each epoch"),
        (lambda n, b, k, e: e * (math.ceil(n / b) // k), "Round up both"),
        (lambda n, b, k, e: e * math.ceil(n // b / k), "Round up both"),
        (lambda n, b, k, e: None, "First the micro-batches"),
    ],
)
def test_optimizer_steps_rejects(rejects, answer, word):
    rejects("optimizer_steps", answer, word)


def test_optimizer_steps_accepts_counting(verdict):
    def by_counting(samples, micro_batch, accumulate_steps, epochs):
        micro_batches = len(range(0, samples, micro_batch))
        return sum(len(range(0, micro_batches, accumulate_steps)) for _ in range(epochs))

    assert verdict("optimizer_steps", by_counting) == "correct"


# --- Task 2 ---------------------------------------------------------------------------------------------------------


def loop(*, weigh="tokens", tail=True, zero_first=True, early=False, one_backward=False, zero_after=True):
    """An accumulation loop with mistakes to switch on."""

    def train_epoch(model, optimizer, micro_batches, accumulate_steps):
        steps, losses = 0, []
        if zero_first:
            optimizer.zero_grad()
        for i, (tokens, targets) in enumerate(micro_batches):
            begin = i - i % accumulate_steps
            group = micro_batches[begin : begin + accumulate_steps]
            total = sum(int((t != -100).sum()) for _, t in group)
            divisor = {
                "tokens": total,
                "group": len(group),
                "steps": accumulate_steps,
                "padded": sum(t.numel() for _, t in group),
                "nothing": 1,
                "sum of means": 1,
            }[weigh]
            reduction = "mean" if weigh in ("group", "steps", "sum of means") else "sum"
            loss = F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction=reduction) / divisor
            if one_backward:
                losses.append(loss)
            else:
                loss.backward()
            last = tail and i + 1 == len(micro_batches)
            if (i if early else i + 1) % accumulate_steps == 0 or last:
                if one_backward:
                    sum(losses).backward()
                    losses = []
                optimizer.step()
                if zero_after:
                    optimizer.zero_grad()
                steps += 1
        return steps

    return train_epoch


def test_train_epoch_accepts_a_loop_with_a_counter(verdict):
    assert verdict("train_epoch", loop()) == "correct"


@pytest.mark.parametrize(
    ("mistakes", "words"),
    [
        ({"weigh": "group"}, "mean of means"),
        ({"weigh": "steps"}, "mean of means"),
        ({"weigh": "sum of means"}, "sum of means"),
        ({"weigh": "padded"}, "-100 do not count"),
        ({"weigh": "nothing"}, "nobody has divided"),
        ({"tail": False}, "step of its own"),
        ({"early": True}, "after one micro-batch"),
        ({"zero_first": False}, "zero_grad"),
        ({"zero_after": False}, "zero_grad"),
        ({"one_backward": True}, "alive at the same time"),
    ],
)
def test_train_epoch_rejects(rejects, mistakes, words):
    rejects("train_epoch", loop(**mistakes), words)


def test_train_epoch_wants_the_number_of_steps(rejects):
    def silent(*arguments):
        loop()(*arguments)

    rejects("train_epoch", silent, "return the number of optimizer steps")


def test_train_epoch_sees_a_loop_that_does_nothing(rejects):
    rejects("train_epoch", lambda *_: 0, "0 optimizer steps")


def test_train_epoch_rejects_the_colleagues_loop(rejects, solution):
    rejects("train_epoch", solution["colleagues_loop"], "With 8 micro-batches by 4")


# --- Task 3 ---------------------------------------------------------------------------------------------------------


def kept(blocks, batch, tokens, width, accumulate_steps, checkpointing):
    return 4 * blocks * batch // accumulate_steps * tokens * (width if checkpointing else 10 * width + 2)


def without_statistics(**setup):
    tokens = setup["batch"] // setup["accumulate_steps"] * setup["tokens"]
    return 40 * setup["blocks"] * tokens * setup["width"] if not setup["checkpointing"] else kept(**setup)


def with_one_inside(**setup):
    return kept(**setup) + setup["checkpointing"] * kept(**{**setup, "blocks": 1, "checkpointing": False})


@pytest.mark.parametrize("width", [8, 24])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_counter_of_task_3_by_formula(width, checkpointing):
    setup = {
        "blocks": 3,
        "batch": 6,
        "tokens": 5,
        "width": width,
        "accumulate_steps": 2,
        "checkpointing": checkpointing,
    }
    assert checks.counted(**setup) == kept(**setup)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda **s: kept(**{**s, "accumulate_steps": 1}), "One micro-batch"),
        (lambda **s: kept(**s) // 4, "4 bytes"),
        (lambda **s: kept(**{**s, "blocks": 1}), "one block"),
        (without_statistics, "mean and a scale"),
        (lambda **s: kept(**{**s, "checkpointing": False}), "without checkpoints"),
        (with_one_inside, "comes back"),
        (lambda **s: None, "number of bytes"),
    ],
)  # fmt: skip
def test_kept_bytes_rejects(rejects, answer, words):
    rejects("kept_bytes", answer, words)


# --- Task 4 ---------------------------------------------------------------------------------------------------------


def under(**options):
    def run_blocks(blocks, x, chosen):
        for i, block in enumerate(blocks):
            x = checkpoint(block, x, **options) if i in chosen else block(x)
        return x

    return run_blocks


def one_segment(blocks, x, chosen):
    """All blocks in one checkpoint, if any is chosen."""
    return checkpoint(blocks, x, use_reentrant=False) if chosen else blocks(x)


def not_chained(blocks, x, chosen):
    return [under(use_reentrant=False)([block], x, {0} if i in chosen else ()) for i, block in enumerate(blocks)][-1]


def test_run_blocks_accepts_a_lambda_in_between(verdict):
    def run_blocks(blocks, x, chosen):
        for i, block in enumerate(blocks):
            x = checkpoint(lambda h, b=block: b(h), x, use_reentrant=False) if i in chosen else block(x)
        return x

    assert verdict("run_blocks", run_blocks) == "correct"


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (under(use_reentrant=True), "use_reentrant=False"),
        (under(use_reentrant=False, preserve_rng_state=False), "preserve_rng_state"),
        (lambda blocks, x, chosen: blocks(x), "not checkpointed"),
        (lambda blocks, x, chosen: under(use_reentrant=False)(blocks, x, range(4)), "no others"),
        (one_segment, "one by one"),
        (not_chained, "the output of the one before"),
        (lambda blocks, x, chosen: None, "must return the output"),
    ],
)
def test_run_blocks_rejects(rejects, answer, words):
    rejects("run_blocks", answer, words)


# --- Task 5 ---------------------------------------------------------------------------------------------------------


def total(costs, chosen):
    return sum(costs.border[i] if i in chosen else costs.kept[i] for i in range(len(costs.kept)))


def greedy(order):
    """Take blocks in some order until the budget is met."""

    def choose(costs, budget):
        chosen = set()
        for i in sorted(range(len(costs.kept)), key=lambda i: order(costs, i)):
            if total(costs, chosen) <= budget:
                break
            chosen.add(i)
        return chosen if total(costs, chosen) <= budget else None

    return choose


def every_block(costs, budget):
    return set(range(len(costs.kept))) if sum(costs.border) <= budget else None


def forgets_borders(costs, budget):
    numbers = range(len(costs.kept))
    sets = [s for size in range(len(numbers) + 1) for s in itertools.combinations(numbers, size)]
    fitting = [s for s in sets if sum(costs.kept[i] for i in numbers if i not in s) <= budget]
    return set(min(fitting, key=lambda s: sum(costs.again[i] for i in s)))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (greedy(lambda costs, i: -costs.kept[i]), "FLOPs more"),
        (greedy(lambda costs, i: costs.again[i] / (costs.kept[i] - costs.border[i])), "FLOPs more"),
        (greedy(lambda costs, i: i), "FLOPs more"),
        (forgets_borders, "keeps its border"),
        (every_block, "every block"),
        (lambda costs, budget: set(), "by the counter"),
        (lambda costs, budget: None, "there is a choice"),
        (lambda costs, budget: {"first"}, "counted from 0"),
    ],
)  # fmt: skip
def test_choose_rejects(rejects, answer, words):
    rejects("choose", answer, words)


def test_choose_wants_none_where_nothing_fits(rejects, solution):
    def always(costs, budget):
        chosen = solution["choose"](costs, budget)
        return set(range(len(costs.kept))) if chosen is None else chosen

    rejects("choose", always, "return None")


def test_choose_accepts_dynamic_programming(verdict):
    def choose(costs, budget):
        reachable = {0: (0, frozenset())}  # bytes kept: the fewest FLOPs, and how
        for i in range(len(costs.kept)):
            step = {}
            for size, (again, chosen) in reachable.items():
                for more, flops, taken in (
                    (costs.kept[i], 0, chosen),
                    (costs.border[i], costs.again[i], chosen | {i}),
                ):
                    if size + more not in step or again + flops < step[size + more][0]:
                        step[size + more] = (again + flops, taken)
            reachable = step
        fitting = [found for size, found in reachable.items() if size <= budget]
        return min(fitting, key=lambda found: found[0])[1] if fitting else None

    assert verdict("choose", choose) == "correct"


def test_the_costs_of_task_5_by_formula():
    """A second run ends before the last product: 2 FLOPs for each multiplication of the first one."""
    width, rows, wides = 16, 6, (1, 3)
    found = checks.costs(checks.network(wides), torch.randn(rows, width))
    assert found.kept == tuple(4 * rows * (2 * width + 2 + 2 * w * width) for w in wides)
    assert found.border == (4 * rows * width,) * 2
    assert found.again == tuple(2 * rows * w * width**2 for w in wides)


def test_the_costs_of_task_5_add_up():
    blocks, x = checks.network((2, 5, 3)), torch.randn(6, 16)
    found = checks.costs(blocks, x)
    for chosen in ((), (1,), (0, 2), (0, 1, 2)):
        assert checks.kept_with(blocks, x, chosen) == total(found, chosen)
        extra = checks.step_flops(blocks, x, chosen) - checks.step_flops(blocks, x, ())
        assert extra == sum(found.again[i] for i in chosen)


def test_the_block_is_what_the_exercise_says():
    block, x = checks.Block(8), torch.randn(3, 8)
    by_hand = x + block.second(nn.functional.gelu(block.first(block.norm(x))))
    assert torch.equal(block(x), by_hand)
    assert count.saved_bytes(lambda: block(x), block).bytes == 4 * 3 * (10 * 8 + 2)
