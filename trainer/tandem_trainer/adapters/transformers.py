"""Hugging Face's Trainer, and those of TRL that train on a data set, as an elastic run.

    from tandem_trainer.adapters.transformers import elastic

    trainer = elastic(Trainer(model=model, args=args, train_dataset=dataset))
    trainer.train()

The Trainer keeps its loop. `elastic` supplies it with the samples of each step, in an order that does not depend on the
number of ranks; saves its state in Tandem's checkpoints and restores it; and saves and leaves the loop when Tandem
requires it, all when the Trainer asks for the batches of its next step.

**Where it resumes.** The session restores model, optimizer and TrainerState before the Trainer's own `train`, which is
then given a checkpoint folder that contains only `trainer_state.json`: so the Trainer's own code restores the epoch,
the step in it and the state of callbacks. The batches that it would skip do not exist: the session starts with the next
one. The schedule does not exist by then, because the Trainer creates it later; its state is loaded when training
starts, and so are the optimizer's learning rates, which its creation has changed.

**Weights of samples.** A loss that is a sum over tokens, divided by their number on all ranks (`num_items_in_batch`),
is right whatever the split; labels of a stand-in are ignored. Any other loss is assumed to be a mean over samples, and
is weighted by their number.

Only methods that are documented for overriding are overridden, and one more, which loads weights. Rejected: a callback
alone (it can neither supply batches nor set where an epoch begins), a subclass to inherit from (TRL has a dozen
trainers), a copy of the Trainer's loop.
"""

import inspect
import json
import logging
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from accelerate.data_loader import IterableDatasetShard
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from tandem.formatting import count_noun
from tandem.job.adapter_options import CONFIGS_OF_TRL, HF_TRAINER, OWN_LOOPS, REPLICATED_ONLY, TRAINING_ARGUMENTS, Table
from tandem.job.resource import CheckpointSpec
from tandem.job.tasks import RewindOn
from tandem.script import MAX_VALUES, is_name
from tandem_trainer.adapters import options
from tandem_trainer.adapters.hidden_weights import HiddenWeights
from tandem_trainer.adapters.micro_batches import CollatedMicroBatch, CollateParts, count_micro_batches, micro_batches
from tandem_trainer.adapters.peft import omit_base
from tandem_trainer.batch import Batch
from tandem_trainer.data.sampling import has_indices
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.session import Session

log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
IGNORED_LABEL = -100
"""Label that losses of transformers ignore."""
SESSION_VALUES = frozenset({"loss", "learning_rate", "grad_norm", "epoch"})
"""Names of values that the session logs itself."""


AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


def elastic(
    trainer: AnyTrainer,
    *,
    global_batch_size: int | None = None,
    checkpoint: CheckpointSpec | Mapping[str, Any] | None = None,
    rewind_on: RewindOn = "NotFinite",
) -> AnyTrainer:
    """Make a Trainer's `train` an elastic run; everything else stays as it is.

    Args:
        trainer: a trainer of any class that leaves the loop to Trainer, such as SFTTrainer. Changed in place.
        global_batch_size: number of samples in one step over all ranks. Default: what the arguments say for each
            process (`per_device_train_batch_size` times `gradient_accumulation_steps`), times the number of processes
            that the job asks for; without a job, times that at the start of the run.
        checkpoint: when to save and what to keep, if there is no job, by the names of `spec.checkpoint`. Default: every
            `save_steps` steps, if the arguments have the Trainer save in this way.
        rewind_on: as for a Session.

    Returns:
        The same trainer.

    Raises:
        ConfigurationError: the training uses something that a session does not support.
    """
    if isinstance(trainer, _Elastic):
        raise ConfigurationError("elastic(trainer) was called already on this trainer")
    _check_supported(trainer)
    cls = type(trainer)
    trainer.__class__ = type(f"Elastic{cls.__name__}", (_Elastic, cls), {"__module__": cls.__module__})
    elastic_trainer = cast("_Elastic", trainer)
    elastic_trainer._tandem = _Run(elastic_trainer, global_batch_size, checkpoint, rewind_on)
    trainer.add_callback(_RunCallback(elastic_trainer._tandem))
    return trainer


