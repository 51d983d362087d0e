"""`warmStart: false`: ranks are ordinary processes that torchrun starts, the first ones and those after a fault."""

from pathlib import Path

import psutil
import pytest

from tandem_trainer.agent.warm.stub import ADDRESS
from tests.support.elastic import SCRIPT, Elastic

REPLICAS = ("worker-0", "worker-1")


def started_by(agent: psutil.Process) -> list[tuple[str, bool, bool]]:
    """Each process below an agent: its name, whether it runs the training script, whether it knows a fork server."""
    below = agent.children(recursive=True)
    return [(one.name(), str(SCRIPT) in one.cmdline(), ADDRESS in one.environ()) for one in below]


@pytest.mark.full("trainer")
def test_a_killed_rank_is_followed_by_one_that_starts_cold_and_there_is_no_fork_server(tmp_path: Path) -> None:
    with Elastic(tmp_path, elasticity={"warmStart": False}).start(*REPLICAS) as group:
        agents = {replica: psutil.Process(group.agents[replica].pid) for replica in REPLICAS}
        name = agents["worker-0"].name()
        alone = [(name, True, False)]
        before = group.step_after(0.0, world=2)
        assert [started_by(agent) for agent in agents.values()] == [alone, alone]
        first = {replica: group.ranks_of(replica) for replica in REPLICAS}

        killed = group.kill_rank("worker-1")
        after = group.step_after(killed, world=2, generation=before.generation)
        assert (after.generation, after.step > before.step) == (before.generation + 1, True)
        assert [started_by(agent) for agent in agents.values()] == [alone, alone]
        assert not {*first["worker-1"]} & {*group.ranks_of("worker-1")}
        assert group.snapshot().generations[-1].reason == "WorkerFailed"
