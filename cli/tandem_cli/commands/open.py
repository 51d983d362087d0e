"""`tandem open [RUN|NAME]`: the live page of a run, in a browser."""

import shlex
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tandem.coordinator_client import CoordinatorClient, Refused, Unreachable
from tandem.errors import UserError
from tandem.rundir.ownership import ENDPOINT
from tandem_cli.cluster import INTERRUPTED, ContextOption, NamespaceOption
from tandem_cli.local.known import MAX_NAMED, known
from tandem_cli.output import echo
from tandem_cli.runs import completed, found, in_folder


def open(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|NAME",
            help="A run of this machine, by its name or folder; else a job on a cluster.",
            show_default="the current run on this machine",
            autocompletion=completed,
        ),
    ] = "",
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the address instead of opening it; it works once.")
    ] = False,
    port: Annotated[
        int,
        typer.Option(
            "--port", min=0, max=65535, help="Port of this machine, for a cluster.", show_default="a free one"
        ),
    ] = 0,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Open the live page of a run: loss and scores, throughput, processors, members, and what happened.

    Of a job on a cluster it is reached through kubectl port-forward, until Ctrl-C. The address opens the page once and
    within ten minutes; the browser may look for a day.
    """
    one = found(run, namespace, context) if run or namespace or context else in_folder(_only_run())

    def show(endpoint: str, token: str, browser_is_here: bool) -> None:
        _show(_invited(endpoint, token), print_only or not browser_is_here)

    try:
        raise typer.Exit(one.page(port, show))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _only_run() -> Path:
    going = [path for path in known() if (path / ENDPOINT).is_file()]
    if len(going) == 1:
        return going[0]
    if not going:
        raise UserError("no run is active here. Give a run directory, or the name of a job on a cluster")
    some = ", ".join(str(path) for path in going[:MAX_NAMED])
    raise UserError(f"several runs are active: {some}. Choose one: tandem open {shlex.quote(str(going[0]))}")


def _invited(endpoint: str, token: str) -> str:
    """The address that opens the page once."""
    try:
        with CoordinatorClient(endpoint, token) as client:
            return f"http://{endpoint}/open#{client.invitation()}"
    except (Unreachable, Refused, ValueError) as error:
        raise UserError(f"{error}. Is the run still active?") from error


def _show(address: str, print_only: bool) -> None:
    if print_only:
        echo(address)
        return
    page = address.partition("/open")[0]
    if webbrowser.open(address):
        echo(f"opened {page}")
    else:
        echo(f"there is no browser here; open this address, which works once: {address}")
