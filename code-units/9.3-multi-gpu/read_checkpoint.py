"""Read a sharded checkpoint on any number of processes, into a model that is sharded over these."""

import json
import sys

import torch
import torch.distributed.checkpoint as dcp
from finetune_fsdp import shard
from finetuning import connect, leave
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

from speedlab import models


def main(folder: str) -> dict:
    _, _, device = connect()
    model = models.distilbert(pretrained=False).to(device)  # with other weights, until they are read
    shard(model, MixedPrecisionPolicy(), device)
    optimizer = torch.optim.AdamW(model.parameters())
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)  # reads into these tensors
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    norm = torch.nn.utils.get_total_norm(model.parameters()).full_tensor().item()
    second = [state["exp_avg_sq"] for state in optimizer.state.values()]
    report = {
        "norm": norm,
        "moments": torch.nn.utils.get_total_norm(second).full_tensor().item(),
        "numel": sum(p.to_local().numel() for p in model.parameters()),
        "steps": sorted({int(state["step"]) for state in optimizer.state.values()}),
    }
    return report


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
    leave()
