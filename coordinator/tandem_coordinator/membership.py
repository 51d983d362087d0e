"""Group membership: a pure state machine, `(state, event, now) -> (state, actions)`.

An *agent* is one process that starts the ranks of one replica; a new process is a new *incarnation*. A *generation*
is an immutable, numbered membership. At most one generation is open. It is closed at once when a member fails, is lost,
leaves, is replaced by a new incarnation or asks for a new generation, and when the group hangs (see `hang`). It is
closed after it has saved when a member has to go, newcomers may join or the target changes (see `closing`). A new one
is formed from the agents that wait, which by then have stopped their ranks (see `forming`).

**Why two groups cannot both count.** (1) Numbers: a generation's number is greater than that of every generation
before, and is durable in the run directory before anybody learns of it (`Open` is handed out by the shell after it is
recorded), so a coordinator that restarts never gives a number twice. (2) Exclusion by number, not by trust in
silence: an agent that is lost may be alive behind a broken network and train on. Nothing here depends on it having
stopped. The first rank of a new generation writes, before its first step, the record that says which checkpoint it
resumed from; what an older generation commits after that is off the chain of records (tandem.rundir.lineage) and is
never resumed from or evaluated. (3) Two coordinators, when the old one's node is cut off: each claims the run directory
with its own name when it starts, and looks before it records; the one that finds another's name ends. The records of
generations are created exclusively, so even a number recorded twice within that instant starts one group alone.

**Why no agent waits for ever.** Agents repeat their request until it is answered, and report which generation they were
given last, so that a lost answer is given again and a repeated request is not taken for a new one. Silence ends in
loss, and every wait is limited: STOPPING_SECONDS for an agent that is slow to stop, MAX_START_FACTOR times
`startAfterSeconds` for newcomers, and a limit of its own for a group that saves (tandem_coordinator.closing). After
that, the agents that wait form a group if there are at least `minReplicas` of them. A smaller group never waits for a
replacement.

**A blind coordinator declares nobody lost.** When the coordinator itself was stopped or cut off, all agents seem
silent. Time in which it did not tick is not counted, and while no agent at all is heard none is declared lost:
closing the generation would not help.

Rejected: a consensus store such as etcd (one more thing to run; a single writer with durable numbers is enough,
because the data that must be safe is fenced by number), torchrun's c10d rendezvous (split groups, see DESIGN 4),
leases that make an agent stop by its own clock (a stopped process does not look at its clock when it wakes up),
waiting for the lost member's acknowledgement (that is what it cannot give).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import FinishedMember
from tandem.wire.protocol import Answer, Member, Membership, Order, Sync
from tandem_coordinator import failures, preflight
from tandem_coordinator.closing import close, complete, finish_saving, is_finished, mark_finished, preempt, resize
from tandem_coordinator.failures import describe, exclusion_of, readmit
from tandem_coordinator.forming import form, with_latest
from tandem_coordinator.group_state import (
    WAITS_FOR_BUCKET,
    Action,
    AgentState,
    Announce,
    Cause,
    Close,
    Disconnected,
    Event,
    Exclusion,
    FailJob,
    Hung,
    MemberFinished,
    NumbersFound,
    Open,
    Retarget,
    Rules,
    RunEnded,
    State,
    Synced,
    Tick,
    Transition,
    is_member,
    join_names,
    replicas_text,
    without_agents,
)
from tandem_coordinator.state_store import RecordedState

STALLED_SECONDS = 1.0
"""Time between two ticks above which the coordinator itself is taken to have stood still, in seconds."""
DISCONNECTED_SECONDS = 1.0
"""Time within which an agent whose connection broke must connect again, in seconds; otherwise it is lost. One that
lives connects at once."""
RETURN_SECONDS = 3.0
"""Time within which, after a restart, the agents of one group reach the coordinator after the first of them, in
seconds: each tries for a second, pauses for a third of one, and tries again."""
MAX_RETIRED = 1_000
"""Number of replaced incarnations that are remembered."""


def initial_state(rules: Rules, target: int, now: float, recorded: RecordedState | None = None) -> State:
    """Create the state of a coordinator that has just started.

    Args:
        recorded: the state that a predecessor recorded; None if there was none.
    """
    recorded = recorded or RecordedState()
    latest = recorded.membership
    state = State(
        rules,
        _clamp_target(target, rules),
        number=recorded.generation,
        first=recorded.first,
        last_change=now,
        last_tick=now,
        failures=recorded.failures,
        failed_at=now,
        settings_changed=recorded.settings_changed,
        # The clock of the predecessor is not ours: only ages are recorded.
        exclusions=tuple(
            Exclusion(record.replica, record.node, record.why, now - record.seconds) for record in recorded.exclusions
        ),
    )
    if recorded.generation < recorded.first:
        return state
    # The ranks may never have noticed the restart: their generation is adopted if all of its members report it.
    cause = Cause("Started", "the job starts again")
    state = replace(with_latest(state, latest), cause=cause, adopting_until=now + _return_time(rules))
    finished = frozenset(recorded.finished if rules.completes_on_exit else ())
    return replace(state, finished=finished, largest=0 if latest is None else len(latest.members))


def step(state: State, event: Event, now: float) -> Transition:
    """Apply an event at time `now`; returns the new state and the actions to carry out."""
    # After the end agents are still answered, so that each of them learns of it; nothing else happens.
    if state.end is not None and not isinstance(event, Synced):
        return state, ()
    match event:
        case Synced(sync):
            return _take_sync(state, sync, now)
        case Disconnected():
            return _suspect_disconnected(state, event, now), ()
        case Retarget(replicas):
            return _retarget(state, replicas)
        case Tick():
            return _tick(state, event, now)
        case Hung():
            return _close_hung(state, event, now)
        case MemberFinished(member):
            return _take_record(state, member)
        case NumbersFound(cause):
            # Training that is complete, or has failed already, has another end.
            is_over = state.failing is not None or state.completing is not None
            return (state, ()) if is_over else (replace(state, failing=cause), (FailJob(cause),))
        case RunEnded(cause):
            return _end(state, cause)


def quiet_seconds(state: State, now: float) -> float:
    """Time for which ticks decide nothing unless an agent speaks, in seconds; 0 if the next one may."""
    if not state.open or state.latest is None or len(state.latest.members) != state.target:
        return 0.0
    if state.saving or state.preflight or state.blind or state.finished or state.completing or state.failing:
        return 0.0
    if not state.agents or any(agent.has_stopped or agent.is_leaving for agent in state.agents.values()):
        return 0.0
    # The group is complete and at rest: only the loss of an agent is decided by time.
    return max(0.0, min(agent.last_seen for agent in state.agents.values()) + state.rules.lost_after - now)


def answer(state: State, sync: Sync, recorded: int) -> Answer:
    """Compute the answer to an agent's message. Generations above `recorded` are not durable yet and stay secret."""
    # Two processes may not act for one replica: the older one has to end.
    if _is_retired(state, sync.replica, sync.incarnation):
        return _make_answer("end", f"another process is {sync.replica} now")
    # Checked before the state of the group: an excluded replica must not wait for a generation.
    if state.end is None and (exclusion := exclusion_of(state, sync.replica, sync.node or "")) is not None:
        return Answer(order="end", why=exclusion.reason, left_out=True)
    if state.end is not None:
        return _make_answer("end", state.end.detail)
    current = _membership_of(state, sync.replica, sync.incarnation)
    if sync.state == "leaving":
        return _make_answer("end", "the agent leaves")
    if sync.state == "joining":
        # A generation whose number is not durable yet stays secret: a restarted coordinator might give it out again.
        if current is None or current.generation > recorded or sync.generation == current.generation:
            return _make_answer("wait", _wait_reason(state))
        return Answer(order="run", membership=current, preflight=state.preflight is not None or None)
    runs = current is not None and current.generation == sync.generation
    if state.saving is not None and runs:
        return _make_answer("save", state.saving.cause.detail)
    # Its request for another generation has been handled: it has to stop its ranks and join the next one.
    if sync.reason:
        return _rejoin(state)
    if runs and state.preflight is not None:
        return _make_answer("run", preflight=True)
    # It runs a closed generation. During adoption no agent is told to rejoin: its generation may yet be taken over.
    if not runs and state.adopting_until is None:
        return _rejoin(state)
    return _make_answer("run", finished=bool(sync.finished and sync.replica in state.finished) or None)


