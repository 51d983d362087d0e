"""Failures of a group: their cause, the replica at fault, and the backoff before the next start.

Pure; a part of the state machine in `membership`.

One bad node (a broken GPU, a network that reaches the coordinator and not the other members) fails every group that it
is in. Left alone it uses up the restart budget, and the job fails although all other nodes are sound. So each failure
that is due to one replica is a *strike* against it, and against the node it runs on. After STRIKES_TO_EXCLUDE in a row
against the same replica, or against replicas of the same node, the group goes on without it, if enough others remain:
its agents are told to end, its failures are given back to the restart budget, and the operator places its next pod on
another node.

Several bad nodes fail in turn, and none of them in a row. So the last strikes also count if they are all due to so few
replicas, or nodes, that the group could go on without each of them: then STRIKES_TO_EXCLUDE against one of these are
enough, whichever came between. For a job of eight replicas, these are two, and their last five strikes; for a small job
it is one, and its last three.

Blame is a guess, so its consequences are limited. The replica that reports a failed process first is blamed: the
processes of the others fail later, as a consequence. A store that one member cannot reach is that member's fault; a
store that most members cannot reach is its owner's. A mistake in the user's code fails on whatever replica it runs;
therefore at most a quarter of the replicas are excluded (one of a small group), and failures go on being counted.

Rejected: excluding at the first failure (a process may fail for a reason that passes), and looking only at the state of
nodes (a node that is Ready with a broken GPU is the case this is for).

**Which failure is the first.** When one rank fails, the others fail as a consequence, and any of them may be heard
first. So agents report when their rank failed, and with which error. When all have stopped their ranks and wait, the
earliest failure that is no consequence of another one is the cause. If all members failed in the same broken
collective, with the same error, it is nobody's consequence, and the earliest is the cause.

**Repeated failures.** A group that fails with the same error in the same place as the one before, on whichever rank,
and at the same step or an earlier one, will fail with it again: the job fails after the second time, with that error.
Where steps are unknown, neither group may have made any or saved anything. A script that keeps checkpoints of its own
has saved something if one of them is new: the run directory is searched once more before the job fails. Errors of
devices, networks and disks may pass by themselves, and a process that was killed did nothing wrong: these are retried
for as long as the restart budget lasts. So is a bare exit code that comes late, because it does not say what it means.
A hang at the same step ends the job the third time.

**One node alone.** Where the error came from the same replica each time, and no other replica is on its node, the node
may be broken and not the code. As long as the others could go on without it, it gets its third strike. When another
replica then fails with the same error, it was the code.

**Backoff.** The first such failure is retried at once, as most are one process that was killed. From the second in a
row on, the next group starts after 1, 2, 4, … seconds, at most a minute, so that what needs a minute to pass does not
use up the budget in seconds. The same holds for groups that make steps and fail with the same error before they have
saved anything.

Rejected: a backoff after failures in mid-training (a node that dies every hour must not cost a minute), and comparing
whole tracebacks (addresses and temporary names differ).
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, Signals

from tandem.formatting import truncate_end
from tandem.wire.protocol import Failure, Sync
from tandem.wire.reasons import Reason
from tandem_coordinator.group_state import (
    AgentState,
    Announce,
    Cause,
    Exclusion,
    FailJob,
    FailureReport,
    Hung,
    State,
    Strike,
    Transition,
    is_member,
    join_names,
)

RECONNECT_SECONDS = 0.1
"""Time after the end of an agent's connection at which it seems to be gone, in seconds: one that lives has connected
again, as it does whenever it has news."""
STRIKES_TO_EXCLUDE = 3
"""Number of failures due to one replica or node, in a row or among the most recent ones, before it is excluded."""
MAX_EXCLUDED_SHARE = 0.25
"""Maximum share of the target number of replicas that may be excluded; at least one replica in any case."""


def add_strike(state: State, replica: str, reason: str, now: float, charged: bool = True) -> Transition:
    """Hold a failure against a replica, and exclude it, or its node, if it has enough strikes.

    Args:
        charged: the failure was charged to the restart budget, and is given back when the replica is excluded.
    """
    agent = state.agents.get(replica)
    node = "" if agent is None else agent.node
    max_excluded = _max_excluded(state)
    # The window keeps just as many strikes as the rule can use.
    strikes = (*state.strikes, Strike(replica, node, reason, charged))[-_strike_window(max_excluded) :]
    # Where there are pre-flights, it has to pass one again.
    passed = frozenset(entry for entry in state.preflight_passed if entry[0] != replica)
    state = replace(state, strikes=strikes, preflight_passed=passed)
    # Without enough strikes, or with too few replicas left, the group goes on as it is.
    exclusion = _find_suspect(state, now)
    if exclusion is None or (without_suspect := exclude(state, exclusion)) is None:
        return state, ()
    # The failures of the excluded one are no longer the group's: its strikes go, and their charge is given back.
    given_back = sum(entry.charged for entry in strikes if _covers(exclusion, entry.replica, entry.node))
    remaining = tuple(entry for entry in strikes if not _covers(exclusion, entry.replica, entry.node))
    state = replace(without_suspect, strikes=remaining, failures=max(0, state.failures - given_back))
    return state, (Announce(exclusion.reason, warning=True),)


def exclude(state: State, exclusion: Exclusion) -> State | None:
    """Exclude a replica or a node; returns None if too few would remain, or too many are excluded already."""
    # A mistake in the user's code would otherwise exclude one replica after the other.
    if len(state.exclusions) >= _max_excluded(state):
        return None
    agents = {name: agent for name, agent in state.agents.items() if not _covers(exclusion, name, agent.node)}
    if len(agents) < state.rules.minimum:
        return None
    return replace(state, agents=agents, exclusions=(*state.exclusions, exclusion))


def exclusion_of(state: State, replica: str, node: str) -> Exclusion | None:
    """The exclusion that covers this replica; None if there is none."""
    return next((exclusion for exclusion in state.exclusions if _covers(exclusion, replica, node)), None)


def describe_exclusions(state: State) -> str:
    """Describe whom the group goes on without, in 300 characters; empty if nobody is excluded."""
    room = MAX_EXCLUSION_LENGTH // max(1, len(state.exclusions)) - 2
    return "; ".join(truncate_end(exclusion.reason, room) for exclusion in state.exclusions)


def readmit(state: State, now: float) -> State:
    """Lift the oldest exclusion after a time as long as that which restores the budget: a node may have been
    repaired."""
    if not state.exclusions or now - state.exclusions[0].since < state.rules.restart_window:
        return state
    return replace(state, exclusions=state.exclusions[1:])


def blame_for_store(state: State, now: float) -> tuple[str, str]:
    """The replica at fault when the store was not reached (empty if unknown), and the failure as a sentence."""
    assert state.latest is not None, "a generation was joined"
    first, *other_members = [member.replica for member in state.latest.members]
    reporters = [name for name in other_members if name in state.store_unreachable]
    # If most of the others fail to reach it, the owner is at fault; otherwise those that fail are.
    if len(other_members) > 1 and len(reporters) > len(other_members) / 2:
        return first, f"{len(reporters)} of {len(other_members)} members cannot reach the store of {first}"
    return reporters[0] if reporters else "", f"{join_names(reporters)} cannot reach the store of {first}"


def is_gone(agent: AgentState, now: float) -> bool:
    """Whether an agent seems to be gone: its connection broke, and it has not connected again at once."""
    return agent.disconnected_at is not None and now - agent.disconnected_at >= RECONNECT_SECONDS


def silent_members(state: State, now: float) -> list[str]:
    """Members of the newest generation that have not come back and send no heartbeat: they may be lost soon."""
    late = 1.5 * state.rules.heartbeat
    members = [agent for agent in state.agents.values() if is_member(state, agent) and not agent.has_stopped]
    return [agent.member.replica for agent in members if now - agent.last_seen > late or is_gone(agent, now)]


def _max_excluded(state: State) -> int:
    return max(1, int(MAX_EXCLUDED_SHARE * state.target))


def _strike_window(suspects: int) -> int:
    """Number of the most recent strikes to consider: the smallest that gives one of the suspects STRIKES_TO_EXCLUDE."""
    return suspects * (STRIKES_TO_EXCLUDE - 1) + 1


def _find_suspect(state: State, now: float) -> Exclusion | None:
    """Find the replica or node with STRIKES_TO_EXCLUDE among the last strikes, if few enough suspects share those."""
    room = _max_excluded(state) - len(state.exclusions)
    on_nodes = Counter(agent.node for agent in state.agents.values())
    # From one suspect upwards: strikes in a row first, then those that a few suspects share in turn.
    for suspects in range(1, room + 1):
        # With this number of strikes on these suspects alone, one of them must have enough.
        last = state.strikes[-_strike_window(suspects) :]
        by_replica = Counter(strike.replica for strike in last)
        by_node = Counter(strike.node for strike in last)
        for counts, is_node in ((by_replica, False), (by_node, True)):
            (worst, times), *_ = counts.most_common(1)
            # None has enough, or too many share the strikes for a single one to be at fault.
            if not worst or times < STRIKES_TO_EXCLUDE or len(counts) > suspects:
                continue
            # A few large nodes have most of the replicas: whatever fails, it fails there.
            if is_node and suspects > 1 and sum(on_nodes[node] for node in counts) > room:
                continue
            return _exclusion_for(last, worst, is_node, now)
    return None


def _exclusion_for(strikes: tuple[Strike, ...], worst: str, is_node: bool, now: float) -> Exclusion:
    matching = [strike for strike in strikes if (strike.node if is_node else strike.replica) == worst]
    last = matching[-1]
    times = "times in a row" if len(matching) == len(strikes) else f"of the last {len(strikes)} times"
    culprits = join_names({strike.replica for strike in matching}) if is_node else "it"
    reason = f"is left out: the group failed {len(matching)} {times} because of {culprits}, "
    reason += f"the last time because {last.reason}"
    if is_node:
        return Exclusion("", worst, f"node {worst} {reason}", now)
    location = f" (node {last.node})" if last.node else ""
    return Exclusion(worst, last.node, f"{worst}{location} {reason}", now)


def _covers(exclusion: Exclusion, replica: str, node: str) -> bool:
    return exclusion.replica == replica if exclusion.replica else exclusion.node == node


FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 60.0
"""Backoff between the end of a group that made no progress, from the second in a row on, and the next start, in
seconds: the first value, doubled each time, up to the maximum."""
PROVEN_SECONDS = 300.0
"""Run time after which a script that does not report its steps is assumed to have made some, in seconds."""
MAX_EXCLUSION_LENGTH = 300
"""Maximum length of the description of whom the group goes on without, in characters."""
EARLY_EXIT_SECONDS = 60.0
"""Run time within which a program that ends with a bare exit code is assumed not to have started its work, in
seconds."""
STARTED_SECONDS = 30.0
KILLED_SECONDS = 1.0
"""Run time after which a script that does not report its steps has started its work, in seconds: that of one that
failed, and that of one that was killed."""
POLL_WAIT_SECONDS, POLL_RETRY_SECONDS = 5.0, 0.05
"""Maximum wait for the run directory to be searched for a script's checkpoints, and the time between two checks whether
it was, in seconds. After that, it says nothing about the script's progress."""
KILLS = (-9, -15)
FAULTS = {-SIGSEGV, -SIGBUS, -SIGFPE, -SIGILL, -SIGABRT, -SIGSYS}
"""Signals that a process causes itself."""
STEPS, SAVED = "steps", "saved"
SHELL_SIGNAL_BASE = 128
"""Exit codes above this are those of a shell whose child was killed: this number plus the signal's."""
UNKNOWN = "unknown"
MAX_HANGS = 3
"""Number of hangs at the same step after which the job fails: a network may fail twice."""
PAUSING_HINT = (
    "If the ranks are at something that takes longer, such as a validation, put it into "
    '`with tandem.pausing("validation"):`, or raise elasticity.hangSeconds'
)
ENDED_EARLY = "it ended with exit code 0 while other ranks still worked"
"""Error of a rank whose script ends before those of others."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The identity of a failure: two failures with equal signatures are the same failure."""

    error: str
    location: str
    code: int
    replica: str = field(default="", compare=False)
    """The replica that failed; empty if several failed by themselves."""
    step: int | None = field(default=None, compare=False)
    """Steps completed at the time of the failure; None if unknown."""


