"""The finder that 9.5.2 writes, on bad days: it returns only sizes that ran, and leaves everything as it was."""

import ast
import contextlib
import functools
import gc
import inspect
import json
import math
import os
import random
import re
import signal
import sys
import time

import pytest
import torch
import under_limit
from notebook_answers import answers, defined
from notebooks import ROOT
from search_figures import digest
from torch import nn
from torch.utils.data import DataLoader, Dataset

UNIT = ROOT / "code-units" / "9.5-batch-size-finder"
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture(scope="module")
def lesson() -> dict:
    return {**answers(UNIT / "2-finding-it.ipynb"), "digest": digest}


class Network(nn.Module):
    """With all that a finder could forget: dropout, a buffer not saved, one that is replaced, a part in eval mode."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.register_buffer("samples", torch.zeros(1))
        self.register_buffer("calls", torch.zeros(1), persistent=False)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.samples += len(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()  # a new tensor in the buffer's place
        return self.body(x)


class Training:
    """A model in the middle of training, a step for the finder, and a fingerprint of all that must come back."""

    def __init__(self, lesson: dict):
        torch.manual_seed(0)
        self.model = Network()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=24)
        self.parts = self.model, self.optimizer, self.scheduler
        self.step(2)
        self.model(torch.randn(2, 4)).sum().backward()
        self.model.body[1].eval()
        self.digest = lambda: (lesson["digest"](*self.parts), self.model.calls.item(), self.scheduler.get_last_lr())
        self.before = self.digest()

    def step(self, size: int) -> int:
        self.optimizer.zero_grad()
        self.model.train()
        self.model(torch.randn(size, 4)).pow(2).mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        random.random()
        return size

    def fails_from(self, limit: int, error: BaseException = FULL):
        def step(size: int) -> int:
            self.step(size)
            if size >= limit:
                raise error
            return size

        return step


@pytest.fixture
def training(lesson) -> Training:
    return Training(lesson)


def ran(seen: dict) -> set[int]:
    return {size for size, (rate, _) in seen.items() if rate}


def test_a_search_leaves_no_trace(lesson, training):
    size, seen = lesson["find_batch_size"](training.step, *training.parts, largest=64)
    assert size in ran(seen) and training.digest() == training.before


def test_the_fingerprint_sees_every_kind_of_change(lesson):
    changes = {
        "a weight": lambda t: t.model.body[0].weight.data[0].neg_(),
        "a gradient": lambda t: t.optimizer.zero_grad(),
        "a moment": lambda t: t.optimizer.state[t.model.body[0].weight]["exp_avg"].mul_(2),
        "the schedule": lambda t: t.scheduler.step(),
        "a flag": lambda t: t.model.train(),
        "a frozen weight": lambda t: t.model.body[0].weight.requires_grad_(False),
        "a statistic": lambda t: t.model.samples.add_(1),
        "an unsaved buffer": lambda t: t.model.calls.add_(1),
        "a buffer replaced": lambda t: setattr(t.model, "mean", t.model.mean + 1),
        "torch's random numbers": lambda t: torch.rand(1),
        "Python's random numbers": lambda t: random.random(),
    }
    for name, change in changes.items():
        training = Training(lesson)
        put_back = lesson["remember"](*training.parts)
        change(training)
        assert training.digest() != training.before, name
        put_back()
        assert training.digest() == training.before, name


@pytest.mark.parametrize("start", [1, 8, 16, 64])
def test_a_search_from_above_the_best_size_stays_within_a_tenth_of_it(lesson, start):
    """On its way down it passes the best, 112 at batch 8; 102 is within a tenth of that, 93 is not."""
    rates = {1: 60, 2: 93, 4: 102, 8: 112, 16: 100, 32: 95, 64: 90}
    assert lesson["climb"](lambda size, looks=1: rates.get(size, 0), start, 64, 0.1, 2, 2) == 4


def test_not_even_one_sample_fits(lesson, training):
    with pytest.raises(MemoryError, match=r"Not even one sample fits \(out of memory\)"):
        lesson["find_batch_size"](training.fails_from(1), *training.parts, start=8)
    assert training.digest() == training.before


class Truncated(Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 20:
            raise OSError("image 20 is truncated")
        return torch.ones(4)


def test_a_loader_that_raises_is_no_lack_of_memory(lesson, training):
    def step(size: int) -> int:
        batch = next(iter(DataLoader(Truncated(), size)))
        training.step(size)
        return len(batch)

    with pytest.raises(OSError, match="truncated"):
        lesson["find_batch_size"](step, *training.parts, gain=-1)
    assert training.digest() == training.before


def test_an_interrupt_in_the_middle(lesson, training):
    def step(size: int) -> int:
        training.step(size)
        if size == 4:
            signal.raise_signal(signal.SIGINT)
        return size

    with pytest.raises(KeyboardInterrupt):
        lesson["find_batch_size"](step, *training.parts, gain=-1)
    assert training.digest() == training.before


class FullInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        if len(gradient) > 20:
            raise FULL
        return gradient


def test_out_of_memory_inside_backward(lesson, training):
    training.model.register_forward_hook(lambda module, args, out: FullInBackward.apply(out))
    size, seen = lesson["find_batch_size"](training.step, *training.parts, gain=-1)
    assert (size, seen[32][1], seen[18][1]) == (16, "out of memory", "ran")
    assert training.digest() == training.before


def test_out_of_memory_inside_the_optimizers_step(lesson, training):
    """Some weights are new by then, the others old."""
    last = [*training.model.parameters()][-1]
    sizes: list[int] = []
    training.model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    whole = training.optimizer.step

    def halfway() -> None:
        if sizes[-1] > 5:
            last.grad = None
            whole()
            raise FULL
        whole()

    training.optimizer.step = halfway
    size, seen = lesson["find_batch_size"](training.step, *training.parts, gain=-1)
    assert (size, seen[8][1], seen[5][1]) == (4, "out of memory", "ran")
    assert training.digest() == training.before


def test_the_failed_step_is_freed_before_the_next_trial(lesson):
    """An error that is still held keeps the frames of the step, and so its tensors."""
    alive: list[int] = []

    class Large:
        def __init__(self):
            alive.append(1)

        def __del__(self):
            alive.pop()

    def step(size: int) -> int:
        assert not alive
        kept = Large()
        kept.itself = kept  # only a collection frees it
        if size > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")  # a new one: an old one would hold its frames
        del kept.itself
        return size

    assert lesson["find_batch_size"](step, gain=-1)[0] == 2


@pytest.mark.parametrize(
    "error, full",
    [
        (FULL, True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
            True,
        ),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("could not create a primitive"), True),  # oneDNN, when its allocation fails
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_what_counts_as_out_of_memory(lesson, error, full):
    expected = contextlib.nullcontext() if full else pytest.raises(RuntimeError, match="shapes")
    training = Training(lesson)
    with expected:
        assert lesson["find_batch_size"](training.fails_from(4, error), *training.parts, gain=-1)[0] == 2
    assert training.digest() == training.before


def test_only_sizes_that_ran_with_a_margin_whatever_the_device_does(lesson, monkeypatch):
    """Memory that fails at random, throughput that wanders, any start: what comes back ran, and so did a larger."""
    monkeypatch.setattr(gc, "collect", lambda: 0)  # nothing is held here, and a collection in a test run is slow
    for seed in range(200):
        luck = random.Random(seed)
        fails = {size for size in range(1, 3000) if luck.random() < luck.choice((0.0, 0.1, 0.5))}
        limit, now, finished = luck.randrange(1, 3000), [0.0], []

        def step(size: int, luck=luck, fails=fails, limit=limit, now=now, finished=finished) -> int:
            if size > limit or size in fails:
                raise FULL
            now[0] += luck.uniform(0.1, 1) + size * luck.choice((0.001, 0.01))
            finished.append(size)
            return size

        options = {"start": luck.choice((1, 7, 64, 300)), "gain": luck.choice((-1, 0.1)), "margin": 0.1}
        try:
            size, seen = lesson["find_batch_size"](step, clock=lambda now=now: now[0], **options)
        except MemoryError:
            assert 1 > limit or 1 in fails or not finished or 1 not in finished
            continue
        assert size in finished, seed
        assert size == 1 or any(other >= math.ceil(1.1 * size) for other in finished), seed
        assert len(seen) <= 25, seed


@pytest.mark.parametrize("start", [50, 90, 100, 170])
def test_a_tenth_is_a_tenth(lesson, start):
    """With room for a tenth more, to the sample, a size counts: (1 + 0.1) * 100 is a hair above 110."""

    def step(size: int) -> int:
        if size > start + start // 10:
            raise FULL
        return size

    assert lesson["find_batch_size"](step, start=start, gain=-1)[0] == start


def test_it_stops_at_the_knee_from_below_and_from_above(lesson):
    device = lesson["device_of"]
    for start in (1, 8, 128, 1024):
        step, clock = device(math.inf)
        size, seen = lesson["find_batch_size"](step, clock=clock, start=start)
        assert size == 256, seen  # 464 of 500 samples per second; 128 has 432, less than a tenth below the best


def test_throughput_that_falls_past_a_point(lesson):
    now = [0.0]

    def step(size: int) -> int:
        now[0] += size / min(size, 32) * (1 if size <= 32 else size / 32)
        return size

    size, seen = lesson["find_batch_size"](step, clock=lambda: now[0])
    assert size == 32 and max(seen) == 128


def test_one_doubling_without_gain_does_not_end_a_search(lesson):
    """A disturbed first look at 64, and a size of 8 that stays slow: neither is the knee."""
    now, tried = [0.0], []

    def step(size: int) -> int:
        disturbed = size == 8 or (size == 64 and tried.count(64) < 3)
        tried.append(size)
        now[0] += (0.04 + 0.002 * size) * (2 if disturbed else 1)
        return size

    size, seen = lesson["find_batch_size"](step, clock=lambda: now[0], largest=1024)
    assert size == 256 and seen[64][0] == pytest.approx(64 / 0.168)
    simple, _ = lesson["find_batch_size"](step, clock=lambda: now[0], largest=1024, doublings=1, looks=1)
    assert simple == 4


def test_the_finder_backs_off_where_memory_really_ends(lesson):
    source = """
