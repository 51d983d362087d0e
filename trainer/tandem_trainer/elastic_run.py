"""One generation of an elastic run: its restore, the work after each step, and its last checkpoint.

Everything that makes training elastic is here, and nothing of what is trained: the built-in loop (tandem_trainer.train)
and a script of the user's own (tandem_trainer.session) both hand their steps to it. It starts from the newest valid
checkpoint, or from the state that ranks of the generation before still hold (tandem_trainer.continuation). After a step
the ranks vote: they save, they leave, or training goes back because the loss has become useless. In the end it records
the final checkpoint.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tandem.job.resource import CheckpointSpec, OnCorruption
from tandem.job.tasks import RewindOn
from tandem.processes.exitcode import ExitCode
from tandem.rundir import records
from tandem.rundir.checkpoint import DataPosition, Manifest
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import DatasetCommit, Origin, Rewind, data_step, decide, steps_left_out, windows
from tandem.rundir.log import LogWriter
from tandem.wire.protocol import SAVING
from tandem.wire.reasons import Reason
from tandem.wire.status import OPTIMIZER_DIFFERS, CheckpointRef, early_end_summary
from tandem_trainer.agreement import SampleDigest, refuse_samples
from tandem_trainer.checkpoint.mirror import MirrorPoint, Mirrors
from tandem_trainer.checkpoint.mirror_restore import restore_mirror
from tandem_trainer.checkpoint.replicas import Replicas
from tandem_trainer.checkpoint.restoring import Restored, check_disk, compare, record_start, restore
from tandem_trainer.checkpoint.saving import Author, SaveFailed, Saver, writers_of
from tandem_trainer.checkpoint.train_state import Contents, TrainState
from tandem_trainer.checkpoint.writer import Superseded
from tandem_trainer.continuation import MAX_REMEMBERED, LiveState, StateSource, TakenStep, find_source, hand_over
from tandem_trainer.corruption import CLOSE_SECONDS, CorruptionLog, SamplePlan, optimizer_problem
from tandem_trainer.data.order import check_position
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.loss_spikes import LossSpikes, TrainingDiverged, decision
from tandem_trainer.meter import ON_GPU, RESIDENT, Cost, Meter, peak_memory
from tandem_trainer.process_group import Group, PeerFault
from tandem_trainer.rank_context import RankContext, StopRequest
from tandem_trainer.save_interval import SaveInterval, count_failures
from tandem_trainer.score_watch import ScoreWatch
from tandem_trainer.trouble import TroubleCounts, record_save

log = logging.getLogger(__name__)

LAST_SAVE_TRIES = 3
NO_COST = Cost()
"""Cost of a loop of the user's own, which is not known."""
UNKNOWN_STEPS = 2**62
"""Number of steps of a run whose data has no known length."""


class DataSteps(Protocol):
    """Data of a run, counted in data steps: the steps of a run that leaves nothing out."""

    @property
    def data_steps(self) -> int | None:
        """Number of data steps; None if only the end of the data tells."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Data steps of one epoch; None if only its end tells."""

    def position(self, step: int) -> DataPosition:
        """Return the position of the data before a data step."""


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """Facts about a run that its log and its manifests record, or that explain a difference between its ranks."""

    cost: Cost = NO_COST
    """Cost of a sample, for the log (tandem_trainer.meter)."""
    mesh: Mapping[str, int] | None = None
    """Sizes of the mesh dimensions, for the manifests; None: all ranks replicate."""
    is_shared: bool = False
    """All ranks write into one copy of the weights. Rank 0 saves for all of them."""
    filtered_samples: str = ""
    """Description of the samples that nothing is learned from, for the log."""
    datasets: Sequence[DatasetCommit] = ()
    """Data sets of a hub that this rank has read."""
    standby: bool = False
    """New ranks may prepare themselves before they join, for the record of the generation of a script."""
    mistake: Callable[[], str] = lambda: ""
    """Returns what in the script keeps gradients from being averaged, as a sentence; empty if nothing is known."""


NO_DESCRIPTION = RunDescription()
"""Facts of a run with a loop of the user's own, on replicas."""


