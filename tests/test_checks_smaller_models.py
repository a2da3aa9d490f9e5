"""The checks of exercise 9 accept the solution and other right answers, see a stub, and explain planted mistakes."""

import contextlib
import copy
import functools
import heapq
import io
import math
from collections import OrderedDict, defaultdict, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch
from notebook_answers import endless
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from speedlab import count
from speedlab.checks import smaller_models as checks

NAME = "exercise-9-smaller-models.ipynb"
PARTS = {"lora": ("adapter", "adapted", "merged")}
TASKS = ("train_lengths", "selective_step", "quantize", "cut_neurons", "distillation_loss", "lora")


def answers_of(found: dict, task: str) -> tuple:
    return tuple(found[name] for name in PARTS.get(task, (task,)))


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_is_correct_and_the_stub_not_attempted(task, solution, stub, verdict):
    assert verdict(task, *answers_of(solution, task)) == "correct"
    assert verdict(task, *answers_of(stub, task)) == "not attempted yet"


@pytest.mark.parametrize("task", TASKS)
def test_an_endless_answer_is_stopped(task, verdict, monkeypatch):
    monkeypatch.setattr(getattr(checks, task), "seconds", 0.5)
    assert "had not ended" in verdict(task, *[endless] * len(PARTS.get(task, "1")))


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "12", [], {}, -1, 10**9, True, torch.tensor(math.nan)])
@pytest.mark.parametrize("task", TASKS)
def test_a_constant_is_refused_in_a_sentence(task, value, rejects):
    rejects(task, (lambda *_, **__: value,) * len(PARTS.get(task, "1")))


@pytest.mark.parametrize("task", TASKS)
def test_an_answer_may_print_and_is_told_of_what_it_raises(task, solution, verdict, capsys):
    answers = answers_of(solution, task)

    def loud(answer):
        return lambda *arguments: print("here") or answer(*arguments)

    getattr(checks, task)(*map(loud, answers))
    assert capsys.readouterr().out.endswith(": correct\n")
    assert "raised ZeroDivisionError" in verdict(task, *[lambda *_: 1 / 0] * len(answers))


@pytest.mark.parametrize("task", TASKS)
def test_swallowed_errors_leave_nothing_to_accept(task, solution, rejects):
    def swallowing(answer):
        def run(*arguments):
            with contextlib.suppress(Exception):
                answer(*arguments, "one too many")

        return run

    rejects(task, tuple(map(swallowing, answers_of(solution, task))))


def cases(answers: list) -> list:
    return [pytest.param(*(a if isinstance(a, tuple) else (a,)), id=str(i)) for i, a in enumerate(answers, 1)]


# --- Task 1 ---------------------------------------------------------------------------------------------------------


def run(pair, train_step, begin, end, length):
    for step in range(begin, end):
        train_step(*pair, step, length)
    return pair


def branches(
    *,
    copied=copy.deepcopy,
    order=sorted,
    early=0,
    late=0,
    trunk=None,
    rate=None,
    cut=0,
    made=dict,
    key=int,
    steps=range,
):
    """A loop along the trunk, with styles and mistakes to switch on."""

    def train_lengths(model, optimizer, train_step, lengths, cooldown):
        trained, done, longest = {}, 0, max(lengths)
        for length in order(lengths):
            branch = max(0, length - cooldown - early) + late
            for step in steps(done, branch):
                train_step(model, optimizer, step, trunk(length, longest) if trunk else length)
            done = max(done, branch)
            pair = copied((model, optimizer))
            for step in steps(branch, length - cut):
                train_step(*pair, step, rate(length, longest) if rate else length)
            trained[key(length)] = pair[0]
        return made(trained)

    return train_lengths


def with_one_memo(pair):
    memo = {}
    return copy.deepcopy(pair[0], memo), copy.deepcopy(pair[1], memo)


def through_a_file(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def like(optimizer, parameters):
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return type(optimizer)(parameters, **{k: v for k, v in options.items() if k != "decoupled_weight_decay"})


def with_a_copied_state(pair, kept=copy.deepcopy):
    model = copy.deepcopy(pair[0])
    optimizer = like(pair[1], model.parameters())
    optimizer.load_state_dict(kept(pair[1].state_dict()))
    return model, optimizer


def tensor_by_tensor(pair):
    model = copy.deepcopy(pair[0])
    optimizer = like(pair[1], model.parameters())
    for old, new in zip(pair[0].parameters(), model.parameters(), strict=True):
        for name, value in pair[1].state[old].items():
            optimizer.state[new][name] = value.clone()
    return model, optimizer


def put_back(model, optimizer, train_step, lengths, cooldown):
    trained, done = {}, 0
    for length in sorted(lengths):
        branch = max(0, length - cooldown)
        run((model, optimizer), train_step, done, branch, length)
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        trained[length] = copy.deepcopy(run((model, optimizer), train_step, branch, length, length)[0])
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        done = branch
    return trained


def trunk_first(model, optimizer, train_step, lengths, cooldown):
    kept = {}
    leaves = {length: max(0, length - cooldown) for length in lengths}
    for step in range(max(leaves.values()) + 1):
        if step in leaves.values():
            kept[step] = copy.deepcopy((model, optimizer))
        if step < max(leaves.values()):
            train_step(model, optimizer, step, max(lengths))
    return {n: run(copy.deepcopy(kept[leaf]), train_step, leaf, n, n)[0] for n, leaf in leaves.items()}


def recursive(model, optimizer, train_step, lengths, cooldown, done=0):
    if not lengths:
        return {}
    length, *rest = sorted(lengths)
    branch = max(0, length - cooldown)
    run((model, optimizer), train_step, done, branch, length)
    pair = copy.deepcopy((model, optimizer))
    others = recursive(model, optimizer, train_step, rest, cooldown, branch)
    return {length: run(pair, train_step, branch, length, length)[0], **others}


def last_on_the_trunk(model, optimizer, train_step, lengths, cooldown):
    trained, done, pair = {}, 0, (model, optimizer)
    for length in sorted(lengths):
        branch = max(0, length - cooldown)
        run(pair, train_step, done, branch, length)
        its = pair if length == max(lengths) else copy.deepcopy(pair)
        trained[length], done = run(its, train_step, branch, length, length)[0], branch
    return trained


def with_a_heap(model, optimizer, train_step, lengths, cooldown):
    events, trained, step = [(max(0, n - cooldown), n) for n in lengths], {}, 0
    heapq.heapify(events)
    while events:
        leaf, length = heapq.heappop(events)
        while step < leaf:
            train_step(model, optimizer, step, length)
            step += 1
        trained[length] = run(copy.deepcopy((model, optimizer)), train_step, leaf, length, length)[0]
    return trained


def on_a_copy(model, optimizer, train_step, lengths, cooldown):
    return branches()(*copy.deepcopy((model, optimizer)), train_step, lengths, cooldown)


def with_a_class(model, optimizer, train_step, lengths, cooldown):
    class Trunk:
        done = 0

        def until(self, step, length):
            run((model, optimizer), train_step, self.done, step, length)
            self.done = step
            return copy.deepcopy((model, optimizer))

    trunk = Trunk()
    leaves = [(length, max(0, length - cooldown)) for length in sorted(lengths)]
    return {n: run(trunk.until(leaf, n), train_step, leaf, n, n)[0] for n, leaf in leaves}


def reduced(model, optimizer, train_step, lengths, cooldown):
    def add(state, length):
        done, trained = state
        branch = max(0, length - cooldown)
        run((model, optimizer), train_step, done, branch, length)
        pair = copy.deepcopy((model, optimizer))
        return branch, {**trained, length: run(pair, train_step, branch, length, length)[0]}

    return functools.reduce(add, sorted(lengths), (0, {}))[1]


RIGHT_LENGTHS = [
    branches(),
    branches(copied=with_one_memo),
    branches(copied=through_a_file),
    branches(copied=with_a_copied_state),
    branches(copied=tensor_by_tensor),
    branches(trunk=lambda length, longest: longest),
    branches(trunk=lambda length, longest: longest + 10),
    branches(made=OrderedDict),
    branches(made=MappingProxyType),
    branches(made=lambda trained: defaultdict(lambda: None, trained)),
    branches(key=np.int64),
    branches(key=float),
    branches(steps=np.arange),
    branches(steps=torch.arange),
    branches(order=lambda lengths: sorted(set(lengths))),
    branches(order=lambda lengths: lengths.sort() or lengths),
    branches(order=lambda lengths: torch.tensor(lengths).sort().values.tolist()),
    put_back,
    trunk_first,
    recursive,
    last_on_the_trunk,
    with_a_heap,
    on_a_copy,
    with_a_class,
    reduced,
]


@pytest.mark.parametrize("answer", cases(RIGHT_LENGTHS))
def test_train_lengths_accepts(verdict, answer):
    assert verdict("train_lengths", answer) == "correct"


def one_by_one(model, optimizer, train_step, lengths, cooldown):
    return {n: run(copy.deepcopy((model, optimizer)), train_step, 0, n, n)[0] for n in lengths}


def with_a_new_optimizer(pair):
    model = copy.deepcopy(pair[0])
    return model, like(pair[1], model.parameters())


def from_a_cooled_one(model, optimizer, train_step, lengths, cooldown):
    trained, done = {}, 0
    for length in sorted(lengths):
        run((model, optimizer), train_step, done, length, length)
        trained[length], done = copy.deepcopy(model), length
    return trained


def trained_backwards(model, optimizer, train_step, lengths, cooldown):
    trained = {}
    for length in lengths:
        pair = copy.deepcopy((model, optimizer))
        for step in reversed(range(length)):
            train_step(*pair, step, length)
        trained[length] = pair[0]
    return trained


def untrained(model, optimizer, train_step, lengths, cooldown):
    return {length: copy.deepcopy(model) for length in lengths}


def counted_from_one(model, optimizer, train_step, lengths, cooldown):
    return {n: run(copy.deepcopy((model, optimizer)), train_step, 1, n + 1, n)[0] for n in lengths}


def without_a_floor(model, optimizer, train_step, lengths, cooldown):
    trained, done = {}, 0
    for length in sorted(lengths):
        run((model, optimizer), train_step, done, length - cooldown, length)
        done = length - cooldown
        trained[length] = run(copy.deepcopy((model, optimizer)), train_step, done, length, length)[0]
    return trained


def for_ever(model, optimizer, train_step, lengths, cooldown):
    while True:
        train_step(model, optimizer, 0, 1)


def of_the_page(*arguments):
    return branches()(*arguments) if sorted(arguments[3]) == [40, 60, 100] else {}


def filled(value):
    def train_lengths(model, optimizer, train_step, lengths, cooldown):
        made = untrained(model, optimizer, train_step, lengths, cooldown)
        for copied in made.values():
            nn.utils.vector_to_parameters(torch.full((103,), value), copied.parameters())
        return made

    return train_lengths


@pytest.mark.parametrize(
    ("answer", "words"),
    cases(
        [
            (one_by_one, "Run the trunk once"),
            (branches(copied=lambda pair: pair), "one and the same"),
            (branches(copied=lambda pair: tuple(map(copy.copy, pair))), "goes on from a model that was further"),
            (branches(copied=with_a_new_optimizer), "lost its state"),
            (branches(copied=lambda pair: (copy.deepcopy(pair[0]), copy.deepcopy(pair[1]))), "Copy the two together"),
            (branches(copied=lambda pair: (copy.deepcopy(pair[0]), pair[1])), "another model"),
            (branches(copied=functools.partial(with_a_copied_state, kept=lambda state: state)), "shares its tensors"),
            (from_a_cooled_one, "has cooled down"),
            (branches(order=list), "shortest on"),
            (branches(order=lambda lengths: sorted(lengths, reverse=True)), "shortest on"),
            (branches(cut=1), "without step"),
            (branches(early=1), "enough"),
            (branches(late=1), "rate of a run of another length"),
            (branches(rate=lambda length, longest: longest), "rate of a run of another length"),
            (branches(trunk=lambda length, longest: 10**9, late=2), "rate of a run of another length"),
            (trained_backwards, "another order"),
            (untrained, "not been trained"),
            (filled(math.nan), "not been trained"),
            (filled(0.0), "not been trained"),
            (counted_from_one, "count from 0"),
            (without_a_floor, "count from 0"),
            (for_ever, "far more than are due"),
            (of_the_page, "a model for each"),
            (branches(made=lambda trained: list(trained.values())), "return a dictionary"),
            (branches(made=lambda trained: {n: m.state_dict() for n, m in trained.items()}), "a model for each"),
            (branches(made=lambda trained: dict(list(trained.items())[1:])), "a model for each"),
            (branches(made=lambda trained: dict.fromkeys(trained, trained[max(trained)])), "one and the same"),
            (lambda *arguments: {n: nn.Linear(6, 3) for n in arguments[3]}, "not been trained"),
            (lambda *arguments: dict.fromkeys(arguments[3], math.nan), "a model for each"),
            (branches(steps=lambda begin, end: [step + 0.5 for step in range(begin, end)]), "whole number"),
        ]
    ),
)
def test_train_lengths_rejects(rejects, answer, words):
    rejects("train_lengths", answer, words)


def test_a_branch_of_task_1_costs_its_cooldown_only():
    training = checks.Training(cooldown=10)
    branches()(training.model, training.optimizer, training.train_step, [40, 60, 100], 10)
    assert training.steps == 90 + 30


# --- Task 2 ---------------------------------------------------------------------------------------------------------


def top(losses, kept):
    return losses.topk(kept).indices


def scores(model, images, labels):
    return F.cross_entropy(model(images), labels, reduction="none")


def in_eval_mode(model, images, labels, score=scores):
    model.eval()
    with torch.no_grad():
        losses = score(model, images, labels)
    model.train()
    return losses


def update(model, optimizer, images, labels):
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def selective(score=in_eval_mode, choose=top, update=update, kept=lambda keep, n: int(keep * n), always=False):
    """The step, put together from parts that may be other right ones, or wrong ones."""

    def selective_step(model, optimizer, images, labels, keep):
        if keep < 1 or always:
            chosen = choose(score(model, images, labels), kept(keep, len(images)))
            images, labels = images[chosen], labels[chosen]
        return update(model, optimizer, images, labels)

    return selective_step


def on_another_copy(model, images, labels):
    with torch.inference_mode():
        return scores(copy.deepcopy(model).eval(), images, labels).clone()


def without_flags(model, images, labels):
    for parameter in model.parameters():
        parameter.requires_grad = False
    losses = scores(model.train(False), images, labels)
    for parameter in model.train(True).parameters():
        parameter.requires_grad = True
    return losses


def switched_off(model, images, labels):
    before = model.training
    try:
        model.eval()
        with torch.set_grad_enabled(False):
            return nn.CrossEntropyLoss(reduction="none")(model(images), labels)
    finally:
        model.train(before)


@torch.no_grad()
def decorated(model, images, labels):
    model.eval()
    losses = -model(images).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    model.train()
    return losses


def functional(model, images, labels):
    model.eval()
    state = {name: value.detach() for name, value in model.state_dict().items()}
    losses = F.cross_entropy(torch.func.functional_call(model, state, images), labels, reduction="none")
    model.train()
    return losses


def sample_by_sample(model, images, labels):
    model.eval()
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(image[None]), label[None]) for image, label in zip(images, labels, strict=True)
        ]
    model.train()
    return torch.stack(losses)


