"""The scripts of unit 9.3: counted messages, bad days, torn checkpoints, restarts, the script for a cluster."""

import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from speedlab import launch

UNIT = Path(__file__).resolve().parent.parent / "code-units" / "9.3-multi-gpu"
CPU = {"CUDA_VISIBLE_DEVICES": "", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def module(monkeypatch):
    """A script of the unit as a module, which finds its neighbours."""

    def load(name: str):
        monkeypatch.syspath_prepend(str(UNIT))
        spec = importlib.util.spec_from_file_location(name, UNIT / f"{name}.py")
        loaded = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, loaded)
        spec.loader.exec_module(loaded)
        return loaded

    return load


@pytest.mark.parametrize(
    ("arguments", "world_size", "sentence"),
    [
        (["--rows=3", "--batch=8"], 4, "3 reviews do not fill a batch of 8; take a smaller batch"),
        (["--batch=6"], 4, "a batch of 6 is not divisible by 4; take a multiple of 4"),
        (["--epochs=0"], 1, "must be 1 or more"),
    ],
)
def test_a_batch_that_cannot_be_shared_gets_a_sentence(arguments, world_size, sentence, module, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(SystemExit):
        module("finetune_common").parse(arguments, "")
    assert sentence in capsys.readouterr().err


def test_a_count_that_does_not_divide_the_batch_gets_a_sentence(module, monkeypatch, tmp_path, capsys):
    resume = module("resume")
    monkeypatch.setattr(resume, "connect", lambda timeout: (0, 5, torch.device("cpu")))
    with pytest.raises(SystemExit):
        resume.main([str(tmp_path)])
    assert "a batch of 24 is not divisible by 5; take 1, 2, 3, 4, 6, 8, 12 or 24 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("processes", [1, 3, 5])
def test_every_step_has_a_whole_batch_on_any_number_of_processes(processes, module, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    common = module("finetune_common")
    args = common.parse([f"--batch={8 * processes}", "--rows=100"], "")
    train_rows, held_out, _ = common.reviews(args)
    assert len(train_rows) == 100 // args.batch * args.batch
    assert len(held_out) == 301


def test_a_pytorch_without_gloo_gets_a_sentence(module, monkeypatch):
    finetune_common = module("finetune_common")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(finetune_common.dist, "is_gloo_available", lambda: False)
    with pytest.raises(SystemExit, match="built without gloo"):
        finetune_common.connect()


def test_each_kind_of_message_is_counted_in_bytes(module):
    traffic, rehearsal = module("traffic"), module("rehearsal")
    with rehearsal.rehearse(4):
        whole, part = torch.zeros(100), torch.zeros(25)
        with traffic.listen() as messages:
            dist.all_reduce(whole)
            dist.all_gather_into_tensor(whole, part)
            dist.reduce_scatter_tensor(part, whole)
            dist.all_reduce(whole.half(), group=dist.new_group([0, 1]))
    assert messages == [
        ("all-reduce", 400, "float32", 4),
        ("all-gather", 400, "float32", 4),
        ("reduce-scatter", 400, "float32", 4),
        ("all-reduce", 200, "float16", 2),
    ]
    # rings: 2·(N-1)/N of the bytes for an all-reduce, (N-1)/N for the other two
    assert traffic.sent(messages) == 600 + 300 + 300 + 200


def save(folder: Path, step: int) -> Path:
    """A small checkpoint as DCP writes it."""
    place = folder / f"step-{step:04}"
    torch.distributed.checkpoint.save({"step": torch.tensor(step)}, checkpoint_id=place, no_dist=True)
    return place


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_only_a_complete_checkpoint_is_taken_and_others_are_named(module, tmp_path, capsys):
    resume = module("resume")
    assert resume.newest_complete(tmp_path) is None
    for step in (4, 8, 12):
        save(tmp_path, step)
    assert resume.newest_complete(tmp_path).name == "step-0012"
    for step in (8, 12):
        (tmp_path / f"step-{step:04}" / ".metadata").rename(tmp_path / f"step-{step:04}" / ".metadata.tmp")
    capsys.readouterr()
    assert resume.newest_complete(tmp_path).name == "step-0004"
    assert json.loads(capsys.readouterr().out) == {"skipped": ["step-0012", "step-0008"], "resumed": "step-0004"}
    save(tmp_path, 9996), save(tmp_path, 10_000)
    assert resume.newest_complete(tmp_path).name == "step-10000"


def test_the_folder_for_the_weights_is_made_before_training(module, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "1")
    module("finetune_common").parse([f"--save={tmp_path / 'made' / 'now'}"], "")
    assert (tmp_path / "made" / "now").is_dir()


def test_a_stop_is_obeyed_and_a_restart_repeats_its_dropout(tmp_path):
    """Two ranks stop when asked; then one dies while it saves: what is trained again has the same losses."""
    (tmp_path / "stop").touch()
    launched = launch.run(UNIT / "resume.py", 2, tmp_path, "--dropout=0.2", environment=CPU, timeout=300)
    assert [json.loads(line).get("step") for line in launched.outputs[0].splitlines()] == [None, 1]
    (tmp_path / "stop").unlink()
    options, arguments = ["--max-restarts=1"], ["--dropout=0.2", "--steps=9", "--every=3", "--dies-saving=6"]
    launched = launch.run(UNIT / "resume.py", 2, tmp_path, *arguments, options=options, environment=CPU, timeout=300)
    said = [json.loads(line) for line in launched.outputs[0].splitlines()]
    assert [line["resumed"] for line in said if "resumed" in line] == ["step-0001", "step-0003"]
    first, second = ({x["step"]: x["loss"] for x in said if x.get("attempt") == i} for i in (0, 1))
    assert list(first) == [2, 3, 4, 5, 6] and list(second) == [4, 5, 6, 7, 8, 9]
    assert all(first[step] == second[step] for step in (4, 5, 6)), (
        "a restart draws other masks than the first attempt"
    )


SAVES_BESIDE_ITS_STEPS = """
import sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
SAVING
sums = []
for step in range(3):
    future = CALL
    for i in range(100):
        sums.append(torch.full((4,), float(i)))
        dist.all_reduce(sums[-1])
    future.result()
print(sum(x.sum().item() for x in sums))
dist.destroy_process_group()
"""


def test_a_save_in_a_group_of_its_own_leaves_the_steps_alone(tmp_path):
    cells = json.loads((UNIT / "4-checkpoints-and-restarts.ipynb").read_text(encoding="utf-8"))["cells"]
    prose = "".join(line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])
    [group] = re.findall(r"`(saving =\s[^`]+)`", prose)
    [call] = re.findall(r"`(dcp\.async_save\(\.\.\.[^`]+)`", prose)
    state = '{"w": torch.zeros(1000)}, checkpoint_id=f"{sys.argv[1]}/{step}"'
    script = SAVES_BESIDE_ITS_STEPS.replace("SAVING", group).replace("CALL", call.replace("...", state))
    (tmp_path / "saves.py").write_text(script)
    launched = launch.run(tmp_path / "saves.py", 2, tmp_path / "saved", environment=CPU, timeout=120)
    assert [float(output) for output in launched.outputs] == [3 * 2 * 4 * sum(range(100))] * 2
    assert len(list((tmp_path / "saved").glob("*/.metadata"))) == 3


def test_the_slurm_script_is_a_shell_script_and_runs_what_torchrun_gets(module):
    cluster = module("cluster")
    script = cluster.slurm("train.py", nodes=3, gpus=8, cores=32, hours=5)
    lines = script[script.index("srun --kill") : script.index("job=$!")].strip().removesuffix("&").splitlines()
    assert all(line.endswith(" \\") for line in lines[:-1]), "the shell would take this for several commands"
    command = shlex.split("".join(line.removesuffix("\\") for line in lines))
    options = {"nodes": "3", "processes": 8, "endpoint": "$head:$port", "job": "$SLURM_JOB_ID", "restarts": 2}
    assert command == [
        "srun",
        "--kill-on-bad-exit=1",
        "torchrun",
        *cluster.torchrun("train.py", "$folder", **options),
    ]
    if Path("/bin/bash").exists():
        assert subprocess.run(["/bin/bash", "-n"], input=script, text=True, timeout=30).returncode == 0


@pytest.mark.skipif(os.name != "posix" or not shutil.which("bash"), reason="needs bash on Linux or macOS")
def test_a_slurm_job_is_requeued_when_its_time_runs_out_and_not_when_it_ends_or_fails(module):
    cluster = module("cluster")
    script = cluster.slurm("train.py", nodes=2, gpus=8, cores=32, hours=5)
    first, second, last = cluster.play_slurm(script, lives=3)
    assert [life["asked"] for life in (first, second, last)] == ["requeue 4711", "requeue 4711", ""]
    assert first["command"] == last["command"]
    assert [life["code"] for life in (first, second, last)] == [0, 0, 0]
    late = script.replace("code=$?", "code=$?; sleep 0.5")  # the job ends before the script looks again
    assert cluster.play_slurm(late, lives=2)[0]["asked"] == "requeue 4711"
    failing = re.sub(r"(srun .*) torchrun", r"\1 torchrun && false", script)
    assert [(life["asked"], life["code"]) for life in cluster.play_slurm(failing, lives=1)] == [("", 1)]


def test_lightnings_snippet_takes_up_a_training_where_it_ended(tmp_path, monkeypatch):
    """Without `save_last`, or in another folder, Lightning would start from nothing and only warn."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.ones(40, 2), batch_size=2)

        def on_train_start(self):
            starts.append(self.trainer.global_step)

    cells = json.loads((UNIT / "4-checkpoints-and-restarts.ipynb").read_text())["cells"]
    prose = "".join(line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])
    practice = prose.split("### In practice")[1]
    snippet = practice[practice.index("newest =") : practice.index("# Fabric")].replace("500", "5")
    monkeypatch.chdir(tmp_path)
    starts = []
    for steps in (10, 20):
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = functools.partial(lightning.Trainer, max_steps=steps, **quiet)
        exec(snippet, {"Trainer": trainer, "ModelCheckpoint": ModelCheckpoint, "model": Model()})
    assert starts == [0, 10]
