"""The data of a run as values: the result of reading, and the input of summary, figures and page.

Times are seconds since the epoch. Arrays of one object have the same length and the order of the log they come from.
What is not known is None or NaN, never 0.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tandem.evaluation import Completions, Histogram
from tandem.job import DistributedTrainingJob
from tandem.ledger import Ledger
from tandem.measures import Generation
from tandem.model import LATEST
from tandem.status import Troubles
from tandem_coordinator.charts.gallery import Tile

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

Kind = Literal["trainer", "gpu", "evaluator"]
Result = Literal["Succeeded", "Failed", "Running", "Stopped"]


@dataclass(frozen=True)
class Steps:
    """Optimizer steps."""

    step: Ints
    """[N] Number of the step."""
    time: Floats
    """[N] When it was logged."""
    loss: Floats
    """[N] Training loss; NaN and infinity are as they were logged."""
    measures: dict[str, Floats] = field(default_factory=dict)
    """What else was logged of them, such as `lr`: [N] each, NaN where it was not."""
    lossless: npt.NDArray[np.bool_] | None = None
    """[N] Whether no loss was logged of a step at all; None: it was of all."""

    def __len__(self) -> int:
        return len(self.step)

    def where(self, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> "Steps":
        """The chosen ones, by mask or by index."""
        measures = {name: values[chosen] for name, values in self.measures.items()}
        lossless = None if self.lossless is None else self.lossless[chosen]
        return Steps(self.step[chosen], self.time[chosen], self.loss[chosen], measures, lossless)

    @property
    def broken(self) -> npt.NDArray[np.bool_]:
        """[N] Whether the loss that was logged is NaN or infinite."""
        broken: npt.NDArray[np.bool_] = ~np.isfinite(self.loss)
        return broken if self.lossless is None else broken & ~self.lossless

    @property
    def last_loss(self) -> float | None:
        """The loss of the last step of which one was logged; None if that is NaN or infinite, or there is none."""
        logged = self.loss if self.lossless is None else self.loss[~self.lossless]
        return float(logged[-1]) if len(logged) and np.isfinite(logged[-1]) else None


@dataclass(frozen=True)
class Rates:
    """How fast training went, measured every so often."""

    time: Floats
    """[N]"""
    throughput: Floats
    """[N] Samples a second over all ranks."""
    seconds: Floats
    """[N] Length of the stretch that the phases are of: from the line before, or from the generation's start."""
    phases: dict[str, Floats]
    """For each phase [N]: seconds of it in that stretch."""

    def __len__(self) -> int:
        return len(self.time)


@dataclass(frozen=True)
class World:
    """The size of the training group, and the pace the coordinator saw."""

    time: Floats
    """[N]"""
    size: Ints
    """[N] Ranks."""
    throughput: Floats
    """[N] Samples a second over all ranks, NaN while there is none."""


@dataclass(frozen=True)
class OfRank:
    """What one rank tells of itself, over time."""

    rank: str
    """Its number."""
    time: Floats
    """[N]"""
    value: Floats
    """[N] NaN where it said nothing."""


@dataclass(frozen=True)
class Use:
    """Processor use of one rank, GPU or evaluator over time."""

    name: str
    """Of the process."""
    kind: Kind
    """Whose it is."""
    time: Floats
    """[N]"""
    busy: Floats
    """[N] Busy cores since the sample before (GPU: busy share, 0 to 1); NaN where the process was not there."""


@dataclass(frozen=True)
class Work:
    """One evaluator working on its share of one checkpoint."""

    evaluator: str
    """Name of the evaluator."""
    checkpoint: str
    """Name of the checkpoint."""
    generation: int | None
    """The generation that wrote the checkpoint."""
    step: int
    """The checkpoint's step."""
    begin: float
    """When it started."""
    end: float
    """When it was done."""


@dataclass(frozen=True)
class RunEvaluation:
    """The merged evaluation of one checkpoint."""

    metrics: dict[str, float]
    """What was measured on the test data."""
    deciding: dict[str, float] = field(default_factory=dict)
    """By what it is compared with others: on the validation data, where the job holds some out."""
    validation: dict[str, float] = field(default_factory=dict)
    """What was measured on the validation data; empty where none is held out."""
    samples: int | None = None
    """Evaluated samples."""
    per_class_f1: Floats = field(default_factory=lambda: np.empty(0))
    """[classes]"""
    confusion: Ints = field(default_factory=lambda: np.empty((0, 0), np.int64))
    """[true class, predicted class], counts; (0, 0) when there is none."""
    histograms: dict[str, Histogram] = field(default_factory=dict)
    """By name, where a program reports them."""
    has_completions: bool = False
    """Whether its file has what a language model wrote for prompts."""
    started_at: float | None = None
    """When the first shard was begun."""
    finished_at: float | None = None
    """When the result was there."""


