"""The checks of exercise 1 accept the solution and other right answers, see a stub, and explain planted mistakes."""

import math

import pytest
import torch
from torch import nn

from speedlab.checks import mixed_precision as checks

NAME = "exercise-1-mixed-precision.ipynb"
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


# --- Task 1 ---------------------------------------------------------------------------------------------------------


def test_gap_accepts_another_way(verdict):
    assert verdict("gap", lambda w, t: torch.finfo(t).eps * 2.0 ** (math.frexp(w)[1] - 1)) == "correct"
    bits = {FP16: 10, BF16: 7, FP32: 23}
    assert verdict("gap", lambda w, t: torch.tensor(2.0 ** (math.frexp(w)[1] - 1 - bits[t]))) == "correct"


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (lambda w, t: torch.finfo(t).eps, "power of two"),
        (lambda w, t: torch.finfo(t).tiny, "close to zero"),
        (lambda w, t: torch.finfo(t).eps * abs(w), "round the weight down"),
        (lambda w, t: torch.finfo(t).eps * 2.0 ** math.ceil(math.log2(abs(w))), "math.floor"),
        (lambda w, t: torch.finfo(t).eps * 2.0 ** math.floor(math.log2(abs(w))) / 2, "half"),
        (lambda w, t: math.copysign(torch.finfo(t).eps * 2.0 ** math.floor(math.log2(abs(w))), w), "abs(weight)"),
        (lambda w, t: torch.finfo(t).eps * 2.0 ** math.trunc(math.log2(abs(w))), "halves below 1"),
        (lambda w, t: 1e-3, "power of two"),
        (lambda w, t: None, "return"),
        (lambda w, t: "small", "number"),
    ],
)
def test_gap_rejects(answer, word, rejects):
    rejects("gap", answer, word)


# --- Task 2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "changed", "word"),
    [
        ("bf16-mixed", (BF16, BF16, False), "update"),
        ("16-mixed", (FP16, FP16, True), "update"),
        ("16-true", (FP32, FP16, False), "everything"),
        ("16-true", (FP16, FP32, False), "one format"),
        ("16-true", (FP16, FP16, True), "refuses"),
        ("16-mixed", (FP32, BF16, True), "fp16"),
        ("16-mixed", (FP32, FP16, False), "6e-8"),
        ("bf16-mixed", (FP32, BF16, True), "exponents"),
        ("32-true", (FP32, FP32, True), "1e-38"),
        ("64-true", (FP64, FP64, True), "underflows"),
        ("64-true", ("double", FP64, False), "'double'"),
        ("64-true", FP64, "three things"),
    ],
)
def test_setting_rejects(precision, changed, word, rejects):
    rejects(
        "setting",
        lambda p: {**checks.SETTINGS, precision: changed}[p],
        precision,
        word,
    )


# --- Task 3 ---------------------------------------------------------------------------------------------------------

STEP = """
def train_step(model, batch, optimizer, precision, scaler, max_norm=1.0):
    inputs, labels = batch
    weights, products, scaled = SETTINGS[precision]
    if inputs.is_floating_point():
        inputs = inputs.to(weights)
    with torch.autocast("cpu", dtype=products, enabled=precision.endswith("mixed")):
        loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()
"""


def changed_step(*changes: tuple[str, str]) -> object:
    """The right step with some of its lines replaced."""
    source = STEP
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names = {"torch": torch, "nn": nn, "SETTINGS": checks.SETTINGS}
    exec(source, names)
    return names["train_step"]


IF_SCALED = """
    if scaled:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    else:
        loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_((max_norm / norm).clamp(max=1.0))
    if scaled:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    model.zero_grad(set_to_none=False)
"""
UNSCALE = "    scaler.unscale_(optimizer)\n"
CLIP = "    nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n"
UPDATE = "    scaler.update()\n"
ZERO = "    optimizer.zero_grad()\n"
RETURN = "return loss.item()"
MIDDLE = STEP[STEP.index(ZERO) : STEP.index("    return")]
AUTOCAST = '    with torch.autocast("cpu", dtype=products, enabled=precision.endswith("mixed")):\n'
LOSS = "        loss = nn.functional.cross_entropy(model(inputs), labels)\n"
PLAIN_STEP = ("scaler.step(optimizer)", "optimizer.step()")

