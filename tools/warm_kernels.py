"""Kernels that begin with the large libraries imported: forks of one process that imported them once.

A course of notebooks starts some seventy kernels, and each would spend 3 to 10 seconds of a core on the same imports.
This is a kernel provisioner, the way in which jupyter_client lets others start kernels; `use()` makes it the default
of this process. Only Linux forks reliably beside threads: elsewhere, kernels start as usual.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import psutil
from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

# What most notebooks import, and the parts of it that take longest. A library that is missing is left out.
PRELOADED = """
torch torch._dynamo torchvision lightning transformers.models.auto.modeling_auto
scipy.stats matplotlib.pyplot ipywidgets ipykernel.kernelapp ipykernel.zmqshell
""".split()
# ipykernel sets this when it starts, but matplotlib reads it when it is imported, which is earlier here.
_INLINE = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}


class WarmProvisioner(LocalProvisioner):
    """Asks the process that holds the libraries for a fork of itself, and looks after that as after its own child."""

    origin: subprocess.Popen | None = None

    async def launch_kernel(self, cmd, **options):
        if self.origin is None or self.origin.poll() is not None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            type(self).origin = subprocess.Popen(
                [sys.executable, __file__], **pipes, env={**options["env"], **_INLINE}, text=True
            )
        self.cwd = options.get("cwd") or os.getcwd()
        order = {"arguments": cmd[cmd.index("-f") :], "env": options["env"], "cwd": str(self.cwd)}
        self.origin.stdin.write(json.dumps(order) + "\n")
        self.origin.stdin.flush()
        if not (pid := self.origin.stdout.readline()):
            raise RuntimeError(f"The process that kernels are forked from ended: run `python {__file__}` to see why.")
        self.process = _Fork(int(pid))
        self.pid = self.pgid = self.process.pid
        return self.connection_info


class _Fork(psutil.Process):
    """A process that is another's child, with what a provisioner asks of a subprocess.Popen besides."""

    stdin = stdout = stderr = None

    def poll(self) -> int | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.is_running() and self.status() != psutil.STATUS_ZOMBIE:
                return None
        return 0

    def send_signal(self, sig: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended needs none
            super().send_signal(sig)


def use() -> None:
    """Start kernels of this process as forks from now on, on Linux."""
    if sys.platform == "linux":
        factory = KernelProvisionerFactory.instance()
        factory.provisioners["warm"] = EntryPoint("warm", "warm_kernels:WarmProvisioner", factory.GROUP_NAME)
        factory.default_provisioner_name = "warm"


def _orders() -> dict:
    """Fork at each order that arrives; return it in the fork, and end where no more can come."""
    for line in sys.stdin:
        order = json.loads(line)
        if (pid := os.fork()) == 0:
            return order
        print(pid, flush=True)
    sys.exit()


def _become_kernel(order: dict) -> None:
    """Go on as a process would that was started for this kernel alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nowhere, descriptor)
    multiprocessing.process.ORIGINAL_DIR = order["cwd"]  # what it spawns looks there for modules
    import numpy
    from ipykernel import kernelapp

    numpy.random.seed()  # forks would draw the same, and what is not seeded must not repeat
    # ipykernel has read its parent's number from the environment already; without one, it would outlive that parent
    sys.argv = ["ipykernel_launcher", *order["arguments"], f"--IPKernelApp.parent_handle={os.getppid()}"]
    kernelapp.launch_new_instance()


if __name__ == "__main__":
    if Path(sys.path[0]) == Path(__file__).parent:
        del sys.path[0]
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks here
    gc.freeze()  # what is shared stays shared
    _become_kernel(_orders())
