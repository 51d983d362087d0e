"""Traces a training step of a task and measures its memory and operations, without weights: `python -m
tandem_trainer.footprint`.

The step is that of the loop (tandem_trainer.train): the task's own model, loss and optimizer, with the loop's precision
and activation checkpointing, forward, backward, clipping and the optimizer's step. Its tensors are fake ones
(torch's FakeTensorMode): they have shapes and no memory, so a model of any size is traced on any machine.
`torch.distributed._tools.mem_tracker` adds up what is alive at each operation.

Two steps are traced for each size of the micro-batch, because gradients are allocated while activations are freed.
Where gradients exist all the time (DistributedDataParallel's buckets, a second micro-batch) the peak is higher.

With tensorParallel, the step is traced over one rank's part of the matrices: the model computes with its part, and what
is summed over ranks keeps its shape. So the same trace shows what is sent.

The kernels are those of a CPU. Those of a GPU save about the same tensors; scratch memory that a kernel allocates
by itself is not seen. `compile` is left out.

The question and the answer are those of tandem.job.footprint. Output of the user's code and the progress go to standard
error.
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

from tandem.formatting import one_line
from tandem.job.footprint import (
    Footprint,
    FootprintRequest,
    FootprintResponse,
    JobMistake,
    Moment,
    Pass,
    StageFootprint,
)
from tandem.job.tasks import FsdpSettings, Loop
from tandem.rundir.durable import is_transient
from tandem_trainer.casts import Casts
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.models.dropout import Draws, SampleDropout, key_dropout
from tandem_trainer.process_group import Group
from tandem_trainer.stage_footprint import Sizes, StageTracer, tracker_of
from tandem_trainer.strategies.strategy import Plan, blocks_of, mixed_precision, prepare
from tandem_trainer.strategies.tensor import COLWISE, REPLICATED, check, split_modules
from tandem_trainer.task import Task, class_of, configured, describe_error, name_of, sentence, task_of, tensors_of
from tandem_trainer.train import examples_of, samples_of

TASK = ("spec", "trainer", "task")
Progress = Callable[[str], None]


class Untraceable(Exception):  # noqa: N818 - names the model, not the error
    """A step cannot be traced; the message has the reason."""


def footprint(question: FootprintRequest, progress: Progress) -> Footprint:
    """Measure the footprint of a job's task.

    Args:
        question: the job and what to trace.
        progress: called with a description of each stage of the work.

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
        traced = _TracedStep(task, loop, question.tensor_parallel)
        stages = traced.stages(mode) if question.by_stage else None
        passes, untraced = [], ""
        try:
            for samples in question.micro_batches:
                progress(f"traces a step of {samples:,} samples{_description(question)}")
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
            stages=() if stages is None or untraced else stages.results(),
            untraced=untraced,
            samples=end - start,
            data=sum(tensor.nbytes for tensor in tensors) if tensors is not None else 0,
        )


def _description(question: FootprintRequest) -> str:
    if question.by_stage:
        return ", stage by stage"
    return f", of one of {question.tensor_parallel} ranks that split it" if question.tensor_parallel > 1 else ""


