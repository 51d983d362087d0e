"""Reads a run directory, complete or damaged, into a `run.RunData`.

Any file may be missing: the run may be going on, may have been killed at any moment, or may be years old with half of
its files cleaned away. Missing data is omitted, damaged data is listed in `RunData.faults`, and only a folder without
any file of a run is refused. Writes nothing and holds no lease: all files it opens are small, or logs.
"""

import json
import time as clock
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter
from pathlib import Path

import numpy as np
import yaml
from pydantic import ValidationError

from tandem.formatting import elapsed
from tandem.formatting import utc_time as moment_of
from tandem.job.resource import DistributedTrainingJob
from tandem.job.secrecy import hide_secrets
from tandem.rundir import evaluations
from tandem.rundir.durable import read_json, read_json_or_none
from tandem.rundir.evaluations import direction
from tandem.rundir.layout import RunDir, evaluator_of_log, generation_of_log, stopped_early
from tandem.rundir.ledger import ledger_of
from tandem.rundir.lineage import GenerationRecord, batches_left_out
from tandem.rundir.ownership import LOCK
from tandem.rundir.provenance import read_chain
from tandem.rundir.timeline import GAP_SECONDS, evaluation_span, save_span, upload_span
from tandem.rundir.training_log import counted_until
from tandem.rundir.wrong_samples import gallery
from tandem.wire.measures import Generation
from tandem.wire.status import ProvenanceHead, Troubles, joined
from tandem.wire.trace import RunTimeline
from tandem_cli.local.known import is_alive
from tandem_cli.report import checkpoints, generations
from tandem_cli.report.folder import entries, expect_run
from tandem_cli.report.logs import (
    CoordinatorLog,
    ReadEvaluatorLog,
    TrainLog,
    natural,
    read_coordinator_log,
    read_evaluator_log,
    read_train_log,
)
from tandem_cli.report.run import Floats, Rates, RunCheckpoint, RunData, RunState, Use, moment, text
from tandem_coordinator.charts.gallery import Tile, tiles
from tandem_launcher.terminal.summary import missed

SILENT_SECONDS = 20.0
"""Silence of the logs after which a run without an end and without a lock is not running: the coordinator writes
every second."""

MAX_CLOCK_SKEW_SECONDS = 2.0
"""Maximum difference between the clocks of two machines."""


