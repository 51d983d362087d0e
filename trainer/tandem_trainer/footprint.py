"""Traces a training step of a task and says what it takes, without its weights: `python -m tandem_trainer.footprint`.

The step is that of the loop (tandem_trainer.train): the task's own model, loss and optimizer, with the loop's precision
and activation checkpointing, forward, backward, clipping and the optimizer's step. Its tensors are fake ones
(torch's FakeTensorMode): they have shapes and no memory, so a model of any size is traced on any machine.
`torch.distributed._tools.mem_tracker` adds up what is alive at each operation.

Two steps are traced for each size of the micro-batch, because gradients come into being while activations go. Where
they exist all the time (DistributedDataParallel's buckets, a second micro-batch) the peak is higher.

Of a rank that splits matrices with others (tensorParallel) the step is traced over its part of them: the model computes
with what it holds, and what is added up over ranks keeps its shape. So the same trace says what is sent. Of a process
with several devices it is traced over them (tandem_trainer.device_footprint).

The kernels are those of a CPU. Those of a GPU save about the same tensors; scratch memory that a kernel allocates
by itself is not seen. `compile` is left out.

The question and the answer are those of tandem.footprint. What the user's code prints goes to standard error, and so
does the progress.
"""

import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from tandem.footprint import Answer, Footprint, Mistake, Moment, Pass, Portion, Question, Stage
from tandem.formatting import one_line
from tandem.rundir.durable import may_pass
from tandem.tasks import Fsdp, Loop
from tandem_trainer.casts import Casts
from tandem_trainer.device_footprint import FirstCopy, Moves, lay_out, places
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.models.dropout import Draws, SampleDropout, key_dropout
from tandem_trainer.process_group import Group
from tandem_trainer.stage_footprint import Sizes, Stages, tracker_of
from tandem_trainer.strategies.strategy import Plan, blocks_of, mixed_precision, prepare
from tandem_trainer.strategies.tensor import COLWISE, REPLICATED, check, split_modules
from tandem_trainer.task import Task, class_of, configured, name_of, sentence, task_of, tensors_of, told
from tandem_trainer.train import examples_of, samples_of

TASK = ("spec", "trainer", "task")
Progress = Callable[[str], None]


class Untraceable(Exception):  # noqa: N818 - it says what the model is
    """A step cannot be traced; says why."""


def footprint(question: Question, progress: Progress) -> Footprint:
    """What the task of a job takes.

    Args:
        progress: told what is done, in words.

    Raises:
        ConfigurationError: the task cannot work as it is written, or its model cannot be made without its weights.
        OSError: the disk fails.
    """
    loop = question.trainer.settings_of_loop
    task = task_of(question.trainer)
    progress("reads the data")
    dataset, start, end = samples_of(task)
    tensors = tensors_of(task, dataset)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        progress("makes the model, without its weights")
        traced = _Step(task, loop, question.tensor_parallel)
        stages = traced.stages(mode) if question.by_stage else None
        passes, untraced = [], ""
        try:
            if question.devices > 1:
                traced.spread(question.devices)
            for samples in question.micro_batches:
                progress(f"traces a step of {samples:,} samples{_whose(question)}")
                with mode_off():
                    batch = _batch(task, dataset, start, end, samples)
                batch = tree_map_only(Tensor, mode.from_tensor, batch)
                if stages is None:
                    passes.append(traced.take(batch, samples))
                else:
                    traced.take_stages(stages, batch, samples)
        except Untraceable as error:
            passes, untraced = [], str(error)
        return traced.footprint(
            passes=passes,
            stages=() if stages is None or untraced else stages.found(),
            untraced=untraced,
            samples=end - start,
            data=sum(tensor.nbytes for tensor in tensors) if tensors is not None else 0,
        )


def _whose(question: Question) -> str:
    if question.by_stage:
        return ", stage by stage"
    if question.devices > 1:
        return f", on {question.devices} devices"
    return f", of one of {question.tensor_parallel} ranks that split it" if question.tensor_parallel > 1 else ""


