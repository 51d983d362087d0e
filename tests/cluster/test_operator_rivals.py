"""Two jobs that each hold half of what the other needs, on a real cluster with 4 GPUs a node that are only counted."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.formatting import parse_rfc3339
from tests.support.cluster import ON_OUR_OWN
from tests.support.cluster.images import Images
from tests.support.cluster.machine.images import PAUSE
from tests.support.cluster.machine.places import node_names
from tests.support.cluster.operated import LONG, Job, kubectl, manifest, operated
from tests.support.cluster.pods import Namespace, container, pod, restricted

pytestmark = [pytest.mark.full("operator", "coordinator"), pytest.mark.alone, ON_OUR_OWN]
MAX_OF_A_NODE = {"limits": {"nvidia.com/gpu": 3}}
WORKERS = {"replicas": 2, "minReplicas": 2, "processesPerReplica": 1, "resources": MAX_OF_A_NODE}


BACKOFF_SECONDS = 12.0
"""The scheduler looks again at a pod that found no place after 10 s at most; then priority alone decides."""


def waiting(job: Job) -> float:
    """How long both workers of a job have been without a node."""
    conditions = [one for found in job.pods("worker") for one in found["status"].get("conditions", [])]
    since = [parse_rfc3339(one["lastTransitionTime"]) or 0.0 for one in conditions if one["type"] == "PodScheduled"]
    return time.time() - max(since) if len(since) == 2 else 0.0


@pytest.fixture
def namespace(images: Images, tmp_path: Path) -> Iterator[Namespace]:
    with restricted() as found, operated(found, images, tmp_path, "--patience=30"):
        yield found


@pytest.fixture
def first(namespace: Namespace) -> Iterator[str]:
    """A priority class whose pods are placed before others and take nobody's place."""
    name = f"{namespace.name}-first"
    whole = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": 1000,
        "preemptionPolicy": "Never",
    }
    kubectl("create", "-f", "-", stdin=json.dumps(whole))
    yield name
    kubectl("delete", "priorityclass", name)


@pytest.mark.timeout(500)
def test_the_younger_gives_its_half_to_the_older(namespace: Namespace, first: str) -> None:
    _, node = node_names(2)
    holder = pod([container("holder", PAUSE, resources=MAX_OF_A_NODE)], nodeName=node)
    holder["securityContext"]["runAsUser"] = 65532
    metadata = {"name": "holder"}
    namespace.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": holder})

    older, younger = Job(namespace, "older"), Job(namespace, "younger")
    older.apply(manifest("older", trainer=LONG, workers=WORKERS))
    older.becomes(lambda: len(older.live("worker")) == 1, "one worker is placed")
    policy = {"priorityClassName": first}
    younger.apply(manifest("younger", trainer=LONG, workers=WORKERS, runPolicy=policy))
    younger.becomes(lambda: waiting(younger) > BACKOFF_SECONDS, "its workers wait for nothing but GPUs")
    namespace("delete", "pod", "holder", "--grace-period=0", "--force")
    younger.becomes(lambda: len(younger.live("worker")) == 1, "the other half")

    older.trains(seconds=200)
    assert "gave its workers back to older" in younger.status["message"]
    assert any(told.startswith("GaveWay") for told in younger.events())
    namespace("delete", "dtj", "older", "--wait=false")
    younger.trains(seconds=250)
