"""Build the whole course as web pages into build/site, offline: what is stored is shown, nothing is executed.

Usage: python tools/website.py [--check]   (--check then looks at every page in Chromium)
"""

import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path, PurePosixPath

import extras
import nbformat
import teaching
from hosted import badges, page
from notebooks import ROOT, find, number
from readme import summary

from exercises import BLOCK  # isort: skip

SITE = ROOT / "build" / "site"
HERE = ROOT / "tools" / "site"
# A link or a picture, in Markdown or HTML, outside of code.
LINK = re.compile(
    r"(?P<code>(?ms:^(?P<fence>```+|~~~+).*?^(?P=fence))|`[^`\n]+`)"
    r"|(?P<picture>!?)\[(?P<text>(?:`[^`]*`|[^][`]|\[[^][]*\])*)\]\((?P<target>[^()\s]+)\)"
    r"|(?P<before><(?:img|source|a)\s[^>]*?(?:src|srcset|href)=\")(?P<address>[^\"]+)"
)


def linked(text: str, path: str, published: dict[str, str]) -> tuple[str, set[str]]:
    """The text of a file with its links pointing to published pages, and the other files that it links to.

    A link to a folder leads to the repository, or becomes plain text if the repository has no address.
    """
    files: set[str] = set()

    def turned(found: re.Match) -> str:
        target = found["target"] or found["address"]
        if found["code"] or re.match(r"[a-z]+:|#", target):
            return found[0]
        name, _, anchor = target.partition("#")
        inside = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        inside = published.get(inside, inside)
        if (ROOT / inside).is_dir():
            address = page(inside, "tree")
            return found[0].replace(target, address) if address else found["text"]
        if inside not in published.values():
            files.add(inside)
        here = posixpath.dirname(published.get(path, path))
        return found[0].replace(target, posixpath.relpath(inside, here or ".") + ("#" + anchor if anchor else ""))

    return LINK.sub(turned, text), files


