"""The checks of exercise 3 accept what is right in any style, see a stub, and name the fault of what is wrong.

Each answer runs on three real processes, but all of them in one launch: `verdicts` first asks every check for its
task, runs all tasks, and then lets each check judge what its ranks reported.
"""

import concurrent.futures
import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from notebook_answers import defined
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from speedlab import launch
from speedlab.checks import core
from speedlab.checks import multi_gpu as checks

NAME = "exercise-3-multi-gpu.ipynb"
NAMES = dict(
    torch=torch, dist=dist, dcp=dcp, np=np, F=F, json=json, Path=Path, contextlib=contextlib,
    DistributedDataParallel=DistributedDataParallel, DataLoader=DataLoader, DistributedSampler=DistributedSampler,
    Subset=Subset, get_state_dict=get_state_dict, set_state_dict=set_state_dict, StateDictOptions=StateDictOptions,
    get_model_state_dict=get_model_state_dict, __name__="made",
)  # fmt: skip
# right answers, of which most others differ in a line or two
SOURCES = {
    "train_ddp": """
def train_ddp(model, rows, epochs, batch, accumulate_steps, lr, rank, world_size):
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    sampler = DistributedSampler(rows, seed=0)
    loader = DataLoader(rows, batch // accumulate_steps // world_size, sampler=sampler, drop_last=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for micro, (inputs, labels) in enumerate(loader, start=1):
            with model.no_sync() if micro % accumulate_steps else torch.enable_grad():  # the latter changes nothing
                loss = F.cross_entropy(model(inputs), labels)
                (loss / accumulate_steps).backward()
            if micro % accumulate_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model
""",
    "fit": """
def fit(model, sampler, loader, epochs, lr, rank, world_size):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * world_size)  # 1
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # 2
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss := loss.detach())  # 3
            losses.append(loss.item() / world_size)
    return losses
""",
    "finish": """
def finish(model, held_out, rank, world_size, save):
    inputs, labels = held_out.inputs[rank::world_size], held_out.labels[rank::world_size]
    right = (model.module(inputs).argmax(dim=1) == labels).sum()
    dist.all_reduce(right)  # 4
    if rank == 0:
        save(model.module)  # 5
    return right.item() / len(held_out)
""",
    "save": """
def save(folder, model, optimizer, step):
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": torch.tensor(step)}, checkpoint_id=folder)
""",
    "resume": """
def resume(folder, model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"].item()
""",
}


def made(name: str, *parts: str | tuple[str, str]) -> object:
    """A function called so, from SOURCES or from another source, with some of its lines replaced."""
    text = SOURCES[name]
    if parts and isinstance(parts[0], str):
        text, *parts = parts
    for old, new in parts:
        assert text.count(old) >= 1, f"{old!r} is not in\n{text}"
        text = text.replace(old, new)
    return defined(text, f"<made {hash(text)}>", **NAMES)[name]


# --- Task 1: name -> what to change in the solution, or another source; for mistakes, also words of the hint --------

MANUAL = """
def train_ddp(model, rows, epochs, batch, accumulate_steps, lr, rank, world_size):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    share = batch // accumulate_steps // world_size
    for epoch in range(epochs):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))[rank::world_size]
        for micro in range(len(order) // share):
            mine = order[micro * share : (micro + 1) * share]
            loss = F.cross_entropy(model(rows.inputs[mine]), rows.labels[mine])
            (loss / accumulate_steps).backward()
            if (micro + 1) % accumulate_steps == 0:
                average(model, world_size)
                optimizer.step()
                optimizer.zero_grad()
    return model


def average(model, world_size):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
"""
AVERAGE = """    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
"""
FLAT = """    flat = torch.nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
    dist.all_reduce(flat)
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
        p.grad.copy_(part.view_as(p) / world_size)
"""
SCATTER = """    for p in model.parameters():
        flat = F.pad(p.grad.flatten(), (0, -p.numel() % world_size))
        part = torch.empty(len(flat) // world_size)
        dist.reduce_scatter_tensor(part, flat)
        dist.all_gather_into_tensor(flat, part)
        p.grad.copy_((flat / world_size)[: p.numel()].view_as(p))
"""
REDUCED = """    for p in model.parameters():
        dist.reduce(p.grad, 0)
        p.grad /= world_size
        dist.broadcast(p.grad, 0)
"""
GATHERED = """    for p in model.parameters():
        parts = [torch.empty_like(p) for _ in range(world_size)]
        dist.all_gather(parts, p.grad)
        p.grad.copy_(sum(parts) / world_size)
"""
# each micro-batch's gradient is exchanged at once, and takes the place of the rank's own
OBJECTS = """
            parts = [None] * world_size
            dist.all_gather_object(parts, [p.grad - getattr(p, "kept", 0) for p in model.parameters()])
            for p, mine in zip(model.parameters(), zip(*parts)):
                p.kept = getattr(p, "kept", 0) + sum(mine) / world_size
                p.grad.copy_(p.kept)
            if (micro + 1) % accumulate_steps == 0:
                for p in model.parameters():
                    p.kept = 0"""
