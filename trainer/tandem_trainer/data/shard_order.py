"""The order of samples in shards: shuffled so that a step reads few of them, and computed without a list of samples.

An epoch takes the shards in a random order and cuts it into windows of a few shards. Each window is one random
permutation of its samples. So a step reads at most the shards of one window, or of two at a boundary, and every sample
comes once in an epoch. Both permutations are functions of the seed (tandem_trainer.data.keyed), so any part of an
epoch costs microseconds, and memory is some tens of bytes for each shard, however many samples there are
(docs/decisions/0061-shards.md).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem_trainer.data.keyed import Permutation, mixed

SHARDS, SAMPLES = 1, 2
"""Purpose of a seed: the order of the shards, or that of the samples in a window."""
Numbers = NDArray[np.int64]


class ShardOrder:
    """The order of the samples in shards.

    Args:
        sizes: number of samples of each shard; may be 0. Sample ids count through the shards.
        window: number of shards whose samples are shuffled together.
        index: digest of the index of the shards.
    """

    def __init__(self, sizes: Numbers, window: int, index: str) -> None:
        self.samples = int(sizes.sum())
        """Number of samples."""
        self.name = f"{index}/{window}"
        """Identifies the shards and the window: other ones are in another order."""
        self._sizes, self._window = sizes, window
        self._firsts = np.cumsum(sizes) - sizes
        self._epochs: dict[int, tuple[Numbers, Numbers]] = {}

    @property
    def description(self) -> str:
        """Description, by which ranks compare their orders."""
        return f"shards {self.name}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardOrder) and (self.name, self.samples) == (other.name, other.samples)

    def __hash__(self) -> int:
        return hash((self.name, self.samples))

    def ids(self, seed: int, start: int, end: int) -> Tensor:
        """Compute the sample ids at the positions from `start` to `end` (exclusive) of an epoch. [end - start], int64.

        Args:
            seed: seed of the epoch.
        """
        shards, ends = self._epoch(seed)
        parts = []
        while start < end:
            window, begin, stop = self._window_at(ends, start)
            until = min(end, stop)
            shuffled = Permutation(stop - begin, mixed(seed, SAMPLES, window)).values(start - begin, until - begin)
            places = shuffled.numpy() + begin
            numbers = np.searchsorted(ends, places, side="right")
            own = shards[numbers]
            parts.append(self._firsts[own] + places - (ends[numbers] - self._sizes[own]))
            start = until
        return torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0, dtype=torch.int64)

    def shards_from(self, seed: int, position: int) -> list[int]:
        """Return the shards of the window at a position of an epoch and of the one after it, in the order in which they
        are needed."""
        shards, ends = self._epoch(seed)
        window, _, _ = self._window_at(ends, position)
        begin = window * self._window
        return [int(shard) for shard in shards[begin : begin + 2 * self._window]]

    def _window_at(self, ends: Numbers, position: int) -> tuple[int, int, int]:
        """Return the number of the window at a position, its first position, and the one after its last."""
        window = int(np.searchsorted(ends, position, side="right")) // self._window
        begin = int(ends[window * self._window - 1]) if window else 0
        return window, begin, int(ends[min((window + 1) * self._window, len(ends)) - 1])

    def _epoch(self, seed: int) -> tuple[Numbers, Numbers]:
        """Return the shards of an epoch in their order, and the position after the last sample of each."""
        if seed not in self._epochs:
            # The epoch before stays, because a save may still be in it.
            for earlier in list(self._epochs)[:-1]:
                del self._epochs[earlier]
            shards = Permutation(len(self._sizes), mixed(seed, SHARDS)).values(0, len(self._sizes)).numpy()
            self._epochs[seed] = shards, np.cumsum(self._sizes[shards])
        return self._epochs[seed]
