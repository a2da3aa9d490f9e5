"""Doubt: faults are planted where a lesson could be wrong, and sorted by what catches them."""

import json

import doubt
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

LESSON = """\
import torch
my_guess = 20
x = torch.ones(3, dtype=torch.bfloat16) * 2
for step in range(4):
    optimizer.zero_grad()
    total += step - 1
claim_equal("three", x.numel(), 3)
measured("time", seconds / 2)
plots.show(figure(7.0), "a figure of 3 bars")
loader = DataLoader(data, batch_size=8, shuffle=True)
"""


def planted(source):
    return {fault.change.split(": ", 1)[1]: source[: fault.start] + fault.text + source[fault.end :]
            for fault in doubt.faults([source])}  # fmt: skip


def test_every_kind_of_fault_is_planted_and_still_python():
    changed = planted(LESSON)
    for source in changed.values():
        compile(source, "lesson", "exec")
    kinds = {fault.kind for fault in doubt.faults([LESSON])}
    assert kinds == {"operator", "constant", "dtype", "keyword", "line"}
    results = "\n".join(changed.values())
    for expected in (
        *("torch.float16) * 2", "torch.ones(3) * 2", "torch.bfloat16) / 2", "torch.ones(4, dtype", "range(5)"),
        *("    pass\n    total", "step + 1", "DataLoader(data, batch_size=8)", "DataLoader(data, shuffle=True)"),
    ):
        assert expected in results, expected


def test_claims_clocks_figures_imports_and_guesses_are_spared():
    for source in planted(LESSON).values():
        for spared in ("import torch", "my_guess = 20", 'claim_equal("three", x.numel(), 3)', "seconds / 2", "7.0"):
            assert spared in source, source


def test_a_line_that_only_shows_or_explains_is_not_deleted():
    showing = ["'What it does.'", "print('four')", "Markdown(path.read_text())", "rows.append((name, f'{x:.1f}'))"]
    assert set(planted("\n".join([*showing, "found.append(x)"]))) == {"deleted: found.append(x)"}


@pytest.mark.parametrize("test", ['device.type == "cuda"', "torch.cuda.is_available()"])
def test_what_only_a_gpu_runs_is_spared(test):
    changed = planted(f"n = 64 if {test} else 8").values()
    assert all("64" in source for source in changed) and any("else 9" in source for source in changed)
    changed = planted(f"if {test}:\n    n = 64\nelse:\n    n = 8").values()
    assert all("64" in source for source in changed) and any("n = 9" in source for source in changed)


def test_no_fault_leaves_the_value_as_it_is():
    assert set(planted("rate = 0.0")) == {"0.0 -> 1.0: rate = 0.0"}


def test_columns_are_counted_in_characters():
    assert "t = 'µs'; y = a - 1" in planted("t = 'µs'; y = a + 1").values()


def test_a_sample_is_seeded_and_takes_every_kind():
    found = doubt.faults([LESSON])
    assert doubt.sample(found, 5, 1) == doubt.sample(found, 5, 1) != doubt.sample(found, 5, 2)
    assert {fault.kind for fault in doubt.sample(found, 5, 1)} == {"operator", "constant", "dtype", "keyword", "line"}
    assert len(doubt.sample(found, 10_000, 1)) == len(found)


def test_after_a_change_what_no_claim_caught_is_tried_again():
    entry, chosen = doubt.plan(None, ["a = 1 + x", "b = 2 * y"], 10, 0)
    assert entry["faults"] == [] and len(chosen) == 4
    entry["faults"] = [{"change": f.change, "kind": f.kind, "result": "survived"} for f in chosen]
    entry["faults"][0]["result"], entry["faults"][1]["result"] = "claim", "comparison"
    assert doubt.plan(entry, ["a = 1 + x", "b = 2 * y"], 10, 0)[1] == []
    changed = ["a = 1 + x", "b = 2 * y", "assert a"]
    later, again = doubt.plan(entry, changed, 10, 0)
    assert later == entry and [f.change for f in again] == [f.change for f in chosen[1:]]
    for fault in again[:-1]:
        doubt.note(later, fault, "comparison")
    assert [row["result"] for row in later["faults"]].count("survived") == 1, (
        "what was not tried again stands as it was"
    )
    assert doubt.plan(later, changed, 10, 0)[1], "and is tried by the next run"
    later, again = doubt.plan(entry, ["a = 3 + x", "b = 2 * y"], 3, 0)
    assert {row["change"] for row in later["faults"]} <= {f.change for f in chosen}
    assert len({row["change"] for row in later["faults"]} | {f.change for f in again}) == 3


