"""Measuring one rung of a ladder against the start: the race, the counts, the proof that it still trains."""

import gc
import math
import re
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import psutil
import torch

from benchmarks.memory import default_dtype
from benchmarks.training import Rung, Settings, Training, repeated
from speedlab import count, machine

# Dense bf16 peaks by the vendors' data sheets, in FLOP/s, found by the device's name.
SPECIFIED = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
# A rung still trains if its loss after the proof's steps is within this of the start's.
MARGIN = 0.15
NO_CPU_PEAK = "a CPU process has one resident peak for all that it holds"
_MIN_ROUNDS = 3
_SAMPLE_SECONDS = 0.25


@dataclass(frozen=True)
class Session:
    """What all rungs of one call share: where, how large, how long, and the product's rate to compare with."""

    device: torch.device
    scale: str
    seconds: float
    product_flops: float

    @property
    def proof_steps(self) -> int:
        return 20 if self.device.type == "cuda" else 8

    def proof_samples(self, batch: int) -> int:
        """Samples that the proof trains on: a CPU would spend minutes a rung on a whole batch."""
        return batch if self.device.type == "cuda" else min(4, batch)

    def specified_flops(self) -> float | None:
        """The device's dense bf16 peak by its data sheet, or None where it is not known."""
        if self.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.device)
        return next((peak for key, peak in SPECIFIED.items() if re.search(rf"\b{key}\b", name)), None)


