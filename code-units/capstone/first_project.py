"""Sort reviews into positive and negative: someone's first training script, as it grew.

python first_project.py --steps 20
"""

import argparse
import re

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from speedlab import data
from speedlab.diagnose import Job

LONGEST, WIDTH, HEADS, LAYERS, BATCH = 128, 64, 4, 2, 16
PAD, UNKNOWN = 0, 1


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+|[^a-z\s]", text.lower())


class Reviews(Dataset):
    """Padded token ids (LONGEST,) and a label per review; each request for a sample looks up its words one by one."""

    def __init__(self, count: int = 320):
        reviews = data.reviews("generated")
        self.texts, self.labels = reviews.train_texts[:count], reviews.train_labels[:count]
        known = sorted({word for text in self.texts for word in words(text)})
        self.vocabulary = {word: number for number, word in enumerate(known, UNKNOWN + 1)}

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        ids = []
        for word in words(self.texts[i]):
            ids.append(self.vocabulary.get(word, UNKNOWN))
        ids = ids[:LONGEST]
        ids = ids + [PAD] * (LONGEST - len(ids))
        return torch.tensor(ids), int(self.labels[i])


class Attention(nn.Module):
    """Self-attention, one head after another; (B, T, C) -> (B, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        size, heads = WIDTH // HEADS, []
        for h in range(HEADS):
            part = slice(h * size, (h + 1) * size)
            scores = q[..., part] @ k[..., part].transpose(1, 2) / size**0.5  # (B, T, T)
            scores = scores.masked_fill(~real[:, None, :], float("-inf"))
            heads.append(scores.softmax(dim=-1) @ v[..., part])
        return self.out(torch.cat(heads, dim=-1))


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), real)
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    """A small transformer; tokens (B, T) -> logits (B, 2)."""

    def __init__(self, vocabulary: int, attention: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList([Block(attention) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        real = tokens != PAD
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, real)
        x = (self.norm(x) * real[..., None]).sum(1) / real.sum(1, keepdim=True)  # the mean over real tokens
        return self.head(x)


def loss_fn(model: nn.Module, batch: tuple) -> torch.Tensor:
    tokens, labels = batch
    return F.cross_entropy(model(tokens), labels)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple, log: list | None = None) -> torch.Tensor:
    """One step, with its loss and accuracy logged; returns the loss."""
    tokens, labels = batch
    optimizer.zero_grad()
    logits = model(tokens)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    accuracy = (logits.argmax(-1) == labels).float().mean().item()
    entry = {"loss": loss.item(), "accuracy": accuracy}
    if log is not None:
        log.append(entry)
    return loss


def train(steps: int, seed: int = 0) -> list[dict]:
    """Train from scratch and return the log: the loss and accuracy of every step."""
    torch.manual_seed(seed)
    dataset = Reviews()
    model = Classifier(len(dataset.vocabulary) + 2)
    optimizer, log = make_optimizer(model), []
    while len(log) < steps:
        for batch in DataLoader(dataset, batch_size=BATCH, shuffle=True):
            step(model, optimizer, batch, log)
            if len(log) == steps:
                break
    return log


def build() -> Job:
    """The training step, for `python -m speedlab.diagnose first_project.py:build`."""
    dataset = Reviews()
    ready = [dataset[i] for i in range(len(dataset))]
    tokens, labels = torch.stack([t for t, _ in ready]), torch.tensor([label for _, label in ready])

    def make_batch(size: int) -> tuple:
        rows = torch.randint(len(tokens), (size,))
        return tokens[rows], labels[rows]

    return Job(
        make_model=lambda: Classifier(len(dataset.vocabulary) + 2),
        make_batch=make_batch,
        loss_fn=loss_fn,
        make_optimizer=make_optimizer,
        batch_size=BATCH,
        loader=DataLoader(dataset, batch_size=BATCH, shuffle=True),
        step=step,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small transformer to sort reviews.")
    parser.add_argument("--steps", type=int, default=20)
    for number, entry in enumerate(train(parser.parse_args().steps), 1):
        print(f"step {number}: loss {entry['loss']:.4f}, accuracy {entry['accuracy']:.2f}")
