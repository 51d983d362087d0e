"""The job's status and Events, from its observed state and its lifecycle. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.formatting import parse_rfc3339, rfc3339
from tandem.job.resource import DistributedTrainingJob
from tandem.wire.measures import is_restart
from tandem.wire.reasons import Reason
from tandem.wire.status import (
    HALVED,
    KSTATUS,
    REWOUND,
    Condition,
    GenerationView,
    Members,
    Phase,
    Score,
    Snapshot,
    Status,
    Troubles,
    persistent_trouble,
    trouble_messages,
)
from tandem_operator import names
from tandem_operator.lifecycle import Lifecycle, find_condition, is_initialized
from tandem_operator.observed import Pod

MAX_GENERATIONS = 5
"""Maximum number of new generations that one reconcile reports as Events, the latest ones; the coordinator's log has
them all."""
VOLATILE_FIELDS = {
    "progress",
    "loss",
    "throughput",
    "utilization",
    "stragglers",
    "latestCheckpoint",
    "latestEvaluation",
    "evaluatedAt",
    "evaluationLagSteps",
    "troubles",
    "ledger",
}
"""Fields that change all the time; a change in them alone may wait."""

OWNED_CONDITIONS = ("Initialized", "Running", "Restarting", "Suspended", "Complete", "Failed", "Degraded", *KSTATUS)
"""Types of the conditions that the operator writes; those of other writers are kept as they are."""
ALWAYS_SHOWN = {"Initialized", "Running", "Ready"}
"""Conditions that are shown from the start; the others once they have been true."""
STEADY_PHASES: tuple[Phase, ...] = ("Running", "Draining", "Succeeded")
"""Phases of a job that is in its desired state."""


@dataclass(frozen=True)
class KubeEvent:
    """A Kubernetes Event about the job."""

    reason: str
    """One CamelCase word."""
    message: str
    warning: bool = False
    replica: str = ""
    """The replica whose new pod it reports (tandem_operator.job_memory); it is not posted if that pod could not be
    created."""


@dataclass(frozen=True)
class JobProblem:
    """Something that keeps the job from running as specified."""

    reason: str
    """One CamelCase word."""
    message: str
    permanent: bool = False
    """Whether it stays until somebody changes the job."""


def status(
    job: DistributedTrainingJob,
    generation: int,
    snapshot: Snapshot | None,
    lifecycle: Lifecycle,
    workers: Sequence[Pod],
    problems: Sequence[JobProblem],
    now: float,
) -> Status:
    """Compute the status.

    Args:
        generation: metadata.generation of the job.
        snapshot: the coordinator's answer to the last poll; None if it did not answer.
        lifecycle: the stage of the job.
        problems: the most important one first.
    """
    old = job.status or Status()
    base = snapshot.status if snapshot is not None else old
    phase = lifecycle.phase or _phase(old, snapshot)
    spec = job.spec
    ready = (
        base.workers.ready if snapshot is not None and base.workers is not None else sum(pod.ready for pod in workers)
    )
    has_ended = lifecycle.stage in ("end", "suspend")
    message = lifecycle.message or (base.message if snapshot is not None else None)
    if lifecycle.stage == "train" and problems and (phase != "Running" or message is None):
        message = problems[0].message
    changes: dict[str, Any] = {
        # A field that the coordinator does not report, or no longer reports, keeps its last value.
        "phase": phase,
        "conditions": _conditions(old, generation, snapshot, lifecycle, phase, problems, now),
        "observed_generation": generation,
        "selector": ",".join(
            f"{label}={value}" for label, value in {names.JOB: job.metadata.name, names.ROLE: names.WORKER}.items()
        ),
        "workers": Members(
            desired=spec.workers.replicas,
            ready=0 if has_ended else min(ready, spec.workers.most),
            min=spec.workers.min_replicas,
            max=spec.workers.most,
        ),
        "evaluators": Members(
            desired=spec.evaluation.processes,
            ready=base.evaluators.ready if base.evaluators is not None and not has_ended else 0,
        ),
        "generation": base.generation or old.generation,
        "restarts": max(base.restarts, old.restarts),
        "retries": old.retries,
        "retried_at": old.retried_at,
        "progress": base.progress or old.progress,
        "throughput": _rounded(base.throughput),
        "loss": _rounded(base.loss if base.loss is not None else old.loss),
        "troubles": base.troubles if snapshot is not None else old.troubles,
        "ledger": base.ledger or old.ledger,
        "start_time": base.start_time or old.start_time,
        "completion_time": _completion(old, snapshot, lifecycle, now),
        "message": _limited(message),
        "latest_checkpoint": base.latest_checkpoint or old.latest_checkpoint,
        "evaluated_at": base.evaluated_at or old.evaluated_at,
        "latest_evaluation": _rounded_score(base.latest_evaluation or old.latest_evaluation),
        "best_checkpoint": _rounded_score(base.best_checkpoint or old.best_checkpoint),
        "against_base": base.against_base or old.against_base,
        "provenance": base.provenance or old.provenance,
    }
    # Rates are only true at the moment of an answer.
    if has_ended or snapshot is None:
        changes |= {"throughput": None, "utilization": None, "stragglers": []}
    if has_ended:
        changes |= {"world_size": None}
    return base.model_copy(update=changes)


def stalled_status(
    old: Status, generation: int, reason: str, message: str, now: float, permanent: bool = True
) -> Status:
    """The status of a job that the operator does not reconcile. It may train all the same, so what is known of it
    stays.

    Args:
        old: its last status, as far as it can be read.
        reason: one CamelCase word.
        permanent: it stays so until somebody changes the job.
    """
    initialized = find_condition(old, "Initialized")
    report = {
        "Initialized": (False, reason, message),
        "Ready": (False, reason, message),
        "Reconciling": (not permanent, reason, message),
        "Stalled": (permanent, reason, message),
    }
    if initialized is not None and initialized.status == "True":
        del report["Initialized"]
    other_conditions = [
        condition for condition in old.conditions if condition.type in OWNED_CONDITIONS and condition.type not in report
    ]
    conditions = [*_merged(old, report.items(), generation, now), *other_conditions]
    return old.model_copy(
        update={"conditions": conditions, "observed_generation": generation, "message": _limited(message)}
    )


def events_between(old: Status, new: Status, snapshot: Snapshot | None) -> list[KubeEvent]:
    """Events for a change from one status to the next."""
    events = [_generation(view) for view in _new_generations(old, snapshot)]
    # The Event of its generation already reports a group that trains.
    if new.phase != old.phase and new.phase not in ("Pending", "Starting", "Running", "Restarting"):
        message = next(
            (
                condition.message
                for condition in new.conditions
                if condition.status == "True" and condition.type in _FINAL_CONDITIONS
            ),
            "",
        )
        events.append(KubeEvent(new.phase, message or f"the job is {new.phase}", new.phase == "Failed"))
    for condition in new.conditions:
        previous = find_condition(old, condition.type)
        is_warning = (
            condition.type == "Running" and condition.status == "False" and condition.reason in _WARNING_REASONS
        )
        if is_warning and (previous is None or previous.reason != condition.reason):
            events.append(KubeEvent(condition.reason, condition.message, warning=True))
    return [*events, *_troubles(old, snapshot)]


def _troubles(old: Status, snapshot: Snapshot | None) -> Iterator[KubeEvent]:
    """Events for each kind of trouble when it begins, and again when it happens once more, but not for each change of a
    number."""
    before = {(trouble.reason, trouble.lasts) for trouble in trouble_messages(old.troubles)}
    previous = old.troubles or Troubles()
    now = snapshot.status.troubles if snapshot is not None else None
    for trouble in trouble_messages(now):
        is_repeated = now is not None and (
            (trouble.reason == REWOUND and now.rewinds > previous.rewinds)
            or (trouble.reason == HALVED and now.micro_batches_halved > previous.micro_batches_halved)
        )
        if is_repeated or (
            (trouble.reason, trouble.lasts) not in before and (trouble.lasts or (trouble.reason, True) not in before)
        ):
            yield KubeEvent(trouble.reason, trouble.text, warning=trouble.level != "info")


def patch(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A JSON merge patch (RFC 7396) from one object to the other, empty if they are the same."""
    changes: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := patch(before, value):
                changes[key] = inner
        elif value != before:
            changes[key] = value
    return changes


