"""Fine-tune DistilBERT on movie reviews with Lightning, on as many processes as torchrun starts."""

import json
import logging
import os
import sys
import warnings

import lightning as L
import torch
from finetune_common import leave, parse, reviews
from torch.utils.data import DataLoader

from speedlab import machine
from speedlab.data import models

warnings.filterwarnings("ignore", module="lightning")  # advice on the number of workers
for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Classifier(L.LightningModule):
    def __init__(self, model: torch.nn.Module, learning_rate: float, seed: int):
        super().__init__()
        self.model, self.learning_rate, self.seed, self.losses = model, learning_rate, seed, []

    def on_train_start(self):
        torch.manual_seed(self.seed + self.global_rank)  # for dropout: each rank draws its own masks

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.losses.append(loss.detach())
        return loss

    def test_step(self, batch, batch_idx):
        found = self.model(**batch).logits.argmax(dim=-1) == batch["labels"]
        self.log("accuracy", found.float().mean(), sync_dist=True, batch_size=len(found))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main(argv: list[str]) -> dict:
    args = parse(argv, __doc__)
    world_size = int(os.environ["WORLD_SIZE"])
    train_rows, test_rows, collate = reviews(args)
    L.seed_everything(args.seed, verbose=False)
    module = Classifier(models.distilbert(pretrained=not args.random_init), args.lr, args.seed).train(args.dropout)
    train_loader = DataLoader(train_rows, args.batch // world_size, shuffle=True, collate_fn=collate)
    trainer = L.Trainer(
        strategy="ddp",
        accelerator=machine.device().type,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=world_size // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train_loader)
    sampler = type(trainer.train_dataloader.sampler).__name__
    found = trainer.test(module, DataLoader(test_rows, 100, collate_fn=collate), verbose=False)
    losses = trainer.strategy.reduce(torch.stack(module.losses), reduce_op="mean")
    return {"losses": losses.tolist(), "sampler": sampler, "accuracy": found[0]["accuracy"]}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
    leave()
