"""The worked answers obey their own tasks at every input that the tasks allow, also where no check looks."""

import ast
import itertools
import json
import random
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from notebook_answers import answers, defined
from notebooks import ROOT
from torch import nn


def worked(number: int) -> dict[str, object]:
    [path] = Path(ROOT, "solutions").glob(f"exercise-{number}-*.ipynb")
    return answers(path)


def lesson_names(notebook: str) -> dict[str, object]:
    """What a lesson defines, without running it."""
    cells = json.loads(Path(ROOT, "code-units", notebook).read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    kept = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return defined(ast.unparse(kept), notebook, NamedTuple=NamedTuple, itertools=itertools)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_gap_is_the_distance_to_the_next_pattern(dtype):
    gap, pattern = worked(1)["gap"], torch.int32 if dtype == torch.float32 else torch.int16
    info, draw = torch.finfo(dtype), random.Random(0)
    edges = [info.smallest_normal, 1.0, 2.0, info.max / 2]
    for size in edges + [info.smallest_normal * 2 ** draw.uniform(1, 28) for _ in range(300)]:
        stored = torch.tensor([size]).to(dtype)
        after = (stored.view(pattern) + 1).view(dtype)
        wanted = after.double().item() - stored.double().item()
        assert gap(size, dtype) == gap(-size, dtype) == wanted, size


def test_a_scale_keeps_every_gradient_where_one_does():
    choose_scale, draw = worked(1)["choose_scale"], random.Random(0)
    for _ in range(400):
        middle, width = draw.uniform(-25, 25), draw.uniform(0, 8)
        sizes = [10 ** max(-30, middle + draw.uniform(-width, width)) for _ in range(5)]
        gradients = [torch.tensor([*sizes, 0.0])]

        def survive(scale: float, gradients=gradients) -> bool:
            scaled = (gradients[0].double() * scale).half()
            return bool(scaled.isfinite().all()) and int(scaled.count_nonzero()) == 5

        found = choose_scale(gradients)
        assert survive(found) if found else not any(survive(2.0**k) for k in range(-126, 127)), sizes


def test_so_many_micro_batches_are_enough_and_one_less_is_not():
    enough = worked(2)["enough"]
    limits = [0.1, 0.2, 0.333, 0.001, 1.0, *(a / b for a in range(1, 9) for b in range(a + 1, 13))]
    for stages, limit in itertools.product(range(1, 9), limits):
        found, share = enough(stages, limit), Fraction(str(limit))
        idle = lambda m, stages=stages: Fraction(stages - 1, m + stages - 1)  # noqa: E731
        assert idle(found) <= share and (found == 1 or idle(found - 1) > share), (stages, limit)


def test_compiling_has_paid_at_the_break_even_and_not_a_step_before():
    break_even, draw = worked(4)["break_even"], random.Random(0)
    for _ in range(3000):
        first, eager, compiled = (draw.randrange(1, most) / 100 for most in (500, 60, 60))
        a, e, c = (Fraction(str(seconds)) for seconds in (first, eager, compiled))
        paid = lambda n, a=a, e=e, c=c: a + (n - 1) * c <= n * e  # noqa: E731
        found = break_even(first, eager, compiled)
        if found is None:
            assert not paid(1) and c >= e
        else:
            assert paid(found) and (found == 1 or not paid(found - 1)), (first, eager, compiled)


def test_restored_weights_are_off_by_half_a_scale_at_most():
    quantize = worked(9)["quantize"]
    sizes = torch.cat([10.0 ** torch.arange(-34, 37).double(), torch.zeros(1).double()])  # the last row is of zeros
    weight = (torch.rand(72, 16, generator=torch.Generator().manual_seed(0)) - 0.5) * sizes[:, None].float()
    numbers, scales = quantize(weight)
    off = (numbers.double() * scales.reshape(-1, 1).double() - weight.double()).abs().amax(1)
    assert (off <= weight.double().abs().amax(1) / 127 / 2 * (1 + 1e-4)).all()
    assert (scales > 0).all() and scales.isfinite().all()


@pytest.mark.parametrize("kind", ["dead", "mirrored", "equal"])
def test_of_neurons_with_equal_norms_those_are_cut_that_zeroed_silences(kind):
    names = worked(9)
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(5, 8)
    with torch.no_grad():
        weight = network[0].weight
        weight[16:] = {"dead": torch.zeros(16, 8), "mirrored": -weight[:16], "equal": weight[:16]}[kind]
    for keep in range(1, 33):
        torch.testing.assert_close(names["cut_neurons"](network, keep)(x), names["zeroed"](network, keep)(x))


def test_both_layers_of_distilberts_head_have_to_be_named_to_peft():
    from peft import LoraConfig, get_peft_model

    def trained(**options) -> set[str]:
        small = dict(vocab_size=40, dim=16, hidden_dim=24, n_layers=1, n_heads=2)
        model = transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**small))
        adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", **options))
        return {name for name, p in adapted.named_parameters() if p.requires_grad and "lora" not in name}

    assert trained() == set()
    head = trained(modules_to_save=["pre_classifier", "classifier"])
    assert {name.split(".")[2] for name in head} == {"pre_classifier", "classifier"}
    with pytest.raises(TypeError):
        trained(task_type="SEQ_CLS")


def test_the_chooser_of_9_2_5_agrees_where_exercise_2_says_so():
    """Full: the whole state split. Slow network: a pipeline, told of the memory and of one GPU per machine."""
    lesson = lesson_names("9.2-parallelism/5-which-one.ipynb")

    def first(model: tuple, sequences: int, **hardware: float) -> tuple:
        machines = lesson["Hardware"](**hardware)
        prices = lesson["choose"](lesson["Model"](*model), machines, sequences)
        return next(price.plan for price in prices if price.gib <= machines.gib)

    assert first((7e9, 32, 4096, 32, 4096), 64, gpus=8) == (8, 1, 1, 3)
    thirteen, small = (13e9, 32, 5760, 48, 1024), {"gpus": 16, "gib": 24}
    assert first(thirteen, 1024, **small, machine=1, across=1e9) == (1, 1, 16, 0)
    assert first(thirteen, 1024, **small, across=1e9) != (1, 1, 16, 0)
    assert first(thirteen, 1024, gpus=16, machine=1, across=1e9) != (1, 1, 16, 0)
    assert first(thirteen, 1024, **small, machine=1) == (1, 1, 16, 0)
