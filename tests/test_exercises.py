"""Exercises come from solutions: nothing drifts, stubs hold no answers, the tool refuses what it cannot turn."""

import re

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from notebooks import RECORDED, ROOT

import exercises
from exercises import content, stale, stub
from speedlab.checks.core import check

# the cell under a task: a check of one answer has its name, one of several names them
CHECK = re.compile(r"checks\.(\w+)\((\1|\w+(?:, \w+)+)\)")
SOURCE = '''def f(x):
    """Twice x."""
    # BEGIN SOLUTION
    y = x + x
    return y
    # END SOLUTION


def g(x):
    # BEGIN SOLUTION
    return 3 * x
    # END SOLUTION'''


def notebook(*cells):
    return new_notebook(cells=list(cells))


def test_exercises_are_what_their_solutions_give():
    assert stale() == []


def test_blocks_become_stubs_that_run():
    made = stub(notebook(new_code_cell(SOURCE))).cells[0].source
    assert "x + x" not in made and "3 * x" not in made and '"""Twice x."""' in made
    names = {}
    exec(made, names)
    for name in "fg":
        with pytest.raises(NotImplementedError):
            names[name](1)


def test_solution_cells_are_dropped_and_outputs_cleared():
    answer = new_markdown_cell("The answer is 42.", metadata={"tags": ["solution"]})
    code = new_code_cell(SOURCE, execution_count=3)
    made = stub(notebook(answer, code))
    assert [c.cell_type for c in made.cells] == ["code"]
    assert made.cells[0].execution_count is None and made.cells[0].id == code.id


def test_a_changed_solution_makes_its_exercise_stale():
    solution = notebook(new_markdown_cell("Think."), new_code_cell(SOURCE))
    before = content(stub(solution))
    solution.cells[1].source = SOURCE.replace("3 * x", "4 * x")
    assert content(stub(solution)) == before, "the answer itself is no part of the exercise"
    solution.cells[0].source = "Think twice."
    assert content(stub(solution)) != before


def test_an_exercise_keeps_the_stamp_of_its_own_recording(tmp_path, monkeypatch):
    monkeypatch.setattr(exercises, "ROOT", tmp_path)
    solution = notebook(new_code_cell(SOURCE))
    solution.metadata[RECORDED] = {"quiet": True, "seconds": 9}
    exercise = stub(solution)
    assert RECORDED not in exercise.metadata
    exercise.metadata[RECORDED] = {"quiet": True, "seconds": 1}
    for folder, made in (("solutions", solution), ("exercises", exercise)):
        (tmp_path / folder).mkdir()
        nbformat.write(made, tmp_path / folder / "exercise-0.ipynb")
    exercises.make([tmp_path / "solutions" / "exercise-0.ipynb"])
    stored = nbformat.read(tmp_path / "exercises" / "exercise-0.ipynb", as_version=4)
    assert stored.metadata[RECORDED]["seconds"] == 1


def test_a_solution_without_a_block_is_refused():
    with pytest.raises(ValueError, match="BEGIN SOLUTION"):
        stub(notebook(new_code_cell("x = 1")))


def test_no_exercise_holds_a_solution():
    for path in (ROOT / "exercises").glob("*.ipynb"):
        text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        assert "SOLUTION" not in text and "raise NotImplementedError" in text


def test_numbers_and_names_go_together():
    names = {p.name for p in (ROOT / "solutions").glob("*.ipynb")}
    assert names == {p.name for p in (ROOT / "exercises").glob("*.ipynb")}
    assert all(name.startswith("exercise-") for name in names)


def test_only_the_stub_counts_as_not_attempted(capsys):
    """PyTorch raises NotImplementedError as well, with a message: that is a mistake to be shown."""

    @check("task")
    def run(answer):
        answer()

    def stub_left():
        raise NotImplementedError

    run(stub_left)
    run(lambda: torch.zeros(2, dtype=torch.float8_e4m3fn) @ torch.zeros(2, dtype=torch.float8_e4m3fn))
    left, mistaken = capsys.readouterr().out.splitlines()
    assert left == "task: not attempted yet"
    assert mistaken.startswith("task: not yet right. Your code raised NotImplementedError") and "Float8" in mistaken


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "solutions").glob("*.ipynb")))
def test_a_check_stands_under_each_task_and_has_said_what_it_should(name):
    """The stored verdicts are right for solution and stub; the notebook's own run proves that they are true."""
    for folder, expected in (("solutions", "correct"), ("exercises", "not attempted yet")):
        cells = nbformat.read(ROOT / folder / name, as_version=4).cells
        checked = {i: found[2].split(", ") for i, cell in enumerate(cells) if (found := CHECK.fullmatch(cell.source))}
        assert len(checked) >= 2, f"{folder}/{name}: {len(checked)} check cells"
        for i, answers in checked.items():
            verdict = cells[i].outputs[0].text.strip().split(": ", 1)[1]
            assert verdict == expected, f"{folder}/{name}, {answers}: {verdict}"
            above = "\n".join(cell.source for cell in (cells[i - 1 : i] if len(answers) == 1 else cells[:i]))
            for answer in answers:
                assert f"def {answer}(" in above, f"{folder}/{name}: {answer} stands elsewhere than its check"
