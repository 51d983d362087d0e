"""The pods that the operator makes: restricted, what a user lays over them, and what they are called."""

import pytest

from tandem_operator import names
from tandem_operator.observed import Children
from tests.unit.operator_job import decided, heard, initialized, job


def test_every_pod_is_restricted_and_holds_no_service_account() -> None:
    plan = decided(job(), Children())
    workers = decided(job(), heard=heard("Pending")).create
    templates = [one["spec"]["template"]["spec"] for one in plan.create if "template" in one.get("spec", {})]
    for spec in [*templates, *(one["spec"] for one in workers)]:
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_template_of_the_users_is_laid_over_ours() -> None:
    template = {
        "metadata": {"labels": {"team": "vision", names.JOB: "another"}},
        "spec": {
            "restartPolicy": "Always",
            "nodeSelector": {"disk": "fast"},
            "containers": [
                {"name": "worker", "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
                {"name": "beside", "image": "beside:1"},
            ],
            "volumes": [{"name": "data", "emptyDir": {}}],
        },
    }
    of = job(status=initialized(), workers={"replicas": 1, "template": template})
    pod = decided(of).create[0]
    spec, labels = pod["spec"], pod["metadata"]["labels"]
    assert (labels["team"], labels[names.JOB], spec["restartPolicy"]) == ("vision", "digits", "Never")
    assert spec["nodeSelector"] == {"disk": "fast"}
    assert [one["name"] for one in spec["containers"]] == ["worker", "beside"]
    assert [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]] == [
        "/tandem",
        "/tmp",
        "/dev/shm",
        "/data",
    ]


def test_an_evaluator_never_holds_a_gpu() -> None:
    of = job(evaluators={"resources": {"limits": {"nvidia.com/gpu": 1, "cpu": "2"}}})
    evaluator = next(one for one in decided(of, Children()).create if one["kind"] == "Job")
    container = evaluator["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"] == {"limits": {"cpu": "2"}}


def test_what_a_user_writes_into_a_command_is_not_replaced_by_kubernetes() -> None:
    script = {"command": ["python", "train.py"], "args": ["$(HOME)"], "env": [{"name": "HOME", "value": "/home/$(X)"}]}
    pod = decided(job(status=initialized(), trainer=script)).create[0]
    container = pod["spec"]["containers"][0]
    assert container["args"][-1] == "$$(HOME)"
    assert [one["value"] for one in container["env"] if one["name"] == "HOME"] == ["/home/$$(X)"]


def test_pods_of_a_job_with_a_queue_are_a_group_for_kueue() -> None:
    pod = decided(job(status=initialized(), runPolicy={"queueName": "gpus"})).create[0]["metadata"]
    assert pod["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert pod["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"


@pytest.mark.parametrize(
    ("workers", "threads"),
    [
        ({"replicas": 1}, "1"),
        ({"replicas": 1, "resources": {"requests": {"cpu": "8"}}, "processesPerReplica": 2}, "4"),
        ({"replicas": 1, "resources": {"requests": {"cpu": "8"}, "limits": {"cpu": "2500m"}}}, "2"),
        ({"replicas": 1, "resources": {"limits": {"cpu": "100m"}}}, "1"),
    ],
)
def test_ranks_have_as_many_threads_as_the_pod_has_cores_for_them(workers: dict[str, object], threads: str) -> None:
    pod = decided(job(status=initialized(), workers=workers)).create[0]
    env = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
    assert env["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize("name", ["a", "9lives", "x" * 63, "x" * 45, "x" * 46, f"{'y' * 36}-{'z' * 26}"])
def test_names_are_valid_whatever_the_job_is_called(name: str) -> None:
    every = [
        names.token(name),
        names.job_file(name),
        names.checkpoints(name),
        names.coordinator(name),
        names.evaluator(name),
        names.worker(name, 9999, "e"),
    ]
    for one in every:
        assert len(one) <= 63
        assert one[0].isalpha()
        assert "--" not in one


def test_long_names_stay_different() -> None:
    assert names.coordinator("x" * 62 + "a") != names.coordinator("x" * 62 + "b")
