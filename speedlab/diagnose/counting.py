"""What one training step consists of: every operation with its FLOPs, bytes, module and phase; and what is odd in it.

Nothing here reads a clock, so that two runs give the same counts on any machine. Bytes are those of an operation's
inputs and outputs, as if nothing stayed in a cache; FLOPs are those of matrix products, convolutions and attention.
"""

import collections
import contextlib
import gc
import itertools
import logging
import os
import statistics
import sys
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from speedlab import compat, count, machine
from speedlab.diagnose.jobs import (
    DiagnoseError,
    Job,
    in_a_line,
    one_sentence,
    real_tokens,
    size_of,
    tensors,
    untouched,
)

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
_OVERWRITES = frozenset(("zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_", "normal_", "uniform_"))
# Operations whose result the host must wait for, and methods that copy to it.
_WAITS = frozenset(
    "_local_scalar_dense nonzero masked_select equal is_nonzero _unique2 unique_dim unique_consecutive bincount "
    "repeat_interleave allclose _linalg_check_errors".split()
)
_LOOKS_UP = frozenset(("embedding", "index", "index_select", "gather"))
_INDEXING = frozenset(("index", "index_put", "index_put_"))
# Namespaces of operations that compute nothing, and of those that speak to other processes.
_NO_WORK = frozenset(("profiler", "prim"))
_BETWEEN_PROCESSES = frozenset(("c10d", "_c10d_functional"))
# Seconds that a loader may take for four batches.
PATIENCE = 60.0
_COPIES = frozenset(("cpu", "numpy", "tolist", "__array__", "__dlpack__"))
# Wrapped by vmap and the like: such a tensor has no storage of its own.
WRAPPED = torch._C._functorch.is_functorch_wrapped_tensor
# Where a module keeps what it has registered; other attributes may be what it remembers.
_REGISTERED = ("_parameters", "_buffers", "_modules")
_OURS = tuple(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__))


@dataclass(frozen=True)
class Operation:
    """One operation: its name, dtype, phase, module, FLOPs and bytes; `collective` if it runs between processes.

    `fixed` are the bytes that a larger batch does not raise: those of tensors as large as a parameter. `elements` are
    those of its first result. `beside` is true of a collective that backward starts without waiting for it.
    """

    name: str
    dtype: str
    phase: str
    module: str
    flops: int
    bytes: int
    collective: bool = False
    fixed: int = 0
    elements: int = 0
    beside: bool = False


@dataclass(frozen=True)
class Counts:
    """What a step of a job is made of. All but the operations are per step; bytes are bytes."""

    operations: tuple[Operation, ...]
    saved: int
    saved_by_module: dict[str, int]
    parameters: int
    gradients: int
    optimizer: int
    peak: int
    syncs: dict[str, int]
    left_behind: int
    padded: float
    repeated: dict[str, int]
    moved_again: dict[str, int]
    unused_gradients: int
    graph_breaks: dict[str, int] | None
    recompiled: int
    compiled: bool
    calls_per_batch: int | None
    batch_size: int
    fuses: bool

    @property
    def flops(self) -> int:
        return sum(operation.flops for operation in self.operations)

    @property
    def bytes(self) -> int:
        return sum(operation.bytes for operation in self.operations)

    def by(self, kind: str) -> dict[str, tuple[int, int, int]]:
        """Operations, FLOPs and bytes by 'phase', 'module', 'dtype' or 'name', the largest in bytes first."""
        found: dict[str, list[int]] = {}
        for operation in self.operations:
            row = found.setdefault(getattr(operation, kind), [0, 0, 0])
            row[:] = row[0] + 1, row[1] + operation.flops, row[2] + operation.bytes
        return {name: tuple(row) for name, row in sorted(found.items(), key=lambda item: -item[1][2])}


