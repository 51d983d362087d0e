"""What is written into a job's status, by whom it is read, and what is not written again."""

from typing import Any

import pytest

from tandem.formatting import rfc3339
from tandem.wire.reasons import Reason
from tandem.wire.status import Condition, GenerationView, Snapshot, Status
from tandem_operator import kinds
from tandem_operator.api import Unavailable
from tandem_operator.gang_deadlock import BACKOFF_SECONDS
from tandem_operator.job_memory import BATCH_SIZE, Attempt, retry_time, role_retry_time
from tandem_operator.pod_ends import PodEnd
from tandem_operator.reporting import JobProblem
from tests.support.clock import Clock
from tests.support.worlds.operator_job import (
    IDLE,
    NOW,
    decided,
    ended,
    heard,
    initialized,
    job,
    made,
    surroundings,
    worker,
)
from tests.support.worlds.operator_world import JOB, KEY, LOOP, World


def test_a_field_that_an_older_crd_drops_is_not_written_at_every_look(monkeypatch: Any) -> None:
    world = World()
    world.cluster.step = 10
    patch = world.cluster.patch_status

    async def pruning(kind: Any, namespace: str, name: str, changes: Any, version: str = "") -> Any:
        return await patch(kind, namespace, name, {one: changes[one] for one in changes if one != "selector"}, version)

    monkeypatch.setattr(world.cluster, "patch_status", pruning)
    for _ in range(10):
        world.relist()
        world.look()
        world.cluster.tick()
    before = len(world.cluster.written)
    for _ in range(5):
        world.look()
    assert world.cluster.written[before:] == []
    assert world.cluster.objects[kinds.JOB, *KEY]["status"]["phase"] == "Running"


def test_nothing_is_written_into_the_status_of_a_job_made_anew_under_the_name(monkeypatch: Any) -> None:
    world = World()
    world.cluster.step = 10
    world.settle()
    ask = world.cluster.poll

    async def meanwhile(endpoint: str, token: str) -> Any:
        answer = await ask(endpoint, token)
        world.cluster.end((kinds.JOB, *KEY))
        world.cluster.put(kinds.JOB, JOB)
        return answer

    monkeypatch.setattr(world.cluster, "poll", meanwhile)
    world.cluster.step = 500
    (memory,) = world.controller._memories.values()
    memory.written = 0.0
    world.look()
    assert "status" not in world.cluster.objects[kinds.JOB, *KEY]


def test_a_node_whose_clock_is_ahead_leaves_no_place_empty() -> None:
    of = job(status=initialized(), workers={"replicas": 2})
    ahead = ended(0, finished=NOW + 3600, started=NOW + 3500, created=NOW - 120)
    assert made(decided(of, surroundings(of, ahead, worker(1)), snapshot=heard())) == ["worker 0"]


def test_what_an_earlier_job_has_left_is_said_at_once() -> None:
    """Its Secret may be about to be deleted, and new pods wait for that; the message need not."""
    world = World()
    world.settle()
    left = [body for place, body in world.cluster.objects.items() if place[0] is not kinds.JOB]
    for body in left:
        # As kubectl delete --cascade=orphan does.
        body["metadata"].pop("ownerReferences", None)
    pods = {pod["metadata"]["name"] for pod in world.cluster.pods()}
    world.cluster.end((kinds.JOB, *KEY))
    world.cluster.put(kinds.JOB, JOB)
    world.start()
    with pytest.raises(Unavailable, match="is still being deleted"):
        world.look()
    assert {one.reason for one in world.status.conditions if one.type == "Ready"} == {Reason.NAME_TAKEN}
    assert "if a job of this name was deleted without its objects, remove those" in (world.status.message or "")
    assert Reason.NAME_TAKEN in world.cluster.told
    assert {pod["metadata"]["name"] for pod in world.cluster.pods()} == pods


def test_an_operator_whose_clock_is_behind_leaves_no_place_empty() -> None:
    of = job(status=initialized(), workers={"replicas": 2})
    ahead = ended(0, finished=NOW + 3600, started=NOW + 3500, created=NOW + 3480)
    assert made(decided(of, surroundings(of, ahead, worker(1)), snapshot=heard())) == ["worker 0"]


