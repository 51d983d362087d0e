"""A validation in a session's loop takes as long as it takes."""

from pathlib import Path

import pytest

from tests.support.elastic import Elastic
from tests.support.ranks import records

HANG_SECONDS = 2.0
SCRIPT = """
import time
import torch
from tandem_trainer.session import Session

with Session(seed=1) as session:
    model = session.distribute(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.keep(model, optimizer)
    for batch in session.batches(torch.rand(80, 4), 8, epochs=2):
        batch.mean(model(batch.data).squeeze(1) ** 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if batch.step < 15:
            time.sleep(0.2)
        elif session.rank == 0 and batch.step == 15:
            with session.pausing("validation"):
                time.sleep(8.0)
"""


@pytest.mark.full("coordinator", "trainer")
def test_one_rank_validates_for_longer_than_the_hang_time_and_the_others_wait_for_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Elastic(tmp_path, trainer={"command": [str(script)]}, elasticity={"hangSeconds": HANG_SECONDS}) as group:
        group.start("worker-0", "worker-1")
        assert [agent.wait(120) for agent in group.agents.values()] == [0, 0], group.output("worker-0")
        (start,) = records(group.rundir, "start")
        assert start["step"] == 0
        paused = [rate["phases"]["pause"] for rate in records(group.rundir, "rate") if "pause" in rate["phases"]]
        assert len(paused) == 1
