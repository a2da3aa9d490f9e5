"""The base of every check: one way to fail, to read an answer, to name its fault, and to send it to processes.

A check is a function of the learner's answers. It returns if they are right; if not, it says what is wrong:

    @check("Task 3, the bubble")
    def bubble(answer: Callable[[int, int], float]) -> None:
        for p, m in ((1, 4), (4, 4), (3, 8)):
            got, wanted = number(ask(answer, p, m), "The bubble"), _played(p, m)
            expect(close(got, wanted), lambda: f"{p} stages, {m} micro-batches: {wanted:.4f}, not {got:.4f}. "
                + diagnose(got, {
                    "That is the share in which they work.": 1 - wanted,
                    "That compares the waiting with the work.": (p - 1) / m,
                }, otherwise="Count slots."))

    @check("Tasks 1 and 2, on real processes", seconds=240)
    def processes(ring, column) -> None:
        for report in on_ranks(_on_a_rank, 3, ring, column, size=12): ...

    machines = choices("Task 9", {"V100": "16-mixed"}, OPTIONS, {"16-true": "It diverges."})

`check` prints one line: `title: not attempted yet`, `title: correct`, or `title: not yet right.` and a hint. It never
raises, but for Ctrl-C. What an answer raises becomes a sentence, with the answer's own line and function; so does an
answer that does not end within `seconds`. A test shortens the limit by `check.seconds = 1`.

- fail: `expect(ok, hint)`, `fail(hint)`, `with where(case):`. No `except Exception` in the answer catches them.
- call: `ask(answer, *arguments)` hands over copies, so that what is judged is compared with the originals.
- read: `number`, `whole`, `sequence` take whatever a reasonable person returns, and refuse nan, None, text by name.
- forbid: `with without(hint, "mm"):` where an answer is to predict, not to run.
- compare: `distance`, `close`: numbers, tensors, models, sequences of them; any with a nan is infinitely far away.
- say: `diagnose(got, {hint: what an answer with that fault gives})`, `apart(got, wanted)` as text that differs.
- threads and processes: `side_by_side(*works, seconds=)`, `on_ranks(work, ranks, *answers)`.
"""

import ast
import contextlib
import contextvars
import copy
import ctypes
import functools
import inspect
import itertools
import json
import linecache
import math
import os
import re
import symtable
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from speedlab import launch

NOT_ATTEMPTED = "not attempted yet"
CORRECT = "correct"
_RANKS = Path(__file__).with_name("ranks.py")
_MOST_ITEMS = 1_000_000
_PACKAGE = __name__.rpartition(".")[0]
# the functions that the running check examines
_ANSWERS: contextvars.ContextVar[Collection[Callable]] = contextvars.ContextVar("answers", default=())


class NotYetError(BaseException):
    """What is wrong with an answer, in a sentence or two for the learner. Raised by `fail` and `expect` only."""


class _RaisedError(Exception):
    """What an answer raised, and the case in which it did."""

    def __init__(self, here: str, error: Exception):
        super().__init__(here)
        inner = isinstance(error, _RaisedError)
        self.here = f"{here}: {error.here}" if inner else f"{here}: "
        self.error = error.error if inner else error


def fail(hint: str) -> NoReturn:
    """End the check with a hint."""
    raise NotYetError(hint)


def expect(ok: object, hint: str | Callable[[], str]) -> None:
    """End the check with the hint unless `ok`. A hint that is a function is called only where it is needed."""
    if not ok:
        fail(hint() if callable(hint) else hint)


@contextlib.contextmanager
def where(here: str) -> Iterator[None]:
    """Inside, hints begin with `here: `, the case that they are about, and so does what an answer raises."""
    try:
        yield
    except NotYetError as wrong:
        raise NotYetError(f"{here}: {wrong}") from None
    except Exception as error:
        raise _RaisedError(here, error) from error


