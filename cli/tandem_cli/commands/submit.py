"""`tandem submit FILE…`: checks manifests and submits them to a cluster, Kubernetes or, with --slurm, SLURM."""

from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import UserError
from tandem.manifest.reading import apply_overrides, job_of, read_source
from tandem_cli.cluster import ContextOption, NamespaceOption, ProfileOption
from tandem_cli.output import OverridesOption, each_checked, echo
from tandem_cli.packing import CodeOption, packed_if_given, with_code
from tandem_cli.platforms import Checked, Cluster
from tandem_cli.runs import completed, opened


def submit(
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help="Manifests; `-` reads standard input.")],
    overrides: OverridesOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the cluster check everything without changing anything.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="--dry-run, and check that everything the job refers to by name is on the cluster."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite fields that were changed by other means than tandem submit.")
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
    """Give jobs to a cluster, or change those that are there.

    Checks all files as `tandem validate` does before it sends any. Needs kubectl, and uses what is set up for it; with
    --slurm it needs sbatch, and a run directory on the shared file system.
    """
    cluster: Cluster
    if slurm:
        _refuse("for Kubernetes; omit it with --slurm", {"--dry-run": dry_run, "--check": check, "--force": force})
        _refuse("for Kubernetes; omit it with --slurm", {"--namespace": namespace, "--context": context})
        from tandem_cli.slurm.submission import Slurm

        cluster = Slurm(profile, run_dir, fresh, None if after is None else opened(after).path)
    else:
        _refuse("for SLURM; add --slurm", {"--profile": profile, "--run-dir": run_dir, "--fresh": fresh})
        _refuse("for SLURM; add --slurm", {"--after": after})
        from tandem_cli.kubernetes.submission import Kubernetes

        cluster = Kubernetes(namespace, context, dry_run, check, force)
    with packed_if_given(code) as pack:
        if pack is not None:
            echo(f" {pack}", mark="code", colour="green")
        settings = with_code(overrides or (), pack)
        cluster.submit(each_checked(lambda file: _checked(file, settings), files), settings, pack)


def _refuse(why: str, given: dict[str, object]) -> None:
    for option, value in given.items():
        if value:
            raise UserError(f"{option} is {why}")


def _checked(file: str, settings: tuple[str, ...]) -> Checked:
    source = read_source(file)
    # What the user wrote and no more: defaults are the cluster's, and the fields of others stay theirs.
    return job_of(source, settings), apply_overrides(source.data, settings), source
