"""The queue of a job in one reconcile: its Workloads (tandem_operator.workloads), compared with what it needs. Pure."""

from collections.abc import Sequence

from tandem_operator import kinds, objects, pods
from tandem_operator.job_memory import retry_time, write_key
from tandem_operator.objects import Manifest
from tandem_operator.observed import Pod
from tandem_operator.plan import ReconcileInputs
from tandem_operator.pods import Images
from tandem_operator.workloads import JobQueue, Need, WorkloadChange, WorkloadPlan, occupied, pod_set_template

UNNAMED_IMAGES = Images(operator="-", trainer="-", evaluator="-")
"""Images of the pods in Workloads, which no decision depends on."""


def job_queue(inputs: ReconcileInputs, workers: Sequence[Pod]) -> JobQueue | None:
    """The job's Workloads; None if it is not queued, or as a pod group."""
    workloads = inputs.children.workloads(inputs.uid)
    if inputs.job.spec.run_policy.queue_name is None:
        return None
    # A group that runs stays one. So does what has Workloads, or workers of theirs, while Kueue's API is away.
    grouped = any(pod.group is not None and pod.live for pod in workers)
    ungrouped = any(pod.group is None and pod.live for pod in workers)
    if grouped or (inputs.queueing is None and inputs.has_pod_groups and not ungrouped and not workloads):
        return None
    running = frozenset(pod.index for pod in workers if pod.live)
    return JobQueue(inputs.job, workloads, _workload_template(inputs)[1], inputs.queueing, running)


def _workload_template(inputs: ReconcileInputs) -> tuple[Manifest, str]:
    """The part of a worker's pod that Kueue counts, and the hash of all that the job's Workloads ask for."""

    def compute() -> tuple[Manifest, str]:
        spec = inputs.job.spec
        template = pod_set_template(pods.worker(inputs.job, inputs.uid, UNNAMED_IMAGES, "")["spec"])
        # Only what the job says: an operator with other defaults must not have all jobs queued anew.
        own = pod_set_template(spec.workers.template.get("spec") or {})
        requests = [spec.run_policy.queue_name, spec.run_policy.priority_class_name, spec.workers.resources, own]
        return template, objects.digest(requests)

    return inputs.memo.once(inputs.job.spec, ("workload", inputs.uid), compute)


def workload_plan(inputs: ReconcileInputs, queue: JobQueue | None, workers: Sequence[Pod], need: Need) -> WorkloadPlan:
    """Plan the Workloads of the job."""
    workloads = inputs.children.workloads(inputs.uid)
    if inputs.queueing is None or (queue is None and not workloads):
        return WorkloadPlan()
    if queue is None:
        # It is queued no longer, or as a pod group.
        return WorkloadPlan(delete=tuple(workload for workload in workloads if not workload.deleting))
    busy = occupied(workers, inputs.unanswered)
    ready = [pod.index for pod in workers if pod.ready and pod.live]
    priorities, name = inputs.queueing.priorities, _workload_template(inputs)[0].get("priorityClassName", "")
    return queue.plan(need, busy, ready, priorities.get(name, 0))


def workload_changes(inputs: ReconcileInputs, plan: WorkloadPlan) -> tuple[WorkloadChange, ...]:
    """Changes of Workloads that are due now: those that were refused are tried again after a while."""
    return tuple(change for change in plan.write if _is_due(inputs, change.workload.name))


def new_workloads(inputs: ReconcileInputs, queue: JobQueue | None, plan: WorkloadPlan) -> tuple[Manifest, ...]:
    """Manifests of the Workloads to create now."""
    if queue is None or not plan.create:
        return ()
    template, digest = _workload_template(inputs)
    return tuple(
        objects.workload(inputs.job, inputs.uid, new, template, digest)
        for new in plan.create
        if _is_due(inputs, new.name)
    )


def _is_due(inputs: ReconcileInputs, name: str) -> bool:
    return retry_time(inputs.attempts, write_key(kinds.WORKLOAD, name), inputs.now) is None
