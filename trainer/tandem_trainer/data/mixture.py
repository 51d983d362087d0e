"""A mixture: samples of several sources, each with a share of the training.

The data set is the sources one after the other, so the id of a sample tells its source. An epoch takes as many samples
as the sources have together, and of each source its share of them. A source is read in passes, each a permutation of
its own, and goes on in the next epoch where it stopped: none of its samples is taken a second time before all were
taken. What an epoch takes is shuffled as a whole.

So the samples of a step are a function of seed, epoch and place alone (docs/decisions/0045-mixtures.md).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem_trainer.data.keyed import mixed

ORDER, SOURCE = 1, 2
"""What a seed is for."""


class Mixture:
    """Sources with weights.

    Args:
        samples: of each source; at least one.
        weights: of each source; greater than 0. Their ratios count.

    Raises:
        ValueError: a source is so small a part that an epoch takes none of its samples.
    """

    def __init__(self, samples: Sequence[int], weights: Sequence[float]) -> None:
        self.samples = tuple(samples)
        self.taken = apportioned(sum(samples), weights)
        """Samples of each source in an epoch."""
        if 0 in self.taken:
            raise ValueError(
                f"source {self.taken.index(0)} has so small a weight that none of the {sum(samples):,} samples of an "
                "epoch is taken from it"
            )

    def ids(self, seed: int, epoch: int) -> Tensor:
        """Sample ids of an epoch, in order. [samples of all sources], int64."""
        parts, first = [], 0
        for source, (samples, taken) in enumerate(zip(self.samples, self.taken, strict=True)):
            parts.append(_drawn(mixed(seed, SOURCE, source), samples, epoch * taken, (epoch + 1) * taken) + first)
            first += samples
        return torch.cat(parts)[_permutation(mixed(seed, ORDER, epoch), sum(self.taken))]


def apportioned(count: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide a number by weights into whole numbers, each within one of its exact part (largest remainders)."""
    exact = [count * weight / sum(weights) for weight in weights]
    found = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda one: (found[one] - exact[one], one))
    for one in by_remainder[: count - sum(found)]:
        found[one] += 1
    return tuple(found)


def _drawn(seed: int, samples: int, start: int, end: int) -> Tensor:
    """What a source gives from one place of its endless sequence of passes to another. [end - start], int64."""
    passes = range(start // samples, -(-end // samples))
    found = torch.cat([_permutation(mixed(seed, number), samples) for number in passes])
    return found[start - passes.start * samples :][: end - start]


def _permutation(seed: int, size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
