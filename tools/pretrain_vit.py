"""Pretrain the small vision transformer from scratch on glyphs, in a few minutes on two cores.

Run it from the repository root; it replaces the checkpoint that ships with speedlab:

    python -m tools.pretrain_vit
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torchvision.models import VisionTransformer

from speedlab.data.glyphs import CLASSES, glyphs

CONFIG = {
    "image_size": 32,
    "patch_size": 8,
    "num_layers": 4,
    "num_heads": 4,
    "hidden_dim": 96,
    "mlp_dim": 384,
    "num_classes": len(CLASSES),
}
BATCH = 128
CHECKPOINT = Path(__file__).resolve().parent.parent / "speedlab" / "data" / "checkpoints" / "vit-small"


def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of images (N, 3, 32, 32) that the model assigns to their labels (N,)."""
    model.eval()
    with torch.inference_mode():
        right = sum(
            (model(batch).argmax(dim=1) == target).sum().item()
            for batch, target in zip(images.split(500), labels.split(500), strict=True)
        )
    model.train()
    return right / len(labels)


def pretrain(steps: int, seed: int) -> VisionTransformer:
    """Train for `steps` steps, each on glyphs that were never seen before; return the model."""
    torch.manual_seed(seed)
    model = VisionTransformer(**CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05, fused=True)
    warmup = max(1, steps // 20)
    rise = LinearLR(optimizer, start_factor=0.01, total_iters=warmup)
    fall = CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup))
    schedule = SequentialLR(optimizer, [rise, fall], milestones=[warmup])
    # The training glyphs' seeds count up from seed * 10**5; the seed of the held-out ones is far from all of them.
    held_out = glyphs(2000, seed + 10**9)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        images, labels = glyphs(BATCH, seed * 10**5 + step)
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        # One early batch with an outsized gradient could otherwise throw a transformer off for good.
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step == steps:
            print(
                f"step {step:5d} of {steps}  loss {loss.item():.3f}  "
                f"held-out accuracy {accuracy(model, *held_out):.3f}  {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    return model


def save(model: VisionTransformer, out: Path) -> None:
    """Write model.safetensors and config.json into a folder, each completely or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    weights, config = out / "model.safetensors", out / "config.json"
    # Not save_file: it makes a file that only its owner can read.
    Path(f"{weights}.part").write_bytes(to_bytes(model.state_dict()))
    Path(f"{config}.part").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    for path in (weights, config):
        os.replace(f"{path}.part", path)
        print(f"wrote {path.name}: {path.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    """Read the command line, pretrain, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2500, help=f"optimizer steps, each on {BATCH} images")
    args = parser.parse_args()
    save(pretrain(args.steps, args.seed), args.out)


if __name__ == "__main__":
    main()
