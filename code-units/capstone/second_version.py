"""The training run of first_project.py with every change that notebook 3 proved equivalent and kept.

python second_version.py --steps 20
"""

import argparse

import torch
from first_project import BATCH, HEADS, PAD, Attention, Classifier, Reviews
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple, log: list | None = None) -> torch.Tensor:
    """One step; its loss and accuracy stay on the device until somebody reads the log."""
    tokens, labels = batch
    optimizer.zero_grad()
    logits = model(tokens)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    seen = torch.stack([loss.detach(), (logits.argmax(-1) == labels).float().mean()])
    if log is not None:
        log.append(seen)
    return loss


def cut(batch: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch, cut to the length of its longest text."""
    tokens, labels = batch
    return tokens[:, : int((tokens != PAD).sum(1).max())], labels


def collate(samples: list[tuple]) -> tuple[torch.Tensor, torch.Tensor]:
    return cut((torch.stack([ids for ids, _ in samples]), torch.tensor([label for _, label in samples])))


class OneCall(Attention):
    """All heads in one call; the parameters are those of Attention."""

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None, :])  # (B, H, T, C / H)
        return self.out(mixed.transpose(1, 2).flatten(2))


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def train(steps: int, seed: int = 0, every: int = 10) -> list[float]:
    """Train from scratch; returns the losses, which are read from the device once per `every` steps."""
    torch.manual_seed(seed)
    dataset = Reviews()
    model = Classifier(len(dataset.vocabulary) + 2, OneCall)
    ready = [dataset[i] for i in range(len(dataset))]
    optimizer, losses, waiting = fused(model), [], []
    while len(losses) + len(waiting) < steps:
        for batch in DataLoader(ready, batch_size=BATCH, shuffle=True, collate_fn=collate):
            step(model, optimizer, batch, waiting)
            if len(waiting) == every or len(losses) + len(waiting) == steps:
                losses, waiting = losses + torch.stack(waiting)[:, 0].tolist(), []
            if len(losses) == steps:
                break
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small transformer to sort reviews, faster.")
    parser.add_argument("--steps", type=int, default=20)
    for number, loss in enumerate(train(parser.parse_args().steps), 1):
        print(f"step {number}: loss {loss:.4f}")
