"""Packages that only the site and the slides need: install requirements-site.txt into this Python, once."""

import hashlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "requirements-site.txt"


def need() -> None:
    """Install the packages unless they are there; exit with a sentence if they cannot be installed."""
    mark = Path(sys.prefix, "site-" + hashlib.sha256(LIST.read_bytes()).hexdigest()[:12])
    if mark.exists():
        return
    print("Installing what the site needs; earlier downloads are reused.", flush=True)
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    install += ["-r", str(LIST), "-c", str(ROOT / "requirements.lock")]
    if subprocess.call([*install, "--offline"], stderr=subprocess.DEVNULL) and subprocess.call(install):
        sys.exit("The site's packages could not be installed: go online, then run the same command again.")
    mark.touch()


def file_of(package: str, path: str) -> Path:
    """The path of a file inside an installed package."""
    return Path(find_spec(package).origin).parent / path


MATHJAX = ("sphinx-mathjax-offline", "static/mathjax/tex-svg.js")
REVEAL = ("sphinx_revealjs", "_static/revealjs")
