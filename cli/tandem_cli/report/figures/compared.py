"""The curves of several runs in one picture: training loss and the score that ranks checkpoints, over steps and over
time."""

from collections.abc import Sequence

from tandem.formatting import SHARES, metric_name, printable, truncate_start
from tandem_cli.report import clock
from tandem_cli.report.clock import Clock
from tandem_cli.report.figures.curves import loss_series, scores
from tandem_cli.report.run import RunData
from tandem_coordinator.charts.chart import Axis, Chart, Curve, Panel, Point, Role, Unit
from tandem_coordinator.charts.stories import LOGARITHMIC_ABOVE, MAX_DOTS

COLORS: tuple[Role, ...] = ("trainer", "evaluator", "gpu", "checkpoint", "alert", "other")
"""Colours that can be distinguished under the common kinds of colour blindness: from the seventh run on, lines are
dashed."""
MAX_RUNS = 2 * len(COLORS)
"""Runs in one picture."""
MAX_LABEL_LENGTH = 28
"""Length of a run's name in the legend, in characters."""


def labels(names: Sequence[str]) -> list[str]:
    """Make labels for the legend: short, and each unique."""
    short = [truncate_start(printable(name), MAX_LABEL_LENGTH) or "run" for name in names]
    return [name if short.count(name) == 1 else f"{name} #{index}" for index, name in enumerate(short, 1)]


def compared(runs: Sequence[RunData], names: Sequence[str]) -> tuple[Chart, ...]:
    """Chart the runs over steps and over time; empty if no run has logged a step or a score.

    Args:
        runs: at most MAX_COUNT.
        names: labels, as `labels` makes them.
    """
    clocks = _clocks(runs)
    charts = []
    for axis in ("steps", "time"):
        losses = [_loss(run, own, axis) for run, own in zip(runs, clocks, strict=True)]
        panels = []
        if any(losses):
            curves = _curves(losses, names, is_score=False)
            panels.append(Panel(title="Training loss", curves=curves, logarithmic_above=LOGARITHMIC_ABOVE))
        for metric in dict.fromkeys(run.metric for run in runs):
            scored = [
                scores(
                    [checkpoint for checkpoint in run.checkpoints if checkpoint.counts and checkpoint.evaluation],
                    metric,
                    own,
                    axis,
                )
                if run.metric == metric
                else []
                for run, own in zip(runs, clocks, strict=True)
            ]
            if any(scored):
                unit: Unit = "share" if metric in SHARES else "number"
                curves = _curves(scored, names, is_score=True)
                panels.append(Panel(title=f"Test {metric_name(printable(metric))}", curves=curves, unit=unit))
        if not panels:
            return ()
        charts.append(Chart(axis=_steps(runs) if axis == "steps" else _time(clocks), panels=tuple(panels)))
    return tuple(charts)


def _loss(run: RunData, own: Clock, axis: str) -> list[Point]:
    """The running mean of the training loss; each loss if there are few steps."""
    raw, mean, _, _ = loss_series(run, own, axis)
    points = mean or raw
    return points if any(y is not None for _, y in points) else []


def _curves(points: Sequence[list[Point]], names: Sequence[str], is_score: bool) -> tuple[Curve, ...]:
    dotted = is_score and sum(map(len, points)) <= MAX_DOTS
    return tuple(
        Curve(
            points=own,
            color=COLORS[index % len(COLORS)],
            label=names[index],
            dashed=index >= len(COLORS),
            kind="dots" if dotted or len(own) == 1 else "line",
            width=1.5,
        )
        for index, own in enumerate(points)
        if own
    )


def _clocks(runs: Sequence[RunData]) -> list[Clock]:
    """Clock of each run from its own start, all in one unit."""
    own = [clock.make_clock(run.marks) for run in runs]
    longest = max(own_clock.seconds for own_clock in own)
    return [own_clock.seen_from(float(own_clock.real[0]), longest) for own_clock in own]


def _time(clocks: Sequence[Clock]) -> Axis:
    length = max(own_clock.length for own_clock in clocks)
    return Axis(low=0.0, high=length or 1.0, label=f"time since the beginning of each run ({clocks[0].unit})")


def _steps(runs: Sequence[RunData]) -> Axis:
    last = max(
        max([*run.model_steps.step[-1:].tolist(), *(checkpoint.step for checkpoint in run.checkpoints), 1])
        for run in runs
    )
    return Axis(low=0.0, high=float(last), label="step", whole=True)
