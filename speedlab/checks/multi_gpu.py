"""The checks of exercise 3, multi-GPU: a loop turned into DDP, and five mistakes mended in a multi-process script.

The answers' sources run on two processes, started by `multi_gpu_ranks.py` through `speedlab.launch` with a timeout.
"""

import inspect
import json
import re
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from speedlab import launch
from speedlab.checks import NotYetError, check, expect

_SCRIPT = Path(__file__).with_name("multi_gpu_ranks.py")
_RANKS = 2
_PATIENCE = 15.0


class Rows(Dataset):
    """So many rows of 6 features with a label; `read` notes, in order, which of them were asked for."""

    def __init__(self, count: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, 6, generator=generator)
        self.labels = (self.inputs.sum(dim=1) > 0).long()
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        self.read.append(int(index))
        return self.inputs[index], self.labels[index]


def make_model(seed: int) -> nn.Module:
    """A small classifier: rows (B, 6) in, logits (B, 2) out."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model: nn.Module, rows: Dataset, epochs: int, batch: int, accumulate_steps: int, lr: float) -> nn.Module:
    """The training on one process that task 1 starts from: a batch of `batch` rows a step, in micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    order = torch.Generator()
    loader = DataLoader(rows, batch // accumulate_steps, sampler=RandomSampler(rows, generator=order), drop_last=True)
    for epoch in range(epochs):
        order.manual_seed(epoch)
        for micro, (inputs, labels) in enumerate(loader, start=1):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            (loss / accumulate_steps).backward()
            if micro % accumulate_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


def on_ranks(answers: Sequence[tuple[str, str, str]], timeout: float = 240.0) -> list[list[dict]]:
    """Run answers (task, source, name of the function) on two processes: a report by answer and rank.

    An answer after which the processes can no longer talk to each other ends the list.
    """
    with tempfile.TemporaryDirectory(prefix="speedlab-") as folder:
        path = Path(folder, "answers.json")
        path.write_text(json.dumps({"answers": answers, "patience": _PATIENCE}), encoding="utf-8")
        try:
            launched = launch.run(_SCRIPT, _RANKS, path, timeout=timeout)
        except launch.LaunchError as error:
            raise NotYetError(f"The processes did not end well. {str(error).splitlines()[0]}") from None
    ranks = [json.loads(output.splitlines()[-1]) for output in launched.outputs]
    return [list(pair) for pair in zip(*ranks, strict=False)]


def _reports(task: str, answer: Callable) -> list[dict]:
    """What the answer did on each rank; a stub is not run."""
    source = textwrap.dedent(inspect.getsource(answer))
    if "raise NotImplementedError" in source:
        raise NotImplementedError
    reports = on_ranks([(task, source, answer.__name__)])[0]
    errors = [report["error"] for report in reports]
    # the rank that waited in vain speaks of the network; the other one, if it failed, of the cause
    own = [error for error in errors if error and not re.search("gloo|imed out|onnection", error)]
    if own:
        raise NotYetError(f"On rank {errors.index(own[0])} your code raised {own[0]}")
    expect(
        not any(errors),
        f"A rank waited {_PATIENCE:g} s for another one in a collective, and gave up. Every rank must make the same "
        "collectives in the same order: look for one inside a branch that only one rank takes.",
    )
    return reports


def _reference(batch: int, accumulate_steps: int, lr: float, seed: int = 0) -> torch.Tensor:
    """The weights that one process reaches on all 26 rows, in two epochs."""
    reached = train(make_model(seed), Rows(26, seed=1), 2, batch, accumulate_steps, lr)
    return nn.utils.parameters_to_vector(reached.parameters()).detach()


def _epochs(report: dict) -> tuple[list[int], list[int]]:
    """The rows that a rank read in the first epoch and in the second."""
    half = len(report["read"]) // 2
    return report["read"][:half], report["read"][half:]


@check("Task 1, from one process to many", seconds=600)
def train_ddp(answer: Callable[..., nn.Module]) -> None:
    """Equal to one process on the whole batch, each rank on its own rows, one gradient sent a step."""
    reports = _reports("train_ddp", answer)
    weights = torch.tensor([report["weights"] for report in reports])
    expect(
        torch.equal(weights[0], weights[1]),
        "The ranks end with different weights. Only a model inside DistributedDataParallel gets averaged gradients.",
    )
    expect(
        reports[0]["read"] != reports[1]["read"],
        "Both ranks read the same rows. Give the loader a DistributedSampler.",
    )
    first, second = _epochs(reports[0])
    expect(first != second, "Both epochs have the same order. Call the sampler's set_epoch in each.")
    expected = _reference(12, 3, 0.1)
    off = (weights[0] - expected).abs().max().item()
    expect(
        off < 1e-5,
        f"The weights differ by {off:.1e} from those of one process. `batch` is the batch of all ranks "
        "together, and a micro-batch is its share: batch // accumulate_steps // world_size. "
        "Is the loss divided by accumulate_steps?",
    )
    gradient, steps = 4 * weights.shape[1], 4
    expect(
        reports[0]["sent"] == steps * gradient,
        f"Rank 0 gave {reports[0]['sent']:,} bytes of gradients to all-reduces in {steps} steps; "
        f"{steps * gradient:,} are enough. Use no_sync() around every micro-batch but the last of a step.",
    )


@check("Task 2, five mistakes", seconds=600)
def mended(answer: Callable[..., dict]) -> None:
    """One hint a mistake, in the order in which a run shows them."""
    reports = _reports("mended", answer)
    first, second = _epochs(reports[0])
    expect(first != second, "One mistake that is left: both epochs have the same order of rows.")
    saves = [report["saves"] for report in reports]
    expect(
        saves == [1, 0],
        f"One mistake that is left: the ranks saved {saves[0]} and {saves[1]} times. Rank 0 should, once.",
    )
    weights = torch.tensor([report["weights"] for report in reports])
    expect(torch.equal(weights[0], weights[1]), "The ranks end with different weights. Is the model still wrapped?")
    expected = _reference(12, 1, 0.05 * _RANKS)
    expect(
        torch.allclose(weights[0], expected, atol=1e-5),
        "One mistake that is left: these are not the weights that the larger batch reaches at the larger rate. "
        "`lr` is meant for the batch of one rank; by the linear rule the rate grows with the number of ranks.",
    )
    accuracies = [report["accuracy"] for report in reports]
    held_out, model = Rows(13, seed=2), make_model(0)
    nn.utils.vector_to_parameters(expected, model.parameters())
    right = (model(held_out.inputs).argmax(dim=1) == held_out.labels).float().mean().item()
    expect(
        all(abs(accuracy - right) < 1e-4 for accuracy in accuracies),
        f"One mistake that is left: the ranks report accuracies of {accuracies[0]:.3f} and {accuracies[1]:.3f}, "
        f"and over all held-out rows it is {right:.3f}. Sum the counts over the ranks, then divide.",
    )
    losses = [report["losses"] for report in reports]
    expect(
        all(abs(a - b) < 1e-5 for a, b in zip(*losses, strict=True)),
        "The ranks report different losses. Average each over the ranks, on every rank.",
    )
