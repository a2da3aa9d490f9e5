"""The checks of exercise 1, mixed precision: number formats, a training step, saved bytes, divergence, scaling."""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from speedlab import compat, count
from speedlab.checks.core import (
    apart,
    ask,
    check,
    choices,
    close,
    diagnose,
    expect,
    fail,
    number,
    sequence,
    where,
    whole,
    without,
)
from speedlab.count import dtype_name

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# setting -> dtype of the weights, dtype of the matrix products, whether the loss is scaled
_SETTINGS = {
    "32-true": (FP32, FP32, False),
    "64-true": (FP64, FP64, False),
    "16-true": (FP16, FP16, False),
    "bf16-mixed": (FP32, BF16, False),
    "16-mixed": (FP32, FP16, True),
}


# --- Task 1 ---------------------------------------------------------------------------------------------------------

_WEIGHTS = (1.0, 3.0, 0.75, 100.0, 0.1, -5.0, 0.3, -0.02, 6.5, 1000.0, 0.0007, -2.0, 48.0, 0.9999, 0.99999999)
# just below a power of two, where a logarithm taken in the format rounds up to it; and far from 1
_EDGES = {FP16: (1023.5, 6e4), BF16: (127.5, 1e-12, 1e15), FP32: (16777215.0, 1e-12, 1e15)}


@check("Task 1, the gap between two numbers")
def gap(answer: Callable[[float, torch.dtype], float]) -> None:
    same = functools.partial(close, relative=1e-6, absolute=0.0)
    for dtype, weight in [(dtype, weight) for dtype, edges in _EDGES.items() for weight in (*_WEIGHTS, *edges)]:
        name, info, shown = dtype_name(dtype), torch.finfo(dtype), f"{weight:.9g}"
        got, wanted = number(ask(answer, weight, dtype), f"The gap at {shown} in {name}"), _gap(weight, dtype)
        if not same(got, wanted):
            unrounded = _above(weight, dtype) - abs(weight)
            below = info.eps * 2.0 ** math.floor(math.log2(abs(weight)))
            hints = {
                "A distance is not negative: take the larger number minus the smaller, and use abs(weight).": got < 0,
                "You step towards zero: take abs(weight).": weight < 0 and same(got, wanted / 2),
                f"{name} stores {shown} as {_stored(weight, dtype):g}: take the power of two below that.": below,
                "`finfo.eps` is the gap from 1 to 2; it doubles at powers of two, and halves below 1.": info.eps,
                "`finfo.tiny` says how close to zero the format reaches, not how fine it is here.": info.tiny,
                "That is half the gap: where updates get lost, or the gap to the next smaller number.": wanted / 2,
                "That is twice the gap: take the power of two below the weight (`math.floor` of a logarithm "
                "in double precision, where it is not rounded up to a whole number).": 2 * wanted,
                "Gaps change only at powers of two: round the weight down to a power of two.": info.eps * abs(weight),
                f"You measure from {shown} itself; measure from the number as {name} stores it.": unrounded,
            }
            why = diagnose(got, hints, "Multiply the power of two below the weight by the gap at 1.", same)
            fail(f"Stored in {name}, {shown} has its next number {wanted:.4g} away; you return {got:.4g}. {why}")


def _gap(weight: float, dtype: torch.dtype) -> float:
    """The distance to the next number, found by counting up the bits rather than by the formula."""
    here = torch.tensor(abs(weight), dtype=dtype)
    above = (here.view(torch.int16 if dtype.itemsize == 2 else torch.int32) + 1).view(dtype)
    return above.item() - here.item()


def _stored(weight: float, dtype: torch.dtype) -> float:
    return torch.tensor(abs(weight), dtype=dtype).item()


def _above(weight: float, dtype: torch.dtype) -> float:
    """The first number of the format above a weight's size, from the weight as Python holds it."""
    stored = _stored(weight, dtype)
    return stored if stored > abs(weight) else stored + _gap(weight, dtype)


# --- Task 2 ---------------------------------------------------------------------------------------------------------


@check("Task 2, what each setting means")
def setting(answer: Callable[[str], tuple[torch.dtype, torch.dtype, bool]]) -> None:
    for precision, (*dtypes, scaled) in _SETTINGS.items():
        *got, scaler = sequence(ask(answer, precision), f"What you return for {precision!r}", length=3)
        kind = precision.split("-")[1]
        for role, found, wanted in zip(("weights", "matrix products"), got, dtypes, strict=True):
            named = f"give the dtype of the {role} as PyTorch names it, such as torch.float32"
            expect(isinstance(found, torch.dtype), f"For {precision!r}, {named}, not {found!r}.")
            here = f"The {role} of {precision!r} are not{' to run' * (role != 'weights')} in {dtype_name(found)}"
            expect(found == wanted, f"{here}. {_DTYPE_REASONS[kind, role]}")
        yes_or_no = f"For {precision!r}, say whether the loss is scaled: True or False, not {scaler!r}."
        expect(type(scaler).__name__ in ("bool", "bool_"), yes_or_no)
        expect(bool(scaler) == scaled, _SCALER_REASONS[precision])


_DTYPE_REASONS = {
    ("mixed", "weights"): "'mixed' keeps them in fp32, so updates smaller than a 16-bit gap are not lost (task 1).",
    ("true", "weights"): "'true' means that everything, the weights too, is in the format that the number names.",
    ("mixed", "matrix products"): "The part before '-mixed' is the format in which autocast runs them; '16' is fp16.",
    ("true", "matrix products"): "'true' means one format for everything.",
}
_SCALER_REASONS = {
    "32-true": "'32-true' needs no scaler: gradients reach down to 1e-38 before they underflow.",
    "64-true": "'64-true' needs no scaler: nothing underflows there.",
    "16-true": "'16-true' has no scaler: GradScaler unscales gradients in place and refuses fp16 ones, "
    "because the unscaled value would underflow after all. Using a scaler requires fp32 weights.",
    "bf16-mixed": "'bf16-mixed' needs no scaler: bf16 has the exponents of fp32, so its gradients do not underflow.",
    "16-mixed": "'16-mixed' needs a scaler: below 6e-8 fp16 has only zero, and many gradients are smaller than that.",
}


