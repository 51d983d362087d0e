"""A view of a local run in the form of a cluster job, so that both are displayed alike.

While the run is running, the view comes from its coordinator; afterwards, or if that does not answer, from its files.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.formatting import cores, rfc3339, share
from tandem.rundir import evaluations
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.layout import RunDir, stopped_early
from tandem.rundir.ledger import ledger_of, newest_ledger
from tandem.rundir.log import LogReader
from tandem.rundir.ownership import ENDPOINT
from tandem.rundir.records import COORDINATOR, EventRecord, Sample
from tandem.wire.coordinator_client import CoordinatorClient, CoordinatorRefused, Unreachable
from tandem.wire.ledger import Ledger
from tandem.wire.status import CheckpointRef, Event, MemberView, Progress, RankView, Score, Snapshot, Status, Troubles
from tandem_cli.local.known import is_alive, job_name, own_command
from tandem_cli.slurm import jobs
from tandem_cli.slurm.scheduler import SlurmError
from tandem_cli.terminal.summary import missed as missed_steps
from tandem_cli.terminal.summary import result
from tandem_cli.view import JobEvent, JobSummary, JobView, PodView, State

REQUEST_SECONDS = 2.0
"""Timeout of a request to the coordinator, in seconds."""
MAX_LOG_DELAY_SECONDS = 1.0
"""Longest delay between an event of the coordinator and its line in the log."""
_STATES: dict[str, State] = {"joining": "starting", "running": "running", "leaving": "leaving"}


def job_view(path: Path) -> JobView:
    """Fetch everything about a run."""
    snapshot = _snapshot(path) if is_alive(path) else None
    job = replace(_job(path, snapshot), missed=_warnings(path) if snapshot is None else ())
    return JobView(job=job, pods=processes(snapshot) if snapshot is not None else (), job_events=job_events(path))


def _warnings(path: Path) -> tuple[str, ...]:
    with suppress(OSError, ValueError):
        return tuple(missed_steps(RunDir(path)))
    return ()


def job_summary(path: Path) -> JobSummary:
    """Fetch a run without its processes and events."""
    return _job(path, _snapshot(path) if is_alive(path) else None)


def endpoint(path: Path) -> tuple[str, str] | None:
    """Return the coordinator's `host:port` and its token; None if there is none, or it is another user's."""
    content: Any = read_json_or_none(path / ENDPOINT)
    if not isinstance(content, dict) or not {"url", "token"} <= content.keys():
        return None
    return str(content["url"]).removeprefix("http://"), str(content["token"])


def job_events(path: Path) -> tuple[JobEvent, ...]:
    """Return the coordinator's events of a run, oldest first; consecutive repetitions count as one event."""
    events: list[JobEvent] = []
    for record in _coordinator_records(RunDir(path).coordinator_log):
        time, text = record.time, " ".join((record.text or "").split())
        first, count = time, 1
        if events and events[-1].text == text:
            last = events.pop()
            first, count = last.first, last.count + 1
        warning = record.level != "info"
        events.append(JobEvent(at=time, first=first, who="", reason="", text=text, count=count, warning=warning))
    return tuple(events)


def unseen_events(path: Path, snapshot: Sequence[Event], since: float) -> list[Event]:
    """Return the logged events after the newest event of a snapshot: the coordinator may end before the next poll.

    Args:
        snapshot: events of the last snapshot.
        since: earliest time if the snapshot has no events, in seconds since the epoch.
    """
    since = max((event.at for event in snapshot), default=since)
    unseen = []
    for record in _coordinator_records(RunDir(path).coordinator_log):
        if record.time < since:
            continue
        kind = record.level if record.level in ("warning", "error") else "info"
        event = Event.parse({"at": record.time, "kind": kind, "text": record.text or ""})
        if not any(
            earlier.text == event.text and event.at < earlier.at + MAX_LOG_DELAY_SECONDS for earlier in snapshot
        ):
            unseen.append(event)
    return unseen


def _snapshot(path: Path) -> Snapshot | None:
    address = endpoint(path)
    if address is None:
        return None
    with (
        suppress(Unreachable, CoordinatorRefused, ValueError),
        CoordinatorClient(*address, timeout=REQUEST_SECONDS) as client,
    ):
        return client.status()
    return None


def _job(path: Path, snapshot: Snapshot | None) -> JobSummary:
    alive = snapshot is not None or is_alive(path)
    return JobSummary(
        name=(snapshot.job if snapshot else "") or job_name(path) or path.resolve().name,
        namespace=str(path),
        uid="",
        made=_created_at(path),
        status=_with_shortages(path, snapshot.status)
        if snapshot is not None
        else _with_slurm(path, _read_status(path, alive)),
        taken_up=True,
        leaving=False,
    )


