"""A job in pods, without an operator: what its processes need from a cluster, and that they need no more."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.job.manifest.reading import read_job
from tandem.job.resource import DistributedTrainingJob
from tandem.processes import launch
from tandem.processes.exitcode import ExitCode
from tandem.wire.status import Snapshot
from tests.support import EXAMPLES
from tests.support.cluster.images import Images
from tests.support.cluster.pods import Manifest, Namespace, container, named, pod, restricted
from tests.support.waiting import until

pytestmark = [pytest.mark.full("coordinator", "trainer", "evaluator", "images")]

EXAMPLE = EXAMPLES / "digits.yaml"
RUN = Path("/checkpoints/digits")
COORDINATOR = "coordinator:7070"
CHECKPOINTS = {"name": "checkpoints", "mountPath": "/checkpoints"}
VOLUME = {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}}
MINUTES = 60.0


@pytest.fixture(scope="module")
def job() -> DistributedTrainingJob:
    return read_job(EXAMPLE)


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with restricted() as made:
        yield made


def variables(job: DistributedTrainingJob, replica: str, knows_token: bool = True) -> list[Manifest]:
    """As a pod template has them: the token comes from its secret."""
    token, coordinator = ("token", COORDINATOR) if knows_token else ("", "")
    plain = launch.environment(job, RUN, replica, token, coordinator)
    found: list[Manifest] = [{"name": name, "value": value} for name, value in plain.items() if name != launch.TOKEN]
    if knows_token:
        found.append({"name": launch.TOKEN, "valueFrom": {"secretKeyRef": {"name": "token", "key": "token"}}})
    return found


def coordinator(job: DistributedTrainingJob, image: str) -> Manifest:
    given = {"name": launch.JOB, "value": "/etc/tandem/job.yaml"}
    answers = {"httpGet": {"path": "/healthz", "port": 7070}, "periodSeconds": 1}
    main = container(
        "coordinator",
        image,
        *launch.coordinator_command("0.0.0.0", 7070, python="python"),
        env=[*variables(job, "coordinator"), given],
        readinessProbe=answers,
        volumeMounts=[CHECKPOINTS, {"name": "job", "mountPath": "/etc/tandem"}],
    )
    volumes = [VOLUME, {"name": "job", "configMap": {"name": "job"}}]
    labels = {"app": "coordinator"}
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod([main], volumes, restartPolicy="Always")},
    }
    return named("Deployment", "coordinator", "apps/v1", spec=spec)


def worker(job: DistributedTrainingJob, image: str, name: str, **more: Any) -> Manifest:
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    threads = {"name": "OMP_NUM_THREADS", "value": "1"}
    main = container(
        "trainer",
        image,
        *launch.agent_command(job, COORDINATOR, "$(POD_IP)", python="python"),
        env=[address, threads, *variables(job, name)],
        volumeMounts=[CHECKPOINTS],
        resources={"limits": {"memory": "3Gi"}, "requests": {"cpu": "100m", "memory": "500Mi"}},
    )
    return named("Pod", name, spec=pod([main], [VOLUME], **more))


def evaluator(job: DistributedTrainingJob, image: str) -> Manifest:
    processes = str(job.spec.evaluation.processes_per_replica)
    main = container(
        "evaluator",
        image,
        *("python", "-m", "tandem_evaluator", "--processes", processes),
        env=variables(job, "evaluator-0", knows_token=False),
        volumeMounts=[CHECKPOINTS],
        resources={"limits": {"memory": "3Gi"}, "requests": {"cpu": "100m", "memory": "500Mi"}},
    )
    return named("Pod", "evaluator-0", spec=pod([main], [VOLUME]))


def shared(job: DistributedTrainingJob) -> list[Manifest]:
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    service = {"selector": {"app": "coordinator"}, "ports": [{"port": 7070}]}
    return [
        named("PersistentVolumeClaim", "checkpoints", spec=claim),
        named("Secret", "token", stringData={"token": secrets.token_hex(16)}),
        named("ConfigMap", "job", data={"job.yaml": json.dumps(job.dump())}),
        named("Service", "coordinator", spec=service),
    ]


def story(namespace: Namespace, *names: str) -> str:
    """What to read when it went wrong."""
    logs = [namespace("logs", name, "--tail=30", check=False) for name in ("deploy/coordinator", *names)]
    return "\n".join([namespace("get", "pods", "-o", "wide"), namespace("get", "events"), *logs])


def inside(namespace: Namespace, path: Path) -> Any:
    return json.loads(namespace("exec", "deploy/coordinator", "--", "cat", str(path)))


@pytest.mark.timeout(1900)
def test_the_digits_are_trained_and_evaluated_to_the_end(
    namespace: Namespace, images: Images, job: DistributedTrainingJob
) -> None:
    workers = [f"worker-{index}" for index in range(job.spec.workers.replicas)]
    namespace.create(*shared(job), coordinator(job, images.operator), evaluator(job, images.evaluator))
    namespace.create(*(worker(job, images.trainer, name) for name in workers))
    for name in (*workers, "evaluator-0"):
        code, text = namespace.result(name, 10 * MINUTES, otherwise=lambda: story(namespace, *workers, "evaluator-0"))
        assert code == 0, text
    final, best = inside(namespace, RUN / "DONE")["final"], inside(namespace, RUN / "best.json")
    assert inside(namespace, RUN / "job.json") == job.dump_brief()
    assert best["metric"] == "accuracy"
    assert best["value"] >= 0.97
    merged = inside(namespace, RUN / "evaluations" / final["name"] / f"g{final['generation']:06d}.json")
    assert merged["samples"] == sum(map(sum, merged["confusion"])) > 300


def endless() -> DistributedTrainingJob:
    """Two workers that train until somebody stops them, and save only when they are asked to."""
    settings = ["spec.trainer.loop.epochs=100000", "spec.trainer.parameters.model=baby-cnn"]
    return read_job(EXAMPLE, [*settings, "spec.checkpoint.everySteps=1000000000", "spec.evaluators.replicas=0"])


ASK = """
import os
from tandem.wire.coordinator_client import CoordinatorClient
print(CoordinatorClient("127.0.0.1:7070", os.environ["TANDEM_TOKEN"]).status().model_dump_json())
"""


def snapshot(namespace: Namespace) -> Snapshot:
    return Snapshot.model_validate_json(namespace("exec", "deploy/coordinator", "--", "python", "-c", ASK))


def trains(namespace: Namespace, size: int) -> None:
    """Wait until a group of that size makes steps."""

    def there() -> bool:
        found = snapshot(namespace)
        steps = [rank.step for member in found.members for rank in member.ranks]
        return found.status.world_size == size and len(steps) == size and min(steps) > 0

    namespace("rollout", "status", "deploy/coordinator", "--timeout=120s", seconds=130.0)
    workers = (f"worker-{index}" for index in range(2))
    until(there, f"training with {size}", 5 * MINUTES, otherwise=lambda: story(namespace, *workers))


def test_a_pod_that_is_asked_to_leave_lets_its_group_save_first(namespace: Namespace, images: Images) -> None:
    job = endless()
    namespace.create(*shared(job), coordinator(job, images.operator))
    namespace.create(*(worker(job, images.trainer, f"worker-{index}") for index in range(2)))
    trains(namespace, 2)
    # What a kubelet sends, without deleting the pod, which would take its exit code along. Process 1 is tini.
    namespace("exec", "worker-1", "--", "python", "-c", "import os, signal; os.kill(1, signal.SIGTERM)")
    code, text = namespace.result("worker-1", MINUTES)
    assert code == ExitCode.PREEMPTED, text
    assert "Traceback" not in text
    trains(namespace, 1)
    found = snapshot(namespace)
    assert found.generations[-1].reason == "Preempted"
    assert "worker-1" in found.generations[-1].detail
    record = inside(namespace, RUN / "generations" / "000002.json")
    assert record["resumedFrom"]["step"] > 0
    assert found.status.phase == "Running"


def test_a_coordinator_without_its_job_says_so_and_its_pod_is_not_ready(namespace: Namespace, images: Images) -> None:
    job = endless()
    objects = [manifest for manifest in shared(job) if manifest["kind"] != "ConfigMap"]
    wrong = named("ConfigMap", "job", data={"job.yaml": json.dumps(job.dump()).replace('"replicas"', '"replica"')})
    namespace.create(*objects, wrong, coordinator(job, images.operator))

    def ended() -> str | None:
        logs = namespace("logs", "deploy/coordinator", check=False)
        return logs if "tandem_coordinator:" in logs else None

    said = until(ended, "the coordinator's end", 2 * MINUTES, otherwise=lambda: story(namespace))
    assert "/etc/tandem/job.yaml" in said
    assert "did you mean replicas?" in said
    assert namespace.get("deployment", "coordinator")["status"].get("readyReplicas", 0) == 0