def counts(job: Job, *, breaks: bool = True) -> Counts:
    """Count the fifth training step of a fresh model: by then the optimizer's state exists and caches are warm."""
    with untouched():
        machine.probe()  # which draws random numbers, the first time only
    with untouched(job.loader), contextlib.ExitStack() as around, one_sentence("Counting a step"):
        torch._dynamo.reset()  # code that an earlier count compiled would hide that this one compiles
        model, optimizer = job.built()
        job.expect_own(model, optimizer)
        # a dtype that the hardware lacks takes minutes, and the counts are the same
        around.enter_context(compat.half_products(next((p.device for p in model.parameters()), "cpu")))
        batches = [job.batch() for _ in range(7)]
        stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        around.callback(register_optimizer_step_pre_hook(lambda of, *_: stepped.add(of)).remove)
        graphs = []
        for batch in batches[:4]:
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            job.train(model, optimizer, batch)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        watches = []
        around.enter_context(_collector_held())
        buffers = [_buffer_bytes(model)]
        for batch in batches[4:]:
            watches.append(_Watch(model, optimizer, batch))
            with watches[-1]:
                job.train(model, optimizer, batch)
            gc.collect()
            buffers.append(_buffer_bytes(model))
        watch, again = watches[0], set.intersection(*(set(watch.moved) for watch in watches))
        state = count.state_bytes(model, optimizer)
        # looked at later: what the next steps replace with their own is state, and a leak is left by step after step
        grown = statistics.median_low(max(0, after - before) for before, after in itertools.pairwise(buffers))
        left_behind = min(w.left_behind() for w in watches[:2]) + grown
        saved = count.saved_bytes(lambda: job.loss(model, batches[4]), model)
        by_module: Counter[str] = Counter()
        for tensor in saved.tensors:
            by_module[tensor.where] += tensor.bytes
        # an optimizer may use a gradient in a later step; one that never steps, beside others that do, uses none
        gc.unfreeze()
        live = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
        others = (g for o in live if o in stepped or not stepped for g in vars(o).get("param_groups") or ())
        groups = [*optimizer.param_groups, *(g for g in others if isinstance(g, dict))]
        in_use = {id(p) for group in groups for p in group.get("params", ())}.union(*(w.updated for w in watches))
        dropped = set().union(*(now.dropped(then) for now, then in itertools.pairwise(watches)))
        made = set().union(*(w.made for w in watches))  # what an earlier step left is no work of this one
        unused = (p for p in model.parameters() if id(p) in dropped | (made - in_use))
        complex_ = any(p.is_complex() for p in model.parameters())
        calls, given = _calls(job.loader) if job.loader is not None else (None, [])
        _expect_alike(size_of(batches[4]), [job.prepare(batch) for batch in given])
        return Counts(
            operations=tuple(watch.operations),
            # micro-batches hold less at once than a whole batch's loss; gradients appear while that is freed
            saved=min(saved.bytes, max(0, watch.peak - state.parameters - state.optimizer)),
            saved_by_module=dict(by_module.most_common()),
            parameters=state.parameters,
            gradients=state.gradients,
            optimizer=state.optimizer,
            peak=watch.peak,
            syncs=dict(watch.syncs),
            left_behind=left_behind,
            padded=_padded(batches) if any(w.reads_tokens() for w in watches) else 0.0,
            repeated=dict(watch.repeated),
            moved_again={watch.moved[key]: 1 for key in again},
            unused_gradients=sum(p.nbytes for p in unused),
            graph_breaks=_graph_breaks(job, batches[4]) if breaks else None,
            recompiled=graphs[4] - graphs[2],  # a second shape may cost a second compilation, with sizes left open
            compiled=graphs[4] > graphs[0],
            calls_per_batch=calls,
            batch_size=size_of(batches[4]),
            fuses="fused" in optimizer.defaults and not complex_,
        )


@contextlib.contextmanager
def _collector_held() -> Iterator[None]:
    """Keep Python from collecting garbage when it likes: tensors in a cycle then live equally long in every run."""
    running = gc.isenabled()
    gc.disable()
    gc.freeze()  # what exists need not be looked through at each collection
    try:
        yield
    finally:
        gc.unfreeze()
        if running:
            gc.enable()


