"""The pods of a job: the containers and security settings of each role.

All pass the `restricted` Pod Security Standard. A user's template is laid over (tandem_operator.pods), and then
what the operator relies on is put back: its labels, and that a worker's container is never restarted in place.

Everything a job must keep is in one folder of its volume, called like the job: one volume may serve several jobs.

Objects are merged field by field. Of a list whose entries have a name (containers, volumes, env, …) those of the same
name are merged and new ones added; volume mounts go by their path, ports by their number, topology keys by theirs.
Tolerations and image pull secrets are added. Any other list replaces ours, and so does any single value. A null says
nothing, as a field that is left out.

An entry of the allow-list is the path of a field, with all that is below it, such as `spec.nodeSelector` or
`spec.containers.env`; lists are passed through. With `=` only that value: `spec.serviceAccountName=training`. The names
of containers and volumes, by which a template is laid over ours, are always allowed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from tandem import launch
from tandem.job import DistributedTrainingJob
from tandem.launch import EVERYWHERE
from tandem.pod_template import Asked, gpus, is_gpu
from tandem.tracking import URI
from tandem.variables import EnvVar
from tandem_operator import names
from tandem_operator.retry import incarnation

KEYS = {"volumeMounts": "mountPath", "ports": "containerPort", "topologySpreadConstraints": "topologyKey"}
ADDED = {"tolerations"}


def overlay(ours: Any, theirs: Any, field: str = "") -> Any:
    """`theirs` laid over `ours`."""
    if theirs is None:
        return ours
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        merged = {key: overlay(ours[key], theirs[key], key) for key in ours if key in theirs}
        return {**ours, **{key: value for key, value in theirs.items() if value is not None}, **merged}
    if isinstance(ours, list) and isinstance(theirs, list):
        return _lists(ours, theirs, field)
    return theirs


def _lists(ours: list[Any], theirs: list[Any], field: str) -> list[Any]:
    if field in ADDED:
        return [*ours, *(one for one in theirs if one not in ours)]
    key = KEYS.get(field, "name")
    if not all(isinstance(one, Mapping) and isinstance(one.get(key), str | int) for one in [*ours, *theirs]):
        return theirs
    news = {one[key]: one for one in theirs}
    kept = [overlay(one, news.pop(one[key])) if one[key] in news else one for one in ours]
    return [*kept, *news.values()]


NAMES = {"spec.containers.name", "spec.initContainers.name", "spec.volumes.name"}


def complaint(job: DistributedTrainingJob, allowed: Sequence[str]) -> str | None:
    """What the first template sets that it may not, in a sentence.

    Args:
        allowed: entries as above; none: everything is allowed.
    """
    if not allowed:
        return None
    spec = job.spec
    templates = {
        "workers": spec.workers.template,
        "evaluators": spec.evaluation.template,
        "coordinator": spec.coordinator.template,
    }
    for part, template in templates.items():
        for path, value in _leaves(template, ""):
            if path not in NAMES and not any(_covers(entry, path, value) for entry in allowed):
                fields = ", ".join(allowed)
                return f"{part}.template sets {path}, and this operator lets templates set only {fields}"
    return None


def _covers(entry: str, path: str, value: Any) -> bool:
    field, is_bound, only = entry.partition("=")
    if is_bound:
        return path == field and value == only
    return path == field or path.startswith(f"{field}.")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The path and the value of everything that is set; an empty object or list is a value, too."""
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for inner in value:
            yield from _leaves(inner, path)
    else:
        yield path, value


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
HOME = {"HOME": "/tmp", "USER": "tandem"}  # noqa: S108
"""The root of the file system is read-only; caches go where something may be written. A user that the cluster has given
has no name in the image, and torch asks for one."""
PIP_INDEX = "PIP_INDEX_URL"
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}
GRACE = {names.WORKER: 60, names.COORDINATOR: 10, names.EVALUATOR: 15}
"""Seconds between SIGTERM and SIGKILL of a pod."""
MAX_CORES = 4_096
"""More than any node has; an amount may be written with any exponent."""
GPU_NODES = (
    "nvidia.com/gpu.present",
    "nvidia.com/gpu.count",
    "feature.node.kubernetes.io/amd-gpu",
    "intel.feature.node.kubernetes.io/gpu",
)
"""Labels of nodes with GPUs, as the vendors' device plugins and operators set them."""
COORDINATOR_SHARED_MEMORY = "64Mi"
SHARED_MEMORY = "16Gi"
"""The size of /dev/shm where the job does not say what memory a pod has."""
COORDINATOR_REQUESTS = {"cpu": "50m", "memory": "128Mi"}
COORDINATOR_MEMORY, RANK_MEMORY = 512, 1 / 16
"""MiB that a coordinator may use, and what it may use more for each rank. 54 were seen without agents, 329 with 10,000
(docs/scale.md)."""
TRACKING_MEMORY, TRACKING_GRACE = 256, 120
"""MiB more, and seconds between SIGTERM and SIGKILL, where the run is sent to a tracking server: 83 MB were seen, and
weights are uploaded at the end."""
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
    own_user: bool = True
    """Pods run as the user and group of the images, and not as those that the cluster gives them."""
    pull_policy: str = ""
    """When kubelets pull them; empty: as Kubernetes decides by the tag."""
    tolerations: tuple[Mapping[str, Any], ...] = ()
    """Of all pods, besides ours."""
    package_index: str = ""
    """Where pip finds what the requirements.txt of a job's code lists; empty: as the image is configured."""
    mlflow_uri: str = ""
    """The MLflow server of jobs that are tracked and name none; empty: there is none."""