TOLD = OBJECTS.replace(
    """            dist.all_gather_object(parts, [p.grad - getattr(p, "kept", 0) for p in model.parameters()])
""",
    """            own = [p.grad - getattr(p, "kept", 0) for p in model.parameters()]
            for source in range(world_size):
                parts[source] = [gradient.clone() for gradient in own]
                for gradient in parts[source]:
                    dist.broadcast(gradient, source)
""",
)
WIDER = """    for p in model.parameters():
        wide = p.grad.double()
        dist.all_reduce(wide)
        p.grad.copy_(wide / world_size)
"""
ASYNC = """    for work in [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]:
        work.wait()
    for p in model.parameters():
        p.grad /= world_size
"""
RINGED = """    flat = torch.nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
    chunks, rank = flat.tensor_split(world_size), dist.get_rank()
    for step in range(2 * (world_size - 1)):
        arriving = torch.empty_like(chunks[(rank - step - 1) % world_size])
        leaving = dist.isend(chunks[(rank - step) % world_size].clone(), (rank + 1) % world_size)
        dist.recv(arriving, (rank - 1) % world_size)
        leaving.wait()
        here = chunks[(rank - step - 1) % world_size]
        here.copy_(arriving + here if step < world_size - 1 else arriving)
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
        p.grad.copy_(part.view_as(p) / world_size)
"""
TOLD_ONCE = """    box = [{"model": model.state_dict(), "epoch": 0}]
    dist.broadcast_object_list(box)
    model.load_state_dict(box[0]["model"])
"""
FRESH = "type({0})(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))"
WITH = "with model.no_sync() if micro % accumulate_steps else torch.enable_grad():"
BACKWARD = "(loss / accumulate_steps).backward()"
STEP = "optimizer.step()\n                optimizer.zero_grad()"
MODEL = "model = DistributedDataParallel(model)"
SAMPLER = "DistributedSampler(rows, seed=0)"
LOOP = "for micro, (inputs, labels) in enumerate(loader, start=1):"
TRAIN = {
    "as it stands": [],
    "a leftover comment": [(MODEL, MODEL + "\n    # raise NotImplementedError")],
    "a raise after the return": [("    return model", "    return model\n    raise NotImplementedError")],
    "DDP by its full name": [(MODEL, "model = torch.nn.parallel.DistributedDataParallel(model)")],
    "DDP imported inside": [
        (MODEL, "from torch.nn.parallel import DistributedDataParallel as DDP\n    model = DDP(model)")
    ],
    "DDP with views of its buckets": [
        ("DistributedDataParallel(model)", "DistributedDataParallel(model, gradient_as_bucket_view=True)")
    ],
    "by hand": [MANUAL],
    "by hand, in one message": [MANUAL, (AVERAGE, FLAT)],
    "by hand, scattered and gathered": [MANUAL, (AVERAGE, SCATTER)],
    "by hand, to rank 0 and back": [MANUAL, (AVERAGE, REDUCED)],
    "by hand, all at once": [MANUAL, (AVERAGE, ASYNC)],
    "by hand, round a ring": [MANUAL, (AVERAGE, RINGED)],
    "the weights of rank 0 as an object": [("    model = Dist", TOLD_ONCE + "    model = Dist")],
    "weights averaged after the step": [
        MANUAL,
        ("parameter.grad", "parameter.data"),
        (
            "average(model, world_size)\n                optimizer.step()",
            "optimizer.step()\n                average(model, world_size)",
        ),
    ],
    "the unwrapped model": [("return model", "return model.module")],
    "a null context": [("torch.enable_grad()", "contextlib.nullcontext()")],
    "the switch that no_sync turns": [
        (WITH, "if True:\n                model.require_backward_grad_sync = micro % accumulate_steps == 0")
    ],
    "a sum over the rows, divided": [
        (
            "F.cross_entropy(model(inputs), labels)",
            "F.cross_entropy(model(inputs), labels, reduction='sum') / len(labels)",
        )
    ],
    "zeroed before": [
        (STEP, "optimizer.step()"),
        (
            LOOP,
            LOOP + "\n            if micro % accumulate_steps == 1 or accumulate_steps == 1:\n"
            "                optimizer.zero_grad()",
        ),
    ],
    "the update by hand": [
        (
            STEP,
            "for p in model.parameters():\n                    p.data -= lr * p.grad\n"
            "                    p.grad = None",
        )
    ],
    "numpy's batch size": [
        ("batch // accumulate_steps // world_size", "int(np.int64(batch) / accumulate_steps / world_size)")
    ],
    "a Subset of its own": [
        (SAMPLER, "None"),
        (
            "    loader = DataLoader(rows, batch // accumulate_steps // world_size, "
            "sampler=sampler, drop_last=True)\n",
            "",
        ),
        (
            "sampler.set_epoch(epoch)",
            "order = torch.randperm(len(rows), "
            "generator=torch.Generator().manual_seed(epoch))\n"
            "        loader = DataLoader(Subset(rows, "
            "order[rank::world_size].tolist()), batch // accumulate_steps // "
            "world_size, drop_last=True)",
        ),
    ],
    "the loss logged in every step": [(STEP, STEP + "\n                dist.all_reduce(loss.detach() / world_size)")],
    "named arguments": [
        (SAMPLER, "DistributedSampler(rows, num_replicas=world_size, rank=rank, shuffle=True, seed=0)")
    ],
}
TRAIN_MISTAKES = {
    "past the wrapper": ([("model(inputs)", "model.module(inputs)")], "different weights", "not of its .module"),
    "no sampler": ([(SAMPLER, "DistributedSampler(rows, 1, 0)")], "same rows", "DistributedSampler"),
    "everybody trains alone": (
        [
            "def train_ddp(model, rows, epochs, batch, accumulate_steps, lr, rank, world_size):\n"
            "    from speedlab.checks.multi_gpu import train\n"
            "    return train(model, rows, epochs, batch, accumulate_steps, lr)"
        ],
        "same rows",
    ),
    "no epoch": ([("sampler.set_epoch(epoch)", "pass")], "set_epoch"),
    "a later epoch": ([("set_epoch(epoch)", "set_epoch(epoch + 1)")], "counts from 0"),
    "another seed": ([("seed=0", "seed=1")], "seed is 0"),
    "no shuffling": ([("seed=0", "seed=0, shuffle=False")], "let the sampler shuffle"),
    "the whole batch": ([("// world_size", "// 1")], "takes the whole batch"),
    "a micro-batch of the size of a batch": ([("batch // accumulate_steps //", "batch //")], "parts of the batch"),
    "a fixed size": ([("batch // accumulate_steps // world_size", "2")], "With 30 rows"),
    "two ranks": ([("// world_size", "// 2")], "the weights are not"),
    "three ranks": ([("// world_size", "// 3")], "on 2 ranks", "not always 3"),
    "three hands": ([(SAMPLER, "DistributedSampler(rows, 3, rank, seed=0)")], "on 2 ranks"),
    "a fixed number of micro-batches": ([("loss / accumulate_steps", "loss / 2")], "With 30 rows"),
    "a fixed rate": ([("lr=lr", "lr=0.1")], "With 30 rows"),
    "a larger rate": ([("lr=lr", "lr=lr * world_size")], "world_size times as long"),
    "the loss not divided": ([("loss / accumulate_steps", "loss")], "divided by accumulate_steps"),
    "the loss divided twice": (
        [("loss / accumulate_steps", "loss / accumulate_steps / world_size")],
        "averages over the ranks already",
    ),
    "the sum of the gradients": (
        [MANUAL, ("        parameter.grad /= world_size\n", "")],
        "averaged over the ranks, not summed",
    ),
    "no common beginning": ([MANUAL, ("dist.broadcast(parameter.data, 0)", "pass")], "weights of rank 0"),
    "the last rows, too": ([("drop_last=True", "drop_last=False")], "drop_last=True"),
    "never zeroed": ([(STEP, "optimizer.step()")], "zero_grad"),
    "a step each micro-batch": (
        [("if micro % accumulate_steps == 0:", "if True:"), (WITH, "if True:")],
        "after every micro-batch",
    ),
    "never silent": ([("model.no_sync()", "torch.enable_grad()")], "bytes of gradients", "no_sync()"),
    "silent in backward only": (
        [
            (WITH, "loss = F.cross_entropy(model(inputs), labels)\n            " + WITH),
            ("                loss = F", "                pass  # F"),
        ],
        "forward and backward",
    ),
    "gathered by hand": (
        [MANUAL, (AVERAGE, GATHERED)],
        "bytes of gradients",
        "by hand, all_reduce each gradient once",
    ),
    "as objects, in every micro-batch": (
        [MANUAL, (AVERAGE, "    pass\n"), (BACKWARD, BACKWARD + OBJECTS)],
        "bytes of gradients",
    ),
    "told to all, in every micro-batch": (
        [MANUAL, (AVERAGE, "    pass\n"), (BACKWARD, BACKWARD + TOLD)],
        "are broadcast",
    ),
    "in fp64 by hand": ([MANUAL, (AVERAGE, WIDER)], "bytes of gradients", "once a step, as it is"),
    "always silent": ([(WITH, "with model.no_sync():")], "outside no_sync()"),
    "half the bits": (
        [
            MANUAL,
            (
                AVERAGE,
                "    for p in model.parameters():\n        half = p.grad.bfloat16()\n"
                "        dist.all_reduce(half)\n        p.grad.copy_(half / world_size)\n",
            ),
        ],
        "away",
    ),
    "nothing": (["def train_ddp(*_):\n    pass"], "Return the model, not NoneType"),
    "no training": (["def train_ddp(model, *_):\n    return model"], "no row through the model"),
    "another model": (
        [(MODEL, "model = DistributedDataParallel(" + FRESH.format("model") + ")")],
        "that it was given",
    ),
}
TRAIN_ERRORS = {
    "an error on all": (
        [(LOOP, "for micro, (inputs, labels) in enumerate(lader, start=1):")],
        "NameError",
        "define or import",
    ),
    "an error on one rank": (
        [(MODEL, MODEL + "\n    if rank == 1:\n        raise KeyError('planted')")],
        "On rank 1 of 3",
        "KeyError",
    ),
    "an exit": ([(MODEL, MODEL + "\n    raise SystemExit(3)")], "SystemExit"),
    "an endless loop": ([(MODEL, MODEL + "\n    while True:\n        pass")], "had not ended"),
    "a collective of one rank": ([(STEP, STEP + "\n                rank or dist.barrier()")], "On rank"),
}

