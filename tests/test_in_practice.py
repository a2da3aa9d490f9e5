"""What stands under "In practice" in units 9.0 to 9.3, 9.5.3, 9.8.1 and the capstone, run on small models.

No cell runs it, and readers copy it. What its comments promise is tested, as far as a machine without a GPU can tell;
the snippets of the other pages are run by the tests of their units.
"""

import functools
import json
import os
import re
import warnings
from datetime import timedelta
from types import SimpleNamespace

import lightning
import pytest
import torch
import torch.distributed as dist
import torchvision
import transformers
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from notebooks import ROOT
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, parallel
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader


def practice(page: str) -> list[str]:
    """The Python snippets under In practice on a page."""
    [found] = (ROOT / "code-units").glob(page)
    cells = json.loads(found.read_text(encoding="utf-8"))["cells"]
    prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.findall(r"(?ms)^```python\n(.*?)^```$", prose.split("# In practice\n")[1])


def lines(snippet: str, start: str, count: int = 1) -> str:
    """So many lines of a snippet, from the one that begins so."""
    every = snippet.splitlines()
    [first] = [i for i, line in enumerate(every) if line.startswith(start)]
    return "\n".join(every[first : first + count])


class Small(lightning.LightningModule):
    """A linear model for rows of four numbers; notes the dtypes of its weights and logits."""

    def __init__(self, fused: bool = False):
        super().__init__()
        self.layer, self.fused, self.seen = nn.Linear(4, 3), fused, None

    def training_step(self, batch, _):
        logits = self.layer(batch[0].to(self.layer.weight.dtype))
        self.seen = self.layer.weight.dtype, logits.dtype
        return F.cross_entropy(logits.float(), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=self.fused)


class Classifier(nn.Module):
    """What transformers' Trainer asks of a model; notes the dtype of its logits."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 3), None

    def forward(self, x, labels):
        logits = self.layer(x)
        self.seen = logits.dtype
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


def bert() -> nn.Module:
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 20,
    }
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))


ROWS = [(torch.arange(4.0) * i, i % 3) for i in range(16)]
DICTS = [{"x": x, "labels": label} for x, label in ROWS]


@pytest.fixture
def calls(tmp_path):
    """Names of the snippets' classes, made to run here: on the CPU, few steps, nothing written but in a folder."""
    quiet = dict.fromkeys(("enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    quiet |= {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path}
    trainer = functools.partial(
        lightning.Trainer,
        **{"accelerator": "cpu", "devices": 1, "max_steps": 4, "default_root_dir": tmp_path, **quiet},
    )
    arguments = functools.partial(
        transformers.TrainingArguments, output_dir=str(tmp_path), report_to=[], max_steps=20
    )
    return {"torch": torch, "Trainer": trainer, "TrainingArguments": arguments}


@pytest.fixture
def world(request):
    """A process group of so many ranks that talks to nobody; this process is its first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.fixture
def alone():
    """A process group of this process alone, whose collectives wait for at most twenty minutes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(minutes=20))
    yield
    dist.destroy_process_group()


# --- 9.0 ------------------------------------------------------------------------------------------------------------


def test_the_timer_of_9_0_uses_the_threads_that_it_is_told(capsys):
    snippet = practice("9.0*/1-*")[0].replace("min_run_time=2", "min_run_time=0.02")
    exec(snippet, {"torch": torch, "train_step": lambda: torch.ones(9).sum()})
    printed = capsys.readouterr().out
    assert "train_step()" in printed
    assert torch.get_num_threads() == 1 or f"{torch.get_num_threads()} threads" in printed


def test_throughput_of_9_0_is_logged(tmp_path, calls):
    snippet = practice("9.0*/1-*")[1]
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    names = {**calls, "logger": logger, "ThroughputMonitor": ThroughputMonitor}
    trainer = eval(lines(snippet, "Trainer("), names)
    trainer.fit_loop.epoch_loop.max_steps = 120
    trainer.fit(Small(), DataLoader(ROWS, batch_size=4))
    header = next(tmp_path.rglob("metrics.csv")).read_text(encoding="utf-8").splitlines()[0]
    assert "train/device/samples_per_sec" in header


def test_tokens_of_9_0_are_counted_without_padding(calls):
    line = lines(practice("9.0*/1-*")[1], "TrainingArguments(").replace("(", "(use_cpu=True, ", 1)
    rows = [{"input_ids": [1, 2, 3, 0], "attention_mask": [1, 1, 1, 0], "labels": 0}] * 16
    trainer = transformers.Trainer(model=bert(), args=eval(line, calls), train_dataset=rows)
    trainer.train()
    told = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["num_input_tokens_seen"] for entry in told] == [10 * 8 * 3, 20 * 8 * 3]
    assert all("train_tokens_per_second" in entry for entry in told), told


