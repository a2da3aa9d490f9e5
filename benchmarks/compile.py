"""What torch.compile costs and saves: a GELU written out by hand, and a ViT's training step in each mode.

The GELU is that of unit 9.4. It starts in two processes: one with an empty cache, then one with the cache that the
first one left. The modes are measured in the same way.
"""

import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import day
from benchmarks.day import Item, Session
from benchmarks.precision import settings_in, step_of
from benchmarks.workloads.vit import Vit
from speedlab import compat, machine, measure
from speedlab.display import seconds_text

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "code-units" / "9.4-compile" / "cold_start.py"
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")
_TIMEOUT = 240


def bill(cold: dict, warm: dict) -> dict:
    """Seconds of a cold and a warm start, of an eager and a compiled step, and the steps that pay for each start."""
    saved = warm["eager_s"] - warm["compiled_s"]
    starts = f"cold {seconds_text(cold['first_s'])}, warm {seconds_text(warm['first_s'])}"
    steps = f"{seconds_text(warm['eager_s'])} eager, {seconds_text(warm['compiled_s'])} compiled"
    return {
        "found": f"start {starts}; step {steps}",
        "cold_s": cold["first_s"],
        "warm_s": warm["first_s"],
        "eager_s": warm["eager_s"],
        "compiled_s": warm["compiled_s"],
        "break_even_steps": cold["first_s"] / saved if saved > 0 else None,
        "break_even_steps_warm": warm["first_s"] / saved if saved > 0 else None,
        "compiler": compat.compiler(),
    }


def gelu(session: Session, rows: list[dict]) -> list[dict]:
    """The bill for the lesson's step."""
    task = "GELU written out by hand, forward and backward"
    if compat.compiler() is None:
        return [{"task": task, "not_run": f"torch.compile finds {compat.NO_COMPILER}"}]
    lesson = runpy.run_path(str(SCRIPT))
    with tempfile.TemporaryDirectory(prefix="speedlab-", ignore_cleanup_errors=True) as cache:
        cold, warm = (lesson["run"](cache, session.seconds / 2, timeout=_TIMEOUT) for _ in range(2))
    return [{"task": task, "elements": lesson["elements"](), **bill(cold, warm)}]


def mode(name: str, session: Session, rows: list[dict]) -> list[dict]:
    """The bill for a ViT-B/16's training step, in bf16 autocast where that is fast, compiled whole in this mode."""
    task = f"a training step of ViT-B/16, mode {name}"
    if compat.compiler() is None:
        return [{"task": task, "not_run": f"torch.compile finds {compat.NO_COMPILER}"}]
    if name != "default" and not session.on_gpu:
        return [{"task": task, "not_run": "this mode is for GPUs: on a CPU it compiles as the default does"}]
    with tempfile.TemporaryDirectory(prefix="speedlab-", ignore_cleanup_errors=True) as cache:
        places = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": str(Path(cache, "triton"))}
        asked = [sys.executable, "-m", "benchmarks.compile", "--child", name, session.scale, str(session.seconds / 2)]
        answers = []
        for _ in range(2):
            try:
                ended = subprocess.run(asked, cwd=ROOT, env={**os.environ, **places, "TQDM_DISABLE": "1"},
                                       capture_output=True, text=True, timeout=_TIMEOUT)  # fmt: skip
            except subprocess.TimeoutExpired:
                return [{"task": task, "not_run": f"compiling had not ended after {_TIMEOUT} s, and was stopped"}]
            if ended.returncode:
                raise RuntimeError((ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1])
            answers.append(json.loads(ended.stdout.splitlines()[-1]))
    return [{"task": task, "mode": name, "batch": answers[0]["batch"], **bill(*answers)}]


def measured_here(name: str, scale: str, seconds: float) -> dict:
    """In a process of its own: the extra seconds of the first compiled step, and the medians of later steps."""
    device = machine.device()
    work, batch = Vit(device, scale), 4 if scale == "tiny" else 64 if device.type == "cuda" else 8
    half = "bf16" if machine.is_fast("bf16") else "fp32"
    settings = replace(settings_in(work, half, batch), fused=True)
    data, clock = work.fixed(settings, batch), machine.synchronised_clock(device)
    runs = {kind: work.training(settings) for kind in ("eager", "compiled")}
    runs["compiled"].forward = torch.compile(runs["compiled"].model, mode=name)
    steps = {kind: step_of(run, data) for kind, run in runs.items()}
    begin = clock()
    steps["compiled"]()
    first = clock() - begin
    timings = measure.compare(steps, seconds=seconds).timings
    usual = {f"{kind}_s": timing.median for kind, timing in timings.items()}
    return {"first_s": first - usual["compiled_s"], "batch": batch, **usual}


def items(session: Session) -> Iterator[Item]:
    """The lesson's GELU."""
    yield Item("GELU", 10 if session.tiny else 120, functools.partial(gelu, session))


def modes(session: Session) -> Iterator[Item]:
    """An item per mode."""
    for name in MODES:
        yield Item(name, 10 if session.tiny else 180, functools.partial(mode, name, session))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measured_here(sys.argv[2], sys.argv[3], float(sys.argv[4]))))
    else:
        sys.exit(day.main({"compile": items, "compile-modes": modes}, __doc__))
