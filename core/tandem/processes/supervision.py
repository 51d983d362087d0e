"""Supervision of child processes: which to start, stop or give up on. A pure function of children, run and time.

The run has four modes, each stricter than the one before:

    train    every child that died is restarted, with a growing delay
    drain    training is complete: agents exit by themselves, evaluators work through the remaining checkpoints
    leave    the user asked to stop, or the run has failed: agents, which save, and evaluators, which abandon their
             evaluation, receive SIGTERM, then the coordinator
    drop     the user asked twice: everything is killed

Agents leave before the coordinator, because a group that is saving may still need it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tandem.job.resource import DistributedTrainingJob
from tandem.processes.exitcode import ExitCode
from tandem.wire.reasons import Reason

Role = Literal["coordinator", "agent", "evaluator"]

HEALTHY_SECONDS = 60.0
"""A process that lived this long has started successfully, and its end starts a new count of failures. Importing torch
takes up to 20 s on a busy machine."""
FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.5, 30.0
"""Delay before the second restart in a row, doubled for each further one; the first restart is immediate."""
MAX_FAILURES = 4
"""Consecutive early exits before a child is given up."""
SAVING_SECONDS = 45.0
"""Default grace period of an agent between SIGTERM and SIGKILL: torchrun's 30 s for its ranks, and a margin."""
LEAVING_SECONDS = 10.0
"""Grace period of evaluators and the coordinator."""
ENDING_SECONDS = 60.0
"""Maximum time that an agent may run after training is complete."""
UPLOADING_SECONDS = 4 * 3600.0
"""Grace period of a coordinator that uploads into a bucket; it gives up by itself when nothing arrives any more."""
RESULT_SECONDS = 5.0
"""Maximum delay between the successful end of an agent and the marker that training is complete."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """One child process over all its restarts. Times are seconds of a monotonic clock."""

    name: str
    role: Role
    running: bool = False
    started_at: float | None = None
    """Time of its last start."""
    ended_at: float | None = None
    """Time of its last end; None while it runs."""
    code: int | None = None
    """Exit code of its last end, or minus a signal's number."""
    failures: int = 0
    """Consecutive ends with an error soon after the start."""
    asked_at: float | None = None
    """Time at which it received SIGTERM since its last start."""
    saving_seconds: float = SAVING_SECONDS
    """Grace period of an agent between SIGTERM and SIGKILL."""
    leaving_seconds: float = LEAVING_SECONDS
    """Grace period of an evaluator or coordinator."""
    proven: bool = False
    """Whether it has done work since its last start, so that its end does not mean that it cannot start."""

    def started(self, now: float) -> "Child":
        """The child after a start."""
        return replace(self, running=True, started_at=now, ended_at=None, code=None, asked_at=None, proven=False)

    def asked(self, now: float) -> "Child":
        """The child after SIGTERM."""
        return replace(self, asked_at=now)

    def at_work(self) -> "Child":
        """The child after it has done work."""
        return self if self.proven else replace(self, proven=True)

    def ended(self, code: int, now: float) -> "Child":
        """The child after its end."""
        lived = now - (self.started_at if self.started_at is not None else now)
        healthy = self.proven or lived >= HEALTHY_SECONDS
        # A successful end clears the record; an error after a healthy life starts a new one.
        failures = 0 if code == 0 else 1 if healthy else self.failures + 1
        return replace(self, running=False, ended_at=now, code=code, failures=failures)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """State of the run besides its children."""

    requests: int = 0
    """Number of times that the user asked to stop."""
    done: bool = False
    """Whether DONE exists."""
    done_since: float | None = None
    """Time at which DONE was first seen."""
    failed: bool = False
    """Whether FAILED.json exists."""
    reachable: bool = False
    """Whether the coordinator's address is known, so that agents can be started."""
    own_command: bool = False
    """Whether the user's own script trains: exit code 0 of its agents is the only sign that it is complete."""
    begins_again: bool = False
    """Whether the coordinator reports that no member of its group has finished: if agents have ended successfully,
    their group failed."""


@dataclass(frozen=True)
class StartChild:
    """Action: start a child, for the first time or again."""

    name: str


@dataclass(frozen=True)
class TerminateChild:
    """Action: send SIGTERM."""

    name: str


@dataclass(frozen=True)
class KillChild:
    """Action: send SIGKILL, also to the processes that the child has started."""

    name: str


@dataclass(frozen=True)
class FailRun:
    """Action: record that the run has failed for good."""

    reason: str
    message: str
    child: str
    code: ExitCode


@dataclass(frozen=True)
class Finish:
    """Action: end the supervision. No child runs, and none will."""


Action = StartChild | TerminateChild | KillChild | FailRun | Finish


def decide(children: Sequence[Child], facts: RunFacts, now: float) -> list[Action]:
    """The actions to take now. Called repeatedly; their effects show in the children of the next call."""
    # The user asked twice: no more waiting for saves.
    if facts.requests >= 2:
        return [KillChild(child.name) for child in children if child.running] or [Finish()]
    if facts.requests == 1 or facts.failed:
        return _leave(children, now)
    if facts.done:
        return _drain(children, facts, now)
    return _train(children, facts, now)


