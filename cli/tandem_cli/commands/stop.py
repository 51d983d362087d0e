"""`tandem stop RUN`: makes a run of this machine or on SLURM save and leave, from another terminal."""

import signal
import time
from typing import Annotated

import psutil
import typer

from tandem.errors import UserError
from tandem.rundir.layout import RunDir
from tandem_cli.cluster import INTERRUPTED
from tandem_cli.local.known import is_alive, own_command
from tandem_cli.local.processes import starter
from tandem_cli.output import echo
from tandem_cli.runs import RunArgument, opened
from tandem_cli.slurm import jobs
from tandem_cli.terminal.summary import saved_words

POLL_SECONDS = 0.1


def stop(
    run: RunArgument,
    at_once: Annotated[
        bool, typer.Option("--now", help="End everything at once, without saving: a second Ctrl-C.")
    ] = False,
) -> None:
    """Have a run save and leave, as Ctrl-C in its terminal does; returns when it has.

    A run on SLURM is not requeued then; --now cancels its jobs. A job on Kubernetes is suspended by its field
    `runPolicy.suspend`.
    """
    rundir = opened(run)
    if not is_alive(rundir.path):
        raise UserError(f"{rundir.path} is not running")
    if jobs.of(rundir.path) is not None:
        _stop_on_slurm(rundir, at_once)
        return
    if (process := starter(rundir.path)) is None:
        raise UserError(f"{rundir.path} is just ending, or has not recorded its process yet; try again")
    try:
        for _ in range(2 if at_once else 1):
            process.send_signal(signal.SIGINT)
            # Two that arrive together are one.
            time.sleep(POLL_SECONDS)
        while is_alive(rundir.path):
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except psutil.NoSuchProcess:
        pass
    echo(f"{rundir.path} is stopped; {saved_in(rundir)}")


def _stop_on_slurm(rundir: RunDir, at_once: bool) -> None:
    jobs.stop(rundir.path, at_once)
    try:
        while jobs.queued(rundir.path):
            time.sleep(jobs.REMEMBERED_SECONDS)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    echo(f"{rundir.path} is stopped; {saved_in(rundir)}")


def saved_in(rundir: RunDir) -> str:
    """What a run that was stopped has saved."""
    saved = rundir.committed()
    return saved_words(saved[0].step if saved else None, own_command(rundir.path))
