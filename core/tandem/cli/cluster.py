"""The options and the argument that all commands to a cluster share."""

from typing import Annotated

import typer

NamespaceOption = Annotated[
    str, typer.Option("--namespace", "-n", help="Namespace, as for kubectl.", show_default="the context's")
]
ContextOption = Annotated[
    str, typer.Option("--context", help="Context of your kubeconfig, as for kubectl.", show_default="the current one")
]
JobArgument = Annotated[str, typer.Argument(metavar="NAME", help="The job's name.", show_default=False)]

INTERRUPTED = 130
"""Ctrl-C is how one leaves what goes on for ever; nothing is lost by it."""
