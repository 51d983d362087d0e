"""Batches for the training loop: tensors that lie on the device, or samples that are read from a data set.

Both supply a rank with its share of the same global batches, in the order of `tandem_trainer.data.order`. Tensors on
the device need neither a copy nor a loader in each step, which take most of the time of a small model's step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Subset

from tandem_trainer.data.feeding import COMMON, Indexed, Reading, content_of, cut, feed, to_device
from tandem_trainer.data.order import Batches, Order, share

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Share:
    """One rank's share of a step."""

    ids: Tensor
    """Sample ids of all ranks together, [global batch], int64."""
    samples: int
    """Number of this rank's samples; may be 0."""
    part: Callable[[int, int], tuple[Any, Tensor]]
    """Function that returns this rank's samples from one index to another, as a batch on the device, and their ids,
    [samples]. For equal indices it returns one sample as a stand-in, because a rank without samples still takes part in
    collectives."""
    content: int = 0
    """Digest of samples that every rank has read; 0 except in the first batch after a start."""


class Supply(Protocol):
    """Supplies the shares of one rank, step by step."""

    def read(self, data_step: int) -> Share:
        """Read the share of the next data step."""


class Resident:
    """Supplies samples from tensors that lie on the device as a whole.

    Args:
        tensors: [samples, …] each.
        rank: index of this rank's share in each batch.
        ranks: number of shares.
    """

    def __init__(
        self, tensors: Sequence[Tensor], order: Order, rank: int, ranks: int, device: torch.device = CPU
    ) -> None:
        self._tensors = [tensor.to(device) for tensor in tensors]
        self._batches, self._rank, self._ranks, self._device = Batches(order), rank, ranks, device
        self._is_first = True

    def read(self, data_step: int) -> Share:
        """Return the share of any step; nothing is read ahead."""
        ids = self._batches.ids(data_step)
        own_ids = share(ids, self._rank, self._ranks)

        def part(start: int, end: int) -> tuple[Any, Tensor]:
            # A rank without samples computes the batch's first one, whose loss has the weight 0.
            chunk = own_ids[start:end] if start < end else ids[:1]
            if self._device.type == "cuda":
                # Only indices travel; the samples are on the device already.
                chunk = chunk.to(self._device, non_blocking=True)
            return [tensor[chunk] for tensor in self._tensors], chunk

        # Only at a start: it shows whether a number stands for the same sample on every rank.
        content = content_of([tensor[ids[:COMMON]] for tensor in self._tensors]) if self._is_first else 0
        self._is_first = False
        return Share(ids, len(own_ids), part, content)


class LoaderSupply:
    """Supplies samples that are read from a data set, by loader workers if there are any.

    Args:
        steps: the data steps to come; `read` must be called for exactly these, in order.
    """

    def __init__(self, dataset: Indexed, order: Order, steps: Iterable[int], reading: Reading, device: torch.device):
        self._batches, self._device = feed(dataset, order, steps, reading), device

    def read(self, data_step: int) -> Share:
        """Read the share of the next of the steps."""
        batch = next(self._batches)
        data, count = to_device(batch.data, self._device), len(batch.mine)

        def part(start: int, end: int) -> tuple[Any, Tensor]:
            # As in Resident, a stand-in for an empty share: feeding reads one sample even then.
            start, end = (start, end) if start < end else (0, 1)
            return cut(data, count, start, end, batch.layout), batch.mine[start:end].to(self._device)

        return Share(batch.ids, count if batch.weight else 0, part, batch.common)


def whole_and_slice(dataset: Any) -> tuple[Any, int, int]:
    """Split a data set into the whole and the slice that is used: a `Subset` of consecutive samples is a slice of the
    whole, in which a sample has the same id as in every other slice.

    Returns:
        The whole data set, the index of the first sample, and the index after the last.
    """
    if type(dataset) is Subset and isinstance(dataset.indices, range) and dataset.indices.step == 1:
        return dataset.dataset, dataset.indices.start, dataset.indices.stop
    return dataset, 0, len(dataset)
