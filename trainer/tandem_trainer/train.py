"""The training loop of a task, built-in or your own, from top to bottom: data, model, optimizer, start, steps, end.

The gradient is that of the mean loss over the *global* batch, whatever the number of ranks, however unevenly the batch
splits and however many micro-batches a rank needs; every rank takes as many as the one that needs most, because a
forward pass may be a collective (syncBatchNorm). Strategies average over data-parallel ranks, so each rank's sum of
losses is scaled by the number of these ranks / global samples. Where nothing is averaged (hogwild), that is about the
mean over the rank's own part.

Dropout draws by seed, step and sample (tandem_trainer.models.dropout). Whatever else draws in a model follows from
seed, step and rank. So a resumed run needs no stored generator state.

The task defines what is learned (tandem_trainer.task). `tandem_trainer.elastic_run` does all else between two steps:
restore, votes, checkpoints, the log.
"""

import gc
import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import default_collate

from tandem.formatting import one_line
from tandem.job.resource import DistributedTrainingJob
from tandem.job.tasks import Loop, Schedule
from tandem.processes.exitcode import ExitCode
from tandem.rundir.checkpoint import Manifest
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import Origin
from tandem_trainer.agreement import Terms, agree
from tandem_trainer.checkpoint.sharding import to_local
from tandem_trainer.checkpoint.train_state import Contents, TrainState
from tandem_trainer.continuation import LiveState
from tandem_trainer.data.feeding import Reading, to_device
from tandem_trainer.data.keyed import mixed, random_state_restored, seed_torch
from tandem_trainer.data.mixture import Mixture
from tandem_trainer.data.order import Order, Passes, pieces
from tandem_trainer.data.sampling import has_indices
from tandem_trainer.data.shard_order import ShardOrder
from tandem_trainer.data.sharded import shards_of
from tandem_trainer.data.supply import LoaderSupply, Resident, Share, Supply, whole_and_slice
from tandem_trainer.elastic_run import ElasticRun, RunDescription
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.gradient_check import GradientCheck
from tandem_trainer.initial_weights import load_initial
from tandem_trainer.meter import Cost, GradientNorm, Stopwatch, cost_of
from tandem_trainer.micro_batch import MicroBatch, PassDidNotFit, is_out_of_memory
from tandem_trainer.models.dropout import Draws, key_dropout
from tandem_trainer.process_group import Group, GroupLost, PeerFault, rank_device
from tandem_trainer.pulse import Pulse
from tandem_trainer.rank_context import SIGNAL_PATIENCE_SECONDS, RankContext, StopRequest, rank_context
from tandem_trainer.regroup import Regroup, StepBuffers
from tandem_trainer.step_trace import StepTrace
from tandem_trainer.strategies import strategy_of
from tandem_trainer.strategies.strategy import Strategy, mixed_precision, prepare
from tandem_trainer.task import Task, name_of, pinned, task_of, tensors_of

log = logging.getLogger(__name__)

SCHEDULE = "schedule"
"""Name of the schedule's state in a checkpoint: the number of schedule steps that earlier runs took."""

EARLIER_STEPS = "steps"
"""Key of that number in the schedule's state."""


def refuse_slow(loop: Loop, device: torch.device) -> None:
    """Refuse a precision that the device does not support.

    Raises:
        ConfigurationError: the precision is float16, and the device is not a GPU.
    """
    if loop.precision == "float16" and device.type != "cuda":
        raise ConfigurationError("precision: float16 needs a GPU; on a CPU use bfloat16 or float32")