def test_the_profiler_of_9_0_records_the_steps_that_it_names(tmp_path, monkeypatch, calls):
    monkeypatch.chdir(tmp_path)
    first, second = practice("9.0*/2-*")
    for snippet in (first, first.replace('"self_device_time_total"', '"self_cpu_time_total"')):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no CUDA
            exec(snippet, {"torch": torch, "train_loader": range(9), "train_step": lambda i: torch.ones(i + 1).sum()})
        events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
        steps = {e["name"] for e in events if e["name"].startswith("ProfilerStep")}
        assert steps == {"ProfilerStep#4", "ProfilerStep#5", "ProfilerStep#6"}
    for name in ("simple", "advanced", "pytorch"):
        assert f'"{name}"' in second
        assert name in type(eval(second.replace('"simple"', f'"{name}"'), calls).profiler).__name__.lower()


# --- 9.1 ------------------------------------------------------------------------------------------------------------

PRECISIONS = {
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.bfloat16),  # a CPU takes bf16 instead
    "bf16-true": (torch.bfloat16, torch.bfloat16),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_lightnings_precisions_are_what_9_1_says(precision, calls):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = eval(lines(practice("9.1*/1-*")[0], f'Trainer(precision="{precision}")'), calls)
    assert any("bf16" in str(w.message) for w in caught) == (precision == "16-mixed")
    model = Small()
    trainer.fit(model, DataLoader(ROWS, batch_size=4))
    assert model.seen == PRECISIONS[precision]


def test_transformers_precisions_are_what_9_1_says(calls):
    [snippet] = practice("9.1*/1-*")
    bf16, fp16 = lines(snippet, "TrainingArguments(bf16"), lines(snippet, "TrainingArguments(fp16")
    for line, dtype in ((bf16, torch.bfloat16), (fp16, torch.float32)):
        model = Classifier()
        arguments = eval(line.replace("True)", "True, use_cpu=True)"), calls)
        transformers.Trainer(model=model, args=arguments, train_dataset=DICTS).train()
        assert model.seen == dtype and model.layer.weight.dtype == torch.float32
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"bf16|BF16"):
            eval(bf16, calls)
        with pytest.raises(ValueError, match="tf32"):
            calls["TrainingArguments"](tf32=True)