class Ladder:
    """One ladder in one session: it builds the start once, and measures a rung against it."""

    def __init__(self, module: ModuleType, session: Session):
        self.module, self.session = module, session
        self.settings = module.start(session.device, session.scale)
        self.clock = machine.synchronised_clock(session.device)
        self._start: Training | None = None
        self._start_seconds = 0.0
        self._predicted: dict[Settings, int] = {}

    def build(self, settings: Settings) -> Training:
        device, scale = self.session.device, self.session.scale
        return self.module.training(settings, device, scale, self.module.batches(settings, device, scale))

    def rung(self, rung: Rung, settings: Settings, start_row: dict | None) -> dict:
        """One row: everything that is measured and counted of a rung, or why it was not."""
        predicted = self.predict(settings)
        if short := self.too_little_memory(predicted):
            return {"skipped": short}
        if start_row and self._start is None:  # the start's row is from an earlier call
            self._start = self.build(self.settings)
            self._start_seconds = self.warm_up(self._start)
        held = self.reset_memory()
        run = self.build(settings)
        before, loss, extra = self.prove(settings, run)
        seconds = self.warm_up(run)
        if not start_row:
            self._start, self._start_seconds = run, seconds
        pairs = self.race(run, seconds)
        memory = self.memory_since(held)
        start_loss = start_row["loss"] if start_row else loss
        return {
            **self.speeds(settings, pairs),
            "memory_predicted": predicted,
            "memory_measured": memory,
            "memory_note": "" if memory else NO_CPU_PEAK,
            "compile_s": max(0.0, extra) if settings.compiled else 0.0,
            "split": self.split(run),
            "loss_before": before,
            "loss": loss,
            "loss_start": start_loss,
            "margin": MARGIN,
            "trains": loss < before and loss < start_loss + MARGIN and finite(run.model),
        }

    def predict(self, settings: Settings) -> int:
        """Peak bytes of training in the rung's precision, without compilation, found on fake CPU tensors."""
        plain = replace(settings, padding="longest", compiled=False, channels_last=False, resident=False,
                        keep_memory=False, host_metric=False, tf32=False)  # fmt: skip
        if plain not in self._predicted:
            cpu, scale = torch.device("cpu"), self.session.scale
            wide = self.module.widest(scale)

            def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], int]]:
                with default_dtype(torch.bfloat16 if plain.master else torch.float32):
                    run = self.module.training(plain, cpu, scale, iter(()))
                batch = self.module.blank(plain, cpu, plain.batch, wide)
                return run.model, run.optimizer, lambda: run.step(batch)

            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Module is None")  # the tracker, of a model inside a model
                self._predicted[plain] = count.predict_peak_memory(build).total
        return self._predicted[plain]

    def too_little_memory(self, predicted: int) -> str:
        if self.session.device.type == "cuda":
            free = torch.cuda.mem_get_info()[0]
        else:
            free = psutil.virtual_memory().available
        if predicted * 1.2 <= free:
            return ""
        return f"it needs about {predicted * 1.2 / 1e9:.1f} GB, and {free / 1e9:.1f} GB is free"

    def prove(self, settings: Settings, run: Training) -> tuple[float, float, float]:
        """The loss on a few fixed samples before and after some steps on them, and the first step's extra seconds.

        On a GPU a larger batch holds the same samples several times over, so that its gradient is the same; the loss
        is read without dropout. Whether a larger batch learns as well from new samples is what to-accuracy asks.
        """
        session, usual = self.session, self.settings.batch
        samples = session.proof_samples(usual)
        batch = self.module.proof_batch(settings, session.device, session.scale, samples)
        whole = repeated(batch, settings.batch // usual) if samples == usual else batch
        before, seconds = run.evaluate(batch), []
        with run.numerics():
            for _ in range(session.proof_steps):
                begin = self.clock()
                run.step(whole)
                seconds.append(self.clock() - begin)
        return before, run.evaluate(batch), seconds[0] - seconds[-1]

    def warm_up(self, run: Training) -> float:
        """Seconds of a step, after enough steps that the last one is warm."""
        with run.numerics():
            for _ in range(3 if self.session.device.type == "cuda" or run.settings.compiled else 1):
                begin = self.clock()
                run.step()
        return self.clock() - begin

    def race(self, run: Training, seconds: float) -> list[tuple[float, float]]:
        """Rates (start, rung) of alternating samples, computed units a second; the start itself races nobody."""
        pairs: list[tuple[float, float]] = []
        begin = self.clock()
        while len(pairs) < _MIN_ROUNDS or self.clock() - begin < self.session.seconds:
            first = self.sample(self._start, self._start_seconds)
            pairs.append((first, first if run is self._start else self.sample(run, seconds)))
        return pairs

    def sample(self, run: Training, step_seconds: float) -> float:
        repeats = max(1, math.ceil(_SAMPLE_SECONDS / step_seconds))
        gc.collect()
        gc.disable()  # a collection in the middle of one sample would be charged to that rung alone
        try:
            with run.numerics():
                begin = self.clock()
                done = sum(run.step() for _ in range(repeats))
                return done / (self.clock() - begin)
        finally:
            gc.enable()

    def speeds(self, settings: Settings, pairs: list[tuple[float, float]]) -> dict:
        """Throughput, speed-up and use of the hardware, from pairs of rates of computed units."""
        scale = self.session.scale
        share = self.module.share_of_real(settings, scale)
        gain = share / self.module.share_of_real(self.settings, scale)
        computed_flops, useful_flops = self.module.flops(settings, scale)
        rates = [rung * share for _, rung in pairs]
        ratios = [rung * gain / start for start, rung in pairs]
        low, speedup, high = quartiles(ratios)
        rate = statistics.median(rates)
        specified = self.session.specified_flops()
        return {
            "unit": self.module.UNIT,
            "rate": rate,
            "real_share": share,
            "speedup": speedup,
            "speedup_low": low,
            "speedup_high": high,
            "rounds": len(pairs),
            "flops": useful_flops,
            "flops_computed": computed_flops / share,
            "mfu_specified": rate * useful_flops / specified if specified else None,
            "mfu_product": rate * useful_flops / self.session.product_flops,
        }

    def split(self, run: Training) -> dict[str, float]:
        """The share of each part of a step: each part is waited for, so nothing overlaps while this is measured."""
        spent: dict[str, float] = {}
        last = 0.0

        def mark(phase: str) -> None:
            nonlocal last
            now = self.clock()
            spent[phase] = spent.get(phase, 0.0) + now - last
            last = now

        with run.numerics():
            for _ in range(10 if self.session.device.type == "cuda" else 2):
                last = self.clock()
                run.step(mark=mark)
        return {phase: part / sum(spent.values()) for phase, part in spent.items()}

    def reset_memory(self) -> int:
        gc.collect()
        if self.session.device.type != "cuda":
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def memory_since(self, held: int) -> int | None:
        """Peak bytes that the GPU's allocator gave out beyond `held`; None on a CPU, which keeps no such count."""
        return torch.cuda.max_memory_allocated() - held if self.session.device.type == "cuda" else None


def finite(model: torch.nn.Module) -> bool:
    """Whether every parameter is a number still: the race trains on, at full batches, after the proof."""
    return all(bool(weight.isfinite().all()) for weight in model.parameters())


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    return tuple(statistics.quantiles(values, n=4, method="inclusive")) if len(values) > 1 else (values[0],) * 3
