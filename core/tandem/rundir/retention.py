"""Checkpoint retention: a pure decision which checkpoints to delete. The process that commits a new one carries it out.

Never deleted: the newest `keepLast`, the best `keepBest` by score, those at multiples of `keepEvery`, the one that the
running generation resumed from, those being read, those that are half evaluated, and, where every checkpoint is to
be evaluated, those that are not yet. And two that the run itself may need.

A *rewind* goes back to a checkpoint that lies at least D steps before the newest one (tandem.rundir.lineage.reach),
which the newest `keepLast` may all be too young for. So the newest one that is old enough stays: the *reserve*. It
would stay for ever, and grow old, if nothing came after it; so the *next* reserve stays, too, the oldest of those that
are too young yet. Once it is D steps old it takes the place of the reserve, and the oldest that is too young then is at
most as old as the newest was when the one before became next. So at any time a rewind loses at most 2 D steps and an
interval, for two checkpoints more at most; where the interval is longer than D, for none that `keepLast` of 2 would not
keep.

A *fall-back*, when the newest turns out to be damaged, needs another one: that is the reserve or the next one, because
D is at least 1.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tandem.job import Checkpoint, Evaluators
from tandem.rundir.evaluations import Rank
from tandem.rundir.lineage import reach
from tandem.status import CheckpointRef


@dataclass(frozen=True)
class Keepers:
    """What the run is doing with its checkpoints now."""

    ranks: Mapping[str, Rank | None]
    """Of each evaluated checkpoint, by name; None for one that cannot become the best."""
    resumed_from: str | None
    """The checkpoint that the running generation started from."""
    leased: Collection[str]
    """Checkpoints that somebody reads."""
    reach: int = reach(0)
    """Steps before the newest checkpoint at which a rewind would look for one."""
    begun: Collection[str] = ()
    """Checkpoints of which evaluators have done a part."""


def reasons(
    newest_first: Sequence[CheckpointRef], policy: Checkpoint, evaluators: Evaluators, keepers: Keepers
) -> dict[str, list[str]]:
    """For each checkpoint, in the same order, why it is kept, in the words of the job; nothing for one that may go.

    Args:
        newest_first: all committed checkpoints that count.
    """
    names = {reference.name for reference in newest_first}
    ranked = sorted((rank, name) for name, rank in keepers.ranks.items() if rank is not None and name in names)
    best = {name for _, name in ranked[: policy.keep_best]}
    awaits_all = evaluators.policy == "Every" and evaluators.processes > 0
    needed = reserves([reference.step for reference in newest_first], keepers.reach)
    found = {}
    for index, reference in enumerate(newest_first):
        name = reference.name
        holds = {
            "keepLast": index < policy.keep_last,
            "keepBest": name in best,
            "keepEvery": bool(policy.keep_every) and reference.step % (policy.keep_every or 1) == 0,
            "waits for evaluation": awaits_all and name not in keepers.ranks,
            "being evaluated": evaluators.processes > 0 and name in keepers.begun,
            "leased": name in keepers.leased,
            "resumed from": name == keepers.resumed_from,
        }
        found[name] = [reason for reason, is_so in holds.items() if is_so]
        if not found[name] and reference.step in needed:
            found[name] = ["for a rewind"]
    return found


def reserves(newest_first: Sequence[int], reach: int) -> tuple[int | None, int | None]:
    """The step of the checkpoint that a rewind would go back to, and of the one that will take its place."""
    if not newest_first:
        return None, None
    old_enough = newest_first[0] - reach
    reserve = next((step for step in newest_first if step <= old_enough), None)
    return reserve, next((step for step in reversed(newest_first) if step > old_enough), None)


def expendable(
    newest_first: Sequence[CheckpointRef], policy: Checkpoint, evaluators: Evaluators, keepers: Keepers
) -> list[str]:
    """Names of the checkpoints to delete, oldest first. Takes what `reasons` takes."""
    found = reasons(newest_first, policy, evaluators, keepers)
    return [name for name in reversed(found) if not found[name]]
