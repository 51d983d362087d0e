"""The results of a bench: one row for each variant, as a table, as CSV and as JSON.

A row is the median of its runs. Efficiency is the speed of n workers over n times that of one worker under the same
strategy, on the same kind of device.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from statistics import median
from typing import Any

from pydantic.alias_generators import to_camel
from rich.table import Table
from rich.text import Text

from tandem.formatting import UNKNOWN, count_noun, duration, number, share, size
from tandem_cli.bench.measurement import Measurement
from tandem_cli.bench.variants import Variant

SHORT_SECONDS = 2.0
"""Measured time below which a speed is not reliable."""
BUSY = 0.5
"""Load for each core above which a machine counts as busy."""
PERFECT = 1.05
"""Efficiency above which a row is explained: less is noise."""
NOT_REACHED = "not reached"


@dataclass(frozen=True)
class TrialRun:
    """One run of a variant."""

    variant: Variant
    round: int
    """Number of the round, from 1."""
    found: Measurement | None
    """None if the run failed."""
    why: str = ""
    """Reason of the failure."""
    run_dir: str = ""
    """Run directory with its logs."""


@dataclass(frozen=True)
class VariantRow:
    """A variant over all its runs. None means unknown."""

    strategy: str
    workers: int
    ranks: int
    """Ranks of all workers together."""
    runs: int
    """Number of measured runs."""
    samples_per_second: float | None = None
    """Median over the runs."""
    lowest_samples_per_second: float | None = None
    highest_samples_per_second: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: float | None = None
    """Resident memory of the rank that has most."""
    peak_gpu_memory_bytes: float | None = None
    """Memory that torch allocated on a GPU, likewise."""
    efficiency: float | None = None
    """Efficiency, 0 to 1, or more."""
    seconds_to_target: float | None = None
    """None if a run did not reach it."""
    samples_to_target: float | None = None
    final_loss: float | None = None
    failure: str = ""
    """Reasons of the runs that failed."""


@dataclass(frozen=True)
class Conditions:
    """Conditions of the measurement."""

    job: str
    steps: int
    """Steps of each run."""
    warm_up_steps: int
    """Steps of them that are excluded."""
    rounds: int
    cores: int
    """Cores available to the runs."""
    threads_per_rank: int
    load_before: float
    """Load of the machine before the first run: runnable processes, averaged over a minute."""
    target_loss: float | None = None
    left_out: tuple[str, ...] = ()
    """Combinations that the job does not support, each with the reason."""


@dataclass(frozen=True)
class BenchResults:
    """All results of a bench."""

    conditions: Conditions
    runs: tuple[TrialRun, ...]

    @cached_property
    def rows(self) -> list[VariantRow]:
        """Rows in the order in which their variants first ran."""
        variants = {(run.variant.strategy, run.variant.workers): run.variant for run in self.runs}
        plain = {
            key: _row(variant, [run for run in self.runs if run.variant == variant])
            for key, variant in variants.items()
        }
        return [_compared(row, plain.get((row.strategy, 1))) for row in plain.values()]

    @property
    def failed(self) -> list[TrialRun]:
        """Runs without a measurement."""
        return [run for run in self.runs if run.found is None]

    @property
    def on_gpus(self) -> bool:
        """Whether a run used GPUs."""
        return any(row.peak_gpu_memory_bytes is not None for row in self.rows)

    def csv(self) -> str:
        """Format as CSV, a line for each row."""
        names = [field.name for field in fields(VariantRow)]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([to_camel(name) for name in names])
        for row in self.rows:
            values = (getattr(row, name) for name in names)
            writer.writerow(["" if value is None else value for value in values])
        return text.getvalue()

    def record(self) -> dict[str, Any]:
        """Format as JSON: the conditions, the rows, and each run."""
        return {
            **_camel(asdict(self.conditions)),
            "rows": [_camel(asdict(row)) for row in self.rows],
            "runs": [
                {
                    "strategy": run.variant.strategy,
                    "workers": run.variant.workers,
                    "round": run.round,
                    "failure": run.why,
                    "runDir": run.run_dir,
                    **(_camel(asdict(run.found)) if run.found is not None else {}),
                }
                for run in self.runs
            ],
        }

    def table(self) -> Table:
        """Lay out as a table for people, without columns in which nothing is known."""
        rows = self.rows
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("strategy", "workers"):
            table.add_column(name, justify="left" if name == "strategy" else "right")
        lines = [[row.strategy, str(row.workers)] for row in rows]
        for head, cells in self._columns(rows):
            if any(cell != UNKNOWN for cell in cells):
                table.add_column(head, justify="right")
                for line, cell in zip(lines, cells, strict=True):
                    line.append(cell)
        for line in lines:
            table.add_row(*map(Text, line))
        return table

    def _columns(self, rows: Sequence[VariantRow]) -> Iterator[tuple[str, list[str]]]:
        speeds = [number(row.samples_per_second) if row.runs else "failed" for row in rows]
        yield "samples/s", speeds
        yield "lowest–highest", [_spread(row) if self.conditions.rounds > 1 else UNKNOWN for row in rows]
        yield "tokens/s", [number(row.tokens_per_second) for row in rows]
        yield "efficiency", [share(row.efficiency) for row in rows]
        yield "memory of a rank", [size(row.peak_memory_bytes) for row in rows]
        yield "GPU memory", [size(row.peak_gpu_memory_bytes) for row in rows]
        yield "loss", [number(row.final_loss) for row in rows]
        if self.conditions.target_loss is not None:
            yield f"time to {self.conditions.target_loss:g}", [_to_target(row) for row in rows]
            yield "samples to it", [number(row.samples_to_target) for row in rows]

    @property
    def notes(self) -> list[str]:
        """Notes on how to read the table, a sentence each."""
        conditions = self.conditions
        threads = count_noun(conditions.threads_per_rank, "thread")
        notes = [
            f"{count_noun(conditions.steps, 'step')} a run, without the first {conditions.warm_up_steps}; "
            f"{count_noun(conditions.rounds, 'round')}; {count_noun(conditions.cores, 'core')}, {threads} a rank"
        ]
        max_ranks = max((row.ranks for row in self.rows), default=0)
        if max_ranks > conditions.cores and not self.on_gpus:
            notes.append(
                f"{max_ranks} ranks share {count_noun(conditions.cores, 'core')}, so more ranks than that cannot add "
                f"speed"
            )
        if conditions.load_before > BUSY * conditions.cores and not self.on_gpus:
            notes.append(
                f"the machine was busy before the first run (load {conditions.load_before:.1f} on "
                f"{count_noun(conditions.cores, 'core')}), so times vary"
            )
        notes += [
            f"{row.strategy} on {count_noun(row.workers, 'worker')} has an efficiency above 100 %: one worker was "
            "slowed down, or smaller shares of the batch suit the caches; more --rounds on a quiet machine tell"
            for row in self.rows
            if row.efficiency is not None and row.efficiency > PERFECT
        ]
        shortest = min((run.found.seconds for run in self.runs if run.found is not None), default=SHORT_SECONDS)
        if shortest < SHORT_SECONDS:
            notes.append(f"the shortest run was measured over {duration(shortest)}; more --steps measure better")
        notes += [f"left out: {combination}" for combination in conditions.left_out]
        notes += [f"{run.variant.name}, round {run.round}: {run.why}; see {run.run_dir}/log" for run in self.failed]
        return notes


def _row(variant: Variant, runs: Sequence[TrialRun]) -> VariantRow:
    measurements = [run.found for run in runs if run.found is not None]
    failure = "; ".join(dict.fromkeys(run.why for run in runs if run.found is None))
    row = VariantRow(variant.strategy, variant.workers, variant.ranks, len(measurements), failure=failure)
    if not measurements:
        return row
    speeds = [measurement.samples_per_second for measurement in measurements]
    reached = all(measurement.seconds_to_target is not None for measurement in measurements)
    return replace(
        row,
        samples_per_second=median(speeds),
        lowest_samples_per_second=min(speeds),
        highest_samples_per_second=max(speeds),
        tokens_per_second=_median(measurement.tokens_per_second for measurement in measurements),
        peak_memory_bytes=_median(measurement.peak_memory for measurement in measurements),
        peak_gpu_memory_bytes=_median(measurement.peak_gpu_memory for measurement in measurements),
        seconds_to_target=_median(measurement.seconds_to_target for measurement in measurements) if reached else None,
        samples_to_target=_median(measurement.samples_to_target for measurement in measurements) if reached else None,
        final_loss=_median(measurement.final_loss for measurement in measurements),
    )


def _compared(row: VariantRow, single: VariantRow | None) -> VariantRow:
    """Add the efficiency to a row, if one worker of the strategy was measured on the same kind of device."""
    if single is None or not row.samples_per_second or not single.samples_per_second:
        return row
    if (row.peak_gpu_memory_bytes is None) != (single.peak_gpu_memory_bytes is None):
        return row
    return replace(row, efficiency=row.samples_per_second / (row.workers * single.samples_per_second))


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None


def _spread(row: VariantRow) -> str:
    if row.runs < 2:
        return UNKNOWN
    return f"{number(row.lowest_samples_per_second)}–{number(row.highest_samples_per_second)}"


def _to_target(row: VariantRow) -> str:
    if not row.runs:
        return UNKNOWN
    return NOT_REACHED if row.seconds_to_target is None else duration(row.seconds_to_target)


def _camel(values: Mapping[str, Any]) -> dict[str, Any]:
    return {to_camel(name): value for name, value in values.items()}
