"""Which samples belong to which step: a function of seed and step alone, whatever the number of ranks.

An epoch is one permutation of the training samples; a step takes the next `global_batch_size` of it (the last step of
an epoch takes what is left); the ranks that are there split that. So a run that shrinks and grows sees every sample
exactly once in each epoch, and after a restart goes on with the very batch that an undisturbed run would have seen.
Rejected: DistributedSampler, whose split depends on the world size and which pads or drops the remainder.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.manifest import DataPosition


@dataclass(frozen=True)
class Order:
    """The order of one run."""

    samples: int
    """Training samples."""
    global_batch_size: int
    """Samples in one optimizer step."""
    seed: int
    """Seed of the permutations."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass, the last of which may be smaller."""
        return -(-self.samples // self.global_batch_size)

    def position(self, step: int) -> DataPosition:
        """Where the data stands after `step` steps."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return DataPosition(seed=self.seed, epoch=epoch, cursor=within * self.global_batch_size)

    def step_at(self, position: DataPosition) -> int:
        """The step that a position of this same order belongs to.

        Raises:
            ValueError: the position is not one of this order's.
        """
        step = position.epoch * self.steps_per_epoch + position.cursor // self.global_batch_size
        if self.position(step) != position:
            raise ValueError(f"{position} is no position of a run with {self}")
        return step

    def permutation(self, epoch: int) -> Tensor:
        """The sample ids of one epoch, in order. [samples], int64."""
        generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
        return torch.randperm(self.samples, generator=generator)


class Batches:
    """Walks an order step by step, keeping the permutation of the current epoch."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.int64)

    def ids(self, step: int) -> Tensor:
        """Sample ids of the global batch of a step (counted from 0). [at most global_batch_size], int64."""
        position = self._order.position(step)
        if position.epoch != self._epoch:
            self._epoch, self._permutation = position.epoch, self._order.permutation(position.epoch)
        return self._permutation[position.cursor : position.cursor + self._order.global_batch_size]


def share(ids: Tensor, rank: int, world_size: int) -> Tensor:
    """One rank's part of a global batch; sizes differ by one at most, and may be 0."""
    count = len(ids)
    return ids[rank * count // world_size : (rank + 1) * count // world_size]


def digest(ids: Tensor) -> str:
    """Sixteen hex digits that tell whether two steps saw the same samples in the same order."""
    return hashlib.blake2b(ids.numpy().tobytes(), digest_size=8).hexdigest()


def mixed(*parts: int) -> int:
    """A 63-bit seed from several numbers, so that neighbouring numbers give unrelated streams."""
    data = b"".join(part.to_bytes(8, "little") for part in parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
