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

**Why nobody waits for ever.** Agents repeat their wish until it is answered, and say which generation they were given
last, so that a lost answer is given again and a repeated wish is not taken for a new one. Silence ends in loss, and
every wait is limited: STOPPING_SECONDS for an agent that is slow to stop, START_MOST times `startAfterSeconds` for
newcomers, and a limit of its own for a group that saves (tandem_coordinator.closing). After that, the agents that wait
form a group if there are at least `minReplicas` of them. A smaller group never waits for a replacement.

**Our own blindness is nobody's death.** When the coordinator itself was stopped or cut off, everybody seems silent.
Time in which it did not tick is not counted, and while no agent at all is heard nobody is declared lost: closing
would help no one.

Rejected: a consensus store such as etcd (one more thing to run; a single writer with durable numbers is enough,
because the data that must be safe is fenced by number), torchrun's c10d rendezvous (split groups, see DESIGN 4),
leases that make an agent stop by its own clock (a stopped process does not look at its clock when it wakes up),
waiting for the lost member's acknowledgement (that is what it cannot give).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from tandem.exitcode import ExitCode
from tandem.protocol import Answer, Member, Membership, Order, Sync
from tandem_coordinator import failures, preflight
from tandem_coordinator.closing import close, complete, finish, finish_saving, is_finished, preempt
from tandem_coordinator.failures import forgive, why_left_out, worded
from tandem_coordinator.forming import form, resize, with_latest
from tandem_coordinator.group_state import (
    Action,
    Agent,
    Cause,
    Close,
    Disconnected,
    Event,
    Hung,
    LeftOut,
    Next,
    Open,
    Over,
    Retarget,
    Rules,
    Say,
    State,
    Synced,
    Tick,
    is_inside,
    listed,
    replicas,
    without,
)
from tandem_coordinator.state_store import Absent

STALLED_SECONDS = 1.0
"""Between two ticks more than this means that the coordinator itself stood still."""
DISCONNECTED_SECONDS = 1.0
"""An agent whose connection broke is lost if it does not connect again within this time: one that lives does at
once."""
RETURN_SECONDS = 3.0
"""After a restart, the agents of one group reach the coordinator within so much of the first: each tries for a second,
pauses for a third of one, and tries again."""
RETIRED = 1_000
"""So many replaced incarnations are remembered."""


def start(
    rules: Rules,
    target: int,
    now: float,
    number: int = 0,
    first: int = 1,
    latest: Membership | None = None,
    failures: int = 0,
    left_out: Iterable[Absent] = (),
    finished: Iterable[str] = (),
    settings_changed: str = "",
) -> State:
    """The state of a coordinator that has just started, with what its predecessor left behind, if there was one."""
    state = State(
        rules,
        _within(target, rules),
        number=number,
        first=first,
        changed=now,
        ticked=now,
        failures=failures,
        failed_at=now,
        settings_changed=settings_changed,
        left_out=tuple(LeftOut(one.replica, one.node, one.why, now - one.seconds) for one in left_out),
    )
    if number < first:
        return state
    cause = Cause("Started", "the job starts again")
    state = replace(with_latest(state, latest), cause=cause, adopting_until=now + _return_time(rules))
    return replace(state, finished=frozenset(finished), largest=0 if latest is None else len(latest.members))


def step(state: State, event: Event, now: float) -> Next:
    """What follows from an event at time `now`."""
    if state.end is not None and not isinstance(event, Synced):
        return state, ()
    match event:
        case Synced(sync, preflights):
            return _synced(state, sync, preflights, now)
        case Disconnected(replica, incarnation):
            return _disconnected(state, replica, incarnation, now), ()
        case Retarget(replicas):
            return _retarget(state, replicas)
        case Tick():
            return _tick(state, event, now)
        case Hung():
            return _hung(state, event, now)
        case Over(cause):
            return _over(state, cause)


def calm_seconds(state: State, now: float) -> float:
    """For how long ticks decide nothing unless somebody speaks; 0 if the next one may."""
    if not state.open or state.latest is None or len(state.latest.members) != state.target:
        return 0.0
    if state.saving or state.preflight or state.blind or state.finished or state.completing or state.failing:
        return 0.0
    if not state.agents or any(agent.waits or agent.leaves for agent in state.agents.values()):
        return 0.0
    return max(0.0, min(agent.heard for agent in state.agents.values()) + state.rules.lost_after - now)


