"""A real API server that answers 429 and 5xx, late, and does some of what it has not answered: a storm."""

import json
import time
from pathlib import Path

import pytest

from tests.support.cluster.attacks import idle
from tests.support.cluster.images import Images
from tests.support.cluster.operated import Operator, install, kubeconfig
from tests.support.cluster.pods import Namespace
from tests.support.cluster.storm import Storm
from tests.support.waiting import until

JOBS, WORKERS, LOST = 20, 4, 20
"""Jobs, workers of each, and workers that are deleted in the storm."""
WANTED = JOBS * (WORKERS + 1)
"""Pods: each job has a coordinator, too."""
CALM_SECONDS = 20.0


@pytest.mark.full("operator")
@pytest.mark.timeout(600)
def test_in_a_storm_as_many_pods_are_made_as_are_wanted(namespace: Namespace, images: Images, tmp_path: Path) -> None:
    install(namespace)
    with (
        Storm() as storm,
        Operator(namespace, images, kubeconfig(namespace, tmp_path, storm.address), tmp_path / "log") as operator,
    ):
        operator.launch()
        jobs = [idle(f"job-{number:02d}", workers={"replicas": WORKERS}) for number in range(JOBS)]
        namespace("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": jobs}))

        def live() -> list[str]:
            items = json.loads(namespace("get", "pods", "-o", "json"))["items"]
            return [item["metadata"]["name"] for item in items if "deletionTimestamp" not in item["metadata"]]

        operator.becomes(lambda: len(live()) == WANTED, "all pods", 240.0)
        workers = [name for name in live() if "-worker-" in name]
        namespace("delete", "pod", *workers[:: len(workers) // LOST], "--wait=false")
        until(lambda: len(storm.made) >= WANTED + LOST and len(live()) == WANTED, "their replacements", 240.0)
        # What was done without an answer shows once the storm is over.
        storm.blows = False
        time.sleep(CALM_SECONDS)
        assert len(live()) == WANTED
        assert len(storm.made) == len(set(storm.made)) == WANTED + LOST
        print(f"pods wanted {WANTED + LOST}, made {len(storm.made)}; answers {dict(storm.answers)}")
        assert storm.answers["429"] + storm.answers["500"] + storm.answers["done, and 503"] > JOBS
