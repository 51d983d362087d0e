"""Finds the run that a command names, by folder or name, and suggests similar names if there is none.

Commands that are for runs of this machine and for jobs of a cluster decide so:

    --namespace or --context is given   a job on that cluster
    a folder, or a word with a slash    the run in that folder
    the name of a run of this machine   that run: in `runs/` here, or wherever `tandem run` has begun it
    any other name                      a job on the cluster that kubectl is set up for
"""

import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import UserError
from tandem.rundir.layout import RunDir
from tandem_cli.kubernetes.kubectl import ClusterError, NoCluster, NotFound
from tandem_cli.local.known import job_name, known, named
from tandem_cli.local.run_output import log_names
from tandem_cli.report.folder import NoRun, expect_run


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
MOST_NAMED = 8


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


def local(word: str, namespace: str = "", context: str = "") -> Path | None:
    """The run directory that is meant; None for a job on a cluster.

    Raises:
        UserError: it is a folder without a run, or a name that several runs have; or no run has it, and there is no
            kubectl to ask for a job.
    """
    if namespace or context:
        return None
    # A folder of that name that is no run, such as `digits`, does not hide a job.
    if "/" in word or (Path(word) / "job.json").is_file():
        return opened(Path(word)).path
    if found := named(word):
        return _only(word, found)
    if shutil.which("kubectl") is None:
        raise UserError(
            f"no run of this machine is called {word}, and kubectl was not found to ask a cluster for a job"
            f"{other_runs()}"
        )
    return None


@contextmanager
def asked(word: str, namespace: str, context: str) -> Iterator[None]:
    """A cluster that does not answer may not have been meant.

    Raises:
        ClusterError: it does not; says which runs there are, unless a cluster was asked for by name.
    """
    try:
        yield
    except NotFound:
        raise
    except NoCluster as error:
        if namespace or context:
            raise
        nobody = f"no run of this machine is called {word}, and kubectl knows no cluster to ask for a job"
        raise NoCluster(f"{nobody}{other_runs()}") from error
    except ClusterError as error:
        if namespace or context:
            raise
        raise ClusterError(f"{error}\nno run of this machine is called {word}{other_runs()}") from error


def other_runs() -> str:
    """Runs that may have been meant, as the end of a sentence."""
    some = [str(path) for path in known()[:MOST_NAMED]]
    return f". Runs here: {', '.join(some)}" if some else ". Give the run directory that `tandem run` named"


def _only(name: str, found: list[Path]) -> Path:
    if len(found) > 1:
        some = ", ".join(shlex.quote(str(path)) for path in found[:MOST_NAMED])
        raise UserError(f"{name} is the name of several runs: {some}. Give the folder of one")
    return found[0]
