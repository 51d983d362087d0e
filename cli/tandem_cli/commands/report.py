"""`tandem report RUN`: one self-contained HTML page about a run, and its pictures as PNG."""

import webbrowser
from pathlib import Path
from typing import Annotated

import resvg_py  # noqa: F401 - before numpy: where it is missing, the error names the extra
import typer

from tandem.errors import UserError
from tandem.formatting import one_line
from tandem_cli.cluster import ContextOption, NamespaceOption
from tandem_cli.output import echo
from tandem_cli.report.run import with_histograms
from tandem_cli.report.writing import Report, write
from tandem_cli.runs import RunArgument, open_or_copy
from tandem_coordinator.charts import bars


def report(
    run: RunArgument,
    target: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="PATH",
            help="Folder or .html file to write to.",
            show_default="report.html in the run directory",
        ),
    ] = None,
    png: Annotated[
        bool, typer.Option("--png/--no-png", help="Write the pictures as PNG too, into a folder beside the page.")
    ] = True,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Write an HTML report about a run, which opens offline, with its pictures as PNG files beside it.

    The run may be running, complete or killed. With `--namespace` or `--context`, the command first copies the results
    of that job to runs/NAME, without checkpoints, as `tandem copy` does.
    """
    rundir = open_or_copy(run, namespace, context)
    try:
        written = write(rundir.path, target, png)
    except OSError as error:
        raise UserError(f"the report cannot be written to {error.filename}: {error.strerror}") from error
    echo(_describe(written))
    if open_it and not webbrowser.open(written.page.resolve().as_uri()):
        echo(f"there is no browser here; copy {written.page} to a machine that has one", err=True)


def _describe(written: Report) -> str:
    lines = [f"report    {written.page}"]
    if written.pictures:
        names = ", ".join(path.name for path in written.pictures)
        lines.append(f"pictures  {written.pictures[0].parent}/ ({names})")
    checkpoint = with_histograms(written.run)
    if checkpoint is not None and checkpoint.evaluation is not None:
        for name, histogram in checkpoint.evaluation.histograms.items():
            text = f"{name} at step {checkpoint.step:,}: {bars.sparkline(histogram)} {bars.describe(histogram)}"
            lines.append(f"histogram {one_line(text)}")
    lines += [f"note      {one_line(fault)}" for fault in written.run.faults[:10]]
    if len(written.run.faults) > 10:
        lines.append(f"note      {len(written.run.faults) - 10} more are on the page")
    return "\n".join(lines)
