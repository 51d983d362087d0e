"""The curves of a report: loss and score, learning rate, ranks, throughput and world size. The live page has them,
too."""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from tandem.formatting import duration, reason
from tandem.wire.measures import outages
from tandem_cli.report.clock import Clock, envelope, smooth, thin
from tandem_cli.report.figures.axes import MAX_MARKED, steps_of, time_of
from tandem_cli.report.run import Floats, OfRank, RunCheckpoint, RunData, Steps
from tandem_coordinator.charts import stories
from tandem_coordinator.charts.chart import Band, Chart, Point
from tandem_coordinator.charts.stories import GRADIENT_NORM, LEARNING_RATE, Logged, Losses, Ranks, pace

SMOOTH_SHARE = 0.02
"""Width of the running mean, as a share of the run."""
COLUMNS = 300
"""Intervals that a series is reduced to."""
WIDE_COLUMNS = 420
"""Intervals that a series over the whole width is reduced to."""


def training(run: RunData, clock: Clock) -> tuple[Chart, ...]:
    """Chart loss and score over steps and over time. Empty without steps and scores."""
    scored = [c for c in run.checkpoints if c.evaluation and run.metric in c.evaluation.metrics]
    if not len(run.model_steps) and not scored:
        return ()
    shaded = [
        Band(begin=clock.position(outage.begin), end=clock.position(outage.end)) for outage in outages(run.generations)
    ]
    return (
        stories.training(_losses(run, scored, clock, "steps"), steps_of(run)),
        stories.training(_losses(run, scored, clock, "time"), time_of(clock), shaded),
    )


