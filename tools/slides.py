"""Slides from a lesson as it is: cut along its structure, with outputs and answers that appear at the Space key.

nbconvert turns Markdown and code into HTML; reveal.js and MathJax are copied next to it, so that nothing is fetched.
"""

import ast
import base64
import html
import math
import re
import shutil
import struct
from itertools import zip_longest
from pathlib import Path

import extras
import nbformat
from nbconvert.filters import Highlight2HTML, markdown2html, strip_ansi

ROOT = Path(__file__).resolve().parents[1]
WIDE = 95  # characters per line of code; a cell with a longer line is set in smaller type
ROWS = 13  # table rows that fit on one slide if each takes one line
LINES = 22  # lines of output that fit on one slide
ROOM = 600  # pixels, of a slide's 720, that its parts may take, by estimate; the page shrinks what is taller
_CUT, _GAP = r"(?m)^(?=#{1,3} |> \*\*Predict)", r"\n\s*\n"
_FENCE = re.compile(r"(?ms)^```.*?^```[ \t]*$")
_DETAILS = re.compile(r"(?s)<details>\s*<summary>(.*?)</summary>(.*?)</details>")


def pieces(notebook: nbformat.NotebookNode) -> list[tuple[str, str, nbformat.NotebookNode]]:
    """The lesson in order as (kind, source, cell): text, predict, code, the answer after it, and the closing part.

    The text between a cell and the next heading, question or cell says what came out: it is an answer.
    """
    made, after_code, closing = [], False, False
    for cell in notebook.cells:
        if cell.cell_type == "code":
            made.append(("code", cell.source, cell))
            after_code = True
            continue
        for part in (part.strip() for part in _split(_CUT, cell.source)):
            heading = part.startswith("#")
            closing = closing or part.startswith("## What you ")
            after_code = after_code and not heading and not part.startswith("> **Predict")
            kind = "closing" if closing else "answer" if after_code else "text"
            if part.startswith("> **Predict"):
                question, _, rest = part.partition("\n\n")
                made.append(("predict", question, cell))
                part = rest.strip()
            if part:
                made.append((kind, part, cell))
    return made


def _split(pattern: str, text: str) -> list[str]:
    """Markdown cut at a pattern, but not inside a code block."""
    fences: list[str] = []
    hidden = _FENCE.sub(lambda found: fences.append(found[0]) or f"\0{len(fences) - 1}\0", text)
    whole = lambda part: re.sub(r"\0(\d+)\0", lambda found: fences[int(found[1])], part)  # noqa: E731
    return [whole(part).strip("\n") for part in re.split(pattern, hidden) if part.strip()]


def blocks(text: str) -> list[tuple[str, float, bool]]:
    """Paragraphs, lists, tables and code as (Markdown, pixels, whether an answer): a slide takes as many as fit."""
    made = []
    position = 0
    for found in [*_DETAILS.finditer(text), None]:
        plain = text[position : found.start() if found else len(text)]
        made += [(block, _height(block), False) for block in _split(_GAP, plain)]
        if found:
            position = found.end()
            made.append((found[2].strip(), _height(found[2]), True))
    return made


