"""Lightning's Trainer as an elastic run: a callback, and a loader that replaces the script's.

    from tandem_trainer.adapters.lightning import Elastic

    elastic = Elastic(loader)
    trainer = lightning.Trainer(max_epochs=3, callbacks=[elastic])
    trainer.fit(module, elastic.loader)

The Trainer keeps its loop, and the module stays as it is. The session starts in `on_fit_start`, when model, optimizers
and schedules exist. Lightning's counters (epochs, batches, steps) follow from the number of steps, and are set as after
a checkpoint of its own. Everything that Tandem does between two steps happens when Lightning asks for a batch.

`on_before_backward` weights the loss, which has to be a mean over the samples of a micro-batch, by their number.

Rejected: a checkpoint in Lightning's format that `fit(ckpt_path=…)` would load (its counts of batches belong to one
number of ranks), a Strategy of Tandem's own (the script chooses one already).

tandem.job.adapter_options lists which options of the Trainer are exact, and which are refused.
"""

import inspect
import logging
import signal
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader

from tandem.formatting import count_noun
from tandem.job.adapter_options import LIGHTNING_CALLBACKS, LIGHTNING_FIT, LIGHTNING_TRAINER
from tandem.job.resource import CheckpointSpec
from tandem.job.tasks import RewindOn
from tandem_trainer.adapters import options
from tandem_trainer.adapters.hidden_weights import HiddenWeights
from tandem_trainer.adapters.micro_batches import CollatedMicroBatch, CollateParts, count_micro_batches, micro_batches
from tandem_trainer.batch import Batch
from tandem_trainer.data.sampling import has_indices
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.session import Session

log = logging.getLogger(__name__)

REPLICATING_STRATEGIES = "SingleDeviceStrategy", "DDPStrategy"
"""Strategies in which each rank has the whole model."""
WEIGHT_AVERAGING: Any = getattr(callbacks, "WeightAveraging", ())
"""Callbacks that hold averaged weights; the first versions that the adapter supports have none."""


class _CallbackStates:
    """The states of the Trainer's other callbacks, by their `state_key`."""

    def __init__(self, trainer: Any, own: Callback, module: LightningModule) -> None:
        self._callbacks = [callback for callback in trainer.callbacks if callback is not own]
        self._hidden = HiddenWeights(module)

    def state_dict(self) -> dict[str, Any]:
        """Collect the states.

        Raises:
            ConfigurationError: a callback holds weights, and has no state.
        """
        states = {}
        for callback in self._callbacks:
            if state := callback.state_dict():
                states[callback.state_key] = state
            else:
                self._hidden.refuse(callback, "give it state_dict and load_state_dict, or use WeightAveraging")
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for callback in self._callbacks:
            if callback.state_key in states:
                callback.load_state_dict(states[callback.state_key])


class _Loader:
    """Loader for Lightning: in each epoch it yields the remaining micro-batches of this rank."""

    def __init__(self, run: "Elastic") -> None:
        self._run = run

    def __len__(self) -> int:
        return self._run.micro_batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        return self._run.remaining_epoch()


