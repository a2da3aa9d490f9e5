"""Helpers kept out of the notebook on LoRA: a training step, a training run, a figure, and a LLaMA's sizes."""

from collections.abc import Callable
from functools import cache

import students
import torch
from matplotlib.figure import Figure
from torch import nn

from speedlab import data, plots
from speedlab.data import models


def llama_sizes(width: int, hidden: int, layers: int, heads: int, rank: int) -> tuple[int, int, int]:
    """Number of weights in a LLaMA: all, those in its blocks' Linear layers, and those of adapters on these layers.

    The model is built on the meta device, which has shapes but takes no memory.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
                         num_attention_heads=heads, vocab_size=32_000)  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    inside = [m.weight for path, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in path]
    adapters = sum(rank * sum(weight.shape) for weight in inside)
    return sum(p.numel() for p in model.parameters()), sum(weight.numel() for weight in inside), adapters


@cache  # tokenizing takes half a second, and every run that is scored would repeat it
def short_test_labels(longest: int = 16) -> torch.Tensor:
    """The labels (M,) of the test reviews of at most `longest` tokens, in the order of `students.short_reviews`."""
    reviews = data.reviews("generated")
    encoded = models.tokenizer("small")(reviews.test_texts)["input_ids"]
    return reviews.test_labels[torch.tensor([len(row) <= longest for row in encoded])]


def stepper(model: nn.Module, loss_fn) -> Callable[[], None]:
    """A function that takes one AdamW step on the parameters that are not frozen."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(model).backward()
        optimizer.step()

    return step


@torch.no_grad()
def copy_to_peft(ours: nn.Module, theirs: nn.Module) -> None:
    """Copy the trained parameters of `ours` (A, B, head) into the model that peft built."""
    places = {n.replace(".default", "").replace("modules_to_save.", ""): p for n, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            name = name.replace(".A", ".lora_A.weight").replace(".B", ".lora_B.weight")
            places[f"base_model.model.{name}"].copy_(parameter)


def memory_figure(sizes: dict[str, list[float]], title: str) -> tuple[Figure, str]:
    """Stacked bars in MB of weights, gradients, optimizer state and saved bytes, and each bar's total as text."""
    fig, ax = plots.figure(8, 2.8)
    columns = torch.tensor(list(sizes.values())).T  # (kinds, targets)
    for i, kind in enumerate(("weights", "gradients", "AdamW's state", "saved for backward")):
        ax.barh(list(sizes), columns[i].tolist(), left=columns[:i].sum(0).tolist(), label=kind,
                color=plots.COLOURS[i], hatch=plots.HATCHES[i], edgecolor="white")  # fmt: skip
    ax.invert_yaxis()
    ax.set(title=title, xlabel="MB")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig, f"{title}: " + ", ".join(f"{name} {sum(parts):.1f} MB" for name, parts in sizes.items())


def accuracy(build, target: str, rate: float, seed: int = 0) -> tuple[float, float]:
    """Train `build(target, seed)` for 60 steps on short reviews; returns the accuracy in % on one half of the test
    reviews, by which the rate is chosen, and on the other half."""

    def reader() -> nn.Module:
        reader = students.Reader()
        reader.bert = build(target, seed)
        return reader

    texts, labels, unseen = students.short_reviews()
    model = students.fine_tune(reader, texts, labels, 60, rate, seed, batch=32, dropout=False)
    right = 100.0 * (students.predict(model, unseen).argmax(-1) == short_test_labels())
    return right[::2].mean().item(), right[1::2].mean().item()
