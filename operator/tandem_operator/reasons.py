"""Reasons and messages: what keeps a job from running as specified, and which pods were replaced. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from tandem.job.resource import Evaluators
from tandem.processes.exitcode import ExitCode
from tandem.wire.reasons import Reason
from tandem_operator import kinds, names, pod_starts
from tandem_operator.gang_deadlock import BACKOFF_SECONDS, backoff_ends, claimant, rival, starved_for
from tandem_operator.job_memory import replica_key
from tandem_operator.lifecycle import Lifecycle, find_condition, is_initialized
from tandem_operator.observed import BROKEN_WAITING, KubeObject, Pod
from tandem_operator.plan import ReconcileInputs
from tandem_operator.pod_ends import CONSEQUENCES, HEALTHY_SECONDS, PodEnd
from tandem_operator.replicas import NewPod
from tandem_operator.reporting import JobProblem, KubeEvent

NO_FAILURE = (None, ExitCode.DONE, ExitCode.PREEMPTED)
"""Exit codes of evaluators that are not failures."""
PLACING_SECONDS = 5.0
"""Time after which a pod without a node is reported; before, its volume may still be being created."""


def name_taken(existing: KubeObject, namespace: str, job: str) -> JobProblem:
    """The problem that somebody else's object has the name of one of the job's. It is left alone.

    Args:
        namespace: of the object and of this job.
        job: name of this job.
    """
    conflict = f"{existing.kind.name} {existing.name} exists and is not this job's"
    if existing.owner:
        return JobProblem(Reason.NAME_TAKEN, f"{conflict}; remove or rename it, or give the job another name")
    if existing.kind is kinds.CLAIM:
        adoption = f'to have this job train on it, annotate it with {names.ADOPT}="true"'
        return JobProblem(Reason.NAME_TAKEN, f"{conflict}; {adoption}; else remove it, or give the job another name")
    if existing.job != job:
        conflict += "" if existing.job else ", nor any job's"
        return JobProblem(Reason.NAME_TAKEN, f"{conflict}; rename it, or give the job another name")
    # kubectl delete --cascade=orphan has taken the owner away from all that an earlier job had, its pods too.
    objects = "pods,services,configmaps,secrets,networkpolicies"
    command = f"kubectl delete {objects} -n {namespace} -l {names.JOB}={job}"
    advice = f"if a job of this name was deleted without its objects, remove those ({command}); else rename it"
    return JobProblem(Reason.NAME_TAKEN, f"{conflict}; {advice}, or give the job another name")


def backoff_for_rival(inputs: ReconcileInputs, lifecycle: Lifecycle, workers: Sequence[Pod]) -> JobProblem | None:
    """The reason why the job releases its workers for another one, None if it does not."""
    # A job whose coordinator has never answered has no group that could train.
    answered = inputs.snapshot is not None or is_initialized(inputs.job.status)
    if lifecycle.stage != "train" or (answered and not inputs.nobody_trains):
        return None
    until = backoff_ends(inputs.job.status)
    if until is not None and inputs.now < until:
        before = find_condition(inputs.job.status, "Running")
        assert before is not None
        return JobProblem(Reason.GAVE_WAY, before.message)
    starved = starved_for(inputs.job, workers, inputs.now)
    if starved is None:
        return None
    me = claimant(inputs.job, inputs.created, inputs.uid, workers)
    other = rival(starved, me, inputs.claimants, inputs.patience)
    if other is None:
        return None
    # The names of jobs in other namespaces are not disclosed.
    name = other.name if other.namespace == me.namespace else "a job of another namespace"
    message = f"gave its workers back to {name}, which waits for them; tries again in {BACKOFF_SECONDS:.0f} s"
    return JobProblem(Reason.GAVE_WAY, message)


def pod_problems(inputs: ReconcileInputs) -> Iterator[JobProblem]:
    """Problems of pods that do not start, as Kubernetes reports them, and ends of pods that the status reports."""
    progress: list[JobProblem] = []
    for pod in all_pods(inputs):
        lasting = pod.waiting in BROKEN_WAITING or inputs.now - pod.created > PLACING_SECONDS
        if pod.waiting and lasting and not pod.ended and not pod.deleting:
            yield JobProblem(pod.waiting, f"{pod.name}: {pod.message or pod.waiting}")
        elif (start := inputs.starts.get(pod.uid)) is not None and pod_starts.waits(pod, inputs.now):
            problem = JobProblem(start.reason, f"{pod.name}: {start.message}")
            # A pull or a creation that goes on explains less than what a person has to mend.
            if start.reason in (pod_starts.PULLING, pod_starts.CREATING):
                progress.append(problem)
            else:
                yield problem
    if any(pod.unqueued and pod.live for pod in inputs.pods(names.WORKER)):
        queue = inputs.job.spec.run_policy.queue_name
        message = f"the workers do not wait in the queue {queue}: Kueue is not installed, or does not handle pods here"
        yield JobProblem(Reason.NOT_QUEUED, message)
    yield from progress
    for role in names.ROLES:
        yield from _ends(inputs, role)


def _ends(inputs: ReconcileInputs, role: str) -> Iterator[JobProblem]:
    """Ends of pods that the status reports."""
    pods = inputs.pods(role)
    # A failed pod stays for its logs; it is no problem any more once its replacement has started well.
    well = {pod.index for pod in pods if pod.live and _has_run_well(pod, inputs.now)}
    for pod in pods:
        if pod.end is None or pod.deleting or pod.index in well:
            continue
        if CONSEQUENCES[pod.end].is_reported:
            yield JobProblem(pod.end, f"{pod.name} {_way_of(pod)}")
        elif role == names.EVALUATOR and pod.end is PodEnd.FAILED and pod.code not in NO_FAILURE:
            yield JobProblem(Reason.EVALUATOR_FAILED, f"{pod.name} ended with exit code {pod.code}: {pod.message}")


def _has_run_well(pod: Pod, now: float) -> bool:
    if pod.started is None:
        return False
    # The clock of its node may be ahead.
    return now - (pod.started if pod.started <= now else pod.created) >= HEALTHY_SECONDS


def all_pods(inputs: ReconcileInputs) -> list[Pod]:
    """Pods of the coordinator, of workers, and of evaluators, in this order."""
    return [pod for role in (names.COORDINATOR, names.WORKER, names.EVALUATOR) for pod in inputs.pods(role)]


def replacements(
    role: str, pods: Sequence[Pod], new_pods: Iterable[NewPod], unresponsive: str | None = None
) -> Iterator[KubeEvent]:
    """Events for pods that replace others of their role, with the reason.

    Args:
        unresponsive: the UID of a coordinator's pod that has stopped answering.
    """
    for new in new_pods:
        before = [pod for pod in pods if pod.index == new.index]
        if before:
            pod = before[-1]
            lost = not pod.live or pod.uid == unresponsive
            end = _way_of(pod) if lost else "was created from an earlier spec of the job"
            replica = replica_key(role, new.index)
            message = f"{replica} is replaced: {pod.name} {end}"
            yield KubeEvent(f"{role.capitalize()}Replaced", message, warning=lost, replica=replica)


def fallback_events(pods: Sequence[Pod], new_pods: Iterable[NewPod], evaluators: Evaluators) -> Iterator[KubeEvent]:
    """Events for new stand-ins.

    Args:
        pods: of all evaluators of the job.
    """
    for new in new_pods:
        if new.index >= evaluators.replicas and not any(pod.index == new.index for pod in pods):
            message = (
                f"evaluator {new.index - evaluators.replicas} has waited for its GPUs for "
                f"{evaluators.fallback_after_seconds:g} s; a pod on CPUs evaluates in its place until they are free"
            )
            yield KubeEvent("EvaluatorFallback", message, replica=replica_key(names.EVALUATOR, new.index))


def _way_of(pod: Pod) -> str:
    """The way in which a pod was lost, as an Event says it."""
    if pod.ended_by is not None:
        verb = CONSEQUENCES[pod.ended_by].verb
        return f"{verb}: {pod.message}" if pod.ended and pod.message else verb
    if pod.silent:
        return "was lost with its node"
    if pod.deleting:
        return "was deleted"
    if pod.ended:
        return f"ended with exit code {pod.code}" if pod.code is not None else "ended"
    return "does not answer any more"
