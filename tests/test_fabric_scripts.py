"""The five scripts from plain PyTorch to FSDP, run from a copy of their folder alone; each a small step.

They run in a temporary folder, and whatever they import or start finds no `speedlab`.
"""

import ast
import difflib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import fabric_digits
import lightning
import psutil
import pytest
import torch
import torchvision
import transformers
from lightning.fabric.strategies import ModelParallelStrategy
from notebook_answers import defined
from PIL import Image
from torchvision.models import VisionTransformer

FOLDER = Path(__file__).resolve().parent.parent / "code-units" / "9.8-fabric"
SCRATCH, PYTORCH, FABRIC, MIXED, FSDP = (path.name for path in sorted(FOLDER.glob("0*.py")))
STEPS = 4


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A copy of what a user would copy, and a `speedlab` that cannot be imported, before any other on the path."""
    copied, without = tmp_path_factory.mktemp("copied"), tmp_path_factory.mktemp("without")
    for path in (*FOLDER.glob("0*.py"), FOLDER / "vit_parts.py", FOLDER / "digits.pt"):
        shutil.copy(path, copied)
    (without / "speedlab.py").write_text("raise ImportError('speedlab is not here')\n")
    (copied / "without").symlink_to(without, target_is_directory=True)
    return copied


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python in the copied folder, on the CPU: a GPU's attention adds up gradients in no fixed order."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(folder / "without")}
    options = {"cwd": folder, "env": environment, "stdin": subprocess.DEVNULL}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, *arguments], **options, **pipes, text=True) as child:
        try:
            said, errors = child.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            for process in [*psutil.Process(child.pid).children(recursive=True), child]:
                process.kill()
            raise
    return subprocess.CompletedProcess(child.args, child.returncode, said, errors)


# Runs several scripts in one process, each as Python runs a file, which saves the start of three.
ONE_BY_ONE = """
import runpy, sys
for sys.argv in [argument.split() for argument in sys.argv[1:]]:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def line(name: str, *extra: str) -> list[str]:
    return [name, "--epochs=1", "--images=100", "--batch=24", f"--save={name}.pt", *extra]


@pytest.fixture(scope="module")
def results(alone) -> dict[str, dict]:
    """What each script says last, as JSON, and the model that it saves, after four steps."""
    single = python(alone, "-c", ONE_BY_ONE, *(" ".join(line(name)) for name in (SCRATCH, PYTORCH, FABRIC, MIXED)))
    double = python(alone, *line(FSDP, "--devices=2"))
    assert single.returncode == double.returncode == 0, single.stderr + double.stderr
    printed = [
        text for text in (single.stdout + double.stdout).splitlines() if text.startswith(("epoch 1 of 1", "{"))
    ]
    assert [text[0] for text in printed] == ["e", "{"] * 5, "one line per epoch, and one process speaks for both"
    found = dict(zip((SCRATCH, PYTORCH, FABRIC, MIXED, FSDP), map(json.loads, printed[1::2]), strict=True))
    for name, result in found.items():
        assert len(result["losses"]) == STEPS and len(result["seconds"]) == len(result["val"]) == 1, name
        assert 0 <= result["test"] <= 1
        result["model"] = torch.load(alone / f"{name}.pt", weights_only=True)["model"]
    return found


def test_nothing_of_the_workbook_is_there(alone):
    assert "speedlab is not here" in python(alone, "-c", "import speedlab").stderr


def test_fabric_changes_no_bit(results):
    for key in ("losses", "val", "test"):
        assert results[FABRIC][key] == results[PYTORCH][key]
    for name, weight in results[PYTORCH]["model"].items():
        assert torch.equal(results[FABRIC]["model"][name], weight), name


def test_pretrained_weights_and_bf16_change_the_losses(results):
    assert results[SCRATCH]["losses"] != results[PYTORCH]["losses"]
    assert results[MIXED]["losses"] != results[FABRIC]["losses"]
    assert results[MIXED]["losses"] == pytest.approx(results[FABRIC]["losses"], abs=0.05)


