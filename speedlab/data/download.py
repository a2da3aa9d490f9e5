"""Files from the network, kept in the data folder and checked by their SHA-256 whenever they are used."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Archive:
    """A file on the network: its name in the data folder, where it comes from, its SHA-256."""

    name: str
    url: str
    sha256: str


def folder() -> Path:
    """The data folder, which need not exist yet: SPEEDLAB_DATA, else `speedlab` in the user's cache folder.

    Where that is missing and cannot be created, as in a read-only home folder, it is in Python's environment.
    """
    if chosen := os.environ.get("SPEEDLAB_DATA"):
        return Path(chosen).expanduser()
    import pooch

    usual = Path(pooch.os_cache("speedlab"))
    above = next(place for place in (usual, *usual.parents) if place.exists())
    can_be = above == usual or (above.is_dir() and os.access(above, os.W_OK))
    return usual if can_be else Path(sys.prefix, "speedlab-data")


def fetch(archive: Archive, timeout: float = 30.0) -> Path:
    """The path of `archive` in the data folder, downloaded if it is not there with the right checksum.

    Two processes never download at once; a failed download is tried twice more and leaves no partial file.
    `timeout` is how many seconds the network may be silent. Raises OSError with what is missing, where it belongs,
    and what needs no download.
    """
    import pooch
    from filelock import FileLock, Timeout

    place = folder() / archive.name
    try:
        if _whole(place, archive):  # even if the folder cannot be written to
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{place}.lock", timeout=20 * timeout):
            if place.exists() and not _whole(place, archive):
                print(f"{place} is not the file it should be (wrong checksum); fetching it anew.", file=sys.stderr)
            known, urls = {archive.name: archive.sha256}, {archive.name: archive.url}
            store = pooch.create(place.parent, "", registry=known, urls=urls, retry_if_failed=2)
            progress = pooch.HTTPDownloader(progressbar=True, chunk_size=2**20, timeout=timeout)
            pooch.get_logger().setLevel("WARNING")  # the progress bar already shows a download
            store.fetch(archive.name, downloader=progress)
            place.chmod(0o644)  # pooch makes it readable by this user alone, but others may share the folder
    except Timeout:
        raise OSError(
            f"Another process has been fetching {archive.name} for {20 * timeout:.0f} s. "
            f"Wait for it, or delete {place}.lock if no such process runs."
        ) from None
    except (OSError, ValueError) as error:
        raise OSError(
            f"{archive.name} is missing ({error}). Put it into {place.parent} (from {archive.url}), or set "
            "SPEEDLAB_DATA to a folder that holds it. SPEEDLAB_SCALE=quick needs no download."
        ) from error
    return place


def _whole(place: Path, archive: Archive) -> bool:
    import pooch

    return place.exists() and pooch.file_hash(str(place)) == archive.sha256
