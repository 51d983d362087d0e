"""The CRD on a real API server: it takes what `tandem validate` takes and refuses what it refuses, as readably.

`make e2e` runs it; alone: `make e2e ARGS=tests/cluster/test_crd.py`.
"""

import json
import os
import re
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.job.manifest.reading import read_job
from tests.support import ROOT
from tests.support.bad_manifests import REFUSED, BadManifest
from tests.support.cluster.operated import established
from tests.support.waiting import until

CRD = ROOT / "charts/tandem/files/crd.yaml"
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
NAMESPACE = f"tandem-test-{secrets.token_hex(4)}"


def kubectl(*arguments: str, stdin: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
    if "KUBECONFIG" not in os.environ:
        pytest.fail("these tests need a cluster: run them with `make e2e`, or set KUBECONFIG")
    result = subprocess.run(["kubectl", *arguments], input=stdin, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 or not check, result.stderr
    return result


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    established("-f", str(CRD))
    conditions = json.loads(kubectl("get", "-o", "json", "-f", str(CRD)).stdout)["status"]["conditions"]
    assert not [one for one in conditions if one["type"] == "NonStructuralSchema"], conditions
    kubectl("create", "namespace", NAMESPACE)
    yield
    kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def apply(text: str, dry: bool = False) -> subprocess.CompletedProcess[str]:
    options = ["--dry-run=server"] if dry else []
    return kubectl("apply", "-n", NAMESPACE, *options, "-f", "-", stdin=text, check=False)


def job(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kubectl("get", "dtj", name, "-n", NAMESPACE, "-o", "json").stdout)
    return found


def patch(name: str, change: dict[str, Any], subresource: str = "") -> subprocess.CompletedProcess[str]:
    options = [f"--subresource={subresource}"] if subresource else []
    arguments = ("patch", "dtj", name, "-n", NAMESPACE, "--type=merge", *options, "-p", json.dumps(change))
    return kubectl(*arguments, check=False)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_taken_and_given_the_defaults_of_the_models(path: Path) -> None:
    result = apply(path.read_text())
    assert result.returncode == 0, result.stderr
    ours, theirs = read_job(path).dump()["spec"], job(path.stem)["spec"]
    assert plain(theirs) == plain(ours)


def plain(spec: dict[str, Any]) -> dict[str, Any]:
    """JSON has one kind of number: 1.0 and 1 are the same."""
    found: dict[str, Any] = json.loads(json.dumps(spec), parse_int=float)
    return found


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_bad_manifests_are_refused_with_the_field_and_the_reason(case: BadManifest) -> None:
    result = apply(case.text.decode(), dry=True)
    assert result.returncode != 0, "the API server took it"
    assert case.field in result.stderr
    assert re.search(case.words, result.stderr), result.stderr


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"trainer": {"loop": {"epochs": 6}}}, "trainer"),
        ({"trainer": {"args": ["x"]}}, "trainer"),
        ({"checkpoint": {"storage": {"retain": False}}}, "storage"),
        ({"checkpoint": {"storage": {"size": "1Gi"}}}, "storage"),
    ],
)
def test_what_cannot_change_is_refused(change: dict[str, Any], field: str) -> None:
    apply((ROOT / "examples/digits.yaml").read_text())
    result = patch("digits", {"spec": change})
    assert result.returncode != 0
    assert f"{field} cannot be changed; create a new job with another name" in result.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"processesPerReplica": 2},
        {"resources": {"limits": {"nvidia.com/gpu": 2}}},
        {"resources": {"limits": {"amd.com/gpu": "4"}}},
        {"gpuResource": "example.com/tpu", "resources": {"limits": {"example.com/tpu": 2}}},
    ],
    ids=str,
)
def test_the_number_of_processes_cannot_change(change: dict[str, Any]) -> None:
    apply((ROOT / "examples/digits.yaml").read_text())
    result = patch("digits", {"spec": {"workers": change}})
    assert result.returncode != 0
    assert "the number of processes in each replica" in result.stderr
    assert "cannot be changed" in result.stderr


def test_what_can_change_is_taken() -> None:
    apply((ROOT / "examples/digits.yaml").read_text())
    workers = {"replicas": 3, "processesPerReplica": 1, "resources": {"limits": {"nvidia.com/gpu": 1, "cpu": "2"}}}
    change = {"workers": workers, "runPolicy": {"suspend": True}, "checkpoint": {"keepLast": 5}}
    assert patch("digits", {"spec": change}).returncode == 0
    assert job("digits")["spec"]["workers"]["replicas"] == 3


def test_scaling_keeps_to_the_rules() -> None:
    apply((ROOT / "examples/fashion-mnist.yaml").read_text())
    kubectl("scale", "dtj/fashion-mnist", "-n", NAMESPACE, "--replicas=3")
    assert job("fashion-mnist")["spec"]["workers"]["replicas"] == 3
    result = kubectl("scale", "dtj/fashion-mnist", "-n", NAMESPACE, "--replicas=1", check=False)
    assert result.returncode != 0
    assert "minReplicas must not be greater than replicas" in result.stderr


