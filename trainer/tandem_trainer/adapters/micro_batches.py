"""A rank's share of each global batch, cut into micro-batches for a library that accumulates gradients in its own way.

The global batch is the same whatever the number of ranks, so what changes with it is how much each rank has to do.
Every rank makes the same number of micro-batches in every step, because these libraries count steps by counting them.
Their sizes differ by one at most. One that would be empty gets a sample that stands in, whose loss counts for nothing.

Each micro-batch is put together by the library's own collate function, in the loader workers: a batch that was padded,
or laid end to end, cannot be cut any more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem_trainer.batch import Batch
from tandem_trainer.data.feeding import Collate


@dataclass(frozen=True)
class MicroBatch:
    """A part of a rank's share."""

    data: Any
    """What the collate function made of it, on the session's device."""
    samples: int
    """How many samples it has; 0 where one stands in."""
    number: int
    """Its place in the step, from 0."""
    batch: Batch
    """The step."""
    is_last: bool
    """No other one of this step follows."""

    def scale(self, world_size: int) -> float:
        """What a mean over its samples is multiplied with, for a gradient that is averaged over ranks and summed over
        micro-batches to be that of the mean over the global batch."""
        return self.samples * world_size / self.batch.size


def number_of(global_batch: int, world_size: int, most: int) -> int:
    """The number of micro-batches of a step on each rank, with at most `most` samples each."""
    return math.ceil(math.ceil(global_batch / world_size) / most)


def cuts(count: int, parts: int) -> list[tuple[int, int]]:
    """Start and end of each of `parts` micro-batches among `count` samples."""
    return [(part * count // parts, (part + 1) * count // parts) for part in range(parts)]


@dataclass(frozen=True)
class CollateParts:
    """Collates the samples of a share into a list of micro-batches."""

    collate: Collate
    parts: int

    def __call__(self, samples: Sequence[Any]) -> list[Any]:
        """A micro-batch for each part; where it is empty, of the first sample."""
        return [self.collate(list(samples[start:end] or samples[:1])) for start, end in cuts(len(samples), self.parts)]


def micro_batches(batch: Batch) -> list[MicroBatch]:
    """The micro-batches of a step whose samples went through `CollateParts`."""
    sizes = [end - start for start, end in cuts(len(batch), len(batch.data))]
    return [
        MicroBatch(data, size if batch.weight else 0, number, batch, number == len(sizes) - 1)
        for number, (data, size) in enumerate(zip(batch.data, sizes, strict=True))
    ]