def is_redundant(state: State, sync: Sync) -> bool:
    """Whether a message says no more than that its sender lives, so that it may be handled with the next tick."""
    agent = state.agents.get(sync.replica)
    if agent is None or agent.member.incarnation != sync.incarnation or agent.generation != (sync.generation or 0):
        return False
    if agent.disconnected_at is not None or agent.standby != sync.standby:
        return False
    if agent.node != (sync.node or "") or preflight.has_new_report(state, sync):
        return False
    if sync.finished and sync.replica not in state.finished:
        return False
    if sync.state == "joining":
        return agent.has_stopped and agent.member == sync.member
    return sync.state == "running" and not sync.reason and not agent.is_waiting and agent.is_leaving == sync.leaving


# Agents


def _take_sync(state: State, sync: Sync, now: float) -> Transition:
    if _is_retired(state, sync.replica, sync.incarnation):
        return state, ()
    if state.end is not None:
        return (without_agents(state, [sync.replica]) if sync.state == "leaving" else state), ()
    if exclusion_of(state, sync.replica, sync.node or "") is not None:
        return without_agents(state, [sync.replica]), ()
    actions: tuple[Action, ...] = ()
    # A new incarnation replaces the old one before its own message counts.
    agent_before = state.agents.get(sync.replica)
    if agent_before is not None and agent_before.member.incarnation != sync.incarnation:
        state, actions = _replace_incarnation(state, agent_before, now)
        agent_before = None
    # The failure is recorded before this message closes anything: the close may be explained by it.
    state = failures.record_failure(state, sync, now)
    leaving = sync.state == "leaving"
    for apply in (_remove_leaving,) if leaving else (_accept_higher_number, _record_finished, _close_on_request):
        state, more = apply(state, sync, now)
        actions += more
    if leaving or exclusion_of(state, sync.replica, sync.node or "") is not None:
        return state, actions
    waits = sync.state == "joining" and sync.standby != "preparing"
    since = agent_before.since if agent_before is not None and agent_before.is_waiting == waits else now
    # The agent counts as heard in any case, also if its message closed the generation.
    leaving_since = agent_before.leaving_since if agent_before is not None else None
    agent = AgentState(
        *(sync.member, waits, sync.generation or 0, now, since, (leaving_since or now) if sync.leaving else None),
        *(sync.node or "", sync.standby),
    )
    state = replace(state, agents={**state.agents, sync.replica: agent})
    return preflight.record_report(state, sync, now), actions