def test_fabric_rounds_float_inputs_and_the_trainer_does_not():
    """Both under bf16-mixed: 257 is no bf16 number."""
    seen = []

    class Noting(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            seen.append(x[0, 0].item())
            return self.layer(x).sum()

        def training_step(self, batch, _):
            return self(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data, quiet = torch.full((4, 4), 257.0), dict(accelerator="cpu", devices=1, precision="bf16-mixed")
    options = dict(max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    lightning.Trainer(**quiet, **options, enable_model_summary=False).fit(Noting(), DataLoader(data, batch_size=4))
    model = lightning.Fabric(**quiet).setup(Noting())
    model(data)
    assert seen == [257, 256]
    assert "Fabric, too, but it casts float inputs to bf16" in practice("9.1*/1-*")[0]


def test_fp16_weights_are_an_error_when_gradients_are_unscaled():
    model, scaler = nn.Linear(4, 3).half(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        scaler.scale(model(torch.ones(2, 4)).float().sum()).backward()
    with pytest.raises(ValueError, match="FP16 gradients"):
        scaler.unscale_(optimizer)


def test_lightning_refuses_to_clip_for_a_fused_optimizer(calls):
    line = lines(practice("9.1*/3-*")[0], "Trainer(precision=").replace("16-mixed", "bf16-mixed")
    with pytest.raises(RuntimeError, match="clip"):
        eval(line, calls).fit(Small(fused=True), DataLoader(ROWS, batch_size=4))
    eval(line, calls).fit(Small(), DataLoader(ROWS, batch_size=4))


def test_fabric_clips_past_an_overflow_only_where_it_is_told(calls):
    line = lines(practice("9.1*/3-*")[0], "fabric.clip_gradients")
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.full((1, 2), torch.inf)).sum())
    names = {"fabric": fabric, "model": model, "optimizer": optimizer}
    with pytest.raises(RuntimeError, match="non-finite"):
        eval(line.replace(", error_if_nonfinite=False", ""), names)
    assert not eval(line, names).isfinite()


# --- 9.2 and 9.3: on a group that talks to nobody -------------------------------------------------------------------


def block(width: int = 8) -> nn.Sequential:
    layers = {"norm": nn.LayerNorm(width), "up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)}
    made = nn.Sequential()
    for name, layer in layers.items():
        made.add_module(name, layer)
    return made


@pytest.mark.parametrize("world", [2], indirect=True)
def test_tensor_parallelism_leaves_the_logits_cut_by_vocabulary(world):
    snippet = practice("9.2*/2-*")[0]
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    names = {**vars(parallel), "F": F, "mesh": mesh, "block": block(), "head": nn.Linear(8, 6, bias=False)}
    names |= {"x": torch.randn(2, 5, 8), "targets": torch.zeros(2, 5, dtype=torch.long)}
    exec(lines(snippet, "parallelize_module(block", 3), names)
    logits = names["head"](names["x"].flatten(0, 1))
    assert isinstance(logits, DTensor) and logits.placements == (Shard(1),) and logits.to_local().shape == (10, 3)
    assert names["block"].up.weight.to_local().shape == (16, 8)
    assert names["block"].down.weight.to_local().shape == (8, 16)
    assert names["head"].weight.grad.to_local().shape == (3, 8)


@pytest.mark.parametrize("world", [2], indirect=True)
def test_sequence_parallelism_gives_each_rank_a_part_of_the_tokens(world):
    mesh = init_device_mesh("cpu", (world,))
    names = {**vars(parallel), "Shard": Shard, "mesh": mesh, "block": block()}
    exec(lines(practice("9.2*/4-*")[0], "parallelize_module(block", 2), names)
    tokens = torch.randn(3, 4, 8)  # this rank's four of eight
    seen = []
    names["block"].up.register_forward_hook(lambda layer, given, made: seen.append(made.shape))
    assert names["block"](tokens).shape == tokens.shape
    assert isinstance(names["block"].norm.weight, DTensor)
    assert seen == [(3, 8, 16)]  # between the two products: all tokens, half of the columns


@pytest.mark.parametrize("world", [4], indirect=True)
def test_zero_1_keeps_a_share_of_the_state(world):
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(2 * world)])
    line = lines(practice("9.2*/5-*")[0], "ZeroRedundancyOptimizer(")
    made = eval(line, {"model": model, "torch": torch, "ZeroRedundancyOptimizer": ZeroRedundancyOptimizer})
    assert sum(p.numel() for group in made.optim.param_groups for p in group["params"]) == 128


def test_ddps_gradients_are_views_of_its_buckets(alone):
    """Both gradients of a layer lie in one memory then, without the option in two."""
    line = lines(practice("9.3*/1-*")[0], "DistributedDataParallel(").replace("device_ids=[device], ", "")
    for call, expected in ((line, 1), (line.replace("=True", "=False"), 2)):
        model = nn.Linear(4, 3)
        wrapped = eval(call, {"model": model, "DistributedDataParallel": nn.parallel.DistributedDataParallel})
        wrapped(torch.ones(2, 4)).sum().backward()
        assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == expected


@pytest.mark.parametrize("world", [8], indirect=True)
def test_fsdp_shards_over_one_dimension_and_saves_nothing_over_lightnings_two(world):
    snippet = lines(practice("9.3*/2-*")[0], "for layer in model.layers", 2)
    whole = init_device_mesh("cpu", (8, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    for mesh, rows in ((whole["data_parallel"], 2), (whole, 16)):
        model = nn.Module()
        model.layers = nn.ModuleList([nn.Linear(4, 16), nn.Linear(4, 16)])
        exec(snippet, {"model": model, "mesh": mesh, "fully_shard": fully_shard})
        assert [layer.weight.to_local().shape for layer in model.layers] == [(rows, 4)] * 2
        assert all(isinstance(layer, FSDPModule) for layer in model.layers)


@pytest.mark.parametrize("world", [8], indirect=True)
def test_copies_of_shards_are_as_many_as_9_2_says(world):
    model = nn.Module()
    model.layers, model.head = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]), nn.Linear(64, 64)
    names = {"model": model, "init_device_mesh": init_device_mesh, "fully_shard": fully_shard}
    snippet = lines(practice("9.2*/5-*")[0], "copies = ", 3).replace('"cuda", (4, 8)', '"cpu", (2, 4)')
    exec(snippet, names)
    parts = [*model.layers, model.head]
    assert [part.weight.to_local().shape for part in parts] == [(16, 64)] * 3
    groups = [part for part in model.modules() if isinstance(part, FSDPModule)]
    assert groups == [model, *model.layers], "each layer is gathered by itself"


def test_transformers_shards_its_checkpoints_only_where_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # the arguments set it
    names = {"TrainingArguments": functools.partial(transformers.TrainingArguments, use_cpu=True)}
    snippet = practice("9.3*/2-*")[0]
    exec(
        lines(snippet, "sharded =", 2).replace('"runs"', f"{str(tmp_path)!r}").replace("Training", "made = Training"),
        names,
    )
    default = transformers.TrainingArguments(str(tmp_path), fsdp=True, use_cpu=True)
    asked = ("state_dict_type", "cpu_ram_efficient_loading")
    assert [default.fsdp_plugin_args[name] for name in asked] == ["FULL_STATE_DICT", False]
    assert [names["made"].fsdp_plugin_args[name] for name in asked] == ["SHARDED_STATE_DICT", True]


def test_defaults_of_waiting_are_those_that_9_3_names():
    [snippet] = practice("9.3*/3-*")
    half_an_hour, twenty = timedelta(minutes=30), timedelta(minutes=20)
    assert dist.constants.default_pg_timeout == half_an_hour
    assert '10 minutes ("nccl", or a device_id and no name)' in snippet
    assert "30 (gloo, a mixed name, neither name nor device_id)" in snippet
    assert dist.Backend.default_device_backend_map["cuda"] == "nccl"  # what a device_id is looked up in
    nccl = dist.constants.default_pg_nccl_timeout  # None in a build without NCCL
    assert nccl in (None, timedelta(minutes=10))
    pytorch, fabric = lightning.pytorch.strategies.DDPStrategy, lightning.fabric.strategies.DDPStrategy
    assert pytorch()._timeout == fabric()._timeout == half_an_hour
    names = {"Trainer": SimpleNamespace, "DDPStrategy": pytorch, "timedelta": timedelta}
    made = eval(lines(snippet, "Trainer(strategy"), names)
    assert made.strategy._timeout == twenty
    assert transformers.TrainingArguments("runs").ddp_timeout == 1800 and "1,800" in snippet


def test_a_new_group_does_not_inherit_the_time_limit(alone):
    names = {"dist": dist, "timedelta": timedelta}
    exec(lines(practice("9.3*/3-*")[0], "watch = dist.new_group", 2), names)
    groups = dist.group.WORLD, dist.new_group(), names["watch"]
    limits = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    assert limits == [timedelta(minutes=20), timedelta(minutes=30), timedelta(minutes=5)]


@pytest.mark.parametrize("world", [64], indirect=True)
def test_the_fp16_hook_of_9_3_loses_small_gradients_before_it_sums(world, monkeypatch):
    gradients = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * world * 1e-8

    def summed(tensor, **_):  # of ranks that all have the same
        (future := torch.futures.Future()).set_result([tensor.float() * world])
        return SimpleNamespace(get_future=lambda: future)

    monkeypatch.setattr(dist, "all_reduce", summed)
    errors = []
    for hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):
        bucket = SimpleNamespace(buffer=gradients.clone)
        errors.append(((hook(None, bucket).wait() - gradients).norm() / gradients.norm()).item())
    assert errors[0] > 0.5 > 0.01 > errors[1]