def check(title: str, seconds: float = 60.0) -> Callable:
    """Turn a function that calls `expect` into a check, which prints `title: verdict`.

    An answer may not name a private function of the checks: that would be the check's own answer.
    The state of torch's generator is restored. The whole check runs in a thread of its own and has `seconds`;
    an answer that has not ended by then is stopped, and the check says so. A single call into C (a huge product, a
    huge power) cannot be stopped: limit the inputs.
    """

    def wrap(examine: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(examine)
        def run(*answers, **options) -> None:
            with examining(answers), torch.random.fork_rng(devices=[]):
                verdict = _verdict(functools.partial(examine, *answers, **options), run.seconds)
            print(f"{title}: {verdict}")

        run.seconds = seconds
        return run

    return wrap


def choices(
    title: str, right: Mapping[str, str], options: Collection[str], reasons: Mapping[object, str]
) -> Callable:
    """Make a check of an answer that returns a dictionary: for each name of `right`, one of the `options`.

    `reasons` says why a choice is wrong, by (name, choice), by choice or by name; the first one found is shown.
    """

    @check(title)
    def examine(answer: Callable[[], dict[str, str]]) -> None:
        chosen = ask(answer)
        expect(isinstance(chosen, Mapping), f"Return a dictionary from name to choice, not {_kind(chosen)}.")
        for name, wanted in right.items():
            expect(name in chosen, f"There is no choice for {name!r} yet. Give one for each of {', '.join(right)}.")
            got = chosen[name]
            expect(
                isinstance(got, str) and got in options,
                f"{name}: {got!r} is none of the options: {', '.join(map(str, options))}.",
            )
            keys = ((name, got), got, name)
            reason = next((reasons[key] for key in keys if key in reasons), "")
            expect(got == wanted, f"{name}: not {got!r}. {reason}")

    return examine


# --- Reading and comparing what came back ---------------------------------------------------------------------------


def ask(answer: Callable, *arguments, **options) -> object:
    """Call an answer with deep copies: nothing that it does to them reaches the check. Shared parts stay shared."""
    arguments, options = copy.deepcopy((arguments, options))
    return answer(*arguments, **options)


class without(TorchDispatchMode):
    """Inside, PyTorch's operations whose names hold one of these words end the check with the hint."""

    def __init__(self, hint: str, *words: str):
        super().__init__()
        self.hint, self.words = hint, words

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        expect(not any(word in func._schema.name for word in self.words), self.hint)
        return func(*args, **(kwargs or {}))


def number(value: object, what: str = "What you return") -> float:
    """Read a finite number of any type: Python's, numpy's, a Fraction, an array or a tensor of one element."""
    expect(value is not None, f"{what} came back as None. Does your function return its result?")
    if isinstance(value, torch.Tensor):
        value = value.detach()
    size = math.prod(getattr(value, "shape", ()))
    expect(size == 1, lambda: f"{what} must be one number, not {_kind(value)} of shape {tuple(value.shape)}.")
    value = value.item() if hasattr(value, "item") else value
    readable = hasattr(value, "__float__") or hasattr(value, "__index__")
    expect(readable and not isinstance(value, bool), f"{what} must be a number, not {_kind(value)}.")
    try:
        found = float(value)
    except OverflowError:
        fail(f"{what} is too large for a 64-bit number.")
    expect(math.isfinite(found), f"{what} is {found}, which is not a number to go on with.")
    return found


def whole(value: object, what: str = "What you return", least: int | None = None, most: float = 2.0**53) -> int:
    """Read a whole number, from `least` to `most`: 27, 27.0, numpy's 27. Give `most` before you simulate with it."""
    found = number(value, what)
    expect(found == int(found), f"{what} must be a whole number, not {found:g}.")
    expect(least is None or found >= least, f"{what} must be at least {least}, not {found:g}.")
    expect(found <= most, f"{what} is {found:,.0f}, far too many: {most:,.0f} would already be more than enough.")
    return int(found)


def sequence(value: object, what: str = "What you return", length: int | None = None) -> list:
    """Read a list, tuple, array, tensor, set or iterator as a list, if need be of this length."""
    expect(value is not None, f"{what} came back as None. Does your function return its result?")
    value = value.tolist() if hasattr(value, "tolist") else value
    readable = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    expect(readable, f"{what} must be a list{f' of {length}' if length else ''}, not {_kind(value)}.")
    found = list(itertools.islice(value, _MOST_ITEMS))
    expect(length in (None, len(found)), f"{what} must hold {length} things, not {len(found)}.")
    return found


def distance(got: object, wanted: object) -> float:
    """The largest difference between numbers, tensors, models (their state) or sequences and mappings of these.

    Infinite where the shapes differ and where either holds a nan: `distance(a, b) <= limit` is then False.
    """
    pairs = list(itertools.zip_longest(_parts(got), _parts(wanted)))
    if any(a is None or b is None or a.shape != b.shape or a.isnan().any() or b.isnan().any() for a, b in pairs):
        return math.inf
    gaps = (torch.where(a == b, 0.0, (a - b).abs()) for a, b in pairs if a.numel())
    return max((gap.max().item() for gap in gaps), default=0.0)


def close(got: object, wanted: object, relative: float = 1e-5, absolute: float = 1e-12) -> bool:
    """Whether the distance is at most a share of the largest number wanted: by default, what fp32 can hold."""
    largest = max((part.abs().max().item() for part in _parts(wanted) if part.numel()), default=0.0)
    return distance(got, wanted) <= absolute + (relative * largest if math.isfinite(largest) else 0.0)


def diagnose(
    got: object, faults: Mapping[str, object], otherwise: str = "", same: Callable[[object, object], bool] = close
) -> str:
    """The hint of the first fault that explains what an answer gave, or `otherwise`.

    `faults` maps each hint to what an answer with that fault gives; to a bool that has compared already; or to a
    function without arguments that returns either, called only if no fault before it fits.
    """
    for hint, candidate in faults.items():
        if isinstance(candidate, types.FunctionType | functools.partial):
            candidate = candidate()
        if candidate if isinstance(candidate, bool) else same(got, candidate):
            return hint
    return otherwise


def apart(*numbers: float, least: int = 4, style: str = "g") -> list[str]:
    """Numbers as text, with as many digits as it takes to tell them apart: 0.66666 and 0.66667, not 0.6667 twice."""
    for digits in range(least, 18):
        texts = [f"{value:,.{digits}{style}}" for value in numbers]
        if len(set(texts)) == len(set(numbers)):
            break
    return texts


def _parts(value: object) -> Iterator[torch.Tensor]:
    """All numbers in a value, as fp64 tensors in a fixed order."""
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if isinstance(value, Mapping):
        value = [value[key] for key in sorted(value, key=str)]
    if isinstance(value, set | frozenset):
        value = sorted(value)
    try:
        # a list of numbers, however nested, is compared as one tensor
        whole = not isinstance(value, list | tuple) or not any(isinstance(part, torch.Tensor) for part in value)
        yield torch.as_tensor(value if whole else None).detach().cpu().double()
    except (TypeError, ValueError, RuntimeError):
        if not isinstance(value, list | tuple):
            yield torch.tensor(math.nan)  # None, text and the like match nothing
            return
        for part in value:
            yield from _parts(part)


def _kind(value: object) -> str:
    return f"{value!r}" if isinstance(value, str | bool) else type(value).__name__


# --- Verdicts -------------------------------------------------------------------------------------------------------


def is_stub(function: object) -> bool:
    """Whether a function is still the exercise's stub: nothing but a docstring, then `raise NotImplementedError`.

    Judged by the syntax tree: a comment is no stub, nor is a raise that is left over after a return or in a branch.
    """
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        *given, last = node.body
    except (OSError, TypeError, SyntaxError, ValueError, AttributeError):
        return False  # a lambda, or something without a source
    return (
        isinstance(last, ast.Raise)
        and ast.unparse(last).startswith("raise NotImplementedError")
        and all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in given)
    )


