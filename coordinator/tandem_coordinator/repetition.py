"""What a group failed by, whether that is the same again, and when the next one starts. Pure; a part of the machine in
`membership`.

**Which failure is the first.** When one rank fails, the others fail as a consequence, and any of them may be heard
first. So agents say when their rank failed, and by what; when all have stopped their ranks and wait, the earliest
failure that is nobody else's consequence is what the group failed by.

**The same again.** A group that has made no step and saved nothing starts from where the one before did. If it fails
by the same error in the same place, so will the next one: the job fails after the second time, with that error. A
script that keeps checkpoints of its own has saved something if one of them is new: the run directory is looked at once
more before the job fails. Errors of devices, networks and disks may pass by themselves, and a process that was killed
did nothing wrong: these are tried again for as long as the restart budget lasts. So is a bare exit code that comes
late: it does not say what it means.

**One node alone.** Where the error came from one and the same replica each time, and no other is on its node, it may be
the node that is broken and not the code. As long as the others could go on without it, `blame` gets its third strike.
When another replica then fails by the same error, it was the code.

**Backing off.** The first such failure is repaired at once, as most are one process that was killed. From the second in
a row on, the next group starts after 1, 2, 4, … seconds, a minute at most, so that what needs a minute to pass does not
use up the budget in seconds. So do groups that make steps and fail by the same error before they have saved anything.

Rejected: backing off after failures in mid-training (a node that dies every hour must not cost a minute), and comparing
whole tracebacks (addresses and temporary names differ).
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, Signals

from tandem.messages import WORDLESS, Failure, Sync
from tandem_coordinator.blame import leave_out
from tandem_coordinator.group import Cause, Complaint, FailJob, LeftOut, Next, Say, State

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 60.0
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
"""From here on, exit codes say that a shell's child was killed."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What tells one failure from another."""

    error: str
    where: str
    code: int
    replica: str = field(default="", compare=False)
    """Whose it was; empty where several replicas failed by themselves."""


def take(state: State, sync: Sync, now: float) -> State:
    """Note what an agent says that its rank failed by."""
    failure = sync.failure
    if failure is None or sync.generation != state.number or (sync.replica, sync.incarnation) not in state.inside:
        return state
    if sync.replica in state.complaints:
        return state
    # What the coordinator was told in time with the last heartbeat may be older than the failure.
    stepping = any(report.phase not in WORDLESS for report in sync.ranks)
    state = replace(state, training=state.training or (state.open and stepping))
    complaint = Complaint(failure, now - failure.seconds_ago)
    return replace(state, complaints={**state.complaints, sync.replica: complaint})


def first_of(state: State) -> tuple[str, Complaint] | None:
    """What the newest generation failed by, and whose rank it was; consequences only where nothing else is known."""
    return min(state.complaints.items(), key=lambda one: (one[1].failure.consequence, one[1].at), default=None)


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
    if same and not state.progress and not state.before and not _is_due_to_one(state, before, signature):
        if state.own_file_at <= state.changed and now - state.changed < LOOK_SECONDS:
            return replace(state, settled=False, not_before=now + LOOK_AGAIN_SECONDS), ()
        return _give_up(state)
    state = replace(state, signature=None if state.progress == SAVED else signature, before=state.progress)
    if state.progress == SAVED or (not same and _has_begun(state, first)):
        return replace(state, barren=0), ()
    state = replace(state, barren=state.barren + 1)
    pause = 0.0 if state.barren < 2 else min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** (state.barren - 2))
    if not pause:
        return state, ()
    words = f"{state.cause.detail}; no progress was made, so the next start is in {pause:g} s"
    return replace(state, not_before=now + pause), (Say(words, warning=True),)


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
    before = "Tandem heard of a step or saw a checkpoint" if _is_silent(state) else "it made a step or saved anything"
    cause = Cause("RepeatedFailure", f"{state.cause.detail}; twice, before {before}")
    first = first_of(state)
    return replace(state, failing=cause), (FailJob(cause, *(first or ("", None))),)


def _signature(state: State, replica: str, complaint: Complaint) -> Signature | None:
    """None of what may pass by itself."""
    failure, lived = complaint.failure, _lived(state)
    if failure.consequence or failure.passing or (failure.code < 0 and failure.code not in FAULTS):
        return None
    if not failure.error and (lived > AT_ONCE_SECONDS or failure.code >= OF_SHELLS):
        return None
    culprits = [name for name, one in state.complaints.items() if not one.failure.consequence]
    return Signature(failure.error, failure.where, failure.code, replica if culprits == [replica] else "")


def _name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return "unknown"
