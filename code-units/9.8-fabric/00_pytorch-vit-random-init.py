"""Train a vision transformer from scratch in plain PyTorch."""

import argparse
import json
import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from speedlab import compat, count, data, machine
from speedlab.data import models


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", choices=["quick", "full"], default=machine.scale())
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="images a step, over all devices")
    parser.add_argument("--devices", type=int, default=1, help="processes, each with a GPU where there is one")
    parser.add_argument("--images", type=int, default=10**6, help="train on the first so many images only")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if min(args.epochs, args.batch, args.devices) < 1 or args.images < args.batch:
        parser.error("epochs, batch and devices must be 1 or more, and images must fill a batch")
    if args.devices > 1:
        parser.error("plain PyTorch trains on one device here; from 02 on, Fabric takes several")
    return args


@torch.no_grad()
def accuracy(model: torch.nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    right = total = 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        right += (model(images).argmax(dim=1) == labels).sum()
        total += len(labels)
    return (right / total).item()


def main(argv: list[str]) -> dict:
    args = parse(argv)
    full, device = args.scale == "full", machine.device()
    generator = machine.seed_everything(args.seed)

    dataset = data.images("cifar10" if full else "digits")
    train_set = Subset(dataset.train, range(min(args.images, len(dataset.train))))
    own_batch, workers = args.batch // args.devices, 8 if full else 0
    train_loader = DataLoader(train_set, own_batch, True, generator=generator, drop_last=True, num_workers=workers)
    val_loader = DataLoader(dataset.val, 100, num_workers=workers)

    model = models.vit("base" if full else "small", pretrained=False)
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-5 if full else 1e-3)

    losses, seconds, accuracies, clock = [], [], [], machine.synchronised_clock(device)
    for epoch in range(1, args.epochs + 1):
        model.train()
        start = clock()
        for step, (images, labels) in enumerate(train_loader, start=1):
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)  # logits (B, K), labels (B,)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if step % 100 == 0 or step == len(train_loader):
                rate = step * args.batch / (clock() - start)
                print(f"epoch {epoch}, step {step} of {len(train_loader)}: {rate:,.0f} images/s")
        seconds.append(clock() - start)
        accuracies.append(accuracy(model, val_loader, device))
        print(f"epoch {epoch} of {args.epochs}: last loss {loss.item():.4f}, accuracy {accuracies[-1]:.1%}")

    losses = torch.stack(losses)
    state = torch.tensor([count.state_bytes(model, optimizer).total])  # parameters, gradients, Adam's moments
    result = {"losses": losses.tolist(), "accuracies": accuracies, "seconds": seconds, "state_bytes": state.tolist()}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    # where a CPU has no 16-bit hardware, 16-bit products are computed in fp32 and rounded: the same numbers, in time
    with compat.half_products(machine.device()):
        main(sys.argv[1:])