def _borrowed(answer: Callable) -> str:
    """The name of something private that an answer, or a helper of its own, takes from the checks; empty if none."""
    space = getattr(inspect.unwrap(answer), "__globals__", {})
    modules = {name: value for name, value in sys.modules.items() if name.startswith(_PACKAGE)}
    checks = {name for name, value in space.items() if any(value is module for module in modules.values())}
    try:
        text = inspect.getsource(answer) if answer.__name__ == "<lambda>" else source(answer)
        nodes = list(ast.walk(ast.parse(textwrap.dedent(text))))
    except (AttributeError, OSError, TypeError, SyntaxError, ValueError):
        return ""  # a lambda in the middle of a line, or something without a source
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    ours = [node for node in imports if _PACKAGE.partition(".")[0] in ast.unparse(node)]
    names = [alias for node in ours for alias in node.names]
    checks |= {alias.asname or alias.name for alias in names} | modules.keys()
    used = {alias.name for alias in names}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in checks}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    used |= {text for text in texts if any(hasattr(module, text) for module in modules.values())}  # for getattr
    return next((name for name in sorted(used) if name.startswith("_") and not name.endswith("__")), "")


@contextlib.contextmanager
def examining(answers: Collection[Callable]) -> Iterator[None]:
    """Inside, an error is reported with the line of these functions' notebook or file that it came from."""
    token = _ANSWERS.set(answers)
    try:
        yield
    finally:
        _ANSWERS.reset(token)


