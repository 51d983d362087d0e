"""`tandem submit FILE…`: checks manifests and submits them to a cluster, Kubernetes or, with --slurm, SLURM."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.errors import UserError
from tandem.formatting import one_line
from tandem.job import DistributedTrainingJob
from tandem.manifest.reading import apply_overrides, job_of, read_source, refuse
from tandem.manifest.source import Source
from tandem_cli.cluster import ContextOption, NamespaceOption, ProfileOption
from tandem_cli.commands.validate import summary, warnings
from tandem_cli.kubernetes import upload
from tandem_cli.kubernetes.job_view import RESOURCE
from tandem_cli.kubernetes.kubectl import Kubectl, KubectlResult
from tandem_cli.kubernetes.references import missing
from tandem_cli.output import OverridesOption, echo, tell
from tandem_cli.packing import CodeOption, Pack, packed_if_given, with_code

MANAGER = "tandem"
"""Who the API server is told has set these fields."""

Checked = tuple[DistributedTrainingJob, dict[str, Any], Source]


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
) -> None:
    """Give jobs to a cluster, or change those that are there.

    Checks all files as `tandem validate` does before it sends any. Needs kubectl, and uses what is set up for it; with
    --slurm it needs sbatch, and a run directory on the shared file system.
    """
    if slurm:
        _refuse_options(**{"--dry-run": dry_run, "--check": check, "--force": force})
        _refuse_options(**{"--namespace": namespace, "--context": context})
        _to_slurm(files, tuple(overrides or ()), code, profile, run_dir, fresh)
        return
    for option, given in {"--profile": profile, "--run-dir": run_dir, "--fresh": fresh}.items():
        if given:
            raise UserError(f"{option} is for SLURM; add --slurm")
    with packed_if_given(code) as pack:
        if pack is not None:
            echo(f" {pack}", mark="code", colour="green")
        settings, dry_run = with_code(overrides or (), pack), dry_run or check
        checked = _checked(files, settings)
        if pack is not None:
            _refuse_scripts_left_out(checked, settings, pack)
        if check:
            _refuse_what_waits(checked, settings, namespace, context)
        for job, data, _ in checked:
            kubectl = _kubectl(data, namespace, context)
            before = kubectl.ask("get", RESOURCE, job.metadata.name, "--ignore-not-found", "-o", "json").text
            after = _applied(kubectl, data, dry_run, force)
            for warning in (*warnings(job), *after.warnings):
                echo(f" {one_line(warning)}", mark="warning:", colour="yellow", err=True)
            _tell(job, json.loads(before or "null"), json.loads(after.text), dry_run, kubectl.options())
            if pack is not None and not dry_run:
                upload.send(kubectl, job.metadata.name, pack)


def _refuse_options(**given: object) -> None:
    for option, value in given.items():
        if value:
            raise UserError(f"{option} is for Kubernetes; omit it with --slurm")


def _to_slurm(
    files: list[str], overrides: tuple[str, ...], code: Path | None, profile: str, run_dir: Path | None, fresh: bool
) -> None:
    from tandem_cli.slurm import profile as profiles
    from tandem_cli.slurm import submission
    from tandem_cli.slurm.script import fitted

    if run_dir is not None and len(files) > 1:
        raise UserError("--run-dir is for one FILE")
    chosen = profiles.profile(profile)
    with packed_if_given(code) as pack:
        settings = with_code(overrides, pack)
        for _, _, source in _checked(files, settings):
            job = job_of(source, settings)
            job = job_of(source, (*settings, *fitted(job, chosen)))
            path = run_dir or Path("runs") / job.metadata.name
            lacking = submission.lacking(job, path, fresh, pack)
            refuse(lacking, source, settings)
            again = shlex.join(["tandem", "submit", "--slurm", source.file, "--fresh"])
            notes = [one.message for one in lacking] + submission.prepare(path, job, fresh, again, pack)
            for note in notes:
                echo(f" {one_line(note)}", mark="note:", colour="yellow", err=True)
            given = submission.submit(path, job, chosen)
            echo(f" as job {' and '.join(given.ids)}: {one_line(summary(job))}", mark="submitted", colour="green")
            echo(f"  tandem status {shlex.quote(str(path))} --watch")
            echo(f"  tandem logs {shlex.quote(str(path))} --follow")


def told(before: dict[str, Any] | None, after: dict[str, Any], dry_run: bool) -> str:
    """What became of a job, as a verb."""
    if before is None:
        return "would be made" if dry_run else "made"
    if _wanted(before) == _wanted(after):
        return "is up to date"
    return "would be changed" if dry_run else "changed"


def _wanted(whole: dict[str, Any]) -> tuple[Any, ...]:
    metadata = whole["metadata"]
    return whole.get("spec"), metadata.get("labels"), metadata.get("annotations")


def _checked(files: list[str], overrides: tuple[str, ...]) -> list[Checked]:
    """All of them, or, where one is wrong, the end of the command with everything that is wrong."""
    found: list[Checked] = []
    wrong: list[UserError] = []
    for file in files:
        try:
            source = read_source(file)
            # What the user wrote and no more: defaults are the cluster's, and the fields of others stay theirs.
            found.append((job_of(source, overrides), apply_overrides(source.data, overrides), source))
        except UserError as error:
            wrong.append(error)
    _end_with(wrong)
    return found


def _refuse_scripts_left_out(checked: list[Checked], settings: tuple[str, ...], pack: Pack) -> None:
    """End the command where a job starts a script that its pods would not have."""
    wrong: list[UserError] = []
    for job, _, source in checked:
        try:
            refuse(pack.left_out(job), source, settings)
        except UserError as error:
            wrong.append(error)
    _end_with(wrong)


def _refuse_what_waits(checked: list[Checked], overrides: tuple[str, ...], namespace: str, context: str) -> None:
    """End the command where a job refers to what its cluster does not have."""
    wrong: list[UserError] = []
    for job, data, source in checked:
        try:
            refuse(missing(job, _kubectl(data, namespace, context)), source, overrides)
        except UserError as error:
            wrong.append(error)
    _end_with(wrong)


def _end_with(wrong: list[UserError]) -> None:
    for mistake in wrong:
        tell(mistake)
    if wrong:
        raise typer.Exit(2)


def _kubectl(data: dict[str, Any], namespace: str, context: str) -> Kubectl:
    return Kubectl(namespace or str(data["metadata"].get("namespace") or ""), context)


def _applied(kubectl: Kubectl, data: dict[str, Any], dry_run: bool, force: bool) -> KubectlResult:
    more = ["--dry-run=server"] if dry_run else []
    more += ["--force-conflicts"] if force else []
    return kubectl.ask(
        "apply", "--server-side", f"--field-manager={MANAGER}", *more, "-f", "-", "-o", "json", given=json.dumps(data)
    )


def _tell(
    job: DistributedTrainingJob, before: dict[str, Any] | None, after: dict[str, Any], dry_run: bool, options: str
) -> None:
    name, place = job.metadata.name, after["metadata"].get("namespace", "default")
    echo(f" in namespace {place}: {one_line(summary(job))}", mark=told(before, after, dry_run), colour="green")
    if not dry_run:
        echo(f"  tandem status {name}{options} --watch")
        echo(f"  tandem logs {name}{options} --follow")
