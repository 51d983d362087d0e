"""Failures of a group: their cause, whose fault they are, and the backoff before the next start. Pure.

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

`membership`.

**Which failure is the first.** When one rank fails, the others fail as a consequence, and any of them may be heard
first. So agents say when their rank failed, and by what; when all have stopped their ranks and wait, the earliest
failure that is nobody else's consequence is what the group failed by. If all members failed by the same broken
collective, in the same words, it is nobody's consequence, and the earliest is the cause.

**The same again.** A group that fails by the same error in the same place as the one before, on whichever rank, and at
the same step or an earlier one, will fail by it again: the job fails after the second time, with that error. Where
steps are not known, neither group may have made any or saved anything. A script that keeps checkpoints of its own has
saved something if one of them is new: the run directory is looked at once more before the job fails. Errors of devices,
networks and disks may pass by themselves, and a process that was killed did nothing wrong: these are tried again for as
long as the restart budget lasts. So is a bare exit code that comes late: it does not say what it means. A hang at the
same step ends the job the third time.

**One node alone.** Where the error came from one and the same replica each time, and no other is on its node, it may be
the node that is broken and not the code. As long as the others could go on without it, `blame` gets its third strike.
When another replica then fails by the same error, it was the code.

**Backing off.** The first such failure is repaired at once, as most are one process that was killed. From the second in
a row on, the next group starts after 1, 2, 4, … seconds, a minute at most, so that what needs a minute to pass does not
use up the budget in seconds. So do groups that make steps and fail by the same error before they have saved anything.

Rejected: backing off after failures in mid-training (a node that dies every hour must not cost a minute), and comparing
whole tracebacks (addresses and temporary names differ).
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, Signals

from tandem.protocol import Failure, Sync
from tandem.reasons import Reason
from tandem_coordinator.group_state import (
    Cause,
    Complaint,
    FailJob,
    Hung,
    LeftOut,
    Next,
    Say,
    State,
    Strike,
    is_inside,
    listed,
)

STRIKES = 3
"""Failures that are due to one replica or node, in a row or among the most recent ones, before the others go on
without it."""
MAX_LEFT_OUT = 0.25
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
    return max(1, int(MAX_LEFT_OUT * state.target))


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


FIRST_SECONDS, MAX_SECONDS = 1.0, 60.0
"""Between the end of a group that made no progress, not the first in a row, and the start of the next."""
PROVEN_SECONDS = 300.0
"""A script that says nothing of its steps and has run for so long has made some."""
AT_ONCE_SECONDS = 60.0
"""A program that ends with a bare exit code so soon has not begun its work."""
BEGUN_SECONDS = 30.0
KILLED_SECONDS = 1.0
"""A script that says nothing of its steps has begun its work after so long; sooner, where somebody has killed it."""
LOOK_SECONDS, LOOK_AGAIN_SECONDS = 5.0, 0.05
"""A run directory that cannot be looked at for so long says nothing of how far a script has got; and
how often it is asked whether it was."""
KILLS = (-9, -15)
FAULTS = {-SIGSEGV, -SIGBUS, -SIGFPE, -SIGILL, -SIGABRT, -SIGSYS}
"""Signals that a process brings on itself."""
STEPS, SAVED = "steps", "saved"
OF_SHELLS = 128
"""Above this number, exit codes are those of a shell whose child was killed: the number of the signal comes on top."""
UNKNOWN = "unknown"
HANGS = 3
"""Hangs at the same step after which a job fails: a network may fail twice."""
WHAT_TAKES_LONG = (
    "If the ranks are at something that takes longer, such as a validation, put it into "
    '`with tandem.pausing("validation"):`, or raise elasticity.hangSeconds'
)
ENDED_ALONE = "it ended with exit code 0 while other ranks still worked"
"""What is said of a rank whose script ends before those of others."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What tells one failure from another."""

    error: str
    where: str
    code: int
    replica: str = field(default="", compare=False)
    """Whose it was; empty where several replicas failed by themselves."""
    step: int | None = field(default=None, compare=False)
    """Steps completed by then, where that is known."""


