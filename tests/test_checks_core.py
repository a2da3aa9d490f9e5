"""What all checks stand on: a stub is told from an answer, every error becomes a sentence, nothing hangs or leaks."""

import _thread
import fractions
import functools
import math
import pickle
import queue
import sys
import threading
import time

import notebook_answers
import numpy as np
import pytest
import torch
from notebook_answers import defined
from torch import nn

from speedlab.checks import core, ranks
from speedlab.checks.core import NotYetError, ask, check, close, diagnose, distance, expect, fail, where


def said(examine, *answers, seconds=30.0) -> str:
    """The verdict of a check made of `examine`."""
    with core.examining(answers):
        return core._verdict(lambda: examine(*answers), seconds)


def call(answer):
    answer()


def made(source: str, **names) -> dict:
    return defined(source, f"<made {hash(source)}>", __name__="made", **names)


# --- What belongs to the check --------------------------------------------------------------------------------------

BORROWED = [
    "from speedlab.checks import core as checks\n\ndef f():\n    return checks._kind(1)",
    "from speedlab.checks.core import _kind\n\ndef f():\n    return _kind(1)",
    "def f():\n    from speedlab.checks.core import _kind\n    return _kind(1)",
    "def f():\n    from speedlab.checks import core\n    return [core._kind(i) for i in range(3)]",
    "from speedlab.checks import core\n\ndef g():\n    return core._kind(1)\n\ndef f():\n    return g()",
    "from speedlab.checks import core\n\nclass G:\n    def g(self):\n        return core._kind(1)\n\n"
    "def f():\n    return G().g()",
    "from speedlab.checks.core import _kind as g\n\ndef f():\n    return g(1)",
    "from speedlab.checks import core\n\ng = core._kind\n\ndef f():\n    return g(1)",
    "from speedlab.checks import core\n\ndef f():\n    return getattr(core, '_kind')(1)",
    "import speedlab.checks.core\n\ndef f():\n    return speedlab.checks.core._kind(1)",
    "from speedlab.checks import core\n\nf = lambda: core._kind(1)",
]
OWN = [
    "from speedlab.checks import core as checks\n\ndef f():\n    return checks.whole(1)",
    "def _kind(x):\n    return x\n\ndef f():\n    return _kind(1)",
    "def f():\n    class Mine:\n        _kind = 1\n    return Mine._kind + Mine()._kind",
    "import torch\n\ndef f():\n    return torch._C is None",
    "def g():\n    return '_'\n\ndef f():\n    return {'_kinds': g(), '__name__': '__init__'}",
    "from speedlab.checks.compile import Scorer\n\n_ = Scorer()\n\ndef f():\n    return [_ for _ in range(3)]",
]


@pytest.mark.parametrize("source", BORROWED)
def test_an_answer_may_not_call_the_checks_own_functions(source):
    assert "`_kind` belongs to the check" in said(call, made(source)["f"])


@pytest.mark.parametrize("source", OWN)
def test_private_names_of_its_own_are_no_matter(source):
    assert said(call, made(source)["f"]) == "correct"


def test_an_answer_that_must_predict_cannot_run_what_it_predicts():
    def runs():
        with core.without("Predict.", "mm"):
            return torch.ones(2, 2) @ torch.ones(2, 2)

    assert said(call, runs).endswith("Predict.")


# --- Stubs ----------------------------------------------------------------------------------------------------------

STUBS = [
    "def f(x):\n    raise NotImplementedError",
    'def f(x):\n    """Twice x."""\n    # Your code here.\n    raise NotImplementedError',
    "def f(x):\n    raise NotImplementedError('soon')",
]
NO_STUBS = {
    "def f(x=1):\n    # raise NotImplementedError\n    return 1": "correct",
    "def f(x=1):\n    return 1\n    raise NotImplementedError": "correct",
    "def f(x=1):\n    if x > 1:\n        raise NotImplementedError\n    return x": "correct",
    "def f(x=1):\n    if x:\n        pass\n    raise NotImplementedError": "delete that line",
    "def f(x=1):\n    y = abs(x)\n    print(y)\n    raise NotImplementedError": "delete that line",
    "def g():\n    raise NotImplementedError\ndef f():\n    return [g() for _ in '1']": "`g`, which is not written",
    "def f(x=1):\n    if x:\n        raise NotImplementedError('no Float8')": "raised NotImplementedError at the",
}


