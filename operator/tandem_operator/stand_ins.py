"""Stand-ins: evaluators on CPUs in place of those whose pods wait for GPUs (`evaluators.fallback`).

Evaluators with a low priority borrow GPUs that nobody else wants: they are preempted when somebody does, and their
replacements wait. A pod that has waited for `fallbackAfterSeconds` stays in the scheduler's queue, and gets a stand-in
without GPUs. As soon as its own container runs, the stand-in is deleted; a shard that it had claimed is free again.
The stand-in of replica I has the index REPLICAS + I.

Rejected: to replace the waiting pod by one without GPUs. It would lose its place in the queue, and nobody would tell
when a GPU is free.
"""

from collections import defaultdict
from collections.abc import Sequence

from tandem.job.resource import Evaluators, Spec
from tandem_operator import replicas
from tandem_operator.observed import Pod


def stand_ins(pods: Sequence[Pod], spec: Spec, now: float) -> tuple[list[int], float | None]:
    """Compute the indices of the stand-ins to have, and the delay in seconds until another one is due.

    Args:
        pods: of all evaluators of the job.
    """
    needed: list[int] = []
    delays: list[float] = []
    evaluators = spec.evaluation
    if evaluators.fallback is None or not spec.evaluator_gpus:
        return needed, None
    live, existing = defaultdict[int, list[Pod]](list), {pod.index for pod in pods if not pod.deleting}
    for pod in pods:
        if pod.live:
            live[pod.index].append(pod)
    for index in range(evaluators.replicas):
        stand_in, own = evaluators.replicas + index, live[index]
        if any(pod.started is not None for pod in own):
            continue
        remaining = [pod.created + evaluators.fallback_after_seconds - now for pod in own if pod.placed is None]
        # Once it exists it stays until the container of the other pod runs.
        if stand_in in existing or any(delay <= 0 for delay in remaining):
            needed.append(stand_in)
        else:
            delays += remaining
    return needed, min(delays, default=None)


def have_evaluated(pods: Sequence[Pod], evaluators: Evaluators) -> bool:
    """Whether each evaluator of a job whose training is complete has ended well, or its stand-in has."""
    count, finished = evaluators.replicas, replicas.finished_indices(pods)
    return count > 0 and all(index in finished or count + index in finished for index in range(count))
