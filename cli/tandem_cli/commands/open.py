"""`tandem open [RUN|NAME]`: the live page of a run, in a browser."""

import shlex
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import UserError
from tandem.rundir.ownership import ENDPOINT
from tandem.wire.coordinator_client import CoordinatorClient, CoordinatorRefused, Unreachable
from tandem_cli.cluster import INTERRUPTED, ContextOption, NamespaceOption
from tandem_cli.local.known import MAX_SUGGESTIONS, list_runs
from tandem_cli.output import echo
from tandem_cli.runs import completed, find_run, in_folder


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
    """Open the live page of a run: loss and scores, throughput, CPUs and GPUs, members, and events.

    The page of a job on a cluster is forwarded with kubectl port-forward until Ctrl-C. The address works once, within
    ten minutes; the browser then has access for a day.
    """
    target = find_run(run, namespace, context) if run or namespace or context else in_folder(_only_run())

    def show(endpoint: str, token: str, browser_is_here: bool) -> None:
        _show(_invited(endpoint, token), print_only or not browser_is_here)

    try:
        raise typer.Exit(target.page(port, show))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _only_run() -> Path:
    active = [path for path in list_runs() if (path / ENDPOINT).is_file()]
    if len(active) == 1:
        return active[0]
    if not active:
        raise UserError("no run is active here. Give a run directory, or the name of a job on a cluster")
    paths = ", ".join(str(path) for path in active[:MAX_SUGGESTIONS])
    raise UserError(f"several runs are active: {paths}. Choose one: tandem open {shlex.quote(str(active[0]))}")


def _invited(endpoint: str, token: str) -> str:
    """Return an address that opens the page once."""
    try:
        with CoordinatorClient(endpoint, token) as client:
            return f"http://{endpoint}/open#{client.invitation()}"
    except (Unreachable, CoordinatorRefused, ValueError) as error:
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
