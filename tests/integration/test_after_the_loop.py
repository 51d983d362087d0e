"""The code after a session's loop belongs to the run: nobody ends it, and a run is complete when it is through."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.layout import RunDir
from tests.support import manifests
from tests.support.elastic import Elastic
from tests.support.ranks import Ranks, records
from tests.support.waiting import until

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from tandem_trainer.session import Session

folder = Path(os.environ["TANDEM_RUN_DIR"])
how = set(sys.argv[1:])

def after(session):
    with (folder / f"after-{session.rank}.txt").open("a") as said:
        print(os.environ.get("TANDEM_GENERATION"), file=said)
    while session.rank == 0 and "waits" in how and not (folder / "go").exists():
        time.sleep(0.02)
    if session.rank == 0 and (folder / "fail").exists():
        (folder / "fail").unlink()
        raise RuntimeError("there is no room for the report")

def train(session):
    model = session.distribute(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.keep(model, optimizer)
    for batch in session.batches(torch.rand(40, 4), 8, epochs=2):
        batch.mean(model(batch.data).squeeze(1) ** 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if "breaks" in how and batch.step == 3:
            break

if "without-with" in how:
    session = Session(seed=1)
    train(session)
    after(session)
else:
    with Session(seed=1) as session:
        train(session)
        if "inside" in how:
            after(session)
    if "inside" not in how:
        after(session)
"""
HOWS = ("inside", "outside", "without-with")


def quickly(how: str) -> list[Any]:
    """All of them, of which one is not left to the full tier."""
    full = pytest.mark.full("trainer", "coordinator")
    return [pytest.param(one, marks=() if one == how else full) for one in HOWS]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def has_begun(rundir: RunDir, times: int = 1) -> Callable[[], bool]:
    """Whether the code after the loop has begun so often, on the first rank."""
    said = rundir.path / "after-0.txt"
    return lambda: said.exists() and len(said.read_text().splitlines()) >= times


@pytest.mark.parametrize("how", quickly("without-with"))
def test_a_job_is_complete_when_the_code_after_the_loop_is_through(tmp_path: Path, script: str, how: str) -> None:
    with Elastic(tmp_path, trainer={"command": [script], "args": ["waits", how]}) as group:
        group.start("worker-0", "worker-1")
        until(has_begun(group.rundir), "the code after the loop", otherwise=lambda: group.output("worker-0"))
        assert group.rundir.committed()[0].step == 10, "the last checkpoint does not wait for it"
        assert not group.rundir.ended()
        (group.rundir.path / "go").touch()
        assert [agent.wait(60) for agent in group.agents.values()] == [0, 0]
        assert group.rundir.done()["final"]["step"] == 10


@pytest.mark.parametrize("how", quickly("inside"))
def test_code_after_the_loop_that_fails_is_tried_again_without_a_step(tmp_path: Path, script: str, how: str) -> None:
    with Elastic(tmp_path, trainer={"command": [script], "args": [how]}) as group:
        (group.rundir.path / "fail").touch()
        group.start("worker-0", "worker-1")
        assert [agent.wait(60) for agent in group.agents.values()] == [0, 0], group.output("worker-0")
        assert [record["step"] for record in records(group.rundir, "start")] == [0, 10]
        assert len(records(group.rundir, "step")) == 10
        assert has_begun(group.rundir, times=2)()
        assert "there is no room for the report" in group.output("worker-0")
        assert group.rundir.done() is not None


def test_a_loop_left_with_break_is_not_taken_up_again_for_the_code_after_it(tmp_path: Path, script: str) -> None:
    with Elastic(tmp_path, trainer={"command": [script], "args": ["outside", "breaks"]}) as group:
        (group.rundir.path / "fail").touch()
        group.start("worker-0", "worker-1")
        assert [agent.wait(60) for agent in group.agents.values()] == [0, 0], group.output("worker-0")
        assert [record["step"] for record in records(group.rundir, "start")] == [0, 4]
        assert len(records(group.rundir, "step")) == 4
        assert group.rundir.done()["totalSteps"] == 4


def test_without_an_agent_the_end_of_the_block_completes_the_run(tmp_path: Path, script: str) -> None:
    rundir = manifests.run_directory(tmp_path / "run", manifests.job("session", trainer={"command": [script]}))
    with Ranks(rundir, 2, script, "inside", "waits") as ranks:
        until(has_begun(rundir), "the code after the loop")
        assert not rundir.ended()
        (rundir.path / "go").touch()
        codes, output = ranks.finish()
    assert codes == [0, 0], output
    assert rundir.done() is not None