@dataclass(frozen=True)
class RunCheckpoint:
    """A checkpoint that was written, whatever became of it."""

    name: str
    """Its folder's name."""
    step: int
    """Optimizer steps completed."""
    generation: int | None
    """The generation that wrote it."""
    at: float | None = None
    """When it was written."""
    size: int | None = None
    """Bytes."""
    stall_seconds: float | None = None
    """How long training waited for it."""
    commit_seconds: float | None = None
    """From the copy to the committed folder."""
    on_disk: bool = False
    """Whether it is still there."""
    counts: bool = True
    """Whether it lies on the lineage of the newest generation."""
    evaluation: RunEvaluation | None = None
    """Its scores."""
    skipped: str | None = None
    """Why evaluators passed it over, if they did."""
    bad: str | None = None
    """What is wrong with it, if something is."""
    path: str = ""
    """Path of a watched file, relative to the run directory; empty for a checkpoint of Tandem's."""


@dataclass(frozen=True)
class RunEvent:
    """A line of the coordinator for people."""

    at: float
    """When."""
    level: str
    """info, warning or error."""
    text: str
    """What."""


@dataclass(frozen=True)
class Run:
    """Everything a report tells."""

    name: str
    """Of the job."""
    title: str
    """Name in titles: the job's, with the run directory's where that is another."""
    job: DistributedTrainingJob | None
    """The job as it was resolved; None when its file is missing or unreadable."""
    job_text: str
    """job.json as YAML, or as it was found; "" when there is none."""
    result: Result
    """How it ended, or that it did not yet."""
    message: str
    """Why, where that needs words."""
    started_at: float
    """The first sign of life."""
    ended_at: float
    """The last sign of life."""
    marks: Floats
    """[N] Ascending times at which something was logged, at most a few a second: where there is none, nothing ran."""
    total_steps: int | None
    """Steps that were to be done."""
    tokens_per_sample: float | None
    """On average, without padding; None where the task does not say."""
    learned_per_sample: float | None
    """Tokens of these that the loss is over."""
    counted: Steps
    """The steps that made the model, each once, by the latest generation that did it; ascending."""
    superseded: tuple[Steps, ...]
    """For each generation that lost some: the steps that a later generation did again."""
    rates: Rates
    """How fast it went."""
    world: World
    """How large the group was."""
    uses: tuple[Use, ...]
    """Processor use: trainers in rank order, then GPUs, then evaluators."""
    busy: tuple[OfRank, ...]
    """Seconds of each rank's own work in a step."""
    memory: tuple[OfRank, ...]
    """Bytes of GPU memory that each rank has in use."""
    works: tuple[Work, ...]
    """What evaluators did, in order of time."""
    checkpoints: tuple[RunCheckpoint, ...]
    """All that were written, by step and generation."""
    best: RunCheckpoint | None
    """The best that was evaluated."""
    base: RunCheckpoint | None
    """The base model, where it was evaluated."""
    completions: tuple[tuple[str, Completions], ...]
    """What the base model and some checkpoints wrote for prompts; of which, in words."""
    wrong: tuple[Tile, ...]
    """Samples that the best takes for something else."""
    metric: str
    """What the best is best in."""
    generations: tuple[Generation, ...]
    """Memberships, oldest first."""
    events: tuple[RunEvent, ...]
    """What the coordinator told people."""
    unsaved: tuple[tuple[int, str], ...]
    """Saves that were skipped: step and why."""
    troubles: Troubles
    """What went wrong and did not end it."""
    missed: tuple[str, ...]
    """Warnings about a run that ended well without doing all it promised, a sentence each."""
    faults: tuple[str, ...]
    """What could not be read, a sentence each."""
    ledger: Ledger | None = None
    """GPU time, CPU time and cost by what they were for."""


def with_histograms(run: Run) -> RunCheckpoint | None:
    """The checkpoint whose histograms are shown: the best, or the newest that counts while none is the best. None if
    it has none."""
    evaluated = [one for one in run.checkpoints if one.evaluation and one.counts]
    shown = run.best or (evaluated[-1] if evaluated else None)
    return shown if shown and shown.evaluation and shown.evaluation.histograms else None


MAX_SIZE = 3.5e38
"""What no float32 can hold is infinite."""


def number(value: object) -> float:
    """The number that a file holds, NaN for anything else. What no float32 can hold is infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if not abs(value) > MAX_SIZE else math.copysign(math.inf, value)


def within(value: object, low: float, high: float) -> float:
    """The number that a file holds if it can be true, NaN for anything else."""
    found = number(value)
    return found if low <= found <= high else math.nan


def moment(value: object) -> float | None:
    """The time that a file holds, seconds since the epoch, None for anything else."""
    found = within(value, 0, LATEST)
    return None if math.isnan(found) else found or None


def text(value: object) -> str:
    """The text that a file holds, "" for anything else."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> dict[str, Any]:
    """The object that a file holds, {} for anything else."""
    return value if isinstance(value, dict) else {}
