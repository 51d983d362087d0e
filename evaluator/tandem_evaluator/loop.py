"""The evaluator's loop: survey, choose, claim, evaluate and publish until training is over and every result is merged.

Trouble of four kinds, and what becomes of it:
- A checkpoint is *broken* (its bytes are not those of its manifest): set aside as `.bad` after a second look, for
  everybody.
- A checkpoint cannot be *used by this process* (the disk keeps failing, or its weights are not those of the job's
  model): reported and passed over here; another process may have more luck.
- The user's *program* fails on a checkpoint, twice and each time afresh: recorded as its last word, for everybody.
- The *disk* fails: waited for, because an NFS server comes back; given up after PATIENCE_SECONDS of nothing but
  failures.
"""

import time
from collections.abc import Iterator
from typing import Any

from tandem.exitcode import ExitCode
from tandem.job import Evaluators
from tandem.rundir.checkpoint import Broken
from tandem.rundir.evaluations import BASE
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import FOREIGN
from tandem.rundir.records import Evaluated, NotEvaluated, Unusable
from tandem.rundir.watched import OVERWRITTEN
from tandem.status import CheckpointRef
from tandem_evaluator.base_model import BaseWeights
from tandem_evaluator.choice import Action, Evaluate, Finished, Merge, Skip, View, Wait, choose, worth_doing
from tandem_evaluator.claim import Claim, claim, claim_file, give_back_leftovers
from tandem_evaluator.evaluator_log import EvaluatorLog, say
from tandem_evaluator.publication import Publication
from tandem_evaluator.scoring import Misfit, ProgramFailed, Scoring, Work
from tandem_evaluator.survey import Survey
from tandem_evaluator.watch import WatchSurvey

