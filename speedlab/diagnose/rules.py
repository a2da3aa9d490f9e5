"""From counts to advice: an estimate of where a step's time goes, and a table of techniques, each with its bound.

The estimate is a roofline: an operation takes the longest of its launch, its bytes at the device's bandwidth and its
FLOPs at the rate of its dtype (Williams et al. 2009, with a launch added). Bytes that stay in a cache cost less, so
every figure is computed twice, with bytes from memory and with bytes for free; a bound is the interval between them.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from speedlab import machine
from speedlab.diagnose.counting import BACKWARD, FORWARD, OPTIMIZER, Counts, Operation

_PRODUCTS = frozenset(("bmm", "baddbmm"))
_SOFTMAX = frozenset(("_softmax",))  # not _safe_softmax, which the fused call's own fallback runs
_DROPOUT = frozenset(("native_dropout", "bernoulli_"))
# Operations whose cost grows with the square of a text's length.
_SQUARED = ("bmm", "baddbmm", "_softmax", "_safe_softmax", "_scaled_dot_product")
# A technique whose greatest possible speed-up is below this is not worth its price.
WORTH = 1.1
COMPILE, LARGER = "torch.compile", "a larger batch"
LAUNCHES, MEMORY, COMPUTE, COMMUNICATION = "launching operations", "memory traffic", "arithmetic", "communication"


@dataclass(frozen=True)
class Device:
    """What an estimate needs to know: seconds per operation and per Python call, bytes/s, FLOP/s by dtype.

    `memory` is the limit in bytes for a step's peak, where there is one. An NVIDIA GPU also has a rate for
    "tf32", at which cuDNN computes convolutions and recurrent layers of fp32 tensors unless told otherwise.
    """

    name: str
    launch: float
    bandwidth: float
    flops: dict[str, float]
    link: float = 10e9
    call: float = 1e-7
    asynchronous: bool = True
    memory: int | None = None
    tf32_convolutions: bool = False

    @classmethod
    def here(cls) -> "Device":
        """This machine, measured, except for its link and the time of a Python call."""
        where = machine.device()
        one, clock = torch.ones(1, device=where), machine.synchronised_clock(where)
        spent = []
        for _ in range(5):
            start = clock()
            for _ in range(200):
                one.add_(0)
            spent.append((clock() - start) / 200)
        rates = {name: machine.peak_flops(name) for name in ("fp32", "bf16", "fp16")}
        name, is_gpu = "this machine", where.type == "cuda"
        if is_gpu:
            rates["tf32"] = tf32_flops()
        rounded = is_gpu and torch.backends.cudnn.conv.fp32_precision == "tf32"
        return cls(name, min(spent), machine.copy_bandwidth(), rates, asynchronous=is_gpu, tf32_convolutions=rounded)

    def costs(self, operation: Operation) -> dict[str, float]:
        """The seconds that an operation would take if it waited for one thing alone."""
        if operation.collective:
            return {COMMUNICATION: self.launch + operation.bytes / 2 / self.link}
        by_cudnn = "convolution" in operation.name or operation.name.startswith("_cudnn_rnn")
        rounded = self.tf32_convolutions and operation.dtype == "fp32" and by_cudnn
        rate = self.flops.get("tf32" if rounded else operation.dtype, self.flops["fp32"])
        return {LAUNCHES: self.launch, MEMORY: operation.bytes / self.bandwidth, COMPUTE: operation.flops / rate}

    def seconds(self, operation: Operation) -> float:
        return max(self.costs(operation).values())

    def bound(self, operation: Operation) -> str:
        """What an operation waits for most."""
        costs = self.costs(operation)
        return max(costs, key=costs.get)


@contextlib.contextmanager
def rounding(flag: object, kind: str) -> Iterator[None]:
    """Round the factors of what obeys this flag of torch.backends to 'ieee' or 'tf32'. torch's older functions raise
    where a script has set one of these flags. A flag that followed a more general one keeps its value afterwards."""
    before, flag.fp32_precision = flag.fp32_precision, kind
    try:
        yield
    finally:
        flag.fp32_precision = before


def tf32_flops() -> float:
    """The best rate of an fp32 product in TF32 on a GPU, in FLOP/s."""
    with rounding(torch.backends.cuda.matmul, "tf32"):
        return machine.peak_flops.__wrapped__("fp32")


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


def estimate(counts: Counts, device: Device) -> Estimate:
    bounds, phases = dict.fromkeys((LAUNCHES, MEMORY, COMPUTE, COMMUNICATION), 0.0), {}
    for operation in counts.operations:
        spent = device.seconds(operation)
        bounds[device.bound(operation)] += spent
        phases[operation.phase] = phases.get(operation.phase, 0.0) + spent
    return Estimate(sum(bounds.values()), bounds, phases, (counts.calls_per_batch or 0) * device.call)


def contradiction(counts: Counts, device: Device, measured: float) -> str:
    """Why no conclusion can be drawn: a step cannot take less than its arithmetic at the device's best rate."""
    forever = float("inf")
    floor = estimate(counts, replace(device, launch=0.0, bandwidth=forever, link=forever)).total
    if floor <= measured:
        return ""
    return (
        f"The step took {measured:.3g} s, and its arithmetic alone needs {floor:.3g} s at the rate that was measured "
        "for this machine: it was busier then, or kernels do less than the formulas say (causal attention) or run at "
        "a different rate (TF32 in convolutions). Measure again when nothing else runs."
    )


