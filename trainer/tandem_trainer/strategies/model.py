"""A model whose layers are spread over the GPUs of one process: the naive form of model parallelism.

Runs of neighbouring blocks with about equal bytes of parameters go to the devices in order. What precedes the blocks is
on the first device and what follows them on the last; of a module that shares a parameter with another one, both are
where the parameter is. Before a module that is put somewhere its inputs are moved there, and what the model returns is
moved to the first device, where the batch is. So one device computes at a time.

The tensors of a checkpoint, of the optimizer and of an average follow their parameters by themselves.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tandem.tasks import Loop
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.strategy import Examples, Strategy, blocks_of, devices_of
from tandem_trainer.task import Task

log = logging.getLogger(__name__)


class Part(NamedTuple):
    """A part of a model that is on one device."""

    module: nn.Module
    """A block with all that is in it, or another module with the tensors that are its own."""
    device: torch.device
    """Where it is."""
    is_block: bool
    """Whether it is a block."""
    is_around: bool
    """Whether blocks are inside of it, so that its inputs are those of the first of them."""


class LayerSplit(Strategy):
    """All GPUs of one process, by layers."""

    def __init__(self, loop: Loop, group: Group) -> None:
        super().__init__(loop, group)
        self.devices = devices_of(group, "model")

    def shard(self, model: nn.Module, task: Task[Any], examples: Examples) -> None:
        super().shard(model, task, examples)
        if len(self.devices) > 1:
            split(model, self.devices)
            bring_back(model, self.devices[0])


def split(model: nn.Module, devices: Sequence[torch.device]) -> None:
    """Put the parts of a model on several devices, each with a hook that moves its inputs there.

    Raises:
        ConfigurationError: parts that share a parameter would be on different devices.
    """
    parts = placement(model, devices)
    for part in parts:
        _move(part)
    connect(parts)
    counts = {device: sum(part.device == device and part.is_block for part in parts) for device in devices}
    log.info("strategy=model blocks=%s", ",".join(f"{device}:{count}" for device, count in counts.items()))


def placement(model: nn.Module, devices: Sequence[torch.device]) -> list[Part]:
    """Where each part of a model goes, in the order of the model; together they have all its tensors.

    Raises:
        ConfigurationError: parts that share a parameter would be on different devices.
    """
    blocks = blocks_of(model) or [child for child in model.children() if any(True for _ in child.parameters())]
    inside = {inner for block in blocks for inner in block.modules()}
    # How many blocks precede each module that has tensors of its own.
    preceding: dict[nn.Module, int] = {}
    passed = 0
    for module in model.modules():
        passed += module in blocks
        if module not in inside and any(True for _ in _own(module)):
            preceding[module] = passed
    learned = {one for block in blocks for one in block.parameters()}
    outside = {one: count for module, count in preceding.items() for one in module.parameters(recurse=False)}
    before = sum(one.nbytes for one, count in outside.items() if one not in learned and count == 0)
    after = sum(one.nbytes for one, count in outside.items() if one not in learned and count == len(blocks) > 0)
    sizes = [sum(one.nbytes for one in block.parameters()) for block in blocks]
    runs = [devices[run] for run in spread(before, sizes, after, len(devices))]
    taken: dict[nn.Parameter, torch.device] = {}
    found: dict[nn.Module, Part] = {}
    for block, device in zip(blocks, runs, strict=True):
        found[block] = Part(block, _with(taken, block.parameters(), device, block), is_block=True, is_around=False)
        if found[block].device != device:
            raise ConfigurationError(_APART.format(type(block).__name__))
    for module, count in preceding.items():
        place = devices[0] if count == 0 else devices[-1] if count == len(blocks) else runs[count - 1]
        is_around = any(inner in blocks for inner in module.modules())
        own = module.parameters(recurse=False)
        found[module] = Part(module, _with(taken, own, place, module), is_block=False, is_around=is_around)
    return [found[module] for module in model.modules() if module in found]


def spread(before: int, sizes: Sequence[int], after: int, devices: int) -> list[int]:
    """The device of each block, so that each device has about as many bytes.

    Args:
        before: bytes that are on the first device whatever happens.
        sizes: bytes of each block.
        after: bytes that are on the last device whatever happens.
        devices: how many there are.

    Returns:
        Numbers of devices, which never fall.
    """
    total = max(1, before + sum(sizes) + after)
    found, begin = [], before
    for size in sizes:
        # A block goes where its middle lies.
        found.append(min(devices - 1, (2 * begin + size) * devices // (2 * total)))
        begin += size
    return found


def connect(parts: Iterable[Part]) -> None:
    """Have the inputs of each part moved to where it is."""
    for part in parts:
        if not part.is_around:
            part.module.register_forward_pre_hook(partial(_moved_inputs, part.device), with_kwargs=True)


def bring_back(model: nn.Module, device: torch.device) -> None:
    """Have what a model returns moved to a device."""
    model.register_forward_hook(lambda module, given, found: moved(found, device))


def moved(value: Any, device: torch.device) -> Any:
    """A value with all tensors in its lists, tuples and dicts on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)


_APART = "strategy: model would put parts that share a parameter on different devices, with {}; take ddp or fsdp"


def _move(part: Part) -> None:
    if part.is_block:
        part.module.to(part.device)
    else:
        part.module._apply(lambda tensor: tensor.to(part.device), recurse=False)  # type: ignore[no-untyped-call]


def _moved_inputs(device: torch.device, module: nn.Module, given: Any, named: Any) -> tuple[Any, Any]:
    return moved(given, device), moved(named, device)


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _with(
    taken: dict[nn.Parameter, torch.device], parameters: Iterable[nn.Parameter], device: torch.device, module: nn.Module
) -> torch.device:
    """Where a module goes: to a parameter that is placed already, or to a device of its own."""
    own = list(parameters)
    there = {taken[one] for one in own if one in taken} or {device}
    if len(there) > 1:
        raise ConfigurationError(_APART.format(type(module).__name__))
    (place,) = there
    taken.update(dict.fromkeys(own, place))
    return place