def record_failure(state: State, sync: Sync, now: float) -> State:
    """Record the failure of a rank that its agent reports."""
    failure = sync.failure
    if failure is None or sync.generation != state.number or (sync.replica, sync.incarnation) not in state.members:
        return state
    known_report = state.failure_reports.get(sync.replica)
    # The first report stands, unless it was a consequence and this one is a cause.
    if known_report is not None and (failure.consequence or not known_report.failure.consequence):
        # How a rank was killed may be known later than what that did to another one of the same replica.
        return state
    # The last heartbeat may be older than the failure, and not report a step that was made since.
    stepped = any(report.has_stepped for report in sync.ranks)
    state = replace(state, training=state.training or (state.open and stepped))
    failure_report = FailureReport(_normalize_exit_code(failure), now - failure.seconds_ago)
    return replace(state, failure_reports={**state.failure_reports, sync.replica: failure_report})


def first_failure(state: State) -> tuple[str, FailureReport] | None:
    """The first failure of the newest generation, with its replica; a consequence only if nothing else was reported."""
    return min(
        state.failure_reports.items(),
        key=lambda entry: (entry[1].failure.consequence, entry[1].failed_at),
        default=None,
    )


def failure_time(cause: Cause, before: State, after: State) -> float | None:
    """Time of the failure for which a generation was closed; None if it is not known, or the change was planned.

    Args:
        before: the state before the event that closed it, with the agents that the event removed.
        after: the state after it.
    """
    if cause.is_planned:
        return None
    failed_at = first_failed_at(after)
    if failed_at is None and cause.reason == "MemberLost":
        # The break of a connection is newer than the last message on it, and its time is exact.
        signs = [
            agent.last_seen if agent.disconnected_at is None else agent.disconnected_at
            for replica, agent in before.agents.items()
            if is_member(before, agent)
            and (replica not in after.agents or after.agents[replica].member.incarnation != agent.member.incarnation)
        ]
        return min(signs, default=None)
    return failed_at


