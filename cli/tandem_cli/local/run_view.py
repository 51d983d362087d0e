"""A view of a local run in the form of a cluster job, so that both are displayed alike.

While the run is running, the view comes from its coordinator; afterwards, or if that does not answer, from its files.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.formatting import cores, share
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import ENDPOINT
from tandem.wire.coordinator_client import CoordinatorClient, CoordinatorRefused, Unreachable
from tandem.wire.status import MemberView, RankView, Snapshot, Status
from tandem_cli.local.known import is_alive, job_name
from tandem_cli.view import JobEvent, JobSummary, JobView, PodView, State
from tandem_launcher.recorded_status import coordinator_records, recorded_status
from tandem_launcher.slurm import jobs
from tandem_launcher.slurm.scheduler import SlurmError
from tandem_launcher.terminal.summary import missed as missed_steps

REQUEST_SECONDS = 2.0
"""Timeout of a request to the coordinator, in seconds."""
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
    for record in coordinator_records(RunDir(path).coordinator_log):
        time, text = record.time, " ".join((record.text or "").split())
        first, count = time, 1
        if events and events[-1].text == text:
            last = events.pop()
            first, count = last.first, last.count + 1
        warning = record.level != "info"
        events.append(JobEvent(at=time, first=first, who="", reason="", text=text, count=count, warning=warning))
    return tuple(events)


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
        else _with_slurm(path, recorded_status(path, alive)),
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
