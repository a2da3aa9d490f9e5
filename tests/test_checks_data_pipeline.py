"""The checks of exercise 7 accept the solution and other right answers, see a stub, and explain planted mistakes."""

import queue
import random
import threading

import pytest
import torch

from speedlab.checks import data_pipeline as checks

NAME = "exercise-7-data-pipeline.ipynb"


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    """Planted loops that never overlap should not hold up the tests for long."""
    monkeypatch.setattr(checks, "_PATIENCE", 1.0)
    monkeypatch.setattr(checks, "_LIMIT", 5.0)


# --- Task 1 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "word"),
    [
        (lambda load, step, w: max(load / max(w, 1), step), "take turns"),
        (lambda load, step, w: load / max(w, 1) + step, "do not add up"),
        (lambda load, step, w: load + step if w == 0 else min(load / w, step), "not the faster one"),
        (lambda load, step, w: load + step if w == 0 else max(load, step), "in the long run"),
    ],
)
def test_forecast_rejects_a_wrong_time(seconds, word, rejects):
    rejects("forecast", lambda *case: (seconds(*case), 1 - case[1] / seconds(*case)), word)


@pytest.mark.parametrize(
    ("share", "word"),
    [
        (lambda load, step, seconds: load / seconds, "Divide"),
        (lambda load, step, seconds: (step - seconds) / seconds, "negative"),
        (lambda load, step, seconds: step / seconds, "Divide"),
    ],
)
def test_forecast_rejects_a_wrong_share(share, word, rejects):
    def answer(load, step, workers):
        seconds = load + step if workers == 0 else max(load / workers, step)
        return seconds, share(load, step, seconds)

    rejects("forecast", answer, word)


def test_forecast_rejects_one_number(rejects):
    rejects("forecast", lambda load, step, workers: load + step, "two numbers")


# --- Task 2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", checks.KINDS)
def test_diagnose_rejects_one_answer_for_all(kind, rejects):
    rejects("diagnose", lambda epochs: kind, "In one of the recordings")


def test_diagnose_rejects_what_is_no_kind(rejects):
    rejects("diagnose", lambda epochs: None, "Return one of")


def test_diagnose_rejects_a_reader_of_the_first_epoch_only(solution, rejects):
    def blind_to_starts(epochs):
        said = solution["diagnose"](epochs)
        return "hiccups" if said == "start" else said

    rejects("diagnose", blind_to_starts, "first steps of the epochs")


def test_a_recording_of_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="expected one of model, start"):
        checks.trace("slow")


@pytest.mark.parametrize(
    ("loop", "remedy", "word"),
    [
        ("A", "more workers", "evens out"),
        ("B", "a larger prefetch_factor", "does not speed up"),
        ("C", "more workers", "every epoch"),
        ("C", "buy a GPU", "choose one of"),
    ],
)
def test_remedies_rejects(loop, remedy, word, solution, rejects):
    rejects("remedies", lambda: {**solution["remedies"](), loop: remedy}, word)


# --- Task 3 ---------------------------------------------------------------------------------------------------------


def fill(order: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for i in order:
        grown = [*batches[-1], i] if batches else []
        if grown and len(grown) * max(lengths[j] for j in grown) <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def shuffled(items: list, generator: torch.Generator) -> list:
    return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]


