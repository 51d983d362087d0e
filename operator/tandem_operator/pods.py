"""The pods of a job: the containers and security settings of each role.

All pass the `restricted` Pod Security Standard. A user's template is merged over the operator's own, and then the
fields that the operator relies on are restored: its labels, and the restart policy of each role.

Everything that a job must keep is in one folder of its volume, named like the job: one volume may serve several jobs.
Where pods share no directory (`checkpoint.storage.shared: false`), each has that folder in an emptyDir, and knows the
bucket and its credentials.

Objects are merged field by field. In a list whose entries have a name (containers, volumes, env, …), entries of the
same name are merged and new ones added; volume mounts are identified by their path, ports by their number, topology
spread constraints by their topology key. Tolerations and image pull secrets are added. Any other list, and any single
value, replaces the operator's. A null has no effect, as a field that is left out.

An entry of the allow-list is the path of a field, with everything below it, such as `spec.nodeSelector` or
`spec.containers.env`; a path passes through lists. With `=` it allows only that value:
`spec.serviceAccountName=training`. The names of containers and volumes, by which a template is merged, are always
allowed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from tandem.job.pod_template import ResourceMap, gpus, is_gpu
from tandem.job.resource import DistributedTrainingJob
from tandem.job.tracking import OTLP_ENDPOINT, URI
from tandem.job.variables import EnvVar
from tandem.processes import launch
from tandem.processes.launch import ALL_ADDRESSES
from tandem_operator import names
from tandem_operator.retry import incarnation

KEYS = {"volumeMounts": "mountPath", "ports": "containerPort", "topologySpreadConstraints": "topologyKey"}
APPENDED_LISTS = {"tolerations"}


def overlay(base: Any, override: Any, field: str = "") -> Any:
    """Merge a template over another one."""
    if override is None:
        return base
    if isinstance(base, Mapping) and isinstance(override, Mapping):
        merged = {key: overlay(base[key], override[key], key) for key in base if key in override}
        return {**base, **{key: value for key, value in override.items() if value is not None}, **merged}
    if isinstance(base, list) and isinstance(override, list):
        return _lists(base, override, field)
    return override


def _lists(base: list[Any], override: list[Any], field: str) -> list[Any]:
    if field in APPENDED_LISTS:
        return [*base, *(entry for entry in override if entry not in base)]
    key = KEYS.get(field, "name")
    if not all(isinstance(entry, Mapping) and isinstance(entry.get(key), str | int) for entry in [*base, *override]):
        return override
    added = {entry[key]: entry for entry in override}
    merged = [overlay(entry, added.pop(entry[key])) if entry[key] in added else entry for entry in base]
    return [*merged, *added.values()]


IDENTIFYING_FIELDS = {"spec.containers.name", "spec.initContainers.name", "spec.volumes.name"}


def complaint(job: DistributedTrainingJob, allowed: Sequence[str]) -> str | None:
    """Describe the first field of the templates that is not allowed, None if all are.

    Args:
        allowed: allow-list entries as above; empty: everything is allowed.
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
            if path not in IDENTIFYING_FIELDS and not any(_covers(entry, path, value) for entry in allowed):
                fields = ", ".join(allowed)
                return f"{part}.template sets {path}, and this operator lets templates set only {fields}"
    return None


