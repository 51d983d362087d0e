"""What a job's pods look like and when they are made, on a real cluster."""

import json
from datetime import datetime

import pytest

from tests.support.cluster.operated import LONG, Job, Operator, manifest, secret
from tests.support.cluster.pods import Manifest, Namespace


@pytest.mark.timeout(400)
def test_all_pods_are_made_at_once_and_workers_wait_for_their_coordinator(
    namespace: Namespace, operator: Operator
) -> None:
    job = Job(namespace, "at-once")
    job.apply(manifest("at-once", trainer=LONG))
    job.trains()
    pods = [pod for role in ("coordinator", "worker", "evaluator") for pod in job.pods(role)]
    assert len(pods) == 4, job.describe()
    # The API server keeps whole seconds.
    assert len({_made(pod) for pod in pods}) <= 2
    assert all(status["restartCount"] == 0 for pod in pods for status in pod["status"]["containerStatuses"])
    job.namespace("delete", "dtj", "at-once")


@pytest.mark.timeout(400)
def test_a_job_on_the_volume_of_one_that_failed_begins_anew_and_one_that_trains_something_else_gets_no_workers(
    namespace: Namespace, operator: Operator
) -> None:
    shared = {"everySteps": 50, "storage": {"claimName": "left"}}
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "left"}, "spec": spec}
    namespace("apply", "-f", "-", stdin=json.dumps(claim))
    job = Job(namespace, "again")
    job.apply(manifest("again", trainer=LONG, checkpoint=shared, runPolicy={"activeDeadlineSeconds": 100000}))
    job.trains()
    namespace("delete", "dtj", "again")
    job.apply(manifest("again", trainer=LONG, checkpoint=shared))
    job.trains(beyond=50)
    namespace("delete", "dtj", "again")
    other = {"task": "image-classification", "config": {"model": "baby-cnn", "data": {"name": "digits"}}}
    job.apply(manifest("again", trainer=other, checkpoint=shared))
    job.becomes(lambda: "trains something else" in str(job.status.get("message")), "its reason")
    job.becomes(lambda: not job.live("worker"), "no workers", 60.0)
    namespace("delete", "dtj", "again")


@pytest.mark.timeout(400)
def test_a_deleted_token_comes_back_as_it_was_and_the_job_goes_on(namespace: Namespace, operator: Operator) -> None:
    job = Job(namespace, "token")
    job.apply(manifest("token", trainer=LONG))
    job.trains()
    before, generation = secret(namespace, "token-token"), job.status["generation"]
    namespace("delete", "secret", "token-token")
    operator.kill()
    operator.start()
    job.trains(beyond=job.step)
    assert job.status["generation"] == generation, job.describe()
    victim = job.live("worker")[0]
    namespace("delete", "pod", victim)
    job.becomes(lambda: job.status.get("worldSize") == 2 and job.status["generation"] > generation, "its full size")
    assert secret(namespace, "token-token") == before
    namespace("delete", "dtj", "token")


def _made(pod: Manifest) -> datetime:
    return datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
