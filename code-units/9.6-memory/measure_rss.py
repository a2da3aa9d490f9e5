"""Train a small vision transformer for two steps and print by how many bytes this process grew at its peak.

Notebook 1 calls `grown`, which starts this file as a process of its own, because not every system can reset a peak:
python measure_rss.py BATCH LAYERS WIDTH
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
    """The largest resident memory that this process ever had, in bytes."""
    if platform.system() == "Windows":
        return psutil.Process().memory_info().peak_wset
    if platform.system() == "Linux":  # its ru_maxrss begins with what the starting process had
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of macOS, in bytes


def train(batch: int, layers: int, width: int) -> None:
    """Two steps of AdamW on 64 × 64 images in patches of 8."""
    model = VisionTransformer(64, 8, layers, 6, width, 4 * width, num_classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    images, labels = torch.randn(batch, 3, 64, 64), torch.zeros(batch, dtype=torch.long)
    for _ in range(2):
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def grown(batch: int, layers: int, width: int, **environment: str) -> int:
    """By how many bytes a process of its own grows at its peak while it trains this model."""
    asked = [sys.executable, __file__, str(batch), str(layers), str(width)]
    answer = subprocess.run(asked, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    if answer.returncode:
        raise RuntimeError(f"The process that was to be measured failed: {answer.stderr.strip()[-500:]}")
    return int(answer.stdout)


if __name__ == "__main__":
    train(2, 1, 96)  # a first small step starts the threads and loads the libraries, which are not ours to count
    before = psutil.Process().memory_info().rss
    train(*map(int, sys.argv[1:]))
    print(peak_rss() - before)
