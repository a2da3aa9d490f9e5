"""The two models that notebooks 3 and 4 compile, a vision transformer and a DistilBERT, and their training data.

At scale `full` they are ViT-B/16 and DistilBERT-base with random weights, otherwise small pretrained models.
"""

import torch
from torch import nn
from torch.nn import functional as F

from speedlab import data, machine
from speedlab.data import models

FULL = machine.scale() == "full"
BATCH = 32
TOKENS = 32


def network(name: str) -> nn.Module:
    """The model named 'ViT' or 'DistilBERT' in training mode, without dropout, with the same weights every time."""
    machine.seed_everything(0)
    model = (models.vit if name == "ViT" else models.distilbert)("base" if FULL else "small", pretrained=not FULL)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model.to(machine.device()).train()


def batch(name: str, number: int = 0, rows: int = BATCH) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The model's inputs by name, images (B, 3, H, W) of digits or tokens (B, T) of reviews, and the labels (B,)."""
    chosen, device = slice(number * BATCH, number * BATCH + rows), machine.device()
    if name == "ViT":
        images, labels = data.images("digits").train.tensors
        return {"x": F.interpolate(images[chosen], size=224 if FULL else 32).to(device)}, labels[chosen].to(device)
    reviews = data.reviews("generated")
    fixed = {"padding": "max_length", "truncation": True, "max_length": TOKENS, "return_tensors": "pt"}
    tokens = models.tokenizer("small")(reviews.train_texts[chosen], **fixed).to(device)
    return dict(tokens), reviews.train_labels[chosen].to(device)


def logits(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's logits (B, K), taken out of the output object if the model comes from transformers."""
    answer = model(**inputs)
    return getattr(answer, "logits", answer)


def blocks_of(model: nn.Module) -> nn.Module:
    """The transformer blocks of either model."""
    return model.distilbert.transformer.layer if hasattr(model, "distilbert") else model.encoder.layers


def one_layout(model: nn.Module) -> nn.Module:
    """The same model. While a ViT trains, its first block's input is copied into the layout that the others get."""

    def in_token_order(dropout: nn.Module, given: tuple, x: torch.Tensor) -> torch.Tensor:
        # (B, T, C), token after token in memory, as PyTorch's attention module returns it in training
        return x.transpose(0, 1).contiguous().transpose(0, 1) if dropout.training else x

    if hasattr(model, "encoder"):
        model.encoder.dropout.register_forward_hook(in_token_order)
    return model
