"""Jobs that cannot have what they need, or cannot work: the status says why, in words."""

import json
from collections.abc import Iterator

import pytest

from tandem.wire.reasons import Reason
from tests.support.cluster.images import Images
from tests.support.cluster.operated import LONG, Job, Operator, manifest, with_a_volume_that_does_not_mount
from tests.support.cluster.pods import Manifest, Namespace


@pytest.fixture
def job(namespace: Namespace, operator: Operator, request: pytest.FixtureRequest) -> Iterator[Job]:
    name = request.node.name.removeprefix("test_").replace("_", "-")[:60].strip("-")
    yield Job(namespace, name)
    namespace("delete", "dtj", name, "--ignore-not-found", "--wait=false")


def says(job: Job, *words: str) -> None:
    job.becomes(lambda: all(word in job.status.get("message", "") for word in words), f"a message with {words}")


def reason_of_failure(job: Job) -> str:
    (why,) = [one for one in job.status["conditions"] if one["type"] == "Failed"]
    return str(why["reason"])


def test_gpus_that_are_not_there(job: Job) -> None:
    workers = {"replicas": 1, "resources": {"limits": {"nvidia.com/gpu": 64}}}
    job.apply(manifest(job.name, workers=workers))
    says(job, "Insufficient nvidia.com/gpu")
    assert job.phase in ("Pending", "Starting")
    assert any(event.startswith("Unschedulable") for event in job.events())


@pytest.mark.timeout(400)
def test_workers_that_never_start_end_the_job(job: Job, images: Images) -> None:
    whole = manifest(job.name)
    whole["spec"]["trainer"]["image"] = images.operator
    job.apply(whole)
    job.reaches("Failed")
    (why,) = [one for one in job.status["conditions"] if one["type"] == "Failed"]
    assert (why["status"], why["reason"]) == ("True", "DoesNotStart")
    assert "ended soon after its start" in why["message"]
    assert "with exit code 1" in why["message"]


@pytest.mark.timeout(400)
def test_evaluators_that_fail_are_told_of_and_training_goes_on(job: Job, images: Images) -> None:
    template = {"spec": {"containers": [{"name": "evaluator", "image": images.operator}]}}
    job.apply(manifest(job.name, trainer=LONG, evaluators={"template": template}))

    def told() -> Manifest | None:
        # Before the workers are there it is the reason of another condition.
        running = (one for one in job.status.get("conditions", []) if one["type"] == "Running")
        return next((one for one in running if one["reason"] == "EvaluatorFailed"), None)

    why = job.becomes(told, "the reason")
    assert "-evaluator-0-" in why["message"]
    assert "ended with exit code 1" in why["message"]
    job.trains(beyond=job.step)


@pytest.mark.timeout(400)
def test_saves_that_fail_are_told_of_until_one_succeeds(job: Job) -> None:
    def may_write(mode: int) -> None:
        change = f"import os; os.chmod(os.environ['TANDEM_RUN_DIR'] + '/checkpoints', 0o{mode:o})"
        job.namespace("exec", job.live("worker")[0], "--", "python", "-c", change)

    def degraded() -> list[tuple[str, str]]:
        conditions = job.status.get("conditions", [])
        return [(one["status"], one["reason"]) for one in conditions if one["type"] == "Degraded"]

    job.apply(manifest(job.name, trainer=LONG))
    job.trains()
    may_write(0o500)
    job.becomes(lambda: degraded() == [("True", "SavesFail")], "it is degraded")
    assert job.status["troubles"]["savesFailed"] >= 1
    assert "Permission denied" in job.status["troubles"]["saveMessage"]
    told = [event for event in job.events() if event.startswith("SavesFail: ")]
    assert len(told) == 1
    assert job.phase == "Running"
    may_write(0o700)
    job.becomes(lambda: degraded() == [("False", "Well")], "it is well again")
    job.trains(beyond=job.step)


def test_a_name_that_is_taken(job: Job, namespace: Namespace) -> None:
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{job.name}-job"}, "data": {"a": "b"}}
    namespace("apply", "-f", "-", stdin=json.dumps(theirs))
    job.apply(manifest(job.name))
    says(job, f"ConfigMap {job.name}-job exists and is not this job's")
    assert namespace.get("configmap", f"{job.name}-job")["data"] == {"a": "b"}
    namespace("delete", "configmap", f"{job.name}-job")
    job.becomes(lambda: "exists and is not" not in job.status.get("message", ""), "it goes on")


