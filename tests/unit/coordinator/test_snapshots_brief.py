"""What the operator is told stays small, however large the job is."""

import json

from tandem.wire.protocol import MAX_BRIEF_BYTES
from tandem.wire.status import EvaluatorView, Event, GenerationView, MemberView, Snapshot, Status, Straggler
from tandem_coordinator.snapshots import brief
from tandem_operator.coordinators import parse_snapshot


def view(number: int, members: list[str], detail: str = "") -> GenerationView:
    return GenerationView(
        generation=number, world_size=len(members), members=members, opened_at=1.0, reason="MemberLost", detail=detail
    )


def test_each_member_is_named_once_and_all_are_counted() -> None:
    views = [view(1, ["a", "b", "c"]), view(2, ["a", "c"]), view(3, ["a", "c", "d"])]
    found = brief(Snapshot(job="j", time=1.0, status=Status(), generations=views)).generations
    assert [(one.generation, one.members, one.replicas) for one in found] == [
        (1, ["b"], 3),
        (2, [], 2),
        (3, ["a", "c", "d"], 3),
    ]


def test_how_many_have_finished_is_told_also_where_nobody_has() -> None:
    for finished in (0, 2, None):
        told = brief(Snapshot(job="j", time=1.0, status=Status(), finished=finished)).dump()
        assert told.get("finished") == finished


def test_that_of_the_largest_job_fits() -> None:
    names = [f"a-job-with-a-name-of-its-own-worker-{number}-abcde" for number in range(10_000)]
    straggler = Straggler(rank=1, replica="x" * 316, ratio=2.0)
    whole = Snapshot(
        job="j" * 63,
        time=1.0,
        status=Status(message="ä" * 2_000, stragglers=[straggler] * 50),
        members=[MemberView(replica="a", address="b", state="running", silent_seconds=0.0)],
        generations=[view(number, names, "ä" * 2_000) for number in range(100)],
        evaluators=[EvaluatorView(name="e", state="idle", silent_seconds=0.0)] * 1_000,
        events=[Event(at=1.0, kind="info", text="x" * 2_000)] * 200,
    )
    found = brief(whole)
    assert len(json.dumps(found.dump())) < MAX_BRIEF_BYTES
    assert (found.members, found.evaluators, found.events) == ([], [], [])
    assert len(found.generations[-1].members) > 1_000
    assert found.generations[-1].replicas == 10_000
    assert parse_snapshot(json.dumps(found.dump()).encode()).generations == found.generations