def _covers(entry: str, path: str, value: Any) -> bool:
    field, is_bound, only = entry.partition("=")
    if is_bound:
        return path == field and value == only
    return path == field or path.startswith(f"{field}.")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield path and value of every field that is set; an empty object or list is a value, too."""
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
"""Port of the coordinator."""
METRICS_PORT = 7071
"""Port of the coordinator's Prometheus metrics, which need no token (docs/decisions/0013-signals.md)."""
VOLUME = "/tandem"
JOB_FOLDER, JOB_FILE = "/etc/tandem", "job.json"
PYTHON = "python"
ADDRESS = "TANDEM_POD_IP"
HOME = {"HOME": "/tmp", "USER": "tandem"}  # noqa: S108
"""Variables for a read-only root file system: caches go where files may be written. A user that the cluster assigns has
no name in the image, and torch asks for one."""
PIP_INDEX = "PIP_INDEX_URL"
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}
GRACE = {names.WORKER: 60, names.COORDINATOR: 10, names.EVALUATOR: 15}
"""Seconds between SIGTERM and SIGKILL of a pod."""
MAX_CORES = 4_096
"""Upper bound of CPU amounts, more than any node has: an amount may be written with any exponent."""
GPU_NODES = (
    "nvidia.com/gpu.present",
    "nvidia.com/gpu.count",
    "feature.node.kubernetes.io/amd-gpu",
    "intel.feature.node.kubernetes.io/gpu",
)
"""Labels of nodes with GPUs, as the vendors' device plugins and operators set them."""
COORDINATOR_SHARED_MEMORY = "64Mi"
SHARED_MEMORY = "16Gi"
"""Size of /dev/shm where the job does not specify the memory of a pod."""
COORDINATOR_REQUESTS = {"cpu": "50m", "memory": "128Mi"}
COORDINATOR_MEMORY, RANK_MEMORY = 512, 1 / 16
"""Memory limit of a coordinator in MiB, and the addition for each rank. 54 were measured without agents, 329 with
10,000 (docs/measurements.md)."""
TRACKING_MEMORY, TRACKING_GRACE = 256, 120
"""Additional MiB, and seconds between SIGTERM and SIGKILL, if the run is sent to a tracking server: 83 MB were
measured, and weights are uploaded at the end."""
TRACING_MEMORY = 128
"""Additional MiB if traces are sent to a collector: 71 MB were measured."""
UPLOAD_MEMORY, UPLOAD_GRACE, UPLOAD_START = 512, 600, 3600
"""Additional MiB of a coordinator, seconds between SIGTERM and SIGKILL of a pod that uploads, and seconds until the
coordinator has to be healthy, if the run is brought into a bucket: the last checkpoint is uploaded at the end, and all
may be downloaded at the start."""
BUCKET_CREDENTIALS = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GOOGLE_SERVICE_ACCOUNT_KEY"),
    *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY"),
)
"""Keys of the Secret with a bucket's credentials, and the variables that pods get from it. No others, for some
variables make a program run other code."""
UNREACHABLE_SECONDS = 5
"""Time after which a node that is not ready loses its pods; Kubernetes' default is five minutes."""


@dataclass(frozen=True)
class Images:
    """The images of pods whose job names none, and what they need."""

    operator: str
    """Image of the operator and of coordinators."""
    trainer: str
    evaluator: str
    pull_secrets: tuple[str, ...] = ()
    """Names of the Secrets, in each job's namespace, to pull these with."""
    own_user: bool = True
    """Pods run as the user and group of the images, and not as those that the cluster assigns."""
    pull_policy: str = ""
    """Pull policy; empty: Kubernetes decides by the tag."""
    tolerations: tuple[Mapping[str, Any], ...] = ()
    """Additional tolerations of all pods."""
    package_index: str = ""
    """Package index for the requirements.txt of a job's code; empty: as the image is configured."""
    mlflow_uri: str = ""
    """MLflow server of tracked jobs that name none; empty: none."""
    otlp_endpoint: str = ""
    """Collector to which coordinators send traces; empty: none."""


def run_dir(job: DistributedTrainingJob) -> Path:
    """The job's run directory, as its pods see it."""
    return Path(VOLUME, job.metadata.name)


