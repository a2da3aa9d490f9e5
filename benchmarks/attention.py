"""The back ends of scaled_dot_product_attention: time and memory, forward and backward, by sequence length."""

import functools
import sys
import warnings
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import day
from benchmarks.day import Item, Session, first_line
from speedlab import count, machine, measure

BACKENDS = ("MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION")
HEADS, WIDTH = 12, 64


def measured(length: int, batch: int, dtype: str, session: Session, rows: list[dict]) -> list[dict]:
    """A row per back end, their timings interleaved; on a GPU with its peak memory."""
    task = f"attention in {dtype}, {batch} × {length} tokens, {HEADS} heads of {WIDTH}"
    if not machine.is_fast(dtype):
        return [{"task": task, "not_run": f"there is no fast hardware for {dtype} here"}]
    shape = (batch, HEADS, length, WIDTH)
    made = {"device": session.device, "dtype": machine.DTYPES[dtype], "requires_grad": True}
    query, key, value = (torch.randn(shape, **made) for _ in range(3))
    upstream = torch.randn_like(query)

    def step(backend: str) -> None:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            torch.autograd.grad(scaled_dot_product_attention(query, key, value), (query, key, value), upstream)

    ready, lacking, peaks = {}, {}, {}
    for backend in BACKENDS:
        if session.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                step(backend)
            except RuntimeError as error:
                lacking[backend] = reason(error, [str(one.message) for one in said])
                continue
        ready[backend] = functools.partial(step, backend)
        peaks[backend] = torch.cuda.max_memory_allocated() - held if session.on_gpu else None
    result = measure.compare(ready, seconds=session.seconds)
    operations = count.flops(next(iter(ready.values())))
    answers = [{"task": task, "backend": name, "not_run": f"{name}: {why}"} for name, why in lacking.items()]
    for name, timing in result.timings.items():
        memory = f", {peaks[name] / 1e9:.3g} GB" if peaks[name] else ""
        answers.append({
            "task": task, "backend": name, "dtype": dtype, "batch": batch, "length": length,
            "median_s": timing.median, "low_s": timing.low, "high_s": timing.high, "memory": peaks[name],
            "flops": operations, "found": f"{name}: {timing}, {result.ratios.get(name, 'baseline')}{memory}",
        })  # fmt: skip
    return answers


def reason(error: RuntimeError, said: list[str]) -> str:
    """Why a back end refused: the first warning that gives a reason, otherwise the first line of the error."""
    telling = [text for text in said if "not used because" not in text and "runtime disabled" not in text]
    return telling[0].split(" (Triggered internally")[0].strip() if telling else first_line(error)


def items(session: Session) -> Iterator[Item]:
    """An item per length and dtype; on a GPU every batch has the same number of tokens."""
    shapes = ((512, 32), (2048, 8), (8192, 2)) if session.on_gpu else ((512, 2), (2048, 1))
    for length, batch in ((64, 1),) if session.tiny else shapes:
        for dtype in ("bf16", "fp32"):
            work = functools.partial(measured, length, batch, dtype, session)
            yield Item(f"{length} tokens, {dtype}", session.seconds + 10, work)


if __name__ == "__main__":
    sys.exit(day.main({"attention": items}, __doc__))
