"""`tandem plan` as a user calls it, with a task that is really traced: the documentation shows what it prints."""

import subprocess
import sys
from pathlib import Path

from tests.support import ROOT
from tests.support.documents import blocks
from tests.support.processes import environment


def test_the_documentation_shows_what_a_plan_of_a_job_is() -> None:
    command, shown, *_ = blocks(ROOT / "docs" / "plan.md")
    variables = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", command.text], cwd=ROOT, env=environment(variables), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip() == shown.text.rstrip()
    assert "plan: traces a step of 64 samples" in done.stderr
