"""Access to buckets: errors and progress for a person, and a run directory that continues the run in a bucket."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tandem.errors import UserError
from tandem.formatting import count_noun, printable, size
from tandem.job.resource import Storage
from tandem.rundir.bucket import Occupied, SupersededWriter, Writer, open_bucket
from tandem.rundir.download import Tick, continue_run
from tandem.rundir.layout import RunDir
from tandem.rundir.store import Location, Store, StoreAccessError, StoreUnavailableError
from tandem_launcher.terminal.canvas import PrintableConsole


def parse_url(url: str) -> Location:
    """Parse the URL of a run in a bucket.

    Raises:
        UserError: it is not one.
    """
    try:
        return Location.parse(url)
    except ValueError as error:
        raise UserError(f"{url}: {error}") from error


def open_store(url: str, endpoint: str = "", region: str = "") -> Store:
    """Open a place in a bucket.

    Args:
        endpoint, region: of the bucket; empty: from the environment.

    Raises:
        UserError: the URL is wrong, or the store cannot be opened.
    """
    location = parse_url(url)
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
        continuation = continue_run(store, run_dir, report_waiting, tick)
    if (result := continuation.downloaded) is None:
        return continuation.writer, []
    count = count_noun(len(result.checkpoints), "checkpoint")
    return continuation.writer, [f"continues the run in {store.location}: {count}, {size(result.size)}"]


def report_waiting(writer: str) -> None:
    """Print that a bucket's earlier writer may still write."""
    print(printable(f"bucket    waiting until {writer} is known to have ended"), flush=True)


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
