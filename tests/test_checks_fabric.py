"""The checks of exercise 8 accept what is right in any style, see a stub, and name the fault of what is wrong."""

import functools
import warnings

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from notebook_answers import defined, named
from torch import nn
from torch.nn import functional as F

from speedlab import machine
from speedlab.checks import fabric as checks

NAME = "exercise-8-fabric.ipynb"
TASKS = ("train", "mixed_fabric", "accumulate", "clipped_step")
HERE = machine.device().type


def changed(source: str, *changes: tuple[str, str]) -> object:
    """The function that `source` defines, with some of its lines replaced."""
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return defined(source, "<answer>", torch=torch, np=np, nn=nn, F=F)["answer"]


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_is_correct_and_the_stub_not_attempted(task, solution, stub, verdict):
    assert verdict(task, solution[task]) == "correct"
    assert verdict(task, stub[task]) == "not attempted yet"


@pytest.mark.parametrize("task", TASKS)
def test_an_endless_loop_is_stopped(task, verdict, monkeypatch):
    monkeypatch.setattr(getattr(checks, task), "seconds", 0.3)
    assert "had not ended" in verdict(task, changed("def answer(*given):\n    while True:\n        pass\n"))


# --- Task 1 ---------------------------------------------------------------------------------------------------------

TRAIN = """
def answer(fabric, model, optimizer, train_loader):
    bare, step, loader = model, optimizer, train_loader
    model, optimizer = fabric.setup(model, optimizer)
    train_loader = fabric.setup_dataloaders(train_loader)
    model.train()
    losses = []
    for images, labels in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses
"""
RIGHT_TRAININGS = {
    "another order": ([],),
    "a tensor": ([("return losses", "return torch.tensor(losses)")],),
    "an array": ([("return losses", "return np.array(losses)")],),
    "tensors": ([("loss.item()", "loss.detach()")],),
    "one by one": ([("model, optimizer = fabric.setup(model, optimizer)",
                     "model = fabric.setup_module(model)\n    optimizer = fabric.setup_optimizers(optimizer)")],),
    "train mode first": ([("    model.train()\n", ""), ("    bare, step", "    model.train()\n    bare, step")],),
    "a comment is left over": ([("    losses = []", "    # raise NotImplementedError\n    losses = []")],),
}  # fmt: skip
WRONG_TRAININGS = {
    "backward goes past": ([("fabric.backward(loss)", "loss.backward()")], "fabric.backward(loss)"),
    "loader not set up": ([("fabric.setup_dataloaders(train_loader)", "train_loader")], "setup_dataloaders"),
    "loader discarded": ([("train_loader = fabric.setup", "fabric.setup")], "as it came"),
    "optimizer not set up": ([("model, optimizer = fabric.setup(model, optimizer)",
                               "model = fabric.setup_module(model)")], "setup_optimizers"),
    "optimizer discarded": ([("optimizer.step()", "step.step()")], "bare optimizer"),
    "model discarded": ([("model(images)", "bare(images)")], "bare model"),
    "bare inside autocast": ([("        loss = F.cross_entropy(model(images), labels)\n",
                               "        with fabric.autocast():\n"
                               "            loss = F.cross_entropy(bare(images), labels)\n")], "bare model"),
    "not zeroed": ([("        optimizer.zero_grad()\n", "")], "not zeroed"),
    "not stepped": ([("        optimizer.step()\n", "")], "stepped"),
    "eval mode": ([("    model.train()\n", "    model.eval()\n")], "model.train()"),
    "no train mode": ([("    model.train()\n", "")], "model.train()"),
    "the last loss": ([("    return losses", "    return losses[-1:]")], "hold 4 things, not 1"),
    "rounded": ([("loss.item()", "round(loss.item(), 5)")], "Only the last digits differ"),
    "no list": ([("    return losses", "    return loss.item()")], "must be a list"),
    "nothing": ([("    return losses", "    return None")], "None"),
    "nan": ([("loss.item()", "float('nan')")], "nan"),
    "zeros": ([("loss.item()", "0.0")], "in plain PyTorch"),
    "nan in the last bias": ([("    return losses", "    bare[-1].bias.data[-1] = float('nan')\n    return losses")],
                             "not the weights"),
}  # fmt: skip


