"""One job from `kubectl apply` to its end, on a real cluster, with the operator's own rights and `restricted` pods."""

import json
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.cluster.background import Background
from tests.support.cluster.operated import LONG, Job, Operator, manifest
from tests.support.cluster.pods import Namespace


@pytest.mark.timeout(900)
@pytest.mark.full("operator", "coordinator", "trainer", "evaluator")
def test_an_example_is_applied_and_succeeds(namespace: Namespace, operator: Operator, tmp_path: Path) -> None:
    job = Job(namespace, "digits")
    namespace("apply", "-f", str(ROOT / "examples/digits.yaml"))
    # It trains for half a minute: only a watch is sure to see every status that is written.
    with Background(tmp_path / "shown.txt") as watch:
        watch.run(["kubectl", "-n", namespace.name, "get", "dtj", "digits", "--watch"])
        job.reaches("Succeeded", seconds=800)
        watch.becomes(lambda: "Succeeded" in watch.log(), "its end, as kubectl shows it", 60.0)
    head, *rows = [line.split() for line in watch.log().splitlines()]
    assert head[1:6] == ["PHASE", "WORKERS", "STEP", "LOSS", "BEST"]
    assert any(row[1:3] == ["Running", "2/2"] for row in rows), rows

    status = job.status
    assert status["bestCheckpoint"]["metric"] == "accuracy"
    assert status["bestCheckpoint"]["value"] >= 0.97
    assert status["progress"]["step"] == status["progress"]["totalSteps"]
    assert status["latestEvaluation"]["step"] == status["progress"]["step"], "the final checkpoint was not evaluated"
    conditions = {one["type"]: one["status"] for one in status["conditions"]}
    assert (conditions["Complete"], conditions["Running"]) == ("True", "False")
    told = " | ".join(job.events())
    assert "generation 1 with" in told
    assert "Succeeded" in told

    job.becomes(lambda: not job.live("worker") and not job.live("coordinator"), "nothing runs any more")
    assert "event=look-broken" not in operator.log()
    assert f'tandem_operator_jobs{{namespace="{namespace.name}",phase="Succeeded"}} 1.0' in operator.metrics()


def test_what_a_job_leaves_when_it_is_deleted_is_its_volume(namespace: Namespace, operator: Operator) -> None:
    job = Job(namespace, "short-lived")
    job.apply(manifest("short-lived", trainer=LONG))
    job.trains()
    namespace("delete", "dtj", "short-lived", "--wait=true")

    def left() -> list[str]:
        kinds = "pods,services,deployments,jobs,secrets,configmaps,persistentvolumeclaims"
        found = json.loads(namespace("get", kinds, "-l", "tandem.dev/job=short-lived", "-o", "json"))["items"]
        return sorted(one["kind"] for one in found)

    job.becomes(lambda: left() == ["PersistentVolumeClaim"], "only the volume is left")