def read(path: Path, now: Callable[[], float] = clock.time) -> RunData:
    """Read a run directory.

    Raises:
        NoRun: `path` is not a run directory.
    """
    rundir = RunDir(path)
    expect_run(rundir)
    faults: list[str] = []
    # Everything is read before anything is computed; each reader adds what it cannot read to the faults.
    job, job_text = _job(rundir, faults)
    train = _train_logs(rundir, faults)
    coordinator = read_coordinator_log(rundir.coordinator_log, faults)
    evaluators = _evaluator_logs(rundir, faults)
    records = _records(rundir, faults)
    provenance = _provenance(rundir, faults)

    # Which steps count follows from where each generation started; checkpoints are judged by the same limits.
    bounds = counted_until(generations.beginnings(records, train))
    counted_steps, superseded = generations.resolve({log.generation: log.steps for log in train}, bounds)
    recorded_best = evaluations.best(rundir)
    # Without a job, the coordinator's record of the best checkpoint still has the metric.
    metric = (job.spec.evaluation.metric if job else recorded_best and recorded_best.metric) or "accuracy"
    written = checkpoints.collect(rundir, train, evaluators, bounds, faults)
    best, base = checkpoints.best(written, metric, direction(job, metric)), checkpoints.base_model(rundir)
    memberships = generations.collect(records, train, coordinator)

    # The time axis: the run starts with its first group, and ends with its last work.
    marks = _marks(train, coordinator, evaluators)
    end = rundir.done() or rundir.failed() or {}
    started_at, ended_at = _span(marks, train, evaluators, memberships, moment(end.get("at")), rundir.ended())
    # A coordinator without members, before and after the run, is not part of it.
    inside = marks[(marks >= started_at) & (marks <= ended_at)]
    last_seen = max([ended_at, *marks[-1:].tolist()])
    trained_at = max((log.last_at for log in train if log.last_at is not None), default=0.0)
    # A rank that logs after the coordinator's end was still running.
    has_left = coordinator.ended_at is not None and trained_at <= coordinator.ended_at + MAX_CLOCK_SKEW_SECONDS
    result, message = _result(rundir, last_seen, now(), has_left)
    name = job.metadata.name if job else path.resolve().name
    starts = [log.start for log in reversed(train)]
    newest = starts[0] if starts else None
    return RunData(
        name=name,
        title=rundir.title(name),
        job=job,
        job_text=job_text,
        result=result,
        message=message,
        started_at=started_at,
        ended_at=ended_at,
        marks=np.unique(np.concatenate([inside, [started_at, ended_at]])),
        total_steps=next((start.total_steps for start in starts if start and start.total_steps), None),
        tokens_per_sample=newest.tokens_per_sample if newest else None,
        learned_per_sample=newest.learned_per_sample if newest else None,
        model_steps=counted_steps,
        superseded=superseded,
        rates=_joined_rates(train),
        world=coordinator.world,
        uses=(*coordinator.trainer_cpu, *coordinator.gpu, *_evaluator_uses(coordinator, evaluators)),
        busy=coordinator.busy,
        memory=coordinator.memory,
        works=tuple(sorted((work for log in evaluators for work in log.works), key=lambda work: work.end)),
        checkpoints=written,
        best=best,
        base=base,
        completions=checkpoints.written(rundir, base, written, best),
        wrong=_wrong(rundir),
        metric=metric,
        generations=memberships,
        events=coordinator.events,
        unsaved=tuple(entry for log in train for entry in log.unsaved),
        troubles=_troubles(rundir, train, coordinator, evaluators, written),
        missed=_missed(rundir),
        faults=tuple(faults),
        ledger=ledger_of(rundir, coordinator.ledger),
        provenance=provenance,
        timeline=_timeline(rundir, name, memberships, train, coordinator, evaluators),
    )


def _provenance(rundir: RunDir, faults: list[str]) -> ProvenanceHead | None:
    try:
        chain = read_chain(rundir.provenance)
    except (OSError, ValueError) as error:
        faults.append(f"the record of the run cannot be read: {error}")
        return None
    if chain.problems:
        faults.append(f"the record of the run: {chain.problems[0]}")
    return ProvenanceHead(entries=chain.count, head=chain.head) if chain.count else None


def _timeline(
    rundir: RunDir,
    name: str,
    memberships: tuple[Generation, ...],
    train: list[TrainLog],
    coordinator: CoordinatorLog,
    evaluators: list[ReadEvaluatorLog],
) -> RunTimeline:
    """Make the timeline that `tandem.rundir.timeline.TimelineReader` would read again."""
    times = coordinator.marks
    gaps = np.flatnonzero(np.diff(times) > GAP_SECONDS)
    ending = rundir.failed() or rundir.done() or {}
    signs = [*times[-1:].tolist(), *(log.last_at for log in train if log.last_at is not None)]
    saves = [save_span(saved) for log in train for saved in log.saves]
    works = [
        evaluation_span(work.evaluator, work.checkpoint, work.step, work.begin, work.end)
        for log in evaluators
        for work in log.works
    ]
    return RunTimeline(
        name=name,
        generations=memberships,
        began_at=float(times[0]) if len(times) else None,
        ended_at=moment(ending.get("at")) or max(signs, default=None),
        has_failed=rundir.failed() is not None,
        is_over=rundir.ended(),
        gaps=tuple((float(times[gap]), float(times[gap + 1])) for gap in gaps),
        work=(*saves, *works, *map(upload_span, coordinator.uploads)),
    )