def with_a_closure(model, optimizer, images, labels):
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    return optimizer.step(closure)


def by_hand(model, optimizer, images, labels):
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(scores(model, images, labels).mean(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    return len(images)


def zeroed_in_place(model, optimizer, images, labels):
    loss = scores(model, images, labels).sum() / len(labels)
    for parameter in model.parameters():
        parameter.grad.zero_()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.item()


def by_negative_log_likelihood(model, optimizer, images, labels):
    model.zero_grad()
    nn.NLLLoss()(model(images).log_softmax(1), labels).backward()
    optimizer.step()


def early_return(model, optimizer, images, labels, keep):
    if keep == 1:
        return update(model, optimizer, images, labels)
    return selective(always=True)(model, optimizer, images, labels, keep)


RIGHT_SELECTIVE = [
    selective(),
    early_return,
    selective(on_another_copy),
    selective(without_flags),
    selective(switched_off),
    selective(decorated),
    selective(functional),
    selective(sample_by_sample),
    selective(update=with_a_closure),
    selective(update=by_hand),
    selective(update=zeroed_in_place),
    selective(update=by_negative_log_likelihood),
    selective(choose=lambda losses, k: losses.argsort(descending=True)[:k]),
    selective(choose=lambda losses, k: (-losses).argsort()[:k].tolist()),
    selective(choose=lambda losses, k: torch.sort(losses).indices[-k:]),
    selective(choose=lambda losses, k: losses >= losses.sort(descending=True).values[k - 1]),
    selective(choose=lambda losses, k: losses > losses.kthvalue(len(losses) - k).values),
    selective(choose=lambda losses, k: np.argsort(-losses.numpy())[:k].copy()),
    selective(choose=lambda losses, k: np.argpartition(losses.numpy(), -k)[-k:]),
    selective(choose=lambda losses, k: heapq.nlargest(k, range(len(losses)), key=losses.tolist().__getitem__)),
    selective(choose=lambda losses, k: sorted(range(len(losses)), key=lambda i: -losses[i])[:k]),
    selective(choose=lambda losses, k: losses.topk(k, sorted=False)[1].sort().values),
    selective(kept=lambda keep, n: math.floor(n * keep)),
    selective(kept=lambda keep, n: int(n * keep // 1)),
    selective(kept=lambda keep, n: max(2, int(n * keep))),
]


@pytest.mark.parametrize("answer", cases(RIGHT_SELECTIVE))
def test_selective_step_accepts(verdict, answer):
    assert verdict("selective_step", answer) == "correct"


def masked(weigh):
    def selective_step(model, optimizer, images, labels, keep):
        optimizer.zero_grad()
        losses = scores(model, images, labels)
        kept = int(keep * len(images))
        weigh(losses, losses.detach().topk(kept).indices, kept).backward()
        optimizer.step()

    return selective_step


def in_train_mode(model, images, labels):
    with torch.no_grad():
        return scores(model, images, labels)


def in_train_mode_put_back(model, images, labels):
    before = copy.deepcopy(model.state_dict())
    losses = in_train_mode(model, images, labels)
    model.load_state_dict(before)
    return losses


def never_back(model, images, labels):
    with torch.no_grad():
        return scores(model.eval(), images, labels)


def with_a_graph(model, images, labels):
    losses = scores(model.eval(), images, labels)
    model.train()
    return losses


def of_a_half(model, images, labels):
    half = len(images) // 2
    return F.pad(in_eval_mode(model, images[:half], labels[:half]), (0, len(images) - half))


def by_the_largest_logit(model, images, labels):
    return in_eval_mode(model, images, labels, lambda *_: model(images).amax(1))


def scaled(model, optimizer, images, labels, factor=None, zero=True, times=1):
    if zero:
        optimizer.zero_grad()
    for _ in range(times):
        (F.cross_entropy(model(images), labels) * (factor(len(images)) if factor else 1)).backward()
    optimizer.step()


def then_eval(model, optimizer, images, labels):
    update(model, optimizer, images, labels)
    model.eval()


def without_step(model, optimizer, images, labels):
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()


def two_steps(model, optimizer, images, labels):
    update(model, optimizer, images, labels)
    optimizer.step()


def on_copies(model, optimizer, images, labels, keep):
    selective()(*copy.deepcopy((model, optimizer)), images, labels, keep)


def on_all_again(model, optimizer, images, labels, keep):
    if keep < 1:
        chosen = top(in_eval_mode(model, images, labels), int(keep * len(images)))
        optimizer.zero_grad()
        scores(model, images, labels)[chosen].mean().backward()
        optimizer.step()
    else:
        update(model, optimizer, images, labels)


def blank(model, optimizer, images, labels, keep):
    selective()(model, optimizer, images.zero_(), labels, keep)


def under_a_flag(model, optimizer, images, labels, keep):
    if torch.compiler.is_compiling():
        selective()(model, optimizer, images, labels, keep)


@pytest.mark.parametrize(
    ("answer", "words"),
    cases(
        [
            (masked(lambda losses, chosen, k: losses[chosen].mean()), "saves nothing"),
            (
                masked(lambda losses, chosen, k: (losses * F.one_hot(chosen, len(losses)).sum(0)).sum() / k),
                "saves nothing",
            ),
            (lambda *arguments: update(*arguments[:4]), "saves nothing"),
            (on_all_again, "second pass has all samples"),
            (under_a_flag, "has not changed"),
            (lambda *_: None, "has not changed"),
            (lambda *arguments: 0.5, "has not changed"),
            (selective(in_train_mode), "no_grad does not stop BatchNorm"),
            (selective(in_train_mode_put_back), "selection pass in eval mode"),
            (selective(never_back), "back into train mode"),
            (selective(with_a_graph), "no_grad"),
            (selective(of_a_half), "One selection pass"),
            (selective(by_the_largest_logit), "Which samples"),
            (selective(choose=lambda losses, k: losses.topk(k, largest=False).indices), "keep the largest"),
            (selective(choose=lambda losses, k: slice(k)), "first samples"),
            (selective(choose=lambda losses, k: torch.randperm(len(losses))[:k]), "Which samples"),
            (selective(choose=lambda losses, k: losses > losses.mean()), "rounded down"),
            (selective(choose=lambda losses, k: losses.topk(k + 1).indices), "rounded down"),
            (selective(kept=lambda keep, n: math.ceil(keep * n)), "rounded down"),
            (selective(kept=lambda keep, n: n - int(keep * n)), "FLOPs"),
            (selective(always=True), "without a selection pass"),
            (selective(update=functools.partial(scaled, zero=False)), "old gradient"),
            (selective(update=functools.partial(scaled, factor=lambda k: k)), "take their mean"),
            (selective(update=functools.partial(scaled, factor=lambda k: k / 32)), "not by those of the batch"),
            (selective(update=functools.partial(scaled, factor=lambda k: math.nan)), "Which samples"),
            (selective(update=functools.partial(scaled, times=2)), "FLOPs"),
            (selective(update=then_eval), "leave the model in train mode"),
            (selective(update=without_step), "optimizer.step()"),
            (selective(update=two_steps), "Which samples"),
            (on_copies, "optimizer.step()"),
            (blank, "Which samples"),
        ]
    ),
)
def test_selective_step_rejects(rejects, answer, words):
    rejects("selective_step", answer, words)


def test_a_mask_costs_what_a_plain_step_does():
    x, labels = torch.randn(32, 10), torch.randint(4, (32,))
    found = []
    for step in (masked(lambda losses, chosen, k: losses[chosen].mean()), selective()):
        model = checks.network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found.append(count.flops(lambda: step(model, optimizer, x, labels, 0.5)))  # noqa: B023
    forward = 2 * 32 * (10 * 32 + 32 * 32 + 32 * 4)
    plain = 3 * forward - 2 * 32 * 10 * 32  # the input gets no gradient
    assert found == [plain, forward + plain // 2]


# --- Task 3 ---------------------------------------------------------------------------------------------------------


def row_scales(weight):
    largest = weight.abs().amax(dim=1, keepdim=True)
    return torch.where(largest > 0, largest / 127, 1.0)


def refuse(weight):
    if not weight.isfinite().all():
        raise ValueError("A weight is nan or infinite.")


def int8(
    scales=row_scales, numbers=lambda steps: steps.round().to(torch.int8), made=lambda q, s: (q, s), refuse=refuse
):
    """Quantization from parts."""

    def quantize(weight):
        refuse(weight)
        found = scales(weight)
        return made(numbers(weight / found), found)

    return quantize


def with_numpy(weight):
    array = weight.numpy()
    if not np.isfinite(array).all():
        raise ValueError("not finite")
    scales = np.abs(array).max(1, keepdims=True) / np.float32(127)
    scales[scales == 0] = 1
    return np.rint(array / scales).astype(np.int8), scales


def row_by_row(weight):
    refuse(weight)
    numbers, scales = [], []
    for row in weight:
        scale = max(map(abs, row.tolist())) / 127 or 1.0
        numbers.append(torch.tensor([round(w / scale) for w in row.tolist()], dtype=torch.int8))
        scales.append(scale)
    return torch.stack(numbers), scales


def with_torchs_own(weight):
    refuse(weight)
    scales = row_scales(weight)[:, 0]
    made = torch.quantize_per_channel(weight, scales.double(), torch.zeros(len(scales), dtype=int), 0, torch.qint8)
    return made.int_repr(), scales


def of_bounds(weight):
    return torch.maximum(weight.amax(1), -weight.amin(1)).clamp(min=1e-8)[:, None] / 127


def divided_by_a_little_more(weight):
    refuse(weight)
    scales = row_scales(weight)
    return (weight / (scales + 1e-9)).round().to(torch.int8), scales


def filled_in_place(weight):
    scales = weight.abs().max(dim=1).values.unsqueeze(1).div_(127)
    scales[scales == 0] = 1.0
    return scales


def with_isnan(weight):
    if torch.isnan(weight).any() or torch.isinf(weight).any():
        raise ValueError(f"{int((~weight.isfinite()).sum())} weights are not finite.")


def by_a_sum(weight):
    if not math.isfinite(weight.abs().sum()):

        class NotFinite(ValueError):
            pass

        raise NotFinite("a weight is not finite")


def with_vmap(weight):
    refuse(weight)

    def one(row):
        scale = row.abs().max().clamp(min=1e-12) / 127
        return (row / scale).round(), scale

    numbers, scales = torch.vmap(one)(weight)
    return numbers.char(), scales


def a_generator(weight):
    refuse(weight)
    scales = row_scales(weight)
    yield (weight / scales).round().char()
    yield scales


def filled_one_by_one(weight):
    refuse(weight)
    scales, numbers = row_scales(weight), torch.empty(weight.shape, dtype=torch.int8)
    for i, row in enumerate(weight):
        for j, one in enumerate(row):
            numbers[i, j] = round((one / scales[i]).item())
    return numbers, scales


def in_double(weight):
    refuse(weight)
    scales = row_scales(weight.double())
    return (weight.double() / scales).round().char(), scales.float().squeeze()


Quantized = namedtuple("Quantized", "numbers scales")

RIGHT_INT8 = [
    int8(),
    with_numpy,
    row_by_row,
    with_torchs_own,
    with_vmap,
    a_generator,
    filled_one_by_one,
    in_double,
    int8(numbers=lambda steps: (steps - 0.5).ceil().char()),
    int8(numbers=lambda steps: (steps + 0.5 * steps.sign()).trunc().char()),
    int8(lambda w: torch.where(w.any(1, keepdim=True), w.abs().amax(1, keepdim=True) / 127, 5.0)),
    int8(of_bounds),
    int8(filled_in_place),
    int8(refuse=with_isnan),
    int8(refuse=by_a_sum),
    int8(made=lambda q, s: [q, s]),
    int8(made=lambda q, s: Quantized(numbers=q, scales=s)),
    int8(made=lambda q, s: (q, s[:, 0])),
    int8(made=lambda q, s: (q, s.flatten().tolist())),
    int8(made=lambda q, s: (q, nn.Parameter(s))),
    int8(made=lambda q, s: (q.numpy(), s.numpy())),
    int8(made=lambda q, s: iter((q, s))),
    int8(numbers=lambda steps: steps.round().clamp(-127, 127).char()),
    int8(numbers=lambda steps: steps.round().clamp(-128, 127).type(torch.int8)),
    int8(numbers=lambda steps: (steps + 0.5).floor().to(torch.int8)),
    int8(numbers=lambda steps: steps.double().round().to(torch.int16).to(torch.int8)),
    int8(numbers=lambda steps: torch.round(steps).to(dtype=torch.int8, copy=True)),
    int8(lambda w: (torch.linalg.vector_norm(w, math.inf, dim=1, keepdim=True) / 127).clamp(min=1e-9)),
    int8(lambda w: w.abs().sort(1).values[:, -1:].clamp(min=1e-7) / 127),
    int8(lambda w: w.abs().amax(1, keepdim=True) / 127 + 1e-12),
    int8(lambda w: (w.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(w.dtype).tiny)),
    int8(lambda w: w.double().abs().amax(1, keepdim=True).div(127).clamp(min=1e-10).float()),
    int8(lambda w: w.abs().amax(1, keepdim=True).masked_fill(~w.any(1, keepdim=True), 127.0) / 127),
]


@pytest.mark.parametrize("answer", cases(RIGHT_INT8))
def test_quantize_accepts(verdict, answer):
    assert verdict("quantize", answer) == "correct"


def raising(error):
    def refuse(weight):
        if not weight.isfinite().all():
            raise error

    return refuse


def blanked(weight):
    weight.zero_()
    return torch.zeros(weight.shape, dtype=torch.int8), torch.ones(len(weight))


def for_outliers_only(weight):
    refuse(weight)
    if weight.abs().max() > 100:
        return int8()(weight)
    return torch.zeros(weight.shape, dtype=torch.int8), torch.ones(len(weight))


def first_scale(weight):
    return row_scales(weight)[:1].expand(len(weight), 1).clone()


def with_pythons_max(weight):
    scales = torch.tensor([[max(map(abs, row)) / 127 or 1.0] for row in weight.tolist()])
    if not scales.isfinite().all():  # max([1, nan]) is 1
        raise ValueError("not finite")
    return (weight / scales).round().char(), scales


def divided_in_place(weight):
    refuse(weight)
    scales = row_scales(weight)
    return weight.div_(scales).round().char(), scales


def without_guard(weight):
    return weight.abs().amax(1, keepdim=True) / 127


def of_the_tensor(weight):
    return (weight.abs().max() / 127).clamp(min=1e-9).reshape(1, 1)


@pytest.mark.parametrize(
    ("answer", "words"),
    cases(
        [
            (int8(of_the_tensor), "whole tensor"),
            (int8(lambda w: of_the_tensor(w).expand(len(w), 1).clone()), "All rows have one scale"),
            (int8(first_scale), "All rows have one scale"),
            (int8(lambda w: w.abs().amax(0, keepdim=True) / 127), "A channel is a row"),
            (int8(numbers=lambda steps: steps.to(torch.int8)), "cuts off the fraction"),
            (int8(numbers=lambda steps: steps.floor().to(torch.int8)), "torch.floor"),
            (int8(lambda w: row_scales(w) * 127 / 128), "wraps around"),
            (
                int8(lambda w: row_scales(w) * 127 / 128, lambda q: q.round().clamp(-128, 127).char()),
                "largest weight",
            ),
            (int8(lambda w: row_scales(w) * 127 / 7), "too large"),
            (int8(lambda w: row_scales(w) * 127 / 255), "wraps around"),
            (int8(lambda w: row_scales(w) * 1.1), "too large"),
            (int8(lambda w: (w.amax(1, keepdim=True) / 127).abs().clamp(min=1e-9)), "negative weight"),
            (int8(lambda w: w.std(1, keepdim=True).nan_to_num(1.0).clamp(min=1e-9) * 3 / 127), "error"),
            (int8(without_guard), "not above 0"),
            (int8(lambda w: -row_scales(w)), "not above 0"),
            (int8(lambda w: row_scales(w) * math.nan), "not finite"),
            (int8(numbers=lambda steps: steps.round()), "float32"),
            (int8(numbers=lambda steps: steps.round().to(torch.int16)), "int16"),
            (int8(numbers=lambda steps: (steps.round() + 128).to(torch.uint8)), "uint8"),
            (int8(numbers=lambda steps: steps.round().char().flatten()), "shape"),
            (int8(numbers=lambda steps: steps.round().char().T), "shape"),
            (int8(numbers=lambda steps: torch.zeros_like(steps).char()), "error"),
            (int8(numbers=lambda steps: -steps.round().char()), "error"),
            (int8(made=lambda q, s: (q, 1 / s)), "1 / scale"),
            (int8(made=lambda q, s: (q, s.double())), "bytes"),
            (int8(made=lambda q, s: (q, s.half())), "bytes"),
            (int8(lambda w: row_scales(w).clamp(min=1e-4).half()), "bytes"),
            (int8(lambda w: (w.abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)), "floor"),
            (int8(lambda w: w.abs().amax(1, keepdim=True) / 127 + 1e-8), "floor under your scale"),
            (int8(lambda w: (w.abs().amax(1, keepdim=True) / 127).clamp(min=1e-5)), "floor under your scale"),
            (int8(lambda w: (w.abs().amax(1, True) / 127).clamp(min=torch.finfo(w.dtype).eps)), "floor"),
            (int8(made=lambda q, s: (q, s.expand(q.shape))), "scales for"),
            (int8(made=lambda q, s: (s, q)), "int8"),
            (int8(made=lambda q, s: q), "must hold 2"),
            (int8(made=lambda q, s: (q, s, 0)), "must hold 2"),
            (int8(made=lambda q, s: ("numbers", "scales")), "two tensors"),
            (int8(made=lambda q, s: (None, None)), "two tensors"),
            (int8(made=lambda q, s: {"numbers": q, "scales": s}), "must be a list"),
            (int8(refuse=lambda weight: None), "raise a ValueError"),
            (int8(refuse=lambda weight: weight.nan_to_num_()), "raise a ValueError"),
            (int8(refuse=raising(ValueError())), "says nothing"),
            (int8(refuse=raising(RuntimeError("not finite"))), "not RuntimeError"),
            (int8(refuse=raising(AssertionError("not finite"))), "not AssertionError"),
            (int8(refuse=lambda w: refuse(w) if w.isnan().any() else None), "inf"),
            (with_pythons_max, "nan in row 0, column 1"),
            (int8(refuse=lambda weight: refuse(weight[:, :1])), "in row 0, column 1"),
            (int8(refuse=lambda weight: refuse(weight[:2])), "in row 2, column 1"),
            (divided_in_place, "change the weight"),
            (blanked, "change the weight"),
            (int8(lambda w: w.abs_().amax(1, keepdim=True).clamp(min=1e-9) / 127), "change the weight"),
            (int8(lambda w: w.abs().amax(1, keepdim=True) / 127 + 1e-6), "floor under your scale"),
            (int8(made=lambda q, s: (q, s.T)), "the scales have shape (1, 12)"),
            (int8(made=lambda q, s: (q, s[..., None])), "the scales have shape (12, 1, 1)"),
            (int8(numbers=lambda steps: steps.round().neg().char()), "Divide a row by the scale"),
            (int8(made=lambda q, s: (q, s.ceil().int())), "scales are int32"),
            (int8(made=lambda q, s: (q, s.bfloat16())), "scales are bfloat16"),
            (int8(made=lambda q, s: (q, s.half().float())), "error"),
            (int8(made=lambda q, s: (q, s.roll(1, 0))), "error"),
            (int8(lambda w: (w.amax(1, True) - w.amin(1, True)).clamp(min=1e-9) / 255), "wraps around"),
            (for_outliers_only, "usual weights"),
            (divided_by_a_little_more, "Divide a row by the scale that you return"),
            (int8(lambda w: w.abs().amax(1, keepdim=True).clamp(min=1e-12) * 127), "The scale is too large"),
            (int8(made=lambda q, s: (q, s * 127)), "return it divided by 127"),
        ]
    ),
)
def test_quantize_rejects(rejects, answer, words):
    rejects("quantize", answer, words)


def test_quantize_is_told_of_a_value_error_where_none_is_due(verdict):
    def always(weight):
        raise ValueError("no")

    assert "Your code raised ValueError" in verdict("quantize", always)


# --- Task 4 ---------------------------------------------------------------------------------------------------------


def largest(network, keep):
    return network[0].weight.norm(dim=1).topk(keep).indices


def layers(network, stay):
    first, _, second = network
    keep = len(first.weight[stay])
    one = nn.Linear(first.in_features, keep, bias=first.bias is not None)
    two = nn.Linear(keep, second.out_features, bias=second.bias is not None)
    with torch.no_grad():
        one.weight.copy_(first.weight[stay])
        two.weight.copy_(second.weight[:, stay])
        if one.bias is not None:
            one.bias.copy_(first.bias[stay])
        if two.bias is not None:
            two.bias.copy_(second.bias)
    return one, two


def with_the_bias(network, keep):
    weight, bias = network[0].weight, network[0].bias
    return (weight if bias is None else torch.cat([weight, bias[:, None]], 1)).norm(dim=1).topk(keep).indices


def cut(stay=largest, build=layers, join=lambda one, activation, two: nn.Sequential(one, activation, two), **change):
    """A cut from parts; `change(one, two, network, stay)` may spoil the layers."""

    def cut_neurons(network, keep):
        chosen = stay(network, keep)
        one, two = build(network, chosen)
        for spoil in change.values():
            spoil(one, two, network, chosen)
        return join(one, copy.deepcopy(network[1]), two)

    return cut_neurons


def with_the_old_activation(network, keep):
    one, _, two = cut()(network, keep)
    return nn.Sequential(one, network[1], two)


def with_another_setting(network, keep):
    one, activation, two = cut()(network, keep)
    made = type(activation)()
    made.load_state_dict(activation.state_dict())
    return nn.Sequential(one, made, two)


def with_a_cut_in_another_setting(network, keep):
    return copy.deepcopy(network) if keep == network[0].out_features else with_another_setting(network, keep)


def with_a_new_slope(network, keep):
    one, activation, two = cut()(network, keep)
    if hasattr(activation, "reset_parameters"):
        activation.reset_parameters()
    return nn.Sequential(one, activation, two)


class Unregistered(nn.Module):
    def __init__(self, one, activation, two):
        super().__init__()
        self.one, self.two, self.activation = one, two, [activation]

    def forward(self, x):
        return self.two(self.activation[0](self.one(x)))


def loaded(network, stay):
    one, two = layers(network, stay)
    old = network.state_dict()
    one.load_state_dict({name: old[f"0.{name}"][stay] for name in one.state_dict()})
    two.load_state_dict(
        {name: old[f"2.{name}"][:, stay] if name == "weight" else old["2.bias"] for name in two.state_dict()}
    )
    return one, two


def with_parameters(network, stay):
    one, two = copy.deepcopy((network[0], network[2]))
    one.weight, two.weight = nn.Parameter(one.weight[stay].detach()), nn.Parameter(two.weight[:, stay].detach())
    if one.bias is not None:
        one.bias = nn.Parameter(one.bias[stay].detach())
    one.out_features = two.in_features = len(one.weight)
    return one, two


def with_data(network, stay):
    one, two = copy.deepcopy((network[0], network[2]))
    one.weight.data, two.weight.data = one.weight.data[stay], two.weight.data[:, stay]
    if one.bias is not None:
        one.bias.data = one.bias.data[stay]
    one.out_features, two.in_features = len(one.weight), two.weight.shape[1]
    return one, two


def with_a_selection(network, stay):
    one, two = layers(network, stay)
    pick = F.one_hot(torch.as_tensor(stay), network[0].out_features).float()
    with torch.no_grad():
        one.weight[:] = pick @ network[0].weight
        two.weight[:] = network[2].weight @ pick.T
    return one, two


def stacked(network, stay):
    one, two = with_parameters(network, stay)
    one.weight = nn.Parameter(torch.stack([network[0].weight.data[i] for i in stay]))
    two.weight = nn.Parameter(torch.stack([network[2].weight.data[:, i] for i in stay], dim=1))
    return one, two


def with_numpy_arrays(network, stay):
    one, two = layers(network, stay)
    index = np.asarray(stay)
    one.weight.data = torch.from_numpy(network[0].weight.detach().numpy()[index])
    two.weight.data = torch.from_numpy(np.ascontiguousarray(network[2].weight.detach().numpy()[:, index]))
    return one, two


def selected(network, stay):
    one, two = layers(network, stay)
    one.weight = nn.Parameter(network[0].weight.detach().index_select(0, stay))
    two.weight = nn.Parameter(network[2].weight.detach().index_select(1, stay).contiguous())
    return one, two


class Block(nn.Module):
    def __init__(self, one, activation, two):
        super().__init__()
        self.one, self.activation, self.two = one, activation, two

    def forward(self, x):
        return self.two(self.activation(self.one(x)))


def one_at_a_time(network, keep):
    alive = list(range(network[0].out_features))
    while len(alive) > keep:
        alive.remove(min(alive, key=lambda i: network[0].weight[i].norm().item()))
    return alive


RIGHT_CUTS = [
    cut(),
    cut(build=loaded),
    cut(build=with_parameters),
    cut(build=with_data),
    cut(build=with_a_selection),
    cut(build=stacked),
    cut(build=with_numpy_arrays),
    cut(build=selected),
    cut(one_at_a_time),
    cut(lambda n, keep: largest(n, keep).sort().values),
    cut(lambda n, keep: largest(n, keep).tolist()),
    cut(lambda n, keep: n[0].weight.norm(dim=1).argsort()[-keep:]),
    cut(lambda n, keep: n[0].weight.norm(dim=1).argsort(descending=True)[:keep].numpy()),
    cut(lambda n, keep: n[0].weight.pow(2).sum(1).sort(descending=True).indices[:keep]),
    cut(lambda n, keep: n[0].weight.square().mean(-1).sqrt().topk(keep)[1]),
    cut(lambda n, keep: torch.linalg.vector_norm(n[0].weight, dim=1).topk(keep).indices),
    cut(lambda n, keep: n[0].weight.norm(dim=1) >= n[0].weight.norm(dim=1).sort(descending=True).values[keep - 1]),
    cut(lambda n, keep: sorted(range(len(n[0].weight)), key=lambda i: -float(n[0].weight[i].norm()))[:keep]),
    cut(lambda n, keep: heapq.nlargest(keep, range(len(n[0].weight)), n[0].weight.norm(dim=1).tolist().__getitem__)),
    cut(lambda n, keep: torch.einsum("ij,ij->i", n[0].weight, n[0].weight).topk(keep).indices),
    cut(join=lambda one, activation, two: nn.Sequential(one, copy.deepcopy(activation), two)),
    cut(join=lambda one, activation, two: nn.Sequential(OrderedDict(up=one, act=activation, down=two))),
    cut(join=lambda one, activation, two: nn.Sequential(nn.Sequential(one, activation), two)),
    cut(join=lambda one, activation, two: nn.Sequential(one, activation, nn.Identity(), two)),
    cut(join=Block),
]


@pytest.mark.parametrize("answer", cases(RIGHT_CUTS))
def test_cut_neurons_accepts(verdict, answer):
    assert verdict("cut_neurons", answer) == "correct"


def zeroed(network, keep):
    network = copy.deepcopy(network)
    gone = network[0].weight.norm(dim=1).argsort(descending=True)[keep:]
    with torch.no_grad():
        network[2].weight[:, gone] = 0.0
    return network


def with_masks(network, keep):
    network = copy.deepcopy(network)
    prune.ln_structured(network[0], "weight", amount=network[0].out_features - keep, n=2, dim=0)
    return network


def in_place(network, keep):
    one, two = with_parameters(network, largest(network, keep))
    network[0], network[2] = one, two
    return network


def frozen(one, two, *_):
    one.requires_grad_(False), two.requires_grad_(False)


def first_bias(one, two, network, stay):
    if one.bias is not None:
        one.bias.data = network[0].bias.data[: len(one.bias)].clone()


def other_columns(one, two, network, stay):
    two.weight.data = network[2].weight.data[:, : len(one.weight)].clone()


def shuffled_columns(one, two, network, stay):
    two.weight.data = two.weight.data.flip(1).clone()


def shared_bias(one, two, network, stay):
    if two.bias is not None:
        two.bias = network[2].bias


def no_second_bias(one, two, *_):
    two.bias = None


def zero_second_bias(one, two, *_):
    if two.bias is not None:
        nn.init.zeros_(two.bias)


def always_a_bias(one, two, *_):
    one.bias = nn.Parameter(torch.zeros(len(one.weight))) if one.bias is None else one.bias


def old_widths(one, two, network, stay):
    one.out_features = two.in_features = network[0].out_features


def a_view(one, two, network, stay):
    order = network[0].weight.norm(dim=1).argsort(descending=True)
    one.weight = nn.Parameter(network[0].weight.detach()[order][: len(one.weight)])
    if one.bias is not None:
        one.bias = nn.Parameter(network[0].bias.detach()[order][: len(one.weight)])
    two.weight.data = network[2].weight.detach()[:, order[: len(one.weight)]]


def a_mask(one, two, *_):
    one.register_buffer("mask", torch.ones(len(one.weight)))


def spoiled_weight(one, two, *_):
    nn.init.constant_(two.weight, math.nan)


def random_layers(network, stay):
    one, two = layers(network, stay)
    one.reset_parameters(), two.reset_parameters()
    return one, two


def slices(network, keep):
    one, two = copy.deepcopy((network[0], network[2]))
    one.weight, two.weight = (
        nn.Parameter(network[0].weight[:keep].data),
        nn.Parameter(network[2].weight[:, :keep].data),
    )
    one.bias = None if one.bias is None else nn.Parameter(network[0].bias[:keep].data)
    one.out_features = two.in_features = keep
    return nn.Sequential(one, network[1], two)


def the_whole_first_bias(one, two, network, stay):
    if one.bias is not None:
        one.bias = nn.Parameter(network[0].bias.detach().clone())


def a_cut_second_bias(one, two, network, stay):
    if two.bias is not None:
        two.bias = nn.Parameter(two.bias.detach()[: len(stay)].clone())


class Twice(Block):
    def forward(self, x):
        return (super().forward(x) + super().forward(x)) / 2


@pytest.mark.parametrize(
    ("answer", "words"),
    cases(
        [
            (zeroed, "Zeros cost as much"),
            (with_masks, "Zeros cost as much"),
            (lambda network, keep: copy.deepcopy(network), "Zeros cost as much"),
            (in_place, "make a new one"),
            (
                lambda network, keep: cut()(network, keep) if network[0].weight.data.zero_().any() else network,
                "make a new one",
            ),
            (slices, "shares memory"),
            (cut(spoil=shared_bias), "shares memory"),
            (cut(spoil=a_view), "A view or a mask"),
            (cut(spoil=a_mask), "A view or a mask"),
            (cut(spoil=frozen), "require gradients"),
            (cut(spoil=first_bias), "cut it like the rows"),
            (cut(spoil=other_columns), "in one order"),
            (cut(spoil=shuffled_columns), "in one order"),
            (
                cut(join=lambda one, activation, two: nn.Sequential(one, type(activation)(), two)),
                "Is the activation the same?",
            ),
            (cut(spoil=no_second_bias), "a layer with a bias keeps one"),
            (cut(spoil=always_a_bias), "a layer without gets none"),
            (cut(spoil=zero_second_bias), "second layer keeps its bias"),
            (cut(spoil=old_widths), "in_features"),
            (cut(spoil=spoiled_weight), "copy what stays"),
            (cut(lambda n, keep: n[0].weight.norm(dim=1).topk(keep, largest=False).indices), "smallest norms"),
            (cut(lambda n, keep: n[2].weight.norm(dim=0).topk(keep).indices), "incoming"),
            (cut(lambda n, keep: n[0].weight.abs().sum(1).topk(keep).indices), "absolute weights"),
            (cut(lambda n, keep: n[0].weight.sum(1).topk(keep).indices), "signs cancel"),
            (cut(with_the_bias), "leave it out of the norm"),
            (cut(lambda n, keep: torch.arange(keep)), "first ones"),
            (cut(lambda n, keep: largest(n, max(1, keep - 1))), "cut both"),
            (cut(lambda n, keep: largest(n, min(keep + 1, n[0].out_features))), "cut both"),
            (cut(build=random_layers), "copy what stays"),
            (cut(join=lambda one, activation, two: nn.Sequential(one, two)), "activation"),
            (with_the_old_activation, "its 1.weight: copy what stays"),
            (with_another_setting, "Is the activation the same?"),
            (with_a_cut_in_another_setting, "Is the activation the same?"),
            (with_a_new_slope, "Is the activation the same?"),
            (cut(join=Unregistered), "Is it a submodule?"),
            (cut(join=lambda one, activation, two: nn.Sequential(one, nn.ReLU(), two)), "activation"),
            (cut(join=lambda one, activation, two: nn.Sequential(two, activation, one)), "cut both"),
            (cut(join=lambda one, activation, two: (one, activation, two)), "return the smaller network"),
            (
                cut(join=lambda one, activation, two: nn.Sequential(one, activation, two).state_dict()),
                "smaller network",
            ),
            (cut(join=lambda one, activation, two: one), "1 linear layers"),
            (cut(join=lambda *_: nn.Sequential()), "0 linear layers"),
            (cut(join=Twice), "run both layers once"),
            (lambda network, keep: cut()(network, keep) if keep == 5 else copy.deepcopy(network), "keep=4"),
            (cut(spoil=lambda one, two, network, stay: network.requires_grad_(False)), "you freeze the network"),
            (cut(spoil=lambda one, two, network, stay: network.eval()), "or change its mode"),
            (cut(spoil=the_whole_first_bias), "the first bias has 12 numbers for 5 neurons"),
            (cut(spoil=a_cut_second_bias), "the second bias has 5 numbers"),
        ]
    ),
)
def test_cut_neurons_rejects(rejects, answer, words):
    rejects("cut_neurons", answer, words)


# --- Task 5 ---------------------------------------------------------------------------------------------------------


def taught(teacher, images):
    teacher.eval()
    with torch.no_grad():
        return teacher(images)


def divergence(logits, target, temperature):
    log = (logits / temperature).log_softmax(-1), (target / temperature).log_softmax(-1)
    return temperature**2 * F.kl_div(*log, log_target=True, reduction="batchmean")


def distilled(taught=taught, soft=divergence, hard=F.cross_entropy, add=None, before=None, after=lambda loss: loss):
    """The loss from parts."""

    def distillation_loss(student, teacher, images, labels, temperature, alpha):
        if before:
            before(student, teacher, images)
        target = taught(teacher, images)
        logits = student(images)
        losses = soft(logits, target, temperature), hard(logits, labels)
        return after(add(*losses, alpha) if add else alpha * losses[0] + (1 - alpha) * losses[1])

    return distillation_loss


def with_a_soft_hard_loss(student, teacher, images, labels, temperature, alpha):
    hard = lambda logits, labels: F.cross_entropy(logits / temperature, labels)  # noqa: E731
    return distilled(hard=hard)(student, teacher, images, labels, temperature, alpha)


def with_a_larger_whole(*given):
    add = lambda soft, hard, alpha: alpha * soft + (1 - alpha) * given[4] ** 2 * hard  # noqa: E731
    return distilled(add=add)(*given)


def with_probabilities(logits, target, temperature):
    student, teacher = (logits / temperature).log_softmax(-1), (target / temperature).softmax(-1)
    return F.kl_div(student, teacher, reduction="batchmean") * temperature * temperature


def as_cross_entropy(logits, target, temperature):
    return temperature**2 * F.cross_entropy(logits / temperature, (target / temperature).softmax(-1))


def by_formula(logits, target, temperature):
    p, q = (target / temperature).softmax(-1), (logits / temperature).softmax(-1)
    return temperature**2 * (p * (p.log() - q.log())).sum(-1).mean()


def by_einsum(logits, target, temperature):
    p, q = (target / temperature).softmax(-1), (logits / temperature).log_softmax(-1)
    return temperature**2 * torch.einsum("bc,bc->b", p, p.log() - q).mean()


def by_logsumexp(logits, target, temperature):
    a, b = target / temperature, logits / temperature
    p = (a - a.logsumexp(1, keepdim=True)).exp()
    return -(temperature**2) * (p * (b - b.logsumexp(1, keepdim=True))).sum() / len(p)


def of_categoricals(logits, target, temperature):
    kinds = [torch.distributions.Categorical(logits=x / temperature) for x in (target, logits)]
    return temperature**2 * torch.distributions.kl_divergence(*kinds).mean()


def in_fp64(logits, target, temperature):
    return divergence(logits.double(), target.double(), temperature).float()


def text_by_text(logits, target, temperature):
    return sum(divergence(a[None], b[None], temperature) for a, b in zip(logits, target, strict=True)) / len(logits)


def copied(teacher, images):
    with torch.set_grad_enabled(False):
        return copy.deepcopy(teacher).eval()(images)


def frozen_teacher(teacher, images):
    return teacher.eval().requires_grad_(False)(images)


def put_back_teacher(teacher, images):
    before = teacher.training
    found = taught(teacher, images)
    teacher.train(before)
    return found


@torch.no_grad()
def without_gradients(teacher, images):
    return teacher.train(False)(images)


def only_what_is_needed(student, teacher, images, labels, temperature, alpha):
    logits = student(images)
    if alpha == 0:
        return F.cross_entropy(logits, labels)
    return distilled()(student=lambda _: logits, teacher=teacher, images=images, labels=labels,
                       temperature=temperature, alpha=alpha)  # fmt: skip


RIGHT_LOSSES = [
    distilled(),
    only_what_is_needed,
    distilled(copied),
    distilled(frozen_teacher),
    distilled(put_back_teacher),
    distilled(without_gradients),
    distilled(lambda teacher, images: taught(teacher, images.clone()).clone()),
    distilled(lambda teacher, images: taught(teacher, images).detach()),
    distilled(soft=with_probabilities),
    distilled(soft=as_cross_entropy),
    distilled(soft=by_formula),
    distilled(soft=by_einsum),
    distilled(soft=by_logsumexp),
    distilled(soft=of_categoricals),
    distilled(soft=in_fp64),
    distilled(soft=text_by_text),
    distilled(
        soft=lambda a, b, t: (
            t**2
            * nn.KLDivLoss(reduction="batchmean", log_target=True)(F.log_softmax(a / t, 1), F.log_softmax(b / t, 1))
        )
    ),
    distilled(
        soft=lambda a, b, t: t**2 / len(a) * F.kl_div((a / t).log_softmax(1), (b / t).softmax(1), reduction="sum")
    ),
    distilled(
        soft=lambda a, b, t: (
            t**2 * F.kl_div((a / t).log_softmax(1), (b / t).softmax(1), reduction="none").sum(1).mean()
        )
    ),
    distilled(
        soft=lambda a, b, t: (
            t**2 * a.shape[1] * F.kl_div((a / t).log_softmax(1), (b / t).softmax(1), reduction="mean")
        )
    ),
    distilled(hard=nn.CrossEntropyLoss()),
    distilled(hard=lambda logits, labels: F.nll_loss(logits.log_softmax(-1), labels)),
    distilled(hard=lambda logits, labels: -logits.log_softmax(1)[range(len(labels)), labels].mean()),
    distilled(hard=lambda logits, labels: F.cross_entropy(logits, F.one_hot(labels, 4).float())),
    distilled(add=lambda soft, hard, alpha: hard + alpha * (soft - hard)),
    distilled(add=lambda soft, hard, alpha: torch.lerp(hard, soft, alpha)),
    distilled(add=lambda soft, hard, alpha: torch.stack([alpha * soft, (1 - alpha) * hard]).sum()),
    distilled(after=lambda loss: loss.reshape(1)),
]


@pytest.mark.parametrize("answer", cases(RIGHT_LOSSES))
def test_distillation_loss_accepts(verdict, answer):
    assert verdict("distillation_loss", answer) == "correct"


def twice(student, teacher, images, labels, temperature, alpha):
    soft = divergence(student(images), taught(teacher, images), temperature)
    return alpha * soft + (1 - alpha) * F.cross_entropy(student(images), labels)


def swapped_models(student, teacher, *rest):
    return distilled()(teacher, student, *rest)


def under_another_flag(student, teacher, images, labels, temperature, alpha):
    return distilled()(student, teacher, images, labels, temperature, alpha if images.requires_grad else 0.0)


def of_labels(logits, target, temperature):
    return F.cross_entropy(logits, target.argmax(-1))


def kl(student=lambda x: x.log_softmax(-1), teacher=lambda x: x.softmax(-1), power=2, cold=False, **options):
    def soft(logits, target, temperature):
        target = target if cold else target / temperature
        return temperature**power * F.kl_div(student(logits / temperature), teacher(target), **options)

    return soft


MEAN = {"reduction": "batchmean"}


def backwards(loss):
    loss.backward(retain_graph=True)
    return loss


def with_plain_probabilities(logits, target, temperature):
    p = (target / temperature).softmax(-1)
    return temperature**2 * (p * (p - (logits / temperature).log_softmax(-1))).sum(-1).mean()


def with_the_last_layer_again(student, teacher, images, *rest):
    student[-1](torch.zeros(len(images), student[-1].in_features))
    return distilled()(student, teacher, images, *rest)


def with_the_gradient_alone(*given):
    loss = distilled()(*given)
    return loss - loss.detach()


def without_hard(soft, hard, alpha):
    return alpha * soft


@torch.no_grad()
def a_training_copy(teacher, images):
    return copy.deepcopy(teacher).train()(images)


@torch.no_grad()
def with_dropout_left_on(teacher, images):
    for module in teacher.modules():
        module.train(not isinstance(module, nn.BatchNorm1d))
    return teacher(images)


def in_eval_for_a_moment(student, *rest):
    loss = distilled()(student.eval(), *rest)
    student.train()
    return loss


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize(
    ("answer", "words"),
    cases(
        [
            (with_the_last_layer_again, "Run each once"),
            (distilled(lambda teacher, images: teacher.eval()(images)), "through the teacher"),
            (distilled(lambda teacher, images: teacher(images)), "through the teacher"),
            (distilled(lambda teacher, images: teacher.eval()(images).detach()), "detach comes too late"),
            (distilled(lambda teacher, images: teacher.eval()(images).data), "detach comes too late"),
            (distilled(lambda teacher, images: without_gradients.__wrapped__(teacher.train(), images)), "no_grad"),
            (distilled(lambda teacher, images: torch.no_grad()(teacher)(images)), "teacher.eval()"),
            (distilled(soft=kl(power=0, **MEAN)), "temperature squared"),
            (distilled(soft=kl(power=1, **MEAN)), "squared, not by the temperature"),
            (with_a_soft_hard_loss, "takes the logits as they are"),
            (with_a_larger_whole, "belongs to the soft loss only"),
            (distilled(soft=kl(power=4, **MEAN)), "9 times"),
            (lambda *given: distilled()(*given) + 7, "nothing else added"),
            (distilled(soft=with_plain_probabilities), "Is p log p of the teacher"),
            (with_the_gradient_alone, "the loss is 0"),
            (distilled(soft=kl()), "batchmean"),
            (distilled(soft=kl(reduction="mean", power=0)), "batchmean"),
            (distilled(soft=kl(reduction="sum")), "sum over the batch"),
            (distilled(soft=kl(student=lambda x: x.softmax(-1), **MEAN)), "log_softmax"),
            (distilled(soft=kl(student=lambda x: x.softmax(-1), power=0)), "log_softmax"),
            (distilled(soft=kl(teacher=lambda x: x.log_softmax(-1), **MEAN)), "wrong"),
            (distilled(soft=kl(cold=True, **MEAN)), "both"),
            (distilled(soft=lambda a, b, t: divergence(b, a, t)), "student first"),
            (distilled(soft=lambda a, b, t: divergence(a, b, 1.0)), "gradient at temperature 1"),
            (distilled(soft=lambda a, b, t: divergence(a, b, t) * 2), "wrong"),
            (distilled(soft=lambda a, b, t: F.mse_loss(a, b)), "wrong"),
            (distilled(soft=of_labels), "wrong"),
            (distilled(soft=lambda a, b, t: 0 * a.sum()), "arrives at the student"),
            (distilled(add=without_hard), "missing"),
            (distilled(add=lambda soft, hard, alpha: soft + hard), "wrong"),
            (
                distilled(add=lambda soft, hard, alpha: alpha * hard + (1 - alpha) * soft),
                "alpha and 1 - alpha are exchanged",
            ),
            (distilled(hard=lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum")), "wrong"),
            (distilled(hard=lambda logits, labels: F.cross_entropy(logits, labels.flip(0))), "wrong"),
            (distilled(before=lambda student, teacher, images: student.eval()), "train mode"),
            (distilled(before=lambda student, teacher, images: images.zero_()), "wrong"),
            (distilled(before=lambda student, teacher, images: teacher(images)), "Run each once"),
            (distilled(after=backwards), "leave backward to the caller"),
            (distilled(after=lambda loss: loss.item()), "a tensor of one number"),
            (distilled(after=lambda loss: loss.detach()), "no graph"),
            (distilled(after=lambda loss: loss * math.nan), "wrong"),
            (distilled(after=lambda loss: loss.expand(24)), "a tensor of one number"),
            (twice, "Run each once"),
            (swapped_models, "arrives at the student"),
            (under_another_flag, "wrong"),
            (lambda *_: torch.zeros((), requires_grad=True), "arrives at the student"),
            (distilled(add=lambda soft, hard, alpha: hard), "The soft loss is missing"),
            (distilled(a_training_copy), "the teacher runs in train mode"),
            (distilled(with_dropout_left_on), "the teacher runs in train mode"),
            (in_eval_for_a_moment, "the student runs in eval mode"),
        ]
    ),
)
def test_distillation_loss_rejects(rejects, answer, words):
    rejects("distillation_loss", answer, words)


def test_distillation_loss_rejects_the_colleagues(rejects, solution):
    rejects("distillation_loss", solution["colleagues_loss"], "through the teacher")


# --- Task 6 ---------------------------------------------------------------------------------------------------------


def adapter(base, rank):
    base.requires_grad_(False)
    return nn.Parameter(torch.randn(rank, base.in_features)), nn.Parameter(torch.zeros(base.out_features, rank))


def adapted(x, base, down, up, alpha):
    return base(x) + alpha / len(down) * (x @ down.T @ up.T)


def merged(base, down, up, alpha):
    layer = copy.deepcopy(base)
    layer.weight.data += (alpha / len(down) * up @ down).detach()
    return layer


def made(
    down=torch.randn, up=torch.zeros, freeze=lambda base: base.requires_grad_(False), kind=nn.Parameter, form=tuple
):
    def adapter(base, rank):
        freeze(base)
        return form([kind(down(rank, base.in_features)), kind(up(base.out_features, rank))])

    return adapter


def flag_by_flag(base):
    base.weight.requires_grad = False
    if base.bias is not None:
        base.bias.requires_grad = False


def of_linears(base, rank):
    for parameter in base.parameters():
        parameter.requires_grad_(False)
    down, up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
    nn.init.zeros_(up.weight)
    return down.weight, up.weight


def kaiming(base, rank):
    base.requires_grad_(False)
    down, up = nn.Parameter(torch.empty(rank, base.in_features)), nn.Parameter(torch.empty(base.out_features, rank))
    nn.init.kaiming_uniform_(down, a=5**0.5)
    nn.init.zeros_(up)
    return [down, up]


def a_new_layer(base, down, up, alpha):
    layer = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None)
    with torch.no_grad():
        layer.weight.copy_(base.weight + alpha / up.shape[1] * torch.einsum("or,ri->oi", up, down))
        if base.bias is not None:
            layer.bias.copy_(base.bias)
    return layer


def with_its_bias(base, down, up, alpha):
    layer = nn.Linear(*base.weight.T.shape, bias=False)
    layer.weight = nn.Parameter(torch.addmm(base.weight, up, down, alpha=alpha / len(down)))
    layer.bias = base.bias
    return layer


def through_the_identity(base, down, up, alpha):
    layer = a_new_layer(base, down, up, alpha)
    with torch.no_grad():
        seen = adapted(torch.eye(base.in_features), base, down, up, alpha)
        layer.weight.copy_((seen if base.bias is None else seen - base.bias).T)
    return layer


def loaded_layer(base, down, up, alpha):
    layer = copy.deepcopy(base)
    layer.load_state_dict({**base.state_dict(), "weight": base.weight + (alpha / len(down)) * (down.T @ up.T).T})
    return layer


def in_two_linears(x, base, down, up, alpha):
    return base(x) + F.linear(F.linear(x, down), up) * (alpha / down.shape[0])


def flattened(x, base, down, up, alpha):
    rows = x.flatten(0, -2)
    return torch.addmm(base(rows), rows @ down.t(), up.t(), alpha=alpha / len(down)).view(*x.shape[:-1], -1)


def added_in_place(x, base, down, up, alpha):
    y = F.linear(x, base.weight, base.bias)
    y += torch.matmul(torch.matmul(x, down.mT), up.mT).mul(alpha / down.size(0))
    return y


def zeros_in_halves(base, rank):
    """Each rank has its zeros on one side, so that up @ down is zero, and both get a gradient."""
    down, up = adapter(base, rank)
    half = (rank + 1) // 2
    down.data[:half] = 0
    up.data[:, :half] = torch.randn(len(up), half)
    return down, up


RIGHT_LORA = [
    (adapter, adapted, merged),
    (of_linears, adapted, merged),
    (kaiming, adapted, merged),
    (made(form=list), adapted, merged),
    (made(down=torch.zeros, up=torch.randn), adapted, merged),
    (made(down=torch.ones), adapted, merged),
    (made(down=torch.eye), adapted, merged),
    (made(down=lambda *shape: torch.rand(*shape) - 0.5), adapted, merged),
    (made(freeze=flag_by_flag), adapted, merged),
    (made(freeze=lambda base: [p.requires_grad_(False) for p in base.parameters()]), adapted, merged),
    (adapter, in_two_linears, merged),
    (adapter, flattened, merged),
    (adapter, added_in_place, merged),
    (adapter, lambda x, base, down, up, alpha: base(x) + x @ (alpha / len(down) * down).T @ up.T, merged),
    (adapter, lambda x, base, down, up, alpha: base(x) + (x * alpha / len(down)) @ down.T @ up.T, merged),
    (adapter, lambda x, base, down, up, alpha: base(x) + x @ down.T @ (up.T * alpha / up.shape[-1]), merged),
    (adapter, lambda x, base, a, b, alpha: torch.add(base(x), x @ a.T @ b.T, alpha=alpha / len(a)), merged),
    (adapter, lambda x, base, down, up, alpha: base.forward(x) + torch.einsum(
        "bti,ri,or->bto", x, down, up) * alpha / len(down), merged),
    (adapter, lambda x, base, down, up, alpha: sum((base(x), alpha / len(down) * (x @ down.T) @ up.T)), merged),
    (adapter, adapted, a_new_layer),
    (adapter, adapted, with_its_bias),
    (adapter, adapted, through_the_identity),
    (adapter, adapted, loaded_layer),
    (of_linears, in_two_linears, a_new_layer),
    (zeros_in_halves, adapted, merged),
]  # fmt: skip


@pytest.mark.parametrize("parts", [pytest.param(parts, id=str(i)) for i, parts in enumerate(RIGHT_LORA)])
def test_lora_accepts(verdict, parts):
    assert verdict("lora", *parts) == "correct"


def scaled_by(scale):
    return lambda x, base, down, up, alpha: base(x) + scale(alpha, len(down)) * (x @ down.T @ up.T)


def merged_by(change):
    def merged(base, down, up, alpha):
        layer = copy.deepcopy(base)
        layer.weight.data += change(alpha / len(down), up.detach(), down.detach())
        return layer

    return merged


def the_full_change(x, base, down, up, alpha):
    return F.linear(x, base.weight + alpha / len(down) * up @ down, base.bias)


def the_full_product(x, base, down, up, alpha):
    return base(x) + alpha / len(down) * (x @ (up @ down).T)


def with_a_detached(part):
    """The right output, of which one part passes no gradient on."""

    def adapted(x, base, down, up, alpha):
        cut = {name: lambda tensor, name=name: tensor.detach() if name == part else tensor for name in PASSED_ON}
        middle = cut["middle"](cut["x"](x) @ cut["down"](down).T)
        return cut["base"](base(x)) + alpha / len(down) * (middle @ cut["up"](up).T)

    return adapted


PASSED_ON = ("x", "base", "down", "up", "middle")


def into_the_base(base, down, up, alpha):
    base.weight.data += alpha / len(down) * up.detach() @ down.detach()
    return base


def without_bias(base, down, up, alpha):
    layer = merged(base, down, up, alpha)
    layer.bias = None
    return layer


def other_bias(base, down, up, alpha):
    layer = merged(base, down, up, alpha)
    if layer.bias is not None:
        nn.init.constant_(layer.bias, 3.0)
    return layer


def adapted_on_a_frozen_base(x, base, *rest):
    return adapted(x, base.requires_grad_(False), *rest)


def on_a_thawed_base(base, *rest):
    return merged(base.requires_grad_(), *rest)


def with_a_scaled_up(base, down, up, alpha):
    layer = merged(base, down, up, alpha)
    up.data *= alpha / len(down)
    return layer


def after_scaling_up(x, base, down, up, alpha):
    with torch.no_grad():
        up.mul_(alpha / len(down))
    return base(x) + x @ down.T @ up.T


def after_normalizing_down(x, base, down, up, alpha):
    down.data = F.normalize(down.data, dim=1)
    return adapted(x, base, down, up, alpha)


def after_freezing_down(x, base, down, up, alpha):
    down.requires_grad_(False)
    return adapted(x, base, down, up, alpha)


def with_frozen_parts(base, down, up, alpha):
    down.requires_grad_(False), up.requires_grad_(False)
    return merged(base, down, up, alpha)


def with_the_base_twice(x, base, down, up, alpha):
    return adapted(x, base, down, up, alpha) + 0 * base(x)


def with_a_gradient_of_the_base(x, base, down, up, alpha):
    both = F.linear(x, torch.cat([base.weight, down]))
    out = both[..., : len(base.weight)] + alpha / len(down) * both[..., len(base.weight) :] @ up.T
    return out if base.bias is None else out + base.bias


def under_no_grad(*arguments):
    with torch.no_grad():
        return adapted(*arguments)


def reset(base):
    base.reset_parameters()
    base.requires_grad_(False)


def wider(base, rank):
    return adapter(base, rank + 1)


def full(value):
    return lambda *shape: torch.full(shape, value)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        pytest.param(parts, words, id=str(i))
        for i, (parts, words) in enumerate(
            [
                ((made(down=torch.zeros), adapted, merged), "never learns"),
                ((made(up=torch.randn), adapted, merged), "begin as zeros"),
                ((made(up=lambda *s: 1e-3 * torch.randn(*s)), adapted, merged), "begin as zeros"),
                ((made(down=full(math.nan)), adapted, merged), "nan"),
                ((made(up=full(math.inf)), adapted, merged), "infinity"),
                ((made(form=lambda pair: pair[::-1]), adapted, merged), "up first"),
                ((made(form=lambda pair: [nn.Parameter(p.detach().T) for p in pair]), adapted, merged), "shapes"),
                ((wider, adapted, merged), "shapes"),
                ((lambda base, rank: adapter(base, 1), adapted, merged), "shapes"),
                ((made(form=lambda pair: pair[0]), adapted, merged), "must hold 2"),
                ((made(form=lambda pair: [None, None]), adapted, merged), "nn.Parameters"),
                ((made(kind=lambda tensor: tensor), adapted, merged), "nn.Parameters"),
                ((made(kind=lambda tensor: tensor.requires_grad_()), adapted, merged), "registers no other tensor"),
                ((made(freeze=lambda base: None), adapted, merged), "adapter leaves the base trainable"),
                ((made(freeze=lambda base: base.weight.requires_grad_(False)), adapted, merged), "all of it"),
                ((made(freeze=lambda base: base.eval()), adapted, merged), "adapter leaves the base trainable"),
                ((made(freeze=reset), adapted, merged), "changes the weights"),
                ((adapter, lambda x, base, *_: base(x), merged), "never learns"),
                ((adapter, lambda x, base, *_: base(x) + 0 * x.sum(), merged), "never learns"),
                ((adapter, under_no_grad, merged), "no graph"),
                ((adapter, lambda *a: adapted(*a).detach(), merged), "no graph"),
                (
                    (adapter, lambda x, base, *rest: adapted(x, base, *rest) - base(x), merged),
                    "must give base(x)",
                ),
                ((adapter, lambda *a: adapted(*a)[0], merged), "shape"),
                ((adapter, lambda *a: None, merged), "must return the output"),
                ((adapter, lambda *a: adapted(*a) * math.nan, merged), "differs from the base"),
                ((adapter, scaled_by(lambda alpha, rank: 1), merged), "no scale"),
                ((adapter, scaled_by(lambda alpha, rank: alpha), merged), "Divide alpha by the rank."),
                ((adapter, scaled_by(lambda alpha, rank: alpha / rank**0.5), merged), "rsLoRA"),
                ((adapter, scaled_by(lambda alpha, rank: rank / alpha), merged), "upside down"),
                ((adapter, scaled_by(lambda alpha, rank: -alpha / rank), merged), "subtracted"),
                ((adapter, with_a_detached("x"), merged), "gradient of x "),
                ((adapter, with_a_detached("base"), merged), "gradient of x "),
                ((adapter, with_a_detached("down"), merged), "gradient of down "),
                ((adapter, with_a_detached("up"), merged), "no gradient arrives"),
                ((adapter, with_a_detached("middle"), merged), "gradient of x "),
                ((adapter, the_full_change, merged), "Form neither up @ down"),
                ((adapter, the_full_product, merged), "Form neither up @ down"),
                ((adapter, adapted, into_the_base), "have changed"),
                ((adapter, adapted, without_bias), "having a bias"),
                ((adapter, adapted, other_bias), "Its bias is not the base's"),
                ((made(freeze=lambda base: None), adapted_on_a_frozen_base, merged), "adapter leaves the base"),
                ((adapter, adapted, on_a_thawed_base), "trainable again"),
                ((adapter, adapted, with_a_scaled_up), "down or up has changed"),
                ((adapter, after_scaling_up, merged), "adapted must only read them"),
                ((adapter, adapted, with_frozen_parts), "been frozen"),
                ((adapter, after_normalizing_down, merged), "adapted must only read them"),
                ((adapter, after_freezing_down, merged), "adapted freezes down or up"),
                ((made(up=lambda *s: 1e-6 * torch.randn(*s)), adapted, merged), "begin as zeros"),
                ((adapter, with_the_base_twice, merged), "Run the base, down and up once each"),
                ((adapter, with_a_gradient_of_the_base, merged), "nor a gradient of the base's weight"),
                ((adapter, adapted, merged_by(lambda scale, up, down: up @ down)), "no scale"),
                ((adapter, adapted, merged_by(lambda scale, up, down: 2 * scale * up @ down)), "there twice"),
                ((adapter, adapted, merged_by(lambda scale, up, down: scale**2 * up @ down)), "scale is there twice"),
                ((adapter, adapted, merged_by(lambda scale, up, down: 0)), "change is missing"),
                ((adapter, adapted, merged_by(lambda scale, up, down: math.nan)), "what merged gives is wrong"),
                ((adapter, adapted, lambda base, *_: base), "change is missing"),
                ((adapter, adapted, lambda *a: merged(*a).weight), "must return an nn.Linear"),
                ((adapter, adapted, lambda *a: nn.Linear(3, 3)), "in shape"),
            ]
        )
    ],
)
def test_lora_rejects(rejects, parts, words):
    rejects("lora", parts, words)


def test_lora_rejects_a_merged_weight_that_is_no_parameter(verdict):
    def plain(base, down, up, alpha):
        layer = copy.deepcopy(base)
        del layer.weight
        layer.weight = base.weight + alpha / len(down) * up @ down
        return layer

    assert "nn.Parameter" in verdict("lora", adapter, adapted, plain)


def test_lora_rejects_the_product_that_only_a_square_layer_hides(verdict):
    def transposed(base, down, up, alpha):
        change = down.detach().T @ up.detach().T
        right = merged(base, down, up, alpha)
        if base.in_features == base.out_features:
            right.weight.data = base.weight.data + alpha / len(down) * change
        return right

    assert "transposed" in verdict("lora", adapter, adapted, transposed)


def each_alone_from_a_copy(model, optimizer, train_step, lengths, cooldown):
    trained = {}
    for length in lengths:
        own, steps_of, step = copy.deepcopy((model, optimizer, train_step))
        for number in range(length):
            step(own, steps_of, number, length)
        trained[length] = own
    return trained


def floored(least):
    def quantize(weight):
        if not weight.isfinite().all():
            raise ValueError("a weight is not finite")
        scales = (weight.abs().amax(1, keepdim=True) / 127).clamp_min(least)
        return (weight / scales).round().to(torch.int8), scales

    return quantize


def silent(weight):
    if not weight.isfinite().all():
        raise ValueError(" ")
    return floored(1e-38)(weight)


def cut_on_the_old_graph(network, keep):
    first, act, second = network
    stay = first.weight.norm(dim=1).topk(keep).indices
    rows = nn.Linear(first.in_features, keep, bias=first.bias is not None)
    columns = nn.Linear(keep, second.out_features, bias=second.bias is not None)
    del rows.weight, columns.weight
    rows.weight, columns.weight = first.weight[stay], second.weight[:, stay]
    with torch.no_grad():
        for new, bias in ((rows, first.bias if first.bias is None else first.bias[stay]), (columns, second.bias)):
            if bias is not None:
                new.bias.copy_(bias)
    return nn.Sequential(rows, copy.deepcopy(act), columns)


@pytest.mark.parametrize(
    ("task", "answer", "words"),
    [
        ("train_lengths", each_alone_from_a_copy, "are enough"),
        ("quantize", silent, "says nothing"),
        ("cut_neurons", cut_on_the_old_graph, "nn.Parameter"),
    ],
)
def test_what_an_attack_passed_is_refused(task, answer, words, rejects):
    rejects(task, answer, words)
