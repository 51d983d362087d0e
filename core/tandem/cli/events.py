"""`tandem events NAME`: what happened to a job on a cluster, in sentences."""

import time
from typing import Annotated

import typer
from rich.console import Console

from tandem.cli.cluster import INTERRUPTED, ContextOption, JobArgument, NamespaceOption, named
from tandem.cli.echo import echo, echo_json
from tandem.cli.status import WATCH_SECONDS, Output
from tandem.cluster import picture
from tandem.cluster.complaint import ClusterError, NotFound
from tandem.cluster.happenings import Happening, news
from tandem.cluster.kubectl import Kubectl
from tandem.cluster.records import happening_record
from tandem.cluster.sight import Sight, look
from tandem.mistake import UserError
from tandem.printable import printable
from tandem.view.console import PrintableConsole


def events(
    name: JobArgument,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until the job ends.")] = False,
    output: Annotated[Output, typer.Option("--output", "-o", help="Text for people, JSON for programs.")] = Output.TEXT,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Say what happened to a job and its pods, oldest first; what happened again and again is said once.

    Kubernetes forgets events after an hour or so. Needs kubectl, and uses what is set up for it.
    """
    if watch and output is Output.JSON:
        raise UserError("-o json says what has happened so far; leave --watch out")
    kubectl, console = Kubectl(namespace, context), PrintableConsole(highlight=False)
    sight = look(kubectl, named(name))
    if output is Output.JSON:
        echo_json([happening_record(one) for one in sight.happenings])
        return
    _print(console, sight.happenings)
    if not sight.happenings and not watch:
        echo(f"nothing is told of {name}; Kubernetes forgets events after an hour or so", err=True)
    if watch:
        raise typer.Exit(_followed(kubectl, name, console, sight))


def _followed(kubectl: Kubectl, name: str, console: Console, sight: Sight) -> int:
    """Until the job ends, is deleted, or Ctrl-C."""
    away = False
    try:
        while not sight.job.ended:
            time.sleep(WATCH_SECONDS)
            try:
                before, sight = sight, look(kubectl, name)
            except NotFound:
                echo(f"{name} was deleted", err=True)
                return 0
            except ClusterError as error:
                if not away:
                    echo(f"trying again: {printable(str(error)).splitlines()[0]}", err=True)
                away = True
                continue
            away = False
            _print(console, news(before.happenings, sight.happenings))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _print(console: Console, some: "tuple[Happening, ...] | list[Happening]") -> None:
    width = console.width if console.is_terminal else None
    for line in picture.happened(some, width, heading=False):
        console.print(line, soft_wrap=True)
