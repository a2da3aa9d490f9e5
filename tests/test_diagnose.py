"""The diagnosis of a training step: planted patients, models that others wrote, bad input, all put back."""

import collections
import copy
import functools
import importlib
import itertools
import json
import pickle
import random
import sys
import threading
import time
import weakref
from dataclasses import dataclass, replace
from types import SimpleNamespace

import first_project
import numpy as np
import patients
import pytest
import second_version
import techniques
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torchvision
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from speedlab import compat, count, machine
from speedlab.diagnose import (
    RULES,
    Device,
    DiagnoseError,
    Job,
    advise,
    counting,
    counts,
    diagnose,
    estimate,
    from_lightning,
    from_transformers,
    rules,
)
from speedlab.diagnose.__main__ import main, size
from speedlab.diagnose.climb import RUNGS, apart, blocks, climb, trains
from speedlab.diagnose.jobs import load, mapped
from speedlab.diagnose.jobs import tensors as flat
from speedlab.diagnose.report import duration
from speedlab.diagnose.rules import tf32_flops
from speedlab.measure import Comparison, Ratio, Timing

DEVICE = patients.DEVICE
climbing = importlib.import_module("speedlab.diagnose.climb")
BUCKETS = "batches of similar length"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A slow machine, or a busy thread that an earlier test left, is no reason to give a loader up."""
    monkeypatch.setattr(counting, "PATIENCE", 600.0)


@pytest.fixture(scope="module", autouse=True)
def one_process():
    """A process group of one, for what communicates."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", patients.ILLS)
def test_a_patient_is_diagnosed_by_counters_alone(name):
    advice = advise(counts(getattr(patients, name)(), breaks=False), DEVICE, patients.MEMORY)
    first = next((found.technique for found in advice if found.helps), None)
    assert first == patients.ILLS[name], [found for found in advice if found.helps]
    assert sum(not found.helps for found in advice) >= 3, "what does not help is said too"


def test_counts_repeat():
    job = patients.padding()
    torch.manual_seed(0)
    first = counts(job, breaks=False)
    torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2)
    torch.manual_seed(0)
    assert counts(job, breaks=False) == first


def test_counting_16_bits_needs_no_hardware_for_them(monkeypatch):
    """Where bf16 is slow its products are computed in fp32: the counts stay, and so do compilations."""
    expected = counts(patients.healthy(), breaks=False)
    monkeypatch.setattr(machine, "is_fast", lambda dtype: dtype == "fp32")
    assert counts(patients.healthy(), breaks=False) == expected
    assert counts(patients.recompiling(), breaks=False).recompiled > 0


def test_a_fault_is_told_before_what_saves_more_time():
    told = advise(counts(replace(patients.optimizer_bound(), step=patients.leak().step), breaks=False), DEVICE)
    assert [a.technique for a in told[:2]] == ["stop keeping what a step made", "a fused optimizer"]


def test_counts_of_a_linear_layer_are_its_formulas():
    """12 wide, 5 wide, 7 rows: 2·7·12·5 FLOPs forward, and again for the gradient of the weight."""
    job = Job(
        lambda: nn.Linear(12, 5),
        lambda n: torch.randn(n, 12),
        lambda model, x: model(x).sum(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, fused=True),
        batch_size=7,
    )
    found = counts(job, breaks=False)
    assert found.flops == 2 * (2 * 7 * 12 * 5)
    product = next(o for o in found.operations if o.name == "addmm")
    assert product.bytes == 4 * (5 + 7 * 12 + 12 * 5 + 7 * 5)
    # weights and gradients are read, weights are written
    assert found.by("phase")["optimizer"] == (1, 0, 3 * 4 * 65)
    assert (found.parameters, found.gradients, found.optimizer) == (4 * 65, 4 * 65, 0)
    assert (found.syncs, found.left_behind, found.padded, found.repeated) == ({}, 0, 0.0, {})


def stepped(make_optimizer) -> int:
    """Bytes of an optimizer's operations, of a linear layer with 65 parameters."""
    job = linear(make_model=lambda: nn.Linear(12, 5), make_batch=lambda n: torch.randn(n, 12))
    return counts(replace(job, make_optimizer=make_optimizer), breaks=False).by("phase")["optimizer"][2]


@pytest.mark.parametrize(
    ("make_optimizer", "passes", "more"),
    [
        # p += -lr g reads both and writes one
        (lambda m: torch.optim.SGD(m.parameters(), foreach=False), 3, 0),
        (lambda m: torch.optim.SGD(m.parameters(), foreach=True), 3, 0),
        # v *= 0.9 (2), v += g (3), p -= lr v (3)
        (lambda m: torch.optim.SGD(m.parameters(), momentum=0.9, foreach=False), 8, 0),
        (lambda m: torch.optim.SGD(m.parameters(), momentum=0.9, foreach=True), 8, 0),
        (lambda m: torch.optim.SGD(m.parameters(), momentum=0.9, fused=True), 5, 0),
        # reads p, g and two moments, writes p and both; two step counters are raised, and read by the fused kernel
        (lambda m: torch.optim.AdamW(m.parameters(), fused=True), 7, 2 * 3 * 4),
    ],
)
def test_what_optimizers_write_in_place_is_traffic(make_optimizer, passes, more):
    assert stepped(make_optimizer) == passes * 4 * 65 + more


@pytest.mark.parametrize(
    "look_up",
    [
        lambda table, rows: F.embedding(rows, table),
        lambda table, rows: table[rows],
        lambda table, rows: table.index_select(0, rows),
        lambda table, rows: table.gather(0, rows[:, None].expand(-1, 7)),
    ],
)
def test_of_a_table_only_the_rows_that_are_asked_for_are_read(look_up):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(1000, 7))

        def forward(self, rows):
            return look_up(self.table, rows)

    job = Job(Table, lambda n: torch.arange(n), lambda model, rows: model(rows).sum(), sgd)
    names = ("embedding", "index", "index_select", "gather")
    found = [o for o in counts(job, breaks=False).operations if o.name in names]
    # eight rows of seven fp32 are read and written, and eight indices read
    assert [(o.bytes, o.fixed) for o in found] == [(2 * 4 * 8 * 7 + 8 * 8, 0)]
    again = replace(job, make_batch=lambda n: torch.arange(n).repeat(500))
    found = [o for o in counts(again, breaks=False).operations if o.name in names]
    assert [o.fixed for o in found] == [4 * 1000 * 7], "no more than the table, whatever the batch"


def test_what_is_only_overwritten_is_not_read():
    def step(model, optimizer, x):
        model(x).sum().backward()
        with torch.no_grad():
            x.zero_()
            x.copy_(torch.ones(8, 4))
        return model(x).sum()

    found = counts(linear(step=step), breaks=False).by("name")
    assert found["zero_"][2] == 4 * 32 and found["copy_"][2] == 2 * 4 * 32


def tokens(n: int) -> dict:
    return {"input_ids": torch.randint(5, 90, (n, 12)), "attention_mask": torch.ones(n, 12, dtype=torch.long)}


def labelled(n: int) -> dict:
    batch = tokens(n)
    return {**batch, "labels": batch["input_ids"]}


def vision(make, pixels: int = 32) -> Job:
    return Job(
        make,
        lambda n: (torch.randn(n, 3, pixels, pixels), torch.randint(0, 10, (n,))),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        batch_size=2,
    )


def language(make, batch=labelled) -> Job:
    adam = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)  # noqa: E731
    return Job(make, batch, lambda model, given: model(**given).loss, adam, batch_size=4)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(50, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 50)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0])


class Graph(nn.Module):
    """Two rounds of messages along edges (2, E) between nodes (N, 8)."""

    def __init__(self):
        super().__init__()
        self.rounds = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 3)])

    def forward(self, x, edges):
        for layer in self.rounds:
            sent = layer(x)
            x = torch.zeros_like(sent).index_add_(0, edges[1], sent[edges[0]]).relu()
        return x


SMALL = dict(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
T5 = dict(vocab_size=100, d_model=32, d_ff=64, num_layers=2, num_heads=2, d_kv=16, decoder_start_token_id=0)
WHISPER = dict(
    vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=32,
    dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip


def detector() -> Job:
    make = lambda: torchvision.models.detection.ssdlite320_mobilenet_v3_large(  # noqa: E731
        weights=None, weights_backbone=None, num_classes=3
    )
    box = {"boxes": torch.tensor([[5.0, 5.0, 60.0, 60.0]]), "labels": torch.tensor([1])}
    return Job(
        make,
        lambda n: ([torch.rand(3, 64, 64) for _ in range(n)], [copy.deepcopy(box) for _ in range(n)]),
        lambda model, batch: sum(model(*batch).values()),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        batch_size=2,
    )


def gpt2() -> nn.Module:
    tokens = dict(vocab_size=100, bos_token_id=1, eos_token_id=2)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, loss_type="ForCausalLM", **tokens)
    return transformers.GPT2LMHeadModel(config)


def recurrent() -> Job:
    return Job(
        Recurrent,
        lambda n: torch.randint(0, 50, (n, 20)),
        lambda model, ids: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()),
        lambda model: torch.optim.AdamW(model.parameters()),
    )


