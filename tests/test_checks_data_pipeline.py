"""The checks of exercise 7 accept what is right in any style, see a stub, and name the fault of what is wrong."""

import itertools
import json
import operator
import queue
import random
import re
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from notebook_answers import attacks, defined, named
from notebooks import ROOT

from speedlab.checks import data_pipeline as checks

NAME = "exercise-7-data-pipeline.ipynb"
TASKS = ("forecast", "diagnose", "remedies", "bucket_batches", "train_overlapped")


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    """Planted loops that never overlap, or never end, should not hold up the tests for long."""
    monkeypatch.setattr(checks, "_PATIENCE", 1.0)
    monkeypatch.setattr(checks, "_LIMIT", 3.0)


def prose_of(name: str) -> list[list[str]]:
    cells = json.loads((ROOT / "solutions" / name).read_text(encoding="utf-8"))["cells"]
    return [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_is_correct_and_the_stub_not_attempted(task, solution, stub, verdict):
    assert verdict(task, solution[task]) == "correct"
    assert verdict(task, stub[task]) == "not attempted yet"


# --- Task 1 ---------------------------------------------------------------------------------------------------------


def seconds(load, step, workers):
    return load + step if workers == 0 else max(load / workers, step)


def share(load, step, workers):
    return 1 - step / seconds(load, step, workers)


def with_seconds(wrong):
    return lambda *case: (wrong(*case), share(*case))


def with_share(wrong):
    return lambda *case: (seconds(*case), wrong(*case))


FORECASTS = {
    "a list": lambda *case: [seconds(*case), share(*case)],
    "numpy": lambda *case: np.array([seconds(*case), share(*case)]),
    "numbers of numpy": lambda *case: (np.float64(seconds(*case)), np.float32(share(*case))),
    "arrays without dimensions": lambda *case: (np.array(seconds(*case)), np.array(share(*case))),
    "tensors": lambda *case: (torch.tensor(seconds(*case)), torch.tensor([share(*case)])),
    "the share in fp32": with_share(lambda *case: 1 - case[1] / torch.tensor(seconds(*case)).item()),
    "a tensor": lambda *case: torch.tensor([seconds(*case), share(*case)], dtype=torch.float64),
    "fractions": lambda *case: (Fraction(seconds(*case)), Fraction(share(*case))),
    "the wait over the whole": lambda load, step, w: (
        (t := seconds(load, step, w)),
        (load if w == 0 else max(0, load / w - step)) / t,
    ),
}
WRONG_FORECASTS = {
    "always overlapping": (with_seconds(lambda load, step, w: max(load / max(w, 1), step)), "take turns"),
    "added": (with_seconds(lambda load, step, w: load / max(w, 1) + step), "do not add"),
    "the faster": (
        with_seconds(lambda load, step, w: load + step if w == 0 else min(load / w, step)),
        "not the faster",
    ),
    "one worker": (with_seconds(lambda load, step, w: load + step if w == 0 else max(load, step)), "make more"),
    "milliseconds": (with_seconds(lambda *case: 1000 * seconds(*case)), "return seconds"),
    "workers as a power of two": (
        with_seconds(lambda load, step, w: seconds(load, step, 2 ** (w.bit_length() - 1) if w else 0)),
        "workers=3",
    ),
    "rounded seconds": (with_seconds(lambda *case: round(seconds(*case), 2)), "workers=3", "Do not round"),
    "the share first": (lambda *case: (share(*case), seconds(*case)), "seconds come first"),
    "steps per second": (with_seconds(lambda *case: 1 / seconds(*case)), "steps per second"),
    "one worker too many": (
        with_seconds(lambda load, step, w: load + step if w == 0 else max(load / (w + 1), step)),
        "Which takes longer",
    ),
    "nan": (with_seconds(lambda *case: float("nan")), "nan"),
    "the load over the step": (with_share(lambda load, step, w: load / seconds(load, step, w)), "Divide the waiting"),
    "the working share": (with_share(lambda *case: 1 - share(*case)), "in which it works"),
    "percent": (with_share(lambda *case: 100 * share(*case)), "not percent"),
    "negative": (with_share(lambda *case: -share(*case) - 0.1), "never negative"),
    "rounded": (with_share(lambda *case: round(share(*case), 3)), "Do not round"),
    "a share that is nan": (with_share(lambda *case: float("nan")), "share of waiting", "nan"),
    "one number": (lambda *case: seconds(*case), "list of 2"),
    "three numbers": (lambda *case: (seconds(*case), share(*case), 0), "2 things"),
    "nothing": (lambda *case: None, "None"),
    "text": (lambda *case: ("1 s", "50%"), "number"),
}


@pytest.mark.parametrize("answer", named(FORECASTS))
def test_forecast_accepts(answer, verdict):
    assert verdict("forecast", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), attacks(WRONG_FORECASTS))
