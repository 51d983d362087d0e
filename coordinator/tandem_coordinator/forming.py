"""The formation of generations: when to form one, and from which agents.

Pure; a part of the state machine in `membership`.

A group has as many members as make whole pipelines (`Rules.multiple`); others wait until enough of them are there.
"""

from collections.abc import Iterable
from dataclasses import replace

from tandem.wire.protocol import Member, Membership
from tandem_coordinator import preflight
from tandem_coordinator.closing import GRACE_SECONDS, MAX_START_FACTOR, explain_consequence
from tandem_coordinator.failures import classify, is_gone
from tandem_coordinator.group_state import (
    Action,
    AgentState,
    Cause,
    Open,
    State,
    Transition,
    is_member,
    join_names,
    natural_sort_key,
    replicas_text,
    waiting_agents,
)

STOPPING_SECONDS = 10.0
"""Maximum time that a new generation waits for an agent that is alive but has not stopped its ranks yet, in seconds."""
STACKS_SECONDS = 2.0
"""Additional time to stop after a hang, in seconds: the ranks write their stacks first."""


def form(state: State, now: float) -> Transition:
    """Form the next generation of the agents that wait, if none is open and they are enough."""
    if state.open or state.adopting_until is not None or state.failing is not None or state.completing is not None:
        return state, ()
    candidates = waiting_agents(state)
    if len(candidates) < state.rules.minimum:
        return state, ()
    if len(candidates) < state.target and _is_worth_waiting(state, candidates, now):
        return state, ()
    # Before the next group starts, the failure of the last one is attributed: that may end the job or exclude a
    # replica.
    actions: tuple[Action, ...] = ()
    if state.cause.is_consequence:
        state, actions = explain_consequence(state, now)
        candidates = waiting_agents(state)
        if state.failing is not None or len(candidates) < state.rules.minimum:
            return state, actions
    # All ranks have stopped by now, so all failure reports are in.
    state, more = classify(state, now)
    actions += more
    if state.failing is not None or now < state.not_before:
        return state, actions
    if state.bucket_problem:
        return replace(state, waits_for_bucket=True), actions
    # Former members first: a newcomer never displaces one of them.
    chosen = sorted(candidates, key=lambda agent: (not is_member(state, agent), natural_sort_key(agent.member.replica)))
    members = _in_rank_order(chosen[: min(state.target, state.rules.largest_usable(len(chosen)))])
    membership = Membership(generation=state.number + 1, members=members, reason=state.cause.reason)
    keeps = state.survived and any(is_member(state, agent) and not agent.starts_anew for agent in chosen)
    previous_size = 0 if state.latest is None else len(state.latest.members)
    last_growth = now if 0 < previous_size < len(members) else state.last_growth
    largest = max(state.largest, len(members))
    state = replace(with_latest(state, membership), number=membership.generation, open=True, last_change=now)
    state = replace(state, last_growth=last_growth, largest=largest, settings_changed="")
    # What was known of the last generation's failure does not concern this one.
    state = replace(
        state,
        opened_at=now,
        failure_reports={},
        is_classified=False,
        not_before=0.0,
        script_checkpoint_before=state.script_checkpoint,
    )
    state = preflight.request(state, now)
    detail = _reason_to_form(state.cause)
    if keeps:
        detail += "; ranks that live keep their state"
    if spare := chosen[len(members) : state.target]:
        names = join_names(agent.member.replica for agent in spare)
        detail += f"; {names} {'waits' if len(spare) == 1 else 'wait'}, because "
        detail += f"{replicas_text(state.rules.multiple)} make whole pipelines together"
    return state, (*actions, Open(membership, detail))


def times_ready(before: State, formed: Membership) -> tuple[float | None, float | None]:
    """Times at which the last member of the generation before had stopped its ranks, and the last of all members was
    ready to join; None where there is none.

    Args:
        before: the state before the generation was formed.
    """
    agents = [agent for member in formed.members if (agent := before.agents.get(member.replica)) is not None]
    former = [agent.since for agent in agents if is_member(before, agent)]
    return max(former, default=None), max((agent.since for agent in agents), default=None)


def _reason_to_form(cause: Cause) -> str:
    """The reason why the next generation is formed, without advice that was given when the last one was closed."""
    return cause.detail.partition(";")[0] if cause.reason in ("Rewound", "OutOfMemory") else cause.detail


def with_latest(state: State, latest: Membership | None) -> State:
    """Set the newest generation, which is not open yet."""
    member_list = () if latest is None else latest.members
    members = {(member.replica, member.incarnation): member for member in member_list}
    state = replace(state, finished=frozenset(), store_unreachable=frozenset(), checkpoint_every=None)
    return replace(state, latest=latest, members=members, open=False)


def _in_rank_order(agents: Iterable[AgentState]) -> list[Member]:
    """Sort members by rank: by name, with all members of a node next to its first one.

    Neighbouring ranks then share a node wherever they can, and a ring of them crosses the network as rarely as
    possible.
    """
    by_name = sorted(agents, key=lambda agent: natural_sort_key(agent.member.replica))
    nodes: dict[tuple[str, str], list[Member]] = {}
    for agent in by_name:
        nodes.setdefault((agent.node, "" if agent.node else agent.member.replica), []).append(agent.member)
    return [member for members in nodes.values() for member in members]


def _is_worth_waiting(state: State, candidates: list[AgentState], now: float) -> bool:
    """Whether another agent is likely to come soon, when fewer agents wait than the target."""
    stopping = STOPPING_SECONDS + (STACKS_SECONDS if state.cause.reason == "Hung" else 0.0)
    # Agents that are alive and do not wait yet are stopping their ranks, or prepare new ones. Members that keep their
    # state go on without the latter, which join when they are ready, and without those that seem to be gone.
    keeps = state.survived and any(is_member(state, agent) and not agent.starts_anew for agent in candidates)
    awaited = [
        agent
        for agent in state.agents.values()
        if not agent.is_waiting and not (keeps and (agent.is_preparing or is_gone(agent, now)))
    ]
    if awaited and now - state.last_change < stopping:
        return True
    newcomers = [agent for agent in candidates if not is_member(state, agent)]
    if not newcomers:
        return False
    arrivals = [agent.since for agent in newcomers]
    # Former members wait to train on: only replacements that arrive together may delay them.
    if len(newcomers) < len(candidates):
        return now - max(arrivals) < GRACE_SECONDS
    settling = state.rules.start_after
    return now - max(arrivals) < settling and now - min(arrivals) < MAX_START_FACTOR * settling
