"""The training loop of a task, built-in or your own, from top to bottom: data, model, restore, steps, end.

The gradient is that of the mean loss over the *global* batch, whatever the number of ranks, however unevenly the batch
splits and however many micro-batches a rank needs; every rank takes as many as the one that needs most, because a
forward pass may be a collective (syncBatchNorm). Strategies average over data-parallel ranks, so each rank's sum of
losses is scaled by the number of these ranks / global samples. Where nothing is averaged (hogwild), that is about the
mean over the rank's own part.

Dropout draws by seed, step and sample (tandem_trainer.models.dropout). Whatever else draws in a model follows from
seed, step and rank. So a resumed run needs no stored generator state.

What is learned is the task's (tandem_trainer.task). What makes it elastic, and the checkpoints, are the business of
`tandem_trainer.elastic_run`.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import default_collate

from tandem.exitcode import ExitCode
from tandem.job import DistributedTrainingJob
from tandem.rundir.checkpoint import Manifest
from tandem.rundir.lineage import Origin
from tandem.tasks import Loop, Schedule, TaskLoop
from tandem_trainer.agreement import Terms, agree
from tandem_trainer.checkpoint.sharding import here
from tandem_trainer.checkpoint.train_state import Contents, TrainState
from tandem_trainer.data.feeding import Reading
from tandem_trainer.data.keyed import mixed, seed_torch
from tandem_trainer.data.mixture import Mixture
from tandem_trainer.data.order import Order, Passes, pieces
from tandem_trainer.data.sampling import has_indices
from tandem_trainer.data.supply import Read, Resident, Share, Supply, whole_and_slice
from tandem_trainer.elastic_run import ElasticRun, RankContext, StopRequest
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.initial_weights import load_initial
from tandem_trainer.meter import Busy, GradientNorm, cost_of
from tandem_trainer.micro_batch import MicroBatch, PassDidNotFit, is_out_of_memory
from tandem_trainer.models.dropout import Draws, key_dropout
from tandem_trainer.step_trace import StepTrace
from tandem_trainer.strategies import strategy_of
from tandem_trainer.strategies.strategy import Strategy, mixed_precision, prepare
from tandem_trainer.task import Task, name_of, pinned, task_of, tensors_of

SCHEDULE = "schedule"
"""Among the others of a checkpoint: how many steps the runs before it have taken of the schedule."""


def refuse_slow(loop: Loop, device: torch.device) -> None:
    """
    Raises:
        ConfigurationError: the precision is none for this device.
    """
    if loop.precision == "float16" and device.type != "cuda":
        raise ConfigurationError("precision: float16 needs a GPU; on a CPU take bfloat16 or float32")


class Stepper:
    """Takes optimizer steps."""

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
            task: whose losses are learned from.
            loop: how.
            strategy: how the model lies on the ranks.
            forward: the model as the strategy has it called.
            draws: what its dropout draws from.
            scaler: of the loss; enabled for float16 alone.
            gradients: measures their norm; None where nobody asks.
        """
        group = strategy.group
        refuse_slow(loop, group.device)
        self._task, self._loop, self._strategy, self._group = task, loop, strategy, group
        self._forward, self._draws, self._optimizer, self._scaler = forward, draws, optimizer, scaler
        self._parameters = [p for parameters in optimizer.param_groups for p in parameters["params"]]
        self._gradients = gradients
        if gradients is not None:
            gradients.follow(optimizer)
        self.busy = Busy(group.device)
        self._runner = strategy.runner(task, draws, self.busy, scaler)
        forward.train()

    def take(self, step: int, share: Share, learning_rates: Sequence[float]) -> Tensor:
        """Take one step.

        Args:
            step: its number, counted from 0.
            share: this rank's samples.
            learning_rates: for this step, of each group of parameters.

        Returns:
            This rank's part of the mean loss of the global batch: the sum over all ranks is the mean. Scalar, float32.

        Raises:
            PassDidNotFit: a forward or backward pass ran out of memory.
        """
        strategy = self._strategy
        for number, one in enumerate(strategy.devices):
            seed_torch(mixed(self._loop.seed, step, strategy.dp_rank, *((number,) if number else ())), one)
        for parameters, rate in zip(self._optimizer.param_groups, learning_rates, strict=True):
            parameters["lr"] = rate
        total = (self._runner or self._run)(step, share)
        if self._loop.gradient_clip_norm is not None:
            self._scaler.unscale_(self._optimizer)
            norm = strategy.clip(self._parameters, self._loop.gradient_clip_norm)
            if self._gradients is not None and self._gradients.is_due:
                self._gradients.tell(norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _run(self, step: int, share: Share) -> Tensor:
        """Forward and backward pass of a share, part by part."""
        strategy, device = self._strategy, self._group.device
        size = len(share.ids)
        cuts = pieces(share.samples, size, strategy.dp_size, self._loop.micro_batch_size or size)
        total = torch.zeros((), device=device)
        # Ranks that work on the same samples share what they say of them.
        told = strategy.dp_size / self._group.world_size
        for number, (start, end) in enumerate(cuts, start=1):
            # A rank without a sample still takes part in the collectives: with one sample of weight 0.
            scale = (1.0 if start < end else 0.0) / size
            try:
                with strategy.synchronised(self._forward, last=number == len(cuts)):
                    with self.busy:
                        loss = self._loss(step, share, start, end)
                    self._scaler.scale(loss * (scale * strategy.dp_size)).backward()  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise PassDidNotFit(max(1, end - start)) from error
                raise
            total += loss.detach() * (scale * told)
        return total

    def _loss(self, step: int, share: Share, start: int, end: int) -> Tensor:
        """Sum of the losses of some samples. Scalar."""
        batch, keys = share.part(start, end)
        self._draws.set(self._loop.seed, step, keys)
        if self._loop.precision == "float32":
            return self._task.loss_sum(self._forward, batch, len(keys))
        with mixed_precision(self._loop, self._group.device):
            return self._task.loss_sum(self._forward, batch, len(keys)).float()


def rate_factor(schedule: Schedule, step: int, total_steps: int) -> float:
    """What the peak learning rate is multiplied with in a step (counted from 0): warm-up, then the schedule's shape."""
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.name == "constant":
        return 1.0
    span = max(1, (schedule.total_steps or total_steps) - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
    return schedule.final_fraction + (1 - schedule.final_fraction) * shape


def train(job: DistributedTrainingJob, context: RankContext) -> ExitCode:
    """Train the job's task until its end or until asked to leave. Collective: every rank of the generation calls it.

    Raises:
        ConfigurationError: the job cannot work as it is written.
        Superseded: a newer generation has taken over.
        SaveFailed: the last checkpoint could not be written.
        WentBack: the loss has become useless.
        MicroBatchHalved: a micro-batch did not fit into memory.
        DoesNotFit: nor did one of a single sample.
    """
    stop = StopRequest(context.pulse)
    loop, group = job.spec.trainer.settings_of_loop, context.group

    # Data and model
    torch.use_deterministic_algorithms(loop.deterministic)
    task = pinned(task_of(job.spec.trainer), context.rundir)
    dataset, start, end = samples_of(task)
    elastic = ElasticRun(context, job.spec.checkpoint, stop, loop.rewind_on)
    micro_batch = MicroBatch(job, context)
    loop = loop.model_copy(update={"micro_batch_size": micro_batch.most})
    agree(group, terms_of(loop, start, end, mixture_of(dataset)))
    passes = Passes(order_of(loop, start, end, mixture_of(dataset)), loop.epochs, loop.max_steps)
    cost = cost_of(loop.precision, task.flops_per_sample, group.device)
    cost = cost._replace(tokens_per_sample=task.tokens_per_sample(), learned_per_sample=task.learned_per_sample())
    # Before the model is made: it may decide what becomes of memory that is freed.
    strategy = strategy_of(loop, group, job.spec.workers.processes)
    torch.manual_seed(mixed(loop.seed))
    model = task.model()
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{name_of(type(task))}.model returned no torch.nn.Module: {type(model).__name__}")
    draws = key_dropout(model)
    model = prepare(model, loop, group)
    average = averaged(model, loop.ema_decay)
    examples = partial(examples_of, task, dataset, start, end)
    strategy.shard(model, task, examples)
    task.settle(model)
    task.load_frozen(model)
    if average is not None:
        strategy.shard(average.module, task, examples)
        task.load_frozen(average.module)
    optimizer = task.optimizer(model, loop.optimizer)
    peaks = [float(parameters["lr"]) for parameters in optimizer.param_groups]
    scaler = strategy.scaler()

    before = {"steps": 0}

    def take_over(found: Contents, of: Manifest) -> None:
        kept.load_optimizer(found)
        if loop.initial_optimizer == "MomentsAndSchedule":
            known = kept.other(SCHEDULE, found) or {}
            before["steps"] = of.step + int(known.get("steps", 0))

    def begin() -> Origin | None:
        origin = None
        if loop.initial_weights is not None:
            more = None if loop.initial_optimizer == "Fresh" else take_over
            origin = load_initial(model, Path(loop.initial_weights), group, more)
        else:
            task.initialize(model)
            origin = task.origin()
        if average is not None:
            average.module.load_state_dict(model.state_dict())
        return origin

    # Where to start
    others: dict[str, Any] = {"scaler": scaler} if scaler.is_enabled() else {}
    if loop.initial_optimizer == "MomentsAndSchedule":
        others[SCHEDULE] = before
    kept = TrainState(model, optimizer, average, others, stages=strategy.stages)
    elastic.begin(kept, passes, begin, cost, strategy.mesh, strategy.is_shared, task.dataset_commits())
    forward = strategy.wrap(model)
    stepper = Stepper(task, loop, strategy, forward, draws, optimizer, scaler, elastic.meter.gradients)
    supply = supply_of(task, dataset, passes.order, loop, strategy, elastic.data_steps_left)

    # Steps
    trace = StepTrace(group.rank, group.device)
    assert elastic.total_steps is not None
    for step in elastic.steps(stepper.busy.take):
        share = supply.read(elastic.data_step)
        factor = rate_factor(loop.schedule, before["steps"] + step, before["steps"] + elastic.total_steps)
        rates = [peak * factor for peak in peaks]
        elastic.meter.data_ready()
        try:
            loss = stepper.take(step, share, rates)
        except PassDidNotFit as failed:
            micro_batch.halve(failed)
        if average is not None and (group.rank == 0 or not strategy.is_shared):
            average.update_parameters(model)
        elastic.took(share.ids, rates[0], loss, share.content)
        trace.step()
    trace.close()
    return elastic.end()


def samples_of(task: Task[Any]) -> tuple[Any, int, int]:
    """The training data of a task, and the slice of it that is used.

    Raises:
        ConfigurationError: it has no samples with numbers.
    """
    given = task.data("train")
    name = name_of(type(task))
    if not has_indices(given):
        raise ConfigurationError(
            f'{name}.data("train") returned a {type(given).__name__}, which has no __len__ and __getitem__; a stream '
            "needs a loop of your own with a session"
        )
    if not len(given):
        raise ConfigurationError(f'{name}.data("train") is empty')
    return whole_and_slice(given)


DIFFERENT_SAMPLES = 16
"""Samples that are read for a batch to try a model with, and then repeated: reading takes time."""


def examples_of(task: Task[Any], dataset: Any, start: int, end: int, count: int) -> Any:
    """A batch of `count` samples, on the CPU: the first few of `start` to `end`, repeated as often as it takes."""
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
    """Where this rank's batches come from.

    Args:
        steps: the data steps that are to come.
    """
    tensors, device = tensors_of(task, dataset), strategy.group.device
    if tensors is not None:
        return Resident(tensors, order, strategy.dp_rank, strategy.dp_size, device)
    workers = loop.loader_workers if isinstance(loop, TaskLoop) else 0
    pin = device.type == "cuda"
    collate = default_collate if type(task).collate is Task.collate else task.collate
    reading = Reading(strategy.dp_rank, strategy.dp_size, loop.seed, workers, collate, pin=pin)
    return Read(dataset, order, steps, reading, device)


def averaged(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """An exponential moving average of the weights; None without a decay."""
    if decay is None:
        return None
    lerp = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def update(mine: Sequence[Tensor], current: Sequence[Tensor], count: Any) -> None:
        """Of tensors of one type. Frozen codes of quantized weights are no numbers."""
        if mine[0].is_floating_point():
            # What this rank holds of each: an operation for many tensors takes those of one mesh alone.
            lerp([here(one) for one in mine], [here(one) for one in current], count)

    average = AveragedModel(model, multi_avg_fn=update)
    # It begins as a copy, and goes on as what a checkpoint held: its first update is one like all others.
    average.n_averaged.fill_(1)
    return average


def mixture_of(dataset: Any) -> Mixture | None:
    """In which shares a data set of several sources is to be read."""
    found = getattr(dataset, "mixture", None)
    return found if isinstance(found, Mixture) else None


def terms_of(loop: Loop, start: int, end: int, mixture: Mixture | None) -> Terms:
    """Terms that the ranks of a task must agree on before they train."""
    settings = loop.dump()
    for name in ("seed", "strategy", "precision", "globalBatchSize", "dropLast", "epochs", "maxSteps"):
        settings.pop(name, None)
    return Terms(
        seed=loop.seed,
        strategy=(loop.strategy,),
        dtypes=(loop.precision,),
        samples=end - start,
        global_batch_size=loop.global_batch_size,
        drop_last=loop.drop_last,
        epochs=loop.epochs,
        max_steps=loop.max_steps,
        mixture=None if mixture is None else (*mixture.samples, *mixture.taken),
        settings=settings | {"first sample": start},
    )


def order_of(loop: Loop, start: int, end: int, mixture: Mixture | None = None) -> Order:
    """The order of the samples from `start` to before `end`.

    Args:
        mixture: what an epoch takes of them where they are of several sources.

    Raises:
        ConfigurationError: nothing of them is left.
    """
    assert mixture is None or (start, end) == (0, sum(mixture.taken)), "a mixture is read as a whole"
    if loop.drop_last and end - start < loop.global_batch_size:
        raise ConfigurationError(
            f"dropLast leaves out all of the {end - start} samples, because globalBatchSize {loop.global_batch_size} "
            "is more"
        )
    return Order(end - start, loop.global_batch_size, loop.seed, first=start, drop_last=loop.drop_last, mixture=mixture)
