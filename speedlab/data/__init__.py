"""Images and reviews: embedded or generated at `quick`, the real ones at `full`, read from the data folder."""

import io
import os
import random
import sys
import tarfile
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from speedlab import machine
from speedlab.data.download import Archive, fetch, folder

# Checksums: as published with Hugging Face's dataset cards and by TensorFlow Datasets for the same files.
CIFAR10 = Archive(
    "cifar-10-binary.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
ROTTEN_TOMATOES = Archive(
    "rt-polaritydata.tar.gz",
    "https://storage.googleapis.com/seldon-datasets/sentence_polarity_v1/rt-polaritydata.tar.gz",
    "a05befe52aafda71d458d188a1c54506a998b1308613ba76bbda2e5029409ce9",
)
IMDB = Archive(
    "aclImdb_v1.tar.gz",
    "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
    "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
)
# Each of Rotten Tomatoes' two files holds this many sentences, one per line.
_RT_LINES = 5331


@dataclass(frozen=True)
class Reviews:
    """Labelled reviews, split: texts, and labels of shape (N,) with 1 for positive."""

    source: str
    train_texts: list[str]
    train_labels: torch.Tensor
    test_texts: list[str]
    test_labels: torch.Tensor


@dataclass(frozen=True)
class Images:
    """Labelled images, split: datasets of (image (C, H, W) float32, label) pairs, and the number of classes."""

    source: str
    train: Dataset
    val: Dataset
    num_classes: int


def reviews(source: str | None = None, seed: int = 0) -> Reviews:
    """Movie reviews with labels.

    `source` is 'generated' (2,000 + 1,000 sentences from a grammar, determined by the seed), 'rotten_tomatoes'
    (10,662 real sentences, a fifth held out) or 'imdb' (50,000 real reviews, as split upstream). By default the
    environment variable SPEEDLAB_REVIEWS decides, else the scale: generated at `quick`, rotten_tomatoes at `full`.
    """
    fallback = "generated" if machine.scale() == "quick" else "rotten_tomatoes"
    source = source or os.environ.get("SPEEDLAB_REVIEWS") or fallback
    if source == "generated":
        from speedlab.data import grammar

        train, test = grammar.split(2000, 1000, seed)
    elif source == "rotten_tomatoes":
        negative, positive = _rotten_tomatoes()
        pairs = [(text, 0) for text in negative] + [(text, 1) for text in positive]
        random.Random(seed).shuffle(pairs)
        held_out = len(pairs) // 5
        train, test = pairs[held_out:], pairs[:held_out]
    elif source == "imdb":
        train, test = _imdb(seed)
    else:
        raise ValueError(f"Unknown reviews {source!r}; expected 'generated', 'rotten_tomatoes' or 'imdb'.")
    labels = [torch.tensor([label for _, label in part]) for part in (train, test)]
    return Reviews(source, [text for text, _ in train], labels[0], [text for text, _ in test], labels[1])


def images(source: str | None = None, size: int | None = None) -> Images:
    """Images with labels, float32, ready for the small or the real vision transformer.

    `source` is 'digits' (scikit-learn's handwritten digits, real, embedded; 32 × 32) or 'cifar10' (60,000 real
    photographs, enlarged to 224 × 224 or to `size`, normalised like ImageNet's). By default the scale decides.
    """
    source = source or ("digits" if machine.scale() == "quick" else "cifar10")
    if source == "digits":
        from speedlab.data import glyphs

        x_train, y_train, x_val, y_val = glyphs.digits()
        return Images(source, TensorDataset(x_train, y_train), TensorDataset(x_val, y_val), 10)
    if source == "cifar10":
        (x_train, y_train), (x_val, y_val) = cifar10_tensors()
        size = size or 224
        return Images(source, _Enlarged(x_train, y_train, size), _Enlarged(x_val, y_val, size), 10)
    raise ValueError(f"Unknown images {source!r}; expected 'digits' or 'cifar10'.")


def cifar10_tensors() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """CIFAR-10 as it is stored: uint8 images (N, 3, 32, 32) and labels (N,), of the training and the test part.

    Read from the binary version of the archive, which needs no pickle: a label byte and 3,072 pixels per record.
    """
    parts: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    with tarfile.open(fetch(CIFAR10)) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            if member.name.endswith(".bin"):
                records = np.frombuffer(archive.extractfile(member).read(), np.uint8).reshape(-1, 3073)
                parts["test" if "test" in member.name else "train"].append(records)
    stacked = {name: torch.from_numpy(np.concatenate(records)) for name, records in parts.items()}
    pairs = [(r[:, 1:].reshape(-1, 3, 32, 32), r[:, 0].long()) for r in (stacked["train"], stacked["test"])]
    return pairs[0], pairs[1]


class _Enlarged(Dataset):
    """Small uint8 images, enlarged and normalised one by one: 60,000 images of 224 × 224 would not fit in memory."""

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor, size: int):
        from torchvision.transforms import v2

        self.pixels, self.labels = pixels, labels
        self.transform = v2.Compose(
            [
                v2.Resize((size, size), antialias=True),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transform(self.pixels[index]), self.labels[index]


def _rotten_tomatoes() -> tuple[list[str], list[str]]:
    """The negative and the positive sentences, from the unpacked files if they are there, else from the archive."""
    unpacked = [folder() / "rt-polaritydata" / f"rt-polarity.{kind}" for kind in ("neg", "pos")]
    if all(path.exists() for path in unpacked):
        sentences = [_lines(path.read_bytes()) for path in unpacked]
        wrong = [(path, len(s)) for path, s in zip(unpacked, sentences, strict=True) if len(s) != _RT_LINES]
        if not wrong:
            return sentences[0], sentences[1]
        said = f"{wrong[0][0]} holds {wrong[0][1]} whole sentences, not {_RT_LINES}; using the archive instead."
        print(said, file=sys.stderr)  # a rank's standard output may be read as JSON
    with tarfile.open(fetch(ROTTEN_TOMATOES)) as archive:
        read = [archive.extractfile(f"rt-polaritydata/rt-polarity.{kind}").read() for kind in ("neg", "pos")]
    return _lines(read[0]), _lines(read[1])


def _lines(raw: bytes) -> list[str]:
    """Whole lines, from UTF-8 or, as upstream has it, Windows-1252. A line cut off at the end is left out."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("cp1252")
    return [line.strip() for line in text.split("\n")[:-1]]


def _imdb(seed: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    parts: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
    with tarfile.open(fetch(IMDB)) as archive:
        for member in archive:
            _, part, kind, *name = [*member.name.split("/"), "", ""][:4]
            if part in parts and kind in ("neg", "pos") and name[0].endswith(".txt"):
                text = io.TextIOWrapper(archive.extractfile(member), encoding="utf-8").read()
                parts[part].append((text.replace("<br />", " "), int(kind == "pos")))
    for pairs in parts.values():
        random.Random(seed).shuffle(pairs)
    return parts["train"], parts["test"]
