"""The JPEG files and the datasets of this unit.

They are in a module, not in the notebooks, because on macOS and Windows, and here too, the workers of a loader are
new Python processes, which must be able to import what they run.
"""

import io
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from speedlab import data

try:
    # PyTorch's decoders, which can also use a GPU; without a wheel, or with one for a different torch, Pillow decodes
    from torchcodec.decoders import decode_jpeg
except (ImportError, OSError, RuntimeError):
    decode_jpeg = None

COUNT = 1797  # all of scikit-learn's handwritten digits
SIZE = 192


def write(count: int = COUNT, folder: Path | None = None) -> list[Path]:
    """The paths of `count` JPEG files of handwritten digits, written once to `folder` (default: the data folder).

    They are written to a temporary folder that is renamed when it is complete, so that an interruption leaves nothing
    half done, and two processes do not collide. A file is named after its number and its label: `00017-7.jpg`.
    Raises OSError with advice if they cannot be written, or if some of them have been deleted.
    """
    parent = folder or data.folder()
    place = parent / f"digits-{count}-jpeg"
    if not place.exists():
        part = place.with_name(f"{place.name}.part-{os.getpid()}")
        try:
            part.mkdir(parents=True)
            for name, content in _jpegs(count):
                (part / name).write_bytes(content)
            part.rename(place)
        except OSError as error:
            # if another process was faster, its folder blocks the rename, and is as good as ours
            if not place.exists():
                raise OSError(
                    f"{count} JPEG files could not be written to {parent} ({error.strerror or error}). They take "
                    f"{count * 14 / 1000:.0f} MB: make room, or set SPEEDLAB_DATA to a folder that has some."
                ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
    files = sorted(place.glob("*.jpg"))
    if len(files) != count:
        raise OSError(f"{place} holds {len(files)} of its {count} files: delete it, and they will be written again.")
    return files


def _jpegs(count: int) -> Iterator[tuple[str, bytes]]:
    """File names and JPEG bytes: each digit enlarged, on a background of random colour, with a photograph's grain."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        small = torch.from_numpy(digits.images[i % COUNT]).float()[None, None] / 16  # (1, 1, 8, 8), 0 to 1
        ink = torch.nn.functional.interpolate(small, size=(SIZE, SIZE), mode="bilinear")[0]
        colour = torch.rand(3, 1, 1, generator=generator)
        grain = 0.04 * torch.randn(3, SIZE, SIZE, generator=generator)
        picture = ((1 - ink) * colour + ink * (1 - colour) + grain).clamp(0, 1)
        name = f"{i:05}-{digits.target[i % COUNT]}.jpg"
        content = io.BytesIO()
        Image.fromarray((255 * picture).to(torch.uint8).permute(1, 2, 0).numpy()).save(content, "JPEG", quality=90)
        yield name, content.getvalue()


def decode(path: Path) -> torch.Tensor:
    """The picture in a JPEG file, as uint8 of shape (3, H, W). Raises ValueError naming a broken file."""
    try:
        return decode_bytes(path.read_bytes())
    except (OSError, RuntimeError, ValueError) as error:
        unknown = isinstance(error, UnidentifiedImageError)  # its message holds a memory address
        reason = "it is not a picture" if unknown else str(error).rsplit(", ", 1)[-1].rstrip(".")
        raise ValueError(
            f"{path.name} cannot be decoded ({reason}). Replace the file, or leave it out of the list."
        ) from None


def decode_bytes(content: bytes) -> torch.Tensor:
    """The picture in a JPEG file's bytes, uint8 of shape (3, H, W), decoded by TorchCodec or, without it, Pillow."""
    if decode_jpeg is not None:
        return decode_jpeg(content, mode="RGB")
    with Image.open(io.BytesIO(content)) as picture:
        return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).contiguous()


