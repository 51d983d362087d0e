"""What of a job must not change, as far as the API server cannot see it. Pure.

How many processes each replica has is in the coordinator's rules and in the command of every agent that runs. A CEL
rule refuses to change it where it follows from `processesPerReplica`, from whole GPUs, or from `gpuResource`. Parts of
GPUs have names that no rule can list, and of what stands in a template the CRD knows nothing. So the number is written
on the ConfigMap with the job when that is made, and a job that says another one is held as it is: its agents would be
refused by the next coordinator, and train on unheard.
"""

from tandem.job import DistributedTrainingJob
from tandem_operator import kinds, names
from tandem_operator.observed import Children, JobFile

REASON = "ProcessesChanged"


def complaint(job: DistributedTrainingJob, uid: str, children: Children) -> str | None:
    """What of the job was changed that must not be, in a sentence."""
    made = children.get(kinds.CONFIG_MAP, names.job_file(job.metadata.name))
    if not isinstance(made, JobFile) or made.owner != uid or not made.processes:
        return None
    before, now = made.processes, job.spec.workers.processes
    if before == now:
        return None
    return (
        f"each replica of this job has {_processes(before)}, and by the GPUs that workers.resources or "
        f"workers.template asks for now it would have {now}. That cannot be changed: undo it, or make a new job of "
        "another name. Until then nothing is done about this one; what runs goes on"
    )


def _processes(count: int) -> str:
    return f"{count} process" if count == 1 else f"{count} processes"
