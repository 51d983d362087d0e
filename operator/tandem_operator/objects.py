"""The complete objects of a job, as they are sent to the API server. Pure."""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.job import API_VERSION, KIND, DistributedTrainingJob
from tandem.launch import INCARNATION
from tandem_operator import kinds, names, pods
from tandem_operator.kinds import Kind
from tandem_operator.observed import PodGroup
from tandem_operator.pods import Images
from tandem_operator.replicas import New
from tandem_operator.reporting import Notice
from tandem_operator.retry import incarnation

DEFAULT_SIZE = "10Gi"
MAX_WORDS = 1024
"""Characters of an Event's message; the API server takes no more."""

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Volumes:
    """What claims ask for where their job leaves it open."""

    class_name: str = ""
    """Storage class; empty: the cluster's default."""
    access_modes: tuple[str, ...] = ("ReadWriteMany",)
    size: str = DEFAULT_SIZE


@dataclass(frozen=True)
class Peers:
    """Who may reach pods of a job besides those, each as a NetworkPolicy's `from` has it."""

    operator: tuple[Manifest, ...]
    """Asks coordinators how the job is, on their port. Not empty: to a policy that would be everybody."""
    metrics: tuple[Manifest, ...] = ()
    """Reads the numbers of coordinators; nobody if empty."""


def secret(job: DistributedTrainingJob, uid: str, token: str) -> Manifest:
    """The job's token, for its pods and for people.

    Never changed, but not immutable: a kubelet that knows an immutable Secret does not look again while a pod of its
    node has it, so that a job made again under its name was given the token of the last one.
    """
    name = names.token(job.metadata.name)
    data = {"token": base64.b64encode(token.encode()).decode()}
    return _object(kinds.SECRET, job, uid, name, {"type": "Opaque", "data": data})


def job_file(job: DistributedTrainingJob, uid: str) -> Manifest:
    """The resolved job, for the coordinator, which writes it into the run directory."""
    text = json.dumps(resolved(job, uid), indent=1)
    manifest = _object(kinds.CONFIG_MAP, job, uid, names.job_file(job.metadata.name), {"data": {pods.JOB_FILE: text}})
    manifest["metadata"]["annotations"][names.PROCESSES] = str(job.spec.workers.processes)
    return manifest


def claim(job: DistributedTrainingJob, uid: str) -> Manifest:
    """The claim on the job's volume, as far as the job says. Without an owner it outlives the job."""
    storage = job.spec.checkpoint.storage
    spec: dict[str, Any] = {"resources": {"requests": {"storage": storage.size or DEFAULT_SIZE}}}
    if storage.access_modes is not None:
        spec["accessModes"] = list(storage.access_modes)
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    owner = "" if storage.retain else uid
    return _object(kinds.CLAIM, job, owner, names.checkpoints(job.metadata.name), {"spec": spec})


def is_on_one_node(job: DistributedTrainingJob, volumes: Volumes) -> bool:
    """Whether the claim that is made for a job can be mounted on one node at a time: then that is to be one on which
    workers can run, whichever of the job's pods is placed first."""
    storage = job.spec.checkpoint.storage
    return storage.claim_name is None and "ReadWriteMany" not in (storage.access_modes or volumes.access_modes)


def completed(manifest: Manifest, job: DistributedTrainingJob, volumes: Volumes) -> Manifest:
    """An object as it is made first: a claim asks for what its job leaves open, too.

    That cannot be changed later, so it is no part of the hash: claims stay when the operator is told something else.
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
    """An address for the coordinator that stays when its pod does not."""
    name = names.coordinator(job.metadata.name)
    # By its UID, too: the coordinator of an earlier job of that name may still be about to go.
    selector = {names.JOB: job.metadata.name, names.ROLE: names.COORDINATOR, INCARNATION: uid}
    port = {"name": "http", "port": pods.PORT, "targetPort": pods.PORT, "protocol": "TCP"}
    return _object(kinds.SERVICE, job, uid, name, {"spec": {"selector": selector, "ports": [port]}})


def network_policy(job: DistributedTrainingJob, uid: str, peers: Peers) -> Manifest:
    """Who reaches the job's pods: they reach each other, and few others reach a port. Whom they reach stays open."""
    own = {"podSelector": {"matchLabels": {names.JOB: job.metadata.name}}}
    ingress: list[Manifest] = [{"from": [own]}]
    for others, port in ((peers.operator, pods.PORT), (peers.metrics, pods.METRICS_PORT)):
        # Without anybody in its `from`, a rule is for everybody.
        if others:
            ingress.append({"from": list(others), "ports": [{"port": port, "protocol": "TCP"}]})
    spec = {**own, "policyTypes": ["Ingress"], "ingress": ingress}
    return _object(kinds.NETWORK_POLICY, job, uid, names.network_policy(job.metadata.name), {"spec": spec})


