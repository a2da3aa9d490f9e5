"""The checks of exercise 1, mixed precision: number formats, a training step, saved bytes, divergence, scaling."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from speedlab import count, machine
from speedlab.checks import NotYetError, check, expect
from speedlab.count import dtype_name

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# setting -> dtype of the weights, dtype of the matrix products, whether the loss is scaled
SETTINGS = {
    "32-true": (FP32, FP32, False),
    "64-true": (FP64, FP64, False),
    "16-true": (FP16, FP16, False),
    "bf16-mixed": (FP32, BF16, False),
    "16-mixed": (FP32, FP16, True),
}


def _as_number(value: object, what: str) -> float:
    expect(value is not None, f"{what} came back as None. Does your function return its result?")
    expect(
        isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1),
        f"{what} must be a number, not {type(value).__name__}.",
    )
    return float(value)


# --- Task 1 ---------------------------------------------------------------------------------------------------------


@check("Task 1, the gap between two numbers")
def gap(answer: Callable[[float, torch.dtype], float]) -> None:
    for dtype, weight in itertools.product((FP16, BF16, FP32), (1.0, 3.0, 0.75, 100.0, 0.1, -5.0)):
        got = _as_number(answer(weight, dtype), f"The gap at {weight:g} in {dtype_name(dtype)}")
        wanted = _gap(weight, dtype)
        if not math.isclose(got, wanted, rel_tol=1e-6):
            raise NotYetError(
                f"At {weight:g} in {dtype_name(dtype)} the next number is {wanted:.4g} away; you return {got:.4g}. "
                + _why_not_the_gap(got, wanted, weight, dtype)
            )


def _gap(weight: float, dtype: torch.dtype) -> float:
    """The distance to the next number, found by counting up the bits rather than by the formula."""
    here = torch.tensor(abs(weight), dtype=dtype)
    above = (here.view(torch.int16 if dtype.itemsize == 2 else torch.int32) + 1).view(dtype)
    return above.item() - here.item()


def _why_not_the_gap(got: float, wanted: float, weight: float, dtype: torch.dtype) -> str:
    info = torch.finfo(dtype)
    if got < 0:
        return "A distance is not negative: work with abs(weight)."
    if got == info.eps:
        return "`finfo.eps` is the gap from 1 up to 2 only; it doubles at every power of two, and halves below 1."
    if got in (info.tiny, info.smallest_normal):
        return "`finfo.tiny` says how close to zero the format reaches, not how finely it is spaced at this weight."
    if math.isclose(got, wanted / 2, rel_tol=1e-6):
        return "That is half of it: half the gap is where an update gets lost; the task asks for the gap."
    if math.isclose(got, wanted * 2, rel_tol=1e-6):
        return "That is twice the gap: go down to the power of two below the weight, not up (`math.floor`)."
    if math.isclose(got, info.eps * abs(weight), rel_tol=1e-6):
        return "The gap stays the same between two powers of two: round the weight down to one before you multiply."
    return "Find the power of two below the weight, and multiply it by the gap at 1."


# --- Task 2 ---------------------------------------------------------------------------------------------------------


@check("Task 2, what each setting means")
def setting(answer: Callable[[str], tuple[torch.dtype, torch.dtype, bool]]) -> None:
    for precision, (weights, products, scaled) in SETTINGS.items():
        got = answer(precision)
        expect(
            isinstance(got, tuple) and len(got) == 3,
            f"For {precision!r}, return three things: dtype of the weights, dtype of the products, scaler or not.",
        )
        mixed = precision.endswith("mixed")
        expect(
            got[0] == weights,
            f"The weights of {precision!r} are not {_name(got[0])}. "
            + (
                "'mixed' keeps them in fp32, so that an update smaller than a 16-bit gap is not lost (task 1)."
                if mixed
                else "'true' means that everything, the weights too, is in the format that the number names."
            ),
        )
        expect(
            got[1] == products,
            f"The matrix products of {precision!r} do not run in {_name(got[1])}. "
            + (
                "What comes before '-mixed' names the format that autocast gives to them; '16' stands for fp16."
                if mixed
                else "'true' means one format for everything."
            ),
        )
        expect(bool(got[2]) == scaled, _SCALER_REASONS[precision])


_SCALER_REASONS = {
    "32-true": "'32-true' needs no scaler: gradients reach down to 1e-38 before they underflow.",
    "64-true": "'64-true' needs no scaler: nothing underflows there.",
    "16-true": "'16-true' has no scaler: GradScaler unscales gradients in place and refuses fp16 ones, "
    "because the unscaled value would underflow after all. It takes fp32 weights to use one.",
    "bf16-mixed": "'bf16-mixed' needs no scaler: bf16 has the exponents of fp32, so its gradients do not underflow.",
    "16-mixed": "'16-mixed' needs a scaler: below 6e-8 fp16 has only zero, and many gradients are smaller.",
}


def _name(value: object) -> str:
    return dtype_name(value) if isinstance(value, torch.dtype) else repr(value)


# --- Task 3 ---------------------------------------------------------------------------------------------------------

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution")
_LEARNING_RATE = 0.1
_INITIAL_SCALE = 2.0**10


class _Seen(TorchDispatchMode):
    """What really ran: dtypes of the matrix products and of the loss, and whether autocast was on in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.products: set[torch.dtype] = set()
        self.losses: set[torch.dtype] = set()
        self.autocast = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in _PRODUCTS:
            self.products |= {a.dtype for a in args if isinstance(a, torch.Tensor)}
        elif name == "aten::_log_softmax":
            self.losses.add(args[0].dtype)
        return func(*args, **(kwargs or {}))

    def look(self, *_) -> None:
        self.autocast = self.autocast or torch.is_autocast_enabled("cpu")


