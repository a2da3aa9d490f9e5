"""Peak memory of one training step, predicted without the device and then read from a GPU's allocator.

Six configurations of ViT-B/16 and ViT-L/16 with random weights, each differing from an earlier one in one thing. The
prediction is count.predict_peak_memory on fake CPU tensors, with the optimizer a GPU would run (foreach). Usage:
python -m benchmarks.memory [--steps 3] [--quick] [--out FILE]
"""

import argparse
import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import vit_b_16, vit_l_16
from torchvision.models.vision_transformer import VisionTransformer

from speedlab import count, machine
from speedlab.results import record

MODELS = {"vit_b_16": vit_b_16, "vit_l_16": vit_l_16}


@dataclass(frozen=True)
class Configuration:
    """What is trained: precision is 'fp32', 'bf16-mixed' (autocast) or 'bf16-true' (weights in bf16)."""

    model: str
    batch: int
    precision: str = "fp32"
    optimizer: str = "AdamW"
    checkpointing: bool = False


CONFIGURATIONS = (
    Configuration("vit_b_16", 64),
    Configuration("vit_b_16", 64, checkpointing=True),
    Configuration("vit_l_16", 64),
    Configuration("vit_l_16", 64, "bf16-mixed"),
    Configuration("vit_l_16", 64, "bf16-true"),
    Configuration("vit_l_16", 16, "bf16-true", "SGD"),
)


def tiny_model(num_classes: int) -> nn.Module:
    """For trying the script out: the same class at a size that takes a moment."""
    return VisionTransformer(32, 8, 2, 2, 32, 128, num_classes=num_classes)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new floating-point tensors `dtype`; under fake tensors, Module.to(dtype) does not work."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(
    chosen: Configuration, device: str, tiny: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer and one training step of it, all on `device`; on fake tensors too."""
    dtype = torch.bfloat16 if chosen.precision == "bf16-true" else torch.float32
    with default_dtype(dtype), torch.device(device):
        model = (tiny_model if tiny else MODELS[chosen.model])(num_classes=10)
        images = torch.randn(chosen.batch, 3, model.image_size, model.image_size)
        labels = torch.zeros(chosen.batch, dtype=torch.long)
    if chosen.checkpointing:
        for block in model.encoder.layers:
            block.forward = checkpointed(block.forward)
    optimizer = getattr(torch.optim, chosen.optimizer)(model.parameters(), lr=1e-5, foreach=True)

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=chosen.precision == "bf16-mixed"):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def checkpointed(forward: Callable) -> Callable:
    """`forward`, keeping only its input and computing the rest again in the backward pass."""
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def predict(chosen: Configuration, tiny: bool = False) -> int:
    """Peak allocated bytes, found on fake CPU tensors: nothing is computed, and no device is needed."""
    return count.predict_peak_memory(lambda: build(chosen, "cpu", tiny)).total


def measure(chosen: Configuration, steps: int, tiny: bool = False) -> dict[str, int]:
    """What the GPU's allocator says after `steps` real steps, from an empty cache: peak allocated, peak reserved."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _, _, step = build(chosen, "cuda", tiny)
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated() - before,
        "reserved": torch.cuda.max_memory_reserved(),
        # what the driver says is in use, with the CUDA context and other processes
        "device_in_use": torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0],
    }


def run(chosen: Configuration, steps: int, tiny: bool = False) -> dict:
    """One row: the configuration, the prediction in bytes, and the measurement or the reason why there is none."""
    row = {**asdict(chosen), "predicted": predict(chosen, tiny)}
    free, total = torch.cuda.mem_get_info()
    if row["predicted"] * 1.2 > free:
        short = (
            f"needs about {row['predicted'] * 1.2 / 1e9:.1f} GB, and {free / 1e9:.1f} of {total / 1e9:.1f} GB is free"
        )
        return {**row, "not_run": short}
    try:
        return {**row, **measure(chosen, steps, tiny)}
    except torch.OutOfMemoryError as error:
        return {**row, "not_run": str(error).splitlines()[0]}


def line(row: dict) -> str:
    """A row as people read it, in GB of a thousand million bytes."""
    kept = ", checkpointing" if row["checkpointing"] else ""
    name = f"{row['model']}, batch {row['batch']}, {row['precision']}, {row['optimizer']}{kept}"
    if "not_run" in row:
        return f"{name}: predicted {row['predicted'] / 1e9:.2f} GB; not run, {row['not_run']}"
    ratio = row["predicted"] / row["allocated"]
    return (
        f"{name}: predicted {row['predicted'] / 1e9:.2f} GB, allocated {row['allocated'] / 1e9:.2f} "
        f"(predicted/allocated {ratio:.3f}), reserved {row['reserved'] / 1e9:.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="real steps a configuration; at least 2")
    parser.add_argument("--quick", action="store_true", help="a tiny model in place of ViT-B/16 and ViT-L/16")
    parser.add_argument("--out", type=Path, help="the results file (default: results/<machine>.json)")
    options = parser.parse_args()
    if machine.device().type != "cuda":
        print("This benchmark reads a GPU's allocator, and there is no CUDA GPU here.", file=sys.stderr)
        return 2
    load = psutil.getloadavg()[0]
    print(machine.describe())
    rows = []
    for chosen in CONFIGURATIONS:
        rows.append(run(chosen, max(2, options.steps), options.quick))
        print(line(rows[-1]), flush=True)
    print("written to", record("memory", rows, options.out, load))
    return 0


if __name__ == "__main__":
    sys.exit(main())
