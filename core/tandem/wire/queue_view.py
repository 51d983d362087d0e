"""The queue of a job as its status shows it: its place, the quota that it waits for, and who has that quota.

Names are those of the job's own namespace. Of other namespaces there are numbers alone: a tenant learns how much is in
use and at which priority, not who works on what (docs/security.md).
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from tandem.formatting import count_noun, number, parse_rfc3339, size, utc_time
from tandem.model import Model, WholeNumber, truncated_to

Word = Annotated[str, truncated_to(316)]
"""A name, a time."""
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
MAX_MISSING, MAX_HOLDERS = 4, 5
"""Maximum number of flavors and of holders that a status lists."""
BYTES = ("memory", "storage", "ephemeral-storage", "hugepages-")
"""Resources, or their prefixes, whose amounts are bytes."""


class MissingQuota(Model):
    """Quota that a job waits for."""

    resource: Word
    """Resource, for instance nvidia.com/gpu."""
    flavor: Word
    """ResourceFlavor in which Kueue looked for it."""
    amount: float
    """Amount by which the unused quota is too small: a number of devices or cores, or bytes."""


class QuotaHolder(Model):
    """Object of the job's own namespace that has such quota."""

    kind: Word
    """Kind of the object that Kueue admitted, for instance DistributedTrainingJob."""
    name: Word
    """Its name."""
    amount: float
    """Amount that it has."""
    priority: Priority = 0
    """Highest priority of its Workloads."""
    since: Word | None = None
    """Time since which it has quota without a break, RFC 3339."""


class OtherNamespaces(Model):
    """Quota that other namespaces have, in numbers."""

    holders: WholeNumber
    """Number of jobs and other objects that have some."""
    amount: float
    """Amount that they have together."""
    lowest_priority: Priority = 0
    """Lowest priority among their Workloads."""
    highest_priority: Priority = 0
    """Highest priority among their Workloads."""


class QueueView(Model):
    """The queue of a job."""

    name: Word
    """The LocalQueue of Kueue."""
    integration: Literal["Workload", "PodGroup"]
    """Unit of admission: the smallest group and each further worker (Workload), or all workers (PodGroup)."""
    admitted: WholeNumber | None = None
    """Number of workers that the queue has admitted; not known of a pod group."""
    waiting_since: Word | None = None
    """Time since which it waits for its smallest group, RFC 3339; absent while that is admitted."""
    waited_seconds: float = 0.0
    """Time that it has waited before, in seconds."""
    position: WholeNumber | None = None
    """Place of its first Workload that waits among those of the LocalQueue; 1 is the next. Absent where Kueue's
    visibility API does not tell."""
    cluster_position: WholeNumber | None = None
    """Its place among all Workloads that wait in the ClusterQueue."""
    missing: Annotated[list[MissingQuota], truncated_to(MAX_MISSING)] = []
    """Quota that it waits for, by flavor."""
    holders: Annotated[list[QuotaHolder], truncated_to(MAX_HOLDERS)] = []
    """Holders of such quota in the job's namespace, the largest first; the job itself is left out."""
    more_holders: WholeNumber | None = None
    """Number of further ones there; absent if there are none."""
    other_namespaces: OtherNamespaces | None = None
    """Numbers about such quota in other namespaces."""


def queue_lines(view: QueueView | None) -> Iterator[tuple[str, str]]:
    """Say why a job waits: label and text of each line; nothing while it does not wait."""
    if view is None:
        return
    if place := _place(view):
        yield "queue", place
    if view.missing:
        yield "missing", ", or ".join(f"{amount_text(entry)} in flavor {entry.flavor}" for entry in view.missing)
    if holders := ", ".join(_holder(view, holder) for holder in view.holders):
        more = f", and {number(view.more_holders)} more" if view.more_holders else ""
        yield "in use by", holders + more
    if (others := view.other_namespaces) is not None:
        ends = sorted({others.lowest_priority, others.highest_priority})
        priority = " to ".join(map(str, ends))
        amount = _amount(view.missing[0].resource if view.missing else "", others.amount)
        yield "elsewhere", f"{count_noun(others.holders, 'job')} of other namespaces: {amount} (priority {priority})"


def amount_text(missing: MissingQuota) -> str:
    """An amount with its resource: `2 nvidia.com/gpu`, `1.5 GB memory`."""
    return f"{_amount(missing.resource, missing.amount)} {missing.resource}"


def _place(view: QueueView) -> str:
    parts = []
    if view.position is not None:
        parts.append(f"place {number(view.position)} in {view.name}")
    if view.cluster_position is not None:
        parts.append(f"{number(view.cluster_position)} among all that wait for the same quota")
    since = parse_rfc3339(view.waiting_since)
    if since is not None:
        parts.append(f"waits since {utc_time(since)}")
    return " · ".join(parts)


def _holder(view: QueueView, holder: QuotaHolder) -> str:
    amount = _amount(view.missing[0].resource if view.missing else "", holder.amount)
    since = parse_rfc3339(holder.since)
    begin = "" if since is None else f", since {utc_time(since)}"
    return f"{holder.kind} {holder.name}: {amount} (priority {holder.priority}{begin})"


def _amount(resource: str, amount: float) -> str:
    if resource.startswith(BYTES):
        return size(amount)
    return number(int(amount)) if amount == int(amount) else number(amount)
