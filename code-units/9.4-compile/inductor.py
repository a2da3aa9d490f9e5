"""What torch.compile decides, read without a compiler: Dynamo's graphs, and Inductor's kernels, bytes and source.

Inductor works in two halves: Python that schedules and writes the kernels, and a C++ or Triton compiler that
translates them. `plans` runs only the first half: its counts agree on all machines with the same kind of device.
"""

import contextlib
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch

from speedlab import compat, machine
from speedlab.display import QUOTED, Table, emit

compat.compile_cache()  # the next import fails if the cache folder cannot be created
from torch._functorch import config as autograd_config  # noqa: E402
from torch._inductor import config, cpp_builder, output_code  # noqa: E402
from torch._inductor.exc import InvalidCxxCompiler  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402

config.compile_threads = 1  # a pool of compile workers would outlive the lesson
_KERNEL = re.compile(r"(?m)^\s+(?:cpp_fused\w*\(|triton_\w+\.run\()")
_CALLS = re.compile(r"def (?:partition_0|call)\(")  # launches begin here; code for CUDA graphs has partitions
_CAST = re.compile(r"static_cast<\w+>\((-?[\w.]+?)L?\)")  # a cast of a name or a number
_REMARKS = {
    "#pragma omp parallel": "shared among the cores",
    "@triton": "many copies of this run at once",
    "for(": "one loop for all four lines",
    "in_ptr0 +": "READ x, once",
    "in_ptr0[": "READ x, once",
    "out_ptr0 +": "WRITE the result, once",
    "out_ptr0[": "WRITE the result, once",
    "max": "relu",
    "clamp_min": "relu",
}
_RECORDING = ("cudagraph_post_compile", "cudagraph_partition_post_compile")
_LIBRARY = re.compile(r"(?m)\b(?:extern_kernels\.\w+|torch\.ops\.\w+\.\w+\.\w+)\(")


@dataclass(frozen=True)
class Plan:
    """One graph as Inductor schedules it: counts of kernel launches and of library calls, bytes, and the source.

    `bytes` is what the kernels must read and write; a tensor that lives and dies inside one kernel costs nothing.
    """

    kernels: int
    library_calls: int
    bytes: int
    source: str

    def kernel_text(self) -> str:
        """The source of Inductor's first kernel, from `extern "C"` or `@triton.jit` on; empty if it wrote none."""
        found = re.search(r"'''\n(.*?)'''", self.source, re.DOTALL)
        text = found[1] if found else ""
        return text[max(0, text.find('extern "C"'), text.find("@triton.jit")) :].strip()


@contextlib.contextmanager
def _any_compiler() -> Iterator[None]:
    """If there is no C++ compiler, keep Inductor from asking which one it is; it then writes plain scalar C++."""
    try:
        cpp_builder.get_cpp_compiler()
    except (InvalidCxxCompiler, PermissionError):  # there is none, or it may not be run
        known = {"is_gcc": lambda: True, "is_msvc_cl": lambda: False}
        with config.patch({"cpp.vec_isa_ok": False}), mock.patch.multiple(cpp_builder, **known):
            yield
    else:
        yield


def plans(work: Callable[[], object]) -> list[Plan]:
    """Run `work()`, which calls functions compiled with Inductor, and return each graph's plan, in compile order.

    The graphs themselves run operation by operation, so that `work` can continue, even through a backward pass.
    """
    found: list[Plan] = []

    def read(graph: GraphLowering) -> SimpleNamespace:
        operations = graph.orig_gm
        source = graph.codegen()[0].value
        call = source[_CALLS.search(source).start() :]
        found.append(Plan(len(_KERNEL.findall(call)), len(_LIBRARY.findall(call)), graph.count_bytes()[0], source))
        return SimpleNamespace(call=lambda inputs: torch.fx.Interpreter(operations).run(*inputs))

    torch.compiler.reset()
    try:
        # read nothing from the caches, and write nothing of this to them
        with (
            _any_compiler(),
            config.patch(fx_graph_cache=False, compile_threads=1),
            autograd_config.patch(enable_autograd_cache=False),
            mock.patch.object(GraphLowering, "compile_to_module", read),
            # on a GPU, some modes would record CUDA graphs of compiled code, and there is none here
            mock.patch.multiple(output_code, **{name: lambda *_: None for name in _RECORDING}),
        ):
            work()
    finally:
        torch.compiler.reset()
    return found


def tools() -> Table:
    """A table of where compiled kernels are kept on this machine, and which compiler makes them."""
    compiler = compat.compiler() or compat.NO_COMPILER
    rows = (("folder for compiled kernels", compat.compile_cache()), ("compiler for kernels", compiler))
    return Table(("torch.compile", "found"), rows, stamp=True)


def builds_packages() -> bool:
    """Whether AOTInductor can build a package here: its host code is C++, and a GPU needs the CUDA toolkit too."""
    if not compat.compiler() or not compat.compiler("cpu"):
        return False
    from torch.utils.cpp_extension import CUDA_HOME

    return machine.device().type == "cpu" or CUDA_HOME is not None


class Recorder:
    """A backend that compiles nothing: it keeps each graph that it is handed, and counts the calls that run one."""

    def __init__(self):
        self.graphs: list[torch.fx.GraphModule] = []
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable:
        self.graphs.append(graph)

        def run(*args):
            self.calls += 1
            device = machine.device()
            # bf16 without hardware for it would take minutes
            half = torch.is_autocast_enabled(device.type)
            with compat.half_products(device) if half else contextlib.nullcontext():
                return graph(*args)

        return run

    def __deepcopy__(self, memo: dict) -> "Recorder":
        return self  # Lightning copies the arguments of torch.compile


def operations(graphs: list[torch.fx.GraphModule]) -> int:
    """The number of operations that a compiler has to work through in these graphs.

    A nested region counts once, however often it is called. Calls of regions and unpacking results do not count.
    """
    return sum(_operations(graph) for graph in graphs)


def _operations(graph: torch.fx.GraphModule) -> int:
    nodes = list(graph.graph.nodes)
    named = {node.target for node in nodes if node.op == "get_attr" and node.users}
    regions = [part for name, part in graph.named_children() if name in named and hasattr(part, "graph")]
    own = [node for node in nodes if node.op.startswith("call") and _computes(node)]
    return sum("invoke_subgraph" not in str(node.target) for node in own) + sum(map(_operations, regions))


def _computes(node: torch.fx.Node) -> bool:
    """Whether a node computes something, rather than logging the use of an API or unpacking the result of a call.

    Indexing a tensor, as in x[:, 0], does compute something.
    """
    taken = node.target is operator.getitem
    apart = taken and not isinstance(node.args[0].meta.get("example_value"), torch.Tensor)
    return not apart and node.target is not torch._C._log_api_usage_once


def show_kernel(plan: Plan) -> None:
    """Show a plan's first kernel with remarks and no casts. It is quoted because the text differs by machine."""
    lines = [line for line in _CAST.sub(r"\1", plan.kernel_text()).splitlines() if "integer_div_error" not in line]
    notes = [next((f"   <-- {note}" for key, note in _REMARKS.items() if key in line), "") for line in lines]
    shown = "\n".join(map("".join, zip(lines, notes, strict=True)))
    emit(f"[quoted] the kernel, with remarks: \n{shown}", QUOTED, {"label": "the kernel", "always": "tmp0"})
