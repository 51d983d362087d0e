"""Your own loop with Hugging Face accelerate, as an elastic run.

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

The run yields the micro-batches of all remaining epochs. The global batch is what the loader's batch size and the
accelerator's accumulation make it on the ranks that the job asks for; on other numbers of ranks there are more
micro-batches, or fewer, or larger ones if nothing is accumulated.

`accelerator.backward` weights the loss, which has to be a mean over the samples of a micro-batch, by their number, so
that uneven shares do not matter. Rejected: a loss that the script weights itself (easily forgotten, and nothing would
show it).

A schedule that `prepare` has wrapped steps once for each rank, because accelerate's global batch grows with them. Here
it steps as often as on the number of ranks that the global batch is made for, whatever their number now.
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

from tandem.job.adapter_options import ACCELERATOR, DATA_LOADER_CONFIGURATION, REPLICATED_ONLY
from tandem.job.resource import CheckpointSpec
from tandem.job.tasks import RewindOn
from tandem_trainer.adapters import options
from tandem_trainer.adapters.micro_batches import CollatedMicroBatch, CollateParts, count_micro_batches, micro_batches
from tandem_trainer.adapters.peft import omit_base
from tandem_trainer.checkpoint.train_state import Stateful
from tandem_trainer.data.sampling import EpochOrder
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.session import Session

REPLICATING_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Distributed types in which each rank has the whole model."""


class AccelerateRun:
    """The remaining steps of a run; created by `elastic`."""

    def __init__(
        self,
        accelerator: Accelerator,
        session: Session,
        batches: Iterator[Any],
        restore_base: Callable[[], None],
    ) -> None:
        self.session = session
        """The session, with its attributes such as `pausing`, `step`, `rank`."""
        self.epoch = 0
        """Number of passes over the data before the current batch."""
        self._accelerator, self._batches = accelerator, batches
        self._restore_base = restore_base
        self._now: CollatedMicroBatch | None = None
        self._backward: Callable[..., None] = accelerator.backward

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of this rank, as the loader's collate function made them, on the device."""
        for batch in self._batches:
            self.epoch = batch.epoch
            for part in micro_batches(batch):
                batch.draw(part.number)
                self._now = part
                yield part.data
                if self._now is not None:
                    raise ConfigurationError("a batch was not used: call accelerator.backward(loss) on each")

    def backward(self, loss: Tensor, **settings: Any) -> None:
        """Run a backward pass; replaces `accelerator.backward`.

        Args:
            loss: scalar, the mean over the samples of the micro-batch.
        """
        part, self._now = self._now, None
        if part is None:
            raise ConfigurationError("call accelerator.backward(loss) once for each batch of the run, in its loop")
        if self._accelerator.sync_gradients != part.is_last:
            raise ConfigurationError(
                f"a step has {len(part.batch.data)} micro-batches on each rank now: put forward, backward and "
                "optimizer.step() into `with accelerator.accumulate(model):`"
            )
        weighted = loss * part.scale(self.session.world_size)
        part.batch.took(weighted / self.session.world_size)
        # The accelerator divides by the number of micro-batches, which the weight has already done.
        self._backward(weighted * self._accelerator.gradient_accumulation_steps, **settings)

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
        self._restore_base()


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
    checkpoint: CheckpointSpec | Mapping[str, Any] | None = None,
    rewind_on: RewindOn = "NotFinite",
    **objects: Stateful | MutableMapping[str, Any],
) -> AccelerateRun:
    """Restore an elastic run, or start it. Collective.

    Args:
        loader: loader as created or prepared. Its data set, collate function, batch size, `drop_last` and number of
            workers are used; its sampler is not.
        model: model as prepared; several by name.
        optimizer: optimizer as prepared; several by name.
        folder: run directory if there is no job.
        epochs: number of passes over the data.
        max_steps: maximum number of optimizer steps. Default: no limit.
        global_batch_size: number of samples in one optimizer step over all ranks. Default: the loader's batch size
            times the accelerator's accumulation steps, times the number of processes that the job asks for; without a
            job, times that at the start of the run.
        order: function of seed and epoch (tandem_trainer.data.sampling); default: shuffled anew for each epoch.
        objects: a schedule and other objects with a state, as those of `Session.keep`.

    Raises:
        ConfigurationError: the training uses something that a session does not support.
    """
    _check_supported(accelerator, optimizer, objects)
    if not (batch_size := _batch_size(accelerator, loader)):
        raise ConfigurationError("elastic(accelerator, loader): the loader needs a batch_size")
    session = Session(folder, seed=seed, checkpoint=checkpoint, rewind_on=rewind_on, device=accelerator.device)
    accumulated = accelerator.gradient_accumulation_steps
    if global_batch_size is None and accelerator.split_batches:
        # The loader's batch size is that of all ranks.
        global_batch_size = batch_size * accelerator.num_processes * accumulated
    size = global_batch_size or session.global_batch_size(batch_size * accumulated)
    # Without accumulation the script may step after each batch.
    parts = count_micro_batches(size, session.world_size, batch_size) if accumulated > 1 else 1
    accelerator.gradient_accumulation_steps = parts

    for wrapped in model.values() if isinstance(model, Mapping) else (model,):
        session.follow(accelerator.unwrap_model(wrapped))
    restore_base = omit_base(nn.ModuleDict() if isinstance(model, Mapping) else accelerator.unwrap_model(model))
    registered = dict(objects)
    for name, other in objects.items():
        if isinstance(other, AcceleratedScheduler) and other.step_with_optimizer:
            _step_as_often(other, 1 if accelerator.split_batches else max(1, round(size / (batch_size * accumulated))))
        if isinstance(other, AcceleratedScheduler):
            registered[name] = other.scheduler
    if accelerator.scaler is not None:
        registered["scaler"] = accelerator.scaler
    optimizers = (
        {name: _plain(wrapped) for name, wrapped in optimizer.items()}
        if isinstance(optimizer, Mapping)
        else _plain(optimizer)
    )
    session.keep(model, optimizers, **cast("Any", registered))
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDatasetShard):
        # Unwrap what divides a stream by rank; the session does that itself.
        dataset = dataset.dataset
    batches = session.batches(
        dataset,
        size,
        order=order,
        epochs=epochs,
        max_steps=max_steps,
        # The sampler of a prepared loader has the setting.
        drop_last=bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last)),
        loader_workers=loader.num_workers,
        collate=CollateParts(cast("Any", loader.collate_fn), parts),
    )
    return AccelerateRun(accelerator, session, batches, restore_base)