def coordinator(job: DistributedTrainingJob, images: Images, token_digest: str, colocated: bool) -> dict[str, Any]:
    """The pod template of the coordinator.

    Args:
        token_digest: the digest by which it recognizes the operator, whatever token it and the workers have.
        colocated: it has to run where workers can run, because its volume is there.
    """
    spec = job.spec
    command = launch.coordinator_command(ALL_ADDRESSES, PORT, python=PYTHON, metrics_port=METRICS_PORT)
    command += ["--job", f"{JOB_FOLDER}/{JOB_FILE}"]
    own = {launch.RUN_DIR: str(run_dir(job)), launch.TOKEN_DIGEST: token_digest}
    probe = {"httpGet": {"path": "/healthz", "port": PORT}}
    container = {
        **_container(names.COORDINATOR, images.operator, command),
        "env": [
            *_from_fields({launch.POD: "metadata.uid"}),
            *_literal(HOME | own),
            _token(job),
            *_bucket_env(job, names.COORDINATOR, [] if spec.tracking.mlflow is None else spec.tracking.mlflow.env),
            *_tracking_env(job, images, launch.POD, launch.TOKEN, *HOME, *own),
            *_literal({OTLP_ENDPOINT: images.otlp_endpoint} if images.otlp_endpoint else {}),
        ],
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"}
            for name, port in {"http": PORT, "metrics": METRICS_PORT}.items()
        ],
        # Readiness drops 3 s after a hang; the kubelet restarts the container after a minute.
        "readinessProbe": {**probe, "periodSeconds": 1, "failureThreshold": 3},
        "livenessProbe": {**probe, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "resources": _coordinator_resources(job, images),
    }
    if spec.checkpoint.storage.bucket is not None:
        # The kubelet begins with the liveness probe when this one has succeeded.
        container["startupProbe"] = {**probe, "periodSeconds": 1, "failureThreshold": UPLOAD_START}
    container["volumeMounts"] = [*container["volumeMounts"], {"name": "job", "mountPath": JOB_FOLDER, "readOnly": True}]
    template = _template(job, names.COORDINATOR, container, images, COORDINATOR_SHARED_MEMORY)
    template["spec"]["volumes"].append({"name": "job", "configMap": {"name": names.job_file(job.metadata.name)}})
    # Nodes of workers are those that get lost, so the coordinator prefers others. If its node was lost and the
    # scheduler does not know that yet, the replacement goes elsewhere, because the old pod still counts there.
    its_forerunner = {
        "labelSelector": {"matchLabels": names.labels(job.metadata.name, names.COORDINATOR)},
        "topologyKey": "kubernetes.io/hostname",
    }
    # It also prefers a node without the operator, which replaces it: when both were lost with one node, the group
    # waited 53 s.
    its_operator = {
        "labelSelector": {"matchLabels": {names.ROLE: names.OPERATOR}},
        "namespaceSelector": {},
        "topologyKey": "kubernetes.io/hostname",
    }
    template["spec"]["affinity"] = {
        "nodeAffinity": _gpus(colocated),
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": weight, "podAffinityTerm": term}
                for weight, term in ((100, its_forerunner), (50, its_operator))
            ]
        },
    }
    if colocated:
        template = overlay(template, _selection(job))
    template = overlay(template, spec.coordinator.template)
    # When it crashes, its kubelet is the first to notice.
    template["spec"]["restartPolicy"] = "Always"
    return _labelled(template, job, names.COORDINATOR)


def worker(job: DistributedTrainingJob, uid: str, images: Images, endpoint: str) -> dict[str, Any]:
    """The pod template of a worker.

    Args:
        uid: of the job's object.
        endpoint: host:port of the coordinator; an IP address, so that no agent ever waits for DNS.
    """
    spec = job.spec
    command = launch.agent_command(job, endpoint, f"$({ADDRESS})", _shutdown_seconds(job), python=PYTHON)
    begin = command.index("--")
    command = command[:begin] + [_escaped(word) for word in command[begin:]]
    variables = {"OMP_NUM_THREADS": str(threads(job))} | launch.environment(job, run_dir(job), "")
    variables = _package_index(job, images, spec.trainer.env) | variables
    variables |= {launch.COORDINATOR: endpoint, launch.UID: incarnation(job, uid)} | _storage_variable(job)
    fields = {launch.REPLICA: "metadata.name", launch.NODE: "spec.nodeName", ADDRESS: "status.podIP"}
    container = {
        **_container(names.WORKER, spec.trainer.image or images.trainer, command),
        "env": [
            *_from_fields(fields),
            _token(job),
            *_literal(HOME | variables, fields, launch.TOKEN),
            *_bucket_env(job, names.WORKER, spec.trainer.env),
            *_from_elsewhere(spec.trainer.env, *fields, *variables, launch.TOKEN),
        ],
        "resources": spec.workers.resources,
    }
    template = overlay(
        _template(job, names.WORKER, container, images, _shared_memory_size(spec.workers.asked)), spec.workers.template
    )
    # Failures are counted by pod, so a container is never restarted in place.
    template["spec"]["restartPolicy"] = "Never"
    return _labelled(template, job, names.WORKER)


