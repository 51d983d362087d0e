"""Files of a data set in shards: its index, and the shards themselves, in a folder or in a bucket.

The index is an `index.json` as MosaicML's streaming (MDS) or litdata writes it. It says how many samples each shard
has, so the shard of a sample is found without reading another one. What stands in a shard is read by the library that
wrote it (tandem_trainer.data.shard_readers).

Shards of a folder are read where they are. Those of a bucket, and compressed ones, are brought into a cache folder,
which all processes of a node share and whose size is bounded: the shards that were used last stay.
"""

import fcntl
import gc
import glob
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tandem.job.datasets import private_folder
from tandem.processes.launch import module_command
from tandem.rundir.durable import is_transient
from tandem.rundir.fetch import REFUSED
from tandem.rundir.store import Location, StoreUnavailableError, is_url
from tandem_trainer.failure import UnusableInput

INDEX = "index.json"
Format = Literal["litdata", "mds"]
IN_CHUNKS = ("batch", "sample")
"""Levels of litdata's compression that leave a chunk one file with an offset for each sample."""


class ShardFile(NamedTuple):
    """The file of a shard, as it is stored."""

    name: str
    size: int
    """Bytes."""
    raw_name: str
    """Name of the file after it was decompressed; equal to `name` where it is not compressed."""
    raw_size: int
    hashes: Mapping[str, str] | None = None
    """Digests of the stored file by algorithm."""

    def cached_name(self) -> str:
        """Name of the file in a cache, which has no folders."""
        return self.raw_name.replace("/", "%")


@dataclass(frozen=True)
class ShardIndex:
    """An index of shards."""

    format: Format
    files: Sequence[ShardFile]
    samples: NDArray[np.int64]
    """Samples of each shard, [shards]; of litdata's tokens, those of a shard in blocks."""
    common: Mapping[str, Any]
    """Facts for the library that reads the shards, which are the same for all of them."""
    digest: str
    """Digest of the file."""
    compression: str | None
    """Name of the compression of whole shards; None: they are not compressed as a whole."""

    @property
    def largest(self) -> int:
        """Bytes of the largest shard in the cache."""
        return max(file.raw_size for file in self.files)


def parse_index(content: bytes, source: str, block: int | None = None) -> ShardIndex:
    """Parse an index.

    Args:
        source: the data set, for messages.
        block: tokens of a sample, of litdata's tokens.

    Raises:
        UnusableInput: it is not the index of a data set that can be read.
    """
    with _without_collections():
        return _parse(content, source, block)


def _parse(content: bytes, source: str, block: int | None) -> ShardIndex:
    try:
        data = json.loads(content)
    except ValueError as error:
        raise UnusableInput(f"{source}/{INDEX} is not JSON: {error}") from error
    digest = xxhash.xxh3_64_hexdigest(content)
    try:
        if isinstance(data, dict) and "shards" in data:
            index = _mds(data, source, digest)
        elif isinstance(data, dict) and "chunks" in data and "config" in data:
            index = _litdata(data, source, digest, block)
        else:
            raise UnusableInput(
                f"{source}/{INDEX} is not an index of MosaicML's streaming or of litdata: it has neither shards nor "
                "chunks with a config"
            )
    except (KeyError, TypeError, IndexError) as error:
        raise UnusableInput(f"{source}/{INDEX} is damaged: {type(error).__name__} {error}") from error
    if (index.samples < 0).any():
        raise UnusableInput(f"{source}/{INDEX} is damaged: a shard has a negative number of samples")
    for file in index.files:
        for name in (file.name, file.raw_name):
            if name.startswith("/") or ".." in name.split("/"):
                raise UnusableInput(f"{source}/{INDEX} names a shard outside of the data set: {name}")
    if not index.samples.sum():
        raise UnusableInput(f"{source} has no samples: its {INDEX} lists none")
    return index


def _mds(data: dict[str, Any], source: str, digest: str) -> ShardIndex:
    if data.get("version") != 2:
        raise UnusableInput(f"{source}/{INDEX} has version {data.get('version')} of MosaicML's format; 2 is read")
    shards = data["shards"]
    own = {"raw_data", "zip_data", "samples"}
    common = {name: value for name, value in shards[0].items() if name not in own} if shards else {}
    if common and common.get("format") != "mds":
        raise UnusableInput(f"{source}: shards are read as mds, not as {common.get('format')}")
    files = []
    for shard in shards:
        # One copy for all shards: an index may have a hundred thousand.
        if len(shard) != len(shards[0]) or any(shard[name] != value for name, value in common.items()):
            raise UnusableInput(f"{source}: the shards in {INDEX} do not all have the same columns and compression")
        raw = shard["raw_data"]
        stored = shard["zip_data"] or raw
        files.append(
            ShardFile(stored["basename"], stored["bytes"], raw["basename"], raw["bytes"], stored.get("hashes") or None)
        )
    samples = np.array([shard["samples"] for shard in shards], dtype=np.int64)
    return ShardIndex("mds", files, samples, common, digest, common.get("compression"))