class ElasticRun:
    """Steps of one generation. Every rank makes the same calls.

    Args:
        context: identity of this process.
        checkpoints: settings of checkpoints.
        stop: request to save and leave.
        rewind_on: losses that send training back.
        survives: this rank may go on in the next group, so it remembers its newest steps.

    Raises:
        ConfigurationError: the file system lacks what checkpoints need.
    """

    def __init__(
        self,
        context: RankContext,
        checkpoints: CheckpointSpec,
        stop: StopRequest,
        rewind_on: RewindOn = "Spikes",
        survives: bool = False,
    ) -> None:
        self._survives = survives
        self._context, self._checkpoints, self._stop, self._rewind_on = context, checkpoints, stop, rewind_on
        self._interval = SaveInterval(checkpoints)
        check_disk(context.rundir, context.group)
        self._rewinds, self.on_corruption, self._has_mirrors = _start_of_all(context.rundir, context.group)
        self._mirrors: Mirrors | None = None
        self._skipped_windows = windows(self._rewinds)
        self._total: int | None = None
        self._log: LogWriter | None = None
        self._log_is_closed = False
        self.corruptions = CorruptionLog(context, lambda: self._log, self.on_corruption == "Stop")
        """Log of wrong numbers."""
        self._scores = ScoreWatch(context.rundir) if context.group.rank == 0 else None
        self.early_reason = ""
        """Reason of the script for ending training early; empty if it gave none."""
        self._ends_early = False
        self._early_end = ""
        self.step = 0
        """Optimizer steps completed."""
        self._recent_steps: deque[TakenStep] = deque(maxlen=MAX_REMEMBERED)
        self._all_samples = SampleDigest()
        self._samples_until: dict[int, str] = {}
        self._is_prepared = self._goes_back = False
        self.is_replaced = False
        """Whether this rank has received the state of another one, or is about to."""

    @property
    def data_step(self) -> int:
        """Next data step, counted from 0."""
        return data_step(self.step, self._skipped_windows)

    def step_before(self, checkpoint: Manifest) -> int:
        """Return the data step of a checkpoint's position: rewinds decided since may leave out what follows."""
        earlier = windows(rewind for rewind in self._rewinds if rewind.generation < checkpoint.generation)
        return data_step(checkpoint.step, earlier)

    def leaves_out(self, step: int) -> bool:
        """Whether a rewind leaves a data step out."""
        return any(start <= step < end for start, end in self._skipped_windows)

    def resume_early_end(self) -> bool:
        """Whether the script had left its loop at the checkpoint that this generation starts from. Collective."""
        last, rundir = self._saver.last, self._context.rundir
        recorded = rundir.broken_off(last) if self._context.group.rank == 0 and last is not None else None
        reason = self._context.group.tell({"why": recorded})["why"]
        self.early_reason = self.early_reason or str(reason or "")
        return reason is not None

    @property
    def data_steps_left(self) -> Iterator[int]:
        """Remaining data steps, where their number is known."""
        assert self._total is not None
        return (data_step(step, self._skipped_windows) for step in range(self.step, self._total))

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, without those that are left out; None if only the end of the data tells."""
        return self._total

    def begin(
        self,
        train_state: TrainState,
        data: DataSteps,
        fresh: Callable[[], Origin | None] = lambda: None,
        facts: RunDescription = NO_DESCRIPTION,
        live: LiveState | None = None,
    ) -> Manifest | None:
        """Restore the state of the newest valid checkpoint, or start fresh, and record the start. Where ranks still
        hold the state of the generation before, start from that one. Collective.

        Args:
            train_state: state of training, in which the checkpoint is loaded.
            data: data of the run.
            fresh: called if there is no checkpoint to start from; returns the origin of the weights, if they come from
                elsewhere.
            facts: facts for the log and the manifests.
            live: what this rank knows of the generation before, whose state is in `train_state`; None if it has just
                started.

        Returns:
            The manifest of the checkpoint; None for a fresh start, and where ranks held the state.

        Raises:
            ConfigurationError: the position of the checkpoint is one in other data.
            Superseded: a newer generation has taken over.
            PeerFault: this rank holds a state that does not count any more.
        """
        context, group, self._restore_at = self._context, self._context.group, time.time()
        self._train_state, self._data, self._is_shared = train_state, data, facts.is_shared
        if data.data_steps is not None:
            self._total = data.data_steps - steps_left_out(data.data_steps, self._skipped_windows)
        # Before anything is loaded: a checkpoint holds what changes from here on, such as `requires_grad` and parameter
        # groups.
        if live is None:
            train_state.mark_start()
            train_state.copy_objects()
        if (source := find_source(context.rundir, group, live)) is not None:
            self._continue(source, live, facts)
            return None
        if live is not None:
            raise PeerFault("no rank holds the newest state, so all have to start from a checkpoint")
        restored = self._restored(facts)
        manifest = restored.loaded.manifest if restored.loaded else None
        if manifest is not None:
            check_position(manifest.data, data, self.step_before(manifest))
        origin, misfit = None, ""
        if restored.loaded is None:
            origin = fresh()
        else:
            train_state.load(restored.loaded.contents)
            self._interval.restore(restored.loaded.manifest.loop)
            if self._compares:
                misfit = optimizer_problem(restored.loaded.manifest, train_state)
            # The copy in memory is as large as the model and its optimizer state.
            restored.loaded = None
        # The record of the generation is written once all ranks hold equal weights: from then on it counts as trained.
        with self.corruptions.recording():
            compare(group, train_state.replicated())
        parent, continues = restored.checkpoint, restored.continues
        record_start(
            *(context.rundir, group, context.generation, context.members, parent, origin, facts.datasets),
            continues=continues,
            standby=facts.standby,
        )
        restored.release()
        self._prepare(
            manifest.step if manifest else 0, manifest.loop.get("health") if manifest else None, parent, facts
        )
        if restored.saved_at is not None:
            # The interval goes on from that checkpoint: groups that fail sooner than it lasts would never save.
            self._last_save -= max(0.0, time.time() - restored.saved_at)
        if self._mirrors is not None:
            self._mirrors.begin(continues, self._log)
        if self._log is not None:
            for name, reason in restored.passed_over.items():
                self._log.append(records.CheckpointPassedOver(time=time.time(), checkpoint=name, why=reason))
                log.warning("checkpoint=%s passed over: %s", name, reason)
            self._log_start(self.step, None if parent is None or continues is not None else parent.name, facts)
            if continues is not None:
                log.info("restarts from memory after step %d of generation %d", continues.step, continues.generation)
        if misfit:
            self.corruptions.record(OPTIMIZER_DIFFERS, misfit)
        return manifest

    def _restored(self, facts: RunDescription) -> Restored:
        """Find the state to start from, without loading it: the newest mirror, or else the newest checkpoint.
        Collective."""
        rundir, group, train_state = self._context.rundir, self._context.group, self._train_state
        if self._has_mirrors and not facts.is_shared:
            self._mirrors = Mirrors(group)
            if restored := restore_mirror(rundir, group, self._mirrors, self._rewinds, train_state.check):
                return restored
        return restore(rundir, group, lambda loaded: train_state.check(loaded.contents))

    def _continue(self, source: StateSource, live: LiveState | None, facts: RunDescription) -> None:
        """Start from the state that a rank holds. Collective."""
        context, group = self._context, self._context.group
        # A rank that receives a state does not hold its own any more.
        self.is_replaced = group.rank in source.receivers
        hand_over(group, source, self._train_state)
        with self.corruptions.recording():
            compare(group, self._train_state.replicated())
        continuation = source.continuation
        self._interval = self._interval if live is None else live.interval
        record_start(
            *(context.rundir, group, context.generation, context.members, source.checkpoint),
            datasets=facts.datasets,
            continues=continuation,
            standby=facts.standby,
        )
        self._prepare(source.step, source.loss_spikes, source.checkpoint, facts)
        if live is not None:
            self._recent_steps.extend(entry for entry in live.recent_steps if entry.step <= self.step)
            self._last_save = live.saved_at
        if self._log is not None:
            log.info("continues generation %d after step %d, without a restart", source.generation, source.step)
            # Steps that the log of the generation before lacks, because its first rank is gone.
            self._log_start(continuation.step, None, facts)
            self._log.append(*source.missing)
        self.is_replaced = False

    def _prepare(
        self, step: int, spikes: dict[str, object] | None, checkpoint: CheckpointRef | None, facts: RunDescription
    ) -> None:
        """Prepare steps, votes, saves and the log, once all ranks hold the same state.

        Args:
            step: steps completed.
            spikes: memory of loss spikes.
            checkpoint: the newest checkpoint that counts.
            facts: facts for the log and the manifests.
        """
        context, group, train_state = self._context, self._context.group, self._train_state
        self.step = step
        self._loss_spikes = LossSpikes(spikes, self._rewind_on)

        # All ranks write their part of a checkpoint; rank 0 alone writes the log.
        parent = None if checkpoint is None else checkpoint.name
        rounds = self._checkpoints.weights_precision == "bfloat16"
        author = Author(
            context.generation, parent, group.world_size, group.rank, rounds, facts.mesh, writers_of(facts.is_shared)
        )
        if group.rank == 0:
            troubles = TroubleCounts(context.pulse)
            writer = self._log = LogWriter(context.rundir.training_log(context.generation), troubles.lines_lost)
            self._saver = Saver(
                context.rundir, author, writer.settle, lambda outcome: record_save(writer, troubles, outcome)
            )
        else:
            self._saver = Saver(context.rundir, author, lambda: None, lambda outcome: None)
        self._saver.last, self._is_prepared = checkpoint, True
        self.meter = Meter(self._data.steps_per_epoch, group.world_size, self._total, self._log, context.pulse)
        self._samples_since_vote = SampleDigest()
        self._plan = SamplePlan(self._data if self._compares and group.rank == 0 else None)
        # Under hogwild the weights are one shared copy, so there are no replicas to compare.
        self._replicas = Replicas(group, dict if facts.is_shared else train_state.replicas, facts.mistake)
        # The first vote follows the first step: it measures how many steps fit between two votes.
        self._next_vote_step = self.step + 1
        self._last_save = time.monotonic()
        self._interval.begin(self._log, lambda: count_failures(context.rundir, context.generation))
        self._first_step = self.step
        self._samples_until = {self.step: ""}
        self._stopping = False

    def _log_start(self, step: int, resumed_from: str | None, facts: RunDescription) -> None:
        """Log the start of the generation, on rank 0: after which step, and from which checkpoint, if it was read."""
        assert self._log is not None
        cost, world_size = facts.cost, self._context.group.world_size
        self._log.append(
            records.Start(
                time=time.time(),
                step=step,
                total_steps=self._total,
                world_size=world_size,
                resumed_from=resumed_from,
                flops_per_sample=cost.flops_per_sample,
                peak_flops=cost.peak_flops,
                tokens_per_sample=cost.tokens_per_sample,
                learned_per_sample=cost.learned_per_sample,
                filtered_samples=facts.filtered_samples or None,
                process_at=self._context.group.process_at,
                joined_at=self._context.group.joined_at,
                restore_at=self._restore_at,
            )
        )
        log.info(
            "generation=%d world=%d step=%d of %s from=%s",
            *(self._context.generation, world_size, self.step, self._total, resumed_from),
        )

    def leave_group(self) -> LiveState:
        """End this generation on this rank, whose group is gone, and return what it needs to go on in another one.

        Raises:
            PeerFault: the ranks had decided to go back to a checkpoint.
        """
        if self._goes_back:
            raise PeerFault("the group was lost while it went back to a checkpoint")
        self.meter.close()
        self.release()
        return LiveState(
            generation=self._context.generation,
            entered=frozenset(),
            step=self.step,
            loss_spikes=self._loss_spikes.memory(),
            samples=self._samples_until,
            recent_steps=[*self._recent_steps],
            saved_at=self._last_save,
            interval=self._interval,
        )

    def release(self) -> None:
        """Release the log and the memory of saves, without waiting for other ranks."""
        if self._log is not None:
            self._log.close(CLOSE_SECONDS)
        if self._is_prepared:
            self._saver.abandon()

    def steps(self, busy_seconds: Callable[[], float], more: Callable[[], bool] | None = None) -> Iterator[int]:
        """Iterate over the remaining steps, each counted from 0; votes, saves and logs happen between two of them.

        Args:
            busy_seconds: returns this rank's own work since the last call, in seconds, without waiting for other ranks.
            more: returns whether there is data for another step, where `total_steps` alone does not tell.

        Raises:
            TrainingDiverged: the loss has become useless.
            Superseded: a newer generation has taken over.
            Disagreement: ranks have taken different samples, or hold different weights.
        """
        while not self._stopping and self._has_more_steps(more):
            self.meter.begin_step()
            yield self.step
            self.advance(busy_seconds, more)

    def advance(self, busy_seconds: Callable[[], float], more: Callable[[], bool] | None) -> None:
        """Count a complete step, and do what follows it; arguments and errors are those of `steps`."""
        self.step += 1
        if self.step == self._first_step + 1:
            self._saver.prepare(self._contents())
        self._after_step(busy_seconds, is_last=not self._has_more_steps(more))

    def end_early(self, reason: str) -> None:
        """End training on all ranks after the same step: that of the next vote, or, with one rank alone, the current
        one. The first reason stays.

        Args:
            reason: one line of text.
        """
        self.early_reason = self.early_reason or reason
        if self._context.group.world_size == 1:
            self._next_vote_step = self.step + 1

    def took(
        self,
        ids: Tensor,
        rate: float | None,
        loss: Tensor,
        content: int = 0,
        global_loss: Tensor | None = None,
    ) -> None:
        """Record the samples, rate and loss of the current step. Call it once for each.

        Args:
            ids: [global batch], sample ids of the step.
            rate: learning rate; None where there is none.
            loss: this rank's part of the global mean; scalar.
            content: digest of the samples' content, where the ids alone do not identify it.
            global_loss: the global mean, where this rank knows it; scalar.
        """
        step = self.step + 1
        if self._compares:
            self._samples_since_vote.add(step, ids, content)
            self._plan.add(step, self.data_step, ids)
        if self._survives:
            self._all_samples.add(step, ids, content)
            # The slowest of two ranks whose group is gone is one step behind.
            self._samples_until.pop(step - 2, None)
            self._samples_until[step] = f"{self._all_samples.digest:x}"
            loss_value = None if global_loss is None else float(global_loss)
            self._recent_steps.append(TakenStep(step, time.time(), ids, rate, loss_value))
        self.meter.end_step(step, ids, rate, loss)

    def log_values(self, step: int, values: dict[str, float]) -> None:
        """Write other values of the script into the training log, on rank 0."""
        if (writer := self._log) is None:
            return
        if self._log_is_closed:
            # The code after the loop runs, and the log of the loop is closed.
            writer = LogWriter(self._context.rundir.training_log(self._context.generation))
        writer.append(records.Values(time=time.time(), step=step, values=values))
        if self._log_is_closed:
            writer.close(CLOSE_SECONDS)

    def end(self) -> ExitCode:
        """Wait for the last checkpoint, and mark the run complete if all steps are taken. Collective.

        Raises:
            SaveFailed: the checkpoint could not be written.
            Superseded: a newer generation has taken over.
        """
        code = self.end_steps()
        if code == ExitCode.DONE:
            self.complete()
        return code

    def complete(self) -> None:
        """Mark the run complete, with its last checkpoint. Collective, after `end_steps`."""
        if self._context.group.rank == 0:
            assert self._saver.last is not None
            facts = {"totalSteps": self.step} | ({"plannedSteps": self._total} if self._early_end else {})
            self._context.rundir.mark_done(self._saver.last, self._early_end, **facts)
        self._context.group.barrier()

    def end_steps(self, broken_off: bool = False) -> ExitCode:
        """Wait for the last checkpoint, when no step follows. Collective.

        Args:
            broken_off: the loop was left although there could have been more steps.

        Raises:
            SaveFailed: the checkpoint could not be written.
            Superseded: a newer generation has taken over.
        """
        group, rundir, saver = self._context.group, self._context.rundir, self._saver
        complete, broken_off = not self._stopping, broken_off or self._ends_early
        self.meter.close()
        self.meter.phase(SAVING)
        peaks = peak_memory(group.device)
        # A run is complete only with a checkpoint of its last step. Rank 0 says whether it is committed.
        for _ in range(LAST_SAVE_TRIES):
            saver.wait()
            if saver.superseded:
                raise Superseded(f"generation {self._context.generation} was superseded")
            saved = saver.last is not None and saver.last.step == self.step
            reports = group.gather({"saved": saved, "why": self.early_reason, **peaks})
            if reports[0]["saved"]:
                break
            self._save()
        outcome = saver.wait()
        saver.close()
        if self._mirrors is not None:
            self._mirrors.close()
        early_reason = next((str(report["why"]) for report in reports if report["why"]), "")
        if complete and broken_off:
            self._early_end = early_end_summary(self.step, self._total, early_reason)
        if group.rank == 0:
            if saver.last is None or saver.last.step != self.step:
                raise SaveFailed(f"the checkpoint after step {self.step} could not be written: {outcome.get('failed')}")
            if complete and broken_off:
                rundir.mark_broken_off(saver.last, early_reason)
        if self._log is not None:
            reason = (self._early_end or "complete") if complete else "asked to leave"
            self._log.append(
                records.TrainingEnd(
                    time=time.time(),
                    step=self.step,
                    why=reason,
                    peak_memory=_values_by_rank(reports, RESIDENT),
                    peak_gpu_memory=_values_by_rank(reports, ON_GPU),
                )
            )
            self._log.close()
            self._log_is_closed = True
        # No rank leaves before rank 0 has written the record and the end of the log.
        group.barrier()
        return ExitCode.DONE if complete else ExitCode.PREEMPTED

    def _has_more_steps(self, more: Callable[[], bool] | None) -> bool:
        if self._ends_early or (self._total is not None and self.step >= self._total):
            return False
        return more is None or more()

    def _after_step(self, busy_seconds: Callable[[], float], is_last: bool) -> None:
        step, group, saver, meter, mirrors = self.step, self._context.group, self._saver, self.meter, self._mirrors
        every = self._checkpoints.every_steps
        save_due = every is not None and step % every == 0
        # Vote before each save: no useless loss gets into a checkpoint, and its steps are logged before it counts.
        if not (save_due or is_last or step == self._next_vote_step):
            return
        overdue = self._interval.is_over(self._last_save)
        if self._scores is not None:
            self.early_reason = self.early_reason or self._scores.reason()
        # Read the losses first: that waits for a GPU, and only then is it known how long the steps took.
        losses = meter.pending_losses()
        samples_digest = self._samples_since_vote.digest
        verdict = group.vote(
            *(losses, bool(self._stop), overdue, saver.busy, samples_digest, meter.mean_step_seconds()),
            finish=bool(self.early_reason),
            mirror=mirrors is not None and (mirrors.is_due if group.rank == 0 else mirrors.is_ready),
        )
        if not verdict.same_samples:
            # Before the steps are logged: the log holds only samples that all ranks have agreed on.
            with self.corruptions.recording():
                refuse_samples(group, self._samples_since_vote, step - len(losses) + 1, step)
        self._samples_since_vote.clear()
        self._plan.report(self.corruptions)
        # All below follows from the vote and from numbers that are equal on all ranks, so all ranks do the same.
        self._next_vote_step = step + verdict.steps_to_next
        self._ends_early = verdict.finish and not is_last
        is_last = is_last or self._ends_early
        # After the last step, a request to leave changes nothing: the run is complete.
        self._stopping = verdict.stop and not is_last
        meter.agreed(verdict.losses, busy_seconds())
        for entry, loss in zip(reversed(self._recent_steps), reversed(verdict.losses), strict=False):
            entry.loss = loss
        # After the first step of a generation, replicas that differ show that gradients are not averaged.
        if step == self._first_step + 1:
            self._compare_replicas()
        bad = self._loss_spikes.first_bad(step - len(verdict.losses) + 1, verdict.losses)
        if bad is not None:
            self._rewind_or_fail(bad, verdict.losses)
        if (save_due or verdict.save) and not is_last and not self._stopping:
            if saver.superseded:
                raise Superseded(f"generation {self._context.generation} was superseded")
            # A rank that still writes the previous checkpoint has no room for another one: skip this save.
            if not verdict.busy:
                self._save()
            elif self._log is not None:
                reason = "the checkpoint before is still being written"
                self._log.append(records.NotSaved(time=time.time(), step=step, why=reason))
            self._last_save = time.monotonic()
        elif mirrors is not None and verdict.mirror and not is_last and not self._stopping:
            self._copy_to(mirrors)

    def _compare_replicas(self) -> None:
        if self._compares:
            with self.corruptions.recording():
                self._replicas.compare(self.step)

    @property
    def _compares(self) -> bool:
        """Whether numbers are compared beyond those that ranks must share at a start."""
        return self.on_corruption != "Off"

    def _save(self) -> None:
        """Stage a checkpoint of the state after `step`. Collective."""
        started, outcome = time.perf_counter(), self._saver.wait()
        for name, reason in self._train_state.lost_in_round_trip(self._context.group).items():
            if self._context.group.rank == 0:
                log.warning("kept=%s would not come back from this checkpoint as it is: %s", name, reason)
        position = self._data.position(self.data_step)
        contents = self._contents(of_all=True)
        self._saver.save(self.step, position, contents)
        self._interval.saved(cost := time.perf_counter() - started, outcome)
        self.meter.checkpoint_seconds += cost
        if self._is_shared:
            # All ranks come here from a vote, so none writes weights now; the next step of any rank would.
            self._context.group.barrier()

    def _copy_to(self, mirrors: Mirrors) -> None:
        """Take a mirror of the state after `step`. Collective."""
        started = time.perf_counter()
        contents = self._contents(of_all=True)
        facts = self._saver.facts(self.step, self._data.position(self.data_step), contents.loop)
        mirrors.copy(MirrorPoint(self._context.generation, self.step), contents, facts, started)
        self.meter.checkpoint_seconds += time.perf_counter() - started

    def _contents(self, of_all: bool = False) -> Contents:
        """Collect the contents of a checkpoint of this moment, as this rank has them, or as all ranks save them. The
        latter is collective."""
        # After the first step they have been compared already.
        if of_all and self.step != self._first_step + 1:
            self._compare_replicas()
        train_state, loop = self._train_state, {"health": self._loss_spikes.memory(), **self._interval.memory()}
        try:
            return train_state.saved(self._context.group, loop) if of_all else train_state.contents(loop)
        except TypeError as error:
            raise ConfigurationError(str(error)) from error

    def _rewind_or_fail(self, bad_step: int, losses: list[float]) -> None:
        """Record from where the next generation starts, or, after too many rewinds, the end of the run; then raise
        TrainingDiverged. Collective."""
        self._goes_back = True
        # A checkpoint that is being written holds steps that will be taken back.
        self._saver.close()
        index = bad_step - self.step - 1
        loss = losses[index] if -index <= len(losses) else None
        steps = self._data.data_steps or UNKNOWN_STEPS
        generation = self._context.generation
        checkpoints = (
            [manifest.step for manifest in self._context.rundir.committed()] if self._context.group.rank == 0 else []
        )
        checkpoints = self._context.group.tell({"checkpoints": checkpoints})["checkpoints"]
        # Rank 0 lists the checkpoints: a rank that reads the disk by itself might see one more, and decide otherwise.
        finite = loss if loss is not None and math.isfinite(loss) else None
        rewind = decide(self._rewinds, generation, bad_step, finite, steps, checkpoints)
        code, reason = decision(rewind, bad_step, loss, len(self._rewinds))
        self.meter.close()
        if self._log is not None:
            if rewind is None:
                self._context.rundir.mark_failed(Reason.DIVERGED, reason, code)
            else:
                self._context.rundir.record_rewind(rewind)
                self._log.append(records.Rewound(time=time.time(), **rewind.model_dump()))
            self._log.append(records.TrainingEnd(time=time.time(), step=bad_step, why=reason))
            self._log.close()
            log.error("%s", reason)
        # The record must be on the disk before the first rank leaves, which closes the generation.
        self._context.group.barrier()
        raise TrainingDiverged(code, reason)


def _values_by_rank(reports: Sequence[Mapping[str, float]], name: str) -> dict[str, float] | None:
    """Collect a value of the ranks by its name; None if no rank has it."""
    return {str(rank): report[name] for rank, report in enumerate(reports) if name in report} or None


def _start_of_all(rundir: RunDir, group: Group) -> tuple[list[Rewind], OnCorruption, bool]:
    """Read the rewinds of the run, the reaction to wrong numbers, and whether there are mirrors, on rank 0, and send
    them to all ranks. Collective."""
    recorded: dict[str, object] = {}
    if group.rank == 0:
        recorded["rewinds"] = [rewind.dump() for rewind in rundir.rewind_records()]
        elasticity = rundir.read_job().spec.elasticity
        recorded |= {"onCorruption": elasticity.on_corruption, "mirror": elasticity.mirror}
    answer = group.tell(recorded)
    return [Rewind.parse(rewind) for rewind in answer["rewinds"]], answer["onCorruption"], answer["mirror"]
