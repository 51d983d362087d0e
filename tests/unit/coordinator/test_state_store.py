"""What a coordinator remembers, and from whom it takes over."""

from pathlib import Path

import pytest

from tandem.rundir.durable import replace_json
from tandem.rundir.layout import FinishedMember
from tandem.wire.protocol import Member, Membership
from tandem.wire.status import GenerationView
from tandem_coordinator.state_store import CoordinatorState, StateStore, TakenOver
from tests.support.manifests import job, run_directory


def test_a_pod_that_was_taken_over_from_does_not_get_the_job_back_when_it_starts_again(tmp_path: Path) -> None:
    rundir = run_directory(tmp_path / "run", job())
    first = StateStore(rundir, "pod-1")
    first.claim(2)
    StateStore(rundir, "pod-1").claim(2)  # its kubelet has started it again
    second = StateStore(rundir, "pod-2")
    second.claim(2)
    with pytest.raises(TakenOver):
        first.record(CoordinatorState(owner=first.owner, generation=1, replicas=2, target=2))
    with pytest.raises(TakenOver, match="pod-1"):
        StateStore(rundir, "pod-1").claim(2)
    second.record(CoordinatorState(owner=second.owner, generation=7, replicas=2, target=2))
    assert StateStore(rundir, "pod-2").claim(2).generation == 7
    StateStore(rundir, "pod-3").claim(2)
    for gone in ("pod-1", "pod-2"):
        with pytest.raises(TakenOver):
            StateStore(rundir, gone).claim(2)


def test_without_pods_whoever_starts_last_has_the_job(tmp_path: Path) -> None:
    rundir = run_directory(tmp_path / "run", job())
    for _ in range(3):
        StateStore(rundir).claim(2)


def test_restarts_are_counted_over_coordinators(tmp_path: Path) -> None:
    rundir = run_directory(tmp_path / "run", job())
    first = StateStore(rundir)
    assert first.claim(2).restarts == 0
    first.record(CoordinatorState(owner=first.owner, generation=5, restarts=3, replicas=2, target=2))
    assert StateStore(rundir).claim(2).restarts == 3


def test_of_a_page_of_an_earlier_version_those_count_that_it_tells_of(tmp_path: Path) -> None:
    rundir = run_directory(tmp_path / "run", job())
    reasons = ("Started", "MemberLost", "MemberJoined", "WorkerFailed")
    history = [
        GenerationView(generation=number, world_size=1, members=[], opened_at=float(number), reason=reason)
        for number, reason in enumerate(reasons, 1)
    ]
    page = CoordinatorState(owner="before", generation=4, replicas=2, target=2, history=history).dump()
    replace_json(rundir.coordinator_file, page)
    assert StateStore(rundir).claim(2).restarts == 2


def test_who_has_finished_is_remembered_for_as_long_as_its_generation_is_the_newest(tmp_path: Path) -> None:
    rundir = run_directory(tmp_path / "run", job())
    first = StateStore(rundir)
    first.claim(2)
    first.record(CoordinatorState(owner=first.owner, generation=5, finished=["worker-0"], replicas=2, target=2))
    second = StateStore(rundir)
    assert second.claim(2).finished == ["worker-0"]
    assert StateStore(rundir).claim(2).finished == ["worker-0"], "nobody has said anything else"
    second = StateStore(rundir)
    second.claim(2)
    second.record(CoordinatorState(owner=second.owner, generation=6, replicas=2, target=2))
    assert StateStore(rundir).claim(2).finished == []


def test_a_change_of_settings_is_known_until_a_generation_has_read_it(tmp_path: Path) -> None:
    """The job's file has the new ones at once; a coordinator that ends before the group has saved would forget it."""
    rundir = run_directory(tmp_path / "run", job())
    StateStore(rundir).claim(2, "the job has changed checkpoint.everySteps")
    second = StateStore(rundir)
    assert second.claim(2).settings_changed == "the job has changed checkpoint.everySteps"
    second.record(CoordinatorState(owner=second.owner, generation=1, replicas=2, target=2))
    assert StateStore(rundir).claim(2).settings_changed == ""


@pytest.mark.parametrize("generation", [4, 5])
def test_records_of_members_that_have_finished_count_from_the_start(tmp_path: Path, generation: int) -> None:
    """Before the run watcher's first poll, which a slow disk may delay beyond the time for the others to come back."""
    rundir = run_directory(tmp_path / "run", job())
    first = StateStore(rundir)
    first.claim(2)
    members = [Member(replica=f"worker-{n}", incarnation="a", address="h", port=1, processes=1) for n in range(2)]
    group = Membership(generation=5, members=members, reason="Started")
    first.record(CoordinatorState(owner=first.owner, generation=5, membership=group, replicas=2, target=2))
    rundir.record_finished(FinishedMember(generation, "worker-0", "a"))
    rundir.record_finished(FinishedMember(5, "worker-1", "b"))
    assert StateStore(rundir).claim(2).finished == (["worker-0"] if generation == 5 else [])
