"""Gets a run from its bucket: records, logs and checkpoints, into a run directory.

The content of a bucket is not trusted. Only valid paths of a run directory are accepted, sizes are bounded, and each
CHUNK_BYTES of a checkpoint is compared with its checksum before it is written; the checkpoint gets its name
when it is complete. What is there already is not received again, so a download that breaks off continues.

A bucket that is being written is read in an order that keeps the rules of a run directory: the end of the run first (it
is written last), and a checkpoint only with a manifest. One that retention deletes meanwhile is skipped.
"""

import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tandem.rundir.archive import run_files, select
from tandem.rundir.bucket import (
    CHECKPOINTS,
    IDENTITY,
    LOG,
    PARTS,
    PIECE_BYTES,
    SEGMENT_BYTES,
    THREADS,
    BucketRecord,
    Writer,
    claim,
    piece_name,
    remote_names,
)
from tandem.rundir.bundles import bundled_contents
from tandem.rundir.checkpoint import CHUNK_BYTES, FILE, Broken, FileEntry, Manifest, OtherFormat, checksum
from tandem.rundir.durable import TEMPORARY, commit_folder, replace_bytes, sync_file, temporary_beside
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import OwnershipDecision, apply_decision, has_saved
from tandem.rundir.store import Store, StoreAccessError, StoreUnavailableError

ATTEMPTS = 2
"""Requests for one chunk whose checksum is wrong: the damage may have happened on the way."""

Tick = Callable[[int, int], None]
"""Called with the bytes received and the bytes expected."""


@dataclass
class Downloaded:
    """Result of a download or copy."""

    size: int = 0
    """Bytes received."""
    checkpoints: list[str] = field(default_factory=list)
    """Names of the new checkpoints, all verified."""
    faults: list[str] = field(default_factory=list)
    """Sentences about checkpoints that are damaged, or were deleted meanwhile."""


