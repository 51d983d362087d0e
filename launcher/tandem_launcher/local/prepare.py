"""Prepares a run directory: checks its owner, decides whether to resume from it, and locks it.

The lock is flock on a file of the run directory. The kernel releases it when its last holder dies, however that
happens. The guardian holds it too, so a new run waits until the processes of a killed one are gone. The run directory's
own leases would make a user who was just interrupted wait until they expire. (On NFS flock may be local to the
machine, which is what matters here: `tandem run` is for one machine.)
"""

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import UserError
from tandem.formatting import rfc3339, size
from tandem.job.resource import DistributedTrainingJob
from tandem.processes.launch import SUBMITTED_ANNOTATION
from tandem.rundir.bucket import Writer
from tandem.rundir.durable import encode, unsupported_operation
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import (
    ENDPOINT,
    LOCK,
    JobFileUnreadable,
    OwnershipDecision,
    RunDirOccupied,
    apply_decision,
    complete_moves,
    decide_ownership,
    foreign_names,
    job_to_record,
)
from tandem_launcher.bucket_access import continue_from
from tandem_launcher.local.guardian import sweep

MIN_FREE_BYTES = 16_000_000
"""Free space that a run needs at least; the logs of a short run have no room in less."""
CLEANING_SECONDS = 15.0
"""Timeout for the guardian of a run whose parent is dead, in seconds."""
MAX_DIFFERENCES = 8
"""Number of differences between two jobs that an error lists; further ones are counted."""


@dataclass
class HeldFolder:
    """A run directory that this process holds until `release`."""

    run_dir: RunDir
    lock: int
    """Descriptor of the lock, shared with the guardian."""
    notes: tuple[str, ...] = ()
    """Notes for the user before the run starts."""
    writer: Writer | None = None
    """The right to write the job's bucket, until the coordinator's upload takes it over."""

    def sign(self, mark: str) -> None:
        """Write the holder into the lock, for messages and to find leftover processes by the mark."""
        _sign(self.lock, mark)

    @property
    def endpoint_file(self) -> Path:
        """File with the coordinator's address and token, for the user's Prometheus or curl; mode 0600."""
        return self.run_dir.path / ENDPOINT

    def publish(self, url: str, token: str) -> None:
        """Write the endpoint file."""
        publish(self.endpoint_file, url, token)

    def release(self) -> None:
        """Release the lock. The guardian may hold it a moment longer."""
        if self.writer is not None:
            self.writer.end()
        os.close(self.lock)


def publish(path: Path, url: str, token: str) -> None:
    """Write the address and token of a coordinator, readable by this user only."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
        file.write(encode({"url": url, "token": token}))


def claim(path: Path, job: DistributedTrainingJob, fresh: bool, fresh_command: str) -> HeldFolder:
    """Lock a run directory and prepare it for a job; it may be new or hold an earlier run.

    Args:
        fresh: move an earlier run away and start over, whatever `checkpoint.onExisting` says.
        fresh_command: command that does so, for messages.

    Raises:
        UserError: it cannot be written, belongs to another job, is no run directory, or another run uses it.
    """
    with disk_errors(path):
        _make(path)
        lock = _lock(path)
    writer: Writer | None = None
    from_bucket: list[str] = []
    try:
        with disk_errors(path):
            run_dir = RunDir(path)
            complete_moves(run_dir)
            need_space(path)
            if missing := unsupported_operation(path):
                raise UserError(f"{missing}.")
            if (storage := job.spec.checkpoint.storage).bucket is not None:
                writer, from_bucket = continue_from(storage, run_dir)
            finding = _inspect(run_dir, job, fresh, fresh_command)
            notes = [*from_bucket, *_notes(run_dir, job, finding)]
            apply_decision(run_dir, finding)
            run_dir.create()
            run_dir.write_job(_with_submission_time(job_to_record(run_dir, job)))
    except BaseException:
        if writer is not None:
            writer.end()
        os.close(lock)
        raise
    return HeldFolder(run_dir, lock, tuple(notes), writer)


def _with_submission_time(job: DistributedTrainingJob) -> DistributedTrainingJob:
    annotations = job.metadata.annotations | {SUBMITTED_ANNOTATION: rfc3339(time.time())}
    return job.model_copy(update={"metadata": job.metadata.model_copy(update={"annotations": annotations})})


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of an existing run directory.

    Raises:
        UserError: a run uses it.
    """
    with disk_errors(path):
        lock = _lock(path)
    try:
        yield
    finally:
        os.close(lock)