LOSS_OUTSIDE = """
        logits = model(inputs)
    loss = nn.functional.cross_entropy(logits, labels)
"""
LOSS_OUTSIDE_IN_FP32 = """
        logits = model(inputs)
    if precision.endswith("mixed"):
        logits = logits.float()
    loss = nn.functional.cross_entropy(logits, labels)
"""
CLIP_EACH = """
    for p in model.parameters():
        nn.utils.clip_grad_norm_(p, max_norm)
"""
CAST_THE_MODEL = """
    model.to(products)
    if inputs.is_floating_point():
        inputs = inputs.to(products)
"""


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [(MIDDLE, IF_SCALED)],
        [(ZERO, ""), (UPDATE, UPDATE + ZERO)],
        [(LOSS, LOSS_OUTSIDE_IN_FP32)],
        [("inputs.to(weights)", "inputs.to(next(model.parameters()).dtype)")],
    ],
)
def test_train_step_accepts_other_ways(changes, verdict):
    assert verdict("train_step", changed_step(*changes)) == "correct"


MISTAKES = {
    "clips, then unscales": ([(CLIP, ""), (UNSCALE, CLIP + UNSCALE)], ["16-mixed", "clipped before unscaling"]),
    "leaves unscaling to step()": ([(UNSCALE, "")], ["16-mixed", "clipped before unscaling"]),
    "never unscales": ([(UNSCALE, ""), (UPDATE, ""), PLAIN_STEP], ["16-mixed", "scaled gradients"]),
    "never scales": (
        [("scaler.scale(loss)", "loss"), (UNSCALE, ""), (UPDATE, ""), PLAIN_STEP],
        ["16-mixed", "scaler", "given"],
    ),
    "steps past the scaler": ([PLAIN_STEP], ["16-mixed", "skips"]),
    "steps past the scaler, no update": ([(UPDATE, ""), PLAIN_STEP], ["16-mixed", "update"]),
    "no update": ([(UPDATE, "")], ["16-mixed", "update"]),
    "updates twice": ([(UPDATE, UPDATE + UPDATE)], ["16-mixed", "once"]),
    "does not clip": ([(CLIP, "")], ["not clipped"]),
    "clips to its own norm": ([("max_norm)\n", "1.0)\n")], ["max_norm", "given"]),
    "clips each parameter": ([(CLIP, CLIP_EACH)], ["one parameter"]),
    "keeps old gradients": ([(ZERO, "")], ["zero_grad"]),
    "makes no step": ([("scaler.step(optimizer)", "pass"), (UPDATE, "")], ["did not change"]),
    "returns a tensor": ([(RETURN, "return loss")], ["float", "item"]),
    "returns the scaled loss": ([(RETURN, "return scaler.scale(loss).item()")], ["16-mixed", "scaled loss"]),
    "returns a constant": ([(RETURN, "return 1.0")], ["losses"]),
    "returns nothing": ([(RETURN, "pass")], ["NoneType"]),
    "keeps the inputs in fp32": ([("        inputs = inputs.to(weights)", "        pass")], ["64-true", "convert"]),
    "casts the tokens": ([("if inputs.is_floating_point():", "if True:")], ["tokens", "integers"]),
    "casts the labels": ([("labels)", "labels.to(weights))")], ["labels"]),
    "no autocast": ([(AUTOCAST, "    if True:\n")], ["bf16-mixed", "autocast"]),
    "autocast everywhere": ([('precision.endswith("mixed")', "products.itemsize == 2")], ["autocast is on"]),
    "bf16 for both": ([("dtype=products", "dtype=torch.bfloat16")], ["16-mixed", "bf16", "fp16"]),
    "the loss in 16 bits": ([(LOSS, LOSS_OUTSIDE)], ["bf16-mixed", "inside the autocast"]),
    "casts the weights": ([(AUTOCAST, CAST_THE_MODEL + AUTOCAST)], ["bf16-mixed", "weights"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_train_step_rejects(mistake, rejects):
    changes, words = MISTAKES[mistake]
    rejects("train_step", changed_step(*changes), *words)


# --- Tasks 4 and 5 --------------------------------------------------------------------------------------------------


def bytes_by_formula(
    norm_mixed=4, copies=2, tensors=(1, 1, 4, 4), extra=0.0, per_element=False, weights=0, statistics=0
):
    """A prediction of saved bytes in which each part can be made wrong."""

    def predict(precision: str, tokens: int, width: int) -> float:
        mixed = precision.endswith("mixed")
        size = checks.SETTINGS[precision][1].itemsize
        norm, *others = tensors
        elements = norm * (norm_mixed if mixed else size) + size * sum(others) + extra * size
        total = elements * tokens * width + statistics * tokens
        total += copies * size * 4 * width * width if mixed else 0
        total += weights * size * 4 * width * width
        return total / (tokens * width) if per_element else total

    return predict


def test_saved_bytes_accepts_the_statistics(verdict):
    assert verdict("saved_bytes", bytes_by_formula()) == "correct"
    assert verdict("saved_bytes", bytes_by_formula(statistics=8)) == "correct"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"copies": 0}, ("bf16-mixed", "cast copies")),
        ({"copies": 1}, ("bf16-mixed", "one weight matrix")),
        ({"norm_mixed": 2}, ("bf16-mixed", "LayerNorm in fp32")),
        ({"norm_mixed": 2, "copies": 0}, ("bf16-mixed", "Two things")),
        ({"per_element": True}, ("one element",)),
        ({"weights": 2}, ("there anyway",)),
        ({"tensors": (1, 1, 4, 0)}, ("four times as wide",)),
        ({"tensors": (1, 0, 4, 4)}, ("block's width",)),
        ({"extra": 1}, ("one tensor too many",)),
        ({"tensors": (1, 1, 1, 1)}, ("one by one",)),
    ],
)
def test_saved_bytes_rejects(wrong, words, rejects):
    rejects("saved_bytes", bytes_by_formula(**wrong), *words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda width: math.ceil(8 * width / 9), ("36", "not fewer", "as many")),
        (lambda width: width, ("one token less", "smallest")),
        (lambda width: 16 * width // 20 + 1, ("not fewer",)),
        (lambda width: 8 * width / 9 + 1.01, ("whole number",)),
        (lambda width: 0, ("whole number",)),
    ],
)
def test_break_even_rejects(answer, words, rejects):
    rejects("break_even", answer, *words)