class _MeanOverTokens(nn.Module):
    def forward(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.mean(dim=1)  # (B, T, C) -> (B, C)


@dataclass(frozen=True)
class _Case:
    """A model, a batch for it, and the norm to clip to: 0.05 clips every step, 100 none."""

    model: nn.Module
    inputs: torch.Tensor
    labels: torch.Tensor
    max_norm: float

    @property
    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs, self.labels


def _cases() -> Iterator[_Case]:
    for seed, kind, max_norm in ((0, "images", 100.0), (1, "tokens", 0.05), (2, "images", 0.05)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 4))
            if kind == "images":
                model, inputs = head, torch.randn(16, 12)
            else:
                model = nn.Sequential(nn.Embedding(20, 12), _MeanOverTokens(), head)
                inputs = torch.randint(20, (16, 6))
            labels = torch.randint(4, (16,))
        yield _Case(model, inputs, labels, max_norm)


@check("Task 3, one training step in each setting")
def train_step(answer: Callable[..., float]) -> None:
    with machine.half_products():
        for precision, case in itertools.product(SETTINGS, _cases()):
            _examine_steps(answer, precision, case)
        for case in _cases():
            _examine_overflow(answer, case)


def _examine_steps(answer: Callable[..., float], precision: str, case: _Case) -> None:
    weights, products, scaled = SETTINGS[precision]
    mixed = precision.endswith("mixed")
    model, optimizer, scaler = _prepare(case, precision)
    seen = _Seen()
    model.register_forward_pre_hook(seen.look)
    with seen:
        losses = [_call_step(answer, model, case, optimizer, precision, scaler) for _ in range(2)]
    wanted_losses, wanted_model = _reference(case, precision)

    for loss in losses:
        expect(
            isinstance(loss, float),
            f"{precision}: return the loss as a Python float (`loss.item()`), not {type(loss).__name__}."
            + " A tensor would hold on to its graph." * isinstance(loss, torch.Tensor),
        )
    expect(
        not scaled or losses[0] < 100 * wanted_losses[0],
        f"{precision}: you return the scaled loss. Scale it only on its way into backward().",
    )
    found = {p.dtype for p in model.parameters()}
    expect(
        found == {weights},
        f"{precision}: after your step the weights are {_names(found)}. The step must leave them as they came, "
        f"in {dtype_name(weights)}: casting for the products is autocast's work.",
    )
    expect(
        bool(seen.products),
        f"{precision}: no matrix product ran. Does your step call the model, and backward() on the loss?",
    )
    expect(
        seen.autocast == mixed,
        f"{precision}: "
        + (
            f"the model ran without autocast, so its products were in {_names(seen.products)}. Call it inside "
            "`torch.autocast(inputs.device.type, dtype=...)`; the device must be the one that the batch is on."
            if mixed
            else "autocast is on. In a 'true' setting weights and inputs have the same dtype and nothing is cast on "
            "the fly: pass `enabled=False`, or leave autocast out."
        ),
    )
    expect(
        seen.products == {products},
        f"{precision}: the matrix products ran in {_names(seen.products)}, not in {dtype_name(products)}. "
        "Which dtype does autocast get?",
    )
    expect(
        not mixed or seen.losses <= {FP32},
        f"{precision}: the loss was computed in {_names(seen.losses)}. Compute it inside the autocast block too: "
        "there, cross entropy runs in fp32 by itself.",
    )
    _examine_update(precision, case, model, wanted_model)
    exact = 0.02 if products.itemsize == 2 else 1e-5
    expect(
        all(math.isclose(a, b, rel_tol=exact) for a, b in zip(losses, wanted_losses, strict=True)),
        f"{precision}: the losses of two steps are {_digits(losses)}, but should be {_digits(wanted_losses)}. "
        "The loss is that of the whole batch, before the step.",
    )
    expect(
        not scaled or scaler.get_scale() > _INITIAL_SCALE,
        f"{precision}: the scaler still has the scale it began with, but two good steps should have raised it. "
        "Use the scaler that your function is given, and call scaler.update() once, after scaler.step(optimizer).",
    )


