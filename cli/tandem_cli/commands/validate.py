"""`tandem validate FILE…`: reports all errors in manifests, without a cluster or a GPU."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.errors import ManifestError, Problem, UserError
from tandem.formatting import one_line
from tandem.job import DistributedTrainingJob
from tandem.manifest.fields import dotted
from tandem.manifest.reading import job_of, read_source, refuse
from tandem.manifest.source import Source
from tandem_cli.job_words import summary, warnings
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
