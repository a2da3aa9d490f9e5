"""The training run of `resume.py` on one process, without checkpoints: the reference for all runs of that script."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

BATCH, ROWS = 24, 96  # rows per step, over all processes; rows per epoch


def build(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 4))


def rows_to_learn() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(ROWS, 16, generator=generator), torch.randint(4, (ROWS,), generator=generator))


def train(steps: int) -> tuple[list[float], nn.Module]:
    """The loss of each step, and the trained model."""
    model, (inputs, labels), losses = build(dropout=0.0), rows_to_learn().tensors, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * 0.95**step
        epoch, place = divmod(step, ROWS // BATCH)
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))  # as DistributedSampler shuffles
        chosen = order[place * BATCH : (place + 1) * BATCH]
        loss = nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model
