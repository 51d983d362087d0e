"""A task: what is learned, and how good it is. Built-in, or your own (`trainer.task: my_package.my_task:MyTask`).

    @dataclass
    class Config:
        width: int = 32

    class MyTask(Task[Config]):
        def model(self):
            return nn.Linear(self.config.width, 1)

        def data(self, split):
            return TensorDataset(inputs[split], targets[split])

        def loss(self, model, batch):
            inputs, targets = batch
            return mse_loss(model(inputs).squeeze(1), targets, reduction="none")

        def metrics(self, model, batch):
            inputs, targets = batch
            return {"absoluteError": Mean((model(inputs).squeeze(1) - targets).abs().sum(), len(targets))}

A task owns no loop, no device, no process group and no file of the run. So all that Tandem does for training is the
same for every task: exact data, saves, any number of ranks (tandem_trainer.train), evaluators
(tandem_evaluator.task_program), the report and the page (docs/decisions/0033-tasks.md).

What is wrong with a task is told in one sentence, and where it can be told for sure the run ends: nobody starts it
again. An error that the task's own code raises while it trains is a failure like that of any script.
"""

import dataclasses
import importlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast, get_args, get_origin

import torch
from pydantic import BaseModel, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from tandem.evaluation import Confusion, GeometricMean, Histogram, Max, Mean, Min, Sum, Value
from tandem.formatting import one_line
from tandem.job import Trainer
from tandem.rundir.durable import may_pass
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import DatasetCommit, Origin, origin_of
from tandem.tasks import BUILT_IN, CAUSAL_LM, Optimizer
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.optimizers import torch_optimizer

__all__ = ["Confusion", "GeometricMean", "Histogram", "Max", "Mean", "Min", "Split", "Sum", "Task"]

C = TypeVar("C")
Split = Literal["train", "test"]
"""Which samples: to learn from, or to evaluate with."""
CLASSES = {
    BUILT_IN: "tandem_trainer.image_classification:ImageTask",
    CAUSAL_LM: "tandem_trainer.causal_lm:CausalLM",
}
"""Module and class of the built-in tasks."""
FINE_TUNING = "tandem_trainer.language.fine_tuning:FineTuning"
"""Module and class of `causal-lm` where its parameters name a model to begin with."""
PARAMETERS = ("spec", "trainer", "parameters")
MAX_WHY = 400
"""Letters of an error of the user's that a message quotes."""