def test_a_node_whose_clock_is_ahead_hides_not_that_the_next_pod_runs_well() -> None:
    of = job(status=initialized(), workers={"replicas": 1})
    before = ended(0, "digits-worker-0-a", ended_by=PodEnd.OVER_LIMIT, created=NOW - 200)
    for lived, reason in ((10, "LimitExceeded"), (61, "Running")):
        after = worker(0, started=NOW + 3600, created=NOW - lived)
        status = decided(of, surroundings(of, before, after), snapshot=heard()).status
        assert [one.reason for one in status.conditions if one.type == "Ready"] == [reason]


def at(status: Status, kind: str) -> str | None:
    return next(one.last_transition_time for one in status.conditions if one.type == kind)


def test_times_that_an_operator_wrote_whose_clock_was_ahead_are_cut_to_now() -> None:
    """Deadlines, the pause of a job that gave way, and its time to live are counted from them."""
    gave = Condition(type="Running", status="False", reason=Reason.GAVE_WAY, last_transition_time=rfc3339(NOW + 3600))
    before = initialized(phase="Pending")
    of = job(status={**before, "conditions": [*before["conditions"], gave.dump()]})
    plan = decided(of, surroundings(of), idle=IDLE)
    assert (at(plan.status, "Running"), made(plan)) == (rfc3339(NOW), [])
    of = of.model_copy(update={"status": plan.status})
    assert "worker 0" in made(decided(of, surroundings(of), idle=IDLE, now=NOW + BACKOFF_SECONDS))

    done = job(status=initialized(phase="Draining", completionTime=rfc3339(NOW + 3600)))
    status = decided(done, surroundings(done)).status
    assert status.completion_time == rfc3339(NOW)


def test_after_a_step_of_the_clock_back_the_last_try_is_over() -> None:
    attempts = {"worker 0": Attempt(9, NOW + 3600, JobProblem("Refused", "a quota"))}
    assert retry_time(attempts, "worker 0", NOW) is None


def test_a_coordinator_whose_clock_is_ahead_does_not_put_the_end_off() -> None:
    of = job(status=initialized())
    said = heard("Succeeded", completionTime=rfc3339(NOW + 3600))
    assert decided(of, surroundings(of), snapshot=said).status.completion_time == rfc3339(NOW)


def test_a_message_is_cut_and_printable_whoever_wrote_it() -> None:
    of = job(status=None)
    refused = {"worker 0": Attempt(5, NOW, JobProblem(Reason.REFUSED, "\x1b[2Jno\x00 " + "x" * 200_000))}
    message = decided(of, surroundings(of), attempts=refused).status.message or ""
    assert len(message) <= 2_000
    assert message.isprintable()


def test_a_suspended_job_does_not_wait_for_a_worker_that_was_lost_with_its_node() -> None:
    of = job(status=initialized(phase="Suspended"), runPolicy={"suspend": True})
    lost = worker(0, ready=False, silent=True, deleting=True)
    ready = next(one for one in decided(of, surroundings(of, lost)).status.conditions if one.type == "Ready")
    assert (ready.status, ready.reason) == ("True", "Suspended")
    lives = worker(1)
    ready = next(one for one in decided(of, surroundings(of, lost, lives)).status.conditions if one.type == "Ready")
    assert (ready.status, ready.reason) == ("False", "Saving")


def test_a_coordinator_that_says_something_new_at_each_look_causes_few_events_and_writes(monkeypatch: Any) -> None:
    world, number = World(), 0
    clock = Clock(1_767_225_600.0)
    monkeypatch.setattr("time.time", clock)
    monkeypatch.setattr("time.monotonic", clock)
    world.settle()
    before, written = len(world.cluster.told), len(world.cluster.written)

    async def lies(endpoint: str, token: str) -> Snapshot:
        nonlocal number
        number += 5
        views = [
            GenerationView(generation=one, world_size=1, members=["x"], opened_at=0.0, reason="WorkerFailed")
            for one in range(number - 4, number + 1)
        ]
        return heard("Running", generation=number, message=f"m{number}").model_copy(update={"generations": views})

    monkeypatch.setattr(world.cluster, "poll", lies)
    for _ in range(600):
        clock.now += 1
        LOOP.run(world.controller.sync(KEY))
    assert len(world.cluster.told) - before <= 25 + 600 / 300
    assert len(world.cluster.written) - written <= 60 + 600 / 5


def test_a_few_pods_that_were_refused_before_a_step_of_the_clock_back_hold_up_no_others() -> None:
    refused = {
        f"worker {index}": Attempt(9, NOW + 3600, JobProblem("Refused", "a quota")) for index in range(BATCH_SIZE)
    }
    assert role_retry_time(refused, "worker", NOW) is None
