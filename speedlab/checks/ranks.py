"""Run on each process by `core.on_ranks`: one rank, which does a check's work with the answers it was sent.

Argument: the folder with task.json; this rank's report goes there as RANK.json.
"""

import contextlib
import importlib
import json
import linecache
import sys
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from speedlab.checks import core

# as in checks/compile.py: the main thread enters this mode before any that ends
with FakeTensorMode():
    pass


def defined(number: int, text: str, name: str) -> Callable:
    """An answer, from the text that defines it; errors find its lines as they do in a notebook."""
    file, module = f"<answer {number}>", types.ModuleType(f"answer_{number}")
    sys.modules[module.__name__] = module  # otherwise objects of the answer's classes could not be pickled
    module.torch = torch
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), module.__dict__)
    return getattr(module, name)


def play(folder: Path, **group) -> None:
    """Join the group that `init_process_group` makes of these arguments, do the folder's task, write the report."""
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    work = getattr(importlib.import_module(task["module"]), task["work"])
    # a rank that waits in vain for another gives up before its own time is up; connecting gets a minute
    patience, connecting = timedelta(seconds=max(1.0, task["seconds"] / 2)), timedelta(seconds=60)
    changeable = hasattr(dist, "set_timeout")  # since torch 2.12
    dist.init_process_group("gloo", timeout=connecting if changeable else patience, **group)
    if changeable:
        dist.set_timeout(patience)
    rank, answers = dist.get_rank(), []
    with core.examining(answers):
        try:
            answers += [defined(number, *answer) for number, answer in enumerate(task["answers"])]
            done = core.side_by_side(lambda: work(rank, *answers, **task["given"]), seconds=task["seconds"])
            report = {"result": done[0]}
        except BaseException as error:
            report = {"error": core.explain(error)}
    text = json.dumps(report, default=lambda value: value.tolist())
    (folder / f"{rank}.json").write_text(text, encoding="utf-8")
    if "result" in report:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


if __name__ == "__main__":
    play(Path(sys.argv[1]))
