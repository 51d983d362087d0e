"""Templates of jobs set what the platform team allows, and nothing else."""

from typing import Any

import pytest

from tandem.status import Status
from tandem_operator import kinds
from tandem_operator.controller import Controller
from tandem_operator.informer import Cache
from tandem_operator.operator_metrics import OperatorMetrics
from tandem_operator.pods import complaint
from tests.support import manifests
from tests.support.worlds.operator_cluster import NAMESPACE, Cluster
from tests.support.worlds.operator_job import IMAGES, TASK, job

ALLOWED = ("metadata.labels", "spec.nodeSelector", "spec.serviceAccountName=training", "spec.containers.env")
KEY = (NAMESPACE, "digits")


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


async def test_such_a_job_has_stalled_and_gets_no_pods_until_it_is_changed() -> None:
    cluster, cache = Cluster(), Cache()
    api: Any = cluster
    controller = Controller(api, api, cache, IMAGES, OperatorMetrics(), b"key", template_fields=ALLOWED)
    whole = manifests.manifest("digits", NAMESPACE, trainer=TASK, **asked(hostNetwork=True))
    cluster.put(kinds.JOB, whole)
    cache.see(kinds.JOB, cluster.objects[kinds.JOB, *KEY])
    await controller.look(KEY)
    status = Status.parse(cluster.objects[kinds.JOB, *KEY]["status"])
    stalled = {one.type: (one.status, one.reason) for one in status.conditions}
    assert stalled["Stalled"] == ("True", "TemplateRefused")
    assert "workers.template sets spec.hostNetwork" in (status.message or "")
    assert cluster.pods() == []
    cluster.edit(kinds.JOB, "digits", {"workers": {"template": None}})
    cache.see(kinds.JOB, cluster.objects[kinds.JOB, *KEY])
    await controller.look(KEY)
    assert cluster.pods() != []