class Elastic(Callback):
    """Makes `fit` an elastic run.

    Args:
        loader: the script's own loader; its data set, collate function, batch size, `drop_last` and number of workers
            are used.
        folder: run directory if there is no job. Default: the Trainer's `default_root_dir`.
        global_batch_size: number of samples in one optimizer step over all ranks. Default: the loader's batch size
            times `accumulate_grad_batches`, times the number of processes that the job asks for; without a job, times
            that at the start of the run.
        seed: seed of the order of samples.
        checkpoint: when to save and what to keep, if there is no job, by the names of `spec.checkpoint`.
        rewind_on: as for a Session.

    Raises:
        ConfigurationError: the loader has no batch size, or its data set no length.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        folder: str | None = None,
        global_batch_size: int | None = None,
        seed: int = 0,
        checkpoint: CheckpointSpec | Mapping[str, Any] | None = None,
        rewind_on: RewindOn = "NotFinite",
    ) -> None:
        if loader.batch_size is None or not has_indices(loader.dataset):
            raise ConfigurationError("Elastic(loader): the loader needs a batch_size, and its data set a length")
        self.loader = _Loader(self)
        """Loader to pass to `fit` instead of the script's."""
        self.micro_batches_per_epoch = 0
        """Number of micro-batches of this rank in an epoch."""
        self._source, self._folder, self._given_size = loader, folder, global_batch_size
        self._seed, self._checkpoint, self._rewind_on = seed, checkpoint, rewind_on
        self._session: Session | None = None
        self._guard: AbstractContextManager[None] | None = None
        self._size = self._parts = self._per_epoch = self._per_pass = 0
        self._batches: Iterator[Batch] = iter(())
        self._now: CollatedMicroBatch | None = None
        self._on_term: Any = None
        self._has_ended = False

    @property
    def session(self) -> Session:
        """The session, while `fit` runs."""
        if self._session is None:
            raise RuntimeError("the session begins with trainer.fit(...)")
        return self._session

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the session. The ranks have connected; Lightning has not counted anything yet."""
        if stage != "fit":
            return
        if self._session is not None:
            raise ConfigurationError("Elastic supports a single fit; create another one, with a folder of its own")
        _check_supported(trainer, pl_module)
        _disable_lightning_resume(trainer)
        # First of all callbacks: it restores their states, and finishes the last step before an average replaces the
        # weights.
        other_callbacks = [callback for callback in cast("Any", trainer).callbacks if callback is not self]
        cast("Any", trainer).callbacks = [self, *other_callbacks]
        self._session = session = Session(
            self._folder or trainer.default_root_dir,
            seed=self._seed,
            checkpoint=self._checkpoint,
            rewind_on=self._rewind_on,
            device=trainer.strategy.root_device,
        )
        self._on_term = signal.getsignal(signal.SIGTERM)
        self._guard = session.running()
        self._guard.__enter__()
        batch_size, accumulated = cast("int", self._source.batch_size), int(trainer.accumulate_grad_batches)
        self._size = self._given_size or session.global_batch_size(batch_size * accumulated)
        self._parts = count_micro_batches(self._size, session.world_size, batch_size)
        trainer.accumulate_grad_batches = self._parts
        samples = len(cast("Any", self._source.dataset))
        data = (samples, self._size, self._source.drop_last)
        self._per_pass = batches_of(*data)
        self._per_epoch = steps_per_epoch(*data, trainer.limit_train_batches, accumulated)
        if not self._per_epoch:
            raise ConfigurationError("Elastic: an epoch has no step, by drop_last or limit_train_batches")
        # Lightning counts by the length of the loader, which includes the limit.
        trainer.limit_train_batches = 1.0
        self.micro_batches_per_epoch = self._per_epoch * self._parts
        if isinstance(trainer.val_check_interval, int):
            # Whole steps, whatever the current number of micro-batches.
            trainer.val_check_interval = -(-trainer.val_check_interval // accumulated) * self._parts

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the run; model, optimizers and schedules exist now."""
        session = self.session
        # After the start, calls after `fit` may load Lightning's checkpoints again.
        vars(trainer._checkpoint_connector).pop("resume_start", None)
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"configure_optimizers returned {len(trainer.optimizers)} optimizers; Elastic supports one"
            )
        objects: dict[str, Any] = {
            f"schedule{n}": config.scheduler for n, config in enumerate(trainer.lr_scheduler_configs)
        }
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            objects["scaler"] = scaler
        objects["callbacks"] = _CallbackStates(trainer, self, pl_module)
        averaging = [callback for callback in cast("Any", trainer).callbacks if isinstance(callback, WEIGHT_AVERAGING)]
        objects |= {f"average{n}": callback._average_model for n, callback in enumerate(averaging) if n}
        average = averaging[0]._average_model if averaging else None
        session.follow(pl_module)
        session.keep(pl_module, cast("Any", trainer.optimizers[0]), average, **objects)
        steps = trainer.max_steps if trainer.max_steps >= 0 else None
        if steps is None and (trainer.max_epochs is None or trainer.max_epochs < 0):
            raise ConfigurationError("set max_epochs or max_steps of the Trainer; an elastic run needs an end")
        epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else None
        if self._per_epoch < self._per_pass:
            # With limit_train_batches an epoch continues in the pass over the data where the last one has ended.
            ends = [steps, None if epochs is None else epochs * self._per_epoch]
            steps = min(end for end in ends if end is not None)
            epochs = -(-steps // self._per_pass)
        self._batches = session.batches(
            self._source.dataset,
            self._size,
            epochs=-(-cast("int", steps) // self._per_pass) if epochs is None else epochs,
            max_steps=steps,
            drop_last=self._source.drop_last,
            loader_workers=self._source.num_workers,
            collate=CollateParts(cast("Any", self._source.collate_fn), self._parts),
        )
        self._has_ended = session.has_left_loop()
        if session.step:
            self._count_from(trainer, session.step)
            _run_ended_loop(trainer)

    def _count_from(self, trainer: Trainer, step: int) -> None:
        """Set Lightning's counters to the values after `step` optimizer steps."""
        epoch, steps = divmod(step, self._per_epoch)
        if self._has_ended and steps:
            # Lightning has ended the epoch in which it was told to stop.
            epoch, steps = epoch + 1, 0
        loop = trainer.fit_loop
        inside = loop.epoch_loop
        started = epoch + (steps > 0)
        epochs = {"ready": started, "started": started, "processed": epoch, "completed": epoch}
        loop.epoch_progress.load_state_dict({"total": epochs, "current": epochs})
        total, current = (dict.fromkeys(epochs, count * self._parts) for count in (step, steps))
        inside.batch_progress.load_state_dict({"total": total, "current": current, "is_last_batch": False})
        optimizer_steps = inside.automatic_optimization.optim_progress.optimizer.step
        optimizer_steps.total.ready = optimizer_steps.total.completed = step
        optimizer_steps.current.ready = optimizer_steps.current.completed = steps
        inside._batches_that_stepped = step
        # Within an epoch the counters continue, else they start anew.
        loop.restarting = steps > 0

    def remaining_epoch(self) -> Iterator[Any]:
        """Yield the remaining micro-batches of the current epoch. Nothing is read before it is requested."""
        for batch in self._batches:
            for part in micro_batches(batch):
                self._now = part
                batch.draw(part.number)
                yield part.data
            if (batch.step + 1) % self._per_epoch == 0:
                return

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the handler of SIGTERM, and end the loop at once if an earlier generation has ended it early."""
        trainer.should_stop = trainer.should_stop or self._has_ended
        # Lightning has set its own handler, which would end training without a checkpoint.
        signal.signal(signal.SIGTERM, self._on_term)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Weight the loss by the number of its samples."""
        part, self._now = self._now, None
        if part is None:
            raise ConfigurationError("Elastic: one backward pass for each batch; fit(module, elastic.loader)")
        # Lightning divides by the number of micro-batches.
        loss.mul_(part.scale(self.session.world_size) * self._parts)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scaled = 1.0 if scaler is None else scaler.get_scale()
        part.batch.took(loss.detach() / (self.session.world_size * scaled))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pause the detection of hangs."""
        if self._session is not None and trainer.state.fn == "fit":
            self._pause = self._session.pausing("validation")
            self._pause.__enter__()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resume the detection of hangs."""
        if (pause := self.__dict__.pop("_pause", None)) is not None:
            pause.__exit__(None, None, None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish the last step, or stop the session if Lightning has left its loop early."""
        if trainer.global_step == self.session.total_steps:
            next(self._batches, None)
        else:
            self.session.stop(_stop_reason(trainer))
            cast("Any", self._batches).close()
            # Before an average replaces the weights.
            self.session.leave_loop()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the session's context; code after the loop follows."""
        if self._guard is not None:
            guard, self._guard = self._guard, None
            guard.__exit__(None, None, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the session's context with an error, which decides how the process ends."""
        if self._guard is not None:
            guard, self._guard = self._guard, None
            guard.__exit__(type(exception), exception, exception.__traceback__)


def _run_ended_loop(trainer: Trainer) -> None:
    """Make the Trainer call `on_train_start` and `on_train_end` of a run whose steps are all taken, too: callbacks
    exchange weights there, which the code after the loop uses. Lightning leaves a loop with nothing to do before."""
    loop = trainer.fit_loop
    # A subclass, because `skip` is a property. It is read before the loop begins.
    loop.__class__ = type("ResumedLoop", (type(loop),), {"skip": False})


def _stop_reason(trainer: Trainer) -> str:
    """Return the reason why the Trainer leaves its loop before its last step."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping) and callback.wait_count >= callback.patience:
            return f"EarlyStopping: no better {callback.monitor} in {count_noun(callback.patience, 'check')}"
    return "trainer.should_stop was set"


def batches_of(samples: int, size: int, drop_last: bool) -> int:
    """Compute the number of batches in a pass over the data."""
    return samples // size if drop_last else -(-samples // size)


def steps_per_epoch(samples: int, size: int, drop_last: bool, limit: float, accumulated: int) -> int:
    """Compute the number of optimizer steps in an epoch under `limit_train_batches`.

    Args:
        size: samples of a step.
        limit: number of batches of one process if it is an int, else a fraction of them.
        accumulated: batches of one process in a step, with the number of processes that the job asks for.
    """
    # Each of the job's processes takes `accumulated` batches in a step, which determines the length of its loader;
    # the limit is a fraction of this length.
    length = batches_of(samples * accumulated, size, drop_last)
    batches = limit if isinstance(limit, int) else int(length * limit)
    return min(batches_of(samples, size, drop_last), -(-batches // accumulated))


def _disable_lightning_resume(trainer: Any) -> None:
    """Make `fit` ignore checkpoints of Lightning's, which would set its own count of steps. `ckpt_path="last"` in a
    script finds what a ModelCheckpoint wrote in an earlier start, which is older than the run directory; any other path
    is refused."""

    def resume_start(path: Any = None, weights_only: bool | None = None) -> None:
        if not path:
            return
        folders = {
            Path(callback.dirpath).absolute()
            for callback in trainer.checkpoint_callbacks
            if getattr(callback, "dirpath", None)
        }
        if Path(path).absolute().parent not in folders:
            options.check(LIGHTNING_FIT, {"ckpt_path": str(path)}, {"ckpt_path": None}, "Elastic")
        log.warning("Elastic: ckpt_path=%s is not read; training resumes from the run directory", path)

    trainer._checkpoint_connector.resume_start = resume_start


def _check_supported(trainer: Any, module: LightningModule) -> None:
    """Check that a session supports what the Trainer does.

    Raises:
        ConfigurationError: the Trainer does something that a session does not support.
    """
    strategy = type(trainer.strategy).__name__
    values = {
        "fast_dev_run": trainer.fast_dev_run,
        "overfit_batches": trainer.overfit_batches,
        "strategy": "auto" if strategy in REPLICATING_STRATEGIES else strategy,
        "val_check_interval": getattr(trainer, "_val_check_time_interval", None) and "a time",
    }
    parameters = inspect.signature(Trainer.__init__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    # The value of an unknown option, if it is accessible, is in the attribute of that name.
    new = parameters.keys() - LIGHTNING_TRAINER.options.keys() - {"self"}
    values |= {name: getattr(trainer, name, defaults[name]) for name in new}
    options.check(LIGHTNING_TRAINER, values, defaults, "Elastic")
    for callback in trainer.callbacks:
        options.refuse(LIGHTNING_CALLBACKS, (cls.__name__ for cls in type(callback).__mro__), "Elastic")
    if not module.automatic_optimization:
        raise ConfigurationError("Elastic needs automatic optimization")
    if type(module).on_save_checkpoint is not LightningModule.on_save_checkpoint:
        log.warning(
            "Elastic does not call on_save_checkpoint of %s: what it saves there is lost in a restart. Save it in a "
            "buffer, or in get_extra_state",
            type(module).__name__,
        )
