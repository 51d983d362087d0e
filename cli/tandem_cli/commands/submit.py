"""`tandem submit FILE…`: checks manifests and submits them to a cluster, Kubernetes or, with --slurm, SLURM."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import UserError
from tandem.job.manifest.reading import read_source
from tandem_cli.cluster import ContextOption, NamespaceOption, ProfileOption
from tandem_cli.output import OverridesOption, check_all, echo
from tandem_cli.packing import CodeOption, packed_if_given, with_code
from tandem_cli.platforms import Cluster, checked
from tandem_cli.runs import completed, open_own_run


def submit(
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help="Manifests; `-` reads standard input.")],
    overrides: OverridesOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the cluster check everything without changing anything.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Like --dry-run, and check that the objects the job refers to exist on the cluster."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite fields that other field managers have changed.")
    ] = False,
    code: CodeOption = None,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit to the SLURM cluster of this login node.")] = False,
    profile: ProfileOption = "",
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", metavar="DIR", help="SLURM: the run directory.", show_default="runs/NAME"),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="SLURM: move an earlier run to DIR/previous and start over.")
    ] = False,
    after: Annotated[
        Path | None,
        typer.Option(
            "--after", metavar="RUN", help="SLURM: start when this run is complete.", autocompletion=completed
        ),
    ] = None,
) -> None:
    """Submit jobs to a cluster, or change existing ones.

    Validates all files as `tandem validate` does before it submits any. Needs kubectl, and uses its configuration; with
    --slurm it needs sbatch, and a run directory on the shared file system.
    """
    cluster: Cluster
    if slurm:
        _refuse("for Kubernetes; omit it with --slurm", {"--dry-run": dry_run, "--check": check, "--force": force})
        _refuse("for Kubernetes; omit it with --slurm", {"--namespace": namespace, "--context": context})
        from tandem_cli.slurm.submission import Slurm

        cluster = Slurm(
            profile,
            run_dir,
            fresh,
            None if after is None else open_own_run(after, "and SLURM waits for a run of its own").path,
        )
    else:
        _refuse("for SLURM; add --slurm", {"--profile": profile, "--run-dir": run_dir, "--fresh": fresh})
        _refuse("for SLURM; add --slurm", {"--after": after})
        from tandem_cli.kubernetes.submission import Kubernetes

        cluster = Kubernetes(namespace, context, dry_run, check, force, draws=sys.stderr.isatty())
    with packed_if_given(code) as pack:
        if pack is not None:
            echo(f" {pack}", mark="code", colour="green")
        settings = with_code(overrides or (), pack)
        jobs = check_all(lambda file: checked(read_source(file), settings), files)
        for submitted in cluster.submit(jobs, settings, pack, _report):
            echo(f" {submitted.description}", mark=submitted.outcome, colour="green")
            for step in submitted.next_steps:
                echo(f"  {step}")


def _report(text: str, is_warning: bool) -> None:
    mark, _, message = text.partition(" ")
    echo(f" {message}", mark=mark, colour="yellow" if is_warning else "", err=is_warning)


def _refuse(reason: str, options: dict[str, object]) -> None:
    for option, value in options.items():
        if value:
            raise UserError(f"{option} is {reason}")
