"""Plant small faults in the lessons' own code, and count how many the proof notices, by a claim or by the comparison.

For each notebook, a seeded sample of faults is drawn: a changed operator, constant or dtype, a keyword left out, or a
line deleted; never in imports, figures, widgets, guesses, timed code, code that only a GPU runs, or the claims
themselves. With one change at a time, the notebook runs again from the top in a fresh kernel. The results go to
results/doubt/units.json; a later run resumes there. After a change of a notebook's code, what no claim caught is
tried again, and faults that no longer apply are replaced. A survivor that changes nothing a reader could notice
is listed with its reason in tools/equivalent_faults.json.
Usage: python tools/doubt.py [--minutes 60] [--faults 12] [--seed 0] [notebook, folder, 9.1 or 9.1.1 ...]
"""

import argparse
import ast
import concurrent.futures
import copy
import hashlib
import io
import json
import multiprocessing
import os
import random
import time
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from notebooks import BRIEF, KERNEL, QUIET, RECORDED, ROOT, find, same_outputs
from tqdm import tqdm

RESULTS = ROOT / "results" / "doubt" / "units.json"
EQUIVALENT = ROOT / "tools" / "equivalent_faults.json"
# Calls whose arguments are words, pictures, seeds or times: changing those plants no fault in the lesson.
_SPARED_CALLS = (
    "claim compare compiler copy_bandwidth describe display explore figure filterwarnings HTML ipywidgets is_fast "
    "manual_seed measured peak_flops perf_counter plots quoted seconds_text seed_everything show table time_step "
    "widgets"
).split()
_SPARED_KEYWORDS = set("alt caption device label max_rounds min_rounds seconds seed strict timeout title".split())
_OPERATORS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
              ast.FloorDiv: ("//", "*"), ast.Pow: ("**", "*"), ast.Mod: ("%", "+")}  # fmt: skip
_COMPARISONS = {ast.Lt: ("<", ">="), ast.LtE: ("<=", ">"), ast.Gt: (">", "<="), ast.GtE: (">=", "<"),
                ast.Eq: ("==", "!="), ast.NotEq: ("!=", "==")}  # fmt: skip
_DTYPES = {"bfloat16": "float16", "float16": "bfloat16", "float32": "float64", "float64": "float32",
           "int64": "int32", "int32": "int64"}  # fmt: skip