def _check_supported(trainer: Trainer) -> None:
    """Check that a session supports what the trainer does.

    Raises:
        ConfigurationError: the trainer does something that a session does not support.
    """
    args = trainer.args
    library = next(cls for cls in type(args).__mro__ if _is_of_library(cls))
    defined = {name: cls for cls in reversed(type(args).__mro__) for name in inspect.get_annotations(cls)}
    # A script's own class may have other defaults, and fields that the library does not define.
    defaults = {
        option.name: option.default_factory() if option.default_factory is not MISSING else option.default
        for option in fields(library)
        if _is_of_library(defined[option.name]) or option.name in TRAINING_ARGUMENTS.options
    }
    values = {name: getattr(args, name) for name in defaults}
    values["accelerator_config"] = "split_batches" if cast("Any", args.accelerator_config).split_batches else None
    if _is_inside(args.resume_from_checkpoint, args.output_dir):
        values["resume_from_checkpoint"] = None
    of_trl = next((CONFIGS_OF_TRL[name] for name in _names(args) if name in CONFIGS_OF_TRL), None)
    table = TRAINING_ARGUMENTS
    if of_trl is not None:
        table = Table(of_trl.call, {**table.options, **of_trl.options})
    options.refuse(OWN_LOOPS, _names(trainer), "elastic(trainer)")
    options.check(HF_TRAINER, {"model_init": trainer.model_init}, {"model_init": None}, "elastic(trainer)")
    options.check(table, values, defaults, "elastic(trainer)")
    # Environment variables enable these, too.
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ConfigurationError(f"elastic(trainer): FSDP and DeepSpeed divide the model; {REPLICATED_ONLY}")
    if args.n_gpu > 1:
        raise ConfigurationError(
            "elastic(trainer): several GPUs in one process (DataParallel); give each GPU a process"
        )


def _is_of_library(cls: type) -> bool:
    return cls.__module__.split(".")[0] in ("transformers", "trl")


def _names(instance: object) -> list[str]:
    return [cls.__name__ for cls in type(instance).__mro__]


def _is_inside(path: object, folder: str | None) -> bool:
    """Return whether a script resumes from nothing, the newest checkpoint, or a path in the folder of its own
    checkpoints."""
    return not isinstance(path, str | os.PathLike) or Path(path).absolute().is_relative_to(
        Path(folder or ".").absolute()
    )


class _TrainerState:
    """The TrainerState, saved as the text that the Trainer itself would write."""

    def __init__(self, trainer: Trainer, model: torch.nn.Module) -> None:
        self._trainer, self.text = trainer, ""
        self._hidden = HiddenWeights(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON.

        Raises:
            ConfigurationError: a callback holds weights, and has no state.
        """
        state = asdict(self._trainer.state)
        # The summary of a training that has ended. If code after it fails, `train` is called again and adds another.
        state["log_history"] = [entry for entry in state["log_history"] if "train_runtime" not in entry]
        for callback in (*self._trainer.callback_handler.callbacks, self._trainer.control):
            if isinstance(callback, ExportableState):
                states = state["stateful_callbacks"]
                name, now = type(callback).__name__, callback.state()
                if not isinstance(states.get(name), list):
                    states[name] = now
            else:
                self._hidden.refuse(callback, "train them as a part of the model")
        return {"json": json.dumps(state, sort_keys=True, default=float)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.text = str(state["json"])


class _Schedule:
    """The learning rate schedule, which the Trainer creates after everything else was restored."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._optimizer = cast("torch.optim.Optimizer", trainer.optimizer)
        self._waiting: Any = None
        self._groups: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        # There is no schedule before training starts.
        schedule = self._trainer.lr_scheduler
        return {} if schedule is None else dict(schedule.state_dict())

    def load_state_dict(self, state: Any) -> None:
        self._waiting = state

    def restored(self) -> None:
        """Remember the optimizer's restored learning rates."""
        self._groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]

    def restore(self) -> None:
        """Restore the schedule, and the learning rates that its creation has changed."""
        if self._waiting is None:
            return
        cast("Any", self._trainer.lr_scheduler).load_state_dict(self._waiting)
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(saved)
        self._waiting = None


