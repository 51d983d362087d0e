"""Formation of generations: when to form one, from which agents, and when an open one is resized or begun anew.

Pure; a part of the state machine in `membership`.

**Growth loses nothing, or less than waiting.** Ranks that are known to save when asked make a checkpoint for it (see
`closing`), so a group grows as soon as its cool-down is over. A script that nobody knows to do so is ended at once,
which costs the steps since its last checkpoint. Shortly after a change or a checkpoint that is next to nothing, and it
only becomes more: so the group grows at once as long as at most `growAfterSeconds` of work are at stake. Where its
checkpoints are seen to come regularly, it waits for the next one if waiting costs less than the work at stake: the
newcomers' time against the members'. With more at stake and no checkpoint in sight, newcomers wait for one, but for
`growAfterSeconds` at most, because a group that stays too small for ever costs more.

A group has as many members as make whole pipelines (`Rules.apart`); others wait until enough of them are there.

The cool-down is between two growths: each costs a restart, and agents of a large group arrive one after the other. It
holds back neither the first growth after the start, nor a new process that takes the place of a member that was lost: a
group is back at its size as soon as its replacements are there. A process that comes back by itself, because it was cut
off, waits for it: where a network comes and goes, the group would restart each time. A pod that comes and goes is held
back by the operator, which knows why it ended.
"""

from collections.abc import Iterable
from dataclasses import replace

from tandem.protocol import Member, Membership
from tandem_coordinator import preflight
from tandem_coordinator.closing import close_saved, explain
from tandem_coordinator.failures import settle
from tandem_coordinator.group_state import (
    Action,
    Agent,
    Cause,
    Next,
    Open,
    State,
    is_inside,
    listed,
    natural,
    replicas,
    waiting,
)

STOPPING_SECONDS = 10.0
"""How long a new generation waits for an agent that is alive but has not stopped its ranks yet."""
STACKS_SECONDS = 2.0
"""So much longer after a hang, because the ranks write their stacks first."""
START_MOST = 5
"""The first generation waits for `startAfterSeconds` after the last arrival for the full target, because agents started
together arrive apart; at most this many times that long after the first one."""
GRACE_SECONDS = 0.3
"""Replacements that arrive within so short a time of each other join together. Newcomers beyond the size that the group
has had wait for each other as the first group does: they would wait for the cool-down otherwise."""


def resize(state: State, now: float) -> Next:
    """Close the open generation if ranks have to read their settings again, or if its size is not the wished one."""
    if not state.open or state.latest is None or state.saving is not None:
        return state, ()
    if state.finished:
        # Some have done their work already. Another group would do it again.
        return state, ()
    # Ranks that cannot save when asked have settings of their own.
    if state.settings_changed and state.training and state.can_save:
        return close_saved(state, Cause("SettingsChanged", state.settings_changed), now)
    size = len(state.latest.members)
    if size > state.target:
        verb = "is" if state.target == 1 else "are"
        detail = f"{replicas(state.target)} {verb} wished for instead of {size}"
        return close_saved(state, Cause("TargetChanged", detail), now)
    newcomers = waiting(state)
    if state.rules.usable(size + len(newcomers)) <= size or size >= state.target:
        return state, ()
    if not _may_grow(state, newcomers, size, now):
        return state, ()
    names = listed(agent.member.replica for agent in newcomers)
    return close_saved(state, Cause("MemberJoined", f"{names} can join"), now)