@pytest.mark.parametrize("changes", named(RIGHT_TRAININGS))
def test_train_accepts(changes, verdict):
    assert verdict("train", changed(TRAIN, *changes)) == "correct"


@pytest.mark.parametrize(("changes", "word"), named(WRONG_TRAININGS))
def test_train_rejects(changes, word, rejects):
    rejects("train", changed(TRAIN, *changes), word)


# --- Task 2 ---------------------------------------------------------------------------------------------------------


def silenced():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Fabric(accelerator=HERE, devices=1, precision="16-mixed")


WRONG_FABRICS = {
    "fp32": (lambda: Fabric(accelerator=HERE, devices=1), "bf16 products and fp32 weights"),
    "bf16-true": (lambda: Fabric(accelerator=HERE, devices=1, precision="bf16-true"), "small updates"),
    "16-mixed": (lambda: Fabric(accelerator=HERE, devices=1, precision="16-mixed"), "turns that into"),
    "16-mixed by number": (lambda: Fabric(accelerator=HERE, devices=1, precision=16), "turns that into"),
    "16-mixed in silence": (silenced, "turns that into"),
    "fp64": (lambda: Fabric(accelerator=HERE, devices=1, precision="64-true"), "fp64"),
    "two devices": (lambda: Fabric(accelerator=HERE, devices=2, precision="bf16-mixed"), "devices=1"),
    "a word": (lambda: "bf16-mixed", "Fabric object"),
    "nothing": (lambda: None, "return"),
}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_mixed_fabric_accepts(precision, verdict):
    assert verdict("mixed_fabric", lambda: Fabric(accelerator=HERE, devices=1, precision=precision)) == "correct"


@pytest.mark.parametrize(("answer", "word"), named(WRONG_FABRICS))
def test_mixed_fabric_rejects(answer, word, rejects):
    rejects("mixed_fabric", answer, word)


def test_on_a_machine_with_a_gpu_the_fabric_must_use_it(monkeypatch, rejects):
    monkeypatch.setattr("speedlab.machine.device", lambda: torch.device("cuda", 0))
    rejects("mixed_fabric", lambda: Fabric(accelerator="cpu", devices=1, precision="bf16-mixed"), "has a GPU")


# --- Task 3 ---------------------------------------------------------------------------------------------------------

