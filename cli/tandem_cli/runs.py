"""Finds the run that a command names, by folder or name, and suggests similar names if there is none.

Commands that are for runs of this machine and for jobs of a cluster decide so:

    --namespace or --context is given   a job on that cluster
    a folder, or a word with a slash    the run in that folder
    the name of a run of this machine   that run: in `runs/` here, or wherever `tandem run` has begun it
    any other name                      a job on the cluster that kubectl is set up for
"""

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import UserError
from tandem.rundir.layout import RunDir
from tandem_cli.cluster import named as job_named
from tandem_cli.kubernetes.kubectl import Kubectl
from tandem_cli.kubernetes.platform import OnKubernetes
from tandem_cli.local.known import MAX_NAMED, job_name, known, named, other_runs
from tandem_cli.local.platform import OnThisMachine
from tandem_cli.local.run_output import log_names
from tandem_cli.platforms import Run
from tandem_cli.report.folder import NoRun, expect_run
from tandem_cli.slurm.jobs import of as submitted
from tandem_cli.slurm.platform import OnSlurm


def completed(incomplete: str) -> list[str]:
    """Runs that a shell may complete a word to: by name where it is one run's, and by folder."""
    found = known()
    names = [name for path in found if len(named(name := job_name(path) or path.name)) == 1]
    return [word for word in [*names, *map(str, found)] if word.startswith(incomplete)]


def completed_processes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Processes of the run of this machine that is named before: those that have a log."""
    found = named(str(ctx.params.get("name") or ""))
    return [name for name in (log_names(found[0]) if len(found) == 1 else []) if name.startswith(incomplete)]


RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run of this machine: its folder, for instance runs/digits, or name.",
        show_default=False,
        autocompletion=completed,
    ),
]
TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A run of this machine, by its name or folder; else a job on a cluster.",
        show_default=False,
        autocompletion=completed,
    ),
]


def opened(run: Path) -> RunDir:
    """The run directory at a path, or of a name.

    Raises:
        UserError: there is none; names those that may have been meant.
    """
    path = run if run.exists() or not (found := named(str(run))) else _only(str(run), found)
    rundir = RunDir(path)
    try:
        expect_run(rundir)
    except NoRun as error:
        raise UserError(f"{error}{other_runs()}") from error
    return rundir


def opened_or_copied(run: Path, namespace: str, context: str) -> RunDir:
    """The run directory at a path or of a name; where a cluster is named, a new copy of that of its job, without
    checkpoints, in `runs/` here.

    Raises:
        UserError: there is none, or it cannot be copied.
    """
    if not (namespace or context):
        return opened(run)
    from tandem_cli.kubernetes.copying import copy  # what most calls do not need takes a tenth of a second

    name = job_named(str(run))
    folder = Path("runs", name)
    copy(Kubectl(namespace, context), name, folder, ["none"], "", lambda count, total: None)
    return RunDir(folder)


def found(word: str, namespace: str = "", context: str = "") -> Run:
    """The run or job that is meant.

    Raises:
        UserError: it is a folder without a run, or a name that several runs have; or no run has it, and there is no
            kubectl to ask for a job.
    """
    if namespace or context:
        return OnKubernetes(job_named(word), Kubectl(namespace, context), by_name=True)
    # A folder of that name that is no run, such as `digits`, does not hide a job.
    if "/" in word or (Path(word) / "job.json").is_file():
        return in_folder(opened(Path(word)).path)
    if runs := named(word):
        return in_folder(_only(word, runs))
    if shutil.which("kubectl") is None:
        raise UserError(
            f"no run of this machine is called {word}, and kubectl was not found to ask a cluster for a job"
            f"{other_runs()}"
        )
    return OnKubernetes(job_named(word), Kubectl(), by_name=False)


def in_folder(path: Path) -> Run:
    """The run in a run directory that is there."""
    return OnThisMachine(path) if submitted(path) is None else OnSlurm(path)


def _only(name: str, found: list[Path]) -> Path:
    if len(found) > 1:
        some = ", ".join(shlex.quote(str(path)) for path in found[:MAX_NAMED])
        raise UserError(f"{name} is the name of several runs: {some}. Give the folder of one")
    return found[0]
