"""The checks of exercise 8 accept the solution and other right answers, see a stub, and explain planted mistakes."""

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F

NAME = "exercise-8-fabric.ipynb"


def changed(source: str, *changes: tuple[str, str]) -> object:
    """The function that `source` defines, with some of its lines replaced."""
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names = {"torch": torch, "nn": nn, "F": F}
    exec(source, names)
    return names["answer"]


# --- Task 1 ---------------------------------------------------------------------------------------------------------

TRAIN = """
def answer(fabric, model, optimizer, train_loader):
    bare = model
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


def test_train_accepts_another_way(verdict):
    assert verdict("train", changed(TRAIN)) == "correct"


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("fabric.backward(loss)", "loss.backward()", "fabric.backward(loss)"),
        ("fabric.setup_dataloaders(train_loader)", "train_loader", "same images"),
        (
            "model, optimizer = fabric.setup(model, optimizer)",
            "model = fabric.setup_module(model)",
            "setup_optimizers",
        ),
        ("model(images)", "bare(images)", "bare one"),
        ("        optimizer.zero_grad()\n", "", "zeroed"),
        ("        optimizer.step()\n", "", "stepped"),
        ("    model.train()\n", "    model.eval()\n", "train mode"),
        ("    return losses", "    return losses[-1:]", "each step"),
        ("    return losses", "    return loss", "list"),
    ],
)
def test_train_rejects(old, new, word, rejects):
    rejects("train", changed(TRAIN, (old, new)), word)


# --- Task 2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (lambda: Fabric(accelerator="cpu", devices=1), "bf16 products and fp32 weights"),
        (lambda: Fabric(accelerator="cpu", devices=1, precision="bf16-true"), "small updates"),
        (lambda: Fabric(accelerator="cpu", devices=1, precision="16-mixed"), "turns that into"),
        (lambda: Fabric(accelerator="cpu", devices=1, precision="64-true"), "fp64"),
        (lambda: "bf16-mixed", "Fabric object"),
    ],
)
def test_mixed_fabric_rejects(answer, word, rejects):
    rejects("mixed_fabric", answer, word)


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


def test_accumulate_accepts_another_way(verdict):
    assert verdict("accumulate", changed(ACCUMULATE)) == "correct"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ([("loss * share", "loss")], "sum over the micro-batches"),
        ([("loss * share", "loss / len(group)")], "mean of means"),
        ([("loss * share", "loss / accumulate_steps")], "a short group too"),
        (
            [("    last = i - first == len(group) - 1", "    last = (i + 1) % accumulate_steps == 0")],
            "do not fill a group",
        ),
        ([("enabled=not last", "enabled=False")], "synchronised in 4 backward passes for 2 steps"),
        ([("enabled=not last", "enabled=True")], "synchronised in 0 backward passes"),
        ([("        if last:", "        if True:"), ("loss * share", "loss")], "after every micro-batch"),
        ([("            optimizer.step()\n", "")], "have not moved"),
        ([("fabric.backward(loss * share)", "(loss * share).backward()")], "fabric.backward"),
    ],
)
def test_accumulate_rejects(changes, word, rejects):
    rejects("accumulate", changed(ACCUMULATE, *changes), word)


def test_accumulate_rejects_a_forward_outside_of_the_context(rejects):
    outside = ACCUMULATE.replace(
        "        with fabric", "        loss = F.cross_entropy(model(images), labels)\n        with fabric", 1
    )
    outside = outside.replace("            loss = F.cross_entropy(model(images), labels)\n", "", 1)
    rejects("accumulate", changed(outside), "DDP decides in forward")


# --- Task 4 ---------------------------------------------------------------------------------------------------------

CLIPPED = """
def answer(fabric, model, optimizer, micro_batches, max_norm):
    optimizer.zero_grad()
    for images, labels in micro_batches:
        loss = F.cross_entropy(model(images), labels) / len(micro_batches)
        fabric.backward(loss)
    norm = fabric.clip_gradients(model, optimizer, max_norm=max_norm)
    optimizer.step()
    return norm
"""


def test_clipped_step_accepts_another_way(verdict):
    assert verdict("clipped_step", changed(CLIPPED)) == "correct"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (
            [("fabric.clip_gradients(model, optimizer, max_norm=max_norm)",
              "nn.utils.clip_grad_norm_(model.parameters(), max_norm)")],
            "unscales first",
        ),
        ([("max_norm=max_norm", "clip_val=max_norm"), ("return norm", "return 1.0")], "not `clip_val`"),
        ([("    norm = ", "        norm = ")], "clipped once"),
        ([(" / len(micro_batches)", "")], "mean over all micro-batches"),
        (
            [("    optimizer.step()\n", ""), ("    norm = ", "    optimizer.step()\n    norm = ")],
            "before `step`",
        ),
        ([("    return norm", "    return None")], "return the norm"),
        ([("    return norm", "    return max_norm")], "before clipping is"),
    ],
)  # fmt: skip
def test_clipped_step_rejects(changes, word, rejects):
    rejects("clipped_step", changed(CLIPPED, *changes), word)
