"""Kueue pod groups: the queue of a cluster that grants no Workloads (tandem_operator.workloads). Pure.

Kueue starts the pods of a group together, accepts a replacement while at least one pod of the group has not ended, and
finishes a group, for good, when all have. It never changes a group's size. So a worker joins the group of those that
run. If none runs, or the job asks for another size or queue, a new group starts, which is queued anew.

A worker that is being deleted does not count as running: when all of a group are, as in a preemption, they end within
moments of each other, and a pod that joined them between the first end and the last would belong to a group that Kueue
has finished. Where that happens all the same, Kueue removes its finalizer from the worker and leaves it at its
scheduling gate for ever. Such a worker is replaced.

An annotation (`retriable-in-group: "false"`) says that ended pods release what they held. Without it Kueue keeps the
quota of a job that has failed, and the pods of one that was suspended or deleted, until somebody replaces them.

Rejected: workers queued one by one (a job could get a part of its workers while another holds the rest); deleting
Kueue's Workload objects (Kueue then deletes pods that have ended, whose logs somebody wants to read, and the operator
would need a right on them); groups that serve (their quota is kept while no pod exists).
"""

from collections.abc import Sequence

from tandem.job.resource import DistributedTrainingJob
from tandem_operator import names
from tandem_operator.observed import Pod, PodGroup


def group_of(job: DistributedTrainingJob, workers: Sequence[Pod], entropy: str) -> PodGroup | None:
    """The group of the job's new workers; None if they are not queued.

    Args:
        workers: all worker pods, oldest first.
        entropy: makes the name of a new group unique.
    """
    queue, size = job.spec.run_policy.queue_name, job.spec.workers.replicas
    if queue is None:
        return None
    # Only a group that Kueue still counts can take a replacement, and only with an unchanged queue and size.
    active = (pod.group for pod in workers if pod.group is not None and _lasts(pod))
    matching = (group for group in active if (group.queue, group.size) == (queue, size))
    return next(matching, PodGroup(queue, names.group(job.metadata.name, entropy), size))


def _lasts(pod: Pod) -> bool:
    """Whether Kueue still counts the pod. It does so for a pod on a lost node, although that is being deleted."""
    return not (pod.ended or pod.abandoned) and (pod.silent or not pod.deleting)
