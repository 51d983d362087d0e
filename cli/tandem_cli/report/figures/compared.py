"""The curves of several runs in one picture: training loss and the score that decides, over steps and over time."""

from collections.abc import Sequence

from tandem.formatting import SHARES, end_of, metric_name, printable
from tandem_cli.report import clock
from tandem_cli.report.clock import Clock
from tandem_cli.report.figures.curves import counted, scores
from tandem_cli.report.run import Run
from tandem_coordinator.charts.chart import Axis, Chart, Curve, Panel, Point, Role, Unit
from tandem_coordinator.charts.stories import MAX_DOTS

COLORS: tuple[Role, ...] = ("trainer", "evaluator", "gpu", "checkpoint", "alert", "other")
"""More cannot be told apart under the common kinds of colour blindness: from the seventh run on they are dashed."""
MAX_COUNT = 2 * len(COLORS)
"""Runs in one picture."""
MAX_LENGTH = 28
"""Characters of a run's name in the legend."""


def labels(names: Sequence[str]) -> list[str]:
    """What the legend calls each run: short, and no two alike."""
    short = [end_of(printable(name), MAX_LENGTH) or "run" for name in names]
    return [name if short.count(name) == 1 else f"{name} #{index}" for index, name in enumerate(short, 1)]


def compared(runs: Sequence[Run], names: Sequence[str]) -> tuple[Chart, ...]:
    """Over steps, and over time; empty where no run has logged a step or a score.

    Args:
        runs: at most MAX_COUNT.
        names: what to call each, as `labels` makes them.
    """
    clocks = _clocks(runs)
    found = []
    for over in ("steps", "time"):
        losses = [_loss(run, own, over) for run, own in zip(runs, clocks, strict=True)]
        panels = []
        if any(losses):
            curves = _curves(losses, names, is_score=False)
            panels.append(Panel(title="Training loss", curves=curves, may_be_logarithmic=True))
        for metric in dict.fromkeys(run.metric for run in runs):
            scored = [
                scores([one for one in run.checkpoints if one.counts and one.evaluation], metric, own, over)
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
        found.append(Chart(axis=_steps(runs) if over == "steps" else _time(clocks), panels=tuple(panels)))
    return tuple(found)


def _loss(run: Run, own: Clock, over: str) -> list[Point]:
    """The running mean of the training loss; of a few steps, each."""
    each, mean, _, _ = counted(run, own, over)
    points = mean or each
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


def _clocks(runs: Sequence[Run]) -> list[Clock]:
    """The clock of each run from its own beginning, all in one unit."""
    own = [clock.of(run.marks) for run in runs]
    longest = max(one.seconds for one in own)
    return [one.seen_from(float(one.real[0]), longest) for one in own]


def _time(clocks: Sequence[Clock]) -> Axis:
    length = max(one.length for one in clocks)
    return Axis(low=0.0, high=length or 1.0, label=f"time since the beginning of each run ({clocks[0].unit})")


def _steps(runs: Sequence[Run]) -> Axis:
    last = max(max([*run.counted.step[-1:].tolist(), *(one.step for one in run.checkpoints), 1]) for run in runs)
    return Axis(low=0.0, high=float(last), label="step", whole=True)
