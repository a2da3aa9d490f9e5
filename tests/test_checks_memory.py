"""The checks of exercise 6 accept the solution and other right answers, see a stub, and explain planted mistakes."""

import contextlib
import copy
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from notebook_answers import endless
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from speedlab import count
from speedlab.checks import memory as checks

NAME = "exercise-6-memory.ipynb"
TASKS = ("optimizer_steps", "train_epoch", "kept_bytes", "run_blocks", "choose")


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_is_correct_and_the_stub_not_attempted(task, solution, stub, verdict):
    assert verdict(task, solution[task]) == "correct"
    assert verdict(task, stub[task]) == "not attempted yet"


@pytest.mark.parametrize("task", TASKS)
def test_an_endless_answer_is_stopped(task, verdict, monkeypatch):
    monkeypatch.setattr(getattr(checks, task), "seconds", 0.5)
    assert "had not ended" in verdict(task, endless)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "12", [], -1, 10**9])
@pytest.mark.parametrize("task", TASKS)
def test_a_constant_is_refused_in_a_sentence(task, value, rejects):
    rejects(task, lambda *_, **__: value)


# --- Task 1 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (lambda n, b, k, e: e * math.ceil(n / b), "number of micro-batches"),
        (lambda n, b, k, e: e * n // (b * k), "Round up both"),
        (lambda n, b, k, e: math.ceil(e * math.ceil(n / b) / k), "in each epoch"),
        (lambda n, b, k, e: e * (math.ceil(n / b) // k), "Round up both"),
        (lambda n, b, k, e: e * math.ceil(n // b / k), "Round up both"),
        (lambda n, b, k, e: None, "None"),
        (lambda n, b, k, e: math.ceil(math.ceil(n / b) / k), "one epoch"),
        (lambda n, b, k, e: e * math.ceil(n / (b * k)) + 0.5, "whole number"),
        (lambda n, b, k, e: e * math.ceil(n / b / k) + 1, "Round up the micro-batches"),
    ],
)
def test_optimizer_steps_rejects(rejects, answer, word):
    rejects("optimizer_steps", answer, word)


def test_optimizer_steps_accepts_counting(verdict):
    def by_counting(samples, micro_batch, accumulate_steps, epochs):
        micro_batches = len(range(0, samples, micro_batch))
        return sum(len(range(0, micro_batches, accumulate_steps)) for _ in range(epochs))

    assert verdict("optimizer_steps", by_counting) == "correct"


@pytest.mark.parametrize("number", [float, np.int64, np.float32, torch.tensor])
def test_optimizer_steps_accepts_any_kind_of_number(verdict, number):
    answer = lambda n, b, k, e: number(e * math.ceil(math.ceil(n / b) / k))  # noqa: E731
    assert verdict("optimizer_steps", answer) == "correct"


# --- Task 2 ---------------------------------------------------------------------------------------------------------


def loop(*, weigh="tokens", tail=True, zero_first=True, early=False, one_backward=False, zero="after the step"):
    """An accumulation loop with mistakes to switch on."""

    def train_epoch(model, optimizer, micro_batches, accumulate_steps):
        steps, losses = 0, []
        if zero_first:
            optimizer.zero_grad()
        for i, (tokens, targets) in enumerate(micro_batches):
            begin = i - i % accumulate_steps
            group = micro_batches[begin : begin + accumulate_steps]
            total = sum(int((t != -100).sum()) for _, t in group)
            if total == 0 and weigh == "tokens":
                continue
            divisor = {
                "tokens": total,
                "group": len(group),
                "steps": accumulate_steps,
                "padded": sum(t.numel() for _, t in group),
            }.get(weigh, 1)
            reduction = "mean" if weigh in ("group", "steps", "sum of means") else "sum"
            loss = F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction=reduction) / divisor
            if zero == "before each backward":
                optimizer.zero_grad()
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
                if zero == "after the step":
                    optimizer.zero_grad()
                steps += 1
        return steps

    return train_epoch


def in_groups(step):
    """A right loop around `step(model, group, number of targets)`, which computes the gradient of a group."""

    def train_epoch(model, optimizer, micro_batches, accumulate_steps):
        steps = 0
        while micro_batches:
            group = micro_batches[:accumulate_steps]
            del micro_batches[:accumulate_steps]  # what is in the list is the answer's own
            total = sum(int((targets != -100).sum()) for _, targets in group)
            if total:
                optimizer.zero_grad()
                step(model, group, total)
                optimizer.step()
                steps += 1
        return steps

    return train_epoch


def summed(model, tokens, targets):
    return F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="sum")


def with_a_forward_for_the_log(model, group, total):
    for tokens, targets in group:
        summed(model, tokens, targets).item()  # its graph is gone at once
        (summed(model, tokens, targets) / total).backward()


def skipping_before(model, group, total):
    for tokens, targets in group:
        if (targets == -100).all():
            continue
        (summed(model, tokens, targets) / total).backward()


def skipping_after(model, group, total):
    for tokens, targets in group:
        loss = summed(model, tokens, targets)
        if (targets != -100).any():
            (loss / total).backward()


def popping(model, group, total):
    while group:
        (summed(model, *group.pop(0)) / total).backward()


def in_fp64(model, group, total):
    for tokens, targets in group:
        logits = model(tokens).double().flatten(0, 1)
        (F.cross_entropy(logits, targets.flatten(), reduction="sum") / total).backward()


def with_a_mask(model, group, total):
    for tokens, targets in group:
        each = F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none")
        ((each * (targets != -100)).sum() / total).backward()


def scaled_at_the_end(model, group, total):
    for tokens, targets in group:
        summed(model, tokens, targets).backward()
    for parameter in model.parameters():
        parameter.grad /= total


def assigned(model, group, total):
    parameters = list(model.parameters())
    parts = [torch.autograd.grad(summed(model, *batch) / total, parameters) for batch in group]
    for parameter, gradients in zip(parameters, zip(*parts, strict=True), strict=True):
        parameter.grad = sum(gradients)


def text_by_text(model, group, total):
    for tokens, targets in group:
        for row, wanted in zip(tokens, targets, strict=True):
            (summed(model, row[None], wanted[None]) / total).backward()


def with_a_closure(model, optimizer, micro_batches, accumulate_steps):
    steps = 0
    for begin in range(0, len(micro_batches), accumulate_steps):
        group = micro_batches[begin : begin + accumulate_steps]
        if total := sum(int((targets != -100).sum()) for _, targets in group):

            def closure(group=group, total=total):
                optimizer.zero_grad()
                skipping_after(model, group, total)

            optimizer.step(closure)
            steps += 1
    return np.int64(steps)


def on_a_copy(model, optimizer, micro_batches, accumulate_steps):
    return loop()(copy.deepcopy(model), optimizer, micro_batches, accumulate_steps)


def test_train_epoch_accepts_a_closure(verdict):
    assert verdict("train_epoch", with_a_closure) == "correct"


RIGHT_LOOPS = [
    assigned,
    text_by_text,
    with_a_forward_for_the_log,
    skipping_before,
    skipping_after,
    popping,
    in_fp64,
    with_a_mask,
    scaled_at_the_end,
]


@pytest.mark.parametrize("step", RIGHT_LOOPS)
def test_train_epoch_accepts_other_styles(verdict, step):
    assert verdict("train_epoch", in_groups(step)) == "correct"


def in_place(model, group, total):
    for _, targets in group:
        targets[targets == -100] = 0
    padded = sum(targets.numel() for _, targets in group)
    for tokens, targets in group:
        (summed(model, tokens, targets) / padded).backward()


def padded_together(model, group, total):
    width = max(tokens.shape[1] for tokens, _ in group)
    tokens = torch.cat([F.pad(tokens, (0, width - tokens.shape[1])) for tokens, _ in group])
    targets = torch.cat([F.pad(targets, (0, width - targets.shape[1]), value=-100) for _, targets in group])
    (summed(model, tokens, targets) / total).backward()


def the_first_only(model, group, total):
    group[:] = [group[0]]
    popping(model, group, total)


def masked_without_skipping(model, optimizer, micro_batches, accumulate_steps):
    groups = [micro_batches[i : i + accumulate_steps] for i in range(0, len(micro_batches), accumulate_steps)]
    for group in groups:
        optimizer.zero_grad()
        with_a_mask(model, group, torch.tensor(sum(int((t != -100).sum()) for _, t in group)))
        optimizer.step()
    return len(groups)


def by_hand_without_skipping(model, optimizer, micro_batches, accumulate_steps):
    for begin in range(0, len(micro_batches), accumulate_steps):
        group = micro_batches[begin : begin + accumulate_steps]
        optimizer.zero_grad()
        total = sum((targets != -100).sum() for _, targets in group)
        for tokens, targets in group:
            scores = model(tokens).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
            (-(scores * (targets != -100)).sum() / total).backward()
        optimizer.step()
    return -(-len(micro_batches) // accumulate_steps)


def means_of_nothing(model, optimizer, micro_batches, accumulate_steps):
    for begin in range(0, len(micro_batches), accumulate_steps):
        group = micro_batches[begin : begin + accumulate_steps]
        optimizer.zero_grad()
        total = sum((targets != -100).sum() for _, targets in group)
        for tokens, targets in group:
            loss = F.cross_entropy(model(tokens).transpose(1, 2), targets)
            (loss * (targets != -100).sum() / total).backward()
        optimizer.step()
    return -(-len(micro_batches) // accumulate_steps)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (in_groups(in_place), "wrong gradient"),
        (in_groups(padded_together), "alive at the same time"),
        (in_groups(the_first_only), "Only the first"),
        (on_a_copy, "train another model"),
        (means_of_nothing, "makes no step"),
        (by_hand_without_skipping, "leave out a group"),
        (masked_without_skipping, "makes no step"),
        (loop(weigh="tokens", zero="before each backward"), "Only the last"),
        (lambda *_: 2, "no optimizer step at all"),
    ],
)
def test_train_epoch_rejects_attacks(rejects, answer, words):
    rejects("train_epoch", answer, words)


def by_fours(model, group, total):
    for begin in range(0, len(group), 4):
        sum(summed(model, *batch) / total for batch in group[begin : begin + 4]).backward()


def by_pairs(model, group, total):
    for begin in range(0, len(group), 2):
        sum(summed(model, *batch) / total for batch in group[begin : begin + 2]).backward()


@pytest.mark.parametrize("step", [by_fours, by_pairs])
def test_train_epoch_rejects_graphs_of_a_part_of_the_group(rejects, step):
    rejects("train_epoch", in_groups(step), "alive at the same time")


def stepping(when):
    """A loop that leaves out micro-batches without a target, and steps where `when` says so."""

    def train_epoch(model, optimizer, micro_batches, accumulate_steps):
        steps, waiting = 0, 0
        optimizer.zero_grad()
        for i, batch in enumerate(micro_batches):
            group = micro_batches[i - i % accumulate_steps :][:accumulate_steps]
            total = sum(int((targets != -100).sum()) for _, targets in group)
            filled = bool((batch[1] != -100).any())
            if filled:
                (summed(model, *batch) / total).backward()
                waiting += 1
            end = (i + 1) % accumulate_steps == 0 or i + 1 == len(micro_batches)
            if when(end, filled, waiting):
                optimizer.step()
                optimizer.zero_grad()
                steps, waiting = steps + 1, 0
        return steps

    return train_epoch


def test_train_epoch_accepts_a_step_where_something_waits(verdict):
    assert verdict("train_epoch", stepping(lambda end, filled, waiting: end and waiting)) == "correct"


@pytest.mark.parametrize("when", [lambda end, filled, waiting: end, lambda end, filled, waiting: end and filled])
def test_train_epoch_rejects_steps_that_empty_micro_batches_mislead(rejects, when):
    rejects("train_epoch", stepping(when), "your optimizer steps", "due")


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
        ({"zero": "never"}, "zero_grad"),
        ({"one_backward": True}, "alive at the same time"),
    ],
)
def test_train_epoch_rejects(rejects, mistakes, words):
    rejects("train_epoch", loop(**mistakes), words)


