"""Watches the run directory: the end of the job, checkpoints, evaluations, evaluators.

It polls, on a thread of its own, because a shared disk may take seconds to answer and heartbeats must not wait for it.
What never changes (a manifest, a merged result) is read once. What hardly ever changes is read rarely: the folders of
evaluations that are done, and the logs of evaluators that are gone. A run of weeks has thousands of them, and on NFS
each is a request.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nlargest
from operator import attrgetter
from pathlib import Path

from pydantic import ValidationError

from tandem.confidence import Estimate, count_tied
from tandem.job.resource import DistributedTrainingJob, Evaluators
from tandem.model import amount, whole_number
from tandem.rundir.against_base import MIN_WORSE_CHECKPOINTS
from tandem.rundir.bucket_usage import UsageReader
from tandem.rundir.catalog import EvaluationResult, Lineage, RereadSchedule, Results
from tandem.rundir.checkpoint import Broken
from tandem.rundir.durable import list_folder
from tandem.rundir.evaluations import Rank
from tandem.rundir.layout import EARLIER_FOLDERS, FOLDERS, FinishedMember, RunDir, evaluator_of_log, stopped_early
from tandem.rundir.lineage import batches_left_out
from tandem.rundir.watched import WATCHED, Finder
from tandem.wire.ledger import BucketUsage, Purpose
from tandem.wire.reasons import Reason
from tandem.wire.status import CheckpointRef, Corruption, EvaluatorView, ProvenanceHead, Score, joined
from tandem_coordinator.base_watch import AgainstBase, BaseWatch
from tandem_coordinator.foreign_checkpoints import ForeignCheckpoints
from tandem_coordinator.log_followers import EvaluatorFollower, LedgerPosition, Training, TrainingLogs
from tandem_coordinator.optimizer_watch import OptimizerWatch
from tandem_coordinator.provenance_log import ProvenanceLog
from tandem_coordinator.weights_watch import Unchanged, WeightsWatch

POLL_SECONDS = 0.5
"""Time between two polls, in seconds."""
MAX_READY_SILENCE_SECONDS = 15.0
"""Maximum silence of an evaluator that counts as ready, in seconds. An idle one writes every 5 s."""
HIDE_AFTER_SECONDS = 60.0
"""Silence after which an evaluator is not shown any more, in seconds."""
VOLUME_SECONDS = 10.0
"""Time between two queries of the free space, in seconds: to a shared disk each is a request."""
MAX_EVALUATORS = 1_000
"""Maximum number of evaluators' logs that are followed."""
MAX_REASON_LENGTH, MAX_MESSAGE_LENGTH = 100, 2_000
"""Maximum lengths of the reason and of the message of FAILED.json, in characters."""