MODELS = torchvision.models
STAGES = [MODELS.convnext.CNBlockConfig(16, 32, 2), MODELS.convnext.CNBlockConfig(32, None, 2)]
FOREIGN = {
    "resnet": lambda: vision(lambda: MODELS.ResNet(MODELS.resnet.Bottleneck, [2, 1, 1, 1], num_classes=10)),
    "convnext": lambda: vision(lambda: MODELS.ConvNeXt(STAGES, num_classes=10)),
    "swin": lambda: vision(lambda: MODELS.SwinTransformer([4, 4], 24, [2, 2], [2, 2], [4, 4], num_classes=10)),
    "vit": lambda: vision(lambda: MODELS.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10)),
    "detector": detector,
    "bert": lambda: language(
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL)),
        lambda n: {**tokens(n), "labels": torch.randint(0, 2, (n,))},
    ),
    "gpt2": lambda: language(gpt2),
    "llama": lambda: language(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))),
    "t5": lambda: language(lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))),
    "whisper": lambda: Job(
        lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER)).model.encoder,
        lambda n: torch.randn(n, 16, 64),
        lambda model, sound: model(sound).last_hidden_state.pow(2).mean(),
        lambda model: torch.optim.AdamW(model.parameters()),
        batch_size=2,
    ),
    "lstm": recurrent,
    "graph": lambda: Job(
        Graph,
        lambda n: (torch.randn(n, 8), torch.randint(0, n, (2, 4 * n))),
        lambda model, batch: model(*batch).pow(2).mean(),
        lambda model: torch.optim.Adam(model.parameters()),
        batch_size=30,
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_models_that_others_wrote(name):
    """FLOPs are those of PyTorch's own counter; the report names the regime and something about every technique."""
    job = FOREIGN[name]()
    found = counts(job, breaks=name in ("bert", "lstm", "graph"))
    model, optimizer = job.built()
    batch = job.batch()
    assert found.flops == count.flops(lambda: job.train(model, optimizer, batch))
    assert found.peak >= found.parameters + found.gradients + found.optimizer
    assert found.left_behind == 0
    assert len(advise(found, DEVICE)) == len(RULES)
    whole = estimate(found, DEVICE)
    assert whole.total == pytest.approx(sum(whole.by_phase.values()))


def eager_bert(attention: str = "eager", length: int = 12) -> Job:
    """A BERT that writes its attention out, on texts that have half of `length` at least; one is padded."""
    config = transformers.BertConfig(**SMALL, attn_implementation=attention, attention_probs_dropout_prob=0.0)

    def batch(n: int) -> dict:
        lengths = torch.linspace(6, length - 1, n).long()[:, None]
        mask = (torch.arange(length) < lengths).long()
        return {"input_ids": torch.randint(5, 90, mask.shape), "attention_mask": mask, "labels": torch.arange(n) % 2}

    return language(lambda: transformers.BertForSequenceClassification(config), batch)


def one_call() -> Job:
    """The slow script with all heads in one call."""
    job = first_project.build()
    words = len(job.loader.dataset.vocabulary) + 2
    return replace(job, make_model=lambda: first_project.Classifier(words, second_version.OneCall))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Chosen(nn.Module):
    """What comes first of an operation's tensors is a mask."""

    def forward(self, x):
        return torch.where(x > 0, x, -x)


class Sharded(nn.Module):
    def forward(self, x):
        return dist_nn.all_reduce(x)


def chain(part=nn.GELU) -> Job:
    """One product, and a long chain of small operations on what it gives."""
    model = lambda: nn.Sequential(nn.Linear(64, 64), *(part() for _ in range(10)))  # noqa: E731
    return Job(model, lambda n: torch.randn(n, 64), lambda m, x: m(x).square().mean(), sgd, batch_size=256)


def larger(job: Job) -> Job:
    return replace(job, batch_size=4 * job.batch_size)


WRITTEN, FUSED = (functools.partial(techniques.Classifier, fused=fused) for fused in (False, True))
APPLIED = {
    "padding": [
        ("batches of similar length", techniques.slow(make_model=model, batch_size=size),
         techniques.slow(make_model=model, batch_size=size, make_batch=techniques.similar))
        for model in (WRITTEN, FUSED) for size in (16, 64)
    ] + [("batches of similar length", eager_bert(length=256), eager_bert(length=131))],
    "attention": [
        ("scaled_dot_product_attention", techniques.slow(), techniques.slow(make_model=FUSED)),
        ("scaled_dot_product_attention", eager_bert(), eager_bert("sdpa")),
        ("scaled_dot_product_attention", first_project.build(), one_call()),
    ],
    "batch": [
        ("a larger batch", job, larger(job))
        for job in (patients.optimizer_bound(), patients.healthy(), techniques.slow(), language(gpt2), recurrent())
    ],
    "half": [
        ("bf16 autocast", job, replace(job, loss_fn=torch.autocast("cpu", torch.bfloat16)(job.loss_fn)))
        for job in (chain(), chain(Chosen), chain(Sharded), eager_bert(), techniques.slow(), patients.compute_bound())
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", APPLIED)
def test_a_technique_saves_no_more_than_its_rule_says(kind):
    """Recounted with the technique in place, per sample, on two devices, with bytes from memory and for nothing."""
    other = Device("another", 5e-6, 5e10, {"fp32": 2e12, "bf16": 8e12})
    devices = [d for one in (DEVICE, other) for d in (one, replace(one, bandwidth=float("inf")))]
    for technique, slow, mended in APPLIED[kind]:
        rule = next(rule for rule in RULES if rule.technique == technique)
        before, after = counts(slow, breaks=False), counts(mended, breaks=False)
        for device in devices:
            left = estimate(after, device).total * slow.batch_size / mended.batch_size
            saved, most = estimate(before, device).total - left, (rule.most or rule.saves)(before, device)
            assert saved <= most + 1e-12, (technique, device, saved, most)


@pytest.mark.parametrize(("layer", "shape"), [(nn.Conv1d, (64,)), (nn.Conv2d, (64, 64)), (nn.Conv3d, (8, 8, 8))])
def test_channels_last_is_for_images(layer, shape):
    job = Job(lambda: layer(4, 4, 3), lambda n: torch.randn(n, 4, *shape), lambda m, x: m(x).square().mean(), sgd)
    slow = replace(DEVICE, bandwidth=1e6)
    advised = {advice.technique: advice.may for advice in diagnose(job, slow).advice}
    assert advised["channels last"] == (layer is nn.Conv2d)


def test_what_is_channels_last_already_is_not_advised_it():
    images = lambda n: torch.randn(n, 4, 64, 64)  # noqa: E731
    job = Job(lambda: nn.Conv2d(4, 4, 3), images, lambda m, x: m(x).square().mean(), sgd)
    slow = replace(DEVICE, bandwidth=1e6)
    may = lambda job: {a.technique: a.may for a in diagnose(job, slow).advice}["channels last"]  # noqa: E731
    assert may(job) and not may(RUNGS["channels last"][0](job))


def test_an_operation_of_ones_own_may_be_called_like_one_of_pytorchs():
    for name in ("convolution", "emptying"):

        @torch.library.custom_op(f"of_ones_own::{name}", mutates_args=())
        def own(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        found = counts(linear(loss_fn=lambda model, x, own=own: model(own(x)).square().mean()), breaks=False)
        assert name in found.by("name")


def test_on_an_nvidia_gpu_tf32_is_a_technique_and_convolutions_have_it_already():
    gpu = replace(DEVICE, flops={"fp32": 1e12, "tf32": 4e12, "bf16": 8e12}, launch=0.0, bandwidth=float("inf"))
    linear, convolution = nn.Linear(64, 64), nn.Conv2d(3, 8, 3)

    def job(layer: nn.Module, *shape: int) -> Job:
        batch = lambda n: torch.randn(n, *shape)  # noqa: E731
        make = lambda: copy.deepcopy(layer)  # noqa: E731
        return Job(make, batch, lambda m, b: m(b).sum(), lambda m: torch.optim.SGD(m.parameters(), 0.1))

    products, images = (counts(job(*given), breaks=False) for given in ((linear, 64), (convolution, 3, 8, 8)))
    tf32 = lambda found, device: next(a for a in advise(found, device) if a.technique == "TF32 products")  # noqa: E731
    assert tf32(products, gpu).at_most == pytest.approx((4, 4)) and tf32(products, gpu).helps
    assert tf32(products, DEVICE).at_most == (1, 1), "other devices have no such rate"
    rounded = replace(gpu, tf32_convolutions=True)
    cell = counting.Operation("_cudnn_rnn", "fp32", "forward", "", 10**9, 0)
    assert rounded.seconds(cell) == gpu.seconds(cell) / 4
    assert tf32(images, gpu).at_most == pytest.approx((4, 4)) and tf32(images, rounded).at_most == (1, 1)
    assert estimate(images, rounded).total == pytest.approx(estimate(images, gpu).total / 4)
    assert estimate(products, rounded).total == estimate(products, gpu).total


@pytest.mark.parametrize(("waiting", "already"), [(False, True), (True, False)])
def test_what_backward_starts_without_waiting_overlaps_already(waiting, already):
    def model():
        made, works = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), []
        for p in made.parameters():
            p.register_post_accumulate_grad_hook(
                lambda p: works.append(dist.all_reduce(p.grad, async_op=not waiting))
            )
        return made

    job = linear(make_model=model, make_batch=lambda n: torch.randn(n, 64))
    found = counts(job, breaks=False)
    assert sum(o.collective for o in found.operations) == 4
    advice = next(a for a in advise(found, replace(DEVICE, link=1e6)) if a.technique.startswith("overlap"))
    assert (advice.at_most == (1, 1)) == already


@pytest.mark.parametrize("flag", ["none", "ieee", "tf32"])
def test_tf32_is_measured_whichever_flag_a_script_has_set(flag, monkeypatch):
    """After torch's newer flags, its older functions raise."""
    matmul, seen = torch.backends.cuda.matmul, []
    measured = SimpleNamespace(__wrapped__=lambda dtype: seen.append(matmul.fp32_precision) or 1.0)
    monkeypatch.setattr(machine, "peak_flops", measured)
    before, matmul.fp32_precision = matmul.fp32_precision, flag
    try:
        assert tf32_flops() == 1.0
        assert seen == ["tf32"] and matmul.fp32_precision == flag
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("flag", ["", "ieee"])
def test_a_proof_turns_tf32_off_whichever_flag_a_script_has_set(flag):
    cudnn, seen = torch.backends.cudnn, lambda: (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
    usual = cudnn.conv.fp32_precision
    cudnn.conv.fp32_precision = flag or usual
    try:
        before = seen()
        with climbing.strict():
            assert "tf32" not in seen()
            if not flag:
                assert cudnn.allow_tf32 is False, "what a model reads in its own loss does not raise"
        assert seen() == before and "tf32" in before
    finally:
        cudnn.conv.fp32_precision = usual


def test_beside_a_gpu_an_optimizers_own_counters_are_neither_launches_nor_waits():
    model, batch = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch).sum().backward()
    optimizer.step()  # makes the optimizer's state

    def names(on_gpu: bool) -> collections.Counter:
        watch = counting._Watch(model, optimizer, batch)
        watch.on_gpu = on_gpu
        model(batch).sum().backward()
        with watch:
            optimizer.step()
            torch.zeros(()).item()
        reads = watch.syncs.total()
        return collections.Counter(o.name for o in watch.operations) + collections.Counter(waits=reads)

    here, there = names(on_gpu=False), names(on_gpu=True)
    assert here.pop("_local_scalar_dense") > 1 and here.pop("waits") == 1
    assert here == there


def test_on_a_gpu_an_optimizer_that_reads_a_result_waits_for_it():
    model = nn.Linear(4, 4)
    watch = counting._Watch(model, sgd(model), torch.randn(2, 4))
    waits = []
    for watch.on_gpu in (False, True):
        watch.stepping = 1
        watch.sync()
        waits.append(watch.syncs.total())
    assert waits == [0, 1]


def test_backward_belongs_to_the_module_of_its_forward():
    """A product of two activations has two gradients, and they count where it does."""
    products: dict[str, list[str]] = {}
    for o in counts(eager_bert(), breaks=False).operations:
        products.setdefault(o.module, []).extend([o.phase] * (o.name == "bmm"))
    found = {module: (ran.count("forward"), ran.count("backward")) for module, ran in products.items() if ran}
    assert found == {f"bert.encoder.layer.{i}.attention.self": (2, 4) for i in range(SMALL["num_hidden_layers"])}


def test_what_does_not_fit_without_its_activations_needs_a_smaller_state():
    """AdamW's state alone is over the limit: nothing that is saved for backward could be given up for it."""
    found = counts(patients.optimizer_bound(), breaks=False)
    told = advise(found, DEVICE, memory=(found.parameters + found.gradients + found.optimizer) // 2)
    faults = [a.technique for a in told if a.helps and "fused" not in a.technique]
    assert faults[0] == "a smaller state (LoRA, FSDP, an 8-bit optimizer)"
    assert "checkpointing, or micro-batches" not in faults


def test_what_does_not_fit_for_the_gradients_of_its_activations_needs_micro_batches():
    """They are not saved for backward, and yet smaller batches make them smaller."""
    make = lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))  # noqa: E731
    job = Job(make, lambda n: torch.randn(n, 64), lambda m, x: m(x).square().mean(), sgd, batch_size=8192)
    found = counts(job, breaks=False)
    told = {a.technique: a.helps for a in advise(found, DEVICE, memory=found.peak - found.saved - 1)}
    assert told["checkpointing, or micro-batches"]
    assert not told["a smaller state (LoRA, FSDP, an 8-bit optimizer)"]


def test_a_fused_optimizer_is_bounded_by_the_parameters_that_train():
    def job(frozen: bool) -> Job:
        def make() -> nn.Module:
            model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), *[nn.Linear(512, 512) for _ in range(2 * frozen)])
            model[2:].requires_grad_(False)
            return model

        trained = lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad])  # noqa: E731
        return Job(make, lambda n: torch.randn(n, 512), lambda m, x: m(x).square().mean(), trained, batch_size=4)

    plain, beside = (rules._optimizer(counts(job(frozen), breaks=False), DEVICE) for frozen in (False, True))
    assert beside == pytest.approx(plain)


