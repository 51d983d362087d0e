"""`make e2e-full`: the full tier, which is everything that no other tier runs.

    python -m tests.full              all of it; if it passes, docs/development/testing.md gets its result
    python -m tests.full --touched    only what has to run again for the changes since that result

The parts: tests of real processes and of the cluster that are marked `full`, Hypothesis tests with random examples,
and a soak. Without a result in docs/development/testing.md, or with one of a commit that this clone does not know,
every test is touched.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support import ROOT, tiers

PAGE = ROOT / "docs" / "development" / "testing.md"
BEGIN, END = "<!-- the last result of the full tier -->", "<!-- end of the result -->"
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
WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
PARTS = (
    Part("processes", (*PYTEST, "tests/unit", "tests/integration", "-m", "full", *WORKERS, "--tier=full")),
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
    parser.add_argument("--touched", action="store_true", help="only what the changes since the last result touch")
    options = parser.parse_args(arguments)
    since = recorded_commit(PAGE.read_text(encoding="utf-8"))
    failed, results = [], []
    for part in PARTS:
        if options.touched and not part.if_touched:
            continue
        print(f"full tier: {part.name}", flush=True)
        began = time.monotonic()
        more = ("--touched-since", since) if options.touched and part.if_touched else ()
        code = subprocess.run([*part.command, *more], cwd=ROOT).returncode
        if options.touched and code == NOTHING_COLLECTED:
            print(f"full tier: no change since {since} touches a test of this part", flush=True)
            continue
        failed += [part.name] if code else []
        results.append((part.name, time.monotonic() - began, code))
    for name, seconds, code in results:
        print(f"full tier: {name:16} {seconds / tiers.MINUTE:5.1f} min  {'FAILED' if code else 'passed'}", flush=True)
    if failed:
        return 1
    if not options.touched:
        _write(results)
    return 0


def recorded_commit(page: str) -> str:
    """The commit of the last result; empty if there is none."""
    _, _, rest = page.partition(BEGIN)
    found = re.search(r"`([0-9a-f]{7,40})`", rest.partition(END)[0])
    return found[1] if found else ""


def result(commit: str, day: str, results: Sequence[tuple[str, float, int]], counts: dict[str, int]) -> str:
    """What stands between the marks."""
    lines = [BEGIN, f"The last whole run passed on {day}, at commit `{commit}`:", ""]
    lines += ["| part | result | time |", "|---|---|---|"]
    for name, seconds, _ in results:
        found = f"{counts[name]} passed" if name in counts else "no violation"
        lines.append(f"| {name} | {found} | {seconds / tiers.MINUTE:.0f} min |")
    return "\n".join([*lines, END])


def _write(results: Sequence[tuple[str, float, int]]) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    tier = {"processes": "full", "cluster": "e2e-full", "random examples": "random"}
    runs = {name: tiers.newest(tier[name]) for name in tier}
    counts = {name: run.passed for name, run in runs.items() if run}
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    PAGE.write_text(before + result(commit, day, results, counts) + after, encoding="utf-8")
    print(f"its result stands in {PAGE.relative_to(ROOT)}; commit it", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
