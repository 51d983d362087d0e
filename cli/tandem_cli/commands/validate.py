"""`tandem validate FILE…`: reports all errors in manifests, without a cluster or a GPU."""

import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.errors import ManifestError, Problem, UserError
from tandem.formatting import one_line
from tandem.job.manifest.fields import dotted
from tandem.job.manifest.reading import STDIN, parse_job, raise_for_unmet, read_source
from tandem.job.manifest.source import Source, parse
from tandem.job.resource import DistributedTrainingJob
from tandem.job.sweep import SWEEP_KIND
from tandem_cli import launch_line
from tandem_cli.job_words import summary, warnings
from tandem_cli.launch_line import is_launch_line
from tandem_cli.output import Output, OutputOption, echo, emit


def validate(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE…", help="Manifests; `-` reads standard input. Or scripts: train.py.")
    ],
    output: OutputOption = Output.TEXT,
    on_this_machine: Annotated[
        bool, typer.Option("--here", help="Also check whether the job can run on this machine, as tandem run does.")
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Rewrite files of an earlier version: config becomes parameters and loop.")
    ] = False,
) -> None:
    """Check manifests, and report all errors.

    An error names the file, the line and the field, the invalid value, the allowed values, and the nearest valid name.
    The API server applies the same rules. Exits with 0 if all manifests are valid, otherwise with 2.
    """
    outcomes = [_validate(file, on_this_machine, fix) for file in files]
    if output.is_data:
        emit([_record(file, outcome) for file, outcome in zip(files, outcomes, strict=True)], output)
    else:
        for file, outcome in zip(files, outcomes, strict=True):
            _show(file, outcome)
    if any(isinstance(outcome, UserError) for outcome in outcomes):
        raise typer.Exit(2)


@dataclass(frozen=True)
class _Valid:
    """A valid manifest."""

    summary: str
    warnings: list[str]


def _validate(file: str, on_this_machine: bool, fix: bool) -> _Valid | UserError:
    try:
        source = _source(file)
        if isinstance(source.data, dict) and source.data.get("kind") == SWEEP_KIND:
            from tandem_cli.sweep.definition import check, sweep_summary

            return _Valid(sweep_summary(check(source)), [])
        job = parse_job(source)
        if fix and job.spec.trainer.config is not None:
            job = parse_job(source := _fixed(file))
        return _Valid(summary(job), warnings(job) + (_machine_warnings(job, source) if on_this_machine else []))
    except UserError as error:
        return error


def _source(file: str) -> Source:
    """Read a manifest; for a script, generate the one with which `tandem run` would run it."""
    if not is_launch_line(file):
        return read_source(file)
    return parse(launch_line.read([file]).manifest([file]).encode(), f"manifest of {file}")


def _fixed(file: str) -> Source:
    """Rewrite a manifest, and read it again.

    Raises:
        UserError: it cannot be rewritten.
    """
    from tandem.job.manifest.rewriting import rewritten
    from tandem.rundir.durable import replace_bytes

    if file == STDIN:
        raise UserError("--fix rewrites files, and cannot rewrite standard input")
    try:
        path = Path(file).resolve()  # the file itself, and not a link to it, is replaced
        text = rewritten(path.read_bytes().decode("utf-8-sig"), file)
        replace_bytes(path, text.encode(), mode=stat.S_IMODE(path.stat().st_mode))
    except OSError as error:
        raise UserError(f"{file} cannot be rewritten: {error.strerror}") from None
    return read_source(file)


def _machine_warnings(job: DistributedTrainingJob, source: Source) -> list[str]:
    """Check whether the job can run on this machine; return warnings.

    Raises:
        ManifestError: it cannot run.
    """
    # Imported only for --here: the other checks must stay fast.
    from tandem.rundir.layout import RunDir
    from tandem_coordinator.prerequisites import local_site, unmet
    from tandem_launcher.local.placement import share_gpus, usable_cores, visible_gpus

    gpus, _ = share_gpus(visible_gpus(dict(os.environ)), job)
    site = local_site(job, RunDir(Path("runs") / job.metadata.name), len(usable_cores()), gpus)
    problems = unmet(job, site)
    raise_for_unmet(problems, source)
    return [f"{dotted(problem.field)}: {problem.message}" for problem in problems]


def _show(file: str, outcome: _Valid | UserError) -> None:
    if isinstance(outcome, UserError):
        from tandem_cli.output import (
            print_error,  # rich takes a tenth of a second, which a valid manifest does not need
        )

        print_error(outcome)
    else:
        for warning in outcome.warnings:
            echo(f" {file}: {one_line(warning)}", mark="warning:", colour="yellow", err=True)
        echo(f" {file}: {one_line(outcome.summary)}", mark="OK", colour="green")


def _record(file: str, outcome: _Valid | UserError) -> dict[str, Any]:
    if isinstance(outcome, _Valid):
        details = {"summary": outcome.summary, "problems": [], "warnings": outcome.warnings}
        return {"file": file, "valid": True, **details}
    problems = outcome.problems if isinstance(outcome, ManifestError) else (Problem(0, 0, file, "", str(outcome)),)
    return {"file": file, "valid": False, "problems": [asdict(problem) for problem in problems], "warnings": []}
