"""A job that has failed is tried again in place, on a real cluster."""

import json

import pytest

from tests.support.cluster.operated import LONG, Job, Operator, manifest, seen
from tests.support.cluster.pods import Namespace

KILL = """
import os, pathlib, time
killed, until = 0, time.monotonic() + 60
while not killed:
    assert time.monotonic() < until, "no rank is here"
    for one in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (one / "cmdline").read_bytes().split(bytes(1))
            if b"tandem_trainer" in words and b"tandem_trainer.agent" not in words:
                os.kill(int(one.name), 9)
                killed += 1
        except (FileNotFoundError, ProcessLookupError):
            pass  # It has ended meanwhile.
"""
"""Ends the ranks of a worker, as soon as there are some, and not its agent."""


@pytest.mark.timeout(400)
@pytest.mark.full("operator", "coordinator")
def test_a_failed_job_goes_on_from_its_newest_checkpoint(namespace: Namespace, operator: Operator) -> None:
    job = Job(namespace, "again")
    job.apply(manifest("again", trainer=LONG, elasticity={"maxRestarts": 0, "warmStart": False}))
    # A rank that is killed while a second worker joins was to leave anyway, and is no failure.
    job.becomes(lambda: job.status.get("worldSize") == 2, "a group of both workers")
    job.trains()
    job.becomes(lambda: job.status.get("latestCheckpoint"), "a checkpoint")
    namespace("exec", job.live("worker")[0], "--", "python3", "-c", KILL)
    job.reaches("Failed")
    kept = job.status["latestCheckpoint"]["step"]
    before = {pod["metadata"]["name"] for role in ("worker", "coordinator") for pod in job.pods(role)}
    namespace("wait", "dtj/again", "--for=condition=Stalled", "--timeout=10s")

    namespace("annotate", "dtj/again", "tandem.dev/retry-at=once")
    job.reaches("Running")
    assert job.status["retries"] == 1
    job.trains(beyond=kept)
    assert not before & {pod["metadata"]["name"] for role in ("worker", "coordinator") for pod in job.pods(role)}
    namespace("wait", "dtj/again", "--for=condition=Ready", "--timeout=10s")
    assert seen(job, ["Retried", "generation 2"]), job.describe()
    first = json.loads(namespace("get", "dtj", "again", "-o", "json"))["status"]
    assert first["latestCheckpoint"]["step"] >= kept, "it did not begin anew"
    namespace("delete", "dtj", "again", "--wait=false")
