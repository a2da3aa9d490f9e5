"""Peak memory of one training step, predicted without the device and then read from a GPU's allocator.

Configurations of ViT-B/16, ViT-L/16 and DistilBERT with random weights. The prediction is count.predict_peak_memory
on fake CPU tensors, with the optimizer a GPU would run (foreach).
"""

import functools
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import vit_b_16, vit_l_16
from torchvision.models.vision_transformer import VisionTransformer

from benchmarks import day
from benchmarks.day import Item, Session
from benchmarks.race import too_little_memory
from benchmarks.workloads import as_a_gpu_keeps_it, default_dtype
from speedlab import count
from speedlab.data import models

MODELS = {"vit_b_16": vit_b_16, "vit_l_16": vit_l_16, "distilbert": models.distilbert}
_STEPS = 3


@dataclass(frozen=True)
class Configuration:
    """What is trained, and how; `precision` is 'fp32', 'bf16-mixed' (autocast) or 'bf16-true' (weights in bf16)."""

    model: str
    batch: int
    precision: str = "fp32"
    optimizer: str = "AdamW"
    checkpointing: bool = False

    def __str__(self) -> str:
        kept = ", checkpointing" if self.checkpointing else ""
        return f"{self.model}, batch {self.batch}, {self.precision}, {self.optimizer}{kept}"


CONFIGURATIONS = (
    Configuration("vit_b_16", 64),
    Configuration("vit_b_16", 64, checkpointing=True),
    Configuration("vit_b_16", 64, "bf16-mixed"),
    Configuration("vit_b_16", 256, "bf16-mixed"),
    Configuration("vit_l_16", 64),
    Configuration("vit_l_16", 64, "bf16-mixed"),
    Configuration("vit_l_16", 64, "bf16-true"),
    Configuration("vit_l_16", 16, "bf16-true", "SGD"),
    Configuration("distilbert", 32),
    Configuration("distilbert", 32, "bf16-mixed"),
)


def tiny_model(num_classes: int) -> nn.Module:
    """For trying the script out: a vision transformer of a size that takes only a moment."""
    return VisionTransformer(32, 8, 2, 2, 32, 128, num_classes=num_classes)


def build(
    chosen: Configuration, device: str, tiny: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer and a function that does one training step, all on `device`; fake tensors work too."""
    dtype = torch.bfloat16 if chosen.precision == "bf16-true" else torch.float32
    text = chosen.model == "distilbert" and not tiny
    with default_dtype(dtype), torch.device(device):
        made = tiny_model if tiny else MODELS[chosen.model]
        model = models.distilbert("base", pretrained=False) if text else made(num_classes=10)
        if text:
            given = torch.ones(chosen.batch, 512, dtype=torch.long)
        else:
            given = torch.randn(chosen.batch, 3, model.image_size, model.image_size)
        labels = torch.zeros(chosen.batch, dtype=torch.long)
    if chosen.checkpointing:
        for block in model.encoder.layers:
            block.forward = checkpointed(block.forward)
    optimizer = getattr(torch.optim, chosen.optimizer)(model.parameters(), lr=1e-5, foreach=True)

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=chosen.precision == "bf16-mixed"):
            out = model(given)
            loss = nn.functional.cross_entropy(out.logits if text else out, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def checkpointed(forward: Callable) -> Callable:
    """`forward`, changed to keep only its input and to recompute the rest in the backward pass."""
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def predict(chosen: Configuration, tiny: bool = False) -> int:
    """Predicted peak of allocated bytes, from fake CPU tensors: nothing is computed, and no GPU is needed."""
    with warnings.catch_warnings(), as_a_gpu_keeps_it():
        warnings.filterwarnings("ignore", "Module is None")  # the tracker says so about a model inside a model
        return count.predict_peak_memory(lambda: build(chosen, "cpu", tiny)).total


def measure(chosen: Configuration, tiny: bool = False) -> dict[str, int]:
    """The GPU allocator's peaks in bytes, allocated and reserved, over real steps that start from an empty cache."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    _, _, step = build(chosen, "cuda", tiny)
    for _ in range(_STEPS):
        step()
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated() - before[0],
        "reserved": torch.cuda.max_memory_reserved() - before[1],
    }


def run(chosen: Configuration, session: Session, rows: list[dict] = ()) -> list[dict]:
    """One row: the configuration, the prediction in bytes, and the measurement or the reason why there is none."""
    row = {"task": f"peak memory of {chosen}", **asdict(chosen), "predicted": predict(chosen, session.tiny)}
    if not session.on_gpu:
        short = "a CPU's allocator keeps no peak"
    else:
        short = too_little_memory(session.device, row["predicted"])
    if short:
        return [{**row, "not_run": f"{short}; the prediction is {row['predicted'] / 1e9:.2f} GB"}]
    row |= measure(chosen, session.tiny)
    return [{**row, "found": words(row)}]


def words(row: dict) -> str:
    """A measured row in words, in GB of 10^9 bytes, with the prediction's error."""
    gigabytes = "predicted {predicted:.2f} GB, allocated {allocated:.2f}, reserved {reserved:.2f}".format(
        **{key: row[key] / 1e9 for key in ("predicted", "allocated", "reserved")}
    )
    return f"{gigabytes}; the prediction is off by {row['predicted'] / row['allocated'] - 1:+.1%}"


def items(session: Session) -> Iterator[Item]:
    """An item per configuration."""
    for chosen in CONFIGURATIONS:
        yield Item(str(chosen), 45, functools.partial(run, chosen, session))


if __name__ == "__main__":
    sys.exit(day.main({"memory": items}, __doc__))
