"""Small images that need no download: printed glyphs to pretrain on, handwritten digits to fine-tune on."""

import functools
from pathlib import Path

import torch
from torch.nn import functional as F

# Letters that look like another character once their size is normalised are left out: O is 0, I and l are 1,
# q is 9, and lower-case letters such as c, s or x are their capitals. Forty-four classes remain.
CLASSES = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZabdefghnrt"

# Text fonts that ship inside matplotlib; its symbol fonts hold no letters or only some of them.
FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmss10", "cmti10", "cmtt10"),
)

CELL = 64  # pixels per side of a rendered glyph, before it is distorted
CHUNK = 2048  # images distorted at once, so that memory stays small however many are asked for


@functools.cache
def _atlas() -> torch.Tensor:
    """Render every character in every font: float32 in [0, 1] of shape (fonts, characters, CELL, CELL).

    The unhinted outlines are filled by matplotlib's own renderer: hinting differs between FreeType versions,
    and bypassing pyplot makes the result independent of the reader's backend and style settings.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    sheet = RendererAgg(len(CLASSES) * CELL, len(FONTS) * CELL, 72)
    pen = sheet.new_gc()
    pen.set_linewidth(0)
    pen.set_snap(False)
    for row, font in enumerate(FONTS):
        properties = FontProperties(fname=folder / f"{font}.ttf")
        for column, character in enumerate(CLASSES):
            outline = TextPath((0, 0), character, size=CELL, prop=properties)
            box = outline.get_extents()
            # Three quarters of the cell high and centred; a wide letter is narrowed to fit.
            high, wide = 0.75 * CELL / box.height, min(0.75 * CELL / box.height, 0.75 * CELL / box.width)
            place = Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2).scale(wide, high)
            place.translate((column + 0.5) * CELL, (len(FONTS) - row - 0.5) * CELL)
            sheet.draw_path(pen, outline, place, (1.0, 1.0, 1.0))
    ink = torch.frombuffer(bytearray(sheet.buffer_rgba()), dtype=torch.uint8)
    ink = ink.view(len(FONTS), CELL, len(CLASSES), CELL, 4)[..., 3]
    return (ink.float() / 255).transpose(1, 2).contiguous()


def _distort(ink: torch.Tensor, size: int, generator: torch.Generator) -> torch.Tensor:
    """Turn clean glyphs (B, 1, CELL, CELL) into varied images (B, 1, size, size), all values in [0, 1]."""
    count = len(ink)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.empty(count, 1, 1, 1).uniform_(low, high, generator=generator)

    # Where each output pixel looks in the glyph: rotated, sheared, stretched, shifted ...
    angle, shear = uniform(-0.25, 0.25).flatten(), uniform(-0.3, 0.3).flatten()
    across, down = uniform(-0.25, 0.35).exp().flatten(), uniform(-0.25, 0.1).exp().flatten()
    right, low = uniform(-0.15, 0.15).flatten(), uniform(-0.1, 0.1).flatten()
    cos, sin = angle.cos(), angle.sin()
    first = torch.stack([across * cos, across * (shear * cos - sin), right], dim=1)
    second = torch.stack([down * sin, down * (shear * sin + cos), low], dim=1)
    grid = F.affine_grid(torch.stack([first, second], dim=1), [count, 1, size, size], align_corners=False)
    # ... and bent by a smooth field, as a hand bends a stroke.
    bend = 0.1 * torch.randn(count, 2, 4, 4, generator=generator)
    bend = F.interpolate(bend, size=(size, size), mode="bicubic", align_corners=True)
    images = F.grid_sample(ink, grid + bend.permute(0, 2, 3, 1), align_corners=False)

    # A soft threshold on a blurred glyph thins or thickens its stroke.
    images = F.avg_pool2d(F.pad(images, [1] * 4), 3, stride=1)
    images = torch.sigmoid((images - uniform(0.15, 0.55)) * 12)
    # Half of the images are scanned coarsely, as the handwritten digits (8 x 8 pixels) were.
    coarse = F.interpolate(F.adaptive_avg_pool2d(images, 8), size=(size, size), mode="bilinear")
    images = torch.where(uniform(0, 1) < 0.5, coarse, images)
    images = images / images.amax(dim=(1, 2, 3), keepdim=True)  # thin strokes grew faint in the blur
    images = images * uniform(0.6, 1.1) + uniform(0, 0.08) * torch.randn(images.shape, generator=generator)
    return images.clamp(0, 1)


def glyphs(count: int, seed: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw printed characters, white on black, in many fonts and bent at random.

    Returns images, float32 in [0, 1] of shape (count, 3, size, size) with three equal channels, and labels,
    int64 of shape (count,), which index CLASSES. The classes are as even as count allows, in random order.
    The same arguments give the same images.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1 image, not {count}.")
    if size < 8:
        raise ValueError(f"size must be at least 8 pixels, not {size}.")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randperm(count, generator=generator) % len(CLASSES)
    fonts = torch.randint(len(FONTS), (count,), generator=generator)
    chunks = zip(fonts.split(CHUNK), labels.split(CHUNK), strict=True)
    images = [_distort(_atlas()[font, label].unsqueeze(1), size, generator) for font, label in chunks]
    return torch.cat(images).repeat(1, 3, 1, 1), labels


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Load scikit-learn's handwritten digits: train images and labels, validation images and labels.

    Images are float32 in [0, 1] of shape (N, 3, 32, 32), enlarged from 8 x 8 pixels; labels are int64 of
    shape (N,). The split is fixed: 1,297 images to train on and 500 to validate on, with the same share of
    every digit. In the training images the digits take turns, so that the first 100 hold 10 of each.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    train, val = train_test_split(range(len(labels)), test_size=500, stratify=labels, random_state=0)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16
    images = F.interpolate(images, size=(32, 32), mode="bilinear").repeat(1, 3, 1, 1)
    labels = torch.from_numpy(labels).long()
    turn = F.one_hot(labels[train]).cumsum(0).gather(1, labels[train, None]).flatten()
    train = torch.tensor(train)[turn.argsort(stable=True)]
    return images[train], labels[train], images[val], labels[val]