def first_failed_at(state: State) -> float | None:
    """Time of the first failure that members of the newest generation reported; None if there is none."""
    return min((report.failed_at for report in state.failure_reports.values()), default=None)


def is_collective_failure(state: State) -> bool:
    """Whether every member failed in the same broken collective, with the same error and in the same place.

    Then no member is gone, and it is nobody's consequence: a device or a network is set up so that no start can work.
    This also covers a group whose ranks are all of one member, which knows how each of them ended.
    """
    # Every member has to have reported, each as a consequence, and all of them the same.
    members = set() if state.latest is None else {member.replica for member in state.latest.members}
    reported = [report.failure for report in state.failure_reports.values()]
    distinct = {(report.error, report.where) for report in reported}
    return (
        bool(members)
        and state.failure_reports.keys() == members
        and all(report.consequence and report.error and report.where for report in reported)
        and len(distinct) == 1
    )


def describe(replica: str, failure: Failure | None) -> str:
    """Describe the failure of a rank, as a sentence."""
    if failure is None:
        return f"a training process of {replica} failed"
    rank, failure = f"rank {failure.rank} ({replica})", _normalize_exit_code(failure)
    if failure.error:
        return f"{rank} failed: {failure.error}" + (f" ({failure.where})" if failure.where else "")
    if failure.code < 0:
        return f"{rank} was killed by signal {-failure.code} ({_signal_name(-failure.code)})"
    return f"{rank} ended with exit code {failure.code}"