class Stepper:
    """Runs optimizer steps: forward passes, backward passes, clipping, the update."""

    def __init__(
        self,
        task: Task[Any],
        loop: Loop,
        strategy: Strategy,
        forward: nn.Module,
        draws: Draws,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        gradients: GradientNorm | None = None,
    ) -> None:
        """
        Args:
            task: computes the losses.
            loop: settings of the training loop.
            strategy: parallelism of the model over the ranks.
            forward: the model, wrapped by the strategy.
            draws: random keys of the model's dropout.
            optimizer: steps the parameters of the model.
            scaler: gradient scaler; enabled for float16 only.
            gradients: records the gradient norm; None on ranks that write no log.
        """
        group = strategy.group
        refuse_slow(loop, group.device)
        self._task, self._loop, self._strategy, self._group = task, loop, strategy, group
        self._forward, self._draws, self._optimizer, self._scaler = forward, draws, optimizer, scaler
        self._parameters = [parameter for parameters in optimizer.param_groups for parameter in parameters["params"]]
        self._gradients = gradients
        if gradients is not None:
            gradients.follow(optimizer)
        self.busy = Stopwatch(group.device)
        self._runner = strategy.runner(task, draws, self.busy, scaler)
        forward.train()

    def take(self, step: int, share: Share, learning_rates: Sequence[float]) -> Tensor:
        """Take one step.

        Args:
            step: the step's number, counted from 0.
            share: this rank's samples.
            learning_rates: learning rate of each parameter group in this step.

        Returns:
            This rank's part of the mean loss of the global batch: the sum over all ranks is the mean. Scalar, float32.

        Raises:
            PassDidNotFit: a forward or backward pass ran out of memory.
        """
        strategy = self._strategy
        # Seed by step and rank: a resumed run draws the same numbers without a stored generator state.
        for number, device in enumerate(strategy.devices):
            seed_torch(mixed(self._loop.seed, step, strategy.dp_rank, *((number,) if number else ())), device)
        for parameters, rate in zip(self._optimizer.param_groups, learning_rates, strict=True):
            parameters["lr"] = rate
        total = (self._runner or self._run)(step, share)
        if self._loop.gradient_clip_norm is not None:
            # The threshold is one of unscaled gradients. The norm is known then, so nobody measures it again.
            self._scaler.unscale_(self._optimizer)
            norm = strategy.clip(self._parameters, self._loop.gradient_clip_norm)
            if self._gradients is not None and self._gradients.is_due:
                self._gradients.record(norm)
        # With float16, the scaler skips the update if a gradient is not finite.
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def rehearse(self, share: Share) -> None:
        """Compute gradients once and drop them, so that what the first pass compiles and allocates is there.

        Raises:
            PassDidNotFit: it ran out of memory.
        """
        self._run(0, share)
        self._optimizer.zero_grad(set_to_none=True)

    def global_loss(self, total: Tensor) -> Tensor | None:
        """Return the mean loss of the global batch in the step that was just taken, a scalar; None if this rank does
        not know it.

        Args:
            total: this rank's part.
        """
        if self._group.world_size == 1:
            return total
        carrier = self._strategy.carrier
        if carrier is None or carrier.grad is None:
            return None
        # The gradient is a part of a bucket, which the next step overwrites.
        loss, carrier.grad = carrier.grad.clone(), None
        return loss

    def _run(self, step: int, share: Share) -> Tensor:
        """Run the forward and backward passes of a share, micro-batch by micro-batch."""
        strategy, device, carrier = self._strategy, self._group.device, self._strategy.carrier
        size = len(share.ids)
        cuts = pieces(share.samples, size, strategy.dp_size, self._loop.micro_batch_size or size)
        total = torch.zeros((), device=device)
        # Tensor-parallel ranks compute the same loss. Each reports its fraction, so that the sum over ranks is the
        # mean.
        loss_share = strategy.dp_size / self._group.world_size
        for number, (start, end) in enumerate(cuts, start=1):
            # A rank without a sample still takes part in the collectives: with one sample of weight 0.
            scale = (1.0 if start < end else 0.0) / size
            try:
                # Gradients are averaged over ranks with the last micro-batch only.
                with strategy.synchronised(self._forward, last=number == len(cuts)):
                    with self.busy:
                        loss = self.loss(step, self._forward, *share.part(start, end))
                    objective = loss * (scale * strategy.dp_size)
                    if carrier is not None:
                        objective = objective + carrier * objective.detach()
                    self._scaler.scale(objective).backward()  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise PassDidNotFit(max(1, end - start)) from error
                if self._group.is_lost:
                    raise GroupLost from error
                raise
            total += loss.detach() * (scale * loss_share)
        return total

    def loss(self, step: int, model: nn.Module, batch: Any, keys: Tensor) -> Tensor:
        """Compute the sum of the losses of the samples with some ids. Scalar."""
        self._draws.set(self._loop.seed, step, keys)
        if self._loop.precision == "float32":
            return self._task.loss_sum(model, batch, len(keys))
        with mixed_precision(self._loop, self._group.device):
            return self._task.loss_sum(model, batch, len(keys)).float()