def _examine_update(precision: str, case: _Case, model: nn.Module, wanted: nn.Module) -> None:
    """Compare what two steps did to the weights with the reference; if it differs, look for a well-known cause."""
    change, wanted_change = _change(model, case), _change(wanted, case)
    exact = 0.02 if SETTINGS[precision][1].itemsize == 2 else 1e-4
    if _agree(change, wanted_change, exact):
        return
    expect(bool(change.any()), f"{precision}: the weights did not change. Does the optimizer make its step?")
    expect(bool(change.isfinite().all()), f"{precision}: the weights became inf or nan on a harmless batch.")
    for fault, explanation in _FAULTS.items():
        if _agree(change, _change(_reference(case, precision, fault)[1], case), exact):
            raise NotYetError(f"{precision}: {explanation}")
    factor = (change.norm() / wanted_change.norm()).item()
    raise NotYetError(
        f"{precision}: two steps changed the weights {factor:.3g} times as much as they should. Look at the order: "
        "forward, zero_grad, scaled backward, unscale_, clip to max_norm, scaler.step, update."
    )


_FAULTS = {
    "not clipped": "the gradients were not clipped to max_norm, which your function is given: call "
    "nn.utils.clip_grad_norm_(model.parameters(), max_norm) between backward() and the step.",
    "clipped before unscaling": "you clipped before unscaling: the norm that was compared with max_norm is "
    "that of the scaled gradients. Call scaler.unscale_(optimizer) first, then clip.",
    "not unscaled": "the step used the scaled gradients: scaler.unscale_(optimizer) before you clip, and "
    "scaler.step(optimizer) instead of optimizer.step().",
    "not zeroed": "the second step still held the first one's gradients: call optimizer.zero_grad() in every step.",
    "clipped each": "the gradients were clipped one parameter at a time: max_norm bounds the norm of all "
    "together, so give clip_grad_norm_ all of model.parameters().",
}


def _examine_overflow(answer: Callable[..., float], case: _Case) -> None:
    """A scale so large that the fp16 gradients overflow: the step must be skipped and the scale halved."""
    model, optimizer, _ = _prepare(case, "16-mixed")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    _call_step(answer, model, case, optimizer, "16-mixed", scaler)
    expect(
        not _change(model, case).any(),
        "16-mixed: we gave you a scale that made the gradients overflow, and the weights changed all the same. "
        "scaler.step(optimizer) skips such a step; a plain optimizer.step() does not.",
    )
    expect(
        scaler.get_scale() == 2.0**29,
        f"16-mixed: after gradients that overflowed, the scale should have been halved once, from 2^30 to 2^29; "
        f"it is 2^{math.log2(scaler.get_scale()):g}. Call scaler.update() once in each step.",
    )