def test_waits_are_named_by_the_line_that_makes_them():
    assert any("transform.py" in line for line in counts(detector(), breaks=False).syncs)
    found = counts(patients.host_waits(), breaks=False).syncs
    assert sum(found.values()) == 9 and all("patients.py" in line for line in found)


def test_graph_breaks_are_named():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) * self.layer(x).sum().item()

    job = Job(Broken, lambda n: torch.randn(n, 4), lambda model, x: model(x).sum(), sgd)
    found = counts(job)
    assert len(found.graph_breaks) == 1 and "test_diagnose.py" in next(iter(found.graph_breaks))
    assert found.repeated == {"Linear": 1}, "a layer that is called twice with the same input"


def linear(**changed) -> Job:
    given = dict(
        make_model=lambda: nn.Linear(4, 2),
        make_batch=lambda n: torch.randn(n, 4),
        loss_fn=lambda model, x: model(x).pow(2).mean(),
        make_optimizer=sgd,
    )
    return Job(**{**given, **changed})


def endless():
    yield torch.ones(1)
    time.sleep(1000)


SPARSE = dict(make_model=lambda: nn.Embedding(9, 4, sparse=True), make_batch=lambda n: torch.randint(0, 9, (n,)))


def each_alone(model, x):
    weights = dict(model.named_parameters())
    alone = lambda row: torch.func.functional_call(model, weights, (row,)).pow(2).mean()  # noqa: E731
    return torch.func.vmap(alone)(x).mean()


def test_a_loss_under_vmap_is_counted_and_proved():
    plain, job = linear(), linear(loss_fn=each_alone)
    assert counts(job, breaks=False).flops == counts(plain, breaks=False).flops
    assert apart(plain, job) == float("inf") and apart(job, RUNGS["a fused optimizer"][0](job)) < 1e-5


def test_a_step_may_return_a_number_and_has_to_return_the_loss():
    def step(model, optimizer, x, number=float):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return number(loss.item())

    assert trains(linear(step=step))
    with pytest.raises(DiagnoseError, match="returned a NoneType; it must return the loss"):
        trains(linear(step=lambda *given: step(*given, number=lambda loss: None)))


SHARED, CRITERION = nn.Linear(4, 4), nn.Linear(2, 1)


def test_weights_of_the_callers_are_not_trained():
    """A backbone in a new wrapper each time, and a criterion beside the model."""
    before = copy.deepcopy([SHARED.state_dict(), CRITERION.state_dict()])
    with pytest.raises(DiagnoseError, match="the same weights twice"):
        diagnose(linear(make_model=lambda: nn.Sequential(SHARED, nn.Linear(4, 2))), DEVICE)
    both = lambda model: torch.optim.SGD([*model.parameters(), *CRITERION.parameters()], lr=0.1)  # noqa: E731
    with pytest.raises(DiagnoseError, match="holds 2 parameters that are not the model's"):
        diagnose(linear(make_optimizer=both, loss_fn=lambda model, x: CRITERION(model(x)).mean()), DEVICE)
    for old, new in zip(before, (SHARED, CRITERION), strict=True):
        assert all(torch.equal(old[name], value) for name, value in new.state_dict().items())


def perturbed(model, optimizer, x):
    """Sharpness-aware: the second forward pass is on other weights, which `.data` changes without a trace."""
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    for p in model.parameters():
        p.data.add_(p.grad)
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


def test_weights_that_are_changed_past_autograd_are_other_weights():
    assert counts(linear(step=perturbed), breaks=False).repeated == {}
    switched = lambda model, x: (model.eval()(x) - model.train()(x)).pow(2).mean()  # noqa: E731
    assert counts(linear(loss_fn=switched), breaks=False).repeated == {}, "another mode, another call"


class Taught(nn.Module):
    """A student, and a teacher that follows it: outside of the optimizer, and never with a gradient."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x) - wanted


def test_a_teacher_without_gradients_has_no_unused_ones():
    student = lambda model: torch.optim.SGD(model.student.parameters(), lr=0.1)  # noqa: E731
    assert counts(linear(make_model=Taught, make_optimizer=student), breaks=False).unused_gradients == 0
    used = lambda model, x: (model(x) + model.teacher(x)).pow(2).mean()  # noqa: E731
    found = counts(linear(make_model=Taught, make_optimizer=student, loss_fn=used), breaks=False)
    assert found.unused_gradients == 4 * (4 * 2 + 2)


def test_the_second_optimizer_of_a_step_is_one_and_a_closure_is_none():
    def step(model, optimizer, x):
        loss = (model.student(x) + model.teacher(x)).pow(2).mean()
        loss.backward()
        optimizer.step()
        torch.optim.AdamW(model.teacher.parameters(), lr=0.1).step()
        return loss

    student = lambda model: torch.optim.SGD(model.student.parameters(), lr=0.1, fused=True)  # noqa: E731
    found = counts(linear(make_model=Taught, make_optimizer=student, step=step), breaks=False)
    assert found.unused_gradients == 0 and found.syncs == {}
    assert found.by("phase")["optimizer"][0] > 2, "AdamW's own operations too"
    done = itertools.count()

    def now_and_then(model, optimizer, x):
        loss = (model.student(x) + model.teacher(x)).pow(2).mean()
        loss.backward()
        optimizer.step()
        if next(done) % 2:
            torch.optim.SGD(model.teacher.parameters(), lr=0.1).step()
        return loss

    found = counts(linear(make_model=Taught, make_optimizer=student, step=now_and_then), breaks=False)
    assert found.unused_gradients == 0

    def closing(model, optimizer, x):
        def closure():
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    phases = counts(linear(step=closing), breaks=False).by("phase")
    plain = counts(linear(), breaks=False).by("phase")
    assert phases["backward"] == plain["backward"] and "forward" in phases


@pytest.mark.parametrize(("every", "first"), [(2, 0), (2, 1), (3, 0), (3, 1), (5, 0), (5, 2), (5, 4), (100, 0)])
@pytest.mark.parametrize("detached", [True, False])
def test_gradients_that_each_step_computes_and_drops_are_found(every, first, detached):
    """A generator that trains now and then: without a detach, all other steps compute its gradients for nothing.

    They are dropped when it trains; if that is in the first watched step, they may still be used later.
    """
    done = itertools.count(first)

    def step(model, critics, x):
        made = model.teacher(x)
        critics.zero_grad()
        loss = (model.student(x) - model.student(F.pad(made.detach() if detached else made, (0, 2)))).pow(2).mean()
        loss.backward()
        critics.step()
        if next(done) % every == 0:
            makers = torch.optim.SGD(model.teacher.parameters(), lr=0.1)
            makers.zero_grad()
            model.student(F.pad(model.teacher(x), (0, 2))).pow(2).mean().backward()
            makers.step()
        return loss

    critics = lambda model: torch.optim.SGD(model.student.parameters(), lr=0.1)  # noqa: E731
    found = counts(linear(make_model=Taught, make_optimizer=critics, step=step), breaks=False)
    assert found.unused_gradients == (0 if detached else 4 * (4 * 2 + 2))


@pytest.mark.parametrize("kind", ["alternating", "new storage", "skipped", "skipped by hand", "by hand"])
def test_gradients_that_are_used_in_a_later_step_or_by_the_users_own_update_are_not_unused(kind):
    done, scaler = itertools.count(1), torch.amp.GradScaler("cpu", init_scale=2.0**100)
    late = []

    def step(model, optimizer, x):
        number = next(done)
        if kind in ("skipped", "skipped by hand", "by hand"):
            optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        (scaler.scale(loss.float()) if kind == "skipped" else loss).backward()
        if kind == "alternating" and number % 4 == 0:
            for each in (optimizer, *late):
                each.step(), each.zero_grad()
        if kind == "new storage" and number % 2 == 0:
            for p in model.parameters():
                p.grad = p.grad / 2
            optimizer.step(), optimizer.zero_grad()
        if kind == "skipped":
            scaler.step(optimizer), scaler.update()
        if kind == "skipped by hand" and torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) < 0:
            optimizer.step()
        if kind == "by hand":
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        return loss

    def optimizers(model):
        late[:] = [torch.optim.Adam([model.bias])] if kind == "alternating" else []
        return torch.optim.SGD([model.weight] if kind in ("alternating", "by hand") else model.parameters(), lr=0.1)

    assert counts(linear(step=step, make_optimizer=optimizers), breaks=False).unused_gradients == 0


@pytest.mark.parametrize("clips", [True, False])
def test_an_unfrozen_average_of_the_weights_gets_gradients_that_nobody_uses(clips):
    idle = []

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = (model.student(x) - model.teacher(x)).pow(2).mean()
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                kept.lerp_(new, 0.1)
        return loss

    def students(model):
        idle[:] = [torch.optim.SGD(model.teacher.parameters(), lr=0.1)]  # it never steps
        return torch.optim.SGD(model.student.parameters(), lr=0.1)

    found = counts(linear(make_model=Taught, make_optimizer=students, step=step), breaks=False)
    assert found.unused_gradients == 4 * (4 * 2 + 2)


class Gated(nn.Module):
    """A softmax that gates two products after it, as in a mixture of experts: no attention."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x):
        gate = self.gate(x).softmax(-1)
        hidden = torch.bmm(torch.bmm(x.expand(3, *x.shape), self.experts).relu(), self.experts)
        return (gate.T[..., None] * hidden).sum(0)


def test_a_softmax_before_both_products_is_no_attention():
    assert advised(Gated, "scaled_dot_product_attention").at_most == (1, 1)


class Decoder(nn.Module):
    """Additive attention, three times: a product comes before each softmax but the first, of another shape."""

    def __init__(self):
        super().__init__()
        self.key, self.score = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):  # (B, 7, 4)
        state = x.mean(1, keepdim=True)
        for _ in range(3):
            weights = self.score(torch.tanh(self.key(x) + state)).mT.softmax(-1)
            state = torch.bmm(weights, x)
        return state


def test_a_softmax_of_other_shape_than_the_product_before_it_is_no_attention():
    batch = dict(make_batch=lambda n: torch.randn(n, 7, 4))
    assert advised(Decoder, "scaled_dot_product_attention", **batch).at_most == (1, 1)


def advised(model, technique: str, **changed):
    found = advise(counts(linear(make_model=model, **changed), breaks=False), DEVICE)
    return next(a for a in found if a.technique == technique)


def test_rows_of_numbers_that_no_table_reads_have_no_padding():
    """Targets of a CTC loss are padded, and the model never sees them."""
    batch = lambda n: (torch.randn(n, 4), texts(torch.linspace(1, 8, n).long(), 16)["input_ids"])  # noqa: E731
    loss = lambda model, batch: model(batch[0]).pow(2).mean() + 0 * batch[1].sum()  # noqa: E731
    assert counts(linear(make_batch=batch, loss_fn=loss), breaks=False).padded == 0
    assert counts(unmasked(batch_size=16), breaks=False).padded > 0.5


def test_a_view_of_the_batch_is_no_constant_and_a_metric_kept_is_no_leak():
    images = torch.randint(0, 255, (64, 4), dtype=torch.uint8)
    cast = lambda model, x: model(x.view(-1, 4).to(torch.float32)).mean()  # noqa: E731
    assert counts(linear(make_batch=lambda n: images[:n], loss_fn=cast), breaks=False).moved_again == {}
    kept = []
    assert left_by(lambda model, loss, x: kept.append(loss.detach())) == 0
    assert left_by(lambda model, loss, x: kept.append(loss)) > 0, "with its graph"
    solved = lambda model, x: model(x.requires_grad_()).pow(2).mean()  # noqa: E731
    assert counts(linear(loss_fn=solved), breaks=False).left_behind == 0, "the gradient of the batch"


