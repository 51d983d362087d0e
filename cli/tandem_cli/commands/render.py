"""`tandem render slurm FILE`: prints the sbatch script of a job."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import UserError
from tandem.job.manifest.reading import parse_job, read_source
from tandem_cli.cluster import ProfileOption
from tandem_cli.output import OverridesOption
from tandem_launcher.slurm import profile as profiles
from tandem_launcher.slurm import script
from tandem_launcher.slurm.script import ScriptPaths

render = typer.Typer(no_args_is_help=True, help="Print the sbatch script of a job.")


@render.callback()
def _group() -> None:
    """Print the sbatch script of a job."""


@render.command()
def slurm(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The job's manifest.")],
    overrides: OverridesOption = None,
    profile: ProfileOption = "",
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="The run directory.", show_default="runs/NAME")
    ] = None,
    evaluators: Annotated[
        bool, typer.Option("--evaluators", help="Print the script of the evaluators, if they have a job of their own.")
    ] = False,
    node: Annotated[
        bool, typer.Option("--node", help="Print the script of a job that adds a node to the running training.")
    ] = False,
) -> None:
    """Print the sbatch script of a job, to read, change and submit by hand.

    The script refers to the manifest, which is read when the job starts.
    """
    if file == "-":
        raise UserError("the script refers to the manifest, so it must be a file")
    settings, chosen = tuple(overrides or ()), profiles.profile(profile)
    source = read_source(file)
    job = parse_job(source, settings)
    settings += tuple(script.fitted_overrides(job, chosen))
    job = parse_job(source, settings)
    path = (run_dir or Path("runs") / job.metadata.name).resolve()
    places = ScriptPaths(path, sys.executable, Path(file).resolve(), settings)
    if node:
        typer.echo(script.extension(job, chosen, ScriptPaths(path, sys.executable)), nl=False)
        return
    if not evaluators:
        typer.echo(script.training(job, chosen, places), nl=False)
        return
    if not script.has_evaluation_job(job, chosen):
        raise UserError("the evaluators have no job of their own: the profile has no evaluators.partition")
    typer.echo(script.evaluation(job, chosen, ScriptPaths(path, sys.executable)), nl=False)
