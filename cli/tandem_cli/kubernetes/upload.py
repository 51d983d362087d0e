"""Sends a packed folder to the coordinator of a job on a cluster: `tandem submit --code DIR`.

The way is that of `tandem open`: the job's token, and a port that kubectl forwards. The coordinator takes the code that
the job names and no other (tandem_coordinator.code_intake). It is there a second or two after the job was made; until
then this waits, and a way that breaks is made anew.
"""

import sys
import time
from contextlib import suppress

from tandem import labels as names
from tandem.coordinator_client import CoordinatorClient, Refused, Unreachable
from tandem.errors import UserError
from tandem.formatting import duration, size
from tandem_cli.kubernetes import forwarding
from tandem_cli.kubernetes.forwarding import Forward
from tandem_cli.kubernetes.job_view import ask_job
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl
from tandem_cli.output import echo
from tandem_cli.packing import Pack

PATIENCE_SECONDS = 180.0
"""For a coordinator that is not there yet: its image may have to be pulled first."""
POLL_SECONDS = 0.3
WATCH_SECONDS = 5
"""For one watch of the coordinator's pod; whole, as kubectl wants it."""
SAY_SECONDS = 10.0


def send(kubectl: Kubectl, job: str, pack: Pack) -> None:
    """Have the code on the job's volume; nothing is sent if it is there.

    Raises:
        UserError: it cannot be sent; says how to go on.
    """
    began = time.monotonic()
    say_at, why = began + SAY_SECONDS, ""
    while time.monotonic() - began < PATIENCE_SECONDS:
        try:
            token = forwarding.token(kubectl, job)
            with Forward(kubectl, job) as forward:
                _send(forward.endpoint, token, pack)
                return
        except (ClusterError, Unreachable) as error:
            why = str(error).splitlines()[0]
        except Refused as error:
            raise UserError(
                f"{job} does not take this code: {error}. See: tandem status {job}{kubectl.options()}"
            ) from error
        if over := _over(kubectl, job):
            if "(Succeeded)" in over:
                echo(f"  {job} {over}; no code is sent")
                return
            raise UserError(f"{job} {over}, and takes no code any more")
        if time.monotonic() > say_at:
            say_at += SAY_SECONDS
            echo(f"  waiting for the coordinator of {job}, which takes the code: {why}", err=True)
        _watch(kubectl, job)
        time.sleep(POLL_SECONDS)
    raise UserError(
        f"the code was not sent within {duration(PATIENCE_SECONDS)}: {why}. {job} stays and waits for it; once its "
        "coordinator runs, the same `tandem submit` again sends it"
    )


def _watch(kubectl: Kubectl, job: str) -> None:
    """Wait until the coordinator's pod runs. One process that watches leaves the cores to pods that start, which may be
    on this machine; a kubectl for each look takes them time."""
    running = ("--for=jsonpath={.status.phase}=Running", f"--timeout={WATCH_SECONDS}s")
    # Without the pod, the right to watch it or a kubectl that can, the next try to send says what is missing.
    with suppress(ClusterError):
        kubectl.ask("wait", "pods", f"--selector={names.JOB}={job},{names.ROLE}={names.COORDINATOR}", *running)


def _send(endpoint: str, token: str, pack: Pack) -> None:
    with CoordinatorClient(endpoint, token, timeout=30.0) as client:
        if client.has_code(pack.digest):
            echo("  the code is on the job's volume already")
            return
        began, shows = time.monotonic(), sys.stderr.isatty()

        def sent(count: int) -> None:
            if shows:
                print(
                    f"\r  sending the code: {size(count)} of {size(pack.packed)}  ", end="", file=sys.stderr, flush=True
                )

        try:
            with pack.file.open("rb") as content:
                client.send_code(pack.digest, content, pack.packed, sent)
        finally:
            if shows:
                print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
        echo(f"  the code was sent in {duration(time.monotonic() - began)}")


def _over(kubectl: Kubectl, job: str) -> str:
    """How the job has ended; empty while it has not, or that is not known."""
    with suppress(ClusterError):
        found = ask_job(kubectl, job)
        if found.ended:
            return f"has ended ({found.status.phase}): {found.status.message or 'without a message'}"
    return ""
