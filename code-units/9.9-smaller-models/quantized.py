"""Helpers for the notebook on quantization: int8 modules, an 8-bit AdamW, a counter of bytes, figures."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from speedlab import data, plots
from speedlab.data import models


class Int8Linear(nn.Module):
    """A Linear layer that stores integers (out, in) and scales, and rebuilds fp32 weights from them in every call."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.codes * self.scale, self.bias)


class Int8Embedding(Int8Linear):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.codes[tokens] * self.scale.expand(len(self.codes), 1)[tokens]


def to_int8(model: nn.Module, quantize: Callable, *, words: bool = True, **how) -> nn.Module:
    """A copy of a DistilBERT, Linear layers quantized; `words` adds the word embeddings and the head tied to them."""
    small = copy.deepcopy(model)
    for name, part in list(small.named_modules()):
        if isinstance(part, nn.Linear) and (words or name != "vocab_projector"):
            small.set_submodule(name, Int8Linear(*quantize(part.weight.detach(), **how), part.bias))
    if words:  # the last layer's weight is the same table
        head = small.vocab_projector
        small.set_submodule("distilbert.embeddings.word_embeddings", Int8Embedding(head.codes, head.scale, None))
    return small


def masked_reviews(count: int) -> tuple[nn.Module, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """The small pretrained DistilBERT, inputs with masked tokens (B, T), the mask (B, T), the masked tokens (N,)."""
    from transformers import AutoModelForMaskedLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForMaskedLM.from_pretrained(models.CHECKPOINTS / "distilbert-small").eval()
    tokenizer = models.tokenizer("small")
    batch = tokenizer(data.reviews("generated").test_texts[:count], padding=True, return_tensors="pt")
    tokens = batch["input_ids"]
    chance = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0))
    masked = (chance < 0.15) & (tokens > tokenizer.mask_token_id)
    inputs = {"input_ids": tokens.where(~masked, tokenizer.mask_token_id), "attention_mask": batch["attention_mask"]}
    return model, inputs, masked, tokens[masked]


