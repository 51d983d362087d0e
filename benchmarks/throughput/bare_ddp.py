"""The reference: a DistributedDataParallel loop with nothing around it. Started by torchrun.

It has the same model, data, seeds and threads as the run it is compared with, and the same tuned optimizer and gradient
buckets, so that only the loop differs: no log, no checkpoint, no restart, no progress. At the end rank 0 writes the end
time of each step.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from tandem.job.tasks import Data
from tandem_trainer.data import load
from tandem_trainer.malloc import keep_freed_memory
from tandem_trainer.models import build


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    for name in ("samples", "image-size", "batch-size", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--keep-memory", action="store_true", help="with the setting of the allocator that ours has")
    parser.add_argument("--times", type=Path, required=True, help="where rank 0 writes when each step ended")
    options = parser.parse_args()
    if options.keep_memory:
        keep_freed_memory()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = load(Data(name="synthetic", samples=options.samples, image_size=options.image_size), "train")
    model = build(options.model, 1, options.image_size, 10).train()
    if world_size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(options.samples, generator=generator)
    cursor = 0
    times = []
    for _ in range(options.steps):
        if cursor + options.batch_size > options.samples:
            order, cursor = torch.randperm(options.samples, generator=generator), 0
        ids = order[cursor : cursor + options.batch_size].chunk(world_size)[rank]
        cursor += options.batch_size
        loss = F.cross_entropy(model(data.images[ids]), data.labels[ids])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.time())
    if rank == 0:
        options.times.write_text(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