def classify(state: State, now: float) -> Transition:
    """Classify the failure of the last group, once all ranks have stopped: it sets the cause, and the time of the next
    start, or fails the job."""
    # Once for each generation, and only for failures of ranks: hangs and losses have rules of their own.
    if state.is_classified or state.cause.reason not in ("WorkerFailed", "PeerLost"):
        return state, ()
    state = replace(state, is_classified=True)
    first = first_failure(state)
    # The report that closed the generation may have been a consequence: name the earliest failure instead.
    if first is not None and state.cause.reason == "WorkerFailed":
        replica, report = first
        state = replace(state, cause=replace(state.cause, detail=describe(replica, report.failure), culprit=replica))
    signature_before, signature = state.signature, None if first is None else _signature(state, *first)
    same = signature is not None and signature == signature_before
    # A new file of the script's own is progress that nothing else reports.
    if not state.progress and (state.script_checkpoint or ()) > (state.script_checkpoint_before or ()):
        state = replace(state, progress=SAVED)
    # The same failure again without progress: nothing suggests that a third try would end otherwise.
    if (
        same
        and _made_no_progress(state, signature_before, signature)
        and not _may_be_one_node(state, signature_before, signature)
    ):
        # The last search may be older than the end of the group: wait for the next, so that no checkpoint is missed.
        if state.script_checkpoint_polled <= state.last_change and now - state.last_change < POLL_WAIT_SECONDS:
            return replace(state, is_classified=False, not_before=now + POLL_RETRY_SECONDS), ()
        return _fail_repeated(state)
    # Without a step, progress is the only measure; a failure after a save is then a new one.
    is_known = signature is not None and (signature.step is not None or state.progress != SAVED)
    state = replace(state, signature=signature if is_known else None, progress_before=state.progress)
    # It got somewhere, so the next start need not wait.
    if state.progress == SAVED or (not same and _has_started_work(state, first)):
        return replace(state, fruitless_generations=0), ()
    state = replace(state, fruitless_generations=state.fruitless_generations + 1)
    # Exponential backoff from the second failure in a row on.
    pause = (
        0.0
        if state.fruitless_generations < 2
        else min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** (state.fruitless_generations - 2))
    )
    if not pause:
        return state, ()
    text = f"no progress was made, so the next start is in {pause:g} s"
    return replace(state, not_before=now + pause), (Announce(text, warning=True),)


