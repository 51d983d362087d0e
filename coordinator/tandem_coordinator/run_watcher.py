"""Watches the run directory: the end of the job, checkpoints, evaluations, evaluators.

It polls, on a thread of its own, because a shared disk may take seconds to answer and heartbeats must not wait for it.
What never changes (a manifest, a merged result) is read once. What hardly ever changes is looked at rarely: the folders
of evaluations that are done, and the logs of evaluators that are gone. A run of weeks has thousands of them, and on NFS
each is a request.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path

from pydantic import ValidationError

from tandem.against_base import CHECKPOINTS
from tandem.job import DistributedTrainingJob, Evaluators
from tandem.ledger import Purpose
from tandem.model import amount, whole
from tandem.reasons import Reason
from tandem.rundir.catalog import Lineage, Rarely, Result, Results
from tandem.rundir.checkpoint import Broken
from tandem.rundir.durable import listed
from tandem.rundir.evaluations import Rank
from tandem.rundir.layout import EARLIER, FOLDERS, RunDir, evaluator_of_log, stopped_early
from tandem.rundir.lineage import batches_left_out
from tandem.rundir.watched import WATCHED, Finder
from tandem.status import CheckpointRef, EvaluatorView, Score
from tandem_coordinator.base_watch import AgainstBase, BaseWatch
from tandem_coordinator.foreign_checkpoints import ForeignCheckpoints
from tandem_coordinator.log_followers import Counted, EvaluatorFollower, Training, TrainingLogs

SECONDS = 0.5
"""Between two looks."""
READY_SECONDS = 15.0
"""An idle evaluator writes every 5 s; silent for three times as long, it does not count as ready."""
FORGOTTEN_SECONDS = 60.0
"""Silent for so long, it is not shown any more."""
VOLUME_SECONDS = 10.0
"""Between two questions how much room is left: to a shared disk each is a request."""
MAX_EVALUATORS = 1_000
"""Of the logs of more nobody is told."""
MAX_REASON, MAX_WORDS = 100, 2_000
"""Characters of what FAILED.json says."""


@dataclass(frozen=True)
class Ending:
    """How the job ended."""

    failed: bool
    reason: str
    """One CamelCase word."""
    message: str
    at: float | None
    """Seconds since the epoch."""
    final: CheckpointRef | None = None
    """The last checkpoint, where training is complete."""
    total_steps: int | None = None
    """Steps that were announced, where fewer were taken."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """The newest checkpoint, as a thing on the disk."""

    at: float
    """When it was taken, seconds since the epoch."""
    size: int | None
    """Bytes; None where a script has written it in its own way."""


@dataclass(frozen=True)
class Volume:
    """The file system that the run directory is on."""

    size: int | None
    """Bytes; None where a script has written it in its own way."""
    free: int
    """Bytes that may still be written."""


@dataclass(frozen=True)
class Evaluations:
    """Checkpoints by what evaluators did with them, over the whole life of the run directory."""

    merged: int = 0
    skipped: int = 0
    failed: int = 0
    """Of those that evaluators found since this process began."""
    failure: str = ""
    """The newest of these and why, while no newer checkpoint has been evaluated."""
    waits_since: float | None = None
    """Since when a checkpoint newer than the newest evaluated one has waited and no evaluation was published, seconds
    since the epoch; None if none waits."""


@dataclass(frozen=True)
class Observed:
    """What stands in the run directory."""

    ending: Ending | None = None
    latest_checkpoint: CheckpointRef | None = None
    foreign: tuple[int, str] | None = None
    """The newest checkpoint of another kind than ours, and when it was written."""
    foreign_seen: tuple[int, str] | None = None
    """The same, also if it may be half written."""
    foreign_looked: float = 0.0
    """When that was looked for, on the monotonic clock; infinite where nobody looks."""
    latest_evaluation: Score | None = None
    latest_metrics: Mapping[str, float] = field(default_factory=dict)
    """All scores of the checkpoint that was evaluated last, by metric."""
    best: Score | None = None
    against_base: AgainstBase = field(default_factory=AgainstBase)
    """What is evaluated beside the base model."""
    evaluators: tuple[EvaluatorView, ...] = ()
    final_is_evaluated: bool = False
    training: Training = field(default_factory=Training)
    saved: SavedCheckpoint | None = None
    evaluations: Evaluations = field(default_factory=Evaluations)
    evaluated_at: float | None = None
    """When an evaluator last published a result, also of a part, seconds since the epoch."""
    rewinds: int = 0
    batches_left_out: int = 0
    """By rewinds."""
    limits: tuple[int, ...] = ()
    """Samples of a micro-batch at the most, each time that one did not fit into memory."""
    lines_lost: int = 0
    """Of evaluators' logs."""
    volume: Volume | None = None
    evaluator_seconds: Mapping[Purpose, float] = field(default_factory=dict)
    """For which evaluator processes existed, by what they did, since the last record of a ledger."""
    looked_at: float | None = None
    """When the logs were read, seconds since the epoch."""

    @property
    def lag_steps(self) -> int | None:
        """Steps between the newest checkpoint and the newest evaluated one."""
        if self.latest_checkpoint is None or self.latest_evaluation is None:
            return None
        return max(0, self.latest_checkpoint.step - self.latest_evaluation.step)

    @property
    def ready_evaluators(self) -> int:
        """Evaluators that gave a sign of life lately."""
        return sum(1 for evaluator in self.evaluators if evaluator.silent_seconds < READY_SECONDS)


