"""Leases on the shared disk: which process reads or evaluates what, and until when.

A lease is a small file made by exclusive create. Its holder renews it; one whose time is over may be taken by another.
Two holders at once are possible when a holder sleeps past its time and wakes up: all work done under a lease is
therefore idempotent, and a lease only saves double work and keeps retention from deleting what is being read.

**One clock.** Nodes disagree on the time, and one that is a lease's time behind would hold nothing. So the end of a
lease is said, and compared, in the time of the server that the disk belongs to: what it stamps on a file that is made
there. It is asked for now and then, and a clock that only goes forward counts on from there. Rejected: the time that is
stamped on the lease itself (the same clock, but who reads the content alone would not see the end), and asking each
time (an evaluator looks at many leases a second).
"""

import hashlib
import math
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tandem.rundir.durable import TEMPORARY, create_json, read_json_or_none, replace_json, temporary_beside

SECONDS = 15.0
"""How long a lease lasts without renewal: long beside a pause of NFS, short beside a user's patience."""
CLOCK_SECONDS = 30.0
"""So often a server is asked for its time: a clock drifts by milliseconds meanwhile."""

_TOKEN = secrets.token_hex(4)
_offsets: dict[int, tuple[float, float]] = {}
"""By device: the server's time less our monotonic clock, and when that was found out."""


class Lease:
    """A lease that is held. Leaving the `with` block gives it back."""

    def __init__(self, path: Path, holder: str, seconds: float) -> None:
        self.path, self.holder, self.seconds = path, holder, seconds

    def renew(self) -> bool:
        """Hold it for its whole time again. Returns False, and changes nothing, if another has taken it over."""
        if _holder(self.path) not in (None, self.holder):
            return False
        replace_json(self.path, self._content(), durable=False)
        return True

    def _content(self) -> dict[str, object]:
        return {"holder": self.holder, "until": server_time(self.path.parent) + self.seconds}

    def release(self) -> None:
        """Give it back, unless it was taken over meanwhile."""
        if _holder(self.path) in (None, self.holder):
            with suppress(FileNotFoundError):
                self.path.unlink()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def default_holder() -> str:
    """A name for this process that no other process has: a restarted container has its host name and number again."""
    return f"{socket.gethostname()}-{os.getpid()}-{_TOKEN}"


def acquire(path: Path, holder: str | None = None, seconds: float = SECONDS) -> Lease | None:
    """Take the lease at `path`, also from a holder whose time is over; None while another holds it.

    Of all that see the same lease expired, the one takes it over who is the first to link it to a name that is made of
    its content. What was linked is looked at once more: a slow taker finds the new lease of a faster one, and leaves it
    alone. Rejected: moving the expired lease away. A slow taker moves the new lease of a faster one, and until it is
    put back a third one finds none.
    """
    holder = holder or default_holder()
    path.parent.mkdir(parents=True, exist_ok=True)
    lease = Lease(path, holder, seconds)
    if create_json(path, lease._content(), durable=False):
        return lease
    seen = _bytes(path)
    if seen is None or is_held(path):
        return None
    taking = path.with_name(f"{TEMPORARY}{path.name}-{hashlib.sha256(seen).hexdigest()[:16]}")
    try:
        os.link(path, taking)
    except FileNotFoundError:
        return None
    except FileExistsError:
        _forget_if_dead(taking)
        return None
    try:
        if _bytes(taking) != seen:
            return None
        replace_json(path, lease._content(), durable=False)
    finally:
        taking.unlink(missing_ok=True)
    return lease


def is_held(path: Path, by_own_clock: bool = False) -> bool:
    """Whether somebody's time on this lease is running.

    Args:
        by_own_clock: for who writes nothing, and so cannot ask the server for its time.
    """
    content = read_json_or_none(path)
    until = content.get("until") if isinstance(content, dict) else None
    if not isinstance(until, int | float):
        return False
    now = time.time() if by_own_clock else server_time(path.parent)
    return now < until <= now + 24 * 3600


def server_time(folder: Path) -> float:
    """What time it is for the server of a folder's disk; for this process where nothing can be written there.

    Seconds since the epoch.
    """
    with suppress(OSError):
        device, now = folder.stat().st_dev, time.monotonic()
        offset, found_at = _offsets.get(device, (0.0, -math.inf))
        if now - found_at > CLOCK_SECONDS:
            offset = _stamp(folder) - now
            _offsets[device] = offset, now
        return time.monotonic() + offset
    return time.time()


def _stamp(folder: Path) -> float:
    """The time that the server gives a new file.

    Raises:
        OSError: none can be made.
    """
    path = temporary_beside(folder / "time")
    try:
        path.write_bytes(b"?")
        return path.stat().st_mtime
    finally:
        path.unlink(missing_ok=True)


def _forget_if_dead(taking: Path) -> None:
    """Remove the name under which another was about to take a lease over, if that is so long ago that it has died."""
    with suppress(FileNotFoundError):
        if server_time(taking.parent) - taking.stat().st_ctime > SECONDS:
            taking.unlink()


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _holder(path: Path) -> str | None:
    """Who has it; None if there is no lease, or nothing that can be read as one."""
    content = read_json_or_none(path)
    holder = content.get("holder") if isinstance(content, dict) else None
    return holder if isinstance(holder, str) else None