MIN_POLL_SECONDS = 0.2
MAX_POLL_SECONDS = 1.0
"""A look costs a few listings; with nothing to do it is repeated ever more rarely up to this."""
READ_AGAIN_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses between attempts to read a checkpoint."""
PATIENCE_SECONDS = 120.0
SLICE_SECONDS = 0.1
"""A signal handler may only set a flag, so pauses are cut into slices after which the flag is looked at."""


def survey_of(rundir: RunDir, evaluators: Evaluators, has_base: bool = False) -> Survey:
    """Looks for the checkpoints that are evaluated: Tandem's own, or those that the script writes in its own way.

    Args:
        has_base: whether the model that training begins with is evaluated, too.
    """
    if evaluators.watch is None:
        return Survey(rundir, evaluators.processes, has_base)
    return WatchSurvey(rundir, evaluators.processes, evaluators.watch, evaluators.settle_seconds)


class Evaluator:
    """One evaluator process at work on one run directory."""

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
            name: of this process; no other living process of the run has it.
            scoring: how a shard is evaluated.
            base: the model that training begins with, where that is evaluated, too.
        """
        self._rundir, self._policy, self._shards = rundir, evaluators.policy, evaluators.processes
        self._name, self._scoring, self._log = name, scoring, log
        self._base, self._survey = base, survey_of(rundir, evaluators, has_base=base is not None)
        self._publication = Publication(rundir, evaluators, scoring)
        self._unusable: dict[CheckpointRef, str] = {}
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
                if fresh:
                    give_back_leftovers(self._rundir, self._name)
                    fresh = False
                action = self.step()
                if isinstance(action, Finished):
                    return self._finish()
            except (OSError, ValueError) as error:
                now = time.monotonic()
                trouble_since = trouble_since or now
                if now - trouble_since > PATIENCE_SECONDS:
                    say("giving-up", why=f"the run directory has been failing for {PATIENCE_SECONDS:.0f} s: {error}")
                    return ExitCode.FAILED
                say("trouble", why=error)
                self._pause(2 * MAX_POLL_SECONDS)
                continue
            trouble_since = None
            if isinstance(action, Wait):
                self._scoring.rest()
                self._pause(poll)
                poll = min(1.2 * poll, MAX_POLL_SECONDS)
            else:
                poll = MIN_POLL_SECONDS
        return ExitCode.PREEMPTED

    def step(self) -> Action:
        """Look, choose and act once. Returns what was done: Wait also if every claim was lost to others.

        Raises:
            OSError, ValueError: the run directory cannot be read or written, or contradicts itself.
        """
        view = self.look()
        action = choose(view, self._policy, self._shards)
        match action:
            case Evaluate(reference, shards):
                won = next(self._claims(reference, shards), None)
                if won is None:
                    return Wait()
                shard, held = won
                with held:
                    self._log.doing("evaluating", reference.name)
                    self.evaluate(reference, shard)
            case Merge(reference):
                self.merge(reference)
            case Skip(references):
                self.skip(references)
        return action

    def look(self) -> View:
        """See what is there, set broken checkpoints aside, keep best.json up to date."""
        view = self._survey.look(self._unusable)
        for name, why in self._survey.broken.items():
            self._set_aside(name, why)
        if (signature := self._survey.signature(view)) != self._signature:
            self._publication.update_best()
            self._scoring.best_changed(self._rundir)
            self._signature = signature
        if self._base is not None and view.base is not None and view.base.merged:
            self._base.remove()
            self._base = None
        return view

    def claim(self, reference: CheckpointRef, shard: int) -> Claim | None:
        """Claim a shard; None if another process has it, or had it and is done since our look."""
        held = claim(claim_file(self._rundir, reference, shard, self._shards), self._name)
        if held is None:
            return None
        try:
            view = self._survey.look(self._unusable)
            now = view.standing(reference)
            if now is not None and worth_doing(now, shard, view, self._policy):
                return held
        except BaseException:
            held.release()
            raise
        held.release()
        return None

    def evaluate(self, reference: CheckpointRef, shard: int) -> None:
        """Evaluate a shard that is claimed, publish its result, and merge if it was the last one."""
        work = Work(reference, shard, self._shards, self._name, time.time())
        try:
            found = self._read(reference)
            if found is None:
                return
            result = self._scoring.score(found, work, lambda: not self._stopped)
        except Misfit as error:
            self._pass_over(reference, str(error))
            return
        except ProgramFailed as error:
            if self._publication.fail(reference, str(error)):
                self._log.event(Unusable(time=time.time(), checkpoint=reference.name, why=str(error)))
            return
        if result is None or not self._is_still_there(reference):
            return
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
        """Publish the merged result if all shards are there."""
        merged = self._publication.merge(reference)
        if merged is not None:
            say("merged", checkpoint=reference.name, **merged.scores, **({"note": merged.note} if merged.note else {}))
            self._publication.update_best()

    def skip(self, references: tuple[CheckpointRef, ...]) -> None:
        """Record that these are passed over."""
        for reference in references:
            if self._publication.skip(reference, "a newer checkpoint was there before its turn came"):
                self._log.event(NotEvaluated(time=time.time(), checkpoint=reference.name, step=reference.step))

    def _claims(self, reference: CheckpointRef, shards: tuple[int, ...]) -> Iterator[tuple[int, Claim]]:
        for shard in shards:
            if (held := self.claim(reference, shard)) is not None:
                yield shard, held

    def _read(self, reference: CheckpointRef) -> Any:
        """What is scored; None if it is gone, broken, unreadable, or we are asked to leave.

        Raises:
            ProgramFailed: it is the base model, and that cannot be loaded.
        """
        if reference == BASE and self._base is not None:
            self._base.prepare(self._name, lambda: not self._stopped)
        doubt: Broken | None = None
        failure: OSError | None = None
        for pause in (0.0, *READ_AGAIN_SECONDS):
            self._pause(pause)
            if self._stopped:
                return None
            try:
                return self._scoring.read(*self._survey.open(reference))
            except FileNotFoundError:
                return None
            except Broken as error:
                if doubt is not None:
                    self._set_aside(reference.name, str(error))
                    return None
                doubt = error
            except OSError as error:
                failure = error
        self._pass_over(reference, f"it cannot be read: {failure}")
        return None

    def _is_still_there(self, reference: CheckpointRef) -> bool:
        """Whether what was evaluated is what was found: a script may overwrite its own checkpoints meanwhile. Tandem's
        are never written again, and one that was deleted meanwhile has its result all the same."""
        if reference.generation != FOREIGN or reference == BASE:
            return True
        try:
            self._survey.open(reference)
        except FileNotFoundError:
            self._publication.skip(reference, OVERWRITTEN)
            return False
        return True

    def _set_aside(self, name: str, why: str) -> None:
        if self._rundir.set_aside(name, why=why) is not None:
            self._log.event(Unusable(time=time.time(), checkpoint=name, why=why))

    def _pass_over(self, reference: CheckpointRef, why: str) -> None:
        self._unusable[reference] = why
        self._log.event(Unusable(time=time.time(), checkpoint=reference.name, why=why))

    def _finish(self) -> ExitCode:
        self._publication.update_best()
        final = self._survey.look().final
        if final in self._unusable:
            say("giving-up", checkpoint=final.name, why=f"the final checkpoint: {self._unusable[final]}")
            return ExitCode.FAILED
        return ExitCode.DONE

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stopped and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, SLICE_SECONDS))