def test_one_hot_of_a_known_number_of_classes_waits_for_nothing():
    def loss(classes, model, x):
        return (model(x) * F.one_hot((x[:, 0] > 0).long(), classes)).mean()

    assert counts(linear(loss_fn=functools.partial(loss, 2)), breaks=False).syncs == {}
    assert counts(linear(loss_fn=functools.partial(loss, -1)), breaks=False).syncs


def test_an_optimizer_without_a_fused_version_is_not_advised_one():
    told = advised(
        lambda: nn.Linear(4, 2), "a fused optimizer", make_optimizer=lambda m: torch.optim.RAdam(m.parameters())
    )
    assert told.at_most == (1, 1) and "no fused version" in told.evidence
    groups = lambda m: torch.optim.AdamW([{"params": [p]} for p in m.parameters()], fused=True)  # noqa: E731
    told = advised(lambda: nn.Linear(4, 2), "a fused optimizer", make_optimizer=groups)
    assert told.at_most == (1, 1) and "fused already" in told.evidence
    complex_ = lambda: nn.Linear(4, 2, dtype=torch.complex64)  # noqa: E731
    spectral = dict(make_batch=lambda n: torch.randn(n, 4, dtype=torch.complex64),
                    loss_fn=lambda model, x: model(x).abs().mean())  # fmt: skip
    assert advised(complex_, "a fused optimizer", **spectral).at_most == (1, 1)
    job = linear(make_model=complex_, **spectral)
    halved = replace(job, loss_fn=lambda model, x: (model(x).real ** 2).mean().sqrt())
    assert apart(job, halved) > 0.01, "imaginary parts are compared too"


class Annealed(nn.Module):
    """A block whose plain number changes in each forward pass."""

    def __init__(self):
        super().__init__()
        self.layer, self.rate = nn.Linear(4, 4), 1.0

    def forward(self, x):
        self.rate *= 0.7
        return self.layer(x) * self.rate


class OwnNoise(nn.Linear):
    """A block that drops by a generator of its own in training mode."""

    def __init__(self):
        super().__init__(4, 4)
        self.drawn = [torch.Generator().manual_seed(1)]

    def forward(self, x):
        mask = torch.rand(x.shape, generator=self.drawn[0]) > 0.5 if self.training else 1.0
        return super().forward(x).relu() * mask


