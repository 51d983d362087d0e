"""The options and the argument that all cluster commands share."""

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
"""Ctrl-C is how one leaves what goes on for ever; nothing is lost by it."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def named(name: str) -> str:
    """A job's name, which kubectl must not take for anything else.

    Raises:
        UserError: it is none.
    """
    if _NAME.fullmatch(name):
        return name
    if "/" in name:
        run = shlex.quote(name)
        raise UserError(f"{name} is not a job name. For a run on this machine: tandem report {run}")
    raise UserError(f"{name} is not a job name: lower-case letters, digits and dashes")
