"""The end of a generation: at once, or after it has saved.

Pure; a part of the state machine in `membership`.

**Save, then change.** A member that has to go, a newcomer, another number of replicas: none of them is in a hurry. The
members are asked to save and to stop at the next step boundary, and the generation is closed when all have come back.
So such a change recomputes nothing, and growth need not wait for a checkpoint: it makes one. While they save, the
generation stays open and nobody is told to rejoin, because that aborts ranks, and the first one may still be writing.

It is sound because nothing depends on it. Asking changes no membership and gives out no number. Everything that closes
a generation at once still does so meanwhile (a failure, a loss, a hang), and so does a limit in time; then the group
resumes from the newest checkpoint as after any loss. A save that comes too late is fenced by its number as always.

Rejected: closing when a checkpoint was committed (steps go on while it is written, and are lost), and closing as soon
as the first member is back (the rest may still be writing).
"""

from dataclasses import replace

from tandem.reasons import Reason
from tandem_coordinator.failures import cut_off, first_of, is_of_all, progress, silent_members, strike, worded
from tandem_coordinator.group_state import (
    Action,
    Cause,
    Close,
    Complete,
    FailJob,
    Next,
    Saving,
    Say,
    State,
    is_inside,
    listed,
)

SAVE_SECONDS = 30.0
"""How long a generation may take to stop before it is closed anyway, not counting the steps below."""
SAVE_STEPS = 3
"""Steps added to that limit, because a step may be long. Time that ranks spend writing the checkpoint does not count:
closing the group before the checkpoint is complete loses more than waiting does. A pod that must go has its own grace
period, and a writer that is stuck is found by the hang watch."""

FIRST_WORD_SECONDS = 1.0
"""… and, on top of two heartbeats, how long one may take of which nobody has heard that it made a step."""


def close(state: State, cause: Cause, now: float) -> Next:
    """Close the open generation now; while none is open, explain why the last one ended, if nobody knew."""
    if not state.open:
        if not state.cause.is_consequence or cause.is_consequence:
            return state, ()
        # The connections broke because of this: now the reason is known.
        state = replace(state, cause=cause)
        return count_failure(state, now) if cause.is_failure else (state, ())
    assert state.latest is not None
    actions: tuple[Action, ...] = (Close(state.latest.generation, cause),)
    state = replace(
        state,
        open=False,
        saving=None,
        preflight=None,
        training=False,
        cause=cause,
        changed=now,
        finished=frozenset(),
        progress=progress(state, now),
    )
    if cause.is_failure:
        state, more = count_failure(state, now)
        actions += more
    return state, actions


def close_saved(state: State, cause: Cause, now: float) -> Next:
    """Close the open generation after it has saved, or now if it is not known to save when asked."""
    if not state.can_save:
        return close(state, cause, now)
    return _ask(state, Saving(cause, now))


def preempt(state: State, now: float) -> Next:
    """Have the group save if members of it have to go."""
    if not state.open:
        return state, ()
    leaving = {agent.member.replica for agent in state.agents.values() if agent.leaves and is_inside(state, agent)}
    # Nobody depends on a member whose ranks have finished.
    leaving -= state.finished
    if not leaving:
        return state, ()
    asked = state.saving or Saving(Cause("Preempted", ""), now)
    everybody = asked.leaving | leaving
    if everybody == asked.leaving:
        return state, ()
    verb = "has" if len(everybody) == 1 else "have"
    cause = Cause("Preempted", f"{listed(everybody)} {verb} to leave")
    if state.scripted or not (state.training or state.can_save):
        return close(state, cause, now)
    # Ranks that report steps are asked even before all of them are known to obey: they go on training meanwhile.
    return _ask(state, replace(asked, cause=cause, leaving=everybody))


def finish_saving(state: State, now: float) -> Next:
    """Close the generation that was asked to save once all of its members are back or gone, or after too long."""
    saving = state.saving
    if saving is None:
        return state, ()
    at_work = [
        agent.member.replica
        for agent in state.agents.values()
        if is_inside(state, agent) and not agent.waits and agent.member.replica not in state.finished
    ]
    if not at_work:
        return close(state, saving.cause, now)
    if not state.training:
        # Nobody has said yet that a step was made. That may be a heartbeat old; if it is not, there is nothing to save.
        if now - saving.since <= 2 * state.rules.heartbeat + FIRST_WORD_SECONDS:
            return state, ()
        return close(state, Cause(saving.cause.reason, f"{saving.cause.detail}; there was nothing to save yet"), now)
    seconds = SAVE_SECONDS + SAVE_STEPS * state.step_seconds
    if now - saving.since <= seconds:
        return state, ()
    late = f"{saving.cause.detail}, and {listed(at_work)} did not save within {seconds:.0f} s"
    return close(state, Cause(saving.cause.reason, late), now)


def finish(state: State, replica: str) -> Next:
    """All ranks of a member of the open generation have ended with exit code 0. Once those of all members have, the job
    is complete: whoever comes now must not begin it anew."""
    if replica in state.finished:
        return state, ()
    state = replace(state, finished=state.finished | {replica})
    return complete(state) if is_finished(state) else (state, ())


def is_finished(state: State) -> bool:
    """Whether all ranks of the newest generation have ended with exit code 0."""
    members = [] if state.latest is None else state.latest.members
    return bool(members) and state.finished.issuperset(member.replica for member in members)


def complete(state: State) -> Next:
    """The job is complete, as soon as the run directory says so."""
    cause = Cause("Completed", f"all ranks of generation {state.number} ended with exit code 0")
    return replace(state, completing=cause), (Complete(cause),)


def explain(state: State, now: float) -> Next:
    """Connections broke, and nobody explained why before the next generation: count that, or it could go on for
    ever. Not if a member is silent: that it is lost is likely, and known soon."""
    if silent := silent_members(state, now):
        state = replace(state, cause=Cause("MemberLost", f"{listed(silent)} gave no sign of life"))
        if len(silent) > 1:
            return state, ()
        return strike(state, silent[0], state.cause.detail, now, counted=False)
    if state.cause.reason == "StoreUnreachable":
        culprit, detail = cut_off(state, now)
        state = replace(state, cause=Cause("StoreUnreachable", detail, culprit))
    elif is_of_all(state) and (first := first_of(state)) is not None:
        state = replace(state, cause=Cause("WorkerFailed", worded(first[0], first[1].failure)))
    return count_failure(replace(state, cause=replace(state.cause, explained=True)), now)


def count_failure(state: State, now: float) -> Next:
    """Take a failure off the restart budget, and hold it against the replica it is due to; the job fails when the
    budget is used up."""
    state = replace(state, failures=state.failures + 1, failed_at=now)
    if state.cause.culprit:
        state, left_out = strike(state, state.cause.culprit, state.cause.detail, now)
        if left_out:
            # Without it the next group is another one.
            return replace(state, barren=0), left_out
    if state.failures <= state.rules.max_restarts:
        return state, (Say(f"failure {state.failures} of {state.rules.max_restarts} that are forgiven", warning=True),)
    cause = Cause(
        Reason.RESTARTS_EXHAUSTED,
        f"training failed {state.failures} times and elasticity.maxRestarts is {state.rules.max_restarts}; "
        f"the last time because {state.cause.detail}",
    )
    return replace(state, failing=cause), (FailJob(cause, *(first_of(state) or ("", None))),)


def _ask(state: State, saving: Saving) -> Next:
    return replace(state, saving=saving), (Say(f"{saving.cause.detail}; the group saves first"),)
