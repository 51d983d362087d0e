"""Objects that somebody hostile makes in a namespace, on a real cluster: the operator takes in what else there is, and
those that it can answer are told why they are refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem_operator import names
from tests.support.cluster.operated import Job, Operator, manifest
from tests.support.cluster.pods import Manifest, Namespace, container, named, pod

PATH = "/apis/tandem.dev/v1alpha1/namespaces/{}/distributedtrainingjobs"
DEEP = 5_000
"""Levels of a template. Python parses a thousand by default."""
UNREADABLE = 'tandem_operator_unreadable_objects_total{kind="DistributedTrainingJob"}'


@pytest.fixture
def hostile(namespace: Namespace, tmp_path: Path) -> Iterator[list[str]]:
    """A pod whose annotation is a number of 5,000 digits, and jobs whose templates have no measure; the jobs' names."""
    annotations = {names.FAILURES: "1" * 5_000}
    labels = {names.JOB: "healthy", names.ROLE: names.WORKER, names.INDEX: "9" * 60}
    beside = named("Pod", "odd", spec=pod([container("sleeper", "localhost:5000/nobody/has-this:1")]))
    beside["metadata"] |= {"labels": labels, "annotations": annotations}
    namespace("apply", "-f", "-", stdin=json.dumps(beside))
    for name, template in {
        "deep": '{"a":' * DEEP + "1" + "}" * DEEP,
        "wide": '{"a": [' + "{}," * 200_000 + "{}]}",
        "nulls": '{"metadata": {"labels": null}, "spec": null}',
    }.items():
        whole = manifest(name)
        whole["spec"]["workers"] = {"replicas": 1, "template": "here"}
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(whole).replace('"here"', template))
        # Not `apply`: kubectl itself would read it.
        namespace("create", "--raw", PATH.format(namespace.name), "-f", str(file))
    yield ["deep", "wide", "nulls"]
    namespace("delete", "dtj", "--all", "--ignore-not-found", "--wait=false")
    namespace("delete", "pod", "odd", "--ignore-not-found", "--wait=false")


def condition(job: Job, kind: str) -> Manifest:
    found: list[Manifest] = [one for one in job.status.get("conditions", []) if one["type"] == kind]
    return found[0] if found else {}


@pytest.mark.timeout(400)
def test_hostile_objects_harm_nobody_else_also_after_a_restart(
    namespace: Namespace, operator: Operator, hostile: list[str]
) -> None:
    before = operator.pid
    for name in ("deep", "wide"):
        job = Job(namespace, name)
        told = job.becomes(lambda job=job: condition(job, "Stalled"), f"what is wrong with {name}")
        assert (told["status"], told["reason"]) == ("True", "InvalidSpec"), told
        assert told["message"].startswith("spec "), told
        assert job.pods("worker") == []
    healthy = Job(namespace, "healthy")
    healthy.apply(manifest("healthy"))
    healthy.becomes(lambda: len(healthy.pods("worker")) >= 2, "its workers")
    nulls = Job(namespace, "nulls")
    nulls.becomes(lambda: nulls.pods("worker"), "a worker of a job with nulls in its template")
    assert f"{UNREADABLE} 0.0" not in operator.metrics()
    assert operator.pid == before
    assert not operator.has_ended

    operator.stop()
    namespace("delete", "dtj", "healthy")
    operator.start()
    again = Job(namespace, "healthy")
    again.apply(manifest("healthy"))
    again.reaches("Running")
    assert not operator.has_ended
