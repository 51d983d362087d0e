"""Brings a run directory into its bucket while the run goes on: `python -m tandem.rundir.upload`.

Records and logs go every RECORDS_SECONDS, checkpoints as soon as they are committed, on a thread of their own, so that
a large one does not hold up the scores of a small one. A bucket that does not answer stops nothing: what is missing is
sent later, and standard output says why, as JSON lines {"failing": "…"} that the coordinator reads. SIGTERM asks for a
last pass; what cannot be sent within FINAL_SECONDS then stays on the disk, and `tandem copy RUN URL` sends it.
"""

import json
import logging
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import RUN_DIR
from tandem.rundir.archive import leases, run_files
from tandem.rundir.bucket import (
    CHECKPOINTS,
    IDENTITY,
    LOG,
    PARTS,
    PIECE_BYTES,
    SEGMENT_BYTES,
    THREADS,
    WRITER,
    BucketRecord,
    JobWriter,
    Occupied,
    SupersededWriter,
    Writer,
    claim,
    open_bucket,
    parse_object,
    parts_of,
    piece_name,
    pieces,
    remote_names,
    segment_name,
)
from tandem.rundir.bucket_usage import UsageLog
from tandem.rundir.checkpoint import CHUNK_BYTES, FILE, Broken, FileEntry, Manifest, checksum, open_file
from tandem.rundir.durable import list_folder, open_regular
from tandem.rundir.layout import RunDir
from tandem.rundir.store import MAX_OBJECT_BYTES, Stale, Store, StoreAccessError, StoreUnavailableError

RECORDS_SECONDS = 10.0
"""Interval at which records and logs are sent, in seconds: each log that has grown costs a request."""
LOOK_SECONDS = 1.0
"""Interval at which the disk is searched for a new checkpoint, in seconds."""
MAX_PAUSE_SECONDS = 60.0
"""Maximum pause after a failed attempt, in seconds; it doubles from RECORDS_SECONDS."""
FINAL_SECONDS = 30.0
"""Time without success after which the last pass gives up, in seconds."""
ENDS = ("DONE", "FAILED.json")
IMMUTABLE = ("generations/", "rewinds/", "micro-batches/", "evaluations/", "stacks/")
"""Folders whose files are never changed: an object of the same size has the same content."""


