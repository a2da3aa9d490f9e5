"""The checks of exercise 8, Fabric: a conversion that changes no bit, a word of precision, accumulation, clipping."""

import contextlib
import copy
import functools
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest.mock import patch

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from speedlab import compat, count, machine
from speedlab.checks.core import apart, check, close, diagnose, distance, expect, fail, number, sequence, where

Batches = list[tuple[torch.Tensor, torch.Tensor]]
for _name in ("lightning.fabric", "lightning.pytorch"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # "Using bfloat16 Automatic Mixed Precision (AMP)"


@dataclass(frozen=True)
class _Task:
    """A small model with its optimizer and batches, made anew and equal each time."""

    story: str
    shape: tuple[int, ...]
    optimizer: Callable[..., torch.optim.Optimizer]
    sizes: tuple[int, ...] = (8, 8, 8, 8)

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            body = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
            mlp = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
            return mlp if len(self.shape) == 1 else nn.Sequential(*body, nn.Linear(4 * 6 * 6, 3))

    def batches(self, seed: int = 0) -> Batches:
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(n, *self.shape, generator=generator) for n in self.sizes]
        return [(images, torch.randint(3, (len(images),), generator=generator)) for images in drawn]

    def loader(self, seed: int = 0) -> DataLoader:
        images, labels = (torch.cat(parts) for parts in zip(*self.batches(seed), strict=True))
        return DataLoader(TensorDataset(images, labels), 8, shuffle=True, generator=torch.Generator().manual_seed(1))


_SCALE = 2.0**10
_SGD = functools.partial(torch.optim.SGD, lr=0.5)
_MLP = _Task("an MLP with momentum", (6,), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))
_CNN = _Task("convolutions with batch norm", (1, 8, 8), functools.partial(torch.optim.Adam, lr=0.01))


