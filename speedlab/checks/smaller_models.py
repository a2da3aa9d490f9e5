"""The checks of exercise 9: branched cooldowns, selective backprop, int8 weights, cut neurons, distillation, LoRA."""

import copy
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from speedlab import count
from speedlab.checks.core import apart, check, close, diagnose, distance, expect, fail, number, sequence, where, whole

_same = functools.partial(close, relative=1e-4, absolute=1e-7)


# --- Task 1 ---------------------------------------------------------------------------------------------------------

_MOST_STEPS = 400
_LENGTHS = (([12, 30, 20], 5), ([25, 8], 8), ([9], 4), ([3, 16, 5], 6), ([7, 4], 0))


class Training:
    """A small model, its optimizer, and a `train_step` that counts its calls in `steps`."""

    def __init__(self, cooldown: int, adam: bool = True):
        torch.manual_seed(0)
        self.cooldown, self.steps = cooldown, 0
        self.model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
        # the rates of the steps that made this model: a buffer travels with every kind of copy
        self.model.register_buffer("history", torch.full((_MOST_STEPS, 2), -1.0))
        kind = torch.optim.AdamW if adam else functools.partial(torch.optim.SGD, momentum=0.9)
        self.optimizer = kind(self.model.parameters(), lr=0.0)

    def __deepcopy__(self, memo: dict) -> "Training":
        return self  # a copy would count the steps of a copied train_step for itself

    def rate(self, step: int, length: int) -> float:
        """Four steps of warm-up, then constant, then linear towards zero in the last `cooldown` steps."""
        return 0.05 * min(1.0, (step + 1) / 4, (length - step) / (self.cooldown + 1))

    def train_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, length: int) -> None:
        """Make step number `step`, from 0, of a run of `length` steps: its own batch, its own rate."""
        step, length = whole(step, "The number of a step"), whole(length, "The length of a run", 1)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        others = "train_step gets an optimizer that holds the parameters of another model. Copy the two together."
        expect(held == {id(p) for p in model.parameters()}, others)
        expect(0 <= step < length, f"a run of {length} steps has no step {step}: steps count from 0.")
        self.steps += 1
        expect(self.steps <= _MOST_STEPS, f"you have run {_MOST_STEPS} steps, far more than are due.")
        generator = torch.Generator().manual_seed(step)
        x, labels = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        for group in optimizer.param_groups:
            group["lr"] = self.rate(step, length)
        optimizer.step()
        taken = int((model.history[:, 0] >= 0).sum())
        model.history[taken] = torch.tensor([step, self.rate(step, length)])


@check("Task 1, cooldowns off a trunk")
def train_lengths(answer: Callable[..., Mapping[int, nn.Module]]) -> None:
    for case, (lengths, cooldown) in enumerate(_LENGTHS):
        with where(f"With lengths {lengths} and a cooldown of {cooldown}"):
            run, alone = (Training(cooldown, adam=case % 2 == 0) for _ in range(2))
            got = answer(run.model, run.optimizer, run.train_step, list(lengths), cooldown)
            expect(isinstance(got, Mapping), f"return a dictionary {{length: model}}, not {type(got).__name__}.")
            models = [got.get(length) for length in sorted(lengths)]
            expect(all(isinstance(m, nn.Module) for m in models), f"return a model for each of {sorted(lengths)}.")
            one = "two lengths have one and the same model: copy it before you go on."
            expect(len(set(map(id, models))) == len(lengths), one)
            for length, model in zip(sorted(lengths), models, strict=True):
                wanted = copy.deepcopy((alone.model, alone.optimizer))
                for step in range(length):
                    alone.train_step(*wanted, step, length)
                if distance(list(model.parameters()), list(wanted[0].parameters())):
                    fail(f"the model of {length} steps differs from one trained alone. {_why(model, wanted[0])}")
            due = max(max(0, length - cooldown) for length in lengths) + sum(min(cooldown, n) for n in lengths)
            how = "Run the trunk once, up to the last branch, and from each branch run only its cooldown."
            expect(run.steps <= due, f"you run {run.steps} steps; {due} are enough. {how}")


def _why(model: nn.Module, wanted: nn.Module) -> str:
    """What the steps that made a model say about it."""
    rows = getattr(model, "history", wanted.history[:0]), wanted.history
    took, due = ([tuple(row) for row in found.tolist() if row[0] >= 0] for found in rows)
    steps = [int(step) for step, _ in took]
    missing = [step for step in range(len(due)) if step not in steps]
    wrong = [int(step) for (step, a), (_, b) in zip(took, due, strict=False) if a != b]
    hints = {
        "It has not been trained at all.": not took,
        f"It was made without step {missing[:1]}.": bool(missing),
        f"It was made by {len(took)} steps, so it goes on from a model that was further along, at least in part. "
        "Go through the lengths from the shortest on, and copy the pair before a cooldown.": len(took) > len(due),
        "Its steps come in another order.": steps != sorted(steps),
        f"Step {wrong[:1]} had the rate of a run of another length. Where does its cooldown begin, and does it go on "
        "from a run that has cooled down?": bool(wrong),
    }
    state = "a new one has lost its state, and one that loads a state_dict shares its tensors with the old one."
    return diagnose(None, hints, f"Its steps and rates are right, so the optimizer is wrong: {state} Copy the pair.")


