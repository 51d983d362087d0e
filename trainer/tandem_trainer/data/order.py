"""The data order: the samples of a step depend only on seed and step, whatever the number of ranks.

An epoch is one permutation of the training samples; a step takes the next `global_batch_size` of it (the last step of
an epoch takes what is left, or is left out with it); the ranks that are there split that. So a run that shrinks and
grows sees every sample exactly once in each epoch, and after a restart goes on with the very batch that an undisturbed
run would have seen.
Rejected: DistributedSampler, whose split depends on the world size and which pads or drops the remainder.

A run may take a slice of the data set. Ids are those of the whole set all the same, so that a log, a digest and a
dropout mask speak of the same samples whatever the slice.

A step says which samples it takes only together with the number of samples, the batch size and the seed. With others,
the steps that are left would leave samples out or take them twice, and nothing would show it. So a run that has others
is refused. Rejected: to convert the position (the permutation of other samples is another one, so what was seen of this
epoch cannot be told from what was not).

The permutation of up to MAX_LISTED samples is torch's, and another version of torch may have another one. So a
position within an epoch has a digest of its order, and a run that would go on in another order is refused. Rejected: a
permutation of our own for all sizes (runs that have begun would change their order).

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
from tandem_trainer.failure import ConfigurationError

MAX_LISTED = 2**22
"""Of more samples the order of an epoch is computed step by step, and not listed: 32 MB are enough."""


@dataclass(frozen=True)
class Order:
    """The order of one run."""

    samples: int
    """Training samples in the slice that is used."""
    global_batch_size: int
    """Samples in one optimizer step."""
    seed: int
    """Seed of the permutations."""
    first: int = 0
    """Id of the first sample of the slice."""
    drop_last: bool = False
    """Whether the last batch of an epoch is left out where it is a partial one."""
    mixture: Mixture | None = None
    """What an epoch takes of several sources; None: each sample once."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass, the last of which may be smaller."""
        if self.drop_last:
            return self.samples // self.global_batch_size
        return -(-self.samples // self.global_batch_size)

    def position(self, step: int) -> DataPosition:
        """Where the data stands after `step` steps."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return DataPosition(
            seed=self.seed,
            epoch=epoch,
            cursor=within * self.global_batch_size,
            samples=self.samples,
            batch=self.global_batch_size,
            drop_last=self.drop_last,
            taken=list(self.mixture.taken) if self.mixture else None,
        )

    def digest(self, position: DataPosition) -> str | None:
        """A digest of the order of a position's epoch; None where nothing of it is used yet, or torch has no part in
        it. The sources of a mixture go on from one epoch to the next."""
        is_begun = position.cursor > 0 or (self.mixture is not None and position.epoch > 0)
        if not is_begun or (self.samples > MAX_LISTED and self.mixture is None):
            return None
        return _digest_of_epoch(self, position.epoch)

    def seed_of(self, epoch: int) -> int:
        """Seed of the order of one epoch."""
        return mixed(self.seed, epoch)


class Passes:
    """The steps of a run over an order of samples."""

    def __init__(self, order: Order, epochs: int, max_steps: int | None = None) -> None:
        self.order = order
        steps = epochs * order.steps_per_epoch
        self.data_steps = steps if max_steps is None else min(steps, max_steps)
        self.steps_per_epoch = order.steps_per_epoch

    def position(self, step: int) -> DataPosition:
        """Where the data stands before a step."""
        found = self.order.position(step)
        return found.model_copy(update={"order": self.order.digest(found)})


class Batches:
    """Walks an order step by step, keeping the current epoch's permutation where that is small."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def ids(self, step: int) -> Tensor:
        """Sample ids of the global batch of a step (counted from 0). [at most global_batch_size], int64."""
        order, position = self._order, self._order.position(step)
        end = min(position.cursor + order.global_batch_size, order.samples)
        if order.samples > MAX_LISTED and order.mixture is None:
            return Permutation(order.samples, order.seed_of(position.epoch)).at(position.cursor, end) + order.first
        return _epoch(order, position.epoch)[position.cursor : end]


@lru_cache(maxsize=2)
def _epoch(order: Order, epoch: int) -> Tensor:
    """Sample ids of an epoch, in order. [samples], int64; nobody changes it. Two, for a save may still be in the epoch
    before that which is read."""
    if order.mixture is not None:
        return order.mixture.ids(order.seed, epoch)
    generator = torch.Generator().manual_seed(order.seed_of(epoch))
    return torch.randperm(order.samples, generator=generator) + order.first


@lru_cache(maxsize=2)
def _digest_of_epoch(order: Order, epoch: int) -> str:
    return digest(_epoch(order, epoch))


def share(ids: Tensor, rank: int, world_size: int) -> Tensor:
    """One rank's part of a global batch; sizes differ by one at most, and may be 0."""
    count = len(ids)
    return ids[rank * count // world_size : (rank + 1) * count // world_size]


def pieces(count: int, samples: int, world_size: int, most: int) -> list[tuple[int, int]]:
    """Where to cut one rank's share of a global batch for gradient accumulation: start and end of each piece.

    Every rank gets as many pieces as the one with the largest share needs, because a forward pass may be a collective
    (synchronised batch normalisation); so a piece may be empty. Their sizes differ by one at most: a rest of one sample
    is what batch normalisation cannot take.

    Args:
        count: samples in the share.
        samples: in the global batch.
        most: in one piece; the same on every rank.
    """
    largest = -(-samples // world_size)
    number = -(-largest // most)
    return [(piece * count // number, (piece + 1) * count // number) for piece in range(number)]


def digest(ids: Tensor) -> str:
    """Sixteen hex digits that tell whether two steps saw the same samples in the same order."""
    return hashlib.blake2b(ids.numpy().tobytes(), digest_size=8).hexdigest()


class Positions(Protocol):
    """The data of a run, counted in data steps."""

    def position(self, step: int) -> DataPosition:
        """Where the data stands before a data step."""


def check_position(found: DataPosition | None, data: Positions, step: int) -> None:
    """Make sure that the data of this run is that of a checkpoint.

    Args:
        found: where the checkpoint stands; None where its writer had no data.
        step: the data step that this is.

    Raises:
        ConfigurationError: it is not.
    """
    if found is None:
        return
    now = data.position(step)
    changes = [f"the seed {found.seed}, now {now.seed}"] if found.seed != now.seed else []
    if found.samples is None and now.samples is not None and not changes and found != _bare(now):
        changes = [f"{_place(found)}, where this run would have {_place(now)}"]
    changes += [
        words.format(before, after)
        for words, before, after in (
            ("{:,} training samples, now {:,}", found.samples, now.samples),
            ("a global batch size of {:,}, now {:,}", found.batch, now.batch),
            ("drop_last {}, now {}", found.drop_last, now.drop_last),
        )
        if before is not None and after is not None and before != after
    ]
    if found.taken != now.taken and not changes:
        changes = [f"{_shares(found)}, now {_shares(now)}"]
    if None not in (found.order, now.order) and found.order != now.order and not changes:
        changes = [
            f"another order of the samples in epoch {found.epoch}, as another version of torch may shuffle them (the "
            "manifest of the checkpoint names its version)"
        ]
    if changes:
        raise ConfigurationError(
            f"the checkpoint was written with {'; '.join(changes)}: going on would leave samples out or take them "
            "twice. Set it back, or begin a new run from the checkpoint's weights, in a folder of its own "
            "(tandem checkpoints export)"
        )


def _shares(position: DataPosition) -> str:
    if position.taken is None:
        return "no mixture of sources"
    return f"a mixture that takes {' and '.join(f'{count:,}' for count in position.taken)} samples of its sources"


def _bare(position: DataPosition) -> DataPosition:
    """As a checkpoint has it that does not say of what data it is."""
    return DataPosition(seed=position.seed, epoch=position.epoch, cursor=position.cursor)


def _place(position: DataPosition) -> str:
    return f"its data at epoch {position.epoch}, sample {position.cursor:,}"