def mode_off() -> Any:
    """Tensors made in it are real."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def _batch(task: Task[Any], dataset: Any, start: int, end: int, samples: int) -> Any:
    try:
        return examples_of(task, dataset, start, end, samples)
    except Exception as error:
        if may_pass(error):
            raise
        raise ConfigurationError(f"{name_of(type(task))}: its samples cannot be read: {told(error)}") from error


class _Still(Draws):
    """Draws of dropout without a count of the calls, which is a number that a fake tensor does not have."""

    def of_call(self, layer: int) -> Tensor:
        """The same keys for each call."""
        return self.keys


class _Whole(nn.Module):
    """All of a forward pass as one module: the tracker takes a second call of the outermost one for another step, and a
    task may call its model as often as it likes."""

    def __init__(self, task: Task[Any], model: nn.Module) -> None:
        super().__init__()
        self._task, self.model = task, model

    def forward(self, batch: Any, samples: int) -> Tensor:
        """The sum of the losses. Scalar."""
        return self._task.loss_sum(self.model, batch, samples)


class _Step:
    """The step of the loop, over fake tensors. Made and used under a FakeTensorMode."""

    def __init__(self, task: Task[Any], loop: Loop, tensor_parallel: int) -> None:
        self._task, self._loop, self._added_up = task, loop, 0
        torch.manual_seed(0)
        # Of one rank: what strategies add is the planner's to say. On CPUs syncBatchNorm is ignored, with a warning.
        loop = loop.model_copy(update={"sync_batch_norm": False})
        try:
            model = task.model()
        except ConfigurationError:
            raise
        except Exception as error:
            if may_pass(error):
                raise
            raise ConfigurationError(
                f"{name_of(type(task))}.model cannot be made without its weights: {told(error)}"
            ) from error
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"{name_of(type(task))}.model returned no torch.nn.Module: {type(model).__name__}")
        self._draws = _Still(key_dropout(model).layers)
        for module in model.modules():
            if isinstance(module, SampleDropout):
                module.draws = self._draws
        # Its fake tensors are on the CPU already, and Module.to cannot swap fake ones (torch 2.15).
        vars(model)["to"] = lambda device: model
        self._model = prepare(model, loop, Group(0, 1, 0, torch.device("cpu"))).train()
        if tensor_parallel > 1:
            self._split(task.tensor_plan(self._model, tensor_parallel), tensor_parallel)
        self._whole = _Whole(task, self._model)
        self._optimizer = task.optimizer(self._model, loop.optimizer)
        self._learning = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._casts: Mapping[int, int] = {}
        self._copies, self._places = 1, places(1)

    def spread(self, devices: int) -> None:
        """Trace the step of a process with several devices from here on.

        Raises:
            Untraceable: the layers cannot be spread over as many.
        """
        if self._loop.strategy == "dp":
            self._copies = devices
            self._whole = _Whole(self._task, FirstCopy(self._model, devices))
            return
        self._places = places(devices)
        try:
            lay_out(self._model, self._places)
        except ConfigurationError as error:
            raise Untraceable(str(error)) from error
        self._optimizer = self._task.optimizer(self._model, self._loop.optimizer)
        self._learning = [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def _split(self, plan: Plan, ranks: int) -> None:
        """Leave of each matrix that a plan splits what the first rank holds."""
        check(plan, self._model, ranks)
        for _, module, style in split_modules(plan, self._model):
            if style == REPLICATED or isinstance(module, SampleDropout):
                continue  # It has no matrix.
            if not isinstance(module, nn.Linear | nn.Embedding):
                raise ConfigurationError(
                    f"the plan for tensorParallel splits a {type(module).__name__}; only Linear and Embedding can be"
                )
            # Outputs are the first dimension of a linear layer's matrix, and the second of an embedding's.
            dimension = 0 if (style == COLWISE) == isinstance(module, nn.Linear) else 1
            rows = -(-module.weight.shape[dimension] // ranks)
            module.weight = _part(module.weight, dimension, rows)
            if isinstance(module, nn.Linear) and module.bias is not None and style == COLWISE:
                module.bias = _part(module.bias, 0, rows)
            if style == COLWISE:
                module.register_forward_pre_hook(lambda _, given: self._adds_up(given[0]))
            else:
                module.register_forward_hook(lambda _, given, out: self._adds_up(out))

    def _adds_up(self, tensor: Tensor) -> None:
        """The ranks add up such a tensor: what follows a split of inputs, and the gradient of what goes into a split of
        outputs."""
        if tensor.requires_grad:
            self._added_up += tensor.nbytes

    def take(self, batch: Any, samples: int) -> list[Pass]:
        """Trace a micro-batch; a pass for each device.

        Raises:
            ConfigurationError: the loss is not one for each sample.
            Untraceable: it cannot be traced.
        """
        self._added_up = 0
        with self._traceable():
            with (
                FlopCounterMode(display=False) as operations,
                Casts(self._model.parameters()) as casts,
                Moves() as moves,
            ):
                self._run(batch, samples)
            self._casts, added_up = casts.sizes, self._added_up
            fresh = self._peaks(batch, samples)
            for parameter in self._learning:
                parameter.grad = torch.zeros_like(parameter)
            accumulating = self._peaks(batch, samples)
        return [
            Pass(
                samples=samples,
                moments=moments(fresh[place], self._state_size(place)),
                accumulating=max(
                    0, max(accumulating[place].values()) - self._state_size(place) - self._gradients(place)
                ),
                flops=float(operations.get_total_flops()),
                added_up=added_up,
                moved=moves.size,
            )
            for place in self._places
        ]

    @contextmanager
    def _traceable(self) -> Iterator[None]:
        """
        Raises:
            Untraceable: what is done in it cannot be.
        """
        if not all(isinstance(parameter, FakeTensor) for parameter in self._model.parameters()):
            raise Untraceable("the model brings weights of its own, which are read from somewhere")
        try:
            yield
        except ConfigurationError:
            raise
        except Exception as error:
            if may_pass(error):
                raise
            why = "it depends on the values of data" if "DataDependent" in type(error).__name__ else told(error)
            raise Untraceable(f"a step cannot be traced: {why}") from error

    def _peaks(self, batch: Any, samples: int) -> dict[torch.device, dict[int, int]]:
        """The most that is alive on each device in a step, by the size of the gradients at that time."""
        found: dict[torch.device, dict[int, int]] = {place: {0: 0} for place in self._places}

        def seen(sizes: Sizes) -> None:
            for place, kinds in sizes.items():
                by_name = {getattr(kind, "value", kind): size for kind, size in kinds.items()}
                most, gradients = found.setdefault(place, {}), by_name["Gradient"]
                most[gradients] = max(most.get(gradients, 0), by_name["Total"])

        tracker = tracker_of(self._model.parameters(), seen)
        tracker.track_external(self._whole, self._optimizer, *(one for one in tree_leaves(batch) if _is_tensor(one)))
        with tracker:
            self._run(batch, samples)
        return found

    def _run(self, batch: Any, samples: int) -> None:
        self._draws.set(self._loop.seed, 0, torch.zeros(-(-samples // self._copies), dtype=torch.int64))
        if self._loop.precision == "float32":
            loss: Tensor = self._whole(batch, samples)
        else:
            with self._precision:
                loss = self._whole(batch, samples).float()
        (loss * (1.0 / samples)).backward()  # type: ignore[no-untyped-call]
        if self._loop.gradient_clip_norm is not None:
            nn.utils.clip_grad_norm_(self._learning, self._loop.gradient_clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def _precision(self) -> torch.autocast:
        return mixed_precision(self._loop, torch.device("cpu"))

    def stages(self, mode: FakeTensorMode) -> Stages:
        """What traces stages of the model."""
        return Stages(self._task, self._model, self._loop, mode, self._precision, lambda: self._added_up)

    def take_stages(self, stages: Stages, batch: Any, samples: int) -> None:
        """Trace a micro-batch through stages; arguments and errors are those of `take`."""
        self._draws.set(self._loop.seed, 0, torch.zeros(samples, dtype=torch.int64))
        with self._traceable():
            stages.take(batch, samples)

    def footprint(
        self, *, passes: Sequence[list[Pass]], stages: tuple[Stage, ...], untraced: str, samples: int, data: int
    ) -> Footprint:
        """All there is to say.

        Args:
            passes: what `take` has returned for each micro-batch.
        """
        parameters, buffers = _size(self._model.parameters()), _size(self._model.buffers())
        optimizer = self._optimizer_size()
        if not passes:
            # Without a step there is no state yet.
            momentum = 1 if self._loop.optimizer.momentum else 0
            numbers = {"adam": 2, "adamw": 2, "adamw8bit": 0.5, "muon": 1, "sgd": momentum}
            optimizer = int(self._gradients() * numbers[self._loop.optimizer.name])
        blocks = list(_blocks(blocks_of(self._model, (self._loop.fsdp or Fsdp()).wrap_parameters)))
        by_device = list(zip(*passes, strict=True))
        is_spread = len(self._places) > 1
        return Footprint(
            parameters=parameters,
            parameter_count=sum(parameter.numel() for parameter in self._model.parameters()),
            gradients=self._gradients(),
            optimizer=optimizer,
            buffers=buffers,
            average=parameters + buffers if self._loop.ema_decay is not None else 0,
            casts=sum(self._casts.values()),
            data=data,
            samples=samples,
            blocks=tuple(sum(one.nbytes for one in block) for block in blocks),
            block_gradients=tuple(sum(one.nbytes for one in block if one.requires_grad) for block in blocks),
            passes=by_device[0] if by_device and not is_spread else (),
            stages=stages,
            portions=tuple(map(self._portion, self._places, by_device)) if is_spread else (),
            untraced=untraced,
        )

    def _portion(self, place: torch.device, passes: tuple[Pass, ...]) -> Portion:
        here = [one for one in self._model.parameters() if one.device == place]
        return Portion(
            parameters=_size(here),
            gradients=self._gradients(place),
            optimizer=self._optimizer_size(place),
            buffers=_size(self._model.buffers(), place),
            casts=sum(self._casts.get(id(one), 0) for one in here),
            passes=passes,
        )

    def _gradients(self, place: torch.device | None = None) -> int:
        return _size(self._learning, place)

    def _optimizer_size(self, place: torch.device | None = None) -> int:
        states = (one for state in self._optimizer.state.values() for one in state.values() if _is_tensor(one))
        return _size(states, place)

    def _state_size(self, place: torch.device) -> int:
        tensors = itertools.chain(self._model.parameters(), self._model.buffers())
        return _size(tensors, place) + self._optimizer_size(place)


def _blocks(blocks: Iterable[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """The parameters of each block that are in none before it."""
    seen: set[int] = set()
    for block in blocks:
        own = [parameter for parameter in block.parameters() if id(parameter) not in seen]
        seen.update(map(id, own))
        yield own


def moments(most: Mapping[int, int], state: int) -> tuple[Moment, ...]:
    """Those of the most that exists, by the size of the gradients, at which it is most for some share of the gradients:
    the corners of the convex hull on its upper right side.

    Args:
        state: what always exists, in bytes.
    """
    hull: list[Moment] = []
    for gradients, total in sorted(most.items()):
        new = Moment(activations=max(0, total - state - gradients), gradients=gradients)
        while len(hull) > 1 and not _is_corner(hull[-2], hull[-1], new):
            hull.pop()
        hull.append(new)
    first, last = (
        max(range(len(hull)), key=lambda at: hull[at].activations + share * hull[at].gradients) for share in (0, 1)
    )
    return tuple(hull[first : last + 1])


def _is_corner(before: Moment, between: Moment, after: Moment) -> bool:
    """Whether the one between is above the line from one to the other."""
    rise = (between.activations - before.activations) * (after.gradients - before.gradients)
    return rise > (after.activations - before.activations) * (between.gradients - before.gradients)


def _part(parameter: Tensor, dimension: int, rows: int) -> nn.Parameter:
    """The first rows of a parameter, in memory of their own."""
    return nn.Parameter(parameter.detach().narrow(dimension, 0, rows).clone(), parameter.requires_grad)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _size(tensors: Iterable[Tensor], place: torch.device | None = None) -> int:
    """Bytes of those on a device, or of all; each tensor once."""
    return sum({id(one): one.nbytes for one in tensors if place in (None, one.device)}.values())


def answered(question: Question, progress: Progress) -> Answer:
    """The footprint, or what is wrong with the job.

    Raises:
        OSError: the disk fails.
    """
    trainer = question.trainer
    try:
        if trainer.own_task is not None:
            _, wrong = configured(class_of(trainer), trainer.parameters or {})
            if wrong:
                return Answer(mistakes=tuple(Mistake(path=path, message=sentence(path, what)) for path, what in wrong))
        return Answer(footprint=footprint(question, progress))
    except ConfigurationError as error:
        return Answer(mistakes=(Mistake(path=TASK, message=one_line(str(error))),))


def main() -> None:
    """Entry point."""
    answer = os.dup(1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    question = Question.read_json(sys.stdin.read())
    told_of = answered(question, lambda words: print(f"plan: {words}", file=sys.stderr, flush=True))
    with os.fdopen(answer, "w") as file:
        file.write(told_of.model_dump_json(exclude_none=True))


if __name__ == "__main__":
    main()