# --- Task 2 ---------------------------------------------------------------------------------------------------------

_KEEPS = ((32, 0.25), (32, 0.5), (32, 0.75), (14, 0.25), (32, 1.0))  # samples, and the share to keep
_WRONG_STEPS = {
    "It contains an old gradient: call zero_grad before backward.": "zero",
    "You train on the smallest losses; keep the largest.": "easy",
    "You train on the first samples: choose those with the largest losses.": "first",
    "Divide by the samples that you keep, not by those of the batch.": "divided",
    "That is the sum of the losses; take their mean.": "sum",
    "Run the selection pass in eval mode: otherwise BatchNorm uses the batch's own statistics.": "train",
}


def network() -> nn.Sequential:
    """A classifier of ten features into four labels, with BatchNorm; the same every time."""
    torch.manual_seed(0)
    hidden = nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(32, 4))


def _selective(model, optimizer, x, labels, keep, fault="") -> None:
    """The step as it should be, or with one of the faults that leave its FLOPs as they are."""
    kept = int(keep * len(x))
    if keep < 1:
        with torch.no_grad():
            scores = F.cross_entropy(copy.deepcopy(model).train(fault == "train")(x), labels, reduction="none")
        chosen = slice(kept) if fault == "first" else scores.topk(kept, largest=fault != "easy").indices
        x, labels = x[chosen], labels[chosen]
    if fault != "zero":
        optimizer.zero_grad()
    (F.cross_entropy(model(x), labels) * {"divided": keep, "sum": kept}.get(fault, 1)).backward()
    optimizer.step()


@check("Task 2, selective backprop")
def selective_step(answer: Callable[..., object]) -> None:
    for samples, keep in _KEEPS:
        runs = (answer, keep), (_selective, keep), (_selective, 1.0)
        got, wanted, plain = (_Steps(*run, samples) for run in runs)
        for nth in (1, 2):  # the second begins in the mode in which the first has left the model
            with where(f"With {samples} samples, keep={keep:g}, step {nth}"):
                before = copy.deepcopy(got.model)
                _examine_cost(got.step(), wanted.step(), plain.step(), keep, distance(got.model, before) > 0)
                moved, due = (int(run.model[1].num_batches_tracked) for run in (got, wanted))
                selecting = (
                    "Run the selection pass in eval mode: no_grad does not stop BatchNorm updating its statistics."
                )
                trained = "Put the model back into train mode before it trains on the samples that you keep."
                counts = f"BatchNorm has counted {moved} batches in {nth} steps, not {due}."
                expect(moved == due, f"{counts} {selecting if moved > due else trained}")
                if not _same(got.model, wanted.model):
                    wrong = {hint: functools.partial(_selective, fault=fault) for hint, fault in _WRONG_STEPS.items()}
                    found = {hint: _Steps(step, keep, samples).after(nth) for hint, step in wrong.items()}
                    other = "Which samples do you train on, and with which loss? One optimizer.step() follows."
                    fail(f"the model is not what it should be. {diagnose(got.model, found, other, _same)}")
                expect(all(module.training for module in got.model.modules()), "leave the model in train mode.")


class _Steps:
    """A run of steps on a model and data of its own, the same for every run."""

    def __init__(self, run: Callable, keep: float, samples: int):
        self.run, self.keep, self.model = run, keep, network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)  # what an earlier step may leave behind
        self.batches = [(torch.randn(samples, 10) * 2 + 1, torch.randint(4, (samples,))) for _ in range(2)]

    def step(self) -> tuple[int, int]:
        """Make the next step; return its FLOPs, and the bytes that it keeps for backward."""
        work, kept = functools.partial(self.run, self.model, self.optimizer, *self.batches.pop(), self.keep), []
        return count.flops(lambda: kept.append(count.saved_bytes(work, self.model).bytes)), kept[0]

    def after(self, steps: int) -> nn.Module:
        return [self.step() for _ in range(steps)] and self.model


