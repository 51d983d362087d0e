"""Templates of jobs set what the platform team allows, and nothing else."""

from typing import Any

import pytest

from tandem_operator import kinds
from tandem_operator.pods import complaint
from tests.support.worlds.operator_job import TASK, job
from tests.support.worlds.operator_world import JOB, NAME, World

ALLOWED = ("metadata.labels", "spec.nodeSelector", "spec.serviceAccountName=training", "spec.containers.env")


def asked(part: str = "workers", **spec: Any) -> dict[str, Any]:
    return {part: {"template": {"spec": spec}}}


def container(**fields: Any) -> list[dict[str, Any]]:
    return [{"name": "worker", **fields}]


@pytest.mark.parametrize(
    "spec",
    [
        {},
        asked(nodeSelector={"gpu": "h100"}),
        asked(serviceAccountName="training"),
        asked(containers=container(env=[{"name": "A", "value": "1"}])),
        asked("evaluators", nodeSelector={"cpu": "many"}),
        {"workers": {"template": {"metadata": {"labels": {"team.example/name": "a"}}}}},
    ],
)
def test_what_is_on_the_list_may_be_set(spec: dict[str, Any]) -> None:
    assert complaint(job(**spec), ALLOWED) is None


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        (asked(hostNetwork=True), "workers.template sets spec.hostNetwork"),
        (asked(serviceAccountName="admin"), "workers.template sets spec.serviceAccountName"),
        (asked(volumes=[{"name": "v", "hostPath": {"path": "/"}}]), "sets spec.volumes.hostPath.path"),
        (asked(volumes=[{"name": "v", "emptyDir": {}}]), "sets spec.volumes.emptyDir"),
        (
            asked(containers=container(securityContext={"privileged": True})),
            "spec.containers.securityContext.privileged",
        ),
        (asked(initContainers=[{"name": "i", "image": "x"}]), "sets spec.initContainers.image"),
        (asked(imagePullSecrets=[{"name": "registry"}]), "sets spec.imagePullSecrets.name"),
        (asked(nodeSelectors={"a": "b"}), "sets spec.nodeSelectors.a"),
        (asked("evaluators", hostPID=True), "evaluators.template sets spec.hostPID"),
        (asked("coordinator", hostIPC=True), "coordinator.template sets spec.hostIPC"),
    ],
)
def test_what_is_not_on_the_list_is_named(spec: dict[str, Any], where: str) -> None:
    found = complaint(job(**spec), ALLOWED)
    assert found is not None
    assert where in found
    assert complaint(job(**spec), ()) is None, "without a list everything may be set"


def test_such_a_job_has_stalled_and_gets_no_pods_until_it_is_changed() -> None:
    world = World(job={**JOB, "spec": {"trainer": TASK, **asked(hostNetwork=True)}})
    world.options = {"template_fields": ALLOWED}
    world.start()
    world.look()
    stalled = {one.type: (one.status, one.reason) for one in world.status.conditions}
    assert stalled["Stalled"] == ("True", "TemplateRefused")
    assert "workers.template sets spec.hostNetwork" in (world.status.message or "")
    assert world.cluster.pods() == []
    world.cluster.edit(kinds.JOB, NAME, {"workers": {"template": None}})
    world.resync()
    assert world.cluster.pods() != []
