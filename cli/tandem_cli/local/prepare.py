"""Prepares the run directory: whose it is, whether to resume from it, and whether another run uses it.

The lock is flock on a file of the run directory. The kernel gives it up when its last holder dies, however that
happens; the guardian holds it too, so a new run waits until what a killed one left is gone. The run directory's own
leases would keep a user who was just interrupted waiting for their time to pass. (On NFS flock may be local to the
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
from tandem.formatting import size
from tandem.job import DistributedTrainingJob
from tandem.rundir.durable import encode, lacks
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import (
    ENDPOINT,
    LOCK,
    Finding,
    Occupied,
    Unreadable,
    complete_moves,
    look,
    others_in,
    recorded,
    settle,
)
from tandem_cli.local.guardian import sweep

MIN_FREE_BYTES = 16_000_000
"""Less space than this, and not even the logs of a short run have room."""
CLEANING_SECONDS = 15.0
"""How long to wait for the guardian of a run whose parent is dead."""
MAX_DIFFERENCES = 8
"""More differences between two jobs than this are counted, not listed."""


@dataclass
class HeldFolder:
    """A run directory that belongs to this process until `release`."""

    run_dir: RunDir
    lock: int
    """Descriptor of the lock, to be shared with the guardian."""
    notes: tuple[str, ...] = ()
    """What the user should know before it starts."""

    def sign(self, mark: str) -> None:
        """Say in the lock who holds it: for the next run's message, and to find leavings by their mark."""
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, json.dumps({"pid": os.getpid(), "mark": mark}).encode(), 0)

    @property
    def endpoint_file(self) -> Path:
        """Where the coordinator's address and token are, for the user's own Prometheus or curl; mode 0600."""
        return self.run_dir.path / ENDPOINT

    def publish(self, url: str, token: str) -> None:
        """Write the endpoint file."""
        publish(self.endpoint_file, url, token)

    def release(self) -> None:
        """Give it up. The guardian may hold it a moment longer."""
        os.close(self.lock)


def publish(path: Path, url: str, token: str) -> None:
    """Write where a coordinator answers and with which token, for this user alone."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
        file.write(encode({"url": url, "token": token}))


def claim(path: Path, job: DistributedTrainingJob, fresh: bool, again: str) -> HeldFolder:
    """Make the directory ready for this job, new or as an earlier run left it.

    Args:
        fresh: move an earlier run aside and start over, whatever `checkpoint.onExisting` says.
        again: what the user would type to do that, for messages.

    Raises:
        UserError: it cannot be written, belongs to another job, is no run directory, or another run is at work in it.
    """
    with disk_errors(path):
        _make(path)
        lock = _lock(path)
    try:
        with disk_errors(path):
            run_dir = RunDir(path)
            complete_moves(run_dir)
            found = _look(run_dir, job, fresh, again)
            need_space(path)
            if missing := lacks(path):
                raise UserError(f"{missing}.")
            notes = _notes(run_dir, job, found)
            settle(run_dir, found)
            run_dir.create()
            run_dir.write_job(recorded(run_dir, job))
    except BaseException:
        os.close(lock)
        raise
    return HeldFolder(run_dir, lock, tuple(notes))


def _make(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; --run-dir needs a folder.")
    path.mkdir(parents=True, exist_ok=True)
    others = others_in(path)
    if others and not (path / "job.json").exists():
        some = ", ".join(others[:3])
        raise UserError(
            f"{path} is not a run directory and not empty (it holds {some}). Give --run-dir a new or empty folder."
        )


def _lock(path: Path, clock: Callable[[], float] = time.monotonic) -> int:
    deadline = clock() + CLEANING_SECONDS
    while True:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(lock, path / LOCK):
                _sweep_leavings(lock)
                return lock
        except BlockingIOError:
            pid = _holder(lock).get("pid")
            if not isinstance(pid, int) or _is_alive(pid) or clock() > deadline:
                who = f" (process {pid})" if isinstance(pid, int) else ""
                os.close(lock)
                raise UserError(
                    f"another tandem run{who} is at work in {path}. Wait for it, stop it with Ctrl-C there, "
                    "or give another --run-dir."
                ) from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        time.sleep(0.05)


def _is_same_file(descriptor: int, path: Path) -> bool:
    """False when somebody has moved the folder away between opening the lock and getting it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _holder(lock: int) -> dict[str, Any]:
    with suppress(ValueError):
        content = json.loads(os.pread(lock, 4096, 0))
        if isinstance(content, dict):
            return content
    return {}


def _sweep_leavings(lock: int) -> None:
    """End what a run left behind whose guardian was killed as well."""
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


def _look(run_dir: RunDir, job: DistributedTrainingJob, fresh: bool, again: str) -> Finding:
    keeping = f"(what is there is kept in {run_dir.path / 'previous'})"
    try:
        return look(run_dir, job, "Fresh" if fresh else job.spec.checkpoint.on_existing)
    except Unreadable:
        raise UserError(
            f"{run_dir.job_file} is damaged or was written by another version. To begin anew {keeping}: {again}"
        ) from None
    except Occupied as found:
        if not found.differs:
            raise UserError(
                f"{run_dir.path} holds {found.saved}, and spec.checkpoint.onExisting is Refuse. "
                "To go on with it: --set spec.checkpoint.onExisting=Resume. "
                f"Or give another --run-dir, or begin anew {keeping}: {again}"
            ) from None
        listed = [f"  {line}" for line in found.differs[:MAX_DIFFERENCES]]
        if len(found.differs) > MAX_DIFFERENCES:
            listed.append(f"  and {len(found.differs) - MAX_DIFFERENCES} more")
        what = "\n".join(listed)
        raise UserError(
            f"{run_dir.path} holds {found.saved}, which this job cannot go on with:\n{what}\n"
            f"Undo that to go on, give another --run-dir, or begin anew {keeping}: {again}"
        ) from None


def _notes(run_dir: RunDir, job: DistributedTrainingJob, found: Finding) -> list[str]:
    """What becomes of what is there, for the user; empty where nothing is worth a word."""
    failed = run_dir.failed()
    if found.aside == "previous":
        return [f"moved the earlier run to {run_dir.path / 'previous'}; the next one moved there takes its place"]
    if found.aside == "attempt" and failed is not None:
        if job.spec.trainer.command is not None:
            return [
                f"the last attempt failed ({failed.get('reason', 'unknown')}); the script starts again, what it has "
                f"saved itself stays as it is, and the logs of that attempt are in {run_dir.path / 'attempt'}"
            ]
        return [
            f"the last attempt failed ({failed.get('reason', 'unknown')}) and had saved nothing; this one begins anew, "
            f"and its logs are in {run_dir.path / 'attempt'}"
        ]
    if found.tries_again:
        reason = "unknown" if failed is None else failed.get("reason", "unknown")
        return [f"the last run failed ({reason}); trying again from its last checkpoint"]
    return ["the run was complete, and this job goes further"] if found.reopens else []


def need_space(path: Path) -> None:
    """
    Raises:
        UserError: there is no room for a run where this folder lies.
    """
    free = shutil.disk_usage(path).free
    if free < MIN_FREE_BYTES:
        raise UserError(
            f"no space: {size(free)} are free where {path} lies, and a run needs at least {size(MIN_FREE_BYTES)}. "
            "Make room, or give another --run-dir."
        )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What the disk refuses, in words."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space left where {path} lies. Make room, or give another --run-dir.") from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise UserError(f"{error.filename or path} is a file; --run-dir needs a folder.") from error
        place = error.filename or path
        raise UserError(f"cannot write to {path}: {place}: {error.strerror}. Give another --run-dir.") from error
