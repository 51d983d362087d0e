"""Manifests of a job's objects, as they are sent to the API server. Pure."""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.job.resource import API_VERSION, KIND, DistributedTrainingJob
from tandem.processes.launch import SUBMITTED_ANNOTATION, UID_ANNOTATION
from tandem_operator import kinds, names, pods
from tandem_operator.kinds import Kind
from tandem_operator.observed import PodGroup
from tandem_operator.pods import Images
from tandem_operator.replicas import NewPod
from tandem_operator.reporting import KubeEvent
from tandem_operator.retry import incarnation
from tandem_operator.workloads import NewWorkload, NodePlacement

DEFAULT_SIZE = "10Gi"
MAX_MESSAGE_LENGTH = 1024
"""Maximum length of an Event's message, in characters; the API server accepts no more."""

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Volumes:
    """Defaults of claims whose job does not specify them."""

    class_name: str = ""
    """Storage class; empty: the cluster's default."""
    access_modes: tuple[str, ...] = ("ReadWriteMany",)
    size: str = DEFAULT_SIZE


@dataclass(frozen=True)
class Peers:
    """Peers, besides the job's own pods, that may reach its pods, each as in the `from` of a NetworkPolicy."""

    operator: tuple[Manifest, ...]
    """Peers that poll coordinators on their port. Not empty: to a policy that would mean everybody."""
    metrics: tuple[Manifest, ...] = ()
    """Peers that scrape the metrics of coordinators; none if empty."""


def secret(job: DistributedTrainingJob, uid: str, token: str) -> Manifest:
    """The Secret with the job's token, for its pods and for people.

    It never changes, but is not immutable: a kubelet does not read an immutable Secret again while a pod of its
    node has it, so that a job recreated under its name got the token of the last one.
    """
    name = names.token(job.metadata.name)
    data = {"token": base64.b64encode(token.encode()).decode()}
    return _object(kinds.SECRET, job, uid, name, {"type": "Opaque", "data": data})


def job_file(job: DistributedTrainingJob, uid: str) -> Manifest:
    """The ConfigMap with the resolved job, which the coordinator writes into the run directory."""
    text = json.dumps(resolved(job, uid), indent=1)
    manifest = _object(kinds.CONFIG_MAP, job, uid, names.job_file(job.metadata.name), {"data": {pods.JOB_FILE: text}})
    manifest["metadata"]["annotations"][names.PROCESSES] = str(job.spec.workers.processes)
    return manifest


def claim(job: DistributedTrainingJob, uid: str) -> Manifest:
    """The claim on the job's volume, with the fields that the job specifies. Without an owner it outlives the job."""
    storage = job.spec.checkpoint.storage
    spec: dict[str, Any] = {"resources": {"requests": {"storage": storage.size or DEFAULT_SIZE}}}
    if storage.access_modes is not None:
        spec["accessModes"] = list(storage.access_modes)
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    owner = "" if storage.retain else uid
    return _object(kinds.CLAIM, job, owner, names.checkpoints(job.metadata.name), {"spec": spec})


def is_on_one_node(job: DistributedTrainingJob, volumes: Volumes) -> bool:
    """Whether a job's claim can be mounted on one node at a time: then all pods have to go to a node on which workers
    can run, whichever of them is placed first."""
    storage = job.spec.checkpoint.storage
    return (
        storage.shared
        and storage.claim_name is None
        and "ReadWriteMany" not in (storage.access_modes or volumes.access_modes)
    )


def completed(manifest: Manifest, job: DistributedTrainingJob, volumes: Volumes) -> Manifest:
    """A manifest as it is first created: a claim gets defaults for the fields that its job leaves open.

    That cannot be changed later, so it is no part of the hash: existing claims stay when the defaults change.
    """
    if manifest["kind"] != kinds.CLAIM.name:
        return manifest
    open_: Manifest = {"accessModes": list(volumes.access_modes)}
    if volumes.class_name:
        open_["storageClassName"] = volumes.class_name
    spec = {**open_, **manifest["spec"]}
    if job.spec.checkpoint.storage.size is None:
        spec["resources"] = {"requests": {"storage": volumes.size}}
    return {**manifest, "spec": spec}


def service(job: DistributedTrainingJob, uid: str) -> Manifest:
    """The coordinator's Service: an address that outlives the pod."""
    name = names.coordinator(job.metadata.name)
    # The selector includes the UID: the coordinator of an earlier job of that name may still be terminating.
    selector = {names.JOB: job.metadata.name, names.ROLE: names.COORDINATOR, UID_ANNOTATION: uid}
    port = {"name": "http", "port": pods.PORT, "targetPort": pods.PORT, "protocol": "TCP"}
    return _object(kinds.SERVICE, job, uid, name, {"spec": {"selector": selector, "ports": [port]}})