class _Run:
    """The elastic run that `elastic` adds to a trainer."""

    def __init__(
        self,
        trainer: "_Elastic",
        global_batch_size: int | None,
        checkpoint: CheckpointSpec | Mapping[str, Any] | None,
        rewind_on: RewindOn,
    ) -> None:
        self._trainer, self._size, self._checkpoint, self._rewind_on = trainer, global_batch_size, checkpoint, rewind_on
        self.session: Session | None = None
        self.loader: DataLoader[Any] | None = None
        self.pending: deque[CollatedMicroBatch] = deque()
        self.now: CollatedMicroBatch | None = None
        self._batches: Iterator[Batch] = iter(())
        self._schedule: _Schedule | None = None
        self._names: set[str] = set()
        self.restore_base: Callable[[], None] = lambda: None

    def begin(self, own: DataLoader[Any]) -> str:
        """Find out where to start, and restore the state. Collective.

        Args:
            own: the loader that the Trainer would read.

        Returns:
            The TrainerState to continue from, as JSON; empty at the beginning of a run.
        """
        trainer, args = self._trainer, self._trainer.args
        if self.session is not None:
            raise ConfigurationError(
                "an elastic trainer trains once; create another one, with an output_dir of its own"
            )
        checkpoint = self._checkpoint
        if checkpoint is None and args.save_strategy == "steps" and args.save_steps >= 1:
            checkpoint = {"everySteps": int(args.save_steps)}
        seed = args.seed if args.data_seed is None else args.data_seed
        session = self.session = Session(
            args.output_dir, seed=seed, checkpoint=checkpoint, rewind_on=self._rewind_on, device=args.device
        )
        args.save_strategy = type(args.save_strategy)("no")
        args.restore_callback_states_from_checkpoint = True
        accumulated = args.gradient_accumulation_steps
        size = self._size or session.global_batch_size(args.per_device_train_batch_size * accumulated)
        parts = count_micro_batches(size, session.world_size, args.per_device_train_batch_size)
        args.gradient_accumulation_steps = parts

        model = cast("torch.nn.Module", trainer.model)
        session.share(model)
        session.follow(model)
        self.restore_base = omit_base(model)
        optimizer = trainer.create_optimizer()
        state, self._schedule = _TrainerState(trainer, model), _Schedule(trainer)
        scaler = {} if trainer.accelerator.scaler is None else {"scaler": trainer.accelerator.scaler}
        session.keep(model, optimizer, schedule=self._schedule, trainer=state, **scaler)

        dataset: Any = own.dataset
        if isinstance(dataset, IterableDatasetShard):
            # Unwrap what divides a stream by rank; the session does that itself.
            dataset = dataset.dataset
        steps = args.max_steps if args.max_steps > 0 else None
        if has_indices(dataset):
            per_epoch = len(dataset) // size if args.dataloader_drop_last else -(-len(dataset) // size)
            if not per_epoch:
                raise ConfigurationError(f"dataloader_drop_last: {len(dataset)} samples make no global batch of {size}")
            steps = steps or -int(-args.num_train_epochs * per_epoch // 1)
            self.loader = DataLoader(
                dataset, batch_sampler=_LengthOnlySampler(per_epoch * parts), collate_fn=own.collate_fn
            )
            epochs = -(-steps // per_epoch)
        else:
            if steps is None:
                raise ConfigurationError("a data set without a length needs max_steps")
            # An epoch has at least one step.
            self.loader, epochs = DataLoader(_EmptyStream()), steps
        self._batches = session.batches(
            dataset,
            size,
            epochs=epochs,
            max_steps=steps,
            drop_last=args.dataloader_drop_last,
            loader_workers=args.dataloader_num_workers,
            collate=CollateParts(cast("Any", own.collate_fn), parts),
        )
        self._schedule.restored()
        return state.text

    def ready(self) -> None:
        """Restore the schedule; training starts, and everything exists."""
        assert self._schedule is not None
        self._schedule.restore()

    def next_step(self) -> list[CollatedMicroBatch]:
        """Finish the current step, and return the micro-batches of the next one; empty if there is none."""
        batch = next(self._batches, None)
        self.pending = deque(() if batch is None else micro_batches(batch))
        return list(self.pending)

    def took(self, loss: Tensor) -> None:
        """Record that a micro-batch was used.

        Args:
            loss: its part of the mean over the global batch, times the number of ranks.
        """
        assert self.now is not None
        assert self.session is not None
        self.now.batch.took(loss / self.session.world_size)
        self.now = None

    def end(self) -> None:
        """Finish the last step, or stop the session if the Trainer has left its loop early."""
        assert self.session is not None
        if self._trainer.state.global_step == self.session.total_steps:
            next(self._batches, None)
        else:
            # A callback stopped it, after the same step on all ranks.
            self.session.stop(_stop_reason(self._trainer))
            cast("Any", self._batches).close()
            self.session.leave_loop()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the Trainer's values in the session."""
        logged = {}
        for name, value in values.items():
            plain = re.sub(r"\W", "_", name)
            if name in SESSION_VALUES or not isinstance(value, int | float) or not is_name(plain):
                continue
            if plain in self._names or len(self._names) < MAX_VALUES:
                self._names.add(plain)
                logged[plain] = float(value)
        if logged and self.session is not None:
            self.session.log_values(step, logged)


def _stop_reason(trainer: Trainer) -> str:
    """Return the reason why the Trainer leaves its loop before its last step."""
    for callback in trainer.callback_handler.callbacks:
        if (
            isinstance(callback, EarlyStoppingCallback)
            and callback.early_stopping_patience_counter >= callback.early_stopping_patience
        ):
            times = count_noun(callback.early_stopping_patience, "evaluation")
            return f"EarlyStoppingCallback: no better {trainer.args.metric_for_best_model} in {times}"
    return "a callback told the Trainer to stop"


class _LengthOnlySampler:
    """A sampler of batches that are never read: the Trainer counts an epoch by its length."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[int]]:
        return iter(())


class _EmptyStream(IterableDataset[Any]):
    """Placeholder for a stream, which the session reads."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _RunCallback(TrainerCallback):
    """Callback that tells the run when training starts and ends, and what is logged."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.ready()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.end()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._run.log(state.global_step, logs or {})


if TYPE_CHECKING:
    _TrainerBase = Trainer
else:
    _TrainerBase = object


class _Elastic(_TrainerBase):
    """Mixin before the trainer's own class."""

    _tandem: _Run

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from the newest checkpoint of the run directory.

        Raises:
            ConfigurationError: `resume_from_checkpoint` is a path outside of `output_dir`.
        """
        if not _is_inside(resume_from_checkpoint, self.args.output_dir):
            values = {"resume_from_checkpoint": resume_from_checkpoint}
            options.check(TRAINING_ARGUMENTS, values, {}, "elastic(trainer)")
        run = self._tandem
        text = run.begin(super().get_train_dataloader())
        assert run.session is not None
        with run.session.running(), tempfile.TemporaryDirectory(prefix="tandem-") as folder:
            (Path(folder) / STATE_FILE).write_text(text)
            output = super().train(folder if text else None, *args, **kwargs)
        run.restore_base()
        return output

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader by whose length the Trainer counts the steps of an epoch."""
        assert self._tandem.loader is not None
        return self._tandem.loader

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # The session has restored the weights.
        pass

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the micro-batches of the next step, whatever the position of the Trainer's own iterator."""
        parts = [self._prepared(part) for part in self._tandem.next_step()]
        if not parts:
            # A rewind has skipped steps, or a stream has ended.
            self.control.should_training_stop = True
        samples: tuple[list[Any], Any] = super().get_batch_samples(islice(parts, None), len(parts), device)
        return samples

    def _prepared(self, part: CollatedMicroBatch) -> Any:
        """Return the data of a micro-batch; labels of a stand-in are set to be ignored."""
        if part.samples:
            return part.data
        ignored = {
            name: torch.full_like(part.data[name], IGNORED_LABEL)
            for name in ("labels", "shift_labels")
            if isinstance(part.data.get(name), Tensor) and not part.data[name].is_floating_point()
        }
        return {**part.data, **ignored} if self._counts_items(part.data) else part.data

    def _counts_items(self, data: Any) -> bool:
        """Return whether the loss is divided by the number of tokens of all ranks."""
        return "labels" in data and (self.model_accepts_loss_kwargs or self.compute_loss_func is not None)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Train on a micro-batch of the step."""
        run = self._tandem
        part = run.now = run.pending.popleft()
        part.batch.draw(part.number)
        loss = super().training_step(model, inputs, num_items_in_batch)
        run.took(loss)
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss, weighted by the number of its samples."""
        part = self._tandem.now
        if part is None or num_items_in_batch is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        assert self._tandem.session is not None
        loss: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # The Trainer divides every loss that is not a sum over tokens by the number of micro-batches.
        factor = part.scale(self._tandem.session.world_size) * self.args.gradient_accumulation_steps
        return (loss[0] * factor, *loss[1:]) if return_outputs else loss * factor

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, with the detection of hangs paused."""
        session = self._tandem.session
        if session is None:
            return super().evaluate(*args, **kwargs)
        with session.pausing("evaluation"):
            return super().evaluate(*args, **kwargs)
