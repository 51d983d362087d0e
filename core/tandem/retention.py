"""Which checkpoints may be deleted: a pure decision, carried out by whoever commits a new one.

Never deleted: the newest `keepLast`, the best `keepBest` by score, those at multiples of `keepEvery`, the one that the
running generation resumed from, those being read, and, where every checkpoint is to be evaluated, those that are not
yet.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tandem.job import Checkpoint, Evaluators
from tandem.status import CheckpointRef


@dataclass(frozen=True)
class Keepers:
    """What the run is doing with its checkpoints now."""

    scores: Mapping[str, float]
    """Score of each evaluated checkpoint, by name."""
    resumed_from: str | None
    """The checkpoint that the running generation started from."""
    leased: Collection[str]
    """Checkpoints that somebody reads."""


def expendable(
    newest_first: Sequence[CheckpointRef], policy: Checkpoint, evaluators: Evaluators, keepers: Keepers
) -> list[str]:
    """Names of the checkpoints to delete, oldest first.

    Args:
        newest_first: all committed checkpoints that count.
    """
    keep = {reference.name for reference in newest_first[: policy.keep_last]}
    sign = -1 if evaluators.direction == "Maximize" else 1
    scored = [reference for reference in newest_first if reference.name in keepers.scores]
    ranked = sorted(scored, key=lambda reference: (sign * keepers.scores[reference.name], reference.step))
    keep |= {reference.name for reference in ranked[: policy.keep_best]}
    if policy.keep_every:
        keep |= {reference.name for reference in newest_first if reference.step % policy.keep_every == 0}
    if evaluators.policy == "Every" and evaluators.processes > 0:
        keep |= {reference.name for reference in newest_first if reference.name not in keepers.scores}
    keep |= set(keepers.leased)
    if keepers.resumed_from:
        keep.add(keepers.resumed_from)
    return [reference.name for reference in reversed(newest_first) if reference.name not in keep]