def mode_off() -> Any:
    """Return a context in which tensors are real."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def _batch(task: Task[Any], dataset: Any, start: int, end: int, samples: int) -> Any:
    try:
        return examples_of(task, dataset, start, end, samples)
    except Exception as error:
        if is_transient(error):
            raise
        raise ConfigurationError(
            f"{name_of(type(task))}: its samples cannot be read: {describe_error(error)}"
        ) from error


class _ConstantDraws(Draws):
    """Draws of dropout without a count of the calls: fake tensors have no such number."""

    def of_call(self, layer: int) -> Tensor:
        """Return the same keys for each call."""
        return self.keys


class _WholeForward(nn.Module):
    """A whole forward pass as one module: the tracker takes a second call of the outermost module for another step, and
    a task may call its model several times."""

    def __init__(self, task: Task[Any], model: nn.Module) -> None:
        super().__init__()
        self._task, self.model = task, model

    def forward(self, batch: Any, samples: int) -> Tensor:
        """Return the sum of the losses. Scalar."""
        return self._task.loss_sum(self.model, batch, samples)


class _TracedStep:
    """A step of the loop, over fake tensors. Created and used under a FakeTensorMode."""

    def __init__(self, task: Task[Any], loop: Loop, tensor_parallel: int) -> None:
        self._task, self._loop, self._reduced_bytes = task, loop, 0
        torch.manual_seed(0)
        # Traced for one rank: the planner adds what strategies need. On CPUs syncBatchNorm is ignored, with a warning.
        loop = loop.model_copy(update={"sync_batch_norm": False})
        try:
            model = task.model()
        except ConfigurationError:
            raise
        except Exception as error:
            if is_transient(error):
                raise
            raise ConfigurationError(
                f"{name_of(type(task))}.model cannot be made without its weights: {describe_error(error)}"
            ) from error
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"{name_of(type(task))}.model returned no torch.nn.Module: {type(model).__name__}")
        self._draws = _ConstantDraws(key_dropout(model).layers)
        for module in model.modules():
            if isinstance(module, SampleDropout):
                module.draws = self._draws
        # Its fake tensors are on the CPU already, and Module.to cannot swap fake ones (torch 2.15).
        vars(model)["to"] = lambda device: model
        self._model = prepare(model, loop, Group(0, 1, 0, torch.device("cpu"))).train()
        if tensor_parallel > 1:
            self._split(task.tensor_plan(self._model, tensor_parallel), tensor_parallel)
        self._forward = _WholeForward(task, self._model)
        self._optimizer = task.optimizer(self._model, loop.optimizer)
        self._trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._casts: Mapping[int, int] = {}

    def _split(self, plan: Plan, ranks: int) -> None:
        """Shrink each matrix that a plan splits to the part of the first rank."""
        check(plan, self._model, ranks)
        for _, module, style in split_modules(plan, self._model):
            if style == REPLICATED or isinstance(module, SampleDropout):
                continue  # Such a module has no matrix.
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
                module.register_forward_pre_hook(lambda _, args: self._count_reduced(args[0]))
            else:
                module.register_forward_hook(lambda _, args, out: self._count_reduced(out))

    def _count_reduced(self, tensor: Tensor) -> None:
        """Count a tensor that the ranks sum: the output of a row-wise layer, or the gradient of a column-wise layer's
        input."""
        if tensor.requires_grad:
            self._reduced_bytes += tensor.nbytes

    def take(self, batch: Any, samples: int) -> Pass:
        """Trace a micro-batch.

        Raises:
            ConfigurationError: the loss is not one number for each sample.
            Untraceable: the step cannot be traced.
        """
        self._reduced_bytes = 0
        with self._traceable():
            with FlopCounterMode(display=False) as operations, Casts(self._model.parameters()) as casts:
                self._run(batch, samples)
            self._casts, reduced = casts.sizes, self._reduced_bytes
            fresh = self._peaks(batch, samples)
            for parameter in self._trainable:
                parameter.grad = torch.zeros_like(parameter)
            accumulating = self._peaks(batch, samples)
        state = _size(itertools.chain(self._model.parameters(), self._model.buffers())) + self._optimizer_size()
        return Pass(
            samples=samples,
            moments=moments(fresh, state),
            accumulating=max(0, max(accumulating.values()) - state - self._gradients()),
            flops=float(operations.get_total_flops()),
            added_up=reduced,
        )

    @contextmanager
    def _traceable(self) -> Iterator[None]:
        """Map errors of the block to Untraceable.

        Raises:
            Untraceable: the block cannot be traced.
        """
        if not all(isinstance(parameter, FakeTensor) for parameter in self._model.parameters()):
            raise Untraceable("the model brings weights of its own, which are read from somewhere")
        try:
            yield
        except ConfigurationError:
            raise
        except Exception as error:
            if is_transient(error):
                raise
            reason = (
                "it depends on the values of data" if "DataDependent" in type(error).__name__ else describe_error(error)
            )
            raise Untraceable(f"a step cannot be traced: {reason}") from error

    def _peaks(self, batch: Any, samples: int) -> dict[int, int]:
        """Measure the peak memory in a step, by the size of the gradients at that time."""
        peaks = {0: 0}

        def record(sizes: Sizes) -> None:
            for kinds in sizes.values():
                by_name = {getattr(kind, "value", kind): size for kind, size in kinds.items()}
                gradients = by_name["Gradient"]
                peaks[gradients] = max(peaks.get(gradients, 0), by_name["Total"])

        tracker = tracker_of(self._model.parameters(), record)
        tracker.track_external(
            self._forward, self._optimizer, *(leaf for leaf in tree_leaves(batch) if _is_tensor(leaf))
        )
        with tracker:
            self._run(batch, samples)
        return peaks

    def _run(self, batch: Any, samples: int) -> None:
        self._draws.set(self._loop.seed, 0, torch.zeros(samples, dtype=torch.int64))
        if self._loop.precision == "float32":
            loss: Tensor = self._forward(batch, samples)
        else:
            with self._precision:
                loss = self._forward(batch, samples).float()
        (loss * (1.0 / samples)).backward()  # type: ignore[no-untyped-call]
        if self._loop.gradient_clip_norm is not None:
            nn.utils.clip_grad_norm_(self._trainable, self._loop.gradient_clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def _precision(self) -> torch.autocast:
        return mixed_precision(self._loop, torch.device("cpu"))

    def stages(self, mode: FakeTensorMode) -> StageTracer:
        """Create a tracer of the model's stages."""
        return StageTracer(self._task, self._model, self._loop, mode, self._precision, lambda: self._reduced_bytes)

    def take_stages(self, stages: StageTracer, batch: Any, samples: int) -> None:
        """Trace a micro-batch through stages; arguments and errors are those of `take`."""
        self._draws.set(self._loop.seed, 0, torch.zeros(samples, dtype=torch.int64))
        with self._traceable():
            stages.take(batch, samples)

    def footprint(
        self,
        *,
        passes: Sequence[Pass],
        stages: tuple[StageFootprint, ...],
        untraced: str,
        samples: int,
        data: int,
    ) -> Footprint:
        """Build the footprint.

        Args:
            passes: results of `take` for each micro-batch.
            stages: results of the stages.
            untraced: reason why no step could be traced; empty if one was.
            samples: samples of the data.
            data: size of the data on the device, in bytes.
        """
        parameters, buffers = _size(self._model.parameters()), _size(self._model.buffers())
        optimizer = self._optimizer_size()
        if not passes:
            # Without a step there is no state yet.
            momentum = 1 if self._loop.optimizer.momentum else 0
            numbers = {"adam": 2, "adamw": 2, "adamw8bit": 0.5, "muon": 1, "sgd": momentum}
            optimizer = int(self._gradients() * numbers[self._loop.optimizer.name])
        blocks = list(_blocks(blocks_of(self._model, (self._loop.fsdp or FsdpSettings()).wrap_parameters)))
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
            blocks=tuple(sum(parameter.nbytes for parameter in block) for block in blocks),
            block_gradients=tuple(
                sum(parameter.nbytes for parameter in block if parameter.requires_grad) for block in blocks
            ),
            passes=tuple(passes),
            stages=stages,
            untraced=untraced,
        )

    def _gradients(self) -> int:
        return _size(self._trainable)

    def _optimizer_size(self) -> int:
        states = (value for state in self._optimizer.state.values() for value in state.values() if _is_tensor(value))
        return _size(states)


