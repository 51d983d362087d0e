"""The chart's MLflow server: a job is sent to it, with one point a step however often its pods are killed."""

import json
from typing import Any

import pytest

from tests.support.cluster.helm import CHART, Helm, image_values
from tests.support.cluster.images import Images, mlflow
from tests.support.cluster.operated import Job, manifest
from tests.support.cluster.pods import Namespace
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(1200), pytest.mark.full("charts", "coordinator", "operator")]

# Run in the server's own pod, which reaches nobody else.
ASK = """
import json, logging, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from mlflow import MlflowClient
client = MlflowClient("http://localhost:5000")
experiment = client.get_experiment_by_name("tracked")
runs = client.search_runs([experiment.experiment_id]) if experiment else []
found = []
for run in runs:
    history = client.get_metric_history(run.info.run_id, "train/loss")
    found.append({"status": run.info.status, "steps": [one.step for one in history]})
versions = [version.tags for version in client.search_model_versions("name='tracked'")]
print(json.dumps({"runs": found, "versions": versions}))
"""


def test_the_chart_s_server_has_one_run_with_a_point_a_step_after_kills(
    helm: Helm, images: Images, system: Namespace, namespace: Namespace, released: None
) -> None:
    values = image_values(images)
    place, _, rest = mlflow().rpartition("/")
    repository, _, tag = rest.rpartition(":")
    values["images"]["mlflow"] = {"registry": place, "repository": repository, "tag": tag}
    values["mlflow"] = {"enabled": True, "storage": {"size": "1Gi"}}
    helm("install", "tandem", CHART, f"--namespace={system.name}", "--wait", "--timeout=300s", values=values)

    def told() -> dict[str, Any]:
        said = system("exec", "deployment/tandem-mlflow", "--", "python", "-c", ASK)
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        return found

    job = Job(namespace, "tracked")
    job.apply(manifest("tracked", tracking={"mlflow": {}}))
    until(lambda: any(run["steps"] for run in told()["runs"]), "points in MLflow", 300, pause=1.0)
    # A worker and the coordinator, which is what sends.
    for role in ("worker", "coordinator"):
        label = f"tandem.dev/role={role}"
        (name, *_) = namespace("get", "pods", "-l", label, "-o", "jsonpath={.items[*].metadata.name}").split()
        namespace("delete", "pod", name, "--grace-period=0", "--force", "--wait=false")
    job.reaches("Succeeded", seconds=400)

    (run,) = until(
        lambda: [one for one in told()["runs"] if one["status"] == "FINISHED"], "the end in MLflow", 60, pause=1.0
    )
    steps = run["steps"]
    assert sorted(steps) == list(range(1, max(steps) + 1)), "each step once"
    assert max(steps) == job.status["progress"]["totalSteps"]
    (version,) = told()["versions"]
    assert version["tandem.checkpoint"].startswith("step-")