class RunDirectory:
    """One run directory as it was at the last look, with what need not be read twice. Used by one thread.

    Args:
        own_script: a script of the user's own trains, and may save in a way of its own.
        has_base: the model that training begins with is evaluated, too.
        counted: what the ledger has of its logs already.
        job: whose micro-batches that did not fit are looked for; None: nobody's.
    """

    def __init__(
        self,
        rundir: RunDir,
        evaluation: Evaluators,
        own_script: bool = False,
        has_base: bool = False,
        counted: Counted | None = None,
        job: DistributedTrainingJob | None = None,
    ) -> None:
        self._rundir, self._evaluation = rundir, evaluation
        self._foreign = (
            ForeignCheckpoints(rundir.path, frozenset({*FOLDERS, *EARLIER, WATCHED})) if own_script else None
        )
        self._lineage, self._results = Lineage(rundir), Results(rundir)
        self._job = job
        self._limits: tuple[int, ...] = ()
        self._manifests: dict[str, CheckpointRef | None] = {}
        self._saved: dict[CheckpointRef, SavedCheckpoint] = {}
        watch = evaluation.watch
        self._finder = None if watch is None else Finder(rundir, watch, evaluation.settle_seconds)
        self._base = BaseWatch(rundir, evaluation) if has_base else None
        self._scores: dict[CheckpointRef, tuple[Rank, Score]] = {}
        self._skipped: set[tuple[str, int]] = set()
        self._merged: set[CheckpointRef] = set()
        """Checkpoints that are evaluated, whether that gave the score that decides or not."""
        self._failed: set[CheckpointRef] = set()
        """Checkpoints that the user's program cannot evaluate."""
        self._measured: CheckpointRef | None = None
        self._metrics: Mapping[str, float] = {}
        self._published: float | None = None
        self._unsettled: frozenset[str] = frozenset()
        self._old_logs = Rarely()
        self._logs: dict[str, EvaluatorFollower] = {}
        self._counted = counted or Counted()
        self._training = TrainingLogs(rundir.log, self._counted)
        self._volume: tuple[float, Volume | None] = (float("-inf"), None)

    def look(self, now: float) -> Observed:
        """Read what is new.

        Raises:
            OSError, ValueError: the directory cannot be read, or is damaged; the next look may go well.
        """
        before = self._lineage.newest
        self._lineage.look()
        if self._job is not None and self._lineage.newest != before:
            # One that did not fit ends its generation.
            self._limits = tuple(self._rundir.limits(self._job))
        logs = listed(self._rundir.log)
        checkpoints = [ref for ref in self._checkpoints() if self._lineage.counts(ref)]
        ending = self._ending()
        final = None if ending is None else ending.final
        latest = max(checkpoints, key=self._age, default=None)
        self._find_scores(checkpoints, (final, latest), now)
        scores = [(ref, score) for ref, score in self._scores.items() if self._lineage.counts(ref)]
        evaluated, (_, score) = max(scores, key=lambda entry: self._age(entry[0]), default=(None, (None, None)))
        best, (_, best_score) = min(scores, key=lambda entry: entry[1][0], default=(None, (None, None)))
        newest = [found for _, (_, found) in nlargest(CHECKPOINTS, scores, key=lambda entry: self._age(entry[0]))]
        evaluators = tuple(self._evaluators(logs, now))
        foreign = self._foreign
        return Observed(
            ending=ending,
            latest_checkpoint=latest,
            foreign=None if foreign is None else foreign.look(),
            foreign_seen=None if foreign is None else foreign.seen,
            foreign_looked=float("inf") if foreign is None else foreign.looked,
            latest_evaluation=score,
            latest_metrics=self._metrics if evaluated is not None and evaluated == self._measured else {},
            best=best_score,
            against_base=AgainstBase() if self._base is None else self._base.look(best, newest, ending is not None),
            evaluators=evaluators,
            final_is_evaluated=final is not None and final in self._merged | self._failed,
            training=self._training.follow(logs),
            saved=None if latest is None else self._saved.get(latest),
            evaluations=self._evaluations(checkpoints, evaluated),
            evaluated_at=self._results.changed_at,
            rewinds=len(self._lineage.rewinds),
            batches_left_out=batches_left_out(self._lineage.rewinds),
            limits=self._limits,
            lines_lost=sum(log.lines_lost for log in self._logs.values()),
            volume=self._room(now),
            evaluator_seconds=_added(log.seconds for log in self._logs.values()),
            looked_at=now,
        )

    def _age(self, reference: CheckpointRef) -> tuple[int, int]:
        """Of checkpoints on the chain the one of the newest generation is the newest, then the one of the last step."""
        return reference.generation, reference.step

    def _checkpoints(self) -> list[CheckpointRef]:
        names = self._rundir.checkpoint_names()
        for name in self._manifests.keys() - set(names):
            if (gone := self._manifests.pop(name)) is not None:
                self._saved.pop(gone, None)
        for name in names:
            if name not in self._manifests:
                with suppress(FileNotFoundError):
                    self._manifests[name] = self._reference(name)
        own = [reference for reference in self._manifests.values() if reference is not None]
        return [*own, *self._watched()]

    def _watched(self) -> list[CheckpointRef]:
        """Those that the script has written in a way of its own."""
        if self._finder is None:
            return []
        # What keeps it from being recorded, such as a full disk, evaluators report, who try it too.
        with suppress(OSError):
            self._finder.look(ended=False)
        for one in self._finder.known.values():
            self._saved.setdefault(one.reference, SavedCheckpoint(one.at, None))
        return [one.reference for one in self._finder.known.values()]

    def _reference(self, name: str) -> CheckpointRef | None:
        try:
            manifest = self._rundir.manifest(name)
        except Broken:
            return None
        self._saved[manifest.reference] = SavedCheckpoint(manifest.created_at, manifest.size)
        return manifest.reference

    def _find_scores(
        self, checkpoints: Iterable[CheckpointRef], needed: Sequence[CheckpointRef | None], now: float
    ) -> None:
        """Read new evaluations.

        Args:
            needed: what evaluators evaluate also where they passed it over.
        """
        before = self._unsettled
        self._unsettled = frozenset(ref.name for ref in checkpoints if not self._is_settled(ref, needed))
        # One that was evaluated last may be deleted already.
        for result, at in self._results.new(now, self._unsettled | before):
            reference = result.checkpoint
            if result.is_failure:
                self._failed.add(reference)
                continue
            if result.skipped:
                self._skipped.add((reference.name, reference.generation))
                continue
            self._published = max(self._published or 0.0, at)
            self._merged.add(reference)
            if found := self._score(result):
                self._scores[reference] = found
                if self._measured is None or self._age(reference) >= self._age(self._measured):
                    self._measured, self._metrics = reference, result.metrics

    def _is_settled(self, reference: CheckpointRef, needed: Sequence[CheckpointRef | None]) -> bool:
        """Whether no evaluator will publish anything about a checkpoint."""
        passed_over = self._evaluation.policy == "Latest" and (reference.name, reference.generation) in self._skipped
        is_over = reference in self._merged or reference in self._failed
        return is_over or (passed_over and reference not in needed)

    def _score(self, result: Result) -> tuple[Rank, Score] | None:
        metric, reference = self._evaluation.metric, result.checkpoint
        value, place = result.metrics.get(metric), result.rank(metric, self._evaluation.direction)
        if value is None or place is None:
            return None
        return place, Score(name=reference.name, step=reference.step, metric=metric, value=value)

    def _evaluations(self, checkpoints: list[CheckpointRef], evaluated: CheckpointRef | None) -> Evaluations:
        waiting = [ref for ref in checkpoints if evaluated is None or self._age(ref) > self._age(evaluated)]
        failed = {name: why for log in self._logs.values() for name, why in log.failed.items()}
        oldest = min((self._saved[ref].at for ref in waiting if ref in self._saved), default=None)
        return Evaluations(
            merged=len(self._merged),
            skipped=len(self._skipped),
            failed=len(failed),
            failure=_failure(failed, evaluated),
            waits_since=None if oldest is None else max(oldest, self._published or oldest),
        )

    def _room(self, now: float) -> Volume | None:
        if now - self._volume[0] >= VOLUME_SECONDS:
            found = os.statvfs(self._rundir.path)
            self._volume = now, Volume(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)
        return self._volume[1]

    def _evaluators(self, logs: list[Path], now: float) -> list[EvaluatorView]:
        views = []
        for path in logs:
            name = evaluator_of_log(path)
            if name is None:
                continue
            with suppress(FileNotFoundError):
                if name not in self._logs and len(self._logs) < MAX_EVALUATORS:
                    self._logs[name] = EvaluatorFollower(path, self._counted.evaluators_until)
                if name not in self._logs:
                    continue
                log = self._logs[name]
                if not log.is_quiet(now) or self._old_logs.is_due(name, now):
                    log.follow(now)
                    self._old_logs.put_off(name, now)
                view = log.view(now)
                if view is not None and view.silent_seconds < FORGOTTEN_SECONDS:
                    views.append(view)
        return views

    def _ending(self) -> Ending | None:
        if (done := self._rundir.done()) is not None:
            at, final, early = _time(done), _reference(done.get("final")), stopped_early(done)
            if early:
                return Ending(False, Reason.STOPPED_EARLY, early, at, final, whole(done.get("plannedSteps")))
            return Ending(False, "Done", "training is complete", at, final)
        if (failed := self._rundir.failed()) is not None:
            reason, message = str(failed.get("reason", "Failed")), str(failed.get("message", "the job has failed"))
            return Ending(True, reason[:MAX_REASON], message[:MAX_WORDS], _time(failed))
        return None


