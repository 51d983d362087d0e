"""Training loss and evaluation score, over steps and over time, as charts that the live page has too."""

from collections.abc import Sequence

import numpy as np

from tandem.charts.chart import Band, Chart, Point
from tandem.charts.stories import Losses, training
from tandem.measures import outages
from tandem_cli.report.clock import Clock, envelope, smooth, thin
from tandem_cli.report.figures.canvas import steps_of, time_of
from tandem_cli.report.run import Floats, Run, RunCheckpoint, Steps

SMOOTH_SHARE = 0.02
"""Width of the running mean, of the whole run."""
COLUMNS = 300
"""Stretches that a series is shown in."""


def charts(run: Run, clock: Clock) -> tuple[Chart, ...]:
    """Over steps, and over time. None without steps and scores."""
    scored = [c for c in run.checkpoints if c.evaluation and run.metric in c.evaluation.metrics]
    if not len(run.counted) and not scored:
        return ()
    shaded = [Band(begin=clock.at(one.begin), end=clock.at(one.end)) for one in outages(run.generations)]
    return (
        training(_losses(run, scored, clock, "steps"), steps_of(run)),
        training(_losses(run, scored, clock, "time"), time_of(clock), shaded),
    )


def _losses(run: Run, scored: Sequence[RunCheckpoint], clock: Clock, over: str) -> Losses:
    each, mean, width, broken = _counted(run, clock, over)
    best = run.best.evaluation if run.best else None
    return Losses(
        each=each,
        mean=mean,
        mean_of=f"mean of {width:,} steps",
        redone=[
            points(*envelope(_x(lost, clock, over), lost.loss, COLUMNS // 4)) for lost in run.superseded if len(lost)
        ],
        tested=_scores([c for c in scored if c.counts], "loss", clock, over),
        scored=_scores([c for c in scored if c.counts], run.metric, clock, over),
        off=_scores([c for c in scored if not c.counts], run.metric, clock, over),
        best=_scores([run.best], run.metric, clock, over)[0] if best and run.best else None,
        best_at=f"at step {run.best.step:,}" if run.best else "",
        metric=run.metric,
        not_finite=broken,
    )


def _counted(run: Run, clock: Clock, over: str) -> tuple[list[Point], list[Point], int, list[float]]:
    """Each step's loss, its running mean, the width of that, and where it is not finite."""
    steps = run.counted
    width = max(5, int(len(steps) * SMOOTH_SHARE))
    if not len(steps):
        return [], [], width, []
    x = np.maximum.accumulate(_x(steps, clock, over))
    raw = np.where(np.isfinite(steps.loss), steps.loss, np.nan)
    broken = x[~np.isfinite(steps.loss)]
    shown = np.unique(np.round(broken / max(float(x[-1]), 1e-9) * COLUMNS)) * max(float(x[-1]), 1e-9) / COLUMNS
    if len(steps) == 1:
        return points(x, raw), [], width, shown.tolist()
    mean = smooth(raw, width)
    gaps = np.array(_breaks(run) if over == "time" else [], np.int64)
    raw, mean, x = np.insert(raw, gaps, np.nan), np.insert(mean, gaps, np.nan), np.insert(x, gaps, x[gaps])
    return points(*envelope(x, raw, COLUMNS)), points(*thin(x, mean, COLUMNS)), width, shown.tolist()


def _breaks(run: Run) -> list[int]:
    """Where in the counted steps the group was not there: the line must not lead across."""
    times = run.counted.time
    stops = [outage.end for outage in outages(run.generations)]
    return [index for index in np.searchsorted(times, stops).tolist() if 0 < index < len(times)]


def points(x: Floats, y: Floats) -> list[Point]:
    """Two arrays as points; what is not finite breaks the line."""
    return [(place, value if np.isfinite(value) else None) for place, value in zip(x.tolist(), y.tolist(), strict=True)]


def _scores(checkpoints: Sequence[RunCheckpoint], metric: str, clock: Clock, over: str) -> list[Point]:
    values = [c.evaluation.metrics.get(metric, np.nan) if c.evaluation else np.nan for c in checkpoints]
    found = points(_positions(checkpoints, clock, over), np.array(values, np.float64))
    return sorted((x, y) for x, y in found if y is not None and np.isfinite(x))


def _positions(checkpoints: Sequence[RunCheckpoint], clock: Clock, over: str) -> Floats:
    """The step, or the time at which the score was known."""
    if over == "steps":
        return np.array([c.step for c in checkpoints], np.float64)
    known = [
        c.evaluation.finished_at if c.evaluation and c.evaluation.finished_at is not None else c.at for c in checkpoints
    ]
    return clock.axis(np.array([np.nan if moment is None else moment for moment in known], np.float64))


def _x(steps: Steps, clock: Clock, over: str) -> Floats:
    return steps.step.astype(np.float64) if over == "steps" else clock.axis(steps.time)
