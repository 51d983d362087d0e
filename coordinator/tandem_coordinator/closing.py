"""The end of a generation: at once, or after it has saved; and the changes of the group that require one.

Pure; a part of the state machine in `membership`.

**Save, then change.** A member that has to go, a newcomer, another number of replicas: none of them is in a hurry. The
members are asked to save and to stop at the next step boundary, and the generation is closed when all have come back.
Such a change therefore recomputes nothing, and growth need not wait for a checkpoint: it makes one. While the members
save, the generation stays open and nobody is told to rejoin, because that aborts ranks, and the first one may still be
writing.

The request is safe because nothing depends on it. It changes no membership and hands out no number. Everything that
closes a generation at once still does so meanwhile (a failure, a loss, a hang), and so does a time limit; then the
group resumes from the newest checkpoint as after any loss. A save that comes too late is fenced by its number as
always.

Ranks that keep their state when the group changes (tandem_trainer.regroup) need not save as long as one member stays.
Their generation is closed at once.

**Growth loses nothing, or less than waiting.** Ranks that are known to save when asked make a checkpoint for it, so a
group grows as soon as its cool-down is over. A script that is not known to do so is ended at once, which costs the
steps since its last checkpoint. Shortly after a change or a checkpoint that is next to nothing, and it only grows: so
the group grows at once as long as at most `growAfterSeconds` of work are at stake. Where checkpoints are seen to come
regularly, it waits for the next one if waiting costs less than the work at stake: the newcomers' time against the
members'. With more at stake and no checkpoint in sight, newcomers wait for one, but for `growAfterSeconds` at most,
because a group that stays too small for ever costs more.

**Cool-down.** It is the time between two growths: each costs a restart, and agents of a large group arrive one after
the other. It delays neither the first growth after the start, nor a new process that takes the place of a lost member:
a group is back at its size as soon as its replacements have come. Where ranks keep their state, and newcomers have
prepared theirs before they join, growth costs no restart, and is not held back at all. A process that comes back by
itself, because it was cut off, waits for the cool-down: where a network comes and goes, the group would change each
time. A pod that comes and goes is held back by the operator, which knows why it ended.

Rejected: closing when a checkpoint was committed (steps go on while it is written, and are lost), and closing as soon
as the first member is back (the rest may still be writing).
"""

from dataclasses import replace

from tandem.formatting import count_noun
from tandem.wire.reasons import Reason
from tandem_coordinator.failures import (
    add_strike,
    blame_for_store,
    describe,
    first_failure,
    is_collective_failure,
    is_gone,
    progress_of,
    silent_members,
)
from tandem_coordinator.group_state import (
    Action,
    AgentState,
    Announce,
    Cause,
    Close,
    Complete,
    FailJob,
    Saving,
    State,
    Transition,
    is_member,
    join_names,
    replicas_text,
    waiting_agents,
)

SETTLE_SECONDS = 1.0
"""Time for which ranks that keep their state train on after a member was asked to leave, in seconds: others may have to
go, too. Less than a rank that was asked goes on by itself (tandem_trainer.train.SIGNAL_PATIENCE_SECONDS)."""
SAVE_SECONDS = 30.0
"""Maximum time that a generation may take to save and stop before it is closed anyway, plus SAVE_STEPS steps."""
SAVE_STEPS = 3
"""Steps added to that limit, because a step may be long. Time that ranks spend writing the checkpoint does not count:
closing the group before the checkpoint is complete loses more than waiting does. A pod that must go has its own grace
period, and a writer that is stuck is found by the hang watch."""
FIRST_STEP_SECONDS = 1.0
"""Maximum time, on top of two heartbeats, that the first report of a step of a saving generation may take."""
MAX_START_FACTOR = 5
"""The first generation waits for the full target until `startAfterSeconds` after the last arrival, because agents
started together arrive apart; at most this many times that long after the first arrival."""
GRACE_SECONDS = 0.3
"""Replacements that arrive within so short a time of each other join together. Newcomers beyond the size that the group
has had wait for each other as the first group does: they would wait for the cool-down otherwise."""


def close(state: State, cause: Cause, now: float) -> Transition:
    """Close the open generation now. While none is open, explain why the last one ended, if that was unknown."""
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
        survived=state.survive,
        cause=cause,
        last_change=now,
        finished=frozenset(),
        # Recorded here, because what tells the progress is reset when the next generation opens.
        progress=progress_of(state, now),
    )
    if cause.is_failure:
        state, more = count_failure(state, now)
        actions += more
    return state, actions


