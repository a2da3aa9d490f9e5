"""One training run of a ladder: what a rung may change, and a step whose parts can be timed.

A ladder is a list of rungs; each is one idea, which may set several things. All that a rung can change is a field of
`Settings`; `Training` is the loop that follows them. Nothing here reads a clock.
"""

import contextlib
import ctypes
import itertools
import platform
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from speedlab import compat, machine

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """All that a rung can change. The defaults are the naive start: strict fp32, Adam, a metric read every batch.

    `autocast` is '', 'bf16' or 'fp16' (with a loss scaler); `padding` is 'longest', 'batch' or 'buckets'.
    """

    batch: int
    tf32: bool = False
    host_metric: bool = True
    fused: bool = False
    channels_last: bool = False
    autocast: str = ""
    plain_attention: bool = False
    byte_dropout: bool = False
    keep_memory: bool = False
    resident: bool = False
    compiled: bool = False
    master: bool = False
    padding: str = "longest"
    size: int = 224
    workers: int = 0
    pinned: bool = False


@dataclass(frozen=True)
class Rung:
    """One change: its name, what it does in a sentence, the settings it sets, and what the machine must have.

    `needs` holds any of 'cuda', 'cpu', 'glibc', 'bf16' and 'compiler'. A rung that stands `apart` changes the task
    itself, so its speed-up is not the same work done faster.
    """

    name: str
    why: str
    changes: dict = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    apart: bool = False


# Rungs that several ladders climb; each is the same change everywhere.
TF32 = Rung("TF32", "matrix products round their fp32 inputs to 10 bits of mantissa", {"tf32": True}, ("cuda",))
NO_HOST_SYNCS = Rung("no host syncs", "the metric stays on the device until the end", {"host_metric": False})
FUSED = Rung("fused optimizer", "one pass over each weight instead of one per operation", {"fused": True})
AUTOCAST = Rung("bf16 autocast", "matrix products in bf16, weights in fp32", {"autocast": "bf16"}, ("bf16",))
PLAIN_ATTENTION = Rung(
    "attention as products",
    "two products and a softmax: the CPU's fused attention has a slow backward pass in bf16 and no dropout, "
    "and its fallback looks for rows that are masked entirely",
    {"plain_attention": True},
    ("cpu", "bf16"),
)
BYTE_DROPOUT = Rung(
    "dropout by the byte",
    "one 64-bit random number decides for eight elements; PyTorch's CPU kernel draws one per element",
    {"byte_dropout": True},
    ("cpu",),
)
MEMORY_KEPT = Rung(
    "memory kept",
    "the C library keeps what a step frees, so the next step need not fetch new pages from the system",
    {"keep_memory": True},
    ("cpu", "glibc"),
)
BF16_WEIGHTS = Rung(
    "bf16 weights, fp32 master",
    "activations stay in bf16: a residual stream of half the bytes; the optimizer casts weights and gradients",
    {"autocast": "", "master": True},
    ("bf16",),
)


def larger_batch(batch: int) -> Rung:
    """The rung that grows the batch to this size and keeps the learning rate; for GPUs only."""
    why = f"batch {batch}: the optimizer's pass over the weights serves more samples"
    return Rung("larger batch", why, {"batch": batch}, ("cuda",))


