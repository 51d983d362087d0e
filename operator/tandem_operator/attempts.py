"""What was tried and has not come to rest, and when it may be tried again. Pure.

Each object has a pause of its own, so that what is refused for long (by a quota, by a webhook) holds up neither the
looks at its job nor the job's other objects. The same pause slows down pods that are made again and again without
getting to work: somebody deletes them at once, or changes them so that they are never what was asked for.

    the first two tries          at once
    the others                   2, 4, 8, … seconds after the one before, a minute at most

A place or an object comes to rest when it is there as it should be, a pod of it at work; then its tries are forgotten.
They are kept in memory alone: an operator that starts again begins with short pauses.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tandem_operator import names, replicas
from tandem_operator.kinds import Kind
from tandem_operator.reporting import Want

MANY = 8
"""Pods of a job that are made side by side. Where a quota or a webhook refuses so many of a role, it would refuse the
rest as well, which may be thousands: no other one of that role is tried until one of these may be tried again."""
LONGEST_SECONDS = 60.0
"""Who makes room in a quota sees the job go on within a minute."""


@dataclass(frozen=True)
class Attempt:
    """The tries of one thing."""

    count: int
    at: float
    """The last one, seconds since the epoch."""
    trouble: Want | None = None
    """What was answered, if that was a refusal."""

    @property
    def due(self) -> float:
        """When it may be tried again, seconds since the epoch."""
        return self.at + min(LONGEST_SECONDS, replicas.pause(self.count))


Attempts = Mapping[str, Attempt]
"""By the names that `place`, `writing` and `removing` give."""


def place(role: str, index: int) -> str:
    """That a place has its pod, as people are told of it."""
    return role if role == names.COORDINATOR else f"{role} {index}"


def writing(kind: Kind, name: str) -> str:
    """That an object is as it should be."""
    return f"{kind.name} {name}"


def removing(pod: str) -> str:
    """That a pod is deleted."""
    return f"without {pod}"


def ending(pod: str) -> str:
    """That a pod has ended."""
    return f"end of {pod}"


def later(attempts: Attempts, what: str, now: float) -> float | None:
    """When it may be tried again if that is not yet, seconds since the epoch."""
    known = attempts.get(what)
    return None if known is None or known.due <= now else known.due


def role_waits(attempts: Attempts, role: str, now: float) -> float | None:
    """Until when no pod of a role is tried, seconds since the epoch; None: they may be."""
    refused = [
        one.due
        for what, one in attempts.items()
        if one.trouble is not None and one.due > now and what.partition(" ")[0] == role
    ]
    return min(refused) if len(refused) >= MANY else None


def tried(before: Attempt | None, now: float, trouble: Want | None = None) -> Attempt:
    """After one more try."""
    return Attempt(1 if before is None else before.count + 1, now, trouble)
