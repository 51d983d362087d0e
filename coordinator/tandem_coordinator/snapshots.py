"""Builds the snapshot of a job from membership, reports and the run directory. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nsmallest

from tandem.formatting import rfc3339
from tandem.job import DistributedTrainingJob
from tandem.reasons import Reason
from tandem.status import (
    AGAIN,
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
from tandem_coordinator.failures import progress
from tandem_coordinator.goodput import OVER, SILENT, STEPPING
from tandem_coordinator.group_state import Agent, State
from tandem_coordinator.progress import Reports
from tandem_coordinator.run_watcher import Observed

MAX_GENERATIONS = 20
"""How many the operator is told of."""
MAX_NAMES = 48 * 2**10
"""Characters of all names of members: those of 1,000 to 2,000."""
MAX_WORDS, MAX_REASON = 200, 64
"""Characters of why a generation was formed, and of why the job has failed."""


@dataclass(frozen=True)
class Instant:
    """One moment on both clocks."""

    wall: float
    """Seconds since the epoch."""
    steady: float
    """Seconds of the monotonic clock that membership lives by."""


def snapshot(
    job: DistributedTrainingJob,
    status: Status,
    state: State,
    clock: Instant,
    reports: Reports,
    observed: Observed,
    generations: Iterable[GenerationView],
    events: Iterable[Event],
    most: int | None = None,
) -> Snapshot:
    """Everything that is known of the job at one moment.

    Args:
        most: how many members to list, those that do not run first; None: all.
    """
    if most is None:
        agents = sorted(state.agents.items())
    else:
        agents = nsmallest(most, state.agents.items(), key=lambda one: (not one[1].waits, len(one[0]), one[0]))
    return Snapshot(
        job=job.metadata.name,
        time=clock.wall,
        status=status,
        members=[_member(agent, clock, reports) for _, agent in agents],
        finished=len(state.finished) if state.rules.ends_with_zero else None,
        reason=_reason(state, observed) if status.phase == "Failed" or _stopped_early(observed) else None,
        generations=_generations(generations, state, clock),
        evaluators=list(observed.evaluators),
        events=list(events),
    )


def brief(whole: Snapshot) -> Snapshot:
    """A snapshot of some 100 KiB at most: the status, and the last generations.

    Each member is named once, in the newest generation that has it: what counts is who was ever in the group.
    """
    views: list[GenerationView] = []
    named: set[str] = set()
    left = MAX_NAMES
    for view in reversed(whole.generations[-MAX_GENERATIONS:]):
        members = []
        for name in view.members:
            if name not in named and len(name) <= left:
                members.append(name)
                named.add(name)
                left -= len(name)
        replicas = len(view.members) if view.replicas is None else view.replicas
        views.append(
            view.model_copy(update={"members": members, "replicas": replicas, "detail": view.detail[:MAX_WORDS]})
        )
    views.reverse()
    return Snapshot(
        job=whole.job,
        time=whole.time,
        status=whole.status,
        finished=whole.finished,
        reason=whole.reason,
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
    """The status of the job at one moment."""
    spec, ending = job.spec, observed.ending
    world_size = state.latest.world_size if state.open and state.latest is not None else None
    evaluator_cpu = [view.cpu for view in observed.evaluators if view.cpu is not None]
    ended_at = ending.at if ending is not None else None
    return Status(
        phase=_phase(job, state, reports, observed),
        workers=Members(
            desired=state.target,
            ready=len(state.inside) if state.open else 0,
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
        against_base=list(observed.against_base.compared),
        evaluation_lag_steps=observed.lag_steps,
        evaluated_at=None if observed.evaluated_at is None else rfc3339(observed.evaluated_at),
        start_time=None if started_at is None else rfc3339(started_at),
        completion_time=None if ended_at is None else rfc3339(ended_at),
        message=_message(state, clock, observed) or (reports.pause if state.open else None),
    )


def about(state: State, reports: Reports, observed: Observed) -> str:
    """What the job spends its time on, in the words of tandem_coordinator.goodput."""
    if state.end is not None or observed.ending is not None:
        return OVER
    if not state.open:
        return "rendezvous" if state.agents else "idle"
    if reports.stepping:
        return STEPPING
    return SILENT if reports.silent and _all_run(state) else "restore"


def _progress(reports: Reports, observed: Observed) -> Progress | None:
    """How far training is; at its end as far as the last checkpoint: ranks are gone before they are heard again."""
    told, ending = reports.progress(observed.latest_checkpoint), observed.ending
    if ending is None or ending.final is None:
        return told
    step = ending.final.step
    epoch = told.epoch * step / told.step if told is not None and told.epoch is not None and told.step else None
    total = max(step, ending.total_steps or step)
    percent = 100.0 * step / total if total else 100.0
    return Progress(step=step, total_steps=total, epoch=epoch, percent=percent, remaining_seconds=0.0)


def _loss(reports: Reports, observed: Observed) -> float | None:
    """Of the last step that is known; at the end of training as its log says, for the same reason."""
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
        # A built-in task says how far it is as soon as it makes a step, and so does a session. Before that was heard
        # once, nobody knows what a script is: it runs when its processes do, and goes on to, whatever it says.
        unknown = job.spec.trainer.command is not None and not reports.of_session
        if reports.stepping or (unknown and _all_run(state)):
            return "Running"
        return "Starting" if state.number == state.first else "Restarting"
    if state.number >= state.first and state.cause.reason != "Started":
        return "Restarting"
    return "Starting" if state.agents else "Pending"


def _all_run(state: State) -> bool:
    running = {name for name, one in state.agents.items() if not one.waits and one.generation == state.number}
    return len(running | state.finished) >= len(state.inside)


def _stopped_early(observed: Observed) -> bool:
    return observed.ending is not None and observed.ending.reason == Reason.STOPPED_EARLY


def _reason(state: State, observed: Observed) -> str | None:
    """Why the job has ended as it has, in one word."""
    end = observed.ending or state.end or state.failing
    return None if end is None else end.reason[:MAX_REASON]


def _message(state: State, clock: Instant, observed: Observed) -> str | None:
    if observed.ending is not None:
        return observed.ending.message if observed.ending.failed or _stopped_early(observed) else None
    if state.completing is None and (end := state.end or state.failing) is not None:
        return end.detail
    if state.open and state.blind:
        heard = max((agent.heard for agent in state.agents.values()), default=clock.steady)
        return f"no agent was heard of for {clock.steady - heard:.0f} s"
    if state.saving is not None:
        return f"{state.saving.cause.detail}; the group saves first"
    if not state.open and state.number >= state.first:
        wait = state.not_before - clock.steady
        return state.cause.detail + (f"; {AGAIN}{math.ceil(wait)} s" if wait > 0 else "")
    return None


def _generations(views: Iterable[GenerationView], state: State, clock: Instant) -> list[GenerationView]:
    """The open one with how far it has got; of the others that is known since they were closed."""
    known = list(views)
    if state.open and known and known[-1].generation == state.number:
        known[-1] = known[-1].model_copy(update={"progressed": bool(progress(state, clock.steady))})
    return known


def _member(agent: Agent, clock: Instant, reports: Reports) -> MemberView:
    member = agent.member
    return MemberView(
        replica=member.replica,
        address=member.address,
        node=agent.node or None,
        state="leaving" if agent.leaves else "joining" if agent.waits else "running",
        silent_seconds=max(0.0, round(clock.steady - agent.heard, 3)),
        ranks=[
            RankView(
                rank=report.rank,
                step=report.step,
                cpu=report.cpu,
                gpu=report.gpu,
                gpu_memory_bytes=report.gpu_memory_bytes,
                busy_seconds=report.busy_seconds,
            )
            for report in reports.of(member.replica)
        ],
    )
