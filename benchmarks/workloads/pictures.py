"""Small colour images made from a seed, for ladders that must not depend on a download."""

import torch
from torch.nn import functional as F

CLASSES = 10
SIZE = 32


def pictures(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (count, 3, 32, 32) in uint8 and their labels (count,), of ten classes.

    Each class is a smooth pattern of three colours, drawn once; an image shows it turned, scaled, shifted and sheared
    at random, mirrored half the time, over clutter of the same smoothness and with grain. The patterns are the same
    for every seed, so two seeds give two samples of one task.
    """
    patterns = _smooth(CLASSES, 6, torch.Generator().manual_seed(1234))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    angle = 0.5 * torch.randn(count, generator=generator)
    scale = 1.0 + 0.2 * torch.randn(count, generator=generator)
    shear, *shift = 0.25 * torch.randn(3, count, generator=generator)
    mirror = torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1
    cos, sin = scale * angle.cos(), scale * angle.sin()
    moves = torch.stack([cos * mirror, shear - sin, shift[0], sin * mirror, cos, shift[1]], 1).view(count, 2, 3)
    grid = F.affine_grid(moves, [count, 3, SIZE, SIZE], align_corners=False)
    shown = F.grid_sample(patterns[labels], grid, padding_mode="reflection", align_corners=False)
    clutter = _smooth(count, 6, generator)
    grain = torch.randn(count, 3, SIZE, SIZE, generator=generator)
    contrast = 0.6 + 0.8 * torch.rand(count, 1, 1, 1, generator=generator)
    images = contrast * shown + 0.8 * clutter + 0.4 * grain
    return (128 + 40 * images).clamp(0, 255).to(torch.uint8), labels


def _smooth(count: int, cells: int, generator: torch.Generator) -> torch.Tensor:
    coarse = torch.randn(count, 3, cells, cells, generator=generator)
    return F.interpolate(coarse, size=SIZE, mode="bicubic", align_corners=False)
