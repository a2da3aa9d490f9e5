"""A kernel that is a fork of a process with the libraries imported begins as one of its own would."""

import contextlib
import sys

import pytest
import warm_kernels
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning import KernelProvisionerFactory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux only")

DRAW = "print(__import__('numpy').random.rand())"
SPAWN = """
import multiprocessing, neighbour
process = multiprocessing.get_context("spawn").Process(target=neighbour.greet)
process.start()
process.join()
print(process.exitcode, {"torch", "lightning"} <= {*__import__("sys").modules})
"""


def printed(client, code: str) -> str:
    text = []

    def hear(message):
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            text.append(message["content"]["text"])

    client.execute_interactive(code, timeout=60, output_hook=hear)
    return "".join(text).strip()


@pytest.fixture
def start(tmp_path, monkeypatch):
    factory = KernelProvisionerFactory.instance()
    monkeypatch.setattr(factory, "default_provisioner_name", factory.default_provisioner_name)
    monkeypatch.setattr(warm_kernels.WarmProvisioner, "origin", None)
    warm_kernels.use()
    with contextlib.ExitStack() as stack:

        def begin():
            manager = KernelManager()
            manager.start_kernel(cwd=str(tmp_path))
            stack.callback(manager.shutdown_kernel, now=True)
            client = manager.client()
            client.start_channels()
            stack.callback(client.stop_channels)
            client.wait_for_ready(timeout=120)
            return manager, client

        yield begin
    origin = warm_kernels.WarmProvisioner.origin
    origin.stdin.close()
    origin.wait(timeout=60)


def test_forks_run_in_their_folder_draw_their_own_numbers_and_end_alone(start, tmp_path):
    (tmp_path / "neighbour.py").write_text("def greet():\n    raise SystemExit(7)\n", encoding="utf-8")
    (first, one), (second, other) = start(), start()
    assert printed(one, "import os; print(os.getcwd())") == str(tmp_path)
    assert printed(one, SPAWN) == "7 True"
    assert printed(one, DRAW) != printed(other, DRAW)
    first.provisioner.process.kill()
    first.provisioner.process.wait(30)
    assert not first.is_alive() and second.is_alive()
    assert printed(other, "print('here')") == "here"
    warm_kernels.WarmProvisioner.origin.terminate()
    second.provisioner.process.wait(30)  # raises where the fork outlives the process that it came from
