"""The curves of a report: loss and score, learning rate, ranks, throughput and world size. The live page has
them too.
"""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from tandem.formatting import duration, reason
from tandem.measures import outages
from tandem_cli.report.clock import Clock, envelope, smooth, thin
from tandem_cli.report.figures.axes import MAX_MARKED, steps_of, time_of
from tandem_cli.report.run import Floats, OfRank, Run, RunCheckpoint, Steps
from tandem_coordinator.charts import stories
from tandem_coordinator.charts.chart import Band, Chart, Point
from tandem_coordinator.charts.stories import GRADIENT_NORM, LEARNING_RATE, Logged, Losses, Ranks, pace

SMOOTH_SHARE = 0.02
"""Width of the running mean, of the whole run."""
COLUMNS = 300
"""Stretches that a series is shown in."""
WIDE_COLUMNS = 420
"""Stretches that a series of the whole width is shown in."""


def training(run: Run, clock: Clock) -> tuple[Chart, ...]:
    """Over steps, and over time. None without steps and scores."""
    scored = [c for c in run.checkpoints if c.evaluation and run.metric in c.evaluation.metrics]
    if not len(run.counted) and not scored:
        return ()
    shaded = [Band(begin=clock.at(one.begin), end=clock.at(one.end)) for one in outages(run.generations)]
    return (
        stories.training(_losses(run, scored, clock, "steps"), steps_of(run)),
        stories.training(_losses(run, scored, clock, "time"), time_of(clock), shaded),
    )