# --- Task 3 ---------------------------------------------------------------------------------------------------------

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution")
# operations that the models here do not use, so they belong to the loss
_LOSSES = ("aten::_log_softmax", "aten::nll_loss_forward", "aten::logsumexp", "aten::logaddexp")
_LOSSES += ("aten::exp", "aten::exp_", "aten::log", "aten::log_")
_LOSSES += ("aten::_softmax_backward_data",)  # not the softmax itself: it may be computed just to look at it
_LEARNING_RATE = 0.1
_INITIAL_SCALE = 2.0**10


class _Seen(TorchDispatchMode):
    """What really ran: dtypes of the products and of the loss, and the state of a watched model along the way."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.losses = set(), set()
        self.autocast = self.autocast_in_backward = self.eval = False
        self.steps = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in _PRODUCTS:
            self.products |= {a.dtype for a in args if isinstance(a, torch.Tensor)}
        elif name in _LOSSES:
            self.losses.add(args[0].dtype)
        return func(*args, **(kwargs or {}))

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def forward(module: nn.Module, *_) -> None:
            self.autocast |= torch.is_autocast_enabled("cpu")
            self.eval |= not module.training

        def backward(gradient: torch.Tensor) -> None:
            self.autocast_in_backward |= torch.is_autocast_enabled("cpu")

        def step(*_) -> None:
            self.steps += 1

        for module in model.modules():  # a step may call the layers one by one
            module.register_forward_pre_hook(forward)
        next(model.parameters()).register_hook(backward)
        optimizer.register_step_post_hook(step)


class _MeanOverTokens(nn.Module):
    def forward(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.mean(dim=1)  # (B, T, C) -> (B, C)


@dataclass(frozen=True, eq=False)
class _Case:
    """A model, a batch for it, and the norm to clip to: 0.05 and 2 clip, 100 does not, though a norm is above 2."""

    model: nn.Module
    inputs: torch.Tensor
    labels: torch.Tensor
    max_norm: float

    def parts(self, precision: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
        """A copy of the model in its dtype, and what trains it: SGD, since Adam hides how gradients are scaled."""
        weights, _, scaled = _SETTINGS[precision]
        model = copy.deepcopy(self.model).to(weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
        return model, optimizer, torch.amp.GradScaler("cpu", _INITIAL_SCALE, growth_interval=1, enabled=scaled)

    def change(self, model: nn.Module) -> torch.Tensor:
        """What training did to all weights, as one fp64 vector."""
        before = copy.deepcopy(self.model).to(next(model.parameters()).dtype)
        pairs = zip(model.parameters(), before.parameters(), strict=True)
        return torch.cat([(new.detach().double() - old.detach().double()).flatten() for new, old in pairs])


@functools.cache
def _cases() -> list[_Case]:
    cases = []
    for seed, kind, max_norm in ((0, "images", 100.0), (1, "tokens", 0.05), (2, "images", 2.0)):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 4))
        inputs = torch.randn(16, 12)
        if max_norm > 1:
            model[-1].weight.data *= 4
        if kind == "tokens":
            model, inputs = nn.Sequential(nn.Embedding(20, 12), _MeanOverTokens(), model), torch.randint(20, (16, 6))
        cases.append(_Case(model, inputs, torch.randint(4, (16,)), max_norm))
    return cases


@check("Task 3, one training step in each setting", seconds=120)
def train_step(answer: Callable[..., float]) -> None:
    with compat.half_products():
        for precision, case in itertools.product(_SETTINGS, _cases()):
            with where(precision):
                _examine_steps(answer, precision, case)
        for case in _cases():
            with where("16-mixed"):
                _examine_overflow(answer, case)


def _examine_steps(answer: Callable[..., float], precision: str, case: _Case) -> None:
    weights, products, scaled = _SETTINGS[precision]
    same = functools.partial(close, relative=0.02 if products.itemsize == 2 else 1e-5)
    model, optimizer, scaler = case.parts(precision)
    seen = _Seen()
    seen.watch(model, optimizer)
    with seen:
        losses = [_call_step(answer, model, case, optimizer, precision, scaler) for _ in range(2)]
    references = [_reference(case, precision, variant) for variant in ("", _ALSO_RIGHT)]
    wanted = references[0][0]
    for loss in losses:
        graph = isinstance(loss, torch.Tensor) and loss.requires_grad
        kind = type(loss).__name__ + ", which holds on to its graph" * graph
        expect(isinstance(loss, float), f"return the loss as a Python float (`loss.item()`), not {kind}.")
    first, second = (number(loss, "the loss that you return") for loss in losses)
    expect(first < 100 * wanted[0], "you return the scaled loss. Scale it only on its way into backward().")
    found = {p.dtype for p in model.parameters()}
    cast = f"after your step the weights are {_names(found)}. Leave them in {dtype_name(weights)}"
    expect(found == {weights}, f"{cast}: casting for the products is autocast's job.")
    _examine_dtypes(seen, precision)
    expect(seen.steps <= 2, f"two calls made {seen.steps} optimizer steps. Make one in each.")
    if not any(same(first, right[0]) for right, _ in references):
        hints = {
            "You add up the losses of the batch: take their mean, cross_entropy's default.": lambda: _loss(
                case.parts(precision)[0], case, precision, mean=False
            ).item(),
            "That is the loss of half the batch: use all of it.": _reference(case, precision, "half the batch")[0][0],
            "cross_entropy takes logits: it has the softmax inside.": _reference(case, precision, "softmax")[0][0],
            "That is the loss after the step: keep the one that you called backward() on.": wanted[1],
        }
        said, right = apart(first, wanted[0])
        plain = "It should be the plain cross_entropy(logits, labels) of the whole batch, before the step."
        why = diagnose(first, hints, plain, same)
        fail(f"the first loss is {said}, not {right}. {why}")
    changes = [case.change(right) for _, right in references]
    _examine_update(precision, case, case.change(model), changes, seen.steps, scaler)
    right = any(same(second, losses[1]) for losses, _ in references)
    expect(right, f"the loss of the second step is {second:.4g}, but should be {wanted[1]:.4g}.")
    kept = "the scaler still has its initial scale, which two good steps should have raised"
    unused = "Use the scaler that you are given, and call scaler.update() once, after scaler.step(optimizer)"
    expect(not scaled or scaler.get_scale() > _INITIAL_SCALE, f"{kept}. {unused}.")


def _examine_dtypes(seen: _Seen, precision: str) -> None:
    _, products, _ = _SETTINGS[precision]
    expect(seen.products, "no matrix product ran. Does your step call the model, and backward() on the loss?")
    expect(not seen.eval, "you switch the model to eval(): it would train without dropout.")
    if precision.endswith("mixed"):
        expect(
            seen.autocast,
            f"the model ran without autocast, so its products were in {_names(seen.products)}. Call it inside "
            "`torch.autocast(inputs.device.type, dtype=...)`; the device must be the one that the batch is on.",
        )
        forward = "Each gradient is computed in the dtype that its forward operation used"
        expect(not seen.autocast_in_backward, f"backward() runs under autocast. {forward}: end the block first.")
    else:
        on = seen.autocast or seen.autocast_in_backward
        expect(not on, "autocast is on. In a 'true' setting nothing is cast on the fly: pass `enabled=False`.")
    ran = f"the matrix products ran in {_names(seen.products)}, not in {dtype_name(products)}"
    true = "In a 'true' setting the model stays in the dtype of its weights: convert the inputs, not the model."
    why = "Which dtype do you pass to autocast?" if precision.endswith("mixed") else true
    expect(seen.products == {products}, f"{ran}. {why}")
    expect(
        not precision.endswith("mixed") or seen.losses <= {FP32, FP64},
        f"the loss was computed in {_names(seen.losses)}. Compute it inside the autocast block, with cross_entropy, "
        "which automatically runs in fp32 there (log_softmax on a CPU does not), or convert the logits.",
    )


def _examine_update(
    precision: str,
    case: _Case,
    change: torch.Tensor,
    right: list[torch.Tensor],
    steps: int,
    scaler: torch.amp.GradScaler,
) -> None:
    """Compare what two steps did to the weights with the references; if it differs, look for a well-known cause."""
    same = functools.partial(close, relative=0.02 if _SETTINGS[precision][1].itemsize == 2 else 1e-4)
    if precision == "16-true":  # a different correct order of operations may round one fp16 weight to its neighbour
        same = lambda got, wanted: bool((got - wanted).norm() <= 0.02 * wanted.norm())  # noqa: E731
    once = f"two calls made {steps} steps of the optimizer that is given. Make one in each."
    if steps < 2 and scaler.is_enabled() and scaler.get_scale() <= _INITIAL_SCALE:  # two good steps raise it
        once = "the scaler skipped a step, since the gradients overflowed on a harmless batch: scale the loss once."
    if any(same(change, wanted) for wanted in right):
        return expect(steps == 2, once)
    expect(change.isfinite().all(), "the weights became inf or nan on a harmless batch.")
    wiped = (
        "the optimizer steps without gradients: is zero_grad called after backward(), or do you train another model "
        "instead of the one that you are given?"
    )
    expect(steps == 2 or not steps, once)
    idle = "does the optimizer make its step?" if scaler.get_scale() >= _INITIAL_SCALE else once
    expect(change.any(), f"the weights did not change: {wiped if steps else idle}")
    expect(steps == 2, once)
    redone = {fault: case.change(_reference(case, precision, fault)[1]) for fault in _FAULTS}
    order = "Compare with: forward, zero_grad, backward on the scaled mean, unscale_, clip to max_norm, step, update."
    much = (
        f"two steps changed the weights {(change.norm() / right[0].norm()).item():.3g} times as much as they should"
    )
    fail(diagnose(change, {_FAULTS[fault]: result for fault, result in redone.items()}, f"{much}. {order}", same))


_ALSO_RIGHT = (
    "the loss in fp32"  # where the logits are in 16 bits; the step differs, since their gradient is rounded once less
)
_FAULTS = {
    "not clipped": "the gradients were not clipped to max_norm, which your function is given: call "
    "nn.utils.clip_grad_norm_(model.parameters(), max_norm) between backward() and the step.",
    "clipped to 1": "the gradients were clipped to 1. Clip to max_norm itself, which your function is given.",
    "clipped before unscaling": "you clipped before unscaling, so max_norm was compared with the norm of the scaled "
    "gradients. Call scaler.unscale_(optimizer) first, then clip.",
    "not unscaled": "the step used the scaled gradients: call scaler.unscale_(optimizer) before you clip, then "
    "scaler.step(optimizer), not optimizer.step().",
    "not zeroed": "gradients from the previous step were still there: call optimizer.zero_grad() in every step.",
    "clipped each": "gradients were clipped one parameter at a time: give clip_grad_norm_ all model.parameters().",
    "clipped by value": "each number was clipped. max_norm bounds the total norm: use clip_grad_norm_, not _value_.",
    "stretched": "each gradient came out with norm max_norm. Were shorter ones stretched (clipping only shortens), "
    "or was the loss multiplied by a number that nobody divides out (only scaler.scale may)?",
    "half the batch": "the gradient is that of half the batch: use all of it.",
    "summed": "backward() ran on the sum of the losses: call it on their mean, which you return.",
    "clipped by the largest": "the norm to clip is the Euclidean one, clip_grad_norm_'s default, not the largest "
    "number.",
}


def _examine_overflow(answer: Callable[..., float], case: _Case) -> None:
    """A scale so large that the fp16 gradients overflow: the step must be skipped and the scale halved."""
    model, optimizer, _ = case.parts("16-mixed")
    scaler, steps = torch.amp.GradScaler("cpu", init_scale=2.0**30), []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    _call_step(answer, model, case, optimizer, "16-mixed", scaler)
    skipped = "scaler.step(optimizer) skips such a step; a plain optimizer.step() does not"
    expect(not case.change(model).any(), f"at a scale where gradients overflow, the weights changed: {skipped}.")
    made = "at a scale where gradients overflow, the optimizer made its step. Zeros in place of inf are no gradients"
    expect(not steps, f"{made}, and AdamW would move the weights all the same: {skipped}.")
    halved = (
        f"after gradients that overflowed, the scale should be 2^29, half of what it was, not {scaler.get_scale():g}"
    )
    expect(scaler.get_scale() == 2.0**29, f"{halved}. Call scaler.update() once in each step.")


def _call_step(answer: Callable, model, case: _Case, optimizer, precision: str, scaler) -> object:
    batch = case.inputs.clone(), case.labels.clone()
    try:
        return answer(model, batch, optimizer, precision, scaler, case.max_norm)
    except (RuntimeError, ValueError, AssertionError) as error:
        said = str(error).splitlines()[0] if str(error) else ""
        hint = next((hint for sign, hint in _ERRORS.items() if sign in str(error)), None)
        expect(hint is None, f"{hint} (PyTorch says: {said})")
        raise


# what PyTorch's message contains, the most telling first -> what it means here
_ERRORS = {
    "indices": "tokens are integers that look up rows of an embedding. Convert floating-point inputs only.",
    "log_softmax": "cross_entropy takes the logits first, then the labels.",
    "mat1 and mat2 must have the same dtype": "the inputs are not in the dtype of the weights: "
    "convert floating-point inputs to it, and no others.",
    "Long": "the labels are class numbers: leave them integers.",
    "dtype": "the inputs are not in the dtype of the weights. In a 'true' setting, convert them.",
    "scalar type": "the inputs are not in the dtype of the weights: convert them.",
    "unscale FP16": "GradScaler refuses fp16 gradients: scale the loss only where the weights are fp32.",
    "unscale_() has already": "unscale_() was called twice, or scaler.update() is missing at the end of the step.",
    "after step()": "scaler.update() comes once, as the last of the scaler's calls, after scaler.step(optimizer).",
    "_scale is None": "the loss was not scaled: call scaler.scale(loss).backward().",
    "since the last update": "scaler.update() is missing at the end of the step.",
    "No inf checks": "the scaler has seen no gradients since its last update(). Call update() once, after the step.",
}


def _loss(
    model: nn.Module,
    case: _Case,
    precision: str,
    rows: slice = slice(None),
    mean: bool = True,
    precise: bool = False,
    softmax: bool = False,
) -> torch.Tensor:
    weights, products, _ = _SETTINGS[precision]
    inputs = case.inputs[rows].to(weights) if case.inputs.is_floating_point() else case.inputs[rows]
    with torch.autocast("cpu", dtype=products, enabled=precision.endswith("mixed")):
        logits = model(inputs)
        logits = logits.float() if precise and logits.dtype.itemsize == 2 else logits
        logits = logits.softmax(-1) if softmax else logits
        return F.cross_entropy(logits, case.labels[rows], reduction="mean" if mean else "sum")


@functools.cache
def _reference(case: _Case, precision: str, fault: str = "") -> tuple[list[float], nn.Module]:
    """Two right steps, or two with a well-known fault or variant: their losses, and the model after them."""
    model, optimizer, scaler = case.parts(precision)
    losses = []
    for _ in range(2):
        rows = slice(8) if fault == "half the batch" else slice(None)
        loss = _loss(model, case, precision, rows, precise=fault == _ALSO_RIGHT, softmax=fault == "softmax")
        if fault != "not zeroed":
            optimizer.zero_grad()
        scaler.scale(loss * (len(case.labels) if fault == "summed" else 1)).backward()
        if fault not in ("clipped before unscaling", "not unscaled"):
            scaler.unscale_(optimizer)
        if fault == "clipped each":
            for parameter in model.parameters():
                nn.utils.clip_grad_norm_(parameter, case.max_norm)
        elif fault == "clipped by value":
            nn.utils.clip_grad_value_(model.parameters(), case.max_norm)
        elif fault == "stretched":
            length = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            for parameter in model.parameters():
                parameter.grad *= case.max_norm / length
        elif fault != "not clipped":
            kind = math.inf if fault == "clipped by the largest" else 2.0
            nn.utils.clip_grad_norm_(model.parameters(), 1.0 if fault == "clipped to 1" else case.max_norm, kind)
        if fault == "not unscaled":
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    return losses, model


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(map(dtype_name, dtypes)))


# --- Tasks 4 and 5 --------------------------------------------------------------------------------------------------


def mlp_block(width: int) -> nn.Sequential:
    """The MLP block of a transformer, four times as wide inside: LayerNorm, Linear, GELU, Linear."""
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


@functools.cache
def _counted(precision: str, tokens: int, width: int) -> int:
    weights, products, _ = _SETTINGS[precision]
    block, x = mlp_block(width).to(weights), torch.ones(tokens, width, dtype=weights)
    with torch.autocast("cpu", dtype=products, enabled=precision.endswith("mixed")):
        return count.saved_bytes(lambda: block(x), block).bytes


@check("Task 4, saved bytes against the counter")
def saved_bytes(answer: Callable[[str, int, int], float]) -> None:
    shapes = ((96, 32), (512, 32), (16, 64), (100, 48))
    for precision, (tokens, width) in itertools.product(_SETTINGS, shapes):
        with where(f"{precision}, {tokens} tokens of width {width}"), compat.half_products():
            with without("you run matrix products. Predict the bytes by arithmetic alone.", "mm"):
                got = number(ask(answer, precision, tokens, width), "your prediction")
            counted, elements = _counted(precision, tokens, width), tokens * width
            # two numbers per token, in the LayerNorm's own format, may be left out
            if abs(got - counted) > 16 * tokens:
                why = diagnose(
                    got,
                    _byte_faults(got, precision, tokens, width, counted),
                    f"That is {(counted - got) / elements:+.2f} bytes per element off. List the tensors one by one.",
                    same=lambda a, b, tokens=tokens: abs(a - b) <= 16 * tokens,
                )
                fail(f"you predict {got:,.0f} bytes, the counter finds {counted:,}. {why}")


def _byte_faults(got: float, precision: str, tokens: int, width: int, n: int) -> dict[str, float | bool]:
    """What predictions with well-known faults come to, keyed by hint; the right answer is `n` bytes."""
    weights, products, _ = _SETTINGS[precision]
    e, s, w = tokens * width, products.itemsize, 4 * width * width
    faults = {"You return the bytes for one element; the task asks for all elements.": close(got, n / e, 0.05)}
    if precision.endswith("mixed"):
        faults |= {
            "Two bytes per element are missing: LayerNorm runs in fp32 here, on an fp32 input.": n - 2 * e,
            "Two weight matrices in 16 bits are missing: autocast keeps the cast copies it makes.": n - 2 * w * s,
            "One weight matrix in 16 bits is missing. There are two Linear layers.": n - w * s,
            "Two things are missing: LayerNorm's input in fp32, and the cast copies.": n - 2 * e - 2 * w * s,
            "The copies of the weights that autocast makes are in 16 bits, not in 32.": n + 2 * w * s,
            "Two bytes per element too many: autocast casts LayerNorm's result, and the first Linear keeps that "
            "copy; nobody needs the result of the last layer.": n + 2 * e,
            "Eight bytes per element too many: GELU takes what the Linear gives it, in 16 bits; each is kept once.": n
            + 8 * e,
            "28 bytes per element is right for 512 tokens of width 192: count the cast copies apart.": 28 * e,
        }
    return faults | {
        "You counted the weights; they are there anyway, and take no new memory.": n + 2 * w * weights.itemsize,
        "One tensor too many, four times as wide. Each is kept once.": n + 4 * e * s,
        "One tensor too many: nobody needs the result of the last layer for backward.": n + e * s,
        "One tensor, four times as wide, is missing: GELU and the second Linear each keep one.": n - 4 * e * s,
        "One tensor of the block's width is missing: LayerNorm and the first Linear each keep one.": n - e * s,
    }


@check("Task 5, where autocast breaks even")
def break_even(answer: Callable[[int], int]) -> None:
    with compat.half_products():
        for width in (36, 32, 64, 100, 27, 50, 81, 16):
            tokens = whole(ask(answer, width), f"The number of tokens at width {width}", least=1, most=20 * width)
            (fp32, mixed), (fp32_before, mixed_before) = (
                [_counted(precision, n, width) for precision in ("32-true", "bf16-mixed")]
                for n in (tokens, max(1, tokens - 1))
            )
            at = f"At width {width} and {tokens} tokens"
            expect(
                mixed < fp32,
                f"{at}, the counter finds {mixed:,} bytes with bf16-mixed and {fp32:,} with 32-true: not fewer. "
                "What grows with the number of tokens, what does not, and do you look for fewer bytes or as many?",
            )
            expect(
                mixed_before >= fp32_before or tokens == 1,
                f"{at}, bf16-mixed does keep fewer bytes, but it already does so with one token less "
                f"({mixed_before:,} against {fp32_before:,}). Find the smallest number.",
            )
    # too large to count here; the formula agrees with the counter at every width above
    tokens, wanted = whole(ask(answer, 1000), "The number of tokens at width 1000"), 8 * 1000 // 9 + 1
    expect(tokens == wanted, f"At width 1000 the smallest number of tokens is {wanted}, not {tokens:,}.")


# --- Task 6 ---------------------------------------------------------------------------------------------------------

STAGES = ("logits", "loss", "gradients", "weights")
_Parts = tuple[nn.Module, Callable, torch.optim.Optimizer, torch.Tensor, torch.Tensor]


def _linear(weight: float, dtype: torch.dtype = FP16, bias: float = 0.0) -> nn.Linear:
    layer = nn.Linear(1, 1, dtype=dtype)
    with torch.no_grad():
        layer.weight.fill_(weight)
        layer.bias.fill_(bias)
    return layer


def _breakdowns() -> Iterator[tuple[str, str | None, _Parts]]:
    """Steps that break at a known stage (None: they do not): a story, the stage, and what the answer is given."""

    def column(*values: float, dtype: torch.dtype = FP16) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).unsqueeze(1)

    def parts(model, inputs, targets, optimizer="SGD", lr=0.01, loss_fn=None) -> _Parts:
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, loss_fn or nn.MSELoss(), getattr(torch.optim, optimizer)(trained, lr=lr), inputs, targets

    def with_old(gradient: float, made: _Parts) -> _Parts:
        for parameter in made[0].parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        return made

    def steep(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (60000 * (logits - targets)).sum()

    def undefined(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (-1 - (logits - targets).abs()).log().sum()

    wide = nn.Linear(2, 1, dtype=FP16)
    nn.init.constant_(wide.weight, 0.1), nn.init.zeros_(wide.bias)
    even, uneven = torch.tensor([[0.8, 0.8]], dtype=FP16), torch.tensor([[0.8, 2.0]], dtype=FP16)
    two, three = column(1, 2, dtype=FP32), column(1, 2, 3, dtype=FP32)
    middle, ones = column(1, math.nan, 3, dtype=FP32), column(1, 1, 1, 1)
    yield "a healthy step in fp32", None, parts(_linear(0.5, FP32), two, two)
    yield "products past 65504 in fp16", "logits", parts(_linear(100.0), column(1, 2000), column(1, 1))
    yield "one input in the middle that is nan", "logits", parts(_linear(0.5, FP32), middle, three)
    yield "products far below zero in fp16", "logits", parts(_linear(-100.0), column(-1, 2000), column(1, 1))
    yield "a logarithm of a negative number", "loss", parts(_linear(0.5), column(1, 2), ones[:2], loss_fn=undefined)
    yield "squares past 65504 in fp16", "loss", parts(_linear(100.0), column(1, 5), column(0, 0))
    yield "gradients past 65504 in fp16", "gradients", parts(_linear(0.1), column(1000), column(0))
    deep, frozen = nn.Sequential(_linear(0.1), _linear(1.0)), nn.Sequential(_linear(1.0), _linear(0.5))
    deep[1].requires_grad_(False)
    frozen[0].requires_grad_(False)
    yield "gradients past 65504 with a frozen layer", "gradients", parts(deep, column(1000), column(0))
    steady = parts(_linear(0.1), column(0.8), column(0), lr=1e-6, loss_fn=steep)
    yield "gradients whose norm alone is past 65504", None, steady
    steeply = parts(_linear(0.1), column(0.1, 0.1), column(0, 0), lr=1e-4, loss_fn=steep)
    yield "one gradient past 65504, that of a bias", "gradients", steeply
    halves = parts(copy.deepcopy(wide), even, column(0), lr=1e-6, loss_fn=steep)
    yield "one tensor of finite gradients whose norm is past 65504", None, halves
    second = parts(wide, uneven, column(0), lr=1e-6, loss_fn=steep)
    yield "a tensor whose second gradient is past 65504", "gradients", second
    yield "Adam in fp16 and gradients of zero", "weights", parts(_linear(0.5), column(1), column(0.5), "Adam")
    yield "Adam in fp16 and tiny gradients", "weights", parts(_linear(0.5), column(1), column(0.4995), "Adam")
    yield "Adam in fp16 with a frozen layer", "weights", parts(frozen, column(1), column(0.4995), "Adam")
    bias = parts(_linear(0.001, bias=0.001), column(1000), column(1), "Adam")
    yield "Adam in fp16, where only the bias breaks", "weights", bias
    yield "a step far too long", "weights", parts(_linear(10.0), column(10), column(0), lr=100.0)
    yield "a healthy step in fp16", None, parts(_linear(0.5), column(1, 2), column(1, 1))
    yield "large logits, and a loss of zero", None, parts(_linear(30000.0), ones, 30000 * ones)
    yield "a healthy step after one that overflowed", None, with_old(math.inf, parts(_linear(0.5), ones, ones))
    yield "a healthy step after another", None, with_old(8.0, parts(_linear(0.5, FP32), two, two))


@check("Task 6, what breaks first")
def first_broken(answer: Callable[..., str | None]) -> None:
    for story, stage, (model, loss_fn, optimizer, *batch) in _breakdowns():
        wanted, steps = copy.deepcopy((model, loss_fn, optimizer)), []
        optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        with where(f"In the case of {story}"):
            got = answer(model, loss_fn, optimizer, *(tensor.clone() for tensor in batch))
            valid = got is None or (isinstance(got, str) and got in STAGES)
            expect(valid, f"return one of {', '.join(map(repr, STAGES))} or None, not {got!r}.")
            said = "that nothing breaks" if got is None else f"{got!r}"
            right = "nothing breaks" if stage is None else f"{stage!r} broke first"
            if got != stage:
                fail(f"{right}, but you say {said}. {_why_not_first(got, stage, story)}")
            expect(len(steps) <= 1, f"your function makes {len(steps)} steps. Make one.")
            if stage in (None, "weights"):
                expect(
                    steps,
                    "your function makes no step of the optimizer that it is given: call optimizer.step() once.",
                )
                pairs = zip(model.parameters(), _stepped(*wanted, *batch), strict=True)
                same = all(torch.equal(p.nan_to_num(), q.nan_to_num()) for p, q in pairs)
                expect(same, "the weights are not those after one ordinary step. Were old gradients zeroed?")


def _stepped(model: nn.Module, loss_fn: Callable, optimizer, inputs, targets) -> list[torch.Tensor]:
    optimizer.zero_grad()
    loss_fn(model(inputs), targets).backward()
    optimizer.step()
    return list(model.parameters())


def _why_not_first(got: str | None, wanted: str | None, story: str) -> str:
    if wanted is None:
        if "after" in story:
            return "Gradients of an earlier step are still there: call zero_grad() before backward()."
        return "A finite number is not broken, however large; check each element, not a sum of them."
    if got is None and wanted == "weights":
        return "Call optimizer.step(), then look at all weights, biases too, for inf, -inf and nan."
    own = "in the model's own dtype, without autocast"
    if got is None:
        return f"inf and -inf are broken as well as nan: torch.isfinite() is False for each. Look at all, {own}."
    if STAGES.index(got) > STAGES.index(wanted):
        return (
            f"What breaks first spoils the rest: look at all elements, for -inf too, {own}, in the order of the step."
        )
    return "Look at the result of each stage by itself."


# --- Task 7 ---------------------------------------------------------------------------------------------------------


def first_adam_step(gradients: torch.Tensor, eps: float, beta2: float = 0.999) -> torch.Tensor:
    """By how many learning rates Adam's first step moves weights that start at zero."""
    weights = nn.Parameter(torch.zeros_like(gradients))
    weights.grad = gradients.clone()
    # plain operations one by one: the default on every device, except that it groups them; `fused` rounds less
    torch.optim.Adam([weights], lr=2**-10, eps=eps, betas=(0.9, beta2), foreach=False, fused=False).step()
    return weights.detach().float() * 2**10


