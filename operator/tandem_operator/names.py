"""What the objects of a job are called, and the labels by which they are found.

Names follow from the job's name alone, so that an operator that has just started finds what another one made. The
longest is a worker's, `NAME-worker-9999-abcde`, which has to fit into 63 characters: host names, labels and Services
take no more. A longer name, or one that begins with a digit (a Service's may not), is shortened and told apart by a
hash of the whole.

Labels and that beginning are core's (tandem.cluster.names): the command line finds a job's objects by them.
"""

import hashlib

from tandem.cluster.names import COORDINATOR as COORDINATOR
from tandem.cluster.names import EVALUATOR as EVALUATOR
from tandem.cluster.names import INDEX as INDEX
from tandem.cluster.names import JOB as JOB
from tandem.cluster.names import ROLE as ROLE
from tandem.cluster.names import ROLES as ROLES
from tandem.cluster.names import WORKER as WORKER
from tandem.cluster.names import stem as stem

FAILURES = "tandem.dev/failures"
"""Annotation of worker pods: how many of their forerunners in a row failed soon after their start."""
ENDPOINT = "tandem.dev/coordinator"
"""Annotation of worker pods: where they were told that the coordinator is."""
APPLIED = "tandem.dev/applied"
"""Annotation: a hash of what the operator wanted of the object when it wrote it last."""
TEMPLATE = "tandem.dev/template"
"""Annotation of the evaluators' Job: a hash of what cannot be changed in it."""


def token(job: str) -> str:
    """The Secret with the job's token."""
    return f"{stem(job)}-token"


def job_file(job: str) -> str:
    """The ConfigMap with the resolved job."""
    return f"{stem(job)}-job"


def checkpoints(job: str) -> str:
    """The claim on the volume, where the job does not name one."""
    return f"{stem(job)}-checkpoints"


def coordinator(job: str) -> str:
    """The coordinator's Deployment and Service."""
    return f"{stem(job)}-coordinator"


def evaluator(job: str) -> str:
    """The evaluators' Job."""
    return f"{stem(job)}-evaluator"


def worker(job: str, index: int, entropy: str) -> str:
    """A worker pod; another one for each entropy."""
    return f"{stem(job)}-worker-{index}-{_short(f'{job}/{index}/{entropy}', 5)}"


def labels(job: str, role: str = "") -> dict[str, str]:
    """The labels of an object of a job."""
    ours = {"app.kubernetes.io/name": "tandem", "app.kubernetes.io/managed-by": "tandem-operator", JOB: job}
    return ours | ({ROLE: role} if role else {})


def _short(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
