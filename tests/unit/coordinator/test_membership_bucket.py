"""Generations of a job whose pods share nothing but a bucket, while that bucket is away."""

from dataclasses import replace
from pathlib import Path

from tandem.wire.protocol import Failure
from tandem_coordinator.coordinator import Coordinator
from tandem_coordinator.group_state import Retarget, Synced, Tick
from tandem_coordinator.state_store import RecordedState, StateStore
from tests.support import manifests
from tests.support.worlds.membership_job import RULES, Job, message

AWAY = "the server does not answer"


def test_a_group_that_fails_waits_for_the_bucket_and_nothing_is_counted_meanwhile() -> None:
    job = Job()
    job.trains("worker-0", "worker-1")
    job.bucket_problem = AWAY
    job.passes(60.0)
    assert job.members() == ["worker-0", "worker-1"], "a group that trains is left alone"
    failure = Failure(rank=1, code=1, error="no memory", where="train.py:1")
    job.runs("worker-1", job.state.number, reason="WorkerFailed", failure=failure)
    for _ in range(3):
        job.passes(600.0)
        assert job.members() == []
        answer = job.joins("worker-0")
        assert (answer.order, answer.why) == ("wait", f"the next generation waits for the bucket: {AWAY}")
    assert job.state.failures == 1
    assert not job.failed()
    job.bucket_problem = ""
    job.passes(1.0)
    assert job.members() == ["worker-0", "worker-1"]


def test_the_first_generation_waits_too() -> None:
    job = Job(target=1)
    job.bucket_problem = AWAY
    job.joins("worker-0")
    job.passes(30.0)
    assert job.members() == []
    assert job.state.waits_for_bucket
    job.bucket_problem = ""
    job.passes(1.0)
    assert job.members() == ["worker-0"]
    assert not job.state.waits_for_bucket


def test_a_group_does_not_change_its_size_while_the_next_one_could_not_begin() -> None:
    job = Job(target=2)
    job.trains("worker-0", "worker-1")
    job.bucket_problem = AWAY
    job.tell(Retarget(3))
    job.joins("worker-2")
    job.passes(120.0)
    assert (job.members(), job.state.saving) == (["worker-0", "worker-1"], None)
    job.bucket_problem = ""
    job.passes(1.0)
    assert job.state.saving is not None


def test_who_must_go_is_not_held_back() -> None:
    job = Job()
    job.trains("worker-0", "worker-1")
    job.bucket_problem = AWAY
    job.must_go("worker-1")
    job.passes(1.0)
    assert job.state.saving is not None


def test_who_waits_for_others_is_not_said_to_wait_for_the_bucket() -> None:
    job = Job(target=2, rules=replace(RULES, minimum=2))
    job.bucket_problem = AWAY
    job.joins("worker-0")
    job.passes(30.0)
    assert not job.state.waits_for_bucket


async def test_the_status_says_what_is_waited_for(tmp_path: Path) -> None:
    job = manifests.job(workers={"replicas": 1})
    rundir = manifests.run_directory(tmp_path / "run", job)
    coordinator = Coordinator(job, rundir, StateStore(rundir), RecordedState())
    try:
        coordinator.report_upload(AWAY, blocks=True)
        coordinator._apply(Synced(message("worker-0", "joining")))
        coordinator._apply(Tick(bucket_problem=coordinator._bucket_problem))
        waits = coordinator.snapshot().status.message
        coordinator.report_upload("")
        coordinator._apply(Tick(bucket_problem=coordinator._bucket_problem))
        assert (waits, coordinator.snapshot().status.message) == (
            f"the next generation waits for the bucket: {AWAY}",
            None,
        )
    finally:
        coordinator._history.close()
