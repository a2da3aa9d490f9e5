"""Unit 9.7 on bad days: broken files, empty shards, dead processes, a full disk, no Ray, Ctrl-C; nothing is left.

And the snippets of its notebooks: they run as they stand there.
"""

import ast
import errno
import gc
import importlib
import importlib.util
import inspect
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from pathlib import Path

import jpegs
import numpy as np
import offload
import psutil
import pytest
import torch
from notebooks import ROOT
from torch.utils.data import DataLoader

from speedlab.data import models

UNIT = ROOT / "code-units" / "9.7-data-pipeline"
multiprocessing.set_forkserver_preload(["torch"])


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    return jpegs.write(12, tmp_path_factory.mktemp("jpegs"))


@pytest.fixture
def nothing_left_over():
    """No process and no thread more than before, a few seconds after the test."""
    before = set(threading.enumerate())
    yield
    gc.collect()  # a raised error and its traceback hold on to each other, and to the loader
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        processes, threads = multiprocessing.active_children(), set(threading.enumerate()) - before
        threads = {thread for thread in threads if not thread.name.startswith("QueueFeeder")}
        if not processes and not threads:
            return
        time.sleep(0.05)
    pytest.fail(f"left running: {processes} {threads}")


def broken(files: list[Path], folder: Path, size: int) -> Path:
    path = folder / "00003-3.jpg"
    path.write_bytes(files[3].read_bytes()[:size])
    return path


# --- the files ------------------------------------------------------------------------------------------------------


def test_files_are_whole_named_after_their_label_and_written_once(files):
    assert [file.name for file in files[:3]] == ["00000-0.jpg", "00001-1.jpg", "00002-2.jpg"]
    picture = jpegs.decode(files[3])
    assert picture.dtype == torch.uint8 and picture.shape == (3, jpegs.SIZE, jpegs.SIZE)
    assert float(picture.float().std()) > 10, "a picture and not a plain area"
    written = files[0].stat().st_mtime_ns
    assert jpegs.write(12, files[0].parent.parent) == files and files[0].stat().st_mtime_ns == written


@pytest.mark.parametrize("size", [0, 10, 5000])
def test_a_truncated_jpeg_is_named(size, files, tmp_path):
    with pytest.raises(ValueError, match=r"00003-3\.jpg cannot be decoded"):
        jpegs.decode(broken(files, tmp_path, size))


def test_what_is_no_jpeg_is_named(tmp_path):
    path = tmp_path / "00009-1.jpg"
    path.write_text("<html>404</html>")
    with pytest.raises(ValueError, match=r"00009-1\.jpg cannot be decoded"):
        jpegs.decode(path)


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    def full(self, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"could not be written .*No space left.*make room, or set SPEEDLAB_DATA"):
        jpegs.write(12, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_process_may_have_been_faster(files, tmp_path, monkeypatch):
    def beaten(self, target):
        target.mkdir()
        for file in files:
            (target / file.name).hardlink_to(file)
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(Path, "rename", beaten)
    assert [file.name for file in jpegs.write(12, tmp_path)] == [file.name for file in files]
    assert len(list(tmp_path.iterdir())) == 1


def test_deleted_files_are_noticed(tmp_path):
    jpegs.write(3, tmp_path)[1].unlink()
    with pytest.raises(OSError, match="holds 2 of its 3 files: delete it"):
        jpegs.write(3, tmp_path)


def test_decoding_warns_of_nothing(files):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jpegs.decode(files[0]).shape == (3, jpegs.SIZE, jpegs.SIZE)


def test_torchcodec_decodes_where_it_is_installed_and_its_errors_name_the_file(files, monkeypatch):
    def decoder(content: bytes, *, mode: str) -> torch.Tensor:
        if len(content) < 100:
            raise RuntimeError("read_header_and_start, DecodeJpeg.cpp:208, Image is incomplete or truncated.")
        assert mode == "RGB" and content == files[0].read_bytes()
        return torch.ones(3, 2, 2, dtype=torch.uint8)

    monkeypatch.setattr(jpegs, "decode_jpeg", decoder)
    assert jpegs.decode(files[0]).sum() == 12
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"")
    with pytest.raises(ValueError, match=r"00000-0\.jpg cannot be decoded \(Image is incomplete or truncated\)"):
        jpegs.decode(files[0])