def _prepare(case: _Case, precision: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    weights, _, scaled = SETTINGS[precision]
    model = copy.deepcopy(case.model).to(weights)
    # plain SGD: Adam divides by the size of the gradients, and would hide whether they were unscaled and clipped
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=_INITIAL_SCALE, growth_interval=1, enabled=scaled)
    return model, optimizer, scaler


def _call_step(answer: Callable, model, case: _Case, optimizer, precision: str, scaler) -> object:
    try:
        return answer(model, case.batch, optimizer, precision, scaler, case.max_norm)
    except NotImplementedError:
        raise
    except (RuntimeError, ValueError, AssertionError) as error:
        for sign, hint in _ERRORS.items():
            if sign in str(error):
                said = str(error).splitlines()[0]
                raise NotYetError(f"{precision}: {hint} (PyTorch says: {said})") from error
        raise


# what PyTorch's message contains, the most telling first -> what it means here
_ERRORS = {
    "indices": "tokens are integers that look up rows of an embedding. Convert floating-point inputs only.",
    "Long": "the labels are class numbers: leave them integers.",
    "dtype": "the inputs are not in the dtype of the weights. In a 'true' setting, convert them.",
    "scalar type": "the inputs are not in the dtype of the weights: convert them.",
    "unscale FP16": "GradScaler refuses fp16 gradients: scale the loss only where the weights are fp32.",
    "unscale_() has already": "unscale_() was called twice, or scaler.update() is missing at the end of the step.",
    "after step()": "scaler.update() is missing at the end of the step, so that the scaler thinks it still goes on.",
    "since the last update": "scaler.update() is missing at the end of the step.",
    "No inf checks": "the scaler has seen no gradients since its last update(). Call update() once, after the step.",
}


def _reference(case: _Case, precision: str, fault: str = "") -> tuple[list[float], nn.Module]:
    """Two right steps, or two with a well-known fault: their losses, and the model after them."""
    model, optimizer, scaler = _prepare(case, precision)
    weights, products, _ = SETTINGS[precision]
    inputs = case.inputs.to(weights) if case.inputs.is_floating_point() else case.inputs
    losses = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=products, enabled=precision.endswith("mixed")):
            loss = F.cross_entropy(model(inputs), case.labels)
        if fault != "not zeroed":
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        if fault not in ("clipped before unscaling", "not unscaled"):
            scaler.unscale_(optimizer)
        if fault == "clipped each":
            for parameter in model.parameters():
                nn.utils.clip_grad_norm_(parameter, case.max_norm)
        elif fault != "not clipped":
            nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        if fault == "not unscaled":
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    return losses, model


def _change(model: nn.Module, case: _Case) -> torch.Tensor:
    """What training did to all weights, as one fp64 vector."""
    before = copy.deepcopy(case.model).to(next(model.parameters()).dtype)
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    return torch.cat([(new.detach().double() - old.detach().double()).flatten() for new, old in pairs])


def _agree(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return bool((a - b).norm() <= tolerance * b.norm())


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(map(dtype_name, dtypes)))


