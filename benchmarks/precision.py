"""The step time of ViT-B/16 and DistilBERT-base in each precision, interleaved against strict fp32.

Random weights, so that nothing is downloaded; a step is forward, backward and AdamW. Usage:
python -m benchmarks.precision [--seconds 20] [--vit-batch 8] [--text-batch 8] [--out FILE]
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from torch import nn

from speedlab import count, machine, measure
from speedlab.data import models
from speedlab.results import record

TOKENS = 128


def make_step(
    model: nn.Module, forward: Callable[[], torch.Tensor], labels: torch.Tensor, precision: str
) -> Callable[[], None]:
    """One training step in 'fp32' (strict), 'tf32', 'bf16' or 'fp16' (both autocast; fp16 with a loss scaler)."""
    device = labels.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    half = machine.DTYPES.get(precision, torch.float32)

    def step() -> None:
        with _products(precision), torch.autocast(device, dtype=half, enabled=precision in ("bf16", "fp16")):
            loss = nn.functional.cross_entropy(forward().float(), labels)
        with _products(precision):
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def _products(precision: str) -> Iterator[None]:
    """Let fp32 products use TF32 for 'tf32' only, and put the setting back."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def measure_model(name: str, batch: int, seconds: float) -> list[dict]:
    """Time one model in every precision that is fast here, and say of the others that they were not run."""
    device = machine.device()
    machine.seed_everything(0)
    if name == "vit_b_16":
        model = models.vit("base", pretrained=False).to(device).train()
        images = torch.randn(batch, 3, 224, 224, device=device)
        work, labels = lambda: model(images), torch.randint(0, 10, (batch,), device=device)
    else:
        model = models.distilbert("base", pretrained=False).to(device).train()
        tokens = torch.randint(0, 30_000, (batch, TOKENS), device=device)
        work, labels = lambda: model(input_ids=tokens).logits, torch.randint(0, 2, (batch,), device=device)
    wanted = ["fp32", *(["tf32"] if device.type == "cuda" else []), "bf16", "fp16"]
    fast = [p for p in wanted if p == "tf32" or machine.is_fast(p)]
    steps = {precision: make_step(model, work, labels, precision) for precision in fast}
    result = measure.compare(steps, seconds=seconds)
    flops = count.flops(steps["fp32"])
    rows = [
        {
            "model": name,
            "batch": batch,
            "dtype": precision,
            "median_s": timing.median,
            "low_s": timing.low,
            "high_s": timing.high,
            "rounds": len(timing.samples),
            "flops": flops,
            "speedup": result.ratios[precision].median if precision in result.ratios else 1.0,
            "verdict": str(result.ratios[precision]) if precision in result.ratios else "baseline",
        }
        for precision, timing in result.timings.items()
    ]
    slow = [p for p in wanted if p not in fast]
    reason = {p: f"a small product takes {machine.probe()[p]:.0f} times as long as in fp32" for p in slow}
    print(result)
    return rows + [{"model": name, "batch": batch, "dtype": p, "not_run": reason[p]} for p in slow]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="budget a model")
    parser.add_argument("--vit-batch", type=int, default=64 if machine.device().type == "cuda" else 8)
    parser.add_argument("--text-batch", type=int, default=64 if machine.device().type == "cuda" else 8)
    parser.add_argument("--out", type=Path, help="the results file (default: results/<machine>.json)")
    options = parser.parse_args()
    load = psutil.getloadavg()[0]
    print(machine.describe())
    rows = measure_model("vit_b_16", options.vit_batch, options.seconds)
    rows += measure_model("distilbert-base", options.text_batch, options.seconds)
    print("written to", record("precision", rows, options.out, load))


if __name__ == "__main__":
    main()
