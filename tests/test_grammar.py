"""The generated reviews and the small DistilBERT that was pretrained on them."""

import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from speedlab.data import grammar
from tools.pretrain_distilbert import fingerprint

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "speedlab" / "data" / "checkpoints" / "distilbert-small"
ENTRIES = [entry for kind in grammar.POLAR.values() for entries in kind for entry in entries]
NEUTRAL_ENTRIES = [entry for entries in grammar.NEUTRAL.values() for entry in entries]


@pytest.fixture(scope="module")
def reviews():
    """Return the lessons' split: 2,000 reviews to train on and 1,000 to test on."""
    return grammar.split(2000, 1000, seed=0)


def printed_in_new_process(code: str, hash_seed: str) -> str:
    """Return what Python code prints in a process of its own, whose sets and dicts are hashed with the given seed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed, "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_same_seed_gives_the_same_bytes_in_every_process():
    code = "from speedlab.data import grammar; print(grammar.split(300, 100, seed=5))"
    first, second = (printed_in_new_process(code, hash_seed) for hash_seed in ("1", "2"))
    assert first == second == f"{grammar.split(300, 100, seed=5)}\n"
    assert grammar.split(300, 100, seed=5) != grammar.split(300, 100, seed=6)


def test_generate_is_the_training_half_of_split():
    assert grammar.generate(50, seed=3) == grammar.split(50, 20, seed=3)[0]


def test_there_are_enough_patterns_and_words():
    assert len(set(grammar.PATTERNS)) == len(grammar.PATTERNS) >= 60
    assert len(set(ENTRIES)) == len(ENTRIES) >= 420, "a word stands in two tables, or there are too few"
    for kind, (negative, positive) in grammar.POLAR.items():
        assert len(negative) == len(positive), f"{kind} has more words of one polarity"
    # A verb's three forms are all there: a missing one would give "drags" for "dragged".
    forms = {kind: {entry.count("/") for side in sides for entry in side} for kind, sides in grammar.POLAR.items()}
    assert all(forms[kind] == {2} for kind in ("verb", "touch", "love", "treat")) and forms["land"] == {1}


@pytest.mark.parametrize("label", [0, 1])
def test_every_pattern_expands_and_depends_on_its_label(label):
    for pattern in grammar.PATTERNS:
        text = grammar.expand(pattern, label, grammar.random.Random(pattern))
        assert "{" not in text and "/" not in text, text
        assert text != grammar.expand(pattern, 1 - label, grammar.random.Random(pattern)), text
        assert set(re.findall(r"[~?]?(?:adj|gradable|player|comp|noun|things|mass|verb|touch|love)", pattern)) or (
            "{react}" in pattern or "{~land.s}" in pattern
        )


def test_no_review_repeats_and_none_stands_in_both_lists(reviews):
    train, test = ([text for text, _ in rows] for rows in reviews)
    assert (len(train), len(test)) == (2000, 1000)
    assert len(set(train) | set(test)) == 3000


@pytest.mark.parametrize("count", [0, 1, 2, 7, 500])
def test_labels_are_balanced_and_shuffled(count):
    labels = [label for _, label in grammar.generate(count, seed=1)]
    assert len(labels) == count and set(labels) <= {0, 1}
    assert abs(2 * sum(labels) - count) <= 1
    if count == 500:
        assert 150 < sum(a == b for a, b in itertools.pairwise(labels)) < 350, "the labels alternate"


def test_reviews_read_as_sentences(reviews):
    vocabulary = set(re.findall(r"[a-zé]+", " ".join(ENTRIES + NEUTRAL_ENTRIES).lower()))
    for text, _ in reviews[0] + reviews[1]:
        words = text.split()
        assert 4 <= len(words) <= 32, text
        assert re.fullmatch(r"[A-Z][^{}~/]*[.!]", text) and "  " not in text, text
        assert not re.search(r"[.?!] [a-z]|[ ][,.;:?!]|[,.;:?!]{2}", text), text
        assert not re.search(r"\b(\w+) \1\b", text, re.IGNORECASE), f"a doubled word: {text}"
        twice = [word for word, times in Counter(re.findall(r"[a-zé]{4,}", text.lower())).items() if times > 1]
        assert not vocabulary.intersection(twice), f"{twice} used twice: {text}"


def test_a_and_an_agree_with_the_next_word(reviews):
    # The rule goes by spelling, so no entry may start with a vowel letter but a consonant sound, or the reverse.
    odd = r"(eu|uni(?![nm])|use|usu|usa|ute|uto|one|once|hour|honest|honou?r|heir)"
    after_article = [e for e in ENTRIES + NEUTRAL_ENTRIES if re.match(odd, e.lower()) and e != "honest tears"]
    assert not after_article, f"{after_article} would get the wrong article"
    for text, _ in reviews[0] + reviews[1]:
        assert not re.search(r"\ba [aeiou]|\ban (?!hour)[^aeiou]", text, re.IGNORECASE), text


def test_lengths_spread(reviews):
    lengths = sorted(len(text.split()) for text, _ in reviews[0])
    tenth, median, ninetieth = (lengths[int(len(lengths) * share)] for share in (0.1, 0.5, 0.9))
    assert tenth < 0.75 * median and ninetieth > 1.5 * median, (tenth, median, ninetieth)


def test_a_bag_of_words_does_better_than_chance_but_not_well(reviews):
    (train, train_labels), (test, test_labels) = (zip(*rows, strict=True) for rows in reviews)
    counter = CountVectorizer()
    model = LogisticRegression(max_iter=1000).fit(counter.fit_transform(train), train_labels)
    accuracy = model.score(counter.transform(test), test_labels)
    assert 0.60 < accuracy < 0.84, f"a bag of words gets {accuracy:.3f}"


def test_words_around_the_sentiment_give_nothing_away(reviews):
    # Every pattern serves both labels, so with its words of sentiment blanked a review says nothing of its label.
    sentiment = {form for entry in ENTRIES for form in re.findall(r"[a-z]+", entry.lower())}
    sentiment -= {"the", "it", "to", "a", "for", "my", "in", "on", "and", "all", "there", "home", "out", "way"}

    def blanked(text: str) -> str:
        return " ".join(word for word in re.findall(r"[a-z]+", text.lower()) if word not in sentiment)

    (train, train_labels), (test, test_labels) = (zip(*rows, strict=True) for rows in reviews)
    counter = CountVectorizer()
    model = LogisticRegression(max_iter=1000, C=0.1).fit(counter.fit_transform(map(blanked, train)), train_labels)
    accuracy = model.score(counter.transform(map(blanked, test)), test_labels)
    assert abs(accuracy - 0.5) < 0.06, f"function words alone get {accuracy:.3f}"


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda: grammar.generate(-1, seed=0), "count=-1"),
        (lambda: grammar.generate(2.5, seed=0), "count=2.5"),
        (lambda: grammar.split(10, -3, seed=0), "test=-3"),
        (lambda: grammar.generate(grammar.MOST + 1, seed=0), f"{grammar.MOST:,}"),
        (lambda: grammar.split(grammar.MOST, 1, seed=0), f"{grammar.MOST:,}"),
    ],
)
def test_impossible_requests_are_refused_in_one_sentence(ask, named):
    with pytest.raises(ValueError) as refusal:
        ask()
    message = str(refusal.value)
    assert named in message and "ask for" in message and message.endswith(".") and "\n" not in message


def test_the_checkpoint_was_trained_on_this_grammar():
    model = AutoModelForMaskedLM.from_pretrained(CHECKPOINT)
    assert model.config.grammar_sha256 == fingerprint(), (
        "the grammar changed: run python -m tools.pretrain_distilbert"
    )


def test_the_checkpoint_loads_from_its_folder_alone():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        CHECKPOINT, num_labels=2, output_loading_info=True
    )
    new = {name.split(".")[0] for name in loading["missing_keys"]}
    assert new == {"pre_classifier", "classifier"}, f"the body was not loaded: {new}"
    tokens = tokenizer(["Never dull.", "A longer one, and not without charm."], padding=True, return_tensors="pt")
    assert model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits.shape == (2, 2)
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < 4.5e6
    for path in CHECKPOINT.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert str(ROOT) not in text and "/tmp" not in text and "name_or_path" not in text, path.name


def test_the_tokenizer_can_spell_any_word_and_keeps_most_of_the_grammars_whole(reviews):
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    odd = "Zyxqv's 1,984-seat café (unheard-of!) cost $7.50 & 3% more; “jazz” — quokkas@home? <br /> [x] #1 ~ a_b*c"
    assert tokenizer.unk_token_id not in tokenizer(odd)["input_ids"]
    assert tokenizer.decode(tokenizer("An Unheard-of quokka")["input_ids"], skip_special_tokens=True) == (
        "an unheard - of quokka"
    )
    words = [word for text, _ in reviews[0] for word in re.findall(r"[a-z]+", text.lower())]
    assert sum(len(tokenizer.tokenize(word)) for word in words) / len(words) < 1.1


def test_masked_words_are_guessed_far_better_than_chance():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForMaskedLM.from_pretrained(CHECKPOINT).eval()
    held_out = [text for text, _ in grammar.generate(200, seed=999)]
    tokens = tokenizer(held_out, padding=True, return_tensors="pt")
    words = tokens["input_ids"]  # (B, T)
    torch.manual_seed(0)
    chosen = (torch.rand(words.shape) < 0.15) & (words >= len(tokenizer.all_special_tokens))
    with torch.inference_mode():
        logits = model(words.masked_fill(chosen, tokenizer.mask_token_id), tokens["attention_mask"]).logits
    right = (logits.argmax(dim=-1) == words)[chosen].float().mean().item()
    most_frequent = words[chosen].bincount().max().item() / chosen.sum().item()
    assert right > most_frequent + 0.2, f"{right:.3f} right; always the commonest word: {most_frequent:.3f}"
