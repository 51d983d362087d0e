"""`tandem stop NAME`: saves and stops a run or a job."""

import shlex
from typing import Annotated

import typer

from tandem_cli.cluster import INTERRUPTED, ContextOption, NamespaceOption
from tandem_cli.output import echo
from tandem_cli.runs import TargetArgument, find_run
from tandem_cli.sweep.definition import find_sweep


def stop(
    name: TargetArgument,
    immediately: Annotated[
        bool, typer.Option("--now", help="Stop immediately, without a save, as a second Ctrl-C does.")
    ] = False,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Save and stop a run, as Ctrl-C in its terminal does, and wait for its end.

    A run on SLURM is not requeued; --now cancels its jobs. A job on Kubernetes is suspended, as with its field
    `runPolicy.suspend`. A sweep stops with its trials; those on Kubernetes go on.
    """
    try:
        if not (namespace or context) and (sweep := find_sweep(name)) is not None:
            sweep.stop()
            echo(f"{sweep.path} is stopped; to continue: tandem sweep {shlex.quote(str(sweep.path))}")
            return
        echo(find_run(name, namespace, context).stop(immediately))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
