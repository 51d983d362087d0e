"""A task: the model, the data and the loss. Built-in, or your own (`trainer.task: my_package.my_task:MyTask`).

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
            return {"absoluteError": Mean.from_samples((model(inputs).squeeze(1) - targets).abs())}

A task owns no loop, no device, no process group and no file of the run. So all that Tandem does for training is the
same for every task: exact data, saves, any number of ranks (tandem_trainer.train), evaluators
(tandem_evaluator.task_program), the report and the page (docs/decisions/0033-tasks.md).

A mistake in a task is reported in one sentence. If the mistake is certain, the run ends and is not retried. An error
that the task's own code raises during training is a failure like that of any script.
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
from tandem.job.tasks import BUILT_IN, CAUSAL_LM, Optimizer
from tandem.job.trainer import Trainer
from tandem.rundir.durable import is_transient
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import DatasetCommit, Origin, origin_of
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.optimizers import torch_optimizer

__all__ = ["Confusion", "GeometricMean", "Histogram", "Max", "Mean", "Min", "Split", "Sum", "Task"]

C = TypeVar("C")
Split = Literal["train", "test"]
"""Split of the data: samples to train on, or to evaluate with."""
CLASSES = {
    BUILT_IN: "tandem_trainer.image_classification:ImageTask",
    CAUSAL_LM: "tandem_trainer.causal_lm:CausalLM",
}
"""Module and class of the built-in tasks."""
FINE_TUNING = "tandem_trainer.language.fine_tuning:FineTuning"
"""Module and class of `causal-lm` where its parameters name a model to begin with."""
PARAMETERS = ("spec", "trainer", "parameters")
MAX_ERROR_LENGTH = 400
"""Maximum length of an error of the user's code in a message, in characters."""


