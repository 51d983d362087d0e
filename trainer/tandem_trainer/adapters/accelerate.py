"""A loop of one's own with Hugging Face accelerate, as an elastic run.

    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    run = elastic(accelerator, loader, model, optimizer, schedule=schedule, epochs=3)
    with run:
        for inputs, labels in run:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

The run gives out the micro-batches of all epochs that are left. The global batch is what the loader and the
accelerator's accumulation make it on the ranks that the job asks for; on other numbers of ranks there are more
micro-batches, or fewer, or larger ones if nothing is accumulated.

`accelerator.backward` weighs the loss, which has to be a mean over the samples of a micro-batch, by their number, so
that uneven shares do not matter. Rejected: a loss that the script weighs itself (forgotten, and nothing would show it).

A schedule that `prepare` has wrapped steps once for each rank, because there the global batch grows with them. Here it
steps as often as on the number of ranks that the global batch is made for, whatever their number now.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Self, cast

import torch
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tandem.job import Checkpoint
from tandem.tasks import RewindOn
from tandem_trainer.adapters import options
from tandem_trainer.adapters.micro_batches import CollateParts, MicroBatch, micro_batches, number_of
from tandem_trainer.adapters.peft import leave_base_out
from tandem_trainer.checkpoint.train_state import Stateful
from tandem_trainer.data.sampling import EpochOrder
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.session import Session

KEPT_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Ways to distribute in which each rank has the whole model."""


class Run:
    """The steps that are left; made by `elastic`."""

    def __init__(
        self,
        accelerator: Accelerator,
        session: Session,
        batches: Iterator[Any],
        put_base_back: Callable[[], None],
    ) -> None:
        self.session = session
        """Everything that a session can do: `pausing`, `step`, `rank`."""
        self.epoch = 0
        """Passes over the data completed before the batch that is in use."""
        self._accelerator, self._batches = accelerator, batches
        self._put_base_back = put_base_back
        self._now: MicroBatch | None = None
        self._backward: Callable[..., None] = accelerator.backward

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches of this rank, as the loader's collate function made them, on the device."""
        for batch in self._batches:
            self.epoch = batch.epoch
            for part in micro_batches(batch):
                batch.draw(part.number)
                self._now = part
                yield part.data
                if self._now is not None:
                    raise ConfigurationError("a batch was not used: call accelerator.backward(loss) on each")

    def backward(self, loss: Tensor, **settings: Any) -> None:
        """In the place of `accelerator.backward`.

        Args:
            loss: scalar, the mean over the samples of the micro-batch.
        """
        part, self._now = self._now, None
        if part is None:
            raise ConfigurationError("accelerator.backward(loss) is called once for each batch of the run, in its loop")
        if self._accelerator.sync_gradients != part.is_last:
            raise ConfigurationError(
                f"a step has {len(part.batch.data)} micro-batches on each rank now: put forward, backward and "
                "optimizer.step() into `with accelerator.accumulate(model):`"
            )
        weighed = loss * part.scale(self.session.world_size)
        part.batch.took(weighed / self.session.world_size)
        # The accelerator divides by the number of micro-batches, which the weight has done.
        self._backward(weighed * self._accelerator.gradient_accumulation_steps, **settings)

    def __enter__(self) -> Self:
        self._guard = self.session.running()
        self._guard.__enter__()
        self._accelerator.backward = self.backward
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._accelerator.backward = self._backward
        cast("Any", self._batches).close()
        self._guard.__exit__(kind, error, frames)
        self._put_base_back()


