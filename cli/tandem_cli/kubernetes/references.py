"""The objects that a job refers to by name: its claim, queue, classes, Secrets and ConfigMaps.

The API server takes a job that refers to what is not there, and its pods then wait. `tandem submit --check` asks
beforehand, with the rights that the user has: what may not be read, or is of a kind that the cluster does not know, is
not mentioned.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.errors import Unmet
from tandem.job import DistributedTrainingJob
from tandem.manifest.fields import Path
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl

KEYS = 'go-template={{range $key, $value := .data}}{{$key}}{{"\\n"}}{{end}}'
"""The keys of a Secret or ConfigMap, without a value of it."""


@dataclass(frozen=True)
class Reference:
    """One object that a job needs and does not make."""

    field: Path
    """Where the manifest names it."""
    kind: str
    """For kubectl."""
    what: str
    """For people."""
    name: str
    key: str = ""
    """Which of its keys."""


def references(job: DistributedTrainingJob) -> Iterator[Reference]:
    """Everything that has to be there when the job's pods start."""
    storage, policy = job.spec.checkpoint.storage, job.spec.run_policy
    named = (
        (("checkpoint", "storage", "claimName"), "persistentvolumeclaims", "claim", storage.claim_name),
        (("checkpoint", "storage", "storageClassName"), "storageclasses", "storage class", storage.storage_class_name),
        (("runPolicy", "queueName"), "localqueues.kueue.x-k8s.io", "LocalQueue", policy.queue_name),
        (("runPolicy", "priorityClassName"), "priorityclasses", "priority class", policy.priority_class_name),
    )
    for field, kind, what, name in named:
        if name:
            yield Reference(("spec", *field), kind, what, name)
    for path, variable in job.spec.variables:
        source = variable.value_from
        if source is None or source.optional:
            continue
        place: Path = (*path, "valueFrom")
        if source.secret_key_ref is not None:
            one = source.secret_key_ref
            yield Reference((*place, "secretKeyRef", "name"), "secrets", "Secret", one.name, one.key)
        elif source.config_map_key_ref is not None:
            one = source.config_map_key_ref
            yield Reference((*place, "configMapKeyRef", "name"), "configmaps", "ConfigMap", one.name, one.key)


def missing(job: DistributedTrainingJob, kubectl: Kubectl) -> list[Unmet]:
    """What of it is not there, as far as this user may see."""
    where = f" in namespace {kubectl.namespace}" if kubectl.namespace else " in this namespace"
    found = []
    for one in references(job):
        try:
            asked = ("get", one.kind, one.name, "--ignore-not-found", "-o")
            is_there = bool(kubectl.ask(*asked, "name").text.strip())
            keys = kubectl.ask(*asked, KEYS).text.split() if is_there and one.key else []
        except ClusterError:
            continue
        if not is_there:
            place = "" if one.kind.endswith("classes") else where
            message = f"there is no {one.what} {one.name}{place}, and the job's pods would wait for it"
            found.append(Unmet(one.field, message))
        elif one.key and one.key not in keys:
            message = f"the {one.what} {one.name} has no key {one.key}, and the job's pods would wait for it"
            found.append(Unmet(one.field, message))
    return found