def answer(state: State, sync: Sync, recorded: int) -> Answer:
    """What an agent that has spoken so is told. Generations above `recorded` are not durable yet and stay secret."""
    if _is_retired(state, sync.replica, sync.incarnation):
        return _told("end", f"another process is {sync.replica} now")
    if state.end is None and (absent := why_left_out(state, sync.replica, sync.node or "")) is not None:
        return Answer(order="end", why=absent.why, left_out=True)
    if state.end is not None:
        return _told("end", state.end.detail)
    current = _membership_of(state, sync.replica, sync.incarnation)
    if sync.state == "leaving":
        return _told("end", "as you wish")
    if sync.state == "joining":
        if current is None or current.generation > recorded or sync.generation == current.generation:
            return _told("wait", _waiting_for(state))
        return Answer(order="run", membership=current, preflight=state.preflight is not None or None)
    runs = current is not None and current.generation == sync.generation
    if state.saving is not None and runs:
        return _told("save", state.saving.cause.detail)
    if sync.reason:
        return _rejoin(state)
    if runs and state.preflight is not None:
        return _told("run", preflight=True)
    if not runs and state.adopting_until is None:
        return _rejoin(state)
    return _told("run", finished=bool(sync.finished and sync.replica in state.finished) or None)


def says_nothing_new(state: State, sync: Sync) -> bool:
    """Whether a heartbeat or wish tells no more than that its sender lives, so that it may be handed in with the next
    tick."""
    agent = state.agents.get(sync.replica)
    if agent is None or agent.member.incarnation != sync.incarnation or agent.generation != (sync.generation or 0):
        return False
    if agent.node != (sync.node or "") or preflight.is_missing(state, sync):
        return False
    if sync.finished and sync.replica not in state.finished:
        return False
    if sync.state == "joining":
        return agent.waits and agent.member == sync.member
    return sync.state == "running" and not sync.reason and not agent.waits and agent.leaves == sync.leaving


# Agents


def _synced(state: State, sync: Sync, preflights: bool, now: float) -> Next:
    if _is_retired(state, sync.replica, sync.incarnation):
        return state, ()
    if state.end is not None:
        return (without(state, [sync.replica]) if sync.state == "leaving" else state), ()
    if why_left_out(state, sync.replica, sync.node or "") is not None:
        return without(state, [sync.replica]), ()
    actions: tuple[Action, ...] = ()
    known = state.agents.get(sync.replica)
    if known is not None and known.member.incarnation != sync.incarnation:
        state, actions = _replaced(state, known, now)
        known = None
    state = failures.take(state, sync, now)
    for notice in (_leave,) if sync.state == "leaving" else (_learn, _finish, _wish):
        state, more = notice(state, sync, now)
        actions += more
    if sync.state == "leaving":
        return state, actions
    waits = sync.state == "joining"
    since = known.since if known is not None and known.waits == waits else now
    agent = Agent(sync.member, waits, sync.generation or 0, now, since, sync.leaving, sync.node or "", preflights)
    state = replace(state, agents={**state.agents, sync.replica: agent})
    return preflight.take(state, sync, now), actions


def _learn(state: State, sync: Sync, now: float) -> Next:
    """A number above ours: what an earlier coordinator recorded was lost. Never fall behind it."""
    if sync.generation is None or sync.generation <= state.number:
        return state, ()
    cause = Cause("MembershipChanged", f"{sync.replica} runs generation {sync.generation}, which is newer")
    state, actions = close(state, cause, now)
    return replace(with_latest(state, sync.membership), number=sync.generation), actions


def _finish(state: State, sync: Sync, now: float) -> Next:
    """Note that all ranks of a running member have ended with exit code 0."""
    is_member = (sync.replica, sync.incarnation) in state.inside
    return finish(state, sync.replica) if is_member and _is_complete(state, sync) else (state, ())


