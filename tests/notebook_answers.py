"""Answers for tests of the checks: read from a notebook without running the rest of it, or listed in a table."""

import ast
import json
import linecache
from pathlib import Path

import pytest

# names that answers use and that another cell of the notebook defines
CONSTANTS = {"PRECISIONS", "loss_fn"}


def defined(source: str, name: str, **names: object) -> dict[str, object]:
    """The names that some source defines; `inspect` finds the source of its functions, as it does in a notebook."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), names)
    return names


def answers(notebook: Path) -> dict[str, object]:
    """The functions that a notebook defines, with the imports and constants that they need, and nothing else run."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")

    def is_needed(node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            return isinstance(node.targets[0], ast.Name) and node.targets[0].id in CONSTANTS
        return isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)

    kept = [ast.unparse(node) for node in ast.parse(code).body if is_needed(node)]
    return defined("\n\n".join(kept), f"<{notebook.parent.name}>")


def named(table: dict) -> list:
    """The cases of a table {name: case}, each under its name; a tuple gives several arguments."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), id=name) for name, case in table.items()]


def attacks(table: dict) -> list:
    """The cases of a table {name: (answer, words...)}, each under its name."""
    return [pytest.param(answer, words, id=name) for name, (answer, *words) in table.items()]


def endless(*_, **__):
    """An answer that never ends."""
    while True:
        pass