def _height(block: str) -> float:
    """The approximate height of a Markdown block on a slide, in pixels."""
    lines = block.splitlines()
    if block.startswith("```"):
        return 26 + 24 * len(lines)
    if block.startswith("|"):
        return 20 + sum(38 * (1 + len(line) // 150) for line in lines)
    if "![" in block or block.startswith("$$"):
        return 420 if "![" in block else 90
    return 20 + 34 * sum(1 + len(line) // 98 for line in (lines if block[0] in "-1" else [" ".join(lines)]))


def shown(cell: nbformat.NotebookNode) -> list[tuple[str, float]]:
    """A cell's outputs as parts that fit on a slide: (HTML, pixels)."""
    made: list[tuple[str, float]] = []
    for output in cell.outputs:
        data, about = output.get("data", {}), output.get("metadata", {})
        if output.get("name") == "stderr":
            continue
        if "image/png" in data:
            alt = html.escape(about.get("image/png", {}).get("alt", ""), quote=True)
            _, high = struct.unpack(">II", base64.b64decode(data["image/png"])[16:24])
            picture = f'<img alt="{alt}" src="data:image/png;base64,{data["image/png"].strip()}">'
            made.append((picture, min(high, 430) + 10))
        elif "text/html" in data:
            lines = _lines_of_a_row(data["text/html"])
            tables = [f'<div class="table">{table}</div>' for table in _tables(data["text/html"], ROWS // lines)]
            made += [(table, 36.0 * lines * (table.count("<tr") + 1)) for table in tables]
        elif "text/markdown" in data:
            for block in _split(_GAP, data["text/markdown"]):
                fence, *lines = block.removesuffix("```").rstrip().splitlines()
                cuts = range(0, len(lines), LINES) if fence.startswith("```") and len(lines) > LINES + 2 else ()
                cut = ["\n".join([fence, *lines[i : i + LINES], "```"]) for i in cuts]
                made += [(_markdown(part), _height(part)) for part in cut or [block]]
        else:
            lines = strip_ansi(output.get("text", data.get("text/plain", ""))).rstrip().splitlines()
            for i in range(0, len(lines), LINES):
                part = lines[i : i + LINES]
                made.append((f"<pre>{html.escape(chr(10).join(part))}</pre>", 15 + 23.0 * len(part)))
    return made


def _lines_of_a_row(table: str) -> int:
    """How many lines a row takes: a table that is wider than a slide wraps the text of its longest columns."""
    rows = [re.findall(r"(?s)<t[dh].*?</t[dh]>", row) for row in re.findall(r"(?s)<tr.*?</tr>", table)]
    lengths = [[len(re.sub("<[^>]+>", "", cell)) for cell in row] for row in rows]
    columns = [max(column) for column in zip_longest(*lengths, fillvalue=0)]
    wide = sum(9 * length + 28 for length in columns)  # pixels, with the padding of a cell
    return max(1, math.ceil(wide / 1180))


def _tables(table: str, most: int) -> list[str]:
    """A long table as several of about `most` rows, each with the head of the whole table."""
    found = re.fullmatch(r"(?s)(.*<tbody>)(.*)(</tbody>.*)", table)
    rows = re.findall(r"(?s)<tr.*?</tr>", found[2]) if found else []
    if len(rows) <= most + 1:
        return [table]
    return [found[1] + "".join(rows[i : i + most]) + found[3] for i in range(0, len(rows), most)]


def _markdown(text: str) -> str:
    made = markdown2html(text).replace("&#182;", "").replace("¶", "")
    # other files of the course do not lie beside the slides, and a dead link would replace the talk
    return re.sub(r'(?s)<a href="(?!https?:)[^"]*">(.*?)</a>', r"\1", made)


class Slide:
    """A slide that is being filled: its kind, its HTML, the pixels used, and what only the speaker sees."""

    def __init__(self, kind: str, html: str = "", used: float = 0.0, notes: str = ""):
        self.kind, self.html, self.used, self.notes = kind, html, used, notes

    def add(self, html: str, pixels: float, fragment: str = "") -> None:
        self.html += f'<div class="fragment {fragment}">{html}</div>' if fragment else html
        self.used += pixels

    def __str__(self) -> str:
        notes = f'<aside class="notes">{self.notes}</aside>' if self.notes else ""
        return f'<section class="{self.kind}">{self.html}{notes}</section>'


def sections(notebook: nbformat.NotebookNode, seconds: dict[str, float]) -> list[str]:
    """The HTML of each slide. What appears at the Space key is a `fragment`; what only the speaker sees, `notes`."""
    made: list[Slide] = []
    parts, asked = pieces(notebook), False
    for place, (kind, source, cell) in enumerate(parts):
        asked = is_asked(asked, kind, source)
        if kind == "code":
            made += _code(source, cell, seconds, asked)
        elif kind == "predict":
            made.append(Slide("predict", _markdown(source), ROOM, _behind(parts[place + 1 :])))
        elif kind == "answer" and made[-1].used + sum(pixels for _, pixels, _ in blocks(source)) <= ROOM:
            for block, pixels, _ in blocks(source):
                made[-1].add(_markdown(block), pixels, "said")
        else:
            made += _text(kind, source)
    return [str(slide) for slide in made]


def is_asked(before: bool, kind: str, source: str) -> bool:
    """Whether a prediction is still open at this piece of a lesson, if it was `before`: no answer came yet."""
    return kind == "predict" or (before and (kind == "code" or (kind == "text" and not source.startswith("#"))))


def without_answers(source: str) -> tuple[str, str]:
    """The code without its claims and figures, whose words tell the answer; and these alone."""
    lines, held = source.splitlines(), []
    for node in ast.walk(ast.parse("\n".join("" if line.startswith(("%", "!")) else line for line in lines))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            if called.startswith("claim") or called == "plots.show":
                held.append((node.lineno - 1, node.end_lineno, node.col_offset))
    told = []
    for start, end, indent in sorted(held):
        told += [line[indent:] for line in lines[start:end]]
        lines[start:end] = [" " * indent + "# (after Space)", *[None] * (end - start - 1)]
    kept = [line for line in lines if line is not None]
    once = [
        line
        for line, before in zip(kept, [None, *kept], strict=False)
        if "# (after Space)" not in line or line != before
    ]
    return "\n".join(once), "\n".join(told)


def _code(source: str, cell: nbformat.NotebookNode, seconds: dict[str, float], asked: bool) -> list[Slide]:
    notes = f"About {seconds[cell.id]:.1f} s in the rehearsal." if cell.id in seconds else ""
    source, told = without_answers(source) if asked else (source, "")
    lines = source.splitlines() + told.splitlines()
    size, each = ("long", 24.0) if max(map(len, lines), default=0) > WIDE else ("short", 29.0)
    code, waiting = (
        f'<div class="{size}">{Highlight2HTML(pygments_lexer="ipython3")(part)}</div>' * bool(part)
        for part in (source, told)
    )
    made = [Slide("code", code, 40 + each * len(lines), notes)]  # all outputs on a slide appear together
    for part, pixels in shown(cell):
        if made[-1].used + pixels > ROOM:
            made[-1].add(waiting, 0, "output" * bool(waiting))
            made.append(Slide("outputs"))
            waiting = ""
        made[-1].used += pixels
        if made[-1].kind == "outputs":
            made[-1].html += f'<div class="output">{part}</div>'
        else:
            waiting += part
    made[-1].add(waiting, 0, "output" * bool(waiting))
    return made


def _text(kind: str, source: str) -> list[Slide]:
    """As many slides as the text needs; an answer that is folded in the lesson appears at the Space key."""
    made, heading = [Slide(kind)], ""
    for block, pixels, folded in blocks(source):
        if made[-1].used and made[-1].used + pixels > ROOM:
            made.append(Slide(kind, heading, 60.0))
        if block.startswith("#"):
            heading = '<p class="again">' + html.escape(block.lstrip("# ").split("\n")[0]) + "</p>"
        made[-1].add(_markdown(block), pixels, "said" if folded else "")
    return made


def _behind(following: list[tuple[str, str, nbformat.NotebookNode]]) -> str:
    """The speaker's notes for a question: the guess on the page, what the code prints, and what the page says."""
    notes, seen_code = [], False
    for kind, source, cell in following:
        if kind == "predict" or (seen_code and kind == "text"):
            break
        if kind == "code":
            seen_code = True
            for line in _guesses(source):
                notes.append(f"The page guesses {html.escape(line)}.")
            said = [line for o in cell.outputs for line in o.get("text", "").splitlines() if "guess" in line]
            notes += [f"The code prints: {html.escape(line.strip())}" for line in said]
        elif kind == "answer":
            first = re.split(r"(?<=[.?!])\s", " ".join(source.split("\n\n")[0].split()))
            notes.append("The page says: " + html.escape(" ".join(first[:2])))
            break
    return "".join(f"<p>{note}</p>" for note in notes)


def _guesses(source: str) -> list[str]:
    """The code of what a cell assigns to my_guess, which readers are asked to overwrite."""
    found = []
    for node in ast.parse(source).body:
        for target in node.targets if isinstance(node, ast.Assign) else []:
            names, values = ((side.elts if isinstance(side, ast.Tuple) else [side]) for side in (target, node.value))
            found += [
                ast.unparse(value)
                for name, value in zip(names, values, strict=False)
                if isinstance(name, ast.Name) and name.id == "my_guess"
            ]
    return found


def write(path: Path, folder: Path, seconds: dict[str, float]) -> None:
    """Write index.html and all that it loads into a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    notebook = nbformat.read(path, as_version=4)
    title = html.escape(notebook.cells[0].source.splitlines()[0].lstrip("# "))
    page = (ROOT / "tools" / "site" / "slides.html").read_text(encoding="utf-8")
    made = "\n".join(sections(notebook, seconds)).replace("../../images/", "images/")
    folder.mkdir(parents=True)
    (folder / "index.html").write_text(page.replace("{title}", title).replace("{slides}", made), encoding="utf-8")
    reveal = extras.file_of(*extras.REVEAL)
    for name in ("dist/reveal.js", "dist/reveal.css", "dist/reset.css", "plugin/notes/notes.js", "LICENSE"):
        (folder / "reveal" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(reveal / name, folder / "reveal" / name)
    shutil.copy(extras.file_of(*extras.MATHJAX), folder)
    shutil.copytree(ROOT / "images", folder / "images")
