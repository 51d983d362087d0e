"""Which checkpoints count: the chain from the newest generation back to the first.

Each generation writes one record, once, before its first step: the checkpoint it resumed from. Follow these from the
newest record: generation 9 resumed from step 500 of generation 7, so of generation 7 the steps up to 500 count, of
generation 8 none, and so on back. A writer of a generation that was superseded may wake up later and commit; what it
commits is either later than the step its successor resumed from, or of a generation that is not in the chain at all,
so nobody ever resumes from it or evaluates it as the newest. That is the whole argument; it needs no lock, no clock.

Rejected: comparing steps alone (a cut-off group runs ahead of its successor and wins), and time stamps (clocks step).
"""

from collections.abc import Iterable

from tandem.model import Model
from tandem.status import CheckpointRef


class GenerationRecord(Model):
    """Who trained from which checkpoint on. Written once, by the first rank, before the generation's first step."""

    generation: int
    """The generation's number."""
    resumed_from: CheckpointRef | None = None
    """The checkpoint it started from; None: from the beginning."""
    world_size: int
    """Ranks in the group."""
    members: list[str] = []
    """Replicas in rank order."""
    started_at: float
    """Seconds since the epoch, of the writer's clock; for people only."""


Chain = dict[int, int | None]
"""For each generation that counts: the last step of it that counts, None where there is no limit."""


def chain(records: Iterable[GenerationRecord]) -> Chain:
    """The generations that count, newest first, each with the last step that counts."""
    known = {record.generation: record for record in records}
    links: Chain = {}
    if not known:
        return links
    generation, limit = max(known), None
    while True:
        links[generation] = limit
        record = known.get(generation)
        if record is None or record.resumed_from is None:
            return links
        parent = record.resumed_from
        if parent.generation >= generation:
            raise ValueError(f"generation {generation} says it resumed from the later generation {parent.generation}")
        generation, limit = parent.generation, parent.step


def counts(links: Chain, checkpoint: CheckpointRef) -> bool:
    """Whether a checkpoint lies on the chain."""
    if checkpoint.generation not in links:
        return False
    limit = links[checkpoint.generation]
    return limit is None or checkpoint.step <= limit
