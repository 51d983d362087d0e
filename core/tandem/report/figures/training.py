"""Training loss and evaluation score, over steps and over time."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tandem.report.clock import Clock
from tandem.report.figures.canvas import empty, restarts, shade_restarts, step_axis, time_axis
from tandem.report.run import Checkpoint, Floats, Run, Steps
from tandem.report.series import envelope, smooth, thin
from tandem.report.style import LIGHT, Look
from tandem.report.words import SHARES, metric_name, score

REDONE = "done again after a restart"

SMOOTH_SHARE = 0.02
"""Width of the running mean, of the whole run."""

MOST_POINTS = 80
"""More scores than this are a line without a dot for each."""


def draw(run: Run, clock: Clock, look: Look) -> Figure | None:
    """Loss above score, over steps and beside it (narrow: below it) over time. None without steps and scores."""
    scored = [c for c in run.checkpoints if c.evaluation and run.metric in c.evaluation.metrics]
    if not len(run.counted) and not scored:
        return None
    rows = 2 if scored else 1
    across = 1 if look.narrow else 2
    figure = empty(look, (2.35 * rows + 0.3) * (2 if look.narrow else 1), "Training loss and evaluation score")
    panels = figure.subplots(rows * (2 if look.narrow else 1), across, squeeze=False)
    for index, over in enumerate(("steps", "time")):
        column = panels[index * rows : (index + 1) * rows, 0] if look.narrow else panels[:, index]
        _loss(column[0], run, clock, look, over)
        if scored:
            _score(column[1], run, scored, clock, look, over)
        for place, axes in enumerate(column):
            last = place == len(column) - 1
            if over == "steps":
                step_axis(axes, run, label=last)
            else:
                time_axis(axes, clock, label=last)
                shade_restarts(axes, run, clock)
            if index == 0 or look.narrow:
                title = "Training loss" if place == 0 else f"Test {metric_name(run.metric)}"
                axes.set_title(title + (f", over {over}" if look.narrow else ""))
    return figure


def _loss(axes: Axes, run: Run, clock: Clock, look: Look, over: str) -> None:
    columns = 260 if look.narrow else 300
    losses = [run.counted.loss]
    for lost in run.superseded:
        x, y = envelope(_x(lost, clock, over), lost.loss, columns // 4)
        axes.plot(x, y, color=LIGHT["other"], alpha=0.75, linewidth=0.8, zorder=2.5, label=REDONE)
    if len(run.counted):
        _counted(axes, run, clock, over, columns)
    tested = [
        c
        for c in run.checkpoints
        if c.counts and c.evaluation and np.isfinite(c.evaluation.metrics.get("loss", np.nan))
    ]
    if tested:
        loss = np.array([c.evaluation.metrics["loss"] for c in tested if c.evaluation])
        losses.append(loss)
        axes.plot(
            _positions(tested, clock, over),
            loss,
            **_dots(len(tested), LIGHT["evaluator"]),
            label="test, every evaluated checkpoint",
        )
    _loss_scale(axes, np.concatenate(losses))
    if over == "steps":
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(sorted(zip(labels, handles, strict=True), key=lambda entry: entry[0] == REDONE))
        axes.legend(unique.values(), unique.keys(), loc="upper right")


def _breaks(run: Run) -> list[int]:
    """Where in the counted steps the group was not there: the line must not lead across."""
    times = run.counted.time
    stops = [went_on for _, _, went_on in restarts(run)]
    return [index for index in np.searchsorted(times, stops).tolist() if 0 < index < len(times)]


def _counted(axes: Axes, run: Run, clock: Clock, over: str, columns: int) -> None:
    steps, x = run.counted, _x(run.counted, clock, over)
    raw = np.where(np.isfinite(steps.loss), steps.loss, np.nan)
    if len(steps) == 1:
        axes.plot(x, raw, "o", color=LIGHT["trainer"], markersize=4, label="training")
    else:
        ordered = np.maximum.accumulate(x)
        width = max(5, int(len(steps) * SMOOTH_SHARE))
        mean = smooth(raw, width)
        gaps = np.array(_breaks(run) if over == "time" else [], np.int64)
        raw, mean = np.insert(raw, gaps, np.nan), np.insert(mean, gaps, np.nan)
        ordered = np.insert(ordered, gaps, ordered[gaps])
        faint: dict[str, Any] = {"color": LIGHT["trainer"], "alpha": 0.28, "linewidth": 0.7}
        # As many columns as the part of the axis has that the steps cover, or the zigzag is a solid block.
        across = clock.length if over == "time" else float(ordered[-1])
        columns = max(40, int(columns * float(ordered[-1] - ordered[0]) / (across or 1.0)))
        axes.plot(*envelope(ordered, raw, columns), **faint, label="each step")
        axes.plot(
            *thin(ordered, mean, columns),
            color=LIGHT["trainer"],
            linewidth=1.9,
            label=f"mean of {width:,} steps",
        )
    broken = x[~np.isfinite(steps.loss)]
    if len(broken):
        shown = np.unique(np.round(broken / max(float(x[-1]), 1e-9) * columns)) * max(float(x[-1]), 1e-9) / columns
        axes.plot(
            shown,
            np.full(len(shown), 0.03),
            "x",
            transform=axes.get_xaxis_transform(),
            color=LIGHT["alert"],
            markersize=5,
            label="loss not finite",
        )


def _loss_scale(axes: Axes, losses: Floats) -> None:
    good = losses[np.isfinite(losses)]
    if len(good) and good.min() > 0 and good.max() > 30 * good.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
        axes.tick_params(axis="y", which="minor", length=0)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))


def _score(axes: Axes, run: Run, scored: list[Checkpoint], clock: Clock, look: Look, over: str) -> None:
    good = [c for c in scored if c.counts]
    axes.plot(_positions(good, clock, over), _scores(good, run.metric), **_dots(len(good), LIGHT["evaluator"]))
    off = [c for c in scored if not c.counts]
    if off:
        axes.plot(
            _positions(off, clock, over), _scores(off, run.metric), "o", mfc="none", mec=LIGHT["other"], markersize=4
        )
    if run.metric in SHARES:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.margins(y=0.12)
    if run.best is not None and run.best.evaluation:
        x, y = _positions([run.best], clock, over)[0], run.best.evaluation.metrics[run.metric]
        axes.plot([x], [y], "*", color=LIGHT["checkpoint"], markersize=13, mec=LIGHT["paper"], mew=0.8, zorder=5)
        axes.set_title(
            f"best {score(run.metric, y)}" + ("" if look.narrow else f" at step {run.best.step:,}"),
            loc="right",
            color=LIGHT["checkpoint"],
            fontsize=9,
        )


def _dots(count: int, color: str) -> dict[str, Any]:
    marker = {"marker": "o", "markersize": 3.6} if count <= MOST_POINTS else {}
    return {"color": color, "linewidth": 1.3, "linestyle": "-", **marker}


def _scores(checkpoints: list[Checkpoint], metric: str) -> Floats:
    return np.array([c.evaluation.metrics[metric] for c in checkpoints if c.evaluation], np.float64)


def _positions(checkpoints: list[Checkpoint], clock: Clock, over: str) -> Floats:
    """The step, or the time at which the score was known."""
    if over == "steps":
        return np.array([c.step for c in checkpoints], np.float64)
    known = [
        c.evaluation.finished_at if c.evaluation and c.evaluation.finished_at is not None else c.at for c in checkpoints
    ]
    return clock.axis(np.array([np.nan if moment is None else moment for moment in known], np.float64))


def _x(steps: Steps, clock: Clock, over: str) -> Floats:
    return steps.step.astype(np.float64) if over == "steps" else clock.axis(steps.time)
