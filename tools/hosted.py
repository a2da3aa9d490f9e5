"""Open the course on hosted platforms: links for a row of badges, and notebooks whose first code cell sets them up.

The repository's address is stored once, in pyproject.toml: [tool.course] repository = "owner/name". If it is empty,
there are no links. This command fills it in, and writes every notebook, with a set-up cell for Colab and Kaggle,
to build/hosted; .github/workflows/hosted.yml pushes these notebooks to the branch `hosted`.
Usage: python tools/hosted.py [--repo owner/name]
"""

import argparse
import copy
import json
import re
import tomllib
from pathlib import Path
from urllib.parse import quote

import nbformat
from notebooks import RECORDED, ROOT, find
from tqdm import tqdm

PROJECT, HOSTED = ROOT / "pyproject.toml", ROOT / "build" / "hosted"
# Binder kills a session that needs more memory than this.
BINDER_BYTES = 2e9
_SET_UP = """\
# On Colab or Kaggle, run this first: it fetches the course and installs what is missing, in about a minute.
import pathlib, subprocess

course = pathlib.Path.home() / "faster-pytorch-training"
fetch = ["git", "clone", "--quiet", "--depth", "1", "{address}", str(course)]
if not (course / "README.md").exists() and subprocess.run(fetch).returncode:
    raise ConnectionError("The course could not be fetched: switch on the notebook's internet access.")
%run {{course}}/tools/hosted_setup.py {folder}"""


def repository() -> str:
    """The repository's address as owner/name, or an empty string if it has none."""
    return tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["course"]["repository"]


def peak_bytes(path: Path) -> float | None:
    """The peak memory in bytes of a notebook and its child processes when it was recorded; None if not noted."""
    metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"] if path.exists() else {}
    return metadata.get(RECORDED, {}).get("peak_bytes")


def links(path: Path, repo: str) -> dict[str, str]:
    """URLs that open a notebook or the whole course, by platform; Binder only if its memory is known to suffice."""
    if not repo:
        return {}
    name = path.relative_to(ROOT).as_posix()
    hosted = f"https://github.com/{repo}/blob/hosted/{name}"
    found = {
        "Colab": f"https://colab.research.google.com/github/{repo}/blob/hosted/{name}",
        "Kaggle": f"https://kaggle.com/kernels/welcome?src={quote(hosted, safe='')}",
    }
    if (peak_bytes(path) or BINDER_BYTES) < BINDER_BYTES:
        found["Binder"] = f"https://mybinder.org/v2/gh/{repo}/HEAD?urlpath={quote(f'lab/tree/{name}', safe='')}"
    return found | whole_course(repo)


def whole_course(repo: str) -> dict[str, str]:
    """The URLs that open the whole repository, by platform."""
    if not repo:
        return {}
    address = quote(f"https://github.com/{repo}", safe="")
    return {
        "Codespaces": f"https://codespaces.new/{repo}",
        "Lightning Studio": f"https://lightning.ai/new?repo_url={address}",
    }


def page(path: str, view: str = "blob") -> str:
    """The URL of a file (blob), a folder (tree) or an editor (edit) in the repository; empty if it has no address."""
    repo = repository()
    return f"https://github.com/{repo}/{view}/main/{path}" if repo else ""


def badges(path: str) -> list[tuple[str, str]]:
    """For the site: (label, URL) of each platform that opens a notebook, and of the editor for a notebook or text."""
    repo = repository()
    if not repo:
        return []
    places = links(ROOT / path, repo) if path.endswith(".ipynb") else {}
    return [(f"Open in {place}", link) for place, link in places.items()] + [("Edit this page", page(path, "edit"))]


def with_set_up(notebook: nbformat.NotebookNode, folder: str, repo: str) -> nbformat.NotebookNode:
    """The notebook with a set-up cell before its first code cell; the other cells stay as they are."""
    made = copy.deepcopy(notebook)
    source = _SET_UP.format(address=f"https://github.com/{repo}", folder=folder)
    first = next(i for i, cell in enumerate(made.cells) if cell.cell_type == "code")
    made.cells.insert(first, nbformat.v4.new_code_cell(source, id="hosted-set-up"))
    return made


def write_hosted(repo: str) -> list[Path]:
    """Write every notebook with its set-up cell to build/hosted; return their paths."""
    made = []
    for path in tqdm(find(), unit="notebook"):
        notebook = with_set_up(nbformat.read(path, as_version=4), path.parent.relative_to(ROOT).as_posix(), repo)
        target = HOSTED / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, target)
        made.append(target)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill in the repository's address and write the hosted notebooks.")
    parser.add_argument("--repo", default=repository(), help="owner/name (default: what pyproject.toml holds)")
    repo = parser.parse_args().repo
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise SystemExit(f"{repo!r} is not a repository: give owner/name, as in make hosted REPO=owner/name.")
    text = PROJECT.read_text(encoding="utf-8")
    PROJECT.write_text(re.sub(r'(?m)^repository = ".*"', f'repository = "{repo}"', text), encoding="utf-8")
    print(f"{len(write_hosted(repo))} notebooks written to build/hosted.")


if __name__ == "__main__":
    main()