# --- a DataLoader's workers -----------------------------------------------------------------------------------------


def failure(dataset) -> str:
    """What a loop over this dataset, with one worker, says when it fails."""
    try:
        list(DataLoader(dataset, 2, num_workers=1, multiprocessing_context=offload.START))
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "it did not fail"


def test_an_error_in_a_worker_names_the_sample(files, tmp_path, nothing_left_over):
    said = failure(jpegs.JpegFiles([*files[:3], broken(files, tmp_path, 5000)]))
    assert said.startswith("ValueError") and "00003-3.jpg cannot be decoded" in said


def test_broken_files_can_be_left_out_and_are_counted(files, tmp_path):
    dataset = jpegs.SkipBroken([*files[:3], broken(files, tmp_path, 10), *files[4:6]])
    batches = list(DataLoader(dataset, 2, collate_fn=jpegs.collate_whole))
    assert [labels.tolist() for _, labels in batches] == [[0, 1], [2], [4, 5]]
    assert dataset.broken.tolist() == [False, False, False, True, False, False]
    assert jpegs.collate_whole([None, None]) is None


def test_a_worker_that_dies_ends_the_loop(nothing_left_over):
    assert "exited unexpectedly" in failure(jpegs.Deadly(8, deadly=3))


def test_an_empty_list_of_files_is_a_sentence():
    with pytest.raises(ValueError, match="Is the shard empty"):
        jpegs.JpegFiles([])


def test_a_cache_decodes_once(files):
    dataset = jpegs.JpegFiles(files, cache=True)
    for _ in range(3):
        [dataset[i] for i in range(len(files))]
    assert dataset.decoded.tolist() == [1] * len(files)


# --- the prefetcher -------------------------------------------------------------------------------------------------


def test_batches_are_those_of_this_process(files, nothing_left_over):
    names = [str(file) for file in files]
    with offload.Prefetcher(jpegs.batches, names, 5) as batches:
        there = list(batches)
    here = list(jpegs.batches(names, 5))
    assert [batch["index"].tolist() for batch in there] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert all(np.array_equal(a[key], b[key]) for a, b in zip(here, there, strict=True) for key in a)


def test_an_empty_shard_gives_no_batch(nothing_left_over):
    assert list(jpegs.batches([], 4)) == []
    with offload.Prefetcher(offload.sleeping, 0, 0.0) as batches:
        assert list(batches) == []
        assert batches.process.join(30) is None and list(batches) == [], "it has no second epoch, and has not died"


@pytest.mark.parametrize("depth", [1, 3])
def test_it_never_runs_further_ahead_than_its_depth(depth, nothing_left_over):
    with offload.Prefetcher(offload.sleeping, 30, 0.0, depth=depth) as batches:
        taken = iter(batches)
        for count in (1, 2):
            next(taken)
            deadline = time.monotonic() + 20
            while batches.started.value < count + depth and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.2)
            assert batches.started.value == count + depth


def test_an_error_there_names_the_sample_here(files, tmp_path, nothing_left_over):
    names = [str(file) for file in (*files[:3], broken(files, tmp_path, 0))]
    with (
        pytest.raises(RuntimeError, match=r"stopped after 1 batches: ValueError: 00003-3\.jpg cannot be decoded"),
        offload.Prefetcher(jpegs.batches, names, 2) as batches,
    ):
        list(batches)


def test_after_a_kill_every_sample_comes_exactly_once(nothing_left_over):
    received: list[int] = []
    with (
        pytest.raises(RuntimeError, match=r"died after \d+ batches"),
        offload.Prefetcher(offload.sleeping, 10**6, 0.0, depth=2) as batches,
    ):
        for batch in batches:
            received.append(batch)
            if len(received) == 3:
                batches.process.kill()
    with offload.Prefetcher(iter, range(len(received), 20)) as batches:
        received += list(batches)
    assert received == list(range(20))


