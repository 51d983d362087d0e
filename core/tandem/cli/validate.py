"""`tandem validate FILE…`: all that is wrong with manifests, before a cluster or a GPU is involved."""

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

from tandem.cli.echo import echo, echo_json
from tandem.job import DistributedTrainingJob
from tandem.mistake import ManifestError, Problem, UserError
from tandem.printable import one_line
from tandem.reading import read_job
from tandem.secrecy import looks_secret


class Output(StrEnum):
    """How the outcome is written."""

    TEXT = "text"
    JSON = "json"


def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help="Manifests; `-` reads standard input.")],
    output: Annotated[
        Output, typer.Option("--output", "-o", help="Sentences for people, or JSON for editors and scripts.")
    ] = Output.TEXT,
) -> None:
    """Check manifests, and say what is wrong and where.

    Names the file, the line and the field, what was given, what is allowed, and the nearest right name. The API server
    applies the same rules. Ends with 0 if every manifest is right, with 2 if one is not.
    """
    outcomes = [_checked(file) for file in files]
    if output is Output.JSON:
        echo_json([_record(file, outcome) for file, outcome in zip(files, outcomes, strict=True)])
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
        settings = spec.trainer.settings
        much = f"{settings.max_steps:,} steps" if settings.max_steps else _count(settings.epochs, "epoch")
        what = f"{spec.trainer.task}, {settings.model} on {settings.data.name}, {much}"
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
    return [
        f"spec.trainer.env[{index}].value: {one.name} looks like a secret, and what stands here is written into the "
        "run directory; keep it in a Secret and name that in valueFrom.secretKeyRef"
        for index, one in enumerate(job.spec.trainer.env)
        if one.value and looks_secret(one.name)
    ]


def _count(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{plural if number != 1 else ''}"


def _checked(file: str) -> DistributedTrainingJob | UserError:
    try:
        return read_job(file)
    except UserError as error:
        return error


def _show(file: str, outcome: DistributedTrainingJob | UserError) -> None:
    if isinstance(outcome, UserError):
        from tandem.cli.mistakes import tell  # rich takes a tenth of a second; a good manifest goes without

        tell(outcome)
    else:
        echo(f" {file}: {one_line(summary(outcome))}", mark="OK", colour="green")


def _record(file: str, outcome: DistributedTrainingJob | UserError) -> dict[str, Any]:
    if isinstance(outcome, DistributedTrainingJob):
        return {"file": file, "valid": True, "summary": summary(outcome), "problems": [], "warnings": warnings(outcome)}
    found = outcome.problems if isinstance(outcome, ManifestError) else (Problem(0, 0, file, "", str(outcome)),)
    return {"file": file, "valid": False, "problems": [asdict(problem) for problem in found], "warnings": []}
