"""The names and labels of a job's objects. The operator sets them; the CLI reads them."""

import hashlib
import re

JOB = "tandem.dev/job"
"""Label of everything that belongs to a job: its name."""
ROLE = "tandem.dev/role"
"""Label of pods: worker, coordinator or evaluator."""
INDEX = "tandem.dev/index"
"""Label of pods: their place among those of their role, from 0."""
RETRY_AT = "tandem.dev/retry-at"
"""Annotation of a failed job: any new value has it tried again."""

WORKER, COORDINATOR, EVALUATOR = "worker", "coordinator", "evaluator"
ROLES = (WORKER, COORDINATOR, EVALUATOR)

MAX_LENGTH = 63 - len("-evaluator-999-abcde")
"""A host name, a label and a Service take 63 characters, and an evaluator's name is the longest made of a job's."""
POD = f"(.+-(?:{'|'.join(ROLES)})-[0-9]+)-[0-9a-f]{{5}}"
"""A pod's name, a regular expression: its place, and what tells it from those that stood there before."""
_HASH = 8
_FIRST = "j-"


def stem(job: str) -> str:
    """What the names of a job's objects begin with. A name that is too long, or begins with a digit (a Service's may
    not), is shortened and told apart by a hash of the whole."""
    if len(job) <= MAX_LENGTH and job[0].isalpha():
        return job
    kept = job[: MAX_LENGTH - _HASH - len(_FIRST) - 1].rstrip("-")
    return f"{_FIRST}{kept}-{hashlib.sha256(job.encode()).hexdigest()[:_HASH]}"


def token(job: str) -> str:
    """The Secret with the job's token."""
    return f"{stem(job)}-token"


def coordinator(job: str) -> str:
    """The coordinator's Service."""
    return f"{stem(job)}-coordinator"


def place(pod: str) -> str:
    """A pod's name without what tells it from those that stood at its place before; any other name as it is."""
    match = re.fullmatch(POD, pod)
    return match[1] if match else pod
