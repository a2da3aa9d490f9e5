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

    It `helps` where it mends a fault, or where its bound is worth it even if all bytes come from a cache. It `may` help
    where only the other end of the interval is worth it.
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


# --- The table: what each technique takes away, in seconds of the estimate, and what it rests on ---------------------
# saves(counts, device, cached) gives seconds; evidence(counts, device) the counters, as text.


@dataclass(frozen=True)
class Rule:
    technique: str
    unit: str
    price: str
    saves: Callable[[Counts, Device, bool], float]
    evidence: Callable[[Counts, Device], str]
    # a fault is mended whatever the estimate says
    fault: Callable[[Counts, Device], bool] = lambda counts, device: False


def _sum(counts: Counts, device: Device, cached: bool, chosen: Callable[[Operation], bool]) -> float:
    return sum(device.seconds(o, cached) for o in counts.operations if chosen(o))


def _model(operation: Operation) -> bool:
    return operation.phase in (FORWARD, BACKWARD) and not operation.collective


def _workers(c: Counts, d: Device, cached: bool) -> float:
    return min(estimate(c, d, cached).data, estimate(c, d, cached).total)


def _no_syncs(c: Counts, d: Device, cached: bool) -> float:
    # at each wait the device runs dry: it idles while the host launches the next operation, and the host while it ends
    total = estimate(c, d, cached).total
    each = d.launch + total / max(1, len(c.operations))
    return min(sum(c.syncs.values()) * each, total / 2) if d.asynchronous else 0.0


def _optimizer(c: Counts, d: Device, cached: bool) -> float:
    # one pass at least: parameter, gradient and state are read; parameter and state are written
    once = 0.0 if cached else (2 * c.parameters + c.gradients + 2 * c.optimizer) / d.bandwidth
    return max(0.0, estimate(c, d, cached).by_phase.get(OPTIMIZER, 0.0) - d.launch - once)


def _launches(c: Counts, d: Device, cached: bool) -> float:
    return _sum(c, d, cached, lambda o: _model(o) and d.bound(o) == LAUNCHES)


def _fusion(c: Counts, d: Device, cached: bool) -> float:
    # products stay calls of their own
    return _sum(c, d, cached, lambda o: _model(o) and not o.flops)


def _half(c: Counts, d: Device, cached: bool) -> float:
    kept = min(1.0, d.flops["fp32"] / d.flops.get("bf16", d.flops["fp32"]))
    products = [o for o in c.operations if _model(o) and o.flops and o.dtype == "fp32"]
    if kept == 1.0:
        return 0.0
    return sum(
        d.seconds(o, cached)
        - max(d.launch, 0.0 if cached else o.bytes / 2 / d.bandwidth, o.flops / d.flops["fp32"] * kept)
        for o in products
    )


def _attention(c: Counts, d: Device, cached: bool) -> float:
    names = ("_softmax", "_safe_softmax", "_softmax_backward_data")
    return _sum(c, d, cached, lambda o: o.name in names and d.bound(o) == MEMORY)


def _padding(c: Counts, d: Device, cached: bool) -> float:
    return c.padded * _sum(c, d, cached, lambda o: _model(o) and d.bound(o) != LAUNCHES)


def _communication(c: Counts, d: Device, cached: bool) -> float:
    found = estimate(c, d, cached)
    return min(found.by_bound[COMMUNICATION], found.by_phase.get(BACKWARD, 0.0))


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _share(rule: Callable[[Counts, Device, bool], float], what: str) -> Callable[[Counts, Device], str]:
    return lambda c, d: f"{_percent(rule(c, d, False) / max(estimate(c, d).total, 1e-12))} of the step: {what}"


def _nothing(c: Counts, d: Device, cached: bool) -> float:
    return 0.0


def _where(found: dict[str, int]) -> str:
    return "; ".join(f"{line} ({times} times)" for line, times in list(found.items())[:3])


RULES = (
    Rule("stop keeping what a step made", "9.6", "none", _nothing,
         lambda c, d: f"{c.left_behind:,} bytes of each step stay alive after it", lambda c, d: c.left_behind > 0),
    Rule("keep the shapes that are compiled", "9.4", "some padding, or one general graph", _nothing,
         lambda c, d: f"{c.recompiled} more compilations in steps 3 and 4", lambda c, d: c.recompiled > 0),
    Rule("compute nothing twice, and no gradient that nobody uses", "9.6", "none", _nothing,
         lambda c, d: f"called again on the same input: {_where(c.repeated) or 'nothing'}; gradients that no optimizer "
         f"takes: {c.unused_gradients:,} bytes", lambda c, d: bool(c.repeated or c.unused_gradients)),
    Rule("convert and move constant tensors once", "9.0", "none", _nothing,
         lambda c, d: f"moved in each step: {_where(c.moved_again)}", lambda c, d: bool(c.moved_again)),
    Rule("load in other processes", "9.7", "memory for each worker", _workers,
         lambda c, d: f"{c.calls_per_batch or 0:,} Python calls for each batch, in the training process"),
    Rule("do not wait for the device in every step", "9.0", "metrics are read later", _no_syncs,
         lambda c, d: f"the host waits {sum(c.syncs.values())} times a step: {_where(c.syncs)}", lambda c, d: bool(c.syncs) and d.asynchronous),
    Rule("batches of similar length", "9.7", "a little less random order", _padding,
         lambda c, d: f"{_percent(c.padded)} of the tokens are padding"),
    Rule("a fused optimizer", "9.0", "none", _optimizer,
         lambda c, d: f"{c.by('phase').get(OPTIMIZER, (0,))[0]:,} operations update the parameters"),
    Rule("overlap communication with backward", "9.2", "DDP does it; larger buckets", _communication,
         lambda c, d: f"{sum(o.bytes for o in c.operations if o.collective):,} bytes in collectives"),
    Rule("bf16 autocast", "9.1", "fewer digits; check that it still trains", _half,
         _share(_half, "fp32 products that the half-width unit does faster")),
    Rule("scaled_dot_product_attention", "9.4", "none", _attention, _share(_attention, "softmax written to memory")),
    Rule("torch.compile", "9.4", "compilation when it starts, and at new shapes", _fusion,
         _share(_fusion, "launches and pointwise traffic that fusing saves")),
    Rule("a larger batch", "9.5", "fewer updates per epoch; tune the learning rate again", _launches,
         _share(_launches, "operations too small to fill the device")),
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
