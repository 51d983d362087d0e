"""`tandem export RUN`: the numbers of a run for other tools, as CSV files or for TensorBoard."""

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np  # noqa: F401 - where it is missing, the error names the extra that brings it
import typer

from tandem.errors import UserError
from tandem_cli.cluster import ContextOption, NamespaceOption
from tandem_cli.output import echo
from tandem_cli.report.reading import read
from tandem_cli.report.run_export import write_csv, write_tensorboard
from tandem_cli.runs import RunArgument, open_or_copy


class TableFormat(StrEnum):
    """Format of an export."""

    CSV = "csv"
    TENSORBOARD = "tensorboard"


def export(
    run: RunArgument,
    format_: Annotated[
        TableFormat, typer.Option("--format", help="CSV files, or a log that `tensorboard --logdir` reads.")
    ] = TableFormat.CSV,
    target: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="FOLDER",
            help="Folder to write to; for TensorBoard a new or empty one.",
            show_default="csv or tensorboard in the run directory",
        ),
    ] = None,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Write the numbers of a run: losses, learning rate, throughput, scores of checkpoints, CPU use.

    The run may be running, complete or killed. With `--namespace` or `--context`, the command first
    copies the results of that job to runs/NAME, without checkpoints, as `tandem copy` does.
    """
    rundir = open_or_copy(run, namespace, context)
    content = read(rundir.path)
    try:
        if format_ == TableFormat.CSV:
            written = write_csv(content, target or rundir.path / TableFormat.CSV)
            echo("\n".join(str(path) for path in written))
            return
        folder = _emptied(rundir.path / TableFormat.TENSORBOARD) if target is None else _empty(target)
        count = write_tensorboard(content, folder)
    except OSError as error:
        raise UserError(f"the numbers cannot be written to {error.filename}: {error.strerror}") from error
    echo(f"{count:,} values in {folder}\nnext      tensorboard --logdir {folder}")


def _emptied(folder: Path) -> Path:
    """Delete an earlier export, which TensorBoard would show too."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _empty(folder: Path) -> Path:
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty, and TensorBoard would show its content too; choose a new folder")
    return folder