_FINAL_CONDITIONS = ("Complete", "Failed", "Suspended")
_WARNING_REASONS = {
    Reason.GAVE_WAY,
    Reason.NAME_TAKEN,
    Reason.QUOTA_EXCEEDED,
    Reason.REFUSED,
    Reason.POD_REJECTED,
    Reason.NOT_BEGUN,
    Reason.NOT_QUEUED,
    "FailedMount",
    "FailedAttachVolume",
    "Unschedulable",
    "ImagePullBackOff",
    "ErrImagePull",
}


def _phase(old: Status, snapshot: Snapshot | None) -> Phase:
    if snapshot is not None:
        return snapshot.status.phase
    # A coordinator that restarts does not disturb training, and is not shown as if it did.
    return old.phase if old.phase in ("Starting", "Running", "Restarting") else "Pending"


def _completion(old: Status, snapshot: Snapshot | None, lifecycle: Lifecycle, now: float) -> str | None:
    if lifecycle.stage not in ("drain", "end"):
        return None
    reported = old.completion_time or (snapshot.status.completion_time if snapshot is not None else None)
    # The writer's clock may be ahead, and ttlSecondsAfterFinished counts from this time.
    return rfc3339(min(parse_rfc3339(reported) or now, now))


def _conditions(
    old: Status,
    generation: int,
    snapshot: Snapshot | None,
    lifecycle: Lifecycle,
    phase: Phase,
    problems: Sequence[JobProblem],
    now: float,
) -> list[Condition]:
    report = _report(old, snapshot, lifecycle, phase, problems)
    return _merged(old, report, generation, now)


