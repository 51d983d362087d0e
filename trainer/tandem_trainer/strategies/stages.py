"""The stages of a pipeline: where a model is cut, and how its loss is separated from its forward pass.

The task's loss calls the model. On the first stage the loss gets a stand-in that records the arguments of the call; on
the last stage, one that returns what the pipeline has computed. So any loss works that calls the model once.

Stages have about as many operations each, unless the job says where they begin.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from tandem.job.tasks import Pipeline
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.models.parts import Part
from tandem_trainer.task import Task, name_of

SINGLE = ("gpipe", "1f1b")
"""Schedules with one stage on each rank."""
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call: positional and keyword."""


@dataclass(frozen=True)
class Stage:
    """Consecutive parts of a model."""

    parts: dict[str, nn.Module]
    """Parts by name."""
    outputs: list[Tensor]
    """Output of the last part: tensors on the meta device."""


def run(parts: Sequence[nn.Module], values: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Run parts one after the other.

    Args:
        values: output of the part before them.
        kwargs: further arguments of the first part.
    """
    shared_values: dict[Any, Mapping[str, Any]] = {}
    for part in parts:
        # Values such as a mask are computed once for all parts with the same function, from the first one's inputs.
        shared = part.shared if isinstance(part, Part) else None
        if shared is not None:
            if shared not in shared_values:
                shared_values[shared] = shared(*values)
            kwargs = {**kwargs, **shared_values[shared]}
        output, kwargs = part(*values, **kwargs), {}
        values = output if isinstance(output, tuple) else (output,)
    return values


def cut(
    model: nn.Module, task: Task[Any], options: Pipeline, batch: Any, mode: FakeTensorMode, precision: Any
) -> list[Stage]:
    """Decide which parts of a model form which stage, without computing anything.

    Args:
        batch: a micro-batch.
        mode: mode in which the parts are traced.
        precision: context in which the loop runs them.

    Raises:
        ConfigurationError: the model cannot be cut in this way.
    """
    parts = dict(task.pipeline_parts(model))
    is_single = options.schedule in SINGLE
    per_rank = 1 if is_single else 2
    if options.split_at is not None:
        per_rank, remainder = divmod(len(options.split_at) + 1, options.stages)
        if remainder or (per_rank == 1) != is_single:
            requirement = "as many as" if is_single else "at least twice as many, a multiple of"
            raise ConfigurationError(
                f"pipeline.splitAt makes {len(options.split_at) + 1} stages; {options.schedule} on "
                f"{options.stages} ranks needs {requirement} these"
            )
    count = per_rank * options.stages
    if len(parts) < count:
        raise ConfigurationError(f"the model has {len(parts)} parts, too few for {count} stages")
    costs, outputs = _trace(model, parts, inputs_of(task, batch), mode, precision)
    names = list(parts)
    begins = [0, *(_index(name, names) for name in options.split_at)] if options.split_at else evenly(costs, count)
    # The part names of the job must make stages that are not empty.
    if begins != sorted({*begins}):
        raise ConfigurationError(
            "pipeline.splitAt must list the first parts of stages in order, without the first stage"
        )
    ends = [*begins[1:], len(parts)]
    members = list(parts.items())
    return [Stage(dict(members[begin:end]), outputs[end - 1]) for begin, end in zip(begins, ends, strict=True)]


def _trace(
    model: nn.Module, parts: Mapping[str, nn.Module], inputs: "Inputs", mode: FakeTensorMode, precision: Any
) -> tuple[list[float], list[list[Tensor]]]:
    """Count the operations of each part, and record the shapes of its outputs."""
    costs, outputs = [], []
    # Evaluation mode, so that tracing draws no random numbers and updates no statistics.
    was_training = model.training
    model.eval()
    with mode, torch.no_grad(), precision:
        args, kwargs = tree_map_only(Tensor, mode.from_tensor, inputs)
        values: Any = args
        for part in parts.values():
            with FlopCounterMode(display=False) as counter:
                values = run([part], values, kwargs)
                if isinstance(part, Part) and part.then is not None:
                    part.then(*values)
            costs.append(float(counter.get_total_flops()))
            outputs.append([_blank(value) for value in values])
            kwargs = {}
    model.train(was_training)
    return costs, outputs


def evenly(costs: Sequence[float], count: int) -> list[int]:
    """Return the index of the first part of each of `count` stages, cut so that the most expensive stage is as cheap as
    possible."""
    sums = [0.0, *accumulate(costs)]
    # Indexed by the number of parts: maximum cost of a stage, sum of squares of all, and the stages' first parts.
    best: list[tuple[float, float, list[int]] | None] = [(0.0, 0.0, []), *[None] * len(costs)]
    # Dynamic programming: the best cut of the first parts into one stage more, from the best cuts before it.
    for _ in range(count):
        following: list[tuple[float, float, list[int]] | None] = [None] * (len(costs) + 1)
        for end in range(1, len(costs) + 1):
            for begin in range(end):
                if (before := best[begin]) is None:
                    continue
                cost = sums[end] - sums[begin]
                candidate = (max(before[0], cost), before[1] + cost**2, [*before[2], begin])
                if (current := following[end]) is None or candidate < current:
                    following[end] = candidate
        best = following
    chosen = best[len(costs)]
    assert chosen is not None, "fewer parts than stages"
    return chosen[2]


def _index(name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise ConfigurationError(f"pipeline.splitAt names {name}, and the parts of the model are {', '.join(names)}")
    return names.index(name)


def inputs_of(task: Task[Any], batch: Any) -> Inputs:
    """Return the arguments with which a task's loss calls the model.

    Raises:
        ConfigurationError: the loss does not call the model.
    """
    recorder = _Recorder()
    try:
        task.loss(recorder, batch)
    except _Called:
        return recorder.args, recorder.kwargs
    except AttributeError as error:
        raise ConfigurationError(
            f"{name_of(type(task))}.loss does more with the model than call it, which strategy: pipeline does not "
            "support: "
            f"{error}"
        ) from error
    raise ConfigurationError(f"{name_of(type(task))}.loss does not call the model")


class _Called(BaseException):
    """Raised where the model is called; a BaseException, so that a loss does not catch it."""


class _Recorder(nn.Module):
    """Stand-in for the model that records the arguments of the call."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.args, self.kwargs = args, kwargs
        raise _Called


class PrecomputedOutput(nn.Module):
    """Stand-in for the model that returns once what the pipeline has computed."""

    def __init__(self, task: Task[Any], output: Any) -> None:
        super().__init__()
        self._task, self._output, self._is_given = task, output, False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_given:
            raise ConfigurationError(
                f"{name_of(type(self._task))}.loss calls the model more than once, which strategy: pipeline does not "
                "support"
            )
        self._is_given = True
        return self._output


def _blank(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise ConfigurationError(
            f"a part of the model returns a {type(value).__name__}; parts of a pipeline return tensors"
        )
    # torch also reads whether an output requires gradients.
    return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.is_floating_point())