@dataclass(frozen=True)
class Ending:
    """The end of the job."""

    failed: bool
    reason: str
    """Reason, one CamelCase word."""
    message: str
    ended_at: float | None
    """Time of the end, in seconds since the epoch."""
    final: CheckpointRef | None = None
    """The last checkpoint, if training is complete."""
    total_steps: int | None = None
    """Planned number of steps, if fewer were taken."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """The newest checkpoint on the disk."""

    saved_at: float
    """Time at which it was taken, in seconds since the epoch."""
    size: int | None
    """Size in bytes; None if a script has written it in its own format."""


@dataclass(frozen=True)
class Volume:
    """The file system that the run directory is on."""

    size: int
    """Size in bytes."""
    free: int
    """Free space in bytes."""


@dataclass(frozen=True)
class Evaluations:
    """Numbers of checkpoints by the outcome of their evaluation, over the whole life of the run directory."""

    merged: int = 0
    skipped: int = 0
    failed: int = 0
    """Failed evaluations since this process started."""
    failure: str = ""
    """The newest failed checkpoint and the reason, while no newer checkpoint has been evaluated; otherwise empty."""
    waits_since: float | None = None
    """Time since which a checkpoint newer than the newest evaluated one has waited and no evaluation was published, in
    seconds since the epoch; None if none waits."""


@dataclass(frozen=True)
class Observed:
    """The state of the run directory."""

    ending: Ending | None = None
    finished: frozenset[FinishedMember] = frozenset()
    """Members that have finished while no coordinator answered them."""
    latest_checkpoint: CheckpointRef | None = None
    foreign: tuple[int, str] | None = None
    """The newest checkpoint that is not Tandem's, and its modification time."""
    foreign_candidate: tuple[int, str] | None = None
    """The newest such checkpoint, even if it may be incomplete."""
    foreign_polled_at: float = 0.0
    """Time of the last search for one, on the monotonic clock; infinite if nobody searches."""
    latest_evaluation: Score | None = None
    latest_metrics: Mapping[str, float] = field(default_factory=dict)
    """All scores of the checkpoint that was evaluated last, by metric."""
    best: Score | None = None
    against_base: AgainstBase = field(default_factory=AgainstBase)
    """Comparison of checkpoints with the base model."""
    unchanged: Unchanged = field(default_factory=Unchanged)
    """The newest checkpoints whose weights are those of an earlier one."""
    corruptions: Sequence[Corruption] = ()
    """Numbers that are wrong, one entry for each kind."""
    evaluators: tuple[EvaluatorView, ...] = ()
    final_is_evaluated: bool = False
    training: Training = field(default_factory=Training)
    saved: SavedCheckpoint | None = None
    evaluations: Evaluations = field(default_factory=Evaluations)
    evaluated_at: float | None = None
    """Time at which an evaluator last published a result, also of a part, in seconds since the epoch."""
    rewinds: int = 0
    batches_left_out: int = 0
    """Batches that rewinds skipped."""
    limits: tuple[int, ...] = ()
    """Maximum number of samples of a micro-batch, one entry for each time that one did not fit into memory."""
    lines_lost: int = 0
    """Lost lines of evaluators' logs."""
    volume: Volume | None = None
    evaluator_seconds: Mapping[Purpose, float] = field(default_factory=dict)
    """Seconds for which evaluator processes existed, by purpose, since the last record of a ledger."""
    evaluator_gpu_seconds: Mapping[Purpose, float] = field(default_factory=dict)
    """Seconds of the same processes, times the GPUs of each."""
    bucket: BucketUsage | None = None
    """Requests to the job's bucket; None without one."""
    provenance: ProvenanceHead | None = None
    """The end of the run's chain; None before the first entry."""
    read_at: float | None = None
    """Time at which the logs were read, in seconds since the epoch."""

    @property
    def lag_steps(self) -> int | None:
        """Steps between the newest checkpoint and the newest evaluated one."""
        if self.latest_checkpoint is None or self.latest_evaluation is None:
            return None
        return max(0, self.latest_checkpoint.step - self.latest_evaluation.step)

    @property
    def ready_evaluators(self) -> int:
        """Number of evaluators with a recent sign of life."""
        return sum(1 for evaluator in self.evaluators if evaluator.silent_seconds < MAX_READY_SILENCE_SECONDS)


