"""The checks of exercise 8, Fabric: a conversion that changes no bit, a word of precision, accumulation, clipping."""

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from speedlab import compat, count
from speedlab.checks import NotYetError, check, expect

Batch = tuple[torch.Tensor, torch.Tensor]
for _name in ("lightning.fabric", "lightning.pytorch"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # "Using bfloat16 Automatic Mixed Precision (AMP)"


class _Watched(Fabric):
    """A Fabric on one CPU process that notes what is asked of it, and what a group of processes would do."""

    def __init__(self, **options):
        super().__init__(accelerator="cpu", devices=1, **options)
        self.calls: list[str] = []
        self.synchronised = 0
        self.holding = self.held_in_forward = False

    def setup(self, *args, **options):
        self.calls += ["setup_module", "setup_optimizers"]
        return super().setup(*args, **options)

    def setup_module(self, module, **options):
        self.calls.append("setup_module")
        return super().setup_module(module, **options)

    def setup_optimizers(self, *optimizers):
        self.calls.append("setup_optimizers")
        return super().setup_optimizers(*optimizers)

    def setup_dataloaders(self, *loaders, **options):
        self.calls.append("setup_dataloaders")
        return super().setup_dataloaders(*loaders, **options)

    def backward(self, tensor, *args, **options):
        self.calls.append("backward")
        self.synchronised += not self.holding
        expect(
            self.holding == self.held_in_forward,
            "Forward and backward of a micro-batch must both run inside `no_backward_sync`, or both outside of it: "
            "DDP decides in forward whether it will synchronise.",
        )
        return super().backward(tensor, *args, **options)

    def clip_gradients(self, *args, **options):
        self.calls.append("clip_gradients")
        return super().clip_gradients(*args, **options)

    @contextlib.contextmanager
    def no_backward_sync(self, module, enabled=True):
        self.calls.append("no_backward_sync")
        before, self.holding = self.holding, enabled
        try:
            with super().no_backward_sync(module, enabled):
                yield
        finally:
            self.holding = before

    def note_forward(self, *_) -> None:
        self.held_in_forward = self.holding


@dataclass(frozen=True)
class _Task:
    """A small model with its optimizer and batches, made anew and equal each time `parts` is called."""

    story: str
    layers: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    sizes: tuple[int, ...] = (8, 8, 8, 8)
    shape: tuple[int, ...] = (6,)
    options: dict = field(default_factory=dict)

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer, list[Batch]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(len(self.story))
            model = self.layers()
            batches = [(torch.randn(n, *self.shape), torch.randint(3, (n,))) for n in self.sizes]
        return model, self.optimizer(model.parameters(), **self.options), batches


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))


def _convolutions() -> nn.Module:
    body = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(4 * 6 * 6, 3))


_MLP = _Task("an MLP with momentum", _mlp, torch.optim.SGD, options={"lr": 0.1, "momentum": 0.9})
_CNN = _Task("convolutions, batch norm, Adam", _convolutions, torch.optim.Adam, shape=(1, 8, 8), options={"lr": 0.01})


# --- Task 1 ---------------------------------------------------------------------------------------------------------


