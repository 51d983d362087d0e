"""The data of a session: samples in a shuffled order, in an order of the script's own, or in that of a stream."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tandem.rundir.checkpoint import Manifest
from tandem_trainer.data.feeding import Collate, RankBatch, Reading, Stream, feed
from tandem_trainer.data.order import Passes
from tandem_trainer.data.sampling import EpochOrder, Listing, check_data, has_indices, plain_order
from tandem_trainer.elastic_run import DataSteps, ElasticRun


@dataclass(frozen=True, kw_only=True)
class SessionData:
    """Arguments of `Session.batches`, with the defaults filled in.

    Raises:
        ConfigurationError: the data and the arguments do not go together.
    """

    dataset: Any
    global_batch_size: int | None
    order: EpochOrder | None
    epochs: int
    max_steps: int | None
    drop_last: bool
    seed: int
    loader_workers: int
    collate: Collate
    transform: Callable[[Any], Any] | None
    pin: bool

    def __post_init__(self) -> None:
        check_data(self.dataset, self.global_batch_size, self.order, self.epochs, self.max_steps)

    @property
    def samples(self) -> int | None:
        """Number of samples; None for a stream."""
        return len(self.dataset) if has_indices(self.dataset) else None

    @property
    def is_positioned_by_step(self) -> bool:
        """Whether the number of a step alone tells which samples it has."""
        return self.order is None and has_indices(self.dataset)

    def open(self, rank: int, size: int) -> "OpenData":
        """Open the data for one of `size` data-parallel ranks."""
        reading = Reading(rank, size, self.seed, self.loader_workers, self.collate, self.transform, self.pin)
        return OpenData(self, reading)


class OpenData:
    """The data of a session, as one rank reads it in one generation.

    Raises:
        ConfigurationError: the order of the script, or the stream, cannot be used.
    """

    def __init__(self, data: SessionData, reading: Reading) -> None:
        self._data, self._reading = data, reading
        size, epochs, max_steps = data.global_batch_size, data.epochs, data.max_steps
        self.name: str | None = None
        """Name of the script's order, or of the order of shards; None: a plain shuffle."""
        self.steps: DataSteps
        """Data steps of the run."""
        if data.order is not None:
            listing = Listing(data.order, len(data.dataset), size, epochs, max_steps, data.seed, data.drop_last)
            self.steps, self.name = listing, listing.name
            return
        assert size is not None
        if has_indices(data.dataset):
            plain = plain_order(data.dataset, size, data.seed, data.drop_last)
            self.steps = Passes(plain, epochs, max_steps)
            if plain.shards is not None:
                self.name = plain.shards.description
        else:
            self.steps = Stream(data.dataset, size, epochs, max_steps, reading, data.drop_last)

    def feed(
        self, elastic: ElasticRun, restored: Manifest | None
    ) -> tuple[Iterator[RankBatch], Callable[[], bool] | None]:
        """Return the remaining batches, and what tells whether there is another one; None if their number is known.

        Args:
            elastic: the generation, which has begun.
            restored: checkpoint that it has started from.
        """
        # Each kind of data has its own position: an order and a stream that of the checkpoint, a shuffled data set that
        # of the step alone.
        if isinstance(self.steps, Passes):
            return feed(self._data.dataset, self.steps.order, elastic.data_steps_left, self._reading), None
        resume = (None, 0) if restored is None else (restored.data, elastic.step_before(restored))
        if isinstance(self.steps, Listing):
            pages = self.steps.feed(self._data.dataset, *resume, elastic.leaves_out, self._reading)
        else:
            assert isinstance(self.steps, Stream)
            pages = self.steps.feed(*resume, elastic.leaves_out)
        return pages, pages.more