def test_two_processes_learn_as_one_and_save_whole_tensors_of_plain_pytorch(results):
    # Fabric gives several processes batches of their own order, so the losses agree in the mean only
    mean = [sum(results[name]["losses"]) / STEPS for name in (FSDP, MIXED)]
    assert mean[0] == pytest.approx(mean[1], abs=0.3)
    shapes = [{name: weight.shape for name, weight in results[which]["model"].items()} for which in (FSDP, PYTORCH)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", [SCRATCH, PYTORCH, FABRIC, MIXED, FSDP, "vit_parts.py"])
def test_a_script_imports_torch_torchvision_and_lightning_only(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    others = {name.split(".")[0] for name in found} - set(sys.stdlib_module_names)
    assert others <= {"torch", "torchvision", "lightning", "vit_parts"}
    assert len(text.splitlines()) < (120 if name == "vit_parts.py" else 85)


def changed(before: str, after: str) -> tuple[list[str], list[str]]:
    """The lines of the code that go and that come, the title aside."""
    texts = ((FOLDER / name).read_text(encoding="utf-8").splitlines()[1:] for name in (before, after))
    lines = list(difflib.ndiff(*texts))
    return tuple([line[2:].strip() for line in lines if line.startswith(sign) and line[2:].strip()] for sign in "-+")


def test_each_script_changes_what_its_title_names():
    assert changed(SCRATCH, PYTORCH)[1] == ["model = vit(args.data, pretrained=True)"]
    gone, come = changed(FABRIC, MIXED)
    assert len(gone) == 1 and come == [gone[0].replace(")", ', precision="bf16-mixed")')]
    gone, come = changed(MIXED, FSDP)
    assert len(gone) == 1 and gone[0].replace(")", ", strategy=strategy)") in come
    gone, come = changed(PYTORCH, FABRIC)
    assert [line for line in come if "fabric" not in line.lower()] == ["args = options(argv)"]
    assert sum(".to(device)" in line for line in gone) == 3 and len(gone) <= 9 and len(come) <= 12


def test_a_strategy_for_gpus_can_be_made(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    strategy = defined((FOLDER / FSDP).read_text(encoding="utf-8"), "<fsdp>", __name__="fsdp")["on_gpus"]()
    assert type(strategy).__name__ == "FSDPStrategy" and strategy._state_dict_type == "full"


@pytest.mark.parametrize(
    ("options", "most", "words"),
    [
        (["--devices", "2"], {"most_devices": 1}, "from 02 on"),
        (["--devices", "2", "--batch", "33"], {}, "multiple of devices"),
        (["--images", "8"], {}, "fill a batch"),
        (["--epochs", "0"], {}, "1 or more"),
    ],
)
def test_options_that_cannot_be_meant_get_a_sentence(options, most, words, capsys, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import vit_parts

    with pytest.raises(SystemExit) as caught:
        vit_parts.options(options, **most)
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_a_batch_that_all_images_do_not_fill_gets_a_sentence(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import vit_parts

    with pytest.raises(SystemExit, match="1097 images do not fill a batch of 2048"):
        vit_parts.loaders(vit_parts.options(["--batch", "2048"]))


class Pictures:
    """Stands in for CIFAR-10: as many images, all grey, through the script's own transform."""

    filename = "pictures"

    def __init__(self, folder, train, transform, download):
        self.number, self.transform = 50_000 if train else 10_000, transform

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int):
        return self.transform(Image.new("RGB", (32, 32), "grey")), index % 10


def test_cifar10_is_split_and_enlarged_and_its_model_gets_a_new_head(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import vit_parts

    monkeypatch.setattr(vit_parts, "CIFAR10", Pictures)
    parts = vit_parts.datasets("cifar10")
    assert [len(part) for part in parts] == [45_000, 5_000, 10_000]
    assert all(part[7][0].shape == (3, 224, 224) for part in parts)
    monkeypatch.setattr(vit_parts, "vit_b_16", lambda weights: VisionTransformer(224, 112, 1, 1, 8, 8))
    model = vit_parts.vit("cifar10", pretrained=True)
    assert model(parts[0][0][0].unsqueeze(0)).shape == (1, 10) and model.heads.head.weight.std() > 0


def test_without_a_network_a_sentence_names_the_missing_file(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(FOLDER)
    import vit_parts

    def offline(*args, **options):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    monkeypatch.setattr(torch.hub, "urlopen", offline)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    for file, where, make in (
        ("cifar-10-python.tar.gz", tmp_path / "data", lambda: vit_parts.datasets("cifar10")),
        ("vit_b_16-c867db91.pth", tmp_path / "checkpoints", lambda: vit_parts.vit("cifar10", pretrained=True)),
    ):
        with pytest.raises(SystemExit) as caught:
            make()
        assert all(words in str(caught.value) for words in (file, "no network", str(where), "--data digits"))


# What the names in the notebooks' snippets mean.
PRACTICE = {
    "torch": torch,
    "torchvision": torchvision,
    "AutoModelForImageClassification": transformers.AutoModelForImageClassification,
    "Fabric": lightning.Fabric,
    "ModelParallelStrategy": ModelParallelStrategy,
    "Trainer": lightning.Trainer,
    "TrainingArguments": transformers.TrainingArguments,
}


def test_in_practice_calls_what_the_installed_libraries_have(tmp_path):
    """Each call in the notebooks' snippets binds: the name exists, and takes these arguments."""
    checked = []
    for path in sorted(FOLDER.glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        [snippet] = re.findall(r"### In practice\n+```python\n(.*?)```", prose, re.S)
        for call in [node for node in ast.walk(ast.parse(snippet)) if isinstance(node, ast.Call)]:
            keywords = {keyword.arg: None for keyword in call.keywords}
            name = ast.unparse(call.func)
            inspect.signature(eval(name, PRACTICE)).bind(*[None] * len(call.args), **keywords)
            checked.append(name)
    assert len(checked) == 8
    assert transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=True, fsdp=True).fsdp


def test_the_digits_file_holds_the_packages_digits_and_weights():
    stored, wanted = torch.load(FOLDER / "digits.pt", weights_only=True), fabric_digits.content()
    assert stored["weights"].keys() == wanted["weights"].keys()
    for part, other in ((stored, wanted), (stored["weights"], wanted["weights"])):
        for name, tensor in part.items():
            assert isinstance(tensor, dict) or torch.equal(tensor, other[name]), name
    train, val, test = (stored["labels"][a:b] for a, b in ((0, 1097), (1097, 1297), (1297, 1797)))
    assert all(len(set(part.tolist())) == 10 for part in (train[:10], val, test)), "every digit in every part"
