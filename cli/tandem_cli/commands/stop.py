"""`tandem stop NAME`: makes a run or a job save and leave, from another terminal."""

from typing import Annotated

import typer

from tandem_cli.cluster import INTERRUPTED, ContextOption, NamespaceOption
from tandem_cli.output import echo
from tandem_cli.runs import TargetArgument, found


def stop(
    name: TargetArgument,
    at_once: Annotated[
        bool, typer.Option("--now", help="End everything at once, without saving: a second Ctrl-C.")
    ] = False,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Have a run save and leave, as Ctrl-C in its terminal does; returns when it has.

    A run on SLURM is not requeued then; --now cancels its jobs. A job on Kubernetes is suspended, as its field
    `runPolicy.suspend` does.
    """
    try:
        echo(found(name, namespace, context).stop(at_once))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
