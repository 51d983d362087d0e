"""The checkpoints of a run, merged from three sources: the trainers' logs, the disk, and the evaluations."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any, Literal

import numpy as np

from tandem.evaluation import Completions
from tandem.model import whole_number
from tandem.rundir import catalog, evaluations, watched
from tandem.rundir.catalog import EvaluationResult, read_result
from tandem.rundir.checkpoint import Broken
from tandem.rundir.evaluations import BASE, METRICS, histograms, parse_final_file, rank
from tandem.rundir.layout import RunDir, step_of
from tandem.wire.status import CheckpointRef
from tandem_cli.report.folder import entries, folders
from tandem_cli.report.generations import Limits, counts
from tandem_cli.report.logs import ReadEvaluatorLog, TrainLog
from tandem_cli.report.run import Floats, Ints, RunCheckpoint, RunEvaluation, mapping, moment, number, within
from tandem_coordinator.charts.completions import heading

MAX_CLASSES = 4096
"""Size of the largest confusion matrix that is read."""

Key = tuple[str, int | None]
ByKey = dict[Key, RunCheckpoint]


def collect(
    rundir: RunDir, train: Sequence[TrainLog], evaluators: Sequence[ReadEvaluatorLog], bounds: Limits, faults: list[str]
) -> tuple[RunCheckpoint, ...]:
    """Collect all known checkpoints, by step and generation."""
    # The logs first: they have every checkpoint that was ever committed, with its stall and its commit time.
    by_key: ByKey = {}
    for log in train:
        for save in log.saves:
            by_key[save.name, log.generation] = RunCheckpoint(
                save.name, save.step, log.generation, save.time, save.bytes, save.stall_seconds, save.commit_seconds
            )
    try:
        # Then the disk: what still exists, or was set aside.
        _add_folders(by_key, rundir)
    except OSError as error:
        faults.append(f"checkpoints cannot be read: {error}")
    _add_evaluations(by_key, rundir, faults)
    for state in watched.records(rundir):
        key = (state.reference.name, state.reference.generation)
        if key in by_key:
            by_key[key] = replace(by_key[key], path=state.path)
    # A note beside the evaluations has the evaluator's own reason; a line of its log has none.
    explained = {name for (name, _), checkpoint in by_key.items() if checkpoint.skipped}
    for evaluator in evaluators:
        for time, name in evaluator.skipped:
            if name in explained:
                continue
            _mark(by_key, name, time, skipped="newer ones came first")
        for time, name, reason in evaluator.bad:
            _mark(by_key, name, time, bad=reason or "an evaluator could not read it")
    for log in train:
        for time, name, reason in log.passed:
            _mark(by_key, name, time, bad=reason or "training could not resume from it")
    ordered = sorted(by_key.values(), key=lambda checkpoint: (checkpoint.step, checkpoint.generation or 0))
    return tuple(replace(c, counts=c.counts and counts(bounds, c.generation, c.step)) for c in ordered)


def best(
    candidates: Sequence[RunCheckpoint], metric: str, goal: Literal["Maximize", "Minimize"]
) -> RunCheckpoint | None:
    """Choose the best checkpoint that counts."""
    ranked = [
        (place, c)
        for c in candidates
        if c.counts and c.evaluation and (place := rank(c.evaluation.deciding, metric, goal, c.step, c.generation))
    ]
    return min(ranked, key=itemgetter(0), default=(None, None))[1]


def base_model(rundir: RunDir) -> RunCheckpoint | None:
    """The base model with its scores; None if it was not evaluated."""
    merged = catalog.read_base_result(rundir)
    if merged is None:
        return None
    result, content = merged
    evaluation = None if result.skipped else _evaluation(result, content)
    return RunCheckpoint(BASE.name, BASE.step, BASE.generation, evaluation=evaluation, skipped=result.skipped or None)


def written(
    rundir: RunDir, base: RunCheckpoint | None, collected: Sequence[RunCheckpoint], best: RunCheckpoint | None
) -> tuple[tuple[str, Completions], ...]:
    """Read what language models wrote for prompts: the base model, the first checkpoint, the best and the newest,
    each with its heading. No other file of completions is read."""
    counting = [
        checkpoint
        for checkpoint in collected
        if checkpoint.counts and checkpoint.evaluation and checkpoint.evaluation.has_completions
    ]
    ends = {id(checkpoint) for checkpoint in (*counting[:1], *counting[-1:])}
    chosen = [checkpoint for checkpoint in counting if id(checkpoint) in ends or checkpoint is best]
    if base is not None and base.evaluation is not None and base.evaluation.has_completions:
        chosen.insert(0, base)
    return tuple(
        (heading(checkpoint.step, checkpoint is base, checkpoint is best), _completions(rundir, checkpoint))
        for checkpoint in chosen
    )


def _completions(rundir: RunDir, checkpoint: RunCheckpoint) -> Completions:
    reference = CheckpointRef(name=checkpoint.name, step=checkpoint.step, generation=checkpoint.generation or 0)
    return evaluations.completions(catalog.merged_result(rundir, reference))


def _add_folders(by_key: ByKey, rundir: RunDir) -> None:
    for name in rundir.checkpoint_names():
        _add_committed(by_key, rundir, name)
    for folder in rundir.all_set_aside():
        if folder.is_bad:
            _mark(
                by_key, folder.checkpoint, moment(folder.at), step=folder.step, bad=folder.why or "set aside as damaged"
            )
        else:
            _mark(by_key, folder.checkpoint, moment(folder.at), step=folder.step, counts=False)


def _add_committed(by_key: ByKey, rundir: RunDir, name: str) -> None:
    try:
        manifest = rundir.manifest(name)
    except FileNotFoundError:
        return
    except Broken as error:
        _mark(by_key, name, None, bad=str(error), on_disk=True)
        return
    checkpoint = by_key.get((name, manifest.generation))
    if checkpoint is None:
        checkpoint = RunCheckpoint(name, manifest.step, manifest.generation, manifest.created_at, manifest.size)
    size = checkpoint.size if checkpoint.size is not None else manifest.size
    by_key[name, manifest.generation] = replace(checkpoint, on_disk=True, size=size)


def _add_evaluations(by_key: ByKey, rundir: RunDir, faults: list[str]) -> None:
    for folder in folders(rundir.evaluations):
        step = step_of(folder.name)
        if step is None:
            continue
        for word in filter(None, map(parse_final_file, entries(folder))):
            key = (folder.name, word.generation)
            checkpoint = by_key.get(key) or RunCheckpoint(folder.name, step, word.generation)
            if (read := read_result(word)) is None:
                faults.append(f"evaluations/{folder.name}/{word.path.name} is not an evaluation; passed over")
                continue
            result, content = read
            if result.skipped:
                by_key[key] = replace(checkpoint, skipped=result.skipped)
            else:
                by_key[key] = replace(checkpoint, evaluation=_evaluation(result, content))


def _mark(
    by_key: ByKey,
    name: str,
    time: float | None,
    step: int | None = None,
    **changes: str | bool,
) -> None:
    """Change the checkpoint of that name that existed at that time; after a restart a name may be reused."""
    keys = [key for key in by_key if key[0] == name]
    if not keys:
        step = step_of(name) if step is None else step
        if step is None:
            return
        by_key[name, None] = RunCheckpoint(name, step, None)
        keys = [(name, None)]
    # Several generations may have written the name; the mark belongs to the one that existed then.
    before = [key for key in keys if time is None or (by_key[key].written_at or 0.0) <= time]
    key = max(before or keys, key=lambda key: key[1] or 0)
    by_key[key] = replace(by_key[key], **changes)  # type: ignore[arg-type]


def _evaluation(result: EvaluationResult, content: Mapping[str, Any]) -> RunEvaluation:
    return RunEvaluation(
        metrics={name: number(value) for name, value in mapping(content.get(METRICS)).items()},
        intervals=dict(result.intervals),
        estimates=dict(result.estimates),
        validation=dict(result.validation),
        samples=whole_number(content.get("samples")),
        per_class_f1=_column(content.get("perClassF1")),
        confusion=_matrix(content.get("confusion")),
        histograms=histograms(content),
        has_completions=result.has_completions,
        started_at=moment(content.get("startedAt")),
        finished_at=moment(content.get("finishedAt")),
    )


def _column(value: object) -> Floats:
    return np.array([within(entry, 0, 1) for entry in value], np.float64) if isinstance(value, list) else np.empty(0)


def _matrix(value: object) -> Ints:
    with suppress(ValueError, TypeError, OverflowError):
        if isinstance(value, list) and len(value) <= MAX_CLASSES:
            matrix = np.array(value, np.int64)
            if matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] and (matrix >= 0).all() and matrix.sum() < 2**53:
                return matrix
    return np.empty((0, 0), np.int64)
