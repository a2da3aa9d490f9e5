"""`make again`: a cell that cannot be run twice is named, one that can is not."""

import sys

import again as tool
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from notebooks import ROOT, find

SAME = "from speedlab.display import measured\nimport time\nmeasured('time', time.perf_counter())\nprint(n)"


@pytest.mark.parametrize("from_the_top", [False, True])
def test_cells_that_mind_a_second_run_are_named(tmp_path, from_the_top):
    sources = ["n, rest = 1, [2]", SAME, "n += 1\nprint(n)", "print(rest)\ndel rest", "kept = [3]", "n = len(kept)"]
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    found = tool.run_twice(notebook, tmp_path, from_the_top=from_the_top)
    if from_the_top:
        assert found == []
    else:
        assert found == [
            "cell 3: the second run shows something else",
            "cell 4: NameError: name 'rest' is not defined",
        ]


def test_a_cell_that_only_a_later_one_spoils_is_named_from_the_top(tmp_path):
    sources = ["import math", "print(math.sqrt(4))", "math.sqrt = None"]
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    assert tool.run_twice(notebook, tmp_path) == []
    assert tool.run_twice(notebook, tmp_path, from_the_top=True) == [
        "cell 2: TypeError: 'NoneType' object is not callable"
    ]


def test_lessons_are_found_by_their_numbers_a_unit_by_its_own_and_a_wrong_one_gets_a_sentence():
    names = [
        path.relative_to(ROOT).as_posix()
        for path in find(["9.1.1", "capstone.2", "exercises/exercise-3-multi-gpu.ipynb"])
    ]
    assert [name.split("/")[-1][:2] for name in names] == ["1-", "2-", "ex"]
    assert [name.split("/")[1][:4] for name in names[:2]] == ["9.1-", "caps"]
    assert find(["9.1"]) == find([str(ROOT / "code-units" / "9.1-mixed-precision")])
    with pytest.raises(SystemExit) as said:
        find(["9.1.77"])
    assert "There is no 9.1.77." in str(said.value) and "such as 9.1.1" in str(said.value)


@pytest.mark.parametrize("lines", [[], ["cell 3: the second run shows something else"]])
def test_the_end_says_whether_every_cell_can_be_run_again(monkeypatch, capsys, lines):
    monkeypatch.setattr(tool, "run_twice", lambda *args, **options: lines)
    monkeypatch.setattr(tool.os, "environ", {})
    monkeypatch.setattr(sys, "argv", ["again", "9.1.1", "9.1.2"])
    if lines:
        with pytest.raises(SystemExit) as said:
            tool.main()
        assert said.value.code == "2 cells cannot be run again."
    else:
        tool.main()
        assert "Every code cell of 2 notebooks can be run again." in capsys.readouterr().out
