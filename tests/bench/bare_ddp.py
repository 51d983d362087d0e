"""The reference: a DistributedDataParallel loop with nothing around it. Started by torchrun; prints samples a second.

It has the same model, data, seeds and threads as the run it is compared with, and the same tuned optimizer and gradient
buckets, so that what differs is the loop alone: no log, no checkpoint, no restart, no progress.
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from tandem.memory import keep_freed_memory
from tandem.tasks import Data
from tandem_trainer.data import load
from tandem_trainer.models import build


def main(model_name: str, samples: int, image_size: int, batch_size: int, steps: int, skip: int, keep: int) -> None:
    if keep:
        keep_freed_memory()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = load(Data(name="synthetic", samples=samples, image_size=image_size), "train")
    model = build(model_name, 1, image_size, 10).train()
    if world_size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(samples, generator=generator)
    cursor, started = 0, 0.0
    for step in range(steps):
        if step == skip:
            started = time.perf_counter()
        if cursor + batch_size > samples:
            order, cursor = torch.randperm(samples, generator=generator), 0
        ids = order[cursor : cursor + batch_size].chunk(world_size)[rank]
        cursor += batch_size
        loss = F.cross_entropy(model(data.images[ids]), data.labels[ids])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"throughput={(steps - skip) * batch_size / (time.perf_counter() - started):.1f} loss={loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
