"""Leases on the shared disk: which process reads or evaluates which checkpoint, and until when.

A lease is a small file made by exclusive create. Its holder renews it; an expired lease may be taken by another
process. Two holders at once are possible when a holder sleeps past the expiry and wakes up: all work under a lease is
therefore idempotent, and a lease only avoids double work and keeps retention from deleting a checkpoint in use.

**One clock.** The clocks of nodes differ, and a node that is a lease's length behind would hold nothing. So the expiry
is written and compared in the time of the disk's server: the time stamp that it gives to a new file. The server's time
is read now and then, and a monotonic clock counts on from there. Rejected: the time stamp of the lease file itself (the
same clock, but a reader of the content alone would not see the expiry), and reading the server's time on each use (an
evaluator reads many leases a second).
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

from tandem.rundir import sync_client
from tandem.rundir.durable import TEMPORARY, create_json, read_json_or_none, replace_json, temporary_beside

LEASE_LENGTH_SECONDS = 15.0
"""Length of a lease without renewal, in seconds: long compared to a pause of NFS, short for a user who waits."""
LONG_LEASE_SECONDS = 60.0
"""Length where pods share no disk, in seconds: each has the clock of its node, and hears of a renewal late."""
CLOCK_SECONDS = 30.0
"""Interval at which the server's time is read, in seconds: a clock drifts by milliseconds meanwhile."""

_TOKEN = secrets.token_hex(4)
_offsets: dict[int, tuple[float, float]] = {}
"""The server's time minus our monotonic clock, and the monotonic time of that measurement, by device."""


class Lease:
    """A lease that this process holds. Leaving the `with` block releases it."""

    def __init__(self, path: Path, holder: str, seconds: float) -> None:
        self.path, self.holder, self.seconds = path, holder, seconds

    def is_held(self) -> bool:
        """Whether no other process has taken it over."""
        return _holder(self.path) == self.holder

    def renew(self) -> bool:
        """Extend the lease to its full length. Returns False, and changes nothing, if another process has taken it
        over."""
        if _holder(self.path) not in (None, self.holder):
            return False
        replace_json(self.path, self._content(), durable=False)
        return True

    def _content(self) -> dict[str, object]:
        return {"holder": self.holder, "until": server_time(self.path.parent) + self.seconds}

    def release(self) -> None:
        """Release the lease, unless it was taken over meanwhile."""
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
    """A name for this process that no other process has: a restarted container has the same host name and process id
    again."""
    return f"{socket.gethostname()}-{os.getpid()}-{_TOKEN}"


def length() -> float:
    """Length of a lease without renewal, in seconds."""
    return LONG_LEASE_SECONDS if os.environ.get(sync_client.SOCKET) else LEASE_LENGTH_SECONDS


def acquire(path: Path, holder: str | None = None, seconds: float = LEASE_LENGTH_SECONDS) -> Lease | None:
    """Acquire the lease at `path`, also from a holder whose lease has expired; None while another process holds it.

    Of all processes that see the same expired lease, the first one that links it to a name derived from its content
    takes it over. The linked content is then compared again: a slow process finds the new lease of a faster one, and
    leaves it alone. Rejected: moving the expired lease away. A slow process would move the new lease of a faster one,
    and until it is put back a third process would find none.
    """
    holder = holder or default_holder()
    path.parent.mkdir(parents=True, exist_ok=True)
    lease = Lease(path, holder, seconds)
    # The usual case: nobody holds it.
    if create_json(path, lease._content(), durable=False):
        return lease
    expired = _bytes(path)
    if expired is None or is_held(path):
        return None
    # The link's name is derived from the expired content: of all processes that saw this content, only one can create
    # it.
    taking = path.with_name(f"{TEMPORARY}{path.name}-{hashlib.sha256(expired).hexdigest()[:16]}")
    try:
        os.link(path, taking)
    # Released, or taken over and released, meanwhile: the next attempt finds it free.
    except FileNotFoundError:
        return None
    except FileExistsError:
        # Another process is taking it over, or died while it did: a dead one's link would block everybody for ever.
        _forget_if_dead(taking)
        return None
    try:
        # The link may point to a newer lease that replaced the expired one before we linked.
        if _bytes(taking) != expired:
            return None
        replace_json(path, lease._content(), durable=False)
    finally:
        taking.unlink(missing_ok=True)
    return lease


def is_held(path: Path, by_own_clock: bool = False) -> bool:
    """Whether an unexpired lease exists at this path.

    Args:
        by_own_clock: compare with this process's clock. For readers that must not write, and so cannot read the
            server's time.
    """
    content = read_json_or_none(path)
    until = content.get("until") if isinstance(content, dict) else None
    if not isinstance(until, int | float):
        return False
    now = time.time() if by_own_clock else server_time(path.parent)
    # A time further in the future than a day is damage, and must not hold a lease for ever.
    return now < until <= now + 24 * 3600


def server_time(folder: Path) -> float:
    """The time of the server of a folder's disk; this process's time where nothing can be written there.

    Seconds since the epoch.
    """
    with suppress(OSError):
        device, now = folder.stat().st_dev, time.monotonic()
        offset, found_at = _offsets.get(device, (0.0, -math.inf))
        # The offset is per device, for a process may use several disks.
        if now - found_at > CLOCK_SECONDS:
            offset = _stamp(folder) - now
            _offsets[device] = offset, now
        return time.monotonic() + offset
    return time.time()


def _stamp(folder: Path) -> float:
    """The time stamp that the server gives to a new file.

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
    """Remove the takeover link of a process that died while it took a lease over."""
    with suppress(FileNotFoundError):
        if server_time(taking.parent) - taking.stat().st_ctime > LEASE_LENGTH_SECONDS:
            taking.unlink()


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _holder(path: Path) -> str | None:
    """The holder of a lease; None if there is no lease, or none that can be read."""
    content = read_json_or_none(path)
    holder = content.get("holder") if isinstance(content, dict) else None
    return holder if isinstance(holder, str) else None
