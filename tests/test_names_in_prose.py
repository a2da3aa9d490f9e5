"""Every name of a library that the prose of a page shows exists, and takes the arguments that are written there.

Readers copy what stands under "In practice"; no cell runs it. Libraries that are not installed are not looked into.
Pages show the versions of requirements.lock, and say in words where older ones differ.
"""

import ast
import functools
import importlib
import inspect
import json
import pydoc
import re

import pytest
import torch
import transformers
from notebooks import ROOT, find

LOCKED = dict(re.findall(r"(?m)^([\w-]+)==(\d+\.\d+)", (ROOT / "requirements.lock").read_text(encoding="utf-8")))
OLDER = [p for p in (torch, transformers) if not p.__version__.startswith(f"{LOCKED[p.__name__]}.")]
PYTHON = re.compile(r"(?ms)^```python\n(.*?)^```$")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LIBRARIES = ("torch", "torchvision", "lightning", "transformers", "accelerate", "peft", "ray", "sklearn", "speedlab")
# What a page calls by a short name, and the usual names of instances.
SHORT = {
    **{"F": "torch.nn.functional", "nn": "torch.nn", "L": "lightning", "dcp": "torch.distributed.checkpoint"},
    **{"dist": "torch.distributed", "prune": "torch.nn.utils.prune", "lr_scheduler": "torch.optim.lr_scheduler"},
    **{"fabric": "lightning.Fabric", "loss": "torch.Tensor", "logits": "torch.Tensor"},
    **{"scaler": "torch.amp.GradScaler", "prof": "torch.profiler.profile"},
}
# Where a class or function may come from whose module is not written; the first whose call fits is enough.
PLACES = """torch torch.nn torch.optim torch.optim.lr_scheduler torch.utils.data torch.utils.checkpoint torch.profiler
    torch.utils.benchmark torch.amp torch.distributed torch.distributed.tensor torch.distributed.tensor.parallel
    torch.distributed.fsdp torch.distributed.optim torch.distributed.pipelining torch.distributed.device_mesh
    torch.distributed.checkpoint.state_dict torch.nn.parallel torch.distributed.tensor.experimental torch.compiler
    lightning lightning.pytorch.callbacks lightning.pytorch.strategies lightning.fabric.strategies
    lightning.pytorch.profilers lightning.pytorch.tuner lightning.pytorch.plugins transformers
    transformers.distributed accelerate accelerate.utils peft datetime speedlab.diagnose""".split()


@functools.cache
def snippets() -> list[tuple[str, ast.Module]]:
    """The Python that stands in prose, with the page that shows it."""
    found = []
    for path in find():
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
            for code in (*PYTHON.findall(text), *INLINE.findall(PYTHON.sub("", text))):
                try:
                    found.append((str(path.relative_to(ROOT)), ast.parse(code.strip())))
                except SyntaxError:
                    continue  # words, a file's name, shell: fenced Python is parsed by the tests of documents
    return found


@functools.cache
def module(name: str):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def look_up(dotted: str):
    """The object of a dotted path, whose root is imported; None where the root is no library that is here."""
    root, *rest = dotted.split(".")
    path = SHORT.get(root, root).split(".") + rest
    if path[0] not in LIBRARIES:
        return None
    found = module(path[0])
    for place, name in enumerate(path[1:], start=1):
        if not hasattr(found, name):
            module(".".join(path[: place + 1]))
        found = getattr(found, name)
    return found


def takes(function, call: ast.Call, bound: bool) -> bool:
    """Whether a call with so many arguments and these keywords fits the signature, as far as one is known."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return True
    unknown = [isinstance(a, ast.Starred) or (isinstance(a, ast.Constant) and a.value is ...) for a in call.args]
    if any(unknown) or any(k.arg is None for k in call.keywords):
        return True
    try:
        signature.bind_partial(*([None] * (len(call.args) + bound)), **{k.arg: None for k in call.keywords})
    except TypeError:
        return False
    return True


def fault(node: ast.AST) -> str:
    """What is wrong with a name or a call of a library, in a few words; '' if nothing is known to be."""
    text = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    if not re.fullmatch(r"[A-Za-z_][\w.]*", text):
        return ""
    if isinstance(node, ast.Attribute):
        try:
            look_up(text)
        except AttributeError:
            return f"`{text}` does not exist"
        return ""
    head, *tail = text.split(".")
    if head in SHORT or (tail and not head[0].isupper()):
        try:
            places = [look_up(text)]
        except AttributeError:
            return ""  # told at the attribute
    else:
        places = [pydoc.locate(f"{place}.{text}") for place in PLACES if hasattr(module(place), head)]
    # a method that is reached by its class, not by an instance, is handed the instance too
    own = [(p, inspect.isfunction(p) and "." in p.__qualname__ and "<" not in p.__qualname__) for p in places if p]
    return "" if not own or any(takes(p, node, bound) for p, bound in own) else f"`{ast.unparse(node)}` does not fit"


def faults(tree: ast.Module) -> list[str]:
    nodes = list(ast.walk(tree))
    imports = [ast.parse(f"{n.module}.{each.name}", mode="eval").body
               for n in nodes if isinstance(n, ast.ImportFrom) for each in n.names]  # fmt: skip
    return [why for n in nodes + imports if isinstance(n, ast.Attribute | ast.Call) if (why := fault(n))]


PAGES = sorted({page for page, _ in snippets()})


@pytest.mark.skipif(bool(OLDER), reason="another torch or transformers than the pages show")
@pytest.mark.parametrize("page", PAGES)
def test_what_prose_names_of_a_library_exists_and_takes_these_arguments(page):
    found = [why for name, tree in snippets() if name == page for why in faults(tree)]
    assert not found, f"{page}: {'; '.join(found)}"


@pytest.mark.parametrize(
    "wrong",
    [
        "torch.compile(model, modes='reduce-overhead')",
        "torch.cuda.sync()",
        "TrainingArguments('out', dataloader_workers=4)",
        "fabric.no_backward_syncs(model)",
        "fabric.clip_gradients(model, optimizer, norm=1.0)",
        "L.Trainer(precisions='bf16-mixed')",
        "AdamW(parameters, lr=1e-3, fuse=True)",
        "F.kl_div(p, q, log_targets=True)",
        "loss.backwards()",
        "from lightning.pytorch.callbacks import BatchFinder",
    ],
)
def test_a_wrong_name_or_argument_is_found(wrong):
    assert faults(ast.parse(wrong))
