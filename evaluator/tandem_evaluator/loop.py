"""The evaluator's loop: survey, choose, claim, evaluate and publish until training is over and every result is merged.

Failures of four kinds, and how they are handled:
- A checkpoint is *broken* (its bytes do not match its manifest): renamed to `.bad` after a second check, for all
  processes.
- A checkpoint cannot be *used by this process* (the disk keeps failing, or its weights are not those of the job's
  model): reported and skipped here; another process may succeed.
- The user's *program* fails on a checkpoint, twice and each time freshly started: recorded as the final result, for all
  processes.
- The *disk* fails: waited for, because an NFS server comes back; given up after PATIENCE_SECONDS of nothing but
  failures.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.job.resource import Evaluators
from tandem.processes.exitcode import ExitCode
from tandem.rundir import sync_client
from tandem.rundir.checkpoint import WEIGHTS, Broken, Manifest
from tandem.rundir.evaluations import BASE, PASSED_OVER
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import FOREIGN_GENERATION
from tandem.rundir.records import CheckpointUnusable, CorruptionRecord, Evaluated, NotEvaluated
from tandem.rundir.watched import OVERWRITTEN
from tandem.wire.status import SCORES_DIFFER, CheckpointRef
from tandem_evaluator.base_model import BaseWeights
from tandem_evaluator.choice import Action, Evaluate, Finished, Merge, Skip, View, Wait, choose, is_still_needed
from tandem_evaluator.claim import Claim, claim, claim_file, release_leftovers
from tandem_evaluator.evaluator_log import EvaluatorLog, log_event
from tandem_evaluator.publication import OtherWeights, Publication
from tandem_evaluator.scoring import ProgramFailed, Scoring, UnusableCheckpoint, Work
from tandem_evaluator.survey import Survey
from tandem_evaluator.watch import WatchSurvey

MIN_POLL_SECONDS = 0.2
MAX_POLL_SECONDS = 1.0
"""Longest interval between two surveys. A survey costs a few directory listings; without work the interval grows up to
this."""
READ_AGAIN_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses between attempts to read a checkpoint."""
PATIENCE_SECONDS = 120.0
SLICE_SECONDS = 0.1
"""Interval at which a pause checks for a stop: a signal handler may only set a flag."""


def survey_of(rundir: RunDir, evaluators: Evaluators, has_base: bool = False) -> Survey:
    """The survey of a job's checkpoints: Tandem's own, or those that the script writes in its own format.

    Args:
        has_base: whether the base model of a fine-tuning is evaluated, too.
    """
    if evaluators.watch is None:
        return Survey(rundir, evaluators.processes, has_base)
    return WatchSurvey(rundir, evaluators.processes, evaluators.watch, evaluators.settle_seconds, evaluators.policy)