def test_forecast_rejects(answer, words, rejects):
    rejects("forecast", answer, *words)


# --- Task 2 ---------------------------------------------------------------------------------------------------------


def share_of_first(epoch):
    total = sum(got - asked for asked, got, _ in epoch)
    return (epoch[0][1] - epoch[0][0]) / total if total else 0.0


def starting(starts):
    """The solution, but for what it calls "start"."""

    def diagnose(epochs):
        kind = reader(start=9)(epochs)
        return "start" if kind != "model" and starts(epochs) else kind

    return diagnose


def every_so_many(epochs):
    waits = [got - asked for epoch in epochs for asked, got, _ in epoch]
    return sum(waits[:: len(epochs[0])]) >= sum(waits) / 2


def reader(few=0.1, start=0.5, late=0.5, longest=10, least=1, whole="span", epochs_read=None, more=operator.ge):
    """The solution, with its thresholds as options."""

    def diagnose(epochs):
        epochs = epochs[:epochs_read]
        waits = [got - asked for epoch in epochs for asked, got, _ in epoch]
        steps = [step for epoch in epochs for step in epoch]
        total = {
            "span": epochs[-1][-1][2] - epochs[0][0][0],
            "steps": sum(done - asked for asked, _, done in steps),
            "training": sum(done - got for _, got, done in steps),
            "to the last asked": epochs[-1][-1][0] - epochs[0][0][0],
            "to the last got": epochs[-1][-1][1] - epochs[0][0][0],
            "from the first got": epochs[-1][-1][2] - epochs[0][0][1],
        }[whole]
        if sum(waits) < few * total:
            return "model"
        if sum(epoch[0][1] - epoch[0][0] for epoch in epochs) >= start * sum(waits):
            return "start"
        if more(sum(sorted(waits)[-max(least, len(waits) // longest) :]), late * sum(waits)):
            return "hiccups"
        return "loader"

    return diagnose


def with_numpy(epochs):
    steps = np.array([step for epoch in epochs for step in epoch])
    waits = steps[:, 1] - steps[:, 0]
    if waits.sum() < 0.1 * (steps[-1, 2] - steps[0, 0]):
        return "model"
    if np.sum([epoch[0][1] - epoch[0][0] for epoch in epochs]) >= waits.sum() / 2:
        return "start"
    return "hiccups" if np.sort(waits)[::-1][: max(1, waits.size // 10)].sum() >= waits.sum() / 2 else "loader"


def clearing(epochs):
    kind = reader()(epochs)
    epochs.clear()
    return kind


def hiccups_first(epochs):
    kind = reader(start=9)(epochs)
    return reader()(epochs) if kind == "loader" else kind


def total_of(epochs):
    return epochs[-1][-1][2] - epochs[0][0][0]


def by_the_longest_steps(epochs):
    """Looks at the steps that took longest, not at those that waited longest."""
    took = sorted((done - asked, got - asked) for epoch in epochs for asked, got, done in epoch)
    waits = [wait for _, wait in took]
    first = sum(epoch[0][1] - epoch[0][0] for epoch in epochs)
    if sum(waits) < 0.1 * total_of(epochs):
        return "model"
    if first >= 0.5 * sum(waits):
        return "start"
    return "hiccups" if sum(waits[-max(1, len(waits) // 10) :]) >= 0.5 * sum(waits) else "loader"


def from_done_to_got(epochs):
    """A wait begins where the step before was done, not where the next batch was asked for."""
    return reader()([
        [(epoch[i - 1][2] if i else asked, got, done) for i, (asked, got, done) in enumerate(epoch)]
        for epoch in epochs
    ])  # fmt: skip


WRONG_READERS = {
    "the longest steps": (by_the_longest_steps, "longest steps wait little"),
    "from done to got": (from_done_to_got, "logs after each step"),
    **{f"always {kind}": (lambda epochs, kind=kind: kind, "of the whole time") for kind in checks.KINDS},
    "model below 2%": (reader(few=0.02), "'model'"),
    "model below 20%": (reader(few=0.2), "11"),
    "start from 40%": (reader(start=0.4), "'start'"),
    "start from 60%": (reader(start=0.6), "'start'"),
    "hiccups from 40%": (reader(late=0.4), "'hiccups'"),
    "hiccups from 60%": (reader(late=0.6), "'hiccups'"),
    "the longest fifth": (reader(longest=5), "longest"),
    "the longest thirtieth": (reader(longest=30), "longest"),
    "not at least one": (reader(least=0), "seven steps"),
    "without pauses": (reader(whole="steps"), "pauses"),
    "training time only": (reader(whole="training"), "9"),
    **{f"the time {span}": (reader(whole=span), "four steps") for span in ("to the last asked", "to the last got")},
    "the time from the first got": (reader(whole="from the first got"), "four steps"),
    "more than half in the longest tenth": (reader(more=operator.gt), "exactly half", "late step"),
    "start in all epochs": (
        starting(lambda epochs: all(share_of_first(x) >= 0.5 for x in epochs)),
        "its first epoch",
    ),
    "start in any epoch": (starting(lambda epochs: any(share_of_first(x) >= 0.5 for x in epochs)), "its first epoch"),
    "the mean of the epochs": (
        starting(lambda epochs: sum(map(share_of_first, epochs)) >= 0.5 * len(epochs)),
        "its first epoch",
    ),
    "the start of the first epoch": (starting(lambda epochs: share_of_first(epochs[0]) >= 0.5), "its last epoch"),
    "the start of the last epoch": (starting(lambda epochs: share_of_first(epochs[-1]) >= 0.5), "its first epoch"),
    "every epoch as long as the first": (starting(every_so_many), "different lengths"),
    "the first epoch": (reader(epochs_read=1), "first epoch"),
    "hiccups first": (hiccups_first, "'start'"),
    "no kind": (lambda epochs: "gpu", "return one of"),
    "nothing": (lambda epochs: None, "return one of"),
    "a list": (lambda epochs: ["model"], "return one of"),
}


@pytest.mark.parametrize("answer", named({"options": reader(), "numpy": with_numpy, "one that clears": clearing}))
def test_diagnose_accepts(answer, verdict):
    assert verdict("diagnose", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), attacks(WRONG_READERS))
def test_diagnose_rejects(answer, words, rejects):
    rejects("diagnose", answer, *words)


def test_a_recording_of_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="expected one of model, start"):
        checks.trace("slow")


@pytest.mark.parametrize(
    ("loop", "remedy", "word"),
    [
        ("A", "more workers", "deepens its reserve"),
        ("B", "a larger prefetch_factor", "adds no speed"),
        ("B", "a faster model", "would only wait longer"),
        ("C", "more workers", "every epoch"),
        ("C", "buy a GPU", "none of the options"),
        ("C", None, "none of the options"),
    ],
)
def test_remedies_rejects(loop, remedy, word, solution, rejects):
    rejects("remedies", lambda: {**solution["remedies"](), loop: remedy}, word)


# --- Task 3 ---------------------------------------------------------------------------------------------------------


def filled(order: list[int], lengths: list[int], budget: int, over: int = 0) -> list[list[int]]:
    batches: list[list[int]] = []
    longest = budget + 1
    for i in order:
        longest = max(longest, lengths[i])
        if not batches or (len(batches[-1]) + 1) * longest > budget + over:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(i)
    return batches


def drawn(items: list, generator: torch.Generator) -> list:
    return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]


def packing(chunks=4, shuffle=drawn, over=0, size=None):
    """The solution, with its parts as options."""

    def answer(lengths, budget, generator):
        order = drawn(list(range(len(lengths))), generator)
        step = size or -(-len(order) // chunks) or 1
        parts = [order[i : i + step] for i in range(0, len(order), step)]
        in_chunks = [i for part in parts for i in sorted(part, key=lambda i: lengths[i])]
        return shuffle(filled(in_chunks, lengths, budget, over), generator)

    return answer


right_packing = packing()


def with_tensors(lengths, budget, generator):
    return tuple(torch.tensor(batch) for batch in right_packing(lengths, budget, generator))


def as_a_generator(lengths, budget, generator):
    yield from right_packing(lengths, budget, generator)


def from_longest(lengths, budget, generator):
    batches = []
    for part in torch.randperm(len(lengths), generator=generator).tensor_split(5):
        batch = []
        for i in sorted(part.tolist(), key=lambda i: -lengths[i]):
            if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
                batches.append(batch)
                batch = []
            batch.append(np.int64(i))
        batches += [batch] if batch else []
    return drawn(batches, generator)


def unsorted(lengths, budget, generator):
    return filled(drawn(list(range(len(lengths))), generator), lengths, budget)


def all_sorted(lengths, budget, generator):
    return drawn(filled(sorted(range(len(lengths)), key=lengths.__getitem__), lengths, budget), generator)


def sums_of_lengths(lengths, budget, generator):
    batches, room = [], 0
    for i in sorted(drawn(list(range(len(lengths))), generator), key=lambda i: lengths[i]):
        if lengths[i] > room:
            batches.append([])
            room = budget
        batches[-1].append(i)
        room -= lengths[i]
    return drawn(batches, generator)


def sorts_its_input(lengths, budget, generator):
    lengths.sort()
    return right_packing(lengths, budget, generator)


def spoils_its_input(lengths, budget, generator):
    lengths[:] = [1] * len(lengths)
    return right_packing(lengths, budget, generator)


def by_the_seed(lengths, budget, generator):
    return right_packing(lengths, budget, torch.Generator().manual_seed(generator.initial_seed()))


def own_randomness(lengths, budget, generator):
    return right_packing(lengths, budget, torch.Generator().manual_seed(random.getrandbits(30)))


def rounded_down_chunks(lengths, budget, generator):
    return packing(size=len(lengths) // 4)(lengths, budget, generator) if len(lengths) // 4 else []


def fixed_shuffle(batches, generator):
    random.Random(0).shuffle(batches)
    return batches


def shuffled_but_for(part):
    """The last `part` of the batches stays sorted, as where a shuffle comes before the last chunk."""

    def shuffle(batches, generator):
        end = round(len(batches) * part)
        return drawn(batches[:-end], generator) + batches[-end:] if end else batches

    return shuffle


def shuffled_then_sorted(batches, generator):
    batches = drawn(batches, generator)
    kept = len(batches) * 6 // 10
    return batches[:kept] + sorted(batches[kept:], key=len)


def spoiling(spoil):
    def answer(lengths, budget, generator):
        batches = right_packing(lengths, budget, generator)
        spoil(lengths)
        return batches

    return answer


def counting():
    """The generator is used as a counter only: each one gives the same epochs."""
    epochs = Counter()

    def answer(lengths, budget, generator):
        epochs[generator] += 1
        return right_packing(lengths, budget, torch.Generator().manual_seed(epochs[generator]))

    return answer


def strided(batches, generator):
    return [batch for start in range(7) for batch in batches[start::7]]


def by_numpy(lengths, max_tokens, generator):
    drawn_by_numpy = np.random.default_rng(int(torch.randint(2**31, (1,), generator=generator)))
    inner = torch.Generator().manual_seed(int(drawn_by_numpy.integers(2**31)))
    return right_packing(lengths, max_tokens, inner)


_ASKED = weakref.WeakKeyDictionary()


def by_its_own_count(lengths, max_tokens, generator):
    """Draws nothing from the generator: counts how often it was given."""
    _ASKED[generator] = turn = _ASKED.get(generator, 0) + 1
    return right_packing(lengths, max_tokens, torch.Generator().manual_seed(1000 * generator.initial_seed() + turn))


PACKINGS = {
    **{f"{chunks} chunks": packing(chunks) for chunks in (3, 4, 6, 8, 12, 16)},
    "tensors in a tuple": with_tensors,
    "numpy's generator, seeded from the generator": by_numpy,
    "a generator": as_a_generator,
    "from the longest on, in numpy's integers": from_longest,
    "one that sorts a copy of its own": lambda lengths, *rest: right_packing([*lengths], *rest),
}
WRONG_PACKINGS = {
    "unsorted": (unsorted, "similar length"),
    "all sorted": (all_sorted, "same batches"),
    "one chunk": (packing(1), "smaller chunks mix more"),
    "two chunks": (packing(2), "smaller chunks mix more"),
    "forty chunks": (packing(40), "larger"),
    "batches in their order": (packing(shuffle=lambda batches, g: batches), "shuffle the batches too"),
    "strided": (packing(shuffle=strided), "shuffle the batches too"),
    "the last quarter in its order": (
        packing(shuffle=shuffled_but_for(1 / 4)),
        "shuffle the batches too, at the end",
    ),
    "the last third in its order": (packing(3, shuffle=shuffled_but_for(1 / 3)), "shuffle the batches too"),
    "the last sixth in its order": (packing(6, shuffle=shuffled_but_for(1 / 6)), "shuffle the batches too"),
    "two fifths sorted again": (packing(shuffle=shuffled_then_sorted), "shuffle the batches too"),
    "always the same shuffle": (packing(shuffle=fixed_shuffle), "same order in two epochs"),
    "one text per batch": (lambda lengths, b, g: [[i] for i in drawn(list(range(len(lengths))), g)], "fill each up"),
    "never exactly full": (packing(over=-1), "fill each up"),
    "one over the budget": (packing(over=1), "only 20 fit"),
    "the sum of the lengths": (sums_of_lengths, "longest that decides"),
    "own randomness": (own_randomness, "same seed"),
    "the generator's seed": (by_the_seed, "next epoch", "same batches"),
    "counted, not drawn": (by_its_own_count, "does not follow from the state of `generator`"),
    "any seed": (counting(), "does not follow from the state of `generator`"),
    "a sorted input": (sorts_its_input, "changed `lengths`"),
    "a spoiled input": (spoils_its_input, "changed `lengths`"),
    "an emptied input": (spoiling(list.clear), "changed `lengths`", "copy"),
    "an input changed at last": (spoiling(lambda lengths: lengths.insert(0, -1)), "changed `lengths`"),
    "no chunk for three texts": (rounded_down_chunks, "in no batch"),
    "the last one missing": (lambda *case: right_packing(*case)[:-1], "in no batch"),
    "one twice": (lambda *case: (b := right_packing(*case)) + b[:1], "more than once"),
    "an unknown index": (lambda lengths, b, g: [*right_packing(lengths, b, g), [len(lengths)]], "no text"),
    "an empty batch": (lambda *case: [*right_packing(*case), []], "empty"),
    "lengths for indices": (
        lambda lengths, b, g: [[lengths[i] for i in x] for x in right_packing(lengths, b, g)],
        "no",
    ),
    "halves": (lambda *case: [[i + 0.5 for i in batch] for batch in right_packing(*case)], "whole number"),
    "nothing": (lambda lengths, budget, g: None, "None"),
    "a flat list": (lambda lengths, budget, g: list(range(len(lengths))), "a batch must be a list"),
}


@pytest.mark.parametrize("answer", named(PACKINGS))
def test_bucket_batches_accepts(answer, verdict):
    assert verdict("bucket_batches", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), attacks(WRONG_PACKINGS))
def test_bucket_batches_rejects(answer, words, rejects):
    rejects("bucket_batches", answer, *words)


@pytest.mark.parametrize(
    ("kind", "count", "budget"), [("long tail", 12000, 4000), ("even", 6001, 4000), ("two lengths", 4000, 2000)]
)
def test_right_packings_are_never_refused_by_chance(kind, count, budget):
    """The limits of chance and padding hold with room for many seeds, not only for that of the check."""
    lengths = checks.lengths_of(kind, count)
    for seed in range(6):
        generator = torch.Generator().manual_seed(100 + seed)
        plans = [checks._plan(packing(4 + 2 * seed), lengths, budget, generator) for _ in range(2)]
        checks._examine_padding(plans[0], lengths, budget)
        checks._examine_chance(plans, lengths)


def test_pairs_that_meet_again_are_counted():
    first, second = [[0, 1, 2], [3, 4]], [[0, 1], [2, 3, 4]]
    assert checks.meet_again(first, second) == pytest.approx(2 / 4)
    assert checks.meet_again(first, first) == 1.0 and checks.meet_again([[0]], [[0]]) == 0.0


# --- Task 4 ---------------------------------------------------------------------------------------------------------


def looping(
    hands_over=True,
    joins=True,
    gives_room=True,
    only=BaseException,
    slots=None,
    before=True,
    none_is_error=False,
    stops=True,
    waits=None,
    caught=Exception,
):
    """The solution, with its parts as options."""

    def answer(load, step, count, depth=2):
        room, ready, stop = threading.Semaphore(slots or depth), queue.SimpleQueue(), threading.Event()

        def produce():
            for i in range(count):
                room.acquire()
                if stop.is_set():
                    return
                try:
                    ready.put((load(i), None))
                except caught as error:
                    ready.put((None, error if hands_over else StopIteration()))
                    return

        def end():
            if stops:
                stop.set()
            if gives_room:
                room.release(1 if stops else count + 1)
            if joins:
                thread.join(waits)

        thread = threading.Thread(target=produce, daemon=True)
        thread.start()
        try:
            for _ in range(count):
                batch, error = ready.get()
                if isinstance(error, StopIteration):
                    break
                if error is not None or (none_is_error and batch is None):
                    raise error or ValueError("no batch")
                if before:
                    room.release()
                step(batch)
                if not before:
                    room.release()
        except only:
            end()
            raise
        if thread.is_alive():
            end()

    return answer


def with_an_executor(load, step, count, depth=2):
    with ThreadPoolExecutor(1) as pool:
        waiting = [pool.submit(load, i) for i in range(min(depth + 1, count))]
        try:
            for i in range(count):
                batch = waiting.pop(0).result()
                if i and i + depth < count:
                    waiting.append(pool.submit(load, i + depth))
                step(batch)
        finally:
            for future in waiting:
                future.cancel()


def without_result(load, step, count, depth=2):
    with ThreadPoolExecutor(1) as pool:
        for future in [pool.submit(load, i) for i in range(count)]:
            step(future)


def with_a_bounded_queue(load, step, count, depth=2):
    # the queue holds depth - 1, and the thread one more in its hands
    ready, stop, started = queue.Queue(), threading.Event(), threading.Semaphore(depth)

    def produce():
        for i in range(count):
            while not started.acquire(timeout=0.05):
                if stop.is_set():
                    return
            try:
                ready.put((True, load(i)))
            except BaseException as error:
                ready.put((False, error))
                return

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        for _ in range(count):
            fine, found = ready.get()
            if not fine:
                raise found
            started.release()
            step(found)
    finally:
        stop.set()
        thread.join()


def by_type(load, step, count, depth=2):
    """An error is told from a batch by its type."""

    def watched(i):
        try:
            return load(i)
        except Exception as error:
            return error

    def checked(batch):
        if isinstance(batch, Exception):
            raise batch
        step(batch)

    looping()(watched, checked, count, depth)


def in_a_pool(ahead):
    """One worker, and in step i as many loads ahead as `ahead` says, from i, the depth and how many there are."""

    def answer(load, step, count, depth=2):
        indices, waiting = iter(range(count)), []

        def fill(most):
            following = itertools.islice(indices, max(0, most - len(waiting)))
            waiting.extend([pool.submit(load, i) for i in following])

        with ThreadPoolExecutor(1) as pool:
            try:
                for i in range(count):
                    fill(1)
                    batch = waiting.pop(0).result()
                    fill(ahead(i, depth, len(waiting)))
                    step(batch)
            finally:
                for future in waiting:
                    future.cancel()

    return answer


def everything_first(load, step, count, depth=2):
    with ThreadPoolExecutor(1) as pool:
        batches = list(pool.map(load, range(count)))
    for batch in batches:
        step(batch)


def goes_on(load, step, count, depth=2):
    """Raises the error of a step at the end, after the batches that are left."""
    errors = []

    def tried(batch):
        try:
            step(batch)
        except BaseException as error:
            errors.append(error)

    looping()(load, tried, count, depth)
    if errors:
        raise errors[0]


def steps_again(load, step, count, depth=2):
    def tried(batch):
        try:
            step(batch)
        except BaseException:
            step(batch)
            raise

    looping()(load, tried, count, depth)


KEPT = ThreadPoolExecutor(1)
KEPT.submit(int).result()


def in_a_pool_of_its_own(load, step, count, depth=2):
    """A pool that is there before and after: what it still loads goes on."""
    waiting = [KEPT.submit(load, i) for i in range(min(depth, count))]
    for i in range(count):
        batch = waiting.pop(0).result()
        if i + depth < count:
            waiting.append(KEPT.submit(load, i + depth))
        try:
            step(batch)
        except BaseException:
            for future in waiting:
                future.cancel()
            raise


def from_one(load, step, count, depth=2):
    looping()(lambda i: load(i + 1), step, count, depth)


def one_step_more(load, step, count, depth=2):
    looping()(load, step, count, depth)
    step(None)


def another_error(load, step, count, depth=2):
    try:
        looping()(load, step, count, depth)
    except Exception as error:
        raise ValueError(f"again: {error}") from error


def plain(load, step, count, depth=2):
    for i in range(count):
        step(load(i))


def without_a_thread(load, step, count, depth=2):
    batch = load(0) if count else None
    for i in range(count):
        following = load(i + 1) if i + 1 < count else None
        step(batch)
        batch = following


def all_at_once(load, step, count, depth=2):
    ready = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: [ready.put(load(i)) for i in range(count)])
    thread.start()
    for _ in range(count):
        step(ready.get(timeout=2))
    thread.join()


def steps_in_the_thread(load, step, count, depth=2):
    thread = threading.Thread(target=plain, args=(load, step, count))
    thread.start()
    thread.join()


def hangs_on_an_error(load, step, count, depth=2):
    slots, ready = threading.Semaphore(depth), queue.Queue()

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


def raises_at_once(load, step, count, depth=2):
    errors = []

    def watched(i):
        try:
            return load(i)
        except ValueError as error:
            errors.append(error)
            raise

    def checked(batch):
        step(batch)
        if errors:
            raise errors[0]

    looping()(watched, checked, count, depth)


def swallows_ctrl_c(load, step, count, depth=2):
    try:
        looping()(load, step, count, depth)
    except KeyboardInterrupt:
        return


def backwards(load, step, count, depth=2):
    for i in reversed(range(count)):
        step(load(i))


def endless(load, step, count, depth=2):
    while True:
        time.sleep(0.01)


LOOPS = {
    "options": looping(),
    "an executor": with_an_executor,
    "a thread that looks every 50 ms": with_a_bounded_queue,
    "an executor that fills up at every step": in_a_pool(lambda i, depth, waiting: depth),
}
WRONG_LOOPS = {
    "goes on after an error": (goes_on, "step 2 raised Ctrl-C", "stop at once"),
    "steps again after an error": (steps_again, "stop at once"),
    "a pool that outlives the loop": (in_a_pool_of_its_own, "still runs"),
    "plain": (plain, "0 of 7", "another thread"),
    "a load before the step, without a thread": (without_a_thread, "0 of 7", "another thread"),
    "all at once": (all_at_once, "ran", "ahead", "slot"),
    "steps in the thread": (steps_in_the_thread, "in the thread that called you"),
    "release after the step": (looping(before=False), "Give the slot back before the step"),
    "one slot, whatever the depth": (looping(slots=1), "Make use of `depth`"),
    "depth ahead at first, then one": (in_a_pool(lambda i, depth, _: 1 if i else depth), "end of step 1", "`depth`"),
    "in bursts": (in_a_pool(lambda i, depth, waiting: waiting or depth), "end of step 1", "only 2", "Make use of"),
    "no load ahead": (in_a_pool(lambda i, depth, waiting: 0), "Begin load i + 1 before step i", "if you have slots"),
    "everything first": (everything_first, "0 of 7", "Begin load i + 1 before step i"),
    "no join": (looping(joins=False), "still runs"),
    "a join that gives up": (looping(waits=0.05), "still runs", "join it"),
    "a join that gives up at once": (looping(waits=0.001), "still runs", "join it"),
    "room without a stop": (looping(stops=False), "after Ctrl-C in step 2", "to batch 7", "tell it to stop before"),
    "clean-up for Ctrl-C only": (looping(only=KeyboardInterrupt), "still runs"),
    "futures as batches": (without_result, "call `result()`"),
    "None is an error": (looping(none_is_error=True), "no batch"),
    "errors swallowed": (looping(hands_over=False), "as if nothing had happened"),
    "the error before its turn": (raises_at_once, "train on them"),
    "Ctrl-C swallowed": (swallows_ctrl_c, "Ctrl-C", "swallow"),
    "a step's error in another one": (another_error, "your loop raised ValueError('again", "replace"),
    "an error known by its type": (by_type, "raised batch 1", "any object"),
    "one step more": (one_step_more, "`step` was called 9 times for 8 batches"),
    "backwards": (backwards, "the steps had"),
    "no step": (lambda load, step, count, depth=2: [load(i) for i in range(count)], "the steps had"),
    "nothing": (lambda load, step, count, depth=2: None, "were loaded"),
}


@pytest.mark.parametrize("answer", named(LOOPS))
def test_train_overlapped_accepts(answer, verdict):
    assert verdict("train_overlapped", answer) == "correct"


@pytest.mark.parametrize(("answer", "words"), attacks(WRONG_LOOPS))
def test_train_overlapped_rejects(answer, words, rejects, verdict):
    if "no batch" in words:  # what the answer raised itself is told
        assert all(word in verdict("train_overlapped", answer) for word in ("not yet right", *words))
        return
    rejects("train_overlapped", answer, *words)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("answer", "words"),
    attacks(
        {
            "an endless loop": (endless,),
            "an error that is lost": (hangs_on_an_error,),
            "no room": (looping(gives_room=False), "when step 2 raises Ctrl-C"),
            "an error of another kind": (looping(caught=ValueError), "when loading batch 7 raises an OSError"),
        }
    ),
)
def test_a_loop_that_hangs_is_told(answer, words, verdict, monkeypatch):
    monkeypatch.setattr(checks, "_LIMIT", 2.0)
    said = verdict("train_overlapped", answer)
    assert said.startswith("not yet right.") and ("had not ended" in said or "still runs" in said), said
    assert all(word in said for word in words), said


def leaves(load, step, count, depth=2):
    raise SystemExit(1)


def test_a_batch_that_does_not_exist_is_told(verdict):
    assert "`load` was called with 8; there are batches 0 to 7" in verdict("train_overlapped", from_one)


def test_a_loop_that_leaves_python_is_told(verdict):
    assert "SystemExit" in verdict("train_overlapped", leaves)


def test_a_leftover_raise_is_told_as_such(verdict, tmp_path):
    leftover = (
        "def f(load, step, count, depth=2):\n    if count:\n        step(load(0))\n    raise NotImplementedError\n"
    )
    assert "not attempted" not in verdict("train_overlapped", defined(leftover, "f")["f"])


def test_the_sampler_of_in_practice_runs(solution):
    [prose] = [cell for cell in map("".join, prose_of(NAME)) if "class Buckets" in cell]
    [snippet] = re.findall(r"```python\n(.*?)```", prose, re.S)
    lengths = checks.lengths_of("even", 500)
    names = {"torch": torch, "bucket_batches": solution["bucket_batches"], "lengths": lengths}
    names |= {"DataLoader": torch.utils.data.DataLoader, "dataset": range(500), "pad_to_longest": list}
    exec(snippet, names)
    first, second = list(names["loader"]), list(names["loader"])
    assert sorted(i for batch in first for i in batch) == list(range(500)) and first != second
    assert all(len(batch) * max(lengths[i] for i in batch) <= 4000 for batch in first)
