"""Takes steps of Muon with matrices that ranks split, and with whole ones and the same gradients.

Prints, as JSON, how far they are apart, and their momentum; and for how many matrices there is one.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tandem_trainer.checkpoint.sharding import full_tensor
from tandem_trainer.sharded_muon import ShardedMuon

SHAPES = ((48, 16), (16, 48), (2, 8), (7, 5), (32, 32), (1, 4), (9, 9))
STEPS = 4
SETTINGS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}


BUFFER = "momentum_buffer"


def distance(part: Tensor, one: Tensor) -> float:
    return float((full_tensor(part) - one.detach()).abs().max())


def main(kind: str) -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    sizes = (2, ranks // 2) if kind in ("hybrid", "tensor") else (ranks,)
    mesh = init_device_mesh("cpu", sizes)
    placements: dict[str, tuple[Placement, ...]] = {
        "rows": (Shard(0),),
        "columns": (Shard(1),),
        "hybrid": (Replicate(), Shard(0)),
        "tensor": (Shard(0), Shard(1)),
    }
    drawn = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape, generator=drawn)) for shape in SHAPES]
    split = [nn.Parameter(distribute_tensor(one.detach().clone(), mesh, placements[kind])) for one in matrices]
    # One that no rank splits, and one that gets no gradient.
    matrices += [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))]
    split += [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))]
    ours = ShardedMuon(split, **SETTINGS)
    theirs = torch.optim.Muon(matrices, **SETTINGS, adjust_lr_fn="match_rms_adamw")
    for _ in range(STEPS):
        for matrix, part in zip(matrices[:-1], split[:-1], strict=True):
            matrix.grad = torch.randn(matrix.shape, generator=drawn)
            part.grad = (
                distribute_tensor(matrix.grad.clone(), part.device_mesh, part.placements)
                if isinstance(part.data, DTensor)
                else matrix.grad.clone()
            )
        ours.step()
        theirs.step()  # type: ignore[no-untyped-call]
    learned = zip(split[:-1], matrices[:-1], strict=True)
    apart = [distance(part, one) for part, one in zip(split, matrices, strict=True)]
    momentum = [distance(ours.state[part][BUFFER], theirs.state[one][BUFFER]) for part, one in learned]
    print(json.dumps([max(apart), max(momentum), len(ours.state)]), flush=True)
    dist.destroy_process_group()


main(sys.argv[1])
