"""What would distract in the notebook on LoRA: smaller copies of the small DistilBERT, and what they weigh."""

import copy
from collections.abc import Callable
from functools import cache, partial

import students
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F

from speedlab import data, plots
from speedlab.data import models


def cut_neurons(model: nn.Module, keep: float) -> nn.Module:
    """A copy whose feed-forward layers keep the first neurons only, physically (which ones is 9.9.4's subject)."""
    cut = copy.deepcopy(model)
    for block in cut.distilbert.transformer.layer:
        up, down = block.ffn.lin1, block.ffn.lin2
        kept = int(keep * up.out_features)
        block.ffn.lin1 = nn.Linear(up.in_features, kept)
        block.ffn.lin2 = nn.Linear(kept, down.out_features)
    return cut


def keep_layers(model: nn.Module, *kept: int) -> nn.Module:
    """A copy with these layers only."""
    cut = copy.deepcopy(model)
    cut.distilbert.transformer.layer = nn.ModuleList(cut.distilbert.transformer.layer[i] for i in kept)
    return cut


def int8_bytes(model: nn.Module) -> int:
    """Bytes of the parameters with every Linear's weight in int8, and one fp32 scale per row."""
    stored = {
        id(m.weight): m.weight.numel() + 4 * m.out_features for m in model.modules() if isinstance(m, nn.Linear)
    }
    return sum(stored.get(id(p), p.nbytes) for p in model.parameters())


def llama(width: int, hidden: int, layers: int, heads: int) -> nn.Module:
    """A LLaMA with these sizes on the meta device: shapes without memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
                         num_attention_heads=heads, vocab_size=32_000)  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@cache  # half a second of tokenizing, for every training that is scored
def short_test_labels(longest: int = 16) -> torch.Tensor:
    """The labels (M,) of the test reviews of at most so many tokens, in the order of `students.short_reviews`."""
    reviews = data.reviews("generated")
    encoded = models.tokenizer("small")(reviews.test_texts)["input_ids"]
    return reviews.test_labels[torch.tensor([len(row) <= longest for row in encoded])]


def stepper(model: nn.Module, loss_fn) -> Callable[[], None]:
    """A function that does one step of training on the parameters that are not frozen."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(model).backward()
        optimizer.step()

    return step


@torch.no_grad()
def copy_to_peft(ours: nn.Module, theirs: nn.Module) -> None:
    """Write the trained parameters of `ours` (A, B, head) into the model that peft made."""
    places = {n.replace(".default", "").replace("modules_to_save.", ""): p for n, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            name = name.replace(".A", ".lora_A.weight").replace(".B", ".lora_B.weight")
            places[f"base_model.model.{name}"].copy_(parameter)


def memory_figure(sizes: dict[str, list[float]], title: str) -> tuple[Figure, str]:
    """Stacked bars of MB: weights, gradients, optimizer state, saved bytes; and their totals as text."""
    fig, ax = plots.figure(8, 2.8)
    columns = torch.tensor(list(sizes.values())).T  # (kinds, targets)
    for i, kind in enumerate(("weights", "gradients", "AdamW's state", "saved for backward")):
        ax.barh(list(sizes), columns[i].tolist(), left=columns[:i].sum(0).tolist(), label=kind,
                color=plots.COLOURS[i], hatch=plots.HATCHES[i], edgecolor="white")  # fmt: skip
    ax.invert_yaxis()
    ax.set(title=title, xlabel="MB")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig, f"{title}: " + ", ".join(f"{name} {sum(parts):.1f} MB" for name, parts in sizes.items())


def unit_steps(logits, labels: torch.Tensor, model: nn.Module, lora: nn.Module) -> dict[str, tuple]:
    """For each technique: a step's loss, the models whose memory counts, the bytes of the weights, what decides.

    `logits(model, rows)` gives the logits of these rows of the batch.
    """
    cut, student = cut_neurons(model, 0.5), keep_layers(model, 0)

    def plain(trained: nn.Module) -> torch.Tensor:
        return F.cross_entropy(logits(trained), labels)

    def selective() -> torch.Tensor:
        with torch.no_grad():
            each = F.cross_entropy(logits(model), labels, reduction="none")
        hardest = each.topk(len(labels) // 2).indices
        return F.cross_entropy(logits(model, hardest), labels[hardest])

    def distilled() -> torch.Tensor:
        with torch.no_grad():
            theirs = logits(model)
        return F.mse_loss(logits(student), theirs)

    kept = logits(model).detach()

    def stored() -> torch.Tensor:
        return F.mse_loss(logits(student), kept)

    def weights(shown: nn.Module) -> int:
        return sum(p.nbytes for p in shown.parameters())

    return {
        "9.9.1 schedule": (partial(plain, model), model, weights(model), "rate and number of steps"),
        "9.9.2 selective backprop, half": (selective, model, weights(model), "what half of the samples teach"),
        "9.9.3 int8 weights, after training": (partial(plain, model), model, int8_bytes(model), "kernels for int8"),
        "9.9.4 half of the neurons": (partial(plain, cut), cut, weights(cut), "what is left to learn with"),
        "9.9.5 student of one layer": (
            distilled,
            nn.ModuleList([model, student]),
            weights(student),
            "who needs cheap answers",
        ),
        "9.9.5 the same, answers stored": (stored, student, weights(student), "inputs that stay the same"),
        "9.9.6 LoRA on q and v": (partial(plain, lora), lora, weights(lora), "state against activations"),
    }


def accuracy(build, target: str, rate: float, seed: int = 0) -> tuple[float, float]:
    """Train `build(target, seed)` for 60 steps on short reviews; % right on one half of the test reviews, to choose
    the rate by, and on the other half."""

    def reader() -> nn.Module:
        reader = students.Reader()
        reader.bert = build(target, seed)
        return reader

    texts, labels, unseen = students.short_reviews()
    model = students.fine_tune(reader, texts, labels, 60, rate, seed, batch=32, dropout=False)
    right = 100.0 * (students.predict(model, unseen).argmax(-1) == short_test_labels())
    return right[::2].mean().item(), right[1::2].mean().item()