def _losses(run: RunData, scored: Sequence[RunCheckpoint], clock: Clock, axis: str) -> Losses:
    raw, mean, width, broken = loss_series(run, clock, axis)
    counting = [c for c in scored if c.counts]
    # The base model has its place at step 0.
    base = [run.base] if run.base is not None and axis == "steps" else []
    best = run.best.evaluation if run.best else None
    return Losses(
        each=raw,
        mean=mean,
        mean_of=f"mean of {width:,} steps",
        redone=[
            points(*envelope(_x(lost, clock, axis), lost.loss, COLUMNS // 4)) for lost in run.superseded if len(lost)
        ],
        tested=scores(counting, "loss", clock, axis),
        scored=scores(counting, run.metric, clock, axis),
        base_tested=scores(base, "loss", clock, axis),
        base_scored=scores(base, run.metric, clock, axis),
        off=scores([c for c in scored if not c.counts], run.metric, clock, axis),
        best=scores([run.best], run.metric, clock, axis)[0] if best and run.best else None,
        best_at=f"at step {run.best.step:,}" if run.best else "",
        metric=run.metric,
        not_finite=broken,
    )


def loss_series(run: RunData, clock: Clock, axis: str) -> tuple[list[Point], list[Point], int, list[float]]:
    """Series of each step's loss and of its running mean, the width of the mean, and the positions of losses that are
    not finite.

    Args:
        axis: `steps` or `time`.
    """
    steps = run.model_steps
    width = max(5, int(len(steps) * SMOOTH_SHARE))
    if not len(steps):
        return [], [], width, []
    x = np.maximum.accumulate(_x(steps, clock, axis))
    raw = np.where(np.isfinite(steps.loss), steps.loss, np.nan)
    broken = x[steps.broken]
    broken_at = np.unique(np.round(broken / max(float(x[-1]), 1e-9) * COLUMNS)) * max(float(x[-1]), 1e-9) / COLUMNS
    if len(steps) == 1:
        return points(x, raw), [], width, broken_at.tolist()
    mean = smooth(raw, width)
    gaps = np.array(_breaks(run) if axis == "time" else [], np.int64)
    raw, mean, x = np.insert(raw, gaps, np.nan), np.insert(mean, gaps, np.nan), np.insert(x, gaps, x[gaps])
    return points(*envelope(x, raw, COLUMNS)), points(*thin(x, mean, COLUMNS)), width, broken_at.tolist()


def _breaks(run: RunData) -> list[int]:
    """Indices of the counted steps at which the group was absent before: the line is interrupted there."""
    times = run.model_steps.time
    stops = [outage.end for outage in outages(run.generations)]
    return [index for index in np.searchsorted(times, stops).tolist() if 0 < index < len(times)]


def points(x: Floats, y: Floats) -> list[Point]:
    """Convert two arrays to points; a value that is not finite interrupts the line."""
    return [(place, value if np.isfinite(value) else None) for place, value in zip(x.tolist(), y.tolist(), strict=True)]


def scores(checkpoints: Sequence[RunCheckpoint], metric: str, clock: Clock, axis: str) -> list[Point]:
    """Points of the scores of checkpoints on the test data."""
    values = [c.evaluation.metrics.get(metric, np.nan) if c.evaluation else np.nan for c in checkpoints]
    all_points = points(_positions(checkpoints, clock, axis), np.array(values, np.float64))
    return sorted((x, y) for x, y in all_points if y is not None and np.isfinite(x))


def _positions(checkpoints: Sequence[RunCheckpoint], clock: Clock, axis: str) -> Floats:
    """Steps of checkpoints, or the times at which their scores were known."""
    if axis == "steps":
        return np.array([c.step for c in checkpoints], np.float64)
    scored_at = [
        c.evaluation.finished_at if c.evaluation and c.evaluation.finished_at is not None else c.written_at
        for c in checkpoints
    ]
    return clock.axis(np.array([np.nan if moment is None else moment for moment in scored_at], np.float64))


def _x(steps: Steps, clock: Clock, axis: str) -> Floats:
    return steps.step.astype(np.float64) if axis == "steps" else clock.axis(steps.time)


SMOOTH_FROM = 100
"""Number of values below which they are drawn without a mean."""


def optimization(run: RunData) -> tuple[Chart, ...]:
    """Chart learning rate and gradient norm. Empty if neither was logged."""
    steps = run.model_steps
    x = steps.step.astype(np.float64)
    rates, norms, mean = steps.measures.get(LEARNING_RATE), steps.measures.get(GRADIENT_NORM, np.empty(0)), None
    # A norm is measured only in some steps: no gap lies between two.
    measured = np.flatnonzero(np.isfinite(norms))
    norm_steps, norms = x[measured], norms[measured]
    if len(norms) >= SMOOTH_FROM:
        mean = smooth(norms, max(5, int(len(norms) * SMOOTH_SHARE)))
    story = stories.optimization(
        points(*envelope(x, rates, WIDE_COLUMNS)) if rates is not None else [],
        points(*envelope(norm_steps, norms, WIDE_COLUMNS)) if len(norm_steps) else [],
        points(*thin(norm_steps, mean, WIDE_COLUMNS)) if mean is not None else [],
        steps_of(run),
    )
    return () if story is None else (story,)


def values(run: RunData) -> tuple[Chart, ...]:
    """Chart the values that the script logged beside the loss, a panel for each name. Empty if it logged none."""
    steps, panels = run.model_steps, {}
    x = steps.step.astype(np.float64)
    for name, measured in steps.measures.items():
        # A value is logged only in some steps: no gap lies between two.
        finite = np.flatnonzero(np.isfinite(measured))
        if name in (LEARNING_RATE, GRADIENT_NORM) or not len(finite):
            continue
        logged_at, y = x[finite], measured[finite]
        mean = smooth(y, max(5, int(len(y) * SMOOTH_SHARE))) if len(y) >= SMOOTH_FROM else None
        panels[name] = Logged(
            each=points(*envelope(logged_at, y, COLUMNS)),
            mean=points(*thin(logged_at, mean, COLUMNS)) if mean is not None else (),
        )
    return stories.values(panels, steps_of(run))


def ranks(run: RunData, clock: Clock) -> tuple[Chart, ...]:
    """Chart throughput by rank, the ranks' own work and GPU memory. Empty if none was logged."""
    world = run.world
    rate = np.where(world.size > 0, world.throughput / np.maximum(1, world.size), np.nan)
    by_rank = Ranks(
        throughput=points(*thin(clock.axis(world.time), rate, WIDE_COLUMNS)),
        busy={series.rank: _over_time(series, clock, 1e-3) for series in run.busy},
        memory={series.rank: _over_time(series, clock, 1e9) for series in run.memory},
    )
    shaded = [
        Band(begin=clock.position(outage.begin), end=clock.position(outage.end)) for outage in outages(run.generations)
    ]
    story = stories.ranks(by_rank, time_of(clock), shaded)
    return () if story is None else (story,)


def _over_time(series: OfRank, clock: Clock, unit: float) -> list[Point]:
    return points(*thin(clock.axis(series.time), series.value / unit, WIDE_COLUMNS))


def world(run: RunData, clock: Clock) -> tuple[Chart, ...]:
    """Chart throughput above world size. Empty if neither was logged."""
    sizes = _sizes(run)
    if not len(run.rates) and not len(run.world.time) and sizes is None:
        return ()
    time, rate = throughput(run)
    order = np.argsort(time, kind="stable")
    time, rate = _without_outages(time[order], rate[order], run)
    x, spread = clock.axis(time), None
    if len(x) > 2 * WIDE_COLUMNS:
        spread = points(*envelope(x, rate, WIDE_COLUMNS))
        mean = smooth(rate, len(x) // WIDE_COLUMNS * 4)
        x, rate = thin(x, np.where(np.isfinite(rate), mean, np.nan), WIDE_COLUMNS)
    bands = [
        Band(
            begin=clock.position(outage.begin),
            end=clock.position(outage.end),
            words=(
                reason(outage.reason) or "restarted",
                f"{duration(clock.between(outage.begin, outage.end))} without a {outage.without}",
            ),
        )
        for outage in outages(run.generations)[:MAX_MARKED]
    ]
    ranks = points(clock.axis(sizes[0]), sizes[1]) if sizes is not None else []
    return (pace(points(x, rate), ranks, time_of(clock), bands, spread or ()),)


def throughput(run: RunData) -> tuple[Floats, Floats]:
    """Time and samples a second: as trainers measured them, else as the coordinator did."""
    if len(run.rates):
        return run.rates.time, run.rates.throughput
    return run.world.time, run.world.throughput


def _without_outages(time: Floats, rate: Floats, run: RunData) -> tuple[Floats, Floats]:
    """Interrupt the line where there were no steps: what a rank logs late is of the time before."""
    for outage in outages(run.generations):
        inside = (time > outage.begin) & (time < outage.end)
        time, rate = time[~inside], rate[~inside]
        place = int(np.searchsorted(time, outage.begin, side="right"))
        time, rate = np.insert(time, place, outage.begin), np.insert(rate, place, np.nan)
    return time, rate


def _sizes(run: RunData) -> tuple[Floats, Floats] | None:
    """World size as steps: from the generations, else from the coordinator's samples."""
    times, sizes = [], []
    for generation, following in zip_longest(run.generations, run.generations[1:]):
        if generation.opened_at is None or generation.world_size is None:
            break
        times.append(generation.opened_at)
        sizes.append(generation.world_size)
        closed = [moment for moment in (generation.closed_at, generation.last_step_at) if moment is not None]
        if following is not None and closed:
            times.append(max(closed))
            sizes.append(0)
    else:
        if times:
            return np.array([*times, run.ended_at]), np.array([*sizes, sizes[-1]], np.float64)
    if not len(run.world.time):
        return None
    changed = np.flatnonzero(np.diff(run.world.size, prepend=-1))
    time = np.append(run.world.time[changed], run.world.time[-1])
    return time, np.append(run.world.size[changed], run.world.size[-1]).astype(np.float64)