def evaluator(
    job: DistributedTrainingJob, uid: str, images: Images, colocated: bool, on_cpus: bool = False
) -> dict[str, Any]:
    """The pod template of an evaluator. Without GPUs it prefers nodes that have none.

    Args:
        uid: of the job's object.
        colocated: it has to run where workers can run, because its volume is there.
        on_cpus: it gets no GPUs, whatever the job asks for.
    """
    own_gpu = job.spec.workers.gpu_resource
    evaluation, gpu_count = job.spec.evaluation, 0 if on_cpus else job.spec.evaluator_gpus
    command = launch.evaluators_command(evaluation.processes_per_replica, python=PYTHON)
    fields = {launch.REPLICA: "metadata.name"}
    own = {launch.UID: incarnation(job, uid)} | _storage_variable(job)
    own |= {launch.EVALUATOR_GPUS: str(gpu_count)} if gpu_count else NO_GPU
    specified = [*job.spec.trainer.env, *evaluation.env]
    index = _package_index(job, images, specified)
    variables = index | HOME | {"OMP_NUM_THREADS": "1"} | launch.evaluator_environment(job, run_dir(job), "") | own
    container = {
        # The evaluators' own image may have a torch for CPUs.
        **_container(names.EVALUATOR, evaluation.image or (images.trainer if gpu_count else images.evaluator), command),
        "env": [
            *_from_fields(fields),
            *_literal(variables, fields),
            *_bucket_env(job, names.EVALUATOR, specified),
            *_from_elsewhere(specified, *fields, *variables),
        ],
        "resources": evaluation.resources,
    }
    base = _template(job, names.EVALUATOR, container, images, _shared_memory_size(evaluation.resources))
    base["spec"]["affinity"] = {"nodeAffinity": _gpus(colocated or gpu_count > 0)}
    template = overlay(overlay(base, _selection(job)) if colocated else base, evaluation.template)
    template["spec"]["restartPolicy"] = "Never"
    if not gpu_count:
        # Last of all, because the user's template may request GPUs, too.
        template["spec"]["containers"] = [
            _without_gpus(container, own_gpu) for container in template["spec"].get("containers") or []
        ]
    return _labelled(template, job, names.EVALUATOR)


def away_from(affinity: Mapping[str, Any], nodes: Sequence[str], rather_not: Sequence[str] = ()) -> dict[str, Any]:
    """Add nodes to avoid to an affinity, whatever labels they have.

    Args:
        rather_not: nodes to avoid if any other has room.
    """
    node_affinity = dict(affinity.get("nodeAffinity") or {})
    if nodes:
        required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
        # Terms are alternatives, so each of them has to exclude the nodes.
        terms = [
            {**(term or {}), "matchFields": [*((term or {}).get("matchFields") or []), *_off(nodes)]}
            for term in required.get("nodeSelectorTerms") or [{}]
        ]
        node_affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    if rather_not:
        preferred = node_affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or []
        preference = {"weight": 100, "preference": {"matchFields": _off(rather_not)}}
        node_affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [*preferred, preference]
    return {**affinity, "nodeAffinity": node_affinity}


def _off(nodes: Sequence[str]) -> list[dict[str, Any]]:
    return [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in nodes]


def _shutdown_seconds(job: DistributedTrainingJob) -> int:
    """Seconds between SIGTERM and SIGKILL of ranks. A checkpoint that takes long to write needs a longer grace period;
    ranks get whatever is more than the default."""
    grace = (job.spec.workers.template.get("spec") or {}).get("terminationGracePeriodSeconds")
    longer = grace - _grace(job, names.WORKER) if isinstance(grace, int) else 0
    return launch.SHUTDOWN_SECONDS + max(0, longer)


def _uploads(job: DistributedTrainingJob, role: str) -> bool:
    """Whether the pods of a role bring something into the job's bucket."""
    storage = job.spec.checkpoint.storage
    return storage.bucket is not None and (role == names.COORDINATOR or not storage.shared)