def form(state: State, now: float) -> Next:
    """Form the next generation of those that wait, if none is open and they are enough."""
    if state.open or state.adopting_until is not None or state.failing is not None or state.completing is not None:
        return state, ()
    candidates = waiting(state)
    if len(candidates) < state.rules.minimum:
        return state, ()
    if len(candidates) < state.target and _worth_waiting(state, candidates, now):
        return state, ()
    actions: tuple[Action, ...] = ()
    if state.cause.is_consequence:
        state, actions = explain(state, now)
        candidates = waiting(state)
        if state.failing is not None or len(candidates) < state.rules.minimum:
            return state, actions
    state, more = settle(state, now)
    actions += more
    if state.failing is not None or now < state.not_before:
        return state, actions
    chosen = sorted(candidates, key=lambda agent: (not is_inside(state, agent), natural(agent.member.replica)))
    members = _ranked(chosen[: min(state.target, state.rules.usable(len(chosen)))])
    membership = Membership(generation=state.number + 1, members=members, reason=state.cause.reason)
    before = 0 if state.latest is None else len(state.latest.members)
    grown = now if 0 < before < len(members) else state.grown
    largest = max(state.largest, len(members))
    state = replace(with_latest(state, membership), number=membership.generation, open=True, changed=now)
    state = replace(state, grown=grown, largest=largest, settings_changed="")
    state = replace(state, opened=now, complaints={}, settled=False, not_before=0.0, own_file_before=state.own_file)
    state = preflight.begin(state, now)
    detail = _why(state.cause)
    if spare := chosen[len(members) : state.target]:
        names = listed(agent.member.replica for agent in spare)
        detail += f"; {names} {'waits' if len(spare) == 1 else 'wait'}, because {replicas(state.rules.apart)} "
        detail += "make whole pipelines together"
    return state, (*actions, Open(membership, detail))


def _why(cause: Cause) -> str:
    """Why the next generation is formed; where training goes, and what helps, was told when the last one was closed."""
    return cause.detail.partition(";")[0] if cause.reason in ("Rewound", "OutOfMemory") else cause.detail


def with_latest(state: State, latest: Membership | None) -> State:
    """Another newest generation, not open yet."""
    members = () if latest is None else latest.members
    inside = {(member.replica, member.incarnation): member for member in members}
    state = replace(state, finished=frozenset(), cut_off=frozenset(), checkpoint_every=None)
    return replace(state, latest=latest, inside=inside, open=False)


def _ranked(agents: Iterable[Agent]) -> list[Member]:
    """In the order of their ranks: by name, and all of a node where the first of them stands. So ranks beside each
    other share a node wherever they can, and a ring of them crosses the network as rarely as possible."""
    named = sorted(agents, key=lambda agent: natural(agent.member.replica))
    nodes: dict[tuple[str, str], list[Member]] = {}
    for agent in named:
        nodes.setdefault((agent.node, "" if agent.node else agent.member.replica), []).append(agent.member)
    return [member for members in nodes.values() for member in members]


def _may_grow(state: State, newcomers: list[Agent], size: int, now: float) -> bool:
    arrived = [agent.since for agent in newcomers]
    is_replaced = size < state.largest and any(agent.generation == 0 for agent in newcomers)
    ready = max(arrived)
    if size + len(newcomers) < state.target:
        settling = GRACE_SECONDS if is_replaced else state.rules.start_after
        ready = min(ready + settling, min(arrived) + START_MOST * settling)
    if not is_replaced:
        ready = max(ready, state.grown + state.rules.grow_cooldown)
    if now < ready:
        return False
    if state.can_save:
        # Before its first step it has nothing to save, but its start would be lost.
        return state.training
    if state.checkpoint_at is not None and state.checkpoint_at >= ready:
        return True
    begun = max(state.changed, state.checkpoint_at or 0.0)
    at_stake = now - begun
    if state.checkpoint_every is not None and (due := begun + state.checkpoint_every) > now:
        joining = min(len(newcomers), state.target - size)
        if at_stake * size > (due - now) * joining and now - min(arrived) < state.rules.grow_after:
            return False
    return at_stake <= state.rules.grow_after or now - min(arrived) >= state.rules.grow_after


def _worth_waiting(state: State, candidates: list[Agent], now: float) -> bool:
    """Whether somebody else is likely to come soon, when fewer wait than are wished for."""
    stopping = STOPPING_SECONDS + (STACKS_SECONDS if state.cause.reason == "Hung" else 0.0)
    if len(candidates) < len(state.agents) and now - state.changed < stopping:
        return True
    newcomers = [agent for agent in candidates if not is_inside(state, agent)]
    if not newcomers:
        return False
    arrived = [agent.since for agent in newcomers]
    if len(newcomers) < len(candidates):
        return now - max(arrived) < GRACE_SECONDS
    settling = state.rules.start_after
    return now - max(arrived) < settling and now - min(arrived) < START_MOST * settling