def network_policy(job: DistributedTrainingJob, uid: str, peers: Peers) -> Manifest:
    """The NetworkPolicy of the job's pods: they may reach each other, and few other peers reach a port. Egress is not
    restricted."""
    own = {"podSelector": {"matchLabels": {names.JOB: job.metadata.name}}}
    ingress: list[Manifest] = [{"from": [own]}]
    for peer_group, port in ((peers.operator, pods.PORT), (peers.metrics, pods.METRICS_PORT)):
        # A rule with an empty `from` would apply to everybody.
        if peer_group:
            ingress.append({"from": list(peer_group), "ports": [{"port": port, "protocol": "TCP"}]})
    spec = {**own, "policyTypes": ["Ingress"], "ingress": ingress}
    return _object(kinds.NETWORK_POLICY, job, uid, names.network_policy(job.metadata.name), {"spec": spec})


@dataclass(frozen=True)
class Template:
    """The common part of all pods of a role of one job. A job may have hundreds of them, and a user's template
    thousands of entries: it is merged once."""

    body: Manifest
    """Not to be changed."""
    digest: str = ""
    """Hash of the template of coordinators and evaluators, and of the parts of the job that a coordinator reads only at
    its start: a change replaces their pods."""


def coordinator_template(
    job: DistributedTrainingJob, images: Images, token_digest: str = "", colocated: bool = False
) -> Template:
    """The template of the coordinator.

    Args:
        token_digest: the digest by which it recognizes the operator.
        colocated: it has to run where workers can run, because its volume is there.
    """
    body = pods.coordinator(job, images, token_digest, colocated)
    return Template(body, digest([body, _restart_fields(job)]))


def evaluator_template(
    job: DistributedTrainingJob, uid: str, images: Images, colocated: bool = False, on_cpus: bool = False
) -> Template:
    """The template of evaluators.

    Args:
        colocated: they have to run where workers can run, because their volume is there.
        on_cpus: they get no GPUs, whatever the job asks for.
    """
    body = pods.evaluator(job, uid, images, colocated, on_cpus)
    return Template(body, digest(body))


def worker_template(job: DistributedTrainingJob, uid: str, images: Images, endpoint: str) -> Template:
    """The template of workers.

    Args:
        endpoint: host:port of the coordinator.
    """
    return Template(pods.worker(job, uid, images, endpoint))


def coordinator(job: DistributedTrainingJob, uid: str, template: Template, new: NewPod, entropy: str) -> Manifest:
    """The coordinator's pod.

    Args:
        new: its index, and the failures before it.
        entropy: makes its name unique.
    """
    annotations = {names.TEMPLATE: template.digest}
    return _pod(job, uid, names.COORDINATOR, template.body, new, entropy, {UID_ANNOTATION: uid}, annotations)


def worker(
    job: DistributedTrainingJob,
    uid: str,
    template: Template,
    endpoint: str,
    queued: PodGroup | NodePlacement | None,
    new: NewPod,
    entropy: str,
) -> Manifest:
    """One worker pod.

    Args:
        endpoint: host:port of the coordinator.
        queued: the group that it is queued in, or where the queue that has admitted it lets it run.
        new: its index, and the failures before it.
        entropy: makes its name unique.
    """
    labels, annotations, body = {}, {names.ENDPOINT: endpoint}, template.body
    if new.avoids:
        annotations[names.AVOIDS] = ",".join(new.avoids)
    if new.failed_on:
        annotations[names.FAILED_ON] = ",".join(new.failed_on)
    if new.avoids or new.shuns:
        affinity = pods.away_from(body["spec"].get("affinity") or {}, new.avoids, new.shuns)
        body = {**body, "spec": {**body["spec"], "affinity": affinity}}
    if isinstance(queued, PodGroup):
        labels = {names.QUEUE: queued.queue, names.GROUP: queued.name}
        annotations |= {names.GROUP_SIZE: str(queued.size), names.RETRIABLE: "false"}
    elif queued is not None:
        labels, annotations = {**queued.labels}, {**queued.annotations, **annotations}
        spec = body["spec"]
        selector = {**spec.get("nodeSelector", {}), **queued.node_selector}
        tolerations = [*spec.get("tolerations", []), *queued.tolerations]
        body = {**body, "spec": {**spec, "nodeSelector": selector, "tolerations": tolerations}}
    return _pod(job, uid, names.WORKER, body, new, entropy, labels, annotations)