class Task(ABC, Generic[C]):
    """Base class of tasks. Implement `model`, `data` and `loss`; `metrics` for scores besides the loss.

    `Task[Config]` names the type of its configuration: a pydantic model or a dataclass. `spec.trainer.parameters` is
    checked with it, and unknown names are refused. Without a type there are no parameters.

    Each training process and each evaluator creates one object, and calls `model` and `data` once.
    """

    def __init__(self, config: C) -> None:
        """
        Args:
            config: configuration from the job; None for a task without one.
        """
        self.config = config

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the model with fresh weights, on the CPU. Random numbers are seeded: all ranks make the same
        weights."""

    def initialize(self, model: nn.Module) -> None:
        """Load the initial weights into a model, where they are not the fresh weights of `model`. Called by a rank that
        starts without a checkpoint and without `initialWeights`; never by an evaluator.

        Args:
            model: on its device, and split as it will be trained.
        """
        return

    def origin(self) -> Origin | None:
        """Return the origin of the weights that `initialize` loads, for the lineage; None: `model` made them."""
        return None

    def pin(self, origin: Origin) -> None:
        """Use the weights with which the run started, if their source may have changed since.

        Args:
            origin: result of `origin` at that time, or the origin of `initialWeights`.
        """
        return

    def dataset_commits(self) -> Sequence[DatasetCommit]:
        """Return the data sets of a hub that `data` has read, for the record of the generation."""
        return ()

    def pin_datasets(self, commits: Sequence[DatasetCommit]) -> None:
        """Use the data with which the run started, if branches of a hub may have changed since.

        Args:
            commits: result of `dataset_commits` in the newest generation.
        """
        return

    def settle(self, model: nn.Module) -> None:
        """Replace parts of a model by others for its device. Called by every rank, never by an evaluator.

        Args:
            model: on its device, and split as it will be trained.

        Raises:
            ConfigurationError: the parts do not support this device.
        """
        return

    def load_frozen(self, model: nn.Module) -> None:
        """Load the weights that never change and are left out of checkpoints, such as those under adapters. Called by
        every rank and every evaluator, before the weights of a checkpoint are loaded. A second call does nothing.

        Args:
            model: on its device, and split as it will be trained.
        """
        return

    @abstractmethod
    def data(self, split: Split) -> Any:
        """Return the samples of a split: a data set with `__len__` and `__getitem__`, the same in every process.

        A plain `TensorDataset` is put on the device as a whole, and no sample is copied later. The test data of a job
        without evaluators is never loaded.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the losses of a batch.

        Args:
            model: as it is to be called, which may be wrapped for data parallelism.
            batch: result of `collate`, with its tensors on the model's device.

        Returns:
            [samples of the batch], one number for each, not their mean (`reduction="none"`).
        """

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Value]:
        """Compute what a batch of test data adds to the scores, besides the mean of `loss`, which is always there as
        `loss`.

        If the result has a `loss`, a `Mean` of as many samples as the batch has, the model runs once a batch; otherwise
        `loss` is called, too.

        Args:
            model: model in evaluation mode, with the weights of a checkpoint, on the CPU. No gradients are computed.

        Returns:
            By name: `Mean.from_samples(values)`, `GeometricMean`, `Sum`, `Max`, `Min`, `Confusion` or `Histogram`. They
            add up, so scores depend neither on the size of a batch nor on the number of evaluators.
        """
        return {}

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch of samples. They are in the first dimension of each tensor."""
        return default_collate(samples)

    def optimizer(self, model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
        """Create the optimizer over the trainable parameters. The schedule of `trainer.loop` multiplies the learning
        rate that each parameter group has now.

        Args:
            settings: `trainer.loop.optimizer`.
        """
        return torch_optimizer(model, settings)

    def tensor_plan(self, model: nn.Module, ranks: int) -> Mapping[str, str]:
        """Return the plan by which `tensorParallel` splits the matrices of the model: names of modules, with * for any
        part of a name, to `colwise` (rows of outputs; what follows works with a part of them) or `rowwise` (a part of
        the inputs, whose results are summed). A layer in between with weights of its own, such as the norm of each
        head, is `replicated_with_grad_allreduce`. A model of Hugging Face's that has a plan of its own needs none here.

        Args:
            ranks: tensor-parallel degree.

        Raises:
            ConfigurationError: they cannot be split among that many ranks.
        """
        plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
        return plan

    def pipeline_parts(self, model: nn.Module) -> Mapping[str, nn.Module]:
        """Return the forward pass of the model in parts, for `strategy: pipeline`: by name, in order, each called with
        the result of the one before it, a tensor or a tuple of tensors. The first is called as the model is. Together
        they have all parameters that are used. `tandem_trainer.models.parts.Part` makes one of a function and modules.
        A `Sequential` needs no implementation: its members are the parts.

        Raises:
            ConfigurationError: the model cannot be cut.
        """
        if isinstance(model, nn.Sequential):
            return _sequential_parts(model, "")
        raise ConfigurationError(
            f"strategy: pipeline cannot cut a {type(model).__name__}, which is not a Sequential; the task's "
            "pipeline_parts(model) says of which parts its forward pass is made"
        )

    def loss_sum(self, model: nn.Module, batch: Any, samples: int) -> Tensor:
        """Compute the sum of the losses of a batch, a scalar: the loop calls this. Override it only where that is
        faster than to add them up.

        Raises:
            ConfigurationError: `loss` does not return a number for each sample.
        """
        losses = checked(self, self.loss(model, batch), samples)
        return losses.sum()

    def stage_loss(self, model: nn.Module, batch: Any, samples: int, distinct_samples: int, scale: float) -> Tensor:
        """Compute `scale` times the sum of the losses of the first `distinct_samples` samples of a batch, a scalar: the
        last stage of a pipeline calls this; samples after them are repetitions. Its backward pass begins with 1, but
        for `precision: float16`. Override it only where that is faster than to add them up.

        Args:
            model: returns the result of the last part of `pipeline_parts`.

        Raises:
            ConfigurationError: `loss` does not return a number for each sample.
        """
        losses = checked(self, self.loss(model, batch), samples)
        return losses[:distinct_samples].float().sum() * scale

    def flops_per_sample(self) -> float | None:
        """Operations of a training step for one sample, for the utilization of a GPU; None: not known. Called before
        random numbers are seeded."""
        return None

    def tokens_per_sample(self) -> float | None:
        """Mean tokens of a sample of the training data, without padding, for a speed in tokens a second; None: samples
        are no text."""
        return None

    def learned_per_sample(self) -> float | None:
        """Mean tokens of a sample that the loss is over; None: not known."""
        return self.tokens_per_sample()

    def filtered_samples(self) -> str:
        """Describe the samples of the training data that nothing is learned from, for the status and the report: how
        many, and why; empty: none."""
        return ""

    shares_tensors: ClassVar[bool] = True
    """Whether a `TensorDataset` may lie on the device as a whole. Set it to False if it does not fit there."""


def checked(task: Task[Any], losses: object, samples: int) -> Tensor:
    """Check the result of a task's `loss`, and return it.

    Raises:
        ConfigurationError: the result is not one number for each of the `samples`.
    """
    if not isinstance(losses, Tensor) or losses.shape != (samples,):
        description = (
            f"the shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"type {type(losses).__name__}"
        )
        raise ConfigurationError(
            f"{name_of(type(task))}.loss returned a value of {description} for {samples} samples; return a tensor with "
            'one loss for each sample (reduction="none")'
        )
    return losses


def _sequential_parts(model: nn.Sequential, prefix: str) -> dict[str, nn.Module]:
    parts: dict[str, nn.Module] = {}
    # Not named_children: a member that is listed twice is called twice.
    for name, child in model._modules.items():
        assert child is not None
        is_nested = type(child) is nn.Sequential
        parts |= _sequential_parts(child, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": child}  # type: ignore[arg-type]
    return parts


def name_of(kind: type) -> str:
    """Return module and class, as a manifest names them."""
    return f"{kind.__module__}:{kind.__qualname__}"


def task_of(trainer: Trainer) -> Task[Any]:
    """Create the task of a job, with its configuration.

    Raises:
        UnusableInput: the module does not exist.
        ConfigurationError: the module or class is no task, or its parameters are wrong.
        OSError: the disk fails.
    """
    kind = class_of(trainer)
    config, mistakes = configured(kind, trainer.task_parameters)
    if mistakes:
        raise ConfigurationError("; ".join(sentence(path, message) for path, message in mistakes))
    try:
        return kind(config)
    except ConfigurationError:
        raise
    except Exception as error:
        if is_transient(error):
            raise
        raise ConfigurationError(
            f"spec.trainer.task: {trainer.task} cannot be made: {describe_error(error)}"
        ) from error


def task_in(rundir: RunDir) -> Task[Any]:
    """Create the task of a run, pinned to the weights and data with which the run started. Errors are those of
    `task_of`."""
    return pinned(task_of(rundir.read_job().spec.trainer), rundir)


def pinned(task: Task[Any], rundir: RunDir) -> Task[Any]:
    """Pin the task to the weights and data with which a run started, if it has, and return it."""
    records = rundir.generation_records()
    if not records:
        return task
    if (origin := origin_of(records[-1].generation, records)) is not None:
        task.pin(origin)
    task.pin_datasets(records[-1].datasets)
    return task


def class_of(trainer: Trainer) -> type[Task[Any]]:
    """Return the class of a job's task. Errors are those of `class_named`."""
    assert trainer.task is not None, "a command has no task"
    return class_named(FINE_TUNING if trainer.is_fine_tuning else trainer.task)


def class_named(name: str) -> type[Task[Any]]:
    """Import the class of a task.

    Args:
        name: name of a built-in task, or a module and a class.

    Raises:
        UnusableInput: there is no such module.
        ConfigurationError: the module cannot be imported, or has no such class.
        OSError: the disk fails.
    """
    module_name, _, class_name = CLASSES.get(name, name).partition(":")
    field = f"spec.trainer.task: {name}"
    if name not in CLASSES and (folder := str(Path.cwd())) not in sys.path:
        # Tandem's processes do not search the working directory (tandem.processes.launch.module_command), and the
        # user's task may import its neighbours.
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if f"{module_name}.".startswith(f"{missing}."):
            raise UnusableInput(
                f"{field}: Python finds no module {missing} in {Path.cwd()}, in PYTHONPATH or among the installed "
                "packages"
            ) from error
        raise UnusableInput(f"{field} imports {missing}, which is not installed") from error
    except Exception as error:
        if is_transient(error):
            raise
        raise ConfigurationError(f"{field} cannot be imported: {describe_error(error)}") from error
    kind = getattr(module, class_name, None)
    if kind is None:
        candidates = [other for other, value in vars(module).items() if _is_task(value) and value is not Task]
        hint = f"; did you mean {module_name}:{candidates[0]}?" if candidates else ""
        raise ConfigurationError(f"{field}: the module {module_name} has no class {class_name}{hint}")
    if not _is_task(kind):
        raise ConfigurationError(f"{field}: {class_name} is not a task; derive it from tandem_trainer.task.Task")
    if missing_methods := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ConfigurationError(f"{field}: {class_name} does not implement {' and '.join(missing_methods)}")
    return cast("type[Task[Any]]", kind)


def _is_task(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Task)


Mistakes = list[tuple[tuple[str | int, ...], str]]
"""Mistakes: each has the path in the manifest, and a message."""


def configured(kind: type[Task[Any]], parameters: Mapping[str, Any]) -> tuple[Any, Mistakes]:
    """Parse parameters into a configuration; returns it, and the mistakes in them.

    Raises:
        ConfigurationError: the task's type of configuration is no pydantic model or dataclass.
    """
    model = config_type(kind)
    if model is None:
        message = f"{name_of(kind)} takes no parameters; derive it from Task[Config] to give it some"
        return None, [((*PARAMETERS, name), message) for name in parameters]
    if not (isinstance(model, type) and (dataclasses.is_dataclass(model) or issubclass(model, BaseModel))):
        raise ConfigurationError(f"{name_of(kind)}: the configuration of a task is a pydantic model or a dataclass")
    # By default, pydantic ignores a misspelt name. A model with a setting for unknown names keeps it.
    settings = getattr(model, "model_config", None) or getattr(model, "__pydantic_config__", None) or {}
    extra: Literal["forbid"] | None = None if "extra" in settings else "forbid"
    try:
        # As JSON: strict, and yet a list may become a tuple, and an object a dataclass.
        return TypeAdapter(model).validate_json(json.dumps(parameters), strict=True, extra=extra), []
    except ValidationError as error:
        return None, [_describe_mistake(detail, model) for detail in error.errors(include_url=False)]
    except Exception as error:
        raise ConfigurationError(f"spec.trainer.parameters: {name_of(model)}: {describe_error(error)}") from error


def sentence(path: tuple[str | int, ...], message: str) -> str:
    """Format a mistake with its path in the manifest."""
    # Imported here: a rank that starts again has no mistake to report.
    from tandem.job.manifest.fields import dotted

    return f"{dotted(path)}: {message}"


def config_type(kind: type[Task[Any]]) -> Any:
    """Return the type in the brackets of `Task[…]`; None if there is none."""
    for base_class in kind.__mro__:
        for base in vars(base_class).get("__orig_bases__", ()):
            origin = get_origin(base)
            if isinstance(origin, type) and issubclass(origin, Task):
                inner = get_args(base)[0]
                if not isinstance(inner, TypeVar):
                    return None if inner in (None, type(None)) else inner
    return None


def _describe_mistake(error: Any, model: Any) -> tuple[tuple[str | int, ...], str]:
    """Convert one of pydantic's errors to a path and a message."""
    path = (*PARAMETERS, *error["loc"])
    match error["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            if len(error["loc"]) > 1:
                return path, f"there is no parameter {error['loc'][-1]} here"
            names = ", ".join(_field_names(model))
            available = f"it has {names}" if names else "it has none"
            return path, f"{model.__name__} has no parameter {error['loc'][-1]}; {available}"
        case "missing" | "missing_argument":
            return path, "a value is missing"
        case _:
            value = one_line(json.dumps(error["input"], default=str))[:80]
            message = one_line(error["msg"]).removeprefix("Value error, ")
            return path, f"{message[:1].lower()}{message[1:MAX_ERROR_LENGTH]}, not {value}"


def _field_names(model: Any) -> Iterator[str]:
    if issubclass(model, BaseModel):
        yield from (info.alias or name for name, info in model.model_fields.items())
    else:
        yield from (field.name for field in dataclasses.fields(model))


def describe_error(error: BaseException) -> str:
    """Describe an error of the user's code in one line, with its location."""
    message = one_line(next(iter(str(error).splitlines()), ""))[:MAX_ERROR_LENGTH]
    frames = error.__traceback__
    location = ""
    while frames is not None:
        code = frames.tb_frame.f_code
        if not code.co_filename.startswith("<frozen") and code.co_filename != __file__:
            location = f" ({Path(code.co_filename).name}, line {frames.tb_lineno})"
        frames = frames.tb_next
    if isinstance(error, SyntaxError):
        location = f" ({Path(error.filename).name}, line {error.lineno})" if error.filename else ""
        message = error.msg
    return f"{type(error).__name__}{': ' if message else ''}{message}{location}"


def tensors_of(task: Task[Any], dataset: Any) -> tuple[Tensor, ...] | None:
    """Return the tensors of a data set if any batch can be cut from them; None if samples have to be read one by
    one."""
    is_plain = type(dataset) is TensorDataset and type(task).collate is Task.collate and task.shares_tensors
    return dataset.tensors if is_plain else None
