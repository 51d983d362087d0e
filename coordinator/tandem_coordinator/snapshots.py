"""The snapshot of a job, built from membership, reports and the run directory. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nsmallest

from tandem.formatting import rfc3339
from tandem.job.resource import DistributedTrainingJob
from tandem.wire.reasons import Reason
from tandem.wire.status import (
    RESTART_DELAY_PREFIX,
    Event,
    GenerationView,
    Members,
    MemberView,
    Phase,
    Progress,
    RankView,
    Snapshot,
    Status,
    Straggler,
)
from tandem_coordinator.failures import progress_of
from tandem_coordinator.goodput import AFTER_LOOP, ENDED, FINAL_SAVE, SILENT, STEPPING
from tandem_coordinator.group_state import WAITS_FOR_BUCKET, AgentState, State
from tandem_coordinator.progress import Reports
from tandem_coordinator.run_watcher import Observed

MAX_GENERATIONS = 20
"""Maximum number of generations that the operator is told of."""
MAX_NAME_CHARACTERS = 48 * 2**10
"""Maximum number of characters of all members' names: those of 1,000 to 2,000 members."""
MAX_DETAIL_LENGTH, MAX_REASON_LENGTH = 200, 64
"""Maximum lengths of the reason why a generation was formed, and of that why the job has failed, in characters."""


@dataclass(frozen=True)
class Instant:
    """One moment on the wall clock and on the monotonic clock."""

    wall: float
    """Seconds since the epoch."""
    steady: float
    """Seconds of the monotonic clock that membership uses."""


def snapshot(
    job: DistributedTrainingJob,
    status: Status,
    state: State,
    clock: Instant,
    reports: Reports,
    observed: Observed,
    generations: Iterable[GenerationView],
    events: Iterable[Event],
    max_members: int | None = None,
) -> Snapshot:
    """Create a snapshot of the job at one moment.

    Args:
        max_members: how many members to list, those that do not run first; None: all.
    """
    if max_members is None:
        agents = sorted(state.agents.items())
    else:
        agents = nsmallest(
            max_members, state.agents.items(), key=lambda entry: (not entry[1].has_stopped, len(entry[0]), entry[0])
        )
    return Snapshot(
        job=job.metadata.name,
        time=clock.wall,
        status=status,
        members=[_member(agent, clock, reports) for _, agent in agents],
        finished=len(state.finished) if state.rules.completes_on_exit else None,
        reason=_reason(state, observed) if status.phase == "Failed" or _stopped_early(observed) else None,
        generations=_generations(generations, state, clock),
        evaluators=list(observed.evaluators),
        events=list(events),
    )


def brief(full: Snapshot) -> Snapshot:
    """Reduce a snapshot to some 100 KiB at most: the status, and the last generations.

    Each member is named once, in the newest generation that has it: what counts is who was ever in the group.
    """
    views: list[GenerationView] = []
    listed_names: set[str] = set()
    remaining = MAX_NAME_CHARACTERS
    for view in reversed(full.generations[-MAX_GENERATIONS:]):
        members = []
        for name in view.members:
            if name not in listed_names and len(name) <= remaining:
                members.append(name)
                listed_names.add(name)
                remaining -= len(name)
        replicas = len(view.members) if view.replicas is None else view.replicas
        views.append(
            view.model_copy(
                update={"members": members, "replicas": replicas, "detail": view.detail[:MAX_DETAIL_LENGTH]}
            )
        )
    views.reverse()
    return Snapshot(
        job=full.job,
        time=full.time,
        status=full.status,
        finished=full.finished,
        reason=full.reason,
        generations=views,
    )


def status(
    job: DistributedTrainingJob,
    state: State,
    clock: Instant,
    reports: Reports,
    observed: Observed,
    started_at: float | None,
    stragglers: list[Straggler],
) -> Status:
    """Compute the status of the job at one moment."""
    spec, ending = job.spec, observed.ending
    world_size = state.latest.world_size if state.open and state.latest is not None else None
    evaluator_cpu = [view.cpu for view in observed.evaluators if view.cpu is not None]
    ended_at = ending.ended_at if ending is not None else None
    return Status(
        phase=_phase(job, state, reports, observed),
        workers=Members(
            desired=state.target,
            ready=len(state.members) if state.open else 0,
            min=spec.workers.min_replicas,
            max=spec.workers.most,
        ),
        evaluators=Members(desired=spec.evaluation.processes, ready=observed.ready_evaluators),
        world_size=world_size,
        generation=state.number or None,
        progress=_progress(reports, observed),
        loss=_loss(reports, observed),
        throughput=reports.throughput if state.open else None,
        utilization=reports.utilization(sum(evaluator_cpu) if evaluator_cpu else None),
        stragglers=stragglers,
        latest_checkpoint=observed.latest_checkpoint,
        latest_evaluation=observed.latest_evaluation,
        best_checkpoint=observed.best,
        provenance=observed.provenance,
        against_base=list(observed.against_base.compared),
        evaluation_lag_steps=observed.lag_steps,
        evaluated_at=None if observed.evaluated_at is None else rfc3339(observed.evaluated_at),
        start_time=None if started_at is None else rfc3339(started_at),
        completion_time=None if ended_at is None else rfc3339(ended_at),
        message=_message(state, clock, observed) or (reports.pause if state.open else None),
    )


