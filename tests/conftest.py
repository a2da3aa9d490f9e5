"""What the tests of all exercise checks share: the answers that a notebook holds, a check's verdict, a refusal.

A test module is called test_checks_TOPIC, after the module of the checks, and names its notebook in NAME.
"""

import gc
import importlib
from collections.abc import Callable, Iterator

import pytest
from notebook_answers import answers
from notebooks import ROOT


@pytest.fixture(scope="module", autouse=True)
def _what_exists_is_frozen() -> Iterator[None]:
    """Each of the collections that tests ask for would look through all imported libraries, a third of a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def solution(request) -> dict[str, object]:
    return answers(ROOT / "solutions" / request.module.NAME)


@pytest.fixture(scope="module")
def stub(request) -> dict[str, object]:
    return answers(ROOT / "exercises" / request.module.NAME)


@pytest.fixture
def verdict(request, capsys) -> Callable[..., str]:
    """A function that runs a check and returns what it says after the title."""

    topic = request.module.__name__.removeprefix("test_checks_")
    checks = importlib.import_module(f"speedlab.checks.{topic}")

    def run(task: str, *answer: object) -> str:
        capsys.readouterr()
        getattr(checks, task)(*answer)
        printed = capsys.readouterr().out
        assert printed.startswith("Task") and printed.count("\n") == 1, printed
        return printed.split(": ", 1)[1].strip()

    return run


@pytest.fixture
def rejects(verdict) -> Callable[..., None]:
    """A function that claims that an answer is refused, without a traceback, in a sentence that holds these words."""

    def run(task: str, answer: object, *words: str) -> None:
        said = verdict(task, *(answer if isinstance(answer, tuple) else (answer,)))
        assert said.startswith("not yet right."), said
        broken = any(sign in said for sign in ("Your code raised", "The check cannot go on", "had not ended"))
        assert not broken and all(word in said for word in words), said

    return run