def limited_search(note, start):
    torch.manual_seed(0)
    model = models.vit("small", pretrained=False).to(machine.device())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    size, seen = find_batch_size(trained(model, optimizer, note), model, optimizer, start=start, gain=-1)
    return [size, [said for _, said in seen.values()]]
"""
    search = defined(source, "<limited>", **lesson)["limited_search"]
    names = ("find_batch_size", "roomy", "climb", "one_door", "attempt", "out_of_memory", "remember", "restore")
    needs = [lesson[name] for name in (*names, "copied", "generators", "trained")]
    outcome = under_limit.run(64, search, 32, needs=needs)
    assert outcome.ended == "returned"
    size, said = outcome.returned
    assert size in outcome.ran and "out of memory" in said


def test_a_set_with_too_few_samples_sets_a_limit(lesson):
    size, seen = lesson["find_batch_size"](lambda size: min(size, 100), gain=-1)
    assert size == 64 and seen[128] == (0.0, "only 100 samples")


def test_shares_of_a_global_batch(lesson):
    assert [lesson["shares"](256, devices, 96) for devices in (1, 2, 4, 8)] == [(64, 4), (64, 2), (64, 1), (32, 1)]
    assert lesson["shares"](21, 3, 5) == (1, 7)
    with pytest.raises(ValueError, match="a multiple of 3"):
        lesson["shares"](256, 3, 96)


def test_lightning_names_the_attribute_that_is_missing(lesson):
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    sizes: list[int] = []
    with pytest.raises(MisconfigurationException, match="Field micro_batch not found"):
        lesson["lightning_search"](lambda word, size: sizes.append(size), "power", batch_arg_name="micro_batch")
    assert sizes == []


def test_the_pretended_limit_is_met_and_told(lesson):
    """What readers on macOS and Windows see: Lightning and the finder both take the refusal for the real thing."""
    outcome = under_limit.run(16, lesson["lightning_search"], "power", pretend=True)
    assert outcome.ended == "returned"
    assert outcome.returned in outcome.ran and max(outcome.begun) == 2 * outcome.returned


# what a notebook would hold: its source is sent to the process
ACCIDENTS = """
def is_killed(note):
    for size in (2, 4, 8):
        note("begins", size)
        if size == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        note("ran", size)


