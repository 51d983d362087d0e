"""A run as its logs tell it: what the page shows of the time before it was opened, and before this coordinator began.

The logs are in the run directory, so nothing has to be kept while nobody looks, and a coordinator that has restarted
shows the whole run. They are read from their beginning, in bites, by a thread that rests three times as long as it
reads: a week's log is there after half a minute, and heartbeats do not notice. What is kept of them is bounded.

Rejected: to keep the history on the coordinator's event loop as it happens (memory and time for a page that nobody
looks at, and nothing after a restart); a process of its own (a second Python in a pod of 128 MiB).
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.charts.gallery import Tile
from tandem.charts.series import Series
from tandem.charts.stories import GRADIENT_NORM, LEARNING_RATE
from tandem.gallery import gallery
from tandem.numbers import amount, finite, whole
from tandem.rundir.durable import listed
from tandem.rundir.layout import TRAIN_LOG, RunDir
from tandem.rundir.lineage import Chain, counts
from tandem.status import CheckpointRef
from tandem_coordinator.page.results import Results
from tandem_coordinator.page.tail import Tail

REST = 3.0
"""After a bite, so many times its own duration is left to everything else."""
PAUSE_SECONDS = 120.0
"""The coordinator writes every second: so long without a line, and nothing ran. Such a time is cut out of the axis."""
MOST_GENERATIONS, MOST_SAVES, MOST_EVENTS, MOST_PAUSES = 300, 1000, 200, 50
MOST_PROCESSES = 32
"""Of a kind, the processor use of so many is kept, each in so many stretches:"""
STRETCHES = 240
MOST_REDONE = 20
SAME_SECONDS = 0.1
"""Values that were measured so shortly after one another are one, told twice."""


@dataclass(frozen=True)
class Formed:
    """A generation, as far as the logs tell. Times are seconds since the epoch."""

    number: int
    opened_at: float
    world_size: int
    members: tuple[str, ...]
    reason: str
    detail: str
    closed_at: float | None = None
    first_step_at: float | None = None
    """When its first step was logged."""
    last_step_at: float | None = None


@dataclass(frozen=True)
class Save:
    """A checkpoint that a trainer says it wrote."""

    checkpoint: CheckpointRef
    at: float
    size: int | None
    stall_seconds: float | None


@dataclass
class Record:
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
    redone: deque[list[tuple[float, float | None]]] = field(default_factory=lambda: deque(maxlen=MOST_REDONE))
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
    generations: dict[int, Formed] = field(default_factory=dict)
    saves: dict[tuple[str, int], Save] = field(default_factory=dict)
    events: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    """When, how much it matters, what."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """When nothing ran, and for how long."""

    def __post_init__(self) -> None:
        self.results = Results(self.rundir)
        self.hurry = False
        """Set from another thread: the coordinator ends, so leave what is not read yet."""
        self._told = Tail(self.rundir.log / "coordinator.jsonl")
        self._train: dict[int, Tail] = {}
        self._over: set[int] = set()
        self._stepped: dict[int, list[float]] = {}
        self._last: float | None = None
        self._links: Chain = {}
        self._linked_up_to = -1
        self.wrong: list[Tile] = []
        """Samples that the best checkpoint takes for something else."""
        self._shown: tuple[int, ...] = ()

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
        self.results.look(time.time())
        self._look_at_gallery()
        newest = self.rundir.newest_generation()
        if newest != self._linked_up_to:
            self._links, self._linked_up_to = self.rundir.chain(), newest
        return True

    def _read(self, tail: Tail, take: Callable[[dict[str, Any]], None], until: float, rest: float) -> bool:
        while True:
            began = time.monotonic()
            if (records := tail.bite()) is None:
                return True
            for record in records:
                with suppress(TypeError, ValueError, OverflowError, KeyError):  # damaged, or of another version
                    take(record)
            if time.monotonic() > until or self.hurry:
                return False
            time.sleep(rest * (time.monotonic() - began))

    @property
    def formed(self) -> list[Formed]:
        """The generations, oldest first, with when they made their first and last step."""
        found = []
        for number, one in sorted(self.generations.items()):
            first, last = self._stepped.get(number, (None, None))
            found.append(replace(one, first_step_at=first, last_step_at=last))
        return found

    @property
    def share_read(self) -> float:
        """How much of the logs has been read, 0 to 1."""
        tails = [self._told, *self._train.values()]
        left, done = sum(tail.left for tail in tails), sum(tail.done for tail in tails)
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
        return not self._links or counts(self._links, checkpoint)

    def _look_at_gallery(self) -> None:
        files = [path for path in (self.rundir.wrong_file, self.rundir.best_file) if path.exists()]
        changed = tuple(path.stat().st_mtime_ns for path in files)
        if changed != self._shown:
            found = gallery(self.rundir)
            self.wrong, self._shown = [] if found is None else found.tiles(), changed

    def _find_logs(self) -> None:
        for path in listed(self.rundir.log):
            if (match := TRAIN_LOG.match(path.name)) and int(match[1]) not in self._train:
                self._train[int(match[1])] = Tail(path)

    # The coordinator's log

    def _take_told(self, record: dict[str, Any]) -> None:
        kind, at = record.get("kind"), float(record["time"])
        if kind == "event":
            self.events.append((at, str(record.get("level")), str(record.get("text"))))
        elif kind == "generation":
            self._formed(record, at)
        elif kind == "closed":
            number = int(record["generation"])
            if number in self.generations:
                self.generations[number] = replace(self.generations[number], closed_at=at)
        elif kind == "sample" and self.begun is not None:
            self._sample(record, at)

    def _formed(self, record: Mapping[str, Any], at: float) -> None:
        formed = Formed(
            number=int(record["generation"]),
            opened_at=at,
            world_size=int(record["worldSize"]),
            members=tuple(str(member) for member in record.get("members", ())),
            reason=str(record.get("reason", "")),
            detail=str(record.get("detail", "")),
        )
        self.begun = at if self.begun is None else self.begun
        self._tick(at)
        self.generations[formed.number] = formed
        while len(self.generations) > MOST_GENERATIONS:
            self._stepped.pop(min(self.generations), None)
            del self.generations[min(self.generations)]

    def _sample(self, record: Mapping[str, Any], at: float) -> None:
        self._tick(at)
        now = self.shown(at)
        throughput, size = finite(record.get("throughput")), whole(record.get("worldSize"))
        self.throughput.add(now, throughput)
        self.rank_throughput.add(now, throughput / size if throughput is not None and size else None)
        step, loss = record.get("step"), finite(record.get("loss"))
        if isinstance(step, int) and loss is not None:
            last = self.told_loss.last
            if last is not None and step < last.x:
                self.told_loss.cut(step - 1)
            self.told_loss.add(step, loss)
        for kind, name in (("trainer", "trainerCpu"), ("gpu", "gpu"), ("evaluator", "evaluatorCpu")):
            given = record.get(name)
            if isinstance(given, dict) and given:
                self._used(self.use[kind], given, record.get("usedBefore"), at)
        for known, name, unit in ((self.busy, "busySeconds", 1e-3), (self.memory, "gpuMemory", 1e9)):
            given = record.get(name)
            if isinstance(given, dict) and given:
                self._used(known, given, None, at, unit)

    def _used(
        self, known: dict[str, Series], given: Mapping[str, Any], before: object, at: float, unit: float = 1.0
    ) -> None:
        """Each value stands where it was measured; one that is told twice stands once."""
        ages = before if isinstance(before, dict) else {}
        for process, value in given.items():
            if process in known or len(known) < MOST_PROCESSES:
                series, told = known.setdefault(process, Series(STRETCHES)), finite(value)
                place = self.shown(at - (amount(ages.get(process)) or 0.0))
                if series.last is None or place >= series.last.x + SAME_SECONDS:
                    series.add(place, None if told is None else told / unit)
        for process in known.keys() - given.keys():
            known[process].add(self.shown(at), None)

    def _tick(self, at: float) -> None:
        if self._last is not None and at - self._last > PAUSE_SECONDS and len(self.pauses) < MOST_PAUSES:
            self.pauses.append((self._last, at - self._last))
        self._last = at if self._last is None else max(at, self._last)

    # The logs of the trainers

    def _taker(self, generation: int) -> Callable[[dict[str, Any]], None]:
        def take(record: dict[str, Any]) -> None:
            kind = record.get("kind")
            if kind == "step":
                self._step(generation, record)
            elif kind == "start":
                self._started(int(record["step"]))
            elif kind == "checkpoint":
                self._saved(generation, record)

        return take

    def _started(self, step: int) -> None:
        """A generation goes on from a step: what came after it is done again."""
        if gone := self.loss.cut(step):
            self.redone.append(gone)
        self.learning_rate.cut(step)
        self.gradient_norm.cut(step)

    def _step(self, generation: int, record: Mapping[str, Any]) -> None:
        step, loss = int(record["step"]), finite(record.get("loss"))
        if loss is None:
            self.not_finite.append(step)
        else:
            self.loss.add(step, loss)
        for series, name in ((self.learning_rate, LEARNING_RATE), (self.gradient_norm, GRADIENT_NORM)):
            if name in record:
                series.add(step, finite(record[name]))
        self._stepped.setdefault(generation, [float(record["time"])] * 2)[1] = float(record["time"])

    def _saved(self, generation: int, record: Mapping[str, Any]) -> None:
        name, size, stall = str(record["name"]), record.get("bytes"), finite(record.get("stallSeconds"))
        reference = CheckpointRef(name=name, step=int(record["step"]), generation=generation)
        self.saves[name, generation] = Save(
            reference, float(record["time"]), size if isinstance(size, int) else None, stall
        )
        while len(self.saves) > MOST_SAVES:
            del self.saves[next(iter(self.saves))]
