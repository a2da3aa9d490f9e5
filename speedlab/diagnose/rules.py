"""From counts to advice: an estimate of where a step's time goes, and a table of techniques, each with its bound.

The estimate is a roofline: an operation takes the longest of its launch, its bytes at the device's bandwidth and its
FLOPs at the rate of its dtype (Williams et al. 2009, with a launch added). Bytes that stay in a cache cost less, so
every figure is made twice, with bytes from memory and with bytes for nothing; a bound is the interval between them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from speedlab import machine
from speedlab.diagnose.counting import BACKWARD, FORWARD, OPTIMIZER, Counts, Operation

# A technique that gives less than this at most is not worth its price.
WORTH = 1.1
LAUNCHES, MEMORY, COMPUTE, COMMUNICATION = "launching operations", "memory traffic", "arithmetic", "communication"


@dataclass(frozen=True)
class Device:
    """What an estimate needs to know: seconds per operation and per Python call, bytes/s, FLOP/s by dtype."""

    name: str
    launch: float
    bandwidth: float
    flops: dict[str, float]
    link: float = 10e9
    call: float = 1e-7
    asynchronous: bool = True

    @classmethod
    def here(cls) -> "Device":
        """This machine, measured."""
        where = machine.device()
        one, clock = torch.ones(1, device=where), machine.synchronised_clock(where)
        best = min(_seconds(lambda: [one.add_(0) for _ in range(200)], clock) for _ in range(5)) / 200
        rates = {name: machine.peak_flops(name) for name in ("fp32", "bf16", "fp16")}
        return cls("this machine", best, machine.copy_bandwidth(), rates, asynchronous=where.type == "cuda")

    def seconds(self, operation: Operation, cached: bool = False) -> float:
        return max(self._costs(operation, cached).values())

    def bound(self, operation: Operation) -> str:
        """What an operation waits for most."""
        costs = self._costs(operation, False)
        return max(costs, key=costs.get)

    def _costs(self, operation: Operation, cached: bool) -> dict[str, float]:
        if operation.collective:
            return {COMMUNICATION: self.launch + operation.bytes / 2 / self.link}
        rate = self.flops.get(operation.dtype, self.flops["fp32"])
        traffic = 0.0 if cached else operation.bytes / self.bandwidth
        return {LAUNCHES: self.launch, MEMORY: traffic, COMPUTE: operation.flops / rate}


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start


@dataclass(frozen=True)
class Advice:
    """A technique, the evidence, the speed-up that it can give at most, its price, its unit.

    It `helps` where it mends a fault, or where both ends of its bound are worth it; it `may` help where one is.
    """

    technique: str
    helps: bool
    may: bool
    evidence: str
    at_most: tuple[float, float]
    price: str
    unit: str


@dataclass(frozen=True)
class Estimate:
    """Where a step's time goes on a device, in seconds: by what it waits for, and by phase; data comes on top."""

    total: float
    by_bound: dict[str, float]
    by_phase: dict[str, float]
    data: float

    @property
    def regime(self) -> str:
        """What bounds the step: the largest part, or the data where they take longer than the step."""
        return "the data pipeline" if self.data > self.total else max(self.by_bound, key=self.by_bound.get)


def estimate(counts: Counts, device: Device, cached: bool = False) -> Estimate:
    bounds, phases = dict.fromkeys((LAUNCHES, MEMORY, COMPUTE, COMMUNICATION), 0.0), {}
    for operation in counts.operations:
        spent = device.seconds(operation, cached)
        bounds[device.bound(operation)] += spent
        phases[operation.phase] = phases.get(operation.phase, 0.0) + spent
    return Estimate(sum(bounds.values()), bounds, phases, (counts.calls_per_batch or 0) * device.call)


# --- The table: what each technique takes away, in seconds of the estimate, and the counters that it rests on ------


@dataclass(frozen=True)
class Rule:
    """A row of the table. `saves(counts, device, cached)` gives seconds, `evidence(counts, device)` a text.

    A `fault` is mended whatever the estimate says.
    """

    technique: str
    unit: str
    price: str
    evidence: Callable[[Counts, Device], str]
    saves: Callable[[Counts, Device, bool], float] = lambda counts, device, cached: 0.0
    fault: Callable[[Counts, Device], bool] = lambda counts, device: False


def _sum(c: Counts, d: Device, cached: bool, chosen: Callable[[Operation], bool]) -> float:
    """The time of chosen operations of the forward and backward pass."""
    passes = (o for o in c.operations if o.phase in (FORWARD, BACKWARD) and not o.collective)
    return sum(d.seconds(o, cached) for o in passes if chosen(o))


def _workers(c: Counts, d: Device, cached: bool) -> float:
    whole = estimate(c, d, cached)
    return min(whole.data, whole.total)


def _no_waits(c: Counts, d: Device, cached: bool) -> float:
    # at each wait the device runs dry, until the host has launched the next operation
    total = estimate(c, d, cached).total
    each = d.launch + total / max(1, len(c.operations))
    return min(sum(c.syncs.values()) * each, total / 2) if d.asynchronous else 0.0


def _padding(c: Counts, d: Device, cached: bool) -> float:
    return c.padded * _sum(c, d, cached, lambda o: d.bound(o) != LAUNCHES)


def _optimizer(c: Counts, d: Device, cached: bool) -> float:
    # one pass at least: parameter, gradient and state are read; parameter and state are written
    once = 0.0 if cached else (2 * c.parameters + c.gradients + 2 * c.optimizer) / d.bandwidth
    return max(0.0, estimate(c, d, cached).by_phase.get(OPTIMIZER, 0.0) - d.launch - once)