class _Watched(Fabric):
    """A Fabric on one CPU process that notes what goes past it, and what a group of processes would send.

    `noted` holds ("forward", held, images), ("backward", held), ("clip",), ("asked",) where the wrapped optimizer's
    step is called and ("step",) where the bare one steps; held: inside `no_backward_sync`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader | None, scaled: bool = False
    ):
        # with a scaler of its own, 16-mixed works on a CPU too
        scaler = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=_SCALE))
        super().__init__(accelerator="cpu", devices=1, plugins=scaler if scaled else None)
        self.noted, self.past, self.inside, self.held, self.loader = [], set(), [], False, loader

        def forward(_, inputs: tuple, named: dict) -> None:
            counts = torch.is_grad_enabled() and "backward" not in self.inside  # no validation, no recomputation
            self._note("model", *(("forward", self.held, len([*inputs, *named.values()][0])) if counts else ()))

        model.register_forward_pre_hook(forward, with_kwargs=True)
        model[0].weight.register_post_accumulate_grad_hook(lambda _: self._note("backward"))
        optimizer.register_step_pre_hook(lambda *_: self._note("optimizer", "step"))

    def _note(self, name: str, *entry) -> None:
        self.past |= set() if name in self.inside else {name}
        self.noted += [entry] if entry else []

    def all_noted(self, kind: str) -> list[tuple]:
        return [entry for entry in self.noted if entry[0] == kind]

    def _through(self, name: str, call: Callable, *entry) -> Callable:
        def through(*args, **options):
            self.noted += [entry] if entry else []
            self.inside.append(name)
            try:
                return call(*args, **options)
            finally:
                self.inside.remove(name)

        return through

    def setup_module(self, module, *args, **options):
        wrapped = super().setup_module(module, *args, **options)
        # past its own __setattr__, which would set this on the module that it wraps, too
        object.__setattr__(wrapped, "forward", self._through("model", wrapped.forward))
        return wrapped

    def setup_optimizers(self, optimizer):
        wrapped = super().setup_optimizers(optimizer)
        wrapped.step = self._through("optimizer", wrapped.step, "asked")
        return wrapped

    def setup(self, module, *optimizers, scheduler=None, **options):
        made = [
            self.setup_module(module),
            *map(self.setup_optimizers, optimizers),
            *([scheduler] if scheduler else []),
        ]
        return tuple(made) if len(made) > 1 else made[0]

    def setup_dataloaders(self, *loaders, **options):
        return super().setup_dataloaders(self.loader, **options)  # the one that was handed out is a decoy

    def backward(self, tensor, *args, **options):
        return self._through("backward", super().backward, "backward", self.held)(tensor, *args, **options)

    def clip_gradients(self, *args, **options):
        self.noted.append(("clip",))
        return super().clip_gradients(*args, **options)

    @contextlib.contextmanager
    def no_backward_sync(self, module, enabled=True):
        before, self.held = self.held, self.held or bool(enabled)
        try:
            with super().no_backward_sync(module, enabled):
                yield
        finally:
            self.held = before

    def expect_all_through(self) -> None:
        for name, hint in _PAST.items():
            expect(name not in self.past, hint)

    def expect_steps(self, wanted: int, what: str) -> None:
        made = len(self.all_noted("step"))
        idle = ". A step without gradients changes nothing here, but in 16-mixed the scaler raises an error"
        expect(made == wanted, f"You make {made} optimizer steps for {wanted} {what}{idle * (made > wanted)}.")


_PAST = {
    "model": "You call the bare model, which knows nothing of precision. Call what `setup_module` returns.",
    "backward": "A backward goes past Fabric. Call `fabric.backward(loss)`, which scales the loss in 16-mixed.",
    "optimizer": "You step the bare optimizer, wrong with a scaled loss. Step what `setup_optimizers` returns.",
}


@contextlib.contextmanager
def _affordable() -> Iterator[None]:
    with compat.half_products(), warnings.catch_warnings(action="ignore"):
        yield


# --- Task 1 ---------------------------------------------------------------------------------------------------------


def _plain(task: _Task, seed: int = 0, zero: bool = True, step: bool = True, train: bool = True):
    """The losses and the model after an epoch in plain PyTorch, or with one of the usual mistakes."""
    model, losses = task.model().train(train), []
    optimizer = task.optimizer(model.parameters())
    for images, labels in task.loader(seed):
        loss = F.cross_entropy(model(images), labels)
        if zero:
            optimizer.zero_grad()
        loss.backward()
        if step:
            optimizer.step()
        losses.append(loss.item())
    return losses, model


_DECOY = 9
_NO_BACKWARD = "Not every backward went through the Fabric given to you: call its `backward`, once for each batch."
_MISTAKES = {
    "You iterate over the loader as it came; with several processes, all would train on the same images. Use what "
    "`fabric.setup_dataloaders(train_loader)` returns.": {"seed": _DECOY},
    "Batch norm uses the batch's statistics in train mode only: call `model.train()`.": {"train": False},
    "Gradients are not zeroed: each step adds to those of the steps before.": {"zero": False},
    "The weights never move: is the optimizer stepped, on gradients that `zero_grad` has not removed before?": {
        "step": False
    },
}


@check("Task 1, the conversion")
def train(answer: Callable[..., list[float]]) -> None:
    for task in (_MLP, _CNN):
        model, (wanted, plain) = task.model().eval(), _plain(task)
        optimizer = task.optimizer(model.parameters())
        fabric = _Watched(model, optimizer, task.loader())
        with where(f"For {task.story}"):
            found = answer(fabric, model, optimizer, task.loader(_DECOY))
            losses = [number(loss) for loss in sequence(found, "the losses, one for each step,", len(wanted))]
            if losses != wanted:
                step = next(i for i, (got, right) in enumerate(zip(losses, wanted, strict=True)) if got != right)
                got, right = apart(losses[step], wanted[step], least=6)
                faults = {hint: functools.partial(_losses, task, **fault) for hint, fault in _MISTAKES.items()}
                digits = "Only the last digits differ: are they rounded, or computed in another order?"
                faults = {digits: close(losses, wanted, 1e-4)} | faults
                faults |= {
                    "You add up the losses of a batch: take their mean.": close(losses[0], 8 * wanted[0]),
                    "The first digits agree: note each loss as it is, with all the digits that fp32 holds.": close(
                        losses, wanted, 1e-2
                    ),
                    "The weights are right: note each loss as it is, before its step.": distance(model, plain) == 0,
                }
                why = diagnose(losses, faults, "Is the order of the batches different, or anything before it?")
                why = why if fabric.all_noted("backward") else _NO_BACKWARD
                fail(f"the loss of step {step + 1} is {got}; in plain PyTorch it is {right}, to the bit. {why}")
            calls = len(fabric.all_noted("forward"))
            why = "is the last step made?" if calls == len(wanted) else f"batch norm counts each of {calls} forwards."
            expect(distance(model, plain) == 0, f"the losses are equal, but not the weights: {why}")
            fabric.expect_all_through()
            fabric.expect_steps(len(wanted), "batches")
            backwards = fabric.all_noted("backward")
            expect(len(backwards) == len(wanted), _NO_BACKWARD)
            never = "every step is inside `no_backward_sync`: with several processes the gradients are never sent."
            expect(not any(held for _, held, *_ in (*backwards, *fabric.all_noted("forward"))), never)


def _losses(task: _Task, **fault) -> list[float]:
    return _plain(task, **fault)[0]


# --- Task 2 ---------------------------------------------------------------------------------------------------------


@check("Task 2, one word of precision")
def mixed_fabric(answer: Callable[[], Fabric]) -> None:
    begin = Fabric.__init__

    def noting(self, *args, **options):
        self._asked_for = inspect.signature(begin).bind(self, *args, **options).arguments.get("precision")
        begin(self, *args, **options)

    with _affordable(), patch.object(Fabric, "__init__", noting):
        fabric = answer()
    expect(fabric is not None, "Nothing came back. Does your function return the Fabric object?")
    expect(
        isinstance(fabric, Fabric),
        f"Return a Fabric object from lightning.fabric, not {type(fabric).__module__}.{type(fabric).__name__}.",
    )
    expect(
        hasattr(fabric, "_asked_for"),
        "Make the Fabric inside your function, so that the check sees what you ask for.",
    )
    turned = (
        "You asked for 16-mixed, which is fp16; on a CPU Fabric turns that into bf16-mixed. Ask for what you mean."
    )
    expect(str(fabric._asked_for) not in ("16", "16-mixed"), turned)
    expect(fabric.world_size == 1, f"Your Fabric is for {fabric.world_size} processes; make it for one: `devices=1`.")
    here = machine.device().type
    expect(fabric.device.type == here or here == "cpu", f"Your Fabric trains on the {fabric.device.type}, but this "
           f"machine has a GPU: `accelerator=machine.device().type`.")  # fmt: skip
    with _affordable():
        _, _, before = _kept(Fabric(accelerator=fabric.device.type, devices=1))
        weights, product, kept = _kept(fabric)
    lost = (
        "with '-true' they leave fp32, and in 16 bits lose small updates (unit 9.1). Here they are to stay in fp32."
    )
    expect(weights == torch.float32, f"The weights are in {count.dtype_name(weights)}: {lost}")
    counted = f"the counter finds {kept:,} bytes kept for backward ({before:,} in fp32)"
    which = "Which value of `precision` gives bf16 products and fp32 weights?"
    expect(product == torch.bfloat16, f"The products run in {count.dtype_name(product)}, and {counted}. {which}")
    expect(kept < before, f"The products run in bf16, but {counted}: not fewer.")


def _kept(fabric: Fabric) -> tuple[torch.dtype, torch.dtype, int]:
    """The dtype of the weights, the dtype of a product, and the bytes kept for backward, under this Fabric."""
    model, products = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), []
    model[0].register_forward_hook(lambda module, inputs, output: products.append(output.dtype))
    wrapped, inputs = fabric.setup_module(model), torch.randn(512, 64, device=fabric.device)
    saved = count.saved_bytes(lambda: wrapped(inputs), wrapped)
    return model[0].weight.dtype, products[0], saved.bytes


# --- Tasks 3 and 4: steps on groups of micro-batches ----------------------------------------------------------------


def _steps(task: _Task, groups: list[Batches], weigh="images", clip: Callable | None = None, zero: bool = True):
    """The model after one step per group, and the norms before clipping; `weigh` names how losses are scaled."""
    model, norms, full = task.model(), [], max(map(len, groups))
    optimizer = task.optimizer(model.parameters())
    for group in groups:
        total = sum(len(labels) for _, labels in group)
        if zero:
            optimizer.zero_grad()
        for images, labels in group:
            share = {"images": len(labels) / total, "equally": 1 / len(group), "full": 1 / full, "not": 1.0}[weigh]
            (F.cross_entropy(model(images), labels) * share).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        if clip:
            clip(model.parameters())
        optimizer.step()
    return model, norms


def _stepped(answer: Callable, task: _Task, lists: list[Batches], last: float, scaled: bool = False):
    """Call an answer once per list of batches, on one model: what it returns, the model, and what was noted."""
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    fabric = _Watched(model, optimizer, None, scaled)
    with _affordable():
        given = fabric.setup_module(model), fabric.setup_optimizers(optimizer)
        return [answer(fabric, *given, copy.deepcopy(batches), last) for batches in lists], model, fabric


def _why_not(model: nn.Module, task: _Task, faults: dict[str, tuple], otherwise: str) -> str:
    """`faults` maps each hint to the arguments of `_steps` with which it is made."""
    moved = distance(model, task.model())
    still = "the weights have not moved: is `optimizer.step()` called, on gradients that `zero_grad` has not removed?"
    runs = {hint: functools.partial(lambda fault: _steps(task, *fault)[0], fault) for hint, fault in faults.items()}
    ends = {still: moved == 0, "there is nan among the weights.": moved == math.inf}
    return diagnose(model, {**ends, **runs}, otherwise)


def _expect_each_on_its_own(fabric: _Watched, groups: list[Batches]) -> list[bool]:
    """One forward and one backward for each micro-batch, both held back or neither; says which were held back."""
    wanted = [len(labels) for group in groups for _, labels in group]
    forwards, backwards = fabric.all_noted("forward"), [held for _, held in fabric.all_noted("backward")]
    sizes = [images for *_, images in forwards]
    own = "each micro-batch needs a forward and a backward of its own, which is what saves memory. You make"
    made = f"{own} forwards of {sizes} images and {len(backwards)} backwards, for micro-batches of {wanted}."
    expect(sizes == wanted and len(backwards) == len(wanted), made)
    turns = [entry[0] for entry in fabric.noted if entry[0] in ("forward", "backward")]
    kept = "you make several forwards before a backward, so that all their activations are kept at once"
    expect(turns == ["forward", "backward"] * len(wanted), f"{kept}: call backward after each forward.")
    torn = "a micro-batch's forward and backward both belong inside `no_backward_sync`: DDP decides in forward."
    expect([held for _, held, _ in forwards] == backwards, torn)
    return backwards


# sizes of the micro-batches, and how many make a step
_GROUPS = ((4 * [8], 2), (5 * [8], 2), ([8, 8, 8, 3], 4), ([8, 5, 8, 8, 3], 3), ([6], 4), (3 * [8], 1))


@check("Task 3, accumulation")
def accumulate(answer: Callable[..., object]) -> None:
    for sizes, steps in _GROUPS:
        task = _Task("an MLP", (6,), _SGD, sizes)
        lists = [task.batches(seed) for seed in range(2)]
        groups = [batches[i : i + steps] for batches in lists for i in range(0, len(batches), steps)]
        with where(f"With micro-batches of {', '.join(map(str, sizes))} images and accumulate_steps={steps}"):
            _, model, fabric = _stepped(answer, task, lists, steps)
            fabric.expect_all_through()
            if not close(model, _steps(task, groups)[0]):
                fail(_why_not_accumulated(model, task, lists, groups, steps))
            sent = [not held for held in _expect_each_on_its_own(fabric, groups)]
            first, last = ([i == (len(g) - 1 if end else 0) for g in groups for i in range(len(g))] for end in (0, 1))
            turned = "the first backward of each group: then what follows is never sent"
            which = turned if sent == first else f"{sum(sent)} backward passes for {len(groups)} steps"
            rule = "Only the last of a group, even of a short one, needs it: `no_backward_sync(model, enabled=...)`."
            expect(sent == last, f"the weights are right, but gradients are synchronised in {which}. {rule}")
            fabric.expect_steps(len(groups), "groups")


def _why_not_accumulated(model: nn.Module, task: _Task, lists: list, groups: list[Batches], steps: int) -> str:
    full = [group for group in groups if len(group) == steps]
    alone = [[batch] for group in groups for batch in group]
    firsts = [b[max(i, 0) : i + steps] for b in lists for i in range(1 - steps, len(b) - steps + 1, steps)]
    faults = {
        "your gradients are the sum over the micro-batches, not their mean: scale each loss.": (groups, "not"),
        "you weight every micro-batch equally, but one has fewer images: a mean of means.": (groups, "equally"),
        "a short group is divided by accumulate_steps: count what is in it.": (groups, "full"),
        "the gradients are not zeroed between steps.": (groups, "images", None, False),
        "you make a step after every micro-batch: step once per group.": (alone, "images"),
        "your first step comes after one micro-batch: `i % n == 0` is true for i = 0.": (firsts, "full"),
    }
    if full and full != groups:
        faults["the micro-batches at the end, which do not fill a group, make no step."] = (full, "images")
    rule = "Scale each loss by its share of its group's images, zero the gradients once per group, step once."
    return _why_not(model, task, faults, f"the weights are not those of steps on whole groups. {rule}")


@check("Task 4, clipping")
def clipped_step(answer: Callable[..., float]) -> None:
    for sizes, max_norm in (((8, 8), 0.05), ((8, 8, 8), 0.2), ((8,), 100.0), ((8, 8), 100.0)):
        task = _Task("an MLP", (6,), _SGD, sizes)
        groups = [task.batches(seed) for seed in range(2)]
        by_norm = functools.partial(nn.utils.clip_grad_norm_, max_norm=max_norm)
        wanted, norms = _steps(task, groups, clip=by_norm)
        groups_of = f"{len(sizes)} micro-batch{'es' * (len(sizes) > 1)}"
        with where(f"With {groups_of} and max_norm={max_norm:g}, called twice"):
            returned, model, fabric = _stepped(answer, task, groups, max_norm)
            fabric.expect_all_through()
            by_value = functools.partial(nn.utils.clip_grad_value_, clip_value=max_norm)
            faults = {
                "the gradients were not clipped: clip after the last backward, before `step`.": (groups,),
                "you clip each gradient by itself: give `max_norm`, not `clip_val`.": (groups, "equally", by_value),
                "gradients of the first step are still there: zero them.": (groups, "equally", by_norm, False),
                "your gradients are the sum, not the mean over all micro-batches.": (groups, "not", by_norm),
            }
            rule = "Add up the gradients of all micro-batches, clip them once, by norm, then step once."
            if not close(model, wanted):
                fail(_why_not(model, task, faults, f"the weights are not those of steps clipped once. {rule}"))
            sent = [not held for held in _expect_each_on_its_own(fabric, groups)]
            ends = [i == len(group) - 1 for group in groups for i in range(len(group))]
            never = "the last backward is inside `no_backward_sync`: the gradients are never sent."
            expect(all(was for was, end in zip(sent, ends, strict=True) if end), never)
            every = "gradients are sent in more than the last backward of a step; only that needs it, as in task 3."
            expect(sent == ends, every)
            fabric.expect_steps(len(groups), "calls")
            _, sums = _steps(task, groups, "not", by_norm)
            for got, norm, of_sum in zip(returned, norms, sums, strict=True):
                texts = apart(number(got, "the norm before clipping"), norm)
                hints = {"That is the norm of the sum, not of the mean: scale each loss.": of_sum}
                why = diagnose(number(got), hints, "`fabric.clip_gradients(..., max_norm=...)` returns it.")
                said = f"you return {texts[0]}; the norm of all gradients before clipping is {texts[1]}. {why}"
                expect(close(number(got), norm, 1e-4), said)
    _examine_scaled(answer)


def _examine_scaled(answer: Callable[..., float]) -> None:
    """A step with a scaled loss, where only Fabric knows the true gradients."""
    task = _Task("an MLP", (6,), _SGD, (8, 8))
    with where("In 16-mixed"):
        [got], model, fabric = _stepped(answer, task, [task.batches()], 0.05, scaled=True)
    wanted, [norm] = _steps(task, [task.batches()], clip=functools.partial(nn.utils.clip_grad_norm_, max_norm=0.05))
    said = f"In 16-mixed the loss is scaled, and the gradients with it: you find a norm of {number(got):.4g}, not"
    clips = bool(fabric.all_noted("clip"))
    measured = (
        "Return what `fabric.clip_gradients` returns: before the call the gradients are still scaled, and after it "
        "they are already clipped."
    )
    why = "`nn.utils.clip_grad_norm_` does not know the scale; `fabric.clip_gradients` unscales first."
    same = close(number(got), norm, 0.05) and distance(model, wanted) < 1e-3
    expect(same, f"{said} {norm:.4g}. {measured if clips else why}")
    expect(clips, "Clip with `fabric.clip_gradients`, which can also handle sharded gradients.")
    overflow = [(images * 1e6, labels) for images, labels in task.batches()]
    with where("In 16-mixed, at an overflow"):
        _, _, fabric = _stepped(answer, task, [overflow], 0.05, scaled=True)
        skips = "Call `optimizer.step()` all the same: the scaler skips that step and lowers its scale."
        expect(fabric.all_noted("asked"), f"you make no step. {skips}")
        lower = fabric._strategy.precision.scaler.get_scale() < _SCALE
        seen = (
            "the scaler did not see the overflow, at which it lowers its scale: leave inf and nan in the gradients."
        )
        expect(lower, seen)
    with where("In 16-mixed, a step after an overflow"):
        _, model, _ = _stepped(answer, task, [overflow, task.batches()], 0.05, scaled=True)
        nan = "The overflow's inf and nan are still among the gradients (0 times inf is nan): call `zero_grad`."
        expect(distance(model, wanted) < 1e-3, f"the overflow still has an effect. {nan}")