class Task(ABC, Generic[C]):
    """What is learned. Implement `model`, `data` and `loss`; `metrics` for scores besides the loss.

    `Task[Config]` names the type of its configuration: a pydantic model or a dataclass. `spec.trainer.parameters` is
    checked with it, and unknown names are refused. Without a type there are no parameters.

    Each training process and each evaluator makes an object of it, and calls `model` and `data` once.
    """

    def __init__(self, config: C) -> None:
        """
        Args:
            config: what the job gives this task; None for one without a configuration.
        """
        self.config = config

    @abstractmethod
    def model(self) -> nn.Module:
        """The model with fresh weights, on the CPU. Random numbers are seeded: all ranks make the same weights."""

    def initialize(self, model: nn.Module) -> None:
        """Put the weights into a model that training begins with, where they are others than those that `model` makes.
        Asked by a rank that begins without a checkpoint and without `initialWeights`; never by an evaluator.

        Args:
            model: on its device, and split as it will be trained.
        """
        return

    def origin(self) -> Origin | None:
        """Where the weights come from that `initialize` puts in, for the lineage; None: nowhere else."""
        return None

    def pin(self, origin: Origin) -> None:
        """Keep to the weights that the run has begun with, where what they were taken from may have changed since.

        Args:
            origin: as `origin` told it then, or where `initialWeights` came from.
        """
        return

    def dataset_commits(self) -> Sequence[DatasetCommit]:
        """Data sets of a hub that `data` has read, for the record of the generation."""
        return ()

    def pin_datasets(self, commits: Sequence[DatasetCommit]) -> None:
        """Keep to the data that the run has begun with, where the branches of a hub may have other data since.

        Args:
            commits: as `dataset_commits` told them to the newest generation.
        """
        return

    def settle(self, model: nn.Module) -> None:
        """Exchange parts of a model for others that are for its device. Asked by every rank, never by an evaluator.

        Args:
            model: on its device, and split as it will be trained.

        Raises:
            ConfigurationError: they are not for this device.
        """
        return

    def load_frozen(self, model: nn.Module) -> None:
        """Put in the weights that never change and are left out of checkpoints, such as those under adapters. Asked by
        every rank and every evaluator, before weights of a checkpoint are put in. Asked again, it does nothing.

        Args:
            model: on its device, and split as it will be trained.
        """
        return

    @abstractmethod
    def data(self, split: Split) -> Any:
        """The samples of a split: a data set with `__len__` and `__getitem__`, the same in every process.

        A plain `TensorDataset` is put on the device as a whole, and no sample is copied any more. The test data of a
        job without evaluators is never asked for.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The losses of a batch.

        Args:
            model: as it is to be called, which may be wrapped for data parallelism.
            batch: what `collate` made of some samples, with its tensors on the model's device.

        Returns:
            [samples of the batch], one number for each, not their mean (`reduction="none"`).
        """

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Value]:
        """What a batch of test data adds to the scores, besides the mean of `loss`, which is always there as `loss`.

        With a `loss` of its own, a `Mean` of as many samples as the batch has, the model runs once a batch; without it
        `loss` is asked, too.

        Args:
            model: in evaluation mode, with the weights of a checkpoint, on the CPU. No gradients are computed.

        Returns:
            By name: `Mean(total, count)`, `GeometricMean`, `Sum`, `Max`, `Min`, `Confusion` or `Histogram`. They add
            up, so scores depend neither on the size of a batch nor on the number of evaluators.
        """
        return {}

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch of samples, with those in the first dimension of each tensor."""
        return default_collate(samples)

    def optimizer(self, model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
        """The optimizer over the parameters of the model that learn. The schedule of `trainer.loop` multiplies the
        learning rate that each group of parameters has now.

        Args:
            settings: `trainer.loop.optimizer`.
        """
        return torch_optimizer(model, settings)

    def tensor_plan(self, model: nn.Module, ranks: int) -> Mapping[str, str]:
        """How `tensorParallel` splits the matrices of the model: names of modules, with * for any part of a name, to
        `colwise` (rows of outputs; what follows works with a part of them) or `rowwise` (a part of the inputs, whose
        results are added up). A layer in between with weights of its own, such as the norm of each head, is
        `replicated_with_grad_allreduce`. A model of Hugging Face's that has a plan of its own needs none here.

        Args:
            ranks: how many split them.

        Raises:
            ConfigurationError: they cannot be split among that many ranks.
        """
        brought: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
        return brought

    def pipeline_parts(self, model: nn.Module) -> Mapping[str, nn.Module]:
        """The forward pass of the model in parts, for `strategy: pipeline`: by name, in order, each called with what
        the one before it returned, a tensor or a tuple of tensors. The first is called as the model is. Together they
        have all parameters that are used. `tandem_trainer.models.parts.Part` makes one of a function and modules.
        A `Sequential` needs none: its members are the parts.

        Raises:
            ConfigurationError: the model cannot be cut.
        """
        if isinstance(model, nn.Sequential):
            return _members(model, "")
        raise ConfigurationError(
            f"strategy: pipeline cannot cut a {type(model).__name__}, which is no Sequential; the task's "
            "pipeline_parts(model) says of which parts its forward pass is made"
        )

    def loss_sum(self, model: nn.Module, batch: Any, samples: int) -> Tensor:
        """The sum of the losses of a batch, a scalar: what the loop asks for. To be replaced only where that is faster
        than to add them up.

        Raises:
            ConfigurationError: `loss` does not give a number for each sample.
        """
        losses = checked(self, self.loss(model, batch), samples)
        return losses.sum()

    def stage_loss(self, model: nn.Module, batch: Any, samples: int, counted: int, scale: float) -> Tensor:
        """`scale` times the sum of the losses of the first `counted` samples of a batch, a scalar: what the last stage
        of a pipeline asks for, where the samples after them are repeated ones. Its backward pass begins with 1, but for
        `precision: float16`. To be replaced only where that is faster than to add them up.

        Args:
            model: returns what the last part of `pipeline_parts` has returned.

        Raises:
            ConfigurationError: `loss` does not give a number for each sample.
        """
        losses = checked(self, self.loss(model, batch), samples)
        return losses[:counted].float().sum() * scale

    def flops_per_sample(self) -> float | None:
        """Operations of a training step for one sample, of which the utilization of a GPU is computed; None: not known.
        Called before random numbers are seeded."""
        return None

    def tokens_per_sample(self) -> float | None:
        """Tokens that a sample of the training data has on average, without padding, for a speed in tokens a second;
        None: samples are no text."""
        return None

    def learned_per_sample(self) -> float | None:
        """Tokens of these that the loss is over; None: not known."""
        return self.tokens_per_sample()

    shares_tensors: ClassVar[bool] = True
    """Whether a `TensorDataset` may lie on the device as a whole. Set it to False if it does not fit there."""


def checked(task: Task[Any], losses: object, samples: int) -> Tensor:
    """What a task's `loss` returned.

    Raises:
        ConfigurationError: it is not one number for each of the `samples`.
    """
    if not isinstance(losses, Tensor) or losses.shape != (samples,):
        found = f"the shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"type {type(losses).__name__}"
        raise ConfigurationError(
            f"{name_of(type(task))}.loss returned a value of {found} for {samples} samples; return a tensor with "
            'one loss for each sample (reduction="none")'
        )
    return losses


def _members(model: nn.Sequential, prefix: str) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    # Not named_children: a member that is there twice is called twice.
    for name, child in model._modules.items():
        assert child is not None
        inside = type(child) is nn.Sequential
        found |= _members(child, f"{prefix}{name}.") if inside else {f"{prefix}{name}": child}  # type: ignore[arg-type]
    return found


def name_of(kind: type) -> str:
    """Module and class, as a manifest names them."""
    return f"{kind.__module__}:{kind.__qualname__}"


def task_of(trainer: Trainer) -> Task[Any]:
    """The task of a job, with its configuration.

    Raises:
        UnusableInput: its module is not there.
        ConfigurationError: its module or class is no task, or its parameters are wrong.
        OSError: the disk fails.
    """
    kind = class_of(trainer)
    if trainer.is_built_in:
        return kind(trainer.settings)
    config, wrong = configured(kind, trainer.parameters or {})
    if wrong:
        raise ConfigurationError("; ".join(sentence(path, message) for path, message in wrong))
    try:
        return kind(config)
    except ConfigurationError:
        raise
    except Exception as error:
        if may_pass(error):
            raise
        raise ConfigurationError(f"spec.trainer.task: {trainer.task} cannot be made: {told(error)}") from error


def task_in(rundir: RunDir) -> Task[Any]:
    """The task of a run, which keeps to the weights and data that it has begun with. Errors are those of `task_of`."""
    return pinned(task_of(rundir.read_job().spec.trainer), rundir)


def pinned(task: Task[Any], rundir: RunDir) -> Task[Any]:
    """The task, which keeps to the weights and data that a run has begun with, if it has."""
    records = rundir.generation_records()
    if not records:
        return task
    if (origin := origin_of(records[-1].generation, records)) is not None:
        task.pin(origin)
    task.pin_datasets(records[-1].datasets)
    return task


def class_of(trainer: Trainer) -> type[Task[Any]]:
    """The class of a job's task, with the errors of `found`."""
    assert trainer.task is not None, "a command has no task"
    return found(FINE_TUNING if trainer.is_fine_tuning else trainer.task)


