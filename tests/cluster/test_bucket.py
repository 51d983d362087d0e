"""A job with a bucket loses its pods and its volume, and continues when it is created again."""

from collections.abc import Iterator

import pytest

from tests.support.buckets import BUCKET, CREDENTIALS, moto, place
from tests.support.cluster.machine.places import OUTSIDE
from tests.support.cluster.operated import Job, Operator, manifest
from tests.support.cluster.pods import Namespace
from tests.support.manifests import images
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.full("core", "coordinator", "operator")]

SAVES = {"everySteps": 200}


def trainer(epochs: int) -> dict[str, object]:
    """Digits for so many epochs of 23 steps."""
    config = {"model": "baby-cnn", "data": {"name": "digits"}, "epochs": epochs, "globalBatchSize": 64}
    return images(config)


@pytest.fixture
def server() -> Iterator[str]:
    with moto(OUTSIDE) as url:
        yield url


def test_a_job_that_lost_its_cluster_goes_on_from_its_bucket(
    namespace: Namespace, operator: Operator, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    keys = [f"--from-literal={name}={value}" for name, value in CREDENTIALS.items()]
    namespace("create", "secret", "generic", "bucket", *keys)
    storage = {
        "bucket": f"s3://{BUCKET}/jobs/moved",
        "endpoint": server,
        "region": "us-east-1",
        "credentialsSecret": "bucket",
        "retain": False,
    }
    store = place(server, "jobs/moved")
    job = Job(namespace, "moved")
    job.apply(manifest("moved", trainer=trainer(100_000), checkpoint={**SAVES, "storage": storage}))
    job.trains()
    until(lambda: len(list(store.entries("checkpoints"))) > 1, "checkpoints in the bucket", otherwise=job.describe)
    # Nothing of it stays: neither pods nor claim.
    namespace("delete", "dtj", "moved", "--cascade=foreground", "--timeout=120s")
    until(lambda: not namespace("get", "pvc", "-o", "name").strip(), "the volume is gone")
    saved = sorted(entry.name for entry in store.entries("checkpoints"))
    step = int(saved[-1].split("/")[1].removeprefix("step-"))
    # As many epochs as are begun, and some more.
    epochs = step // 23 + 20
    job.apply(manifest("moved", trainer=trainer(epochs), checkpoint={**SAVES, "storage": storage}))
    job.reaches("Succeeded")
    until(lambda: store.read("DONE"), "the end of the run in the bucket", otherwise=job.describe)
    records = sorted(entry.name for entry in store.entries("generations"))
    assert len(records) > 1, records
    newest = store.read(records[-1])
    assert newest is not None
    assert f'"step": {step}' in newest.data.decode()
    assert job.step == epochs * 23