def hangs(note):
    note("begins", 2)
    time.sleep(1000)


def raises(note):
    note("begins", 2)
    raise ValueError("no such image")
"""


@pytest.fixture(scope="module")
def accidents() -> dict:
    return defined(ACCIDENTS, "<accidents>", os=os, signal=signal, time=time)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal that kills")
def test_a_process_that_the_system_kills(accidents):
    outcome = under_limit.run(64, accidents["is_killed"], pretend=True)
    assert outcome == under_limit.Outcome((2, 4, 8), (2, 4), None, "killed by SIGKILL at a batch of 8")


def test_a_process_that_hangs_is_stopped(accidents):
    outcome = under_limit.run(64, accidents["hangs"], pretend=True, timeout=6)
    assert outcome.ended.startswith("stopped after 6 s") and outcome.returned is None


def test_a_process_that_raises(accidents):
    outcome = under_limit.run(64, accidents["raises"], pretend=True)
    assert outcome.ended == "raised ValueError: no such image at a batch of 2"
    with pytest.raises(ValueError, match="must be positive"):
        under_limit.run(0, accidents["raises"])


# --- What the notebooks recommend -----------------------------------------------------------------------------------


def practice(number: int) -> str:
    """The snippet under *In practice* of a notebook of this unit."""
    [path] = UNIT.glob(f"{number}-*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.search(r"### In practice\n+```python\n(.*?)```", prose, re.S)[1]


@pytest.mark.parametrize("batch_size", [64, 256, 1024])
def test_the_rates_in_practice_can_be_trained_with(batch_size, tmp_path):
    """Below, at and above the recipe's batch: optimizers, schedule and arguments exist, and take a step."""
    from torch import optim
    from torch.optim import lr_scheduler
    from transformers import TrainingArguments

    model, k = nn.Linear(4, 1), batch_size / 256
    given = {"model": model, "batch_size": batch_size, "world_size": 1, "accumulate_steps": 1, "C": 512}
    given |= {"updates": 100, "warmup_updates": 10, **vars(optim), **vars(lr_scheduler)}
    given["TrainingArguments"] = functools.partial(TrainingArguments, output_dir=str(tmp_path))
    made = defined(practice(3), "<in practice>", **given)
    assert made["saturating"] == pytest.approx((1 + 512 / 256) / (1 + 512 / batch_size))
    rate = made["optimizer"].param_groups[0]
    assert rate["lr"] == pytest.approx(0.1 * min(1, made["saturating"]))
    for _ in range(10):
        for optimizer in (made["optimizer"], made["adamw"]):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        made["schedule"].step()
    assert rate["lr"] == pytest.approx(0.1 * made["saturating"])
    assert made["adamw"].defaults["betas"] == pytest.approx((1 - k * 0.1, 1 - k * 0.001))
    assert made["arguments"].get_warmup_steps(1000) == 50
    assert made["arguments"].adam_epsilon == pytest.approx(1e-8 / math.sqrt(k))


