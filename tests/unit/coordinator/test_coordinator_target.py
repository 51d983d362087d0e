"""Another number of replicas is answered for once it is on the disk."""

import asyncio
from pathlib import Path

import pytest

from tandem_coordinator import coordinator as coordinator_module
from tandem_coordinator.coordinator import Coordinator
from tandem_coordinator.state_store import CoordinatorState, RecordedState, StateStore
from tests.support import manifests


class Disk(StateStore):
    """One that says what it has, and that may be broken."""

    is_broken = False

    def record(self, state: CoordinatorState) -> None:
        if self.is_broken:
            raise OSError("no space left")
        super().record(state)


async def coordinated(folder: Path, is_broken: bool = False) -> tuple[int, int | None]:
    """What is granted for one replica instead of two, and what a coordinator that begins now remembers."""
    job = manifests.job(workers={"replicas": 2, "minReplicas": 1})
    rundir = manifests.run_directory(folder / "run", job)
    disk = Disk(rundir)
    disk.is_broken = is_broken
    coordinator = Coordinator(job, rundir, disk, RecordedState())
    recording = asyncio.create_task(coordinator._record())
    try:
        granted = await coordinator.retarget(1)
        return granted, StateStore(rundir).claim(2).target
    finally:
        recording.cancel()
        coordinator._history.close()


def test_who_was_told_that_it_counts_may_kill_the_coordinator(tmp_path: Path) -> None:
    assert asyncio.run(coordinated(tmp_path)) == (1, 1)


def test_a_disk_that_does_not_take_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "RECORD_SECONDS", 0.05)
    with pytest.raises(TimeoutError):
        asyncio.run(coordinated(tmp_path, is_broken=True))