# --- Task 6 ---------------------------------------------------------------------------------------------------------


def broken_by(stages=checks.STAGES, is_broken=lambda t: not t.isfinite().all(), step=True):
    """The tool of task 6 with some stages left out, reordered, or judged differently."""

    def first_broken(model, loss_fn, optimizer, inputs, targets):
        logits = model(inputs)
        loss = loss_fn(logits, targets)
        loss.backward()
        found = {"logits": [logits], "loss": [loss]}
        found["gradients"] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if step:
            optimizer.step()
        found["weights"] = list(model.parameters())
        return next((stage for stage in stages if any(is_broken(t) for t in found[stage])), None)

    return first_broken


def test_first_broken_accepts_another_way(verdict):
    assert verdict("first_broken", broken_by()) == "correct"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (broken_by(stages=("logits", "loss", "gradients")), ("optimizer.step()",)),
        (broken_by(step=False), ("optimizer.step()",)),
        (broken_by(is_broken=lambda t: t.isnan().any()), ("inf",)),
        (broken_by(is_broken=lambda t: not t.isfinite().any()), ("all elements",)),
        (broken_by(stages=("weights", "gradients", "loss", "logits")), ("in the order",)),
        (broken_by(stages=("loss", "gradients", "weights")), ("'logits' broke first",)),
        (broken_by(is_broken=lambda t: t.abs().max() > 1 or not t.isfinite().all()), ("finite number",)),
        (lambda *_: "optimizer", ("'logits'", "'weights'")),
        (lambda *_: False, ("None",)),
    ],
)
def test_first_broken_rejects(answer, words, rejects):
    rejects("first_broken", answer, *words)


def test_first_broken_names_the_line_that_meets_a_frozen_parameter(verdict):
    def careless(model, loss_fn, optimizer, inputs, targets):
        logits = model(inputs)
        loss = loss_fn(logits, targets)
        loss.backward()
        gradients = [p.grad.isfinite().all() for p in model.parameters()]
        optimizer.step()
        stages = {"logits": logits.isfinite().all(), "loss": loss.isfinite(), "gradients": all(gradients)}
        stages["weights"] = all(p.isfinite().all() for p in model.parameters())
        return next((stage for stage, healthy in stages.items() if not healthy), None)

    said = verdict("first_broken", careless)
    assert "AttributeError" in said and "p.grad.isfinite" in said, said


# --- Task 7 ---------------------------------------------------------------------------------------------------------


def lost_where(v, denominator=lambda v, eps: v.sqrt() + torch.tensor(eps, dtype=v.dtype), and_also=lambda g: True):
    return lambda g, eps, beta2: int(((denominator(v(g, beta2), eps) == 0) & and_also(g)).sum())


def stored_v(g: torch.Tensor, beta2: float) -> torch.Tensor:
    return ((1 - beta2) * g.double() ** 2).to(g.dtype)


def test_weights_lost_accepts_steps_in_the_format_itself(verdict):
    answer = lost_where(lambda g, beta2: g * g * (1 - beta2))
    assert verdict("weights_lost", answer) == "correct"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda g, eps, beta2: 0, ("rounds to zero",)),
        (lambda g, eps, beta2: int((stored_v(g, beta2) == 0).sum()), ("eps saves",)),
        (lost_where(stored_v, lambda v, eps: v.double().sqrt() + eps), ("rounds to zero",)),
        (lost_where(lambda g, beta2: (g.double() ** 2).to(g.dtype)), ("1 - beta2",)),
        (lost_where(stored_v, and_also=lambda g: g != 0), ("0 / 0",)),
        (lambda g, eps, beta2: int((g == 0).sum()) if torch.tensor(eps, dtype=g.dtype) == 0 else 0, ("square",)),
        (
            lambda g, eps, beta2: int((g.abs() < 1e-3).sum()) if g.dtype == FP16 and eps < 3e-8 else 0,
            ("(1 - beta2)",),
        ),
    ],
)
def test_weights_lost_rejects(answer, words, rejects):
    rejects("weights_lost", answer, *words)


