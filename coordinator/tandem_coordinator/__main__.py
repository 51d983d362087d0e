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
from tandem.job.manifest.fields import dotted
from tandem.job.manifest.reading import read_job
from tandem.job.resource import DistributedTrainingJob, OnExisting
from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import (
    ALL_ADDRESSES,
    JOB,
    POD,
    RUN_DIR,
    TOKEN,
    TOKEN_DIGEST,
    UID_ANNOTATION,
    listen,
    token_weakness,
)
from tandem.processes.sync_process import SyncProcess
from tandem.rundir.bucket import Occupied, open_bucket
from tandem.rundir.download import continue_run
from tandem.rundir.durable import temporary_beside, unsupported_operation
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import (
    JobFileUnreadable,
    OwnershipDecision,
    RunDirOccupied,
    apply_decision,
    complete_moves,
    decide_ownership,
    job_to_record,
)
from tandem.rundir.provenance import KEY, read_private_key
from tandem.rundir.store import StoreAccessError, StoreUnavailableError
from tandem.rundir.sync_service import begin, owner_of
from tandem.wire.http_server import BACKLOG, HttpServer
from tandem.wire.reasons import CONFIGURATION_ERROR
from tandem_coordinator import tracing
from tandem_coordinator.coordinator import Coordinator
from tandem_coordinator.prerequisites import pod, unmet
from tandem_coordinator.run_sender import RunSender
from tandem_coordinator.server import application, metrics_application
from tandem_coordinator.state_store import StateStore, TakenOver

GRACE_SECONDS = 1.0
"""Time to finish requests that are being answered at SIGTERM, in seconds; held ones are answered at once."""

GC_THRESHOLDS = (50_000, 20, 100)
"""Thresholds of the garbage collector. With the default ones it walks through the objects of thousands of connections
again and again: with 10,000 agents that took half of the processor's time."""

SUBMIT_OPTION = "tandem submit FILE --set spec.checkpoint.onExisting"
"""Command with which the user sets onExisting, up to its value."""
MAX_DIFFERENCES = 3
"""Maximum number of differences between two jobs that are listed; more are counted. The last 500 characters of a
container's output are kept."""

log = logging.getLogger("tandem.coordinator")


class CannotStart(Exception):  # noqa: N818 - reads as the sentence it is
    """The coordinator cannot start before the user corrects something."""


