"""Keeps the run directory of one pod equal to those of the others, through the bucket, where pods share no disk.

Every process reads and writes the directory of its own pod, as if all pods shared it. One process in each pod
(tandem.rundir.sync_service) sends what was written here, and gets what was written elsewhere, every few seconds, and at
once where a process waits for it (tandem.rundir.sync_client).

**Who is right.** An object is created only if it does not exist, and replaced only in the version that this directory
has. Where two pods have written the same name, the bucket's content replaces the local one. So what is written once
(records of generations, scores, DONE) has one author, and a process that must know whether it was the first writes,
exchanges, and reads again. Leases may change their holder that way; all work under a lease is idempotent.

**Checkpoints.** Here they are folders with a manifest, and with files only where a process needs them: the node that
writes a checkpoint has them, others get them on request (`fetch`). A checkpoint is committed by the creation of
its manifest in the bucket, after its parts and after the records of its generation; one that does not count by the
lineage is not sent. Only the newest files stay on the disk.

**What was deleted.** A file is deleted in the bucket if it was here before, and deleted here if it was in the bucket
before. A name that was never at both places is new. What was equal when is recorded (tandem.rundir.sync_state), so that
a restarted process does not have to guess.

Rejected: the coordinator as a file server (all checkpoints would pass through one pod, and nothing could be read
while it is away), one copy that each process reads through the network (a survey of an evaluator would cost a request
for each name), requests of each rank and evaluator to the bucket (each of them would need its credentials and its
rules).
"""

import errno
import logging
import os
import re
import shutil
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tandem.rundir.archive import NAME, leases, run_files
from tandem.rundir.bucket import (
    CHECKPOINTS,
    LOG,
    PARTS,
    SEGMENT_BYTES,
    THREADS,
    JobWriter,
    SupersededWriter,
    Writer,
    parse_object,
    parts_of,
    remote_names,
    segment_name,
)
from tandem.rundir.bundles import BUNDLED, BundleWriter, bundled_contents
from tandem.rundir.checkpoint import FILE, Broken, FileEntry, Manifest, OtherFormat, checksum, is_sound
from tandem.rundir.download import CheckpointReader
from tandem.rundir.durable import (
    commit_folder,
    list_folder,
    open_regular,
    replace_bytes,
    sync_file,
    temporary_beside,
)
from tandem.rundir.layout import FOLDERS, RunDir, step_of
from tandem.rundir.store import (
    MAX_OBJECT_BYTES,
    Content,
    ListedObject,
    Stale,
    Store,
    StoreAccessError,
    StoreUnavailableError,
)
from tandem.rundir.sync_state import SyncedCheckpoint, SyncedFile, SyncState, signature_of, tag_of
from tandem.rundir.upload import ENDS, Uploader

logger = logging.getLogger("tandem.sync")

