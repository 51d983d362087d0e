"""The pictures of a report, in the order in which they tell the story."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tandem.formatting import cores, duration, metric_name, number, reason, score, several, share
from tandem.measures import outages
from tandem_cli.report.clock import Clock
from tandem_cli.report.figures import confusion, curves, phases, processors
from tandem_cli.report.run import Floats, Run, with_histograms
from tandem_cli.report.summary import Summary, time_by_phase
from tandem_coordinator.charts import bars, drawing
from tandem_coordinator.charts.chart import Chart, Look
from tandem_coordinator.charts.stories import GRADIENT_NORM, LEARNING_RATE


@dataclass(frozen=True)
class Picture:
    """One picture and what it shows."""

    name: str
    """A word: its file's name and the prefix of its SVG's ids."""
    title: str
    """The heading above it."""
    finding: str
    """What this run's picture shows, in a sentence or two."""
    svg: Callable[[str, str, str, Look], str | None]
    """Draws it for a place, by the name of the drawing, the title and a description; None when the run has nothing for
    it."""

    def draw(self, place: str, look: Look) -> str | None:
        """An svg element for a place.

        Args:
            place: a word; with the picture's name it is the prefix of the ids in the drawing.
        """
        return self.svg(f"{self.name}-{place}", self.title, self.finding, look)


def pictures(run: Run, clock: Clock, summary: Summary) -> list[Picture]:
    """All pictures that a run may have."""
    found = [
        _charted(
            "training", "Training loss and evaluation score", _training(run, summary), curves.training(run, clock)
        ),
        _charted("optimization", "Learning rate and gradient norm", _optimization(run), curves.optimization(run)),
        _charted("values", "Logged values", _values(run), curves.values(run)),
        Picture(
            "processors",
            "Training and evaluation, side by side",
            _processors(run, summary),
            lambda name, title, finding, look: processors.draw(name, title, finding, run, clock, look),
        ),
        _charted("world", "Throughput and world size", _world(run, summary), curves.world(run, clock)),
        _charted("ranks", "Throughput and work, rank by rank", _ranks(run), curves.ranks(run, clock)),
        Picture(
            "phases",
            "Where training's time went",
            _phases(run, clock),
            lambda name, title, finding, look: phases.draw(name, title, finding, run, clock, look),
        ),
        Picture(
            "confusion",
            "The best checkpoint",
            _confusion(run),
            lambda name, title, finding, look: confusion.draw(name, title, finding, run, look),
        ),
        Picture(
            "histograms",
            "Histograms",
            _histograms(run),
            lambda name, title, finding, look: _drawn_histograms(name, title, finding, run, look),
        ),
    ]
    window = processors.close_window(run)
    if window is not None:
        close = Picture(
            "close",
            "A closer look",
            "The same for a few checkpoints in the middle of the run.",
            lambda name, title, finding, look: processors.draw(name, title, finding, run, clock, look, window),
        )
        found.insert(4, close)
    return found


def _charted(name: str, title: str, finding: str, charts: tuple[Chart, ...]) -> Picture:
    def svg(name: str, title: str, finding: str, look: Look) -> str | None:
        return drawing.draw(name, title, finding, charts, look) if charts else None

    return Picture(name, title, finding, svg)


def _training(run: Run, summary: Summary) -> str:
    said = []
    finite = run.counted.loss[np.isfinite(run.counted.loss)]
    first, last = next(iter(finite), None), run.counted.last_loss
    if first is not None and last is not None:
        went = "fell" if last < first else "went"
        steps = several(summary.steps, "step")
        said.append(f"The training loss {went} from {number(float(first))} to {number(last)} in {steps}.")
    if broken := int(run.counted.broken.sum()):
        said.append(f"It was not finite in {several(broken, 'step')}.")
    if run.best and run.best.evaluation:
        value = score(run.metric, run.best.evaluation.metrics[run.metric])
        said.append(f"The best test {metric_name(run.metric)} is {value}, at step {run.best.step:,}.")
    if summary.redone:
        said.append(f"{several(summary.redone, 'step')} after the last checkpoint before a restart were done again.")
    return " ".join(said)