def _make(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; --run-dir needs a folder.")
    path.mkdir(parents=True, exist_ok=True)
    foreign = foreign_names(path)
    if foreign and not (path / "job.json").exists():
        content = ", ".join(foreign[:3])
        raise UserError(
            f"{path} is not a run directory and not empty (it holds {content}). Give --run-dir a new or empty folder."
        )


def _lock(path: Path, clock: Callable[[], float] = time.monotonic) -> int:
    deadline = clock() + CLEANING_SECONDS
    while True:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(lock, path / LOCK):
                _sweep_leftovers(lock)
                # A request to stop must not go to the process that held it before.
                _sign(lock)
                return lock
        except BlockingIOError:
            pid = _holder(lock).get("pid")
            if not isinstance(pid, int) or _is_alive(pid) or clock() > deadline:
                holder = f" (process {pid})" if isinstance(pid, int) else ""
                os.close(lock)
                raise UserError(
                    f"another tandem run{holder} uses {path}. Wait for it, stop it with Ctrl-C there, "
                    "or give another --run-dir."
                ) from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        time.sleep(0.05)


def _sign(lock: int, mark: str = "") -> None:
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps({"pid": os.getpid(), "mark": mark}).encode(), 0)


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Whether the lock file is still at its path: the folder may have been moved between opening and locking."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _holder(lock: int) -> dict[str, Any]:
    with suppress(ValueError):
        content = json.loads(os.pread(lock, 4096, 0))
        if isinstance(content, dict):
            return content
    return {}


def _sweep_leftovers(lock: int) -> None:
    """Kill the processes of a run whose guardian was killed as well."""
    if isinstance(mark := _holder(lock).get("mark"), str) and mark:
        sweep(mark, seconds=CLEANING_SECONDS)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _inspect(run_dir: RunDir, job: DistributedTrainingJob, fresh: bool, fresh_command: str) -> OwnershipDecision:
    keeping = f"(the earlier run is kept in {run_dir.path / 'previous'})"
    try:
        return decide_ownership(run_dir, job, "Fresh" if fresh else job.spec.checkpoint.on_existing)
    except JobFileUnreadable:
        raise UserError(
            f"{run_dir.job_file} is damaged or was written by another version. To start over {keeping}: {fresh_command}"
        ) from None
    except RunDirOccupied as occupied:
        if not occupied.differs:
            raise UserError(
                f"{run_dir.path} holds {occupied.saved}, and spec.checkpoint.onExisting is Refuse. "
                "To continue it: --set spec.checkpoint.onExisting=Resume. "
                f"Or give another --run-dir, or start over {keeping}: {fresh_command}"
            ) from None
        lines = [f"  {line}" for line in occupied.differs[:MAX_DIFFERENCES]]
        if len(occupied.differs) > MAX_DIFFERENCES:
            lines.append(f"  and {len(occupied.differs) - MAX_DIFFERENCES} more")
        differences = "\n".join(lines)
        raise UserError(
            f"{run_dir.path} holds {occupied.saved}, which this job cannot continue:\n{differences}\n"
            f"Undo these changes to continue, give another --run-dir, or start over {keeping}: {fresh_command}"
        ) from None


def _notes(run_dir: RunDir, job: DistributedTrainingJob, finding: OwnershipDecision) -> list[str]:
    """Tell the user what happens to an earlier run in the directory."""
    failed = run_dir.failed()
    if finding.aside == "previous":
        return [f"moved the earlier run to {run_dir.path / 'previous'}; the next one moved there takes its place"]
    if finding.aside == "attempt" and failed is not None:
        if job.spec.trainer.command is not None:
            return [
                f"the last attempt failed ({failed.get('reason', 'unknown')}); the script starts again, the "
                f"checkpoints that it saved itself stay, and the logs of that attempt are in {run_dir.path / 'attempt'}"
            ]
        return [
            f"the last attempt failed ({failed.get('reason', 'unknown')}) and had saved nothing; this one starts over, "
            f"and its logs are in {run_dir.path / 'attempt'}"
        ]
    if finding.tries_again:
        reason = "unknown" if failed is None else failed.get("reason", "unknown")
        return [f"the last run failed ({reason}); trying again from its last checkpoint"]
    return ["the run was complete, and this job trains further"] if finding.reopens else []


def need_space(path: Path) -> None:
    """Check the free space of a folder's file system.

    Raises:
        UserError: it has no room for a run.
    """
    free = shutil.disk_usage(path).free
    if free < MIN_FREE_BYTES:
        raise UserError(
            f"no space: {size(free)} are free at {path}, and a run needs at least {size(MIN_FREE_BYTES)}. "
            "Make room, or give another --run-dir."
        )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the disk into messages for the user."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space left at {path}. Make room, or give another --run-dir.") from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise UserError(f"{error.filename or path} is a file; --run-dir needs a folder.") from error
        place = error.filename or path
        raise UserError(f"cannot write to {path}: {place}: {error.strerror}. Give another --run-dir.") from error
