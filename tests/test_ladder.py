"""The ladders: options are refused in a sentence, an interrupt loses nothing, and every row says what it must."""

import json
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import readme
import torch
from torch import nn

from benchmarks import ladder, racing, rungs_accuracy, rungs_text, rungs_vit, training
from benchmarks.training import MasterAdam, Rung, Settings
from speedlab import results

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
PREDICT = racing.Ladder.predict
WHOLE = {
    "compile_s",
    "rung", "why", "apart", "scale", "settings", "other_cores", "spent_s", "unit", "rate", "real_share", "speedup",
    "speedup_low", "speedup_high", "speedup_tf32", "rounds", "flops", "flops_computed", "mfu_specified",
    "mfu_product", "memory_predicted", "memory_measured", "memory_note", "split", "trains",
}  # fmt: skip


@pytest.fixture(autouse=True)
def a_quick_machine(monkeypatch):
    """No measuring of peaks, no second thread to wait for, a race of two rounds, and no prediction of memory."""
    monkeypatch.setattr(ladder.machine, "peak_flops", lambda dtype: 1e12)
    monkeypatch.setattr(racing, "_SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(racing, "_MIN_ROUNDS", 2)
    monkeypatch.setattr(racing.Ladder, "predict", lambda self, settings: 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def climb(out, *options: str) -> int:
    return ladder.main(["--device", "cpu", "--scale", "tiny", "--seconds", "1e-6", "--out", str(out), *options])


def rows(out, name: str = "vit") -> dict[str, dict]:
    return {row["rung"]: row for row in results.load(out)[f"ladder-{name}"]["rows"]}


# --- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--ladder", "resnet"], "There is no ladder 'resnet'; choose one of vit, distilbert, to-accuracy, or all."),
        (["--ladder", "vit", "--rungs", "0,99"], "The ladder vit has no rung '99'; it has: 0 strict fp32"),
        (["--ladder", "vit", "--rungs", "magic"], "has no rung 'magic'"),
        (["--rungs", "1"], "--rungs needs one ladder"),
        (["--scale", "huge"], "There is no scale 'huge'; choose one of tiny, quick, full."),
        (["--scale", "tiny"], "name a file of your own with --out"),
        (["--device", "abacus"], "There is no device 'abacus'; choose cpu or cuda."),
        (["--seconds", "0"], "--seconds 0 makes no sense"),
        (["--seconds", "nan"], "makes no sense"),
    ],
)
def test_bad_options_get_a_sentence(options, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        ladder.parse(options)
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so asking for it is right")
def test_a_missing_gpu_gets_a_sentence(capsys):
    with pytest.raises(SystemExit):
        ladder.parse(["--device", "cuda"])
    assert "There is no CUDA GPU here" in capsys.readouterr().err


def test_rungs_are_chosen_by_number_or_name_and_the_start_is_among_them():
    assert ladder.chosen_rungs("3,no host syncs", "vit", CPU, "tiny") == [
        "strict fp32", "no host syncs", "fused optimizer"]  # fmt: skip


# --- the file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit", "distilbert", "to-accuracy"])
def test_rows_are_complete_and_skipped_ones_say_why(name, tmp_path, monkeypatch, capsys):
    out = tmp_path / "results.json"
    monkeypatch.setattr(racing.Ladder, "predict", PREDICT)
    assert climb(out, "--ladder", name, "--rungs", "1,2") == 0
    found = rows(out, name)
    assert list(found)[:3] == ["strict fp32", "TF32", "no host syncs"] and len(found) == 3
    assert "CUDA" in found["TF32"]["skipped"] and "skipped: TF32" in capsys.readouterr().out
    for rung, row in found.items():
        if rung == "TF32":
            continue
        assert row.keys() >= WHOLE and row["trains"] and row["rate"] > 0 and row["rounds"] >= 2
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert set(row["split"]) == {"data", "forward+backward", "optimizer", "host"}
        assert sum(row["split"].values()) == pytest.approx(1)
        assert row["memory_predicted"] > 1000 and row["memory_measured"] is None and row["memory_note"]
        assert row["flops_computed"] >= row["flops"] > 0 and row["mfu_specified"] is None
        assert row["mfu_product"] == pytest.approx(row["rate"] * row["flops"] / 1e12)
    assert found["strict fp32"]["speedup"] == 1
    section = results.load(out)[f"ladder-{name}"]
    assert {"machine", "versions", "commit", "date", "load"} <= set(section["stamp"]) and "noisy" in section


def test_an_interrupt_loses_nothing_and_nothing_is_measured_twice(tmp_path, monkeypatch, capsys):
    out, asked, real = tmp_path / "results.json", [], racing.Ladder.rung

    def interrupted(self, rung, settings, start_row):
        if rung.name == "fused optimizer" and "fused optimizer" not in asked:
            asked.append(rung.name)
            raise KeyboardInterrupt
        asked.append(rung.name)
        return real(self, rung, settings, start_row)

    monkeypatch.setattr(racing.Ladder, "rung", interrupted)
    options = ("--ladder", "vit", "--rungs", "0,2,3")
    assert climb(out, *options) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    before = rows(out)
    assert list(before) == ["strict fp32", "no host syncs"]
    assert climb(out, *options) == 0
    assert asked == ["strict fp32", "no host syncs", "fused optimizer", "fused optimizer"]
    after = rows(out)
    assert list(after) == ["strict fp32", "no host syncs", "fused optimizer"]
    assert {name: after[name] for name in before} == before
    assert climb(out, *options) == 0 and len(asked) == 4
    assert climb(out, *options[:2], "--rungs", "0", "--fresh") == 0 and asked[4:] == ["strict fp32"]


@pytest.mark.parametrize("change", [{"commit": "other"}, {"versions": {}}, {"threads": 99}, {"machine": "other"}])
def test_rows_of_another_machine_version_or_commit_are_not_taken_over(change, tmp_path):
    out = tmp_path / "results.json"
    row = {"rung": "strict fp32", "scale": "tiny"}
    results.record("ladder-vit", [row, {**row, "skipped": "why"}], out)
    assert ladder.finished("ladder-vit", out, "tiny") == [row]
    assert ladder.finished("ladder-vit", out, "quick") == []
    content = json.loads(out.read_text())
    content["ladder-vit"]["stamp"] |= change
    out.write_text(json.dumps(content))
    assert ladder.finished("ladder-vit", out, "tiny") == []


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    out = tmp_path / "results.json"
    results.record("a", [{"n": 1}], out)
    before = out.read_bytes()
    with pytest.raises(TypeError):
        results.record("a", [{"n": object()}], out)
    monkeypatch.setattr(results.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        results.record("a", [{"n": 2}], out)
    assert out.read_bytes() == before and list(tmp_path.iterdir()) == [out]


def test_a_damaged_file_is_named_and_kept(tmp_path, capsys):
    out = tmp_path / "results.json"
    out.write_text('{"ladder-vit": ')
    assert climb(out, "--ladder", "vit", "--rungs", "0") == 1
    assert "is not a results file" in capsys.readouterr().err and out.read_text() == '{"ladder-vit": '


def test_a_run_beside_other_work_is_marked_noisy(tmp_path, monkeypatch):
    out = tmp_path / "results.json"
    monkeypatch.setattr(ladder.psutil, "getloadavg", lambda: (0.0, 0.0, 0.0))
    for cores, noisy in ((0.0, False), (1000.0, True)):
        monkeypatch.setattr(ladder.OtherWork, "cores", lambda self, cores=cores: cores)
        assert climb(out, "--ladder", "vit", "--rungs", "0", "--fresh") == 0
        assert results.load(out)["ladder-vit"]["noisy"] is noisy


# --- what the machine lacks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "sentence"),
    [("bf16", "no fast hardware"), ("compiler", "no compiler here"), ("cuda", "on a GPU only")],
)
def test_what_is_lacking_is_said(needs, sentence, monkeypatch):
    monkeypatch.setattr(training.machine, "is_fast", lambda dtype: False)
    monkeypatch.setattr(training.compat, "compiler", lambda kind: None)
    reason = training.lacking(Rung("x", "y", {}, (needs,)), CPU)
    assert sentence in reason and "\n" not in reason


def test_a_rung_that_is_left_out_changes_nothing_further_up_and_one_apart_is_not_built_upon():
    rungs = (Rung("a", "", {"fused": True}), Rung("b", "", {"tf32": True}, ("cuda",)),
             Rung("c", "", {"size": 8}, apart=True), Rung("d", "", {"batch": 9}))  # fmt: skip
    found = {r.name: s for r, s in training.climb(Settings(4), rungs, lambda r: "no" if r.needs else "")}
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
    training.keep_memory(True)
    faults(40_000_000)  # glibc asks for more than a tensor needs: the gap that one leaves is too small for its like
    kept = min(faults() for _ in range(8))
    training.keep_memory(False)
    given_back = faults()
    assert kept < 0.05 * pages
    assert given_back > 0.9 * pages


def test_too_little_memory_skips_the_rung_and_says_how_much_it_needs(tmp_path, monkeypatch):
    out = tmp_path / "results.json"
    monkeypatch.setattr(racing.Ladder, "predict", lambda self, settings: 1 if settings.host_metric else 10**15)
    assert climb(out, "--ladder", "vit", "--rungs", "0,2") == 0
    assert "it needs about 1200000.0 GB" in rows(out)["no host syncs"]["skipped"]


def test_running_out_of_memory_is_a_reason_and_the_ladder_goes_on(tmp_path, monkeypatch):
    out, real = tmp_path / "results.json", racing.Ladder.rung

    def short(self, rung, settings, start_row):
        if rung.name == "no host syncs":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return real(self, rung, settings, start_row)

    monkeypatch.setattr(racing.Ladder, "rung", short)
    assert climb(out, "--ladder", "vit", "--rungs", "0,2,3") == 0
    assert "too little memory" in rows(out)["no host syncs"]["skipped"] and "rate" in rows(out)["fused optimizer"]


# --- what is computed -------------------------------------------------------------------------------------


def test_without_a_start_no_other_rung_takes_its_place(tmp_path, monkeypatch):
    found = racing.Ladder.rung
    fails = lambda self, rung, *rest: {} if rung.changes else {"skipped": "too little memory"}  # noqa: E731
    monkeypatch.setattr(racing.Ladder, "rung", fails)
    out = tmp_path / "results.json"
    assert climb(out, "--ladder", "vit", "--rungs", "0,2") == 0
    assert "nothing to compare with" in rows(out)["no host syncs"]["skipped"]
    monkeypatch.setattr(racing.Ladder, "rung", found)
    assert climb(out, "--ladder", "vit", "--rungs", "0,2") == 0
    assert all(row["rate"] > 0 for row in rows(out).values())


def test_every_rung_changes_something_and_names_are_unique():
    for module in ladder.LADDERS.values():
        for scale in ("tiny", "quick"):
            for device in (CPU, torch.device("cuda")):
                start, rungs = module.start(device, scale), module.rungs(device, scale)
                assert len({r.name for r in rungs}) == len(rungs) and not rungs[0].changes
                steps = [start, *(s for _, s in training.climb(start, rungs[1:], lambda rung: ""))]
                assert len(set(steps)) == len(steps)


def test_a_larger_batch_of_the_same_samples_has_the_same_gradient():
    start = rungs_vit.start(CPU, "tiny")
    batch = rungs_vit.proof_batch(start, CPU, "tiny", 4)
    grads = []
    for times in (1, 3):
        run = rungs_vit.training(start, CPU, "tiny", iter(()))
        run.loss(run.forward, training.repeated(batch, times))[0].backward()
        grads.append(torch.cat([p.grad.flatten() for p in run.model.parameters()]))
    torch.testing.assert_close(grads[0], grads[1])


def test_weights_that_are_no_numbers_after_the_race_do_not_train_whatever_the_proof_said(tmp_path, monkeypatch):
    step = training.Training.step

    def poisoned(run, batch=None, **named):
        if batch is None and not run.settings.host_metric:
            with torch.no_grad():
                next(run.model.parameters()).fill_(torch.nan)
        return step(run, batch, **named)

    monkeypatch.setattr(training.Training, "step", poisoned)
    assert climb(tmp_path / "out.json", "--rungs", "0,2", "--ladder", "vit") == 0
    found = rows(tmp_path / "out.json")
    assert [row["trains"] for row in found.values()] == [True, False]
    assert found["no host syncs"]["loss"] == pytest.approx(found["strict fp32"]["loss"], rel=1e-3)


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
    lengths = torch.tensor(rungs_text.lengths("quick"), dtype=torch.float)
    assert (lengths == rungs_text.LONGEST).float().mean().item() == pytest.approx(0.1269, abs=0.02)
    whole = rungs_text.MEDIAN * torch.exp(torch.tensor(rungs_text.SPREAD**2 / 2))
    assert whole.item() == pytest.approx(292, rel=0.01)


@pytest.mark.parametrize("padding", ["longest", "batch", "buckets"])
def test_a_plan_holds_every_review_at_most_once_and_wide_enough(padding):
    settings = replace(rungs_text.start(CPU, "quick"), padding=padding)
    known, plan = rungs_text.lengths("quick"), rungs_text.plan(settings, "quick", 3)
    used = [row for rows, _ in plan for row in rows]
    assert len(used) == len(set(used)) == len(known) - len(known) % settings.batch
    assert all(wide >= max(known[row] for row in rows) for rows, wide in plan)


def test_padding_shares_rise_and_the_operations_of_padding_are_not_useful():
    start = rungs_text.start(CPU, "tiny")
    kinds = [replace(start, padding=padding) for padding in ("longest", "batch", "buckets")]
    shares = [rungs_text.share_of_real(s, "tiny") for s in kinds]
    assert shares == sorted(shares) and shares[0] < 0.7 < 0.85 < shares[2] <= 1
    computed = [rungs_text.flops(s, "tiny")[0] / share for s, share in zip(kinds, shares, strict=True)]
    assert computed == sorted(computed, reverse=True) and computed[-1] > rungs_text.flops(start, "tiny")[1]


def test_vit_operations_are_those_of_the_published_model():
    """torchvision's model page gives ViT-B/16 17.56 billion multiply-adds forward; backward is about twice that."""
    assert rungs_vit.flops(rungs_vit.start(CPU, "quick"), "quick")[0] == pytest.approx(3 * 2 * 17.56e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989.4e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L4", 121e12), ("NVIDIA L40", None)],
)
def test_the_specified_peak_is_found_by_name_and_none_is_guessed(name, peak, monkeypatch):
    monkeypatch.setattr(racing.torch.cuda, "get_device_name", lambda device: name)
    assert racing.Session(torch.device("cuda"), "quick", 1.0, 1.0).specified_flops() == peak
    assert racing.Session(CPU, "quick", 1.0, 1.0).specified_flops() is None


def test_time_to_the_target_is_steps_times_seconds():
    pairs = [(10.0, 20.0), (10.0, 40.0), (10.0, 30.0)]
    assert rungs_accuracy.to_target([100, 300], [50, 100], pairs) == [6.0, 9.0]


def test_pooling_before_the_relu_is_the_same_function():
    outputs = []
    for pool_first in (False, True):
        torch.manual_seed(0)
        network = rungs_accuracy.Network(4, pool_first)
        outputs.append(network(torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)


def test_only_a_change_of_learning_is_trained_again(tmp_path, monkeypatch):
    asked, real = [], rungs_accuracy.steps_to_target
    counted = lambda recipe, *rest: asked.append(recipe) or real(recipe, *rest)  # noqa: E731
    monkeypatch.setattr(rungs_accuracy, "steps_to_target", counted)
    out = tmp_path / "results.json"
    assert climb(out, "--ladder", "to-accuracy", "--rungs", "0,3,6") == 0
    assert [recipe.one_cycle for recipe in asked] == [False, True]
    assert rows(out, "to-accuracy")["data on the device"]["steps"] == rows(out, "to-accuracy")["strict fp32"]["steps"]


def test_a_recipe_trains_as_it_says():
    plain = rungs_accuracy.start(CPU, "tiny")
    changed = replace(plain, nesterov=True, weight_decay=5e-4, smoothing=0.1, one_cycle=True, lr=0.1)
    logits, labels = torch.tensor([[4.0, 0.0]]), torch.tensor([0])
    losses = []
    for recipe, first_rate in ((plain, 0.001), (changed, 0.1 / 25)):  # the one-cycle schedule starts at a 25th
        run = rungs_accuracy.training(recipe, CPU, "tiny", iter(()))
        [group] = run.optimizer.param_groups
        assert isinstance(run.optimizer, torch.optim.SGD) and group["momentum"] == 0.9
        assert (group["nesterov"], group["weight_decay"]) == (recipe.nesterov, recipe.weight_decay)
        assert group["lr"] == pytest.approx(first_rate)
        losses.append(run.criterion(logits, labels).item())
    assert losses[1] - losses[0] == pytest.approx(0.1 * 4 / 2)  # a 20th of the label is on the other class, 4 below


def test_the_switches_of_a_rung_are_put_back():
    run = rungs_vit.training(replace(rungs_vit.start(CPU, "tiny"), tf32=True), CPU, "tiny", iter(()))
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ZeroDivisionError), run.numerics():
        assert torch.get_float32_matmul_precision() == "high"
        1 / 0  # noqa: B018
    assert torch.get_float32_matmul_precision() == before


# --- elsewhere --------------------------------------------------------------------------------------------


def test_it_runs_without_jupyter_and_without_the_notebooks_packages(tmp_path):
    out = tmp_path / "results.json"
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
        "from benchmarks import ladder\n"
        "ladder.machine.peak_flops = lambda dtype: 1e12\n"
        f"sys.exit(ladder.main(['--device', 'cpu', '--ladder', 'distilbert', '--rungs', '0', '--scale', 'tiny', "
        f"'--seconds', '1e-6', '--out', {str(out)!r}]))"
    )
    asked = [sys.executable, "-W", "error::UserWarning:benchmarks", "-c", code]
    answer = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    assert list(rows(out, "distilbert")) == ["strict fp32"] and "Warning" not in answer.stderr


