"""How long a heartbeat is held, in time that jumps."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.wire.protocol import Sync
from tandem_coordinator import coordinator as coordinator_module
from tandem_coordinator.coordinator import Coordinator
from tandem_coordinator.state_store import RecordedState, StateStore
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
        coordinator = Coordinator(job, rundir, StateStore(rundir), RecordedState())
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


@asynccontextmanager
async def running(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Coordinator, list[Sync]]]:
    """The coordinator of a script, and what its two agents say while they run it."""
    monkeypatch.setattr(
        coordinator_module, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time, time=time.time)
    )
    job = manifests.job(trainer={"command": ["python", "script.py"]}, workers={"replicas": 2})
    rundir = manifests.run_directory(path / "run", job)
    coordinator = Coordinator(job, rundir, StateStore(rundir), RecordedState())
    coordinator._recorded = 1  # nothing is written here
    ticks = asyncio.create_task(coordinator._tick())
    agents = [WAITS.model_copy(update={"replica": name}) for name in ("worker-0", "worker-1")]
    await asyncio.gather(*map(coordinator.sync, agents))
    yield coordinator, [agent.model_copy(update={"state": "running", "generation": 1}) for agent in agents]
    ticks.cancel()
    await asyncio.gather(ticks, return_exceptions=True)
    coordinator._history.close()


def left(agent: Sync) -> Sync:
    return agent.model_copy(update={"state": "leaving", "finished": True})


def test_who_gives_up_its_heartbeat_to_say_that_it_has_finished_is_not_lost_while_the_run_directory_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the run directory takes longer to answer than an agent without a connection is waited for."""

    async def finished() -> None:
        async with running(tmp_path, monkeypatch) as (coordinator, agents):
            held = [asyncio.create_task(coordinator.sync(agent)) for agent in agents]
            await asyncio.sleep(0.1)
            held[1].cancel()
            await asyncio.sleep(0.1)
            await coordinator.sync(left(agents[1]))
            held[0].cancel()
            await asyncio.gather(*held, return_exceptions=True)
            assert coordinator.state.open
            assert coordinator.state.finished == {"worker-1"}

    jumping(finished())


def test_who_has_finished_is_answered_when_the_disk_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes then, and could not tell a coordinator that is started after this one has died."""

    async def answered() -> None:
        async with running(tmp_path, monkeypatch) as (coordinator, agents):
            answer = asyncio.create_task(coordinator.sync(left(agents[1])))
            await asyncio.sleep(coordinator_module.END_POLL_SECONDS + 0.5)
            assert coordinator.state.finished == {"worker-1"}
            assert not answer.done()
            coordinator._recorded_finished = coordinator.state.finished
            coordinator._state_written.set()
            await asyncio.sleep(0.1)
            assert answer.done()

    jumping(answered())
