"""The parts of a day of measuring: each runs or says why not, on a CPU, and on a GPU as far as fake tensors go."""

import json
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from notebooks import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import __main__ as everything
from benchmarks import attention, batch, finder, loading, memory, notebooks, precision, race, record
from benchmarks.day import Session
from benchmarks.ladder import WORKLOADS
from benchmarks.workloads.vit import Vit
from speedlab import count
from speedlab.measure import Timing

CPU = Session(torch.device("cpu"), "tiny", 1e-3)
GPU = Session(torch.device("cuda"), "tiny", 1e-3)


@pytest.fixture(autouse=True)
def a_known_product(monkeypatch):
    monkeypatch.setattr(race, "product_flops", lambda: 1e12)
    monkeypatch.setattr(batch, "product_flops", lambda: 1e12)
    monkeypatch.setattr(record, "products", lambda: {"fp32": 1e12})


def test_the_parts_are_in_order_of_worth_and_their_items_have_names_of_their_own():
    assert list(everything.PARTS)[:4] == ["precision", "ladder-vit", "ladder-distilbert", "ladder-to-accuracy"]
    assert list(everything.PARTS)[-1] == "notebooks"
    for session in (CPU, GPU):
        for name, part in everything.PARTS.items():
            items = list(part(session))
            assert items and len({item.name for item in items}) == len(items), name
            assert all(0 < item.seconds <= 9 * 60 for item in items), f"{name}: an item must fit into one call"


@pytest.mark.parametrize("part", [precision.items, batch.items, attention.items, loading.items])
def test_a_part_measures_or_says_in_one_sentence_why_not(part, monkeypatch):
    monkeypatch.setattr(precision.measure, "_SAMPLE_SECONDS", 1e-6)
    for item in list(part(CPU))[:2]:
        for row in item.measure([]):
            assert row["task"] and bool(row.get("found")) != bool(row.get("not_run"))
            assert "\n" not in row.get("found", row.get("not_run"))


def test_on_a_gpu_memory_is_read_from_the_allocator(monkeypatch):
    for name, value in {"empty_cache": None, "reset_peak_memory_stats": None, "synchronize": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**40, 2**40))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 200)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1100)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2200)
    real, built = memory.build, []
    monkeypatch.setattr(
        memory, "build", lambda chosen, device, tiny: built.append(device) or real(chosen, "cpu", tiny)
    )
    [row] = memory.run(memory.CONFIGURATIONS[0], GPU)
    assert (row["allocated"], row["reserved"]) == (1000, 2000) and built == ["cpu", "cuda"]
    assert "the prediction is off by" in row["found"]


def test_the_rate_of_several_workers_counts_the_waits_between_their_bursts(monkeypatch):
    waits = Timing(median=0.1, low=0.1, high=0.1, samples=(0.1, 0.1, 0.1, 1.7))
    monkeypatch.setattr(loading.measure, "time_step", lambda step, seconds: waits)
    [row] = loading.training(1, False, CPU, [])
    assert row["rate"] == pytest.approx(row["batch"] / 0.5)


@pytest.mark.parametrize("kind", WORKLOADS.values(), ids=WORKLOADS)
def test_the_forward_pass_on_a_gpu_runs_on_fake_tensors(kind):
    gpu = torch.device("cuda", 0)
    work = kind(gpu, "tiny")
    with FakeTensorMode(allow_non_fake_inputs=True), count.without_initialisation():
        with gpu:
            run = work.training(replace(work.start(), host_metric=False, fused=True))
        inputs, labels = work.blank(run.settings, 4)
        batch = {name: tensor.to(gpu) for name, tensor in inputs.items()}, labels.to(gpu)
        loss, logits = run.loss(run.forward, batch)
    assert loss.device.type == logits.device.type == "cuda" and len(logits) == 4


def test_the_largest_batch_predicted_is_the_last_that_fits():
    work = Vit(torch.device("cpu"), "tiny")
    settings = replace(precision.settings_in(work, "fp32", 1), fused=True)
    limit = 2**24
    size = finder.largest_predicted(work, settings, limit)
    peaks = [work.peak_memory(replace(settings, batch=each)) for each in (size, size + 1)]
    assert peaks[0] <= limit < peaks[1]


def notebook(path, *cells):
    made = [{"cell_type": "code", "source": cell, "metadata": {}, "outputs": []} for cell in cells]
    path.write_text(json.dumps({"cells": made}))
    return path


def test_a_notebook_runs_without_a_kernel_until_a_claim_fails(tmp_path):
    path = notebook(
        tmp_path / "lesson.ipynb",
        "import torch\nfrom speedlab.claims import claim\n%precision 3\nclaim('it holds', 1 + 1 == 2)",
        "print('ok: this is no claim')\nclaim('it does not', torch.ones(1) > 2)",
        "never = 1",
    )
    asked = [sys.executable, "-m", "benchmarks.notebooks", "--child", str(path)]
    ended = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=120)
    found = json.loads(ended.stdout.splitlines()[-1])
    assert (found["cells"], found["of"], found["claims"]) == (1, 3, 1)
    assert found["error"] == "ClaimError: not true here: it does not"


def test_notebooks_run_side_by_side_and_one_that_breaks_leaves_the_others_alone(tmp_path, monkeypatch):
    gate = threading.Barrier(3, timeout=60)

    def measured(path, session, rows):
        gate.wait()
        if path.stem == "broken":
            raise RuntimeError("no words")
        return [{"task": path.stem, "found": "fine"}]

    monkeypatch.setattr(notebooks, "measured", measured)
    rows = notebooks.together([tmp_path / f"{name}.ipynb" for name in ("one", "broken", "two")], CPU, [])
    assert [row.get("found", row.get("not_run")) for row in rows] == ["fine", "it failed with no words", "fine"]
    every = set(notebooks.find_all())
    for cores in (2, 16):
        monkeypatch.setattr(notebooks.machine, "cores", lambda cores=cores: cores)
        groups = [item.measure.args[0] for item in notebooks.items(CPU)]
        assert {path for group in groups for path in group} == every
        assert max(map(len, groups)) == max(1, cores - 2)


def test_a_notebook_that_lacks_a_package_says_which(tmp_path, monkeypatch):
    path = notebook(tmp_path / "lesson.ipynb", "import ray")
    monkeypatch.setattr(notebooks.importlib.util, "find_spec", lambda name: None)
    [row] = notebooks.measured(path, CPU, [])
    assert row["not_run"] == "IPython and ipywidgets and ray cannot be imported here"
