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


def reasons(
    newest_first: Sequence[CheckpointRef], policy: Checkpoint, evaluators: Evaluators, keepers: Keepers
) -> dict[str, list[str]]:
    """For each checkpoint, in the same order, why it is kept, in the words of the job; nothing for one that may go.

    Args:
        newest_first: all committed checkpoints that count.
    """
    sign = -1 if evaluators.direction == "Maximize" else 1
    scored = [reference for reference in newest_first if reference.name in keepers.scores]
    ranked = sorted(scored, key=lambda reference: (sign * keepers.scores[reference.name], reference.step))
    best = {reference.name for reference in ranked[: policy.keep_best]}
    awaits_all = evaluators.policy == "Every" and evaluators.processes > 0
    found = {}
    for index, reference in enumerate(newest_first):
        name = reference.name
        holds = {
            "keepLast": index < policy.keep_last,
            "keepBest": name in best,
            "keepEvery": bool(policy.keep_every) and reference.step % (policy.keep_every or 1) == 0,
            "waits for evaluation": awaits_all and name not in keepers.scores,
            "leased": name in keepers.leased,
            "resumed from": name == keepers.resumed_from,
        }
        found[name] = [reason for reason, is_so in holds.items() if is_so]
    return found


def expendable(
    newest_first: Sequence[CheckpointRef], policy: Checkpoint, evaluators: Evaluators, keepers: Keepers
) -> list[str]:
    """Names of the checkpoints to delete, oldest first. Takes what `reasons` takes."""
    found = reasons(newest_first, policy, evaluators, keepers)
    return [name for name in reversed(found) if not found[name]]