def test_the_searches_in_practice_exist(tmp_path):
    """Each call of the snippet binds to what the installed libraries have, and the arguments are understood."""
    from accelerate.utils import find_executable_batch_size
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import BatchSizeFinder, ThroughputMonitor
    from lightning.pytorch.tuner import Tuner
    from transformers import TrainingArguments

    known = {"Trainer": Trainer, "BatchSizeFinder": BatchSizeFinder, "TrainingArguments": TrainingArguments}
    known |= {"Tuner": Tuner, "find_executable_batch_size": find_executable_batch_size}
    calls = [node for node in ast.walk(ast.parse(practice(2))) if isinstance(node, ast.Call)]
    for call in calls:
        keywords = {keyword.arg: None for keyword in call.keywords}
        if (name := ast.unparse(call.func)) in known:
            inspect.signature(known[name]).bind(*[None] * len(call.args), **keywords)
        elif name == "Tuner(trainer).scale_batch_size":
            inspect.signature(Tuner.scale_batch_size).bind(None, *[None] * len(call.args), **keywords)
    sizes = []

    def train(batch_size: int) -> int:
        sizes.append(batch_size)
        if batch_size > 40:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch_size

    assert find_executable_batch_size(train, starting_batch_size=128)() == sizes[-1] < 41
    assert TrainingArguments(output_dir=str(tmp_path), auto_find_batch_size=True).auto_find_batch_size
    assert TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=64).train_batch_size == 64
    assert ThroughputMonitor(batch_size_fn=len)
