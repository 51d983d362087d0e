"""`make e2e-full`: the full tier, which is everything that no other tier runs.

    python -m tests.full                   all of it; docs/development/testing.md gets the result of what passes
    python -m tests.full --only cluster    this part alone, or several
    python -m tests.full --touched         only what has to run again for the changes since the result of each part
    python -m tests.full --failed          only the tests that failed in the last run of a part, once they are mended

The parts: tests of real processes that are marked `full`, with those of strategies and of adapters apart, so that each
part takes less than half an hour on a quiet machine; those of SLURM and of the cluster; Hypothesis tests with random
examples; and a soak. Without a result of a part in docs/development/testing.md, or with one of a commit that this clone
does not know, every test of it is touched. What was touched and passed is added to the result of the part. A part of
which some tests failed has its result once these pass: of the commit at which all of it ran.
"""

import argparse
import json
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
FAILED = tiers.RUNS / "full-failed.json"
"""Runs of whole parts of which tests failed: commit, tests that passed and failed, and seconds, by part."""
ONLY_FAILED = ("--last-failed", "--last-failed-no-failures=none")
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


# An absolute path: pytest would take a relative one as one below this folder.
REST = [f"--ignore-glob={ROOT / 'tests' / 'integration' / pattern}" for pattern in (STRATEGIES, ADAPTERS)]
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


TIERS = {
    "processes": "full",
    "strategies": "full-strategies",
    "adapters": "full-adapters",
    "slurm": "full-slurm",
    "cluster": "e2e-full",
    "random examples": "random",
}
"""The tier of each part that counts its tests."""


def main(arguments: Sequence[str]) -> int:
    """Run the tier; 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.full", description="The full tier of the tests.")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--touched", action="store_true", help="only what the changes since the last results touch")
    some.add_argument("--failed", action="store_true", help="only what failed in the last run of each part")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    options = parser.parse_args(arguments)
    page = PAGE.read_text(encoding="utf-8")
    results, started, failed = [], time.time(), _failed_runs()
    for part in PARTS:
        if part.name not in options.only or (options.touched and not part.if_touched):
            continue
        if options.failed and part.name not in failed:
            continue
        print(f"full tier: {part.name}", flush=True)
        began = time.monotonic()
        since = recorded_commit(page, part.name)
        more = ("--touched-since", since) if options.touched else ONLY_FAILED if options.failed else ()
        code = subprocess.run([*part.command, *more], cwd=ROOT).returncode
        if options.touched and code == NOTHING_COLLECTED:
            print(f"full tier: no change since {since} touches a test of this part", flush=True)
            continue
        results.append((part.name, time.monotonic() - began, code))
    for name, seconds, code in results:
        print(f"full tier: {name:16} {seconds / tiers.MINUTE:5.1f} min  {'FAILED' if code else 'passed'}", flush=True)
    passed = [(name, seconds) for name, seconds, code in results if not code]
    if not (options.touched or options.failed):
        _record_failed({name: seconds for name, seconds, code in results if code}, dict(passed), started)
    if options.failed:
        _write_mended([name for name, _ in passed])
    elif passed:
        _write(passed, started, options.touched)
    return 1 if len(passed) < len(results) else 0


def _failed_runs() -> dict[str, dict[str, str | float]]:
    return json.loads(FAILED.read_text()) if FAILED.exists() else {}


def _record_failed(failed: Mapping[str, float], passed: Mapping[str, float], started: float) -> None:
    """Record whole parts of which some tests failed, and forget those that passed."""
    runs = {name: run for name, run in _failed_runs().items() if name not in passed}
    for name, seconds in failed.items():
        if name in TIERS and (run := tiers.newest(TIERS[name], since=started)) is not None:
            runs[name] = {"commit": _head(), "passed": run.passed, "failed": run.failed, "seconds": seconds}
    FAILED.parent.mkdir(parents=True, exist_ok=True)
    FAILED.write_text(json.dumps(runs, indent=1) + "\n")


def _write_mended(names: Sequence[str]) -> None:
    """Write the results of parts whose failed tests have passed by now."""
    runs, page = _failed_runs(), PAGE.read_text(encoding="utf-8")
    for name in names:
        run = runs.pop(name)
        page = mended(page, name, run, _today())
    PAGE.write_text(page, encoding="utf-8")
    FAILED.write_text(json.dumps(runs, indent=1) + "\n")


def mended(page: str, name: str, run: Mapping[str, str | float], day: str) -> str:
    """A page with the result of a part in it of which some tests failed at first, and have passed since.

    Args:
        run: the run of the whole part.
    """
    counts = {name: f"{run['passed']} passed; mended since: {run['failed']} passed"}
    return result(page, str(run["commit"]), day, [(name, float(run["seconds"]))], counts)


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
    counts: Mapping[str, int | str],
    touched: bool = False,
) -> str:
    """A page with the results of these parts in it; those of others stay.

    Args:
        counts: tests that passed, by part, where they were counted; or what to say of them.
        touched: only those ran that were touched since the result that stands there; the whole part's stays beside.
    """
    rows = recorded(page)
    for name, seconds in passed:
        count = counts.get(name)
        found = "passed" if count is None else f"{count} passed" if isinstance(count, int) else count
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
    # On a cluster of somebody's own no record is kept, and the newest would be an older one.
    runs = {name: tiers.newest(tier, since=started) for name, tier in TIERS.items()}
    counts = {name: run.passed for name, run in runs.items() if run}
    page = result(PAGE.read_text(encoding="utf-8"), _head(), _today(), passed, counts, touched)
    PAGE.write_text(page, encoding="utf-8")
    print(f"its result stands in {PAGE.relative_to(ROOT)}; commit it", flush=True)


def _head() -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
