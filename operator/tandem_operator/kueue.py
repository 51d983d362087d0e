"""Kueue integration: the pod group of a job's workers. Pure.

Kueue starts the pods of a group together, takes a replacement in while at least one of the group has not ended, and is
done with a group, for good, when all have. It never changes a group's size. So a worker joins the group of those that
are at work, and where nobody is, or another size or queue is wished for, a new group begins, which is queued anew.

Who has been told to go is not at work: when all of a group were, as in a preemption, they end within moments of each
other, and what joined them between the first end and the last would be of a group that is over when Kueue sees it.
Where that happens all the same, Kueue takes its finalizer from the worker and leaves it at its gate for ever. Such a
worker is replaced.

That ended pods release what they held is said by an annotation (`retriable-in-group: "false"`). Without it Kueue keeps
the quota of a job that has failed, and the pods of one that was suspended or deleted, until somebody replaces them.

Rejected: workers queued one by one (a job could get a part of its workers while another holds the rest); deleting
Kueue's Workload objects (it then deletes pods that have ended, whose logs somebody wants to read, and the operator
would need a right on them); groups that serve (their quota is kept while no pod is there).
"""

from collections.abc import Sequence

from tandem.job import DistributedTrainingJob
from tandem_operator import names
from tandem_operator.observed import Pod, PodGroup


def group_of(job: DistributedTrainingJob, workers: Sequence[Pod], entropy: str) -> PodGroup | None:
    """The group that workers belong to now; None if they are not queued.

    Args:
        workers: all worker pods, oldest first.
        entropy: makes the name of a new group unique.
    """
    queue, size = job.spec.run_policy.queue_name, job.spec.workers.replicas
    if queue is None:
        return None
    begun = (pod.group for pod in workers if pod.group is not None and _lasts(pod))
    fitting = (group for group in begun if (group.queue, group.size) == (queue, size))
    return next(fitting, PodGroup(queue, names.group(job.metadata.name, entropy), size))


def _lasts(pod: Pod) -> bool:
    """Whether Kueue goes on counting the pod. On a node that is lost it does, although it was told to go."""
    return not (pod.ended or pod.abandoned) and (pod.silent or not pod.deleting)
