"""The checks of exercise 1 accept what is right in any style, see a stub, and name the fault of what is wrong."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from notebook_answers import attacks, defined, named
from torch import nn
from torch.optim import adam as functional

from speedlab import count
from speedlab.checks import mixed_precision as checks

NAME = "exercise-1-mixed-precision.ipynb"
SETTINGS = checks._SETTINGS
BYTES_OF_PRODUCTS = {name: found[1].itemsize for name, found in SETTINGS.items()}
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TASKS = ("gap", "setting", "train_step", "saved_bytes", "break_even", "first_broken", "weights_lost", "safe_eps")


@pytest.mark.parametrize("task", [*TASKS, "choose_scale", "machines"])
def test_the_solution_is_correct_and_the_stub_not_attempted(task, solution, stub, verdict):
    assert verdict(task, solution[task]) == "correct"
    assert verdict(task, stub[task]) == "not attempted yet"


# --- Task 1 ---------------------------------------------------------------------------------------------------------

BITS = {FP16: 10, BF16: 7, FP32: 23}


def below(w):
    return 2.0 ** math.floor(math.log2(abs(w)))


def stored(w, t):
    return torch.tensor(abs(w), dtype=t).item()


def by_spacing(w, t):
    if t == BF16:
        return np.spacing(torch.tensor(abs(w), dtype=t).float().numpy()) * 2**16
    return np.spacing({FP16: np.float16, FP32: np.float32}[t](abs(w)))


def by_nextafter(w, t):
    here = torch.tensor(w, dtype=t).abs()
    return torch.nextafter(here, torch.tensor(math.inf, dtype=t)) - here


def from_the_unrounded(w, t):
    here = torch.tensor(abs(w), dtype=t)
    above = here if here.item() > abs(w) else torch.nextafter(here, torch.tensor(math.inf, dtype=t))
    return above.item() - abs(w)


def upward(w, t):
    return torch.nextafter(torch.tensor(w, dtype=t), torch.tensor(math.inf, dtype=t))


def by_bits_in_place(w, t):
    here = torch.tensor([abs(w)], dtype=t)
    above = here.clone()
    above.view(torch.int16 if t.itemsize == 2 else torch.int32).add_(1)
    return above.sub_(here)


def by_doubling(w, t):
    power = 2.0**-60
    while 2 * power <= stored(w, t):
        power *= 2
    return torch.finfo(t).eps * power


GAPS = {
    "the bits, counted up in place": by_bits_in_place,
    "a loop": by_doubling,
    "a Decimal": lambda w, t: Decimal(by_doubling(w, t)),
    "hexadecimal": lambda w, t: torch.finfo(t).eps * 2.0 ** int(stored(w, t).hex().split("p")[1]),
    "bit_length": lambda w, t: torch.finfo(t).eps * 2.0 ** (int(stored(w, t) * 2**60).bit_length() - 61),
    "in the dtype itself": lambda w, t: torch.tensor(by_doubling(w, t), dtype=t),
    "frexp": lambda w, t: torch.finfo(t).eps * 2.0 ** (math.frexp(stored(w, t))[1] - 1),
    "a tensor": lambda w, t: torch.tensor(2.0 ** (math.frexp(stored(w, t))[1] - 1 - BITS[t])),
    "numpy's spacing": by_spacing,
    "nextafter": by_nextafter,
    "numpy's logarithm": lambda w, t: torch.finfo(t).eps * 2.0 ** np.floor(np.log2(stored(w, t))),
    "a fraction": lambda w, t: Fraction(below(stored(w, t))) / 2 ** BITS[t],
    "an array": lambda w, t: np.array([torch.finfo(t).eps * below(stored(w, t))]),
}
WRONG_GAPS = {
    "eps": (lambda w, t: torch.finfo(t).eps, "power"),
    "tiny": (lambda w, t: torch.finfo(t).tiny, "close to zero"),
    "proportional": (lambda w, t: torch.finfo(t).eps * abs(w), "round the weight down"),
    "ceil": (lambda w, t: torch.finfo(t).eps * 2.0 ** math.ceil(math.log2(abs(w))), "math.floor"),
    "half": (lambda w, t: torch.finfo(t).eps * below(w) / 2, "That is half"),
    "signed": (lambda w, t: math.copysign(torch.finfo(t).eps * below(w), w), "abs(weight)"),
    "truncated": (lambda w, t: torch.finfo(t).eps * 2.0 ** math.trunc(math.log2(abs(w))), "halves below 1"),
    "from the unrounded": (from_the_unrounded, "0.1 itself", "stores it"),
    "the power of two below the unrounded": (lambda w, t: torch.finfo(t).eps * below(w), "stores 0.9999 as 1"),
    "upward from a negative one": (lambda w, t: upward(w, t).item() - stored(w, t) * math.copysign(1, w),
                                   "-2 has", "towards zero: take abs"),
    "the logarithm in the format": (lambda w, t: torch.finfo(t).eps
                                    * 2.0 ** torch.tensor(abs(w), dtype=t).log2().floor().item(), "twice the gap"),
    "downward": (lambda w, t: stored(w, t) + upward(-abs(w), t).item(), "That is half", "the next smaller number"),
    "the smaller minus the larger": (lambda w, t: -by_doubling(w, t), "the larger number minus the smaller"),
    "Python's gap in fp32": (lambda w, t: math.ulp(w) if t == FP32 else by_doubling(w, t), "in fp32", "gap at 1."),
    "nothing in fp32": (lambda w, t: 0.0 if t == FP32 else by_doubling(w, t), "in fp32", "gap at 1."),
    "stored in 16 bits only": (lambda w, t: torch.finfo(t).eps * below(w if t == FP32 else stored(w, t)),
                               "fp32 stores 0.99999999 as 1"),
    "a hundredth off": (lambda w, t: by_doubling(w, t) * (1 + (t == FP32 and w == 0.0007) / 100), "0.0007 has"),
    "fp16's eps": (lambda w, t: by_doubling(w, t) / torch.finfo(t).eps * torch.finfo(FP16).eps, "in bf16"),
    "a generator": (lambda w, t: (x for x in [by_doubling(w, t)]), "not generator"),
    "a constant": (lambda w, t: 1e-3, "power of two"),
    "a lookup": (lambda w, t: torch.finfo(t).eps * {3.0: 2, 0.75: 0.5, 100.0: 64, 0.1: 0.0625, 5.0: 4}.get(abs(w), 1),
                 "0.3 has its next"),
    "nothing": (lambda w, t: None, "return"),
    "text": (lambda w, t: "small", "number"),
    "nan": (lambda w, t: math.nan, "is nan"),
    "inf": (lambda w, t: math.inf, "is inf"),
    "zero": (lambda w, t: 0.0, "power of two"),
}  # fmt: skip


@pytest.mark.parametrize("answer", named(GAPS))
def test_gap_accepts(answer, verdict):
    assert verdict("gap", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), attacks(WRONG_GAPS))
def test_gap_rejects(answer, words, rejects):
    rejects("gap", answer, *words)


# --- Task 2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [tuple, list, iter, lambda made: (*made[:2], np.bool_(made[2]))])
def test_setting_accepts(kind, verdict):
    assert verdict("setting", lambda p: kind(SETTINGS[p])) == "correct"


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
        ("64-true", ("double", FP64, False), "such as torch.float32, not 'double'"),
        ("32-true", ("fp32", "fp32", False), "such as torch.float32, not 'fp32'"),
        ("32-true", (np.float32, FP32, False), "as PyTorch names it"),
        ("16-mixed", (FP32, FP16, "yes"), "True or False, not 'yes'"),
        ("16-mixed", (FP32, FP16, None), "True or False, not None"),
        ("64-true", FP64, "list of 3"),
        ("64-true", (FP64, FP64), "3 things, not 2"),
        ("64-true", None, "return"),
    ],
)
def test_setting_rejects(precision, changed, word, rejects):
    rejects("setting", lambda p: {**SETTINGS, precision: changed}[p], precision, word)


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
    names = {"torch": torch, "nn": nn, "math": math, "SETTINGS": SETTINGS, "__name__": "made"}
    return defined(source, f"<changed {hash(source)}>", **names)["train_step"]


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
CROSS_ENTROPY = "nn.functional.cross_entropy(logits, labels)"
BY_LOGSUMEXP = "(logits.logsumexp(1) - logits.gather(1, labels[:, None]).squeeze(1)).mean()"
ROUNDED = "nn.functional.nll_loss(logits.float().log_softmax(1).to(logits.dtype), labels)"
BY_SOFTMAX = "-logits.softmax(1).gather(1, labels[:, None]).log().mean()"
SURE = "    with torch.no_grad():\n        sure = logits.softmax(1).amax(1)\n"
LAYERS = """logits = inputs
        for layer in model:
            logits = layer(logits)"""
COPY = "        model = __import__('copy').deepcopy(model)\n"
ZEROS_FOR_INF = """
    for p in model.parameters():
        p.grad.nan_to_num_(0.0, 0.0, 0.0)
    optimizer.step()