def _processors(run: Run, summary: Summary) -> str:
    said = []
    if summary.trainer_busy is not None:
        said.append(f"Each training process kept {cores(summary.trainer_busy)} busy on average.")
    if summary.stall_median is not None:
        part = f", {share(summary.stall_share)} of the run in all" if summary.stall_share is not None else ""
        said.append(
            f"A checkpoint held it up for {duration(summary.stall_median)} (median; at most "
            f"{duration(summary.stall_most)}){part}."
        )
    evaluators = len({work.evaluator for work in run.works})
    if evaluators:
        lag = f", each {duration(summary.lag_seconds)} after it was written (median)" if summary.lag_seconds else ""
        said.append(
            f"Meanwhile {several(evaluators, 'evaluator')} scored {summary.evaluated:,} of "
            f"{several(summary.checkpoints, 'checkpoint')}{lag}."
        )
        said.append("Outlined blocks are evaluations; a curve leads to each from its checkpoint.")
    return " ".join(said)


def _world(run: Run, summary: Summary) -> str:
    said = [f"The median is {number(summary.throughput)} samples a second."] if summary.throughput is not None else []
    changes = run.generations[1:]
    if changes:
        why = ", ".join(dict.fromkeys(reason(one.reason) for one in changes if one.reason))
        changed = f"The group changed {'once' if len(changes) == 1 else f'{len(changes):,} times'}"
        missing = next((outage.without for outage in outages(run.generations)), "step")
        said.append(changed + (f": {why}." if why else ".") + f" Shaded: time without a {missing}.")
    elif run.generations:
        said.append("The group never changed.")
    return " ".join(said)


def _optimization(run: Run) -> str:
    said = []
    for name, what in ((LEARNING_RATE, "The learning rate"), (GRADIENT_NORM, "The gradient norm")):
        values = run.counted.measures.get(name, np.empty(0))
        if len(known := values[np.isfinite(values)]):
            said.append(f"{what} {_way(known)}.")
    return " ".join(said)


def _values(run: Run) -> str:
    said = []
    for name, values in run.counted.measures.items():
        known = values[np.isfinite(values)]
        if name not in (LEARNING_RATE, GRADIENT_NORM) and len(known):
            said.append(f"{name} {_way(known)}.")
    return " ".join(said)


def _way(values: Floats) -> str:
    first, last, least, most = (number(float(one)) for one in (values[0], values[-1], values.min(), values.max()))
    if least == most:
        return f"stayed at {first}"
    return (
        f"went from {first} to {last}" if first != last else f"began and ended at {first}, between {least} and {most}"
    )


def _ranks(run: Run) -> str:
    if run.busy:
        return "Own work is what a rank does without waiting for others: a rank far above the rest holds all up."
    return "The throughput of all ranks, by their number."


def _phases(run: Run, clock: Clock) -> str:
    total = time_by_phase(run, clock)
    whole = sum(total.values())
    if not whole or "compute" not in total:
        return ""
    part = share(total["compute"] / whole)
    return f"{part} of the training time went into steps: computing, and waiting for other ranks."


def _confusion(run: Run) -> str:
    if run.best is None or run.best.evaluation is None:
        return ""
    evaluation = run.best.evaluation
    scores = ", ".join(f"{metric_name(name)} {score(name, value)}" for name, value in evaluation.metrics.items())
    samples = f" over {evaluation.samples:,} test samples" if evaluation.samples else ""
    return f"Step {run.best.step:,}: {scores}{samples}."


def _histograms(run: Run) -> str:
    shown = with_histograms(run)
    if shown is None or shown.evaluation is None:
        return ""
    left_out = len(shown.evaluation.histograms) - bars.MAX_COUNT
    which = "the best checkpoint" if shown is run.best else "the newest checkpoint"
    return f"Of {which}, at step {shown.step:,}." + (f" {left_out} more are left out." if left_out > 0 else "")


def _drawn_histograms(name: str, title: str, finding: str, run: Run, look: Look) -> str | None:
    shown = with_histograms(run)
    if shown is None or shown.evaluation is None:
        return None
    found = shown.evaluation.histograms
    described = " ".join([finding, *(f"{name}: {bars.told(one)}." for name, one in found.items())])
    return bars.draw(name, title, described, found, look)