def _loader(batches: Sequence[Batch]) -> DataLoader:
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(images, labels), 8, shuffle=True, generator=generator)


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> list[float]:
    model.train()
    losses = []
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@check("Task 1, the conversion", seconds=300)
def train(answer: Callable[..., list[float]]) -> None:
    for task in (_MLP, _CNN):
        losses, model, fabric = _trained(answer, task, "32-true")
        plain, optimizer, batches = task.parts()
        wanted = _plain(plain, optimizer, _loader(batches))
        expect(isinstance(losses, list), f"Return the list of losses, one a step, not {type(losses).__name__}.")
        expect(
            len(losses) == len(wanted),
            f"For {task.story}: {len(losses)} losses for {len(wanted)} steps. Append one each step, and return "
            "them all.",
        )
        for number, (got, right) in enumerate(zip(losses, wanted, strict=True), start=1):
            expect(
                float(got) == right,
                f"For {task.story}, the loss of step {number} is {float(got):.6f}, in plain PyTorch "
                f"{right:.6f}; they must "
                f"be equal to the bit. {_why_not_equal(number, fabric)}",
            )
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        expect(same, f"For {task.story} the losses are equal, but not the weights at the end: is the last step made?")
        for call in ("setup_module", "setup_optimizers", "setup_dataloaders", "backward"):
            expect(call in fabric.calls, _MISSING[call])
        expect(fabric.calls.count("backward") == len(wanted), "Call `fabric.backward(loss)` exactly once a step.")
    mixed = _trained(answer, _MLP, "bf16-mixed")[0]
    expect(
        [float(x) for x in mixed] != _trained(answer, _MLP, "32-true")[0],
        "With precision='bf16-mixed' your losses do not change by a bit: the model that you call is the bare "
        "one. Use what `setup_module` returns.",
    )


_MISSING = {
    "setup_module": "The losses are right, but the model was not set up: `model = fabric.setup_module(model)`. On "
    "another device or in another precision this would fail.",
    "setup_optimizers": "The losses are right, but the optimizer was not set up: "
    "`fabric.setup_optimizers(optimizer)`. With a loss scaler or sharded state its step would be wrong.",
    "setup_dataloaders": "The losses are right, but the loader was not set up: "
    "`fabric.setup_dataloaders(train_loader)`. Every process would train on the same images.",
    "backward": "The losses are right, but `loss.backward()` goes past Fabric: call `fabric.backward(loss)`. "
    "Without it a loss is not scaled in 16-mixed.",
}


def _trained(answer: Callable, task: _Task, precision: str) -> tuple[list[float], nn.Module, _Watched]:
    fabric = _Watched(precision=precision)
    model, optimizer, batches = task.parts()
    with compat.half_products(), _quiet():
        return answer(fabric, model, optimizer, _loader(batches)), model, fabric


def _why_not_equal(number: int, fabric: _Watched) -> str:
    if number == 1:
        return (
            "The first loss comes from the first batch and the weights as given, in train mode: is `model.train()` "
            "called, and is nothing shuffled or changed before?"
        )
    if "backward" not in fabric.calls:
        return "No gradient was computed: call `fabric.backward(loss)`."
    return (
        "The first step differs: are gradients zeroed before backward, and is the optimizer stepped, in train mode?"
    )


# --- Task 2 ---------------------------------------------------------------------------------------------------------


@check("Task 2, one word of precision", seconds=300)
def mixed_fabric(answer: Callable[[], Fabric]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fabric = answer()
    expect(isinstance(fabric, Fabric), f"Return a Fabric object, not {type(fabric).__name__}.")
    turned = any("AMP with fp16" in str(warning.message) for warning in caught)
    expect(not turned, "You asked for 16-mixed; on a CPU Fabric turns that into bf16-mixed. Ask for what you mean.")
    with compat.half_products(), _quiet():
        before = _kept(Fabric(accelerator=fabric.device.type, devices=1))
        kept = _kept(fabric)
    dtypes, product, size = kept
    expect(
        dtypes == {torch.float32},
        f"The weights are in {_names(dtypes)}: with '-true' they leave fp32, and small updates get lost (unit 9.1). "
        "Here they are to stay in fp32.",
    )
    expect(
        product == torch.bfloat16,
        f"The products run in {count.dtype_name(product)}, and the counter finds {size:,} bytes kept for "
        f"backward where fp32 keeps {before[2]:,}. Which word of `precision` gives bf16 products and fp32 weights?",
    )
    expect(size < before[2], f"The counter finds {size:,} bytes kept for backward, in fp32 {before[2]:,}: not fewer.")


def _kept(fabric: Fabric) -> tuple[set[torch.dtype], torch.dtype, int]:
    """The dtypes of the weights, the dtype of a product, and the bytes kept for backward, under this Fabric."""
    dtypes: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    model[0].register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    wrapped = fabric.setup_module(model)
    inputs = torch.randn(512, 64, device=fabric.device)
    saved = count.saved_bytes(lambda: wrapped(inputs), wrapped)
    return {p.dtype for p in model.parameters()}, dtypes[0], saved.bytes


def _names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(count.dtype_name(dtype) for dtype in dtypes))


