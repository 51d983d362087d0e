"""The timeline of a run, from its logs: the time before the page was opened and before this coordinator started.

The logs are in the run directory, so nothing has to be kept while nobody looks, and a coordinator that has restarted
shows the whole run. They are read from their beginning, in bites, by a thread that rests three times as long as it
reads: a week's log is there after half a minute, and heartbeats do not notice. What is kept of them is bounded.

Rejected: to keep the history on the coordinator's event loop as it happens (memory and time for a page that nobody
looks at, and nothing after a restart); a process of its own (a second Python in a pod of 128 MiB).
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest

from tandem.evaluation import Completions, Histogram
from tandem.measures import Generation
from tandem.rundir import catalog, evaluations, records
from tandem.rundir.catalog import Lineage, Result, Results
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogReader
from tandem.rundir.records import COORDINATOR, TRAINING, AnyRecord, CoordinatorRecord, TrainingRecord
from tandem.script import MAX_VALUES
from tandem.status import CheckpointRef
from tandem.wrong_samples import gallery
from tandem_coordinator.charts.completions import heading
from tandem_coordinator.charts.gallery import Tile, tiles
from tandem_coordinator.charts.series import Series

MAX_FOLDERS = 1000
"""The newest; what was evaluated before is left to `tandem report`."""
Key = tuple[str, int]
"""A checkpoint's name and its generation: after a restart a name may come back."""

BITE = 32 * 2**10
"""Bytes that are read and parsed in one go: a millisecond or so, as heartbeats share the interpreter."""
REST = 3.0
"""After a bite this many times its duration is left to everything else."""
PAUSE_SECONDS = 120.0
"""The coordinator writes every second: so long without a line, and nothing ran. Such a time is cut out of the axis."""
MAX_GENERATIONS, MAX_SAVES, MAX_EVENTS, MAX_PAUSES = 300, 1000, 200, 50
MAX_PROCESSES = 32
"""Of each kind, the processor use of this many processes is kept, in this many stretches:"""
STRETCHES = 240
MAX_REDONE = 20
SAME_SECONDS = 0.1
"""Values that were measured so shortly after one another are one, told twice."""


@dataclass(frozen=True)
class Save:
    """A checkpoint that a trainer says it wrote."""

    checkpoint: CheckpointRef
    at: float
    size: int | None
    stall_seconds: float | None


