"""Reads a run directory, complete or damaged, into a `run.Run`.

Nothing in it is trusted to be there: the run may be going on, may have been killed at any moment, or may be years old
with half of its files cleaned away. What is missing is left out, what is damaged is named in `Run.faults`, and only a
folder with nothing of a run in it is refused. Writes nothing and holds no lease: all it opens is small, or a log.
"""

import json
import time as clock
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import yaml
from pydantic import ValidationError

from tandem.formatting import elapsed
from tandem.formatting import moment as moment_of
from tandem.job import DistributedTrainingJob
from tandem.measures import Generation
from tandem.rundir import evaluations
from tandem.rundir.durable import read_json, read_json_or_none
from tandem.rundir.evaluations import direction
from tandem.rundir.layout import RunDir, evaluator_of_log, generation_of_log, stopped_early
from tandem.rundir.ledger import of_record
from tandem.rundir.lineage import GenerationRecord, batches_left_out
from tandem.rundir.ownership import LOCK
from tandem.secrecy import hidden
from tandem.status import Troubles
from tandem.wrong_samples import gallery
from tandem_cli.local.known import is_alive
from tandem_cli.report import checkpoints, generations
from tandem_cli.report.folder import expect_run, listed
from tandem_cli.report.logs import (
    CoordinatorLog,
    ReadEvaluatorLog,
    TrainLog,
    natural,
    read_coordinator_log,
    read_evaluator_log,
    read_train_log,
)
from tandem_cli.report.run import Floats, Rates, Result, Run, RunCheckpoint, Use, moment, text
from tandem_cli.terminal.summary import missed
from tandem_coordinator.charts.gallery import Tile, tiles

SILENT_SECONDS = 20.0
"""A run without an end and without a lock whose logs are silent for so long is not going on: the coordinator writes
every second."""

LEFT_SECONDS = 2.0
"""Clocks of two machines differ by less."""


def read(path: Path, now: Callable[[], float] = clock.time) -> Run:
    """Read a run directory.

    Raises:
        NoRun: there is none at `path`.
    """
    rundir = RunDir(path)
    expect_run(rundir)
    faults: list[str] = []
    job, job_text = _job(rundir, faults)
    train = _train_logs(rundir, faults)
    coordinator = read_coordinator_log(rundir.coordinator_log, faults)
    evaluators = _evaluator_logs(rundir, faults)
    records = _records(rundir, faults)

    bounds = generations.limits(generations.beginnings(records, train))
    counted, superseded = generations.resolve({log.generation: log.steps for log in train}, bounds)
    told = evaluations.best(rundir)
    metric = (job.spec.evaluation.metric if job else told and told.metric) or "accuracy"
    written = checkpoints.collect(rundir, train, evaluators, bounds, faults)
    best, base = checkpoints.best(written, metric, direction(job, metric)), checkpoints.base_model(rundir)
    memberships = generations.collect(records, train, coordinator)

    marks = _marks(train, coordinator, evaluators)
    end = rundir.done() or rundir.failed() or {}
    started_at, ended_at = _span(marks, train, evaluators, memberships, moment(end.get("at")), rundir.ended())
    inside = marks[(marks >= started_at) & (marks <= ended_at)]
    heard_at = max([ended_at, *marks[-1:].tolist()])
    trained_at = max((log.last_at for log in train if log.last_at is not None), default=0.0)
    left = coordinator.ended_at is not None and trained_at <= coordinator.ended_at + LEFT_SECONDS
    result, message = _result(rundir, heard_at, now(), left)
    name = job.metadata.name if job else path.resolve().name
    return Run(
        name=name,
        title=rundir.title(name),
        job=job,
        job_text=job_text,
        result=result,
        message=message,
        started_at=started_at,
        ended_at=ended_at,
        marks=np.unique(np.concatenate([inside, [started_at, ended_at]])),
        total_steps=next((log.total_steps for log in reversed(train) if log.total_steps), None),
        tokens_per_sample=train[-1].tokens_per_sample if train else None,
        learned_per_sample=train[-1].learned_per_sample if train else None,
        counted=counted,
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
        ledger=None if coordinator.ledger is None else of_record(coordinator.ledger),
    )


def _missed(rundir: RunDir) -> tuple[str, ...]:
    try:
        return tuple(missed(rundir))
    except (OSError, ValueError):
        return ()


def _wrong(rundir: RunDir) -> tuple[Tile, ...]:
    found = gallery(rundir)
    return () if found is None else tuple(tiles(found))


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
        return job, yaml.safe_dump(hidden(data), sort_keys=False, allow_unicode=True, width=100)
    except yaml.YAMLError:
        return job, json.dumps(hidden(data), indent=2)