def run_dir(job: DistributedTrainingJob) -> Path:
    """The job's run directory, as its pods see it."""
    return Path(VOLUME, job.metadata.name)


def coordinator(job: DistributedTrainingJob, images: Images, token_digest: str, follows: bool) -> dict[str, Any]:
    """The pod template of the coordinator.

    Args:
        token_digest: by which it knows the operator, whatever token it and the workers were given.
        follows: it has to be where workers can be, for its volume is there.
    """
    spec = job.spec
    command = launch.coordinator_command(EVERYWHERE, PORT, python=PYTHON, metrics_port=METRICS_PORT)
    command += ["--job", f"{JOB_FOLDER}/{JOB_FILE}"]
    own = {launch.RUN_DIR: str(run_dir(job)), launch.TOKEN_DIGEST: token_digest}
    probe = {"httpGet": {"path": "/healthz", "port": PORT}}
    container = {
        **_container(names.COORDINATOR, images.operator, command),
        "env": [
            *_of_pod({launch.POD: "metadata.uid"}),
            *_literal(HOME | own),
            _token(job),
            *_of_tracking(job, images, launch.POD, launch.TOKEN, *HOME, *own),
        ],
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"}
            for name, port in {"http": PORT, "metrics": METRICS_PORT}.items()
        ],
        "readinessProbe": {**probe, "periodSeconds": 1, "failureThreshold": 3},
        "livenessProbe": {**probe, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "resources": _of_coordinator(job),
    }
    container["volumeMounts"] = [*container["volumeMounts"], {"name": "job", "mountPath": JOB_FOLDER, "readOnly": True}]
    template = _template(job, names.COORDINATOR, container, images, COORDINATOR_SHARED_MEMORY)
    if spec.tracking.mlflow is not None:
        template["spec"]["terminationGracePeriodSeconds"] = TRACKING_GRACE
    template["spec"]["volumes"].append({"name": "job", "configMap": {"name": names.job_file(job.metadata.name)}})
    # Not with the workers, whose nodes are the ones that go. And where one was lost with its node, which the scheduler
    # does not know of yet, the next one goes elsewhere: its pod is still seen there.
    its_forerunner = {
        "labelSelector": {"matchLabels": names.labels(job.metadata.name, names.COORDINATOR)},
        "topologyKey": "kubernetes.io/hostname",
    }
    # And not with the operator, which replaces it: where both were lost with one node, the group waited 53 s.
    its_operator = {
        "labelSelector": {"matchLabels": {names.ROLE: names.OPERATOR}},
        "namespaceSelector": {},
        "topologyKey": "kubernetes.io/hostname",
    }
    template["spec"]["affinity"] = {
        "nodeAffinity": _gpus(follows),
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": weight, "podAffinityTerm": term}
                for weight, term in ((100, its_forerunner), (50, its_operator))
            ]
        },
    }
    if follows:
        template = overlay(template, _selection(job))
    template = overlay(template, spec.coordinator.template)
    # Where it crashes, its kubelet is the first to know.
    template["spec"]["restartPolicy"] = "Always"
    return _labelled(template, job, names.COORDINATOR)


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
    variables = _index(job, images, spec.trainer.env) | variables
    variables |= {launch.COORDINATOR: endpoint, launch.UID: incarnation(job, uid)}
    fields = {launch.REPLICA: "metadata.name", launch.NODE: "spec.nodeName", ADDRESS: "status.podIP"}
    container = {
        **_container(names.WORKER, spec.trainer.image or images.trainer, command),
        "env": [
            *_of_pod(fields),
            _token(job),
            *_literal(HOME | variables, fields, launch.TOKEN),
            *_from_elsewhere(spec.trainer.env, *fields, *variables, launch.TOKEN),
        ],
        "resources": spec.workers.resources,
    }
    template = overlay(
        _template(job, names.WORKER, container, images, _memory(spec.workers.asked)), spec.workers.template
    )
    template["spec"]["restartPolicy"] = "Never"
    return _labelled(template, job, names.WORKER)