class Shown(nn.Linear):
    """A block that keeps its last output to look at: a second forward writes the same."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("table", torch.full((4,), float("-inf")))

    def forward(self, x):
        self.last = super().forward(x)
        return self.last.relu()


def test_a_checkpoint_may_write_again_what_is_only_looked_at():
    job = linear(make_model=lambda: nn.Sequential(Shown(), Shown()))
    changed = RUNGS["checkpointing, or micro-batches"][0](job)
    assert isinstance(changed, Job) and apart(job, changed) < 1e-6


@pytest.mark.parametrize(("block", "why"), [(Annealed, "changes its state"), (OwnNoise, "generator of its own")])
def test_a_checkpoint_is_refused_where_the_second_forward_differs(block, why):
    job = linear(make_model=lambda: nn.Sequential(block(), block()))
    assert why in RUNGS["checkpointing, or micro-batches"][0](job)


def test_what_goes_on_where_a_text_ends_is_not_cut_nor_batch_norms_padding():
    longer = lambda n: {**texts(torch.full((n,), 5)), "labels": texts(torch.full((n,), 9))["input_ids"]}  # noqa: E731
    assert "longer than the texts" in RUNGS[BUCKETS][0](reading(longer))
    placed = lambda n: {**texts(torch.full((n,), 5)), "position_ids": torch.arange(WIDE).expand(n, WIDE)}  # noqa: E731
    assert isinstance(RUNGS[BUCKETS][0](reading(placed)), Job)
    summed = lambda n: (b := texts(torch.linspace(1, 9, n).long())) | {  # noqa: E731
        "position_ids": (b["attention_mask"].cumsum(1) - 1).masked_fill(b["attention_mask"] == 0, 1)}  # fmt: skip
    assert isinstance(RUNGS[BUCKETS][0](reading(summed)), Job)

    class Normed(Reader):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDE)

    assert "padding into its statistics" in RUNGS[BUCKETS][0](reading(make_model=Normed))


def test_workers_that_draw_the_same_are_refused(monkeypatch):
    class Noisy(torch.utils.data.Dataset):
        def __init__(self):
            self.drawn = np.random.default_rng(0)

        def __len__(self):
            return 64

        def __getitem__(self, i):
            return torch.tensor(self.drawn.random(4), dtype=torch.float32)

    monkeypatch.setattr(machine, "cores", lambda: 3)
    assert "draw the same" in RUNGS["load in other processes"][0](linear(loader=DataLoader(Noisy(), batch_size=8)))


def test_what_takes_one_size_only_is_timed_without_the_other():
    def loss(model, x):
        if len(x) != 8:
            raise ValueError("a mask for 8")
        return model(x).pow(2).mean()

    timings = climbing.probe(linear(loss_fn=loss), seconds=0.2)
    assert timings.not_run == {"twice the batch": "the step takes no other batch"}


def test_a_schedule_that_ends_begins_again():
    taken = []  # the optimizers themselves: an id is given again once its object is gone

    def step(model, optimizer, x):
        taken.append(optimizer)
        if sum(earlier is optimizer for earlier in taken) > 3:
            raise ValueError("Tried to step 4 times")
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    train = climbing.steady(job := linear(step=step), [*job.built()])
    assert all(train(job.batch()) is not None for _ in range(9))
    fails = climbing.steady(broken := linear(step=lambda *given: 1 / 0), [*broken.built()])
    with pytest.raises(DiagnoseError, match="ZeroDivisionError"):
        fails(job.batch())


def test_a_tokenizers_batch_keeps_its_attributes():
    batch = transformers.BatchEncoding({"input_ids": torch.ones(2, 3, dtype=torch.long), "told": "text"})
    twice = mapped(lambda part: part * 2, batch)
    assert (twice.input_ids == 2).all() and twice.told == "text" and (batch.input_ids == 1).all()


def test_a_loader_of_the_main_thread_or_of_other_sizes(monkeypatch):
    class Here(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("objects created in a thread can only be used in that same thread")
            return torch.randn(4)

    assert counts(linear(loader=DataLoader(Here(), batch_size=8)), breaks=False).calls_per_batch > 0
    with pytest.raises(DiagnoseError, match="batches have 32 samples, and make_batch gave 8"):
        counts(linear(loader=DataLoader(torch.randn(64, 4), batch_size=32)), breaks=False)


class Corrupt(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        raise ValueError("corrupt image 5")


def test_a_loader_of_batches_of_many_sizes_or_of_texts():
    places = [range(0, 3), range(3, 11), range(11, 16), range(16, 24)]
    loader = DataLoader(torch.randn(64, 4), batch_sampler=places)
    assert counts(linear(loader=loader), breaks=False).calls_per_batch > 0
    whole = DataLoader(torch.randn(8, 4), batch_size=8)
    words = DataLoader(["text"] * 64, batch_size=8)
    assert all(isinstance(RUNGS["load in other processes"][0](linear(loader=one)), Job) for one in (whole, words))


def test_operations_that_look_at_values_wait():
    waits = [lambda x: torch.bincount(x[:, 0].long().abs()), lambda x: torch.allclose(x, x),
             lambda x: x.repeat_interleave(torch.ones(len(x), dtype=torch.long), 0)]  # fmt: skip
    for wait in waits:
        loss = lambda model, x, wait=wait: (wait(x), model(x).mean())[1]  # noqa: E731
        assert sum(counts(linear(loss_fn=loss), breaks=False).syncs.values()) == 1
    known = lambda model, x: model(x.repeat_interleave(torch.ones(8, dtype=torch.long), 0, output_size=8)).mean()  # noqa: E731
    assert counts(linear(loss_fn=known), breaks=False).syncs == {}


def test_a_workers_error_is_told_in_a_line():
    loader = DataLoader(Corrupt(), batch_size=8, num_workers=1)
    with pytest.raises(DiagnoseError) as caught:
        counts(linear(loader=loader), breaks=False)
    assert str(caught.value) == "The loader gave no two batches: ValueError: corrupt image 5."


def test_a_climb_on_weights_of_16_bits_forgives_their_rounding(monkeypatch):
    tolerances = []
    monkeypatch.setattr(climbing, "_try", lambda name, job, before, tolerance, *rest: (
        tolerances.append(tolerance) or (job, before, climbing.Rung(name, False, "tried"))))  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        made = lambda dtype=dtype: nn.Linear(4, 2, dtype=dtype)  # noqa: E731
        climb(linear(make_model=made, make_batch=lambda n, d=dtype: torch.randn(n, 4, dtype=d)), DEVICE, seconds=0.0)
    assert tolerances[0] < 0.01 < tolerances[-1]


def test_a_model_whose_train_returns_nothing_is_a_model():
    class Frozen(nn.Linear):
        def train(self, mode=True):
            super().train(mode)

    assert counts(linear(make_model=lambda: Frozen(4, 2))).flops > 0


def test_what_the_clock_says_of_the_loader_comes_first():
    found = diagnose(linear(), DEVICE)
    late = Ratio(9.0, 8.0, 10.0, 0.95)
    probes = Comparison(("with your loader", climbing.HELD), "with your loader", {}, {climbing.HELD: late}, {})
    assert "waits most for the data pipeline" in replace(found, probes=probes).sentence()
    same = replace(probes, ratios={climbing.HELD: Ratio(1.1, 0.9, 1.2, 0.95), climbing.SAME: late})
    assert "data pipeline" not in replace(found, probes=same).sentence()


def test_the_loader_is_timed_against_batches_as_large_as_its_own():
    widths = []
    job = Job(
        lambda: nn.Embedding(9, 4),
        lambda n: torch.randint(0, 9, (n, 3)),
        lambda model, ids: widths.append(ids.shape[1]) or model(ids).square().mean(),
        sgd,
        loader=[torch.randint(0, 9, (8, 50 + 2 * i)) for i in range(4)],
    )
    timings = climbing.probe(job, seconds=0.1).timings
    assert list(timings)[:3] == ["with your loader", climbing.HELD, climbing.SAME]
    texts = [width for width in widths if width > 3]
    assert set(texts) == {50, 52, 54, 56} and len(set(texts[-8:])) == 4


def test_where_nothing_is_sure_to_help_what_may_is_not_denied():
    found = diagnose(linear(), DEVICE)
    advice = tuple(replace(a, helps=False, may=False) for a in found.advice)
    assert "would help it by a tenth" in replace(found, advice=advice).sentence()
    assert "marked ? may" in replace(found, advice=(*advice[:-1], replace(advice[-1], may=True))).sentence()


def by_the_clock(same: float, twice: float) -> Comparison:
    seconds = {"the same batch again": same, "twice the batch": twice}
    timings = {name: Timing(each, each, each, (each,) * 6) for name, each in seconds.items()}
    return Comparison(tuple(seconds), "the same batch again", timings, {}, {})


def test_a_step_whose_time_is_in_no_operation_is_told_so():
    def asleep(model, batch):
        time.sleep(0.05)
        return model(batch).square().mean()

    assert climbing.outside(linear(loss_fn=asleep)) >= 0.04
    found = diagnose(linear(), DEVICE)
    assert found.outside == 0, "without seconds no clock is read"
    for outside, told in ((0.4, False), (0.6, True)):
        said = replace(found, probes=by_the_clock(1.0, 1.1), outside=outside).sentence()
        assert ("0.6 s of this step's 1 s are in no operation of PyTorch" in said) == told


def test_a_larger_batch_is_not_the_first_advice_where_it_takes_as_much_longer():
    found = diagnose(linear(batch_size=1), DEVICE)
    assert found.helps[0] == "a larger batch"
    assert "First: a larger batch." in replace(found, probes=by_the_clock(1.0, 1.1)).sentence()
    slow = replace(found, probes=by_the_clock(1.0, 2.0)).sentence()
    assert "First: a larger batch." not in slow and "twice the batch takes 2.0 times as long" in slow


def test_a_trainers_optimizer_is_made_without_its_folder(tmp_path):
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "run"), push_to_hub=False, use_cpu=True)
    job = from_transformers(transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)), arguments, labelled(2))
    _, optimizer = job.built()
    assert isinstance(optimizer, torch.optim.AdamW) and len(optimizer.param_groups) == 2
    assert list(tmp_path.iterdir()) == []


def test_no_worker_is_advised_where_there_are_some():
    """What a worker does is not seen in the training process, and could not be moved out of it."""
    loader = DataLoader(torch.randn(64, 4), batch_size=8, num_workers=1)
    told = []
    for given in ({}, {"loader": loader}):
        advice = advise(counts(linear(**given), breaks=False), DEVICE)
        told += [a for a in advice if a.technique == "load in other processes"]
    assert not any(a.helps or a.may for a in told)
    assert [a.evidence for a in told] == ["no loader was given", "no Python calls in this process"]


FIXED, MINE = torch.randn(8, 4), nn.Linear(4, 2)


def test_a_batch_that_cannot_grow_is_not_called_larger():
    assert "make_batch(16) has 8 rows, not twice 8" in RUNGS["a larger batch"][0](linear(make_batch=lambda n: FIXED))
    prepared = linear(make_batch=lambda n: ["text"] * n, prepare=lambda batch: torch.randn(len(batch), 4))
    assert isinstance(RUNGS["a larger batch"][0](prepared), Job), "only a prepared batch has to hold tensors"


def test_a_checkpoint_is_refused_where_a_second_forward_would_train_twice():
    normal = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))  # noqa: E731
    spectral = lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU())  # noqa: E731
    stateless = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))  # noqa: E731
    for block, name in ((normal, "BatchNorm1d"), (spectral, "SpectralNorm"), (stateless, "")):
        job = linear(make_model=lambda block=block: nn.Sequential(block(), block(), block()))
        changed = RUNGS["checkpointing, or micro-batches"][0](job)
        assert f"would run {name} twice" in changed if name else isinstance(changed, Job)


def test_another_optimizer_is_found_by_its_second_step():
    with_momentum = linear(make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert apart(with_momentum, linear()) > 0.1
    adam = lambda **given: linear(make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, **given))  # noqa: E731
    assert apart(adam(), adam(betas=(0.1, 0.2))) > 0.1 > apart(adam(), adam(fused=True))


def test_a_loader_of_a_class_of_its_own_gets_no_workers():
    class Scaled(DataLoader):
        def __iter__(self):
            return (3 * batch for batch in super().__iter__())

    job = linear(loader=Scaled(torch.randn(32, 4), batch_size=8))
    assert "no plain DataLoader" in RUNGS["load in other processes"][0](job)


def test_a_loader_that_ends_or_breaks_gets_a_sentence(monkeypatch):
    class Corrupt(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            if index == 48:
                raise ValueError("image 48 is corrupt")
            return torch.randn(4)

    rows = DataLoader(torch.randn(48, 4), batch_size=8)
    for loader, sentence in ((iter(rows), "does not begin again"), (DataLoader(Corrupt(), 8), "image 48 is corrupt")):
        with pytest.raises(DiagnoseError, match=sentence):
            climbing.probe(linear(loader=loader), seconds=2)
    assert counts(linear(loader=[FIXED]), breaks=False).calls_per_batch is not None, "one batch is an epoch"


def test_the_arguments_of_transformers_are_those_of_the_diagnosis(tmp_path):
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL))
    batch = {"input_ids": tokens(4)["input_ids"], "labels": torch.tensor([0, 1, 0, 1])}

    def found(**given):
        return counts(
            from_transformers(model, transformers.TrainingArguments(tmp_path, use_cpu=True, **given), batch)
        )

    plain, half, again = found(), found(bf16=True), found(gradient_checkpointing=True)
    assert plain.by("dtype").keys().isdisjoint(["bf16"]) and half.by("dtype")["bf16"][1] > half.by("dtype")["fp32"][1]
    assert again.saved < plain.saved / 2 and again.flops > plain.flops


def left_by(also):
    """A plain step that does something besides."""

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        also(model, loss, x)
        return loss

    return counts(linear(step=step), breaks=False).left_behind


def test_state_that_each_step_replaces_is_no_leak_and_a_buffer_that_grows_is_one():
    average, log, last, kept = {}, {}, collections.deque(maxlen=2), []
    assert (
        left_by(lambda model, loss, x: average.update(all=0.9 * average.get("all", 0) + model.weight.detach())) == 0
    )
    assert left_by(lambda model, loss, x: log.update(loss=loss.detach())) == 0
    assert left_by(lambda model, loss, x: last.append(x * 2)) == 0
    assert left_by(lambda model, loss, x: kept.append(x * 2)) == 4 * 8 * 4
    queue = collections.deque(maxlen=100)
    assert left_by(lambda model, loss, x: queue.append({"features": x * 2})) == 0, "it lets go, but later"
    replay = type("Replay", (collections.deque,), {})(maxlen=100)
    assert left_by(lambda model, loss, x: replay.append((x * 2, 1.0))) == 0
    endless = collections.deque()
    assert left_by(lambda model, loss, x: endless.append(x * 2)) == 4 * 8 * 4

    class Bank(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.register_buffer("bank", torch.zeros(0, 2))

        def forward(self, x):
            out = super().forward(x)
            self.bank = torch.cat([self.bank, out.detach()])
            return out

    assert counts(linear(make_model=Bank), breaks=False).left_behind == 4 * 8 * 2


def test_calls_that_differ_in_a_flag_or_in_noise_are_not_the_same_again():
    class Two(nn.Linear):
        def forward(self, x, doubled: bool = False):
            return super().forward(x) * (2 if doubled else 1)

    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x))

    both = lambda model, x: (model(x) - model(x, True)).pow(2).mean()  # noqa: E731
    again = lambda model, x: (model(x) + model(x)).pow(2).mean()  # noqa: E731
    assert counts(linear(make_model=lambda: Two(4, 2), loss_fn=both), breaks=False).repeated == {}
    assert counts(linear(make_model=lambda: Noisy(4, 2), loss_fn=again), breaks=False).repeated == {}
    assert counts(linear(loss_fn=again), breaks=False).repeated == {"Linear": 1}
    flags = lambda model, x: (model(x, doubled=False) - model(x)).pow(2).mean()  # noqa: E731
    assert counts(linear(make_model=lambda: Two(4, 2), loss_fn=flags), breaks=False).repeated == {}
    layer = lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)  # noqa: E731
    job = linear(make_model=layer, make_batch=lambda n: torch.randn(n, 3, 4), loss_fn=again)
    assert counts(job, breaks=False).repeated, "attention without dropout draws nothing"


def test_calls_that_differ_in_an_adapter_a_nested_choice_or_a_memory_are_not_the_same_again():
    class Adapted(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.active, self.memory = ["first"], None

        def forward(self, x, options=None, remember=False):
            out = super().forward(x) * (2 if self.active == ["other"] or (options or {}).get("doubled") else 1)
            if remember:
                out = out if self.memory is None else out + self.memory
                self.memory = out.detach()
            return out

    def loss(switch, first, second, model, x):
        model.active, model.memory = ["first"], None
        out = model(x, **first)
        model.active = [switch]
        return (out - 3 * model(x, **second)).pow(2).mean()

    def repeated(switch="first", first=None, second=None):
        job = linear(make_model=Adapted, loss_fn=functools.partial(loss, switch, first or {}, second or {}))
        return counts(job, breaks=False).repeated

    assert repeated() == {"Adapted": 1}
    assert repeated("other") == {}
    assert repeated(first={"options": {"doubled": True}}, second={"options": {"doubled": False}}) == {}
    assert repeated(first={"options": {"doubled": True}}, second={"options": {"doubled": True}}) == {"Adapted": 1}
    assert repeated(first={"remember": True}, second={"remember": True}) == {}


@dataclass
class Moment:
    seen: torch.Tensor
    reward: float = 0.0


def test_what_is_left_only_once_a_few_numbers_and_a_bounded_replay_are_no_leak():
    done, made, log, replay = itertools.count(1), [], [], collections.deque(maxlen=100)
    fifth = lambda model, loss, x: made.append(x * 2) if next(done) == 5 else None  # noqa: E731
    assert left_by(fifth) == 0, "state that is first made in the step we look at"
    assert left_by(lambda model, loss, x: log.append(torch.stack([loss, loss, loss]).detach())) == 0
    assert left_by(lambda model, loss, x: log.append(torch.stack([loss, loss, loss]))) > 0, "with their graph"
    assert left_by(lambda model, loss, x: replay.append(Moment(x * 2))) == 0
    assert left_by(lambda model, loss, x: log.extend(x[:, 0].detach() + i for i in range(4))) == 4 * 8 * 4, "many"


def test_odd_objects_that_live_elsewhere_stop_no_count():
    class Lazy(dict):
        def values(self):
            raise KeyError("not now")

    alone = SimpleNamespace(around=None, lazy=Lazy(a=1))
    alone.around = {"me": alone.__dict__}
    proxy = weakref.proxy(gone := Moment(torch.ones(1)))
    broken = [sgd(nn.Linear(1, 1)) for _ in range(3)]
    broken[0].param_groups, broken[1].param_groups = None, [{"lr": 1}]
    del broken[2].__dict__["param_groups"], gone
    queue, kept = collections.deque([alone, proxy], maxlen=5), []
    assert left_by(lambda model, loss, x: kept.append(x * 2)) == 4 * 8 * 4
    assert len(queue) == 2 and len(broken) == 3


def test_positions_that_grow_once_for_a_longer_text_are_no_leak():
    class Positions(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls in (1, 6):
                self.register_buffer("table", torch.randn(100 * self.calls, 2))
            return super().forward(x) + self.table[0]

    assert counts(linear(make_model=lambda: Positions(4, 2)), breaks=False).left_behind == 0


def test_a_kept_view_whose_base_is_changed_in_place_is_counted_without_an_error():
    last, log = {}, []

    def make():
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
        model[0].register_forward_hook(torch.no_grad()(lambda module, given, out: last.update(seen=out[:2])))
        return model

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        log.append(loss.detach())
        return loss

    assert counts(linear(make_model=make, step=step), breaks=False).left_behind == 0


@pytest.mark.parametrize("kept", [tuple, list, collections.deque, lambda pair: dict(enumerate(pair))])
def test_a_cell_that_keeps_its_state_in_a_container_is_not_called_twice_alike(kept):
    class Thinking(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.state = nn.LSTMCell(4, 2), None

        def forward(self, x):
            before = None if self.state is None else tuple(self.state[i] for i in range(2))
            self.state = kept(self.cell(x, before))
            return self.state[0]

    def loss_fn(model, x):
        model.state = None
        return sum(model(x) for _ in range(3)).pow(2).mean()

    assert counts(linear(make_model=Thinking, loss_fn=loss_fn), breaks=False).repeated == {}


@pytest.mark.parametrize("kept", ["last", "log", "itself"])
def test_what_a_module_only_writes_down_hides_no_repetition(kept):
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.last, self.log = nn.Parameter(torch.randn(4, 2)), None, []
            if kept == "itself":
                self.log.append(self.log)

        def forward(self, x):
            out = (x - 0.5) @ self.weight
            if kept == "last":
                self.last = out
            if kept == "log":
                self.log.append(out.detach())
            return out

    twice = lambda model, x: (model(x) - 2 * model(x)).pow(2).mean()  # noqa: E731
    assert counts(linear(make_model=Writing, loss_fn=twice), breaks=False).repeated == {"Writing": 1}


def test_a_transposed_input_and_autocast_make_another_call():
    square = functools.partial(linear, make_model=lambda: nn.Linear(4, 4), make_batch=lambda n: torch.randn(4, 4))
    turned = lambda model, x: (model(x) - 2 * model(x.T)).pow(2).mean()  # noqa: E731
    assert counts(square(loss_fn=turned), breaks=False).repeated == {}

    def checked(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            half = model(x)
        return (model(x) - 2 * half).pow(2).mean()

    assert counts(square(loss_fn=checked), breaks=False).repeated == {}


@pytest.mark.parametrize("switched", [True, False])
def test_a_reference_with_adapters_switched_off_is_not_the_same_again(switched):
    class Adapted(nn.Linear):
        off = False

        def forward(self, x):
            return super().forward(x) * (1 if self.off else 2)

    def preference(model, x):
        model[0].off = False
        chosen = model(x)
        model[0].off = switched
        with torch.no_grad():
            reference = model(x)
        return (chosen - reference).pow(2).mean()

    job = linear(make_model=lambda: nn.Sequential(Adapted(4, 2)), loss_fn=preference)
    found = counts(job, breaks=False).repeated
    assert found == ({} if switched else {"Sequential": 1, "Adapted": 1})


def test_a_model_that_draws_what_it_does_not_save_is_proved_and_a_loss_may_rise():
    class Features(nn.Linear):
        def __init__(self):
            super().__init__(16, 2)
            self.frequencies = torch.randn(4, 16)

        def forward(self, x):
            return super().forward(torch.cos(nn.functional.dropout(input=x @ self.frequencies, p=0.1)))

    job = linear(make_model=Features)
    assert apart(job, RUNGS["a fused optimizer"][0](job)) < 1e-5
    augmented = linear(prepare=lambda batch: batch + torch.randn_like(batch))
    assert apart(augmented, augmented) == 0
    rising = linear(make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, maximize=True))
    assert not trains(rising)
    _, tried = climb(rising, DEVICE, seconds=1, told=lambda line: None)
    assert not any("does not fall" in rung.why for rung in tried)


def test_what_a_proof_draws_is_not_missed():
    before = torch.get_rng_state(), random.getstate()
    apart(linear(), linear())
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_labels_of_ones_and_zeros_are_no_padding_and_added_masks_no_tokens():
    hot = lambda n: (torch.randn(n, 4), F.one_hot(torch.arange(n) % 5, 20))  # noqa: E731
    job = linear(make_batch=hot, loss_fn=lambda model, b: model(b[0]).pow(2).mean() + 0 * b[1].float().mean())
    assert counts(job, breaks=False).padded == 0
    added = lambda n: {"x": torch.randn(n, 4), "attention_mask": torch.full((n, 4), -1e9).triu(1)}  # noqa: E731
    job = linear(make_batch=added, loss_fn=lambda model, b: model(b["x"]).pow(2).mean())
    assert counts(job, breaks=False).padded == 0


def test_a_step_in_micro_batches_holds_what_its_peak_has_room_for():
    def step(model, optimizer, x):
        optimizer.zero_grad()
        for part in x.chunk(8):
            loss = model(part).pow(2).mean() / 8
            loss.backward()
        optimizer.step()
        return loss

    deep = lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])  # noqa: E731
    whole = linear(make_model=deep, make_batch=lambda n: torch.randn(n, 8), batch_size=512)
    found = counts(replace(whole, step=step), breaks=False)
    state = found.parameters + found.optimizer
    assert state + found.saved == found.peak < counts(whole, breaks=False).saved
    told = {a.technique: a for a in advise(found, DEVICE, memory=state // 2)}
    assert told["a smaller state (LoRA, FSDP, an 8-bit optimizer)"].helps


def test_only_blocks_of_few_kinds_are_compiled_each(monkeypatch):
    """Dynamo keeps eight versions of compiled modules in all, and runs the others in eager mode."""
    monkeypatch.setattr(compat, "compiler", lambda kind=None: "g++")
    compiled = lambda module: module._compiled_call_impl is not None  # noqa: E731
    pair = lambda width: nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))  # noqa: E731
    for widths, each in (((3, 3, 3, 3), True), ((3, 4, 5, 6), False)):
        job = linear(make_model=lambda widths=widths: nn.Sequential(*map(pair, widths)))
        model = RUNGS["torch.compile"][0](job).make_model()
        assert ([compiled(block) for block in model], compiled(model)) == ([each] * 4, not each)


def test_a_build_may_import_from_its_folder_when_the_model_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_layers.py").write_text("from torch import nn\nmake = lambda: nn.Linear(4, 2)\n")
    (tmp_path / "my_training.py").write_text(
        "import torch\nfrom speedlab.diagnose import Job\n\n\ndef make_model():\n    import my_layers\n\n"
        "    return my_layers.make()\n\n\ndef build():\n    return Job(make_model, lambda n: torch.randn(n, 4),"
        " lambda m, x: m(x).mean(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1))\n"
    )
    assert counts(load(f"{tmp_path / 'my_training.py'}:build"), breaks=False).flops > 0


def test_a_report_without_a_folder_is_refused_before_anything_is_measured(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["nothing.py:build", "--out", str(tmp_path / "nowhere" / "report.html")])
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--out", "."], "is a folder"), (["--steps", "-5"], "1 or more"), (["--minutes", "-1"], "0 or more")],
)
def test_options_that_cannot_be_meant_are_refused_before_anything_is_measured(options, words, capsys):
    with pytest.raises(SystemExit):
        main(["nothing.py:build", *options])
    assert words in capsys.readouterr().err


def test_products_in_inference_mode_count_as_elsewhere():
    teacher = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def job(mode) -> Job:
        def loss(model, x):
            with mode():
                answer = teacher(x)
            return (model(x) - answer.clone()).square().mean()

        return linear(loss_fn=loss)

    with torch.inference_mode():
        made_there, rows = copy.deepcopy(teacher), torch.randn(8, 4)

    def on_what_was_made_there(model, x):
        with torch.no_grad():
            answer = made_there(rows)
        return (model(x) - answer.clone()).square().mean()

    one, other = (counts(job(mode), breaks=False) for mode in (torch.no_grad, torch.inference_mode))
    assert one.by("name") == other.by("name") and one.flops > 0
    assert counts(linear(loss_fn=on_what_was_made_there), breaks=False).flops == one.flops


def test_a_file_that_is_called_like_a_module_hides_none(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # load adds the file's folder
    (tmp_path / "random.py").write_text("def build():\n    return 3\n", encoding="utf-8")
    with pytest.raises(DiagnoseError, match="must return a Job"):
        load(f"{tmp_path / 'random.py'}:build")
    assert sys.modules["random"] is random
    (tmp_path / "mine_broken.py").write_text("def build():\n    return 3\n", encoding="utf-8")
    with pytest.raises(DiagnoseError):
        load(f"{tmp_path / 'mine_broken.py'}:build")
    assert "mine_broken" not in sys.modules


def test_twice_the_batch_is_timed_only_where_it_is_twice():
    batch = torch.randn(8, 4)
    timings = climbing.probe(linear(make_batch=lambda n: batch), seconds=0.1)
    assert timings.not_run == {"twice the batch": "make_batch gives no batch of twice the size"}


def test_a_result_that_is_not_finite_is_still_json():
    found = replace(diagnose(linear(), DEVICE), rungs=(climbing.Rung("bf16 autocast", False, "no", float("inf")),))
    refuse = lambda constant: pytest.fail(constant)  # noqa: E731
    assert json.loads(found.json(), parse_constant=refuse)["rungs"][0]["off"] is None


Pair = collections.namedtuple("Pair", "values items")


def test_named_tuples_complex_numbers_and_numbers_of_numpy_are_batches():
    pair = linear(make_batch=lambda n: Pair(*torch.randn(2, n, 4)), loss_fn=lambda m, b: m(b.values).pow(2).mean())
    assert apart(pair, replace(pair, prepare=lambda batch: mapped(torch.clone, batch))) == 0
    cosine = linear(
        make_batch=lambda n: torch.randn(n, 4, dtype=torch.cfloat), loss_fn=lambda m, x: m(x.abs()).mean()
    )
    scalar = linear(make_batch=lambda n: {"x": torch.randn(n, 4), "w": np.array(3.0)},
                    loss_fn=lambda m, b: m(b["x"]).mean())  # fmt: skip
    assert counts(cosine, breaks=False).flops == counts(scalar, breaks=False).flops > 0


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (dict(make_batch=lambda n: torch.randn(n, 5)), "Does the model take this batch"),
        (dict(loss_fn=lambda model, x: model(x).detach().mean()), "no gradient"),
        (dict(loss_fn=lambda model, x: model(x)), "one number"),
        (dict(loss_fn=lambda model, x: 3.0), "one number, not float"),
        (dict(make_model=lambda width: nn.Linear(width, 2)), "make_model() raised TypeError"),
        (dict(make_model=lambda: 3), "must return an nn.Module"),
        (dict(make_batch=lambda: 0), "make_batch(8) raised TypeError"),
        (dict(loader=[]), "gave no two batches"),
        (SPARSE, "sparse"),
        (dict(make_model=lambda: MINE), "the same weights twice"),
        (
            dict(make_optimizer=lambda model: (sgd(model), sgd(model))),
            "returned a tuple; it must return one optimizer",
        ),
        (dict(make_model=lambda: torch.jit.script(nn.Linear(4, 2))), "Counting a step raised RuntimeError"),
        (dict(make_batch=lambda n: [1.0] * n, loss_fn=lambda model, _: model(torch.ones(4)).sum()), "or dictionary"),
    ],
)
def test_bad_input_gets_a_sentence(changed, sentence):
    with pytest.raises(DiagnoseError) as said:
        counts(linear(**changed))
    assert sentence in str(said.value)


def test_a_loader_that_hangs_is_left_behind(monkeypatch):
    monkeypatch.setattr(counting, "PATIENCE", 0.3)
    with pytest.raises(DiagnoseError, match=r"within 0\.3 s: it is at line \d+ of test_diagnose\.py, in endless"):
        counts(linear(loader=endless()))


def test_running_out_of_memory_gets_a_sentence():
    def greedy(model, x):
        raise torch.OutOfMemoryError("a tensor of 1 TB")

    with pytest.raises(DiagnoseError, match="smaller batch_size"):
        counts(linear(loss_fn=greedy))


def test_everything_ends_as_it_began():
    """The model given, its optimizer's state, all random states and the thread count, also after an error."""
    model, data = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2)), torch.randn(64, 4)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, index):
            return {"loss": self.net(batch[0]).pow(2).mean()}

        def configure_optimizers(self):
            return [torch.optim.AdamW(self.parameters())], []

    module = Module()
    before = copy.deepcopy(module.state_dict())
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    job = from_lightning(module, DataLoader(TensorDataset(data), batch_size=8))
    diagnose(job, DEVICE, seconds=0)
    climb(job, DEVICE, seconds=3, told=lambda line: None)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), module.state_dict().values(), strict=True))
    assert all(p.grad is None for p in module.parameters()) and module.training
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all() and states[2] == random.getstate()