def _train_logs(rundir: RunDir, faults: list[str]) -> list[TrainLog]:
    named = [(path, generation_of_log(path)) for path in listed(rundir.log)]
    found = [read_train_log(path, number, faults) for path, number in named if number is not None]
    return sorted(found, key=lambda log: log.generation)


def _evaluator_logs(rundir: RunDir, faults: list[str]) -> list[ReadEvaluatorLog]:
    named = [(path, evaluator_of_log(path)) for path in listed(rundir.log)]
    found = [read_evaluator_log(path, name, faults) for path, name in named if name is not None]
    return sorted(found, key=lambda log: natural(log.name))


def _records(rundir: RunDir, faults: list[str]) -> dict[int, GenerationRecord]:
    found = {}
    for path in listed(rundir.generations):
        if not path.name.endswith(".json") or path.name.startswith("."):
            continue
        try:
            record = GenerationRecord.read(read_json_or_none(path))
        except ValidationError:
            faults.append(f"generations/{path.name} is not a generation's record; passed over")
        else:
            found[record.generation] = record
    return found


def _result(rundir: RunDir, heard_at: float, now: float, left: bool) -> tuple[Result, str]:
    """How it ended, and why. One that has left no end is going on while a `tandem run` of this machine holds its lock;
    where there is no lock, as in a volume of a cluster, for as long as its logs grow.

    Args:
        left: its coordinator has left in good order, and no rank has written a line since.
    """
    if rundir.done_file.exists():
        return "Succeeded", stopped_early(rundir.done())
    if rundir.failed_file.exists():
        failure = rundir.failed() or {}
        reason, message = text(failure.get("reason")), text(failure.get("message"))
        return "Failed", ": ".join(part for part in (reason, message) if part)
    locked = (rundir.path / LOCK).exists()
    if not (locked and is_alive(rundir.path)):
        if left:
            return "Stopped", f"it was stopped at {moment_of(heard_at)}; `tandem run` with the same file goes on"
        if locked or now - heard_at > SILENT_SECONDS:
            return "Stopped", (
                f"no process of it has written a line since {moment_of(heard_at)}, for {elapsed(now - heard_at)} when "
                "this page was made, and it left no end; `tandem run` with the same file goes on from the last "
                "checkpoint"
            )
    return "Running", f"this page shows it as far as it had come at {moment_of(heard_at)}"


def _troubles(
    rundir: RunDir,
    train: list[TrainLog],
    coordinator: CoordinatorLog,
    evaluators: list[ReadEvaluatorLog],
    written: tuple[RunCheckpoint, ...],
) -> Troubles:
    """What went wrong: what the coordinator heard, and what stands in the logs of the others; the larger number, as a
    full disk takes no lines."""
    failed = [why for log in train for why in log.failed]
    unusable = {name for log in evaluators for _, name, _ in log.bad}
    heard = coordinator.troubles or (Troubles(),)
    try:
        rewinds = rundir.rewind_records()
    except (OSError, ValueError):
        rewinds = []
    try:
        limits = rundir.limits(rundir.read_job())
    except (OSError, ValueError):
        limits = []
    return Troubles(
        saves_failed=max(len(failed), *(one.saves_failed for one in heard)),
        saves_failed_in_a_row=heard[-1].saves_failed_in_a_row,
        save_message=heard[-1].save_message,
        evaluations_failed=max(len(unusable), *(one.evaluations_failed for one in heard)),
        evaluation_message=heard[-1].evaluation_message,
        evaluations_skipped=sum(c.counts and c.evaluation is None and c.skipped is not None for c in written),
        lines_lost=max(one.lines_lost for one in heard),
        rewinds=len(rewinds),
        batches_left_out=batches_left_out(rewinds),
        micro_batches_halved=len(limits),
        micro_batch=min(limits, default=None),
        worse_than_base=heard[-1].worse_than_base,
        base_message=heard[-1].base_message,
    )


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
    """What evaluators say of themselves; for one that left no log, what the coordinator saw."""
    own = {log.name: log.use for log in evaluators if len(log.use.time)}
    seen = {use.name: use for use in coordinator.evaluator_cpu if use.name not in own}
    for name in sorted({*own, *seen}, key=natural):
        yield own.get(name) or seen[name]


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
    """From when to when the run is told: not the wait for its first members, nor the time after its last work."""
    known = marks.tolist()
    first = [g.opened_at for g in memberships[:1] if g.opened_at is not None] or known[:1]
    # The coordinator goes on saying that nothing happens until it is stopped.
    workers = [*(log.marks for log in train), *(log.marks for log in evaluators)]
    last = [float(times[-1]) for times in workers if len(times)] if ended else known[-1:]
    moments = [*first, *last, *(at for at in (end,) if at is not None)]
    if not moments:
        return 0.0, 0.0
    return min(first or moments), max(moments)
