"""Whose fault the failures of a group are, and when the others go on without it. Pure; a part of the machine in
`membership`.

One bad node (a broken GPU, a network that reaches the coordinator and not the other members) fails every group that it
is in. Left alone it uses up the restart budget, and the job fails although all others are sound. So each failure that
is due to one replica is a *strike* against it, and against the node it runs on. After STRIKES in a row against the same
replica, or against replicas of the same node, the others go on without it, if they are enough: its agents are told to
end, its failures are given back to the restart budget, and the operator places its next pod on another node.

Several bad nodes fail in turn, and none of them in a row. So the last strikes also count if they are all due to so few
replicas, or nodes, that the others could go on without each of them: then STRIKES against one of these are enough,
whichever came between. Of a job of eight, these are two, and their last five strikes; of a small one it is one, and its
last three.

Blame is a guess, so its consequences are limited. The replica that reports a failed process first is blamed: the
processes of the others fail later, as a consequence. A store that one member cannot reach is that member's fault, a
store that most cannot reach its owner's. A mistake in the user's code fails whatever replica it meets; therefore at
most a quarter of the replicas are left out (one of a small group), and failures go on being counted.

Rejected: leaving out at the first failure (a process may fail for a reason that passes), and asking the nodes alone
(a node that is Ready with a broken GPU is the case this is for).
"""

from collections import Counter
from dataclasses import replace

from tandem_coordinator.group import LeftOut, Next, Say, State, Strike, is_inside, listed

STRIKES = 3
"""Failures that are due to one replica or node, in a row or among the most recent ones, before the others go on
without it."""
MOST_LEFT_OUT = 0.25
"""At most so much of the replicas wished for, and one in any case."""


def strike(state: State, replica: str, why: str, now: float, counted: bool = True) -> Next:
    """A failure is due to this replica: leave it out, or its node, if it was the last straw.

    Args:
        counted: it was taken off the restart budget, and is given back when the replica is left out.
    """
    agent = state.agents.get(replica)
    node = "" if agent is None else agent.node
    most = _most_left_out(state)
    strikes = (*state.strikes, Strike(replica, node, why, counted))[-_window(most) :]
    # Where there are pre-flights, it has to pass one again.
    passed = frozenset(one for one in state.passed if one[0] != replica)
    state = replace(state, strikes=strikes, passed=passed)
    found = _suspect(state, now)
    if found is None or (without_it := leave_out(state, found)) is None:
        return state, ()
    given_back = sum(one.counted for one in strikes if _is_meant(found, one.replica, one.node))
    others = tuple(one for one in strikes if not _is_meant(found, one.replica, one.node))
    state = replace(without_it, strikes=others, failures=max(0, state.failures - given_back))
    return state, (Say(found.why, warning=True),)


def leave_out(state: State, found: LeftOut) -> State | None:
    """Go on without a replica or a node; None if too few would remain, or too many are left out already."""
    if len(state.left_out) >= _most_left_out(state):
        return None
    agents = {name: one for name, one in state.agents.items() if not _is_meant(found, name, one.node)}
    if len(agents) < state.rules.minimum:
        return None
    return replace(state, agents=agents, left_out=(*state.left_out, found))


def why_left_out(state: State, replica: str, node: str) -> LeftOut | None:
    """Why this replica is left out, None if it is not."""
    return next((one for one in state.left_out if _is_meant(one, replica, node)), None)


def forgive(state: State, now: float) -> State:
    """Let them in again after a time as long as that which restores the budget: a node may have been repaired."""
    if not state.left_out or now - state.left_out[0].at < state.rules.restart_window:
        return state
    return replace(state, left_out=state.left_out[1:])


def cut_off(state: State, now: float) -> tuple[str, str]:
    """Which replica it is due to that the store was not reached, and what it did, in a sentence."""
    assert state.latest is not None, "a generation was joined"
    first, *others = [member.replica for member in state.latest.members]
    reporters = [name for name in others if name in state.cut_off]
    if len(others) > 1 and len(reporters) > len(others) / 2:
        return first, f"{len(reporters)} of {len(others)} members cannot reach the store of {first}"
    return reporters[0] if reporters else "", f"{listed(reporters)} cannot reach the store of {first}"


def silent_members(state: State, now: float) -> list[str]:
    """Members of the newest generation that have not come back and give no sign of life: they may be lost soon."""
    late = 1.5 * state.rules.heartbeat
    members = [agent for agent in state.agents.values() if is_inside(state, agent) and not agent.waits]
    return [agent.member.replica for agent in members if now - agent.heard > late]


def _most_left_out(state: State) -> int:
    return max(1, int(MOST_LEFT_OUT * state.target))


def _window(suspects: int) -> int:
    """How many of the most recent strikes to look at: shared by this many suspects, one of them has STRIKES."""
    return suspects * (STRIKES - 1) + 1


def _suspect(state: State, now: float) -> LeftOut | None:
    """Who has STRIKES among the last ones, if those are due to few enough."""
    most = _most_left_out(state) - len(state.left_out)
    on_nodes = Counter(agent.node for agent in state.agents.values())
    for few in range(1, most + 1):
        last = state.strikes[-_window(few) :]
        by_replica = Counter(one.replica for one in last)
        by_node = Counter(one.node for one in last)
        for found, is_node in ((by_replica, False), (by_node, True)):
            (worst, times), *_ = found.most_common(1)
            if not worst or times < STRIKES or len(found) > few:
                continue
            # A few large nodes have most of the replicas: whatever fails, it fails there.
            if is_node and few > 1 and sum(on_nodes[node] for node in found) > most:
                continue
            return _to_leave_out(last, worst, is_node, now)
    return None


def _to_leave_out(strikes: tuple[Strike, ...], worst: str, is_node: bool, now: float) -> LeftOut:
    its = [one for one in strikes if (one.node if is_node else one.replica) == worst]
    last, times = its[-1], "times in a row" if len(its) == len(strikes) else f"of the last {len(strikes)} times"
    who = listed({one.replica for one in its}) if is_node else "it"
    why = f"is left out: the group failed {len(its)} {times} because of {who}, the last time because {last.why}"
    if is_node:
        return LeftOut("", worst, f"node {worst} {why}", now)
    where = f" (node {last.node})" if last.node else ""
    return LeftOut(worst, last.node, f"{worst}{where} {why}", now)


def _is_meant(one: LeftOut, replica: str, node: str) -> bool:
    return one.replica == replica if one.replica else one.node == node
