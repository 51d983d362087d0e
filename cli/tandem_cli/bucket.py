"""Runs in buckets: a run directory that continues one, a copy in either direction, and a view for commands that read.

A view is a folder of this machine with the records, logs and manifests of a run in a bucket, and no checkpoint: enough
for `status`, `report`, `compare` and `checkpoints ls`. It is kept, so that the next command finds its folder again, and
is brought up to date by each. A command that reads checkpoints has their files there while it runs.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tandem.errors import UserError
from tandem.formatting import size
from tandem.job.resource import Storage
from tandem.rundir.bucket import (
    CHECKPOINTS,
    BucketRecord,
    claim,
    parse_object,
)
from tandem.rundir.checkpoint import FILE, Broken, FileEntry, Manifest
from tandem.rundir.download import CheckpointReader, Downloaded, Downloader
from tandem.rundir.layout import RunDir
from tandem.rundir.store import Store
from tandem.rundir.upload import Uploader
from tandem_launcher.bucket_access import bucket_errors, open_store, progress, report_waiting

LOCK = "lock"
"""File beside the views that is locked while a command has checkpoints there."""


def describe_missing(storage: Storage, run_dir: RunDir) -> str:
    """Describe why a job's bucket lacks data after the end of its run; empty if it has everything."""
    record = None if storage.bucket is None else BucketRecord.load(run_dir, storage.bucket)
    if record is None or not record.missing:
        return ""
    command = f"tandem copy {shlex.quote(str(run_dir.path))} {record.url}"
    return f"{record.url} lacks data ({record.missing}); to upload it: {command}"


def upload(run_dir: RunDir, store: Store) -> int:
    """Bring a run directory, whose lock the caller holds, into a bucket, completely. Returns the bytes sent.

    Raises:
        UserError: the bucket cannot be used, or holds another run.
    """
    with bucket_errors():
        store.probe()
        writer = claim(store, run_dir, is_empty=False, waiting=report_waiting)
        try:
            with writer.renewing(), progress("uploading") as tick:
                uploader = Uploader(store, run_dir, writer, tick)
                uploader.survey()
                uploader.upload_checkpoints()
                uploader.upload_records()
            record = BucketRecord.load(run_dir, str(store.location))
            if record is not None and record.missing:
                record.model_copy(update={"missing": ""}).write(run_dir)
        finally:
            writer.end()
    if uploader.damaged:
        raise UserError(f"not uploaded: {'; '.join(uploader.damaged.values())}")
    return uploader.bytes


def download(store: Store, folder: Path, selectors: list[str]) -> Downloaded:
    """Get a run from a bucket into a folder, which is a copy of it afterwards.

    Args:
        folder: a new or empty one, or an earlier copy of this run.
        selectors: the checkpoints to get: `latest`, `best`, `all`, `none` or names.

    Raises:
        UserError: the folder holds something else, or the bucket cannot be read.
    """
    run_dir, url = RunDir(folder), str(store.location)
    record = BucketRecord.load(run_dir, url)
    if record is None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists and is no copy of {url}; choose another folder")
    if record is not None and (record.writer or record.claiming):
        raise UserError(f"{folder} is the run directory of the run in {url}, and no copy of it; choose another folder")
    with bucket_errors():
        store.ping()
        downloader = Downloader(store)
        run_dir.create()
        # Its writer is unknown, and it may be incomplete: `tandem run` does not continue it without asking the bucket.
        BucketRecord(url=url, run="", writer="", complete=False).write(run_dir)
        return _download(downloader, run_dir, selectors)


