"""What commands say of a job before it runs: what it does, in one line, and what is probably not meant."""

from tandem.job import DistributedTrainingJob, Workers
from tandem.manifest.fields import dotted
from tandem.pod_template import doubts
from tandem.secrecy import hidden, secrets


def summary(job: DistributedTrainingJob) -> str:
    """What a job does, in one line."""
    spec = job.spec
    if spec.trainer.command:
        what = " ".join(hidden([*spec.trainer.command, *spec.trainer.args]))
    else:
        loop, settings = spec.trainer.settings_of_loop, spec.trainer.settings
        much = f"{loop.max_steps:,} steps" if loop.max_steps else _count(loop.epochs, "epoch")
        what = f"{spec.trainer.task}, " + (
            f"{settings.model} on {settings.data.name}, {much}" if spec.trainer.is_built_in else much
        )
    workers = _count(spec.workers.replicas, "worker")
    if spec.workers.min_replicas != spec.workers.replicas or spec.workers.most != spec.workers.replicas:
        workers += f" ({spec.workers.min_replicas} to {spec.workers.most})"
    if spec.workers.processes > 1:
        workers += f" × {spec.workers.processes} processes"
    evaluation = spec.evaluation
    evaluators = _count(evaluation.processes, "evaluator process", "es") if evaluation.processes else "no evaluators"
    return f"{job.metadata.name}: {what}; {workers}; {evaluators}"


def warnings(job: DistributedTrainingJob) -> list[str]:
    """What is allowed and probably not meant."""
    return [*_secrets(job), *_claims(job.spec.workers), *_templates(job)]


def _templates(job: DistributedTrainingJob) -> list[str]:
    spec = job.spec
    templates = {
        "workers": spec.workers.template,
        "evaluators": spec.evaluation.template,
        "coordinator": spec.coordinator.template,
    }
    return [
        f"spec.{part}.template.{where}: {why}"
        for part, template in templates.items()
        for where, why in doubts(template, part.removesuffix("s"))
    ]


def _secrets(job: DistributedTrainingJob) -> list[str]:
    """Values that stand in the run directory, and in the job's object, as they are."""
    variables = {(*path, "value"): one.name for path, one in job.spec.variables}
    return [
        f"{dotted(path)}: {variables.get(path, 'this')} looks like a secret, and this value is written into the run "
        "directory; keep it in a Secret and refer to it in valueFrom.secretKeyRef"
        for path in (("spec", *one) for one in secrets(job.spec.dump_brief()))
    ]


def _claims(workers: Workers) -> list[str]:
    """GPUs of Dynamic Resource Allocation stand in another object, which may not even be there yet."""
    spec = workers.template.get("spec")
    claims = spec.get("resourceClaims") if isinstance(spec, dict) else None
    if not claims or workers.processes_per_replica is not None or workers.gpus:
        return []
    return [
        "spec.workers.template.spec.resourceClaims: GPUs that pods claim are not counted, so each worker has one rank; "
        "set the number in workers.processesPerReplica"
    ]


def _count(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{plural if number != 1 else ''}"
