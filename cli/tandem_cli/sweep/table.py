"""The trials of a sweep as a table, and as records for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic.alias_generators import to_camel
from rich.table import Table
from rich.text import Text

from tandem.formatting import duration, metric_name, number, score
from tandem_cli.sweep.definition import short_path
from tandem_cli.sweep.study import Trial, ascending, best_of

NOT_SET = "–"


def trial_table(trials: Sequence[Trial], metric: str, goal: str, is_running: bool) -> Table:
    """Tabulate trials, the best one first, then by score.

    Args:
        metric: metric of the scores.
        is_running: whether a driver is at work; otherwise unfinished trials have stopped.
    """
    best = best_of(trials, goal)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    paths = list(dict.fromkeys(path for trial in trials for path in trial.values))
    for name in ("trial", *(short_path(path, paths) for path in paths)):
        table.add_column(name, overflow="fold")
    for name in (metric_name(metric), "step", "last step", "state", "time"):
        table.add_column(name, no_wrap=True, justify="left" if name == "state" else "right")
    table.add_column("", overflow="fold")
    for trial in ranked(trials, goal):
        cells = trial_cells(trial, paths, metric, is_running)
        is_best = best is not None and trial.number == best.number
        table.add_row(*(Text(cell, "bold" if is_best else "") for cell in cells))
    return table


def trial_cells(trial: Trial, paths: Sequence[str], metric: str, is_running: bool) -> list[str]:
    """The row of a trial: number, values, score, its step, last step, state, time and reason.

    Args:
        paths: fields in the order of the columns.
    """
    return [
        str(trial.number),
        *(value_text(trial.values.get(path)) for path in paths),
        NOT_SET if trial.score is None else score(metric, trial.score),
        NOT_SET if trial.step is None else f"{trial.step:,}",
        NOT_SET if trial.last_step is None else f"{trial.last_step:,}",
        state_text(trial, is_running),
        NOT_SET if trial.seconds is None else duration(trial.seconds),
        trial.reason,
    ]


def ranked(trials: Sequence[Trial], goal: str) -> list[Trial]:
    """Sort trials: complete ones by score, then pruned ones, then the others."""
    order = {"Complete": 0, "Running": 1, "Pruned": 2, "Waiting": 3, "Failed": 4}

    def key(trial: Trial) -> tuple[int, bool, float, int]:
        return order[trial.state], trial.score is None, ascending(trial.score or 0.0, goal), trial.number

    return sorted(trials, key=key)


def state_text(trial: Trial, is_running: bool) -> str:
    """The state of a trial; one without a driver has stopped."""
    if trial.is_paused:
        return "Paused"
    return "Stopped" if trial.state == "Running" and not is_running else trial.state


def value_text(value: Any) -> str:
    """Write a value of the space."""
    if value is None:
        return NOT_SET
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def trial_record(trial: Trial, run: str, is_running: bool) -> dict[str, Any]:
    """A trial for programs.

    Args:
        run: its run directory, or the name of its job.
    """
    record = {to_camel(name): value for name, value in asdict(trial).items()}
    return record | {"state": state_text(trial, is_running), "run": run, "values": dict(trial.values)}
