"""How long a user waits to be told of a mistake: `python -m tests.bench.mistakes [--only manifests|surroundings]`.

Each bad manifest goes through `tandem validate` and each job in bad surroundings through `tandem run`, as processes of
their own. The table has the time from the start of the process to its end, the exit code and the first line of what was
said. The goal: every one ends within SECONDS, with 2, with one message, and without a stack trace.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.bad_manifests import CASES as MANIFESTS
from tests.support.bad_surroundings import CASES as SURROUNDINGS
from tests.support.processes import TANDEM, environment

from tandem.local.placement import visible_gpus

SECONDS = 2.0


class Row(NamedTuple):
    """How one of them went."""

    name: str
    seconds: float
    code: int
    messages: int
    said: str
    trace: bool

    @property
    def is_good(self) -> bool:
        """Whether it meets the goal."""
        return self.seconds <= SECONDS and self.code == 2 and self.messages == 1 and not self.trace


def called(name: str, words: list[str], folder: Path) -> Row:
    """One call of the command line."""
    began = time.perf_counter()
    result = subprocess.run([TANDEM, *words], cwd=folder, env=environment(), capture_output=True, text=True)
    seconds = time.perf_counter() - began
    told = result.stderr
    first = next(iter(told.splitlines()), "")
    return Row(name, seconds, result.returncode, told.count("error:"), first, "Traceback" in told + result.stdout)


def manifests() -> Iterator[Row]:
    """Bad manifests."""
    for case in MANIFESTS:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "job.yaml").write_bytes(case.text)
            yield called(case.name, ["validate", "job.yaml"], Path(folder))


def surroundings() -> Iterator[Row]:
    """Good manifests in bad surroundings."""
    has_gpu = bool(visible_gpus(environment()))
    for case in SURROUNDINGS:
        if case.needs_no_gpu and has_gpu:
            continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "job.json").write_text(json.dumps(case.job(Path(folder))))
            yield called(case.name, ["run", "job.json"], Path(folder))


PARTS = {"manifests": manifests, "surroundings": surroundings}


def main() -> int:
    """Print the tables; 1 if one of the rows misses the goal."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.mistakes")
    parser.add_argument("--only", choices=PARTS)
    only = parser.parse_args().only
    missed = 0
    for part in [only] if only else PARTS:
        rows = []
        print(f"\n{part}\n\n{'seconds':>7}  code  {'case':32}  first line of what is said")
        for row in PARTS[part]():
            rows.append(row)
            mark = "" if row.is_good else "  <- missed"
            print(f"{row.seconds:7.2f}  {row.code:4}  {row.name:32}  {row.said}{mark}", flush=True)
        slowest = max(rows, key=lambda row: row.seconds)
        missed += sum(not row.is_good for row in rows)
        print(f"\n{len(rows)} {part}, the slowest in {slowest.seconds:.2f} s ({slowest.name})")
    print(f"\n{missed} missed the goal: {SECONDS:g} s, exit code 2, one message, no trace")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
