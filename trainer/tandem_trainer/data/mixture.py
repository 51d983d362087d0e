"""A mixture: samples of several sources, each with a share of the training.

The data set is the sources one after the other, so the id of a sample identifies its source. An epoch takes as many
samples as the sources have together, and of each source its share of them. A source is read in passes, each a
permutation of its own, and continues in the next epoch where it stopped: no sample is taken a second time before all
were taken once. The samples of an epoch are shuffled as a whole.

So the samples of a step are a function of seed, epoch and position alone (docs/decisions/0045-mixtures.md).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem_trainer.data.keyed import mixed

ORDER, SOURCE = 1, 2
"""Purpose of a seed: the order of an epoch, or the passes of a source."""


class Mixture:
    """Sources with weights.

    Args:
        samples: number of samples of each source, at least one.
        weights: weight of each source, greater than 0. Only their ratios matter.

    Raises:
        ValueError: a source has so small a share that an epoch takes none of its samples.
    """

    def __init__(self, samples: Sequence[int], weights: Sequence[float]) -> None:
        self.samples = tuple(samples)
        self.taken = apportioned(sum(samples), weights)
        """Number of samples that an epoch takes of each source."""
        if 0 in self.taken:
            raise ValueError(
                f"source {self.taken.index(0)} has so small a weight that none of the {sum(samples):,} samples of an "
                "epoch comes from it"
            )

    def ids(self, seed: int, epoch: int) -> Tensor:
        """Compute the sample ids of an epoch, in order. [samples of all sources], int64."""
        parts, first = [], 0
        for source, (samples, count) in enumerate(zip(self.samples, self.taken, strict=True)):
            parts.append(
                _drawn_samples(mixed(seed, SOURCE, source), samples, epoch * count, (epoch + 1) * count) + first
            )
            first += samples
        return torch.cat(parts)[_permutation(mixed(seed, ORDER, epoch), sum(self.taken))]


def apportioned(count: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide a number by weights into whole numbers, each within one of its exact part (largest remainders)."""
    exact = [count * weight / sum(weights) for weight in weights]
    counts = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: (counts[source] - exact[source], source))
    for source in by_remainder[: count - sum(counts)]:
        counts[source] += 1
    return tuple(counts)


def _drawn_samples(seed: int, samples: int, start: int, end: int) -> Tensor:
    """Return the samples of a source between two positions in its endless sequence of passes. [end - start], int64."""
    passes = range(start // samples, -(-end // samples))
    shuffled = torch.cat([_permutation(mixed(seed, number), samples) for number in passes])
    return shuffled[start - passes.start * samples :][: end - start]


def _permutation(seed: int, size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