def test_a_lightning_step_that_logs_is_not_told_that_it_has_no_trainer(recwarn):
    import lightning

    class Logging(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 2)

        def training_step(self, batch, index):
            self.log("loss", loss := self.net(batch[0]).pow(2).mean())
            return loss

        def configure_optimizers(self):
            return sgd(self)

    found = counts(
        from_lightning(Logging(), DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)), breaks=False
    )
    assert found.parameters == 4 * (4 * 2 + 2)
    assert not [warning for warning in recwarn if "self.log" in str(warning.message)]


def test_a_hugging_face_model_with_its_arguments(tmp_path):
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL))
    arguments = transformers.TrainingArguments(tmp_path, per_device_train_batch_size=3, use_cpu=True)
    batch = {**tokens(2), "labels": torch.tensor([0, 1])}
    found = counts(from_transformers(model, arguments, batch), breaks=False)
    assert found.batch_size == 3 and found.optimizer > 0


def test_batch_and_model_are_on_the_device_of_the_arguments(tmp_path, monkeypatch):
    """On a GPU the Trainer would move the model, and leave the batch."""
    arguments = transformers.TrainingArguments(tmp_path, use_cpu=True)
    monkeypatch.setattr(type(arguments), "device", torch.device("meta"))
    job = from_transformers(transformers.BertModel(transformers.BertConfig(**SMALL)), arguments, tokens(2))
    assert {t.device.type for t in (*job.make_model().parameters(), *job.batch().values())} == {"meta"}


