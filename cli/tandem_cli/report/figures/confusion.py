"""The confusion matrix of the best checkpoint, and the F1 score of each class."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tandem.charts.chart import LIGHT
from tandem.tasks import class_names
from tandem_cli.report.figures.painted import empty
from tandem_cli.report.run import Floats, Ints, Run
from tandem_cli.report.style import Theme

MOST_LABELLED = 20
"""Classes that have room for a number in each cell."""

MOST_CELLS = 64
"""Classes whose cells are drawn one by one; more are drawn as an image."""

MOST_BARS = 20
"""Classes there is room for; of more classes the worst are shown."""


def draw(run: Run, look: Theme) -> Figure | None:
    """Matrix beside bars (narrow: above them). None without an evaluation that has either."""
    evaluation = run.best.evaluation if run.best else None
    if evaluation is None or not (len(evaluation.confusion) or len(evaluation.per_class_f1)):
        return None
    parts = [part for part in (evaluation.confusion, evaluation.per_class_f1) if len(part)]
    down, across = (len(parts), 1) if look.narrow else (1, len(parts))
    figure = empty(look, 3.65 * down if look.narrow else 4.6, f"The best checkpoint, step {run.best.step:,}")  # type: ignore[union-attr]
    panels = iter(figure.subplots(down, across, squeeze=False, **_ratios(down)).ravel())
    names = _names(run, max(len(part) for part in parts))
    if len(evaluation.confusion):
        _matrix(next(panels), evaluation.confusion, names)
    if len(evaluation.per_class_f1):
        _f1(next(panels), evaluation.per_class_f1, names)
    return figure


def _ratios(down: int) -> dict[str, Any]:
    return {"height_ratios": (1.25, 1)} if down == 2 else {}


def _names(run: Run, classes: int) -> list[str]:
    data = run.job.spec.trainer.settings.data.name if run.job and run.job.spec.trainer.task else ""
    names = class_names(data)
    return list(names) if classes == len(names) else [str(index) for index in range(classes)]


def _matrix(axes: Axes, confusion: Ints, names: list[str]) -> None:
    classes = len(confusion)
    share = confusion / np.maximum(1, confusion.sum(axis=1, keepdims=True))
    axes.set_title("Confusion (rows: truth, columns: answer)")
    axes.set_xlim(0, classes)
    axes.set_ylim(classes, 0)
    axes.set_aspect("equal", adjustable="box")
    axes.grid(visible=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    if classes <= MOST_CELLS:
        _cells(axes, share)
    else:
        shades = np.zeros((classes, classes, 4))
        shades[..., :3] = tuple(int(LIGHT["evaluator"][at : at + 2], 16) / 255 for at in (1, 3, 5))
        shades[..., 3] = np.sqrt(share)
        axes.imshow(shades, extent=(0, classes, classes, 0), interpolation="nearest")
    if classes <= MOST_LABELLED:
        for truth, answer in np.argwhere(confusion > 0):
            diagonal = truth == answer
            axes.text(
                answer + 0.5,
                truth + 0.5,
                f"{confusion[truth, answer]:,}",
                ha="center",
                va="center",
                fontsize=8 if confusion.max() < 1000 else 7,
                color=LIGHT["paper"] if share[truth, answer] > 0.5 else LIGHT["ink"],
                fontweight="normal" if diagonal else "bold",
            )
        _ticks(axes, names)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def _cells(axes: Axes, share: Floats) -> None:
    """A square for each cell: strong on the diagonal, and wrong answers lifted so that one in a hundred still shows."""
    truth = np.eye(len(share), dtype=bool)
    for color, chosen in ((LIGHT["trainer"], truth), (LIGHT["alert"], ~truth)):
        where = np.argwhere(chosen & (share > 0))
        patches = [Rectangle((answer + 0.03, row + 0.03), 0.94, 0.94) for row, answer in where]
        strength = [float(np.sqrt(share[row, answer])) for row, answer in where]
        for patch, alpha in zip(patches, strength, strict=True):
            patch.set(facecolor=color, alpha=round(max(0.15, alpha), 2), edgecolor="none")
        axes.add_collection(PatchCollection(patches, match_original=True))
    empty_cells = [Rectangle((c + 0.03, r + 0.03), 0.94, 0.94) for r, c in np.argwhere(share == 0)]
    axes.add_collection(PatchCollection(empty_cells, facecolor=LIGHT["grid"], edgecolor="none"))


def _ticks(axes: Axes, names: list[str]) -> None:
    places = np.arange(len(names)) + 0.5
    long = max(len(name) for name in names) > 3
    axes.set_xticks(places, names, rotation=45 if long else 0, ha="right" if long else "center")
    axes.set_yticks(places, names)
    axes.tick_params(length=0)


def _f1(axes: Axes, f1: Floats, names: list[str]) -> None:
    order = np.arange(len(f1))
    title = "F1 of each class"
    if len(f1) > MOST_BARS:
        order = np.argsort(np.nan_to_num(f1, nan=-1.0), kind="stable")[:MOST_BARS]
        title = f"F1, the {MOST_BARS} worst of {len(f1)} classes"
    values = np.nan_to_num(f1[order])
    low = 0.0 if values.min() < 0.6 else float(np.floor(values.min() * 20 - 0.5) / 20)
    axes.set_title(title)
    places = np.arange(len(order))
    axes.hlines(places, low, values, color=LIGHT["evaluator"], alpha=0.35, linewidth=1.4)
    axes.plot(values, places, "o", color=LIGHT["evaluator"], markersize=6, clip_on=False)
    for place, value in zip(places, values, strict=True):
        axes.annotate(
            f"{100 * value:.1f}",
            (value, place),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            annotation_clip=False,
        )
    axes.set_yticks(np.arange(len(order)), [names[index] for index in order])
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_xlim(low, 1.0)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
