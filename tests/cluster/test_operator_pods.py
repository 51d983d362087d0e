"""What a job's pods look like and when they are made, on a real cluster."""

import json
from datetime import datetime

import pytest

from tests.support.cluster.images import Images
from tests.support.cluster.operated import LONG, Job, Operator, kubectl, manifest, secret
from tests.support.cluster.pods import Manifest, Namespace, container, pod
from tests.support.manifests import images


@pytest.mark.timeout(400)
def test_all_pods_are_made_at_once_and_workers_wait_for_their_coordinator(
    namespace: Namespace, operator: Operator
) -> None:
    job = Job(namespace, "at-once")
    job.apply(manifest("at-once", trainer=LONG))
    job.trains()
    pods = [pod for role in ("coordinator", "worker", "evaluator") for pod in job.pods(role)]
    assert len(pods) == 4, job.describe()
    # The API server keeps whole seconds.
    assert len({_made(pod) for pod in pods}) <= 2
    assert all(status["restartCount"] == 0 for pod in pods for status in pod["status"]["containerStatuses"])
    job.namespace("delete", "dtj", "at-once")


@pytest.mark.timeout(400)
@pytest.mark.full("operator", "coordinator")
def test_a_job_on_the_volume_of_an_earlier_one_goes_on_and_one_that_cannot_gets_no_workers_unless_it_begins_anew(
    namespace: Namespace, operator: Operator
) -> None:
    shared = {"everySteps": 50, "storage": {"claimName": "left"}}
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "left"}, "spec": spec}
    namespace("apply", "-f", "-", stdin=json.dumps(claim))
    job = Job(namespace, "again")
    job.apply(manifest("again", trainer=LONG, checkpoint=shared, runPolicy={"activeDeadlineSeconds": 100000}))
    job.trains()
    namespace("delete", "dtj", "again")
    job.apply(manifest("again", trainer=LONG, checkpoint=shared))
    job.trains(beyond=50)
    namespace("delete", "dtj", "again")
    other = LONG | {"parameters": {**LONG["parameters"], "model": "baby-cnn"}}
    job.apply(manifest("again", trainer=other, checkpoint=shared))
    job.becomes(lambda: "set spec.checkpoint.onExisting to Fresh" in str(job.status.get("message")), "its reason")
    job.becomes(lambda: not job.live("worker"), "no workers", 60.0)
    namespace("delete", "dtj", "again")
    job.apply(manifest("again", trainer=other, checkpoint={**shared, "onExisting": "Fresh"}))
    job.trains()
    assert job.status["restarts"] == 0
    namespace("delete", "dtj", "again")


@pytest.mark.timeout(400)
def test_a_deleted_token_comes_back_as_it_was_and_the_job_goes_on(namespace: Namespace, operator: Operator) -> None:
    job = Job(namespace, "token")
    job.apply(manifest("token", trainer=LONG))
    job.trains()
    before, generation = secret(namespace, "token-token"), job.status["generation"]
    namespace("delete", "secret", "token-token")
    operator.kill()
    operator.start()
    job.trains(beyond=job.step)
    assert job.status["generation"] == generation, job.describe()
    victim = job.live("worker")[0]
    namespace("delete", "pod", victim)
    job.becomes(lambda: job.status.get("worldSize") == 2 and job.status["generation"] > generation, "its full size")
    assert secret(namespace, "token-token") == before
    namespace("delete", "dtj", "token")


@pytest.mark.timeout(400)
@pytest.mark.full("operator", "coordinator")
def test_a_job_made_again_gives_the_new_token_to_pods_beside_one_that_had_the_old(
    namespace: Namespace, operator: Operator, images: Images
) -> None:
    """A kubelet never looks again at an immutable Secret that a pod of its node has, not even at a new one of its
    name."""
    job = Job(namespace, "twice")
    job.apply(manifest("twice", trainer=LONG))
    job.trains()
    variable = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "twice-token", "key": "token"}}}
    nodes = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    holders = [f"holder-{number}" for number in range(len(nodes))]
    for name, node in zip(holders, nodes, strict=True):
        waits = container("holder", images.operator, "python3", "-c", "import signal; signal.pause()", env=[variable])
        spec = pod([waits], nodeName=node["metadata"]["name"])
        namespace.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    for name in holders:
        namespace("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=60s")
    namespace("delete", "dtj", "twice")
    job.apply(manifest("twice", trainer=LONG))
    job.trains()
    pods = [*job.live("coordinator"), *job.live("worker")]
    held = {name: namespace("exec", name, "--", "printenv", "TANDEM_TOKEN").strip() for name in pods}
    assert set(held.values()) == {secret(namespace, "twice-token")}, f"{held}\n{job.describe()}"
    namespace("delete", "dtj", "twice")
    namespace("delete", "pod", *holders, "--grace-period=0", "--force")


