"""The pictures of a report, in the order of the page."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tandem.formatting import confidence, cores, count_noun, duration, metric_name, number, reason, score, share
from tandem.wire.measures import outages
from tandem_cli.report.clock import Clock
from tandem_cli.report.figures import confusion, curves, phases, processors, waterfall
from tandem_cli.report.run import Floats, RunData, with_histograms
from tandem_cli.report.summary import Summary, time_by_phase
from tandem_coordinator.charts import bars, drawing
from tandem_coordinator.charts.chart import Chart, Viewport
from tandem_coordinator.charts.stories import GRADIENT_NORM, LEARNING_RATE


@dataclass(frozen=True)
class Picture:
    """Picture of a report with its finding."""

    name: str
    """Word that names its file and prefixes the ids of its SVG."""
    title: str
    """The heading above it."""
    finding: str
    """Finding of this run's picture, in a sentence or two."""
    svg: Callable[[str, str, str, Viewport], str | None]
    """Draws it, from the name of the drawing, the title, a description and the style; None if the run has no data
    for it."""

    def draw(self, place: str, style: Viewport) -> str | None:
        """Draw an svg element for a place.

        Args:
            place: a word; with the picture's name it prefixes the ids in the drawing.
        """
        return self.svg(f"{self.name}-{place}", self.title, self.finding, style)


def pictures(run: RunData, clock: Clock, summary: Summary) -> list[Picture]:
    """List all pictures that a run may have."""
    trace = waterfall.select(run)
    listed_pictures = [
        _charted(
            "training", "Training loss and evaluation score", _training(run, summary), curves.training(run, clock)
        ),
        _charted("optimization", "Learning rate and gradient norm", _optimization(run), curves.optimization(run)),
        _charted("values", "Logged values", _values(run), curves.values(run)),
        Picture(
            "processors",
            "Training and evaluation, side by side",
            _processors(run, summary),
            lambda name, title, finding, style: processors.draw(name, title, finding, run, clock, style),
        ),
        _charted("world", "Throughput and world size", _world(run, summary), curves.world(run, clock)),
        _charted("ranks", "Throughput and work, rank by rank", _ranks(run), curves.ranks(run, clock)),
        Picture(
            "phases",
            "Where training's time went",
            _phases(run, clock),
            lambda name, title, finding, style: phases.draw(name, title, finding, run, clock, style),
        ),
        Picture(
            "waterfall",
            "Where the time of the start went"
            if trace is not None and trace.kind == "start"
            else "Where the time of the last failure went",
            "" if trace is None else waterfall.finding(trace),
            lambda name, title, finding, style: waterfall.draw(name, title, finding, run, style),
        ),
        Picture(
            "confusion",
            "The best checkpoint",
            _confusion(run),
            lambda name, title, finding, style: confusion.draw(name, title, finding, run, style),
        ),
        Picture(
            "histograms",
            "Histograms",
            _histograms(run),
            lambda name, title, finding, style: _drawn_histograms(name, title, finding, run, style),
        ),
    ]
    window = processors.close_window(run)
    if window is not None:
        close = Picture(
            "close",
            "A closer look",
            "The same for a few checkpoints in the middle of the run.",
            lambda name, title, finding, style: processors.draw(name, title, finding, run, clock, style, window),
        )
        listed_pictures.insert(4, close)
    return listed_pictures


def _charted(name: str, title: str, finding: str, charts: tuple[Chart, ...]) -> Picture:
    def svg(name: str, title: str, finding: str, style: Viewport) -> str | None:
        return drawing.draw(name, title, finding, charts, style) if charts else None

    return Picture(name, title, finding, svg)


def _training(run: RunData, summary: Summary) -> str:
    sentences = []
    finite = run.model_steps.loss[np.isfinite(run.model_steps.loss)]
    first, last = next(iter(finite), None), run.model_steps.last_loss
    if first is not None and last is not None:
        went = "fell" if last < first else "went"
        steps = count_noun(summary.steps, "step")
        sentences.append(f"The training loss {went} from {number(float(first))} to {number(last)} in {steps}.")
    if broken := int(run.model_steps.broken.sum()):
        sentences.append(f"It was not finite in {count_noun(broken, 'step')}.")
    if run.best and run.best.evaluation:
        evaluation = run.best.evaluation
        value = score(run.metric, evaluation.metrics[run.metric])
        value += confidence(run.metric, evaluation.intervals.get(run.metric))
        sentences.append(f"The best test {metric_name(run.metric)} is {value}, at step {run.best.step:,}.")
    if summary.redone:
        sentences.append(
            f"{count_noun(summary.redone, 'step')} after the last checkpoint before a restart were done again."
        )
    return " ".join(sentences)


