"""The prose: links and paths exist, headings are in order, pictures have alt text, nothing names one machine."""

import ast
import itertools
import json
import re
import subprocess
import sys

import ladder_pictures
import pytest
import readme
from notebooks import ROOT, find

NOTEBOOKS = {str(path.relative_to(ROOT)): json.loads(path.read_text(encoding="utf-8")) for path in find()}
TEXTS = [*ROOT.glob("*.md"), ROOT / "results" / "README.md"]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
IMAGE_TAG = re.compile(r"<img\s[^>]*>")
FENCE = re.compile(r"(?ms)^```.*?^```\s*$")
LESSONS = [name for name in NOTEBOOKS if name.startswith("code-units/")]
# A cell's lines, a notebook's lines of code and its words, at most.
CELL, CODE, WORDS = 15, 250, 3000


def source(cell: dict) -> str:
    return "".join(cell["source"])


def markdown_of(notebook: dict) -> str:
    return "\n\n".join(source(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def code_cells(notebook: dict) -> list[dict]:
    return [c for c in notebook["cells"] if c["cell_type"] == "code" and source(c).strip()]


def documents() -> dict:
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in TEXTS}
    return {**texts, **{name: markdown_of(notebook) for name, notebook in NOTEBOOKS.items()}}


@pytest.mark.parametrize("name", documents())
def test_links_lead_somewhere(name):
    prose = FENCE.sub("", documents()[name])
    folder = (ROOT / name).parent
    for _, text, target in LINK.findall(prose):
        if target.startswith(("http://", "https://", "mailto:", "#")):
            continue
        assert (folder / target.split("#")[0]).exists(), f"{name}: [{text}]({target}) leads nowhere"


@pytest.mark.parametrize("name", documents())
def test_code_in_prose_stands_between_fences_and_python_can_be_parsed(name):
    prose = documents()[name]
    for line in prose.splitlines():
        assert "```" not in line or re.fullmatch(r"```\w*", line), (
            f"{name}: a fence has a line of its own: {line[:80]}"
        )
    assert sum(line.startswith("```") for line in prose.splitlines()) % 2 == 0, f"{name}: a fence is not closed"
    for block in re.findall(r"(?ms)^```python\n(.*?)^```$", prose):
        ast.parse(block)


@pytest.mark.parametrize("name", documents())
def test_each_item_of_a_list_begins_a_line(name):
    for paragraph in FENCE.sub("", documents()[name]).split("\n\n"):
        if re.match(r"(1\.|-) \S", paragraph):
            inside = re.search(r"[.:;)] (?:[2-9]\.|-) \S+ \S+", paragraph)
            assert not inside, f"{name}: this item begins inside a line: {inside[0][2:]}"
            nested = re.search(r"(?m)^ +[2-9]\. .+", paragraph)
            assert not nested, f"{name}: this item is inside the one before: {nested[0]}"


@pytest.mark.parametrize("name", documents())
def test_a_number_that_ends_a_sentence_does_not_begin_a_line(name):
    lines = FENCE.sub("", documents()[name]).splitlines()
    for before, line in itertools.pairwise(lines):
        goes_on = before.strip() and not re.match(r"\s*(?:> ?)?(?:\d+[.)] |[-*] |  )", before)
        assert not (goes_on and re.match(r"\s*(?:> ?)?\d+[.)] ", line)), f"{name}: this would be a list: {line[:60]}"


@pytest.mark.parametrize("name", documents())
def test_pictures_have_alt_text(name):
    prose = documents()[name]
    for mark, text, target in LINK.findall(prose):
        assert not mark or len(text.split()) >= 3, f"{name}: say in the alt text what {target} shows"
    for tag in IMAGE_TAG.findall(prose):
        assert re.search(r'alt="[^"]+ [^"]+"', tag), f"{name}: {tag} has no alt text"


@pytest.mark.parametrize("name", documents())
def test_one_title_and_no_skipped_level(name):
    levels = [len(mark) for mark in re.findall(r"(?m)^(#{1,6}) \S", FENCE.sub("", documents()[name]))]
    assert levels.count(1) == 1 and levels[0] == 1, f"{name}: one H1, first; found levels {levels}"
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), f"{name}: a level is skipped: {levels}"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_figures_that_cells_make_have_alt_text(name):
    for number, cell in enumerate(code_cells(NOTEBOOKS[name]), 1):
        for output in cell["outputs"]:
            if "image/png" in output.get("data", {}):
                alt = output["metadata"].get("image/png", {}).get("alt", "")
                assert len(alt.split()) > 3, f"{name}: the figure of code cell {number} has no alt text"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_cells_were_run_in_order_and_are_short(name):
    cells = code_cells(NOTEBOOKS[name])
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1)), f"{name}: run it top to bottom"
    long = {i: n for i, c in enumerate(cells, 1) if (n := len(source(c).strip().splitlines())) > CELL}
    assert not long, f"{name}: code cells with too many lines {long}"
    assert not any(o["output_type"] == "error" for c in cells for o in c["outputs"]), f"{name}: a stored error"


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_has_its_anatomy(name):
    cells = NOTEBOOKS[name]["cells"]
    opening, prose = source(cells[0]), markdown_of(NOTEBOOKS[name])
    assert cells[0]["cell_type"] == "markdown" and opening.startswith("# "), f"{name}: it opens with its title"
    for part in ("You will learn", "You need"):
        assert part in opening, f"{name}: the opening lacks '{part}'"
    assert "machine.describe()" in source(code_cells(NOTEBOOKS[name])[0])
    for part in ("Predict", "loses", "<details>", "In practice", "Further reading"):
        assert part in prose, f"{name}: it lacks '{part}'"
    words = len(prose.split())
    lines = sum(len([x for x in source(c).splitlines() if x.strip()]) for c in code_cells(NOTEBOOKS[name]))
    assert 800 <= words <= WORDS, f"{name}: {words} words"
    assert 30 <= lines <= CODE, f"{name}: {lines} lines of code"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_line_break_breaks_no_formula_and_no_quotation(name):
    """A formula in a sentence stands on one line (cut, its rest may read as a bullet); ">" belongs to each line."""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"(?ms)^```.*?^```", "", markdown_of(NOTEBOOKS[name]))):
        first, *others = paragraph.strip("\n").split("\n")
        quoted = [line.startswith(">") for line in others if first.startswith(">")]
        assert all(quoted), f"{name}: a quotation whose lines do not all begin with '>':\n{paragraph}"
        assert not re.search(r", > \w", paragraph), f"{name}: a '>' within a sentence:\n{paragraph}"
        for number, line in enumerate([first, *others]):
            so_far = re.sub(r"`[^`]*`|\\\$|\$\$", "", "\n".join([first, *others][: number + 1]))
            assert so_far.count("$") % 2 == 0, f"{name}: a formula is broken after {line!r}"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_light_and_normalised(name):
    notebook = NOTEBOOKS[name]
    assert (ROOT / name).stat().st_size < 800_000, f"{name}: smaller figures"
    assert set(notebook["metadata"]) - {"recorded"} == {"kernelspec", "language_info"}, f"{name}: run make refresh"
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    stored = [set(o.get("data", {})) for c in code_cells(notebook) for o in c["outputs"]]
    assert not any({"application/vnd.jupyter.widget-view+json", "text/html"} <= kinds for kinds in stored)