def _grace(job: DistributedTrainingJob, role: str) -> int:
    """Seconds between SIGTERM and SIGKILL of a pod, unless a template sets them."""
    if _uploads(job, role):
        return UPLOAD_GRACE
    is_tracked = role == names.COORDINATOR and job.spec.tracking.mlflow is not None
    return TRACKING_GRACE if is_tracked else GRACE[role]


def _storage_variable(job: DistributedTrainingJob) -> dict[str, str]:
    """The variable by which workers and evaluators without a shared directory find the bucket: the job's record is
    there, too."""
    storage = job.spec.checkpoint.storage
    return {} if storage.shared else {launch.STORAGE: json.dumps(storage.dump_brief())}


def threads(job: DistributedTrainingJob) -> int:
    """Threads of each rank on CPUs: its share of the pod's CPUs, and 1 if those are not specified. By default torch
    takes as many as the node has cores, whatever the pod may use, and they slow each other down."""
    resources = job.spec.workers.asked
    requested = {**resources["requests"], **resources["limits"]}.get("cpu")
    try:
        cores = Decimal(0) if requested is None else min(parse_quantity(str(requested)), Decimal(MAX_CORES))  # type: ignore[no-untyped-call]
    except ValueError:
        # A template may hold anything, and the API server refuses the pod in words.
        cores = Decimal(0)
    return max(1, int(cores / job.spec.workers.processes))


def _without_gpus(container: Any, own: str | None) -> Any:
    """An evaluator's container without GPUs."""
    if not isinstance(container, dict) or container.get("name") != names.EVALUATOR:
        return container
    # Besides amounts there are claims, a list, whose devices are not known here.
    resources = {
        part: {name: amount for name, amount in amounts.items() if not is_gpu(name, own)}
        if isinstance(amounts, dict)
        else amounts
        for part, amounts in (container.get("resources") or {}).items()
    }
    return {**container, "resources": resources}


def _coordinator_resources(job: DistributedTrainingJob, images: Images) -> dict[str, Any]:
    """Resources of the coordinator. A resource that the job specifies gets no default, neither as a request nor as a
    limit: the two need not fit together."""
    specified: ResourceMap = {str(part): amounts for part, amounts in job.spec.coordinator.resources.items()}
    specified_names = {name for amounts in specified.values() for name in amounts}
    memory = COORDINATOR_MEMORY + RANK_MEMORY * job.spec.workers.most * job.spec.workers.processes
    memory += 0 if job.spec.tracking.mlflow is None else TRACKING_MEMORY
    memory += 0 if job.spec.checkpoint.storage.bucket is None else UPLOAD_MEMORY
    memory += TRACING_MEMORY if images.otlp_endpoint else 0
    defaults = {"requests": COORDINATOR_REQUESTS, "limits": {"memory": f"{memory:.0f}Mi"}}
    return {
        part: {
            **{name: amount for name, amount in amounts.items() if name not in specified_names},
            **specified.get(part, {}),
        }
        for part, amounts in defaults.items()
    }


def _shared_memory_size(resources: ResourceMap) -> str:
    """Size limit of a pod's /dev/shm: its memory limit, which that counts against."""
    amounts = {**resources.get("requests", {}), **resources.get("limits", {})}
    return str(amounts.get("memory", SHARED_MEMORY))


def _gpus(with_gpus: bool) -> dict[str, Any]:
    """Node affinity that prefers nodes with GPUs, or nodes without."""
    if with_gpus:
        terms = [{"matchExpressions": [{"key": label, "operator": "Exists"}]} for label in GPU_NODES]
        preferred = [{"weight": 100, "preference": term} for term in terms]
    else:
        without = [{"key": label, "operator": "DoesNotExist"} for label in GPU_NODES]
        preferred = [{"weight": 100, "preference": {"matchExpressions": without}}]
    return {"preferredDuringSchedulingIgnoredDuringExecution": preferred}


def _selection(job: DistributedTrainingJob) -> dict[str, Any]:
    """The part of a template that selects the nodes of a job's workers."""
    workers = job.spec.workers
    pod_spec = workers.template.get("spec") or {}
    # An admission plugin adds tolerations to a pod that requests GPUs, and not to other pods.
    tolerations = [{"key": name, "operator": "Exists"} for name in gpus(workers.asked, workers.gpu_resource)]
    spec: dict[str, Any] = {"tolerations": [*(pod_spec.get("tolerations") or []), *tolerations]}
    if selector := pod_spec.get("nodeSelector"):
        spec["nodeSelector"] = selector
    if affinity := (pod_spec.get("affinity") or {}).get("nodeAffinity"):
        spec["affinity"] = {"nodeAffinity": affinity}
    return {"spec": spec}


