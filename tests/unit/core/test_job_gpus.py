"""How many GPUs a worker asks for, whoever made them and wherever it says so."""

from typing import Any

import pytest

from tandem.job.resource import Workers
from tandem_cli.job_words import warnings
from tests.support import manifests


def workers(**spec: Any) -> Workers:
    return manifests.job("gpus", trainer={"command": ["train.py"]}, workers=spec).spec.workers


def in_template(**amounts: Any) -> dict[str, Any]:
    resources = {"limits": {name.replace("__", "/").replace("_", "."): amount for name, amount in amounts.items()}}
    return {"spec": {"containers": [{"name": "beside"}, {"name": "worker", "resources": resources}]}}


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        ({}, 1),
        ({"resources": {"limits": {"nvidia.com/gpu": 4}}}, 4),
        ({"resources": {"limits": {"amd.com/gpu": "8"}, "requests": {"amd.com/gpu": 8}}}, 8),
        ({"resources": {"limits": {"gpu.intel.com/i915": 2, "gpu.intel.com/millicores": 2000}}}, 2),
        ({"resources": {"limits": {"nvidia.com/mig-1g.5gb": 3, "nvidia.com/mig-2g.10gb": 1}}}, 4),
        ({"resources": {"limits": {"example.com/tpu": 4}}}, 1),
        ({"resources": {"limits": {"example.com/tpu": 4}}, "gpuResource": "example.com/tpu"}, 4),
        ({"template": in_template(nvidia_com__gpu=2)}, 2),
        ({"template": in_template(nvidia_com__gpu=2), "resources": {"limits": {"nvidia.com/gpu": 1}}}, 2),
        ({"template": in_template(nvidia_com__gpu="half")}, 1),
        ({"template": {"spec": {"containers": [None, {"name": "worker", "resources": None}]}}}, 1),
        ({"template": {"spec": None}}, 1),
        ({"processesPerReplica": 3, "resources": {"limits": {"nvidia.com/gpu": 4}}}, 3),
    ],
    ids=str,
)
def test_there_is_a_rank_for_each_gpu(spec: dict[str, Any], ranks: int) -> None:
    assert workers(**spec).processes == ranks


@pytest.mark.parametrize(
    ("before", "after", "allowed"),
    [
        ({"processesPerReplica": 4}, {"processesPerReplica": 8}, False),
        ({}, {"processesPerReplica": 1}, True),
        ({}, {"resources": {"limits": {"nvidia.com/gpu": 2}}}, False),
        ({"resources": {"limits": {"nvidia.com/gpu": 2}}}, {"processesPerReplica": 2}, True),
        ({}, {"gpuResource": "example.com/tpu", "resources": {"limits": {"example.com/tpu": 2}}}, False),
        ({"replicas": 1}, {"replicas": 2}, True),
        ({"resources": {"limits": {"cpu": 1}}}, {"resources": {"limits": {"cpu": 2}}}, True),
    ],
    ids=str,
)
def test_their_number_cannot_be_changed(before: dict[str, Any], after: dict[str, Any], allowed: bool) -> None:
    (rule,) = Workers.transitions
    assert rule.allows(workers(**before), workers(**after)) == allowed


CLAIMS = {"spec": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "two-gpus"}]}}


@pytest.mark.parametrize(
    ("spec", "warned"),
    [
        ({"template": CLAIMS}, True),
        ({"template": CLAIMS, "processesPerReplica": 1}, False),
        ({"template": CLAIMS, "resources": {"limits": {"nvidia.com/gpu": 4}}}, False),
        ({"template": {"spec": {"resourceClaims": []}}}, False),
        ({"template": {"spec": None}}, False),
        ({}, False),
    ],
    ids=str,
)
def test_claims_that_may_be_of_gpus_are_warned_of_if_nobody_says_how_many(spec: dict[str, Any], warned: bool) -> None:
    found = warnings(manifests.job("gpus", trainer={"command": ["train.py"]}, workers=spec))
    assert ["resourceClaims" in one and "workers.processesPerReplica" in one for one in found] == [True] * warned