def close_after_save(state: State, cause: Cause, now: float) -> Transition:
    """Close the open generation after it has saved, or now if it is not known to save when asked, or keeps its
    state."""
    if not state.can_save or state.survive:
        return close(state, cause, now)
    return _request_save(state, Saving(cause, now))


def preempt(state: State, now: float) -> Transition:
    """Have the group save if some of its members have to go."""
    if not state.open:
        return state, ()
    leaving = {agent.member.replica for agent in state.agents.values() if agent.is_leaving and is_member(state, agent)}
    # Nobody depends on a member whose ranks have finished.
    leaving -= state.finished
    if not leaving:
        return state, ()
    saving = state.saving or Saving(Cause("Preempted", ""), now)
    all_leaving = saving.leaving | leaving
    # The request was sent already: only further leaving members change it.
    if all_leaving == saving.leaving:
        return state, ()
    verb = "has" if len(all_leaving) == 1 else "have"
    cause = Cause("Preempted", f"{join_names(all_leaving)} {verb} to leave")
    # Members that stay keep the state, if they are enough for a group. If all go, they have to save it; and they are
    # rarely asked at the very same moment.
    stays = state.survive and len(state.members) - len(all_leaving) >= state.rules.minimum
    notified_at = min(agent.leaving_since for agent in state.agents.values() if agent.leaving_since is not None)
    if stays and now - notified_at < SETTLE_SECONDS:
        return state, ()
    if stays or state.scripted or not (state.training or state.can_save):
        return close(state, cause, now)
    # Ranks that report steps are asked even before all of them are known to obey: they go on training meanwhile.
    return _request_save(state, replace(saving, cause=cause, leaving=all_leaving))


def resize(state: State, now: float) -> Transition:
    """Close the open generation if its ranks have to read their settings again, or if its size is not the target."""
    # A generation that is already saving is closed anyway, and the next one is formed with the right size.
    if not state.open or state.latest is None or state.saving is not None:
        return state, ()
    if state.finished:
        # Some have done their work already. Another group would do it again.
        return state, ()
    # Ranks that cannot save when asked have settings of their own.
    if state.settings_changed and state.training and state.can_save:
        # Ranks that keep their process would keep their settings, too.
        return _request_save(state, Saving(Cause("SettingsChanged", state.settings_changed), now))
    size = len(state.latest.members)
    if size > state.target:
        detail = f"the target is {replicas_text(state.target)}, and the group has {size}"
        return close_after_save(state, Cause("TargetChanged", detail), now)
    newcomers = waiting_agents(state)
    # Newcomers that make no whole pipeline together would only cost a restart.
    if state.rules.largest_usable(size + len(newcomers)) <= size or size >= state.target:
        return state, ()
    if not _may_grow(state, newcomers, size, now):
        return state, ()
    names = join_names(agent.member.replica for agent in newcomers)
    return close_after_save(state, Cause("MemberJoined", f"{names} can join"), now)


def _may_grow(state: State, newcomers: list[AgentState], size: int, now: float) -> bool:
    """Whether the group should grow now (see "Growth" and "Cool-down" above)."""
    arrivals = [agent.since for agent in newcomers]
    # A process that was never in a generation takes the place of a lost member: it does not wait for the cool-down. Nor
    # does an agent whose ranks have failed, and whose new ones are prepared: that costs the others one step's pause.
    fresh = [agent for agent in newcomers if agent.generation == 0 or agent.starts_anew]
    is_replacement = size < state.largest and bool(fresh)
    is_held_back = not is_replacement and not (state.survive and len(fresh) == len(newcomers))
    ready_at = max(arrivals)
    if size + len(newcomers) < state.target:
        # More may come: wait a moment for them, so that they do not cost a restart of their own.
        settling = GRACE_SECONDS if is_replacement else state.rules.start_after
        ready_at = min(ready_at + settling, min(arrivals) + MAX_START_FACTOR * settling)
    if is_held_back:
        ready_at = max(ready_at, state.last_growth + state.rules.grow_cooldown)
    if now < ready_at:
        return False
    if state.can_save:
        # Before its first step it has nothing to save, but its start would be lost.
        return state.training
    # The ranks do not save when asked, so growth loses the steps since the last checkpoint or change.
    if state.checkpoint_at is not None and state.checkpoint_at >= ready_at:
        return True
    saved_at = max(state.last_change, state.checkpoint_at or 0.0)
    at_stake = now - saved_at
    if state.checkpoint_every is not None and (due := saved_at + state.checkpoint_every) > now:
        # Wait for the next checkpoint while that costs the newcomers less than its loss costs the members.
        joining = min(len(newcomers), state.target - size)
        if at_stake * size > (due - now) * joining and now - min(arrivals) < state.rules.grow_after:
            return False
    return at_stake <= state.rules.grow_after or now - min(arrivals) >= state.rules.grow_after


