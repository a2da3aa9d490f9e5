"""A checkpoint writer that first waits for something to happen, so that the order does not depend on timing."""

import time
from collections.abc import Callable

import torch.distributed.checkpoint as dcp


class HeldWriter(dcp.FileSystemWriter):
    """Writes to a folder as DCP does, once `until()` is true or a minute has passed, so that no save hangs."""

    def __init__(self, folder: str, until: Callable[[], object]):
        super().__init__(folder)
        self.until = until

    def write_data(self, *given):
        latest = time.monotonic() + 60
        while not self.until() and time.monotonic() < latest:
            time.sleep(0.01)
        return super().write_data(*given)
