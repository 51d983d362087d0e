"""The manifest of a checkpoint: its files, their checksums, and the position of training.

PyTorch's distributed checkpoints load a flipped bit, or a half-overwritten folder, without an error. So the manifest
lists every file with its size and a checksum of each CHUNK, and a digest of itself. It is written last, inside a folder
that gets its name by one rename: a folder with a sound manifest is a complete checkpoint.

Checksums cover chunks, not files, so that several ranks can write one file and several threads can verify it. They
detect damage, not malice (docs/decisions/0015-checksums.md).
"""

import hashlib
import json
import mmap
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import xxhash
from pydantic import Field, ValidationError, model_validator

from tandem.model import Model, PlainName, WholeNumber
from tandem.rundir.durable import read_json
from tandem.wire.status import CheckpointRef

FILE = "manifest.json"
FORMAT = 4
"""Version of the layout of a checkpoint. Format 1 had one checksum for each file, format 2 SHA-256 of each chunk, and
format 3 did not list the parameters of an optimizer's groups."""
READABLE = (3, 4)
"""Formats that this version reads."""
WEIGHTS = "weights.safetensors"
OPTIMIZER = "state/optimizer.safetensors"
COUNTERS = "counters"
"""Key in the manifest's `loop`: for each optimizer that counts, the updates that it had made of a parameter, by the
name of the counter's tensor in OPTIMIZER."""
COUNTER = "/step"
"""End of the names of the tensors in which torch's optimizers, and most others, count the updates of a parameter."""
_WEIGHTS = re.compile(r"(state/)?(weights|average)\.safetensors")
HEADER_BYTES = 64
"""Size of a file of weights that has no tensors."""
CHUNK_BYTES = 16 * 2**20
"""Bytes under one checksum; the last chunk of a file may be smaller."""
READERS = 4
"""Threads that read and check one file; more would not find a disk faster."""


class Broken(Exception):  # noqa: N818 - a state of the checkpoint
    """A checkpoint that must not be used. The message gives the reason."""


class OtherFormat(Broken):
    """A checkpoint, perhaps a sound one, in the format of another version of Tandem."""


class FileEntry(Model):
    """One file of the checkpoint."""

    path: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$")]
    """Relative to the checkpoint's folder."""
    size: Annotated[int, Field(ge=0)]
    """Bytes."""
    xxh3: list[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]]
    """The checksums of the chunks in order: XXH3 of 128 bits."""

    @property
    def digest(self) -> str:
        """A digest of the content: that of `digest_of` for the same bytes."""
        return checksum("".join(self.xxh3).encode())

    @model_validator(mode="after")
    def _covers_all(self) -> Self:
        if len(self.xxh3) != chunks(self.size):
            raise ValueError(f"{self.path} has {self.size} bytes and {len(self.xxh3)} checksums")
        return self


class DataPosition(Model):
    """Position in the data order: the next global batch starts at `cursor` of the permutation of (seed, epoch)."""

    seed: int
    """Seed of the permutations."""
    epoch: int
    """Passes completed."""
    cursor: int
    """Samples of this epoch already used."""
    samples: int | None = None
    """Number of training samples; None in a stream, and in checkpoints from before this was recorded."""
    batch: int | None = None
    """Global batch size; None likewise."""
    drop_last: bool | None = None
    """Whether the last partial batch of an epoch is dropped; None likewise."""
    taken: list[int] | None = None
    """Samples per epoch of each source of a mixture; None where there is one source."""
    first: int | None = None
    """Id of the first sample of the slice whose permutation follows from the seed; None in a stream, where the script
    or a mixture determines the order, and in checkpoints from before this was recorded."""
    order: str | None = None
    """A digest of the order of the samples, where some of it is used already; None where nothing of the epoch is used,
    and where the order cannot differ."""
    shards: str | None = None
    """Digest of the index of the shards that hold the samples, a slash, and the number of shards in a window; None
    where they are in none."""