# --- Task 3 ---------------------------------------------------------------------------------------------------------

_SGD = {"lr": 0.5}
# sizes of the micro-batches, and how many make a step
_GROUPS = [((8, 8, 8, 8), 2), ((8, 8, 8, 8, 8), 2), ((8, 8, 8, 3), 4), ((6,), 4), ((8, 8, 8), 1)]


@check("Task 3, accumulation", seconds=300)
def accumulate(answer: Callable[..., object]) -> None:
    for sizes, steps in _GROUPS:
        task = _Task("an MLP with SGD", _mlp, torch.optim.SGD, sizes=sizes, options=_SGD)
        got, fabric, batches = _set_up(task)
        with _quiet():
            answer(fabric, got[0], got[1], batches, steps)
        here = f"With micro-batches of {', '.join(map(str, sizes))} images and accumulate_steps={steps}"
        groups = [batches[i : i + steps] for i in range(0, len(batches), steps)]
        expect("backward" in fabric.calls, f"{here}: no gradient was computed with `fabric.backward`.")
        distance = _distance(got[0], task, groups)
        expect(distance < 1e-5, f"{here}, {_why_not_accumulated(got[0], task, batches, steps, distance)}")
        expect(
            fabric.synchronised == len(groups),
            f"{here} the weights are right, but gradients are synchronised in {fabric.synchronised} backward "
            "passes for "
            f"{len(groups)} steps. Only the last micro-batch of a group, also of a short one, needs it: run the "
            "others inside `fabric.no_backward_sync(model, enabled=...)`.",
        )


def _set_up(task: _Task, **options) -> tuple[tuple[nn.Module, torch.optim.Optimizer], _Watched, list[Batch]]:
    fabric = _Watched(**options)
    model, optimizer, batches = task.parts()
    model.register_forward_pre_hook(fabric.note_forward)
    return (fabric.setup_module(model), fabric.setup_optimizers(optimizer)), fabric, batches


def _stepped(task: _Task, groups: Sequence[Sequence[Batch]], weigh: str = "images", max_norm: float | None = None):
    """The weights after one step a group, each micro-batch weighed by its images (right) or in one of the "
    "wrong ways."""
    model, optimizer, _ = task.parts()
    norms = []
    for group in groups:
        optimizer.zero_grad()
        total = sum(len(labels) for _, labels in group)
        for images, labels in group:
            share = {"images": len(labels) / total, "equally": 1 / len(group), "not": 1.0}[weigh]
            (F.cross_entropy(model(images), labels) * share).backward()
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return model, norms


def _gap(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)


def _distance(model: nn.Module, task: _Task, groups: Sequence[Sequence[Batch]]) -> float:
    return _gap(model, _stepped(task, groups)[0])


def _why_not_accumulated(model, task: _Task, batches: list[Batch], steps: int, distance: float) -> str:
    groups = [batches[i : i + steps] for i in range(0, len(batches), steps)]
    first_alone = [batches[:1], *(batches[i : i + steps] for i in range(1, len(batches), steps))]
    whole = [group for group in groups if len(group) == steps]
    short = [[*group, *group[:0]] for group in groups]
    if _gap(model, _stepped(task, groups, "not")[0]) < 1e-5:
        return "your gradients are the sum over the micro-batches, not their mean: scale each loss by its share."
    if _gap(model, _stepped(task, short, "equally")[0]) < 1e-5:
        return (
            "you weigh every micro-batch equally, but the last one has fewer images: a mean of means. Weigh "
            "each loss by its share of the group's images."
        )
    if whole != groups and _gap(model, _stepped(task, whole)[0]) < 1e-5:
        return "the micro-batches at the end, which do not fill a group, make no step. They are to make one too."
    if _gap(model, _stepped(task, first_alone)[0]) < 1e-5:
        return "your first step comes after one micro-batch: `i % accumulate_steps == 0` is true for i = 0 already."
    if _gap(model, _stepped(task, [[batch] for batch in batches])[0]) < 1e-5:
        return "you make a step after every micro-batch: step and zero the gradients once a group."
    if _gap(model, task.parts()[0]) == 0:
        return "the weights have not moved: is `optimizer.step()` called?"
    return (
        f"the weights are {distance:.2g} away from those of steps on whole groups. Is each loss scaled by its "
        "share of the group's images (a short group too), and are the gradients zeroed once a group?"
    )