def _digits(values: list[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


# --- Tasks 4 and 5 --------------------------------------------------------------------------------------------------


def mlp_block(width: int) -> nn.Sequential:
    """The MLP block of a transformer, four times as wide inside: LayerNorm, Linear, GELU, Linear."""
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def _counted(precision: str, tokens: int, width: int) -> int:
    weights, products, _ = SETTINGS[precision]
    block, x = mlp_block(width).to(weights), torch.ones(tokens, width, dtype=weights)
    with torch.autocast("cpu", dtype=products, enabled=precision.endswith("mixed")):
        return count.saved_bytes(lambda: block(x), block).bytes


@check("Task 4, saved bytes against the counter")
def saved_bytes(answer: Callable[[str, int, int], float]) -> None:
    with machine.half_products():
        for precision, (tokens, width) in itertools.product(SETTINGS, ((64, 32), (512, 32), (16, 64), (100, 48))):
            got = _as_number(answer(precision, tokens, width), f"{precision}: your prediction")
            counted = _counted(precision, tokens, width)
            # two numbers a token, in the LayerNorm's own format, may be left out
            statistics = 2 * 8 * tokens
            if abs(got - counted) > statistics:
                raise NotYetError(
                    f"{precision}, {tokens} tokens of width {width}: you predict {got:,.0f} bytes, the counter finds "
                    f"{counted:,}. {_why_not_counted(counted - got, got, counted, precision, tokens, width)}".strip()
                )


def _why_not_counted(missing: float, got: float, counted: int, precision: str, tokens: int, width: int) -> str:
    elements, inner = tokens * width, 4 * width * width
    itemsize = SETTINGS[precision][1].itemsize
    mixed = precision.endswith("mixed")

    def is_about(value: float, target: float) -> bool:
        return abs(value - target) <= 2 * 8 * tokens

    if got < 200 and math.isclose(got, counted / elements, rel_tol=0.05):
        return "You return the bytes for one element; the task asks for all of them."
    if mixed and is_about(missing, 2 * inner * itemsize):
        return "The difference is two weight matrices in 16 bits: autocast keeps the cast copies that it makes."
    if mixed and is_about(missing, inner * itemsize):
        return "The difference is one weight matrix in 16 bits. There are two Linear layers."
    if mixed and is_about(missing, 2 * elements):
        return "The difference is two bytes an element: autocast runs LayerNorm in fp32, which keeps an fp32 input."
    if mixed and is_about(missing, 2 * elements + 2 * inner * itemsize):
        return (
            "Two things are missing: autocast runs LayerNorm in fp32, which keeps an fp32 input; and it keeps the "
            "cast copies of the two weight matrices."
        )
    if is_about(-missing, 2 * inner * SETTINGS[precision][0].itemsize):
        return "You counted the weights, but they are there anyway: only what is new memory counts."
    if is_about(-missing, 4 * elements * itemsize) or is_about(-missing, elements * itemsize):
        return "You counted one tensor too many: no layer after the last one needs its result for backward."
    if is_about(missing, 4 * elements * itemsize):
        return "One tensor, four times as wide, is missing: GELU keeps its input, and the second Linear its own."
    if is_about(missing, elements * itemsize):
        return "One tensor of the block's width is missing: LayerNorm keeps its input, and the first Linear its own."
    return f"That is {missing / elements:+.2f} bytes an element off. List the tensors one by one, with their dtypes."


@check("Task 5, where autocast breaks even")
def break_even(answer: Callable[[int], int]) -> None:
    with machine.half_products():
        for width in (36, 32, 64, 100):
            got = _as_number(answer(width), f"The number of tokens at width {width}")
            expect(
                got == int(got) and got >= 1, f"At width {width} you return {got:g}: give a whole number of tokens."
            )
            tokens = int(got)
            fp32, mixed = (_counted(precision, tokens, width) for precision in ("32-true", "bf16-mixed"))
            at = f"At width {width} and {tokens} tokens"
            expect(
                mixed < fp32,
                f"{at}, the counter finds {mixed:,} bytes with bf16-mixed and {fp32:,} with 32-true: not fewer. "
                "What grows with the number of tokens, what does not, and must it be fewer or as many?",
            )
            if tokens > 1:
                fp32, mixed = (_counted(precision, tokens - 1, width) for precision in ("32-true", "bf16-mixed"))
                expect(
                    mixed >= fp32,
                    f"{at}, bf16-mixed does keep fewer bytes, but with one token less it does so already "
                    f"({mixed:,} against {fp32:,}). Find the smallest number.",
                )


# --- Task 6 ---------------------------------------------------------------------------------------------------------

STAGES = ("logits", "loss", "gradients", "weights")


@dataclass(frozen=True)
class _Breakdown:
    """A training step that breaks at a known stage (`None`: it does not break)."""

    story: str
    stage: str | None
    parts: tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]


def _linear(weight: float, dtype: torch.dtype, inputs: int = 1, outputs: int = 1) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, dtype=dtype)
    with torch.no_grad():
        layer.weight.fill_(weight)
        layer.bias.zero_()
    return layer


