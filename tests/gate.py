"""What a change has to pass before it lands: `.ci/run`, after `make setup`.

    python -m tests.gate                    the tests that the changes since the commit in `.ci/since` reach
    python -m tests.gate --since COMMIT     since another commit
    python -m tests.gate --all              all tests of every tier

Style, types, then each tier: the tests that the change reaches (tests/support/reach.py) and those marked `smoke`. All
stages run, also after one that failed, so that one run tells everything. The full tier is no part of it: the gate only
fails where a part of it has not run for `MAX_AGE` commits.

What the cluster needs is compiled at idle priority while the tests of processes run, which mostly wait.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from tests import full
from tests.support import ROOT, reach
from tests.support.tiers import MINUTE, WORKERS, Stage, newest, table

MAX_AGE = 200
"""Commits after which each part of the full tier has to run again."""
PREPARE_LOG = ROOT / "runs" / "e2e-prepare.log"


class Gate:
    """The stages of one run."""

    def __init__(self, since: str) -> None:
        """
        Args:
            since: the commit since which the change is judged; empty for all tests.
        """
        self.since = since
        self.stages: list[Stage] = []

    def run(self, name: str, *command: str) -> None:
        """One stage that is a command."""
        print(f"gate: {name}: {shlex.join(command)}", flush=True)
        began = time.monotonic()
        code = subprocess.run(command, cwd=ROOT).returncode
        self.stages.append(Stage(name, time.monotonic() - began, code))

    def tests(self, name: str, tier: str, *command: str) -> None:
        """One stage that is a tier of tests."""
        chosen = ("--touched-since", self.since) if self.since else ()
        print(f"gate: {name}: {shlex.join((*command, *chosen))}", flush=True)
        began, started = time.monotonic(), time.time()
        code = subprocess.run([*command, *chosen], cwd=ROOT).returncode
        seconds = time.monotonic() - began
        if code == pytest.ExitCode.NO_TESTS_COLLECTED and self.since:
            self.stages.append(Stage(name, seconds, 0, note="the change reaches no test of it"))
        else:
            self.stages.append(Stage(name, seconds, code, newest(tier, since=started)))


def main(arguments: Sequence[str]) -> int:
    """Run the gate, and print its table.

    Returns:
        1 if a stage failed.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.gate", description="What a change has to pass.")
    parser.add_argument("--since", metavar="COMMIT", default=reach.base(), help="default: the one in .ci/since")
    parser.add_argument("--all", action="store_true", help="all tests, whatever changed")
    parser.add_argument("--setup-seconds", type=float, default=0.0, help="what `make setup` took, for the table")
    options = parser.parse_args(arguments)
    gate = Gate("" if options.all else options.since)
    print(_what_changed(gate.since), flush=True)
    if options.setup_seconds:
        gate.stages.append(Stage("setup", options.setup_seconds, 0))

    PREPARE_LOG.parent.mkdir(exist_ok=True)
    prepare_command = (sys.executable, "-m", "tests.cluster", "--prepare")
    with PREPARE_LOG.open("wb") as log:
        prepare = subprocess.Popen(("chrt", "--idle", "0", *prepare_command), cwd=ROOT, stdout=log, stderr=log)
    try:
        pytest_command = (sys.executable, "-m", "pytest", *WORKERS)
        gate.run("types", "make", "type")
        gate.run("style, imports", "make", "lint")
        gate.tests("unit", "check", *pytest_command, "--tier=check", "tests/unit")
        # They mostly wait, so a third worker fits in.
        gate.tests("processes", "test", *pytest_command, "-n", "3", "--tier=test", "tests/integration")
        gate.run("programs, images", *prepare_command)
        gate.tests("cluster", "e2e", sys.executable, "-m", "tests.cluster")
        gate.tests("SLURM", "slurm", *pytest_command, "--tier=slurm", "tests/slurm")
    finally:
        prepare.kill()
        prepare.wait()
    gate.stages.append(_full_tier())
    print(table(gate.stages), flush=True)
    return 1 if any(stage.code for stage in gate.stages) else 0


def _what_changed(since: str) -> str:
    files = reach.changed_files(since) if since else None
    if files is None:
        return f"gate: all tests{f', since this clone does not know commit {since}' if since else ''}"
    rooms = ", ".join(sorted(reach.Change(files).rooms)) or "none"
    return f"gate: {len(files)} files changed since {since[:8]}; rooms that they reach: {rooms}"


def _full_tier() -> Stage:
    """A stage that fails where a part of the full tier has not run for too long, or never."""
    page = full.PAGE.read_text(encoding="utf-8")
    commits = {part.name: full.recorded_commit(page, part.name) for part in full.PARTS}
    ages = {name: _commits_since(commit) if commit else None for name, commit in commits.items()}
    late = [name for name, age in ages.items() if age is None or age > MAX_AGE]
    for name in late:
        last = "never ran" if ages[name] is None else f"last ran {ages[name]} commits ago"
        print(f'gate: full tier: {name!r} {last}: make e2e-full ARGS="--only {shlex.quote(name)}"', flush=True)
    oldest = max(age or 0 for age in ages.values())
    note = f"over {MAX_AGE} commits: {', '.join(late)}" if late else f"at most {oldest} commits"
    return Stage("age of full tier", 0.0, 1 if late else 0, note=note)


def _commits_since(commit: str) -> int:
    """How many commits came after one; 0 in a shallow clone that does not reach back to it."""
    counted = subprocess.run(
        ["git", "rev-list", "--count", f"{commit}..HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=MINUTE,
    )
    if counted.returncode == 0:
        return int(counted.stdout)
    shallow = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return 0 if shallow.stdout.strip() == "true" else MAX_AGE + 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