"""
STRETCH = """
    for p in model.parameters():
        p.grad *= max(1.0, max_norm / float(norm))
"""
SQUARED = """
    squares = sum(float(p.grad.square().sum()) for p in model.parameters())
    for p in model.parameters():
        p.grad *= max_norm / squares**0.5 if squares > max_norm else 1.0
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


WHOLE_UNDER_AUTOCAST = "".join(
    "    " + line for line in STEP[STEP.index("        loss =") : STEP.index("    return")].splitlines(keepends=True)
).replace("            loss", "        loss", 1)
STEPS = {
    "the solution's way": [],
    "without the scaler where it is off, clipped by hand": [(MIDDLE, IF_SCALED)],
    "zeroed at the end": [(ZERO, ""), (UPDATE, UPDATE + ZERO)],
    "zeroed at the beginning": [(ZERO, ""), ("    inputs, labels", ZERO + "    inputs, labels")],
    "the loss outside, in fp32": [(LOSS, LOSS_OUTSIDE_IN_FP32)],
    "the dtype of the weights looked up": [("inputs.to(weights)", "inputs.to(next(model.parameters()).dtype)")],
    "logits in fp32": [("cross_entropy(model(inputs)", "cross_entropy(model(inputs).float()")],
    "the loss outside, in fp32 everywhere": [(LOSS, LOSS_OUTSIDE.replace("(logits,", "(logits.float(),"))],
    "a loss object": [("nn.functional.cross_entropy(", "nn.CrossEntropyLoss()(")],
    "float()": [(RETURN, "return float(loss)")],
    "a leftover comment": [(RETURN, "# raise NotImplementedError\n    return loss.item()")],
    "probabilities looked at": [(LOSS, LOSS_OUTSIDE_IN_FP32.replace("    if precision", SURE + "    if precision"))],
    "a confidence looked at": [(LOSS, LOSS + "        sure = model(inputs).detach().softmax(-1).amax(-1)\n")],
    "called as forward": [("model(inputs)", "model.forward(inputs)")],
    "layer by layer": [(LOSS, LOSS_OUTSIDE_IN_FP32.replace("logits = model(inputs)", LAYERS))],
    "the loss in fp64": [("cross_entropy(model(inputs)", "cross_entropy(model(inputs).double()")],
    "a loss of one's own": [(LOSS, LOSS_OUTSIDE_IN_FP32.replace(CROSS_ENTROPY, BY_LOGSUMEXP))],
    "model.train()": [(ZERO, ZERO + "    model.train()\n")],
}