class BucketView(RunDir):
    """The view of a run in a bucket."""

    def __init__(self, path: Path, store: Store) -> None:
        super().__init__(path)
        self._store, self._reader = store, CheckpointReader(store)

    def fetch(self, manifest: Manifest, entry: FileEntry, tick: Callable[[int], None]) -> None:
        """Get one file of a checkpoint.

        Raises:
            FileNotFoundError: the checkpoint was deleted meanwhile.
            Broken: it is damaged.
            StoreAccessError, StoreUnavailableError, OSError: the bucket cannot be read, or the disk not written.
        """
        path = self.checkpoint(manifest.name) / entry.path
        path.parent.mkdir(exist_ok=True)
        try:
            for count in self._reader.file(manifest, entry, path, replaces=True):
                tick(count)
        except Broken:
            content = self._store.read(f"{CHECKPOINTS}/{manifest.name}/{FILE}")
            if content is None or parse_object(content.data).get("digest") != manifest.digest:
                raise FileNotFoundError(f"{manifest.name} was deleted") from None
            raise

    def drop(self, manifest: Manifest) -> None:
        """Delete the files of a checkpoint here."""
        for path in self.checkpoint(manifest.name).iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != FILE:
                path.unlink(missing_ok=True)


@contextmanager
def checkpoint_files(
    checkpoints: Sequence[tuple[RunDir, Manifest]],
    name: str = "",
    tick: Callable[[int], None] | None = None,
) -> Iterator[None]:
    """Have the files of checkpoints on the disk. Those of a run in a bucket are received, and deleted afterwards.

    Args:
        name: the only files to receive; empty: all.
        tick: called with the bytes of each chunk that was received; None: a progress bar is shown.

    Raises:
        UserError: the bucket cannot be read, a checkpoint in it is damaged or was deleted meanwhile, or the disk has
            too little space.
        Broken, FileNotFoundError: with `tick`, if a checkpoint is damaged or was deleted.
    """
    views = [(run_dir, manifest) for run_dir, manifest in checkpoints if isinstance(run_dir, BucketView)]
    if not views:
        yield
        return
    files = [
        (run_dir, manifest, entry)
        for run_dir, manifest in views
        for entry in manifest.files
        if name in ("", Path(entry.path).name)
    ]
    total = sum(entry.size for _, _, entry in files)
    if total > (free := shutil.disk_usage(views[0][0].path).free):
        raise UserError(f"the checkpoints need {size(total)}, and {_views()} has {size(free)} free")
    # One command at a time: another one would delete what this one reads.
    with (_views() / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with bucket_errors():
                try:
                    _receive(files, total, tick)
                except (Broken, FileNotFoundError) as error:
                    if tick is not None:
                        raise
                    raise UserError(str(error)) from error
            yield
        finally:
            for run_dir, manifest in views:
                run_dir.drop(manifest)


def _receive(
    files: Sequence[tuple[BucketView, Manifest, FileEntry]], total: int, tick: Callable[[int], None] | None
) -> None:
    if tick is not None:
        for run_dir, manifest, entry in files:
            run_dir.fetch(manifest, entry, tick)
        return
    received = 0
    with progress("downloading") as show:

        def add(count: int) -> None:
            nonlocal received
            received += count
            show(received, total)

        for run_dir, manifest, entry in files:
            run_dir.fetch(manifest, entry, add)


def view(url: str) -> BucketView:
    """Bring the view of a run in a bucket up to date.

    Raises:
        UserError: there is none, or the bucket cannot be read.
    """
    store = open_store(url)
    folder = _views() / hashlib.sha256(f"{store.location} {store.endpoint}".encode()).hexdigest()[:16]
    run_dir = BucketView(folder / store.location.prefix.rpartition("/")[2], store)
    with bucket_errors():
        store.ping()
        downloader = Downloader(store)
        run_dir.create()
        downloader.records(run_dir)
        downloader.manifests(run_dir)
    return run_dir


def _views() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "tandem" / "buckets"


def _download(downloader: Downloader, run_dir: RunDir, selectors: list[str]) -> Downloaded:
    with progress("downloading") as tick:
        received = downloader.records(run_dir)
        result = downloader.checkpoints(run_dir, selectors, tick)
    result.size += received
    return result