def test_a_batch_that_never_comes_is_given_up(nothing_left_over):
    with (
        pytest.raises(TimeoutError, match=r"No batch came for 0\.5 s"),
        offload.Prefetcher(offload.sleeping, 1, 600.0, seconds=0.5) as batches,
    ):
        list(batches)


def test_a_loop_that_is_left_early_leaves_nothing_running(nothing_left_over):
    with offload.Prefetcher(offload.sleeping, 10**6, 0.0) as batches:
        assert list(itertools.islice(batches, 3)) == [0, 1, 2]
    assert not batches.process.is_alive()


def test_no_room_for_a_batch_is_refused():
    with pytest.raises(ValueError, match="make it 1 or more"):
        offload.Prefetcher(offload.sleeping, 1, 0.0, depth=0)


LOOPS = {
    "prefetcher": """
with offload.Prefetcher(offload.sleeping, 10**6, 0.01) as batches:
    for i, _ in enumerate(batches):
        print(i, batches.process.pid, flush=True)
""",
    "loader": """
import jpegs
from torch.utils.data import DataLoader
loader = DataLoader(jpegs.Deadly(10**7, -1), 64, num_workers=1, multiprocessing_context=offload.START)
batches = iter(loader)
for i, _ in enumerate(batches):
    print(i, batches._workers[0].pid, flush=True)
""",
}