def evaluator(job: DistributedTrainingJob, uid: str, images: Images, follows: bool) -> dict[str, Any]:
    """The pod template of an evaluator. It never holds a GPU, whatever the job says, and goes where none is if it
    can.

    Args:
        uid: of the job's object.
        follows: it has to be where workers can be, for its volume is there.
    """
    own_gpu = job.spec.workers.gpu_resource
    evaluation = job.spec.evaluation
    command = launch.evaluators_command(evaluation.processes_per_replica, python=PYTHON)
    fields = {launch.REPLICA: "metadata.name"}
    own = {launch.UID: incarnation(job, uid)} | NO_GPU
    index = _index(job, images, [*job.spec.trainer.env, *evaluation.env])
    variables = index | HOME | {"OMP_NUM_THREADS": "1"} | launch.evaluator_environment(job, run_dir(job), "") | own
    container = {
        **_container(names.EVALUATOR, evaluation.image or images.evaluator, command),
        "env": [
            *_of_pod(fields),
            *_literal(variables, fields),
            *_from_elsewhere([*job.spec.trainer.env, *evaluation.env], *fields, *variables),
        ],
        "resources": evaluation.resources,
    }
    ours = _template(job, names.EVALUATOR, container, images, _memory(evaluation.resources))
    ours["spec"]["affinity"] = {"nodeAffinity": _gpus(follows)}
    template = overlay(overlay(ours, _selection(job)) if follows else ours, evaluation.template)
    template["spec"]["restartPolicy"] = "Never"
    template["spec"]["containers"] = [_without_gpus(one, own_gpu) for one in template["spec"].get("containers") or []]
    return _labelled(template, job, names.EVALUATOR)