@dataclass
class Timeline:
    """One run. For one thread, but for what `follow` has left."""

    rundir: RunDir
    begun: float | None = None
    """When the first generation was formed."""
    loss: Series = field(default_factory=Series)
    """Over steps, as rank 0 logged it."""
    told_loss: Series = field(default_factory=Series)
    """Over steps, as the coordinator heard it: all there is of a script of the user's own."""
    learning_rate: Series = field(default_factory=Series)
    gradient_norm: Series = field(default_factory=Series)
    """Over steps, where they are logged."""
    values: dict[str, Series] = field(default_factory=dict)
    """What a script logs beside its loss, by name, over steps."""
    redone: deque[list[tuple[float, float | None]]] = field(default_factory=lambda: deque(maxlen=MAX_REDONE))
    not_finite: deque[int] = field(default_factory=lambda: deque(maxlen=200))
    throughput: Series = field(default_factory=Series)
    """Over seconds of the run."""
    rank_throughput: Series = field(default_factory=Series)
    """The same by the number of ranks."""
    busy: dict[str, Series] = field(default_factory=dict)
    """Milliseconds of its own work in a step, by rank, over seconds of the run."""
    memory: dict[str, Series] = field(default_factory=dict)
    """GB of GPU memory in use, by rank, over seconds of the run."""
    use: dict[str, dict[str, Series]] = field(default_factory=lambda: {"trainer": {}, "gpu": {}, "evaluator": {}})
    """Busy cores (of a GPU: its busy share) by kind and process, over seconds of the run."""
    generations: dict[int, Generation] = field(default_factory=dict)
    saves: dict[tuple[str, int], Save] = field(default_factory=dict)
    events: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    """When, how much it matters, what."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """When nothing ran, and for how long."""

    def __post_init__(self) -> None:
        self.results: dict[Key, Result] = {}
        """What evaluators made of each checkpoint: the newest MAX_FOLDERS."""
        self._results, self._lineage = Results(self.rundir, MAX_FOLDERS), Lineage(self.rundir)
        self.hurry = False
        """Set from another thread: the coordinator ends, so leave what is not read yet."""
        self._told = LogReader(self.rundir.coordinator_log, COORDINATOR, bite=BITE)
        self._train: dict[int, LogReader[TrainingRecord]] = {}
        self._over: set[int] = set()
        self._stepped: dict[int, list[float]] = {}
        self._last: float | None = None
        self.wrong: list[Tile] = []
        """Samples that the best checkpoint takes for something else."""
        self._shown: tuple[int, ...] = ()
        self.shown_histograms: tuple[Result, dict[str, Histogram]] | None = None
        """Of the best checkpoint, or of the newest that counts while none is the best. Read of that one alone: those of
        all checkpoints would take too much memory."""
        self.base: Result | None = None
        """The evaluation of the base model."""
        self.completions: list[tuple[str, Completions]] = []
        """What the base model, the best checkpoint and the newest wrote for prompts; of which, in words."""
        self._written: list[Result] = []
        """Whose these are."""

    def follow(self, seconds: float, rest: float = REST) -> bool:
        """Read what was logged since, for at most so long; whether that was all.

        Raises:
            OSError, ValueError: the run directory cannot be read, or is damaged; the next time may go well.
        """
        until = time.monotonic() + seconds
        self._find_logs()
        if not self._read(self._told, self._take_told, until, rest):
            return False
        numbers = sorted(self._train.keys() - self._over)
        for number in numbers:
            if not self._read(self._train[number], self._taker(number), until, rest):
                return False
        # A generation that was superseded may write a last line late, but not two generations later.
        self._over.update(numbers[:-2])
        self._look_at_results()
        self._look_at_gallery()
        self._lineage.look()
        self._look_at_histograms()
        self._look_at_completions()
        return True

    def _read(self, log: LogReader[AnyRecord], take: Callable[[AnyRecord], None], until: float, rest: float) -> bool:
        while True:
            began = time.monotonic()
            if (bite := log.read()) is None:
                return True
            for record in bite:
                take(record)
            if time.monotonic() > until or self.hurry:
                return False
            time.sleep(rest * (time.monotonic() - began))

    @cached_property
    def metric(self) -> str:
        """What checkpoints are compared by."""
        try:
            return self.rundir.read_job().spec.evaluation.metric or "accuracy"
        except (OSError, ValueError):
            return "accuracy"

    @property
    def formed(self) -> list[Generation]:
        """The generations, oldest first, with when they made their first and last step."""
        found = []
        for number, one in sorted(self.generations.items()):
            first, last = self._stepped.get(number, (None, None))
            found.append(replace(one, first_step_at=first, last_step_at=last))
        return found

    @property
    def share_read(self) -> float:
        """How much of the logs has been read, 0 to 1."""
        left = self._told.left + sum(log.left for log in self._train.values())
        done = self._told.offset + sum(log.offset for log in self._train.values())
        return done / (left + done) if left + done else 1.0

    def shown(self, at: float) -> float:
        """Seconds of the run at a time: since its beginning, without the pauses."""
        since = 0.0 if self.begun is None else at - self.begun
        return max(0.0, since - sum(min(max(0.0, at - begin), length) for begin, length in self.pauses))

    @property
    def now(self) -> float:
        """Seconds of the run at the newest line."""
        return 0.0 if self._last is None else self.shown(self._last)

    def counts(self, checkpoint: CheckpointRef) -> bool:
        """Whether a checkpoint made the model; without records that say otherwise, it did."""
        return not self._lineage.is_known or self._lineage.counts(checkpoint)

    def _look_at_results(self) -> None:
        for result, _ in self._results.new(time.time()):
            key = result.checkpoint.name, result.checkpoint.generation
            if result.metrics or (result.skipped and key not in self.results):
                self.results[key] = result
        while len(self.results) > MAX_FOLDERS:
            oldest = min(self.results)
            del self.results[oldest]
            self._results.forget(oldest[0])

    def _look_at_gallery(self) -> None:
        files = [path for path in (self.rundir.wrong_file, self.rundir.best_file) if path.exists()]
        changed = tuple(path.stat().st_mtime_ns for path in files)
        if changed != self._shown:
            found = gallery(self.rundir)
            self.wrong, self._shown = [] if found is None else tiles(found), changed

    def _look_at_histograms(self) -> None:
        best = evaluations.best(self.rundir)
        shown = self.results.get((best.name, best.generation)) if best and best.generation is not None else None
        if shown is None:
            evaluated = [one for one in self.results.values() if not one.skipped and self.counts(one.checkpoint)]
            shown = max(evaluated, key=lambda one: one.checkpoint.step, default=None)
        if shown is None or (self.shown_histograms is not None and self.shown_histograms[0] is shown):
            return
        self.shown_histograms = shown, evaluations.histograms(catalog.merged_result(self.rundir, shown.checkpoint))

    def _look_at_completions(self) -> None:
        if self.base is None and (found := catalog.base(self.rundir)) is not None:
            self.base = found[0]
        best = evaluations.best(self.rundir)
        counting = [one for one in self.results.values() if not one.skipped and self.counts(one.checkpoint)]
        newest = max(counting, key=lambda one: one.checkpoint.step, default=None)
        the_best = self.results.get((best.name, best.generation)) if best and best.generation is not None else None
        wanted = [one for one in (self.base, the_best, newest) if one is not None and one.has_completions]
        wanted = [one for place, one in enumerate(wanted) if one not in wanted[:place]]
        if all(one is other for one, other in zip_longest(wanted, self._written)):
            return
        self.completions = []
        for one in wanted:
            above = heading(one.checkpoint.step, one is self.base, one is the_best)
            content = catalog.merged_result(self.rundir, one.checkpoint)
            self.completions.append((above, evaluations.completions(content)))
        self._written = wanted

    def _find_logs(self) -> None:
        for number, path in self.rundir.training_logs().items():
            if number not in self._train:
                self._train[number] = LogReader(path, TRAINING, bite=BITE)

    # The coordinator's log

    def _take_told(self, record: CoordinatorRecord) -> None:
        match record:
            case records.Told():
                self.events.append((record.time, record.level or "info", record.text or ""))
            case records.Formed():
                self._formed(record)
            case records.Closed() if (known := self.generations.get(record.generation)) is not None:
                self.generations[record.generation] = replace(known, closed_at=record.time)
            case records.Sample() if self.begun is not None:
                self._sample(record)

    def _formed(self, record: records.Formed) -> None:
        at = record.time
        formed = Generation(
            number=record.generation,
            opened_at=at,
            world_size=record.world_size,
            members=tuple(record.members or ()),
            reason=record.reason or "",
            detail=record.detail or "",
        )
        self.begun = at if self.begun is None else self.begun
        self._tick(at)
        self.generations[formed.number] = formed
        while len(self.generations) > MAX_GENERATIONS:
            self._stepped.pop(min(self.generations), None)
            del self.generations[min(self.generations)]

    def _sample(self, record: records.Sample) -> None:
        at = record.time
        self._tick(at)
        now = self.shown(at)
        throughput, size = record.throughput, record.world_size
        self.throughput.add(now, throughput)
        self.rank_throughput.add(now, throughput / size if throughput is not None and size else None)
        step, loss = record.step, record.loss
        if step is not None and loss is not None:
            last = self.told_loss.last
            if last is not None and step < last.x:
                self.told_loss.cut(step - 1)
            self.told_loss.add(step, loss)
        for kind, used in (("trainer", record.trainer_cpu), ("gpu", record.gpu), ("evaluator", record.evaluator_cpu)):
            if used:
                self._used(self.use[kind], used, record.used_before or {}, at)
        for known, used, unit in ((self.busy, record.busy_seconds, 1e-3), (self.memory, record.gpu_memory, 1e9)):
            if used:
                self._used(known, used, {}, at, unit)

    def _used(
        self,
        known: dict[str, Series],
        given: Mapping[str, float | None],
        before: Mapping[str, float | None],
        at: float,
        unit: float = 1.0,
    ) -> None:
        """Each value stands where it was measured; one that is told twice stands once."""
        for process, value in given.items():
            if process in known or len(known) < MAX_PROCESSES:
                series = known.setdefault(process, Series(STRETCHES))
                place = self.shown(at - (before.get(process) or 0.0))
                if series.last is None or place >= series.last.x + SAME_SECONDS:
                    series.add(place, None if value is None else value / unit)
        for process in known.keys() - given.keys():
            known[process].add(self.shown(at), None)

    def _tick(self, at: float) -> None:
        if self._last is not None and at - self._last > PAUSE_SECONDS and len(self.pauses) < MAX_PAUSES:
            self.pauses.append((self._last, at - self._last))
        self._last = at if self._last is None else max(at, self._last)

    # The logs of the trainers

    def _taker(self, generation: int) -> Callable[[TrainingRecord], None]:
        def take(record: TrainingRecord) -> None:
            match record:
                case records.Step():
                    self._step(generation, record)
                case records.Values():
                    self._logged(record)
                case records.Start():
                    self._started(record.step)
                case records.Saved():
                    self._saved(generation, record)

        return take

    def _started(self, step: int) -> None:
        """A generation goes on from a step: what came after it is done again."""
        if gone := self.loss.cut(step):
            self.redone.append(gone)
        self.learning_rate.cut(step)
        self.gradient_norm.cut(step)
        for series in self.values.values():
            series.cut(step)

    def _step(self, generation: int, record: records.Step) -> None:
        step, loss = record.step, record.loss
        if loss is not None and math.isfinite(loss):
            self.loss.add(step, loss)
        elif "loss" in record.model_fields_set:
            self.not_finite.append(step)
        for series, value in ((self.learning_rate, record.lr), (self.gradient_norm, record.gradient_norm)):
            if value is not None:
                series.add(step, value)
        self._stepped.setdefault(generation, [record.time] * 2)[1] = record.time

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