def leaving_seconds(job: DistributedTrainingJob, role: Role) -> float:
    """The grace period of a child that is no agent."""
    uploads = role == "coordinator" and job.spec.checkpoint.storage.bucket is not None
    return UPLOADING_SECONDS if uploads else LEAVING_SECONDS


def restart_delay(failures: int) -> float:
    """Delay in seconds between an end and the next start."""
    return 0.0 if failures <= 1 else min(MAX_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** (failures - 2))


def is_given_up(child: Child) -> bool:
    """Whether a restart would not help."""
    return not child.running and (child.code == ExitCode.CONFIGURATION or child.failures >= MAX_FAILURES)


def has_succeeded(child: Child) -> bool:
    """Whether it has ended successfully."""
    return not child.running and child.code == 0


def _train(children: Sequence[Child], facts: RunFacts, now: float) -> list[Action]:
    agents = _with_role("agent", children)
    # Without a marker of completion, the exit codes of all agents are the sign.
    if facts.own_command and agents and all(has_succeeded(agent) for agent in agents):
        return _leave(children, now)
    actions: list[Action] = []
    for child in children:
        # An agent needs the coordinator's address.
        if child.running or (child.role == "agent" and not facts.reachable):
            continue
        if child.role == "agent" and child.code == ExitCode.LEFT_OUT:
            # The group left this replica out; a restart on the same machine would end the same way.
            continue
        # A run can continue without an evaluator, but not without its coordinator or an agent.
        if is_given_up(child) and child.role != "evaluator":
            return [_failure(child)]
        if child.role == "agent" and has_succeeded(child):
            # The marker of completion is written by another process, and may be a moment late.
            late = child.ended_at is not None and now - child.ended_at > RESULT_SECONDS
            if late and facts.own_command and facts.begins_again:
                actions.append(StartChild(child.name))
            elif late and not facts.own_command:
                return [
                    FailRun(
                        "NoResult", f"{child.name} ended, but training is not complete", child.name, ExitCode.FAILED
                    )
                ]
        elif child.role == "evaluator" and (has_succeeded(child) or is_given_up(child)):
            continue
        elif is_due(child, now):
            actions.append(StartChild(child.name))
    return actions


def _drain(children: Sequence[Child], facts: RunFacts, now: float) -> list[Action]:
    actions: list[Action] = []
    since = now if facts.done_since is None else facts.done_since
    agents, evaluators = _with_role("agent", children), _with_role("evaluator", children)
    # An agent that does not exit by itself would keep the run from ending.
    if now - since > ENDING_SECONDS:
        actions += _terminate(agents, now)
    open_work = [child for child in evaluators if not has_succeeded(child) and not is_given_up(child)]
    actions += [StartChild(child.name) for child in open_work if is_due(child, now)]
    # Evaluators and the last agents may still need the coordinator: keep it alive.
    if open_work or any(agent.running for agent in agents):
        coordinator = _with_role("coordinator", children)
        return actions + [StartChild(c.name) for c in coordinator if is_due(c, now) and not is_given_up(c)]
    return _leave(children, now)


def _leave(children: Sequence[Child], now: float) -> list[Action]:
    # The coordinator leaves last: saving agents may still need it.
    working = [*_with_role("agent", children), *_with_role("evaluator", children)]
    for group in (working, _with_role("coordinator", children)):
        if any(child.running for child in group):
            return _terminate(group, now)
    return [Finish()]


def _terminate(children: Sequence[Child], now: float) -> list[Action]:
    actions: list[Action] = []
    for child in children:
        patience = child.saving_seconds if child.role == "agent" else child.leaving_seconds
        if child.running and child.asked_at is None:
            actions.append(TerminateChild(child.name))
        elif child.running and child.asked_at is not None and now - child.asked_at > patience:
            actions.append(KillChild(child.name))
    return actions


def is_due(child: Child, now: float) -> bool:
    """Whether the delay since its last end is over."""
    if child.running:
        return False
    return child.ended_at is None or now - child.ended_at >= restart_delay(child.failures)


def _failure(child: Child) -> FailRun:
    if child.code == ExitCode.CONFIGURATION:
        return FailRun(
            Reason.INVALID_CONFIGURATION,
            f"{child.name} cannot work with this job as written",
            child.name,
            ExitCode.CONFIGURATION,
        )
    times = f"{child.failures} times in a row soon after its start"
    return FailRun(
        Reason.DOES_NOT_START, f"{child.name} ended {times}, {describe_exit(child.code)}", child.name, ExitCode.FAILED
    )


def describe_exit(code: int | None) -> str:
    """Describe how a process ended."""
    if code is None:
        return "for an unknown reason"
    return f"killed by signal {-code}" if code < 0 else f"with exit code {code}"


def _with_role(role: Role, children: Sequence[Child]) -> list[Child]:
    return [child for child in children if child.role == role]
