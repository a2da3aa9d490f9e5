"""The checks of exercise 5 accept the solution and other right answers, see a stub, and explain planted mistakes."""

import copy
import math

import numpy as np
import pytest
import torch

from speedlab.checks import batch_size as checks

NAME = "exercise-5-batch-size-finder.ipynb"


@pytest.mark.parametrize("task", ["remember", "find_batch_size", "learning_rate", "read_curves"])
def test_the_solution_is_correct_and_the_stub_not_attempted(task, solution, stub, verdict):
    assert verdict(task, solution[task]) == "correct"
    assert verdict(task, stub[task]) == "not attempted yet"


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


def with_assign(training):
    """What is loaded are new tensors, which the optimizer does not know."""
    saved, put_all_back = copy.deepcopy(training.model.state_dict()), memory()(training)

    def put_back():
        put_all_back()
        training.model.load_state_dict(copy.deepcopy(saved), assign=True)
        training.model.zero_grad()

    return put_back


def switched_off(training):
    put_all_back = memory()(training)
    return lambda: (put_all_back(), training.model.eval())


def switched_off_at_once(training):
    training.model.eval()
    return memory()(training)


def two_copies(training):
    copies = [memory()(training), memory()(training)]
    return lambda: copies.pop()()


def parameters_alone(training):
    saved, put_all_back = (
        [p.detach().clone() for p in training.model.parameters()],
        memory(parts=("optimizer",))(training),
    )
    schedule = copy.deepcopy(training.scheduler.state_dict())

    @torch.no_grad()
    def put_back():
        put_all_back()
        training.scheduler.load_state_dict(copy.deepcopy(schedule))
        for p, value in zip(training.model.parameters(), saved, strict=True):
            p.copy_(value)

    return put_back


def in_place(training):
    """Another right answer: values into the model's own tensors, gradients to zero by hand."""
    tensors = [*training.model.parameters(), *training.model.buffers()]
    values, put_all_back = [t.detach().clone() for t in tensors], memory(parts=("optimizer", "scheduler"))(training)

    def put_back():
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        put_all_back()

    return put_back


def through_text(training):
    """Another right answer: all states as bytes, read again each time."""
    import io

    file, parts = io.BytesIO(), (training.model, training.optimizer, training.scheduler)
    torch.save(([part.state_dict() for part in parts], torch.get_rng_state()), file)

    def put_back():
        file.seek(0)
        states, drawn = torch.load(file)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        for p in training.model.parameters():
            p.grad = None
        torch.set_rng_state(drawn)

    return put_back


def with_zeros(training):
    """Another right answer: gradients of zero are no gradients, either."""
    put_all_back = memory(zero=False)(training)
    return lambda: (put_all_back(), training.optimizer.zero_grad(set_to_none=False))


def copied_too_late(training):
    def put_back():
        memory()(training)()

    return put_back


KEPT = {}


def with_one_place_for_all(training):
    parts = training.model, training.optimizer, training.scheduler
    KEPT["states"], KEPT["drawn"] = [copy.deepcopy(part.state_dict()) for part in parts], torch.get_rng_state()

    def put_back():
        for part, state in zip(parts, KEPT["states"], strict=True):
            part.load_state_dict(copy.deepcopy(state))
        training.optimizer.zero_grad()
        torch.set_rng_state(KEPT["drawn"])

    return put_back


def without_dropout(training):
    training.model[3].p = 0.0
    return memory()(training)


def without_the_first_bias(training):
    training.model[0].bias.requires_grad_(False)
    return memory()(training)


def only_once_there_is_a_state(training):
    restore = memory()(training)
    return lambda: restore() if training.optimizer.state else None


def with_the_later_rate(training):
    restore = memory()(training)

    def put_back():
        rate = training.optimizer.param_groups[0]["lr"]
        restore()
        training.optimizer.param_groups[0]["lr"] = rate / 2

    return put_back


def replacing(training):
    """Puts copies in the place of the model, the optimizer and the scheduler."""
    kept, drawn = copy.deepcopy(training), torch.get_rng_state()

    def put_back():
        vars(training).update(vars(copy.deepcopy(kept)))
        torch.set_rng_state(drawn)

    return put_back


@pytest.mark.parametrize("answer", [memory(), in_place, through_text, with_zeros])
def test_remember_accepts_other_right_answers(verdict, answer):
    assert verdict("remember", answer) == "correct"


