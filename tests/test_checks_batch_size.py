"""The checks of exercise 5 accept the solution and other right answers, see a stub, and explain planted mistakes."""

import copy
import math

import pytest
import torch

from speedlab.checks import batch_size as checks

NAME = "exercise-5-batch-size-finder.ipynb"


# --- Task 1 ---------------------------------------------------------------------------------------------------------


def memory(*, parts=("model", "optimizer", "scheduler"), out=copy.deepcopy, back=copy.deepcopy, zero=True, rng=True):
    """A `remember` with mistakes to switch on."""

    def remember(training):
        chosen = [getattr(training, part) for part in parts]
        saved, drawn = [out(part.state_dict()) for part in chosen], torch.get_rng_state()

        def put_back():
            for part, state in zip(chosen, saved, strict=True):
                part.load_state_dict(back(state))
            if zero:
                training.optimizer.zero_grad()
            if rng:
                torch.set_rng_state(drawn)

        return put_back

    return remember


def same(value):
    return value


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (memory(out=same), "model differs"),
        (memory(out=dict), "the tensors themselves"),
        (memory(parts=("model", "scheduler")), "optimizer differs"),
        (memory(parts=("model", "optimizer")), "scheduler differs"),
        (memory(back=same), "put back a second time"),
        (memory(rng=False), "random state differs"),
        (memory(zero=False), "gradients differs"),
        (lambda training: None, "Return a function"),
        (lambda training: checks.step(training) or same, "remember itself changes the model"),
    ],
)  # fmt: skip
def test_remember_rejects(rejects, answer, words):
    rejects("remember", answer, words)


def test_remember_leaves_the_random_state_of_the_notebook_alone(verdict):
    before = torch.get_rng_state()
    verdict("remember", memory())
    verdict("find_batch_size", finder())
    assert torch.equal(before, torch.get_rng_state())


# --- Task 2 ---------------------------------------------------------------------------------------------------------


def finder(
    *,
    restore="always",
    between=True,
    margin=0.9,
    gain=1.05,
    catch=checks.OutOfMemory,
    untried=False,
    over=False,
    last=False,
):
    """A finder with mistakes to switch on."""

    def find_batch_size(device, largest):
        put_back = memory()(device.training)
        best, low, too_large = None, 0, (2 * largest if over else largest) + 1
        limit = too_large

        def search():
            nonlocal best, low, too_large
            while too_large - low > max(1, low / 8):
                if too_large < limit and not between:
                    return
                size = max(1, 2 * low) if too_large == limit else (low + too_large) // 2
                try:
                    trial = device.train(size)
                except catch:
                    trial = None
                if trial is None or trial.memory > margin:
                    too_large = size
                elif best and trial.throughput < gain * best.throughput:
                    low = size if last else low
                    return
                else:
                    best, low = trial, size

        if restore == "always":
            try:
                search()
            finally:
                put_back()
        else:
            search()
            if restore == "at the end":
                put_back()
        if untried and best:
            return too_large - 1
        return low or None

    return find_batch_size


def one_by_one(device, largest):
    put_back, size = memory()(device.training), 0
    try:
        while size < largest and device.train(size + 1).memory <= 0.9:
            size += 1
    except checks.OutOfMemory:
        pass
    finally:
        put_back()
    return size or None


def forever(device, largest):
    """Where doubling fails, the same size again and again."""
    put_back, size = memory()(device.training), 1
    try:
        while size < largest:
            try:
                size = 2 * device.train(size).batch_size
            except checks.OutOfMemory:
                continue
    finally:
        put_back()
    return size


def by_tenths(device, largest):
    put_back, size, best = memory()(device.training), 1, None
    try:
        while size <= largest and device.train(size).memory <= 0.9:
            best, size = size, size + 1 + size // 10
    except checks.OutOfMemory:
        pass
    finally:
        put_back()
    return best


def from_above(device, largest):
    """Start at the largest size and halve until one runs, as some tools do."""
    put_back, size = memory()(device.training), largest
    try:
        while size:
            try:
                if device.train(size).memory <= 0.9:
                    return size
            except checks.OutOfMemory:
                pass
            size //= 2
    finally:
        put_back()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (finder(untried=True), ("a size that you never tried",)),
        (finder(between=False), ("Look between the largest size that ran",)),
        (finder(margin=1.0), ("as too large",)),
        (finder(gain=0.0), ("Stop when doubling gains less than 5%",)),
        (finder(gain=1.0), ("Stop when doubling gains less than 5%",)),
        (finder(gain=1.6), ("Keep the best trial",)),
        (lambda device, largest: finder()(device, min(largest, 16)), ("Go on while doubling gains",)),
        (finder(last=True), ("Keep the best trial, not the last one",)),
        (finder(over=True), ("the largest is",)),
        (finder(restore="never"), ("leave the training's model changed",)),
        (finder(restore="at the end"), ("`finally`",)),
        (finder(catch=Exception), ("Catch checks.OutOfMemory alone",)),
        (one_by_one, ("Does your search end?",)),
        (forever, ("Does your search end?",)),
        (by_tenths, ("trials", "are allowed")),
        (from_above, ("Look between the largest size that ran",)),
        (lambda device, largest: None, ("but a batch of 1 runs",)),
        (lambda device, largest: 64, ("never tried",)),
    ],
)  # fmt: skip
def test_find_batch_size_rejects(rejects, answer, words):
    rejects("find_batch_size", answer, *words)


