"""Pipeline parallelism: ranks hold consecutive stages of the model, on a mesh of data and pipe.

The ranks of a generation are numbered worker by worker, and the ranks of one pipeline follow each other. Those with the
same place in it hold the same stages, and their gradients are added up after the schedule, which is one of
`torch.distributed.pipelining`. A weight that stages on several ranks use, such as a tied embedding, lies on each of
them. Its gradients are then added up over these as well: in this order, so that all of them get the same bits. A stage
may have nothing to learn, as those beside adapters have: gradients of its inputs go back through it.

The schedules pass on nothing but the numbers of micro-batches: inputs, targets and the keys of dropout are looked up by
them, so torch cuts no batch. All micro-batches have one size, because buffers are made once; where samples do not
suffice, the last one is repeated, and its losses are left out of the sum.

Rejected: to trace the model with torch.export (dropout that is keyed by sample draws through an object of Python's).
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

from tandem import tasks
from tandem.strategies import micro_batches
from tandem.tasks import Loop
from tandem_trainer.checkpoint.sharding import Stages, copies_of, here
from tandem_trainer.data.feeding import padded
from tandem_trainer.data.keyed import mixed, seed_torch
from tandem_trainer.data.supply import Share
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.meter import Busy
from tandem_trainer.micro_batch import PassDidNotFit, is_out_of_memory
from tandem_trainer.models.dropout import Draws
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.passes import Passes, RecordedStage
from tandem_trainer.strategies.replicated import Comparison
from tandem_trainer.strategies.scaler import AgreedScaler
from tandem_trainer.strategies.stages import SINGLE, Answer, Stage, cut, inputs_of, run
from tandem_trainer.strategies.strategy import Examples, Plan, Runner, Strategy, clip_parts, mixed_precision
from tandem_trainer.strategies.tensor import REPLICATED, check, split_modules
from tandem_trainer.task import Task
from tandem_trainer.time_slices import shorten

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "zeroBubble": ScheduleInterleavedZeroBubble,
}


class Pipelined(Strategy):
    """Stages with the options of the job."""

    def __init__(self, loop: Loop, group: Group, per_worker: int, tensor_parallel: int = 1) -> None:
        """
        Args:
            per_worker: ranks of each worker.
            tensor_parallel: how many of them split the matrices of a stage.

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
        """Whether the ranks of a place split the state of its stages."""
        split = 1
        if loop.fsdp is not None:
            split = per_worker // ranks if loop.fsdp.shard_within == "Worker" else self.dp_size
        copies = self.dp_size // split
        sizes = {"replicate": copies, "shard": split, "pipe": options.stages, "tensor": tensor_parallel}
        self._mesh = group.mesh(sizes)
        self._comparison = Comparison(self._mesh.get_group("tensor"), group.device)
        if not self.splits:
            sizes["data"] = sizes.pop("replicate")
        self.mesh = {name: size for name, size in sizes.items() if size > 1}
        self._copies, self._pipe = self._mesh.get_group("replicate"), self._mesh.get_group("pipe")
        self._holders = range(0, split * ranks, ranks)
        """Ranks that hold all rows of a weight of the first place together; those of others follow them."""
        self._place = group.rank % ranks // tensor_parallel
        self._chunks, self._chunk = micro_batches(loop, self.dp_size)
        self._plan: Plan = {}
        self._cuts: list[Stage] = []
        self._model: nn.Module | None = None
        self._last: Last | None = None
        """The last part of the model, where `fsdp` splits it."""
        self._held: dict[str, tuple[int, ...]] = {}
        """By the name of a tensor, the places that hold it; one that is missing is on all ranks."""
        self._sharers: dict[int, tuple[int, ...]] = {}
        """By the id of a parameter that several places hold and learn: which."""
        self._groups: dict[tuple[int, ...], Any] = {}
        """Of this rank's pipeline, by places: the process group of those that share a weight."""

    def shard(self, model: nn.Module, task: Task[Any], examples: Examples) -> None:
        is_first = self.stages is None
        if is_first:
            self._cut(model, task, examples)
        # A tensor with two names stays one tensor, also where it is a placeholder.
        moved: dict[int, Tensor] = {}
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            for own, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                is_here = self._place in self._held.get(prefix + own, (self._place,))
                device = self.group.device if is_here else torch.device("meta")
                if isinstance(tensor, nn.Parameter):
                    found = moved.setdefault(id(tensor), self._moved(tensor, device))
                    assert isinstance(found, nn.Parameter)
                    module._parameters[own] = found
                else:
                    module._buffers[own] = tensor.to(device)
        if self._degree == 1 and not self.splits:
            return
        before = dict(model.named_parameters(remove_duplicate=False))
        parts = self._parts()
        if is_first:
            self._model = model
        else:
            # An average, of which nobody knows the parts yet. A task may remember of which model it was asked last.
            parts = {name: part for name, part in task.pipeline_parts(model).items() if name in parts}
            assert self._model is not None
            task.pipeline_parts(self._model)
        mine = [*parts.values()]
        if self._degree > 1:
            from tandem_trainer.strategies.fsdp import split_matrices

            here_too = {id(module) for part in mine for module in part.modules()}
            split_matrices(model, self._plan, self._mesh["tensor"], lambda module: id(module) in here_too)
        if self.splits:
            self._split(mine)
        # The weights are other objects now, also where a module outside of these parts has one of them.
        made = {
            id(before[name]): one
            for name, one in model.named_parameters(remove_duplicate=False)
            if one is not before[name]
        }
        for name, one in before.items():
            if id(one) in made:
                module, _, own = name.rpartition(".")
                model.get_submodule(module)._parameters[own] = made[id(one)]
        self._sharers |= {id(one): self._sharers[old] for old, one in made.items() if old in self._sharers}

    def _parts(self) -> dict[str, nn.Module]:
        """Those on this rank, by name."""
        mine = self._cuts[self._place :: self._options.stages]
        return {name: part for stage in mine for name, part in stage.parts.items()}

    def units(self, stage: int) -> list[nn.Module]:
        """What is called of a stage: its parts, as they are split."""
        return [
            self._last if self._last is not None and part is self._last.part else part
            for part in self._cuts[stage].parts.values()
        ]

    def _split(self, parts: Sequence[nn.Module]) -> None:
        """Split the weights of parts over the ranks of this place, part by part.

        Raises:
            ConfigurationError: two of them share a weight.
        """
        from tandem_trainer.strategies.fsdp import fully_shard, settings_of

        assert self.loop.fsdp is not None
        last = [*self._cuts[-1].parts.values()][-1]
        seen: set[int] = set()
        for part in parts:
            weights = {id(one) for one in part.parameters()}
            if weights & seen:
                raise ConfigurationError(
                    "parts of the model on the same rank share a weight, which fsdp in a pipeline cannot split; choose "
                    "where to cut with pipeline.splitAt"
                )
            seen |= weights
            if self.loop.compile:
                part.compile()
            unit = part
            if part is last:
                unit = self._last = Last(part)
            fully_shard(unit, **settings_of(self.loop, self.loop.fsdp, self._mesh))

    def compare(self) -> None:
        """Look whether ranks that split matrices agree on the gradients of what they do not split."""
        assert self._model is not None or self._degree == 1
        if self._model is not None:
            self._comparison.look(self._model.named_parameters())

    def scaler(self) -> torch.amp.GradScaler:
        return AgreedScaler(self.group.device.type, enabled=self.loop.precision == "float16")

    def runner(self, task: Task[Any], draws: Draws, busy: Busy, scaler: torch.amp.GradScaler) -> Runner:
        return _Runner(self, task, draws, busy, scaler).run

    def clip(self, parameters: Sequence[Tensor], most: float) -> Tensor:
        held = [one for one in parameters if one.grad is not None]
        ranks = self.dp_size * self._degree
        copies = [copies_of(one, ranks) * len(self._sharers.get(id(one), (self._place,))) for one in held]
        return clip_parts([here(one.grad) for one in held if one.grad is not None], copies, most, self.group.device)

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
        # The model is on the CPU yet.
        precision = mixed_precision(self.loop, torch.device("cpu"))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._cuts = cut(model, task, self._options, examples(self._chunk), mode, precision)
        by_rows = self._by_rows(model, task)
        extra = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
        if extra:
            raise ConfigurationError(f"{extra[0]} is a state beside tensors, which strategy: pipeline does not collect")
        state = model.state_dict(keep_vars=True)
        places = holders([[*one.parts.values()] for one in self._cuts], self._options.stages)
        kept = placement(model, places, self._options.stages)
        named = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        for name, tensor in chain(*named):
            if id(tensor) not in kept:
                continue
            self._held[name] = found = kept[id(tensor)]
            if len(found) == 1 or id(tensor) not in places:
                continue
            if not isinstance(tensor, nn.Parameter):
                raise ConfigurationError(
                    f"{name} is used by stages of a pipeline on different ranks and is no weight, so each would change "
                    "its own copy of it; choose where to cut with pipeline.splitAt"
                )
            if tensor.requires_grad:
                self._sharers[id(tensor)] = found
        self._groups = self._made_groups({*self._sharers.values()})
        self.stages = Stages(
            {name: kept[id(value)][0] * self._degree for name, value in state.items()},
            self._place * self._degree,
            self._options.stages * self._degree,
            self.group.device,
            self.group.gather,
            frozenset(name for name, value in state.items() if len(kept[id(value)]) > 1),
            frozenset(name for name, value in state.items() if id(value) in by_rows),
            lambda owner: tuple(owner + rank for rank in self._holders),
        )

    def _by_rows(self, model: nn.Module, task: Task[Any]) -> set[int]:
        """The ids of the weights of which each rank of a place is to hold rows.

        Raises:
            ConfigurationError: the task has no plan for tensor parallelism, or not for this model.
        """
        matrices: set[int] = set()
        if self._degree > 1:
            self._plan = task.tensor_plan(model, self._degree)
            check(self._plan, model, self._degree)
            split = (module for _, module, style in split_modules(self._plan, model) if style != REPLICATED)
            matrices = {id(one) for module in split for one in module.parameters()}
        if not self.splits:
            return set()
        parts = (part for stage in self._cuts for part in stage.parts.values())
        return {id(one) for part in parts for one in part.parameters()} - matrices

    def _made_groups(self, sets: set[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
        """Process groups of the ranks of this pipeline that hold the same weights. Collective."""
        found: dict[tuple[int, ...], Any] = {}
        ranks, degree = self._options.stages * self._degree, self._degree
        mine = self.dp_rank * ranks + self.group.rank % degree
        for places in sorted(sets):
            if len(places) == self._options.stages:
                found[places] = self._pipe
                continue
            for first in (pipeline * ranks + part for pipeline in range(self.dp_size) for part in range(degree)):
                made = dist.new_group([first + place * degree for place in places], timeout=self.group.timeout)
                if first == mine:
                    found[places] = made
        return found


def holders(stages: Sequence[Sequence[nn.Module]], ranks: int) -> dict[int, tuple[int, ...]]:
    """The places in a pipeline that use each tensor of a model, by its id, in order.

    Args:
        stages: the parts of each.
        ranks: of the pipeline.
    """
    found: dict[int, set[int]] = {}
    for number, parts in enumerate(stages):
        for one in (one for part in parts for one in (*part.parameters(), *part.buffers())):
            found.setdefault(id(one), set()).add(number % ranks)
    return {one: tuple(sorted(places)) for one, places in found.items()}


def placement(model: nn.Module, used: Mapping[int, tuple[int, ...]], ranks: int) -> dict[int, tuple[int, ...]]:
    """The places in a pipeline that hold each weight and each tensor of a model's state, by its id, in order. All
    other tensors, such as tables that are computed, are on all ranks.

    Args:
        used: what `holders` has found.
        ranks: of the pipeline.
    """
    # What no stage uses is small, such as the digest of the base under adapters.
    everywhere = tuple(range(ranks))
    found = {id(one): used.get(id(one), everywhere) for one in model.state_dict(keep_vars=True).values()}
    # Weights that never change may be left out of the state.
    return found | {id(one): used[id(one)] for one in model.parameters() if id(one) in used}


def received_early(actions: Sequence[Any], ahead: int = 1) -> list[Any]:
    """Post each receive of a rank earlier, by a number of compute actions. Receives keep their order.

    gloo starts a transfer when the receiver has posted the receive. torch's schedules post it after the compute action
    during which the peer sends, so the transfer would start only when that action ends. Not for NCCL, which runs the
    sends and receives between two ranks in the order in which they are issued: a send would wait for the receive.

    Args:
        actions: of one rank, in a schedule of torch.distributed.pipelining with several stages per rank.
        ahead: number of compute actions.
    """
    found: list[Any] = []
    earliest = 0
    for action in actions:
        if not action.computation_type.name.startswith("RECV"):
            found.append(action)
            continue
        place, passed = len(found), 0
        while place > earliest and passed < ahead:
            place -= 1
            passed += found[place].is_compute_op
        found.insert(place, action)
        earliest = place + 1
    return found


class _Runner:
    """Runs the share of a step through the schedule."""

    def __init__(
        self, strategy: Pipelined, task: Task[Any], draws: Draws, busy: Busy, scaler: torch.amp.GradScaler
    ) -> None:
        self.strategy, self.task, self.draws, self.busy, self.scaler = strategy, task, draws, busy, scaler
        options, device = strategy._options, strategy.group.device
        count = len(strategy._cuts)
        self.batches: list[Any] = []
        self.keys: list[Tensor] = []
        self.inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.samples: list[int] = []
        self.losses: list[Tensor] = []
        """Of the micro-batches of this step, where they are computed; not scaled."""
        self.step, self.scale = 0, 0.0
        about = {"schedule": options.schedule, "ranks": options.stages, "stages": count}
        apart = strategy._degree
        about |= {"microBatches": strategy._chunks}
        self._passes = Passes(strategy.group, about, apart) if Passes.are_wanted() else None
        stage = PipelineStage if self._passes is None else partial(RecordedStage, self._passes)
        number, loss = torch.zeros(1, dtype=torch.int64), torch.zeros((), device=device)
        # The last stage alone has losses, and a scaler has a scale once it was given one.
        scaler.scale(loss)
        self.stages = [
            stage(
                _Stage(self, index, strategy.units(index), is_last=index == count - 1),
                index,
                count,
                device,
                input_args=number if index == 0 else tuple(strategy._cuts[index - 1].outputs),
                output_args=loss if index == count - 1 else tuple(strategy._cuts[index].outputs),
                group=strategy._pipe,
            )
            for index in range(strategy._place, count, options.stages)
        ]
        settings: dict[str, Any] = {"loss_fn": lambda output, number: output, "scale_grads": False}
        held: Any = self.stages[0] if options.schedule in SINGLE else self.stages
        self._schedule: Any = SCHEDULES[options.schedule](held, strategy._chunks, **settings)
        if device.type == "cpu" and (orders := getattr(self._schedule, "pipeline_order_with_comms", None)):
            orders[strategy._place] = received_early(orders[strategy._place])
        parameters = {id(one): one for stage in self.stages for one in stage.submod.parameters() if one.requires_grad}
        self._parameters = [*parameters.values()]
        # In one order on all ranks.
        sharers = strategy._sharers.items()
        self._shared = [(parameters[key], strategy._groups[places]) for key, places in sharers if key in parameters]
        shorten()

    def run(self, step: int, share: Share) -> Tensor:
        """As strategy.Runner.

        Raises:
            PassDidNotFit: a micro-batch ran out of memory.
        """
        strategy = self.strategy
        # Gradients of weights that are split are averaged over the pipelines, all others are added up.
        averaged = strategy.dp_size if strategy.splits else 1
        self.step, self.scale = step, averaged / len(share.ids)
        count, size = strategy._chunks, strategy._chunk
        # As evenly as it goes, so that no rank has much of what is repeated.
        cuts = list(pairwise([number * share.samples // count for number in range(count + 1)]))
        parts = [share.part(start, end) for start, end in cuts]
        self.samples = [end - start for start, end in cuts]
        self.keys = [padded(keys, len(keys), size) for _, keys in parts]
        self.batches = [padded(batch, len(keys), size) for batch, keys in parts]
        is_first, is_last = self.stages[0].is_first, self.stages[-1].is_last
        numbers = torch.arange(count)
        self.losses = []
        try:
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
            # torch wraps what a stage raises.
            cause = error.__cause__ or error
            if isinstance(cause, ConfigurationError):
                raise cause from error
            if isinstance(cause, RuntimeError) and is_out_of_memory(cause):
                raise PassDidNotFit(size) from cause
            raise
        if strategy.dp_size > 1 and not strategy.splits:
            self._add_up()
        for one, sharers in self._shared:
            used = torch.tensor([one.grad is not None], dtype=torch.float32, device=one.device)
            dist.all_reduce(used, group=sharers)
            if used.item():
                one.grad = torch.zeros_like(one) if one.grad is None else one.grad
                dist.all_reduce(here(one.grad), group=sharers)
        strategy.compare()
        if not is_last:
            return torch.zeros((), device=strategy.group.device)
        # Ranks that work on the same samples share what they say of them.
        return torch.stack(self.losses).sum() / (averaged * strategy._degree)

    def seed(self, number: int) -> None:
        """What the loss draws for a micro-batch is the same on the first and on the last stage."""
        strategy = self.strategy
        seed_torch(mixed(strategy.loop.seed, self.step, strategy.dp_rank, number), strategy.group.device)

    def _add_up(self) -> None:
        """Gradients of the ranks with the same stages."""
        for dtype in {one.dtype for one in self._parameters}:
            mine = [one for one in self._parameters if one.dtype == dtype]
            device = here(mine[0]).device
            used = torch.tensor([one.grad is not None for one in mine], dtype=dtype, device=device)
            for one in mine:
                one.grad = torch.zeros_like(one) if one.grad is None else one.grad
            values = [here(one.grad) for one in mine if one.grad is not None]
            flat = torch.cat([used, *(one.reshape(-1) for one in values)])
            dist.all_reduce(flat, group=self.strategy._copies)
            counts, *parts = torch.split(flat, [len(mine), *(one.numel() for one in values)])
            for one, value, count, part in zip(mine, values, counts.tolist(), parts, strict=True):
                if count:
                    value.copy_(part.view(value.shape))
                else:
                    one.grad = None


class _Stage(nn.Module):
    """The parts of one stage, for one micro-batch after the other."""

    def __init__(self, runner: _Runner, index: int, parts: Sequence[nn.Module], is_last: bool) -> None:
        super().__init__()
        self._runner, self._index, self._is_last = runner, index, is_last
        self._last = next((part for part in parts if isinstance(part, Last)), None)
        self.chain = _Chain(parts)
        strategy = runner.strategy
        if strategy.splits:
            from tandem_trainer.strategies.fsdp import fully_shard, prefetch, settings_of

            assert strategy.loop.fsdp is not None
            # So that its parts, which are split each by itself, know of each other.
            fully_shard(self.chain, **settings_of(strategy.loop, strategy.loop.fsdp, strategy._mesh))
            prefetch(parts, strategy.loop.fsdp.prefetch)
        elif strategy.loop.compile:
            # Without what looks up a micro-batch by its number, of which the compiler would make a graph each.
            self.chain.compile()

    def forward(self, *values: Any, chunk: Tensor) -> Any:
        """What the stage before computed → what the next one takes; of the last one the loss."""
        runner, number = self._runner, int(chunk)
        strategy = runner.strategy
        runner.draws.set(strategy.loop.seed, runner.step, runner.keys[number])
        named: dict[str, Any] = {}
        if self._index == 0:
            values, named = runner.inputs[number]
        with runner.busy, mixed_precision(strategy.loop, strategy.group.device):
            if self._last is not None:
                self._last.then = partial(self._loss, number)
                (loss,) = self.chain(values, named)
                return loss
            values = self.chain(values, named)
            output = values if len(values) > 1 else values[0]
            if self._is_last:
                return self._loss(number, output)
            # A device may leave its layers with another type than the CPU, on which they were traced.
            outputs = strategy._cuts[self._index].outputs
            values = tuple(one.to(known.dtype) for one, known in zip(values, outputs, strict=True))
            return values if len(values) > 1 else values[0]

    def _loss(self, number: int, output: Any) -> Tensor:
        runner = self._runner
        runner.seed(number)
        batch, size = runner.batches[number], len(runner.keys[number])
        counted, answer = runner.samples[number], Answer(runner.task, output)
        loss = runner.task.stage_loss(answer, batch, size, counted, runner.scale).float()
        runner.losses.append(loss.detach())
        return runner.scaler.scale(loss)


class Last(nn.Module):
    """The last part of a model that `fsdp` splits, and the loss of what it returns: a task may compute it with weights
    of that part, which are whole only meanwhile."""

    then: Callable[[Any], Tensor]

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *values: Any, **named: Any) -> Tensor:
        """What the part takes → the loss."""
        return self.then(self.part(*values, **named))


class _Chain(nn.Module):
    """Parts of a model, one after the other."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """As stages.run."""
        return run([*self.parts], values, named)
