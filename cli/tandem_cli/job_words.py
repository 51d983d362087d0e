"""Descriptions of a job before it runs: a summary in one line, and warnings."""

from tandem.job.manifest.fields import dotted
from tandem.job.pod_template import template_warnings
from tandem.job.resource import DistributedTrainingJob, Workers
from tandem.job.secrecy import hide_secrets, secret_paths

DEPRECATED_CONFIG = (
    "spec.trainer.config is deprecated, and the next version does not read it: its fields are those of loop and "
    "parameters, as of any task; `tandem validate --fix FILE` rewrites the file, "
    "for the next job: a job that exists in a cluster keeps this form"
)


def summary(job: DistributedTrainingJob) -> str:
    """Summarize a job in one line."""
    spec = job.spec
    if spec.trainer.command:
        training = " ".join(hide_secrets([*spec.trainer.command, *spec.trainer.args]))
    else:
        loop = spec.trainer.settings_of_loop
        duration = f"{loop.max_steps:,} steps" if loop.max_steps else _count(loop.epochs, "epoch")
        training = f"{spec.trainer.task}, {duration}"
        if spec.trainer.is_built_in:
            images = spec.trainer.images
            training = f"{spec.trainer.task}, {images.model} on {images.data.name}, {duration}"
    workers = _count(spec.workers.replicas, "worker")
    if spec.workers.min_replicas != spec.workers.replicas or spec.workers.most != spec.workers.replicas:
        workers += f" ({spec.workers.min_replicas} to {spec.workers.most})"
    if spec.workers.processes > 1:
        workers += f" × {spec.workers.processes} processes"
    evaluation = spec.evaluation
    evaluators = _count(evaluation.processes, "evaluator process", "es") if evaluation.processes else "no evaluators"
    return f"{job.metadata.name}: {training}; {workers}; {evaluators}"


def warnings(job: DistributedTrainingJob) -> list[str]:
    """Return warnings about settings that are valid but probably a mistake."""
    return [*deprecations(job), *_secrets(job), *_claims(job.spec.workers), *_templates(job)]


def deprecations(job: DistributedTrainingJob) -> list[str]:
    """Return warnings about fields that the next version does not read."""
    return [] if job.spec.trainer.config is None else [DEPRECATED_CONFIG]


def _templates(job: DistributedTrainingJob) -> list[str]:
    spec = job.spec
    templates = {
        "workers": spec.workers.template,
        "evaluators": spec.evaluation.template,
        "coordinator": spec.coordinator.template,
    }
    return [
        f"spec.{part}.template.{field}: {reason}"
        for part, template in templates.items()
        for field, reason in template_warnings(template, part.removesuffix("s"))
    ]


def _secrets(job: DistributedTrainingJob) -> list[str]:
    """Warn of secrets that would be stored in plain text, in the run directory and in the job's object."""
    variables = {(*path, "value"): variable.name for path, variable in job.spec.variables}
    return [
        f"{dotted(path)}: {variables.get(path, 'this')} looks like a secret, and its value is written into the run "
        "directory; keep it in a Secret and refer to it in valueFrom.secretKeyRef"
        for path in (("spec", *field) for field in secret_paths(job.spec.dump_brief()))
    ]


def _claims(workers: Workers) -> list[str]:
    """Warn of GPUs from Dynamic Resource Allocation: another object defines their number, and it may not exist yet."""
    spec = workers.template.get("spec")
    claims = spec.get("resourceClaims") if isinstance(spec, dict) else None
    if not claims or workers.processes_per_replica is not None or workers.gpus:
        return []
    return [
        "spec.workers.template.spec.resourceClaims: GPUs that pods claim are not counted, so each worker has one rank; "
        "set the number in workers.processesPerReplica"
    ]


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"