@pytest.mark.parametrize("changes", named({name: (changes,) for name, changes in STEPS.items()}))
def test_train_step_accepts(changes, verdict):
    assert verdict("train_step", changed_step(*changes)) == "correct"


BACKWARD = "scaler.scale(loss).backward()"
MISTAKES = {
    "scales twice": ([("scale(loss)", "scale(scaler.scale(loss))")], ["scale the loss once"]),
    "never scales, yet unscales": ([(BACKWARD, "loss.backward()")], ["the loss was not scaled"]),
    "updates, then steps": ([(UPDATE, ""), ("    scaler.step(", UPDATE + "    scaler.step(")], ["scaler.update()"]),
    "goes backward on the sum": ([("scale(loss)", "scale(loss * len(labels))")], ["on the sum of the losses"]),
    "clips by the largest": ([("(), max_norm)", "(), max_norm, math.inf)")], ["Euclidean"]),
    "stretches": ([(CLIP, CLIP.replace("    nn", "    norm = nn") + STRETCH)], ["clipping only shortens"]),
    "multiplies the loss": ([("scale(loss)", "scale(loss * 1024)")], ["that nobody divides out"]),
    "softmax twice": ([("model(inputs)", "model(inputs).softmax(-1)")], ["the softmax inside"]),
    "a detached tensor": ([(RETURN, "return loss.detach()")], ["not Tensor."]),
    "casts the model": (
        [
            ("    inputs, labels", "    model.float()\n    inputs, labels"),
            ("inputs.to(weights)", "inputs.float()"),
            (RETURN, "model.to(weights)\n    return loss.item()"),
        ],
        ["convert the inputs, not the model"],
    ),
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
    "never clips to more than 1": ([("max_norm)\n", "min(max_norm, 1.0))\n")], ["clipped to 1", "itself"]),
    "never clips to more than 5": (
        [("    nn.utils.clip", "    if max_norm < 1:\n        nn.utils.clip")],
        ["not clipped"],
    ),
    "compares the squared norm": ([(CLIP, SQUARED)], ["clipping only shortens"]),
    "clips each parameter": ([(CLIP, CLIP_EACH)], ["one parameter"]),
    "keeps old gradients": ([(ZERO, "")], ["zero_grad() in every step"]),
    "makes no step": ([("scaler.step(optimizer)", "pass"), (UPDATE, "")], ["did not change"]),
    "returns a tensor": ([(RETURN, "return loss")], ["float", "item"]),
    "returns the scaled loss": ([(RETURN, "return scaler.scale(loss).item()")], ["16-mixed", "scaled loss"]),
    "returns a constant": ([(RETURN, "return 1.0")], ["first loss is 1"]),
    "returns nan": ([(RETURN, "return math.nan")], ["nan"]),
    "the sum of the losses": ([("labels)\n", "labels, reduction='sum')\n")], ["add up the losses", "mean"]),
    "half the batch": ([("labels)\n", "labels[:8])\n"), ("model(inputs)", "model(inputs[:8])")], ["half the batch"]),
    "the loss after the step": (
        [(RETURN, "return nn.functional.cross_entropy(model(inputs), labels).item()")],
        ["32-true", "after the step"],
    ),
    "steps on zeros for inf": ([("    scaler.step(optimizer)\n", ZEROS_FOR_INF)], ["16-mixed", "no gradients"]),
    "another optimizer": (
        [(ZERO, "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n" + ZERO)],
        ["0 steps", "given"],
    ),
    "trains a copy": ([("        loss =", COPY + "        loss =")], ["another"]),
    "rounded to 16 bits": ([(LOSS, LOSS_OUTSIDE.replace(CROSS_ENTROPY, ROUNDED))], ["bf16-mixed", "loss was"]),
    "a loss in 16 bits": ([(LOSS, LOSS_OUTSIDE.replace(CROSS_ENTROPY, BY_SOFTMAX))], ["bf16-mixed", "loss was"]),
    "labels before logits": ([("(model(inputs), labels)", "(labels, model(inputs))")], ["logits first"]),
    "clips each number": ([("clip_grad_norm_", "clip_grad_value_")], ["clip_grad_norm_, not"]),
    "zeroes after backward": (
        [(ZERO, ""), ("backward()\n", "backward()\n" + ZERO)],
        ["zero_grad called after backward"],
    ),
    "eval()": ([(ZERO, ZERO + "    model.eval()\n")], ["eval()", "dropout"]),
    "two steps": ([("scaler.step(optimizer)", "optimizer.step()\n    optimizer.step()")], ["4 optimizer steps"]),
    "backward under autocast": (
        [(STEP[STEP.index(LOSS) : STEP.index("    return")], WHOLE_UNDER_AUTOCAST)],
        ["bf16-mixed", "backward() runs under autocast"],
    ),
    "log_softmax": (
        [
            (
                "nn.functional.cross_entropy(model(inputs), labels)",
                "nn.functional.nll_loss(nn.functional.log_softmax(model(inputs), 1), labels)",
            )
        ],
        ["bf16-mixed", "log_softmax on a CPU does not"],
    ),
    "returns nothing": ([(RETURN, "pass")], ["NoneType"]),
    "numpy's float": ([(RETURN, "return loss.detach().numpy()")], ["ndarray"]),
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
        size = BYTES_OF_PRODUCTS[precision]
        norm, *others = tensors
        elements = norm * (norm_mixed if mixed else size) + size * sum(others) + extra * size
        total = elements * tokens * width + statistics * tokens
        total += copies * size * 4 * width * width if mixed else 0
        total += weights * size * 4 * width * width
        return total / (tokens * width) if per_element else total

    return predict


BYTES = {
    "by formula": bytes_by_formula(),
    "with the statistics": bytes_by_formula(statistics=8),
    "numpy": lambda p, t, w: np.int64(bytes_by_formula()(p, t, w)),
    "a tensor": lambda p, t, w: torch.tensor(bytes_by_formula()(p, t, w)),
    "a float": lambda p, t, w: float(bytes_by_formula()(p, t, w)),
}


def run_the_block(precision, tokens, width):
    block = checks.mlp_block(width)
    return count.saved_bytes(lambda: block(torch.ones(tokens, width)), block).bytes


WRONG_BYTES = {
    "no copies": (bytes_by_formula(copies=0), "bf16-mixed", "cast copies"),
    "one copy": (bytes_by_formula(copies=1), "bf16-mixed", "One weight matrix"),
    "LayerNorm in 16 bits": (bytes_by_formula(norm_mixed=2), "bf16-mixed", "LayerNorm runs in fp32"),
    "both": (bytes_by_formula(norm_mixed=2, copies=0), "bf16-mixed", "Two things"),
    "copies in fp32": (bytes_by_formula(copies=4), "bf16-mixed", "in 16 bits, not in 32"),
    "the first Linear's input in fp32": (
        lambda p, t, w: bytes_by_formula()(p, t, w) + 2 * t * w * ("mixed" in p),
        "bf16-mixed",
        "keeps that copy",
    ),
    "GELU's input in fp32": (
        lambda p, t, w: bytes_by_formula()(p, t, w) + 8 * t * w * ("mixed" in p),
        "bf16-mixed",
        "GELU takes",
    ),
    "the unit's 28": (
        lambda p, t, w: 28 * t * w if "mixed" in p else bytes_by_formula()(p, t, w),
        "28 bytes",
        "apart",
    ),
    "per element": (bytes_by_formula(per_element=True), "one element"),
    "the weights": (bytes_by_formula(weights=2), "there anyway"),
    "no second wide one": (bytes_by_formula(tensors=(1, 1, 4, 0)), "four times as wide"),
    "no second narrow one": (bytes_by_formula(tensors=(1, 0, 4, 4)), "block's width"),
    "the output": (bytes_by_formula(extra=1), "last layer"),
    "a third wide one": (bytes_by_formula(extra=4), "four times as wide"),
    "all narrow": (bytes_by_formula(tensors=(1, 1, 1, 1)), "one by one"),
    "nan": (lambda *_: math.nan, "is nan"),
    "inf": (lambda *_: math.inf, "is inf"),
    "runs the block": (run_the_block, "by arithmetic alone"),
    "nothing": (lambda *_: None, "return"),
    "KiB": (lambda p, t, w: bytes_by_formula()(p, t, w) / 1024, "off"),
}
NUMBERS_OF_TOKENS = {
    "numpy": lambda w: np.int64(8 * w // 9) + 1,
    "a float": lambda w: math.floor(8 * w / 9 + 1e-9) + 1.0,
    "a tensor": lambda w: torch.tensor(8 * w // 9 + 1),
    "searched": lambda w: next(t for t in range(1, 10**6) if 18 * t * w > 16 * w * w),
}
WRONG_NUMBERS_OF_TOKENS = {
    "as many": (lambda w: math.ceil(8 * w / 9), "36", "not fewer", "as many"),
    "the width": (lambda w: w, "one token less", "smallest"),
    "22 for 40": (lambda w: 16 * w // 20 + 1, "not fewer"),
    "not whole": (lambda w: 8 * w / 9 + 1.01, "whole number"),
    "zero": (lambda w: 0, "at least 1"),
    "a lookup": (lambda w: {36: 33, 32: 29, 64: 57, 100: 89}.get(w, 40), "width 27"),
    "nan": (lambda w: math.nan, "is nan"),
    "inf": (lambda w: math.inf, "is inf"),
    "a rounded constant": (lambda w: int(0.889 * w) + 1, "width 1000", "889"),
    "far too many": (lambda w: 5 * 10**7, "far too many"),
    "more still": (lambda w: 16 * w**3, "far too many"),
    "nothing": (lambda w: None, "return"),
}


@pytest.mark.parametrize("answer", named(BYTES))
def test_saved_bytes_accepts(answer, verdict):
    assert verdict("saved_bytes", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), attacks(WRONG_BYTES))
def test_saved_bytes_rejects(answer, words, rejects):
    rejects("saved_bytes", answer, *words)


@pytest.mark.parametrize("answer", named(NUMBERS_OF_TOKENS))
def test_break_even_accepts(answer, verdict):
    assert verdict("break_even", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), attacks(WRONG_NUMBERS_OF_TOKENS))
def test_break_even_rejects(answer, words, rejects):
    rejects("break_even", answer, *words)


# --- Task 6 ---------------------------------------------------------------------------------------------------------


def broken_by(stages=checks.STAGES, is_broken=lambda t: not t.isfinite().all(), steps=1, zero=True, biases=True):
    """The tool of task 6 with some stages left out, reordered, or judged differently."""

    def first_broken(model, loss_fn, optimizer, inputs, targets):
        if zero:
            optimizer.zero_grad()
        logits = model(inputs)
        loss = loss_fn(logits, targets)
        loss.backward()
        looked_at = [p for name, p in model.named_parameters() if biases or "weight" in name]
        found = {"logits": [logits], "loss": [loss]}
        found["gradients"] = [p.grad.clone() for p in looked_at if p.grad is not None]
        for _ in range(steps):
            optimizer.step()
        found["weights"] = looked_at
        return next((stage for stage in stages if any(is_broken(t) for t in found[stage])), None)

    return first_broken


def at_once(model, loss_fn, optimizer, inputs, targets):
    """Return as soon as something is broken, before the step if need be."""
    model.zero_grad(set_to_none=False)
    logits = model(inputs)
    if torch.any(~torch.isfinite(logits)):
        return "logits"
    loss = loss_fn(logits, targets)
    if not math.isfinite(loss):
        return "loss"
    loss.backward()
    if not all(p.grad is None or np.isfinite(p.grad.numpy()).all() for p in model.parameters()):
        return "gradients"
    optimizer.step()
    flat = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    return None if torch.isfinite(flat).all() else "weights"


def by_the_norm(model, loss_fn, optimizer, inputs, targets):
    """All gradients as one number, as clipping reports them."""
    optimizer.zero_grad()
    logits = model(inputs)
    loss = loss_fn(logits, targets)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    optimizer.step()
    stages = {"logits": [logits], "loss": [loss], "gradients": [norm], "weights": model.parameters()}
    return next((stage for stage, found in stages.items() if any(not t.isfinite().all() for t in found)), None)


DIAGNOSES = {
    "all at the end": broken_by(),
    "at once": at_once,
    "by difference": broken_by(is_broken=lambda t: (t - t != 0).any()),
    "in numpy": broken_by(is_broken=lambda t: not np.isfinite(t.detach().float().numpy()).all()),
}
WRONG_DIAGNOSES = {
    "never the weights": (broken_by(stages=("logits", "loss", "gradients")), "optimizer.step()"),
    "no step": (broken_by(steps=0), "optimizer.step()"),
    "two steps": (broken_by(steps=2), "makes 2 steps"),
    "old gradients": (broken_by(zero=False), "zero_grad"),
    "the largest only": (broken_by(is_broken=lambda t: not t.max().isfinite()), "far below zero"),
    "the norm of each": (broken_by(is_broken=lambda t: not t.norm().isfinite()), "nothing breaks", "not a sum"),
    "the first of several only": (
        broken_by(is_broken=lambda t: not (t if len(t.shape) < 2 or t.shape[1] == 1 else t[:, :1]).isfinite().all()),
        "second gradient",
    ),
    "inf only": (broken_by(is_broken=lambda t: t.isinf().any()), "as well as nan"),
    "nan only": (broken_by(is_broken=lambda t: t.isnan().any()), "inf"),
    "all must be broken": (broken_by(is_broken=lambda t: not t.isfinite().any()), "all elements"),
    "from the end": (broken_by(stages=("weights", "gradients", "loss", "logits")), "in the order"),
    "without the logits": (broken_by(stages=("loss", "gradients", "weights")), "'logits' broke first"),
    "large numbers": (broken_by(is_broken=lambda t: t.abs().max() > 1 or not t.isfinite().all()), "finite number"),
    "of a sum": (broken_by(is_broken=lambda t: not t.sum().isfinite()), "nothing breaks", "not a sum"),
    "of the norm": (by_the_norm, "whose norm", "not a sum"),
    "the last one only": (broken_by(is_broken=lambda t: not t.flatten()[-1].isfinite()), "in the middle"),
    "the first one only": (broken_by(is_broken=lambda t: not t.flatten()[0].isfinite()), "logits"),
    "no biases": (broken_by(biases=False), "bias"),
    "nothing ever": (lambda *_: None, "makes no step"),
    "always logits": (lambda *_: "logits", "nothing breaks"),
    "other words": (lambda *_: "optimizer", "'logits'", "'weights'"),
    "a flag": (lambda *_: False, "None"),
    "a list": (lambda *_: ["logits"], "None"),
}


@pytest.mark.parametrize("answer", named(DIAGNOSES))
def test_first_broken_accepts(answer, verdict):
    assert verdict("first_broken", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), attacks(WRONG_DIAGNOSES))
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


def lost_eps(g: torch.Tensor, eps: float) -> bool:
    return torch.tensor(eps, dtype=g.dtype) == 0


def through_the_function(gradients, eps, beta2):
    """Adam without an optimizer object."""
    weights, first, second = torch.ones_like(gradients), *torch.zeros(2, *gradients.shape, dtype=gradients.dtype)
    settings = dict(amsgrad=False, beta1=0.9, beta2=beta2, lr=1e-3, weight_decay=0.0, eps=eps, maximize=False)
    functional.adam([weights], [gradients], [first], [second], [], [torch.tensor(0.0)], **settings)
    return (~weights.isfinite()).sum()


RIGHT_LOST = lost_where(stored_v)
LOST = {
    "through double precision": RIGHT_LOST,
    "in the format itself": lost_where(lambda g, beta2: g * g * (1 - beta2)),
    "numpy's sum": lambda g, eps, beta2: np.sum(((stored_v(g, beta2).sqrt() + torch.tensor(eps).to(g)) == 0).numpy()),
    "a tensor": lambda g, eps, beta2: ((stored_v(g, beta2) == 0) & (torch.tensor(eps, dtype=g.dtype) == 0)).sum(),
    "a float": lambda g, eps, beta2: float(RIGHT_LOST(g, eps, beta2)),
    "one by one": lambda g, eps, beta2: sum(RIGHT_LOST(x, eps, beta2) for x in g),
}
WRONG_LOST = {
    "none": (lambda g, eps, beta2: 0, "rounds to zero"),
    "where v is zero": (lambda g, eps, beta2: int((stored_v(g, beta2) == 0).sum()), "eps saves"),
    "eps in double": (lost_where(stored_v, lambda v, eps: v.double().sqrt() + eps), "rounds to zero"),
    "g squared": (lost_where(lambda g, beta2: (g.double() ** 2).to(g.dtype)), "1 - beta2"),
    "no zeros": (lost_where(stored_v, and_also=lambda g: g != 0), "0 / 0"),
    "zeros only": (lambda g, eps, beta2: int((g == 0).sum()) if lost_eps(g, eps) else 0, "zero far"),
    "a threshold": (lambda g, eps, beta2: int((g.abs() < 1e-3).sum()) if g.dtype == FP16 and eps < 3e-8 else 0,
                    "(1 - beta2)"),
    "fp16 only": (lambda g, eps, beta2: RIGHT_LOST(g, eps, beta2) if g.dtype == FP16 else 0, "eps itself"),
    "eps zero below 2^-24": (
        lambda g, eps, beta2: int((stored_v(g, beta2) == 0).sum())
        if eps < torch.finfo(g.dtype).smallest_normal * torch.finfo(g.dtype).eps else 0,
        "eps=4e-08", "Adam loses 0",
    ),
    "the move in the format": (
        lambda g, eps, beta2: int(
            (~(g / (stored_v(g, beta2).sqrt() + torch.tensor(eps, dtype=g.dtype))).isfinite()).sum()
        ),
        "A long move is finite too",
    ),
    "runs Adam": (lambda g, eps, beta2: int(checks.first_adam_step(g, eps, beta2).isnan().sum()), "an optimizer"),
    "runs Adam as a function": (through_the_function, "an optimizer"),
    "nan": (lambda g, eps, beta2: math.nan, "is nan"),
    "nothing": (lambda g, eps, beta2: None, "return"),
    "all": (lambda g, eps, beta2: 400, "you predict 400"),
    "the mask": (lambda g, eps, beta2: g == 0, "one number"),
    "zeroes its input": (lambda g, eps, beta2: int((g.zero_() == 0).sum()), "you predict 400"),
}  # fmt: skip


@pytest.mark.parametrize("answer", named(LOST))
def test_weights_lost_accepts(answer, verdict):
    assert verdict("weights_lost", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), attacks(WRONG_LOST))