def _verdict(examine: Callable[[], None], seconds: float) -> str:
    answers = _ANSWERS.get()
    stubs = [getattr(answer, "__name__", "one of them") for answer in answers if is_stub(answer)]
    if stubs:
        return NOT_ATTEMPTED + (f": {', '.join(stubs)}" if len(stubs) < len(answers) else "")
    for answer in answers:
        if not callable(answer):
            return f"not yet right. Give the check the function itself, without calling it; this is {_kind(answer)}."
        if borrowed := _borrowed(answer):
            return f"not yet right. `{borrowed}` belongs to the check: write the answer without it."
    try:
        side_by_side(examine, seconds=seconds)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not _own(traceback.walk_tb(error.__traceback__)):
            raise  # from the keyboard, not from the answer
        return f"not yet right. {explain(error)}"
    return CORRECT


def explain(error: BaseException) -> str:
    """An error as a sentence for the learner: the hint of `fail`, or what was raised, with the answer's own line."""
    if isinstance(error, NotYetError):
        return str(error)
    if isinstance(error, _RaisedError):
        return f"{error.here}{explain(error.error)}"
    said = (str(error).strip().splitlines() or [""])[0]
    what = type(error).__name__ + (f": {said}" if said else ".")
    own = _own(traceback.walk_tb(error.__traceback__))
    if not own:
        return f"The check cannot go on with what your function returned or did to its inputs. {what}"
    if isinstance(error, NotImplementedError) and not said:  # PyTorch raises it too, with a message
        if name := _helper(own):
            return f"Your code needs `{name}`, which is not written yet."
        return "Your function still comes to its `raise NotImplementedError`: delete that line."
    return f"Your code raised {type(error).__name__}{_place(own)}" + (f": {said}" if said else ".")


_Frames = list[tuple[types.FrameType, int]]


def _own(frames: Iterable[tuple[types.FrameType, int]]) -> _Frames:
    """Those frames, outermost first, that run code of the answers' own file, and the lines they are at."""
    spaces = [getattr(inspect.unwrap(answer), "__globals__", None) for answer in _ANSWERS.get()]
    return [(frame, line) for frame, line in frames if any(frame.f_globals is space for space in spaces)]


def _place(own: _Frames) -> str:
    """The innermost line of the learner's code, and the function it is in, unless that is the answer itself."""
    frame, line = own[-1]
    text, name = linecache.getline(frame.f_code.co_filename, line).strip(), _helper(own)
    return (f" at the line `{text}`" if text else "") + (f" in `{name}`" if name else "")


def _helper(own: _Frames) -> str:
    """The name of the innermost function at work, unless it is an answer itself; comprehensions have none."""
    names = [name for frame, _ in own if not (name := frame.f_code.co_name).startswith("<")]
    return names[-1] if names and names[-1] not in [getattr(a, "__name__", "") for a in _ANSWERS.get()] else ""


# --- Threads and processes ------------------------------------------------------------------------------------------


