"""The names and labels of a job's objects.

Names depend on the job's name alone, so that an operator that has just started finds what another one created. The
longest is an evaluator's, `NAME-evaluator-999-abcde`, which has to fit into 63 characters, the limit of host names,
labels and Services. A longer name, or one that begins with a digit (a Service's may not), is shortened and made unique
by a hash of the whole.

Labels, that prefix, and the names that the command line needs are core's (tandem.job.labels).
"""

import hashlib
from functools import lru_cache

from tandem.job.labels import COORDINATOR as COORDINATOR
from tandem.job.labels import EVALUATOR as EVALUATOR
from tandem.job.labels import INDEX as INDEX
from tandem.job.labels import JOB as JOB
from tandem.job.labels import RETRY_AT as RETRY_AT
from tandem.job.labels import ROLE as ROLE
from tandem.job.labels import ROLES as ROLES
from tandem.job.labels import WORKER as WORKER
from tandem.job.labels import coordinator as coordinator
from tandem.job.labels import stem as stem
from tandem.job.labels import token as token

OPERATOR = "operator"
"""Role of the operator's own pods, which the chart sets; they belong to no job."""
FIRST = "tandem.dev/first-worker"
"""Annotation of Workloads: index of the first of their workers."""
MAX_WORKLOADS = 17
"""Maximum number of Workloads of a job."""
QUEUE = "kueue.x-k8s.io/queue-name"
"""Label of queued workers: the queue."""
GROUP, GROUP_SIZE = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
"""Label and annotation of queued workers: their pod group, and its size."""
RETRIABLE = "kueue.x-k8s.io/retriable-in-group"
"""Annotation of queued workers: whether their group continues when all of them have ended."""
GATE, FINALIZER = "kueue.x-k8s.io/admission", "kueue.x-k8s.io/managed"
"""Scheduling gate of a pod that waits in its queue, and finalizer of one that Kueue still manages."""
FAILURES = "tandem.dev/failures"
"""Annotation of pods: number of their predecessors in a row that failed soon after their start."""
AVOIDS = "tandem.dev/avoids"
"""Annotation of worker pods: nodes, with commas, on which the replica was left out of the group."""
FAILED_ON = "tandem.dev/failed-on"
"""Annotation of worker pods: the nodes, with commas, of their predecessors in a row that failed soon after their start,
oldest first."""
NOT_BEGUN = "tandem.dev/not-begun"
"""Annotation of pods that the operator has terminated because none of their containers started in time: the reason, as
a sentence."""
ENDPOINT = "tandem.dev/coordinator"
"""Annotation of worker pods: the coordinator's address that they were created with."""
APPLIED = "tandem.dev/applied"
"""Annotation: a hash of the manifest that the object was last written from."""
ADOPT = "tandem.dev/adopt"
"""Annotation of a claim that nobody owns: "true" lets the job whose claim has its name adopt it."""
PROCESSES = "tandem.dev/processes"
"""Annotation of the ConfigMap with the job: number of processes of each replica, which never changes."""
TEMPLATE = "tandem.dev/template"
"""Annotation of coordinator and evaluator pods: a hash of their template; a pod with another hash is replaced."""


def job_file(job: str) -> str:
    """Name of the ConfigMap with the resolved job."""
    return f"{stem(job)}-job"


def checkpoints(job: str) -> str:
    """Name of the claim on the volume, where the job does not name one."""
    return f"{stem(job)}-checkpoints"


def network_policy(job: str) -> str:
    """Name of the NetworkPolicy of its pods, where the operator creates those."""
    return f"{stem(job)}-network"


def workload(job: str, slot: int) -> str:
    """Name of a Kueue Workload of a queued job; the first is that of its smallest group."""
    return f"{stem(job)}-queue-{slot}"


def workloads(job: str) -> list[str]:
    """Names of all Workloads that it may have."""
    return [workload(job, slot) for slot in range(MAX_WORKLOADS)]


@lru_cache(4096)
def objects(job: str) -> frozenset[str]:
    """Names of all objects of a job but its pods."""
    single = {job_file(job), checkpoints(job), coordinator(job), network_policy(job), token(job)}
    return frozenset({*single, *workloads(job)})


def pod(job: str, role: str, index: int, entropy: str) -> str:
    """Name of a pod; a different one for each entropy."""
    return f"{stem(job)}-{role}-{index}-{_short(f'{job}/{index}/{entropy}', 5)}"


def group(job: str, entropy: str) -> str:
    """Name of the pod group of queued workers; a different one for each entropy."""
    return f"{stem(job)}-{_short(f'{job}/{entropy}', 5)}"


def labels(job: str, role: str = "") -> dict[str, str]:
    """Labels of an object of a job."""
    common = {"app.kubernetes.io/name": "tandem", "app.kubernetes.io/managed-by": "tandem-operator", JOB: job}
    return common | ({ROLE: role} if role else {})


def _short(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