def _wish(state: State, sync: Sync, now: float) -> Next:
    """Close the generation that a member of it wants to leave for another one."""
    current = state.latest
    if current is None or (sync.replica, sync.incarnation) not in state.inside:
        return state, ()
    if sync.generation != current.generation:
        if state.open and sync.state == "joining" and sync.member != state.inside[sync.replica, sync.incarnation]:
            detail = f"{sync.replica} is reached elsewhere than it said"
            return close(state, Cause("MembershipChanged", detail), now)
        return state, ()
    failure = sync.failure
    code = failure.code if failure is not None and failure.announced else None
    if failure is not None and code == ExitCode.REWOUND:
        return close(state, Cause("Rewound", failure.error or "the loss became useless"), now)
    # Agents of earlier versions do not say whether a script chose this number; it leaves no words then.
    if failure is not None and code == ExitCode.OUT_OF_MEMORY and failure.error:
        return close(state, Cause("OutOfMemory", f"rank {failure.rank} ({sync.replica}): {failure.error}"), now)
    if sync.reason == "WorkerFailed" and (failure is None or not failure.consequence):
        return close(state, Cause("WorkerFailed", worded(sync.replica, failure), sync.replica), now)
    if sync.reason == "StoreUnreachable":
        first = current.members[0].replica
        state = replace(state, cut_off=state.cut_off | {sync.replica})
        return close(state, Cause("StoreUnreachable", f"{sync.replica} cannot reach the store of {first}"), now)
    if state.saving is not None:
        return state, ()
    if sync.state == "joining" or sync.reason in ("MembershipChanged", "WorkerFailed"):
        if state.finished and failure is not None and failure.consequence:
            return close(*failures.blame_finished(state, failure, now), now)
        return close(state, Cause("PeerLost", f"{sync.replica} lost its connection to the group"), now)
    return state, ()


def _replaced(state: State, agent: Agent, now: float) -> Next:
    replica, incarnation = agent.member.replica, agent.member.incarnation
    state = replace(without(state, [replica]), retired=(*state.retired, (replica, incarnation))[-RETIRED:])
    if (replica, incarnation) not in state.inside or _is_done(state, agent):
        return state, ()
    return close(state, Cause("MemberLost", f"{replica} was replaced by a new process"), now)


def _leave(state: State, sync: Sync, now: float) -> Next:
    if sync.failure is not None and not sync.failure.consequence and sync.generation == state.number:
        # It is counted while the agent is known: what it is due to has a node.
        state, actions = close(state, Cause("WorkerFailed", worded(sync.replica, sync.failure), sync.replica), now)
        return without(state, [sync.replica]), actions
    agent = state.agents.get(sync.replica)
    saved = state.saving is not None and agent is not None and (agent.waits or agent.leaves)
    state = without(state, [sync.replica])
    if (sync.replica, sync.incarnation) not in state.inside or saved:
        return state, ()
    if sync.replica in state.finished:
        return state, ()
    if _is_complete(state, sync):
        return finish(state, sync.replica)
    return close(state, Cause("MemberLeft", f"{sync.replica} left"), now)


def _disconnected(state: State, replica: str, incarnation: str, now: float) -> State:
    agent = state.agents.get(replica)
    if agent is None or agent.member.incarnation != incarnation:
        return state
    suspected = min(agent.heard, now - state.rules.lost_after + DISCONNECTED_SECONDS)
    return replace(state, agents={**state.agents, replica: replace(agent, heard=suspected)})


# Time


