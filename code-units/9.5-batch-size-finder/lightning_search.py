"""Lightning's batch-size search on the small ViT, without its log lines and with a report of every batch."""

import logging
import tempfile
import warnings
from collections.abc import Callable

import lightning as L
import torch
from lightning.pytorch.tuner import Tuner
from torch.nn import functional as F
from torch.utils.data import DataLoader

from speedlab import machine
from speedlab.data import models


class Sized(L.LightningModule):
    """What `Tuner` needs: a module with a `batch_size` that its loader obeys."""

    def __init__(self, note: Callable[[str, int], None], samples: int = 4096):
        super().__init__()
        self.note, self.samples, self.batch_size = note, samples, 2
        self.model = models.vit("small", pretrained=False)

    def train_dataloader(self) -> DataLoader:
        return DataLoader([(torch.zeros(3, 32, 32), 0)] * self.samples, self.batch_size)

    def training_step(self, batch: tuple, batch_idx: int) -> torch.Tensor:
        self.note("begins", len(batch[0]))
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: object, batch: tuple, batch_idx: int) -> None:
        self.note("ran", len(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def tune(module: L.LightningModule, mode: str, **options) -> int:
    """What `Tuner.scale_batch_size` returns. It writes a checkpoint while it runs, so it gets a temporary folder."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)  # "GPU available: False" and the like
    warnings.filterwarnings("ignore", module="lightning")  # such as the advice to give the loader more workers
    where = "gpu" if machine.device().type == "cuda" else "cpu"
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(accelerator=where, devices=1, max_epochs=1, default_root_dir=folder, **quiet)
        return Tuner(trainer).scale_batch_size(module, mode=mode, **options)


def lightning_search(note: Callable[[str, int], None], mode: str, samples: int = 4096, **options) -> int:
    """The size that Lightning returns. Each batch calls `note("begins", size)` and, if done, `note("ran", size)`."""
    return tune(Sized(note, samples), mode, **options)