@pytest.mark.timeout(400)
@pytest.mark.full("operator", "coordinator")
def test_a_job_whose_token_an_earlier_operator_has_drawn_keeps_it(namespace: Namespace, operator: Operator) -> None:
    """That operator made the Secret at random; this one cannot read it, and is known by a digest."""
    namespace("create", "secret", "generic", "earlier-token", "--from-literal=token=drawn-at-random-before")
    job = Job(namespace, "earlier")
    job.apply(manifest("earlier", trainer=LONG))
    job.trains()
    workers, generation = job.live("worker"), job.status["generation"]
    operator.kill()
    operator.start()
    job.trains(beyond=job.step)
    assert (job.live("worker"), job.status["generation"]) == (workers, generation), job.describe()
    assert secret(namespace, "earlier-token") == "drawn-at-random-before"
    namespace("delete", "dtj", "earlier")


@pytest.mark.timeout(400)
@pytest.mark.full("operator", "coordinator")
def test_a_coordinator_has_a_template_and_all_pods_can_run_as_any_user_of_group_0(
    namespace: Namespace, operator: Operator
) -> None:
    """As OpenShift has it: a user that no image knows, who is in group 0 and in that of the volume."""
    operator.kill()
    operator.start("--cluster-user")
    user = {"runAsUser": 1_000_660_000, "runAsGroup": 0, "fsGroup": 1_000_660_000}
    template = {"spec": {"securityContext": user}}
    annotated = {"metadata": {"annotations": {"team": "infra"}}, **template}
    job = Job(namespace, "any-user")
    whole = manifest(
        "any-user",
        coordinator={"template": annotated, "resources": {"limits": {"memory": "256Mi", "cpu": "1"}}},
        workers={"replicas": 2, "template": template},
        evaluators={"template": template},
    )
    job.apply(whole)
    job.becomes(lambda: job.pods("coordinator"), "a coordinator")
    (pod,) = job.pods("coordinator")
    job.reaches("Succeeded", seconds=300)
    operator.kill()
    operator.start()
    assert pod["metadata"]["annotations"]["team"] == "infra"
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"memory": "256Mi", "cpu": "1"}
    assert pod["spec"]["securityContext"]["runAsUser"] == user["runAsUser"]
    namespace("delete", "dtj", "any-user")


SHOW = "import os, time; print(os.environ['HF_TOKEN'], os.environ['NODE']); time.sleep(5)"


