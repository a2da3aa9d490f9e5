"""A diagnosis as tables, as one HTML file that needs no network, and as JSON."""

import base64
import dataclasses
import html
import json
from dataclasses import dataclass

from speedlab import plots
from speedlab.diagnose.climb import HELD, SAME, Rung, climb, outside, probe
from speedlab.diagnose.counting import Counts, counts
from speedlab.diagnose.jobs import Job
from speedlab.diagnose.rules import COMPILE, LARGER, WORTH, Advice, Device, Estimate, advise, contradiction, estimate
from speedlab.display import Table, bytes_text, table
from speedlab.measure import Comparison

NOT_SEEN = (
    "what kernels really cost: bytes are counted as if each operation ran alone, without caches",
    "arithmetic of kernels from outside PyTorch (flash_attn, Triton), and what a GPU runs otherwise than a CPU: "
    "where it was counted on a CPU, attention with dropout keeps its scores, and an optimizer goes tensor by tensor",
    "the network between machines, and waiting for slower processes",
    "what a step does in Python or in other libraries, unless a clock is read",
    "decoding in C, which the count of Python calls leaves out: look at the row with your loader",
    "whether fewer steps would do: a schedule, or a better pretrained model (9.9)",
)


@dataclass(frozen=True)
class Diagnosis:
    """What bounds a step on a device, and what would help it; `probes` and `rungs` where a clock was read.

    `outside` are the seconds that a step spends outside PyTorch's operations, by that clock.
    """

    device: Device
    counts: Counts
    estimate: Estimate
    advice: tuple[Advice, ...]
    probes: Comparison | None = None
    cannot_tell: str = ""
    rungs: tuple[Rung, ...] = ()
    steps: int | None = None
    outside: float = 0.0

    @property
    def helps(self) -> tuple[str, ...]:
        """The techniques that are worth it, in order."""
        return tuple(advice.technique for advice in self.advice if advice.helps)

    def counted(self) -> Table:
        """What the step consists of; the same on any machine."""
        c = self.counts
        rows = [
            ("operations", f"{len(c.operations):,}", _by(c, "phase", 0)),
            ("FLOPs", f"{c.flops:,}", _by(c, "dtype", 1)),
            ("bytes moved", bytes_text(c.bytes), f"{c.flops / max(c.bytes, 1):.1f} FLOPs per byte"),
            ("saved for backward", bytes_text(c.saved), ", ".join(list(c.saved_by_module)[:1])),
            ("predicted peak", bytes_text(c.peak), f"parameters {bytes_text(c.parameters)}"),
            ("waits of the host", str(sum(c.syncs.values())), "; ".join(c.syncs)),
            ("padding", f"{c.padded:.0%}", "of all tokens"),
            ("graph breaks", str(sum((c.graph_breaks or {}).values())), "; ".join(c.graph_breaks or ())),
        ]
        return table(["in one step", "counted", "of which"], rows)

    def advised(self) -> Table:
        """What helps, in order, what may (?), and what does not (-); exact for a device whose figures are given."""
        places = {a.technique: i for i, a in enumerate((a for a in self.advice if a.helps), 1)}
        marks = [places.get(a.technique, "?" if a.may else "-") for a in self.advice]
        rows = [
            (mark, a.technique, _bound(a), a.evidence, a.price if mark != "-" else "", a.unit)
            for mark, a in zip(marks, self.advice, strict=True)
        ]
        return table(["", "technique", "at most", "evidence", "price", "unit"], rows)

    def climbed(self) -> Table:
        """What each technique that was tried gave."""
        c = self.counts
        rows = [("as it was", "", "", f"{len(c.operations):,}", f"{c.flops:,}", f"{c.bytes:,}")]
        for r in self.rungs:
            counted = ("" if number is None else f"{number:,}" for number in (r.operations, r.flops, r.bytes))
            rows.append((r.technique, r.why, "" if r.off is None else f"{r.off:.0e}", *counted))
        return Table(("tried", "result", "off by", "operations", "FLOPs", "bytes moved"), tuple(rows), stamp=True)

    def planned(self) -> Table:
        """What the planned steps take, and the most that each piece of advice could save of it.

        A step's time is the clock's where there is a probe, else the estimate's. How long compiling takes is unknown
        until it is tried: it pays where it takes less time than it saves.
        """
        step = self.probes.timings[SAME].median if self.probes else self.estimate.total
        whole = self.steps * (step + self.estimate.data)
        rows = [("all of them take", duration(whole), "")]
        for a in (a for a in self.advice if (a.helps or a.may) and a.at_most[1] >= WORTH):
            low, high = (duration(whole * (1 - 1 / bound)) for bound in a.at_most)
            pays = "if it compiles in less" if a.technique == COMPILE else a.price
            rows.append((f"{a.technique} saves at most", f"{low} to {high}" if low != high else high, pays))
        return Table((f"{self.steps:,} steps", "time", "price"), tuple(rows), stamp=self.probes is not None)

    def sentence(self) -> str:
        """The regime, and the first thing to do."""
        if self.cannot_tell:
            return f"Cannot tell what bounds this step. {self.cannot_tell}"
        late = self.probes and self.probes.ratios.get(HELD)
        if late and late.low >= 2:
            return (
                f"By the clock this step waits most for the data pipeline: with batches in memory it is {late}. "
                "First: load in other processes, or in more of them, or do less for each sample (9.7)."
            )
        times = {name: timing.median for name, timing in self.probes.timings.items()} if self.probes else {}
        step, twice = times.get(SAME, float("inf")), times.get("twice the batch", 0.0)
        if self.outside > step / 2:
            return (
                f"By the clock, {self.outside:.2g} s of this step's {step:.2g} s are in no operation of PyTorch: in "
                "Python, in another library, or asleep. First: find the lines (py-spy, cProfile), and take them out "
                "of the step."
            )
        helps = [name for name in self.helps if name != LARGER or twice < 1.8 * step]
        nothing = "Nothing in the table would help it by a tenth."
        if any(a.may for a in self.advice):
            nothing = "Nothing in the table is sure to help it by a tenth; what is marked ? may."
        first = f"First: {helps[0]}." if helps else nothing
        if helps[:1] != list(self.helps[:1]):
            first += f" By the clock {LARGER} would not help: twice the batch takes {twice / step:.1f} times as long."
        return f"On {self.device.name} this step waits most for {self.estimate.regime}. {first}"

    def tables(self) -> dict[str, Table]:
        """All tables of the report by their titles."""
        return {
            "What helps, in order": self.advised(),
            **({"What the planned steps take": self.planned()} if self.steps else {}),
            "What one step consists of": self.counted(),
            **({"What the clock says": self.probes.table()} if self.probes else {}),
            **({"What was tried": self.climbed()} if self.rungs else {}),
        }

    def text(self) -> str:
        """The report for a terminal."""
        unseen = "\n".join(f"- {line}" for line in NOT_SEEN)
        return "\n\n".join([self.sentence(), *map(repr, self.tables().values()), f"What this cannot see:\n{unseen}"])

    def json(self) -> str:
        """Everything, as JSON; operations are summed by name."""
        rungs = (dataclasses.replace(r, off=None if r.off == float("inf") else r.off) for r in self.rungs)
        plain = dataclasses.asdict(dataclasses.replace(self, probes=None, rungs=tuple(rungs)))
        plain["counts"]["operations"] = self.counts.by("name")
        plain["probes"] = self.probes and {name: timing.median for name, timing in self.probes.timings.items()}
        return json.dumps(plain, indent=1)

    def html(self) -> str:
        """One page with its figure inside."""
        shown, ax = plots.figure(height=2.4)
        parts = {name: 1e3 * spent for name, spent in self.estimate.by_bound.items()}
        plots.bars(ax, parts, title="Where the estimate puts the time", label="ms per step")
        picture = base64.b64encode(plots.png(shown)).decode()
        alt = "; ".join(f"{name} {value:.3g} ms" for name, value in parts.items())
        tables = "".join(f"<h2>{title}</h2>{shown._repr_html_()}" for title, shown in self.tables().items())
        unseen = "".join(f"<li>{html.escape(line)}</li>" for line in NOT_SEEN)
        return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Diagnosis</title>
