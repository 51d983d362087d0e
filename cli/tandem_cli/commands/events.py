"""`tandem events NAME`: the history of a local run or of a job on a cluster, as sentences."""

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from tandem.errors import UserError
from tandem.formatting import printable
from tandem_cli.cluster import INTERRUPTED, ContextOption, NamespaceOption
from tandem_cli.commands.status import WATCH_SECONDS
from tandem_cli.output import Output, OutputOption, echo, emit
from tandem_cli.platforms import PlatformError, Run, RunNotFoundError
from tandem_cli.runs import TargetArgument, find_run
from tandem_cli.terminal import tables
from tandem_cli.terminal.tables import event_record
from tandem_cli.view import JobEvent, JobView, new_events
from tandem_launcher.terminal.canvas import PrintableConsole


def events(
    name: TargetArgument,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Watch until it ends.")] = False,
    output: OutputOption = Output.TEXT,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """List the events of a run, or of a job and its pods, oldest first; repeated events are listed once.

    Kubernetes deletes events after an hour or so; a local run keeps all. For a cluster it needs kubectl, and uses its
    configuration.
    """
    if watch and output.is_data:
        raise UserError(f"-o {output.value} prints the events so far; omit --watch")
    run, console = find_run(name, namespace, context), PrintableConsole(highlight=False)
    view = run.view()
    if output.is_data:
        emit([event_record(event) for event in view.job_events], output)
        return
    wide = output is Output.WIDE
    _print(console, view.job_events, wide)
    if not view.job_events and not watch:
        echo(f"{name} has no events{run.forgets}", err=True)
    if watch:
        raise typer.Exit(_follow(run, console, view, wide))


def _follow(run: Run, console: Console, view: JobView, wide: bool) -> int:
    """Print new events until the run ends or is deleted, or Ctrl-C; return the exit code."""
    is_unreachable = False
    try:
        while not run.is_over(view):
            time.sleep(WATCH_SECONDS)
            try:
                before, view = view, run.view()
            except RunNotFoundError:
                echo(f"{view.job.name} was deleted", err=True)
                return 0
            except PlatformError as error:
                if not is_unreachable:
                    echo(f"trying again: {printable(str(error)).splitlines()[0]}", err=True)
                is_unreachable = True
                continue
            is_unreachable = False
            _print(console, new_events(before.job_events, view.job_events), wide)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _print(console: Console, job_events: Sequence[JobEvent], wide: bool) -> None:
    width = console.width if console.is_terminal and not wide else None
    for line in tables.happened(job_events, width, heading=False):
        console.print(line, soft_wrap=True)
