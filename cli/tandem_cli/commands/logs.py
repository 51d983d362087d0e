"""`tandem logs NAME`: the output of all processes of a run or of a job on a cluster, in one stream."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tandem_cli.cluster import INTERRUPTED, ContextOption, NamespaceOption, named
from tandem_cli.kubernetes.following import Choice, Follower, Line, check, chosen, whole
from tandem_cli.kubernetes.job_view import Pod, ask_job, ask_pods
from tandem_cli.kubernetes.kubectl import Kubectl
from tandem_cli.local.known import is_alive
from tandem_cli.local.run_output import Logs
from tandem_cli.output import echo
from tandem_cli.runs import TargetArgument, asked, completed_processes, local

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
    path = local(name, namespace, context)
    if path is not None:
        raise typer.Exit(_here(path, tuple(pods or ()), role.value if role else "", tail, follow))
    kubectl = Kubectl(namespace, context)
    with asked(name, namespace, context):
        ask_job(kubectl, named(name))
    there = ask_pods(kubectl, name)
    choice = Choice(role.value if role else "", tuple(pods or ()))
    check(there, choice, name)
    wanted, seen = chosen(there, choice), dict[str, int]()
    printed = _Printed(there)
    if not wanted and not follow:
        echo(f"no pod of {name} has a log: see tandem status {name}{kubectl.options()}", err=True)
        return
    follower = None
    try:
        for one in whole(kubectl, wanted, tail, seen, _tell):
            printed.write(one)
        if follow:
            follower = Follower(kubectl, name, choice, seen, _tell)
            for one in follower.lines():
                printed.write(one)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if follower is not None:
            follower.close()


def _here(path: Path, names: tuple[str, ...], role: str, tail: int | None, follow: bool) -> int:
    """The logs of a run of this machine."""
    found, printed = Logs(path, names, role, tail), _Printed(())
    try:
        some = False
        for one in found.lines():
            printed.write(one)
            some = True
        if follow:
            for one in found.follow(lambda: not is_alive(path)):
                printed.write(one)
        elif not some:
            echo(f"nothing is printed yet in {path}", err=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


class _Printed:
    """Lines with a coloured name before each, as wide as the longest that is to be expected."""

    def __init__(self, pods: tuple[Pod, ...]) -> None:
        self._width = max([NARROWEST, *(len(pod.name) for pod in pods)])
        self._colours: dict[str, str] = {}

    def write(self, line: Line) -> None:
        colour = self._colours.setdefault(line.who, COLOURS[len(self._colours) % len(COLOURS)])
        self._width = max(self._width, len(line.who))
        echo(f" │ {line.text}", mark=line.who.ljust(self._width), colour=colour)


def _tell(text: str) -> None:
    """What is no line of a log goes elsewhere, so that a log in a file holds nothing else."""
    sys.stdout.flush()
    echo("", mark=text, colour="yellow", err=True)
