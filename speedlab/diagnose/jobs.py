"""What is diagnosed: a training step that can be built again, from plain PyTorch, Lightning or transformers."""

import contextlib
import copy
import importlib.util
import inspect
import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class DiagnoseError(Exception):
    """What was given cannot be diagnosed; the sentence says why and what to do."""


@contextlib.contextmanager
def one_sentence(what: str, hint: str = "") -> Iterator[None]:
    """Whatever the user's code raises becomes one sentence; a script that wants arguments ends by SystemExit."""
    try:
        yield
    except DiagnoseError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise DiagnoseError(
            f"{what} needs more memory than there is. Give a smaller batch_size, or a smaller model."
        ) from error
    except (Exception, SystemExit) as error:
        if "not attached to a `Trainer`" in str(error):
            hint = (
                "The module asks for its Trainer, and a diagnosis has none. Leave self.trainer out of training_step "
                "and configure_optimizers, or write a Job with a loss_fn and a make_optimizer of your own."
            )
        raise DiagnoseError(
            f"{what} raised {type(error).__name__}: {in_a_line(error).rstrip('.')}. {hint}".strip()
        ) from error


def in_a_line(error: BaseException) -> str:
    """What an error says, in a line; of one that a DataLoader's worker hands over, the last line of its traceback."""
    lines = (str(error).strip() or "no message").splitlines()
    return lines[-1] if lines[0].startswith("Caught ") else lines[0]


