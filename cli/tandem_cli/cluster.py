"""Options and arguments that the cluster commands share."""

import re
import shlex
from typing import Annotated

import typer

from tandem.errors import UserError

NamespaceOption = Annotated[
    str, typer.Option("--namespace", "-n", help="Namespace, as for kubectl.", show_default="the context's")
]
ContextOption = Annotated[
    str, typer.Option("--context", help="Context of your kubeconfig, as for kubectl.", show_default="the current one")
]
ProfileOption = Annotated[
    str,
    typer.Option("--profile", help="SLURM: profile in ~/.config/tandem/slurm.yaml.", show_default="the file's default"),
]
JobArgument = Annotated[str, typer.Argument(metavar="NAME", help="The job's name.", show_default=False)]

INTERRUPTED = 130
"""Exit code after Ctrl-C, the normal way to leave a command that runs forever."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def validate_job_name(name: str) -> str:
    """Check a job's name, so that kubectl cannot take it for an option; return it.

    Raises:
        UserError: it is not a valid name.
    """
    if _NAME.fullmatch(name):
        return name
    if "/" in name:
        run = shlex.quote(name)
        raise UserError(f"{name} is not a job name. For a run on this machine: tandem report {run}")
    raise UserError(f"{name} is not a job name: lower-case letters, digits and dashes")
