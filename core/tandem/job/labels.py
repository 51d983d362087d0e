"""The names and labels of a job's objects. The operator sets them; the CLI reads them."""

import hashlib
import re

JOB = "tandem.dev/job"
"""Label of everything that belongs to a job: its name."""
ROLE = "tandem.dev/role"
"""Label of pods: worker, coordinator or evaluator."""
INDEX = "tandem.dev/index"
"""Label of pods: their index among those of their role, from 0."""
RETRY_AT = "tandem.dev/retry-at"
"""Annotation of a failed job: any new value retries it."""

WORKER, COORDINATOR, EVALUATOR = "worker", "coordinator", "evaluator"
ROLES = (WORKER, COORDINATOR, EVALUATOR)

MAX_LENGTH = 63 - len("-evaluator-999-abcde")
"""Maximum length of a name's stem. Host names, labels and Services have at most 63 characters, and an evaluator's name
is the longest one derived from a job's."""
POD = f"(.+-(?:{'|'.join(ROLES)})-[0-9]+)-[0-9a-f]{{5}}"
"""Regular expression for a pod's name: the replica's name, and a suffix that differs for each of its pods."""
_HASH = 8
_FIRST = "j-"


def stem(job: str) -> str:
    """Common prefix of the names of a job's objects. A name that is too long, or begins with a digit (a Service's may
    not), is shortened and made unique by a hash."""
    if len(job) <= MAX_LENGTH and job[0].isalpha():
        return job
    shortened = job[: MAX_LENGTH - _HASH - len(_FIRST) - 1].rstrip("-")
    return f"{_FIRST}{shortened}-{hashlib.sha256(job.encode()).hexdigest()[:_HASH]}"


def token(job: str) -> str:
    """Name of the Secret with the job's token."""
    return f"{stem(job)}-token"


def coordinator(job: str) -> str:
    """Name of the coordinator's Service."""
    return f"{stem(job)}-coordinator"


def replica_of_pod(pod: str) -> str:
    """The replica of a pod: its name without the pod's suffix; any other name unchanged."""
    match = re.fullmatch(POD, pod)
    return match[1] if match else pod