class AdamW8bit(torch.optim.Optimizer):
    """AdamW that keeps its averages m and v packed: `pack(x, power)` returns a pair of tensors that `unpack` reads.

    `powers` are those for m and v. Tensors of fewer than `smallest` numbers keep m and v in fp32, as in bitsandbytes.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        lr: float,
        *,
        pack: Callable,
        unpack: Callable,
        powers: tuple[int, int] = (1, 4),
        smallest: int = 4096,
    ):
        super().__init__(parameters, {"lr": lr})
        self.pack, self.unpack, self.powers, self.smallest = pack, unpack, powers, smallest

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self._update(p, self.state[p], group["lr"])

    def _update(self, p: torch.Tensor, state: dict, lr: float, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.01) -> None:
        packed = p.numel() >= self.smallest
        averages = []
        for name, power, beta, news in zip("mv", self.powers, (beta1, beta2), (p.grad, p.grad**2), strict=True):
            old = torch.zeros_like(p)
            if state.get(name) is not None:
                old = self.unpack(state[name], state[f"{name}_largest"], power, p) if packed else state[name]
            averages.append(beta * old + (1 - beta) * news)
            if packed:
                state[name], state[f"{name}_largest"] = self.pack(averages[-1], power)
            else:
                state[name] = averages[-1]
        state["t"] = t = state.get("t", 0) + 1
        m, v = averages[0] / (1 - beta1**t), averages[1] / (1 - beta2**t)
        p.mul_(1 - lr * decay).sub_(lr * m / (v.sqrt() + eps))


class _Traffic(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor))
        return out


def traffic(work: Callable[[], object]) -> int:
    """Bytes that the operations of `work()` read and write: the inputs and outputs of every operation but views."""
    with _Traffic() as seen:
        seen.bytes = 0
        work()
    return seen.bytes


def moved(
    model: nn.Module,
    inputs: dict,
    masked: torch.Tensor,
    words: torch.Tensor,
    quantize: Callable,
    lr: float,
    rounding: Callable = torch.round,
) -> tuple[float, float]:
    """The share of integers in a model's Linear layers that one AdamW step changes, and how much of the step arrives.

    The weights start as integers times scales, in fp32, and after the step are rounded with the same scales.
    What arrives is the total distance that the integers move in the step's direction, as a share of its total length.
    """
    learner, before = copy.deepcopy(model), []
    for weight in [part.weight for part in learner.modules() if isinstance(part, nn.Linear)]:
        codes, scale = quantize(weight.detach(), rows=True)
        weight.data.copy_(codes * scale)
        before.append((weight, codes, scale))
    optimizer = torch.optim.AdamW(learner.parameters(), lr=lr)
    F.cross_entropy(learner(**inputs).logits[masked], words).backward()
    optimizer.step()
    with torch.no_grad():
        steps = torch.cat([(weight / scale - codes).flatten() for weight, codes, scale in before]).double()
        jumps = torch.cat([(rounding(weight / scale) - codes).flatten() for weight, codes, scale in before]).double()
    return (jumps != 0).double().mean().item(), ((jumps * steps.sign()).sum() / steps.abs().sum()).item()


def fitted(w: torch.Tensor, bits: int) -> torch.Tensor:
    """w (..., out, in) rounded to `bits` bits, each row with whichever of 41 scales gives it the least squared error.

    The scales run from the row's largest absolute value over 2^(bits - 1) - 1, as in `quantize`, to a fifth of that.
    """
    top = 2 ** (bits - 1) - 1
    largest = (w.abs().amax(-1, keepdim=True) / top).clamp_min(torch.finfo(w.dtype).tiny)
    scales = largest * torch.linspace(0.2, 1, 41).view(-1, *[1] * w.ndim)
    tried = (w / scales).round().clamp(-top, top) * scales  # (41, ..., out, in)
    best = (tried - w).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return tried.gather(0, best.expand(1, *w.shape))[0]


def square_matrices(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two random fp32 matrices, large enough to keep the device busy."""
    size = 4096 if device.type == "cuda" else 512
    return torch.randn(size, size, device=device), torch.randn(size, size, device=device)


def float8_product(a: torch.Tensor, b: torch.Tensor, to_float8: Callable) -> Callable[[], torch.Tensor] | str:
    """A function that casts both matrices to float8 and multiplies them, or the reason why this hardware cannot."""
    if a.device.type != "cuda" or torch.cuda.get_device_capability() < (8, 9):
        return "no GPU with float8"

    def product() -> torch.Tensor:
        (a8, scale_a), (b8, scale_b) = to_float8(a), to_float8(b)
        by_column = b8.T.contiguous().T  # the layout that the hardware requires; the copy is of 8-bit numbers
        return torch._scaled_mm(a8, by_column, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)

    return product


def checked(product: Callable[[], torch.Tensor], exact: torch.Tensor) -> tuple[float, Callable | str]:
    """The share of wrong elements in a product, and the function itself or, if any is wrong, the reason."""
    wrong = ((product() - exact).abs() > 1e-3).double().mean().item()
    return wrong, "its sums are wrong" if wrong else product


def staircase(quantize: Callable, row: torch.Tensor, bits: int, outlier: float, each_row: bool):
    """An ordinary row of weights against its stored values, quantized with a row of outliers: a figure and a text."""
    codes, scale = quantize(torch.stack([row, torch.full_like(row, outlier)]), bits, each_row)
    figure, ax = plots.figure(6.0, 3.4)
    reach = row.abs().max().item()
    ax.plot([-reach, reach], [-reach, reach], "--", color=plots.COLOURS[6], label="exact")
    ax.plot(row, (codes * scale)[0], "o", markersize=4, color=plots.COLOURS[0], label=f"in {bits} bits")
    ax.set(xlabel="weight", ylabel="stored value", title="An ordinary row")
    ax.legend()
    text = f"{bits} bits, outlier {outlier:g}, {'a scale for each row' if each_row else 'one scale'}: "
    return figure, f"{text}{(codes[0] == 0).double().mean().item():.0%} of an ordinary row becomes zero"
