"""Pipeline parallelism: ranks hold consecutive stages of the model, on a mesh of data and pipe.

The ranks of a generation are numbered worker by worker, and the ranks of one pipeline are consecutive. Ranks with the
same place in their pipelines hold the same stages, and their gradients are summed after the schedule, which is one of
`torch.distributed.pipelining`. A weight that stages on several ranks use, such as a tied embedding, exists on each of
them. Its gradients are then summed over these as well: in this order, so that all of them get the same bits. A stage
may have no weights that learn, for example beside adapters: gradients of its inputs pass through it.

The schedules pass on only the numbers of micro-batches: inputs, targets and the keys of dropout are looked up by them,
so torch cuts no batch. All micro-batches have one size, because buffers are allocated once; where there are too few
samples, the last one is repeated, and its losses are left out of the sum.

Rejected: to trace the model with torch.export (dropout that is keyed by sample draws through a Python object).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from tandem.job import tasks
from tandem.job.strategies import micro_batches
from tandem.job.tasks import Loop
from tandem_trainer.checkpoint.sharding import StagePlacement, copies_of, to_local
from tandem_trainer.data.feeding import padded
from tandem_trainer.data.keyed import mixed, seed_torch
from tandem_trainer.data.supply import Share
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.meter import Stopwatch
from tandem_trainer.micro_batch import PassDidNotFit, is_out_of_memory
from tandem_trainer.models.dropout import Draws
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.passes import PassRecorder, RecordedStage
from tandem_trainer.strategies.replicated import GradientComparison
from tandem_trainer.strategies.scaler import AgreedScaler
from tandem_trainer.strategies.stages import SINGLE, PrecomputedOutput, Stage, cut, inputs_of, run
from tandem_trainer.strategies.strategy import Examples, Plan, Runner, Strategy, clip_parts, mixed_precision
from tandem_trainer.strategies.tensor import REPLICATED, check, split_modules
from tandem_trainer.task import Task
from tandem_trainer.time_slices import shorten_time_slices

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "zeroBubble": ScheduleInterleavedZeroBubble,
}


class Pipelined(Strategy):
    """Pipeline stages with the options of the job."""

    def __init__(self, loop: Loop, group: Group, per_worker: int, tensor_parallel: int = 1) -> None:
        """
        Args:
            per_worker: number of ranks of each worker.
            tensor_parallel: number of them that split the matrices of a stage.

        Raises:
            ConfigurationError: the ranks of the group cannot be divided into pipelines.
        """
        super().__init__(loop, group)
        self._options = options = loop.pipeline or tasks.Pipeline()
        ranks = options.stages * tensor_parallel
        if group.world_size % ranks or per_worker % tensor_parallel:
            times = f" times tensorParallel: {tensor_parallel}" if tensor_parallel > 1 else ""
            raise ConfigurationError(
                f"pipeline.stages: {options.stages}{times} does not divide the {group.world_size} ranks of the group"
            )
        self._degree = tensor_parallel
        self.dp_rank, self.dp_size = group.rank // ranks, group.world_size // ranks
        self.splits = loop.fsdp is not None and self.dp_size > 1
        """Whether the ranks of a place shard the state of its stages."""
        split = 1
        if loop.fsdp is not None:
            split = per_worker // ranks if loop.fsdp.shard_within == "Worker" else self.dp_size
        copies = self.dp_size // split
        sizes = {"replicate": copies, "shard": split, "pipe": options.stages, "tensor": tensor_parallel}
        self._mesh = group.mesh(sizes)
        self._comparison = GradientComparison(self._mesh.get_group("tensor"), group.device)
        # Without sharding the ranks of a place are plain data-parallel copies; manifests name the dimension so.
        if not self.splits:
            sizes["data"] = sizes.pop("replicate")
        self.mesh = {name: size for name, size in sizes.items() if size > 1}
        self._copies, self._pipe = self._mesh.get_group("replicate"), self._mesh.get_group("pipe")
        self._holders = range(0, split * ranks, ranks)
        """Ranks that together hold all rows of a weight of the first place; those of other places follow them."""
        self._place = group.rank % ranks // tensor_parallel
        self._chunks, self._chunk = micro_batches(loop, self.dp_size)
        self._plan: Plan = {}
        self._cut_stages: list[Stage] = []
        self._model: nn.Module | None = None
        self._last: LastPart | None = None
        """The last part of the model, if `fsdp` shards it."""
        self._places_by_name: dict[str, tuple[int, ...]] = {}
        """Places that hold a tensor, by its name; a name that is missing is on all ranks."""
        self._sharing_places: dict[int, tuple[int, ...]] = {}
        """Places that share a parameter that learns, by the parameter's id."""
        self._groups: dict[tuple[int, ...], Any] = {}
        """Process group of this rank's pipeline for each set of places that share a weight."""

    def shard(self, model: nn.Module, task: Task[Any], examples: Examples) -> None:
        is_first = self.stages is None
        if is_first:
            self._cut(model, task, examples)
        # A tensor with two names stays one tensor, also where it is a placeholder.
        placed: dict[int, Tensor] = {}
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            for own, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                is_here = self._place in self._places_by_name.get(prefix + own, (self._place,))
                device = self.group.device if is_here else torch.device("meta")
                if isinstance(tensor, nn.Parameter):
                    moved_parameter = placed.setdefault(id(tensor), self._move(tensor, device))
                    assert isinstance(moved_parameter, nn.Parameter)
                    module._parameters[own] = moved_parameter
                else:
                    module._buffers[own] = tensor.to(device)
        if self._degree == 1 and not self.splits:
            return
        original = dict(model.named_parameters(remove_duplicate=False))
        parts = self._parts()
        if is_first:
            self._model = model
        else:
            # An average: its parts are found by name. A task may remember the model of its last call, so call it again
            # for the trained model.
            parts = {name: part for name, part in task.pipeline_parts(model).items() if name in parts}
            assert self._model is not None
            task.pipeline_parts(self._model)
        own_parts = [*parts.values()]
        if self._degree > 1:
            from tandem_trainer.strategies.fsdp import split_matrices

            here_too = {id(module) for part in own_parts for module in part.modules()}
            split_matrices(model, self._plan, self._mesh["tensor"], lambda module: id(module) in here_too)
        if self.splits:
            self._split(own_parts)
        # Sharding has replaced the parameters. Modules outside of these parts may refer to the old ones: update them.
        replacements = {
            id(original[name]): parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter is not original[name]
        }
        for name, parameter in original.items():
            if id(parameter) in replacements:
                module, _, own = name.rpartition(".")
                model.get_submodule(module)._parameters[own] = replacements[id(parameter)]
        self._sharing_places |= {
            id(parameter): self._sharing_places[old]
            for old, parameter in replacements.items()
            if old in self._sharing_places
        }

    def _parts(self) -> dict[str, nn.Module]:
        """Return the parts on this rank, by name."""
        own_stages = self._cut_stages[self._place :: self._options.stages]
        return {name: part for stage in own_stages for name, part in stage.parts.items()}

    def stage_modules(self, stage: int) -> list[nn.Module]:
        """Return the modules to call for a stage: its parts, as they are split."""
        return [
            self._last if self._last is not None and part is self._last.part else part
            for part in self._cut_stages[stage].parts.values()
        ]

    def _split(self, parts: Sequence[nn.Module]) -> None:
        """Shard the weights of parts over the ranks of this place, part by part.

        Raises:
            ConfigurationError: two parts share a weight.
        """
        from tandem_trainer.strategies.fsdp import fully_shard, settings_of

        assert self.loop.fsdp is not None
        last = [*self._cut_stages[-1].parts.values()][-1]
        ids: set[int] = set()
        for part in parts:
            weights = {id(parameter) for parameter in part.parameters()}
            if weights & ids:
                raise ConfigurationError(
                    "parts of the model on the same rank share a weight, which fsdp in a pipeline cannot split; choose "
                    "where to cut with pipeline.splitAt"
                )
            ids |= weights
            if self.loop.compile:
                part.compile()
            unit = part
            if part is last:
                unit = self._last = LastPart(part)
            fully_shard(unit, **settings_of(self.loop, self.loop.fsdp, self._mesh))

    def compare(self) -> None:
        """Check that ranks that split matrices agree on the gradients of replicated weights."""
        assert self._model is not None or self._degree == 1
        if self._model is not None:
            self._comparison.check(self._model.named_parameters())

    def scaler(self) -> torch.amp.GradScaler:
        return AgreedScaler(self.group.device.type, enabled=self.loop.precision == "float16")

    def runner(self, task: Task[Any], draws: Draws, busy: Stopwatch, scaler: torch.amp.GradScaler) -> Runner:
        return _Runner(self, task, draws, busy, scaler).run

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
        ranks = self.dp_size * self._degree
        copies = [
            copies_of(parameter, ranks) * len(self._sharing_places.get(id(parameter), (self._place,)))
            for parameter in with_gradients
        ]
        return clip_parts(
            [to_local(parameter.grad) for parameter in with_gradients if parameter.grad is not None],
            copies,
            max_norm,
            self.group.device,
        )

    def _move(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        if device.type != "meta":
            parameter.data = parameter.data.to(device)  # keep the object, which several parts may share
            return parameter
        return nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)

    def _cut(self, model: nn.Module, task: Task[Any], examples: Examples) -> None:
        """Decide which part of the model is on which stage.

        Raises:
            ConfigurationError: the model cannot be cut in this way.
        """
        # The model is still on the CPU.
        precision = mixed_precision(self.loop, torch.device("cpu"))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._cut_stages = cut(model, task, self._options, examples(self._chunk), mode, precision)
        by_rows = self._sharded_by_rows(model, task)
        extra = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
        if extra:
            raise ConfigurationError(
                f"{extra[0]} is a state other than tensors, which strategy: pipeline does not support"
            )
        state = model.state_dict(keep_vars=True)
        places = holders([[*stage.parts.values()] for stage in self._cut_stages], self._options.stages)
        places_by_id = placement(model, places, self._options.stages)
        named_tensors = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        # Which places hold each tensor, and which places must sum the gradients of a shared one.
        for name, tensor in chain(*named_tensors):
            if id(tensor) not in places_by_id:
                continue
            self._places_by_name[name] = tensor_places = places_by_id[id(tensor)]
            if len(tensor_places) == 1 or id(tensor) not in places:
                continue
            if not isinstance(tensor, nn.Parameter):
                raise ConfigurationError(
                    f"{name} is used by stages of a pipeline on different ranks and is no weight, so each would change "
                    "its own copy of it; choose where to cut with pipeline.splitAt"
                )
            if tensor.requires_grad:
                self._sharing_places[id(tensor)] = tensor_places
        self._groups = self._create_groups({*self._sharing_places.values()})
        # A checkpoint needs to know the rank that writes each tensor, and where its other parts are.
        self.stages = StagePlacement(
            {name: places_by_id[id(value)][0] * self._degree for name, value in state.items()},
            self._place * self._degree,
            self._options.stages * self._degree,
            self.group.device,
            self.group.gather,
            frozenset(name for name, value in state.items() if len(places_by_id[id(value)]) > 1),
            frozenset(name for name, value in state.items() if id(value) in by_rows),
            lambda owner: tuple(owner + rank for rank in self._holders),
        )

    def _sharded_by_rows(self, model: nn.Module, task: Task[Any]) -> set[int]:
        """Return the ids of the weights that each rank of a place holds by rows.

        Raises:
            ConfigurationError: the task has no plan for tensor parallelism, or not for this model.
        """
        matrices: set[int] = set()
        if self._degree > 1:
            self._plan = task.tensor_plan(model, self._degree)
            check(self._plan, model, self._degree)
            split = (module for _, module, style in split_modules(self._plan, model) if style != REPLICATED)
            matrices = {id(parameter) for module in split for parameter in module.parameters()}
        if not self.splits:
            return set()
        parts = (part for stage in self._cut_stages for part in stage.parts.values())
        return {id(parameter) for part in parts for parameter in part.parameters()} - matrices

    def _create_groups(self, sets: set[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
        """Create process groups of the ranks of this pipeline that hold the same weights. Collective."""
        groups: dict[tuple[int, ...], Any] = {}
        ranks, degree = self._options.stages * self._degree, self._degree
        first_rank = self.dp_rank * ranks + self.group.rank % degree
        for places in sorted(sets):
            if len(places) == self._options.stages:
                groups[places] = self._pipe
                continue
            # `new_group` is a collective of all ranks, also of those outside of the group: all create all groups, in
            # one order.
            for first in (pipeline * ranks + part for pipeline in range(self.dp_size) for part in range(degree)):
                group = dist.new_group([first + place * degree for place in places], timeout=self.group.timeout)
                if first == first_rank:
                    groups[places] = group
        return groups


def holders(stages: Sequence[Sequence[nn.Module]], ranks: int) -> dict[int, tuple[int, ...]]:
    """Return the places in a pipeline that use each tensor of a model, by its id, in order.

    Args:
        stages: parts of each stage.
        ranks: number of ranks of the pipeline.
    """
    places_by_id: dict[int, set[int]] = {}
    for number, parts in enumerate(stages):
        for tensor in (tensor for part in parts for tensor in (*part.parameters(), *part.buffers())):
            places_by_id.setdefault(id(tensor), set()).add(number % ranks)
    return {key: tuple(sorted(places)) for key, places in places_by_id.items()}


def placement(model: nn.Module, used: Mapping[int, tuple[int, ...]], ranks: int) -> dict[int, tuple[int, ...]]:
    """Return the places in a pipeline that hold each weight and each tensor of a model's state, by its id, in order.
    All other tensors, such as computed tables, are on all ranks.

    Args:
        used: result of `holders`.
        ranks: number of ranks of the pipeline.
    """
    # Tensors that no stage uses are small, such as the digest of the base model under adapters.
    everywhere = tuple(range(ranks))
    state = {id(tensor): used.get(id(tensor), everywhere) for tensor in model.state_dict(keep_vars=True).values()}
    # A model may omit frozen weights from its state.
    return state | {id(parameter): used[id(parameter)] for parameter in model.parameters() if id(parameter) in used}


def with_early_receives(actions: Sequence[Any], ahead: int = 1) -> list[Any]:
    """Post each receive of a rank earlier, by a number of compute actions. Receives keep their order.

    gloo starts a transfer when the receiver has posted the receive. torch's schedules post it after the compute action
    during which the peer sends, so the transfer would start only when that action ends. Not for NCCL, which runs the
    sends and receives between two ranks in the order in which they are issued: a send would wait for the receive.

    Args:
        actions: actions of one rank, in a schedule of torch.distributed.pipelining with several stages per rank.
        ahead: number of compute actions.
    """
    reordered: list[Any] = []
    earliest = 0
    for action in actions:
        if not action.computation_type.name.startswith("RECV"):
            reordered.append(action)
            continue
        place, passed = len(reordered), 0
        # Never before an earlier receive: both sides match transfers by their order.
        while place > earliest and passed < ahead:
            place -= 1
            passed += reordered[place].is_compute_op
        reordered.insert(place, action)
        earliest = place + 1
    return reordered


class _Runner:
    """Runs the share of a step through the schedule."""

    def __init__(
        self, strategy: Pipelined, task: Task[Any], draws: Draws, busy: Stopwatch, scaler: torch.amp.GradScaler
    ) -> None:
        self.strategy, self.task, self.draws, self.busy, self.scaler = strategy, task, draws, busy, scaler
        options, device = strategy._options, strategy.group.device
        count = len(strategy._cut_stages)
        self.batches: list[Any] = []
        self.keys: list[Tensor] = []
        self.inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.samples: list[int] = []
        self.losses: list[Tensor] = []
        """Losses of the micro-batches of this step, where they are computed; not scaled."""
        self.step, self.scale = 0, 0.0
        about = {"schedule": options.schedule, "ranks": options.stages, "stages": count}
        rank_stride = strategy._degree
        about |= {"microBatches": strategy._chunks}
        self._passes = PassRecorder(strategy.group, about, rank_stride) if PassRecorder.is_enabled() else None
        stage = PipelineStage if self._passes is None else partial(RecordedStage, self._passes)
        number, loss = torch.zeros(1, dtype=torch.int64), torch.zeros((), device=device)
        # Only the last stage has losses, but every rank needs the scaler's scale, which it creates with the first loss.
        scaler.scale(loss)
        self.stages = [
            stage(
                _Stage(self, index, strategy.stage_modules(index), is_last=index == count - 1),
                index,
                count,
                device,
                input_args=number if index == 0 else tuple(strategy._cut_stages[index - 1].outputs),
                output_args=loss if index == count - 1 else tuple(strategy._cut_stages[index].outputs),
                group=strategy._pipe,
            )
            for index in range(strategy._place, count, options.stages)
        ]
        settings: dict[str, Any] = {"loss_fn": lambda output, number: output, "scale_grads": False}
        stages: Any = self.stages[0] if options.schedule in SINGLE else self.stages
        self._schedule: Any = SCHEDULES[options.schedule](stages, strategy._chunks, **settings)
        if device.type == "cpu" and (orders := getattr(self._schedule, "pipeline_order_with_comms", None)):
            orders[strategy._place] = with_early_receives(orders[strategy._place])
        parameters = {
            id(parameter): parameter
            for stage in self.stages
            for parameter in stage.submod.parameters()
            if parameter.requires_grad
        }
        self._parameters = [*parameters.values()]
        # The same order on all ranks, for the collectives of `run`.
        sharers = strategy._sharing_places.items()
        self._shared = [(parameters[key], strategy._groups[places]) for key, places in sharers if key in parameters]
        shorten_time_slices()

    def run(self, step: int, share: Share) -> Tensor:
        """Run a share, as strategy.Runner.

        Raises:
            PassDidNotFit: a micro-batch ran out of memory.
        """
        strategy = self.strategy
        # Gradients of sharded weights are averaged over the pipelines, all others are summed.
        averaged = strategy.dp_size if strategy.splits else 1
        self.step, self.scale = step, averaged / len(share.ids)
        count, size = strategy._chunks, strategy._chunk
        # As evenly as possible, so that no micro-batch has many repeated samples.
        cuts = list(pairwise([number * share.samples // count for number in range(count + 1)]))
        parts = [share.part(start, end) for start, end in cuts]
        self.samples = [end - start for start, end in cuts]
        self.keys = [padded(keys, len(keys), size) for _, keys in parts]
        self.batches = [padded(batch, len(keys), size) for batch, keys in parts]
        is_first, is_last = self.stages[0].is_first, self.stages[-1].is_last
        numbers = torch.arange(count)
        self.losses = []
        try:
            # The loss runs twice for a micro-batch: here for the model's inputs, on the last stage for its value.
            if is_first:
                self.inputs = []
                for number, batch in enumerate(self.batches):
                    self.seed(number)
                    self.inputs.append(inputs_of(self.task, batch))
            with nullcontext() if self._passes is None else self._passes.step():
                self._schedule.step(
                    *([numbers] if is_first else []),
                    chunk=numbers,
                    target=numbers if is_last else None,
                    return_outputs=False,
                )
        except RuntimeError as error:
            # torch wraps the errors of a stage.
            cause = error.__cause__ or error
            if isinstance(cause, ConfigurationError):
                raise cause from error
            if isinstance(cause, RuntimeError) and is_out_of_memory(cause):
                raise PassDidNotFit(size) from cause
            raise
        # First over the pipelines, then over the places: in this order all copies of a shared weight get the same bits.
        if strategy.dp_size > 1 and not strategy.splits:
            self._sum_gradients()
        for parameter, sharers in self._shared:
            # A rank without a gradient takes part with zeros, if any other rank has one.
            used = torch.tensor([parameter.grad is not None], dtype=torch.float32, device=parameter.device)
            dist.all_reduce(used, group=sharers)
            if used.item():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(to_local(parameter.grad), group=sharers)
        strategy.compare()
        if not is_last:
            return torch.zeros((), device=strategy.group.device)
        # Ranks that work on the same samples report equal shares of their loss.
        return torch.stack(self.losses).sum() / (averaged * strategy._degree)

    def seed(self, number: int) -> None:
        """Seed the loss of a micro-batch, so that it draws the same on the first and on the last stage."""
        strategy = self.strategy
        seed_torch(mixed(strategy.loop.seed, self.step, strategy.dp_rank, number), strategy.group.device)

    def _sum_gradients(self) -> None:
        """Sum gradients over the ranks with the same stages."""
        for dtype in {parameter.dtype for parameter in self._parameters}:
            parameters = [parameter for parameter in self._parameters if parameter.dtype == dtype]
            device = to_local(parameters[0]).device
            used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=dtype, device=device)
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            values = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
            # One collective for each dtype: which gradients exist, and all their values, flat.
            flat = torch.cat([used, *(value.reshape(-1) for value in values)])
            dist.all_reduce(flat, group=self.strategy._copies)
            counts, *parts = torch.split(flat, [len(parameters), *(value.numel() for value in values)])
            for parameter, value, count, part in zip(parameters, values, counts.tolist(), parts, strict=True):
                if count:
                    value.copy_(part.view(value.shape))
                else:
                    # No rank has computed it: the optimizer must skip the parameter, not update it with zeros.
                    parameter.grad = None


class _Stage(nn.Module):
    """The parts of one stage, called for one micro-batch after the other."""

    def __init__(self, runner: _Runner, index: int, parts: Sequence[nn.Module], is_last: bool) -> None:
        super().__init__()
        self._runner, self._index, self._is_last = runner, index, is_last
        self._last = next((part for part in parts if isinstance(part, LastPart)), None)
        self.chain = _Chain(parts)
        strategy = runner.strategy
        if strategy.splits:
            from tandem_trainer.strategies.fsdp import fully_shard, prefetch, settings_of

            assert strategy.loop.fsdp is not None
            # A common root for the parts, which are sharded one by one, so that they can prefetch each other.
            fully_shard(self.chain, **settings_of(strategy.loop, strategy.loop.fsdp, strategy._mesh))
            prefetch(parts, strategy.loop.fsdp.prefetch)
        elif strategy.loop.compile:
            # Only the chain: with the lookup of a micro-batch by its number, the compiler would make a graph for each
            # number.
            self.chain.compile()

    def forward(self, *values: Any, chunk: Tensor) -> Any:
        """Compute the inputs of the next stage from those of this one; the last stage computes the loss."""
        runner, number = self._runner, int(chunk)
        strategy = runner.strategy
        runner.draws.set(strategy.loop.seed, runner.step, runner.keys[number])
        kwargs: dict[str, Any] = {}
        if self._index == 0:
            values, kwargs = runner.inputs[number]
        with runner.busy, mixed_precision(strategy.loop, strategy.group.device):
            if self._last is not None:
                self._last.then = partial(self._loss, number)
                (loss,) = self.chain(values, kwargs)
                return loss
            values = self.chain(values, kwargs)
            output = values if len(values) > 1 else values[0]
            if self._is_last:
                return self._loss(number, output)
            # Outputs on a device may have another dtype than on the CPU, where they were traced.
            outputs = strategy._cut_stages[self._index].outputs
            values = tuple(value.to(traced.dtype) for value, traced in zip(values, outputs, strict=True))
            return values if len(values) > 1 else values[0]

    def _loss(self, number: int, output: Any) -> Tensor:
        runner = self._runner
        runner.seed(number)
        batch, size = runner.batches[number], len(runner.keys[number])
        samples, answer = runner.samples[number], PrecomputedOutput(runner.task, output)
        loss = runner.task.stage_loss(answer, batch, size, samples, runner.scale).float()
        runner.losses.append(loss.detach())
        return runner.scaler.scale(loss)


class LastPart(nn.Module):
    """The last part of a model that `fsdp` shards, together with the loss of its output: a task may compute the loss
    with weights of that part, which are gathered only meanwhile."""

    then: Callable[[Any], Tensor]

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *values: Any, **kwargs: Any) -> Tensor:
        """Compute the loss from the part's inputs."""
        return self.then(self.part(*values, **kwargs))


class _Chain(nn.Module):
    """Parts of a model, one after the other."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, values: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Run the parts, as stages.run."""
        return run([*self.parts], values, kwargs)
