"""The checks of exercise 10 accept what is right in any style, see a stub, and name the fault of what is wrong."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from notebook_answers import attacks, named
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from speedlab.checks import capstone as checks

NAME = "exercise-10-capstone.ipynb"
TASKS = ("diagnoses", "clip", "step", "attention", "at_most", "contradicted", "plan")


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_is_correct_and_the_stub_not_attempted(task, solution, stub, verdict):
    assert verdict(task, solution[task]) == "correct"
    assert verdict(task, stub[task]) == "not attempted yet"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("value", [None, "text", math.nan, (), {}], ids=str)
def test_answers_of_no_use_are_refused(task, value, verdict):
    said = verdict(task, lambda *given: value)
    assert said.startswith("not yet right.") and "The check cannot go on" not in said, said


# --- The choices ----------------------------------------------------------------------------------------------------

DIAGNOSES = {"A": "the host waits", "B": "work that nobody uses", "C": "bytes kept for backward"}
REPORT = {
    "fused": "most of the time is in the products",
    "zeros": "FLOPs unchanged",
    "checkpoint": "FLOPs higher",
    "batch": "it is right",
}


@pytest.mark.parametrize(("task", "right", "options"), [
    ("diagnoses", DIAGNOSES, checks.SEEN), ("contradicted", REPORT, checks.REFUTED),
])  # fmt: skip
def test_every_wrong_choice_is_refused_with_a_reason(task, right, options, verdict):
    assert verdict(task, lambda: dict(reversed(right.items()))) == "correct"
    for name, choice in itertools.product(right, options):
        if right[name] != choice:
            said = verdict(task, lambda: {**right, name: choice})  # noqa: B023
            assert f"{name}: not {choice!r}. " in said and len(said.split(". ", 2)[2]) > 20, said
    assert "no choice for" in verdict(task, lambda: {})
    assert "none of the options" in verdict(task, lambda: {**right, next(iter(right)): "magic"})


# --- Patient A ------------------------------------------------------------------------------------------------------


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def with_norm(norm_of, factor_of=lambda norm, limit: (limit / norm.clamp(min=1e-20)).clamp(max=1), back=lambda n: n):
    """The solution by hand, with its parts as options."""

    def clip(model, limit):
        norm = norm_of(gradients(model))
        factor = factor_of(norm, limit)
        for grad in gradients(model):
            grad.mul_(factor)
        return back(norm)

    return clip


def squares(grads):
    return sum(g.square().sum() for g in grads).sqrt()


def stacked(grads):
    return torch.stack([g.norm() for g in grads]).norm()


def foreach(model, limit):
    grads = gradients(model)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, torch.clamp(limit / (norm + 1e-12), max=1.0))
    return norm


def two_calls(model, limit):
    norm = nn.utils.get_total_norm(gradients(model))
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm


def assigned(model, limit):
    norm = stacked(gradients(model))
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad * torch.where(norm > limit, limit / norm, 1.0)
    return norm


def with_norm_set(model, limit):
    norm = stacked(gradients(model))
    for grad in gradients(model):
        grad.set_(grad * (limit / (norm + 1e-12)).clamp(max=1))
    return norm


CLIPS = {
    "squares": with_norm(squares),
    "stacked": with_norm(stacked),
    "one long vector": with_norm(lambda grads: torch.cat([g.flatten() for g in grads]).norm()),
    "linalg": with_norm(lambda grads: torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads]))),
    "hypot": with_norm(lambda grads: torch.stack([g.norm() for g in grads]).square().sum().sqrt()),
    "minimum": with_norm(stacked, lambda n, limit: torch.minimum(limit / (n + 1e-12), torch.ones_like(n))),
    "min with a tensor": with_norm(stacked, lambda n, limit: torch.min(limit / (n + 1e-12), torch.tensor(1.0))),
    "where": with_norm(stacked, lambda n, limit: torch.where(n > limit, limit / n, torch.ones(()))),
    "where with a number": with_norm(stacked, lambda n, limit: torch.where(n > limit, limit / n, 1.0)),
    "over a maximum": with_norm(stacked, lambda n, limit: limit / n.clamp(min=limit)),
    "torch.maximum": with_norm(stacked, lambda n, limit: limit / torch.maximum(n, torch.tensor(limit))),
    "a detached norm": with_norm(stacked, back=torch.detach),
    "a clone": with_norm(stacked, back=torch.clone),
    "one element": with_norm(stacked, back=lambda n: n.reshape(1)),
    "double": with_norm(stacked, back=torch.Tensor.double),
    "foreach": foreach,
    "two calls": two_calls,
    "an epsilon, also returned": with_norm(lambda grads: nn.utils.get_total_norm(grads) + 1e-6),
    "an epsilon under the root": with_norm(lambda grads: (sum(g.square().sum() for g in grads) + 1e-8).sqrt()),
    "torch's own": lambda model, limit: nn.utils.clip_grad_norm_(model.parameters(), limit),
    "torch's, by name": lambda model, limit: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=limit),
    "torch's, foreach off": lambda model, limit: nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=False),
    "torch's, a list": lambda model, limit: nn.utils.clip_grad_norm_(list(model.parameters()), limit, 2.0),
}


def by_numpy(read):
    def clip(model, limit):
        norm = np.linalg.norm([np.linalg.norm(read(grad)) for grad in gradients(model)])
        for grad in gradients(model):
            grad.mul_(min(1.0, limit / (norm + 1e-12)))
        return norm

    return clip


def deciding(model, limit):
    norm = stacked(gradients(model))
    if norm > limit:
        torch._foreach_mul_(gradients(model), limit / norm)
    return norm


def each_alone(model, limit):
    norm = stacked(gradients(model))
    for grad in gradients(model):
        grad.mul_((limit / (grad.norm() + 1e-12)).clamp(max=1))
    return norm


def with_weights(model, limit):
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)
    return norm


def filled(model, limit):
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    return nn.utils.clip_grad_norm_(model.parameters(), limit)


def wasteful(model, limit):
    for _ in range(9):
        [g.abs() for g in gradients(model)]
    return nn.utils.clip_grad_norm_(model.parameters(), limit)


WRONG_CLIPS = {
    "patient A": (checks.slow_clip, "waits"),
    "an if": (deciding, "clamp a factor"),
    "float at the end": (with_norm(stacked, back=float), "waits"),
    "tolist": (with_norm(stacked, back=lambda n: n.tolist()), "waits"),
    "numpy": (with_norm(stacked, back=lambda n: n.numpy()), "waits"),
    "on the host": (with_norm(stacked, back=lambda n: n.cpu()), "waits"),
    "bool": (with_norm(stacked, lambda n, limit: limit / n if bool(n > limit) else 1.0), "waits"),
    "each tensor alone": (each_alone, "each tensor by itself"),
    "by value": (
        lambda m, limit: (stacked(gradients(m)), nn.utils.clip_grad_value_(m.parameters(), limit))[0],
        "factor",
    ),
    "norm of norms added": (with_norm(lambda grads: sum(g.norm() for g in grads)), "root of the sum of all squares"),
    "the largest element": (
        lambda m, limit: nn.utils.clip_grad_norm_(m.parameters(), limit, norm_type=math.inf),
        "root of the sum of all squares",
    ),
    "norm of ones": (with_norm(lambda grads: sum(g.abs().sum() for g in grads)), "root of the sum"),
    "always to the limit": (with_norm(stacked, lambda n, limit: limit / (n + 1e-12)), "below the limit"),
    "never": (lambda model, limit: stacked(gradients(model)), "unchanged"),
    "upside down": (with_norm(stacked, lambda n, limit: (n / limit).clamp(max=1)), "gradients are not"),
    "half of the limit": (with_norm(stacked, lambda n, limit: (limit / 2 / (n + 1e-12)).clamp(max=1)), "gradients"),
    "the norm afterwards": (with_norm(stacked, back=lambda n: n.clamp(max=0.5)), "before clipping"),
    "the square": (with_norm(stacked, back=torch.square), "before clipping"),
    "a constant": (with_norm(stacked, back=lambda n: 1.0), "before clipping"),
    "weights too": (with_weights, "only the gradients"),
    "none filled with zeros": (filled, "leave those that are None alone"),
    "nan": (with_norm(stacked, back=lambda n: n * math.nan), "nan"),
    "no return": (with_norm(stacked, back=lambda n: None), "None"),
    "a list of norms": (lambda m, limit: [nn.utils.clip_grad_norm_(m.parameters(), limit)] * 2, "number"),
    "assigned": (assigned, "new gradients"),
    "new memory": (with_norm_set, "new gradients"),
    "above 1 only": (with_norm(stacked, lambda n, limit: torch.where(n > 1.0, limit / n, 1.0)), "gradients"),
    "above the limit squared": (
        with_norm(stacked, lambda n, limit: torch.where(n > limit**2, limit / (n + 1e-12), 1.0)),
        "gradients",
    ),
    "a large epsilon": (with_norm(stacked, lambda n, limit: (limit / (n + 1e-2)).clamp(max=1)), "gradients"),
    "many operations": (wasteful, "operations for"),
    "an array": (by_numpy(np.asarray), "waits"),
    "DLPack": (by_numpy(np.from_dlpack), "waits"),
    "a number at the end": (with_norm(stacked, back=lambda n: np.float64(0) + np.asarray(n)), "waits"),
    "an epsilon of 1e-5": (with_norm(stacked, lambda n, limit: (limit / (n + 1e-5)).clamp(max=1)), "small gradients"),
    "no limit below 0.3": (with_norm(stacked, lambda n, limit: (limit / n.clamp(min=0.3)).clamp(max=1)), "gradients"),
    "fourth powers": (
        with_norm(lambda grads: sum(g.double().square().sum() for g in grads).float().square().pow(0.25)),
        "huge gradients",
    ),
}


@pytest.mark.parametrize("answer", named(CLIPS))
def test_clip_accepts(answer, verdict):
    assert verdict("clip", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), attacks(WRONG_CLIPS))
def test_clip_rejects(answer, words, rejects):
    rejects("clip", answer, *words)


# --- Patient B ------------------------------------------------------------------------------------------------------


def trained(
    features=lambda body, x: body(x).detach(),
    zero=lambda optimizer: optimizer.zero_grad(),
    loss_of=F.cross_entropy,
    accuracy_of=lambda logits, labels: (logits.argmax(1) == labels).float().mean(),
    back=lambda loss, accuracy: (loss, accuracy),
    after=lambda body, head: None,
    update=lambda optimizer: optimizer.step(),
    again=False,
):
    """The solution, with its parts as options."""

    def step(body, head, optimizer, inputs, labels):
        zero(optimizer)
        logits = head(features(body, inputs))
        loss = loss_of(logits, labels)
        loss.backward()
        update(optimizer)
        after(body, head)
        shown = head(features(body, inputs)) if again else logits
        return back(loss.detach(), accuracy_of(shown.detach(), labels))

    return step


def without_grad(body, x):
    with torch.no_grad():
        return body(x)


def inference(body, x):
    with torch.inference_mode():
        made = body(x)
    return made.clone()


def switched_off(body, x):
    body.requires_grad_(False)
    return body(x)


def with_grad_mode(body, x):
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    made = body(x)
    torch.set_grad_enabled(before)
    return made


STEPS = {
    "no_grad": trained(without_grad),
    "inference mode": trained(inference),
    "switched off": trained(switched_off),
    "a decorator": trained(torch.no_grad()(lambda body, x: body(x))),
    "grad mode": trained(with_grad_mode),
    "layer by layer": trained(lambda body, x: body[3](body[2](body[1](body[0](x)))) .detach()
                              if not torch.is_grad_enabled() else without_grad(body, x)),
    "eval": trained(lambda body, x: without_grad(body.eval(), x)),
    "detached": trained(),
    "zero to None": trained(zero=lambda o: o.zero_grad(set_to_none=True)),
    "zero in place": trained(zero=lambda o: o.zero_grad(set_to_none=False)),
    "a module": trained(without_grad, loss_of=nn.CrossEntropyLoss()),
    "log softmax": trained(without_grad, loss_of=lambda z, y: F.nll_loss(z.log_softmax(1), y)),
    "by hand": trained(without_grad, loss_of=lambda z, y: (z.logsumexp(1) - z[torch.arange(len(y)), y]).mean()),
    "one-hot": trained(without_grad, loss_of=lambda z, y: F.cross_entropy(z, F.one_hot(y, 5).float())),
    "numbers": trained(without_grad, back=lambda loss, accuracy: (loss.item(), accuracy.item())),
    "a list": trained(without_grad, back=lambda loss, accuracy: [loss, accuracy]),
    "numpy": trained(without_grad, back=lambda loss, accuracy: (loss.numpy(), accuracy.numpy())),
    "a tensor": trained(without_grad, back=lambda loss, accuracy: torch.stack([loss, accuracy])),
    "an array": trained(without_grad, back=lambda loss, accuracy: np.array([loss.item(), accuracy.item()])),
    "eq": trained(without_grad, accuracy_of=lambda z, y: z.argmax(-1).eq(y).double().mean()),
    "a sum": trained(without_grad, accuracy_of=lambda z, y: (z.argmax(1) == y).sum() / len(y)),
    "max": trained(without_grad, accuracy_of=lambda z, y: (z.max(1).indices == y).float().mean()),
    "a fraction": trained(without_grad, accuracy_of=lambda z, y: Fraction(int((z.argmax(1) == y).sum()), len(y))),
}  # fmt: skip


def nothing(*given):
    return None


def worn(body, head):
    with torch.no_grad():
        body[0].weight.mul_(0.9)


def cached(body, inputs):
    if not hasattr(body, "features"):
        body.features = without_grad(body, inputs)
    return body.features


def twice_the_body(body, inputs):
    without_grad(body, inputs)
    return without_grad(body, inputs)


def gradient_of_features(body, inputs):
    return body(inputs).detach().requires_grad_()


def products_switched_off(body, inputs):
    for part in body:
        part.requires_grad_(not isinstance(part, nn.Linear))
    return body(inputs)


def lazily(body, head, optimizer, inputs, labels):
    yield from checks.slow_step(body, head, optimizer, inputs, labels)


def spoiled(body, head, optimizer, inputs, labels):
    found = trained(without_grad)(body, head, optimizer, inputs, labels)
    labels.fill_(0)
    return found


def logits_twice(body, head, optimizer, inputs, labels):
    head(without_grad(body, inputs))
    return trained(without_grad)(body, head, optimizer, inputs, labels)


WRONG_STEPS = {
    "patient B": (checks.slow_step, "no_grad"),
    "gradients of the body": (trained(lambda body, x: body(x)), "no_grad"),
    "eval alone": (trained(lambda body, x: body.eval()(x)), "no_grad"),
    "logits twice": (logits_twice, "more than once"),
    "accuracy after the update": (trained(without_grad, again=True), "before the update"),
    "percent": (trained(without_grad, accuracy_of=lambda z, y: 100 * (z.argmax(1) == y).float().mean()), "share"),
    "number of hits": (trained(without_grad, accuracy_of=lambda z, y: (z.argmax(1) == y).sum()), "accuracy is"),
    "error": (trained(without_grad, accuracy_of=lambda z, y: (z.argmax(1) != y).float().mean()), "accuracy is"),
    "smallest logit": (trained(without_grad, accuracy_of=lambda z, y: (z.argmin(1) == y).float().mean()), "accuracy"),
    "a constant": (trained(without_grad, back=lambda loss, accuracy: (1.6, 0.2)), "loss is"),
    "a sum of losses": (
        trained(without_grad, loss_of=lambda z, y: F.cross_entropy(z, y, reduction="sum")),
        "loss is",
    ),
    "smoothed": (trained(without_grad, loss_of=lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1)), "loss is"),
    "halved": (trained(without_grad, loss_of=lambda z, y: F.cross_entropy(z, y) / 2), "loss is"),
    "no zero_grad": (trained(without_grad, zero=nothing), "zero_grad"),
    "no update": (trained(without_grad, update=nothing), "head is not"),
    "two updates": (trained(without_grad, update=lambda o: (o.step(), o.step())), "head is not"),
    "the body worn": (trained(without_grad, after=worn), "body"),
    "raw inputs": (trained(lambda body, x: x), "loss is"),
    "without the norm": (trained(lambda body, x: body[:3](x).detach()), "loss is"),
    "one number": (trained(without_grad, back=lambda loss, accuracy: loss), "list of 2"),
    "swapped": (trained(without_grad, back=lambda loss, accuracy: (accuracy, loss)), "loss is"),
    "three things": (trained(without_grad, back=lambda loss, accuracy: (loss, accuracy, 0)), "2 things"),
    "nan": (trained(without_grad, back=lambda loss, accuracy: (loss * math.nan, accuracy)), "nan"),
    "features of the first batch": (trained(cached), "another one in each step"),
    "the body twice": (trained(twice_the_body), "more than once"),
    "a gradient of the features": (trained(gradient_of_features), "a gradient of the features"),
    "gradients taken away": (
        trained(lambda body, x: body(x), after=lambda body, head: body.zero_grad()),
        "still gets",
    ),
    "products without gradients": (trained(products_switched_off), "still gets gradients"),
    "patient B, lazily": (lazily, "FLOPs"),
    "the labels changed": (spoiled, "the batch has changed"),
    "half of the batch": (lambda b, h, o, x, y: trained(without_grad)(b, h, o, x[::2], y[::2]), "loss is"),
}


@pytest.mark.parametrize("answer", named(STEPS))
def test_step_accepts(answer, verdict):
    assert verdict("step", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), attacks(WRONG_STEPS))
def test_step_rejects(answer, words, rejects):
    rejects("step", answer, *words)


# --- Patient C ------------------------------------------------------------------------------------------------------

SDPA = F.scaled_dot_product_attention


def lower(q, dtype=torch.bool):
    return torch.ones(q.shape[2], q.shape[2], dtype=dtype).tril()


def in_pieces(q, k, v):
    """Each row of queries by itself, recomputed in backward."""
    return checkpoint(checks.slow_attention, q, k, v, use_reentrant=False)


ATTENTIONS = {
    "sdpa": lambda q, k, v: SDPA(q, k, v, is_causal=True),
    "dropout 0": lambda q, k, v: SDPA(q, k, v, None, 0.0, True),
    "a scale": lambda q, k, v: SDPA(q, k, v, is_causal=True, scale=q.shape[-1] ** -0.5),
    "scaled before": lambda q, k, v: SDPA(q * q.shape[-1] ** -0.5, k, v, is_causal=True, scale=1.0),
    "contiguous": lambda q, k, v: SDPA(q.contiguous(), k.contiguous(), v.contiguous(), is_causal=True),
    "a clone": lambda q, k, v: SDPA(q, k, v, is_causal=True).clone(),
    "torch.nn.functional": lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    "keywords": lambda q, k, v: SDPA(query=q, key=k, value=v, is_causal=True),
    "no dropout by name": lambda q, k, v: SDPA(q, k, v, dropout_p=0.0, is_causal=True),
    "torch._C": lambda q, k, v: torch._C._nn.scaled_dot_product_attention(q, k, v, is_causal=True),
    "heads as batch": lambda q, k, v: SDPA(*(t.flatten(0, 1)[:, None] for t in (q, k, v)), is_causal=True).view_as(q),
    "heads unflattened": lambda q, k, v: SDPA(*(t.flatten(0, 1)[None] for t in (q, k, v)), is_causal=True).unflatten(
        1, q.shape[:2]
    )[0],
    "stacked before": lambda q, k, v: SDPA(*torch.stack([q, k, v]), is_causal=True),
    "reshaped": lambda q, k, v: SDPA(q, k, v, is_causal=True).reshape(q.shape),
    "times one": lambda q, k, v: SDPA(q, k, v, is_causal=True) * 1.0,
    "no mask": lambda q, k, v: SDPA(q, k, v, attn_mask=None, is_causal=True),
    "not grouped": lambda q, k, v: SDPA(q, k, v, is_causal=True, enable_gqa=False),
    "a helper": lambda *qkv: (lambda a, b, c: SDPA(a, b, c, is_causal=True))(*qkv),
    "one head more, dropped": lambda q, k, v: SDPA(
        *(F.pad(t, (0, 0, 0, 0, 0, 1)) for t in (q, k, v)), is_causal=True
    )[:, :-1],
}


def with_flash(q, k, v):
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        return SDPA(q, k, v, is_causal=True)


ATTENTIONS["a back end"] = with_flash


def at_once(mask, scale=True, softmax=lambda s: s.softmax(-1)):
    def attention(q, k, v):
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale else 1.0)
        return softmax(scores.masked_fill(mask(q), -math.inf)) @ v

    return attention


def future(q):
    return ~lower(q)


WITH_MATRIX = at_once(future)


class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return WITH_MATRIX(q, k, v)

    @staticmethod
    def backward(ctx, slope):
        with torch.enable_grad():
            given = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            return torch.autograd.grad(WITH_MATRIX(*given), given, slope)


def in_chunks(q, k, v):
    """Some queries at a time, computed again in backward."""

    def some(begin, q, k, v):
        hidden = ~lower(k)[begin : begin + q.shape[2]]
        return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -math.inf).softmax(-1) @ v

    parts = [
        checkpoint(some, begin, q[:, :, begin : begin + 64], k, v, use_reentrant=False)
        for begin in range(0, q.shape[2], 64)
    ]
    return torch.cat(parts, 2)


HIDDEN = torch.ones(512, 512, dtype=torch.bool).triu(1)
MADE_BEFORE = at_once(lambda q: HIDDEN[: q.shape[2], : q.shape[2]])

ATTENTIONS |= {
    "vmap": lambda q, k, v: torch.vmap(lambda *one: SDPA(*one, is_causal=True))(q, k, v),
    "a mask made before": lambda q, k, v: checkpoint(MADE_BEFORE, q, k, v, use_reentrant=False),
    "a function of its own": Recomputed.apply,
    "in chunks of queries": in_chunks,
    "checkpointed": lambda q, k, v: checkpoint(WITH_MATRIX, q, k, v, use_reentrant=False),
    "checkpointed, reentrant": lambda q, k, v: checkpoint(WITH_MATRIX, q, k, v, use_reentrant=True),
    "a mask that is none": lambda q, k, v: SDPA(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2])),
}


def on_the_host(q, k, v):
    with torch.autograd.graph.save_on_cpu():
        return WITH_MATRIX(q, k, v)


def out_of_sight(q, k, v):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: [t], lambda kept: kept[0]):
        return WITH_MATRIX(q, k, v)


def in_fours(q, k, v):
    parts = zip(*(t.split(4, 1) for t in (q, k, v)), strict=True)
    return torch.cat([SDPA(*part, is_causal=True) for part in parts], 1)


def loop_with_a_mask_that_is_none(q, k, v):
    mask = causal_lower_right(q.shape[2], k.shape[2])
    return torch.cat(
        [SDPA(*part, attn_mask=mask) for part in zip(*(t.split(1, 1) for t in (q, k, v)), strict=True)], 1
    )


WRONG_ATTENTIONS = {
    "patient C": (checks.slow_attention, "T × T"),
    "all heads, with the matrix": (at_once(future), "T × T"),
    "in fp64, with the matrix": (lambda q, k, v: at_once(future)(*(t.double() for t in (q, k, v))).float(), "T × T"),
    "einsum": (
        lambda q, k, v: torch.einsum("bhts,bhsd->bhtd", (torch.einsum("bhtd,bhsd->bhts", q, k) * q.shape[-1] ** -0.5)
                                     .masked_fill(future(q), -math.inf).softmax(-1), v), "T × T"),
    "columns first, which has no kernel": (
        lambda q, k, v: SDPA(*(t.mT.contiguous().mT for t in (q, k, v)), is_causal=True), "T × T"),
    "a loop over heads": (
        lambda q, k, v: torch.stack([SDPA(q[:, h], k[:, h], v[:, h], is_causal=True) for h in range(q.shape[1])], 1),
        "head"),
    "checkpointed": (in_pieces, "all heads in one call"),
    "saved on the host": (on_the_host, "T × T"),
    "saved out of sight": (out_of_sight, "T × T"),
    "four heads at a time": (in_fours, "all heads in one call"),
    "a loop with a mask that is none": (loop_with_a_mask_that_is_none, "all heads in one call"),
    "not causal": (SDPA, "causal"),
    "causal the wrong way": (lambda q, k, v: SDPA(q, k, v, attn_mask=lower(q).T), "two tokens"),
    "strictly": (lambda q, k, v: SDPA(q.roll(1, 2), k, v, is_causal=True), "not patient C's"),
    "not scaled": (lambda q, k, v: SDPA(q, k, v, is_causal=True, scale=1.0), "root of D"),
    "by D": (lambda q, k, v: SDPA(q, k, v, is_causal=True, scale=1 / q.shape[-1]), "not patient C's"),
    "heads and tokens swapped": (
        lambda q, k, v: SDPA(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2), "mixed up"),
    "detached": (lambda q, k, v: SDPA(q, k, v, is_causal=True).detach(), "no gradient"),
    "detached keys": (lambda q, k, v: SDPA(q, k.detach(), v, is_causal=True), "detached"),
    "detached values": (lambda q, k, v: SDPA(q, k, v.detach(), is_causal=True), "detached"),
    "without grad": (torch.no_grad()(lambda q, k, v: SDPA(q, k, v, is_causal=True)), "no gradient"),
    "values for keys": (lambda q, k, v: SDPA(q, v, k, is_causal=True), "not patient C's"),
    "dropout": (lambda q, k, v: SDPA(q, k, v, dropout_p=0.5, is_causal=True), "not patient C's"),
    "tokens first": (lambda q, k, v: SDPA(q, k, v, is_causal=True).transpose(1, 2), "shape"),
    "heads merged": (lambda q, k, v: SDPA(q, k, v, is_causal=True).transpose(1, 2).flatten(2), "shape"),
    "a tuple": (lambda q, k, v: (SDPA(q, k, v, is_causal=True), None), "return a tensor"),
    "numpy": (lambda q, k, v: SDPA(q, k, v, is_causal=True).detach().numpy(), "return a tensor"),
    "nan": (lambda q, k, v: SDPA(q, k, v, is_causal=True) * math.nan, "not patient C's"),
    "gradient doubled": (lambda q, k, v: 2 * (a := SDPA(q, k, v, is_causal=True)) - a.detach(), "gradients differ"),
    "zeros": (lambda q, k, v: torch.zeros_like(q), "not patient C's"),
}  # fmt: skip


@pytest.mark.parametrize("answer", named(ATTENTIONS))
def test_attention_accepts(answer, verdict):
    assert verdict("attention", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), attacks(WRONG_ATTENTIONS))
def test_attention_rejects(answer, words, rejects):
    rejects("attention", answer, *words)


# --- The report -----------------------------------------------------------------------------------------------------


def left(spent, faster):
    return {part: seconds / faster.get(part, 1.0) for part, seconds in spent.items()}


def speed_up(spent, faster):
    return sum(spent.values()) / sum(left(spent, faster).values())


def in_a_loop(spent, faster):
    before = after = 0
    for part in spent:
        before += spent[part]
        after += spent[part] / faster[part] if part in faster else spent[part]
    return before / after


def by_saving(spent, faster):
    whole = sum(spent.values())
    return whole / (whole - sum(spent[p] - spent[p] / f for p, f in faster.items()))


def by_shares(spent, faster):
    whole = sum(spent.values())
    return 1 / sum(s / whole / faster.get(p, 1) for p, s in spent.items())


def in_place(spent, faster):
    before = sum(spent.values())
    for part, factor in faster.items():
        spent[part] /= factor
    return before / sum(spent.values())


def clearing(spent, faster):
    found = speed_up(spent, faster)
    spent.clear()
    faster.clear()
    return found


SPEED_UPS = {
    "a loop": in_a_loop,
    "what is saved": by_saving,
    "shares": by_shares,
    "in place": in_place,
    "clearing": clearing,
    "fsum": lambda s, f: math.fsum(s.values()) / math.fsum(left(s, f).values()),
    "numpy": lambda s, f: np.sum(list(s.values())) / np.sum([s[p] / f.get(p, 1.0) for p in s]),
    "numpy, divided at once": lambda s, f: (
        sum(s.values()) / (np.array(list(s.values())) / np.array([f.get(p, 1) for p in s])).sum()
    ),
    "a tensor": lambda s, f: torch.tensor(list(s.values())).sum() / torch.tensor(list(left(s, f).values())).sum(),
    "an array of one": lambda s, f: np.array([speed_up(s, f)]),
    "float32": lambda s, f: np.float32(speed_up(s, f)),
    "a double tensor": lambda s, f: torch.tensor([[speed_up(s, f)]], dtype=torch.float64),
    "a fraction": lambda s, f: Fraction(speed_up(s, f)),
    "times the inverse": lambda s, f: sum(s.values()) / sum(t * (1 / f.get(p, 1)) for p, t in s.items()),
    "a merged table": lambda s, f: sum(s.values()) / sum(s[p] / q for p, q in (dict.fromkeys(s, 1.0) | f).items()),
    "by powers": lambda s, f: sum(s.values()) * sum(left(s, f).values()) ** -1,
    "logarithms": lambda s, f: math.exp(math.log(sum(s.values())) - math.log(sum(left(s, f).values()))),
    "two dictionaries": lambda s, f: sum({**s}.values()) / sum({**s, **{p: s[p] / f[p] for p in f}}.values()),
    "rows": lambda s, f: sum(t for _, t in s.items()) / sum([t / f[p] if f.get(p) else t for p, t in s.items()]),
    "a helper": lambda s, f: (lambda whole: whole / (whole - sum(s[p] * (1 - 1 / f[p]) for p in f)))(sum(s.values())),
    "rounded to ten digits": lambda s, f: round(speed_up(s, f), 10),
}
WRONG_SPEED_UPS = {
    "product": (lambda s, f: math.prod(f.values()), "multiply"),
    "largest factor": (lambda s, f: max(f.values(), default=1.0), "before and after"),
    "smallest factor": (lambda s, f: min(f.values(), default=1.0), "seconds"),
    "sum of factors": (lambda s, f: sum(f.values()), "at most"),
    "mean factor": (lambda s, f: sum(f.get(p, 1.0) for p in s) / len(s), "at most"),
    "weighted mean": (lambda s, f: sum(t * f.get(p, 1.0) for p, t in s.items()) / sum(s.values()), "at most"),
    "the share left": (lambda s, f: 1 / speed_up(s, f), "share"),
    "the seconds left": (lambda s, f: sum(left(s, f).values()), "in seconds"),
    "the seconds before": (lambda s, f: sum(s.values()), "at most"),
    "the saving": (lambda s, f: 1 - 1 / speed_up(s, f), "at most"),
    "saved seconds": (lambda s, f: sum(s.values()) - sum(left(s, f).values()), "at most"),
    "others forgotten": (
        lambda s, f: sum(s[p] for p in f) / sum(left(s, f)[p] for p in f) if f else 1.0,
        "leave out",
    ),
    "percent": (lambda s, f: 100 * speed_up(s, f), "at most"),
    "less one": (lambda s, f: speed_up(s, f) - 1, "at most"),
    "rounded": (lambda s, f: round(speed_up(s, f), 1), "at most"),
    "the first part": (lambda s, f: f.get(next(iter(s)), 1.0), "at most"),
    "a constant": (lambda s, f: 1.2069, "at most"),
    "one": (lambda s, f: 1.0, "at most"),
    "infinity": (lambda s, f: math.inf, "inf"),
    "negative": (lambda s, f: -speed_up(s, f), "at most"),
    "a list": (lambda s, f: [speed_up(s, f)], "number"),
    "text in place of a number": (lambda s, f: f"{speed_up(s, f)}x", "number"),
    "slower ones ignored": (lambda s, f: speed_up(s, {p: max(q, 1.0) for p, q in f.items()}), "0.5"),
}


@pytest.mark.parametrize("answer", named(SPEED_UPS))
def test_at_most_accepts(answer, verdict):
    assert verdict("at_most", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), attacks(WRONG_SPEED_UPS))
def test_at_most_rejects(answer, words, rejects):
    rejects("at_most", answer, *words)


# --- The plan -------------------------------------------------------------------------------------------------------


def planner(
    largest=True, overhead_counts=True, full=True, sizes=None, subsets=None, strict=False, worst=False, cost=None
):
    """The solution, with its parts as options."""

    def plan(layers, batch, limit, overhead):
        found = []
        for micro in sizes(batch) if sizes else [m for m in range(1, batch + 1) if batch % m == 0]:
            for again in subsets(layers) if subsets else all_subsets(layers):
                held = micro * sum(g if i in again else s for i, (s, g, _) in enumerate(layers))
                held += micro * max((layers[i][0] for i in again), default=0) if largest else 0
                flops = checks.cost_of(layers, batch, overhead if overhead_counts else 0, micro, again)
                if held < limit or (held == limit and not strict):
                    found.append((cost(layers, micro, again) if cost else flops, -micro, again))
        if not found:
            return None
        best = max(found) if worst else min(found)
        return -best[1], list(best[2])

    return plan


def dearer(more):
    """The plan of an answer that counts `more(batch, overhead, micro, FLOPs computed again)` on top."""

    def plan(layers, batch, limit, overhead):
        def cost(layers, micro, again):
            flops = sum(layers[i][2] for i in again)
            return checks.cost_of(layers, batch, overhead, micro, again) + more(batch, overhead, micro, flops)

        return planner(cost=cost)(layers, batch, limit, overhead)

    return plan


def all_subsets(layers):
    numbers = range(len(layers))
    return [again for size in range(len(layers) + 1) for again in itertools.combinations(numbers, size)]


def largest_of_all(layers, micro, again):
    """The bytes where the largest layer is added, whether it is computed again or not."""
    kept = sum(given if i in again else saved for i, (saved, given, _) in enumerate(layers))
    return micro * (kept + max(saved for saved, *_ in layers) * bool(again))


def fitting(held=checks.peak_of, more=0, sizes=lambda batch: range(1, batch + 1), subsets=None):
    """The plan of an answer that counts its bytes by `held` against `more` than the limit."""

    def plan(layers, batch, limit, overhead):
        pairs = itertools.product(sizes(batch), subsets(layers) if subsets else all_subsets(layers))
        kept = [p for p in pairs if batch % p[0] == 0 and held(layers, *p) <= limit * (1 + more)]
        return min(kept, key=lambda p: checks.cost_of(layers, batch, overhead, *p), default=None)

    return plan


def small_or_all(layers):
    return [again for again in all_subsets(layers) if len(again) <= 2 or len(again) == len(layers)]


def never_the_last_alone(layers):
    return [again for again in all_subsets(layers) if len(layers) - 1 not in again or len(again) == len(layers)]


def twins_together(layers):
    """All layers of a kind, or none."""
    return [again for again in all_subsets(layers) if all((i in again) == (layers.index(x) in again)
            for i, x in enumerate(layers))]  # fmt: skip


def twins_as_one(*case):
    found = planner()(*case)
    return found and (found[0], [case[0].index(case[0][i]) for i in found[1]])


def shaped(form):
    def plan(*case):
        found = planner()(*case)
        return None if found is None else form(*found)

    return plan


def by_bits(layers, batch, limit, overhead):
    best = (math.inf, None)
    for micro in (m for m in range(1, batch + 1) if not batch % m):
        for bits in range(2 ** len(layers)):
            again = [i for i in range(len(layers)) if bits >> i & 1]
            if checks.peak_of(layers, micro, again) <= limit:
                best = min(best, (checks.cost_of(layers, batch, overhead, micro, again), (micro, again)))
    return best[1]


def tied_differently(layers, batch, limit, overhead):
    sets = [again for n in range(len(layers) + 1) for again in itertools.combinations(range(len(layers)), n)]
    plans = itertools.product([m for m in range(1, batch + 1) if batch % m == 0], sets)
    fitting = [p for p in plans if checks.peak_of(layers, *p) <= limit]
    return max(fitting, key=lambda p: (-checks.cost_of(layers, batch, overhead, *p), p), default=None)


PLANS = {
    "options": planner(),
    "by bits": by_bits,
    "another of equals": tied_differently,
    "a tuple": shaped(lambda micro, again: (micro, tuple(again))),
    "a list": shaped(lambda micro, again: [micro, again]),
    "a set": shaped(lambda micro, again: (micro, set(again))),
    "a frozen set": shaped(lambda micro, again: (micro, frozenset(again))),
    "reversed": shaped(lambda micro, again: (micro, again[::-1])),
    "a generator": shaped(lambda micro, again: (micro, (i for i in again))),
    "a map": shaped(lambda micro, again: (micro, map(int, again))),
    "numpy's numbers": shaped(lambda micro, again: (np.int64(micro), [np.int64(i) for i in again])),
    "an array": shaped(lambda micro, again: (micro, np.array(again, int))),
    "a tensor": shaped(lambda micro, again: (micro, torch.tensor(again, dtype=torch.long))),
    "a tensor of one": shaped(lambda micro, again: (torch.tensor(micro), again)),
    "floats": shaped(lambda micro, again: (float(micro), [float(i) for i in again])),
    "fractions": shaped(lambda micro, again: (Fraction(micro), again)),
    "keys": shaped(lambda micro, again: (micro, dict.fromkeys(again).keys())),
    "an iterator of two": shaped(lambda micro, again: iter((micro, again))),
    "twice the same": shaped(lambda micro, again: (micro, again + again)),
    "from the largest": planner(sizes=lambda batch: [m for m in range(batch, 0, -1) if batch % m == 0]),
    "sorted layers": planner(subsets=lambda layers: sorted(all_subsets(layers))),
    "one that clears": lambda layers, *rest: (planner()(list(layers), *rest), layers.clear())[0],
}
WRONG_PLANS = {
    "the largest forgotten": (planner(largest=False), "add the largest"),
    "no overhead": (planner(overhead_counts=False), "larger micro-batches"),
    "nothing again": (planner(subsets=lambda layers: [()]), "micro-batches"),
    "everything again": (planner(subsets=lambda layers: [tuple(range(len(layers)))]), "fewer layers"),
    "one sample at a time": (planner(sizes=lambda batch: [1]), "larger micro-batches"),
    "the whole batch only": (planner(sizes=lambda batch: [batch]), "None"),
    "powers of two": (planner(sizes=lambda batch: [m for m in (1, 2, 4, 8) if batch % m == 0]), "batch=12"),
    "any size": (planner(sizes=lambda batch: range(1, batch + 1)), "divide"),
    "strictly below": (planner(strict=True), "960 bytes, which is allowed"),
    "never all layers": (
        planner(
            subsets=lambda layers: [
                c for n in range(len(layers)) for c in itertools.combinations(range(len(layers)), n)
            ]
        ),
        "try that set",
    ),
    "the dearest": (planner(worst=True), "costs"),
    "never the whole batch": (
        planner(sizes=lambda batch: [m for m in range(1, batch) if batch % m == 0]),
        "larger micro-batches",
    ),
    "four times for a layer again": (dearer(lambda batch, overhead, micro, again: 3 * batch * again), "costs"),
    "no overhead for a whole batch": (
        dearer(lambda batch, overhead, micro, again: -overhead * (micro == batch)),
        "costs",
    ),
    "fewest layers": (planner(cost=lambda layers, micro, again: len(again)), "micro-batches"),
    "largest micro-batch": (planner(cost=lambda layers, micro, again: -micro), "again"),
    "bytes instead of FLOPs": (
        planner(cost=lambda layers, micro, again: checks.peak_of(layers, micro, again)),
        "cost",
    ),
    "prefixes": (planner(subsets=lambda layers: [tuple(range(n)) for n in range(len(layers) + 1)]), "again"),
    "one layer at most": (planner(subsets=lambda layers: [(), *((i,) for i in range(len(layers)))]), "micro-batches"),
    "counted from one": (shaped(lambda micro, again: (micro, [i + 1 for i in again])), "your plan"),
    "names": (shaped(lambda micro, again: (micro, [f"layer {i}" for i in again])), "number"),
    "flags": (lambda *case: (f := planner()(*case)) and (f[0], [i in f[1] for i in range(len(case[0]))]), "number"),
    "number of micro-batches": (lambda *case: (f := planner()(*case)) and (case[1] // f[0], f[1]), "plan"),
    "None always": (lambda *case: None, "plans fit"),
    "never None": (lambda *case: planner()(*case) or (1, []), "return None"),
    "an empty list": (lambda *case: planner()(*case) or [], "return None"),
    "zero": (shaped(lambda micro, again: (0, again)), "at least 1"),
    "too large": (shaped(lambda micro, again: (micro * 1000, again)), "far too many"),
    "micro-batch only": (shaped(lambda micro, again: micro), "list of 2"),
    "halves": (shaped(lambda micro, again: (micro + 0.5, again)), "whole number"),
    "a visible case": (lambda *case: (8, []), "bytes"),
    "the largest of all added": (fitting(largest_of_all), "costs"),
    "computed again for one micro-batch": (dearer(lambda b, overhead, m, again: (m - b) * again), "costs"),
    "two layers at most, or all": (fitting(subsets=small_or_all), "costs"),
    "never the last alone": (fitting(subsets=never_the_last_alone), "costs"),
    "never one sample": (fitting(sizes=lambda batch: range(2, batch + 1) if batch > 1 else [1]), "plan"),
    "twins as one": (twins_as_one, "plan"),
    "twins together": (fitting(subsets=twins_together), "costs"),
    "a hundredth more": (fitting(more=0.01), "bytes"),
}


@pytest.mark.parametrize("answer", named(PLANS))
def test_plan_accepts(answer, verdict):
    assert verdict("plan", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), attacks(WRONG_PLANS))
def test_plan_rejects(answer, words, rejects):
    rejects("plan", answer, *words)


@pytest.mark.parametrize("task", ["clip", "step", "attention", "at_most", "plan"])
def test_an_endless_answer_is_stopped(task, verdict, monkeypatch):
    def endless(*given):
        while True:
            pass

    monkeypatch.setattr(getattr(checks, task), "seconds", 0.3)
    assert "had not ended" in verdict(task, endless)
