"""The samples of one step, for a script with a session."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from tandem_trainer.data.feeding import RankBatch, cut
from tandem_trainer.data.order import pieces
from tandem_trainer.strategies.session_models import Models


class Batch:
    """This rank's share of the samples of one step."""

    def __init__(
        self,
        models: Models,
        report: Callable[[Tensor], None],
        loaded: RankBatch,
        data: Any,
        step: int,
        sample_keys: Tensor,
        weight: float,
    ) -> None:
        self._models, self._report, self._loaded, self._sample_keys = models, report, loaded, sample_keys
        self.data = data
        """Collated samples, on the session's device."""
        self.step = step
        """Optimizer steps completed before this one."""
        self.epoch = loaded.position.epoch
        """Passes over the data completed."""
        self.size = len(loaded.ids)
        """Samples over all ranks."""
        self.weight = weight
        """1; 0 if this rank has no share of so small a batch, and one sample stands in for it."""

    def __len__(self) -> int:
        return len(self._sample_keys)

    def mean(self, losses: Tensor) -> Tensor:
        """Compute the loss to call `backward` on: its gradient, averaged over ranks, is that of the mean over the
        global batch.

        Args:
            losses: [samples of this batch], or the sum of these as a scalar.

        Raises:
            ValueError: the shape is another one.
        """
        if losses.ndim and losses.shape != (len(self),):
            raise ValueError(
                f"losses have the shape {tuple(losses.shape)}; give one number for each of the {len(self)} samples "
                '(reduction="none", and the mean over what else there is), or their sum'
            )
        part = losses.sum() * (self.weight / self.size)
        self._report(self._models.told(part))
        return self._models.examine(part * self._models.dp_size)

    def took(self, part: Tensor) -> None:
        """Report the loss of a framework's own backward pass, which does not go through `mean`.

        Args:
            part: this rank's part of the mean over the global batch, scalar; several add up.
        """
        self._report(self._models.told(part))

    def draw(self, number: int) -> None:
        """Seed random numbers by the step, the rank and the number of a micro-batch."""
        self._models.draw(self.step, self._sample_keys, number)

    def parts(self, samples: int) -> "Iterator[Batch]":
        """Split the batch into micro-batches whose gradients add up to those of the batch (gradient accumulation).

        Every rank gets the same number of parts, of nearly the same size, so that a forward pass may be a collective.
        Where a rank has too few samples, one of them stands in, and `mean` weighs it with 0. Gradients are averaged
        over ranks with the last part only; those of a model that is split, with each.

        Args:
            samples: maximum size of a micro-batch; the same on every rank.

        Raises:
            ValueError: `samples` is less than 1, or nothing in the data has one item for each sample.
        """
        if samples < 1:
            raise ValueError(f"parts({samples}): a part has at least one sample")
        count = len(self)
        cuts = pieces(count if self.weight else 0, self.size, self._models.dp_size, samples)
        for number, (start, end) in enumerate(cuts):
            weight = float(start < end)
            start, end = (start, end) if start < end else (0, 1)
            data = cut(self.data, count, start, end, self._loaded.layout)
            sample_keys = self._sample_keys[start:end]
            self._models.draw(self.step, sample_keys, number)
            with self._models.synchronised(last=number == len(cuts) - 1):
                yield Batch(self._models, self._report, self._loaded, data, self.step, sample_keys, weight)
