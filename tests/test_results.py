"""What results/ holds is shown: on the results page, in the README, in notebooks; a GPU as soon as there is one."""

import json

import pytest
import readme
from notebooks import ROOT

from speedlab import claims, results
from speedlab.display import seconds_text, table

STAMP = {"machine": "NVIDIA X1", "device": "cuda", "cores": 4, "instructions": ["compute capability 9.0"],
         "date": "2031-02-03", "versions": {"torch": "3.0.1"},
         "products": {"before": {"bf16": 5e14}, "after": {"bf16": 4e14}}}  # fmt: skip
RUNG = {"task": "Fine-tuning", "apart": False, "trains": True, "speedup": 2.5, "speedup_low": 2.25,
        "speedup_high": 2.75, "speedup_tf32": 1.5, "rate": 100.0, "unit": "images", "memory_predicted": 3e9,
        "memory_measured": 4e9,
        "mfu_specified": 0.3, "mfu_product": 0.4, "loss": 1.0, "loss_start": 1.0,
        "target": 0.6}  # fmt: skip
STEP = {"task": "a training step of ViT-B/16, batch 64", "found": "a figure"}
SECTIONS = {
    "precision": [
        {
            **STEP,
            "dtype": dtype,
            "median_s": s,
            "low_s": 0.9 * s,
            "high_s": 1.1 * s,
            "speedup": 0.09 / s,
            "verdict": said,
        }
        for dtype, s, said in (
            ("fp32", 0.09, "baseline"),
            ("tf32", 0.06, "a verdict"),
            ("bf16", 0.03, "3x faster (2x)"),
        )
    ],
    "ladder-vit": [
        {**RUNG, "rung": "strict fp32", "speedup": 1.0},
        {"task": "Fine-tuning", "rung": "TF32", "apart": False, "not_run": "it broke"},
        {**RUNG, "rung": "bf16 autocast"},
        {**RUNG, "rung": "compile", "speedup": 5.0},
        {**RUNG, "rung": "bf16 weights", "speedup": 6.0, "trains": False},
    ],
    "compile": [
        {"task": "GELU", "cold_s": 9.0, "warm_s": 1.0, "eager_s": 0.03, "compiled_s": 0.02, "found": "a bill"}
    ],
    "memory": [{"task": "peak memory of vit_b_16", "predicted": 2e9, "allocated": 2.1e9, "found": "off by -5%"}],
}


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """A folder of results: what is recorded on processors, and a GPU that does not exist."""
    for path in results.FOLDER.glob("*.json"):
        if any(section["stamp"]["device"] == "cuda" for section in results.load(path).values()):
            continue
        (tmp_path / path.name).write_bytes(path.read_bytes())
    sections = {name: {"stamp": STAMP, "noisy": True, "rows": rows} for name, rows in SECTIONS.items()}
    (tmp_path / "nvidia-x1.json").write_text(json.dumps(sections))
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(readme, "FOLDER", tmp_path)
    return tmp_path


def test_a_row_says_what_was_done_where_and_when_and_a_gpu_comes_first(made_up):
    first, *others = results.recorded("precision")
    assert first["where"] == "NVIDIA X1, torch 3.0.1, 2031-02-03, noisy" and first["device"] == "cuda"
    assert {"machine", "date", "noisy", "task", "file"} <= first.keys()
    assert {row["device"] for row in others[2:]} == {"cpu"}
    assert results.recorded("nothing") == []


def test_two_files_of_like_machines_never_hide_each_other(made_up):
    text = (made_up / "nvidia-x1.json").read_text()
    (made_up / "nvidia-x1-again.json").write_text(text)
    names = {row["machine"] for row in results.recorded("compile") if row["device"] == "cuda"}
    assert names == {"NVIDIA X1 (nvidia-x1)", "NVIDIA X1 (nvidia-x1-again)"}


def test_every_recorded_row_has_what_readers_need():
    for path in results.FOLDER.glob("*.json"):
        for name, section in results.load(path).items():
            for row in section["rows"]:
                assert row["task"] and ("not_run" in row or "found" in row or "speedup" in row), (path.name, name)


def test_the_results_page_shows_every_machine_folded(made_up):
    page = readme.results_page()
    gpu = page[page.index("## nvidia-x1") :]
    assert page.index("## nvidia-x1") < page.index("## amd") and page.count("<details>") == page.count("</details>")
    assert "<summary>ladder-vit, 2031-02-03, noisy</summary>" in gpu and "bf16 500 and 400" in gpu
    assert "| bf16 autocast | 100 images | 2.50x (2.25 to 2.75) | 1.50x | 3.0 GB / 4.0 GB | 30% / 40% |" in gpu
    assert "| TF32 | not run | it broke |" in gpu and "off by -5%" in gpu