def test_remember_with_copies_for_two_calls_only(verdict):
    said = verdict("remember", two_copies)
    assert "IndexError" in said and "pop" in said


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (with_assign, "assign=True"),
        (switched_off, "train and eval flags"),
        (switched_off_at_once, "remember itself changes the train and eval flags"),
        (parameters_alone, "running statistics"),
        (memory(out=same), "in its weights"),
        (memory(out=dict), "the tensors themselves"),
        (memory(parts=("model", "scheduler")), "in its optimizer"),
        (memory(parts=("model", "optimizer")), "in its scheduler"),
        (memory(back=same), "put back a second time"),
        (memory(rng=False), "in its random state"),
        (memory(zero=False), "in its gradients"),
        (replacing, "is another object"),
        (copied_too_late, "Copy while remember runs"),
        (lambda training: lambda: None, "Copy while remember runs"),
        (with_one_place_for_all, "a second call must not change"),
        (without_dropout, "training does not go on as it would have"),
        (without_the_first_bias, "training does not go on as it would have"),
        (only_once_there_is_a_state, "in its weights"),
        (with_the_later_rate, "param_groups are not"),
        (lambda training: None, "Return a function"),
        (lambda training: copy.deepcopy(training), "an object of type Training"),
        (lambda training: checks.step(training) or same, "remember itself changes the weights"),
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
    larger=False,
    eighth=8,
    gap=None,
):
    """A finder with mistakes to switch on."""

    def find_batch_size(device, largest):
        put_back = memory()(device.training)
        best, low, too_large = None, 0, (2 * largest if over else largest) + 1
        limit = too_large

        def search():
            nonlocal best, low, too_large
            while too_large - low > (gap or (lambda low: max(1, low / eighth)))(low):
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
                    low = size if last or (larger and size == 2 * low) else low
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


class ByItsMessage:
    """A device whose errors are judged by what they say."""

    def __init__(self, device):
        self.device, self.training = device, device.training

    def train(self, size):
        try:
            return self.device.train(size)
        except RuntimeError as error:
            if "does not fit" not in str(error):
                raise
            raise checks.OutOfMemory from error


def by_its_message(device, largest):
    return finder()(ByItsMessage(device), largest)


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


def swallows_all(device, largest):
    """Smaller for ever, whatever goes wrong."""
    size = largest
    while True:
        try:
            device.train(size)
            return size
        except Exception:
            size = max(1, size // 2)


def swallowing(at_first=False, above=False, errors=OSError):
    """A finder that takes some other errors for a lack of memory: on its first trial, or after a real one."""

    def find_batch_size(device, largest):
        tried, failed = [], []
        train = device.train

        def trial(size):
            tried.append(size)
            try:
                return train(size)
            except checks.OutOfMemory:
                failed.append(size)
                raise
            except errors:
                if (at_first and len(tried) == 1) or (above and failed):
                    raise checks.OutOfMemory("swallowed") from None
                raise

        device.train = trial
        try:
            return finder()(device, largest)
        finally:
            del device.train

    return find_batch_size


def on_another_training(device, largest):
    """The device keeps the training that the trials went through."""
    device.training = copy.deepcopy(device.training)
    return finder(restore="never")(device, largest)


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
        (finder(eighth=4), ("an eighth of the best",)),
        (finder(margin=1.0), ("96.8% of the memory", "as too large")),
        (finder(margin=0.905), ("90.4% of the memory",)),
        (finder(margin=0.86), ("128 ran with 88.3% of the memory",)),
        (finder(margin=0.89), ("64 ran with 89.9% of the memory", "Take what needs 90% or less")),
        (finder(gain=1.1), ("Go on while doubling gains 5%",)),
        (finder(larger=True), ("less than 5%", "keep the smaller size")),
        (finder(catch=(RuntimeError, MemoryError)), ("DataLoader worker", "Catch checks.OutOfMemory alone")),
        (finder(gain=0.0), ("keep the smaller size",)),
        (finder(gain=1.0), ("keep the smaller size",)),
        (finder(gain=1.6), ("keep the best trial",)),
        (lambda device, largest: finder()(device, min(largest, 16)), ("Go on while doubling gains",)),
        (finder(last=True), ("keep the smaller size",)),
        (finder(over=True), ("the largest is",)),
        (finder(restore="never"), ("leave the training's weights changed",)),
        (finder(restore="at the end"), ("`finally`",)),
        (finder(catch=Exception), ("Catch checks.OutOfMemory alone",)),
        (one_by_one, ("Does your search end?",)),
        (forever, ("Does your search end?",)),
        (swallowing(at_first=True), ("no such image", "Catch checks.OutOfMemory alone")),
        (swallowing(above=True), ("no such image", "Catch checks.OutOfMemory alone")),
        (swallowing(at_first=True, above=True, errors=KeyError), ("KeyError", "Catch checks.OutOfMemory alone")),
        (finder(catch=(checks.OutOfMemory, LookupError)), ("KeyError", "Catch checks.OutOfMemory alone")),
        (finder(catch=(checks.OutOfMemory, FileNotFoundError)), ("FileNotFoundError", "alone")),
        (finder(catch=(checks.OutOfMemory, ValueError)), ("ValueError", "alone")),
        (finder(catch=(checks.OutOfMemory, TypeError)), ("TypeError", "alone")),
        (by_its_message, ("the crop does not fit", "alone")),
        (finder(catch=(checks.OutOfMemory, AttributeError)), ("AttributeError", "alone")),
        (lambda device, largest: finder()(copy.deepcopy(device), largest), ("copy of the device", "you are given")),
        (finder(gain=1.08), ("12.8% of the memory", "5.2% more samples per second")),
        (finder(gap=lambda low: max(8, low / 8)), ("you stop at 8, and 16 was too large",)),
        (finder(gap=lambda low: max(1, low / 8) if low >= 32 else low), ("you stop at 8, and 16 was too large",)),
        (on_another_training, ("another training",)),
        (by_tenths, ("trials", "are allowed")),
        (finder(margin=0.7), ("Take what needs 90% or less",)),
        (finder(eighth=10**6), ("until it is at most an eighth",)),
        (from_above, ("Look between the largest size that ran",)),
        (lambda device, largest: math.nan, ("nan",)),
        (lambda device, largest: None, ("but a batch of 1 runs",)),
        (lambda device, largest: 64, ("never tried",)),
    ],
)  # fmt: skip
def test_find_batch_size_rejects(rejects, answer, words):
    rejects("find_batch_size", answer, *words)


