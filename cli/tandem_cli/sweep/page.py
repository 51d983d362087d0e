"""The page of a sweep: its best trial, its pictures, the importance of each field, and all trials as a table."""

from collections.abc import Mapping, Sequence
from html import escape

from tandem.formatting import count_noun, metric_name, printable, score, share
from tandem.job.resource import Evaluators
from tandem.processes.distribution import version
from tandem_cli.report.page import DrawnPicture, document, figure
from tandem_cli.sweep import figures
from tandem_cli.sweep.definition import Definition, SweepFolder, describe, short_path
from tandem_cli.sweep.study import Trial, best_of, importances, read_trials
from tandem_cli.sweep.table import ranked, trial_cells
from tandem_coordinator.charts.chart import NARROW, WIDE

MAX_ROWS = 200
"""Trials in the table: the best ones."""
VIEWS = {"wide": WIDE, "narrow": NARROW}
LONG = 30
"""Length above which a text may be wrapped, in characters."""


def sweep_page(definition: Definition, folder: SweepFolder) -> str:
    """Read a sweep, and build its page.

    Raises:
        UserError: its journal cannot be read.
    """
    evaluation = definition.evaluation
    trials = read_trials(definition, folder)
    parts = importances(definition, folder) if trials else {}
    return page(definition, trials, evaluation.metric, evaluation.direction, parts, folder.is_running, str(folder.path))


def page(
    definition: Definition,
    trials: Sequence[Trial],
    metric: str,
    goal: str,
    parts: Mapping[str, float],
    is_running: bool,
    source: str,
) -> str:
    """Build the whole page.

    Args:
        parts: share of each field in the differences of scores.
        is_running: whether a driver is at work.
        source: the sweep's folder, as the user named it.
    """
    name = printable(definition.name)
    body = [
        f'<header><div class="title"><h1>{escape(name)}</h1></div>'
        f'<p class="lead">{escape(_lead(trials, metric, goal))}</p></header>',
        "<main>",
        *_pictures(definition, trials, metric, goal),
        _importances(parts),
        _table(trials, metric, goal, is_running),
        "</main>",
        f"<footer><p>Made by tandem compare {escape(version())} from {escape(printable(source))}.</p></footer>",
    ]
    return document(name, body)


def trials_html(name: str, trials: Sequence[Trial], evaluation: Evaluators, is_running: bool) -> str:
    """Build a part of a page for notebooks: the best trial in a sentence, and all trials as a table."""
    metric, goal = evaluation.metric, evaluation.direction
    return (
        f"<div><b>{escape(printable(name))}</b><p>{escape(_lead(trials, metric, goal))}</p>"
        f"{_rows(trials, metric, goal, is_running)}</div>"
    )


def _lead(trials: Sequence[Trial], metric: str, goal: str) -> str:
    counts = {
        state: sum(trial.state == state for trial in trials) for state in ("Complete", "Pruned", "Running", "Failed")
    }
    parts = ", ".join(f"{count:,} {state.lower()}" for state, count in counts.items() if count)
    sentence = f"{count_noun(len(trials), 'trial')}: {parts}." if parts else "No trial has begun."
    best = best_of(trials, goal)
    if best is None or best.score is None:
        return sentence
    return (
        f"{sentence} The best {metric_name(printable(metric))} is {score(metric, best.score)}, of trial {best.number} "
        f"({printable(describe(best.values))})."
    )


def _pictures(definition: Definition, trials: Sequence[Trial], metric: str, goal: str) -> list[str]:
    space = definition.spec.space
    history, curves = figures.history(trials, metric, goal), figures.curves(trials, metric, goal)
    values, order, steps = "Values and scores", "Scores in the order of the trials", "Scores over steps"
    pictures = [
        (
            values,
            "Each line is a trial, from its values to its score; the best one is bold.",
            [
                figures.parallel(f"parallel-{name}", values, "", trials, space, metric, goal, view)
                for name, view in VIEWS.items()
            ],
        ),
        (order, "", [figures.draw(f"history-{name}", order, "", history, view) for name, view in VIEWS.items()]),
        (
            steps,
            "The pruner stops trials whose scores are worse than those of others at the same step.",
            [figures.draw(f"curves-{name}", steps, "", curves, view) for name, view in VIEWS.items()],
        ),
    ]
    return [
        figure(DrawnPicture(title, finding, wide, narrow))
        for title, finding, (wide, narrow) in pictures
        if wide is not None and narrow is not None
    ]


def _importances(parts: Mapping[str, float]) -> str:
    if not parts:
        return ""
    rows = "".join(f"<tr><td>{escape(printable(path))}</td><td>{share(part)}</td></tr>" for path, part in parts.items())
    return (
        '<section><h2>Importance</h2><p class="finding">Share of each field in the difference between good and bad '
        "complete trials (PED-ANOVA).</p>"
        f'<div class="scroll"><table><tbody>{rows}</tbody></table></div></section>'
    )


def _rows(trials: Sequence[Trial], metric: str, goal: str, is_running: bool) -> str:
    """The trials as a table, the best ones first."""
    best = best_of(trials, goal)
    paths = list(dict.fromkeys(path for trial in trials for path in trial.values))
    names = [short_path(path, paths) for path in paths]
    heads = "".join(
        f"<th>{escape(printable(name))}</th>"
        for name in ("Trial", *names, metric_name(metric).capitalize(), "Step", "Last step", "State", "Time", "")
    )
    rows = ""
    for trial in ranked(trials, goal)[:MAX_ROWS]:
        cells = trial_cells(trial, paths, metric, is_running)
        kind = ' class="best"' if best is not None and trial.number == best.number else ""
        rows += f"<tr{kind}>" + "".join(f"<td{_wraps(cell)}>{escape(printable(cell))}</td>" for cell in cells) + "</tr>"
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _table(trials: Sequence[Trial], metric: str, goal: str, is_running: bool) -> str:
    if not trials:
        return ""
    omitted = len(trials) - MAX_ROWS
    note = f'<p class="finding">The {MAX_ROWS} best; {omitted:,} more are left out.</p>' if omitted > 0 else ""
    return (
        f'<section><h2>Trials</h2>{note}<div class="scroll">{_rows(trials, metric, goal, is_running)}</div></section>'
    )


def _wraps(value: str) -> str:
    return ' class="long"' if len(value) > LONG else ""