def _breakdowns() -> Iterator[_Breakdown]:
    def column(*values: float, dtype: torch.dtype = FP16) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).unsqueeze(1)

    def case(story, stage, model, inputs, targets, optimizer="SGD", lr=0.01):
        trained = [p for p in model.parameters() if p.requires_grad]
        made = getattr(torch.optim, optimizer)(trained, lr=lr)
        return _Breakdown(story, stage, (model, nn.MSELoss(), made, inputs, targets))

    two, broken = column(1, 2, dtype=FP32), column(1, math.nan, dtype=FP32)
    yield case("a healthy step in fp32", None, _linear(0.5, FP32), two, two)
    yield case("products past 65504 in fp16", "logits", _linear(100.0, FP16), column(1, 2000), column(1, 1))
    yield case("an input that is nan", "logits", _linear(0.5, FP32), broken, two)
    yield case("squares past 65504 in fp16", "loss", _linear(100.0, FP16), column(1, 5), column(0, 0))
    yield case("gradients past 65504 in fp16", "gradients", _linear(0.1, FP16), column(1000), column(0))
    deep = nn.Sequential(_linear(0.1, FP16), _linear(1.0, FP16))
    deep[1].requires_grad_(False)
    yield case("gradients past 65504 with a frozen layer", "gradients", deep, column(1000), column(0))
    yield case("Adam in fp16 and tiny gradients", "weights", _linear(0.5, FP16), column(1), column(0.4995), "Adam")
    frozen = nn.Sequential(_linear(1.0, FP16), _linear(0.5, FP16))
    frozen[0].requires_grad_(False)
    yield case("Adam in fp16 with a frozen layer", "weights", frozen, column(1), column(0.4995), "Adam")
    yield case("a step far too long", "weights", _linear(10.0, FP16), column(10), column(0), lr=100.0)
    yield case("a healthy step in fp16", None, _linear(0.5, FP16), column(1, 2), column(1, 1))


@check("Task 6, what breaks first")
def first_broken(answer: Callable[..., str | None]) -> None:
    for made in _breakdowns():
        got = answer(*made.parts)
        expect(got is None or got in STAGES, f"Return one of {', '.join(map(repr, STAGES))} or None, not {got!r}.")
        if got != made.stage:
            said = "that nothing breaks" if got is None else f"{got!r}"
            right = "nothing breaks" if made.stage is None else f"{made.stage!r} broke first"
            raise NotYetError(
                f"In the case of {made.story}, {right}, but you say {said}. {_why_not_first(got, made.stage)}"
            )


def _why_not_first(got: str | None, wanted: str | None) -> str:
    if wanted is None:
        return "A finite number is not broken, however large."
    if got is None and wanted == "weights":
        return "Call optimizer.step() and look at the weights after it, at all of them."
    if got is None:
        return "inf is broken as well as nan: torch.isfinite() is False for both. Look at every element."
    if STAGES.index(got) > STAGES.index(wanted):
        return "What breaks first spoils the rest: look at all elements, in the order of the step; return at once."
    return "Look at the result of each stage by itself."


# --- Task 7 ---------------------------------------------------------------------------------------------------------


def first_adam_step(gradients: torch.Tensor, eps: float, beta2: float = 0.999) -> torch.Tensor:
    """By how many learning rates Adam's first step moves weights that start at zero."""
    weights = nn.Parameter(torch.zeros_like(gradients))
    weights.grad = gradients.clone()
    # one plain operation after another, as on every device by default but for being grouped; `fused` rounds less
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


