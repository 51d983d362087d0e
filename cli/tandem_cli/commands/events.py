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
from tandem_cli.platforms import Gone, PlatformError, Run
from tandem_cli.runs import TargetArgument, found
from tandem_cli.terminal import tables
from tandem_cli.terminal.canvas import PrintableConsole
from tandem_cli.terminal.tables import event_record
from tandem_cli.view import JobEvent, JobView, news


def events(
    name: TargetArgument,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Watch until it ends.")] = False,
    output: OutputOption = Output.TEXT,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Say what happened to a run, or to a job and its pods, oldest first; what happened again and again is said once.

    Kubernetes forgets events after an hour or so; a run of this machine keeps all. For a cluster it needs kubectl, and
    uses what is set up for it.
    """
    if watch and output.is_data:
        raise UserError(f"-o {output.value} prints the events so far; omit --watch")
    run, console = found(name, namespace, context), PrintableConsole(highlight=False)
    seen = run.look()
    if output.is_data:
        emit([event_record(one) for one in seen.job_events], output)
        return
    wide = output is Output.WIDE
    _print(console, seen.job_events, wide)
    if not seen.job_events and not watch:
        echo(f"nothing is told of {name}{run.forgets}", err=True)
    if watch:
        raise typer.Exit(_followed(run, console, seen, wide))


def _followed(run: Run, console: Console, seen: JobView, wide: bool) -> int:
    """Until it ends, is deleted, or Ctrl-C."""
    away = False
    try:
        while not run.is_over(seen):
            time.sleep(WATCH_SECONDS)
            try:
                before, seen = seen, run.look()
            except Gone:
                echo(f"{seen.job.name} was deleted", err=True)
                return 0
            except PlatformError as error:
                if not away:
                    echo(f"trying again: {printable(str(error)).splitlines()[0]}", err=True)
                away = True
                continue
            away = False
            _print(console, news(before.job_events, seen.job_events), wide)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _print(console: Console, some: Sequence[JobEvent], wide: bool) -> None:
    width = console.width if console.is_terminal and not wide else None
    for line in tables.happened(some, width, heading=False):
        console.print(line, soft_wrap=True)
