"""Sends a packed folder to the coordinator of a job on a cluster: `tandem submit --code DIR`.

The connection is that of `tandem open`: the job's token, and a port that kubectl forwards. The coordinator accepts only
the code that the job names (tandem_coordinator.code_intake). It runs a second or two after the job was created; until
then `send` waits, and a broken connection is made again.
"""

import sys
import time
from contextlib import suppress

from tandem.errors import UserError
from tandem.formatting import duration, size
from tandem.job import labels as names
from tandem.wire.coordinator_client import CoordinatorClient, CoordinatorRefused, Unreachable
from tandem_cli.kubernetes import forwarding
from tandem_cli.kubernetes.forwarding import Forward
from tandem_cli.kubernetes.job_view import fetch_job
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl
from tandem_cli.packing import Pack
from tandem_cli.platforms import Report

START_SECONDS = 180.0
"""Timeout for the coordinator to start, in seconds: its image may have to be pulled."""
POLL_SECONDS = 0.3
WATCH_SECONDS = 5
"""Timeout of one watch of the coordinator's pod, in whole seconds, as kubectl requires."""
REPORT_SECONDS = 10.0


def send(kubectl: Kubectl, job: str, pack: Pack, report: Report, draws: bool) -> None:
    """Store the code on the job's volume, unless it is already there.

    Args:
        draws: show on standard error how much is sent.

    Raises:
        UserError: it cannot be sent; the message says how to continue.
    """
    started = time.monotonic()
    report_at, reason = started + REPORT_SECONDS, ""
    while time.monotonic() - started < START_SECONDS:
        try:
            token = forwarding.token(kubectl, job)
            with Forward(kubectl, job) as forward:
                _send(forward.endpoint, token, pack, report, draws)
                return
        except (ClusterError, Unreachable) as error:
            reason = str(error).splitlines()[0]
        except CoordinatorRefused as error:
            raise UserError(f"{job} refused this code: {error}. See: tandem status {job}{kubectl.options()}") from error
        if end := _end_of(kubectl, job):
            if "(Succeeded)" in end:
                report(f"  {job} {end}; no code is sent", False)
                return
            raise UserError(f"{job} {end}; it accepts no code any more")
        if time.monotonic() > report_at:
            report_at += REPORT_SECONDS
            report(f"  waiting for the coordinator of {job} to accept the code: {reason}", True)
        _wait_for_coordinator(kubectl, job)
        time.sleep(POLL_SECONDS)
    raise UserError(
        f"the code was not sent within {duration(START_SECONDS)}: {reason}. {job} waits for it; once its coordinator "
        "runs, repeat `tandem submit` to send it"
    )


def _wait_for_coordinator(kubectl: Kubectl, job: str) -> None:
    """Wait until the coordinator's pod runs.

    One watching process leaves the cores to starting pods, which may be on this machine; a kubectl per poll would not.
    """
    running = ("--for=jsonpath={.status.phase}=Running", f"--timeout={WATCH_SECONDS}s")
    # If there is no pod, no permission or an old kubectl, the next attempt to send reports it.
    with suppress(ClusterError):
        kubectl.run("wait", "pods", f"--selector={names.JOB}={job},{names.ROLE}={names.COORDINATOR}", *running)


def _send(endpoint: str, token: str, pack: Pack, report: Report, draws: bool) -> None:
    with CoordinatorClient(endpoint, token, timeout=30.0) as client:
        if client.has_code(pack.digest):
            report("  the code is on the job's volume already", False)
            return
        started = time.monotonic()

        def sent(count: int) -> None:
            if draws:
                print(
                    f"\r  sending the code: {size(count)} of {size(pack.packed)}  ", end="", file=sys.stderr, flush=True
                )

        try:
            with pack.file.open("rb") as content:
                client.send_code(pack.digest, content, pack.packed, sent)
        finally:
            if draws:
                print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
        report(f"  the code was sent in {duration(time.monotonic() - started)}", False)


def _end_of(kubectl: Kubectl, job: str) -> str:
    """Describe how the job has ended; empty if it has not, or that is unknown."""
    with suppress(ClusterError):
        summary = fetch_job(kubectl, job)
        if summary.ended:
            return f"has ended ({summary.status.phase}): {summary.status.message or 'without a message'}"
    return ""