def test_lightnings_file_of_the_signal_belongs_to_one_job(tmp_path, monkeypatch, calls):
    """Without a folder of its own the next job takes it up; and a test loads it, unless it is told what to load."""
    monkeypatch.chdir(tmp_path)
    job = {"NTASKS": 1, "JOB_NAME": "train", "PROCID": 0, "LOCALID": 0, "NODEID": 0, "NODELIST": "localhost"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    snippet = practice("9.3*/5-*")[1].replace("num_nodes=2, devices=8, ", "")
    rows = DataLoader([(row, label) for row, label in ROWS], batch_size=4)

    class Tested(Small):
        def on_train_start(self):
            starts.append(self.trainer.global_step)

        def test_step(self, batch, _):
            tested.append(self.layer.weight.detach().clone())

    def fitted(steps: int):
        names = {"os": os, "Trainer": functools.partial(calls["Trainer"], max_steps=steps)}
        exec(snippet.replace("default_root_dir=folder", "default_root_dir=folder" if own else ""), names)
        trainer, model = names["trainer"], Tested()
        trainer.fit(model, rows)
        return trainer, model

    for own, resumed in ((True, 0), (False, 2)):
        starts, tested = [], []
        calls["Trainer"] = functools.partial(calls["Trainer"], default_root_dir=tmp_path)
        monkeypatch.setenv("SLURM_JOB_ID", "100")
        trainer, _ = fitted(2)
        trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))
        fitted(3)  # the same job's next life
        monkeypatch.setenv("SLURM_JOB_ID", "200")
        trainer, model = fitted(4)
        assert starts == [0, 2, resumed]
        if not own:
            trainer.save_checkpoint("newest.ckpt")
            trainer.test(model, rows, verbose=False)
            trainer.test(model, rows, verbose=False, ckpt_path="newest.ckpt")
            assert not tested[0].equal(tested[-1])