def main() -> None:
    """Coordinate one job until SIGTERM."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s level=%(levelname)s %(message)s")
    parser = argparse.ArgumentParser(prog="python -m tandem_coordinator", description="Coordinate one training job.")
    parser.add_argument("--host", default=ALL_ADDRESSES, help="address to listen on (default: all)")
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
        help=f"manifest of the job, to be recorded in the run directory (default: the file named by {JOB}; "
        "else the recorded job is used)",
    )
    args = parser.parse_args()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    # Each agent has a connection: the usual limit of 1,024 is meant for programs that use select.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
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
    if weak := token_weakness(token):
        raise CannotStart(weak)
    try:
        signing_key = read_private_key(Path(path)) if (path := os.environ.get(KEY)) else None
    except UserError as error:
        raise CannotStart(str(error)) from None
    rundir = _rundir()
    job = _job(rundir) if manifest is None else _read_manifest(manifest)
    state_store = StateStore(rundir, os.environ.get(POD) or None)
    try:
        # The bucket may have gone on elsewhere since this directory was prepared.
        await asyncio.to_thread(_continue_from_bucket, rundir, job)
        is_new = manifest is not None and _claim_rundir(rundir, job)
        rundir.create()
        changed_settings = ""
        if manifest is not None:
            changed_settings = "" if is_new else _changed_settings(rundir, job)
            job = job_to_record(rundir, job)
        # Recorded before the job is: afterwards the change could not be seen any more.
        recorded_state = state_store.claim(job.spec.workers.replicas, changed_settings)
        if manifest is not None:
            rundir.write_job(job)
        if is_new:
            _check_prerequisites(rundir, job)
    except OSError as error:
        raise CannotStart(f"the run directory {rundir.path} cannot be written: {error.strerror or error}") from None

    coordinator = Coordinator(job, rundir, state_store, recorded_state, signing_key)
    servers = [
        HttpServer(
            application(coordinator, token, rundir, os.environ.get(TOKEN_DIGEST, "")),
            handler_cancellation=True,
            shutdown_timeout=GRACE_SECONDS,
        )
    ]
    bound_port = await _start(servers[0], host, port)
    if metrics_port is not None:
        servers.append(HttpServer(metrics_application(coordinator), shutdown_timeout=GRACE_SECONDS))
        metrics_port = await _start(servers[1], host, metrics_port)
        log.info("event=metrics host=%s port=%d", host, metrics_port)
    log.info(
        "event=listening job=%s host=%s port=%d generation=%d",
        job.metadata.name,
        host,
        bound_port,
        recorded_state.generation,
    )

    running = asyncio.create_task(coordinator.run())
    senders = _senders(job, rundir, coordinator)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    # Who reads it may end us.
    if port_file is not None:
        _write_ports(port_file, [bound_port, *([] if metrics_port is None else [metrics_port])])
    try:
        with suppress(asyncio.CancelledError):
            await running
    finally:
        for server in servers:
            await server.close()
    await asyncio.gather(*(sender.close() for sender in senders))
    log.info("event=stopped")
    return ExitCode.DONE


def _senders(job: DistributedTrainingJob, rundir: RunDir, coordinator: Coordinator) -> list[RunSender]:
    """Start the processes that send the run elsewhere."""
    senders = []
    if (mlflow := job.spec.tracking.mlflow) is not None:
        senders.append(RunSender("tandem_coordinator.tracking", rundir, mlflow.literal, coordinator.report_tracking))
    if tracing.collector(os.environ):
        senders.append(RunSender("tandem_coordinator.tracing", rundir, {}, coordinator.report_tracing))
    storage = job.spec.checkpoint.storage
    if storage.bucket is not None:
        module = "tandem.rundir.sync_service" if _has_own_directory(job) else "tandem.rundir.upload"
        senders.append(RunSender(module, rundir, {}, coordinator.report_upload, coordinator.record_uploaded))
    return senders


def _has_own_directory(job: DistributedTrainingJob) -> bool:
    """Whether this pod shares its run directory with no other. `tandem run` and SLURM have a shared one."""
    return not job.spec.checkpoint.storage.shared and bool(owner_of(job))


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


def _read_manifest(manifest: Path) -> DistributedTrainingJob:
    try:
        return read_job(manifest)
    except UserError as error:
        raise CannotStart(str(error)) from None


def _check_prerequisites(rundir: RunDir, job: DistributedTrainingJob) -> None:
    """Fail a job whose volume lacks something, before its workers discover that one after the other."""
    if rundir.ended():
        return
    findings = unmet(job, pod(rundir, job))
    for finding in findings:
        log.warning("field=%s %s", dotted(finding.field) or "-", finding.message)
    if errors := [
        f"{dotted(finding.field)}: {finding.message}" if finding.field else finding.message
        for finding in findings
        if finding.fails
    ]:
        rundir.mark_failed(CONFIGURATION_ERROR, "; ".join(errors), ExitCode.CONFIGURATION)


def _claim_rundir(rundir: RunDir, job: DistributedTrainingJob) -> bool:
    """Claim the run directory for this try of this job, unless that was done already.

    Returns:
        Whether it is a new try.

    Raises:
        CannotStart: it holds a run that the job cannot, or must not, resume, or its disk lacks a feature.
        OSError: it cannot be written.
    """
    rundir.path.mkdir(parents=True, exist_ok=True)
    complete_moves(rundir)
    incarnation = job.metadata.annotations.get(UID_ANNOTATION, "")
    recorded_incarnation = _incarnation(rundir)
    # A retry has a number after the object's uid, and resumes from what the object has saved.
    same_object = (
        recorded_incarnation is not None and recorded_incarnation.partition(".")[0] == incarnation.partition(".")[0]
    )
    finding = _inspect(rundir, job, "Resume" if same_object else job.spec.checkpoint.on_existing)
    if recorded_incarnation == incarnation:
        return False
    if missing := unsupported_operation(rundir.path):
        # The end of a job is recorded by hard link, too, so its failure could not even be recorded.
        raise CannotStart(missing)
    if same_object:
        finding = OwnershipDecision(tries_again=rundir.failed() is not None)
    if finding.aside is not None:
        log.info("event=moved-aside folder=%s", rundir.path / finding.aside)
    apply_decision(rundir, finding)
    return True


def _continue_from_bucket(rundir: RunDir, job: DistributedTrainingJob) -> None:
    """Get the run from the job's bucket if nothing was saved in the run directory; without checkpoints where it is that
    of this pod alone.

    Raises:
        CannotStart: the bucket holds another run, or cannot be used.
        OSError: the run directory cannot be written.
    """
    storage = job.spec.checkpoint.storage
    if storage.bucket is None:
        return
    rundir.path.mkdir(parents=True, exist_ok=True)
    complete_moves(rundir)

    def waiting(writer: str) -> None:
        log.info("event=bucket-waits writer=%s", writer)

    try:
        store = open_bucket(storage)
        if _has_own_directory(job):
            SyncProcess.prepare()
            begin(store, rundir, owner_of(job), waiting)
            return
        result = continue_run(store, rundir, waiting).downloaded
    except (Occupied, StoreAccessError, StoreUnavailableError) as error:
        raise CannotStart(f"spec.checkpoint.storage.bucket: {error}") from None
    if result is not None:
        log.info("event=bucket-continued url=%s checkpoints=%d", store.location, len(result.checkpoints))


def _changed_settings(rundir: RunDir, job: DistributedTrainingJob) -> str:
    """The checkpoint settings that have changed in the job, as a sentence: ranks read them only at their start."""
    try:
        before = rundir.read_job().spec.checkpoint.dump()
    except (FileNotFoundError, ValueError):
        return ""
    now = job.spec.checkpoint.dump()
    fields = before.keys() | now.keys()
    names = sorted(name for name in fields - {"storage", "onExisting"} if before.get(name) != now.get(name))
    return f"the job has changed {', '.join(f'checkpoint.{name}' for name in names)}" if names else ""


def _incarnation(rundir: RunDir) -> str | None:
    """The object and try of the recorded job; None if no job can be read."""
    try:
        return rundir.read_job().metadata.annotations.get(UID_ANNOTATION, "")
    except (FileNotFoundError, ValueError):
        return None


def _inspect(rundir: RunDir, job: DistributedTrainingJob, on_existing: OnExisting) -> OwnershipDecision:
    fresh_advice = (
        f"set spec.checkpoint.onExisting to Fresh to start over ({SUBMIT_OPTION}=Fresh; the earlier run is kept in its "
        "folder previous)"
    )
    try:
        return decide_ownership(rundir, job, on_existing)
    except JobFileUnreadable:
        raise CannotStart(
            f"{rundir.job_file} is not a job, or of another version; {fresh_advice}, or give the job another name"
        ) from None
    except RunDirOccupied as occupied:
        if not occupied.differs:
            raise CannotStart(
                f"{rundir.path} holds {occupied.saved}, and spec.checkpoint.onExisting is Refuse; "
                f"set it to Resume to go on with that ({SUBMIT_OPTION}=Resume), or {fresh_advice}"
            ) from None
        differs = "; ".join(occupied.differs[:MAX_DIFFERENCES])
        if len(occupied.differs) > MAX_DIFFERENCES:
            differs += f"; and {len(occupied.differs) - MAX_DIFFERENCES} more"
        raise CannotStart(
            f"{rundir.path} holds {occupied.saved}, which this job cannot continue ({differs}); "
            f"undo that, or {fresh_advice}, or give the job another name"
        ) from None


async def _start(server: HttpServer, host: str, port: int) -> int:
    """Start a server; returns the port that it listens on."""
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
    temporary = temporary_beside(path)
    temporary.write_text("".join(f"{port}\n" for port in ports))
    temporary.replace(path)


if __name__ == "__main__":
    main()
