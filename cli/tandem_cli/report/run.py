"""The data of a run as values: the result of reading, and the input of summary, figures and page.

Times are in seconds since the epoch. Arrays of one object have the same length and the order of the log they come from.
Unknown values are None or NaN, never 0.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tandem.confidence import Estimate, Interval, count_tied, steps_forward
from tandem.evaluation import Completions, Histogram
from tandem.job.resource import DistributedTrainingJob
from tandem.model import MAX_TIMESTAMP
from tandem.rundir.evaluations import direction
from tandem.wire.ledger import Ledger
from tandem.wire.measures import Generation
from tandem.wire.status import ProvenanceHead, Troubles
from tandem.wire.trace import RunTimeline
from tandem_coordinator.charts.gallery import Tile

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

Kind = Literal["trainer", "gpu", "evaluator"]
RunState = Literal["Succeeded", "Failed", "Running", "Stopped"]


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of a run, or of one generation."""

    step: Ints
    """[N] Number of the step."""
    time: Floats
    """[N] Time at which it was logged."""
    loss: Floats
    """[N] Training loss; NaN and infinity as logged."""
    measures: dict[str, Floats] = field(default_factory=dict)
    """Other logged values, such as `lr`: [N] each, NaN in steps without one."""
    lossless: npt.NDArray[np.bool_] | None = None
    """[N] Whether a step was logged without a loss; None if all have one."""

    def __len__(self) -> int:
        return len(self.step)

    def select(self, selection: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> "Steps":
        """Select steps, by mask or by index."""
        measures = {name: values[selection] for name, values in self.measures.items()}
        lossless = None if self.lossless is None else self.lossless[selection]
        return Steps(self.step[selection], self.time[selection], self.loss[selection], measures, lossless)

    @property
    def broken(self) -> npt.NDArray[np.bool_]:
        """[N] Whether the loss that was logged is NaN or infinite."""
        # A step that was logged without a loss has NaN here, and is not broken.
        broken: npt.NDArray[np.bool_] = ~np.isfinite(self.loss)
        return broken if self.lossless is None else broken & ~self.lossless

    @property
    def last_loss(self) -> float | None:
        """Loss of the last step that has one; None if that is NaN or infinite, or there is none."""
        # Steps without a loss are skipped; a loss that is NaN is the last one all the same.
        logged = self.loss if self.lossless is None else self.loss[~self.lossless]
        return float(logged[-1]) if len(logged) and np.isfinite(logged[-1]) else None


@dataclass(frozen=True)
class Rates:
    """Speed of training, measured at intervals."""

    time: Floats
    """[N] End of the interval."""
    throughput: Floats
    """[N] Samples a second over all ranks."""
    seconds: Floats
    """[N] Length of the interval: since the line before, or since the generation's start."""
    phases: dict[str, Floats]
    """Seconds of each phase in the interval, [N] each."""

    def __len__(self) -> int:
        return len(self.time)


@dataclass(frozen=True)
class World:
    """Size of the training group, and its throughput as the coordinator measured it."""

    time: Floats
    """[N] Time of the sample."""
    size: Ints
    """[N] Number of ranks."""
    throughput: Floats
    """[N] Samples a second over all ranks, NaN without ranks."""


@dataclass(frozen=True)
class OfRank:
    """Values that one rank reports over time."""

    rank: str
    """Number of the rank."""
    time: Floats
    """[N] Time of the sample."""
    value: Floats
    """[N] The value; NaN if the rank reported none."""


@dataclass(frozen=True)
class Use:
    """Processor use of one rank, GPU or evaluator over time."""

    name: str
    """Name of the process."""
    kind: Kind
    """Kind of processor and process."""
    time: Floats
    """[N] Time of the sample."""
    busy: Floats
    """[N] Busy cores since the sample before (GPU: busy share, 0 to 1); NaN while the process was absent."""


@dataclass(frozen=True)
class EvaluationWork:
    """Evaluation of one shard of a checkpoint by one evaluator."""

    evaluator: str
    """Name of the evaluator."""
    checkpoint: str
    """Name of the checkpoint."""
    generation: int | None
    """The generation that wrote the checkpoint."""
    step: int
    """The checkpoint's step."""
    begin: float
    """Start."""
    end: float
    """End."""


@dataclass(frozen=True)
class RunEvaluation:
    """Merged evaluation of one checkpoint."""

    metrics: dict[str, float]
    """Scores on the test data."""
    intervals: dict[str, Interval] = field(default_factory=dict)
    """95 % confidence intervals of the scores on the test data, of those that have one."""
    estimates: dict[str, Estimate] = field(default_factory=dict)
    """Scores that rank it, with their confidence intervals: on the validation data, if the job holds some out."""
    validation: dict[str, float] = field(default_factory=dict)
    """Scores on the validation data; empty if none is held out."""
    samples: int | None = None
    """Evaluated samples."""
    per_class_f1: Floats = field(default_factory=lambda: np.empty(0))
    """F1 of each class, [classes]."""
    confusion: Ints = field(default_factory=lambda: np.empty((0, 0), np.int64))
    """Confusion matrix, [true class, predicted class], counts; (0, 0) without one."""
    histograms: dict[str, Histogram] = field(default_factory=dict)
    """Histograms by name, as a program reported them."""
    has_completions: bool = False
    """Whether its file has completions of a language model."""
    started_at: float | None = None
    """Start of the first shard."""
    finished_at: float | None = None
    """Time of the merged result."""

    @property
    def deciding(self) -> dict[str, float]:
        """Scores that rank it."""
        return {name: estimate.value for name, estimate in self.estimates.items()}


@dataclass(frozen=True)
class RunCheckpoint:
    """Checkpoint of the run, whether it still exists or not."""

    name: str
    """Name of its folder."""
    step: int
    """Optimizer steps completed."""
    generation: int | None
    """The generation that wrote it."""
    written_at: float | None = None
    """Time of writing."""
    size: int | None = None
    """Size in bytes."""
    stall_seconds: float | None = None
    """Time that training waited for it."""
    commit_seconds: float | None = None
    """Time from the copy to the committed folder."""
    on_disk: bool = False
    """Whether it still exists."""
    counts: bool = True
    """Whether it is on the lineage of the newest generation."""
    evaluation: RunEvaluation | None = None
    """Its evaluation."""
    skipped: str | None = None
    """Reason why evaluators skipped it, if they did."""
    bad: str | None = None
    """Reason why it is bad, if it is."""
    path: str = ""
    """Path of a watched file, relative to the run directory; empty for Tandem's own checkpoints."""


@dataclass(frozen=True)
class RunEvent:
    """Event that the coordinator logged for people."""

    time: float
    """Time of the event."""
    level: str
    """info, warning or error."""
    text: str
    """Text of the event."""


@dataclass(frozen=True)
class RunData:
    """All data of a report."""

    name: str
    """Name of the job."""
    title: str
    """Name in titles: the job's, with the run directory's if that differs."""
    job: DistributedTrainingJob | None
    """The resolved job; None if its file is missing or unreadable."""
    job_text: str
    """job.json as YAML, or unchanged if it cannot be converted; "" without a file."""
    result: RunState
    """Result of the run; `Running` while there is none."""
    message: str
    """Explanation of the result, if it needs one."""
    started_at: float
    """Time of the first sign of activity."""
    ended_at: float
    """Time of the last sign of activity."""
    marks: Floats
    """[N] Ascending times at which something was logged, at most a few a second; a gap means that nothing ran."""
    total_steps: int | None
    """Steps of the whole run."""
    tokens_per_sample: float | None
    """Average tokens without padding; None if the task does not report them."""
    learned_per_sample: float | None
    """Tokens of these that the loss is computed over."""
    model_steps: Steps
    """Steps that the model contains, each once, by the latest generation that took it; ascending."""
    superseded: tuple[Steps, ...]
    """Steps that a later generation repeated, one item for each generation that has such steps."""
    rates: Rates
    """Speed of training."""
    world: World
    """Size of the group."""
    uses: tuple[Use, ...]
    """Processor use: trainers in rank order, then GPUs, then evaluators."""
    busy: tuple[OfRank, ...]
    """Seconds of each rank's own work in a step."""
    memory: tuple[OfRank, ...]
    """Bytes of GPU memory in use on each rank."""
    works: tuple[EvaluationWork, ...]
    """Work of evaluators, in order of time."""
    checkpoints: tuple[RunCheckpoint, ...]
    """All checkpoints that were written, by step and generation."""
    best: RunCheckpoint | None
    """The best evaluated checkpoint."""
    base: RunCheckpoint | None
    """The base model, if it was evaluated."""
    completions: tuple[tuple[str, Completions], ...]
    """Completions of the base model and of some checkpoints, each with its heading."""
    wrong: tuple[Tile, ...]
    """Samples that the best checkpoint misclassifies."""
    metric: str
    """Metric that ranks the checkpoints."""
    generations: tuple[Generation, ...]
    """Generations, oldest first."""
    events: tuple[RunEvent, ...]
    """Events that the coordinator logged for people."""
    unsaved: tuple[tuple[int, str], ...]
    """Saves that were skipped: step and reason."""
    troubles: Troubles
    """Problems that did not end the run."""
    missed: tuple[str, ...]
    """Warnings about a run that succeeded without doing everything it was to do, a sentence each."""
    faults: tuple[str, ...]
    """Problems with reading, a sentence each."""
    ledger: Ledger | None = None
    """GPU time, CPU time and cost by purpose."""
    provenance: ProvenanceHead | None = None
    """The end of the run's record, which `tandem prove` verifies; None if there is none that can be read."""
    timeline: RunTimeline = field(default_factory=lambda: RunTimeline("", ()))
    """Times and work of its generations, for traces."""


def with_histograms(run: RunData) -> RunCheckpoint | None:
    """Choose the checkpoint whose histograms are drawn: the best, or the newest that counts while there is no best.
    None if it has none."""
    # Superseded checkpoints are not candidates, even if they have the newest histograms.
    evaluated = [checkpoint for checkpoint in run.checkpoints if checkpoint.evaluation and checkpoint.counts]
    choice = run.best or (evaluated[-1] if evaluated else None)
    return choice if choice and choice.evaluation and choice.evaluation.histograms else None


def tied_count(run: RunData) -> int | None:
    """Count the checkpoints whose score does not differ from that of the best by more than chance; None if that is not
    known."""
    estimates = {id(checkpoint): estimate for checkpoint, estimate in _estimates(run)}
    best = estimates.pop(id(run.best), None)
    return None if best is None else count_tied(best, estimates.values())


def ahead(run: RunData) -> frozenset[str]:
    """Names of the checkpoints that were better than each before them by more than chance."""
    checkpoints = _estimates(run)
    forward = steps_forward([estimate for _, estimate in checkpoints], direction(run.job, run.metric))
    return frozenset(c.name for (c, _), is_forward in zip(checkpoints, forward, strict=True) if is_forward)


def _estimates(run: RunData) -> list[tuple[RunCheckpoint, Estimate]]:
    """The checkpoints that count and have a score, by step."""
    return [
        (checkpoint, checkpoint.evaluation.estimates[run.metric])
        for checkpoint in run.checkpoints
        if checkpoint.counts and checkpoint.evaluation and run.metric in checkpoint.evaluation.estimates
    ]


MAX_FLOAT32 = 3.5e38
"""Values above the range of float32 count as infinite."""


def number(value: object) -> float:
    """Read a number from a file; NaN for anything else. Values above the range of float32 become infinite."""
    # JSON's true is an int in Python.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if not abs(value) > MAX_FLOAT32 else math.copysign(math.inf, value)


def within(value: object, low: float, high: float) -> float:
    """Read a number that lies within plausible bounds; NaN for anything else."""
    parsed = number(value)
    return parsed if low <= parsed <= high else math.nan


def moment(value: object) -> float | None:
    """Read a time in seconds since the epoch; None for anything else."""
    seconds = within(value, 0, MAX_TIMESTAMP)
    return None if math.isnan(seconds) else seconds or None


def text(value: object) -> str:
    """Read a text; "" for anything else."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> dict[str, Any]:
    """Read an object; {} for anything else."""
    return value if isinstance(value, dict) else {}
