"""Prepare a hosted notebook (Colab, Kaggle) for the course, without replacing the PyTorch that is installed there.

The first code cell of a hosted notebook runs this in the kernel's process, with the unit's folder as its argument:
%run COURSE/tools/hosted_setup.py code-units/9.1-mixed-precision
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What a hosted platform brings and its kernel may have loaded: a different version would need a restart.
KEPT = ("torch", "torchvision", "numpy", "ipykernel", "ipywidgets")
# Packages to open, test and maintain the course, which no lesson imports.
LEFT_OUT = ("jupyterlab", "nbformat", "nbclient", "nbval", "pytest", "pytest-xdist", "ruff", "uv", "pip")


def installed() -> dict[str, str]:
    """The version of every installed package, by its name in lower case."""
    return {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}


def plan(requirements: str, present: dict[str, str]) -> tuple[list[str], list[str]]:
    """The requirements to install, and the constraints that pin what must stay as it is."""
    lines = [line.split("  #")[0].strip() for line in requirements.splitlines()]
    named = {re.match(r"[\w.-]+", line)[0].lower(): line for line in lines if line and not line.startswith("#")}
    wanted = [line for name, line in named.items() if name not in LEFT_OUT and not (name in KEPT and name in present)]
    return wanted, [f"{name}=={present[name]}" for name in KEPT if name in present]


def too_old(requirements: str, present: dict[str, str]) -> list[str]:
    """Packages that are older here than any tested version: each one's name, version and oldest tested version."""
    found = re.findall(r"(?m)^([\w.-]+)(?:\[\w+\])?>=([\d.]+)", requirements)
    number = lambda version: [int(part) for part in re.findall(r"\d+", version.split("+")[0])]  # noqa: E731
    return [
        f"{name} {present[name]} (tested from {least})"
        for name, least in found
        if name in KEPT and name in present and number(present[name]) < number(least)
    ]


def main(unit: str) -> None:
    """Install what is missing, make the helper package importable, and change to the unit's folder."""
    requirements, present = (ROOT / "requirements.txt").read_text(encoding="utf-8"), installed()
    wanted, held = plan(requirements, present)
    if old := too_old(requirements, present):
        print(f"Older than the versions that the course is tested with: {', '.join(old)}. Some cells may fail.")
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("\n".join(held), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "-c", str(constraints), *wanted]
        run = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if run.returncode:
        print(run.stdout + run.stderr)
        raise SystemExit(
            "Packages are missing: see above. On Kaggle, switch on the internet in the notebook's settings."
        )
    sys.path.insert(0, str(ROOT))  # speedlab itself is not installed: this process would not see it
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.chdir(ROOT / unit)
    print(f"Ready: the notebook runs in {unit}, with torch {installed()['torch']}.")


if __name__ == "__main__":
    main(sys.argv[1])