@pytest.mark.parametrize("text", STUBS)
def test_a_stub_is_not_attempted_and_never_called(text):
    assert said(call, made(text, queue=None)["f"]) == "not attempted yet"


@pytest.mark.parametrize("text", NO_STUBS)
def test_only_the_function_itself_can_be_the_stub(text):
    assert NO_STUBS[text] in said(call, made(text)["f"])


def test_one_stub_among_several_answers_is_named():
    stub, right = made(STUBS[0])["f"], made("def g(x):\n    return x")["g"]
    assert said(lambda a, b: None, right, stub) == "not attempted yet: f"
    assert said(lambda a, b: None, stub, stub) == "not attempted yet"


def test_the_result_instead_of_the_function_is_told():
    assert "without calling it; this is float" in said(call, 3.0)


# --- Failing --------------------------------------------------------------------------------------------------------


def test_a_check_prints_one_line_and_puts_the_seed_back(capsys):
    @check("Task 0, nothing")
    def examine(answer):
        torch.manual_seed(1)
        expect(answer() == 1, lambda: "No.")
        expect(True, lambda: 1 / 0)

    before = torch.get_rng_state()
    examine(lambda: 1)
    examine(lambda: 2)
    assert capsys.readouterr().out == "Task 0, nothing: correct\nTask 0, nothing: not yet right. No.\n"
    assert torch.equal(before, torch.get_rng_state())


def test_no_except_exception_in_an_answer_swallows_a_hint():
    source = "def f(send):\n    try:\n        send()\n    except Exception:\n        pass"
    assert said(lambda f: f(lambda: fail("Not so.")), made(source)["f"]) == "not yet right. Not so."


ERRORS = {
    "def f():\n    return {}['planted']": "Your code raised KeyError at the line `return {}['planted']`: 'planted'",
    "def g(x):\n    return 1 / x\n\ndef f():\n    return g(0)": "at the line `return 1 / x` in `g`: division by zero",
    "def f():\n    return [1 / x for x in (1, 0)]": "the line `return [1 / x for x in (1, 0)]`: division",
    "def f():\n    return math.sqrt(-1)": "raised ValueError at the line `return math.sqrt(-1)`: ",
    "def f():\n    raise SystemExit(3)": "Your code raised SystemExit at the line `raise SystemExit(3)`: 3",
    "def f():\n    raise KeyboardInterrupt": "raised KeyboardInterrupt at the line `raise KeyboardInterrupt`.",
    "def f():\n    return f()": "Your code raised RecursionError at the line `return f()`: ",
}


@pytest.mark.parametrize("text", ERRORS)
def test_an_error_is_told_with_the_answers_own_line(text):
    assert ERRORS[text] in said(call, made(text, math=math)["f"])


def test_an_error_is_told_with_the_case_in_which_it_came():
    def examine(answer):
        for case in (1, 0):
            with where(f"For {case}"), where("step 2"):
                answer(case)

    told = said(examine, made("def f(n):\n    return 1 / n")["f"])
    assert told.startswith(
        "not yet right. For 0: step 2: Your code raised ZeroDivisionError at the line `return 1 / n`"
    )


def test_an_error_object_that_is_raised_again_collects_no_cases():
    again = made("E = ValueError('mine')\n\ndef f(n):\n    raise E")["f"]
    told = {said(lambda f: _in_a_case(f), again) for _ in range(2)}
    assert told == {"not yet right. For 1: Your code raised ValueError at the line `raise E`: mine"}


def _in_a_case(answer):
    with where("For 1"):
        answer(1)


def test_an_error_in_the_check_itself_quotes_no_line_that_is_not_the_answers():
    told = said(lambda f: f() + 1, made("def f():\n    return 'text'")["f"])
    assert told.startswith("not yet right. The check cannot go on") and "TypeError" in told and "`" not in told


