"""Who is around a job: strangers with our labels, and a claim of somebody else's that has its name."""

from collections.abc import Iterator

import pytest

from tandem_operator import names
from tests.support.cluster.images import Images
from tests.support.cluster.operated import Job, Operator, manifest
from tests.support.cluster.pods import Manifest, Namespace, container, pod

WAITS = ("python3", "-c", "import signal; signal.pause()")


@pytest.fixture
def job(namespace: Namespace, operator: Operator, request: pytest.FixtureRequest) -> Iterator[Job]:
    name = request.node.name.removeprefix("test_").replace("_", "-")[:40].strip("-")
    yield Job(namespace, name)
    namespace("delete", "dtj", name, "--ignore-not-found", "--wait=false")


def script(name: str, code: str, **spec: Manifest) -> Manifest:
    """A job of one worker that runs some Python."""
    whole = {"workers": {"replicas": 1}, "evaluators": {"replicas": 0}, **spec}
    return manifest(name, trainer={"command": ["python", "-c", code]}, **whole)


def stranger(name: str, images: Images, labels: dict[str, str], **metadata: Manifest) -> Manifest:
    """A pod of somebody's that does nothing."""
    given = {"name": name, "labels": labels, **metadata}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": given,
        "spec": pod([container("own", images.operator, *WAITS)]),
    }


@pytest.mark.timeout(400)
def test_pods_with_our_labels_that_are_not_ours(job: Job, images: Images, namespace: Namespace) -> None:
    roles = {"worker": "1", "coordinator": "0", "evaluator": "0"}
    strangers = [f"{job.name}-strange-{role}" for role in roles]
    namespace.create(
        *(
            stranger(name, images, {names.JOB: job.name, names.ROLE: role, names.INDEX: index})
            for name, (role, index) in zip(strangers, roles.items(), strict=True)
        )
    )
    job.apply(manifest(job.name))
    job.reaches("Succeeded", seconds=300)
    assert job.status["restarts"] == 0
    for name in strangers:
        found = namespace.get("pod", name)
        assert (found["status"]["phase"], "deletionTimestamp" in found["metadata"]) == ("Running", False)
    namespace("delete", "pod", *strangers, "--wait=false")


@pytest.mark.timeout(400)
def test_a_claim_of_somebody_elses_is_taken_once_that_is_said(job: Job, namespace: Namespace) -> None:
    claim = names.checkpoints(job.name)
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    theirs = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": claim}, "spec": spec}
    namespace.create(theirs)
    job.apply(script(job.name, "print('done')"))
    words = f"PersistentVolumeClaim {claim} exists and is not this job's"
    job.becomes(lambda: words in job.status.get("message", ""), "a message")
    assert f'{names.ADOPT}="true"' in job.status["message"]
    (why,) = [one for one in job.status["conditions"] if one["type"] == "Initialized"]
    assert (why["status"], why["reason"]) == ("False", "NameTaken")
    assert [job.pods(role) for role in names.ROLES] == [[], [], []]
    assert "labels" not in namespace.get("pvc", claim)["metadata"]
    namespace("annotate", "pvc", claim, f"{names.ADOPT}=true")
    job.reaches("Succeeded")
