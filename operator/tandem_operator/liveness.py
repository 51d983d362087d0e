"""Liveness of coordinators: detects those that have stopped answering although their pods are ready. A dead node looks
like that until the cluster notices it, by default after 40 seconds. If a member of the group died with that node, the
others wait for the coordinator all that time.

A coordinator that answered before is named, so that another one takes its place elsewhere,

    once nobody on its node so much as refused a connection, twice in a row: so nodes look that are dead;
    or once it has not answered for longer than its own kubelet would take to see that it hangs.

A wrong guess costs a restart of a coordinator, which training does not notice. Still, our own blindness is nobody's
death: where most are silent it is probably us who are cut off or too slow, and none is named. Most of the namespaces,
that is, each by most of its coordinators: whoever cannot hear hears none of them, and a tenant, whose coordinators may
be whatever he likes, speaks for one. The namespace of the job itself says nothing while its silent ones are few.

Rejected: readiness of nodes (it is what takes the 40 seconds, and needs a right on nodes), a shorter grace time for
nodes (not ours to set), a lease that each coordinator renews in the API server (a write a job every few seconds).
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

SILENT_SECONDS = 6.0
"""From the first question that was not answered. A coordinator that hangs on a node that lives is not ready any more
after 3 to 4 seconds, and then its kubelet restarts it."""
MIN_QUESTIONS = 2
"""One may have lasted because we were stopped ourselves."""
GONE_SECONDS, MIN_KNOCKS = 2.0, 2
"""Seconds since the first refused connection, and how many were refused. Each attempt knocks twice."""
DOUBT_SECONDS = 2 * SILENT_SECONDS
"""After so long it is either given up, or not known to be gone at all."""
FEW = 3
"""For at most this many silent coordinators it does not matter that they are most of those there are: they may share
one node."""

K = TypeVar("K", bound=Hashable)


@dataclass
class _Record:
    """How one coordinator's pod has answered."""

    uid: str
    since: float | None = None
    """When the first question was asked that was not answered; None: the last one was."""
    unanswered: int = 0
    """Questions since then."""
    unreached: int = 0
    """Of those, the last ones in a row of which nobody took the connection."""


class Liveness(Generic[K]):
    """Which coordinators do not answer any more. One that has never answered is not known here. Times are those of a
    monotonic clock, in seconds.

    Args:
        namespace: of a key.
    """

    def __init__(self, namespace: Callable[[K], Hashable]) -> None:
        self._namespace = namespace
        self._records: dict[K, _Record] = {}

    def __len__(self) -> int:
        """How many coordinators have answered, whether they still do or not."""
        return len(self._records)

    def note(self, key: K, uid: str, asked: float, answered: bool, reached: bool = True) -> None:
        """A question to the coordinator in the pod `uid` was answered, or was not.

        Args:
            asked: when the question was asked.
            reached: somebody took the connection or refused it.
        """
        record = self._records.get(key)
        if answered:
            self._records[key] = _Record(uid)
        elif record is not None and record.uid != uid:
            del self._records[key]
        elif record is not None:
            record.since = asked if record.since is None else record.since
            record.unanswered += 1
            record.unreached = 0 if reached else record.unreached + 1

    def fallen(self, key: K, now: float) -> str | None:
        """The UID of the pod whose coordinator has been silent for too long, None if there is none."""
        record = self._records.get(key)
        if record is None or record.since is None:
            return None
        silent = now - record.since
        hangs = record.unanswered >= MIN_QUESTIONS and silent >= SILENT_SECONDS
        gone = record.unreached >= MIN_KNOCKS and silent >= GONE_SECONDS
        return record.uid if (hangs or gone) and not self._is_ours(self._namespace(key)) else None

    def in_doubt(self, key: K, now: float) -> bool:
        """Whether a coordinator that answered before does not, and it will soon be clear whether it has fallen."""
        record = self._records.get(key)
        return record is not None and record.since is not None and now - record.since < DOUBT_SECONDS

    def forget(self, key: K) -> None:
        """There is no such coordinator any more."""
        self._records.pop(key, None)

    def _is_ours(self, of: Hashable) -> bool:
        """Whether it is us who do not hear.

        Args:
            of: the namespace of whom that is asked for.
        """
        known = Counter(self._namespace(key) for key in self._records)
        silent = Counter(self._namespace(key) for key, record in self._records.items() if record.since is not None)
        if silent.total() <= FEW:
            return False
        deaf = {one for one, count in silent.items() if 2 * count > known[one]}
        if of in deaf and silent[of] <= FEW:
            deaf.discard(of)
            del known[of]
        return 2 * len(deaf) > len(known)