class Evaluator:
    """One evaluator process of one run directory."""

    def __init__(
        self,
        rundir: RunDir,
        evaluators: Evaluators,
        name: str,
        scoring: Scoring,
        log: EvaluatorLog,
        base: BaseWeights | None = None,
    ) -> None:
        """
        Args:
            name: name of this process, unique among the living ones of the run.
            scoring: the way to evaluate a shard.
            base: the base model of a fine-tuning, if it is evaluated, too.
        """
        self._rundir, self._policy, self._shards = rundir, evaluators.policy, evaluators.processes
        self._name, self._scoring, self._log = name, scoring, log
        self._base, self._survey = base, survey_of(rundir, evaluators, has_base=base is not None)
        self._publication = Publication(rundir, evaluators, scoring)
        self._unusable: dict[CheckpointRef, str] = {}
        self._misread: set[CheckpointRef] = set()
        self._signature: object = None
        self._stopped = False

    def stop(self) -> None:
        """Leave soon. May be called from a signal handler."""
        self._stopped = True

    def run(self) -> ExitCode:
        """Evaluate until there is nothing left to do.

        Returns:
            DONE; PREEMPTED if stopped before; FAILED if the final checkpoint or the disk cannot be read, and a new
            attempt may succeed.
        """
        poll, trouble_since = MIN_POLL_SECONDS, None
        fresh = True
        while not self._stopped:
            self._log.doing("idle")
            try:
                # Claims that an earlier process of this name died with would block its shards until they expire.
                if fresh:
                    release_leftovers(self._rundir, self._name)
                    fresh = False
                action = self.step()
                if isinstance(action, Finished):
                    return self._finish()
            except (OSError, ValueError) as error:
                now = time.monotonic()
                trouble_since = trouble_since or now
                if now - trouble_since > PATIENCE_SECONDS:
                    log_event(
                        "giving-up", why=f"the run directory has been failing for {PATIENCE_SECONDS:.0f} s: {error}"
                    )
                    return ExitCode.FAILED
                log_event("trouble", why=error)
                self._pause(2 * MAX_POLL_SECONDS)
                continue
            # One successful step ends the row of failures.
            trouble_since = None
            # Poll less and less often while there is nothing to do.
            if isinstance(action, Wait):
                self._scoring.idle()
                self._pause(poll)
                poll = min(1.2 * poll, MAX_POLL_SECONDS)
            else:
                poll = MIN_POLL_SECONDS
        return ExitCode.PREEMPTED

    def step(self) -> Action:
        """Survey, choose and act once. Returns the action: Wait also if every claim was lost to other processes.

        Raises:
            OSError, ValueError: the run directory cannot be read or written, or contradicts itself.
        """
        view = self.survey()
        action = choose(view, self._policy, self._shards)
        match action:
            case Evaluate(reference, shards):
                # Other processes compete for the same shards, so losing all of them is normal.
                won = next(self._claims(reference, shards), None)
                if won is None:
                    return Wait()
                shard, acquired = won
                with acquired:
                    self._log.doing("evaluating", reference.name)
                    self.evaluate(reference, shard)
            case Merge(reference):
                self.merge(reference)
            case Skip(references):
                self.skip(references)
        return action

    def survey(self) -> View:
        """Survey the run directory, set broken checkpoints aside, and keep best.json up to date."""
        view = self._survey.scan(self._unusable)
        broken = {name: reason for name, reason in self._survey.broken.items() if not sync_client.repair(name, ())}
        if len(broken) < len(self._survey.broken):
            view = self._survey.scan(self._unusable)
        for name, reason in broken.items():
            self._set_aside(name, reason)
        if (signature := self._survey.signature(view)) != self._signature:
            self._publication.update_best()
            self._scoring.best_changed(self._rundir)
            self._signature = signature
        if self._base is not None and view.base is not None and view.base.merged:
            self._base.remove()
            self._base = None
        return view

    def claim(self, reference: CheckpointRef, shard: int) -> Claim | None:
        """Claim a shard; None if another process has it, or has finished it since the survey."""
        acquired = claim(claim_file(self._rundir, reference, shard, self._shards), self._name)
        if acquired is None:
            return None
        try:
            # The claim was won on an old view: the shard may have been finished between the survey and the claim.
            view = self._survey.scan(self._unusable)
            state = view.state_of(reference)
            if state is not None and is_still_needed(state, shard, view, self._policy):
                return acquired
        except BaseException:
            acquired.release()
            raise
        acquired.release()
        return None

    def evaluate(self, reference: CheckpointRef, shard: int) -> None:
        """Evaluate a claimed shard, publish its result, and merge if it was the last one."""
        work = Work(reference, shard, self._shards, self._name, time.time())
        try:
            checkpoint = self._read(reference)
            if checkpoint is None:
                return
            result = self._scoring.score(checkpoint, work, lambda: not self._stopped)
        except UnusableCheckpoint as error:
            self._mark_unusable(reference, str(error))
            return
        except ProgramFailed as error:
            if self._publication.fail(reference, str(error)):
                self._log.event(CheckpointUnusable(time=time.time(), checkpoint=reference.name, why=str(error)))
            return
        if result is None or not self._is_unchanged(reference):
            return
        try:
            OtherWeights.check(result, self._weights_digest(reference))
        except OtherWeights as error:
            self._report_other_weights(error)
            # The next try reads them anew; a second one shows that this process cannot do it.
            self._scoring.idle()
            if reference in self._misread:
                self._mark_unusable(reference, f"{error}, twice")
            self._misread.add(reference)
            return
        # Publish before the claim is released, so that no other process evaluates the shard again.
        if self._publication.publish(result):
            self._log.event(
                Evaluated(
                    time=time.time(),
                    checkpoint=reference.name,
                    step=reference.step,
                    generation=reference.generation,
                    shard=shard,
                    seconds=round(result.seconds, 3),
                )
            )
        self.merge(reference)

    def merge(self, reference: CheckpointRef) -> None:
        """Publish the merged result if all shards are published."""
        try:
            merged = self._publication.merge(reference, self._weights_digest(reference))
        except OtherWeights as error:
            self._report_other_weights(error)
            return
        if merged is not None:
            log_event(
                "merged", checkpoint=reference.name, **merged.scores, **({"note": merged.note} if merged.note else {})
            )
            self._publication.update_best()

    def skip(self, references: tuple[CheckpointRef, ...]) -> None:
        """Record that checkpoints are skipped."""
        for reference in references:
            if self._publication.skip(reference, PASSED_OVER):
                self._log.event(NotEvaluated(time=time.time(), checkpoint=reference.name, step=reference.step))

    def _weights_digest(self, reference: CheckpointRef) -> str:
        """Digest of a checkpoint's weights by its manifest; empty if it is gone, or the script's own."""
        try:
            _, manifest = self._survey.open(reference)
            return "" if manifest is None else manifest.entry(WEIGHTS).digest
        except (FileNotFoundError, Broken):
            return ""

    def _report_other_weights(self, error: OtherWeights) -> None:
        message = f"{error}; its result does not count, and the shard is evaluated again"
        self._log.event(CorruptionRecord(time=time.time(), reason=SCORES_DIFFER, message=message))

    def _claims(self, reference: CheckpointRef, shards: tuple[int, ...]) -> Iterator[tuple[int, Claim]]:
        for shard in shards:
            if (acquired := self.claim(reference, shard)) is not None:
                yield shard, acquired

    def _read(self, reference: CheckpointRef) -> Any:
        """Read what is scored; None if it is gone, broken, unreadable, or the process has to stop.

        Raises:
            ProgramFailed: it is the base model, and that cannot be loaded.
        """
        if reference == BASE and self._base is not None:
            self._base.prepare(self._name, lambda: not self._stopped)
        doubt: Broken | None = None
        failure: OSError | None = None
        # The pauses grow, because an NFS server may be away for seconds.
        for pause in (0.0, *READ_AGAIN_SECONDS):
            self._pause(pause)
            if self._stopped:
                return None
            try:
                if doubt is not None:
                    sync_client.repair(reference.name, [WEIGHTS])
                return self._scoring.read(*self._open(reference))
            except FileNotFoundError:
                return None
            except Broken as error:
                # Only a second reading convicts a checkpoint: an NFS client may show old bytes.
                if doubt is not None:
                    self._set_aside(reference.name, str(error))
                    return None
                doubt = error
            except OSError as error:
                failure = error
        self._mark_unusable(reference, f"it cannot be read: {failure}")
        return None

    def _open(self, reference: CheckpointRef) -> tuple[Path, Manifest | None]:
        """Folder and manifest of a checkpoint whose weights are on this disk. Raises as `Survey.open`."""
        folder, manifest = self._survey.open(reference)
        if manifest is not None:
            sync_client.fetch(manifest.name, manifest.digest, [WEIGHTS])
        return folder, manifest

    def _is_unchanged(self, reference: CheckpointRef) -> bool:
        """Whether the checkpoint is still the one that was evaluated: a script may overwrite its own checkpoints
        meanwhile. Tandem's are never rewritten, and one that was deleted meanwhile gets its result all the same."""
        if reference.generation != FOREIGN_GENERATION or reference == BASE:
            return True
        try:
            self._survey.open(reference)
        except FileNotFoundError:
            self._publication.skip(reference, OVERWRITTEN)
            return False
        return True

    def _set_aside(self, name: str, reason: str) -> None:
        if self._rundir.set_aside(name, why=reason) is not None:
            self._log.event(CheckpointUnusable(time=time.time(), checkpoint=name, why=reason))

    def _mark_unusable(self, reference: CheckpointRef, reason: str) -> None:
        self._unusable[reference] = reason
        self._log.event(CheckpointUnusable(time=time.time(), checkpoint=reference.name, why=reason))

    def _finish(self) -> ExitCode:
        self._publication.update_best()
        # Only the final checkpoint has to be evaluated; a restart of this process may be able to read it.
        final = self._survey.scan().final
        if final in self._unusable:
            log_event("giving-up", checkpoint=final.name, why=f"the final checkpoint: {self._unusable[final]}")
            return ExitCode.FAILED
        return ExitCode.DONE

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stopped and (remaining := until - time.monotonic()) > 0:
            time.sleep(min(remaining, SLICE_SECONDS))
