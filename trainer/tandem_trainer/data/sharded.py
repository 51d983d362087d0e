"""A data set in shards, in a folder or in a bucket, of any size: samples are read by index, and the order of an epoch
reads few shards at a time.

    from tandem_trainer.data.sharded import Sharded

    session.batches(Sharded("s3://bucket/corpus/train"), 64, epochs=1)

A task's `data` may return one, too. Shards are those of litdata or of MosaicML's streaming. Which samples a step has
follows from seed and step alone, as for any data set with indices, so a run resumes at any step without reading what
came before (docs/decisions/0061-shards.md).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tandem.rundir.durable import is_transient
from tandem_trainer.data.shard_files import ShardFiles, parse_index
from tandem_trainer.data.shard_order import ShardOrder
from tandem_trainer.data.shard_readers import reader_of
from tandem_trainer.failure import ConfigurationError, UnusableInput

WINDOW = 8
"""Default number of shards whose samples are shuffled together."""
CACHED_WINDOWS = 3
"""Minimum number of windows that a cache holds: the one that is planned, the next one, which is brought meanwhile, and
the one before, which loader workers may still read."""
RETRIES = 3
"""Number of times that a shard is brought again which another process has removed from the cache."""


class Sharded:
    """Samples in shards, read by index.

    Args:
        source: a folder, or the URL of a bucket (`s3://bucket/prefix`, `gs://…`, `az://…`), with an `index.json`.
        window: number of shards whose samples are shuffled together.
        block: tokens of a sample, for tokens of litdata (`TokensLoader`).
        cache: folder for shards of a bucket, shared by the processes of a node; default: in the temporary folder.
        cache_bytes: maximum size of that folder; default: three windows of the largest shard, which
            is the minimum.
        transform: applied to each sample as the library returns it.

    Raises:
        UnusableInput: there is no such data set, or it cannot be read.
        ConfigurationError: the library of its format is not installed, or an argument does not fit.
        OSError: the disk or the bucket fails.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        window: int = WINDOW,
        block: int | None = None,
        cache: str | Path | None = None,
        cache_bytes: int | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        for name, number in (("window", window), ("block", block)):
            if number is not None and number < 1:
                raise ConfigurationError(f"{name}={number}: it must be at least 1")
        self._files = ShardFiles(str(source), None if cache is None else Path(cache).expanduser())
        index = parse_index(self._files.read_index(), self._files.source, block)
        self._reader = reader_of(index, CACHED_WINDOWS * window, block)
        self._transform = transform
        minimum = CACHED_WINDOWS * min(window, len(index.files)) * index.largest
        if cache_bytes is not None and cache_bytes < minimum:
            raise ConfigurationError(
                f"cache_bytes={cache_bytes:,}: {CACHED_WINDOWS} windows of {window} shards have up to {minimum:,} "
                "bytes; set a smaller window, or more bytes"
            )
        self._files.use(index, cache_bytes or minimum, self._reader.decompress(), self._reader.check_hash())
        self._ends = np.cumsum(index.samples)
        self.shard_order = ShardOrder(index.samples, window, index.digest)
        """Order of an epoch."""

    def __len__(self) -> int:
        return self.shard_order.samples

    def __getitem__(self, index: int) -> Any:
        """Read a sample.

        Raises:
            IndexError: there is no such sample.
            UnusableInput: its shard is missing or damaged.
            OSError: the disk or the bucket fails.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        number = index - (int(self._ends[shard - 1]) if shard else 0)
        for trial in range(RETRIES + 1):
            path = self._files.path(shard)
            try:
                sample = self._reader.read(shard, number, path)
                break
            except Exception as error:  # libraries raise what they like about a damaged file
                if not path.exists() and trial < RETRIES:
                    self._files.forget(shard)
                    continue
                if is_transient(error) or isinstance(error, UnusableInput):
                    raise
                raise UnusableInput(
                    f"{self._files.source}/{path.name} is damaged: sample {number} of it cannot be read: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return sample if self._transform is None else self._transform(sample)

    def announce(self, seed: int, position: int) -> None:
        """Bring the shards that are needed from a position of an epoch on into the cache, without waiting for them.

        Args:
            seed: seed of the epoch.
        """
        # Once a step: shards that are read in place cost nothing.
        if self._files.cache is not None:
            self._files.announce(self.shard_order.shards_from(seed, position))


def shards_of(dataset: Any) -> ShardOrder | None:
    """Return the order of a data set in shards; None: it is in none."""
    return dataset.shard_order if isinstance(dataset, Sharded) else None