def finish_saving(state: State, now: float) -> Transition:
    """Close the generation that was asked to save once all of its members are back or gone, or after too long."""
    saving = state.saving
    if saving is None:
        return state, ()
    running = [
        agent.member.replica
        for agent in state.agents.values()
        if is_member(state, agent) and not agent.has_stopped and agent.member.replica not in state.finished
    ]
    # All members, and not only the first, have to be back: the rest may still be writing.
    if not running:
        return close(state, saving.cause, now)
    if not state.training:
        # No step was reported yet. The report may be a heartbeat old; if none comes, there is nothing to save.
        if now - saving.since <= 2 * state.rules.heartbeat + FIRST_STEP_SECONDS:
            return state, ()
        return close(state, Cause(saving.cause.reason, f"{saving.cause.detail}; there was nothing to save yet"), now)
    seconds = SAVE_SECONDS + SAVE_STEPS * state.step_seconds
    if now - saving.since <= seconds:
        return state, ()
    # Too late. The group resumes from the newest checkpoint, as after any loss.
    detail = f"{saving.cause.detail}, and {join_names(running)} did not save within {seconds:.0f} s"
    return close(state, Cause(saving.cause.reason, detail), now)


def mark_finished(state: State, replica: str) -> Transition:
    """Record that all ranks of a member of the open generation have exited with code 0.

    Once those of all members have, the job is complete: an agent that joins later must not start it again.
    """
    if replica in state.finished:
        return state, ()
    state = replace(state, finished=state.finished | {replica})
    return complete(state) if is_finished(state) else (state, ())


def is_finished(state: State) -> bool:
    """Whether all ranks of the newest generation have exited with code 0."""
    members = [] if state.latest is None else state.latest.members
    return bool(members) and state.finished.issuperset(member.replica for member in members)


def complete(state: State) -> Transition:
    """Complete the job. It ends once the run directory records it."""
    cause = Cause("Completed", f"all ranks of generation {state.number} ended with exit code 0")
    return replace(state, completing=cause), (Complete(cause),)


def explain_consequence(state: State, now: float) -> Transition:
    """Attribute broken connections that nobody explained before the next generation, and count them as a failure.

    Uncounted, they could go on for ever. They are not counted if a member is silent: it is probably lost, and that is
    known soon.
    """
    if silent := silent_members(state, now):
        state = replace(state, cause=Cause("MemberLost", f"{join_names(silent)} sent no heartbeat"))
        # Several silent members are a broken network, which is the fault of none of them. One that is gone is a lost
        # node, or a pod that had to go.
        if len(silent) > 1 or is_gone(state.agents[silent[0]], now):
            return state, ()
        return add_strike(state, silent[0], state.cause.detail, now, charged=False)
    if state.cause.reason == "StoreUnreachable":
        culprit, detail = blame_for_store(state, now)
        state = replace(state, cause=Cause("StoreUnreachable", detail, culprit))
    elif is_collective_failure(state) and (first := first_failure(state)) is not None:
        state = replace(state, cause=Cause("WorkerFailed", describe(first[0], first[1].failure)))
    return count_failure(replace(state, cause=replace(state.cause, is_explained=True)), now)


def count_failure(state: State, now: float) -> Transition:
    """Charge a failure to the restart budget, and hold it against the replica that caused it.

    The job fails when the budget is used up.
    """
    state = replace(state, failures=state.failures + 1, failed_at=now)
    if state.cause.culprit:
        state, exclusion = add_strike(state, state.cause.culprit, state.cause.detail, now)
        if exclusion:
            # The failures of the excluded replica were given back, and without it the next group is another one.
            return replace(state, fruitless_generations=0), exclusion
    if state.failures <= state.rules.max_restarts:
        text = f"failure {state.failures} of {state.rules.max_restarts} in the restart budget"
        return state, (Announce(text, warning=True),)
    times = count_noun(state.failures, "time")
    cause = Cause(
        Reason.RESTARTS_EXHAUSTED,
        f"training failed {times} and elasticity.maxRestarts is {state.rules.max_restarts}; "
        f"the last time because {state.cause.detail}",
    )
    return replace(state, failing=cause), (FailJob(cause, *(first_failure(state) or ("", None))),)


def _request_save(state: State, saving: Saving) -> Transition:
    return replace(state, saving=saving), (Announce(f"{saving.cause.detail}; the group saves first"),)