def test_the_last_checkpoint_is_the_newest_even_a_torn_one(tmp_path):
    snippet = lines(practice("9.3*/5-*")[0], "last = ").split("  #")[0]
    names = {"args": SimpleNamespace(output_dir=str(tmp_path / "runs")), "os": __import__("os")}
    names["get_last_checkpoint"] = transformers.trainer_utils.get_last_checkpoint
    exec(snippet, names)
    assert names["last"] is None
    for name in ("checkpoint-5", "checkpoint-10"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "checkpoint-5" / "trainer_state.json").write_text("{}")
    exec(snippet, names)
    assert names["last"].endswith("checkpoint-10")


# --- 9.5.3 and 9.8.1 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1024, 64])
def test_the_rate_of_9_5_warms_up_from_the_recipes_and_ends_at_zero(batch_size, calls):
    model = nn.Linear(2, 1)
    names = {**calls, **vars(torch.optim), **vars(torch.optim.lr_scheduler), "model": model}
    names |= {"batch_size": batch_size, "world_size": 2, "accumulate_steps": 1, "C": 4096}
    names |= {"warmup_updates": 10, "updates": 40}
    exec(practice("9.5*/3-*")[0], names)
    k, saturating = names["k"], names["saturating"]
    assert k == batch_size / 128 and min(1, k) <= saturating <= max(1, k)
    rates = []
    for _ in range(40):
        rates.append(names["optimizer"].param_groups[0]["lr"])
        names["optimizer"].step()
        names["schedule"].step()
    assert rates[0] == pytest.approx(min(0.1, saturating * 0.1))
    assert rates[10] == pytest.approx(saturating * 0.1) == pytest.approx(max(rates))
    assert names["optimizer"].param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)
    arguments, [group] = names["arguments"], names["adamw"].param_groups
    assert (arguments.adam_beta1, arguments.adam_beta2) == group["betas"]
    assert [1 - beta for beta in group["betas"]] == [pytest.approx(k / 10), pytest.approx(k / 1000)]
    assert (arguments.learning_rate, arguments.adam_epsilon) == (group["lr"], group["eps"])
    assert arguments.get_warmup_steps(1000) == 50


