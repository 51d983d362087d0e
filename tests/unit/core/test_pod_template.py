"""What a template says that has no effect, or that the API server will refuse, is said before it is sent."""

from typing import Any

import pytest
from kubernetes.client import models

from tandem.job.pod_template import CONTAINER_FIELDS, POD_FIELDS
from tandem_cli.job_words import warnings
from tests.support import manifests


def told(**spec: Any) -> list[str]:
    template = {"spec": spec}
    return warnings(manifests.job(trainer={"command": ["a.py"]}, workers={"replicas": 1, "template": template}))


WORKER, PROXY = {"name": "worker"}, {"name": "proxy", "image": "proxy:1"}
HERE = "spec.workers.template.spec"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"nodeSelektor": {}}, f"{HERE}.nodeSelektor: pods have no such field; did you mean nodeSelector?"),
        ({"zzz": 1}, f"{HERE}.zzz: pods have no such field"),
        (
            {"containers": [{**WORKER, "volumeMount": []}]},
            f"{HERE}.containers[0].volumeMount: containers have no such field; did you mean volumeMounts?",
        ),
        ({"restartPolicy": "Always"}, f"{HERE}.restartPolicy: the operator sets it, and this one has no effect"),
        (
            {"containers": [WORKER, {"name": "wroker", "env": []}]},
            f"{HERE}.containers[1]: the container wroker has no image; the one that Tandem runs is called worker",
        ),
        (
            {"initContainers": [{"name": "worker"}]},
            f"{HERE}.initContainers[0]: the container worker has no image; the one that Tandem runs is called worker",
        ),
    ],
)
def test_what_has_no_effect_or_will_be_refused_is_warned_of(spec: dict[str, Any], words: str) -> None:
    assert told(**spec) == [words]


def test_what_is_right_is_not() -> None:
    assert told(nodeSelector={"a": "b"}, containers=[WORKER, PROXY], initContainers=[{"name": "i", "image": "i"}]) == []
    assert told(containers=None, initContainers="nonsense") == []


def test_the_fields_are_those_of_kubernetes() -> None:
    assert set(models.V1PodSpec.attribute_map.values()) <= set(POD_FIELDS.split())
    assert set(models.V1Container.attribute_map.values()) <= set(CONTAINER_FIELDS.split())
