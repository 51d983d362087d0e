"""Lightning's Trainer as an elastic run: a callback, and the loader that it makes of the script's.

    from tandem_trainer.adapters.lightning import Elastic

    elastic = Elastic(loader)
    trainer = lightning.Trainer(max_epochs=3, callbacks=[elastic])
    trainer.fit(module, elastic.loader)

The Trainer keeps its loop, and the module stays as it is. The session begins in `on_fit_start`, when model, optimizers
and schedules are there. What Lightning counts (epochs, batches, steps) follows from the number of steps, and is set as
after a checkpoint of its own. Everything that Tandem does between two steps happens when Lightning asks for a batch.

`on_before_backward` weighs the loss, which has to be a mean over the samples of a micro-batch, by their number.

Rejected: a checkpoint in Lightning's format that `fit(ckpt_path=…)` would load (its counts of batches belong to one
number of ranks), a Strategy of Tandem's own (the script chooses one already).

Which options of the Trainer are exact, and which are refused: tandem_trainer.adapters.options.
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

from tandem.formatting import several
from tandem.job import Checkpoint
from tandem.tasks import RewindOn
from tandem_trainer.adapters import options
from tandem_trainer.adapters.hidden_weights import HiddenWeights
from tandem_trainer.adapters.micro_batches import CollateParts, MicroBatch, micro_batches, number_of
from tandem_trainer.batch import Batch
from tandem_trainer.data.sampling import has_indices
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.session import Session

log = logging.getLogger(__name__)

WHOLE = "SingleDeviceStrategy", "DDPStrategy"
"""Strategies with which each rank has the whole model."""
WEIGHT_AVERAGING: Any = getattr(callbacks, "WeightAveraging", ())
"""Callbacks that hold averaged weights; none in the first versions that the adapter takes."""


class _CallbackStates:
    """The state of the Trainer's other callbacks, by their `state_key`."""

    def __init__(self, trainer: Any, own: Callback, module: LightningModule) -> None:
        self._callbacks = [one for one in trainer.callbacks if one is not own]
        self._hidden = HiddenWeights(module)

    def state_dict(self) -> dict[str, Any]:
        """
        Raises:
            ConfigurationError: a callback holds weights, and has no state.
        """
        found = {}
        for one in self._callbacks:
            if state := one.state_dict():
                found[one.state_key] = state
            else:
                self._hidden.refuse(one, "give it state_dict and load_state_dict, or use WeightAveraging")
        return found

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for one in self._callbacks:
            if one.state_key in states:
                one.load_state_dict(states[one.state_key])


class _Loader:
    """What Lightning iterates over: in each epoch the micro-batches that are left of it."""

    def __init__(self, run: "Elastic") -> None:
        self._run = run

    def __len__(self) -> int:
        return self._run.micro_batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        return self._run.rest_of_epoch()


