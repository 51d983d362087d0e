"""The replicas of a role: which pods to create and which to delete. A pure function of the existing pods and the time.

Every place among those of a role has an index. A place is taken while a live pod has it; otherwise the way its last
pod went decides when the next one is made:

    deleted, evicted, preempted, lost with its node          at once
    left out of the group                                    at once, on another node
    rejected by its node, so that no container ran           after the pauses of tandem_operator.job_memory
    failed after it was at work, or lived for a minute       at once
    failed before, or exceeded a limit of its own            after a pause that grows
      (memory, storage) within ten minutes

After three of the last three kinds on one node it is made rather on another. tandem_operator.pod_ends has the table.

A replacement is made while the old pod still terminates or its node is silent: the coordinator's generations keep the
two apart. Only in a queue it is not: Kueue counts a pod until it has ended, and deletes what is too many of a group.
The last pod that ended stays, for its logs and because it carries the count of failures; the ones before go.

Rejected: a batch Job (its controller delays each replacement by 10, 20, 40, 80 s and in the end ten minutes, however
the pod went), and a StatefulSet (it never makes a second pod of a name, so a silent node blocks its place until
somebody deletes the pod by force).
"""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from tandem.exitcode import ExitCode
from tandem_operator.observed import MAX_AVOIDED, Pod
from tandem_operator.pod_ends import CONSEQUENCES, PodEnd

FIRST_PAUSE, MAX_PAUSE = 2.0, 300.0
"""Seconds before the second replacement in a row, doubled for each further one; the first is immediate."""
RESULT_SECONDS = 10.0
"""A pod that ended well may be so much ahead of the coordinator's word that training is complete."""
MAX_MADE = 200
"""Pods of a role that one look makes; the next look makes more. To write down 10,000 takes two seconds, in which no
other job would be looked at."""
MAX_FAILURES = 6
"""So many failures soon after the start, in a row, and a place is not going to be filled."""
MAX_ON_A_NODE = 3
"""So many of them on one node, and the next pod is placed on another one, if any has room: the node may be what ends
them. That is a wish, because where they fail on every node, none must be left that waits for another one for ever."""


@dataclass(frozen=True)
class New:
    """A pod to make."""

    index: int
    failures: int
    avoids: tuple[str, ...] = ()
    """Nodes on which its place was left out of the group."""
    failed_on: tuple[str, ...] = ()
    """The nodes of the last pods there in a row that failed soon after their start, oldest first."""

    @property
    def shuns(self) -> tuple[str, ...]:
        """Nodes that it is not to be placed on if there is room on any other."""
        return tuple(node for node, times in Counter(self.failed_on).items() if times >= MAX_ON_A_NODE)


@dataclass(frozen=True)
class RolePlan:
    """What to do with the pods of a role."""

    make: tuple[New, ...] = ()
    remove: tuple[Pod, ...] = ()
    again_in: float | None = None
    """Seconds until something is due that no event announces."""
    stuck: tuple[Pod, ...] = ()
    """The last pods of places whose pods failed too often in a row."""
    settled: tuple[int, ...] = ()
    """Places whose pod is at work."""


