"""Supervision of child processes: which to start, stop or give up on. A pure function of children, run and time.

The run passes through four moods, each stronger than the one before:

    train    everything that died is started again, with a growing pause
    drain    training is complete: agents go by themselves, evaluators work through what is left
    leave    the user asked to stop, or the run has failed: agents, who save, and evaluators, who give up what they are
             at, then the coordinator
    drop     the user asked twice: everything is killed

Agents leave before the coordinator, because a group that is saving may still want to talk to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tandem.exitcode import ExitCode

Role = Literal["coordinator", "agent", "evaluator"]

HEALTHY_SECONDS = 60.0
"""A process that lived so long did start well, and its end starts a new record. Importing torch takes up to 20 s on a
machine that is busy."""
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0
"""Seconds before the second restart in a row, doubled for each further one; the first restart is immediate."""
MAX_FAILURES = 4
"""So many ends soon after the start, in a row, and the child will not come up at all."""
SAVING_SECONDS = 45.0
"""What an agent gets between SIGTERM and SIGKILL, if nothing else is said: torchrun's 30 s for its ranks, and some."""
LEAVING_SECONDS = 10.0
"""What evaluators and coordinator get."""
ENDING_SECONDS = 60.0
"""How long an agent may stay when training is complete."""
RESULT_SECONDS = 5.0
"""An agent that ended well may be so much ahead of the marker that says that training is complete."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """One child process over all its lives. Times are seconds of a monotonic clock."""

    name: str
    role: Role
    running: bool = False
    started_at: float | None = None
    """When the last life began."""
    ended_at: float | None = None
    """When the last life ended; None while it runs."""
    code: int | None = None
    """How the last life ended: exit code, or minus a signal's number."""
    failures: int = 0
    """Lives in a row that ended badly and soon after their start."""
    asked_at: float | None = None
    """When this life was asked to end."""
    saving_seconds: float = SAVING_SECONDS
    """What an agent gets between SIGTERM and SIGKILL."""
    proven: bool = False
    """This life was seen at work, so that its end is no sign that it cannot start."""

    def started(self, now: float) -> "Child":
        """The child with a new life."""
        return replace(self, running=True, started_at=now, ended_at=None, code=None, asked_at=None, proven=False)

    def asked(self, now: float) -> "Child":
        """The child after SIGTERM."""
        return replace(self, asked_at=now)

    def at_work(self) -> "Child":
        """The child after it was seen at work."""
        return self if self.proven else replace(self, proven=True)

    def ended(self, code: int, now: float) -> "Child":
        """The child after the end of its life."""
        lived = now - (self.started_at if self.started_at is not None else now)
        healthy = self.proven or lived >= HEALTHY_SECONDS
        failures = 0 if code == 0 else 1 if healthy else self.failures + 1
        return replace(self, running=False, ended_at=now, code=code, failures=failures)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of the run besides its children."""

    requests: int = 0
    """How often the user asked to stop."""
    done: bool = False
    """DONE is there."""
    done_since: float | None = None
    """When that was seen first."""
    failed: bool = False
    """FAILED.json is there."""
    reachable: bool = False
    """The coordinator's address is known, so that agents can be started."""
    own_command: bool = False
    """The user's own script trains: an agent's exit code 0 is the only sign that it is complete."""
    begins_again: bool = False
    """The coordinator says that nobody of its group has finished: where agents have ended well, that group failed."""


@dataclass(frozen=True)
class StartChild:
    """Start this child, for the first time or again."""

    name: str


@dataclass(frozen=True)
class Ask:
    """Send SIGTERM."""

    name: str


@dataclass(frozen=True)
class Kill:
    """Send SIGKILL, also to what the child has started."""

    name: str


@dataclass(frozen=True)
class FailRun:
    """Record that the run has failed for good."""

    reason: str
    message: str
    child: str
    code: ExitCode


@dataclass(frozen=True)
class Finish:
    """Nothing is running and nothing will be."""


Action = StartChild | Ask | Kill | FailRun | Finish