def test_ctrl_c_from_the_keyboard_ends_the_check_and_its_answer():
    """It comes to the main thread, where the check waits for the thread of the answer."""
    text = "def f():\n    interrupt()\n    while True:\n        pass"
    before = threading.enumerate()
    with pytest.raises(KeyboardInterrupt):
        said(call, made(text, interrupt=_thread.interrupt_main)["f"], seconds=60)
    left = [thread for thread in threading.enumerate() if thread not in before]  # one of before may end meanwhile
    assert left == []


# --- Hanging --------------------------------------------------------------------------------------------------------

ENDLESS = {
    "a loop": "def f():\n    while True:\n        pass",
    "one that catches everything": "def f():\n    while True:\n        try:\n            1 / 0\n        except: pass",
    "a queue that nobody fills": "def f():\n    queue.Queue().get()",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_answer_is_told_with_its_line_and_stopped(name):
    before, start = threading.active_count(), time.monotonic()
    told = said(call, made(ENDLESS[name], queue=queue)["f"], seconds=0.3)
    assert told.startswith("not yet right. Your code had not ended after 0.3 s at the line `"), told
    assert time.monotonic() - start < 20
    blocks_in_c = "queue" in name
    assert threading.active_count() <= before + blocks_in_c


def test_a_busy_machine_is_not_blamed_on_the_answer():
    """A slow first import, say: what runs is not the answer's, so it gets more time, and then another sentence."""
    answer = made("def f():\n    return 1")["f"]
    assert said(lambda f: time.sleep(0.5), answer, seconds=0.2) == "correct"
    assert "the machine is busy" in said(lambda f: time.sleep(2), answer, seconds=0.2)


def test_the_first_error_of_threads_ends_the_others():
    begun = threading.Event()

    def wait():
        begun.set()
        while True:
            time.sleep(0.01)

    def raises():
        begun.wait(10)
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        core.side_by_side(wait, raises, seconds=20)
    assert core.side_by_side(lambda: 1, lambda: 2, seconds=20) == [1, 2]


# --- Reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), np.array([2]), torch.tensor(2), torch.ones(1, 1) + 1,
     nn.Parameter(torch.tensor(2.0)), fractions.Fraction(2), torch.tensor(2, dtype=torch.float16)],
)  # fmt: skip
def test_a_number_of_any_type_is_read(value):
    assert core.number(value) == 2.0 and core.whole(value) == 2 and type(core.whole(value)) is int


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "return its result"), ("2", "not '2'"), (True, "not True"), ([2], "not list"), (2j, "not complex"),
        (math.nan, "is nan"), (-math.inf, "is -inf"), (torch.tensor(math.nan), "is nan"), (10**400, "too large"),
        (np.zeros(3), "ndarray of shape (3,)"), (torch.zeros(0), "shape (0,)"), (lambda: 2, "not function"),
    ],
)  # fmt: skip
def test_what_is_no_number_is_refused_by_name(value, words):
    with pytest.raises(NotYetError, match="The gap.*" + words.replace("(", r"\(").replace(")", r"\)")):
        core.number(value, "The gap")


@pytest.mark.parametrize(("value", "words"), [(2.5, "whole"), (0, "at least 1"), (10**9, "far too many")])
def test_a_whole_number_has_limits(value, words):
    with pytest.raises(NotYetError, match=words):
        core.whole(value, least=1, most=1e6)


@pytest.mark.parametrize("value", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), {1, 2}, iter([1, 2])])
def test_a_sequence_of_any_type_is_read(value):
    assert core.sequence(value, length=2) == [1, 2]


@pytest.mark.parametrize("value", [None, "ab", {"a": 1}, 3, torch.tensor(3), iter(int, 1), [1, 2, 3]])
def test_what_is_no_such_sequence_is_refused(value):
    with pytest.raises(NotYetError, match="The pair"):
        core.sequence(value, "The pair", length=2)


def test_an_answer_gets_copies_whose_shared_parts_stay_shared():
    layer = nn.Linear(2, 2)
    tensors, optimizer = [torch.ones(2)], torch.optim.SGD(layer.parameters(), lr=1.0)

    def spoil(tensors, layer, optimizer):
        tensors.pop().zero_()
        layer(torch.ones(2)).sum().backward()
        optimizer.step()
        return layer

    before = layer.weight.clone()
    moved = ask(spoil, tensors, layer, optimizer)
    assert torch.equal(tensors[0], torch.ones(2)) and torch.equal(layer.weight, before)
    assert not torch.equal(moved.weight, before), "the optimizer's copy moves the copied weights"


