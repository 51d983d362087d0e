"""The timeline of a run, from its logs: it covers the time before the page was opened and before this coordinator
started.

The logs are in the run directory, so nothing has to be kept while nobody looks, and a coordinator that has restarted
shows the whole run. They are read from their beginning, in bites, by a thread that rests three times as long as it
reads: a week's log is read after half a minute, and heartbeats do not notice. What is kept of them is bounded.

Rejected: keeping the history on the coordinator's event loop as it happens (memory and time for a page that nobody
looks at, and nothing after a restart); a process of its own (a second Python in a pod of 128 MiB).
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import zip_longest

from tandem.confidence import steps_forward
from tandem.evaluation import Completions, Histogram
from tandem.rundir import catalog, evaluations, records
from tandem.rundir.catalog import EvaluationResult, Lineage, Results
from tandem.rundir.evaluations import Goal
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogReader
from tandem.rundir.records import COORDINATOR, TRAINING, AnyRecord, CoordinatorRecord, TrainingRecord
from tandem.rundir.timeline import TrainingFold, merged, with_handed_over
from tandem.rundir.wrong_samples import gallery
from tandem.script import MAX_VALUES
from tandem.wire.measures import PAUSE_SECONDS, SAME_SECONDS, Generation
from tandem.wire.status import CheckpointRef
from tandem_coordinator.charts.completions import heading
from tandem_coordinator.charts.gallery import Tile, tiles
from tandem_coordinator.charts.series import Series

MAX_FOLDERS = 1000
"""Maximum number of results, the newest; older ones are left to `tandem report`."""
Key = tuple[str, int]
"""A checkpoint's name and its generation: after a restart a name may be reused."""

BITE_BYTES = 32 * 2**10
"""Bytes that are read and parsed at a time: a millisecond or so, as heartbeats share the interpreter."""
REST_FACTOR = 3.0
"""Multiple of a bite's duration that is left to everything else after it."""
MAX_GENERATIONS, MAX_SAVES, MAX_EVENTS, MAX_PAUSES = 300, 1000, 200, 50
MAX_PROCESSES = 32
"""Maximum number of processes of each kind whose processor use is kept, in at most MAX_STRETCHES stretches each."""
MAX_STRETCHES = 240
MAX_REDONE = 20


@dataclass(frozen=True)
class Save:
    """A checkpoint that a trainer logged."""

    checkpoint: CheckpointRef
    saved_at: float
    size: int | None
    stall_seconds: float | None


