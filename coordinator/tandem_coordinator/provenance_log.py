"""Writes the provenance of a run (tandem.rundir.provenance), from what the run watcher reads.

It lives on the watcher's thread, which may wait for a shared disk. What another coordinator has written already is not
written again, so the order of its entries is that in which things were first seen. An entry that the disk refuses stays
here, and is appended with the next poll: training never waits for it.
"""

import os
import platform
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import tandem
from tandem.job.resource import DistributedTrainingJob
from tandem.rundir import evaluations
from tandem.rundir.checkpoint import Manifest
from tandem.rundir.layout import RunDir
from tandem.rundir.provenance import (
    ENTRIES,
    START,
    CheckpointEntry,
    CloseEntry,
    EndEntry,
    GenerationEntry,
    JobEntry,
    RewindEntry,
    ScoreEntry,
    chained,
    checkpoint_entry,
    file_digest,
    job_entry,
    lines,
    public_key_of,
    sha256,
)
from tandem.rundir.records import Record
from tandem.wire.status import CheckpointRef, ProvenanceHead

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Identity = tuple[object, ...]


class ProvenanceLog:
    """The one writer of a run's chain. For one thread, but for `closed`."""

    def __init__(self, rundir: RunDir, job: DistributedTrainingJob, key: "Ed25519PrivateKey | None" = None) -> None:
        """
        Args:
            key: key to sign entries with; None: they are not signed.
        """
        self._rundir, self._job, self._key = rundir, job, key
        self._path = rundir.provenance
        self._number, self._head = 0, START
        self._size: int | None = None
        """Size of the file in bytes, as this process left it; None before it was read."""
        self._written: set[Identity] = set()
        self._last_job: JobEntry | None = None
        self._records = (-1, 0)
        """The newest generation and the number of rewinds whose records were read."""
        self._pending: list[Record] = []
        self._closes: deque[CloseEntry] = deque()
        self._problems: list[str] = []
        self._is_failing = False

    def closed(self, generation: int, reason: str, message: str, replica: str) -> None:
        """A generation ended before training did; called on any thread."""
        self._closes.append(
            CloseEntry(time=time.time(), generation=generation, reason=reason, message=message, replica=replica or None)
        )

    def records(self, newest: int, rewinds: int) -> None:
        """Read new records of generations and rewinds.

        Args:
            newest: number of the newest generation.
            rewinds: number of rewinds.

        Raises:
            OSError, ValueError: one cannot be read; the next call tries again.
        """
        if (newest, rewinds) == self._records:
            return
        now = time.time()
        for path in self._rundir.generation_files():
            if ("generation", number := int(path.stem)) not in self._written:
                self._add(GenerationEntry(time=now, generation=number, digest=file_digest(path)))
        for path in self._rundir.rewind_files():
            if ("rewind", number := int(path.stem)) not in self._written:
                self._add(RewindEntry(time=now, rewind=number, digest=file_digest(path)))
        self._records = newest, rewinds

    def checkpoint(self, manifest: Manifest) -> None:
        """A checkpoint was committed."""
        self._add(checkpoint_entry(manifest, time.time()))

    def score(self, checkpoint: CheckpointRef, metrics: Mapping[str, float]) -> None:
        """A checkpoint's merged result is there.

        Raises:
            OSError, ValueError: it cannot be read.
        """
        if ("score", checkpoint.name, checkpoint.generation) in self._written:
            return
        # Retention deletes results, too.
        with suppress(FileNotFoundError):
            digest = file_digest(evaluations.merged_file(self._rundir, checkpoint))
            self._add(ScoreEntry(time=time.time(), **checkpoint.model_dump(), digest=digest, metrics=metrics))

    def ended(self, generation: int, failed: bool, reason: str, message: str) -> None:
        """Training has ended, with this generation."""
        self._add(EndEntry(time=time.time(), generation=generation, failed=failed, reason=reason, message=message))

    def begin(self) -> None:
        """Read what is there already, once, so that it is not read and digested again."""
        if self._size is None and not self._is_failing:
            self._try(self._read)

    def flush(self) -> None:
        """Append what is new. What the disk refuses is tried again with the next call."""
        self._try(self._flush)

    def _try(self, function: Callable[[], None]) -> None:
        try:
            function()
        except (OSError, ValueError) as error:
            if not self._is_failing:
                self._problems.append(f"the provenance of the run cannot be written: {error}")
            self._is_failing = True
        else:
            self._is_failing = False

    def _flush(self) -> None:
        # To a shared disk each look at the file is a request.
        if self._size is not None and not self._pending and not self._closes:
            return
        if self._size is None or self._size != _size(self._path):
            self._read()
        closes = [self._closes.popleft() for _ in range(len(self._closes))]
        # First: what is pending besides may be the generation after.
        self._pending = [*closes, *self._pending] if self._number else [*self._pending, *closes]
        new: list[bytes] = []
        number, head = self._number, self._head
        for entry in self._pending:
            if (identity := _identity(entry)) in self._written:
                continue
            number += 1
            new.append(chained(entry, number, head, self._key))
            head = sha256(new[-1])
            self._written.add(identity)
        if new:
            self._append(b"".join(line + b"\n" for line in new))
        self._number, self._head = number, head
        self._pending.clear()

    @property
    def end(self) -> ProvenanceHead | None:
        """The last entry; None if there is none."""
        return ProvenanceHead(entries=self._number, head=self._head) if self._number else None

    def take_problems(self) -> list[str]:
        """A sentence about a disk that refuses entries, once until it takes them again."""
        problems, self._problems = self._problems, []
        return problems

    def _add(self, entry: Record) -> None:
        if _identity(entry) not in self._written:
            self._pending.append(entry)

    def _read(self) -> None:
        """Read what is there already, and cut off a line that a crash has torn."""
        self._number, self._head, self._written, size = 0, START, set(), 0
        self._last_job = None
        for line in lines(self._path):
            self._number, self._head, size = self._number + 1, sha256(line), size + len(line) + 1
            with suppress(ValueError):
                if (entry := ENTRIES.parse(line)) is not None:
                    self._written.add(_identity(entry))
                    self._last_job = entry if isinstance(entry, JobEntry) else self._last_job
        if _size(self._path) not in (None, size):
            os.truncate(self._path, size)
        self._size = size
        # The first entry of this process, if it changes anything.
        versions = {"tandem": tandem.__version__, "python": platform.python_version()}
        own = job_entry(self._job, versions, None if self._key is None else public_key_of(self._key), time.time())
        last = self._last_job
        if last is None or last.model_copy(update={"time": own.time}) != own:
            self._pending = [own, *(entry for entry in self._pending if not isinstance(entry, JobEntry))]

    def _append(self, data: bytes) -> None:
        """Append bytes, and have them on the disk. After an error, the file is read again before the next attempt."""
        size, self._size = self._size or 0, None
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            while data:
                written = os.write(descriptor, data)
                data, size = data[written:], size + written
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._size = size


def _identity(entry: Record) -> Identity:
    """The fields by which an entry is the same as one that was written before."""
    match entry:
        case GenerationEntry():
            return entry.kind, entry.generation
        case RewindEntry():
            return entry.kind, entry.rewind
        case CheckpointEntry() | ScoreEntry():
            return entry.kind, entry.name, entry.generation
        case EndEntry():
            return entry.kind, entry.generation, entry.failed, entry.reason
    return entry.kind, entry.time


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
