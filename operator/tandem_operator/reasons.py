"""Reasons and messages: what keeps a job from getting what it needs, and what was replaced. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from tandem.exitcode import ExitCode
from tandem.reasons import Reason
from tandem_operator import kinds, names, pod_starts
from tandem_operator.gang_deadlock import WAY_SECONDS, claimant, rival, starved_for, way_ends
from tandem_operator.job_memory import place
from tandem_operator.kinds import Kind
from tandem_operator.lifecycle import Lifecycle, condition, is_initialized
from tandem_operator.observed import BROKEN_WAITING, Pod
from tandem_operator.plan import Situation
from tandem_operator.pod_ends import CONSEQUENCES, HEALTHY_SECONDS, PodEnd
from tandem_operator.replicas import New
from tandem_operator.reporting import Notice, Want

NO_FAILURE = (None, ExitCode.DONE, ExitCode.PREEMPTED)
"""Exit codes of evaluators that did not fail."""
PLACING_SECONDS = 5.0
"""A pod that has no node for so long is worth a word; before, its volume may just be in the making."""


def name_taken(kind: Kind, name: str, owner: str) -> Want:
    """Somebody else has an object of that name, which is left alone.

    Args:
        owner: the UID of the job that owns it, empty for nobody.
    """
    words = f"{kind.name} {name} exists and is not this job's"
    if kind is kinds.CLAIM and not owner:
        given = f'to have this job train on it, annotate it with {names.ADOPT}="true"'
        return Want(Reason.NAME_TAKEN, f"{words}; {given}; else remove it, or give the job another name")
    return Want(Reason.NAME_TAKEN, f"{words}; remove or rename it, or give the job another name")


def giving_way(at: Situation, lifecycle: Lifecycle, workers: Sequence[Pod]) -> Want | None:
    """Whether to do without workers for the sake of another job, and why."""
    # A job whose coordinator has never answered has no group that could train.
    answered = at.heard is not None or is_initialized(at.job.status)
    if lifecycle.stage != "train" or (answered and not at.nobody_trains):
        return None
    until = way_ends(at.job.status)
    if until is not None and at.now < until:
        before = condition(at.job.status, "Running")
        assert before is not None
        return Want(Reason.GAVE_WAY, before.message)
    starved = starved_for(at.job, workers, at.now)
    if starved is None:
        return None
    me = claimant(at.job, at.created, at.uid, workers)
    other = rival(starved, me, at.others, at.patience)
    if other is None:
        return None
    # Who works elsewhere is nobody's business here.
    name = other.name if other.namespace == me.namespace else "a job of another namespace"
    words = f"gave its workers back to {name}, which waits for them; tries again in {WAY_SECONDS:.0f} s"
    return Want(Reason.GAVE_WAY, words)


def waiting(at: Situation) -> Iterator[Want]:
    """Why pods do not start, in the words of Kubernetes."""
    for pod in all_pods(at):
        lasting = pod.waiting in BROKEN_WAITING or at.now - pod.created > PLACING_SECONDS
        if pod.waiting and lasting and not pod.ended and not pod.deleting:
            yield Want(pod.waiting, f"{pod.name}: {pod.words or pod.waiting}")
        elif (start := at.starts.get(pod.uid)) is not None and pod_starts.waits(pod, at.now):
            yield Want(start.reason, f"{pod.name}: {start.message}")
    if any(pod.unqueued and pod.live for pod in at.pods(names.WORKER)):
        queue = at.job.spec.run_policy.queue_name
        words = f"the workers do not wait in the queue {queue}: Kueue is not installed, or does not handle pods here"
        yield Want(Reason.NOT_QUEUED, words)
    for role in names.ROLES:
        yield from _ends(at, role)


def _ends(at: Situation, role: str) -> Iterator[Want]:
    """How pods have ended, where that is worth a word."""
    pods = at.pods(role)
    # A pod that failed stays for its logs; it is no trouble any more once the one after it has started well.
    well = {pod.index for pod in pods if pod.live and at.now - (pod.started or at.now) >= HEALTHY_SECONDS}
    for pod in pods:
        if pod.end is None or pod.deleting or pod.index in well:
            continue
        if CONSEQUENCES[pod.end].is_trouble:
            yield Want(pod.end, f"{pod.name} {_way_of(pod)}")
        elif role == names.EVALUATOR and pod.end is PodEnd.FAILED and pod.code not in NO_FAILURE:
            yield Want(Reason.EVALUATOR_FAILED, f"{pod.name} ended with exit code {pod.code}: {pod.words}")


def all_pods(at: Situation) -> list[Pod]:
    """The coordinator, the workers, the evaluators."""
    return [pod for role in (names.COORDINATOR, names.WORKER, names.EVALUATOR) for pod in at.pods(role)]


def replacements(role: str, pods: Sequence[Pod], made: Iterable[New], fallen: str | None = None) -> Iterator[Notice]:
    """Which pods of a role are replaced, and why.

    Args:
        fallen: the UID of a pod that has stopped answering.
    """
    for new in made:
        before = [pod for pod in pods if pod.index == new.index]
        if before:
            pod = before[-1]
            lost = not pod.live or pod.uid == fallen
            why = _way_of(pod) if lost else "was made for what the job was before"
            where = place(role, new.index)
            words = f"{where} is replaced: {pod.name} {why}"
            yield Notice(f"{role.capitalize()}Replaced", words, warning=lost, place=where)


def _way_of(pod: Pod) -> str:
    """How a pod was lost."""
    if pod.ended_by is not None:
        words = CONSEQUENCES[pod.ended_by].words
        return f"{words}: {pod.words}" if pod.ended and pod.words else words
    if pod.silent:
        return "was lost with its node"
    if pod.deleting:
        return "was deleted"
    if pod.ended:
        return f"ended with exit code {pod.code}" if pod.code is not None else "ended"
    return "does not answer any more"
