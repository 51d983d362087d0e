"""The pods of a job: what those of each role run and with which rights.

All pass the `restricted` Pod Security Standard. A user's template is laid over (tandem_operator.overlay), and then what
the operator relies on is put back: its labels, and that a worker's container is never restarted in place.

Everything a job must keep is in one folder of its volume, called like the job: one volume may serve several jobs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from tandem import launch
from tandem.job import GPU, DistributedTrainingJob
from tandem.listening import EVERYWHERE
from tandem_operator import names
from tandem_operator.overlay import overlay

USER = 65532
"""The user and group of the images."""
PORT = 7070
"""Where the coordinator listens."""
METRICS_PORT = 7071
"""Where it answers Prometheus, without a token (docs/decisions/0013-signals.md)."""
VOLUME = "/tandem"
JOB_FOLDER, JOB_FILE = "/etc/tandem", "job.json"
PYTHON = "python"
ADDRESS = "TANDEM_POD_IP"
SHUTDOWN_SECONDS = 30
"""What ranks get between SIGTERM and SIGKILL; as much more as the job's template gives a pod more than GRACE."""
HOME = {"HOME": "/tmp"}  # noqa: S108
"""The root of the file system is read-only; caches go where something may be written."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}
GRACE = {names.WORKER: 60, names.COORDINATOR: 10, names.EVALUATOR: 15}
"""Seconds between SIGTERM and SIGKILL of a pod."""
MOST_CORES = 4_096
"""More than any node has; an amount may be written with any exponent."""
UNREACHABLE_SECONDS = 5
"""A node that is not ready loses our pods after so long; by default it would be five minutes."""


@dataclass(frozen=True)
class Images:
    """What pods run, unless the job says something else."""

    operator: str
    """Also the coordinator's."""
    trainer: str
    evaluator: str
    pull_secrets: tuple[str, ...] = ()
    """Names of the secrets, of each job's namespace, that these are pulled with."""


def run_dir(job: DistributedTrainingJob) -> Path:
    """The job's run directory, as its pods see it."""
    return Path(VOLUME, job.metadata.name)


def coordinator(job: DistributedTrainingJob, images: Images, token_digest: str) -> dict[str, Any]:
    """The pod template of the coordinator.

    Args:
        token_digest: by which it knows the operator, whatever token it and the workers were given.
    """
    command = launch.coordinator_command(EVERYWHERE, PORT, python=PYTHON, metrics_port=METRICS_PORT)
    command += ["--job", f"{JOB_FOLDER}/{JOB_FILE}"]
    own = {launch.RUN_DIR: str(run_dir(job)), launch.TOKEN_DIGEST: token_digest}
    probe = {"httpGet": {"path": "/healthz", "port": PORT}}
    container = {
        **_container(names.COORDINATOR, images.operator, command),
        "env": [*_of_pod({launch.POD: "metadata.uid"}), *_literal(HOME | own), _token(job)],
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"}
            for name, port in {"http": PORT, "metrics": METRICS_PORT}.items()
        ],
        "readinessProbe": {**probe, "periodSeconds": 1, "failureThreshold": 3},
        "livenessProbe": {**probe, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
    }
    container["volumeMounts"] = [*container["volumeMounts"], {"name": "job", "mountPath": JOB_FOLDER, "readOnly": True}]
    template = _template(job, names.COORDINATOR, container, images)
    template["spec"]["volumes"].append({"name": "job", "configMap": {"name": names.job_file(job.metadata.name)}})
    # Where it crashes, its kubelet is the first to know.
    template["spec"]["restartPolicy"] = "Always"
    # Not with the workers, whose nodes are the ones that go. And where one was lost with its node, which the scheduler
    # does not know of yet, the next one goes elsewhere: its pod is still seen there.
    its_forerunner = {
        "labelSelector": {"matchLabels": names.labels(job.metadata.name, names.COORDINATOR)},
        "topologyKey": "kubernetes.io/hostname",
    }
    template["spec"]["affinity"] = {
        "nodeAffinity": _without_gpus(),
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": its_forerunner}]
        },
    }
    return template


def worker(job: DistributedTrainingJob, uid: str, images: Images, endpoint: str) -> dict[str, Any]:
    """The pod template of a worker.

    Args:
        uid: of the job's object.
        endpoint: host:port of the coordinator. An address, so that no agent ever waits for DNS.
    """
    spec = job.spec
    command = launch.agent_command(job, endpoint, f"$({ADDRESS})", _shutdown_seconds(job), python=PYTHON)
    begin = command.index("--")
    # Kubernetes replaces $(NAME) in commands; what the user wrote is the user's.
    command = command[:begin] + [word.replace("$(", "$$(") for word in command[begin:]]
    variables = {"OMP_NUM_THREADS": str(threads(job))} | launch.environment(job, run_dir(job), "")
    variables |= {launch.COORDINATOR: endpoint, launch.UID: uid}
    fields = {launch.REPLICA: "metadata.name", launch.NODE: "spec.nodeName", ADDRESS: "status.podIP"}
    container = {
        **_container(names.WORKER, spec.trainer.image or images.trainer, command),
        "env": [*_of_pod(fields), _token(job), *_literal(HOME | variables, fields, launch.TOKEN)],
        "resources": spec.workers.resources,
    }
    template = overlay(_template(job, names.WORKER, container, images), spec.workers.template)
    template["spec"]["restartPolicy"] = "Never"
    return _labelled(template, job, names.WORKER)