class Manifest(Model):
    """The manifest of a committed checkpoint."""

    format: Literal[3, 4] = 4
    """Version of this layout."""
    name: PlainName
    """The folder's name."""
    step: WholeNumber
    """Optimizer steps completed."""
    generation: WholeNumber
    """The generation that wrote it."""
    parent: str | None = None
    """The checkpoint its generation resumed from."""
    created_at: float
    """Creation time in seconds since the epoch; for people only."""
    world_size: int
    """Ranks that wrote it."""
    mesh: dict[str, int] = {}
    """Parallel dimensions, for instance {"data": 2}."""
    data: DataPosition | None = None
    """Position in the data order; None when the writer has none."""
    rng: dict[str, Any] = {}
    """State of the random number generators."""
    loop: dict[str, Any] = {}
    """Small resumable state of the training loop."""
    versions: dict[str, str] = {}
    """Versions of the software that wrote it."""
    files: list[FileEntry]
    """All files in the folder except this manifest."""
    digest: str = ""
    """SHA-256 of the manifest without this field, as canonical JSON."""

    @property
    def reference(self) -> CheckpointRef:
        """The reference by which evaluations and the status name this checkpoint."""
        return CheckpointRef(name=self.name, step=self.step, generation=self.generation)

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(entry.size for entry in self.files)

    @property
    def weights_digest(self) -> str:
        """A digest of the model's weights, those of training, rounded and averaged; equal only if all are the same;
        empty without weights."""
        files = sorted((entry for entry in self.files if _WEIGHTS.fullmatch(entry.path)), key=lambda entry: entry.path)
        if all(entry.size <= HEADER_BYTES for entry in files):
            return ""
        return checksum(json.dumps([(entry.path, entry.xxh3) for entry in files]).encode())

    def sealed(self) -> dict[str, Any]:
        """The JSON form with its digest filled in."""
        body = self.dump()
        return body | {"digest": _digest(body)}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read and check the manifest of a committed folder.

        Raises:
            FileNotFoundError: the folder is gone.
            Broken: the manifest is missing, damaged, of another folder or of another format.
        """
        try:
            body = read_json(folder / FILE)
        except FileNotFoundError:
            # A vanished checkpoint is normal on a shared disk; one without a manifest is damaged.
            if folder.is_dir():
                raise Broken(f"{folder.name} has no manifest") from None
            raise
        except (NotADirectoryError, IsADirectoryError) as error:
            raise Broken(f"{folder.name} is not a folder with a manifest file") from error
        except ValueError as error:
            raise Broken(f"the manifest of {folder.name} is not JSON") from error
        # The digest comes before the format: a flipped bit there must not look like another version.
        if not isinstance(body, dict) or body.get("digest") != _digest(body):
            raise Broken(f"the manifest of {folder.name} does not match its own digest")
        written = body.get("format")
        if isinstance(written, int) and written not in READABLE:
            raise OtherFormat(
                f"{folder.name} is of format {written}, and this version reads formats {READABLE[0]} to {FORMAT}"
            )
        try:
            manifest = cls.read(body)
        except ValidationError as error:
            raise Broken(f"the manifest of {folder.name} is not one this version reads") from error
        if manifest.name != folder.name:
            raise Broken(f"the manifest in {folder.name} belongs to {manifest.name}")
        return manifest

    def entry(self, path: str) -> FileEntry:
        """The entry of one file.

        Raises:
            Broken: the checkpoint has no such file.
        """
        for entry in self.files:
            if entry.path == path:
                return entry
        raise Broken(f"{self.name} lists no {path}")


def chunks(size: int) -> int:
    """The number of chunks in a file of `size` bytes."""
    return -(-size // CHUNK_BYTES)


def checksum(content: bytes | memoryview) -> str:
    """The checksum of one chunk, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(content)


def digest_of(content: memoryview) -> str:
    """The digest of a file's content in memory, equal to that of its entry in the manifest as long as the bytes are."""
    parts = (content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES))
    return checksum("".join(map(checksum, parts)).encode())