def _template(
    job: DistributedTrainingJob, role: str, container: Mapping[str, Any], images: Images, shared_memory: str
) -> dict[str, Any]:
    policy = job.spec.run_policy
    storage = job.spec.checkpoint.storage
    claim = {"claimName": storage.claim_name or names.checkpoints(job.metadata.name)}
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # All images are for Linux, and Windows nodes need not have a taint.
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "terminationGracePeriodSeconds": _grace(job, role),
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
        + [dict(toleration) for toleration in images.tolerations],
        "containers": [dict(container) | ({"imagePullPolicy": images.pull_policy} if images.pull_policy else {})],
        "volumes": [
            {"name": "checkpoints", **({"persistentVolumeClaim": claim} if storage.shared else {"emptyDir": {}})},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
        ],
    }
    if images.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in images.pull_secrets]
    of_role = job.spec.evaluation.priority_class_name if role == names.EVALUATOR else None
    if priority_class := of_role or policy.priority_class_name:
        spec["priorityClassName"] = priority_class
    if policy.scheduler_name:
        spec["schedulerName"] = policy.scheduler_name
    return {"metadata": {"labels": names.labels(job.metadata.name, role)}, "spec": spec}


def _container(role: str, image: str, command: list[str]) -> dict[str, Any]:
    return {
        "name": role,
        "image": image,
        # `args` and not `command`, because the image's entry point reaps orphaned processes.
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


def _from_fields(fields: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]


def _escaped(text: str) -> str:
    """Escape text that the user wrote: in commands and variables Kubernetes expands $(NAME), and makes one $ of $$."""
    return text.replace("$", "$$")


def _literal(variables: Mapping[str, str], fields: Iterable[str] = (), *more: str) -> list[dict[str, str]]:
    """Variables with literal values, without those that are set otherwise."""
    elsewhere = {*fields, *more}
    return [{"name": name, "value": _escaped(value)} for name, value in variables.items() if name not in elsewhere]


def _package_index(job: DistributedTrainingJob, images: Images, variables: Iterable[EnvVar]) -> dict[str, str]:
    """Variable of the package index, unless the job sets it itself, which may be with a password from a Secret."""
    if (
        not images.package_index
        or job.spec.trainer.code is None
        or any(variable.name == PIP_INDEX for variable in variables)
    ):
        return {}
    return {PIP_INDEX: images.package_index}


def _bucket_env(job: DistributedTrainingJob, role: str, specified: Iterable[EnvVar]) -> list[dict[str, Any]]:
    """Credentials of the job's bucket, in pods that need them.

    Args:
        specified: the job's own variables of these pods, which come first.
    """
    secret, elsewhere = job.spec.checkpoint.storage.credentials_secret, {variable.name for variable in specified}
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name, "optional": True}}}
        for name in BUCKET_CREDENTIALS
        if secret is not None and _uploads(job, role) and name not in elsewhere
    ]


def _tracking_env(job: DistributedTrainingJob, images: Images, *reserved: str) -> list[dict[str, Any]]:
    """Environment of the process beside the coordinator that sends to MLflow: the server's address, and credentials.
    Literal values of the job are read from the job itself."""
    if (mlflow := job.spec.tracking.mlflow) is None:
        return []
    is_named = any(variable.name == URI for variable in mlflow.env)
    own = {} if is_named or not images.mlflow_uri else {URI: images.mlflow_uri}
    return [*_literal(own), *_from_elsewhere(mlflow.env, *reserved)]


def _from_elsewhere(variables: Iterable[EnvVar], *reserved: str) -> list[dict[str, Any]]:
    """Variables whose values are in other objects, without those that the operator sets itself."""
    sources = {
        variable.name: variable.value_from
        for variable in variables
        if variable.value_from is not None and variable.name not in reserved
    }
    return [{"name": name, "valueFrom": source.dump()} for name, source in sources.items()]