ADDITIONAL = ("leases/", "tracking/")
"""Folders that are exchanged although they belong to no copy of a run."""
MAX_COMPLETE = 2
"""Number of checkpoints whose files stay on the disk of a pod, besides those that a process reads."""
_FIRST = ("generations/", "rewinds/")
"""Folders whose files come before the others, and are never changed: they decide what counts."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LAST = ("job.json", *ENDS)
"""Files that come after the others: processes wait for them, and may then rely on the rest."""


class DeletedCheckpoint(Exception):  # noqa: N818 - a state of the checkpoint
    """A checkpoint was deleted, or does not count any more."""


class Synchronizer:
    """The exchange of one run directory with its bucket. Methods may be called from several threads."""

    def __init__(self, store: Store, rundir: RunDir, writer: Writer | JobWriter) -> None:
        self._store, self._rundir, self._writer = store, rundir, writer
        self._is_checked = False
        self._uploader = Uploader(store, rundir, writer)
        self._reader = CheckpointReader(store)
        self._bundles = BundleWriter(store) if isinstance(writer, Writer) else None
        self._state = SyncState(rundir)
        self._manifests: dict[str, tuple[tuple[int, int, int], Manifest | None]] = {}
        """Manifests of the checkpoints here, by name, with the signatures of their files."""
        self._unsendable: dict[str, str] = {}
        """Checkpoints that are damaged here, by digest, each with the reason."""
        self._segments: dict[str, Mapping[str, str]] = {}
        """Versions of the newest segments of logs."""
        self._lock, self._uploading, self._fetching = threading.Lock(), threading.Lock(), threading.Lock()

    def exchange(self) -> None:
        """Send what was written here, and then get what was written elsewhere; without the files of checkpoints.

        Raises:
            SupersededWriter: the bucket belongs to another job now.
            StoreAccessError, StoreUnavailableError: it cannot be used; the next call continues.
            OSError: the disk fails.
        """
        with self._lock:
            try:
                self._writer.ensure()
                self._push()
            except SupersededWriter:
                # The records of those who have taken over stop the processes here.
                self._pull()
                raise
            self._pull()
            self._state.record()

    def upload(self) -> None:
        """Send the checkpoints that are complete here and missing in the bucket, and delete those that retention has
        deleted here. Raises as `exchange`."""
        with self._uploading:
            for manifest in self._unsent():
                # Retention keeps it until it is sent.
                with leases(self._rundir, [manifest.name]):
                    try:
                        self._uploader.upload_parts(manifest)
                    # Deleted meanwhile.
                    except FileNotFoundError:
                        continue
                    except Broken as error:
                        self._unsendable[manifest.digest] = str(error)
                        continue
                    self._commit(manifest)
            with self._lock:
                self._delete_checkpoints()
                self._make_room()
                self._state.record()
                files = {name: file for name, file in self._state.files.items() if name.startswith(BUNDLED)}
            if self._bundles is not None:
                versions = {name: file.version for name, file in files.items()}
                self._bundles.write(versions, lambda name: self._content(name, files[name]))

    def _content(self, name: str, synced: SyncedFile) -> bytes | None:
        """The content of a file that is equal here and in the bucket; None if it is not any more."""
        with suppress(FileNotFoundError):
            content = (self._rundir.path / name).read_bytes()
            if checksum(content) == synced.checksum:
                return content
        return None

    def require_sent(self, name: str, digest: str) -> None:
        """Raise an error unless the bucket has the checkpoint whose manifest has this digest.

        Raises:
            DeletedCheckpoint: it was deleted, or does not count any more.
            Broken: it is damaged here.
            StoreUnavailableError: it is not there yet.
        """
        if reason := self._unsendable.get(digest):
            raise Broken(reason)
        synced = self._state.checkpoints.get(name)
        if synced is not None and synced.digest == digest:
            return
        if any(manifest.digest == digest for manifest in self._unsent()):
            raise StoreUnavailableError(f"{name} is not in the bucket yet")
        raise DeletedCheckpoint(f"{name} does not count any more")

    def fetch(self, name: str, digest: str, paths: Collection[str] | None = None) -> None:
        """Get files of a checkpoint; those that are here already are not received again.

        Args:
            digest: that of its manifest.
            paths: files in the checkpoint; None: all.

        Raises:
            DeletedCheckpoint: the checkpoint was deleted.
            Broken: it is damaged.
            StoreAccessError, StoreUnavailableError, OSError: as `exchange`.
        """
        # Ranks of a node ask for the same checkpoint at once: the first one gets it.
        with self._fetching:
            if self._digest(name) != digest:
                # Another pod has heard of it earlier.
                self.exchange()
            if self._digest(name) != digest:
                raise DeletedCheckpoint(f"{name} was deleted")
            try:
                manifest = self._rundir.manifest(name)
                for entry in manifest.files:
                    if paths is None or entry.path in paths:
                        self._fetch_file(manifest, entry)
            except FileNotFoundError:
                raise DeletedCheckpoint(f"{name} was deleted") from None
            with self._lock:
                if self._digest(name) != digest:
                    # Another one has got its name meanwhile.
                    self._drop_files(name)
                    raise DeletedCheckpoint(f"{name} was replaced")
                self._note_complete(name)
                self._make_room()

    def repair(self, name: str, paths: Collection[str] | None = None) -> None:
        """Read a checkpoint that seems to be damaged here, and get again what is damaged.

        Args:
            paths: files to read beside the manifest; None: all.

        Raises:
            DeletedCheckpoint: the bucket does not have it.
            Broken: it is damaged in the bucket, too.
            StoreAccessError, StoreUnavailableError, OSError: as `exchange`.
        """
        with self._fetching:
            synced = self._state.checkpoints.get(name)
            if synced is None:
                raise DeletedCheckpoint(f"{name} is not in the bucket")
            try:
                manifest = self._repaired_manifest(name, synced.digest)
                if manifest.digest != synced.digest:
                    raise DeletedCheckpoint(f"{name} has another content in the bucket")
                for entry in manifest.files:
                    is_requested = paths is None or entry.path in paths
                    if is_requested and not is_sound(self._rundir.checkpoint(name), entry):
                        logger.warning("event=repairing checkpoint=%s file=%s", name, entry.path)
                        self._fetch_file(manifest, entry, replaces=True)
            except FileNotFoundError:
                raise DeletedCheckpoint(f"{name} was deleted") from None

    def _repaired_manifest(self, name: str, digest: str) -> Manifest:
        folder = self._rundir.checkpoint(name)
        try:
            return Manifest.load(folder)
        except OtherFormat:
            raise
        except Broken:
            content = self._store.read(f"{CHECKPOINTS}/{name}/{FILE}")
            if content is None or parse_object(content.data).get("digest") != digest:
                raise DeletedCheckpoint(f"{name} was deleted") from None
            logger.warning("event=repairing checkpoint=%s file=%s", name, FILE)
            replace_bytes(folder / FILE, content.data)
            return Manifest.load(folder)

    def _fetch_file(self, manifest: Manifest, entry: FileEntry, replaces: bool = False) -> None:
        path = self._rundir.checkpoint(manifest.name) / entry.path
        path.parent.mkdir(exist_ok=True)
        try:
            for _ in self._reader.file(manifest, entry, path, replaces):
                pass
        except Broken:
            # Retention may have deleted it since the last exchange.
            current = self._store.read(f"{CHECKPOINTS}/{manifest.name}/{FILE}")
            if current is None or parse_object(current.data).get("digest") != manifest.digest:
                raise FileNotFoundError(manifest.name) from None
            raise

    def sweep(self, suspects: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
        """Delete parts that belong to no checkpoint, which an upload that broke off has left. Returns the folders that
        may be such, each with its objects: the next call deletes them unless a manifest or an object has come by then.

        Args:
            suspects: the result of the last call.
        """
        folders: dict[str, set[str]] = defaultdict(set)
        for entry in self._store.entries(f"{PARTS}/"):
            folders["/".join(entry.name.split("/")[:2]) + "/"].add(entry.name)
        self.exchange()
        with self._lock:
            used = {parts_of(synced.digest) for synced in self._state.checkpoints.values()}
        unused = {folder: frozenset(names) for folder, names in folders.items() if folder not in used}
        for folder, names in list(unused.items()):
            if suspects.get(folder) == names:
                self._writer.renew()
                self._store.delete(sorted(names))
                del unused[folder]
        return unused

    # From here to the bucket

    def _push(self) -> None:
        # With a folder gone, everything in it would seem to be deleted.
        for folder in FOLDERS:
            (self._rundir.path / folder).stat()
        present: set[str] = set()
        self._is_checked = False
        has_unsent = bool(self._unsent())
        files = sorted(self._local_files().items(), key=lambda item: _order(item[0]))
        for name, path in files:
            if name in _LAST:
                # The end of a run comes after its checkpoints.
                if (name in ENDS and has_unsent) or path.exists():
                    present.add(name)
            elif name.startswith(f"{LOG}/"):
                with suppress(FileNotFoundError):
                    self._push_log(name.removeprefix(f"{LOG}/"), path)
                    present.add(name)
            elif self._push_file(name, path):
                present.add(name)
        for name in self._state.files.keys() - present:
            self._check_right()
            self._store.delete([name])
            del self._state.files[name]
        for log in [log for log in self._state.logs if f"{LOG}/{log}" not in present]:
            self._delete_log(log)
        for name, path in files:
            if name in _LAST and not (name in ENDS and has_unsent):
                self._push_file(name, path)

    def _check_right(self) -> None:
        """Check once in an exchange, before the first deletion or decisive record, that this job may write."""
        if not self._is_checked:
            self._writer.renew()
            self._is_checked = True

    def _local_files(self) -> dict[str, Path]:
        additional = (path for folder in ADDITIONAL for path in list_folder(self._rundir.path / folder))
        paths = (*run_files(self._rundir), *(path for path in additional if _is_additional(path.name)))
        return {path.relative_to(self._rundir.path).as_posix(): path for path in paths}

    def _push_file(self, name: str, path: Path) -> bool:
        """Send a file if it has changed. Returns whether it exists."""
        synced = self._state.files.get(name)
        try:
            signature = signature_of(path)
            if synced is not None and synced.signature == signature:
                return True
            if synced is not None and name.startswith(_FIRST):
                # A crash of the node has damaged it: `_pull` restores it.
                del self._state.files[name]
                return True
            with open_regular(path) as file:
                content = file.read(MAX_OBJECT_BYTES + 1)
            if len(content) > MAX_OBJECT_BYTES:
                raise OSError(errno.EFBIG, f"{name} has more than {MAX_OBJECT_BYTES:,} bytes")
        # It is gone, or no file.
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):
            return False
        digest = checksum(content)
        if synced is None or synced.checksum != digest:
            if name.startswith(_FIRST) or name in ENDS:
                self._check_right()
            try:
                version = self._store.replace(name, content, None if synced is None else synced.version)
            except Stale:
                # Another pod was first: `_pull` replaces the local content. Where it has deleted it, the next exchange
                # creates it.
                self._state.files.pop(name, None)
                return True
        else:
            version = synced.version
        self._state.files[name] = SyncedFile(version=dict(version), signature=signature, checksum=digest)
        return True

    def _push_log(self, log: str, path: Path) -> None:
        size, done = path.stat().st_size, self._state.logs.get(log, 0)
        if size < done and log not in self._state.own_logs:
            # A crash of the node has cut it: `_pull_log` restores it.
            self._state.logs[log] = size
            return
        if size < done:
            # It was begun anew.
            self._delete_log(log)
            done = 0
        start = done - done % SEGMENT_BYTES
        with open_regular(path) as file:
            while done < size:
                file.seek(start)
                content = file.read(min(SEGMENT_BYTES, size - start))
                name = segment_name(log, start)
                try:
                    self._segments[name] = self._store.replace(name, content, self._segments.get(name))
                except Stale:
                    # Each log has one writer. One of an earlier pod may still be sending its last lines: they come
                    # here first.
                    return
                done = self._state.logs[log] = start + len(content)
                self._state.own_logs[log] = True
                start += SEGMENT_BYTES

    def _delete_log(self, log: str) -> None:
        self._check_right()
        names = [entry.name for entry in self._store.entries(f"{LOG}/{log}/")]
        self._store.delete(names)
        for name in names:
            self._segments.pop(name, None)
        self._state.logs.pop(log, None)

    def _unsent(self) -> list[Manifest]:
        """The checkpoints that count and are complete here, but are not in the bucket; newest first."""
        new = self._new()
        return self._rundir.counting(new) if new else []

    def _new(self) -> dict[str, Manifest]:
        """The checkpoints here that are not in the bucket."""
        synced_checkpoints = self._state.checkpoints
        new = {}
        for name in self._rundir.checkpoint_names():
            manifest = self._manifest(name)
            if manifest is None or manifest.digest in self._unsendable:
                continue
            is_sent = name in synced_checkpoints and synced_checkpoints[name].digest == manifest.digest
            # A manifest alone was got from the bucket, and is no checkpoint of this pod.
            if not is_sent and self._has_files(manifest):
                new[name] = manifest
        return new

    def _has_files(self, manifest: Manifest) -> bool:
        folder = self._rundir.checkpoint(manifest.name)
        return not manifest.files or any((folder / entry.path).exists() for entry in manifest.files)

    def _manifest(self, name: str) -> Manifest | None:
        """The manifest of a checkpoint here; None if there is none, or none that can be read."""
        folder = self._rundir.checkpoint(name)
        try:
            signature = signature_of(folder / FILE)
            if self._manifests.get(name, (None,))[0] != signature:
                self._manifests[name] = signature, None
                self._manifests[name] = signature, Manifest.load(folder)
        except FileNotFoundError:
            return None
        except Broken:
            pass
        return self._manifests[name][1]

    def _digest(self, name: str) -> str:
        manifest = self._manifest(name)
        return "" if manifest is None else manifest.digest

    def _commit(self, manifest: Manifest) -> None:
        """Create the manifest of a checkpoint whose parts are in the bucket."""
        self.exchange()
        name = manifest.name
        with self._lock:
            # A newer generation may have begun meanwhile, and the exchange has got its record.
            if name not in {unsent.name for unsent in self._unsent()}:
                return
            with open_regular(self._rundir.checkpoint(name) / FILE) as file:
                content = file.read()
            self._uploader.require_parts(manifest)
            self._writer.renew()
            synced = self._state.checkpoints.get(name)
            target = f"{CHECKPOINTS}/{name}/{FILE}"
            try:
                version = self._store.replace(target, content, None if synced is None else synced.version)
            except Stale as error:
                # Another generation has committed this name: the next exchange gets its manifest, and one that counts
                # is sent again.
                self._state.checkpoints.pop(name, None)
                raise StoreUnavailableError(f"{name} was committed by another generation, too") from error
            self._state.checkpoints[name] = SyncedCheckpoint(version=dict(version), digest=manifest.digest)
            if synced is not None:
                self._delete_parts(synced.digest)
            self._note_complete(name)
            self._state.record()

    def _delete_checkpoints(self) -> None:
        """Delete here what will never count, and in the bucket what was deleted here. One that is damaged here is
        perhaps sound there."""
        self._rundir.checkpoints.stat()
        counting = {manifest.name for manifest in self._unsent()}
        for name in self._new().keys() - counting - self._state.checkpoints.keys():
            self._remove(name)
        local = set(self._rundir.checkpoint_names())
        damaged = {entry.checkpoint for entry in self._rundir.all_set_aside() if entry.is_bad}
        for name in self._state.checkpoints.keys() - local:
            synced = self._state.checkpoints.pop(name)
            if name in damaged:
                self._state.damaged.append(synced.digest)
                continue
            target = f"{CHECKPOINTS}/{name}/{FILE}"
            current = self._store.read(target)
            if current is not None and tag_of(current.version) != tag_of(synced.version):
                continue  # another one has got its name
            self._writer.renew()
            # The manifest first: a checkpoint without one does not exist.
            self._store.delete([target])
            self._delete_parts(synced.digest)

    def _delete_parts(self, digest: str) -> None:
        self._store.delete([entry.name for entry in self._store.entries(parts_of(digest))])

    # From the bucket to here

    def _pull(self) -> None:
        listing = {entry.name: entry for entry in self._listing()}
        logs: dict[str, dict[int, ListedObject]] = defaultdict(dict)
        manifests: dict[str, ListedObject] = {}
        files: list[ListedObject] = []
        names = [*remote_names(listing), *(name for name in listing if _is_additional_object(name))]
        for name in sorted(names, key=_order):
            top, _, relative = name.partition("/")
            if top == CHECKPOINTS:
                checkpoint, _, file = relative.partition("/")
                if file == FILE and step_of(checkpoint) is not None:
                    manifests[checkpoint] = listing[name]
            elif top == LOG:
                log, _, offset = relative.rpartition("/")
                logs[log][int(offset)] = listing[name]
            elif name not in _LAST:
                files.append(listing[name])
        self._pull_files(files, listing)
        for log, segments in logs.items():
            self._pull_log(log, segments)
        self._pull_manifests(manifests)
        for name in self._state.files.keys() - listing.keys():
            synced, path = self._state.files.pop(name), self._rundir.path / name
            # A file that has changed here since is new.
            with suppress(FileNotFoundError):
                if signature_of(path) == synced.signature:
                    path.unlink()
        self._pull_files([listing[name] for name in _LAST if name in listing], {})

    def _pull_files(self, entries: Sequence[ListedObject], listing: Mapping[str, ListedObject]) -> None:
        changed = [entry for entry in entries if self._has_changed(entry)]
        if not changed:
            return
        bundled = bundled_contents(self._store, listing, changed)
        with ThreadPoolExecutor(THREADS) as pool:
            contents = pool.map(lambda entry: bundled.get(entry.name) or self._read(entry), changed)
            for entry, content in zip(changed, contents, strict=True):
                if content is None:
                    continue
                try:
                    self._write_file(entry.name, content)
                # A name that is both a file and a folder: Tandem writes no such names.
                except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                    logger.warning("event=ignored object=%r why=%r", entry.name, str(error))

    def _read(self, entry: ListedObject) -> Content | None:
        try:
            return self._store.read(entry.name)
        except ValueError as error:
            logger.warning("event=ignored object=%r why=%r", entry.name, str(error))
            return None

    def _listing(self) -> Iterator[ListedObject]:
        """All objects but the parts of checkpoints, of which there may be thousands."""
        last = ""
        for entry in self._store.entries():
            if entry.name < last:
                raise StoreAccessError(f"{self._store.location} is not listed in order; pods need a volume there")
            last = entry.name
            if last.startswith(f"{PARTS}/"):
                break
            yield entry
        # `0` follows the slash.
        yield from self._store.entries(after=f"{PARTS}0")

    def _has_changed(self, entry: ListedObject) -> bool:
        """Whether an object has to be read: it is of another version than here."""
        synced = self._state.files.get(entry.name)
        if synced is None:
            return True
        if tag_of(synced.version) == tag_of(entry.version):
            return False
        # A file that was changed or deleted here meanwhile is sent first, and loses.
        with suppress(FileNotFoundError):
            return signature_of(self._rundir.path / entry.name) == synced.signature
        return False

    def _write_file(self, name: str, content: Content) -> None:
        path = self._rundir.path / name
        with suppress(FileNotFoundError, ValueError):
            with open_regular(path) as file:
                local = file.read(MAX_OBJECT_BYTES)
            if local == content.data:
                self._note_file(name, path, content.data, content.version)
                return
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, content.data)
        self._note_file(name, path, content.data, content.version)

    def _note_file(self, name: str, path: Path, content: bytes, version: Mapping[str, str]) -> None:
        # A lease may be gone already: the next exchange deletes it there.
        signature = (0, 0, 0)
        with suppress(FileNotFoundError):
            signature = signature_of(path)
        self._state.files[name] = SyncedFile(version=dict(version), signature=signature, checksum=checksum(content))

    def _pull_log(self, log: str, segments: Mapping[int, ListedObject]) -> None:
        """Append what a log has grown by in another pod."""
        newest = max(segments)
        end, done = newest + segments[newest].size, self._state.logs.get(log, 0)
        self._segments[segments[newest].name] = segments[newest].version
        if end <= done:
            return
        path = self._rundir.log / log
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            while done < end:
                start = done - done % SEGMENT_BYTES
                content = self._store.read_range(segment_name(log, start), done - start, SEGMENT_BYTES)
                if not content or file.seek(0, os.SEEK_END) < done:
                    break
                file.seek(done)
                if (local := file.read(len(content))) != content:
                    # Lines that were written here before those of the bucket had arrived: nobody has read them.
                    if not content.startswith(local):
                        file.truncate(done)
                        local = b""
                    file.write(content[len(local) :])
                done = self._state.logs[log] = done + len(content)

    def _pull_manifests(self, manifests: Mapping[str, ListedObject]) -> None:
        synced_checkpoints = self._state.checkpoints
        # One of this pod that counts replaces an older one of its name.
        unsent = {manifest.name for manifest in self._unsent()}
        for name, entry in manifests.items():
            if name in synced_checkpoints and tag_of(synced_checkpoints[name].version) == tag_of(entry.version):
                continue
            content = self._store.read(entry.name)
            if content is None:
                continue
            digest = str(parse_object(content.data).get("digest"))
            if digest in self._state.damaged or not _DIGEST.fullmatch(digest):
                continue
            if self._digest(name) != digest and name not in unsent:
                synced_checkpoints.pop(name, None)
                self._install(name, content.data)
            synced_checkpoints[name] = SyncedCheckpoint(version=dict(content.version), digest=digest)
        for name in synced_checkpoints.keys() - manifests.keys():
            if self._digest(name) == synced_checkpoints[name].digest:
                self._remove(name)
            del synced_checkpoints[name]
        for name in set(self._rundir.checkpoint_names()) - manifests.keys():
            # A process that died has left a manifest that the bucket has no longer.
            manifest = self._manifest(name)
            if manifest is not None and not self._has_files(manifest):
                self._remove(name)

    def _install(self, name: str, manifest: bytes) -> None:
        """Create the folder of a checkpoint, with its manifest alone."""
        final = self._rundir.checkpoint(name)
        temporary = temporary_beside(final)
        temporary.mkdir(parents=True)
        (temporary / FILE).write_bytes(manifest)
        sync_file(temporary / FILE)
        self._remove(name)
        commit_folder(temporary, final)

    def _remove(self, name: str) -> None:
        """Delete a checkpoint here. A reader sees the whole of it, or nothing."""
        temporary = temporary_beside(self._rundir.checkpoint(name))
        with suppress(FileNotFoundError):
            self._rundir.checkpoint(name).rename(temporary)
        shutil.rmtree(temporary, ignore_errors=True)

    # The disk

    def _note_complete(self, name: str) -> None:
        self._state.complete[:] = [*(other for other in self._state.complete if other != name), name]

    def _make_room(self) -> None:
        """Delete the files of checkpoints that nobody has needed for long; their manifests stay."""
        readers = self._rundir.readers(by_own_clock=True)
        for name in self._state.complete[:-MAX_COMPLETE]:
            if name in readers:
                continue
            self._state.complete.remove(name)
            synced = self._state.checkpoints.get(name)
            if synced is not None and synced.digest == self._digest(name):
                self._drop_files(name)

    def _drop_files(self, name: str) -> None:
        """Delete the files of a checkpoint here; its manifest stays."""
        for path in list_folder(self._rundir.checkpoint(name)):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != FILE:
                path.unlink(missing_ok=True)


def _order(name: str) -> tuple[int, str]:
    """The order in which files are sent and received: what decides first, and the end last."""
    if name.startswith(_FIRST):
        return 0, name
    return (2 if name in _LAST else 1), name


def _is_additional(file: str) -> bool:
    """Whether a file of one of the ADDITIONAL folders is exchanged; leases of copies concern one pod."""
    return NAME.fullmatch(file) is not None and not file.startswith("copy-")


def _is_additional_object(name: str) -> bool:
    folder, _, file = name.partition("/")
    return f"{folder}/" in ADDITIONAL and _is_additional(file)
