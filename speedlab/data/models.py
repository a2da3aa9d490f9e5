"""The models of the course: a small and a real vision transformer, a small and a real DistilBERT.

The small ones ship with the package, pretrained by tools/; the real ones come from torchvision and the Hugging Face
hub at `full`, or have random weights, which need no network and cost the same to train.
"""

import json
import pickle
from pathlib import Path

import torch
from torch import nn

from speedlab import machine
from speedlab.data import download

CHECKPOINTS = Path(__file__).parent / "checkpoints"
# What loading raises when a file is missing or cut off.
_UNREADABLE = (OSError, EOFError, RuntimeError, LookupError, pickle.UnpicklingError)
_HUB_DISTILBERT = "distilbert-base-uncased"
_HUB_URL = f"https://huggingface.co/{_HUB_DISTILBERT}"


def vit(size: str | None = None, *, pretrained: bool = True, num_classes: int = 10) -> nn.Module:
    """A vision transformer of torchvision's class, with a new head: images (B, 3, H, W) in, logits (B, K) out.

    `size` is 'small' (32 × 32 images, patches of 8, 4 layers, width 96; pretrained on glyphs) or 'base' (ViT-B/16 at
    224 × 224; pretrained on ImageNet). By default the scale decides.
    """
    from torchvision.models import ViT_B_16_Weights, vit_b_16
    from torchvision.models.vision_transformer import VisionTransformer

    if _size(size) == "small":
        folder = CHECKPOINTS / "vit-small"
        model = VisionTransformer(**{**json.loads((folder / "config.json").read_text()), "num_classes": num_classes})
        if pretrained:
            from safetensors.torch import load_file

            model.load_state_dict(_without_head(load_file(folder / "model.safetensors")), strict=False)
        return _trainable_head(model)
    model = vit_b_16(num_classes=num_classes)
    if pretrained:
        url = ViT_B_16_Weights.IMAGENET1K_V1.url
        try:
            state = torch.hub.load_state_dict_from_url(
                url, model_dir=download.folder(), check_hash=True, map_location="cpu", weights_only=True
            )
        except _UNREADABLE as error:
            raise OSError(_missing("the ImageNet weights of ViT-B/16", Path(url).name, url, error)) from error
        model.load_state_dict(_without_head(state), strict=False)
    return _trainable_head(model)


def distilbert(size: str | None = None, *, pretrained: bool = True, num_labels: int = 2) -> nn.Module:
    """A DistilBERT for classification: `model(input_ids=tokens, attention_mask=mask).logits` is (B, K) for (B, T).

    `size` is 'small' (3 layers, width 128; pretrained on generated reviews by predicting masked words) or 'base'
    (distilbert-base-uncased). By default the scale decides.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification, DistilBertConfig

    if not pretrained:
        config = (
            AutoConfig.from_pretrained(CHECKPOINTS / "distilbert-small")
            if _size(size) == "small"
            else DistilBertConfig()
        )
        config.num_labels = num_labels
        return AutoModelForSequenceClassification.from_config(config)
    return _from_hub(AutoModelForSequenceClassification, size, num_labels=num_labels)


def tokenizer(size: str | None = None):
    """The tokenizer that goes with `distilbert(size)`: `tokenizer()(texts, padding=True, return_tensors='pt')`."""
    from transformers import AutoTokenizer

    # the hub's files name no class: transformers takes BERT's, which adds token types that DistilBERT does not use
    found = _from_hub(AutoTokenizer, size, model_input_names=["input_ids", "attention_mask"])
    if len(found) < 100:  # without its file of words, transformers makes one that knows none
        raise OSError(_missing(_HUB_DISTILBERT, _HUB_DISTILBERT, _HUB_URL, "no tokenizer.json and no vocab.txt"))
    return found


def _size(size: str | None) -> str:
    size = size or ("small" if machine.scale() == "quick" else "base")
    if size not in ("small", "base"):
        raise ValueError(f"Unknown size {size!r}; expected 'small' or 'base'.")
    return size


def _from_hub(loader: type, size: str | None, **options):
    from safetensors import SafetensorError
    from transformers.utils import logging

    local = CHECKPOINTS / "distilbert-small" if _size(size) == "small" else download.folder() / _HUB_DISTILBERT
    # a new head is meant to be new: the warning about it would be the first thing a learner reads
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return loader.from_pretrained(str(local) if local.is_dir() else _HUB_DISTILBERT, **options)
    except (*_UNREADABLE, ValueError, SafetensorError) as error:
        raise OSError(_missing(_HUB_DISTILBERT, _HUB_DISTILBERT, _HUB_URL, error)) from error
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _missing(what: str, name: str, url: str, error: Exception | str) -> str:
    reason = (str(error) or repr(error)).splitlines()[0]
    if (place := download.folder() / name).exists():
        return (
            f"{what} could not be loaded: {place} is damaged or incomplete ({reason}). "
            "Delete it, and try again online."
        )
    return (
        f"{what} could not be loaded ({reason}). Put {name} from {url} into {download.folder()}, or go online. "
        "SPEEDLAB_SCALE=quick needs no download."
    )


def _without_head(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if not name.startswith("heads.")}


def _trainable_head(model: nn.Module) -> nn.Module:
    # torchvision starts the head at zero, so that no gradient reaches the body in the first step
    nn.init.trunc_normal_(model.heads.head.weight, std=0.02)
    return model