ACCUMULATE = """
def answer(fabric, model, optimizer, batches, accumulate_steps):
    optimizer.zero_grad()
    for i, (images, labels) in enumerate(batches):
        first = i - i % accumulate_steps
        group = batches[first : first + accumulate_steps]
        last = i - first == len(group) - 1
        share = len(labels) / sum(len(y) for _, y in group)
        with fabric.no_backward_sync(model, enabled=not last):
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss * share)
        if last:
            optimizer.step()
            optimizer.zero_grad()
"""
BY_POPPING = """
def answer(fabric, model, optimizer, batches, accumulate_steps):
    while batches:
        group = [batches.pop(0) for _ in range(min(accumulate_steps, len(batches)))]
        images = sum(len(x) for x, _ in group)
        optimizer.zero_grad()
        while group:
            x, y = group.pop(0)
            with fabric.no_backward_sync(model, enabled=bool(group)):
                fabric.backward(F.cross_entropy(model(x), y, reduction="sum") / images)
        optimizer.step()
"""
TOGETHER = """
def answer(fabric, model, optimizer, batches, accumulate_steps):
    for start in range(0, len(batches), accumulate_steps):
        x, y = (torch.cat(parts) for parts in zip(*batches[start : start + accumulate_steps]))
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(x), y))
        optimizer.step()
"""
ONE_BACKWARD = """
def answer(fabric, model, optimizer, batches, accumulate_steps):
    for start in range(0, len(batches), accumulate_steps):
        group = batches[start : start + accumulate_steps]
        images = sum(len(y) for _, y in group)
        optimizer.zero_grad()
        fabric.backward(sum(F.cross_entropy(model(x), y) * len(y) / images for x, y in group))
        optimizer.step()
"""
OUTSIDE = ACCUMULATE.replace("            loss = F.cross_entropy(model(images), labels)\n", "").replace(
    "        with fabric", "        loss = F.cross_entropy(model(images), labels)\n        with fabric"
)
RIGHT_ACCUMULATIONS = {
    "another way": (ACCUMULATE,),
    "by popping": (BY_POPPING,),
    "context only where held back": (ACCUMULATE.replace(
        "fabric.no_backward_sync(model, enabled=not last)",
        "(__import__('contextlib').nullcontext() if last else fabric.no_backward_sync(model))"),),
}  # fmt: skip
WRONG_ACCUMULATIONS = {
    "sum": ([("loss * share", "loss")], "sum over the micro-batches"),
    "mean of means": ([("loss * share", "loss / len(group)")], "mean of means"),
    "thin tail": ([("loss * share", "loss / accumulate_steps")], "a short group is divided by accumulate_steps"),
    "no tail": ([("last = i - first == len(group) - 1", "last = (i + 1) % accumulate_steps == 0")],
                "do not fill a group"),
    "always synchronised": ([("enabled=not last", "enabled=False")], "in 8 backward passes for 4 steps"),
    "never synchronised": ([("enabled=not last", "enabled=True")], "in 0 backward passes"),
    "the first of each group": ([("enabled=not last", "enabled=i % accumulate_steps != 0")], "the first backward"),
    "every micro-batch": ([("        if last:", "        if True:"), ("loss * share", "loss")],
                          "after every micro-batch"),
    "the docstring's": ([("        if last:", "        if i % accumulate_steps == 0:")], "i % n == 0"),
    "the docstring's, each by a whole group's share": (
        [("        if last:", "        if i % accumulate_steps == 0:"), ("loss * share", "loss / accumulate_steps")],
        "i % n == 0"),
    "not stepped": ([("            optimizer.step()\n", "")], "have not moved"),
    "not zeroed": ([("            optimizer.zero_grad()\n", ""), ("    optimizer.zero_grad()\n    for", "    for")],
                   "not zeroed"),
    "past Fabric": ([("fabric.backward(loss * share)", "(loss * share).backward()")], "fabric.backward"),
    "cleared": ([("    optimizer.zero_grad()\n    for", "    batches.clear()\n    for")], "have not moved"),
    "only a group": ([("    optimizer.zero_grad()\n    for", "    del batches[accumulate_steps:]\n    for")],
                     "weights are not those"),
    "nan in the last bias": ([("            optimizer.step()\n", "            optimizer.step()\n"
                               "            list(model.parameters())[-1].data[-1] = float('nan')\n")], "nan"),
}  # fmt: skip


@pytest.mark.parametrize("source", named(RIGHT_ACCUMULATIONS))
def test_accumulate_accepts(source, verdict):
    assert verdict("accumulate", changed(source)) == "correct"


@pytest.mark.parametrize(("changes", "word"), named(WRONG_ACCUMULATIONS))
def test_accumulate_rejects(changes, word, rejects):
    rejects("accumulate", changed(ACCUMULATE, *changes), word)


@pytest.mark.parametrize(
    ("source", "word"),
    [(TOGETHER, "of its own"), (ONE_BACKWARD, "of its own"), (OUTSIDE, "DDP decides in forward")],
    ids=["concatenated", "one backward", "forward outside"],
)
def test_accumulate_rejects_other_ways(source, word, rejects):
    rejects("accumulate", changed(source), word)