# --- Comparing and explaining ---------------------------------------------------------------------------------------


def test_nan_and_other_shapes_are_infinitely_far_away():
    broken = nn.Linear(2, 2)
    with torch.no_grad():
        broken.bias[-1] = math.nan
    for got, wanted in [
        (math.nan, 1.0), (1.0, math.nan), (torch.ones(2), torch.ones(3)), ([1, 2], [1]), ([], [1]), (None, 1.0),
        (broken, nn.Linear(2, 2)), (broken, broken), (math.inf, 1.0), ("1", 1.0), ([None, 1], [1, None]),
    ]:  # fmt: skip
        assert distance(got, wanted) == math.inf and not close(got, wanted), (got, wanted)
    assert distance([1, torch.tensor([2.0, 5.0])], [1, torch.tensor([2.0, 3.0])]) == 2.0
    assert (
        distance([[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 6]])) == 2.0
        and distance([[1, 2], [3]], [[1, 2], [4]]) == 1.0
    )
    assert distance(math.inf, math.inf) == 0.0 and distance({"a": 1}, {"a": 3}) == 2.0


def test_close_takes_what_fp32_can_hold():
    assert close(torch.tensor(3) / 7, 3 / 7) and close(np.float32(0.1), 0.1) and close(0.0, 0.0)
    assert not close(0.42858, 3 / 7, relative=1e-6) and not close(1e-9, 0.0)


def test_the_first_fault_that_fits_is_named():
    faults = {"a": 1.0, "b": lambda: 2.0, "c": True, "d": lambda: 1 / 0}
    assert [diagnose(got, faults) for got in (1.0, 2.0, 3.0)] == ["a", "b", "c"]
    assert diagnose(5.0, {"a": 1.0, "b": lambda: False}, otherwise="Look again.") == "Look again."
    assert diagnose("xy", {"a": "x", "b": "xy"}, same=lambda a, b: a == b) == "b"


def test_two_numbers_are_shown_with_the_digits_that_tell_them_apart():
    assert core.apart(3 / 7, 0.42859) == ["0.42857", "0.42859"] and core.apart(1.0, 2.0) == ["1", "2"]
    assert core.apart(1 / 3, 0.333, least=1, style="%") == ["33.33%", "33.30%"]


# --- Choices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"A": "x", "B": "y", "C": "more"}, "correct"),
        ({"A": "y", "B": "y"}, "A: not 'y'. Too slow."),
        ({"A": "z", "B": "y"}, "A: not 'z'. Never z."),
        ({"A": "x", "B": "x"}, "B: not 'x'. Look at B."),
        ({"A": "x"}, "no choice for 'B' yet"),
        ({"A": ["x"], "B": "y"}, "none of the options: x, y, z"),
        (None, "dictionary"),
        ([("A", "x")], "dictionary"),
    ],
)
def test_choices_gives_the_reason(chosen, words, capsys):
    reasons = {("A", "y"): "Too slow.", "z": "Never z.", "B": "Look at B.", "A": "Look at A."}
    core.choices("Task 0", {"A": "x", "B": "y"}, ("x", "y", "z"), reasons)(lambda: chosen)
    assert words in capsys.readouterr().out


# --- To real processes ----------------------------------------------------------------------------------------------

HELPERS = """
import functools
from math import floor as down
SCALE = (2, "two")

class Halved:
    share = 0.5

    @staticmethod
    def of(x):
        return x * Halved.share

@functools.cache
def double(x):
    return SCALE[0] * x

def add(total, function):
    dist.all_reduce(total)
    return function(total)

def answer(rank):
    return add(torch.tensor([rank + 1.5]), lambda total: down(double(Halved.of(float(total)))))
"""


def add_up(rank: int, answer, offset: int) -> dict:
    """What each process of these tests does."""
    expect(rank != offset, f"A hint from rank {rank}.")
    return {"sum": answer(rank), "tensor": torch.ones(2)}


