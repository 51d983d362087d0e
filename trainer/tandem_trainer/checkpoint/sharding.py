"""Tensors that are split over ranks: torch's DTensors, whichever kind of parallelism has made them.

A checkpoint holds whole tensors by name. So what is saved by any strategy and any number of ranks is resumed under any
other, and evaluators read all alike. When saving, the ranks put one tensor together at a time; when restoring, each
takes its part of the bytes that its node has read, and nobody sends anything.

torch.distributed.tensor takes its time to be imported, and is imported only where such a tensor is met.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    shared: frozenset[str] = frozenset()
    """Names of the weights that more than one place of a pipeline holds."""

    def placed(self, tensors: Mapping[str, Tensor], owners: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        """Tensors by name, each with the rank that gives it to the others."""
        owners = self.owners if owners is None else owners
        return {
            name: StageTensor.of(tensor, owners[name], self.device, name in self.shared)
            for name, tensor in tensors.items()
        }

    def moments_here(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's tensors of an optimizer, by `<weight>/<key>`, with the places of their weights."""
        found: dict[str, Tensor] = {}
        for path, tensor in mine.items():
            weight = path.rpartition("/")[0]
            owner = self.owners.get(weight, self.place)
            found[path] = StageTensor.of(tensor, owner, self.device, weight in self.shared)
        return found

    def moments(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's tensors of an optimizer, and placeholders for those of other ranks. Collective."""
        told = self.gather({path: [list(one.shape), str(one.dtype)] for path, one in mine.items()})
        found: dict[str, Tensor] = {}
        owners: dict[str, int] = {}
        for rank, facts in enumerate(told[: self.ranks]):
            for path, (shape, dtype) in facts.items():
                owners.setdefault(path, rank)
                found[path] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
        return self.placed({**found, **mine}, owners)


class StageTensor(Tensor):
    """A tensor that the ranks of one place in the pipelines hold, or of several places if stages share it. What is
    computed of it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    owner: int
    """The first rank that holds it."""
    device_here: torch.device
    """Where this rank wants it."""
    stages_share: bool
    """Whether ranks of several places hold it."""

    @staticmethod
    def of(tensor: Tensor, owner: int, device: torch.device, stages_share: bool = False) -> "StageTensor":
        """The same memory."""
        made = tensor.detach().as_subclass(StageTensor)
        made.owner, made.device_here, made.stages_share = owner, device, stages_share
        return made

    def rows(self) -> "Rows":
        """All of them are the owner's."""
        group, is_here = dist.group.WORLD, dist.get_rank() == self.owner
        assert group is not None
        local = self.detach() if is_here else torch.empty(0, dtype=self.dtype)
        begins = [0 if rank <= self.owner else self.numel() for rank in range(dist.get_world_size() + 1)]
        return Rows(group, local.to(self.device_here).contiguous().reshape(-1), begins)


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is one of those that ranks hold together, even if each has all of it."""
    return hasattr(tensor, "device_mesh") or isinstance(tensor, StageTensor)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the device. Collective where it is split, and then new memory."""
    if not is_sharded(tensor):
        return tensor.detach()
    full: Tensor = _sent(tensor.detach()).full_tensor()
    return full


def here(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; it aliases the live one."""
    if not is_sharded(tensor) or isinstance(tensor, StageTensor):
        return tensor.detach()
    local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return local


class Rows(NamedTuple):
    """A tensor of which each rank of a group holds consecutive rows, in the order of the group."""

    group: dist.ProcessGroup
    local: Tensor
    """The elements that this rank holds, flat."""
    begins: list[int]
    """Number of the first element of each rank, and of the one after the last."""


def rows_of(tensor: Tensor) -> Rows | None:
    """How the rows of a tensor lie on ranks; None if it is not split like that."""
    if isinstance(tensor, StageTensor):
        return tensor.rows()
    dimension = split_rows(tensor)
    if dimension is None:
        return None
    mesh, rows = tensor.device_mesh, tensor.shape[0]  # type: ignore[attr-defined]
    count = mesh.size(dimension)
    each, width = -(-rows // count), tensor.numel() // max(1, rows)
    begins = [min(number * each, rows) * width for number in range(count + 1)]
    return Rows(mesh.get_group(dimension), here(_sent(tensor.detach())).contiguous().reshape(-1), begins)


def split_rows(tensor: Tensor) -> int | None:
    """The dimension of its mesh over which the rows of a DTensor are split; None if it is not split like that."""
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(tensor, DTensor)
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(split) != 1:
        return None
    placement = tensor.placements[split[0]]
    # Not `is_shard`: see place_of.
    return split[0] if type(placement) is Shard and placement.dim == 0 else None


def _sent(tensor: Any) -> Any:
    """A split tensor where its ranks send from: one whose parts are in the memory of the machine is copied there."""
    local, kind = tensor.to_local(), tensor.device_mesh.device_type
    return tensor if local.device.type == kind else tensor.to(kind)


def like(live: Tensor, mine: Tensor) -> Tensor:
    """What this rank holds of a tensor, as a part of one that is split as a live one of the same shape is."""
    if not is_sharded(live):
        return mine
    from torch.distributed.tensor import DTensor

    assert isinstance(live, DTensor)
    return DTensor.from_local(
        mine, live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride()
    )


def split_like(live: Tensor, full: Tensor) -> Tensor:
    """A whole tensor, split as a live one of the same shape is, in memory of its own and on its device."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(live, DTensor)
    # The way of torch.distributed.checkpoint's own state_dict: no public function cuts without a collective.
    sizes, offsets = compute_local_shape_and_global_offset(full.shape, live.device_mesh, live.placements)
    part = full[tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))]
    own = torch.empty(part.shape, dtype=full.dtype, device=live.to_local().device).copy_(part)
    made = DTensor.from_local(
        own, live.device_mesh, live.placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    # torch has moved it to the GPU if the live one is not there.
    return made if made.to_local().device == own.device else made.to(own.device)


def placed_like(live: Tensor, tensor: Tensor) -> Tensor:
    """A tensor of the same ranks, split as a live one is. Collective where it is split otherwise: gradients that ranks
    have still to add up are."""
    if not is_sharded(live) or tensor.placements == live.placements:  # type: ignore[attr-defined]
        return tensor
    moved: Tensor = tensor.redistribute(placements=live.placements)  # type: ignore[attr-defined]
    return moved


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


def is_shared(tensor: Tensor) -> bool:
    """Whether ranks hold the same values of a tensor although their places in a pipeline are different."""
    return isinstance(tensor, StageTensor) and tensor.stages_share


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
