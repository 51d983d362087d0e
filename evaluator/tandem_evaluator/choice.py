"""The next action of an evaluator process: a pure function of the files on the shared disk.

The processes share no lock and elect no leader. Each looks, chooses and tries to claim; one that loses the claim
looks again. Whatever one of them has seen may be old by the time it acts, so the choice only has to be right for any
mixture of old and new: work done twice gives the same result (see `publication`), and work left undone is found by
the next look.

The base model, where there is one, comes before all checkpoints: it is evaluated once, and what is trained is compared
with it from the first checkpoint on.

`Latest` begins nothing but the newest checkpoint. Older ones that somebody began are finished first, because a
half-evaluated checkpoint is worth nothing; older ones that nobody began are skipped, and that is recorded. `Every`
works through all checkpoints from the oldest on. When training is over, the checkpoint named by DONE, or the newest
one if the job failed, is evaluated whatever else was decided about it before.

Rejected: one process that hands out the work (its loss stops all the others, and it would be one more protocol), and
giving shard i to process i for good (a dead or slow process would hold back every checkpoint).
"""

from dataclasses import dataclass
from typing import Literal

from tandem.status import CheckpointRef

Policy = Literal["Latest", "Every"]


@dataclass(frozen=True)
class Standing:
    """How far the evaluation of one checkpoint is."""

    reference: CheckpointRef
    finished: frozenset[int] = frozenset()
    """Shards whose result is published."""
    claimed: frozenset[int] = frozenset()
    """Shards that somebody is at work on."""
    merged: bool = False
    """Whether the merged result is published."""
    skipped: bool = False
    """Whether it is recorded as passed over."""

    @property
    def begun(self) -> bool:
        """Whether there is work in it that would be lost."""
        return bool(self.finished or self.claimed)


@dataclass(frozen=True)
class View:
    """What one look at the run directory found."""

    standings: tuple[Standing, ...] = ()
    """The checkpoints on the lineage that can be read, newest first."""
    ended: bool = False
    """Whether training is over."""
    final: CheckpointRef | None = None
    """The last checkpoint, if DONE names it."""
    unsure: bool = False
    """Whether a checkpoint is left out that a second look may find sound."""
    base: Standing | None = None
    """The base model, where the job has one that this process can use."""

    def standing(self, reference: CheckpointRef) -> Standing | None:
        """How far the evaluation of a checkpoint, or of the base model, is; None for one that is not there."""
        every = self.standings if self.base is None else (self.base, *self.standings)
        return next((one for one in every if one.reference == reference), None)

    @property
    def needed(self) -> Standing | None:
        """What must be evaluated whatever happened before: once training is over its final checkpoint, or the newest
        one where none is named or the named one cannot be read."""
        if not self.ended or not self.standings:
            return None
        named = (standing for standing in self.standings if standing.reference == self.final)
        return next(named, self.standings[0])


@dataclass(frozen=True)
class Evaluate:
    """Evaluate the first of these shards whose claim is won."""

    reference: CheckpointRef
    shards: tuple[int, ...]


@dataclass(frozen=True)
class Merge:
    """All shards are there: publish the merged result."""

    reference: CheckpointRef


@dataclass(frozen=True)
class Skip:
    """Record that these are passed over."""

    references: tuple[CheckpointRef, ...]


@dataclass(frozen=True)
class Wait:
    """Nothing to do now."""


@dataclass(frozen=True)
class Finished:
    """Training is over and all that is to be evaluated is."""


Action = Evaluate | Merge | Skip | Wait | Finished


def choose(view: View, policy: Policy, shards: int) -> Action:
    """The next step of one process.

    Args:
        view: what it sees. Claims of its own are not in it: it looks only when it has none.
        shards: into how many the evaluation data is split; at least 1.
    """
    if view.ended and view.unsure:
        return Wait()
    everything = frozenset(range(shards))
    unmerged = [standing for standing in view.standings if not standing.merged]
    base = [view.base] if view.base is not None and not view.base.merged else []
    for standing in [*base, *unmerged]:
        if standing.finished >= everything:
            return Merge(standing.reference)

    wanted = _every(unmerged) if policy == "Every" else _latest(view, unmerged)
    if policy == "Latest" and (passed_over := _passed_over(view, unmerged)):
        return Skip(passed_over)
    wanted = [*base, *wanted]
    for standing in wanted:
        if free := everything - standing.finished - standing.claimed:
            return Evaluate(standing.reference, tuple(sorted(free)))
    return Finished() if view.ended and not wanted else Wait()


def worth_doing(standing: Standing, shard: int, view: View, policy: Policy) -> bool:
    """Whether a shard whose claim was just won still needs work: since the look that led here, another process may have
    finished it, or passed its checkpoint over."""
    if standing.merged or shard in standing.finished:
        return False
    return not standing.skipped or policy == "Every" or standing.reference == _reference(view.needed)


def _every(unmerged: list[Standing]) -> list[Standing]:
    """Oldest first. What an earlier run under `Latest` skipped is included."""
    return unmerged[::-1]


def _latest(view: View, unmerged: list[Standing]) -> list[Standing]:
    """The needed one, what was begun, and while training goes on the newest."""
    needed = view.needed
    begun = [standing for standing in unmerged if standing.begun and not standing.skipped and standing != needed]
    if view.ended:
        return [needed, *begun] if needed and not needed.merged else begun
    newest = view.standings[0] if view.standings else None
    if newest is None or newest in begun or newest.merged or newest.skipped:
        return begun
    return [*begun, newest]


def _passed_over(view: View, unmerged: list[Standing]) -> tuple[CheckpointRef, ...]:
    """What nobody began and nobody will begin any more."""
    spared = view.needed if view.ended else view.standings[0] if view.standings else None
    return tuple(
        standing.reference
        for standing in unmerged
        if not standing.begun and not standing.skipped and standing != spared
    )


def _reference(standing: Standing | None) -> CheckpointRef | None:
    return None if standing is None else standing.reference