class Elastic(Callback):
    """Makes `fit` an elastic run.

    Args:
        loader: the script's own; its data set, collate function, batch size, `drop_last` and number of workers count.
        folder: the run directory where there is no job. Default: the Trainer's `default_root_dir`.
        global_batch_size: samples of one optimizer step over all ranks. Default: the loader's batch size times
            `accumulate_grad_batches`, for as many processes as the job asks for; without a job, as there are when the
            run begins.
        seed: of the order of samples.
        checkpoint: when to save and what to keep, where there is no job, by the names of `spec.checkpoint`.
        rewind_on: as that of a Session.

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
        checkpoint: Checkpoint | Mapping[str, Any] | None = None,
        rewind_on: RewindOn = "NotFinite",
    ) -> None:
        if loader.batch_size is None or not has_indices(loader.dataset):
            raise ConfigurationError("Elastic(loader): the loader needs a batch_size, and its data set a length")
        self.loader = _Loader(self)
        """What `fit` gets in the place of the script's loader."""
        self.micro_batches_per_epoch = 0
        """Of this rank."""
        self._source, self._folder, self._given_size = loader, folder, global_batch_size
        self._seed, self._checkpoint, self._rewind_on = seed, checkpoint, rewind_on
        self._session: Session | None = None
        self._guard: AbstractContextManager[None] | None = None
        self._size = self._parts = self._per_epoch = self._per_pass = 0
        self._batches: Iterator[Batch] = iter(())
        self._now: MicroBatch | None = None
        self._on_term: Any = None

    @property
    def session(self) -> Session:
        """Everything that a session can do, while `fit` runs."""
        if self._session is None:
            raise RuntimeError("the session begins with trainer.fit(...)")
        return self._session

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The ranks have found each other; nothing has been counted yet."""
        if stage != "fit":
            return
        if self._session is not None:
            raise ConfigurationError("Elastic belongs to one fit; make another one, in a folder of its own")
        _refuse_others(trainer, pl_module)
        _leave_checkpoints(trainer)
        # Before the others: it puts their state back, and takes the last step before an average replaces the weights.
        others = [one for one in cast("Any", trainer).callbacks if one is not self]
        cast("Any", trainer).callbacks = [self, *others]
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
        each, accumulated = cast("int", self._source.batch_size), int(trainer.accumulate_grad_batches)
        self._size = self._given_size or session.global_batch_size(each * accumulated)
        self._parts = number_of(self._size, session.world_size, each)
        trainer.accumulate_grad_batches = self._parts
        samples = len(cast("Any", self._source.dataset))
        data = (samples, self._size, self._source.drop_last)
        self._per_pass = batches_of(*data)
        self._per_epoch = steps_per_epoch(*data, trainer.limit_train_batches, accumulated)
        if not self._per_epoch:
            raise ConfigurationError("Elastic: an epoch has no step, by drop_last or limit_train_batches")
        # Lightning counts by the length of the loader, which has the limit in it.
        trainer.limit_train_batches = 1.0
        self.micro_batches_per_epoch = self._per_epoch * self._parts
        if isinstance(trainer.val_check_interval, int):
            # Whole steps, whatever the number of micro-batches now.
            trainer.val_check_interval = -(-trainer.val_check_interval // accumulated) * self._parts

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything has been made: restore it."""
        session = self.session
        # What follows `fit` may load checkpoints of Lightning's again.
        vars(trainer._checkpoint_connector).pop("resume_start", None)
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"configure_optimizers gave {len(trainer.optimizers)} optimizers; Elastic keeps one"
            )
        others: dict[str, Any] = {f"schedule{n}": one.scheduler for n, one in enumerate(trainer.lr_scheduler_configs)}
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            others["scaler"] = scaler
        others["callbacks"] = _CallbackStates(trainer, self, pl_module)
        averaging = [one for one in cast("Any", trainer).callbacks if isinstance(one, WEIGHT_AVERAGING)]
        others |= {f"average{n}": one._average_model for n, one in enumerate(averaging) if n}
        average = averaging[0]._average_model if averaging else None
        session.follow(pl_module)
        session.keep(pl_module, cast("Any", trainer.optimizers[0]), average, **others)
        steps = trainer.max_steps if trainer.max_steps >= 0 else None
        if steps is None and (trainer.max_epochs is None or trainer.max_epochs < 0):
            raise ConfigurationError("give the Trainer max_epochs or max_steps; an elastic run has an end")
        epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else None
        if self._per_epoch < self._per_pass:
            # A short epoch goes on in the pass over the data where the one before has ended.
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
        if session.step:
            self._count_from(trainer, session.step)

    def _count_from(self, trainer: Trainer, step: int) -> None:
        """Set Lightning's counters to those after `step` optimizer steps."""
        epoch, steps = divmod(step, self._per_epoch)
        loop = trainer.fit_loop
        inside = loop.epoch_loop
        begun = epoch + (steps > 0)
        epochs = {"ready": begun, "started": begun, "processed": epoch, "completed": epoch}
        loop.epoch_progress.load_state_dict({"total": epochs, "current": epochs})
        total, current = (dict.fromkeys(epochs, count * self._parts) for count in (step, steps))
        inside.batch_progress.load_state_dict({"total": total, "current": current, "is_last_batch": False})
        taken = inside.automatic_optimization.optim_progress.optimizer.step
        taken.total.ready = taken.total.completed = step
        taken.current.ready = taken.current.completed = steps
        inside._batches_that_stepped = step
        # In the middle of an epoch counts go on, else they begin anew.
        loop.restarting = steps > 0

    def rest_of_epoch(self) -> Iterator[Any]:
        """The micro-batches that are left of the epoch in which the run stands. Nothing is read before it is asked."""
        for batch in self._batches:
            for part in micro_batches(batch):
                self._now = part
                batch.draw(part.number)
                yield part.data
            if (batch.step + 1) % self._per_epoch == 0:
                return

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training begins."""
        # Lightning has set its own handler, which would end training without a checkpoint.
        signal.signal(signal.SIGTERM, self._on_term)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """The loss weighs as much as its samples."""
        part, self._now = self._now, None
        if part is None:
            raise ConfigurationError("Elastic: one backward pass for each batch; fit(module, elastic.loader)")
        # Lightning divides by the number of micro-batches.
        loss.mul_(part.scale(self.session.world_size) * self._parts)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scaled = 1.0 if scaler is None else scaler.get_scale()
        part.batch.took(loss.detach() / (self.session.world_size * scaled))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No hang is declared meanwhile."""
        if self._session is not None and trainer.state.fn == "fit":
            self._pause = self._session.pausing("validation")
            self._pause.__enter__()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training goes on."""
        if (pause := self.__dict__.pop("_pause", None)) is not None:
            pause.__exit__(None, None, None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning has left its loop."""
        if trainer.global_step == self.session.total_steps:
            next(self._batches, None)
        else:
            self.session.stop(_why_stopped(trainer))
            cast("Any", self._batches).close()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What follows is code after the loop."""
        if self._guard is not None:
            guard, self._guard = self._guard, None
            guard.__exit__(None, None, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The process ends as the session says."""
        if self._guard is not None:
            guard, self._guard = self._guard, None
            guard.__exit__(type(exception), exception, exception.__traceback__)