_PRECISIONS = {"bf16-mixed": "32-true", "16-mixed": "bf16-mixed", "bf16-true": "bf16-mixed", "32-true": "bf16-mixed",
               "bf16": "fp16", "fp16": "bf16", "fp32": "bf16"}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One change: in code cell number `cell` (from 1), `text` replaces the characters from `start` to `end`."""

    cell: int
    kind: str
    start: int
    end: int
    text: str
    change: str


def faults(sources: list[str]) -> list[Fault]:
    """Every change that may be planted in these code cells."""
    return [fault for number, source in enumerate(sources, 1) for fault in _faults_in(number, source)]


def sample(found: list[Fault], count: int, seed: int) -> list[Fault]:
    """Up to `count` random faults, the kinds in turn, so that constants, the most frequent, leave room for others."""
    chance = random.Random(seed)
    piles: dict[str, list[Fault]] = {}
    for fault in chance.sample(found, len(found)):
        piles.setdefault(fault.kind, []).append(fault)
    chosen: list[Fault] = []
    while len(chosen) < count and any(piles.values()):
        chosen += [pile.pop() for _, pile in sorted(piles.items()) if pile][: count - len(chosen)]
    return chosen


def _plain(source: str) -> str:
    """The cell with blanks in place of lines that only IPython understands, so that its length stays the same."""
    return "\n".join(" " * len(line) if line.startswith(("%", "!")) else line for line in source.splitlines())


def _without_comments(text: str) -> str:
    """The code with blanks in place of its comments, so that its length stays the same."""
    lines = text.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, start, end = token.start[0] - 1, token.start[1], token.end[1]
            lines[row] = lines[row][:start] + " " * (end - start) + lines[row][end:]
    return "".join(lines)


def _faults_in(number: int, source: str) -> Iterator[Fault]:
    text = _plain(source)
    tree, uncommented = ast.parse(text), _without_comments(text)
    # the tree counts columns in bytes
    lines = [0, *(i + 1 for i, byte in enumerate(text.encode()) if byte == 10)]
    encoded = text.encode()

    def at(line: int, column: int) -> int:
        return len(encoded[: lines[line - 1] + column].decode())

    def span(node: ast.AST) -> tuple[int, int]:
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    def fault(kind: str, start: int, end: int, new: str) -> Fault:
        line = " ".join(uncommented[text.rfind("\n", 0, start) + 1 : (text + "\n").find("\n", end)].split())
        said = "deleted" if kind == "line" else f"{text[start:end].strip(', ')} -> {new or 'left out'}"
        return Fault(number, kind, start, end, new, f"cell {number}: {said}: {line}")

    def between(left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[Fault]:
        start, end = span(left)[1], span(right)[0]
        place = text.find(old, start, end)
        if place >= 0 and text[start:end].count(old) == 1:
            yield fault("operator", place, place + len(old), new)

    for node in _lesson_code(tree):
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not isinstance(node.left, ast.JoinedStr):
            yield from between(node.left, node.right, *_OPERATORS[type(node.op)])
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            yield from between(node.left, node.comparators[0], *_COMPARISONS[type(node.ops[0])])
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield fault("constant", *span(node), str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            new = node.value + 1 if isinstance(node.value, int) else node.value * 2 or 1.0
            yield fault("constant", *span(node), repr(new))
        elif isinstance(node, ast.Constant) and node.value in _PRECISIONS:
            yield fault("dtype", *span(node), repr(_PRECISIONS[node.value]))
        elif isinstance(node, ast.Attribute) and node.attr in _DTYPES and ast.unparse(node.value) == "torch":
            yield fault("dtype", *span(node), f"torch.{_DTYPES[node.attr]}")
        elif isinstance(node, ast.Call):
            parts = sorted([*node.args, *(k.value for k in node.keywords)], key=lambda part: span(part)[0])
            for keyword in node.keywords:
                if keyword.arg and keyword.arg not in _SPARED_KEYWORDS:
                    place = parts.index(keyword.value)
                    start = span(parts[place - 1])[1] if place else at(keyword.lineno, keyword.col_offset)
                    end = span(keyword.value)[1]
                    if not place and len(parts) > 1:
                        end = text.index(",", end) + 1
                    yield fault("keyword", start, end, "")
        elif _does_something(node):
            yield fault("line", *span(node), "pass")


def _lesson_code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree in which a fault may be planted."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom | ast.JoinedStr):
            continue
        if isinstance(node, ast.If | ast.IfExp) and "cuda" in ast.unparse(node.test):
            if child in (node.body if isinstance(node, ast.If) else [node.body]):
                continue  # a run without a GPU cannot test what only a GPU runs
        if isinstance(child, ast.keyword) and child.arg in _SPARED_KEYWORDS:
            continue
        if isinstance(child, ast.Call | ast.Expr | ast.Assign | ast.FunctionDef | ast.With) and _spared(child):
            continue
        yield child
        yield from _lesson_code(child)


def _does_something(node: ast.AST) -> bool:
    """Whether deleting this statement plants a fault: not if it only shows something, or is a docstring."""
    if isinstance(node, ast.Expr):
        shown = isinstance(node.value, ast.Call) and _shows(node.value)
        return not shown and not isinstance(node.value, ast.Constant)
    return isinstance(node, ast.AugAssign)


def _shows(call: ast.Call) -> bool:
    """Whether this call prints, or appends formatted text to rows that are shown later."""
    name = ast.unparse(call.func)
    texts = any(isinstance(node, ast.JoinedStr) for argument in call.args for node in ast.walk(argument))
    return name in ("print", "Markdown") or (name.endswith(".append") and texts)


def _spared(node: ast.AST) -> bool:
    """Whether this only shows or guesses: it calls a spared function, holds a plotting call, or assigns a guess."""
    if isinstance(node, ast.Assign) and any("guess" in ast.unparse(target) for target in node.targets):
        return True
    if isinstance(node, ast.FunctionDef):
        return any(isinstance(n, ast.Call) and "plots." in ast.unparse(n.func) for n in ast.walk(node))
    value = node if isinstance(node, ast.Call) else getattr(node, "value", None)
    if not isinstance(value, ast.Call):
        return False
    names = ast.unparse(value.func).replace("(", ".").split(".")
    return any(name.startswith("claim") or name in _SPARED_CALLS or name in ("ax", "axes") for name in names)


class _Doubted(NotebookClient):
    """Runs a notebook and notes whether an output differs from the stored one."""

    def __init__(self, stored: nbformat.NotebookNode, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.stored, self.differs = stored, False

    async def async_execute_cell(self, cell, cell_index, *args, **kwargs):
        done = await super().async_execute_cell(cell, cell_index, *args, **kwargs)
        if cell.cell_type == "code" and not self.differs:
            self.differs = not same_outputs(self.stored.cells[cell_index].outputs, cell.outputs)
        return done


def try_fault(path: Path, fault: Fault | None) -> str:
    """Run the notebook with the fault; return `claim`, `comparison` or `survived`. Without one, run it unchanged."""
    stored = nbformat.read(path, as_version=4)
    doubted = copy.deepcopy(stored)
    if fault:
        code = [c for c in doubted.cells if c.cell_type == "code"][fault.cell - 1]
        code.source = code.source[: fault.start] + fault.text + code.source[fault.end :]
    limit = 60 + 3 * int(stored.metadata.get(RECORDED, {}).get("seconds", 60))
    where = {"metadata": {"path": str(path.parent)}}
    client = _Doubted(stored, doubted, timeout=limit, coalesce_streams=True, resources=where, **KERNEL)
    try:
        client.execute(env=os.environ | QUIET | BRIEF)
    except CellExecutionError as error:
        return "claim" if error.ename == "ClaimError" else "comparison"
    except (CellTimeoutError, DeadKernelError):
        return "comparison"
    return "comparison" if client.differs else "survived"


def plan(entry: dict | None, sources: list[str], count: int, seed: int) -> tuple[dict, list[Fault]]:
    """Results of earlier runs for the faults that still exist, and the faults to try: new ones up to `count`, and,
    after a change, those that no claim caught. `made_by` marks the code that all results hold for."""
    mark = _mark(sources)
    entry = entry or {"made_by": mark, "faults": []}
    possible = {fault.change: fault for fault in faults(sources)}
    rows = [row for row in entry["faults"] if row["change"] in possible]
    again = [] if entry["made_by"] == mark else [row["change"] for row in rows if row["result"] != "claim"]
    fresh = [
        f for f in sample(list(possible.values()), count, seed) if f.change not in {row["change"] for row in rows}
    ]
    chosen = [possible[change] for change in again] + fresh[: max(count - len(rows), 0)]
    return {"made_by": entry["made_by"] if chosen else mark, "faults": rows}, chosen


def mark_of(path: Path) -> str:
    """The mark of the code that a notebook holds now, to compare with the `made_by` of its results."""
    return _mark([c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"])


def _mark(sources: list[str]) -> str:
    """A hash of the code, the same in every Python version, that ignores comments, docstrings and words shown."""
    code: list[str] = []
    for source in sources:
        tree = ast.parse(_plain(source))
        words = {id(word) for node in ast.walk(tree) for word in _words(node)}
        for node in ast.walk(tree):
            if id(node) not in words:
                values = [value for _, value in ast.iter_fields(node)]
                code += [type(node).__name__, *(repr(v) for v in values if not isinstance(v, ast.AST | list))]
    return hashlib.sha256(" ".join(code).encode()).hexdigest()[:12]


def _words(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the constants below a node that are only words for a reader."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node.value
    elif isinstance(node, ast.Call) and (_spared(node) or _shows(node)):
        name = ast.unparse(node.func)  # in a claim or a quotation, the words come first, then what is compared
        compared = name.startswith("claim") or name in ("measured", "quoted")
        for said in node.args[:1] if compared else [*node.args, *(keyword.value for keyword in node.keywords)]:
            for text in said.elts if isinstance(said, ast.List | ast.Tuple) else [said]:
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                yield from (part for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))


def note(entry: dict, fault: Fault, result: str) -> None:
    """Store the result of a fault in the entry of its notebook, replacing what an earlier run found."""
    others = [row for row in entry["faults"] if row["change"] != fault.change]
    entry["faults"] = [*others, {"change": fault.change, "kind": fault.kind, "result": result}]


def shares(entry: dict, name: str) -> tuple[int, int, int]:
    """How many faults of a notebook count, how many of these were caught, and how many by a claim."""
    excused = json.loads(EQUIVALENT.read_text(encoding="utf-8")).get(name, {})
    counted = [f["result"] for f in entry["faults"] if f["result"] != "survived" or f["change"] not in excused]
    return len(counted), sum(r != "survived" for r in counted), counted.count("claim")


def known_results() -> dict[str, dict]:
    """What results/doubt/units.json holds, by notebook."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def _write(results: dict[str, dict]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    partial = RESULTS.with_suffix(".partial")
    partial.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")
    partial.replace(RESULTS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant faults in the lessons and count how many are noticed.")
    parser.add_argument("names", nargs="*", help="notebooks, folders or numbers such as 9.1.1 (default: all units)")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no fault after this many minutes (60)")
    parser.add_argument("--faults", type=int, default=12, help="faults per notebook (12)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="simultaneous runs (one per CPU)")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    results = known_results()
    waiting, marks = [], {}
    for path in find(given.names or ["code-units"]):
        name = path.relative_to(ROOT).as_posix()
        sources = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
        results[name], chosen = plan(results.get(name), sources, given.faults, given.seed)
        waiting += [(path, name, fault) for fault in chosen]
        marks[name] = _mark(sources)
    with (
        concurrent.futures.ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool,
        tqdm(total=len(waiting), unit="fault", disable=False) as bar,
    ):
        running: dict[concurrent.futures.Future, tuple[str, Fault]] = {}
        while running or (waiting and time.monotonic() < end):
            while waiting and len(running) < given.workers and time.monotonic() < end:
                path, name, fault = waiting.pop(0)
                running[pool.submit(try_fault, path, fault)] = name, fault
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                name, fault = running.pop(future)
                note(results[name], fault, future.result())
                if name not in {other for _, other, _ in waiting} | {other for other, _ in running.values()}:
                    results[name]["made_by"] = marks[name]
                _write(results)
                bar.update()
                if future.result() == "survived":
                    bar.write(f"survived  {name}, {fault.change}")
    report(results)
    if waiting:
        print(f"{len(waiting)} faults were not tried within {given.minutes:g} minutes: run this again to continue.")


def report(results: dict[str, dict]) -> None:
    """Print the share of faults that were caught, per notebook and in total."""
    total = [0, 0, 0]
    for name, entry in sorted(results.items()):
        found = shares(entry, name)
        total = [a + b for a, b in zip(total, found, strict=True)]
        if found[0]:
            print(
                f"{found[1] / found[0]:5.0%} caught, {found[2] / found[0]:4.0%} by a claim, of {found[0]:3d}  {name}"
            )
    if total[0]:
        print(f"{total[1] / total[0]:5.0%} caught, {total[2] / total[0]:4.0%} by a claim, of {total[0]:3d}  all")


if __name__ == "__main__":
    main()