class _Watch(TorchDispatchMode):
    """Sees every operation of a step, and what the model's and the user's code does around them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: object) -> None:
        super().__init__()
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self.operations: list[Operation] = []
        self.syncs: Counter[str] = Counter()
        self.repeated: Counter[str] = Counter()
        self.moved: dict[tuple[weakref.ref, int], str] = {}
        self.held: dict[weakref.ref, int] = {}
        self.before: set[weakref.ref] = set()
        self.live, self.peak, self.hushed = 0, 0, False
        self._seen, self.called, self.draws = set(), [], 0
        self.stepping = 0  # optimizers, of which one may call another
        self.updated: set[int] = set()
        # where gradients are when an optimizer first steps, or at the end, and those that this step wrote
        self.used, self.made = {}, {}
        self.writes: Counter[weakref.ref] = Counter()
        self.read: dict[weakref.ref, int] = {}  # by the number of the last operation that read it
        # outside backward: what was read, and what was only scaled in place or measured, as in clipping
        self.looked_at: set[weakref.ref] = set()
        self.clipped: set[weakref.ref] = set()
        self.looked_up: set[torch.Size] = set()
        # not torch's ModuleTracker: its hooks on gradients keep what a checkpoint computes again until the step ends
        self.names, self.running = {id(module): name for name, module in model.named_modules()}, []
        self.module_of: dict[int, str] = {}
        self.shapes = {tuple(sorted(p.shape)) for p in model.parameters()}
        self.on_gpu = any(p.is_cuda for p in model.parameters())
        self.began = set(_gradients(model.parameters()).items())  # in a set, which hashes them while they live
        for tensor in self.kept():
            self.hold(tensor, was_there=True)

    def __enter__(self):
        self.around = contextlib.ExitStack()
        # of every optimizer: a step may have more than the job's
        before, after = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        hooks = [before(self._steps), after(lambda *_: setattr(self, "stepping", self.stepping - 1))]
        for module in self.model.modules():
            hooks.append(module.register_forward_pre_hook(self._called, prepend=True, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._left, always_call=True))
        for hook in hooks:
            self.around.callback(hook.remove)
        self.around.enter_context(_Methods(self))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.around.close()
        left = _gradients(self.model.parameters())
        self.made = {key: at for key, at in left.items() if self.writes[at] or at not in self.before}
        # an update that the user wrote reads the gradient, of which nothing may be left, and writes the weight
        looked = {key for key, at in (*self.began, *left.items()) if at in self.looked_at}
        self.updated |= {id(p) for p in self.model.parameters() if id(p) in looked and self.writes[_storage(p)]}
        self.used = {**left, **self.used}

    def dropped(self, then: "_Watch") -> set[int]:
        """Parameters whose gradient this step made, and neither used nor left for the next step to add to or read.

        A step that clips gradients and waits may skip its update where they are too large, as a loss scaler does.
        """
        new = {key: at for key, at in self.made.items() if key not in self.updated and then.used.get(key, at) != at}
        read = self.looked_at | then.looked_at | (self.clipped if self.syncs else set())
        return {key for key, at in new.items() if at not in read}

    def _steps(self, optimizer: torch.optim.Optimizer, *_) -> None:
        self.stepping += 1
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        self.updated |= {id(p) for p in stepped}
        self.used = {**_gradients(stepped), **self.used}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # in inference mode, and on what was made there, `linear` and its like arrive whole
        if torch.is_inference_mode_enabled() or any(t.is_inference() for t in tensors((args, kwargs))):
            super().__enter__()
            try:
                if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return out
            finally:
                super().__exit__(None, None, None)
        # the result of torch.tensor(...) is first seen as the argument of this operation, just made
        fresh = func._schema.name in ("aten::lift_fresh", "aten::lift")
        for tensor in tensors((args, kwargs)):
            self.hold(tensor, was_there=not fresh)
        out = func(*args, **kwargs)
        for tensor in tensors(out):
            self.hold(tensor)
        name = func._schema.name.split("::")[-1]
        where = self.where()
        masked = name in _INDEXING and any(t.dtype == torch.bool for t in tensors(args[1]))
        # one number of the host is filled in where a mask is true, without a list of the places
        fills = masked and name != "index" and args[2].numel() == 1 and args[2].is_cpu and True not in args[3:]
        # with a GPU, reading a number on the CPU, as an optimizer reads its counters, neither launches nor waits
        counter = name == "_local_scalar_dense" and self.on_gpu and args[0].is_cpu
        summed = kwargs.get("output_size") is not None  # of repeat_interleave: then it need not add up
        waits = name in _WAITS and not summed and not counter
        to_host = name == "_to_copy" and args[0].is_cuda and out.is_cpu and not kwargs.get("non_blocking")
        if waits or to_host or (masked and not fills):
            self.sync()
        # attention has this tag even where it drops nothing
        named = {of.name: given for of, given in zip(func._schema.arguments, args, strict=False)} | kwargs
        if "convolution" in name and func.namespace == "aten":
            name += f"_{len(named['stride'])}d" + "_channels_last" * any(map(_is_channels_last, tensors(args)))
        keeps_all = "scaled_dot_product" in name and not named.get("dropout_p")
        self.draws += torch.Tag.nondeterministic_seeded in func.tags and not keeps_all
        idle = func.namespace == "aten" and (name == "detach" or name.startswith(count.ALLOCATIONS))
        if func.is_view or idle or func.namespace in _NO_WORK or counter:
            return out
        taken, given = _read_and_written(func, args, kwargs, out)
        self.read.update((_storage(t), len(self.operations)) for t in taken)
        if torch._C._current_graph_task_id() == -1:
            changed = {_storage(t) for t in given}
            looked = {_storage(t) for t in taken} - changed
            self.clipped |= changed | looked if "norm" in name else changed
            self.looked_at |= set() if "norm" in name else looked
        self.writes.update(_storage(t) for t in given)
        if name in _LOOKS_UP:
            self.looked_up |= {t.shape for t in tensors(args[1:]) if not t.is_floating_point()}
        formula = count.formulas().get(func._overloadpacket)
        flops = int(formula(*args, **kwargs, out_val=out)) if formula else 0
        # the first that is no mask, as in where(mask, a, b)
        typed = [t.dtype for t in taken or given]
        dtype = next((count.dtype_name(of) for of in typed if of != torch.bool), "bool" if typed else "")
        # of a table, only the rows that are asked for are read, and no more than all
        few = name in _LOOKS_UP and _bytes(given[0]) < _bytes(taken[0])
        parts = [*(given + taken[1:] if few else taken), *given]
        moved, fixed = (
            sum(_bytes(t) for t in parts if every or tuple(sorted(t.shape)) in self.shapes) for every in (True, False)
        )
        # a backward runs as a task of autograd's engine, whoever started it; an optimizer may be given a closure
        phase = OPTIMIZER if self.stepping and not self.running else FORWARD
        phase = BACKWARD if torch._C._current_graph_task_id() != -1 else phase
        between = func.namespace in _BETWEEN_PROCESSES
        elements = given[0].numel() if given else 0
        beside = between and phase == BACKWARD and _is_async(func, named)
        self.operations.append(Operation(name, dtype, phase, where, flops, moved, between, fixed, elements, beside))
        return out

    def where(self) -> str:
        """The running operation's module; in backward, that of the forward operation, or of the one called again."""
        module, node = self.running[-1] if self.running else "", torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled():  # forward, or computed again in backward
            self.module_of.setdefault(torch.autograd._get_sequence_nr() - 1, module)
            return module
        return self.module_of.get(node._sequence_nr(), module)

    def hold(self, tensor: torch.Tensor, was_there: bool = False) -> None:
        """Count a tensor's storage as live until it is freed; one first seen now may have been there before."""
        if tensor.layout is not torch.strided:
            raise DiagnoseError("A tensor of the step is sparse or nested; only dense ones are counted.")
        storage = tensor.untyped_storage()
        ref = weakref.ref(storage, self._freed)
        if ref not in self.held:
            self.held[ref] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = self.peak + storage.nbytes() if was_there else max(self.peak, self.live)
            if was_there:
                self.before.add(ref)

    def _freed(self, ref: weakref.ref) -> None:
        self.live -= self.held.pop(ref, 0)

    def _called(self, module: nn.Module, given: tuple, named: dict) -> None:
        """Note the module that runs, and one that is called again with the very same input in one forward pass."""
        self.called.append((None, [], self.draws, 0))
        self.running.append(self.names.get(id(module), self.running[-1] if self.running else ""))
        own, inputs = list(module.parameters()), tensors((given, named))
        # on other weights, or with another dropout mask, it is not the same again
        drawn = any(m.training and _drops(m) for m in module.modules())
        untracked = not all(map(_has_version, (*own, *inputs)))
        if not own or not inputs or drawn or untracked or torch._C._current_graph_task_id() != -1:
            return
        # references, not addresses: what is freed leaves its address to others
        stamp = lambda t: ((at := _storage(t)), self.writes[at], t._version)  # noqa: E731
        same = ((*stamp(t), t.storage_offset(), t.shape, t.stride()) for t in inputs)
        # switches of its parts, such as training mode, LoRA's adapters off or others on; and what they remember
        state = [value for m in module.modules() for name, value in vars(m).items() if name not in _REGISTERED]
        modes = tuple(_plain(value) for value in state if isinstance(value, bool | str) or _are_names(value))
        kept = [stamp(t) for value in state for t in _held_by(value) if _has_version(t)]
        half = torch.is_autocast_enabled(inputs[0].device.type)
        key = (id(module), half, modes, _plain((given, named)), *map(stamp, own), *same)
        self.called[-1] = key, kept, self.draws, len(self.operations)

    def _left(self, module: nn.Module, *_) -> None:
        self.running.pop()
        key, kept, draws, start = self.called.pop()
        if key is None or draws != self.draws:  # with other noise it is not the same again
            return
        # a memory is read; what is only written down, such as the last output, changes no result
        key = (*key, *(stamp for stamp in kept if self.read.get(stamp[0], -1) >= start))
        if key in self._seen:
            self.repeated[type(module).__name__] += 1
        self._seen.add(key)

    def sync(self) -> None:
        """Note a wait of the host; on a CPU, not those of an optimizer, which reads its own counters there."""
        if (self.on_gpu or not self.stepping) and not self.hushed:
            self.syncs[line_of_caller()] += 1

    def kept(self) -> list[torch.Tensor]:
        """What lives from step to step, and the batch."""
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        state = tensors((list(self.optimizer.state.values()), self.batch))
        given = [t.grad for t in tensors(self.batch) if t.is_leaf and t.grad is not None]
        return [*parameters, *self.model.buffers(), *gradients, *state, *given]

    def reads_tokens(self) -> bool:
        """Whether the batch has a mask, or ids that index a table: other rows of numbers have no padding."""
        real = real_tokens(self.batch)
        if real is None or (isinstance(self.batch, Mapping) and "attention_mask" in self.batch):
            return real is not None
        return any(shape[-1:] == real.shape[1:] or shape.numel() == real.numel() for shape in self.looked_up)

    def left_behind(self) -> int:
        """Bytes of what this step made and what still lives, apart from state, batch and metrics to read later."""
        left = self.held.keys() - self.before - {_storage(t) for t in self.kept()}
        if left:  # a queue of limited length lets go of what it holds, later than we look
            gc.unfreeze()  # what is frozen is not listed
            queues = (q for q in gc.get_objects() if issubclass(type(q), collections.deque) and q.maxlen is not None)
            left -= {_storage(t) for q in queues for part in list(q) for t in _in_queue(part)}
        few = {ref for ref in left if self.held[ref] <= 8}
        more = {ref for ref in left - few if self.held[ref] <= 64}
        few |= more if sum(self.held[ref] for ref in more) <= 64 else set()
        if few:  # a few numbers are metrics, unless their graph lives on in them
            live = (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and not WRAPPED(t))
            graphs = (t for t in live if t.layout is torch.strided and _has_graph(t))
            left -= few - {_storage(t) for t in graphs}
        return sum(self.held[ref] for ref in left)


