"""A job on several machines: the command for each, the script for SLURM, and stand-ins to try both on one machine."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# A node that is silent for eight seconds counts as dead; the others then wait twelve seconds for a new one.
IMPATIENT = "keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=12"
if WINDOWS := sys.platform == "win32":  # no libuv there: as in speedlab.launch, the nodes meet through a file
    IMPATIENT += ",store_type=file"


def torchrun(
    script: str, *arguments: str, nodes: str, processes: int, endpoint: str, job: str, restarts: int
) -> list[str]:
    """torchrun's arguments, the same on every node: the nodes meet at the endpoint, and agree on ranks there.

    `nodes` is a number, or a range such as '1:2'; `endpoint` is 'host:port' on one node; `job` is any name that
    no other run uses.
    """
    return [
        f"--nnodes={nodes}",
        f"--nproc-per-node={processes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={job}",
        f"--max-restarts={restarts}",
        script,
        *arguments,
    ]


def slurm(script: str, *, nodes: int, gpus: int, cores: int, hours: int) -> str:
    """A batch script for a training run that saves into a given folder, and stops when a file `stop` is there."""
    meeting = {"endpoint": '"$head:$port"', "job": '"$SLURM_JOB_ID"'}
    command = torchrun(script, '"$folder"', nodes=str(nodes), processes=gpus, restarts=2, **meeting)
    lines = " \\\n    ".join(["srun --kill-on-bad-exit=1 torchrun", *command])
    return f"""#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1           # one torchrun per node, which starts the processes
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task={cores}
#SBATCH --time={hours:02}:00:00
#SBATCH --requeue                     # if a node fails, the job goes back into the queue and keeps its id
#SBATCH --open-mode=append            # one log for all lives of the job
#SBATCH --signal=B:USR1@300           # five minutes before the time is up, SLURM sends USR1 to this script

folder=checkpoints/$SLURM_JOB_ID
mkdir -p "$folder"
rm -f "$folder/stop"
trap 'touch "$folder/stop"; asked=1' USR1   # the training script sees this file, saves, and ends
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 12000))   # below those that Linux gives to outgoing connections
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK   # since SLURM 22.05, srun does not inherit --cpus-per-task
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # otherwise a restart (torch 2.15) may find addresses of dead processes
{lines} &
job=$!
while asked=; wait "$job"; code=$?; [ "$asked" ]; do :; done   # USR1 interrupts wait, so wait again
if [ $code -eq 0 ] && [ -e "$folder/stop" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""


def play_slurm(script: str, lives: int) -> list[dict]:
    """Run a batch script as SLURM does, one life after another under one job id; srun and scontrol are stand-ins.

    In every life but the last, time runs out and the script gets USR1. Returns for each life its exit code, the
    arguments of srun, and what was asked of scontrol afterwards. Needs bash.
    """
    srun = """#!/bin/bash
printf '%s\\n' "$@" > srun.txt
[ "$LAST" ] && exit 0
kill -USR1 $PPID
for i in $(seq 100); do [ -e checkpoints/$SLURM_JOB_ID/stop ] && exit 0; sleep 0.1; done
exit 1
"""
    scontrol = '#!/bin/bash\nif [ "$1" = show ]; then echo node-a; echo node-b; else echo "$@" >> scontrol.txt; fi\n'
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), []
        for program, text in {"srun": srun, "scontrol": scontrol}.items():
            (folder / program).write_text(text)
            (folder / program).chmod(0o755)
        for life in range(lives):
            environment = {**os.environ, "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node-[a-b]"}
            environment |= {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "LAST": "1" * (life == lives - 1)}
            asked = folder / "scontrol.txt"
            asked.write_text("")
            done = subprocess.run(
                ["bash"], input=script, text=True, timeout=60, cwd=folder, env=environment, check=False
            )
            command = (folder / "srun.txt").read_text().split("\n")[:-1]
            found.append({"code": done.returncode, "command": command, "asked": asked.read_text().strip()})
    return found


def play_node(node: int, endpoint: str, folder: str, seconds: float) -> dict:
    """Act as one of two nodes with one process each: run torchrun, as you would in a terminal on that node.

    Node 0 hosts the meeting point. Node 1 dies after step 6, torchrun included. Returns exit code and printed lines.
    """
    arguments = [folder, "--machine-dies=6"] if node == 1 else [folder]
    options = torchrun("resume.py", *arguments, nodes="1:2", processes=1, endpoint=endpoint, job="lesson", restarts=2)
    conf = f"--rdzv-conf=is_host={'true' if node == 0 else 'false'},{IMPATIENT}"
    command = [sys.executable, "-m", "torch.distributed.run", "--local-addr=127.0.0.1", conf, *options]
    # this process belongs to a group itself, whose environment variables would mislead the new group
    foreign = re.compile(r"(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_|TORCHELASTIC_|ROLE_")
    environment = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    time.sleep(3 * (node == 0))  # so that node 1 is waiting when the meeting point opens
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    if done.returncode and node == 0:
        raise RuntimeError(f"torchrun ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {"node": node, "code": done.returncode, "lines": lines}


if __name__ == "__main__":
    meeting_point, checkpoints, patience = sys.argv[1:]
    meeting_point = f"{checkpoints}.meeting" if WINDOWS else meeting_point
    print(json.dumps(play_node(int(os.environ["RANK"]), meeting_point, checkpoints, float(patience))))
