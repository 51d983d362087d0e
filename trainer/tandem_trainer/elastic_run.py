"""One generation of an elastic run: its restore, the work after each step, and its last checkpoint.

Everything that makes training elastic is here, and nothing of what is trained: the built-in loop (tandem_trainer.train)
and a script of the user's own (tandem_trainer.session) both hand their steps to it. It starts from the newest
checkpoint that counts; after each step it may be told to save, to leave, or that the loss has become useless; and its
last act names the final checkpoint.
"""

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from torch import Tensor

from tandem.exitcode import ExitCode
from tandem.formatting import number, several
from tandem.job import Checkpoint
from tandem.launch import GENERATION, REPLICA
from tandem.protocol import SAVING
from tandem.rundir import records
from tandem.rundir.checkpoint import DataPosition, Manifest
from tandem.rundir.durable import lacks
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import DatasetCommit, Origin, Rewind, data_step, decide, steps_left_out, windows
from tandem.rundir.log import LogWriter
from tandem.status import STOPPED_EARLY
from tandem.tasks import RewindOn
from tandem_trainer.agreement import TakenSamples, refuse_samples
from tandem_trainer.checkpoint.replicas import Replicas
from tandem_trainer.checkpoint.restoring import compare, record_start, restore
from tandem_trainer.checkpoint.saving import Author, Outcome, SaveFailed, Saver
from tandem_trainer.checkpoint.train_state import Contents, TrainState
from tandem_trainer.checkpoint.writer import Superseded
from tandem_trainer.data.order import check_position
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.loss_spikes import LossSpikes
from tandem_trainer.meter import ON_GPU, RESIDENT, Cost, Meter, peak_memory
from tandem_trainer.process_group import Group
from tandem_trainer.pulse import Pulse
from tandem_trainer.trouble import TroubleCounts

log = logging.getLogger(__name__)

LAST_SAVE_TRIES = 3
CLOSE_SECONDS = 2.0
"""What the disk gets for a line that follows the end of the log."""
ADVICE = "try a lower learning rate, a warm-up, or clipping of gradients."
"""What helps where training diverges."""
NO_COST = Cost()
"""Of a loop of the user's own, which is not known."""
LEFT_LOOP = "the script left its loop"
"""Why, where the script says no more."""
NO_END = 2**62
"""Stands for the number of steps of a run whose data does not say how long it is."""


class WentBack(Exception):  # noqa: N818 - it says what happened
    """The loss became useless, and every rank knows; carries the exit code."""

    def __init__(self, code: ExitCode, why: str) -> None:
        super().__init__(why)
        self.code = code


class StopRequest:
    """Whether somebody asked this rank to save and leave: by SIGTERM, or through its pulse."""

    def __init__(self, pulse: Pulse | None) -> None:
        self._pulse, self._signalled = pulse, False
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def __bool__(self) -> bool:
        return self._signalled or (self._pulse is not None and self._pulse.order == "save-and-leave")


@dataclass(frozen=True)
class RankContext:
    """Which process of which job this is."""

    rundir: RunDir
    """The job's run directory."""
    group: Group
    """The ranks of this generation."""
    generation: int
    """Its number."""
    members: list[str]
    """Its replicas in rank order."""
    pulse: Pulse | None
    """What the agent hears of it; None where there is no agent."""


def rank_context(rundir: RunDir, group: Group, pulse: Pulse | None) -> RankContext:
    """This process's place as its environment names it. Collective.

    Without a coordinator the generation is one more than the newest there is.
    """
    number = int(os.environ.get(GENERATION, "0"))
    if not number:
        following = max(rundir.newest_generation() + 1, rundir.first_generation())
        number = int(group.tell({"generation": following})["generation"])
    members = [str(view["replica"]) for view in group.gather({"replica": os.environ.get(REPLICA, "alone")})]
    return RankContext(rundir, group, number, list(dict.fromkeys(members)), pulse)


