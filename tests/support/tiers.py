"""The tiers of the tests: what each may take, and how long its last runs took.

A budget is of a quiet machine of known speed; a run is judged by its time there, which is its time here divided by the
machine's pace, measured before and after it (`pace.py`). A budget warns and never refuses a change: that every test
passed is worth more than the minute that it took too long.

Rejected: durations of single tests as limits, and of tiers as they are (they fail where a machine is slow, and prove
nothing); budgets that fail a run (a slow disk lost a change whose tests had all passed).
"""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support import ROOT

MINUTE = 60.0
BUDGETS = {"check": 3 * MINUTE, "test": 5 * MINUTE, "e2e": 8 * MINUTE, "slurm": 3 * MINUTE}
"""Seconds at pace 1, with filled caches, of all tests of a tier. `make test` runs the first two."""
WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
"""Options of pytest: two workers, each with whole files, for what a file shares is made once."""
RUNS = ROOT / "runs" / "tests"
MAX_RECORDS = 20
"""Records of runs that stay, for each tier."""


@dataclass
class Run:
    tier: str
    started: float
    """Unix time."""
    seconds: float
    passed: int
    failed: int
    skipped: int
    pace: float = 1.0
    """How many times longer work took on that machine then than on the one that the budgets mean."""
    deselected: int = 0
    """Tests of the tier that the change does not reach."""
    files: dict[str, float] = field(default_factory=dict)
    """Seconds of each test file, the longest first. They add up to more than `seconds` where several run at a time."""
    slowest: dict[str, float] = field(default_factory=dict)
    """Seconds of the longest single tests."""

    @property
    def at_pace_1(self) -> float:
        """Seconds that it would have taken on the machine that the budgets mean."""
        return self.seconds / self.pace

    @property
    def over(self) -> float:
        """How many times its budget it took; 0 for a tier without one."""
        return self.at_pace_1 / BUDGETS[self.tier] if self.tier in BUDGETS else 0.0

    def save(self, folder: Path = RUNS) -> Path:
        """Write the record, and delete the oldest ones of its tier."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.tier}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime(self.started))}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        for old in _records(self.tier, folder)[:-MAX_RECORDS]:
            old.unlink()
        return path


def newest(tier: str, since: float = 0.0, folder: Path = RUNS) -> Run | None:
    """The last run of a tier that began after `since`, in Unix time; None if there is none."""
    records = _records(tier, folder)
    run = Run(**json.loads(records[-1].read_text())) if records else None
    return run if run and run.started >= since else None


def _records(tier: str, folder: Path) -> list[Path]:
    """Records of a tier, the oldest first. The names of `e2e-full` begin with `e2e-`, too."""
    return sorted(folder.glob(f"{tier}-[0-9]*.json"))


@dataclass(frozen=True)
class Stage:
    """One row of the table that a gate ends with."""

    name: str
    seconds: float
    code: int
    """Exit code: 0 if it passed."""
    run: Run | None = None
    """The record of its tests, if it ran some."""
    note: str = ""

    @property
    def row(self) -> tuple[str, str, str, str, str]:
        """Name, tests, time, time at pace 1 of its budget, result."""
        result = "FAILED" if self.code else "passed"
        if self.run is None:
            return self.name, "", _minutes(self.seconds), "", f"{result}{self.note and f', {self.note}'}"
        run = self.run
        count = run.passed + run.failed + run.skipped
        budget = f"{_minutes(run.at_pace_1)} of {_minutes(BUDGETS[run.tier])}" if run.tier in BUDGETS else ""
        warning = f", OVER ITS BUDGET {run.over:.1f} times" if run.over > 1 else ""
        tests = f"{count} of {count + run.deselected}"
        return self.name, tests, _minutes(self.seconds), budget, f"{result}{warning}{self.note and f', {self.note}'}"


def table(stages: Iterable[Stage]) -> str:
    stages = list(stages)
    head = ("stage", "tests", "minutes", "at pace 1", "result")
    failed = [stage.name for stage in stages if stage.code]
    total = ("all", "", _minutes(sum(one.seconds for one in stages)), "", "FAILED" if failed else "passed")
    rows = [head, *(stage.row for stage in stages), total]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _minutes(seconds: float) -> str:
    return f"{seconds / MINUTE:.1f}"
