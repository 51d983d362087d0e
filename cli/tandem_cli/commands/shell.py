"""`tandem shell JOB [WHO]`: a shell beside a process of a run, or in a pod of a job."""

import sys
from typing import Annotated

import typer

from tandem.errors import UserError
from tandem_cli.cluster import ContextOption, NamespaceOption
from tandem_cli.runs import TargetArgument, completed_processes, found

FIRST = "worker-0"


def shell(
    name: TargetArgument,
    who: Annotated[
        str,
        typer.Argument(
            metavar="WHO",
            help="worker-0, evaluator-1 or coordinator.",
            autocompletion=completed_processes,
        ),
    ] = FIRST,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Open a shell in the pod of a worker; for a run of this machine, one with the variables of that process.

    It starts in the run directory on a cluster, and in the folder of the process here. Training continues.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("tandem shell needs a terminal; for a single command on a cluster there is `kubectl exec`")
    raise typer.Exit(found(name, namespace, context).shell(who))