def _accept_higher_number(state: State, sync: Sync, now: float) -> Transition:
    """Accept a number above ours: what an earlier coordinator recorded was lost. Never fall behind it."""
    if sync.generation is None or sync.generation <= state.number:
        return state, ()
    cause = Cause("MembershipChanged", f"{sync.replica} runs generation {sync.generation}, which is newer")
    state, actions = close(state, cause, now)
    return replace(with_latest(state, sync.membership), number=sync.generation), actions


def _record_finished(state: State, sync: Sync, now: float) -> Transition:
    """Record that all ranks of a running member have exited with code 0."""
    is_in_group = (sync.replica, sync.incarnation) in state.members
    return mark_finished(state, sync.replica) if is_in_group and _has_finished(state, sync) else (state, ())


def _take_record(state: State, member: FinishedMember) -> Transition:
    """Take over from the run directory that a member has finished: its agent could not reach a coordinator."""
    is_in_group = (member.replica, member.incarnation) in state.members and member.generation == state.number
    return mark_finished(state, member.replica) if is_in_group and _takes_finished(state) else (state, ())


def _close_on_request(state: State, sync: Sync, now: float) -> Transition:
    """Close the generation that a member of it wants to leave for another one."""
    current = state.latest
    if current is None or (sync.replica, sync.incarnation) not in state.members:
        return state, ()
    # An older request. The agent has been given this generation since, or will be.
    if sync.generation != current.generation:
        if state.open and sync.state == "joining" and sync.member != state.members[sync.replica, sync.incarnation]:
            detail = f"{sync.replica} has another address than it reported"
            return close(state, Cause("MembershipChanged", detail), now)
        return state, ()
    failure = sync.failure
    code = failure.code if failure is not None and failure.announced else None
    # Exit codes with a meaning of their own come before the general case of a failed worker.
    if failure is not None and code == ExitCode.REWOUND:
        return close(state, Cause("Rewound", failure.error or "the loss became useless"), now)
    # Agents of earlier versions do not report whether a script chose this exit code; there is no error text then.
    if failure is not None and code == ExitCode.OUT_OF_MEMORY and failure.error:
        return close(state, Cause("OutOfMemory", f"rank {failure.rank} ({sync.replica}): {failure.error}"), now)
    if sync.reason == "WorkerFailed" and (failure is None or not failure.consequence):
        return close(state, Cause("WorkerFailed", describe(sync.replica, failure), sync.replica), now)
    # Who is to blame is decided when all have reported: one member, or the owner of the store.
    if sync.reason == "StoreUnreachable":
        first = current.members[0].replica
        state = replace(state, store_unreachable=state.store_unreachable | {sync.replica})
        return close(state, Cause("StoreUnreachable", f"{sync.replica} cannot reach the store of {first}"), now)
    # The group stops by itself: members that come back are no loss.
    if state.saving is not None:
        return state, ()
    if sync.state == "joining" or sync.reason in ("MembershipChanged", "WorkerFailed"):
        # Members whose ranks ended early took the connections of the others with them.
        if state.finished and failure is not None and failure.consequence:
            return close(*failures.blame_finished_members(state, failure, now), now)
        return close(state, Cause("PeerLost", f"{sync.replica} lost its connection to the group"), now)
    return state, ()


