"""Every reason is documented, and each of those of failures comes from the coordinator to the job's conditions."""

import ast
import json
import re
from pathlib import Path

import pytest

from tandem.wire.reasons import CONFIGURATION_ERROR, RECORDED_REASONS, Reason
from tandem_coordinator.snapshots import brief
from tandem_operator import kinds, names
from tandem_operator.api import RequestRefused
from tandem_operator.coordinators import parse_snapshot
from tandem_operator.pod_ends import DEADLINE
from tests.support import ROOT
from tests.support.worlds.operator_job import NOW, decided, ended, evaluator, heard, initialized, job, surroundings
from tests.support.worlds.operator_world import KEY, World

OTHERS = {"Unschedulable", "SchedulingGated", "ImagePullBackOff", "CoordinatorReplaced"} | {
    *("FailedMount", "FailedAttachVolume", "Pulling", "ContainerCreating", "PodInitializing")
}
"""Words of Kubernetes, and of Events alone."""


def documented() -> set[str]:
    """The reasons in the table of docs/operator.md but for troubles, which have a page of their own."""
    table = (ROOT / "docs/operator.md").read_text().partition("| reason | meaning |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {word for row in rows if "`SavesFail`" not in row for word in re.findall(r"`([A-Za-z]+)`", row)}


def test_the_reasons_that_are_documented_are_those_there_are() -> None:
    assert documented() - OTHERS == set(Reason)


NOT_ON_A_CLUSTER = {
    Reason.NO_ROOM: "tests/unit/operator/test_informer_specs.py",
    Reason.INTERNAL_ERROR: "tests/unit/operator/test_reasons.py",
    Reason.TRAINING_FAILED: "tests/unit/operator/test_reasons_documented.py",
}
"""The reasons that no job of the test cluster can have, and the file that proves each; testing.md says why."""


def test_each_reason_is_produced_by_a_job_on_a_cluster_or_the_docs_say_why_not() -> None:
    files = (ROOT / "tests/cluster").glob("test_*.py")
    text = "\n".join(file.read_text() for file in files if file.name != "test_alerts.py")
    names = {reason: rf"Reason\.{reason.name}\b|\"{reason}[\":]" for reason in Reason}
    assert {reason for reason, pattern in names.items() if not re.search(pattern, text)} == set(NOT_ON_A_CLUSTER)
    page = (ROOT / "docs/development/testing.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| \[\w+\]\(\.\./\.\./(\S+)\) \|$", page, re.MULTILINE))
    assert rows == NOT_ON_A_CLUSTER
    for reason, file in NOT_ON_A_CLUSTER.items():
        assert re.search(rf"Reason\.{reason.name}\b|\"{reason}\"", (ROOT / file).read_text()), file


def literals(path: Path) -> set[str]:
    """All whole texts in a module."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("room", ["operator", "trainer", "core/tandem/processes"])
def test_a_reason_is_spelled_in_one_place(room: str) -> None:
    """A word that is written once more goes on to be said after the other one was changed."""
    for path in sorted((ROOT / room).rglob("*.py")):
        # The kubelet has a reason of this name, too.
        again = literals(path) & {*Reason, CONFIGURATION_ERROR} - {DEADLINE if path.name == "pod_ends.py" else ""}
        assert not again, path


@pytest.mark.parametrize(("said", "reason"), [*RECORDED_REASONS.items(), ("Nonsense", Reason.TRAINING_FAILED)])
def test_why_a_job_has_failed_comes_from_its_coordinator(said: str, reason: Reason) -> None:
    whole = heard("Failed", message="why").model_copy(update={"reason": said})
    answer = parse_snapshot(json.dumps(brief(whole).dump()).encode())
    of = job(status=initialized())
    # An evaluator that failed for the same cause, such as a missing data folder, is not another reason.
    failed = evaluator(of, phase="Failed", code=1, finished=NOW, message="no such folder")
    there = surroundings(of, ended(0, code=78), ended(1, code=78), evaluators=[failed])
    plan = decided(of, there, snapshot=answer)
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
