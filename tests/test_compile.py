"""Unit 9.4 on bad days: no compiler, a cache that cannot be written, a full disk, a child that hangs; counts."""

import errno
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from notebooks import ROOT
from torch import nn

from benchmarks import compile as bench
from benchmarks.day import Session
from speedlab import compat

UNIT = ROOT / "code-units" / "9.4-compile"
NO_COMPILER = {"CXX": os.sep + "nowhere", "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


@pytest.fixture
def unit(monkeypatch):
    """The unit's folder where its notebooks import from."""
    monkeypatch.syspath_prepend(UNIT)
    return UNIT


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run code as a reader's process would, in the unit's folder."""
    asked = [sys.executable, "-c", code]
    return subprocess.run(
        asked, cwd=UNIT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


# --- what the machine has ---------------------------------------------------------------------------------


def test_without_a_compiler_there_is_none_and_nothing_is_complained_about():
    """Also where the cache holds what an earlier session compiled."""
    answer = python("from speedlab import compat; print(compat.compiler())", **NO_COMPILER)
    assert (answer.stdout, answer.stderr, answer.returncode) == ("None\n", "", 0)


def test_a_compiler_that_is_there_and_does_not_work_is_none(tmp_path):
    """Apple's clang without OpenMP, a g++ without headers: its name is found, and nothing compiles."""
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'g++ (Broken) 13.0' && exit 0\nexit 1\n")
    broken.chmod(0o755)
    if sys.platform == "win32":
        pytest.skip("a shell script is no program on Windows")
    places = {"CXX": str(broken), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    answer = python("from speedlab import compat; print(compat.compiler())", **{**NO_COMPILER, **places})
    assert answer.stdout == "None\n", answer.stderr


def test_a_compiler_that_is_named_compiles():
    name = compat.compiler("cpu")
    if name is None:
        pytest.skip("no C++ compiler here")
    assert os.sep not in name
    assert torch.equal(torch.compile(lambda x: x * 2 + 1)(torch.ones(8)), torch.full((8,), 3.0))


SHOW_CACHE = """
import os
from pathlib import Path
from speedlab import compat
print(compat.compile_cache())
folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
(folder / "kernel").write_text("x")
print(folder)
"""


def test_a_cache_that_cannot_be_written_is_replaced_and_the_replacement_removed(tmp_path):
    """A folder below a file cannot be made by anybody, root included."""
    (tmp_path / "file").write_text("")
    answer = python(SHOW_CACHE, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert answer.returncode == 0, answer.stderr
    sentence, folder = answer.stdout.splitlines()
    assert sentence.startswith("a temporary one, because the usual one cannot be written (Not a directory)")
    assert "TORCHINDUCTOR_CACHE_DIR" in sentence and str(tmp_path) not in sentence
    assert not folder.startswith(str(tmp_path)) and not os.path.exists(folder)


def test_a_cache_that_can_be_written_stays(tmp_path):
    answer = python(SHOW_CACHE, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert answer.stdout.splitlines() == [
        "the usual one (TORCHINDUCTOR_CACHE_DIR names another)",
        str(tmp_path / "cache"),
    ], answer.stderr
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["kernel"]


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compat.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    sentence = compat.compile_cache.__wrapped__()
    assert os.strerror(errno.ENOSPC) in sentence and sentence.startswith("a temporary one")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] != str(tmp_path / "cache")


FOUND = """
import torch
from torch._dynamo.utils import counters
from speedlab import compat
compiled = compat.compiler("cpu")
print(compiled and counters["inductor"]["fxgraph_cache_hit"])
"""


def test_a_graph_compiled_for_other_instructions_is_not_taken_from_the_cache(tmp_path):
    """torch would take it: code for eight numbers at a time, compiled for sixteen, wrote beyond an array of eight."""
    places = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    held = [{"ATEN_CPU_CAPABILITY": "default"}, {"ATEN_CPU_CAPABILITY": "default"}, {}]
    answers = [python(FOUND, **places, **more) for more in held]
    found = [answer.stdout.strip() for answer in answers]
    if found[0] == "None":
        pytest.skip("no C++ compiler here")
    assert found == ["0", "1", "0"], [answer.stderr for answer in answers]


SLOW_GUARDS = """
import warnings, torch._dynamo.guards as guards
from types import SimpleNamespace
import speedlab
guards.sys = SimpleNamespace(version_info=(3, 13, 0))
guards.GuardBuilder._get_generic_dict_manager_example_value({})
warnings.warn("another one", RuntimeWarning)
"""


def test_python_3_13_0_is_not_warned_of_its_slower_guards_and_of_the_rest_it_is():
    answer = python(SLOW_GUARDS)
    assert answer.returncode == 0, answer.stderr
    assert "another one" in answer.stderr and "Guards may run slower" not in answer.stderr


# --- what Inductor plans ----------------------------------------------------------------------------------

COUNT = """
import torch
import inductor
from torch.nn import functional as F
x = torch.randn(4096)
wide = torch.randn(64, 256)
both = lambda x: (x.sin(), x.sin().cos())
cases = {"chain": (lambda x: torch.relu(2 * x + 1) * x, x), "two outputs": (both, x),
         "norm": (lambda w: F.layer_norm(w, (256,)), wide), "product": (lambda w: w @ w.T, wide)}
for name, (function, given) in cases.items():
    [plan] = inductor.plans(lambda: torch.compile(function)(given))
    print(name, plan.kernels, plan.library_calls, round(plan.bytes / given.numel()), bool(plan.kernel_text()))
"""
# of each: kernels, calls into libraries, bytes an element, whether there is a kernel to read
PLANNED = """\
chain 1 0 8 True
two outputs 1 0 12 True
norm 1 0 8 True
product 0 1 5 False
"""


@pytest.mark.parametrize("environment", [NO_COMPILER, {"ATEN_CPU_CAPABILITY": "avx2"}], ids=["no compiler", "avx2"])
def test_plans_are_the_closed_formulas_with_any_instruction_set_and_without_a_compiler(environment):
    answer = python(COUNT, **{"CUDA_VISIBLE_DEVICES": "", **environment})
    assert answer.stdout == PLANNED, answer.stderr


def test_plans_need_no_compiler_where_there_is_one_that_may_not_be_run(tmp_path):
    (tmp_path / "g++").write_text("")
    answer = python(COUNT, PATH=str(tmp_path), CXX="g++", CUDA_VISIBLE_DEVICES="")
    assert answer.stdout == PLANNED, answer.stderr


def test_plans_compute_what_eager_computes_and_leave_nothing_behind(unit):
    import inductor

    model = nn.Sequential(nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(8, 16, requires_grad=True)
    out = []
    found = inductor.plans(lambda: out.append(torch.compile(model)(x)) or out[0].sum().backward())
    assert len(found) == 2, "one plan forward, one backward"
    torch.testing.assert_close(out[0], model(x))
    torch.testing.assert_close(x.grad, torch.autograd.grad(model(x).sum(), x)[0])
    if compat.compiler("cpu"):
        torch.testing.assert_close(torch.compile(model)(x), model(x))


@pytest.mark.parametrize(("dynamic", "later"), [(None, [1, 1, 1]), (False, [0, 0, 1])])
def test_after_a_partial_batch_the_symbolic_graph_serves_the_full_ones_too(dynamic, later):
    """What 9.4.2 says of drop_last: two full batches and a partial one, for two epochs."""
    torch.compiler.reset()
    made, served = [], []

    def noted(graph, _):
        made.append(graph)
        mine = len(made) - 1
        return lambda *args: served.append(mine) or graph(*args)

    compiled = torch.compile(nn.Linear(4, 4), backend=noted, dynamic=dynamic)
    for _ in range(2):
        for size in (64, 64, 40):
            compiled(torch.ones(size, 4))
    assert len(made) == 2 and served == [0, 0, 1, *later]


def test_the_condition_of_9_4_2_also_compiles_behind_dynamo():
    """torch.cond refuses operands that share memory, which a backend that only records does not see."""
    space = {"torch": torch, "device": "cpu", "x": torch.randn(256, 64)}
    cells = json.loads((UNIT / "2-graph-breaks-and-shapes.ipynb").read_text(encoding="utf-8"))["cells"]
    [source] = ["".join(cell["source"]) for cell in cells if "def choose(" in "".join(cell["source"])]
    torch.compiler.reset()
    exec(source[: source.index("one = ")], space)
    chosen = torch.compile(lambda x: space["choose"](x, "torch.cond"), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for x in (space["x"] + 1, space["x"] - 1):
            torch.testing.assert_close(chosen(x), space["choose"](x, "if"))


# --- cold starts ------------------------------------------------------------------------------------------


def test_launches_that_a_gpu_would_record_are_found_in_their_partition(unit):
    import inductor

    parts = "def partition_0(args):\n    triton_poi_fused_0.run(x, stream=0)\n"
    whole = "class Runner:\n    def call(self, args):\n        triton_poi_fused_1.run(x, stream=0)\n"
    for source, first in ((parts + whole, 2), (whole, 1)):
        assert len(inductor._KERNEL.findall(source[inductor._CALLS.search(source).start() :])) == first


def test_a_start_that_hangs_or_fails_is_said(unit, monkeypatch, tmp_path):
    import cold_start

    with pytest.raises(RuntimeError, match=r"had not ended after 0.2 s, and was stopped"):
        cold_start.run(tmp_path, timeout=0.2)
    monkeypatch.setenv("CXX", NO_COMPILER["CXX"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, match=r"The compiling process failed: .*No working C\+\+ compiler"):
        cold_start.run(tmp_path, seconds=0.1)


def test_the_benchmark_gives_the_bill_of_a_cold_and_of_a_warm_start(monkeypatch):
    starts = [
        {"first_s": 9.0, "eager_s": 0.03, "compiled_s": 0.02},
        {"first_s": 1.0, "eager_s": 0.03, "compiled_s": 0.02},
    ]
    lesson = {"run": lambda *_, **__: starts.pop(0), "elements": lambda: 2048}
    monkeypatch.setattr(bench.runpy, "run_path", lambda path: lesson)
    monkeypatch.setattr(compat, "compiler", lambda kind=None: "g++")
    [row] = bench.gelu(Session(torch.device("cpu"), "tiny", 1.0), [])
    assert row["break_even_steps"] == pytest.approx(900) and row["break_even_steps_warm"] == pytest.approx(100)
    assert row["found"] == "start cold 9 s, warm 1 s; step 30 ms eager, 20 ms compiled"


def test_the_benchmark_says_that_there_is_no_compiler(monkeypatch):
    monkeypatch.setattr(compat, "compiler", lambda kind=None: None)
    session = Session(torch.device("cpu"), "tiny", 1.0)
    for [row] in (bench.gelu(session, []), bench.mode("default", session, [])):
        assert "torch.compile finds none that works" in row["not_run"]