def _replace_incarnation(state: State, agent: AgentState, now: float) -> Transition:
    replica, incarnation = agent.member.replica, agent.member.incarnation
    # The old incarnation is remembered, so that it cannot come back if it was only cut off.
    state = replace(without_agents(state, [replica]), retired=(*state.retired, (replica, incarnation))[-MAX_RETIRED:])
    if (replica, incarnation) not in state.members or _is_expendable(state, agent):
        return state, ()
    return close(state, Cause("MemberLost", f"{replica} was replaced by a new process"), now)


def _remove_leaving(state: State, sync: Sync, now: float) -> Transition:
    if sync.failure is not None and not sync.failure.consequence and sync.generation == state.number:
        # Counted while the agent is known, because a strike also counts against the agent's node.
        state, actions = close(state, Cause("WorkerFailed", describe(sync.replica, sync.failure), sync.replica), now)
        return without_agents(state, [sync.replica]), actions
    agent = state.agents.get(sync.replica)
    # While the group saves, a member that leaves is expected to.
    saved = state.saving is not None and agent is not None and (agent.has_stopped or agent.is_leaving)
    state = without_agents(state, [sync.replica])
    if (sync.replica, sync.incarnation) not in state.members or saved:
        return state, ()
    if sync.replica in state.finished:
        return state, ()
    if _has_finished(state, sync):
        return mark_finished(state, sync.replica)
    return close(state, Cause("MemberLeft", f"{sync.replica} left"), now)


def _suspect_disconnected(state: State, event: Disconnected, now: float) -> State:
    agent = state.agents.get(event.replica)
    if agent is None or agent.member.incarnation != event.incarnation:
        return state
    # Its silence is aged, so that the loss follows soon unless it connects again.
    last_seen = max(agent.last_seen, event.heartbeat_at or 0.0)
    suspected = min(last_seen, now - state.rules.lost_after + DISCONNECTED_SECONDS)
    agent = replace(agent, last_seen=suspected, disconnected_at=now)
    return replace(state, agents={**state.agents, event.replica: agent})


# Time


def _tick(state: State, tick: Tick, now: float) -> Transition:
    # First of all, so that nobody is lost who was heard since the last tick.
    state = _record_heartbeats(state, tick.heartbeats, now)
    if tick.checkpoint is not None and tick.checkpoint != state.checkpoint:
        previous_at = state.checkpoint_at
        regular = state.open and previous_at is not None and previous_at > state.last_change
        state = replace(
            state, checkpoint_at=now, checkpoint_every=now - previous_at if regular and previous_at else None
        )
        state = failures.clear_outlived(state, tick.saved_step)
    # A rank that has ended, or is late, does not take its step back.
    training = state.open and (tick.training or state.training)
    saving = state.saving
    if saving is not None and tick.finishing:
        # The steps are over. A new generation would only repeat what follows them.
        saving = None
    elif saving is not None and (tick.saving or tick.pausing):
        saving = replace(saving, since=min(now, saving.since + now - state.last_tick))
    state = replace(
        state,
        last_tick=now,
        checkpoint=tick.checkpoint,
        script_checkpoint=tick.script_checkpoint,
        script_checkpoint_polled=tick.script_checkpoint_polled,
        training=training,
        can_save=tick.can_save,
        survive=tick.survive,
        scripted=tick.scripted,
        step_seconds=tick.step_seconds,
        saving=saving,
        bucket_problem=tick.bucket_problem,
        waits_for_bucket=False,
    )
    # Before agents are judged: a node whose exclusion has expired may take part in this tick's decisions.
    state = readmit(state, now)
    actions: tuple[Action, ...] = ()
    # The order matters: losses first, since they close a generation at once; then what may close it after it has saved;
    # and at last a new one is formed of those that wait.
    # No group that trains is closed for another size while the next one could not begin.
    changes = (preempt, finish_saving) if tick.bucket_problem else (preempt, resize, finish_saving)
    close_changes = () if tick.finishing else changes
    for decide in (_remove_silent, _restore_budget, _adopt_running_generation, preflight.decide, *close_changes, form):
        state, more = decide(state, now)
        actions += more
    return state, actions