# --- Task 2: name -> what to change in `fit` and in `finish` --------------------------------------------------------

REDUCE = (
    "            dist.all_reduce(loss := loss.detach())  # 3\n            losses.append(loss.item() / world_size)\n"
)
AT_THE_END = "    losses = torch.tensor(losses) / world_size\n    dist.all_reduce(losses)\n    return losses"
OWN = "            losses.append(loss.item())\n"
RATE, EPOCH = "lr=lr * world_size", "sampler.set_epoch(epoch)"
COUNT, SHARES = "    dist.all_reduce(right)  # 4\n", "right.item() / len(held_out)"
SAVE = "    if rank == 0:\n        save(model.module)  # 5\n"
INPUTS = "    inputs, labels = held_out.inputs[rank::world_size], held_out.labels[rank::world_size]\n"
LOSS = "            loss = F.cross_entropy(model(inputs), labels)\n"
LOOK = "            with torch.no_grad():\n                model.module(inputs)\n"
DEALT = """    mine = list(DistributedSampler(held_out, shuffle=False))
    inputs, labels = held_out.inputs[mine], held_out.labels[mine]
"""
PIECE = """    piece = slice(len(held_out) // world_size * rank, len(held_out) // world_size * (rank + 1))
    inputs, labels = held_out.inputs[piece], held_out.labels[piece]
"""
MEND = {
    "as it stands": ([], []),
    "another order for each epoch": ([(EPOCH, "sampler.set_epoch(epoch + 1)")], []),
    "the losses reduced at the end": ([(REDUCE, OWN), ("    return losses", AT_THE_END)], []),
    "the losses as tensors": ([("loss.item() / world_size", "loss / world_size")], []),
    "the losses as an array": ([("return losses", "return np.array(losses)")], []),
    "divided before the sum": (
        [
            (
                REDUCE,
                "            loss = loss.detach() / world_size\n"
                "            dist.all_reduce(loss)\n            losses.append(loss.item())\n",
            )
        ],
        [],
    ),
    "losses gathered": (
        [
            (
                REDUCE,
                "            each = [torch.empty(()) for _ in range(world_size)]\n"
                "            dist.all_gather(each, loss.detach())\n"
                "            losses.append(np.mean([one.item() for one in each]))\n",
            )
        ],
        [],
    ),
    "the rate set in the group": (
        [("lr=lr * world_size)", "lr=lr)\n    optimizer.param_groups[0]['lr'] *= dist.get_world_size()")],
        [],
    ),
    "zeroed after the step": (
        [
            ("            optimizer.zero_grad()\n", ""),
            ("optimizer.step()\n", "optimizer.step()\n            optimizer.zero_grad()\n"),
        ],
        [],
    ),
    "all rows on every rank": (
        [],
        [(INPUTS, "    inputs, labels = held_out.inputs, held_out.labels\n"), (COUNT, "")],
    ),
    "counts gathered": (
        [],
        [
            (
                COUNT,
                "    each = [torch.zeros_like(right) for _ in range(world_size)]\n"
                "    dist.all_gather(each, right)\n    right = sum(each)\n",
            )
        ],
    ),
    "counts of floats": ([], [(COUNT, "    right = right.float()\n" + COUNT)]),
    "both counts summed": (
        [],
        [
            (COUNT, "    counts = torch.stack([right, torch.tensor(len(labels))])\n    dist.all_reduce(counts)\n"),
            (SHARES, "counts[0] / counts[1]"),
        ],
    ),
    "an accuracy of numpy's": ([], [(SHARES, "np.float32(right.item()) / np.int64(len(held_out))")]),
    "an accuracy as a tensor": ([], [(SHARES, "(right / len(held_out))[None]")]),
    "without gradients": ([], [(INPUTS, INPUTS + "    model.eval()\n    torch.set_grad_enabled(False)\n")]),
    "a barrier for all": ([], [(SAVE, SAVE + "    dist.barrier()\n")]),
    "not rank": ([], [("if rank == 0:", "if not rank:")]),
    "saved first": ([], [(SAVE, ""), (INPUTS, SAVE + INPUTS)]),
    "another rank saves": ([], [("rank == 0", "rank == 1")]),
    "the loss again, without a gradient": ([(LOSS, LOSS + LOOK)], []),
    "a copy is saved": ([], [("save(model.module)", "import copy\n        save(copy.deepcopy(model.module))")]),
}
MEND_MISTAKES = {
    "order": ([(EPOCH, "pass")], [], "set_epoch"),
    "rate": ([(RATE, "lr=lr")], [], "linear rule", "grows"),
    "the second epoch again": ([(EPOCH, "sampler.set_epoch(epoch > 0)")], [], "set_epoch(epoch)"),
    "rows twice": ([], [(INPUTS, DEALT), (SHARES, "right.item() / len(labels) / world_size")], "repeats rows"),
    "rows left out": ([], [(INPUTS, PIECE)], "left out"),
    "rate divided": ([(RATE, "lr=lr / world_size")], [], "multiplied"),
    "rate by the root": ([(RATE, "lr=lr * world_size**0.5")], [], "not those that the larger batch"),
    "a fixed number of ranks": ([(RATE, "lr=lr * 2")], [], "the weights"),
    "a rate for three ranks": ([(RATE, "lr=lr * 3")], [], "on 2 ranks", "not always 3"),
    "losses of three ranks": ([("loss.item() / world_size", "loss.item() / 3")], [], "on 2 ranks", "not always 3"),
    "rows of three ranks": ([], [("rank::world_size", "rank::3")], "on 2 ranks", "not always 3"),
    "no zero_grad": ([("            optimizer.zero_grad()\n", "")], [], "no longer set to zero"),
    "no loss": ([("return losses", "return []")], [], "returns 0 losses", "for each step"),
    "zeros": ([("return losses", "return [0.0] * len(losses)")], [], "not the mean over the ranks"),
    "sums": ([("loss.item() / world_size", "loss.item()")], [], "divide by world_size"),
    "twice divided": ([("loss.item() / world_size", "loss.item() / world_size**2")], [], "twice"),
    "own losses": ([(REDUCE, OWN)], [], "its own"),
    "the largest": (
        [("(loss := loss.detach())", "(loss := loss.detach(), op=dist.ReduceOp.MAX)"), ("() / world_size", "()")],
        [],
        "largest",
    ),
    "those of rank 0": ([(REDUCE, "            dist.broadcast(loss := loss.detach(), 0)\n" + OWN)], [], "of rank 0"),
    "the last only": ([("return losses", "return losses[-1:]")], [], "1 losses"),
    "on rank 0 only": ([("losses.append(", "rank or losses.append(")], [], "rank 2 returns 0 losses"),
    "reduced to rank 0": (
        [("dist.all_reduce(loss := loss.detach())", "dist.reduce(loss := loss.detach(), 0)")],
        [],
        "the losses on rank",
    ),
    "nan": ([("loss.item() / world_size", "float('nan')")], [], "nan"),
    "none": ([("return losses", "pass")], [], "None"),
    "no training": (["def fit(*_):\n    return []"], [], "trains on 0 batches"),
    "one epoch": ([("range(epochs)", "range(1)")], [], "batches"),
    "past the wrapper": ([("model(inputs)", "model.module(inputs)")], [], "different weights"),
    "own count": ([], [(COUNT, "")], "own count by all rows"),
    "mean of means": (
        [],
        [
            (COUNT, "    right = right / len(labels)\n    dist.all_reduce(right)\n"),
            (SHARES, "right.item() / world_size"),
        ],
        "mean of the ranks' accuracies",
    ),
    "own rows": ([], [(SHARES, "right.item() / len(labels)")], "this rank's rows"),
    "percent": ([], [(SHARES, "100 * " + SHARES)], "percent"),
    "own share": ([], [(COUNT, ""), (SHARES, "right.item() / len(labels)")], "its own share"),
    "everybody saves": ([], [("if rank == 0:", "if True:")], "save 1, 1, 1 times"),
    "nobody saves": ([], [(SAVE, "")], "save 0, 0, 0 times"),
    "twice": ([], [(SAVE, SAVE + SAVE)], "save 2, 0, 0 times"),
    "nothing is saved": ([], [("save(model.module)", "save(None)")], "model.module"),
    "the wrapper is saved": ([], [("save(model.module)", "save(model)")], "`module.`"),
    "a dict is saved": ([], [("save(model.module)", "save(model.module.state_dict())")], "OrderedDict"),
    "a file name is saved": ([], [("save(model.module)", "save('model.pt')")], "given str"),
    "another model is saved": (
        [],
        [("save(model.module)", "save(" + FRESH.format("model.module") + ")")],
        "not the weights at the end",
    ),
}
MEND_ERRORS = {
    "a barrier of rank 0": (
        [],
        [("        save(model.module)  # 5", "        save(model.module)\n        dist.barrier()")],
        "made no such call",
    ),
    "a branch": ([("            dist.all_reduce(", "            rank or dist.all_reduce(")], [], "On rank"),
    "an exit": ([("    losses = []", "    raise SystemExit")], [], "SystemExit"),
}

