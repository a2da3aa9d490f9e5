"""The site's own code: links, folded solutions, the calculator against the lessons' formulas, slides, live copies."""

import ast
import functools
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
import types

import extras
import hosted
import nbformat
import present
import pytest
import slides
import teaching
import torch
import website
from notebooks import ROOT, find
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry
from torchvision.models import VisionTransformer

from speedlab import count as counting

WEBSITE = ROOT / "tools" / "site"

PAGES = {"a/1.ipynb": "a/1.ipynb", "README.md": "index.md", "solutions/e.ipynb": "exercises/e.ipynb"}
PAGES["exercises/e.ipynb"] = "exercises/e.ipynb"


# --- pages ---


@pytest.mark.parametrize(
    "before, after",
    [
        ("[a](../README.md)", "[a](../index.md)"),
        ("[the `x`](../solutions/e.ipynb#task-1)", "[the `x`](../exercises/e.ipynb#task-1)"),
        ("[a](https://example.org/README.md), [b](#here)", "[a](https://example.org/README.md), [b](#here)"),
        ("`x[0](../README.md)`", "`x[0](../README.md)`"),
        ("```python\nx[0](../README.md)\n```", "```python\nx[0](../README.md)\n```"),
        ("[tools](../tools)", "tools"),
        ('<img alt="x" src="../README.md">', '<img alt="x" src="../index.md">'),
    ],
)
def test_links_lead_to_published_pages(before, after):
    assert website.linked(before, "a/1.ipynb", PAGES) == (after, set())


def test_other_files_are_published_too(monkeypatch):
    assert website.linked("[l](../LICENSE)", "a/1.ipynb", PAGES) == ("[l](../LICENSE)", {"LICENSE"})
    monkeypatch.setattr(hosted, "repository", lambda: "owner/name")
    assert (
        website.linked("[t](../tools)", "a/1.ipynb", PAGES)[0] == "[t](https://github.com/owner/name/tree/main/tools)"
    )


def test_badges_and_edit_links_need_an_address(monkeypatch):
    assert website.with_badges("# T\n\ntext", "code-units/a/1.ipynb") == "# T\n\ntext"
    monkeypatch.setattr(hosted, "repository", lambda: "owner/name")
    row = website.with_badges("# T\n\ntext", "code-units/a/1.ipynb")
    assert row.startswith("# T\n\n<p") and row.endswith("text")
    assert "https://colab.research.google.com/github/owner/name/blob/hosted/code-units/a/1.ipynb" in row
    assert "https://github.com/owner/name/edit/main/README.md" in website.with_badges("# T\n", "README.md")


