"""Compile and time one training step in a separate process, and print the results as one line of JSON.

The step is a GELU written out by hand, forward and backward. Notebooks 1 and 4 and benchmarks/compile.py call `run`,
which runs this file in a new process. If two processes use the same cache folder, the second finds the kernels that
the first compiled. The script can also save its cache artifacts to a file, or load such a file before it compiles.
"""

import argparse
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
    """The number of elements in the input, large enough that launches do not dominate the step on a GPU."""
    return 2**26 if machine.device().type == "cuda" else 2**21


def run(
    cache: str | Path, seconds: float = 2.0, timeout: float = 110.0, *, options: tuple = (), **environment: str
) -> dict[str, float]:
    """Run this file in a new process with this cache folder, and return what it measured (see `measure_here`).

    `seconds` is the budget for timing later steps; `options` are arguments of this file, such as ("--save", file);
    `environment` adds variables to the process's environment. Raises RuntimeError, with a one-line reason, if the
    process fails or takes longer than `timeout` seconds.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the new process may need what this one no longer uses
    places = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(Path(cache, "triton"))}
    given = {**os.environ, **places, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TQDM_DISABLE": "1", **environment}
    asked = [sys.executable, str(Path(__file__).resolve()), str(seconds), *map(str, options)]
    try:
        answer = subprocess.run(asked, env=given, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"Compiling one small step had not ended after {timeout:g} s, and was stopped.") from error
    if answer.returncode:
        errors = re.findall(r"(?m)^[\w.]+(?:Error|Exception)\b.*$", answer.stderr) or [answer.stderr.strip()[-300:]]
        raise RuntimeError(f"The compiling process failed: {errors[-1]}")
    return json.loads(answer.stdout.splitlines()[-1])


def measure_here(seconds: float) -> dict[str, float]:
    """Compile and time the step in this process.

    In seconds, `first_s` is how much longer the first compiled step took than a later one; `eager_s` and `compiled_s`
    are the medians of later steps. `cached` counts the graphs found in the cache, `made` the kernels compiled here.
    """
    from torch._dynamo.utils import counters

    device = machine.device()
    compiled = torch.compile(gelu)
    x = torch.randn(elements(), device=device, requires_grad=True)
    upstream = torch.randn(elements(), device=device)
    clock = machine.synchronised_clock(device)
    there = _kernels()
    begin = clock()
    compiled(x).backward(upstream)
    first = clock() - begin
    # Triton binaries from loaded artifacts are also written to the cache, but were not compiled here
    made = 0 if counters["inductor"]["triton_bundler_read_and_emit_kernel"] else len(_kernels() - there)
    steps = {"eager": lambda: gelu(x).backward(upstream), "compiled": lambda: compiled(x).backward(upstream)}
    timings = measure.compare(steps, seconds=seconds).timings
    found = {f"{name}_s": timing.median for name, timing in timings.items()}
    cached = counters["inductor"]["fxgraph_cache_hit"]
    return {"first_s": first - found["compiled_s"], **found, "cached": cached, "made": made}


def _kernels() -> set[Path]:
    """The paths of the compiled kernels in the cache: shared libraries of C++ kernels, and Triton binaries."""
    files = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*")
    return {
        f for f in files if f.suffix == ".cubin" or (".main." in f.name and f.suffix in (".so", ".dylib", ".pyd"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", type=float, help="time budget for later steps, in seconds")
    parser.add_argument("--save", type=Path, help="write torch.compiler's cache artifacts to this file at the end")
    parser.add_argument("--load", type=Path, help="load cache artifacts from this file before compiling")
    options = parser.parse_args()
    if options.load:
        torch.compiler.load_cache_artifacts(options.load.read_bytes())
    found = measure_here(options.seconds)
    if options.save:
        artifacts, _ = torch.compiler.save_cache_artifacts()
        options.save.write_bytes(artifacts)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