def test_weights_lost_rejects(answer, words, rejects):
    rejects("weights_lost", answer, *words)


@pytest.mark.parametrize("eps", [5.5e-4, 6e-4, 1e-3, np.float32(1e-3), torch.tensor(2e-3), 5e-3, Fraction(1, 1000)])
def test_safe_eps_accepts(eps, verdict):
    assert verdict("safe_eps", lambda: eps) == "correct"


@pytest.mark.parametrize(
    ("eps", "words"),
    [
        (1e-8, ("are lost", "rounds")),
        (1e-7, ("weights move by more than 10", "learning rates")),
        (1e-4, ("learning rates", "lr * g / eps")),
        (4.9e-4, ("weights move by more than 10",)),
        (5.4e-4, ("400 of 400 weights move by more than 10",)),
        (3e-2, ("0.01", "smallest eps")),
        (1.0, ("0.01",)),
        (0, ("positive",)),
        (-1e-3, ("positive",)),
        (math.nan, ("nan",)),
        (math.inf, ("inf",)),
        ([1e-3], ("number",)),
        (None, ("return",)),
    ],
)
def test_safe_eps_rejects(eps, words, rejects):
    rejects("safe_eps", lambda: eps, *words)


# --- Task 8 ---------------------------------------------------------------------------------------------------------