@dataclass
class Timeline:
    """One run. For one thread, except for what `follow` has left."""

    rundir: RunDir
    started_at: float | None = None
    """Time at which the first generation was formed."""
    loss: Series = field(default_factory=Series)
    """Training loss over steps, as rank 0 logged it."""
    reported_loss: Series = field(default_factory=Series)
    """Training loss over steps, as reported to the coordinator: the only source for a user's own script."""
    learning_rate: Series = field(default_factory=Series)
    gradient_norm: Series = field(default_factory=Series)
    """Learning rate and gradient norm over steps, if they are logged."""
    values: dict[str, Series] = field(default_factory=dict)
    """Values that a script logs besides its loss, by name, over steps."""
    redone: deque[list[tuple[float, float | None]]] = field(default_factory=lambda: deque(maxlen=MAX_REDONE))
    not_finite: deque[int] = field(default_factory=lambda: deque(maxlen=200))
    throughput: Series = field(default_factory=Series)
    """Throughput over seconds of the run."""
    tokens_per_sample: float | None = None
    """Tokens of a sample without padding, as the newest generation logged it; None if samples are no text."""
    rank_throughput: Series = field(default_factory=Series)
    """Throughput divided by the number of ranks."""
    busy: dict[str, Series] = field(default_factory=dict)
    """Milliseconds of its own work in a step, by rank, over seconds of the run."""
    memory: dict[str, Series] = field(default_factory=dict)
    """GB of GPU memory in use, by rank, over seconds of the run."""
    use: dict[str, dict[str, Series]] = field(default_factory=lambda: {"trainer": {}, "gpu": {}, "evaluator": {}})
    """Busy cores (of a GPU: its busy share) by kind and process, over seconds of the run."""
    saves: dict[tuple[str, int], Save] = field(default_factory=dict)
    events: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    """Time, level and text."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """Pauses of the run: begin and length, in seconds."""

    def __post_init__(self) -> None:
        self.results: dict[Key, EvaluationResult] = {}
        """Results of evaluated checkpoints: the newest MAX_FOLDERS."""
        self._results, self._lineage = Results(self.rundir, MAX_FOLDERS), Lineage(self.rundir)
        self.hurry = False
        """Set from another thread when the coordinator ends: unread lines are left."""
        self._coordinator_log = LogReader(self.rundir.coordinator_log, COORDINATOR, bite=BITE_BYTES)
        self._train: dict[int, LogReader[TrainingRecord]] = {}
        self._superseded: set[int] = set()
        self._folds: dict[int, TrainingFold] = {}
        self._formed: dict[int, records.Formed] = {}
        self._closed: dict[int, records.Closed] = {}
        self._last_time: float | None = None
        self.wrong: list[Tile] = []
        """Samples that the best checkpoint misclassifies."""
        self._gallery_times: tuple[int, ...] = ()
        self.shown_histograms: tuple[EvaluationResult, dict[str, Histogram]] | None = None
        """Histograms of the best checkpoint, or of the newest that counts while none is the best. Only those are read:
        the histograms of all checkpoints would take too much memory."""
        self.base: EvaluationResult | None = None
        """The evaluation of the base model."""
        self.completions: list[tuple[str, Completions]] = []
        """Completions of the base model, the best checkpoint and the newest one, with their headings."""
        self._completion_results: list[EvaluationResult] = []
        """The results with these completions."""

    def follow(self, seconds: float, rest_factor: float = REST_FACTOR) -> bool:
        """Read what was logged since the last call, for at most this many seconds; returns whether that was all.

        Raises:
            OSError, ValueError: the run directory cannot be read, or is damaged; the next time may go well.
        """
        until = time.monotonic() + seconds
        self._find_logs()
        if not self._read(self._coordinator_log, self._take_coordinator_record, until, rest_factor):
            return False
        numbers = sorted(self._train.keys() - self._superseded)
        for number in numbers:
            if not self._read(self._train[number], partial(self._take_training_record, number), until, rest_factor):
                return False
        # A generation that was superseded may write a last line late, but not two generations later.
        self._superseded.update(numbers[:-2])
        self._update_results()
        self._update_gallery()
        self._lineage.look()
        self._update_histograms()
        self._update_completions()
        return True

    def _read(
        self, log: LogReader[AnyRecord], take: Callable[[AnyRecord], None], until: float, rest_factor: float
    ) -> bool:
        while True:
            started = time.monotonic()
            if (bite := log.read()) is None:
                return True
            for record in bite:
                take(record)
            if time.monotonic() > until or self.hurry:
                return False
            time.sleep(rest_factor * (time.monotonic() - started))

    @cached_property
    def metric(self) -> str:
        """Metric by which checkpoints are compared."""
        try:
            return self.rundir.read_job().spec.evaluation.metric or "accuracy"
        except (OSError, ValueError):
            return "accuracy"

    @cached_property
    def goal(self) -> Goal:
        """Whether a higher or a lower score is better."""
        try:
            return self.rundir.read_job().spec.evaluation.direction
        except (OSError, ValueError):
            return evaluations.direction(None, self.metric)

    @property
    def generations(self) -> dict[int, Generation]:
        """The generations by number, oldest first: the newest MAX_GENERATIONS."""
        facts = {number: fold.facts for number, fold in self._folds.items()}
        formed, closed = self._formed, self._closed
        generations = [
            merged(number, None, facts.get(number), formed[number], closed.get(number), formed.get(number + 1))
            for number in sorted(formed)
        ]
        return {generation.number: generation for generation in with_handed_over(generations, facts)}

    @property
    def share_read(self) -> float:
        """Share of the logs that has been read, 0 to 1."""
        remaining = self._coordinator_log.left + sum(log.left for log in self._train.values())
        done = self._coordinator_log.offset + sum(log.offset for log in self._train.values())
        return done / (remaining + done) if remaining + done else 1.0

    def run_seconds(self, time: float) -> float:
        """Convert a time to seconds of the run: since its beginning, without the pauses."""
        since = 0.0 if self.started_at is None else time - self.started_at
        return max(0.0, since - sum(min(max(0.0, time - begin), length) for begin, length in self.pauses))

    @property
    def now(self) -> float:
        """Seconds of the run at the newest line."""
        return 0.0 if self._last_time is None else self.run_seconds(self._last_time)

    def counts(self, checkpoint: CheckpointRef) -> bool:
        """Whether a checkpoint counts; without records that say otherwise, it does."""
        return not self._lineage.is_known or self._lineage.counts(checkpoint)

    def ahead(self, metric: str) -> set[Key]:
        """The checkpoints that were better than each before them by more than chance."""
        scored = [
            (key, result.estimates[metric])
            for key, result in sorted(self.results.items())
            if metric in result.estimates and self.counts(result.checkpoint)
        ]
        forward = steps_forward([estimate for _, estimate in scored], self.goal)
        return {key for (key, _), is_forward in zip(scored, forward, strict=True) if is_forward}

    def _update_results(self) -> None:
        for result, _ in self._results.new(time.time()):
            key = result.checkpoint.name, result.checkpoint.generation
            if result.metrics or (result.skipped and key not in self.results):
                self.results[key] = result
        while len(self.results) > MAX_FOLDERS:
            oldest = min(self.results)
            del self.results[oldest]
            self._results.forget(oldest[0])

    def _update_gallery(self) -> None:
        files = [path for path in (self.rundir.wrong_file, self.rundir.best_file) if path.exists()]
        changed = tuple(path.stat().st_mtime_ns for path in files)
        if changed != self._gallery_times:
            samples = gallery(self.rundir)
            self.wrong, self._gallery_times = [] if samples is None else tiles(samples), changed

    def _update_histograms(self) -> None:
        best = evaluations.best(self.rundir)
        result = self.results.get((best.name, best.generation)) if best and best.generation is not None else None
        if result is None:
            evaluated = [
                evaluated_result
                for evaluated_result in self.results.values()
                if not evaluated_result.skipped and self.counts(evaluated_result.checkpoint)
            ]
            result = max(evaluated, key=lambda evaluated_result: evaluated_result.checkpoint.step, default=None)
        if result is None or (self.shown_histograms is not None and self.shown_histograms[0] is result):
            return
        self.shown_histograms = result, evaluations.histograms(catalog.merged_result(self.rundir, result.checkpoint))

    def _update_completions(self) -> None:
        if self.base is None and (base := catalog.read_base_result(self.rundir)) is not None:
            self.base = base[0]
        best = evaluations.best(self.rundir)
        counting = [result for result in self.results.values() if not result.skipped and self.counts(result.checkpoint)]
        newest = max(counting, key=lambda result: result.checkpoint.step, default=None)
        best_result = self.results.get((best.name, best.generation)) if best and best.generation is not None else None
        results = [
            result for result in (self.base, best_result, newest) if result is not None and result.has_completions
        ]
        results = [result for place, result in enumerate(results) if result not in results[:place]]
        if all(result is other for result, other in zip_longest(results, self._completion_results)):
            return
        self.completions = []
        for result in results:
            title = heading(result.checkpoint.step, result is self.base, result is best_result)
            content = catalog.merged_result(self.rundir, result.checkpoint)
            self.completions.append((title, evaluations.completions(content)))
        self._completion_results = results

    def _find_logs(self) -> None:
        for number, path in self.rundir.training_logs().items():
            if number not in self._train:
                self._train[number] = LogReader(path, TRAINING, bite=BITE_BYTES)

    # The coordinator's log

    def _take_coordinator_record(self, record: CoordinatorRecord) -> None:
        match record:
            case records.EventRecord():
                self.events.append((record.time, record.level or "info", record.text or ""))
            case records.Formed():
                self._form(record)
            case records.Closed() if record.generation in self._formed:
                self._closed[record.generation] = record
            case records.Sample() if self.started_at is not None:
                self._sample(record)

    def _form(self, record: records.Formed) -> None:
        self.started_at = record.time if self.started_at is None else self.started_at
        self._tick(record.time)
        self._formed[record.generation] = record
        while len(self._formed) > MAX_GENERATIONS:
            oldest = min(self._formed)
            del self._formed[oldest]
            self._closed.pop(oldest, None)
            self._folds.pop(oldest, None)

    def _sample(self, record: records.Sample) -> None:
        time = record.time
        self._tick(time)
        now = self.run_seconds(time)
        throughput, size = record.throughput, record.world_size
        self.throughput.add(now, throughput)
        self.rank_throughput.add(now, throughput / size if throughput is not None and size else None)
        step, loss = record.step, record.loss
        if step is not None and loss is not None:
            last = self.reported_loss.last
            if last is not None and step < last.x:
                self.reported_loss.cut(step - 1)
            self.reported_loss.add(step, loss)
        for kind, measured in (
            ("trainer", record.trainer_cpu),
            ("gpu", record.gpu),
            ("evaluator", record.evaluator_cpu),
        ):
            if measured:
                self._used(self.use[kind], measured, record.used_before or {}, time)
        for series_by_name, measured, unit in (
            (self.busy, record.busy_seconds, 1e-3),
            (self.memory, record.gpu_memory, 1e9),
        ):
            if measured:
                self._used(series_by_name, measured, {}, time, unit)

    def _used(
        self,
        series_by_process: dict[str, Series],
        values: Mapping[str, float | None],
        ages: Mapping[str, float | None],
        time: float,
        unit: float = 1.0,
    ) -> None:
        """Add values at the time when they were measured; one that is reported twice is added once."""
        for process, value in values.items():
            if process in series_by_process or len(series_by_process) < MAX_PROCESSES:
                series = series_by_process.setdefault(process, Series(MAX_STRETCHES))
                position = self.run_seconds(time - (ages.get(process) or 0.0))
                if series.last is None or position >= series.last.x + SAME_SECONDS:
                    series.add(position, None if value is None else value / unit)
        for process in series_by_process.keys() - values.keys():
            series_by_process[process].add(self.run_seconds(time), None)

    def _tick(self, time: float) -> None:
        if self._last_time is not None and time - self._last_time > PAUSE_SECONDS and len(self.pauses) < MAX_PAUSES:
            self.pauses.append((self._last_time, time - self._last_time))
        self._last_time = time if self._last_time is None else max(time, self._last_time)

    # The logs of the trainers

    def _take_training_record(self, generation: int, record: TrainingRecord) -> None:
        self._folds.setdefault(generation, TrainingFold()).add(record)
        match record:
            case records.Step():
                self._step(record)
            case records.Values():
                self._logged(record)
            case records.Start():
                self.tokens_per_sample = record.tokens_per_sample
                self._started(record.step)
            case records.Saved():
                self._saved(generation, record)

    def _started(self, step: int) -> None:
        """Cut off steps that a new generation repeats."""
        if removed := self.loss.cut(step):
            self.redone.append(removed)
        for series in (self.learning_rate, self.gradient_norm, *self.values.values()):
            series.cut(step)

    def _step(self, record: records.Step) -> None:
        step, loss = record.step, record.loss
        if loss is not None and math.isfinite(loss):
            self.loss.add(step, loss)
        elif "loss" in record.model_fields_set:
            self.not_finite.append(step)
        for series, value in ((self.learning_rate, record.lr), (self.gradient_norm, record.gradient_norm)):
            if value is not None:
                series.add(step, value)

    def _logged(self, record: records.Values) -> None:
        for name, value in record.known.items():
            # A value is logged now and then: what is not finite breaks no line.
            if math.isfinite(value) and (name in self.values or len(self.values) < MAX_VALUES):
                self.values.setdefault(name, Series()).add(record.step, value)

    def _saved(self, generation: int, record: records.Saved) -> None:
        reference = CheckpointRef(name=record.name, step=record.step, generation=generation)
        self.saves[record.name, generation] = Save(reference, record.time, record.bytes, record.stall_seconds)
        while len(self.saves) > MAX_SAVES:
            del self.saves[next(iter(self.saves))]
