"""The job's status and Events, from its observed state and its lifecycle. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.formatting import rfc3339, seconds
from tandem.job import DistributedTrainingJob
from tandem.measures import is_restart
from tandem.reasons import Reason
from tandem.status import (
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
    lasting,
    told,
)
from tandem_operator import names
from tandem_operator.lifecycle import Lifecycle, condition, is_initialized
from tandem_operator.observed import Pod

MAX_GENERATIONS = 5
"""Of more new generations at once only the last are told as events; the coordinator's log has them all."""
LIVELY = {
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
"""Fields that change all the time; a change of them alone may wait."""

OURS = ("Initialized", "Running", "Restarting", "Suspended", "Complete", "Failed", "Degraded", *KSTATUS)
"""Types of the conditions that the operator writes; those of other writers are kept as they are."""
ALWAYS = {"Initialized", "Running", "Ready"}
"""Told also while they do not hold; others only once they have."""
SETTLED: tuple[Phase, ...] = ("Running", "Draining", "Succeeded")
"""Phases of a job that is as it was asked for."""


@dataclass(frozen=True)
class Notice:
    """A Kubernetes Event about the job."""

    reason: str
    """One CamelCase word."""
    message: str
    warning: bool = False
    place: str = ""
    """Whose new pod it tells of (tandem_operator.job_memory); where none could be made, there is nothing to tell."""


@dataclass(frozen=True)
class Want:
    """Something that keeps the job from getting what it needs."""

    reason: str
    """One CamelCase word."""
    message: str
    for_good: bool = False
    """As the job stands: somebody has to change it."""


def status(
    job: DistributedTrainingJob,
    generation: int,
    heard: Snapshot | None,
    lifecycle: Lifecycle,
    workers: Sequence[Pod],
    troubles: Sequence[Want],
    now: float,
) -> Status:
    """The status as it should be.

    Args:
        generation: metadata.generation of the job.
        heard: what the coordinator said just now, None if it did not answer.
        ahead: what is to become of the job.
        troubles: the gravest first.
    """
    old = job.status or Status()
    base = heard.status if heard is not None else old
    phase = lifecycle.phase or _phase(old, heard)
    spec = job.spec
    ready = base.workers.ready if heard is not None and base.workers is not None else sum(pod.ready for pod in workers)
    over = lifecycle.stage in ("end", "suspend")
    message = lifecycle.message or (base.message if heard is not None else None)
    if lifecycle.stage == "train" and troubles and (phase != "Running" or message is None):
        message = troubles[0].message
    changes: dict[str, Any] = {
        "phase": phase,
        "conditions": _conditions(old, generation, heard, lifecycle, phase, troubles, now),
        "observed_generation": generation,
        "selector": ",".join(
            f"{label}={value}" for label, value in {names.JOB: job.metadata.name, names.ROLE: names.WORKER}.items()
        ),
        "workers": Members(
            desired=spec.workers.replicas,
            ready=0 if over else min(ready, spec.workers.most),
            min=spec.workers.min_replicas,
            max=spec.workers.most,
        ),
        "evaluators": Members(
            desired=spec.evaluation.processes,
            ready=base.evaluators.ready if base.evaluators is not None and not over else 0,
        ),
        "generation": base.generation or old.generation,
        "restarts": max(base.restarts, old.restarts),
        "retries": old.retries,
        "retried_at": old.retried_at,
        "progress": base.progress or old.progress,
        "throughput": _rounded(base.throughput),
        "loss": _rounded(base.loss if base.loss is not None else old.loss),
        "troubles": base.troubles if heard is not None else old.troubles,
        "ledger": base.ledger or old.ledger,
        "start_time": base.start_time or old.start_time,
        "completion_time": _completion(old, heard, lifecycle, now),
        "message": _cut(message),
        "latest_checkpoint": base.latest_checkpoint or old.latest_checkpoint,
        "evaluated_at": base.evaluated_at or old.evaluated_at,
        "latest_evaluation": _shown(base.latest_evaluation or old.latest_evaluation),
        "best_checkpoint": _shown(base.best_checkpoint or old.best_checkpoint),
        "against_base": base.against_base or old.against_base,
    }
    if over or heard is None:
        changes |= {"throughput": None, "utilization": None, "stragglers": []}
    if over:
        changes |= {"world_size": None}
    return base.model_copy(update=changes)


def refused(old: Status, generation: int, reason: str, message: str, now: float, for_good: bool = True) -> Status:
    """The status of a job that is not looked after. It may train all the same: what is known of it stays.

    Args:
        old: what of its status can be read.
        reason: one CamelCase word.
        for_good: as it stands, so that somebody has to change it.
    """
    begun = condition(old, "Initialized")
    report = {
        "Initialized": (False, reason, message),
        "Ready": (False, reason, message),
        "Reconciling": (not for_good, reason, message),
        "Stalled": (for_good, reason, message),
    }
    if begun is not None and begun.status == "True":
        del report["Initialized"]
    kept = [one for one in old.conditions if one.type in OURS and one.type not in report]
    conditions = [*_merged(old, report.items(), generation, now), *kept]
    return old.model_copy(
        update={"conditions": conditions, "observed_generation": generation, "message": _cut(message)}
    )


def notices(old: Status, new: Status, heard: Snapshot | None) -> list[Notice]:
    """What a person following the job wants to read, as the status goes from one to the other."""
    found = [_generation(view) for view in _news(old, heard)]
    # Of a group that trains its generation tells.
    if new.phase != old.phase and new.phase not in ("Pending", "Starting", "Running", "Restarting"):
        why = next((one.message for one in new.conditions if one.status == "True" and one.type in _LAST), "")
        found.append(Notice(new.phase, why or f"the job is {new.phase}", new.phase == "Failed"))
    for one in new.conditions:
        before = condition(old, one.type)
        told = one.type == "Running" and one.status == "False" and one.reason in _WORTH_A_WARNING
        if told and (before is None or before.reason != one.reason):
            found.append(Notice(one.reason, one.message, warning=True))
    return [*found, *_troubles(old, heard)]


def _troubles(old: Status, heard: Snapshot | None) -> Iterator[Notice]:
    """Each kind of trouble when it begins, and again when its sentence is about something new: not for each number."""
    before = {(one.reason, one.lasts) for one in told(old.troubles)}
    known = old.troubles or Troubles()
    now = heard.status.troubles if heard is not None else None
    for one in told(now):
        again = now is not None and (
            (one.reason == REWOUND and now.rewinds > known.rewinds)
            or (one.reason == HALVED and now.micro_batches_halved > known.micro_batches_halved)
        )
        if again or ((one.reason, one.lasts) not in before and (one.lasts or (one.reason, True) not in before)):
            yield Notice(one.reason, one.text, warning=one.level != "info")


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


_LAST = ("Complete", "Failed", "Suspended")
_WORTH_A_WARNING = {
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


def _phase(old: Status, heard: Snapshot | None) -> Phase:
    if heard is not None:
        return heard.status.phase
    # A coordinator that restarts does not disturb training, and is not shown as if it did.
    return old.phase if old.phase in ("Starting", "Running", "Restarting") else "Pending"


def _completion(old: Status, heard: Snapshot | None, lifecycle: Lifecycle, now: float) -> str | None:
    if lifecycle.stage not in ("drain", "end"):
        return None
    said = seconds(heard.status.completion_time) if heard is not None else None
    # The coordinator's clock may be ahead of ours, and a job is kept for some time after this.
    return old.completion_time or rfc3339(min(said or now, now))


def _conditions(
    old: Status,
    generation: int,
    heard: Snapshot | None,
    lifecycle: Lifecycle,
    phase: Phase,
    troubles: Sequence[Want],
    now: float,
) -> list[Condition]:
    report = _report(old, heard, lifecycle, phase, troubles)
    return _merged(old, report, generation, now)


def _merged(
    old: Status, report: Iterable[tuple[str, tuple[bool, str, str]]], generation: int, now: float
) -> list[Condition]:
    """Our conditions, and then those of other writers."""
    ours = [
        _condition(old, kind, holds, reason, message, generation, now)
        for kind, (holds, reason, message) in report
        if holds or kind in ALWAYS or condition(old, kind) is not None
    ]
    return [*ours, *(one for one in old.conditions if one.type not in OURS)]


def _report(
    old: Status, heard: Snapshot | None, lifecycle: Lifecycle, phase: Phase, troubles: Sequence[Want]
) -> Iterator[tuple[str, tuple[bool, str, str]]]:
    initialized = heard is not None or is_initialized(old)
    trouble = troubles[0] if troubles else Want("", "")
    yield (
        "Initialized",
        (initialized, "CoordinatorAnswered", "the coordinator has taken the job up")
        if initialized
        else (False, trouble.reason or "CoordinatorStarts", trouble.message or "the coordinator has not answered yet"),
    )
    running = phase == "Running"
    why = trouble.reason or lifecycle.reason or phase
    yield "Running", (running, why, trouble.message or lifecycle.message or f"the job is {phase}")
    yield "Restarting", (phase == "Restarting", phase, _message(heard) if phase == "Restarting" else "")
    yield (
        "Suspended",
        (
            lifecycle.stage == "suspend",
            lifecycle.reason if lifecycle.stage == "suspend" else "Resumed",
            lifecycle.message,
        ),
    )
    complete = phase == "Succeeded"
    yield "Complete", (complete, lifecycle.reason or phase, lifecycle.message)
    yield "Failed", (phase == "Failed", lifecycle.reason or phase, lifecycle.message)
    wrong = lasting(heard.status.troubles) if heard is not None and phase not in ("Succeeded", "Failed") else None
    yield "Degraded", (True, wrong.reason, wrong.text) if wrong is not None else (False, "Well", "")
    failed, rests = phase == "Failed", phase == "Suspended" and lifecycle.reason == "Suspended"
    words = trouble.message or lifecycle.message or f"the job is {phase}"
    yield "Ready", (phase in SETTLED or rests, why, words)
    waits = not (failed or phase in SETTLED or rests)
    # Who waits for the job (Flux, Argo CD, kstatus) would wait for ever.
    lasting_want = next((one for one in troubles if one.for_good), None) if waits else None
    yield "Reconciling", (waits and lasting_want is None, why, words)
    if lasting_want is not None:
        yield "Stalled", (True, lasting_want.reason, lasting_want.message)
    else:
        yield "Stalled", (failed, lifecycle.reason or phase, lifecycle.message)


def _condition(
    old: Status, kind: Any, holds: bool, reason: str, message: str, generation: int, now: float
) -> Condition:
    value: Literal["True", "False"] = "True" if holds else "False"
    before = condition(old, kind)
    # Since when a job gives way is part of what it says.
    same = (
        before is not None
        and before.status == value
        and (before.reason == reason or Reason.GAVE_WAY not in (before.reason, reason))
    )
    return Condition(
        type=kind,
        status=value,
        reason=reason,
        message=message,
        observed_generation=generation,
        last_transition_time=before.last_transition_time if before is not None and same else rfc3339(now),
    )


def _cut(message: str | None) -> str | None:
    """A message as a condition's: `model_copy` validates nothing, and webhooks may say anything."""
    return None if message is None else Condition(type="Ready", status="False", message=message).message


def _rounded(value: float | None) -> float | None:
    """`kubectl get` shows every digit there is."""
    return None if value is None else float(f"{value:.4g}")


def _shown(score: Score | None) -> Score | None:
    return None if score is None else score.model_copy(update={"value": float(f"{score.value:.6g}")})


def _message(heard: Snapshot | None) -> str:
    return (heard.status.message if heard is not None else None) or ""


def _news(old: Status, heard: Snapshot | None) -> Sequence[GenerationView]:
    if heard is None:
        return []
    return [view for view in heard.generations if view.generation > (old.generation or 0)][-MAX_GENERATIONS:]


def _generation(view: GenerationView) -> Notice:
    count = len(view.members) if view.replicas is None else view.replicas
    size = "1 worker" if count == 1 else f"{count} workers"
    planned = not is_restart(view.reason) or view.reason == "MemberLeft"
    detail = f": {view.detail}" if view.detail else ""
    return Notice(view.reason, f"generation {view.generation} with {size}{detail}", warning=not planned)
