"""Images and reviews: embedded or generated at `quick`, the real ones at `full`, from the data folder or the network.

The data folder is the environment variable SPEEDLAB_DATA, else the user's cache folder. A file found there with the
right checksum is used; a wrong one is named and fetched anew, to a temporary name that is renamed when it is whole.
"""

import hashlib
import io
import os
import random
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from speedlab import machine

_CHUNK = 1 << 20
_TIMEOUT = 30.0


@dataclass(frozen=True)
class Archive:
    """A file on the network: its name in the data folder, where it comes from, its SHA-256."""

    name: str
    url: str
    sha256: str


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
# Each of Rotten Tomatoes' two files holds this many sentences, one a line.
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


def folder() -> Path:
    """The data folder: SPEEDLAB_DATA, else `speedlab` in the user's cache folder. It need not exist yet."""
    if chosen := os.environ.get("SPEEDLAB_DATA"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData/Local")) / "speedlab"
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/speedlab"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "speedlab"


def reviews(source: str | None = None, seed: int = 0) -> Reviews:
    """Movie reviews with labels.

    `source` is 'generated' (2,000 + 1,000 sentences from a grammar, deterministic from the seed), 'rotten_tomatoes'
    (10,662 real sentences, a fifth held out) or 'imdb' (50,000 real reviews, as split upstream). By default the
    environment variable SPEEDLAB_REVIEWS decides, else the scale: generated at `quick`, rotten_tomatoes at `full`.
    """
    fallback = "generated" if machine.scale() == "quick" else "rotten_tomatoes"
    source = source or os.environ.get("SPEEDLAB_REVIEWS") or fallback
    if source == "generated":
        from speedlab import grammar

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
    photographs, enlarged to 224 × 224 or to `size`, normalised as ImageNet's). By default the scale decides.
    """
    source = source or ("digits" if machine.scale() == "quick" else "cifar10")
    if source == "digits":
        from speedlab import glyphs

        x_train, y_train, x_val, y_val = glyphs.digits()
        return Images(source, TensorDataset(x_train, y_train), TensorDataset(x_val, y_val), 10)
    if source == "cifar10":
        (x_train, y_train), (x_val, y_val) = cifar10_tensors()
        size = size or 224
        return Images(source, _Enlarged(x_train, y_train, size), _Enlarged(x_val, y_val, size), 10)
    raise ValueError(f"Unknown images {source!r}; expected 'digits' or 'cifar10'.")


def cifar10_tensors() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """CIFAR-10 as it is stored: uint8 images (N, 3, 32, 32) and labels (N,), of the training and the test part.

    Read from the binary version of the archive, which needs no pickle: a label byte and 3,072 pixels a record.
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


def fetch(archive: Archive, timeout: float = _TIMEOUT) -> Path:
    """The path of `archive` in the data folder, downloaded if it is not there with the right checksum.

    Two processes never download at once; an interrupted download leaves only a `.part` file, which the next call
    replaces. Raises OSError with what is missing, where it belongs, and what needs nothing.
    """
    from filelock import FileLock, Timeout

    place = folder() / archive.name
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(place) + ".lock", timeout=20 * timeout):
            if place.exists():
                if _sha256(place) == archive.sha256:
                    return place
                print(f"{place} is not the file it should be (wrong checksum); fetching it anew.")
            _download(archive, place, timeout)
    except Timeout:
        raise OSError(
            f"Another process has been fetching {archive.name} for {20 * timeout:.0f} s. "
            f"Wait for it, or delete {place}.lock if no such process runs."
        ) from None
    except (OSError, ValueError) as error:
        # a read-only folder is no obstacle where the file is there already
        if place.exists() and _sha256(place) == archive.sha256:
            return place
        raise OSError(
            f"{archive.name} is missing ({error}). Put it into {place.parent} (from {archive.url}), or set "
            "SPEEDLAB_DATA to a folder that holds it. SPEEDLAB_SCALE=quick needs no download."
        ) from error
    return place


def _download(archive: Archive, place: Path, timeout: float) -> None:
    part = place.with_name(place.name + ".part")
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(archive.url, timeout=timeout) as source, part.open("wb") as target:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                target.write(chunk)
        if digest.hexdigest() != archive.sha256:
            raise ValueError(f"what {archive.url} sent has the wrong checksum")
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _rotten_tomatoes() -> tuple[list[str], list[str]]:
    """The negative and the positive sentences, from the unpacked files if they are there, else from the archive."""
    unpacked = [folder() / "rt-polaritydata" / f"rt-polarity.{kind}" for kind in ("neg", "pos")]
    if all(path.exists() for path in unpacked):
        sentences = [_lines(path.read_bytes()) for path in unpacked]
        wrong = [(path, len(s)) for path, s in zip(unpacked, sentences, strict=True) if len(s) != _RT_LINES]
        if not wrong:
            return sentences[0], sentences[1]
        print(f"{wrong[0][0]} holds {wrong[0][1]} whole sentences instead of {_RT_LINES}; using the archive instead.")
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