def decide(children: Sequence[Child], facts: Facts, now: float) -> list[Action]:
    """What to do now. Called again and again; what was done shows in the children of the next call."""
    if facts.requests >= 2:
        return [Kill(child.name) for child in children if child.running] or [Finish()]
    if facts.requests == 1 or facts.failed:
        return _leave(children, now)
    if facts.done:
        return _drain(children, facts, now)
    return _train(children, facts, now)


def pause(failures: int) -> float:
    """Seconds between an end and the next start."""
    return 0.0 if failures <= 1 else min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** (failures - 2))


def is_given_up(child: Child) -> bool:
    """Whether starting it again would not help."""
    return not child.running and (child.code == ExitCode.CONFIGURATION or child.failures >= MAX_FAILURES)


def is_through(child: Child) -> bool:
    """Whether it has ended well."""
    return not child.running and child.code == 0


def _train(children: Sequence[Child], facts: Facts, now: float) -> list[Action]:
    agents = _of("agent", children)
    if facts.own_command and agents and all(is_through(agent) for agent in agents):
        return _leave(children, now)
    actions: list[Action] = []
    for child in children:
        if child.running or (child.role == "agent" and not facts.reachable):
            continue
        if child.role == "agent" and child.code == ExitCode.LEFT_OUT:
            # On this machine it would be the same again.
            continue
        if is_given_up(child) and child.role != "evaluator":
            return [_failure(child)]
        if child.role == "agent" and is_through(child):
            late = child.ended_at is not None and now - child.ended_at > RESULT_SECONDS
            if late and facts.own_command and facts.begins_again:
                actions.append(StartChild(child.name))
            elif late and not facts.own_command:
                return [
                    FailRun(
                        "NoResult", f"{child.name} ended, but training is not complete", child.name, ExitCode.FAILED
                    )
                ]
        elif child.role == "evaluator" and (is_through(child) or is_given_up(child)):
            continue
        elif is_due(child, now):
            actions.append(StartChild(child.name))
    return actions


def _drain(children: Sequence[Child], facts: Facts, now: float) -> list[Action]:
    actions: list[Action] = []
    since = now if facts.done_since is None else facts.done_since
    agents, evaluators = _of("agent", children), _of("evaluator", children)
    if now - since > ENDING_SECONDS:
        actions += _stop(agents, now)
    open_work = [child for child in evaluators if not is_through(child) and not is_given_up(child)]
    actions += [StartChild(child.name) for child in open_work if is_due(child, now)]
    if open_work or any(agent.running for agent in agents):
        coordinator = _of("coordinator", children)
        return actions + [StartChild(c.name) for c in coordinator if is_due(c, now) and not is_given_up(c)]
    return _leave(children, now)


def _leave(children: Sequence[Child], now: float) -> list[Action]:
    working = [*_of("agent", children), *_of("evaluator", children)]
    for group in (working, _of("coordinator", children)):
        if any(child.running for child in group):
            return _stop(group, now)
    return [Finish()]


def _stop(children: Sequence[Child], now: float) -> list[Action]:
    actions: list[Action] = []
    for child in children:
        patience = child.saving_seconds if child.role == "agent" else LEAVING_SECONDS
        if child.running and child.asked_at is None:
            actions.append(Ask(child.name))
        elif child.running and child.asked_at is not None and now - child.asked_at > patience:
            actions.append(Kill(child.name))
    return actions


def is_due(child: Child, now: float) -> bool:
    """Whether its pause after the last end is over."""
    if child.running:
        return False
    return child.ended_at is None or now - child.ended_at >= pause(child.failures)


def _failure(child: Child) -> FailRun:
    if child.code == ExitCode.CONFIGURATION:
        return FailRun(
            "InvalidConfiguration",
            f"{child.name} cannot work with this job as written",
            child.name,
            ExitCode.CONFIGURATION,
        )
    times = f"{child.failures} times in a row soon after its start"
    return FailRun("DoesNotStart", f"{child.name} ended {times}, {ending(child.code)}", child.name, ExitCode.FAILED)


def ending(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "for an unknown reason"
    return f"killed by signal {-code}" if code < 0 else f"with exit code {code}"


def _of(role: Role, children: Sequence[Child]) -> list[Child]:
    return [child for child in children if child.role == role]
