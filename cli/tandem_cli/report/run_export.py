"""The numbers of a run for other tools: as CSV files, or as a log that TensorBoard reads.

Steps are those that made the model, each once, whatever was done again after a restart.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandem.rundir.durable import TEMPORARY
from tandem_cli.report.run import Run

Table = tuple[tuple[str, ...], Iterable[Sequence[Any]]]
"""Names of columns, and rows."""
BASE_MODEL = "base-model"
"""Folder of its log."""
Point = tuple[str, float, int, float]
"""Tag, value, step, time."""


def write_csv(run: Run, folder: Path) -> list[Path]:
    """Write one file for each kind of thing; returns those written. Files of these names are replaced.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(folder / f"{name}.csv", columns, rows) for name, (columns, rows) in _tables(run).items()]


def write_tensorboard(run: Run, folder: Path) -> int:
    """Write a log that `tensorboard --logdir` reads; returns how many values are in it.

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


def _tables(run: Run) -> dict[str, Table]:
    steps, rates = run.counted, run.rates
    known = [*([run.base] if run.base is not None else []), *run.checkpoints]
    evaluated = [(one, one.evaluation) for one in known if one.evaluation is not None]
    metrics = sorted({name for _, evaluation in evaluated for name in evaluation.metrics})
    names = sorted({name for _, evaluation in evaluated for name in evaluation.validation})
    held_out = {name: f"validation{name[:1].upper()}{name[1:]}" for name in names}
    ranks = [(f"{use.kind}Busy", use.name, use.time, use.busy) for use in run.uses]
    ranks += [("workSeconds", one.rank, one.time, one.value) for one in run.busy]
    ranks += [("gpuMemoryBytes", one.rank, one.time, one.value) for one in run.memory]
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
                    *(one.name, one.step, one.generation, found.finished_at, found.samples),
                    *(found.metrics.get(name) for name in metrics),
                    *(found.validation.get(name) for name in held_out),
                    *(int(one.counts and one is not run.base), int(one is run.best)),
                )
                for one, found in evaluated
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
                    *(one.number, one.opened_at, one.closed_at, one.world_size, one.resumed_step, one.last_step),
                    *(one.reason, one.detail),
                )
                for one in run.generations
            ),
        ),
    }


def _points(run: Run) -> Iterator[Point]:
    steps = run.counted
    for tag, values in {"loss": steps.loss, **steps.measures}.items():
        yield from _known(f"training/{tag}", values, steps.step, steps.time)
    yield from _known("training/samplesPerSecond", run.rates.throughput, _steps_at(run), run.rates.time)
    for one in run.checkpoints:
        if one.counts and one.evaluation is not None:
            at = one.evaluation.finished_at or one.at or run.started_at
            for name, value in one.evaluation.metrics.items():
                yield from _known(f"evaluation/{name}", [value], [one.step], [at])
            for name, value in one.evaluation.validation.items():
                yield from _known(f"validation/{name}", [value], [one.step], [at])


def _base_points(run: Run) -> Iterator[Point]:
    """The scores of the base model, as a line beside those of checkpoints."""
    if run.base is None or run.base.evaluation is None:
        return
    found = [(one.step, one.evaluation) for one in run.checkpoints if one.counts and one.evaluation is not None]
    places = [(0, run.base.evaluation.finished_at or run.started_at)]
    places += [(step, evaluation.finished_at or run.started_at) for step, evaluation in found]
    for name, value in run.base.evaluation.metrics.items():
        for step, time in places:
            yield from _known(f"evaluation/{name}", [value], [step], [time])


def _known(tag: str, values: Iterable[float], steps: Iterable[int], times: Iterable[float]) -> Iterator[Point]:
    for value, step, time in zip(values, steps, times, strict=True):
        if np.isfinite(value):
            yield tag, float(value), int(step), float(time)


def _steps_at(run: Run) -> list[int]:
    """The step that was the last one at each line of the rate."""
    steps = run.counted
    if not len(steps):
        return [0] * len(run.rates)
    places = np.searchsorted(steps.time, run.rates.time, side="right") - 1
    return [int(steps.step[place]) if place >= 0 else 0 for place in places]


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    aside = path.with_name(f"{TEMPORARY}{path.name}")
    with aside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([_cell(value) for value in row] for row in rows)
    return aside.replace(path)


def _cell(value: Any) -> Any:
    """What is not known is empty; a NaN that was logged is not known either."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ""
    return value.item() if isinstance(value, np.generic) else value
