"""`tandem logs NAME`: the output of all processes of a run or of a job on a cluster, in one stream."""

import sys
from enum import StrEnum
from typing import Annotated

import typer

from tandem_cli.cluster import INTERRUPTED, ContextOption, NamespaceOption
from tandem_cli.log_lines import Line, LogSelection
from tandem_cli.output import echo
from tandem_cli.runs import TargetArgument, completed_processes, find_run

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
MIN_NAME_WIDTH = len("coordinator")


class Role(StrEnum):
    """Role of a process."""

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
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until it ends.")] = False,
    role: Annotated[
        Role | None, typer.Option("--role", help="Only processes of this kind.", show_default="all")
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", min=1, help="Start with this many lines of each pod.", show_default="all")
    ] = None,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Print the output of all processes of a run, or of all pods of a job, each line after the name of its process.

    With --follow it continues across restarts and replaced pods until the end. For a cluster it needs kubectl, and uses
    its configuration.
    """
    selection, printer = LogSelection(role.value if role else "", tuple(pods or ()), tail), _LinePrinter()
    try:
        for line in find_run(name, namespace, context).log(selection, follow, _notify):
            printer.write(line)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


class _LinePrinter:
    """Prints lines after the coloured name of their process, which is padded to the longest so far."""

    def __init__(self) -> None:
        self._width = MIN_NAME_WIDTH
        self._colours: dict[str, str] = {}

    def write(self, line: Line) -> None:
        colour = self._colours.setdefault(line.process, COLOURS[len(self._colours) % len(COLOURS)])
        self._width = max(self._width, len(line.process))
        echo(f" │ {line.text}", mark=line.process.ljust(self._width), colour=colour)


def _notify(text: str) -> None:
    """Print a message to standard error, so that standard output has only lines of logs."""
    sys.stdout.flush()
    echo("", mark=text, colour="yellow", err=True)
