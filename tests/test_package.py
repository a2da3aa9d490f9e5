"""The house: dependencies run one way and in no circle, nothing reaches into another module, speedlab is small."""

import ast
import graphlib
import json
import re
from pathlib import Path

from notebooks import ROOT, find

# A module of speedlab imports only from the layers above its own; a package (data, checks, diagnose) is one part.
LAYERS = (
    {"display"},
    {"machine"},
    {"claims", "compat", "count", "measure", "results"},
    {"data", "launch", "plots"},
    {"widgets"},
    {"diagnose"},
    {"checks"},
)
# of speedlab without its packages: data, diagnose, checks
MOST_LINES = 1550
PACKAGES = ("speedlab", "benchmarks")


def name_of(path: Path) -> str:
    """What a file is imported as: speedlab.data.glyphs, benchmarks.ladder, and notebooks for tools/notebooks.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) if parts[0] in PACKAGES else parts[-1]


def code_of(path: Path) -> str:
    """The code of a script or of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", "\n".join("".join(cell["source"]) for cell in cells))


FOLDERS = ("benchmarks", "code-units", "images", "speedlab", "tests", "tools")
SCRIPTS = [ROOT / "conftest.py", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
MODULES = {name_of(path): path for path in SCRIPTS}
CODE = {path.relative_to(ROOT).as_posix(): code_of(path) for path in (*SCRIPTS, *find())}


def owner(whole: str) -> str:
    """The module of this repository that a dotted name stands in, or nothing."""
    while whole and whole not in MODULES:
        whole = whole.rpartition(".")[0]
    return whole


def imported(code: str) -> dict[str, str]:
    """What a file imports of this repository's modules, anywhere in it: {the name it gives it: the dotted name}."""
    found = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: whole for name, whole in found.items() if owner(whole)}


def needs(name: str) -> set[str]:
    return {owner(whole) for whole in imported(code_of(MODULES[name])).values()} - {name}


def test_dependencies_go_round_in_no_circle():
    graph = {name: needs(name) for name in MODULES}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the circle
    assert order.index("speedlab.machine") < order.index("speedlab.count") < order.index("benchmarks.ladder")


def test_speedlab_imports_one_way():
    part = {name: name.split(".")[1] for name in MODULES if name.startswith("speedlab.")}
    level = {part: i for i, layer in enumerate(LAYERS) for part in layer}
    assert set(part.values()) == set(level), "every module of speedlab has its layer"
    wrong = [
        f"{name} imports {other}"
        for name in part
        for other in needs(name) - {"speedlab"}
        if part.get(other) != part[name] and level.get(part.get(other), 99) >= level[part[name]]
    ]
    assert not wrong, wrong


def test_nothing_uses_a_private_name_of_another_module():
    """Tests may look inside what they test."""
    wrong = []
    for place, code in CODE.items():
        if place.startswith("tests/"):
            continue
        known = imported(code)
        used = [
            f"{known.get(node.value.id)}.{node.attr}"
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if known.get(node.value.id) in MODULES
        ]
        wrong += [f"{place}: {name}" for name in (*known.values(), *used) if re.search(r"\._[^_.]\w*$", name)]
    assert not wrong, wrong


def test_no_path_is_patched_to_import_from():
    """Three set it: a rank's script and a file to diagnose find their neighbours, a hosted notebook the package."""
    patch = re.compile(r"sys\.path(\.(insert|append|extend)\(|\[[^\]]*\][^=!\n]*=[^=])")
    assert [place for place, code in CODE.items() if patch.search(code)] == [
        "speedlab/diagnose/jobs.py",
        "speedlab/launch.py",
        "tools/hosted_setup.py",
    ]


def test_speedlab_is_small():
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob("speedlab/*.py")}
    assert sum(lines.values()) <= MOST_LINES, f"{sum(lines.values())} lines: {lines}"
