"""A view of a local run in the form of a cluster job, so that both are shown alike.

While it goes on, its coordinator is asked; afterwards, or if that does not answer, its files are read.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.coordinator_client import CoordinatorClient, Refused, Unreachable
from tandem.formatting import cores, rfc3339, share
from tandem.ledger import Ledger
from tandem.rundir import evaluations
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.layout import RunDir, stopped_early
from tandem.rundir.ledger import newest_ledger, of_record
from tandem.rundir.log import LogReader
from tandem.rundir.ownership import ENDPOINT
from tandem.rundir.records import COORDINATOR, Sample, Told
from tandem.status import CheckpointRef, Event, MemberView, Progress, RankView, Score, Snapshot, Status, Troubles
from tandem_cli.local.known import is_alive, job_name, own_command
from tandem_cli.slurm import jobs
from tandem_cli.slurm.scheduler import SlurmError
from tandem_cli.terminal.summary import missed as lacking
from tandem_cli.terminal.summary import result
from tandem_cli.view import JobEvent, JobSummary, JobView, Pod, State

SECONDS = 2.0
"""For the coordinator's answer."""
SAME_SECONDS = 1.0
"""Between what the coordinator says and the line of it in the log, at the most."""
_STATES: dict[str, State] = {"joining": "starting", "running": "running", "leaving": "leaving"}


def look(path: Path) -> JobView:
    """All about a run."""
    snapshot = _snapshot(path) if is_alive(path) else None
    job = replace(_job(path, snapshot), missed=_lacking(path) if snapshot is None else ())
    return JobView(job=job, pods=processes(snapshot) if snapshot is not None else (), job_events=job_events(path))


def _lacking(path: Path) -> tuple[str, ...]:
    with suppress(OSError, ValueError):
        return tuple(lacking(RunDir(path)))
    return ()


def look_briefly(path: Path) -> JobSummary:
    """A run, without its processes and what happened to it."""
    return _job(path, _snapshot(path) if is_alive(path) else None)


def endpoint(path: Path) -> tuple[str, str] | None:
    """Host and port of the coordinator of a run, and its token; None while it has none, or for other users."""
    content: Any = read_json_or_none(path / ENDPOINT)
    if not isinstance(content, dict) or not {"url", "token"} <= content.keys():
        return None
    return str(content["url"]).removeprefix("http://"), str(content["token"])


def job_events(path: Path) -> tuple[JobEvent, ...]:
    """What the coordinator has said of a run, oldest first; what follows on itself is said once."""
    found: list[JobEvent] = []
    for told in _told(RunDir(path).coordinator_log):
        at, text = told.time, " ".join((told.text or "").split())
        first, count = at, 1
        if found and found[-1].text == text:
            last = found.pop()
            first, count = last.first, last.count + 1
        warning = told.level != "info"
        found.append(JobEvent(at=at, first=first, who="", reason="", text=text, count=count, warning=warning))
    return tuple(found)


def missed(path: Path, seen: Sequence[Event], since: float) -> list[Event]:
    """What the coordinator has said after the newest of these events, as its log tells: it may have ended before
    anybody could ask.

    Args:
        seen: of its snapshot.
        since: seconds since the epoch, for when there are none.
    """
    since = max((one.at for one in seen), default=since)
    found = []
    for told in _told(RunDir(path).coordinator_log):
        if told.time < since:
            continue
        kind = told.level if told.level in ("warning", "error") else "info"
        event = Event.parse({"at": told.time, "kind": kind, "text": told.text or ""})
        if not any(one.text == event.text and event.at < one.at + SAME_SECONDS for one in seen):
            found.append(event)
    return found


def _snapshot(path: Path) -> Snapshot | None:
    found = endpoint(path)
    if found is None:
        return None
    with suppress(Unreachable, Refused, ValueError), CoordinatorClient(*found, timeout=SECONDS) as client:
        return client.status()
    return None


def _job(path: Path, snapshot: Snapshot | None) -> JobSummary:
    alive = snapshot is not None or is_alive(path)
    return JobSummary(
        name=(snapshot.job if snapshot else "") or job_name(path) or path.resolve().name,
        namespace=str(path),
        uid="",
        made=_made(path),
        status=_with_lacks(path, snapshot.status)
        if snapshot is not None
        else _with_slurm(path, _read_status(path, alive)),
        taken_up=True,
        leaving=False,
    )


