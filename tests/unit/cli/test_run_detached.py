"""`tandem run --detach`: the terminal is free as soon as it is clear that the job can run, and the run goes on."""

import os
import subprocess
import sys
from pathlib import Path

from tandem_cli.local.run_output import log_names
from tests.support.waiting import until

SCRIPT = """
import os, sys
from pathlib import Path
from tandem.rundir.layout import RunDir
from tandem_cli.commands.run import detach
print("before")
detach(RunDir(Path("runs/a b")), "runs/a b")
sys.stdin.read()
print("goes on in session", os.getsid(0) == os.getpid(), flush=True)
"""


def test_the_command_ends_and_what_it_would_show_is_in_a_log(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a b"
    run.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    before, told = done.stdout.splitlines()
    assert before == "before"
    assert told.endswith("continues in the background: tandem status 'runs/a b' --watch; tandem stop 'runs/a b'")
    log = run / "log" / "run.txt"
    until(lambda: log.read_text() == "goes on in session True\n", "the rest of it")
    assert log_names(run) == [], "what the others print is shown once"