@pytest.mark.parametrize("eps", [6e-4, 1e-3, 2e-3, 5e-3])
def test_safe_eps_accepts(eps, verdict):
    assert verdict("safe_eps", lambda: eps) == "correct"


@pytest.mark.parametrize(
    ("eps", "words"),
    [
        (1e-8, ("are lost", "rounds")),
        (1e-7, ("no weight is lost", "learning rates")),
        (1e-4, ("learning rates", "lr * g / eps")),
        (3e-2, ("0.01", "smallest eps")),
        (1.0, ("0.01",)),
        (0, ("positive",)),
        (None, ("return",)),
    ],
)
def test_safe_eps_rejects(eps, words, rejects):
    rejects("safe_eps", lambda: eps, *words)


# --- Task 8 ---------------------------------------------------------------------------------------------------------


def scale_by(smallest=2.0**-24, largest=65504.0, sizes=None, power=True, only_up=False):
    """The scale of task 8 with its limits, the sizes it looks at, or the rounding to a power of two changed."""

    def choose_scale(gradients):
        found = torch.cat([g.flatten() for g in gradients]).abs() if sizes is None else sizes(gradients)
        found = found[found > 0].double()
        if not len(found):
            return 1.0
        scale = largest / found.max().item()
        scale = 2.0 ** math.floor(math.log2(scale)) if power else scale
        scale = max(scale, 1.0) if only_up else scale
        return scale if found.min().item() * scale >= smallest else None

    return choose_scale


def test_choose_scale_accepts_the_smallest_scale_too(verdict):
    def smallest_that_works(gradients):
        for exponent in range(-40, 100):
            scaled = [(g.double() * 2.0**exponent).half() for g in gradients]
            alive = all(((s != 0) | (g == 0)).all() for s, g in zip(scaled, gradients, strict=True))
            if alive and all(s.isfinite().all() for s in scaled):
                return 2**exponent
        return None

    assert verdict("choose_scale", scale_by()) == "correct"
    assert verdict("choose_scale", smallest_that_works) == "correct"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda gradients: 65536.0, ("overflow", "largest")),
        (lambda gradients: 1.0, ("become zero", "smallest")),
        (scale_by(power=False), ("power of two",)),
        (scale_by(smallest=torch.finfo(FP16).tiny), ("None", "2^-24")),
        (scale_by(only_up=True), ("too large", "overflow")),
        (scale_by(smallest=0.0), ("spread too far", "return None")),
        (scale_by(sizes=lambda gradients: gradients[0].flatten().abs()), ("all tensors",)),
        (scale_by(sizes=lambda gradients: torch.cat([g.flatten() for g in gradients])), ("sign",)),
        (
            lambda gradients: (
                2.0**-24 / min(g.abs().min() for g in gradients).item() if gradients[0].all() else math.inf
            ),
            ("power",),
        ),
        (lambda gradients: math.inf, ("zeros",)),
        (lambda gradients: None, ("None",)),
    ],
)
def test_choose_scale_rejects(answer, words, rejects):
    rejects("choose_scale", answer, *words)


# --- Task 9 ---------------------------------------------------------------------------------------------------------

RIGHT = {"V100": "16-mixed", "H100": "bf16-mixed", "laptop": "32-true", "server": "bf16-mixed"}


@pytest.mark.parametrize("name", RIGHT)
def test_machines_gives_a_reason_for_every_wrong_setting(name, verdict):
    for wrong in set(checks.SETTINGS) - {RIGHT[name]}:
        said = verdict("machines", lambda wrong=wrong: {**RIGHT, name: wrong})
        assert said.startswith(f"not yet right. {name}: not {wrong}.") and len(said.split()) > 12, said


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({**RIGHT, "V100": "bf16-mixed"}, ("emulates",)),
        ({**RIGHT, "H100": "16-mixed"}, ("scaling",)),
        ({**RIGHT, "laptop": "bf16-mixed"}, ("AVX2",)),
        ({**RIGHT, "server": "32-true"}, ("AMX",)),
        ({"V100": "16-mixed"}, ("H100",)),
        ({**RIGHT, "laptop": "bf16"}, ("five settings",)),
        (list(RIGHT.values()), ("dictionary",)),
    ],
)
def test_machines_rejects(chosen, words, rejects):
    rejects("machines", lambda: chosen, *words)