@dataclass(frozen=True)
class Template:
    """What all pods of a role of one job have in common. A job may have hundreds of them, and a template of the user's
    own thousands of entries: it is merged once."""

    body: Manifest
    """Not to be changed."""
    digest: str = ""
    """A hash of what coordinators and evaluators are, and of what of the job a coordinator reads at its start alone:
    where that changes, others take their places."""


def coordinator_template(
    job: DistributedTrainingJob, images: Images, token_digest: str = "", follows: bool = False
) -> Template:
    """What the coordinator is.

    Args:
        token_digest: by which it knows the operator.
        follows: it has to be where workers can be, for its volume is there.
    """
    body = pods.coordinator(job, images, token_digest, follows)
    return Template(body, digest([body, _read_at_the_start(job)]))


def evaluator_template(job: DistributedTrainingJob, uid: str, images: Images, follows: bool = False) -> Template:
    """What evaluators are.

    Args:
        follows: they have to be where workers can be, for their volume is there.
    """
    body = pods.evaluator(job, uid, images, follows)
    return Template(body, digest(body))


def worker_template(job: DistributedTrainingJob, uid: str, images: Images, endpoint: str) -> Template:
    """What workers are.

    Args:
        endpoint: host:port of the coordinator.
    """
    return Template(pods.worker(job, uid, images, endpoint))


def coordinator(job: DistributedTrainingJob, uid: str, template: Template, new: New, entropy: str) -> Manifest:
    """The coordinator's pod.

    Args:
        new: the failures before it.
        entropy: makes its name unique.
    """
    asked = {names.TEMPLATE: template.digest}
    return _pod(job, uid, names.COORDINATOR, template.body, new, entropy, {INCARNATION: uid}, asked)


def worker(
    job: DistributedTrainingJob,
    uid: str,
    template: Template,
    endpoint: str,
    group: PodGroup | None,
    new: New,
    entropy: str,
) -> Manifest:
    """One worker pod.

    Args:
        endpoint: host:port of the coordinator.
        group: with whom it is queued.
        new: its place, and the failures there before it.
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
    if group is not None:
        labels = {names.QUEUE: group.queue, names.GROUP: group.name}
        annotations |= {names.GROUP_SIZE: str(group.size), names.RETRIABLE: "false"}
    return _pod(job, uid, names.WORKER, body, new, entropy, labels, annotations)


def evaluator(job: DistributedTrainingJob, uid: str, template: Template, new: New, entropy: str) -> Manifest:
    """One evaluator pod.

    Args:
        new: its place, and the failures there before it.
        entropy: makes its name unique.
    """
    return _pod(job, uid, names.EVALUATOR, template.body, new, entropy, {}, {names.TEMPLATE: template.digest})


def _pod(
    job: DistributedTrainingJob,
    uid: str,
    role: str,
    template: Manifest,
    new: New,
    entropy: str,
    labels: dict[str, str],
    annotations: dict[str, str],
) -> Manifest:
    metadata = _metadata(job, uid, names.pod(job.metadata.name, role, new.index, entropy))
    given = template["metadata"]
    metadata["labels"] |= {**given["labels"], names.INDEX: str(new.index), **labels}
    metadata["annotations"] = {**given.get("annotations", {}), names.FAILURES: str(new.failures), **annotations}
    return {"apiVersion": kinds.POD.api, "kind": kinds.POD.name, "metadata": metadata, "spec": template["spec"]}


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
        "message": notice.message[:MAX_WORDS],
        "type": "Warning" if notice.warning else "Normal",
        "source": {"component": "tandem-operator"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def resolved(job: DistributedTrainingJob, uid: str) -> Manifest:
    """The job as the other processes read it, without the defaults, which they know; and which object it is."""
    annotations = {INCARNATION: incarnation(job, uid)}
    metadata = {"name": job.metadata.name, "namespace": job.metadata.namespace, "annotations": annotations}
    return {"apiVersion": job.api_version, "kind": job.kind, "metadata": metadata, "spec": job.spec.dump_brief()}


def digest(value: object) -> str:
    """A hash of JSON, the same for the same content."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def applied(manifest: Mapping[str, Any]) -> str:
    """What the operator wants of an object, as a hash that the object carries."""
    return str(manifest["metadata"]["annotations"][names.APPLIED])


def _read_at_the_start(job: DistributedTrainingJob) -> Manifest:
    """How many replicas are wished for, the coordinator is told while it runs."""
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