def _gradients(seed: int, dtype: torch.dtype, beta2: float) -> torch.Tensor:
    """Gradients of both signs and all sizes, some zero; none at the edge of underflow, where rounding decides."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (-7 + 6.5 * torch.rand(400, generator=generator, dtype=FP64))
    edge = math.sqrt(2.0**-25 / (1 - beta2))
    sizes[(sizes / edge - 1).abs() < 0.1] = 1e-2
    sizes[::40] = 0
    signs = torch.randint(2, (400,), generator=generator) * 2 - 1
    return (sizes * signs).to(dtype)


# with an eps that the dtype rounds to zero (1e-8 and 2e-8 in fp16, the last two) or up (4e-8 in fp16)
_ADAM_CASES = (
    *((FP32, 1e-8, 0.999), (FP16, 1e-8, 0.999), (FP16, 1e-8, 0.95), (FP16, 1e-4, 0.999), (BF16, 1e-8, 0.999)),
    *((FP16, 2e-8, 0.99), (FP16, 4e-8, 0.999), (FP16, 1e-7, 0.95), (BF16, 1e-42, 0.999), (FP32, 1e-46, 0.99)),
)


@check("Task 7, why Adam divides by zero")
def weights_lost(answer: Callable[[torch.Tensor, float, float], int]) -> None:
    for seed, (dtype, eps, beta2) in enumerate(_ADAM_CASES):
        gradients = _gradients(seed, dtype, beta2)
        with without("You run an optimizer. Predict without one.", "addcdiv_", "fused_adam"):
            got = number(ask(answer, gradients, eps, beta2), "The number of weights lost")
        counted = int((~first_adam_step(gradients, eps, beta2).isfinite()).sum())
        if got != counted:
            here = f"400 gradients in {dtype_name(dtype)}, eps={eps:g}, beta2={beta2:g}"
            why = _why_not_lost(got, gradients, eps, beta2)
            fail(f"{here}: Adam loses {counted} weights, but you predict {got:g}. {why}")


def _why_not_lost(got: float, gradients: torch.Tensor, eps: float, beta2: float) -> str:
    dtype, squares, zeros = gradients.dtype, gradients.double() ** 2, gradients == 0
    stored = ((1 - beta2) * squares).to(dtype) == 0
    usual = int((~first_adam_step(gradients, eps).isfinite()).sum())
    hints = {"Where v is zero, eps saves the weight, if the format can hold that eps.": int(stored.sum())}
    if torch.tensor(eps, dtype=dtype) == 0:
        hints = {
            "In this format eps itself rounds to zero: convert it to the dtype of the gradients.": 0,
            "v is not g² but (1 - beta2) times that, which underflows sooner.": int((squares.to(dtype) == 0).sum()),
            "A gradient of exactly zero counts too: 0 / 0 is nan.": int((stored & ~zeros).sum()),
            "Not only zero gradients count: v is (1 - beta2) g², and rounds to zero far sooner.": int(zeros.sum()),
        }
    move = gradients / (((1 - beta2) * squares).to(dtype).sqrt() + torch.tensor(eps, dtype=dtype))
    hints["A long move is finite too: count only the divisions by zero."] = int((~move.isfinite()).sum())
    hints["That is the number for a beta2 of 0.999: use the beta2 that you are given."] = usual
    rounding = (
        "Round as the optimizer's state does: v = (1 - beta2) * g² and eps, each in the dtype of the gradients."
    )
    return diagnose(got, hints, otherwise=rounding, same=lambda a, b: a == b)


# the longest first step, in learning rates, that the task allows
LONGEST = 10.0


@check("Task 7, an eps that fp16 can use")
def safe_eps(answer: Callable[[], float]) -> None:
    eps = number(ask(answer), "eps")
    expect(eps > 0, f"eps must be positive, not {eps:g}.")
    cliff = torch.full((400,), 5.45e-3, dtype=FP16)  # nearly the largest gradients whose v is lost in fp16
    for gradients in (*(_gradients(seed, FP16, beta2=0.999) for seed in range(3)), cliff):
        moved = first_adam_step(gradients, eps).abs()
        lost, least_held = int((~moved.isfinite()).sum()), f"The smallest number that fp16 holds is {2.0**-24:.1e}."
        expect(not lost, f"With eps={eps:g}, {lost} of 400 weights are lost: fp16 rounds eps to zero. {least_held}")
        runaway, furthest = int((moved > LONGEST).sum()), apart(moved.max().item(), LONGEST)[0]
        far = f"{runaway} of 400 weights move by more than {LONGEST:g} learning rates, the furthest by {furthest}"
        expect(not runaway, f"With eps={eps:g}, {far}. Where v is zero, the move is lr * g / eps: how large is g?")
    least = first_adam_step(torch.full((8,), 0.01, dtype=FP16), eps).abs().min().item()
    slow = f"With eps={eps:g}, a weight with a gradient of 0.01 moves by only {least:.2g} learning rates"
    expect(least >= 0.5, f"{slow}, not by about one. Take the smallest eps that prevents the long steps.")


# --- Task 8 ---------------------------------------------------------------------------------------------------------


def _gradient_sets() -> Iterator[tuple[str, list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)

    def between(low: float, high: float, *shape: int) -> torch.Tensor:
        sizes = torch.rand(*shape, generator=generator) * (high - low) + low
        values = 10.0**sizes * (torch.randint(2, shape, generator=generator) * 2 - 1)
        values.view(-1)[0], values.view(-1)[-1] = 10.0**low, -(10.0**high)
        return values

    sparse = between(-9, -5, 6, 5)
    sparse[1::2] = 0
    yield "small gradients in two tensors", [between(-6, -3, 8), between(-10, -7, 4, 4)]
    yield "small gradients with many exact zeros", [sparse, torch.zeros(3)]
    yield "gradients that fit as they are", [between(-4, 3, 20)]
    yield "gradients that are too large", [between(0, 3, 6), between(2, 7, 9)]
    yield "gradients that only just fit", [torch.tensor([1e-7, -3e4]), torch.tensor([0.0, 2.0])]
    yield "gradients of which the whole range is needed", [torch.tensor([4e4]), torch.tensor([[2.0**-24], [-1.0]])]
    yield "gradients of which the smallest rounds up", [torch.tensor([-4e4, 1.5 * 2.0**-25])]
    yield "gradients that fit below 65504, not below 65536", [torch.tensor([-65530.0, 1e-3])]
    yield "a gradient that rounds down to 65504", [torch.tensor([65510.0]), torch.tensor([1.5 * 2.0**-25])]
    yield "tiny gradients", [between(-24, -21, 5), between(-22, -20, 2, 2)]
    yield "huge gradients", [between(12, 14, 7)]
    yield "the tiniest gradients", [between(-29.9, -27, 5)]
    yield "gradients far beyond fp16", [between(31, 34, 5)]
    yield "gradients that spread too far", [between(-9, 0, 9), between(0, 5, 9)]
    yield "gradients that spread too far, in one tensor", [torch.tensor([0.0, -2e-8, 3e6])]
    yield "gradients that are all zero", [torch.zeros(4), torch.zeros(2, 2)]


def _damage(gradients: list[torch.Tensor], scale: float) -> tuple[int, int]:
    """How many nonzero gradients become zero in fp16 when scaled, and how many overflow."""
    lost = overflowed = 0
    for g in gradients:
        stored = (g.double() * scale).float().to(FP16)
        lost += int(((stored == 0) & (g != 0)).sum())
        overflowed += int((~stored.isfinite()).sum())
    return lost, overflowed


@check("Task 8, a scale with which every gradient survives")
def choose_scale(answer: Callable[[list[torch.Tensor]], float | None]) -> None:
    for story, gradients in _gradient_sets():
        possible = [k for k in range(-126, 128) if _damage(gradients, 2.0**k) == (0, 0)]
        got, rule = (
            ask(answer, gradients),
            "fp16 rounds to the nearest: a number above 2^-25 becomes 2^-24 at least; one below 65520, 65504 at most",
        )
        with where(f"For {story}"):
            empty = not any(gradient.any() for gradient in gradients)
            any_will = "all gradients are zero, so any power of two will do: return 1.0, for instance."
            expect(not empty or not (got is None or got == 0), any_will)
            if got is None:
                expect(
                    not possible,
                    f"you return None, but 2^{possible[:1] and possible[0]} would do. {rule}. "
                    "2^-24 is far below finfo.tiny. Leave zeros out; a scale may be below 1.",
                )
                continue
            scale = number(got, "the scale (leave zeros out)")
            expect(possible, "no scale will do: the largest overflow before the smallest survive. So return None.")
            exponent = f" Is it the exponent? Return 2.0 ** {scale:g}." * (scale in possible)
            alone = f"Only a power of two changes the exponent and leaves the digits alone.{exponent}"
            expect(
                scale > 0 or exponent, f"you return {scale:g}, which is no scale.{' Leave zeros out.' * (scale == 0)}"
            )
            expect(abs(math.frexp(scale)[0]) == 0.5 and scale > 0, f"{scale:g} is not a power of two. {alone}")
            lost, overflowed = _damage(gradients, scale)
            name = f"with a scale of 2^{math.log2(scale):g}, {overflowed} overflow and {lost} become zero"
            sets = "without its sign and over all tensors, sets the limit: scaled, it must"
            expect(not overflowed, f"{name}. The largest one, {sets} stay below 65520, where inf begins.{exponent}")
            expect(not lost, f"{name}. The smallest one that is not zero, {sets} be above 2^-25. {rule}.{exponent}")


# --- Task 9 ---------------------------------------------------------------------------------------------------------

machines = choices(
    "Task 9, a setting for each machine",
    {"V100": "16-mixed", "H100": "bf16-mixed", "laptop": "32-true", "server": "bf16-mixed"},
    tuple(_SETTINGS),
    {
        "64-true": "It takes twice the bytes of fp32, is faster on none of these machines, and nobody here needs it.",
        "16-true": "It is the setting that diverged: it loses small updates, and its optimizer divides by zero.",
        ("V100", "bf16-mixed"): "The V100 has no hardware for bf16: PyTorch emulates it, more slowly than fp32. "
        "(torch.cuda.is_bf16_supported() answers True there because it counts emulation.)",
        ("V100", "32-true"): "Its tensor cores would stand idle: they multiply fp16 only.",
        ("H100", "16-mixed"): "Here bf16 is as fast, without loss scaling, scaler checkpoints or skipped steps.",
        ("H100", "32-true"): "Its tensor cores would stand idle: strict fp32 does not use them.",
        ("laptop", "bf16-mixed"): "AVX2 has no 16-bit products: they are emulated, many times more slowly than "
        "fp32. The saved bytes would shrink, but you would wait for them.",
        ("laptop", "16-mixed"): "AVX2 has no 16-bit products: emulation is many times slower than fp32.",
        ("server", "16-mixed"): "This AMX multiplies bf16 and int8, not fp16; and fp16 would need loss scaling.",
        ("server", "32-true"): "AMX would stand idle: it does not multiply fp32.",
    },
)
