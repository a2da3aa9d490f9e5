"""Compile one training step in a process of its own, and print what that cost as one line of JSON.

The step is a GELU written out by hand, forward and backward. Notebook 1 and benchmarks/compile.py call `run`, which
starts this file as a process: python cold_start.py SECONDS. Run twice with the same cache folder, the second process
finds the kernels of the first one.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from speedlab import machine, measure


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The activation of GPT-2, as its authors wrote it."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def elements() -> int:
    """Numbers in the input: enough that a GPU's step is not all launches."""
    return 2**26 if machine.device().type == "cuda" else 2**21


def run(cache: str | Path, seconds: float = 2.0, timeout: float = 110.0) -> dict[str, float]:
    """Start a process with this cache folder and return its `first_s` and the medians `eager_s` and `compiled_s`.

    `first_s` is what the first compiled step took beyond a usual one; `seconds` is the budget for timing usual ones.
    RuntimeError in a sentence where the process fails or takes longer than `timeout`.
    """
    places = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(Path(cache, "triton"))}
    environment = {**os.environ, **places, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TQDM_DISABLE": "1"}
    asked = [sys.executable, str(Path(__file__).resolve()), str(seconds)]
    try:
        answer = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"Compiling one small step had not ended after {timeout:g} s, and was stopped.") from error
    if answer.returncode:
        errors = re.findall(r"(?m)^[\w.]+(?:Error|Exception)\b.*$", answer.stderr) or [answer.stderr.strip()[-300:]]
        raise RuntimeError(f"The process that was to compile failed: {errors[-1]}")
    return json.loads(answer.stdout.splitlines()[-1])


def measure_here(seconds: float) -> dict[str, float]:
    """Compile and time the step in this process."""
    device = machine.device()
    compiled = torch.compile(gelu)
    x = torch.randn(elements(), device=device, requires_grad=True)
    upstream = torch.randn(elements(), device=device)
    clock = machine.synchronised_clock(device)
    begin = clock()
    compiled(x).backward(upstream)
    first = clock() - begin
    steps = {"eager": lambda: gelu(x).backward(upstream), "compiled": lambda: compiled(x).backward(upstream)}
    timings = measure.compare(steps, seconds=seconds).timings
    found = {f"{name}_s": timing.median for name, timing in timings.items()}
    return {"first_s": first - found["compiled_s"], **found}


if __name__ == "__main__":
    print(json.dumps(measure_here(float(sys.argv[1]))))
