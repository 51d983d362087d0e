"""The reference: the loop that one writes with torch alone, or with accelerate. Started by torchrun.

Model, passages, seeds, optimizer, clipping and threads are those of the run it is compared with, so that only the loop
and the wrapping of the model differ: no log, no checkpoint, no restart. `--accelerate` follows accelerate's
documentation: a DataLoader over the passages, and everything through `prepare`. At the end rank 0 writes the end time
of each step.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.strategies.work import CLIP_NORM, LEARNING_RATE, SMALL, STRATEGIES, WEIGHT_DECAY


def batches(passages: Tensor, rank: int, world_size: int) -> Iterator[Tensor]:
    """Generate this rank's share of shuffled batches, without end: [its samples, length + 1], uint8."""
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(len(passages), generator=generator)
        for ids in order.split(SMALL.batch_size):
            if len(ids) == SMALL.batch_size:
                yield passages[ids.chunk(world_size)[rank]]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, equal on every side."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def loss_of(model: nn.Module, passages: Tensor) -> Tensor:
    """Mean loss over all tokens, a scalar."""
    tokens = passages.long()
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def by_hand(strategy: str, steps: int) -> list[float]:
    """Train with torch alone; returns the end time of each step, in seconds since the epoch."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    task = SMALL.task
    passages = task.data("train").tensors[0]
    network = task.model().train()
    model: nn.Module = network
    if strategy == "fsdp":
        mesh = init_device_mesh("cpu", (world_size,))
        for block in network.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(model)
    ends = []
    for _, share in zip(range(steps), batches(passages, rank, world_size), strict=False):
        loss_of(model, share).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.time())
    dist.barrier()
    return ends


def with_accelerate(steps: int) -> list[float]:
    """Train with accelerate and DistributedDataParallel; returns the end time of each step, in seconds since the epoch.

    Not with its plugin for fully_shard: on CPUs accelerate 1.15 ignores it silently, and uses DistributedDataParallel.
    """
    # Only here: the loop by hand needs no accelerate.
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    task = SMALL.task
    model = task.model().train()
    per_rank = SMALL.batch_size // accelerator.num_processes
    loader = DataLoader(task.data("train"), batch_size=per_rank, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    ends: list[float] = []
    while len(ends) < steps:
        for (share,) in loader:
            accelerator.backward(loss_of(model, share))
            accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.time())
            if len(ends) == steps:
                break
    accelerator.wait_for_everyone()
    return ends


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--accelerate", action="store_true")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--times", type=Path, required=True, help="where rank 0 writes when each step ended")
    options = parser.parse_args()
    if options.accelerate and options.strategy != "ddp":
        parser.error("accelerate makes a DistributedDataParallel of every model on CPUs")
    ends = with_accelerate(options.steps) if options.accelerate else by_hand(options.strategy, options.steps)
    if dist.get_rank() == 0:
        options.times.write_text(json.dumps(ends))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