def evaluator(job: DistributedTrainingJob, uid: str, images: Images) -> dict[str, Any]:
    """The pod template of an evaluator. It never holds a GPU, whatever the job says, and goes where none is if it
    can."""
    evaluation = job.spec.evaluation
    command = [PYTHON, "-m", "tandem_evaluator", "--processes", str(evaluation.processes_per_replica)]
    fields = {launch.REPLICA: "metadata.name"}
    own = {launch.UID: uid} | NO_GPU
    variables = HOME | {"OMP_NUM_THREADS": "1"} | launch.environment(job, run_dir(job), "") | own
    container = {
        **_container(names.EVALUATOR, images.evaluator, command),
        "env": [*_of_pod(fields), *_literal(variables, fields)],
        "resources": {
            part: {name: amount for name, amount in amounts.items() if name != GPU}
            for part, amounts in evaluation.resources.items()
        },
    }
    ours = _template(job, names.EVALUATOR, container, images)
    ours["spec"]["affinity"] = {"nodeAffinity": _without_gpus()}
    template = overlay(ours, evaluation.template)
    template["spec"]["restartPolicy"] = "Never"
    return _labelled(template, job, names.EVALUATOR)


def _shutdown_seconds(job: DistributedTrainingJob) -> int:
    """Whole seconds. A checkpoint that takes long to write needs a longer grace period, and ranks the most of it."""
    grace = (job.spec.workers.template.get("spec") or {}).get("terminationGracePeriodSeconds")
    longer = grace - GRACE[names.WORKER] if isinstance(grace, int) else 0
    return SHUTDOWN_SECONDS + max(0, longer)


def threads(job: DistributedTrainingJob) -> int:
    """Threads of each rank on CPUs: its share of what the pod asks for, and 1 if it does not say. Left alone, torch
    takes as many as the node has cores, whatever the pod may use, and they get in each other's way."""
    resources = job.spec.workers.resources
    asked = {**resources.get("requests", {}), **resources.get("limits", {})}.get("cpu")
    cores = Decimal(0) if asked is None else min(parse_quantity(str(asked)), Decimal(MOST_CORES))  # type: ignore[no-untyped-call]
    return max(1, int(cores / job.spec.workers.processes))


def _without_gpus() -> dict[str, Any]:
    """To go where no GPU is, if possible."""
    without = [{"key": f"{GPU}.{label}", "operator": "DoesNotExist"} for label in ("present", "count")]
    preferred = [{"weight": 100, "preference": {"matchExpressions": without}}]
    return {"preferredDuringSchedulingIgnoredDuringExecution": preferred}


def _template(job: DistributedTrainingJob, role: str, container: Mapping[str, Any], images: Images) -> dict[str, Any]:
    policy = job.spec.run_policy
    claim = job.spec.checkpoint.storage.claim_name or names.checkpoints(job.metadata.name)
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE[role],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{taint}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": UNREACHABLE_SECONDS,
            }
            for taint in ("not-ready", "unreachable")
        ],
        "containers": [dict(container)],
        "volumes": [
            {"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if images.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in images.pull_secrets]
    if policy.priority_class_name:
        spec["priorityClassName"] = policy.priority_class_name
    if policy.scheduler_name:
        spec["schedulerName"] = policy.scheduler_name
    return {"metadata": {"labels": names.labels(job.metadata.name, role)}, "spec": spec}


def _container(role: str, image: str, command: list[str]) -> dict[str, Any]:
    return {
        "name": role,
        "image": image,
        # Not `command`: the image's own entry point reaps what is left of processes.
        "args": command,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "checkpoints", "mountPath": VOLUME},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a folder of the pod's own
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _labelled(template: dict[str, Any], job: DistributedTrainingJob, role: str) -> dict[str, Any]:
    metadata = template.setdefault("metadata", {})
    metadata["labels"] = {**metadata.get("labels", {}), **names.labels(job.metadata.name, role)}
    return template


def _token(job: DistributedTrainingJob) -> dict[str, Any]:
    reference = {"name": names.token(job.metadata.name), "key": "token"}
    return {"name": launch.TOKEN, "valueFrom": {"secretKeyRef": reference}}


def _of_pod(fields: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]


def _literal(variables: Mapping[str, str], fields: Iterable[str] = (), *more: str) -> list[dict[str, str]]:
    """Variables as they are written, without those that come from elsewhere."""
    elsewhere = {*fields, *more}
    return [
        {"name": name, "value": value.replace("$(", "$$(")}
        for name, value in variables.items()
        if name not in elsewhere
    ]
