"""`tandem logs NAME`: the output of all processes of a run or of a job on a cluster, in one stream."""

import sys
from enum import StrEnum
from typing import Annotated

import typer

from tandem_cli.cluster import INTERRUPTED, ContextOption, NamespaceOption
from tandem_cli.log_lines import Choice, Line
from tandem_cli.output import echo
from tandem_cli.runs import TargetArgument, completed_processes, found

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
NARROWEST = len("coordinator")


class Role(StrEnum):
    """Pods of one kind."""

    WORKER = "worker"
    EVALUATOR = "evaluator"
    COORDINATOR = "coordinator"


def logs(
    name: TargetArgument,
    pods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHO…",
            help="worker-0, evaluator-1 or coordinator. Default: all.",
            show_default=False,
            autocompletion=completed_processes,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Watch until it ends.")] = False,
    role: Annotated[
        Role | None, typer.Option("--role", help="Only processes of this kind.", show_default="all")
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", min=1, help="Start with this many lines of each pod.", show_default="all")
    ] = None,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Print what all processes of a run, or all pods of a job, have printed, each line with who printed it.

    With --follow it goes on over restarts and pods that are replaced, until the end. For a cluster it needs kubectl,
    and uses what is set up for it.
    """
    choice, printed = Choice(role.value if role else "", tuple(pods or ()), tail), _Printed()
    try:
        for one in found(name, namespace, context).log(choice, follow, _tell):
            printed.write(one)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


class _Printed:
    """Lines with a coloured name before each, as wide as the longest so far."""

    def __init__(self) -> None:
        self._width = NARROWEST
        self._colours: dict[str, str] = {}

    def write(self, line: Line) -> None:
        colour = self._colours.setdefault(line.who, COLOURS[len(self._colours) % len(COLOURS)])
        self._width = max(self._width, len(line.who))
        echo(f" │ {line.text}", mark=line.who.ljust(self._width), colour=colour)


def _tell(text: str) -> None:
    """What is no line of a log goes elsewhere, so that a log in a file holds nothing else."""
    sys.stdout.flush()
    echo("", mark=text, colour="yellow", err=True)
