"""A model whose layers are spread over the GPUs of one process: the naive form of model parallelism.

Runs of neighbouring blocks with about equal bytes of parameters are placed on the devices in order. Modules before the
blocks are on the first device and modules after them on the last; a module that shares a parameter with another one is
on the parameter's device. A hook moves the inputs of each placed module to its device, and the model's output to the
first device, where the batch is. So one device computes at a time.

The tensors of a checkpoint, of the optimizer and of an average follow their parameters without further code.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tandem.job.tasks import Loop
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.strategy import Examples, Strategy, blocks_of, devices_of
from tandem_trainer.task import Task

log = logging.getLogger(__name__)


class PlacedModule(NamedTuple):
    """A part of a model that is on one device."""

    module: nn.Module
    """A block with everything in it, or another module with only its own tensors."""
    device: torch.device
    """Device of the part."""
    is_block: bool
    """Whether it is a block."""
    is_around: bool
    """Whether it contains blocks, so that its inputs are those of the first of them."""


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
    """Place the parts of a model on several devices, each with a hook that moves its inputs there.

    Raises:
        ConfigurationError: parts that share a parameter would be on different devices.
    """
    parts = placement(model, devices)
    for part in parts:
        _move(part)
    connect(parts)
    counts = {device: sum(part.device == device and part.is_block for part in parts) for device in devices}
    log.info("strategy=model blocks=%s", ",".join(f"{device}:{count}" for device, count in counts.items()))


def placement(model: nn.Module, devices: Sequence[torch.device]) -> list[PlacedModule]:
    """Compute the device of each part of a model, in the order of the model; together the parts have all its tensors.

    Raises:
        ConfigurationError: parts that share a parameter would be on different devices.
    """
    blocks = blocks_of(model) or [child for child in model.children() if any(True for _ in child.parameters())]
    inside = {inner for block in blocks for inner in block.modules()}
    # Number of blocks before each module outside of them that has tensors of its own.
    preceding: dict[nn.Module, int] = {}
    passed = 0
    for module in model.modules():
        passed += module in blocks
        if module not in inside and any(True for _ in _own_tensors(module)):
            preceding[module] = passed
    in_blocks = {parameter for block in blocks for parameter in block.parameters()}
    outside = {
        parameter: count for module, count in preceding.items() for parameter in module.parameters(recurse=False)
    }
    before = sum(parameter.nbytes for parameter, count in outside.items() if parameter not in in_blocks and count == 0)
    after = sum(
        parameter.nbytes
        for parameter, count in outside.items()
        if parameter not in in_blocks and count == len(blocks) > 0
    )
    sizes = [sum(parameter.nbytes for parameter in block.parameters()) for block in blocks]
    # Blocks first, balanced by bytes; what is before and after them is fixed to the first and last device.
    runs = [devices[run] for run in spread(before, sizes, after, len(devices))]
    devices_by_parameter: dict[nn.Parameter, torch.device] = {}
    parts: dict[nn.Module, PlacedModule] = {}
    for block, device in zip(blocks, runs, strict=True):
        parts[block] = PlacedModule(
            block, _device_with(devices_by_parameter, block.parameters(), device, block), is_block=True, is_around=False
        )
        if parts[block].device != device:
            raise ConfigurationError(_SHARED_PARAMETER_ERROR.format(type(block).__name__))
    for module, count in preceding.items():
        # A module between blocks goes with the block before it.
        place = devices[0] if count == 0 else devices[-1] if count == len(blocks) else runs[count - 1]
        is_around = any(inner in blocks for inner in module.modules())
        own = module.parameters(recurse=False)
        parts[module] = PlacedModule(
            module, _device_with(devices_by_parameter, own, place, module), is_block=False, is_around=is_around
        )
    return [parts[module] for module in model.modules() if module in parts]


def spread(before: int, sizes: Sequence[int], after: int, devices: int) -> list[int]:
    """Compute the device of each block, so that devices have about as many bytes each.

    Args:
        before: bytes that are on the first device in any case.
        sizes: bytes of each block.
        after: bytes that are on the last device in any case.
        devices: number of devices.

    Returns:
        Indices of devices, in ascending order.
    """
    total = max(1, before + sum(sizes) + after)
    indices, begin = [], before
    for size in sizes:
        # The middle of a block decides.
        indices.append(min(devices - 1, (2 * begin + size) * devices // (2 * total)))
        begin += size
    return indices


def connect(parts: Iterable[PlacedModule]) -> None:
    """Register hooks that move the inputs of each part to its device."""
    for part in parts:
        if not part.is_around:
            part.module.register_forward_pre_hook(partial(_move_inputs, part.device), with_kwargs=True)


def bring_back(model: nn.Module, device: torch.device) -> None:
    """Register a hook that moves the output of a model to a device."""
    model.register_forward_hook(lambda module, inputs, output: to_device(output, device))


def to_device(value: Any, device: torch.device) -> Any:
    """Move all tensors in nested lists, tuples and dicts to a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)


_SHARED_PARAMETER_ERROR = (
    "strategy: model would put parts that share a parameter on different devices, with {}; use ddp or fsdp"
)


def _move(part: PlacedModule) -> None:
    if part.is_block:
        part.module.to(part.device)
    else:
        part.module._apply(lambda tensor: tensor.to(part.device), recurse=False)  # type: ignore[no-untyped-call]


def _move_inputs(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return to_device(args, device), to_device(kwargs, device)


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _device_with(
    devices_by_parameter: dict[nn.Parameter, torch.device],
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    module: nn.Module,
) -> torch.device:
    """Return a module's device: that of a parameter that is placed already, or its own; and place its parameters."""
    own = list(parameters)
    devices = {devices_by_parameter[parameter] for parameter in own if parameter in devices_by_parameter} or {device}
    if len(devices) > 1:
        raise ConfigurationError(_SHARED_PARAMETER_ERROR.format(type(module).__name__))
    (place,) = devices
    devices_by_parameter.update(dict.fromkeys(own, place))
    return place
