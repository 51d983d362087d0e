"""The numbers of a run for other tools: as CSV files, or as a log for TensorBoard.

Exported steps are those that the model contains, each once, whatever was repeated after a restart.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandem.rundir.durable import TEMPORARY
from tandem_cli.report.run import RunData

Table = tuple[tuple[str, ...], Iterable[Sequence[Any]]]
"""Names of columns, and rows."""
BASE_MODEL = "base-model"
"""Folder of the base model's log."""
Point = tuple[str, float, int, float]
"""Tag, value, step, time."""


def write_csv(run: RunData, folder: Path) -> list[Path]:
    """Write one CSV file for each table; returns their paths. Files of these names are replaced.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(folder / f"{name}.csv", columns, rows) for name, (columns, rows) in _tables(run).items()]


def write_tensorboard(run: RunData, folder: Path) -> int:
    """Write a log for `tensorboard --logdir`; returns the number of values in it.

    The base model is a run of its own beside it: TensorBoard draws the curves of all runs into one chart.

    Raises:
        OSError: the folder cannot be written to.
        ModuleNotFoundError: the library is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count, base = _log(folder, _points(run)), list(_base_points(run))
    return count + (_log(folder / BASE_MODEL, base) if base else 0)


def _log(folder: Path, points: Iterable[Point]) -> int:
    from tensorboard.summary import Writer

    writer, count = Writer(str(folder)), 0
    for tag, value, step, time in points:
        writer.add_scalar(tag, value, step, wall_time=time)
        count += 1
    writer.close()
    return count


def _tables(run: RunData) -> dict[str, Table]:
    steps, rates = run.model_steps, run.rates
    scored = [*([run.base] if run.base is not None else []), *run.checkpoints]
    evaluated = [(checkpoint, checkpoint.evaluation) for checkpoint in scored if checkpoint.evaluation is not None]
    metrics = sorted({name for _, evaluation in evaluated for name in evaluation.metrics})
    names = sorted({name for _, evaluation in evaluated for name in evaluation.validation})
    held_out = {name: f"validation{name[:1].upper()}{name[1:]}" for name in names}
    ranks = [(f"{use.kind}Busy", use.name, use.time, use.busy) for use in run.uses]
    ranks += [("workSeconds", series.rank, series.time, series.value) for series in run.busy]
    ranks += [("gpuMemoryBytes", series.rank, series.time, series.value) for series in run.memory]
    return {
        "steps": (
            ("step", "time", "loss", *steps.measures),
            zip(steps.step, steps.time, steps.loss, *steps.measures.values(), strict=True),
        ),
        "throughput": (
            ("time", "step", "samplesPerSecond", *(f"{phase}Seconds" for phase in rates.phases)),
            zip(rates.time, _steps_at(run), rates.throughput, *rates.phases.values(), strict=True),
        ),
        "evaluations": (
            ("checkpoint", "step", "generation", "time", "samples", *metrics, *held_out.values(), "counts", "best"),
            (
                (
                    *(checkpoint.name, checkpoint.step, checkpoint.generation),
                    *(evaluation.finished_at, evaluation.samples),
                    *(evaluation.metrics.get(name) for name in metrics),
                    *(evaluation.validation.get(name) for name in held_out),
                    *(int(checkpoint.counts and checkpoint is not run.base), int(checkpoint is run.best)),
                )
                for checkpoint, evaluation in evaluated
            ),
        ),
        "processes": (
            ("measure", "process", "time", "value"),
            ((kind, name, *pair) for kind, name, times, values in ranks for pair in zip(times, values, strict=True)),
        ),
        "generations": (
            ("generation", "openedAt", "closedAt", "worldSize", "resumedStep", "lastStep", "reason", "detail"),
            (
                (
                    *(generation.number, generation.opened_at, generation.closed_at, generation.world_size),
                    *(generation.resumed_step, generation.last_step, generation.reason, generation.detail),
                )
                for generation in run.generations
            ),
        ),
    }


def _points(run: RunData) -> Iterator[Point]:
    steps = run.model_steps
    for tag, values in {"loss": steps.loss, **steps.measures}.items():
        yield from _finite(f"training/{tag}", values, steps.step, steps.time)
    yield from _finite("training/samplesPerSecond", run.rates.throughput, _steps_at(run), run.rates.time)
    for checkpoint in run.checkpoints:
        if checkpoint.counts and checkpoint.evaluation is not None:
            time = checkpoint.evaluation.finished_at or checkpoint.written_at or run.started_at
            for name, value in checkpoint.evaluation.metrics.items():
                yield from _finite(f"evaluation/{name}", [value], [checkpoint.step], [time])
            for name, value in checkpoint.evaluation.validation.items():
                yield from _finite(f"validation/{name}", [value], [checkpoint.step], [time])


def _base_points(run: RunData) -> Iterator[Point]:
    """Generate the scores of the base model, as a line beside those of checkpoints."""
    if run.base is None or run.base.evaluation is None:
        return
    evaluated = [(c.step, c.evaluation) for c in run.checkpoints if c.counts and c.evaluation is not None]
    places = [(0, run.base.evaluation.finished_at or run.started_at)]
    places += [(step, evaluation.finished_at or run.started_at) for step, evaluation in evaluated]
    for name, value in run.base.evaluation.metrics.items():
        for step, time in places:
            yield from _finite(f"evaluation/{name}", [value], [step], [time])


def _finite(tag: str, values: Iterable[float], steps: Iterable[int], times: Iterable[float]) -> Iterator[Point]:
    for value, step, time in zip(values, steps, times, strict=True):
        if np.isfinite(value):
            yield tag, float(value), int(step), float(time)


def _steps_at(run: RunData) -> list[int]:
    """The last step before each line of the rate."""
    steps = run.model_steps
    if not len(steps):
        return [0] * len(run.rates)
    places = np.searchsorted(steps.time, run.rates.time, side="right") - 1
    return [int(steps.step[place]) if place >= 0 else 0 for place in places]


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([_cell(value) for value in row] for row in rows)
    return temporary.replace(path)


def _cell(value: Any) -> Any:
    """Format a cell: unknown values are empty, and so is a logged NaN."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ""
    return value.item() if isinstance(value, np.generic) else value
