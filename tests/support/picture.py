"""The picture on top of README, from a real run: `make picture`. It is taken only if bars and checkpoints agree."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from tandem_cli.report.figures.processors import at_work
from tandem_cli.report.run import RunData
from tandem_cli.report.writing import write
from tests.support import ROOT

MANIFEST = ROOT / "examples/digits.yaml"
TARGET = ROOT / "docs/images/digits.png"
SLACK_SECONDS = 0.1
"""A checkpoint is on the disk a moment after its step."""


def disagreements(run: RunData) -> list[str]:
    """What in the picture would not be so: a checkpoint where no rank is at work, or one that nobody evaluated."""
    found = []
    for use in run.uses:
        drawn = at_work(use, run.generations)
        known = np.flatnonzero(np.isfinite(drawn.busy))
        if use.kind != "trainer" or not len(known):
            continue
        begin, end = drawn.time[max(0, known[0] - 1)], drawn.time[known[-1]] + SLACK_SECONDS
        found += [
            f"rank {use.name} is at work from {begin - run.started_at:.2f} s to {end - run.started_at:.2f} s, and "
            f"{c.name} is of {c.at - run.started_at:.2f} s"
            for c in run.checkpoints
            if c.at is not None and not begin <= c.at <= end
        ]
    return found + [f"{c.name} was not evaluated" for c in run.checkpoints if c.counts and c.evaluation is None]


def main() -> int:
    """Run, report, look, and put the picture into its place."""
    runs = ROOT / "runs"
    tandem = Path(sys.executable).parent / "tandem"
    subprocess.run([tandem, "run", MANIFEST, "--fresh"], cwd=ROOT, check=True)
    report = write(runs / "digits")
    if wrong := disagreements(report.run):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    picture = next(path for path in report.pictures if path.name == "processors.png")
    shutil.copyfile(picture, TARGET)
    print(f"wrote {TARGET.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
