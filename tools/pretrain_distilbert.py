"""Pretrain the small DistilBERT from scratch on masked words of generated reviews, in minutes on one core.

Run it from the repository root; it replaces the checkpoint that ships with speedlab:

    python -m tools.pretrain_distilbert

It trains on texts of one to four reviews with the same sentiment, as if one writer had liked everything or nothing:
from such texts, a model can learn which words go together. The grammar's labels decide which reviews share a text;
beyond that, the model neither sees nor predicts a label. The reviews come from seeds that no lesson uses (lessons
use seeds below 1,000).
"""

import argparse
import hashlib
import random
import shutil
import string
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer
from torch.nn import functional as F
from transformers import DistilBertConfig, DistilBertForMaskedLM, DistilBertTokenizer

from speedlab.data import grammar

FIRST_SEED = 1000
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY, LONGEST = 2000, 256
REVIEWS, MOST_REVIEWS, BATCH = 120_000, 4, 32
MASKED = 0.2
CHECKPOINT = Path(__file__).resolve().parent.parent / "speedlab" / "data" / "checkpoints" / "distilbert-small"


def fingerprint() -> str:
    """Return a digest of the grammar's sentences; the checkpoint stores that of the grammar it was trained on."""
    sentences = "\n".join(text for text, _ in grammar.generate(1000, FIRST_SEED))
    return hashlib.sha256(sentences.encode()).hexdigest()


def writings(seed: int) -> list[str]:
    """Return texts of one to MOST_REVIEWS reviews each; a text's reviews vary in subject, but share one mood."""
    rng = random.Random(seed)
    reviews = grammar.generate(REVIEWS, FIRST_SEED + seed)
    texts = []
    for mood in (0, 1):
        left = [text for text, label in reviews if label == mood]
        while left:
            # Several lengths train near and far positions, and include single reviews, which the lessons use.
            count = rng.randint(1, MOST_REVIEWS)
            texts.append(" ".join(left[-count:]))
            del left[-count:]
    return texts


def train_tokenizer(texts: list[str]) -> DistilBertTokenizer:
    """Learn a lower-cased WordPiece vocabulary that can spell any English word, not only the grammar's."""
    # Letters and digits are needed at the start of a word and inside one ("##"), even if no sentence has them there.
    letters = string.ascii_lowercase + string.digits + string.punctuation + "£€–—‘’“”…"
    alphabet = [*letters, *(f"##{letter}" for letter in string.ascii_lowercase + string.digits)]
    learner = Tokenizer(WordPiece(unk_token="[UNK]"))
    learner.normalizer, learner.pre_tokenizer = BertNormalizer(lowercase=True), BertPreTokenizer()
    trainer = WordPieceTrainer(
        vocab_size=VOCABULARY - len(alphabet), show_progress=False, initial_alphabet=list(letters)
    )
    learner.train_from_iterator(texts, trainer)
    # Sorted, because the trainer guarantees no order for pieces of equal count.
    learned = sorted(set(learner.get_vocab()) - set(alphabet) - set(SPECIAL))
    pieces = [*SPECIAL, *alphabet, *learned]
    return DistilBertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, model_max_length=LONGEST)


def word_vectors(rows: list[list[int]], vocabulary: int, dim: int) -> torch.Tensor:
    """Return one vector per piece, (V, dim), from which pieces share texts: factorized positive mutual information.

    The embeddings start from them. From random ones, 3,000 steps on masked words learned the patterns of the
    grammar, but not which words praise: while no word's sentiment is known, none helps to guess another word's.
    """
    together = torch.zeros(vocabulary, vocabulary)
    for start in range(0, len(rows), 2000):
        holds = torch.zeros(min(2000, len(rows) - start), vocabulary)
        for text, row in zip(holds, rows[start:], strict=False):
            text[row] = 1
        together += holds.T @ holds
    together.fill_diagonal_(0)
    alone = together.sum(dim=1)
    by_chance = (alone[:, None] * alone / alone.sum()).clamp(min=1e-9)
    values, vectors = torch.linalg.eigh((together / by_chance).clamp(min=1).log())
    strongest = values.abs().argsort(descending=True)[:dim]
    return vectors[:, strongest] * values[strongest].abs().sqrt()