@dataclass(frozen=True)
class Job:
    """One training step.

    make_model() returns a model, make_batch(size) a batch of `size` samples (a tensor, or a tuple or dictionary that
    holds some), loss_fn(model, batch) the loss, make_optimizer(model) an optimizer. `loader` gives batches as your
    training does; without it the data pipeline is not looked at. `step(model, optimizer, batch)` replaces the usual
    step (zero_grad, loss_fn, backward, step) where yours does more, such as logging; it returns the loss.
    `prepare(batch)` changes each batch, including the loader's, before it is used.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], object]
    loss_fn: Callable[[nn.Module, object], torch.Tensor]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch_size: int = 8
    loader: Iterable | None = None
    step: Callable[[nn.Module, torch.optim.Optimizer, object], torch.Tensor] | None = None
    prepare: Callable[[object], object] = lambda batch: batch

    def built(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A fresh model in training mode, and its optimizer."""
        with one_sentence("make_model()", "Call it by itself until it works."):
            model = self.make_model()
        if not isinstance(model, nn.Module):
            raise DiagnoseError(f"make_model() returned a {type(model).__name__}; it must return an nn.Module.")
        if isinstance(model, DistributedDataParallel):
            raise DiagnoseError("The model is wrapped in DistributedDataParallel. Diagnose what is inside (.module).")
        if any(p.is_cuda for p in model.parameters()) and not torch.cuda.is_available():
            raise DiagnoseError("The model is on a GPU, which this process cannot use. Build it on the CPU.")
        with one_sentence("make_optimizer(model)"):
            optimizer = self.make_optimizer(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise DiagnoseError(
                f"make_optimizer(model) returned a {type(optimizer).__name__}; it must return one optimizer of torch."
            )
        model.train()  # not `model = model.train()`: its own train() may forget to return the model
        return model, optimizer

    def expect_own(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a job that would train the caller's own weights: those in two models, or in none."""
        with one_sentence("make_model()"):
            own, others = (set(map(id, made.parameters())) for made in (model, self.make_model()))
        if own & others:
            raise DiagnoseError(
                "make_model() returned the same weights twice. Return new ones, or a deepcopy of them."
            )
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if trained - own:
            raise DiagnoseError(
                f"The optimizer holds {len(trained - own)} parameters that are not the model's, such as those of a "
                "criterion: put them into the model, so that each run has its own."
            )

    def batch(self, size: int | None = None) -> object:
        """A batch of `size` samples, by default `batch_size`."""
        with one_sentence(f"make_batch({size or self.batch_size})"):
            return self.prepare(self.make_batch(size or self.batch_size))

    def batches(self) -> Iterator | None:
        """The loader's batches, epoch after epoch; None without a loader."""
        if self.loader is None:
            return None
        return self._again_and_again()

    def _again_and_again(self) -> Iterator:
        for epoch in itertools.count():
            batch = None
            with one_sentence("The loader, or prepare(batch),"):
                for batch in self.loader:
                    yield self.prepare(batch)
            if batch is None:
                ended = "The loader ended and does not begin again. Give the DataLoader itself, not iter() of it."
                raise DiagnoseError(ended if epoch else "The loader gives no batch.")

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: object) -> torch.Tensor:
        """Do one step."""
        with one_sentence("One training step", "Does the model take this batch?"):
            if self.step:
                return self.step(model, optimizer, batch)
            optimizer.zero_grad()
            loss = self.loss(model, batch)
            loss.backward()
            optimizer.step()
            return loss

    def loss(self, model: nn.Module, batch: object) -> torch.Tensor:
        """The loss of a batch, checked: a single number that has a gradient."""
        loss = self.loss_fn(model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
            raise DiagnoseError(f"loss_fn must return a tensor of one number, not {type(loss).__name__}{shape}.")
        if not loss.requires_grad:
            raise DiagnoseError("The loss has no gradient: something detached it, or every parameter is frozen.")
        return loss


def from_lightning(module, loader: Iterable, batch_size: int | None = None) -> Job:
    """The job of a LightningModule and its training loader. Batches are the loader's first one, cut or repeated."""
    with untouched(loader):  # it draws a seed for its workers
        first = next(iter(loader), None)
    if first is None:
        raise DiagnoseError("The loader gives no batch.")

    # a step that logs is told each time that it has no Trainer here
    warnings.filterwarnings("ignore", message="You are trying to `self.log")
    takes = inspect.signature(module.training_step).parameters.values()
    alone = len(takes) == 1 and not any(p.kind is p.VAR_POSITIONAL for p in takes)  # without the batch index

    def loss_fn(model: nn.Module, batch: object) -> torch.Tensor:
        said = model.training_step(batch) if alone else model.training_step(batch, 0)
        return said["loss"] if isinstance(said, dict) else said

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        said = model.configure_optimizers()
        while isinstance(said, tuple | list):  # optimizers, or a pair of optimizers and schedules
            said = said[0]
        return said["optimizer"] if isinstance(said, dict) else said

    size = batch_size or size_of(first)
    return Job(lambda: copy.deepcopy(module), lambda n: resized(first, n), loss_fn, make_optimizer, size, loader)


def from_transformers(model, arguments, batch: dict, loader: Iterable | None = None) -> Job:
    """The job of a Hugging Face model, TrainingArguments, and a batch that has labels.

    Of the arguments it takes the device, the batch size, the optimizer, bf16 or fp16, gradient_checkpointing and
    torch_compile.
    """
    from transformers import Trainer

    def make_model() -> nn.Module:
        made = copy.deepcopy(model).to(arguments.device)
        if arguments.gradient_checkpointing:
            made.gradient_checkpointing_enable(arguments.gradient_checkpointing_kwargs)
        if arguments.torch_compile:
            made.compile()
        return made

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        bare = Trainer.__new__(Trainer)  # its __init__ makes a folder, maybe a repository, and sets up all devices
        bare.model, bare.args, bare.optimizer, bare.optimizer_cls_and_kwargs = model, arguments, None, None
        return bare.create_optimizer()

    def loss_fn(model: nn.Module, batch: dict) -> torch.Tensor:
        half = torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else None
        with torch.autocast(arguments.device.type, half) if half else contextlib.nullcontext():
            return model(**batch).loss

    return Job(
        make_model=make_model,
        make_batch=lambda size: resized(batch, size),
        loss_fn=loss_fn,
        make_optimizer=make_optimizer,
        batch_size=arguments.per_device_train_batch_size,
        loader=loader,
        prepare=lambda batch: mapped(lambda part: part.to(arguments.device), batch),
    )


def load(place: str) -> Job:
    """The job that `file.py:function` builds; the function takes no arguments and returns a Job."""
    name, _, function = place.rpartition(":")  # the last colon: on Windows, a path may hold another
    path = Path(name)
    if not function or path.suffix != ".py":
        raise DiagnoseError(f"{place!r} names no function. Give file.py:build, where build() returns a Job.")
    if not path.exists():
        raise DiagnoseError(f"There is no file {name}.")
    folder = str(path.parent.resolve())
    if folder not in sys.path:  # where Python looks when it runs the file: what build() returns may import from there
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(spec.name)
    if before is None or getattr(before, "__file__", None) == spec.origin:  # else it would hide another module
        sys.modules[spec.name] = module  # Dynamo and pickle look a module up by its name
    try:
        with one_sentence(place):
            spec.loader.exec_module(module)
            job = getattr(module, function)()
        if not isinstance(job, Job):
            raise DiagnoseError(f"{place} returned a {type(job).__name__}; it must return a Job.")
    except DiagnoseError:
        if sys.modules.get(spec.name) is module:
            del sys.modules[spec.name]
        raise
    return job


def tensors(batch: object) -> list[torch.Tensor]:
    """All tensors in a batch, or in anything nested, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, Mapping) else batch
    return [t for part in parts for t in tensors(part)] if isinstance(batch, Mapping | list | tuple | set) else []


def size_of(batch: object) -> int:
    """The samples in a batch: the first dimension of its first tensor."""
    first = next((t for t in tensors(batch) if t.dim()), None)
    if first is None:
        raise DiagnoseError("The batch holds no tensor: make_batch returns one, or a tuple or dictionary with some.")
    return len(first)


def resized(batch: object, size: int) -> object:
    """The batch with `size` samples: its own, repeated as needed."""
    return chosen(batch, torch.arange(size) % size_of(batch))


def chosen(batch: object, rows: torch.Tensor) -> object:
    """The batch with these of its samples, in this order."""
    old = size_of(batch)
    return mapped(lambda part: part[rows] if part.dim() and len(part) == old else part, batch)


def mapped(change: Callable[[torch.Tensor], torch.Tensor], batch: object) -> object:
    """The batch with each of its tensors changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        made = {key: mapped(change, value) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return made
        whole = copy.copy(batch)  # a tokenizer's batch has attributes too
        whole.update(made)
        return whole
    if not isinstance(batch, tuple | list):
        return batch
    parts = [mapped(change, value) for value in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)  # a named tuple takes them singly


def real_tokens(batch: object) -> torch.Tensor | None:
    """Which tokens (B, T) are not padding: those in the attention mask, or those before a run of the padding id."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is not None and mask.dim() == 2 and not mask.is_floating_point():  # floats are added to scores
        return mask != 0
    whole = (torch.int32, torch.int64)
    ids = next((t for t in tensors(batch) if t.dim() == 2 and t.shape[1] > 2 and t.dtype in whole), None)
    if ids is None or ids.max() < 2:  # ones and zeros are labels
        return None
    # the id that most rows end in; one such token at the end may be real, only a run of them is padding
    run = (ids == ids[:, -1].mode().values).flip(1).cumprod(1).flip(1).bool()
    return ~(run & (run.sum(1, keepdim=True) > 1))


@contextlib.contextmanager
def untouched(loader: Iterable | None = None) -> Iterator[None]:
    """Inside, the random states of Python, NumPy, torch and the loader may change; afterwards they are as before."""
    python, numpy = random.getstate(), np.random.get_state()
    inner = [getattr(loader, "sampler", None), batches := getattr(loader, "batch_sampler", None)]
    owners = (loader, *inner, getattr(batches, "sampler", None))
    generators = {g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    drawn = [(generator, generator.get_state()) for generator in generators]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.enable_grad():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            for generator, state in drawn:
                generator.set_state(state)