def _missed(rundir: RunDir) -> tuple[str, ...]:
    try:
        return tuple(missed(rundir))
    except (OSError, ValueError):
        return ()


def _wrong(rundir: RunDir) -> tuple[Tile, ...]:
    samples = gallery(rundir)
    return () if samples is None else tuple(tiles(samples))


def _job(rundir: RunDir, faults: list[str]) -> tuple[DistributedTrainingJob | None, str]:
    try:
        data = read_json(rundir.job_file)
    except FileNotFoundError:
        faults.append("job.json is missing")
        return None, ""
    except (OSError, ValueError) as error:
        faults.append(f"job.json cannot be read: {error}")
        return None, ""
    try:
        job = DistributedTrainingJob.read(data)
    except ValidationError:
        faults.append("job.json is not a job that this version of Tandem knows")
        job = None
    try:
        return job, yaml.safe_dump(hide_secrets(data), sort_keys=False, allow_unicode=True, width=100)
    except yaml.YAMLError:
        return job, json.dumps(hide_secrets(data), indent=2)


def _train_logs(rundir: RunDir, faults: list[str]) -> list[TrainLog]:
    paths = [(path, generation_of_log(path)) for path in entries(rundir.log)]
    logs = [read_train_log(path, number, faults) for path, number in paths if number is not None]
    return sorted(logs, key=lambda log: log.generation)


def _evaluator_logs(rundir: RunDir, faults: list[str]) -> list[ReadEvaluatorLog]:
    paths = [(path, evaluator_of_log(path)) for path in entries(rundir.log)]
    logs = [read_evaluator_log(path, name, faults) for path, name in paths if name is not None]
    return sorted(logs, key=lambda log: natural(log.name))


def _records(rundir: RunDir, faults: list[str]) -> dict[int, GenerationRecord]:
    by_number = {}
    for path in entries(rundir.generations):
        # Temporary files of a record that is being written.
        if not path.name.endswith(".json") or path.name.startswith("."):
            continue
        try:
            record = GenerationRecord.read(read_json_or_none(path))
        except ValidationError:
            faults.append(f"generations/{path.name} is not a generation's record; passed over")
        else:
            by_number[record.generation] = record
    return by_number


def _result(rundir: RunDir, last_seen: float, now: float, has_left: bool) -> tuple[RunState, str]:
    """Determine how the run ended, and why. A run without an end is running while a `tandem run` on this machine holds
    its lock; without a lock, as in a volume of a cluster, as long as its logs grow.

    Args:
        has_left: its coordinator has ended in good order, and no rank has logged anything since.
    """
    # The end markers decide first; they are written once.
    if rundir.done_file.exists():
        return "Succeeded", stopped_early(rundir.done())
    if rundir.failed_file.exists():
        failure = rundir.failed() or {}
        reason, message = text(failure.get("reason")), text(failure.get("message"))
        return "Failed", ": ".join(part for part in (reason, message) if part)
    # Without an end, `tandem run`'s lock decides on the machine that holds it; elsewhere, the age of the last line
    # does.
    locked = (rundir.path / LOCK).exists()
    if not (locked and is_alive(rundir.path)):
        if has_left:
            return "Stopped", f"it was stopped at {moment_of(last_seen)}; `tandem run` with the same file goes on"
        if locked or now - last_seen > SILENT_SECONDS:
            return "Stopped", (
                f"no process of the run has logged anything since {moment_of(last_seen)}, for "
                f"{elapsed(now - last_seen)} when this page was made, and it has no result; `tandem run` with the same "
                "file goes on from the last checkpoint"
            )
    return "Running", f"this page shows its state at {moment_of(last_seen)}"


