"""The manifest of a checkpoint: its files, their checksums, and the position of training.

PyTorch's distributed checkpoints load a flipped bit, or a folder that was overwritten half, without a word. So every
file is listed with its size and a checksum of each CHUNK of it, and the manifest carries a digest of itself. It is
written last, inside a folder that gets its name by one rename: a folder with a sound manifest is a whole checkpoint.

Checksums are of chunks, not of files, so that several ranks can write one file and several threads check it. They are
there to find damage, not malice (docs/decisions/0015-checksums.md).
"""

import hashlib
import json
import mmap
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import xxhash
from pydantic import Field, ValidationError, model_validator

from tandem.model import Model, PlainName, Whole
from tandem.rundir.durable import read_json
from tandem.status import CheckpointRef

FILE = "manifest.json"
FORMAT = 4
"""Version of the layout of a checkpoint. Format 1 had one checksum for each file, format 2 SHA-256 of each chunk, and
format 3 did not say which parameters an optimizer's groups have."""
READABLE = (3, 4)
"""What this version reads."""
WEIGHTS = "weights.safetensors"
CHUNK = 16 * 2**20
"""Bytes under one checksum; the last chunk of a file may be smaller."""
READERS = 4
"""Threads that read and check one file; more would not find a disk faster."""


class Broken(Exception):  # noqa: N818 - it is a state of the checkpoint, and reads as one
    """A checkpoint that must not be used; says what is wrong with it."""


class OtherFormat(Broken):
    """A checkpoint, perhaps a sound one, that another version of Tandem reads."""


class FileEntry(Model):
    """One file of the checkpoint."""

    path: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$")]
    """Relative to the checkpoint's folder."""
    size: Annotated[int, Field(ge=0)]
    """Bytes."""
    xxh3: list[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]]
    """The checksum of each chunk in turn: XXH3 of 128 bits."""

    @model_validator(mode="after")
    def _covers_all(self) -> Self:
        if len(self.xxh3) != chunks(self.size):
            raise ValueError(f"{self.path} has {self.size} bytes and {len(self.xxh3)} checksums")
        return self


class DataPosition(Model):
    """Where the data order stands: the next global batch starts at `cursor` of the permutation of (seed, epoch)."""

    seed: int
    """Seed of the permutations."""
    epoch: int
    """Passes completed."""
    cursor: int
    """Samples of this epoch already used."""
    samples: int | None = None
    """Training samples there are; None in a stream, and in checkpoints of before this was written down."""
    batch: int | None = None
    """Global batch size; None likewise."""
    drop_last: bool | None = None
    """Whether the last partial batch of an epoch is left out; None likewise."""
    taken: list[int] | None = None
    """Samples that an epoch takes of each source of a mixture; None where there is one source."""
    order: str | None = None
    """A digest of the order of the samples, where some of it is used already; None where nothing of the epoch is, and
    where it cannot be another one."""