# --- The table: what each technique takes away, in seconds of the estimate, and the counters that it rests on ------


@dataclass(frozen=True)
class Rule:
    """A row of the table. `saves(counts, device)` gives seconds, `evidence(counts, device)` a text.

    A `fault` is mended whatever the estimate says. `most(counts, device)`, where given, are the seconds for the upper
    end of the bound: what it saves where all goes well. `place(counts, device)`, where given, are those that decide
    the rule's place: what nothing cheaper could save.
    """

    technique: str
    unit: str
    price: str
    evidence: Callable[[Counts, Device], str]
    saves: Callable[[Counts, Device], float] = lambda counts, device: 0.0
    fault: Callable[[Counts, Device], bool] = lambda counts, device: False
    most: Callable[[Counts, Device], float] | None = None
    place: Callable[[Counts, Device], float] | None = None


def _time_of(chosen: Callable[[Operation, Device], bool]) -> Callable[[Counts, Device], float]:
    """The time of chosen operations of the forward and backward pass."""
    return lambda c, d: sum(
        d.seconds(o) for o in c.operations if o.phase != OPTIMIZER and not o.collective and chosen(o, d)
    )


def _workers(c: Counts, d: Device) -> float:
    whole = estimate(c, d)
    return min(whole.data, whole.total)


def _loading(calls: int | None) -> str:
    known = {None: "no loader was given", 0: "no Python calls in this process"}
    return known.get(calls) or f"about {_rounded(calls):,} Python calls per batch"


def _no_waits(c: Counts, d: Device) -> float:
    # at each wait the device runs dry, until the host has launched the next operation
    total = estimate(c, d).total
    each = d.launch + total / max(1, len(c.operations))
    return min(sum(c.syncs.values()) * each, total / 2) if d.asynchronous else 0.0


def _optimizer(c: Counts, d: Device) -> float:
    # one pass at least: parameter, gradient and state are read; parameter and state are written. Frozen parameters
    # have no part in it, and a trained one is as large as its gradient
    once = (3 * c.gradients + 2 * c.optimizer) / d.bandwidth
    done = not c.fuses or _is_fused(c)
    return 0.0 if done else max(0.0, estimate(c, d).by_phase.get(OPTIMIZER, 0.0) - max(d.launch, once))


def _is_fused(c: Counts) -> bool:
    return any(o.phase == OPTIMIZER and o.name.startswith("_fused_") for o in c.operations)


def _overlap(c: Counts, d: Device) -> float:
    waited_for = sum(d.seconds(o) for o in c.operations if o.collective and not o.beside)
    return min(waited_for, sum(d.seconds(o) for o in c.operations if o.phase == BACKWARD and not o.collective))