def _tick(state: State, tick: Tick, now: float) -> Next:
    state = _hear(state, tick.heard, now)
    if tick.checkpoint is not None and tick.checkpoint != state.checkpoint:
        before = state.checkpoint_at
        regular = state.open and before is not None and before > state.changed
        state = replace(state, checkpoint_at=now, checkpoint_every=now - before if regular and before else None)
        state = failures.outlived(state, tick.saved_step)
    # A rank that has ended, or is late, does not take its step back.
    training = state.open and (tick.training or state.training)
    saving = state.saving
    if saving is not None and tick.finishing:
        # The steps are over. A new generation would only begin what follows them anew.
        saving = None
    elif saving is not None and (tick.saving or tick.pausing):
        saving = replace(saving, since=min(now, saving.since + now - state.ticked))
    state = replace(
        state,
        ticked=now,
        checkpoint=tick.checkpoint,
        own_file=tick.own_file,
        own_file_at=tick.own_file_at,
        training=training,
        can_save=tick.can_save,
        scripted=tick.scripted,
        step_seconds=tick.step_seconds,
        saving=saving,
    )
    state = forgive(state, now)
    actions: tuple[Action, ...] = ()
    changes = () if tick.finishing else (preempt, resize, finish_saving)
    for decide in (_lose_silent, _restore_budget, _adopt, preflight.decide, *changes, form):
        state, more = decide(state, now)
        actions += more
    return state, actions


def _hear(state: State, heard: Mapping[str, float], now: float) -> State:
    """Take in the quiet heartbeats, and forgive the silence of a time in which we did not listen."""
    gap = now - state.ticked
    stalled = gap if gap > STALLED_SECONDS else 0.0
    if not heard and not stalled:
        return state
    agents = dict(state.agents)
    # With thousands of agents, only those that were heard are worth the time.
    for replica in state.agents if stalled else heard.keys() & agents.keys():
        agent = agents[replica]
        last = max(agent.heard + stalled, heard.get(replica, agent.heard))
        agents[replica] = replace(agent, heard=min(now, last))
    until = None if state.adopting_until is None else state.adopting_until + stalled
    saving = None if state.saving is None else replace(state.saving, since=state.saving.since + stalled)
    return preflight.waited(replace(state, agents=agents, adopting_until=until, saving=saving), stalled)


def _lose_silent(state: State, now: float) -> Next:
    silent = [replica for replica, agent in state.agents.items() if now - agent.heard > state.rules.lost_after]
    if silent and state.open:
        if len(silent) == len(state.agents):
            return replace(state, blind=True), ()
        # When we are cut off, all fall silent, each after its own last beat. So the first is no more lost than the
        # others, unless somebody was heard for more than a beat after it.
        newest = max(agent.heard for agent in state.agents.values())
        silent = [replica for replica in silent if newest - state.agents[replica].heard > 1.5 * state.rules.heartbeat]
    if state.blind:
        # Somebody is heard again: the others get the time to come back, too.
        agents = {replica: replace(agent, heard=max(agent.heard, now)) for replica, agent in state.agents.items()}
        return replace(state, blind=False, agents=agents), ()
    if not silent:
        return state, ()
    lost = [state.agents[replica] for replica in silent]
    inside = [agent for agent in lost if is_inside(state, agent) and not _is_done(state, agent)]
    seconds = max(now - agent.heard for agent in lost)
    text = f"{listed(silent)} sent no sign of life for {seconds:.1f} s"
    state, actions = without(state, silent), (Say(text, warning=True),)
    if not inside:
        return state, actions
    state, closed = close(state, Cause("MemberLost", text), now)
    return state, actions + closed


def _return_time(rules: Rules) -> float:
    return max(rules.lost_after, RETURN_SECONDS)


def _restore_budget(state: State, now: float) -> Next:
    # Not since the last change: where members come and go by the hour, no failure would ever be forgiven.
    if not state.open or state.failures == 0 or now - state.failed_at < state.rules.restart_window:
        return state, ()
    return replace(state, failures=0, strikes=()), (Say("the restart budget is full again after a healthy time"),)


def _adopt(state: State, now: float) -> Next:
    """After a restart: take over the newest generation if all its members still run it or have finished, or give up on
    it some time after the first of them came."""
    until, latest = state.adopting_until, state.latest
    if until is None or state.completing is not None:
        return state, ()
    if is_finished(state):
        return complete(state)
    if not state.agents:
        # Nobody can be missing before somebody has found the way here: a Service may need seconds to lead to us.
        return replace(state, adopting_until=now + _return_time(state.rules)), ()
    at_work = [] if latest is None else [one for one in latest.members if one.replica not in state.finished]
    if latest is not None and all(_runs(state, member, latest.generation) for member in at_work):
        state = replace(state, open=True, adopting_until=None, changed=now)
        gone = f", but for {listed(state.finished)}, which finished" if state.finished else ""
        detail = f"the coordinator restarted, and all members still run generation {latest.generation}{gone}"
        return state, (Open(latest, detail, adopted=True),)
    running = any(not agent.waits for agent in state.agents.values())
    if now < until and (running or len(state.agents) < state.target):
        return state, ()
    state = replace(state, adopting_until=None, changed=now, finished=frozenset())
    if not running:
        return state, ()
    cause = Cause("MemberLost", "the coordinator restarted, and not all members of the generation came back")
    return replace(state, cause=cause), (Say(cause.detail, warning=True),)


