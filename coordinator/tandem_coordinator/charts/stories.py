"""The choice of curves for each chart of a run, the same for the live page and the report. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem.formatting import SHARES, metric_name, score
from tandem.script import MAX_VALUES
from tandem_coordinator.charts.chart import Axis, Band, Chart, Curve, Kind, Panel, Point, Points, Role

MAX_DOTS = 80
"""Maximum number of scores that are drawn with a dot for each."""
LEARNING_RATE, GRADIENT_NORM = "lr", "gradientNorm"
"""Values that trainers log of a step, besides its loss."""
RANKS: tuple[Role, ...] = ("trainer", "evaluator", "gpu", "checkpoint")
MAX_RANKS = 2 * len(RANKS)
"""Maximum number of ranks with a curve: each colour twice, the second time dashed."""
MAX_LENGTH = 12
"""Maximum length of a rank's name, which comes from a log, in characters."""
LOGARITHMIC_ABOVE, BESIDE_BASE = 30.0, 4.0
"""Ratio of the highest to the lowest value from which on an axis is logarithmic. Beside a base model that is far off,
checkpoints that differ would lie on one line long before that."""
REDONE = "done again after a restart"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Loss and scores, over steps or over time."""

    each: Points = ()
    """Training loss: of each step, or the lowest and the highest of stretches."""
    mean: Points = ()
    """Running mean of these values."""
    mean_of: str = ""
    """Label of the mean: `mean of 20 steps`."""
    redone: Sequence[Points] = ()
    """Loss of steps that a later generation repeated."""
    tested: Points = ()
    """Loss of evaluated checkpoints."""
    scored: Points = ()
    """Score of evaluated checkpoints."""
    off: Points = ()
    """Scores of checkpoints that were superseded."""
    base_tested: Points = ()
    """Loss of the base model, at step 0."""
    base_scored: Points = ()
    """Score of the base model. No line connects it with the checkpoints: nothing was measured in between."""
    best: Point | None = None
    """The best score."""
    best_at: str = ""
    """Position of the best score: `at step 500`."""
    metric: str = "accuracy"
    not_finite: Sequence[float] = ()
    """Positions at which the training loss was not finite."""


def training(losses: Losses, axis: Axis, bands: Sequence[Band] = ()) -> Chart:
    """Training loss with the loss of checkpoints, above their score."""
    shaded = tuple(bands)
    curves = [Curve(points=points, color="other", width=0.9, strength=0.75, label=REDONE) for points in losses.redone]
    if losses.mean:
        spread_curve = Curve(
            points=losses.each, color="trainer", kind="spread", width=0.8, strength=0.3, label="each step"
        )
        curves.append(spread_curve)
        curves.append(Curve(points=losses.mean, color="trainer", label=losses.mean_of or "mean"))
    else:
        curves.append(Curve(points=losses.each, color="trainer", label="training", kind=_kind(losses.each)))
    if losses.tested:
        curves.append(_scores(losses.tested, "test, every evaluated checkpoint"))
    if losses.base_tested:
        curves.append(_base(losses.base_tested))
    is_logged = bool(losses.each or losses.mean or losses.redone or losses.not_finite)
    panels = [
        Panel(
            # A script may log no loss, and its checkpoints may have one.
            title="Training loss" if is_logged else "Test loss",
            curves=tuple(curves),
            logarithmic_above=LOGARITHMIC_ABOVE,
            bands=shaded,
            flags=tuple(losses.not_finite),
            flag="loss not finite",
        )
    ]
    if losses.scored or losses.off or losses.base_scored:
        panels.append(_scored(losses, shaded))
    return Chart(axis=axis, panels=_with_values(panels))


def _with_values(panels: Sequence[Panel]) -> tuple[Panel, ...]:
    """Drop panels without values, such as the loss of a script that logs none: axes from 0 to 1 would look like a
    measurement. At least one panel stays."""
    with_values = [
        panel
        for panel in panels
        if panel.flags or any(y is not None for curve in panel.curves for _, y in curve.points)
    ]
    return tuple(with_values or panels[-1:])


def _scored(losses: Losses, bands: tuple[Band, ...]) -> Panel:
    curves = [_scores(losses.scored, "")]
    if losses.off:
        curves.append(Curve(points=losses.off, color="other", kind="dots", width=0.0))
    if losses.base_scored:
        curves.append(_base(losses.base_scored))
    note = ""
    if losses.best is not None and losses.best[1] is not None:
        curves.append(Curve(points=(losses.best,), color="checkpoint", kind="star"))
        note = f"best {score(losses.metric, losses.best[1])} {losses.best_at}".strip()
    return Panel(
        title=f"Test {metric_name(losses.metric)}",
        curves=tuple(curves),
        unit="share" if losses.metric in SHARES else "number",
        logarithmic_above=None if losses.metric in SHARES else BESIDE_BASE if losses.base_scored else LOGARITHMIC_ABOVE,
        bands=bands,
        note=note,
    )


def pace(
    throughput: Points, sizes: Points, axis: Axis, bands: Sequence[Band] = (), spread: Points = ()
) -> Chart:  # fmt: skip
    """Throughput above the size of the group, with the reason of each change.

    Args:
        throughput: samples a second over time.
        sizes: ranks over time, each until the next.
        spread: the lowest and highest throughput of stretches, where `throughput` is a mean of those.
    """
    throughput, spread = _broken(throughput, bands), _broken(spread, bands)
    curves = [Curve(points=spread, color="trainer", kind="spread", width=0.7, strength=0.35)] if spread else []
    curves.append(Curve(points=throughput, color="trainer", filled=True, width=1.5, kind=_kind(throughput)))
    shaded = tuple(bands)
    silent = tuple(Band(begin=band.begin, end=band.end) for band in shaded)
    group = Curve(points=sizes, color="trainer", kind="stairs", width=1.5, filled=True)
    return Chart(
        axis=axis,
        panels=_with_values(
            [
                Panel(title="Throughput (samples/s)", curves=tuple(curves), from_zero=True, bands=shaded),
                Panel(
                    title="World size (ranks)", curves=(group,), unit="count", from_zero=True, bands=silent, height=0.5
                ),
            ]
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Measurements of each rank, over time."""

    throughput: Points = ()
    """Samples per second of all ranks, divided by their number."""
    busy: Mapping[str, Points] = field(default_factory=dict)
    """Milliseconds of its own work in a step, by rank."""
    memory: Mapping[str, Points] = field(default_factory=dict)
    """GB of GPU memory in use, by rank."""


