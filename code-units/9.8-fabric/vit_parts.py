"""What the five scripts share: options, images and the vision transformer. It needs only torch and torchvision.

digits   1,797 handwritten digits from scikit-learn and a small transformer that was pretrained on printed characters.
         Both are in digits.pt, next to this file; nothing is downloaded.
cifar10  CIFAR-10 at 224 x 224 and ViT-B/16 with ImageNet weights. torchvision downloads both, once.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision.datasets import CIFAR10
from torchvision.models import VisionTransformer, ViT_B_16_Weights, vit_b_16
from torchvision.transforms import v2

# On a Mac, Fabric's accelerator="auto" would use the GPU, whereas the plain scripts use the CPU.
os.environ.setdefault("DISABLE_MPS", "1")
DIGITS = Path(__file__).with_name("digits.pt")
LEARNING_RATE = {"digits": 1e-3, "cifar10": 5e-5}


def options(argv: Sequence[str] | None, most_devices: int = 1024) -> argparse.Namespace:
    """Parse a script's options from `argv`, or from the command line if `argv` is None."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", choices=["digits", "cifar10"], default="digits")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="images per step, across all devices")
    parser.add_argument("--devices", type=int, default=1, help="processes, each with its own GPU if there are GPUs")
    parser.add_argument("--images", type=int, default=10**6, help="train on only the first IMAGES images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="FILE", help="where to save the trained model")
    args = parser.parse_args(argv)
    if min(args.epochs, args.batch, args.devices) < 1 or args.images < args.batch:
        parser.error("epochs, batch and devices must be 1 or more, and images must fill a batch")
    if args.devices > most_devices:
        parser.error("plain PyTorch trains on one device here; from 02 on, Fabric can use several")
    if args.batch % args.devices:
        parser.error("the batch must be a multiple of devices, so that each device gets an equal part")
    return args


def datasets(data: str) -> tuple[Dataset, Dataset, Dataset]:
    """Labelled images (3, H, W): to train on, to validate on after each epoch, and to test on once, at the end."""
    if data == "digits":
        stored = torch.load(DIGITS, weights_only=True)
        pixels = stored["images"].float().unsqueeze(1) / 16  # (N, 1, 8, 8), in [0, 1]
        images = F.interpolate(pixels, size=(32, 32), mode="bilinear").repeat(1, 3, 1, 1)
        digits = TensorDataset(images, stored["labels"].long())
        return Subset(digits, range(1097)), Subset(digits, range(1097, 1297)), Subset(digits, range(1297, 1797))
    normalise = v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])  # as in ImageNet's recipe
    transform = v2.Compose([v2.ToImage(), v2.Resize((224, 224)), v2.ToDtype(torch.float32, scale=True), normalise])
    folder, several = Path(torch.hub.get_dir(), "data"), dist.is_available() and dist.is_initialized()
    if several and dist.get_rank() > 0:
        dist.barrier()  # the first process downloads while the others wait for it
    with fetched(CIFAR10.filename, folder):
        learn, test = (CIFAR10(folder, train, transform=transform, download=True) for train in (True, False))
    if several and dist.get_rank() == 0:
        dist.barrier()
    return Subset(learn, range(45_000)), Subset(learn, range(45_000, 50_000)), test


@contextlib.contextmanager
def fetched(file: str, folder: Path) -> Iterator[None]:
    """Leave the script with one sentence if what torchvision downloads inside, into `folder`, does not arrive."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # no network; a damaged file
        raise SystemExit(
            f"{file} is missing or damaged ({error}). Put it into {folder}, or train on the digits "
            "(--data digits; SPEEDLAB_SCALE=quick in a notebook), which need no download."
        ) from error


def loaders(args: argparse.Namespace) -> tuple[DataLoader, DataLoader, DataLoader]:
    """Loaders to train, validate, test: images (B, C, H, W), labels (B,). A training batch is split among devices."""
    train, val, test = datasets(args.data)
    train = Subset(train, range(min(args.images, len(train))))
    if len(train) < args.batch:
        raise SystemExit(f"{len(train)} images do not fill a batch of {args.batch}; take a smaller batch")
    workers = 0 if args.data == "digits" else min(8, os.cpu_count() or 1)
    how = {"num_workers": workers, "pin_memory": torch.cuda.is_available()}
    generator = torch.Generator().manual_seed(args.seed)
    batch = args.batch // args.devices
    train_loader = DataLoader(
        train, batch, shuffle=True, drop_last=True, generator=generator, persistent_workers=workers > 0, **how
    )
    return train_loader, DataLoader(val, 100, **how), DataLoader(test, 100, **how)


def vit(data: str, pretrained: bool) -> VisionTransformer:
    """A vision transformer for these images: ViT-B/16, or a small one. Its head, for ten classes, is new."""
    if data == "digits":
        size = {"image_size": 32, "patch_size": 8, "num_layers": 4, "num_heads": 4, "hidden_dim": 96, "mlp_dim": 384}
        model = VisionTransformer(**size, num_classes=10)
        if pretrained:
            weights = torch.load(DIGITS, weights_only=True)["weights"]  # in fp16, without a head
            model.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
    else:
        weights = ViT_B_16_Weights.IMAGENET1K_V1
        with fetched(Path(weights.url).name, Path(torch.hub.get_dir(), "checkpoints")):
            model = vit_b_16(weights=weights if pretrained else None)
        model.heads.head = torch.nn.Linear(model.hidden_dim, 10)
    # torchvision initialises a head with zeros, so no gradient would reach the layers below it in the first step
    torch.nn.init.trunc_normal_(model.heads.head.weight, std=0.02)
    return model
