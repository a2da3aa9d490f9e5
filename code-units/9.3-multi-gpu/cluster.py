"""One description of a job on several machines: the command of each, and the script for SLURM."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """`nodes` machines with `processes` each, one a GPU; `endpoint` is where they meet, 'host:port'."""

    script: str
    nodes: int
    processes: int
    endpoint: str
    arguments: tuple[str, ...] = ()
    max_restarts: int = 0

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes

    def torchrun(self) -> list[str]:
        """What to run on every node, the same on each: they agree on ranks when they meet."""
        return [
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.processes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.endpoint}",
            "--rdzv-id=lesson",
            f"--max-restarts={self.max_restarts}",
            self.script,
            *self.arguments,
        ]

    def slurm(self, hours: int, cores: int) -> str:
        """A batch script: one task a node, which is torchrun; it starts the processes."""
        port = self.endpoint.rsplit(":", 1)[1]
        lines = " \\\n    ".join(["srun torchrun", *self.torchrun()])
        lines = lines.replace(self.endpoint, f'"$head:{port}"')
        return f"""#!/bin/bash
#SBATCH --nodes={self.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={self.processes}
#SBATCH --cpus-per-task={cores}
#SBATCH --time={hours:02}:00:00

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
{lines}
"""


def play_node(job: Job, seconds: float) -> str:
    """Be one of the nodes: run torchrun, as you would in a terminal there, and return what its processes printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--local-addr=127.0.0.1", *job.torchrun()]
    # this process is itself one of a group, whose variables would mislead the new one
    foreign = re.compile(r"(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_|TORCHELASTIC_|ROLE_")
    environment = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    if done.returncode:
        raise RuntimeError(f"torchrun ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    endpoint, patience, program, *rest = sys.argv[1:]
    print(play_node(Job(program, 2, 2, endpoint, tuple(rest)), float(patience)), end="")