class RunDirectory:
    """One run directory as it was at the last poll, with what need not be read twice. For one thread.

    Args:
        is_own_script: a user's own script trains, and may save in its own format.
        has_base: the model that training begins with is evaluated, too.
        ledger_position: the part of its logs that the ledger has counted already.
        job: the job whose micro-batch limits are read, and which says whether checkpoints are compared; None: no limits
            are, and they are.
        provenance: the run's chain, to which everything that is new is added; None: this process does not write it.
    """

    def __init__(
        self,
        rundir: RunDir,
        evaluation: Evaluators,
        is_own_script: bool = False,
        has_base: bool = False,
        ledger_position: LedgerPosition | None = None,
        job: DistributedTrainingJob | None = None,
        provenance: ProvenanceLog | None = None,
    ) -> None:
        self._rundir, self._evaluation, self._provenance = rundir, evaluation, provenance
        self._foreign = (
            ForeignCheckpoints(rundir.path, frozenset({*FOLDERS, *EARLIER_FOLDERS, WATCHED})) if is_own_script else None
        )
        self._lineage, self._results = Lineage(rundir), Results(rundir)
        self._job = job
        self._compares = job is None or job.spec.elasticity.on_corruption != "Off"
        self._bucket = UsageReader()
        self._limits: tuple[int, ...] = ()
        self._manifests: dict[str, CheckpointRef | None] = {}
        self._saved: dict[CheckpointRef, SavedCheckpoint] = {}
        self._weights, self._optimizers = WeightsWatch(), OptimizerWatch()
        watch = evaluation.watch
        policy = evaluation.policy if evaluation.processes else None
        self._finder = None if watch is None else Finder(rundir, watch, evaluation.settle_seconds, policy)
        self._base = BaseWatch(rundir, evaluation) if has_base else None
        self._scores: dict[CheckpointRef, tuple[Rank, Score, Estimate]] = {}
        self._skipped: set[tuple[str, int]] = set()
        self._merged: set[CheckpointRef] = set()
        """Evaluated checkpoints, whether that gave the deciding score or not."""
        self._failed: set[CheckpointRef] = set()
        """Checkpoints that the user's program cannot evaluate."""
        self._measured: CheckpointRef | None = None
        self._metrics: Mapping[str, float] = {}
        self._published: float | None = None
        self._not_final: frozenset[str] = frozenset()
        self._old_logs = RereadSchedule()
        self._logs: dict[str, EvaluatorFollower] = {}
        self._ledger_position = ledger_position or LedgerPosition()
        self._training = TrainingLogs(rundir.log, self._ledger_position)
        self._volume: tuple[float, Volume | None] = (float("-inf"), None)

    def poll(self, now: float) -> Observed:
        """Read what is new.

        Raises:
            OSError, ValueError: the directory cannot be read, or is damaged; the next poll may succeed.
        """
        before = self._lineage.newest
        self._lineage.look()
        if self._job is not None and self._lineage.newest != before:
            # One that did not fit ends its generation.
            self._limits = tuple(self._rundir.limits(self._job))
        if self._provenance is not None:
            self._provenance.begin()
            self._provenance.records(self._lineage.newest, len(self._lineage.rewinds))
        logs = list_folder(self._rundir.log)
        # Checkpoints off the chain were superseded by a restart: neither the newest nor the best is among them.
        checkpoints = [ref for ref in self._checkpoints() if self._lineage.counts(ref)]
        ending = self._ending()
        final = None if ending is None else ending.final
        latest = max(checkpoints, key=attrgetter("age"), default=None)
        # Before the scores: one that has ended has published all of its.
        evaluators = tuple(self._evaluator_views(logs, now))
        # After the end was read: what evaluators still owe depends on whether training is complete.
        self._read_scores(checkpoints, (final, latest), now)
        scores = [(ref, score) for ref, score in self._scores.items() if self._lineage.counts(ref)]
        evaluated, score = max(
            ((ref, score) for ref, (_, score, _) in scores), key=lambda entry: entry[0].age, default=(None, None)
        )
        newest = [
            newest_score
            for _, (_, newest_score, _) in nlargest(MIN_WORSE_CHECKPOINTS, scores, key=lambda entry: entry[0].age)
        ]
        best, best_score = _best(scores)
        training = self._training.follow(logs)
        corruptions = [
            *training.corruptions,
            *self._optimizers.corruptions,
            *(corruption for log in self._logs.values() for corruption in log.corruptions),
        ]
        foreign = self._foreign
        if self._provenance is not None:
            if ending is not None:
                self._provenance.ended(self._lineage.newest, ending.failed, ending.reason, ending.message)
            self._provenance.flush()
        return Observed(
            ending=ending,
            finished=self._rundir.finished_members(),
            latest_checkpoint=latest,
            foreign=None if foreign is None else foreign.poll(),
            foreign_candidate=None if foreign is None else foreign.candidate,
            foreign_polled_at=float("inf") if foreign is None else foreign.polled_at,
            latest_evaluation=score,
            latest_metrics=self._metrics if evaluated is not None and evaluated == self._measured else {},
            best=best_score,
            against_base=AgainstBase() if self._base is None else self._base.poll(best, newest, ending is not None),
            unchanged=self._weights.unchanged(self._lineage.counts),
            corruptions=joined(corruptions),
            evaluators=evaluators,
            final_is_evaluated=final is not None and final in self._merged | self._failed,
            training=training,
            saved=None if latest is None else self._saved.get(latest),
            evaluations=self._evaluations(checkpoints, evaluated),
            evaluated_at=self._results.changed_at,
            rewinds=len(self._lineage.rewinds),
            batches_left_out=batches_left_out(self._lineage.rewinds),
            limits=self._limits,
            lines_lost=sum(log.lines_lost for log in self._logs.values()),
            volume=self._volume_space(now),
            bucket=self._bucket.total(logs),
            provenance=None if self._provenance is None else self._provenance.end,
            evaluator_seconds=_sums(log.seconds for log in self._logs.values()),
            evaluator_gpu_seconds=_sums(log.gpu_seconds for log in self._logs.values()),
            read_at=now,
        )

    def take_problems(self) -> Sequence[str]:
        """New sentences about checkpoints of a script that are not evaluated, or may not be, and about provenance that
        cannot be written."""
        problems = [] if self._finder is None else list(self._finder.take_problems())
        return problems if self._provenance is None else [*problems, *self._provenance.take_problems()]

    def _checkpoints(self) -> list[CheckpointRef]:
        names = self._rundir.checkpoint_names()
        # Deleted checkpoints are forgotten; a manifest is read once.
        for name in self._manifests.keys() - set(names):
            if (removed := self._manifests.pop(name)) is not None:
                self._saved.pop(removed, None)
        for name in names:
            if name not in self._manifests:
                with suppress(FileNotFoundError):
                    self._manifests[name] = self._reference(name)
        own = [reference for reference in self._manifests.values() if reference is not None]
        return [*own, *self._watched_checkpoints()]

    def _watched_checkpoints(self) -> list[CheckpointRef]:
        """Checkpoints that the script has written in its own format."""
        if self._finder is None:
            return []
        # An error such as a full disk is reported by evaluators, which record the checkpoint, too.
        with suppress(OSError):
            self._finder.look(ended=False)
        for checkpoint in self._finder.recorded.values():
            self._saved.setdefault(checkpoint.reference, SavedCheckpoint(checkpoint.at, None))
        return [checkpoint.reference for checkpoint in self._finder.recorded.values()]

    def _reference(self, name: str) -> CheckpointRef | None:
        try:
            manifest = self._rundir.manifest(name)
        except Broken:
            return None
        self._saved[manifest.reference] = SavedCheckpoint(manifest.created_at, manifest.size)
        if self._provenance is not None:
            self._provenance.checkpoint(manifest)
        if self._compares:
            self._weights.record(manifest)
            self._optimizers.record(self._rundir.checkpoint(name), manifest)
        return manifest.reference

    def _read_scores(
        self, checkpoints: Iterable[CheckpointRef], needed: Sequence[CheckpointRef | None], now: float
    ) -> None:
        """Read new evaluations.

        Args:
            needed: what evaluators evaluate also where they passed it over.
        """
        # Folders whose evaluation is final are read rarely.
        before = self._not_final
        self._not_final = frozenset(ref.name for ref in checkpoints if not self._is_final(ref, needed))
        # One that was evaluated last may be deleted already.
        for result, published_at in self._results.new(now, self._not_final | before):
            reference = result.checkpoint
            if result.is_failure:
                self._failed.add(reference)
                continue
            if result.skipped:
                self._skipped.add((reference.name, reference.generation))
                continue
            self._published = max(self._published or 0.0, published_at)
            self._merged.add(reference)
            if self._provenance is not None:
                self._provenance.score(reference, result.metrics)
            if score := self._score(result):
                self._scores[reference] = score
                # The metrics shown are those of the newest evaluated checkpoint, in whatever order results come.
                if self._measured is None or reference.age >= self._measured.age:
                    self._measured, self._metrics = reference, result.metrics

    def _is_final(self, reference: CheckpointRef, needed: Sequence[CheckpointRef | None]) -> bool:
        """Whether no evaluator will publish anything more about a checkpoint."""
        is_passed_over = self._evaluation.policy == "Latest" and (reference.name, reference.generation) in self._skipped
        is_evaluated = reference in self._merged or reference in self._failed
        return is_evaluated or (is_passed_over and reference not in needed)

    def _score(self, result: EvaluationResult) -> tuple[Rank, Score, Estimate] | None:
        metric, reference = self._evaluation.metric, result.checkpoint
        value, rank = result.metrics.get(metric), result.rank(metric, self._evaluation.direction)
        if value is None or rank is None:
            return None
        low, high = result.intervals.get(metric, (None, None))
        score = Score(name=reference.name, step=reference.step, metric=metric, value=value, low=low, high=high)
        return rank, score, result.estimates[metric]

    def _evaluations(self, checkpoints: list[CheckpointRef], evaluated: CheckpointRef | None) -> Evaluations:
        # Only what is newer than the newest evaluated checkpoint still waits; older ones were passed over.
        waiting = [ref for ref in checkpoints if evaluated is None or ref.age > evaluated.age]
        failed = {name: reason for log in self._logs.values() for name, reason in log.failed.items()}
        oldest = min((self._saved[ref].saved_at for ref in waiting if ref in self._saved), default=None)
        return Evaluations(
            merged=len(self._merged),
            skipped=len(self._skipped),
            failed=len(failed),
            failure=_failure(failed, evaluated),
            waits_since=None if oldest is None else max(oldest, self._published or oldest),
        )

    def _volume_space(self, now: float) -> Volume | None:
        if now - self._volume[0] >= VOLUME_SECONDS:
            space = os.statvfs(self._rundir.path)
            self._volume = now, Volume(space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)
        return self._volume[1]

    def _evaluator_views(self, logs: list[Path], now: float) -> list[EvaluatorView]:
        views = []
        for path in logs:
            name = evaluator_of_log(path)
            if name is None:
                continue
            with suppress(FileNotFoundError):
                if name not in self._logs and len(self._logs) < MAX_EVALUATORS:
                    self._logs[name] = EvaluatorFollower(path, self._ledger_position.evaluators_until)
                if name not in self._logs:
                    continue
                log = self._logs[name]
                # A silent evaluator's log is read now and then: another process may write on under its name.
                if not log.is_quiet(now) or self._old_logs.is_due(name, now):
                    log.follow(now)
                    self._old_logs.put_off(name, now)
                view = log.view(now)
                if view is not None and view.silent_seconds < HIDE_AFTER_SECONDS:
                    views.append(view)
        return views

    def _ending(self) -> Ending | None:
        if (done := self._rundir.done()) is not None:
            ended_at, final, early_reason = _ended_at(done), _reference(done.get("final")), stopped_early(done)
            if early_reason:
                return Ending(
                    False, Reason.STOPPED_EARLY, early_reason, ended_at, final, whole_number(done.get("plannedSteps"))
                )
            return Ending(False, "Done", "training is complete", ended_at, final)
        if (failed := self._rundir.failed()) is not None:
            reason, message = str(failed.get("reason", "Failed")), str(failed.get("message", "the job has failed"))
            return Ending(True, reason[:MAX_REASON_LENGTH], message[:MAX_MESSAGE_LENGTH], _ended_at(failed))
        return None


