"""The charts of the page, drawn from a timeline with the same stories as the report. Pure."""

from collections.abc import Sequence
from math import isfinite

from tandem.formatting import cores, duration, reason, share
from tandem.measures import outages
from tandem.rundir.catalog import Result
from tandem.status import Snapshot, Status
from tandem_coordinator.charts import bars, drawing, gallery, rows, stories
from tandem_coordinator.charts.chart import Axis, Band, Chart, Look, Point, Points, Role
from tandem_coordinator.charts.rows import Row, Rows
from tandem_coordinator.charts.series import Series
from tandem_coordinator.charts.stories import Logged, Losses, Ranks, pace, training
from tandem_coordinator.page.timeline import Timeline

SMOOTH_FROM = 100
"""Fewer losses are drawn as they are."""
UNITS = (("s", 1.0, 240.0), ("min", 60.0, 4 * 3600.0), ("h", 3600.0, 4 * 86400.0), ("days", 86400.0, float("inf")))
"""Name, seconds, and up to which length of an axis it is the one to read in."""
KINDS: tuple[tuple[str, str, Role, str], ...] = (
    ("trainer", "TRAINING", "trainer", "rank"),
    ("gpu", "GPUS", "gpu", "GPU"),
    ("evaluator", "EVALUATION", "evaluator", "evaluator"),
)


def losses(timeline: Timeline, status: Status, look: Look) -> str:
    """Training loss and scores over steps; empty while there is nothing of them."""
    found = timeline.loss if len(timeline.loss) else timeline.told_loss
    results = sorted(timeline.results.values(), key=lambda result: result.checkpoint.step)
    scored_by = status.best_checkpoint or status.latest_evaluation
    metric = scored_by.metric if scored_by is not None else timeline.metric
    counting = [result for result in results if timeline.counts(result.checkpoint) and not result.skipped]
    off = [result for result in results if not timeline.counts(result.checkpoint)]
    # What training began with stands at step 0.
    begun_with = [timeline.base] if timeline.base is not None else []
    if not len(found) and not counting and not begun_with:
        return ""
    best = status.best_checkpoint
    smooth = len(found) >= SMOOTH_FROM
    told = Losses(
        each=found.envelope(),
        mean=found.smoothed() if smooth else (),
        mean_of="mean of a 50th of the run",
        redone=tuple(timeline.redone),
        tested=_of(counting, "loss"),
        scored=_of(counting, metric),
        base_tested=_of(begun_with, "loss"),
        base_scored=_of(begun_with, metric),
        off=_of(off, metric),
        best=None if best is None else (float(best.step), best.value),
        best_at="" if best is None else f"at step {best.step:,}",
        metric=metric,
        not_finite=tuple(float(step) for step in timeline.not_finite),
    )
    last = max([found.last.x if found.last else 0.0, *(float(result.checkpoint.step) for result in counting), 1.0])
    axis = Axis(low=0.0, high=last, label="step", whole=True)
    description = f"Training loss and test {metric} over {last:,.0f} steps."
    return drawing.draw(f"losses-{_name(look)}", "Loss and score", description, [training(told, axis)], look)


def speed(timeline: Timeline, look: Look) -> str:
    """Throughput and the size of the group over time; empty while nothing was formed."""
    if timeline.begun is None:
        return ""
    unit, scale = _unit(timeline.now)
    story = pace(
        _scaled(timeline.throughput.means(), scale),
        _scaled(_sizes(timeline), scale),
        _axis(timeline, unit, scale),
        _bands(timeline, scale),
        spread=_scaled(timeline.throughput.envelope(), scale) if len(timeline.throughput) > 400 else (),
    )
    return drawing.draw(
        f"speed-{_name(look)}",
        "Throughput and world size",
        "Samples a second and ranks over time.",
        [story],
        look,
    )


def optimization(timeline: Timeline, look: Look) -> str:
    """Learning rate and gradient norm over steps; empty where neither is logged."""
    rates, norms = timeline.learning_rate, timeline.gradient_norm
    last = max([1.0, *(series.last.x for series in (rates, norms) if series.last)])
    smooth = len(norms) >= SMOOTH_FROM
    story = stories.optimization(
        rates.means(),
        norms.envelope(),
        norms.smoothed() if smooth else (),
        Axis(low=0.0, high=last, label="step", whole=True),
    )
    return _drawn("optimization", "Learning rate and gradient norm", "Of each step.", story, look)


def values(timeline: Timeline, look: Look) -> str:
    """What a script logs beside its loss, over steps; empty where it logs nothing."""
    logged = {
        name: Logged(each=series.envelope(), mean=series.smoothed() if len(series) >= SMOOTH_FROM else ())
        for name, series in timeline.values.items()
        if len(series)
    }
    last = max([1.0, *(series.last.x for series in timeline.values.values() if series.last)])
    charts = stories.values(logged, Axis(low=0.0, high=last, label="step", whole=True))
    return drawing.draw(f"values-{_name(look)}", "Logged values", "Over steps.", charts, look) if charts else ""


