"""Which tests fail by chance: `make chance`.

    python -m tests.support.chance                              all tests of processes, 3 times beside each load
    python -m tests.support.chance --times 20 --beside 2 --beside disk tests/integration/test_leaving.py
    python -m tests.support.chance --cluster                    those on the cluster in KUBECONFIG

Runs tests again and again on a quiet machine, beside processes that keep one or two cores busy, and beside a disk that
is written and synced without pause. A test that passes 19 times of 20 is a defect: of the product, if a user can meet
it, or else of the test. The output of each failed run stays in `runs/chance/`.

Rejected: pytest plugins that try a failed test again (they hide what this looks for), and random delays within the
product (a defect that they find has to be shown to happen without).
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support import ROOT
from tests.support.tiers import WORKERS

OUTPUT = ROOT / "runs" / "chance"
BESIDE = ("0", "1", "2", "disk")
"""Loads: processes that compute, or one that writes and syncs."""
WRITTEN_BYTES = 64 * 2**20


def main(arguments: Sequence[str]) -> int:
    """Run the tests, and print a table of what failed how often.

    Returns:
        1 if a test failed at all.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.support.chance", description="Which tests fail by chance.")
    parser.add_argument("--times", type=int, default=3, help="runs beside each load (default: 3)")
    parser.add_argument("--beside", action="append", choices=BESIDE, help="a load; may be repeated (default: all)")
    parser.add_argument("--cluster", action="store_true", help="tests on the cluster in KUBECONFIG")
    parser.add_argument("tests", nargs="*", help="what pytest shall run (default: all of the tier)")
    options, more = parser.parse_known_args(arguments)
    named = options.tests or ["tests/cluster" if options.cluster else "tests/integration"]
    if options.cluster and "KUBECONFIG" not in os.environ:
        parser.error('--cluster needs a cluster: make cluster, and eval "$(make cluster ARGS=env)"')
    OUTPUT.mkdir(parents=True, exist_ok=True)

    runs: Counter[str] = Counter()
    failures: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for number in range(1, options.times + 1):
        for load in options.beside or BESIDE:
            began = time.monotonic()
            with beside(load):
                failed = _run([*WORKERS, *named, *more], OUTPUT / f"{number:03}-beside-{load}.txt")
            runs[load] += 1
            for test in failed:
                failures[test][load] += 1
            words = ", ".join(failed) or "all passed"
            print(f"run {number}, beside {load}: {time.monotonic() - began:.0f} s, {words}", flush=True)
    print(table(runs, failures), flush=True)
    return 1 if failures else 0


@contextmanager
def beside(load: str) -> Iterator[None]:
    """Other work on this machine, until the block ends."""
    work = [_write] if load == "disk" else [_compute] * int(load)
    # A forked process would keep the test runner's pipes open.
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, daemon=True) for target in work]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def table(runs: Counter[str], failures: dict[str, Counter[str]]) -> str:
    """A row for each test that failed: how often beside each load, of how many runs."""
    if not failures:
        return f"no test failed in {runs.total()} runs"
    head = f"{'failed, of runs beside':24}" + "".join(f"{load:>10}" for load in runs)
    rows = [
        " " * 24 + "".join(f"{failures[test][load]:>4} of {runs[load]:<2}" for load in runs) + f"  {test}"
        for test in sorted(failures, key=lambda test: -failures[test].total())
    ]
    return "\n".join([head, *rows])


def _run(arguments: Sequence[str], output: Path) -> list[str]:
    """Names of the tests that failed. The output of a run in which none did is deleted."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        with output.open("wb") as file:
            command = [sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}"]
            code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file).returncode
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else iter(())
        failed = sorted(
            {
                f"{case.get('classname', '')}::{case.get('name', '')}"
                for case in cases
                if case.find("failure") is not None or case.find("error") is not None
            }
        )
    if code == 0:
        output.unlink()
    elif not failed:
        failed = [f"pytest ended with {code}: {output.relative_to(ROOT)}"]
    return failed


def _compute() -> None:
    number = 1
    while True:
        number = number * 3 % 1_000_003


def _write() -> None:
    with tempfile.TemporaryFile() as file:
        block = os.urandom(WRITTEN_BYTES)
        while True:
            file.seek(0)
            file.write(block)
            file.flush()
            os.fsync(file.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
