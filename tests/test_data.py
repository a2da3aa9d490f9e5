"""The loaders: embedded data offline, real files by checksum, and a sentence on every bad day."""

import hashlib
import http.server
import multiprocessing
import os
import socket
import sys
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import filelock
import pooch
import pytest
import torch

from speedlab import data
from speedlab.data import download


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDLAB_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("SPEEDLAB_REVIEWS", raising=False)
    return tmp_path / "data"


def test_a_home_that_cannot_be_written_moves_the_data_into_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("SPEEDLAB_DATA", raising=False)
    home = tmp_path / "home"
    monkeypatch.setattr(pooch, "os_cache", lambda name: home / name)
    assert download.folder() == home / "speedlab", "a folder that can be made"
    home.write_text("a file, in which nobody makes folders, root neither")
    assert download.folder() == Path(sys.prefix, "speedlab-data")
    home.unlink(), (home / "speedlab").mkdir(parents=True)
    assert download.folder() == home / "speedlab", "a folder that is there, and may hold what is asked for"


@pytest.fixture
def server(tmp_path):
    """A file server on loopback that counts requests; serves what the test puts into its folder.

    Where that folder holds a file `breaks`, the next answer ends in the middle.
    """
    served = tmp_path / "served"
    served.mkdir()
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, directory=str(served), **kwargs)

        def do_GET(self):
            requests.append(self.path)
            if not (served / "breaks").exists():
                return super().do_GET()
            (served / "breaks").unlink()
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"the real con")

        def log_message(self, *args):
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield served, f"http://127.0.0.1:{running.server_port}", requests
    running.shutdown()
    running.server_close()


def published(server, content: bytes = b"the real content") -> data.Archive:
    served, address, _ = server
    (served / "file.bin").write_bytes(content)
    return data.Archive("file.bin", f"{address}/file.bin", hashlib.sha256(content).hexdigest())


def stored(folder) -> set[str]:
    """What a download left in the folder, beside the lock."""
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_fetch_downloads_once(data_folder, server):
    archive = published(server)
    assert data.fetch(archive).read_bytes() == b"the real content"
    assert data.fetch(archive) == data_folder / "file.bin"
    assert len(server[2]) == 1
    assert stored(data_folder) == {"file.bin"}


def test_a_wrong_or_half_written_file_is_named_and_fetched_anew(data_folder, server, capsys):
    archive = published(server)
    data_folder.mkdir()
    (data_folder / "file.bin").write_bytes(b"the real con")
    assert data.fetch(archive).read_bytes() == b"the real content"
    said = capsys.readouterr()
    assert str(data_folder / "file.bin") in said.err and not said.out, "what a rank prints may be read as JSON"


def test_a_download_that_breaks_off_is_tried_again_and_others_may_read_it(data_folder, server):
    archive = published(server)
    (server[0] / "breaks").touch()
    place = data.fetch(archive)
    assert place.read_bytes() == b"the real content" and len(server[2]) == 2
    assert stored(data_folder) == {"file.bin"}
    assert os.name != "posix" or place.stat().st_mode & 0o044 == 0o044


def test_a_file_in_a_folder_that_cannot_be_written_is_used(data_folder, server, monkeypatch):
    archive = published(server)
    data.fetch(archive)
    (data_folder / "file.bin.lock").unlink(missing_ok=True)
    # the user who runs the tests may be root, who may write anywhere
    monkeypatch.setattr(filelock.FileLock, "acquire", lambda *_, **__: pytest.fail("the folder was written to"))
    assert data.fetch(archive) == data_folder / "file.bin"


def test_what_arrives_wrong_is_refused_and_leaves_nothing(data_folder, server):
    archive = replace(published(server), sha256="0" * 64)
    with pytest.raises(OSError, match=r"does not match.*Put it into.*SPEEDLAB_SCALE=quick needs no download"):
        data.fetch(archive)
    assert stored(data_folder) == set()


def test_offline_says_what_is_missing_and_where_it_belongs(data_folder):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    archive = data.Archive("reviews.tar.gz", f"http://127.0.0.1:{port}/reviews.tar.gz", "0" * 64)
    with pytest.raises(OSError, match=r"reviews\.tar\.gz is missing") as failure:
        data.fetch(archive, timeout=2)
    assert str(data_folder) in str(failure.value)
    assert "SPEEDLAB_SCALE=quick needs no download" in str(failure.value)


def test_a_folder_that_cannot_be_written_still_gives_a_sentence(tmp_path, monkeypatch, server):
    blocked = tmp_path / "a-file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("SPEEDLAB_DATA", str(blocked))
    with pytest.raises(OSError, match=r"file\.bin is missing"):
        data.fetch(published(server))


def _fetch_in_child(archive, results):
    results.put(data.fetch(archive).read_bytes())


def test_two_processes_download_once(data_folder, server):
    archive = published(server, b"x" * 3_000_000)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [context.Process(target=_fetch_in_child, args=(archive, results)) for _ in range(2)]
    for child in children:
        child.start()
    contents = [results.get(timeout=90) for _ in children]
    for child in children:
        child.join(timeout=30)
    assert contents == [b"x" * 3_000_000] * 2
    assert len(server[2]) == 1


