"""The chart of the previous version is upgraded to this one and rolled back, while jobs of both run."""

import json
from pathlib import Path

import pytest

from tests.support.cluster.helm import CHART, Helm, image_values
from tests.support.cluster.images import Images
from tests.support.cluster.operated import LONG, Job, manifest
from tests.support.cluster.pods import Manifest, Namespace
from tests.support.previous import Previous
from tests.support.previous.images import provide
from tests.support.waiting import until

pytestmark = [
    pytest.mark.alone,
    pytest.mark.full("core", "cli", "coordinator", "trainer", "evaluator", "operator", "charts", "images"),
]

UNTIL_TOLD = "import os, time\nwhile not os.path.exists('/tmp/end'): time.sleep(0.2)"
"""A script that knows nothing of Tandem and ends when it is told to."""


def script(name: str) -> Manifest:
    trainer = {"command": ["python", "-c", UNTIL_TOLD]}
    return manifest(name, trainer=trainer, workers={"replicas": 1}, evaluators={"replicas": 0})


def workers(job: Job) -> dict[str, str]:
    """Each worker pod that runs, and which image it has."""
    live = set(job.live("worker"))
    found = {pod["metadata"]["name"]: pod["spec"]["containers"][0]["image"] for pod in job.pods("worker")}
    return {name: image for name, image in found.items() if name in live}


def coordinated_by(job: Job, image: str) -> bool:
    """Whether its coordinator is of that version, and answers."""
    pods = [pod for pod in job.pods("coordinator") if pod["metadata"]["name"] in job.live("coordinator")]
    return [pod["spec"]["containers"][0]["image"] for pod in pods] == [image]


def ends(job: Job) -> None:
    for name in job.live("worker"):
        job.namespace("exec", name, "-c", "worker", "--", "touch", "/tmp/end")
    assert job.reaches("Succeeded", "Failed") == "Succeeded", job.describe()


@pytest.mark.timeout(1200)
def test_jobs_train_through_an_upgrade_and_a_rollback(
    helm: Helm, images: Images, system: Namespace, namespace: Namespace, released: None, tmp_path: Path
) -> None:
    previous = Previous(tmp_path / "previous")
    older = provide(images, previous)
    at, waiting = ("tandem", f"--namespace={system.name}"), ("--wait", "--timeout=150s")
    helm("install", *at, previous.folder / "charts/tandem", *waiting, "--take-ownership", values=image_values(older))

    trained, plain = Job(namespace, "trained"), Job(namespace, "plain")
    trained.apply(manifest("trained", trainer=LONG))
    plain.apply(script("plain"))
    trained.becomes(lambda: trained.status.get("worldSize") == 2 and trained.trains(), "two workers in one group")
    plain.reaches("Running")
    before = {job.name: (workers(job), job.status["generation"]) for job in (trained, plain)}
    assert set(workers(trained).values()) == {older.trainer}

    def nothing_has_happened_to(*jobs: Job) -> None:
        for job in jobs:
            assert (workers(job), job.status["generation"]) == before[job.name], job.describe()

    helm("upgrade", *at, CHART, *waiting, values=image_values(images))
    for job in (trained, plain):
        until(lambda job=job: coordinated_by(job, images.operator), "the coordinator of this version", 180.0)
    trained.trains(beyond=trained.step + 20)
    until(lambda: trained.live("evaluator"), "the evaluator of this version", 180.0, otherwise=trained.describe)
    evaluated = trained.status.get("latestEvaluation", {}).get("step", 0)
    trained.becomes(
        lambda: trained.status.get("latestEvaluation", {}).get("step", 0) > evaluated, "evaluations by this version"
    )
    nothing_has_happened_to(trained, plain)

    # What is lost of a group comes back as what it was.
    lost = trained.live("worker")[1]
    namespace("delete", "pod", lost, "--wait=false")
    trained.becomes(lambda: lost not in workers(trained) and len(workers(trained)) == 2, "another worker")
    assert set(workers(trained).values()) == {older.trainer}
    trained.becomes(lambda: trained.status.get("worldSize") == 2, "two workers in one group again")
    trained.trains(beyond=trained.step + 20)
    fresh = Job(namespace, "fresh")
    fresh.apply(script("fresh"))
    fresh.reaches("Running")
    assert set(workers(fresh).values()) == {images.trainer}
    for job in (trained, fresh):
        before[job.name] = workers(job), job.status["generation"]

    helm("rollback", *at, "1", *waiting)
    for job in (trained, plain, fresh):
        until(lambda job=job: coordinated_by(job, older.operator), "the coordinator of the older version", 180.0)
    trained.trains(beyond=trained.step + 20)
    nothing_has_happened_to(trained, plain, fresh)
    assert not _set_aside(trained), "the older version takes nothing for damaged"
    ends(plain)
    ends(fresh)
    namespace("delete", "dtj", "--all", "--wait=false")


def _set_aside(job: Job) -> list[str]:
    (worker, *_) = job.live("worker")
    listing = "import json, os; print(json.dumps(os.listdir(os.environ['TANDEM_RUN_DIR'] + '/checkpoints')))"
    found = json.loads(job.namespace("exec", worker, "-c", "worker", "--", "python", "-c", listing))
    return [name for name in found if ".bad" in name and not name.endswith(".json")]