def _made_no_progress(state: State, earlier: Hashable, signature: Signature | None) -> bool:
    """Whether this failure, which has the same signature as the one before, came at the same step or an earlier one.

    For a script that does not report its steps: whether neither group had made any progress.
    """
    assert isinstance(earlier, Signature)
    assert signature is not None
    # Steps are not known of both, so any progress counts.
    if earlier.step is None or signature.step is None:
        return not state.progress and not state.progress_before
    if (state.script_checkpoint or ()) > (state.script_checkpoint_before or ()):
        # It may count its steps from each start on.
        return False
    return signature.step <= earlier.step


def clear_outlived(state: State, saved_step: int | None) -> State:
    """Forget a failure and a hang at an earlier step than that of a new checkpoint: the next ones are different
    failures.

    Args:
        saved_step: steps completed in the checkpoint; None if unknown.
    """
    if saved_step is None:
        return state
    if (
        isinstance(state.signature, Signature)
        and state.signature.step is not None
        and saved_step > state.signature.step
    ):
        state = replace(state, signature=None)
    if state.hung_step is not None and saved_step > state.hung_step:
        state = replace(state, hung_step=None, hung_times=0)
    return state


def count_hang(state: State, hung: Hung) -> Transition:
    """Count a hang; the job fails at the MAX_HANGS-th hang at the same step."""
    # A hang at an unknown step cannot be compared with the last one.
    if hung.step is None:
        return state, ()
    times = state.hung_times + 1 if hung.step == state.hung_step else 1
    state = replace(state, hung_step=hung.step, hung_times=times)
    if times < MAX_HANGS:
        return state, ()
    cause = Cause(Reason.HUNG, f"{hung.detail}; {MAX_HANGS} times at this step. {PAUSING_HINT}")
    return replace(state, failing=cause), (FailJob(cause),)


