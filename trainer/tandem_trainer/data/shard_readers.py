"""Readers of shards: litdata and MosaicML's streaming, each imported only where a data set is of its format.

Both are asked for single samples of a local file. Their own data sets, which divide samples among ranks, download and
delete files, are not used: their order depends on the number of processes.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tandem_trainer.data.shard_files import ShardIndex
from tandem_trainer.failure import ConfigurationError, UnusableInput

LITDATA, MOSAICML = "litdata", "mosaicml-streaming"
"""Distributions that are installed for a format."""
MIN_OPEN = 4
"""Minimum number of shards that stay open."""


class ShardReader(Protocol):
    """Reads samples of local shards."""

    def read(self, shard: int, number: int, path: Path) -> Any:
        """Read a sample.

        Args:
            shard: number of the shard.
            number: index of the sample in the shard.
            path: file of the shard.
        """

    def decompress(self) -> Callable[[bytes], bytes] | None:
        """Return what decompresses a shard; None: shards are not compressed as a whole."""

    def check_hash(self) -> Callable[[str, bytes], str] | None:
        """Return what computes the digest of a shard by the name of an algorithm; None: shards have no digests."""


class LitdataReader:
    """Reads litdata's chunks.

    Args:
        keep: number of shards that stay open.
        block: tokens of a sample, of tokens.
    """

    def __init__(self, index: ShardIndex, keep: int, block: int | None) -> None:
        try:
            from litdata.streaming.item_loader import PyTreeLoader, TokensLoader
            from litdata.streaming.serializers import _get_serializers
            from litdata.utilities._pytree import treespec_loads
        except ImportError as error:
            raise _missing("litdata", LITDATA) from error
        config, chunks = dict(index.common["config"]), list(index.common["chunks"])
        if any(str(leaf).partition(":")[0] == "pickle" for leaf in config["data_format"]):
            raise UnusableInput("samples of litdata in pickle are not read: a pickle can run any code")
        if config["data_spec"] is not None:
            config["data_spec"] = treespec_loads(config["data_spec"])
        is_tokens = config.get("item_loader") == "TokensLoader"
        # Single samples and not windows of them: the order is a shuffled one.
        self._loader: Any = TokensLoader(block_size=block) if is_tokens else PyTreeLoader(batch_decode=0)
        self._loader.setup(config, chunks, _get_serializers(None))
        self._loader.set_posix_fast(True, keep=max(keep, MIN_OPEN), willneed=False)
        # Files of the cache are replaced and removed as a whole, never written, so mapping them is safe.
        self._loader.set_mmap_allowed_chunks(range(len(chunks)))

    def read(self, shard: int, number: int, path: Path) -> Any:
        """See ShardReader."""
        return self._loader.load_item_from_chunk(number, shard, str(path), 0, 0)

    def decompress(self) -> None:
        """See ShardReader."""

    def check_hash(self) -> None:
        """See ShardReader."""


class MosaicReader:
    """Reads shards of MosaicML's streaming."""

    def __init__(self, index: ShardIndex, keep: int) -> None:
        try:
            from streaming.base.compression import decompress
            from streaming.base.format import reader_from_json
            from streaming.base.hashing import get_hash
        except ImportError as error:
            raise _missing("MosaicML's streaming", MOSAICML) from error
        self._index, self._keep = index, max(keep, MIN_OPEN)
        self._open, self._decompress, self._hash = reader_from_json, decompress, get_hash
        self._readers: OrderedDict[int, Any] = OrderedDict()

    def read(self, shard: int, number: int, path: Path) -> Any:
        """See ShardReader."""
        if shard not in self._readers:
            file = self._index.files[shard]
            entry = {
                **self._index.common,
                "samples": int(self._index.samples[shard]),
                "raw_data": {"basename": path.name, "bytes": file.raw_size, "hashes": {}},
                "zip_data": None,
            }
            reader = self._open(str(path.parent), None, entry)
            try:
                reader.validate(allow_unsafe_types=False)
            except ValueError as error:
                raise UnusableInput(
                    f"{path.name}: pickled columns are not read, because a pickle can run any code"
                ) from error
            self._readers[shard] = reader
            if len(self._readers) > self._keep:
                self._readers.popitem(last=False)
        self._readers.move_to_end(shard)
        return self._readers[shard].get_item(number)

    def decompress(self) -> Callable[[bytes], bytes] | None:
        """See ShardReader."""
        name = self._index.compression
        return None if name is None else partial(self._decompress, name)

    def check_hash(self) -> Callable[[str, bytes], str]:
        """See ShardReader."""
        get_hash: Callable[[str, bytes], str] = self._hash
        return get_hash


def reader_of(index: ShardIndex, keep: int, block: int | None) -> ShardReader:
    """Create the reader of a data set.

    Raises:
        ConfigurationError: its library is not installed.
        UnusableInput: samples are in a format that is not read.
    """
    return LitdataReader(index, keep, block) if index.format == "litdata" else MosaicReader(index, keep)


def _missing(library: str, distribution: str) -> ConfigurationError:
    return ConfigurationError(f"to read shards of {library}, install {distribution} (pip install {distribution})")
