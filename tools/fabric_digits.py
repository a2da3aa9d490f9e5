"""Make code-units/9.8-fabric/digits.pt, which the five scripts there need offline: digits and pretrained weights.

The images and weights are those of speedlab: 8 x 8 digits with pixels from 0 to 16 (training images first), and the
small vision transformer without its head, in fp16. `tests/test_fabric_scripts.py` checks that they agree.
"""

import torch
from notebooks import ROOT
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch.nn import functional as F

from speedlab.data import glyphs, models

TARGET = ROOT / "code-units" / "9.8-fabric" / "digits.pt"


def content() -> dict[str, torch.Tensor | dict[str, torch.Tensor]]:
    train_images, train_labels, val_images, val_labels = glyphs.digits()
    raw = torch.from_numpy(load_digits().data).to(torch.uint8).view(-1, 8, 8)
    enlarged = F.interpolate(raw.float().unsqueeze(1) / 16, size=(32, 32), mode="bilinear")[:, 0]
    place = {image.numpy().tobytes(): number for number, image in enumerate(enlarged)}
    order = [place[image[0].numpy().tobytes()] for image in (*train_images, *val_images)]
    stored = load_file(models.CHECKPOINTS / "vit-small" / "model.safetensors")
    return {
        "images": raw[order],
        "labels": torch.cat([train_labels, val_labels]).to(torch.uint8),
        "weights": {name: weight.half() for name, weight in stored.items() if not name.startswith("heads.")},
    }


if __name__ == "__main__":
    torch.save(content(), TARGET)
