"""Whether all ranks hold the same: one number of all weights, buffers and moments, compared after every start.

Nothing in torch compares replicas. One that differs, because its memory is at fault or because something was loaded in
half, goes on with the others for ever, and what it saves is a part of every checkpoint. So the ranks compare a digest
whenever a group starts, from a checkpoint or from the beginning. It costs a pass over the state (docs/checkpoints.md
has the figures).

On a CPU it is XXH3 of the bytes. On other devices it is computed there, as a sum of words with odd weights by place,
modulo 2^64: every single word that differs changes it.
"""

import torch
import xxhash
from torch import Tensor
from torch.nn.parameter import is_lazy

from tandem_trainer.group import Group

WORDS_AT_ONCE = 2**22
"""Words of a tensor that are weighted at once: 32 MiB of memory on the device, and as much again."""
_ODD = -7046029254386353131
"""Of 64 bits, for weights that have nothing in common with what is weighted."""


class ReplicasDiffer(Exception):  # noqa: N818 - it is what is the case
    """Ranks that should hold the same do not; names the ranks, and a tensor."""


def digests(tensors: dict[str, Tensor]) -> dict[str, int]:
    """For each tensor a number of 64 bits that depends on all its bits."""
    return {name: _digest(tensor.detach()) for name, tensor in tensors.items() if not is_lazy(tensor)}


def compare(group: Group, tensors: dict[str, Tensor]) -> None:
    """See that all ranks hold the same tensors. Collective.

    Raises:
        ReplicasDiffer: they do not.
    """
    mine = digests(tensors)
    whole = xxhash.xxh3_128_hexdigest(repr(sorted(mine.items())).encode())
    told = [view["digest"] for view in group.gather({"digest": whole})]
    if len(set(told)) == 1:
        return
    each = group.gather({name: f"{number:x}" for name, number in mine.items()})
    differing = sorted(name for name in each[0] if len({view.get(name) for view in each}) > 1)
    names = f"{len(differing)} tensors, the first the {differing[0]}" if differing else "in the names of tensors"
    usual = max(set(told), key=told.count)
    strange = [rank for rank, digest in enumerate(told) if digest != usual]
    raise ReplicasDiffer(f"ranks {strange} hold another state than the others: {names}")


def _digest(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_intdigest(flat.numpy().data) if tensor.device.type == "cpu" else weighted_sum(flat)


def weighted_sum(content: Tensor) -> int:
    """The digest of bytes, on whichever device they are.

    Args:
        content: [bytes], uint8.
    """
    width = next(width for width in (8, 4, 2, 1) if len(content) % width == 0)
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
    words = content.view(kind)
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    for first in range(0, len(words), WORDS_AT_ONCE):
        part = words[first : first + WORDS_AT_ONCE].to(torch.int64)
        place = torch.arange(first, first + len(part), dtype=torch.int64, device=content.device)
        total += (part * (place.mul_(_ODD).bitwise_or_(1))).sum()
    return int(total.item()) % 2**64
