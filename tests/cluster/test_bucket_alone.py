"""A job without a volume loses one pod of each role, and its bucket has the whole run.

`make e2e ARGS="--full tests/cluster/test_bucket_alone.py"` runs it alone.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.evaluations import evaluation_progress
from tandem.rundir.layout import RunDir
from tests.support.buckets import BUCKET, CREDENTIALS, get_copy, moto, place
from tests.support.cluster.machine.places import OUTSIDE
from tests.support.cluster.operated import Job, Operator, manifest, sample_digests
from tests.support.cluster.pods import Namespace
from tests.support.planned import planned_samples
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(900), pytest.mark.full("core", "coordinator", "operator", "trainer", "evaluator")]

PREFIX = "runs/alone"
STEPS = 400 * 23
TRAINER = {
    "task": "image-classification",
    "parameters": {"model": "cnn", "data": {"name": "digits"}},
    "loop": {"epochs": 400, "globalBatchSize": 64},
}
COUNTS = {"worker": 2, "coordinator": 1, "evaluator": 2}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with moto(OUTSIDE) as url:
        yield url


def whole(server: str) -> dict[str, Any]:
    """Two workers and two evaluators, and a bucket that is all they share."""
    storage = {
        "bucket": f"s3://{BUCKET}/{PREFIX}",
        "endpoint": server,
        "region": "us-east-1",
        "credentialsSecret": "bucket",
        "shared": False,
    }
    return manifest(
        "alone",
        trainer=TRAINER,
        evaluators={"replicas": 2, "policy": "Every"},
        checkpoint={"everySteps": 400, "keepLast": 100, "storage": storage},
        elasticity={"growCooldownSeconds": 1},
    )


def is_replaced(job: Job, role: str, before: list[str]) -> bool:
    now = job.live(role)
    return len(now) == len(before) and now != before


def logged_steps(rundir: RunDir) -> list[dict[str, Any]]:
    """The records of all steps, generation after generation."""
    return [
        json.loads(line)
        for log in sorted(rundir.log.glob("train-g*.jsonl"))
        for line in log.read_text().splitlines()
        if json.loads(line)["kind"] == "step"
    ]


def test_a_job_without_a_volume_loses_a_pod_of_each_role_and_is_trained_and_evaluated_to_its_end(
    namespace: Namespace, operator: Operator, server: str, tmp_path: Path
) -> None:
    namespace("create", "secret", "generic", "bucket", *(f"--from-literal={k}={v}" for k, v in CREDENTIALS.items()))
    job = Job(namespace, "alone")
    job.apply(whole(server))
    for role, count in COUNTS.items():
        pods = until(lambda role=role, count=count: len(found := job.pods(role)) == count and found, f"{count} {role}s")
        volumes = {one["name"]: one for pod in pods for one in pod["spec"]["volumes"]}
        assert "emptyDir" in volumes["checkpoints"], volumes
        assert not any("persistentVolumeClaim" in one for one in volumes.values())
    assert not namespace("get", "pvc", "-o", "name").strip()

    store = place(server, PREFIX)
    job.trains()
    for role in COUNTS:
        before = until(lambda role=role: len(found := job.live(role)) == COUNTS[role] and found, f"every {role}")
        saved = len(list(store.entries("checkpoints")))
        until(lambda saved=saved: len(list(store.entries("checkpoints"))) > saved, "another checkpoint in the bucket")
        namespace("delete", "pod", before[0], "--force", "--grace-period=0")
        job.becomes(lambda role=role, before=before: is_replaced(job, role, before), f"another {role}")
        job.trains(beyond=job.step)
    job.reaches("Succeeded", seconds=500)
    until(lambda: store.read("DONE"), "the end of the run in the bucket", otherwise=job.describe)

    assert job.step == STEPS
    assert not namespace("get", "pvc", "-o", "name").strip()
    rundir = get_copy(f"{server} alone", tmp_path / "run")
    assert sample_digests(logged_steps(rundir)) == planned_samples(STEPS)
    saved = rundir.committed()
    assert saved[0].step == STEPS
    unevaluated = [one.name for one in saved if evaluation_progress(rundir, one.reference) != "merged"]
    assert not unevaluated, job.describe()
