"""Evaluates what unchanged.py and the adapters save: how large the weights have become. It reads what each library
writes."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from tandem.evaluation import Mean, checkpoints

for checkpoint in checkpoints():
    saved = Path(checkpoint.folder)
    if saved.is_file():
        weights = torch.load(saved, weights_only=False, map_location="cpu")["state_dict"]
    else:
        ours = saved / "weights.safetensors"
        weights = load_file(ours if ours.exists() else saved / "model.safetensors")
    values = torch.cat([one.float().flatten() for one in weights.values()])
    checkpoint.report(loss=Mean(values.square().sum().item(), len(values)))
