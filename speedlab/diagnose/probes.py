"""What a clock says of a step: with the loader, without the optimizer, with twice the batch. It never decides."""

from speedlab.diagnose.climb import again
from speedlab.diagnose.counting import Counts
from speedlab.diagnose.jobs import Job, untouched
from speedlab.diagnose.rules import Device
from speedlab.measure import Comparison, compare


def probe(job: Job, seconds: float = 20.0) -> Comparison:
    """Time a step in turns with variants of it: each ratio says what the part that is missing costs."""
    with untouched():
        model, optimizer = job.built()
        batch, double = job.batch(), job.batch(2 * job.batch_size)

        def without_optimizer() -> None:
            model.zero_grad()
            job.loss(model, batch).backward()

        variants = {"the same batch again": lambda: job.train(model, optimizer, batch)}
        if job.loader is not None:
            feed = again(job.loader)
            variants = {"with your loader": lambda: job.train(model, optimizer, next(feed)), **variants}
        variants["without the optimizer"] = without_optimizer
        variants["twice the batch"] = lambda: job.train(model, optimizer, double)
        return compare(variants, seconds=seconds, max_rounds=30)


def contradiction(counts: Counts, device: Device, measured: float) -> str:
    """Why no conclusion can be drawn: a step cannot take less than its arithmetic at the device's best rate."""
    floor = sum(o.flops / device.flops.get(o.dtype, device.flops["fp32"]) for o in counts.operations)
    if floor <= measured:
        return ""
    return (
        f"The step took {measured:.3g} s, and its arithmetic alone needs {floor:.3g} s at the rate that was measured "
        "for this machine: it was busier then. Measure again when nothing else runs."
    )
