"""The charts of the page, drawn from a timeline by the same `stories` as those of the report. Pure."""

from collections.abc import Sequence
from math import isfinite

from tandem.formatting import cores, duration, reason, share
from tandem.rundir.catalog import EvaluationResult
from tandem.wire.measures import outages, time_unit
from tandem.wire.status import Snapshot, Status
from tandem_coordinator.charts import bars, drawing, gallery, rows, stories
from tandem_coordinator.charts.chart import Axis, Band, Chart, Point, Points, Role, Viewport
from tandem_coordinator.charts.rows import Row, Rows
from tandem_coordinator.charts.series import Series
from tandem_coordinator.charts.stories import Logged, Losses, Ranks, pace, training
from tandem_coordinator.page.timeline import Timeline

MIN_SMOOTHED = 100
"""Minimum number of values that are smoothed; fewer are drawn as they are."""
KINDS: tuple[tuple[str, str, Role, str], ...] = (
    ("trainer", "TRAINING", "trainer", "rank"),
    ("gpu", "GPUS", "gpu", "GPU"),
    ("evaluator", "EVALUATION", "evaluator", "evaluator"),
)


def losses(timeline: Timeline, status: Status, viewport: Viewport) -> str:
    """Draw training loss and scores over steps; empty while there are none."""
    loss = timeline.loss if len(timeline.loss) else timeline.reported_loss
    results = sorted(timeline.results.values(), key=lambda result: result.checkpoint.step)
    scored_checkpoint = status.best_checkpoint or status.latest_evaluation
    metric = scored_checkpoint.metric if scored_checkpoint is not None else timeline.metric
    counting = [result for result in results if timeline.counts(result.checkpoint) and not result.skipped]
    off = [result for result in results if not timeline.counts(result.checkpoint)]
    # What training began with stands at step 0.
    base_models = [timeline.base] if timeline.base is not None else []
    if not len(loss) and not counting and not base_models:
        return ""
    best = status.best_checkpoint
    smooth = len(loss) >= MIN_SMOOTHED
    curves = Losses(
        each=loss.envelope(),
        mean=loss.smoothed() if smooth else (),
        mean_of="mean of a 50th of the run",
        redone=tuple(timeline.redone),
        tested=_score_points(counting, "loss"),
        scored=_score_points(counting, metric),
        base_tested=_score_points(base_models, "loss"),
        base_scored=_score_points(base_models, metric),
        off=_score_points(off, metric),
        best=None if best is None else (float(best.step), best.value),
        best_at="" if best is None else f"at step {best.step:,}",
        metric=metric,
        not_finite=tuple(float(step) for step in timeline.not_finite),
    )
    last = max([loss.last.x if loss.last else 0.0, *(float(result.checkpoint.step) for result in counting), 1.0])
    axis = Axis(low=0.0, high=last, label="step", whole=True)
    description = f"Training loss and test {metric} over {last:,.0f} steps."
    return drawing.draw(
        f"losses-{_viewport_name(viewport)}", "Loss and score", description, [training(curves, axis)], viewport
    )


def speed(timeline: Timeline, viewport: Viewport) -> str:
    """Draw throughput and the size of the group over time; empty while no generation was formed."""
    if timeline.started_at is None:
        return ""
    unit, scale = time_unit(timeline.now)
    story = pace(
        _scaled(timeline.throughput.means(), scale),
        _scaled(_sizes(timeline), scale),
        _axis(timeline, unit, scale),
        _bands(timeline, scale),
        spread=_scaled(timeline.throughput.envelope(), scale) if len(timeline.throughput) > 400 else (),
    )
    return drawing.draw(
        f"speed-{_viewport_name(viewport)}",
        "Throughput and world size",
        "Samples a second and ranks over time.",
        [story],
        viewport,
    )


def optimization(timeline: Timeline, viewport: Viewport) -> str:
    """Draw learning rate and gradient norm over steps; empty if neither is logged."""
    rates, norms = timeline.learning_rate, timeline.gradient_norm
    last = max([1.0, *(series.last.x for series in (rates, norms) if series.last)])
    smooth = len(norms) >= MIN_SMOOTHED
    story = stories.optimization(
        rates.means(),
        norms.envelope(),
        norms.smoothed() if smooth else (),
        Axis(low=0.0, high=last, label="step", whole=True),
    )
    return _draw_story("optimization", "Learning rate and gradient norm", "Of each step.", story, viewport)


def values(timeline: Timeline, viewport: Viewport) -> str:
    """Draw values that a script logs besides its loss, over steps; empty if it logs none."""
    logged = {
        name: Logged(each=series.envelope(), mean=series.smoothed() if len(series) >= MIN_SMOOTHED else ())
        for name, series in timeline.values.items()
        if len(series)
    }
    last = max([1.0, *(series.last.x for series in timeline.values.values() if series.last)])
    charts = stories.values(logged, Axis(low=0.0, high=last, label="step", whole=True))
    return (
        drawing.draw(f"values-{_viewport_name(viewport)}", "Logged values", "Over steps.", charts, viewport)
        if charts
        else ""
    )