def exercise(stub: nbformat.NotebookNode, solution: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The exercise with each solution behind a click, under the check that belongs to it."""
    stubs, cells, held = {cell.id: cell for cell in stub.cells}, [], []
    fold = nbformat.v4.new_markdown_cell

    def unfold() -> None:
        if held:
            cells.extend([fold("<details><summary>Solution</summary>"), *held, fold("</details>")])
            held.clear()

    for cell in solution.cells:
        if cell.id not in stubs:
            held.append(cell)
            continue
        if cell.cell_type == "markdown":
            unfold()
        elif BLOCK.search(cell.source):
            unfold()
            cell.source = re.sub(r"(?m)^[ \t]*# (BEGIN|END) SOLUTION.*\n?", "", cell.source).rstrip()
            held.append(nbformat.v4.new_code_cell(cell.source, outputs=cell.outputs))
        cells.append(stubs[cell.id])
    unfold()
    return nbformat.v4.new_notebook(cells=cells, metadata=stub.metadata)


def shown(outputs: list) -> list:
    """A cell's outputs as a reader sees them: without libraries' warnings, and without what only the tests read."""
    kept = [output for output in outputs if output.get("name") != "stderr"]
    for output in kept:
        for kind in [kind for kind in output.get("data", {}) if kind.startswith("application/vnd.")]:
            del output.data[kind]
    return kept


def with_badges(text: str, path: str) -> str:
    """A page's text with a row of links under its title, if the course has a public address."""
    row = " ".join(f'<a class="badge" href="{address}">{name}</a>' for name, address in badges(path))
    title, rest = text.split("\n", 1)
    return f'{title}\n\n<p class="badges">{row}</p>\n{rest}' if row else text


def lessons() -> dict[str, dict]:
    """Title, minutes and path of each lesson and its recorded seconds, by its number, such as 9.1.1 or capstone.1."""
    found = {}
    for path in find([str(ROOT / "code-units")]):
        found[number(path)] = summary(path) | {"seconds": recorded_seconds(path)}
    return found


def recorded_seconds(path: Path) -> int:
    """The seconds that the notebook ran when its outputs were stored; 0 if they were not recorded."""
    return nbformat.read(path, as_version=4).metadata.get("recorded", {}).get("seconds", 0)


def stage(source: Path) -> None:
    """Write what Sphinx builds: notebooks, README, results page, CONTRIBUTING, the site's own pages, the contents."""
    units = find([str(ROOT / "code-units")])
    stubs = find([str(ROOT / "exercises")])
    pages = {path.name: path for path in sorted((HERE / "pages").glob("*.md"))}
    texts = ["README.md", "CONTRIBUTING.md", "results/README.md"]
    names = [p.relative_to(ROOT).as_posix() for p in (*units, *stubs)]
    published = {name: name for name in [*names, *texts, *pages]} | {"README.md": "index.md"}
    published |= {f"solutions/{path.name}": f"exercises/{path.name}" for path in stubs}
    published |= {f"tools/site/pages/{name}": name for name in pages}
    files, known = set(), lessons()

    def write(name: str, text: str) -> None:
        target = source / published.get(name, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def turned(text: str, name: str) -> str:
        text, found = linked(text, name, published)
        files.update(found)
        return text

    for path, name in zip((*units, *stubs), names, strict=True):
        notebook, edited = nbformat.read(path, as_version=4), name
        if path in stubs:
            edited = f"solutions/{path.name}"
            notebook = exercise(notebook, nbformat.read(ROOT / edited, as_version=4))
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = turned(cell.source, name)
            else:
                cell.outputs = shown(cell.outputs)
        notebook.cells[0].source = with_badges(notebook.cells[0].source, edited)
        write(name, nbformat.writes(notebook))
    for name in texts:
        text = turned((ROOT / name).read_text(encoding="utf-8"), name)
        write(name, with_badges(text, name) + (contents(names, pages, known) if name == "README.md" else ""))
    for name, path in pages.items():
        text = teaching.fill(path.read_text(encoding="utf-8"), known)
        write(name, with_badges(turned(text, name), path.relative_to(ROOT).as_posix()))
    for name in filter(lambda name: (ROOT / name).is_file(), files):  # Sphinx reports links to nothing
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)


def contents(notebooks: list[str], pages: dict[str, Path], known: dict[str, dict]) -> str:
    """The sidebar: a tree for each folder of notebooks, lessons with their numbers, and two for the other pages."""
    groups: dict[str, list[str]] = {}
    numbered = {row["path"]: f"{number} {row['title']} <{row['path']}>" for number, row in known.items()}
    for name in notebooks:
        words = PurePosixPath(name).parent.name.replace("-", " ")
        groups.setdefault(words[0].upper() + words[1:], []).append(numbered.get(name, name))
    groups = {"Use it": list(pages)} | groups | {"The project": ["results/README.md", "CONTRIBUTING.md"]}
    trees = (
        f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(n) + "\n```" for title, n in groups.items()
    )
    return "\n\n" + "\n\n".join(trees) + "\n"


def build(target: Path = SITE) -> None:
    """Build the site into a folder. Sphinx's own cache holds this checkout's path, so it stays outside."""
    with tempfile.TemporaryDirectory() as work:
        source, made = Path(work, "source"), Path(work, "site")
        stage(source)
        sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-c", str(HERE)]
        if subprocess.call([*sphinx, "-d", str(Path(work, "trees")), str(source), str(made)]):
            sys.exit("The site was not built: see the warnings above.")
        (made / "_static" / "mathjax").mkdir()
        shutil.copy(extras.file_of(*extras.MATHJAX), made / "_static" / "mathjax")
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, target)


def main() -> None:
    extras.need()
    start = time.perf_counter()
    build()
    size = sum(path.stat().st_size for path in SITE.rglob("*") if path.is_file()) / 1e6
    pages = sum(1 for _ in SITE.rglob("*.html"))
    print(f"{pages} pages, {size:.0f} MB, in {time.perf_counter() - start:.0f} s: open build/site/index.html")
    if sys.argv[1:] == ["--check"]:
        browser = [sys.executable, "-m", "pytest", "-q", "--dist", "load"]
        sys.exit(subprocess.call([*browser, "tests/site/browser.py", "tests/site/demos.py"], cwd=ROOT))


if __name__ == "__main__":
    main()