def rate_factor(schedule: Schedule, step: int, total_steps: int) -> float:
    """Compute the factor of the peak learning rate in a step (counted from 0): warm-up, then the schedule's shape."""
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.name == "constant":
        return 1.0
    span = max(1, (schedule.total_steps or total_steps) - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
    return schedule.final_fraction + (1 - schedule.final_fraction) * shape


def train(job: DistributedTrainingJob, rundir: RunDir, group: Group | None, pulse: Pulse | None) -> ExitCode:
    """Train the job's task until its end or until the rank is asked to leave. Collective: every rank of the generation
    calls it. Where the job's ranks regroup, it goes on in the generations that follow.

    Args:
        group: the ranks of this generation; None: this rank prepares itself, and waits for a place in one.
        pulse: channel to the agent; None where there is no agent, which gives places.

    Raises:
        ConfigurationError: the job cannot work as it is written.
        Superseded: a newer generation has taken over.
        SaveFailed: the last checkpoint could not be written.
        TrainingDiverged: the loss has become useless.
        MicroBatchHalved: a micro-batch did not fit into memory.
        SampleTooLarge: a single sample did not fit into memory.
    """
    stop = StopRequest(pulse)
    device = rank_device() if group is None else group.device
    regroup = Regroup.create_for(job, device, pulse, stop.is_signalled)
    if regroup is not None:
        stop.patience = SIGNAL_PATIENCE_SECONDS
    run = TaskRun(job, rundir, stop, regroup)
    if group is None:
        assert regroup is not None, "agents start no other ranks without a place"
        run.prepare(RankContext(rundir, Group(0, 1, 0, device), 0, [], pulse))
        group = regroup.join_next()
    while True:
        try:
            if group is None:
                assert regroup is not None
                group = regroup.join_next()
            context = rank_context(rundir, group, pulse)
            run.start(context)
            run.take_steps()
            code = run.end()
        except Exception as error:
            if regroup is None or not regroup.follows(error):
                raise
            run.leave_group()
            reason = "it is over" if isinstance(error, GroupLost) else one_line(str(error).partition("\n")[0])
            log.info("left generation %d after step %d: %s", context.generation, run.step, reason)
            group = None
        else:
            group.leave()
            return code


class TaskRun:
    """Training of a task on this rank, through one generation or several.

    Args:
        job: the job.
        rundir: the job's run directory.
        stop: request to save and leave.
        regroup: takes this rank to the next generation; None: it ends with its group.
    """

    def __init__(self, job: DistributedTrainingJob, rundir: RunDir, stop: StopRequest, regroup: Regroup | None) -> None:
        self._job, self._stop, self._regroup = job, stop, regroup
        # The task keeps to the commits of weights and data that earlier generations read.
        torch.use_deterministic_algorithms(job.spec.trainer.settings_of_loop.deterministic)
        self._task = pinned(task_of(job.spec.trainer), rundir)
        self._dataset, self._first, self._end = samples_of(self._task)
        self._learner: Learner | None = None
        self._elastic: ElasticRun | None = None
        self._stepper: Stepper | None = None
        self._supply: Supply | None = None
        self._gradients: GradientCheck | None = None
        self._is_started = False
        self._live: LiveState | None = None
        self.step = 0
        """Optimizer steps completed, at the last change of the group."""

    def prepare(self, context: RankContext) -> None:
        """Build model and optimizer, and compute once, before this rank has a place in a group.

        Args:
            context: this rank alone.
        """
        loop, workers = self._job.spec.trainer.settings_of_loop, self._job.spec.workers
        strategy = strategy_of(loop, context.group, workers.processes)
        self._learner = self._build(loop, strategy)
        # Loader workers inherit what a data set has opened, such as the offset of a file. So where they read, this
        # process reads nothing.
        if loop.loader_workers:
            return
        # The samples of one pass in a full group, more or less.
        count = max(1, loop.global_batch_size // (workers.replicas * workers.processes))
        count = min(count, MicroBatch(self._job, context).max_samples or count)
        with random_state_restored(), suppress(PassDidNotFit):
            self._rehearse(loop, strategy, count)

    def _rehearse(self, loop: Loop, strategy: Strategy, count: int) -> None:
        """Compute the gradients of some samples once, and put back what that changes."""
        learner, group = self._learner, strategy.group
        assert learner is not None
        batch = to_device(examples_of(self._task, self._dataset, self._first, self._end, count), group.device)
        ids = torch.arange(count)
        learner.buffers.hold(group)
        stepper = Stepper(
            *(self._task, loop, strategy, strategy.wrap(learner.model)),
            *(learner.draws, learner.optimizer, learner.scaler),
        )
        try:
            stepper.rehearse(Share(ids, count, lambda start, end: (batch, ids[start:end])))
        finally:
            learner.buffers.put_back()

    def start(self, context: RankContext) -> None:
        """Start a generation: from the newest checkpoint of this run, or from the state that ranks hold, else from
        fresh weights. Collective."""
        job, group, task = self._job, context.group, self._task
        if self._learner is not None and self._elastic is None:
            # It has prepared itself, perhaps long ago, and settings may have changed since it has read the job.
            job = context.rundir.read_job()
            if job.spec.trainer != self._job.spec.trainer:
                raise PeerFault("the settings of the loop have changed since this rank prepared itself")
            self._job = job
        if self._live is not None:
            self._live = replace(self._live, entered=self._live.entered | {context.generation})
            if context.rundir.read_job().spec.checkpoint != job.spec.checkpoint:
                # Ranks that start now have read the new ones, and would vote after other steps.
                raise PeerFault("the settings of checkpoints have changed, and a process reads them when it starts")
        loop = job.spec.trainer.settings_of_loop
        self._is_started = False
        elastic = self._elastic = ElasticRun(
            context, job.spec.checkpoint, self._stop, job.spec.trainer.rewind_on, self._regroup is not None
        )
        self._micro_batch = MicroBatch(job, context)
        loop = self._loop = loop.model_copy(update={"micro_batch_size": self._micro_batch.max_samples})
        # Ranks with other data or settings would call other collectives, and hang. So they compare before the first
        # one.
        order = order_of(loop, self._first, self._end, mixture_of(self._dataset), shards_of(self._dataset))
        agree(group, terms_of(loop, order))
        passes = Passes(order, loop.epochs, loop.max_steps)

        # The strategy comes before the model: it may change how this process returns freed memory.
        strategy = self._strategy = strategy_of(loop, group, job.spec.workers.processes)
        learner = self._learner = self._learner or self._build(loop, strategy)
        fresh = FreshStart(task, loop, group, learner.model, learner.average, learner.train_state, learner.schedule)
        facts = RunDescription(
            cost=learner.cost,
            mesh=strategy.mesh,
            is_shared=strategy.is_shared,
            filtered_samples=task.filtered_samples(),
            datasets=task.dataset_commits(),
        )
        elastic.begin(learner.train_state, passes, fresh.load, facts, self._live)
        # From here on this rank holds the state of the new generation.
        survives, self._live = self._live is not None, None
        self._group, self._is_started = group, True
        if survives:
            # The DistributedDataParallel of the group before goes now, and its hooks on the gradients with it.
            gc.collect()
        if self._regroup is not None:
            self._regroup.survive(group)
            strategy.allow_interrupts()
            strategy.carry_loss()
        # Wrap after loading: DistributedDataParallel copies the weights of rank 0 to all ranks.
        forward = strategy.wrap(learner.model)
        self._stepper = Stepper(
            *(task, loop, strategy, forward, learner.draws, learner.optimizer, learner.scaler),
            elastic.meter.gradients,
        )
        self._supply = supply_of(task, self._dataset, passes.order, loop, strategy, elastic.data_steps_left)
        # A task of the user's own may need more samples at once, or differ between ranks.
        is_built_in = job.spec.trainer.own_task is None
        is_compared = is_built_in and strategy.is_replicated and elastic.on_corruption != "Off"
        self._gradients = GradientCheck(group, learner.model, self._stepper.loss, loop) if is_compared else None

    def take_steps(self) -> None:
        """Take the remaining steps. What happens between two of them (votes, checkpoints, the log) happens in
        `ElasticRun.steps`."""
        elastic, learner, regroup, supply = self._elastic, self._learner, self._regroup, self._supply
        stepper = self._stepper
        assert supply is not None
        assert stepper is not None
        assert elastic is not None
        assert learner is not None
        assert elastic.total_steps is not None
        trace = StepTrace(self._group.rank, self._group.device)
        earlier_steps = learner.schedule[EARLIER_STEPS]
        # Under hogwild all ranks share one copy of the weights, and rank 0 alone averages it.
        averages = learner.average is not None and (self._group.rank == 0 or not self._strategy.is_shared)
        for step in elastic.steps(stepper.busy.take):
            if regroup is not None:
                regroup.check()
                learner.buffers.hold(self._group)
            share = supply.read(elastic.data_step)
            factor = rate_factor(self._loop.schedule, earlier_steps + step, earlier_steps + elastic.total_steps)
            rates = [peak * factor for peak in learner.peak_rates]
            elastic.meter.data_ready()
            try:
                if self._gradients is not None and self._gradients.is_due(step):
                    self._gradients.compare(step, share, elastic.corruptions)
                loss = stepper.take(step, share, rates)
            except PassDidNotFit as failed:
                self._micro_batch.halve(failed)
            # From here to the next step nothing waits for other ranks before the step is counted: it is taken.
            learner.buffers.drop()
            if averages:
                assert learner.average is not None
                learner.average.update_parameters(learner.model)
            global_loss = None if regroup is None else stepper.global_loss(loss)
            elastic.took(share.ids, rates[0], loss, share.content, global_loss)
            trace.step()
        trace.close()

    def end(self) -> ExitCode:
        """Wait for the last checkpoint, and end the run if all steps are taken. Collective."""
        assert self._elastic is not None
        return self._elastic.end()

    def leave_group(self) -> None:
        """Keep what this rank needs to go on in another group; drop the step that was not taken.

        Raises:
            PeerFault: it cannot go on.
        """
        elastic, learner = self._elastic, self._learner
        assert elastic is not None
        assert learner is not None
        if self._is_started:
            self.step = elastic.step
            self._live = elastic.leave_group()
            learner.buffers.put_back()
            learner.optimizer.zero_grad(set_to_none=True)
            self._stepper = self._supply = None
        else:
            elastic.release()
            if elastic.is_replaced:
                raise PeerFault("the group was lost while this rank received its state")
        self._is_started = False

    def _build(self, loop: Loop, strategy: Strategy) -> "Learner":
        """Build what learns: model, average, optimizer."""
        task, group = self._task, strategy.group
        # The operations are counted on a model of random weights: before the seed is set.
        cost = cost_of(loop.precision, task.flops_per_sample, group.device)
        cost = cost._replace(tokens_per_sample=task.tokens_per_sample(), learned_per_sample=task.learned_per_sample())
        torch.manual_seed(mixed(loop.seed))
        model = task.model()
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"{name_of(type(task))}.model returned no torch.nn.Module: {type(model).__name__}")
        draws = key_dropout(model)
        model = prepare(model, loop, group)
        # The average is a copy of the whole model, so it is made before the model is split over ranks.
        average = averaged(model, loop.ema_decay)
        examples = partial(examples_of, task, self._dataset, self._first, self._end)
        strategy.shard(model, task, examples)
        task.settle(model)
        task.load_frozen(model)
        if average is not None:
            strategy.shard(average.module, task, examples)
            task.load_frozen(average.module)

        # Optimizer, over the parameters that this rank holds now.
        optimizer = task.optimizer(model, loop.optimizer)
        scaler = strategy.scaler()
        schedule = {EARLIER_STEPS: 0}
        other_state: dict[str, Any] = {"scaler": scaler} if scaler.is_enabled() else {}
        if loop.initial_optimizer == "MomentsAndSchedule":
            other_state[SCHEDULE] = schedule
        return Learner(
            model=model,
            average=average,
            draws=draws,
            optimizer=optimizer,
            peak_rates=[float(parameters["lr"]) for parameters in optimizer.param_groups],
            scaler=scaler,
            schedule=schedule,
            train_state=TrainState(model, optimizer, average, other_state, stages=strategy.stages),
            buffers=StepBuffers(model),
            cost=cost,
        )


@dataclass(frozen=True, kw_only=True)
class Learner:
    """Model and optimizer of this rank, with all that they need. They stay when the group changes."""

    model: nn.Module
    """The model, as the strategy has placed it."""
    average: AveragedModel | None
    """Average of its weights."""
    draws: Draws
    """Random numbers of its dropout."""
    optimizer: torch.optim.Optimizer
    """Steps the parameters."""
    peak_rates: Sequence[float]
    """Peak learning rate of each parameter group."""
    scaler: torch.amp.GradScaler
    """Scales losses, for float16."""
    schedule: dict[str, int]
    """Steps that earlier runs took of the schedule, under EARLIER_STEPS; changed in place by a start."""
    train_state: TrainState
    """All of the above that a checkpoint holds."""
    buffers: StepBuffers
    """Buffers before a step."""
    cost: Cost
    """Cost of a sample."""


@dataclass(frozen=True)
class FreshStart:
    """The start of a run without a checkpoint of its own: `loop.initialWeights`, or the task's own weights."""

    task: Task[Any]
    loop: Loop
    group: Group
    model: nn.Module
    average: AveragedModel | None
    train_state: TrainState
    schedule: dict[str, int]
    """Steps that earlier runs took of the schedule, under EARLIER_STEPS; changed in place."""

    def load(self) -> Origin | None:
        """Load the initial weights into the model and its average. Collective.

        Returns:
            Where the weights come from; None if the task made them.
        """
        if self.loop.initial_weights is not None:
            take_over = None if self.loop.initial_optimizer == "Fresh" else self._take_over_optimizer
            origin: Origin | None = load_initial(self.model, Path(self.loop.initial_weights), self.group, take_over)
        else:
            self.task.initialize(self.model)
            origin = self.task.origin()
        if self.average is not None:
            self.average.module.load_state_dict(self.model.state_dict())
        return origin

    def _take_over_optimizer(self, contents: Contents, manifest: Manifest) -> None:
        """Load the optimizer state of another run's checkpoint, and continue its schedule if the job says so."""
        self.train_state.load_optimizer(contents)
        if self.loop.initial_optimizer == "MomentsAndSchedule":
            # That run may itself have continued the schedule of another one.
            schedule = self.train_state.other(SCHEDULE, contents) or {}
            self.schedule[EARLIER_STEPS] = manifest.step + int(schedule.get(EARLIER_STEPS, 0))


def samples_of(task: Task[Any]) -> tuple[Any, int, int]:
    """Return the training data of a task, and the slice of it that is used: data set, first sample, end.

    Raises:
        ConfigurationError: the data has no length and no indices, or no samples.
    """
    dataset = task.data("train")
    name = name_of(type(task))
    if not has_indices(dataset):
        raise ConfigurationError(
            f'{name}.data("train") returned a {type(dataset).__name__}, which has no __len__ and __getitem__; a stream '
            "needs a loop of your own with a session"
        )
    if not len(dataset):
        raise ConfigurationError(f'{name}.data("train") is empty')
    return whole_and_slice(dataset)


DIFFERENT_SAMPLES = 16
"""Distinct samples that are read for an example batch; more are repetitions, because reading takes time."""


def examples_of(task: Task[Any], dataset: Any, start: int, end: int, count: int) -> Any:
    """Build a batch of `count` samples on the CPU: the first few of `start` to `end`, repeated as often as needed."""
    first = range(start, min(end, start + DIFFERENT_SAMPLES))
    numbers = [first[place % len(first)] for place in range(count)]
    tensors = tensors_of(task, dataset)
    if tensors is not None:
        return [tensor[numbers] for tensor in tensors]
    read = {number: dataset[number] for number in first[:count]}
    return task.collate([read[number] for number in numbers])


def supply_of(
    task: Task[Any], dataset: Any, order: Order, loop: Loop, strategy: Strategy, steps: Iterable[int]
) -> Supply:
    """Create the supply of this rank's batches.

    Args:
        steps: the data steps that remain.
    """
    tensors, device = tensors_of(task, dataset), strategy.group.device
    if tensors is not None:
        return Resident(tensors, order, strategy.dp_rank, strategy.dp_size, device)
    workers = loop.loader_workers
    pin = device.type == "cuda"
    collate = default_collate if type(task).collate is Task.collate else task.collate
    reading = Reading(strategy.dp_rank, strategy.dp_size, loop.seed, workers, collate, pin=pin)
    return LoaderSupply(dataset, order, steps, reading, device)


def averaged(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """Create an exponential moving average of the weights; None without a decay."""
    if decay is None:
        return None
    lerp = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def update(averages: Sequence[Tensor], current: Sequence[Tensor], count: Any) -> None:
        """Update averages of one dtype. Codes of quantized weights are frozen, and no numbers to average."""
        if averages[0].is_floating_point():
            # Local shards: a multi-tensor kernel takes the tensors of one mesh only.
            lerp([to_local(tensor) for tensor in averages], [to_local(tensor) for tensor in current], count)

    average = AveragedModel(model, multi_avg_fn=update)
    # The average starts as a copy of the weights, or as a checkpoint had it. In neither case is its first update
    # special.
    average.n_averaged.fill_(1)
    return average


def mixture_of(dataset: Any) -> Mixture | None:
    """Return the mixture that a data set of several sources is read in; None: each sample once."""
    mixture = getattr(dataset, "mixture", None)
    return mixture if isinstance(mixture, Mixture) else None


def terms_of(loop: Loop, order: Order) -> Terms:
    """Collect the terms that the ranks of a task must agree on before they train."""
    settings = loop.dump()
    for name in ("seed", "strategy", "precision", "globalBatchSize", "dropLast", "epochs", "maxSteps"):
        settings.pop(name, None)
    mixture = order.mixture
    return Terms(
        seed=loop.seed,
        strategy=(loop.strategy,),
        dtypes=(loop.precision,),
        samples=order.samples,
        global_batch_size=loop.global_batch_size,
        drop_last=loop.drop_last,
        epochs=loop.epochs,
        max_steps=loop.max_steps,
        order=None if order.shards is None else order.shards.description,
        mixture=None if mixture is None else (*mixture.samples, *mixture.taken),
        settings=settings | {"first sample": order.first},
    )


def order_of(
    loop: Loop, start: int, end: int, mixture: Mixture | None = None, shards: ShardOrder | None = None
) -> Order:
    """Return the order of the samples from `start` to before `end`.

    Args:
        mixture: samples per epoch of each source, where there are several.
        shards: order of the whole data set where it is in shards. A slice of it is shuffled as if it were in none.

    Raises:
        ConfigurationError: `dropLast` leaves out all of them.
    """
    samples = end - start
    assert mixture is None or (start, end) == (0, sum(mixture.taken)), "a mixture is read as a whole"
    if loop.drop_last and samples < loop.global_batch_size:
        raise ConfigurationError(
            f"dropLast leaves out all of the {samples} samples, because globalBatchSize {loop.global_batch_size} "
            "is more"
        )
    shards = shards if shards is not None and samples == shards.samples else None
    return Order(samples, loop.global_batch_size, loop.seed, start, loop.drop_last, mixture, shards)