<style>body{{font:16px sans-serif;max-width:60em;margin:2em auto}}td,th{{padding:.2em .6em;text-align:left}}</style>
<h1>Diagnosis of a training step</h1><p>{html.escape(self.sentence())}</p>
<img alt="{html.escape(alt)}" src="data:image/png;base64,{picture}">
{tables}<h2>What this cannot see</h2><ul>{unseen}</ul></html>"""


def diagnose(
    job: Job,
    device: Device | None = None,
    *,
    memory: int | None = None,
    seconds: float = 0.0,
    climbing: bool = False,
    steps: int | None = None,
) -> Diagnosis:
    """Diagnose a step: by counters alone with a given `device` and no `seconds`, else with probes of this machine.

    `memory` is the limit in bytes. With `climbing`, what is advised is applied to copies, proved and timed. With
    `steps`, the report says how long they take, and how much of that each piece of advice could save.
    """
    here = device or Device.here()
    found = counts(job)
    timing = probe(job, seconds / 3) if seconds else None
    seen = timing and not found.compiled  # in compiled code, operations cannot be told apart
    own = outside(job, seconds / 6) if seen else 0.0
    doubt = ""
    if timing and device is None:
        doubt = contradiction(found, here, timing.timings[SAME].median)
    rungs = climb(job, here, memory=memory, seconds=seconds / 2 or 60.0)[1] if climbing and not doubt else ()
    return Diagnosis(
        here, found, estimate(found, here), advise(found, here, memory), timing, doubt, rungs, steps, own
    )


def _by(counts: Counts, kind: str, column: int) -> str:
    return ", ".join(f"{name or 'other'} {row[column]:,}" for name, row in counts.by(kind).items() if row[column])


def duration(seconds: float) -> str:
    """Hours, minutes or seconds, to two digits."""
    size, unit = next((pair for pair in ((3600, "h"), (60, "min")) if seconds >= 2 * pair[0]), (1, "s"))
    return f"{seconds / size:,.2g} {unit}" if seconds < 99 * size else f"{seconds / size:,.0f} {unit}"


def _bound(advice: Advice) -> str:
    low, high = advice.at_most
    if high < 1.005:
        return "a fault" if advice.helps else "nothing"
    return f"{low:.2f}x to {high:.2f}x" if high - low > 0.005 else f"{high:.2f}x"