def away_from(affinity: Mapping[str, Any], nodes: Sequence[str], rather_not: Sequence[str] = ()) -> dict[str, Any]:
    """An affinity that also keeps off these nodes, whatever labels they have.

    Args:
        rather_not: to these any other is preferred.
    """
    wanted = dict(affinity.get("nodeAffinity") or {})
    if nodes:
        required = wanted.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
        # Any of the terms is enough to be placed, so each of them has to keep off.
        terms = [
            {**(term or {}), "matchFields": [*((term or {}).get("matchFields") or []), *_off(nodes)]}
            for term in required.get("nodeSelectorTerms") or [{}]
        ]
        wanted["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    if rather_not:
        preferred = wanted.get("preferredDuringSchedulingIgnoredDuringExecution") or []
        wish = {"weight": 100, "preference": {"matchFields": _off(rather_not)}}
        wanted["preferredDuringSchedulingIgnoredDuringExecution"] = [*preferred, wish]
    return {**affinity, "nodeAffinity": wanted}


def _off(nodes: Sequence[str]) -> list[dict[str, Any]]:
    return [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in nodes]


def _shutdown_seconds(job: DistributedTrainingJob) -> int:
    """What ranks get between SIGTERM and SIGKILL: a checkpoint that takes long to write needs a longer grace period, of
    which ranks get what is more than usual."""
    grace = (job.spec.workers.template.get("spec") or {}).get("terminationGracePeriodSeconds")
    longer = grace - GRACE[names.WORKER] if isinstance(grace, int) else 0
    return launch.SHUTDOWN_SECONDS + max(0, longer)


def threads(job: DistributedTrainingJob) -> int:
    """Threads of each rank on CPUs: its share of what the pod asks for, and 1 if it does not say. Left alone, torch
    takes as many as the node has cores, whatever the pod may use, and they get in each other's way."""
    resources = job.spec.workers.asked
    asked = {**resources["requests"], **resources["limits"]}.get("cpu")
    cores = Decimal(0) if asked is None else min(parse_quantity(str(asked)), Decimal(MAX_CORES))  # type: ignore[no-untyped-call]
    return max(1, int(cores / job.spec.workers.processes))


def _without_gpus(container: Any, own: str | None) -> Any:
    """An evaluator's container as it is, but for GPUs."""
    if not isinstance(container, dict) or container.get("name") != names.EVALUATOR:
        return container
    # Beside amounts there are claims, a list: what those are of, nobody knows here.
    resources = {
        part: {name: amount for name, amount in amounts.items() if not is_gpu(name, own)}
        if isinstance(amounts, dict)
        else amounts
        for part, amounts in (container.get("resources") or {}).items()
    }
    return {**container, "resources": resources}


def _of_coordinator(job: DistributedTrainingJob) -> dict[str, Any]:
    """What the coordinator asks for. Of what the job says itself, nothing is added: the two need not fit together."""
    given: Asked = {str(part): amounts for part, amounts in job.spec.coordinator.resources.items()}
    said = {name for amounts in given.values() for name in amounts}
    memory = COORDINATOR_MEMORY + RANK_MEMORY * job.spec.workers.most * job.spec.workers.processes
    memory += 0 if job.spec.tracking.mlflow is None else TRACKING_MEMORY
    ours = {"requests": COORDINATOR_REQUESTS, "limits": {"memory": f"{memory:.0f}Mi"}}
    return {
        part: {**{name: amount for name, amount in amounts.items() if name not in said}, **given.get(part, {})}
        for part, amounts in ours.items()
    }


def _memory(asked: Asked) -> str:
    """What a pod may use of /dev/shm: no more than of memory, which it is a part of."""
    amounts = {**asked.get("requests", {}), **asked.get("limits", {})}
    return str(amounts.get("memory", SHARED_MEMORY))


def _gpus(wanted: bool) -> dict[str, Any]:
    """To go where GPUs are, or where none is, if possible."""
    if wanted:
        terms = [{"matchExpressions": [{"key": label, "operator": "Exists"}]} for label in GPU_NODES]
        preferred = [{"weight": 100, "preference": term} for term in terms]
    else:
        without = [{"key": label, "operator": "DoesNotExist"} for label in GPU_NODES]
        preferred = [{"weight": 100, "preference": {"matchExpressions": without}}]
    return {"preferredDuringSchedulingIgnoredDuringExecution": preferred}


def _selection(job: DistributedTrainingJob) -> dict[str, Any]:
    """The part of a template that says on which nodes a job's workers can be."""
    workers = job.spec.workers
    given = workers.template.get("spec") or {}
    # A pod that asks for GPUs is let onto their nodes by an admission plugin; one that asks for none is not.
    tolerations = [{"key": name, "operator": "Exists"} for name in gpus(workers.asked, workers.gpu_resource)]
    spec: dict[str, Any] = {"tolerations": [*(given.get("tolerations") or []), *tolerations]}
    if selector := given.get("nodeSelector"):
        spec["nodeSelector"] = selector
    if affinity := (given.get("affinity") or {}).get("nodeAffinity"):
        spec["affinity"] = {"nodeAffinity": affinity}
    return {"spec": spec}


def _template(
    job: DistributedTrainingJob, role: str, container: Mapping[str, Any], images: Images, shared_memory: str
) -> dict[str, Any]:
    policy = job.spec.run_policy
    claim = job.spec.checkpoint.storage.claim_name or names.checkpoints(job.metadata.name)
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # No image of ours is for another one, and nodes of others need not have a taint.
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "terminationGracePeriodSeconds": GRACE[role],
        "securityContext": {
            "runAsNonRoot": True,
            **({"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER} if images.own_user else {}),
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
        ]
        + [dict(one) for one in images.tolerations],
        "containers": [dict(container) | ({"imagePullPolicy": images.pull_policy} if images.pull_policy else {})],
        "volumes": [
            {"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
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


def _index(job: DistributedTrainingJob, images: Images, theirs: Iterable[EnvVar]) -> dict[str, str]:
    """Where pip looks, unless the job says so itself, which may be with a password from a Secret."""
    if not images.package_index or job.spec.trainer.code is None or any(one.name == PIP_INDEX for one in theirs):
        return {}
    return {PIP_INDEX: images.package_index}


def _of_tracking(job: DistributedTrainingJob, images: Images, *ours: str) -> list[dict[str, Any]]:
    """Where the process beside the coordinator that sends to MLflow finds the server, and what it needs to get in. What
    the job says literally it reads in the job."""
    if (mlflow := job.spec.tracking.mlflow) is None:
        return []
    named = any(one.name == URI for one in mlflow.env)
    own = {} if named or not images.mlflow_uri else {URI: images.mlflow_uri}
    return [*_literal(own), *_from_elsewhere(mlflow.env, *ours)]


def _from_elsewhere(variables: Iterable[EnvVar], *ours: str) -> list[dict[str, Any]]:
    """Variables whose values are in other objects, but for those that the operator sets itself."""
    found = {one.name: one.value_from for one in variables if one.value_from is not None and one.name not in ours}
    return [{"name": name, "valueFrom": source.dump()} for name, source in found.items()]
