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
    split: frozenset[str] = frozenset()
    """Names of the weights of which each rank of a place holds rows."""
    holders: Callable[[int], tuple[int, ...]] = lambda owner: (owner,)
    """By the first rank of a place: those of its ranks that hold all rows of a split weight together, in order."""

    def placed(self, tensors: Mapping[str, Tensor], owners: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        """Tensors by name, each with the rank that gives it to the others."""
        owners = self.owners if owners is None else owners
        return {
            name: self._of(tensor, owners[name], name in self.shared, name in self.split)
            for name, tensor in tensors.items()
        }

    def moments_here(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's tensors of an optimizer, by `<weight>/<key>`, with the places of their weights."""
        found: dict[str, Tensor] = {}
        for path, tensor in mine.items():
            weight = path.rpartition("/")[0]
            owner = self.owners.get(weight, self.place)
            found[path] = self._of(tensor, owner, weight in self.shared, is_by_rows(tensor))
        return found

    def moments(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's tensors of an optimizer, and placeholders for those of other ranks. Collective."""
        facts_here = {path: [list(one.shape), str(one.dtype), is_by_rows(one)] for path, one in mine.items()}
        found: dict[str, Tensor] = {}
        for rank, facts in enumerate(self.gather(facts_here)[: self.ranks]):
            for path, (shape, dtype, by_rows) in facts.items():
                if path in found:
                    continue
                kind = getattr(torch, dtype.removeprefix("torch."))
                tensor = mine[path] if path in mine else torch.empty(shape, dtype=kind, device="meta")
                found[path] = self._of(tensor, rank, path.rpartition("/")[0] in self.shared, by_rows)
        return found

    def _of(self, tensor: Tensor, owner: int, is_shared: bool, by_rows: bool) -> "StageTensor":
        return StageTensor.of(tensor, self.holders(owner) if by_rows else (owner,), self.device, is_shared)


def is_by_rows(tensor: Tensor) -> bool:
    """Whether each of the ranks that share samples out holds rows of a tensor, and all columns of these."""
    if not hasattr(tensor, "device_mesh"):
        return False
    dimension = split_rows(tensor)
    return dimension is not None and tensor.device_mesh.mesh_dim_names[dimension] == "shard"


class StageTensor(Tensor):
    """A tensor that the ranks of one place in the pipelines hold, or of several places if stages share it. What is
    computed of it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    holders: tuple[int, ...]
    """The ranks that give it to the others, each its rows, in order; the first that holds it alone if it is whole."""
    device_here: torch.device
    """Where this rank wants it."""
    stages_share: bool
    """Whether ranks of several places hold it."""
    part: Tensor | None
    """What this rank holds of a tensor that is split; the tensor itself has no memory then."""

    @staticmethod
    def of(tensor: Tensor, holders: tuple[int, ...], device: torch.device, stages_share: bool = False) -> "StageTensor":
        """The same memory."""
        is_split = hasattr(tensor, "device_mesh")
        plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if is_split else tensor.detach()
        made = plain.as_subclass(StageTensor)
        made.holders, made.device_here, made.stages_share = holders, device, stages_share
        made.part = tensor.detach() if is_split else None
        return made

    def rows(self) -> "Rows":
        """Those that its holders have."""
        group, rank = dist.group.WORLD, dist.get_rank()
        assert group is not None
        mine = self if self.part is None or is_by_rows(self.part) else whole(self.part)
        local = here(mine) if rank in self.holders else torch.empty(0, dtype=self.dtype)
        count = self.shape[0] if self.ndim else 1
        each, width = -(-count // len(self.holders)), self.numel() // max(1, count)
        ends = {one: min((place + 1) * each, count) * width for place, one in enumerate(self.holders)}
        begins = [0]
        for one in range(dist.get_world_size()):
            begins.append(ends.get(one, begins[-1]))
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
    if isinstance(tensor, StageTensor) and tensor.part is not None:
        tensor = tensor.part
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
        return (tensor.holders[0], *(() if tensor.part is None else place_of(tensor.part)))
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
