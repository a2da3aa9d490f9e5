"""Measures one rung of a ladder against the start: the race, the memory, the split, and whether it still trains."""

import gc
import math
import re
import statistics

import psutil
import torch

from benchmarks.loop import Rung, Settings, Training
from benchmarks.workloads import Workload
from speedlab import machine, measure

# Dense bf16 peaks from NVIDIA's data sheets, in FLOP/s, looked up by the device's name.
SPECIFIED = {"H200 NVL": 835e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H200": 989.4e12, "H100": 989.4e12,
             "A100": 312e12, "L40S": 362e12, "L4": 121e12}  # fmt: skip
# as many pairs as a 95% interval needs
_MIN_ROUNDS = 6
_SAMPLE_SECONDS = 0.25


def specified_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s from its data sheet, or None if it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for key, peak in SPECIFIED.items() if re.search(rf"\b{key}\b", name)), None)


def product_flops() -> float:
    """The current rate of a large matrix product in FLOP/s, in bf16 where that is fast, otherwise in fp32."""
    machine.peak_flops.cache_clear()
    return machine.peak_flops("bf16" if machine.is_fast("bf16") else "fp32")


def too_little_memory(device: torch.device, predicted: int) -> str:
    """A sentence that says that `predicted` bytes and a fifth more are not free here, or an empty string."""
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else psutil.virtual_memory().available
    if predicted * 1.2 <= free:
        return ""
    return f"it needs about {predicted * 1.2 / 1e9:.1f} GB, and {free / 1e9:.1f} GB is free"


class Race:
    """Times each rung alternately with a workload's start, which is built once, for about `seconds` per rung."""

    def __init__(self, workload: Workload, seconds: float):
        self.workload, self.seconds, self.device = workload, seconds, workload.device
        self.clock = machine.synchronised_clock(self.device)
        self._start: Training | None = None
        self._start_seconds = 0.0

    def rung(self, rung: Rung, settings: Settings, start: dict | None) -> dict:
        """All that is measured and counted for a rung, or why it is not run; `start` is the start's row, if any."""
        predicted = self.workload.peak_memory(settings)
        if short := too_little_memory(self.device, predicted):
            return {"not_run": short}
        if start and self._start is None:  # the start's row is from an earlier call
            self._start = self.workload.build(self.workload.start())
            self._start_seconds = self.warm_up(self._start)
        before, held = product_flops(), self.reset_memory()
        run = self.workload.build(settings)
        proof = self.workload.prove(run, start)
        if "not_run" in proof:
            return proof
        self.reset_memory()
        seconds = self.warm_up(run)
        memory = torch.cuda.max_memory_allocated() - held if self.device.type == "cuda" else None
        if not start:
            self._start, self._start_seconds = run, seconds
        pairs = self.pairs(run, seconds)
        first = proof.pop("first_s")
        return {
            **proof,
            "trains": proof["trains"] and finite(run.model),
            **self.speeds(settings, pairs, proof, start, (before + product_flops()) / 2),
            "memory_predicted": predicted,
            "memory_measured": memory,
            "compile_s": max(0.0, first - seconds) if settings.compiled else 0.0,
            "split": self.split(run),
        }

    def warm_up(self, run: Training) -> float:
        """Run enough steps to be warm, and return the seconds of the last one."""
        batches = self.workload.representative(run.settings) or (None,)
        with run.numerics():
            for batch in batches * (3 if self.device.type == "cuda" or run.settings.compiled else 1):
                begin = self.clock()
                run.step(batch)
                spent = self.clock() - begin
        return spent

    def pairs(self, run: Training, seconds: float) -> list[tuple[float, float]]:
        """Rates (start, rung) in computed units per second, sampled A B B A; the start is paired with itself."""
        first, second = (self._start, self._start_seconds), (run, seconds)
        pairs: list[tuple[float, float]] = []
        begin = self.clock()
        while len(pairs) < _MIN_ROUNDS or self.clock() - begin < self.seconds:
            if run is self._start:
                pairs.append((self.sample(*first),) * 2)
            elif len(pairs) % 2 == 0:
                pairs.append((self.sample(*first), self.sample(*second)))
            else:
                pairs.append((self.sample(*second), self.sample(*first))[::-1])
        return pairs

    def sample(self, run: Training, step_seconds: float) -> float:
        """Computed units per second, over the workload's representative batches where batches differ in cost."""
        batches, done = self.workload.representative(run.settings) or (None,), []
        repeats = max(1, math.ceil(_SAMPLE_SECONDS / step_seconds))
        gc.collect()
        with run.numerics():
            # not timed: fetching the kept memory, which the other run's turn gave back, and using up the batches that
            # workers prepared during that turn
            for _ in range(max(2 * run.settings.workers, run.settings.keep_memory)):
                run.step(batches[-1])
            spent = measure.sample(lambda: done.append(sum(map(run.step, batches))), repeats, self.clock)
        return sum(done) / (spent * repeats)

    def speeds(
        self, settings: Settings, pairs: list[tuple[float, float]], proof: dict, start: dict | None, product: float
    ) -> dict:
        """Throughput, speed-up with its interval, and hardware utilization, from pairs of rates in computed units."""
        work, specified = self.workload, specified_flops(self.device)
        share, timed = work.share_of_real(settings), work.timed_share(settings)
        real = timed / work.timed_share(work.start())
        computed, useful = work.flops(settings)
        against = measure.ratio(work.gains([rung * real / first for first, rung in pairs], settings, proof, start))
        rate = statistics.median(rung * timed for _, rung in pairs)
        return {
            "unit": work.unit,
            "rate": rate,
            "real_share": share,
            "speedup": against.median,
            "speedup_low": against.low,
            "speedup_high": against.high,
            "spread": f"{against.confidence:.0%} interval",
            "rounds": len(pairs),
            "flops": useful,
            "flops_computed": computed / share,
            "product_flops": product,
            "mfu_specified": rate * useful / specified if specified else None,
            "mfu_product": rate * useful / product,
            "target": work.target,
        }

    def split(self, run: Training) -> dict[str, float]:
        """The share of a step's time that each part takes. The clock waits for each part, so none overlap."""
        spent: dict[str, float] = {}
        last = 0.0

        def mark(phase: str) -> None:
            nonlocal last
            now = self.clock()
            spent[phase] = spent.get(phase, 0.0) + now - last
            last = now

        with run.numerics():
            for _ in range(10 if self.device.type == "cuda" else 2):
                last = self.clock()
                run.step(mark=mark)
        return {phase: part / sum(spent.values()) for phase, part in spent.items()}

    def reset_memory(self) -> int:
        """Forget the GPU's peak; return the bytes that are allocated now."""
        gc.collect()
        if self.device.type != "cuda":
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()


def finite(model: torch.nn.Module) -> bool:
    """Whether every parameter is still finite: the race goes on training, with full batches, after the proof."""
    return all(bool(weight.isfinite().all()) for weight in model.parameters())
