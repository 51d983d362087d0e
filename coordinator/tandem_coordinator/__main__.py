"""Starts a coordinator: `python -m tandem_coordinator --host HOST --port PORT [--metrics-port PORT] [--port-file FILE]
[--job FILE]`.

The job is in the run directory already, where `tandem run` starts it; in a pod it comes in a file of its own, and the
coordinator records it for all others.
"""

import argparse
import asyncio
import errno
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tandem.errors import UserError
from tandem.exitcode import ExitCode
from tandem.http_server import BACKLOG, HttpServer
from tandem.job import DistributedTrainingJob, OnExisting
from tandem.launch import EVERYWHERE, INCARNATION, JOB, POD, RUN_DIR, TOKEN, TOKEN_DIGEST, listen, weakness
from tandem.manifest.fields import dotted
from tandem.manifest.reading import read_job
from tandem.reasons import CONFIGURATION_ERROR
from tandem.rundir.durable import lacks, temporary_beside
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import Finding, Occupied, Unreadable, complete_moves, look, recorded, settle
from tandem_coordinator.coordinator import Coordinator
from tandem_coordinator.prerequisites import pod, unmet
from tandem_coordinator.server import application, metrics_application
from tandem_coordinator.state_store import StateStore, TakenOver
from tandem_coordinator.tracking.tracker import Tracker

GRACE_SECONDS = 1.0
"""For requests that are being answered when the coordinator is told to stop; held ones are answered at once."""

COLLECT_AFTER = (50_000, 20, 100)
"""Thresholds of the garbage collector. With the usual ones it walks through the objects of thousands of connections
again and again: with 10,000 agents half of the processor's time was its."""

SUBMIT = "tandem submit FILE --set spec.checkpoint.onExisting"
"""What the user types, up to the value."""
MAX_DIFFERENCES = 3
"""More differences between two jobs are counted, not listed: of a container's last words 500 characters are kept."""

log = logging.getLogger("tandem.coordinator")


class CannotStart(Exception):  # noqa: N818 - reads as the sentence it is
    """What the user has to put right first."""


def main() -> None:
    """Coordinate one job until SIGTERM."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s level=%(levelname)s %(message)s")
    parser = argparse.ArgumentParser(prog="python -m tandem_coordinator", description="Coordinate one training job.")
    parser.add_argument("--host", default=EVERYWHERE, help="address to listen on (default: all)")
    parser.add_argument("--port", type=int, default=7070, help="port to listen on; 0 takes a free one")
    parser.add_argument(
        "--metrics-port",
        type=int,
        help="port for /metrics without the token; 0 takes a free one (default: none)",
    )
    parser.add_argument("--port-file", type=Path, help="file to write the ports to, once they are open")
    parser.add_argument(
        "--job",
        type=Path,
        default=os.environ.get(JOB) or None,
        metavar="FILE",
        help=f"manifest of the job, to be recorded in the run directory (default: what {JOB} names; else it is there)",
    )
    args = parser.parse_args()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    # A connection for each agent: the usual limit of 1,024 is there for programs that use select.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        code = asyncio.run(_serve(args.host, args.port, args.metrics_port, args.port_file, args.job))
    except CannotStart as error:
        print(f"tandem_coordinator: {error}", file=sys.stderr)
        code = ExitCode.USAGE
    except TakenOver as error:
        log.error("%s", error)  # noqa: TRY400 - the sentence is enough
        code = ExitCode.SUPERSEDED
    logging.shutdown()
    # Not sys.exit: a thread that hangs with its disk must not keep the process.
    sys.stdout.flush()
    os._exit(code)


async def _serve(
    host: str, port: int, metrics_port: int | None, port_file: Path | None, manifest: Path | None
) -> ExitCode:
    token = os.environ.get(TOKEN, "")
    if not token:
        raise CannotStart(f"set {TOKEN} to the job's secret; without one anybody could steer the job")
    if weak := weakness(token):
        raise CannotStart(weak)
    rundir = _rundir()
    job = _job(rundir) if manifest is None else _given_job(manifest)
    state_store = StateStore(rundir, os.environ.get(POD) or None)
    try:
        is_new = manifest is not None and _take(rundir, job)
        rundir.create()
        changed = ""
        if manifest is not None:
            changed = "" if is_new else _changed(rundir, job)
            job = recorded(rundir, job)
        # Written down before the job is: with that, nobody could tell any more that anything has changed.
        remembered = state_store.claim(job.spec.workers.replicas, changed)
        if manifest is not None:
            rundir.write_job(job)
        if is_new:
            _refuse_what_cannot_run(rundir, job)
    except OSError as error:
        raise CannotStart(f"the run directory {rundir.path} cannot be written: {error.strerror or error}") from None

    coordinator = Coordinator(job, rundir, state_store, remembered)
    servers = [
        HttpServer(
            application(coordinator, token, rundir, os.environ.get(TOKEN_DIGEST, "")),
            handler_cancellation=True,
            shutdown_timeout=GRACE_SECONDS,
        )
    ]
    bound = await _start(servers[0], host, port)
    if metrics_port is not None:
        servers.append(HttpServer(metrics_application(coordinator), shutdown_timeout=GRACE_SECONDS))
        metrics_port = await _start(servers[1], host, metrics_port)
        log.info("event=metrics host=%s port=%d", host, metrics_port)
    log.info(
        "event=listening job=%s host=%s port=%d generation=%d", job.metadata.name, host, bound, remembered.generation
    )

    running = asyncio.create_task(coordinator.run())
    tracker = None if job.spec.tracking.mlflow is None else Tracker(job, rundir, coordinator.tracking)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    # Who reads it may end us.
    if port_file is not None:
        _write_ports(port_file, [bound, *([] if metrics_port is None else [metrics_port])])
    try:
        with suppress(asyncio.CancelledError):
            await running
    finally:
        for server in servers:
            await server.close()
    if tracker is not None:
        await tracker.close()
    log.info("event=stopped")
    return ExitCode.DONE


def _rundir() -> RunDir:
    path = os.environ.get(RUN_DIR, "")
    if not path:
        raise CannotStart(f"set {RUN_DIR} to the job's run directory")
    return RunDir(path)


def _job(rundir: RunDir) -> DistributedTrainingJob:
    try:
        return rundir.read_job()
    except FileNotFoundError:
        raise CannotStart(
            f"{rundir.job_file} is missing; tandem run writes it, and --job FILE or {JOB} have it written"
        ) from None
    except (OSError, ValueError) as error:
        raise CannotStart(f"{rundir.job_file} is not a job: {str(error).splitlines()[0]}") from None


def _given_job(manifest: Path) -> DistributedTrainingJob:
    try:
        return read_job(manifest)
    except UserError as error:
        raise CannotStart(str(error)) from None


def _refuse_what_cannot_run(rundir: RunDir, job: DistributedTrainingJob) -> None:
    """End a job that lacks something on its volume, before its workers find that out one after the other."""
    if rundir.ended():
        return
    found = unmet(job, pod(rundir, job))
    for one in found:
        log.warning("field=%s %s", dotted(one.field) or "-", one.message)
    if wrong := [f"{dotted(one.field)}: {one.message}" if one.field else one.message for one in found if one.fails]:
        rundir.mark_failed(CONFIGURATION_ERROR, "; ".join(wrong), ExitCode.CONFIGURATION)


def _take(rundir: RunDir, job: DistributedTrainingJob) -> bool:
    """Make the run directory this job's, unless that was done for this very object already, and this try of it.

    Returns:
        Whether it is a new try.

    Raises:
        CannotStart: it holds what the job cannot, or is not to, go on with, or its disk lacks something.
        OSError: it cannot be written.
    """
    rundir.path.mkdir(parents=True, exist_ok=True)
    complete_moves(rundir)
    mine = job.metadata.annotations.get(INCARNATION, "")
    there = _incarnation(rundir)
    # A retry has a number behind the object's uid, and goes on with what the object has saved.
    same_object = there is not None and there.partition(".")[0] == mine.partition(".")[0]
    found = _look(rundir, job, "Resume" if same_object else job.spec.checkpoint.on_existing)
    if there == mine:
        return False
    if missing := lacks(rundir.path):
        # Also the end of a job is recorded by hard link, so it could not even be said to have failed.
        raise CannotStart(missing)
    if same_object:
        found = Finding(tries_again=rundir.failed() is not None)
    if found.aside is not None:
        log.info("event=moved-aside folder=%s", rundir.path / found.aside)
    settle(rundir, found)
    return True


def _changed(rundir: RunDir, job: DistributedTrainingJob) -> str:
    """What of the job's settings of checkpoints has changed, in a sentence: ranks read them at their start alone."""
    try:
        before = rundir.read_job().spec.checkpoint.dump()
    except (FileNotFoundError, ValueError):
        return ""
    now = job.spec.checkpoint.dump()
    fields = before.keys() | now.keys()
    names = sorted(name for name in fields - {"storage", "onExisting"} if before.get(name) != now.get(name))
    return f"the job has changed {', '.join(f'checkpoint.{name}' for name in names)}" if names else ""