class Uploader:
    """Brings what is new in a run directory into its bucket.

    Args:
        store: its bucket.
        writer: the right to write it.
        tick: called with the bytes sent and the bytes of the present checkpoint.
        on_uploaded: called with each checkpoint that is in the bucket, and the seconds that it took.
    """

    def __init__(
        self,
        store: Store,
        rundir: RunDir,
        writer: Writer | JobWriter,
        tick: Callable[[int, int], None] = lambda sent, total: None,
        on_uploaded: Callable[[Manifest, float], None] = lambda manifest, seconds: None,
    ) -> None:
        self._store, self._rundir, self._writer, self._tick = store, rundir, writer, tick
        self._on_uploaded = on_uploaded
        self._versions: dict[str, Any] = {}
        """Versions of the objects in the bucket."""
        self._sizes: dict[str, int] = {}
        self._signatures: dict[str, tuple[int, int, int]] = {}
        """Identity, size and time of the files that were sent."""
        self._sent: dict[str, int] = {}
        """Bytes of each log in the bucket."""
        self._tails: dict[str, str] = {}
        """Checksum of the newest segment of each log in the bucket."""
        self.checkpoints: dict[str, str] = {}
        """Digests of the manifests in the bucket, by the checkpoint's name."""
        self.damaged: dict[str, str] = {}
        """Checkpoints that are damaged on the disk, by digest, each with the reason: they are not sent."""
        self.bytes = 0
        """Bytes sent."""
        self._lock = threading.Lock()

    def survey(self) -> None:
        """List the bucket, once, before the first upload.

        Raises:
            StoreAccessError, StoreUnavailableError: it cannot be listed.
        """
        entries = {entry.name: entry for entry in self._store.entries()}
        # Objects that are no files of a run are somebody else's.
        for name in remote_names(entries):
            self._versions[name], self._sizes[name] = entries[name].version, entries[name].size
        for name in list(self._versions):
            folder, _, relative = name.partition("/")
            if folder == LOG:
                log, _, offset = relative.rpartition("/")
                self._sent[log] = max(self._sent.get(log, 0), int(offset) + self._sizes[name])
            elif folder == CHECKPOINTS and relative.endswith(f"/{FILE}"):
                self.checkpoints[relative.partition("/")[0]] = str(self._digest(name))

    def upload_records(self, with_end: bool = True) -> None:
        """Send all small files that have changed, and what logs have grown by; delete those that are gone.

        Args:
            with_end: send the end of the run, too.

        Raises:
            SupersededWriter: another process writes this run now.
            StoreAccessError, StoreUnavailableError: it could not be written; the next call continues.
            OSError: the disk cannot be read.
        """
        self._expect_rundir()
        paths = list(run_files(self._rundir))
        names = {path.relative_to(self._rundir.path).as_posix(): path for path in paths}
        for name, path in names.items():
            if name not in ENDS:
                self._upload_file(name, path)
        if with_end:
            for name in ENDS:
                self._upload_file(name, names[name])
        self._delete([name for name in list(self._versions) if self._is_gone(name)])

    def upload_checkpoints(self) -> None:
        """Send the checkpoints that the bucket lacks, the newest first, and delete those that the disk has no longer.

        Raises:
            SupersededWriter, StoreAccessError, StoreUnavailableError, OSError: as `upload_records`.
        """
        manifests = self._rundir.manifests()
        sound = {name: manifest for name, manifest in manifests.items() if isinstance(manifest, Manifest)}
        for name, manifest in reversed(sound.items()):
            if self.checkpoints.get(name) == manifest.digest or manifest.digest in self.damaged:
                continue
            try:
                # Retention keeps it until it is sent.
                with leases(self._rundir, [name]):
                    self._upload_checkpoint(manifest)
            # Deleted between listing and lease.
            except FileNotFoundError:
                continue
            except Broken as error:
                if self._rundir.checkpoint(name).is_dir():
                    self.damaged[manifest.digest] = str(error)
        self._expect_rundir()
        # One that is damaged here is perhaps sound there.
        set_aside = {entry.checkpoint for entry in self._rundir.all_set_aside() if entry.is_bad}
        for name in self.checkpoints.keys() - set(self._rundir.checkpoint_names()) - set_aside:
            # The manifest first: a checkpoint without one does not exist.
            self._delete([f"{CHECKPOINTS}/{name}/{FILE}"])
            del self.checkpoints[name]
        referenced = tuple(parts_of(digest) for digest in self.checkpoints.values())
        parts = [name for name in list(self._versions) if name.startswith(f"{PARTS}/")]
        self._delete([name for name in parts if not name.startswith(referenced)])

    def require_parts(self, manifest: Manifest) -> None:
        """Check, before its manifest is created, that the bucket has all parts of a checkpoint.

        Raises:
            StoreUnavailableError: one is missing, because it was deleted since it was sent. The next attempt sends it.
            StoreAccessError: the bucket cannot be listed.
        """
        present = {entry.name: entry.size for entry in self._store.entries(parts_of(manifest.digest))}
        for entry in manifest.files:
            for number in range(pieces(entry)):
                name = piece_name(manifest.digest, entry.path, number)
                size = min(PIECE_BYTES, entry.size - number * PIECE_BYTES)
                if present.get(name) != size:
                    self._sizes.pop(name, None)
                    raise StoreUnavailableError(f"{manifest.name}: a part of {entry.path} is not in the bucket yet")

    def _expect_rundir(self) -> None:
        """Raise FileNotFoundError if the run directory is gone: then nothing may be deleted in the bucket."""
        self._rundir.job_file.stat()

    def _is_gone(self, name: str) -> bool:
        if name.startswith((f"{CHECKPOINTS}/", f"{PARTS}/")) or name in (IDENTITY, WRITER):
            return False
        path = name.rpartition("/")[0] if name.startswith(f"{LOG}/") else name
        try:
            (self._rundir.path / path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        return False

    def _upload_checkpoint(self, manifest: Manifest) -> None:
        started_at = time.monotonic()
        self.upload_parts(manifest)
        self.require_parts(manifest)
        # A checkpoint counts only with the records of generations and rewinds, and its steps with their log.
        log = self._rundir.training_log(manifest.generation)
        for path in (*list_folder(self._rundir.generations), *list_folder(self._rundir.rewinds), log):
            self._upload_file(path.relative_to(self._rundir.path).as_posix(), path)
        target = f"{CHECKPOINTS}/{manifest.name}/{FILE}"
        with open_regular(self._rundir.checkpoint(manifest.name) / FILE) as file:
            content = file.read()
        self._writer.renew()
        self._replace(target, content)
        self.checkpoints[manifest.name] = manifest.digest
        self._on_uploaded(manifest, time.monotonic() - started_at)

    def upload_parts(self, manifest: Manifest) -> None:
        """Send the files of a checkpoint, without its manifest.

        Raises:
            FileNotFoundError: it is gone.
            Broken: it is damaged.
            SupersededWriter, StoreAccessError, StoreUnavailableError, OSError: as `upload_records`.
        """
        sent = 0
        for entry in manifest.files:
            for count in self._upload_parts(manifest, entry):
                sent += count
                self._tick(sent, manifest.size)

    def _upload_parts(self, manifest: Manifest, entry: FileEntry) -> Iterator[int]:
        """Send the pieces of a file; yields the bytes of each."""
        # A file without content cannot be mapped, and has no pieces.
        with open(open_file(self._rundir.checkpoint(manifest.name), entry), "rb") as file:  # noqa: PTH123 - a descriptor
            if entry.size:
                content = memoryview(mmap.mmap(file.fileno(), entry.size, access=mmap.ACCESS_READ))
                with ThreadPoolExecutor(THREADS) as pool:
                    yield from pool.map(partial(self._upload_piece, manifest, entry, content), range(pieces(entry)))

    def _upload_piece(self, manifest: Manifest, entry: FileEntry, content: memoryview, number: int) -> int:
        target = piece_name(manifest.digest, entry.path, number)
        piece = content[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
        if self._sizes.get(target) == len(piece):
            return len(piece)
        first = number * PIECE_BYTES // CHUNK_BYTES
        for index in range(-(-len(piece) // CHUNK_BYTES)):
            if checksum(piece[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]) != entry.xxh3[first + index]:
                raise Broken(
                    f"{manifest.name}/{entry.path} does not match its checksum at byte {(first + index) * CHUNK_BYTES}"
                )
        self._writer.ensure()
        self._store.put(target, piece)
        self._sizes[target] = len(piece)
        self._versions[target] = None
        self.bytes += len(piece)
        return len(piece)

    def _upload_file(self, name: str, path: Path) -> None:
        # Both threads send generations and training logs.
        with self._lock:
            self._upload_changed(name, path)

    def _upload_changed(self, name: str, path: Path) -> None:
        try:
            status = path.stat()
            signature = status.st_ino, status.st_size, status.st_mtime_ns
            if self._signatures.get(name) == signature:
                return
            if name.startswith(f"{LOG}/"):
                self._upload_log(path, name.removeprefix(f"{LOG}/"), status.st_size)
            elif (
                name not in self._signatures and name.startswith(IMMUTABLE) and self._sizes.get(name) == status.st_size
            ):
                pass  # an earlier process has sent it
            else:
                with open_regular(path) as file:
                    self._replace(name, file.read(MAX_OBJECT_BYTES))
        # It is gone, or no file.
        except (FileNotFoundError, IsADirectoryError, ValueError):
            return
        self._signatures[name] = signature

    def _upload_log(self, path: Path, log: str, size: int) -> None:
        """Send what a log has grown by: fill its last segment, then begin new ones."""
        with open_regular(path) as file:
            if not self._continues(log, file, size):
                self._delete([name for name in list(self._versions) if name.startswith(f"{LOG}/{log}/")])
                self._sent.pop(log, None)
            done = self._sent.get(log, 0)
            start = done - done % SEGMENT_BYTES
            while done < size:
                file.seek(start)
                content = file.read(min(SEGMENT_BYTES, size - start))
                self._replace(segment_name(log, start), content)
                self._tails[log] = checksum(content)
                done = self._sent[log] = start + len(content)
                # It was cut meanwhile: the next pass looks again.
                if len(content) < SEGMENT_BYTES:
                    break
                start += SEGMENT_BYTES

    def _continues(self, log: str, file: BinaryIO, size: int) -> bool:
        """Whether a log goes on from what the bucket has of it: it may have been begun anew, or replaced by another
        file."""
        done = self._sent.get(log, 0)
        if not done or size < done:
            return not done
        start = (done - 1) // SEGMENT_BYTES * SEGMENT_BYTES
        if log not in self._tails:
            content = self._store.read(segment_name(log, start))
            self._tails[log] = "" if content is None else checksum(content.data)
        file.seek(start)
        return checksum(file.read(done - start)) == self._tails[log]

    def _replace(self, name: str, content: bytes) -> None:
        self._writer.ensure()
        try:
            self._versions[name] = self._store.replace(name, content, self._versions.get(name))
        except Stale as error:
            if not error.is_gone:
                raise SupersededWriter(f"{self._store.location}: {error}") from error
            # A deletion whose response was lost has arrived.
            self._versions.pop(name, None)
            self._replace(name, content)
            return
        self._sizes[name] = len(content)
        self.bytes += len(content)

    def _delete(self, names: Sequence[str]) -> None:
        if names:
            self._writer.renew()
        for name in names:
            self._store.delete([name])
            self._versions.pop(name, None)
            self._sizes.pop(name, None)

    def _digest(self, name: str) -> str:
        """The digest of a manifest in the bucket; empty if it cannot be read, so that it is sent again."""
        content = self._store.read(name)
        return "" if content is None else str(parse_object(content.data).get("digest", ""))


class Upload:
    """The upload of one run, until it is asked to end.

    Args:
        report: called with the reason why something is missing in the bucket; with "" once nothing is.
        ending: set to send what is left, and end.
    """

    def __init__(self, uploader: Uploader, report: Callable[[str], None], ending: threading.Event) -> None:
        self._uploader, self._report, self.ending = uploader, report, ending
        self._problems: dict[str, str] = {}
        self._reported: str | None = None
        self._lock = threading.Lock()
        self._error: Exception | None = None
        """The error that ends the upload: another writer, or a defect."""

    @property
    def problem(self) -> str:
        """The reason why something is missing in the bucket; empty if nothing is."""
        return self._reported or ""

    def run(self) -> None:
        """Upload until `ending` is set, and then what is left.

        Raises:
            SupersededWriter: another process writes this run now.
        """
        side = threading.Thread(
            target=self._repeat, args=("checkpoints", self._uploader.upload_checkpoints, LOOK_SECONDS), daemon=True
        )
        side.start()
        self._repeat("records", partial(self._uploader.upload_records, with_end=False), RECORDS_SECONDS)
        side.join()
        # The end of the run comes after everything else.
        if self._error is None and not self._problems:
            self._repeat("records", self._uploader.upload_records, 0.0)
        if self._error is not None:
            raise self._error

    def _repeat(self, kind: str, upload: Callable[[], None], interval: float) -> None:
        pause, progress_at, sent, was_last = RECORDS_SECONDS, time.monotonic(), self._uploader.bytes, False
        while self._error is None:
            # Read before the pass: what is written until then is part of the last one.
            is_last = self.ending.is_set()
            try:
                upload()
            except OSError as error:
                self._tell(kind, str(error))
                # The time limit begins with the last pass, and anew with everything that arrives.
                if (is_last and not was_last) or self._uploader.bytes > sent:
                    progress_at, sent = time.monotonic(), self._uploader.bytes
                was_last = is_last
                if is_last and time.monotonic() - progress_at > FINAL_SECONDS:
                    return
                self._wait(min(pause, FINAL_SECONDS / 10) if is_last else pause, is_last)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                continue
            except Exception as error:
                # `run` raises it again.
                self._error = error
                self.ending.set()
                return
            self._tell(kind, "")
            pause = RECORDS_SECONDS
            if is_last:
                return
            self.ending.wait(interval)

    def _wait(self, seconds: float, is_last: bool) -> None:
        if is_last:
            time.sleep(seconds)
        else:
            self.ending.wait(seconds)

    def _tell(self, kind: str, problem: str) -> None:
        with self._lock:
            if problem:
                self._problems[kind] = problem
            else:
                self._problems.pop(kind, None)
            damaged = next(iter(self._uploader.damaged.values()), "")
            text = next(iter(self._problems.values()), damaged)
            if text != self._reported:
                self._reported = text
                self._report(text)


def _record_missing(rundir: RunDir, store: Store, reason: str) -> None:
    """Record why the bucket lacks data; nothing is missing if the reason is empty."""
    record = BucketRecord.load(rundir, str(store.location))
    if record is not None:
        record.model_copy(update={"missing": reason}).write(rundir)


def end_with_parent() -> None:
    """End this process when its standard input ends, because its parent is gone: the next one uploads."""
    # Not through sys.stdin, whose lock would be held when the interpreter ends.
    while os.read(0, 1):
        pass
    os._exit(ExitCode.FAILED)


def main(arguments: Sequence[str]) -> int:
    """Upload the run in $TANDEM_RUN_DIR to the bucket that its job names, until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s level=%(levelname)s %(message)s")
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ending.set())
    # The terminal's Ctrl-C is for `tandem run`, which ends this process when the others have ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    rundir = RunDir(os.environ[RUN_DIR])
    problem, code = "", ExitCode.DONE

    def report(text: str) -> None:
        print(json.dumps({"failing": text}), flush=True)

    def report_uploaded(manifest: Manifest, seconds: float) -> None:
        line = {"uploaded": manifest.name, "seconds": round(seconds, 3), "bytes": manifest.size}
        print(json.dumps(line), flush=True)

    store = open_bucket(rundir.read_job().spec.checkpoint.storage)
    try:
        _record_missing(rundir, store, "the upload was interrupted")
        writer = claim(store, rundir, is_empty=False)
        _record_missing(rundir, store, "the upload was interrupted")
        uploader = Uploader(store, rundir, writer, on_uploaded=report_uploaded)
        upload = Upload(uploader, report, ending)
        with writer.renewing(), UsageLog(rundir, store).recording(ending):
            uploader.survey()
            upload.run()
        problem = upload.problem
        writer.end()
    except (SupersededWriter, Occupied, StoreAccessError) as error:
        problem, code = str(error), ExitCode.CONFIGURATION
        report(problem)
    except OSError as error:
        problem, code = str(error), ExitCode.FAILED
        report(problem)
    _record_missing(rundir, store, problem)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