def test_find_batch_size_wants_none_where_nothing_fits(rejects):
    def at_least_one(device, largest):
        return finder()(device, largest) or 1

    rejects("find_batch_size", at_least_one, "Return None")


def test_find_batch_size_accepts_other_starts_and_gaps(verdict):
    """One that starts at 8 and goes down where that is too much, and looks between until the gap is a sixteenth."""

    def find_batch_size(device, largest):
        put_back, ran = memory()(device.training), {}

        def runs(size):
            try:
                trial = device.train(size)
            except checks.OutOfMemory:
                return False
            ran.update({size: trial} if trial.memory <= 0.9 else {})
            return size in ran

        try:
            size = 8
            while size and not runs(size):
                size //= 2
            while size and size < largest:
                if not runs(2 * size):
                    step = size // 2
                    while step > size // 16:
                        size += step if runs(size + step) else 0
                        step //= 2
                    break
                if ran[2 * size].throughput < 1.05 * ran[size].throughput:
                    break
                size *= 2
        finally:
            put_back()
        return size or None

    assert verdict("find_batch_size", find_batch_size) == "correct"


@pytest.mark.parametrize("name", checks.devices())
def test_a_device_is_what_its_name_says(name):
    case = checks.devices()[name]
    device = case.make()
    speeds = {size: device.speed(size) for size in range(1, case.largest + 1)}
    fitting = [size for size, speed in speeds.items() if speed > 0]
    if "not even one" in name:
        assert not fitting
    elif "one sample" in name:
        assert fitting == [1]
    elif "nothing fills" in name:
        assert fitting == list(speeds) and max(speeds, key=speeds.get) == case.largest
    elif "random" in name:
        assert not case.regular and fitting != list(range(1, len(fitting) + 1))
    elif "falls" in name:
        assert 1 < max(speeds, key=speeds.get) < case.largest and len(fitting) > 1024
    elif "busy" in name:
        assert speeds[256] > 0.9 * max(speeds.values())
    else:
        assert fitting == list(range(1, len(fitting) + 1)) and len(fitting) < case.largest / 4


def test_a_step_that_breaks_off_leaves_gradients_and_moved_weights():
    device = checks.devices()["where not even one sample fits"].make()
    before = checks.state(device.training)
    with pytest.raises(checks.OutOfMemory):
        device.train(1)
    assert checks.changed(before, device.training) == "model"
    assert all(p.grad is not None for p in device.training.model.parameters())
    assert device.tried == [1] and device.ran == {}


@pytest.mark.parametrize("size", [0, -4, 2.0, "8", True])
def test_a_batch_size_is_a_whole_number(size):
    device = checks.devices()["that nothing fills"].make()
    with pytest.raises(ValueError, match="whole number"):
        device.train(size)
    assert device.tried == []


# --- Task 3 ---------------------------------------------------------------------------------------------------------


def rate(*, devices_count=True, other_rule=False, from_zero=False, early=0, inverse=False):
    def learning_rate(update, base_rate, base_batch, per_device, devices, rule, warmup):
        k = per_device * (devices if devices_count else 1) / base_batch
        k = 1 / k if inverse else k
        full = base_rate * (k if (rule == "linear") != other_rule else math.sqrt(k))
        start = 0 if from_zero else base_rate
        return full if update + early >= warmup else start + (full - start) * (update + early) / warmup

    return learning_rate


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (rate(devices_count=False), "multiply by their number"),
        (rate(other_rule=True), "That is the square root rule"),
        (rate(from_zero=True), "in a straight line from the base rate"),
        (rate(early=1), "in a straight line from the base rate"),
        (rate(inverse=True), "global batch / base batch"),
        (lambda *setup: None, "you return None"),
        (lambda *setup: setup[1], "Take k"),
    ],
)
def test_learning_rate_rejects(rejects, answer, words):
    rejects("learning_rate", answer, words)


# --- Task 4 ---------------------------------------------------------------------------------------------------------


RIGHT = {"A": (1024, 1024, "overhead"), "B": (64, 32, "busy"), "C": (128, 64, "swapping")}


@pytest.mark.parametrize(
    ("readings", "words"),
    [
        ({**RIGHT, "B": (1024, 32, "busy")}, "90%"),
        ({**RIGHT, "B": (64, 1024, "busy")}, "first at the target. Time = updates"),
        ({**RIGHT, "C": (128, 48, "swapping")}, "one of the sizes"),
        ({**RIGHT, "A": (1024, 1024, "busy")}, "How long does one step take"),
        ({**RIGHT, "A": (1024, 1024)}, "three things"),
        ({"A": RIGHT["A"]}, "the keys A, B and C"),
        (None, "Return a dict"),
    ],
)  # fmt: skip
def test_read_curves_rejects(rejects, readings, words):
    rejects("read_curves", lambda: readings, words)


def test_read_curves_accepts_readings_by_eye(verdict):
    assert verdict("read_curves", lambda: RIGHT) == "correct"