def side_by_side(*works: Callable[[], object], seconds: float) -> list:
    """Call functions at the same time, each in a thread, and return what they return, in order.

    The first error ends the others and is raised again; so does a timeout, whose message names the line that
    the answer is at. Where the answer is not at work (a slow import, a busy machine), the limit is four times
    `seconds`. A thread that blocks inside C is left behind: it is a daemon.
    """
    results: list = [None] * len(works)
    errors: list[BaseException] = []

    def play(place: int, work: Callable[[], object]) -> None:
        try:
            results[place] = work()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(play, place, work), daemon=True)
        for place, work in enumerate(works)
    ]
    begin, late, first, where = time.monotonic(), [], [], ""
    try:
        with _deep_stacks():
            for thread in threads:
                thread.start()
        while (late := [thread for thread in threads if thread.is_alive()]) and not errors:
            late[0].join(0.05)  # in short turns: on Windows Ctrl-C waits for the end of one
            spent = (time.monotonic() - begin) / seconds
            if spent > 1 and (spent > 4 or any(map(_at_work, late))):
                break
    finally:
        late, first = [thread for thread in threads if thread.is_alive()], errors[:1]
        where = _stopped(late)
    if first:
        raise first[0]
    busy = "The check had not ended, though it was not waiting for your code: the machine is busy. Run it again."
    endless = f"Your code had not ended after {seconds:g} s{where}. Does it wait for ever, or loop?"
    expect(not late, endless if where else busy)
    return results


@contextlib.contextmanager
def _deep_stacks() -> Iterator[None]:
    """Threads made inside get the stack that a main thread has; on macOS they would get half a MiB."""
    before = threading.stack_size(64 * 2**20)
    try:
        yield
    finally:
        threading.stack_size(before)


def _stopped(threads: list[threading.Thread]) -> str:
    """Stop threads, again and again where an answer catches that; say where the first of them was."""
    where = next((_place(own) for own in map(_at_work, threads) if own), "")
    with contextlib.ExitStack() as stack:
        for turn in range(40):
            # once all; what cleans up after itself is not disturbed in that
            _throw([thread.ident for thread in threads if turn == 0 or _at_work(thread)])
            for thread in threads:
                thread.join(0.05)
            threads = [thread for thread in threads if thread.is_alive()]
            if turn == 0 and hasattr(sys, "monitoring"):
                stack.enter_context(_raising_at_each_line(threads))
    return where


def _throw(idents: list[int]) -> None:
    """Send an exception to threads, and take one here, so that Python stops looking out for theirs.

    While one is on its way to a blocked thread, Python 3.11 never gets past the first instruction of a function that
    a profiler watches; so no function is called in between. A thread that wakes up finds its own all the same.
    It is SystemExit, by which a thread ends without a word: one that is over by then leaves no traceback.
    """
    send, error = ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.py_object(SystemExit)
    with contextlib.suppress(SystemExit):
        for ident in (*idents, threading.get_ident()):
            send(ctypes.c_ulong(ident), error)
        for _ in range(1000):  # it arrives at a turn of a loop
            pass


@contextlib.contextmanager
def _raising_at_each_line(threads: list[threading.Thread]) -> Iterator[None]:
    """Stop threads at the next line of their answers that no handler covers.

    What is thrown from outside arrives where Python looks for it: in 3.12 that is inside the handler of a loop that
    catches everything, so that it is caught time after time.
    """
    monitoring = sys.monitoring
    line, codes = monitoring.events.LINE, {frame.f_code for thread in threads for frame, _ in _at_work(thread)}
    tool = next((tool for tool in range(6) if not monitoring.get_tool(tool)), None)
    if tool is None:  # debuggers and profilers have taken them all
        yield
        return

    def stop(code: types.CodeType, number: int) -> None:
        if threading.current_thread() in threads:
            raise SystemExit

    monitoring.use_tool_id(tool, __name__)
    monitoring.register_callback(tool, line, stop)
    try:
        for code in codes:
            monitoring.set_local_events(tool, code, line)
        yield
    finally:
        for code in codes:
            monitoring.set_local_events(tool, code, 0)
        monitoring.register_callback(tool, line, None)
        monitoring.free_tool_id(tool)


