"""`tandem ui [RUN]`: the MLflow of a run, in a browser."""

import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Annotated

import psutil
import typer

from tandem.errors import UserError
from tandem.job.tracking import FILE, QUIET, database, local_store, tracking_uri, without_password
from tandem.processes.distribution import install_command
from tandem.processes.launch import module_command
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.layout import RunDir
from tandem_cli.cluster import INTERRUPTED
from tandem_cli.output import echo
from tandem_cli.runs import completed, open_run

HOST = "127.0.0.1"
START_SECONDS, POLL_SECONDS = 120.0, 0.2
"""Timeout of the start of MLflow's server, and poll interval, in seconds; it takes 5 s on two idle cores."""
SERVER_VARIABLES = QUIET | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""Environment variables of the server; its other features would be three more processes."""


def ui(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run of this machine, by its folder or name.",
            show_default="the local store in runs/",
            autocompletion=completed,
        ),
    ] = "",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port of MLflow's server.", show_default="a free one")
    ] = 0,
    print_only: Annotated[bool, typer.Option("--print", help="Print the address instead of opening it.")] = False,
) -> None:
    """Open the MLflow of a run.

    For a run that is tracked in a local store, the command starts a server on this machine until Ctrl-C.
    """
    folder = open_run(Path(run)).path if run else None
    uri = local_store(Path("runs/any")) if folder is None else _uri(folder)
    page = "" if folder is None else _page(folder, uri)
    if uri.startswith(("http://", "https://")):
        _show(f"{without_password(uri).rstrip('/')}/{page}", print_only)
        return
    file = database(uri)
    if file is not None and not file.exists():
        raise UserError(f"{file} does not exist, so nothing was tracked yet; see docs/tracking.md")
    if find_spec("sqlalchemy") is None or find_spec("mlflow") is None:
        raise UserError(f"tandem ui needs mlflow; install it with: {install_command('mlflow')}")
    try:
        with _server(uri, port or _free_port()) as address:
            _show(f"{address}/{page}", print_only)
            echo(f"MLflow answers at {address}; Ctrl-C ends it", err=True)
            while True:
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _uri(folder: Path) -> str:
    job = RunDir(folder).read_job()
    if (mlflow := job.spec.tracking.mlflow) is None:
        raise UserError(f"{folder} is not tracked; give its job `tracking: {{mlflow: {{}}}}` in spec")
    uri = tracking_uri(mlflow, folder, os.environ)
    assert uri is not None, "not on a cluster"
    return uri


def _page(folder: Path, uri: str) -> str:
    """Return the path of the run's page in MLflow; empty if the run was not sent there."""
    noted = read_json_or_none(RunDir(folder).tracking / FILE)
    if not isinstance(noted, dict) or noted.get("uri") != without_password(uri) or "runId" not in noted:
        return ""
    return f"#/experiments/{noted['experimentId']}/runs/{noted['runId']}"


def _show(address: str, print_only: bool) -> None:
    if print_only or not webbrowser.open(address):
        echo(address)
    else:
        echo(f"opened {address}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def _server(uri: str, port: int) -> Iterator[str]:
    """Start MLflow's server of a store; yield its address once it answers."""
    command = module_command("mlflow", "server", "--backend-store-uri", uri, "--workers", "1")
    command += ["--host", HOST, "--port", str(port)]
    address = f"http://{HOST}:{port}"
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, env={**os.environ, **SERVER_VARIABLES}, stdout=output, stderr=output)
        try:
            _wait(process, address, output)
            yield address
        finally:
            _end(process)


def _wait(process: "subprocess.Popen[bytes]", address: str, output: IO[bytes]) -> None:
    echo(f"starting MLflow's server at {address}", err=True)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            output.seek(0)
            last = (output.read().decode(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise UserError(f"MLflow's server has ended with exit code {process.returncode}: {last}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=START_SECONDS):  # noqa: S310 - our own address
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(POLL_SECONDS)
    raise UserError(f"MLflow's server did not answer within {START_SECONDS:g} s")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the server and its workers, which a killed server would leave behind."""
    processes = [psutil.Process(process.pid)] if process.poll() is None else []
    processes += [child for parent in processes for child in parent.children(recursive=True)]
    for victim in processes:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