def _why_stopped(trainer: Trainer) -> str:
    """Why the Trainer leaves its loop before its last step."""
    for one in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(one, EarlyStopping) and one.wait_count >= one.patience:
            return f"EarlyStopping: no better {one.monitor} in {several(one.patience, 'check')}"
    return "trainer.should_stop was set"


def batches_of(samples: int, size: int, drop_last: bool) -> int:
    """The batches of a size in a pass over the data."""
    return samples // size if drop_last else -(-samples // size)


def steps_per_epoch(samples: int, size: int, drop_last: bool, limit: float, accumulated: int) -> int:
    """Optimizer steps of an epoch under `limit_train_batches`.

    Args:
        size: samples of a step.
        limit: the number of batches of one process if it is an int, else a part of them.
        accumulated: batches of one process in a step, on the processes that the job asks for.
    """
    # All processes that the job asks for take `accumulated` batches each in a step: so long is the loader of one, and a
    # part of it is what Lightning takes.
    length = batches_of(samples * accumulated, size, drop_last)
    batches = limit if isinstance(limit, int) else int(length * limit)
    return min(batches_of(samples, size, drop_last), -(-batches // accumulated))


def _leave_checkpoints(trainer: Any) -> None:
    """Have `fit` load no checkpoint of Lightning's: it would set its own count of steps. `ckpt_path="last"` in a script
    finds what a ModelCheckpoint wrote in an earlier start, which is behind the run directory; any other is refused."""

    def resume_start(path: Any = None, weights_only: bool | None = None) -> None:
        if not path:
            return
        folders = {
            Path(one.dirpath).absolute() for one in trainer.checkpoint_callbacks if getattr(one, "dirpath", None)
        }
        if Path(path).absolute().parent not in folders:
            options.check(options.LIGHTNING_FIT, {"ckpt_path": str(path)}, {"ckpt_path": None}, "Elastic")
        log.warning("Elastic: ckpt_path=%s is not read; training goes on from the run directory", path)

    trainer._checkpoint_connector.resume_start = resume_start


def _refuse_others(trainer: Any, module: LightningModule) -> None:
    """
    Raises:
        ConfigurationError: the Trainer does what a session cannot keep.
    """
    strategy = type(trainer.strategy).__name__
    given = {
        "fast_dev_run": trainer.fast_dev_run,
        "overfit_batches": trainer.overfit_batches,
        "strategy": "auto" if strategy in WHOLE else strategy,
        "val_check_interval": getattr(trainer, "_val_check_time_interval", None) and "a time",
    }
    parameters = inspect.signature(Trainer.__init__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    # What the tables do not know has, if anything, an attribute of its name.
    new = parameters.keys() - options.LIGHTNING_TRAINER.options.keys() - {"self"}
    given |= {name: getattr(trainer, name, defaults[name]) for name in new}
    options.check(options.LIGHTNING_TRAINER, given, defaults, "Elastic")
    for one in trainer.callbacks:
        options.refuse(options.LIGHTNING_CALLBACKS, (cls.__name__ for cls in type(one).__mro__), "Elastic")
    if not module.automatic_optimization:
        raise ConfigurationError("Elastic needs automatic optimization")
    if type(module).on_save_checkpoint is not LightningModule.on_save_checkpoint:
        log.warning(
            "Elastic does not call on_save_checkpoint of %s: what it keeps there begins anew after a restart. Keep it "
            "in a buffer, or in get_extra_state",
            type(module).__name__,
        )
