"""The names and labels of a job's objects.

Names follow from the job's name alone, so that an operator that has just started finds what another one made. The
longest is an evaluator's, `NAME-evaluator-999-abcde`, which has to fit into 63 characters: host names, labels and
Services take no more. A longer name, or one that begins with a digit (a Service's may not), is shortened and told apart
by a hash of the whole.

Labels, that beginning, and the names that the command line needs are core's (tandem.labels).
"""

import hashlib

from tandem.labels import COORDINATOR as COORDINATOR
from tandem.labels import EVALUATOR as EVALUATOR
from tandem.labels import INDEX as INDEX
from tandem.labels import JOB as JOB
from tandem.labels import RETRY_AT as RETRY_AT
from tandem.labels import ROLE as ROLE
from tandem.labels import ROLES as ROLES
from tandem.labels import WORKER as WORKER
from tandem.labels import coordinator as coordinator
from tandem.labels import stem as stem
from tandem.labels import token as token

OPERATOR = "operator"
"""The role of the operator's own pods, which the chart gives them; they belong to no job."""
QUEUE = "kueue.x-k8s.io/queue-name"
"""Label of workers that are queued."""
GROUP, GROUP_SIZE = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
"""Label and annotation of workers that are queued: which start together, and how many those are."""
RETRIABLE = "kueue.x-k8s.io/retriable-in-group"
"""Annotation of workers that are queued: whether their group goes on when all of them have ended."""
GATE, HELD = "kueue.x-k8s.io/admission", "kueue.x-k8s.io/managed"
"""Scheduling gate of a pod that waits in its queue, and finalizer of one that the queue has not done with."""
FAILURES = "tandem.dev/failures"
"""Annotation of pods: how many of their forerunners in a row failed soon after their start."""
AVOIDS = "tandem.dev/avoids"
"""Annotation of worker pods: nodes, with commas, on which their place was left out of the group."""
FAILED_ON = "tandem.dev/failed-on"
"""Annotation of worker pods: the nodes, with commas, of those of their forerunners in a row that failed soon after
their start, oldest first."""
NOT_BEGUN = "tandem.dev/not-begun"
"""Annotation of pods that the operator has ended because nothing of them had begun for too long: why, in a sentence."""
ENDPOINT = "tandem.dev/coordinator"
"""Annotation of worker pods: where they were told that the coordinator is."""
APPLIED = "tandem.dev/applied"
"""Annotation: a hash of what the operator wanted of the object when it wrote it last."""
ADOPT = "tandem.dev/adopt"
"""Annotation of a claim that nobody owns: "true" lets the job whose claim has its name take it."""
PROCESSES = "tandem.dev/processes"
"""Annotation of the ConfigMap with the job: how many processes each replica has, which never changes."""
TEMPLATE = "tandem.dev/template"
"""Annotation of coordinator and evaluator pods: a hash of all that was asked of them; what has changed since takes
other pods."""


def job_file(job: str) -> str:
    """The ConfigMap with the resolved job."""
    return f"{stem(job)}-job"


def checkpoints(job: str) -> str:
    """The claim on the volume, where the job does not name one."""
    return f"{stem(job)}-checkpoints"


def network_policy(job: str) -> str:
    """The NetworkPolicy of its pods, where the operator makes those."""
    return f"{stem(job)}-network"


def objects(job: str) -> frozenset[str]:
    """All objects of a job but its pods."""
    return frozenset({job_file(job), checkpoints(job), coordinator(job), network_policy(job), token(job)})


def pod(job: str, role: str, index: int, entropy: str) -> str:
    """A pod; another one for each entropy."""
    return f"{stem(job)}-{role}-{index}-{_short(f'{job}/{index}/{entropy}', 5)}"


def group(job: str, entropy: str) -> str:
    """The pod group that queued workers are; another one for each entropy."""
    return f"{stem(job)}-{_short(f'{job}/{entropy}', 5)}"


def labels(job: str, role: str = "") -> dict[str, str]:
    """The labels of an object of a job."""
    ours = {"app.kubernetes.io/name": "tandem", "app.kubernetes.io/managed-by": "tandem-operator", JOB: job}
    return ours | ({ROLE: role} if role else {})


def _short(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