REFRESH_SECONDS = 2.0
"""Time in seconds for which a bucket is asked for news, where pods share no disk."""


class RunWatcher(threading.Thread):
    """A thread that polls the run directory.

    Args:
        on_observed: called on the watcher's thread with the result of each poll.
        on_problem: called with a sentence when the directory cannot be read, once for each different one, and when a
            checkpoint of a script is not evaluated.
    """

    def __init__(
        self, directory: RunDirectory, on_observed: Callable[[Observed], None], on_problem: Callable[[str], None]
    ) -> None:
        super().__init__(name="run-watcher", daemon=True)
        self._directory, self._on_observed, self._on_problem = directory, on_observed, on_problem
        self._stopped = False
        self._wake = threading.Event()

    def run(self) -> None:
        """Poll until stopped."""
        last_error = ""
        while not self._stopped:
            is_awaited = self._wake.is_set()
            self._wake.clear()
            try:
                if is_awaited:
                    # What an agent's message refers to may have been written in its own pod. The process that
                    # exchanges reports a bucket that is away.
                    with suppress(OSError):
                        RunDir.refresh(REFRESH_SECONDS)
                self._on_observed(self._directory.poll(time.time()))
                last_error = ""
                for problem in self._directory.take_problems():
                    self._on_problem(problem)
            # Whatever goes wrong, the next poll may succeed; each different error is reported once.
            except Exception as error:
                text = str(error)[:MAX_MESSAGE_LENGTH] or type(error).__name__
                if text != last_error:
                    last_error = text
                    self._on_problem(f"the run directory cannot be read: {last_error}")
            self._wake.wait(POLL_SECONDS)

    def poll_now(self) -> None:
        """Poll now instead of after the interval. Does not wait."""
        self._wake.set()

    def stop(self) -> None:
        """Stop polling. Does not wait: a poll may hang with the disk."""
        self._stopped = True
        self._wake.set()


