"""Traces the stages of a pipeline one by one: what each holds, saves of a micro-batch, and needs for its passes.

As in tandem_trainer.footprint all tensors are fake, and `torch.distributed._tools.mem_tracker` adds them up. A stage
gets the outputs of the stage before it, as if it had received them, and gradients of the size of its own outputs.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from tandem.job.footprint import StageFootprint, StageMemory, StagePass
from tandem.job.tasks import Loop, Pipeline
from tandem_trainer.casts import Casts
from tandem_trainer.strategies import stages
from tandem_trainer.task import Task

Sizes = Mapping[torch.device, Mapping[Any, int]]
"""Sizes by device and kind, in bytes; a kind is a string, or has one as its value."""


def tracker_of(parameters: Iterable[nn.Parameter], on_snapshot: Callable[[Sizes], None] = lambda sizes: None) -> Any:
    """Create a MemTracker for modules with these parameters, some of which may be frozen.

    Args:
        parameters: parameters of the modules.
        on_snapshot: called after each operation with the sizes that exist; the tracker changes them afterwards.
    """
    # Imported here: its imports take a second.
    from torch.distributed._tools.mem_tracker import MemTracker

    class PeakTracker(MemTracker):  # type: ignore[no-untyped-call]
        def _update_peak_stats(self, peak_state: Any) -> None:
            super()._update_peak_stats(peak_state)
            on_snapshot(self._curr_mem_snap)

    tracker = PeakTracker()
    for parameter in parameters:
        if not parameter.requires_grad:
            # The tracker would register gradient hooks on all parameters, which torch refuses for frozen ones (torch
            # 2.15).
            handles = RemovableHandle(OrderedDict()), RemovableHandle(OrderedDict())
            tracker._param_to_grad_hook_handles[parameter] = handles
    return tracker


class StageTracer:
    """Traces the stages of a task's model. Created and used under a FakeTensorMode.

    Args:
        task: task with the model.
        model: model of fake tensors.
        loop: settings of the training loop.
        mode: mode under which the tensors were made.
        precision: autocast context of the loop.
        reduced_bytes: returns the bytes that ranks which split matrices have summed so far in forward passes whose
            gradients are computed.
    """

    def __init__(
        self,
        task: Task[Any],
        model: nn.Module,
        loop: Loop,
        mode: FakeTensorMode,
        precision: Any,
        reduced_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._task, self._model, self._loop = task, model, loop
        self._mode, self._precision, self._reduced_bytes = mode, precision, reduced_bytes
        self._cuts: list[stages.Stage] = []
        self._passes: list[list[StagePass]] = []

    def take(self, batch: Any, samples: int) -> None:
        """Trace a micro-batch of fake tensors through all stages.

        Raises:
            ConfigurationError: the model cannot be cut into these stages.
        """
        options = self._loop.pipeline or Pipeline()
        if not self._cuts:
            self._cuts = stages.cut(self._model, self._task, options, batch, self._mode, self._precision)
            self._passes = [[] for _ in self._cuts]
        args, kwargs = stages.inputs_of(self._task, batch)
        values: tuple[Any, ...] = args
        for number, stage in enumerate(self._cuts):
            is_last = number == len(self._cuts) - 1
            run = _StageModule(stage, self._task, batch if is_last else None, samples)
            for parameter in run.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            is_received = number > 0
            values = tuple(_received(value) if is_received else value for value in values)
            stage_pass, outputs = self._trace(run, values, kwargs, samples)
            self._passes[number].append(stage_pass)
            values, kwargs = tuple(output.detach() for output in outputs), {}

    def results(self) -> tuple[StageFootprint, ...]:
        """Return the footprints of all stages. A tensor that several stages use is counted for the first of them on
        each rank."""
        ranks = (self._loop.pipeline or Pipeline()).stages
        stages = []
        for number, (cut, passes) in enumerate(zip(self._cuts, self._passes, strict=True)):
            # Stages `number`, `number - ranks`, … lie on the same rank (interleaved schedules).
            counted_ids = {
                id(tensor) for other in self._cuts[number % ranks : number : ranks] for tensor in _tensors(other)
            }
            own = [tensor for tensor in _tensors(cut) if id(tensor) not in counted_ids]
            parameters = [tensor for tensor in own if isinstance(tensor, nn.Parameter)]
            stages.append(
                StageFootprint(
                    parameters=_size(parameters),
                    gradients=_size(parameter for parameter in parameters if parameter.requires_grad),
                    buffers=_size(tensor for tensor in own if not isinstance(tensor, nn.Parameter)),
                    passes=tuple(passes),
                    parts=tuple(_size(part.parameters()) for part in cut.parts.values()),
                    part_gradients=tuple(
                        _size(parameter for parameter in part.parameters() if parameter.requires_grad)
                        for part in cut.parts.values()
                    ),
                )
            )
        return tuple(stages)

    def _trace(
        self, run: "_StageModule", values: tuple[Any, ...], kwargs: dict[str, Any], samples: int
    ) -> tuple[StagePass, tuple[Tensor, ...]]:
        inputs = [leaf for leaf in tree_leaves((values, kwargs)) if isinstance(leaf, Tensor)]
        with FlopCounterMode(display=False) as operations, torch.no_grad(), self._precision:
            run(values, kwargs)
        casts = Casts(run.parameters())
        uncast = 0

        def record_uncast(sizes: Sizes) -> None:
            nonlocal uncast
            uncast = max(uncast, _sum(sizes) - casts.alive)

        tracker = tracker_of(run.parameters(), record_uncast)
        tracker.track_external(run, *inputs)
        state = _total(tracker, "current") - _size(inputs)
        reduced_before = self._reduced_bytes()
        # The tracker sees an operation after it has run, so it has to be the inner mode.
        with casts, tracker:
            with self._precision:
                outputs = run(values, kwargs)
            reduced = self._reduced_bytes() - reduced_before
            forward, uncast_forward = _total(tracker, "peak"), uncast
            saved = _total(tracker, "current")
            uncast_saved = saved - casts.alive
            differentiable = [output for output in outputs if output.requires_grad]
            if differentiable:
                torch.autograd.backward(differentiable, [torch.zeros_like(output) for output in differentiable])
        return StagePass(
            samples=samples,
            **_excess(state, kept=saved, forward=forward, peak=_total(tracker, "peak")),
            uncast=StageMemory(**_excess(state, kept=uncast_saved, forward=uncast_forward, peak=uncast))
            if casts.sizes
            else None,
            sent=_size(outputs),
            flops=float(operations.get_total_flops()) * (1 + _backward_ratio(run)),
            added_up=reduced,
        ), outputs


class _StageModule(nn.Module):
    """A stage as one module, with the loss if it is the last one."""

    def __init__(self, stage: stages.Stage, task: Task[Any], batch: Any, samples: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(stage.parts.values())
        self._task, self._batch, self._samples = task, batch, samples

    def forward(self, values: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return the outputs of the stage; of the last one, the sum of the losses."""
        outputs = stages.run([*self.parts], values, kwargs)
        if self._batch is None:
            return outputs
        output = outputs if len(outputs) > 1 else outputs[0]
        # Kept alive: the tracker asks for each module again in the backward pass.
        self._answer = stages.PrecomputedOutput(self._task, output)
        loss = self._task.stage_loss(self._answer, self._batch, self._samples, self._samples, 1.0)
        return (loss.float(),)