def test_a_search_that_swallows_everything_ends_nevertheless(verdict, rejects, monkeypatch):
    """On the device where nothing fits it would go on for ever."""
    nothing = {name: case for name, case in checks.devices().items() if "not even one" in name}
    monkeypatch.setattr(checks, "devices", lambda: nothing)
    rejects("find_batch_size", swallows_all, "Does your search end?")


def test_find_batch_size_names_a_helper_that_is_missing(verdict):
    def remember(training):
        raise NotImplementedError

    def find_batch_size(device, largest):
        put_back = remember(device.training)
        put_back()

    assert "needs `remember`, which is not written yet" in verdict("find_batch_size", find_batch_size)


def test_find_batch_size_accepts_two_functions_and_a_dictionary(verdict):
    """Doubling first, then the middle whatever it gains, and the fastest of all that ran within the margin."""

    def runs(device, size, ran):
        try:
            trial = device.train(size)
        except checks.OutOfMemory:
            return False
        if trial.memory > 0.9:
            return False
        ran[size] = trial.throughput
        return True

    def find_batch_size(device, largest):
        put_back, ran, size, wall = memory()(device.training), {}, 1, None
        try:
            while size <= largest:
                if not runs(device, size, ran):
                    wall = size
                    break
                if size > 1 and ran[size] < 1.05 * ran[size // 2]:
                    del ran[size]
                    break
                size *= 2
            while wall and ran and wall - max(ran) > max(1, max(ran) // 8):
                middle = (wall + max(ran)) // 2
                if not runs(device, middle, ran):
                    wall = middle
        finally:
            put_back()
        return max(ran) if ran else None

    assert verdict("find_batch_size", find_batch_size) == "correct"


@pytest.mark.parametrize("kind", [np.int64, float])
def test_find_batch_size_accepts_whole_numbers_of_any_type(verdict, kind):
    def find_batch_size(device, largest):
        found = finder()(device, largest)
        return found if found is None else kind(found)

    assert verdict("find_batch_size", find_batch_size) == "correct"


def test_no_device_tells_its_speed_without_a_trial():
    device = checks.devices()["that nothing fills"].make()
    assert not hasattr(device, "speed") and device.train(np.int64(4)).batch_size == 4


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
    speeds = {size: checks._speed(device, size) for size in range(1, case.largest + 1)}
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
    assert checks.changed(before, device.training) == "weights"
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


def shaped(shape):
    """A warm-up of another shape, which agrees at the start, the middle and the end."""

    def learning_rate(update, base_rate, base_batch, per_device, devices, rule, warmup):
        k = per_device * devices / base_batch
        risen = shape(min(1, update / warmup)) if warmup else 1
        return base_rate + risen * (base_rate * (k if rule == "linear" else math.sqrt(k)) - base_rate)

    return learning_rate


def unclamped(update, base_rate, base_batch, per_device, devices, rule, warmup):
    k = per_device * devices / base_batch
    full = base_rate * (k if rule == "linear" else math.sqrt(k))
    return base_rate + (full - base_rate) * (update / warmup if warmup else 1)


def base_first(update, *setup):
    return setup[0] if update == 0 else shaped(float)(update, *setup)


def one_update_late(update, *setup):
    warmup = setup[-1]
    return rate()(warmup * update / (warmup + 1) if update <= warmup else update, *setup)


def never_below(update, base_rate, *setup):
    return max(base_rate, rate()(update, base_rate, *setup))


def with_tensors(update, base_rate, base_batch, per_device, devices, rule, warmup):
    k = torch.tensor(per_device * devices / base_batch, dtype=torch.float64)
    full = base_rate * k ** (1.0 if rule == "linear" else 0.5)
    start = torch.tensor(base_rate, dtype=torch.float64)
    return torch.lerp(start, full, min(1.0, update / warmup) if warmup else 1.0)


@pytest.mark.parametrize("answer", [rate(), with_tensors, lambda *setup: np.float32(rate()(*setup))])
def test_learning_rate_accepts_numbers_of_any_type(verdict, answer):
    assert verdict("learning_rate", answer) == "correct"


def test_a_raise_left_in_one_branch_is_told(verdict):
    def learning_rate(*setup):
        if setup[5] == "linear":
            return rate()(*setup)
        raise NotImplementedError

    assert "still comes to its `raise NotImplementedError`" in verdict("learning_rate", learning_rate)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (rate(devices_count=False), "multiply by their number"),
        (rate(other_rule=True), "That is the square root rule"),
        (rate(from_zero=True), "in a straight line from the base rate"),
        (rate(early=1), "in a straight line from the base rate"),
        (rate(inverse=True), "global batch / base batch"),
        (unclamped, "min(1, update / warmup)"),
        (base_first, "Without a warm-up"),
        (never_below, "smaller than the recipe's"),
        (shaped(lambda s: (1 - math.cos(math.pi * s)) / 2), "in a straight line"),
        (shaped(lambda s: s * s * (3 - 2 * s)), "in a straight line"),
        (shaped(lambda s: math.floor(2 * s) / 2), "in a straight line"),
        (lambda *setup: math.nan, "nan"),
        (lambda *setup: None, "came back as None"),
        (lambda *setup: setup[1], "Take k"),
        (lambda *setup: setup[1] * setup[4], "Take k"),
        (one_update_late, "divide by warmup, not by warmup + 1"),
        (lambda *setup: 2 * rate()(*setup), "Take k"),
    ],
)
def test_learning_rate_rejects(rejects, answer, words):
    rejects("learning_rate", answer, words)


