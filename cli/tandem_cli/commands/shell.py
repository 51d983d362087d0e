"""`tandem shell JOB [WHO]`: a shell with the environment of a run's process, or in a pod of a job."""

import sys
from typing import Annotated

import typer

from tandem.errors import UserError
from tandem_cli.cluster import ContextOption, NamespaceOption
from tandem_cli.runs import TargetArgument, completed_processes, find_run

DEFAULT_PROCESS = "worker-0"


def shell(
    name: TargetArgument,
    process: Annotated[
        str,
        typer.Argument(
            metavar="WHO",
            help="worker-0, evaluator-1 or coordinator.",
            autocompletion=completed_processes,
        ),
    ] = DEFAULT_PROCESS,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Open a shell in the pod of a worker; for a local run, a shell with the environment of that process.

    It starts in the run directory on a cluster, and in the working directory of the process on this machine. Training
    continues.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("tandem shell needs a terminal; for a single command on a cluster there is `kubectl exec`")
    raise typer.Exit(find_run(name, namespace, context).shell(process))
