"""Evaluates what unchanged.py saves: how large the weights have become. It reads what each library writes."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from tandem.evaluation import Mean, checkpoints

for checkpoint in checkpoints():
    saved = Path(checkpoint.folder)
    if saved.is_file():
        weights = torch.load(saved, weights_only=False, map_location="cpu")["state_dict"]
    else:
        weights = load_file(saved / "model.safetensors")
    values = torch.cat([one.float().flatten() for one in weights.values()])
    checkpoint.report(loss=Mean(values.square().sum().item(), len(values)))