@pytest.mark.parametrize("path", sorted((ROOT / "exercises").glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_solution_is_behind_a_click(path):
    stub, solution = (nbformat.read(ROOT / folder / path.name, as_version=4) for folder in ("exercises", "solutions"))
    wanted = [cell.source for cell in stub.cells]
    marked = sum("# BEGIN SOLUTION" in cell.source for cell in solution.cells)
    folded, shown, inside = [], [], False
    for cell in website.exercise(stub, solution).cells:
        if cell.source in ("<details><summary>Solution</summary>", "</details>"):
            assert inside == (cell.source == "</details>")
            inside = not inside
            continue
        (folded if inside else shown).append(cell)
    assert not inside and [cell.source for cell in shown] == wanted
    assert sum(cell.cell_type == "code" for cell in folded) >= marked > 0
    assert not any("# BEGIN SOLUTION" in cell.source or "\n## " in "\n" + cell.source for cell in folded)


def test_the_sites_own_pages_name_lessons_that_exist():
    lessons = website.lessons()
    assert len(lessons) == len(find([str(ROOT / "code-units")]))
    for page in (WEBSITE / "pages").glob("*.md"):
        teaching.fill(page.read_text(encoding="utf-8"), lessons)


def test_the_paths_keep_their_hours():
    """The two hours and the day hold what they promise; the five days hold every lesson, once."""
    text, lessons = (WEBSITE / "pages" / "instructors.md").read_text(encoding="utf-8"), website.lessons()
    named = [words.split("}")[0].split() for words in text.split("{path ")[1:]]
    chosen = [teaching.chosen(words, lessons) for words in named]
    minutes = [sum(lessons[number]["minutes"] for number in numbers) for numbers in chosen]
    assert minutes[0] <= 120 and minutes[1] <= 300
    days = [number for numbers in chosen[2:-1] for number in numbers]
    rest = teaching.path(["rest"], lessons, [" ".join(words) for words in named[2:]])
    assert len(days) == len(set(days))
    assert sorted(days + [number for number in lessons if f"{{{number}}}" in rest]) == sorted(lessons)


def test_slow_cells_come_from_rehearsals(tmp_path, monkeypatch):
    (tmp_path / "9.0.1").mkdir()
    cells = [{"cell": 3, "seconds": 7.0}, {"cell": 4, "seconds": 0.1}]
    (tmp_path / "9.0.1" / "seconds.json").write_text(json.dumps({"lesson": "9.0.1", "cells": cells}))
    monkeypatch.setattr(teaching, "SECONDS", tmp_path)
    lesson = {"title": "T", "seconds": 9, "path": "p"}
    text = teaching.slow({"9.0.1": lesson, "9.0.2": lesson})
    assert "cell 3: 7 s" in text and "cell 4" not in text and "not rehearsed" in text


def test_the_site_builds_without_a_warning(tmp_path):
    if not importlib.util.find_spec("furo"):
        pytest.skip("what builds the site is not installed: make site installs it")
    source = tmp_path / "source"
    website.stage(source)
    keep = {
        "index.md",
        "calculator.md",
        "instructors.md",
        "which-technique.md",
        "9.6-memory",
        "exercise-6-memory.ipynb",
    }
    index = (source / "index.md").read_text().split("```{toctree}")[0]
    (source / "index.md").write_text(index)
    for page in [p for p in source.rglob("*") if p.suffix in (".md", ".ipynb")]:
        if not keep & {page.name, page.parent.name}:
            page.unlink()
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-c", WEBSITE, source, tmp_path / "site"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    # what was left out is missing, and nothing else is wrong
    wrong = [line for line in made.stderr.splitlines() if "WARNING" in line]
    assert not [line for line in wrong if "xref_missing" not in line and "toc.not_included" not in line], made.stderr
    text = (tmp_path / "site" / "exercises" / "exercise-6-memory.html").read_text()
    assert text.count("<summary>Solution</summary>") >= 4 and "BEGIN SOLUTION" not in text
    assert "alt=" in (tmp_path / "site" / "code-units" / "9.6-memory" / "1-where-memory-goes.html").read_text()


def test_the_packages_are_installed_once_offline_first_and_have_their_reasons(tmp_path, monkeypatch):
    lines = [line for line in extras.LIST.read_text().splitlines() if line and not line.startswith("#")]
    assert lines and all("  # " in line for line in lines)
    calls = []
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(subprocess, "call", lambda command, **_: calls.append(command) or 1)
    with pytest.raises(SystemExit, match="go online, then run the same command again"):
        extras.need()
    assert ["--offline" in call for call in calls] == [True, False]
    monkeypatch.setattr(subprocess, "call", lambda command, **_: calls.append(command) or 0)
    extras.need()
    extras.need()
    assert len(calls) == 3


# --- the calculator ---


def names_of(notebook: str, *wanted: str) -> types.SimpleNamespace:
    """Functions and classes that a lesson defines, without running the lesson."""
    from typing import NamedTuple

    space: dict = {"NamedTuple": NamedTuple}
    for cell in nbformat.read(ROOT / "code-units" / notebook, as_version=4).cells:
        if cell.cell_type == "code":
            kept = [node for node in ast.parse(cell.source).body if getattr(node, "name", "") in wanted]
            exec(compile(ast.Module(kept, []), notebook, "exec"), space)
    return types.SimpleNamespace(**{name: space[name] for name in wanted})


def in_node(calls: list[tuple[str, list]]) -> list:
    """What functions of the calculator return."""
    script = (
        "const f = require(process.argv[1]);"
        "const calls = JSON.parse(require('fs').readFileSync(0));"
        "console.log(JSON.stringify(calls.map(([name, given]) => f[name](...given))))"
    )
    node = [shutil.which("node"), "-e", script, str(WEBSITE / "static" / "calculator.js")]
    ran = subprocess.run(node, input=json.dumps(calls), capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def close(found, wanted) -> bool:
    return found == pytest.approx(wanted, rel=1e-12, abs=1e-12)


needs_node = pytest.mark.skipif(not shutil.which("node"), reason="node, which runs the page's formulas, is missing")
VITS = ({"layers": 12, "heads": 12, "width": 768}, {"layers": 24, "heads": 16, "width": 1024, "tokens": 577})


@needs_node
def test_the_calculators_memory_is_that_of_lesson_9_6_1():
    planner_file = ROOT / "code-units" / "9.6-memory" / "planner.py"
    planner = types.SimpleNamespace(**{})
    exec(compile(planner_file.read_text(), str(planner_file), "exec"), planner.__dict__)
    lesson = names_of("9.6-memory/1-where-memory-goes.ipynb", "block_bytes")
    grid = list(
        itertools.product((1, 7, 64), ("fp32", "bf16-mixed", "bf16-true"), ("AdamW", "SGD"), (False, True), VITS)
    )
    keys = ("batch", "precision", "optimizer", "checkpointing")
    found = in_node([("budget", [{**dict(zip(keys, row[:4], strict=True)), **row[4]}]) for row in grid])
    for (*given, model), moments in zip(grid, found, strict=True):
        wanted = planner.budget(lesson.block_bytes, *given, **model)
        for kinds, expected in zip(moments.values(), wanted.values(), strict=True):
            assert close(kinds, expected), (given, model)


@needs_node
def test_the_calculators_sharding_is_that_of_lesson_9_2_5():
    lesson = names_of("9.2-parallelism/5-which-one.ipynb", "bytes_per_parameter")
    grid = list(itertools.product(range(4), (1, 2, 64), (0, 2)))
    found = in_node([("bytesPerParameter", [zero, n, {"copy": copy}]) for zero, n, copy in grid])
    assert close(found, [lesson.bytes_per_parameter(zero, n, copy=copy) for zero, n, copy in grid])
    setup = {"batch": 1, "precision": "fp32", "optimizer": "AdamW", "checkpointing": False, **VITS[0]}
    shared = in_node(
        [("budget", [{**setup, "zero": zero, "data": 8}]) for zero in range(4)] + [("weights", [VITS[0]])]
    )
    for zero, moments in enumerate(shared[:-1]):
        last = moments["optimizer's step"]
        state = last["parameters"] + last["gradients"] + last["optimizer state"]
        assert close(state, shared[-1] * lesson.bytes_per_parameter(zero, 8))


@needs_node
def test_the_calculators_plans_are_those_of_lesson_9_2_5():
    names = "bytes_per_parameter", "Model", "Hardware", "Plan", "memory", "half", "data_seconds", "seconds"
    lesson = names_of("9.2-parallelism/5-which-one.ipynb", *names)
    models = lesson.Model(7e9, 32, 4096, 32, 4096), lesson.Model(67e6, 6, 768, 12, 512)
    calls, wanted = [], []
    for model, d, t, p, zero, gib in itertools.product(models, (1, 8), (1, 4), (1, 2), range(4), (16, 80)):
        plan, hardware = lesson.Plan(d, t, p, zero), lesson.Hardware(d * t * p, gib, across=12.5e9)
        m, size = lesson.memory(plan, model, hardware, 64)
        given = [plan._asdict(), model._asdict(), {**hardware._asdict(), "latency": 20e-6}, 64]  # as in `half`
        calls += [("memory", given), ("seconds", [*given, m])]
        wanted += [[m, size], lesson.seconds(plan, model, hardware, 64, m)]
    assert all(close(*pair) for pair in zip(in_node(calls), wanted, strict=True))


@needs_node
def test_the_floor_and_the_bill():
    """By hand: a step of six FLOPs per weight and token; checkpointing adds two thirds of two."""
    setup = {"batch": 8, "precision": "fp32", "optimizer": "SGD", "checkpointing": False, **VITS[0]}
    setup |= {"peakTflops": 1, "bandwidth": 1000}
    run = {"stepSeconds": 3.6, "steps": 1000, "gpus": 4, "gpuHour": 2, "watts": 500, "overhead": 1.5, "kwhPrice": 0.2}
    plain, again, count, bill = in_node(
        [("floor", [setup]), ("floor", [{**setup, "checkpointing": True}]), ("weights", [VITS[0]]), ("bill", [run])]
    )
    assert plain["flops"] == 6 * count * 8 * 197 and close(9 * again["flops"], 11 * plain["flops"])
    assert plain["seconds"] == max(plain["flops"] / 1e12, plain["bytes"] / 1e12)
    assert close(bill, {"hours": 1, "gpuHours": 4, "rent": 8, "kwh": 3, "power": 0.6})


@needs_node
@pytest.mark.skipif(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu not in flop_registry,
    reason="torch 2.11 counts no attention of a CPU",
)
def test_the_floor_is_below_what_lesson_9_5_1_counts():
    """A step computes and moves at least what the floor says: the lesson's ledger sees every operation of one."""
    wanted = {"training", "vit", "Ledger", "rehearse", "FREE"}
    space: dict = {}
    for cell in nbformat.read(next(ROOT.glob("code-units/9.5*/1-*.ipynb")), as_version=4).cells:
        for node in ast.parse(cell.source).body if cell.cell_type == "code" else ():
            targets = [getattr(target, "id", "") for target in getattr(node, "targets", ())]
            named = {getattr(node, "name", ""), *targets}
            module = getattr(node, "module", None) or ""
            imported = isinstance(node, ast.Import | ast.ImportFrom) and not module.startswith("speedlab")
            if wanted & named or imported:
                exec(compile(ast.Module([node], []), "9.5.1", "exec"), space)
    flops, moved = space["rehearse"](space["vit"], 2).sum(0).tolist()
    setup = {"batch": 2, "precision": "fp32", "optimizer": "AdamW", "checkpointing": False, **VITS[0]}
    [floor] = in_node([("floor", [{**setup, "peakTflops": 1, "bandwidth": 1}])])
    assert 0.9 * flops < floor["flops"] <= flops and floor["bytes"] < moved


@needs_node
def test_the_floor_with_checkpointing_is_below_what_is_counted():
    """Each block runs again in backward, up to its last product."""
    with torch.device("meta"):
        model = VisionTransformer(
            224, 16, VITS[0]["layers"], VITS[0]["heads"], VITS[0]["width"], 4 * VITS[0]["width"]
        )
        images = torch.ones(2, 3, 224, 224)
    for block in model.encoder.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    counted = counting.flops(lambda: model(images).sum().backward())
    setup = {"batch": 2, "precision": "fp32", "optimizer": "AdamW", "checkpointing": True, **VITS[0]}
    [floor] = in_node([("floor", [{**setup, "peakTflops": 1, "bandwidth": 1}])])
    assert 0.9 * counted < floor["flops"] <= counted


# --- demos ---


def cell(source: str, *outputs) -> nbformat.NotebookNode:
    if not outputs:
        return nbformat.v4.new_markdown_cell(source)
    return nbformat.v4.new_code_cell(source, outputs=[nbformat.v4.new_output("stream", text=o) for o in outputs])


LESSON = nbformat.v4.new_notebook(
    cells=[
        cell("# A lesson\n\nWhat you do.\n\n## A part\n\nAn idea.\n\n> **Predict.** How\n> many?\n\nA hint."),
        cell("my_guess, n = 7, 3\nprint(n)", "3 of them; your guess: 7\n"),
        cell("It was three. And more.\n\n```python\n# no heading\n```\n\n## Another part\n\nText."),
        cell("## What you have seen\n\n- Three.\n\n### Check yourself\n\nWhy?\n\n"
             "<details><summary>A</summary>\n\nSo.\n\n</details>"),
    ]
)  # fmt: skip


def test_a_lesson_is_cut_by_its_structure():
    kinds = [(kind, source.splitlines()[0]) for kind, source, _ in slides.pieces(LESSON)]
    assert kinds == [
        ("text", "# A lesson"),
        ("text", "## A part"),
        ("predict", "> **Predict.** How"),
        ("text", "A hint."),
        ("code", "my_guess, n = 7, 3"),
        ("answer", "It was three. And more."),
        ("text", "## Another part"),
        ("closing", "## What you have seen"),
        ("closing", "### Check yourself"),
    ]
    assert "# no heading" in slides.pieces(LESSON)[5][1]


def test_slides_keep_answers_for_the_key_and_notes_for_the_speaker():
    made = slides.sections(LESSON, {LESSON.cells[1].id: 2.0})
    [code] = [slide for slide in made if 'class="code"' in slide]
    before, after = code.split('<div class="fragment', 1)
    assert "3 of them" not in before and "3 of them" in after and "It was three" in after
    assert "About 2.0 s in the rehearsal" in code
    [predict] = [slide for slide in made if 'class="predict"' in slide]
    notes = predict.split('<aside class="notes">')[1]
    assert (
        "The page guesses 7." in notes and "3 of them; your guess: 7" in notes and "It was three. And more." in notes
    )
    [quiz] = [slide for slide in made if "Why?" in slide]
    assert "So." in quiz.split('<div class="fragment')[1]


def test_a_slide_with_an_open_question_shows_claims_and_alt_texts_only_after_the_key():
    source = (
        'my_guess = 2\nfor n in (1, 2):\n    claim_equal(f"{n}: it is three", n + 1,\n                n + 1)\n'
        'claim("so it is three", True)\nplots.show(fig, "Three bars.")\nprint("three")'
    )
    shown, told = slides.without_answers(source)
    assert shown == 'my_guess = 2\nfor n in (1, 2):\n    # (after Space)\n# (after Space)\nprint("three")'
    assert told.count("claim") == 2 and 'plots.show(fig, "Three bars.")' in told
    asked = cell("## A part\n\n> **Predict.** How many?"), cell(source, "3\n"), cell("## B"), cell(source, "3\n")
    first, second = (s for s in slides.sections(nbformat.v4.new_notebook(cells=asked), {}) if 'class="code"' in s)
    before, after = first.split('<div class="fragment', 1)
    assert "it is three" not in before and "Three bars" not in before and "it is three" in after
    assert "it is three" in second, "no question is open"


def test_a_slide_links_only_to_what_it_can_reach():
    text = "See [unit 9.3](../9.3-multi-gpu/2-fsdp.ipynb), `parts.py` and [PyTorch](https://pytorch.org)."
    [slide] = slides.sections(nbformat.v4.new_notebook(cells=[cell(text)]), {})
    assert "See unit 9.3" in slide and slide.count("<a ") == 1 and 'href="https://pytorch.org"' in slide


def test_a_long_output_is_cut_into_slides_that_fit():
    long = nbformat.v4.new_notebook(cells=[cell("show()", "\n".join(f"line {i}" for i in range(100)))])
    made = slides.sections(long, {})
    assert len(made) > 3 and all(slide.count("\nline") <= slides.LINES for slide in made)
    assert all(sum(f"line {i}\n" in slide + "\n" or f"line {i}<" in slide for slide in made) == 1 for i in range(100))


@pytest.mark.parametrize("cell, counts", [("short", [13, 13, 4]), ("long " * 60, [4] * 7 + [2])])
def test_a_long_table_keeps_its_head_and_a_wide_one_is_cut_shorter(cell, counts):
    rows = [f"<tr><td>{i} {cell}</td></tr>" for i in range(30)]
    table = f"<table><thead><tr><th>n</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
    parts = [part for part, _ in slides.shown(nbformat.v4.new_code_cell(outputs=[display_of(table)]))]
    assert [part.count("<td>") for part in parts] == counts
    assert all("<th>n</th>" in part and part.endswith("</tbody></table></div>") for part in parts)


def display_of(html):
    return nbformat.v4.new_output("display_data", {"text/html": html})


def test_a_live_copy_leaves_the_original_as_it_is(tmp_path, monkeypatch):
    path = present.lesson("9.6.1")
    before = path.read_bytes()
    monkeypatch.setattr(present, "PRESENT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["present.py", "9.6.1", "--restore"])
    folders = set()
    for _ in range(2):  # a demo leaves its traces, and the next call overwrites them
        present.main()
        [copy] = tmp_path.glob("9.6.1/code-units/*/*.ipynb")
        shown = nbformat.read(copy, as_version=4)
        codes = [c for c in shown.cells if c.cell_type == "code"]
        original = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
        assert [c.source for c in codes] == original
        assert not any(c.outputs or c.execution_count for c in codes)
        texts = [c.source for c in shown.cells if c.cell_type == "markdown"]
        assert sum(text.startswith("<details><summary>What came out</summary>") for text in texts) > 5
        assert any(text.startswith("## What you know now\n\n<details>") for text in texts)
        told = [c.source for c in codes if c.metadata.get("jupyter", {}).get("source_hidden")]
        assert len(told) > 3 and all(re.search(r"claim|plots\.show", source) for source in told), (
            "these tell the answer"
        )
        copy.write_text("{}")
        folders.add(copy.parent.stat().st_ino)
    assert len(folders) == 1, "a kernel may be running in it"
    assert path.read_bytes() == before


def test_what_a_lesson_reads_lies_beside_its_live_copy(tmp_path):
    path = present.lesson("9.2.5")
    folder = present.copied(path, tmp_path)
    assert (folder / "zero_stages.py").exists() and (folder / "../../results/README.md").resolve().exists()
    assert folder.relative_to(tmp_path) == path.parent.relative_to(ROOT) and not list(folder.glob("*.ipynb"))


def test_a_rehearsal_notes_the_seconds_of_each_cell(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[cell("1", ""), cell("text"), cell("import time; time.sleep(0.3)", "")])
    nbformat.write(notebook, tmp_path / "a.ipynb")
    first, second = present.rehearse(tmp_path / "a.ipynb", tmp_path)
    assert (first["cell"], second["cell"]) == (1, 2) and first["seconds"] < 0.3 <= second["seconds"] < 10


def test_a_rehearsal_that_fails_names_the_cell_and_keeps_the_seconds_before_it(tmp_path, capsys):
    notebook = nbformat.v4.new_notebook(
        cells=[cell("1", ""), cell("raise ValueError('not here')", ""), cell("2", "")]
    )
    nbformat.write(notebook, tmp_path / "a.ipynb")
    seconds = present.rehearse(tmp_path / "a.ipynb", tmp_path)
    assert seconds[0]["cell"] == 1 and all(row["cell"] <= 2 for row in seconds)
    assert capsys.readouterr().out == "The rehearsal stops at cell 2: ValueError: not here\n"


def test_a_lesson_that_is_not_there_gives_one_sentence():
    with pytest.raises(SystemExit, match=r"There is no lesson '9\.1\.99'"):
        present.lesson("9.1.99")


def test_slides_fetch_nothing_from_outside():
    page = (WEBSITE / "slides.html").read_text(encoding="utf-8")
    assert not [line for line in page.splitlines() if "http" in line]