def batches(rows: list[list[int]], pad: int, rng: random.Random) -> Iterator[torch.Tensor]:
    """Yield (B, T) token ids forever; texts of similar length share a batch, so that little of it is padding."""
    while True:
        rng.shuffle(rows)
        rows.sort(key=len)
        groups = [rows[start : start + BATCH] for start in range(0, len(rows) - BATCH + 1, BATCH)]
        rng.shuffle(groups)
        for group in groups:
            yield torch.tensor([row + [pad] * (len(group[-1]) - len(row)) for row in group])


def mask(tokens: torch.Tensor, mask_id: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return corrupted tokens and where to guess, both (B, T): 80% masked there, 10% random, 10% kept, as in BERT."""
    chosen = (torch.rand(tokens.shape) < MASKED) & (tokens >= len(SPECIAL))
    fate = torch.rand(tokens.shape)
    corrupted = torch.where(chosen & (fate < 0.8), mask_id, tokens)
    words = torch.randint(len(SPECIAL), vocabulary, tokens.shape)
    return torch.where(chosen & (fate >= 0.9), words, corrupted), chosen


def pretrain(steps: int, seed: int) -> tuple[DistilBertForMaskedLM, DistilBertTokenizer]:
    """Train for `steps` steps, each on a batch of texts with freshly masked words; return model and tokenizer."""
    start = time.perf_counter()
    torch.manual_seed(seed)
    texts = writings(seed)
    tokenizer = train_tokenizer(texts)
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=LONGEST,
        dim=128,
        n_layers=3,
        n_heads=4,
        hidden_dim=512,
        pad_token_id=tokenizer.pad_token_id,
        grammar_sha256=fingerprint(),
    )
    # In eval mode throughout: words are masked anew each time, and dropout would only slow down learning.
    model = DistilBertForMaskedLM(config).eval()
    rows = tokenizer(texts)["input_ids"]
    embeddings = model.distilbert.embeddings.word_embeddings.weight
    vectors = word_vectors(rows, len(tokenizer), config.dim)
    with torch.no_grad():
        embeddings.copy_(vectors * config.initializer_range / vectors.std())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps, pct_start=0.1)
    stream = batches(rows, tokenizer.pad_token_id, random.Random(seed))
    print(f"{len(texts):,} texts, {len(tokenizer):,} pieces, {model.num_parameters():,} parameters", flush=True)
    right = guessed = 0
    for step in range(1, steps + 1):
        tokens = next(stream)  # (B, T)
        corrupted, chosen = mask(tokens, tokenizer.mask_token_id, len(tokenizer))
        attended = (tokens != tokenizer.pad_token_id).long()
        hidden = model.distilbert(input_ids=corrupted, attention_mask=attended).last_hidden_state[chosen]
        # The head runs only at the positions to guess: at the others, its work would be wasted.
        logits = model.vocab_projector(model.vocab_layer_norm(model.activation(model.vocab_transform(hidden))))
        loss = F.cross_entropy(logits, tokens[chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        right += (logits.argmax(dim=1) == tokens[chosen]).sum().item()
        guessed += len(logits)
        if step % 250 == 0 or step == steps:
            print(
                f"step {step:6,d} of {steps:,}  loss {loss.item():.3f}  "
                f"guessed right {right / guessed:.3f}  {time.perf_counter() - start:.0f} s",
                flush=True,
            )
            right = guessed = 0
    return model, tokenizer


def save(model: DistilBertForMaskedLM, tokenizer: DistilBertTokenizer, out: Path) -> None:
    """Write the folder in Hugging Face's layout under a temporary name, then move it into place."""
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    old = out.with_name(f"{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    part.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    for path in sorted(out.iterdir()):
        path.chmod(0o644)  # only the owner can read what safetensors writes, and a container may run as another user
        print(f"wrote {path.name}: {path.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    """Read the command line, pretrain, and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000, help=f"optimizer steps, each on {BATCH} texts")
    args = parser.parse_args()
    # With matrices this small, a second thread gains little, and loses much if another process needs the core.
    torch.set_num_threads(1)
    save(*pretrain(args.steps, args.seed), args.out)


if __name__ == "__main__":
    main()