def _examine_cost(got: tuple, wanted: tuple, plain: tuple, keep: float, moved: bool) -> None:
    expect(moved, "the model has not changed. Train the one that you are given: backward, then optimizer.step().")
    hints = {
        "With keep=1 there is nothing to choose: make a plain step, without a selection pass.": keep == 1,
        "A mask or an index on the losses saves nothing: run the model again, on what you keep.": plain[0],
        "The second pass has all samples: pass it only those that you keep.": got[0] > 1.2 * plain[0],
    }
    rule = diagnose(
        got[0], hints, "One selection pass over all samples; then train on int(keep * len(images)), rounded down."
    )
    costs = [f"{flops / plain[0]:.3f}" for flops in (got[0], wanted[0])]
    expect(got[0] == wanted[0], "it costs {} times the FLOPs of a plain step, not {}. ".format(*costs) + rule)
    much = f"it keeps {got[1]} bytes for backward, and {wanted[1]} would do: run the selection pass under no_grad."
    expect(got[1] <= 1.3 * wanted[1], much)


# --- Task 3 ---------------------------------------------------------------------------------------------------------


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    """Weights (out, in) with their stories."""
    generator = torch.Generator().manual_seed(0)
    usual = torch.randn(12, 20, generator=generator)
    yield "For usual weights", usual
    yield "For rows of very different size", usual * torch.logspace(-2, 2, 12)[:, None]
    outlier = usual.clone()
    outlier[3, 7] = -200.0
    yield "For an outlier in row 3", outlier
    yield "For weights that are nearly zero", usual * 1e-7
    yield "For rows whose largest weight is negative", -usual.abs() * torch.rand(12, 20, generator=generator)
    yield "For a constant tensor", torch.full((5, 9), 0.3)
    yield "For one row", usual[:1] / 40
    yield "For one column", usual[:, :1].clone()
    empty = usual.clone()
    empty[[2, 11]] = 0.0
    yield "For weights with two rows of zeros", empty
    yield "For zeros only", torch.zeros(4, 6)


