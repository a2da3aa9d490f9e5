"""Unit 9.6: what its scripts count, against closed formulas and real tensors, and the snippets of its notebooks."""

import inspect
import json
import re
import sys

import pytest
import torch
from notebooks import ROOT
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from speedlab.data import models

FOLDER = ROOT / "code-units" / "9.6-memory"


@pytest.fixture
def meter(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import meter

    yield meter
    sys.modules.pop("meter")


def test_what_a_process_grows_by_is_its_own(monkeypatch):
    """Not the peak of the process that starts it, which on Linux it inherits."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import measure_rss

    bytearray(2**30)[::4096] = bytes(2**18)  # this process was large once
    assert abs(measure_rss.grown(2, 1, 96)) < 2**27


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
    # what an optimizer changes in a list, in place, is written too: read two, write one
    weights, gradients = [torch.zeros(10), torch.zeros(5)], [torch.ones(10), torch.ones(5)]
    assert meter.traffic(lambda: torch._foreach_add_(weights, gradients)) == {"products": 0, "the rest": 3 * 60}


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
    assert alive.tolist() == fake_alive.tolist()


@pytest.mark.skipif(
    not hasattr(PreTrainedModel, "activation_checkpointing_enable"), reason="transformers 5.17 has another name"
)
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


class GradientOfOne(nn.Module):
    """A model whose gradient is 1 for any batch of ones; a hook writes down what reaches the optimizer."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(())), []

    def forward(self, batch, labels=None):
        return {"loss": (self.weight * batch).mean()}

    def watched(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: self.seen.append(self.weight.grad.item()))
        return optimizer


@pytest.mark.parametrize("batches", [10, 8, 3])
def test_the_loop_for_fabric_gives_the_tail_its_weight(batches):
    from lightning import Fabric

    _, snippet = practice(2)
    fabric = Fabric(accelerator="cpu", devices=1)
    spy = GradientOfOne()
    model, optimizer = fabric.setup(spy, spy.watched())
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.ones(batches), batch_size=1))
    space = {"loader": loader, "fabric": fabric, "model": model, "optimizer": optimizer}
    exec(snippet, space | {"loss_of": lambda model, batch: model(batch)["loss"]})
    assert spy.seen == [1.0] * -(-batches // 4)


def test_the_arguments_of_lightning_and_transformers_accumulate(tmp_path, monkeypatch):
    import transformers
    from lightning import Trainer

    monkeypatch.chdir(tmp_path)
    snippet, _ = practice(2)
    space = {"Trainer": Trainer, "TrainingArguments": transformers.TrainingArguments}
    exec(snippet, space)
    assert space["trainer"].accumulate_grad_batches == space["arguments"].gradient_accumulation_steps == 4


class DeafGradientOfOne(GradientOfOne):
    """It takes the number of items, as transformers' classifiers do, and its loss ignores it."""

    def forward(self, batch, labels=None, **told):
        return super().forward(batch)


@pytest.mark.parametrize(
    ("kind", "mended", "wanted"),
    [(GradientOfOne, False, [1, 1, 1]), (DeafGradientOfOne, False, [4, 4, 2]), (DeafGradientOfOne, True, [1, 1, 1])],
)
def test_the_trainer_of_transformers_does_what_the_page_says_of_its_groups(
    tmp_path, monkeypatch, kind, mended, wanted
):
    import transformers

    monkeypatch.chdir(tmp_path)
    model, ones = kind(), [{"batch": torch.ones(()), "labels": torch.tensor(1)} for _ in range(10)]
    arguments = transformers.TrainingArguments(
        "runs",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=0,
        save_strategy="no",
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=ones, optimizers=(model.watched(), None))
    if mended:
        trainer.model_accepts_loss_kwargs = False
    trainer.train()
    assert model.seen == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["Bert", "DistilBert"])
def test_classifiers_of_transformers_are_told_the_number_of_items_and_ignore_it(name):
    import transformers

    sizes = {
        "vocab_size": 9,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    if name == "DistilBert":
        sizes = {"vocab_size": 9, "dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8}
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    batch = {"input_ids": torch.arange(8).view(4, 2), "labels": torch.tensor([0, 1, 1, 0])}
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD in kinds  # what the Trainer asks
    assert torch.equal(model(**batch).loss, model(**batch, num_items_in_batch=torch.tensor(16)).loss)


def test_in_practice_of_notebook_1_runs(tmp_path, monkeypatch):
    from lightning import Trainer
    from lightning.pytorch.callbacks import DeviceStatsMonitor
    from transformers import TrainingArguments

    monkeypatch.chdir(tmp_path)
    called = []
    for name in ("_record_memory_history", "_dump_snapshot"):
        real = inspect.signature(getattr(torch.cuda.memory, name))
        monkeypatch.setattr(torch.cuda.memory, name, lambda *a, real=real, **o: called.append(real.bind(*a, **o)))
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    space = {"torch": torch, "train": lambda steps: called.append(steps), "Trainer": Trainer}
    space |= {"DeviceStatsMonitor": DeviceStatsMonitor, "TrainingArguments": TrainingArguments}
    for snippet in practice(1):
        exec(snippet, space)
    assert len(called) == 4 and space["arguments"].skip_memory_metrics is False


def test_the_planner_follows_a_formula_in_every_moment(meter):
    import planner

    def block_bytes(batch, tokens, width, heads, precision):
        return 1000 * batch

    small = {"layers": 2, "heads": 1, "width": 4, "tokens": 3}
    weights = 2 * (12 * 16 + 13 * 4) + (768 + 1) * 4 + 3 * 4 + 4 + 2 * 4 + 10 * 4 + 10
    turn, end, step = planner.budget(block_bytes, 2, "fp32", "AdamW", False, **small).values()
    images, border = 2 * 3 * 224**2 * 4, 2 * 3 * 4 * 4
    assert turn == {
        "parameters": 4 * weights,
        "optimizer state": 8 * weights,
        "gradients": 0,
        "activations": 2 * 2000 + 2 * border + images,
        "temporaries": 5 * border,
    }
    assert sum(step.values()) == 20 * weights + images
    assert end["gradients"] == 4 * weights and end["activations"] == 2000 + images
    kept = planner.budget(block_bytes, 2, "fp32", "SGD", True, **small)["forward turns\ninto backward"]
    assert kept["activations"] == border + 2000 + images and kept["optimizer state"] == 0
