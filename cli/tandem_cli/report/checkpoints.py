"""The checkpoints of a run, merged from three sources: the trainers' logs, the disk, and the evaluations."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any, Literal

import numpy as np

from tandem.evaluation import Completions
from tandem.model import whole
from tandem.rundir import catalog, evaluations, watched
from tandem.rundir.catalog import Result, read_result
from tandem.rundir.checkpoint import Broken
from tandem.rundir.evaluations import BASE, METRICS, histograms, last_word, rank
from tandem.rundir.layout import RunDir, step_of
from tandem.status import CheckpointRef
from tandem_cli.report.folder import folders, listed
from tandem_cli.report.generations import Limits, counts
from tandem_cli.report.logs import ReadEvaluatorLog, TrainLog
from tandem_cli.report.run import Floats, Ints, RunCheckpoint, RunEvaluation, mapping, moment, number, within
from tandem_coordinator.charts.completions import heading

MAX_CLASSES = 4096
"""Larger confusion matrices are not read."""

Key = tuple[str, int | None]
Found = dict[Key, RunCheckpoint]


def collect(
    rundir: RunDir, train: Sequence[TrainLog], evaluators: Sequence[ReadEvaluatorLog], bounds: Limits, faults: list[str]
) -> tuple[RunCheckpoint, ...]:
    """All checkpoints anybody knows of, by step and generation."""
    found: Found = {}
    for log in train:
        for save in log.saves:
            found[save.name, log.generation] = RunCheckpoint(
                save.name, save.step, log.generation, save.time, save.bytes, save.stall_seconds, save.commit_seconds
            )
    try:
        _add_folders(found, rundir)
    except OSError as error:
        faults.append(f"checkpoints cannot be read: {error}")
    _add_evaluations(found, rundir, faults)
    for one in watched.records(rundir):
        key = (one.reference.name, one.reference.generation)
        if key in found:
            found[key] = replace(found[key], path=one.path)
    explained = {name for (name, _), checkpoint in found.items() if checkpoint.skipped}
    for evaluator in evaluators:
        for at, name in evaluator.skipped:
            if name in explained:
                continue
            _mark(found, name, at, skipped="newer ones came first")
        for at, name, why in evaluator.bad:
            _mark(found, name, at, bad=why or "an evaluator could not read it")
    for log in train:
        for at, name, why in log.passed:
            _mark(found, name, at, bad=why or "training could not resume from it")
    ordered = sorted(found.values(), key=lambda checkpoint: (checkpoint.step, checkpoint.generation or 0))
    return tuple(replace(c, counts=c.counts and counts(bounds, c.generation, c.step)) for c in ordered)


def best(found: Sequence[RunCheckpoint], metric: str, goal: Literal["Maximize", "Minimize"]) -> RunCheckpoint | None:
    """The best of those that count."""
    ranked = [
        (place, c)
        for c in found
        if c.counts and c.evaluation and (place := rank(c.evaluation.deciding, metric, goal, c.step, c.generation))
    ]
    return min(ranked, key=itemgetter(0), default=(None, None))[1]


def base_model(rundir: RunDir) -> RunCheckpoint | None:
    """The base model with its scores; None where it was not evaluated."""
    found = catalog.base(rundir)
    if found is None:
        return None
    result, content = found
    evaluation = None if result.skipped else _evaluation(result, content)
    return RunCheckpoint(BASE.name, BASE.step, BASE.generation, evaluation=evaluation, skipped=result.skipped or None)


def written(
    rundir: RunDir, base: RunCheckpoint | None, found: Sequence[RunCheckpoint], best: RunCheckpoint | None
) -> tuple[tuple[str, Completions], ...]:
    """What language models wrote for prompts: the base model, the first checkpoint, the best and the newest, each with
    what it is. Read of these alone."""
    counting = [one for one in found if one.counts and one.evaluation and one.evaluation.has_completions]
    ends = {id(one) for one in (*counting[:1], *counting[-1:])}
    chosen = [one for one in counting if id(one) in ends or one is best]
    if base is not None and base.evaluation is not None and base.evaluation.has_completions:
        chosen.insert(0, base)
    return tuple((heading(one.step, one is base, one is best), _completions(rundir, one)) for one in chosen)


def _completions(rundir: RunDir, checkpoint: RunCheckpoint) -> Completions:
    reference = CheckpointRef(name=checkpoint.name, step=checkpoint.step, generation=checkpoint.generation or 0)
    return evaluations.completions(catalog.merged_result(rundir, reference))


def _add_folders(found: Found, rundir: RunDir) -> None:
    for name in rundir.checkpoint_names():
        _add_committed(found, rundir, name)
    for one in rundir.all_set_aside():
        if one.is_bad:
            _mark(found, one.checkpoint, moment(one.at), step=one.step, bad=one.why or "set aside as damaged")
        else:
            _mark(found, one.checkpoint, moment(one.at), step=one.step, counts=False)


def _add_committed(found: Found, rundir: RunDir, name: str) -> None:
    try:
        manifest = rundir.manifest(name)
    except FileNotFoundError:
        return
    except Broken as error:
        _mark(found, name, None, bad=str(error), on_disk=True)
        return
    known = found.get((name, manifest.generation))
    if known is None:
        known = RunCheckpoint(name, manifest.step, manifest.generation, manifest.created_at, manifest.size)
    size = known.size if known.size is not None else manifest.size
    found[name, manifest.generation] = replace(known, on_disk=True, size=size)


def _add_evaluations(found: Found, rundir: RunDir, faults: list[str]) -> None:
    for folder in folders(rundir.evaluations):
        step = step_of(folder.name)
        if step is None:
            continue
        for word in filter(None, map(last_word, listed(folder))):
            key = (folder.name, word.generation)
            known = found.get(key) or RunCheckpoint(folder.name, step, word.generation)
            if (read := read_result(word)) is None:
                faults.append(f"evaluations/{folder.name}/{word.path.name} is not an evaluation; passed over")
                continue
            result, content = read
            if result.skipped:
                found[key] = replace(known, skipped=result.skipped)
            else:
                found[key] = replace(known, evaluation=_evaluation(result, content))


def _mark(
    found: Found,
    name: str,
    at: float | None,
    step: int | None = None,
    **changes: str | bool,
) -> None:
    """Change the checkpoint of that name that was there then; after a restart a name may come back."""
    known = [key for key in found if key[0] == name]
    if not known:
        step = step_of(name) if step is None else step
        if step is None:
            return
        found[name, None] = RunCheckpoint(name, step, None)
        known = [(name, None)]
    before = [key for key in known if at is None or (found[key].at or 0.0) <= at]
    key = max(before or known, key=lambda key: key[1] or 0)
    found[key] = replace(found[key], **changes)  # type: ignore[arg-type]


def _evaluation(result: Result, content: Mapping[str, Any]) -> RunEvaluation:
    return RunEvaluation(
        metrics={name: number(value) for name, value in mapping(content.get(METRICS)).items()},
        deciding=dict(result.deciding),
        validation=dict(result.validation),
        samples=whole(content.get("samples")),
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