class _Methods(TorchFunctionMode):
    """Sees methods that copy to the host, or move a tensor, even where they change nothing on this machine."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch, self.on_host = watch, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        copies = name in _COPIES and isinstance(args[0], torch.Tensor) and not self.watch.on_gpu  # there, below
        if copies and all(ref() is not args[0] for ref in self.on_host):
            self.watch.sync()
        # a GPU does not check whether the labels are below a given number of classes
        self.watch.hushed = name == "one_hot" and (args[1:2] or [(kwargs or {}).get("num_classes", -1)])[0] > 0
        out = func(*args, **(kwargs or {}))
        self.watch.hushed = False
        if name == "cpu":
            self.on_host.append(weakref.ref(out))  # `.cpu().numpy()` waits once
        if name not in ("to", "cuda") or args[0].is_inference() or WRAPPED(args[0]):
            return out
        if out.data_ptr() != args[0].data_ptr() and not args[0].requires_grad:
            given = {_storage(t) for t in tensors(self.watch.batch)}
            if _storage(args[0]) not in given:
                self.watch.moved[_storage(args[0]), args[0]._version] = line_of_caller()
        return out


def _is_async(func, named: dict) -> bool:
    """Whether a collective is not waited for; an argument that has its default is not given, old torch has none."""
    arguments = func._schema.arguments
    return any(of.name == "async_op" and named.get(of.name, of.default_value) for of in arguments)


def _read_and_written(func, args: tuple, kwargs: dict, out: object) -> tuple[list, list]:
    """The tensors that an operation reads and those that it writes, from its schema.

    What changes its arguments in place (`add_`, optimizers on lists) writes them; what only overwrites them (`zero_`,
    `copy_`, `out=`) does not read them. Fused optimizers declare gradients as written: only a loss scaler does that.
    """
    read, written, name = [], [], func._schema.name.split("::")[-1]
    for number, of in enumerate(func._schema.arguments):
        given = tensors(args[number] if number < len(args) else kwargs.get(of.name))
        writes = of.alias_info is not None and of.alias_info.is_write and of.name != "grads"
        written += given if writes else []
        read += [] if writes and (of.is_out or name in _OVERWRITES) else given
    return read, written + [t for t in tensors(out) if not any(t is w for w in written)]


def line_of_caller() -> str:
    """`file.py:12` of the innermost frame that is neither torch's nor this package's."""
    frame = sys._getframe(1)
    while frame:
        name = frame.f_code.co_filename
        if not name.startswith(_OURS) and "contextlib" not in name:
            short = Path(name).name if "/ipykernel_" not in name else "notebook"
            return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "inside torch"


def _gradients(parameters: Iterable[nn.Parameter]) -> dict[int, weakref.ref]:
    dense = (p for p in parameters if p.grad is not None and p.grad.layout is torch.strided)
    return {id(p): _storage(p.grad) for p in dense}


def _storage(t: torch.Tensor) -> weakref.ref:
    return weakref.ref(t.untyped_storage())


def _has_version(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not t.is_inference() and not WRAPPED(t)


def _has_graph(t: torch.Tensor) -> bool:
    try:
        return t.grad_fn is not None
    except RuntimeError:  # of a view that was made without gradients, and whose base was then changed
        return True


def _in_queue(part: object) -> list[torch.Tensor]:
    """The tensors of what a queue holds, and those that are its attributes."""
    try:
        own = list(getattr(part, "__dict__", {}).values())
    except ReferenceError:  # a weak proxy, whose object is gone
        return []
    return tensors((part, [value for value in own if isinstance(value, torch.Tensor)]))


def _held_by(value: object) -> list[torch.Tensor]:
    """The tensors that an attribute of a module holds: itself, or those of a short container, such as (h, c)."""
    if isinstance(value, torch.Tensor):
        return [value]
    contained = isinstance(value, Mapping | list | tuple | collections.deque) and len(value) <= 100
    parts = (value.values() if isinstance(value, Mapping) else value) if contained else ()
    return [t for part in parts for t in (part if isinstance(part, list | tuple) else [part]) if torch.is_tensor(t)]


def _are_names(value: object) -> bool:
    """Whether a value is a short list of words or flags, as of active adapters; a log or a vocabulary is none."""
    return isinstance(value, list) and len(value) <= 100 and all(isinstance(part, str | bool) for part in value)


def _plain(value: object) -> object:
    """What can be compared in a value: flags, numbers and words, also nested; of anything else, its type."""
    if isinstance(value, Mapping):
        return tuple((_plain(key), _plain(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value if isinstance(value, str | int | float | None) else type(value)


def _drops(module: nn.Module) -> bool:
    """Whether a module has a dropout rate, by the names that torch and transformers give it."""
    rates = (getattr(module, name, 0) for name in ("p", "dropout", "dropout_p", "attention_dropout"))
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; of one that is expanded, those that exist."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _is_channels_last(t: torch.Tensor) -> bool:
    return t.dim() == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)


def _buffer_bytes(model: nn.Module) -> int:
    """Bytes of the model's buffers; sparse weights, which have no storage to look at, are left alone."""
    return sum(buffer.nbytes for buffer in model.buffers())


