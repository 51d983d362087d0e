"""Orders of an epoch that are no plain shuffle: weighted samples, samples of similar length together, your own.

An order is a function of seed and epoch:

    def easy_first(seed: int, epoch: int) -> list[int]:
        return sorted(range(len(dataset)), key=difficulty.__getitem__)

It returns either the sample ids of the epoch in their order, which are cut into global batches, or a list of global
batches, each a list of ids. It may return ids more than once, leave some out, and give each epoch another number of
them. Every rank calls it, and every start does, so what it returns must follow from seed and epoch alone: then a run
sees the same batches whatever the number of ranks and restarts (tandem_trainer.data.listing).

An order that has a length, the number of what it returns for each epoch, lets the run know its total number of steps
from the beginning.

Rejected: samplers of torch's kind (an iterator with a state of its own, which belongs to one world size and one start).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem_trainer.data.keyed import mixed

EpochOrder = Callable[[int, int], Any]
"""(seed, epoch) → ids, [N] (a sequence, an array or a tensor of whole numbers), or a sequence of such, the batches."""

BATCHES_IN_A_POOL = 100
"""Samples of so many batches are sorted by length together: enough to find neighbours, few enough to stay random."""


@dataclass(frozen=True, eq=False)
class Weighted:
    """Samples drawn with a probability that is proportional to their weight, anew in each epoch.

    Args:
        weights: [samples of the data set], none negative.
        replacement: a sample may come more than once in an epoch. Its augmentation and dropout then differ each time.
        samples: in an epoch; default: as many as there are weights.

    Raises:
        ValueError: a weight is negative or not finite, or there are not enough of them above 0.
    """

    weights: Sequence[float] | NDArray[Any] | Tensor
    replacement: bool = True
    samples: int | None = None

    def __post_init__(self) -> None:
        weights = self._array()
        positive = int((weights > 0).sum())
        if weights.ndim != 1 or not np.isfinite(weights).all() or (weights < 0).any() or not positive:
            raise ValueError("weights are one number for each sample, none negative, not all 0")
        if len(self) < 1:
            raise ValueError(f"samples={self.samples}: an epoch has at least one")
        if not self.replacement and len(self) > positive:
            raise ValueError(
                f"{len(self)} samples cannot be drawn without replacement from {positive} with a weight above 0"
            )

    def __len__(self) -> int:
        return self._array().shape[0] if self.samples is None else self.samples

    def __call__(self, seed: int, epoch: int) -> Tensor:
        """The ids of an epoch: [samples], int64."""
        weights, generator = self._array(), _generator(seed, epoch)
        if self.replacement:
            # Not torch.multinomial, which takes at most 2^24 weights, in single precision.
            sums = weights.cumsum()
            drawn = torch.rand(len(self), dtype=torch.float64, generator=generator).numpy() * sums[-1]
            ids = np.searchsorted(sums, drawn, side="right")
            return torch.from_numpy(np.minimum(ids, np.flatnonzero(weights)[-1]))
        # The sample with the smallest of exponential times is drawn first (Efraimidis and Spirakis, 2006).
        times = -torch.log1p(-torch.rand(len(weights), dtype=torch.float64, generator=generator)).numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.where(weights > 0, times / weights, np.inf)
        return torch.from_numpy(np.argsort(times, kind="stable")[: len(self)].copy())

    def _array(self) -> NDArray[np.float64]:
        return np.asarray(self.weights, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Bucketed:
    """Each sample once in an epoch, in batches of samples of similar length, so that little is padded.

    An epoch is shuffled and divided into pools, a pool is sorted by length and cut into batches, and the batches of all
    pools are shuffled. So both what is together in a batch and the order of the batches differ in each epoch.

    Args:
        lengths: [samples of the data set], at least 1 each, in whatever unit.
        samples: in a global batch.
        tokens: instead: the most that a global batch has when all of it is padded to its longest sample.
        pool: samples that are sorted together; default: those of some 100 batches.

    Raises:
        ValueError: there are neither samples nor tokens, or both; or a sample is longer than the tokens.
    """

    lengths: Sequence[int] | NDArray[Any] | Tensor
    samples: int | None = None
    tokens: int | None = None
    pool: int | None = None

    def __post_init__(self) -> None:
        lengths = self._array()
        if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1:
            raise ValueError("lengths are one number of at least 1 for each sample")
        if (self.samples is None) == (self.tokens is None):
            raise ValueError("give Bucketed either samples=, the size of a global batch, or tokens=, its most tokens")
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"samples={self.samples}: a global batch has at least one")
        if self.tokens is not None and lengths.max() > self.tokens:
            longest = int(lengths.argmax())
            raise ValueError(
                f"sample {longest} is {lengths[longest]} long, and a global batch may have tokens={self.tokens}"
            )

    def __len__(self) -> int:
        """Batches of an epoch.

        Raises:
            TypeError: they differ from epoch to epoch.
        """
        if self.samples is None:
            raise TypeError("batches of so many tokens are not as many in each epoch")
        count, pool = len(self._array()), self._pool()
        whole = count // pool * pool
        return whole // pool * -(-pool // self.samples) + -(-(count - whole) // self.samples)

    def __call__(self, seed: int, epoch: int) -> list[Tensor]:
        """The batches of an epoch: each [samples in it], int64."""
        lengths, generator = self._array(), _generator(seed, epoch)
        shuffled = torch.randperm(len(lengths), generator=generator).numpy()
        batches: list[NDArray[np.int64]] = []
        for start in range(0, len(shuffled), self._pool()):
            pool = shuffled[start : start + self._pool()]
            pool = pool[np.argsort(lengths[pool], kind="stable")]
            batches += np.split(pool, self._cuts(lengths[pool]))
        order = torch.randperm(len(batches), generator=generator).tolist()
        # A rank takes the samples at neighbouring places: it should not always get the longest ones.
        return [_shuffled(torch.from_numpy(batches[number]), generator) for number in order]

    def _cuts(self, lengths: NDArray[np.int64]) -> list[int]:
        """Where a batch ends and another one begins, in a pool that is sorted by length."""
        if self.samples is not None:
            return list(range(self.samples, len(lengths), self.samples))
        assert self.tokens is not None
        cuts, start = [], 0
        for place, length in enumerate(lengths.tolist()):
            if (place + 1 - start) * length > self.tokens:
                cuts.append(place)
                start = place
        return cuts

    def _pool(self) -> int:
        if self.pool is not None:
            return max(1, self.pool)
        if self.samples is not None:
            return BATCHES_IN_A_POOL * self.samples
        assert self.tokens is not None
        return BATCHES_IN_A_POOL * max(1, int(self.tokens / self._array().mean()))

    def _array(self) -> NDArray[np.int64]:
        return np.asarray(self.lengths, dtype=np.int64)


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(mixed(seed, epoch))


def _shuffled(batch: Tensor, generator: torch.Generator) -> Tensor:
    return batch[torch.randperm(len(batch), generator=generator)]