def plan(
    pods: Sequence[Pod],
    replicas: int,
    now: float,
    useful: Callable[[Pod], bool],
    proven: Container[str] = (),
    ends_by_itself: bool = False,
    beside: bool = True,
    held: Callable[[int], float | None] = lambda index: None,
) -> RolePlan:
    """What to do so that every place is taken.

    Args:
        pods: all of the role, oldest first.
        useful: whether a pod was told what it would be told now; others are replaced.
        proven: names of pods whose group has made steps: what ends them is not that they cannot start.
        ends_by_itself: a pod that ended well is done, and not replaced.
        beside: a replacement may start before the old pod has ended.
        held: until when a place gets no other pod, seconds since the epoch; None: it may. What it has stays meanwhile.
    """
    make: list[New] = []
    remove: list[Pod] = []
    stuck: list[Pod] = []
    again: list[float] = []
    settled: list[int] = []
    places: dict[int, list[Pod]] = {index: [] for index in range(replicas)}
    for pod in pods:
        if pod.index in places:
            places[pod.index].append(pod)
        elif not pod.deleting:
            remove.append(pod)
    for index, candidates in places.items():
        fit = [pod for pod in candidates if pod.live and useful(pod)]
        best = min(fit, key=_merit, default=None)
        until = held(index)
        stays = [pod for pod in candidates if pod.live] if best is None and until is not None else [best]
        remove += [pod for pod in candidates if not pod.ended and not pod.deleting and pod not in stays]
        ended = [pod for pod in candidates if pod.ended and not pod.deleting]
        last = max(ended, key=lambda pod: (pod.finished or pod.created, pod.name), default=None)
        remove += [pod for pod in ended if pod is not last]
        if best is not None:
            settled += [index] if best.started is not None else []
            continue
        gone = [pod for pod in candidates if not pod.ended]
        if gone and not beside:
            continue
        due, failures = _next(None if gone else last, now, proven, ends_by_itself)
        if last is not None and not gone and failures >= MAX_FAILURES:
            stuck.append(last)
        if due is None:
            continue
        due = due if until is None else max(due, until)
        if due <= now:
            failed_on = _failed_on(None if gone else last, proven)
            make.append(New(index, failures, _avoided(candidates), failed_on))
        else:
            again.append(due - now)
    if len(make) > MAX_MADE:
        del make[MAX_MADE:]
        again.append(0.0)
    # The highest places go first: ranks are given out in the order of names, and the others keep theirs.
    remove.sort(key=lambda pod: -pod.index)
    return RolePlan(tuple(make), tuple(remove), min(again, default=None), tuple(stuck), tuple(settled))


def is_done(pods: Sequence[Pod], replicas: int) -> bool:
    """Whether in every place the last pod has ended well."""
    last = {pod.index: pod for pod in pods if pod.ended}
    going_on = {pod.index for pod in pods if not pod.ended}
    return all(
        place in last and last[place].end is PodEnd.FINISHED and place not in going_on for place in range(replicas)
    )


def pause(failures: int) -> float:
    """Seconds between the failure of a pod and its replacement."""
    return 0.0 if failures <= 1 else min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** (failures - 2))


def failures_of(pod: Pod, proven: Container[str] = ()) -> int:
    """Failures in a row up to and with this pod, which has ended."""
    follows = CONSEQUENCES[_end(pod)]
    if not follows.counts:
        return 0 if follows.forgives else pod.failures
    return 1 if _did_start(pod, proven) else pod.failures + 1


def _end(pod: Pod) -> PodEnd:
    assert pod.end is not None
    return pod.end


def _did_start(pod: Pod, proven: Container[str]) -> bool:
    lived = 0.0 if pod.started is None or pod.finished is None else pod.finished - pod.started
    follows = CONSEQUENCES[_end(pod)]
    return lived >= follows.starts_well or (follows.is_proven_by_steps and pod.name in proven)


def _failed_on(last: Pod | None, proven: Container[str]) -> tuple[str, ...]:
    if last is None or not last.node or CONSEQUENCES[_end(last)].forgives or _did_start(last, proven):
        return ()
    return (*last.failed_on, last.node)[-MAX_AVOIDED:]


def _next(last: Pod | None, now: float, proven: Container[str], ends_by_itself: bool) -> tuple[float | None, int]:
    """When the next pod of a place is due, None for never, and its count of failures."""
    if last is None:
        return now, 0
    # A node's clock may be ahead of ours.
    finished = last.finished if last.finished is not None and last.finished <= now else last.created
    if last.end is PodEnd.FINISHED:
        return (None if ends_by_itself else finished + RESULT_SECONDS), 0
    failures = failures_of(last, proven)
    return finished + pause(failures), failures


def _avoided(candidates: Sequence[Pod]) -> tuple[str, ...]:
    """The nodes that the next pod of a place keeps off: a group that failed because of it there would again."""
    found: dict[str, None] = {}
    for pod in candidates:
        found |= dict.fromkeys(pod.avoids)
        if pod.code == ExitCode.LEFT_OUT and pod.node:
            found[pod.node] = None
    return tuple(found)[-MAX_AVOIDED:]


def _merit(pod: Pod) -> tuple[bool, bool, float, str]:
    """Of several live pods of one place the one that is furthest stays."""
    return not pod.ready, pod.phase != "Running", pod.created, pod.name