def test_train_epoch_wants_the_number_of_steps(rejects):
    def silent(*arguments):
        loop()(*arguments)

    rejects("train_epoch", silent, "came back as None")


def test_train_epoch_sees_a_loop_that_does_nothing(rejects):
    rejects("train_epoch", lambda *_: 0, "no optimizer step at all")


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


def by_a_counter_of_its_own(blocks, batch, tokens, width, accumulate_steps, checkpointing):
    """What the hooks of saved tensors see, each tensor once, on a network of the same blocks."""
    model, kept = nn.Sequential(*(checks.Block(width) for _ in range(blocks))), {}
    x = torch.randn(batch // accumulate_steps, tokens, width)
    weights = {weight.data_ptr() for weight in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        model(x)
    found = sum(t.nbytes for place, t in kept.items() if place not in weights)
    return blocks * x.nbytes if checkpointing else found


def rounded(numbers, blocks, batch, tokens, width, accumulate_steps, checkpointing):
    return 4 * blocks * batch // accumulate_steps * tokens * (width if checkpointing else numbers)


@pytest.mark.parametrize("number", [float, np.int64, torch.tensor])
def test_kept_bytes_accepts_any_kind_of_number(verdict, number):
    assert verdict("kept_bytes", lambda **setup: number(kept(**setup))) == "correct"


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
        (lambda **s: checks.counted(**s), "You run the blocks"),
        (by_a_counter_of_its_own, "You run the blocks"),
        (lambda **s: kept(**s) if s in checks.CONFIGURATIONS else 0, "width 24"),
        (lambda **s: kept(**s) // (10 * s["width"] + 2) * 322 if not s["checkpointing"] else kept(**s), "width 24"),
        (lambda **s: rounded(10 * s["width"] + s["width"] // 16, **s), "width 24"),
        (lambda **s: kept(**s) // s["width"] * (s["width"] + 2 * s["checkpointing"]), "mean and scale"),
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


def with_each_chosen_block_twice(blocks, x, chosen):
    for i, block in enumerate(blocks):
        y = block(x)
        x = checkpoint(block, x, use_reentrant=False) if i in chosen else y
    return x


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


def test_run_blocks_accepts_the_old_variant_with_an_input_that_needs_a_gradient(verdict):
    def run_blocks(blocks, x, chosen):
        flag = torch.ones(1, requires_grad=True)
        for i, block in enumerate(blocks):
            again = i in chosen
            x = checkpoint(lambda h, _, b=block: b(h), x, flag, use_reentrant=True) if again else block(x)
        return x

    assert verdict("run_blocks", run_blocks) == "correct"


def hidden_by(hooks):
    """Keeps everything, where the counter's hooks do not see it."""

    def run_blocks(blocks, x, chosen):
        for i, block in enumerate(blocks):
            with hooks() if i in chosen else contextlib.nullcontext():
                x = block(x)
        return x

    return run_blocks


def patched(blocks, x, chosen):
    for i, block in enumerate(blocks):
        if i in chosen:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return blocks(x)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (hidden_by(torch.autograd.graph.save_on_cpu), "do not run again"),
        (hidden_by(lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)), "do not run again"),
        (patched, "forward"),
    ],
)
def test_run_blocks_rejects_what_only_looks_like_checkpoints(rejects, answer, words):
    rejects("run_blocks", answer, words)


def groups_of(micro_batches, accumulate_steps):
    for i in range(0, len(micro_batches), accumulate_steps):
        group = micro_batches[i : i + accumulate_steps]
        yield group, sum(int((targets != -100).sum()) for _, targets in group)


def returns_after_its_first_group(model, optimizer, micro_batches, accumulate_steps):
    return loop()(model, optimizer, micro_batches[:accumulate_steps], accumulate_steps)


def steps_before_its_backward(model, optimizer, micro_batches, accumulate_steps):
    steps = 0
    for group, total in groups_of(micro_batches, accumulate_steps):
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        for batch in group:
            (summed(model, *batch) / max(1, total)).backward()
    return steps


def stops_at_an_empty_group(model, optimizer, micro_batches, accumulate_steps):
    steps = 0
    for group, total in groups_of(micro_batches, accumulate_steps):
        if not total:
            break
        optimizer.zero_grad()
        for batch in group:
            (summed(model, *batch) / total).backward()
        optimizer.step()
        steps += 1
    return steps


def skips_the_step_too(model, optimizer, micro_batches, accumulate_steps):
    optimizer.zero_grad()
    steps = total = 0
    for i, (tokens, targets) in enumerate(micro_batches):
        count = int((targets != -100).sum())
        if not count:
            continue
        total += count
        summed(model, tokens, targets).backward()
        if (i + 1) % accumulate_steps == 0 or i + 1 == len(micro_batches):
            for parameter in model.parameters():
                parameter.grad /= total
            optimizer.step()
            optimizer.zero_grad()
            steps, total = steps + 1, 0
    return steps


def zeroes_before_the_step(model, optimizer, micro_batches, accumulate_steps):
    steps = 0
    for group, total in groups_of(micro_batches, accumulate_steps):
        for batch in group:
            (summed(model, *batch) / max(total, 1)).backward()
        optimizer.zero_grad()
        optimizer.step()
        steps += 1
    return steps


def drops_the_empty_first(model, optimizer, micro_batches, accumulate_steps):
    left = [batch for batch in micro_batches if (batch[1] != -100).any()]
    for group, total in groups_of(left, accumulate_steps):
        optimizer.zero_grad()
        for batch in group:
            (summed(model, *batch) / total).backward()
        optimizer.step()
    return -(-len(left) // accumulate_steps)


def text_by_text(model, optimizer, micro_batches, accumulate_steps):
    """One text at a time, and never divided."""
    steps = 0
    for group, total in groups_of(micro_batches, accumulate_steps):
        optimizer.zero_grad()
        for tokens, targets in group if total else ():
            for text, wanted in zip(tokens, targets, strict=True):
                summed(model, text[None], wanted[None]).backward()
        if total:
            optimizer.step()
            steps += 1
    return steps


def undoes_its_work(model, optimizer, micro_batches, accumulate_steps):
    steps, before = 0, copy.deepcopy(model.state_dict())
    for group, total in groups_of(micro_batches, accumulate_steps):
        optimizer.zero_grad()
        for batch in group if total else ():
            (summed(model, *batch) / total).backward()
        if total:
            optimizer.step()
            steps += 1
    model.load_state_dict(before)
    return steps


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (stops_at_an_empty_group, "your optimizer steps: 1; due: 2"),
        (skips_the_step_too, "counts as a member"),
        (zeroes_before_the_step, "zero_grad come between"),
        (undoes_its_work, "weights at the end"),
        (drops_the_empty_first, "counts as a member"),
        (returns_after_its_first_group, "Each group ends in a step"),
        (steps_before_its_backward, "backward on the whole group comes before its step"),
        (text_by_text, "nobody has divided"),
    ],
)
def test_train_epoch_names_the_fault(rejects, answer, words):
    rejects("train_epoch", answer, words)


def fewest_blocks_first(costs, budget):
    blocks = range(len(costs.kept))
    for size in range(len(blocks) + 1):
        fitting = [
            chosen
            for chosen in itertools.combinations(blocks, size)
            if sum(costs.border[i] if i in chosen else costs.kept[i] for i in blocks) <= budget
        ]
        if fitting:
            return min(fitting, key=lambda chosen: sum(costs.again[i] for i in chosen))
    return None


def test_choose_tells_fewer_blocks_from_fewer_flops(rejects):
    rejects("choose", fewest_blocks_first, "Neither the fewest blocks")


def test_run_blocks_accepts_an_input_by_name(verdict):
    def run_blocks(blocks, x, chosen):
        for i, block in enumerate(blocks):
            x = checkpoint(block, x=x, use_reentrant=False) if i in chosen else block(x)
        return x

    assert verdict("run_blocks", run_blocks) == "correct"


def some(number):
    """Checkpoints on as many blocks as were chosen, and not on those."""
    return lambda blocks, x, chosen: under(use_reentrant=False)(blocks, x, number(len(chosen)))


def without_dropout(blocks, x, chosen):
    blocks.eval()
    return under(use_reentrant=False, preserve_rng_state=False)(blocks, x, chosen)


def without_probability(blocks, x, chosen):
    for block in blocks:
        block.dropout.p = 0.0
    return under(use_reentrant=False, preserve_rng_state=False)(blocks, x, chosen)


def zeroed(blocks, x, chosen):
    return under(use_reentrant=False)(blocks, x.zero_(), chosen)


def flagged(blocks, x, chosen):
    return under(use_reentrant=True)(blocks, x.requires_grad_(), chosen)


def bound_late(blocks, x, chosen):
    for i, block in enumerate(blocks):
        x = checkpoint(lambda y: block(y), x, use_reentrant=False) if i in chosen else block(x)  # noqa: B023
    return x


def without_gradients(blocks, x, chosen):
    with torch.no_grad():
        return under(use_reentrant=False)(blocks, x, chosen)


def cut_where_chosen(blocks, x, chosen):
    for i, block in enumerate(blocks):
        with torch.set_grad_enabled(i not in chosen):
            x = block(x)
    return x


def detached(blocks, x, chosen):
    for block in blocks:
        x = block(x.detach())
    return x


def test_run_blocks_accepts_a_graph_of_its_own(verdict):
    def run_blocks(blocks, x, chosen):
        return under(use_reentrant=True)(blocks, x.clone().requires_grad_(), chosen)

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
        (some(range), "[3] are not checkpointed"),
        (some(lambda count: range(4 - count, 4)), "[1] are not"),
        (some(lambda count: {1, 2} if count == 2 else range(4 - count, 4)), "[3] are not"),
        (not_chained, "the output of the one before"),
        (lambda blocks, x, chosen: None, "must return the output"),
        (without_dropout, "changes its inputs"),
        (without_probability, "changes its inputs"),
        (zeroed, "changes its inputs"),
        (flagged, "changes its inputs"),
        (bound_late, "a lambda looks a name up"),
        (without_gradients, "no_grad or a detach"),
        (cut_where_chosen, "no_grad"),
        (
            lambda blocks, x, chosen: under(use_reentrant=False)(blocks, x, {i - 1 for i in chosen}),
            "not checkpointed",
        ),
        (lambda blocks, x, chosen: under(use_reentrant=False)(blocks[::-1], x, chosen), "run as [3, 2, 1, 0]"),
        (with_each_chosen_block_twice, "run as [0, 0, 1, 1, 2, 2, 3, 3]"),
        (lambda blocks, x, chosen: under(use_reentrant=False)(blocks, 2 * x, chosen), "the one before"),
        (detached, "no_grad or a detach"),
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


def from_all(order):
    """Begin with all blocks, and drop the dearest that still fits, in one pass."""

    def choose(costs, budget):
        chosen = set(range(len(costs.kept)))
        if total(costs, chosen) > budget:
            return None
        for i in sorted(chosen, key=lambda i: -order(costs, i)):
            chosen -= {i} if total(costs, chosen - {i}) <= budget else set()
        return chosen

    return choose


def best_of(price, all_but_all=False):
    """Of all sets that fit, the one with the lowest price."""

    def choose(costs, budget):
        n = len(costs.kept)
        sets = [s for size in range(n + (not all_but_all)) for s in itertools.combinations(range(n), size)]
        fitting = [s for s in sets if total(costs, s) <= budget]
        return min(fitting, key=lambda s: price(costs, s)) if fitting else None

    return choose


RIGHT_CHOICE = best_of(lambda costs, chosen: sum(costs.again[i] for i in chosen))


def one_at_least(costs, budget):
    n = range(len(costs.kept))
    fitting = [s for k in n for s in itertools.combinations(n, k + 1) if total(costs, s) <= budget]
    return min(fitting, key=lambda s: sum(costs.again[i] for i in s), default=None)


def as_marks(costs, budget):
    chosen = RIGHT_CHOICE(costs, budget)
    return chosen and [int(i in chosen) for i in range(len(costs.kept))]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda s: (i for i in s), lambda s: set(np.array(s))])
