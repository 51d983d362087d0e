"""Tensors that are split over ranks: torch's DTensors, whichever kind of parallelism has made them.

A checkpoint holds whole tensors by name. So what is saved by any strategy and any number of ranks is resumed under any
other, and evaluators read all alike. When saving, the ranks put one tensor together at a time; when restoring, each
takes its part of the bytes that its node has read, and nobody sends anything.

torch.distributed.tensor takes its time to be imported, and is imported only where such a tensor is met.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Stages:
    """Where the tensors of a model lie that is cut into stages; those of other ranks are placeholders on the meta
    device here."""

    owners: Mapping[str, int]
    """By the name of a weight: the first rank that holds it. It is the rank's place in its pipeline, too."""
    place: int
    """This rank's place in its pipeline."""
    ranks: int
    """Ranks of a pipeline, and copies of each of its places."""
    device: torch.device
    """Where this rank computes."""
    gather: Callable[[dict[str, Any]], list[dict[str, Any]]]
    """Every rank's small JSON value, in rank order. Collective."""

    def placed(self, tensors: Mapping[str, Tensor], owners: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        """Tensors by name, each with the rank that gives it to the others."""
        owners = self.owners if owners is None else owners
        return {name: StageTensor.of(tensor, owners[name], self.device) for name, tensor in tensors.items()}

    def moments(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's tensors of an optimizer, and placeholders for those of other ranks. Collective."""
        told = self.gather({path: [list(one.shape), str(one.dtype)] for path, one in mine.items()})
        found, owners = {}, {}
        for rank, facts in enumerate(told[: self.ranks]):
            for path, (shape, dtype) in facts.items():
                owners[path] = rank
                found[path] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
        return self.placed({**found, **mine}, owners)


class StageTensor(Tensor):
    """A tensor that the ranks of one place in the pipelines hold. What is computed of it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    owner: int
    """The first rank that holds it."""
    device_here: torch.device
    """Where this rank wants it."""

    @staticmethod
    def of(tensor: Tensor, owner: int, device: torch.device) -> "StageTensor":
        """The same memory."""
        made = tensor.detach().as_subclass(StageTensor)
        made.owner, made.device_here = owner, device
        return made

    def whole(self) -> Tensor:
        """The values, sent by their owner. Collective."""
        if self.is_meta:
            full = torch.empty(self.shape, dtype=self.dtype, device=self.device_here)
        else:
            full = self.detach().to(self.device_here).contiguous()
        if full.numel():
            dist.broadcast(full.reshape(-1).view(torch.uint8), self.owner)
        return full


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is one of those that ranks hold together, even if each has all of it."""
    return hasattr(tensor, "device_mesh") or isinstance(tensor, StageTensor)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the device. Collective where it is split, and then new memory."""
    if isinstance(tensor, StageTensor):
        return tensor.whole()
    if not is_sharded(tensor):
        return tensor.detach()
    full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return full


def here(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; it aliases the live one."""
    if not is_sharded(tensor) or isinstance(tensor, StageTensor):
        return tensor.detach()
    local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return local


def split_like(live: Tensor, full: Tensor) -> Tensor:
    """A whole tensor, split as a live one of the same shape is, in memory of its own and on its device."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(live, DTensor)
    # The way of torch.distributed.checkpoint's own state_dict: no public function cuts without a collective.
    sizes, offsets = compute_local_shape_and_global_offset(full.shape, live.device_mesh, live.placements)
    part = full[tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))]
    own = torch.empty(part.shape, dtype=full.dtype, device=live.to_local().device).copy_(part)
    return DTensor.from_local(
        own, live.device_mesh, live.placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Which part of a tensor this rank holds: ranks with equal places hold the same values. Empty: it is whole."""
    if isinstance(tensor, StageTensor):
        return (tensor.owner,)
    if not is_sharded(tensor):
        return ()
    coordinate = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    placements = tensor.placements  # type: ignore[attr-defined]
    # Not `is_shard`: a dimension that is split on two meshes has a placement of another class on one of them.
    return tuple(at for at, placement in zip(coordinate, placements, strict=True) if not placement.is_replicate())


def copies_of(tensor: Tensor, world_size: int) -> int:
    """How many of the ranks hold each element of a tensor."""
    if not is_sharded(tensor):
        return world_size
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    parts = 1
    for size, placement in zip(mesh.shape, placements, strict=True):
        parts *= 1 if placement.is_replicate() else size
    return world_size // parts


def split_all_like(live: Mapping[str, Tensor], full: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, those of tensors that are split split likewise; all others as they are."""
    return {
        name: split_like(live[name], value) if name in live and is_sharded(live[name]) else value
        for name, value in full.items()
    }