@pytest.mark.skipif(os.name == "nt", reason="Windows sends Ctrl-C to a whole console, the tests' own included")
@pytest.mark.parametrize(
    ("loop", "sent"), [("prefetcher", "SIGINT"), ("loader", "SIGINT"), ("prefetcher", "SIGKILL")]
)
def test_ctrl_c_or_a_killed_trainer_leaves_nothing_running(loop, sent, tmp_path):
    script = tmp_path / "train.py"
    body = "\n".join("    " + line for line in LOOPS[loop].strip().splitlines())
    script.write_text(f"import offload\nif __name__ == '__main__':\n{body}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(UNIT), str(ROOT)])}
    trainer = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        helper = psutil.Process(int(trainer.stdout.readline().split()[1]))
        os.kill(trainer.pid, getattr(signal, sent))
        _, said = trainer.communicate(timeout=60)
        assert trainer.returncode != 0
        assert sent == "SIGKILL" or "KeyboardInterrupt" in said
        _, alive = psutil.wait_procs([helper], timeout=30)
        assert not alive, f"the helper process {helper.pid} outlived its trainer"
    finally:
        trainer.kill()
        trainer.communicate()


# --- Ray ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ray(monkeypatch):
    """A stand-in for Ray that records what is asked of it."""
    fake, fake_data = types.ModuleType("ray"), types.ModuleType("ray.data")
    context = types.SimpleNamespace(enable_progress_bars=True)
    fake.asked, fake.shut_down, fake.data = [], 0, fake_data
    fake.init = lambda **options: fake.asked.append(options)
    fake_data.DataContext = types.SimpleNamespace(get_current=lambda: context)

    def shutdown():
        fake.shut_down += 1

    fake.shutdown = shutdown
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.data", fake_data)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return fake


def test_ray_starts_without_dashboard_statistics_bars_and_logs(ray):
    assert offload.start_ray() == ""
    assert ray.asked[0]["include_dashboard"] is False and ray.asked[0]["log_to_driver"] is False
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0", "it would look for an address in the network"
    assert ray.data.DataContext.get_current().enable_progress_bars is False


def test_without_ray_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "Ray is not installed here" in offload.start_ray()


def test_where_ray_cannot_start_there_is_a_sentence(ray):
    def fail(**_):
        raise RuntimeError("The current node timed out during startup.\nSee the logs.")

    ray.init = fail
    assert offload.start_ray() == "Ray could not start (The current node timed out during startup.)."
    assert ray.shut_down == 1


def test_where_ray_hangs_it_is_given_up(ray):
    ray.init = lambda **_: time.sleep(60)
    begin = time.monotonic()
    assert "longer than 0.3 s" in offload.start_ray(seconds=0.3)
    assert time.monotonic() - begin < 50 and ray.shut_down == 1


def test_on_a_full_temporary_disk_ray_is_not_even_started(ray, monkeypatch):
    usage = types.SimpleNamespace(free=10**8)
    monkeypatch.setattr(offload.shutil, "disk_usage", lambda folder: usage)
    assert "the temporary folder has 0.1 GB left: make 1 GB free" in offload.start_ray()
    assert ray.asked == []


def test_ctrl_c_while_ray_starts_is_not_taken_for_the_time_limit(ray):
    def interrupted(**_):
        raise KeyboardInterrupt

    ray.init = interrupted
    with pytest.raises(KeyboardInterrupt):
        offload.start_ray()
    assert ray.shut_down == 1


# --- the snippets of the notebooks ----------------------------------------------------------------------------------


def cells(number: int, kind: str) -> list[str]:
    [path] = UNIT.glob(f"{number}-*.ipynb")
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def snippet(number: int, start: str) -> str:
    """The Python block of a notebook that begins with these words."""
    prose = "\n\n".join(cells(number, "markdown"))
    [found] = [block for block in re.findall(r"```python\n(.*?)```", prose, re.S) if block.startswith(start)]
    return found


def test_in_practice_of_the_first_notebook(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"dataset": jpegs.JpegFiles(files)}
    exec(snippet(1, "from lightning"), names)
    assert names["arguments"].dataloader_num_workers == 2 and names["arguments"].dataloader_pin_memory
    assert names["loader"].num_workers == 2 and len(names["loader"]) == 1


def test_in_practice_of_the_second_notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = models.tokenizer("small")
    dataset = [tokenizer(text) for text in ("good", "not at all good", "bad", "a film that is very long")]
    names = {"dataset": dataset, "tokenizer": tokenizer, "batches": [[0, 2], [1, 3]]}
    exec(snippet(2, "from torch"), names)
    shapes = [tuple(batch["input_ids"].shape) for batch in names["loader"]]
    longest = [max(len(dataset[i]["input_ids"]) for i in batch) for batch in names["batches"]]
    assert shapes == [(2, longest[0]), (2, longest[1])] and longest[0] < longest[1]


def test_in_practice_of_the_third_notebook_calls_what_there_is():
    for call in (node for node in ast.walk(ast.parse(snippet(3, "# PyTorch"))) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        module = name.rpartition(".")[0]
        if "(" in name or importlib.util.find_spec(name.partition(".")[0]) is None:  # TorchCodec need not be there
            continue
        known = getattr(importlib.import_module(module), name.rpartition(".")[2])
        inspect.signature(known).bind(*call.args, **{keyword.arg: None for keyword in call.keywords})


@pytest.mark.filterwarnings("ignore:`use_:DeprecationWarning:ray.data.context")  # Ray sets its own old options
def test_the_lines_for_a_cluster_run_on_local_files(files):
    lines = snippet(3, 'ray.init(address="auto")').splitlines()
    assert lines[0].startswith("ray.init") and '"s3://bucket/train"' in lines[1]
    names: dict = {"np": np, "seen": []}
    exec(next(cell for cell in cells(3, "code") if cell.startswith("def decode")), names)
    exec("def train_step(batch):\n    seen.extend(batch['index'].tolist())", names)
    if why_not := offload.start_ray():
        pytest.skip(why_not)
    names["ray"] = sys.modules["ray"]
    try:
        exec("\n".join(lines[1:]).replace('"s3://bucket/train"', repr(str(files[0].parent))), names)
    finally:
        names["ray"].shutdown()
    assert sorted(names["seen"]) == list(range(12))
