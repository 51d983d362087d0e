"""What the coordinator does about wrong numbers."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogWriter
from tandem.rundir.records import CorruptionRecord
from tandem.wire.status import Troubles
from tandem_coordinator import coordinator as coordinator_module
from tandem_coordinator.coordinator import Coordinator
from tandem_coordinator.state_store import RecordedState, StateStore
from tests.support import checkpoints, manifests
from tests.support.waiting import until

PLENTY_SECONDS = 60.0


def find(rundir: RunDir, generation: int) -> None:
    """A training log says that a rank differs."""
    log = LogWriter(rundir.training_log(generation))
    log.append(CorruptionRecord(time=time.time(), reason="RanksDiffer", message="rank 1 differs"))
    log.close(PLENTY_SECONDS)


async def coordinated(rundir: RunDir) -> tuple[Troubles | None, dict[str, Any] | None]:
    """What a coordinator knows, and what is recorded, after ranks have differed."""
    coordinator = Coordinator(rundir.read_job(), rundir, StateStore(rundir), RecordedState())
    running, watch = asyncio.create_task(coordinator.run()), coordinator._troubles
    try:
        await asyncio.to_thread(until, lambda: watch._troubles, "a look at what was there before")
        find(rundir, 1)
        await asyncio.to_thread(until, lambda: watch.troubles, "what was found")
        await asyncio.to_thread(until, lambda: coordinator.state.failing is None or coordinator.state.end, "the end")
        return watch.troubles, rundir.failed()
    finally:
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize("reaction", ["Continue", "Stop"])
def test_a_job_that_stops_at_wrong_numbers_fails_and_names_the_checkpoint_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reaction: str
) -> None:
    monkeypatch.setattr(coordinator_module, "SAMPLE_SECONDS", 0.01)
    rundir = manifests.run_directory(tmp_path / "run", manifests.job(elasticity={"onCorruption": reaction}))
    checkpoints.begin(rundir, 1)
    checkpoints.commit(rundir, 50, 1)
    troubles, failed = asyncio.run(coordinated(rundir))
    assert troubles is not None
    assert [(one.reason, one.count) for one in troubles.corruptions] == [("RanksDiffer", 1)]
    if reaction == "Continue":
        assert failed is None
        return
    assert failed is not None
    assert (failed["reason"], failed["exitCode"]) == ("NumbersWrong", ExitCode.FAILED)
    assert failed["message"] == "rank 1 differs; the newest checkpoint from before it was found: step-000000050"