class DataSteps(Protocol):
    """The data of a run, counted in data steps: the steps of a run that leaves nothing out."""

    @property
    def data_steps(self) -> int | None:
        """How many there are; None where only the end tells."""

    @property
    def steps_per_epoch(self) -> int | None:
        """How many make one pass; None where only its end tells."""

    def position(self, step: int) -> DataPosition:
        """Where the data stands before a data step."""


class ElasticRun:
    """The steps of one generation. Every rank of it does the same.

    Args:
        checkpoints: when to save.
        stop: whether somebody asks to save and leave.
        rewind_on: which losses send training back.

    Raises:
        ConfigurationError: the disk cannot do what checkpoints need.
    """

    def __init__(
        self, context: RankContext, checkpoints: Checkpoint, stop: StopRequest, rewind_on: RewindOn = "Spikes"
    ) -> None:
        self._context, self._checkpoints, self._stop, self._rewind_on = context, checkpoints, stop, rewind_on
        _refuse_unfit_disk(context.rundir, context.group)
        self._rewinds = _rewinds_of_all(context.rundir, context.group)
        self._left_out = windows(self._rewinds)
        self._total: int | None = None
        self._log: LogWriter | None = None
        self._log_is_closed = False
        self._why_early = ""
        self._ends_early = False
        self._early = ""
        self.step = 0
        """Optimizer steps completed."""

    @property
    def data_step(self) -> int:
        """The data step that is next, counted from 0."""
        return data_step(self.step, self._left_out)

    def step_before(self, checkpoint: Manifest) -> int:
        """The data step at which a checkpoint's position stands: rewinds decided since may leave out what follows."""
        known = windows(rewind for rewind in self._rewinds if rewind.generation < checkpoint.generation)
        return data_step(checkpoint.step, known)

    def leaves_out(self, step: int) -> bool:
        """Whether a rewind leaves a data step out."""
        return any(start <= step < end for start, end in self._left_out)

    def take_up_broken_off(self) -> bool:
        """Whether the script has left its loop at the checkpoint that this generation started from. Collective."""
        last, rundir = self._saver.last, self._context.rundir
        mine = rundir.broken_off(last) if self._context.group.rank == 0 and last is not None else None
        why = self._context.group.tell({"why": mine})["why"]
        self._why_early = self._why_early or str(why or "")
        return why is not None

    @property
    def data_steps_left(self) -> Iterator[int]:
        """The data steps that are left to take, where their number is known."""
        assert self._total is not None
        return (data_step(step, self._left_out) for step in range(self.step, self._total))

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, without those that are left out; None where only the end tells."""
        return self._total

    def begin(
        self,
        kept: TrainState,
        data: DataSteps,
        fresh: Callable[[], Origin | None] = lambda: None,
        cost: Cost = NO_COST,
        mesh: Mapping[str, int] | None = None,
        is_shared: bool = False,
        datasets: Sequence[DatasetCommit] = (),
        mistake: Callable[[], str] = lambda: "",
    ) -> Manifest | None:
        """Find out where to start, put the state there, and write it down. Collective.

        Args:
            fresh: called when there is no checkpoint to start from; returns where the weights come from, if from
                elsewhere.
            cost: of a sample, for the log (tandem_trainer.meter).
            mesh: ranks in each of its dimensions, for the manifests; None: all replicate.
            is_shared: all ranks write into one copy of the weights. Rank 0 saves for all of them.
            datasets: those of a hub that this rank has read.
            mistake: what in the script keeps gradients from being averaged, as a sentence; empty if nothing is known.

        Raises:
            ConfigurationError: the checkpoint stands in other data.
            Superseded: a newer generation has taken over.
        """
        context, group = self._context, self._context.group
        self._train_state, self._data, self._is_shared = kept, data, is_shared
        if data.data_steps is not None:
            self._total = data.data_steps - steps_left_out(data.data_steps, self._left_out)
        kept.mark_start()
        kept.copy_objects()
        restored = restore(context.rundir, group, lambda found: kept.check(found.contents))
        manifest = restored.loaded.manifest if restored.loaded else None
        if manifest is not None:
            check_position(manifest.data, data, self.step_before(manifest))
        origin = None
        if restored.loaded is None:
            origin = fresh()
        else:
            kept.load(restored.loaded.contents)
            restored.loaded = None
        compare(group, kept.replicated())
        record_start(context.rundir, group, context.generation, context.members, manifest, origin, datasets)
        restored.release()
        self.step = manifest.step if manifest else 0
        self._loss_spikes = LossSpikes(manifest.loop.get("health") if manifest else None, self._rewind_on)

        # All ranks save, rank 0 keeps the log
        parent = manifest.name if manifest else None
        rounds = self._checkpoints.weights_precision == "bfloat16"
        author = Author(
            context.generation, parent, group.world_size, group.rank, rounds, mesh, 1 if is_shared else None
        )
        if group.rank == 0:
            troubles = TroubleCounts(context.pulse)
            writer = self._log = LogWriter(context.rundir.training_log(context.generation), troubles.lines_lost)
            self._saver = Saver(
                context.rundir, author, writer.settle, lambda outcome: _tell_of_save(writer, troubles, outcome)
            )
            for name, why in restored.passed_over.items():
                writer.append(records.PassedOver(time=time.time(), checkpoint=name, why=why))
                log.warning("checkpoint=%s passed over: %s", name, why)
            writer.append(
                records.Start(
                    time=time.time(),
                    step=self.step,
                    total_steps=self._total,
                    world_size=group.world_size,
                    resumed_from=parent,
                    flops_per_sample=cost.flops_per_sample,
                    peak_flops=cost.peak_flops,
                    tokens_per_sample=cost.tokens_per_sample,
                    learned_per_sample=cost.learned_per_sample,
                )
            )
            log.info(
                "generation=%d world=%d step=%d of %s from=%s",
                *(context.generation, group.world_size, self.step, self._total, parent),
            )
        else:
            self._saver = Saver(context.rundir, author, lambda: None, lambda outcome: None)
        self._saver.last = manifest.reference if manifest else None
        self.meter = Meter(data.steps_per_epoch, group.world_size, self._total, self._log, context.pulse)
        self._taken = TakenSamples()
        # What hogwild's ranks write into one copy of is nobody's replica.
        self._replicas = Replicas(group, dict if is_shared else kept.replicas, mistake)
        self._next_vote = self.step + 1
        self._last_save = time.monotonic()
        self._first = self.step
        self._stopping = False
        return manifest

    def steps(self, busy_seconds: Callable[[], float], more: Callable[[], bool] | None = None) -> Iterator[int]:
        """The steps that are left, each counted from 0; between two of them everything else is done.

        Args:
            busy_seconds: this rank's own work since the last call, without waiting for other ranks.
            more: whether there is data for another step, where `total_steps` alone does not tell.

        Raises:
            WentBack: the loss has become useless.
            Superseded: a newer generation has taken over.
            ConfigurationError: ranks have taken different samples, or do not average gradients.
            ReplicasDiffer: ranks hold different weights.
        """
        while not self._stopping and self._is_more(more):
            self.meter.begin_step()
            yield self.step
            self.advance(busy_seconds, more)

    def advance(self, busy_seconds: Callable[[], float], more: Callable[[], bool] | None) -> None:
        """A step is complete, and the next one may follow; arguments and errors are those of `steps`."""
        self.step += 1
        if self.step == self._first + 1:
            self._saver.prepare(self._contents())
        self._after_step(busy_seconds, is_last=not self._is_more(more))

    def end_early(self, why: str) -> None:
        """Have training end on all ranks after the same step: that of the next vote, and of one rank alone the one that
        it is at. The first reason stays.

        Args:
            why: in one line.
        """
        self._why_early = self._why_early or why
        if self._context.group.world_size == 1:
            self._next_vote = self.step + 1

    def took(self, ids: Tensor, rate: float | None, loss: Tensor, content: int = 0) -> None:
        """The step that `steps` asked for is taken; to be said once for each.

        Args:
            ids: [global batch], its sample ids.
            rate: learning rate; None where there is none.
            loss: this rank's part of the global mean; scalar.
            content: a digest of what the ids stand for, where they do not say it themselves.
        """
        self._taken.add(self.step + 1, ids, content)
        self.meter.end_step(self.step + 1, ids, rate, loss)

    def log_values(self, step: int, values: dict[str, float]) -> None:
        """Write what the script says beside its loss into the training log, which rank 0 keeps."""
        if (writer := self._log) is None:
            return
        if self._log_is_closed:
            # The code after the loop runs.
            writer = LogWriter(self._context.rundir.training_log(self._context.generation))
        writer.append(records.Values(time=time.time(), step=step, values=values))
        if self._log_is_closed:
            writer.close(CLOSE_SECONDS)

    def end(self) -> ExitCode:
        """Wait for the last checkpoint, and say that the run is complete, if it is. Collective.

        Raises:
            SaveFailed: it could not be written.
            Superseded: a newer generation has taken over.
        """
        code = self.end_steps()
        if code == ExitCode.DONE:
            self.complete()
        return code

    def complete(self) -> None:
        """Say that the run is complete, with its last checkpoint. Collective, after `end_steps`."""
        if self._context.group.rank == 0:
            assert self._saver.last is not None
            facts = {"totalSteps": self.step} | ({"plannedSteps": self._total} if self._early else {})
            self._context.rundir.mark_done(self._saver.last, self._early, **facts)
        self._context.group.barrier()

    def end_steps(self, broken_off: bool = False) -> ExitCode:
        """No step follows: wait for the last checkpoint. Collective.

        Args:
            broken_off: there could have been more steps.

        Raises:
            SaveFailed: it could not be written.
            Superseded: a newer generation has taken over.
        """
        group, rundir, saver = self._context.group, self._context.rundir, self._saver
        complete, broken_off = not self._stopping, broken_off or self._ends_early
        self.meter.close()
        self.meter.phase(SAVING)
        peaks = peak_memory(group.device)
        for _ in range(LAST_SAVE_TRIES):
            saver.wait()
            if saver.superseded:
                raise Superseded(f"generation {self._context.generation} was superseded")
            saved = saver.last is not None and saver.last.step == self.step
            told = group.gather({"saved": saved, "why": self._why_early, **peaks})
            if told[0]["saved"]:
                break
            self._save()
        outcome = saver.wait()
        saver.close()
        why_early = next((str(one["why"]) for one in told if one["why"]), "")
        if complete and broken_off:
            self._early = early_words(self.step, self._total, why_early)
        if group.rank == 0:
            if saver.last is None or saver.last.step != self.step:
                raise SaveFailed(f"the checkpoint after step {self.step} could not be written: {outcome.get('failed')}")
            if complete and broken_off:
                rundir.mark_broken_off(saver.last, why_early)
        if self._log is not None:
            why = (self._early or "complete") if complete else "asked to leave"
            self._log.append(
                records.TrainingEnd(
                    time=time.time(),
                    step=self.step,
                    why=why,
                    peak_memory=_by_rank(told, RESIDENT),
                    peak_gpu_memory=_by_rank(told, ON_GPU),
                )
            )
            self._log.close()
            self._log_is_closed = True
        group.barrier()
        return ExitCode.DONE if complete else ExitCode.PREEMPTED

    def _is_more(self, more: Callable[[], bool] | None) -> bool:
        if self._ends_early or (self._total is not None and self.step >= self._total):
            return False
        return more is None or more()

    def _after_step(self, busy_seconds: Callable[[], float], is_last: bool) -> None:
        step, group, saver, meter = self.step, self._context.group, self._saver, self.meter
        every = self._checkpoints.every_steps
        save_due = every is not None and step % every == 0
        # A vote before each save: no useless loss gets into a checkpoint, and its steps are logged before it counts.
        if not (save_due or is_last or step == self._next_vote):
            return
        interval = self._checkpoints.interval_seconds
        overdue = interval is not None and time.monotonic() - self._last_save >= interval
        # First the losses: a GPU is waited for, and only then is it known how long the steps took.
        losses = meter.pending_losses()
        taken = self._taken.digest
        verdict = group.vote(
            *(losses, bool(self._stop), overdue, saver.busy, taken, meter.mean_step_seconds()),
            finish=bool(self._why_early),
        )
        if not verdict.same_samples:
            # Before the steps are logged: what the log says of samples all ranks have agreed on.
            refuse_samples(group, self._taken, step - len(losses) + 1, step)
        self._taken.clear()
        self._next_vote = step + verdict.steps_to_next
        self._ends_early = verdict.finish and not is_last
        is_last = is_last or self._ends_early
        self._stopping = verdict.stop and not is_last
        meter.agreed(verdict.losses, busy_seconds())
        if step == self._first + 1:
            self._replicas.compare(step)
        bad = self._loss_spikes.first_bad(step - len(verdict.losses) + 1, verdict.losses)
        if bad is not None:
            self._go_back(bad, verdict.losses)
        if (save_due or verdict.save) and not is_last and not self._stopping:
            if saver.superseded:
                raise Superseded(f"generation {self._context.generation} was superseded")
            if not verdict.busy:
                self._save()
            elif self._log is not None:
                why = "the checkpoint before is still being written"
                self._log.append(records.NotSaved(time=time.time(), step=step, why=why))
            self._last_save = time.monotonic()

    def _save(self) -> None:
        """Stage a checkpoint of the state after `step`. Collective."""
        if self.step != self._first + 1:
            self._replicas.compare(self.step)
        for name, why in self._train_state.lost_in_round_trip(self._context.group).items():
            if self._context.group.rank == 0:
                log.warning("kept=%s would not come back from this checkpoint as it is: %s", name, why)
        position = self._data.position(self.data_step)
        contents = self._contents(of_all=True)
        self.meter.checkpoint_seconds += self._saver.save(self.step, position, contents)
        if self._is_shared:
            # All came here from a vote, so none writes now; the next step of any rank would.
            self._context.group.barrier()

    def _contents(self, of_all: bool = False) -> Contents:
        """What a checkpoint of this moment would hold, as this rank has it, or as all ranks save it. The latter is
        collective."""
        kept, loop = self._train_state, {"health": self._loss_spikes.memory()}
        try:
            return kept.saved(self._context.group, loop) if of_all else kept.contents(loop)
        except TypeError as error:
            raise ConfigurationError(str(error)) from error

    def _go_back(self, bad_step: int, losses: list[float]) -> None:
        """The loss is useless: write down from where the next generation starts, or, after too many times, the end."""
        self._saver.close()
        at = bad_step - self.step - 1
        loss = losses[at] if -at <= len(losses) else None
        steps = self._data.data_steps or NO_END
        generation = self._context.generation
        known = [found.step for found in self._context.rundir.committed()] if self._context.group.rank == 0 else []
        known = self._context.group.tell({"checkpoints": known})["checkpoints"]
        finite = loss if loss is not None and math.isfinite(loss) else None
        rewind = decide(self._rewinds, generation, bad_step, finite, steps, known)
        code, why = decision(rewind, bad_step, loss, len(self._rewinds))
        self.meter.close()
        if self._log is not None:
            if rewind is None:
                self._context.rundir.mark_failed("Diverged", why, code)
            else:
                self._context.rundir.record_rewind(rewind)
                self._log.append(records.Rewound(time=time.time(), **rewind.model_dump()))
            self._log.append(records.TrainingEnd(time=time.time(), step=bad_step, why=why))
            self._log.close()
            log.error("%s", why)
        self._context.group.barrier()
        raise WentBack(code, why)


def early_words(step: int, total_steps: int | None, why: str) -> str:
    """What is told of a run that ended before its last step; empty where it took all, or nobody knows how many there
    are and no reason was given.

    Args:
        step: steps taken.
        total_steps: of the whole run; None where only the end tells.
        why: the reason that was given, if one was.
    """
    if total_steps is None:
        return f"{STOPPED_EARLY} after step {number(step)}: {why}" if why else ""
    if step >= total_steps:
        return ""
    return f"{STOPPED_EARLY} after step {number(step)} of {number(total_steps)}: {why or LEFT_LOOP}"


def decision(rewind: Rewind | None, bad_step: int, loss: float | None, earlier: int) -> tuple[ExitCode, str]:
    """What follows from a useless loss, and how it is told.

    Args:
        rewind: where training goes back to; None: nowhere any more.
        loss: that of the bad step, None where it is not known any more.
        earlier: how often it went back before.
    """
    if loss is None or math.isfinite(loss):
        what = "worse than untrained" if loss is None else f"{loss:.4g}, worse than untrained,"
    else:
        what = "NaN" if math.isnan(loss) else "infinite"
    became = f"training diverged: the loss became {what} at step {number(bad_step)}"
    if rewind is None:
        times = "once" if earlier == 1 else f"{earlier} times"
        helped = f"to go back and leave data out {times} has not helped"
        tried = helped if earlier else "the run is too short to leave data out"
        return ExitCode.DIVERGED, f"{became}, and {tried}. T{ADVICE[1:]}"
    left_out = several(rewind.skip_to - rewind.skip_from, "batch", "batches")
    back = f"going back to before step {number(rewind.resume_before)} and leaving out {left_out}"
    return ExitCode.REWOUND, f"{became}; {back}{'' if earlier else f'. If it does so again, {ADVICE}'}"


def _by_rank(told: Sequence[Mapping[str, float]], name: str) -> dict[str, float] | None:
    """What the ranks have told under a name; None where none has."""
    return {str(rank): one[name] for rank, one in enumerate(told) if name in one} or None


def _refuse_unfit_disk(rundir: RunDir, group: Group) -> None:
    """Try the disk out, before the first generation. Collective.

    Raises:
        ConfigurationError: it cannot do what checkpoints need, as rank 0 found out.
    """
    is_first = group.rank == 0 and rundir.newest_generation() == 0
    why = group.tell({"why": lacks(rundir.path) if is_first else ""})["why"]
    if why:
        raise ConfigurationError(str(why))


def _rewinds_of_all(rundir: RunDir, group: Group) -> list[Rewind]:
    """The rewinds of the run, as rank 0 reads them. Collective."""
    mine = [rewind.dump() for rewind in rundir.rewind_records()] if group.rank == 0 else []
    return [Rewind.parse(rewind) for rewind in group.tell({"rewinds": mine})["rewinds"]]


def _tell_of_save(writer: LogWriter, troubles: TroubleCounts, outcome: Outcome) -> None:
    name, step, stall = outcome["name"], outcome["step"], round(outcome["stallSeconds"], 6)
    if "committed" in outcome:
        writer.append(
            records.Saved(
                time=time.time(),
                name=name,
                step=step,
                stall_seconds=stall,
                commit_seconds=round(outcome["seconds"], 6),
                bytes=outcome["bytes"],
            )
        )
        troubles.save_went_well()
    else:
        why = outcome.get("failed") or outcome["superseded"]
        writer.append(records.NotSaved(time=time.time(), name=name, step=step, stall_seconds=stall, why=str(why)))
        log.warning("checkpoint=%s not written: %s", outcome["name"], why)
        if "failed" in outcome:
            troubles.save_failed(str(why))