def take(state: State, sync: Sync, now: float) -> State:
    """Note what an agent says that its rank failed by."""
    failure = sync.failure
    if failure is None or sync.generation != state.number or (sync.replica, sync.incarnation) not in state.inside:
        return state
    known = state.complaints.get(sync.replica)
    if known is not None and (failure.consequence or not known.failure.consequence):
        # How a rank was killed may be known later than what that did to another one of the same replica.
        return state
    # What the coordinator was told in time with the last heartbeat may be older than the failure.
    stepped = any(report.has_stepped for report in sync.ranks)
    state = replace(state, training=state.training or (state.open and stepped))
    complaint = Complaint(_by_signal(failure), now - failure.seconds_ago)
    return replace(state, complaints={**state.complaints, sync.replica: complaint})


def first_of(state: State) -> tuple[str, Complaint] | None:
    """What the newest generation failed by, and whose rank it was; consequences only where nothing else is known."""
    return min(state.complaints.items(), key=lambda one: (one[1].failure.consequence, one[1].at), default=None)


def is_of_all(state: State) -> bool:
    """Whether every member failed by the same broken collective, in the same words and in the same place. Then none is
    gone, and it is nobody's consequence: a device or a network is set up so that no start can work. So it is where all
    ranks are of one member, which knows how each of them ended."""
    members = set() if state.latest is None else {member.replica for member in state.latest.members}
    failures = [one.failure for one in state.complaints.values()]
    alike = {(one.error, one.where) for one in failures}
    return (
        bool(members)
        and state.complaints.keys() == members
        and all(one.consequence and one.error and one.where for one in failures)
        and len(alike) == 1
    )


def worded(replica: str, failure: Failure | None) -> str:
    """How a rank failed, in a sentence."""
    if failure is None:
        return f"a training process of {replica} failed"
    who = f"rank {failure.rank} ({replica})"
    if failure.error:
        return f"{who} failed: {failure.error}" + (f" ({failure.where})" if failure.where else "")
    if failure.code < 0:
        return f"{who} was killed by signal {-failure.code} ({_name(-failure.code)})"
    return f"{who} ended with exit code {failure.code}"


def settle(state: State, now: float) -> Next:
    """All have stopped: name what the group failed by, and say when the next one starts, or that none will."""
    if state.settled or state.cause.reason not in ("WorkerFailed", "PeerLost"):
        return state, ()
    state = replace(state, settled=True)
    first = first_of(state)
    if first is not None and state.cause.reason == "WorkerFailed":
        replica, complaint = first
        state = replace(state, cause=replace(state.cause, detail=worded(replica, complaint.failure), culprit=replica))
    before, signature = state.signature, None if first is None else _signature(state, *first)
    same = signature is not None and signature == before
    if not state.progress and (state.own_file or ()) > (state.own_file_before or ()):
        state = replace(state, progress=SAVED)
    if same and _got_no_further(state, before, signature) and not _is_due_to_one(state, before, signature):
        if state.own_file_at <= state.changed and now - state.changed < LOOK_SECONDS:
            return replace(state, settled=False, not_before=now + LOOK_AGAIN_SECONDS), ()
        return _give_up(state)
    is_known = signature is not None and (signature.step is not None or state.progress != SAVED)
    state = replace(state, signature=signature if is_known else None, before=state.progress)
    if state.progress == SAVED or (not same and _has_begun(state, first)):
        return replace(state, barren=0), ()
    state = replace(state, barren=state.barren + 1)
    pause = 0.0 if state.barren < 2 else min(MAX_SECONDS, FIRST_SECONDS * 2.0 ** (state.barren - 2))
    if not pause:
        return state, ()
    words = f"no progress was made, so the next start is in {pause:g} s"
    return replace(state, not_before=now + pause), (Say(words, warning=True),)


def _got_no_further(state: State, before: Hashable, again: Signature | None) -> bool:
    """Whether this failure, which is the same as the one before, came at the same step or at an earlier one; of a
    script that does not say its steps, whether neither group had got anywhere."""
    assert isinstance(before, Signature)
    assert again is not None
    if before.step is None or again.step is None:
        return not state.progress and not state.before
    if (state.own_file or ()) > (state.own_file_before or ()):
        # It may count its steps from each start on.
        return False
    return again.step <= before.step


def outlived(state: State, saved: int | None) -> State:
    """A checkpoint was saved: a failure and a hang at an earlier step were got over, and the next ones are others.

    Args:
        saved: steps completed in it, where that is known.
    """
    if saved is None:
        return state
    if isinstance(state.signature, Signature) and state.signature.step is not None and saved > state.signature.step:
        state = replace(state, signature=None)
    if state.hung_step is not None and saved > state.hung_step:
        state = replace(state, hung_step=None, hung_times=0)
    return state


