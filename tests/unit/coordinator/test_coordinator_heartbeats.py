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