def _at_work(thread: threading.Thread) -> _Frames:
    """The frames of an answer that a thread is in, outermost first; empty if it runs something else or has ended."""
    frame = sys._current_frames().get(thread.ident)
    return _own(reversed(list(traceback.walk_stack(frame)))) if frame else []


def on_ranks(work: Callable, ranks: int, *answers: Callable, seconds: float = 60.0, **given) -> list:
    """Call `work(rank, *answers, **given)` in real processes that form a gloo group; return what each returned.

    `work` is a top-level function of a module; it may use torch.distributed and `expect`, and returns what JSON can
    hold (tensors become lists). The answers travel as text with what they use of their notebook. `seconds` are for
    the work; the start of the processes comes on top, so give the check `seconds=` three times that or more.
    """
    definite = [inspect.isfunction(f) and f.__name__ != "<lambda>" for f in map(inspect.unwrap, answers)]
    expect(all(definite), "Write your function with `def`: no other kind of callable can be sent to processes.")
    task = {
        "module": work.__module__,
        "work": work.__name__,
        "answers": [(source(answer), answer.__name__) for answer in answers],
        "given": given,
        "seconds": seconds,
    }
    # on the CPU, even where each rank has a GPU: the answers' tensors are on the CPU
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="speedlab-") as folder:
        Path(folder, "task.json").write_text(json.dumps(task), encoding="utf-8")
        try:
            launch.run(_RANKS, ranks, folder, timeout=seconds + 90, environment=paths)
        except launch.LaunchError as error:
            fail(f"The processes did not end well. {str(error).splitlines()[0]}")
        files = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        gone = {"error": "The process ended in the middle of your code, without any message."}
        reports = [json.loads(file.read_text(encoding="utf-8")) if file.exists() else gone for file in files]
    wrong = {rank: report["error"] for rank, report in enumerate(reports) if "error" in report}
    expect(not wrong, lambda: _cause(wrong, ranks))
    return [report["result"] for report in reports]


_ON_RANKS = {  # what an error there contains -> what it means
    "NameError": " Your function travels without your notebook: define or import what it needs inside it.",
    "process group twice": " The group is joined before your function is called.",
    "CUDA": " The ranks compute on the CPU, wherever you run: leave the model and the tensors there.",
}


def _cause(wrong: Mapping[int, str], ranks: int) -> str:
    """Find the cause: a rank that waited in vain speaks of the network, the one that failed does not."""
    in_vain, endless = re.compile("gloo|imed out|timeout|onnection|pair closure"), "had not ended"
    said = {rank: re.sub("`[^`]*`", "", text) for rank, text in wrong.items()}  # without the learner's own line
    rank = min(said, key=lambda rank: 2 * bool(in_vain.search(said[rank])) + (endless in said[rank]))
    hint = wrong[rank]
    if in_vain.search(said[rank]):
        hint += " It waited for a rank that made no such call: all must make the same calls in the same order."
    for sign, meaning in _ON_RANKS.items():
        if sign in said[rank]:
            hint += meaning
    return f"On rank {rank} of {ranks}: {hint}"


def source(answer: Callable) -> str:
    """Text that defines an answer anywhere: itself, and the helpers, classes, imports and constants that it uses.

    Constants travel with their current values. What cannot be written this way, such as a tensor or an object that
    may have changed since its statement ran, is left out: there its name is missing, which is better than wrong.
    """
    answer = inspect.unwrap(answer)  # what a decorator has wrapped
    space = {**answer.__globals__, **inspect.getclosurevars(answer).nonlocals}
    home, texts, seen = _top_statements(answer.__code__.co_filename), [], set()

    def add(name: str, value: object) -> None:
        if name in seen:
            return
        seen.add(name)
        own_name, module = _name_and_module(value)
        inner = inspect.unwrap(value) if own_name else value
        space_of = getattr(inner, "__globals__", None) if own_name else None
        at_home = space_of is answer.__globals__ or module == answer.__module__
        text = _text(inner) if own_name and at_home else ""
        text += f"\n{name} = {own_name}" if text and own_name != name else ""
        if isinstance(value, types.ModuleType):
            texts.append(f"import {own_name} as {name}")
        elif constant := _value_text(value):
            texts.append(f"{name} = {constant}")
        elif own_name and not at_home and getattr(sys.modules.get(module), own_name, None) is value:
            texts.append(f"from {module} import {own_name} as {name}")
        elif text := text or _statement_of(name, value, home):
            for used in _names_read(text) & space.keys():
                add(used, space[used])
            texts.append(text)

    add(answer.__name__, answer)
    return "\n\n".join(texts)


