"""What the training loop takes its batches from: tensors that lie on the device, or a data set that is read.

Both give a rank its share of the same global batches, in the order of `tandem_trainer.data.order`. Tensors on the
device cost a step no copy and no loader, which is most of the time of a step of a small model.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Subset

from tandem_trainer.data.feeding import COMMON, Indexed, Reading, content_of, cut, feed, moved
from tandem_trainer.data.order import Batches, Order, share

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Share:
    """What one step gives a rank."""

    ids: Tensor
    """[global batch], int64, sample ids of all ranks together."""
    samples: int
    """How many of them are this rank's; there may be none."""
    part: Callable[[int, int], tuple[Any, Tensor]]
    """Its samples from a place to another, as a batch on the device, and their ids, [samples]. From a place to itself:
    one sample that stands in, for a rank without any still takes part in collectives."""
    content: int = 0
    """A digest of samples that every rank has read; 0 but for the first batch of a start."""


class Supply(Protocol):
    """The shares of one rank, step by step."""

    def read(self, data_step: int) -> Share:
        """The share of the data step that comes next."""


class Resident:
    """Samples whose tensors lie on the device as a whole.

    Args:
        tensors: [samples, …] each.
        rank: which share of each batch.
        ranks: how many shares there are.
    """

    def __init__(
        self, tensors: Sequence[Tensor], order: Order, rank: int, ranks: int, device: torch.device = CPU
    ) -> None:
        self._tensors = [tensor.to(device) for tensor in tensors]
        self._batches, self._rank, self._ranks, self._device = Batches(order), rank, ranks, device
        self._is_first = True

    def read(self, data_step: int) -> Share:
        """Any step's; nothing is read ahead."""
        ids = self._batches.ids(data_step)
        mine = share(ids, self._rank, self._ranks)

        def part(start: int, end: int) -> tuple[Any, Tensor]:
            chunk = mine[start:end] if start < end else ids[:1]
            if self._device.type == "cuda":
                chunk = chunk.to(self._device, non_blocking=True)
            return [tensor[chunk] for tensor in self._tensors], chunk

        content = content_of([tensor[ids[:COMMON]] for tensor in self._tensors]) if self._is_first else 0
        self._is_first = False
        return Share(ids, len(mine), part, content)


class Read:
    """Samples that are asked of a data set, by loader workers if there are any.

    Args:
        steps: the data steps that are to come, each of which is then read once.
    """

    def __init__(self, dataset: Indexed, order: Order, steps: Iterable[int], reading: Reading, device: torch.device):
        self._fed, self._device = feed(dataset, order, steps, reading), device

    def read(self, data_step: int) -> Share:
        """That of the next of the steps."""
        fed = next(self._fed)
        data, count = moved(fed.data, self._device), len(fed.mine)

        def part(start: int, end: int) -> tuple[Any, Tensor]:
            start, end = (start, end) if start < end else (0, 1)
            return cut(data, count, start, end, fed.of_fields), fed.mine[start:end].to(self._device)

        return Share(fed.ids, count if fed.weight else 0, part, fed.common)


def whole_and_slice(dataset: Any) -> tuple[Any, int, int]:
    """A data set, and its samples from one to another that are used: a `Subset` of consecutive ones is a slice of the
    whole, in which a sample has the same id as in every other slice.

    Returns:
        The whole, the first sample, and the one after the last.
    """
    if type(dataset) is Subset and isinstance(dataset.indices, range) and dataset.indices.step == 1:
        return dataset.dataset, dataset.indices.start, dataset.indices.stop
    return dataset, 0, len(dataset)