def _processors(run: RunData, summary: Summary) -> str:
    sentences = []
    if summary.trainer_busy is not None:
        sentences.append(f"Each training process kept {cores(summary.trainer_busy)} busy on average.")
    if summary.stall_median is not None:
        part = f", {share(summary.stall_share)} of the run in all" if summary.stall_share is not None else ""
        sentences.append(
            f"A checkpoint stalled it for {duration(summary.stall_median)} (median; at most "
            f"{duration(summary.stall_longest)}){part}."
        )
    evaluators = len({work.evaluator for work in run.works})
    if evaluators:
        lag = f", each {duration(summary.lag_seconds)} after it was written (median)" if summary.lag_seconds else ""
        sentences.append(
            f"Meanwhile {count_noun(evaluators, 'evaluator')} scored {summary.evaluated:,} of "
            f"{count_noun(summary.checkpoints, 'checkpoint')}{lag}."
        )
        sentences.append("Outlined blocks are evaluations; a curve leads to each from its checkpoint.")
    return " ".join(sentences)


def _world(run: RunData, summary: Summary) -> str:
    sentences = (
        [f"The median is {number(summary.throughput)} samples a second."] if summary.throughput is not None else []
    )
    changes = run.generations[1:]
    if changes:
        reasons = ", ".join(dict.fromkeys(reason(change.reason) for change in changes if change.reason))
        changed = f"The group changed {'once' if len(changes) == 1 else f'{len(changes):,} times'}"
        missing = next((outage.without for outage in outages(run.generations)), "step")
        sentences.append(changed + (f": {reasons}." if reasons else ".") + f" Shaded: time without a {missing}.")
    elif run.generations:
        sentences.append("The group never changed.")
    return " ".join(sentences)


def _optimization(run: RunData) -> str:
    sentences = []
    for name, subject in ((LEARNING_RATE, "The learning rate"), (GRADIENT_NORM, "The gradient norm")):
        values = run.model_steps.measures.get(name, np.empty(0))
        if len(finite := values[np.isfinite(values)]):
            sentences.append(f"{subject} {_course(finite)}.")
    return " ".join(sentences)


def _values(run: RunData) -> str:
    sentences = []
    for name, values in run.model_steps.measures.items():
        finite = values[np.isfinite(values)]
        if name not in (LEARNING_RATE, GRADIENT_NORM) and len(finite):
            sentences.append(f"{name} {_course(finite)}.")
    return " ".join(sentences)


def _course(values: Floats) -> str:
    first, last, lowest, highest = (
        number(float(value)) for value in (values[0], values[-1], values.min(), values.max())
    )
    if lowest == highest:
        return f"stayed at {first}"
    return (
        f"went from {first} to {last}"
        if first != last
        else f"began and ended at {first}, between {lowest} and {highest}"
    )


def _ranks(run: RunData) -> str:
    if run.busy:
        return "Own work is what a rank does without waiting for others: a rank far above the rest holds all up."
    return "The throughput of all ranks, by their number."


def _phases(run: RunData, clock: Clock) -> str:
    total = time_by_phase(run, clock)
    total_seconds = sum(total.values())
    if not total_seconds or "compute" not in total:
        return ""
    part = share(total["compute"] / total_seconds)
    return f"{part} of the training time went into steps: computing, and waiting for other ranks."


def _confusion(run: RunData) -> str:
    if run.best is None or run.best.evaluation is None:
        return ""
    evaluation = run.best.evaluation
    scores = ", ".join(f"{metric_name(name)} {score(name, value)}" for name, value in evaluation.metrics.items())
    samples = f" over {evaluation.samples:,} test samples" if evaluation.samples else ""
    return f"Step {run.best.step:,}: {scores}{samples}."


def _histograms(run: RunData) -> str:
    checkpoint = with_histograms(run)
    if checkpoint is None or checkpoint.evaluation is None:
        return ""
    omitted = len(checkpoint.evaluation.histograms) - bars.MAX_COUNT
    which = "the best checkpoint" if checkpoint is run.best else "the newest checkpoint"
    return f"Of {which}, at step {checkpoint.step:,}." + (f" {omitted} more are left out." if omitted > 0 else "")


def _drawn_histograms(name: str, title: str, finding: str, run: RunData, style: Viewport) -> str | None:
    checkpoint = with_histograms(run)
    if checkpoint is None or checkpoint.evaluation is None:
        return None
    histograms = checkpoint.evaluation.histograms
    described = " ".join([finding, *(f"{name}: {bars.describe(histogram)}." for name, histogram in histograms.items())])
    return bars.draw(name, title, described, histograms, style)