def test_new_heads_of_9_8_keep_the_body(tmp_path):
    snippet = practice("9.8*/1-*")[0]
    with torch.device("meta"):
        names = {"torch": torch, "torchvision": torchvision}
        exec(lines(snippet, "model = torchvision", 2).replace('"IMAGENET1K_V1"', "None"), names)
        assert names["model"](torch.zeros(1, 3, 224, 224)).shape == (1, 10)
    assert torchvision.models.ViT_B_16_Weights["IMAGENET1K_V1"]
    small = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4,
        num_labels=7,
    )  # fmt: skip
    old = transformers.ViTForImageClassification(small)
    old.save_pretrained(tmp_path)
    line = lines(snippet, "model = AutoModel")
    new = eval(
        line.split(" = ", 1)[1],
        {"AutoModelForImageClassification": transformers.AutoModelForImageClassification, "name": str(tmp_path)},
    )
    assert new.classifier.weight.shape == (10, 8)
    assert all(torch.equal(a, b) for a, b in zip(old.vit.parameters(), new.vit.parameters(), strict=True))


# --- the capstone ---------------------------------------------------------------------------------------------------


def test_the_job_of_the_capstone_is_diagnosed(tmp_path):
    build, run = practice("capstone/1-*")

    def step(model, optimizer, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    net = lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))  # noqa: E731
    samples = lambda size: (torch.randn(size, 4), torch.zeros(size, dtype=torch.long))  # noqa: E731
    names = {
        **{"torch": torch, "F": F, "Net": net, "my_samples": samples, "my_step": step, "my_module": Small()},
        **{"my_loader": [samples(32)] * 3, "train_loader": DataLoader(ROWS, batch_size=4), "model": bert()},
        "training_arguments": transformers.TrainingArguments(str(tmp_path), use_cpu=True),
        "batch": {"input_ids": torch.ones(4, 6, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)},
    }
    printed = []
    exec(build + "\n" + run, {**names, "print": printed.append})
    assert len(printed) == 3 and "A100" in printed[0]
    assert all("torch.compile" in text for text in printed)


@pytest.mark.parametrize("repeat", [True, False])
def test_the_schedule_of_the_capstone_records_three_steps_once(repeat, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippet = practice("capstone/2-*")[0]
    exec(
        snippet if repeat else snippet.replace(", repeat=1", ""),
        {"loader": range(32), "train": lambda i: torch.full((i + 1,), 1.0)},
    )
    files = sorted((tmp_path / "traces").iterdir())
    found = [set(re.findall(r"ProfilerStep#(\d+)", file.read_text(encoding="utf-8"))) for file in files]
    assert {"12", "13", "14"} in found and len(found) == (1 if repeat else 2)  # counted from 0: steps 13 to 15


@pytest.mark.skipif(
    not hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable"),
    reason="transformers 5.17 has another name",
)
def test_the_settings_of_the_capstone_are_taken(calls):
    snippet = practice("capstone/4-*")[0]
    made = eval(lines(snippet, "Trainer("), calls)
    assert made.accumulate_grad_batches == 4 and made.precision == "bf16-mixed"
    assert eval(lines(snippet, "torch.optim.AdamW"), {"torch": torch, "model": nn.Linear(1, 1)}).defaults["fused"]
    taken = lines(snippet, "TrainingArguments(", 3).replace("bf16=True", "bf16=True, use_cpu=True")
    arguments = eval(taken, calls)
    assert arguments.optim == "adamw_torch_fused" and arguments.torch_compile and arguments.activation_checkpointing