def _losses(run: Run, scored: Sequence[RunCheckpoint], clock: Clock, over: str) -> Losses:
    each, mean, width, broken = counted(run, clock, over)
    counting = [c for c in scored if c.counts]
    # What training began with stands at step 0.
    begun_with = [run.base] if run.base is not None and over == "steps" else []
    best = run.best.evaluation if run.best else None
    return Losses(
        each=each,
        mean=mean,
        mean_of=f"mean of {width:,} steps",
        redone=[
            points(*envelope(_x(lost, clock, over), lost.loss, COLUMNS // 4)) for lost in run.superseded if len(lost)
        ],
        tested=scores(counting, "loss", clock, over),
        scored=scores(counting, run.metric, clock, over),
        base_tested=scores(begun_with, "loss", clock, over),
        base_scored=scores(begun_with, run.metric, clock, over),
        off=scores([c for c in scored if not c.counts], run.metric, clock, over),
        best=scores([run.best], run.metric, clock, over)[0] if best and run.best else None,
        best_at=f"at step {run.best.step:,}" if run.best else "",
        metric=run.metric,
        not_finite=broken,
    )


def counted(run: Run, clock: Clock, over: str) -> tuple[list[Point], list[Point], int, list[float]]:
    """Each step's loss, its running mean, the width of that, and where it is not finite.

    Args:
        over: `steps`, or `time`.
    """
    steps = run.counted
    width = max(5, int(len(steps) * SMOOTH_SHARE))
    if not len(steps):
        return [], [], width, []
    x = np.maximum.accumulate(_x(steps, clock, over))
    raw = np.where(np.isfinite(steps.loss), steps.loss, np.nan)
    broken = x[steps.broken]
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


def scores(checkpoints: Sequence[RunCheckpoint], metric: str, clock: Clock, over: str) -> list[Point]:
    """What evaluations say of checkpoints, on the test data."""
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


SMOOTH_FROM = 100
"""Fewer norms are drawn as they are."""


def optimization(run: Run) -> tuple[Chart, ...]:
    """Learning rate and gradient norm. None where neither was logged."""
    steps = run.counted
    x = steps.step.astype(np.float64)
    rates, norms, mean = steps.measures.get(LEARNING_RATE), steps.measures.get(GRADIENT_NORM, np.empty(0)), None
    # A norm is measured now and then: no gap lies between two.
    measured = np.flatnonzero(np.isfinite(norms))
    at, norms = x[measured], norms[measured]
    if len(norms) >= SMOOTH_FROM:
        mean = smooth(norms, max(5, int(len(norms) * SMOOTH_SHARE)))
    story = stories.optimization(
        points(*envelope(x, rates, WIDE_COLUMNS)) if rates is not None else [],
        points(*envelope(at, norms, WIDE_COLUMNS)) if len(at) else [],
        points(*thin(at, mean, WIDE_COLUMNS)) if mean is not None else [],
        steps_of(run),
    )
    return () if story is None else (story,)


def values(run: Run) -> tuple[Chart, ...]:
    """What the script logged beside the loss, a panel for each name. None where it logged nothing."""
    steps, found = run.counted, {}
    x = steps.step.astype(np.float64)
    for name, measured in steps.measures.items():
        # A value is logged now and then: no gap lies between two.
        known = np.flatnonzero(np.isfinite(measured))
        if name in (LEARNING_RATE, GRADIENT_NORM) or not len(known):
            continue
        at, y = x[known], measured[known]
        mean = smooth(y, max(5, int(len(y) * SMOOTH_SHARE))) if len(y) >= SMOOTH_FROM else None
        found[name] = Logged(
            each=points(*envelope(at, y, COLUMNS)),
            mean=points(*thin(at, mean, COLUMNS)) if mean is not None else (),
        )
    return stories.values(found, steps_of(run))


def ranks(run: Run, clock: Clock) -> tuple[Chart, ...]:
    """Throughput by rank, the ranks' own work and GPU memory. None where nothing was logged of them."""
    world = run.world
    rate = np.where(world.size > 0, world.throughput / np.maximum(1, world.size), np.nan)
    known = Ranks(
        throughput=points(*thin(clock.axis(world.time), rate, WIDE_COLUMNS)),
        busy={one.rank: _over_time(one, clock, 1e-3) for one in run.busy},
        memory={one.rank: _over_time(one, clock, 1e9) for one in run.memory},
    )
    shaded = [Band(begin=clock.at(one.begin), end=clock.at(one.end)) for one in outages(run.generations)]
    story = stories.ranks(known, time_of(clock), shaded)
    return () if story is None else (story,)


def _over_time(one: OfRank, clock: Clock, unit: float) -> list[Point]:
    return points(*thin(clock.axis(one.time), one.value / unit, WIDE_COLUMNS))


def world(run: Run, clock: Clock) -> tuple[Chart, ...]:
    """Throughput above world size. None when neither was logged."""
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
            begin=clock.at(outage.begin),
            end=clock.at(outage.end),
            words=(
                reason(outage.reason) or "restarted",
                f"{duration(clock.between(outage.begin, outage.end))} without a {outage.without}",
            ),
        )
        for outage in outages(run.generations)[:MAX_MARKED]
    ]
    ranks = points(clock.axis(sizes[0]), sizes[1]) if sizes is not None else []
    return (pace(points(x, rate), ranks, time_of(clock), bands, spread or ()),)


def throughput(run: Run) -> tuple[Floats, Floats]:
    """Time and samples a second: what trainers measured, else what the coordinator saw."""
    if len(run.rates):
        return run.rates.time, run.rates.throughput
    return run.world.time, run.world.throughput


def _without_outages(time: Floats, rate: Floats, run: Run) -> tuple[Floats, Floats]:
    """Break the line where there were no steps: what a rank writes down late is of the time before."""
    for outage in outages(run.generations):
        inside = (time > outage.begin) & (time < outage.end)
        time, rate = time[~inside], rate[~inside]
        place = int(np.searchsorted(time, outage.begin, side="right"))
        time, rate = np.insert(time, place, outage.begin), np.insert(rate, place, np.nan)
    return time, rate


def _sizes(run: Run) -> tuple[Floats, Floats] | None:
    """World size as a staircase: from what is known of each generation, else from the coordinator's samples."""
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