@check("Task 3, int8 per channel")
def quantize(answer: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
    for story, weight in weights():
        with where(story):
            given = weight.clone()
            numbers, scales = _numbers_and_scales(answer(given), *weight.shape)
            expect(torch.equal(given, weight), "you change the weight that you are given: leave it as it is.")
            weight = weight.double()
            errors, bounds = (weight - numbers * scales).abs().amax(1), weight.abs().amax(1) / 127 / 2
            row = int((errors - bounds).argmax())
            error, bound = apart(float(errors[row]), float(bounds[row]))
            said = f"row {row} comes back with an error of {error}; {bound} is allowed. "
            right = errors[row] <= bounds[row] * 1.001 + 1e-12
            expect(right, lambda: said + _why_error(numbers, scales, weight))  # noqa: B023
    for bad, (row, column) in itertools.product((math.nan, math.inf, -math.inf), ((1, 0), (0, 1), (2, 1))):
        with where(f"With a weight of {bad} in row {row}, column {column}"):
            weight = torch.tensor([[1.0, 2.0], [6.0, 3.0], [4.0, 5.0]])
            weight[row, column] = bad
            try:
                got = answer(weight)
                sequence(got if isinstance(got, Iterator) else ())  # a generator begins only now
            except ValueError as error:
                expect(str(error).strip(), "your ValueError says nothing: give it a sentence.")
            except Exception as error:
                fail(f"raise a ValueError with a sentence, not {type(error).__name__}.")
            else:
                fail("raise a ValueError that says so: one such weight would spoil its row silently.")


def _numbers_and_scales(value: object, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in fp64, the scales as a column."""
    parts = sequence(value, "What you return, numbers and scales,", length=2)
    try:
        numbers, scales = (torch.as_tensor(part).detach() for part in parts)
    except (TypeError, ValueError, RuntimeError):
        fail("return two tensors: the numbers, and the scales.")
    kind, shape = str(numbers.dtype).removeprefix("torch."), tuple(numbers.shape)
    expect(kind == "int8", f"the numbers are {kind}: convert them to torch.int8, a byte each.")
    expect(shape == (rows, columns), f"the numbers have shape {shape}, not {(rows, columns)}.")
    hints = {"One scale for the whole tensor is not enough: one outlier would coarsen every row.": 1}
    hints["A channel is a row: take the largest along dimension 1."] = columns
    found = scales.numel()
    expect(found == rows, lambda: f"there are {found} scales for {rows} rows. {diagnose(found, hints)}")
    column = f"the scales have shape {tuple(scales.shape)}: make it ({rows},) or ({rows}, 1)."
    expect(rows == 1 or scales.shape in ((rows,), (rows, 1)), column)
    kind = f"the scales are {str(scales.dtype).removeprefix('torch.')} and take {scales.nbytes} bytes"
    expect(scales.dtype == torch.float32, f"{kind}; make them fp32, which takes {4 * rows}.")
    ready = scales.isfinite().all() and (scales > 0).all()
    expect(ready, "a scale is not above 0, or not finite. In a row of zeros any scale will do, such as 1.")
    return numbers.double(), scales.double().reshape(-1, 1)


def _why_error(numbers: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor) -> str:
    due, signed, exact = weight.abs().amax(1, True) / 127, weight.amax(1, True).abs() / 127, weight / scales
    one = scales == scales[0]
    shares = {  # of the weights or rows, those that show the fault; most of them must
        "The floor under your scale is too high: take torch.finfo(torch.float32).tiny.": (scales > 1.01 * due)
        & (due < 1e-6),
        "All rows have one scale: give each its own, or one outlier coarsens every row.": one & (due != due[0]).any(),
        "You return 1 / scale: a weight is its number times its scale.": (scales * due - 1).abs() < 1e-3,
        "Take the largest absolute value: it may be that of a negative weight.": ((scales / signed - 1).abs() < 1e-3)
        & (signed < due).any(),
        "You return the largest weight itself: return it divided by 127.": (scales / due / 127 - 1).abs() < 1e-3,
        "Beyond 127 an int8 wraps around: 128 becomes -128.": ((numbers * weight < 0) & (exact.abs() > 127.5)).any(),
        "The scale is too large: the largest weight of a row should become 127.": scales > 1.01 * due,
        "The scale is too small: the largest weight of a row goes beyond 127.": scales < 0.999 * due,
        "The conversion to int8 cuts off the fraction: round first.": numbers == exact.trunc(),
        "torch.floor is not rounding: use torch.round.": numbers == exact.floor(),
    }
    hints = {hint: len(weight) > 1 and float(shown.double().mean()) > 0.9 for hint, shown in shares.items()}
    return diagnose(
        None, hints, "Divide a row by the scale that you return, its largest absolute weight / 127, and round."
    )


# --- Task 4 ---------------------------------------------------------------------------------------------------------

_MLPS = (  # inputs, hidden neurons, outputs, neurons to keep, activation, biases
    (8, 12, 6, 5, nn.GELU, (True, True)),
    (6, 10, 7, 4, nn.Sigmoid, (True, True)),  # sigmoid(0) is not 0
    (9, 9, 9, 9, nn.ReLU, (True, True)),
    (5, 16, 5, 1, nn.Tanh, (False, True)),
    (7, 11, 3, 6, functools.partial(nn.LeakyReLU, 0.5), (True, False)),
    (8, 10, 4, 5, functools.partial(nn.PReLU, init=0.5), (True, True)),  # with a parameter of its own
)


@check("Task 4, neurons cut out")
def cut_neurons(answer: Callable[[nn.Sequential, int], nn.Sequential]) -> None:
    torch.manual_seed(101)  # with these first weights, each criterion that a hint names keeps different neurons
    for wide, hidden, out, keep, activation, biases in _MLPS:
        first, second = nn.Linear(wide, hidden, bias=biases[0]), nn.Linear(hidden, out, bias=biases[1])
        nn.init.uniform_(second.weight, -2, 2)
        model, x = nn.Sequential(first, activation(), second), torch.randn(9, wide)
        for slope in model[1].parameters():
            nn.init.constant_(slope, 0.8)  # as if trained: not what a new one begins with
        before = copy.deepcopy(model)
        with where(f"With {hidden} neurons, {type(model[1]).__name__} and keep={keep}"):
            got = answer(model, keep)
            expect(isinstance(got, nn.Module), f"return the smaller network, not {type(got).__name__}.")
            expect(distance(model, before) == 0, "you change the network that you are given: make a new one.")
            flags, kept = ([m.training, *(p.requires_grad for p in m.parameters())] for m in (model, before))
            expect(flags == kept, "you freeze the network that you are given, or change its mode: leave it as it is.")
            _examine_layers(got, model, keep)
            flops, wanted = count.flops(lambda: got(x)), 2 * len(x) * keep * (wide + out)  # noqa: B023
            expect(flops == wanted, f"a forward pass takes {flops} FLOPs, not {wanted}: run both layers once each.")
            stay = first.weight.norm(dim=1).topk(keep).indices
            masked = second(model[1](first(x)) * torch.zeros(hidden).index_fill(0, stay, 1.0))
            differs = "it differs from the network with the other neurons zeroed. "
            expect(_same(got(x), masked), lambda: differs + _why_cut(got, model, stay.tolist()))  # noqa: B023


def _linears(network: nn.Module) -> list[nn.Linear]:
    return [module for module in network.modules() if isinstance(module, nn.Linear)]


def _examine_layers(got: nn.Module, model: nn.Sequential, keep: int) -> None:
    layers, old = _linears(got), _linears(model)
    expect(len(layers) == 2, f"the network has {len(layers)} linear layers, not 2.")
    found, whole = ([tuple(layer.weight.shape) for layer in found] for found in (layers, old))
    wanted = [(keep, old[0].in_features), (old[1].out_features, keep)]
    zeros, both = "Zeros cost as much: make smaller matrices.", "A neuron is a row, then a column: cut both."
    why = zeros if found == whole else both
    expect(found == wanted, f"the weights have shapes {found}, not {wanted}. {why}")
    features = [(layer.out_features, layer.in_features) for layer in layers]
    expect(features == wanted, "in_features and out_features still give the old widths: make new nn.Linear layers.")
    alike = [(new.bias is None) == (was.bias is None) for new, was in zip(layers, old, strict=True)]
    expect(all(alike), "a layer with a bias keeps one, and a layer without gets none.")
    first, second = (None if layer.bias is None else len(layer.bias) for layer in layers)
    expect(first in (None, keep), f"the first bias has {first} numbers for {keep} neurons: cut it like the rows.")
    expect(second in (None, old[1].out_features), f"the second bias has {second} numbers: it stays as it is.")
    _expect_parameters(*layers)
    memory = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shared = next((name for name, p in got.named_parameters() if p.untyped_storage().data_ptr() in memory), None)
    expect(shared is None, f"the new network shares memory with the old one, its {shared}: copy what stays.")
    parts = [*layers, model[1]]
    size, due = count.state_bytes(got).total, sum(p.nbytes for part in parts for p in part.parameters())
    expect(size >= due, f"it holds {size} bytes of {due}: the activation's parameter is missing. Is it a submodule?")
    expect(size == due, f"it holds {size} bytes; {due} are enough. A view or a mask keeps the rest, or a gradient.")
    expect(all(p.requires_grad for p in got.parameters()), "its parameters must require gradients, to train.")


def _expect_parameters(*layers: nn.Linear) -> None:
    held = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None]
    plain = "a weight is a plain tensor, which no optimizer sees: make it an nn.Parameter, with numbers of its own."
    expect(all(isinstance(p, nn.Parameter) for p in held), plain)


def _why_cut(got: nn.Module, model: nn.Module, stay: list[int]) -> str:
    (first, second), (was, then) = _linears(got), _linears(model)
    rows, columns = _places(first.weight, was.weight), _places(second.weight.T, then.weight.T)
    criteria = {
        "These have the smallest norms; keep the largest.": -was.weight.norm(dim=1),
        "These are the first ones: choose by the norm.": -torch.arange(float(len(was.weight))),
        "You rank by the outgoing weights; use a neuron's incoming ones.": then.weight.norm(dim=0),
        "You rank by the sum of absolute weights; a norm squares them first.": was.weight.abs().sum(1),
        "You rank by the sum of the weights, in which signs cancel.": was.weight.sum(1),
        "You include the bias: leave it out of the norm.": was.weight.norm(dim=1)
        if was.bias is None
        else torch.cat([was.weight, was.bias[:, None]], 1).norm(dim=1),
    }
    if -1 in rows + columns:
        return "These weights are not the old ones: copy what stays."
    found = {hint: set(rows) == set(by.topk(len(stay)).indices.tolist()) for hint, by in criteria.items()}
    if set(rows) != set(stay):
        return f"You keep the neurons {rows}, not {stay}. {diagnose(None, found)}"
    if rows != columns:
        return f"The rows belong to neurons {rows}, the columns to {columns}: take the same ones, in one order."
    if first.bias is not None and not torch.equal(first.bias, was.bias[rows]):
        return "The first layer's bias is not that of its neurons: cut it like the rows."
    same = then.bias is None or torch.equal(second.bias, then.bias)
    return "Is the activation the same?" if same else "The second layer keeps its bias as it is."


def _places(parts: torch.Tensor, old: torch.Tensor) -> list[int]:
    """Which rows of the old matrix the new ones are; -1: none."""
    return [next((i for i, row in enumerate(old) if torch.equal(part, row)), -1) for part in parts]


# --- Task 5 ---------------------------------------------------------------------------------------------------------

_SETTINGS = ((1.0, 1.0), (3.0, 1.0), (2.0, 0.3), (3.0, 0.0))  # temperature, alpha
_FAULTS = {
    "Multiply the soft loss by temperature squared, or its gradient fades as the temperature rises.": "square",
    'The default reduction also divides by the number of classes: reduction="batchmean".': "mean",
    "Your soft loss is a sum over the batch: divide it by the number of samples.": "sum",
    "kl_div expects log-probabilities of the student: log_softmax, not softmax.": "probabilities",
    "kl_div takes the student first, then the teacher.": "swapped",
    "The soft loss is missing, or alpha and 1 - alpha are exchanged: alpha weights the soft loss.": "alpha",
    "You do not divide the teacher's logits by the temperature; divide both.": "teacher",
    "You do not divide the student's logits by the temperature; divide both.": "student",
    "The hard loss is missing.": "soft only",
    "The hard loss takes the logits as they are, not divided by the temperature.": "softened",
    "Multiply the soft loss by the temperature squared, not by the temperature.": "once",
    "The temperature squared belongs to the soft loss only.": "whole",
}


def _distilled(student, teacher, images, labels, temperature, alpha, faults=()) -> torch.Tensor:
    """The loss as it should be, or with some of the faults."""
    with torch.no_grad():
        target = (teacher.eval()(images) / (1 if "teacher" in faults else temperature)).log_softmax(-1)
    logits = student(images)
    guess = logits / (1 if "student" in faults else temperature)
    guess = guess.softmax(-1) if "probabilities" in faults else guess.log_softmax(-1)
    reduction = next((name for name in ("mean", "sum") if name in faults), "batchmean")
    pair = (target, guess) if "swapped" in faults else (guess, target)
    power = 0 if "square" in faults else 1 if "once" in faults else 2
    soft = F.kl_div(*pair, log_target=True, reduction=reduction) * temperature**power
    alpha = 1 - alpha if "alpha" in faults else alpha
    hard = F.cross_entropy(logits / (temperature if "softened" in faults else 1), labels)
    hard = hard * (temperature**2 if "whole" in faults else "soft only" not in faults)
    return alpha * soft + (1 - alpha) * hard


@check("Task 5, a distillation loss mended")
def distillation_loss(answer: Callable[..., torch.Tensor]) -> None:
    for setting in _SETTINGS:
        with where("With temperature={:g}, alpha={:g}".format(*setting)):
            got, wanted = _Distilled(answer, setting), _Distilled(_distilled, setting)
            lost = "no gradient arrives at the student: does the loss depend on its logits, with their graph?"
            expect(got.gradient.any(), lost)
            both = (
                "Backward goes through the teacher, too: run it under no_grad."
                if got.both
                else "Run each once; a product of all rows in the loss counts, too."
            )
            expect(
                got.flops <= 1.01 * wanted.flops,  # room for a sum written as a product; any layer again is more
                f"the step takes {got.flops} FLOPs; {wanted.flops} are enough. {both}",
            )
            late = "detach comes too late, when the teacher's activations are already kept: run it under no_grad."
            expect(got.kept <= wanted.kept + 6000, f"{got.kept} bytes are kept; {wanted.kept} would do. {late}")
            moved = distance(got.teacher, wanted.teacher) > 0
            expect(not moved, "the teacher's BatchNorm was updated: call teacher.eval(), as it may be in train mode.")
            expect(got.student.training, "the student must stay in train mode.")
            expect(got.modes["student"] != {False}, "the student runs in eval mode: it must run in train mode.")
            still = "the teacher runs in train mode, at least its dropout or its BatchNorm: call teacher.eval()."
            expect(True not in got.modes["teacher"], still)
            ratio = f"its norm is {got.gradient.norm() / wanted.gradient.norm():.3g} times that of the right one. "
            right = _same(got.gradient, wanted.gradient)
            expect(right, lambda: f"the gradient is wrong; {ratio}{_why_gradient(got.gradient, setting)}")  # noqa: B023
            # a cross-entropy with the teacher's probabilities has the same gradient, and is larger by their entropy
            entropy = setting[1] * setting[0] ** 2 * wanted.teachers_entropy(setting[0])
            found = number(got.value, "The loss")
            said, due = apart(found, wanted.value)
            hint = "Is p log p of the teacher taken at this temperature, and is nothing else added?"
            right = any(close(found, wanted.value + more, 1e-4) for more in (0.0, entropy))
            expect(right, f"the gradient is right, but the loss is {said}, not {due}. {hint}")


def _why_gradient(gradient: torch.Tensor, setting: tuple[float, float]) -> str:
    sets = itertools.chain.from_iterable(itertools.combinations(_FAULTS, number) for number in (1, 2, 3))
    found = {" ".join(hints): functools.partial(_faulty, setting, hints) for hints in sets}
    late = (
        "That is the gradient at temperature 1: divide the logits by the temperature, before the softmax, and "
        "multiply the soft loss by its square."
    )
    found = {late: functools.partial(_faulty, (1.0, setting[1]), ()), **found}
    return diagnose(gradient, found, "Compare with the formula, term by term.", _same)


def _faulty(setting: tuple[float, float], hints: Collection[str]) -> torch.Tensor:
    loss = functools.partial(_distilled, faults=[_FAULTS[hint] for hint in hints])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kl_div about reduction="mean", which may not be the answer's
        return _Distilled(loss, setting, False).gradient


class _Distilled:
    """What a loss gives and costs, on a student, a teacher and a batch that are the same every time."""

    def __init__(self, loss: Callable, setting: tuple[float, float], counted: bool = True):
        self.loss, self.setting, self.student, self.kept = loss, setting, network(), 0
        wide = nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4)
        self.teacher, self.batch = nn.Sequential(*wide), (torch.randn(24, 10), torch.randint(4, (24,)))
        nn.init.normal_(self.teacher[-1].weight)
        self.modes: dict[str, set[bool]] = {"student": set(), "teacher": set()}
        self.flops = count.flops(self.step) if counted else self.step(False)
        self.both = any(p.grad is not None for p in self.teacher.parameters())
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.student.parameters()]
        self.gradient = torch.cat([gradient.flatten() for gradient in found])

    def step(self, counted: bool = True) -> None:
        made, models = [], nn.ModuleList([self.student, self.teacher])
        forward = lambda: made.append(self.loss(self.student, self.teacher, *self.batch, *self.setting))  # noqa: E731
        with nn.modules.module.register_module_forward_pre_hook(self._note_mode):
            self.kept = count.saved_bytes(forward, models).bytes if counted else forward()
        (value,) = made
        lone = isinstance(value, torch.Tensor) and value.numel() == 1
        expect(lone, f"return the loss, a tensor of one number, not {type(value).__name__}.")
        early = any(p.grad is not None for p in models.parameters())
        expect(not early, "leave backward to the caller: return the loss.")
        expect(value.requires_grad, "the loss has no graph: backward would do nothing.")
        value.backward()
        self.value = float(value.detach())

    def teachers_entropy(self, temperature: float) -> float:
        """The entropy of its softened probabilities, as a mean over the batch."""
        with torch.no_grad():
            logits = copy.deepcopy(self.teacher).eval()(self.batch[0]) / temperature
        return float(torch.distributions.Categorical(logits=logits).entropy().mean())

    def _note_mode(self, module: nn.Module, _: object) -> None:
        """Note the mode in which a layer runs if its result depends on the mode: also a layer of a copy."""
        if isinstance(module, nn.Dropout | nn.BatchNorm1d):
            teachers = isinstance(module, nn.Dropout) or module.num_features == 64
            self.modes["teacher" if teachers else "student"].add(module.training)


# --- Task 6 ---------------------------------------------------------------------------------------------------------

_LAYERS = ((96, 64, 3, 8.0, True), (48, 48, 3, 2.0, True), (64, 96, 1, 3.0, False))  # in, out, rank, alpha, bias


@check("Task 6, a LoRA linear")
def lora(adapter: Callable, adapted: Callable, merged: Callable) -> None:
    for wide, out, rank, alpha, bias in _LAYERS:
        base, x = nn.Linear(wide, out, bias=bias), torch.randn(4, 16, wide, requires_grad=True)
        before = copy.deepcopy(base)
        with where(f"With {wide} inputs, {out} outputs, rank {rank} and alpha={alpha:g}"):
            down, up = sequence(adapter(base, rank), "What adapter returns, down and up,", length=2)
            _examine_parts(down, up, (rank, wide), (out, rank))
            expect(distance(base, before) == 0, "adapter changes the weights of the base.")
            frozen = not any(p.requires_grad for p in base.parameters())
            expect(frozen, "adapter leaves the base trainable: freeze all of it.")
            expect(not (up @ down).any(), "up @ down must be zero at first: let one of the two begin as zeros.")
            got = _output(adapted, x, base, down, up, alpha)
            expect(down.requires_grad and up.requires_grad, "adapted freezes down or up: it must only read them.")
            why = "up @ down is zero, so adapted must give base(x), bias included, and no more."
            expect(_same(got, base(x)), f"before the first step the output differs from the base's: {why}")
            got.square().sum().backward()
            moving = any(p.grad is not None and p.grad.any() for p in (down, up))
            expect(moving, "no gradient arrives: with both at zero, or with no_grad, the adapter never learns.")
            state, due = _state([*base.parameters(), down, up]), 8 * rank * (wide + out) + 8  # 8: two counters
            expect(state == due, f"AdamW keeps {state} bytes for what trains, not {due}. Freeze the base, all of it.")
            with torch.no_grad():
                down.normal_(), up.normal_()
            _examine_trained(adapted, merged, x, base, down, up, alpha)
            expect(distance(base, before) == 0, "the weights of the base have changed: make a new layer in merged.")
            thawed = any(p.requires_grad for p in base.parameters())
            expect(not thawed, "adapted or merged makes the base trainable again: leave it as it is.")


def _examine_parts(down: object, up: object, *wanted: tuple[int, int]) -> None:
    trainable = all(isinstance(p, nn.Parameter) and p.requires_grad for p in (down, up))
    expect(trainable, "adapter must return two trainable nn.Parameters: a module registers no other tensor.")
    shapes = tuple(down.shape), tuple(up.shape)
    swapped = " You return up first." * (shapes == wanted[::-1])
    expect(shapes == wanted, f"down and up have shapes {shapes}, not {wanted}.{swapped}")
    expect(down.isfinite().all() and up.isfinite().all(), "down or up holds a nan or an infinity: initialise it.")


def _output(adapted: Callable, x: torch.Tensor, base: nn.Linear, *rest: object) -> torch.Tensor:
    got, shape = adapted(x, base, *rest), (*x.shape[:-1], base.out_features)
    expect(isinstance(got, torch.Tensor), f"adapted must return the output, a tensor, not {type(got).__name__}.")
    expect(got.shape == shape, f"adapted gives an output of shape {tuple(got.shape)}, not {shape}.")
    expect(got.requires_grad, "what adapted returns has no graph, so the adapter cannot learn.")
    return got


def _state(parameters: list[nn.Parameter]) -> int:
    """Bytes that AdamW keeps for those of the parameters that train."""
    optimizer = torch.optim.AdamW([p for p in parameters if p.requires_grad])
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return count.state_bytes(nn.ParameterList(parameters), optimizer).optimizer


def _examine_trained(adapted: Callable, merged: Callable, x, base, down, up, alpha) -> None:
    rank, change, before = len(down), (up @ down).detach(), [p.detach().clone() for p in (down, up)]
    scales = {
        "Scale the change by alpha / rank: here it has no scale.": 1,
        "Divide alpha by the rank.": alpha,
        "Divide alpha by the rank; dividing by its square root is a different method, rsLoRA.": alpha / rank**0.5,
        "The scale is upside down.": rank / alpha,
        "The scale is there twice.": (alpha / rank) ** 2,
        "The change is missing.": 0,
        "The change is there twice.": 2 * alpha / rank,
        "The change is subtracted.": -alpha / rank,
    }
    faults = {hint: F.linear(x, base.weight + scale * change, base.bias) for hint, scale in scales.items()}
    if change.shape == change.T.shape:
        hidden = "up @ down is transposed, which only the shape of a square layer hides."
        faults[hidden] = F.linear(x, base.weight + alpha / rank * change.T, base.bias)
    wanted, made = F.linear(x, base.weight + alpha / rank * change, base.bias), []
    other = "It is base(x) + alpha / rank * (x @ down.T @ up.T)."
    flops = count.flops(lambda: made.append(_output(adapted, x, base, down, up, alpha)) or made[0].sum().backward())
    expect(distance([down, up], before) == 0, "down or up has changed: adapted must only read them.")
    why = "with a trained adapter, what {} gives is wrong. {}"
    expect(_same(made[0], wanted), lambda: why.format("adapted", diagnose(made[0], faults, other, _same)))
    due = 2 * x.shape[:-1].numel() * (2 * base.weight.numel() + 3 * rank * sum(base.weight.shape))
    large = "Run the base, down and up once each. Form neither up @ down nor a gradient of the base's weight."
    inputs = {"x": x, "down": down, "up": up}
    right = F.linear(x, base.weight + alpha / rank * up @ down, base.bias)
    slopes = [
        torch.autograd.grad(out.square().sum(), tuple(inputs.values()), allow_unused=True)
        for out in (_output(adapted, x, base, down, up, alpha), right)
    ]
    for name, found, true in zip(inputs, *slopes, strict=True):
        cut = f"the gradient of {name} through adapted is wrong: does a detach or a no_grad cut it off?"
        expect(found is not None and _same(found, true), cut)
    expect(flops <= due, f"forward and backward take {flops} FLOPs; {due} are enough. {large}")
    layer = merged(base, down, up, alpha)
    expect(isinstance(layer, nn.Linear), f"merged must return an nn.Linear, not {type(layer).__name__}.")
    same = layer.weight.shape == base.weight.shape and (layer.bias is None) == (base.bias is None)
    expect(same, "what merged returns differs from the base in shape, or in having a bias.")
    _expect_parameters(layer)
    got = layer(x)
    other_bias = F.linear(x, base.weight + alpha / rank * change, layer.bias)
    faults = {"Its bias is not the base's: copy that, too.": other_bias, **faults}
    expect(_same(got, wanted), lambda: why.format("merged", diagnose(got, faults, other, _same)))
    spoiled = distance([down, up], before) > 0 or not (down.requires_grad and up.requires_grad)
    expect(not spoiled, "down or up has changed, or been frozen: merged must only read them.")
