"""Finds the run that a command names, by folder or name, and suggests other names if there is none.

The argument of commands for local runs and for jobs of a cluster is resolved in this order:

    --namespace or --context is given   a job on that cluster
    the URL of a bucket                 the run in that bucket (tandem_cli.bucket)
    a folder, or a word with a slash    the run in that folder
    the name of a run of this machine   that run, in `runs/` here or wherever `tandem run` has started it
    any other name                      a job on the cluster of kubectl's current context
"""

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import UserError
from tandem.rundir.layout import RunDir
from tandem.rundir.store import is_url
from tandem_cli.bucket import view
from tandem_cli.cluster import validate_job_name
from tandem_cli.kubernetes.kubectl import Kubectl
from tandem_cli.kubernetes.platform import OnKubernetes
from tandem_cli.local.known import MAX_SUGGESTIONS, find_runs, job_name, list_runs, other_runs
from tandem_cli.local.platform import InBucket, OnThisMachine
from tandem_cli.local.run_output import log_names
from tandem_cli.platforms import Run
from tandem_cli.report.folder import NoRun, expect_run
from tandem_cli.slurm.platform import OnSlurm
from tandem_launcher.bucket_access import parse_url
from tandem_launcher.slurm.jobs import submission_of


def completed(incomplete: str) -> list[str]:
    """Complete a word to runs: by name if it is unique, and by folder."""
    paths = list_runs()
    names = [name for path in paths if len(find_runs(name := job_name(path) or path.name)) == 1]
    return [word for word in [*names, *map(str, paths)] if word.startswith(incomplete)]


def completed_processes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a word to the logged processes of the local run in the argument before."""
    matches = find_runs(str(ctx.params.get("name") or ""))
    return [name for name in (log_names(matches[0]) if len(matches) == 1 else []) if name.startswith(incomplete)]


RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run of this machine: its folder, for instance runs/digits, or name; or the URL of one in a bucket.",
        show_default=False,
        autocompletion=completed,
    ),
]
TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A run of this machine, by its name or folder; the URL of one in a bucket; else a job on a cluster.",
        show_default=False,
        autocompletion=completed,
    ),
]


def open_run(run: Path) -> RunDir:
    """Return the run directory at a path or of a name; of a run in a bucket, a view without checkpoints.

    Raises:
        UserError: there is none; the message lists other runs.
    """
    if is_url(str(run)):
        return view(str(run))
    path = run if run.exists() or not (matches := find_runs(str(run))) else _only(str(run), matches)
    rundir = RunDir(path)
    try:
        expect_run(rundir)
    except NoRun as error:
        raise UserError(f"{error}{other_runs()}") from error
    return rundir


def open_own_run(run: Path, reason: str) -> RunDir:
    """Return the run directory at a path or of a name, for a command that a view of a bucket is no use to.

    Args:
        reason: why, as the end of a sentence about the bucket.

    Raises:
        UserError: it is a URL, or there is no run.
    """
    if is_url(str(run)):
        raise UserError(f"{parse_url(str(run))} is a run in a bucket, {reason}")
    return open_run(run)


def open_or_copy(run: Path, namespace: str, context: str) -> RunDir:
    """Return the run directory at a path or of a name; with a cluster, copy that of its job to `runs/` first.

    The copy has no checkpoints.

    Raises:
        UserError: there is none, or it cannot be copied.
    """
    if not (namespace or context):
        return open_run(run)
    return OnKubernetes(validate_job_name(str(run)), Kubectl(namespace, context), by_name=True).run_dir()


def find_run(word: str, namespace: str = "", context: str = "") -> Run:
    """Return the run or job that the word refers to.

    Raises:
        UserError: it is a folder without a run, or the name of several runs; or it is no run, and kubectl is not
            installed to look for a job.
    """
    if namespace or context:
        return OnKubernetes(validate_job_name(word), Kubectl(namespace, context), by_name=True)
    if (own := find_own_run(word)) is not None:
        return own
    if shutil.which("kubectl") is None:
        raise UserError(
            f"no run of this machine is called {word}, and kubectl was not found to ask a cluster for a job"
            f"{other_runs()}"
        )
    return OnKubernetes(validate_job_name(word), Kubectl(), by_name=False)


def find_own_run(word: str) -> OnThisMachine | None:
    """Return the run of this machine, or in a bucket, that the word refers to; None if there is none of this name.

    Raises:
        UserError: it is a folder without a run, or the name of several runs.
    """
    # A folder of this name without a run, such as `digits`, must not hide a job.
    if is_url(word):
        return InBucket(view(word).path, word)
    if "/" in word or (Path(word) / "job.json").is_file():
        return in_folder(open_run(Path(word)).path)
    if runs := find_runs(word):
        return in_folder(_only(word, runs))
    return None


def in_folder(path: Path) -> OnThisMachine:
    """Return the run in an existing run directory."""
    return OnThisMachine(path) if submission_of(path) is None else OnSlurm(path)


def _only(name: str, matches: list[Path]) -> Path:
    if len(matches) > 1:
        folders = ", ".join(shlex.quote(str(path)) for path in matches[:MAX_SUGGESTIONS])
        raise UserError(f"{name} is the name of several runs: {folders}. Give the folder of one")
    return matches[0]
