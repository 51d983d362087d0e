"""The operator as it is installed: its image, in a pod that is `restricted`, with a service account."""

import json
from collections.abc import Iterator

import pytest

from tests.support.cluster.images import Images
from tests.support.cluster.operated import ACCOUNT, CRD, Job, account, kubectl, manifest
from tests.support.cluster.pods import Manifest, Namespace, container, restricted
from tests.support.waiting import until

pytestmark = [pytest.mark.full("operator", "images")]

PORT = 8080


@pytest.fixture(scope="module")
def namespace(images: Images) -> Iterator[Namespace]:
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    with restricted() as found:
        for one in [*account(), deployment(found, images)]:
            found("apply", "-f", "-", stdin=json.dumps(one))
        found("rollout", "status", "deployment/tandem-operator", "--timeout=120s", seconds=150)
        yield found


def deployment(namespace: Namespace, images: Images) -> Manifest:
    given = {"OPERATOR": images.operator, "TRAINER": images.trainer, "EVALUATOR": images.evaluator}
    probes = {
        f"{kind}Probe": {"httpGet": {"path": path, "port": PORT}, "periodSeconds": 2}
        for kind, path in {"liveness": "/healthz", "readiness": "/readyz"}.items()
    }
    ours = container(
        "operator",
        images.operator,
        *("python", "-m", "tandem_operator", f"--namespace={namespace.name}", f"--port={PORT}"),
        env=[{"name": f"TANDEM_{name}_IMAGE", "value": image} for name, image in given.items()],
        **probes,
    )
    spec = {
        "serviceAccountName": ACCOUNT,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [ours],
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    labels = {"app": "tandem-operator"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "tandem-operator"},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def operators(namespace: Namespace) -> list[str]:
    found = json.loads(namespace("get", "pods", "-l", "app=tandem-operator", "-o", "json"))["items"]
    return [
        pod["metadata"]["name"]
        for pod in found
        if "deletionTimestamp" not in pod["metadata"]
        and any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", []))
    ]


@pytest.mark.timeout(600)
def test_it_runs_a_job_to_its_end_and_may_die_meanwhile(namespace: Namespace) -> None:
    job = Job(namespace, "short")
    whole = manifest("short")
    # The step of a job is written every ten seconds, or every twenty: it must still train when one was seen.
    whole["spec"]["trainer"]["loop"]["epochs"] = 400
    job.apply(whole)
    job.trains()
    before = operators(namespace)
    namespace("delete", "pod", *before, "--wait=false")
    until(lambda: operators(namespace) not in ([], before), "another operator", 120.0)
    job.reaches("Succeeded", seconds=400)
    assert job.status["latestEvaluation"]["step"] == job.status["progress"]["totalSteps"]
    assert job.status["provenance"]["entries"] > job.status["generation"]
    said = namespace("logs", "deployment/tandem-operator")
    assert "event=look-broken" not in said
    assert "event=look-failed" not in said
