"""Jobs whose workers wait in a queue of a real Kueue as pod groups, because the operator may not read flavors. The GPUs
are only counted."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.cluster import ON_OUR_OWN, kueue
from tests.support.cluster.operated import LONG, Job, Operator, kubectl, manifest
from tests.support.cluster.pods import Namespace, restricted
from tests.support.waiting import until

pytestmark = [pytest.mark.full("operator", "coordinator", "trainer"), ON_OUR_OWN]
GPU = "nvidia.com/gpu"
QUEUE = "gpus"
ELASTIC = {"growAfterSeconds": 1, "growCooldownSeconds": 1}


@pytest.fixture(scope="module")
def namespace(kueue_programs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    """One that Kueue looks after, with a queue for two GPUs."""
    with restricted() as found, kueue.running(kueue.OLDEST, tmp_path_factory.mktemp("kueue")):
        kubectl("label", "namespace", found.name, *(f"{key}={value}" for key, value in kueue.LABEL.items()))
        kueue.queue(found, QUEUE, {GPU: "2"})
        yield found
        # What a test that failed has left would be queued again and again, and its queue never be free to go.
        found("delete", "dtj", "--all", "--wait=false")


def queued(name: str, **policy: object) -> dict[str, object]:
    workers = {"replicas": 2, "minReplicas": 1, "maxReplicas": 2, "resources": {"limits": {GPU: 1}}}
    return manifest(name, trainer=LONG, workers=workers, elasticity=ELASTIC, runPolicy={"queueName": QUEUE, **policy})


def size(job: Job) -> int:
    return int(job.status.get("worldSize", 0))


def has(job: Job, workers: int) -> None:
    job.becomes(lambda: size(job) == workers and len(job.live("worker")) == workers, f"a group of {workers}", 180.0)


def waits(job: Job) -> None:
    job.becomes(lambda: "gates" in job.status.get("message", ""), "a message that it waits in its queue")
    assert "SchedulingGated" in job.reasons


def change(job: Job, **policy: object) -> None:
    job.namespace("patch", f"dtj/{job.name}", "--type=merge", "-p", json.dumps({"spec": {"runPolicy": policy}}))


@pytest.mark.timeout(900)
def test_workers_of_a_queue_start_together_and_give_back_what_they_had_however_they_end(
    namespace: Namespace, operator: Operator, urgent: str
) -> None:
    first, second = Job(namespace, "first"), Job(namespace, "second")
    first.apply(queued("first"))
    has(first, 2)
    before = first.live("worker")
    namespace("delete", "pod", before[0], "--wait=false")
    first.becomes(lambda: before[0] not in first.live("worker"), "the worker has gone")
    has(first, 2)
    assert set(first.live("worker")) & set(before) == {before[1]}, "the other one stays"
    for replicas in (1, 2):
        namespace("scale", "dtj/first", f"--replicas={replicas}")
        has(first, replicas)

    second.apply(queued("second"))
    waits(second)
    assert len(first.live("worker")) == 2

    change(first, suspend=True)
    has(second, 2)
    change(first, suspend=False)
    waits(first)

    change(second, activeDeadlineSeconds=1)
    second.reaches("Failed")
    has(first, 2)

    third = Job(namespace, "third")
    third.apply(queued("third", priorityClassName=urgent))
    has(third, 2)
    waits(first)
    namespace("delete", "dtj", "third", "--wait=false")
    has(first, 2)

    assert "ExcessPodDeleted" not in namespace("get", "events", "-o", "json"), "Kueue never had to correct us"
    for job in (first, second):
        namespace("delete", "dtj", job.name, "--wait=false")
    workers = ("get", "pods", "-l", "tandem.dev/role=worker", "-o", "name")
    until(lambda: not namespace(*workers), "no worker is left, and nothing holds one back", 120.0)


@pytest.mark.timeout(500)
def test_the_example_runs_to_its_end_and_leaves_the_queue_empty(namespace: Namespace, operator: Operator) -> None:
    job = Job(namespace, "queued")
    namespace("apply", "-f", str(ROOT / "examples/queued.yaml"))
    job.reaches("Succeeded", seconds=300.0)

    def admitted() -> int:
        return int(namespace.get("localqueue", QUEUE)["status"]["admittedWorkloads"])

    job.becomes(lambda: admitted() == 0, "that its quota is free again, with its pods still there")
    assert len(job.pods("worker")) == 2, "ended pods stay, for their logs"
    namespace("delete", "dtj", "queued", "--wait=false")
    job.becomes(lambda: not job.pods("worker"), "nothing holds a pod back")
