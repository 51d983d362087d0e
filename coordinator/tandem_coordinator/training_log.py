"""What training took and what became of its saves, from the logs that first ranks write into the run directory.

They write these for people and reports anyway, so counting from them costs a step nothing, and ranks, agents and
heartbeats need not know. Rejected: sums in each heartbeat (they begin anew with each process, so they would have to be
joined over generations, and what a rank did after its last heartbeat would be missing).

Two logs are followed, for the last words of a generation come when the next one has begun. Of what was there before
this process nothing is counted: a counter that began with it would count it twice for whoever watches increases.
"""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.metrics import STEP_BUCKETS
from tandem.numbers import amount, whole
from tandem.rundir.durable import listed, open_regular, read_lines
from tandem.rundir.layout import TRAIN_LOG

_STEP_LINE = b'{"kind": "step"'
"""One for each step, and nothing in it that a rate does not sum up."""
_TAIL_BYTES = 256 * 2**10
"""Of a log that was there before, so much of the end is searched for the last save."""
_MOST_BYTES = 2**20
"""Of a log, at one look."""
_FIRST_BYTES = 2**16
_FOLLOWED = 2
WORK = ("data", "compute", "checkpoint")
"""What a rate line divides time into."""


@dataclass(frozen=True)
class Training:
    """What was counted since this process began."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of the first rank, by what it did (WORK)."""
    steps: int = 0
    samples: int = 0
    steps_lost: int = 0
    """Steps that were taken and are taken again."""
    buckets: tuple[int, ...] = (0,) * (len(STEP_BUCKETS) + 1)
    """Steps by their time: as long as each of STEP_BUCKETS at most, and longer than the last."""
    step_seconds_sum: float = 0.0
    step_seconds: float | None = None
    """Of a step, lately."""
    samples_per_step: float | None = None
    """Over all ranks, lately."""
    saves: dict[str, int] = field(default_factory=dict)
    """By what became of them: committed, skipped, failed."""
    stall_seconds: float | None = None
    """Of the last save."""
    commit_seconds: float | None = None
    flops_per_sample: float | None = None
    peak_flops: float | None = None
    """Of one rank's GPU; None where one of the two is not well defined."""
    learning_rate: float | None = None
    """Of the last step that a rate was told of."""
    gradient_norm: float | None = None
    """The last that was measured."""


class TrainingLogs:
    """Follows the newest training logs. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        self._offsets: dict[int, int] = {}
        self._seconds = dict.fromkeys(WORK, 0.0)
        self._saves: Counter[str] = Counter()
        self._buckets = [0] * (len(STEP_BUCKETS) + 1)
        self._steps = self._samples = self._lost = 0
        self._sum = 0.0
        self._step: int | None = None
        self._step_seconds: float | None = None
        self._samples_per_step: float | None = None
        self._stall: float | None = None
        self._commit: float | None = None
        self._cost: tuple[float | None, float | None] = (None, None)
        self._learning: dict[str, float | None] = {}
        for generation, path in _logs(listed(folder))[-_FOLLOWED:]:
            self._skip(generation, path)

    def follow(self, paths: list[Path]) -> Training:
        """Read what was appended since the last time.

        Args:
            paths: what is in the folder of logs, by name.
        """
        for generation, path in _logs(paths)[-_FOLLOWED:]:
            records, end = read_lines(path, self._offsets.get(generation, 0), skip=_STEP_LINE, most=_MOST_BYTES)
            self._offsets[generation] = end
            for record in records:
                self._take(record)
        return Training(
            seconds=dict(self._seconds),
            steps=self._steps,
            samples=self._samples,
            steps_lost=self._lost,
            buckets=tuple(self._buckets),
            step_seconds_sum=self._sum,
            step_seconds=self._step_seconds,
            samples_per_step=self._samples_per_step,
            saves=dict(self._saves),
            stall_seconds=self._stall,
            commit_seconds=self._commit,
            flops_per_sample=self._cost[0],
            peak_flops=self._cost[1],
            learning_rate=self._learning.get("lr"),
            gradient_norm=self._learning.get("gradientNorm"),
        )

    def _skip(self, generation: int, path: Path) -> None:
        """Remember the state that a log leaves, and count nothing of it."""
        try:
            size = path.stat().st_size
        except OSError:
            return
        records, end = read_lines(path, max(0, size - _TAIL_BYTES), skip=_STEP_LINE)
        self._offsets[generation] = end
        self._costs(_first(path))
        for record in records:
            if record.get("kind") == "rate":
                self._step = whole(record.get("step")) or self._step
            elif record.get("kind") == "checkpoint":
                self._saved(record)

    def _take(self, record: dict[str, Any]) -> None:
        match record.get("kind"):
            case "rate":
                self._rate(record)
            case "start":
                step = whole(record.get("step"))
                if step is not None and self._step is not None:
                    self._lost += max(0, self._step - step)
                self._step = step
                self._costs(record)
            case "checkpoint":
                self._saves["committed"] += 1
                self._saved(record)
            case "skipped":
                # One that was begun has a name.
                self._saves["failed" if "name" in record else "skipped"] += 1

    def _rate(self, record: dict[str, Any]) -> None:
        self._step = whole(record.get("step")) or self._step
        self._learning |= {name: amount(record[name]) for name in ("lr", "gradientNorm") if name in record}
        phases, seconds = record.get("phases"), amount(record.get("stepSeconds"))
        steps, samples = whole(record.get("steps")), whole(record.get("samples"))
        if not isinstance(phases, dict) or seconds is None or steps is None or samples is None:
            return
        for name in WORK:
            self._seconds[name] += amount(phases.get(name)) or 0.0
        self._steps += steps
        self._samples += samples
        self._buckets[bisect_left(STEP_BUCKETS, seconds)] += steps
        self._sum += seconds * steps
        self._step_seconds = seconds
        self._samples_per_step = samples / steps if steps else self._samples_per_step

    def _costs(self, start: dict[str, Any]) -> None:
        self._cost = amount(start.get("flopsPerSample")), amount(start.get("peakFlops"))

    def _saved(self, record: dict[str, Any]) -> None:
        self._stall, self._commit = amount(record.get("stallSeconds")), amount(record.get("commitSeconds"))


def _first(path: Path) -> dict[str, Any]:
    """The first record of a log that was there before; an empty one if it is damaged."""
    try:
        with open_regular(path) as file:
            record = json.loads(file.readline(_FIRST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _logs(paths: Iterable[Path]) -> list[tuple[int, Path]]:
    return sorted((int(match[1]), path) for path in paths if (match := TRAIN_LOG.match(path.name)))
