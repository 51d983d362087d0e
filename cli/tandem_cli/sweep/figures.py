"""Pictures of a sweep: scores in the order of the trials, scores over steps, and parallel coordinates of the values."""

import math
from collections.abc import Mapping, Sequence

from tandem.formatting import SHARES, metric_name, printable, score, truncate_end
from tandem.job.sweep import Dimension
from tandem_cli.sweep.definition import short_path
from tandem_cli.sweep.study import Trial, ascending, best_of
from tandem_cli.sweep.table import value_text
from tandem_coordinator.charts import drawing
from tandem_coordinator.charts.chart import Axis, Chart, Curve, Kind, Panel, Role, Unit, Viewport
from tandem_coordinator.charts.drawing import framed, line, text

MAX_CURVES = 60
"""Trials whose scores over steps are lines: the best ones."""
MAX_LINES = 400
"""Trials in the parallel coordinates: the best ones."""
HEIGHT, TOP, BOTTOM = 230.0, 40.0, 26.0
"""Pixels of an axis of parallel coordinates, above it, and below it."""
MARGIN = 46.0
MAX_LENGTH = 18
"""Length of a name above an axis, in characters."""
MAX_LEFT = 6
"""Length of a label left of the first axis, in characters."""
MAX_LABELS = 12
"""Values with a label at an axis of choices."""


def history(trials: Sequence[Trial], metric: str, goal: str) -> tuple[Chart, ...]:
    """Chart the score of each trial, and the best one so far; empty while there is none."""
    scored = [trial for trial in trials if trial.score is not None]
    if not scored:
        return ()
    better = max if goal == "Maximize" else min
    best: list[tuple[float, float]] = []
    for trial in scored:
        if trial.state == "Complete" and trial.score is not None:
            best.append((float(trial.number), better(trial.score, best[-1][1]) if best else trial.score))
    if best:
        best.append((float(trials[-1].number), best[-1][1]))
    curves = [
        _dots([trial for trial in scored if trial.state != "Complete"], "other", "pruned or running"),
        _dots([trial for trial in scored if trial.state == "Complete"], "evaluator", "complete"),
        Curve(points=best, color="trainer", label="best so far", kind="stairs"),
    ]
    panel = Panel(title=_title(metric), curves=tuple(curve for curve in curves if curve.points), unit=_unit(metric))
    axis = Axis(low=-0.5, high=trials[-1].number + 0.5, label="trial", whole=True)
    return (Chart(axis=axis, panels=(panel,)),)


def curves(trials: Sequence[Trial], metric: str, goal: str) -> tuple[Chart, ...]:
    """Chart the scores of trials over their steps: the best one, complete ones, and pruned ones."""
    best = best_of(trials, goal)
    scored = sorted((trial for trial in trials if trial.scores), key=lambda trial: ascending(trial.score or 0.0, goal))
    lines = [_curve(trial, best is not None and trial.number == best.number) for trial in reversed(scored[:MAX_CURVES])]
    if not lines:
        return ()
    last = max(step for trial in scored for step in trial.scores)
    labels: set[str] = set()
    labelled = []
    for curve in reversed(lines):
        labelled.append(curve if curve.label not in labels else _unlabelled(curve))
        labels.add(curve.label)
    panel = Panel(title=_title(metric), curves=tuple(reversed(labelled)), unit=_unit(metric))
    return (Chart(axis=Axis(low=0.0, high=float(last), label="step", whole=True), panels=(panel,)),)


def parallel(
    name: str,
    title: str,
    description: str,
    trials: Sequence[Trial],
    space: Mapping[str, Dimension],
    metric: str,
    goal: str,
    viewport: Viewport,
) -> str | None:
    """Draw parallel coordinates: an axis for each field and one for the score, and a line for each trial. None while no
    trial has a score.

    Args:
        name: prefix of the ids in the drawing.
        description: description for readers who cannot see it.
    """
    scored = sorted(
        (trial for trial in trials if trial.score is not None), key=lambda trial: ascending(trial.score or 0.0, goal)
    )
    visible = scored[:MAX_LINES]
    if not visible:
        return None
    best = best_of(trials, goal)
    scores = [trial.score for trial in visible if trial.score is not None]
    axes = [_Axis(short_path(path, space), dimension) for path, dimension in space.items()]
    last = _Axis(metric_name(printable(metric)), Dimension(low=min(scores), high=max(scores) + 1e-12), metric)
    gap = (viewport.width - 2 * MARGIN) / len(axes)
    parts: list[str] = []
    for trial in reversed(visible):
        heights = [own.height(trial.values.get(path)) for own, path in zip(axes, space, strict=True)]
        points = [(MARGIN + index * gap, TOP + HEIGHT * (1 - y)) for index, y in enumerate(heights) if y is not None]
        points.append((MARGIN + len(axes) * gap, TOP + HEIGHT * (1 - (last.height(trial.score) or 0.0))))
        is_best = best is not None and trial.number == best.number
        color: Role = "trainer" if is_best else "evaluator" if trial.state == "Complete" else "other"
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        width, strength = (2.6, 1.0) if is_best else (1.2, 0.55)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="var(--{color})" stroke-width="{width}" '
            f'stroke-opacity="{strength}"/>'
        )
    for index, own in enumerate([*axes, last]):
        parts += own.draw(MARGIN + index * gap, index, len(axes))
    return framed(name, title, description, parts, viewport.width, TOP + HEIGHT + BOTTOM)