class RunWatcher(threading.Thread):
    """Looks at the run directory again and again.

    Args:
        told: called on the watcher's thread with each look's result.
        complained: called when the directory cannot be read, with a sentence, once for each different one.
    """

    def __init__(
        self, directory: RunDirectory, told: Callable[[Observed], None], complained: Callable[[str], None]
    ) -> None:
        super().__init__(name="run-watcher", daemon=True)
        self._directory, self._told, self._complained = directory, told, complained
        self._stopped = False
        self._wake = threading.Event()

    def run(self) -> None:
        """Look until stopped."""
        complaint = ""
        while not self._stopped:
            self._wake.clear()
            try:
                self._told(self._directory.look(time.time()))
                complaint = ""
            except Exception as error:
                told = str(error)[:MAX_WORDS] or type(error).__name__
                if told != complaint:
                    complaint = told
                    self._complained(f"the run directory cannot be read: {complaint}")
            self._wake.wait(SECONDS)

    def look_again(self) -> None:
        """Look at once, and not only after a while. Does not wait."""
        self._wake.set()

    def stop(self) -> None:
        """Stop looking. Does not wait: a look may hang with the disk."""
        self._stopped = True
        self._wake.set()


def _added(parts: Iterable[Mapping[Purpose, float]]) -> Mapping[Purpose, float]:
    found: dict[Purpose, float] = {}
    for part in parts:
        for purpose, seconds in part.items():
            found[purpose] = found.get(purpose, 0.0) + seconds
    return found


def _failure(failed: Mapping[str, str], evaluated: CheckpointRef | None) -> str:
    newest = max(failed, default="")
    return f"{newest}: {failed[newest]}" if newest and (evaluated is None or newest > evaluated.name) else ""


def _time(content: dict[str, object]) -> float | None:
    return amount(content.get("at"))


def _reference(value: object) -> CheckpointRef | None:
    """The checkpoint that DONE names; one that no trainer names is none."""
    try:
        return CheckpointRef.read(value) if isinstance(value, dict) else None
    except ValidationError:
        return None