def test_the_results_page_says_what_a_figure_cannot_show(made_up):
    file = made_up / "nvidia-x1.json"
    known = json.loads(file.read_text())
    stopped = "it had not ended after 100 s, beside other notebooks; by then 3 cells had run"
    known["memory"]["rows"].append({"task": "a notebook", "not_run": stopped})
    known["memory"]["stamp"] = {**STAMP, "products": {"before": {"bf16": 5e14}, "after": {"bf16": 5e14}}}
    known["ladder-vit"]["rows"][2] |= {"memory_predicted": 3e7, "settings": {"batch": 256}}
    file.write_text(json.dumps(known))
    gpu = readme.results_page().partition("## nvidia-x1")[2].partition("\n## ")[0]
    assert "a matrix product measured once, in TFLOP/s: bf16 500." in gpu
    assert (
        f"| a notebook | no result: {stopped} |" in gpu
        and "| bf16 autocast (batch 256) |" in gpu
        and "| 30 MB / " in gpu
    )


def test_the_readme_shows_the_gpu_in_its_headline_and_its_ladders(made_up):
    first = readme.precision().splitlines()[2]
    assert first == "| ViT-B/16, batch 64 | 3x (2x) | a verdict | NVIDIA X1, torch 3.0.1, 2031-02-03, noisy |"
    made = readme.ladder("vit")
    where = "NVIDIA X1, torch 3.0.1, 2031-02-03, noisy"
    assert f"5.0 times (2.2 to 2.8) as fast as strict fp32 with the rung *compile* ({where})" in made
    climbed = [row for row in results.recorded("ladder-vit") if row["machine"].startswith("AMD EPYC")]
    best = max(row["speedup"] for row in climbed if row.get("trains") and not row["apart"])
    assert f"{best:.2f} times as fast on AMD EPYC" in made and made.startswith("![Bar chart of a ladder.")


def test_a_machine_that_has_no_bf16_keeps_its_row_in_the_headline(made_up):
    file = made_up / "nvidia-x1.json"
    known = json.loads(file.read_text())
    known["precision"]["rows"][2] = {**STEP, "dtype": "bf16", "not_run": "no hardware for it"}
    file.write_text(json.dumps(known))
    assert readme.precision().splitlines()[2].startswith("| ViT-B/16, batch 64 | not run | a verdict |")


@pytest.mark.parametrize(
    ("name", "cell", "wanted"),
    [
        ("9.0-measuring/1-timing-and-counting", "recorded-precision", ["3x faster", "a verdict"]),
        ("9.1-mixed-precision/1-number-formats", "cb0f43ce", ["3x faster (2x)", "ViT-B/16, batch 64"]),
        ("9.1-mixed-precision/2-autocast", "56248ca4", ["0.03 s", "3x faster (2x)", "tf32"]),
        ("9.4-compile/1-what-compile-does", "e7bb7f2b", ["900.0"]),
        (
            "9.4-compile/3-compile-in-training-and-inference",
            "7e2b4c90",
            ["2.50x (2.25 to 2.75)", "5.00x (2.25 to 2.75)", "yes"],
        ),
    ],
)
def test_notebooks_show_the_gpu(made_up, name, cell, wanted, capsys):
    cells = json.loads((ROOT / "code-units" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    [source] = ["".join(c["source"]) for c in cells if c["id"] == cell]
    shown = []
    given = {"results": results, "claim_at_least": claims.claim_at_least, "seconds_text": seconds_text,
             "itertools": __import__("itertools"), "compiler": None}  # fmt: skip
    given["table"] = lambda columns, rows, *_: shown.append(str(table(columns, rows)))
    exec(source, given)
    text = "".join(shown) + str(given.get("bills", ""))
    assert "NVIDIA X1, torch 3.0.1, 2031-02-03, noisy" in text and all(word in text for word in wanted), text


def test_a_picture_of_other_results_is_stale_and_drawn_anew(tmp_path, monkeypatch):
    chart, name = readme.ladder_pictures, "vit"
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(chart, "FOLDER", tmp_path)
    assert not chart.stale(name)
    others = {**RUNG, "rung": "b", "apart": True, "speedup": 9}, {**RUNG, "rung": "c", "trains": False, "speedup": 9}
    first = {**RUNG, "rung": "a"}
    for rows in ([first], [first, *others]):
        section = {"ladder-vit": {"stamp": STAMP, "noisy": False, "rows": rows}}
        (tmp_path / "a-machine.json").write_text(json.dumps(section))
        assert chart.stale(name)
        chart.draw(name)
        assert not chart.stale(name)
    assert "2.50 times" in chart.alt(name)


@pytest.mark.parametrize("name", readme.LADDERS)
def test_every_bar_of_a_ladder_ends_inside_its_picture(name):
    shown = readme.ladder_pictures.figure(name)
    farthest = max(r["speedup_high"] for rows in readme.ladder_pictures.measured(name).values() for r in rows)
    assert all(ax.get_xlim()[1] > farthest for ax in shown.axes)


def test_the_bar_chart_shows_the_measured_rungs_of_every_file(made_up):
    axes = readme.ladder_pictures.figure("vit").axes
    names = [label.get_text() for label in axes[0].get_yticklabels()]
    assert len(axes) == 3
    assert names == ["strict fp32", "bf16 autocast", "compile", "bf16 weights\n(does not train)"]
    assert "smaller images, 112 pixels\n(another task)" in [t.get_text() for t in axes[1].get_yticklabels()]