class Manifest(Model):
    """What a committed checkpoint is."""

    format: Literal[3, 4] = 4
    """Version of this layout."""
    name: PlainName
    """The folder's name."""
    step: Whole
    """Optimizer steps completed."""
    generation: Whole
    """The generation that wrote it."""
    parent: str | None = None
    """The checkpoint its generation resumed from."""
    created_at: float
    """Seconds since the epoch; for people only."""
    world_size: int
    """Ranks that wrote it."""
    mesh: dict[str, int] = {}
    """Parallel dimensions, for instance {"data": 2}."""
    data: DataPosition | None = None
    """Where the data order stands; None when the writer has none."""
    rng: dict[str, Any] = {}
    """How random numbers continue."""
    loop: dict[str, Any] = {}
    """Small resumable state of the training loop."""
    versions: dict[str, str] = {}
    """Versions of what wrote it."""
    files: list[FileEntry]
    """Everything in the folder but this manifest."""
    digest: str = ""
    """SHA-256 of the manifest without this field, as canonical JSON."""

    @property
    def reference(self) -> CheckpointRef:
        """The short form."""
        return CheckpointRef(name=self.name, step=self.step, generation=self.generation)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)

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
            if folder.is_dir():
                raise Broken(f"{folder.name} has no manifest") from None
            raise
        except (NotADirectoryError, IsADirectoryError) as error:
            raise Broken(f"{folder.name} is not a folder with a manifest file") from error
        except ValueError as error:
            raise Broken(f"the manifest of {folder.name} is not JSON") from error
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
    return -(-size // CHUNK)


def checksum(content: bytes | memoryview) -> str:
    """The checksum of one chunk, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(content)


def open_file(folder: Path, entry: FileEntry) -> int:
    """Open one file of a checkpoint to read it. Returns its descriptor, which is the caller's to close.

    Raises:
        FileNotFoundError: the whole checkpoint is gone.
        Broken: the file is missing, of another size, or no file.
    """
    where = f"{folder.name}/{entry.path}"
    try:
        descriptor = os.open(folder / entry.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if folder.is_dir():
            raise Broken(f"{folder.name} lacks {entry.path}") from None
        raise
    except NotADirectoryError as error:
        raise Broken(f"{where} is not a file") from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise Broken(f"{where} is not a file")
        if facts.st_size != entry.size:
            raise Broken(f"{where} has {facts.st_size:,} bytes instead of {entry.size:,}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def verified_bytes(folder: Path, entry: FileEntry, place: memoryview | None = None) -> memoryview:
    """The content of one file of a checkpoint, writable: what was checked is what is used, not what is read again.

    Args:
        place: of the file's size, where to put it; None: into memory of its own.

    Raises:
        FileNotFoundError: the whole checkpoint is gone.
        Broken: the file is missing, of another size, or altered.
    """
    descriptor = open_file(folder, entry)
    try:
        content = place
        if content is None:
            # Not a bytearray, which would be filled with zeros first.
            content = memoryview(mmap.mmap(-1, max(entry.size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[: entry.size]
        numbers = range(len(entry.xxh3))
        with ThreadPoolExecutor(min(READERS, len(numbers)) or 1) as readers:
            sound = list(readers.map(partial(_read_in_place, descriptor, entry, content), numbers))
    finally:
        os.close(descriptor)
    if not all(sound):
        raise Broken(f"{folder.name}/{entry.path} does not match its checksum at byte {sound.index(False) * CHUNK}")
    return content


def _read_in_place(descriptor: int, entry: FileEntry, content: memoryview, number: int) -> bool:
    return read_chunk(descriptor, entry, number, content[number * CHUNK : (number + 1) * CHUNK])


def read_chunk(descriptor: int, entry: FileEntry, number: int, place: memoryview) -> bool:
    """Read a chunk of a file into its place; whether it is what was written.

    One that is not is read once more, from the disk: a page in this machine's memory may be what is damaged.

    Raises:
        OSError: the disk does not give what it holds.
    """
    if _read(descriptor, place, number * CHUNK) and checksum(place) == entry.xxh3[number]:
        return True
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, number * CHUNK, len(place), os.POSIX_FADV_DONTNEED)
    return _read(descriptor, place, number * CHUNK) and checksum(place) == entry.xxh3[number]


def is_damaged(folder: Path, entry: FileEntry, number: int) -> bool:
    """Whether a chunk of a file is not what was written, as this process reads it. Raises as `open_file` does."""
    descriptor = open_file(folder, entry)
    try:
        return not read_chunk(descriptor, entry, number, memoryview(bytearray(min(CHUNK, entry.size - number * CHUNK))))
    finally:
        os.close(descriptor)


def _read(descriptor: int, place: memoryview, start: int) -> bool:
    """Fill a place from there on; False if the file ends before."""
    done = 0
    while done < len(place):
        count = os.preadv(descriptor, [place[done:]], start + done)
        if count == 0:
            return False
        done += count
    return True


def _digest(body: dict[str, Any]) -> str:
    rest = {key: value for key, value in body.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
