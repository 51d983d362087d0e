"""`python -m tests.support.exchanged`, as one of four ranks: stages its part of tensors that ranks hold together, and
ends with 1 where a byte of it is not that of the whole file.

Chunks have few bytes, so that there are as many parts as ranks, and tensors lie in several of them.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tandem_trainer.checkpoint import staging
from tandem_trainer.checkpoint.exchange import Exchange
from tandem_trainer.checkpoint.sharding import StageTensor
from tandem_trainer.checkpoint.staging import FileLayout, Staging, shared_memory

RANKS, CHUNK = 4, 256
DEVICE = torch.device("cpu")


def files(rank: int, whole: bool) -> dict[str, dict[str, Tensor]]:
    """Tensors of all kinds, or the same as wholes."""
    line, square = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))

    def split(tensor: Tensor, mesh: object, *placements: object) -> Tensor:
        return tensor if whole else distribute_tensor(tensor, mesh, placements)  # type: ignore[arg-type]

    def staged(tensor: Tensor, owner: int, *others: int) -> Tensor:
        is_here = rank in (owner, *others)
        return tensor if whole else StageTensor.wrap(tensor if is_here else tensor.to("meta"), (owner,), DEVICE)

    numbers = torch.arange(3000, dtype=torch.float32)
    return {
        "weights": {
            "even": split(numbers[:800].view(100, 8), line, Shard(0)),
            "uneven": split(numbers[:91].view(13, 7), line, Shard(0)),
            "fewer rows than ranks": split(numbers[:6].view(2, 3), line, Shard(0)),
            "half": split(numbers[:512].to(torch.bfloat16).view(64, 8), line, Shard(0)),
            "copied": split(numbers[:900].view(30, 30), square, Replicate(), Shard(0)),
            "in two ways": split(numbers[:400].view(20, 20), square, Shard(0), Shard(1)),
            "columns": split(numbers[:300].view(10, 30), line, Shard(1)),
            "nothing": split(numbers[:0].view(0, 3), line, Shard(0)),
            "on all": numbers[:50].clone(),
        },
        "moments": {
            "of a stage": staged(numbers[:700].clone(), 1),
            "of two": staged(numbers[:333].clone(), 0, 2),
            "steps": split(torch.arange(40), line, Shard(0)),
        },
    }


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    staging.CHUNK_BYTES = CHUNK
    staging.chunks = lambda size: -(-size // CHUNK)
    staging.MIN_PART = CHUNK
    split, whole = files(rank, whole=False), files(rank, whole=True)
    layout = FileLayout.from_files(split, RANKS)
    assert layout.writers(RANKS) == [0, 1, 2, 3]
    part = layout.part_of(rank, RANKS)
    assert part is not None
    found, wanted = (Staging(shared_memory(), split, layout, part) for _ in range(2))
    exchange = Exchange(split, layout, rank, RANKS)
    for _ in range(2):
        found.copy(split, exchange.receive(split))
    wanted.copy(whole)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if torch.equal(found._flat, wanted._flat) else 1)


if __name__ == "__main__":
    main()
