"""The chart's MLflow server: a job is tracked there, and what was missed while it was away arrives when it is back."""

import json
from typing import Any

import pytest

from tests.support.cluster.helm import CHART, Helm, image_values
from tests.support.cluster.images import Images
from tests.support.cluster.operated import CRD, Job, kubectl, manifest
from tests.support.cluster.pods import Namespace
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(1800), pytest.mark.full("charts", "coordinator", "operator")]

EVERY = 50
EPOCHS = 250
"""So many that it still trains when the server is back: what was missed arrives before the end."""
SERVER = "deployment/tandem-mlflow"

# By MLflow's own client, in the server's pod: its policy lets nobody else in.
ASK = """
import json, logging, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from mlflow import MlflowClient
client = MlflowClient("http://localhost:5000")
experiment = client.get_experiment_by_name("tracked")
found = []
for run in client.search_runs([experiment.experiment_id]) if experiment else []:
    name, curves = run.info.run_id, {}
    for key in run.data.metrics:
        curves[key] = [[one.step, one.value] for one in client.get_metric_history(name, key)]
    found.append({"id": name, "status": run.info.status, "parameters": run.data.params, "curves": curves})
versions = []
for one in client.search_model_versions("name='tracked'"):
    files = client.list_artifacts(one.run_id, "checkpoints/" + one.tags["tandem.checkpoint"])
    versions.append({"run": one.run_id, "tags": one.tags, "files": {file.path: file.file_size for file in files}})
print(json.dumps({"runs": found, "versions": versions}))
"""


class Tracked:
    """What the server has of the job `tracked`."""

    def __init__(self, system: Namespace) -> None:
        self._system = system

    def all(self) -> dict[str, Any]:
        """Its runs, and the versions of its model."""
        said = self._system("exec", SERVER, "--", "python", "-c", ASK)
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        return found

    def last_step(self) -> int:
        """The newest step whose loss has arrived; 0 before the first."""
        curves = [run["curves"].get("train/loss", []) for run in self.all()["runs"]]
        return max((step for curve in curves for step, _ in curve), default=0)

    def goes_away(self) -> None:
        """Its pod is killed, and no other takes its place."""
        self._system("scale", SERVER, "--replicas=0")
        self._system("delete", "pod", "-l", "app.kubernetes.io/component=mlflow", "--force", "--grace-period=0")

    def comes_back(self) -> None:
        """A new pod on the same volume."""
        self._system("scale", SERVER, "--replicas=1")
        self._system("rollout", "status", SERVER, "--timeout=240s", seconds=260)


@pytest.fixture
def tracked(
    helm: Helm, images: Images, mlflow_image: str, system: Namespace, namespace: Namespace, released: None
) -> Tracked:
    """A release of the chart with its server, for jobs of one namespace."""
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    registry, _, rest = mlflow_image.rpartition("/")
    repository, _, tag = rest.rpartition(":")
    values = {
        "images": {
            **image_values(images)["images"],
            "mlflow": {"registry": registry, "repository": repository, "tag": tag},
        },
        "crds": {"enabled": False},
        "operator": {"namespaces": [namespace.name]},
        "mlflow": {"enabled": True, "storage": {"size": "1Gi"}},
    }
    helm("install", "tandem", CHART, f"--namespace={system.name}", "--wait", "--timeout=220s", values=values)
    return Tracked(system)


def test_a_job_is_on_the_charts_server_with_a_point_a_step_though_server_and_worker_are_killed(
    tracked: Tracked, namespace: Namespace
) -> None:
    job = Job(namespace, "tracked")
    whole = manifest("tracked", tracking={"mlflow": {}}, checkpoint={"everySteps": EVERY, "storage": {"size": "1Gi"}})
    whole["spec"]["trainer"]["loop"]["epochs"] = EPOCHS
    job.apply(whole)
    job.becomes(lambda: tracked.last_step() >= EVERY, "the first checkpoint's steps in MLflow", 300.0)

    had = tracked.last_step()
    tracked.goes_away()
    job.becomes(lambda: job.status.get("troubles", {}).get("trackingMessage"), "the word that MLflow lacks something")
    (worker, *_) = job.live("worker")
    namespace("delete", "pod", worker, "--force", "--grace-period=0")
    job.trains(beyond=had + 2 * EVERY)
    tracked.comes_back()
    job.becomes(lambda: tracked.last_step() >= had + 2 * EVERY, "what was missed in MLflow", 120.0)

    job.reaches("Succeeded", seconds=900)
    until(lambda: {run["status"] for run in tracked.all()["runs"]} == {"FINISHED"}, "the end in MLflow", 120.0)
    found = tracked.all()
    (run,) = found["runs"]
    last = job.status["progress"]["totalSteps"]
    assert run["parameters"]["trainer.loop.epochs"] == str(EPOCHS)
    assert run["parameters"]["workers.replicas"] == "2"
    assert sorted(step for step, _ in run["curves"]["train/loss"]) == list(range(1, last + 1)), "each step once"
    evaluated = dict(run["curves"]["eval/accuracy"])
    assert len(evaluated) == len(run["curves"]["eval/accuracy"])
    assert max(evaluated) == last
    best = job.status["bestCheckpoint"]
    assert evaluated[best["step"]] == pytest.approx(best["value"])
    (version,) = found["versions"]
    assert version["run"] == run["id"]
    assert (version["tags"]["tandem.checkpoint"], version["tags"]["tandem.step"]) == (best["name"], str(best["step"]))
    folder = f"checkpoints/{best['name']}"
    assert set(version["files"]) == {f"{folder}/manifest.json", f"{folder}/weights.safetensors"}
    assert all(version["files"].values())
    assert job.status.get("troubles", {}).get("trackingMessage", "") == ""