# --- Task 3: name -> what to change in `save` and in `resume` -------------------------------------------------------

STATEFUL = """
class Training(dcp.stateful.Stateful):
    def __init__(self, model, optimizer, step):
        self.model, self.optimizer, self.step = model, optimizer, step

    def state_dict(self):
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, "step": self.step}

    def load_state_dict(self, state):
        both = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **both)
        self.step = state["step"]


def save(folder, model, optimizer, step):
    dcp.save({"training": Training(model, optimizer, step)}, checkpoint_id=folder)


def resume(folder, model, optimizer):
    training = Training(model, optimizer, 0)
    dcp.load({"training": training}, checkpoint_id=folder)
    return training.step
"""
PIECES = """
def save(folder, model, optimizer, step):
    weights, moments = get_state_dict(model, optimizer)
    dcp.save(weights, checkpoint_id=folder / "weights")
    dcp.save(moments, checkpoint_id=folder / "moments")
    if dist.get_rank() == 0:
        (folder / "step.json").write_text(json.dumps(step))
    dist.barrier()


def resume(folder, model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    dcp.load(weights, checkpoint_id=folder / "weights")
    dcp.load(moments, checkpoint_id=folder / "moments")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return json.loads((folder / "step.json").read_text())
"""
WHOLE = """
def save(folder, model, optimizer, step):
    options = StateDictOptions(full_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        folder.mkdir()
        torch.save({"model": weights, "optimizer": moments, "step": step}, folder / "all.pt")


def resume(folder, model, optimizer):
    state, options = torch.load(folder / "all.pt"), StateDictOptions(full_state_dict=True)
    both = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **both, options=options)
    return state["step"]
"""
OWN_FILES = """
def save(folder, model, optimizer, step):
    folder.mkdir(exist_ok=True)
    weights, moments = ([t.to_local() for t in ts] for ts in (model.parameters(), parts(optimizer)))
    state = {"weights": weights, "moments": moments, "rate": optimizer.param_groups[0]["lr"], "step": step}
    state["count"] = next(iter(optimizer.state.values()))["step"]
    torch.save(state, folder / f"{dist.get_rank()}.pt")


def parts(optimizer):
    return [t for state in optimizer.state.values() for t in (state["exp_avg"], state["exp_avg_sq"])]


def resume(folder, model, optimizer):
    state = torch.load(folder / f"{dist.get_rank()}.pt")
    get_state_dict(model, optimizer)
    for tensors, saved in ((model.parameters(), state["weights"]), (parts(optimizer), state["moments"])):
        for tensor, part in zip(tensors, saved, strict=True):
            getattr(tensor, "to_local", lambda tensor=tensor: tensor)().data.copy_(part)
    for entry in optimizer.state.values():
        entry["step"].fill_(state["count"])
    optimizer.param_groups[0]["lr"] = state["rate"]
    return state["step"]
"""
TOGETHER = "weights, moments = get_state_dict(model, optimizer)"
SET = '    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])\n'
FLATTENED = """options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)"""
SET_FLATTENED = """    both = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **both, options=options)
"""
LOAD, DONE = "dcp.load(state, checkpoint_id=folder)", 'return state["step"].item()'
CHECKPOINTS = {
    "as it stands": ([], []),
    "a Stateful": ([STATEFUL], [STATEFUL]),
    "in pieces": ([PIECES], [PIECES]),
    "a writer and a reader": (
        [("checkpoint_id=folder", "storage_writer=dcp.FileSystemWriter(folder)")],
        [("checkpoint_id=folder", "storage_reader=dcp.FileSystemReader(folder)")],
    ),
    "the folder as text": ([("=folder", "=str(folder)")], [("=folder", "=str(folder)")]),
    "asynchronous, waited for": (
        [("dcp.save(", "dcp.async_save("), ("checkpoint_id=folder)", "checkpoint_id=folder).result()")],
        [],
    ),
    "the step as a number": (
        [("torch.tensor(step)", "step")],
        [("torch.tensor(0)", "0"), (DONE, 'return state["step"]')],
    ),
    "the step as a tensor": ([], [(DONE, 'return state["step"]')]),
    "more than is asked for": ([('"step":', '"seed": torch.tensor(1), "step":')], []),
    "set twice": ([], [(SET, SET + SET)]),
    "a leftover comment": ([(TOGETHER, "# raise NotImplementedError\n    " + TOGETHER)], []),
    "what it does is printed": (
        [(TOGETHER, TOGETHER + '\n    print("saved", step)')],
        [(LOAD, LOAD + '\n    print("loaded")')],
    ),
    "a barrier at the end": (
        [("id=folder)", "id=folder)\n    dist.barrier()")],
        [(SET, SET + "    dist.barrier()\n")],
    ),
    "arguments by name": (
        [("dcp.save(", "dcp.save(state_dict=")],
        [(LOAD, "dcp.load(state_dict=state, checkpoint_id=folder)")],
    ),
    "the step as fp64": ([("tensor(step)", "tensor(float(step)).double()")], [("tensor(0)", "tensor(0.0).double()")]),
    "the step of numpy": ([], [(DONE, 'return np.int64(state["step"].item())')]),
    "the weights alone, then the moments": (
        [(TOGETHER, "weights = get_model_state_dict(model)\n    _, moments = get_state_dict(model, optimizer)")],
        [],
    ),
    "moments on the CPU": (
        [("(model, optimizer)\n", "(model, optimizer, options=StateDictOptions(cpu_offload=True))\n")],
        [],
    ),
    "in one nest": (
        [
            (
                '{"model": weights, "optimizer": moments, "step": torch.tensor(step)}',
                '{"all": {"model": weights, "optimizer": moments, "step": torch.tensor(step)}}',
            )
        ],
        [(LOAD, 'dcp.load({"all": state}, checkpoint_id=folder)')],
    ),
    "the optimizer's state flattened": ([(TOGETHER, FLATTENED)], [(TOGETHER, FLATTENED), (SET, SET_FLATTENED)]),
    "under no_grad": ([("def save", "@torch.no_grad()\ndef save")], [("def resume", "@torch.no_grad()\ndef resume")]),
    "from a copy": (
        [(TOGETHER, TOGETHER + "\n    weights = {name: weight.clone() for name, weight in weights.items()}")],
        [],
    ),
}
CHECKPOINT_MISTAKES = {
    "gathered into one file": ([WHOLE], [WHOLE], "None has to travel"),
    "a file for each rank": ([OWN_FILES], [OWN_FILES], "not sharded", "as DCP does"),
    "nothing": (["def save(*_):\n    pass"], [], "no file"),
    "no moments": ([('"optimizer": moments, ', "")], [('"optimizer": moments, ', ""), (SET, "")], "rate"),
    "the rate but no moments": (
        [('"optimizer": moments', '"lr": torch.tensor(optimizer.param_groups[0]["lr"])')],
        [
            ('"optimizer": moments', '"lr": torch.tensor(0.0)'),
            (SET, "    optimizer.param_groups[0]['lr'] = state['lr'].item()\n"),
        ],
        "moments of AdamW",
    ),
    "no rate": ([], [(SET, "")], "learning rate"),
    "everything is told to all": (
        [],
        [(LOAD, LOAD + "\n    dist.broadcast_object_list([torch.zeros(10**5)])")],
        "To load, this rank sends",
    ),
    "no weights": (
        [('"model": weights, ', "")],
        [('"model": weights, ', ""), ('model_state_dict=state["model"]', "model_state_dict=weights")],
        "weights are not those",
    ),
    "nothing is read": ([], [(LOAD, "pass")], "resume returns step 0"),
    "a fixed step": ([], [(DONE, "return 103")], "From a checkpoint of step 105"),
    "AdamW's own count": (
        [],
        [(DONE, "return int(next(iter(optimizer.state.values()))['step'])")],
        "resume returns step 3",
    ),
    "no step": ([], [(DONE, "pass")], "None"),
    "read into copies": (
        [],
        [(LOAD, "import copy\n    dcp.load(copy.deepcopy(state), checkpoint_id=folder)"), (DONE, "return 103")],
        "weights are not those",
    ),
    "written twice": ([('"step":', '"again": weights, "and again": moments, "step":')], [], "written twice"),
    "the save steps": ([(TOGETHER, TOGETHER + "\n    model[0].weight.data.mul_(2)")], [], "changes the weights"),
    "the save resets moments": (
        [("checkpoint_id=folder)", "checkpoint_id=folder)\n    optimizer.state.clear()")],
        [],
        "goes on differently",
    ),
    "nan as the step": ([], [(DONE, "return float('nan')")], "nan"),
    "a table of steps": ([], [(DONE, "return {3: 3}.get(state['step'].item())")], "None"),
    "the step one further": ([], [(DONE, DONE + " + 1")], "resume returns step 104"),
    "the moments of nobody": ([], [(SET, SET + "    optimizer.state.clear()\n")], "moments of AdamW"),
    "weights that are not a number": (
        [],
        [(SET, SET + "    model[0].weight.data.mul_(float('nan'))\n")],
        "weights are not those",
    ),
    "an error swallowed": (
        ["def save(*_):\n    with contextlib.suppress(Exception):\n        dcp.save(None)"],
        [],
        "no file",
    ),
}
CHECKPOINT_ERRORS = {
    "rank 0 saves": ([("    dcp.save", "    dist.get_rank() or dcp.save")], [], "On rank"),
}