def _padded(batches: list) -> float:
    """The share of tokens that are padding."""
    masks = [mask for mask in map(real_tokens, batches) if mask is not None]
    return sum(int((~mask).sum()) for mask in masks) / max(1, sum(mask.numel() for mask in masks))


def _graph_breaks(job: Job, batch: object) -> dict[str, int]:
    """Where torch.compile would cut the forward pass, and how often."""
    model, log = job.make_model(), logging.getLogger("torch._dynamo")
    model.train()
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        torch._dynamo.reset()
        told = torch._dynamo.explain(lambda: job.loss_fn(model, batch))()
    except Exception as error:
        return {f"cannot be traced: {type(error).__name__}": 1}
    finally:
        log.setLevel(level)
        torch._dynamo.reset()
    found: Counter[str] = Counter()
    for reason in told.break_reasons:
        frame: traceback.FrameSummary = reason.user_stack[-1]
        found[f"{Path(frame.filename).name}:{frame.lineno} {str(reason.reason).splitlines()[0][:80]}"] += 1
    return dict(found)


def _expect_alike(size: int, given: list) -> None:
    """Refuse batches of the loader that are far from the size of those that are counted."""
    held = statistics.median([len(next((t for t in tensors(b) if t.dim()), range(size))) for b in given] or [size])
    if not size / 2 <= held <= 2 * size:
        told = f"The loader's batches have {held:g} samples, and make_batch gave {size}: set batch_size to match."
        raise DiagnoseError(told)


