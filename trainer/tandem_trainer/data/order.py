"""The data order: the samples of a step depend only on seed and step, whatever the number of ranks.

An epoch is one permutation of the training samples. A step takes the next `global_batch_size` of it (the last step of
an epoch takes the remainder, or is dropped), and the current ranks divide these among themselves. So a run that shrinks
and grows sees every sample exactly once in each epoch, and after a restart continues with the very batch that an
undisturbed run would have seen. Rejected: DistributedSampler, whose split depends on the world size and which pads or
drops the remainder.

A run may use a slice of the data set. Ids are still those of the whole set, so that a log, a digest and a dropout mask
refer to the same samples whatever the slice.

The samples of a step follow from the step only together with the number of samples, the batch size and the seed. If one
of them changed, the remaining steps would leave samples out or take them twice, and nothing would show it. So such a
run is refused. Rejected: to convert the position (the permutation of other samples is another one, so the samples of
this epoch that were seen cannot be told from the others).

The permutation of up to MAX_PERMUTED samples is torch's, and another version of torch may have another one. So a
position within an epoch has a digest of its order, and a run that would continue in another order is refused. Rejected:
a permutation of our own for all sizes (the order of running jobs would change).

Samples in shards are shuffled within windows of a few shards (tandem_trainer.data.shard_order).

A stream is read in its own order, and its position counts samples, so its batch size may change.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from tandem.rundir.checkpoint import DataPosition
from tandem_trainer.data.keyed import Permutation, mixed
from tandem_trainer.data.mixture import Mixture
from tandem_trainer.data.shard_order import ShardOrder
from tandem_trainer.failure import ConfigurationError

MAX_PERMUTED = 2**22
"""Number of samples up to which an epoch's order is one permutation in memory (32 MB); the order of more samples is
computed step by step."""


@dataclass(frozen=True)
class Order:
    """The data order of one run."""

    samples: int
    """Number of training samples in the slice."""
    global_batch_size: int
    """Number of samples in one optimizer step."""
    seed: int
    """Seed of the permutations."""
    first: int = 0
    """Id of the first sample of the slice."""
    drop_last: bool = False
    """Whether a partial last batch of an epoch is dropped."""
    mixture: Mixture | None = None
    """Shares of several sources in an epoch; None to take each sample once."""
    shards: ShardOrder | None = None
    """Order of samples in shards; None: the samples are not in shards."""

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in one epoch, the last of which may be smaller."""
        if self.drop_last:
            return self.samples // self.global_batch_size
        return -(-self.samples // self.global_batch_size)

    @property
    def is_in_memory(self) -> bool:
        """Whether the order of an epoch is one permutation in memory."""
        return self.shards is None and (self.samples <= MAX_PERMUTED or self.mixture is not None)

    def position(self, step: int) -> DataPosition:
        """Compute the data position after `step` steps."""
        # A step determines its position without any state: this is what makes a resumed run exact.
        epoch, within = divmod(step, self.steps_per_epoch)
        return DataPosition(
            seed=self.seed,
            epoch=epoch,
            cursor=within * self.global_batch_size,
            samples=self.samples,
            batch=self.global_batch_size,
            drop_last=self.drop_last,
            taken=list(self.mixture.taken) if self.mixture else None,
            first=None if self.mixture or self.shards else self.first,
            shards=self.shards.name if self.shards else None,
        )

    def digest(self, position: DataPosition) -> str | None:
        """Compute a digest of the order of a position's epoch; None where the order is not in use yet, or does not
        depend on torch. The sources of a mixture continue from one epoch to the next."""
        is_in_use = position.cursor > 0 or (self.mixture is not None and position.epoch > 0)
        if not is_in_use or not self.is_in_memory:
            return None
        return _digest_of_epoch(self, position.epoch)

    def seed_of(self, epoch: int) -> int:
        """Compute the seed of one epoch's order."""
        return mixed(self.seed, epoch)


class Passes:
    """The data steps of a run over an order of samples."""

    def __init__(self, order: Order, epochs: int, max_steps: int | None = None) -> None:
        self.order = order
        steps = epochs * order.steps_per_epoch
        self.data_steps = steps if max_steps is None else min(steps, max_steps)
        self.steps_per_epoch = order.steps_per_epoch

    def position(self, step: int) -> DataPosition:
        """Compute the data position before a step, with a digest of the order."""
        position = self.order.position(step)
        return position.model_copy(update={"order": self.order.digest(position)})


class Batches:
    """Looks up the samples of a step; keeps the current epoch's permutation where it is small enough."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def ids(self, step: int) -> Tensor:
        """Compute the sample ids of a step's global batch (steps count from 0). [at most global_batch_size], int64."""
        order = self._order
        epoch, within = divmod(step, order.steps_per_epoch)
        cursor = within * order.global_batch_size
        end = min(cursor + order.global_batch_size, order.samples)
        # Large data sets: compute only this batch's part of the permutation, without a list of the epoch.
        if order.shards is not None:
            return order.shards.ids(order.seed_of(epoch), cursor, end)
        if not order.is_in_memory:
            return Permutation(order.samples, order.seed_of(epoch)).values(cursor, end) + order.first
        return _epoch(order, epoch)[cursor:end]


@lru_cache(maxsize=2)
def _epoch(order: Order, epoch: int) -> Tensor:
    """Compute the sample ids of an epoch, in order. [samples], int64; not to be changed. The cache holds two epochs,
    because a save may still be in the epoch before the one that is read."""
    if order.mixture is not None:
        return order.mixture.ids(order.seed, epoch)
    generator = torch.Generator().manual_seed(order.seed_of(epoch))
    return torch.randperm(order.samples, generator=generator) + order.first


@lru_cache(maxsize=2)
def _digest_of_epoch(order: Order, epoch: int) -> str:
    return digest(_epoch(order, epoch))


def share(ids: Tensor, rank: int, world_size: int) -> Tensor:
    """Return one rank's part of a global batch; sizes differ by at most one, and may be 0."""
    count = len(ids)
    return ids[rank * count // world_size : (rank + 1) * count // world_size]


def pieces(count: int, samples: int, world_size: int, max_size: int) -> list[tuple[int, int]]:
    """Compute where to cut one rank's share of a global batch for gradient accumulation: start and end of each piece.

    Every rank gets as many pieces as the rank with the largest share needs, because a forward pass may be a collective
    (synchronised batch normalisation); so a piece may be empty. Sizes differ by at most one: batch normalisation cannot
    take a remainder of one sample.

    Args:
        count: samples in the share.
        samples: samples in the global batch.
        max_size: maximum samples in one piece; equal on every rank.
    """
    # Computed from the largest share, not from `count`: every rank must come to the same number of pieces.
    largest = -(-samples // world_size)
    number = -(-largest // max_size)
    return [(piece * count // number, (piece + 1) * count // number) for piece in range(number)]


def digest(ids: Tensor) -> str:
    """Compute sixteen hex digits that are equal if two steps saw the same samples in the same order."""
    return hashlib.blake2b(ids.numpy().tobytes(), digest_size=8).hexdigest()


class Positions(Protocol):
    """Positions in the data of a run, counted in data steps."""

    def position(self, step: int) -> DataPosition:
        """Return the data position before a data step."""


def check_position(saved: DataPosition | None, data: Positions, step: int) -> None:
    """Check that the data of this run is that of a checkpoint.

    Args:
        saved: position in the checkpoint; None if its writer had no data.
        data: the data of this run.
        step: the current data step.

    Raises:
        ConfigurationError: it is other data.
    """
    if saved is None:
        return
    now = data.position(step)
    # Each difference is reported once: a later one is only named where no earlier one explains it.
    changes = [f"the seed {saved.seed}, now {now.seed}"] if saved.seed != now.seed else []
    # Old checkpoints record neither samples nor batch size; for them the position itself must match.
    if saved.samples is None and now.samples is not None and not changes and saved != _without_data_facts(now):
        changes = [f"{_describe_position(saved)}, where this run would have {_describe_position(now)}"]
    changes += [
        template.format(before, after)
        for template, before, after in (
            ("{:,} training samples, now {:,}", saved.samples, now.samples),
            ("training samples from number {:,} on, now from {:,} on", saved.first, now.first),
            ("a global batch size of {:,}, now {:,}", saved.batch, now.batch),
            ("drop_last {}, now {}", saved.drop_last, now.drop_last),
        )
        if before is not None and after is not None and before != after
    ]
    # Fields that either side lacks are not compared: old checkpoints do not record them.
    if saved.taken != now.taken and not changes:
        changes = [f"{_describe_mixture(saved)}, now {_describe_mixture(now)}"]
    if saved.samples is not None and saved.shards != now.shards and not changes:
        changes = [f"{_describe_shards(saved)}, now {_describe_shards(now)}"]
    # Last: an order differs in consequence of every difference above.
    if None not in (saved.order, now.order) and saved.order != now.order and not changes:
        changes = [
            f"another order of the samples in epoch {saved.epoch}, as another version of torch may shuffle them (the "
            "manifest of the checkpoint names its version)"
        ]
    if changes:
        raise ConfigurationError(
            f"the checkpoint was written with {'; '.join(changes)}: resuming would skip samples or use them twice. "
            "Undo the change, or start a new run from the checkpoint's weights, in a folder of its own "
            "(tandem checkpoints export)"
        )


def _describe_mixture(position: DataPosition) -> str:
    if position.taken is None:
        return "no mixture of sources"
    return f"a mixture that takes {' and '.join(f'{count:,}' for count in position.taken)} samples of its sources"


def _describe_shards(position: DataPosition) -> str:
    if position.shards is None:
        return "no shards"
    index, _, window = position.shards.partition("/")
    return f"shards whose index has the digest {index}, in windows of {window}"


def _without_data_facts(position: DataPosition) -> DataPosition:
    """Reduce a position to the fields of old checkpoints, which do not record facts about the data."""
    return DataPosition(seed=position.seed, epoch=position.epoch, cursor=position.cursor)


def _describe_position(position: DataPosition) -> str:
    return f"its data at epoch {position.epoch}, sample {position.cursor:,}"