def on_two_ranks(text: str, offset: int = 9, seconds: float = 60.0) -> list:
    names = made(text, dist=torch.distributed, torch=torch)
    with core.examining([names["answer"]]):
        return core.on_ranks(add_up, 2, names["answer"], seconds=seconds, offset=offset)


def test_an_answer_travels_with_what_it_uses():
    assert on_two_ranks(HELPERS) == [{"sum": 4, "tensor": [1.0, 1.0]}] * 2


def test_what_goes_wrong_on_a_rank_is_told():
    """One rank fails, the other waits for it in vain; the time of those that loop is not waited for."""
    broken = HELPERS.replace("dist.all_reduce(total)", "1 / 0 if total < 2 else dist.all_reduce(total)")
    with pytest.raises(NotYetError, match=r"On rank 0 of 2: .*`1 / 0 if .*` in `add`: division by zero"):
        on_two_ranks(broken, seconds=16)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({0: "Timed out after 5 s.", 1: "Your code raised KeyError."}, "On rank 1 of 2: Your code raised KeyError."),
        ({0: "RuntimeError: [gloo] closed", 1: "had not ended after 2 s"}, "On rank 1 of 2: had not ended"),
        ({1: "Connection reset"}, "On rank 1 of 2: Connection reset It waited for a rank that made no such call"),
        ({0: "Your code raised NameError: name 'x'"}, "define or import what it needs inside it."),
        ({0: "at the line `model.to(rank)`: CUDA"}, "CUDA The ranks compute on the CPU"),
        (
            {0: "ValueError: trying to initialize the default process group twice!"},
            "twice! The group is joined before",
        ),
    ],
)
def test_the_cause_is_told_and_not_who_waited_for_it(wrong, words):
    assert words in core._cause(wrong, 2)


def test_words_in_the_learners_line_are_not_the_networks():
    told = core._cause({0: "Your code raised TypeError at the line `new_group('gloo', timeout=30)`: not a number"}, 2)
    assert told.endswith("not a number")


@pytest.mark.parametrize(
    "answer", [lambda rank: rank, functools.partial(max, 2), print], ids=["lambda", "partial", "C"]
)
def test_what_is_no_function_is_not_sent(answer):
    with pytest.raises(NotYetError, match="with `def`"):
        core.on_ranks(add_up, 2, answer, offset=9)


def test_a_decorated_answer_travels_with_its_decorator_and_its_helpers():
    text = "def helper(x):\n    return x\n\n@torch.no_grad()\ndef f(x):\n    return helper(x)"
    sent = core.source(made(text, torch=torch)["f"])
    assert "import torch" in sent and "def helper" in sent and "@torch.no_grad()\ndef f" in sent


