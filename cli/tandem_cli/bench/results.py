"""All that a bench has measured: one row for each variant, as a table, as CSV and as JSON.

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

from tandem.formatting import UNKNOWN, duration, number, several, share, size
from tandem_cli.bench.measurement import Measurement
from tandem_cli.bench.variants import Variant

SHORT_SECONDS = 2.0
"""What was measured over less time says little."""
BUSY = 0.5
"""Processes that want to run, for each core, above which a machine counts as busy."""
NOT_REACHED = "not reached"


@dataclass(frozen=True)
class Run:
    """One run of a variant."""

    variant: Variant
    round: int
    """Counted from 1."""
    found: Measurement | None
    """None where it failed."""
    why: str = ""
    """Why it did."""
    run_dir: str = ""
    """Where its logs are."""


@dataclass(frozen=True)
class Row:
    """A variant over all its runs. None: not known."""

    strategy: str
    workers: int
    ranks: int
    """Of all workers together."""
    runs: int
    """That were measured."""
    samples_per_second: float | None = None
    """Median over the runs."""
    lowest_samples_per_second: float | None = None
    highest_samples_per_second: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: float | None = None
    """Resident, of the rank that has most."""
    peak_gpu_memory_bytes: float | None = None
    """Allocated by torch, likewise."""
    efficiency: float | None = None
    """0 to 1, or more."""
    seconds_to_target: float | None = None
    """None where a run did not reach it."""
    samples_to_target: float | None = None
    final_loss: float | None = None
    failure: str = ""
    """Why runs failed that did."""


@dataclass(frozen=True)
class Conditions:
    """Under which everything was measured."""

    job: str
    steps: int
    """Of each run."""
    warm_up_steps: int
    """Of them, that were left out."""
    rounds: int
    cores: int
    """That the runs could use."""
    threads_per_rank: int
    load_before: float
    """Processes that wanted to run before the first one, on average over a minute."""
    target_loss: float | None = None
    left_out: tuple[str, ...] = ()
    """Combinations that the job cannot take, each with the reason."""


@dataclass(frozen=True)
class Results:
    """What is written and shown."""

    conditions: Conditions
    runs: tuple[Run, ...]

    @cached_property
    def rows(self) -> list[Row]:
        """In the order in which the variants ran first."""
        variants = {(run.variant.strategy, run.variant.workers): run.variant for run in self.runs}
        plain = {key: _row(one, [run for run in self.runs if run.variant == one]) for key, one in variants.items()}
        return [_compared(row, plain.get((row.strategy, 1))) for row in plain.values()]

    @property
    def failed(self) -> list[Run]:
        """Runs without numbers."""
        return [run for run in self.runs if run.found is None]

    @property
    def on_gpus(self) -> bool:
        """Whether a run computed there."""
        return any(row.peak_gpu_memory_bytes is not None for row in self.rows)

    def csv(self) -> str:
        """A line for each row."""
        names = [field.name for field in fields(Row)]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([to_camel(name) for name in names])
        for row in self.rows:
            values = (getattr(row, name) for name in names)
            writer.writerow(["" if value is None else value for value in values])
        return text.getvalue()

    def record(self) -> dict[str, Any]:
        """For programs: the conditions, the rows, and each run."""
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
        """For people; columns in which nothing is known are left out."""
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

    def _columns(self, rows: Sequence[Row]) -> Iterator[tuple[str, list[str]]]:
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
        """What has to be known to read the table."""
        given = self.conditions
        threads = several(given.threads_per_rank, "thread")
        said = [
            f"{several(given.steps, 'step')} a run, without the first {given.warm_up_steps}; "
            f"{several(given.rounds, 'round')}; {several(given.cores, 'core')}, {threads} a rank"
        ]
        most = max((row.ranks for row in self.rows), default=0)
        if most > given.cores and not self.on_gpus:
            said.append(f"{most} ranks share {several(given.cores, 'core')}, so more ranks than that cannot add speed")
        if given.load_before > BUSY * given.cores and not self.on_gpus:
            said.append(
                f"the machine was busy before the first run (load {given.load_before:.1f} on "
                f"{several(given.cores, 'core')}), so times vary"
            )
        shortest = min((run.found.seconds for run in self.runs if run.found is not None), default=SHORT_SECONDS)
        if shortest < SHORT_SECONDS:
            said.append(f"the shortest run was measured over {duration(shortest)}; more --steps measure better")
        said += [f"left out: {one}" for one in given.left_out]
        said += [f"{run.variant.name}, round {run.round}: {run.why}; see {run.run_dir}/log" for run in self.failed]
        return said


def _row(variant: Variant, runs: Sequence[Run]) -> Row:
    found = [run.found for run in runs if run.found is not None]
    why = "; ".join(dict.fromkeys(run.why for run in runs if run.found is None))
    row = Row(variant.strategy, variant.workers, variant.ranks, len(found), failure=why)
    if not found:
        return row
    speeds = [one.samples_per_second for one in found]
    reached = all(one.seconds_to_target is not None for one in found)
    return replace(
        row,
        samples_per_second=median(speeds),
        lowest_samples_per_second=min(speeds),
        highest_samples_per_second=max(speeds),
        tokens_per_second=_median(one.tokens_per_second for one in found),
        peak_memory_bytes=_median(one.peak_memory for one in found),
        peak_gpu_memory_bytes=_median(one.peak_gpu_memory for one in found),
        seconds_to_target=_median(one.seconds_to_target for one in found) if reached else None,
        samples_to_target=_median(one.samples_to_target for one in found) if reached else None,
        final_loss=_median(one.final_loss for one in found),
    )


def _compared(row: Row, single: Row | None) -> Row:
    """The row with its efficiency, where one worker of the strategy was measured on the same kind of device."""
    if single is None or not row.samples_per_second or not single.samples_per_second:
        return row
    if (row.peak_gpu_memory_bytes is None) != (single.peak_gpu_memory_bytes is None):
        return row
    return replace(row, efficiency=row.samples_per_second / (row.workers * single.samples_per_second))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _spread(row: Row) -> str:
    if row.runs < 2:
        return UNKNOWN
    return f"{number(row.lowest_samples_per_second)}–{number(row.highest_samples_per_second)}"


def _to_target(row: Row) -> str:
    if not row.runs:
        return UNKNOWN
    return NOT_REACHED if row.seconds_to_target is None else duration(row.seconds_to_target)


def _camel(values: Mapping[str, Any]) -> dict[str, Any]:
    return {to_camel(name): value for name, value in values.items()}