@pytest.mark.parametrize("place", ["training_step", "configure_optimizers"])
def test_a_module_that_asks_for_its_trainer_gets_a_sentence(place):
    import lightning

    class Attached(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch, index):
            return self.layer(batch).sum() * (self.trainer.max_epochs if place == "training_step" else 1)

        def configure_optimizers(self):
            steps = self.trainer.estimated_stepping_batches if place == "configure_optimizers" else 1
            return torch.optim.SGD(self.parameters(), lr=1 / steps)

    with pytest.raises(DiagnoseError, match="asks for its Trainer, and a diagnosis has none"):
        counts(from_lightning(Attached(), [torch.ones(2, 4)]), breaks=False)


ELSEWHERE = ("torch.compile", "bf16 autocast", "batches of similar length")


@pytest.mark.parametrize("name", [name for name in RUNGS if name not in ELSEWHERE])
def test_a_rung_computes_the_same(name):
    """Each change leaves the gradients as they are, on a model of several blocks."""
    layers = lambda: nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)])  # noqa: E731
    convolution = lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(1), nn.Linear(8 * 36, 2))  # noqa: E731
    image = name == "channels last"
    job = Job(
        convolution if image else layers,
        lambda n: torch.randn(n, 3, 8, 8) if image else torch.randn(n, 16),
        lambda model, x: model(x).pow(2).mean(),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        loader=None if name == "a larger batch" else DataLoader(torch.randn(64, 16), batch_size=8),
    )
    changed = RUNGS[name][0](job)
    assert isinstance(changed, Job)
    if name != "a larger batch":
        assert apart(job, changed) < 1e-5
    assert trains(changed)


@pytest.mark.parametrize("name", FOREIGN)
def test_changes_to_models_that_others_wrote_are_proved(name):
    """Whatever applies without a compiler or special hardware computes the same, and the model still trains."""
    job = FOREIGN[name]()
    found = {rung: change(job) for rung, (change, _) in RUNGS.items() if rung not in ELSEWHERE}
    changed = {rung: made for rung, made in found.items() if isinstance(made, Job)}
    assert "a fused optimizer" in changed
    assert ("checkpointing, or micro-batches" in changed) == (name not in ("lstm", "resnet", "detector"))
    for rung, made in changed.items():
        assert apart(job, made) < 1e-3, rung
        assert trains(made), rung


class Variational(nn.Module):
    """An autoencoder that draws noise in forward, in training and in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(20, 16), nn.Linear(8, 20)

    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, dim=1)
        return self.decode(mean + torch.randn_like(mean) * spread)


@pytest.mark.parametrize("name", ["a fused optimizer", "bf16 autocast", "torch.compile"])
def test_a_loss_that_draws_noise_is_proved_on_the_same_noise(monkeypatch, name):
    monkeypatch.setattr(machine, "is_fast", lambda dtype: True)
    if name == "torch.compile" and not compat.compiler():
        pytest.skip("There is no C++ compiler for torch.compile.")

    def loss(model, x):
        return F.mse_loss(model(x), x + torch.randn_like(x))

    job = Job(Variational, lambda n: torch.randn(n, 20), loss, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01))
    change, tolerance = RUNGS[name]
    changed = change(job)
    assert apart(job, changed) < tolerance and trains(changed)


class Reader(nn.Module):
    """The sum of an MLP over real tokens; its FLOPs are those of as many linear layers as there are columns."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 128)
        self.body = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2))

    def forward(self, input_ids, attention_mask=None):
        return self.body(self.embed(input_ids))


WIDE = 64


def texts(lengths: torch.Tensor, width: int = WIDE) -> dict:
    """Random tokens (B, width) with a mask of these lengths, and a label for each real token."""
    mask = (torch.arange(width) < lengths[:, None]).long()
    ids = torch.randint(1, 100, mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": (ids % 2).masked_fill(mask == 0, -100)}


def reading(make_batch=lambda n: texts(torch.linspace(1, 16, n).long()), **changed) -> Job:
    """A token classifier whose every batch is padded to 64; its texts have 1 to 16 tokens."""

    def loss(model, batch):
        return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    return Job(**{**dict(make_model=Reader, make_batch=make_batch, loss_fn=loss, make_optimizer=sgd), **changed})


def only_bucketing(monkeypatch, job: Job) -> tuple[Job, counting.Counts, climbing.Rung]:
    """A climb of this rung alone that keeps whatever is proved; with the counts from before."""
    monkeypatch.setattr(climbing, "RUNGS", {BUCKETS: RUNGS[BUCKETS]})
    always = Comparison(("a", BUCKETS), "a", {}, {BUCKETS: Ratio(2.0, 1.9, 2.1, 0.95)}, {})
    monkeypatch.setattr(climbing, "timed", lambda *given: always)
    before = counts(job, breaks=False)
    assert BUCKETS in [a.technique for a in advise(before, DEVICE) if a.helps], "it is proposed"
    higher, tried = climb(job, DEVICE, told=lambda line: None)
    assert [rung.technique for rung in tried] == [BUCKETS]
    return higher, before, tried[0]


def tokens_of(n: int) -> tuple:
    batch = texts(torch.linspace(1, 16, n).long())
    return batch["input_ids"], batch["labels"]


def unmasked(**changed) -> Job:
    """The same without a mask, in a tuple."""

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return reading(tokens_of, loss_fn=loss, **changed)


@pytest.mark.parametrize("job", [reading(batch_size=16), unmasked(batch_size=16)], ids=["mask", "ids"])
def test_padding_is_cut_and_texts_of_similar_length_share_a_batch(monkeypatch, job):
    """Of 128 texts of 1 to 16 tokens, eight batches are 2, 4 .. 16 wide, 9 on average: one of 10 is taken."""
    higher, before, rung = only_bucketing(monkeypatch, job)
    assert rung.kept and rung.off < 1e-5
    assert rung.flops * WIDE == before.flops * 10 and rung.bytes < before.bytes / 3
    assert counts(higher, breaks=False).padded < 0.2 < 0.8 < before.padded


def test_with_a_loader_its_batches_are_cut_and_their_order_stays(monkeypatch):
    given = [tokens_of(8) for _ in range(5)]
    job = unmasked(loader=given)
    kept = copy.deepcopy(given)
    state = torch.get_rng_state()
    higher, before, rung = only_bucketing(monkeypatch, job)
    assert rung.kept and rung.off < 1e-5
    assert rung.flops * WIDE == before.flops * 16
    assert all(torch.equal(a[:, :16], b) for one, two in zip(given, higher.batches()) for a, b in zip(one, two))  # noqa: B905
    assert torch.equal(state, torch.get_rng_state()) and higher.loader is given
    same = [torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(flat(given), flat(kept), strict=True)]
    assert all(same), "the loader's batches are as they were"


def test_bert_that_is_padded_to_its_maximum_is_cut(monkeypatch):
    """With a mask over scores, positions and a pooled first token: nothing of that changes."""

    def batch(n: int) -> dict:
        given = texts(torch.linspace(3, 20, n).long())
        return {**given, "labels": torch.arange(n) % 2}

    _, before, rung = only_bucketing(monkeypatch, replace(eager_bert(), make_batch=batch, batch_size=16))
    assert rung.kept and rung.off < 1e-4 and rung.flops < before.flops / 3


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        (patients.healthy(), "no attention mask"),
        (reading(lambda n: texts(torch.full((n,), WIDE))), "No token of the batch is padding"),
        (reading(lambda n: texts(torch.linspace(8, WIDE, n).long()), loader=[]), "for your loader to say"),
    ],
    ids=["healthy", "full", "loader"],
)
def test_where_no_padding_can_go_bucketing_is_refused(job, sentence):
    assert sentence in RUNGS[BUCKETS][0](job)


def test_targets_that_cannot_be_cut_get_a_sentence(monkeypatch):
    def flattened(n: int) -> dict:
        batch = texts(torch.linspace(1, 16, n).long())
        return {**batch, "labels": batch["labels"].flatten()}

    *_, rung = only_bucketing(monkeypatch, reading(flattened, batch_size=16))
    assert not rung.kept and rung.why.startswith("The proof, on the changed batch") and "ValueError" in rung.why


def test_a_make_batch_that_ignores_the_size_is_only_cut(monkeypatch):
    """Sixteen texts whatever is asked for: in smaller batches a step would do less work, not less padding."""
    job = reading(lambda n: texts(torch.linspace(1, 16, 16).long()), batch_size=8)
    higher, before, rung = only_bucketing(monkeypatch, job)
    assert len(higher.batch()["input_ids"]) == 16
    assert rung.flops * WIDE == before.flops * 16


class Outspoken(Reader):
    """Returns one tensor per column, of which there are fewer without padding."""

    def forward(self, input_ids, attention_mask=None):
        return list(super().forward(input_ids).unbind(1))


def test_a_model_that_returns_another_number_of_tensors_is_refused_and_the_climb_goes_on(monkeypatch):
    def loss(model, batch):
        return F.cross_entropy(torch.stack(model(batch["input_ids"]), 1).flatten(0, 1), batch["labels"].flatten())

    job = reading(make_model=Outspoken, loss_fn=loss, batch_size=16)
    higher, _, rung = only_bucketing(monkeypatch, job)
    assert higher is job and "not the baseline's" in rung.why


def cut_too_far(real: torch.Tensor) -> slice:
    return slice(0, int(real.sum(1).max()) - 1)


def test_cutting_real_tokens_is_refused_by_the_proof(monkeypatch):
    """Before the proof: a mask that hides what the loss counts, labels of padding. By it: a column too many."""
    hiding = lambda n: {**tokens(n), "attention_mask": texts(torch.full((n,), 5), 12)["attention_mask"]}  # noqa: E731
    counted = lambda model, batch: model(batch["input_ids"]).pow(2).mean()  # noqa: E731
    for job in (reading(hiding, loss_fn=counted, batch_size=16), patients.padding()):
        higher, _, rung = only_bucketing(monkeypatch, job)
        assert higher is job and rung.off is None and "longer than the texts" in rung.why
    monkeypatch.setattr(climbing, "_columns", cut_too_far)
    higher, _, rung = only_bucketing(monkeypatch, job := reading())
    assert higher is job and rung.off > 0.01 and "not the baseline's" in rung.why


def test_autocast_is_for_the_device_that_the_step_is_on(monkeypatch):
    """On a machine with a GPU, autocast of that GPU around a step on the CPU would change nothing."""
    change, _ = RUNGS["bf16 autocast"]
    monkeypatch.setattr(machine, "is_fast", lambda dtype: True)
    monkeypatch.setattr(machine, "device", lambda: torch.device("cuda"))
    assert "The step is on the CPU" in change(linear())
    monkeypatch.setattr(machine, "device", lambda: torch.device("cpu"))
    assert apart(linear(), change(linear())) > 1e-5


