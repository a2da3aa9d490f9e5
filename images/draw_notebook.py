"""Draw notebook.png: a notebook of the course as a reader sees it, for the README.

It needs Chromium or Chrome on the PATH. Usage: python images/draw_notebook.py
"""

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from PIL import Image

HERE = Path(__file__).parent
NOTEBOOK = HERE.parent / "code-units" / "9.1-mixed-precision" / "1-number-formats.ipynb"
# the cells worth showing: from the heading of the widget on, by the words that they start with
FIRST, CELLS = "## Any number, six formats", 3
WIDTH, HEIGHT = 1000, 760


def main() -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if browser is None:
        sys.exit("Neither Chromium nor Chrome is on the PATH: install one of them to draw this picture.")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    start = next(i for i, cell in enumerate(notebook.cells) if cell.source.startswith(FIRST))
    notebook.cells = notebook.cells[start : start + CELLS]
    page, _ = HTMLExporter().from_notebook_node(notebook)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "page.html").write_text(page, encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"]
        places = [f"--user-data-dir={folder}/profile", f"--screenshot={folder}/shot.png"]
        size = f"--window-size={WIDTH},{HEIGHT}"
        command = [browser, *options, *places, size, Path(folder, "page.html").as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        picture = Image.open(io.BytesIO(Path(folder, "shot.png").read_bytes())).convert("P", palette=Image.ADAPTIVE)
    picture.save(HERE / "notebook.png", optimize=True)


if __name__ == "__main__":
    main()
