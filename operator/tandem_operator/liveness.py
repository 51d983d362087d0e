"""Liveness of coordinators: detects those that have stopped answering although their pods are ready. That is the sign
of a dead node before the cluster notices it, by default after 40 seconds. If a member of the group died with that node,
the others wait for the coordinator all that time.

A coordinator that answered before is reported, so that another one replaces it on another node,

    once its node has neither taken nor refused a connection, twice in a row: the sign of a dead node;
    or once it has not answered for longer than its own kubelet would take to notice that it hangs.

A wrong guess costs a restart of a coordinator, which training does not notice. Still, a fault of the operator must not
kill coordinators: if most are silent, the operator itself is probably cut off or too slow, and none is reported. "Most"
counts namespaces, each by the majority of its coordinators: an operator that is cut off reaches none of them, and a
tenant, whose coordinators may do anything, counts once. The namespace of the job itself is left out of the count while
few of its coordinators are silent.

Rejected: readiness of nodes (it is what takes the 40 seconds, and needs a right on nodes), a shorter grace period for
nodes (not the operator's to set), a lease that each coordinator renews in the API server (a write a job every few
seconds).
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

SILENT_SECONDS = 6.0
"""Seconds since the first unanswered poll. A coordinator that hangs on a live node is not ready any more after 3 to 4
seconds, and then its kubelet restarts it."""
MIN_UNANSWERED = 2
"""Minimum number of unanswered polls: a single one may be late because the operator itself was paused."""
GONE_SECONDS, MIN_UNREACHED = 2.0, 2
"""Seconds since the first unanswered poll, and the number of polls in a row without a connection. In each of them the
kernel tries to connect twice."""
DOUBT_SECONDS = 2 * SILENT_SECONDS
"""Seconds after which a silent coordinator is either reported already, or will not be."""
MAX_IGNORED_SILENT = 3
"""Number of silent coordinators that is ignored when the operator looks for a fault of its own: so many may share one
node."""

K = TypeVar("K", bound=Hashable)


@dataclass
class _Record:
    """Recent answers of one coordinator's pod."""

    uid: str
    since: float | None = None
    """Time of the first unanswered poll; None: the last one was answered."""
    unanswered: int = 0
    """Number of polls since then."""
    unreached: int = 0
    """Number of the last of them, in a row, in which nobody took the connection."""


class Liveness(Generic[K]):
    """Tracks which coordinators have stopped answering. One that has never answered is not tracked. Times are those of
    a monotonic clock, in seconds.

    Args:
        namespace: returns the namespace of a key.
    """

    def __init__(self, namespace: Callable[[K], Hashable]) -> None:
        self._namespace = namespace
        self._records: dict[K, _Record] = {}

    def __len__(self) -> int:
        """Number of coordinators that have answered, whether they still do or not."""
        return len(self._records)

    def note(self, key: K, uid: str, polled_at: float, answered: bool, reached: bool = True) -> None:
        """Record whether the coordinator in the pod `uid` answered a poll.

        Args:
            polled_at: time at which the poll was sent.
            reached: the node took the connection or refused it.
        """
        record = self._records.get(key)
        if answered:
            self._records[key] = _Record(uid)
        elif record is not None and record.uid != uid:
            del self._records[key]
        elif record is not None:
            record.since = polled_at if record.since is None else record.since
            record.unanswered += 1
            record.unreached = 0 if reached else record.unreached + 1

    def unresponsive(self, key: K, now: float) -> str | None:
        """UID of the pod whose coordinator has been silent for too long; None if there is none."""
        record = self._records.get(key)
        if record is None or record.since is None:
            return None
        silence = now - record.since
        is_hanging = record.unanswered >= MIN_UNANSWERED and silence >= SILENT_SECONDS
        is_unreached = record.unreached >= MIN_UNREACHED and silence >= GONE_SECONDS
        return record.uid if (is_hanging or is_unreached) and not self._is_own_fault(self._namespace(key)) else None

    def in_doubt(self, key: K, now: float) -> bool:
        """Whether a coordinator that answered before does not answer now, and it will soon be clear whether it is
        gone."""
        record = self._records.get(key)
        return record is not None and record.since is not None and now - record.since < DOUBT_SECONDS

    def forget(self, key: K) -> None:
        """Stop tracking a coordinator."""
        self._records.pop(key, None)

    def _is_own_fault(self, namespace: Hashable) -> bool:
        """Whether the operator itself is probably at fault.

        Args:
            namespace: that of the job that the answer is for.
        """
        total = Counter(self._namespace(key) for key in self._records)
        silent = Counter(self._namespace(key) for key, record in self._records.items() if record.since is not None)
        # So few silent coordinators may have shared one dead node, whatever their share is.
        if silent.total() <= MAX_IGNORED_SILENT:
            return False
        deaf = {other for other, count in silent.items() if 2 * count > total[other]}
        # A few silent coordinators of the job's own namespace are no evidence, so that namespace leaves the count.
        if namespace in deaf and silent[namespace] <= MAX_IGNORED_SILENT:
            deaf.discard(namespace)
            del total[namespace]
        return 2 * len(deaf) > len(total)
