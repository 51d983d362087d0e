"""`tandem rm RUN…`: deletes runs of this machine."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.formatting import several, size
from tandem_cli.local.known import delete
from tandem_cli.output import each_checked, echo
from tandem_cli.runs import completed, opened


def rm(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN…",
            help="Runs of this machine: folders, for instance runs/digits, or names.",
            show_default=False,
            autocompletion=completed,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """Delete run directories: checkpoints, evaluations, logs, and the files that a script wrote there.

    Asks first. A run that is going on is not deleted: stop it before.
    """
    paths = [rundir.path for rundir in each_checked(opened, runs)]
    total = size(sum(_bytes(path) for path in paths))
    what = str(paths[0]) if len(paths) == 1 else several(len(paths), "run")
    if not yes:
        if not sys.stdin.isatty():
            echo(f"nothing was deleted; --yes deletes {what}, {total}")
            return
        typer.confirm(f"Delete {what}, {total}?", abort=True)
    each_checked(delete, paths)
    echo(f"deleted {what}, {total}")


def _bytes(path: Path) -> int:
    """Size of all files in bytes; a file counts once for each of its links."""
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_symlink() or file.is_file())