def _troubles(
    rundir: RunDir,
    train: list[TrainLog],
    coordinator: CoordinatorLog,
    evaluators: list[ReadEvaluatorLog],
    written: tuple[RunCheckpoint, ...],
) -> Troubles:
    """Count the problems: those that the coordinator counted, and those in the other logs; the larger number, as a
    full disk loses lines."""
    failed = [reason for log in train for reason in log.failed]
    unusable = {name for log in evaluators for _, name, _ in log.bad}
    logged = coordinator.troubles or (Troubles(),)
    try:
        rewinds = rundir.rewind_records()
    except (OSError, ValueError):
        rewinds = []
    try:
        limits = rundir.limits(rundir.read_job())
    except (OSError, ValueError):
        limits = []
    corruptions = joined(chain(*(log.corruptions for log in train), *(log.corruptions for log in evaluators)))
    # The coordinator counts what no log has, too. The last of each kind is the one with the larger count.
    all_kinds = sorted([*corruptions, *logged[-1].corruptions], key=attrgetter("count"))
    counts = {
        "saves_failed": max(len(failed), *(troubles.saves_failed for troubles in logged)),
        "evaluations_failed": max(len(unusable), *(troubles.evaluations_failed for troubles in logged)),
        "evaluations_skipped": sum(c.counts and c.evaluation is None and c.skipped is not None for c in written),
        "lines_lost": max(troubles.lines_lost for troubles in logged),
        "rewinds": len(rewinds),
        "batches_left_out": batches_left_out(rewinds),
        "micro_batches_halved": len(limits),
        "micro_batch": min(limits, default=None),
        "corruptions": list({corruption.reason: corruption for corruption in all_kinds}.values()),
    }
    last = logged[-1].model_dump(include=set(Troubles.model_fields), by_alias=False)
    return Troubles(**last | counts)


def _joined_rates(train: list[TrainLog]) -> Rates:
    rates = [log.rates for log in train if len(log.rates)]
    if not rates:
        return Rates(np.empty(0), np.empty(0), np.empty(0), {})
    names = list(dict.fromkeys(name for rate in rates for name in rate.phases))
    return Rates(
        time=np.concatenate([rate.time for rate in rates]),
        throughput=np.concatenate([rate.throughput for rate in rates]),
        seconds=np.concatenate([rate.seconds for rate in rates]),
        phases={name: np.concatenate([rate.phases.get(name, np.zeros(len(rate))) for rate in rates]) for name in names},
    )


def _evaluator_uses(coordinator: CoordinatorLog, evaluators: list[ReadEvaluatorLog]) -> Iterator[Use]:
    """Generate the processor use that evaluators logged; for one without a log, the coordinator's samples."""
    own = {log.name: log.use for log in evaluators if len(log.use.time)}
    sampled = {use.name: use for use in coordinator.evaluator_cpu if use.name not in own}
    for name in sorted({*own, *sampled}, key=natural):
        yield own.get(name) or sampled[name]


def _marks(train: list[TrainLog], coordinator: CoordinatorLog, evaluators: list[ReadEvaluatorLog]) -> Floats:
    logs = [coordinator.marks, *(log.marks for log in train), *(log.marks for log in evaluators)]
    return np.unique(np.concatenate(logs))


def _span(
    marks: Floats,
    train: list[TrainLog],
    evaluators: list[ReadEvaluatorLog],
    memberships: tuple[Generation, ...],
    end: float | None,
    ended: bool,
) -> tuple[float, float]:
    """Determine the start and end of the run, without the wait for its first members and the time after its last
    work."""
    times_logged = marks.tolist()
    first = [g.opened_at for g in memberships[:1] if g.opened_at is not None] or times_logged[:1]
    # Once the run has ended, the coordinator still logs every second until it is stopped.
    workers = [*(log.marks for log in train), *(log.marks for log in evaluators)]
    last = [float(times[-1]) for times in workers if len(times)] if ended else times_logged[-1:]
    moments = [*first, *last, *(moment for moment in (end,) if moment is not None)]
    if not moments:
        return 0.0, 0.0
    return min(first or moments), max(moments)