def scale_by(sizes=None, power=True, only_up=False, factor=1.0, survive=None, range_=range(-400, 400)):
    """The scale of task 8 with what it looks at, the rounding to a power of two, or the test of survival changed."""

    def choose_scale(gradients):
        found = torch.cat([g.flatten() for g in gradients]).abs() if sizes is None else sizes(gradients)
        found = found[found > 0].double()
        if not len(found):
            return 1.0
        scale = 65519 / found.max().item()
        scale = 2.0 ** math.floor(math.log2(scale)) if power else scale
        scale = (max(scale, 1.0) if only_up else scale) * factor
        alive = (found * scale).half().min() > 0 if survive is None else survive(found.min().item() * scale)
        return scale if alive and math.log2(scale) // 1 in range_ else None

    return choose_scale


def smallest_that_works(gradients):
    for exponent in range(-140, 140):
        scaled = [(g.double() * 2.0**exponent).float().half() for g in gradients]
        alive = all(((s != 0) | (g == 0)).all() for s, g in zip(scaled, gradients, strict=True))
        if alive and all(s.isfinite().all() for s in scaled):
            return 2**exponent
    return None


def in_numpy(end):
    """The largest scale with which all gradients stay below `end`."""

    def choose(gradients):
        f = np.abs(np.concatenate([g.numpy().ravel() for g in gradients])).astype(np.float64)
        if not f.any():
            return np.float32(1)
        scale = 2.0 ** (np.ceil(np.log2(end / f.max())) - 1)
        return scale if (f[f > 0] * scale).min() > 2.0**-25 else None

    return choose