def _calls(loader: Iterable) -> tuple[int, list]:
    """Python calls that a batch of this loader costs, the mean of three, 0 where workers make them; and batches."""
    made, taken, error, profiler = 0, [], [], sys.getprofile()

    def watch(frame, event, argument) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    def take() -> None:
        try:
            batches = itertools.chain.from_iterable(itertools.repeat(loader, 4))  # one batch may be an epoch
            next(batches, None)
            sys.setprofile(watch)
            taken.extend(itertools.islice(batches, 3))
        except Exception as raised:
            error.append(raised)
        finally:
            sys.setprofile(None)

    # a loader may wait for ever for a worker or a network; a thread can be left behind
    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        at = traceback.extract_stack(sys._current_frames().get(thread.ident))[-1]  # where it waits
        raise DiagnoseError(
            f"The loader did not give four batches within {PATIENCE:g} s: it is at line {at.lineno} of "
            f"{Path(at.filename).name}, in {at.name}. Try it alone; leave out loader=."
        )
    if error:  # what was opened in the main thread, such as SQLite, may refuse another thread
        made = 0
        error.clear(), taken.clear()
        take()
        if callable(profiler):  # cProfile's own cannot be set again
            sys.setprofile(profiler)
    if error or not taken:
        raise DiagnoseError(f"The loader gave no two batches: {in_a_line(error[0]) if error else 'it ended'}.")
    return (0 if getattr(loader, "num_workers", 0) else made // len(taken)), taken