def test_a_change_that_computes_something_else_is_found():
    job = linear()
    doubled = linear(loss_fn=lambda model, x: 2 * model(x).pow(2).mean())
    assert apart(job, job) == 0 and apart(job, doubled) == pytest.approx(1)
    faster = linear(make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.2))
    assert apart(job, faster) == pytest.approx(1, abs=1e-3), "equal gradients, other updates"
    wrong = linear(make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, maximize=True))
    assert trains(job) and not trains(wrong)


def test_blocks_are_the_longest_list_of_one_kind():
    assert len(blocks(MODELS.VisionTransformer(32, 8, 3, 2, 32, 64))) == 3
    assert blocks(nn.Linear(2, 2)) == []


def test_a_climb_keeps_what_is_equal_and_faster(monkeypatch):
    lines = []
    _, tried = climb(patients.optimizer_bound(), DEVICE, seconds=20, told=lines.append)
    assert tried[0].technique == "a fused optimizer" and tried[0].off < 1e-5
    assert tried[0].operations < len(counts(patients.optimizer_bound(), breaks=False).operations)
    assert lines[0] == "trying a fused optimizer"


def test_a_path_may_hold_a_colon_as_on_windows(capsys):
    assert main([r"C:\projects\my_training.py:build"]) == 1
    assert r"There is no file C:\projects\my_training.py." in capsys.readouterr().err


def test_what_a_file_defines_can_be_looked_up_by_name(tmp_path):
    """Spawned workers need it to unpickle a dataset, and Dynamo to trace a model."""
    script = tmp_path / "mine_by_name.py"
    script.write_text(
        "import torch\nfrom torch import nn\nfrom speedlab.diagnose import Job\n"
        "class Net(nn.Linear):\n    pass\n"
        "def build():\n"
        "    return Job(lambda: Net(4, 2), lambda n: torch.randn(n, 4), lambda m, x: m(x).sum(),\n"
        "               lambda m: torch.optim.SGD(m.parameters(), lr=0.1))\n",
        encoding="utf-8",
    )
    for _ in range(2):  # a file that has changed is loaded again
        model = load(f"{script}:build").make_model()
        assert torch.equal(pickle.loads(pickle.dumps(model)).weight, model.weight)


def test_the_command_line_writes_a_page_that_needs_no_network(tmp_path, capsys):
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\nfrom torch import nn\nfrom speedlab.diagnose import Job\n"
        "def build():\n"
        "    return Job(lambda: nn.Linear(4, 2), lambda n: torch.randn(n, 4), lambda m, x: m(x).pow(2).mean(),\n"
        "               lambda m: torch.optim.SGD(m.parameters(), lr=0.1))\n",
        encoding="utf-8",
    )
    page = tmp_path / "report.html"
    assert main([f"{script}:build", "--minutes", "0", "--steps", "10000", "--out", str(page)]) == 0
    said, html = capsys.readouterr().out, page.read_text(encoding="utf-8")
    assert "10,000 steps" in said and "all of them take" in said
    assert "waits most for" in said and "<h2>What helps, in order</h2>" in html
    assert "http" not in html and 'src="data:image/png;base64,' in html
    assert main([f"{tmp_path / 'none.py'}:build"]) == 1
    assert main([f"{script}"]) == 1
    assert "no function" in capsys.readouterr().err


def test_a_climb_tries_the_first_advice_however_little_time_is_left():
    _, tried = climb(patients.optimizer_bound(), DEVICE, seconds=1e-6, told=lambda line: None)
    assert [rung.technique for rung in tried] == ["a fused optimizer"]


def test_planned_steps_are_told_in_time():
    """Steps times the estimate, and of that the share that a bound leaves out."""
    report = diagnose(patients.compute_bound(), DEVICE, steps=10**6)
    rows = {row[0]: row[1] for row in report.planned().rows}
    total, (low, high) = 1e6 * report.estimate.total, report.advice[0].at_most
    assert rows["all of them take"] == f"{total / 3600:.2g} h"
    saved = f"{total * (1 - 1 / low) / 3600:.2g} h to {total * (1 - 1 / high) / 3600:.2g} h"
    assert rows["bf16 autocast saves at most"] == saved


def test_durations_are_told_in_two_digits():
    assert [duration(s) for s in (1.234, 119, 150, 7200, 1e6)] == ["1.2 s", "119 s", "2.5 min", "2 h", "278 h"]


def test_sizes_are_read():
    assert (size("16GiB"), size("800MB"), size("1e9")) == (16 * 2**30, 800_000_000, 1_000_000_000)


def test_a_contradiction_is_told_instead_of_a_diagnosis():
    from speedlab.diagnose.rules import contradiction

    found = counts(patients.compute_bound(), breaks=False)
    assert contradiction(found, DEVICE, measured=100.0) == ""
    assert "arithmetic alone needs" in contradiction(found, DEVICE, measured=1e-6)


def test_a_report_of_clocks_holds_prices_and_refusals():
    report = diagnose(patients.optimizer_bound(), DEVICE, seconds=0.3, steps=10)
    tried = (
        climbing.Rung("bf16 autocast", False, "This machine has no fast bf16."),
        climbing.Rung("x", True, "", 0.0, 7),
    )
    report = replace(report, rungs=tried)
    assert "no fast bf16" in report.text() and "saves at most" in report.html()
    assert '"operations": 7' in report.json()


def test_the_text_says_what_it_cannot_see():
    said = diagnose(linear(), DEVICE).text()
    assert "What this cannot see" in said and "On a small accelerator this step waits most for" in said


def test_what_a_checkpoint_computes_again_is_freed_block_by_block():
    class Chain(nn.Module):
        def __init__(self, blocks: int):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(blocks)
            )

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    def counted(blocks: int):
        job = Job(
            lambda: Chain(blocks),
            lambda size: torch.randn(size, 8),
            lambda model, batch: model(batch).square().mean(),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
            batch_size=4096,
        )
        return counts(job, breaks=False)

    few, many = counted(2), counted(8)
    border = 4096 * 8 * 4
    state = (many.parameters + many.gradients) - (few.parameters + few.gradients)
    # six more borders; a block's inside, 16 borders wide, is there once whatever the depth
    assert many.peak - few.peak <= 6 * 1.1 * border + state


def small_job(model=lambda: nn.Linear(8, 8), loss=lambda model, x: model(x).square().mean(), **options) -> Job:
    adam = lambda model: torch.optim.AdamW(model.parameters())  # noqa: E731
    return Job(model, lambda n: torch.randn(n, 8), loss, adam, batch_size=4, **options)


def test_a_loader_is_not_doubled_by_doubling_a_number():
    job = small_job(loader=DataLoader(torch.randn(32, 8), batch_size=4))
    assert "double its batch_size" in RUNGS["a larger batch"][0](job)


def test_workers_are_not_given_to_a_stream():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.randn(32, 8))

    job = small_job(loader=DataLoader(Stream(), batch_size=4))
    assert "each worker repeats all" in RUNGS["load in other processes"][0](job)


def test_the_loaders_generator_ends_as_it_began():
    loader = DataLoader(torch.randn(32, 8), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    before = loader.generator.get_state()
    counts(small_job(loader=loader), breaks=False)
    assert torch.equal(loader.generator.get_state(), before)


def test_what_lives_outside_the_model_is_no_leak_and_counts_in_the_peak():
    total, teacher = torch.zeros(()), nn.Linear(8, 4096).requires_grad_(False)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean() + teacher(batch).mean()
        loss.backward()
        optimizer.step()
        total.add_(loss.detach())
        return loss

    found, alone = counts(small_job(step=step), breaks=False), counts(small_job(), breaks=False)
    assert found.left_behind == 0
    assert found.peak - alone.peak >= teacher.weight.nbytes


def test_a_module_is_not_said_to_repeat_what_it_does_on_other_numbers_or_other_weights():
    def twice(model, optimizer, batch):
        for part in batch.chunk(2):  # the second part's activations take the first one's addresses
            optimizer.zero_grad()
            loss = model(part).square().mean()
            loss.backward()
            optimizer.step()
        return loss

    deep = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))  # noqa: E731
    assert counts(small_job(deep, step=twice), breaks=False).repeated == {}
    with_dropout = lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8))  # noqa: E731
    again = lambda model, x: (model(x) - model(x)).square().mean()  # noqa: E731
    assert counts(small_job(with_dropout, again), breaks=False).repeated == {}
    assert counts(small_job(deep, lambda model, x: (model(x) + model(x)).mean()), breaks=False).repeated


def test_a_boolean_mask_makes_the_host_wait():
    """Its places are looked for when it reads or writes several numbers, in backward too; not to write one number."""
    found = counts(small_job(loss=lambda model, x: model(x)[x > 0].mean()), breaks=False)
    assert sum(found.syncs.values()) == 2

    def written(value):
        def step(model, optimizer, x):
            x.clone()[x > -99] = value
            optimizer.zero_grad()
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            return loss

        return sum(counts(small_job(step=step), breaks=False).syncs.values())

    assert (written(torch.zeros(32)), written(torch.tensor(0.0))) == (1, 0)


def test_a_fused_call_whose_fallback_runs_is_not_advised_to_be_fused():
    attend = lambda model, x: F.scaled_dot_product_attention(*[model(x)[None, None]] * 3, dropout_p=0.1).mean()  # noqa: E731
    by_name = {a.technique: a for a in advise(counts(small_job(loss=attend), breaks=False), DEVICE)}
    assert not by_name["scaled_dot_product_attention"].may


@pytest.mark.skipif(not compat.compiler(), reason="there is no compiler here")
def test_what_is_compiled_is_not_advised_to_be_compiled():
    def make():
        return torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend="eager")

    [compiling] = [a for a in advise(counts(small_job(make), breaks=False), DEVICE) if a.technique == "torch.compile"]
    assert not compiling.may and "compiled already" in compiling.evidence


def test_no_larger_batch_is_advised_where_memory_ends():
    found = counts(small_job(), breaks=False)
    fits, full = ({a.technique: a.may for a in advise(found, DEVICE, limit)} for limit in (None, found.peak // 2))
    assert fits["a larger batch"] and not full["a larger batch"]


def test_a_rung_that_takes_the_peak_over_the_limit_is_not_kept(monkeypatch):
    monkeypatch.setattr(climbing, "RUNGS", {"a larger batch": (lambda job: replace(job, batch_size=4096), 1e-3)})
    job = small_job()
    limit = counts(job, breaks=False).peak + 1
    _, [rung] = climb(job, DEVICE, memory=limit, told=lambda line: None)
    assert not rung.kept and f"over the limit of {limit:,}" in rung.why


def test_every_list_of_blocks_is_changed():
    model = torchvision.models.resnet18(weights=None)
    kinds = [type(block).__name__ for block in blocks(model)]
    assert kinds == ["BasicBlock"] * 8


def test_short_lived_literals_do_not_pile_up_in_the_peak():
    def step(model, optimizer, batch):
        for _ in range(50):
            torch.tensor([1.0] * 4096)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    more = counts(small_job(step=step), breaks=False).peak - counts(small_job(), breaks=False).peak
    assert more <= 3 * 4096 * 4


def test_lists_of_lists_are_no_blocks_and_a_shared_block_is_one():
    pairs = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(3))
    assert [type(block) for block in blocks(pairs)] == [nn.Linear] * 6
    shared = nn.Linear(4, 4)
    assert blocks(nn.Sequential(shared, shared)) == [shared]


def test_transformers_checkpointing_is_proved_where_it_runs():
    job = eager_bert("sdpa")
    plain = counts(job, breaks=False).flops
    changed = RUNGS["checkpointing, or micro-batches"][0](job)
    assert counts(changed, breaks=False).flops > 1.2 * plain
    ran = []
    watched = replace(changed, loss_fn=lambda model, batch: (ran.append(sum(m.training for m in model.modules())),
                                                             job.loss_fn(model, batch))[1])  # fmt: skip
    assert apart(job, watched) < 1e-5 and ran[0] > 0