def rotten_tomatoes_files(encoding: str) -> dict[str, bytes]:
    lines = {kind: "".join(f"a café {word} {i} . \n" for i in range(5331)) for kind, word in
             {"neg": "bad", "pos": "good"}.items()}  # fmt: skip
    return {f"rt-polarity.{kind}": text.encode(encoding) for kind, text in lines.items()}


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
def test_rotten_tomatoes_from_unpacked_files_in_either_encoding(data_folder, encoding):
    (data_folder / "rt-polaritydata").mkdir(parents=True)
    for name, content in rotten_tomatoes_files(encoding).items():
        (data_folder / "rt-polaritydata" / name).write_bytes(content)
    reviews = data.reviews("rotten_tomatoes")
    assert len(reviews.train_texts) + len(reviews.test_texts) == 10_662
    assert len(reviews.test_texts) == 10_662 // 5
    assert all("café" in text for text in reviews.train_texts)
    labels = dict(zip(reviews.train_texts, reviews.train_labels.tolist(), strict=True))
    assert all(label == ("good" in text) for text, label in labels.items())


def test_half_written_sentences_are_named_and_the_archive_used(data_folder, server, monkeypatch, capsys, tmp_path):
    served, address, _ = server
    files = rotten_tomatoes_files("cp1252")
    packed = served / "rt.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
            archive.add(tmp_path / name, arcname=f"rt-polaritydata/{name}")
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    monkeypatch.setattr(data, "ROTTEN_TOMATOES", data.Archive("rt.tar.gz", f"{address}/rt.tar.gz", digest))
    (data_folder / "rt-polaritydata").mkdir(parents=True)
    for name, content in files.items():
        (data_folder / "rt-polaritydata" / name).write_bytes(content[:-40])
    assert len(data.reviews("rotten_tomatoes").test_texts) == 2132
    said = capsys.readouterr()
    assert "rt-polarity.neg" in said.err and not said.out


def test_imdb_layout(data_folder, server, monkeypatch, tmp_path):
    served, address, _ = server
    packed = served / "imdb.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for part in ("train", "test"):
            for kind in ("neg", "pos", "unsup"):
                for i in range(3):
                    review = tmp_path / f"{part}{kind}{i}.txt"
                    review.write_text(f"{part} {kind} {i}<br /><br />more", encoding="utf-8")
                    archive.add(review, arcname=f"aclImdb/{part}/{kind}/{i}_7.txt")
            archive.add(review, arcname=f"aclImdb/{part}/labeledBow.feat")
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    monkeypatch.setattr(data, "IMDB", data.Archive("imdb.tar.gz", f"{address}/imdb.tar.gz", digest))
    reviews = data.reviews("imdb")
    assert len(reviews.train_texts) == len(reviews.test_texts) == 6
    assert all(("pos" in t) == bool(y) for t, y in zip(reviews.train_texts, reviews.train_labels, strict=True))
    assert all("<br" not in text and "unsup" not in text for text in reviews.train_texts)


def test_cifar10_layout(data_folder, server, monkeypatch, tmp_path):
    served, address, _ = server
    packed = served / "cifar.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for i, name in enumerate(["data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"]):
            record = bytes([i]) + bytes([10 * i] * 1024) + bytes([20 * i] * 1024) + bytes([30 * i] * 1024)
            (tmp_path / name).write_bytes(record * 4)
            archive.add(tmp_path / name, arcname=f"cifar-10-batches-bin/{name}")
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    monkeypatch.setattr(data, "CIFAR10", data.Archive("cifar.tar.gz", f"{address}/cifar.tar.gz", digest))
    (train, labels), (test, _) = data.cifar10_tensors()
    assert train.shape == (8, 3, 32, 32) and test.shape == (4, 3, 32, 32) and train.dtype == torch.uint8
    assert labels.tolist() == [0] * 4 + [1] * 4
    assert test[0, 2].unique().item() == 60
    image, label = data.images("cifar10", size=64).val[0]
    assert image.shape == (3, 64, 64) and label == 2
    assert torch.allclose(image[0], torch.tensor((20 / 255 - 0.485) / 0.229), atol=1e-3)


def test_quick_needs_no_network_and_no_folder(monkeypatch, data_folder):
    monkeypatch.delenv("SPEEDLAB_SCALE", raising=False)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("quick went to the network"))
    reviews, images = data.reviews(), data.images()
    assert (reviews.source, len(reviews.train_texts), len(reviews.test_texts)) == ("generated", 2000, 1000)
    assert not set(reviews.train_texts) & set(reviews.test_texts)
    assert images.train[0][0].shape == (3, 32, 32) and images.num_classes == 10
    assert not data_folder.exists()


def test_the_same_seed_gives_the_same_reviews(data_folder):
    assert data.reviews(seed=3).train_texts == data.reviews(seed=3).train_texts
    assert data.reviews(seed=3).train_texts != data.reviews(seed=4).train_texts


def test_unknown_sources_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="expected 'generated', 'rotten_tomatoes' or 'imdb'"):
        data.reviews("yelp")
    with pytest.raises(ValueError, match="expected 'digits' or 'cifar10'"):
        data.images("imagenet")
    monkeypatch.setenv("SPEEDLAB_REVIEWS", "amazon")
    with pytest.raises(ValueError, match="Unknown reviews 'amazon'"):
        data.reviews()