def keeps_nothing(gradients):
    scale = scale_by()(gradients)
    for g in gradients:
        g.zero_()
    gradients.clear()
    return scale


SCALES = {
    "the largest": scale_by(),
    "the smallest": smallest_that_works,
    "in numpy": in_numpy(65520),
    "a tensor": lambda gradients: (s := scale_by()(gradients)) and torch.tensor(s, dtype=FP64),
    "its input destroyed": keeps_nothing,
}
SIZES = {24: 2.0**25, 33: 2.0**20, 20: 1.0, 15: 2.0**-10}
WRONG_SCALES = {
    "up to finfo.max only": (in_numpy(65504), "rounds down to 65504", "2^0 would do", "65504 at most"),
    "up to 65536": (in_numpy(65536), "not below 65536", "overflow"),
    "65536": (lambda gradients: 65536.0, "overflow", "largest"),
    "one": (lambda gradients: 1.0, "become zero", "smallest"),
    "no power": (scale_by(power=False), "power of two"),
    "finfo.tiny": (scale_by(survive=lambda s: s >= torch.finfo(FP16).tiny), "None", "2^-24"),
    "2^-24, not 2^-25": (scale_by(survive=lambda s: s >= 2.0**-24), "rounds up", "above 2^-25"),
    "2^-25 itself": (scale_by(factor=0.5, survive=lambda s: s >= 2.0**-25), "whole range", "above 2^-25"),
    "only up": (scale_by(only_up=True), "too large", "overflow"),
    "whatever is lost": (scale_by(survive=lambda s: True), "spread too far", "return None"),
    "the first tensor": (scale_by(sizes=lambda gradients: gradients[0].flatten().abs()), "all tensors"),
    "without abs": (scale_by(sizes=lambda gradients: torch.cat([g.flatten() for g in gradients])), "sign"),
    "half of it": (scale_by(factor=0.5), "whole range is needed"),
    "a short range": (scale_by(range_=range(-8, 12)), "would do"),
    "a range too short for 1e-30": (scale_by(range_=range(-140, 90)), "the tiniest", "would do"),
    "the exponent": (lambda g: (s := scale_by()(g)) and math.log2(s), "2.0 **"),
    "by their number": (lambda g: SIZES.get(sum(t.numel() for t in g), 1.0), ""),
    "inf": (lambda gradients: math.inf, "inf"),
    "nan": (lambda gradients: math.nan, "nan"),
    "zero": (lambda gradients: 0.0, "no scale"),
    "zero where none will do": (lambda gradients: scale_by()(gradients) or 0.0, "spread too far", "return None"),
    "negative": (lambda gradients: -(scale_by()(gradients) or 1.0), "no scale"),
    "none": (lambda gradients: None, "would do"),
}


