"""What goes wrong in a job that trains on is a condition, and an Event when it begins: not one for each number."""

from typing import Any

from tandem.wire.status import Status, Troubles
from tandem_operator.reporting import KubeEvent, events_between
from tests.support.worlds.operator_job import NOW, coordinator, decided, heard, initialized, job, surroundings, worker

FULL = "[Errno 28] No space left on device"


def failing(count: int) -> dict[str, Any]:
    return Troubles(saves_failed=count, saves_failed_in_a_row=count, save_message=FULL).dump()


class World:
    """A job that runs, looked at again and again."""

    def __init__(self) -> None:
        self.job = job(status=initialized())

    def look(self, **status: Any) -> list[KubeEvent]:
        there = surroundings(self.job, coordinator(self.job), worker(0), worker(1))
        before = self.job.status or Status()
        said = heard(**status)
        plan = decided(self.job, there, snapshot=said)
        self.job = self.job.model_copy(update={"status": plan.status})
        assert list(plan.events) == events_between(before, plan.status or Status(), said)
        return [notice for notice in plan.events if notice.reason not in ("Running", "Started")]

    def degraded(self) -> tuple[str, str, str] | None:
        assert self.job.status is not None
        found = [one for one in self.job.status.conditions if one.type == "Degraded"]
        return (found[0].status, found[0].reason, found[0].message) if found else None


def test_a_job_that_is_well_has_no_such_condition() -> None:
    world = World()
    assert world.look() == []
    assert world.degraded() is None


def test_failing_saves_are_one_condition_and_one_event_until_they_are_well_again() -> None:
    world = World()
    world.look()
    (told,) = world.look(troubles=failing(1))
    assert (told.reason, told.warning) == ("SavesFail", True)
    assert FULL in told.message
    assert world.degraded() == ("True", "SavesFail", f"the disk is full: the last save has failed: {FULL}")
    for count in range(2, 25):
        assert world.look(troubles=failing(count)) == []
    assert world.degraded() == ("True", "SavesFail", f"the disk is full: the last 24 saves have failed: {FULL}")
    assert world.look(troubles=Troubles(saves_failed=24).dump()) == []
    degraded = world.degraded()
    assert degraded is not None
    assert degraded[0] == "False"
    assert [one.reason for one in world.look(troubles=failing(25))] == ["SavesFail"]


def test_each_rewind_is_an_event_and_skipped_evaluations_are_no_warning() -> None:
    world = World()
    world.look()
    first = Troubles(rewinds=1, batches_left_out=60, evaluations_skipped=1)
    assert [(one.reason, one.warning) for one in world.look(troubles=first.dump())] == [
        ("Rewound", True),
        ("EvaluationsSkipped", False),
    ]
    second = Troubles(rewinds=2, batches_left_out=120, evaluations_skipped=9)
    (told,) = world.look(troubles=second.dump())
    assert told.message == "the loss became useless: training went back 2 times and left out 120 batches"


def test_each_time_a_micro_batch_is_halved_is_an_event() -> None:
    world = World()
    world.look()
    for times, limit in ((1, 4), (2, 2)):
        now = Troubles(micro_batches_halved=times, micro_batch=limit).dump()
        assert [(one.reason, one.warning) for one in world.look(troubles=now)] == [("MicroBatchHalved", True)]
        assert world.look(troubles=now) == []


def test_what_is_known_of_trouble_stays_while_the_coordinator_does_not_answer() -> None:
    world = World()
    world.look(troubles=failing(3))
    there = surroundings(world.job, coordinator(world.job), worker(0), worker(1))
    plan = decided(world.job, there, snapshot=None, now=NOW)
    assert plan.status is not None
    assert plan.status.troubles is not None
