"""A claim compares what a cell ran, counted or read with something from elsewhere; typed arithmetic is no claim.

The syntax tree tells typed constants: literals, and what formulas compute from them alone. A function with a loop is
an algorithm, such as a simulation, whose result may stand against a formula.
"""

import ast
import builtins
import json

import pytest
from notebooks import ROOT, find

LESSONS = [str(path.relative_to(ROOT)) for path in find() if path.relative_to(ROOT).parts[0] == "code-units"]
_PURE = {"math", "itertools", "statistics", *dir(builtins)} - {"open", "input", "eval", "exec", "print", "vars"}


def stored(node: ast.AST) -> set[str]:
    """Names that a piece of code binds: assignments, arguments, loop variables, definitions."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    return names | {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef)}


def typed(node: ast.AST, known: set[str]) -> bool:
    """Whether an expression or a definition rests on typed constants alone."""
    known = known | stored(node) | _PURE
    return all(n.id in known for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))


def changed(tree: ast.AST) -> set[str]:
    """Names of things that are changed in place: a method is called, an element set, something added."""
    found = set()
    for node in ast.walk(tree):
        place = getattr(node, "func", None) if isinstance(node, ast.Call) else getattr(node, "target", None)
        if isinstance(node, ast.AugAssign) and isinstance(place, ast.Name):
            found.add(place.id)
        elif isinstance(place, ast.Attribute) and isinstance(place.value, ast.Name):
            found.add(place.value.id)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            found.add(node.value.id)
    return found


def empty_claims(sources: list[str]) -> list[str]:
    """The texts of claims whose evidence is typed, in the order of the cells."""
    trees = [ast.parse("\n".join("" if x.startswith(("%", "!")) else x for x in s.splitlines())) for s in sources]
    altered = {name for tree in trees for name in changed(tree)} - _PURE
    known: set[str] = set()
    found: list[str] = []

    def read(statements: list[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, ast.For | ast.If | ast.With):
                targets = stored(statement.target) if isinstance(statement, ast.For) else set()
                if isinstance(statement, ast.For) and typed(statement.iter, known):
                    known.update(targets - altered)
                else:
                    known.difference_update(targets)
                read(statement.body)
                continue
            for call in (n for n in ast.walk(statement) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)):
                evidence = [*call.args[1:], *(k.value for k in call.keywords)]
                if call.func.id.startswith("claim") and evidence and all(typed(e, known) for e in evidence):
                    found.append(ast.unparse(call.args[0]))
            formula = isinstance(statement, ast.Assign | ast.AnnAssign | ast.FunctionDef) and typed(statement, known)
            if formula and not any(isinstance(n, ast.For | ast.While) for n in ast.walk(statement)):
                known.update(stored(statement) - altered)
            else:
                known.difference_update(stored(statement))

    for tree in trees:
        read(tree.body)
    return found


@pytest.mark.parametrize("name", LESSONS)
def test_no_claim_rests_on_typed_constants(name):
    cells = json.loads((ROOT / name).read_text(encoding="utf-8"))["cells"]
    empty = empty_claims(["".join(c["source"]) for c in cells if c["cell_type"] == "code"])
    assert not empty, f"{name}: print this arithmetic, or compare with what was run: {empty}"


@pytest.mark.parametrize(
    ("cells", "count"),
    [
        (["claim('two and two', 2 + 2 == 4)"], 1),
        (["a = 3", "b = [x * a for x in range(4)]", "claim_equal('sum', sum(b), 18)"], 1),
        (["def cost(n):\n    return 2 * n", "for n in (1, 2):\n    claim_equal('cost', cost(n), 2 * n)"], 1),
        (["import math", "claim_close('root', math.sqrt(4), 2, rtol=1e-9)"], 1),
        (["x = run()", "claim_equal('ran', x, 4)"], 0),
        (["a = 3", "a = measure(a)", "claim_equal('ran', a, 4)"], 0),
        (["seen = []", "seen.append(run())", "claim_equal('ran', sum(seen), 4)"], 0),
        (["total = 0", "for x in run():\n    total += x", "claim_equal('ran', total, 4)"], 0),
        (["def play(n):\n    while n > 4:\n        n -= 1\n    return n", "claim_equal('played', play(9), 4)"], 0),
        (["for k in (1, 2):\n    x = run(k)\n    claim_equal('ran', x, k)"], 0),
        (["def cost(n):\n    return model(n)", "claim_equal('cost', cost(2), 4)"], 0),
        (["claim_equal('read', json.loads(text)['a'], 4)"], 0),
    ],
)
def test_typed_claims_are_told_from_evidence(cells, count):
    assert len(empty_claims(cells)) == count
