"""`make again`: a cell that cannot be run twice is named, one that can is not."""

import again as tool
import pytest
from nbformat.v4 import new_code_cell, new_notebook

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