def _litdata(data: dict[str, Any], source: str, digest: str, block: int | None) -> ShardIndex:
    chunks, config = data["chunks"], data["config"]
    if config.get("encryption"):
        raise UnusableInput(f"{source} is encrypted, which is not supported")
    if config.get("compression") and config.get("compression_level") not in IN_CHUNKS:
        raise UnusableInput(
            f"{source}: chunks that are compressed as a whole are not supported; write them with "
            'compression_level="batch"'
        )
    is_tokens = config.get("item_loader") == "TokensLoader"
    if is_tokens and block is None:
        raise UnusableInput(f"{source} holds tokens of litdata: give block, the number of tokens of a sample")
    sizes = [chunk["dim"] // block if is_tokens and block else chunk["chunk_size"] for chunk in chunks]
    files = [
        ShardFile(chunk["filename"], chunk["chunk_bytes"], chunk["filename"], chunk["chunk_bytes"]) for chunk in chunks
    ]
    common = {"config": config, "chunks": chunks}
    return ShardIndex("litdata", files, np.array(sizes, dtype=np.int64), common, digest, None)


class ShardFiles:
    """The files of a data set in shards.

    Args:
        source: a folder, or the URL of a bucket with a prefix.
        cache: folder for shards of a bucket and decompressed ones; default: below the temporary folder.

    Raises:
        UnusableInput: the index cannot be read.
        OSError: the disk or the bucket fails.
    """

    def __init__(self, source: str, cache: Path | None = None) -> None:
        self.source = source.rstrip("/")
        self._is_remote = is_url(source)
        if self._is_remote:
            try:
                Location.parse(source)
            except ValueError as error:
                raise UnusableInput(f"{source}: {error}") from error
        self._folder = Path(source).expanduser()
        self._cache_root = cache
        self.cache: Path | None = None
        """Folder of the cached shards; None: shards are read where they are."""
        self._limit = 0
        self._decompress: Callable[[bytes], bytes] | None = None
        self._check_hash: Callable[[str, bytes], str] | None = None
        self._checked: set[int] = set()
        self._files: Sequence[ShardFile] = ()
        self._ahead: threading.Thread | None = None
        self._announced: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        # A loader worker that is not forked gets a copy, without the thread.
        return self.__dict__ | {"_ahead": None}

    def read_index(self) -> bytes:
        """Read the index."""
        if self._is_remote:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / INDEX
                self._fetch(INDEX, path)
                return path.read_bytes()
        path = self._folder / INDEX
        try:
            return path.read_bytes()
        except OSError as error:
            if is_transient(error):
                raise
            problem = "is not a folder" if not self._folder.is_dir() else f"has no {INDEX} that can be read"
            raise UnusableInput(f"{self.source} {problem}, so it is no data set in shards") from error

    def use(
        self,
        index: ShardIndex,
        limit: int,
        decompress: Callable[[bytes], bytes] | None,
        check_hash: Callable[[str, bytes], str] | None,
    ) -> None:
        """Use the files of an index.

        Args:
            limit: maximum bytes of the cache.
            decompress: decompresses a shard; None: shards are not compressed.
            check_hash: computes the digest of a shard by the name of an algorithm.
        """
        self._files, self._limit = index.files, limit
        self._decompress, self._check_hash = decompress, check_hash
        if self._is_remote or decompress is not None:
            name = xxhash.xxh3_64_hexdigest(f"{self.source} {index.digest}".encode())
            self.cache = (self._cache_root or _own_folder()) / name
            self.cache.mkdir(parents=True, exist_ok=True)

    def _local(self, file: ShardFile) -> Path:
        return self._folder / file.name if self.cache is None else self.cache / file.cached_name()

    def path(self, shard: int) -> Path:
        """Return the file of a shard, which is brought into the cache if necessary.

        Raises:
            UnusableInput: it is missing or damaged.
            OSError: the disk or the bucket fails.
        """
        file = self._files[shard]
        path = self._local(file)
        if self.cache is not None:
            self._bring(file, path)
        elif shard not in self._checked:
            self._check_size(path, file.size)
            self._checked.add(shard)
        return path

    def forget(self, shard: int) -> None:
        """Forget that the file of a shard was checked: it is not there any more."""
        self._checked.discard(shard)

    def announce(self, shards: Sequence[int]) -> None:
        """Bring shards that are needed soon into the cache, in a thread. Errors are left to the process that needs
        them."""
        if list(shards) == self._announced or (self._ahead and self._ahead.is_alive()):
            return
        self._announced = list(shards)
        self._ahead = threading.Thread(target=self._bring_all, args=(self._announced,), daemon=True)
        self._ahead.start()

    def _bring_all(self, shards: Sequence[int]) -> None:
        for shard in shards:
            with suppress(Exception):
                self._bring(self._files[shard], self._local(self._files[shard]))

    def _bring(self, file: ShardFile, path: Path) -> None:
        assert self.cache is not None
        if _touched(path):
            return
        with _locked(self.cache / f".{path.name}.lock"):
            if _touched(path):
                return
            stored = path.with_name(f".{path.name}.stored")
            # A process that was killed leaves what it was writing.
            for leftover in self.cache.glob(f".*{glob.escape(path.name)}.stored*"):
                leftover.unlink(missing_ok=True)
            try:
                if self._is_remote:
                    self._fetch(file.name, stored, file.size)
                else:
                    stored = self._folder / file.name
                    self._check_size(stored, file.size)
                self._place(file, stored, path)
            finally:
                if self._is_remote:
                    stored.unlink(missing_ok=True)
        self._evict(path)

    def _place(self, file: ShardFile, stored: Path, path: Path) -> None:
        """Put a shard under its name, as the library reads it."""
        if self._decompress is None and not (file.hashes and self._check_hash):
            stored.replace(path)
            return
        content = stored.read_bytes()
        for algorithm, digest in (file.hashes or {}).items():
            if self._check_hash is not None and self._check_hash(algorithm, content) != digest:
                raise UnusableInput(f"{self.source}/{file.name} is damaged: its {algorithm} is not that of {INDEX}")
        if self._decompress is not None:
            try:
                content = self._decompress(content)
            except Exception as error:  # each compression has errors of its own
                raise UnusableInput(
                    f"{self.source}/{file.name} is damaged: it cannot be decompressed: {error}"
                ) from error
        if len(content) != file.raw_size:
            raise UnusableInput(
                f"{self.source}/{file.name} is damaged: {len(content):,} of {file.raw_size:,} bytes after decompression"
            )
        temporary = path.with_name(f".{path.name}.stored.raw")
        temporary.write_bytes(content)
        temporary.replace(path)

    def _check_size(self, path: Path, size: int) -> None:
        try:
            actual = path.stat().st_size
        except OSError as error:
            if is_transient(error):
                raise
            raise UnusableInput(f"{self.source} lacks the shard {path.name} that its {INDEX} lists") from error
        if actual != size:
            raise UnusableInput(
                f"{self.source}/{path.name} has {actual:,} bytes and its {INDEX} says {size:,}: the shard is damaged, "
                "or the index is that of another data set"
            )

    def _fetch(self, name: str, path: Path, size: int | None = None) -> None:
        """Read an object of the bucket, in a process of its own: the client's threads do not survive the fork of a
        loader worker."""
        sizes = [] if size is None else [str(size)]
        result = subprocess.run(
            module_command("tandem.rundir.fetch", self.source, name, str(path), *sizes), capture_output=True, text=True
        )
        if result.returncode == 0:
            return
        unknown = f"{self.source}/{name} could not be read: exit code {result.returncode}"
        message = next(iter(reversed(result.stderr.strip().splitlines())), unknown)
        raise (UnusableInput if result.returncode == REFUSED else StoreUnavailableError)(message)

    def _evict(self, newest: Path) -> None:
        """Remove the shards from the cache that were not used for the longest time, until it is within its limit."""
        assert self.cache is not None
        with _locked(self.cache / ".lock"):
            entries = []
            for path in self.cache.iterdir():
                with suppress(FileNotFoundError):
                    if not path.name.startswith("."):
                        status = path.stat()
                        entries.append((status.st_mtime_ns, status.st_size, path))
            total = sum(size for _, size, _ in entries)
            for _, size, path in sorted(entries):
                if total <= self._limit:
                    return
                if path != newest:
                    path.unlink(missing_ok=True)
                    total -= size


def _own_folder() -> Path:
    """The default folder of caches. Another user must not be able to put shards there.

    Raises:
        UnusableInput: it belongs to somebody else.
    """
    folder = Path(tempfile.gettempdir()) / f"tandem-shards-{os.getuid()}"
    if private_folder(folder) is None:
        raise UnusableInput(f"{folder} is not a folder that this user alone can write to; name another one as cache")
    return folder


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause the garbage collector: of an index with 100,000 shards it takes three quarters of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _touched(path: Path) -> bool:
    """Mark a file as used now; returns whether there is one."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Explicitly: a process that was forked meanwhile has the file open, too.
            fcntl.flock(file, fcntl.LOCK_UN)