class _Axis:
    """An axis of parallel coordinates.

    Args:
        metric: metric of the scores on it; empty: values of a field.
    """

    def __init__(self, label: str, dimension: Dimension, metric: str = "") -> None:
        self._label, self._dimension, self._metric = label, dimension, metric

    def height(self, value: object) -> float | None:
        """Position of a value, from 0 at the foot to 1; None if it has none."""
        values, low, high = self._dimension.values, self._dimension.low, self._dimension.high
        if values is not None:
            return (values.index(value) + 0.5) / len(values) if value in values else None
        if low is None or high is None or not isinstance(value, int | float):
            return None
        if self._dimension.log:
            low, high, value = math.log(low), math.log(high), math.log(value) if value > 0 else -math.inf
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def draw(self, x: float, index: int, last: int) -> list[str]:
        """Draw the line, its label and its values."""
        anchor = "start" if index == 0 else "end" if index == last else "middle"
        edge = 0.0 if index == 0 else x + MARGIN if index == last else x
        # Neighbours on two lines have room for longer names.
        above = TOP - 24 if index % 2 else TOP - 10
        parts = [
            line(x, TOP, x, TOP + HEIGHT, "line", 1.4),
            text(edge, above, truncate_end(printable(self._label), MAX_LENGTH), "ink", anchor, bold=True),
        ]
        labels = self._labels()
        # Before the first axis is room for short ones only.
        is_left = index == last or (index == 0 and max(len(value) for value, _ in labels) <= MAX_LEFT)
        side, align = (x - 5, "end") if is_left else (x + 5, "start")
        for value, height in labels:
            parts.append(text(side, TOP + HEIGHT * (1 - height) + 4, value, "muted", align, size=11))
        return parts

    def _labels(self) -> list[tuple[str, float]]:
        values, low, high = self._dimension.values, self._dimension.low, self._dimension.high
        if values is not None:
            names = [truncate_end(printable(value_text(value)), MAX_LENGTH) for value in values]
            step = -(-len(names) // MAX_LABELS)
            return [(name, (place + 0.5) / len(names)) for place, name in enumerate(names)][::step]
        assert low is not None, "a rule of the model"
        assert high is not None, "a rule of the model"
        if self._metric:
            return [(score(self._metric, low), 0.0), (score(self._metric, high), 1.0)]
        middle = math.sqrt(low * high) if self._dimension.log else (low + high) / 2
        return [(value_text(value), height) for value, height in ((low, 0.0), (middle, 0.5), (high, 1.0))]


def draw(name: str, title: str, description: str, charts: tuple[Chart, ...], viewport: Viewport) -> str | None:
    """Draw charts as an svg element; None if there are none."""
    return drawing.draw(name, title, description, charts, viewport) if charts else None


def _dots(trials: Sequence[Trial], color: Role, label: str) -> Curve:
    points = [(float(trial.number), trial.score) for trial in trials]
    return Curve(points=points, color=color, label=label, kind="dots", width=0.0)


def _curve(trial: Trial, is_best: bool) -> Curve:
    color: Role = "trainer" if is_best else "evaluator" if trial.state == "Complete" else "other"
    label = "best" if is_best else "complete" if trial.state == "Complete" else "pruned or running"
    points = [(float(step), value) for step, value in trial.scores.items()]
    kind: Kind = "line" if len(points) > 1 else "dots"
    return Curve(
        points=points,
        color=color,
        label=label,
        kind=kind,
        width=2.4 if is_best else 1.2,
        strength=1.0 if is_best else 0.6,
    )


def _unlabelled(curve: Curve) -> Curve:
    return Curve(points=curve.points, color=curve.color, kind=curve.kind, width=curve.width, strength=curve.strength)


def _title(metric: str) -> str:
    return metric_name(printable(metric)).capitalize()


def _unit(metric: str) -> Unit:
    return "share" if metric in SHARES else "number"
