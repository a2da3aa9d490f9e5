"""Unit 9.9, quantization and pruning: the helpers beside the notebooks, and the snippets under In practice."""

import importlib.util
import json
import re
import subprocess
import sys

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from notebooks import ROOT
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

FOLDER = ROOT / "code-units" / "9.9-smaller-models"
# what a snippet finds there already; a process of its own, as these packages print and warn when they are imported
BEFORE = """
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import TrainingArguments
{imports}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
example = torch.randn(4, 64)
body_layers = [(model[0], "weight")]
"""
IMPORTS = {
    (3, 0): "import bitsandbytes\nfrom lightning.pytorch.plugins import BitsandbytesPrecision",
    (4, 0): "from lightning import Trainer\nfrom lightning.pytorch.callbacks import ModelPruning",
}


@pytest.fixture
def helpers(monkeypatch):
    """The modules beside the notebooks."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import pruned
    import quantized
    import seeded_nets

    return {"pruned": pruned, "quantized": quantized, "nets": seeded_nets}


def practice(number: int) -> list[str]:
    """The Python snippets under In practice in a notebook of this unit."""
    [path] = FOLDER.glob(f"{number}-*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    prose = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.findall(r"```python\n(.*?)```", prose.split("In practice\n")[1], re.S)


@pytest.mark.parametrize(
    ("number", "place", "package", "after"),
    [
        (3, 0, "bitsandbytes", "assert arguments.optim == 'adamw_bnb_8bit'"),
        (3, 1, "torchao", "assert type(model[0]).__name__ == 'Float8Linear'"),
        (3, 2, "torchao", "assert (model(example) - model[2](model[1](model[0](example)))).abs().max() < 1e-5"),
        (3, 3, "torchao", "assert converted(example).shape == (4, 64)"),
        (4, 0, None, "assert (model[0].weight == 0).float().mean() == 0.5 and len(model[0]._buffers) == 0"),
        (4, 1, "torchao", "assert type(model[0]).__name__ == 'SemiSparseLinear'"),
        (4, 2, "torch_pruning", "assert model[0].out_features == model[2].in_features == 62"),
    ],
)
def test_a_snippet_in_practice_runs(number, place, package, after):
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed, and the course does not need it: pip install {package}")
    imports = IMPORTS.get((number, place), "")
    source = BEFORE.format(imports=imports) + practice(number)[place] + after
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300, cwd=FOLDER)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("masks_again", [False, True])
def test_a_pruned_run_that_resumes_keeps_its_zeros_only_if_they_are_masked_again(tmp_path, masks_again):
    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 8)

        def on_train_start(self):  # after the checkpoint was loaded
            if masks_again and self.current_epoch:
                prune.custom_from_mask(self.layer, "weight", self.layer.weight != 0)

        def training_step(self, batch, _):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def fit(epochs, resumed):
        torch.manual_seed(0)
        model = Model()
        only_first = {"apply_pruning": lambda epoch: epoch == 0, "use_lottery_ticket_hypothesis": False}
        pruning = ModelPruning("l1_unstructured", [(model.layer, "weight")], amount=0.5, **only_first)
        quiet = dict.fromkeys(
            ["logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"], False
        )
        trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[pruning], **quiet)
        trainer.fit(model, DataLoader(torch.ones(32, 16), batch_size=8), ckpt_path=resumed)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        return (model.layer.weight == 0).float().mean().item()

    assert fit(2, None) == 0.5
    assert fit(3, tmp_path / "run.ckpt") == (0.5 if masks_again else 0)


def test_seeds_are_independent_and_repeat(helpers):
    nets = helpers["nets"]
    both, second = nets.init((64, 8, 10), [3, 4]), nets.init((64, 8, 10), [4])
    assert all(torch.equal(a[1:], b) for a, b in zip(both, second, strict=True))
    one, two = (nets.train(both, 5, seed=0) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert nets.accuracy(one).shape == (2,)


def test_accuracy_on_two_halves_averages_to_that_on_all(helpers):
    nets = helpers["nets"]
    parameters, number = nets.init((64, 8, 10), [0, 1]), len(nets.digits()[1][1])
    even, odd = (nets.accuracy(parameters, rows=slice(i, None, 2)) for i in (0, 1))
    sizes = len(range(0, number, 2)), len(range(1, number, 2))
    torch.testing.assert_close((even * sizes[0] + odd * sizes[1]) / number, nets.accuracy(parameters))


def test_a_network_is_what_a_sequential_computes(helpers):
    nets = helpers["nets"]
    parameters = nets.init((64, 8, 10), [0])
    plain = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10))
    for p, own in zip(plain.parameters(), parameters, strict=True):
        p.data.copy_(own[0].squeeze(0) if p.ndim == 1 else own[0])
    x = torch.rand(1, 5, 64)
    torch.testing.assert_close(nets.forward(parameters, x)[0], plain(x[0]))


def test_traffic_is_what_is_read_and_written(helpers):
    x, w = torch.randn(8, 16), torch.randn(4, 16)
    with torch.no_grad():
        assert helpers["quantized"].traffic(lambda: x @ w.T) == 4 * (8 * 16 + 4 * 16 + 8 * 4)
        assert helpers["quantized"].traffic(lambda: x.T[:3]) == 0


def test_neurons_cut_for_every_seed_are_those_that_zeroing_leaves(helpers):
    nets, x = helpers["nets"], torch.rand(3, 5, 64)
    full = [p.detach() for p in nets.init((64, 16, 10), range(3))]
    small = helpers["pruned"].cut_all(full, 4)
    assert [tuple(p.shape) for p in small] == [(3, 4, 64), (3, 1, 4), (3, 10, 4), (3, 1, 10)]
    score = full[0].norm(dim=2) * full[2].norm(dim=1)
    mask = score >= score.topk(4, dim=1).values[:, -1:]
    zeroed = [*full[:2], full[2] * mask[:, None], full[3]]
    torch.testing.assert_close(nets.forward(small, x), nets.forward(zeroed, x))


def test_what_a_gpu_would_do_is_refused_in_words_without_one(helpers):
    on_cpu = torch.zeros(8, 8)
    assert "GPU" in helpers["pruned"].sparse_product(on_cpu, on_cpu)
    assert "GPU" in helpers["quantized"].float8_product(on_cpu, on_cpu, lambda x: (x, x))


def test_the_answer_beside_the_staircase_is_what_its_sliders_show(helpers):
    cells = json.loads((FOLDER / "3-quantization.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    taught = {"torch": torch}
    exec(next(text for text in sources if text.startswith("def quantize(")), taught)
    torch.manual_seed(0)
    row = (0.05 * torch.randn(64, 256))[5]

    def lost(**moved) -> int:
        said = helpers["quantized"].staircase(taught["quantize"], row, **moved)[1]
        return int(re.search(r"(\d+)% of an ordinary row", said)[1])

    outlier = next(o for o in (0.1, 0.5, 1.0, 2.0, 4.0, 8.0) if lost(bits=6, outlier=o, each_row=False) > 50)
    bits = max(b for b in range(2, 9) if lost(bits=b, outlier=8.0, each_row=True) >= 25)
    said = f"Answers: with one scale, an outlier of {outlier:g} or more; with its own, {bits} bits or fewer."
    assert any(said in text for text in sources)