def open_file(folder: Path, entry: FileEntry) -> int:
    """Open one file of a checkpoint to read it. Returns its descriptor, which the caller closes.

    Raises:
        FileNotFoundError: the whole checkpoint is gone.
        Broken: the file is missing, of another size, or no file.
    """
    location = f"{folder.name}/{entry.path}"
    try:
        descriptor = os.open(folder / entry.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if folder.is_dir():
            raise Broken(f"{folder.name} lacks {entry.path}") from None
        raise
    except NotADirectoryError as error:
        raise Broken(f"{location} is not a file") from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise Broken(f"{location} is not a file")
        if facts.st_size != entry.size:
            raise Broken(f"{location} has {facts.st_size:,} bytes instead of {entry.size:,}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def verified_bytes(folder: Path, entry: FileEntry, place: memoryview | None = None) -> memoryview:
    """Read and verify one file of a checkpoint into writable memory: the verified bytes are returned, not read again.

    Args:
        place: memory of the file's size to read into; None: new memory.

    Raises:
        FileNotFoundError: the whole checkpoint is gone.
        Broken: the file is missing, of another size, or altered.
    """
    descriptor = open_file(folder, entry)
    try:
        content = place
        if content is None:
            # A bytearray would be filled with zeros first.
            content = memoryview(mmap.mmap(-1, max(entry.size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[: entry.size]
        numbers = range(len(entry.xxh3))
        with ThreadPoolExecutor(min(READERS, len(numbers)) or 1) as readers:
            sound = list(readers.map(partial(_read_in_place, descriptor, entry, content), numbers))
    finally:
        os.close(descriptor)
    if not all(sound):
        raise Broken(
            f"{folder.name}/{entry.path} does not match its checksum at byte {sound.index(False) * CHUNK_BYTES}"
        )
    return content


def _read_in_place(descriptor: int, entry: FileEntry, content: memoryview, number: int) -> bool:
    return read_chunk(descriptor, entry, number, content[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])


def read_chunk(descriptor: int, entry: FileEntry, number: int, place: memoryview) -> bool:
    """Read a chunk of a file into `place`. Returns whether its checksum is right.

    A chunk with a wrong checksum is read once more from the disk: the damage may be in a page of this machine's memory.

    Raises:
        OSError: the disk cannot be read.
    """
    if _read(descriptor, place, number * CHUNK_BYTES) and checksum(place) == entry.xxh3[number]:
        return True
    # Drop the cached page, so that the second read comes from the disk.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, number * CHUNK_BYTES, len(place), os.POSIX_FADV_DONTNEED)
    return _read(descriptor, place, number * CHUNK_BYTES) and checksum(place) == entry.xxh3[number]


def is_sound(folder: Path, entry: FileEntry) -> bool:
    """Whether a file of a checkpoint has the right size and checksums, as this process reads it.

    Raises:
        FileNotFoundError: the whole checkpoint is gone.
        OSError: the disk cannot be read.
    """
    try:
        descriptor = open_file(folder, entry)
    except Broken:
        return False
    try:
        place = memoryview(bytearray(min(CHUNK_BYTES, entry.size)))
        sizes = (min(CHUNK_BYTES, entry.size - start) for start in range(0, entry.size, CHUNK_BYTES))
        return all(read_chunk(descriptor, entry, number, place[:size]) for number, size in enumerate(sizes))
    finally:
        os.close(descriptor)


def is_damaged(folder: Path, entry: FileEntry, number: int) -> bool:
    """Whether a chunk of a file has a wrong checksum, as this process reads it. Raises as `open_file` does."""
    descriptor = open_file(folder, entry)
    try:
        return not read_chunk(
            descriptor, entry, number, memoryview(bytearray(min(CHUNK_BYTES, entry.size - number * CHUNK_BYTES)))
        )
    finally:
        os.close(descriptor)


def _read(descriptor: int, place: memoryview, start: int) -> bool:
    """Fill `place` from byte `start` on. Returns False if the file ends before."""
    done = 0
    while done < len(place):
        count = os.preadv(descriptor, [place[done:]], start + done)
        if count == 0:
            return False
        done += count
    return True


def _digest(body: dict[str, Any]) -> str:
    unsealed = {key: value for key, value in body.items() if key != "digest"}
    return hashlib.sha256(json.dumps(unsealed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
