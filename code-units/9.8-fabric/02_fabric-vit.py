"""Fine-tune a vision transformer with Fabric: 01, converted in three steps."""

import json
import time

import torch
from lightning.fabric import Fabric
from torch.nn import functional as F
from vit_parts import LEARNING_RATE, loaders, options, vit


@torch.no_grad()
def accuracy(model, loader) -> float:
    model.eval()
    right = total = 0
    for images, labels in loader:
        right += (model(images).argmax(dim=1) == labels).sum().item()
        total += len(labels)
    return right / total


def main(argv=None) -> dict:
    args = options(argv)
    fabric = Fabric(accelerator="auto", devices=args.devices)
    fabric.launch()
    torch.manual_seed(args.seed)

    train_loader, val_loader, test_loader = loaders(args)
    train_loader = fabric.setup_dataloaders(train_loader)  # with several processes, each gets its part
    val_loader, test_loader = fabric.setup_dataloaders(val_loader, test_loader, use_distributed_sampler=False)
    model = vit(args.data, pretrained=True)
    model = fabric.setup_module(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE[args.data])
    optimizer = fabric.setup_optimizers(optimizer)

    losses, seconds, accuracies = [], [], []
    for epoch in range(1, args.epochs + 1):
        model.train()
        start, of_steps = time.perf_counter(), []
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images), labels)  # logits (B, K), labels (B,)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            of_steps.append(loss.detach())
        losses += torch.stack(of_steps).tolist()  # waits for the device, once per epoch
        seconds.append(time.perf_counter() - start)
        accuracies.append(accuracy(model, val_loader))
        fabric.print(f"epoch {epoch} of {args.epochs}: loss {losses[-1]:.4f}, validation {accuracies[-1]:.1%}")

    result = {"losses": losses, "seconds": seconds, "val": accuracies, "test": accuracy(model, test_loader)}
    fabric.print(json.dumps(result))
    if args.save:
        fabric.save(args.save, {"model": model})
    return result


if __name__ == "__main__":
    main()