PAGE = """\
def half(x):
    \"\"\"Half of x.\"\"\"
    return x / 2  # exact
claim_equal(f"{n}: the format", half(n).dtype, "float32")
print(f"half is {half(n)}", "exactly")
names = ["half"]
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Half of x.", "The half of x."),
        ("# exact", "# to the bit"),
        (": the format", ", its format"),
        ("half is ", "the half: "),
        ('"exactly"', '"to the bit"'),
    ],
)
def test_other_words_do_not_make_results_old(old, new):
    assert PAGE.count(old) == 1
    entry, chosen = doubt.plan(None, [PAGE], 20, 0)
    entry["faults"] = [{"change": f.change, "kind": f.kind, "result": "comparison"} for f in chosen]
    assert chosen and doubt.plan(entry, [PAGE.replace(old, new)], 0, 0) == (entry, [])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x / 2", "x / 3"),
        ('"float32"', '"bfloat16"'),
        ("{half(n)}", "{n}"),
        ('["half"]', '["third"]'),
        ("{n}:", "{m}:"),
    ],
)
def test_other_code_makes_results_old(old, new):
    assert PAGE.count(old) == 1
    assert doubt.plan(None, [PAGE.replace(old, new)], 0, 0)[0] != doubt.plan(None, [PAGE], 0, 0)[0]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    sources = {
        "a = 2 * 3\nb = 5\nc = b > 1": [],
        "class ClaimError(AssertionError): ...\nif a != 6:\n    raise ClaimError('six')": [],
        "print(b)": [new_output("stream", name="stdout", text="5\n")],
    }
    cells = [new_code_cell(s, outputs=o, execution_count=i) for i, (s, o) in enumerate(sources.items(), 1)]
    path = tmp_path_factory.mktemp("doubt") / "lesson.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    return path


@pytest.mark.parametrize(
    ("change", "result"),
    [
        (None, "survived"),
        ("cell 1: 3 -> 4: a = 2 * 3", "claim"),
        ("cell 1: 5 -> 6: b = 5", "comparison"),
        ("cell 1: 1 -> 2: c = b > 1", "survived"),
    ],
)
def test_a_fault_is_caught_by_a_claim_by_the_comparison_or_survives(notebook, change, result):
    sources = [c.source for c in nbformat.read(notebook, as_version=4).cells]
    found = {fault.change: fault for fault in doubt.faults(sources)}
    assert doubt.try_fault(notebook, found[change] if change else None) == result


def test_shares_leave_out_what_is_listed_as_equivalent(tmp_path, monkeypatch):
    monkeypatch.setattr(doubt, "EQUIVALENT", tmp_path / "equivalent.json")
    doubt.EQUIVALENT.write_text('{"a.ipynb": {"cell 1: x": "changes nothing"}}')
    results = {"x": "survived", "y": "survived", "z": "claim", "w": "comparison"}
    faults = [{"change": f"cell 1: {name}", "result": result} for name, result in results.items()]
    assert doubt.shares({"faults": faults}, "a.ipynb") == (3, 2, 1)


def test_only_faults_that_were_seen_to_survive_are_listed_as_equivalent():
    survived = {(name, row["change"]) for name, entry in doubt.known_results().items()
                for row in entry["faults"] if row["result"] == "survived"}  # fmt: skip
    listed = json.loads(doubt.EQUIVALENT.read_text("utf-8"))
    named = {(name, change) for name, changes in listed.items() for change in changes}
    assert named <= survived, named - survived
