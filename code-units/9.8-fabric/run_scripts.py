"""What the two notebooks of this unit share: running one of the five scripts, and showing how two of them differ.

torchrun starts this file in each of several processes: `run_scripts.py 04_fabric-vit-mixed-fsdp.py --devices=2`.
"""

import contextlib
import difflib
import html
import io
import json
import runpy
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from speedlab import compat, count, launch, machine

FOLDER = Path(__file__).resolve().parent


def run(name: str, *options: object, processes: int = 1, timeout: float = 240.0) -> dict:
    """Run a script in this folder; return its result, and the bytes of state that each process holds at the end.

    With one process, the script runs in this one, which saves starting Python; several are launched by torchrun, and
    their losses are averaged. On a CPU without bf16 hardware, bf16 products are computed in fp32 and rounded.
    """
    if processes == 1:
        parts = [_run(name, options)]
    else:
        launched = launch.run(__file__, processes, name, f"--devices={processes}", *options, timeout=timeout)
        parts = [json.loads(output.splitlines()[-1]) for output in launched.outputs]
    losses = [statistics.fmean(step) for step in zip(*(part["losses"] for part in parts), strict=True)]
    return {**parts[0], "losses": losses, "state_bytes": [part["state_bytes"] for part in parts]}


def _run(name: str, options: tuple) -> dict:
    used = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: used.append(optimizer))
    # intercepting each operation costs time, so only for scripts with 16-bit operations
    products = compat.half_products(machine.device()) if "mixed" in name else contextlib.nullcontext()
    try:
        with products, contextlib.redirect_stdout(io.StringIO()):
            result = runpy.run_path(str(FOLDER / name))["main"]([str(option) for option in options])
    finally:
        hook.remove()
    parameters = nn.ParameterList(p for group in used[-1].param_groups for p in group["params"])
    return {**result, "state_bytes": count.state_bytes(parameters, used[-1]).total}


@dataclass(frozen=True)
class Difference:
    """The lines removed (-) and added (+) from one script to another, with a line of context; shown as a table."""

    before: str
    after: str
    lines: tuple[str, ...]

    @property
    def gone(self) -> list[str]:
        return [line[2:].strip() for line in self.lines if line.startswith("-")]

    @property
    def come(self) -> list[str]:
        return [line[2:].strip() for line in self.lines if line.startswith("+")]

    def __repr__(self) -> str:
        return "\n".join([f"from {self.before} to {self.after}", *self.lines])

    def _repr_html_(self) -> str:
        colours = {"-": "background:#fbe3d6;color:#000", "+": "background:#d9ead9;color:#000"}
        rows = "".join(
            f'<tr style="{colours.get(line[0], "")}"><td>{line[0]}</td>'
            f'<td style="text-align:left"><code style="white-space:pre;background:none;color:inherit">'
            f"{html.escape(line[2:])}</code></td></tr>"
            for line in self.lines
        )
        caption = f"<caption>{self.before} → {self.after}</caption>"
        head = "<thead><tr><th>±</th><th style='text-align:left'>line</th></tr></thead>"
        return f"<table>{caption}{head}<tbody>{rows}</tbody></table>"


def difference(before: str, after: str) -> Difference:
    """Compare two scripts in this folder line by line, leaving out their titles."""
    texts = [(FOLDER / name).read_text(encoding="utf-8").splitlines()[1:] for name in (before, after)]
    lines = []
    for line in difflib.unified_diff(*texts, n=1, lineterm=""):
        if line.startswith("@@"):
            lines += ["…"] if lines else []
        elif line[1:].strip() and not line.startswith(("---", "+++")):
            lines.append(f"{line[0]} {line[1:]}")
    return Difference(before, after, tuple(lines))


if __name__ == "__main__":
    print(json.dumps(_run(sys.argv[1], tuple(sys.argv[2:]))))
