"""What the two notebooks of this unit share: run a script and time its phases, and show how two scripts differ.

As a script it does the same in each of several processes:
`python run_scripts.py 04_fabric-vit-mixed-fsdp.py --epochs=1`.
"""

import contextlib
import difflib
import html
import io
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torchvision.models import VisionTransformer

from speedlab import compat, launch, machine

FOLDER = Path(__file__).resolve().parent
PHASES = ("data", "forward", "backward", "optimizer")


def run(name: str, *options: object, processes: int = 1, timeout: float = 240.0) -> dict:
    """Run a script of this folder and return its result, with the seconds that training spent in each phase.

    One process runs inside this one, which saves the start of Python; several are launched by torchrun, and the first
    one's result is returned. Where a CPU has no bf16 hardware, its products are computed in fp32 and rounded.
    """
    if processes > 1:
        launched = launch.run(__file__, processes, name, f"--devices={processes}", *options, timeout=timeout)
        return json.loads(launched.outputs[0].splitlines()[-1])
    main = runpy.run_path(str(FOLDER / name))["main"]
    affordable = compat.half_products(machine.device())
    with affordable, contextlib.redirect_stdout(io.StringIO()), _timed_phases() as spent:
        result = main([str(option) for option in options])
    rest = sum(result["seconds"]) - sum(spent.values())
    return {**result, "phases": {**spent, "the rest": max(0.0, rest)}}


@contextlib.contextmanager
def _timed_phases() -> Iterator[dict[str, float]]:
    """Sum up the seconds of each phase while gradients are on, by hooks around what PyTorch calls."""
    clock = machine.synchronised_clock(machine.device())
    spent, begun = dict.fromkeys(PHASES, 0.0), {}

    def begin(phase: str) -> None:
        begun[phase] = clock()

    def end(phase: str) -> None:
        if torch.is_grad_enabled() and phase in begun:
            spent[phase] += clock() - begun.pop(phase)

    def around(phase: str, function: Callable) -> Callable:
        def timed(*args, **kwargs):
            begin(phase)
            try:
                return function(*args, **kwargs)
            finally:
                end(phase)

        return timed

    is_model = lambda module: isinstance(module, VisionTransformer)  # noqa: E731
    handles = [
        modules.register_module_forward_pre_hook(lambda module, _: begin("forward") if is_model(module) else None),
        modules.register_module_forward_hook(lambda module, *_: end("forward") if is_model(module) else None),
        optimizers.register_optimizer_step_pre_hook(lambda *_: begin("optimizer")),
        optimizers.register_optimizer_step_post_hook(lambda *_: end("optimizer")),
    ]
    try:
        with (
            patch.object(torch.Tensor, "backward", around("backward", torch.Tensor.backward)),
            patch.object(_BaseDataLoaderIter, "__next__", around("data", _BaseDataLoaderIter.__next__)),
        ):
            yield spent
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Difference:
    """The lines that go (-) and that come (+) between two scripts, each with a line around it; shown as a table."""

    before: str
    after: str
    lines: tuple[str, ...]

    @property
    def gone(self) -> list[str]:
        return [line[2:] for line in self.lines if line.startswith("-")]

    @property
    def come(self) -> list[str]:
        return [line[2:] for line in self.lines if line.startswith("+")]

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
    """Compare two scripts of this folder, line by line."""
    texts = [(FOLDER / name).read_text(encoding="utf-8").splitlines() for name in (before, after)]
    lines = []
    for line in difflib.unified_diff(*texts, n=1, lineterm=""):
        if line.startswith("@@"):
            lines += ["…"] if lines else []
        elif line[1:].strip() and not line.startswith(("---", "+++")):
            lines.append(f"{line[0]} {line[1:]}")
    return Difference(before, after, tuple(lines))


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], *sys.argv[2:])))