def hung_again(state: State, hung: Hung) -> Next:
    """A group hung: the job fails when it did so HANGS times at the same step."""
    if hung.step is None:
        return state, ()
    times = state.hung_times + 1 if hung.step == state.hung_step else 1
    state = replace(state, hung_step=hung.step, hung_times=times)
    if times < HANGS:
        return state, ()
    cause = Cause(Reason.HUNG, f"{hung.detail}; {HANGS} times at this step. {WHAT_TAKES_LONG}")
    return replace(state, failing=cause), (FailJob(cause),)


def blame_finished(state: State, failure: Failure | None, now: float) -> tuple[State, Cause]:
    """A member has lost its connection to members whose ranks have all ended with exit code 0: their script ends too
    early on some ranks. They are the cause, and not the one that reports it.

    Args:
        failure: what that one says.
    """
    assert state.latest is not None
    first, complaints = 0, dict(state.complaints)
    for member in state.latest.members:
        if member.replica in state.finished:
            ended = Failure(rank=first, code=0, error=ENDED_ALONE, step=failure.step if failure else None)
            complaints[member.replica] = Complaint(ended, now)
        first += member.processes
    culprit = min(state.finished, key=lambda replica: complaints[replica].failure.rank)
    state = replace(state, complaints=complaints)
    return state, Cause("WorkerFailed", worded(culprit, complaints[culprit].failure), culprit)


def progress(state: State, now: float) -> str:
    """How far the open generation has got: STEPS, SAVED, or empty where it has not."""
    if state.checkpoint_at is not None and state.checkpoint_at > state.opened:
        return SAVED
    return STEPS if state.training or (_is_silent(state) and now - state.opened >= PROVEN_SECONDS) else ""


def _has_begun(state: State, first: tuple[str, Complaint] | None) -> bool:
    """Whether the group had begun its work when it failed, as far as that can be told of a script that says nothing."""
    killed = first is not None and first[1].failure.code in KILLS
    return bool(state.progress) or (
        _is_silent(state) and _lived(state) >= (KILLED_SECONDS if killed else BEGUN_SECONDS)
    )


def _is_silent(state: State) -> bool:
    """Whether the ranks are of a script that says nothing of its steps."""
    return state.rules.ends_with_zero and not state.can_save


def _lived(state: State) -> float:
    return state.changed - state.opened


def _is_due_to_one(state: State, before: Hashable, again: Signature | None) -> bool:
    """Whether it may be the node of one replica that is broken, and the others go on without it or yet may."""
    if not isinstance(before, Signature) or again is None or not again.replica or again.replica != before.replica:
        return False
    agent = state.agents.get(again.replica)
    if agent is None:
        return True
    if not agent.node or sum(other.node == agent.node for other in state.agents.values()) > 1:
        return False
    return leave_out(state, LeftOut(again.replica, agent.node, "", 0.0)) is not None


def _give_up(state: State) -> Next:
    if state.progress:
        before = "without a further step in between"
    elif _is_silent(state):
        before = "before Tandem heard of a step or saw a checkpoint"
    else:
        before = "before it made a step or saved anything"
    cause = Cause(Reason.REPEATED_FAILURE, f"{state.cause.detail}; twice, {before}")
    first = first_of(state)
    return replace(state, failing=cause), (FailJob(cause, *(first or ("", None))),)


def _signature(state: State, replica: str, complaint: Complaint) -> Signature | None:
    """None of what may pass by itself."""
    failure, lived = complaint.failure, _lived(state)
    may_pass = (failure.consequence or failure.passing) and not is_of_all(state)
    if may_pass or (failure.code < 0 and failure.code not in FAULTS):
        return None
    if not failure.error and lived > AT_ONCE_SECONDS:
        return None
    culprits = [name for name, one in state.complaints.items() if not one.failure.consequence]
    whose = replica if culprits == [replica] else ""
    return Signature(failure.error, failure.where, failure.code, whose, failure.step)


def _by_signal(failure: Failure) -> Failure:
    """Exit codes of shells, and of containers, that say 128 plus the number of a signal, as that signal."""
    number = failure.code - OF_SHELLS
    if number <= 0 or failure.error or _name(number) == UNKNOWN:
        return failure
    return failure.model_copy(update={"code": -number})


def _name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return UNKNOWN