class JpegFiles(Dataset):
    """Decoded files as (image, label): the image is uint8 (3, H, W), or what `transform` makes of it.

    `decoded` counts how often each file was decoded, in memory that all workers share. With `cache`, each process
    keeps the images that it has decoded.
    """

    def __init__(self, files: Sequence[Path], transform: Callable | None = None, cache: bool = False):
        if not files:
            raise ValueError("There are no files in this list. Is the shard empty, or the folder the wrong one?")
        self.files, self.transform = list(files), transform
        self.cache: dict[int, torch.Tensor] | None = {} if cache else None
        self.decoded = torch.zeros(len(files), dtype=torch.int32).share_memory_()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.cache.get(index) if self.cache is not None else None
        if image is None:
            image = decode(self.files[index])
            self.decoded[index] += 1
            if self.cache is not None:
                self.cache[index] = image
        label = int(self.files[index].stem[-1])
        return (self.transform(image) if self.transform else image), label


class SkipBroken(JpegFiles):
    """Like JpegFiles, but a broken file gives None instead of an error, and is marked in `broken`."""

    def __init__(self, files: Sequence[Path]):
        super().__init__(files)
        self.broken = torch.zeros(len(files), dtype=torch.bool).share_memory_()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int] | None:
        try:
            return super().__getitem__(index)
        except ValueError:
            self.broken[index] = True
            return None


def collate_whole(samples: list) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A batch of the samples that are not None, or None if there are no such samples."""
    return torch.utils.data.default_collate(kept) if (kept := [s for s in samples if s is not None]) else None


class Noisy(Dataset):
    """Random numbers from a generator that was made once, in the parent: every worker gets a copy of it."""

    def __init__(self, length: int):
        self.length, self.random = length, np.random.default_rng(0)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> float:
        return self.random.random()


def own_seed(_: int) -> None:
    """For `worker_init_fn`: give this worker a new generator, with the seed that PyTorch chose for the worker."""
    torch.utils.data.get_worker_info().dataset.random = np.random.default_rng(torch.initial_seed())


class Deadly(Dataset):
    """Ends its process when asked for index `deadly`, as the system does when memory runs out."""

    def __init__(self, length: int, deadly: int):
        self.length, self.deadly = length, deadly

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index == self.deadly:
            os._exit(137)
        return index


class Remote(Dataset):
    """Numbers that each take `seconds` to arrive, as from a disk or a network, while the processor is idle.

    `begun` marks the numbers that have been asked for, in memory that all workers share.
    """

    def __init__(self, length: int, seconds: float = 0.0):
        self.seconds = seconds
        self.begun = torch.zeros(length, dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.begun)

    def __getitem__(self, index: int) -> int:
        self.begun[index] = True
        time.sleep(self.seconds)
        return index


class Straggler(Dataset):
    """Numbers, the first of which is held back until `free` is set, or for at most 30 s."""

    def __init__(self, length: int):
        self.length, self.free = length, torch.zeros(1, dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        deadline = time.monotonic() + 30
        while index == 0 and not self.free and time.monotonic() < deadline:
            time.sleep(0.01)
        return index


class TarShards(IterableDataset):
    """The member names of tar files, which are read from the first byte to the last, as WebDataset reads them.

    With `split`, worker i of n takes shards i, i + n, i + 2n and so on; without it, every worker reads all shards.
    """

    def __init__(self, shards: Sequence[Path], split: bool):
        self.shards, self.split = list(shards), split

    def __iter__(self) -> Iterator[str]:
        info = get_worker_info()
        mine = self.shards[info.id :: info.num_workers] if self.split and info else self.shards
        for shard in mine:
            with tarfile.open(shard, "r|") as members:
                for member in members:
                    yield member.name


def batches(paths: Sequence[str], batch_size: int, start: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Decoded batches in order, from batch `start` on: dicts of index (B,), images (B, 3, H, W) uint8, labels (B,).

    It runs in a separate process, so it uses one thread. It yields arrays, not tensors, so that batches outlive it.
    """
    torch.set_num_threads(1)
    for first in range(start * batch_size, len(paths), batch_size):
        index = np.arange(first, min(first + batch_size, len(paths)))
        images = np.stack([decode(Path(paths[i])).numpy() for i in index])
        yield {"index": index, "images": images, "labels": np.array([int(Path(paths[i]).stem[-1]) for i in index])}
