"""Runs in buckets: a run directory that continues one, a copy in either direction, and a view for commands that read.

A view is a folder of this machine with the records, logs and manifests of a run in a bucket, and no checkpoint: enough
for `status`, `report`, `compare` and `checkpoints ls`. It is kept, so that the next command finds its folder again, and
is brought up to date by each.
"""

import hashlib
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tandem.errors import UserError
from tandem.formatting import count_noun, size
from tandem.job.resource import Storage
from tandem.rundir.bucket import BucketRecord, Occupied, SupersededWriter, Writer, claim, open_bucket
from tandem.rundir.download import Downloaded, Downloader, Tick, continue_run
from tandem.rundir.layout import RunDir
from tandem.rundir.store import Location, Store, StoreAccessError, StoreUnavailableError
from tandem.rundir.upload import Uploader
from tandem_cli.output import echo
from tandem_cli.terminal.canvas import PrintableConsole


def open_store(url: str, endpoint: str = "", region: str = "") -> Store:
    """Open a place in a bucket.

    Args:
        endpoint, region: of the bucket; empty: from the environment.

    Raises:
        UserError: the URL is wrong, or the store cannot be opened.
    """
    try:
        location = Location.parse(url)
    except ValueError as error:
        raise UserError(f"{url}: {error}") from error
    with bucket_errors():
        return Store(location, endpoint, region)


def continue_from(storage: Storage, run_dir: RunDir) -> tuple[Writer | None, list[str]]:
    """Become the writer of a job's bucket, and get what it holds if nothing was saved in the run directory.

    Returns:
        The right to write the bucket, which the caller ends if the run does not start, and notes for the user.

    Raises:
        UserError: the bucket cannot be used, or holds another run or a newer state of this one.
    """
    with bucket_errors(), progress("downloading") as tick:
        store = open_bucket(storage)
        continuation = continue_run(store, run_dir, _waiting, tick)
    if (result := continuation.downloaded) is None:
        return continuation.writer, []
    count = count_noun(len(result.checkpoints), "checkpoint")
    return continuation.writer, [f"continues the run in {store.location}: {count}, {size(result.size)}"]


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
        writer = claim(store, run_dir, is_empty=False, waiting=_waiting)
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


def view(url: str) -> RunDir:
    """Bring the view of a run in a bucket up to date.

    Raises:
        UserError: there is none, or the bucket cannot be read.
    """
    store = open_store(url)
    folder = _views() / hashlib.sha256(f"{store.location} {store.endpoint}".encode()).hexdigest()[:16]
    run_dir = RunDir(folder / store.location.prefix.rpartition("/")[2])
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


def _waiting(writer: str) -> None:
    echo(f"bucket    waiting until {writer} is known to have ended")


def _download(downloader: Downloader, run_dir: RunDir, selectors: list[str]) -> Downloaded:
    with progress("downloading") as tick:
        received = downloader.records(run_dir)
        result = downloader.checkpoints(run_dir, selectors, tick)
    result.size += received
    return result


@contextmanager
def bucket_errors() -> Iterator[None]:
    """Turn errors of a bucket into messages for the user."""
    try:
        yield
    except (StoreAccessError, StoreUnavailableError, Occupied, SupersededWriter) as error:
        raise UserError(str(error)) from error


@contextmanager
def progress(title: str) -> Iterator[Tick]:
    """Show a progress bar on a terminal."""
    console = PrintableConsole(highlight=False, stderr=True)
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda count, total: bar.update(task, completed=count, total=total)
