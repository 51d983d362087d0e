"""Every reason is documented, and each of those of failures comes from the coordinator to the job's conditions."""

import json
import re

import pytest

from tandem.wire.reasons import RECORDED_REASONS, Reason
from tandem_coordinator.snapshots import brief
from tandem_operator import kinds, names
from tandem_operator.api import RequestRefused
from tandem_operator.coordinators import parse_snapshot
from tests.support import ROOT
from tests.support.worlds.operator_job import decided, ended, heard, initialized, job, surroundings
from tests.support.worlds.operator_world import KEY, World

OTHERS = {"Unschedulable", "SchedulingGated", "ImagePullBackOff", "CoordinatorReplaced"} | {
    *("FailedMount", "FailedAttachVolume", "Pulling", "ContainerCreating")
}
"""Words of Kubernetes, and of Events alone."""


def documented() -> set[str]:
    """The reasons in the table of docs/operator.md but for troubles, which have a page of their own."""
    table = (ROOT / "docs/operator.md").read_text().partition("| reason | meaning |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {word for row in rows if "`SavesFail`" not in row for word in re.findall(r"`([A-Za-z]+)`", row)}


def test_the_reasons_that_are_documented_are_those_there_are() -> None:
    assert documented() - OTHERS == set(Reason)


@pytest.mark.parametrize(("said", "reason"), [*RECORDED_REASONS.items(), ("Nonsense", Reason.TRAINING_FAILED)])
def test_why_a_job_has_failed_comes_from_its_coordinator(said: str, reason: Reason) -> None:
    whole = heard("Failed", message="why").model_copy(update={"reason": said})
    answer = parse_snapshot(json.dumps(brief(whole).dump()).encode())
    of = job(status=initialized())
    plan = decided(of, surroundings(of, ended(0, code=78), ended(1, code=78)), snapshot=answer)
    found = {one.reason for one in plan.status.conditions if one.type in ("Failed", "Ready", "Stalled")}
    assert found == {reason}


@pytest.mark.parametrize(
    ("words", "reason"), [("violates PodSecurity", Reason.REFUSED), ("exceeded quota: q", Reason.QUOTA_EXCEEDED)]
)
def test_what_the_api_server_refuses_is_an_event_as_well(words: str, reason: Reason) -> None:
    world = World()
    world.cluster.refuses = lambda verb, place, body: (
        RequestRefused(403, "Forbidden", words)
        if (verb, place[0]) == ("create", kinds.POD) and names.WORKER in place[2]
        else None
    )
    for _ in range(6):
        world.relist()
        world.look()
        world.cluster.tick()
    status = world.cluster.objects[kinds.JOB, *KEY]["status"]
    assert reason in {one["reason"] for one in status["conditions"] if one["type"] == "Ready"}
    assert reason in world.cluster.told