# --- Task 4 ---------------------------------------------------------------------------------------------------------

CLIPPED = """
def answer(fabric, model, optimizer, micro_batches, max_norm):
    optimizer.zero_grad()
    for i, (images, labels) in enumerate(micro_batches):
        with fabric.no_backward_sync(model, enabled=i < len(micro_batches) - 1):
            loss = F.cross_entropy(model(images), labels) / len(micro_batches)
            fabric.backward(loss)
    norm = fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False)
    optimizer.step()
    return norm
"""
RIGHT_CLIPS = {
    "a tensor": (CLIPPED,),
    "a number": (CLIPPED.replace("return norm", "return norm.item()"),),
    "zeroed afterwards": (CLIPPED.replace("    optimizer.zero_grad()\n", "").replace(
        "    return norm", "    optimizer.zero_grad()\n    return norm"),),
    "by popping": (CLIPPED.replace(
        "    for i, (images, labels) in enumerate(micro_batches):",
        "    n = len(micro_batches)\n    while micro_batches:\n        images, labels = micro_batches.pop()",
        ).replace("/ len(micro_batches)", "/ n").replace("i < len(micro_batches) - 1", "bool(micro_batches)"),),
}  # fmt: skip
WRONG_CLIPS = {
    "PyTorch's own": ([("fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False)",
                        "nn.utils.clip_grad_norm_(model.parameters(), max_norm)")], "unscales first"),
    "by value": ([("max_norm=max_norm", "clip_val=max_norm")], "not `clip_val`"),
    "by position": ([("optimizer, max_norm=max_norm, error_if_nonfinite=False", "optimizer, max_norm")],
                    "not `clip_val`"),
    "sent each time": ([("        with fabric.no_backward_sync(model, enabled=i < len(micro_batches) - 1):\n",
                         "        if True:\n")], "in more than the last backward"),
    "all but the first sent": ([("enabled=i < len(micro_batches) - 1", "enabled=i == 0 < len(micro_batches) - 1")],
                               "in more than the last backward"),
    "overflow zeroed": ([("    norm = ", "    for p in model.parameters():\n"
                          "        p.grad.nan_to_num_(0.0, 0.0, 0.0)\n    norm = ")], "lowers its scale"),
    "each micro-batch": ([("    norm = ", "        norm = ")], "clip them once"),
    "sum": ([(" / len(micro_batches)", "")], "not of the mean"),
    "after the step": ([("    optimizer.step()\n", ""), ("    norm = ", "    optimizer.step()\n    norm = ")],
                       "before `step`"),
    "not zeroed": ([("    optimizer.zero_grad()\n", "")], "zero them"),
    "not stepped": ([("    optimizer.step()\n", "")], "have not moved"),
    "nothing returned": ([("    return norm", "    return None")], "return"),
    "the limit": ([("    return norm", "    return max_norm")], "before clipping is"),
    "nan": ([("    return norm", "    return float('nan')")], "is nan"),
    "never sent": ([("            fabric.backward(loss)\n", "            with fabric.no_backward_sync(model):\n"
                     "                fabric.backward(loss)\n")], "DDP decides in forward"),
    "past Fabric": ([("fabric.backward(loss)", "loss.backward()")], "fabric.backward"),
    "nan in the last bias": ([("    return norm", "    if len(micro_batches) == 1 or max_norm == 0.2:\n"
                               "        list(model.parameters())[-1].data[-1] = 1e9\n    return norm")], "weights"),
}  # fmt: skip
NEVER_SENT = """
def answer(fabric, model, optimizer, micro_batches, max_norm):
    optimizer.zero_grad()
    for images, labels in micro_batches:
        with fabric.no_backward_sync(model):
            fabric.backward(F.cross_entropy(model(images), labels) / len(micro_batches))
    norm = fabric.clip_gradients(model, optimizer, max_norm=max_norm)
    optimizer.step()
    return norm
"""