def evaluator(job: DistributedTrainingJob, uid: str, template: Template, new: NewPod, entropy: str) -> Manifest:
    """One evaluator pod.

    Args:
        new: its index, and the failures before it.
        entropy: makes its name unique.
    """
    return _pod(job, uid, names.EVALUATOR, template.body, new, entropy, {}, {names.TEMPLATE: template.digest})


def _pod(
    job: DistributedTrainingJob,
    uid: str,
    role: str,
    template: Manifest,
    new: NewPod,
    entropy: str,
    labels: dict[str, str],
    annotations: dict[str, str],
) -> Manifest:
    metadata = _metadata(job, uid, names.pod(job.metadata.name, role, new.index, entropy))
    template_metadata = template["metadata"]
    metadata["labels"] |= {**template_metadata["labels"], names.INDEX: str(new.index), **labels}
    metadata["annotations"] = {
        **template_metadata.get("annotations", {}),
        names.FAILURES: str(new.failures),
        **annotations,
    }
    return {"apiVersion": kinds.POD.api, "kind": kinds.POD.name, "metadata": metadata, "spec": template["spec"]}


def event(about: Mapping[str, Any], notice: KubeEvent, now: str, entropy: str) -> Manifest:
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
        "message": notice.message[:MAX_MESSAGE_LENGTH],
        "type": "Warning" if notice.warning else "Normal",
        "source": {"component": "tandem-operator"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def resolved(job: DistributedTrainingJob, uid: str) -> Manifest:
    """The job as other processes read it, without defaults, and with its incarnation and the time of its submission."""
    annotations = {UID_ANNOTATION: incarnation(job, uid)}
    if job.metadata.creation_timestamp is not None:
        annotations[SUBMITTED_ANNOTATION] = job.metadata.creation_timestamp
    metadata = {"name": job.metadata.name, "namespace": job.metadata.namespace, "annotations": annotations}
    return {"apiVersion": job.api_version, "kind": job.kind, "metadata": metadata, "spec": job.spec.dump_brief()}


def workload(
    job: DistributedTrainingJob, uid: str, new: NewWorkload, template: Mapping[str, Any], digest: str
) -> Manifest:
    """A Kueue Workload for some of the workers.

    Args:
        template: the part of their pods that Kueue counts.
        digest: hash of what all of the job's Workloads ask for.
    """
    pod_set = {"name": "workers", "count": len(new.indices), "template": {"spec": template}}
    spec = {
        "queueName": job.spec.run_policy.queue_name,
        "priority": new.priority,
        "active": True,
        "podSets": [pod_set],
    }
    manifest = _object(kinds.WORKLOAD, job, uid, new.name, {"spec": spec})
    manifest["metadata"]["annotations"] = {names.APPLIED: digest, names.FIRST: str(new.indices.start)}
    return manifest


def digest(value: object) -> str:
    """Hash of a JSON value, equal for equal values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def applied(manifest: Mapping[str, Any]) -> str:
    """Hash of a manifest, as the object carries it."""
    return str(manifest["metadata"]["annotations"][names.APPLIED])


def _restart_fields(job: DistributedTrainingJob) -> Manifest:
    """The part of the job that a coordinator reads only at its start. It learns its replica target while it runs, so
    that is left out."""
    spec = job.spec.dump_brief()
    workers = {
        **spec.get("workers", {}),
        "maxReplicas": job.spec.workers.most,
        "replicas": 0,
        "processesPerReplica": job.spec.workers.processes,
        "template": {},
        "resources": {},
    }
    evaluators = {**job.spec.evaluation.dump_brief(), "template": {}, "resources": {}, "drainSeconds": 0}
    for placement in ("fallback", "fallbackAfterSeconds", "priorityClassName"):
        evaluators.pop(placement, None)
    return {**spec, "workers": workers, "evaluators": evaluators, "coordinator": {}, "runPolicy": {}}


def _object(kind: Kind, job: DistributedTrainingJob, uid: str, name: str, content: Manifest) -> Manifest:
    metadata = _metadata(job, uid, name)
    metadata["annotations"] = {names.APPLIED: digest(content)}
    return {"apiVersion": kind.api, "kind": kind.name, "metadata": metadata, **content}


def _metadata(job: DistributedTrainingJob, uid: str, name: str) -> Manifest:
    metadata: Manifest = {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": names.labels(job.metadata.name),
    }
    if uid:
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": job.metadata.name, "uid": uid}
        metadata["ownerReferences"] = [{**owner, "controller": True, "blockOwnerDeletion": False}]
    return metadata
