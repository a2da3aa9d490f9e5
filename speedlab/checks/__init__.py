"""The checks that exercises call, one module an exercise, and the few lines that all of them share.

A check runs the learner's function on several inputs and prints one line: `not attempted yet`, `correct`, or what is
wrong and where to look. It never raises, so that a notebook runs from top to bottom whatever stands in it.
"""

import functools
import traceback
from collections.abc import Callable

NOT_ATTEMPTED = "not attempted yet"
CORRECT = "correct"


class NotYetError(Exception):
    """What is wrong with an answer, and where to look: one or two sentences for the learner."""


def expect(ok: bool, hint: str) -> None:
    """Stop the check with `hint` unless `ok`."""
    if not ok:
        raise NotYetError(hint)


def check(title: str) -> Callable:
    """Turn a function that calls `expect` into a check, which prints `title: verdict`."""

    def wrap(examine: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(examine)
        def run(*answers, **options) -> None:
            print(f"{title}: {_verdict(examine, answers, options)}")

        return run

    return wrap


def _verdict(examine: Callable[..., None], answers: tuple, options: dict) -> str:
    try:
        examine(*answers, **options)
    except NotYetError as wrong:
        return f"not yet right. {wrong}"
    except Exception as error:
        # a stub raises it bare; PyTorch raises it too, with a message, and that is a mistake to be shown
        if isinstance(error, NotImplementedError) and not error.args:
            return NOT_ATTEMPTED
        frames = traceback.extract_tb(error.__traceback__)
        # the last frame outside this package is the learner's own line
        own = [frame for frame in frames if "speedlab" not in frame.filename]
        where = f" at the line `{own[0].line}`" if own and own[0].line else ""
        return f"not yet right. Your code raised {type(error).__name__}{where}: {error}"
    return CORRECT