@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if not name.startswith("exercises")])
def test_clocks_were_read_on_a_quiet_machine(name):
    recorded = NOTEBOOKS[name]["metadata"].get("recorded", {})
    assert recorded.get("quiet"), f"{name}: run make refresh while the machine does nothing else"
    assert recorded["busy"] < 1


def test_nothing_names_one_machine():
    """No path of this checkout, of a home folder or of a temporary folder stands in what is published."""
    hidden = {".git", ".venv", "build", "__pycache__", ".pytest_cache", ".ruff_cache"}
    paths = [p for p in ROOT.rglob("*") if p.is_file() and not hidden & set(p.relative_to(ROOT).parts)]
    published = [p for p in paths if p.suffix not in (".safetensors", ".png") and p.name != "test_documents.py"]
    assert len(published) > 30
    for path in published:
        text = path.read_text(encoding="utf-8", errors="ignore")
        found = re.search(rf"{re.escape(str(ROOT))}\b|/home/\w+/|/Users/\w+/|/root/|/tmp/\w", text)
        assert not found, f"{path.relative_to(ROOT)} names {found[0]}"


def test_the_readmes_commands_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.search(r"(?m)^COMMANDS := (.+)$", makefile)[1].split())
    named = set(re.findall(r"(?m)(?:`|^(?:\w+=\w+ )*)make ([a-z]+)", text))
    assert {"lab", "test"} <= named
    assert named <= targets, f"the README names {named - targets}, which the Makefile lacks"
    for script in re.findall(r"python3? ((?:tools|benchmarks)/\w+\.py)", text):
        assert (ROOT / script).exists(), script
    for module in re.findall(r"python3? -m (benchmarks(?:\.\w+)?)", text):
        file = module.replace(".", "/") + ("/__main__.py" if module == "benchmarks" else ".py")
        assert (ROOT / file).exists(), module


def test_every_notebook_stands_in_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [name for name in NOTEBOOKS if name not in text]


def test_the_readme_lists_the_exercises_in_the_order_of_their_numbers():
    numbers = re.findall(r"\(exercises/exercise-(\d+)-", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(numbers) >= 10
    assert list(map(int, numbers)) == list(range(1, len(numbers) + 1))


def test_the_readmes_tables_are_what_notebooks_and_results_give():
    assert readme.stale() == [], "run `.venv/bin/python tools/readme.py`"


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    syllabus = text[text.index("<!-- syllabus -->") : text.index("<!-- /syllabus -->")]
    assert len(text.split()) - len(syllabus.split()) < 1500


def test_the_lesson_on_fabric_shows_the_ladder_that_results_hold():
    shown = markdown_of(NOTEBOOKS["code-units/9.8-fabric/2-five-steps-to-fabric.ipynb"])
    assert "](../../images/ladder-vit.png)" in shown
    assert not ladder_pictures.stale("vit"), "run `.venv/bin/python tools/readme.py`"


def test_every_picture_is_used_and_has_its_script():
    everything = "\n".join(documents().values())
    for picture in (ROOT / "images").glob("*.png"):
        assert picture.name in everything, f"{picture.name} is shown nowhere"


def test_direct_dependencies_agree_everywhere():
    """environment.yml installs requirements.txt; the lock holds every direct dependency; each has its reason."""
    lines = [x for x in (ROOT / "requirements.txt").read_text().splitlines() if x and not x.startswith("#")]
    names = [re.match(r"[A-Za-z0-9_.-]+", line)[0].lower() for line in lines]
    assert all("  # " in line for line in lines), "a dependency stands without its reason"
    locked = set(re.findall(r"(?m)^([a-z0-9-]+)==", (ROOT / "requirements.lock").read_text()))
    assert set(names) <= locked
    assert "requirements.txt" in (ROOT / "environment.yml").read_text()
    assert "://" not in (ROOT / "requirements.lock").read_text()


def test_code_and_notebooks_are_linted_and_formatted():
    for command in (["check"], ["format", "--check"]):
        run = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert run.returncode == 0, run.stdout + run.stderr
