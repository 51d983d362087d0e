"""The cluster that `make e2e` starts does what tests rely on: its nodes run pods, share volumes, and can be lost."""

import json
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster import ON_OUR_OWN
from tests.support.cluster.machine.binaries import build
from tests.support.cluster.machine.images import PAUSE
from tests.support.cluster.machine.kubectl import Kubectl
from tests.support.cluster.machine.node import Node
from tests.support.cluster.machine.places import node_names
from tests.support.waiting import until

pytestmark = [pytest.mark.full("images"), pytest.mark.alone, ON_OUR_OWN]
NODES = node_names(2)


@pytest.fixture(scope="module")
def kubectl() -> Kubectl:
    return Kubectl(build())


@pytest.fixture
def namespace(kubectl: Kubectl) -> Iterator[str]:
    name = f"tandem-test-{secrets.token_hex(4)}"
    kubectl("create", "namespace", name)
    # A pod cannot start before the controller has made its service account.
    until(lambda: kubectl.succeeds("get", "serviceaccount", "default", "-n", name), "the service account")
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def refuses(address: str) -> bool:
    """Whether a connection to this pod is refused, and does not just come to nothing."""
    try:
        socket.create_connection((address, 9), timeout=2.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    raise AssertionError(f"somebody listens at {address}")


def claim() -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "shared"}, "spec": spec}


def pod(name: str, node: str, gpus: int) -> dict[str, Any]:
    container = {
        "name": "pause",
        "image": PAUSE,
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
    }
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "containers": [container],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}],
        "terminationGracePeriodSeconds": 0,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def create(kubectl: Kubectl, namespace: str, *objects: dict[str, Any]) -> None:
    together = {"apiVersion": "v1", "kind": "List", "items": objects}
    kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(together))


def wait_for(kubectl: Kubectl, namespace: str, name: str, ready: bool = True) -> None:
    # GPUs may still be held by pods of the file before, which have a grace period of a minute.
    kubectl("wait", f"pod/{name}", "-n", namespace, f"--for=condition=Ready={ready}", "--timeout=150s")


def test_pods_of_both_nodes_share_a_volume_and_gpus_are_counted(kubectl: Kubectl, namespace: str) -> None:
    create(kubectl, namespace, claim(), *(pod(node, node, gpus=3) for node in NODES))
    for node in NODES:
        wait_for(kubectl, namespace, node)
    # Only now: until the volume was there, none could be scheduled, and it might have been the first.
    create(kubectl, namespace, pod("too-much", NODES[0], gpus=2))
    events = ("get", "events", "-n", namespace, "--field-selector=involvedObject.name=too-much")
    until(lambda: "Insufficient nvidia.com/gpu" in kubectl(*events), "the scheduler's refusal")


def test_a_node_can_be_lost_and_comes_back_with_its_pods(kubectl: Kubectl, namespace: str) -> None:
    create(kubectl, namespace, claim(), pod("steady", NODES[1], gpus=1))
    wait_for(kubectl, namespace, "steady")
    address = kubectl("get", "pod", "steady", "-n", namespace, "-o", "jsonpath={.status.podIP}").strip()
    assert refuses(address), "the pod is there, and nothing listens"
    node = Node(NODES[1])
    node.kill()
    try:
        assert not refuses(address), "nobody is there any more who could refuse"
        kubectl("wait", f"node/{node.name}", "--for=condition=Ready=Unknown", "--timeout=60s")
        wait_for(kubectl, namespace, "steady", ready=False)
    finally:
        node.start(build())
    node.wait_until_ready(kubectl)
    wait_for(kubectl, namespace, "steady")