def ranks(timeline: Timeline, look: Look) -> str:
    """Throughput by rank, the ranks' own work and GPU memory, over time; empty where nothing is known of them."""
    unit, scale = _unit(timeline.now)
    known = Ranks(
        throughput=_scaled(timeline.rank_throughput.means(), scale),
        busy={name: _scaled(series.means(), scale) for name, series in timeline.busy.items()},
        memory={name: _scaled(series.means(), scale) for name, series in timeline.memory.items()},
    )
    story = stories.ranks(known, _axis(timeline, unit, scale), _bands(timeline, scale))
    return _drawn(
        "ranks",
        "Throughput and work, rank by rank",
        "Throughput by rank, own work and GPU memory over time.",
        story,
        look,
    )


def _drawn(name: str, title: str, description: str, story: Chart | None, look: Look) -> str:
    return drawing.draw(f"{name}-{_name(look)}", title, description, [story], look) if story is not None else ""


def wrong(timeline: Timeline, look: Look) -> str:
    """Samples that the best checkpoint takes for something else; empty where none are known."""
    return gallery.draw(f"wrong-{_name(look)}", "Wrong samples", timeline.wrong, look) if timeline.wrong else ""


def histograms(timeline: Timeline, look: Look) -> str:
    """Those of the best checkpoint, or of the newest while none is the best; empty where no program reports any."""
    if timeline.shown_histograms is None:
        return ""
    result, found = timeline.shown_histograms
    described = "; ".join(f"{name}: {bars.told(one)}" for name, one in found.items())
    labelled = {f"{name} at step {result.checkpoint.step:,}": one for name, one in found.items()}
    return bars.draw(f"histograms-{_name(look)}", "Histograms", described, labelled, look) or ""


def use(timeline: Timeline, snapshot: Snapshot, look: Look) -> str:
    """A row for each process; empty while none has told its use."""
    unit, scale = _unit(timeline.now)
    slow = {str(straggler.rank): straggler.ratio for straggler in snapshot.status.stragglers}
    groups = []
    for kind, caption, color, word in KINDS:
        known = timeline.use[kind]
        found = tuple(
            Row(
                label=f"{word} {name.removeprefix('evaluator-')}",
                color=color,
                points=_scaled(known[name].means(), scale),
                beside=_newest(known[name], kind),
                unit="share" if kind == "gpu" else "cores",
                alert=f"{slow[name]:.1f}× slow" if kind == "trainer" and name in slow else "",
            )
            for name in sorted(known, key=_natural)
            if _is_there(known[name], timeline.now)
        )
        if found:
            groups.append(Rows(caption=caption, rows=found))
    if not groups:
        return ""
    marks = [timeline.shown(save.at) / scale for save in timeline.saves.values()]
    return rows.draw(
        f"use-{_name(look)}",
        "Processor use",
        "Busy cores of each process over time, and when checkpoints were written.",
        groups,
        marks,
        _axis(timeline, unit, scale),
        look,
    )


def _name(look: Look) -> str:
    return "narrow" if look.narrow else "wide"


def _of(results: Sequence[Result], metric: str) -> list[Point]:
    return [(float(r.checkpoint.step), r.metrics[metric]) for r in results if isfinite(r.metrics.get(metric, _NAN))]


_NAN = float("nan")


def _scaled(points: Points, scale: float) -> Points:
    return [(x / scale, y) for x, y in points] if scale != 1.0 else points


def _unit(seconds: float) -> tuple[str, float]:
    return next((name, length) for name, length, longest in UNITS if seconds < longest)


def _axis(timeline: Timeline, unit: str, scale: float) -> Axis:
    pauses = tuple((timeline.shown(at) / scale, duration(length)) for at, length in timeline.pauses)
    return Axis(low=0.0, high=max(timeline.now, 1.0) / scale, label=f"time ({unit})", pauses=pauses)


def _sizes(timeline: Timeline) -> list[Point]:
    found: list[Point] = []
    size = 0.0
    for one in timeline.formed:
        if one.opened_at is not None:
            size = float(one.world_size or 0)
            found.append((timeline.shown(one.opened_at), size))
        if one.closed_at is not None:
            size = 0.0
            found.append((timeline.shown(one.closed_at), size))
    if size:
        found.append((timeline.now, size))
    return found


def _bands(timeline: Timeline, scale: float) -> list[Band]:
    """The time without a step around each change of the group."""
    return [
        Band(
            begin=timeline.shown(outage.begin) / scale,
            end=timeline.shown(outage.end) / scale,
            words=(
                reason(outage.reason) or "restarted",
                f"{duration(timeline.shown(outage.end) - timeline.shown(outage.begin))} without a {outage.without}",
            ),
        )
        for outage in outages(timeline.formed)
    ]


def _newest(series: Series, kind: str) -> str:
    value = next((mean for _, mean in reversed(series.means()[-3:]) if mean is not None), None)
    if value is None:
        return "–"
    return share(value) if kind == "gpu" else cores(value)


def _is_there(series: Series, now: float) -> bool:
    """Whether a process has been heard of in the last tenth of the run: one that left long ago needs no row."""
    last = next((x for x, mean in reversed(series.means()) if mean is not None), None)
    return last is not None and now - last <= max(60.0, now / 10)


def _natural(name: str) -> tuple[int, str]:
    return len(name), name
