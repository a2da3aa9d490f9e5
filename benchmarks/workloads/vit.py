"""ViT-B/16 at 224 pixels: from a plain script to everything that this course teaches, one change per rung."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.models.vision_transformer import VisionTransformer

from benchmarks.loop import (
    AUTOCAST,
    BF16_WEIGHTS,
    FUSED,
    MEMORY_KEPT,
    NO_HOST_SYNCS,
    PLAIN_ATTENTION,
    TF32,
    Batch,
    Rung,
    Settings,
    Training,
    endless,
    larger_batch,
)
from benchmarks.workloads import CPU, Workload
from benchmarks.workloads.pictures import CLASSES, pictures
from speedlab import machine
from speedlab.data import models

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Vit(Workload):
    """Fine-tuning ViT-B/16 on small pictures that are enlarged to 224 pixels."""

    task = "Fine-tuning ViT-B/16 at 224 pixels"
    target = 0.65

    def start(self) -> Settings:
        """As in a plain script: fp32 with TF32 off, batch 16, Adam, a metric read on the host every batch."""
        if self.tiny:
            return Settings(batch=4, size=32)
        # workers pay off where a GPU computes; on a CPU they would take cores from the computation
        return Settings(batch=16, workers=3 if self.device.type == "cuda" else 0)

    def rungs(self) -> tuple[Rung, ...]:
        smaller = 16 if self.tiny else 112
        resident = Rung("data on the device", "the images stay there as bytes and are enlarged a batch at a time",
                        {"resident": True})  # fmt: skip
        # a GPU waits for three workers as soon as its products are fast, and no later rung could show its own gain
        early, late = ((resident,), ()) if self.device.type == "cuda" else ((), (resident,))
        return (
            Rung("strict fp32", "batch 16, Adam, a metric read every batch, one image loaded at a time"),
            TF32,
            *early,
            NO_HOST_SYNCS,
            FUSED,
            Rung("channels-last", "the patch embedding's convolution in its own layout", {"channels_last": True}),
            AUTOCAST,
            PLAIN_ATTENTION,
            MEMORY_KEPT,
            larger_batch(8 if self.tiny else 256),
            *late,
            Rung("compile", "pointwise operations are fused into one pass", {"compiled": True}, ("compiler",)),
            BF16_WEIGHTS,
            Rung(f"smaller images, {smaller} pixels",
                 "a different task: a quarter of the patches, so a quarter of the work and less to see",
                 {"size": smaller}, apart=True),
        )  # fmt: skip

    def network(self, settings: Settings) -> nn.Module:
        """ViT-B/16 with random weights at the settings' resolution, or a tiny one for trying things out."""
        machine.seed_everything(0)
        if settings.size == 224:
            return models.vit("base", pretrained=False, num_classes=CLASSES)
        shape = (8, 2, 2, 32, 64) if self.tiny else (16, 12, 12, 768, 3072)
        model = VisionTransformer(settings.size, *shape, num_classes=CLASSES)
        # torchvision starts the head at zero, so that no gradient reaches the body in the first step
        nn.init.trunc_normal_(model.heads.head.weight, std=0.02)
        return model

    def training(
        self, settings: Settings, stream: Iterator[Batch] | None = None, device: torch.device | None = None
    ) -> Training:
        device, body = device or self.device, self.network(settings)
        # A GPU gains from seeing the whole model at once. On a CPU one MLP is compiled and serves all twelve blocks:
        # their packed attention, if it were compiled too, would get NaN gradients in bf16 (torch 2.15).
        regional = [layer.mlp for layer in body.encoder.layers] if device.type == "cpu" else None
        return Training(settings, device, Named(body), stream, lr=1e-4, regional=regional, dynamic=False)

    def batches(self, settings: Settings) -> Iterator[Batch]:
        """From a DataLoader that loads one image per call, or gathered on the device."""
        pixels, labels = self.pool()
        if settings.resident:
            pixels, labels = pixels.to(self.device), labels.to(self.device)

            def epoch() -> Iterator[Batch]:
                for rows in torch.randperm(len(labels), device=self.device).split(settings.batch):
                    if len(rows) == settings.batch:
                        yield finished(enlarge(pixels[rows], settings.size), labels[rows], settings)

            return endless(epoch)
        loader = DataLoader(
            Enlarged(pixels, labels, settings.size),
            settings.batch,
            shuffle=True,
            drop_last=True,
            num_workers=settings.workers,
            persistent_workers=settings.workers > 0,
            pin_memory=settings.pinned,
        )

        def there(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.device, non_blocking=settings.pinned)

        return endless(lambda: (finished(there(x), there(y), settings) for x, y in loader))

    def pool(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All images as bytes (N, 3, 32, 32), and their labels."""
        if self.scale == "full":
            from speedlab import data

            return data.cifar10_tensors()[0]
        return pictures(64 if self.tiny else 1024)

    def fixed(self, settings: Settings, rows: int, width: int = 0) -> Batch:
        pixels, labels = self.pool()
        at = torch.arange(rows) % len(labels)
        return finished(enlarge(pixels[at].to(self.device), settings.size), labels[at].to(self.device), settings)

    def blank(self, settings: Settings, rows: int, width: int = 0) -> Batch:
        images = torch.zeros(rows, 3, settings.size, settings.size, device=CPU)
        return finished(images, torch.zeros(rows, dtype=torch.long, device=CPU), settings)


class Named(nn.Module):
    """Takes the batch by name, as every workload's model does."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)


class Enlarged(Dataset):
    """Bytes (3, 32, 32), enlarged and normalised one image at a time, as a plain script's transforms do."""

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor, size: int):
        self.pixels, self.labels, self.size = pixels, labels, size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return enlarge(self.pixels[index : index + 1], self.size)[0], self.labels[index]


def enlarge(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """Bytes (B, 3, H, W) to normalised floats (B, 3, size, size), on the same device."""
    images = F.interpolate(pixels.float() / 255, size=size, mode="bilinear", align_corners=False)
    mean, std = (torch.tensor(v, device=pixels.device).view(1, 3, 1, 1) for v in (MEAN, STD))
    return (images - mean) / std


def finished(images: torch.Tensor, labels: torch.Tensor, settings: Settings) -> Batch:
    """A batch in the layout and the dtype of the settings."""
    if settings.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    return {"images": images.bfloat16() if settings.master else images}, labels