def _name_and_module(value: object) -> tuple[str, str]:
    """`__name__` and `__module__`, where there are any; a learner's own __getattr__ may raise anything."""
    with contextlib.suppress(Exception):
        return str(value.__name__), str(value.__module__ if hasattr(value, "__module__") else "")
    return "", ""


def _value_text(value: object) -> str:
    """The text of a number, a string, a dtype, a device, or a container of these; otherwise empty."""
    if isinstance(value, torch.dtype | torch.device):
        return f"torch.{repr(value).removeprefix('torch.')}"
    if type(value) is float:
        return f"float({repr(value)!r})"  # also inf and nan
    if type(value) in (bool, int, complex, str, bytes, range, slice, type(None), type(...)):
        return repr(value)
    if type(value) in (list, tuple, set, frozenset, dict):
        parts = [_value_text(part) for part in (value.items() if type(value) is dict else value)]
        return f"{type(value).__name__}([{', '.join(parts)}])" if all(parts) else ""
    return ""


def _names_read(text: str) -> set[str]:
    """The names that a text binds or reads at its top, and the global ones that its functions read."""
    top, tables = symtable.symtable(text, "", "exec"), []
    tables.append(top)
    for table in tables:
        tables += table.get_children()
    return {s.get_name() for table in tables for s in table.get_symbols() if table is top or s.is_global()}


_Statement = tuple[str, int, ast.stmt, str]  # its file, its first line, its syntax tree, its text


def _top_statements(file: str) -> list[_Statement]:
    """The statements at the top of a file; of a notebook's cell: of all its cells, in order of their first run."""
    alike = [name for name in linecache.cache if "ipy" in name and os.path.dirname(name) == os.path.dirname(file)]
    found = []
    for name in alike if file in alike else [file]:
        lines = linecache.getlines(name)
        with contextlib.suppress(SyntaxError):
            for node in ast.parse("".join(lines)).body:
                first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
                found.append((name, first, node, "".join(lines[first - 1 : node.end_lineno]).rstrip()))
    return found


def _statement_of(name: str, value: object, home: list[_Statement]) -> str:
    """The statement that made something which does not change: a class, a function, a partial, a loss; or empty."""
    stateless = isinstance(value, nn.Module) and not value.state_dict()
    if not (stateless or isinstance(value, type | functools.partial) or inspect.isroutine(value)):
        return ""
    code = getattr(value, "__code__", None)
    for file, first, node, text in reversed(home):
        # of a lambda, the very statement; else the last one that binds the name
        there = code is None or (file == code.co_filename and first <= code.co_firstlineno <= node.end_lineno)
        if name in _names_bound(node) and there:
            changes_itself = isinstance(node, ast.Assign | ast.AnnAssign) and name in _names_read(
                ast.unparse(node.value)
            )
            return "" if changes_itself else text
    return ""


def _names_bound(node: ast.stmt) -> list[str]:
    """The names that an import, a definition or an assignment binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]


def _text(thing: object) -> str:
    """The source of a function, or of a class, found through one of its own functions; empty if there is none."""
    members = [thing, *(getattr(member, "__func__", member) for member in getattr(thing, "__dict__", {}).values())]
    for code in (member.__code__ for member in members if inspect.isfunction(member)):
        text = "".join(linecache.getlines(code.co_filename))
        for node in _definitions(text):
            if node.name == thing.__name__:
                start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if start <= code.co_firstlineno <= node.end_lineno:
                    return textwrap.dedent("".join(text.splitlines(keepends=True)[start - 1 : node.end_lineno]))
    return ""


@functools.lru_cache(maxsize=32)
def _definitions(text: str) -> list[ast.FunctionDef | ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