@check("Task 7, why Adam divides by zero")
def weights_lost(answer: Callable[[torch.Tensor, float, float], int]) -> None:
    cases = [
        (FP32, 1e-8, 0.999),
        (FP16, 1e-8, 0.999),
        (FP16, 1e-8, 0.95),
        (FP16, 1e-4, 0.999),
        (BF16, 1e-8, 0.999),
        (FP16, 2e-8, 0.99),
        (FP16, 1e-7, 0.95),
    ]
    for seed, (dtype, eps, beta2) in enumerate(cases):
        gradients = _gradients(seed, dtype, beta2)
        got = _as_number(answer(gradients.clone(), eps, beta2), "The number of weights lost")
        counted = int((~first_adam_step(gradients, eps, beta2).isfinite()).sum())
        if got != counted:
            raise NotYetError(
                f"400 gradients in {dtype_name(dtype)}, eps={eps:g}, beta2={beta2:g}: Adam loses {counted} weights, "
                f"you predict {got:g}. {_why_not_lost(got, gradients, eps, beta2)}"
            )


def _why_not_lost(got: float, gradients: torch.Tensor, eps: float, beta2: float) -> str:
    v_zero = (1 - beta2) * gradients.double() ** 2
    stored = v_zero.to(gradients.dtype) == 0
    eps_zero = torch.tensor(eps, dtype=gradients.dtype) == 0
    if got == int(stored.sum()) and not eps_zero:
        return "Where v is zero, eps saves the weight, if the format can hold that eps."
    if eps_zero and got == 0:
        return "In this format eps itself rounds to zero and saves nothing: put it into the dtype of the gradients."
    if got == int((gradients.double() ** 2).to(gradients.dtype).eq(0).sum()) and eps_zero:
        return "v is not the squared gradient but (1 - beta2) times that, which underflows sooner."
    if got == int((stored & (gradients != 0)).sum()):
        return "A gradient of exactly zero counts too: 0 / 0 is nan."
    if got == int((gradients == 0).sum()) and eps_zero:
        return "Not only zero gradients: v is (1 - beta2) times the square of one, and rounds to zero far sooner."
    return "Round as the optimizer's state does: v = (1 - beta2) * g² and eps, each in the dtype of the gradients."


# the longest first step, in learning rates, that the task allows
LONGEST = 10.0


@check("Task 7, an eps that fp16 can use")
def safe_eps(answer: Callable[[], float]) -> None:
    eps = _as_number(answer(), "eps")
    expect(eps > 0, f"eps must be positive, not {eps:g}.")
    for seed in range(3):
        gradients = _gradients(seed, FP16, beta2=0.999)
        moved = first_adam_step(gradients, eps).abs()
        lost = int((~moved.isfinite()).sum())
        expect(
            lost == 0,
            f"With eps={eps:g}, {lost} of 400 weights are lost: fp16 rounds this eps to zero. "
            f"The smallest number that fp16 can hold is {2.0**-24:.1e}.",
        )
        runaway = int((moved > LONGEST).sum())
        expect(
            runaway == 0,
            f"With eps={eps:g} no weight is lost, but {runaway} of 400 move by more than {LONGEST:g} learning rates, "
            f"the furthest by {moved.max().item():,.0f}. Where v is zero, the move is lr * g / eps: how large is g?",
        )
    least = first_adam_step(torch.full((8,), 0.01, dtype=FP16), eps).abs().min().item()
    expect(
        least >= 0.5,
        f"With eps={eps:g}, a weight with a gradient of 0.01 moves by {least:.2g} learning rates only, where Adam "
        "means it to move by about one. Take the smallest eps that prevents the long steps.",
    )


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
    yield "gradients that spread too far", [between(-9, 0, 9), between(0, 5, 9)]
    yield "gradients that spread too far, in one tensor", [torch.tensor([0.0, -2e-8, 3e6])]
    yield "gradients that are all zero", [torch.zeros(4), torch.zeros(2, 2)]


def _damage(gradients: list[torch.Tensor], scale: float) -> tuple[int, int]:
    """How many gradients, none zero, become zero in fp16 when scaled, and how many overflow."""
    lost = overflowed = 0
    for g in gradients:
        stored = (g.double() * scale).float().to(FP16)
        lost += int(((stored == 0) & (g != 0)).sum())
        overflowed += int((~stored.isfinite()).sum())
    return lost, overflowed


