"""The files and the datasets of this unit.

They stand in a module and not in the notebooks because the workers of a loader are new Python processes on macOS and
Windows, and here too: what a worker runs, it must be able to import.
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
    # PyTorch's decoders, also on a GPU; where there is no wheel, or one for another torch, Pillow decodes
    from torchcodec.decoders import decode_jpeg
except (ImportError, OSError, RuntimeError):
    decode_jpeg = None

COUNT = 1797  # scikit-learn's handwritten digits, all of them
SIZE = 192


def write(count: int = COUNT, folder: Path | None = None) -> list[Path]:
    """The paths of `count` JPEG files of handwritten digits, written once to `folder` (default: the data folder).

    They are written to a temporary folder that is renamed when it is whole, so that an interruption leaves nothing
    half-done, and two processes do not meet. A file is named after its number and its label: `00017-7.jpg`.
    Raises OSError with what to do where they cannot be written, or where some of them have been deleted.
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
            # where another process was faster, its folder is in the way of the rename, and as good as ours
            if not place.exists():
                raise OSError(
                    f"{count} JPEG files could not be written to {parent} ({error.strerror or error}). They take "
                    f"{count * 14 / 1000:.0f} MB: make room, or set SPEEDLAB_DATA to a folder that has some."
                ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
    files = sorted(place.glob("*.jpg"))
    if len(files) != count:
        raise OSError(f"{place} holds {len(files)} of its {count} files: delete it, and they are written again.")
    return files


def _jpegs(count: int) -> Iterator[tuple[str, bytes]]:
    """Names and contents: each digit enlarged, on a background of its own colour, with the grain of a photograph."""
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
    """The picture in a JPEG file, as uint8 of shape (3, H, W). A broken file is a ValueError that names it."""
    try:
        return decode_bytes(path.read_bytes())
    except (OSError, RuntimeError, ValueError) as error:
        unknown = isinstance(error, UnidentifiedImageError)  # its text would name an address in memory
        reason = "it is no picture" if unknown else str(error).rsplit(", ", 1)[-1].rstrip(".")
        raise ValueError(
            f"{path.name} cannot be decoded ({reason}). Replace the file, or leave it out of the list."
        ) from None


def decode_bytes(content: bytes) -> torch.Tensor:
    """The picture in the bytes of a JPEG file, as uint8 of shape (3, H, W), by TorchCodec or Pillow."""
    if decode_jpeg is not None:
        return decode_jpeg(content, mode="RGB")
    with Image.open(io.BytesIO(content)) as picture:
        return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).contiguous()


class JpegFiles(Dataset):
    """Decoded files: (image (3, H, W) uint8 or what `transform` makes of it, label).

    `decoded` counts how often each file was decoded, in memory that all workers share. With `cache`, a decoded image
    is kept, in the process that decoded it.
    """

    def __init__(self, files: Sequence[Path], transform: Callable | None = None, cache: bool = False):
        if not files:
            raise ValueError("There are no files in this list. Is the shard empty, or the folder another one?")
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
    """The same, but a broken file gives None instead of an error, and is marked in `broken`."""

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
    """A batch of those samples that are not None; None where there is none."""
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
    """For `worker_init_fn`: give the worker's copy of the generator the seed that PyTorch chose for this worker."""
    torch.utils.data.get_worker_info().dataset.random = np.random.default_rng(torch.initial_seed())


class Deadly(Dataset):
    """Ends its process, as the system does when memory runs out, when it is asked for a certain index."""

    def __init__(self, length: int, deadly: int):
        self.length, self.deadly = length, deadly

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index == self.deadly:
            os._exit(137)
        return index


class Remote(Dataset):
    """Numbers that take `seconds` each to arrive, as from a disk or a network, while the processor is free.

    `begun` says which of them somebody has asked for, in memory that all workers share.
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
    """Numbers, of which the first one is held back until `free` is set, for 30 s at most."""

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
    """The names of the members of tar files, read from the first byte to the last, as WebDataset does.

    With `split`, each worker of a loader takes every so-many-th shard; without, each of them reads them all.
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
    """Decoded batches in order, from batch `start` on: their index (B,), images (B, 3, H, W) uint8, labels (B,).

    For a process of its own, so it decodes with one thread. Arrays and not tensors, so that they outlive the process.
    """
    torch.set_num_threads(1)
    for first in range(start * batch_size, len(paths), batch_size):
        index = np.arange(first, min(first + batch_size, len(paths)))
        images = np.stack([decode(Path(paths[i])).numpy() for i in index])
        yield {"index": index, "images": images, "labels": np.array([int(Path(paths[i]).stem[-1]) for i in index])}