def blame_finished_members(state: State, failure: Failure | None, now: float) -> tuple[State, Cause]:
    """Blame members whose ranks have all exited with code 0 for a connection that another member lost.

    Their script ends too early on some ranks. They are the cause, and not the member that reports it.

    Args:
        failure: the failure that the other member reports.
    """
    assert state.latest is not None
    first_rank, failure_reports = 0, dict(state.failure_reports)
    # Ranks are numbered in the order of members.
    for member in state.latest.members:
        if member.replica in state.finished:
            ended = Failure(rank=first_rank, code=0, error=ENDED_EARLY, step=failure.step if failure else None)
            failure_reports[member.replica] = FailureReport(ended, now)
        first_rank += member.processes
    culprit = min(state.finished, key=lambda replica: failure_reports[replica].failure.rank)
    state = replace(state, failure_reports=failure_reports)
    return state, Cause("WorkerFailed", describe(culprit, failure_reports[culprit].failure), culprit)


def progress_of(state: State, now: float) -> str:
    """The progress of the open generation: STEPS, SAVED, or empty if it made none."""
    if state.checkpoint_at is not None and state.checkpoint_at > state.opened_at:
        return SAVED
    # A script that reports nothing is given the benefit of the doubt after a while.
    return STEPS if state.training or (_is_unreported_script(state) and now - state.opened_at >= PROVEN_SECONDS) else ""


def _has_started_work(state: State, first: tuple[str, FailureReport] | None) -> bool:
    """Whether the group had started its work when it failed, as far as that is known of a script that reports
    nothing."""
    killed = first is not None and first[1].failure.code in KILLS
    return bool(state.progress) or (
        _is_unreported_script(state) and _lifetime(state) >= (KILLED_SECONDS if killed else STARTED_SECONDS)
    )


def _is_unreported_script(state: State) -> bool:
    """Whether the ranks run a script that does not report its steps."""
    return state.rules.completes_on_exit and not state.can_save


def _lifetime(state: State) -> float:
    return state.last_change - state.opened_at


def _may_be_one_node(state: State, earlier: Hashable, signature: Signature | None) -> bool:
    """Whether the node of one replica may be broken, and the group goes on without it or may do so yet."""
    if (
        not isinstance(earlier, Signature)
        or signature is None
        or not signature.replica
        or signature.replica != earlier.replica
    ):
        return False
    # A node does not end a script with 0. The agent of such a rank has left, until another one takes its place.
    if signature.error == ENDED_EARLY:
        return False
    agent = state.agents.get(signature.replica)
    # It is gone, or excluded already.
    if agent is None:
        return True
    # With other replicas on the node, these would fail, too, if the node were broken.
    if not agent.node or sum(other.node == agent.node for other in state.agents.values()) > 1:
        return False
    return exclude(state, Exclusion(signature.replica, agent.node, "", 0.0)) is not None


def _fail_repeated(state: State) -> Transition:
    if state.progress:
        since = "without a further step in between"
    elif _is_unreported_script(state):
        since = "before Tandem heard of a step or saw a checkpoint"
    else:
        since = "before it made a step or saved anything"
    cause = Cause(Reason.REPEATED_FAILURE, f"{state.cause.detail}; twice, {since}")
    first = first_failure(state)
    return replace(state, failing=cause), (FailJob(cause, *(first or ("", None))),)


def _signature(state: State, replica: str, report: FailureReport) -> Signature | None:
    """The signature of a failure; None if it may pass by itself."""
    failure, lifetime = report.failure, _lifetime(state)
    # A consequence has its cause elsewhere, unless it is everybody's.
    may_pass = (failure.consequence or failure.passing) and not is_collective_failure(state)
    if may_pass or (failure.code < 0 and failure.code not in FAULTS):
        return None
    # A bare exit code that comes late may mean anything.
    if not failure.error and lifetime > EARLY_EXIT_SECONDS:
        return None
    culprits = [name for name, other in state.failure_reports.items() if not other.failure.consequence]
    only_culprit = replica if culprits == [replica] else ""
    return Signature(failure.error, failure.where, failure.code, only_culprit, failure.step)


def _normalize_exit_code(failure: Failure) -> Failure:
    """Convert the exit code of a shell or container, 128 plus a signal, to the negative number of that signal."""
    number = failure.code - SHELL_SIGNAL_BASE
    if number <= 0 or failure.error or _signal_name(number) == UNKNOWN:
        return failure
    return failure.model_copy(update={"code": -number})


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return UNKNOWN
