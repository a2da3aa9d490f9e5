"""The ladder of ViT-B/16 at 224 pixels: from the plain script to all that this course teaches, one change a rung."""

import functools
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.models.vision_transformer import VisionTransformer

from benchmarks.pictures import CLASSES, pictures
from benchmarks.training import (
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
    counted,
    endless,
    larger_batch,
    step_flops,
)
from speedlab import machine
from speedlab.data import models

UNIT = "images"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TINY = 32


def start(device: torch.device, scale: str) -> Settings:
    """As the plain script has it: fp32 with TF32 off, batch 16, Adam, a metric read on the host every batch."""
    return Settings(batch=4, size=TINY) if scale == "tiny" else Settings(batch=16)


def rungs(device: torch.device, scale: str) -> tuple[Rung, ...]:
    larger = 8 if scale == "tiny" else 256
    smaller = 16 if scale == "tiny" else 112
    return (
        Rung("strict fp32", "batch 16, Adam, a metric read every batch, one image loaded at a time"),
        TF32,
        NO_HOST_SYNCS,
        FUSED,
        Rung("channels-last", "the patch embedding's convolution in its own layout", {"channels_last": True}),
        AUTOCAST,
        PLAIN_ATTENTION,
        MEMORY_KEPT,
        larger_batch(larger),
        Rung("data on the device", "the images stay there as bytes and are enlarged a batch at a time",
             {"resident": True}),
        Rung("compile", "pointwise operations are fused into one pass", {"compiled": True}, ("compiler",)),
        BF16_WEIGHTS,
        Rung(
            f"smaller images, {smaller} pixels",
            "another task: a quarter of the patches, so a quarter of the work and less to see",
            {"size": smaller},
            apart=True,
        ),
    )  # fmt: skip


def network(settings: Settings, scale: str) -> nn.Module:
    """ViT-B/16 with random weights at the settings' resolution, or the same class at a size for trying out."""
    machine.seed_everything(0)
    if scale == "tiny":
        return _with_head(VisionTransformer(settings.size, 8, 2, 2, 32, 64, num_classes=CLASSES))
    if settings.size == 224:
        return models.vit("base", pretrained=False, num_classes=CLASSES)
    return _with_head(VisionTransformer(settings.size, 16, 12, 12, 768, 3072, num_classes=CLASSES))


def _with_head(model: VisionTransformer) -> VisionTransformer:
    # torchvision starts the head at zero, so that no gradient reaches the body in the first step
    nn.init.trunc_normal_(model.heads.head.weight, std=0.02)
    return model


class _Images(nn.Module):
    """Takes the batch by name, as every ladder's model does."""

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
    """Bytes (B, 3, H, W) to normalised floats (B, 3, size, size), on the device that they are on."""
    images = F.interpolate(pixels.float() / 255, size=size, mode="bilinear", align_corners=False)
    mean, std = (torch.tensor(v, device=pixels.device).view(1, 3, 1, 1) for v in (MEAN, STD))
    return (images - mean) / std


def batches(settings: Settings, device: torch.device, scale: str) -> Iterator[Batch]:
    """Endless shuffled batches, by a DataLoader with one image a call, or gathered on the device."""
    pixels, labels = _pool(scale)
    if settings.resident:
        pixels, labels = pixels.to(device), labels.to(device)

        def epoch() -> Iterator[Batch]:
            for rows in torch.randperm(len(labels), device=device).split(settings.batch):
                if len(rows) == settings.batch:
                    yield _finished(enlarge(pixels[rows], settings.size), labels[rows], settings)

        return endless(epoch)
    # workers pay where a GPU computes; on a CPU they would take the cores that compute
    workers = 3 if device.type == "cuda" else 0
    loader = DataLoader(
        Enlarged(pixels, labels, settings.size),
        settings.batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return endless(lambda: (_finished(x.to(device), y.to(device), settings) for x, y in loader))


def _finished(images: torch.Tensor, labels: torch.Tensor, settings: Settings) -> Batch:
    if settings.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    return {"images": images.bfloat16() if settings.master else images}, labels


def _pool(scale: str) -> tuple[torch.Tensor, torch.Tensor]:
    if scale == "full":
        from speedlab import data

        return data.cifar10_tensors()[0]
    return pictures(64 if scale == "tiny" else 1024)


def proof_batch(settings: Settings, device: torch.device, scale: str, count: int) -> Batch:
    """`count` fixed images, the same for every rung."""
    pixels, labels = (part[:count].to(device) for part in _pool(scale))
    return _finished(enlarge(pixels, settings.size), labels, settings)


def blank(settings: Settings, device: torch.device, rows: int, width: int = 0) -> Batch:
    """A batch of no content, made where it is used: for counting under fake tensors."""
    images = torch.zeros(rows, 3, settings.size, settings.size, device=device)
    return _finished(images, torch.zeros(rows, dtype=torch.long, device=device), settings)


def training(settings: Settings, device: torch.device, scale: str, stream: Iterator[Batch]) -> Training:
    """The loop of these settings on `device`, fed from `stream`."""
    body = network(settings, scale)
    # A GPU gains from seeing the whole model at once. On a CPU one MLP is compiled and serves all twelve blocks:
    # compiled with it, their packed attention has gradients that are not numbers in bf16 (torch 2.15).
    regional = [layer.mlp for layer in body.encoder.layers] if device.type == "cpu" else None
    return Training(settings, device, _Images(body), stream, lr=1e-4, regional=regional, dynamic=False)


def share_of_real(settings: Settings, scale: str) -> float:
    """The part of the computed images that are real: all of them."""
    return 1.0


def flops(settings: Settings, scale: str) -> tuple[float, float]:
    """Operations of a training step for each image, computed and useful: the same, since nothing is padded."""
    each = float(_count(counted(settings), scale))
    return each, each


@functools.cache
def _count(plain: Settings, scale: str) -> int:
    return step_flops(lambda device: training(plain, device, scale, iter(())), blank)


def widest(scale: str) -> int:
    """Images have no width of their own."""
    return 0
