"""Where a model is cut into the stages of a pipeline, and how its loss is told from its forward pass.

The task's loss calls the model. On the first stage it is given a stand-in that takes down with what it was called; on
the last stage, one that returns what the pipeline has computed. So any loss will do that calls the model once.

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

from tandem.tasks import Pipeline
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.models.parts import Part
from tandem_trainer.task import Task, name_of

SINGLE = ("gpipe", "1f1b")
"""Schedules with one stage on each rank."""
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call."""


@dataclass(frozen=True)
class Stage:
    """Consecutive parts of a model."""

    parts: dict[str, nn.Module]
    """By name."""
    outputs: list[Tensor]
    """What the last of them returns: tensors on the meta device."""


def run(parts: Sequence[nn.Module], values: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Run parts one after the other.

    Args:
        values: what the part before them has returned.
        named: further arguments of the first one.
    """
    made: dict[Any, Mapping[str, Any]] = {}
    for part in parts:
        shared = part.shared if isinstance(part, Part) else None
        if shared is not None:
            if shared not in made:
                made[shared] = shared(*values)
            named = {**named, **made[shared]}
        found, named = part(*values, **named), {}
        values = found if isinstance(found, tuple) else (found,)
    return values


def cut(
    model: nn.Module, task: Task[Any], options: Pipeline, batch: Any, mode: FakeTensorMode, precision: Any
) -> list[Stage]:
    """Decide which part of a model is on which stage. Computes nothing.

    Args:
        batch: a micro-batch.
        mode: in which parts are run.
        precision: the context in which the loop runs them.

    Raises:
        ConfigurationError: it cannot be cut like that.
    """
    parts = dict(task.pipeline_parts(model))
    is_single = options.schedule in SINGLE
    per_rank = 1 if is_single else 2
    if options.split_at is not None:
        per_rank, rest = divmod(len(options.split_at) + 1, options.stages)
        if rest or (per_rank == 1) != is_single:
            wanted = "as many as" if is_single else "at least twice as many, a multiple of"
            raise ConfigurationError(
                f"pipeline.splitAt makes {len(options.split_at) + 1} stages; {options.schedule} on "
                f"{options.stages} ranks needs {wanted} these"
            )
    count = per_rank * options.stages
    if len(parts) < count:
        raise ConfigurationError(f"the model has {len(parts)} parts, which do not make {count} stages")
    costs, outputs = _traced(model, parts, inputs_of(task, batch), mode, precision)
    names = list(parts)
    begins = [0, *(_index(one, names) for one in options.split_at)] if options.split_at else evenly(costs, count)
    if begins != sorted({*begins}):
        raise ConfigurationError("pipeline.splitAt names the beginnings of stages in order, without the first one")
    ends = [*begins[1:], len(parts)]
    members = list(parts.items())
    return [Stage(dict(members[begin:end]), outputs[end - 1]) for begin, end in zip(begins, ends, strict=True)]


def _traced(
    model: nn.Module, parts: Mapping[str, nn.Module], inputs: "Inputs", mode: FakeTensorMode, precision: Any
) -> tuple[list[float], list[list[Tensor]]]:
    """Operations of each part, and the shapes of its outputs."""
    costs, outputs = [], []
    was_training = model.training
    model.eval()
    with mode, torch.no_grad(), precision:
        given, named = tree_map_only(Tensor, mode.from_tensor, inputs)
        values: Any = given
        for part in parts.values():
            with FlopCounterMode(display=False) as counted:
                values = run([part], values, named)
                if isinstance(part, Part) and part.then is not None:
                    part.then(*values)
            costs.append(float(counted.get_total_flops()))
            outputs.append([_blank(one) for one in values])
            named = {}
    model.train(was_training)
    return costs, outputs


def evenly(costs: Sequence[float], count: int) -> list[int]:
    """The first part of each of `count` stages, cut so that the most expensive stage is as cheap as possible."""
    sums = [0.0, *accumulate(costs)]
    # By the number of parts: the cost of the dearest run, the squares of all, and their beginnings.
    best: list[tuple[float, float, list[int]] | None] = [(0.0, 0.0, []), *[None] * len(costs)]
    for _ in range(count):
        following: list[tuple[float, float, list[int]] | None] = [None] * (len(costs) + 1)
        for end in range(1, len(costs) + 1):
            for begin in range(end):
                if (before := best[begin]) is None:
                    continue
                cost = sums[end] - sums[begin]
                found = (max(before[0], cost), before[1] + cost**2, [*before[2], begin])
                if (known := following[end]) is None or found < known:
                    following[end] = found
        best = following
    chosen = best[len(costs)]
    assert chosen is not None, "fewer parts than stages"
    return chosen[2]


def _index(name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise ConfigurationError(f"pipeline.splitAt names {name}, and the parts of the model are {', '.join(names)}")
    return names.index(name)


def inputs_of(task: Task[Any], batch: Any) -> Inputs:
    """With what the loss of a task calls the model.

    Raises:
        ConfigurationError: it does not call it.
    """
    recorder = _Recorder()
    try:
        task.loss(recorder, batch)
    except _Called:
        return recorder.given, recorder.named
    except AttributeError as error:
        raise ConfigurationError(
            f"{name_of(type(task))}.loss does more with the model than to call it, which strategy: pipeline cannot do: "
            f"{error}"
        ) from error
    raise ConfigurationError(f"{name_of(type(task))}.loss does not call the model")


class _Called(BaseException):
    """The model was called; not for a loss to handle."""


class _Recorder(nn.Module):
    """Stands in for the model, and takes down with what it is called."""

    def forward(self, *given: Any, **named: Any) -> NoReturn:
        self.given, self.named = given, named
        raise _Called


class Answer(nn.Module):
    """Stands in for the model, and answers once with what the pipeline has computed."""

    def __init__(self, task: Task[Any], output: Any) -> None:
        super().__init__()
        self._task, self._output, self._is_given = task, output, False

    def forward(self, *given: Any, **named: Any) -> Any:
        if self._is_given:
            raise ConfigurationError(
                f"{name_of(type(self._task))}.loss calls the model more than once, which strategy: pipeline cannot do"
            )
        self._is_given = True
        return self._output


def _blank(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise ConfigurationError(
            f"a part of the model returns a {type(value).__name__}; parts of a pipeline return tensors"
        )
    # Of gradients torch asks here, too.
    return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.is_floating_point())