def _blocks(blocks: Iterable[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """Iterate over the parameters of each block that are in none before it."""
    earlier_ids: set[int] = set()
    for block in blocks:
        new = [parameter for parameter in block.parameters() if id(parameter) not in earlier_ids]
        earlier_ids.update(map(id, new))
        yield new


def moments(peaks: Mapping[int, int], state: int) -> tuple[Moment, ...]:
    """Select the moments of peak memory, by the size of the gradients, that are the largest for some share of the
    gradients: the corners of the convex hull on its upper right side.

    Args:
        peaks: peak memory by the size of the gradients, in bytes.
        state: memory that always exists, in bytes.
    """
    hull: list[Moment] = []
    for gradients, total in sorted(peaks.items()):
        new = Moment(activations=max(0, total - state - gradients), gradients=gradients)
        while len(hull) > 1 and not _is_corner(hull[-2], hull[-1], new):
            hull.pop()
        hull.append(new)
    first, last = (
        max(range(len(hull)), key=lambda index: hull[index].activations + share * hull[index].gradients)
        for share in (0, 1)
    )
    return tuple(hull[first : last + 1])


def _is_corner(before: Moment, between: Moment, after: Moment) -> bool:
    """Whether `between` is above the line from `before` to `after`."""
    rise = (between.activations - before.activations) * (after.gradients - before.gradients)
    return rise > (after.activations - before.activations) * (between.gradients - before.gradients)


def _part(parameter: Tensor, dimension: int, rows: int) -> nn.Parameter:
    """Copy the first rows of a parameter."""
    return nn.Parameter(parameter.detach().narrow(dimension, 0, rows).clone(), parameter.requires_grad)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _size(tensors: Iterable[Tensor]) -> int:
    """Add up the bytes of tensors, each tensor once."""
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


def answer_question(question: FootprintRequest, progress: Progress) -> FootprintResponse:
    """Answer with the footprint, or with the mistakes of the job.

    Raises:
        OSError: the disk fails.
    """
    trainer = question.trainer
    try:
        _, mistakes = configured(class_of(trainer), trainer.task_parameters)
        if mistakes:
            return FootprintResponse(
                mistakes=tuple(JobMistake(path=path, message=sentence(path, problem)) for path, problem in mistakes)
            )
        return FootprintResponse(footprint=footprint(question, progress))
    except ConfigurationError as error:
        return FootprintResponse(mistakes=(JobMistake(path=TASK, message=one_line(str(error))),))


def main() -> None:
    """Read a question from standard input, and write the answer to standard output."""
    # Prints of the user's code must not get into the answer.
    output = os.dup(1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    question = FootprintRequest.read_json(sys.stdin.read())
    answer = answer_question(question, lambda text: print(f"plan: {text}", file=sys.stderr, flush=True))
    with os.fdopen(output, "w") as file:
        file.write(answer.model_dump_json(exclude_none=True))


if __name__ == "__main__":
    main()
