"""The ladders: options are refused in a sentence, an interrupt loses nothing, and every row says what it must."""

import contextlib
import itertools
import json
import platform
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import day, ladder, loop, race, record
from benchmarks.day import Item
from benchmarks.loop import MasterAdam, Rung, Settings
from benchmarks.workloads import Workload, accuracy, text, vit
from speedlab import machine, results

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
VIT, TEXT, ACCURACY = (kind(CPU, "tiny") for kind in ladder.WORKLOADS.values())
PREDICT = Workload.peak_memory
WHOLE = {
    "item", "task", "found", "rung", "why", "apart", "scale", "settings", "other_cores", "spent_s", "unit", "rate",
    "real_share", "speedup", "speedup_low", "speedup_high", "spread", "speedup_tf32", "rounds", "flops",
    "flops_computed", "product_flops", "mfu_specified", "mfu_product", "target", "memory_predicted",
    "memory_measured", "compile_s", "split", "trains",
}  # fmt: skip


@pytest.fixture(autouse=True)
def a_quick_machine(monkeypatch):
    """No measuring of peaks or load, no second thread to wait for, a race of two rounds, no prediction of memory."""
    monkeypatch.setattr(record, "products", lambda: {"fp32": 1e12})
    monkeypatch.setattr(race, "product_flops", lambda: 1e12)
    monkeypatch.setattr(machine.psutil, "cpu_percent", lambda interval: 0.0)
    monkeypatch.setattr(race, "_SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(race, "_MIN_ROUNDS", 2)
    monkeypatch.setattr(Workload, "peak_memory", lambda self, settings: 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def climb(out, *options: str) -> int:
    return run(ladder.PARTS, out, *options, "--seconds", "1e-6")


def run(parts, out, *options: str) -> int:
    return day.main(parts, "about", [*options, "--device", "cpu", "--scale", "tiny", "--out", str(out)])


def rows(out, name: str = "vit") -> dict[str, dict]:
    [path] = out.glob("*.json")
    return {row["item"]: row for row in results.load(path)[f"ladder-{name}"]["rows"]}


# --- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["ladder-resnet"], "There is no part 'ladder-resnet'; choose from ladder-vit, ladder-distilbert"),
        (["--items", "1"], "--items needs one part"),
        (["--scale", "huge"], "There is no scale 'huge'; choose one of tiny, quick, full."),
        (["--scale", "tiny"], "name a folder of your own with --out"),
        (["--device", "abacus"], "There is no device 'abacus'; choose cpu or cuda."),
        (["--seconds", "0"], "--seconds 0 makes no sense"),
        (["--minutes", "nan"], "makes no sense"),
    ],
)
def test_bad_options_get_a_sentence(options, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        day.parse(ladder.PARTS, "about", options)
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_a_scale_of_the_environment_is_that_of_the_benchmark(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SPEEDLAB_SCALE", "tiny")
    assert day.parse(ladder.PARTS, "about", ["--out", str(tmp_path)]).scale == "tiny"


@pytest.mark.parametrize("asked", ["0,99", "magic"])
def test_a_missing_rung_gets_a_sentence(asked, tmp_path, capsys):
    assert climb(tmp_path, "ladder-vit", "--items", asked) == 2
    assert f"has no item {asked.split(',')[-1]!r}; it has: 0 strict fp32" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so asking for it is right")
def test_a_missing_gpu_gets_a_sentence(capsys):
    with pytest.raises(SystemExit):
        day.parse(ladder.PARTS, "about", ["--device", "cuda"])
    assert "There is no CUDA GPU here" in capsys.readouterr().err


def test_rungs_are_chosen_by_number_or_name_and_the_start_is_among_them():
    names = [rung.name for rung in VIT.rungs()]
    assert day.chosen("3,no host syncs", "vit", names) == ["strict fp32", "no host syncs", "fused optimizer"]


# --- the file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ladder.WORKLOADS)
def test_rows_are_complete_and_those_without_a_measurement_say_why(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Workload, "peak_memory", PREDICT)
    assert climb(tmp_path, f"ladder-{name}", "--items", "1,2") == 0
    found = rows(tmp_path, name)
    assert list(found) == ["strict fp32", "TF32", "no host syncs"]
    assert "CUDA" in found["TF32"]["not_run"] and "TF32: not run, TF32" in capsys.readouterr().out
    for rung, row in found.items():
        if rung == "TF32":
            continue
        assert row.keys() >= WHOLE and row["trains"] and row["rate"] > 0 and row["rounds"] >= 2
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert set(row["split"]) == {"data", "forward+backward", "optimizer", "host"}
        assert sum(row["split"].values()) == pytest.approx(1)
        assert row["memory_predicted"] > 1000 and row["memory_measured"] is None
        assert row["flops_computed"] >= row["flops"] > 0 and row["mfu_specified"] is None
        assert row["mfu_product"] == pytest.approx(row["rate"] * row["flops"] / 1e12)
    assert found["strict fp32"]["speedup"] == 1
    [path] = tmp_path.glob("*.json")
    section = results.load(path)[f"ladder-{name}"]
    assert {"machine", "processor", "versions", "commit", "date", "load", "products"} <= section["stamp"].keys()
    assert section["noisy"] in (True, False)


def test_an_interrupt_loses_nothing_and_nothing_is_measured_twice(tmp_path, monkeypatch, capsys):
    asked, real = [], race.Race.rung

    def interrupted(self, rung, settings, start):
        first = rung.name not in asked
        asked.append(rung.name)
        if rung.name == "fused optimizer" and first:
            raise KeyboardInterrupt
        return real(self, rung, settings, start)

    monkeypatch.setattr(race.Race, "rung", interrupted)
    options = ("ladder-vit", "--items", "0,2,3")
    assert climb(tmp_path, *options) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    before = rows(tmp_path)
    assert list(before) == ["strict fp32", "no host syncs"]
    assert climb(tmp_path, *options) == 0
    assert asked == ["strict fp32", "no host syncs", "fused optimizer", "fused optimizer"]
    after = rows(tmp_path)
    assert list(after) == ["strict fp32", "no host syncs", "fused optimizer"]
    assert {name: after[name] for name in before} == before
    assert climb(tmp_path, *options) == 0 and len(asked) == 4
    assert climb(tmp_path, *options[:2], "0", "--fresh") == 0 and asked[4:] == ["strict fp32"]


def one(measure, name="a", seconds=1.0):
    return {"part": lambda session: [Item(name, seconds, measure)]}


def test_time_that_is_up_is_said_and_the_next_call_goes_on(tmp_path, capsys):
    asked = []
    work = lambda name: lambda rows: asked.append(name) or [{"task": name, "found": "1 s"}]  # noqa: E731
    parts = {"part": lambda session: [Item("a", 1, work("a")), Item("b", 999, work("b")), Item("c", 1, work("c"))]}
    assert run(parts, tmp_path, "--minutes", "9") == day.UNFINISHED and asked == ["a", "c"]
    assert "the same command goes on" in capsys.readouterr().out
    assert run(parts, tmp_path, "--minutes", "9") == 0 and asked == ["a", "c", "b"]
    [path] = tmp_path.glob("*.json")
    assert [row["item"] for row in results.load(path)["part"]["rows"]] == ["a", "b", "c"]


def test_an_item_that_fails_is_a_row_and_is_tried_again_when_asked(tmp_path, capsys):
    answers = iter([ValueError("no such kernel\nmore"), [{"task": "x", "found": "1 s"}]])

    def measure(rows):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert run(one(measure), tmp_path) == 0 and run(one(measure), tmp_path) == 0
    assert capsys.readouterr().out.count("a: not run, it failed with ValueError: no such kernel\n") == 2
    assert run(one(measure), tmp_path, "--again") == 0 and "a: 1 s" in capsys.readouterr().out


def test_an_item_that_ends_the_process_twice_is_left_out(tmp_path, capsys):
    def ended(rows):
        raise SystemExit

    for _ in range(2):
        with pytest.raises(SystemExit):
            run(one(ended), tmp_path)
    assert run(one(ended), tmp_path) == 0 and "it ended 2 calls" in capsys.readouterr().out


def test_rows_of_items_that_are_no_more_give_way(tmp_path):
    measure = lambda rows: [{"task": "x", "found": "1 s"}]  # noqa: E731
    assert run(one(measure, "before"), tmp_path) == run(one(measure, "now"), tmp_path) == 0
    [path] = tmp_path.glob("*.json")
    assert [row["item"] for row in results.load(path)["part"]["rows"]] == ["now"]


@pytest.mark.parametrize("change", [{"commit": "other"}, {"versions": {}}, {"threads": 99}, {"machine": "other"}])
def test_rows_of_another_machine_version_or_commit_are_not_taken_over(change, tmp_path):
    asked = []
    parts = one(lambda rows: asked.append(1) or [{"task": "x", "found": "1 s"}])
    assert run(parts, tmp_path) == run(parts, tmp_path) == 0 and len(asked) == 1
    [path] = tmp_path.glob("*.json")
    content = json.loads(path.read_text())
    content["part"]["stamp"] |= change
    path.write_text(json.dumps(content))
    assert run(parts, tmp_path, "--keep") == 0 and len(asked) == (1 if "commit" in change else 2)
    path.write_text(json.dumps(content))
    assert run(parts, tmp_path) == 0 and len(asked) == (2 if "commit" in change else 3)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    out = tmp_path / "results.json"
    record.record("a", [{"n": 1}], out, {}, {})
    before = out.read_bytes()
    with pytest.raises(TypeError):
        record.record("a", [{"n": object()}], out, {}, {})
    monkeypatch.setattr(record.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        record.record("a", [{"n": 2}], out, {}, {})
    assert out.read_bytes() == before and list(tmp_path.iterdir()) == [out]


def test_a_damaged_file_is_named_and_kept(tmp_path, capsys):
    out = tmp_path / f"{record.slug()}.json"
    out.write_text('{"ladder-vit": ')
    assert climb(tmp_path, "ladder-vit", "--items", "0") == 1
    assert "is not a results file" in capsys.readouterr().err and out.read_text() == '{"ladder-vit": '


def test_a_run_beside_other_work_is_marked_noisy(tmp_path, monkeypatch):
    for cores, noisy in ((0.0, False), (1000.0, True)):
        monkeypatch.setattr(day.OtherWork, "cores", lambda self, cores=cores: cores)
        assert run(one(lambda rows: [{"task": "x", "found": "1 s"}]), tmp_path, "--fresh") == 0
        [path] = tmp_path.glob("*.json")
        assert results.load(path)["part"]["noisy"] is noisy


@pytest.mark.parametrize(("low", "noisy"), [(0.9e12, False), (0.8e12, True)])
def test_a_run_whose_product_moved_between_rows_is_marked_noisy(low, noisy, tmp_path):
    rows = [{"product_flops": 1e12}, {"product_flops": low}, {"not_run": "it is late"}]
    assert record.record("a", rows, tmp_path / "a.json", {"fp32": 1e12}, {"fp32": 1e12})["noisy"] is noisy


def test_a_run_whose_products_moved_is_marked_noisy(tmp_path):
    for now, noisy in ((1.1e12, False), (1.2e12, True), (0.8e12, True)):
        section = record.record("a", [], tmp_path / "a.json", {"fp32": now}, {"fp32": 1e12})
        assert section["noisy"] is noisy and section["stamp"]["products"]["before"] == {"fp32": now}


def test_two_kinds_of_one_processor_have_two_files(monkeypatch):
    names = set()
    for model in ("1", "17"):
        kind = {"cpu family": "25", "model": model, "stepping": "1"}
        monkeypatch.setattr(record.machine, "processor", lambda kind=kind: kind)
        names.add(record.slug())
    assert len(names) == 2 or torch.cuda.is_available()


# --- what the machine lacks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "sentence"),
    [("bf16", "no fast hardware"), ("compiler", "no compiler here"), ("cuda", "on a GPU only")],
)
def test_what_is_lacking_is_said(needs, sentence, monkeypatch):
    monkeypatch.setattr(loop.machine, "is_fast", lambda dtype: False)
    monkeypatch.setattr(loop.compat, "compiler", lambda kind: None)
    reason = loop.lacking(Rung("x", "y", {}, (needs,)), CPU)
    assert sentence in reason and "\n" not in reason


@pytest.mark.parametrize(
    ("rung", "sentence"),
    [(loop.MEMORY_KEPT, "glibc"), (loop.BYTE_DROPOUT, "dropout"), (loop.PLAIN_ATTENTION, "attention")],
)
def test_a_gpu_is_told_of_the_rung_itself(rung, sentence):
    assert sentence in loop.lacking(rung, torch.device("cuda"))


def test_a_rung_that_is_left_out_changes_nothing_further_up_and_one_apart_is_not_built_upon():
    rungs = (Rung("a", "", {"fused": True}), Rung("b", "", {"tf32": True}, ("cuda",)),
             Rung("c", "", {"size": 8}, apart=True), Rung("d", "", {"batch": 9}))  # fmt: skip
    found = {r.name: s for r, s in ladder.climb(Settings(4), rungs, lambda r: "no" if r.needs else "")}
    assert found["b"].tf32 and found["c"].size == 8
    assert found["d"] == Settings(9, fused=True)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc")
def test_kept_memory_needs_no_new_pages_and_is_given_back_afterwards():
    import resource  # Windows has none

    def faults(numbers=20_000_000):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(numbers)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    pages = 20_000_000 * 4 // resource.getpagesize()
    loop.keep_memory(True)
    faults(40_000_000)  # glibc asks for more than a tensor needs: the gap that one leaves is too small for its like
    kept = min(faults() for _ in range(8))
    loop.keep_memory(False)
    given_back = faults()
    assert kept < 0.05 * pages
    assert given_back > 0.9 * pages


def test_too_little_memory_is_said_with_how_much_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(Workload, "peak_memory", lambda self, settings: 1 if settings.host_metric else 10**15)
    assert climb(tmp_path, "ladder-vit", "--items", "0,2") == 0
    assert "it needs about 1200000.0 GB" in rows(tmp_path)["no host syncs"]["not_run"]


def test_running_out_of_memory_is_a_reason_and_the_ladder_goes_on(tmp_path, monkeypatch):
    real = race.Race.rung

    def short(self, rung, settings, start):
        if rung.name == "no host syncs":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return real(self, rung, settings, start)

    monkeypatch.setattr(race.Race, "rung", short)
    assert climb(tmp_path, "ladder-vit", "--items", "0,2,3") == 0
    found = rows(tmp_path)
    assert "too little memory" in found["no host syncs"]["not_run"] and "rate" in found["fused optimizer"]


# --- what is computed -------------------------------------------------------------------------------------


def test_without_a_start_no_other_rung_takes_its_place(tmp_path, monkeypatch):
    found = race.Race.rung
    fails = lambda self, rung, *rest: {} if rung.changes else {"not_run": "too little memory"}  # noqa: E731
    monkeypatch.setattr(race.Race, "rung", fails)
    assert climb(tmp_path, "ladder-vit", "--items", "0,2") == 0
    assert "nothing to compare with" in rows(tmp_path)["no host syncs"]["not_run"]
    monkeypatch.setattr(race.Race, "rung", found)
    assert climb(tmp_path, "ladder-vit", "--items", "0,2", "--again") == 0
    assert all(row["rate"] > 0 for row in rows(tmp_path).values())


def test_every_rung_changes_something_and_names_are_unique():
    for kind in ladder.WORKLOADS.values():
        for scale in ("tiny", "quick"):
            for device in (CPU, torch.device("cuda")):
                work = kind(device, scale)
                start, rungs = work.start(), work.rungs()
                assert len({r.name for r in rungs}) == len(rungs) and not rungs[0].changes
                steps = [start, *(s for _, s in ladder.climb(start, rungs[1:], lambda rung: ""))]
                assert len(set(steps)) == len(steps)


def test_start_and_rung_take_turns_so_that_a_drift_favours_neither(monkeypatch):
    """Each sample is 1% slower than the one before: A B A B would show a rung of equal speed as 1% slower."""
    monkeypatch.setattr(race, "_MIN_ROUNDS", 6)
    racer = race.Race.__new__(race.Race)
    racer.seconds, racer._start, racer._start_seconds = 0.0, "start", 1.0
    racer.clock, sampled = itertools.count().__next__, []
    monkeypatch.setattr(racer, "sample", lambda run, seconds: sampled.append(run) or 0.99 ** len(sampled))
    pairs = racer.pairs("rung", 1.0)
    assert sampled[:8] == ["start", "rung", "rung", "start"] * 2
    assert statistics.geometric_mean(rung / start for start, rung in pairs) == pytest.approx(1.0, abs=1e-9)
    sampled.clear()
    assert all(start == rung for start, rung in racer.pairs("start", 1.0)) and set(sampled) == {"start"}


def test_memory_that_is_kept_is_fetched_before_the_clock_starts():
    class Run:
        numerics = contextlib.nullcontext

        def __init__(self, keep_memory):
            self.settings, self.steps = Settings(batch=1, keep_memory=keep_memory), 0

        def step(self, batch):
            self.steps += 1
            return 1

    kept, given_back = Run(True), Run(False)
    for run in (kept, given_back):
        race.Race(VIT, 0.0).sample(run, 1.0)
    assert kept.steps == given_back.steps + 1


def test_what_workers_prepared_during_the_others_turn_is_used_up_before_the_clock_starts():
    steps = []
    run = SimpleNamespace(numerics=contextlib.nullcontext, step=lambda batch: steps.append(batch) or 1)
    for run.settings in (Settings(batch=1), Settings(batch=1, workers=3)):
        race.Race(VIT, 0.0).sample(run, 1.0)
    assert len(steps) == 1 + 6 + 1


@pytest.mark.parametrize(
    "changes", [{"padding": "batch"}, {"padding": "buckets"}, {"padding": "buckets", "compiled": True}]
)
def test_every_rung_is_timed_on_batches_that_stand_for_an_epoch(changes):
    work = text.Text(CPU, "quick")
    settings = replace(work.start(), **changes)
    widths = [inputs["input_ids"].shape[1] for inputs, _ in work.representative(settings)]
    whole = [wide for _, wide in work.plan(settings, 0)]
    assert widths == sorted(widths) and statistics.mean(widths) == pytest.approx(statistics.mean(whole), rel=0.05)
    assert work.timed_share(settings) == pytest.approx(work.share_of_real(settings), rel=0.05)
    timed = []
    run = SimpleNamespace(
        settings=settings, numerics=contextlib.nullcontext, step=lambda batch: timed.append(batch) or 1
    )
    race.Race(work, 0.0).sample(run, 1.0)
    assert timed == list(work.representative(settings))
    assert len(work.representative(replace(settings, padding="longest"))) == 1


def test_a_larger_batch_of_the_same_samples_has_the_same_gradient():
    batch = VIT.fixed(VIT.start(), 4)
    grads = []
    for times in (1, 3):
        run = VIT.training(VIT.start())
        run.loss(run.forward, loop.repeated(batch, times))[0].backward()
        grads.append(torch.cat([p.grad.flatten() for p in run.model.parameters()]))
    torch.testing.assert_close(grads[0], grads[1])


def test_weights_that_are_no_numbers_after_the_race_do_not_train_whatever_the_proof_said(tmp_path, monkeypatch):
    step = loop.Training.step

    def poisoned(run, batch=None, **named):
        if batch is None and not run.settings.host_metric:
            with torch.no_grad():
                next(run.model.parameters()).fill_(torch.nan)
        return step(run, batch, **named)

    monkeypatch.setattr(loop.Training, "step", poisoned)
    assert climb(tmp_path, "ladder-vit", "--items", "0,2") == 0
    found = rows(tmp_path)
    assert [row["trains"] for row in found.values()] == [True, False]
    assert found["no host syncs"]["loss"] == pytest.approx(found["strict fp32"]["loss"], rel=1e-3)


def test_a_step_in_fp16_is_scaled_and_learns():
    run = VIT.training(replace(VIT.start(), autocast="fp16", host_metric=False))
    batch = VIT.fixed(VIT.start(), 4)
    first = run.evaluate(batch)
    for _ in range(4):
        run.step(batch)
    assert run.scaler.is_enabled() and run.evaluate(batch) < first


def test_masters_keep_updates_that_bf16_loses():
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = MasterAdam([weight], lr=1e-3)
    for _ in range(10):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        assert weight.grad is None
    assert optimizer.masters[0].item() == pytest.approx(0.99, abs=1e-5)
    assert weight.item() == pytest.approx(0.99, abs=4e-3) and weight.dtype == torch.bfloat16
    alone = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    plain = torch.optim.Adam([alone], lr=1e-3)
    for _ in range(10):
        alone.grad = torch.ones_like(alone)
        plain.step()
    assert alone.item() == 1.0


def test_review_lengths_follow_the_published_figures():
    lengths = torch.tensor(text.Text(CPU, "quick").lengths, dtype=torch.float)
    assert (lengths == text.LONGEST).float().mean().item() == pytest.approx(0.1269, abs=0.02)
    whole = text.MEDIAN * torch.exp(torch.tensor(text.SPREAD**2 / 2))
    assert whole.item() == pytest.approx(292, rel=0.01)


@pytest.mark.parametrize("padding", ["longest", "batch", "buckets"])
def test_a_plan_holds_every_review_at_most_once_and_wide_enough(padding):
    work = text.Text(CPU, "quick")
    settings = replace(work.start(), padding=padding)
    known, plan = work.lengths, work.plan(settings, 3)
    used = [row for rows, _ in plan for row in rows]
    assert len(used) == len(set(used)) == len(known) - len(known) % settings.batch
    assert all(wide >= max(known[row] for row in rows) for rows, wide in plan)


def test_padding_shares_rise_and_the_operations_of_padding_are_not_useful():
    kinds = [replace(TEXT.start(), padding=padding) for padding in ("longest", "batch", "buckets")]
    shares = [TEXT.share_of_real(s) for s in kinds]
    assert shares == sorted(shares) and shares[0] < 0.7 < 0.85 < shares[2] <= 1
    computed = [TEXT.flops(s)[0] / share for s, share in zip(kinds, shares, strict=True)]
    assert computed == sorted(computed, reverse=True) and computed[-1] > TEXT.flops(TEXT.start())[1]


def test_vit_operations_are_those_of_the_published_model():
    """torchvision's model page gives ViT-B/16 17.56 billion multiply-adds forward; backward is about twice that."""
    work = vit.Vit(CPU, "quick")
    assert work.flops(work.start())[0] == pytest.approx(3 * 2 * 17.56e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
    ],
)
def test_the_specified_peak_is_found_by_name_and_none_is_guessed(name, peak, monkeypatch):
    monkeypatch.setattr(race.torch.cuda, "get_device_name", lambda device: name)
    assert race.specified_flops(torch.device("cuda")) == peak
    assert race.specified_flops(CPU) is None


def test_time_to_the_target_is_steps_times_seconds():
    recipe = replace(ACCURACY.start(), batch=32)
    gains = ACCURACY.gains([4.0, 8.0, 6.0], recipe, {"steps": [50, 100]}, {"steps": [100, 300]})
    assert gains == [6.0, 9.0]  # 6 times the images per second are 3 times the steps of twice the batch


def test_pooling_before_the_relu_is_the_same_function():
    outputs = []
    for pool_first in (False, True):
        torch.manual_seed(0)
        network = accuracy.Network(4, pool_first)
        outputs.append(network(torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)


def test_only_a_change_of_learning_is_trained_again(tmp_path, monkeypatch):
    asked, real = [], accuracy.Accuracy.steps_to_target
    counted = lambda self, recipe, seed: asked.append(recipe) or real(self, recipe, seed)  # noqa: E731
    monkeypatch.setattr(accuracy.Accuracy, "steps_to_target", counted)
    assert climb(tmp_path, "ladder-to-accuracy", "--items", "0,3,6") == 0
    assert [recipe.one_cycle for recipe in asked] == [False, True]
    found = rows(tmp_path, "to-accuracy")
    assert found["data on the device"]["steps"] == found["strict fp32"]["steps"]


def test_a_recipe_trains_as_it_says():
    plain = ACCURACY.start()
    changed = replace(plain, nesterov=True, weight_decay=5e-4, smoothing=0.1, one_cycle=True, lr=0.1)
    logits, labels = torch.tensor([[4.0, 0.0]]), torch.tensor([0])
    losses = []
    for recipe, first_rate in ((plain, 0.001), (changed, 0.1 / 25)):  # the one-cycle schedule starts at a 25th
        run = ACCURACY.training(recipe)
        [group] = run.optimizer.param_groups
        assert isinstance(run.optimizer, torch.optim.SGD) and group["momentum"] == 0.9
        assert (group["nesterov"], group["weight_decay"]) == (recipe.nesterov, recipe.weight_decay)
        assert group["lr"] == pytest.approx(first_rate)
        losses.append(run.criterion(logits, labels).item())
    assert losses[1] - losses[0] == pytest.approx(0.1 * 4 / 2)  # a 20th of the label is on the other class, 4 below


def test_attention_as_products_is_the_same_function():
    query, key, value = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    kept = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    kept[1, ..., 3:] = False
    for mask in (None, kept):
        wanted = nn.functional.scaled_dot_product_attention(query, key, value, mask)
        torch.testing.assert_close(loop.attention_as_products(query, key, value, mask), wanted)
    with pytest.raises(AssertionError):
        loop.attention_as_products(query, key, value, is_causal=True)


def test_dropout_by_the_byte_drops_its_share_and_scales_up_what_it_keeps():
    torch.manual_seed(0)
    x = torch.full((1001, 99), 3.0, requires_grad=True)  # not a multiple of eight
    dropped = loop.byte_dropout(x, 0.1)
    share = (dropped == 0).float().mean().item()
    assert share == pytest.approx(26 / 256, abs=0.005)
    assert dropped[dropped != 0].unique().item() == pytest.approx(3 * 256 / 230)
    assert not torch.equal(loop.byte_dropout(x, 0.1), dropped)
    dropped.sum().backward()
    assert torch.equal(x.grad == 0, dropped == 0)
    assert loop.byte_dropout(x, 0.1, training=False) is x and loop.byte_dropout(x, 0.0) is x
    assert not loop.byte_dropout(x, 1.0).any()


@pytest.mark.parametrize("settings", [{"plain_attention": True}, {"plain_attention": True, "byte_dropout": True}])
def test_a_rung_changes_the_attention_and_the_dropout_of_the_library_s_model(settings, monkeypatch):
    called = []

    def told(name, function):
        return lambda *arguments, **options: called.append(name) or function(*arguments, **options)

    for name in ("attention_as_products", "byte_dropout"):
        monkeypatch.setattr(loop, name, told(name, getattr(loop, name)))
    run = TEXT.training(replace(TEXT.start(), **settings))
    batch = TEXT.fixed(run.settings, 4)
    before = run.evaluate(batch)
    assert before == pytest.approx(TEXT.training(TEXT.start()).evaluate(batch), abs=1e-5)
    with run.numerics():
        run.step(batch)
    assert "attention_as_products" in called and ("byte_dropout" in called) == ("byte_dropout" in settings)


def test_the_switches_of_a_rung_are_put_back():
    run = VIT.training(replace(VIT.start(), tf32=True))
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ZeroDivisionError), run.numerics():
        assert torch.get_float32_matmul_precision() == "high"
        1 / 0  # noqa: B018
    assert torch.get_float32_matmul_precision() == before


# --- elsewhere --------------------------------------------------------------------------------------------


def test_it_runs_without_jupyter_and_without_the_notebooks_packages(tmp_path):
    blocked = [
        "IPython",
        "ipywidgets",
        "jupyterlab",
        "nbformat",
        "lightning",
        "sklearn",
        "matplotlib",
        "pandas",
        "ray",
    ]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "from benchmarks import day, ladder, race, record\n"
        "record.products = lambda: {}\n"
        "race.product_flops = lambda: 1e12\n"
        "sys.exit(day.main(ladder.PARTS, 'about', ['ladder-distilbert', '--items', '0', '--scale', 'tiny', "
        f"'--device', 'cpu', '--seconds', '1e-6', '--out', {str(tmp_path)!r}]))"
    )
    asked = [sys.executable, "-W", "error::UserWarning:benchmarks", "-c", code]
    answer = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    assert list(rows(tmp_path, "distilbert")) == ["strict fp32"] and "Warning" not in answer.stderr
