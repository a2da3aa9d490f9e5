"""Unit 9.9, notebooks 1 and 2: what their scripts compute, against closed formulas, and their snippets."""

import json
import math
import re
import sys

import lightning
import pytest
import torch
from notebooks import ROOT
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Trainer,
    TrainingArguments,
    get_wsd_schedule,
)

from speedlab import claims

FOLDER = ROOT / "code-units" / "9.9-smaller-models"


@pytest.fixture
def unit(monkeypatch):
    """The unit's scripts, imported as its notebooks import them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import runs
    import schedules

    yield runs, schedules
    for name in ("runs", "schedules"):
        sys.modules.pop(name)


def cells(number: int, kind: str) -> list[str]:
    [path] = FOLDER.glob(f"{number}-*.ipynb")
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def practice(number: int) -> list[str]:
    """The Python snippets under In practice in a notebook of this unit."""
    return re.findall(r"```python\n(.*?)```", "\n\n".join(cells(number, "markdown")).split("In practice\n")[1], re.S)


def test_batches_do_not_depend_on_the_length_of_the_run(unit):
    runs, _ = unit
    assert torch.equal(runs.batches(3, 200, 16)[:70], runs.batches(3, 70, 16))
    assert runs.batches(3, 64, 16).flatten().sort().values.tolist() == list(range(runs.SAMPLES))
    assert not torch.equal(runs.batches(3, 64, 16), runs.batches(4, 64, 16))


def test_runs_side_by_side_are_plain_runs_and_do_not_touch_each_other(unit):
    runs, _ = unit

    def sgd(weight, gradient, rate, state):
        weight -= rate * gradient

    rates = torch.tensor([[0.1, 0.2, 0.1]] * 3)
    both = runs.train(rates, [0, 0, 1], sgd, [3])[3][0]
    images, labels, *_ = runs.digits()
    for run, (seed, rate) in enumerate(((0, 0.1), (0, 0.2), (1, 0.1))):
        model = runs.network(seed)
        optimizer = torch.optim.SGD(model.parameters(), rate)
        for rows in runs.batches(seed, 3, 16):
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
        for found, wanted in zip(both, model.parameters(), strict=True):
            torch.testing.assert_close(found[run], wanted.detach(), atol=1e-5, rtol=0)


def test_only_the_chosen_samples_count(unit):
    runs, _ = unit
    seen = []

    def keep_first(losses, step):
        seen.append((step, tuple(losses.shape)))
        return torch.zeros(2, 1, dtype=torch.long)

    def sgd(weight, gradient, rate, state):
        weight -= rate * gradient

    weights = runs.train(torch.full((2, 2), 0.1), [0, 1], sgd, [2], batch=8, choose=keep_first)[2][0]
    images, labels, *_ = runs.digits()
    model = runs.network(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for rows in runs.batches(0, 2, 8)[:, :1]:
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    assert seen == [(0, (2, 8)), (1, (2, 8))]
    torch.testing.assert_close(weights[0][0], next(model.parameters()).detach(), atol=1e-5, rtol=0)


def test_the_interval_is_that_of_students_t(unit):
    runs, _ = unit
    middle, low, high = runs.interval([1, 2, 3, 4, 5, 6, 7, 8])
    half = 2.3646 * math.sqrt(6 / 8)  # the sample's variance is 6
    assert middle == 4.5 and (low, high) == pytest.approx((4.5 - half, 4.5 + half), abs=2e-3)
    assert runs.ratio_interval([2.0] * 8) == pytest.approx((2, 2, 2))
    with pytest.raises(ValueError, match="eight values"):
        runs.interval([1, 2])


@pytest.mark.parametrize(
    ("make", "steps", "said"),
    [
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 100), 100, ""),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 100), 130, "climbs"),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 100), 50, "ends at 52% of its peak"),
        (lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=100), 100, ""),
        (lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=100), 101, "ValueError"),
        (lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=200), 30, "100% of its peak"),
        (lambda o: lr_scheduler.ConstantLR(o, 1.0), 20, "100% of its peak"),
        (lambda o: get_wsd_schedule(o, 10, 20, 100), 150, "50 updates have a rate of 0"),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 1000, eta_min=0.1), 1000, ""),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 1000, eta_min=0.2), 1000, "ends at 20% of its peak"),
    ],
)
def test_the_dry_run_reports_schedules_longer_and_shorter_than_the_run(unit, make, steps, said):
    _, schedules = unit
    found = schedules.dry_run(make, steps)
    assert said in found and (said or not found)


def test_the_dry_run_reports_a_scheduler_before_the_optimizer(unit):
    _, schedules = unit

    def swapped(optimizer, scheduler):
        scheduler.step()
        optimizer.step()

    cosine = lambda o: lr_scheduler.CosineAnnealingLR(o, 100)  # noqa: E731
    assert "UserWarning" in schedules.dry_run(cosine, 100, swapped)
    with pytest.warns(UserWarning, match="before"):
        late, right = schedules.planned(cosine, 100, swapped), schedules.planned(cosine, 100)
    assert late[:-1] == right[1:]


def test_schedule_free_is_that_of_the_package(unit):
    package = pytest.importorskip("schedulefree", reason="the course does not need it: pip install schedulefree")
    runs, _ = unit
    space = {"torch": torch}
    [rule] = [source for source in cells(1, "code") if "def schedule_free(" in source]
    exec(rule, space)
    images, labels, *_ = runs.digits()
    model = runs.network(seed=0)
    [snippet] = [text for text in practice(1) if "schedulefree" in text]
    snippet = snippet.replace("optimizer.eval()", "")
    exec(snippet, space | {"SGDScheduleFree": package.SGDScheduleFree, "model": model}, found := {})
    optimizer = found["optimizer"]
    for rows in runs.batches(0, 30, 16):
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.eval()
    states = runs.train(torch.full((30, 1), 0.4), [0], space["schedule_free"], [30])[30][1]
    for own, state in zip(model.parameters(), states, strict=True):
        torch.testing.assert_close(own.detach(), state["x"][0], atol=1e-4, rtol=0)


def test_in_practice_of_notebook_1_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, steps = nn.Linear(2, 2), 300
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    space = {"torch": torch, "lr_scheduler": lr_scheduler, "optimizer": optimizer, "model": model, "steps": steps,
             "TrainingArguments": TrainingArguments, "lightning": lightning}  # fmt: skip
    for snippet in practice(1):
        if "schedulefree" not in snippet:
            exec(snippet, space)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        space["schedule"].step()
    assert max(rates) == pytest.approx(1) and rates.index(max(rates)) == 100 and rates[-1] < 1e-3
    space["averaged"].update_parameters(model)
    assert space["arguments"].lr_scheduler_type == "warmup_stable_decay"

    class Small(space["Model"]):
        def __init__(self):
            super().__init__()
            self.layer, self.rates = nn.Linear(2, 2), []

        def training_step(self, batch, _):
            self.rates.append(self.optimizers().param_groups[0]["lr"])
            return F.cross_entropy(self.layer(batch[0]), batch[1])

    small, data = Small(), TensorDataset(torch.randn(80, 2), torch.randint(2, (80,)))
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(max_epochs=2, accelerator="cpu", accumulate_grad_batches=2, **quiet).fit(
        small, DataLoader(data, 8)
    )
    expected = [0.08 * (1 + math.cos(math.pi * (i // 2) / 10)) / 2 for i in range(20)]
    assert small.rates == pytest.approx(expected, abs=1e-6)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(data)

    for limits, rates in (({"max_epochs": 1}, [0.08, 0, 0.08, 0]), ({"max_steps": 4}, [0.08, 0.0683, 0.04, 0.0117])):
        small = Small()
        lightning.Trainer(accelerator="cpu", **limits, **quiet).fit(small, DataLoader(Stream(), 8))
        assert small.rates[:4] == pytest.approx(rates, abs=1e-4), "without a length, every second rate is 0"


def test_in_practice_of_notebook_2_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = {"torch": torch, "F": F, "lightning": lightning, "Trainer": Trainer, **vars(claims)}
    [rule] = [source for source in cells(2, "code") if source.startswith("def drawn(")]
    for snippet in (rule, *practice(2)):
        exec(snippet, space)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    sizes = []

    class Small(space["Model"]):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

        def forward(self, x):
            sizes.append((len(x), self.training))
            return self.layers(x)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    small, data = Small(), TensorDataset(torch.randn(80, 2), torch.randint(2, (80,)))
    lightning.Trainer(max_steps=10, accelerator="cpu", **quiet).fit(small, DataLoader(data, 8))
    assert sizes == [(8, True)] * 5 + [(8, False), (4, True)] * 4 + [(8, True)]
    assert small.layers[1].num_batches_tracked == 10

    config = DistilBertConfig(vocab_size=20, dim=8, n_layers=1, n_heads=2, hidden_dim=8, max_position_embeddings=8)
    model, rows = DistilBertForSequenceClassification(config), []
    real = model.distilbert.forward
    monkeypatch.setattr(
        model.distilbert,
        "forward",
        lambda *a, **o: (rows.append(len(o["input_ids"] if "input_ids" in o else a[0])), real(*a, **o))[1],
    )
    samples = [{"input_ids": torch.randint(20, (6,)), "labels": i % 2} for i in range(32)]
    arguments = TrainingArguments(str(tmp_path), max_steps=4, per_device_train_batch_size=8, report_to=[],
                                  save_strategy="no", disable_tqdm=True, use_cpu=True)  # fmt: skip
    space["Selective"](model, arguments, train_dataset=samples).train()
    assert rows == [8, 8, 8, 4, 8, 4]