def cases() -> Iterator[tuple[str, str, tuple[object, ...], tuple[str, ...] | None, bool]]:
    """The task, a name, the answers, the words of the hint (None: correct), whether an error is what is told."""
    for task, names, right, wrong, errors in (
        ("train_ddp", ["train_ddp"], TRAIN, TRAIN_MISTAKES, TRAIN_ERRORS),
        ("mended", ["fit", "finish"], MEND, MEND_MISTAKES, MEND_ERRORS),
        ("checkpoint", ["save", "resume"], CHECKPOINTS, CHECKPOINT_MISTAKES, CHECKPOINT_ERRORS),
    ):
        for name, parts in right.items():
            parts = parts if len(names) > 1 else [parts]
            yield task, name, tuple(made(n, *p) for n, p in zip(names, parts, strict=True)), None, False
        for table, is_error in ((wrong, False), (errors, True)):
            for name, case in table.items():
                parts, words = case[: len(names)], case[len(names) :]
                yield task, name, tuple(made(n, *p) for n, p in zip(names, parts, strict=True)), words, is_error


CASES = list(cases())


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[tuple[str, str], str]:
    """What is said of each case, by task and name; one launch for those that end on a wait, one for all others."""
    folder = tmp_path_factory.mktemp("tasks")

    def place_of(number: int) -> Path:
        return folder / ("waiting" if CASES[number][-1] else "working") / f"{number:03}"

    def keep(number: int, task: Path) -> None:
        place = place_of(number)
        place.mkdir(parents=True)
        # where ranks wait for each other in vain, they wait half of that
        seconds = 4 if CASES[number][-1] else 30
        wanted = json.loads((task / "task.json").read_text(encoding="utf-8")) | {"seconds": seconds}
        (place / "task.json").write_text(json.dumps(wanted), encoding="utf-8")
        raise launch.LaunchError("later", None, launch.Launched((), (), 0.0))

    def hand_back(number: int, task: Path) -> None:
        for report in place_of(number).glob("?.json"):
            shutil.copy(report, task)

    def judged(instead) -> list[str]:
        said = []
        for number, (task, _, functions, _, _) in enumerate(CASES):
            with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
                run = lambda script, ranks, task, number=number, **options: instead(number, Path(task))  # noqa: E731
                patch.setattr(core.launch, "run", run)
                getattr(checks, task)(*functions)
            said.append(printed.getvalue().split(": ", 1)[1].strip())
        return said

    judged(keep)
    ranks_in_turn = Path(__file__).with_name("ranks_in_turn.py")
    with concurrent.futures.ThreadPoolExecutor() as pool:  # some work while others wait
        runs = [pool.submit(launch.run, ranks_in_turn, checks.RANKS, part, timeout=500) for part in folder.iterdir()]
        for run in runs:
            run.result()
    return {(task, name): said for (task, name, *_), said in zip(CASES, judged(hand_back), strict=True)}


