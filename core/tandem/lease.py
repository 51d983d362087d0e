"""Leases on the shared disk: who is reading or evaluating what, until when.

A lease is a small file made by exclusive create. Its holder renews it; one whose time is over may be taken by another.
Two holders at once are possible when a holder sleeps past its time and wakes up: all work done under a lease is
therefore idempotent, and a lease only saves double work and keeps retention from deleting what is being read.
"""

import hashlib
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tandem.durable import TEMPORARY, create_json, read_json_or_none, replace_json

SECONDS = 15.0
"""How long a lease lasts without renewal: long beside a pause of NFS, short beside a user's patience."""

_TOKEN = secrets.token_hex(4)


class Lease:
    """A lease that is held. Leaving the `with` block gives it back."""

    def __init__(self, path: Path, holder: str, seconds: float) -> None:
        self.path, self.holder, self.seconds = path, holder, seconds

    def renew(self) -> bool:
        """Hold it for its whole time again. Returns False, and changes nothing, if another has taken it over."""
        if _holder(self.path) not in (None, self.holder):
            return False
        replace_json(self.path, _content(self.holder, self.seconds), durable=False)
        return True

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
    if create_json(path, _content(holder, seconds), durable=False):
        return Lease(path, holder, seconds)
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
        replace_json(path, _content(holder, seconds), durable=False)
    finally:
        taking.unlink(missing_ok=True)
    return Lease(path, holder, seconds)


def is_held(path: Path) -> bool:
    """Whether somebody's time on this lease is running."""
    content = read_json_or_none(path)
    if not isinstance(content, dict):
        return False
    until = content.get("until")
    return isinstance(until, int | float) and time.time() < until <= time.time() + 24 * 3600


def _forget_if_dead(taking: Path) -> None:
    """Remove the name under which another was about to take a lease over, if that is so long ago that it has died."""
    with suppress(FileNotFoundError):
        if time.time() - taking.stat().st_ctime > SECONDS:
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


def _content(holder: str, seconds: float) -> dict[str, object]:
    return {"holder": holder, "until": time.time() + seconds}
