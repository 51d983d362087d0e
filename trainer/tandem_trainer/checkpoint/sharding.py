"""Tensors that are split over ranks: torch's DTensors, whichever kind of parallelism made them, and tensors of pipeline
stages.

A checkpoint holds full tensors by name. So the state that one strategy saves on any number of ranks resumes under any
other, and evaluators read every checkpoint alike. When saving, the ranks put together one tensor at a time; when
restoring, each rank takes its part of the bytes that its node has read, without communication.

Importing torch.distributed.tensor is slow, so it is imported only where such a tensor occurs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class StagePlacement:
    """Placement of the tensors of a model that is cut into pipeline stages; the tensors of other ranks are
    placeholders on the meta device."""

    owners: Mapping[str, int]
    """Index of the first rank that holds a weight, by the weight's name; also the rank's place in its pipeline."""
    place: int
    """This rank's place in its pipeline."""
    ranks: int
    """Ranks of a pipeline, and copies of each of its places."""
    device: torch.device
    """Device on which this rank computes."""
    gather: Callable[[dict[str, Any]], list[dict[str, Any]]]
    """Function that gathers a small JSON value from every rank, in rank order. Collective."""
    shared: frozenset[str] = frozenset()
    """Names of the weights that more than one place of a pipeline holds."""
    split: frozenset[str] = frozenset()
    """Names of the weights that the ranks of a place hold by rows."""
    holders: Callable[[int], tuple[int, ...]] = lambda owner: (owner,)
    """Function from the first rank of a place to those of its ranks that together hold all rows of a split weight, in
    order."""

    def wrap_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Wrap tensors, by name, as tensors of the ranks that hold them."""
        return {
            name: self._wrap(tensor, self.owners[name], name in self.shared, name in self.split)
            for name, tensor in tensors.items()
        }

    def local_moments(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Wrap this rank's tensors of an optimizer, by `<weight>/<key>`, with the places of their weights."""
        wrapped: dict[str, Tensor] = {}
        for path, tensor in tensors.items():
            weight = path.rpartition("/")[0]
            owner = self.owners.get(weight, self.place)
            wrapped[path] = self._wrap(tensor, owner, weight in self.shared, is_by_rows(tensor))
        return wrapped

    def gather_moments(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Wrap this rank's tensors of an optimizer, and placeholders for those of other ranks. Collective."""
        facts_here = {
            path: [list(tensor.shape), str(tensor.dtype), is_by_rows(tensor)] for path, tensor in tensors.items()
        }
        wrapped: dict[str, Tensor] = {}
        for rank, facts in enumerate(self.gather(facts_here)[: self.ranks]):
            for path, (shape, dtype, by_rows) in facts.items():
                if path in wrapped:
                    continue
                # Another rank's tensor is a placeholder of the same shape and dtype: layouts of files need no values.
                kind = getattr(torch, dtype.removeprefix("torch."))
                tensor = tensors[path] if path in tensors else torch.empty(shape, dtype=kind, device="meta")
                wrapped[path] = self._wrap(tensor, rank, path.rpartition("/")[0] in self.shared, by_rows)
        return wrapped

    def _wrap(self, tensor: Tensor, owner: int, is_shared: bool, by_rows: bool) -> "StageTensor":
        return StageTensor.wrap(tensor, self.holders(owner) if by_rows else (owner,), self.device, is_shared)


def is_by_rows(tensor: Tensor) -> bool:
    """Return whether each rank of a sharding group holds some rows of a tensor, with all columns."""
    if not hasattr(tensor, "device_mesh"):
        return False
    dimension = split_rows(tensor)
    return dimension is not None and tensor.device_mesh.mesh_dim_names[dimension] == "shard"


class StageTensor(Tensor):
    """A tensor that the ranks of one place in the pipelines hold, or of several places if stages share it. Operations
    on it return plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    holders: tuple[int, ...]
    """The ranks that send it to the others: those that each hold some rows, in order, or the first that holds the full
    tensor."""
    target_device: torch.device
    """Device on which this rank needs the tensor."""
    stages_share: bool
    """Whether ranks of several places hold it."""
    part: Tensor | None
    """This rank's part of a tensor that is split; the tensor itself is on the meta device then."""

    @staticmethod
    def wrap(
        tensor: Tensor, holders: tuple[int, ...], device: torch.device, stages_share: bool = False
    ) -> "StageTensor":
        """Wrap a tensor; the wrapper aliases its memory."""
        is_split = hasattr(tensor, "device_mesh")
        plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if is_split else tensor.detach()
        wrapper = plain.as_subclass(StageTensor)
        wrapper.holders, wrapper.target_device, wrapper.stages_share = holders, device, stages_share
        wrapper.part = tensor.detach() if is_split else None
        return wrapper

    def rows(self) -> "RowShards":
        """Return the rows that each of its holders has."""
        group, rank = dist.group.WORLD, dist.get_rank()
        assert group is not None
        full_or_rows = self if self.part is None or is_by_rows(self.part) else full_tensor(self.part)
        local = to_local(full_or_rows) if rank in self.holders else torch.empty(0, dtype=self.dtype)
        count = self.shape[0] if self.ndim else 1
        rows_per_holder, width = -(-count // len(self.holders)), self.numel() // max(1, count)
        ends = {rank: min((place + 1) * rows_per_holder, count) * width for place, rank in enumerate(self.holders)}
        begins = [0]
        for peer in range(dist.get_world_size()):
            begins.append(ends.get(peer, begins[-1]))
        return RowShards(group, local.to(self.target_device).contiguous().reshape(-1), begins)


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is distributed over ranks, even if each rank holds all of it."""
    return hasattr(tensor, "device_mesh") or isinstance(tensor, StageTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor on its device. Collective if the tensor is split, and then in new memory."""
    if not is_sharded(tensor):
        return tensor.detach()
    full: Tensor = _on_mesh_device(tensor.detach()).full_tensor()
    return full


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; it aliases the live one."""
    if isinstance(tensor, StageTensor) and tensor.part is not None:
        tensor = tensor.part
    if not is_sharded(tensor) or isinstance(tensor, StageTensor):
        return tensor.detach()
    local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return local


class RowShards(NamedTuple):
    """A tensor of which each rank of a group holds consecutive rows, in the order of the group."""

    group: dist.ProcessGroup
    local: Tensor
    """This rank's elements, flat."""
    begins: list[int]
    """Index of each rank's first element, and the number of all elements."""


def rows_of(tensor: Tensor) -> RowShards | None:
    """Return which rows each rank holds; None if the tensor is not split by rows."""
    if isinstance(tensor, StageTensor):
        return tensor.rows()
    dimension = split_rows(tensor)
    if dimension is None:
        return None
    mesh, rows = tensor.device_mesh, tensor.shape[0]  # type: ignore[attr-defined]
    count = mesh.size(dimension)
    rows_per_rank, width = -(-rows // count), tensor.numel() // max(1, rows)
    begins = [min(number * rows_per_rank, rows) * width for number in range(count + 1)]
    return RowShards(
        mesh.get_group(dimension), to_local(_on_mesh_device(tensor.detach())).contiguous().reshape(-1), begins
    )


def split_rows(tensor: Tensor) -> int | None:
    """Return the mesh dimension over which the rows of a DTensor are split; None if it is not split by rows."""
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(tensor, DTensor)
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(split) != 1:
        return None
    placement = tensor.placements[split[0]]
    # Not `is_shard`: see place_of.
    return split[0] if type(placement) is Shard and placement.dim == 0 else None


def _on_mesh_device(tensor: Any) -> Any:
    """Return a DTensor on its mesh's device; one that is offloaded to the CPU is copied there, for the ranks to send
    it."""
    local, kind = tensor.to_local(), tensor.device_mesh.device_type
    return tensor if local.device.type == kind else tensor.to(kind)


def like(live: Tensor, local: Tensor) -> Tensor:
    """Wrap a local tensor as this rank's part of a DTensor that is split like a live one of the same shape."""
    if not is_sharded(live):
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(live, DTensor)
    return DTensor.from_local(
        local, live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride()
    )


def split_like(live: Tensor, full: Tensor) -> Tensor:
    """Split a full tensor like a live one of the same shape; the result is a copy on the live tensor's device."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(live, DTensor)
    # As torch.distributed.checkpoint.state_dict does: no public function splits without a collective.
    sizes, offsets = compute_local_shape_and_global_offset(full.shape, live.device_mesh, live.placements)
    part = full[tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))]
    own = torch.empty(part.shape, dtype=full.dtype, device=live.to_local().device).copy_(part)
    sharded = DTensor.from_local(
        own, live.device_mesh, live.placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    # `from_local` moves it to the mesh's device, also where the live tensor is offloaded to the CPU.
    return sharded if sharded.to_local().device == own.device else sharded.to(own.device)


def placed_like(live: Tensor, tensor: Tensor) -> Tensor:
    """Split a tensor of the same ranks like a live one. Collective if it is split in another way, as gradients are that
    ranks still have to sum."""
    if not is_sharded(live) or tensor.placements == live.placements:  # type: ignore[attr-defined]
        return tensor
    redistributed: Tensor = tensor.redistribute(placements=live.placements)  # type: ignore[attr-defined]
    return redistributed


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return which part of a tensor this rank holds; ranks with equal parts hold equal values. Empty for a full
    tensor."""
    if isinstance(tensor, StageTensor):
        return (tensor.holders[0], *(() if tensor.part is None else place_of(tensor.part)))
    if not is_sharded(tensor):
        return ()
    coordinate = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    placements = tensor.placements  # type: ignore[attr-defined]
    # Not `is_shard`: a dimension that is split on two meshes has a placement of another class on one of them.
    return tuple(index for index, placement in zip(coordinate, placements, strict=True) if not placement.is_replicate())


def is_shared(tensor: Tensor) -> bool:
    """Return whether ranks at different places of a pipeline hold equal values of a tensor."""
    return isinstance(tensor, StageTensor) and tensor.stages_share


def copies_of(tensor: Tensor, world_size: int) -> int:
    """Return the number of ranks that hold each element of a tensor."""
    if not is_sharded(tensor):
        return world_size
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    parts = 1
    for size, placement in zip(mesh.shape, placements, strict=True):
        parts *= 1 if placement.is_replicate() else size
    return world_size // parts


def split_all_like(live: Mapping[str, Tensor], full: Mapping[str, Any]) -> dict[str, Any]:
    """Split full values like the live tensors of the same name; values whose live tensor is not distributed are
    unchanged."""
    return {
        name: split_like(live[name], value) if name in live and is_sharded(live[name]) else value
        for name, value in full.items()
    }