def elastic(
    accelerator: Accelerator,
    loader: DataLoader[Any],
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
    *,
    folder: str | None = None,
    epochs: int = 1,
    max_steps: int | None = None,
    global_batch_size: int | None = None,
    order: EpochOrder | None = None,
    seed: int = 0,
    checkpoint: Checkpoint | Mapping[str, Any] | None = None,
    rewind_on: RewindOn = "NotFinite",
    **others: Stateful | MutableMapping[str, Any],
) -> Run:
    """Restore an elastic run, or begin it. Collective.

    Args:
        loader: as made or prepared; its data set, collate function, batch size, `drop_last` and workers count, and its
            sampler does not.
        model: as prepared; several by name.
        optimizer: likewise.
        folder: the run directory where there is no job.
        epochs: passes over the data.
        max_steps: maximum number of optimizer steps. Default: no limit.
        global_batch_size: samples of one optimizer step over all ranks. Default: the loader's batch size times the
            accelerator's accumulation steps, for as many processes as the job asks for; without a job, as there are
            when the run begins.
        order: a function of seed and epoch (tandem_trainer.data.sampling); default: shuffled anew for each epoch.
        others: a schedule and whatever else has a state, as those of `Session.keep`.

    Raises:
        ConfigurationError: it is to train in a way that a session cannot keep.
    """
    _refuse_others(accelerator, optimizer, others)
    if not (each := _batch_size(accelerator, loader)):
        raise ConfigurationError("elastic(accelerator, loader): the loader needs a batch_size")
    session = Session(folder, seed=seed, checkpoint=checkpoint, rewind_on=rewind_on, device=accelerator.device)
    accumulated = accelerator.gradient_accumulation_steps
    if global_batch_size is None and accelerator.split_batches:
        # The loader's batches are those of all ranks.
        global_batch_size = each * accelerator.num_processes * accumulated
    size = global_batch_size or session.global_batch_size(each * accumulated)
    # Without accumulation the script may step after each batch.
    parts = number_of(size, session.world_size, each) if accumulated > 1 else 1
    accelerator.gradient_accumulation_steps = parts

    for one in model.values() if isinstance(model, Mapping) else (model,):
        session.follow(accelerator.unwrap_model(one))
    put_base_back = leave_base_out(nn.ModuleDict() if isinstance(model, Mapping) else accelerator.unwrap_model(model))
    kept = dict(others)
    for name, other in others.items():
        if isinstance(other, AcceleratedScheduler) and other.step_with_optimizer:
            _step_as_often(other, 1 if accelerator.split_batches else max(1, round(size / (each * accumulated))))
        if isinstance(other, AcceleratedScheduler):
            kept[name] = other.scheduler
    if accelerator.scaler is not None:
        kept["scaler"] = accelerator.scaler
    optimizers = (
        {name: _plain(one) for name, one in optimizer.items()} if isinstance(optimizer, Mapping) else _plain(optimizer)
    )
    session.keep(model, optimizers, **cast("Any", kept))
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDatasetShard):
        # What divides a stream by rank; the session does so itself.
        dataset = dataset.dataset
    batches = session.batches(
        dataset,
        size,
        order=order,
        epochs=epochs,
        max_steps=max_steps,
        # A prepared loader has it in its sampler.
        drop_last=bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last)),
        loader_workers=loader.num_workers,
        collate=CollateParts(cast("Any", loader.collate_fn), parts),
    )
    return Run(accelerator, session, batches, put_base_back)


def _refuse_others(
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
    others: Mapping[str, object],
) -> None:
    """
    Raises:
        ConfigurationError: the accelerator does what a session cannot keep, or has what the script does not give.
    """
    parameters = inspect.signature(Accelerator.__init__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    state = accelerator.state
    given = {
        "deepspeed_plugin": getattr(state, "deepspeed_plugins", None) and True,
        "fsdp_plugin": getattr(state, "fsdp_plugin", None) and True,
        "torch_tp_plugin": getattr(state, "torch_tp_plugin", None) and True,
        "megatron_lm_plugin": getattr(state, "megatron_lm_plugin", None) and True,
        "parallelism_config": getattr(accelerator, "parallelism_config", None) and True,
    }
    # What the table does not know has, if anything, an attribute of its name.
    new = parameters.keys() - options.ACCELERATOR.options.keys() - {"self"}
    given |= {name: getattr(accelerator, name, defaults[name]) for name in new}
    options.check(options.ACCELERATOR, given, defaults, "elastic(accelerator)")
    dispatches = {"dispatch_batches": getattr(accelerator, "dispatch_batches", None)}
    options.check(options.DATA_LOADER_CONFIGURATION, dispatches, {"dispatch_batches": None}, "elastic(accelerator)")
    if accelerator.distributed_type not in KEPT_WHOLE:
        raise ConfigurationError(
            f"elastic(accelerator): {accelerator.distributed_type} divides the model; {options.WHOLE}"
        )
    several = optimizer.values() if isinstance(optimizer, Mapping) else (optimizer,)
    kept = {id(inner) for one in (*several, *others.values()) for inner in (one, getattr(one, "scheduler", one))}
    kept |= {id(_plain(one)) for one in several}
    prepared = (*accelerator._schedulers, *(_plain(one) for one in accelerator._optimizers))
    for one in (*prepared, *accelerator._custom_objects):
        if not kept & {id(one), id(getattr(one, "scheduler", one))}:
            name = type(getattr(one, "scheduler", one)).__name__
            raise ConfigurationError(
                f"elastic(accelerator): a {name} was prepared or registered, and checkpoints would not have it. Give "
                "it by name: elastic(…, schedule=schedule)"
            )


def _plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _batch_size(accelerator: Accelerator, loader: DataLoader[Any]) -> int:
    """Samples of a batch of one rank, of a loader as made or as prepared; 0 if it has no such size."""
    return int(loader.batch_size or getattr(loader, "total_batch_size", 0) // accelerator.num_processes)


def _step_as_often(schedule: AcceleratedScheduler, times: int) -> None:
    """Make a prepared schedule step `times` times for each optimizer step, but not past the end that it has."""
    schedule.split_batches = True

    def steps(*given: Any, **settings: Any) -> None:
        if not schedule.gradient_state.sync_gradients or any(one.step_was_skipped for one in schedule.optimizers):
            return
        inner = schedule.scheduler
        for _ in range(times):
            # OneCycleLR raises beyond its total_steps, which the last, smaller step of each epoch may exceed.
            if inner.last_epoch < getattr(inner, "total_steps", inner.last_epoch + 1):
                inner.step(*given, **settings)

    schedule.step = steps