def activity(state: State, reports: Reports, observed: Observed) -> str:
    """The job's activity, one of those of tandem_coordinator.goodput."""
    if state.end is not None or observed.ending is not None:
        return ENDED
    if not state.open:
        return "rendezvous" if state.agents else "idle"
    if reports.finishing or reports.saving:
        return AFTER_LOOP if reports.finishing else FINAL_SAVE
    if reports.stepping:
        return STEPPING
    return SILENT if reports.silent and _are_all_running(state) else "restore"


def _progress(reports: Reports, observed: Observed) -> Progress | None:
    """The progress of training. At its end it is that of the last checkpoint, because ranks are gone before they report
    again."""
    reported, ending = reports.progress(observed.latest_checkpoint), observed.ending
    if ending is None or ending.final is None:
        return reported
    step = ending.final.step
    epoch = (
        reported.epoch * step / reported.step
        if reported is not None and reported.epoch is not None and reported.step
        else None
    )
    total = max(step, ending.total_steps or step)
    percent = 100.0 * step / total if total else 100.0
    return Progress(step=step, total_steps=total, epoch=epoch, percent=percent, remaining_seconds=0.0)


def _loss(reports: Reports, observed: Observed) -> float | None:
    """The loss of the last known step. At the end of training it is that of the log, for the same reason."""
    is_complete = observed.ending is not None and observed.ending.final is not None
    return observed.training.loss if is_complete and observed.training.loss is not None else reports.loss


def _phase(job: DistributedTrainingJob, state: State, reports: Reports, observed: Observed) -> Phase:
    if observed.ending is not None:
        if observed.ending.failed:
            return "Failed"
        waits_for_evaluation = job.spec.evaluation.processes > 0 and not observed.final_is_evaluated
        return "Draining" if waits_for_evaluation and observed.ready_evaluators > 0 else "Succeeded"
    if state.completing is not None:
        return "Succeeded"
    if state.end is not None or state.failing is not None:
        return "Failed"
    if state.open:
        # A built-in task reports its progress as soon as it makes a step, and so does a session. Before the first such
        # report, the kind of a script is unknown: it counts as running when its processes run.
        unknown = job.spec.trainer.command is not None and not reports.of_session
        if reports.stepping or (unknown and _are_all_running(state)):
            return "Running"
        return "Starting" if state.number == state.first else "Restarting"
    if state.number >= state.first and state.cause.reason != "Started":
        return "Restarting"
    return "Starting" if state.agents else "Pending"


def _are_all_running(state: State) -> bool:
    running = {
        name for name, agent in state.agents.items() if not agent.has_stopped and agent.generation == state.number
    }
    return len(running | state.finished) >= len(state.members)


def _stopped_early(observed: Observed) -> bool:
    return observed.ending is not None and observed.ending.reason == Reason.STOPPED_EARLY


def _reason(state: State, observed: Observed) -> str | None:
    """The reason for the job's end, in one word; None while it runs."""
    end = observed.ending or state.end or state.failing
    return None if end is None else end.reason[:MAX_REASON_LENGTH]


def _message(state: State, clock: Instant, observed: Observed) -> str | None:
    if observed.ending is not None:
        return observed.ending.message if observed.ending.failed or _stopped_early(observed) else None
    if state.completing is None and (end := state.end or state.failing) is not None:
        return end.detail
    if state.open and state.blind:
        last_seen = max((agent.last_seen for agent in state.agents.values()), default=clock.steady)
        return f"no agent has sent a heartbeat for {clock.steady - last_seen:.0f} s"
    if state.saving is not None:
        return f"{state.saving.cause.detail}; the group saves first"
    if state.waits_for_bucket:
        cause = f"{state.cause.detail}; " if state.number >= state.first else ""
        return f"{cause}{WAITS_FOR_BUCKET}: {state.bucket_problem}"
    if not state.open and state.number >= state.first:
        wait = state.not_before - clock.steady
        return state.cause.detail + (f"; {RESTART_DELAY_PREFIX}{math.ceil(wait)} s" if wait > 0 else "")
    return None


def _generations(views: Iterable[GenerationView], state: State, clock: Instant) -> list[GenerationView]:
    """The generations, with the progress of the open one; that of the others is known since they were closed."""
    updated = list(views)
    if state.open and updated and updated[-1].generation == state.number:
        updated[-1] = updated[-1].model_copy(update={"progressed": bool(progress_of(state, clock.steady))})
    return updated


def _member(agent: AgentState, clock: Instant, reports: Reports) -> MemberView:
    member = agent.member
    return MemberView(
        replica=member.replica,
        address=member.address,
        node=agent.node or None,
        state="leaving" if agent.is_leaving else "joining" if agent.has_stopped else "running",
        silent_seconds=max(0.0, round(clock.steady - agent.last_seen, 3)),
        ranks=[
            RankView(
                rank=report.rank,
                step=report.step,
                cpu=report.cpu,
                gpu=report.gpu,
                gpu_memory_bytes=report.gpu_memory_bytes,
                busy_seconds=report.busy_seconds,
            )
            for report in reports.of_replica(member.replica)
        ],
    )