@pytest.mark.timeout(400)
def test_a_secret_reaches_the_processes_and_is_written_nowhere(namespace: Namespace, operator: Operator) -> None:
    namespace("create", "secret", "generic", "hub", "--from-literal=token=hf_never_written")
    job = Job(namespace, "from-secret")
    env = [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    trainer = {"command": ["python", "-c"], "args": [SHOW], "env": env}
    storage = {"storage": {"size": "1Gi"}}
    job.apply(
        manifest(
            "from-secret", trainer=trainer, workers={"replicas": 1}, evaluators={"replicas": 0}, checkpoint=storage
        )
    )
    job.reaches("Succeeded")
    (pod,) = job.pods("worker")
    assert f"hf_never_written {pod['spec']['nodeName']}" in namespace("logs", pod["metadata"]["name"])
    written = namespace("get", "configmap,dtj,pods", "-o", "json")
    assert "hf_never_written" not in written
    assert '"hub"' in written
    namespace("delete", "dtj", "from-secret")


@pytest.mark.timeout(400)
@pytest.mark.full("operator", "coordinator")
def test_a_volume_that_waits_for_its_first_pod_is_bound_where_workers_can_run(
    namespace: Namespace, operator: Operator
) -> None:
    """Whichever pod of the job the scheduler takes first."""
    job = Job(namespace, "one-node")
    node = json.loads(kubectl("get", "nodes", "-o", "json"))["items"][-1]["metadata"]["name"]
    template = {"spec": {"nodeSelector": {"kubernetes.io/hostname": node}}}
    storage = {"size": "1Gi", "accessModes": ["ReadWriteOnce"]}
    job.apply(
        manifest(
            "one-node",
            trainer=LONG,
            workers={"replicas": 1, "template": template},
            checkpoint={"everySteps": 50, "storage": storage},
        )
    )
    job.trains()
    pods = [pod for role in ("coordinator", "worker", "evaluator") for pod in job.pods(role)]
    assert {pod["spec"]["nodeName"] for pod in pods} == {node}, job.describe()
    namespace("delete", "dtj", "one-node")


def _made(pod: Manifest) -> datetime:
    return datetime.fromisoformat(pod["metadata"]["creationTimestamp"])


SCORES = """
import os
from tandem.evaluation import Mean, checkpoints
for checkpoint in checkpoints():
    assert checkpoint.weights.is_file()
    checkpoint.report(half=checkpoint.step / 2, word=Mean(len(os.environ["WORD"]), 1))
"""


@pytest.mark.timeout(400)
def test_a_program_evaluates_each_checkpoint_in_pods_without_a_gpu_and_its_best_is_in_the_status(
    namespace: Namespace, operator: Operator
) -> None:
    namespace("create", "secret", "generic", "word", "--from-literal=word=seven77")
    job = Job(namespace, "program")
    config = {"model": "baby-cnn", "data": {"name": "digits"}, "epochs": 20, "maxSteps": 300}
    env = [{"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "word", "key": "word"}}}]
    evaluators = {
        **{"command": ["python", "-c"], "args": [SCORES], "env": env, "processesPerReplica": 2},
        **{"metric": "half", "goal": "Maximize"},
    }
    job.apply(
        manifest(
            "program",
            trainer=images(config),
            workers={"replicas": 1},
            evaluators=evaluators,
            checkpoint={"everySteps": 100, "storage": {"size": "1Gi"}},
        )
    )
    job.reaches("Succeeded")
    best = job.status["bestCheckpoint"]
    assert (best["step"], best["metric"], best["value"]) == (300, "half", 150.0), job.describe()
    (pod,) = job.pods("evaluator")
    logs = namespace("logs", pod["metadata"]["name"])
    assert "half=150 word=7" in logs
    assert "seven77" not in namespace("get", "configmap,dtj,pods", "-o", "json")
    namespace("delete", "dtj", "program")


@pytest.mark.timeout(400)
@pytest.mark.full("operator", "evaluator")
def test_evaluators_wait_for_gpus_beside_a_stand_in_and_take_them_when_they_are_free(
    namespace: Namespace, operator: Operator, images: Images
) -> None:
    holder = container("holder", images.operator, "sleep", "100000", resources={"limits": {"nvidia.com/gpu": 4}})
    for name in ("first", "second"):
        # All GPUs of both nodes; one pod gives its own back below.
        namespace.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod([holder])})
    program = "import os, torch; from tandem.evaluation import checkpoints"
    program += "\nfor one in checkpoints(): one.report(gpus=len(os.environ['CUDA_VISIBLE_DEVICES']))"
    evaluators = {
        "command": ["python", "-c", program],
        "metric": "gpus",
        "goal": "Maximize",
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "fallback": "CPU",
        "fallbackAfterSeconds": 2,
    }
    job = Job(namespace, "spare")
    job.apply(manifest("spare", trainer=LONG, evaluators=evaluators, checkpoint={"everySteps": 20}))
    job.trains()
    job.becomes(
        lambda: (job.status.get("latestEvaluation") or {}).get("value") == 0.0, "a score of the stand-in", 120.0
    )
    events = namespace("get", "events")
    assert "EvaluatorFallback" in events
    assert "Insufficient nvidia.com/gpu" in events
    assert len(job.pods("evaluator")) == 2
    namespace("delete", "pod", "first", "--grace-period=0")
    job.becomes(lambda: (job.status.get("latestEvaluation") or {}).get("value") == 1.0, "a score on a GPU", 120.0)
    job.becomes(lambda: len(job.live("evaluator")) == 1, "that the stand-in is gone")
    namespace("delete", "dtj", "spare")
