"""`tandem scale NAME N`: changes the number of workers of a job while it runs."""

from typing import Annotated

import typer

from tandem_cli.cluster import ContextOption, NamespaceOption
from tandem_cli.output import echo
from tandem_cli.runs import TargetArgument, find_run


def scale(
    name: TargetArgument,
    replicas: Annotated[int, typer.Argument(metavar="N", min=1, help="Target number of workers.")],
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Change the number of workers of a job on SLURM or Kubernetes while it runs.

    N is between `workers.minReplicas` and `workers.maxReplicas`. The group saves, and continues with N workers.
    """
    echo(find_run(name, namespace, context).scale(replicas))