TRAVELLING = {  # what stands at the top of the notebook: an expression that the answer returns, and its value
    "a dataclass": (
        "from dataclasses import dataclass\n\n@dataclass\nclass Plan:\n    share: int", "Plan(3).share", 3,
    ),
    "a named tuple": ("from typing import NamedTuple\n\nclass Plan(NamedTuple):\n    share: int", "Plan(3).share", 3),
    "a namedtuple": ("from collections import namedtuple\nPlan = namedtuple('Plan', 'share')", "Plan(3).share", 3),
    "an enumeration": ("from enum import Enum\n\nclass Way(Enum):\n    UP = 3", "Way.UP.value", 3),
    "an error of its own": ("class Stop(Exception):\n    pass", "Stop(3).args[0]", 3),
    "a lambda": ("right = lambda r, n: (r + 1) % n", "right(2, 3)", 0),
    "a partial": ("from functools import partial\ntwice = partial(pow, 2)", "twice(3)", 8),
    "a dtype": ("kind = torch.float64", "kind.itemsize", 8),
    "a dtype by import": ("from torch import float64", "float64.itemsize", 8),
    "a device": ("where = torch.device('cpu')", "where.type", "cpu"),
    "infinity": ("from math import inf", "-inf < 0", True),
    "a module": ("loss_fn = torch.nn.MSELoss()", "loss_fn(torch.ones(2), torch.zeros(2)).item()", 1.0),
    "a function's other name": ("def right(r):\n    return r + 1\n\nnext_to = right", "next_to(2)", 3),
    "two at once": ("a, b = 1, torch.float64", "a + b.itemsize", 9),
    "an autograd function": (
        "class Double(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return 2 * x\n"
        "double = Double.apply", "double(torch.ones(1)).item()", 2.0,
    ),
    "a global that shares the name of a parameter": (
        "class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n\nx = Net()",
        "(lambda x: x)(3)", 3,
    ),
    "a global that cannot be shown": (
        "class Odd:\n    def __repr__(self):\n        raise OSError\n\nodd = Odd()", "3 if x == 0 else odd", 3,
    ),
    "a dictionary with a __getattr__ of its own": (
        "class Config(dict):\n    __getattr__ = dict.__getitem__\n\nc = Config(lr=3)", "3 if x == 0 else c.lr", 3,
    ),
    "a list that grew": ("ts = []\nfor i in range(3):\n    ts.append(i)", "len(ts)", 3),
    "a dictionary of dtypes": ("kinds = {}\nkinds['a'] = torch.float64", "kinds['a'].itemsize", 8),
    "a name bound again": ("kind = torch.float32\nkind = torch.float64", "kind.itemsize", 8),
    "a name bound in a branch": ("if True:\n    where = torch.device('cpu')", "where.type", "cpu"),
    "a name that a comprehension uses": ("d = torch.device('cpu')\nnames = [d for d in 'ab']", "d.type", "cpu"),
    "a lambda bound again": ("h = lambda x: x + 1\nh = lambda x: x + 5", "h(2)", 7),
}  # fmt: skip


@pytest.mark.parametrize(("top", "expression", "value"), notebook_answers.named(TRAVELLING))
def test_what_an_answer_uses_of_its_notebook_travels(top, expression, value):
    answer = made(f"{top}\n\ndef f(x=0):\n    return {expression}", torch=torch)["f"]
    assert ranks.defined(0, core.source(answer), "f")() == value


LEFT_OUT = {  # a statement that would make something else there than the notebook holds now
    "a tensor that was changed": "x = torch.ones(2)\nx *= 3",
    "a tensor of a seed": "torch.manual_seed(0)\nx = torch.randn(3)",
    "an iterator": "x = iter([1, 2])\nnext(x)",
    "a layer with weights": "x = torch.nn.Linear(2, 2)",
    "an object that was changed": "import types\nx = types.SimpleNamespace()\nx.lr = 3",
    "a partial of itself": "import functools\nx = functools.partial(pow, 2)\nx = functools.partial(x, 2)",
}


@pytest.mark.parametrize("top", notebook_answers.named(LEFT_OUT))
def test_what_might_arrive_as_something_else_is_missing(top):
    answer = made(f"{top}\n\ndef f():\n    return x", torch=torch)["f"]
    with pytest.raises(NameError, match="'x' is not defined"):
        ranks.defined(0, core.source(answer), "f")()


def test_an_object_of_an_answers_own_class_can_be_pickled():
    text = (
        "class Progress:\n    def __init__(self, step):\n        self.step = step\n\ndef f():\n    return Progress(3)"
    )
    assert pickle.loads(pickle.dumps(ranks.defined(0, core.source(made(text)["f"]), "f")())).step == 3


def test_a_profiler_works_beside_an_answer_that_was_left_behind():
    """While an exception is on its way to a blocked thread, Python 3.11 hangs in whatever a profiler watches."""
    waiting, seen = queue.Queue(), []
    answer = made("def f():\n    waiting.get()", waiting=waiting)["f"]
    assert "Does it wait for ever" in said(call, answer, seconds=0.3)

    def watched():
        sys.setprofile(lambda frame, event, argument: seen.append(event))
        call(list)
        sys.setprofile(None)

    def checked_beside_a_profiler():
        sys.setprofile(lambda frame, event, argument: None)
        seen.append(said(call, answer, seconds=0.3))
        sys.setprofile(None)

    for target in (watched, checked_beside_a_profiler):
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), target.__name__
    for _ in range(2):
        waiting.put(None)
    assert "call" in seen and "Does it wait for ever" in seen[-1]