def _incarnation(rundir: RunDir) -> str | None:
    """Which try of which object the recorded job is; None if there is none that can be read."""
    try:
        return rundir.read_job().metadata.annotations.get(INCARNATION, "")
    except (FileNotFoundError, ValueError):
        return None


def _look(rundir: RunDir, job: DistributedTrainingJob, on_existing: OnExisting) -> Finding:
    begin_anew = (
        f"set spec.checkpoint.onExisting to Fresh to begin anew ({SUBMIT}=Fresh; what is there is kept in its folder "
        "previous)"
    )
    try:
        return look(rundir, job, on_existing)
    except Unreadable:
        raise CannotStart(
            f"{rundir.job_file} is not a job, or of another version; {begin_anew}, or give the job another name"
        ) from None
    except Occupied as found:
        if not found.differs:
            raise CannotStart(
                f"{rundir.path} holds {found.saved}, and spec.checkpoint.onExisting is Refuse; "
                f"set it to Resume to go on with that ({SUBMIT}=Resume), or {begin_anew}"
            ) from None
        differs = "; ".join(found.differs[:MAX_DIFFERENCES])
        if len(found.differs) > MAX_DIFFERENCES:
            differs += f"; and {len(found.differs) - MAX_DIFFERENCES} more"
        raise CannotStart(
            f"{rundir.path} holds {found.saved}, which this job cannot go on with ({differs}); "
            f"undo that, or {begin_anew}, or give the job another name"
        ) from None


async def _start(server: HttpServer, host: str, port: int) -> int:
    """Returns the port that it listens on."""
    try:
        sock = listen(host, port, BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CannotStart(f"port {port} on {host} is in use; choose another one, or 0 for a free one") from None
        raise CannotStart(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    except OverflowError:
        raise CannotStart(f"{port} is not a port; use 0 to 65535") from None
    await server.start(sock)
    return int(sock.getsockname()[1])


def _write_ports(path: Path, ports: Sequence[int]) -> None:
    aside = temporary_beside(path)
    aside.write_text("".join(f"{port}\n" for port in ports))
    aside.replace(path)


if __name__ == "__main__":
    main()
