"""Read what Inductor decides about a graph, without a compiler: its kernels, the bytes they move, their text.

Inductor works in two halves: Python that schedules and writes the kernels, and a C++ or Triton compiler that
translates them. `plans` runs the first half and stops before the second: it counts the same on every machine.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from torch._functorch import config as autograd_config
from torch._inductor import config, cpp_builder
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.graph import GraphLowering

_KERNEL = re.compile(r"(?m)^\s+(?:cpp_fused\w*\(|triton_\w+\.run\()")
_LIBRARY = re.compile(r"(?m)\b(?:extern_kernels\.\w+|torch\.ops\.\w+\.\w+\.\w+)\(")


@dataclass(frozen=True)
class Plan:
    """One graph as Inductor schedules it: launches of its own kernels, calls into libraries, bytes, and the source.

    `bytes` are those that the kernels must read and write: a tensor that lives and dies inside one kernel costs none.
    """

    kernels: int
    library_calls: int
    bytes: int
    source: str

    def kernel_text(self) -> str:
        """The first kernel that Inductor wrote: C++ from its head on, or Triton; empty where it wrote none."""
        found = re.search(r"'''\n(.*?)'''", self.source, re.DOTALL)
        text = found[1] if found else ""
        return text[max(0, text.find('extern "C"'), text.find("@triton.jit")) :].strip()


@contextlib.contextmanager
def _any_compiler() -> Iterator[None]:
    """Where there is no C++ compiler, keep Inductor from asking which one it is: it writes plain scalar C++ then."""
    try:
        cpp_builder.get_cpp_compiler()
    except InvalidCxxCompiler:
        known = {"is_gcc": lambda: True, "is_msvc_cl": lambda: False}
        with config.patch({"cpp.vec_isa_ok": False}), mock.patch.multiple(cpp_builder, **known):
            yield
    else:
        yield


def plans(work: Callable[[], object]) -> list[Plan]:
    """Run `work()`, which calls functions compiled with Inductor, and return the plan of each graph, in their order.

    The graphs themselves are computed operation by operation, so that `work` goes on, through a backward pass too.
    """
    found: list[Plan] = []

    def read(graph: GraphLowering) -> SimpleNamespace:
        operations = graph.orig_gm
        source = graph.codegen()[0].value
        call = source[source.find("def call(") :]
        found.append(Plan(len(_KERNEL.findall(call)), len(_LIBRARY.findall(call)), graph.count_bytes()[0], source))
        return SimpleNamespace(call=lambda inputs: torch.fx.Interpreter(operations).run(*inputs))

    torch.compiler.reset()
    try:
        # nothing may come from the caches, and nothing of this may go there
        with (
            _any_compiler(),
            config.patch(fx_graph_cache=False, compile_threads=1),
            autograd_config.patch(enable_autograd_cache=False),
            mock.patch.object(GraphLowering, "compile_to_module", read),
        ):
            work()
    finally:
        torch.compiler.reset()
    return found
