"""Two ranks with weights of their own under one scale: in each step of some, the gradient of one of them overflows.

Prints the weight and the scale after each step, as JSON.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tandem_trainer.optimizers import by_mesh
from tandem_trainer.strategies.scaler import AgreedScaler

STEPS = [("", 1.0), ("0", 2.0), ("", 3.0), ("1", 4.0), ("both", 5.0), ("", 6.0)]
"""Who overflows, and the gradient of the others."""


def main(fused: bool, clips: bool, splits: bool) -> None:
    dist.init_process_group("gloo")
    rank = os.environ["RANK"]
    weight, without = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    # As a stage that is elsewhere: with weights that have no gradient here.
    weights = [weight, without]
    mesh = init_device_mesh("cpu", (2,))
    half = nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, [Shard(0)]))
    if splits:
        # And one that is split, beside those that are not.
        weights.append(half)
    optimizer = torch.optim.SGD(by_mesh(weights), lr=1.0, fused=fused)
    scaler = AgreedScaler("cpu", init_scale=8.0, growth_interval=2)
    found = []
    for overflows, gradient in STEPS:
        scaled = scaler.scale(torch.tensor([gradient]))
        # A rank may have no gradient at all.
        weight.grad = None if gradient == 6.0 and rank == "1" else scaled
        mine = scaled.clone()
        if overflows in (rank, "both"):
            (mine if splits else weight.grad).fill_(torch.inf)
        if splits:
            half.grad = DTensor.from_local(mine, mesh, [Shard(0)])
        if clips:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.append([weight.item(), scaler.get_scale()])
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main("fused" in sys.argv, "clips" in sys.argv, "splits" in sys.argv)
