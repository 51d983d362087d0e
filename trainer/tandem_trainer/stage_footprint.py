"""Traces the stages of a pipeline one by one: what each holds, keeps of a micro-batch, and takes for its passes.

As in tandem_trainer.footprint all tensors are fake, and `torch.distributed._tools.mem_tracker` adds them up. A stage is
given what the one before it returned, as if it had been received, and gradients of the size of its outputs.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from tandem.footprint import Held, Stage, StagePass
from tandem.tasks import Loop, Pipeline
from tandem_trainer.casts import Casts
from tandem_trainer.strategies import stages
from tandem_trainer.task import Task

Sizes = Mapping[torch.device, Mapping[Any, int]]
"""By device and kind, in bytes; a kind is a string, or has it as its value."""


def tracker_of(parameters: Iterable[nn.Parameter], seen: Callable[[Sizes], None] = lambda sizes: None) -> Any:
    """A MemTracker for modules with these parameters, some of which may be frozen.

    Args:
        seen: called after each operation with what exists; the tracker goes on to change it.
    """
    # It imports what is made for many devices, which takes a second.
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):  # type: ignore[no-untyped-call]
        def _update_peak_stats(self, peak_state: Any) -> None:
            super()._update_peak_stats(peak_state)
            seen(self._curr_mem_snap)

    tracker = Tracker()
    for parameter in parameters:
        if not parameter.requires_grad:
            # It would put hooks for gradients on all parameters, which torch refuses of those without (torch 2.15).
            handles = RemovableHandle(OrderedDict()), RemovableHandle(OrderedDict())
            tracker._param_to_grad_hook_handles[parameter] = handles
    return tracker


class Stages:
    """The stages of a task's model. Made and used under a FakeTensorMode.

    Args:
        model: of fake tensors.
        precision: the context in which the loop runs it.
        added_up: bytes that ranks which split matrices have added up so far in forward passes whose gradients are kept.
    """

    def __init__(
        self,
        task: Task[Any],
        model: nn.Module,
        loop: Loop,
        mode: FakeTensorMode,
        precision: Any,
        added_up: Callable[[], int] = lambda: 0,
    ) -> None:
        self._task, self._model, self._loop = task, model, loop
        self._mode, self._precision, self._added_up = mode, precision, added_up
        self._cuts: list[stages.Stage] = []
        self._passes: list[list[StagePass]] = []

    def take(self, batch: Any, samples: int) -> None:
        """Trace a micro-batch of fake tensors through all stages.

        Raises:
            ConfigurationError: the model cannot be cut like that.
        """
        options = self._loop.pipeline or Pipeline()
        if not self._cuts:
            self._cuts = stages.cut(self._model, self._task, options, batch, self._mode, self._precision)
            self._passes = [[] for _ in self._cuts]
        given, named = stages.inputs_of(self._task, batch)
        values: tuple[Any, ...] = given
        for number, stage in enumerate(self._cuts):
            is_last = number == len(self._cuts) - 1
            run = _Run(stage, self._task, batch if is_last else None, samples)
            for parameter in run.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            received = number > 0
            values = tuple(_received(one) if received else one for one in values)
            found, outputs = self._traced(run, values, named, samples)
            self._passes[number].append(found)
            values, named = tuple(one.detach() for one in outputs), {}

    def found(self) -> tuple[Stage, ...]:
        """All that was traced. A tensor that several stages use is counted for the first one of each rank."""
        ranks = (self._loop.pipeline or Pipeline()).stages
        stages = []
        for number, (cut, passes) in enumerate(zip(self._cuts, self._passes, strict=True)):
            before = {id(one) for other in self._cuts[number % ranks : number : ranks] for one in _tensors(other)}
            mine = [one for one in _tensors(cut) if id(one) not in before]
            parameters = [one for one in mine if isinstance(one, nn.Parameter)]
            stages.append(
                Stage(
                    parameters=_size(parameters),
                    gradients=_size(one for one in parameters if one.requires_grad),
                    buffers=_size(one for one in mine if not isinstance(one, nn.Parameter)),
                    passes=tuple(passes),
                    parts=tuple(_size(part.parameters()) for part in cut.parts.values()),
                    part_gradients=tuple(
                        _size(one for one in part.parameters() if one.requires_grad) for part in cut.parts.values()
                    ),
                )
            )
        return tuple(stages)

    def _traced(
        self, run: "_Run", values: tuple[Any, ...], named: dict[str, Any], samples: int
    ) -> tuple[StagePass, tuple[Tensor, ...]]:
        given = [one for one in tree_leaves((values, named)) if isinstance(one, Tensor)]
        with FlopCounterMode(display=False) as operations, torch.no_grad(), self._precision:
            run(values, named)
        casts = Casts(run.parameters())
        uncast = 0

        def seen(sizes: Sizes) -> None:
            nonlocal uncast
            uncast = max(uncast, _sum(sizes) - casts.alive)

        tracker = tracker_of(run.parameters(), seen)
        tracker.track_external(run, *given)
        state = _total(tracker, "current") - _size(given)
        before = self._added_up()
        # The tracker looks at an operation once it is done, so it has to be the inner one.
        with casts, tracker:
            with self._precision:
                outputs = run(values, named)
            added_up = self._added_up() - before
            forward, uncast_forward = _total(tracker, "peak"), uncast
            kept = _total(tracker, "current")
            uncast_kept = kept - casts.alive
            learned = [one for one in outputs if one.requires_grad]
            if learned:
                torch.autograd.backward(learned, [torch.zeros_like(one) for one in learned])
        return StagePass(
            samples=samples,
            **_beyond(state, kept=kept, forward=forward, peak=_total(tracker, "peak")),
            uncast=Held(**_beyond(state, kept=uncast_kept, forward=uncast_forward, peak=uncast))
            if casts.sizes
            else None,
            sent=_size(outputs),
            flops=float(operations.get_total_flops()) * (1 + _backward(run)),
            added_up=added_up,
        ), outputs


class _Run(nn.Module):
    """A stage as one module, with the loss if it is the last one."""

    def __init__(self, stage: stages.Stage, task: Task[Any], batch: Any, samples: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(stage.parts.values())
        self._task, self._batch, self._samples = task, batch, samples

    def forward(self, values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, ...]:
        """What the stage passes on; of the last one the sum of the losses."""
        found = stages.run([*self.parts], values, named)
        if self._batch is None:
            return found
        output = found if len(found) > 1 else found[0]
        # The tracker asks for each module again in the backward pass.
        self._answer = stages.Answer(self._task, output)
        loss = self._task.stage_loss(self._answer, self._batch, self._samples, self._samples, 1.0)
        return (loss.float(),)


def _received(value: Any) -> Any:
    """As from another rank: with no history, and with a gradient of its own."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value).requires_grad_(value.is_floating_point())


def _backward(run: nn.Module) -> float:
    """Operations of a backward pass for each of the forward pass: a product of matrices for the gradient of inputs, and
    one for that of weights that learn."""
    sizes = [(one.numel(), one.requires_grad) for one in run.parameters()]
    whole = sum(size for size, _ in sizes)
    return 1.0 + (sum(size for size, learns in sizes if learns) / whole if whole else 1.0)


def _total(tracker: Any, kind: str) -> int:
    return _sum(tracker.get_tracker_snapshot(kind))


def _sum(snapshot: Sizes) -> int:
    return sum(
        size for sizes in snapshot.values() for name, size in sizes.items() if getattr(name, "value", name) == "Total"
    )


def _beyond(state: int, **sizes: int) -> dict[str, int]:
    """What of each size is more than the state."""
    return {name: max(0, size - state) for name, size in sizes.items()}


def _tensors(cut: stages.Stage) -> list[Tensor]:
    """The parameters and buffers of a stage, each once."""
    return list({id(one): one for part in cut.parts.values() for one in (*part.parameters(), *part.buffers())}.values())


def _size(tensors: Iterable[Tensor]) -> int:
    return sum({id(one): one.nbytes for one in tensors}.values())
