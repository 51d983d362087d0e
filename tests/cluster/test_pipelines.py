"""Pipelines that go over several pods of a real cluster: a group has as many as make whole ones."""

import pytest

from tests.support.cluster.operated import LONG, Job, Operator, manifest, seen
from tests.support.cluster.pods import Namespace

pytestmark = [pytest.mark.full("operator", "coordinator", "trainer"), pytest.mark.timeout(900)]


def test_workers_come_and_go_and_pipelines_stay_whole(namespace: Namespace, operator: Operator) -> None:
    job = Job(namespace, "stages")
    trainer = LONG | {"loop": {**LONG["loop"], "strategy": "pipeline", "pipeline": {"stages": 2}}}
    workers = {"replicas": 2, "minReplicas": 1, "maxReplicas": 4}
    job.apply(manifest("stages", trainer=trainer, workers=workers, elasticity={"growCooldownSeconds": 1}))
    # The first job on a node has its image pulled, which is some GB.
    job.trains(seconds=400)
    with pytest.raises(AssertionError, match="must be a multiple of the stages of a pipeline"):
        namespace("scale", "dtj/stages", "--replicas=3")
    namespace("scale", "dtj/stages", "--replicas=4")
    job.becomes(lambda: job.status["workers"]["summary"] == "4/4", "two pipelines", seconds=240)
    job.trains(beyond=job.step)
    first, *_ = job.live("worker")
    namespace("delete", "pod", first, "--force", "--grace-period=0")
    job.becomes(lambda: seen(job, ["waits, because 2 replicas make whole pipelines together"]), "who waits")
    job.becomes(lambda: job.status["workers"]["summary"] == "4/4", "two pipelines again", seconds=240)
    job.trains(beyond=job.step)
    namespace("delete", "dtj", "stages", "--wait=false")
