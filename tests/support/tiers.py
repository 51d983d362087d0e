"""The tiers of the tests: what each may take, how long its last run took, and what of the full tier a change touches.

A test is in the tier of its folder; those marked `full` run in the full tier alone. A mark names the rooms whose change
makes a test necessary again: `pytest.mark.full("operator", "coordinator")`. Changes reach further than their own room,
to every room that imports it; who may import whom is checked by import-linter, so `REACH` can be trusted, and a test
compares it with those contracts.

A budget is of a quiet machine of known speed; a run is judged by its time there, which is its time here divided by the
machine's pace, measured before and after it (`pace.py`).

Rejected: durations of single tests as limits, and of tiers as they are (they fail where a machine is slow, and prove
nothing); choosing tests by coverage (a recovery that is never reached on a good day is covered by nothing).
"""

import ast
import json
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from tests.support import ROOT

MINUTE = 60.0
BUDGETS = {"check": 3 * MINUTE, "test": 10 * MINUTE, "e2e": 15 * MINUTE, "slurm": 4 * MINUTE}
"""Seconds at pace 1, with caches filled. `make test` runs the first two; `check` takes two of its three."""
TOLERANCE = 1.5
"""A tier that takes this many times its budget is over it: a pace is measured at two moments, and not all the time."""
RUNS = ROOT / "runs" / "tests"
KEPT = 20
"""Records of runs that stay, for each tier."""

REACH = {
    "core": {"core", "cli", "coordinator", "trainer", "evaluator", "operator"},
    "cli": {"cli"},
    "coordinator": {"coordinator", "cli"},
    "trainer": {"trainer", "evaluator"},
    "evaluator": {"evaluator"},
    "operator": {"operator"},
    "charts": {"charts"},
    "images": {"images"},
    "examples": {"examples"},
}
"""Which rooms may behave differently when one has changed."""
EVERYTHING = ("pyproject.toml", "constraints.txt", "tests/conftest.py")
"""A change of these touches every test."""


@dataclass
class Run:
    """How long a tier took once."""

    tier: str
    started: float
    """Unix time."""
    seconds: float
    passed: int
    failed: int
    skipped: int
    pace: float = 1.0
    """How many times longer work took on that machine then than on the one that the budgets mean."""
    files: dict[str, float] = field(default_factory=dict)
    """Seconds of each test file, the longest first. They add up to more than `seconds` where several run at a time."""
    slowest: dict[str, float] = field(default_factory=dict)
    """Seconds of the longest single tests."""

    @property
    def at_pace_1(self) -> float:
        """Seconds that it would have taken on the machine that the budgets mean."""
        return self.seconds / self.pace

    def keep(self, folder: Path = RUNS) -> Path:
        """Write it down, and let go of the oldest."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.tier}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime(self.started))}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        for old in _records(self.tier, folder)[:-KEPT]:
            old.unlink()
        return path


def newest(tier: str, folder: Path = RUNS) -> Run | None:
    """The last run of a tier; None if there is none."""
    found = _records(tier, folder)
    return Run(**json.loads(found[-1].read_text())) if found else None


def _records(tier: str, folder: Path) -> list[Path]:
    """The oldest first. The names of `e2e-full` begin with `e2e-`, too."""
    return sorted(folder.glob(f"{tier}-[0-9]*.json"))


def is_over(run: Run) -> bool:
    """Whether it took more than its tier may, by half."""
    return run.tier in BUDGETS and run.at_pace_1 > TOLERANCE * BUDGETS[run.tier]


def verdict(runs: Iterable[Run]) -> list[str]:
    """A line for each run."""
    lines = []
    for run in runs:
        budget = f"of {BUDGETS[run.tier] / MINUTE:.0f} min" if run.tier in BUDGETS else "without a budget"
        over = "  OVER BY MORE THAN HALF" if is_over(run) else ""
        longest = ", ".join(f"{Path(name).stem} {seconds:.0f} s" for name, seconds in list(run.files.items())[:3])
        took = f"{run.seconds / MINUTE:5.1f} min at pace {run.pace:.1f}, that is {run.at_pace_1 / MINUTE:.1f}"
        lines.append(f"{run.tier:6} {took} {budget}{over}; {run.passed} passed; {longest}")
    return lines


def imported(path: Path) -> frozenset[Path]:
    """The files below `tests/` and `benchmarks/` that a test file is made of, itself among them."""
    found: set[Path] = set()
    left = [path]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += _imports(one)
    return frozenset(found)


@cache
def _imports(path: Path) -> tuple[Path, ...]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    places = [ROOT / name.replace(".", "/") for name in names if name.split(".")[0] in ("tests", "benchmarks")]
    candidates = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return tuple(file for file in candidates if file.is_file())


def is_touched(path: Path, rooms: Collection[str], changed: Collection[str]) -> bool:
    """Whether a test has to run again.

    Args:
        path: its file.
        rooms: those that its mark names.
        changed: names of files, relative to the repository.
    """
    made_of = {str(file.relative_to(ROOT)) for file in imported(path)}
    # What lies beside the code of a package, such as pins of Go modules, belongs to it; packages within it do not.
    packages = [Path(name).parent for name in made_of if name.endswith("__init__.py")]
    folders = {f"{package}/" for package in packages if not list((ROOT / package).glob("*/__init__.py"))}
    reached = (REACH.get(name.partition("/")[0], set()) for name in changed)
    touched = set().union(*reached)
    return any(
        name in EVERYTHING or name in made_of or name.startswith(tuple(folders)) for name in changed
    ) or not touched.isdisjoint(rooms)


def changes_since(commit: str) -> list[str] | None:
    """Names of the files that differ from a commit; None if this clone does not know it."""
    known = subprocess.run(
        ["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True, timeout=60
    )
    if not commit or known.returncode != 0:
        return None
    listed = subprocess.run(
        ["git", "diff", "--name-only", commit], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return listed.stdout.splitlines()


def contracts(forbidden: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """What `REACH` has to be for rooms of code, from what each of them must not import."""
    return {
        room: {room} | {other for other, never in forbidden.items() if room != other and room not in never}
        for room in forbidden
    }


def main() -> int:
    """Print how long each tier took the last time; 1 if one was over its budget by half."""
    runs = [run for tier in BUDGETS if (run := newest(tier))]
    print("\n".join(verdict(runs)))
    return 1 if any(is_over(run) for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