@pytest.mark.parametrize("source", named(RIGHT_CLIPS))
def test_clipped_step_accepts(source, verdict):
    assert verdict("clipped_step", changed(source)) == "correct"


@pytest.mark.parametrize(("changes", "word"), named(WRONG_CLIPS))
def test_clipped_step_rejects(changes, word, rejects):
    rejects("clipped_step", changed(CLIPPED, *changes), word)


SKIPPED = ("    optimizer.step()", "    if torch.isfinite(norm):\n        optimizer.step()")


def test_clipped_step_names_the_overflow_at_which_an_answer_raises(verdict):
    said = verdict("clipped_step", changed(CLIPPED, (", error_if_nonfinite=False", "")))
    assert said.startswith("not yet right. In 16-mixed, at an overflow") and "raised RuntimeError" in said


# What an attack on the checks found: accepted then, or told the wrong cause.

TOO_MANY = """
def answer(fabric, model, optimizer, batches, accumulate_steps):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches):
        start = i // accumulate_steps * accumulate_steps
        group = batches[start : start + accumulate_steps]
        with fabric.no_backward_sync(model, enabled=i != start + len(group) - 1):
            fabric.backward(F.cross_entropy(model(x), y) * len(y) / sum(len(b[1]) for b in group))
        if (i + 1) % accumulate_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
"""
FORWARDS_FIRST = """
def answer(fabric, model, optimizer, batches, accumulate_steps):
    for start in range(0, len(batches), accumulate_steps):
        group, losses = batches[start : start + accumulate_steps], []
        optimizer.zero_grad()
        for i, (x, y) in enumerate(group):
            with fabric.no_backward_sync(model, i + 1 < len(group)):
                losses.append(F.cross_entropy(model(x), y) * len(y) / sum(len(b[1]) for b in group))
        for i, loss in enumerate(losses):
            with fabric.no_backward_sync(model, i + 1 < len(group)):
                fabric.backward(loss)
        optimizer.step()
"""
BACKWARD, STEP, NORM = "        fabric.backward(loss)\n", "        optimizer.step()\n", "    norm = fabric.clip"
ZERO = "        optimizer.zero_grad()\n"
HELD = "        with fabric.no_backward_sync(model):\n            fabric.backward(loss)\n"
AS_IT_IS = "note each loss as it is"
FOUND = {
    "train": (TRAIN, {
        "autograd.grad": ([(BACKWARD, "        ps = list(bare.parameters())\n"
                            "        for p, g in zip(ps, torch.autograd.grad(loss, ps)): p.grad = g\n")], "backward"),
        "never sent": ([(BACKWARD, HELD)], "never sent"),
        "forward held": ([("        loss = ", "        with fabric.no_backward_sync(model): loss = ")], "never sent"),
        "held back and not zeroed": ([(ZERO, ""), (BACKWARD, HELD)], "not zeroed"),
        "a step before": ([(ZERO, ZERO + STEP)], "8 optimizer steps for 4 batches"),
        "zeroed before the step": ([(STEP, ZERO + STEP)], "not removed before"),
        "two digits": ([("loss.item()", "round(loss.item(), 2)")], AS_IT_IS),
        "bf16": ([("loss.item()", "loss.bfloat16().item()")], AS_IT_IS),
        "sorted": ([("    return losses", "    return sorted(losses)")], AS_IT_IS),
        "sum": ([("labels)", "labels, reduction='sum')")], "take their mean"),
        "two forwards": ([(ZERO, ZERO + "        model(images)\n")], "counts each of 8 forwards"),
    }),
    "accumulate": (ACCUMULATE, {
        "a tail where there is none": ([(ACCUMULATE, TOO_MANY)], "optimizer steps for"),
        "without the optimizer": ([("            optimizer.step()\n", "            with torch.no_grad():\n"
            "                for p in model.parameters(): p -= 0.5 * p.grad\n")], "0 optimizer steps for 4 groups"),
        "forwards first": ([(ACCUMULATE, FORWARDS_FIRST)], "several forwards before a backward"),
        "zeroed before the step": ([("            optimizer.step()\n", "            optimizer.zero_grad()\n"
            "            optimizer.step()\n")], "not removed"),
    }),
    "clipped_step": (CLIPPED, {
        "the sum is clipped": ([(" / len(micro_batches)", ""), ("return norm", "return norm / len(micro_batches)")],
                               "are the sum, not the mean"),
        "a step too many": ([("    return norm", "    optimizer.zero_grad()\n    optimizer.step()\n    return norm")],
                            "4 optimizer steps for 2 calls"),
        "no step at an overflow": ([SKIPPED], "you make no step"),
        "zeroed by 0": ([("    optimizer.zero_grad()\n", "    for p in model.parameters():\n"
            "        if p.grad is not None: p.grad *= 0\n")], "0 times inf is nan"),
        "measured before": ([(NORM, "    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])\n"
            "    fabric.clip")], "Return what `fabric.clip_gradients` returns"),
    }),
}  # fmt: skip
CASES = [(task, source, *case) for task, (source, cases) in FOUND.items() for case in cases.values()]
NAMES = [f"{task}-{name}" for task, (_, cases) in FOUND.items() for name in cases]


