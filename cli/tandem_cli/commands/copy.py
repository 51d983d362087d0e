"""`tandem copy JOB [FOLDER]`: the run directory of a job on Kubernetes, on this machine."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tandem.errors import join_names
from tandem.formatting import one_line, size
from tandem_cli.cluster import ContextOption, JobArgument, NamespaceOption, validate_job_name
from tandem_cli.kubernetes import copying
from tandem_cli.kubernetes.kubectl import Kubectl
from tandem_cli.output import echo
from tandem_cli.terminal.canvas import PrintableConsole

MAX_LISTED_CHECKPOINTS = 5


def copy(
    name: JobArgument,
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER", help="A new or empty folder, or an earlier copy of the job.", show_default="runs/NAME"
        ),
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            metavar="WORD",
            help="Checkpoints to copy: a name, `latest`, `best`, `all` or `none`. Repeatable.",
            show_default="latest and best",
        ),
    ] = None,
    image: Annotated[
        str,
        typer.Option(
            "--image",
            help="Image with Tandem, for a job that has no pods any more.",
            show_default="that of the job's last pod",
        ),
    ] = "",
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Copy the results of a job on Kubernetes to this machine: logs, scores, and its latest and best checkpoint.

    All commands for runs work on the copy: `report`, `compare`, `export`, `checkpoints`. The job may be running or
    over. Run the same command again to copy new files.
    """
    folder = target or Path("runs", name)
    with _bar() as tick:
        copied = copying.copy(
            Kubectl(namespace, context), validate_job_name(name), folder, checkpoint or ["latest", "best"], image, tick
        )
    with_what = f", with {join_names(copied.checkpoints, MAX_LISTED_CHECKPOINTS)}" if copied.checkpoints else ""
    echo(f"copied    {size(copied.size)} to {folder}{with_what}")
    for fault in copied.faults:
        echo("", mark=f"warning: {one_line(fault)}; not copied", colour="yellow", err=True)
    echo(f"next      tandem report {shlex.quote(str(folder))}")
    if copied.faults:
        raise typer.Exit(1)


@contextmanager
def _bar() -> Iterator[copying.Tick]:
    """Show a progress bar on a terminal."""
    console = PrintableConsole(highlight=False, stderr=True)
    columns = (TextColumn("copying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("copying", total=None)
        yield lambda count, total: bar.update(task, completed=count, total=total)