def optimization(rates: Points, norms: Points, mean_norms: Points, axis: Axis) -> Chart | None:
    """Learning rate above the norm of the gradient; None where neither is known.

    Args:
        rates: the learning rate of each step.
        norms: the norm of the gradient where it was measured, or the lowest and the highest of stretches.
        mean_norms: its running mean.
    """
    panels = []
    if rates:
        curve = Curve(points=rates, color="gpu", width=1.5, kind=_kind(rates))
        panels.append(Panel(title="Learning rate", curves=(curve,), from_zero=True, height=0.7))
    if norms:
        curves = [Curve(points=norms, color="trainer", kind=_kind(norms), label="measured" if mean_norms else "")]
        if mean_norms:
            curves = [replace(curves[0], kind="spread", width=0.8, strength=0.3)]
            curves.append(Curve(points=mean_norms, color="trainer", label="mean"))
        panels.append(
            Panel(
                title="Gradient norm",
                curves=tuple(curves),
                logarithmic_above=LOGARITHMIC_ABOVE,
                height=0.7,
            )
        )
    return Chart(axis=axis, panels=tuple(panels)) if panels else None


@dataclass(frozen=True, kw_only=True)
class Logged:
    """A value that a script has logged, over steps."""

    each: Points
    """The logged values, or the lowest and the highest of stretches."""
    mean: Points = ()
    """Running mean of these values."""


def values(logged: Mapping[str, Logged], axis: Axis) -> tuple[Chart, ...]:
    """A panel for each name, in two columns; none where nothing was logged."""
    panels = []
    for name, value in list(logged.items())[:MAX_VALUES]:
        curves = [Curve(points=value.each, color="trainer", kind=_kind(value.each))]
        if value.mean:
            curves = [replace(curves[0], kind="spread", width=0.8, strength=0.3)]
            curves.append(Curve(points=value.mean, color="trainer"))
        panels.append(Panel(title=name, curves=tuple(curves), logarithmic_above=LOGARITHMIC_ABOVE, height=0.7))
    return tuple(Chart(axis=axis, panels=tuple(panels[column::2])) for column in range(min(2, len(panels))))


def ranks(measurements: Ranks, axis: Axis, bands: Sequence[Band] = ()) -> Chart | None:
    """Throughput by rank, the ranks' own work and GPU memory; None where nothing is known of them."""
    shaded = tuple(Band(begin=band.begin, end=band.end) for band in bands)
    panels = []
    if any(y is not None for _, y in measurements.throughput):
        rate = _broken(measurements.throughput, bands)
        curve = Curve(points=rate, color="trainer", width=1.5, kind=_kind(rate))
        panels.append(Panel(title="Throughput per rank (samples/s)", curves=(curve,), from_zero=True, bands=shaded))
    for title, superlative, values in (
        ("Own work in a step (ms)", "slowest", measurements.busy),
        ("GPU memory (GB)", "fullest", measurements.memory),
    ):
        curves = {name: _broken(points, bands) for name, points in values.items()}
        if curves := {name: points for name, points in curves.items() if any(y is not None for _, y in points)}:
            panels.append(_by_rank(title, superlative, curves, shaded))
    return Chart(axis=axis, panels=tuple(panels)) if panels else None


def _by_rank(title: str, superlative: str, values: Mapping[str, Points], bands: tuple[Band, ...]) -> Panel:
    """Draw a curve for each rank; of more ranks than colours can distinguish, those with the highest newest values."""
    chosen = sorted(values, key=lambda name: -next(y for _, y in reversed(values[name]) if y is not None))[:MAX_RANKS]
    chosen.sort(key=lambda name: (len(name), name))
    if len(values) > len(chosen):
        title += f", the {len(chosen)} {superlative} of {len(values):,} ranks"
    curves = tuple(
        Curve(
            points=values[name],
            color=RANKS[index % len(RANKS)],
            dashed=index >= len(RANKS),
            label=f"rank {name[:MAX_LENGTH]}",
            width=1.4,
            kind=_kind(values[name]),
        )
        for index, name in enumerate(chosen)
    )
    return Panel(title=title, curves=curves, from_zero=True, bands=bands)


def _broken(points: Points, bands: Sequence[Band]) -> Points:
    """Cut out the points in bands, and leave a gap there: no line leads through an outage."""
    for band in bands:
        before = [point for point in points if point[0] <= band.begin]
        after = [point for point in points if point[0] >= band.end]
        points = [*before, (band.begin, None), *after] if before and after else [*before, *after]
    return points


def _base(points: Points) -> Curve:
    return Curve(points=points, color="other", kind="dots", width=0.0, label="base model")


def _kind(points: Points) -> Kind:
    return "dots" if len(points) == 1 else "line"


def _scores(points: Points, label: str) -> Curve:
    few = len(points) <= MAX_DOTS
    return Curve(points=points, color="evaluator", width=1.3, kind="dots" if few else "line", label=label)