def found(name: str) -> type[Task[Any]]:
    """The class of a task.

    Args:
        name: of a built-in task, or a module and a class.

    Raises:
        UnusableInput: there is no such module.
        ConfigurationError: it cannot be imported, or has no such class.
        OSError: the disk fails.
    """
    module_name, _, class_name = CLASSES.get(name, name).partition(":")
    where = f"spec.trainer.task: {name}"
    if name not in CLASSES and (folder := str(Path.cwd())) not in sys.path:
        # Tandem's processes do not look there (tandem.launch.module_command), and the user's task may import its
        # neighbours.
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if f"{module_name}.".startswith(f"{missing}."):
            raise UnusableInput(
                f"{where}: Python finds no module {missing} in {Path.cwd()}, in PYTHONPATH or among the installed "
                "packages"
            ) from error
        raise UnusableInput(f"{where} imports {missing}, which is not installed") from error
    except Exception as error:
        if may_pass(error):
            raise
        raise ConfigurationError(f"{where} cannot be imported: {told(error)}") from error
    kind = getattr(module, class_name, None)
    if kind is None:
        others = [one for one, value in vars(module).items() if _is_task(value) and value is not Task]
        hint = f"; did you mean {module_name}:{others[0]}?" if others else ""
        raise ConfigurationError(f"{where}: the module {module_name} has no class {class_name}{hint}")
    if not _is_task(kind):
        raise ConfigurationError(f"{where}: {class_name} is no task; derive it from tandem_trainer.task.Task")
    if lacks := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ConfigurationError(f"{where}: {class_name} does not implement {' and '.join(lacks)}")
    return cast("type[Task[Any]]", kind)