def _with_slurm(path: Path, status: Status) -> Status:
    """With what SLURM says of a run that it has, and whose coordinator does not answer."""
    saved = status.latest_checkpoint
    if status.phase == "Suspended" and (why := jobs.refusal(path)):
        where = f"goes on after step {saved.step:,}" if saved else "tries again"
        return status.model_copy(
            update={"message": f"it was not submitted: {why}; the same `tandem submit --slurm` {where}"}
        )
    try:
        phase, words = jobs.state_words(path)
    except SlurmError as error:
        phase, words = status.phase, str(error)
    if not words or status.phase in ("Succeeded", "Failed"):
        return status
    if phase == "Ended":
        where = f"goes on after step {saved.step:,}" if saved else "begins anew"
        message = f"{words}; the same `tandem submit --slurm` {where}"
        return status.model_copy(update={"phase": "Suspended", "message": message})
    changed = {"message": words, **({"phase": "Pending"} if phase == "Pending" else {})}
    return status.model_copy(update=changed)


def _with_lacks(path: Path, status: Status) -> Status:
    """With what a running training has not got of SLURM."""
    try:
        words = jobs.lacks(path)
    except SlurmError:
        words = ""
    if not words:
        return status
    return status.model_copy(update={"message": f"{status.message}; {words}" if status.message else words})


def _made(path: Path) -> float:
    for name in ("log", "job.json"):
        with suppress(OSError):
            folder = path / name
            files = [folder, *(folder.iterdir() if folder.is_dir() else [])]
            return min(file.stat().st_mtime for file in files)
    return 0.0


def over(path: Path) -> Status:
    """The status of a run that is over, as its files tell it."""
    return _read_status(path, alive=False)


def _read_status(path: Path, alive: bool) -> Status:
    rundir = RunDir(path)
    with suppress(OSError, ValueError):
        saved, records = rundir.committed(), rundir.generation_records()
        done, failed, found = rundir.done(), rundir.failed(), result(rundir)
        newest = saved[0].reference if saved else None
        at = (done or failed or {}).get("at")
        return Status(
            phase="Succeeded" if done else "Failed" if failed else "Starting" if alive else "Suspended",
            message=_message(done, failed, alive, newest, own_command(path)),
            generation=records[-1].generation if records else None,
            restarts=found.restarts,
            progress=_progress(found.made, found.total) if found.made else None,
            loss=found.loss,
            latest_checkpoint=newest,
            best_checkpoint=_best(rundir),
            against_base=found.against_base,
            troubles=found.troubles if found.troubles != Troubles() else None,
            ledger=_ledger(rundir),
            start_time=rfc3339(records[0].started_at) if records else None,
            completion_time=rfc3339(at) if isinstance(at, int | float) else None,
        )
    return Status(phase="Pending", message="its files cannot be read")


def _ledger(rundir: RunDir) -> Ledger | None:
    record = newest_ledger(rundir)
    return None if record is None else of_record(record)


def _message(done: Any, failed: Any, alive: bool, newest: CheckpointRef | None, own_command: bool) -> str | None:
    if failed:
        return str(failed.get("message") or failed.get("reason") or "") or None
    if done or alive:
        return stopped_early(done) or None
    if own_command and newest is None:
        where = "starts the script again, and what that has saved itself is there"
    else:
        where = f"goes on after step {newest.step:,}" if newest else "begins anew: nothing was saved"
    return f"nothing of it runs; the same `tandem run` {where}"


def _progress(step: int, total: int | None) -> Progress:
    return Progress(step=step, total_steps=total, percent=min(100.0, 100.0 * step / total) if total else None)


def _best(rundir: RunDir) -> Score | None:
    best = evaluations.best(rundir)
    if best is None or best.step is None or best.metric is None or best.value is None:
        return None
    return Score(name=best.name, step=best.step, metric=best.metric, value=best.value)


def _told(path: Path) -> Iterator[Told]:
    with suppress(OSError):
        yield from (record for record in LogReader(path, COORDINATOR, skip=Sample) if isinstance(record, Told))


def processes(snapshot: Snapshot) -> tuple[Pod, ...]:
    """The processes that a coordinator knows."""
    found = [_process("coordinator", "coordinator", 0, "running")]
    found += [_member(member, index) for index, member in enumerate(snapshot.members)]
    for index, one in enumerate(snapshot.evaluators):
        found.append(_process(one.name, "evaluator", index, "running"))
    return tuple(found)


def _member(member: MemberView, index: int) -> Pod:
    return _process(
        member.replica, "worker", index, _STATES[member.state], node=member.node or "", busy=_busy(member.ranks)
    )


def _busy(ranks: Sequence[RankView]) -> str:
    """How much the ranks of a worker use of processors, in words; empty where that is not known."""
    cpu = [rank.cpu for rank in ranks if rank.cpu is not None]
    gpu = [rank.gpu for rank in ranks if rank.gpu is not None]
    used = [cores(sum(cpu))] if cpu else []
    used += [f"GPU {' '.join(share(one) for one in gpu)}"] if gpu else []
    return " · ".join(used)


def _process(name: str, role: str, index: int, state: State, node: str = "", busy: str = "") -> Pod:
    return Pod(
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