def test_a_template_keeps_what_the_schema_does_not_know() -> None:
    text = (ROOT / "examples/own-script.yaml").read_text()
    template = {"spec": {"nodeSelector": {"disk": "fast"}, "fieldOfTomorrow": [1]}}
    workers = json.dumps({"replicas": 2, "template": template})
    result = apply(
        text.replace("name: own-script", "name: templated").split("  workers:")[0] + f"  workers: {workers}\n"
    )
    assert result.returncode == 0, result.stderr
    assert job("templated")["spec"]["workers"]["template"] == template


def test_the_status_is_a_subresource_and_kubectl_shows_it() -> None:
    apply((ROOT / "examples/synthetic-resnet.yaml").read_text())
    status = {
        "phase": "Running",
        "workers": {"desired": 2, "ready": 1, "summary": "1/2"},
        "progress": {"step": 120},
        "loss": 0.25,
        "bestCheckpoint": {"name": "step-000000100", "step": 100, "metric": "loss", "value": 0.5},
    }
    assert patch("synthetic-resnet", {"status": status}).returncode == 0
    assert "phase" not in job("synthetic-resnet").get("status", {})
    assert patch("synthetic-resnet", {"status": status}, subresource="status").returncode == 0
    shown = kubectl("get", "dtj", "synthetic-resnet", "-n", NAMESPACE).stdout.splitlines()
    assert shown[0].split() == ["NAME", "PHASE", "WORKERS", "STEP", "LOSS", "BEST", "AGE"]
    assert shown[1].split()[:6] == ["synthetic-resnet", "Running", "1/2", "120", "0.25", "0.5"]
    everything = kubectl("get", "all", "-n", NAMESPACE).stdout
    assert "synthetic-resnet" in everything
    scale = json.loads(
        kubectl("get", "dtj", "synthetic-resnet", "-n", NAMESPACE, "--subresource=scale", "-o", "json").stdout
    )
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (2, 1)


def test_appliers_merge_conditions_by_their_type() -> None:
    apply((ROOT / "examples/own-script.yaml").read_text())
    for owner, kind in (("one", "Running"), ("two", "Complete")):
        body = {
            "apiVersion": "tandem.dev/v1alpha1",
            "kind": "DistributedTrainingJob",
            "metadata": {"name": "own-script", "namespace": NAMESPACE},
            "status": {"conditions": [{"type": kind, "status": "True"}]},
        }
        options = ("--server-side", "--subresource=status", f"--field-manager={owner}", "-f", "-")
        kubectl("apply", *options, stdin=json.dumps(body))
    assert {one["type"] for one in job("own-script")["status"]["conditions"]} == {"Running", "Complete"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_there_is_no_difference_after_apply(path: Path) -> None:
    apply(path.read_text())
    patch(path.stem, {"status": {"phase": "Running", "conditions": []}}, subresource="status")
    result = kubectl("diff", "-n", NAMESPACE, "-f", str(path), check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_an_autoscaler_finds_the_pods_by_the_selector() -> None:
    apply((ROOT / "examples/digits.yaml").read_text())
    status = {"workers": {"desired": 2, "ready": 2}, "selector": "tandem.dev/job=digits,tandem.dev/role=worker"}
    assert patch("digits", {"status": status}, subresource="status").returncode == 0
    path = f"/apis/tandem.dev/v1alpha1/namespaces/{NAMESPACE}/distributedtrainingjobs/digits/scale"
    scale = json.loads(kubectl("get", "--raw", path).stdout)
    assert scale["status"] == {"replicas": 2, "selector": status["selector"]}
    target = {"apiVersion": "tandem.dev/v1alpha1", "kind": "DistributedTrainingJob", "name": "digits"}
    metric = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}
    spec = {"scaleTargetRef": target, "maxReplicas": 4, "metrics": [{"type": "Resource", "resource": metric}]}
    hpa = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "digits"}}
    kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=json.dumps({**hpa, "spec": spec}))

    def said() -> dict[str, str]:
        found = json.loads(kubectl("get", "hpa", "digits", "-n", NAMESPACE, "-o", "json").stdout)
        return {one["type"]: one["reason"] for one in found["status"].get("conditions", [])}

    # There is no metrics server here, which is the next thing that it asks for; without a selector, it says so before.
    until(lambda: said().get("ScalingActive"), "what the autoscaler says", 60.0, otherwise=lambda: str(said()))
    assert said() == {"AbleToScale": "SucceededGetScale", "ScalingActive": "FailedGetResourceMetric"}


def test_kubectl_waits_for_a_job_to_be_ready() -> None:
    apply((ROOT / "examples/digits.yaml").read_text())
    ready = [{"type": "Ready", "status": "True"}, {"type": "example.com/Billed", "status": "True"}]
    assert patch("digits", {"status": {"conditions": ready}}, subresource="status").returncode == 0
    for kind in ("Ready", "example.com/Billed"):
        kubectl("wait", "dtj/digits", "-n", NAMESPACE, f"--for=condition={kind}", "--timeout=10s")


def test_kubectl_explains_every_field() -> None:
    text = kubectl("explain", "dtj.spec.workers.minReplicas").stdout
    assert "Training continues as long as this many workers are available" in text
