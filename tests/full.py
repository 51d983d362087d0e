"""`make e2e-full`: the full tier, which is everything that no other tier runs.

    python -m tests.full                   all of it; docs/development/testing.md gets the result of what passes
    python -m tests.full --only cluster    this part alone, or several
    python -m tests.full --touched         only what has to run again for the changes since the result of each part

The parts: tests of real processes that are marked `full`, with those of strategies and of adapters apart, so that each
part takes less than half an hour on a quiet machine; those of SLURM and of the cluster; Hypothesis tests with random
examples; and a soak. Without a result of a part in docs/development/testing.md, or with one of a commit that this clone
does not know, every test of it is touched. What was touched and passed is added to the result of the part.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.support import ROOT, tiers
from tests.support.tiers import WORKERS

PAGE = ROOT / "docs" / "development" / "testing.md"
BEGIN, END = "<!-- the last result of the full tier -->", "<!-- end of the result -->"
TOUCHED = "; touched since: "
"""Between what a whole part found, and what ran again after it."""
NOTHING_COLLECTED = 5
SOAK_SECONDS = 200


@dataclass(frozen=True)
class Part:
    """One of the things to run."""

    name: str
    command: tuple[str, ...]
    if_touched: bool = True
    """Whether `--touched` runs it, too, as far as it is touched."""


PYTEST = (sys.executable, "-m", "pytest")
SOAK = (sys.executable, "-m", "tests.soak", "--seconds", str(SOAK_SECONDS))
STRATEGIES, ADAPTERS = "test_*strategies*.py", "test_adapter*.py"
"""Files in tests/integration that are parts of their own."""


def of_processes(tier: str, *paths: str) -> tuple[str, ...]:
    """The command of a part of the tests of real processes."""
    return (*PYTEST, *paths, "-m", "full", *WORKERS, f"--tier={tier}")


def _files(pattern: str) -> list[str]:
    return sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "integration").glob(pattern))


REST = [f"--ignore-glob=*/tests/integration/{pattern}" for pattern in (STRATEGIES, ADAPTERS)]
PARTS = (
    Part("processes", of_processes("full", "tests/unit", "tests/integration", *REST)),
    Part("strategies", of_processes("full-strategies", *_files(STRATEGIES))),
    Part("adapters", of_processes("full-adapters", *_files(ADAPTERS))),
    Part("slurm", (*PYTEST, "tests/slurm", "-m", "full", *WORKERS, "--tier=full-slurm")),
    Part("cluster", (sys.executable, "-m", "tests.cluster", "--full")),
    Part(
        "random examples",
        (*PYTEST, "tests/unit", "-m", "property", "--hypothesis-profile=random", *WORKERS, "--tier=random"),
        if_touched=False,
    ),
    Part("soak", (*SOAK, "--job", "task"), if_touched=False),
    Part("soak, own script", (*SOAK, "--job", "session"), if_touched=False),
)


def main(arguments: Sequence[str]) -> int:
    """Run the tier; 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.full", description="The full tier of the tests.")
    parser.add_argument("--touched", action="store_true", help="only what the changes since the last results touch")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    options = parser.parse_args(arguments)
    page = PAGE.read_text(encoding="utf-8")
    results, started = [], time.time()
    for part in PARTS:
        if part.name not in options.only or (options.touched and not part.if_touched):
            continue
        print(f"full tier: {part.name}", flush=True)
        began = time.monotonic()
        since = recorded_commit(page, part.name)
        more = ("--touched-since", since) if options.touched else ()
        code = subprocess.run([*part.command, *more], cwd=ROOT).returncode
        if options.touched and code == NOTHING_COLLECTED:
            print(f"full tier: no change since {since} touches a test of this part", flush=True)
            continue
        results.append((part.name, time.monotonic() - began, code))
    for name, seconds, code in results:
        print(f"full tier: {name:16} {seconds / tiers.MINUTE:5.1f} min  {'FAILED' if code else 'passed'}", flush=True)
    passed = [(name, seconds) for name, seconds, code in results if not code]
    if passed:
        _write(passed, started, options.touched)
    return 1 if len(passed) < len(results) else 0


def recorded_commit(page: str, part: str) -> str:
    """The commit of the last result of a part; empty if there is none."""
    row = recorded(page).get(part, "")
    found = re.search(r"`([0-9a-f]{7,40})`", row)
    return found[1] if found else ""


def recorded(page: str) -> dict[str, str]:
    """The row of each part that has one."""
    _, _, rest = page.partition(BEGIN)
    rows = [line for line in rest.partition(END)[0].splitlines() if line.startswith("| ")]
    return {row.split("|")[1].strip(): row for row in rows[1:]}


def result(
    page: str,
    commit: str,
    day: str,
    passed: Sequence[tuple[str, float]],
    counts: Mapping[str, int],
    touched: bool = False,
) -> str:
    """A page with the results of these parts in it; those of others stay.

    Args:
        counts: tests that passed, by part, where they were counted.
        touched: only those ran that were touched since the result that stands there; the whole part's stays beside.
    """
    rows = recorded(page)
    for name, seconds in passed:
        found = f"{counts[name]} passed" if name in counts else "passed"
        if touched and name in rows:
            whole = rows[name].split("|")[2].partition(TOUCHED)[0].strip()
            found = f"{whole}{TOUCHED}{found}"
        rows[name] = f"| {name} | {found} | {seconds / tiers.MINUTE:.0f} min | {day} | `{commit}` |"
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = ["| part | result | time | day | commit |", "|---|---|---|---|---|"]
    table += [rows[part.name] for part in PARTS if part.name in rows]
    return before + "\n".join([BEGIN, "The last run of each part that passed:", "", *table, END]) + after


def _write(passed: Sequence[tuple[str, float]], started: float, touched: bool) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    tier = {
        "processes": "full",
        "strategies": "full-strategies",
        "adapters": "full-adapters",
        "slurm": "full-slurm",
        "cluster": "e2e-full",
        "random examples": "random",
    }
    # On a cluster of somebody's own no record is kept, and the newest would be an older one.
    runs = {name: tiers.newest(tier[name], since=started) for name in tier}
    counts = {name: run.passed for name, run in runs.items() if run}
    day = time.strftime("%Y-%m-%d", time.gmtime())
    page = result(PAGE.read_text(encoding="utf-8"), commit, day, passed, counts, touched)
    PAGE.write_text(page, encoding="utf-8")
    print(f"its result stands in {PAGE.relative_to(ROOT)}; commit it", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