def _sums(mappings: Iterable[Mapping[Purpose, float]]) -> Mapping[Purpose, float]:
    sums: dict[Purpose, float] = {}
    for mapping in mappings:
        for purpose, seconds in mapping.items():
            sums[purpose] = sums.get(purpose, 0.0) + seconds
    return sums


def _failure(failed: Mapping[str, str], evaluated: CheckpointRef | None) -> str:
    newest = max(failed, default="")
    return f"{newest}: {failed[newest]}" if newest and (evaluated is None or newest > evaluated.name) else ""


def _ended_at(content: dict[str, object]) -> float | None:
    return amount(content.get("at"))


def _reference(value: object) -> CheckpointRef | None:
    """Parse the checkpoint that DONE.json names; None if it is none that a trainer writes."""
    try:
        return CheckpointRef.read(value) if isinstance(value, dict) else None
    except ValidationError:
        return None


def _best(
    scores: Sequence[tuple[CheckpointRef, tuple[Rank, Score, Estimate]]],
) -> tuple[CheckpointRef, Score] | tuple[None, None]:
    """The best checkpoint, and its score beside those of all others."""
    if not scores:
        return None, None
    best, (_, score, estimate) = min(scores, key=lambda entry: entry[1][0])
    tied = count_tied(estimate, (other for ref, (*_, other) in scores if ref != best))
    return best, score.model_copy(update={"tied": tied})
