"""A job on a cluster as lines of text: the same on a terminal, in a pipe, and without colours. Pure.

Nothing here is written for the width of a screen alone: where there is none, each row is one line, for grep and awk.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from tandem import against_base, formatting
from tandem.formatting import elapsed, metric_name, number, seconds, several
from tandem.ledger import amounts, in_words
from tandem.status import KSTATUS, Members, Phase, Score, Status, phase_word, told
from tandem_cli.checkpoints.listing import Column, listing, paragraph, plain, table
from tandem_cli.view import JobEvent, JobSummary, JobView, Pod, State

LATELY = 8
"""Events that are shown with the rest: the job's own, and warnings. `tandem events` has all of them."""
WIDEST_BAR = 60
INDENT = "  "
NEVER_TAKEN_UP_SECONDS = 15.0
"""An operator that is there writes a status within a second or two."""

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
    found: Sequence[JobSummary], width: int | None, now: float, with_namespace: bool, place: str = "NAMESPACE"
) -> list[Text]:
    """All jobs, a line for each.

    Args:
        place: heading of what they are in.
    """
    has_cost = any(_cost(job.status) for job in found)
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
    rows = [_row(job, now, with_namespace, has_cost) for job in found]
    if with_namespace and width is not None:
        rows = [[(formatting.end_of(row[0][0], width // 2), row[0][1]), *row[1:]] for row in rows]
    return listing(columns, rows, width)


def job_lines(view: JobView, width: int | None, now: float) -> list[Text]:
    """Everything about one job."""
    job, status = view.job, view.job.status
    lines = [_title(job, now)]
    if message := message_of(job, now):
        lines += paragraph("", message, width, indent=0, style="red" if status.phase == "Failed" else "")
    lines += _progress(status, width)
    facts = [line for label, text in _facts(status, job.missed) for line in paragraph(label, text, width)]
    for part in (facts, _conditions(status, width, now), _pods(view.pods, width, now)):
        lines += [Text(), *part] if part else []
    if telling := [one for one in view.job_events if one.warning or not one.who]:
        lines += [Text(), *happened(telling[-LATELY:], width)]
    return lines


def happened(some: Sequence[JobEvent], width: int | None, heading: bool = True) -> list[Text]:
    """What happened, a row for each, the newest last."""
    columns = [Column("TIME"), Column(""), Column("WHO", rank=1), Column("WHAT")]
    lines = table(columns, [event_row(one) for one in some], width)
    return lines if heading else lines[1:]


def event_row(one: JobEvent) -> list[tuple[str, str]]:
    """Time, sign, whom it happened to, and what."""
    again = f", {several(one.count, 'time')} since {clock(one.first)}" if one.count > 1 else ""
    mark, style = ("!", "yellow") if one.warning else ("", "")
    return [
        (clock(one.at), "dim"),
        (mark, style),
        (one.who or "job", "" if one.who else "bold"),
        (f"{one.text} ({one.reason}{again})" if one.reason else f"{one.text}{again}", style),
    ]


def message_of(job: JobSummary, now: float) -> str:
    """What a person has to know first; empty if all is well."""
    if job.leaving:
        return "it is being deleted"
    if not job.taken_up and now - job.made > NEVER_TAKEN_UP_SECONDS:
        return "no operator has handled it: is one running, and does it manage this namespace?"
    return job.status.message or ""


def clock(at: float) -> str:
    """A time of the day here, with the day where it is not today's."""
    then, today = time.localtime(at), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%b %d %H:%M:%S", then)


def _title(job: JobSummary, now: float) -> Text:
    status = job.status
    began, ended = seconds(status.start_time), seconds(status.completion_time)
    words = [f"in {job.namespace}", f"made {elapsed(now - job.made)} ago"]
    if began is not None and ended is not None:
        # While what is left is evaluated, the job goes on.
        words.append(f"{'trained' if status.phase == 'Draining' else 'took'} {elapsed(ended - began)}")
    return Text.assemble(
        (job.name, "bold"),
        "  ",
        (phase_word(status.phase, status.message), PHASE_STYLES[status.phase]),
        (f"  {' · '.join(words)}", "dim"),
    )


def _progress(status: Status, width: int | None) -> list[Text]:
    progress = status.progress
    if progress is None:
        return []
    words = [f"step {number(progress.step)}" + (f" of {number(progress.total_steps)}" if progress.total_steps else "")]
    words += [f"epoch {progress.epoch:.1f}"] if progress.epoch is not None else []
    if progress.remaining_seconds is not None and status.phase == "Running":
        words.append(f"about {elapsed(progress.remaining_seconds)} left")
    lines = [Text(INDENT + " · ".join(words))]
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
                f" {formatting.done(progress.step, progress.total_steps)}",
            ),
        )
    return lines


def _facts(status: Status, missed: Sequence[str]) -> Iterator[tuple[str, str]]:
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
    for name, spent, written in amounts(status.ledger):
        yield name, in_words(spent, written)
    for one in told(status.troubles):
        yield "trouble", one.text
    for sentence in missed:
        yield "missed", sentence
    if status.latest_checkpoint is not None:
        yield "checkpoint", f"{status.latest_checkpoint.name} (generation {status.latest_checkpoint.generation})"
    if status.latest_evaluation is not None:
        yield "evaluated", _score(status.latest_evaluation)
    if status.best_checkpoint is not None:
        yield "best", _score(status.best_checkpoint)
    if status.against_base:
        yield "base model", against_base.told(status.against_base)


def _workers(status: Status, workers: Members) -> Iterator[str]:
    bounds = f" ({workers.min} to {workers.max})" if workers.min is not None and workers.max is not None else ""
    yield f"{workers.ready} of {workers.desired}{bounds}"
    if status.world_size is not None:
        yield f"world size {status.world_size}"
    if status.generation is not None:
        yield f"generation {status.generation}"
    yield several(status.restarts, "restart")


def _evaluators(status: Status, evaluators: Members) -> Iterator[str]:
    yield f"{evaluators.ready} of {evaluators.desired}"
    if (lag := status.evaluation_lag_steps) is not None:
        yield "up to date" if lag <= 0 else f"{several(lag, 'step')} behind"


def _processors(status: Status) -> Iterator[tuple[str, str]]:
    use = status.utilization
    assert use is not None
    busy = [("trainers", use.trainer_cpu), ("evaluators", use.evaluator_cpu)]
    shown = [f"{who} {formatting.cores(cores)}" for who, cores in busy if cores is not None]
    if use.gpu is not None:
        memory = f" · {formatting.size(use.gpu_memory_bytes)}" if use.gpu_memory_bytes is not None else ""
        shown.append(f"GPU {formatting.share(use.gpu)}{memory}")
    if shown:
        yield "busy", " · ".join(shown)


def _score(score: Score) -> str:
    return f"{score.name} · {metric_name(score.metric)} {formatting.score(score.metric, score.value)}"


def _conditions(status: Status, width: int | None, now: float) -> list[Text]:
    columns = [
        Column("CONDITION"),
        Column(""),
        Column("FOR", is_right=True),
        Column("REASON", rank=1),
        Column("MESSAGE"),
    ]
    rows = []
    for one in (one for one in status.conditions if one.type not in KSTATUS):
        style = "" if one.status == "True" else "dim"
        rows.append(
            [
                (one.type, style),
                ({"True": "yes", "False": "no"}.get(one.status, "unknown"), style),
                (_age(one.last_transition_time, now), "dim"),
                (one.reason, style),
                (one.message, style),
            ]
        )
    return table(columns, rows, width) if rows else []


def _pods(found: Sequence[Pod], width: int | None, now: float) -> list[Text]:
    if found and not any(pod.pod for pod in found):
        # Processes of this machine, or of nodes that share its disk.
        has_nodes = any(pod.node for pod in found)
        here = [
            [
                (pod.name, ""),
                (pod.state, _STATE_STYLES[pod.state]),
                *([(pod.node, "")] if has_nodes else []),
                (pod.busy, ""),
            ]
            for pod in found
        ]
        node = [Column("NODE", rank=1)] if has_nodes else []
        return table([Column("PROCESS"), Column("STATE"), *node, Column("BUSY")], here, width)
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
        for pod in found
    ]
    return table(columns, rows, width) if rows else []


def _cost(status: Status) -> str:
    return next((written(spent.total) for name, spent, written in amounts(status.ledger) if name == "cost"), "")


def _row(job: JobSummary, now: float, with_namespace: bool, has_cost: bool) -> list[tuple[str, str]]:
    status, progress = job.status, job.status.progress
    left = progress.remaining_seconds if progress is not None and status.phase == "Running" else None
    share = formatting.done(progress.step, progress.total_steps) if progress and progress.total_steps else ""
    return [
        *([(job.namespace, "dim")] if with_namespace else []),
        (job.name, "bold"),
        (phase_word(status.phase, status.message) if job.taken_up else "", PHASE_STYLES[status.phase]),
        (status.workers.summary if status.workers else "", ""),
        (number(progress.step) if progress else "", ""),
        (share, ""),
        ("" if left is None else elapsed(left), ""),
        ("" if status.loss is None else number(status.loss), ""),
        ("" if (best := status.best_checkpoint) is None else formatting.score(best.metric, best.value), ""),
        *([(_cost(status), "")] if has_cost else []),
        (elapsed(now - job.made), "dim"),
        ("" if status.phase == "Succeeded" else plain(message_of(job, now)), ""),
    ]


def _age(text: str | None, now: float) -> str:
    at = seconds(text)
    return "" if at is None else elapsed(now - at)


def job_record(job: JobSummary) -> dict[str, Any]:
    """A job."""
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
    """A job with its pods and events. Times are seconds since the epoch."""
    return {
        **job_record(view.job),
        "pods": [pod_record(pod) for pod in view.pods],
        "events": [event_record(one) for one in view.job_events],
    }


def pod_record(pod: Pod) -> dict[str, Any]:
    """A pod."""
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


def event_record(one: JobEvent) -> dict[str, Any]:
    """An event."""
    return {
        "at": one.at,
        "first": one.first,
        "count": one.count,
        "who": one.who or "job",
        "reason": one.reason,
        "text": one.text,
        "warning": one.warning,
    }