def in_chunks(lengths: list[int], generator: torch.Generator, chunks: int = 4) -> list[int]:
    order = shuffled(list(range(len(lengths))), generator)
    size = -(-len(order) // chunks) or 1
    parts = [order[i : i + size] for i in range(0, len(order), size)]
    return [i for part in parts for i in sorted(part, key=lambda i: lengths[i])]


def other_way(lengths, max_tokens, generator):
    return shuffled(fill(in_chunks(lengths, generator), lengths, max_tokens), generator)


def unsorted(lengths, max_tokens, generator):
    return fill(shuffled(list(range(len(lengths))), generator), lengths, max_tokens)


def all_sorted(lengths, max_tokens, generator):
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return shuffled(fill(order, lengths, max_tokens), generator)


def one_chunk(lengths, max_tokens, generator):
    order = in_chunks(lengths, generator, chunks=1)
    return shuffled(fill(order, lengths, max_tokens), generator)


def never_shuffled_batches(lengths, max_tokens, generator):
    return fill(in_chunks(lengths, generator), lengths, max_tokens)


def one_at_a_time(lengths, max_tokens, generator):
    return [[i] for i in shuffled(list(range(len(lengths))), generator)]


def without_padding_counted(lengths, max_tokens, generator):
    batches, room = [], 0
    for i in in_chunks(lengths, generator):
        if lengths[i] > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(i)
        room -= lengths[i]
    return shuffled(batches, generator)


def own_randomness(lengths, max_tokens, generator):
    return other_way(lengths, max_tokens, torch.Generator().manual_seed(random.getrandbits(30)))


def test_bucket_batches_accepts_another_way(verdict):
    assert verdict("bucket_batches", other_way) == "correct"


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (unsorted, "padding; 20% is allowed"),
        (all_sorted, "same batches"),
        (one_chunk, "meet again"),
        (never_shuffled_batches, "shuffle the batches too"),
        (one_at_a_time, "fill each up"),
        (without_padding_counted, "it is the longest that decides"),
        (own_randomness, "same seed"),
        (lambda lengths, max_tokens, g: other_way(lengths, max_tokens, g)[:-1], "in no batch"),
        (lambda lengths, max_tokens, g: (b := other_way(lengths, max_tokens, g)) + b[:1], "more than once"),
        (lambda lengths, max_tokens, g: None if lengths else [], "list of batches"),
        (lambda lengths, max_tokens, g: other_way(lengths, max_tokens, g) or [[]], "empty list"),
    ],
)
def test_bucket_batches_rejects(answer, word, rejects):
    rejects("bucket_batches", answer, word)


# --- Task 4 ---------------------------------------------------------------------------------------------------------


def plain(load, step, count, depth=2):
    for i in range(count):
        step(load(i))


def all_at_once(load, step, count, depth=2):
    ready = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: [ready.put(load(i)) for i in range(count)])
    thread.start()
    for _ in range(count):
        step(ready.get(timeout=2))
    thread.join()


def swallows_errors(load, step, count, depth=2, *, passes_on=False):
    """The solution with its faults as options: errors of the thread lost, or the thread left behind."""
    slots, ready = threading.Semaphore(depth), queue.SimpleQueue()

    def produce():
        try:
            for i in range(count):
                slots.acquire()
                ready.put((load(i), None))
        except ValueError as error:
            ready.put((None, error if passes_on else StopIteration()))

    threading.Thread(target=produce, daemon=True).start()
    for _ in range(count):
        batch, error = ready.get()
        if isinstance(error, StopIteration):
            return
        if error:
            raise error
        slots.release()
        step(batch)


def leaves_a_thread(load, step, count, depth=2):
    swallows_errors(load, step, count, depth, passes_on=True)


def hangs_on_an_error(load, step, count, depth=2):
    slots, ready = threading.Semaphore(depth), queue.SimpleQueue()

    def produce():
        try:
            for i in range(count):
                slots.acquire()
                ready.put(load(i))
        except ValueError:
            return

    threading.Thread(target=produce, daemon=True).start()
    for _ in range(count):
        batch = ready.get()
        slots.release()
        step(batch)


def backwards(load, step, count, depth=2):
    for i in reversed(range(count)):
        step(load(i))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (plain, ("0 of 7", "another thread")),
        (all_at_once, ("ran", "ahead", "slot")),
        (swallows_errors, ("as if nothing had happened",)),
        (leaves_a_thread, ("still runs",)),
        (hangs_on_an_error, ("did not come back",)),
        (backwards, ("order",)),
        (lambda load, step, count, depth=2: [load(i) for i in range(count)], ("order",)),
        (lambda load, step, count, depth=2: None, ("were loaded",)),
    ],
)
def test_train_overlapped_rejects(answer, words, rejects):
    rejects("train_overlapped", answer, *words)