class CheckpointReader:
    """Gets files of checkpoints from a bucket."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def file(self, manifest: Manifest, entry: FileEntry, path: Path, replaces: bool = False) -> Iterator[int]:
        """Get one file, unless it is there; yields the bytes of each chunk.

        Args:
            replaces: get it although it is there, and replace that one.

        Raises:
            Broken: it is damaged, or missing in the bucket.
            StoreAccessError, StoreUnavailableError, OSError: the bucket cannot be read, or the disk not written.
        """
        if path.exists() and not replaces:
            yield entry.size
            return
        temporary = path.with_name(f"{TEMPORARY}{path.name}")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.truncate(descriptor, entry.size)
            with ThreadPoolExecutor(THREADS) as pool:
                yield from pool.map(partial(self._chunk, manifest, entry, descriptor), range(len(entry.xxh3)))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(path)

    def _chunk(self, manifest: Manifest, entry: FileEntry, descriptor: int, number: int) -> int:
        start = number * CHUNK_BYTES
        length = min(CHUNK_BYTES, entry.size - start)
        # An earlier download may have received it.
        if checksum(os.pread(descriptor, length, start)) == entry.xxh3[number]:
            return length
        name = piece_name(manifest.digest, entry.path, start // PIECE_BYTES)
        for _ in range(ATTEMPTS):
            content = self._store.read_range(name, start % PIECE_BYTES, length)
            if content is None:
                raise Broken(f"{manifest.name}: a part of {entry.path} is missing in the bucket")
            if len(content) == length and checksum(content) == entry.xxh3[number]:
                if (written := os.pwrite(descriptor, content, start)) < length:
                    raise OSError(errno.ENOSPC, f"only {written} of {length} bytes could be written")
                return length
        raise Broken(f"{manifest.name}/{entry.path} does not match its checksum at byte {start}")


class Downloader:
    """The files of one run in a bucket.

    Raises:
        StoreAccessError: there is no run.
        StoreUnavailableError: the bucket does not answer.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._reader = store, CheckpointReader(store)
        self._objects = {entry.name: entry for entry in store.entries()}
        if IDENTITY not in self._objects:
            raise StoreAccessError(f"{store.location} holds no run of Tandem")
        self._names = sorted(remote_names(self._objects))
        self.unreadable: list[str] = []
        """Sentences about checkpoints in the format of another version of Tandem."""

    def records(self, rundir: RunDir) -> int:
        """Write all records and logs into a run directory, and delete those that the run does not have. Returns the
        bytes received.

        Raises:
            StoreAccessError, StoreUnavailableError, OSError: the bucket cannot be read, or the disk not written.
        """
        rundir.create()
        received = 0
        logs: dict[str, list[str]] = defaultdict(list)
        bundled = bundled_contents(self._store, self._objects, [self._objects[name] for name in self._names])
        for name in self._names:
            top, _, relative = name.partition("/")
            if top in (CHECKPOINTS, PARTS):
                continue
            if top == LOG:
                logs[relative.rpartition("/")[0]].append(name)
            elif (content := bundled.get(name) or self._store.read(name)) is not None:
                _write(rundir.path / name, content.data)
                received += len(content.data)
        for log, segments in logs.items():
            received += self._log(rundir.log / log, segments)
        names = {*self._names, *(f"{LOG}/{log}" for log in logs)}
        for path in run_files(rundir):
            if path.relative_to(rundir.path).as_posix() not in names:
                path.unlink(missing_ok=True)
        return received

    def manifests(self, rundir: RunDir) -> None:
        """Write the manifests of all checkpoints into a run directory that has no checkpoints itself: enough to list
        and compare them."""
        names = self._checkpoint_names()
        for name in set(rundir.checkpoint_names()) - set(names):
            shutil.rmtree(rundir.checkpoint(name))
        for name in names:
            content = self._store.read(f"{CHECKPOINTS}/{name}/{FILE}")
            if content is not None:
                _write(rundir.checkpoint(name) / FILE, content.data)
                try:
                    Manifest.load(rundir.checkpoint(name))
                except OtherFormat as error:
                    self.unreadable.append(str(error))
                except Broken:
                    continue

    def checkpoints(
        self, rundir: RunDir, selectors: Iterable[str], tick: Tick = lambda received, total: None
    ) -> Downloaded:
        """Get checkpoints, the newest first; those that the run directory has already are skipped.

        Args:
            selectors: `latest`, `best`, `all`, `none` or names (see tandem.rundir.archive.select).

        Raises:
            StoreAccessError, StoreUnavailableError, OSError: as `records`.
        """
        result = Downloaded()
        # Which one is best follows from records and manifests, which are looked at where no checkpoint is.
        view = RunDir(temporary_beside(rundir.path / "view"))
        try:
            for path in (rundir.generations, rundir.rewinds, rundir.evaluations):
                if path.is_dir():
                    shutil.copytree(path, view.path / path.name)
            self.manifests(view)
            result.faults += self.unreadable
            selected = select(view, selectors)
            missing = [manifest for manifest in selected if _digest(rundir, manifest.name) != manifest.digest]
            total = sum(manifest.size for manifest in missing)
            if total > (free := shutil.disk_usage(rundir.path).free):
                raise StoreAccessError(f"the checkpoints need {total:,} bytes, and {rundir.path} has {free:,} free")
            for manifest in missing:
                try:
                    self._checkpoint(rundir, view, manifest, lambda size: tick(result.size + size, total))
                except Broken as error:
                    result.faults.append(str(error))
                    continue
                result.size += manifest.size
                result.checkpoints.append(manifest.name)
        finally:
            shutil.rmtree(view.path, ignore_errors=True)
        return result

    def _checkpoint_names(self) -> list[str]:
        parts = (name.split("/") for name in self._names)
        return [part[1] for part in parts if part[0] == CHECKPOINTS and len(part) == 3 and part[2] == FILE]

    def _checkpoint(self, rundir: RunDir, view: RunDir, manifest: Manifest, tick: Callable[[int], None]) -> None:
        """Get one checkpoint.

        Raises:
            Broken: it is damaged, or was deleted meanwhile.
        """
        # A fixed name: the next attempt finds the files that are complete.
        folder = rundir.checkpoints / f"{TEMPORARY}download-{manifest.digest[:32]}"
        received = 0
        folder.mkdir(parents=True, exist_ok=True)
        for entry in manifest.files:
            path = folder / entry.path
            path.parent.mkdir(parents=True, exist_ok=True)
            for size in self._reader.file(manifest, entry, path):
                received += size
                tick(received)
        shutil.copyfile(view.checkpoint(manifest.name) / FILE, folder / FILE)
        sync_file(folder / FILE)
        final = rundir.checkpoint(manifest.name)
        # One of the same name is of an earlier generation: it would have the same digest otherwise.
        shutil.rmtree(final, ignore_errors=True)
        commit_folder(folder, final)

    def _log(self, path: Path, segments: list[str]) -> int:
        """Write a log, whose segments follow each other without a gap. Returns the bytes received."""
        received = 0
        temporary = temporary_beside(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            for name in segments:
                offset = name.rpartition("/")[2]
                content = self._store.read_range(name, 0, SEGMENT_BYTES)
                # A missing segment: what follows it cannot be placed.
                if content is None or not offset.isdigit() or int(offset) != received:
                    break
                file.write(content)
                received += len(content)
        temporary.replace(path)
        return received


@dataclass(frozen=True)
class ContinuedRun:
    """A run directory that its bucket belongs to now."""

    writer: Writer | None
    """The right to write the bucket; None if the bucket could not be asked, and the run directory is complete."""
    downloaded: Downloaded | None
    """The files from the bucket; None if nothing was missing here."""


def continue_run(
    store: Store,
    rundir: RunDir,
    waiting: Callable[[str], None] = lambda writer: None,
    tick: Tick = lambda received, total: None,
) -> ContinuedRun:
    """Become the writer of a run in a bucket, and get the run from there if nothing was saved in the run directory.

    The caller holds the lock of the run directory.

    Args:
        waiting: called with the name of the present writer if it has to be waited for.

    Raises:
        Occupied: the bucket holds another run, or a newer state of this one.
        StoreAccessError, StoreUnavailableError: it cannot be used, and may have what the run directory lacks; or a
            checkpoint in it cannot be read.
        OSError: the run directory cannot be written.
    """
    record = BucketRecord.load(rundir, str(store.location))
    is_partial = record is not None and not record.complete
    try:
        store.probe()
        writer = claim(store, rundir, is_partial or not has_saved(rundir), waiting)
    except (StoreAccessError, StoreUnavailableError):
        # The run directory is complete, and its upload reports the problem.
        if record is not None and record.complete:
            return ContinuedRun(None, None)
        raise
    try:
        claimed = BucketRecord.load(rundir, str(store.location))
        if claimed is None or claimed.complete:
            return ContinuedRun(writer, None)
        if not is_partial and rundir.job_file.exists():
            # Files of an attempt that saved nothing must not mix with those of the bucket.
            apply_decision(rundir, OwnershipDecision("attempt"))
        with writer.renewing():
            downloader = Downloader(store)
            received = downloader.records(rundir)
            result = downloader.checkpoints(rundir, ("all",), tick)
        # What is missing here would be deleted there.
        if result.faults:
            raise StoreAccessError(
                f"{store.location}: {result.faults[0]}. To continue without it, delete its manifest.json there"
            )
        claimed.model_copy(update={"complete": True}).write(rundir)
    except BaseException:
        writer.end()
        raise
    result.size += received
    return ContinuedRun(writer, result)


def _digest(rundir: RunDir, name: str) -> str:
    try:
        return rundir.manifest(name).digest
    except (Broken, OSError):
        return ""


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, content, durable=False)