def test_every_ladder_of_this_machine_has_a_table_that_says_what_the_file_says(tmp_path, monkeypatch):
    out = tmp_path / "a-machine.json"
    assert climb(out, "--ladder", "vit", "--rungs", "0,1,2") == 0
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    table, found = readme.ladder("vit"), rows(out)
    shown, _, head, _, *lines = table.splitlines()
    best = max(found[name]["speedup"] for name in ("strict fp32", "no host syncs"))
    assert "images/ladder-vit.png" in shown and f"{best:.2f} times" in shown
    assert "a-machine.json" in lines[0] and "against strict fp32" in head
    assert len(lines) == 3 and "not run" in lines[1] and found["TF32"]["skipped"] in lines[1]
    assert f"{found['no host syncs']['speedup']:.2f}x" in lines[2]
    assert "a-machine" not in readme.ladder("distilbert")


def test_a_picture_of_other_results_is_stale_and_drawn_anew(tmp_path, monkeypatch):
    chart, name = readme.ladder_pictures, "vit"
    row = {"rung": "a", "apart": False, "trains": True, "speedup": 2.5, "speedup_low": 2.25, "speedup_high": 2.75}
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(chart, "FOLDER", tmp_path)
    assert not chart.stale(name)
    others = {**row, "rung": "b", "apart": True, "speedup": 9}, {**row, "rung": "c", "trains": False, "speedup": 9}
    for rows_now in ([row], [row, *others]):
        results.record("ladder-vit", rows_now, tmp_path / "a-machine.json")
        assert chart.stale(name)
        chart.draw(name)
        assert not chart.stale(name)
    assert "2.50 times" in chart.alt(name)


def test_the_bar_chart_shows_the_measured_rungs_of_every_file_of_results(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    row = {"apart": False, "trains": True, "speedup": 2.5, "speedup_low": 2.25, "speedup_high": 2.75}
    skipped = {"rung": "TF32", "apart": False, "skipped": "no GPU"}
    here = [{"rung": "a", **row}, skipped, {"rung": "b", **row, "apart": True}]
    results.record("ladder-vit", here, tmp_path / "a-machine.json")
    results.record("ladder-vit", [{"rung": "c", **row, "trains": False}], tmp_path / "the-same-with-other-cores.json")
    axes = readme.ladder_pictures.figure("vit").axes
    names = [[label.get_text() for label in ax.get_yticklabels()] for ax in axes]
    assert names == [["a", "b\n(another task)"], ["c\n(does not train)"]]
    assert [bar.get_width() for bar in axes[0].patches] == [2.5, 2.5]
