"""Fine-tune a vision transformer in plain PyTorch: 00 with pretrained weights."""

import json
import time

import torch
from torch.nn import functional as F
from vit_parts import LEARNING_RATE, loaders, options, vit

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def accuracy(model, loader) -> float:
    model.eval()
    right = total = 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        right += (model(images).argmax(dim=1) == labels).sum().item()
        total += len(labels)
    return right / total


def main(argv=None) -> dict:
    args = options(argv, most_devices=1)
    torch.manual_seed(args.seed)

    train_loader, val_loader, test_loader = loaders(args)
    model = vit(args.data, pretrained=True)
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE[args.data])

    losses, seconds, accuracies = [], [], []
    for epoch in range(1, args.epochs + 1):
        model.train()
        start, of_steps = time.perf_counter(), []
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)  # logits (B, K), labels (B,)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            of_steps.append(loss.detach())
        losses += torch.stack(of_steps).tolist()  # waits for the device, once per epoch
        seconds.append(time.perf_counter() - start)
        accuracies.append(accuracy(model, val_loader))
        print(f"epoch {epoch} of {args.epochs}: loss {losses[-1]:.4f}, validation {accuracies[-1]:.1%}")

    result = {"losses": losses, "seconds": seconds, "val": accuracies, "test": accuracy(model, test_loader)}
    print(json.dumps(result))
    if args.save:
        torch.save({"model": model.state_dict()}, args.save)
    return result


if __name__ == "__main__":
    main()
