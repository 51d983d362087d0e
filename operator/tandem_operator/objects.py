"""The objects of a job, whole, as they are sent to the API server. Pure."""

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tandem.job import API_VERSION, KIND, DistributedTrainingJob
from tandem.launch import INCARNATION
from tandem_operator import kinds, names, pods
from tandem_operator.kinds import Kind
from tandem_operator.pods import Images
from tandem_operator.reporting import Notice

DEFAULT_SIZE = "10Gi"
QUEUE = "kueue.x-k8s.io/queue-name"
POD_GROUP, POD_GROUP_SIZE = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
NEVER_GIVE_UP = 2**31 - 1
"""A failed evaluator is started again for as long as the job lives, by the Job controller with a growing pause."""

MOST_WORDS = 1024
"""Characters of an Event's message; the API server takes no more."""

Manifest = dict[str, Any]


def secret(job: DistributedTrainingJob, uid: str, token: str) -> Manifest:
    """The job's token. Made once and never changed."""
    name = names.token(job.metadata.name)
    data = {"token": base64.b64encode(token.encode()).decode()}
    return _object(kinds.SECRET, job, uid, name, {"type": "Opaque", "immutable": True, "data": data})


def job_file(job: DistributedTrainingJob, uid: str) -> Manifest:
    """The resolved job, for the coordinator, which writes it into the run directory."""
    text = json.dumps(resolved(job, uid), indent=1)
    return _object(kinds.CONFIG_MAP, job, uid, names.job_file(job.metadata.name), {"data": {pods.JOB_FILE: text}})


def claim(job: DistributedTrainingJob, uid: str) -> Manifest:
    """The claim on the job's volume. Without an owner it outlives the job."""
    storage = job.spec.checkpoint.storage
    spec: dict[str, Any] = {
        "accessModes": list(storage.access_modes),
        "resources": {"requests": {"storage": storage.size or DEFAULT_SIZE}},
    }
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    owner = "" if storage.retain else uid
    return _object(kinds.CLAIM, job, owner, names.checkpoints(job.metadata.name), {"spec": spec})


def service(job: DistributedTrainingJob, uid: str) -> Manifest:
    """An address for the coordinator that stays when its pod does not."""
    name = names.coordinator(job.metadata.name)
    selector = {names.JOB: job.metadata.name, names.ROLE: names.COORDINATOR}
    port = {"name": "http", "port": pods.PORT, "targetPort": pods.PORT, "protocol": "TCP"}
    return _object(kinds.SERVICE, job, uid, name, {"spec": {"selector": selector, "ports": [port]}})


def deployment(job: DistributedTrainingJob, uid: str, images: Images) -> Manifest:
    """The coordinator. It starts anew when something of the job has changed that it reads at its start alone."""
    name = names.coordinator(job.metadata.name)
    template = pods.coordinator(job, images)
    template["metadata"]["annotations"] = {names.APPLIED: digest(_read_at_the_start(job))}
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "revisionHistoryLimit": 0,
        "selector": {"matchLabels": {names.JOB: job.metadata.name, names.ROLE: names.COORDINATOR}},
        "template": template,
    }
    return _object(kinds.DEPLOYMENT, job, uid, name, {"spec": spec})


def worker(
    job: DistributedTrainingJob, uid: str, images: Images, endpoint: str, index: int, failures: int, entropy: str
) -> Manifest:
    """One worker pod.

    Args:
        endpoint: host:port of the coordinator.
        failures: forerunners in a row that failed soon after their start.
        entropy: makes its name unique.
    """
    template = pods.worker(job, images, endpoint)
    metadata = template["metadata"]
    labels = {**metadata["labels"], names.INDEX: str(index)}
    annotations = {
        **metadata.get("annotations", {}),
        names.FAILURES: str(failures),
        names.ENDPOINT: endpoint,
    }
    if queue := job.spec.run_policy.queue_name:
        labels |= {QUEUE: queue, POD_GROUP: names.stem(job.metadata.name)}
        annotations |= {POD_GROUP_SIZE: str(job.spec.workers.replicas)}
    whole = _object(kinds.POD, job, uid, names.worker(job.metadata.name, index, entropy), {"spec": template["spec"]})
    whole["metadata"] |= {"labels": {**whole["metadata"]["labels"], **labels}, "annotations": annotations}
    return whole


def evaluators(job: DistributedTrainingJob, uid: str, images: Images, suspend: bool) -> Manifest:
    """The evaluators, one index for each replica."""
    evaluation = job.spec.evaluation
    spec = {
        "completionMode": "Indexed",
        "completions": evaluation.replicas,
        "parallelism": evaluation.replicas,
        "backoffLimit": NEVER_GIVE_UP,
        "suspend": suspend,
        "template": pods.evaluator(job, images),
    }
    whole = _object(kinds.BATCH, job, uid, names.evaluator(job.metadata.name), {"spec": spec})
    whole["metadata"]["annotations"][names.TEMPLATE] = digest(spec["template"])
    return whole


def event(about: Mapping[str, Any], notice: Notice, now: str, entropy: str) -> Manifest:
    """An Event about a job.

    Args:
        about: the job's object.
        now: RFC 3339.
        entropy: makes its name unique.
    """
    metadata = about["metadata"]
    reference = {"apiVersion": about["apiVersion"], "kind": about["kind"]}
    reference |= {key: metadata[key] for key in ("namespace", "name", "uid", "resourceVersion")}
    name = f"{names.stem(metadata['name'])}.{entropy}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": metadata["namespace"], "name": name},
        "involvedObject": reference,
        "reason": notice.reason,
        "message": notice.message[:MOST_WORDS],
        "type": "Warning" if notice.warning else "Normal",
        "source": {"component": "tandem-operator"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def resolved(job: DistributedTrainingJob, uid: str) -> Manifest:
    """The job with all defaults, as the other processes read it, and which object it is."""
    annotations = {INCARNATION: uid}
    metadata = {"name": job.metadata.name, "namespace": job.metadata.namespace, "annotations": annotations}
    return {"apiVersion": job.api_version, "kind": job.kind, "metadata": metadata, "spec": job.spec.dump()}


def digest(value: object) -> str:
    """A hash of JSON, the same for the same content."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def applied(manifest: Mapping[str, Any]) -> str:
    """What the operator wants of an object, as a hash that the object carries."""
    return str(manifest["metadata"]["annotations"][names.APPLIED])


def template(manifest: Mapping[str, Any]) -> str:
    """A hash of what cannot be changed in the evaluators' Job."""
    return str(manifest["metadata"]["annotations"][names.TEMPLATE])


def _read_at_the_start(job: DistributedTrainingJob) -> Manifest:
    """How many replicas are wished for, the coordinator is told while it runs."""
    spec = job.spec.dump()
    workers = {**spec["workers"], "maxReplicas": job.spec.workers.most, "replicas": 0, "template": {}, "resources": {}}
    evaluators = {**job.spec.evaluation.dump(), "template": {}, "resources": {}}
    return {**spec, "workers": workers, "evaluators": evaluators, "runPolicy": {}}


def _object(kind: Kind, job: DistributedTrainingJob, uid: str, name: str, content: Manifest) -> Manifest:
    metadata: Manifest = {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": names.labels(job.metadata.name),
        "annotations": {names.APPLIED: digest(content)},
    }
    if uid:
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": job.metadata.name, "uid": uid}
        metadata["ownerReferences"] = [{**owner, "controller": True, "blockOwnerDeletion": False}]
    return {"apiVersion": kind.api, "kind": kind.name, "metadata": metadata, **content}