def ranks(timeline: Timeline, viewport: Viewport) -> str:
    """Draw throughput by rank, the ranks' own work and GPU memory, over time; empty if nothing is known of them."""
    unit, scale = time_unit(timeline.now)
    by_rank = Ranks(
        throughput=_scaled(timeline.rank_throughput.means(), scale),
        busy={name: _scaled(series.means(), scale) for name, series in timeline.busy.items()},
        memory={name: _scaled(series.means(), scale) for name, series in timeline.memory.items()},
    )
    story = stories.ranks(by_rank, _axis(timeline, unit, scale), _bands(timeline, scale))
    return _draw_story(
        "ranks",
        "Throughput and work, rank by rank",
        "Throughput by rank, own work and GPU memory over time.",
        story,
        viewport,
    )


def _draw_story(name: str, title: str, description: str, story: Chart | None, viewport: Viewport) -> str:
    return (
        drawing.draw(f"{name}-{_viewport_name(viewport)}", title, description, [story], viewport)
        if story is not None
        else ""
    )


def wrong(timeline: Timeline, viewport: Viewport) -> str:
    """Draw samples that the best checkpoint misclassifies; empty if none are known."""
    return (
        gallery.draw(f"wrong-{_viewport_name(viewport)}", "Wrong samples", timeline.wrong, viewport)
        if timeline.wrong
        else ""
    )


def histograms(timeline: Timeline, viewport: Viewport) -> str:
    """Draw the histograms of the best checkpoint, or of the newest while none is the best; empty if no program reports
    any."""
    if timeline.shown_histograms is None:
        return ""
    result, shown_histograms = timeline.shown_histograms
    described = "; ".join(f"{name}: {bars.describe(histogram)}" for name, histogram in shown_histograms.items())
    labelled = {f"{name} at step {result.checkpoint.step:,}": histogram for name, histogram in shown_histograms.items()}
    return bars.draw(f"histograms-{_viewport_name(viewport)}", "Histograms", described, labelled, viewport) or ""


def use(timeline: Timeline, snapshot: Snapshot, viewport: Viewport) -> str:
    """Draw a row for each process; empty while none has reported its use."""
    unit, scale = time_unit(timeline.now)
    slow = {str(straggler.rank): straggler.ratio for straggler in snapshot.status.stragglers}
    groups = []
    for kind, caption, color, noun in KINDS:
        series = timeline.use[kind]
        process_rows = tuple(
            Row(
                label=f"{noun} {name.removeprefix('evaluator-')}",
                color=color,
                points=_scaled(series[name].means(), scale),
                value_text=_newest_text(series[name], kind),
                unit="share" if kind == "gpu" else "cores",
                alert=f"{slow[name]:.1f}× slow" if kind == "trainer" and name in slow else "",
            )
            for name in sorted(series, key=_natural_sort_key)
            if _is_recent(series[name], timeline.now)
        )
        if process_rows:
            groups.append(Rows(caption=caption, rows=process_rows))
    if not groups:
        return ""
    marks = [timeline.run_seconds(save.saved_at) / scale for save in timeline.saves.values()]
    return rows.draw(
        f"use-{_viewport_name(viewport)}",
        "Processor use",
        "Busy cores of each process over time, and when checkpoints were written.",
        groups,
        marks,
        _axis(timeline, unit, scale),
        viewport,
    )


def _viewport_name(viewport: Viewport) -> str:
    return "narrow" if viewport.narrow else "wide"


def _score_points(results: Sequence[EvaluationResult], metric: str) -> list[Point]:
    return [(float(r.checkpoint.step), r.metrics[metric]) for r in results if isfinite(r.metrics.get(metric, _NAN))]


_NAN = float("nan")


def _scaled(points: Points, scale: float) -> Points:
    return [(x / scale, y) for x, y in points] if scale != 1.0 else points


def _axis(timeline: Timeline, unit: str, scale: float) -> Axis:
    pauses = tuple((timeline.run_seconds(begin) / scale, duration(length)) for begin, length in timeline.pauses)
    return Axis(low=0.0, high=max(timeline.now, 1.0) / scale, label=f"time ({unit})", pauses=pauses)


def _sizes(timeline: Timeline) -> list[Point]:
    points: list[Point] = []
    size = 0.0
    for generation in timeline.generations.values():
        if generation.opened_at is not None:
            size = float(generation.world_size or 0)
            points.append((timeline.run_seconds(generation.opened_at), size))
        if generation.closed_at is not None:
            size = 0.0
            points.append((timeline.run_seconds(generation.closed_at), size))
    if size:
        points.append((timeline.now, size))
    return points


def _bands(timeline: Timeline, scale: float) -> list[Band]:
    """The time without a step around each change of the group."""
    bands = []
    for outage in outages(timeline.generations.values()):
        begin, end = timeline.run_seconds(outage.begin), timeline.run_seconds(outage.end)
        lines = reason(outage.reason) or "restarted", f"{duration(end - begin)} without a {outage.without}"
        bands.append(Band(begin=begin / scale, end=end / scale, words=lines))
    return bands


def _newest_text(series: Series, kind: str) -> str:
    value = next((mean for _, mean in reversed(series.means()[-3:]) if mean is not None), None)
    if value is None:
        return "–"
    return share(value) if kind == "gpu" else cores(value)


def _is_recent(series: Series, now: float) -> bool:
    """Whether a process has reported in the last tenth of the run: one that left long ago needs no row."""
    last = next((x for x, mean in reversed(series.means()) if mean is not None), None)
    return last is not None and now - last <= max(60.0, now / 10)


def _natural_sort_key(name: str) -> tuple[int, str]:
    return len(name), name
