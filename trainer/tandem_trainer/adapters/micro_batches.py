"""A rank's share of each global batch, cut into micro-batches for libraries that accumulate gradients in their own way.

The global batch does not depend on the number of ranks, so the work of each rank does. Every rank makes the same number
of micro-batches in every step, because these libraries count steps by them. Their sizes differ by at most one. A
micro-batch that would be empty gets one sample as a stand-in, whose loss has the weight 0.

The library's own collate function makes each micro-batch, in the loader workers: a batch that was padded or
concatenated cannot be cut any more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem_trainer.batch import Batch
from tandem_trainer.data.feeding import Collate, UncutCollate


@dataclass(frozen=True)
class CollatedMicroBatch:
    """A part of a rank's share."""

    data: Any
    """Result of the collate function, on the session's device."""
    samples: int
    """Number of samples; 0 for a stand-in."""
    number: int
    """Index in the step."""
    batch: Batch
    """The step's batch."""
    is_last: bool
    """Whether it is the last one of the step."""

    def scale(self, world_size: int) -> float:
        """Return the factor for a mean loss over the samples, so that its gradient, averaged over ranks and summed over
        micro-batches, is that of the mean over the global batch."""
        return self.samples * world_size / self.batch.size


def count_micro_batches(global_batch: int, world_size: int, max_samples: int) -> int:
    """Compute the number of micro-batches of a step on each rank, with at most `max_samples` samples each."""
    return math.ceil(math.ceil(global_batch / world_size) / max_samples)


def cuts(count: int, parts: int) -> list[tuple[int, int]]:
    """Return start and end of each of `parts` micro-batches among `count` samples."""
    return [(part * count // parts, (part + 1) * count // parts) for part in range(parts)]


@dataclass(frozen=True)
class CollateParts(UncutCollate):
    """Collate function for a share: makes a list of micro-batches."""

    collate: Collate
    parts: int

    def __call__(self, samples: Sequence[Any]) -> list[Any]:
        """Collate each part; an empty one is made of the first sample."""
        return [self.collate(list(samples[start:end] or samples[:1])) for start, end in cuts(len(samples), self.parts)]


def micro_batches(batch: Batch) -> list[CollatedMicroBatch]:
    """Return the micro-batches of a step whose samples went through `CollateParts`."""
    sizes = [end - start for start, end in cuts(len(batch), len(batch.data))]
    return [
        CollatedMicroBatch(data, size if batch.weight else 0, number, batch, number == len(sizes) - 1)
        for number, (data, size) in enumerate(zip(batch.data, sizes, strict=True))
    ]