def _record_heartbeats(state: State, heartbeats: Mapping[str, float], now: float) -> State:
    """Record heartbeats without new content, and do not count silence while the coordinator itself did not listen."""
    # Time in which the coordinator did not tick does not count as silence.
    since_tick = now - state.last_tick
    stalled = since_tick if since_tick > STALLED_SECONDS else 0.0
    if not heartbeats and not stalled:
        return state
    agents = dict(state.agents)
    # With thousands of agents, only those that were heard are worth the time.
    for replica in state.agents if stalled else heartbeats.keys() & agents.keys():
        agent = agents[replica]
        last = max(agent.last_seen + stalled, heartbeats.get(replica, agent.last_seen))
        agents[replica] = replace(agent, last_seen=min(now, last))
    until = None if state.adopting_until is None else state.adopting_until + stalled
    saving = None if state.saving is None else replace(state.saving, since=state.saving.since + stalled)
    return preflight.skip_time(replace(state, agents=agents, adopting_until=until, saving=saving), stalled)


def _remove_silent(state: State, now: float) -> Transition:
    silent = [replica for replica, agent in state.agents.items() if now - agent.last_seen > state.rules.lost_after]
    # If all are silent, it is rather the coordinator that is cut off: closing would not help.
    if silent and state.open:
        if len(silent) == len(state.agents):
            return replace(state, blind=True), ()
        # When we are cut off, all fall silent, each after its own last beat. So the first is no more lost than the
        # others, unless an agent was heard more than a heartbeat after it.
        newest = max(agent.last_seen for agent in state.agents.values())
        silent = [
            replica for replica in silent if newest - state.agents[replica].last_seen > 1.5 * state.rules.heartbeat
        ]
    if state.blind:
        # Agents are heard again: the others get the time to come back, too.
        agents = {
            replica: replace(agent, last_seen=max(agent.last_seen, now)) for replica, agent in state.agents.items()
        }
        return replace(state, blind=False, agents=agents), ()
    if not silent:
        return state, ()
    # Agents that nobody depends on are removed, and the generation goes on without them.
    lost = [state.agents[replica] for replica in silent]
    lost_members = [agent for agent in lost if is_member(state, agent) and not _is_expendable(state, agent)]
    seconds = max(now - agent.last_seen for agent in lost)
    text = f"{join_names(silent)} sent no heartbeat for {seconds:.1f} s"
    state, actions = without_agents(state, silent), (Announce(text, warning=True),)
    if not lost_members:
        return state, actions
    state, closed = close(state, Cause("MemberLost", text), now)
    return state, actions + closed


def _return_time(rules: Rules) -> float:
    return max(rules.lost_after, RETURN_SECONDS)


def _restore_budget(state: State, now: float) -> Transition:
    # Not since the last change: where members come and go by the hour, no failure would ever be forgiven.
    if not state.open or state.failures == 0 or now - state.failed_at < state.rules.restart_window:
        return state, ()
    return replace(state, failures=0, strikes=()), (Announce("the restart budget is full again after a healthy time"),)


def _adopt_running_generation(state: State, now: float) -> Transition:
    """Take over the newest generation after a restart if all its members still run it or have finished. Otherwise give
    up on it some time after the first of them came."""
    until, latest = state.adopting_until, state.latest
    if until is None or state.completing is not None:
        return state, ()
    if is_finished(state):
        return complete(state)
    if not state.agents:
        # No agent is missing before one has found its way here: a Service may need seconds to route to us.
        return replace(state, adopting_until=now + _return_time(state.rules)), ()
    unfinished = [] if latest is None else [member for member in latest.members if member.replica not in state.finished]
    # All members are accounted for: the ranks never noticed the restart.
    if latest is not None and all(_runs(state, member, latest.generation) for member in unfinished):
        state = replace(state, open=True, adopting_until=None, last_change=now)
        finished_text = f", but for {join_names(state.finished)}, which finished" if state.finished else ""
        detail = f"the coordinator restarted, and all members still run generation {latest.generation}{finished_text}"
        return state, (Open(latest, detail, adopted=True),)
    # Wait while a member may still come: until the deadline, if some run it or not all agents are back.
    running = any(not agent.has_stopped for agent in state.agents.values())
    if now < until and (running or len(state.agents) < state.target):
        return state, ()
    state = replace(state, adopting_until=None, last_change=now, finished=frozenset())
    if not running:
        return state, ()
    cause = Cause("MemberLost", "the coordinator restarted, and not all members of the generation came back")
    return replace(state, cause=cause), (Announce(cause.detail, warning=True),)


