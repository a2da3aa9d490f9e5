"""What the ladders train: a base class, and a module per workload."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import torch
from torch.nn import functional as F

from benchmarks.loop import Batch, Rung, Settings, Training, computed, real, repeated
from speedlab import count, machine

CPU = torch.device("cpu")
# A rung still trains if its loss after the proof's steps exceeds the start's by less than this.
MARGIN = 0.15


@contextlib.contextmanager
def as_a_gpu_keeps_it() -> Iterator[None]:
    """For predictions on a CPU: attention saves what a GPU's fused kernels save, even with dropout.

    A CPU has no fused kernel with dropout and would save all scores, where a GPU saves none.
    """
    fused = F.scaled_dot_product_attention
    undropped = lambda *given, dropout_p=0.0, **named: fused(*given, **named)  # noqa: E731
    with mock.patch.object(F, "scaled_dot_product_attention", undropped):
        yield


class Workload:
    """A task at a scale ('tiny' to try it out, 'quick', or 'full' with real data) on a device, and its ladder.

    A subclass sets `unit` (what is counted per second), `task` (in words) and `target` (the share of the measured
    matrix product that the best rung on a CPU should reach), and defines `start`, `rungs`, `training`, `batches`,
    `fixed` and `blank`. The other methods suit samples of one size.
    """

    unit = "images"
    task = ""
    target = 0.0
    start_seconds = 40  # about what the start takes on a GPU

    def __init__(self, device: torch.device, scale: str):
        self.device, self.scale, self.tiny = device, scale, scale == "tiny"

    def start(self) -> Settings:
        """The naive start, which every rung is compared with."""
        raise NotImplementedError

    def rungs(self) -> tuple[Rung, ...]:
        """The ladder, cumulative; the first rung is the start and changes nothing."""
        raise NotImplementedError

    def training(
        self, settings: Settings, stream: Iterator[Batch] | None = None, device: torch.device | None = None
    ) -> Training:
        """The training loop for these settings, with a model made from seed 0; on `device` if that is given."""
        raise NotImplementedError

    def batches(self, settings: Settings) -> Iterator[Batch]:
        """Endless shuffled batches on the device."""
        raise NotImplementedError

    def fixed(self, settings: Settings, rows: int, width: int = 0) -> Batch:
        """A batch of the first `rows` samples, the same for every rung; texts have `width` tokens, if given."""
        raise NotImplementedError

    def blank(self, settings: Settings, rows: int, width: int = 0) -> Batch:
        """A CPU batch without content, as wide as the widest or `width`, for counting under fake tensors."""
        raise NotImplementedError

    def task_of(self, rung: Rung) -> str:
        """The task of this rung, in words: a rung that stands `apart` has a task of its own."""
        return f"{self.task} ({rung.name})" if rung.apart else self.task

    def build(self, settings: Settings) -> Training:
        """The training loop for these settings with its own batches."""
        return self.training(settings, self.batches(settings))

    def share_of_real(self, settings: Settings) -> float:
        """The share of computed units that is real, not padding."""
        return 1.0

    def representative(self, settings: Settings) -> tuple[Batch, ...]:
        """The batches of a timed sample if batches differ in cost, the costliest last; empty if any batch will do."""
        return ()

    def timed_share(self, settings: Settings) -> float:
        """The share of the units computed in a timed sample that is real."""
        batches = self.representative(settings)
        return sum(map(real, batches)) / sum(map(computed, batches)) if batches else self.share_of_real(settings)

    def flops(self, settings: Settings) -> tuple[float, float]:
        """Operations of a training step per computed unit, and per real unit without any padding."""
        each = float(self.sample_flops(settings.size))
        return each, each

    @functools.cache  # noqa: B019 (a workload lives as long as the process)
    def sample_flops(self, size: int, width: int = 0) -> int:
        """Operations of one forward and backward pass over one sample, counted on fake tensors: nothing is computed.

        They are counted in fp32, not compiled, with attention as products, which the counter knows.
        """
        settings = replace(self.start(), batch=1, plain_attention=True, host_metric=False, size=size)
        with _fake(), count.without_initialisation():
            run, batch = self.training(settings, device=CPU), self.blank(settings, 1, width)
            with run.numerics():
                return count.flops(lambda: run.loss(run.model, batch)[0].backward())

    @functools.cache  # noqa: B019
    def peak_memory(self, settings: Settings) -> int:
        """Predicted peak bytes of training in these settings' numerics, not compiled, found on fake tensors."""
        plain = replace(settings, padding="longest", compiled=False, channels_last=False, resident=False,
                        keep_memory=False, host_metric=False, tf32=False, pinned=False, workers=0)  # fmt: skip
        if plain != settings:
            return self.peak_memory(plain)

        def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], int]]:
            with default_dtype(torch.bfloat16 if plain.master else torch.float32):
                run = self.training(plain, device=CPU)
            batch = self.blank(plain, plain.batch)

            def step() -> int:
                with run.numerics():
                    return run.step(batch)

            return run.model, run.optimizer, step

        attention = as_a_gpu_keeps_it() if self.device.type == "cuda" else contextlib.nullcontext()
        with warnings.catch_warnings(), attention:
            warnings.filterwarnings("ignore", "Module is None")  # the tracker says so about a model inside a model
            return count.predict_peak_memory(build).total

    def prove(self, run: Training, start: dict | None) -> dict:
        """Train on a few fixed samples, and check that the loss falls about as far as in `start`, the start's row.

        On a GPU a larger batch holds the same samples several times over, so its gradient is the same; the loss
        is read without dropout. `first_s` is the first step in seconds. A key `not_run` says why a rung is left out.
        """
        usual, clock = self.start().batch, machine.synchronised_clock(self.device)
        # a CPU would spend minutes on whole batches
        steps, rows = (20, usual) if self.device.type == "cuda" else (8, min(4, usual))
        batch = self.fixed(run.settings, rows)
        whole = repeated(batch, run.settings.batch // usual) if rows == usual else batch
        before, seconds = run.evaluate(batch), []
        with run.numerics():
            for _ in range(steps):
                begin = clock()
                run.step(whole)
                seconds.append(clock() - begin)
        loss = run.evaluate(batch)
        wanted = min(before, (start["loss"] if start else loss) + MARGIN)
        return {"loss_before": before, "loss": loss, "loss_start": start["loss"] if start else loss, "margin": MARGIN,
                "trains": loss < wanted, "first_s": seconds[0]}  # fmt: skip

    def gains(self, ratios: list[float], settings: Settings, proof: dict, start: dict | None) -> list[float]:
        """Speed-ups, pair by pair, from the ratios of a rung's rates to the start's in real units."""
        return ratios


def _fake() -> contextlib.AbstractContextManager:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the floating-point default, because Module.to(dtype) does not work under fake tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
