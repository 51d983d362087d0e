"""The models of a script with a session: replicated, with gradients that are averaged during the backward pass."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tandem_trainer.data.keyed import mixed, seed_everything
from tandem_trainer.meter import Busy
from tandem_trainer.models.dropout import Draws, key_dropout
from tandem_trainer.process_group import Group

_OPTIONS = {*inspect.signature(DistributedDataParallel).parameters} - {"module", "device_ids", "output_device"}


class Models:
    """All models of a session."""

    def __init__(self, group: Group, seed: int, busy: Busy) -> None:
        """
        Args:
            busy: times the forward passes of all of them.
        """
        self._group, self._seed, self._busy = group, seed, busy
        self.world_size = group.world_size
        self._draws: list[Draws] = []
        self._averaging: list[DistributedDataParallel] = []
        self._recording: list[DistributedDataParallel] = []

    def distribute(
        self,
        model: nn.Module,
        sample_dropout: bool,
        comm_hook: Callable[[Any, Any], Any] | None,
        comm_state: Any,
        options: Mapping[str, Any],
    ) -> nn.Module:
        """As `Session.distribute`, with its errors."""
        for name in options:
            if name not in _OPTIONS:
                raise TypeError(f"distribute(…, {name}=…): DistributedDataParallel has no such option to choose")
        if sample_dropout:
            self._draws.append(key_dropout(model, first=sum(draws.layers for draws in self._draws)))
        model.to(self._group.device)
        forward: nn.Module = model
        if self.world_size > 1 and any(parameter.requires_grad for parameter in model.parameters()):
            devices = [self._group.device] if self._group.device.type == "cuda" else None
            defaults: dict[str, Any] = {"gradient_as_bucket_view": True}
            averaging = DistributedDataParallel(model, device_ids=devices, **(defaults | dict(options)))
            if comm_hook is not None:
                averaging.register_comm_hook(comm_state, comm_hook)
            self._averaging.append(averaging)
            forward = averaging
            if options.get("static_graph"):
                self._recording.append(averaging)
        self.time(forward)
        return forward

    def time(self, forward: nn.Module) -> None:
        """The forward passes of a module are this rank's own work."""
        forward.register_forward_pre_hook(lambda module, given: self._busy.__enter__())
        forward.register_forward_hook(lambda module, given, out: self._busy.__exit__(None, None, None))

    def draw(self, step: int, mine: Tensor, part: int = 0) -> None:
        """Random numbers from here on follow from the step and its part, and dropout's from the samples."""
        parts = (part,) if part else ()
        seed_everything(mixed(self._seed, step, self._group.rank, *parts), self._group.device)
        for draws in self._draws:
            draws.set(self._seed, step, mine.to(self._group.device))

    @contextlib.contextmanager
    def synchronised(self, last: bool) -> Iterator[None]:
        """Gradients are averaged over ranks in the backward passes of the last part of a batch, and in no other."""
        with contextlib.ExitStack() as waiting:
            for averaging in self._averaging:
                # One with a static graph records it in its first step, and cannot go without its collectives there
                # (torch 2.15). What is averaged again with the next part stays the same average.
                if not last and averaging not in self._recording:
                    waiting.enter_context(averaging.no_sync())
            yield

    def end_step(self) -> None:
        """A step is complete."""
        self._recording = []
