"""The small and the real models: the same calls, the same interfaces, a sentence when the hub is out of reach."""

import shutil
from pathlib import Path

import pytest
import torch
from torchvision.models import ViT_B_16_Weights

from speedlab import count
from speedlab.data import models


def test_small_vit_is_pretrained_and_trainable():
    model = models.vit("small", num_classes=7)
    images, labels = torch.rand(4, 3, 32, 32), torch.tensor([0, 1, 2, 6])
    logits = model(images)
    assert logits.shape == (4, 7)
    torch.nn.functional.cross_entropy(logits, labels).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_small_vit_really_loads_its_weights():
    pretrained, fresh = models.vit("small"), models.vit("small", pretrained=False)
    again = models.vit("small")
    name = "encoder.layers.encoder_layer_0.mlp.0.weight"
    assert torch.equal(pretrained.state_dict()[name], again.state_dict()[name])
    assert not torch.equal(pretrained.state_dict()[name], fresh.state_dict()[name])


def test_small_distilbert_and_tokenizer_go_together():
    tokenizer, model = models.tokenizer("small"), models.distilbert("small", num_labels=3)
    batch = tokenizer(
        ["never dull", "a long and tiresome film about a lighthouse"], padding=True, return_tensors="pt"
    )
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert logits.shape == (2, 3)


def test_small_checkpoints_are_small():
    size = sum(f.stat().st_size for f in models.CHECKPOINTS.rglob("*") if f.is_file())
    assert size < 8_000_000


def test_no_checkpoint_needs_pickle():
    kinds = {f.suffix for f in models.CHECKPOINTS.rglob("*") if f.is_file()}
    assert kinds <= {".safetensors", ".json", ".txt"}


def test_the_small_distilbert_loads_by_the_call_that_loads_the_hubs():
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    place = models.CHECKPOINTS / "distilbert-small"
    loaded = AutoModelForSequenceClassification.from_pretrained(place, num_labels=2)
    ours = models.distilbert("small")
    name = "distilbert.transformer.layer.0.ffn.lin1.weight"
    assert torch.equal(loaded.state_dict()[name], ours.state_dict()[name])
    assert (
        AutoTokenizer.from_pretrained(place)("a film")["input_ids"]
        == models.tokenizer("small")("a film")["input_ids"]
    )


def test_real_architectures_need_no_network_without_weights():
    vit, distilbert = models.vit("base", pretrained=False), models.distilbert("base", pretrained=False)
    # 85.8 and 67.0 million parameters, as published, with ten and two classes
    assert count.state_bytes(vit).parameters // 4 == 85_806_346
    assert count.state_bytes(distilbert).parameters // 4 == 66_955_010


def test_scale_chooses_the_size(monkeypatch):
    monkeypatch.setenv("SPEEDLAB_SCALE", "full")
    assert count.state_bytes(models.vit(pretrained=False)).parameters > 3e8
    monkeypatch.setenv("SPEEDLAB_SCALE", "quick")
    assert count.state_bytes(models.vit(pretrained=False)).parameters < 3e6


def test_unknown_size_is_refused():
    with pytest.raises(ValueError, match="expected 'small' or 'base'"):
        models.vit("tiny")


def test_offline_at_full_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("SPEEDLAB_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(OSError, match=r"distilbert-base-uncased could not be loaded") as failure:
        models.distilbert("base")
    assert str(tmp_path) in str(failure.value) and "SPEEDLAB_SCALE=quick needs no download" in str(failure.value)


def test_missing_imagenet_weights_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SPEEDLAB_DATA", str(tmp_path))

    def refuse(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    with pytest.raises(
        OSError, match=r"ImageNet weights of ViT-B/16 could not be loaded \(no route to host\)"
    ) as failure:
        models.vit("base")
    assert "vit_b_16" in str(failure.value) and str(tmp_path) in str(failure.value)


def test_imagenet_weights_that_are_cut_off_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SPEEDLAB_DATA", str(tmp_path))
    name = Path(ViT_B_16_Weights.IMAGENET1K_V1.url).name
    for beginning in (b"", b"PK\x03\x04 and no more", b"abc"):
        (tmp_path / name).write_bytes(beginning)
        with pytest.raises(OSError, match=rf"ViT-B/16 could not be loaded: .*{name} is damaged .* Delete it"):
            models.vit("base")


def _break(path: Path, content: bytes | None) -> None:
    path.unlink() if content is None else path.write_bytes(content)


@pytest.mark.parametrize("broken", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"abc", b"{}"])
def test_a_folder_of_the_hubs_files_that_is_damaged_is_named(monkeypatch, tmp_path, broken, content):
    """Also a tokenizer without its words, which transformers would make without one, knowing none."""
    monkeypatch.setenv("SPEEDLAB_DATA", str(tmp_path))
    place = tmp_path / "distilbert-base-uncased"
    shutil.copytree(models.CHECKPOINTS / "distilbert-small", place)
    _break(place / broken, content)
    load = models.tokenizer if broken == "tokenizer.json" else models.distilbert
    with pytest.raises(OSError, match=r"distilbert-base-uncased could not be loaded: .* is damaged .* Delete it"):
        load("base")


def test_the_hubs_tokenizer_gives_what_distilbert_takes(monkeypatch, tmp_path):
    """The hub's files do not name the tokenizer's class, and the one that transformers chooses is BERT's."""
    monkeypatch.setenv("SPEEDLAB_DATA", str(tmp_path))
    place = tmp_path / "distilbert-base-uncased"
    shutil.copytree(models.CHECKPOINTS / "distilbert-small", place)
    (place / "tokenizer_config.json").write_text('{"do_lower_case": true, "model_max_length": 512}')
    batch = models.tokenizer("base")(["a film"], return_tensors="pt")
    assert set(batch) == {"input_ids", "attention_mask"}
    assert models.distilbert("base")(**batch).logits.shape == (1, 2)