@pytest.mark.parametrize(("task", "name"), [(task, name) for task, name, _, words, _ in CASES if words is None])
def test_what_is_right_is_accepted(task, name, verdicts):
    assert verdicts[task, name] == "correct"


@pytest.mark.parametrize(
    ("task", "name", "words", "is_error"), [(t, n, words, e) for t, n, _, words, e in CASES if words is not None]
)
def test_what_is_wrong_is_refused_by_its_name(task, name, words, is_error, verdicts):
    said = verdicts[task, name]
    assert said.startswith("not yet right.") and all(word in said for word in words), said
    if not is_error:
        assert not any(sign in said for sign in ("Your code raised", "The check cannot go on", "had not ended")), said


@pytest.mark.parametrize("names", [["train_ddp"], ["fit", "finish"], ["save", "resume"]])
def test_a_stub_is_not_attempted_and_starts_no_process(names, stub, verdict):
    task = {"fit": "mended", "save": "checkpoint"}.get(names[0], names[0])
    children = psutil.Process().children()
    assert verdict(task, *(stub[name] for name in names)) == "not attempted yet"
    assert psutil.Process().children() == children


def test_the_solution_is_correct_in_a_launch_of_its_own(solution, verdict):
    assert verdict("mended", solution["fit"], solution["finish"]) == "correct"