# --- Task 4 ---------------------------------------------------------------------------------------------------------


@check("Task 4, clipping", seconds=300)
def clipped_step(answer: Callable[..., float]) -> None:
    for sizes, max_norm in (((8, 8), 0.05), ((8, 8, 8), 0.2), ((8,), 100.0)):
        task = _Task("an MLP with SGD", _mlp, torch.optim.SGD, sizes=sizes, options=_SGD)
        here = f"With {len(sizes)} micro-batches and max_norm={max_norm:g}"
        got, fabric, batches = _set_up(task)
        with _quiet():
            norm = answer(fabric, got[0], got[1], batches, max_norm)
        wanted, (right,) = _stepped(task, [batches], max_norm=max_norm)
        unclipped, _ = _stepped(task, [batches])
        expect(norm is not None, f"{here}: return the norm of the gradients before clipping.")
        if _gap(got[0], wanted) > 1e-5:
            raise NotYetError(f"{here}, {_why_not_clipped(got[0], unclipped, right, max_norm)}")
        expect(
            abs(float(norm) - right) <= 1e-4 * right,
            f"{here} you return {float(norm):.4g}; the norm of all gradients before clipping is {right:.4g}. "
            "`fabric.clip_gradients(..., max_norm=...)` returns it. Is the loss the mean over all micro-batches?",
        )
    for right, norm, distance, calls in _scaled(answer):
        expect(
            abs(norm - right) <= 0.05 * right and distance < 1e-3,
            f"In 16-mixed the loss is scaled, and the gradients with it: you find a norm of {norm:.4g}, but it "
            f"is {right:.4g}. "
            + (
                "Is the clipping called after the last backward?"
                if "clip_gradients" in calls
                else "`nn.utils.clip_grad_norm_` does not know the scale; `fabric.clip_gradients` unscales first."
            ),
        )
        expect("clip_gradients" in calls, "Clip with `fabric.clip_gradients`, which also knows sharded gradients.")


def _scaled(answer: Callable[..., float]) -> Iterator[tuple[float, float, float, list[str]]]:
    """One clipped step with a scaled loss: the right norm, the one returned, how far the weights are off, the "
    "calls."""
    task = _Task("an MLP with SGD", _mlp, torch.optim.SGD, sizes=(8, 8), options=_SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    got, fabric, batches = _set_up(task, plugins=MixedPrecision("16-mixed", "cpu", scaler=scaler))
    with compat.half_products(), _quiet():
        norm = float(answer(fabric, got[0], got[1], copy.deepcopy(batches), 0.05))
    wanted, (right,) = _stepped(task, [batches], max_norm=0.05)
    yield right, norm, _gap(got[0], wanted), fabric.calls


def _why_not_clipped(model: nn.Module, unclipped: nn.Module, norm: float, max_norm: float) -> str:
    if norm > max_norm and _gap(model, unclipped) < 1e-5:
        return "the gradients were not clipped before the step. Clip after the last backward and before `step`."
    if norm <= max_norm:
        return "nothing needs clipping, and yet the step differs: is it the mean over all images, made once?"
    return (
        "the weights differ from those of one step, clipped once. All gradients together have the norm "
        f"{norm:.3g}: add up "
        "those of all micro-batches, then clip by norm (`max_norm`, not `clip_val`), then step."
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
