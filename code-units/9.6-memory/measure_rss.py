"""Train a small vision transformer for two steps and print by how many bytes resident memory grew at its peak.

Notebook 1 calls `grown`, which runs this file in a separate process, because not every system can reset a peak.
Usage: python measure_rss.py BATCH LAYERS WIDTH
"""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import psutil
import torch
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer


def peak_rss() -> int:
    """The largest resident memory that this process has had so far, in bytes."""
    if platform.system() == "Windows":
        return psutil.Process().memory_info().peak_wset
    if platform.system() == "Linux":  # there, ru_maxrss starts at what the parent process had
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on macOS, in bytes


def train(batch: int, layers: int, width: int) -> None:
    """Train for two AdamW steps on 64 × 64 images with patches of 8 × 8."""
    model = VisionTransformer(64, 8, layers, 6, width, 4 * width, num_classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    images, labels = torch.randn(batch, 3, 64, 64), torch.zeros(batch, dtype=torch.long)
    for _ in range(2):
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def grown(batch: int, layers: int, width: int, **environment: str) -> int:
    """By how many bytes a separate process's resident memory grows, at its peak, while it trains this model."""
    asked = [sys.executable, __file__, str(batch), str(layers), str(width)]
    answer = subprocess.run(asked, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    if answer.returncode:
        raise RuntimeError(f"The measured process failed: {answer.stderr.strip()[-500:]}")
    return int(answer.stdout)


if __name__ == "__main__":
    train(2, 1, 96)  # small first steps start the threads and load the libraries, which must not count
    before = psutil.Process().memory_info().rss
    train(*map(int, sys.argv[1:]))
    print(peak_rss() - before)