# From elsewhere


def _retarget(state: State, wished: int) -> Next:
    target = _within(wished, state.rules)
    if target == state.target:
        return state, ()
    verb = "is" if target == 1 else "are"
    return replace(state, target=target, largest=min(state.largest, target)), (
        Say(f"{replicas(target)} {verb} wished for instead of {state.target}"),
    )


def _hung(state: State, hung: Hung, now: float) -> Next:
    if not state.open or state.latest is None or state.latest.generation != hung.generation:
        return state, ()
    before = state
    state, actions = close(state, Cause("Hung", hung.detail, hung.culprit), now)
    if state.failing is not None:
        return state, actions
    if len(state.left_out) > len(before.left_out):
        # Without that replica the next group is another one.
        return replace(state, hung_step=None, hung_times=0), actions
    state, more = failures.hung_again(state, hung)
    return state, actions + more


def _over(state: State, cause: Cause) -> Next:
    """The end closes the open generation, so that nothing that agents say afterwards sounds like trouble."""
    actions = (Close(state.latest.generation, cause),) if state.open and state.latest is not None else ()
    return replace(state, end=cause, open=False, saving=None, preflight=None), actions


# Questions


def _within(replicas: int, rules: Rules) -> int:
    return max(rules.minimum, rules.usable(min(replicas, rules.maximum)))


def _is_retired(state: State, replica: str, incarnation: str) -> bool:
    known = state.agents.get(replica)
    if known is not None and known.member.incarnation == incarnation:
        return False
    return (replica, incarnation) in state.retired


def _membership_of(state: State, replica: str, incarnation: str) -> Membership | None:
    """The open generation, if this agent is in it."""
    return state.latest if state.open and (replica, incarnation) in state.inside else None


def _runs(state: State, member: Member, generation: int) -> bool:
    agent = state.agents.get(member.replica)
    return (
        agent is not None
        and agent.member.incarnation == member.incarnation
        and not agent.waits
        and agent.generation == generation
    )


def _is_complete(state: State, sync: Sync) -> bool:
    """Whether the sender's ranks have done what the newest generation is there for."""
    goes_on = state.open or state.adopting_until is not None
    return bool(sync.finished) and state.rules.ends_with_zero and goes_on and sync.generation == state.number


def _is_done(state: State, agent: Agent) -> bool:
    """Whether nobody depends on this member any more: its ranks have finished, or the group saves and they have."""
    return agent.member.replica in state.finished or (state.saving is not None and agent.waits)


def _waiting_for(state: State) -> str:
    if state.saving is not None:
        return "the group saves, and then you can join"
    if state.open:
        if state.rules.apart > 1:
            return (
                f"the group is complete, or cannot grow yet, which it does by {replicas(state.rules.apart)} at a time"
            )
        return "the group is complete, or it is too early for it to grow"
    if state.adopting_until is not None:
        return "the coordinator has just restarted and looks who is there"
    here = f"{replicas(len(state.agents))} here, {state.target} wished for"
    return f"{here}, at least {state.rules.minimum} needed, and all of them have to stop their ranks first"


def _rejoin(state: State) -> Answer:
    return _told("rejoin", state.cause.detail, state.cause.reason == "Hung")


@lru_cache(64)
def _told(
    order: Order, why: str = "", stacks: bool = False, preflight: bool | None = None, finished: bool | None = None
) -> Answer:
    """An answer; what thousands are told is made once."""
    return Answer(order=order, why=why, stacks=stacks, preflight=preflight, finished=finished)