def _received(value: Any) -> Any:
    """Copy a value as if another rank had sent it: without history, and with a gradient of its own."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value).requires_grad_(value.is_floating_point())


def _backward_ratio(run: nn.Module) -> float:
    """Compute the ratio of operations of the backward pass to those of the forward pass: one product of matrices for
    the gradient of inputs, and one for that of trainable weights."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in run.parameters()]
    total = sum(size for size, _ in sizes)
    return 1.0 + (sum(size for size, is_trainable in sizes if is_trainable) / total if total else 1.0)


def _total(tracker: Any, kind: str) -> int:
    return _sum(tracker.get_tracker_snapshot(kind))


def _sum(snapshot: Sizes) -> int:
    return sum(
        size for sizes in snapshot.values() for name, size in sizes.items() if getattr(name, "value", name) == "Total"
    )


def _excess(state: int, **sizes: int) -> dict[str, int]:
    """Subtract the state from each size."""
    return {name: max(0, size - state) for name, size in sizes.items()}


def _tensors(cut: stages.Stage) -> list[Tensor]:
    """Return the parameters and buffers of a stage, each once."""
    tensors = (tensor for part in cut.parts.values() for tensor in itertools.chain(part.parameters(), part.buffers()))
    return list({id(tensor): tensor for tensor in tensors}.values())


def _size(tensors: Iterable[Tensor]) -> int:
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