def test_a_quota_that_is_used_up(job: Job, namespace: Namespace) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few-pods"}, "spec": {"hard": {}}}
    quota["spec"] = {"hard": {"count/persistentvolumeclaims": "0"}}
    namespace("apply", "-f", "-", stdin=json.dumps(quota))
    try:
        job.becomes(lambda: namespace.get("resourcequota", "few-pods").get("status", {}).get("hard"), "a quota")
        job.apply(manifest(job.name))
        says(job, "exceeded quota")
    finally:
        namespace("delete", "resourcequota", "few-pods")
    job.becomes(lambda: "exceeded quota" not in job.status.get("message", ""), "it goes on")


@pytest.mark.timeout(400)
def test_a_deadline_and_a_time_after_the_end(job: Job, namespace: Namespace) -> None:
    policy = {"activeDeadlineSeconds": 20, "ttlSecondsAfterFinished": 10}
    job.apply(manifest(job.name, trainer=LONG, runPolicy=policy))
    job.reaches("Failed")
    assert reason_of_failure(job) == Reason.DEADLINE_EXCEEDED
    gone = ("get", "dtj", job.name, "--ignore-not-found")
    job.becomes(lambda: not namespace(*gone), "it is deleted")
    # Events outlive the job, and who looks too late for its last status still finds what it was.
    told = [event for event in job.events() if event.startswith("Failed: ")]
    assert len(told) == 1
    assert "activeDeadlineSeconds" in told[0]


@pytest.mark.timeout(400)
def test_a_script_of_ones_own(job: Job) -> None:
    code = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)"
    both = {"replicas": 2, "minReplicas": 2}
    job.apply(manifest(job.name, trainer={"command": ["python", "-c", code]}, workers=both, evaluators={"replicas": 0}))
    job.reaches("Succeeded")
    said = " ".join(job.namespace("logs", pod["metadata"]["name"]) for pod in job.pods("worker"))
    assert "rank 0 of 2" in said
    assert "rank 1 of 2" in said


@pytest.mark.timeout(400)
def test_a_name_at_the_limit(namespace: Namespace, operator: Operator) -> None:
    job = Job(namespace, "9" + "x" * 62)
    script = {"command": ["python", "-c", "print('done')"]}
    job.apply(manifest(job.name, trainer=script, evaluators={"replicas": 0}, workers={"replicas": 1}))
    job.reaches("Succeeded")
    namespace("delete", "dtj", job.name, "--wait=false")


@pytest.mark.timeout(400)
def test_fix_delete_apply(job: Job, namespace: Namespace) -> None:
    """On the volume that the failed one has left."""
    typo = {"command": ["python", "-c", "raise KeyError('typo')"]}
    once = {"maxRestarts": 0}
    whole = manifest(job.name, trainer=typo, workers={"replicas": 1}, evaluators={"replicas": 0}, elasticity=once)
    job.apply(whole)
    job.reaches("Failed")
    assert reason_of_failure(job) == Reason.RESTARTS_EXHAUSTED
    namespace("delete", "dtj", job.name, "--wait=true")
    whole["spec"]["trainer"]["command"][-1] = "print('fixed')"
    job.apply(whole)
    job.reaches("Succeeded")
    assert job.status["restarts"] == 0


@pytest.mark.timeout(400)
def test_a_program_that_cannot_be_started_ends_the_job_with_its_error(job: Job) -> None:
    job.apply(manifest(job.name, trainer={"command": ["pyhton", "train.py"]}, evaluators={"replicas": 0}))
    job.reaches("Failed")
    (why,) = [one for one in job.status["conditions"] if one["type"] == "Failed"]
    assert why["reason"] == "RepeatedFailure"
    assert "No such file or directory: 'pyhton'" in why["message"]
    assert job.status.get("generation", 0) <= 3


def test_a_volume_that_does_not_mount_is_said_in_the_kubelets_words(job: Job) -> None:
    job.apply(with_a_volume_that_does_not_mount(job.name))
    says(job, 'configmap "not-there" not found')


def test_a_field_that_pods_do_not_have_stalls_the_job(job: Job) -> None:
    job.apply(manifest(job.name, workers={"replicas": 1, "template": {"spec": {"nodeSelektor": {"disk": "fast"}}}}))
    says(job, 'unknown field "spec.nodeSelektor"')
    stalled = [one["status"] for one in job.status["conditions"] if one["type"] == "Stalled"]
    assert stalled == ["True"]
