"""The chart on a real cluster: installed for all of it, upgraded while a job trains, uninstalled."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support import ROOT
from tests.support.cluster.helm import CHART, Helm, image_values
from tests.support.cluster.images import Images
from tests.support.cluster.operated import CRD, KIND, LONG, Job, kubectl, manifest
from tests.support.cluster.pods import Namespace
from tests.support.waiting import until

pytestmark = pytest.mark.alone
COLUMN = {"name": "Generation", "type": "integer", "jsonPath": ".status.generation"}
STEP = """\
import json, os, urllib.request
request = urllib.request.Request("http://127.0.0.1:7070/status")
request.add_header("Authorization", "Bearer " + os.environ["TANDEM_TOKEN"])
print(json.load(urllib.request.urlopen(request, timeout=10))["status"]["progress"]["step"])
"""


@pytest.fixture(scope="module", autouse=True)
def crd_as_it_was(system: Namespace) -> Iterator[None]:
    """Other tests go on with the CRD as the sources have it, and with one that belongs to no release."""
    yield
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    marks = [f"meta.helm.sh/release-{what}-" for what in ("name", "namespace")]
    kubectl("annotate", "crd", KIND, *marks, "helm.sh/resource-policy-")


def there(kind: str, name: str, namespace: str = "") -> bool:
    options = ["-n", namespace] if namespace else []
    return kubectl("get", kind, name, "--ignore-not-found", "-o", "name", *options) != ""


def step_in(job: Job) -> int:
    """The step as the coordinator itself says it, whether there is an operator or not."""
    (coordinator,) = job.live("coordinator")
    return int(job.namespace("exec", coordinator, "--", "python3", "-c", STEP))


def pods(job: Job) -> dict[str, str]:
    """Every pod of a job, with its UID and how often it was started again."""
    return {
        pod["metadata"]["name"]: f"{pod['metadata']['uid']} {pod['status']['containerStatuses'][0]['restartCount']}"
        for role in ("coordinator", "worker", "evaluator")
        for pod in job.pods(role)
    }


def can_i(verb: str, user: str, namespace: Namespace) -> bool:
    """Whether somebody may do that with jobs."""
    return namespace("auth", "can-i", verb, KIND, f"--as={user}", check=False).strip() == "yes"


@pytest.mark.smoke
@pytest.mark.timeout(900)
def test_a_release_is_installed_upgraded_and_removed_while_a_job_trains(
    helm: Helm, images: Images, system: Namespace, namespace: Namespace, released: None, tmp_path: Path
) -> None:
    at = ("tandem", f"--namespace={system.name}")
    waiting = ("--wait", "--timeout=150s")
    # Tests before this one may have installed the CRD by themselves.
    notes = helm("install", *at, CHART, *waiting, "--take-ownership", values=image_values(images))
    assert f"kubectl -n {system.name} rollout status deployment/tandem-operator" in notes
    assert "kubectl apply -f examples/digits.yaml" in notes
    system("rollout", "status", "deployment/tandem-operator", "--timeout=1s")

    for role in ("edit", "view"):
        namespace("create", "rolebinding", role, f"--clusterrole={role}", f"--user=has-{role}")
    # Roles are put together by a controller, a moment later.
    until(lambda: can_i("create", "has-edit", namespace) and can_i("list", "has-view", namespace), "both rights", 20.0)
    assert not can_i("create", "has-view", namespace)
    assert not can_i("list", "somebody", namespace)

    long = Job(namespace, "long")
    long.apply(manifest("long", trainer=LONG))
    digits = Job(namespace, "digits")
    namespace("apply", "-f", str(ROOT / "examples/digits.yaml"))
    long.becomes(lambda: long.status.get("worldSize") == 2 and long.trains(), "two workers in one group", 240.0)
    long.becomes(lambda: long.live("evaluator"), "its evaluator")
    before, generation = pods(long), long.status["generation"]

    newer = tmp_path / "tandem"
    shutil.copytree(CHART, newer)
    crd = yaml.safe_load(CRD.read_text())
    crd["spec"]["versions"][0]["additionalPrinterColumns"].append(COLUMN)
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["novelty"] = {"type": "string"}
    (newer / "files/crd.yaml").write_text(yaml.safe_dump(crd))
    more = {**image_values(images), "operator": {"podAnnotations": {"release": "second"}}}
    helm("upgrade", *at, newer, *waiting, values=more)
    until(lambda: "GENERATION" in namespace("get", "dtj"), "the column of the new CRD", 30.0)
    (operator,) = json.loads(system("get", "pods", "-o", "json"))["items"]
    assert operator["metadata"]["annotations"]["release"] == "second"
    ahead = Job(namespace, "ahead")
    ahead.apply(manifest("ahead", novelty="of the next version", runPolicy={"suspend": True}))
    ahead.reaches("Suspended")
    namespace("delete", "dtj", "ahead", "--wait=false")
    long.trains(beyond=long.step)
    assert (pods(long), long.status["generation"]) == (before, generation)
    assert digits.reaches("Succeeded", seconds=400) == "Succeeded"

    said = helm("uninstall", *at, "--wait", "--timeout=60s")
    assert f"[CustomResourceDefinition] {KIND}" in said, "it should say what it keeps"
    assert not there("deployment", "tandem-operator", system.name)
    assert not there("clusterrole", "tandem-operator")
    assert there("crd", KIND)
    step = step_in(long)
    until(lambda: step_in(long) > step + 5, "steps without an operator", 60.0, otherwise=long.describe)
    assert pods(long) == before

    # The CRD that stayed is the next release's again, of the same name and in the same namespace.
    helm("install", *at, CHART, *waiting, values=image_values(images))
    assert long.trains(beyond=step_in(long)) > step
    assert (pods(long), long.status["generation"]) == (before, generation)
    assert "GENERATION" not in namespace("get", "dtj")
    namespace("delete", "dtj", "long", "--wait=false")