# From elsewhere


def _retarget(state: State, requested: int) -> Transition:
    target = _clamp_target(requested, state.rules)
    if target == state.target:
        return state, ()
    text = f"target changed from {state.target} to {replicas_text(target)}"
    return replace(state, target=target, largest=min(state.largest, target)), (Announce(text),)


def _close_hung(state: State, hung: Hung, now: float) -> Transition:
    if not state.open or state.latest is None or state.latest.generation != hung.generation:
        return state, ()
    state_before = state
    state, actions = close(state, Cause("Hung", hung.detail, hung.culprit), now)
    # The failure was charged, and the budget is used up.
    if state.failing is not None:
        return state, actions
    # The hangs of the group with that replica say nothing about the group without it.
    if len(state.exclusions) > len(state_before.exclusions):
        # Without that replica the next group is another one.
        return replace(state, hung_step=None, hung_times=0), actions
    state, more = failures.count_hang(state, hung)
    return state, actions + more


def _end(state: State, cause: Cause) -> Transition:
    """End the job. This closes the open generation, so that nothing that agents say afterwards looks like a failure."""
    actions = (Close(state.latest.generation, cause),) if state.open and state.latest is not None else ()
    return replace(state, end=cause, open=False, saving=None, preflight=None), actions


# Questions


def _clamp_target(replicas: int, rules: Rules) -> int:
    return max(rules.minimum, rules.largest_usable(min(replicas, rules.maximum)))


def _is_retired(state: State, replica: str, incarnation: str) -> bool:
    agent = state.agents.get(replica)
    if agent is not None and agent.member.incarnation == incarnation:
        return False
    return (replica, incarnation) in state.retired


def _membership_of(state: State, replica: str, incarnation: str) -> Membership | None:
    """The open generation if this agent is a member; otherwise None."""
    return state.latest if state.open and (replica, incarnation) in state.members else None


def _runs(state: State, member: Member, generation: int) -> bool:
    agent = state.agents.get(member.replica)
    return (
        agent is not None
        and agent.member.incarnation == member.incarnation
        and not agent.has_stopped
        and agent.generation == generation
    )


def _has_finished(state: State, sync: Sync) -> bool:
    """Whether the sender's ranks have completed their work in the newest generation."""
    return bool(sync.finished) and _takes_finished(state) and sync.generation == state.number


def _takes_finished(state: State) -> bool:
    """Whether the exit of ranks with code 0 counts: the newest generation runs, or may still be adopted."""
    return state.rules.completes_on_exit and (state.open or state.adopting_until is not None)


def _is_expendable(state: State, agent: AgentState) -> bool:
    """Whether nobody depends on this member any more: its ranks have finished, or have saved while the group saves."""
    return agent.member.replica in state.finished or (state.saving is not None and agent.has_stopped)


def _wait_reason(state: State) -> str:
    if state.saving is not None:
        return "the group saves, and then you can join"
    if state.open:
        if state.rules.multiple > 1:
            step_size = replicas_text(state.rules.multiple)
            return f"the group is complete, or cannot grow yet, which it does by {step_size} at a time"
        return "the group is complete, or it is too early for it to grow"
    if state.adopting_until is not None:
        return "the coordinator has just restarted and waits for the agents of the last generation"
    if state.waits_for_bucket:
        return f"{WAITS_FOR_BUCKET}: {state.bucket_problem}"
    counts = f"{replicas_text(len(state.agents))} connected, target {state.target}, minimum {state.rules.minimum}"
    return f"{counts}; all of them have to stop their ranks first"


def _rejoin(state: State) -> Answer:
    return _make_answer("rejoin", state.cause.detail, state.cause.reason == "Hung")


@lru_cache(64)
def _make_answer(
    order: Order, reason: str = "", stacks: bool = False, preflight: bool | None = None, finished: bool | None = None
) -> Answer:
    """Make an answer. Answers that thousands of agents get are made once."""
    return Answer(order=order, why=reason, stacks=stacks, preflight=preflight, finished=finished)
