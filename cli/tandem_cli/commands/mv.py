"""`tandem mv RUN NEW`: moves or renames a run of this machine."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tandem_cli.local.known import move
from tandem_cli.output import echo
from tandem_cli.runs import RunArgument, open_own_run


def mv(
    run: RunArgument,
    new: Annotated[
        str,
        typer.Argument(metavar="NEW", help="A name, in the same folder; or a path with a slash.", show_default=False),
    ],
) -> None:
    """Move or rename a run directory. All commands then find the run under its new name.

    The name of the job does not change. To resume the run, give `tandem run` its new path with --run-dir.
    """
    path = open_own_run(run, "and only runs of this machine can be moved").path
    target = Path(new) if "/" in new else path.parent / new
    move(path, target)
    echo(f"{path} is now {target}; to resume it: tandem run FILE --run-dir {shlex.quote(str(target))}")