@pytest.mark.parametrize("answer", named(SCALES))
def test_choose_scale_accepts(answer, verdict):
    assert verdict("choose_scale", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), attacks(WRONG_SCALES))
def test_choose_scale_rejects(answer, words, rejects):
    rejects("choose_scale", answer, *words)


@pytest.mark.parametrize("said_of_zeros", [0.0, None])
def test_choose_scale_says_that_any_power_will_do_for_zeros(said_of_zeros, rejects, solution):
    def choose_scale(gradients):
        return solution["choose_scale"](gradients) if any(g.any() for g in gradients) else said_of_zeros

    rejects("choose_scale", choose_scale, "any power of two will do")


# --- Task 9 ---------------------------------------------------------------------------------------------------------

RIGHT = {"V100": "16-mixed", "H100": "bf16-mixed", "laptop": "32-true", "server": "bf16-mixed"}


@pytest.mark.parametrize("name", RIGHT)
def test_machines_gives_a_reason_for_every_wrong_setting(name, verdict):
    for wrong in set(SETTINGS) - {RIGHT[name]}:
        said = verdict("machines", lambda wrong=wrong: {**RIGHT, name: wrong})
        assert said.startswith(f"not yet right. {name}: not {wrong!r}.") and len(said.split()) > 12, said


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({**RIGHT, "V100": "bf16-mixed"}, ("emulates",)),
        ({**RIGHT, "H100": "16-mixed"}, ("scaling",)),
        ({**RIGHT, "laptop": "bf16-mixed"}, ("AVX2",)),
        ({**RIGHT, "server": "32-true"}, ("AMX",)),
        ({"V100": "16-mixed"}, ("H100",)),
        ({**RIGHT, "laptop": "bf16"}, ("none of the options",)),
        ({**RIGHT, "laptop": ["32-true"]}, ("none of the options",)),
        (list(RIGHT.values()), ("dictionary",)),
    ],
)
def test_machines_rejects(chosen, words, rejects):
    rejects("machines", lambda: chosen, *words)


# --- All tasks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [*TASKS, "choose_scale", "machines"])
def test_an_endless_answer_is_stopped(task, verdict, monkeypatch):
    monkeypatch.setattr(getattr(checks, task), "seconds", 0.3)
    endless = defined("def answer(*given):\n    while True:\n        given = given", "<endless>", __name__="made")
    assert "had not ended after 0.3 s at the line `" in verdict(task, endless["answer"])
