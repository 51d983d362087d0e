"""A node is lost while a job trains: the rest goes on, and what was lost comes back on another node."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import ON_OUR_OWN
from tests.support.cluster.images import Images
from tests.support.cluster.machine.binaries import build
from tests.support.cluster.machine.kubectl import Kubectl
from tests.support.cluster.machine.node import Node
from tests.support.cluster.operated import APART, LONG, Job, manifest, operated, seen
from tests.support.cluster.pods import restricted

pytestmark = [pytest.mark.full("operator", "coordinator", "trainer"), pytest.mark.alone, ON_OUR_OWN]


@pytest.fixture
def job(images: Images, tmp_path: Path) -> Iterator[Job]:
    """A job that trains with a worker on each node."""
    with restricted() as namespace, operated(namespace, images, tmp_path):
        found = Job(namespace, "spread")
        workers = {"replicas": 2, "minReplicas": 1, "template": APART}
        found.apply(manifest("spread", trainer=LONG, workers=workers, elasticity={"growCooldownSeconds": 1}))
        found.becomes(lambda: found.status.get("workers", {}).get("ready") == 2, "two workers")
        found.trains()
        assert len(set(places(found, "worker").values())) == 2, places(found, "worker")
        yield found


def places(job: Job, role: str) -> dict[str, str]:
    """The nodes of the pods that run and are not about to go."""
    live = job.live(role)
    return {
        pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in job.pods(role) if pod["metadata"]["name"] in live
    }


@pytest.mark.timeout(500)
@pytest.mark.parametrize("with_coordinator", [False, True], ids=["without the coordinator", "with the coordinator"])
def test_a_lost_node(job: Job, with_coordinator: bool) -> None:
    (home,) = places(job, "coordinator").values()
    before = places(job, "worker")
    other = next(node for node in before.values() if node != home)
    lost = Node(home if with_coordinator else other)
    kept = other if with_coordinator else home
    generation, step = job.status["generation"], job.step

    lost.kill()
    try:
        # The lost one's pods are told apart from live ones only once the cluster says that the node is not ready.
        job.becomes(lambda: job.status["generation"] > generation, "a group without the lost node", 150.0)
        job.trains(beyond=step)
        assert seen(job, ["CoordinatorReplaced"]) == with_coordinator
        replaced = [name for name, node in before.items() if node == lost.name]
        job.becomes(
            lambda: [name for name, node in places(job, "worker").items() if node == kept and name not in before],
            "a worker in the place of the lost one",
            150.0,
        )
        job.becomes(lambda: job.status["workers"]["ready"] == 2, "its full size", 150.0)
        job.trains(beyond=job.step)
        assert not set(replaced) & set(places(job, "worker"))
    finally:
        lost.start(build())
    lost.wait_until_ready(Kubectl(build()))
    job.becomes(lambda: len(job.pods("worker")) == 2, "nothing left of the lost worker")
    job.trains(beyond=job.step)