def _in_format(dtype: str, narrower: int, every: bool = False) -> Callable[[Counts, Device], float]:
    """What the fp32 products save in a different format, with `narrower` times fewer bytes.

    With `every`, and if there is such a product, also what all other operations save if they take and give it.
    """

    def saves(c: Counts, d: Device) -> float:
        wide = [o for o in c.operations if o.phase != OPTIMIZER and o.dtype == "fp32" and (every or not o.collective)]
        products = [o for o in wide if o.flops]
        before = wide if every and products else products
        after = [replace(o, dtype=dtype, bytes=o.bytes // narrower) for o in before]
        faster = d.flops.get(dtype, 0.0) > d.flops["fp32"]
        return sum(max(0.0, d.seconds(a) - d.seconds(b)) for a, b in zip(before, after, strict=True) if faster)

    return saves


def _attention(c: Counts) -> Callable[[Operation], bool]:
    """Whether an operation belongs to attention that is written out, around a softmax between two batched products.

    It may be in the module that has them, or in a softmax or dropout inside it. Projections do not belong to it.
    """
    ran: dict[str, set[str]] = {}
    products: dict[str, list[int]] = {}
    for number, o in enumerate(c.operations):
        if o.phase == FORWARD:
            ran.setdefault(o.module, set()).add(o.name)
            products.setdefault(o.module, []).extend([number] * (o.name in _PRODUCTS))
    parts = set()
    for number, o in enumerate(c.operations):
        if o.phase == FORWARD and o.name in _SOFTMAX:
            home = o.module if products[o.module] else o.module.rpartition(".")[0]
            before = [i for i in products.get(home, ()) if i < number]
            # of the scores, which that product made
            if before and c.operations[before[-1]].elements == o.elements and products[home][-1] > number:
                parts |= {home, *(m for m in ran if m.rpartition(".")[0] == home and ran[m] & (_SOFTMAX | _DROPOUT))}
    return lambda o: o.phase != OPTIMIZER and o.module in parts and (not o.flops or o.name in _PRODUCTS)


def _written_out(c: Counts, d: Device) -> float:
    part = _attention(c)
    return sum(d.seconds(o) for o in c.operations if part(o))


def _padding(c: Counts, d: Device) -> float:
    # the number of scores is the length squared; with rows of mean length 1 - p, at least (1 - p)^2 of them are left
    part, squared = _attention(c), 1 - (1 - c.padded) ** 2
    filled = [o for o in c.operations if o.phase != OPTIMIZER and not o.collective and d.bound(o) != LAUNCHES]
    return sum(d.seconds(o) * (squared if part(o) or o.name.startswith(_SQUARED) else c.padded) for o in filled)


def _per_step(c: Counts, d: Device) -> float:
    """What a step costs however many samples it has: launches, what is as large as the weights, the optimizer."""
    rest = replace(d, launch=0.0)
    samples = [replace(o, bytes=o.bytes - o.fixed) for o in c.operations if o.phase != OPTIMIZER]
    return estimate(c, d).total - sum(map(rest.seconds, samples))


def _per_step_but_updates(c: Counts, d: Device) -> float:
    return _per_step(c, d) - estimate(c, d).by_phase.get(OPTIMIZER, 0.0)


_half, _all_half, _tf32 = _in_format("bf16", 2), _in_format("bf16", 2, every=True), _in_format("tf32", 1)
# products stay calls of their own
_fusion = _time_of(lambda o, d: not o.flops)
# a kernel that wants the channels innermost converts what it reads and writes, which no counter sees
_layouts = _time_of(lambda o, d: "convolution" in o.name and o.name.endswith("_2d") and d.bound(o) == MEMORY)


def _share(saves: Callable[[Counts, Device], float], what: str) -> Callable[[Counts, Device], str]:
    return lambda c, d: f"{saves(c, d) / max(estimate(c, d).total, 1e-12):.0%} of the step: {what}"


_between = _share(_fusion, "operations between the products")


def _rounded(number: int) -> int:
    """Two digits: versions of Python differ by a few calls."""
    return round(number, 2 - len(str(number)))


def _too_much(c: Counts, d: Device) -> bool:
    return d.memory is not None and c.peak > d.memory


def _state(c: Counts) -> int:
    """What micro-batches and checkpoints do not make smaller."""
    return c.parameters + c.gradients + c.optimizer


def _limit(d: Device) -> str:
    return f"limit {d.memory}" if d.memory else "no limit"


def _where(found: dict[str, int]) -> str:
    return "; ".join(f"{line} ({times} times)" for line, times in list(found.items())[:3]) or "nowhere"


RULES = (
    Rule("checkpointing, or micro-batches", "9.6",
         "up to a third more FLOPs, a half with frozen weights; or smaller operations",
         lambda c, d: f"peak {c.peak:,} bytes, {_limit(d)}; saved for backward {c.saved:,}",
         fault=lambda c, d: _too_much(c, d) and _state(c) <= d.memory),
    Rule("a smaller state (LoRA, FSDP, an 8-bit optimizer)", "9.3, 9.9", "may learn less; or more devices",
         lambda c, d: f"peak {c.peak:,} bytes, {_limit(d)}; {c.peak - c.saved:,} without what is saved for backward",
         fault=lambda c, d: _too_much(c, d) and _state(c) > d.memory),
    Rule("stop keeping what a step made", "9.6", "none",
         lambda c, d: f"{c.left_behind:,} bytes of each step stay alive after it",
         fault=lambda c, d: c.left_behind > 0),
    Rule("keep the shapes that are compiled", "9.4", "some padding, or one general graph",
         lambda c, d: f"{c.recompiled} more compilations in steps 3 and 4", fault=lambda c, d: c.recompiled > 0),
    Rule("compute nothing twice, and no gradient that nobody uses", "capstone", "none",
         lambda c, d: f"again on the same input: {_where(c.repeated)}; unused gradients: {c.unused_gradients:,} B",
         fault=lambda c, d: bool(c.repeated or c.unused_gradients)),
    Rule("convert and move constant tensors once", "capstone", "the copy stays in memory",
         lambda c, d: f"again in each step: {_where(c.moved_again)}", fault=lambda c, d: bool(c.moved_again)),
    Rule("load in other processes", "9.7", "memory for each worker",
         lambda c, d: _loading(c.calls_per_batch), _workers),
    Rule("do not wait for the device in every step", "9.0", "metrics are read later",
         lambda c, d: f"the host waits {sum(c.syncs.values())} times a step: {_where(c.syncs)}", _no_waits,
         lambda c, d: bool(c.syncs) and d.asynchronous),
    Rule("batches of similar length", "9.7", "a little less random order",
         lambda c, d: f"{c.padded:.0%} of the tokens are padding", _padding),
    Rule("a fused optimizer", "9.4, 9.5", "none, except that Lightning refuses to clip in mixed precision",
         lambda c, d: f"{c.by('phase').get(OPTIMIZER, (0,))[0]:,} operations update the parameters"
         + (", fused already" * _is_fused(c) if c.fuses else ", and it has no fused version"), _optimizer),
    Rule("overlap communication with backward", "9.2", "DDP does it; larger buckets",
         lambda c, d: f"{sum(o.bytes for o in c.operations if o.collective):,} bytes into and out of collectives",
         _overlap),
    Rule("bf16 autocast", "9.1", "fewer digits; check that it still trains",
         _share(_half, "fp32 products, faster at half the width"), _half, most=_all_half),
    Rule("TF32 products", "9.1", "10 bits of mantissa in each factor",
         _share(_tf32, "fp32 products, faster in TF32"), _tf32),
    Rule("scaled_dot_product_attention", "9.6", "no attention weights to look at; dropout draws otherwise",
         _share(_written_out, "scores written to memory"), _written_out),
    Rule("channels last", "9.8", "view becomes reshape; may lose with few channels",
         _share(_layouts, "convolutions that wait for memory"), _layouts),
    Rule(COMPILE, "9.4", "compilation when it starts, and at new shapes",
         lambda c, d: "part of it is compiled already; counted as it is written" if c.compiled else _between(c, d),
         lambda c, d: 0.0 if c.compiled else _fusion(c, d)),
    Rule(LARGER, "9.5", "fewer updates per epoch; tune the learning rate again",
         _share(_per_step, "as long whatever the batch"),
         lambda c, d: 0.0 if _too_much(c, d) else _per_step(c, d), place=_per_step_but_updates),
)  # fmt: skip


def advise(
    counts: Counts, device: Device, memory: int | None = None, rules: Iterable[Rule] = RULES
) -> tuple[Advice, ...]:
    """Advice on every technique: faults first, in the table's order, then what helps, by what it can give at most."""
    device = replace(device, memory=memory or device.memory)
    found = []
    for rule in rules:
        low, high = bounds(rule.saves, counts, device)[0], bounds(rule.most or rule.saves, counts, device)[1]
        fault, evidence = rule.fault(counts, device), rule.evidence(counts, device)
        helps = fault or low >= WORTH
        advice = Advice(rule.technique, helps, high >= WORTH, evidence, (low, high), rule.price, rule.unit)
        place = bounds(rule.place or rule.saves, counts, device)[0]
        found.append(((not helps, not fault, high < WORTH, 0 if fault else -place), advice))
    return tuple(advice for _, advice in sorted(found, key=lambda item: item[0]))


def bounds(saves: Callable[[Counts, Device], float], counts: Counts, device: Device) -> tuple[float, float]:
    """The most that saving these seconds can give (Amdahl), with bytes from memory and with bytes for free."""
    found = []
    for seen in (device, replace(device, bandwidth=float("inf"))):
        whole = estimate(counts, seen)
        total = max(whole.total + whole.data, 1e-12)
        found.append(total / max(total - saves(counts, seen), 1e-3 * total))
    return min(found), max(found)
