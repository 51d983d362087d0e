"""Pipeline parallelism: the ranks of a worker hold consecutive stages of the model, on a mesh of data and pipe.

The ranks of a generation are numbered worker by worker, and the ranks of one pipeline follow each other. Those with the
same place in it hold the same stages, and their gradients are added up after the schedule, which is one of
`torch.distributed.pipelining`.

The task's loss calls the model. On the first stage it is given a stand-in that takes down with what it was called; on
the last stage, one that returns what the pipeline has computed. So any loss will do that calls the model once.

The schedules pass on nothing but the numbers of micro-batches: inputs, targets and the keys of dropout are looked up by
them, so torch cuts no batch. All micro-batches have one size, because buffers are made once; where samples do not
suffice, the last one is repeated, and its losses are left out of the sum.

Rejected: to trace the model with torch.export (dropout that is keyed by sample draws through an object of Python's).
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.utils.flop_counter import FlopCounterMode

from tandem import tasks
from tandem.tasks import Loop
from tandem_trainer.checkpoint.sharding import Stages
from tandem_trainer.data.feeding import padded
from tandem_trainer.data.keyed import mixed, seed_torch
from tandem_trainer.data.supply import Share
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.meter import Busy
from tandem_trainer.models.dropout import Draws
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.passes import Passes, RecordedStage
from tandem_trainer.strategies.strategy import Examples, Runner, Strategy, clip_parts
from tandem_trainer.task import Task, checked, name_of

CHUNKS_PER_RANK = 4
"""With so many micro-batches the time in which ranks wait is small (https://arxiv.org/abs/1811.06965, section 2.3)."""
SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL = {"interleaved1f1b": ScheduleInterleaved1F1B, "zeroBubble": ScheduleInterleavedZeroBubble}


class Pipelined(Strategy):
    """Stages with the options of the job."""

    def __init__(self, loop: Loop, group: Group, per_worker: int) -> None:
        """
        Raises:
            ConfigurationError: the ranks of a worker cannot be divided into pipelines.
        """
        super().__init__(loop, group)
        self._options = options = loop.pipeline or tasks.Pipeline()
        ranks = options.stages
        if per_worker % ranks or group.world_size % ranks:
            raise ConfigurationError(f"pipeline.stages: {ranks} does not divide the {per_worker} processes of a worker")
        self.dp_rank, self.dp_size = group.rank // ranks, group.world_size // ranks
        sizes = {"data": self.dp_size, "pipe": ranks}
        self.mesh = {name: size for name, size in sizes.items() if size > 1}
        mesh = init_device_mesh(group.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self._copies, self._pipe = mesh.get_group("data"), mesh.get_group("pipe")
        self._place = group.rank % ranks
        largest = -(-loop.global_batch_size // self.dp_size)
        chunks = options.chunks or CHUNKS_PER_RANK * ranks
        if loop.micro_batch_size is not None:
            chunks *= -(-largest // (chunks * loop.micro_batch_size))
        self._chunks, self._chunk = chunks, -(-largest // chunks)
        self._parts: list[list[nn.Module]] = []
        self._shapes: list[list[Tensor]] = []

    def shard(self, model: nn.Module, task: Task[Any], examples: Examples) -> None:
        if self.stages is None:
            self._cut(model, task, examples)
        assert self.stages is not None
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            for own, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                is_here = self.stages.owners.get(prefix + own, self._place) == self._place
                device = self.group.device if is_here else torch.device("meta")
                if isinstance(tensor, nn.Parameter):
                    module._parameters[own] = self._moved(tensor, device)
                else:
                    module._buffers[own] = tensor.to(device)

    def runner(self, task: Task[Any], draws: Draws, busy: Busy) -> Runner:
        return _Runner(self, task, draws, busy).run

    def clip(self, parameters: Sequence[Tensor], most: float) -> Tensor:
        gradients = [one.grad for one in parameters if one.grad is not None]
        return clip_parts(gradients, [self.dp_size] * len(gradients), most, self.group.device)

    def _moved(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        if device.type != "meta":
            parameter.data = parameter.data.to(device)  # the very object, which parts share
            return parameter
        return nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)

    def _cut(self, model: nn.Module, task: Task[Any], examples: Examples) -> None:
        """Decide which part of the model is on which stage.

        Raises:
            ConfigurationError: it cannot be cut like that.
        """
        options = self._options
        parts = dict(task.pipeline_parts(model))
        per_rank = 1 if options.schedule in SINGLE else 2
        if options.split_at is not None:
            per_rank, rest = divmod(len(options.split_at) + 1, options.stages)
            if rest or (per_rank == 1) != (options.schedule in SINGLE):
                wanted = "as many as" if options.schedule in SINGLE else "at least twice as many, a multiple of"
                raise ConfigurationError(
                    f"pipeline.splitAt makes {len(options.split_at) + 1} stages; {options.schedule} on "
                    f"{options.stages} ranks needs {wanted} these"
                )
        count = per_rank * options.stages
        if len(parts) < count:
            raise ConfigurationError(f"the model has {len(parts)} parts, which do not make {count} stages")
        costs, outputs = self._traced(model, task, parts, examples)
        names = list(parts)
        begins = [0, *(_index(one, names) for one in options.split_at)] if options.split_at else evenly(costs, count)
        if begins != sorted({*begins}):
            raise ConfigurationError("pipeline.splitAt names the beginnings of stages in order, without the first one")
        ends = [*begins[1:], len(parts)]
        members = list(parts.values())
        self._parts = [members[begin:end] for begin, end in zip(begins, ends, strict=True)]
        self._shapes = [outputs[end - 1] for end in ends]
        self.stages = Stages(self._owners(model), self._place, options.stages, self.group.device, self.group.gather)

    def _owners(self, model: nn.Module) -> dict[str, int]:
        """For each tensor of the model the place of its stage.

        Raises:
            ConfigurationError: stages on different ranks share one, or a stage has nothing to learn.
        """
        places: dict[int, int] = {}
        names = {id(one): name for name, one in [*model.named_parameters(), *model.named_buffers()]}
        for number, members in enumerate(self._parts):
            place, held = number % self._options.stages, [*(one for part in members for one in part.parameters())]
            if not any(one.requires_grad for one in held):
                raise ConfigurationError(f"stage {number} of the pipeline has no parameters that learn")
            for one in [*held, *(one for part in members for one in part.buffers())]:
                if id(one) in names and places.setdefault(id(one), place) != place:
                    raise ConfigurationError(
                        f"{names[id(one)]} is used by stages of a pipeline on different ranks; give each its own "
                        "weights (tied: false for causal-lm), or choose where to cut with pipeline.splitAt"
                    )
        extra = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
        if extra:
            raise ConfigurationError(f"{extra[0]} is a state beside tensors, which strategy: pipeline does not collect")
        state = model.state_dict(keep_vars=True)
        return {name: places.get(id(value), 0) for name, value in state.items()}

    def _traced(
        self, model: nn.Module, task: Task[Any], parts: Mapping[str, nn.Module], examples: Examples
    ) -> tuple[list[float], list[list[Tensor]]]:
        """Operations of each part, and the shapes of its outputs, without computing anything."""
        costs, outputs = [], []
        given, named = _inputs(task, examples(self._chunk))
        was_training = model.training
        model.eval()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), _precision(self.loop, self.group):
            values: Any = tuple(mode.from_tensor(one) if isinstance(one, Tensor) else one for one in given)
            named = {key: mode.from_tensor(one) if isinstance(one, Tensor) else one for key, one in named.items()}
            for part in parts.values():
                with FlopCounterMode(display=False) as counted:
                    values = _called(part, values, named)
                costs.append(float(counted.get_total_flops()))
                outputs.append([_blank(one) for one in values])
                named = {}
        model.train(was_training)
        return costs, outputs


class _Runner:
    """Runs the share of a step through the schedule."""

    def __init__(self, strategy: Pipelined, task: Task[Any], draws: Draws, busy: Busy) -> None:
        self.strategy, self.task, self.draws, self.busy = strategy, task, draws, busy
        options, device = strategy._options, strategy.group.device
        count = len(strategy._parts)
        self.batches: list[Any] = []
        self.keys: list[Tensor] = []
        self.inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.samples: list[int] = []
        self.step, self.scale = 0, 0.0
        about = {"schedule": options.schedule, "ranks": options.stages, "stages": count}
        about |= {"microBatches": strategy._chunks}
        self._passes = Passes(strategy.group, about) if Passes.are_wanted() else None
        stage = PipelineStage if self._passes is None else partial(RecordedStage, self._passes)
        number = torch.zeros(1, dtype=torch.int64)
        self.stages = [
            stage(
                _Stage(self, index, strategy._parts[index], is_last=index == count - 1),
                index,
                count,
                device,
                input_args=number if index == 0 else tuple(strategy._shapes[index - 1]),
                output_args=torch.zeros((), device=device) if index == count - 1 else tuple(strategy._shapes[index]),
                group=strategy._pipe,
            )
            for index in range(strategy._place, count, options.stages)
        ]
        settings: dict[str, Any] = {"loss_fn": lambda output, number: output, "scale_grads": False}
        if options.schedule in SINGLE:
            self._schedule: Any = SINGLE[options.schedule](self.stages[0], strategy._chunks, **settings)
        else:
            self._schedule = SEVERAL[options.schedule](self.stages, strategy._chunks, **settings)  # type: ignore[arg-type]
        self._parameters = [one for stage in self.stages for one in stage.submod.parameters() if one.requires_grad]

    def run(self, step: int, share: Share) -> Tensor:
        """As strategy.Runner."""
        strategy = self.strategy
        self.step, self.scale = step, 1.0 / len(share.ids)
        count, size = strategy._chunks, strategy._chunk
        # As evenly as it goes, so that no rank has much of what is repeated.
        cuts = list(pairwise([number * share.samples // count for number in range(count + 1)]))
        parts = [share.part(start, end) for start, end in cuts]
        self.samples = [end - start for start, end in cuts]
        self.keys = [padded(keys, len(keys), size) for _, keys in parts]
        self.batches = [padded(batch, len(keys), size) for batch, keys in parts]
        is_first, is_last = self.stages[0].is_first, self.stages[-1].is_last
        if is_first:
            self.inputs = []
            for number, batch in enumerate(self.batches):
                self.seed(number)
                self.inputs.append(_inputs(self.task, batch))
        numbers = torch.arange(count)
        losses: list[Tensor] = []
        try:
            with nullcontext() if self._passes is None else self._passes.step():
                self._schedule.step(
                    *([numbers] if is_first else []),
                    chunk=numbers,
                    target=numbers if is_last else None,
                    losses=losses if is_last else None,
                    return_outputs=False,
                )
        except RuntimeError as error:
            # torch wraps what a stage raises.
            raise error.__cause__ if isinstance(error.__cause__, ConfigurationError) else error from error
        if strategy.dp_size > 1:
            self._add_up()
        total = torch.zeros((), device=strategy.group.device)
        return torch.stack([one.detach() for one in losses]).sum() if is_last else total

    def seed(self, number: int) -> None:
        """What the loss draws for a micro-batch is the same on the first and on the last stage."""
        strategy = self.strategy
        seed_torch(mixed(strategy.loop.seed, self.step, strategy.dp_rank, number), strategy.group.device)

    def _add_up(self) -> None:
        """Gradients of the ranks with the same stages."""
        for dtype in {one.dtype for one in self._parameters}:
            mine = [one for one in self._parameters if one.dtype == dtype]
            used = torch.tensor([one.grad is not None for one in mine], dtype=dtype, device=mine[0].device)
            values = [torch.zeros_like(one) if one.grad is None else one.grad for one in mine]
            flat = torch.cat([used, *(one.reshape(-1) for one in values)])
            dist.all_reduce(flat, group=self.strategy._copies)
            counts, *parts = torch.split(flat, [len(mine), *(one.numel() for one in mine)])
            for one, count, part in zip(mine, counts.tolist(), parts, strict=True):
                if count:
                    one.grad = part.view(one.shape)


class _Stage(nn.Module):
    """The parts of one stage, for one micro-batch after the other."""

    def __init__(self, runner: _Runner, index: int, parts: Sequence[nn.Module], is_last: bool) -> None:
        super().__init__()
        self._runner, self._index, self._is_last = runner, index, is_last
        self.parts = nn.ModuleList(parts)

    def forward(self, *values: Any, chunk: Tensor) -> Any:
        """What the stage before computed → what the next one takes; of the last one the loss."""
        runner, number = self._runner, int(chunk)
        strategy = runner.strategy
        runner.draws.set(strategy.loop.seed, runner.step, runner.keys[number])
        named: dict[str, Any] = {}
        if self._index == 0:
            values, named = runner.inputs[number]
        with runner.busy, _precision(strategy.loop, strategy.group):
            for part in self.parts:
                values, named = _called(part, values, named), {}
            if not self._is_last:
                return values if len(values) > 1 else values[0]
            runner.seed(number)
            output = values if len(values) > 1 else values[0]
            batch, size = runner.batches[number], len(runner.keys[number])
            losses = checked(runner.task, runner.task.loss(_Answer(runner.task, output), batch), size)
            return losses[: runner.samples[number]].float().sum() * runner.scale


class _Called(BaseException):
    """The model was called; not for a loss to handle."""


class _Recorder(nn.Module):
    """Stands in for the model, and takes down with what it is called."""

    def forward(self, *given: Any, **named: Any) -> NoReturn:
        self.given, self.named = given, named
        raise _Called


class _Answer(nn.Module):
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


def evenly(costs: Sequence[float], count: int) -> list[int]:
    """Where to cut parts into so many runs that the dearest is as cheap as can be: the first part of each."""
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


def _inputs(task: Task[Any], batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
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


def _called(part: nn.Module, values: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    found = part(*values, **named)
    return found if isinstance(found, tuple) else (found,)


def _blank(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise ConfigurationError(
            f"a part of the model returns a {type(value).__name__}; parts of a pipeline return tensors"
        )
    # Of gradients torch asks here, too.
    return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.is_floating_point())


def _precision(loop: Loop, group: Group) -> torch.autocast:
    return torch.autocast(group.device.type, dtype=torch.bfloat16, enabled=loop.precision == "bfloat16")