def _with_slurm(path: Path, status: Status) -> Status:
    """Add what SLURM reports about a run whose coordinator does not answer."""
    saved = status.latest_checkpoint
    if status.phase == "Suspended" and (reason := jobs.refusal(path)):
        effect = f"continues after step {saved.step:,}" if saved else "tries again"
        return status.model_copy(
            update={"message": f"it was not submitted: {reason}; the same `tandem submit --slurm` {effect}"}
        )
    try:
        phase, message = jobs.describe_state(path)
    except SlurmError as error:
        phase, message = status.phase, str(error)
    if not message or status.phase in ("Succeeded", "Failed"):
        return status
    if phase == "Ended":
        effect = f"continues after step {saved.step:,}" if saved else "starts over"
        message = f"{message}; the same `tandem submit --slurm` {effect}"
        return status.model_copy(update={"phase": "Suspended", "message": message})
    changed = {"message": message, **({"phase": "Pending"} if phase == "Pending" else {})}
    return status.model_copy(update=changed)


def _with_shortages(path: Path, status: Status) -> Status:
    """Add the nodes and processes that a running training lacks on SLURM."""
    try:
        shortages = jobs.shortages(path)
    except SlurmError:
        shortages = ""
    if not shortages:
        return status
    return status.model_copy(update={"message": f"{status.message}; {shortages}" if status.message else shortages})


def _created_at(path: Path) -> float:
    for name in ("log", "job.json"):
        with suppress(OSError):
            folder = path / name
            files = [folder, *(folder.iterdir() if folder.is_dir() else [])]
            return min(file.stat().st_mtime for file in files)
    return 0.0


def final_status(path: Path) -> Status:
    """Read the status of a run that is over from its files."""
    return _read_status(path, alive=False)


def _read_status(path: Path, alive: bool) -> Status:
    rundir = RunDir(path)
    with suppress(OSError, ValueError):
        saved, records = rundir.committed(), rundir.generation_records()
        done, failed, outcome = rundir.done(), rundir.failed(), result(rundir)
        newest = saved[0].reference if saved else None
        ended_at = (done or failed or {}).get("at")
        return Status(
            phase="Succeeded" if done else "Failed" if failed else "Starting" if alive else "Suspended",
            message=_message(done, failed, alive, newest, own_command(path)),
            generation=records[-1].generation if records else None,
            restarts=outcome.restarts,
            progress=_progress(outcome.made, outcome.total) if outcome.made else None,
            loss=outcome.loss,
            latest_checkpoint=newest,
            best_checkpoint=_best(rundir),
            against_base=outcome.against_base,
            troubles=outcome.troubles if outcome.troubles != Troubles() else None,
            ledger=_ledger(rundir),
            start_time=rfc3339(records[0].started_at) if records else None,
            completion_time=rfc3339(ended_at) if isinstance(ended_at, int | float) else None,
        )
    return Status(phase="Pending", message="the files of the run cannot be read")


def _ledger(rundir: RunDir) -> Ledger | None:
    return ledger_of(rundir, newest_ledger(rundir))


def _message(done: Any, failed: Any, alive: bool, newest: CheckpointRef | None, own_command: bool) -> str | None:
    if failed:
        return str(failed.get("message") or failed.get("reason") or "") or None
    if done or alive:
        return stopped_early(done) or None
    if own_command and newest is None:
        effect = "starts the script again, which finds the checkpoints that it saved itself"
    else:
        effect = f"continues after step {newest.step:,}" if newest else "starts over: nothing was saved"
    return f"not running; the same `tandem run` {effect}"


def _progress(step: int, total: int | None) -> Progress:
    return Progress(step=step, total_steps=total, percent=min(100.0, 100.0 * step / total) if total else None)


def _best(rundir: RunDir) -> Score | None:
    best = evaluations.best(rundir)
    if best is None or best.step is None or best.metric is None or best.value is None:
        return None
    return Score(
        name=best.name,
        step=best.step,
        metric=best.metric,
        value=best.value,
        low=best.low,
        high=best.high,
        tied=best.tied,
    )


def _coordinator_records(path: Path) -> Iterator[EventRecord]:
    with suppress(OSError):
        yield from (record for record in LogReader(path, COORDINATOR, skip=Sample) if isinstance(record, EventRecord))


def processes(snapshot: Snapshot) -> tuple[PodView, ...]:
    """Return the processes in a snapshot of the coordinator."""
    pods = [_process("coordinator", "coordinator", 0, "running")]
    pods += [_member(member, index) for index, member in enumerate(snapshot.members)]
    for index, evaluator in enumerate(snapshot.evaluators):
        pods.append(_process(evaluator.name, "evaluator", index, "running"))
    return tuple(pods)


def _member(member: MemberView, index: int) -> PodView:
    return _process(
        member.replica, "worker", index, _STATES[member.state], node=member.node or "", busy=_busy(member.ranks)
    )


def _busy(ranks: Sequence[RankView]) -> str:
    """Describe the CPU and GPU use of a worker's ranks; empty if it is unknown."""
    cpu = [rank.cpu for rank in ranks if rank.cpu is not None]
    gpu = [rank.gpu for rank in ranks if rank.gpu is not None]
    used = [cores(sum(cpu))] if cpu else []
    used += [f"GPU {' '.join(share(utilization) for utilization in gpu)}"] if gpu else []
    return " · ".join(used)


def _process(name: str, role: str, index: int, state: State, node: str = "", busy: str = "") -> PodView:
    return PodView(
        name=name,
        pod="",
        uid="",
        role=role,
        index=index,
        node=node,
        state=state,
        why="",
        restarts=0,
        since=None,
        container=role,
        has_logs=True,
        busy=busy,
    )
