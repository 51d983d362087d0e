"""The next action of an evaluator process: a pure function of the files on the shared disk.

The processes share no lock and elect no leader. Each surveys the run directory, chooses and tries to claim; one that
loses the claim starts again. What a process has seen may be outdated by the time it acts, so the choice only has to be
right for any mixture of old and new: work done twice gives the same result (see `publication`), and work left undone is
found by the next survey.

The base model, where there is one, comes before all checkpoints: it is evaluated once, and checkpoints are compared
with it from the first one on.

`Latest` starts nothing but the newest checkpoint. Older ones that were started are finished first, because a
half-evaluated checkpoint is worth nothing; older ones that were not started are skipped, and that is recorded. `Every`
works through all checkpoints from the oldest on. When training is over, the checkpoint named by DONE, or the newest one
if the job failed, is evaluated whatever else was decided about it before.

Rejected: one process that hands out the work (its loss stops all the others, and it would be one more protocol), and
giving shard i to process i for good (a dead or slow process would hold back every checkpoint).
"""

from dataclasses import dataclass
from typing import Literal

from tandem.wire.status import CheckpointRef

Policy = Literal["Latest", "Every"]


@dataclass(frozen=True)
class EvaluationState:
    """Progress of the evaluation of one checkpoint."""

    reference: CheckpointRef
    finished: frozenset[int] = frozenset()
    """Shards whose result is published."""
    claimed: frozenset[int] = frozenset()
    """Shards that a process is evaluating."""
    merged: bool = False
    """Whether the merged result is published."""
    skipped: bool = False
    """Whether it is recorded as passed over."""

    @property
    def is_started(self) -> bool:
        """Whether work on it would be lost if it were skipped."""
        return bool(self.finished or self.claimed)


@dataclass(frozen=True)
class View:
    """The state of a run directory as of one survey."""

    states: tuple[EvaluationState, ...] = ()
    """The checkpoints on the lineage that can be read, newest first."""
    ended: bool = False
    """Whether training is over."""
    final: CheckpointRef | None = None
    """The last checkpoint, if DONE names it."""
    unsure: bool = False
    """Whether a checkpoint is left out that may prove sound in a second survey."""
    base: EvaluationState | None = None
    """The base model, where the job has one that this process can use."""

    def state_of(self, reference: CheckpointRef) -> EvaluationState | None:
        """The progress of a checkpoint, or of the base model; None if it does not exist."""
        states = self.states if self.base is None else (self.base, *self.states)
        return next((state for state in states if state.reference == reference), None)

    @property
    def needed(self) -> EvaluationState | None:
        """The checkpoint that has to be evaluated whatever happened before: once training is over its final one, or the
        newest where none is named or the named one cannot be read."""
        if not self.ended or not self.states:
            return None
        final_states = (state for state in self.states if state.reference == self.final)
        return next(final_states, self.states[0])


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
    """Record that these checkpoints are skipped."""

    references: tuple[CheckpointRef, ...]


@dataclass(frozen=True)
class Wait:
    """Do nothing now."""


@dataclass(frozen=True)
class Finished:
    """End: training is over and everything that has to be evaluated is."""


Action = Evaluate | Merge | Skip | Wait | Finished


def choose(view: View, policy: Policy, shards: int) -> Action:
    """Choose the next action of one process.

    Args:
        view: the run directory. It contains no claims of this process, which surveys only when it has none.
        shards: number of shards of the evaluation data; at least 1.
    """
    # After the end nothing may be decided on an incomplete view: the doubtful checkpoint may be the final one.
    if view.ended and view.unsure:
        return Wait()
    everything = frozenset(range(shards))
    unmerged = [state for state in view.states if not state.merged]
    base = [view.base] if view.base is not None and not view.base.merged else []
    # Merging comes first, because it is cheap and frees the checkpoint for retention.
    for state in [*base, *unmerged]:
        if state.finished >= everything:
            return Merge(state.reference)

    # Oldest first, with those that an earlier run under `Latest` skipped.
    candidates = unmerged[::-1] if policy == "Every" else _latest_checkpoints(view, unmerged)
    # Skips come before the next evaluation, which may take minutes, so that readers learn of them at once.
    if policy == "Latest" and (passed_over := _passed_over(view, unmerged)):
        return Skip(passed_over)
    candidates = [*base, *candidates]
    for state in candidates:
        if free := everything - state.finished - state.claimed:
            return Evaluate(state.reference, tuple(sorted(free)))
    # While others still work on shards, their results may get lost, so this process stays.
    return Finished() if view.ended and not candidates else Wait()


def is_still_needed(state: EvaluationState, shard: int, view: View, policy: Policy) -> bool:
    """Whether a shard whose claim was just won still needs work: since the survey that led here, another process may
    have finished it, or skipped its checkpoint."""
    if state.merged or shard in state.finished:
        return False
    return not state.skipped or policy == "Every" or state.reference == _reference(view.needed)


def _latest_checkpoints(view: View, unmerged: list[EvaluationState]) -> list[EvaluationState]:
    """The needed checkpoint, started ones, and while training continues the newest one."""
    needed = view.needed
    started = [state for state in unmerged if state.is_started and not state.skipped and state != needed]
    if view.ended:
        return [needed, *started] if needed and not needed.merged else started
    newest = view.states[0] if view.states else None
    # The newest checkpoint is started only if nobody has started, finished or skipped it.
    if newest is None or newest in started or newest.merged or newest.skipped:
        return started
    return [*started, newest]


def _passed_over(view: View, unmerged: list[EvaluationState]) -> tuple[CheckpointRef, ...]:
    """Checkpoints that were not started and will not be started any more."""
    spared = view.needed if view.ended else view.states[0] if view.states else None
    return tuple(
        state.reference for state in unmerged if not state.is_started and not state.skipped and state != spared
    )


def _reference(state: EvaluationState | None) -> CheckpointRef | None:
    return None if state is None else state.reference
