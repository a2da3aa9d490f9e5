"""The embedded images and the checkpoint pretrained on them: what the lessons on fine-tuning rest on."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torchvision.models import VisionTransformer

from speedlab.data.glyphs import CLASSES, FONTS, _atlas, digits, glyphs

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "speedlab" / "data" / "checkpoints" / "vit-small"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Keep these small models on one thread: on a busy machine, two that wait for each other are far slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def handwritten():
    """Return the digits: train images, train labels, validation images, validation labels."""
    return digits()


def load(pretrained: bool) -> VisionTransformer:
    """Return the small ViT, with the shipped weights or with those that its constructor draws."""
    model = VisionTransformer(**json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8")))
    if pretrained:
        model.load_state_dict(load_file(CHECKPOINT / "model.safetensors"))
    return model


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of images (N, 3, 32, 32) that the model assigns to their labels (N,)."""
    with torch.inference_mode():
        return (model.eval()(images).argmax(dim=1) == labels).float().mean().item()


def test_every_font_holds_every_class_as_a_shape_of_its_own():
    atlas = _atlas()
    assert atlas.shape[:2] == (len(FONTS), len(CLASSES)) and len(set(CLASSES)) == len(CLASSES)
    ink = atlas.mean(dim=(2, 3))
    assert 0.03 < ink.min() and ink.max() < 0.6, "a cell is empty or full"
    for font, shapes in zip(FONTS, atlas.flatten(2), strict=True):
        distance = torch.cdist(shapes, shapes).fill_diagonal_(float("inf"))
        assert distance.min() > 6, f"{font} draws two classes alike, as it would two missing characters"
    # Upright and where its class says: an L is heavy at the bottom left, a 7 at the top.
    assert (atlas[:, CLASSES.index("L"), 32:].sum() > atlas[:, CLASSES.index("L"), :32].sum()).item()
    assert (atlas[:, CLASSES.index("7"), 32:].sum() < atlas[:, CLASSES.index("7"), :32].sum()).item()


@pytest.mark.parametrize("size", [8, 32, 48])
def test_shapes_range_and_channels(size):
    images, labels = glyphs(100, seed=0, size=size)
    assert images.shape == (100, 3, size, size) and images.dtype == torch.float32
    assert labels.shape == (100,) and labels.dtype == torch.int64
    assert images.min() >= 0 and images.max() <= 1 and torch.isfinite(images).all()
    assert torch.equal(images[:, 0], images[:, 1]) and torch.equal(images[:, 0], images[:, 2])
    # White on black: every image has ink, and most of every image's border has none.
    assert images.amax(dim=(1, 2, 3)).min() > 0.4
    assert images[:, 0, 0].median() < 0.1


def test_classes_are_balanced_and_shuffled():
    _, labels = glyphs(10 * len(CLASSES) + 7, seed=3)
    counts = labels.bincount(minlength=len(CLASSES))
    assert len(counts) == len(CLASSES) and counts.min() == 10 and counts.max() == 11
    assert len(labels[: len(CLASSES)].unique()) < len(CLASSES), "the classes come in their own order"


def test_images_of_a_class_vary():
    images, labels = glyphs(3000, seed=4)
    for label in range(len(CLASSES)):
        same = images[labels == label, 0].flatten(1)
        assert torch.pdist(same).min() > 1


def test_another_process_draws_the_same_images_and_importing_costs_nothing_beyond_torch():
    """One child process answers both, on two threads where this one has one: starting it takes seconds."""
    code = (
        "import hashlib, sys; from speedlab.data.glyphs import glyphs;"
        "print([name for name in ('matplotlib', 'sklearn') if name in sys.modules]);"
        "images, labels = glyphs(2100, seed=5);"
        "print(hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest())"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    images, labels = glyphs(2100, seed=5)
    expected = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
    assert done.stdout.splitlines() == ["[]", expected]


def test_draws_neither_from_nor_for_the_global_generator():
    torch.manual_seed(0)
    before, first = torch.get_rng_state(), glyphs(50, seed=6)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(first[0], glyphs(50, seed=6)[0])


def test_other_seed_other_images():
    (images, labels), (others, other_labels) = glyphs(200, seed=7), glyphs(200, seed=8)
    assert not torch.equal(labels, other_labels)
    assert (images - others).abs().flatten(1).amax(dim=1).min() > 0.1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"count": -1}, "count must be at least 1 image, not -1."),
        ({"count": 0}, "count must be at least 1 image, not 0."),
        ({"count": 5, "size": 7}, "size must be at least 8 pixels, not 7."),
    ],
)
def test_bad_input_is_named(arguments, sentence):
    with pytest.raises(ValueError) as error:
        glyphs(seed=0, **arguments)
    assert str(error.value) == sentence


def test_digits_shapes_and_range(handwritten):
    train, train_labels, val, val_labels = handwritten
    assert train.shape == (1297, 3, 32, 32) and val.shape == (500, 3, 32, 32)
    for images, labels in ((train, train_labels), (val, val_labels)):
        assert images.dtype == torch.float32 and labels.dtype == torch.int64 and len(images) == len(labels)
        assert images.min() == 0 and images.max() == 1
        assert torch.equal(images[:, 0], images[:, 1]) and torch.equal(images[:, 0], images[:, 2])


def test_digits_split_is_disjoint_stratified_and_takes_turns(handwritten):
    train, train_labels, val, val_labels = handwritten
    seen = {image.numpy().tobytes() for image in train}
    assert not any(image.numpy().tobytes() in seen for image in val)
    shares = train_labels.bincount() / len(train_labels) - val_labels.bincount() / len(val_labels)
    assert shares.abs().max() < 0.002
    assert train_labels[:100].bincount().tolist() == [10] * 10


def test_digits_carry_their_own_labels(handwritten):
    """The nearest training image names nearly every validation digit, as it would not if labels had moved."""
    train, train_labels, val, val_labels = handwritten
    nearest = torch.cdist(val[:, 0].flatten(1), train[:, 0].flatten(1)).argmin(dim=1)
    assert (train_labels[nearest] == val_labels).float().mean() > 0.95
    assert all(torch.equal(a, b) for a, b in zip(handwritten, digits(), strict=True))


def test_checkpoint_is_small_and_reads_fresh_glyphs():
    assert (CHECKPOINT / "model.safetensors").stat().st_size < 2.5e6
    images, labels = glyphs(30 * len(CLASSES), seed=123_456_789)
    model = load(pretrained=True)
    assert accuracy(model, images, labels) > 0.85
    assert accuracy(load(pretrained=False), images, labels) < 0.1
    # Every class by itself: two that had changed places would hardly show in the mean.
    for label, name in enumerate(CLASSES):
        assert accuracy(model, images[labels == label], labels[labels == label]) > 0.5, name


def test_fine_tuning_beats_training_from_scratch(handwritten):
    """A hundred labels and forty steps are plenty for the pretrained weights and far too few without them."""
    train, train_labels, val, val_labels = handwritten
    reached = {}
    for pretrained in (True, False):
        torch.manual_seed(0)
        model = load(pretrained).train()
        model.heads.head = nn.Linear(model.hidden_dim, 10)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(10):
            for rows in torch.randperm(100).split(25):
                loss = F.cross_entropy(model(train[rows]), train_labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        reached[pretrained] = accuracy(model, val, val_labels)
    assert reached[True] > 0.8 and reached[True] > reached[False] + 0.2, reached
