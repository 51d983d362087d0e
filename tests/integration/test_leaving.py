"""How a script with a session ends before it is complete: what it has written is kept, and what it owes is done."""

import signal
from pathlib import Path

import pytest

from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import RunDir
from tests.support import manifests
from tests.support.ranks import Ranks, losses
from tests.support.waiting import until

LINES = 100
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from tandem_trainer.session import Session

folder, rank = Path(os.environ["TANDEM_RUN_DIR"]), os.environ["RANK"]
lines = open(folder / f"lines-{rank}.txt", "w")
print("a line\\n" * 99, file=lines)
try:
    with Session(seed=1) as session:
        model = session.distribute(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.keep(model, optimizer)
        for batch in session.batches(torch.rand(40, 4), 8, epochs=1000):
            batch.mean(model(batch.data).squeeze(1) ** 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
            if (folder / f"fail-{rank}").exists():
                raise KeyError("the label is not known")
finally:
    (folder / f"finally-{rank}").touch()
    while (folder / f"hangs-{rank}").exists():
        time.sleep(0.02)
"""


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    (tmp_path / "script.py").write_text(SCRIPT)
    return manifests.run_directory(tmp_path / "run", manifests.job("session", trainer={"command": ["script.py"]}))


def ranks_at_work(rundir: RunDir, size: int) -> Ranks:
    ranks = Ranks(rundir, size, str(rundir.path.parent / "script.py"))
    until(lambda: len(losses(rundir)) > 2, "steps")
    return ranks


def lines(rundir: RunDir, rank: int) -> int:
    return len((rundir.path / f"lines-{rank}.txt").read_text().splitlines())


def test_asked_to_leave_it_keeps_what_it_wrote_and_runs_its_finally(rundir: RunDir) -> None:
    with ranks_at_work(rundir, 2) as ranks:
        ranks.processes[1].send_signal(signal.SIGTERM)
        codes, output = ranks.finish()
    assert codes == [ExitCode.PREEMPTED] * 2, output
    for rank in (0, 1):
        assert lines(rundir, rank) == LINES
        assert (rundir.path / f"finally-{rank}").exists()


def test_after_an_error_of_its_own_too_and_who_lost_a_peer_keeps_what_it_wrote(rundir: RunDir) -> None:
    with ranks_at_work(rundir, 2) as ranks:
        (rundir.path / "fail-1").touch()
        codes, output = ranks.finish()
    assert codes == [ExitCode.PEER_LOST, ExitCode.FAILED], output
    assert output.count("KeyError: 'the label is not known'") == 1
    assert [lines(rundir, rank) for rank in (0, 1)] == [LINES] * 2
    assert (rundir.path / "finally-1").exists()


@pytest.mark.full("core", "trainer")
def test_a_finally_that_hangs_keeps_the_others_from_nothing(rundir: RunDir) -> None:
    with ranks_at_work(rundir, 2) as ranks:
        (rundir.path / "hangs-1").touch()
        (rundir.path / "fail-1").touch()
        codes, output = ranks.finish()
    assert codes == [ExitCode.PEER_LOST, ExitCode.FAILED], output
    assert lines(rundir, 1) == LINES


def test_alone_an_error_ends_it_as_it_ends_a_script(rundir: RunDir) -> None:
    (rundir.path / "fail-0").touch()
    with Ranks(rundir, 1, str(rundir.path.parent / "script.py")) as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.FAILED], output
    assert "KeyError" in output
    assert lines(rundir, 0) == LINES
    assert (rundir.path / "finally-0").exists()
