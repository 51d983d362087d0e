"""The status of a run as its run directory records it, and the events in its log that a snapshot lacks."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.formatting import rfc3339
from tandem.rundir import evaluations
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.layout import RunDir, stopped_early
from tandem.rundir.ledger import ledger_of, newest_ledger
from tandem.rundir.log import LogReader
from tandem.rundir.records import COORDINATOR, EventRecord, Sample
from tandem.wire.status import CheckpointRef, Event, Progress, Score, Status, Troubles
from tandem_launcher.terminal.summary import result

MAX_LOG_DELAY_SECONDS = 1.0
"""Longest delay between an event of the coordinator and its line in the log."""


def recorded_status(path: Path, alive: bool) -> Status:
    """Read the status of a run from its files.

    Args:
        alive: whether the run is running.
    """
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
            ledger=ledger_of(rundir, newest_ledger(rundir)),
            start_time=rfc3339(records[0].started_at) if records else None,
            completion_time=rfc3339(ended_at) if isinstance(ended_at, int | float) else None,
        )
    return Status(phase="Pending", message="the files of the run cannot be read")


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


def own_command(path: Path) -> bool:
    """Whether a run's job is a user's command, which may save checkpoints of its own."""
    content = read_json_or_none(path / "job.json")
    for name in ("spec", "trainer", "command"):
        content = content.get(name) if isinstance(content, dict) else None
    return content is not None


def unseen_events(path: Path, snapshot: Sequence[Event], since: float) -> list[Event]:
    """Return the logged events after the newest event of a snapshot: the coordinator may end before the next poll.

    Args:
        snapshot: events of the last snapshot.
        since: earliest time if the snapshot has no events, in seconds since the epoch.
    """
    since = max((event.at for event in snapshot), default=since)
    unseen = []
    for record in coordinator_records(RunDir(path).coordinator_log):
        if record.time < since:
            continue
        kind = record.level if record.level in ("warning", "error") else "info"
        event = Event.parse({"at": record.time, "kind": kind, "text": record.text or ""})
        if not any(
            earlier.text == event.text and event.at < earlier.at + MAX_LOG_DELAY_SECONDS for earlier in snapshot
        ):
            unseen.append(event)
    return unseen


def coordinator_records(path: Path) -> Iterator[EventRecord]:
    """Read the events in the coordinator's log; none if it cannot be read."""
    with suppress(OSError):
        yield from (record for record in LogReader(path, COORDINATOR, skip=Sample) if isinstance(record, EventRecord))