def _is_task(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Task)


Wrong = list[tuple[tuple[str | int, ...], str]]
"""Mistakes: the path in the manifest, and what is wrong there."""


def configured(kind: type[Task[Any]], parameters: Mapping[str, Any]) -> tuple[Any, Wrong]:
    """The configuration that parameters make, and what is wrong with them.

    Raises:
        ConfigurationError: the task says that its configuration is something else than a pydantic model or a dataclass.
    """
    model = config_type(kind)
    if model is None:
        message = f"{name_of(kind)} takes no parameters; derive it from Task[Config] to give it some"
        return None, [((*PARAMETERS, name), message) for name in parameters]
    if not (isinstance(model, type) and (dataclasses.is_dataclass(model) or issubclass(model, BaseModel))):
        raise ConfigurationError(f"{name_of(kind)}: the configuration of a task is a pydantic model or a dataclass")
    # A misspelt name would be passed over by default. A model that says what becomes of unknown names is asked.
    settings = getattr(model, "model_config", None) or getattr(model, "__pydantic_config__", None) or {}
    extra: Literal["forbid"] | None = None if "extra" in settings else "forbid"
    try:
        # As JSON: strict, and yet a list may become a tuple, and an object a dataclass.
        return TypeAdapter(model).validate_json(json.dumps(parameters), strict=True, extra=extra), []
    except ValidationError as error:
        return None, [_worded(one, model) for one in error.errors(include_url=False)]
    except Exception as error:
        raise ConfigurationError(f"spec.trainer.parameters: {name_of(model)}: {told(error)}") from error


def sentence(path: tuple[str | int, ...], message: str) -> str:
    """A mistake with its place in the manifest."""
    # Not at the top: a rank that starts again has no mistake to tell of.
    from tandem.manifest.fields import dotted

    return f"{dotted(path)}: {message}"


def config_type(kind: type[Task[Any]]) -> Any:
    """What stands in the brackets of `Task[…]`; None if there is nothing."""
    for one in kind.__mro__:
        for base in vars(one).get("__orig_bases__", ()):
            origin = get_origin(base)
            if isinstance(origin, type) and issubclass(origin, Task):
                inner = get_args(base)[0]
                if not isinstance(inner, TypeVar):
                    return None if inner in (None, type(None)) else inner
    return None


def _worded(error: Any, model: Any) -> tuple[tuple[str | int, ...], str]:
    """One of pydantic's errors as a sentence."""
    path = (*PARAMETERS, *error["loc"])
    match error["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            if len(error["loc"]) > 1:
                return path, f"there is no parameter {error['loc'][-1]} here"
            names = ", ".join(_names(model))
            has = f"it has {names}" if names else "it has none"
            return path, f"{model.__name__} has no parameter {error['loc'][-1]}; {has}"
        case "missing" | "missing_argument":
            return path, "a value is missing"
        case _:
            given = one_line(json.dumps(error["input"], default=str))[:80]
            message = one_line(error["msg"]).removeprefix("Value error, ")
            return path, f"{message[:1].lower()}{message[1:MAX_WHY]}, not {given}"


def _names(model: Any) -> Iterator[str]:
    if issubclass(model, BaseModel):
        yield from (info.alias or name for name, info in model.model_fields.items())
    else:
        yield from (field.name for field in dataclasses.fields(model))


def told(error: BaseException) -> str:
    """An error of the user's code in one line, with its place."""
    words = one_line(next(iter(str(error).splitlines()), ""))[:MAX_WHY]
    frames = error.__traceback__
    place = ""
    while frames is not None:
        code = frames.tb_frame.f_code
        if not code.co_filename.startswith("<frozen") and code.co_filename != __file__:
            place = f" ({Path(code.co_filename).name}, line {frames.tb_lineno})"
        frames = frames.tb_next
    if isinstance(error, SyntaxError):
        place = f" ({Path(error.filename).name}, line {error.lineno})" if error.filename else ""
        words = error.msg
    return f"{type(error).__name__}{': ' if words else ''}{words}{place}"


def tensors_of(task: Task[Any], dataset: Any) -> tuple[Tensor, ...] | None:
    """The tensors of a data set any of whose batches is cut from them; None if samples have to be asked for."""
    is_plain = type(dataset) is TensorDataset and type(task).collate is Task.collate and task.shares_tensors
    return dataset.tensors if is_plain else None
