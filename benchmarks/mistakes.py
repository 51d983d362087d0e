"""Time until a user sees an error message: `python -m benchmarks.mistakes [--only manifests|surroundings]`.

Each bad manifest goes through `tandem validate` and each job in bad surroundings through `tandem run`, as processes of
their own, without root's right to read everything. The table has the time from the start of the process to its end, its
processor time, the exit code and the first line of the message. The goal: every process ends within SECONDS, with 2,
with one message, and without a stack trace. If only the clock exceeds the limit and the processor time is below it,
other processes were busy: it is not judged.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.goals import Outcome, Verdict, exit_code
from tandem_launcher.local.placement import visible_gpus
from tests.support.bad_manifests import CASES as MANIFESTS
from tests.support.bad_surroundings import CASES as SURROUNDINGS
from tests.support.processes import TANDEM, environment
from tests.support.rights import AS_ANY_USER

SECONDS = 2.0


class Row(NamedTuple):
    """Result of one case."""

    name: str
    seconds: float
    processor_seconds: float
    code: int
    messages: int
    message: str
    trace: bool

    @property
    def outcome(self) -> Outcome:
        """Whether it meets the goal."""
        if self.code != 2 or self.messages != 1 or self.trace or self.processor_seconds > SECONDS:
            return Outcome.MISSED
        return Outcome.MET if self.seconds <= SECONDS else Outcome.UNJUDGED


def called(name: str, args: list[str], folder: Path) -> Row:
    """Run the command line once."""
    started, before = time.perf_counter(), os.times()
    command = [*AS_ANY_USER, TANDEM, *args]
    result = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    seconds, after = time.perf_counter() - started, os.times()
    own = after.children_user + after.children_system - before.children_user - before.children_system
    errors = result.stderr
    first = next(iter(errors.splitlines()), "")
    return Row(
        name, seconds, own, result.returncode, errors.count("error:"), first, "Traceback" in errors + result.stdout
    )


def manifests() -> Iterator[Row]:
    """Run the cases of bad manifests."""
    for case in MANIFESTS:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "job.yaml").write_bytes(case.text)
            yield called(case.name, ["validate", "job.yaml"], Path(folder))


def surroundings() -> Iterator[Row]:
    """Run the cases of good manifests in bad surroundings."""
    has_gpu = bool(visible_gpus(environment()))
    for case in SURROUNDINGS:
        if case.needs_no_gpu and has_gpu:
            continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "job.json").write_text(json.dumps(case.job(Path(folder))))
            yield called(case.name, ["run", "job.json"], Path(folder))


PARTS = {"manifests": manifests, "surroundings": surroundings}


def main() -> int:
    """Print the tables; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mistakes")
    parser.add_argument("--only", choices=PARTS)
    only = parser.parse_args().only
    all_rows = []
    for part in [only] if only else PARTS:
        rows = []
        print(f"\n{part}\n\n{'seconds':>7}  {'of CPU':>6}  code  {'case':32}  first line of the message")
        for row in PARTS[part]():
            rows.append(row)
            mark = "" if row.outcome is Outcome.MET else f"  <- {row.outcome.value}"
            print(
                f"{row.seconds:7.2f}  {row.processor_seconds:6.2f}  {row.code:4}  {row.name:32}  {row.message}{mark}",
                flush=True,
            )
        slowest = max(rows, key=lambda row: row.seconds)
        hardest = max(row.processor_seconds for row in rows)
        print(f"\n{len(rows)} {part}, the slowest in {slowest.seconds:.2f} s ({slowest.name}), {hardest:.2f} s of CPU")
        all_rows += rows
    counts = Counter(row.outcome for row in all_rows)
    summary = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome)
    print(f"\n{SECONDS:g} s, exit code 2, one message, no trace: {summary}")
    return exit_code(Verdict(row.outcome, row.name, row.message) for row in all_rows)


if __name__ == "__main__":
    sys.exit(main())
