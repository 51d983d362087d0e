"""A job as lines of text: the same on a terminal, in a pipe, and without colours. Pure.

Nothing here depends on a screen's width alone: without one, each row is one line, for grep and awk.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from tandem import formatting
from tandem.formatting import count_noun, duration, elapsed, metric_name, number, parse_rfc3339
from tandem.rundir import against_base
from tandem.wire.ledger import format_bucket, format_usage, ledger_rows
from tandem.wire.queue_view import queue_lines
from tandem.wire.status import KSTATUS, Members, Phase, Score, Status, phase_word, trouble_messages
from tandem.wire.wall_time import format_wall_time
from tandem_cli.checkpoints.listing import Column, listing, paragraph, plain, table
from tandem_cli.view import JobEvent, JobSummary, JobView, PodView, State

LATELY = 8
"""Events that `tandem status` shows: the job's own, and warnings. `tandem events` shows all."""
START_WARNINGS = {"FailedScheduling", "FailedMount", "FailedAttachVolume", "Unhealthy"}
"""Reasons of warnings at most starts: a volume is still being made, a probe comes before the first answer. They are
over once their pod runs."""
WIDEST_BAR = 60
"""Maximum width of the bar, in columns."""
INDENT = "  "
NEVER_TAKEN_UP_SECONDS = 15.0
"""Age above which a job without a status has no operator: a running one writes a status within two seconds."""

PHASE_STYLES: dict[Phase, str] = {
    "Pending": "cyan",
    "Starting": "cyan",
    "Running": "green",
    "Restarting": "yellow",
    "Draining": "cyan",
    "Suspended": "yellow",
    "Succeeded": "green",
    "Failed": "red",
}
_STATE_STYLES: dict[State, str] = {
    "waiting": "yellow",
    "starting": "cyan",
    "running": "green",
    "not ready": "yellow",
    "leaving": "yellow",
    "done": "dim",
    "failed": "red",
}