def test_choose_accepts_any_collection_of_any_numbers(verdict, kind):
    right = best_of(lambda costs, chosen: sum(costs.again[i] for i in chosen))

    def choose(costs, budget):
        found = right(costs, budget)
        return None if found is None else kind(found)

    assert verdict("choose", choose) == "correct"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (greedy(lambda costs, i: -costs.kept[i]), "FLOPs more"),
        (greedy(lambda costs, i: costs.again[i] / (costs.kept[i] - costs.border[i])), "FLOPs more"),
        (greedy(lambda costs, i: i), "FLOPs more"),
        (forgets_borders, "keeps its border"),
        (every_block, "every block"),
        (lambda costs, budget: set(), "all other blocks keep everything"),
        (lambda costs, budget: None, "there is a choice"),
        (lambda costs, budget: {"first"}, "number of a block"),
        (lambda costs, budget: [True] * len(costs.kept), "not a mark for each"),
        (lambda costs, budget: [True], "number of a block"),
        (lambda costs, budget: range(1, 1 + len(costs.kept)), "number of a block"),
        (from_all(lambda costs, i: costs.again[i]), "FLOPs more"),
        (from_all(lambda costs, i: costs.kept[i]), "FLOPs more"),
        (best_of(lambda costs, chosen: -total(costs, chosen)), "FLOPs more"),
        (best_of(lambda costs, chosen: sum(costs.again[i] for i in chosen), all_but_all=True), "there is a choice"),
        (as_marks, "not a mark for each"),
        (lambda costs, budget: (found := as_marks(costs, budget)) and [*map(bool, found)], "not a mark for each"),
        (lambda costs, budget: RIGHT_CHOICE(costs, budget - 1), "may reach the budget"),
        (one_at_least, "No checkpoint at all is a choice"),
        (lambda costs, budget: {i + 1 for i in RIGHT_CHOICE(costs, budget)}, "count from 0"),
    ],
)  # fmt: skip
def test_choose_rejects(rejects, answer, words):
    rejects("choose", answer, words)


def test_choose_says_where_an_answer_raises(verdict):
    said = verdict("choose", lambda costs, budget: list(RIGHT_CHOICE(costs, budget)))
    assert "Where even checkpoints on all blocks keep too much: Your code raised TypeError" in said


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
