"""By which names and labels the objects of a job are found. The operator gives them; who looks on reads them."""

import hashlib

JOB = "tandem.dev/job"
"""Label of everything that belongs to a job: its name."""
ROLE = "tandem.dev/role"
"""Label of pods: worker, coordinator or evaluator."""
INDEX = "tandem.dev/index"
"""Label of worker pods: their place in the group, from 0."""
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
"""Label of evaluator pods, given by the Job controller: their place, from 0."""

WORKER, COORDINATOR, EVALUATOR = "worker", "coordinator", "evaluator"
ROLES = (WORKER, COORDINATOR, EVALUATOR)

LONGEST = 63 - len("-worker-9999-abcde")
"""A host name, a label and a Service take 63 characters, and a worker's name is the longest that is made of a job's."""
_HASH = 8
_FIRST = "j-"


def stem(job: str) -> str:
    """What the names of a job's objects begin with. A name that is too long, or begins with a digit (a Service's may
    not), is shortened and told apart by a hash of the whole."""
    if len(job) <= LONGEST and job[0].isalpha():
        return job
    kept = job[: LONGEST - _HASH - len(_FIRST) - 1].rstrip("-")
    return f"{_FIRST}{kept}-{hashlib.sha256(job.encode()).hexdigest()[:_HASH]}"