def _merged(
    old: Status, report: Iterable[tuple[str, tuple[bool, str, str]]], generation: int, now: float
) -> list[Condition]:
    """The operator's own conditions, followed by those of other writers."""
    own = [
        _condition(old, kind, holds, reason, message, generation, now)
        for kind, (holds, reason, message) in report
        if holds or kind in ALWAYS_SHOWN or find_condition(old, kind) is not None
    ]
    return [*own, *(condition for condition in old.conditions if condition.type not in OWNED_CONDITIONS)]


def _report(
    old: Status, snapshot: Snapshot | None, lifecycle: Lifecycle, phase: Phase, problems: Sequence[JobProblem]
) -> Iterator[tuple[str, tuple[bool, str, str]]]:
    initialized = snapshot is not None or is_initialized(old)
    problem = problems[0] if problems else JobProblem("", "")
    yield (
        "Initialized",
        (initialized, Reason.COORDINATOR_ANSWERED, "the coordinator has answered")
        if initialized
        else (
            False,
            problem.reason or Reason.COORDINATOR_STARTS,
            problem.message or "the coordinator has not answered yet",
        ),
    )
    running = phase == "Running"
    reason = problem.reason or lifecycle.reason or phase
    yield "Running", (running, reason, problem.message or lifecycle.message or f"the job is {phase}")
    yield "Restarting", (phase == "Restarting", phase, _message(snapshot) if phase == "Restarting" else "")
    yield (
        "Suspended",
        (
            lifecycle.stage == "suspend",
            lifecycle.reason if lifecycle.stage == "suspend" else Reason.RESUMED,
            lifecycle.message,
        ),
    )
    complete = phase == "Succeeded"
    yield "Complete", (complete, lifecycle.reason or phase, lifecycle.message)
    yield "Failed", (phase == "Failed", lifecycle.reason or phase, lifecycle.message)
    degraded = (
        persistent_trouble(snapshot.status.troubles)
        if snapshot is not None and phase not in ("Succeeded", "Failed")
        else None
    )
    yield "Degraded", (True, degraded.reason, degraded.text) if degraded is not None else (False, Reason.WELL, "")
    failed, rests = phase == "Failed", phase == "Suspended" and lifecycle.reason == "Suspended"
    message = problem.message or lifecycle.message or f"the job is {phase}"
    yield "Ready", (phase in STEADY_PHASES or rests, reason, message)
    waits = not (failed or phase in STEADY_PHASES or rests)
    # Tools that wait for the job (Flux, Argo CD, kstatus) would wait for ever.
    permanent_problem = next((candidate for candidate in problems if candidate.permanent), None) if waits else None
    yield "Reconciling", (waits and permanent_problem is None, reason, message)
    if permanent_problem is not None:
        yield "Stalled", (True, permanent_problem.reason, permanent_problem.message)
    else:
        yield "Stalled", (failed, lifecycle.reason or phase, lifecycle.message)


def _condition(
    old: Status, kind: Any, holds: bool, reason: str, message: str, generation: int, now: float
) -> Condition:
    value: Literal["True", "False"] = "True" if holds else "False"
    before = find_condition(old, kind)
    # The transition time of GaveWay is when the back-off started, so a change of the reason alone counts as a
    # transition.
    same = (
        before is not None
        and before.status == value
        and (before.reason == reason or Reason.GAVE_WAY not in (before.reason, reason))
    )
    # Deadlines and pauses are counted from these times, and the clock of an earlier operator may have been ahead.
    since = parse_rfc3339(before.last_transition_time) if before is not None and same else None
    return Condition(
        type=kind,
        status=value,
        reason=reason,
        message=message,
        observed_generation=generation,
        last_transition_time=rfc3339(now if since is None else min(since, now)),
    )


def _limited(message: str | None) -> str | None:
    """A message within the bounds of a condition: `model_copy` validates nothing, and webhooks may answer anything."""
    return None if message is None else Condition(type="Ready", status="False", message=message).message


def _rounded(value: float | None) -> float | None:
    """A value with four significant digits, because `kubectl get` shows every digit there is."""
    return None if value is None else float(f"{value:.4g}")


def _rounded_score(score: Score | None) -> Score | None:
    if score is None:
        return None
    numbers = {"value": score.value, "low": score.low, "high": score.high}
    return score.model_copy(
        update={name: float(f"{number:.6g}") for name, number in numbers.items() if number is not None}
    )


def _message(snapshot: Snapshot | None) -> str:
    return (snapshot.status.message if snapshot is not None else None) or ""


def _new_generations(old: Status, snapshot: Snapshot | None) -> Sequence[GenerationView]:
    if snapshot is None:
        return []
    return [view for view in snapshot.generations if view.generation > (old.generation or 0)][-MAX_GENERATIONS:]


def _generation(view: GenerationView) -> KubeEvent:
    count = len(view.members) if view.replicas is None else view.replicas
    size = "1 worker" if count == 1 else f"{count} workers"
    planned = not is_restart(view.reason) or view.reason == "MemberLeft"
    detail = f": {view.detail}" if view.detail else ""
    return KubeEvent(view.reason, f"generation {view.generation} with {size}{detail}", warning=not planned)
