"""Unit 9.6: what its scripts count, against closed formulas and real tensors, and the snippets of its notebooks."""

import json
import re
import sys

import pytest
import torch
from notebooks import ROOT
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from speedlab.data import models

FOLDER = ROOT / "code-units" / "9.6-memory"


@pytest.fixture
def meter(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import meter

    yield meter
    sys.modules.pop("meter")


def practice(number: int) -> list[str]:
    """The Python snippets under In practice in a notebook of this unit."""
    [path] = FOLDER.glob(f"{number}-*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    prose = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.findall(r"```python\n(.*?)```", prose.split("In practice\n")[1], re.S)


def test_the_meter_adds_up_what_is_alive(meter):
    x = torch.randn(1000)
    with meter.Meter([x]) as seen:
        y = x + 1  # 4,000 bytes
        z = y.exp()  # 8,000
        del y
        z.neg_()  # in place: 4,000
    assert seen.history().tolist() == [0, 4000, 8000, 4000]
    assert seen.film().sum(0).tolist() == [4000, 8000, 12000, 8000]


def test_the_meter_counts_a_view_once_and_knows_kinds(meter):
    with meter.Meter() as seen:
        x = torch.ones(10)
        seen.begin("later", "temporaries")
        y = x.view(2, 5).t() + 0
    rows = dict(zip(meter.KINDS, seen.film(), strict=True))
    assert rows["activations"].max() == 40 and rows["temporaries"].max() == y.nbytes == 40
    assert seen.marks == [(1, "later")]


def test_traffic_is_what_the_operations_read_and_write(meter):
    x = torch.randn(1000)
    assert meter.traffic(lambda: 2 * x) == {"products": 0, "the rest": 8000}
    a, b = torch.randn(4, 8), torch.randn(8, 2)
    assert meter.traffic(lambda: (a @ b).t()) == {"products": 4 * (32 + 16 + 8), "the rest": 0}
    # a storage that is read twice by one operation is charged twice; an empty tensor and a view are free
    assert meter.traffic(lambda: torch.empty(5) is None or (x.view(10, 100), x + x))["the rest"] == 12000


def test_traffic_and_meter_say_the_same_of_fake_and_of_real_tensors(meter):
    def step():
        model, x = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(4, 8)
        with meter.Meter(model.parameters()) as seen:
            loss = checkpoint(model, x, use_reentrant=False).sum()
        return meter.traffic(loss.backward), seen.history()

    moved, alive = step()
    with FakeTensorMode():  # asks for devices too, which are operations that make nothing
        fake_moved, fake_alive = step()
    assert moved == fake_moved and moved["the rest"] > 0
    assert (alive.max(), alive[-1]) == (fake_alive.max(), fake_alive[-1])


@pytest.mark.filterwarnings("error::FutureWarning")
def test_in_practice_of_notebook_3_runs(tmp_path, monkeypatch):
    from lightning.fabric.strategies import FSDPStrategy
    from transformers import TrainingArguments

    monkeypatch.chdir(tmp_path)
    block, x, model = nn.Linear(4, 4), torch.randn(2, 4), models.distilbert("small", pretrained=False).train()
    space = {"model": model, "block": block, "x": x, "Block": nn.Linear}
    [snippet] = practice(3)
    space |= {"checkpoint": checkpoint, "FSDPStrategy": FSDPStrategy, "TrainingArguments": TrainingArguments}
    exec(snippet, space)
    assert torch.equal(space["x"], block(x)) and model.is_activation_checkpointing
    assert space["arguments"].activation_checkpointing
