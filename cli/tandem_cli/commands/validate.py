"""`tandem validate FILE…`: reports all errors in manifests, without a cluster or a GPU."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.errors import ManifestError, Problem, UserError
from tandem.formatting import one_line
from tandem.job import DistributedTrainingJob, Workers
from tandem.manifest.fields import dotted
from tandem.manifest.reading import job_of, read_source, refuse
from tandem.manifest.source import Source
from tandem.secrecy import looks_secret
from tandem_cli.output import Output, OutputOption, echo, emit


def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help="Manifests; `-` reads standard input.")],
    output: OutputOption = Output.TEXT,
    here: Annotated[
        bool, typer.Option("--here", help="Also check whether the job can run on this machine, as tandem run does.")
    ] = False,
) -> None:
    """Check manifests, and say what is wrong and where.

    Names the file, the line and the field, what was given, what is allowed, and the nearest right name. The API server
    applies the same rules. Ends with 0 if every manifest is right, with 2 if one is not.
    """
    outcomes = [_checked(file, here) for file in files]
    if output.is_data:
        emit([_record(file, outcome) for file, outcome in zip(files, outcomes, strict=True)], output)
    else:
        for file, outcome in zip(files, outcomes, strict=True):
            _show(file, outcome)
    if any(isinstance(outcome, UserError) for outcome in outcomes):
        raise typer.Exit(2)


def summary(job: DistributedTrainingJob) -> str:
    """What a job does, in one line."""
    spec = job.spec
    if spec.trainer.command:
        what = " ".join([*spec.trainer.command, *spec.trainer.args])
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
    return [*_secrets(job), *_claims(job.spec.workers)]


def _secrets(job: DistributedTrainingJob) -> list[str]:
    return [
        f"{dotted(path)}.value: {one.name} looks like a secret, and this value is written into the run "
        "directory; keep it in a Secret and refer to it in valueFrom.secretKeyRef"
        for path, one in job.spec.variables
        if one.value and looks_secret(one.name)
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


@dataclass(frozen=True)
class _Sound:
    """A manifest without a mistake."""

    job: DistributedTrainingJob
    warnings: list[str]


def _checked(file: str, here: bool) -> _Sound | UserError:
    try:
        source = read_source(file)
        job = job_of(source)
        return _Sound(job, warnings(job) + (_doubts_here(job, source) if here else []))
    except UserError as error:
        return error


def _doubts_here(job: DistributedTrainingJob, source: Source) -> list[str]:
    """See whether the job can run here; returns what is only unwise.

    Raises:
        ManifestError: it cannot.
    """
    # Who does not ask for it does not wait for it.
    from tandem.rundir.layout import RunDir
    from tandem_cli.local.placement import share_gpus, usable_cores, visible_gpus
    from tandem_coordinator.prerequisites import here, unmet

    gpus, _ = share_gpus(visible_gpus(dict(os.environ)), job)
    site = here(job, RunDir(Path("runs") / job.metadata.name), len(usable_cores()), gpus)
    found = unmet(job, site)
    refuse(found, source)
    return [f"{dotted(one.field)}: {one.message}" for one in found]


def _show(file: str, outcome: _Sound | UserError) -> None:
    if isinstance(outcome, UserError):
        from tandem_cli.output import tell  # rich takes a tenth of a second; a good manifest goes without

        tell(outcome)
    else:
        for warning in outcome.warnings:
            echo(f" {file}: {one_line(warning)}", mark="warning:", colour="yellow", err=True)
        echo(f" {file}: {one_line(summary(outcome.job))}", mark="OK", colour="green")


def _record(file: str, outcome: _Sound | UserError) -> dict[str, Any]:
    if isinstance(outcome, _Sound):
        told = {"summary": summary(outcome.job), "problems": [], "warnings": outcome.warnings}
        return {"file": file, "valid": True, **told}
    found = outcome.problems if isinstance(outcome, ManifestError) else (Problem(0, 0, file, "", str(outcome)),)
    return {"file": file, "valid": False, "problems": [asdict(problem) for problem in found], "warnings": []}
