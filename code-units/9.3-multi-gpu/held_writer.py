"""A writer of checkpoints that begins only when something has happened, so that what comes first needs no clock."""

import time
from collections.abc import Callable

import torch.distributed.checkpoint as dcp


class HeldWriter(dcp.FileSystemWriter):
    """Writes to a folder as DCP does, once `until()` is true; a save that waits for its write goes on in a minute."""

    def __init__(self, folder: str, until: Callable[[], object]):
        super().__init__(folder)
        self.until = until

    def write_data(self, *given):
        latest = time.monotonic() + 60
        while not self.until() and time.monotonic() < latest:
            time.sleep(0.01)
        return super().write_data(*given)
