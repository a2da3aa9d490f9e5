"""Kernels that start with the large libraries already imported: forks of one process that imported them once.

A complete test run starts over sixty kernels, and each would spend 3 to 10 core seconds on the same imports.
This is a kernel provisioner, the interface by which jupyter_client lets others start kernels; `use()` makes it the
default of this process. Only on Linux can a process with threads fork reliably: elsewhere, kernels start as usual.
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

# What most notebooks import, with the submodules that take longest. A library that is missing is skipped.
PRELOADED = """
torch torch._dynamo torchvision lightning transformers.models.auto.modeling_auto
scipy.stats matplotlib.pyplot ipywidgets ipykernel.kernelapp ipykernel.zmqshell
""".split()
# ipykernel sets this when it starts, but matplotlib reads it when it is imported, which happens earlier here.
_INLINE = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}


class WarmProvisioner(LocalProvisioner):
    """Asks the process that holds the libraries to fork, and manages the fork as if it were its own child."""

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
    """A child of a different process, with what a provisioner also needs of a subprocess.Popen."""

    stdin = stdout = stderr = None

    def poll(self) -> int | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.is_running() and self.status() != psutil.STATUS_ZOMBIE:
                return None
        return 0

    def send_signal(self, sig: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # a process that has ended needs no signal
            super().send_signal(sig)


def use() -> None:
    """On Linux, start the kernels of this process as forks from now on."""
    if sys.platform == "linux":
        factory = KernelProvisionerFactory.instance()
        factory.provisioners["warm"] = EntryPoint("warm", "warm_kernels:WarmProvisioner", factory.GROUP_NAME)
        factory.default_provisioner_name = "warm"


def _orders() -> dict:
    """Fork for each order that arrives; return the order in the fork, and exit when no more can come."""
    for line in sys.stdin:
        order = json.loads(line)
        if (pid := os.fork()) == 0:
            return order
        print(pid, flush=True)
    sys.exit()


def _become_kernel(order: dict) -> None:
    """Continue as if this process had been started for this kernel alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nowhere, descriptor)
    multiprocessing.process.ORIGINAL_DIR = order["cwd"]  # processes that it spawns look there for modules
    import numpy
    from ipykernel import kernelapp

    numpy.random.seed()  # forks would all draw the same numbers, but unseeded draws must differ
    # ipykernel has already read its parent's process id from the environment; without it, it would outlive the parent
    sys.argv = ["ipykernel_launcher", *order["arguments"], f"--IPKernelApp.parent_handle={os.getppid()}"]
    kernelapp.launch_new_instance()


if __name__ == "__main__":
    if Path(sys.path[0]) == Path(__file__).parent:
        del sys.path[0]
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks here
    gc.freeze()  # what the forks share stays shared
    _become_kernel(_orders())
