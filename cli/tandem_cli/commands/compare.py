"""`tandem compare RUN RUN…`: several runs side by side."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import resvg_py  # noqa: F401 - before numpy: where it is missing, the error names the extra
import typer
from pydantic.alias_generators import to_camel
from rich.table import Table
from rich.text import Text

from tandem.errors import UserError
from tandem.formatting import end_of
from tandem_cli.output import Output, OutputOption, echo, emit
from tandem_cli.report.comparison import Outcome, Row, differences, outcome, rows, winner
from tandem_cli.report.comparison_page import ComparisonPage, write
from tandem_cli.report.figures.compared import MAX_COUNT
from tandem_cli.report.reading import read
from tandem_cli.runs import completed, opened
from tandem_cli.terminal.canvas import PrintableConsole

UNBOUNDED = 100_000
"""Characters of a line that no terminal cuts."""
MIN, NARROW = 16, 10
"""Characters of a path in a manifest and of a run's column, at least."""


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN RUN…",
            help="Runs of this machine: their folders, or names.",
            show_default=False,
            autocompletion=completed,
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write the table and the curves as an HTML page.", show_default=False
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FILE", help="Write the curves as a PNG file.", show_default=False),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Put runs side by side: in what their jobs differ, how far they came, their best scores, time and throughput.

    Works on runs that are going on, too, and on those that were killed.
    """
    if not 2 <= len(runs) <= MAX_COUNT:
        raise UserError(f"2 to {MAX_COUNT} runs can be compared, not {len(runs)}; `tandem ls` lists the runs")
    paths = [opened(run).path for run in runs]
    found = [read(path) for path in paths]
    outcomes = [outcome(run, str(path)) for run, path in zip(found, paths, strict=True)]
    if html is not None or png is not None:
        page = ComparisonPage(found, outcomes, rows(found, outcomes), _titles(outcomes))
        if png is not None:
            write(page.png(), png)
        if html is not None:
            write(page.html(), html)
    if output.is_data:
        emit({"runs": [_record(one) for one in outcomes], "differences": differences(found)}, output)
        return
    console = PrintableConsole(highlight=False)
    width = console.width if console.is_terminal and output is not Output.WIDE else None
    if width is None:
        console.width = UNBOUNDED
    console.print(_table(outcomes, rows(found, outcomes), winner(found, outcomes), width))
    for what, file in (("page", html), ("picture", png)):
        if file is not None:
            echo(f"{what:<9} {file}")


def _table(outcomes: list[Outcome], lines: list[Row], best: int | None, width: int | None) -> Table:
    titles = _titles(outcomes)
    labels = [label for label, _ in lines]
    if width is not None:
        labels = [end_of(label, max(MIN, width - len(outcomes) * (NARROW + 2))) for label in labels]
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0), width=None)
    table.add_column("", style="dim", no_wrap=True)
    for index, title in enumerate(titles):
        text = Text(title if width is None else end_of(title, max(NARROW, width // (len(titles) + 1))))
        table.add_column(text, style="bold" if index == best else "", overflow="fold", no_wrap=width is None)
    for label, (_, values) in zip(labels, lines, strict=True):
        table.add_row(Text(label), *(Text(value) for value in values))
    return table


def _titles(outcomes: list[Outcome]) -> list[str]:
    """What to call each run: its job's name, or its folder where several have that name."""
    names = [one.name for one in outcomes]
    return [one.name if names.count(one.name) == 1 else one.path for one in outcomes]


def _record(one: Outcome) -> dict[str, object]:
    ledger = None if one.ledger is None else one.ledger.dump()
    return {to_camel(name): value for name, value in asdict(one).items()} | {"ledger": ledger}