@check("Task 8, a scale with which every gradient survives")
def choose_scale(answer: Callable[[list[torch.Tensor]], float | None]) -> None:
    for story, gradients in _gradient_sets():
        possible = [k for k in range(-60, 121) if _damage(gradients, 2.0**k) == (0, 0)]
        got = answer([g.clone() for g in gradients])
        here = f"For {story}"
        if got is None:
            expect(
                not possible,
                f"{here} you return None, but 2^{next(iter(possible), 0)} would do. The smallest number that fp16 "
                "holds is 2^-24, far below finfo.tiny; leave zeros out; and a scale may be below 1.",
            )
            continue
        scale = _as_number(got, "The scale")
        expect(0 < scale < math.inf, f"{here} you return {scale:g}, which is no scale. Leave zeros out.")
        expect(
            math.frexp(scale)[0] == 0.5,
            f"{here} you return {scale:g}, which is not a power of two. Only a power of two changes the exponent and "
            "leaves the digits alone.",
        )
        lost, overflowed = _damage(gradients, scale)
        name = f"a scale of 2^{math.log2(scale):g}"
        if not possible:
            raise NotYetError(
                f"{here} no scale will do, so return None: with {name}, {lost} become zero and {overflowed} overflow."
            )
        expect(
            not overflowed,
            f"{here}, with {name}, {overflowed} overflow and {lost} become zero. The largest one, without its sign "
            "and over all tensors, sets the limit: scaled, it must stay below 65504.",
        )
        expect(
            not lost,
            f"{here}, with {name}, {lost} become zero. The smallest one that is not zero, without its sign and over "
            "all tensors, sets the limit: scaled, it must reach 2^-24.",
        )


# --- Task 9 ---------------------------------------------------------------------------------------------------------

_CHOICES = {"V100": "16-mixed", "H100": "bf16-mixed", "laptop": "32-true", "server": "bf16-mixed"}
_REASONS = {
    "64-true": "It doubles every byte of fp32 and is faster on none of these machines; training needs no 15 digits.",
    "16-true": "It is the setting that diverged: it loses small updates, and its optimizer divides by zero.",
    ("V100", "bf16-mixed"): "The V100 has no hardware for bf16: PyTorch emulates it, more slowly than it runs fp32. "
    "(torch.cuda.is_bf16_supported() answers True there because it counts emulation.)",
    ("V100", "32-true"): "Its tensor cores would stand idle: they multiply fp16 only.",
    (
        "H100",
        "16-mixed",
    ): "It works, but here bf16 is as fast as fp16, and it needs no loss scaling, no scaler in the "
    "checkpoint and no skipped steps.",
    ("H100", "32-true"): "Its tensor cores would stand idle: strict fp32 does not use them.",
    ("laptop", "bf16-mixed"): "AVX2 has no 16-bit products: they are emulated, many times more slowly than fp32. The "
    "saved bytes would shrink, but you would wait for them.",
    ("laptop", "16-mixed"): "AVX2 has no 16-bit products: they are emulated, many times more slowly than fp32.",
    ("server", "16-mixed"): "This AMX multiplies bf16 and int8, not fp16; and fp16 would need loss scaling besides.",
    ("server", "32-true"): "AMX would stand idle: it does not multiply fp32.",
}


@check("Task 9, a setting for each machine")
def machines(answer: Callable[[], dict[str, str]]) -> None:
    chosen = answer()
    expect(isinstance(chosen, dict), f"Return a dictionary from machine to setting, not {type(chosen).__name__}.")
    for name, right in _CHOICES.items():
        expect(name in chosen, f"There is no choice for {name!r} yet. Give one for each of {', '.join(_CHOICES)}.")
        got = chosen[name]
        expect(got in SETTINGS, f"{got!r} is none of the five settings: {', '.join(SETTINGS)}.")
        expect(got == right, f"{name}: not {got}. {_REASONS.get(got) or _REASONS.get((name, got))}")
