"""A writer of checkpoints that does not begin before it is told to, so that what happens meanwhile needs no clock."""

import threading

import torch.distributed.checkpoint as dcp


class HeldWriter(dcp.FileSystemWriter):
    """Writes to a folder as DCP does, once `free` is set; a save that waits for its write goes on in a minute."""

    def __init__(self, folder: str):
        super().__init__(folder)
        self.free = threading.Event()

    def write_data(self, *given):
        self.free.wait(60)
        return super().write_data(*given)
