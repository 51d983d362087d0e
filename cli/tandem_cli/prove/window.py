"""The steps of a run that can be taken again, and the checkpoints to begin with.

Steps are taken again by a group of the same size, so all of them belong to one generation. They begin with a checkpoint
that still exists, or with the beginning of the run, and end with a checkpoint of which an entry tells what its files
were; whether it still exists does not matter.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tandem.errors import UserError
from tandem.formatting import number
from tandem.rundir.lineage import Chain, GenerationRecord, counts
from tandem.rundir.provenance import CheckpointEntry


@dataclass(frozen=True)
class Window:
    """Steps to take again."""

    generation: GenerationRecord
    """The generation that took them."""
    start: CheckpointEntry | None
    """The checkpoint that they begin with; None: the beginning of the run."""
    end: CheckpointEntry
    """The checkpoint after them."""
    first: int
    """First step to compare, counted from 1."""
    last: int
    """Last step to compare."""

    @property
    def start_step(self) -> int:
        """The step after which the replay begins."""
        return 0 if self.start is None else self.start.step


class Windows:
    """The steps of a run that can be taken again.

    Args:
        records: the records of its generations.
        links: the generations that count.
        checkpoints: the entries of all checkpoints.
        existing: names of the checkpoints that steps can begin with.
    """

    def __init__(
        self,
        records: Sequence[GenerationRecord],
        links: Chain,
        checkpoints: Sequence[CheckpointEntry],
        existing: frozenset[str],
    ) -> None:
        self._records: Mapping[int, GenerationRecord] = {record.generation: record for record in records}
        entries = {entry.reference: entry for entry in checkpoints if counts(links, entry.reference)}
        self._entries = sorted(entries.values(), key=lambda entry: entry.step)
        self._existing = existing

    def choose(self, count: int, seed: int | None = None) -> Window:
        """Choose steps at random.

        Args:
            count: number of steps; fewer where no checkpoint is that far apart from the next.
            seed: of the choice; None: another one each time.

        Raises:
            UserError: no step can be taken again.
        """
        chance = random.Random(seed)  # noqa: S311 - a sample, no secret
        pairs = [pair for record in self._records.values() for pair in self._pairs(record, count)]
        if not pairs:
            raise UserError(
                "no step can be taken again: no checkpoint of Tandem's follows the beginning or one that still exists, "
                "in one group. --steps none verifies the record"
            )
        record, start, end = chance.choice(pairs)
        begin = 0 if start is None else start.step
        last = chance.randint(min(begin + count, end.step), end.step)
        return Window(record, start, end, max(begin + 1, last - count + 1), last)

    def around(self, first: int, last: int) -> Window:
        """Find a window for these steps.

        Raises:
            UserError: there is none; the message says why.
        """
        steps = f"step {number(first)}" if first == last else f"steps {number(first)} to {number(last)}"
        reason = f"no generation that counts has taken {steps} and saved a checkpoint afterwards"
        for record in sorted(self._records.values(), key=lambda record: record.generation, reverse=True):
            ends = [entry for entry in self._ends(record) if entry.step >= last]
            if first <= record.start_step or not ends:
                continue
            starts = [start for start in self._starts(record) if _step(start) < first]
            if starts:
                return Window(record, max(starts, key=_step), ends[0], first, last)
            reason = f"generation {record.generation} has taken {steps}, but no checkpoint from before still exists"
        raise UserError(reason)

    def _pairs(
        self, record: GenerationRecord, count: int
    ) -> Iterator[tuple[GenerationRecord, CheckpointEntry | None, CheckpointEntry]]:
        ends = list(self._ends(record))
        for start in self._starts(record):
            later = [end for end in ends if end.step > _step(start)]
            if later:
                yield record, start, next((end for end in later if end.step >= _step(start) + count), later[-1])

    def _ends(self, record: GenerationRecord) -> Iterator[CheckpointEntry]:
        return (entry for entry in self._entries if entry.generation == record.generation)

    def _starts(self, record: GenerationRecord) -> Iterator[CheckpointEntry | None]:
        """The checkpoints from which a group can take steps of a generation, oldest first."""
        if record.parent is None:
            yield None
        for entry in self._entries:
            is_own = entry.generation == record.generation
            # A group that has regrouped began with what its ranks held, which is on no disk.
            is_origin = record.continues is None and entry.reference == record.resumed_from
            if (is_own or is_origin) and entry.name in self._existing:
                yield entry


def _step(start: CheckpointEntry | None) -> int:
    return 0 if start is None else start.step
