"""`tandem open [RUN|NAME]`: the live page of a run, in a browser."""

import shlex
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tandem.coordinator_client import CoordinatorClient, Refused, Unreachable
from tandem.errors import UserError
from tandem.rundir.ownership import ENDPOINT
from tandem_cli.cluster import INTERRUPTED, ContextOption, NamespaceOption, named
from tandem_cli.kubernetes import forwarding
from tandem_cli.kubernetes.forwarding import Forward
from tandem_cli.kubernetes.job_view import ask_job
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl, NotFound
from tandem_cli.local.known import known
from tandem_cli.local.run_view import endpoint
from tandem_cli.output import echo
from tandem_cli.runs import asked, completed, local
from tandem_cli.slurm import jobs

MOST_NAMED = 8


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
    within ten minutes; the browser may look for a week.
    """
    folder = local(run, namespace, context) if run else None if namespace or context else _only_run()
    if folder is not None:
        endpoint, token = _endpoint(folder)
        _show(_invited(endpoint, token), print_only or jobs.of(folder) is not None)
        if jobs.of(folder) is not None:
            host, _, number = endpoint.rpartition(":")
            echo(
                "open it on your own machine, after: "
                f"ssh -N -L {number}:{host}:{number} LOGIN-NODE, with localhost in place of {host}",
                err=True,
            )
        return
    with asked(run, namespace, context):
        raise typer.Exit(_on_a_cluster(Kubectl(namespace, context), named(run), port, print_only))


def _only_run() -> Path:
    going = [path for path in known() if (path / ENDPOINT).is_file()]
    if len(going) == 1:
        return going[0]
    if not going:
        raise UserError("no run is active here. Give a run directory, or the name of a job on a cluster")
    some = ", ".join(str(path) for path in going[:MOST_NAMED])
    raise UserError(f"several runs are active: {some}. Choose one: tandem open {shlex.quote(str(going[0]))}")


def _endpoint(folder: Path) -> tuple[str, str]:
    """Address and token of the coordinator of a run on this machine."""
    file = folder / ENDPOINT
    if not file.exists():
        raise UserError(
            f"{folder} is not running, so it has no live page. For its results: tandem report "
            f"{shlex.quote(str(folder))}"
        )
    if (found := endpoint(folder)) is None:
        raise UserError(f"{file} cannot be read; only the user who started the run can read it")
    return found


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


def _on_a_cluster(kubectl: Kubectl, name: str, port: int, print_only: bool) -> int:
    if over := _ended(kubectl, name):
        raise UserError(f"{over}, and its coordinator is gone, and the page with it. See: tandem status {name}")
    token = forwarding.token(kubectl, name)
    try:
        with Forward(kubectl, name, port) as forward:
            _show(_invited(forward.endpoint, token), print_only)
            echo(f"http://{forward.endpoint} leads to {name}; Ctrl-C closes it", err=True)
            over = forwarding.until_it_ends(forward, lambda: _ended_if_known(kubectl, name), _tell)
            echo(over, err=True)
            return 0
    except KeyboardInterrupt:
        return INTERRUPTED


def _ended(kubectl: Kubectl, name: str) -> str:
    """How the job has ended, empty while it has not."""
    job = ask_job(kubectl, name)
    return f"{name} has ended ({job.status.phase})" if job.ended else ""


def _ended_if_known(kubectl: Kubectl, name: str) -> str:
    try:
        return _ended(kubectl, name)
    except NotFound:
        return f"{name} was deleted"
    except ClusterError:
        return ""


def _tell(text: str) -> None:
    echo(text, err=True)
