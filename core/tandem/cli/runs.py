"""The run directory that a command is given, and what may have been meant where there is none."""

from pathlib import Path
from typing import Annotated

import typer

from tandem.mistake import UserError
from tandem.report.folder import NoRun, expect_run
from tandem.rundir import RunDir

RUNS = Path("runs")
"""Where `tandem run` keeps runs unless told otherwise."""

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run directory, for instance runs/digits.", show_default=False)
]


def opened(run: Path) -> RunDir:
    """The run directory at a path.

    Raises:
        UserError: there is none; names those that may have been meant.
    """
    rundir = RunDir(run)
    try:
        expect_run(rundir)
    except NoRun as error:
        raise UserError(f"{error}{other_runs(run)}") from error
    return rundir


def other_runs(run: Path) -> str:
    """Runs that may have been meant, as the end of a sentence."""
    if (RUNS / run / "job.json").is_file():
        return f". Did you mean {RUNS / run}?"
    try:
        known = sorted(str(folder) for folder in RUNS.iterdir() if (folder / "job.json").is_file())
    except OSError:
        known = []
    return f". Runs here: {', '.join(known[:8])}" if known else ". Give the run directory that `tandem run` named"
