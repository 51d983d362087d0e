"""`tandem rm RUN…`: deletes runs of this machine."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tandem.formatting import count_noun, size
from tandem_cli.local.known import delete
from tandem_cli.output import check_all, echo
from tandem_cli.runs import completed, open_own_run

NOT_HERE = "and only runs of this machine are deleted; delete the prefix with a tool of your provider"


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

    Asks for confirmation. A running run is not deleted; stop it first.
    """
    paths = [rundir.path for rundir in check_all(partial(open_own_run, reason=NOT_HERE), runs)]
    total = size(sum(_bytes(path) for path in paths))
    description = str(paths[0]) if len(paths) == 1 else count_noun(len(paths), "run")
    if not yes:
        if not sys.stdin.isatty():
            echo(f"nothing was deleted; --yes deletes {description}, {total}")
            return
        typer.confirm(f"Delete {description}, {total}?", abort=True)
    check_all(delete, paths)
    echo(f"deleted {description}, {total}")


def _bytes(path: Path) -> int:
    """Size of all files in bytes; a file counts once for each of its links."""
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_symlink() or file.is_file())