def _check_supported(
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
    objects: Mapping[str, object],
) -> None:
    """Check that a session supports what the accelerator does.

    Raises:
        ConfigurationError: it does something unsupported, or has objects that the script does not pass to `elastic`.
    """
    parameters = inspect.signature(Accelerator.__init__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    state = accelerator.state
    values = {
        "deepspeed_plugin": getattr(state, "deepspeed_plugins", None) and True,
        "fsdp_plugin": getattr(state, "fsdp_plugin", None) and True,
        "torch_tp_plugin": getattr(state, "torch_tp_plugin", None) and True,
        "megatron_lm_plugin": getattr(state, "megatron_lm_plugin", None) and True,
        "parallelism_config": getattr(accelerator, "parallelism_config", None) and True,
    }
    # The value of an unknown option, if it is accessible, is in the attribute of that name.
    new = parameters.keys() - ACCELERATOR.options.keys() - {"self"}
    values |= {name: getattr(accelerator, name, defaults[name]) for name in new}
    options.check(ACCELERATOR, values, defaults, "elastic(accelerator)")
    dispatches = {"dispatch_batches": getattr(accelerator, "dispatch_batches", None)}
    options.check(DATA_LOADER_CONFIGURATION, dispatches, {"dispatch_batches": None}, "elastic(accelerator)")
    if accelerator.distributed_type not in REPLICATING_TYPES:
        raise ConfigurationError(
            f"elastic(accelerator): {accelerator.distributed_type} divides the model; {REPLICATED_ONLY}"
        )
    several = optimizer.values() if isinstance(optimizer, Mapping) else (optimizer,)
    registered = {
        id(inner) for item in (*several, *objects.values()) for inner in (item, getattr(item, "scheduler", item))
    }
    registered |= {id(_plain(wrapped)) for wrapped in several}
    prepared = (*accelerator._schedulers, *(_plain(wrapped) for wrapped in accelerator._optimizers))
    for item in (*prepared, *accelerator._custom_objects):
        if not registered & {id(item), id(getattr(item, "scheduler", item))}:
            name = type(getattr(item, "scheduler", item)).__name__
            raise ConfigurationError(
                f"elastic(accelerator): a {name} was prepared or registered, but checkpoints would not include it. "
                "Pass it by name: elastic(…, schedule=schedule)"
            )


def _plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _batch_size(accelerator: Accelerator, loader: DataLoader[Any]) -> int:
    """Return the batch size of one rank, from a loader as created or as prepared; 0 if it has none."""
    return int(loader.batch_size or getattr(loader, "total_batch_size", 0) // accelerator.num_processes)


def _step_as_often(schedule: AcceleratedScheduler, times: int) -> None:
    """Make a prepared schedule step `times` times for each optimizer step, but not past its end."""
    schedule.split_batches = True

    def steps(*args: Any, **settings: Any) -> None:
        if not schedule.gradient_state.sync_gradients or any(
            optimizer.step_was_skipped for optimizer in schedule.optimizers
        ):
            return
        inner = schedule.scheduler
        for _ in range(times):
            # OneCycleLR raises beyond its total_steps, which the last, smaller step of each epoch may exceed.
            if inner.last_epoch < getattr(inner, "total_steps", inner.last_epoch + 1):
                inner.step(*args, **settings)

    schedule.step = steps
