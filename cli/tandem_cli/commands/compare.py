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
from tandem.formatting import metric_name, truncate_start
from tandem_cli.main import needing
from tandem_cli.output import Output, OutputOption, echo, emit
from tandem_cli.report.comparison import (
    ComparisonRow,
    Outcome,
    best_label,
    certainty,
    differences,
    outcome,
    rows,
    warning,
    winner,
)
from tandem_cli.report.comparison_page import ComparisonPage, write
from tandem_cli.report.figures.compared import MAX_RUNS
from tandem_cli.report.reading import read
from tandem_cli.runs import completed, open_run
from tandem_cli.sweep.definition import SweepFolder, find_sweep
from tandem_launcher.terminal.canvas import PrintableConsole

UNBOUNDED = 100_000
"""Width that no line exceeds, in characters."""
MIN_PATH_WIDTH, MIN_RUN_WIDTH = 16, 10
"""Minimum widths of the paths in a manifest and of a run's column, in characters."""


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN RUN…",
            help="Runs of this machine: their folders, or names; or URLs of runs in buckets. Or a single sweep.",
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
    """Compare runs side by side: differences of their jobs, progress, best scores, time and throughput.

    The runs may be running, complete or killed. Of a sweep, all its trials are compared.
    """
    if len(runs) == 1 and (swept := find_sweep(str(runs[0]))) is not None:
        _compare_trials(swept, html, png, output)
        return
    if not 2 <= len(runs) <= MAX_RUNS:
        raise UserError(f"2 to {MAX_RUNS} runs can be compared, not {len(runs)}; `tandem ls` lists the runs")
    paths = [open_run(run).path for run in runs]
    contents = [read(path) for path in paths]
    outcomes = [outcome(run, str(path)) for run, path in zip(contents, paths, strict=True)]
    if html is not None or png is not None:
        page = ComparisonPage(contents, outcomes, rows(contents, outcomes), _titles(outcomes))
        if png is not None:
            write(page.png(), png)
        if html is not None:
            write(page.html(), html)
    if output.is_data:
        records = [_record(result) for result in outcomes]
        emit({"runs": records, "differences": differences(contents), "warning": warning(contents)}, output)
        return
    console = PrintableConsole(highlight=False)
    width = console.width if console.is_terminal and output is not Output.WIDE else None
    if width is None:
        console.width = UNBOUNDED
    best = winner(contents, outcomes)
    console.print(_table(outcomes, rows(contents, outcomes), best, width))
    if text := warning(contents):
        echo(text)
    if best is not None and (clause := certainty(outcomes, best)):
        echo(f"the best {metric_name(outcomes[best].metric)}, of {_titles(outcomes)[best]}, {clause}")
    for label, file in (("page", html), ("picture", png)):
        if file is not None:
            echo(f"{label:<9} {file}")


def _compare_trials(folder: SweepFolder, html: Path | None, png: Path | None, output: Output) -> None:
    """Show the trials of a sweep."""
    if png is not None:
        raise UserError("--png is for runs; a sweep has a page: --html FILE")
    with needing("sweep"):
        from tandem_cli.sweep.study import importances, read_trials
        from tandem_cli.sweep.table import trial_record, trial_table
    definition = folder.definition()
    evaluation = definition.evaluation
    trials, is_running = read_trials(definition, folder), folder.is_running
    if html is not None:
        from tandem_cli.sweep.page import sweep_page

        write(sweep_page(definition, folder), html)
    if output.is_data:
        is_elsewhere = bool(definition.destination.kubernetes or definition.destination.context)
        records = [
            trial_record(trial, trial.run if is_elsewhere else str(folder.run_dir(trial.run)), is_running)
            for trial in trials
        ]
        parts = importances(definition, folder) if trials else {}
        emit({"sweep": definition.name, "metric": evaluation.metric, "trials": records, "importance": parts}, output)
        return
    console = PrintableConsole(highlight=False)
    if not console.is_terminal or output is Output.WIDE:
        console.width = UNBOUNDED
    console.print(trial_table(trials, evaluation.metric, evaluation.direction, is_running))
    if html is not None:
        echo(f"{'page':<9} {html}")


def _table(outcomes: list[Outcome], lines: list[ComparisonRow], best: int | None, width: int | None) -> Table:
    titles = _titles(outcomes)
    labels = [label for label, _ in lines]
    if width is not None:
        labels = [
            truncate_start(label, max(MIN_PATH_WIDTH, width - len(outcomes) * (MIN_RUN_WIDTH + 2))) for label in labels
        ]
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0), width=None)
    table.add_column("", style="dim", no_wrap=True)
    for index, title in enumerate(titles):
        text = Text(title if width is None else truncate_start(title, max(MIN_RUN_WIDTH, width // (len(titles) + 1))))
        text.stylize("bold" if index == best else "")
        table.add_column(text, overflow="fold", no_wrap=width is None)
    for label, (name, values) in zip(labels, lines, strict=True):
        # A bold duration or loss would read as the better one.
        is_score = best is not None and name == best_label(outcomes[best].metric)
        cells = [Text(value, "bold" if is_score and index == best else "") for index, value in enumerate(values)]
        table.add_row(Text(label), *cells)
    return table


def _titles(outcomes: list[Outcome]) -> list[str]:
    """Return the title of each run: its job's name, or its folder if several have this name."""
    names = [run.name for run in outcomes]
    return [run.name if names.count(run.name) == 1 else run.path for run in outcomes]


def _record(outcome: Outcome) -> dict[str, object]:
    ledger = None if outcome.ledger is None else outcome.ledger.dump()
    return {to_camel(name): value for name, value in asdict(outcome).items()} | {"ledger": ledger}
