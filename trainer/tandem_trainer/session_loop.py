"""The steps of a session: what happens between two batches of the script's loop, in one generation or in several.

A generation of ranks that live begins as one of ranks that have just started, in `start`: all of them have come to the
same place in the script, `session.batches`, or a batch of its loop (tandem_trainer.session_regroup).
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tandem.formatting import one_line
from tandem.job.resource import CheckpointSpec
from tandem.job.tasks import RewindOn
from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import RunDir
from tandem_trainer.agreement import Terms, agree, dtypes_of
from tandem_trainer.batch import Batch
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.continuation import LiveState
from tandem_trainer.data.feeding import RankBatch, to_device
from tandem_trainer.elastic_run import ElasticRun, RunDescription
from tandem_trainer.meter import Stopwatch
from tandem_trainer.process_group import Group, GroupLost, PeerFault
from tandem_trainer.pulse import Pulse
from tandem_trainer.rank_context import StopRequest, rank_context
from tandem_trainer.session_data import SessionData
from tandem_trainer.session_regroup import SessionRegroup
from tandem_trainer.session_settings import agreed_settings
from tandem_trainer.strategies.session_models import Models

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class SessionLoop:
    """The loop of a session over its batches."""

    rundir: RunDir
    """The run directory."""
    group: Group
    """The ranks of the current generation."""
    pulse: Pulse | None
    """Channel to the agent; None where there is no agent."""
    stop: StopRequest
    """Request to save and leave."""
    survival: SessionRegroup | None
    """Takes the session to the next group; None: it ends with its group."""
    models: Models
    """All models."""
    busy: Stopwatch
    """Measures their forward passes."""
    rewind_on: RewindOn
    """Losses that send training back."""
    settings: CheckpointSpec
    """Settings of checkpoints that the script gives."""
    checkpoints: CheckpointSpec
    """Settings of checkpoints that apply."""
    terms: Terms
    """Terms that the ranks have agreed on."""
    train_state: TrainState
    """All that a checkpoint holds."""
    optimizer: torch.optim.Optimizer | None
    """Optimizer whose learning rate is shown."""
    data: SessionData
    """The samples."""
    elastic: ElasticRun | None = field(default=None, init=False)
    """The generation, once it has begun."""
    end_code: ExitCode | None = field(default=None, init=False)
    """Exit code that the end of the loop has led to; None before."""
    _starting: ElasticRun | None = field(default=None, init=False)
    _live: LiveState | None = field(default=None, init=False)
    _early_reason: str = field(default="", init=False)
    _remaining: Iterator[RankBatch] = field(default_factory=lambda: iter(()), init=False)
    _has_more: Callable[[], bool] | None = field(default=None, init=False)
    _loss: Tensor | None = field(default=None, init=False)
    _loaded: RankBatch | None = field(default=None, init=False)

    def begin(self) -> None:
        """Begin the first generation of this rank. Collective."""
        if self.survival is not None:
            if not self.data.is_positioned_by_step:
                self.survival.refuse("the data is a stream, or has an order of its own")
            if self.survival.is_standby:
                self._move(self.survival.join_next())
        self._start()

    def batches(self) -> Iterator[Batch]:
        """Iterate over the remaining steps, in this generation and in those that follow."""
        survival, has_left = self.survival, False
        while True:
            try:
                if has_left:
                    assert survival is not None
                    self._move(survival.join_next())
                    self._start()
                    has_left = False
                yield from self._steps()
            except Exception as error:
                if survival is None or not survival.follows(error):
                    raise
                self._leave_group(error)
                has_left = True
            else:
                return

    def report(self, part: Tensor) -> None:
        """Add a part of the mean loss of the global batch."""
        self._loss = part if self._loss is None else self._loss + part
        if self.survival is not None:
            self.survival.passes.loss.part = self._loss.detach()

    def leave(self) -> None:
        """End a loop that the script, or a framework, left early: save the last checkpoint. Collective.

        Raises:
            PeerFault: it was left in a step that is not taken.
        """
        assert self.elastic is not None
        if self.survival is not None and self.survival.is_lost:
            raise PeerFault("the script left its loop in a step that was lost with the group")
        # The script has learned from the last batch, so it counts as a step.
        if self._loss is not None:
            self._record_step()
            self.elastic.advance(self.busy.take, lambda: False)
        self._end(broken_off=True)

    def _move(self, group: Group) -> None:
        """Go on in another group. Collective."""
        self.group = group
        self.models.move(group)
        # This process may be days old.
        self.checkpoints = agreed_settings(self.rundir, group, self.settings)

    def _start(self) -> None:
        """Start a generation: restore its state, or go on from the one that ranks hold. Collective."""
        group, models, survival, train_state = self.group, self.models, self.survival, self.train_state
        data = self.data.open(models.dp_rank, models.dp_size)
        # All ranks compare their terms before the restore, which is collective.
        terms = replace(
            self.terms,
            samples=self.data.samples,
            global_batch_size=self.data.global_batch_size,
            drop_last=self.data.drop_last,
            epochs=self.data.epochs,
            max_steps=self.data.max_steps,
            dtypes=dtypes_of(train_state.learned().values()),
            order=data.name,
        )
        agree(group, terms)
        survives = survival is not None and survival.agree(group)
        context = rank_context(self.rundir, group, self.pulse)
        if self._live is not None:
            self._live = replace(self._live, entered=self._live.entered | {context.generation})
        elastic = self._starting = ElasticRun(context, self.checkpoints, self.stop, self.rewind_on, survives)
        # The sizes of the mesh dimensions over which the train state is split; none if no weight is split.
        mesh = {name: size for name, size in train_state.mesh_sizes().items() if size > 1} or None
        facts = RunDescription(mesh=mesh, standby=survives, mistake=models.mistake)
        restored = elastic.begin(train_state, data.steps, self._share_start, facts, self._live)
        is_continued, self._live = self._live is not None, None
        self.elastic, self._starting = elastic, None
        if survival is not None:
            models.bind(is_continued)
        if survives:
            assert survival is not None
            survival.survive(group)
        self._remaining, self._has_more = data.feed(elastic, restored)
        # Only rank 0 writes the log, so only it measures the gradient norm.
        if elastic.meter.gradients is not None and self.optimizer is not None:
            elastic.meter.gradients.follow(self.optimizer)

    def _share_start(self) -> None:
        """Begin with the weights of rank 0, where nothing is restored: ranks that prepared themselves have not shared
        theirs. Collective."""
        if self.survival is not None:
            self.group.copy_from_first([*self.train_state.replicated().values()])

    def _steps(self) -> Iterator[Batch]:
        """Iterate over the steps of a generation."""
        elastic, survival = self.elastic, self.survival
        assert elastic is not None
        if self._early_reason:
            elastic.end_early(self._early_reason)
        # A script that left its loop before the restart must not enter it again.
        if elastic.resume_early_end():
            self._end(broken_off=True)
            return
        for step in elastic.steps(self.busy.take, self._has_more):
            self._early_reason = elastic.early_reason
            if survival is not None:
                survival.begin_step(self.group)
            loaded = self._loaded = next(self._remaining)
            data = to_device(loaded.data, self.group.device)
            elastic.meter.data_ready()
            self.models.draw(step, loaded.mine)
            try:
                yield Batch(self.models, self.report, loaded, data, step, loaded.mine, loaded.weight)
            except GeneratorExit:
                # The script has left the loop, or is failing. Which of the two is known only later, so no collective is
                # called here.
                self._finish()
                raise
            if survival is not None:
                survival.end_step()
            self._record_step()
        self._end()

    def _leave_group(self, error: Exception) -> None:
        """Keep what this rank needs to go on in another group; drop a step that was not taken.

        Raises:
            PeerFault: it cannot go on.
        """
        assert self.survival is not None
        assert self.elastic is not None
        if self._starting is not None:
            self._starting.release()
            if self._starting.is_replaced:
                raise PeerFault("the group was lost while this rank received its state")
        elif self._live is None:
            # What the script has asked for in a lost step does not count.
            if not self.survival.leave():
                self._early_reason = self.elastic.early_reason
            self._live = self.elastic.leave_group()
            self._remaining, self._loss, self._loaded = iter(()), None, None
        self._starting = None
        self.models.release()
        reason = "it is over" if isinstance(error, GroupLost) else one_line(str(error).partition("\n")[0])
        log.info("left its group after step %d: %s", self.elastic.step, reason)

    def _record_step(self) -> None:
        if self._loss is None:
            raise RuntimeError("nothing was learned from a batch: call batch.mean(losses) on each, or on all its parts")
        assert self._loaded is not None
        assert self.elastic is not None
        rate = None if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])
        loss = None if self.survival is None else self.survival.passes.loss.take(self.group.world_size)
        self.elastic.took(self._loaded.ids, rate, self._loss, self._loaded.content ^ self._loaded.common, loss)
        self._loss = self._loaded = None
        self.models.end_step()

    def _end(self, broken_off: bool = False) -> None:
        assert self.elastic is not None
        self.models.close()
        self.end_code = self.elastic.end_steps(broken_off)
        if self.end_code != ExitCode.DONE:
            raise SystemExit(int(self.end_code))
        if self.pulse is not None:
            self.pulse.all_steps_taken()
        self._finish()

    def _finish(self) -> None:
        """Report that the code after the loop runs."""
        if self.survival is not None:
            self.survival.close()
        if self.pulse is not None:
            self.pulse.finish()
