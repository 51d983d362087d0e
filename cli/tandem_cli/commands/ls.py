"""`tandem ls`: the runs of this machine."""

import time
from typing import Annotated

import typer

from tandem_cli.local.known import list_runs
from tandem_cli.local.run_view import job_summary
from tandem_cli.output import Output, OutputOption, echo, emit
from tandem_cli.terminal import tables
from tandem_cli.terminal.tables import job_record
from tandem_launcher.terminal.canvas import PrintableConsole

DEFAULT_COUNT = 20
"""Number of runs that are listed without --all."""


def ls(
    everything: Annotated[
        bool, typer.Option("--all", "-a", help=f"List all runs; default: the first {DEFAULT_COUNT}.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """List the runs of this machine: those in this folder, then all others that you started with `tandem run`; of both
    the newest first.
    """
    paths = list_runs()
    jobs = [job_summary(path) for path in (paths if everything else paths[:DEFAULT_COUNT])]
    if output.is_data:
        emit([job_record(job) for job in jobs], output)
        return
    if not jobs:
        echo("no runs on this machine yet; start one with: tandem run FILE", err=True)
        return
    console = PrintableConsole(highlight=False)
    width = console.width if console.is_terminal and output is not Output.WIDE else None
    for line in tables.jobs(jobs, width, time.time(), with_namespace=True, place="RUN"):
        console.print(line, soft_wrap=True)
    if len(jobs) < len(paths):
        echo(f"{len(paths) - len(jobs)} more: tandem ls --all", err=True)