# --- Task 4 ---------------------------------------------------------------------------------------------------------


RIGHT = {"A": (1024, 1024, "overhead"), "B": (64, 32, "busy"), "C": (128, 64, "swapping")}


def mutated():
    for curve in checks.CURVES.values():
        curve.update(dict.fromkeys(curve, 1))
    return dict.fromkeys(RIGHT, (8, 8, "busy"))


@pytest.mark.parametrize(
    ("readings", "words"),
    [
        ({**RIGHT, "B": (1024, 32, "busy")}, "90%"),
        ({**RIGHT, "B": (64, 1024, "busy")}, "first at the target. Time = updates"),
        ({**RIGHT, "C": (128, 48, "swapping")}, "one of the sizes"),
        ({**RIGHT, "C": (128, [1024], "swapping")}, "must be a number"),
        ({**RIGHT, "C": (128, [64, 32], "swapping")}, "must be a number"),
        ({**RIGHT, "A": (1024, 1024, "busy")}, "How long does one step take"),
        ({**RIGHT, "A": (1024, 1024)}, "3 things"),
        ({**RIGHT, "A": (math.nan, 1024, "overhead")}, "nan"),
        ({**RIGHT, "A": (1024, 1024, "Overhead")}, "write one of 'overhead'"),
        ({"A": RIGHT["A"]}, "the keys A, B and C"),
        (None, "Return a dict"),
    ],
)  # fmt: skip
def test_read_curves_rejects(rejects, readings, words):
    rejects("read_curves", lambda: readings, words)


def test_read_curves_judges_by_the_original_curves(rejects):
    before = copy.deepcopy(checks.CURVES)
    try:
        rejects("read_curves", mutated, "90%")
    finally:
        checks.CURVES.update(before)


@pytest.mark.parametrize("kind", [tuple, list, lambda three: (np.int64(three[0]), float(three[1]), three[2])])
def test_read_curves_accepts_readings_by_eye(verdict, kind):
    assert verdict("read_curves", lambda: {name: kind(three) for name, three in RIGHT.items()}) == "correct"


def test_an_endless_answer_is_stopped(verdict, monkeypatch):
    monkeypatch.setattr(checks.read_curves, "seconds", 1)

    def read_curves():
        while True:
            pass

    assert "had not ended after 1 s" in verdict("read_curves", read_curves)