class MasterAdam(torch.optim.Adam):
    """Adam for bf16 weights: it keeps an fp32 master of each, updates that, and rounds it into the weight.

    bf16 stores 7 bits of mantissa: without the master, an update below 1/512 of a weight is always lost,
    and one up to 1/256 may be.
    """

    def __init__(self, weights: list[nn.Parameter], **options):
        self.weights = weights
        super().__init__([w.detach().float().requires_grad_() for w in weights], **options)
        self.masters = self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = weight.grad.float()
        super().step()
        torch._foreach_copy_(self.weights, self.masters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for weight in self.weights:
            weight.grad = None


def byte_dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Like F.dropout, with `p` rounded to 256ths and never in place: a random byte below 256 p drops its element."""
    lost = round(256 * p)
    if not (training and lost):
        return x
    if lost == 256:
        return x * 0
    drawn = torch.empty(-(-x.numel() // 8), dtype=torch.int64, device=x.device).random_(-(2**63), None)
    kept = drawn.view(torch.uint8)[: x.numel()].view_as(x) >= lost
    return torch.where(kept, x, 0) * (256 / (256 - lost))


def attention_as_products(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **others):
    """Like F.scaled_dot_product_attention on (B, H, T, E), never causal; `attn_mask` is boolean or None."""
    assert not is_causal and not any(others.values()), others
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    with torch.autocast(query.device.type, enabled=False):  # on CUDA autocast would return the softmax in fp32
        shares = scores.softmax(-1)
    return F.dropout(shares, dropout_p) @ value


def keep_memory(keep: bool) -> None:
    """Have glibc keep freed memory for the next step, or return it to the system as by default (man 3 mallopt).

    Memory that was returned comes back as new pages, each zeroed by the kernel when it is first touched. The values
    for returning it are those that glibc's dynamic thresholds reach with large tensors; setting any turns these off.
    """
    trim_threshold, mmap_threshold, mmap_max = -1, -3, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_max, 0 if keep else 65536)
    libc.mallopt(trim_threshold, -1 if keep else 64 * 2**20)
    libc.mallopt(mmap_threshold, 32 * 2**20)
    if not keep:
        libc.malloc_trim(0)


def _no_mark(phase: str) -> None:
    """Called after each part of a step; a measurement of the parts puts a clock here."""


class Training:
    """A model, its optimizer and its endless batches, with a `step` that follows the settings.

    `model` returns logits (B, K) for a batch's inputs. `regional` lists the
    submodules to compile one by one; without it the model is compiled as a whole.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        model: nn.Module,
        batches: Iterator[Batch] | None,
        *,
        lr: float,
        regional: list[nn.Module] | None = None,
        dynamic: bool | None = None,
    ):
        self.settings, self.device, self.batches = settings, device, batches
        # under fake tensors a module cannot be converted, so it is made on the device and in the dtype that it needs
        first = next(model.parameters())
        if first.device != device:
            model = model.to(device)
        if settings.master and first.dtype != torch.bfloat16:
            model = model.bfloat16()
        if settings.channels_last:
            model = model.to(memory_format=torch.channels_last)
        self.model = model.train()
        self.optimizer = self.make_optimizer(list(model.parameters()), lr)
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.autocast == "fp16")
        self.shown, self.correct = (0.0, 0.0), torch.zeros((), device=device)
        self.forward: Callable[..., torch.Tensor] = model
        if settings.compiled and regional:
            for part in regional:
                part.compile(dynamic=dynamic)
        elif settings.compiled:
            self.forward = torch.compile(model, dynamic=dynamic)

    def make_optimizer(self, weights: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Adam, with fp32 master weights if the model's are bf16."""
        kind = MasterAdam if self.settings.master else torch.optim.Adam
        return kind(weights, lr=lr, fused=self.settings.fused or None)

    def criterion(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of fp32 logits (B, K) against labels (B,)."""
        return F.cross_entropy(logits, labels)

    @contextlib.contextmanager
    def numerics(self) -> Iterator[None]:
        """Set the global switches of these settings, then restore them: TF32, attention, dropout, glibc's memory."""
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("high" if self.settings.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.settings.tf32
        patched = {"scaled_dot_product_attention": attention_as_products} if self.settings.plain_attention else {}
        patched |= {"dropout": byte_dropout} if self.settings.byte_dropout else {}
        if self.settings.keep_memory:
            keep_memory(True)
        try:
            with unittest.mock.patch.multiple(F, **patched) if patched else contextlib.nullcontext():
                yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]
            if self.settings.keep_memory:
                keep_memory(False)

    def loss(self, forward: Callable[..., torch.Tensor], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss, computed in fp32, and the logits of a batch."""
        inputs, labels = batch
        half = machine.DTYPES.get(self.settings.autocast)
        with torch.autocast(self.device.type, dtype=half or torch.bfloat16, enabled=half is not None):
            logits = forward(**inputs)
        return self.criterion(logits.float(), labels), logits

    def step(self, batch: Batch | None = None, mark: Callable[[str], None] = _no_mark) -> int:
        """One optimizer step on `batch`, or its own next batch; returns how many samples or tokens it computed."""
        batch = next(self.batches) if batch is None else batch
        mark("data")
        loss, logits = self.loss(self.forward, batch)
        self.scaler.scale(loss).backward()
        mark("forward+backward")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        mark("optimizer")
        right = (logits.detach().argmax(1) == batch[1]).sum()
        if self.settings.host_metric:
            self.shown = loss.item(), right.item()  # each reading waits for the device
        else:
            self.correct += right
        mark("host")
        return computed(batch)

    def evaluate(self, batch: Batch) -> float:
        """The loss on `batch` without dropout, not compiled, in the rung's precision."""
        self.model.eval()
        with torch.no_grad(), self.numerics(), torch.compiler.set_stance("force_eager"):
            loss = self.loss(self.model, batch)[0].item()
        self.model.train()
        return loss


def computed(batch: Batch) -> int:
    """How many units of a batch are computed: its tokens, padding included, or, if it has none, its samples."""
    inputs, labels = batch
    return inputs["input_ids"].numel() if "input_ids" in inputs else len(labels)


def real(batch: Batch) -> int:
    """How many units of a batch are real: its tokens without padding or, if it has none, its samples."""
    inputs, labels = batch
    return int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else len(labels)


def repeated(batch: Batch, times: int) -> Batch:
    """The batch repeated `times` times; its mean loss, and so its gradient, are those of the batch itself."""
    inputs, labels = batch
    return {k: v.repeat(times, *[1] * (v.dim() - 1)) for k, v in inputs.items()}, labels.repeat(times)


def lacking(rung: Rung, device: torch.device) -> str:
    """A sentence that says why this machine leaves `rung` out, or an empty string."""
    if "cuda" in rung.needs and device.type != "cuda":
        return "TF32 is a format of CUDA GPUs" if "tf32" in rung.changes else "this rung is climbed on a GPU only"
    if "glibc" in rung.needs and (device.type != "cpu" or platform.libc_ver()[0] != "glibc"):
        return "it changes glibc, which allocates CPU tensors on Linux; a GPU's memory is cached by PyTorch"
    if "cpu" in rung.needs and device.type != "cpu":
        attention = "plain_attention" in rung.changes
        return f"it replaces the CPU's {'attention in bf16' if attention else 'dropout kernel'}; a GPU has its own"
    if "bf16" in rung.needs and not machine.is_fast("bf16"):
        return "there is no fast hardware for bf16 here: a step in it would take many times as long"
    lacks_compiler = "compiler" in rung.needs and compat.compiler(device.type) is None
    return "torch.compile finds no compiler here that works" if lacks_compiler else ""


def endless(epoch: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
    """Endless batches, one epoch after another."""
    return itertools.chain.from_iterable(epoch() for _ in itertools.count())