def jobs(
    summaries: Sequence[JobSummary], width: int | None, now: float, with_namespace: bool, place: str = "NAMESPACE"
) -> list[Text]:
    """Lay out all jobs, a line for each.

    Args:
        place: heading of the column of namespaces.
    """
    has_cost = any(_cost(job.status) for job in summaries)
    columns = [
        *([Column(place)] if with_namespace else []),
        Column("NAME"),
        Column("PHASE"),
        Column("WORKERS", is_right=True, rank=7),
        Column("STEP", is_right=True, rank=1),
        Column("DONE", is_right=True, rank=5),
        Column("LEFT", is_right=True, rank=6),
        Column("LOSS", is_right=True, rank=4),
        Column("BEST", is_right=True, rank=2),
        *([Column("COST", is_right=True, rank=4)] if has_cost else []),
        Column("AGE", is_right=True, rank=1),
        Column("MESSAGE", rank=3),
    ]
    rows = [_row(job, now, with_namespace, has_cost) for job in summaries]
    if with_namespace and width is not None:
        rows = [[(formatting.truncate_start(row[0][0], width // 2), row[0][1]), *row[1:]] for row in rows]
    return listing(columns, rows, width)


def job_lines(view: JobView, width: int | None, now: float) -> list[Text]:
    """Lay out everything about one job."""
    job, status = view.job, view.job.status
    lines = [_title(job, now)]
    if message := message_of(job, now):
        lines += paragraph("", message, width, indent=0, style="red" if status.phase == "Failed" else "")
    lines += _progress(status, width)
    facts = [line for label, text in _facts(status, job.missed) for line in paragraph(label, text, width)]
    for part in (facts, _conditions(status, width, now), _pods(view.pods, width, now)):
        lines += [Text(), *part] if part else []
    running = {pod.name for pod in view.pods if pod.state == "running"}
    stale = [event for event in view.job_events if event.reason in START_WARNINGS and event.who in running]
    if telling := [event for event in view.job_events if (event.warning or not event.who) and event not in stale]:
        lines += [Text(), *happened(telling[-LATELY:], width)]
    return lines


def happened(events: Sequence[JobEvent], width: int | None, heading: bool = True) -> list[Text]:
    """Lay out events, a row for each, the newest last."""
    columns = [Column("TIME"), Column(""), Column("WHO", rank=1), Column("WHAT")]
    lines = table(columns, [event_row(event) for event in events], width)
    return lines if heading else lines[1:]


def event_row(event: JobEvent) -> list[tuple[str, str]]:
    """Time, sign, subject and text of an event."""
    repetition = f", {count_noun(event.count, 'time')} since {clock(event.first)}" if event.count > 1 else ""
    mark, style = ("!", "yellow") if event.warning else ("", "")
    return [
        (clock(event.at), "dim"),
        (mark, style),
        (event.who or "job", "" if event.who else "bold"),
        (f"{event.text} ({event.reason}{repetition})" if event.reason else f"{event.text}{repetition}", style),
    ]


def message_of(job: JobSummary, now: float) -> str:
    """The most important message about a job; empty if all is well."""
    if job.leaving:
        return "it is being deleted"
    if not job.taken_up and now - job.made > NEVER_TAKEN_UP_SECONDS:
        return "no operator has handled it: is one running, and does it manage this namespace?"
    return job.status.message or ""


def clock(timestamp: float) -> str:
    """Format a time of day in the local time zone, with the day if it is not today."""
    then, today = time.localtime(timestamp), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%b %d %H:%M:%S", then)


def _title(job: JobSummary, now: float) -> Text:
    status = job.status
    started, ended = parse_rfc3339(status.start_time), parse_rfc3339(status.completion_time)
    parts = [f"in {job.namespace}", f"made {elapsed(now - job.made)} ago"]
    if started is not None and ended is not None:
        # The job is not over while the remaining checkpoints are evaluated.
        parts.append(f"{'trained' if status.phase == 'Draining' else 'took'} {elapsed(ended - started)}")
    return Text.assemble(
        (job.name, "bold"),
        "  ",
        (phase_word(status.phase, status.message), PHASE_STYLES[status.phase]),
        (f"  {' · '.join(parts)}", "dim"),
    )


def _progress(status: Status, width: int | None) -> list[Text]:
    progress = status.progress
    if progress is None:
        return []
    parts = [f"step {number(progress.step)}" + (f" of {number(progress.total_steps)}" if progress.total_steps else "")]
    parts += [f"epoch {progress.epoch:.1f}"] if progress.epoch is not None else []
    if progress.remaining_seconds is not None and status.phase == "Running":
        parts.append(f"about {elapsed(progress.remaining_seconds)} left")
    lines = [Text(INDENT + " · ".join(parts))]
    if progress.total_steps:
        share = min(1.0, progress.step / progress.total_steps)
        cells = min(WIDEST_BAR, (width or WIDEST_BAR + 8) - 8)
        full = round(share * cells)
        lines.insert(
            0,
            Text.assemble(
                INDENT,
                ("━" * full, "cyan"),
                ("─" * (cells - full), "bright_black"),
                f" {formatting.percent_done(progress.step, progress.total_steps)}",
            ),
        )
    return lines


def _facts(status: Status, missed: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from queue_lines(status.queue)
    if status.loss is not None:
        yield "loss", number(status.loss)
    if status.throughput is not None:
        yield "throughput", f"{number(status.throughput)} samples/s"
    if status.workers is not None:
        yield "workers", " · ".join(_workers(status, status.workers))
    if status.evaluators is not None and status.evaluators.desired:
        yield "evaluators", " · ".join(_evaluators(status, status.evaluators))
    for slow in status.stragglers:
        yield "slow", f"rank {slow.rank} of {slow.replica} takes {slow.ratio:.1f} times as long as the others"
    if status.utilization is not None:
        yield from _processors(status)
    if status.ledger is not None and (wall_time := format_wall_time(status.ledger.wall)) is not None:
        yield "ETTR", wall_time
    wall = None if status.ledger is None else status.ledger.wall
    if wall is not None and wall.interval_seconds is not None:
        yield "saves", f"every {duration(wall.interval_seconds)} (checkpoint.every: Auto)"
    if wall is not None and wall.mirror_seconds is not None:
        yield "mirrors", f"every {duration(wall.mirror_seconds)}, newest after step {wall.mirror_step or 0:,}"
    for name, hours, written in ledger_rows(status.ledger):
        yield name, format_usage(hours, written)
    if status.ledger is not None and status.ledger.bucket is not None:
        yield "bucket", format_bucket(status.ledger.bucket)
    for trouble in trouble_messages(status.troubles):
        yield "trouble", trouble.text
    if wall is not None and wall.advice is not None:
        yield "advice", wall.advice
    for sentence in missed:
        yield "missed", sentence
    if status.latest_checkpoint is not None:
        yield "checkpoint", f"{status.latest_checkpoint.name} (generation {status.latest_checkpoint.generation})"
    if status.latest_evaluation is not None:
        yield "evaluated", _score(status.latest_evaluation)
    if status.best_checkpoint is not None:
        yield "best", _score(status.best_checkpoint)
    if status.against_base:
        yield "base model", against_base.format_comparisons(status.against_base)


def _workers(status: Status, workers: Members) -> Iterator[str]:
    bounds = f" ({workers.min} to {workers.max})" if workers.min is not None and workers.max is not None else ""
    yield f"{workers.ready} of {workers.desired}{bounds}"
    if status.world_size is not None:
        yield f"world size {status.world_size}"
    if status.generation is not None:
        yield f"generation {status.generation}"
    yield count_noun(status.restarts, "restart")


def _evaluators(status: Status, evaluators: Members) -> Iterator[str]:
    yield f"{evaluators.ready} of {evaluators.desired}"
    if (lag := status.evaluation_lag_steps) is not None:
        yield "up to date" if lag <= 0 else f"{count_noun(lag, 'step')} behind"


def _processors(status: Status) -> Iterator[tuple[str, str]]:
    use = status.utilization
    assert use is not None
    busy = [("trainers", use.trainer_cpu), ("evaluators", use.evaluator_cpu)]
    parts = [f"{name} {formatting.cores(cores)}" for name, cores in busy if cores is not None]
    if use.gpu is not None:
        memory = f" · {formatting.size(use.gpu_memory_bytes)}" if use.gpu_memory_bytes is not None else ""
        parts.append(f"GPU {formatting.share(use.gpu)}{memory}")
    if parts:
        yield "busy", " · ".join(parts)


def _score(score: Score) -> str:
    value = formatting.score(score.metric, score.value)
    certainty = formatting.confidence(score.metric, (score.low, score.high), score.tied)
    return f"{score.name} · {metric_name(score.metric)} {value}{certainty}"


def _conditions(status: Status, width: int | None, now: float) -> list[Text]:
    columns = [
        Column("CONDITION"),
        Column(""),
        Column("FOR", is_right=True),
        Column("REASON", rank=1),
        Column("MESSAGE"),
    ]
    rows = []
    for condition in (condition for condition in status.conditions if condition.type not in KSTATUS):
        style = "" if condition.status == "True" else "dim"
        rows.append(
            [
                (condition.type, style),
                ({"True": "yes", "False": "no"}.get(condition.status, "unknown"), style),
                (_age(condition.last_transition_time, now), "dim"),
                (condition.reason, style),
                (condition.message, style),
            ]
        )
    return table(columns, rows, width) if rows else []


def _pods(pods: Sequence[PodView], width: int | None, now: float) -> list[Text]:
    if pods and not any(pod.pod for pod in pods):
        # Processes of this machine, or of nodes that share its disk.
        has_nodes = any(pod.node for pod in pods)
        process_rows = [
            [
                (pod.name, ""),
                (pod.state, _STATE_STYLES[pod.state]),
                *([(pod.node, "")] if has_nodes else []),
                (pod.busy, ""),
            ]
            for pod in pods
        ]
        node = [Column("NODE", rank=1)] if has_nodes else []
        return table([Column("PROCESS"), Column("STATE"), *node, Column("BUSY")], process_rows, width)
    columns = [
        Column("POD"),
        Column("STATE"),
        Column("FOR", is_right=True),
        Column("RESTARTS", is_right=True, rank=3),
        Column("NODE", rank=1),
        Column("NAME", rank=2),
        Column("WHY"),
    ]
    rows = [
        [
            (pod.name, ""),
            (pod.state, _STATE_STYLES[pod.state]),
            ("" if pod.since is None else elapsed(now - pod.since), "dim"),
            (str(pod.restarts), ""),
            (pod.node, ""),
            (pod.pod, "dim"),
            (pod.why, "red" if pod.state == "failed" else ""),
        ]
        for pod in pods
    ]
    return table(columns, rows, width) if rows else []


def _cost(status: Status) -> str:
    return next((written(hours.total) for name, hours, written in ledger_rows(status.ledger) if name == "cost"), "")


def _row(job: JobSummary, now: float, with_namespace: bool, has_cost: bool) -> list[tuple[str, str]]:
    status, progress = job.status, job.status.progress
    remaining = progress.remaining_seconds if progress is not None and status.phase == "Running" else None
    share = formatting.percent_done(progress.step, progress.total_steps) if progress and progress.total_steps else ""
    return [
        *([(job.namespace, "dim")] if with_namespace else []),
        (job.name, "bold"),
        (phase_word(status.phase, status.message) if job.taken_up else "", PHASE_STYLES[status.phase]),
        (status.workers.summary if status.workers else "", ""),
        (number(progress.step) if progress else "", ""),
        (share, ""),
        ("" if remaining is None else elapsed(remaining), ""),
        ("" if status.loss is None else number(status.loss), ""),
        ("" if (best := status.best_checkpoint) is None else formatting.score(best.metric, best.value), ""),
        *([(_cost(status), "")] if has_cost else []),
        (elapsed(now - job.made), "dim"),
        ("" if status.phase == "Succeeded" else plain(message_of(job, now)), ""),
    ]


def _age(text: str | None, now: float) -> str:
    timestamp = parse_rfc3339(text)
    return "" if timestamp is None else elapsed(now - timestamp)


def job_record(job: JobSummary) -> dict[str, Any]:
    """A job as JSON."""
    return {
        "name": job.name,
        "namespace": job.namespace,
        "uid": job.uid,
        "madeAt": job.made,
        "takenUp": job.taken_up,
        "leaving": job.leaving,
        "status": job.status.dump(),
        **({"missed": list(job.missed)} if job.missed else {}),
    }


def view_record(view: JobView) -> dict[str, Any]:
    """A job with its pods and events as JSON. Times are in seconds since the epoch."""
    return {
        **job_record(view.job),
        "pods": [pod_record(pod) for pod in view.pods],
        "events": [event_record(event) for event in view.job_events],
    }


def pod_record(pod: PodView) -> dict[str, Any]:
    """A pod as JSON."""
    return {
        "name": pod.name,
        "pod": pod.pod,
        "role": pod.role,
        "index": pod.index,
        "node": pod.node,
        "state": pod.state,
        "why": pod.why,
        "restarts": pod.restarts,
        "since": pod.since,
    }


def event_record(event: JobEvent) -> dict[str, Any]:
    """An event as JSON."""
    return {
        "at": event.at,
        "first": event.first,
        "count": event.count,
        "who": event.who or "job",
        "reason": event.reason,
        "text": event.text,
        "warning": event.warning,
    }