@pytest.mark.parametrize(("task", "source", "changes", "words"), CASES, ids=NAMES)
def test_what_an_attack_passed_is_refused(task, source, changes, words, rejects):
    rejects(task, changed(source, *changes), words)


@pytest.mark.parametrize(
    "change",
    [
        ("losses.append", "fabric.log('loss', loss)\n        losses.append"),
        ("model(images)", "model.forward(images)"),
        ("model(images)", "model(input=images)"),
        (
            "optimizer = fabric.setup(model, optimizer)",
            "optimizer, _ = fabric.setup(model, optimizer, scheduler="
            "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0))",
        ),
    ],
    ids=["it logs", "forward", "by name", "a scheduler"],
)
def test_what_an_attack_was_refused_is_accepted(change, verdict):
    assert verdict("train", changed(TRAIN, change)) == "correct"


NESTED = """
def answer(fabric, model, optimizer, batches, last):
    with fabric.no_backward_sync(model):
        return inner(fabric, model, optimizer, batches, last)
"""


@pytest.mark.parametrize(("task", "inner"), [("accumulate", ACCUMULATE), ("clipped_step", CLIPPED)])
def test_what_is_held_back_around_all_is_never_sent(task, inner, rejects):
    source = inner.replace("def answer", "def inner") + NESTED
    rejects(task, changed(source), "never sent" if task == "clipped_step" else "in 0 backward passes")


VALIDATES = """            optimizer.step()
            with torch.no_grad(): model(images)
"""


@pytest.mark.parametrize(
    "change",
    [
        ("            optimizer.step()\n", VALIDATES),
        ("model(images)", "torch.utils.checkpoint.checkpoint(model, images, use_reentrant=False)"),
    ],
    ids=["validation", "checkpointing"],
)
def test_accumulate_accepts_forwards_that_are_no_training(change, verdict):
    assert verdict("accumulate", changed(ACCUMULATE, change)) == "correct"


def test_the_fabric_that_is_returned_is_judged(verdict):
    def two():
        kept = Fabric(accelerator=HERE, devices=1, precision="bf16-mixed")
        Fabric(accelerator=HERE, devices=1, precision="16-mixed")
        return kept

    @functools.cache
    def kept():
        return Fabric(accelerator=HERE, devices=1, precision="bf16-mixed")

    assert [verdict("mixed_fabric", answer) for answer in (two, kept, kept)] == ["correct"] * 3
    made_before = silenced()
    assert "inside your function" in verdict("mixed_fabric", lambda: made_before)


def test_clipped_step_rejects_gradients_that_are_never_sent(rejects):
    rejects("clipped_step", changed(NEVER_SENT), "never sent")
