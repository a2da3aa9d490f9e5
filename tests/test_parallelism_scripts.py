"""The scripts of unit 9.2 on other numbers of processes: right, or one sentence that says which numbers they take."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import accelerate
import lightning
import pytest
import torch
import transformers
from lightning.fabric.strategies import ModelParallelStrategy
from notebooks import ROOT
from torch import nn
from torch.distributed import pipelining, tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import parallel
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from speedlab import launch

FOLDER = ROOT / "code-units" / "9.2-parallelism"
# What the names in the notebooks' snippets mean.
PRACTICE = {
    **vars(parallel),
    **vars(pipelining),
    "schedule": SimpleNamespace(step=lambda *inputs, target=None: None),  # which takes what its rank has
    "trainer": SimpleNamespace(fit=lambda model: None),
    "model": nn.Linear(1, 1),
    "nn": nn,
    "F": F,
    "Shard": tensor.Shard,
    "DistributedDataParallel": DistributedDataParallel,
    "Trainer": lightning.Trainer,
    "Fabric": lightning.Fabric,
    "ModelParallelStrategy": ModelParallelStrategy,
    "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
    "DistributedConfig": transformers.DistributedConfig,
    "TrainingArguments": transformers.TrainingArguments,
    "ParallelismConfig": accelerate.ParallelismConfig,
    "context_parallel": context_parallel,
    "init_device_mesh": init_device_mesh,
    "fully_shard": fully_shard,
    "ZeroRedundancyOptimizer": ZeroRedundancyOptimizer,
    "set_rotate_method": set_rotate_method,
    "head": nn.Linear(1, 1),
    "x": SimpleNamespace(flatten=lambda start, end: None),
    "targets": SimpleNamespace(flatten=lambda: None),
    "fabric": SimpleNamespace(launch=lambda: None),
}


def test_data_parallelism_is_right_on_unequal_shards():
    """Five ranks have 4, 5, 5, 5 and 5 of 24 rows; the weights are those of one process that knows of no shards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(11, 93), nn.GELU(), nn.Linear(93, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(24, 11, generator=generator), torch.randn(24, 6, generator=generator)
    for _ in range(5):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    wanted = nn.utils.parameters_to_vector(model.parameters()).detach()
    launched = launch.run(FOLDER / "data_parallel.py", 5, timeout=200)
    for output in launched.outputs:
        found = torch.tensor(json.loads(output)["weights"])
        assert torch.allclose(found, wanted, atol=1e-6), (found - wanted).abs().max()


@pytest.mark.parametrize(
    ("script", "processes", "arguments", "sentence"),
    [
        ("tensor_parallel.py", 3, (), "start it on 1, 2 or 4 processes, not on 3."),
        ("pipeline.py", 1, (5, 0), "choose a number of micro-batches that divides 24, not 5."),
        ("sequence_parallel.py", 5, (), "start it on a number of processes that divides 48, not on 5."),
        ("context_parallel.py", 5, (), "start it on 1, 2, 3, 4, 6, 8, 12 or 24 processes, not on 5."),
        ("grid.py", 1, (), "start it on 4 processes, not on 1."),
        ("messages.py", 1, (), "start it on 2 processes, not on 1."),
    ],
)
def test_a_number_that_does_not_divide_gets_one_sentence(script, processes, arguments, sentence):
    """Each rank says it before it waits for another, so one that believes in the others is enough."""
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": str(processes)}
    command = [sys.executable, FOLDER / script, *map(str, arguments)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 1 and sentence in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_launch_on_a_wrong_number_of_processes_quotes_the_sentence():
    with pytest.raises(launch.LaunchError, match="start it on 2 processes, not on 1") as failed:
        launch.run(FOLDER / "messages.py", 1, timeout=200)
    assert "Traceback" not in str(failed.value)


def test_in_practice_calls_what_the_installed_libraries_have():
    """Each call in the notebooks' snippets binds: the name exists, and takes these arguments."""
    checked = []
    for path in sorted(FOLDER.glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        [snippet] = re.findall(r"### In practice\n+```python\n(.*?)```", prose, re.S)
        for call in [node for node in ast.walk(ast.parse(snippet)) if isinstance(node, ast.Call)]:
            name = ast.unparse(call.func)
            if "(" in name:  # a method of what another call returns
                continue
            keywords = {keyword.arg: None for keyword in call.keywords}
            if name == "Shard":  # written in C++: it has no signature
                tensor.Shard(*[0] * len(call.args))
                continue
            inspect.signature(eval(name, PRACTICE)).bind(*[None] * len(call.args), **keywords)
            checked.append(name)
    assert len(checked) > 20
