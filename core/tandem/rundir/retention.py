"""Checkpoint retention: a pure decision which checkpoints to delete. The process that commits a new one carries it out.

Never deleted: the newest `keepLast`, the best `keepBest` by score, those at multiples of `keepEvery`, the one that the
running generation resumed from, those being read, those that are partly evaluated, and, where every checkpoint is to
be evaluated, those that are not yet. And two that the run itself may need.

A *rewind* goes back to a checkpoint at least D steps before the newest one (tandem.rundir.lineage.reach), and the
newest `keepLast` may all be too young for it. So the newest one that is old enough is kept: the *reserve*. It would be
kept for ever, and grow old, if nothing replaced it; so the *next* reserve is kept, too, the oldest of those that are
still too young. Once it is D steps old it replaces the reserve, and the oldest that is too young then is at most as old
as the newest was when the one before became next. So at any time a rewind loses at most 2 D steps and an interval, at
the cost of at most two more checkpoints; where the interval is longer than D, of none that `keepLast` of 2 would not
keep.

A *fall-back*, when the newest turns out to be damaged, needs another checkpoint: that is the reserve or the next one,
because D is at least 1.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tandem.job.resource import CheckpointSpec, Evaluators
from tandem.rundir.evaluations import Rank
from tandem.rundir.lineage import reach
from tandem.wire.status import CheckpointRef


@dataclass(frozen=True)
class RetentionInputs:
    """The inputs of retention besides the policy: how the run uses its checkpoints now."""

    ranks: Mapping[str, Rank | None]
    """The rank of each evaluated checkpoint, by name; None for one that cannot become the best."""
    resumed_from: str | None
    """The checkpoint that the running generation started from."""
    leased: Collection[str]
    """Checkpoints that another process reads."""
    reach: int = reach(0)
    """Minimum distance from the newest checkpoint, in steps, of one that a rewind would resume from."""
    begun: Collection[str] = ()
    """Checkpoints of which some shards are evaluated, but not all."""


def retention_reasons(
    newest_first: Sequence[CheckpointRef], policy: CheckpointSpec, evaluators: Evaluators, keepers: RetentionInputs
) -> dict[str, list[str]]:
    """The reasons to keep each checkpoint, in the same order and in the job's words; empty for one that may be deleted.

    Args:
        newest_first: all committed checkpoints that count.
    """
    names = {reference.name for reference in newest_first}
    ranked = sorted((rank, name) for name, rank in keepers.ranks.items() if rank is not None and name in names)
    best = {name for _, name in ranked[: policy.keep_best]}
    awaits_all = evaluators.policy == "Every" and evaluators.processes > 0
    needed = reserves([reference.step for reference in newest_first], keepers.reach)
    reasons_by_name = {}
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
        reasons_by_name[name] = [reason for reason, applies in holds.items() if applies]
        # Only where no other reason applies: a reserve that is kept anyway costs nothing.
        if not reasons_by_name[name] and reference.step in needed:
            reasons_by_name[name] = ["for a rewind"]
    return reasons_by_name


def reserves(newest_first: Sequence[int], reach: int) -> tuple[int | None, int | None]:
    """The step of the checkpoint that a rewind would go back to, and of the one that will take its place."""
    if not newest_first:
        return None, None
    old_enough = newest_first[0] - reach
    reserve = next((step for step in newest_first if step <= old_enough), None)
    return reserve, next((step for step in reversed(newest_first) if step > old_enough), None)


def checkpoints_to_delete(
    newest_first: Sequence[CheckpointRef], policy: CheckpointSpec, evaluators: Evaluators, keepers: RetentionInputs
) -> list[str]:
    """Names of the checkpoints to delete, oldest first. Takes the arguments of `retention_reasons`."""
    reasons_by_name = retention_reasons(newest_first, policy, evaluators, keepers)
    return [name for name in reversed(reasons_by_name) if not reasons_by_name[name]]
