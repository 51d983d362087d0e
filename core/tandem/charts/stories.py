"""Which curves tell of a run: one decision for the live page and for the report. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.charts.chart import Axis, Band, Chart, Curve, Kind, Panel, Point, Points
from tandem.formatting import SHARES, metric_name, score

MOST_DOTS = 80
"""More scores than this are a line without a dot for each."""
REDONE = "done again after a restart"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What is known of loss and scores, over steps or over time."""

    each: Points = ()
    """Training loss: of each step, or the lowest and the highest of stretches."""
    mean: Points = ()
    """Its running mean."""
    mean_of: str = ""
    """What it is a mean of: `mean of 20 steps`."""
    redone: Sequence[Points] = ()
    """What a later generation did again."""
    tested: Points = ()
    """Loss of evaluated checkpoints."""
    scored: Points = ()
    """Their score."""
    off: Points = ()
    """Scores of checkpoints that do not count any more."""
    best: Point | None = None
    """The best score."""
    best_at: str = ""
    """Where it is: `at step 500`."""
    metric: str = "accuracy"
    not_finite: Sequence[float] = ()
    """Where the training loss was no number."""


def training(losses: Losses, axis: Axis, bands: Sequence[Band] = ()) -> Chart:
    """Training loss with the loss of checkpoints, above their score."""
    shaded = tuple(bands)
    curves = [Curve(points=points, color="other", width=0.9, strength=0.75, label=REDONE) for points in losses.redone]
    if losses.mean:
        each = Curve(points=losses.each, color="trainer", kind="spread", width=0.8, strength=0.3, label="each step")
        curves.append(each)
        curves.append(Curve(points=losses.mean, color="trainer", label=losses.mean_of or "mean"))
    else:
        curves.append(Curve(points=losses.each, color="trainer", label="training", kind=_kind(losses.each)))
    if losses.tested:
        curves.append(_scores(losses.tested, "test, every evaluated checkpoint"))
    panels = [
        Panel(
            title="Training loss",
            curves=tuple(curves),
            may_be_logarithmic=True,
            bands=shaded,
            flags=tuple(losses.not_finite),
            flag="loss not finite",
        )
    ]
    if losses.scored or losses.off:
        panels.append(_scored(losses, shaded))
    return Chart(axis=axis, panels=tuple(panels))


def _scored(losses: Losses, bands: tuple[Band, ...]) -> Panel:
    curves = [_scores(losses.scored, "")]
    if losses.off:
        curves.append(Curve(points=losses.off, color="other", kind="dots", width=0.0))
    aside = ""
    if losses.best is not None and losses.best[1] is not None:
        curves.append(Curve(points=(losses.best,), color="checkpoint", kind="star"))
        aside = f"best {score(losses.metric, losses.best[1])} {losses.best_at}".strip()
    return Panel(
        title=f"Test {metric_name(losses.metric)}",
        curves=tuple(curves),
        unit="share" if losses.metric in SHARES else "number",
        bands=bands,
        aside=aside,
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
    curves = [Curve(points=spread, color="trainer", kind="spread", width=0.7, strength=0.35)] if spread else []
    curves.append(Curve(points=throughput, color="trainer", filled=True, width=1.5, kind=_kind(throughput)))
    shaded = tuple(bands)
    silent = tuple(Band(begin=band.begin, end=band.end) for band in shaded)
    group = Curve(points=sizes, color="trainer", kind="stairs", width=1.5, filled=True)
    return Chart(
        axis=axis,
        panels=(
            Panel(title="Throughput (samples/s)", curves=tuple(curves), from_zero=True, bands=shaded),
            Panel(
                title="World size (ranks)", curves=(group,), unit="count", from_zero=True, bands=silent, height=0.5
            ),
        ),
    )  # fmt: skip


def _kind(points: Points) -> Kind:
    return "dots" if len(points) == 1 else "line"


def _scores(points: Points, label: str) -> Curve:
    few = len(points) <= MOST_DOTS
    return Curve(points=points, color="evaluator", width=1.3, kind="dots" if few else "line", label=label)