def _overlap(c: Counts, d: Device, cached: bool) -> float:
    whole = estimate(c, d, cached)
    return min(whole.by_bound[COMMUNICATION], whole.by_phase.get(BACKWARD, 0.0))


def _half(c: Counts, d: Device, cached: bool) -> float:
    def halved(o: Operation) -> float:
        traffic = 0.0 if cached else o.bytes / 2 / d.bandwidth
        return min(d.seconds(o, cached), max(d.launch, traffic, o.flops / d.flops["bf16"]))

    products = [o for o in c.operations if o.phase != OPTIMIZER and o.flops and o.dtype == "fp32"]
    return sum(d.seconds(o, cached) - halved(o) for o in products) if d.flops["bf16"] > d.flops["fp32"] else 0.0


def _softmax(c: Counts, d: Device, cached: bool) -> float:
    names = ("_softmax", "_safe_softmax", "_softmax_backward_data")
    return _sum(c, d, cached, lambda o: o.name in names and d.bound(o) == MEMORY)


def _fusion(c: Counts, d: Device, cached: bool) -> float:
    # products stay calls of their own
    return _sum(c, d, cached, lambda o: not o.flops)


def _launches(c: Counts, d: Device, cached: bool) -> float:
    return _sum(c, d, cached, lambda o: d.bound(o) == LAUNCHES)


def _share(saves: Callable[[Counts, Device, bool], float], what: str) -> Callable[[Counts, Device], str]:
    return lambda c, d: f"{saves(c, d, False) / max(estimate(c, d).total, 1e-12):.0%} of the step: {what}"


def _where(found: dict[str, int]) -> str:
    return "; ".join(f"{line} ({times} times)" for line, times in list(found.items())[:3]) or "nowhere"


def _twice(c: Counts, d: Device) -> str:
    return f"called again on the same input: {_where(c.repeated)}; unused gradients: {c.unused_gradients:,} bytes"


RULES = (
    Rule("stop keeping what a step made", "9.6", "none",
         lambda c, d: f"{c.left_behind:,} bytes of each step stay alive after it",
         fault=lambda c, d: c.left_behind > 0),
    Rule("keep the shapes that are compiled", "9.4", "some padding, or one general graph",
         lambda c, d: f"{c.recompiled} more compilations in steps 3 and 4", fault=lambda c, d: c.recompiled > 0),
    Rule("compute nothing twice, and no gradient that nobody uses", "9.6", "none", _twice,
         fault=lambda c, d: bool(c.repeated or c.unused_gradients)),
    Rule("convert and move constant tensors once", "9.0", "none",
         lambda c, d: f"again in each step: {_where(c.moved_again)}", fault=lambda c, d: bool(c.moved_again)),
    Rule("load in other processes", "9.7", "memory for each worker",
         lambda c, d: f"{c.calls_per_batch or 0:,} Python calls per batch, in the training process", _workers),
    Rule("do not wait for the device in every step", "9.0", "metrics are read later",
         lambda c, d: f"the host waits {sum(c.syncs.values())} times a step: {_where(c.syncs)}", _no_waits,
         lambda c, d: bool(c.syncs) and d.asynchronous),
    Rule("batches of similar length", "9.7", "a little less random order",
         lambda c, d: f"{c.padded:.0%} of the tokens are padding", _padding),
    Rule("a fused optimizer", "9.0", "none",
         lambda c, d: f"{c.by('phase').get(OPTIMIZER, (0,))[0]:,} operations update the parameters", _optimizer),
    Rule("overlap communication with backward", "9.2", "DDP does it; larger buckets",
         lambda c, d: f"{sum(o.bytes for o in c.operations if o.collective):,} bytes in collectives", _overlap),
    Rule("bf16 autocast", "9.1", "fewer digits; check that it still trains",
         _share(_half, "fp32 products, faster at half the width"), _half),
    Rule("scaled_dot_product_attention", "9.4", "none", _share(_softmax, "softmax written to memory"), _softmax),
    Rule("torch.compile", "9.4", "compilation when it starts, and at new shapes",
         _share(_fusion, "operations between the products"), _fusion),
    Rule("a larger batch", "9.5", "fewer updates per epoch; tune the learning rate again",
         _share(_launches, "operations too small to fill the device"), _launches),
)  # fmt: skip


def advise(
    counts: Counts, device: Device, memory: int | None = None, rules: Iterable[Rule] = RULES
) -> tuple[Advice, ...]:
    """Advice on every technique: what helps first, faults before all, then by what it can give at most."""
    found = []
    if memory is not None:
        high = counts.peak > memory
        text = f"peak {counts.peak:,} bytes, limit {memory:,}; {counts.saved:,} bytes are saved for backward"
        advice = Advice("checkpointing, or micro-batches", high, False, text, (1.0, 1.0), "a third more FLOPs", "9.6")
        found.append((2.0 if high else 0.0, advice))
    for rule in rules:
        bounds = []
        for cached in (False, True):
            whole = estimate(counts, device, cached)
            total = max(whole.total + whole.data, 1e-12)
            bounds.append(total / max(total - rule.saves(counts, device, cached), 1e-3 * total))
        low, high = sorted(bounds)
        helps = rule.fault(counts, device) or low >= WORTH
        evidence = rule.evidence(counts, device)
        advice = Advice(rule.technique, helps, high >= WORTH, evidence, (low, high), rule.price, rule.unit)
        found.append((1.0 if rule.fault(counts, device) else 1 - 1 / low, advice))
    found.sort(key=lambda item: (not item[1].helps, not item[1].may, -item[0]))
    return tuple(advice for _, advice in found)
