"""A job that is starved is looked after whatever the other jobs are, and costs no more for them."""

import asyncio
from typing import Any

import pytest

from tandem.job.resource import DistributedTrainingJob
from tandem.wire.reasons import Reason
from tandem_operator import claimants, kinds
from tandem_operator.claimants import CHUNK_SIZE
from tandem_operator.informer import Key
from tests.support import manifests
from tests.support.hostile import HEALTHY, WORKERS, Operator, unplaced, worker
from tests.support.worlds.operator_job import TASK

WIDE = {"spec": {"notes": [[] for _ in range(9_900)]}}
RIVAL = ("evil", "rival")


def take(operator: Operator, key: Key, version: int = 1, status: Any = None, half: bool = True, **workers: Any) -> None:
    """A job, and its two workers, of which one finds no node."""
    body = manifests.manifest(key[1], key[0], status, trainer=TASK, workers={**WORKERS, **workers})
    uid = "-".join(key)
    body["metadata"] |= {"uid": uid, "resourceVersion": str(version), "generation": version}
    operator.take(kinds.JOB, "ADDED", body)
    for index, state in enumerate(({"phase": "Running"}, unplaced()) if half else ()):
        operator.take(kinds.POD, "ADDED", worker(key, uid, index, state))


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the jobs whose spec was read."""
    seen: list[str] = []
    read = DistributedTrainingJob.read
    monkeypatch.setattr(
        DistributedTrainingJob, "read", lambda data: seen.append(data["metadata"]["name"]) or read(data)
    )
    return seen


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": 5},
        {"containers": [{"name": "worker", "resources": "x"}]},
        {"containers": [{"name": "x", "resources": {"limits": 3}}]},
        {"nodeSelector": [[]]},
    ],
)
async def test_a_template_of_one_tenant_does_not_keep_anothers_job_from_being_looked_after(spec: Any) -> None:
    operator = Operator()
    take(operator, RIVAL)
    await operator.goes_on()
    take(operator, RIVAL, 2, template={"spec": spec})
    await operator.goes_on()
    assert await operator.controller._claimants.excluding(RIVAL) != [], "the healthy one is starved still"


async def test_a_job_that_nobody_can_make_sense_of_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator()
    take(operator, RIVAL)
    make = claimants.claimant

    def broken(job: DistributedTrainingJob, *facts: Any) -> Any:
        if job.metadata.name == RIVAL[1]:
            raise TypeError("a defect")
        return make(job, *facts)

    monkeypatch.setattr(claimants, "claimant", broken)
    assert [one.name for one in await operator.controller._claimants.excluding(("n", "other"))] == [HEALTHY[1]]
    await operator.goes_on()


async def test_only_of_jobs_that_are_partly_placed_or_gave_way_the_spec_is_read_and_once(parsed: list[str]) -> None:
    operator = Operator()
    gave = {"phase": "Pending", "conditions": [{"type": "Running", "status": "False", "reason": Reason.GAVE_WAY}]}
    take(operator, RIVAL, template=WIDE)
    take(operator, ("evil", "gave"), status=gave, half=False)
    for number in range(3 * CHUNK_SIZE):
        take(operator, ("evil", f"j{number}"), half=False, template=WIDE)
    of = operator.controller._claimants
    first = {one.name for one in await of.excluding(HEALTHY)}
    of._due = 0.0
    again = {one.name for one in await of.excluding(HEALTHY)}
    assert first == again == {"rival", "gave"}
    assert sorted(parsed) == ["gave", "healthy", "rival"]


async def test_others_have_their_turn_while_many_jobs_are_looked_through() -> None:
    operator = Operator()
    for number in range(10):
        take(operator, ("evil", f"j{number}"), template=WIDE)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert len(await operator.controller._claimants.excluding(HEALTHY)) == 10
    counting.cancel()
    assert turns >= 10, "after each spec that is read"


async def test_what_was_found_serves_all_who_ask_and_what_has_gone_is_none_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator = Operator()
    take(operator, RIVAL)
    asked = []
    everyone = operator.cache.job_keys
    monkeypatch.setattr(operator.cache, "job_keys", lambda: asked.append(1) or everyone())
    of = operator.controller._claimants
    both = await asyncio.gather(of.excluding(HEALTHY), of.excluding(RIVAL), of.excluding(("n", "other")))
    assert [len(one) for one in both] == [1, 1, 2]
    assert len(asked) == 1
    operator.cache.remove(kinds.JOB, *RIVAL, "-".join(RIVAL))
    assert await of.excluding(HEALTHY) == []


async def test_a_job_looks_for_rivals_only_once_it_was_starved_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator()
    monkeypatch.setattr(operator.controller, "_patience", 600.0)
    monkeypatch.setattr(operator.cache, "job_keys", None)
    await operator.goes_on()
