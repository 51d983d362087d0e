"""How long a heartbeat is held, in time that jumps."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.protocol import Sync
from tandem_coordinator import coordinator as coordinator_module
from tandem_coordinator.coordinator import Coordinator
from tandem_coordinator.state_store import Remembered, StateStore
from tests.support import manifests
from tests.support.clock import jumping

HEARTBEAT_SECONDS = 5.0
WAITS = Sync(replica="worker-0", incarnation="a", address="10.0.0.1", port=4000, processes=1, state="joining")


def test_one_that_says_nothing_new_is_held_for_most_of_the_heartbeat_time_and_not_each_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that was silent for longer would be lost, and thousands that were answered at once would all be back
    at once."""

    async def held() -> list[float]:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(coordinator_module, "time", SimpleNamespace(monotonic=loop.time, time=time.time))
        job = manifests.job(elasticity={"heartbeatSeconds": HEARTBEAT_SECONDS, "lostAfterSeconds": 20.0})
        rundir = manifests.run_directory(tmp_path / "run", job)
        coordinator = Coordinator(job, rundir, StateStore(rundir), Remembered())
        found = []
        for _ in range(200):
            began = loop.time()
            assert (await coordinator.sync(WAITS)).order == "wait"
            found.append(loop.time() - began)
        coordinator._history.close()
        return found

    seconds = jumping(held())
    assert 0.8 * HEARTBEAT_SECONDS <= min(seconds) < 0.83 * HEARTBEAT_SECONDS
    assert 0.97 * HEARTBEAT_SECONDS < max(seconds) <= HEARTBEAT_SECONDS + 0.001


def test_who_gives_up_its_heartbeat_to_say_that_it_has_finished_is_not_lost_while_the_run_directory_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the run directory takes longer to answer than an agent without a connection is waited for."""

    async def finished() -> list[str]:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(coordinator_module, "time", SimpleNamespace(monotonic=loop.time, time=time.time))
        job = manifests.job(trainer={"command": ["python", "script.py"]}, workers={"replicas": 2})
        rundir = manifests.run_directory(tmp_path / "run", job)
        coordinator = Coordinator(job, rundir, StateStore(rundir), Remembered())
        coordinator._recorded = 1  # nothing is written here
        ticks = asyncio.create_task(coordinator._tick())
        agents = [WAITS.model_copy(update={"replica": name}) for name in ("worker-0", "worker-1")]
        await asyncio.gather(*map(coordinator.sync, agents))
        runs = [agent.model_copy(update={"state": "running", "generation": 1}) for agent in agents]
        held = [asyncio.create_task(coordinator.sync(agent)) for agent in runs]
        await asyncio.sleep(0.1)
        held[1].cancel()
        await asyncio.sleep(0.1)
        await coordinator.sync(runs[1].model_copy(update={"state": "leaving", "finished": True}))
        ticks.cancel()
        held[0].cancel()
        await asyncio.gather(ticks, *held, return_exceptions=True)
        coordinator._history.close()
        assert coordinator.state.open
        return sorted(coordinator.state.finished)

    assert jumping(finished()) == ["worker-1"]
